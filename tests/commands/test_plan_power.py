"""`plan --power` counts the test patients of the study's own splits."""

from __future__ import annotations

from pathlib import Path

import pytest

from selfvitmil.commands.power import AUCS, power
from selfvitmil.errors import ConfigError
from selfvitmil.metrics.power import TestSet, expected_auc_interval
from selfvitmil.rendering import render
from selfvitmil.study import CohortSource, open_study


def study_of(tmp_path: Path, labels: list[str], parts: list[str] | None = None, /, **train: object):
    """Two slides per patient."""
    lines = ["slide,path,label,patient,split"]
    for k, label in enumerate(labels):
        part = parts[k] if parts else ""
        lines += [f"s{k}{side},s{k}{side}.svs,{label},p{k},{part}" for side in "ab"]
    (tmp_path / "c.csv").write_text("\n".join(lines) + "\n")
    return open_study(tmp_path / "study", {"train": train}, CohortSource(tmp_path / "c.csv"))


def test_folds_test_every_patient_once(tmp_path: Path):
    found = power(study_of(tmp_path, ["normal"] * 20 + ["tumor"] * 10, folds=5))
    (own,) = found.classes
    assert own.positive == "tumor"
    assert found.num_sets == 5
    assert [(row.num_positive, row.num_negative) for row in own.rows] == [(10, 20), (20, 40), (40, 80), (100, 200)]
    expected = expected_auc_interval(AUCS[0], [TestSet(2, 4)] * 5)
    assert (own.rows[0].aucs[0].low, own.rows[0].aucs[0].high) == pytest.approx((expected.low, expected.high))
    widths = [row.aucs[0].high - row.aucs[0].low for row in own.rows]
    assert widths == sorted(widths, reverse=True)
    words = render(found)
    assert len(words.table) == 5
    assert not (tmp_path / "study").exists()


def test_given_test_set_is_counted_alone(tmp_path: Path):
    labels = ["normal", "tumor"] * 12
    found = power(study_of(tmp_path, labels, ["train"] * 16 + ["test"] * 8))
    assert next((row.num_positive, row.num_negative) for row in found.classes[0].rows) == (4, 4)


def test_several_classes_are_each_shown_against_the_rest(tmp_path: Path):
    found = power(study_of(tmp_path, ["a", "b", "c"] * 6, folds=2), width=0.2)
    assert [own.positive for own in found.classes] == ["a", "b", "c"]
    assert (found.classes[0].rows[0].num_positive, found.classes[0].rows[0].num_negative) == (6, 12)
    assert found.classes[0].needed[0] > found.classes[0].needed[-1]


def test_overlapping_repeats_are_no_further_patients(tmp_path: Path):
    found = power(study_of(tmp_path, ["normal", "tumor"] * 10, None, split="monte-carlo", folds=8))
    assert found.num_sets == 1
    assert (found.classes[0].rows[0].num_positive, found.classes[0].rows[0].num_negative) == (2, 2)
    assert found.notes


@pytest.mark.parametrize("width", [0.0, 1.0, -1.0])
def test_impossible_widths_are_usage_errors(tmp_path: Path, width: float):
    with pytest.raises(ConfigError) as caught:
        power(study_of(tmp_path, ["normal", "tumor"] * 10), width=width)
    assert caught.value.code == "invalid-width"
