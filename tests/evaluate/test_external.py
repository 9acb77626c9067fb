"""External validation: calibration, change against the model's own slides, comparison of two models."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.special import expit, logit
from scipy.stats import ttest_ind
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

from evaluate.test_subgroups import CLASSES, EVALUATE, predictions
from helpers.error_codes import has_code
from selfvitmil.errors import MetricError
from selfvitmil.evaluate.external import (
    Moments,
    ReferenceScores,
    calibration_of,
    changes_against,
    compare_models,
    difference_of,
    difference_of_means,
    reference_scores,
    validate_predictions,
)
from selfvitmil.metrics import paired_auc_test, wilson


def planted(n: int, shift: float = 0.0, slope: float = 1.0, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Labels and probabilities whose true calibration is known: logit(P) = shift + slope * logit(probability)."""
    rng = np.random.default_rng(seed)
    given = rng.normal(0, 1.5, n)
    return rng.binomial(1, expit(shift + slope * given)), expit(given)


def test_slope_and_calibration_in_the_large_agree_with_other_solvers():
    label, probability = planted(400, -0.7, 0.6)
    found = calibration_of(label, probability)
    fitted = LogisticRegression(C=np.inf, tol=1e-10, max_iter=1000).fit(logit(probability)[:, None], label)
    assert found.slope is not None
    assert found.slope.value == pytest.approx(fitted.coef_[0, 0], rel=1e-5)
    large = brentq(lambda a: (expit(a + logit(probability)) - label).sum(), -5, 5)
    assert found.in_the_large is not None
    assert found.in_the_large.value == pytest.approx(large, abs=1e-8)
    assert found.in_the_large.high < 0  # probabilities are too high
    assert found.slope.high < 1  # and too extreme
    assert found.brier == pytest.approx(((probability - label) ** 2).mean())


def test_limits_cover_the_planted_calibration_in_most_studies():
    covered = np.zeros(2)
    for seed in range(300):
        found = calibration_of(*planted(150, 0.5, 0.8, seed))
        assert found.slope is not None
        assert found.in_the_large is not None
        covered[0] += found.slope.low <= 0.8 <= found.slope.high
    assert 0.91 <= covered[0] / 300 <= 0.98


def test_limits_keep_slides_of_a_patient_together():
    label, probability = planted(100)
    alone = calibration_of(label, probability)
    copied = calibration_of(np.repeat(label, 4), np.repeat(probability, 4), groups=np.repeat(np.arange(100), 4))
    assert alone.slope is not None and copied.slope is not None  # noqa: PT018
    assert copied.slope.value == pytest.approx(alone.slope.value)
    assert copied.slope.high - copied.slope.low == pytest.approx(alone.slope.high - alone.slope.low, rel=1e-6)


def test_what_is_undefined_has_a_reason():
    separated = calibration_of([0, 0, 1, 1], [0.1, 0.2, 0.8, 0.9])
    assert separated.slope is None
    assert "slope" in separated.reasons
    assert separated.in_the_large is not None
    assert calibration_of([1, 1], [0.4, 0.6]).in_the_large is None


def test_change_of_means_is_welchs_and_of_proportions_newcombes():
    rng = np.random.default_rng(0)
    now, before = rng.normal(0.4, 0.1, 30), rng.normal(0.5, 0.3, 12)
    of_now, of_before = Moments.of(now), Moments.of(before)
    assert of_now is not None and of_before is not None  # noqa: PT018
    expected = ttest_ind(now, before, equal_var=False).confidence_interval(0.95)
    assert difference_of_means(of_now, of_before, 0.95) == pytest.approx((expected.low, expected.high))
    # Newcombe (1998), Table II, example (a), method 10: 56/70 - 48/80.
    assert difference_of(wilson(56, 70), wilson(48, 80)) == pytest.approx((0.0524, 0.3339), abs=5e-5)
    assert difference_of(wilson(56, 70), wilson(48, 80, 0.9)) is None


def test_a_shift_of_all_scores_is_found_as_drift_and_the_same_cohort_has_none():
    label, score = planted(200, seed=1)
    before = reference_scores(predictions(label, score), "test", CLASSES, EVALUATE)
    assert before is not None
    assert ReferenceScores.from_json(json.loads(json.dumps(before.to_json()))) == before
    same = validate_predictions(predictions(label, score), CLASSES, EVALUATE, references=[before])
    assert same.changes
    assert all(change.difference == 0 for change in same.changes)
    assert same.warnings == ()
    lower = validate_predictions(predictions(label, expit(logit(score) - 2)), CLASSES, EVALUATE, references=[before])
    found = {change.metric: change for change in lower.changes}
    assert found["auc"].difference == pytest.approx(0)
    assert found["mean score of tumor"].is_significant
    assert found["sensitivity"].difference < 0
    assert lower.slide.calibration is not None
    assert lower.slide.calibration.in_the_large is not None
    assert lower.slide.calibration.in_the_large.low > 0
    assert any("probabilities are too low" in text for text in lower.warnings)


def test_validation_slides_are_a_reference_of_their_own():
    label, score = planted(40)
    rows = [replace(row, part="val") for row in predictions(label, score)]
    found = reference_scores(rows, "val", CLASSES, EVALUATE)
    assert found is not None
    assert found.part == "validation"
    assert found.metrics["auc"].value == pytest.approx(roc_auc_score(label, score))
    assert reference_scores(rows, "test", CLASSES, EVALUATE) is None
    assert changes_against(found, found, 0.95)


def test_two_models_are_compared_on_the_slides_that_both_have():
    label, score = planted(80)
    other = np.clip(score + np.random.default_rng(3).normal(0, 0.3, 80), 0, 1)
    ours, theirs = predictions(label, score)[::-1], predictions(label, other)[10:]
    found = compare_models(ours, theirs, ("a", "b"), "slide", EVALUATE)
    expected = paired_auc_test(label[10:], score[10:], other[10:], resamples=100)
    assert found.num == 70
    assert (found.value, found.other_value) == pytest.approx((expected.auc_a, expected.auc_b))
    assert found.p_value == pytest.approx(expected.p_value)
    assert found.difference.low == pytest.approx(expected.difference.low)
    with pytest.raises(MetricError, check=has_code("no-common-slides")):
        compare_models(ours[-3:], theirs[5:], ("a", "b"), "slide", EVALUATE)


def test_by_patient_the_highest_score_counts():
    label, score = planted(60)
    patients = [f"p{k // 2}" for k in range(60)]
    found = validate_predictions(predictions(label, score, patients=patients), CLASSES, EVALUATE)
    assert found.patient is not None
    truth, highest = label.reshape(30, 2).max(axis=1), score.reshape(30, 2).max(axis=1)
    assert found.patient.interval("auc").value == pytest.approx(roc_auc_score(truth, highest))
    assert found.slide.interval("auc").value == pytest.approx(roc_auc_score(label, score))
    assert found.patient.num == 30
    assert validate_predictions(predictions(label, score), CLASSES, EVALUATE).patient is None
