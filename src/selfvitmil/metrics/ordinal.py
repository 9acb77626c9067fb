"""Ordered classes (grades): quadratic weighted kappa with its interval, and how far decisions are off."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from selfvitmil.errors import MetricError
from selfvitmil.metrics.classification import (
    Interval,
    check_groups,
    confusion_matrix,
    normal_quantile,
    wilson,
)


@dataclass(frozen=True)
class OrdinalAgreement:
    """Quadratic weighted kappa, the fractions that are exact and at most one class off, and the mean distance."""

    kappa: Interval
    exact: Interval
    within_one: Interval
    mean_distance: float


def ordinal_agreement(
    labels: ArrayLike, called: ArrayLike, num_classes: int, *, groups: ArrayLike | None = None, level: float = 0.95
) -> OrdinalAgreement:
    """Return the agreement of predicted with true classes (N,), integers from 0 in their order."""
    confusion = confusion_matrix(labels, called, num_classes)
    distance = np.abs(np.subtract.outer(np.arange(num_classes), np.arange(num_classes)))
    total = int(confusion.sum())
    return OrdinalAgreement(
        quadratic_weighted_kappa(labels, called, num_classes, groups=groups, level=level),
        wilson(int(np.trace(confusion)), total, level),
        wilson(int(confusion[distance <= 1].sum()), total, level),
        float((confusion * distance).sum() / total),
    )


def quadratic_weighted_kappa(
    labels: ArrayLike, called: ArrayLike, num_classes: int, *, groups: ArrayLike | None = None, level: float = 0.95
) -> Interval:
    """Return Cohen's kappa with quadratic weights (Cohen 1968): 1 - squared distance / that of independent classes.

    The standard error is the delta method's (Fleiss, Cohen & Everitt 1969), summed over `groups` (patients), on
    Fisher's z scale, as for Lin's concordance correlation (1989), which it equals. If all decisions are right there
    is no variance: the lower limit then assumes Wilson's upper limit of wrong ones, each one class off.
    """
    confusion = confusion_matrix(labels, called, num_classes)
    true, given = np.asarray(labels, dtype=np.float64), np.asarray(called, dtype=np.float64)
    group, count = check_groups(groups, len(true)), len(true)
    observed = (true - given) ** 2
    # Of each sample's label with all decisions, and of its decision with all labels.
    with_calls = (true - given.mean()) ** 2 + given.var()
    with_labels = (given - true.mean()) ** 2 + true.var()
    expected = float(with_calls.mean())
    if expected == 0:
        raise MetricError(
            f"all {count} labels and decisions are class {int(true[0])}",
            "kappa is undefined without differences",
            "Use samples of several classes",
            code="one-class",
        )
    ratio = float(observed.mean()) / expected
    value, z = 1 - ratio, normal_quantile(level)
    influence = -((observed - observed.mean()) - ratio * (with_calls + with_labels - 2 * expected)) / (expected * count)
    of_group = np.bincount(group, influence)
    size = len(of_group)
    if ratio == 0:
        exact = wilson(int(np.trace(confusion)), count, level)
        return Interval(value, max(-1.0, 1 - (1 - exact.low) / expected), 1.0, "Wilson limit of wrong decisions", level)
    if size < 2 or abs(value) >= 1:
        return Interval(value, -1.0, 1.0, "undefined", level)
    error = np.sqrt((of_group**2).sum() * size / (size - 1))
    reach = z * error / (1 - value**2)
    low, high = np.tanh(np.arctanh(value) - reach), np.tanh(np.arctanh(value) + reach)
    return Interval(value, float(low), float(high), "delta method on Fisher's z scale", level)
