"""A study's cohort: what the flags that name slides and labels add to it, and that none of them is ignored."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from helpers.cli import rows_of, selfvitmil
from selfvitmil.cohort import read_cohort
from selfvitmil.errors import ConfigError, SelfVitMilError
from selfvitmil.settings import StudySettings
from selfvitmil.study import CohortSource, Study


@pytest.fixture
def study(tmp_path: Path) -> Path:
    """Three slides, one of them labelled; their files need not exist."""
    folder = tmp_path / "study"
    folder.mkdir()
    (folder / "cohort.csv").write_text("slide,path,label\na,a.svs,normal\nb,b.svs,\nc,c.svs,\n")
    return folder


def opened_with(study: Path, source: CohortSource) -> Study:
    return Study(study, StudySettings(), source)


def table(study: Path, text: str) -> Path:
    path = study.parent / "labels.csv"
    path.write_text(text)
    return path


@pytest.mark.parametrize("named", [False, True], ids=["alone", "beside the study's own table"])
def test_labels_fill_the_studys_own_cohort_and_it_is_said(study: Path, named: bool):
    labels = table(study, "slide,label\nb.svs,tumor\nc,normal\n")
    source = CohortSource(study / "cohort.csv" if named else None, labels)
    before = (study / "cohort.csv").read_bytes()
    opened = opened_with(study, source)
    assert [row.label for row in opened.cohort.rows] == ["normal", "tumor", "normal"]
    assert "cohort.csv: label filled: b, c" in opened.cohort_notes
    assert (study / "cohort.csv").read_bytes() == before  # looked at, and not stored
    opened.store_cohort()
    assert {row["slide"]: row["label"] for row in rows_of(study / "cohort.csv")} == {
        "a": "normal",
        "b": "tumor",
        "c": "normal",
    }
    stored = (study / "cohort.csv").stat().st_mtime_ns
    again = opened_with(study, source)
    again.store_cohort()
    assert again.cohort_notes == ()  # the same again changes nothing
    assert (study / "cohort.csv").stat().st_mtime_ns == stored


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("slide,label\na,tumor\n", r"a \(label: normal or tumor\)"),
        ("slide,label\nd,tumor\n", r"labels of unknown slides: .*\(d\)"),
        ("slide,isMSIH,grade\nb,1,2\n", "Name it with --label-column"),
        (None, "labels.csv: no such file"),
    ],
)
def test_labels_that_do_not_fit_are_refused_and_nothing_is_stored(study: Path, text: str | None, says: str):
    labels = study.parent / "labels.csv" if text is None else table(study, text)
    before = (study / "cohort.csv").read_bytes()
    with pytest.raises(SelfVitMilError, match=says):
        opened_with(study, CohortSource(labels=labels)).store_cohort()
    assert (study / "cohort.csv").read_bytes() == before


def test_a_table_that_only_adds_a_column_says_so_and_that_labels_stay(study: Path):
    (study / "cohort.csv").write_text("slide,path,label\na,a.svs,normal\nb,b.svs,tumor\n")
    source = CohortSource(labels=table(study, "slide,site name\na,x\nb,y\n"))
    opened = opened_with(study, source)
    assert opened.cohort_notes[0] == "cohort.csv: site name filled: a, b"
    assert "labels are as they were" in opened.cohort_notes[1]
    assert "--train.target 'site name'" in opened.cohort_notes[1]
    assert [row.label for row in opened.cohort.rows] == ["normal", "tumor"]
    opened.store_cohort()
    assert opened_with(study, source).cohort_notes == ()
    replaced = replace(source, label_column="site name", replace_labels=True)
    opened = opened_with(study, replaced)
    assert [row.label for row in opened.cohort.rows] == ["x", "y"]
    assert opened.cohort_notes[0] == "cohort.csv: label filled or replaced: a, b"
    assert not [note for note in opened.cohort_notes if "as they were" in note]


def test_a_long_list_of_slides_is_cut(study: Path):
    rows = "".join(f"s{k},s{k}.svs,\n" for k in range(30))
    (study / "cohort.csv").write_text(f"slide,path,label\n{rows}")
    labels = table(study, "slide,label\n" + "".join(f"s{k},x\n" for k in range(30)))
    assert opened_with(study, CohortSource(labels=labels)).cohort_notes[0].endswith("s8, s9 and 20 more")


def test_the_column_of_the_label_can_be_named(study: Path):
    labels = table(study, "slide,isMSIH,grade\nb,1,2\n")
    opened_with(study, CohortSource(labels=labels, label_column="grade")).store_cohort()
    assert read_cohort(study / "cohort.csv")["b"].label == "2"


def test_flags_on_how_to_read_a_table_need_one(study: Path):
    with pytest.raises(ConfigError, match=r"--label-column grade without a table.*Give the table with --labels"):
        opened_with(study, CohortSource(label_column="grade")).store_cohort()
    with pytest.raises(ConfigError, match=r"--slides-folder slides together with --labels.*one after the other"):
        opened_with(study, CohortSource(labels=Path("labels.csv"), slides_folder=Path("slides"))).store_cohort()


def test_the_command_takes_labels_for_a_study_that_has_its_slides(study: Path):
    labels = table(study, "slide,label\nb,tumor\nc,tumor\n")
    done = selfvitmil("check", study, "--labels", labels, "--workers", 0)
    assert done.returncode == 3  # there are no such files
    assert "cohort.csv: label filled: b, c" in done.stdout
    assert [row["label"] for row in rows_of(study / "cohort.csv")] == ["normal", "tumor", "tumor"]
