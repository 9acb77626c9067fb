"""Decision curves and prediction sets of a method: thresholds from validation, coverage on test, files."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from helpers.cli import rows_of
from helpers.error_codes import has_code
from selfvitmil import metrics
from selfvitmil.errors import MetricError
from selfvitmil.evaluate.decisions import (
    decisions_of,
    package_sets,
    packaged_threshold,
    set_of_slide,
    set_threshold,
    useful_range,
)
from selfvitmil.evaluate.external import validate_predictions
from selfvitmil.evaluate.predictions import Prediction
from selfvitmil.metrics import ConformalThreshold, DecisionCurve
from selfvitmil.report.analyses import decisions_data
from selfvitmil.settings import EvaluateSettings

EVALUATE = EvaluateSettings(bootstrap=200)
TWO, THREE = ("normal", "tumor"), ("a", "b", "c")


def predictions(
    classes: tuple[str, ...] = TWO, *, val: int = 60, test: int = 200, slides_each: int = 1, split: str = "given",
    sharpness: float = 1.0, seed: int = 0,
) -> list[Prediction]:  # fmt: skip
    """Rows of an ensemble whose probabilities are right: the label is drawn from them."""
    generator = np.random.default_rng(seed)
    rows: list[Prediction] = []
    parts: tuple[tuple[Literal["val", "test"], int], ...] = (("val", val), ("test", test))
    for part, number in parts:
        for patient in range(number):
            odds = np.exp(sharpness * generator.normal(size=len(classes)))
            chances = odds / odds.sum()
            label = int(generator.choice(len(classes), p=chances))
            score = (float(chances[1]),) if len(classes) == 2 else tuple(chances.tolist())
            for slide in range(slides_each):
                name = f"{split}_{part}{patient:03d}"
                rows.append(
                    Prediction(
                        "m",
                        f"{name}_{slide}",
                        name,
                        split,
                        part,
                        label,
                        None,
                        score,
                        None,
                        None,
                        None,
                        0.5,
                        "fixed",
                        int(np.argmax(chances)),
                        "honest",
                    )
                )
    return rows


@pytest.mark.parametrize("classes", [TWO, THREE])
def test_sets_follow_the_definition_by_a_slow_loop(classes: tuple[str, ...]):
    rows = predictions(classes)
    found = decisions_of(rows, classes, EVALUATE)
    info = found.to_json(classes, EVALUATE)["prediction_sets"]

    def chances(row: Prediction) -> list[float]:
        return [1 - row.score[0], row.score[0]] if len(classes) == 2 else list(row.score)

    val, test = ([row for row in rows if row.part == part] for part in ("val", "test"))
    misfits = sorted(1 - chances(row)[row.label] for row in val)
    limit = misfits[math.ceil(0.9 * (len(val) + 1)) - 1]
    sets = [[k for k in range(len(classes)) if 1 - chances(row)[k] <= limit + 1e-12] for row in test]
    assert info["thresholds"][0]["quantile"] == pytest.approx(limit)
    assert info["coverage"]["value"] == pytest.approx(
        np.mean([row.label in own for row, own in zip(test, sets, strict=True)])
    )
    assert info["mean_size"]["value"] == pytest.approx(np.mean([len(own) for own in sets]))
    assert info["coverage"]["low"] < 0.9 < info["coverage"]["high"]
    assert info["mean_size"]["low"] < info["mean_size"]["value"] < info["mean_size"]["high"]


def test_slides_of_a_patient_count_once():
    one, three = predictions(), predictions(slides_each=3)
    for_one, for_three = (decisions_of(rows, TWO, EVALUATE).to_json(TWO, EVALUATE) for rows in (one, three))
    assert for_three["prediction_sets"]["level"] == "patient"
    for key in ("coverage", "num", "mean_size", "thresholds"):
        assert for_three["prediction_sets"][key] == for_one["prediction_sets"][key]


def test_test_labels_do_not_move_the_threshold_of_sets():
    rows = predictions()
    flipped = [replace(row, label=1 - row.label) if row.part == "test" else row for row in rows]
    thresholds = [decisions_of(own, TWO, EVALUATE).sets for own in (rows, flipped)]
    assert thresholds[0] is not None
    assert thresholds[1] is not None
    assert thresholds[0].thresholds == thresholds[1].thresholds
    assert (thresholds[0].sets_NC == thresholds[1].sets_NC).all()


@pytest.mark.parametrize(("coverage", "needed"), [(0.9, 9), (0.95, 19), (0.5, 1)])
def test_too_few_validation_slides_are_said(coverage: float, needed: int):
    rows = predictions(val=needed)
    evaluate = EvaluateSettings(bootstrap=200, coverage=coverage)
    found = decisions_of(rows, TWO, evaluate)
    assert found.sets is not None
    if needed > 1:
        fewer = [row for row in rows if row.slide != "given_val000_0"]
        found = decisions_of(fewer, TWO, evaluate)
        assert found.sets is None
        assert f"need {needed}" in found.reasons["prediction_sets"]
        section = decisions_data(found.to_json(TWO, evaluate))
        assert section is not None
        assert any(f"need {needed}" in text for text in section.missing)
        val = [row for row in fewer if row.part == "val"]
        with pytest.raises(MetricError, check=has_code("too-few-validation-slides")):
            set_threshold(val, TWO, coverage, "slide")


def test_each_split_has_a_threshold_of_its_own_and_one_may_have_none():
    rows = [*predictions(split="fold0"), *predictions(split="fold1", val=4, seed=1)]
    found = decisions_of(rows, TWO, EVALUATE)
    assert found.sets is not None
    assert list(found.sets.thresholds) == ["fold0"]
    assert len(found.sets.samples) == 200
    assert list(found.reasons) == ["prediction_sets of fold1"]
    overlapping = [*rows, *(replace(row, split="fold2") for row in rows if row.split == "fold0")]
    assert decisions_of(overlapping, TWO, EVALUATE).curves is None


def test_no_validation_slides_no_sets():
    rows = [row for row in predictions() if row.part == "test"]
    assert "no validation slides" in decisions_of(rows, TWO, EVALUATE).reasons["prediction_sets"]


def test_curve_is_that_of_the_class_against_the_rest():
    rows = predictions(THREE)
    found = decisions_of(rows, THREE, EVALUATE)
    assert found.curves is not None
    test = [row for row in rows if row.part == "test"]
    for k, name in enumerate(THREE):
        at = int(np.argmin(np.abs(found.curves[name].thresholds - 0.3)))
        hits = sum(row.score[k] >= 0.3 and row.label == k for row in test)
        alarms = sum(row.score[k] >= 0.3 and row.label != k for row in test)
        assert found.curves[name].model[at] == pytest.approx((hits - alarms * 0.3 / 0.7) / len(test))


def test_useful_range_is_where_the_model_beats_both_others():
    thresholds, zero = np.array([0.1, 0.2, 0.3, 0.4, 0.5]), np.zeros(5)
    curve = DecisionCurve(
        thresholds, np.array([0.5, 0.5, 0.4, 0.3, 0.0]), zero, zero, np.array([0.5, 0.4, 0.3, -1, -2])
    )
    assert useful_range(curve) == (0.2, 0.4)
    assert useful_range(replace(curve, model=zero)) is None


def test_files_list_every_patient_with_the_likeliest_class_first(tmp_path: Path):
    rows = predictions(THREE, sharpness=2.0)
    found = decisions_of(rows, THREE, EVALUATE)
    found.write(tmp_path, THREE)
    written = rows_of(tmp_path / "prediction_sets.csv")
    by_slide = {row.slide: row for row in rows}
    assert len(written) == 200
    for line in written:
        own, row = line["set"].split("; ") if line["set"] else [], by_slide[line["slide"]]
        ranked = sorted(THREE, key=lambda name, row=row: -row.score[THREE.index(name)])
        assert own == ranked[: len(own)]
        assert line["covered"] == ("yes" if line["label"] in own else "no")
    assert {line["class"] for line in rows_of(tmp_path / "decision_curve.csv")} == set(THREE)
    replace(found, sets=None).write(tmp_path, THREE)
    assert not (tmp_path / "prediction_sets.csv").exists()


def test_package_carries_the_threshold_or_the_reason():
    val = [row for row in predictions() if row.part == "val"]
    info = package_sets(val, TWO, 0.9)
    threshold, why = packaged_threshold(info)
    assert threshold == set_threshold(val, TWO, 0.9, "slide")
    assert not why
    assert not {row.slide for row in val} & set(map(str, info.values()))
    threshold, why = packaged_threshold(package_sets(val[:5], TWO, 0.9))
    assert threshold is None
    assert "need 9" in why
    assert "earlier version" in packaged_threshold(None)[1]
    assert metrics.conformal_threshold([0, 1], [0.4, 0.6], 0.5).count == 2


def test_external_validation_uses_the_threshold_of_the_package_and_warns_where_coverage_falls():
    rows, elsewhere = predictions(val=100), predictions(seed=5, split="given")
    threshold, _ = packaged_threshold(package_sets([row for row in rows if row.part == "val"], TWO, 0.9))
    test = [row for row in elsewhere if row.part == "test"]
    wrong = [replace(row, label=int(row.score[0] < 0.5)) for row in test]
    for labelled, falls in ((test, False), (wrong, True)):
        found = validate_predictions(labelled, TWO, EVALUATE, sets=(threshold, ""))
        assert found.decisions_json is not None
        sets = found.decisions_json["prediction_sets"]
        assert sets["thresholds"][0]["quantile"] == threshold.quantile  # pyright: ignore[reportOptionalMemberAccess]
        assert sets["wanted"] == 0.9
        assert any("prediction sets" in text for text in found.warnings) is falls
        assert found.to_json()["decisions"] == found.decisions_json
    without = validate_predictions(test, TWO, EVALUATE, sets=packaged_threshold(None))
    assert without.decisions_json is not None
    assert without.decisions_json["prediction_sets"] is None
    assert "earlier version" in without.decisions_json["reasons"]["prediction_sets"]


@pytest.mark.parametrize(("score", "expected"), [(0.1, ("n",)), (0.45, ("n", "p")), (0.55, ("p", "n")), (0.9, ("p",))])
def test_the_set_of_a_slide_has_the_classes_that_are_likely_enough(score: float, expected: tuple[str, ...]):
    threshold = ConformalThreshold(0.6, 0.1, "lac", 20)
    assert set_of_slide((score,), ("n", "p"), threshold) == expected
    assert set_of_slide((1 - score, score), ("n", "p"), threshold) == expected


def test_a_set_may_be_empty():
    assert set_of_slide((0.5,), ("n", "p"), ConformalThreshold(0.3, 0.5, "lac", 20)) == ()
