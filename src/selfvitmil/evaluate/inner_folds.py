"""The trainings of nested cross-validation: every point of the space on every inner fold of a split.

    tuned = tune([("abmil", trial, train, folder), ...], score_all)     # a choice per method and split
    fit_method("abmil", trial, train, tuned=tuned[0])

Inner folds are drawn by patient from the training and validation slides of a split, with validation slides inside each
fold for the epoch, as in the split itself. An `InnerTraining` holds nothing of the test slides. All points see the same
folds and the same seed. The kind of evidence, where the recipe says `auto`, is chosen once per fold.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from selfvitmil.aggregate import selection
from selfvitmil.aggregate.base import score as score_bags
from selfvitmil.aggregate.dsmil import AUTO
from selfvitmil.aggregate.recipes import recipe_of
from selfvitmil.aggregate.selection import EvidenceChoice
from selfvitmil.aggregate.train import BagStore
from selfvitmil.bags import Bag
from selfvitmil.cohort import Cohort, SlideRow, Split, k_fold
from selfvitmil.cohort.splits import patients_by_class
from selfvitmil.errors import CohortError, ConfigError
from selfvitmil.evaluate.dataset import Case, Trial, TrialSplit
from selfvitmil.evaluate.protocol import Report, Training, shared_bags
from selfvitmil.evaluate.tuning import (
    Point,
    Tried,
    Tuning,
    choose_point,
    stored_tuning,
    tuning_digest,
    tuning_points,
    with_point,
    write_tuning,
)
from selfvitmil.settings import TrainSettings
from selfvitmil.store.provenance import MISSING


@dataclass(frozen=True, eq=False)
class InnerTraining:
    """One point of the space on one inner fold."""

    training: Training
    left_out: tuple[Case, ...]
    """Slides of the fold that the point is scored on."""

    def __str__(self) -> str:
        return f"{self.training.name}, {self.training.split}"

    def score(
        self, bag_of: Callable[[Case], Bag], store: BagStore, report: Report | None = None
    ) -> tuple[float | None, EvidenceChoice | None]:
        """Train and score; the score is None where the metric is undefined or training diverged."""
        try:
            model = self.training.make(MISSING, bag_of, store, report)
        except ConfigError as error:
            if error.code != "training-diverged":
                raise
            return None, self.training.evidence
        scored = score_bags(model.module, [bag_of(case) for case in self.left_out], store=store)
        scores_NK = np.array([each.probabilities for each in scored], dtype=np.float64)
        labels, outcome = [case.label for case in self.left_out], self.training.outcome
        if outcome is not None:
            return outcome.validation_metric(labels, scores_NK), model.evidence
        return selection.auc(np.array(labels), scores_NK), model.evidence


def score_elsewhere(inner: InnerTraining) -> tuple[float | None, EvidenceChoice | None]:
    """Train and score in a worker process; the `InnerTraining` is all it needs."""
    settings = inner.training.settings
    return inner.score(*shared_bags(inner.training.training[0].path.parent, settings.device, settings.cache_gb))


Results = list[tuple[float | None, EvidenceChoice | None]]
ScoreAll = Callable[[Trial, Sequence[InnerTraining]], Results]
"""Trains and scores several of one trial; results in their order."""
Asked = tuple[str, Trial, TrainSettings, Path | None]
"""A method with its data, its settings and the folder of its models."""


def tune(asked: Sequence[Asked], score_all: ScoreAll) -> list[dict[str, Tuning]]:
    """Return for each method split -> choice of its settings; stored choices that are up to date are used again.

    Methods without `train.tune` get none. Choices are stored beside the models, where these have a folder.
    """
    tuned: list[dict[str, Tuning]] = []
    for name, trial, train, folder in asked:
        own: dict[str, Tuning] = {}
        for split in trial.splits if train.tune else ():
            found = stored_tuning(name, trial, train, folder, split)
            if found is None:
                with trial.labels.training(f"{name}, {split.name}, inner folds"):
                    found = _Search(name, trial, train, split).run(score_all)
                if folder is not None:
                    write_tuning(folder, found)
            own[split.name] = found
        tuned.append(own)
    return tuned


class _Search:
    """The search for one method on one split."""

    def __init__(self, name: str, trial: Trial, train: TrainSettings, split: TrialSplit):
        self.name, self.trial, self.train, self.split = name, trial, train, split
        self.points: tuple[Point, ...] = tuning_points(name, train)
        self.cases = {case.slide: case for case in (*split.train, *split.val)}
        self.folds = inner_folds(self.cases.values(), trial, train, f"{name}, {split.name}")
        self.results: dict[tuple[int, int], tuple[float | None, EvidenceChoice | None]] = {}

    def run(self, score_all: ScoreAll) -> Tuning:
        """Try all points: the first by itself, since its trainings choose the kind of evidence, then the others."""
        for points in (range(1), range(1, len(self.points))):
            todo = [(point, fold) for point in points for fold in range(len(self.folds))]
            results = score_all(self.trial, [self.inner(*at) for at in todo]) if todo else []
            self.results |= zip(todo, results, strict=True)
        return self.choose()

    def inner(self, point: int, fold: int) -> InnerTraining:
        """Return the training of a point on an inner fold."""
        settings, own = with_point(self.name, self.train, self.points[point]), self.folds[fold]
        train, val, test = (tuple(self.cases[slide] for slide in side) for side in (own.train, own.val, own.test))
        known = self.results.get((0, fold), (None, None))[1]
        evidence = known if recipe_of(self.name, settings).options.get("evidence") == AUTO else None
        split = f"{self.split.name}, inner {own.name}"
        training = Training(
            self.name, split, self.train.seed, self.trial.num_classes, settings, train, val, None, {},
            self.trial.outcome, evidence,
        )  # fmt: skip
        return InnerTraining(training, test)

    def choose(self) -> Tuning:
        """Return the best point, when all were scored."""
        outcome = self.trial.outcome
        higher = outcome is None or outcome.higher_is_better
        auc = "AUC" if self.trial.num_classes == 1 else "macro AUC"
        metric = auc if outcome is None else outcome.primary_words
        scores = [
            [self.results[point, fold][0] for fold in range(len(self.folds))] for point in range(len(self.points))
        ]
        chosen, means = choose_point(scores, higher_is_better=higher)
        tried = tuple(
            Tried(point, tuple(own), mean) for point, own, mean in zip(self.points, scores, means, strict=True)
        )
        made_from = tuning_digest(self.name, self.trial, self.train, self.split)
        return Tuning(
            self.split.name, metric, higher, len(self.cases), len(self.folds), tried, chosen, made_from
        )  # fmt: skip


def inner_folds(cases: Iterable[Case], trial: Trial, train: TrainSettings, what: str) -> tuple[Split, ...]:
    """Return the inner folds of a split's training and validation slides, stratified, by patient.

    Fewer than `train.tune_folds` where a class has fewer patients; CohortError where one has too few for two.
    """
    cases = list(cases)
    if trial.outcome is None:
        names = {case.slide: trial.class_names[case.label] for case in cases}
    else:
        targets = {case.slide: case.label for case in cases}
        names = _without_rare(trial.outcome.strata(targets, {case.slide: case.patient for case in cases}), cases)
    cohort = Cohort(tuple(SlideRow(case.slide, case.path, names[case.slide], case.patient) for case in cases))
    counts = patients_by_class(cohort)
    rarest = min(counts, key=lambda label: counts[label])
    if counts[rarest] < LEAST_PATIENTS:
        raise CohortError(
            f"{what}: {counts[rarest]} patients of {rarest} in training and validation",
            f"train.tune needs {LEAST_PATIENTS} of each class: to train on, to choose the epoch, and to score",
            "Leave train.tune out, or add patients",
            code="too-few-to-tune",
        )
    return k_fold(cohort, min(train.tune_folds, counts[rarest]), val=train.validation, seed=train.seed)


def _without_rare(strata: Mapping[str, str], cases: Sequence[Case]) -> dict[str, str]:
    """Return the strata, those of too few patients joined to the most frequent one: all that folds do with them is to
    spread them evenly."""
    counts = Counter(strata[case.slide] for case in {case.patient: case for case in cases}.values())
    largest = counts.most_common(1)[0][0]
    return {slide: name if counts[name] >= LEAST_PATIENTS else largest for slide, name in strata.items()}


LEAST_PATIENTS = 4
"""Patients of a class with which each of two folds has one to train on, one to validate on and two to score."""
