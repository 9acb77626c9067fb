"""What a model predicts of a slide: the type `Outcome`, which holds all that depends on the kind of outcome.

Classes (`label`) are the usual outcome, and the modules of training and evaluation are written for them. Any other
outcome is a subclass of `Outcome` in the file of its name, which parses the cells of the cohort's columns, says how
many outputs a network has, has their loss, turns outputs into the stored score, chooses a cut on validation slides, has
the metrics, and the words of all this. No other module asks for the kind.

A target is a tuple of numbers: `(value,)`, `(time, event)`, one 0 or 1 per label. A raw output is what the network
computes, a score what is stored: a value in the target's unit, a log hazard, probabilities.

N slides, T numbers of a target, C outputs of a network, K numbers of a score.
"""

from __future__ import annotations

import difflib
import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

import numpy as np
from numpy.typing import NDArray

from selfvitmil.cohort.table import Cohort, SlideRow, column_key, listing
from selfvitmil.errors import CohortError, ConfigError, MetricError
from selfvitmil.metrics import Interval
from selfvitmil.metrics.classification import bootstrap, bootstrap_p_value, percentile_interval
from selfvitmil.settings import EvaluateSettings

if TYPE_CHECKING:
    from torch import Tensor

Floats = NDArray[np.float64]
Target = tuple[float, ...]
Json = dict[str, Any]

MAX_STRATA = 4
"""Largest number of quantiles by which splits are stratified."""
PATIENTS_PER_STRATUM = 10


@dataclass(frozen=True, eq=False)
class Scored:
    """Targets and scores of slides or patients that are evaluated together."""

    targets: Floats
    """(N, T)"""
    scores: Floats
    """(N, K)"""
    decisions: tuple[int | None, ...]
    patients: tuple[str, ...]
    folds: tuple[str, ...] | None
    """Splits, whose models differ, so that samples are compared within them; None for one."""
    known: Floats
    """(M, T) targets of training and validation slides."""
    evaluate: EvaluateSettings
    validation: tuple[Floats, Floats] | None = None
    """Targets and scores of validation slides (or patients) by the same models; None where there are none."""


@dataclass(frozen=True)
class Outcome:
    """A kind of outcome with its columns; see the module's docstring."""

    columns: tuple[str, ...]
    """Columns of the cohort that hold the target."""

    kind: ClassVar[str]
    score_words: ClassVar[str]
    """What the score is, for tables and reports."""
    poles: ClassVar[tuple[str, str]]
    """What slides below and above the median of validation slides have; heatmaps show evidence for the second."""
    primary: ClassVar[str]
    """Metric that methods are compared by."""
    primary_words: ClassVar[str]
    higher_is_better: ClassVar[bool] = True
    shown_metrics: ClassVar[Mapping[str, str]]
    """Metrics of a table with their heads, the primary one first."""
    chance: ClassVar[float] = 0.5
    """The primary metric of predictions that tell nothing."""
    is_absolute: ClassVar[bool] = True
    """Whether scores mean the same by models of other training slides, so that those of several splits compare."""
    rank_words: ClassVar[str]
    """What `rank` is, in one or two words."""
    evidence_per_column: ClassVar[bool] = False
    """Whether heatmaps show evidence for one of the columns, each of which has an output."""
    plots: ClassVar[tuple[str, ...]] = ()
    """Figures of an evaluation, by their names in `evaluate.outcome_figures`."""

    # ------------------------------------------------------------------------------------------ targets

    @property
    @abstractmethod
    def target_names(self) -> tuple[str, ...]:
        """Names of the numbers of a target, as predictions.csv calls them."""

    @property
    @abstractmethod
    def score_names(self) -> tuple[str, ...]:
        """Names of the numbers of a score, as predictions.csv calls them."""

    @property
    @abstractmethod
    def num_outputs(self) -> int:
        """Outputs of the network."""

    @property
    def needs_batch(self) -> bool:
        """Whether the loss compares the slides of an optimizer step with each other."""
        return False

    @property
    def groups(self) -> tuple[str, ...]:
        """Names of what a decision may be; empty where nothing is decided."""
        return ()

    @abstractmethod
    def parse(self, row: SlideRow) -> Target | None:
        """Return the target of a slide, None if a cell is empty; raise CohortError for an invalid cell."""

    def remarks(self, cohort: Cohort) -> tuple[str, ...]:
        """Return what the user should know of how the cells are read: words that were translated, slides left out."""
        del cohort
        return ()

    @abstractmethod
    def strata(self, targets: Mapping[str, Target], patient_of: Mapping[str, str]) -> dict[str, str]:
        """Return slide -> name of the stratum of its patient; splits have patients of every stratum on each side."""

    @abstractmethod
    def check_training(self, split: str, targets: Sequence[Target]) -> None:
        """Raise CohortError if nothing can be learned from these targets."""

    def fitted(self, targets: Sequence[Target]) -> Self:
        """Return the outcome with what it takes from the targets of training slides, such as their mean."""
        return self

    def encoded(self, target: Target) -> Target:
        """Return the target as the loss takes it."""
        return target

    @abstractmethod
    def is_high(self, targets: Sequence[Target]) -> list[int]:
        """Return 1 for slides with the higher targets, 0 for the others; chooses the kind of evidence (DSMIL)."""

    # ------------------------------------------------------------------------------------------ networks

    @abstractmethod
    def loss(self, raw_NC: Tensor, target_NT: Tensor) -> Tensor:
        """Return the mean loss of raw outputs and encoded targets."""

    def validation_loss(self, losses_V: Floats, scores_VK: Tensor, target_VT: Tensor) -> float:
        """Return the loss of all validation slides: the mean of their own, or that of their scores if slides have one
        loss together."""
        return float(self.loss(scores_VK, target_VT)) if self.needs_batch else float(losses_V.mean())

    def with_sigmoids(self) -> Self:
        """Return the outcome for a method that has one sigmoid per class instead of a softmax over the classes."""
        return self

    @abstractmethod
    def score(self, raw_C: Tensor) -> Tensor:
        """Return the stored score (..., K) of raw outputs (..., C)."""

    def evidence(self, values_NC: Tensor) -> Tensor:
        """Return what a heatmap shows of values per tile and output: one column, their mean, or one per label."""
        return values_NC.mean(1, keepdim=True)

    # ------------------------------------------------------------------------------------------ evaluation

    def rank(self, scores_NK: Floats) -> Floats:
        """Return one number (N,) per score that orders slides, the highest target or risk last."""
        return scores_NK[:, 0]

    def validation_metric(self, targets: Sequence[Target], scores_NK: Floats) -> float | None:
        """Return the primary metric on validation slides; None if it is undefined there."""
        patients = tuple(map(str, range(len(targets))))
        scored = Scored(as_array(targets), scores_NK, (), patients, None, as_array(targets), EvaluateSettings())
        try:
            return self.primary_metric(scored).value
        except MetricError:
            return None

    def skill(self, metric: float) -> float:
        """Return the primary metric on the scale that all kinds share: 0 tells nothing, 1 is perfect."""
        return (metric - self.chance) / (1 - self.chance)

    @abstractmethod
    def primary_metric(self, scored: Scored) -> Interval:
        """Return the metric that methods are compared by; MetricError if it is undefined."""

    @abstractmethod
    def compute(self, scored: Scored) -> dict[str, Callable[[], Any]]:
        """Return metric -> function that gives an interval or plain data, or raises MetricError."""

    @abstractmethod
    def paired(self, scored: Scored, baseline: Floats) -> tuple[Interval, str, float]:
        """Return the difference in the primary metric to the scores of a baseline, the test's name and its p-value."""

    def choose(self, targets: Sequence[Target], scores_NK: Floats, where: str) -> tuple[float | None, str]:
        """Return the cut between groups that validation slides give, and where it comes from."""
        return None, "none"

    def decide(self, scores_NK: Floats, cut: float | None) -> list[int | None]:
        """Return the index in `groups` of each slide; None where nothing is decided."""
        ranked = self.rank(scores_NK)
        return [None if cut is None else int(value >= cut) for value in ranked]

    def decision_words(self, score_K: Floats, cut: float | None) -> str:
        """Return the decision of one slide in words; empty where nothing is decided."""
        (group,) = self.decide(score_K[None], cut)
        return "" if group is None else self.groups[group]

    def by_patient(self, targets_NT: Floats, scores_NK: Floats) -> tuple[Floats, Floats]:
        """Return target (T,) and score (K,) of a patient from those of the slides."""
        return targets_NT.mean(axis=0), scores_NK.mean(axis=0)

    patient_words: ClassVar[str] = "mean score of the patient's slides"

    # ------------------------------------------------------------------------------------------ files

    @property
    def words(self) -> str:
        """The outcome in a few words, for a line before training."""
        return f"{self.kind} ({', '.join(self.columns)})"

    @abstractmethod
    def describe(self, targets: Sequence[Target]) -> str:
        """Return what a set of targets is like: `40 slides, 25 events, median time 31`."""

    def to_json(self) -> Json:
        return {"kind": self.kind, **asdict(self)}

    @classmethod
    def of_json(cls, info: Mapping[str, Any]) -> Self:
        """Return the outcome that `to_json` describes, without its kind."""
        lists = {key: tuple(cast("list[Any]", value)) for key, value in info.items() if isinstance(value, list)}
        return cls(**{**info, **lists})

    # ------------------------------------------------------------------------------------------ shared

    def read(self, cohort: Cohort, table: str = "cohort.csv") -> dict[str, Target]:
        """Return the targets of all slides that have one; one CohortError lists the invalid cells of the `table`.

        Raises ConfigError for a column that the cohort does not have.
        """
        check_columns(self.columns, cohort)
        targets: dict[str, Target] = {}
        problems: list[CohortError] = []
        for row in cohort.rows:
            try:
                target = self.parse(row)
            except CohortError as error:
                problems.append(error)
                continue
            if target is not None:
                targets[row.slide] = target
        if problems:
            first = problems[0]
            what = f"{table}: {listing([each.what for each in problems], 5)}"
            raise CohortError(what, first.why, first.how, code=first.code)
        if not targets:
            raise ConfigError(
                f"no slide has a value in {' and '.join(self.columns)}",
                "there is nothing to learn from",
                f"Fill these columns of {table}, or give another table with --labels",
                code="no-labels",
            )
        return targets

    def in_strata(self, cohort: Cohort, targets: Mapping[str, Target]) -> Cohort:
        """Return the cohort with strata as labels, so that splits are stratified by them; others have no label.

        Slides of a given test set have strata of their own: their targets must not move the limits of the others', by
        which validation slides are drawn.
        """
        patient_of = {row.slide: row.patient for row in cohort.rows}
        strata: dict[str, str] = {}
        for is_test in (False, True):
            own = {row.slide for row in cohort.rows if (row.split == "test") == is_test}
            part = {slide: target for slide, target in targets.items() if slide in own}
            strata |= self.strata(part, patient_of) if part else {}
        rows = tuple(replace(row, label=strata.get(row.slide)) for row in cohort.rows)
        return Cohort(rows, cohort.warnings)


def check_columns(columns: Sequence[str], cohort: Cohort) -> None:
    """Raise ConfigError for a column that the cohort does not have."""
    known = ("label", *cohort.extra_columns)
    for column in columns:
        if column_key(column) not in {column_key(name) for name in known}:
            near = difflib.get_close_matches(column, known, n=1)
            raise ConfigError(
                f"train.target {column!r}: the cohort has no such column",
                f"its columns are {listing(known)}",
                f"Did you mean {near[0]!r}?" if near else "Name one of them, or give a table with --labels",
                code="unknown-target",
            )


def as_array(targets: Sequence[Target]) -> Floats:
    return np.array(targets, dtype=np.float64).reshape(len(targets), -1)


def parse_number(row: SlideRow, column: str) -> float | None:
    """Return the number in a cell, None if it is empty; a decimal comma is accepted. CohortError for other text."""
    cell = row.value(column)
    if cell is None:
        return None
    try:
        value = float(cell.replace(",", "."))
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise CohortError(
            f"{row.slide}: {column} is {cell!r}", "it must be a number", "Correct it, or leave it empty",
            code="target-not-a-number",
        )  # fmt: skip
    return value


TWO_VALUED = {"1": 1, "0": 0, "1.0": 1, "0.0": 0, "true": 1, "false": 0, "yes": 1, "no": 0}


def two_valued(
    row: SlideRow, column: str, meaning: str, code: str, words: Mapping[str, int] = TWO_VALUED
) -> int | None:
    """Return 1 or 0 of a cell, None if it is empty; CohortError with the `meaning` of the two for other text."""
    cell = row.value(column)
    if cell is None:
        return None
    if cell.casefold() not in words:
        raise CohortError(
            f"{row.slide}: {column} is {cell!r}", meaning, "Correct it, or leave it empty to exclude the slide",
            code=code,
        )  # fmt: skip
    return words[cell.casefold()]


def patient_bootstrap(scored: Scored, statistic: Callable[[Floats], Floats]) -> Interval:
    """Return a metric with limits from resampled patients; it takes how often each slide is drawn (R, N)."""
    value = float(statistic(np.ones((1, len(scored.targets))))[0])
    return percentile_interval(value, _resampled(scored, statistic), scored.evaluate.confidence)


def paired_bootstrap(
    scored: Scored, own: Callable[[Floats], Floats], other: Callable[[Floats], Floats]
) -> tuple[Interval, float]:
    """Return the difference of two metrics of the same slides, and its two-sided p-value, from resampled patients."""

    def difference(drawn_RN: Floats) -> Floats:
        return own(drawn_RN) - other(drawn_RN)

    value = float(difference(np.ones((1, len(scored.targets))))[0])
    values = _resampled(scored, difference)
    return percentile_interval(value, values, scored.evaluate.confidence), bootstrap_p_value(values)


def _resampled(scored: Scored, statistic: Callable[[Floats], Floats]) -> Floats:
    groups = np.unique(np.array(scored.patients), return_inverse=True)[1]
    evaluate, one_kind = scored.evaluate, np.zeros(len(groups), dtype=np.int64)
    return bootstrap(statistic, one_kind, groups, evaluate.bootstrap, evaluate.seed)


def quantile_names(values: Mapping[str, float], name: str, least: int = 1) -> dict[str, str]:
    """Return patient -> `name`, with the number of its quantile where there are enough patients for several."""
    count = max(least, min(MAX_STRATA, len(values) // PATIENTS_PER_STRATUM))
    order = sorted(values, key=lambda patient: (values[patient], patient))
    if count < 2:
        return dict.fromkeys(order, name)
    return {patient: f"{name} {place * count // len(order) + 1} of {count}" for place, patient in enumerate(order)}
