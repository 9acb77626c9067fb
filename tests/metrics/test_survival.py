"""Survival metrics against scikit-survival, lifelines and slow loops of the formulas, on data with many ties."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import norm

from selfvitmil import metrics
from selfvitmil.errors import MetricError
from selfvitmil.metrics import survival

Floats = NDArray[np.float64]
SEEDS = range(25)


def study(seed: int, size: int = 60, grid: float = 4.0) -> tuple[Floats, NDArray[np.bool_], Floats]:
    """Exponential times with random censoring; times and risks on a coarse grid, so that ties are frequent."""
    rng = np.random.default_rng(seed)
    risk = rng.normal(size=size)
    happens, ends = rng.exponential(np.exp(-risk)), rng.exponential(1.5, size)
    time = np.ceil(np.minimum(happens, ends) * grid) / grid
    return time, happens <= ends, np.round(risk * 2) / 2


def with_long_follow_up(time: Floats, event: NDArray[np.bool_]) -> tuple[Floats, NDArray[np.bool_]]:
    """A training set whose follow-up covers every test: one more sample, with an event after all others."""
    return np.append(time, 100.0), np.append(event, True)


def structured(time: Floats, event: NDArray[np.bool_]):
    return np.array(list(zip(event, time, strict=True)), dtype=[("event", bool), ("time", float)])


def code_of(call, *args, **kwargs) -> str:
    with pytest.raises(MetricError) as caught:
        call(*args, **kwargs)
    return caught.value.code


# ---------------------------------------------------------------------------------------------------- concordance


@pytest.mark.parametrize("seed", SEEDS)
def test_harrell_c_agrees_with_lifelines_and_scikit_survival(seed: int):
    from lifelines.utils import concordance_index
    from sksurv.metrics import concordance_index_censored

    time, event, risk = study(seed)
    found = metrics.harrell_c(time, event, risk)
    value, concordant, discordant, tied, _ = concordance_index_censored(event, time, risk)
    assert found.value == pytest.approx(value, abs=1e-12)
    assert (found.concordant, found.discordant, found.tied) == (concordant, discordant, tied)
    assert found.value == pytest.approx(concordance_index(time, -risk, event), abs=1e-12)
    assert found.low < found.value < found.high


@pytest.mark.parametrize("tau", [None, 1.0, 2.5])
@pytest.mark.parametrize("seed", SEEDS)
def test_uno_c_agrees_with_scikit_survival(seed: int, tau: float | None):
    from sksurv.metrics import concordance_index_ipcw

    time, event, risk = study(seed)
    train = with_long_follow_up(*study(seed + 1000)[:2])
    value = concordance_index_ipcw(structured(*train), structured(time, event), risk, tau)[0]
    assert metrics.uno_c(*train, time, event, risk, tau).value == pytest.approx(value, abs=1e-10)


def test_uno_c_without_censoring_is_harrell_c():
    time, _, risk = study(3)
    event = np.ones(len(time), dtype=bool)
    assert metrics.uno_c(time, event, time, event, risk).value == pytest.approx(
        metrics.harrell_c(time, event, risk).value, abs=1e-12
    )


def slow_pairs(time: Floats, event: NDArray[np.bool_], risk: Floats, fold: NDArray[np.int64], weight: Floats) -> float:
    """The ratio of weighted pairs by two loops, each sample counted `weight` times."""
    won = whole = 0.0
    for i in range(len(time)):
        for j in range(len(time)):
            later = time[i] < time[j] or (time[i] == time[j] and not event[j])
            if event[i] and later and fold[i] == fold[j]:
                whole += weight[i] * weight[j]
                won += weight[i] * weight[j] * (1.0 if risk[i] > risk[j] else 0.5 if risk[i] == risk[j] else 0.0)
    return won / whole


def test_c_within_folds_and_its_interval_follow_from_the_pairs():
    """The limits are derived from the derivative by each patient's weight, taken here by finite differences."""
    rng = np.random.default_rng(5)
    time, event, risk = study(5, 24)
    fold, patient = np.arange(24) % 3, rng.integers(0, 14, 24)
    offset = risk + 10 * fold
    found = metrics.harrell_c(time, event, offset, groups=patient, folds=fold)
    ones = np.ones(24)
    assert found.value == pytest.approx(slow_pairs(time, event, offset, fold, ones), abs=1e-12)
    slopes = []
    for one in np.unique(patient):
        step = 1e-5 * (patient == one)
        more, less = (slow_pairs(time, event, offset, fold, ones + sign * step) for sign in (1, -1))
        slopes.append((more - less) / 2e-5)
    count = len(slopes)
    error = np.sqrt(np.square(slopes).sum() * count / (count - 1))
    reach = norm.ppf(0.975) * error / (found.value * (1 - found.value))
    odds = found.value / (1 - found.value)
    assert found.low == pytest.approx(1 / (1 + np.exp(reach) / odds), abs=1e-6)
    assert found.high == pytest.approx(1 / (1 + np.exp(-reach) / odds), abs=1e-6)
    assert "within folds" in found.method


def test_c_of_a_binary_outcome_is_the_auc():
    """Everyone is followed up to time 2 and events happen at 1: C is the AUC, its interval almost DeLong's."""
    rng = np.random.default_rng(2)
    labels = np.repeat([1, 0], [30, 50])
    scores = np.round(rng.normal(size=80) + labels, 1)
    found = metrics.harrell_c(2 - labels, labels, scores)
    delong = metrics.auc_interval(labels, scores)
    assert found.value == pytest.approx(delong.value, abs=1e-12)
    assert (found.low, found.high) == pytest.approx((delong.low, delong.high), abs=2e-3)


def test_ranking_pairs_in_pieces_gives_the_same_result(monkeypatch: pytest.MonkeyPatch):
    time, event, risk = study(7)
    whole = metrics.harrell_c(time, event, risk)
    monkeypatch.setattr(survival, "_PIECE", 100)
    pieces = metrics.harrell_c(time, event, risk)
    assert (pieces.value, pieces.concordant) == (whole.value, whole.concordant)
    assert pieces.low == pytest.approx(whole.low, abs=1e-12)


def test_perfect_and_constant_risks_have_an_interval_with_width():
    time, event = np.arange(1.0, 11.0), np.ones(10, dtype=bool)
    perfect = metrics.harrell_c(time, event, -time)
    assert perfect.value == 1.0
    assert perfect.high == 1.0
    assert 0.6 < perfect.low < 0.8
    constant = metrics.harrell_c(time, event, np.zeros(10))
    assert constant.value == 0.5
    assert constant.low < 0.3
    assert constant.high > 0.7
    assert "no variance" in perfect.method
    assert "no variance" in constant.method


def test_paired_test_of_two_risks():
    time, event, risk = study(1, 80)
    noise = np.random.default_rng(99).normal(size=80)
    test = metrics.paired_c_test(time, event, risk, noise)
    assert test.difference.value == pytest.approx(test.c_a - test.c_b)
    assert test.c_a == metrics.harrell_c(time, event, risk).value
    assert test.p_value < 0.01
    back = metrics.paired_c_test(time, event, noise, risk)
    assert back.p_value == pytest.approx(test.p_value)
    assert metrics.paired_c_test(time, event, risk, risk).p_value == 1.0


def test_paired_test_keeps_its_level():
    """Two equally good risks: p below 0.1 in about a tenth of studies."""
    rng = np.random.default_rng(0)
    p_values = []
    for seed in range(300):
        time, event, risk = study(seed, 50, 100.0)
        a, b = (risk + rng.normal(size=50) for _ in range(2))
        p_values.append(metrics.paired_c_test(time, event, a, b).p_value)
    assert 0.06 < np.mean(np.array(p_values) < 0.1) < 0.15


def test_input_that_allows_no_concordance_is_refused():
    one = [1.0]
    assert code_of(metrics.harrell_c, one, [1], [0.5]) == "no-comparable-pairs"
    assert code_of(metrics.harrell_c, [1.0, 2.0], [0, 0], [0.5, 1.0]) == "no-events"
    assert code_of(metrics.harrell_c, [1.0, 1.0], [1, 1], [0.5, 1.0]) == "no-comparable-pairs"
    assert code_of(metrics.harrell_c, [1.0, 2.0], [1, 0], [0.5, 1.0], folds=[0, 1]) == "no-comparable-pairs"
    assert code_of(metrics.harrell_c, [1.0, -2.0], [1, 0], [0.5, 1.0]) == "invalid-times"
    assert code_of(metrics.harrell_c, [], [], []) == "invalid-times"
    assert code_of(metrics.harrell_c, [1.0, 2.0], [1, 2], [0.5, 1.0]) == "invalid-events"
    assert code_of(metrics.harrell_c, [1.0, 2.0], [1], [0.5, 1.0]) == "length-mismatch"
    assert code_of(metrics.harrell_c, [1.0, 2.0], [1, 0], [0.5, np.nan]) == "non-finite-scores"
    assert code_of(metrics.uno_c, [1.0, 2.0], [1, 1], [1.0, 3.0], [0, 1], [0.0, 1.0]) == "beyond-follow-up"
    # The training set's last sample is censored at 2: nobody is uncensored then.
    assert code_of(metrics.uno_c, [1.0, 2.0], [1, 0], [2.0, 3.0], [1, 0], [0.0, 1.0]) == "beyond-follow-up"


# ---------------------------------------------------------------------------------------------------- at given times


@pytest.mark.parametrize("seed", SEEDS)
def test_time_dependent_auc_agrees_with_scikit_survival(seed: int):
    from sksurv.metrics import cumulative_dynamic_auc

    time, event, risk = study(seed)
    train = with_long_follow_up(*study(seed + 1000)[:2])
    times = metrics.evaluation_times(*train, time, event, 8)
    found = metrics.time_dependent_auc(*train, time, event, risk, times)
    values, mean = cumulative_dynamic_auc(structured(*train), structured(time, event), risk, times)
    np.testing.assert_allclose(found.auc, values, atol=1e-10)
    assert found.mean.value == pytest.approx(mean, abs=1e-10)
    assert (found.low <= found.auc).all()
    assert (found.auc <= found.high).all()
    columns = np.repeat(risk[:, None], len(times), axis=1)
    np.testing.assert_array_equal(metrics.time_dependent_auc(*train, time, event, columns, times).auc, found.auc)


def test_time_dependent_auc_within_folds_ignores_their_offsets():
    time, event, risk = study(4, 90)
    train = with_long_follow_up(time, event)
    fold = np.arange(90) % 3
    times = [0.5, 1.0]
    plain = metrics.time_dependent_auc(*train, time, event, risk, times, folds=fold)
    shifted = metrics.time_dependent_auc(*train, time, event, risk + 20 * fold, times, folds=fold)
    np.testing.assert_array_equal(plain.auc, shifted.auc)
    won, whole = np.zeros(2), np.zeros(2)
    for k in range(3):
        here = fold == k
        part = metrics.time_dependent_auc(*train, time[here], event[here], risk[here], times)
        weight = [survival._uncensored(*train, time[(fold == k) & event & (time <= t)]) ** -1.0 for t in times]
        pairs = np.array([each.sum() for each in weight]) * part.controls
        won, whole = won + part.auc * pairs, whole + pairs
    np.testing.assert_allclose(plain.auc, won / whole, atol=1e-12)


@pytest.mark.parametrize("seed", SEEDS)
def test_brier_scores_agree_with_scikit_survival(seed: int):
    from sksurv.metrics import brier_score, integrated_brier_score

    time, event, risk = study(seed)
    train = with_long_follow_up(*study(seed + 1000)[:2])
    times = metrics.evaluation_times(*train, time, event, 10)
    predicted = np.exp(-np.exp(risk)[:, None] * times)
    found = metrics.brier_score_survival(*train, time, event, predicted, times)
    expected = brier_score(structured(*train), structured(time, event), predicted, times)[1]
    np.testing.assert_allclose(found.score, expected, atol=1e-10)
    whole = integrated_brier_score(structured(*train), structured(time, event), predicted, times)
    assert found.integrated.value == pytest.approx(whole, abs=1e-10)
    assert metrics.integrated_brier_score(*train, time, event, predicted, times) == found.integrated
    constant = np.repeat(metrics.kaplan_meier(*train).at(times)[None], len(time), axis=0)
    again = metrics.brier_score_survival(*train, time, event, constant, times)
    np.testing.assert_allclose(again.score, found.reference, atol=1e-12)
    assert found.integrated.low < whole < found.integrated.high


def test_evaluation_times_are_usable_event_times():
    time, event, risk = study(9)
    train_time, train_event, _ = study(10)
    times = metrics.evaluation_times(train_time, train_event, time, event, 5)
    assert len(times) <= 5
    assert set(times) <= set(time[event])
    metrics.time_dependent_auc(train_time, train_event, time, event, risk, times)
    assert code_of(metrics.evaluation_times, [1.0], [1], [2.0, 3.0], [1, 0]) == "no-events"
    assert code_of(metrics.evaluation_times, [9.0], [1], [2.0, 3.0], [0, 0]) == "no-events"


def test_unusable_times_are_refused():
    time, event, risk = study(9)
    train = with_long_follow_up(time, event)
    assert code_of(metrics.time_dependent_auc, *train, time, event, risk, [1.0, 0.5]) == "invalid-time-grid"
    assert code_of(metrics.time_dependent_auc, *train, time, event, risk, [time.max()]) == "no-comparable-pairs"
    assert code_of(metrics.time_dependent_auc, *train, time, event, risk, [0.0]) == "no-comparable-pairs"
    half = np.full((len(time), 1), 0.5)
    assert code_of(metrics.integrated_brier_score, *train, time, event, half, [1.0]) == "invalid-time-grid"
    assert code_of(metrics.brier_score_survival, *train, time, event, half + 1, [1.0]) == "invalid-probabilities"


# ---------------------------------------------------------------------------------------------------- curves


@pytest.mark.parametrize("seed", SEEDS)
def test_kaplan_meier_agrees_with_lifelines(seed: int):
    from lifelines import KaplanMeierFitter
    from lifelines.utils import median_survival_times

    time, event, _ = study(seed, 40)
    found = metrics.kaplan_meier(time, event)
    fitted = KaplanMeierFitter().fit(time, event)
    table = fitted.event_table.loc[found.times]
    np.testing.assert_allclose(found.survival, fitted.survival_function_.loc[found.times].iloc[:, 0], atol=1e-12)
    inside = (found.survival > 0) & (found.survival < 1)
    limits = fitted.confidence_interval_.loc[found.times].to_numpy()[inside]
    np.testing.assert_allclose(np.stack([found.low, found.high], axis=1)[inside], limits, atol=1e-9)
    for mine, column in ((found.at_risk, "at_risk"), (found.events, "observed"), (found.censored, "censored")):
        np.testing.assert_array_equal(mine, table[column])
    assert found.median.value == fitted.median_survival_time_
    low, high = np.ravel(median_survival_times(fitted.confidence_interval_))
    assert found.median.low == low
    # At survival 0 the limits are undefined: lifelines lets the upper one fall to 0, ours stays.
    assert found.median.high == (high if found.high[found.times <= high][-1] <= 0.5 or high == np.inf else np.inf)
    between = np.linspace(0, time.max(), 17)
    np.testing.assert_allclose(found.at(between), fitted.predict(between), atol=1e-12)
    np.testing.assert_array_equal(found.num_at_risk(between), [(time >= t).sum() for t in between])


def test_kaplan_meier_of_special_cases():
    never = metrics.kaplan_meier([1.0, 2.0], [0, 0])
    np.testing.assert_array_equal([never.survival, never.low, never.high], np.ones((3, 2)))
    assert never.median.value == np.inf
    assert np.isnan(never.at(3.0))
    one = metrics.kaplan_meier([2.0], [1])
    assert (one.survival[0], one.low[0], one.high[0]) == (0.0, 0.0, 1.0)
    assert one.median.value == 2.0
    assert one.at(3.0) == 0.0


def test_restricted_mean_agrees_with_lifelines_and_its_interval_with_a_loop():
    from lifelines import KaplanMeierFitter
    from lifelines.utils import restricted_mean_survival_time

    for seed in SEEDS:
        time, event, _ = study(seed, 40)
        tau = 0.4 * time.max()
        found = metrics.restricted_mean_survival(time, event, tau)
        expected = restricted_mean_survival_time(KaplanMeierFitter().fit(time, event), t=tau)
        assert found.value == pytest.approx(expected, abs=1e-9)
        curve, variance = metrics.kaplan_meier(time, event), 0.0
        for t, d, n in zip(curve.times, curve.events, curve.at_risk, strict=True):
            if t < tau and n > d:
                area = found.value - metrics.restricted_mean_survival(time, event, t).value
                variance += area**2 * d / (n * (n - d))
        assert found.high - found.value == pytest.approx(norm.ppf(0.975) * np.sqrt(variance), abs=1e-9)
    assert code_of(metrics.restricted_mean_survival, [1.0, 2.0], [1, 0], 3.0) == "beyond-follow-up"
    assert code_of(metrics.restricted_mean_survival, [1.0, 2.0], [1, 0], 0.0) == "invalid-tau"
    assert metrics.restricted_mean_survival([1.0, 2.0], [1, 1], 3.0).value == 1.5


@pytest.mark.parametrize("seed", SEEDS)
def test_breslow_baseline_agrees_with_scikit_survival(seed: int):
    from sksurv.linear_model.coxph import BreslowEstimator

    time, event, risk = study(seed)
    found = metrics.breslow_baseline(time, event, risk)
    fitted = BreslowEstimator().fit(risk, event, time)
    times = np.unique(time)
    expected = np.stack([curve(times) for curve in fitted.get_survival_function(risk[:7])])
    np.testing.assert_allclose(found.survival(risk[:7], times), expected, atol=1e-10)
    assert (found.survival(risk[:3], [0.0]) == 1).all()


def test_equal_risks_give_the_exponential_of_nelson_and_aalen():
    time, event, _ = study(3)
    baseline = metrics.breslow_baseline(time, event, np.full(len(time), 300.0))
    total = 0.0
    for t, height in zip(baseline.times, baseline.cumulative_hazard, strict=True):
        total += ((time == t) & event).sum() / (time >= t).sum()
        assert height == pytest.approx(total, abs=1e-12)
    assert code_of(metrics.breslow_baseline, [1.0], [0], [0.0]) == "no-events"


# ---------------------------------------------------------------------------------------------------- groups


@pytest.mark.parametrize("num_groups", [2, 3, 4])
@pytest.mark.parametrize("seed", SEEDS)
def test_log_rank_agrees_with_lifelines(seed: int, num_groups: int):
    from lifelines.statistics import multivariate_logrank_test

    time, event, risk = study(seed)
    groups = np.digitize(risk + 0.01 * np.arange(60), np.quantile(risk, np.arange(1, num_groups) / num_groups))
    found = metrics.log_rank(time, event, groups)
    expected = multivariate_logrank_test(time, groups, event)
    assert found.chi2 == pytest.approx(expected.test_statistic, rel=1e-8)
    assert found.p_value == pytest.approx(expected.p_value, rel=1e-6)
    assert found.degrees == len(np.unique(groups)) - 1
    assert found.expected.sum() == pytest.approx(found.observed.sum())


def test_stratified_log_rank_sums_over_strata():
    """Two groups: the loop of the hypergeometric mean and variance within each stratum."""
    for seed in SEEDS:
        time, event, risk = study(seed)
        group, stratum = (risk > 0).astype(int), np.arange(60) % 3
        excess = variance = 0.0
        for k in range(3):
            for t in np.unique(time[event & (stratum == k)]):
                here = (time >= t) & (stratum == k)
                n, n1 = here.sum(), (here & (group == 1)).sum()
                dying = here & (time == t) & event
                d = dying.sum()
                excess += (dying & (group == 1)).sum() - d * n1 / n
                variance += d * (n1 / n) * (1 - n1 / n) * (n - d) / (n - 1) if n > 1 else 0.0
        assert metrics.log_rank(time, event, group, strata=stratum).chi2 == pytest.approx(excess**2 / variance)


def test_log_rank_without_groups_or_events_is_refused():
    assert code_of(metrics.log_rank, [1.0, 2.0], [1, 1], [0, 0]) == "one-group"
    assert code_of(metrics.log_rank, [1.0, 2.0], [0, 0], [0, 1]) == "no-events"
    assert (
        code_of(metrics.log_rank, [1.0, 2.0, 1.0, 2.0], [1, 1, 1, 1], [0, 0, 1, 1], strata=[0, 0, 1, 1]) == "no-events"
    )


@pytest.mark.parametrize("seed", range(10))
def test_hazard_ratio_agrees_with_scikit_survival(seed: int):
    from sksurv.linear_model import CoxPHSurvivalAnalysis

    time, event, risk = study(seed, 90)
    for covariate in (risk, 1000 * risk + 7, (risk > 0).astype(float)):
        scale = covariate.std()
        fitted = CoxPHSurvivalAnalysis(ties="efron", tol=1e-13).fit(covariate[:, None] / scale, structured(time, event))
        found = metrics.hazard_ratio(time, event, covariate)
        assert np.log(found.value) * scale == pytest.approx(fitted.coef_[0], abs=1e-8)


@pytest.mark.parametrize("strata", [1, 3])
@pytest.mark.parametrize("seed", range(5))
def test_stratified_hazard_ratio_and_limits_agree_with_lifelines(seed: int, strata: int):
    """lifelines stops at an accuracy of about 1e-5."""
    import pandas as pd
    from lifelines import CoxPHFitter

    time, event, risk = study(seed, 90)
    stratum = np.arange(90) % strata
    found = metrics.hazard_ratio(time, event, risk, strata=stratum)
    frame = pd.DataFrame({"time": time, "event": event, "x": risk, "stratum": stratum})
    fitted = CoxPHFitter().fit(frame, "time", "event", strata=["stratum"]).summary.loc["x"]
    expected = fitted["coef"], fitted["coef lower 95%"], fitted["coef upper 95%"]
    assert np.log([found.value, found.low, found.high]) == pytest.approx(expected, abs=1e-4)
    assert found.p_value == pytest.approx(fitted["p"], rel=1e-2)


def test_infinite_hazard_ratio_is_refused():
    assert code_of(metrics.hazard_ratio, [1, 2, 3, 4], [1, 1, 0, 0], [1, 1, 0, 0]) == "infinite-hazard-ratio"
    assert code_of(metrics.hazard_ratio, [1, 2], [0, 0], [1, 0]) == "no-events"
    assert code_of(metrics.hazard_ratio, [1, 2], [1, 1], [1, 1]) == "no-events"
