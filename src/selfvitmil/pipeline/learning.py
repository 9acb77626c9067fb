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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selfvitmil import artefact, words
from selfvitmil.cohort import Cohort, Split
from selfvitmil.engine import Engine
from selfvitmil.errors import ConfigError, MetricError
from selfvitmil.pipeline.encoders import embed, encoder_name
from selfvitmil.pipeline.study import CohortSource, Summary, open_study, study_cohort
from selfvitmil.settings import StudySettings, TrainSettings, tiling_name, to_toml

if TYPE_CHECKING:
    from selfvitmil.aggregate.train import BagStore
    from selfvitmil.evaluate import Cases, Fitted, MethodResult, Scores, Trial

SECTIONS = {"preset", "tile", "train", "evaluate", "compare", "supervised"}
"""Settings that results depend on, saved beside them."""
SHOWN = ("auc", "accuracy", "balanced_accuracy", "sensitivity", "specificity", "f1", "pr_auc", "brier", "ece")
"""Figures that `evaluate` prints; metrics.json has them all."""
OPTIMISTIC_LINE = "OPTIMISTIC: epochs and thresholds are chosen on the test slides, so the figures flatter"
MEAN_COLOR, UNTRAINED = "mean_color", "untrained_"
"""Names of encoders that are there for comparison."""
TWO_SCALES = "dsmil-lc"
"""The method that is made for the vectors of two scales, one behind the other."""


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


# ---------------------------------------------------------------------------------------------------- commands


def train(study: Path, source: CohortSource, choice: FeatureChoice, settings: StudySettings) -> Summary:
    """Train an aggregator on every split with every seed; writes `models/`. Test slides are not opened."""
    from selfvitmil.evaluate import fit_method, seal

    with open_study(study, "train"):
        lines, cases, splits, features = prepare(study, source, choice, settings, "train")
        trial = seal(cases, splits, settings.evaluate)
        name = settings.train.aggregator
        fitted = fit_method(
            name, trial, settings.train, folder=features.models / name, report=_epoch_lines(), score_test=False
        )
        artefact.write_text(features.models / name / "settings.toml", to_toml(settings, SECTIONS))
    table = [("split", "seed", "epoch", "validation AUC", "seconds", "")]
    table += [
        (run.split, str(run.seed), str(run.epoch), _validation_auc(run, trial), f"{run.seconds:.0f}", run.note)
        for run in fitted.runs
    ]
    lines += [f"note: {warning}" for warning in (*trial.warnings, *_run_warnings(fitted))]
    lines.append(f"{len(fitted.runs)} models in {below(study, features.models / name)}; judge them with `evaluate`")
    return Summary(tuple(lines), cases.failures, tuple(table))


def evaluate(
    study: Path, source: CohortSource, choice: FeatureChoice, settings: StudySettings, name: str | None = None
) -> Summary:
    """Judge an aggregator on the test slides, training what is not there yet; writes `results/<name>/`."""
    from selfvitmil.evaluate import run_method, score_method, write_results
    from selfvitmil.evaluate.pictures import write_figures

    with open_study(study, "evaluate"):
        lines, cases, splits, features = prepare(study, source, choice, settings, "evaluate")
        method = settings.train.aggregator
        result = run_method(
            method, cases, splits, settings.train, settings.evaluate,
            folder=features.models / method, report=_epoch_lines(),
        )  # fmt: skip
        folder = study / "results" / results_name(name or f"{features.encoder}_{method}", settings)
        scores = score_method(result, settings.evaluate)
        write_results(folder, [result], [scores], settings.evaluate)
        histories = _histories(features.models / method, result)
        undrawn = write_figures(folder, result, settings.evaluate, histories)
        artefact.write_text(folder / "settings.toml", to_toml(settings, SECTIONS))
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
    from selfvitmil.evaluate import FINAL_SCORING, judge_method, score_method, write_results

    lines = _embed_baselines(study, choice, settings, engine)
    with open_study(study, "compare"):
        found, cases, splits, features = prepare(study, source, choice, settings, "compare")
        lines += found
        rows = _rows(study, choice, settings, cases, splits, features)
        fitted = [row.fit() for row in rows]
        for row in rows:  # all trainings are over: no label of a test slide was read so far
            row.trial.labels.open(FINAL_SCORING)
        results = [judge_method(each, row.trial) for each, row in zip(fitted, rows, strict=True)]
        scores = [score_method(result, settings.evaluate) for result in results]
        folder = study / "results" / results_name(name or "compare", settings)
        write_results(folder, results, scores, settings.evaluate)
        cells, notes = _write_table(study, folder, splits, results, scores, settings)
        artefact.write_text(folder / "settings.toml", to_toml(settings, SECTIONS))
    lines += [*notes, f"table.csv, table.md, auc.svg, predictions.csv and metrics.json in {below(study, folder)}"]
    return Summary(tuple(lines), cases.failures, cells)


# ---------------------------------------------------------------------------------------------------- features


def prepare(
    study: Path, source: CohortSource, choice: FeatureChoice, settings: StudySettings, stage: str
) -> tuple[list[str], Cases, tuple[Split, ...], Features]:
    """Lines to print first, cases, splits and features; slides that are no cases are in failures.csv by then."""
    from selfvitmil.evaluate import make_splits

    if settings.train.aggregator == TWO_SCALES and stage != "compare":
        choice = replace(choice, two_scales=True)
    cohort, lines = study_cohort(study, source)
    features = find_features(study, choice, settings)
    cases = _cases(cohort, features, stage, settings.train.positive)
    artefact.record_failures(study, stage, [row.slide for row in cohort.rows], cases.failures)
    splits = make_splits(cases, settings.train, settings.evaluate)
    warning = [OPTIMISTIC_LINE] if settings.evaluate.protocol == "optimistic" else []
    return [*lines, *cases.lines(), _split_line(splits), *warning], cases, splits, features


def _cases(cohort: Cohort, features: Features, stage: str, positive: str | None) -> Cases:
    from selfvitmil.evaluate import find_cases

    return find_cases(
        cohort, features.files, coarse=features.coarse, stage=stage, encoder=features.encoder, tiling=features.tiling,
        positive=positive,
    )  # fmt: skip


def _split_line(splits: Sequence[Split]) -> str:
    first = splits[0]
    sizes = f"{len(first.train)} slides to train on, {len(first.val)} to choose by, {len(first.test)} to test on"
    return f"split {first.name}: {sizes}" if len(splits) == 1 else f"{len(splits)} splits, the first: {sizes}"


def find_features(study: Path, choice: FeatureChoice, settings: StudySettings) -> Features:
    """The feature files that were asked for; ConfigError where it is not clear which those are."""
    from selfvitmil.bags import find_bags

    if choice.folder is not None:
        name = encoder_name(str(choice.folder.resolve()))
        return Features(name, "external", find_bags(choice.folder), study / "models" / "external" / name)
    tiling = tiling_name(settings.tile)
    name = _only_encoder(study, tiling, choice.encoder)
    fine = Features(name, tiling, find_bags(study / "bags" / tiling / f"features_{name}"), Path())
    if not choice.two_scales:
        return replace(fine, models=study / "models" / tiling / name)
    return _on_two_scales(study, choice, settings, fine)


def _only_encoder(study: Path, tiling: str, wanted: str | None) -> str:
    places = sorted((study / "bags" / tiling).glob("features_*"))
    names = [place.name.removeprefix("features_") for place in places]
    listed = f"there are vectors of {', '.join(names)}" if names else "no slide was embedded yet"
    if wanted is not None:
        if encoder_name(wanted) not in names:
            what = f"{study.name}: no vectors of encoder {wanted!r} for tiles {tiling}"
            raise ConfigError(what, listed, "Run `selfvitmil embed` first, or name another encoder")
        return encoder_name(wanted)
    names = [name for name in names if name != MEAN_COLOR and not name.startswith(UNTRAINED)]  # nobody means these
    if len(names) != 1:
        what = f"{study.name}: it is not clear which vectors of tiles {tiling} to learn from"
        raise ConfigError(what, listed, "Give --encoder, or --features with a folder of feature files")
    return names[0]


def _on_two_scales(study: Path, choice: FeatureChoice, settings: StudySettings, fine: Features) -> Features:
    from selfvitmil.bags import find_bags
    from selfvitmil.evaluate import CoarseScale

    if not settings.tile.parent_mpp:
        why = "tile.parent_mpp names no coarser scale"
        raise ConfigError("vectors of two scales were asked for", why, "Tile and embed with tile.parent_mpp, e.g. 2.0")
    tiling = tiling_name(settings.tile, settings.tile.parent_mpp[0])
    coarse = _only_encoder(study, tiling, choice.coarse_encoder or fine.encoder)
    name = fine.encoder if coarse == fine.encoder else f"{fine.encoder}+{coarse}"
    both = f"{fine.tiling}+{tiling}"
    scale = CoarseScale(
        tiling,
        find_bags(study / "bags" / tiling / f"features_{coarse}"),
        {slide: study / "tiles" / fine.tiling / f"{slide}.h5" for slide in fine.files},
        study / "bags" / both / f"features_{name}",
    )
    return Features(name, both, fine.files, study / "models" / both / name, scale)


# ---------------------------------------------------------------------------------------------------- rows


@dataclass(frozen=True, eq=False)
class Row:
    """One row of a comparison, before it is trained."""

    trial: Trial
    fit: Callable[[], Fitted]


def _rows(
    study: Path,
    choice: FeatureChoice,
    settings: StudySettings,
    cases: Cases,
    splits: Sequence[Split],
    features: Features,
) -> list[Row]:
    """All rows that were asked for; those of other features use the same slides in the same splits."""
    from selfvitmil.aggregate import NAMES, settings_of
    from selfvitmil.aggregate.train import BagStore
    from selfvitmil.evaluate import fit_method, seal

    compare, store = settings.compare, BagStore.of(settings.train)
    two_scales = choice.folder is None and bool(settings.tile.parent_mpp)
    for method in compare.methods:
        if method not in NAMES:
            raise ConfigError(f"compare.methods: unknown method {method!r}", how=f"There are {', '.join(NAMES)}")
    methods = compare.methods or tuple(method for method in NAMES if method != TWO_SCALES or two_scales)
    _check_options(settings.train.options, {method: settings_of(method) for method in methods})
    if compare.baseline not in methods:
        raise ConfigError(
            f"compare.baseline {compare.baseline!r} is not among the methods", f"those are {', '.join(methods)}"
        )

    def row(title: str, method: str, own: Features, its_cases: Cases, train: TrainSettings) -> Row:
        trial = seal(its_cases, splits, settings.evaluate)
        own_train = options_for(method, train)
        fit = lambda: fit_method(  # noqa: E731
            method, trial, own_train, title=title, folder=own.models / title, store=store, report=_epoch_lines(title)
        )
        return Row(trial, fit)

    def on(own: Features) -> Cases:
        found = _cases(cases.cohort, own, "compare", settings.train.positive)
        missing = sorted(set(cases.by_slide) - set(found.by_slide))
        if missing:
            what = f"{len(missing)} slides have no vectors of {own.encoder} at {own.tiling}: {', '.join(missing[:5])}"
            raise ConfigError(what, "rows are compared on the same slides", "Embed them, or leave the row out")
        return found.only(set(cases.by_slide))

    rows = [row(m, m, features, cases, settings.train) for m in methods if m != TWO_SCALES]
    if TWO_SCALES in methods:
        both = find_features(study, replace(choice, two_scales=True), settings)
        options = {**settings.train.options, "v": "bottleneck"}
        narrow = settings.train.model_copy(update={"options": options})
        rows.append(row(TWO_SCALES, TWO_SCALES, both, on(both), settings.train))
        if "self-vit-mil" in methods:
            rows.append(row("self-vit-mil (two scales)", "self-vit-mil", both, on(both), narrow))
    for title, encoder in _baselines(choice, settings, features.encoder).items():
        own = find_features(study, FeatureChoice(encoder), settings)
        rows.append(row(title, "self-vit-mil", own, on(own), settings.train))
    if compare.supervised != "none":
        trial = seal(cases, splits, settings.evaluate)
        rows.append(Row(trial, lambda: _fit_supervised(study, settings, cases, trial, features, store)))
    return rows


def options_for(method: str, train: TrainSettings) -> TrainSettings:
    """Settings to train one of many methods: an option goes to those that have it."""
    from selfvitmil.aggregate import settings_of

    known = settings_of(method)
    options = {key: value for key, value in train.options.items() if key in known or isinstance(value, dict)}
    return train.model_copy(update={"aggregator": method, "options": options})


def _check_options(options: Mapping[str, Any], known: Mapping[str, Mapping[str, Any]]) -> None:
    """ConfigError for an option that no method of the comparison has."""
    for key, value in options.items():
        if isinstance(value, dict):  # of one method, whose recipe checks them
            continue
        if not any(key in settings for settings in known.values()):
            names = sorted({name for settings in known.values() for name in settings})
            raise ConfigError(f"train.options: no method has {key!r}", how=f"There are {', '.join(names)}")


def _fit_supervised(
    study: Path, settings: StudySettings, cases: Cases, trial: Trial, features: Features, store: BagStore
) -> Fitted:
    """The row that learns from outlined lesions: every split and seed, by the same seal as all others."""
    from selfvitmil.evaluate import conclude
    from selfvitmil.pipeline.supervised import SupervisedRow

    if cases.num_classes != 1:
        raise ConfigError(
            f"compare.supervised with {len(cases.class_names)} classes", "outlines tell tumour from normal tissue only"
        )
    row = SupervisedRow(study, settings, cases, trial, features.models, store)
    seeds = range(settings.train.seed, settings.train.seed + settings.train.seeds)
    runs = [row.run(split, seed) for split in trial.splits for seed in seeds]
    return conclude(row.title, row.method, runs, trial)


# ---------------------------------------------------------------------------------------------------- baselines


def _baselines(choice: FeatureChoice, settings: StudySettings, encoder: str) -> dict[str, str]:
    """Title of the row -> name of the encoder, for the baselines that were asked for."""
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
    name = _only_encoder(study, tiling_name(settings.tile), choice.encoder) if choice.folder is None else ""
    asked = _baselines(choice, settings, name)
    for encoder in asked.values():
        _make_baseline(study, encoder, name, settings)
    made = embed(study, list(asked.values()), settings.model_copy(update={"tile": _one_scale(settings)}), engine)
    return list(made.lines)


def _one_scale(settings: StudySettings) -> Any:
    return settings.tile.model_copy(update={"parent_mpp": ()})


def _make_baseline(study: Path, name: str, like: str, settings: StudySettings) -> None:
    """The folder of an encoder that has learned nothing: by colour alone, or `like` that of the study, untrained."""
    from selfvitmil.encoder import build_encoder, load_encoder, save_encoder
    from selfvitmil.pretrain.learner import seeded

    if (study / "encoders" / name / "config.json").exists():
        return
    if name == MEAN_COLOR:
        told = {"mpp": settings.tile.mpp, "stain": settings.stain.method}
        encoder = build_encoder(MEAN_COLOR, img_size=settings.tile.size_px, **told)
    else:
        config = load_encoder(study / "encoders" / like).config
        kept = config.model_dump(include={"layout", "mean", "std", "mpp", "stain"})
        with seeded(0):
            encoder = build_encoder(config.architecture, img_size=config.size_px, model_args=config.model_args, **kept)
    save_encoder(study / "encoders" / name, encoder)


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
    from selfvitmil.evaluate.protocol import model_name

    found: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for run in result.runs:
        place = folder / model_name(run.split, result.protocol == "optimistic") / f"seed{run.seed}"
        lines = (place / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        found[run.split, run.seed] = [json.loads(line) for line in lines]
    return found


def _write_table(
    study: Path,
    folder: Path,
    splits: Sequence[Split],
    results: Sequence[MethodResult],
    scores: Sequence[Scores],
    settings: StudySettings,
) -> tuple[tuple[tuple[str, ...], ...], list[str]]:
    """Write table.csv, table.md and auc.svg; the table for the terminal, and its notes."""
    from selfvitmil.evaluate import compare_results, comparison_row, judged_on
    from selfvitmil.evaluate.figures import auc_figure
    from selfvitmil.evaluate.table import PUBLISHED, table_cells, table_csv, table_markdown, table_notes

    on = judged_on(results[0], study.resolve().name, camelyon16_test=_is_camelyon16_test(splits))
    paired = compare_results(results, settings.compare.baseline, settings.evaluate)
    published = PUBLISHED | {"supervised ResNet-18": PUBLISHED["resnet18"]}  # by the rows' titles
    rows = [
        comparison_row(result, own, on, paired=paired, published=published.get(result.method))
        for result, own in zip(results, scores, strict=True)
    ]
    artefact.write_text(folder / "table.csv", table_csv(rows))
    artefact.write_text(folder / "table.md", table_markdown(rows))
    notes = table_notes(rows)
    try:
        artefact.write_text(folder / "auc.svg", auc_figure(rows))
    except MetricError as error:
        (folder / "auc.svg").unlink(missing_ok=True)
        notes = [*notes, f"note: auc.svg is not drawn: {error}"]
    return tuple(tuple(row) for row in table_cells(rows)), notes


def _is_camelyon16_test(splits: Sequence[Split]) -> bool:
    """Whether the test slides are the 129 of the challenge, on which the published figures were made."""
    official = {f"test_{number:03d}" for number in range(1, 131)} - {"test_049"}
    return len(splits) == 1 and {slide.lower() for slide in splits[0].test} == official


def _score_table(told: Mapping[str, Any], confidence: float) -> tuple[tuple[str, ...], ...]:
    """The figures of slides, and of patients where they differ, for the terminal."""
    header = ("", "ensemble", f"{confidence:.0%} interval", "mean of seeds", "sd")
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
        value, limits = words.value_and_limits(told)
    elif isinstance(told, int | float):
        value = f"{told:.3f}"
    spread = (level.get("over_seeds") or {}).get(name) or {}
    mean, sd = spread.get("mean"), spread.get("sd")
    if value == "-" and mean is None:
        return None
    return value, limits, words.number(mean), words.number(sd)
