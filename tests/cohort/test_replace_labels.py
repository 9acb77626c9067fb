"""Labels of a study replaced by those of another table: only on request, and never in silence."""

from __future__ import annotations

from pathlib import Path

import pytest

from selfvitmil.cohort import read_cohort
from selfvitmil.errors import CohortError, ConfigError
from selfvitmil.settings import StudySettings
from selfvitmil.study import CohortSource, Study


@pytest.fixture
def study(tmp_path: Path) -> Path:
    for name in "abc":
        (tmp_path / f"{name}.svs").write_bytes(b"")
    root = tmp_path / "study"
    root.mkdir()
    (root / "cohort.csv").write_text("slide,path,label\na,../a.svs,tumor\nb,../b.svs,normal\nc,../c.svs,normal\n")
    (tmp_path / "new.csv").write_text("slide,grade\na,high\nb,low\n")
    return root


def source(study: Path, **changes: bool) -> CohortSource:
    return CohortSource(labels=study.parent / "new.csv", label_column="grade", **changes)


def test_other_labels_contradict_unless_they_replace(study: Path):
    with pytest.raises(CohortError, match=r"a \(label: tumor or high\).*--replace-labels.*--train\.target") as found:
        _ = Study(study, StudySettings(), source(study)).cohort
    assert found.value.code == "conflicting-values"
    replacing = Study(study, StudySettings(), source(study, replace_labels=True))
    assert {row.slide: row.label for row in replacing.cohort.rows} == {"a": "high", "b": "low", "c": "normal"}
    replacing.store_cohort()
    assert {row.slide: row.label for row in read_cohort(study / "cohort.csv").rows}["a"] == "high"


def test_replaced_labels_are_counted(study: Path):
    cohort = read_cohort(study / "cohort.csv", study.parent / "new.csv", label_column="grade", replace_labels=True)
    assert any("2 labels were replaced by others" in warning for warning in cohort.warnings)


def test_a_table_that_contradicts_itself_stays_an_error(study: Path):
    (study.parent / "new.csv").write_text("slide,grade\na,high\na,low\n")
    with pytest.raises(CohortError, match=r"a \(label: high or low\)"):
        _ = Study(study, StudySettings(), source(study, replace_labels=True)).cohort


def test_the_flag_needs_a_table(study: Path):
    with pytest.raises(ConfigError, match="--replace-labels without a table"):
        _ = Study(study, StudySettings(), CohortSource(replace_labels=True)).cohort
