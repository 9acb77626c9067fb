"""ROC and precision-recall curves, average precision, and bootstrap bands.

A point is the rule "positive if score >= threshold", one for each distinct score, from high to low. Samples with
equal scores enter together, so a curve does not depend on the order of the samples.

With `folds` (which model scored a sample) samples are ranked within folds, and the curve is the vertical mean of the
folds' curves: of their sensitivities at every false positive rate, weighted by the folds' pairs, so that its area is
`auc` within folds; of their precisions at every recall, weighted by the folds' positives, so that the area is the mean
precision over all positives. Such a curve has no thresholds (NaN). Folds with one class are skipped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from selfvitmil.metrics.intervals import (
    Floats,
    Labels,
    bootstrap,
    check_binary,
    check_folds,
    check_groups,
    first_of_ties,
    pairs_of_folds,
)


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


def roc_curve(labels: ArrayLike, scores: ArrayLike, *, folds: ArrayLike | None = None) -> RocCurve:
    label, score = check_binary(labels, scores)
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


def pr_curve(labels: ArrayLike, scores: ArrayLike, *, folds: ArrayLike | None = None) -> PrCurve:
    label, score = check_binary(labels, scores)
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


def average_precision(labels: ArrayLike, scores: ArrayLike, *, folds: ArrayLike | None = None) -> float:
    """Return the area under the precision-recall steps: each gain in recall times the precision reached there."""
    curve = pr_curve(labels, scores, folds=folds)
    return float((np.diff(curve.recall, prepend=0.0) * curve.precision).sum())


def curve_bands(
    labels: ArrayLike,
    scores: ArrayLike,
    *,
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
    label, score = check_binary(labels, scores)
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
