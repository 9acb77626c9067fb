"""Camelyon16: its layouts, its special slides, its published counts."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from helpers.cohorts import files, labels_of, table
from helpers.error_codes import has_code
from selfvitmil.cohort import SlideRow, read_cohort, write_cohort
from selfvitmil.cohort.camelyon16 import PAPER_TILES, compare_tile_counts, has_all_lesions, is_official_test_set
from selfvitmil.errors import CohortError

NEW = ("training/normal/normal_{:03}.tif", "training/tumor/tumor_{:03}.tif", "testing/images/test_{:03}.tif")
OLD = (
    "TrainingData/Train_Normal/Normal_{:03}.tif",
    "TrainingData/Train_Tumor/Tumor_{:03}.tif",
    "Testset/Images/Test_{:03}.tif",
)
FLAT = ("images/normal_{:03}.tif", "images/tumor_{:03}.tif", "images/test_{:03}.tif")


def camelyon16(root: Path, layout: tuple[str, str, str], normal, tumor, test) -> Path:
    for pattern, numbers in zip(layout, (normal, tumor, test), strict=True):
        files(root, *(pattern.format(number) for number in numbers))
    return root


@pytest.mark.parametrize("layout", [NEW, OLD, FLAT])
def test_camelyon16_layouts(tmp_path: Path, layout):
    root = camelyon16(tmp_path / "c", layout, [1, 2], [1], [1, 2])
    files(root, "annotations/Tumor_001.xml", "annotations/test_001.xml", "masks/tumor_001_mask.tif")
    table(root / "testing" / "reference.csv", "test_001,Tumor,IDC,Macro\ntest_002,Normal,None,None\n")
    cohort = read_cohort(root)
    found = {r.slide.lower(): (r.label, r.split, r.annotation and r.annotation.name) for r in cohort.rows}
    assert found == {
        "normal_001": ("normal", "train", None),
        "normal_002": ("normal", "train", None),
        "tumor_001": ("tumor", "train", "Tumor_001.xml"),
        "test_001": ("tumor", "test", "test_001.xml"),
        "test_002": ("normal", "test", None),
    }
    assert all(row.patient == row.slide for row in cohort.rows)
    assert cohort.warnings[0].startswith("Recognized as Camelyon16")
    assert cohort.warnings[1:] == ("1 other images (mostly masks) are ignored: masks/tumor_001_mask.tif.",)


def test_camelyon16_special_slides(tmp_path: Path):
    root = camelyon16(tmp_path / "c", NEW, [85, 86], [110, 111], [48, 49, 114])
    files(
        root, "testing/lesion_annotations/test_114.xml", "training/lesion_annotations.zip", "training/normal/thumb.tif"
    )
    table(root / "testing" / "reference.csv", "image,type,x,y\nTest_048.tif,normal\ntest_049,Normal\ntest_114,TUMOR\n")
    cohort = read_cohort(root)
    assert labels_of(cohort) == {
        "normal_085": "normal",
        "test_048": "normal",
        "test_114": "tumor",
        "tumor_110": "tumor",
        "tumor_111": "tumor",
    }
    text = " ".join(cohort.warnings)
    assert "test_049 is left out: it is a duplicate" in text
    assert "normal_086 is left out" in text
    assert "test_114 stays, but not in lesion scores: its lesions are not exhaustively annotated" in text
    assert "2 tumour slides have no annotation; unzip training/lesion_annotations.zip" in text
    assert "1 other images (mostly masks) are ignored: training/normal/thumb.tif" in text
    # the remark on test_114 must outlive the file, and say nothing of slides that merely share its name
    write_cohort(tmp_path / "study" / "cohort.csv", cohort)
    again = read_cohort(tmp_path / "study" / "cohort.csv")
    assert again.rows == cohort.rows
    assert [row.slide for row in again.rows if not has_all_lesions(row)] == ["test_114"]
    assert all(
        has_all_lesions(SlideRow("test_114", tmp_path, label, "p", split, None, annotation))
        for label, split, annotation in (("1", "test", tmp_path), ("tumor", "train", tmp_path), ("tumor", "test", None))
    )


def test_camelyon16_older_release_has_normal_086_as_a_tumour(tmp_path: Path):
    cohort = read_cohort(camelyon16(tmp_path / "c", NEW, [86], [1], []))
    assert labels_of(cohort) == {"normal_086": "tumor", "tumor_001": "tumor"}
    assert any("normal_086 is labelled tumor" in warning for warning in cohort.warnings)


def test_camelyon16_without_reference_and_with_a_broken_one(tmp_path: Path):
    root = camelyon16(tmp_path / "c", NEW, [1], [], [1])
    cohort = read_cohort(root)
    assert labels_of(cohort) == {"normal_001": "normal", "test_001": None}
    assert any("no testing/reference.csv" in warning for warning in cohort.warnings)
    for second in ("test_002,maybe", "tset_002,Tumor", "test_001,Normal", "test_002,Tumor,Normal"):
        table(root / "testing" / "reference.csv", f"test_001,Tumor\n{second}\n")
        with pytest.raises(
            CohortError, match=r"reference\.csv: line 2", check=has_code("invalid-camelyon16-reference")
        ):
            read_cohort(root)
    files(root, "training/tumor/normal_003.tif")
    with pytest.raises(
        CohortError, match=r"normal_003\.tif: is in the folder tumor", check=has_code("camelyon16-label-conflict")
    ):
        read_cohort(root)


def test_camelyon16_counts(tmp_path: Path):
    full = ([n for n in range(1, 161) if n != 86], range(1, 112), [n for n in range(1, 131) if n != 49])
    root = camelyon16(tmp_path / "c", NEW, *full)
    assert not any("official" in warning for warning in read_cohort(root).warnings)
    (root / "testing" / "images" / "test_005.tif").unlink()
    assert any("128 test slides; the official set has 159 and 111" in warning for warning in read_cohort(root).warnings)


def test_camelyon16_names_alone_give_no_labels(tmp_path: Path):
    cohort = read_cohort(files(tmp_path / "some", "normal_001.tif", "tumor_001.tif"))
    assert labels_of(cohort) == {"normal_001": None, "tumor_001": None}
    assert any("names are those of Camelyon16" in warning for warning in cohort.warnings)


def test_camelyon16_official_test_labels(tmp_path: Path, shared: Path):
    reference = shared / "data" / "camelyon16" / "test_reference_scores.csv"
    with reference.open(newline="", encoding="utf-8") as file:
        truth = {row["slide_name"]: row["is_tumor"].lower() for row in csv.DictReader(file)}
    root = camelyon16(tmp_path / "c", NEW, [], [], range(1, 131))
    table(root / "testing" / "reference.csv", reference.read_text(encoding="utf-8"))
    cohort = read_cohort(root)
    assert labels_of(cohort) == truth
    assert cohort.class_counts == {"normal": 80, "tumor": 49}


def test_official_test_set_is_all_129_slides():
    official = [f"Test_{number:03d}" for number in range(1, 131) if number != 49]
    assert is_official_test_set(official)
    assert not is_official_test_set(official[1:])
    assert not is_official_test_set([*official, "test_049"])


def test_tile_counts_are_compared_with_the_paper_per_split():
    tiles, slides = PAPER_TILES["test"]
    assert compare_tile_counts({}) == []
    [line] = compare_tile_counts({"test": [2 * tiles // slides], "external": [5]})
    assert line.startswith("test: 8,440 tiles of 1 slides; ")
    assert line.endswith("(+100.0%)")
    assert "(+0.0%)" not in line
    [whole] = compare_tile_counts({"test": [tiles - 128, *[1] * 128]})
    assert whole.count("(+0.0%)") == 2
