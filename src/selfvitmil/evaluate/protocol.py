"""Evaluation protocol: train a method on all splits and seeds, choose thresholds, score the test set.

    splits = make_splits(cases, train_settings, evaluate_settings)
    trial = hold_out_test_labels(cases, splits, evaluate_settings)  # test labels are held out from here on
    fitted = fit_method("dsmil", trial, train_settings)     # for every method: train, score, choose thresholds
    trial.labels.open(FINAL_SCORING)                        # no training run can start after this
    result = evaluate_method(fitted, trial)                 # predictions with labels

`run_method` does the last four for one method. A comparison fits all methods before it opens the labels.

`honest`: the epoch is chosen on validation slides, threshold and calibration on their scores. `optimistic`: the test
set replaces the validation set in all three, no validation set is split off, and the labels are opened at the start.

A `Training` is all that one model is built from: training slides, the slides that its epoch is chosen on, settings and
seed. It holds nothing of the test slides, so that it may be sent to another process (`make_model`). Models are stored
in <folder>/<split>/seed<k>/ (<split>_optimistic under that protocol). A model whose stored hash of recipe, seed,
slides, labels and feature files is that of its training is up to date and used again; `stored_models` and
`check_models` use stored models without training. The ensemble is the mean of the seeds' probabilities, with its own
threshold and calibration.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from selfvitmil.aggregate import Aggregator
from selfvitmil.aggregate.dsmil import AUTO
from selfvitmil.aggregate.graphs import Queued
from selfvitmil.aggregate.joint import part_of
from selfvitmil.aggregate.recipes import RecipeNote, note_of, recipe_of
from selfvitmil.aggregate.selection import EvidenceChoice
from selfvitmil.aggregate.train import (
    BagScore,
    BagStore,
    LabelledBag,
    Trained,
    choice_numbers,
    load_model,
    save_model,
    train_seeds,
)
from selfvitmil.aggregate.train import score as score_bags
from selfvitmil.aggregate.train import train as train_aggregator
from selfvitmil.bags import Bag
from selfvitmil.cohort import Split
from selfvitmil.errors import ArtefactError, SelfVitMilError
from selfvitmil.evaluate.dataset import FINAL_SCORING, BagFile, Case, Cases, Trial, TrialSplit, hold_out_test_labels
from selfvitmil.evaluate.predictions import Choice, Prediction, Values, choose
from selfvitmil.outcomes import Outcome
from selfvitmil.settings import EvaluateSettings, TrainSettings
from selfvitmil.store.files import hash_of
from selfvitmil.store.layout import CONFIG_FILE, model_folder
from selfvitmil.store.provenance import (
    MISSING,
    UP_TO_DATE,
    BuildOutcome,
    Change,
    ChangeKind,
    Freshness,
    Provenance,
    compare_digests,
    describe_changes,
    outcome_of,
    stale,
)

if TYPE_CHECKING:
    from selfvitmil.evaluate.tuning import Tuning

VERSION = 2
"""Of what a training does with its inputs; a higher one makes stored models stale."""
ACCUMULATED_TRANSMIL = 3
"""The same for TransMIL with several bags a step, whose position biases once counted each bag three times."""

Report = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, eq=False)
class Model:
    """A trained aggregator with epoch, warnings and training time."""

    module: Aggregator
    epoch: int
    outcome: BuildOutcome
    """Up to date where a stored model was used."""
    seconds: float
    """Training time, also of an earlier run."""
    warnings: tuple[str, ...]
    evidence: EvidenceChoice | None
    """Choice of the kind of evidence, where the recipe says `auto`."""


@dataclass(frozen=True, eq=False)
class Training:
    """One training run: a method on one split with one seed, and the folder of its model."""

    name: str
    split: str
    seed: int
    num_classes: int
    settings: TrainSettings
    training: tuple[Case, ...]
    chosen_on: tuple[Case, ...]
    place: Path | None
    """The model's folder; None where it is not stored."""
    about: Mapping[str, Any]
    """Metadata stored with the model."""
    outcome: Outcome | None = None
    """What is predicted; None for classes."""
    evidence: EvidenceChoice | None = None
    """The kind of evidence, where another training has chosen it (`choice_key`)."""
    target_place: int | None = None
    """The target whose scores are wanted, where several are trained jointly."""

    def __str__(self) -> str:
        return f"{self.name}, {self.split}, seed {self.seed}"

    def stored(self) -> Model | Freshness:
        """Return the stored model where it is up to date, else why there is none."""
        if self.place is None or not (self.place / CONFIG_FILE).exists():
            return MISSING
        try:
            module, config = load_model(self.place)
            lines = (self.place / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
            seconds = _seconds(json.loads(line) for line in lines)
            evidence = None if config["evidence"] is None else EvidenceChoice(**config["evidence"])
            freshness = self._freshness(config)
        except (SelfVitMilError, OSError, ValueError, KeyError, TypeError):
            return stale(Change(ChangeKind.DAMAGED_FILE, "stored model"))
        if not freshness.is_up_to_date:
            return freshness
        module = part_of(module, self.target_place)
        return Model(module, int(config["epoch"]), UP_TO_DATE, seconds, tuple(config["warnings"]), evidence)

    def _freshness(self, config: Mapping[str, Any]) -> Freshness:
        """Compare hashes; a stale model names the changes that its config reveals, not those of labels and features."""
        stored, now = config.get("made_from"), self.about["made_from"]
        return compare_digests(stored, now, () if stored == now else self._named_changes(config))

    def _named_changes(self, config: Mapping[str, Any]) -> tuple[Change, ...]:
        recipe = recipe_of(self.name, self.settings).for_dim(int(config["aggregator"]["dim"])).to_json()
        stored = dict(config["recipe"])
        if recipe["options"].get("evidence") == AUTO:  # stored is what was chosen
            recipe["options"], stored["options"] = ({**each["options"], "evidence": AUTO} for each in (recipe, stored))
        without = ("source", "departs")
        now, before = (
            Provenance(
                "train",
                VERSION,
                {"recipe": {key: value for key, value in numbers.items() if key not in without}},
                {key: info.get(key) for key in ("classes", "trained_on", "chosen_on")},
            )
            for numbers, info in ((recipe, self.about), (stored, config))
        )
        return now.compare(before).changes

    def make(
        self, freshness: Freshness, bag_of: Callable[[Case], Bag], store: BagStore, report: Report | None
    ) -> Model:
        """Train on labelled training and validation bags only; store the model if it has a folder."""
        trained = self._trained(bag_of, store, report)
        self.save(trained)
        seconds = _seconds(trained.history)
        outcome = outcome_of(freshness)
        module = part_of(trained.module, self.target_place)
        return Model(module, trained.epoch, outcome, seconds, trained.warnings, trained.evidence)

    def save(self, trained: Trained) -> None:
        """Store the model if it has a folder."""
        if self.place is not None:
            # An old config must not stay beside new weights if the process is killed in between.
            (self.place / CONFIG_FILE).unlink(missing_ok=True)
            save_model(self.place, trained, dict(self.about))

    def _trained(self, bag_of: Callable[[Case], Bag], store: BagStore, report: Report | None) -> Trained:
        return train_aggregator(
            self.name, *self.bags(bag_of), self.num_classes, self.settings, self.seed, outcome=self.outcome,
            store=store, evidence=self.evidence, report=None if report is None else partial(self.tell, report),
        )  # fmt: skip

    @property
    def choice_key(self) -> tuple[Any, ...]:
        """Equal for trainings that choose the same kind of evidence: of one split, on the same files."""
        return self.training[0].path.parent, self.split, choice_numbers(recipe_of(self.name, self.settings))

    def bags(self, bag_of: Callable[[Case], Bag]) -> tuple[list[LabelledBag], list[LabelledBag]]:
        """Return the labelled bags that are trained on, and those that the epoch is chosen on."""
        training, validation = (
            [LabelledBag(case.slide, bag_of(case), case.label, case.patient) for case in part]
            for part in (self.training, self.chosen_on)
        )
        return training, validation

    def tell(self, report: Report, line: dict[str, Any]) -> None:
        """Report an epoch with method, split and seed."""
        report({"method": self.name, "split": self.split, "seed": self.seed, **line})


def make_seeds(
    trainings: deque[Training], bag_of: Callable[[Case], Bag], store: BagStore, report: Report
) -> Iterator[Training | Queued]:
    """Make the models of trainings that differ in their seeds alone, each taken from `trainings` when it begins.

    Yields each training when its model is stored, and `Queued` while the device is at work (`in_turns`).
    """
    if not trainings:
        return
    first, by_seed = trainings[0], dict[int, Training]()

    def seeds() -> Iterator[int]:
        while trainings:
            training = trainings.popleft()
            by_seed[training.seed] = training
            yield training.seed

    results = train_seeds(
        first.name, *first.bags(bag_of), first.num_classes, first.settings, seeds(), outcome=first.outcome,
        store=store, report=lambda seed, line: by_seed[seed].tell(report, line),
    )  # fmt: skip
    for trained in results:
        if isinstance(trained, Queued):
            yield trained
        else:
            *_, training = by_seed.values()
            training.save(trained)
            yield training


def trainings_of(
    name: str,
    trial: Trial,
    train: TrainSettings,
    folder: Path | None,
    splits: Sequence[TrialSplit] | None = None,
    tuned: Mapping[str, Tuning] | None = None,
) -> list[Training]:
    """Return all training runs of a method: every split (or these) with every seed.

    With `train.tune` the settings of a split are those in `tuned`, else the stored ones; ArtefactError without either.
    """
    splits = trial.splits if splits is None else splits
    seeds = range(train.seed, train.seed + train.seeds)
    of_splits = _settings_of_splits(name, trial, train, folder, splits, tuned)
    return [
        _training(name, trial, settings, folder, split, seed, tuning)
        for split, settings, tuning in of_splits
        for seed in seeds
    ]


def _settings_of_splits(
    name: str,
    trial: Trial,
    train: TrainSettings,
    folder: Path | None,
    splits: Sequence[TrialSplit],
    tuned: Mapping[str, Tuning] | None,
) -> list[tuple[TrialSplit, TrainSettings, Tuning | None]]:
    """Return every split with the settings of its models: as given, or with `train.tune` those that were chosen."""
    if not train.tune:
        return [(split, train, None) for split in splits]
    from selfvitmil.evaluate.tuning import chosen_settings

    found = [chosen_settings(name, trial, train, folder, split, tuned) for split in splits]
    return [(split, own.apply(name, train), own) for split, own in zip(splits, found, strict=True)]


def make_model(training: Training) -> None:
    """Train and store one model in a worker process; the `Training` is all it needs."""
    found = training.stored()
    if isinstance(found, Freshness):
        settings = training.settings
        read, store = shared_bags(training.training[0].path.parent, settings.device, settings.cache_gb)
        training.make(found, read, store, None)


@lru_cache(maxsize=1)
def shared_bags(folder: Path, device: str, cache_gb: float | None) -> tuple[Callable[[Case], Bag], BagStore]:
    """Return a reader of a folder's bags and their store, which all trainings on that folder in this process share.

    Bags are then read, checked and measured once, and the kind of evidence is chosen once. A `Case` holds its file's
    fingerprint, so a file that has changed is read anew. The next folder replaces this one.
    """
    return cache(Case.read), BagStore(device, cache_gb)


def _training(
    name: str,
    trial: Trial,
    train: TrainSettings,
    folder: Path | None,
    split: TrialSplit,
    seed: int,
    tuning: Tuning | None,
) -> Training:
    # Of a joint training slides without a value of this target too: models are the same for all its targets.
    learned, chosen_on = (
        (split.train, trial.chosen_on(split)) if split.whole is None else (split.whole.train, split.whole.val)
    )
    made_from = _made_from(name, train, seed, trial, (learned, chosen_on))
    about = {
        **({} if tuning is None else {"tuning": tuning.to_json()}),
        "made_from": made_from if tuning is None else hash_of(made_from, tuning.made_from),
        "split": split.name,
        "seed": seed,
        "classes": list(trial.class_names) if trial.target_place is None else [],
        "protocol": trial.evaluate.protocol,
        "epoch_from": trial.where,
        "encoder": trial.encoder,
        "tiling": trial.tiling,
        "trained_on": [case.slide for case in learned],
        "chosen_on": [case.slide for case in chosen_on],
    }
    place = None if folder is None else model_folder(folder, model_name(split.name, trial.optimistic), seed)
    return Training(
        name, split.name, seed, trial.num_outputs, train, learned, chosen_on, place, about, trial.trained_on,
        target_place=trial.target_place,
    )  # fmt: skip


def _made_from(name: str, train: TrainSettings, seed: int, trial: Trial, parts: Sequence[Sequence[Case]]) -> str:
    """Hash of all that a training depends on: recipe, seed, classes, every slide's patient, label and feature file."""
    resolved = recipe_of(name, train)
    # A field that is seldom set takes no part where it is not, so that models from before it was there stay up to date.
    without = {"source", "departs"} if resolved.keep_min_lr else {"source", "departs", "keep_min_lr"}
    recipe = {key: value for key, value in resolved.to_json().items() if key not in without}
    slides = [[(case.slide, case.patient, case.label, case.identity) for case in part] for part in parts]
    predicted = trial.class_names if trial.trained_on is None else trial.trained_on.to_json()
    accumulates = resolved.accumulate > 1 or (trial.trained_on is not None and trial.trained_on.needs_batch)
    version = ACCUMULATED_TRANSMIL if name == "transmil" and accumulates else VERSION
    return hash_of(version, name, recipe, seed, predicted, slides)


def model_name(split: str, optimistic: bool) -> str:
    """Return the folder name of a split's models; each protocol has its own."""
    return f"{split}_optimistic" if optimistic else split


def _seconds(history: Iterable[Mapping[str, Any]]) -> float:
    return sum(float(line["seconds"]) for line in history)


# ---------------------------------------------------------------------------------------------------- evaluation


Floats = NDArray[np.float64]


def run_method(
    name: str,
    cases: Cases,
    splits: Sequence[Split],
    train: TrainSettings,
    evaluate: EvaluateSettings,
    *,
    title: str = "",
    folder: Path | None = None,
    store: BagStore | None = None,
    report: Report | None = None,
) -> MethodResult:
    """Train and evaluate one method, holding out test labels until the end. Arguments as in `fit_method`."""
    trial = hold_out_test_labels(cases, splits, evaluate)
    fitted = fit_method(name, trial, train, title=title, folder=folder, store=store, report=report)
    trial.labels.open(FINAL_SCORING)
    return evaluate_method(fitted, trial)


# ---------------------------------------------------------------------------------------------------- training


@dataclass(frozen=True, eq=False)
class Run:
    """One training run: a method on one split with one seed."""

    split: str
    seed: int
    epoch: int
    """Chosen epoch."""
    outcome: BuildOutcome
    """Up to date where a stored model was used."""
    seconds: float
    """Training time, also of an earlier run."""
    warnings: tuple[str, ...]
    chosen_on: Mapping[str, BagScore]
    """Scores of the slides that the threshold is chosen on."""
    test: Mapping[str, BagScore]
    evidence: EvidenceChoice | None = None
    """Choice of the kind of evidence, where the recipe says `auto`."""


@dataclass(frozen=True, eq=False)
class Fitted:
    """All training runs of one method with thresholds and calibrations; independent of test labels."""

    method: str
    """Name of its row."""
    aggregator: str
    runs: tuple[Run, ...]
    choices: Mapping[tuple[str, int | None], Choice]
    """(split, seed) -> threshold and calibration; the seed is None for the ensemble."""
    recipe: RecipeNote | None = None
    """How it was trained compared with the published recipe; None for what is no aggregator."""
    tuned: Mapping[str, Tuning] = field(default_factory=dict[str, Any])
    """Split -> choice of its settings, with `train.tune`."""


def fit_method(
    name: str,
    trial: Trial,
    train: TrainSettings,
    *,
    title: str = "",
    folder: Path | None = None,
    store: BagStore | None = None,
    report: Report | None = None,
    outcomes: Mapping[Path, BuildOutcome] = MappingProxyType({}),
    score_test: bool = True,
    tuned: Mapping[str, Tuning] | None = None,
) -> Fitted:
    """Train the aggregator `name` on every split with every seed, score bags, choose thresholds and calibrations.

    `title` names the row if it is not `name`; `folder` stores the models (models/<tiling>/<encoder>/<aggregator>);
    `report` is called for every epoch with method, split and seed. `outcomes` are those of models trained just before,
    by folder; other stored models are up to date. With `score_test=False` test bags are not opened. `tuned` are the
    choices of settings that `train.tune` asks for (`tuning.tune`), where they are not stored.
    """
    # One store for all training runs: bags are checked, measured and uploaded once.
    fitter = _Fitter(trial, store or BagStore.of(train))
    trainings = trainings_of(name, trial, train, folder, tuned=tuned)
    runs = [fitter.run(training, report, outcomes, score_test) for training in trainings]
    return _chosen(title or name, name, runs, trial, train, folder, tuned)


def _chosen(
    title: str,
    name: str,
    runs: Sequence[Run],
    trial: Trial,
    train: TrainSettings,
    folder: Path | None,
    tuned: Mapping[str, Tuning] | None = None,
) -> Fitted:
    """Return the runs with their thresholds, and the description of the recipe."""
    of_splits = _settings_of_splits(name, trial, train, folder, trial.splits, tuned)
    found = {split.name: tuning for split, _, tuning in of_splits if tuning is not None}
    note = note_of(name, train, _dim(trial))
    if found:
        from selfvitmil.evaluate.tuning import tuned_note

        note = tuned_note(note, found)
    return replace(choose_thresholds(title, name, runs, trial, note), tuned=found)


def _dim(trial: Trial) -> int:
    """Return the feature dimension of the bags."""
    return trial.bag(trial.splits[0].train[0]).dim


@dataclass(frozen=True, eq=False)
class _Fitter:
    """Shared state of all training runs of a method."""

    trial: Trial
    store: BagStore

    def run(
        self, training: Training, report: Report | None, outcomes: Mapping[Path, BuildOutcome], score_test: bool
    ) -> Run:
        """Return the run of the stored model if it is up to date, else of a new one, with its scores."""
        model = training.stored()
        if isinstance(model, Freshness):
            with self.trial.labels.training(str(training)):
                model = training.make(model, self.trial.bag, self.store, report)
        elif training.place is not None:
            model = replace(model, outcome=outcomes.get(training.place, model.outcome))
        return self.scored_run(training, model, score_test)

    def scored_run(self, training: Training, model: Model, score_test: bool) -> Run:
        (split,) = (each for each in self.trial.splits if each.name == training.split)
        scored = self._scored(model, self.trial.chosen_on(split))
        test = self._scored(model, split.test) if score_test else {}
        return Run(
            split.name, training.seed, model.epoch, model.outcome, model.seconds, model.warnings, scored, test,
            model.evidence,
        )  # fmt: skip

    def _scored(self, model: Model, cases: Sequence[BagFile]) -> dict[str, BagScore]:
        scores = score_bags(model.module, [self.trial.bag(case) for case in cases], store=self.store)
        return {case.slide: score for case, score in zip(cases, scores, strict=True)}


def ensemble_scores(fitted: Fitted, slides: Sequence[str]) -> NDArray[np.float64]:
    """Return the mean scores (V, K) over all runs of the slides that choices were made on."""
    runs = [[run.chosen_on[slide].probabilities for slide in slides] for run in fitted.runs]
    return np.mean(np.array(runs, dtype=np.float64), axis=0)


# ---------------------------------------------------------------------------------------------------- stored models


@dataclass(frozen=True, eq=False)
class Stored:
    """Stored models of a method with their thresholds and calibrations."""

    modules: Mapping[tuple[str, int], Aggregator]
    """(split, seed) -> trained aggregator."""
    fitted: Fitted
    """Without scores of the test set."""


def check_models(name: str, trial: Trial, train: TrainSettings, folder: Path) -> dict[str, str]:
    """Return split -> hash of its models' inputs; raise ArtefactError unless all models are up to date."""
    made_from: dict[str, list[str]] = {}
    for training in _up_to_date_models(name, trial, train, folder):
        made_from.setdefault(training.split, []).append(training.about["made_from"])
    return {split: hash_of(hashes) for split, hashes in made_from.items()}


def stored_models(
    name: str, trial: Trial, train: TrainSettings, folder: Path, *, store: BagStore | None = None
) -> Stored:
    """Return stored models and the result of `fit_method` without test scores; raise ArtefactError if any is stale."""
    fitter = _Fitter(trial, store or BagStore.of(train))
    current = _up_to_date_models(name, trial, train, folder)
    modules = {(training.split, training.seed): model.module for training, model in current.items()}
    runs = [fitter.scored_run(training, model, score_test=False) for training, model in current.items()]
    return Stored(modules, _chosen(name, name, runs, trial, train, folder))


def _up_to_date_models(name: str, trial: Trial, train: TrainSettings, folder: Path) -> dict[Training, Model]:
    """Return all models by training run; raise ArtefactError where any is missing, damaged or stale."""
    current: dict[Training, Model] = {}
    problems: dict[str, list[str]] = {}
    for split in trial.splits:
        for training in trainings_of(name, trial, train, folder, [split]):
            found = training.stored()
            if isinstance(found, Model):
                current[training] = found
            else:
                reason = "there is none" if found == MISSING else describe_changes(found.changes)
                problems.setdefault(reason, []).append(f"seed{training.seed}")
        if problems:
            info = "; ".join(f"{', '.join(seeds)}: {reason}" for reason, seeds in problems.items())
            raise ArtefactError(
                f"{name}: no up-to-date models of {split.name} ({info})",
                "this command uses trained models and does not train",
                f"Run `selfvitmil train` with the same flags first (--train.aggregator {name})",
                code="no-up-to-date-models",
            )
    return current


# ---------------------------------------------------------------------------------------------------- thresholds


@dataclass(frozen=True, eq=False)
class _Scored:
    """Probabilities (N, K) of one seed or of the ensemble, with those of the two streams."""

    score: Floats
    max: Floats | None
    bag: Floats | None

    def values(self, stream: Literal["max", "bag"], row: int) -> Values | None:
        array: Floats | None = getattr(self, stream)
        return None if array is None else tuple(array[row].tolist())


def choose_thresholds(
    method: str, aggregator: str, runs: Sequence[Run], trial: Trial, recipe: RecipeNote | None = None
) -> Fitted:
    """Choose thresholds and calibrations of all training runs and of the ensembles."""
    choices: dict[tuple[str, int | None], Choice] = {}
    for split in trial.splits:
        chosen_on = trial.chosen_on(split)
        own = [run for run in runs if run.split == split.name]
        for seed, scored in _with_ensemble(own, "chosen_on", chosen_on).items():
            choices[split.name, seed] = _choose(trial, chosen_on, scored.score, trial.where)
    return Fitted(method, aggregator, tuple(runs), choices, recipe)


def _choose(trial: Trial, cases: Sequence[Case], scores_NK: Floats, where: str) -> Choice:
    labels = [case.label for case in cases]
    if trial.outcome is None:
        return choose(labels, scores_NK, trial.evaluate, where)
    cut, origin = trial.outcome.choose(labels, scores_NK, where)
    return Choice(cut, origin, None, "none", trial.outcome)


def _with_ensemble(
    runs: Sequence[Run], part: Literal["chosen_on", "test"], cases: Sequence[BagFile]
) -> dict[int | None, _Scored]:
    """Return the scores of every seed and, under None, their mean; streams where all seeds have them."""
    slides = [case.slide for case in cases]
    scored: dict[int | None, _Scored] = {}
    for run in runs:
        rows = [getattr(run, part)[slide] for slide in slides]
        streams = ("max_probabilities", "bag_probabilities")
        scored[run.seed] = _Scored(
            np.array([row.probabilities for row in rows], dtype=np.float64),
            *(_array([getattr(row, stream) for row in rows]) for stream in streams),
        )
    parts = list(scored.values())
    scored[None] = _Scored(
        np.mean([part.score for part in parts], axis=0),
        _mean([part.max for part in parts]),
        _mean([part.bag for part in parts]),
    )
    return scored


def _array(rows: Sequence[Values | None]) -> Floats | None:
    return None if any(row is None for row in rows) else np.array(rows, dtype=np.float64)


def _mean(arrays: Sequence[Floats | None]) -> Floats | None:
    present = [array for array in arrays if array is not None]
    return np.mean(present, axis=0) if len(present) == len(arrays) else None


# ---------------------------------------------------------------------------------------------------- predictions


@dataclass(frozen=True, eq=False)
class MethodResult:
    """All predictions of one method, with training runs and settings."""

    method: str
    aggregator: str
    class_names: tuple[str, ...]
    predictions: tuple[Prediction, ...]
    """Ordered by split, seed (the ensemble last) and part (validation, then test)."""
    runs: tuple[Run, ...]
    choices: Mapping[tuple[str, int | None], Choice]
    """(split, seed) -> threshold and calibration; the seed is None for the ensemble."""
    protocol: str
    labels_opened: str
    """Reason for opening the test labels."""
    encoder: str
    tiling: str
    warnings: tuple[str, ...]
    transductive: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    """Split -> its test slides that the encoder has seen, or of whose patient it saw another slide."""
    recipe: RecipeNote | None = None
    """How it was trained compared with the published recipe; None for what is no aggregator."""
    positive_from: str = ""
    """How the positive class of two was found, in words."""
    outcome: Outcome | None = None
    """What is predicted; None for classes."""
    known: tuple[Any, ...] = ()
    """Targets of all training and validation slides of an outcome other than classes."""
    tuned: Mapping[str, Tuning] = field(default_factory=dict[str, Any])
    """Split -> choice of its settings, with `train.tune`."""

    @property
    def evidence(self) -> dict[str, EvidenceChoice]:
        """Split -> choice of its kind of evidence, where the recipe says `auto`; the same for all seeds."""
        return {run.split: run.evidence for run in self.runs if run.evidence is not None}

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(sorted({run.seed for run in self.runs}))

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(run.split for run in self.runs))


def evaluate_method(fitted: Fitted, trial: Trial) -> MethodResult:
    """Return the predictions with labels; raise HeldOutLabelError unless the test labels were opened."""
    predictions: list[Prediction] = []
    for split in trial.splits:
        runs = [run for run in fitted.runs if run.split == split.name]
        test = trial.opened(split)
        on_test = _with_ensemble(runs, "test", test)
        # Under the optimistic protocol both are the same slides: they are listed under `test` only.
        on_val = {} if trial.optimistic else _with_ensemble(runs, "chosen_on", split.val)
        for seed, scored in on_test.items():
            name = _Name(fitted.method, split.name, seed, trial.evaluate.protocol)
            choice = fitted.choices[split.name, seed]
            if seed in on_val:
                predictions += _rows(name, "val", split.val, on_val[seed], choice)
            predictions += _rows(name, "test", test, scored, choice)
    return MethodResult(
        method=fitted.method,
        aggregator=fitted.aggregator,
        class_names=trial.class_names,
        predictions=tuple(predictions),
        runs=fitted.runs,
        choices=fitted.choices,
        protocol=trial.evaluate.protocol,
        labels_opened=trial.labels.reason,
        encoder=trial.encoder,
        tiling=trial.tiling,
        warnings=(*trial.warnings, *_warnings(fitted)),
        transductive=trial.transductive,
        recipe=fitted.recipe,
        positive_from=trial.positive_from,
        outcome=trial.outcome,
        known=_known_targets(trial) if trial.outcome is not None else (),
        tuned=fitted.tuned,
    )


def validation_predictions(fitted: Fitted, trial: Trial) -> list[Prediction]:
    """Return the ensembles' predictions of the slides that thresholds were chosen on; test labels are not needed."""
    rows: list[Prediction] = []
    for split in trial.splits:
        runs, cases = [run for run in fitted.runs if run.split == split.name], trial.chosen_on(split)
        name = _Name(fitted.method, split.name, None, trial.evaluate.protocol)
        rows += _rows(
            name, "val", cases, _with_ensemble(runs, "chosen_on", cases)[None], fitted.choices[split.name, None]
        )
    return rows


def pooled_validation(fitted: Fitted, trial: Trial, name: str) -> tuple[Choice, list[Prediction]]:
    """Return threshold and calibration for the models of all splits together, and the predictions they come from.

    These are of validation slides by models that were not trained on them: the mean over the splits that validate on a
    slide, so that every slide counts once. `name` stands for the split. Test labels are not needed.
    """
    rows: dict[str, list[Prediction]] = {}
    for row in validation_predictions(fitted, trial):
        rows.setdefault(row.slide, []).append(row)
    by_slide = {case.slide: case for split in trial.splits for case in trial.chosen_on(split)}
    cases = [by_slide[slide] for slide in rows]
    streams = (
        [_mean_values([getattr(row, stream) for row in own]) for own in rows.values()]
        for stream in ("score", "max", "bag")
    )
    score, largest, bag = (_array(values) for values in streams)
    assert score is not None
    choice = _choose(trial, cases, score, f"{trial.where} slides of {len(trial.splits)} splits")
    of = _Name(fitted.method, name, None, trial.evaluate.protocol)
    return choice, list(_rows(of, "val", cases, _Scored(score, largest, bag), choice))


def _mean_values(rows: Sequence[Values | None]) -> Values | None:
    array = _array(rows)
    return None if array is None else tuple(array.mean(axis=0).tolist())


def _known_targets(trial: Trial) -> tuple[Any, ...]:
    cases = {case.slide: case.label for split in trial.splits for case in (*split.train, *split.val)}
    return tuple(cases.values())


@dataclass(frozen=True)
class _Name:
    """Fields shared by the rows of one seed."""

    method: str
    split: str
    seed: int | None
    protocol: str


def _rows(
    name: _Name, part: Literal["val", "test"], cases: Sequence[Case], scored: _Scored, choice: Choice
) -> Iterator[Prediction]:
    decisions = choice.decide(scored.score)
    calibrated = choice.calibrate(scored.score)
    for row, case in enumerate(cases):
        yield Prediction(
            method=name.method,
            slide=case.slide,
            patient=case.patient,
            split=name.split,
            part=part,
            label=case.label,
            seed=name.seed,
            score=tuple(scored.score[row].tolist()),
            max=scored.values("max", row),
            bag=scored.values("bag", row),
            calibrated=None if calibrated is None else tuple(calibrated[row].tolist()),
            threshold=choice.threshold,
            threshold_from=choice.threshold_from,
            decision=None if decisions[row] is None else int(decisions[row]),
            protocol=name.protocol,
        )


def _warnings(fitted: Fitted) -> list[str]:
    """Return the warnings of training runs and calibrations, each with its number of occurrences."""
    trained = Counter(warning for run in fitted.runs for warning in run.warnings)
    sources = Counter(choice.calibration_from for choice in fitted.choices.values())
    refused = {text.removeprefix("none: "): count for text, count in sources.items() if text.startswith("none: ")}
    return [
        *(f"{text} ({count} of {len(fitted.runs)} training runs)" for text, count in trained.items()),
        *(f"not calibrated ({count} of {len(fitted.choices)} times): {text}" for text, count in refused.items()),
    ]
