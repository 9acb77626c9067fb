"""Ranking, decisions, calibration: against pair loops, formulas written out, planted truths and published numbers."""

from __future__ import annotations

import csv
import itertools
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from scipy.special import expit, softmax
from scipy.stats import norm
from sklearn.metrics import average_precision_score, roc_auc_score
from sklearn.metrics import roc_curve as sklearn_roc

from selfvitmil import metrics
from selfvitmil.errors import MetricError
from selfvitmil.metrics import Interval
from selfvitmil.metrics.classification import bootstrap
from selfvitmil.metrics.ranking import resampled_auc

quick = settings(max_examples=60, deadline=None, derandomize=True)
Z = norm.ppf(0.975)


@st.composite
def ranked(draw: st.DrawFn, max_size: int = 14):
    """Labels of both classes with scores on a coarse grid, so that ties are frequent."""
    labels = draw(st.lists(st.integers(0, 1), min_size=2, max_size=max_size))
    assume(len(set(labels)) == 2)
    scores = draw(st.lists(st.integers(-4, 4), min_size=len(labels), max_size=len(labels)))
    return np.array(labels), np.array(scores, dtype=float) / 4


def normal_scores(num_positive: int, num_negative: int, shift: float, seed: int):
    rng = np.random.default_rng(seed)
    labels = np.repeat([1, 0], [num_positive, num_negative])
    return labels, rng.normal(size=len(labels)) + shift * labels


def wins(positive: float, negative: float) -> Fraction:
    return Fraction(1) if positive > negative else Fraction(1, 2) if positive == negative else Fraction(0)


def slow_auc(labels, scores) -> Fraction:
    pairs = [wins(p, n) for p in scores[labels == 1] for n in scores[labels == 0]]
    return sum(pairs, Fraction(0)) / len(pairs)


def slow_covariance(labels, *all_scores):
    """DeLong's covariance matrix of several AUCs of the same samples, from the definition over all pairs."""
    of_positives, of_negatives = [], []
    for scores in all_scores:
        positives, negatives = scores[labels == 1], scores[labels == 0]
        table = np.array([[float(wins(p, n)) for n in negatives] for p in positives])
        of_positives.append(table.mean(axis=1))
        of_negatives.append(table.mean(axis=0))
    return np.cov(of_positives) / (labels == 1).sum() + np.cov(of_negatives) / (labels == 0).sum()


# ---------------------------------------------------------------------------------------------------------- the AUC


@quick
@given(ranked())
def test_auc_is_the_share_of_pairs_won(data):
    labels, scores = data
    assert metrics.auc(labels, scores) == float(slow_auc(labels, scores))


@quick
@given(ranked())
def test_auc_depends_on_the_order_of_scores_alone(data):
    labels, scores = data
    value = metrics.auc(labels, scores)
    assert metrics.auc(labels, np.exp(3 * scores)) == metrics.auc(labels, scores**3 - 7) == value
    assert metrics.auc(labels[::-1], scores[::-1]) == value


@quick
@given(ranked())
def test_auc_is_symmetric_in_classes_and_signs(data):
    labels, scores = data
    value = metrics.auc(labels, scores)
    assert metrics.auc(1 - labels, -scores) == value
    assert metrics.auc(labels, -scores) == pytest.approx(1 - value, abs=1e-15)


def test_auc_ranks_infinite_scores_and_takes_booleans():
    assert metrics.auc([True, True, False, False], [np.inf, -np.inf, -np.inf, 0.0]) == (1 + 1 + 0.5 + 0) / 4
    assert metrics.auc_interval([1, 1, 0, 0], [np.inf, 1, np.inf, -np.inf]).value == (0.5 + 1 + 0 + 1) / 4


REFERENCE = {
    "pred_I": 0.8821,
    "pred_II": 0.7915,
    "pred_I_thres_07": 0.8978,
    "Method_II_noise_norm": 0.9839,
    "Method_II_noise_only": 0.9421,
    "Method_I": 0.9156,
}


@pytest.mark.parametrize("method", REFERENCE)
def test_camelyon16_reference_scores(shared: Path, method: str):
    with open(shared / "data" / "camelyon16" / "test_reference_scores.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    result = metrics.auc_interval([int(row["truth"]) for row in rows], [float(row[method]) for row in rows])
    assert round(result.value, 4) == REFERENCE[method]
    assert result.low < result.value < result.high
    assert result.agree
    assert result.statement == "DeLong and bootstrap agree"


# ------------------------------------------------------------------------------------------------------- intervals


@pytest.mark.parametrize(("sizes", "shift", "decimals"), [((12, 20), 1.0, 6), ((5, 4), 0.5, 6), ((30, 9), 1.5, 0)])
def test_interval_is_delong_on_the_logit_scale(sizes, shift, decimals):
    labels, scores = normal_scores(*sizes, shift, seed=3)
    scores = np.round(scores, decimals)
    value = float(slow_auc(labels, scores))
    reach = Z * np.sqrt(slow_covariance(labels, scores)) / (value * (1 - value))
    logit = np.log(value / (1 - value))
    result = metrics.auc_interval(labels, scores, resamples=100)
    assert (result.low, result.high) == pytest.approx((expit(logit - reach), expit(logit + reach)), abs=1e-12)
    assert result.method == "DeLong on the logit scale"


def test_narrower_level_narrower_interval():
    labels, scores = normal_scores(20, 20, 1.0, seed=1)
    wide, narrow = (metrics.auc_interval(labels, scores, level=level) for level in (0.95, 0.8))
    assert wide.low < narrow.low < narrow.high < wide.high
    assert wide.bootstrap.low < narrow.bootstrap.low < narrow.bootstrap.high < wide.bootstrap.high
    assert narrow.level == 0.8


def test_interval_covers_the_truth_as_often_as_it_says():
    covered = 0
    shift = np.sqrt(2) * norm.ppf(0.95)
    for seed in range(300):
        result = metrics.auc_interval(*normal_scores(10, 16, shift, seed), resamples=100)
        covered += result.low <= 0.95 <= result.high
    # 300 studies at 95 % give 285 +- 4; plain DeLong covers about 237 here.
    assert covered >= 274


@pytest.mark.parametrize(("num_positive", "num_negative"), [(3, 3), (20, 35), (1, 4)])
def test_perfect_ranking_has_an_interval_with_width(num_positive, num_negative):
    labels = np.repeat([1, 0], [num_positive, num_negative])
    perfect = metrics.auc_interval(labels, labels.astype(float))
    low = perfect.low
    assert (perfect.value, perfect.high) == (1.0, 1.0)
    # The limit is where 1 lies z standard errors away, with Hanley and McNeil's formula for equal class sizes.
    size = (num_positive + num_negative) / 2
    q1, q2 = low / (2 - low), 2 * low**2 / (1 + low)
    variance = (low * (1 - low) + (size - 1) * (q1 - low**2) + (size - 1) * (q2 - low**2)) / (
        num_positive * num_negative
    )
    assert 1 - low == pytest.approx(Z * np.sqrt(variance), abs=1e-9)
    assert not perfect.agree
    assert perfect.statement.startswith("Newcombe and bootstrap disagree")

    worst = metrics.auc_interval(labels, -labels.astype(float))
    assert (worst.low, worst.high) == pytest.approx((0.0, 1 - low), abs=1e-12)


def test_other_rankings_without_variance():
    equal = metrics.auc_interval([1, 1, 0, 0, 0], np.zeros(5))
    assert equal.value == 0.5
    assert equal.low == pytest.approx(1 - equal.high)
    assert equal.low < 0.2
    single = metrics.auc_interval([1, 0, 0, 0, 0], [2.5, 1, 2, 3, 4])
    assert single.method.startswith("Newcombe")
    assert 0 < single.low < single.value == 0.5 < single.high < 1


def testresampled_auc_equals_the_auc_of_repeated_samples():
    labels, scores = normal_scores(7, 9, 1.0, seed=2)
    scores = np.round(scores)
    weights = np.random.default_rng(0).integers(0, 4, (20, 16)).astype(float)
    weights[:, [0, 15]] += 1
    expected = [metrics.auc(np.repeat(labels, w.astype(int)), np.repeat(scores, w.astype(int))) for w in weights]
    np.testing.assert_allclose(resampled_auc(labels, scores)(weights), expected, rtol=1e-14)


def test_bootstrap_draws_whole_groups_and_keeps_every_class():
    labels = np.array([0, 0, 1, 1, 1, 0, 2, 0])
    groups = np.array([0, 0, 1, 1, 2, 2, 3, 4])
    weights = bootstrap(lambda weights: weights, labels, groups, 300, seed=5)
    assert weights.shape == (300, 8)
    for group in range(5):
        assert np.ptp(weights[:, groups == group], axis=1).max() == 0
    # Kinds of groups: {0, 4} hold class 0 alone, 1 class 1 alone, 2 both, 3 class 2 alone.
    np.testing.assert_array_equal(weights[:, 0] + weights[:, 7], 2)
    np.testing.assert_array_equal(weights[:, [2, 4, 6]], 1)
    assert set(weights[:, 7]) == {0, 1, 2}
    np.testing.assert_array_equal(weights, bootstrap(lambda weights: weights, labels, groups, 300, seed=5))
    assert (weights != bootstrap(lambda weights: weights, labels, groups, 300, seed=6)).any()


def test_slides_copied_within_patients_add_no_certainty():
    labels, scores = normal_scores(15, 20, 1.0, seed=4)
    once = metrics.auc_interval(labels, scores)
    copied = {"labels": np.tile(labels, 3), "scores": np.tile(scores, 3)}
    together = metrics.auc_interval(**copied, groups=np.tile(np.arange(35), 3))
    assert (together.low, together.high) == pytest.approx((once.low, once.high), abs=1e-12)
    assert together.bootstrap.low == pytest.approx(once.bootstrap.low, abs=1e-12)
    apart = metrics.auc_interval(**copied)
    assert apart.high - apart.low < 0.65 * (once.high - once.low)
    assert together.method == "DeLong for groups on the logit scale"


def test_group_variance_agrees_with_the_group_bootstrap_on_mixed_patients():
    rng = np.random.default_rng(7)
    patients = np.repeat(np.arange(60), 4)
    labels = ((patients % 2 == 0) & (rng.random(240) < 0.6)).astype(int)
    scores = 0.8 * rng.normal(size=60)[patients] + 0.6 * rng.normal(size=240) + labels
    names = np.array([f"patient {number}" for number in patients])
    grouped, apart = metrics.auc_interval(labels, scores, groups=names), metrics.auc_interval(labels, scores)
    assert grouped.agree
    assert grouped.high - grouped.low == pytest.approx(grouped.bootstrap.high - grouped.bootstrap.low, rel=0.1)
    assert grouped.high - grouped.low > 1.15 * (apart.high - apart.low)


# ----------------------------------------------------------------------------------------------------- paired test


def test_paired_test_is_delongs_for_correlated_curves():
    labels, a = normal_scores(14, 18, 1.2, seed=8)
    b = np.round(0.6 * a + np.random.default_rng(9).normal(size=32), 1)
    covariance = slow_covariance(labels, a, b)
    error = np.sqrt(covariance[0, 0] + covariance[1, 1] - 2 * covariance[0, 1])
    result = metrics.paired_auc_test(labels, a, b)
    gap = float(slow_auc(labels, a) - slow_auc(labels, b))
    assert result.difference.value == pytest.approx(gap, abs=1e-15)
    assert (result.difference.low, result.difference.high) == pytest.approx((gap - Z * error, gap + Z * error))
    assert result.p_value == pytest.approx(2 * norm.sf(abs(gap) / error), abs=1e-12)
    assert result.bootstrap_p_value == pytest.approx(result.p_value, abs=0.05)
    swapped = metrics.paired_auc_test(labels, b, a)
    assert swapped.p_value == pytest.approx(result.p_value)
    assert swapped.difference.low == pytest.approx(-result.difference.high)


def test_paired_test_rejects_equal_methods_about_as_often_as_it_says():
    rejected = 0
    for seed in range(200):
        labels, signal = normal_scores(20, 30, 1.0, seed)
        noise = np.random.default_rng(seed + 1000).normal(size=(2, 50))
        rejected += metrics.paired_auc_test(labels, *(signal + noise), resamples=100).p_value < 0.05
    assert 2 <= rejected <= 22


def test_paired_test_of_rankings_without_variance():
    labels, scores = normal_scores(8, 8, 1.0, seed=0)
    same = metrics.paired_auc_test(labels, scores, np.exp(scores))
    assert (same.difference.value, same.p_value, same.bootstrap_p_value) == (0.0, 1.0, 1.0)
    few, many = (np.repeat([1, 0], count) for count in (2, 30))
    opposite = [metrics.paired_auc_test(labels, labels, -labels) for labels in (few, many)]
    assert opposite[0].difference.value == opposite[1].difference.value == 1
    assert opposite[0].p_value > 0.01 > 1e-6 > opposite[1].p_value
    assert opposite[1].difference.low > opposite[0].difference.low
    reverse = metrics.paired_auc_test(many, -many, many)
    assert reverse.p_value == pytest.approx(opposite[1].p_value)


def test_paired_test_with_patients_ignores_copies():
    labels, a = normal_scores(12, 12, 1.0, seed=1)
    b = a + np.random.default_rng(2).normal(size=24)
    once = metrics.paired_auc_test(labels, a, b)
    thrice = metrics.paired_auc_test(*(np.tile(x, 3) for x in (labels, a, b)), groups=np.tile(np.arange(24), 3))
    assert thrice.p_value == pytest.approx(once.p_value, abs=1e-12)
    assert thrice.bootstrap_p_value == pytest.approx(once.bootstrap_p_value, abs=1e-12)


def test_multiclass_auc_is_the_mean_over_one_against_the_rest():
    rng = np.random.default_rng(3)
    labels = np.arange(45) % 3
    scores = np.round(rng.normal(size=(45, 3)) + 1.2 * np.eye(3)[labels], 1)
    result = metrics.multiclass_auc(labels, scores, resamples=500)
    each = [float(slow_auc((labels == k).astype(int), scores[:, k])) for k in range(3)]
    assert [one.value for one in result.per_class] == pytest.approx(each, abs=1e-15)
    assert result.macro.value == pytest.approx(np.mean(each), abs=1e-15)
    assert result.macro.low < result.macro.value < result.macro.high
    # The mean of three is better known than any one of them.
    assert result.macro.high - result.macro.low < min(
        one.bootstrap.high - one.bootstrap.low for one in result.per_class
    )


# ----------------------------------------------------------------------------------------------------------- curves


@quick
@given(ranked())
def test_curves_are_counts_at_every_distinct_score(data):
    labels, scores = data
    roc, pr = metrics.roc_curve(labels, scores), metrics.pr_curve(labels, scores)
    thresholds = sorted(set(scores), reverse=True)
    np.testing.assert_array_equal(roc.thresholds, [np.inf, *thresholds])
    np.testing.assert_array_equal(pr.thresholds, thresholds)
    for k, threshold in enumerate([np.inf, *thresholds]):
        called = scores >= threshold
        assert roc.sensitivity[k] == pytest.approx(called[labels == 1].mean())
        assert roc.false_positive_rate[k] == pytest.approx(called[labels == 0].mean())
        if k:
            assert pr.recall[k - 1] == roc.sensitivity[k]
            assert pr.precision[k - 1] == pytest.approx(labels[called].mean())
    area = np.trapezoid(roc.sensitivity, roc.false_positive_rate)
    assert area == pytest.approx(metrics.auc(labels, scores))
    steps = [(r - before) * p for before, r, p in zip([0.0, *pr.recall], pr.recall, pr.precision, strict=False)]
    assert metrics.average_precision(labels, scores) == pytest.approx(sum(steps))


def test_average_precision_known_values():
    assert metrics.average_precision([0, 0, 1, 1], [0.1, 0.4, 0.35, 0.8]) == pytest.approx(0.5 + 0.5 * 2 / 3)
    assert metrics.average_precision([0, 1, 0, 1], np.zeros(4)) == 0.5


def test_bands_are_quantiles_of_the_curves_of_resamples():
    labels, scores = normal_scores(12, 15, 1.0, seed=5)
    scores = np.round(scores, 1)
    bands = metrics.curve_bands(labels, scores, points=11, resamples=150, seed=2)
    sensitivity, precision = [], []
    for weights in bootstrap(lambda weights: weights, labels, np.arange(27), 150, seed=2).astype(int):
        roc, pr = (
            f(np.repeat(labels, weights), np.repeat(scores, weights)) for f in (metrics.roc_curve, metrics.pr_curve)
        )
        sensitivity.append([roc.sensitivity[roc.false_positive_rate <= x + 1e-9].max() for x in bands.grid])
        precision.append([pr.precision[(pr.recall >= x - 1e-9) & (pr.recall > 0)][0] for x in bands.grid])
    for got, values, q in [
        (bands.sensitivity_low, sensitivity, 0.025),
        (bands.sensitivity_high, sensitivity, 0.975),
        (bands.precision_low, precision, 0.025),
        (bands.precision_high, precision, 0.975),
    ]:
        np.testing.assert_allclose(got, np.quantile(values, q, axis=0), atol=1e-12)


# -------------------------------------------------------------------------------------------------------- decisions


def test_wilson_known_numbers():
    for successes, trials, low, high in [
        (8, 10, 0.4901625, 0.9433178),
        (0, 10, 0.0, 0.2775328),
        (1, 1, 0.2065493, 1.0),
    ]:
        interval = metrics.wilson(successes, trials)
        assert (interval.low, interval.high) == pytest.approx((low, high), abs=1e-6)
    assert metrics.wilson(0, 0).low == 0
    assert metrics.wilson(0, 0).high == 1
    assert np.isnan(metrics.wilson(0, 0).value)


@quick
@given(st.integers(1, 200), st.data(), st.sampled_from([0.8, 0.95, 0.99]))
def test_wilson_limits_lie_z_standard_errors_away(trials, data, level):
    successes = data.draw(st.integers(0, trials))
    interval = metrics.wilson(successes, trials, level)
    z = norm.ppf(0.5 + level / 2)
    for limit in (interval.low, interval.high):
        gap = (successes / trials - limit) ** 2 - z * z * limit * (1 - limit) / trials
        assert gap == pytest.approx(0, abs=1e-12)


def test_decisions_by_hand():
    labels = np.repeat([1, 0], [5, 10])
    scores = np.array([0.9, 0.8, 0.7, 0.4, 0.1, 0.5, 0.6, *[0.2] * 8])
    result = metrics.decide(labels, scores, 0.5)
    np.testing.assert_array_equal(result.confusion, [[8, 2], [2, 3]])
    values = [result.accuracy, result.balanced_accuracy, result.f1, result.sensitivity, result.specificity]
    values += [result.ppv, result.npv]
    assert [one.value for one in values] == pytest.approx([11 / 15, 0.7, 0.6, 0.6, 0.8, 0.6, 0.8])
    assert all(0 <= one.low < one.value < one.high <= 1 for one in values)
    assert result.sensitivity == metrics.wilson(3, 5)
    overlap = metrics.wilson(3, 7)
    assert result.f1.low == pytest.approx(2 * overlap.low / (1 + overlap.low))
    by_variance = Z * np.sqrt((0.6 * 0.4 / 5 + 0.8 * 0.2 / 10) / 4)
    assert (result.balanced_accuracy.high - result.balanced_accuracy.low) / 2 == pytest.approx(by_variance, rel=0.2)


def test_decisions_that_the_data_do_not_define_are_nan():
    nobody = metrics.decide([0, 0, 1], [0.1, 0.2, 0.3], 0.9)
    assert np.isnan(nobody.ppv.value)
    assert (nobody.ppv.low, nobody.ppv.high) == (0, 1)
    assert nobody.f1.value == 0
    normals = metrics.decide([0, 0], [0.1, 0.2], 0.9)
    assert normals.accuracy.value == 1
    assert np.isnan([normals.sensitivity.value, normals.balanced_accuracy.value, normals.f1.value]).all()


def test_balanced_accuracy_interval_covers():
    rng = np.random.default_rng(0)
    labels = np.repeat([1, 0], [20, 30])
    covered = 0
    for _ in range(400):
        called = np.where(labels == 1, rng.random(50) < 0.9, rng.random(50) < 0.2)
        interval = metrics.decide(labels, called, 0.5).balanced_accuracy
        covered += interval.low <= 0.85 <= interval.high
    assert 365 <= covered <= 396


def test_multiclass_decisions():
    labels, called = [0, 0, 0, 1, 1, 2, 2, 2, 2], [0, 0, 1, 1, 1, 2, 2, 0, 1]
    result = metrics.decide_multiclass(labels, called, 3)
    np.testing.assert_array_equal(result.confusion, [[2, 1, 0], [0, 2, 0], [1, 1, 2]])
    assert result.accuracy == metrics.wilson(6, 9)
    assert result.balanced_accuracy.value == pytest.approx((2 / 3 + 1 + 1 / 2) / 3)
    f1 = [2 * 2 / (3 + 3), 2 * 2 / (2 + 4), 2 * 2 / (4 + 2)]
    assert [one.f1.value for one in result.per_class] == pytest.approx(f1)
    assert result.macro_f1 == pytest.approx(np.mean(f1))
    np.testing.assert_array_equal(result.per_class[0].confusion, [[5, 1], [1, 2]])
    assert np.isnan(metrics.decide_multiclass(labels, called, 4).balanced_accuracy.value)


@quick
@given(ranked())
def test_youden_threshold_beats_all_others_and_takes_the_highest(data):
    labels, scores = data
    threshold = metrics.youden_threshold(labels, scores)

    def youden(limit):
        return Fraction(int((scores[labels == 1] >= limit).sum()), int((labels == 1).sum())) - Fraction(
            int((scores[labels == 0] >= limit).sum()), int((labels == 0).sum())
        )

    others = [*np.unique(scores), np.inf]
    assert youden(threshold) == max(youden(limit) for limit in others)
    assert all(
        youden(limit) < youden(threshold) for limit in others if limit > scores[scores >= threshold].min(initial=np.inf)
    )
    if youden(threshold) > 0:
        assert threshold == (scores[scores >= threshold].min() + scores[scores < threshold].max()) / 2


def test_youden_threshold_at_the_edges():
    assert metrics.youden_threshold([0, 1], [0.2, 0.8]) == 0.5
    above = np.nextafter(0.3, 1)
    assert metrics.youden_threshold([0, 1], [0.3, above]) == above
    useless = metrics.youden_threshold([0, 1], [0.8, 0.2])
    assert 0.8 < useless < 0.8000001
    assert metrics.decide([0, 1], [0.8, 0.2], useless).confusion.tolist() == [[1, 0], [1, 0]]


# ------------------------------------------------------------------------------------------------------ calibration


def test_brier_by_hand():
    assert metrics.brier([1, 0, 1], [0.5, 0.25, 1.0]) == pytest.approx((0.25 + 0.0625) / 3)
    assert metrics.brier([1, 0], [[0.2, 0.8], [0.7, 0.3]]) == pytest.approx((2 * 0.04 + 2 * 0.09) / 2)
    assert metrics.brier([2], [[1.0, 0.0, 0.0]]) == 2


def test_reliability_and_ece_against_a_loop():
    rng = np.random.default_rng(1)
    percent = np.rint(100 * rng.random(60) ** 2).astype(int)
    probabilities = percent / 100
    labels = (rng.random(60) < probabilities).astype(int)
    result = metrics.reliability(labels, probabilities, 5)
    error = 0.0
    row = 0
    for k in range(5):
        inside = (percent >= 20 * k) & ((percent < 20 * (k + 1)) | (k == 4))
        if inside.any():
            assert result.probability[row] == pytest.approx(probabilities[inside].mean())
            assert result.share[row] == pytest.approx(labels[inside].mean())
            bar = metrics.wilson(int(labels[inside].sum()), int(inside.sum()))
            assert (result.low[row], result.high[row], result.count[row]) == (bar.low, bar.high, inside.sum())
            error += inside.mean() * abs(probabilities[inside].mean() - labels[inside].mean())
            row += 1
    assert row == len(result.count)
    assert result.ece == pytest.approx(error)
    shuffled = rng.permutation(60)
    again = metrics.reliability(labels[shuffled], probabilities[shuffled], 5)
    np.testing.assert_array_equal(again.count, result.count)


def test_calibrated_probabilities_have_a_small_error_and_sharpened_ones_a_large_one():
    rng = np.random.default_rng(2)
    truth = rng.random(20_000)
    labels = (rng.random(20_000) < truth).astype(int)
    assert metrics.reliability(labels, truth).ece < 0.015
    assert metrics.reliability(labels, np.round(truth)).ece == pytest.approx(0.25, abs=0.02)


def test_probabilities_of_several_classes_must_be_distributions():
    sigmoids = [[0.9, 0.8, 0.1], [0.2, 0.7, 0.3]]
    for compute in (metrics.brier, metrics.top_class):
        with pytest.raises(MetricError, match=r"sum to 1\.2 up to 1\.8"):
            compute([0, 1], sigmoids)


def test_top_class_reduces_several_classes_to_right_or_wrong():
    right, confidence = metrics.top_class([0, 2, 1], [[0.6, 0.3, 0.1], [0.5, 0.1, 0.4], [0.2, 0.7, 0.1]])
    assert right.tolist() == [1, 0, 1]
    assert confidence.tolist() == [0.6, 0.5, 0.7]


def soft_loss(labels, probabilities_of_1):
    positives, negatives = (labels == 1).sum(), (labels == 0).sum()
    target = np.where(labels == 1, (positives + 1) / (positives + 2), 1 / (negatives + 2))
    return -(target * np.log(probabilities_of_1) + (1 - target) * np.log1p(-probabilities_of_1)).sum()


@pytest.mark.parametrize("scale", [1.0, 1e-4, 300.0])
def test_platt_is_the_minimum_of_its_loss(scale):
    labels, logits = normal_scores(25, 40, 1.5, seed=6)
    platt = metrics.fit_platt(labels, scale * (logits + 5))
    best = minimize(
        lambda ab: soft_loss(labels, expit(ab[0] * logits + ab[1])), [0, 0], method="Nelder-Mead", tol=1e-12
    )
    assert platt.slope * scale == pytest.approx(best.x[0], abs=1e-5)
    assert platt.intercept + 5 * scale * platt.slope == pytest.approx(best.x[1], abs=1e-5)
    # At the minimum the probabilities add up to the softened targets.
    assert platt.apply(scale * (logits + 5)).sum() == pytest.approx(25 * 26 / 27 + 40 / 42, abs=1e-6)


def test_platt_finds_planted_numbers_and_repairs_calibration():
    rng = np.random.default_rng(4)
    logits = 3 * rng.normal(size=20_000)
    labels = (rng.random(20_000) < expit(0.4 * logits - 1)).astype(int)
    platt = metrics.fit_platt(labels, logits)
    assert (platt.slope, platt.intercept) == pytest.approx((0.4, -1.0), abs=0.05)
    assert metrics.reliability(labels, platt.apply(logits)).ece < 0.02 < metrics.reliability(labels, expit(logits)).ece


def test_scaling_of_separated_classes_is_finite_and_keeps_the_order():
    labels, logits = np.repeat([0, 1], 6), np.arange(12) * 1e3
    for fitted in (metrics.fit_platt(labels, logits), metrics.fit_temperature(labels, logits - 5500)):
        probabilities = fitted.apply(logits if isinstance(fitted, metrics.Platt) else logits - 5500)
        assert (np.diff(probabilities) > 0).all()
        assert 0 < probabilities[0] < probabilities[-1] < 1
        assert probabilities[:6].max() < 0.5 < probabilities[6:].min()
        assert probabilities[[0, -1]] == pytest.approx([0.03, 0.97], abs=0.02)


@pytest.mark.parametrize("classes", [1, 3])
def test_temperature_is_planted_and_minimal(classes):
    rng = np.random.default_rng(5)
    if classes == 1:
        logits = 4 * rng.normal(size=5000)
        labels = (rng.random(5000) < expit(logits / 2.5)).astype(int)
    else:
        logits = 4 * rng.normal(size=(5000, 3))
        labels = np.array([rng.choice(3, p=p) for p in softmax(logits / 2.5, axis=1)])
    fitted = metrics.fit_temperature(labels, logits)
    assert fitted.temperature == pytest.approx(2.5, rel=0.08)
    if classes == 1:
        loss = [soft_loss(labels, expit(logits / t)) for t in fitted.temperature * np.array([0.99, 1, 1.01])]
        assert loss[1] < min(loss[0], loss[2])
        two = metrics.fit_temperature(labels, np.stack([-logits / 2, logits / 2], axis=1))
        assert two.temperature == pytest.approx(fitted.temperature, rel=1e-9)
        np.testing.assert_allclose(fitted.apply(logits), expit(logits / fitted.temperature))
    else:
        np.testing.assert_allclose(fitted.apply(logits), softmax(logits / fitted.temperature, axis=1))


@pytest.mark.parametrize("fit", [metrics.fit_platt, metrics.fit_temperature])
@pytest.mark.parametrize("logits", [[2.0, 1.0, -1.0, -2.0], [0.0, 0.0, 0.0, 0.0]])
def test_scaling_refuses_logits_that_do_not_rise_with_the_labels(fit, logits):
    with pytest.raises(MetricError, match="uncalibrated"):
        fit([0, 0, 1, 1], logits)


def test_to_logits_undoes_the_sigmoid_and_stays_finite():
    logits = np.linspace(-8, 8, 9)
    np.testing.assert_allclose(metrics.to_logits(expit(logits)), logits, rtol=1e-9)
    assert metrics.to_logits([0.0, 1.0]) == pytest.approx([-13.8155, 13.8155], abs=1e-4)


# -------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: metrics.auc([1, 1], [0.1, 0.2]), "all 2 labels are 1"),
        (lambda: metrics.auc([], []), "labels of shape"),
        (lambda: metrics.auc([0, 1, 2], [0.1, 0.2, 0.3]), "label 2 at position 2"),
        (lambda: metrics.auc(["0", "1"], [0.1, 0.2]), "label '0' at position 0"),
        (lambda: metrics.auc([0, 1, np.nan], [0.1, 0.2, 0.3]), "label nan"),
        (lambda: metrics.auc(["a", "b"], [0.1, 0.2], positive="c"), "positive='c'"),
        (lambda: metrics.auc(["a", "b", "c"], [0.1, 0.2, 0.3], positive="c"), "labels of 3 classes ('a', 'b', 'c')"),
        (lambda: metrics.auc(["a", "a"], [0.1, 0.2], positive="b"), "all 2 labels are a"),
        (lambda: metrics.auc(["a", None, "b"], [0.1, 0.2, 0.3], positive="b"), "label None at position 1"),
        (lambda: metrics.auc(["a", "b", np.nan], [0.1, 0.2, 0.3], positive="b"), "label 'nan' at position 2"),
        (lambda: metrics.auc(["a", "b", ""], [0.1, 0.2, 0.3], positive="b"), "label '' at position 2"),
        (lambda: metrics.auc([0, 1], [0.1, np.nan]), "1 of 2 scores are NaN"),
        (lambda: metrics.auc([0, 1], [0.1, 0.2, 0.3]), "scores of shape"),
        (lambda: metrics.auc_interval([0, 1], [0.1, 0.2], level=95), "confidence level 95"),
        (lambda: metrics.auc_interval([0, 1], [0.1, 0.2], groups=["a"]), "groups of shape"),
        (lambda: metrics.auc_interval([0, 1], [0.1, 0.2], resamples=10), "10 resamples"),
        (lambda: metrics.multiclass_auc([0, 1], np.eye(3)[:2]), "no sample of class 2"),
        (lambda: metrics.multiclass_auc([0, 1], [0.1, 0.2]), "one column per class"),
        (lambda: metrics.youden_threshold([0, 1], [0.1, np.inf]), "NaN or infinite"),
        (lambda: metrics.decide([0, 1], [0.1, 0.2], np.nan), "threshold is NaN"),
        (lambda: metrics.confusion_matrix([0, 1], [0], 2), "2 labels and 1 decisions"),
        (lambda: metrics.wilson(3, 2), "3 of 2"),
        (lambda: metrics.brier([0, 1], [0.5, 1.5]), "probabilities from 0.5 to 1.5"),
        (lambda: metrics.reliability([0, 1], [0.5, 0.5], 0), "0 bins"),
        (lambda: metrics.fit_platt([1, 1], [0.5, 0.7]), "all 2 labels are 1"),
        (lambda: metrics.fit_temperature([0, 1], [0.5, np.inf]), "NaN or infinite"),
    ],
)
def test_what_cannot_be_computed_is_said(call, text):
    with pytest.raises(MetricError) as caught:
        call()
    assert text in str(caught.value)
    assert caught.value.why
    assert caught.value.how


def test_names_of_classes_with_a_positive_one_give_the_metrics_of_scikit_learn():
    numbers, scores = normal_scores(20, 30, 1.0, seed=3)
    words = np.where(numbers == 1, "tumour", "normal")
    for each in (words, words.tolist(), words.astype(object), np.where(numbers == 1, 7, 3)):
        labels = np.asarray(each)
        positive = labels[int(np.argmax(numbers))]
        named = {"positive": positive}
        assert metrics.auc(labels, scores, **named) == pytest.approx(
            roc_auc_score(words == "tumour", scores), abs=1e-12
        )
        assert metrics.average_precision(labels, scores, **named) == pytest.approx(
            average_precision_score(words, scores, pos_label="tumour"), abs=1e-12
        )
        theirs = sklearn_roc(words, scores, pos_label="tumour", drop_intermediate=False)
        np.testing.assert_allclose(metrics.roc_curve(labels, scores, **named).false_positive_rate, theirs[0])
        np.testing.assert_allclose(metrics.roc_curve(labels, scores, **named).sensitivity, theirs[1])
        assert metrics.auc_interval(labels, scores, **named) == metrics.auc_interval(numbers, scores)
        assert metrics.paired_auc_test(labels, scores, -scores, **named).auc_a == metrics.auc(numbers, scores)
        threshold = metrics.youden_threshold(labels, scores, **named)
        assert threshold == metrics.youden_threshold(numbers, scores)
        assert metrics.decide(labels, scores, threshold, **named) == metrics.decide(numbers, scores, threshold)
    flipped = metrics.auc(words, scores, positive="normal")
    assert flipped == pytest.approx(1 - metrics.auc(numbers, scores), abs=1e-12)


@pytest.mark.parametrize("labels", [["tumor", "normal"], [1, 2]])
def test_without_a_positive_class_the_error_names_the_choices(labels: list[str] | list[int]):
    with pytest.raises(MetricError, match=r"labels must be integers from 0 to 1") as caught:
        metrics.auc(labels, [0.1, 0.2])
    assert all(f"positive={name!r}" in caught.value.how for name in labels)
    metrics.auc(labels, [0.1, 0.2], positive=labels[0])  # and that works


def test_results_are_plain_numbers_and_reproducible():
    labels, scores = normal_scores(6, 8, 1.0, seed=0)
    results = [metrics.auc_interval(labels, scores) for _ in range(2)]
    assert results[0] == results[1]
    decisions = metrics.decide(labels, scores, metrics.youden_threshold(labels, scores))
    intervals = [results[0], results[0].bootstrap, *(v for v in vars(decisions).values() if isinstance(v, Interval))]
    for interval, name in itertools.product(intervals, ("value", "low", "high")):
        assert type(getattr(interval, name)) is float


def test_metrics_load_no_torch():
    code = "import sys, selfvitmil.metrics; print('torch' in sys.modules, 'pandas' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
