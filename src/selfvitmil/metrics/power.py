"""How wide confidence intervals will be with a given number of patients, before anything is measured.

AUC: scores of both classes are taken as normal with equal variance (binormal model). Then the variance of the
Mann-Whitney statistic is exact (`auc_variance`), and the expected interval is that of `ranking.auc_interval`: on the
logit scale. Sensitivity and specificity: the mean Wilson interval over all outcomes of a binomial experiment.

Patients count as independent; so several slides of one patient are one observation here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import expit, logit, ndtri, owens_t  # pyright: ignore[reportMissingTypeStubs]
from scipy.stats import binom  # pyright: ignore[reportMissingTypeStubs]

from selfvitmil.errors import MetricError
from selfvitmil.metrics.classification import Interval, normal_quantile

MOST = 10_000_000
"""Largest number of patients that is tried."""


@dataclass(frozen=True)
class TestSet:
    """Patients per class of one test set; of k folds there are k of these."""

    __test__ = False  # not a test case

    num_positive: int
    num_negative: int

    def __post_init__(self) -> None:
        if min(self.num_positive, self.num_negative) < 1:
            raise MetricError(
                f"a test set of {self.num_positive} positive and {self.num_negative} negative patients",
                "an AUC compares patients of both classes",
                "Add patients of the missing class",
                code="one-class",
            )

    def times(self, factor: float) -> TestSet:
        """Return a set with so many times the patients, at the same prevalence; at least one of each class."""
        return TestSet(max(1, round(factor * self.num_positive)), max(1, round(factor * self.num_negative)))


def auc_variance(auc: float, sets: Sequence[TestSet]) -> float:
    """Return the variance of an AUC whose true value is `auc`; with several sets, of their mean weighted by pairs.

    Two positives exceed the same negative with probability Q = Phi2(a, a; 1/2), a = Phi^-1(AUC), and by symmetry one
    positive exceeds two negatives with the same; Q by Owen's T. Raises MetricError unless 0 < auc < 1.
    """
    _check_share("AUC", auc)
    both = auc - 2 * float(owens_t(ndtri(auc), 1 / np.sqrt(3)))
    pairs = np.array([each.num_positive * each.num_negative for each in sets], dtype=np.float64)
    sizes = np.array([each.num_positive + each.num_negative for each in sets], dtype=np.float64)
    variances = (auc * (1 - auc) + (sizes - 2) * (both - auc**2)) / pairs
    return float(((pairs / pairs.sum()) ** 2 * variances).sum())


def expected_auc_interval(auc: float, sets: Sequence[TestSet], level: float = 0.95) -> Interval:
    """Return the interval to expect if the true AUC is `auc`."""
    reach = normal_quantile(level) * np.sqrt(auc_variance(auc, sets)) / (auc * (1 - auc))
    low, high = expit(logit(auc) - reach), expit(logit(auc) + reach)
    return Interval(auc, float(low), float(high), "expected, binormal scores", level)


def expected_share_interval(share: float, num: int, level: float = 0.95) -> Interval:
    """Return the mean Wilson limits of a proportion of `num` patients whose true value is `share`."""
    _check_share("share", share)
    if num < 1:
        raise MetricError(f"{num} patients", "a share needs at least one", "Add patients", code="invalid-counts")
    z, successes = normal_quantile(level), np.arange(num + 1)
    seen, scale = successes / num, 1 + z * z / num
    centre = (seen + z * z / (2 * num)) / scale
    reach = z * np.sqrt(seen * (1 - seen) / num + (z / (2 * num)) ** 2) / scale
    distribution: Any = binom
    chance = distribution.pmf(successes, num, share)
    return Interval(
        share, float(chance @ (centre - reach)), float(chance @ (centre + reach)), "expected, Wilson", level
    )


def patients_for_auc(auc: float, width: float, prevalence: float, level: float = 0.95) -> tuple[int, int]:
    """Return the fewest positive and negative patients of one test set whose AUC interval is at most `width` wide."""
    _check_share("width", width)
    _check_share("prevalence", prevalence)

    def sizes(total: int) -> TestSet:
        positive = min(max(1, round(total * prevalence)), total - 1)
        return TestSet(positive, total - positive)

    total = _fewest(lambda num: _width(expected_auc_interval(auc, [sizes(num)], level)), width, 2)
    return sizes(total).num_positive, sizes(total).num_negative


def patients_for_share(share: float, width: float, level: float = 0.95) -> int:
    """Return the fewest patients whose interval of a sensitivity or specificity is at most `width` wide."""
    _check_share("width", width)
    return _fewest(lambda num: _width(expected_share_interval(share, num, level)), width, 1)


def _width(interval: Interval) -> float:
    return interval.high - interval.low


def _fewest(width_of: Callable[[int], float], width: float, least: int) -> int:
    """Return the smallest number with at most this width, by doubling and bisection: widths fall with the number."""
    high = least
    while width_of(high) > width:
        high *= 2
        if high > MOST:
            raise MetricError(
                f"width {width}", f"more than {MOST:,} patients are needed", "Ask for a wider one", code="invalid-width"
            )
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if middle >= least and width_of(middle) <= width else (middle, high)
    return high


def _check_share(name: str, value: float) -> None:
    if not 0 < value < 1:
        raise MetricError(
            f"{name} {value}", "it must be between 0 and 1", f"Pass a {name} inside that range", code="invalid-share"
        )
