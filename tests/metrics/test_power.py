"""Expected intervals agree with those that are measured on simulated patients."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy.special import ndtri

from selfvitmil.errors import MetricError
from selfvitmil.metrics import auc, auc_interval, wilson
from selfvitmil.metrics.power import (
    TestSet,
    auc_variance,
    expected_auc_interval,
    expected_share_interval,
    patients_for_auc,
    patients_for_share,
)


def drawn(true: float, positive: int, negative: int, rng: np.random.Generator):
    """Labels and binormal scores with this true AUC."""
    labels = np.repeat([1, 0], [positive, negative])
    return labels, rng.normal(size=len(labels)) + np.sqrt(2) * ndtri(true) * labels


@pytest.mark.parametrize(("true", "positive", "negative"), [(0.6, 10, 30), (0.8, 20, 20), (0.95, 60, 25)])
def test_variance_is_that_of_simulated_auc(true: float, positive: int, negative: int):
    rng = np.random.default_rng(0)
    values = [auc(*drawn(true, positive, negative, rng)) for _ in range(3000)]
    assert np.mean(values) == pytest.approx(true, abs=0.006)
    assert np.var(values) == pytest.approx(auc_variance(true, [TestSet(positive, negative)]), rel=0.09)  # 3.4 errors


@pytest.mark.parametrize(("true", "positive", "negative"), [(0.7, 40, 40), (0.8, 30, 60), (0.9, 80, 40)])
def test_expected_interval_is_that_of_delong(true: float, positive: int, negative: int):
    rng = np.random.default_rng(1)
    found = [auc_interval(*drawn(true, positive, negative, rng), resamples=100) for _ in range(200)]
    expected = expected_auc_interval(true, [TestSet(positive, negative)])
    assert np.median([each.high - each.low for each in found]) == pytest.approx(expected.high - expected.low, rel=0.06)
    assert np.median([each.low for each in found]) == pytest.approx(expected.low, abs=0.02)


def test_folds_are_wider_than_one_test_set_of_all_patients():
    whole, folds = [TestSet(20, 40)], [TestSet(4, 8)] * 5
    assert auc_variance(0.8, folds) > auc_variance(0.8, whole)
    assert auc_variance(0.8, folds) == pytest.approx(auc_variance(0.8, folds[:1]) / 5)
    rng = np.random.default_rng(2)
    values = [np.mean([auc(*drawn(0.8, 4, 8, rng)) for _ in range(5)]) for _ in range(1500)]
    assert np.var(values) == pytest.approx(auc_variance(0.8, folds), rel=0.13)


def test_shares_are_the_mean_over_all_outcomes():
    found = expected_share_interval(0.9, 5)
    low = high = 0.0
    for outcome in itertools.product([0, 1], repeat=5):
        hits = sum(outcome)
        chance = 0.9**hits * 0.1 ** (5 - hits)
        low, high = low + chance * wilson(hits, 5).low, high + chance * wilson(hits, 5).high
    assert (found.low, found.high) == pytest.approx((low, high), abs=1e-12)


def test_needed_patients_are_the_fewest_that_do():
    for true, prevalence in ((0.7, 0.5), (0.9, 0.2)):
        positive, negative = patients_for_auc(true, 0.15, prevalence)
        assert positive / (positive + negative) == pytest.approx(prevalence, abs=0.01)
        expected = expected_auc_interval(true, [TestSet(positive, negative)])
        assert 0.14 < expected.high - expected.low <= 0.15
    number = patients_for_share(0.9, 0.1)
    widths = [one.high - one.low for one in (expected_share_interval(0.9, number - k) for k in (0, 1))]
    assert widths[0] <= 0.1 < widths[1]


def test_what_cannot_be_asked():
    with pytest.raises(MetricError):
        TestSet(0, 5)
    for value in (0.0, 1.0, 1.5):
        with pytest.raises(MetricError):
            expected_auc_interval(value, [TestSet(5, 5)])
    with pytest.raises(MetricError):
        patients_for_auc(0.8, 0.0, 0.5)
