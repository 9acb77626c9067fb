"""Ranking metrics: area under the ROC curve (AUC) with intervals, paired test, one class against the rest; curves.

The AUC is counted exactly: the fraction of (positive, negative) pairs in which the positive scores higher, ties
counting half. Its variance is that of DeLong et al. (1988); with groups (several slides per patient) it is Obuchowski's
(1997) extension to clusters, which is identical if every group has one member.

The interval is DeLong's on the logit scale. Simulated with normal scores, 49 positives and 80 negatives and a true AUC
of 0.95, plain DeLong covers the true value in 90 % of studies, bootstrap percentiles in 91 %, the logit scale in 94 %;
with 10 and 16 samples it is 79, 86 and 96 %. If DeLong's variance is zero (perfect ranking, all scores equal) or
undefined (one positive), an interval without width would claim certainty from a few slides; Newcombe's score interval
(2006, method 5) is used instead and `method` says so.

Folds: scores of different models have different offsets, so a positive of one fold and a negative of another must not
be compared. With `folds` (which model scored a sample) the AUC is the fraction of pairs won among the pairs within a
fold: the mean of the folds' AUCs, weighted by their pairs. Its variance comes from the placements within folds, as
deviations from the common AUC; samples of one group (a patient whose slides are in the test sets of several splits) are
summed before they are squared, so test sets may overlap. A fold with one class has no pairs and is skipped. Simulated
with 5 folds of 10 positives and 16 negatives, offsets of two standard deviations and a true AUC of 0.9, ranking all
scores together is biased by -0.15 and its interval covers the true value in 7 % of studies; within folds there is no
bias and 97 % are covered. With 4 positives and 4 negatives per fold it is 98 %: with small folds the interval is
conservative.

A point of a curve is the rule "positive if score >= threshold", one for each distinct score, from high to low; samples
with equal scores enter together. With `folds` a curve is the vertical mean of the folds' curves: of their sensitivities
at every false positive rate, weighted by the folds' pairs, so that its area is `auc` within folds; of their precisions
at every recall, weighted by the folds' positives. Such a curve has no thresholds (NaN).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import expit, logit, ndtr  # pyright: ignore[reportMissingTypeStubs]

from selfvitmil.errors import MetricError
from selfvitmil.metrics.classification import (
    Floats,
    Interval,
    Labels,
    bootstrap,
    bootstrap_p_value,
    check_binary,
    check_folds,
    check_groups,
    check_labels,
    check_scores,
    first_of_ties,
    normal_quantile,
    pairs_of_folds,
    percentile_interval,
)

AGREE = 1 / 3
"""DeLong and bootstrap agree if their limits differ by at most this fraction of the interval's width."""


@dataclass(frozen=True)
class AucInterval(Interval):
    """The AUC; `low` and `high` are DeLong's, `bootstrap` the alternative, `statement` says whether the two agree."""

    bootstrap: Interval = field(kw_only=True)
    agree: bool = field(kw_only=True)
    statement: str = field(kw_only=True)


@dataclass(frozen=True)
class PairedAuc:
    """Two rankings of the same samples: AUC of a minus AUC of b, tested by DeLong's method and by the bootstrap."""

    auc_a: float
    auc_b: float
    difference: Interval
    p_value: float
    bootstrap: Interval
    bootstrap_p_value: float


@dataclass(frozen=True)
class MulticlassAuc:
    """AUC of each class against the rest, and their mean with a bootstrap interval."""

    macro: Interval
    per_class: tuple[AucInterval, ...]


def auc(
    labels: ArrayLike, scores: ArrayLike, *, positive: str | float | None = None, folds: ArrayLike | None = None
) -> float:
    """Return the area under the ROC curve for labels 0 and 1; infinite scores are allowed, NaN is not.

    Labels may also be two names (or other numbers) of which `positive` is one: `auc(labels, scores, positive="tumor")`.
    With `folds` (which model scored each sample) only pairs within a fold are compared.
    """
    label, score = check_binary(labels, scores, positive)
    return _auc(label, score, check_folds(folds, label))


def auc_interval(
    labels: ArrayLike,
    scores: ArrayLike,
    *,
    positive: str | float | None = None,
    level: float = 0.95,
    groups: ArrayLike | None = None,
    folds: ArrayLike | None = None,
    resamples: int = 2000,
    seed: int = 0,
) -> AucInterval:
    """Return the AUC with DeLong and bootstrap intervals; `groups` (patients) are kept together, `positive` and
    `folds` as in `auc`.

    With folds the limits are conditional on the models: samples are random, the models that scored them are not.
    """
    label, score = check_binary(labels, scores, positive)
    fold = check_folds(folds, label)
    group = check_groups(groups, len(label))
    value = _auc(label, score, fold)
    low, high, method = _limits(label, score, group, fold, level)
    values_R = bootstrap(resampled_auc(label, score, fold), label, group, resamples, seed)
    other = percentile_interval(value, values_R, level)
    gap = max(abs(low - other.low), abs(high - other.high)) / (high - low)
    agree = bool(gap <= AGREE)
    name = method.split(" ")[0]
    statement = f"{name} and bootstrap agree"
    if not agree:
        statement = f"{name} and bootstrap disagree ({low:.4f} to {high:.4f}, {other.low:.4f} to {other.high:.4f}): "
        statement += "with few samples or an AUC near 0 or 1 the bootstrap is too narrow"
    return AucInterval(value, low, high, method, level, bootstrap=other, agree=agree, statement=statement)


def paired_auc_test(
    labels: ArrayLike,
    scores_a: ArrayLike,
    scores_b: ArrayLike,
    *,
    positive: str | float | None = None,
    level: float = 0.95,
    groups: ArrayLike | None = None,
    folds: ArrayLike | None = None,
    resamples: int = 2000,
    seed: int = 0,
) -> PairedAuc:
    """Test whether two scores of the same samples have equal AUC. Two-sided; `groups` (patients) are kept together,
    `positive` and `folds` as in `auc`."""
    label, a = check_binary(labels, scores_a, positive)
    b = check_scores(scores_b, len(label), infinite=True)
    fold = check_folds(folds, label)
    group = check_groups(groups, len(label))
    value_a, value_b = _auc(label, a, fold), _auc(label, b, fold)
    value = value_a - value_b
    difference, p_value = _difference(label, a, b, group, fold, level)

    auc_of_a, auc_of_b = resampled_auc(label, a, fold), resampled_auc(label, b, fold)
    values_R = bootstrap(lambda weights: auc_of_a(weights) - auc_of_b(weights), label, group, resamples, seed)
    other = percentile_interval(value, values_R, level)
    return PairedAuc(value_a, value_b, difference, p_value, other, bootstrap_p_value(values_R))


def multiclass_auc(
    labels: ArrayLike,
    scores_NC: ArrayLike,
    *,
    level: float = 0.95,
    groups: ArrayLike | None = None,
    folds: ArrayLike | None = None,
    resamples: int = 2000,
    seed: int = 0,
) -> MulticlassAuc:
    """Return the AUC of each class against the rest, and the mean over classes; every class must occur.

    `folds` as in `auc`; for each class only the folds in which it occurs count.
    """
    num_classes = np.shape(scores_NC)[1] if np.ndim(scores_NC) == 2 else 0
    if num_classes < 2:
        raise MetricError(
            f"scores of shape {np.shape(scores_NC)}",
            "one column per class, at least two, is needed",
            "For labels 0 and 1 with one score use auc_interval",
            code="invalid-scores",
        )
    label = check_labels(labels, num_classes)
    scores = check_scores(scores_NC, len(label), num_classes, infinite=True)
    absent = sorted(set(range(num_classes)) - set(label.tolist()))
    if absent:
        raise MetricError(
            f"no sample of class {', '.join(map(str, absent))} among {len(label)}",
            "its AUC, and so the mean over classes, is undefined",
            "Use a split that contains every class, or drop the class",
            code="missing-class",
        )
    group, fold = check_groups(groups, len(label)), check_groups(folds, len(label)) if folds is not None else None
    one_vs_rest = [(label == k).astype(np.int64) for k in range(num_classes)]
    per_class = tuple(
        auc_interval(rest, scores[:, k], level=level, groups=group, folds=fold, resamples=resamples, seed=seed)
        for k, rest in enumerate(one_vs_rest)
    )
    values_R = bootstrap(resampled_macro_auc(label, scores, fold), label, group, resamples, seed)
    mean = float(np.mean([one.value for one in per_class]))
    return MulticlassAuc(percentile_interval(mean, values_R, level), per_class)


def _half_wins(winners: Floats, losers: Floats) -> NDArray[np.int64]:
    """Return, for each winner, twice the number of losers below it plus the number of ties: integers, so exact."""
    ordered = np.sort(losers)
    return np.searchsorted(ordered, winners, "left") + np.searchsorted(ordered, winners, "right")


def _auc(label: Labels, score: Floats, fold: Labels) -> float:
    half_wins, pairs = 0, 0
    for k in range(int(fold.max()) + 1):
        positive, negative = score[(label == 1) & (fold == k)], score[(label == 0) & (fold == k)]
        half_wins += int(_half_wins(positive, negative).sum())
        pairs += len(positive) * len(negative)
    return half_wins / (2 * pairs)


def _placements(label: Labels, score: Floats, fold: Labels) -> Floats:
    """Return, for a positive, the fraction of its fold's negatives below it; for a negative, of positives above it.

    Ties count half; NaN in a fold with one class.
    """
    placement = np.full(len(label), np.nan)
    for k in np.flatnonzero(pairs_of_folds(label, fold)):
        positives, negatives = (label == 1) & (fold == k), (label == 0) & (fold == k)
        positive, negative = score[positives], score[negatives]
        placement[positives] = _half_wins(positive, negative) / (2 * len(negative))
        placement[negatives] = _half_wins(-negative, -positive) / (2 * len(positive))
    return placement


def _variance(label: Labels, placement: Floats, value: float, group: Labels, fold: Labels) -> float:
    """Return the variance of the mean placement, with groups drawn independently; NaN if only one group has a class.

    `placement` may be a difference of placements: then this is the variance of the difference of two AUCs.
    """
    pairs = pairs_of_folds(label, fold)
    used = pairs[fold] > 0
    label, placement, fold = label[used], placement[used], fold[used]
    group = check_groups(group[used], len(label))
    num_positive, num_negative = int((label == 1).sum()), int((label == 0).sum())
    # A fold counts by its fraction of all pairs, a sample by its fraction of the fold's class; 1 with a single fold.
    share = (pairs / pairs.sum())[fold]
    of_class = np.where(label == 1, np.bincount(fold, label == 1)[fold], np.bincount(fold, label == 0)[fold])
    weight = share * (np.where(label == 1, num_positive, num_negative) / of_class)
    excess = (placement - value) * weight
    of_positives = np.bincount(group, excess * (label == 1))
    of_negatives = np.bincount(group, excess * (label == 0))
    groups, with_positive, with_negative = len(of_positives), *_groups_with(label, group)
    if min(with_positive, with_negative) < 2:
        return np.nan
    positives = with_positive / (with_positive - 1) * (of_positives**2).sum() / num_positive**2
    negatives = with_negative / (with_negative - 1) * (of_negatives**2).sum() / num_negative**2
    mixed = groups / (groups - 1) * (of_positives * of_negatives).sum() / (num_positive * num_negative)
    return float(positives + negatives + 2 * mixed)


def _groups_with(label: Labels, group: Labels) -> tuple[int, int]:
    """Return how many groups have a positive, and how many a negative."""
    return len(np.unique(group[label == 1])), len(np.unique(group[label == 0]))


def _limits(label: Labels, score: Floats, group: Labels, fold: Labels, level: float) -> tuple[float, float, str]:
    value = _auc(label, score, fold)
    variance = _variance(label, _placements(label, score, fold), value, group, fold)
    z = normal_quantile(level)
    # Written so that NaN takes this branch too. A perfect ranking has no variance, so below the value is inside (0, 1).
    if not variance > 0:
        sizes = _sizes(label, group, fold)
        low, high = _newcombe_low(value, sizes, z), 1 - _newcombe_low(1 - value, sizes, z)
        return low, high, "Newcombe score (no variance for DeLong)"
    reach = z * np.sqrt(variance) / (value * (1 - value))
    grouped = len(np.unique(group)) < len(group)
    method = f"DeLong{_within(fold)}{' for groups' * grouped} on the logit scale"
    return float(expit(logit(value) - reach)), float(expit(logit(value) + reach)), method


def _within(fold: Labels) -> str:
    return " within folds" * bool(fold.max())


@dataclass(frozen=True)
class _Size:
    """A fold: its fraction of all pairs, and how many groups have a positive and a negative."""

    share: float
    num_positive: int
    num_negative: int


def _sizes(label: Labels, group: Labels, fold: Labels) -> list[_Size]:
    """Return the sizes of the folds that have pairs. If groups are in several folds, only that of the smallest fold, as
    if the others added nothing: how much they add is unknown."""
    pairs = pairs_of_folds(label, fold)
    used = [int(k) for k in np.flatnonzero(pairs)]
    sizes = [_Size(float(pairs[k] / pairs.sum()), *_groups_with(label[fold == k], group[fold == k])) for k in used]
    across = len(np.unique(np.stack([group, fold]), axis=1).T) > len(np.unique(group))
    if across:
        smallest = min(sizes, key=lambda size: size.num_positive * size.num_negative)
        return [_Size(1.0, smallest.num_positive, smallest.num_negative)]
    return sizes


def _newcombe_low(value: float, sizes: Sequence[_Size], z: float) -> float:
    """Return the lowest AUC that is no more than z standard errors, evaluated at that AUC, below `value`.

    The standard error is that of Hanley and McNeil (1982) with both class sizes replaced by their mean, as Newcombe
    (2006) proposes. It is symmetric under AUC -> 1 - AUC, so one function gives both limits.
    """
    if value == 0:
        return 0.0

    def squared_reach(guess: float, size: _Size) -> float:
        spare = (size.num_positive + size.num_negative) / 2 - 1
        spread = 1 + spare * (1 - guess) / (2 - guess) + spare * guess / (1 + guess)
        return z * z * guess * (1 - guess) * spread / (size.num_positive * size.num_negative)

    def excess(guess: float) -> float:
        return (value - guess) ** 2 - sum(size.share**2 * squared_reach(guess, size) for size in sizes)

    # slow to import, as in `classification`
    from scipy.optimize import brentq  # pyright: ignore[reportMissingTypeStubs, reportUnknownVariableType]

    # At value 1 the end itself is a spurious root: stay just below.
    return float(brentq(excess, 0.0, min(value, 1 - 1e-12)))  # pyright: ignore[reportArgumentType]


def _difference(
    label: Labels, a: Floats, b: Floats, group: Labels, fold: Labels, level: float
) -> tuple[Interval, float]:
    """Return AUC of a minus AUC of b with its interval and the two-sided p-value."""
    value_a, value_b = _auc(label, a, fold), _auc(label, b, fold)
    value = value_a - value_b
    z = normal_quantile(level)
    placement = _placements(label, a, fold) - _placements(label, b, fold)
    variance = _variance(label, placement, value, group, fold)
    if variance > 0:
        reach = z * np.sqrt(variance)
        low, high, method = max(-1.0, value - reach), min(1.0, value + reach), f"DeLong{_within(fold)}, paired"
        error = np.sqrt(variance)
    else:
        # No variance, but a few slides prove nothing: combine the single limits as a root of squares.
        low_a, high_a, _ = _limits(label, a, group, fold, level)
        low_b, high_b, _ = _limits(label, b, group, fold, level)
        down, up = np.hypot(value_a - low_a, high_b - value_b), np.hypot(high_a - value_a, value_b - low_b)
        low, high, method = max(-1.0, value - down), min(1.0, value + up), "limits of both added as squares"
        error = (down if value > 0 else up) / z
    p_value = float(2 * ndtr(-abs(value) / error)) if value else 1.0
    return Interval(value, float(low), float(high), method, level), p_value


def resampled_auc(label: Labels, score: Floats, fold: Labels | None = None) -> Callable[[Floats], Floats]:
    """Return a function from how often each sample was drawn, (R, N), to the AUCs of these resamples (NaN without
    pairs)."""
    fold = np.zeros(len(label), dtype=np.int64) if fold is None else fold
    order = np.lexsort((score, fold))
    folds = first_of_ties(fold[order])
    ties = np.union1d(folds, first_of_ties(score[order]))
    starts = np.searchsorted(ties, folds)
    fold_of_tie = np.searchsorted(folds, ties, "right") - 1
    positive = (label[order] == 1).astype(np.float64)

    def values(weights_RN: Floats) -> Floats:
        weights = weights_RN[:, order]
        positives = np.add.reduceat(weights * positive, ties, axis=1)
        negatives = np.add.reduceat(weights * (1 - positive), ties, axis=1)
        in_fold = np.add.reduceat(negatives, starts, axis=1)
        earlier_folds = (np.cumsum(in_fold, axis=1) - in_fold)[:, fold_of_tie]
        below = np.cumsum(negatives, axis=1) - negatives / 2 - earlier_folds
        pairs = (np.add.reduceat(positives, starts, axis=1) * in_fold).sum(axis=1)
        with np.errstate(invalid="ignore"):
            return (positives * below).sum(axis=1) / pairs

    return values


def resampled_macro_auc(label: Labels, scores_NC: Floats, fold: Labels | None = None) -> Callable[[Floats], Floats]:
    """The same for the mean over classes, each against the rest."""
    parts = [resampled_auc((label == k).astype(np.int64), scores_NC[:, k], fold) for k in range(scores_NC.shape[1])]
    return lambda weights_RN: np.mean([part(weights_RN) for part in parts], axis=0)


# ---------------------------------------------------------------------------------------------------- curves


@dataclass(frozen=True)
class RocCurve:
    """ROC curve from (0, 0), where the threshold is infinite, to (1, 1)."""

    false_positive_rate: Floats
    sensitivity: Floats
    thresholds: Floats


@dataclass(frozen=True)
class PrCurve:
    """Precision-recall curve by increasing recall, without a point at recall 0, where precision is undefined."""

    recall: Floats
    precision: Floats
    thresholds: Floats


@dataclass(frozen=True)
class CurveBands:
    """Pointwise bootstrap limits: sensitivity at false positive rate `grid`, precision at recall `grid`."""

    grid: Floats
    sensitivity_low: Floats
    sensitivity_high: Floats
    precision_low: Floats
    precision_high: Floats


def roc_curve(
    labels: ArrayLike, scores: ArrayLike, *, positive: str | float | None = None, folds: ArrayLike | None = None
) -> RocCurve:
    label, score = check_binary(labels, scores, positive)
    fold = check_folds(folds, label)
    if fold.max() > 0:
        return _mean_roc(label, score, fold)
    true, false, thresholds = _counts(label, score)
    return RocCurve(
        np.concatenate([[0.0], false / false[-1]]),
        np.concatenate([[0.0], true / true[-1]]),
        np.concatenate([[np.inf], thresholds]),
    )


def _mean_roc(label: Labels, score: Floats, fold: Labels) -> RocCurve:
    weights = pairs_of_folds(label, fold)
    curves = [roc_curve(label[fold == k], score[fold == k]) for k in np.flatnonzero(weights)]
    rates = np.unique(np.concatenate([curve.false_positive_rate for curve in curves]))
    # Where a curve rises vertically it has two values: the lowest and the highest.
    ends = np.average([_ends(curve, rates) for curve in curves], axis=0, weights=weights[weights > 0])
    return RocCurve(np.repeat(rates, 2), ends.ravel(), np.full(2 * len(rates), np.nan))


def _ends(curve: RocCurve, rates: Floats) -> Floats:
    """Return (G, 2): lowest and highest sensitivity at each rate; between two points both are on the connecting
    line."""
    x, y = curve.false_positive_rate, curve.sensitivity
    first, last = np.searchsorted(x, rates, "left"), np.searchsorted(x, rates, "right") - 1
    hit = last >= first
    between = np.interp(rates, x, y)
    return np.stack([np.where(hit, y[first], between), np.where(hit, y[last], between)], axis=1)


def pr_curve(
    labels: ArrayLike, scores: ArrayLike, *, positive: str | float | None = None, folds: ArrayLike | None = None
) -> PrCurve:
    label, score = check_binary(labels, scores, positive)
    fold = check_folds(folds, label)
    if fold.max() > 0:
        return _mean_pr(label, score, fold)
    true, false, thresholds = _counts(label, score)
    return PrCurve(true / true[-1], true / (true + false), thresholds)


def _mean_pr(label: Labels, score: Floats, fold: Labels) -> PrCurve:
    used = np.flatnonzero(pairs_of_folds(label, fold))
    curves = [pr_curve(label[fold == k], score[fold == k]) for k in used]
    recall = np.unique(np.concatenate([curve.recall for curve in curves]))
    recall = recall[recall > 0]
    precisions = [curve.precision[np.searchsorted(curve.recall, recall, "left")] for curve in curves]
    positives = np.bincount(fold, label == 1)[used]
    return PrCurve(recall, np.average(precisions, axis=0, weights=positives), np.full(len(recall), np.nan))


def average_precision(
    labels: ArrayLike, scores: ArrayLike, *, positive: str | float | None = None, folds: ArrayLike | None = None
) -> float:
    """Return the area under the precision-recall steps: each gain in recall times the precision reached there."""
    curve = pr_curve(labels, scores, positive=positive, folds=folds)
    return float((np.diff(curve.recall, prepend=0.0) * curve.precision).sum())


def curve_bands(
    labels: ArrayLike,
    scores: ArrayLike,
    *,
    positive: str | float | None = None,
    points: int = 101,
    level: float = 0.95,
    groups: ArrayLike | None = None,
    folds: ArrayLike | None = None,
    resamples: int = 1000,
    seed: int = 0,
) -> CurveBands:
    """Return bootstrap bands for both curves; at a grid point a curve has its best value that costs no more.

    The bands are pointwise: a whole curve leaves them somewhere more often than `1 - level`.
    """
    label, score = check_binary(labels, scores, positive)
    fold = check_folds(folds, label)
    group = check_groups(groups, len(label))
    grid = np.linspace(0.0, 1.0, points)
    orders = [_Order.of(label, score, fold == k) for k in range(int(fold.max()) + 1)]

    def values(weights_RN: Floats) -> Floats:
        counts = [order.counts(weights_RN) for order in orders]
        return np.stack([_mean_on_grid([fold[row] for fold in counts], grid) for row in range(len(weights_RN))])

    values_R2G = bootstrap(values, label, group, resamples, seed)
    (sensitivity_low, precision_low), (sensitivity_high, precision_high) = np.nanquantile(
        values_R2G, [(1 - level) / 2, (1 + level) / 2], axis=0
    )
    return CurveBands(grid, sensitivity_low, sensitivity_high, precision_low, precision_high)


@dataclass(frozen=True)
class _Order:
    """The samples of a fold by decreasing score."""

    place: NDArray[np.int64]
    ties: NDArray[np.int64]
    positive: Floats

    @classmethod
    def of(cls, label: Labels, score: Floats, member: NDArray[np.bool_]) -> _Order:
        place = np.flatnonzero(member)
        place = place[np.argsort(-score[place], kind="stable")]
        return cls(place, first_of_ties(score[place]), (label[place] == 1).astype(np.float64))

    def counts(self, weights_RN: Floats) -> Floats:
        """Return (R, 2, T): true and false positives at each distinct score of each resample."""
        weights = weights_RN[:, self.place]
        trues = np.cumsum(np.add.reduceat(weights * self.positive, self.ties, axis=1), axis=1)
        falses = np.cumsum(np.add.reduceat(weights * (1 - self.positive), self.ties, axis=1), axis=1)
        return np.stack([trues, falses], axis=1)


def _mean_on_grid(counts: Sequence[Floats], grid: Floats) -> Floats:
    """Return (2, G): the curves of the folds of one resample, averaged as `roc_curve` and `pr_curve` do."""
    both = [(true, false) for true, false in counts if true[-1] and false[-1]]
    if not both:
        return np.full((2, len(grid)), np.nan)
    curves = np.stack([_on_grid(true, false, grid) for true, false in both])
    if len(curves) == 1:
        return curves[0]
    pairs, positives = [true[-1] * false[-1] for true, false in both], [true[-1] for true, _ in both]
    return np.stack(
        [np.average(curves[:, 0], axis=0, weights=pairs), np.average(curves[:, 1], axis=0, weights=positives)]
    )


def _on_grid(true: Floats, false: Floats, grid: Floats) -> Floats:
    """Return (2, G): the best sensitivity at no more than this false positive rate, the precision at this recall or
    more."""
    sensitivity = np.concatenate([[0.0], true / true[-1]])
    allowed = np.searchsorted(false / false[-1], grid + 1e-12, "right")
    reached = np.searchsorted(true / true[-1], np.maximum(grid, 0.5 / true[-1]) - 1e-12, "left")
    return np.stack([sensitivity[allowed], true[reached] / (true[reached] + false[reached])])


def _counts(label: Labels, score: Floats) -> tuple[Floats, Floats, Floats]:
    """Return true and false positives at each distinct score as threshold, from the highest down."""
    order = np.argsort(-score, kind="stable")
    last_of_ties = np.append(first_of_ties(score[order])[1:], len(score)) - 1
    true = np.cumsum(label[order] == 1)[last_of_ties].astype(np.float64)
    false = np.cumsum(label[order] == 0)[last_of_ties].astype(np.float64)
    return true, false, score[order][last_of_ties]
