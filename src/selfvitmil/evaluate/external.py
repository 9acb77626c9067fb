"""External validation: a frozen model on the labelled slides of another cohort.

Input are predictions that exist already and labels that were joined to them; nothing here returns a threshold or a
calibration, so no label of the new cohort can change the model. `validate_predictions` gives, by slide and by patient:

* all metrics of `method_metrics`: AUC with interval, sensitivity and specificity at the model's own threshold, ...
* `Calibration`: calibration-in-the-large and slope (Cox 1958; Van Calster et al. 2019), Brier score, ECE. With
  logit(P(positive)) = a + b * logit(probability), the slope is b, and calibration-in-the-large is a with b fixed at 1.
  0 and 1 are perfect; a below 0 means probabilities that are too high, b below 1 probabilities that are too extreme.
  Their limits are Wald's with variances that keep a patient's slides together (Liang and Zeger 1986).
* `Change` against the model's validation and test slides (`ReferenceScores`, which a package holds): AUC, sensitivity,
  specificity with limits of the difference of independent estimates (square-and-add, Newcombe 1998), mean scores by
  Welch's interval, calibration.
* subgroups (`subgroups.py`), and `Comparison` with another model on the same slides: paired DeLong test.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import expit  # pyright: ignore[reportMissingTypeStubs]
from scipy.stats import t as student  # pyright: ignore[reportMissingTypeStubs]

from selfvitmil import metrics
from selfvitmil.errors import MetricError
from selfvitmil.evaluate.comparison import paired_rows
from selfvitmil.evaluate.comparison_table import METRIC_NAMES
from selfvitmil.evaluate.decisions import Decisions, decisions_of
from selfvitmil.evaluate.method_metrics import (
    PATIENT_WORDS,
    PATIENT_WORDS_MULTI,
    SLIDE_WORDS,
    Samples,
    attempt,
    read_interval,
    samples_of,
    score_samples,
)
from selfvitmil.evaluate.outcome_results import measure, scored_predictions
from selfvitmil.evaluate.predictions import Prediction
from selfvitmil.evaluate.subgroups import SubgroupTable, subgroup_tables
from selfvitmil.metrics import ConformalThreshold, Interval, to_logits
from selfvitmil.metrics.classification import Floats, Labels, check_groups, check_labels, normal_quantile
from selfvitmil.outcomes import Outcome
from selfvitmil.settings import EvaluateSettings

Json = dict[str, Any]
Level = Literal["slide", "patient"]

# ---------------------------------------------------------------------------------------------------- calibration


@dataclass(frozen=True)
class Calibration:
    """How well probabilities of two classes agree with observed frequencies."""

    mean_probability: float
    prevalence: float
    """Fraction of positives."""
    in_the_large: Interval | None
    """0 is perfect; below 0 probabilities are too high."""
    slope: Interval | None
    """1 is perfect; below 1 probabilities are too extreme."""
    brier: float
    ece: float
    reasons: Mapping[str, str]
    """What is undefined, and why."""


def calibration_of(
    labels: ArrayLike, probabilities: ArrayLike, *, groups: ArrayLike | None = None, level: float = 0.95
) -> Calibration:
    """Return the calibration of (N,) probabilities of class 1; `groups` (patients) are kept together in the limits."""
    label = check_labels(labels)
    given = np.asarray(probabilities, dtype=np.float64)
    logit, group = to_logits(given), check_groups(groups, len(label))
    reasons: dict[str, str] = {}
    large = attempt(reasons, "in_the_large", lambda: _in_the_large(label, logit, group, level))
    slope = attempt(reasons, "slope", lambda: _slope(label, logit, group, level))
    curve = metrics.reliability(label, given, level=level)
    brier = metrics.brier(label, given)
    return Calibration(float(given.mean()), float(label.mean()), large, slope, brier, curve.ece, reasons)


def _in_the_large(label: Labels, logit: Floats, group: Labels, level: float) -> Interval:
    ones = np.ones((len(label), 1))
    return _wald(*_logistic(ones, label, logit), ones, label, logit, group, level)


def _slope(label: Labels, logit: Floats, group: Labels, level: float) -> Interval:
    if logit.min() == logit.max():
        raise MetricError(
            f"all {len(logit)} probabilities are equal",
            "a slope needs different ones",
            "See calibration-in-the-large",
            code="no-calibration-slope",
        )
    positives, negatives = logit[label == 1], logit[label == 0]
    if not len(positives) or not len(negatives) or positives.min() >= negatives.max():
        raise MetricError(
            "the classes are separated perfectly, or one is missing",
            "the slope is infinite then",
            "See the Brier score, or use more slides",
            code="no-calibration-slope",
        )
    if positives.max() <= negatives.min():
        raise MetricError(
            "the classes are separated perfectly, in the wrong order",
            "the slope is infinite then",
            "Check the names of the classes",
            code="no-calibration-slope",
        )
    columns = np.stack([logit, np.ones_like(logit)], axis=1)
    zero = np.zeros_like(logit)
    return _wald(*_logistic(columns, label, zero), columns, label, zero, group, level)


def _logistic(columns: Floats, label: Labels, offset: Floats) -> tuple[Floats, Floats]:
    """Return coefficients of the maximum likelihood by Newton's method with halved steps, and the inverse curvature."""
    if label.min() == label.max():
        raise MetricError(
            f"all {len(label)} labels are {label[0]}",
            "calibration needs both classes",
            "Add slides of the other class",
            code="one-class",
        )

    def loss(parameters: Floats) -> float:
        fitted = columns @ parameters + offset
        return float((np.logaddexp(0.0, fitted) - label * fitted).sum())

    invert: Any = np.linalg.inv
    parameters, inverse = np.zeros(len(columns.T)), np.eye(len(columns.T))
    for _ in range(200):
        fitted = expit(columns @ parameters + offset)
        gradient = columns.T @ (fitted - label)
        curvature = (columns.T * (fitted * (1 - fitted))) @ columns
        inverse: Floats = invert(curvature + 1e-12 * np.eye(len(parameters)))
        step: Any = inverse @ gradient
        if float(gradient @ step) < 1e-18 * len(label):
            break
        length, before = 1.0, loss(parameters)
        while length > 1e-10 and loss(parameters - length * step) > before:
            length /= 2
        parameters: Floats = parameters - length * step
    return parameters, inverse


def _wald(
    parameters: Floats, inverse: Floats, columns: Floats, label: Labels, offset: Floats, group: Labels, level: float
) -> Interval:
    """Return the first coefficient with Wald's limits; the variance sums the scores of a group before squaring."""
    residual = label - expit(columns @ parameters + offset)
    number = int(group.max()) + 1
    per_group = np.stack([np.bincount(group, column * residual, number) for column in columns.T], axis=1)
    if number < 2:
        raise MetricError(
            "all slides are of one patient", "limits need several", "Add patients", code="too-few-patients"
        )
    meat = number / (number - 1) * per_group.T @ per_group
    error = math.sqrt(float((inverse @ meat @ inverse)[0, 0]))
    reach = normal_quantile(level) * error
    value = float(parameters[0])
    return Interval(value, value - reach, value + reach, "Wald, variance robust to patients with several slides", level)


# ---------------------------------------------------------------------------------------------------- reference


@dataclass(frozen=True)
class Moments:
    """Number, mean and standard deviation of scores."""

    num: int
    mean: float
    sd: float | None
    """None for a single score."""

    @classmethod
    def of(cls, scores: Floats) -> Moments | None:
        if not len(scores):
            return None
        return cls(len(scores), float(scores.mean()), float(scores.std(ddof=1)) if len(scores) > 1 else None)

    @classmethod
    def from_json(cls, info: Mapping[str, Any]) -> Moments:
        return cls(int(info["num"]), float(info["mean"]), None if info["sd"] is None else float(info["sd"]))


@dataclass(frozen=True)
class ReferenceScores:
    """How a model scored the slides it was validated or tested on: numbers only, no names of slides or patients.

    What drift is measured against. `of_class` are moments of the scores of each class, `metrics` values with limits.
    """

    part: str
    """`validation` or `test`."""
    num: int
    counts: Mapping[str, int]
    prevalence: float | None
    scores: Moments | None
    """Of the positive class's score, as all moments; None with more than two classes."""
    of_class: Mapping[str, Moments]
    metrics: Mapping[str, Interval]
    calibration: Mapping[str, float]
    """in_the_large, slope, brier, ece, as far as they are defined."""

    def to_json(self) -> Json:
        return asdict(self)

    @classmethod
    def from_json(cls, info: Mapping[str, Any]) -> ReferenceScores:
        """Raises KeyError or TypeError where it is none."""
        moments = {str(name): Moments.from_json(own) for name, own in info["of_class"].items()}
        intervals = {str(name): _interval(own) for name, own in info["metrics"].items()}
        scores = None if info["scores"] is None else Moments.from_json(info["scores"])
        prevalence = None if info["prevalence"] is None else float(info["prevalence"])
        counts = {str(name): int(number) for name, number in info["counts"].items()}
        calibration = {str(name): float(value) for name, value in info["calibration"].items()}
        return cls(str(info["part"]), int(info["num"]), counts, prevalence, scores, moments, intervals, calibration)


def _interval(info: Mapping[str, Any]) -> Interval:
    value, low, high, level = (float(info[key]) for key in ("value", "low", "high", "level"))
    return Interval(value, low, high, str(info["method"]), level)


COMPARED = ("auc", "sensitivity", "specificity", "accuracy")
"""Metrics with limits whose change is reported."""


def reference_scores(
    predictions: Iterable[Prediction],
    part: Literal["val", "test"],
    class_names: Sequence[str],
    evaluate: EvaluateSettings,
    outcome: Outcome | None = None,
) -> ReferenceScores | None:
    """Return how the ensemble scored its validation or test slides; None without such predictions."""
    rows = [row for row in predictions if row.part == part and row.seed is None]
    if not rows:
        return None
    name = "validation" if part == "val" else "test"
    return _reference(name, [replace(row, part="test") for row in rows], class_names, evaluate, outcome)


def _reference(
    part: str,
    rows: Sequence[Prediction],
    class_names: Sequence[str],
    evaluate: EvaluateSettings,
    outcome: Outcome | None = None,
) -> ReferenceScores:
    if outcome is not None:
        return _outcome_reference(part, rows, outcome, evaluate)
    samples, binary = samples_of(rows), len(class_names) == 2
    scored = score_samples(samples, class_names, evaluate)
    found = {name: read_interval(scored[name]) for name in COMPARED if scored.get(name) is not None}
    calibration = {key: float(scored[key]["value"]) for key in ("brier", "ece") if scored[key] is not None}
    if binary:
        own = calibration_of(samples.labels, samples.probabilities[:, 0], groups=samples.patients)
        limits = {"in_the_large": own.in_the_large, "slope": own.slope}
        calibration |= {key: each.value for key, each in limits.items() if each is not None}
    return ReferenceScores(
        part,
        len(samples),
        {name: int((samples.labels == k).sum()) for k, name in enumerate(class_names)},
        float(samples.labels.mean()) if binary else None,
        Moments.of(samples.scores[:, 0]) if binary else None,
        _moments(samples, class_names) if binary else {},
        found,
        calibration,
    )


def _outcome_reference(
    part: str, rows: Sequence[Prediction], outcome: Outcome, evaluate: EvaluateSettings
) -> ReferenceScores:
    scored = scored_predictions(outcome, rows, "slide", rows[0].threshold, evaluate)
    found = measure(outcome, scored)
    known = {name: own for name in outcome.shown_metrics if (own := found.get(name)) and _has_limits(own)}
    limits = {name: read_interval(own) for name, own in known.items()}
    return ReferenceScores(part, len(rows), {}, None, Moments.of(outcome.rank(scored.scores)), {}, limits, {})


def _has_limits(info: Mapping[str, Any]) -> bool:
    return info.get("low") is not None and info.get("high") is not None


def _moments(samples: Samples, class_names: Sequence[str]) -> dict[str, Moments]:
    parts = {name: Moments.of(samples.scores[samples.labels == k, 0]) for k, name in enumerate(class_names)}
    return {name: own for name, own in parts.items() if own is not None}


# ---------------------------------------------------------------------------------------------------- drift


@dataclass(frozen=True)
class Change:
    """One number on the new cohort and on the slides it is compared with."""

    metric: str
    against: str
    """`validation` or `test` slides of the package."""
    before: float
    now: float
    low: float | None = None
    """Limits of the difference now - before, where they are known."""
    high: float | None = None
    level: float | None = None

    @property
    def difference(self) -> float:
        return self.now - self.before

    @property
    def is_significant(self) -> bool:
        return self.low is not None and self.high is not None and not self.low <= 0 <= self.high

    def to_json(self) -> Json:
        return {**asdict(self), "difference": self.difference}


def difference_of(now: Interval, before: Interval) -> tuple[float, float] | None:
    """Return limits of now - before for independent estimates (square-and-add); None for different levels."""
    if now.level != before.level:
        return None
    value = now.value - before.value
    down = math.hypot(now.value - now.low, before.high - before.value)
    up = math.hypot(now.high - now.value, before.value - before.low)
    return value - down, value + up


def difference_of_means(now: Moments, before: Moments, level: float) -> tuple[float, float] | None:
    """Return Welch's limits of the difference of two means; None where a deviation is unknown or both are 0."""
    if now.sd is None or before.sd is None:
        return None
    a, b = now.sd**2 / now.num, before.sd**2 / before.num
    if a + b == 0:
        return None
    freedom = (a + b) ** 2 / (a**2 / (now.num - 1) + b**2 / (before.num - 1))
    students: Any = student
    reach = float(students.ppf(0.5 + level / 2, freedom)) * math.sqrt(a + b)
    value = now.mean - before.mean
    return value - reach, value + reach


def changes_against(now: ReferenceScores, before: ReferenceScores, level: float) -> tuple[Change, ...]:
    """Return all numbers that both have, with their change."""
    found: list[Change] = []

    def add(metric: str, one: float, two: float, limits: tuple[float, float] | None = None) -> None:
        low, high = limits or (None, None)
        found.append(Change(metric, before.part, one, two, low, high, level if limits else None))

    for name, own in now.metrics.items():
        if name in before.metrics:
            add(name, before.metrics[name].value, own.value, difference_of(own, before.metrics[name]))
    if now.prevalence is not None and before.prevalence is not None:
        add("prevalence", before.prevalence, now.prevalence)
    if now.scores is not None and before.scores is not None:
        limits = difference_of_means(now.scores, before.scores, level)
        add("mean score", before.scores.mean, now.scores.mean, limits)
    for name, own in now.of_class.items():
        if name in before.of_class:
            limits = difference_of_means(own, before.of_class[name], level)
            add(f"mean score of {name}", before.of_class[name].mean, own.mean, limits)
    for name, value in now.calibration.items():
        if name in before.calibration:
            add(name, before.calibration[name], value)
    return tuple(found)


# ---------------------------------------------------------------------------------------------------- comparison


@dataclass(frozen=True)
class Comparison:
    """Two models on the same slides or patients: the metric of `model` minus that of `other`."""

    model: str
    other: str
    level: Level
    num: int
    value: float
    other_value: float
    difference: Interval
    test: str
    p_value: float
    metric: str = "AUC"

    def to_json(self) -> Json:
        return asdict(self)


def compare_models(
    ours: Sequence[Prediction],
    theirs: Sequence[Prediction],
    names: tuple[str, str],
    level: Level,
    evaluate: EvaluateSettings,
    outcome: Outcome | None = None,
) -> Comparison:
    """Compare two models on the slides (or patients) that both have predicted. Raises MetricError without such."""
    both = {row.slide for row in ours} & {row.slide for row in theirs}
    if not both:
        raise MetricError(
            "no slide has predictions of both models", "they are compared on the same slides", code="no-common-slides"
        )
    if outcome is not None:
        first, second = (
            sorted((row for row in rows if row.slide in both), key=lambda row: row.slide) for rows in (ours, theirs)
        )
        return _compare_outcome(first, second, names, level, evaluate, outcome)
    one, two = (samples_of([row for row in rows if row.slide in both], level=level) for rows in (ours, theirs))
    scores = {
        name: dict(zip(own.names, own.scores.tolist(), strict=True))
        for name, own in zip(names, (one, two), strict=True)
    }
    paired = paired_rows(
        dict(zip(one.names, one.labels.tolist(), strict=True)),
        scores,
        names[1],
        patients=dict(zip(one.names, one.patients, strict=True)),
        level=evaluate.confidence,
        resamples=evaluate.bootstrap,
        seed=evaluate.seed,
    )[names[0]]
    return Comparison(
        names[0], names[1], level, len(one), _auc(one), _auc(two), paired.difference, paired.test, paired.p_value
    )


def _compare_outcome(
    ours: Sequence[Prediction],
    theirs: Sequence[Prediction],
    names: tuple[str, str],
    level: Level,
    evaluate: EvaluateSettings,
    outcome: Outcome,
) -> Comparison:
    one, two = (scored_predictions(outcome, rows, level, rows[0].threshold, evaluate) for rows in (ours, theirs))
    difference, test, p_value = outcome.paired(one, two.scores)
    own, other = (outcome.primary_metric(each).value for each in (one, two))
    model, against = names
    num, words = len(one.targets), outcome.primary_words
    return Comparison(model, against, level, num, own, other, difference, test, p_value, words)


def _auc(samples: Samples) -> float:
    if samples.scores.shape[1] == 1:
        return metrics.auc(samples.labels, samples.scores[:, 0])
    return metrics.multiclass_auc(samples.labels, samples.scores, resamples=100).macro.value


# ---------------------------------------------------------------------------------------------------- all of it


@dataclass(frozen=True)
class ValidationLevel:
    """The evaluation by slide or by patient."""

    level: Level
    words: str
    num: int
    metrics: Json
    """All metrics, in the form of metrics.json."""
    calibration: Calibration | None
    """None with more than two classes."""
    comparison: Comparison | None

    def interval(self, name: str) -> Interval:
        """Return a metric with its limits; NaN where it is undefined."""
        return read_interval(self.metrics.get(name))

    def to_json(self) -> Json:
        return {
            "words": self.words,
            **self.metrics,
            "calibration": None if self.calibration is None else asdict(self.calibration),
            "comparison": None if self.comparison is None else self.comparison.to_json(),
        }


@dataclass(frozen=True)
class ExternalValidation:
    """A frozen model on another cohort."""

    class_names: tuple[str, ...]
    slide: ValidationLevel
    patient: ValidationLevel | None
    """None where every patient has one slide."""
    changes: tuple[Change, ...]
    """By slide, against validation and test slides of the model."""
    subgroups: tuple[SubgroupTable, ...]
    confidence: float
    decisions: Decisions | None = None
    """Decision curves, and prediction sets by the threshold of the package; None with another outcome than classes."""
    decisions_json: Json | None = None
    """The same in the form of metrics.json."""

    @property
    def levels(self) -> tuple[ValidationLevel, ...]:
        return (self.slide,) if self.patient is None else (self.slide, self.patient)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Sentences on what differs from the model's own slides, from perfect calibration, and between subgroups."""
        lines = [
            f"{NAMES.get(each.metric, each.metric)} changed from {each.before:.3f} on the {each.against} slides of the "
            f"package to {each.now:.3f} (difference {each.difference:+.3f}, limits {each.low:+.3f} to {each.high:+.3f})"
            for each in self.changes
            if each.is_significant
        ]
        own = self.slide.calibration
        if own is not None and own.in_the_large is not None and not own.in_the_large.low <= 0 <= own.in_the_large.high:
            kind = "high" if own.in_the_large.value < 0 else "low"
            lines.append(
                f"probabilities are too {kind} on this cohort: {own.mean_probability:.3f} on average, "
                f"{own.prevalence:.3f} of the slides are positive"
            )
        if own is not None and own.slope is not None and not own.slope.low <= 1 <= own.slope.high:
            kind = "extreme" if own.slope.value < 1 else "close to each other"
            lines.append(f"probabilities are too {kind} on this cohort: calibration slope {own.slope.value:.2f}")
        return (*lines, *self._coverage_warning(), *(text for table in self.subgroups for text in table.warnings))

    def _coverage_warning(self) -> Iterator[str]:
        sets = (self.decisions_json or {}).get("prediction_sets")
        if sets is not None and not sets["coverage"]["low"] <= sets["wanted"] <= sets["coverage"]["high"]:
            yield (
                f"prediction sets contain the true class in {sets['coverage']['value']:.3f} of cases on this cohort, "
                f"not in {sets['wanted']:.3g} as on the model's own slides"
            )

    def to_json(self) -> Json:
        return {
            "classes": list(self.class_names),
            "confidence": self.confidence,
            "slide": self.slide.to_json(),
            "patient": None if self.patient is None else self.patient.to_json(),
            "changes": [each.to_json() for each in self.changes],
            "subgroups": [table.to_json() for table in self.subgroups],
            **({} if self.decisions_json is None else {"decisions": self.decisions_json}),
            "warnings": list(self.warnings),
        }


NAMES = {
    "auc": "AUC",
    "in_the_large": "calibration-in-the-large",
    "slope": "calibration slope",
    "brier": "Brier score",
    "ece": "calibration error (ECE)",
    **METRIC_NAMES,
}
"""Names of metrics in words; others are their own."""


def validate_predictions(
    predictions: Sequence[Prediction],
    class_names: Sequence[str],
    evaluate: EvaluateSettings,
    *,
    references: Sequence[ReferenceScores] = (),
    others: tuple[tuple[str, str], Sequence[Prediction]] | None = None,
    columns: Mapping[str, Mapping[str, str | None]] | None = None,
    outcome: Outcome | None = None,
    sets: tuple[ConformalThreshold | None, str] = (None, "no threshold was given"),
) -> ExternalValidation:
    """Evaluate labelled predictions (part `test`, seed None) of a frozen model on another cohort.

    `references` are what its package tells of its own slides; `others` the names of both models and the predictions of
    the second; `columns` name -> slide -> value for subgroups; `sets` the threshold of prediction sets, or why there is
    none. Predictions are read, never changed.
    """
    several = len({row.patient for row in predictions}) < len({row.slide for row in predictions})
    slide = _level("slide", predictions, class_names, evaluate, others, outcome)
    patient = _level("patient", predictions, class_names, evaluate, others, outcome) if several else None
    now = _reference("external", predictions, class_names, evaluate, outcome)
    decisions = None if outcome is not None else _decisions(predictions, class_names, evaluate, sets)
    return ExternalValidation(
        tuple(class_names),
        slide,
        patient,
        tuple(change for each in references for change in changes_against(now, each, evaluate.confidence)),
        subgroup_tables(predictions, columns or {}, class_names, evaluate, outcome),
        evaluate.confidence,
        decisions,
        None if decisions is None else decisions.to_json(class_names, evaluate),
    )


def _decisions(
    predictions: Sequence[Prediction],
    class_names: Sequence[str],
    evaluate: EvaluateSettings,
    sets: tuple[ConformalThreshold | None, str],
) -> Decisions:
    threshold, why = sets
    thresholds = {} if threshold is None else {row.split: threshold for row in predictions}
    found = decisions_of(predictions, class_names, evaluate, thresholds)
    return found if threshold is not None else replace(found, reasons={**found.reasons, "prediction_sets": why})


def _level(
    level: Level,
    predictions: Sequence[Prediction],
    class_names: Sequence[str],
    evaluate: EvaluateSettings,
    others: tuple[tuple[str, str], Sequence[Prediction]] | None,
    outcome: Outcome | None,
) -> ValidationLevel:
    if outcome is not None:
        return _outcome_level(level, predictions, evaluate, others, outcome)
    samples, binary = samples_of(predictions, level=level), len(class_names) == 2
    scored = score_samples(samples, class_names, evaluate)
    words = SLIDE_WORDS if level == "slide" else PATIENT_WORDS if binary else PATIENT_WORDS_MULTI
    calibration = comparison = None
    if binary:
        groups, confidence = samples.patients, evaluate.confidence
        calibration = calibration_of(samples.labels, samples.probabilities[:, 0], groups=groups, level=confidence)
    if others is not None:
        names, theirs = others
        reasons = scored["reasons"]
        comparison = attempt(reasons, "comparison", lambda: compare_models(predictions, theirs, names, level, evaluate))
    return ValidationLevel(level, words, len(samples), scored, calibration, comparison)


def _outcome_level(
    level: Level,
    predictions: Sequence[Prediction],
    evaluate: EvaluateSettings,
    others: tuple[tuple[str, str], Sequence[Prediction]] | None,
    outcome: Outcome,
) -> ValidationLevel:
    """Return the evaluation of another outcome than classes, by the cut that the predictions carry."""
    scored = scored_predictions(outcome, predictions, level, predictions[0].threshold, evaluate)
    found, comparison = measure(outcome, scored), None
    if others is not None:
        names, theirs = others
        compare = lambda: compare_models(predictions, theirs, names, level, evaluate, outcome)  # noqa: E731
        comparison = attempt(found["reasons"], "comparison", compare)
    words = SLIDE_WORDS if level == "slide" else outcome.patient_words
    return ValidationLevel(level, words, len(scored.targets), found, None, comparison)
