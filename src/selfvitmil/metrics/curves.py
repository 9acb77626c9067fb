"""ROC and precision-recall curves: their points, the average precision, bootstrap bands to draw around them.

A point stands for a rule "positive when score >= threshold", one for each distinct score, from strict to lax. Samples
with equal scores enter together, so a curve never depends on the order of the samples.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from selfvitmil.metrics.intervals import (
    Floats,
    Labels,
    bootstrap,
    check_binary,
    check_groups,
    first_of_ties,
)


@dataclass(frozen=True)
class RocCurve:
    """From (0, 0), where the threshold is infinite, to (1, 1)."""

    false_positive_rate: Floats
    sensitivity: Floats
    thresholds: Floats


@dataclass(frozen=True)
class PrCurve:
    """Recall rises; there is no point at recall 0, where precision is undefined. Draw it as steps."""

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


def roc_curve(labels: ArrayLike, scores: ArrayLike) -> RocCurve:
    true, false, thresholds = _counts(*check_binary(labels, scores))
    return RocCurve(
        np.concatenate([[0.0], false / false[-1]]),
        np.concatenate([[0.0], true / true[-1]]),
        np.concatenate([[np.inf], thresholds]),
    )


def pr_curve(labels: ArrayLike, scores: ArrayLike) -> PrCurve:
    true, false, thresholds = _counts(*check_binary(labels, scores))
    return PrCurve(true / true[-1], true / (true + false), thresholds)


def average_precision(labels: ArrayLike, scores: ArrayLike) -> float:
    """Area under the precision-recall steps: each gain in recall times the precision reached there."""
    curve = pr_curve(labels, scores)
    return float((np.diff(curve.recall, prepend=0.0) * curve.precision).sum())


def curve_bands(
    labels: ArrayLike,
    scores: ArrayLike,
    *,
    points: int = 101,
    level: float = 0.95,
    groups: ArrayLike | None = None,
    resamples: int = 1000,
    seed: int = 0,
) -> CurveBands:
    """Bands for both curves; at a grid point a curve has its best value that costs no more than that point.

    The bands are pointwise: a whole curve leaves them somewhere more often than `1 - level`.
    """
    label, score = check_binary(labels, scores)
    group = check_groups(groups, len(label))
    grid = np.linspace(0.0, 1.0, points)
    order = np.argsort(-score, kind="stable")
    ties = first_of_ties(score[order])
    positive = (label[order] == 1).astype(np.float64)

    def values(weights_RN: Floats) -> Floats:
        weights = weights_RN[:, order]
        trues = np.cumsum(np.add.reduceat(weights * positive, ties, axis=1), axis=1)
        falses = np.cumsum(np.add.reduceat(weights * (1 - positive), ties, axis=1), axis=1)
        return np.stack([_on_grid(true, false, grid) for true, false in zip(trues, falses, strict=True)])

    values_R2G = bootstrap(values, label, group, resamples, seed)
    (sensitivity_low, precision_low), (sensitivity_high, precision_high) = np.quantile(
        values_R2G, [(1 - level) / 2, (1 + level) / 2], axis=0
    )
    return CurveBands(grid, sensitivity_low, sensitivity_high, precision_low, precision_high)


def _on_grid(true: Floats, false: Floats, grid: Floats) -> Floats:
    """(2, G): the sensitivity that no more than this false positive rate buys, the precision at this recall or more."""
    sensitivity = np.concatenate([[0.0], true / true[-1]])
    allowed = np.searchsorted(false / false[-1], grid + 1e-12, "right")
    reached = np.searchsorted(true / true[-1], np.maximum(grid, 0.5 / true[-1]) - 1e-12, "left")
    return np.stack([sensitivity[allowed], true[reached] / (true[reached] + false[reached])])


def _counts(label: Labels, score: Floats) -> tuple[Floats, Floats, Floats]:
    """True and false positives at each distinct score taken as threshold, from the highest down."""
    order = np.argsort(-score, kind="stable")
    last_of_ties = np.append(first_of_ties(score[order])[1:], len(score)) - 1
    true = np.cumsum(label[order] == 1)[last_of_ties].astype(np.float64)
    false = np.cumsum(label[order] == 0)[last_of_ties].astype(np.float64)
    return true, false, score[order][last_of_ties]
