"""The stage `compare`: many methods on the same slides, splits and seeds, in one table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from selfvitmil.cohort import Split
from selfvitmil.cohort.camelyon16 import is_official_test_set
from selfvitmil.engine import Engine
from selfvitmil.errors import ConfigError, EncoderError, MetricError
from selfvitmil.settings import StudySettings, TrainSettings, tiling_name, to_toml
from selfvitmil.stages.base import Engines, Estimate, Pending, Progress, Snapshot, Stage
from selfvitmil.stages.embed import embed
from selfvitmil.stages.measure import Measures
from selfvitmil.stages.parallel_training import make_models
from selfvitmil.stages.run_plan import RunPlan
from selfvitmil.stages.train import (
    SECTIONS,
    announce_recipes,
    below,
    epoch_reporter,
    estimate_training,
    labelled_cases,
    pending_models,
    prepare,
    remove_earlier_results,
    results_name,
    results_progress,
)
from selfvitmil.store.files import write_text
from selfvitmil.store.layout import StudyLayout
from selfvitmil.store.provenance import BUILT, BuildOutcome, BuildStatus, Provenance, damaged, outcome_of
from selfvitmil.study.encoders import split_encoders, split_features_name
from selfvitmil.study.features import MEAN_COLOR, UNTRAINED, FeatureChoice, Features, choose_features, find_features
from selfvitmil.study.folder import CohortSource, Summary, open_study
from selfvitmil.study.methods import (
    TWO_SCALES,
    check_supervised,
    compared_methods,
    heatmap_settings,
    lesion_baseline,
    options_for,
    try_method,
)
from selfvitmil.study.preflight import annotated_slides, nothing_done

if TYPE_CHECKING:
    from selfvitmil.aggregate.train import BagStore
    from selfvitmil.encoder import Encoder
    from selfvitmil.evaluate import Cases, Fitted, MethodResult, Scores, Trial
    from selfvitmil.evaluate.protocol import Training


def compare(
    study: Path,
    source: CohortSource,
    choice: FeatureChoice,
    settings: StudySettings,
    engine: Engine,
    name: str | None = None,
) -> Summary:
    """Evaluate many methods on the same slides and splits; writes `results/<name>/` with the table and its figure."""
    from selfvitmil.aggregate.train import BagStore
    from selfvitmil.evaluate import FINAL_SCORING, evaluate_method, score_method, write_results
    from selfvitmil.evaluate.comparison import better_simple_rows

    lines = _embed_baselines(study, choice, settings, engine)
    with open_study(study, "compare"):
        found, cases, splits, features = prepare(study, source, choice, settings, "compare")
        lines += found
        store = BagStore.of(settings.train)
        rows = _rows(study, choice, settings, cases, splits, features, store)
        asked = [(row.trial, training) for row in rows for training in row.trainings]
        announce_recipes(cases, {row.title: row.trainings[0].settings for row in rows if row.trainings})
        outcomes = make_models(asked, engine, store, epoch_reporter())
        fitted = [row.fit(outcomes) for row in rows]
        simple = better_simple_rows(fitted, rows[0].trial, settings.train.aggregator)
        for row in rows:  # all trainings are over: no label of a test slide was read so far
            row.trial.labels.open(FINAL_SCORING)
        results = [evaluate_method(each, row.trial) for each, row in zip(fitted, rows, strict=True)]
        scores = [score_method(result, settings.evaluate) for result in results]
        folder = StudyLayout(study).results(results_name(name or "compare", settings))
        lines += remove_earlier_results(folder, results)
        advice = [row.words for row in simple]
        write_results(folder, results, scores, settings.evaluate, advice)
        cells, notes = _write_table(study, folder, splits, results, scores, settings, advice)
        write_text(folder / "settings.toml", to_toml(settings, SECTIONS))
    lines += [*notes, f"table.csv, table.md, auc.svg, predictions.csv and metrics.json in {below(study, folder)}"]
    return Summary(tuple(lines), cases.failures, cells)


@dataclass(frozen=True, eq=False)
class Row:
    """One row of a comparison, before it is trained."""

    title: str
    trial: Trial
    fit: Callable[[Mapping[Path, BuildOutcome]], Fitted]
    """Takes the outcomes of models that were trained ahead."""
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
    from selfvitmil.evaluate import fit_method, hold_out_test_labels
    from selfvitmil.evaluate.protocol import trainings_of

    compare = settings.compare
    two_scales = choice.folder is None and bool(settings.tile.parent_mpp)
    asked = compared_methods(settings, two_scales=two_scales)
    if compare.supervised != "none":
        check_supervised(cases.class_names, cases.cohort)

    def row(title: str, own: Features, its_cases: Cases, train: TrainSettings) -> Row:
        trial, method = hold_out_test_labels(its_cases, splits, settings.evaluate), train.aggregator
        folder, report = own.models / title, epoch_reporter(title)
        fit = lambda outcomes: fit_method(  # noqa: E731
            method, trial, train, title=title, folder=folder, store=store, report=report, outcomes=outcomes
        )
        return Row(title, trial, fit, trainings_of(method, trial, train, folder))

    def on(own: Features) -> Cases:
        found = labelled_cases(cases.cohort, own, "compare", settings.train.positive)
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
        trial = hold_out_test_labels(own_cases, splits, settings.evaluate)
        rows.append(
            Row(compare.supervised, trial, lambda _: _fit_supervised(study, settings, cases, trial, features, store))
        )
    return rows


def _fit_supervised(
    study: Path, settings: StudySettings, cases: Cases, trial: Trial, features: Features, store: BagStore
) -> Fitted:
    """Fit the row trained on annotated lesions: every split and seed, with the same held-out test labels."""
    from selfvitmil.evaluate import choose_thresholds
    from selfvitmil.stages.supervised import SupervisedRow

    row = SupervisedRow(study, settings, cases, trial, features.models, store, epoch_reporter())
    seeds = range(settings.train.seed, settings.train.seed + settings.train.seeds)
    runs = [row.run(split, seed) for split in trial.splits for seed in seeds]
    return choose_thresholds(row.title, row.method, runs, trial)


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
    name = choose_features(study, tiling_name(settings.tile), choice.encoder, settings) if choice.folder is None else ""
    asked = [split_features_name(each) for each in _baselines(choice, settings, name).values()]
    like = split_features_name(name)[0]
    with open_study(study, "compare"):
        like = next(iter(split_encoders(study, like).values()), like)
        outcomes = {encoder: _make_baseline(study, encoder, like, settings) for encoder, _ in asked}
    lines = [
        f"encoders/{encoder} {outcome}"
        for encoder, outcome in outcomes.items()
        if outcome.status is BuildStatus.REBUILT
    ]
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


def _make_baseline(study: Path, name: str, like: str, settings: StudySettings) -> BuildOutcome:
    """Write the folder of a baseline's encoder unless it is up to date.

    ConfigError where an encoder that was trained has its name.
    """
    from selfvitmil.encoder import load_encoder, save_encoder

    folder, encoder = StudyLayout(study).encoder(name), _baseline(study, name, like, settings)
    if not StudyLayout(study).encoder_config(name).exists():
        save_encoder(folder, encoder)
        return BUILT
    try:
        before = load_encoder(folder).config
    except EncoderError:
        save_encoder(folder, encoder)
        return outcome_of(damaged(folder))
    if before.trained_on != encoder.config.trained_on:
        raise ConfigError(
            f"encoders/{name} is no baseline (trained on: {before.trained_on})",
            "`compare` needs this name for an encoder that has learned nothing",
            "Give its folder another name",
        )
    now, stored = (
        Provenance("compare", None, config.model_dump(mode="json"), {}) for config in (encoder.config, before)
    )
    freshness = now.compare(stored)
    if not freshness.is_up_to_date:
        save_encoder(folder, encoder)
    return outcome_of(freshness)


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
    from selfvitmil.evaluate import compare_results, comparison_row, evaluated_on
    from selfvitmil.evaluate.comparison import PUBLISHED
    from selfvitmil.evaluate.comparison_table import table_cells, table_csv, table_markdown, table_notes
    from selfvitmil.evaluate.figures import auc_figure

    official = len(splits) == 1 and is_official_test_set(splits[0].test)
    on = evaluated_on(results[0], study.resolve().name, camelyon16_test=official)
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


class Compare(Stage):
    """Compare many methods on the same slides and splits."""

    name = "compare"
    is_learning = True

    def preflight(self, plan: RunPlan) -> None:
        if not plan.request.trains_encoder:
            _check_untrained(plan)
        with nothing_done():
            self._check_methods(plan)

    def _check_methods(self, plan: RunPlan) -> None:
        """Raise what a row would refuse once all stages before it are done."""
        settings, labels = plan.settings, plan.labels
        assert labels is not None
        annotated = plan.has("lesions") and bool(annotated_slides(plan.cohort))
        with_heatmaps: list[str] = []
        for row in compared_methods(settings, two_scales=bool(settings.tile.parent_mpp)):
            if annotated and row.method != TWO_SCALES and row.is_main_recipe:
                heatmap_settings(
                    row.method, row.train, labels.num_classes, settings.localize, settings.train.aggregator
                )
                with_heatmaps.append(row.method)
            else:
                try_method(row.method, row.train, labels.num_classes)
        if annotated and lesion_baseline(settings) not in with_heatmaps:
            what = f"compare.baseline {settings.compare.baseline!r} has no heatmaps"
            why = "heatmaps are compared by the annotated lesions"
            raise ConfigError(what, why, "Name another baseline, or add --until localize")
        if settings.compare.supervised != "none":
            check_supervised(labels.class_names, plan.cohort)

    def pending(self, plan: RunPlan) -> Pending:
        rows = plan.settings.compare
        number = len(compared_methods(plan.settings, two_scales=bool(plan.settings.tile.parent_mpp)))
        number += rows.random_encoder + rows.mean_color + (rows.supervised != "none")
        return pending_models(plan, f"{number} methods")

    def estimate(self, plan: RunPlan, measures: Measures) -> Estimate:
        return estimate_training(plan, measures)

    def run(self, plan: RunPlan, engines: Engines) -> Summary:
        return compare(plan.study, CohortSource(), FeatureChoice(plan.encoder), plan.settings, engines.device)

    def status(self, snapshot: Snapshot) -> Iterable[Progress]:
        for folder in snapshot.layout.all_results():
            if (folder / "table.csv").exists():
                yield results_progress(self.name, snapshot, folder)


def _check_untrained(plan: RunPlan) -> None:
    """ConfigError where the row of an untrained encoder is asked for and the study has none to build it like."""
    encoder = plan.encoder
    there = plan.layout.encoder_config(encoder).exists() or bool(split_encoders(plan.study, encoder))
    if plan.settings.compare.random_encoder and not there:
        raise ConfigError(
            f"compare.random_encoder, and {encoder} is not among the study's encoders",
            "an untrained one is made like an encoder of the study",
            f"Copy its folder to encoders/{encoder} of the study, or leave the row out. Nothing was done",
        )
