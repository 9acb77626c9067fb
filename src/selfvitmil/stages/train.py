"""The stage `train`, and what `train`, `evaluate` and `compare` share: methods, learning sets, models.

All three find the same cases (labelled slides with a sound feature file) and the same splits. `train` stops before any
test slide is opened; `evaluate` goes on to score them and writes one method's results; `compare` does so for many rows
and puts them into one table. Models that are up to date are used again, so each command picks up where another ended.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selfvitmil.cohort import Cohort
from selfvitmil.cohort.table import listing
from selfvitmil.engine import Engine, announce
from selfvitmil.errors import ArtefactError, ConfigError, MetricError
from selfvitmil.settings import LocalizeSettings, StudySettings, TrainSettings, to_toml
from selfvitmil.stages.base import (
    Basis,
    Engines,
    Estimate,
    Pending,
    Progress,
    Snapshot,
    Stage,
    StageResult,
    data_frame,
    unknown,
)
from selfvitmil.store.failures import record_failures
from selfvitmil.store.files import write_text
from selfvitmil.store.provenance import BuildOutcome, Freshness, outcome_of
from selfvitmil.study import (
    FeatureChoice,
    LearningSet,
    Study,
    encoder_name,
    models_folder,
    remember_features,
    target_name,
)

if TYPE_CHECKING:
    from selfvitmil.aggregate.selection import EvidenceChoice
    from selfvitmil.aggregate.train import BagStore
    from selfvitmil.commands.run import RunPlan
    from selfvitmil.evaluate import Cases, Fitted, MethodResult, Run, Trial
    from selfvitmil.evaluate.protocol import Report, Training
    from selfvitmil.evaluate.tuning import Asked, InnerTraining, Results, Tuning
    from selfvitmil.outcomes import Outcome
    from selfvitmil.stages.measure import Measures


SECTIONS = {"preset", "tile", "train", "evaluate", "compare", "supervised"}
"""Settings that results depend on, saved beside them."""
COMPARISON_FILES = ("table.csv", "table.md", "auc.svg")
"""What only comparisons have among their results."""
OPTIMISTIC_LINE = "OPTIMISTIC: epochs, thresholds and kinds of evidence are chosen on the test slides"


@dataclass(frozen=True)
class TrainedModel:
    """One training: a split with a seed."""

    split: str
    seed: int
    epoch: int
    """The epoch whose weights were kept, chosen on validation slides."""
    validation_auc: float | None
    """None where the validation slides are of one class; of another outcome than classes its primary metric."""
    seconds: float
    outcome: BuildOutcome


@dataclass(frozen=True)
class TrainResult(StageResult):
    """What `train` did."""

    method: str
    folder: Path
    """Where the models are."""
    models: tuple[TrainedModel, ...]
    metric: str = "AUC"
    """What `TrainedModel.validation_auc` is, in words."""

    def to_frame(self) -> Any:
        """Return a pandas DataFrame with a row for every split and seed."""
        rows = [{**vars(model), "outcome": str(model.outcome)} for model in self.models]
        return data_frame(rows, "split")


def train(study: Study, choice: FeatureChoice, engine: Engine) -> TrainResult:
    """Train an aggregator on every split with every seed; writes `models/`. Test slides are not opened."""
    from selfvitmil.evaluate import hold_out_test_labels

    settings = study.settings
    with study.lock("train"):
        notes, learning = prepare(study, choice, "train")
        trial = hold_out_test_labels(learning.cases, learning.splits, settings.evaluate, may_be_final=True)
        name = settings.train.aggregator
        folder = learning.features.models / name
        fitted = fit_models(name, learning.cases, trial, settings.train, folder, engine, score_test=False)
        write_text(folder / "settings.toml", to_toml(settings, SECTIONS))
    models = tuple(
        TrainedModel(run.split, run.seed, run.epoch, _validation_auc(run, trial), run.seconds, run.outcome)
        for run in fitted.runs
    )
    warnings = dict.fromkeys(warning for run in fitted.runs for warning in run.warnings)
    notes += evidence_lines(name, fitted)
    notes += [f"note: {warning}" for warning in (*trial.warnings, *warnings)]
    metric = "AUC" if trial.outcome is None else trial.outcome.primary_words
    return TrainResult(name, folder, models, metric, failures=learning.cases.failures, notes=tuple(notes))


def fit_models(
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
    from selfvitmil.evaluate.protocol import trainings_of

    store, report = BagStore.of(train), epoch_reporter()
    announce_recipes(cases, {name: train})
    (tuned,) = tune_methods([(name, trial, train, folder)], engine, store)
    asked = [(trial, training) for training in trainings_of(name, trial, train, folder, tuned=tuned)]
    outcomes = make_models(asked, engine, store, report)
    return fit_method(
        name, trial, train, folder=folder, store=store, report=report, outcomes=outcomes, score_test=score_test,
        tuned=tuned,
    )  # fmt: skip


def evidence_lines(name: str, fitted: Fitted) -> list[str]:
    """Which kinds of evidence and which settings the splits chose, and why."""
    from selfvitmil.aggregate.selection import evidence_words

    choices = {run.split: run.evidence for run in fitted.runs if run.evidence is not None}
    tuned = [f"settings of {name}, {split}: {own.words}" for split, own in fitted.tuned.items()]
    return [*tuned, *(f"{name} looks for {text}" for text in evidence_words(list(choices.values())))]


def announce_recipes(cases: Cases, rows: Mapping[str, TrainSettings]) -> None:
    """Print, before anything is trained, what the user may want to change: a guessed positive class, and recipes.

    Of a published recipe, how far it follows its source; of any, what is known to go wrong with it.
    """
    from selfvitmil.aggregate.recipes import note_of, recipe_of, recipe_warnings

    lines = [cases.positive_line] if cases.positive_is_guessed else []
    for title, train in rows.items():
        note = note_of(train.aggregator, train, cases.dim)
        lines += [f"recipe of {title}: {note.words}"] if train.recipe != "default" else []
        lines += [f"warning: {title}: {text}" for text in recipe_warnings(recipe_of(train.aggregator, train))]
    announce(*lines)


def _check_target_named(train: TrainSettings, stage: str) -> None:
    """ConfigError where models are for several targets, and none is named."""
    from selfvitmil.outcomes import joint_place

    if joint_place(train) is None:
        raise ConfigError(
            f"{stage} with train.joint, and no train.target",
            "models are for all targets, and results, heatmaps and packages for one of them",
            f"Set train.target to one of {listing(train.joint)}",
            code="target-needed",
        )


def prepare(study: Study, choice: FeatureChoice, stage: str) -> tuple[list[str], LearningSet]:
    """Return notes and what to learn from; slides that cannot be used are in failures.csv by then, under `stage`."""
    from selfvitmil.evaluate.dataset import find_transductive, site_words, transductive_words

    settings = study.settings
    if settings.train.joint and stage != "train":
        _check_target_named(settings.train, stage)
    if settings.train.aggregator == TWO_SCALES and stage != "compare":
        choice = replace(choice, two_scales=True)
    cohort = study.store_cohort()
    found = study.learning_set(choice)
    remember_features(study.root, choice)
    failures = tuple(replace(failure, stage=stage) for failure in found.cases.failures)
    record_failures(study.root, stage, cohort.slides, failures)
    cases, splits = replace(found.cases, failures=failures), found.splits
    seen = transductive_words(found.features.encoder, find_transductive(cases, splits), splits)
    # Before anything is trained; summaries come when all is over.
    by_site = site_words(cases, splits, settings.train)
    announce(*(f"warning: {warning}" for warning in (cases.usable.patient_warning, seen, by_site) if warning))
    first = splits[0]
    sizes = f"{len(first.train)} slides to train on, {len(first.val)} to choose by, {len(first.test)} to test on"
    notes = [*study.cohort_notes, *cases.lines()]
    notes.append(f"split {first.name}: {sizes}" if len(splits) == 1 else f"{len(splits)} splits, the first: {sizes}")
    notes += [OPTIMISTIC_LINE] if settings.evaluate.protocol == "optimistic" else []
    return notes, replace(found, cases=cases)


def results_name(name: str | None, default: str, settings: StudySettings) -> str:
    """Name of the folder of results, which says so where test labels took part in choices.

    Without a `name` it is the default one, and that of the target where one is set: a study may have several.
    """
    if name is None:
        target = target_name(settings.train)
        name = f"{default}_{target}" if target else default
    if encoder_name(name) != name:
        raise ConfigError(
            f"name {name!r} does not do as a folder's name", how=f"Try {encoder_name(name)!r}", code="invalid-name"
        )
    return f"{name}_optimistic" if settings.evaluate.protocol == "optimistic" else name


def epoch_reporter(title: str = "", seconds: float = 10.0) -> Callable[[dict[str, Any]], None]:
    """Prints how trainings go, no more often than every `seconds`."""
    last = time.monotonic()

    def show(line: dict[str, Any]) -> None:
        nonlocal last
        if time.monotonic() - last < seconds:
            return
        last = time.monotonic()
        auc = "" if line["val_auc"] is None else f", validation AUC {line['val_auc']:.3f}"
        auc += "".join(f", validation {key[4:]} {line[key]:.3f}" for key in line if _is_metric(key) and line[key])
        where = f"{title or line['method']}, {line['split']}, seed {line['seed']}"
        announce(f"{where}: epoch {line['epoch']}, loss {line['train_loss']:.3f}{auc}")

    return show


def _is_metric(key: str) -> bool:
    """Whether a key of a history line is the validation metric of an outcome other than classes."""
    return key.startswith("val_") and key not in ("val_loss", "val_auc")


def _validation_auc(run: Run, trial: Trial) -> float | None:
    import numpy as np

    from selfvitmil import metrics

    split = next(split for split in trial.splits if split.name == run.split)
    chosen_on = trial.chosen_on(split)
    labels = [case.label for case in chosen_on]
    scores = [run.chosen_on[case.slide].probabilities for case in chosen_on]
    if trial.outcome is not None:
        outcome = trial.outcome.fitted([case.label for case in split.train])
        return outcome.validation_metric(labels, np.array(scores))
    try:
        if trial.num_classes == 1:
            return metrics.auc(labels, [score[0] for score in scores])
        return metrics.multiclass_auc(labels, scores).macro.value
    except MetricError:
        return None


def remove_earlier_results(folder: Path, results: Sequence[MethodResult]) -> list[str]:
    """Remove what earlier results left in their folder, or it would pass for these; whatever else is there stays.

    Lesion scores stay where the predictions are the same as before: they are of the same models. What to tell.
    """
    from selfvitmil.evaluate import read_predictions
    from selfvitmil.evaluate.figures import figure_files
    from selfvitmil.localize.lesion_results import LESION_FILES

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
    return [
        f"note: {', '.join(old)} removed: they scored heatmaps of earlier models; --lesions scores the present ones"
    ]


# ---------------------------------------------------------------------------------------------------- methods


TWO_SCALES = "dsmil-lc"
"""The method that is for features of two scales, concatenated."""


BOTH_RECIPES = ("self-vit-mil", "dsmil")
"""Methods that a comparison shows with our recipe and with the published one, unless set otherwise."""


@dataclass(frozen=True)
class Compared:
    """A method of a comparison with the settings that its row is trained by."""

    method: str
    title: str
    """Of its row: the method's name, with `(published)` where that recipe stands beside the study's own."""
    train: TrainSettings

    @property
    def is_main_recipe(self) -> bool:
        """Whether it follows the recipe of the study, and so has the heatmaps of `localize`."""
        return self.title == self.method


def compared_methods(
    settings: StudySettings, *, two_scales: bool, outcome: Outcome | None = None
) -> tuple[Compared, ...]:
    """The aggregators of a comparison, `two_scales` where there are features of two.

    By default those that can predict the `outcome`; published recipes are for classes only.

    `compare.methods` names them, `METHOD:published` with that recipe. A published row is trained as its source says,
    whatever else `train` sets. ConfigError where one is not known, the baseline is none of them, or an option belongs
    to none.
    """
    from selfvitmil.aggregate import NAMES
    from selfvitmil.aggregate.base import CLASSES, nearest

    compare, train = settings.compare, settings.train
    asked = compare.methods or tuple(method for method in NAMES if method != TWO_SCALES or two_scales)
    if outcome is not None and not compare.methods:
        asked = tuple(method for method in asked if not CLASSES[method].needs_classes)
    elif not compare.methods and train.recipe == "default":
        asked = (*asked, *(f"{method}:published" for method in BOTH_RECIPES))
    rows: dict[str, Compared] = {}
    for text in asked:
        method, _, recipe = text.partition(":")
        if method not in NAMES:
            what = f"compare.methods: unknown method {method!r}{nearest(method, list(NAMES))}"
            raise ConfigError(what, how=f"There are {', '.join(NAMES)}", code="unknown-method")
        if recipe not in ("", "published"):
            raise ConfigError(
                f"compare.methods: {text!r}", how=f"Write {method} or {method}:published", code="unknown-recipe"
            )
        row = _compared(method, recipe, train)
        rows[row.title] = row
    _check_options(train, [row.method for row in rows.values()])
    if compare.baseline not in rows:
        meant = nearest(compare.baseline, list(rows))
        what = f"compare.baseline {compare.baseline!r} is not among the methods{meant}"
        raise ConfigError(what, how=f"There are {', '.join(rows)}", code="unknown-baseline")
    return tuple(rows.values())


SHARED = {
    "split", "split_folder", "folds", "validation", "seeds", "seed", "positive", "outcome", "target", "levels", "site",
    "joint", "joint_weights",
}  # fmt: skip
"""Settings that a published row shares with the others."""


def _compared(method: str, recipe: str, train: TrainSettings) -> Compared:
    if not recipe or train.recipe != "default":
        return Compared(method, method, options_for(method, train))
    shared = train.model_dump(include=SHARED)
    device = train.model_dump(include={"device", "cache_gb"})
    exact = TrainSettings.model_validate({**shared, **device, "aggregator": method, "recipe": "published"})
    return Compared(method, f"{method} (published)", exact)


def options_for(method: str, train: TrainSettings) -> TrainSettings:
    """Settings to train one of many methods: options without a method's name are those of `train.aggregator`."""
    from selfvitmil.aggregate.recipes import NUMBERS

    is_main = method == train.aggregator
    own = {key: value for key, value in train.options.items() if isinstance(value, dict) or is_main}
    space = {
        key: value for key, value in train.tune_space.items() if isinstance(value, dict) or key in NUMBERS or is_main
    }
    return train.model_copy(update={"aggregator": method, "options": own, "tune_space": space})


def _check_options(train: TrainSettings, methods: Sequence[str]) -> None:
    """ConfigError for an option that its method does not have, or whose method is not compared."""
    from selfvitmil.aggregate import settings_of

    plain = [key for key, value in train.options.items() if not isinstance(value, dict)]
    if plain and train.aggregator not in methods:
        raise ConfigError(
            f"train.options: {', '.join(plain)} for {train.aggregator}, which is not compared",
            "options without a method's name are those of train.aggregator",
            "Write them under [train.options.METHOD]",
            code="options-of-other-method",
        )
    known = settings_of(train.aggregator)
    for key in plain:
        if key not in known:
            how = (
                f"{train.aggregator} has {', '.join(known)}. Options of another method go under [train.options.METHOD]"
            )
            raise ConfigError(
                f"train.options: {train.aggregator} has no option {key!r}", how=how, code="unknown-aggregator-setting"
            )


def check_supervised(class_names: Sequence[str], cohort: Cohort, outcome: Outcome | None = None) -> None:
    """ConfigError where no row of a comparison can learn from annotated lesions."""
    if outcome is not None:
        raise ConfigError(
            f"compare.supervised with the outcome {outcome.kind}",
            "annotations mark tumour, which is the label of tiles for classes only",
            "Pass --compare.supervised none",
            code="supervised-needs-classes",
        )
    if len(class_names) != 2:
        raise ConfigError(
            f"compare.supervised with {len(class_names)} classes",
            "annotations distinguish tumour from normal tissue only",
            code="not-binary",
        )
    if not any(row.annotation is not None for row in cohort.rows if row.label == class_names[1]):
        raise ConfigError(
            f"compare.supervised without an annotated slide of {class_names[1]}",
            "it learns from annotated lesions",
            "Name files (ASAP XML or QuPath GeoJSON) in the column annotation of cohort.csv, or leave it out",
            code="no-annotations",
        )


def heatmap_settings(
    method: str, train: TrainSettings, num_classes: int, localize: LocalizeSettings, main: str
) -> LocalizeSettings:
    """How the heatmaps of a compared method are made: as asked, else by `auto` where it has no such score of tiles.

    The study's own method `main` is taken at its word. ConfigError for what the method would refuse besides.
    """
    try:
        try_method(method, train, num_classes, localize)
    except ConfigError:
        if method == main or localize.score == "auto":
            raise
        localize = localize.model_copy(update={"score": "auto"})
        try_method(method, train, num_classes, localize)
    return localize


def lesion_baseline(settings: StudySettings) -> str:
    """The row that heatmaps are compared with: that of the baseline's method, since published rows have none."""
    return settings.compare.baseline.removesuffix(" (published)")


def try_method(
    method: str,
    train: TrainSettings,
    num_classes: int,
    localize: LocalizeSettings | None = None,
    outcome: Outcome | None = None,
) -> None:
    """Build a method as its training will and score two tiles as `localize` does: it refuses now what it would then.

    ConfigError for an option or value that it does not know, and for a heatmap that it cannot give.
    """
    import numpy as np

    from selfvitmil.aggregate import build
    from selfvitmil.aggregate.recipes import recipe_of
    from selfvitmil.aggregate.train import BagStore
    from selfvitmil.bags import Bag
    from selfvitmil.localize.scores import choose_kind, combine, score_by_seeds

    tried = [train]
    if train.tune:
        from selfvitmil.evaluate.tuning import tuning_points, with_point

        tried = [*(with_point(method, train, point) for point in tuning_points(method, train)), train]
    recipes = [recipe_of(method, own) for own in tried]
    try:
        *_, module = (build(method, 1, num_classes, **recipe.module_options) for recipe in recipes)
    except ConfigError as error:
        raise ConfigError(f"train.options of {method}: {error.what}", error.why, error.how, code=error.code) from None
    if outcome is not None:
        module.predict(outcome)
    if localize is None:
        return
    bag = Bag("made", np.zeros((2, 1), np.float32), np.array([[0, 0], [1, 0]]), tile_extent=1.0)
    columns = combine(score_by_seeds([module], bag, localize.score, BagStore("cpu")), 0)
    choose_kind(localize.score, columns, method)


# ---------------------------------------------------------------------------------------------------- at once


WORTH_STARTING_S = 5.0
"""Seconds of trainings in this process after which others are asked: as long as they take to start."""
MOST_AT_ONCE = 8
"""Trainings that share a GPU: it has as many queues for their work."""


def make_models(
    asked: Iterable[tuple[Trial, Training]], engine: Engine, store: BagStore, report: Report
) -> dict[Path, BuildOutcome]:
    """Make models that are missing or stale, some of them in other processes; the outcome of each, by its folder.

    Other processes are worth it where bags are so small that one thread is enough for each training; whoever asked for
    the models then finds them up to date. Which process trains changes no bit of a model. On a GPU trainings share the
    bags that lie there, and on small ones several run at the same time. Large bags keep all cores, or the GPU, busy
    with one training: then, and on a CPU with `engine.workers` 0, they follow each other in this process. A training
    that fails in another process is left out: the caller repeats it, and its error says why.
    """
    from selfvitmil.evaluate.protocol import make_model

    todo = [(trial, each, found) for trial, each in asked if isinstance(found := each.stored(), Freshness)]
    if len(todo) < 3 or not _are_small(todo):
        return {}
    if store.device.type != "cpu":
        return _make_in_turns(todo, store, report)
    if engine.num_local < 2:
        return {}
    outcomes: dict[Path, BuildOutcome] = {}
    choices: dict[Any, EvidenceChoice | None] = {}
    start = time.monotonic()
    while todo and time.monotonic() - start < WORTH_STARTING_S:
        trial, training, freshness = todo.pop(0)
        with trial.labels.training(str(training)):
            model = training.make(freshness, trial.bag, store, report)
        choices[training.choice_key] = choices.get(training.choice_key) or model.evidence
        outcomes[_place(training)] = outcome_of(freshness)
    # What was chosen here need not be chosen by every process again.
    items = {str(_place(each)): replace(each, evidence=choices.get(each.choice_key)) for _, each, _ in todo}
    expected = {_place(training): outcome_of(freshness) for _, training, freshness in todo}
    with ExitStack() as stack:
        for trial, training, _ in todo:
            stack.enter_context(trial.labels.training(str(training)))
        for outcome in engine.map(make_model, items, stage="train", items_are="trainings", unit="trainings"):
            if outcome.failure is None:
                outcomes[Path(outcome.name)] = expected[Path(outcome.name)]
    return outcomes


def _make_in_turns(
    todo: Sequence[tuple[Trial, Training, Freshness]], store: BagStore, report: Report
) -> dict[Path, BuildOutcome]:
    """Make the models of several methods and splits at the same time, each with one seed after the other.

    Where fewer are left than can run, their seeds are trained side by side: those of the slowest methods.
    """
    from selfvitmil.aggregate.graphs import Seeds, seeds_in_turns
    from selfvitmil.evaluate.protocol import make_seeds

    expected = {_place(training): outcome_of(freshness) for _, training, freshness in todo}
    groups: dict[Path, Seeds[Training, Training]] = {}

    def group_of(trial: Trial, training: Training) -> Seeds[Training, Training]:
        place = _place(training).parent

        def note(line: dict[str, Any]) -> None:
            groups[place].note(line)
            report(line)

        return groups.setdefault(place, Seeds(partial(make_seeds, bag_of=trial.bag, store=store, report=note)))

    with ExitStack() as stack:
        for trial, training, _ in todo:
            stack.enter_context(trial.labels.training(str(training)))
            group_of(trial, training).left.append(training)
        return {_place(made): expected[_place(made)] for made in seeds_in_turns(list(groups.values()), MOST_AT_ONCE)}


def _are_small(todo: Iterable[tuple[Trial, Training, Any]]) -> bool:
    from selfvitmil.aggregate.bag_tensors import are_small

    return are_small(trial.bag(case) for trial, each, _ in todo for case in (*each.training, *each.chosen_on))


def tune_methods(asked: Sequence[Asked], engine: Engine, store: BagStore) -> list[dict[str, Tuning]]:
    """Choose the settings of every method with `train.tune`, by inner folds of each split; in several processes where
    bags are small, as `make_models` does."""
    if not any(train.tune for _, _, train, _ in asked):
        return [{} for _ in asked]
    from selfvitmil.evaluate.tuning import score_elsewhere, tune

    report = epoch_reporter()

    def score_all(trial: Trial, todo: Sequence[InnerTraining]) -> Results:
        found: dict[int, tuple[float | None, EvidenceChoice | None]] = {}
        at_once = store.device.type == "cpu" and engine.num_local > 1 and len(todo) > 1
        if at_once and _are_small([(trial, each.training, None) for each in todo]):
            items = {str(place): each for place, each in enumerate(todo)}
            done = engine.map(score_elsewhere, items, stage="tune", items_are="trainings", unit="trainings")
            found = {int(each.name): each.value for each in done if each.value is not None}
        for place, each in enumerate(todo):  # one that failed elsewhere fails again here, and says why
            if place not in found:
                found[place] = each.score(trial.bag, store, report)
        return [found[place] for place in range(len(todo))]

    return tune(asked, score_all)


def _place(training: Training) -> Path:
    assert training.place is not None, "models that are made elsewhere are found by their folders"
    return training.place


# ---------------------------------------------------------------------------------------------------- stage


MODEL_BYTES = 3_000_000
"""Usual size of a stored model."""


def pending_models(plan: RunPlan, what: str, *, tunes: bool = True) -> Pending:
    """What a stage that trains models has before it: it decides by itself which of the stored ones it uses again."""
    folder = models_folder(plan.study.root, plan.tiling, plan.features, plan.settings.train)
    there = sum(1 for _ in folder.rglob("config.json"))
    fate = (
        "the embeddings change, so they are trained again"
        if plan.pending("embed").changing
        else "those that fit are used again"
    )
    models = f"; {there} models are there, {fate}" if there else ""
    number = num_tuning_trainings(plan) if tunes else 0
    tuning = f"; before, {number} trainings choose settings by cross-validation" if number else ""
    return Pending(words=f"evaluate {what} with {plan.settings.train.seeds} seeds{models}{tuning}")


def trained_rows(plan: RunPlan) -> tuple[Compared, ...]:
    """Return the methods that a run trains."""
    settings, labels = plan.settings, plan.labels
    train = settings.train
    if plan.request.one_method:
        return (Compared(train.aggregator, train.aggregator, train),)
    outcome = None if labels is None else labels.trained_on
    return compared_methods(settings, two_scales=bool(settings.tile.parent_mpp), outcome=outcome)


def num_tuning_trainings(plan: RunPlan) -> int:
    """Return how many trainings choose settings, over all methods and splits; none without `train.tune`."""
    rows, settings = trained_rows(plan), plan.settings
    asked = [(row.method, row.train) for row in rows if row.train.tune]
    if settings.train.tune and not plan.request.one_method:  # rows of the main method on other features
        both_scales = {TWO_SCALES, "self-vit-mil"} <= {row.title for row in rows}
        others = settings.compare.random_encoder + settings.compare.mean_color + both_scales
        asked += [("self-vit-mil", options_for("self-vit-mil", settings.train))] * others
    if not asked:
        return 0
    from selfvitmil.evaluate.tuning import tuning_points

    return _num_splits(plan) * settings.train.tune_folds * sum(len(tuning_points(*each)) for each in asked)


def _num_splits(plan: RunPlan) -> int:
    cohort, train = plan.cohort, plan.settings.train
    if train.split == "all" or (train.split in ("auto", "given") and any(row.split for row in cohort.rows)):
        return 1
    if train.split == "leave-site-out":
        return len({row.value(train.site) for row in cohort.rows} - {None})
    return train.folds


def estimate_training(plan: RunPlan, measures: Measures) -> Estimate:
    """Estimate the training of every row of the comparison on every split with every seed.

    Small bags on a CPU are trained side by side, one training per core.
    """
    from selfvitmil.aggregate.bag_tensors import ONE_THREAD_ELEMENTS

    cohort, train, encoder, gpu = plan.cohort, plan.settings.train, measures.encoder, measures.gpu
    if encoder is None:
        return unknown(on_gpu=gpu)
    splits = _num_splits(plan)
    bags = len(cohort.select(split="train")) if splits == 1 else len(cohort)
    largest = max(measures.tiles.values(), default=0) * encoder.network.dim
    side_by_side = 1 if gpu or largest >= ONE_THREAD_ELEMENTS else measures.processes
    bag_s = sum(measures.bag_s.values())
    tuning_s = sum(_tuning_share(row) * measures.bag_s.get(row.title, 0.0) for row in trained_rows(plan))
    seconds = measures.startup_s + splits * bags * (train.seeds * bag_s + tuning_s) / side_by_side
    disk = splits * train.seeds * len(measures.bag_s) * MODEL_BYTES
    return Estimate(seconds, disk, 12 * largest + 1e9, Basis.DERIVED, gpu)


def _tuning_share(row: Compared) -> int:
    """Return how many trainings on all bags the choice of a split's settings is worth: each inner fold leaves out its
    share of the bags."""
    if not row.train.tune:
        return 0
    from selfvitmil.evaluate.tuning import tuning_points

    return len(tuning_points(row.method, row.train)) * (row.train.tune_folds - 1)


class Train(Stage):
    """Train one aggregator. `run` does this as part of `compare` and `evaluate`."""

    name = "train"
    in_run = False
    is_learning = True

    def pending(self, plan: RunPlan) -> Pending:
        return pending_models(plan, plan.settings.train.aggregator)

    def estimate(self, plan: RunPlan, measures: Measures) -> Estimate:
        return estimate_training(plan, measures)

    def run(self, plan: RunPlan, engines: Engines) -> TrainResult:
        return train(plan.study, FeatureChoice(plan.encoder), engines.slides)

    def status(self, snapshot: Snapshot) -> Iterable[Progress]:
        for folder in snapshot.layout.all_models():
            yield snapshot.progress(self.name, folder, folder.rglob("config.json"), None)


def results_progress(stage: str, snapshot: Snapshot, folder: Path) -> Progress:
    """Progress of a folder of results, with the AUC of its best methods."""
    files = [path for path in (folder / "metrics.json", folder / "table.csv") if path.exists()]
    return snapshot.progress(stage, folder, files, 1, done=int(bool(files)), words=_best_auc(folder))


def _best_auc(folder: Path) -> str:
    """The AUC of each method, best first; empty where it cannot be read."""
    try:
        methods = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))["methods"]
        outcome = methods[0].get("outcome")
        if outcome is not None:
            name, highest_first = outcome["primary"], outcome["higher_is_better"]
            known = [(each["slide"]["ensemble"][name]["value"], each["method"]) for each in methods]
            ranked = sorted(known, key=lambda own: own[0], reverse=highest_first)
            return f"{name} " + ", ".join(f"{value:.3f} {method}" for value, method in ranked[:3])
        scores = [(each["slide"]["ensemble"]["auc"]["value"], each["method"]) for each in methods]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return "AUC " + ", ".join(f"{value:.3f} {name}" for value, name in sorted(scores, reverse=True)[:3])
