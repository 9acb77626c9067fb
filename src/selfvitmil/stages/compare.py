"""The stage `compare`: many methods on the same slides, splits and seeds, in one table."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selfvitmil.cohort import Split
from selfvitmil.cohort.camelyon16 import is_official_test_set
from selfvitmil.engine import Engine
from selfvitmil.errors import ConfigError, EncoderError, MetricError
from selfvitmil.settings import StudySettings, TrainSettings, to_toml
from selfvitmil.stages.base import (
    Engines,
    Estimate,
    Pending,
    Progress,
    Snapshot,
    Stage,
    StageResult,
    data_frame,
    nothing_done,
)
from selfvitmil.stages.embed import EmbedResult, embed
from selfvitmil.stages.evaluate import draw_curve
from selfvitmil.stages.lesions import annotated_slides
from selfvitmil.stages.train import (
    SECTIONS,
    TWO_SCALES,
    announce_recipes,
    check_supervised,
    compared_methods,
    epoch_reporter,
    estimate_training,
    heatmap_settings,
    lesion_baseline,
    make_models,
    options_for,
    pending_models,
    prepare,
    remove_earlier_results,
    results_name,
    results_progress,
    trained_rows,
    try_method,
    tune_methods,
)
from selfvitmil.store.files import write_text
from selfvitmil.store.layout import StudyLayout
from selfvitmil.store.provenance import BUILT, BuildOutcome, BuildStatus, Provenance, damaged, outcome_of
from selfvitmil.study import (
    MEAN_COLOR,
    UNTRAINED,
    FeatureChoice,
    Features,
    LearningSet,
    Study,
    choose_features,
    find_features,
    labelled_cases,
    remembered_choice,
    split_encoders,
    split_features_name,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from selfvitmil.aggregate.train import BagStore
    from selfvitmil.commands.run import RunPlan
    from selfvitmil.encoder import Encoder
    from selfvitmil.evaluate import Cases, Fitted, MethodResult, Prediction, Scores, Trial
    from selfvitmil.evaluate.comparison import ComparisonRow
    from selfvitmil.evaluate.tuning import Tuning
    from selfvitmil.stages.measure import Measures


@dataclass(frozen=True)
class CompareResult(StageResult):
    """Several methods on the same test slides: `table.csv` and `predictions.csv` of a folder of results."""

    folder: Path
    """Folder of results."""
    rows: tuple[Mapping[str, str], ...]
    """Rows of table.csv: every metric with its confidence interval, tests against the baseline, and more."""
    table: tuple[ComparisonRow, ...] = field(repr=False)
    """The same as typed values."""
    advice: tuple[str, ...] = field(default=(), repr=False)
    """Which simpler methods were no worse on validation slides."""
    baselines: tuple[EmbedResult, ...] = field(default=(), repr=False)
    """Embeddings that were made for rows of untrained encoders and of mean colours."""

    @classmethod
    def read(cls, folder: Path) -> CompareResult:
        """Return the comparison that is stored in a folder of results."""
        from selfvitmil.evaluate.comparison_table import read_table

        text = (folder / "table.csv").read_text(encoding="utf-8")
        return cls(folder, _records(text), tuple(read_table(text)))

    @property
    def methods(self) -> tuple[str, ...]:
        return tuple(row["display_name"] for row in self.rows)

    @cached_property
    def _stored(self) -> tuple[Sequence[Prediction], Sequence[str]]:
        from selfvitmil.evaluate.predictions import read_predictions

        return read_predictions(self.folder / "predictions.csv")

    @property
    def predictions(self) -> tuple[Prediction, ...]:
        """Every prediction of every method, seed and split; `seed` None is the mean over seeds."""
        return tuple(self._stored[0])

    def auc(self, method: str) -> tuple[float, float, float]:
        """Return AUC (macro AUC with several classes) with the limits of its confidence interval.

        Raises ConfigError where the method was not compared.
        """
        row = self._row(method)
        name = "macro_auc" if "macro_auc" in row else "auc"
        value, low, high = (float(row[key]) for key in (name, f"{name}_low", f"{name}_high"))
        return value, low, high

    def to_frame(self) -> Any:
        """Return table.csv as a pandas DataFrame, numbers as numbers. Raises ConfigError without pandas."""
        return data_frame(self.rows, "display_name", parse=True)

    def plot_roc(self, methods: Sequence[str] | None = None) -> Figure:
        """Draw the ROC curves of methods (all by default) on the test slides, by the mean probability over seeds.

        Two classes only. With several splits a curve is the mean over splits.
        """
        from matplotlib.figure import Figure

        from selfvitmil.metrics import roc_curve

        figure = Figure(figsize=(5, 5), layout="constrained")
        axes: Any = figure.add_subplot(xlabel="1 - specificity", ylabel="sensitivity", aspect="equal")
        axes.plot([0, 1], [0, 1], color="0.8", linewidth=1)
        for method in methods or self.methods:
            rows = [row for row in self._of(method) if row.part == "test" and row.seed is None]
            if len(rows[0].score) > 1:
                raise ConfigError(
                    "an ROC curve was asked for", "there are more than two classes", "Use .rows", code="not-binary"
                )
            folds = [row.split for row in rows]
            curve = roc_curve([row.label for row in rows], [row.score[0] for row in rows], folds=folds)
            value, low, high = self.auc(method)
            name = f"{method}: {value:.3f} [{low:.3f}, {high:.3f}]"
            axes.plot(curve.false_positive_rate, curve.sensitivity, label=name, linewidth=1.5)
        axes.legend(title="AUC [95 % CI]", fontsize="small", loc="lower right")
        return figure

    def plot_pr(self, method: str) -> Figure:
        """Draw the precision-recall curve of a method on the test slides."""
        return draw_curve("pr", self._of(method), self._stored[1])

    def plot_calibration(self, method: str) -> Figure:
        """Draw observed frequencies against predicted probabilities of a method on the test slides."""
        return draw_curve("calibration", self._of(method), self._stored[1])

    def _of(self, method: str) -> list[Prediction]:
        self._row(method)
        return [row for row in self.predictions if row.method == method]

    def _row(self, method: str) -> Mapping[str, str]:
        found = next((row for row in self.rows if row["display_name"] == method), None)
        if found is None:
            raise ConfigError(
                f"unknown method {method!r}", how=f"There are {', '.join(self.methods)}", code="unknown-method"
            )
        return found


def _records(text: str) -> tuple[Mapping[str, str], ...]:
    """Return the rows of a table.csv."""
    return tuple(csv.DictReader(io.StringIO(text)))


def compare(study: Study, choice: FeatureChoice, engine: Engine, name: str | None = None) -> CompareResult:
    """Evaluate many methods on the same slides and splits; writes `results/<name>/` with the table and its figure."""
    from selfvitmil.aggregate.train import BagStore
    from selfvitmil.evaluate import FINAL_SCORING, evaluate_method, score_method, write_results
    from selfvitmil.evaluate.comparison import better_simple_rows
    from selfvitmil.evaluate.protocol import trainings_of

    settings, choice = study.settings, remembered_choice(study, choice)
    notes, baselines = _embed_baselines(study, choice, engine)
    with study.lock("compare"):
        found, learning = prepare(study, choice, "compare")
        notes += found
        store = BagStore.of(settings.train)
        rows = _rows(study, choice, learning, store)
        trained = [row for row in rows if row.train is not None]
        announce_recipes(learning.cases, {row.title: row.train for row in trained if row.train is not None})
        tuned = tune_methods([row.asked for row in trained], engine, store)
        tuned_of = {row.title: own for row, own in zip(trained, tuned, strict=True)}
        asked = [
            (row.trial, training) for row in trained for training in trainings_of(*row.asked, tuned=tuned_of[row.title])
        ]
        outcomes = make_models(asked, engine, store, epoch_reporter())
        fitted = [row.fit(outcomes, tuned_of.get(row.title, {})) for row in rows]
        simple = better_simple_rows(fitted, rows[0].trial, settings.train.aggregator)
        for row in rows:  # all trainings are over: no label of a test slide was read so far
            row.trial.labels.open(FINAL_SCORING)
        results = [evaluate_method(each, row.trial) for each, row in zip(fitted, rows, strict=True)]
        scores = [score_method(result, settings.evaluate) for result in results]
        folder = study.layout.results(results_name(name, "compare", settings))
        notes += remove_earlier_results(folder, results)
        advice = [row.words for row in simple]
        write_results(folder, results, scores, settings.evaluate, advice)
        written = _write_table(study, folder, learning.splits, results, scores, advice)
        write_text(folder / "settings.toml", to_toml(settings, SECTIONS))
    return replace(
        written, baselines=tuple(baselines), failures=learning.cases.failures, notes=(*notes, *written.notes)
    )


@dataclass(frozen=True, eq=False)
class Row:
    """One row of a comparison, before it is trained."""

    title: str
    trial: Trial
    fit: Callable[[Mapping[Path, BuildOutcome], Mapping[str, Tuning]], Fitted]
    """Takes the outcomes of models that were trained ahead, and the settings that were chosen for each split."""
    train: TrainSettings | None = None
    """None where nothing can be trained ahead."""
    folder: Path | None = None
    """Of its models."""

    @property
    def asked(self) -> tuple[str, Trial, TrainSettings, Path | None]:
        assert self.train is not None
        return self.train.aggregator, self.trial, self.train, self.folder


def _rows(study: Study, choice: FeatureChoice, learning: LearningSet, store: BagStore) -> list[Row]:
    """Return all rows that were asked for; those of other features use the same slides in the same splits."""
    from selfvitmil.aggregate.recipes import options_of
    from selfvitmil.evaluate import fit_method, hold_out_test_labels

    settings, compare = study.settings, study.settings.compare
    cases, splits, features = learning.cases, learning.splits, learning.features
    two_scales = choice.folder is None and bool(settings.tile.parent_mpp) and not settings.train.joint
    _check_joint(settings)
    asked = compared_methods(settings, two_scales=two_scales, outcome=cases.trained_on)
    if compare.supervised != "none":
        check_supervised(cases.class_names, cases.cohort, cases.trained_on)

    def row(title: str, own: Features, its_cases: Cases, train: TrainSettings) -> Row:
        trial, method = hold_out_test_labels(its_cases, splits, settings.evaluate), train.aggregator
        folder, report = own.models / title, epoch_reporter(title)

        def fit(outcomes: Mapping[Path, BuildOutcome], tuned: Mapping[str, Tuning]) -> Fitted:
            how: dict[str, Any] = {"title": title, "folder": folder, "store": store, "report": report}
            return fit_method(method, trial, train, outcomes=outcomes, tuned=tuned, **how)

        return Row(title, trial, fit, train, folder)

    def on(own: Features) -> Cases:
        found = labelled_cases(study.cohort, own, "compare", settings.train)
        missing = sorted(set(cases.by_slide) - set(found.by_slide))
        if missing:
            what = f"{len(missing)} slides have no features of {own.encoder} at {own.tiling}: {', '.join(missing[:5])}"
            raise ConfigError(
                what,
                "rows are compared on the same slides",
                "Embed them, or leave the row out",
                code="missing-features",
            )
        return found.only(set(cases.by_slide))

    rows = [row(each.title, features, cases, each.train) for each in asked if each.method != TWO_SCALES]
    main = options_for("self-vit-mil", settings.train)
    coarse = [each for each in asked if each.method == TWO_SCALES]
    if coarse:
        both = find_features(study.root, replace(choice, two_scales=True), settings)
        rows += [row(each.title, both, on(both), each.train) for each in coarse]
        if any(each.title == "self-vit-mil" for each in asked):
            own_options = {**options_of("self-vit-mil", main), "v": "bottleneck"}
            narrow = main.model_copy(update={"options": {**main.options, "self-vit-mil": own_options}})
            rows.append(row("self-vit-mil (two scales)", both, on(both), narrow))
    for title, encoder in _baselines(choice, settings, features.encoder).items():
        own = find_features(study.root, FeatureChoice(encoder), settings)
        rows.append(row(title, own, on(own), main))
    if compare.supervised != "none":
        # A network of its own learns from pixels: it has nothing of the encoder, nor of what that has seen.
        own_cases = cases if compare.supervised == "probe" else replace(cases, encoder_slides=frozenset())
        trial = hold_out_test_labels(own_cases, splits, settings.evaluate)

        def fit_supervised(outcomes: Mapping[Path, BuildOutcome], tuned: Mapping[str, Tuning]) -> Fitted:
            return _fit_supervised(study, cases, trial, features, store)

        rows.append(Row(compare.supervised, trial, fit_supervised))
    return rows


def _check_joint(settings: StudySettings) -> None:
    """ConfigError for rows on features of their own where several targets are trained jointly."""
    compare = settings.compare
    if settings.train.joint and (compare.random_encoder or compare.mean_color or TWO_SCALES in compare.methods):
        raise ConfigError(
            "compare.random_encoder, compare.mean_color or features of two scales with train.joint",
            "all rows of a joint training learn from the same features",
            "Leave them out, or compare by one target (train.target without train.joint)",
            code="not-with-joint",
        )


def _fit_supervised(study: Study, cases: Cases, trial: Trial, features: Features, store: BagStore) -> Fitted:
    """Fit the row trained on annotated lesions: every split and seed, with the same held-out test labels."""
    from selfvitmil.evaluate import choose_thresholds
    from selfvitmil.stages.supervised import SupervisedRow

    train = study.settings.train
    row = SupervisedRow(study.root, study.settings, cases, trial, features.models, store, epoch_reporter())
    seeds = range(train.seed, train.seed + train.seeds)
    runs = [row.run(split, seed) for split in trial.splits for seed in seeds]
    return choose_thresholds(row.title, row.method, runs, trial)


def _baselines(choice: FeatureChoice, settings: StudySettings, encoder: str) -> dict[str, str]:
    """Title of the row -> name of its features, for the baselines that were asked for beside those of `encoder`."""
    from selfvitmil.evaluate.comparison import COLOR_ROW, UNTRAINED_ROW

    rows: dict[str, str] = {}
    if settings.compare.random_encoder:
        rows[UNTRAINED_ROW] = UNTRAINED + encoder
    if settings.compare.mean_color:
        rows[COLOR_ROW] = MEAN_COLOR
    if rows and choice.folder is not None:
        raise ConfigError(
            "compare.random_encoder and compare.mean_color need the slides",
            "they compute embeddings of their own, and feature files hold no pixels",
            "Leave them out, or compare on features of the study's own tiles",
            code="baselines-need-slides",
        )
    return rows


def _embed_baselines(study: Study, choice: FeatureChoice, engine: Engine) -> tuple[list[str], list[EmbedResult]]:
    """Embed tiles with the baselines' encoders where that was not done yet; return notes and results."""
    settings = study.settings
    if not (settings.compare.random_encoder or settings.compare.mean_color):
        return [], []
    name = choose_features(study.root, study.tiling, choice.encoder, settings) if choice.folder is None else ""
    asked = [split_features_name(each) for each in _baselines(choice, settings, name).values()]
    like = split_features_name(name)[0]
    with study.lock("compare"):
        like = next(iter(split_encoders(study.root, like).values()), like)
        outcomes = {encoder: _make_baseline(study.root, encoder, like, settings) for encoder, _ in asked}
    notes = [
        f"encoders/{encoder} {outcome}"
        for encoder, outcome in outcomes.items()
        if outcome.status is BuildStatus.REBUILT
    ]
    return notes, [  # in the layout of the encoder that they stand beside; colours have none
        embed(study.with_settings(_for_baseline(settings, layout)), [encoder], engine) for encoder, layout in asked
    ]


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
            code="not-an-untrained-encoder",
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
        size, mpp, stain = settings.tile.size_px, settings.tile.mpp, settings.stain.method
        return build_encoder(MEAN_COLOR, img_size=size, mpp=mpp, stain=stain)
    config = load_encoder(StudyLayout(study).encoder(like)).config
    kept = config.model_dump(include={"layout", "mean", "std", "mpp", "stain"})
    with seeded(0):
        return build_encoder(config.architecture, img_size=config.size_px, model_args=config.model_args, **kept)


def _write_table(
    study: Study,
    folder: Path,
    splits: Sequence[Split],
    results: Sequence[MethodResult],
    scores: Sequence[Scores],
    advice: Sequence[str],
) -> CompareResult:
    """Write table.csv, table.md and auc.svg."""
    if results[0].outcome is not None:
        return _write_outcome_table(study, folder, results, scores)
    from selfvitmil.evaluate import compare_results, comparison_row, evaluated_on
    from selfvitmil.evaluate.comparison import PUBLISHED
    from selfvitmil.evaluate.comparison_table import table_csv, table_markdown
    from selfvitmil.evaluate.figures import auc_figure

    settings, official = study.settings, len(splits) == 1 and is_official_test_set(splits[0].test)
    on = evaluated_on(results[0], study.root.resolve().name, camelyon16_test=official)
    paired = compare_results(results, settings.compare.baseline, settings.evaluate)
    published = PUBLISHED | {"supervised ResNet-18": PUBLISHED["resnet18"]}  # by the rows' titles
    for result in results:  # published figures stand beside the published recipe, where the table has both
        if result.method == f"{result.aggregator} (published)" and result.aggregator in published:
            published[result.method] = published.pop(result.aggregator)
    rows = tuple(
        comparison_row(result, own, on, paired=paired, published=published.get(result.method))
        for result, own in zip(results, scores, strict=True)
    )
    text = table_csv(rows)
    write_text(folder / "table.csv", text)
    write_text(folder / "table.md", table_markdown(rows, advice))
    notes: tuple[str, ...] = ()
    try:
        write_text(folder / "auc.svg", auc_figure(rows))
    except MetricError as error:
        notes = (f"note: auc.svg is not drawn: {error}",)
    return CompareResult(folder, _records(text), rows, tuple(advice), notes=notes)


def _write_outcome_table(
    study: Study, folder: Path, results: Sequence[MethodResult], scores: Sequence[Scores]
) -> CompareResult:
    """Write table.csv and table.md of an outcome other than classes."""
    from selfvitmil.evaluate.outcome_results import outcome_csv, outcome_markdown, outcome_rows

    settings = study.settings
    rows = outcome_rows(results, scores, settings.compare.baseline, study.root.resolve().name, settings.evaluate)
    text = outcome_csv(rows)
    write_text(folder / "table.csv", text)
    write_text(folder / "table.md", outcome_markdown(rows))
    return CompareResult(folder, _records(text), rows)  # pyright: ignore[reportArgumentType]


class Compare(Stage):
    """Compare many methods on the same slides and splits."""

    name = "compare"
    is_learning = True
    by_target = True

    def preflight(self, plan: RunPlan) -> None:
        if not plan.request.trains_encoder:
            _check_untrained(plan)
        with nothing_done():
            self._check_methods(plan)

    def _check_methods(self, plan: RunPlan) -> None:
        """Raise what a row would refuse once all stages before it are done."""
        settings, labels = plan.settings, plan.labels
        assert labels is not None
        _check_joint(settings)
        outcome = labels.trained_on
        annotated = plan.has("lesions") and bool(annotated_slides(plan.cohort)) and outcome is None
        with_heatmaps: list[str] = []
        two_scales = bool(settings.tile.parent_mpp) and not settings.train.joint
        for row in compared_methods(settings, two_scales=two_scales, outcome=outcome):
            if annotated and row.method != TWO_SCALES and row.is_main_recipe:
                heatmap_settings(
                    row.method, row.train, labels.num_classes, settings.localize, settings.train.aggregator
                )
                with_heatmaps.append(row.method)
            else:
                try_method(row.method, row.train, labels.num_outputs, outcome=outcome)
        if annotated and lesion_baseline(settings) not in with_heatmaps:
            what = f"compare.baseline {settings.compare.baseline!r} has no heatmaps"
            why = "heatmaps are compared by the annotated lesions"
            raise ConfigError(
                what, why, "Name another baseline, or add --until localize", code="baseline-without-heatmaps"
            )
        if settings.compare.supervised != "none":
            check_supervised(labels.class_names, plan.cohort, outcome)

    def pending(self, plan: RunPlan) -> Pending:
        rows = plan.settings.compare
        number = len(trained_rows(plan))
        number += rows.random_encoder + rows.mean_color + (rows.supervised != "none")
        return pending_models(plan, f"{number} methods")

    def estimate(self, plan: RunPlan, measures: Measures) -> Estimate:
        return estimate_training(plan, measures)

    def run(self, plan: RunPlan, engines: Engines) -> CompareResult:
        return compare(plan.study, FeatureChoice(plan.encoder), engines.device)

    def status(self, snapshot: Snapshot) -> Iterable[Progress]:
        for folder in snapshot.layout.all_results():
            if (folder / "table.csv").exists():
                yield results_progress(self.name, snapshot, folder)


def _check_untrained(plan: RunPlan) -> None:
    """ConfigError where the row of an untrained encoder is asked for and the study has none to build it like."""
    encoder = plan.encoder
    there = plan.layout.encoder_config(encoder).exists() or bool(split_encoders(plan.study.root, encoder))
    if plan.settings.compare.random_encoder and not there:
        raise ConfigError(
            f"compare.random_encoder, and {encoder} is not among the study's encoders",
            "an untrained one is made like an encoder of the study",
            f"Copy its folder to encoders/{encoder} of the study, or leave the row out. Nothing was done",
            code="encoder-not-in-study",
        )
