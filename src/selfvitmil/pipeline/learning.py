"""Commands from vectors and slide labels to judged classifiers: `train`, `evaluate`, `compare`.

All three find the same cases (labelled slides with a sound feature file) and the same splits. `train` stops before any
test slide is opened; `evaluate` goes on to score them and writes one method's results; `compare` does so for many rows
and puts them into one table. Models that are current are used again, so each command picks up where another ended.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selfvitmil import formatting
from selfvitmil.cohort import Cohort, Split
from selfvitmil.engine import Engine
from selfvitmil.errors import ArtefactError, ConfigError, EncoderError, MetricError
from selfvitmil.pipeline.encoders import embed, embed_stage, encoder_name, features_name, split_features_name
from selfvitmil.pipeline.methods import TWO_SCALES, check_supervised, coarse_mpp, compared_methods, options_for
from selfvitmil.pipeline.pretraining import base_name, slides_of, split_encoders
from selfvitmil.pipeline.study import CohortSource, Summary, open_study, study_cohort
from selfvitmil.pipeline.training import make_models
from selfvitmil.settings import StudySettings, TrainSettings, tiling_name, to_toml
from selfvitmil.store.failures import read_failures, record_failures
from selfvitmil.store.files import write_text
from selfvitmil.store.layout import ENCODER_SLIDES_FILE, StudyLayout, model_folder

if TYPE_CHECKING:
    from selfvitmil.aggregate.train import BagStore
    from selfvitmil.encoder import Encoder
    from selfvitmil.evaluate import Cases, Fitted, MethodResult, Scores, Trial
    from selfvitmil.evaluate.models import Training

SECTIONS = {"preset", "tile", "train", "evaluate", "compare", "supervised"}
"""Settings that results depend on, saved beside them."""
SHOWN = ("auc", "accuracy", "balanced_accuracy", "sensitivity", "specificity", "f1", "pr_auc", "brier", "ece")
"""Figures that `evaluate` prints; metrics.json has them all."""
COMPARISON_FILES = ("table.csv", "table.md", "auc.svg")
"""What only comparisons have among their results."""
OPTIMISTIC_LINE = "OPTIMISTIC: epochs, thresholds and kinds of evidence are chosen on the test slides"
MEAN_COLOR, UNTRAINED = "mean_color", "untrained_"
"""Names of encoders that are there for comparison."""


@dataclass(frozen=True)
class FeatureChoice:
    """Which vectors to learn from."""

    encoder: str | None = None
    """An encoder of the study; none means the only one there is."""
    folder: Path | None = None
    """Feature files of another tool (or of ours) instead."""
    coarse_encoder: str | None = None
    """The encoder of the coarser scale, where it is another one."""
    two_scales: bool = False
    """Append to every vector that of the coarser tile around it (the first of tile.parent_mpp)."""


@dataclass(frozen=True)
class Features:
    """Feature files of one kind."""

    encoder: str
    tiling: str
    files: Mapping[str, Path]
    models: Path
    """Where models that learned from them go."""
    coarse: Any = None
    encoder_slides: frozenset[str] = frozenset()
    """Slides that their encoder was trained on, as far as is known."""
    by_split: Mapping[str, Features] = field(default_factory=dict)
    """Where every split has an encoder of its own: the features of each."""


# ---------------------------------------------------------------------------------------------------- commands


def train(study: Path, source: CohortSource, choice: FeatureChoice, settings: StudySettings, engine: Engine) -> Summary:
    """Train an aggregator on every split with every seed; writes `models/`. Test slides are not opened."""
    from selfvitmil.evaluate import seal

    with open_study(study, "train"):
        lines, cases, splits, features = prepare(study, source, choice, settings, "train")
        trial = seal(cases, splits, settings.evaluate)
        name = settings.train.aggregator
        fitted = _fit(name, cases, trial, settings.train, features.models / name, engine, score_test=False)
        write_text(features.models / name / "settings.toml", to_toml(settings, SECTIONS))
    table = [("split", "seed", "epoch", "validation AUC", "seconds", "")]
    table += [
        (run.split, str(run.seed), str(run.epoch), _validation_auc(run, trial), f"{run.seconds:.0f}", run.note)
        for run in fitted.runs
    ]
    lines += _evidence_lines(name, fitted)
    lines += [f"note: {warning}" for warning in (*trial.warnings, *_run_warnings(fitted))]
    lines.append(f"{len(fitted.runs)} models in {below(study, features.models / name)}; judge them with `evaluate`")
    return Summary(tuple(lines), cases.failures, tuple(table))


def evaluate(
    study: Path,
    source: CohortSource,
    choice: FeatureChoice,
    settings: StudySettings,
    engine: Engine,
    name: str | None = None,
) -> Summary:
    """Judge an aggregator on the test slides, training what is not there yet; writes `results/<name>/`."""
    from selfvitmil.evaluate import FINAL_SCORING, judge_method, score_method, seal, write_results
    from selfvitmil.evaluate.pictures import write_figures

    with open_study(study, "evaluate"):
        lines, cases, splits, features = prepare(study, source, choice, settings, "evaluate")
        method = settings.train.aggregator
        trial = seal(cases, splits, settings.evaluate)
        fitted = _fit(method, cases, trial, settings.train, features.models / method, engine)
        trial.labels.open(FINAL_SCORING)
        result = judge_method(fitted, trial)
        folder = StudyLayout(study).results(results_name(name or f"{features.encoder}_{method}", settings))
        scores = score_method(result, settings.evaluate)
        lines += _remove_earlier(folder, [result])
        write_results(folder, [result], [scores], settings.evaluate)
        histories = _histories(features.models / method, result)
        undrawn = write_figures(folder, result, settings.evaluate, histories)
        write_text(folder / "settings.toml", to_toml(settings, SECTIONS))
    lines += _evidence_lines(method, fitted)
    lines += [f"note: {warning}" for warning in (*result.warnings, *undrawn)]
    lines.append(f"predictions.csv, metrics.json and figures in {below(study, folder)}")
    return Summary(tuple(lines), cases.failures, _score_table(scores.to_json(), settings.evaluate.confidence))


def compare(
    study: Path,
    source: CohortSource,
    choice: FeatureChoice,
    settings: StudySettings,
    engine: Engine,
    name: str | None = None,
) -> Summary:
    """Judge many methods on the same slides and splits; writes `results/<name>/` with the table and its figure."""
    from selfvitmil.aggregate.train import BagStore
    from selfvitmil.evaluate import FINAL_SCORING, judge_method, score_method, write_results
    from selfvitmil.evaluate.simple_rows import better_simple_rows

    lines = _embed_baselines(study, choice, settings, engine)
    with open_study(study, "compare"):
        found, cases, splits, features = prepare(study, source, choice, settings, "compare")
        lines += found
        store = BagStore.of(settings.train)
        rows = _rows(study, choice, settings, cases, splits, features, store)
        asked = [(row.trial, training) for row in rows for training in row.trainings]
        _say_first(cases, {row.title: row.trainings[0].settings for row in rows if row.trainings})
        notes = make_models(asked, engine, store, _epoch_lines())
        fitted = [row.fit(notes) for row in rows]
        simple = better_simple_rows(fitted, rows[0].trial, settings.train.aggregator)
        for row in rows:  # all trainings are over: no label of a test slide was read so far
            row.trial.labels.open(FINAL_SCORING)
        results = [judge_method(each, row.trial) for each, row in zip(fitted, rows, strict=True)]
        scores = [score_method(result, settings.evaluate) for result in results]
        folder = StudyLayout(study).results(results_name(name or "compare", settings))
        lines += _remove_earlier(folder, results)
        write_results(folder, results, scores, settings.evaluate)
        advice = [row.words for row in simple]
        cells, notes = _write_table(study, folder, splits, results, scores, settings, advice)
        write_text(folder / "settings.toml", to_toml(settings, SECTIONS))
    lines += [*notes, f"table.csv, table.md, auc.svg, predictions.csv and metrics.json in {below(study, folder)}"]
    return Summary(tuple(lines), cases.failures, cells)


def _fit(
    name: str,
    cases: Cases,
    trial: Trial,
    train: TrainSettings,
    folder: Path,
    engine: Engine,
    *,
    score_test: bool = True,
) -> Fitted:
    """All trainings of one method, where that is quicker in several processes."""
    from selfvitmil.aggregate.train import BagStore
    from selfvitmil.evaluate import fit_method
    from selfvitmil.evaluate.models import trainings_of

    store, report = BagStore.of(train), _epoch_lines()
    _say_first(cases, {name: train})
    asked = [(trial, training) for training in trainings_of(name, trial, train, folder)]
    notes = make_models(asked, engine, store, report)
    return fit_method(name, trial, train, folder=folder, store=store, report=report, notes=notes, score_test=score_test)


def _evidence_lines(name: str, fitted: Fitted) -> list[str]:
    """Which kinds of evidence the splits chose, and why."""
    from selfvitmil.aggregate.evidence import evidence_words

    choices = {run.split: run.evidence for run in fitted.runs if run.evidence is not None}
    return [f"{name} looks for {text}" for text in evidence_words(list(choices.values()))]


def _say_first(cases: Cases, rows: Mapping[str, TrainSettings]) -> None:
    """Print, before anything is trained, what the user may want to change: a guessed positive class, and recipes.

    Of a published recipe, how far it follows its source; of any, what is known to go wrong with it.
    """
    from selfvitmil.aggregate.recipes import note_of, recipe_of, recipe_warnings

    lines = [cases.positive_line] if cases.positive_is_guessed else []
    for title, train in rows.items():
        note = note_of(train.aggregator, train, cases.dim)
        lines += [f"recipe of {title}: {note.words}"] if train.recipe != "default" else []
        lines += [f"warning: {title}: {text}" for text in recipe_warnings(recipe_of(train.aggregator, train))]
    for line in lines:
        print(line, file=sys.stderr, flush=True)


# ---------------------------------------------------------------------------------------------------- features


def prepare(
    study: Path, source: CohortSource, choice: FeatureChoice, settings: StudySettings, stage: str
) -> tuple[list[str], Cases, tuple[Split, ...], Features]:
    """Lines to print first, cases, splits and features; slides that are no cases are in failures.csv by then."""
    from selfvitmil.evaluate import make_splits
    from selfvitmil.evaluate.trial import find_transductive, transductive_words

    if settings.train.aggregator == TWO_SCALES and stage != "compare":
        choice = replace(choice, two_scales=True)
    cohort, lines = study_cohort(study, source)
    features = find_features(study, choice, settings)
    cases = _cases(cohort, features, stage, settings.train.positive)
    record_failures(study, stage, [row.slide for row in cohort.rows], cases.failures)
    splits = make_splits(cases, settings.train, settings.evaluate)
    _check_split_encoders(features, splits)
    seen = transductive_words(features.encoder, find_transductive(cases, splits), splits)
    _announce(cases.usable.patient_warning, seen)
    warning = [OPTIMISTIC_LINE] if settings.evaluate.protocol == "optimistic" else []
    return [*lines, *cases.lines(), _split_line(splits), *warning], cases, splits, features


def _announce(*warnings: str) -> None:
    """Print what must be known before anything is trained; summaries come when all is over."""
    for warning in filter(None, warnings):
        print(f"warning: {warning}", file=sys.stderr, flush=True)


def _cases(cohort: Cohort, features: Features, stage: str, positive: str | None) -> Cases:
    from selfvitmil.evaluate import find_cases

    if features.by_split:
        return _cases_by_split(cohort, features, stage, positive)
    found = find_cases(
        cohort, features.files, coarse=features.coarse, stage=stage, encoder=features.encoder, tiling=features.tiling,
        positive=positive,
    )  # fmt: skip
    return replace(found, encoder_slides=features.encoder_slides)


def _cases_by_split(cohort: Cohort, features: Features, stage: str, positive: str | None) -> Cases:
    """Cases with the features of every split's own encoder: the slides of which all of these are sound."""
    found = {split: _cases(cohort, own, stage, positive) for split, own in features.by_split.items()}
    failures = {failure.slide: failure for own in found.values() for failure in own.failures}
    common = set.intersection(*(set(own.by_slide) for own in found.values()))
    first = next(iter(found.values()))
    return replace(
        first, encoder=features.encoder, encoder_slides=frozenset(), failures=tuple(failures.values()), by_split=found
    ).only(common)


def _check_split_encoders(features: Features, splits: Sequence[Split]) -> None:
    """ConfigError where every split has an encoder of its own, but one of these splits has none."""
    missing = [split.name for split in splits if split.name not in features.by_split]
    if features.by_split and missing:
        raise ConfigError(
            f"{features.encoder}: no encoder for the splits {', '.join(missing)}",
            f"each was trained for one split, and there are those of {', '.join(features.by_split)}",
            "Use the splits that they were trained for (train.split, train.folds), train others with `selfvitmil "
            f"pretrain --pretrain.per-split` and another --name, or name one, as --encoder {features.encoder}_"
            f"{next(iter(features.by_split))}",
        )


def _split_line(splits: Sequence[Split]) -> str:
    first = splits[0]
    sizes = f"{len(first.train)} slides to train on, {len(first.val)} to choose by, {len(first.test)} to test on"
    return f"split {first.name}: {sizes}" if len(splits) == 1 else f"{len(splits)} splits, the first: {sizes}"


def find_features(study: Path, choice: FeatureChoice, settings: StudySettings) -> Features:
    """The feature files that were asked for; ConfigError where it is not clear which those are."""
    from selfvitmil.bags import find_bags

    if choice.folder is not None:
        name = encoder_name(str(choice.folder.resolve()))
        files, slides = find_bags(choice.folder), slides_of(choice.folder / ENCODER_SLIDES_FILE)
        return Features(name, "external", files, StudyLayout(study).models_on("external", name), encoder_slides=slides)
    tiling = tiling_name(settings.tile)
    name = _only_encoder(study, tiling, choice.encoder, settings)
    own = _split_features(study, tiling, name)
    if own:
        found = {split: find_features(study, replace(choice, encoder=each), settings) for split, each in own.items()}
        first = next(iter(found.values()))
        return replace(first, encoder=name, models=first.models.with_name(name), by_split=found)
    fine = Features(name, tiling, _embedded(study, tiling, name), Path(), None, _encoder_slides(study, tiling, name))
    if not choice.two_scales:
        return replace(fine, models=StudyLayout(study).models_on(tiling, name))
    return _on_two_scales(study, choice, settings, fine)


def _encoder_slides(study: Path, tiling: str, name: str) -> frozenset[str]:
    """The slides that an encoder was trained on; studies of earlier versions have them in its own folder alone."""
    layout = StudyLayout(study)
    beside = layout.features_encoder_slides(tiling, name)
    return slides_of(beside if beside.exists() else layout.encoder_slides(split_features_name(name)[0]))


def _split_features(study: Path, tiling: str, name: str) -> dict[str, str]:
    """Split -> name of its features, where `name` stands for encoders of all splits; else empty."""
    if StudyLayout(study).features(tiling, name).is_dir():
        return {}
    encoder, layout = split_features_name(name)
    return {split: features_name(each, layout) for split, each in split_encoders(study, encoder).items()}


def _of_all_splits(study: Path, name: str) -> str:
    """What the features of all splits are called together; the name itself where an encoder is for no split alone."""
    encoder, layout = split_features_name(name)
    return features_name(base_name(study, encoder), layout)


def _embedded(study: Path, tiling: str, name: str) -> dict[str, Path]:
    """Feature files of the study, by slide, without those that the last `embed` could not make anew."""
    from selfvitmil.bags import find_bags

    stage = embed_stage(name, tiling)
    failed = {failure.slide for failure in read_failures(study) if failure.stage == stage}
    found = find_bags(StudyLayout(study).features(tiling, name))
    return {slide: path for slide, path in found.items() if slide not in failed}


def _only_encoder(study: Path, tiling: str, wanted: str | None, settings: StudySettings) -> str:
    """Name of the features folder: of the encoder that is wanted, or the only one, with the layout that is set."""
    layout = settings.embed.layout
    all_names = StudyLayout(study).features_of_tiling(tiling)
    names = list(dict.fromkeys(_of_all_splits(study, name) for name in all_names))
    listed = f"there are vectors of {', '.join(names)}" if names else "no slide was embedded yet"
    if wanted is not None:
        name = encoder_name(wanted)
        if name != MEAN_COLOR and split_features_name(name)[1] is None:
            name = features_name(name, layout)
        if name not in (*names, *all_names):
            of_layout = f" with layout {layout}" if layout is not None else ""
            what = f"{study.name}: no vectors of encoder {wanted!r}{of_layout} for tiles {tiling}"
            raise ConfigError(what, listed, "Run `selfvitmil embed` first, or name another encoder")
        return name
    names = [name for name in names if name != MEAN_COLOR and not name.startswith(UNTRAINED)]  # nobody means these
    if layout is not None:
        names = [name for name in names if split_features_name(name)[1] == layout]
    if len(names) != 1:
        of_layout = f" (layout {layout})" if layout is not None else ""
        what = f"{study.name}: it is not clear which vectors of tiles {tiling}{of_layout} to learn from"
        raise ConfigError(what, listed, "Give --encoder, or --features with a folder of feature files")
    return names[0]


def _on_two_scales(study: Path, choice: FeatureChoice, settings: StudySettings, fine: Features) -> Features:
    from selfvitmil.evaluate import CoarseScale

    tiling = tiling_name(settings.tile, coarse_mpp(settings.tile))
    coarse = _only_encoder(study, tiling, choice.coarse_encoder or fine.encoder, settings)
    name = fine.encoder if coarse == fine.encoder else f"{fine.encoder}+{coarse}"
    both = f"{fine.tiling}+{tiling}"
    scale = CoarseScale(
        tiling,
        _embedded(study, tiling, coarse),
        {slide: StudyLayout(study).tile_table(fine.tiling, slide) for slide in fine.files},
        StudyLayout(study).features(both, name),
    )
    seen = fine.encoder_slides | _encoder_slides(study, tiling, coarse)
    return Features(name, both, fine.files, StudyLayout(study).models_on(both, name), scale, seen)


# ---------------------------------------------------------------------------------------------------- rows


@dataclass(frozen=True, eq=False)
class Row:
    """One row of a comparison, before it is trained."""

    title: str
    trial: Trial
    fit: Callable[[Mapping[Path, str]], Fitted]
    """Takes the notes of models that were made ahead."""
    trainings: Sequence[Training] = ()
    """Those that can be made ahead."""


def _rows(
    study: Path,
    choice: FeatureChoice,
    settings: StudySettings,
    cases: Cases,
    splits: Sequence[Split],
    features: Features,
    store: BagStore,
) -> list[Row]:
    """All rows that were asked for; those of other features use the same slides in the same splits."""
    from selfvitmil.aggregate.recipes import options_of
    from selfvitmil.evaluate import fit_method, seal
    from selfvitmil.evaluate.models import trainings_of

    compare = settings.compare
    two_scales = choice.folder is None and bool(settings.tile.parent_mpp)
    asked = compared_methods(settings, two_scales=two_scales)
    if compare.supervised != "none":
        check_supervised(cases.class_names, cases.cohort)

    def row(title: str, own: Features, its_cases: Cases, train: TrainSettings) -> Row:
        trial, method = seal(its_cases, splits, settings.evaluate), train.aggregator
        folder, report = own.models / title, _epoch_lines(title)
        fit = lambda notes: fit_method(  # noqa: E731
            method, trial, train, title=title, folder=folder, store=store, report=report, notes=notes
        )
        return Row(title, trial, fit, trainings_of(method, trial, train, folder))

    def on(own: Features) -> Cases:
        found = _cases(cases.cohort, own, "compare", settings.train.positive)
        missing = sorted(set(cases.by_slide) - set(found.by_slide))
        if missing:
            what = f"{len(missing)} slides have no vectors of {own.encoder} at {own.tiling}: {', '.join(missing[:5])}"
            raise ConfigError(what, "rows are compared on the same slides", "Embed them, or leave the row out")
        return found.only(set(cases.by_slide))

    rows = [row(each.title, features, cases, each.train) for each in asked if each.method != TWO_SCALES]
    main = options_for("self-vit-mil", settings.train)
    coarse = [each for each in asked if each.method == TWO_SCALES]
    if coarse:
        both = find_features(study, replace(choice, two_scales=True), settings)
        rows += [row(each.title, both, on(both), each.train) for each in coarse]
        if any(each.title == "self-vit-mil" for each in asked):
            own_options = {**options_of("self-vit-mil", main), "v": "bottleneck"}
            narrow = main.model_copy(update={"options": {**main.options, "self-vit-mil": own_options}})
            rows.append(row("self-vit-mil (two scales)", both, on(both), narrow))
    for title, encoder in _baselines(choice, settings, features.encoder).items():
        own = find_features(study, FeatureChoice(encoder), settings)
        rows.append(row(title, own, on(own), main))
    if compare.supervised != "none":
        # A network of its own learns from pixels: it has nothing of the encoder, nor of what that has seen.
        own_cases = cases if compare.supervised == "probe" else replace(cases, encoder_slides=frozenset())
        trial = seal(own_cases, splits, settings.evaluate)
        rows.append(
            Row(
                compare.supervised, trial, lambda notes: _fit_supervised(study, settings, cases, trial, features, store)
            )
        )
    return rows


def _fit_supervised(
    study: Path, settings: StudySettings, cases: Cases, trial: Trial, features: Features, store: BagStore
) -> Fitted:
    """The row that learns from outlined lesions: every split and seed, by the same seal as all others."""
    from selfvitmil.evaluate import conclude
    from selfvitmil.pipeline.supervised import SupervisedRow

    row = SupervisedRow(study, settings, cases, trial, features.models, store, _epoch_lines())
    seeds = range(settings.train.seed, settings.train.seed + settings.train.seeds)
    runs = [row.run(split, seed) for split in trial.splits for seed in seeds]
    return conclude(row.title, row.method, runs, trial)


# ---------------------------------------------------------------------------------------------------- baselines


def _baselines(choice: FeatureChoice, settings: StudySettings, encoder: str) -> dict[str, str]:
    """Title of the row -> name of its features, for the baselines that were asked for beside those of `encoder`."""
    rows: dict[str, str] = {}
    if settings.compare.random_encoder:
        rows["untrained encoder"] = UNTRAINED + encoder
    if settings.compare.mean_color:
        rows["mean colour"] = MEAN_COLOR
    if rows and choice.folder is not None:
        raise ConfigError(
            "compare.random_encoder and compare.mean_color need the slides",
            "they turn tiles into vectors of their own, and feature files hold no pixels",
            "Leave them out, or compare on vectors of the study's own tiles",
        )
    return rows


def _embed_baselines(study: Path, choice: FeatureChoice, settings: StudySettings, engine: Engine) -> list[str]:
    """Vectors of the baselines, where they are not there yet."""
    if not (settings.compare.random_encoder or settings.compare.mean_color):
        return []
    name = _only_encoder(study, tiling_name(settings.tile), choice.encoder, settings) if choice.folder is None else ""
    asked = [split_features_name(each) for each in _baselines(choice, settings, name).values()]
    like = split_features_name(name)[0]
    with open_study(study, "compare"):
        like = next(iter(split_encoders(study, like).values()), like)
        lines = [line for encoder, _ in asked for line in _make_baseline(study, encoder, like, settings)]
    for encoder, layout in asked:  # the layout of the encoder that they stand beside; colours have none
        lines += embed(study, [encoder], _for_baseline(settings, layout), engine).lines
    return lines


def _for_baseline(settings: StudySettings, layout: str | None) -> StudySettings:
    """One scale, and the given layout."""
    return settings.model_copy(
        update={
            "tile": settings.tile.model_copy(update={"parent_mpp": ()}),
            "embed": settings.embed.model_copy(update={"layout": layout}),
        }
    )


def _make_baseline(study: Path, name: str, like: str, settings: StudySettings) -> list[str]:
    """Write the folder of a baseline's encoder unless it is current; a line where that replaces another.

    ConfigError where an encoder that was trained has its name.
    """
    from selfvitmil.encoder import load_encoder, save_encoder

    folder, encoder = StudyLayout(study).encoder(name), _baseline(study, name, like, settings)
    if not (folder / "config.json").exists():
        save_encoder(folder, encoder)
        return []
    try:
        before = load_encoder(folder).config
    except EncoderError:
        save_encoder(folder, encoder)
        return [f"encoders/{name} made again: it was damaged"]
    if before.trained_on != encoder.config.trained_on:
        raise ConfigError(
            f"encoders/{name} is no baseline (trained on: {before.trained_on})",
            "`compare` needs this name for an encoder that has learned nothing",
            "Give its folder another name",
        )
    changed = [field for field, value in encoder.config if value != getattr(before, field)]
    if not changed:
        return []
    save_encoder(folder, encoder)
    return [f"encoders/{name} made again: other {', '.join(changed)} than before"]


def _baseline(study: Path, name: str, like: str, settings: StudySettings) -> Encoder:
    """An encoder that has learned nothing: by colour alone, or `like` that of the study, untrained."""
    from selfvitmil.encoder import build_encoder, load_encoder
    from selfvitmil.pretrain.learner import seeded

    if name == MEAN_COLOR:
        told = {"mpp": settings.tile.mpp, "stain": settings.stain.method}
        return build_encoder(MEAN_COLOR, img_size=settings.tile.size_px, **told)
    config = load_encoder(StudyLayout(study).encoder(like)).config
    kept = config.model_dump(include={"layout", "mean", "std", "mpp", "stain"})
    with seeded(0):
        return build_encoder(config.architecture, img_size=config.size_px, model_args=config.model_args, **kept)


# ---------------------------------------------------------------------------------------------------- words


def results_name(name: str, settings: StudySettings) -> str:
    """Name of the folder of results, which says so where test labels took part in choices."""
    if encoder_name(name) != name:
        raise ConfigError(f"name {name!r} does not do as a folder's name", how=f"Try {encoder_name(name)!r}")
    return f"{name}_optimistic" if settings.evaluate.protocol == "optimistic" else name


def below(study: Path, folder: Path) -> str:
    return folder.relative_to(study).as_posix()


def _epoch_lines(title: str = "", seconds: float = 10.0) -> Callable[[dict[str, Any]], None]:
    """Prints how trainings go, no more often than every `seconds`."""
    last = time.monotonic()

    def show(line: dict[str, Any]) -> None:
        nonlocal last
        if time.monotonic() - last < seconds:
            return
        last = time.monotonic()
        auc = "" if line["val_auc"] is None else f", validation AUC {line['val_auc']:.3f}"
        where = f"{title or line['method']}, {line['split']}, seed {line['seed']}"
        print(f"{where}: epoch {line['epoch']}, loss {line['train_loss']:.3f}{auc}", file=sys.stderr, flush=True)

    return show


def _validation_auc(run: Any, trial: Trial) -> str:
    from selfvitmil import metrics

    split = next(split for split in trial.splits if split.name == run.split)
    chosen_on = trial.chosen_on(split)
    labels = [case.label for case in chosen_on]
    scores = [run.chosen_on[case.slide].probabilities for case in chosen_on]
    try:
        if trial.num_classes == 1:
            return f"{metrics.auc(labels, [score[0] for score in scores]):.3f}"
        return f"{metrics.multiclass_auc(labels, scores).macro.value:.3f}"
    except MetricError:
        return "-"


def _run_warnings(fitted: Fitted) -> Iterable[str]:
    return dict.fromkeys(warning for run in fitted.runs for warning in run.warnings)


def _histories(folder: Path, result: MethodResult) -> dict[tuple[str, int], list[dict[str, Any]]]:
    """The course of every training, as its model's folder tells."""
    from selfvitmil.evaluate.models import model_name

    found: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for run in result.runs:
        place = model_folder(folder, model_name(run.split, result.protocol == "optimistic"), run.seed)
        lines = (place / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        found[run.split, run.seed] = [json.loads(line) for line in lines]
    return found


def _remove_earlier(folder: Path, results: Sequence[MethodResult]) -> list[str]:
    """Remove what earlier results left in their folder, or it would pass for these; whatever else is there stays.

    Lesion scores stay where the predictions are the same as before: they are of the same models. What to tell.
    """
    from selfvitmil.evaluate import read_predictions
    from selfvitmil.evaluate.pictures import figure_files
    from selfvitmil.localize.figures import LESION_FILES

    file, before = folder / "predictions.csv", []
    if file.exists():
        with suppress(ArtefactError):  # a damaged one is written anew
            before, _ = read_predictions(file)
    ours = {*COMPARISON_FILES, *figure_files(dict.fromkeys(row.split for row in before))}
    for path in folder.glob("*"):
        if path.name in ours:
            path.unlink()
    old = [name for name in LESION_FILES if (folder / name).exists()]
    if not old or before == [row for result in results for row in result.predictions]:
        return []
    for name in old:
        (folder / name).unlink()
    return [f"note: {', '.join(old)} removed: they judged maps of earlier models; --lesions judges those of today"]


def _write_table(
    study: Path,
    folder: Path,
    splits: Sequence[Split],
    results: Sequence[MethodResult],
    scores: Sequence[Scores],
    settings: StudySettings,
    advice: Sequence[str],
) -> tuple[tuple[tuple[str, ...], ...], list[str]]:
    """Write table.csv, table.md and auc.svg; the table for the terminal, and `advice` and notes below it."""
    from selfvitmil.evaluate import compare_results, comparison_row, judged_on
    from selfvitmil.evaluate.figures import auc_figure
    from selfvitmil.evaluate.table import PUBLISHED, table_cells, table_csv, table_markdown, table_notes

    on = judged_on(results[0], study.resolve().name, camelyon16_test=_is_camelyon16_test(splits))
    paired = compare_results(results, settings.compare.baseline, settings.evaluate)
    published = PUBLISHED | {"supervised ResNet-18": PUBLISHED["resnet18"]}  # by the rows' titles
    for result in results:  # published figures stand beside the published recipe, where the table has both
        if result.method == f"{result.aggregator} (published)" and result.aggregator in published:
            published[result.method] = published.pop(result.aggregator)
    rows = [
        comparison_row(result, own, on, paired=paired, published=published.get(result.method))
        for result, own in zip(results, scores, strict=True)
    ]
    write_text(folder / "table.csv", table_csv(rows))
    write_text(folder / "table.md", table_markdown(rows, advice))
    notes = [*(f"note: {text}" for text in advice), *table_notes(rows)]
    try:
        write_text(folder / "auc.svg", auc_figure(rows))
    except MetricError as error:
        notes = [*notes, f"note: auc.svg is not drawn: {error}"]
    return tuple(tuple(row) for row in table_cells(rows)), notes


def _is_camelyon16_test(splits: Sequence[Split]) -> bool:
    """Whether the test slides are the 129 of the challenge, on which the published figures were made."""
    official = {f"test_{number:03d}" for number in range(1, 131)} - {"test_049"}
    return len(splits) == 1 and {slide.lower() for slide in splits[0].test} == official


def _score_table(told: Mapping[str, Any], confidence: float) -> tuple[tuple[str, ...], ...]:
    """The figures of slides, and of patients where they differ, for the terminal."""
    header = ("", "ensemble", f"{formatting.percent(confidence)} interval", "mean of seeds", "sd")
    rows: list[tuple[str, ...]] = []
    for level in ("slide", "patient"):
        if "same_as" in told[level]:
            continue
        for name in SHOWN:
            row = _score_row(told[level], name)
            if row is not None:
                rows.append((f"{name.replace('_', ' ')}, by {level}", *row))
    return (header, *rows)


def _score_row(level: Mapping[str, Any], name: str) -> tuple[str, str, str, str] | None:
    whole = level.get("ensemble") or {}
    told = whole.get(name)
    value, limits = "-", ""
    if isinstance(told, Mapping):
        value, limits = formatting.value_and_limits(told)
    elif isinstance(told, int | float):
        value = f"{told:.3f}"
    spread = (level.get("over_seeds") or {}).get(name) or {}
    mean, sd = spread.get("mean"), spread.get("sd")
    if value == "-" and mean is None:
        return None
    return value, limits, formatting.number(mean), formatting.number(sd)
