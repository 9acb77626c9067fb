"""Metrics of subgroups, and the test of whether they differ."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import chi2
from sklearn.metrics import roc_auc_score

from helpers.error_codes import has_code
from selfvitmil.errors import CohortError, MetricError
from selfvitmil.evaluate.predictions import Prediction
from selfvitmil.evaluate.subgroups import heterogeneity, subgroup_tables, write_subgroups
from selfvitmil.metrics import Interval, wilson
from selfvitmil.settings import EvaluateSettings

CLASSES = ("normal", "tumor")
EVALUATE = EvaluateSettings(bootstrap=100)


def predictions(
    label: np.ndarray, score: np.ndarray, *, patients: list[str] | None = None, splits: list[str] | None = None
) -> list[Prediction]:
    return [
        Prediction(
            "mean", f"s{k}", patients[k] if patients else f"p{k}", splits[k] if splits else "given", "test",
            int(label[k]), None, (float(score[k]),), None, None, None, 0.5, "fixed", int(score[k] >= 0.5), "honest",
        )
        for k in range(len(label))
    ]  # fmt: skip


def cohort(n: int = 60, seed: int = 0) -> tuple[np.ndarray, np.ndarray, list[str]]:
    rng = np.random.default_rng(seed)
    label = rng.integers(0, 2, n)
    score = np.clip(0.25 + 0.4 * label + rng.normal(0, 0.2, n), 0, 1)
    return label, score, [["A", "B", "C"][k % 3] for k in range(n)]


def test_metrics_of_a_subgroup_are_those_of_its_slides_alone():
    label, score, site = cohort()
    (table,) = subgroup_tables(
        predictions(label, score), {"site": {f"s{k}": site[k] for k in range(60)}}, CLASSES, EVALUATE
    )
    assert [group.value for group in table.groups] == ["A", "B", "C"]
    for group in table.groups:
        own = np.array(site) == group.value
        y, p = label[own], score[own]
        assert group.num_slides == own.sum()
        assert group.counts == {"normal": (y == 0).sum(), "tumor": (y == 1).sum()}
        auc, sensitivity, specificity = (group.metrics[name] for name in ("auc", "sensitivity", "specificity"))
        assert auc is not None and sensitivity is not None and specificity is not None  # noqa: PT018
        assert auc.value == pytest.approx(roc_auc_score(y, p))
        assert sensitivity.value == pytest.approx((p[y == 1] >= 0.5).mean())
        assert specificity.value == pytest.approx((p[y == 0] < 0.5).mean())
        assert group.brier == pytest.approx(((p - y) ** 2).mean())
        assert group.mean_score == pytest.approx(p.mean())
    assert {test.metric for test in table.tests} == {"auc", "sensitivity", "specificity"}
    assert table.warnings == ()


def test_q_with_symmetric_limits_is_cochrans():
    values, errors = np.array([0.7, 0.8, 0.9]), np.array([0.02, 0.05, 0.04])
    z = 1.959963984540054
    groups = [Interval(v, v - z * e, v + z * e, "") for v, e in zip(values, errors, strict=True)]
    weight = 1 / errors**2
    mean = (weight * values).sum() / weight.sum()
    q = (weight * (values - mean) ** 2).sum()
    assert heterogeneity(groups) == pytest.approx((mean, q, chi2.sf(q, 2)), rel=1e-5)


def test_equal_and_perfect_values_do_not_differ_and_one_is_too_few():
    assert heterogeneity([wilson(10, 10), wilson(30, 30)]) == (1.0, 0.0, 1.0)
    perfect_and_poor = heterogeneity([wilson(50, 50), wilson(20, 50)])
    assert perfect_and_poor[2] < 1e-6
    with pytest.raises(MetricError, check=has_code("too-few-subgroups")):
        heterogeneity([wilson(1, 2)])


def test_the_test_keeps_its_level_when_groups_are_equal():
    rng = np.random.default_rng(0)
    rejected = [
        heterogeneity([wilson(int(rng.binomial(30, 0.8)), 30) for _ in range(3)])[2] < 0.05 for _ in range(1000)
    ]
    assert 0.02 <= np.mean(rejected) <= 0.06


def test_a_site_where_the_model_fails_is_warned_about():
    rng = np.random.default_rng(1)
    label, score, site = cohort(120)
    failing = np.array(site) == "C"
    score[failing] = rng.random(failing.sum())
    values = {f"s{k}": site[k] for k in range(120)}
    (table,) = subgroup_tables(predictions(label, score), {"site": values}, CLASSES, EVALUATE)
    assert any("AUC differs" in text and "C " in text for text in table.warnings)


def test_slides_of_several_splits_are_ranked_within_their_split():
    label, score, site = cohort(80)
    splits = [f"fold{k % 2}" for k in range(80)]
    shifted = score + np.array([5.0 * (split == "fold1") for split in splits])
    values = {f"s{k}": site[k] for k in range(80)}
    rows = [[own.metrics["auc"] for own in _table(label, given, splits, values).groups] for given in (score, shifted)]
    assert rows[0] == rows[1]


def _table(label: np.ndarray, score: np.ndarray, splits: list[str], values: dict[str, str]):
    given = predictions(label, np.clip(score / 10, 0, 1), splits=splits)
    return subgroup_tables(given, {"site": values}, CLASSES, EVALUATE)[0]


def test_patients_with_several_slides_are_tested_by_patient():
    label, score, _ = cohort(40)
    label = np.repeat(label[::2], 2)
    patients = [f"p{k // 2}" for k in range(40)]
    values = {f"s{k}": "AB"[k // 20] for k in range(40)}
    by_slide, by_patient = subgroup_tables(
        predictions(label, score, patients=patients), {"site": values}, CLASSES, EVALUATE
    )
    assert (by_slide.level, by_patient.level) == ("slide", "patient")
    assert not by_slide.tests
    assert by_patient.tests
    highest = score.reshape(20, 2).max(axis=1)[:10]
    own = by_patient.groups[0].metrics["auc"]
    assert own is not None
    assert own.value == pytest.approx(roc_auc_score(label[:20:2], highest))


def test_a_site_with_one_class_has_no_auc_and_says_why(tmp_path: Path):
    label, score, _ = cohort(30)
    values = {f"s{k}": "one" if label[k] else ("two" if k % 2 else None) for k in range(30)}
    (table,) = subgroup_tables(predictions(label, score), {"site": values}, CLASSES, EVALUATE)
    assert all(group.metrics["auc"] is None and "auc" in group.reasons for group in table.groups)
    assert table.num_without_value == sum(value is None for value in values.values())
    write_subgroups(tmp_path / "subgroups.csv", [table])
    with (tmp_path / "subgroups.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["column"], row["value"], row["auc"]) for row in rows] == [("site", "one", ""), ("site", "two", "")]
    sensitivity = table.groups[0].metrics["sensitivity"]
    assert sensitivity is not None
    assert float(rows[0]["sensitivity"]) == sensitivity.value


@pytest.mark.parametrize(
    ("values", "code"),
    [({}, "empty-subgroup-column"), ({f"s{k}": f"name{k}" for k in range(60)}, "too-many-subgroups")],
)
def test_columns_that_form_no_subgroups(values: dict[str, str], code: str):
    label, score, _ = cohort()
    with pytest.raises(CohortError, check=has_code(code)):
        subgroup_tables(predictions(label, score), {"site": values}, CLASSES, EVALUATE)
