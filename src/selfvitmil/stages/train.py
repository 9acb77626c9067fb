"""The stage `train`, and what `train`, `evaluate` and `compare` share: labelled slides, splits, features, models.

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
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selfvitmil.cohort import Cohort, Split
from selfvitmil.engine import Engine
from selfvitmil.errors import ArtefactError, ConfigError, MetricError
from selfvitmil.settings import StudySettings, TrainSettings, to_toml
from selfvitmil.stages.base import Basis, Engines, Estimate, Pending, Progress, Snapshot, Stage, unknown
from selfvitmil.stages.measure import STARTUP_S, Measures
from selfvitmil.stages.parallel_training import make_models
from selfvitmil.stages.run_plan import RunPlan
from selfvitmil.store.failures import record_failures
from selfvitmil.store.files import write_text
from selfvitmil.study.encoders import encoder_name
from selfvitmil.study.features import FeatureChoice, Features, find_features
from selfvitmil.study.folder import CohortSource, Summary, open_study, study_cohort
from selfvitmil.study.methods import TWO_SCALES

if TYPE_CHECKING:
    from selfvitmil.evaluate import Cases, Fitted, MethodResult, Trial


SECTIONS = {"preset", "tile", "train", "evaluate", "compare", "supervised"}
"""Settings that results depend on, saved beside them."""
COMPARISON_FILES = ("table.csv", "table.md", "auc.svg")
"""What only comparisons have among their results."""
OPTIMISTIC_LINE = "OPTIMISTIC: epochs, thresholds and kinds of evidence are chosen on the test slides"


# ---------------------------------------------------------------------------------------------------- commands


def train(study: Path, source: CohortSource, choice: FeatureChoice, settings: StudySettings, engine: Engine) -> Summary:
    """Train an aggregator on every split with every seed; writes `models/`. Test slides are not opened."""
    from selfvitmil.evaluate import hold_out_test_labels

    with open_study(study, "train"):
        lines, cases, splits, features = prepare(study, source, choice, settings, "train")
        trial = hold_out_test_labels(cases, splits, settings.evaluate)
        name = settings.train.aggregator
        fitted = fit_models(name, cases, trial, settings.train, features.models / name, engine, score_test=False)
        write_text(features.models / name / "settings.toml", to_toml(settings, SECTIONS))
    table = [("split", "seed", "epoch", "validation AUC", "seconds", "")]
    table += [
        (run.split, str(run.seed), str(run.epoch), _validation_auc(run, trial), f"{run.seconds:.0f}", str(run.outcome))
        for run in fitted.runs
    ]
    lines += evidence_lines(name, fitted)
    lines += [f"note: {warning}" for warning in (*trial.warnings, *run_warnings(fitted))]
    lines.append(f"{len(fitted.runs)} models in {below(study, features.models / name)}; evaluate them with `evaluate`")
    return Summary(tuple(lines), cases.failures, tuple(table))


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
    asked = [(trial, training) for training in trainings_of(name, trial, train, folder)]
    outcomes = make_models(asked, engine, store, report)
    return fit_method(
        name, trial, train, folder=folder, store=store, report=report, outcomes=outcomes, score_test=score_test
    )


def evidence_lines(name: str, fitted: Fitted) -> list[str]:
    """Which kinds of evidence the splits chose, and why."""
    from selfvitmil.aggregate.selection import evidence_words

    choices = {run.split: run.evidence for run in fitted.runs if run.evidence is not None}
    return [f"{name} looks for {text}" for text in evidence_words(list(choices.values()))]


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
    for line in lines:
        print(line, file=sys.stderr, flush=True)


# ---------------------------------------------------------------------------------------------------- features


def prepare(
    study: Path, source: CohortSource, choice: FeatureChoice, settings: StudySettings, stage: str
) -> tuple[list[str], Cases, tuple[Split, ...], Features]:
    """Lines to print first, cases, splits and features; slides that are no cases are in failures.csv by then."""
    from selfvitmil.evaluate import make_splits
    from selfvitmil.evaluate.dataset import find_transductive, transductive_words

    if settings.train.aggregator == TWO_SCALES and stage != "compare":
        choice = replace(choice, two_scales=True)
    cohort, lines = study_cohort(study, source)
    features = find_features(study, choice, settings)
    cases = labelled_cases(cohort, features, stage, settings.train.positive)
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


def labelled_cases(cohort: Cohort, features: Features, stage: str, positive: str | None) -> Cases:
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
    found = {split: labelled_cases(cohort, own, stage, positive) for split, own in features.by_split.items()}
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


# ---------------------------------------------------------------------------------------------------- rows


# ---------------------------------------------------------------------------------------------------- baselines


# ---------------------------------------------------------------------------------------------------- words


def results_name(name: str, settings: StudySettings) -> str:
    """Name of the folder of results, which says so where test labels took part in choices."""
    if encoder_name(name) != name:
        raise ConfigError(f"name {name!r} does not do as a folder's name", how=f"Try {encoder_name(name)!r}")
    return f"{name}_optimistic" if settings.evaluate.protocol == "optimistic" else name


def below(study: Path, folder: Path) -> str:
    return folder.relative_to(study).as_posix()


def epoch_reporter(title: str = "", seconds: float = 10.0) -> Callable[[dict[str, Any]], None]:
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


def run_warnings(fitted: Fitted) -> Iterable[str]:
    return dict.fromkeys(warning for run in fitted.runs for warning in run.warnings)


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


MODEL_BYTES = 1_000_000
"""Usual size of a stored model."""


def pending_models(plan: RunPlan, what: str) -> Pending:
    """What a stage that trains models has before it: it decides by itself which of the stored ones it uses again."""
    there = sum(1 for _ in plan.layout.models_on(plan.tiling, plan.features).rglob("config.json"))
    fate = (
        "the embeddings change, so they are trained again"
        if plan.pending("embed").changing
        else "those that fit are used again"
    )
    models = f"; {there} models are there, {fate}" if there else ""
    return Pending(words=f"evaluate {what} with {plan.settings.train.seeds} seeds{models}")


def estimate_training(plan: RunPlan, measures: Measures) -> Estimate:
    """Estimate the training of every row of the comparison on every split with every seed.

    Small bags on a CPU are trained side by side, one training per core.
    """
    from selfvitmil.aggregate.bag_tensors import ONE_THREAD_ELEMENTS

    cohort, train, encoder, gpu = plan.cohort, plan.settings.train, measures.encoder, measures.gpu
    if encoder is None:
        return unknown(on_gpu=gpu)
    one_split = train.split in ("auto", "given") and any(row.split for row in cohort.rows)
    trainings = train.seeds * (1 if one_split else train.folds)
    bags = len(cohort.select(split="train")) if one_split else len(cohort)
    largest = max(measures.tiles.values(), default=0) * encoder.network.dim
    side_by_side = 1 if gpu or largest >= ONE_THREAD_ELEMENTS else measures.processes
    seconds = STARTUP_S + trainings * bags * sum(measures.bag_s.values()) / side_by_side
    disk = trainings * len(measures.bag_s) * MODEL_BYTES
    return Estimate(seconds, disk, 12 * largest + 1e9, Basis.DERIVED, gpu)


class Train(Stage):
    """Train one aggregator. `run` does this as part of `compare` and `evaluate`."""

    name = "train"
    in_run = False
    is_learning = True

    def pending(self, plan: RunPlan) -> Pending:
        return pending_models(plan, plan.settings.train.aggregator)

    def estimate(self, plan: RunPlan, measures: Measures) -> Estimate:
        return estimate_training(plan, measures)

    def run(self, plan: RunPlan, engines: Engines) -> Summary:
        return train(plan.study, CohortSource(), FeatureChoice(plan.encoder), plan.settings, engines.slides)

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
        scores = [(each["slide"]["ensemble"]["auc"]["value"], each["method"]) for each in methods]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return "AUC " + ", ".join(f"{value:.3f} {name}" for value, name in sorted(scores, reverse=True)[:3])
