"""Input checks, confidence intervals, metrics at a threshold, and calibration of probabilities.

A sample is predicted positive if score >= threshold. A ratio with a zero denominator (such as precision without
positive predictions) is NaN with an interval from 0 to 1. Proportions have Wilson intervals (Wilson 1927). Balanced
accuracy is a mean of independent proportions, whose Wilson limits are combined as a root of squares (Newcombe 1998).
F1 = 2 J / (1 + J) is an increasing function of J = TP / (TP + FP + FN), a proportion, so J's Wilson limits are
transformed by the same function. All of them treat samples as independent: if patients have several slides, evaluate
per patient.

Platt and temperature scaling use logits and Platt's smoothed targets: a class with n samples has the target
(n + 1) / (n + C) instead of 1. So they stay finite if a small validation set is separated perfectly. Both keep the
order of scores; a validation set whose logits do not increase with the labels raises an error.

Axes in names: N samples (slides, patients or tiles), C classes, R resamples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import expit, ndtri, softmax  # pyright: ignore[reportMissingTypeStubs, reportUnknownVariableType]
from scipy.special import logit as logit_of  # pyright: ignore[reportMissingTypeStubs]

from selfvitmil.errors import MetricError

Labels = NDArray[np.int64]
Floats = NDArray[np.float64]

# Resampling weights are generated in pieces of about this many numbers, to bound memory for any cohort size.
_PIECE = 2**21


@dataclass(frozen=True)
class Interval:
    """An estimate with its confidence interval; an undefined value is NaN."""

    value: float
    low: float
    high: float
    method: str
    level: float = 0.95


def check_labels(labels: ArrayLike, num_classes: int = 2, positive: str | float | None = None) -> Labels:
    """Return labels as integers 0 .. num_classes - 1, or raise MetricError that shows the first invalid one.

    With `positive`, labels may be any two names or numbers; that one becomes 1, the other 0.
    """
    given = np.asarray(labels)
    if given.ndim != 1 or not len(given):
        raise MetricError(
            f"labels of shape {given.shape}",
            "one label per sample is needed",
            "Pass a list of labels",
            code="invalid-labels",
        )
    if positive is not None:
        return _one_for_positive(given, positive)
    numeric = given.dtype.kind in "biuf"
    known = np.isin(given, np.arange(num_classes)) if numeric else np.zeros(len(given), dtype=bool)
    if not known.all():
        wrong = int(np.argmin(known))
        raise MetricError(
            f"label {given[wrong : wrong + 1].tolist()[0]!r} at position {wrong}",
            f"labels must be integers from 0 to {num_classes - 1}",
            _as_numbers(given, num_classes),
            code="invalid-labels",
        )
    return given.astype(np.int64)


def _as_numbers(given: NDArray[np.generic], num_classes: int) -> str:
    """Return what to do with labels that are no class numbers, with the words of the labels themselves."""
    names = sorted(set(given.tolist()), key=str)
    if num_classes == 2 and len(names) == 2 and all(each == each and each not in (None, "", "nan") for each in names):
        examples = " or ".join(f"positive={name!r}" for name in names)
        return f"Pass {examples} where a function takes `positive`; elsewhere 1 for the positive class, 0 for the other"
    return "Convert class names to numbers, and leave out samples without a label"


def _one_for_positive(given: NDArray[np.generic], positive: str | float) -> Labels:
    """Return 1 where the label is `positive` and 0 where it is the only other one."""
    values = given.tolist()
    missing = [k for k, each in enumerate(values) if each is None or each != each or each in ("", "nan")]
    if missing:
        raise MetricError(
            f"label {values[missing[0]]!r} at position {missing[0]}",
            "it is no class",
            "Leave out samples without a label",
            code="invalid-labels",
        )
    names = sorted(set(values), key=str)
    if len(names) == 1:
        raise _one_class(len(values), names[0])
    shown = ", ".join(repr(each) for each in names[:6]) + (" ..." if len(names) > 6 else "")
    if len(names) > 2:
        raise MetricError(
            f"labels of {len(names)} classes ({shown})",
            "a positive class and one other are needed",
            "Leave the other classes out, merge them, or use multiclass_auc",
            code="invalid-labels",
        )
    if positive not in names:
        raise MetricError(
            f"positive={positive!r}",
            f"the labels are {shown}",
            "Pass one of them",
            code="invalid-labels",
        )
    return (given == positive).astype(np.int64)


def check_scores(scores: ArrayLike, count: int, columns: int | None = None, infinite: bool = False) -> Floats:
    """Return scores as float64, one (or `columns`) per sample, never NaN and finite unless `infinite`."""
    given = np.asarray(scores, dtype=np.float64)
    shape = (count,) if columns is None else (count, columns)
    if given.shape != shape:
        raise MetricError(
            f"scores of shape {given.shape}",
            f"the labels require shape {shape}",
            "Pass scores in the order of the labels",
            code="length-mismatch",
        )
    bad = np.isnan(given) if infinite else ~np.isfinite(given)
    if bad.any():
        raise MetricError(
            f"{int(bad.sum())} of {given.size} scores are NaN or infinite, the first at position {np.argwhere(bad)[0]}",
            "no metric can be computed from them",
            "Look for NaN in the embeddings, or leave these samples out and report it",
            code="non-finite-scores",
        )
    return given


def check_probabilities(probabilities: ArrayLike, count: int, columns: int | None = None) -> Floats:
    given = check_scores(probabilities, count, columns)
    if given.size and (given.min() < 0 or given.max() > 1):
        raise MetricError(
            f"probabilities from {given.min():.4g} to {given.max():.4g}",
            "probabilities must be between 0 and 1",
            "Apply the sigmoid or softmax to logits first",
            code="invalid-probabilities",
        )
    return given


def check_both_classes(labels: Labels) -> None:
    if labels.min() == labels.max():
        raise _one_class(len(labels), int(labels[0]))


def _one_class(count: int, label: object) -> MetricError:
    return MetricError(
        f"all {count} labels are {label}",
        "samples of at least two classes are needed",
        "Use a split with positives and negatives",
        code="one-class",
    )


def check_binary(labels: ArrayLike, scores: ArrayLike, positive: str | float | None = None) -> tuple[Labels, Floats]:
    """Return validated labels 0 and 1, both present, with scores that can be ranked; `positive` as `check_labels`."""
    label = check_labels(labels, positive=positive)
    score = check_scores(scores, len(label), infinite=True)
    check_both_classes(label)
    return label, score


def check_groups(groups: ArrayLike | None, count: int) -> Labels:
    """Return the group index (patient) of each sample, from 0; without groups each sample is its own."""
    if groups is None:
        return np.arange(count)
    given = np.asarray(groups)
    if given.shape != (count,):
        raise MetricError(
            f"groups of shape {given.shape}",
            f"there are {count} samples",
            "Pass one group (patient) per sample",
            code="length-mismatch",
        )
    return np.unique(given, return_inverse=True)[1].astype(np.int64)


def check_folds(folds: ArrayLike | None, label: Labels) -> Labels:
    """Return the fold index of each sample, 0 for all without folds; at least one fold must have both classes."""
    if folds is None:
        return np.zeros(len(label), dtype=np.int64)
    fold = check_groups(folds, len(label))
    if not pairs_of_folds(label, fold).any():
        raise MetricError(
            f"no fold of {int(fold.max()) + 1} has both classes",
            "scores of different folds come from different models and cannot be ranked together",
            "Use fewer folds, or stratify them by label",
            code="folds-with-one-class",
        )
    return fold


def pairs_of_folds(label: Labels, fold: Labels) -> NDArray[np.int64]:
    """Return the number of (positive, negative) pairs of each fold."""
    return np.bincount(fold, label == 1).astype(np.int64) * np.bincount(fold, label == 0).astype(np.int64)


def first_of_ties(ordered: Floats | Labels) -> NDArray[np.int64]:
    """Return the index where each distinct value begins in an ordered array."""
    return np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))


def normal_quantile(level: float) -> float:
    """Return the number of standard deviations of a two-sided interval of this level."""
    if not 0 < level < 1:
        raise MetricError(
            f"confidence level {level}", "it must be between 0 and 1", "Pass 0.95 for 95 %", code="invalid-level"
        )
    return float(ndtri(0.5 + level / 2))


def wilson(successes: int, trials: int, level: float = 0.95) -> Interval:
    """Return a proportion with Wilson's score interval (Wilson 1927). Without trials: NaN, with an interval from 0 to
    1."""
    z = normal_quantile(level)
    if not 0 <= successes <= trials:
        raise MetricError(
            f"{successes} of {trials}", "successes must not exceed trials", "Check the counts", code="invalid-counts"
        )
    if trials == 0:
        return Interval(np.nan, 0.0, 1.0, "Wilson", level)
    share = successes / trials
    centre = share + z * z / (2 * trials)
    reach = z * np.sqrt(share * (1 - share) / trials + (z / (2 * trials)) ** 2)
    scale = 1 + z * z / trials
    # At the ends, rounding would leave 1e-17 instead of 0.
    low = 0.0 if successes == 0 else (centre - reach) / scale
    high = 1.0 if successes == trials else (centre + reach) / scale
    return Interval(share, float(low), float(high), "Wilson", level)


def mean_of_independent(parts: Sequence[Interval], method: str) -> Interval:
    """Return the interval of the mean of independent estimates by the square-and-add method (Newcombe 1998)."""
    value = float(np.mean([part.value for part in parts]))
    down = float(np.sqrt(sum((part.value - part.low) ** 2 for part in parts))) / len(parts)
    up = float(np.sqrt(sum((part.high - part.value) ** 2 for part in parts))) / len(parts)
    if np.isnan(value):
        return Interval(value, 0.0, 1.0, method, parts[0].level)
    return Interval(value, value - down, value + up, method, parts[0].level)


def bootstrap(
    statistic: Callable[[Floats], Floats], labels: Labels, groups: Labels, resamples: int, seed: int
) -> Floats:
    """Return values (R, ...) of `statistic` over seeded resamples; it takes how often each sample was drawn, (R, N).

    Whole groups are drawn with replacement, among those with samples of the same classes: every resample has every
    class, and as many groups of each kind as the data. With one sample per group this is the stratified bootstrap.
    """
    if resamples < 100:
        raise MetricError(
            f"{resamples} resamples", "at least 100 are needed", "Use 1,000 or more", code="too-few-resamples"
        )
    return np.concatenate([statistic(weights) for weights in _weights(labels, groups, resamples, seed)])


def _weights(labels: Labels, groups: Labels, resamples: int, seed: int) -> Iterator[Floats]:
    rng = np.random.default_rng(seed)
    num_groups = int(groups.max()) + 1
    holds = np.zeros((num_groups, int(labels.max()) + 1), dtype=bool)
    holds[groups, labels] = True
    kind = np.unique(np.packbits(holds, axis=1), axis=0, return_inverse=True)[1].reshape(-1)
    strata = [np.flatnonzero(kind == k) for k in range(kind.max() + 1)]
    piece = max(1, _PIECE // len(groups))
    for start in range(0, resamples, piece):
        rows = min(piece, resamples - start)
        drawn = np.empty((rows, num_groups))
        for members in strata:
            size = len(members)
            picks = rng.integers(size, size=(rows, size)) + size * np.arange(rows)[:, None]
            drawn[:, members] = np.bincount(picks.ravel(), minlength=rows * size).reshape(rows, size)
        yield drawn[:, groups]


def bootstrap_p_value(differences_R: Floats) -> float:
    """Return the two-sided p-value of a difference from its resamples: twice the fraction on the rarer side of 0, among
    the resamples in which it is defined, with the estimate itself counted."""
    defined = differences_R[np.isfinite(differences_R)]
    rarer_side = min(int((defined <= 0).sum()), int((defined >= 0).sum()))
    return min(1.0, 2 * (rarer_side + 1) / (len(defined) + 1))


def percentile_interval(value: float, values_R: Floats, level: float) -> Interval:
    """Return percentile limits from the resamples in which the value is defined."""
    low, high = np.quantile(values_R[np.isfinite(values_R)], [(1 - level) / 2, (1 + level) / 2])
    return Interval(value, float(low), float(high), f"bootstrap percentiles, {len(values_R)} resamples", level)


# ---------------------------------------------------------------------------------------------------- decisions


@dataclass(frozen=True)
class Decisions:
    """Counts and metrics of the positive class (class 1, or one class against the rest)."""

    true_negatives: int
    false_positives: int
    false_negatives: int
    true_positives: int
    accuracy: Interval
    balanced_accuracy: Interval
    f1: Interval
    sensitivity: Interval
    specificity: Interval
    ppv: Interval
    npv: Interval

    @property
    def confusion(self) -> NDArray[np.int64]:
        """Counts as [true class, predicted class]."""
        return np.array(
            [[self.true_negatives, self.false_positives], [self.false_negatives, self.true_positives]], dtype=np.int64
        )


@dataclass(frozen=True)
class MulticlassDecisions:
    """Counts as [true class, predicted class]; balanced accuracy is the mean sensitivity, macro F1 the mean F1."""

    confusion: NDArray[np.int64]
    accuracy: Interval
    balanced_accuracy: Interval
    macro_f1: float
    per_class: tuple[Decisions, ...]


def decide(
    labels: ArrayLike,
    scores: ArrayLike,
    threshold: float,
    level: float = 0.95,
    *,
    positive: str | float | None = None,
) -> Decisions:
    """Return all metrics of the rule score >= threshold. Compares in float64, as `youden_threshold` does.

    `positive` names the positive class where labels are not 0 and 1.
    """
    label = check_labels(labels, positive=positive)
    called = (check_scores(scores, len(label), infinite=True) >= threshold).astype(np.int64)
    if np.isnan(threshold):
        raise MetricError(
            "the threshold is NaN",
            "scores cannot be compared with it",
            "Choose a threshold on validation slides",
            code="nan-threshold",
        )
    return _from_confusion(confusion_matrix(label, called, 2), level)


def decide_multiclass(
    labels: ArrayLike, called: ArrayLike, num_classes: int, level: float = 0.95
) -> MulticlassDecisions:
    """Return the metrics for predicted classes (usually the most probable); a class that never occurs makes means
    NaN."""
    confusion = confusion_matrix(labels, called, num_classes)
    total = int(confusion.sum())
    label, call = np.asarray(labels), np.asarray(called)
    per_class = tuple(_from_confusion(confusion_matrix(label == k, call == k, 2), level) for k in range(num_classes))
    return MulticlassDecisions(
        confusion,
        wilson(int(np.trace(confusion)), total, level),
        mean_of_independent([one.sensitivity for one in per_class], "Wilson limits added as squares"),
        float(np.mean([one.f1.value for one in per_class])),
        per_class,
    )


def confusion_matrix(labels: ArrayLike, called: ArrayLike, num_classes: int) -> NDArray[np.int64]:
    """Return counts as [true class, predicted class]."""
    label, call = check_labels(labels, num_classes), check_labels(called, num_classes)
    if len(label) != len(call):
        raise MetricError(
            f"{len(label)} labels and {len(call)} decisions",
            "their numbers must be equal",
            "Pass them in the same order",
            code="length-mismatch",
        )
    return np.bincount(label * num_classes + call, minlength=num_classes**2).reshape(num_classes, num_classes)


def youden_threshold(labels: ArrayLike, scores: ArrayLike, *, positive: str | float | None = None) -> float:
    """Return the threshold that maximizes sensitivity + specificity (Youden 1950), midway between two scores.

    Ties are resolved to the highest threshold (fewest false positives), as argmax along a ROC curve does. If no
    threshold is better than predicting everything negative, the next number above all scores is returned. `positive`
    names the positive class where labels are not 0 and 1.
    """
    label = check_labels(labels, positive=positive)
    score = check_scores(scores, len(label))
    check_both_classes(label)
    order = np.argsort(-score, kind="stable")
    starts = first_of_ties(score[order])
    distinct = score[order][starts]
    true = np.cumsum(np.add.reduceat(label[order], starts))
    false = np.cumsum(np.add.reduceat(1 - label[order], starts))
    # Youden's index times both class sizes is an integer, so ties are exact.
    index = true * int(false[-1]) - false * int(true[-1])
    best = int(np.argmax(index))
    if index[best] <= 0:
        return float(np.nextafter(distinct[0], np.inf))
    upper, lower = float(distinct[best]), float(distinct[best + 1])
    middle = lower + (upper - lower) / 2
    # Between adjacent floats there is no midpoint; the rule is >=, so the upper one separates them too.
    return middle if lower < middle <= upper else upper


def _from_confusion(confusion: NDArray[np.int64], level: float) -> Decisions:
    tn, fp, fn, tp = (int(count) for count in confusion.ravel())
    sensitivity, specificity = wilson(tp, tp + fn, level), wilson(tn, tn + fp, level)
    overlap = wilson(tp, tp + fp + fn, level)
    value, low, high = (2 * j / (1 + j) for j in (overlap.value, overlap.low, overlap.high))
    return Decisions(
        tn,
        fp,
        fn,
        tp,
        accuracy=wilson(tp + tn, tn + fp + fn + tp, level),
        balanced_accuracy=mean_of_independent([sensitivity, specificity], "Wilson limits added as squares"),
        f1=Interval(value, low, high, "Wilson limits of TP / (TP + FP + FN)", level),
        sensitivity=sensitivity,
        specificity=specificity,
        ppv=wilson(tp, tp + fp, level),
        npv=wilson(tn, tn + fn, level),
    )


# ---------------------------------------------------------------------------------------------------- calibration


@dataclass(frozen=True)
class Reliability:
    """One row per non-empty bin: mean probability, fraction of positives with Wilson limits, number of samples."""

    probability: Floats
    share: Floats
    low: Floats
    high: Floats
    count: NDArray[np.int64]

    @property
    def ece(self) -> float:
        """Expected calibration error: the mean gap between probability and fraction, weighted by samples."""
        return float((np.abs(self.probability - self.share) * self.count).sum() / self.count.sum())


@dataclass(frozen=True)
class Platt:
    """probability = sigmoid(slope * logit + intercept), slope > 0."""

    slope: float
    intercept: float

    @property
    def score_of_one_half(self) -> float:
        """Uncalibrated probability that is calibrated to 0.5."""
        return float(expit(-self.intercept / self.slope))

    def apply(self, logits: ArrayLike) -> Floats:
        return expit(self.slope * np.asarray(logits, dtype=np.float64) + self.intercept)


@dataclass(frozen=True)
class Temperature:
    """probability = sigmoid(logit / temperature) of (N,) logits, or the softmax over classes of (N, C)."""

    temperature: float

    def apply(self, logits: ArrayLike) -> Floats:
        cooled = np.asarray(logits, dtype=np.float64) / self.temperature
        return expit(cooled) if cooled.ndim < 2 else softmax(cooled, axis=-1)


def brier(labels: ArrayLike, probabilities: ArrayLike) -> float:
    """Return the mean squared error of (N,) probabilities of class 1, or of (N, C) summed over classes (0 to 2).

    Brier 1950: rows of (N, C) are distributions over the classes. Others, such as one sigmoid per class, raise an
    error.
    """
    if np.ndim(probabilities) == 2:
        num_classes = np.shape(probabilities)[1]
        label = check_labels(labels, num_classes)
        given = check_distributions(probabilities, len(label), num_classes)
        return float(((given - np.eye(num_classes)[label]) ** 2).sum(axis=1).mean())
    label = check_labels(labels)
    return float(((check_probabilities(probabilities, len(label)) - label) ** 2).mean())


def top_class(labels: ArrayLike, probabilities_NC: ArrayLike) -> tuple[Labels, Floats]:
    """Return whether the most probable class is correct (0, 1) and its probability: multiclass input of
    `reliability`."""
    num_classes = np.shape(probabilities_NC)[-1]
    label = check_labels(labels, num_classes)
    given = check_distributions(probabilities_NC, len(label), num_classes)
    return (given.argmax(axis=1) == label).astype(np.int64), given.max(axis=1)


def reliability(
    labels: ArrayLike,
    probabilities: ArrayLike,
    num_bins: int = 10,
    level: float = 0.95,
) -> Reliability:
    """Return predicted against observed fractions of positives in bins of equal width."""
    label = check_labels(labels)
    given = check_probabilities(probabilities, len(label))
    if num_bins < 1:
        raise MetricError(f"{num_bins} bins", "at least 1 is needed", "10 is usual", code="invalid-bins")
    index = np.minimum((given * num_bins).astype(np.int64), num_bins - 1)
    count = np.bincount(index, minlength=num_bins)
    used = count > 0
    positives = np.bincount(index, label, num_bins)[used].astype(np.int64)
    probability = np.bincount(index, given, num_bins)[used] / count[used]
    bars = [wilson(int(part), int(whole), level) for part, whole in zip(positives, count[used], strict=True)]
    low, high = np.array([bar.low for bar in bars]), np.array([bar.high for bar in bars])
    return Reliability(probability, positives / count[used], low, high, count[used])


def to_logits(probabilities: ArrayLike, clip: float = 1e-6) -> Floats:
    """Return the logits of (N,) probabilities, clipped to [clip, 1 - clip]: 1 has no finite logit."""
    given = np.asarray(probabilities, dtype=np.float64)
    return logit_of(np.clip(check_probabilities(given, len(given)), clip, 1 - clip))


def fit_platt(labels: ArrayLike, logits: ArrayLike) -> Platt:
    """Fit slope and intercept by minimizing the cross-entropy to smoothed targets (Platt 1999), with Newton's
    method."""
    label, given = _check(labels, logits)
    target = _soft_targets(label, 2)[:, 1]
    mean, spread = given.mean(), given.std()
    if spread == 0:
        raise _no_order(f"all {len(given)} logits are {given[0]:.4g}")
    # In standard units one start and one tolerance suit logits of any scale.
    columns = np.stack([(given - mean) / spread, np.ones_like(given)], axis=1)

    def loss(parameters: Floats) -> float:
        fitted = columns @ parameters
        return float((np.logaddexp(0.0, fitted) - target * fitted).sum())

    solve: Any = np.linalg.solve
    parameters: Floats = np.array([0.0, float(logit_of(target.mean()))])
    for _ in range(100):
        fitted = expit(columns @ parameters)
        gradient = columns.T @ (fitted - target)
        curvature = (columns.T * (fitted * (1 - fitted))) @ columns + 1e-12 * np.eye(2)
        step: Floats = solve(curvature, gradient)
        if float(gradient @ step) < 1e-20 * len(given):
            break
        length = 1.0
        while length > 1e-10 and loss(parameters - length * step) > loss(parameters):
            length /= 2
        parameters = parameters - length * step
    slope = float(parameters[0] / spread)
    if slope <= 0:
        raise _no_order(f"the fitted slope is {slope:.3g}")
    return Platt(slope, float(parameters[1] - slope * mean))


def fit_temperature(labels: ArrayLike, logits: ArrayLike) -> Temperature:
    """Fit the temperature that minimizes the cross-entropy to smoothed targets, for (N,) or (N, C) logits (Guo et al.
    2017).

    The loss is convex in 1 / temperature, so its minimum is where the slope changes sign.
    """
    label, given = _check(labels, logits)
    columns = np.stack([np.zeros_like(given), given], axis=1) if given.ndim == 1 else given
    target = _soft_targets(label, columns.shape[1])

    def slope(inverse: float) -> float:
        return float(((softmax(inverse * columns, axis=1) - target) * columns).sum())

    if slope(0.0) >= 0:
        raise _no_order("no temperature is better than an infinite one")
    high = 1.0 / np.abs(columns).max()
    while slope(high) < 0:
        high *= 2
    # slow to import: the commands that need no root do without it
    from scipy.optimize import brentq  # pyright: ignore[reportMissingTypeStubs, reportUnknownVariableType]

    inverse = float(brentq(slope, 0.0, high, xtol=1e-14 * high))  # pyright: ignore[reportArgumentType]
    return Temperature(1 / inverse)


def check_distributions(probabilities_NC: ArrayLike, count: int, num_classes: int) -> Floats:
    given = check_probabilities(probabilities_NC, count, num_classes)
    total = given.sum(axis=1)
    if not np.allclose(total, 1.0, atol=1e-3):
        raise MetricError(
            f"probabilities of {num_classes} classes that sum to {total.min():.3g} up to {total.max():.3g}",
            "one probability per class is needed, summing to 1",
            "Divide each row by its sum first",
            code="not-a-distribution",
        )
    return given


def _check(labels: ArrayLike, logits: ArrayLike) -> tuple[Labels, Floats]:
    columns = np.shape(logits)[1] if np.ndim(logits) == 2 else None
    label = check_labels(labels, columns or 2)
    given = check_scores(logits, len(label), columns)
    check_both_classes(label)
    return label, given


def _soft_targets(label: Labels, num_classes: int) -> Floats:
    """Return smoothed targets: the posterior mean of each class given its number of samples."""
    count = np.bincount(label, minlength=num_classes)[label][:, None]
    return (count * np.eye(num_classes)[label] + 1) / (count + num_classes)


def _no_order(what: str) -> MetricError:
    return MetricError(
        f"calibration: {what}",
        "logits that do not increase with the labels cannot be calibrated without inverting their order",
        "Leave the scores uncalibrated and report it, or use more validation slides",
        code="cannot-calibrate",
    )
