"""Settings chosen by nested cross-validation: the space, what was tried, and the choice of every split.

The settings of a method are chosen for each split by cross-validation on its training and validation slides, by
patient: every point of the space is trained on each inner fold, with an epoch chosen on validation slides inside it,
and scored on the slides that the fold leaves out. The highest mean score wins; of equal ones the first, and the first
is the recipe as it is. Test slides take no part, so the estimate on them stays honest (Varma and Simon 2006, BMC
Bioinformatics 7:91; Cawley and Talbot 2010, JMLR 11:2079).

Inner folds are drawn by patient, with validation slides inside each fold for the epoch, as in the split itself. An
`InnerTraining` holds nothing of the test slides. All points see the same folds and the same seed. The kind of evidence,
where the recipe says `auto`, is chosen once per fold.

    tuned = tune([("abmil", trial, train, folder), ...], score_all)     # a choice per method and split
    fit_method("abmil", trial, train, tuned=tuned[0])

A split's choice lies beside its models, in `tuning.json`, with the hash of all that it depends on.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from selfvitmil.aggregate import selection
from selfvitmil.aggregate.base import nearest, settings_of
from selfvitmil.aggregate.base import score as score_bags
from selfvitmil.aggregate.dsmil import AUTO
from selfvitmil.aggregate.recipes import NUMBERS, RecipeNote, recipe_of
from selfvitmil.aggregate.selection import EvidenceChoice
from selfvitmil.aggregate.train import BagStore
from selfvitmil.bags import Bag
from selfvitmil.cohort import Cohort, SlideRow, Split, k_fold
from selfvitmil.cohort.splits import patients_by_class
from selfvitmil.errors import ArtefactError, CohortError, ConfigError
from selfvitmil.evaluate.dataset import Case, Trial, TrialSplit
from selfvitmil.evaluate.protocol import Report, Training, shared_bags
from selfvitmil.settings import TrainSettings
from selfvitmil.store.files import hash_of, read_json, to_plain, write_text
from selfvitmil.store.layout import tuning_file
from selfvitmil.store.provenance import MISSING

VERSION = 1
"""Of how a choice is made; a higher one makes stored choices stale."""
LR_FACTORS = (1.0, 0.3, 3.0)
NO_DECAY, STRONG_DECAY = 1e-3, 1.0
"""Weight decays of decoupled optimizers: the strong one removes most of the noise of initial weights."""
LEAST_PATIENTS = 4
"""Patients of a class with which each of two folds has one to train on, one to validate on and two to score."""

Point = Mapping[str, Any]
"""Settings that differ from the recipe, by name; empty for the recipe as it is."""


def tuning_points(name: str, train: TrainSettings) -> tuple[Point, ...]:
    """Return all points of the space of a method, the recipe as it is first, where it is among them.

    Raises ConfigError for a setting or value that the method does not have.
    """
    space = _own_space(name, train) or _default_space(name, train)
    points = [dict(zip(space, values, strict=True)) for values in itertools.product(*space.values())]
    own = _numbers(name, train)
    recipes = [_numbers(name, with_point(name, train, point)) for point in points]
    different = [place for place, recipe in enumerate(recipes) if recipe not in recipes[:place]]
    return tuple(points[place] for place in sorted(different, key=lambda place: recipes[place] != own))


def with_point(name: str, train: TrainSettings, point: Point) -> TrainSettings:
    """Return the settings of a training at one point of the space."""
    own = train.options.get(name, {})
    options = {**train.options, name: {**(own if isinstance(own, dict) else {}), **point}}
    return train.model_copy(update={"options": options, "tune": False})


def _numbers(name: str, train: TrainSettings) -> dict[str, Any]:
    recipe = recipe_of(name, train).to_json()
    return {key: value for key, value in recipe.items() if key not in ("source", "departs")}


def _own_space(name: str, train: TrainSettings) -> dict[str, Sequence[Any]]:
    """Return the space that the settings ask for; a table of the method itself replaces what holds for all."""
    shared = {key: values for key, values in train.tune_space.items() if not isinstance(values, dict)}
    own = train.tune_space.get(name)
    space = own if isinstance(own, dict) else shared
    known = (*settings_of(name), *NUMBERS)
    for key, values in space.items():
        if key not in known:
            raise ConfigError(
                f"train.tune_space: {name} has no setting {key!r}{nearest(key, list(known))}",
                "every setting of the space is one of the method or of its training",
                f"{name} has {', '.join(known)}. Write settings of single methods under [train.tune_space.METHOD]",
                code="unknown-tuned-setting",
            )
        if not values:
            raise ConfigError(
                f"train.tune_space.{key} is empty", "there is nothing to choose among", "Give values, or leave it out",
                code="empty-tuning-space",
            )  # fmt: skip
    return dict(space)


def _default_space(name: str, train: TrainSettings) -> dict[str, Sequence[Any]]:
    """Return three learning rates around the recipe's own with two weight decays: its own, and a weak or strong one."""
    recipe = recipe_of(name, train)
    own = recipe.weight_decay
    if recipe.optimizer in ("adamw", "lookahead-radam"):
        other = STRONG_DECAY if own < math.sqrt(NO_DECAY * STRONG_DECAY) else NO_DECAY
    else:  # weight decay is part of the gradient: 1 would leave nothing to learn
        other = 0.0 if own else 1e-4
    return {"lr_factor": LR_FACTORS, "weight_decay": (own, other)}


# ---------------------------------------------------------------------------------------------------- the choice


@dataclass(frozen=True)
class Tried:
    """One point of the space."""

    settings: Point
    scores: tuple[float | None, ...]
    """Metric on the slides that each inner fold leaves out; None where it is undefined or training diverged."""
    mean: float | None
    """None where training diverged."""


@dataclass(frozen=True)
class Tuning:
    """The settings chosen for one split, with all that were tried."""

    split: str
    metric: str
    higher_is_better: bool
    slides: int
    """Training and validation slides."""
    folds: int
    tried: tuple[Tried, ...]
    chosen: int
    made_from: str
    """Hash of all that the choice depends on."""

    @property
    def best(self) -> Tried:
        return self.tried[self.chosen]

    @property
    def words(self) -> str:
        """The choice in one line."""
        first = self.tried[0]
        own = f", the recipe's own {_number(first.mean)}" if self.chosen and not _is_changed(first.settings) else ""
        return f"{point_words(self.best.settings)} ({self.metric} {_number(self.best.mean)}{own})"

    def apply(self, name: str, train: TrainSettings) -> TrainSettings:
        """Return the settings to train the split's models with."""
        return with_point(name, train, self.best.settings)

    def to_json(self) -> dict[str, Any]:
        return to_plain(asdict(self))


def choose_point(tried: Sequence[Sequence[float | None]], *, higher_is_better: bool) -> tuple[int, list[float | None]]:
    """Return the place of the best point and the mean of each over the folds in which any of them has a score.

    The first of equal ones is chosen. A point that lacks such a score has no mean; ConfigError where none has one.
    """
    usable = [fold for fold in range(len(tried[0])) if any(scores[fold] is not None for scores in tried)]
    means: list[float | None] = []
    for scores in tried:
        found = [value for fold in usable if (value := scores[fold]) is not None]
        means.append(math.fsum(found) / len(found) if found and len(found) == len(usable) else None)
    sign = 1.0 if higher_is_better else -1.0
    ranked = [-math.inf if mean is None else sign * mean for mean in means]
    if max(ranked) == -math.inf:
        raise ConfigError(
            "train.tune: no point of the space has a score",
            "every training diverged, or the metric is undefined on the slides of the inner folds",
            "Use other values in [train.tune_space], fewer train.tune_folds, or leave train.tune out",
            code="nothing-to-tune-by",
        )
    return ranked.index(max(ranked)), means


def point_words(point: Point) -> str:
    """Return a point in words: `learning rate x 3, weight decay 1`."""
    changed = {key: value for key, value in point.items() if (key, value) != ("lr_factor", 1.0)}
    parts = [
        f"learning rate x {value:g}" if key == "lr_factor" else f"{key.replace('_', ' ')} {_shown(value)}"
        for key, value in changed.items()
    ]
    return ", ".join(parts) or "the recipe as it is"


def space_words(points: Sequence[Point]) -> str:
    """Return the values of each setting in words: `lr_factor 1, 0.3, 3; weight_decay 0.001, 1`."""
    values = {key: dict.fromkeys(point[key] for point in points if key in point) for point in points for key in point}
    return "; ".join(f"{key} {', '.join(map(_shown, own))}" for key, own in values.items())


def tuned_note(note: RecipeNote, tuned: Mapping[str, Tuning]) -> RecipeNote:
    """Return the note of a recipe with how it was tuned, over what space and with what scores."""
    first = next(iter(tuned.values()))
    lines = [
        f"chosen by {first.folds}-fold cross-validation on training and validation slides among {len(first.tried)} "
        f"points ({space_words([each.settings for each in first.tried])})",
        *(f"{split}: {own.words}" for split, own in tuned.items()),
    ]
    return replace(note, kind="tuned", differences=tuple(lines))


def _is_changed(point: Point) -> bool:
    return point_words(point) != "the recipe as it is"


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


# ---------------------------------------------------------------------------------------------------- files


def tuning_digest(name: str, trial: Trial, train: TrainSettings, split: TrialSplit) -> str:
    """Return the hash of all that the choice for a split depends on."""
    recipes = [_numbers(name, with_point(name, train, point)) for point in tuning_points(name, train)]
    slides = [(case.slide, case.patient, case.label, case.identity) for case in (*split.train, *split.val)]
    predicted = trial.class_names if trial.outcome is None else trial.outcome.to_json()
    return hash_of(VERSION, name, recipes, train.tune_folds, train.validation, train.seed, predicted, slides)


def chosen_settings(
    name: str,
    trial: Trial,
    train: TrainSettings,
    folder: Path | None,
    split: TrialSplit,
    tuned: Mapping[str, Tuning] | None,
) -> Tuning:
    """Return the choice of a split, among `tuned` or stored; ArtefactError where there is none that is up to date."""
    found = (tuned or {}).get(split.name) or stored_tuning(name, trial, train, folder, split)
    if found is None:
        raise ArtefactError(
            f"{name}: no up-to-date choice of settings for {split.name}",
            "train.tune is set, and this command uses trained models and does not train",
            f"Run `selfvitmil train` with the same flags first (--train.aggregator {name} --tune)",
            code="no-tuning",
        )
    return found


def write_tuning(folder: Path, tuning: Tuning) -> None:
    """Write the choice of a split beside its models (`folder` is that of the method)."""
    write_text(tuning_file(folder, tuning.split), json.dumps(tuning.to_json(), indent=1, ensure_ascii=False) + "\n")


def stored_tuning(
    name: str, trial: Trial, train: TrainSettings, folder: Path | None, split: TrialSplit
) -> Tuning | None:
    """Return the stored choice of a split; None where there is none, or where it was made from something else."""
    file = None if folder is None else tuning_file(folder, split.name)
    if file is None or not file.exists():
        return None
    try:
        info: dict[str, Any] = read_json(file)
        info["tried"] = tuple(Tried(each["settings"], tuple(each["scores"]), each["mean"]) for each in info["tried"])
        tuning = Tuning(**info)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return tuning if tuning.made_from == tuning_digest(name, trial, train, split) else None


# ---------------------------------------------------------------------------------------------------- inner folds


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
        names = {case.slide: trial.class_names[int(case.label)] for case in cases}
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
