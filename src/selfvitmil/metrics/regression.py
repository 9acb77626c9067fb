"""Continuous outcomes: error, explained variance and correlation with intervals, agreement, calibration line.

`values` (N,) are measured and `predictions` (N,) predicted, both in the outcome's unit. Errors are prediction minus
value. Predictions of several folds are in the same unit, so they are evaluated together.

Intervals of MAE, RMSE and R2 are bootstrap percentiles over patients (`groups`), seeded. Correlations have Fisher's z
interval (1915) with the standard error 1 / sqrt(n - 3), for Spearman times sqrt(1 + rho^2 / 2) (Bonett & Wright 2000);
if patients have several samples, these are not independent and bootstrap percentiles over patients are used instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import stdtrit  # pyright: ignore[reportMissingTypeStubs]

from selfvitmil.errors import MetricError
from selfvitmil.metrics.classification import (
    Floats,
    Interval,
    Labels,
    bootstrap,
    check_groups,
    check_scores,
    first_of_ties,
    normal_quantile,
    percentile_interval,
)


@dataclass(frozen=True)
class RegressionMetrics:
    """All metrics of predicted values; `mae` and `rmse` are in the outcome's unit."""

    mae: Interval
    rmse: Interval
    r2: Interval
    pearson: Interval
    spearman: Interval


@dataclass(frozen=True)
class BlandAltman:
    """Mean error (bias), its standard deviation, and the limits between which 95 % of errors lie, in the outcome's
    unit. `means` and `differences` (N,) are the points of the plot."""

    bias: Interval
    sd: float
    lower: Interval
    upper: Interval
    means: Floats
    differences: Floats


@dataclass(frozen=True)
class CalibrationLine:
    """Least-squares line value = intercept + slope * prediction; a calibrated model has slope 1 and intercept 0."""

    slope: Interval
    intercept: Interval


def regression_metrics(
    values: ArrayLike,
    predictions: ArrayLike,
    *,
    groups: ArrayLike | None = None,
    level: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> RegressionMetrics:
    """Return MAE, RMSE, R2 and both correlations with intervals; `groups` (patients) are kept together.

    Correlations and R2 are undefined if all values are equal, correlations also if all predictions are: NaN.
    """
    how: dict[str, Any] = {"groups": groups, "level": level, "resamples": resamples, "seed": seed}
    return RegressionMetrics(
        *(_interval(values, predictions, statistic, **how) for statistic in (_mae, _rmse, _r2)),
        *(_correlation(values, predictions, ranks, **how) for ranks in (False, True)),
    )


def mae(values: ArrayLike, predictions: ArrayLike, **how: Any) -> Interval:
    """Return the mean absolute error; options as in `regression_metrics`."""
    return _interval(values, predictions, _mae, **how)


def rmse(values: ArrayLike, predictions: ArrayLike, **how: Any) -> Interval:
    """Return the root of the mean squared error; options as in `regression_metrics`."""
    return _interval(values, predictions, _rmse, **how)


def r2(values: ArrayLike, predictions: ArrayLike, **how: Any) -> Interval:
    """Return 1 - squared error / squared deviation from the mean value; it may be negative."""
    return _interval(values, predictions, _r2, **how)


def pearson(values: ArrayLike, predictions: ArrayLike, **how: Any) -> Interval:
    """Return the linear correlation; options as in `regression_metrics`."""
    return _correlation(values, predictions, False, **how)


def spearman(values: ArrayLike, predictions: ArrayLike, **how: Any) -> Interval:
    """Return the correlation of midranks; options as in `regression_metrics`."""
    return _correlation(values, predictions, True, **how)


def bland_altman(values: ArrayLike, predictions: ArrayLike, *, level: float = 0.95) -> BlandAltman:
    """Return bias and 95 % limits of agreement (Bland & Altman 1986), with intervals from Student's t and the variance
    s^2 (1 / n + 1.96^2 / (2 (n - 1))) of the limits (Bland & Altman 1999). Samples are taken as independent: pass one
    per patient."""
    value, predicted = _check(values, predictions, 3)
    difference, count = predicted - value, len(value)
    bias, sd = float(difference.mean()), float(difference.std(ddof=1))
    t = _student(count - 1, level)
    z = normal_quantile(0.95)
    wide = t * sd * np.sqrt(1 / count + z * z / (2 * (count - 1)))

    def around(centre: float, reach: float) -> Interval:
        return Interval(centre, float(centre - reach), float(centre + reach), "Student's t", level)

    return BlandAltman(
        around(bias, t * sd / np.sqrt(count)),
        sd,
        around(bias - z * sd, wide),
        around(bias + z * sd, wide),
        (predicted + value) / 2,
        difference,
    )


def calibration_line(values: ArrayLike, predictions: ArrayLike, *, level: float = 0.95) -> CalibrationLine:
    """Return the calibration slope and intercept (Cox 1958) with Student's t intervals; a slope below 1 means that
    predictions are too extreme."""
    value, predicted = _check(values, predictions, 3)
    centred = predicted - predicted.mean()
    spread = float((centred**2).sum())
    if spread == 0:
        raise MetricError(
            f"all {len(value)} predictions are {predicted[0]:.4g}",
            "a line needs different ones",
            "Report the mean absolute error",
            code="constant-predictions",
        )
    slope = float(centred @ value) / spread
    intercept = float(value.mean() - slope * predicted.mean())
    noise = float(((value - intercept - slope * predicted) ** 2).sum()) / (len(value) - 2)
    t = _student(len(value) - 2, level)
    reach = t * np.sqrt(noise / spread)
    wide = t * np.sqrt(noise * (1 / len(value) + predicted.mean() ** 2 / spread))
    return CalibrationLine(
        Interval(slope, float(slope - reach), float(slope + reach), "Student's t", level),
        Interval(intercept, float(intercept - wide), float(intercept + wide), "Student's t", level),
    )


def _student(degrees: int, level: float) -> float:
    normal_quantile(level)  # refuses levels outside 0 to 1
    return float(stdtrit(degrees, 0.5 + level / 2))


def _check(values: ArrayLike, predictions: ArrayLike, least: int = 1) -> tuple[Floats, Floats]:
    given = np.asarray(values, dtype=np.float64)
    if given.ndim != 1 or len(given) < least:
        raise MetricError(
            f"values of shape {given.shape}",
            f"one per sample is needed, and at least {least}",
            "Pass a list of values",
            code="too-few-values",
        )
    return check_scores(given, len(given)), check_scores(predictions, len(given))


Statistic = Callable[[Floats, Floats, Floats], Floats]
"""From values (N,), predictions (N,) and how often each was drawn (R, N) to (R,)."""


def _interval(
    values: ArrayLike,
    predictions: ArrayLike,
    statistic: Statistic,
    *,
    groups: ArrayLike | None = None,
    level: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> Interval:
    value, predicted = _check(values, predictions)
    group = check_groups(groups, len(value))
    estimate = float(statistic(value, predicted, np.ones((1, len(value))))[0])
    none = np.zeros(len(value), dtype=np.int64)
    values_R = bootstrap(lambda drawn_RN: statistic(value, predicted, drawn_RN), none, group, resamples, seed)
    if np.isnan(estimate) or not np.isfinite(values_R).any():
        return Interval(np.nan, -np.inf, np.inf, "undefined", level)
    return percentile_interval(estimate, values_R, level)


def _correlation(
    values: ArrayLike,
    predictions: ArrayLike,
    ranks: bool,
    *,
    groups: ArrayLike | None = None,
    level: float = 0.95,
    **how: Any,
) -> Interval:
    value, predicted = _check(values, predictions)
    group: Labels = check_groups(groups, len(value))
    statistic = _spearman if ranks else _pearson
    estimate = float(statistic(value, predicted, np.ones((1, len(value))))[0])
    if np.isnan(estimate):
        return Interval(np.nan, -1.0, 1.0, "undefined", level)
    if len(np.unique(group)) < len(group):
        return _interval(value, predicted, statistic, groups=group, level=level, **how)
    z = normal_quantile(level)
    if len(value) <= 3:
        return Interval(estimate, -1.0, 1.0, "Fisher z", level)
    if abs(estimate) > 1 - 1e-12:
        # Points on an exact line leave no variance; limits without width would claim certainty.
        return Interval(estimate, -1.0, 1.0, "undefined (no variance)", level)
    reach = z * np.sqrt((1 + estimate**2 / 2 if ranks else 1.0) / (len(value) - 3))
    centre = np.arctanh(estimate)
    return Interval(estimate, float(np.tanh(centre - reach)), float(np.tanh(centre + reach)), "Fisher z", level)


def _mae(value: Floats, predicted: Floats, drawn_RN: Floats) -> Floats:
    return drawn_RN @ np.abs(predicted - value) / drawn_RN.sum(axis=1)


def _rmse(value: Floats, predicted: Floats, drawn_RN: Floats) -> Floats:
    return np.sqrt(drawn_RN @ (predicted - value) ** 2 / drawn_RN.sum(axis=1))


def _r2(value: Floats, predicted: Floats, drawn_RN: Floats) -> Floats:
    mean = drawn_RN @ value / drawn_RN.sum(axis=1)
    spread = (drawn_RN * (value - mean[:, None]) ** 2).sum(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(spread > 0, 1 - drawn_RN @ (predicted - value) ** 2 / spread, np.nan)


def _pearson(value: Floats, predicted: Floats, drawn_RN: Floats) -> Floats:
    return _weighted_correlation(np.broadcast_to(value, drawn_RN.shape), predicted, drawn_RN)


def _spearman(value: Floats, predicted: Floats, drawn_RN: Floats) -> Floats:
    return _weighted_correlation(_midranks(value, drawn_RN), _midranks(predicted, drawn_RN), drawn_RN)


def _weighted_correlation(a_RN: Floats, b_RN: Floats, drawn_RN: Floats) -> Floats:
    total = drawn_RN.sum(axis=1, keepdims=True)
    a = a_RN - (drawn_RN * a_RN).sum(axis=1, keepdims=True) / total
    b = b_RN - (drawn_RN * b_RN).sum(axis=1, keepdims=True) / total
    spread = np.sqrt((drawn_RN * a * a).sum(axis=1) * (drawn_RN * b * b).sum(axis=1))
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(spread > 0, (drawn_RN * a * b).sum(axis=1) / spread, np.nan)


def _midranks(values: Floats, drawn_RN: Floats) -> Floats:
    """Return the rank of each value in each resample, the mean rank among equal values."""
    order = np.argsort(values, kind="stable")
    starts = first_of_ties(values[order])
    ties = np.add.reduceat(drawn_RN[:, order], starts, axis=1)
    rank = np.cumsum(ties, axis=1) - ties / 2
    ranks_RN = np.empty_like(drawn_RN)
    ranks_RN[:, order] = np.repeat(rank, np.diff(np.append(starts, len(values))), axis=1)
    return ranks_RN
