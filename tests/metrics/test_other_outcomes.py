"""Regression, ordinal and decision metrics against scipy, scikit-learn and slow loops of the formulas."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy import stats

from selfvitmil import metrics
from selfvitmil.errors import MetricError


def code_of(call, *args, **kwargs) -> str:
    with pytest.raises(MetricError) as caught:
        call(*args, **kwargs)
    return caught.value.code


def study(seed: int, size: int = 40):
    rng = np.random.default_rng(seed)
    values = np.round(rng.normal(5, 2, size), 1)
    return values, np.round(1 + 0.7 * values + rng.normal(size=size), 1)


# ---------------------------------------------------------------------------------------------------- regression


@pytest.mark.parametrize("seed", range(20))
def test_regression_metrics_agree_with_sklearn_and_scipy(seed: int):
    from sklearn.metrics import mean_absolute_error, mean_squared_error, r2_score

    values, predictions = study(seed)
    found = metrics.regression_metrics(values, predictions, resamples=200)
    assert found.mae.value == pytest.approx(mean_absolute_error(values, predictions), abs=1e-12)
    assert found.rmse.value == pytest.approx(np.sqrt(mean_squared_error(values, predictions)), abs=1e-12)
    assert found.r2.value == pytest.approx(r2_score(values, predictions), abs=1e-12)
    linear: Any = stats.pearsonr(values, predictions)
    assert found.pearson.value == pytest.approx(linear.statistic, abs=1e-12)
    limits = linear.confidence_interval(0.95)
    assert (found.pearson.low, found.pearson.high) == pytest.approx((limits.low, limits.high), abs=1e-10)
    ranked: Any = stats.spearmanr(values, predictions)
    rho = ranked.statistic
    assert found.spearman.value == pytest.approx(rho, abs=1e-12)
    reach = stats.norm.ppf(0.975) * np.sqrt((1 + rho**2 / 2) / 37)
    assert found.spearman.high == pytest.approx(np.tanh(np.arctanh(rho) + reach), abs=1e-12)
    for interval in vars(found).values():
        assert interval.low < interval.value < interval.high


@pytest.mark.parametrize("name", ["mae", "rmse", "r2", "pearson", "spearman"])
def test_resamples_equal_the_metric_of_repeated_samples(name: str):
    """A sample drawn k times counts as k samples, also in ranks."""
    from selfvitmil.metrics import regression

    values, predictions = study(3, 15)
    drawn = np.random.default_rng(0).integers(0, 4, (6, 15)).astype(float)
    found = getattr(regression, f"_{name}")(values, predictions, drawn)
    for row, value in zip(drawn.astype(int), found, strict=True):
        repeated = np.repeat(values, row), np.repeat(predictions, row)
        assert value == pytest.approx(getattr(metrics, name)(*repeated, resamples=100).value, abs=1e-10)


def test_several_samples_of_a_patient_widen_the_intervals():
    values, predictions = study(1, 30)
    patients = np.arange(30)
    once = metrics.regression_metrics(values, predictions, groups=patients)
    doubled = [np.repeat(each, 4) for each in (values, predictions, patients)]
    grouped = metrics.regression_metrics(doubled[0], doubled[1], groups=doubled[2])
    assert grouped.mae.value == pytest.approx(once.mae.value)
    assert (grouped.mae.low, grouped.mae.high) == pytest.approx((once.mae.low, once.mae.high))
    assert "bootstrap" in grouped.pearson.method
    naive = metrics.pearson(doubled[0], doubled[1])
    assert grouped.pearson.high - grouped.pearson.low > 1.5 * (naive.high - naive.low)


def test_constant_values_and_predictions():
    constant = metrics.regression_metrics([1.0, 1.0, 1.0, 1.0], [1.0, 2.0, 3.0, 4.0])
    assert np.isnan([constant.r2.value, constant.pearson.value, constant.spearman.value]).all()
    assert (constant.pearson.low, constant.pearson.high) == (-1.0, 1.0)
    assert constant.mae.value == 1.5
    exact = metrics.pearson([1.0, 2.0, 3.0, 4.0], [2.0, 4.0, 6.0, 8.0])
    assert (exact.value, exact.low) == (pytest.approx(1.0), -1.0)
    assert code_of(metrics.calibration_line, [1.0, 2.0, 3.0], [1.0, 1.0, 1.0]) == "constant-predictions"
    assert code_of(metrics.mae, [], []) == "too-few-values"
    assert code_of(metrics.mae, [1.0], [np.nan]) == "non-finite-scores"
    assert code_of(metrics.bland_altman, [1.0, 2.0], [1.0, 2.0]) == "too-few-values"


def test_bland_altman_and_calibration_line_follow_the_formulas():
    values, predictions = study(4)
    found = metrics.bland_altman(values, predictions)
    errors = predictions - values
    t, sd = stats.t.ppf(0.975, 39), errors.std(ddof=1)
    expected = stats.ttest_1samp(errors, 0).confidence_interval(0.95)
    assert (found.bias.low, found.bias.high) == pytest.approx((expected.low, expected.high))
    assert found.upper.value == pytest.approx(errors.mean() + stats.norm.ppf(0.975) * sd)
    assert found.upper.high - found.upper.value == pytest.approx(t * sd * np.sqrt(1 / 40 + 1.959964**2 / 78), rel=1e-6)
    assert found.lower.value + found.upper.value == pytest.approx(2 * found.bias.value)
    line = metrics.calibration_line(values, predictions)
    fitted: Any = stats.linregress(predictions, values)
    reach = stats.t.ppf(0.975, 38)
    assert line.slope.value == pytest.approx(fitted.slope)
    assert line.slope.high == pytest.approx(fitted.slope + reach * fitted.stderr)
    assert line.intercept.low == pytest.approx(fitted.intercept - reach * fitted.intercept_stderr)


# ---------------------------------------------------------------------------------------------------- ordinal


@pytest.mark.parametrize("seed", range(20))
def test_quadratic_kappa_agrees_with_sklearn_and_its_error_with_derivatives(seed: int):
    from sklearn.metrics import cohen_kappa_score

    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 4, 30)
    called = np.clip(labels + rng.integers(-1, 2, 30), 0, 3)
    patients = rng.integers(0, 18, 30)
    found = metrics.quadratic_weighted_kappa(labels, called, 4, groups=patients)
    names = range(4)
    assert found.value == pytest.approx(cohen_kappa_score(labels, called, weights="quadratic", labels=names), abs=1e-12)

    def kappa(weight: np.ndarray) -> float:
        return float(cohen_kappa_score(labels, called, weights="quadratic", labels=names, sample_weight=weight))

    slopes = []
    for one in np.unique(patients):
        step = 1e-4 * (patients == one)
        slopes.append((kappa(1 + step) - kappa(1 - step)) / 2e-4)
    error = np.sqrt(np.square(slopes).sum() * len(slopes) / (len(slopes) - 1))
    reach = stats.norm.ppf(0.975) * error / (1 - found.value**2)
    assert found.low == pytest.approx(np.tanh(np.arctanh(found.value) - reach), abs=1e-6)


def test_perfect_kappa_is_not_certain():
    labels = np.arange(12) % 3
    found = metrics.ordinal_agreement(labels, labels, 3)
    assert (found.kappa.value, found.kappa.high, found.mean_distance) == (1.0, 1.0, 0.0)
    assert 0.5 < found.kappa.low < 0.9
    shifted = metrics.ordinal_agreement([0, 1, 2, 0], [1, 1, 0, 0], 3)
    assert (shifted.exact.value, shifted.within_one.value, shifted.mean_distance) == (0.5, 0.75, 0.75)
    assert code_of(metrics.quadratic_weighted_kappa, [1, 1], [1, 1], 3) == "one-class"


# ---------------------------------------------------------------------------------------------------- decisions


def test_decision_curve_follows_the_formula():
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, 60)
    chances = np.round(np.clip(0.3 + 0.3 * labels + rng.normal(0, 0.2, 60), 0, 1), 2)
    found = metrics.decision_curve(labels, chances, [0.1, 0.4, 0.5, 0.9], resamples=300)
    for k, cut in enumerate(found.thresholds):
        hits = sum(1 for label, chance in zip(labels, chances, strict=True) if label and chance >= cut)
        alarms = sum(1 for label, chance in zip(labels, chances, strict=True) if not label and chance >= cut)
        assert found.model[k] == pytest.approx(hits / 60 - alarms / 60 * cut / (1 - cut))
        share = labels.mean()
        assert found.treat_all[k] == pytest.approx(share - (1 - share) * cut / (1 - cut))
        assert found.low[k] <= found.model[k] <= found.high[k]
    assert code_of(metrics.decision_curve, labels, chances, [0.0]) == "invalid-thresholds"


@pytest.mark.parametrize(("method", "alpha"), [("lac", 0.2), ("lac", 0.05), ("aps", 0.5), ("aps", 0.6)])
def test_conformal_sets_cover_exactly_as_often_as_promised(method, alpha: float):
    """Of n + 1 exchangeable samples, each left out once, exactly ceil((n + 1)(1 - alpha)) are covered without ties."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 3, 41)
    chances = rng.dirichlet([1, 1, 1], 41)
    hits = 0
    for left_out in range(41):
        rest = np.arange(41) != left_out
        threshold = metrics.conformal_threshold(labels[rest], chances[rest], alpha, method)
        assert threshold.quantile < 1
        hits += metrics.prediction_sets(chances[left_out : left_out + 1], threshold)[0, labels[left_out]]
    assert hits == np.ceil(41 * (1 - alpha))


def test_least_likely_classes_tie_in_adaptive_sets():
    """The summed probability of all classes is 1 for everyone, whatever the rounding."""
    chances = np.random.default_rng(1).dirichlet([1, 1, 1], 30)
    threshold = metrics.conformal_threshold(chances.argmin(axis=1), chances, 0.2, "aps")
    assert threshold.quantile == 1.0
    assert metrics.prediction_sets(chances, threshold).all()
    assert code_of(metrics.conformal_threshold, [0, 1], [[0.5, 0.9], [0.5, 0.9]]) == "not-a-distribution"


def test_conformal_sets_of_small_calibration_sets_and_coverage():
    few = metrics.conformal_threshold([0, 1, 1], [0.1, 0.8, 0.7], 0.1)
    assert few.quantile == np.inf
    sets = metrics.prediction_sets([0.2, 0.9], few)
    assert sets.all()
    found = metrics.set_coverage([0, 0, 1], [[True, False], [False, False], [True, True]])
    assert found.coverage == metrics.wilson(2, 3)
    assert found.per_class == (metrics.wilson(1, 2), metrics.wilson(1, 1))
    assert (found.mean_size, found.empty, found.single) == (1.0, 1 / 3, 1 / 3)
    assert code_of(metrics.conformal_threshold, [0, 1], [0.1, 0.9], 1.0) == "invalid-level"
