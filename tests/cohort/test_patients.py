"""Which slides are of one patient: guessed where names tell for sure, else said aloud."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from helpers.cli import selfvitmil
from helpers.cohorts import cohort_file
from helpers.error_codes import has_code
from helpers.planted import write_features
from selfvitmil.cohort import Cohort, SlideRow, guess_patients, read_cohort, with_guessed_patients, write_cohort
from selfvitmil.errors import CohortError
from selfvitmil.settings import StudySettings
from selfvitmil.study import CohortSource, Study

BARCODES = {
    "TCGA-A1-A0SB-01Z-00-DX1.B34C": "TCGA-A1-A0SB",
    "TCGA-A1-A0SB-01Z-00-DX2.77AA": "TCGA-A1-A0SB",
    "tcga-a1-a0sd-11A-01-BS1": "TCGA-A1-A0SD",
}
BLOCKS = {
    "S21-0417_A1_HE": "S21-0417",
    "S21-0417_B12_HE": "S21-0417",
    "S21-0501_A1_HE": "S21-0501",
    "S22-0007_1A_HE_2": "S22-0007",
}


@pytest.mark.parametrize("names", [BARCODES, BLOCKS])
def test_names_that_tell_the_patient_are_read(names: dict[str, str]):
    guess = guess_patients(list(names))
    assert guess is not None
    assert dict(zip(names, guess.patients, strict=True)) == names


@pytest.mark.parametrize(
    "names",
    [
        ["normal_001", "normal_002", "tumor_001"],  # Camelyon16
        ["a1", "a2", "b1"],
        ["normal_A1_HE", "normal_A2_HE", "tumor_A1_HE"],  # no digit: a class, not a patient
        ["2021_A1_HE", "2021_A2_HE", "2022_A1_HE"],  # years
        ["S21_34_HE", "S21_35_HE", "S22_01_HE"],  # cases of a year, not blocks of a patient
        ["S21-0417_A1_HE", "S21-0417_A2_HE", "other"],  # one name does not match
        ["S21-0417_A1_HE", "S21-0501_A1_HE"],  # a patient each: nothing to learn
        [f"lab7_A{k}_HE" for k in range(10)] + ["lab8_A1_HE"],  # a prefix of nearly all slides names no patient
        ["TCGA-A1-A0SB-01Z", "slide_2", "TCGA-A1-A0SB-02Z"],
    ],
)
def test_doubtful_names_are_not_guessed_from(names: list[str]):
    assert guess_patients(names) is None


def test_a_study_stores_the_guess_and_does_not_guess_again(tmp_path: Path):
    study = tmp_path / "study"
    given = cohort_file(tmp_path / "given", list(BARCODES), {"label": ["a", "b", "b"]})
    opened = Study(study, StudySettings(), CohortSource(given))
    cohort, lines = opened.store_cohort(), opened.cohort_notes
    assert {row.slide: row.patient for row in cohort.rows} == BARCODES
    assert any("TCGA barcodes" in line and "column patient" in line for line in lines)
    stored = read_cohort(study / "cohort.csv")
    assert {row.slide: row.patient for row in stored.rows} == BARCODES
    assert Study(study, StudySettings()).cohort_notes == ()


def test_patients_that_are_stated_stay_also_where_each_slide_has_its_own(tmp_path: Path):
    names = list(BARCODES)
    study = tmp_path / "study"
    cohort_file(study, names, {"patient": names})
    opened = Study(study, StudySettings())
    cohort, lines = opened.store_cohort(), opened.cohort_notes
    assert [row.patient for row in cohort.rows] == names
    assert lines == ()
    assert cohort.patient_warning == ""
    write_cohort(tmp_path / "copy.csv", cohort)  # the statement survives writing
    assert all(row.patient_stated for row in read_cohort(tmp_path / "copy.csv").rows)


def test_a_guessed_patient_in_two_splits_is_refused(tmp_path: Path):
    splits = ("train", "test", "test")
    rows = [SlideRow(name, tmp_path, "a", split=split) for name, split in zip(BARCODES, splits, strict=True)]
    with pytest.raises(CohortError, match=r"TCGA-A1-A0SB \(test, train\)", check=has_code("patient-in-several-splits")):
        with_guessed_patients(Cohort(tuple(rows)))


def test_a_table_of_another_case_states_no_patient(tmp_path: Path):
    """A slide found under another spelling must not have its old spelling as patient."""
    slides = tmp_path / "slides"
    slides.mkdir()
    (slides / "Alpha.svs").touch()
    (slides / "Beta.svs").touch()
    (tmp_path / "t.csv").write_text("slide,label\nalpha,x\nbeta,y\n")
    cohort = read_cohort(tmp_path / "t.csv", slides_folder=slides)
    assert [(row.slide, row.patient, row.patient_stated) for row in cohort.rows] == [
        ("Alpha", "Alpha", False),
        ("Beta", "Beta", False),
    ]


@pytest.mark.parametrize("stated", [False, True])
def test_learning_without_a_patient_column_says_so_everywhere(tmp_path: Path, stated: bool):
    generator = np.random.default_rng(0)
    names = [f"s{k:02d}" for k in range(12)]
    for name in names:
        write_features(tmp_path, name, generator.normal(size=(4, 6)))
    columns = {"label": ["no", "yes"] * 6, "split": ["train"] * 8 + ["test"] * 4}
    columns |= {"patient": names} if stated else {}
    table = cohort_file(tmp_path / "given", names, columns)
    flags = ("--train.seeds", 1, "--train.epochs", 1, "--compare.methods", "mean", "--compare.baseline", "mean")
    done = selfvitmil(
        "compare", tmp_path / "study", "--features", tmp_path / "features_vit", "--labels", table, *flags,
        "--workers", 0, "--evaluate.bootstrap", 100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = json.loads((tmp_path / "study" / "results" / "compare" / "metrics.json").read_text())
    warned = any("each slide counts as its own patient" in text for text in told["methods"][0]["warnings"])
    assert warned is not stated
    assert ("each slide counts as its own patient" in done.stderr) is not stated
    table_text = (tmp_path / "study" / "results" / "compare" / "table.md").read_text()
    assert ("each slide counts as its own patient" in table_text) is not stated
    selfvitmil("report", tmp_path / "study")
    page = (tmp_path / "study" / "report" / "index.html").read_text()
    assert ("each slide counts as its own patient" in page) is not stated


def test_a_slide_that_is_added_joins_the_patient_that_its_name_tells(tmp_path: Path):
    first, second, third = BARCODES
    known = [
        SlideRow(first, tmp_path, "a", patient=BARCODES[first]),
        SlideRow(third, tmp_path, "b", patient=BARCODES[third]),
    ]
    cohort, guess = with_guessed_patients(Cohort((*known, SlideRow(second, tmp_path, "a"))))
    assert guess is not None
    assert [row.patient for row in cohort.rows] == [BARCODES[first], BARCODES[third], BARCODES[first]]
    other = [SlideRow(first, tmp_path, "a", patient="P1"), SlideRow(second, tmp_path, "a")]
    assert (
        with_guessed_patients(Cohort(tuple(other)))[1] is None
    )  # stated patients are named otherwise: nothing is told
