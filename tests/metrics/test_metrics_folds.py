"""AUC within folds: against scipy and scikit-learn fold by fold, planted offsets and truths, and resamples."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.special import expit, logit
from scipy.stats import mannwhitneyu, norm

from selfvitmil import metrics
from selfvitmil.errors import MetricError
from selfvitmil.metrics.classification import bootstrap
from selfvitmil.metrics.ranking import resampled_auc

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Z = norm.ppf(0.975)


def folds_of(num_folds: int, num_positive: int, num_negative: int) -> tuple[Ints, Ints]:
    labels = np.tile(np.repeat([1, 0], [num_positive, num_negative]), num_folds)
    return labels, np.repeat(np.arange(num_folds), num_positive + num_negative)


def planted_scores(labels: Ints, folds: Ints, auc: float, rng: np.random.Generator, offset: float = 2.0) -> Floats:
    """Normal scores with this true AUC in every fold; each fold's model has an offset of its own."""
    shift = np.sqrt(2) * norm.ppf(auc)
    return rng.normal(size=len(labels)) + shift * labels + offset * rng.normal(size=folds.max() + 1)[folds]


def with_both_classes(labels: Ints, folds: Ints) -> list[int]:
    return [int(k) for k in np.unique(folds) if len(set(labels[folds == k].tolist())) == 2]


def mean_within_folds(labels: Ints, scores: Floats, folds: Ints) -> float:
    """Mean of Mann and Whitney's U by the pairs, of the folds that have both classes, weighted by their pairs."""
    wins = pairs = 0.0
    for k in with_both_classes(labels, folds):
        label, score = labels[folds == k], scores[folds == k]
        wins += mannwhitneyu(score[label == 1], score[label == 0]).statistic
        pairs += label.sum() * (1 - label).sum()
    return wins / pairs


@st.composite
def studies(draw: st.DrawFn) -> tuple[Ints, Floats, Ints]:
    """Up to four folds of unequal sizes, some with one class; scores on a coarse grid, so that ties are frequent."""
    sizes = draw(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=3))
    sizes.append((draw(st.integers(1, 4)), draw(st.integers(1, 4))))
    labels = np.concatenate([np.repeat([1, 0], size) for size in sizes]).astype(np.int64)
    folds = np.repeat(np.arange(len(sizes)), [sum(size) for size in sizes])
    scores = draw(st.lists(st.integers(-4, 4), min_size=len(labels), max_size=len(labels)))
    return labels, np.array(scores, dtype=np.float64) / 4, folds


@settings(max_examples=60, deadline=None, derandomize=True)
@given(studies())
def test_auc_within_folds_is_the_mean_of_the_folds_weighted_by_pairs(study: tuple[Ints, Floats, Ints]):
    labels, scores, folds = study
    expected = mean_within_folds(labels, scores, folds)
    assert metrics.auc(labels, scores, folds=folds) == pytest.approx(expected, abs=1e-12)
    curve = metrics.roc_curve(labels, scores, folds=folds)
    assert np.trapezoid(curve.sensitivity, curve.false_positive_rate) == pytest.approx(expected, abs=1e-12)
    assert (np.diff(curve.sensitivity) >= -1e-12).all()
    again = resampled_auc(labels, scores, folds)(np.ones((2, len(labels))))
    assert again == pytest.approx(expected, abs=1e-12)


def test_folds_agree_with_sklearn():
    sklearn_metrics = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(8)
    for _ in range(20):
        labels, folds = rng.integers(0, 2, 40), rng.integers(0, 4, 40)
        scores = np.round(rng.normal(size=40) + labels + 3 * folds, 1)
        aucs, precisions, pairs, positives = [], [], [], []
        for k in with_both_classes(labels, folds):
            label, score = labels[folds == k], scores[folds == k]
            aucs.append(sklearn_metrics.roc_auc_score(label, score))
            precisions.append(sklearn_metrics.average_precision_score(label, score))
            pairs.append(label.sum() * (1 - label).sum())
            positives.append(label.sum())
        assert metrics.auc(labels, scores, folds=folds) == pytest.approx(np.average(aucs, weights=pairs), abs=1e-12)
        found = metrics.average_precision(labels, scores, folds=folds)
        assert found == pytest.approx(np.average(precisions, weights=positives), abs=1e-12)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(studies())
def test_precision_within_folds_is_the_mean_over_all_positives(study: tuple[Ints, Floats, Ints]):
    labels, scores, folds = study
    reached = []
    for k in with_both_classes(labels, folds):
        label, score = labels[folds == k], scores[folds == k]
        reached += [label[score >= one].mean() for one in score[label == 1]]
    assert metrics.average_precision(labels, scores, folds=folds) == pytest.approx(np.mean(reached), abs=1e-12)


def test_offsets_of_folds_change_nothing():
    rng = np.random.default_rng(0)
    labels, folds = folds_of(4, 5, 7)
    a, b = planted_scores(labels, folds, 0.8, rng, 0.0), planted_scores(labels, folds, 0.7, rng, 0.0)
    moved = a + 10 * rng.normal(size=4)[folds]
    told = [metrics.auc_interval(labels, scores, folds=folds, resamples=200) for scores in (a, moved)]
    assert told[0] == told[1]
    tests = [metrics.paired_auc_test(labels, scores, b, folds=folds, resamples=200) for scores in (a, moved)]
    assert tests[0] == tests[1]
    bands = [metrics.curve_bands(labels, scores, folds=folds, resamples=100) for scores in (a, moved)]
    assert all((one == other).all() for one, other in zip(*(vars(band).values() for band in bands), strict=True))
    assert metrics.auc(labels, moved) < told[0].value - 0.1  # all scores in one ranking: what must not be reported


def test_one_fold_is_the_same_as_none():
    rng = np.random.default_rng(1)
    labels, _ = folds_of(1, 9, 14)
    scores, others, patients = rng.normal(size=23) + labels, rng.normal(size=23), rng.integers(0, 12, 23)
    folds = ["only"] * 23
    for groups in (None, patients):
        one, none = (metrics.auc_interval(labels, scores, groups=groups, folds=f, resamples=200) for f in (folds, None))
        assert one == none
        tests = [
            metrics.paired_auc_test(labels, scores, others, groups=groups, folds=f, resamples=200)
            for f in (folds, None)
        ]
        assert tests[0] == tests[1]


def test_variance_of_folds_of_equal_size_is_written_out():
    """Placements within folds as deviations from the common AUC, per class, as the mean over all folds."""
    labels, folds = folds_of(3, 4, 6)
    scores = planted_scores(labels, folds, 0.75, np.random.default_rng(2))
    table = [
        scores[(labels == 1) & (folds == k)][:, None] > scores[(labels == 0) & (folds == k)][None, :] for k in range(3)
    ]
    of_positives = np.concatenate([won.mean(axis=1) for won in table])
    of_negatives = np.concatenate([won.mean(axis=0) for won in table])
    value = of_positives.mean()
    variance = of_positives.var(ddof=1) / 12 + of_negatives.var(ddof=1) / 18
    reach = Z * np.sqrt(variance) / (value * (1 - value))
    told = metrics.auc_interval(labels, scores, folds=folds, resamples=100)
    assert told.value == pytest.approx(value, abs=1e-12)
    assert (told.low, told.high) == pytest.approx((expit(logit(value) - reach), expit(logit(value) + reach)))
    assert told.method == "DeLong within folds on the logit scale"


@pytest.mark.parametrize(("num_folds", "sizes", "auc"), [(5, (10, 16), 0.9), (5, (4, 4), 0.8), (10, (1, 5), 0.75)])
def test_interval_covers_the_planted_auc_whatever_the_offsets(num_folds: int, sizes: tuple[int, int], auc: float):
    rng = np.random.default_rng(3)
    labels, folds = folds_of(num_folds, *sizes)
    covered, values, pooled = [], [], []
    for _ in range(300):
        scores = planted_scores(labels, folds, auc, rng)
        told = metrics.auc_interval(labels, scores, folds=folds, resamples=100)
        covered.append(told.low <= auc <= told.high)
        values.append(told.value)
        pooled.append(metrics.auc(labels, scores))
    assert 0.93 <= np.mean(covered) <= 1.0
    assert np.mean(values) == pytest.approx(auc, abs=3 * np.std(values) / np.sqrt(300))
    assert np.mean(pooled) < auc - 0.08  # the bias of one ranking over all folds


def test_overlapping_test_sets_are_covered_where_a_slide_counts_as_one_observation():
    """Monte-Carlo repeats: 8 models score random quarters of 60 slides; slides without groups would count twice."""
    rng = np.random.default_rng(4)
    auc, covered, naive = 0.8, [], []
    truth = np.repeat([1, 0], 30)
    for _ in range(300):
        evidence = rng.normal(size=60) + np.sqrt(2) * norm.ppf(auc) * truth
        drawn = [np.concatenate([rng.choice(30, 8, False), 30 + rng.choice(30, 8, False)]) for _ in range(8)]
        slides, folds = np.concatenate(drawn), np.repeat(np.arange(8), 16)
        labels, scores = truth[slides], evidence[slides] + 3 * rng.normal(size=8)[folds]
        for groups, told in ((slides, covered), (None, naive)):
            found = metrics.auc_interval(labels, scores, groups=groups, folds=folds, resamples=100)
            told.append(found.low <= auc <= found.high)
    assert 0.92 <= np.mean(covered) <= 0.98
    assert np.mean(naive) < 0.85


def test_paired_test_within_folds_rejects_equal_methods_about_as_often_as_it_says():
    rng = np.random.default_rng(5)
    labels, folds = folds_of(5, 8, 8)
    equal, better = [], []
    for _ in range(250):
        a, b = (planted_scores(labels, folds, 0.75, rng) for _ in range(2))
        c = planted_scores(labels, folds, 0.92, rng)
        equal.append(metrics.paired_auc_test(labels, a, b, folds=folds, resamples=100).p_value < 0.05)
        better.append(metrics.paired_auc_test(labels, c, b, folds=folds, resamples=100).p_value < 0.05)
    assert 0.01 <= np.mean(equal) <= 0.08
    assert np.mean(better) > 0.6


def test_bootstrap_of_folds_agrees_with_delong_and_with_counting():
    rng = np.random.default_rng(6)
    labels, folds = folds_of(4, 15, 20)
    scores = planted_scores(labels, folds, 0.8, rng)
    told = metrics.auc_interval(labels, scores, folds=folds)
    assert told.agree, told.statement
    values = bootstrap(lambda weights: weights, labels, np.arange(len(labels)), 100, 0)
    drawn = np.repeat(np.arange(len(labels)), values[0].astype(int))
    expected = mean_within_folds(labels[drawn], scores[drawn], folds[drawn])
    assert resampled_auc(labels, scores, folds)(values)[0] == pytest.approx(expected)


def test_perfect_folds_have_an_interval_with_width():
    labels, folds = folds_of(5, 3, 4)
    scores = labels + 10.0 * folds
    told = metrics.auc_interval(labels, scores, folds=folds)
    assert (told.value, told.high) == (1.0, 1.0)
    one_fold = metrics.auc_interval(labels[:7], scores[:7])
    one_ranking = metrics.auc_interval(labels, labels.astype(float))
    assert one_fold.low < told.low < one_ranking.low < 1  # pairs within folds tell less than all pairs
    repeated = metrics.auc_interval(labels, scores, folds=folds, groups=np.tile(np.arange(7), 5))
    assert repeated.low == one_fold.low  # the same seven slides five times


def test_a_class_counts_in_the_folds_in_which_it_occurs():
    rng = np.random.default_rng(7)
    labels = np.array([0, 1, 2, 0, 1, 2, 0, 1, 0, 1])
    folds = np.array([0] * 6 + [1] * 4)
    scores = rng.normal(size=(10, 3))
    told = metrics.multiclass_auc(labels, scores, folds=folds, resamples=100)
    expected = [mean_within_folds((labels == k).astype(np.int64), scores[:, k], folds) for k in range(3)]
    assert [one.value for one in told.per_class] == pytest.approx(expected)
    assert told.macro.value == pytest.approx(np.mean(expected))
    assert np.isfinite([told.macro.low, told.macro.high]).all()


def test_folds_of_one_class_alone_cannot_be_ranked():
    with pytest.raises(MetricError, match="no fold of 2"):
        metrics.auc([1, 1, 0, 0], [0.9, 0.8, 0.1, 0.2], folds=[0, 0, 1, 1])
