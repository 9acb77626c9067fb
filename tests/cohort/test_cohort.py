"""The table of slides: every source it can be read from, the rules it obeys, writing and merging."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import openpyxl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.error_codes import has_code
from selfvitmil.cohort import COLUMNS, Cohort, SlideRow, make_cohort, merge_cohorts, read_cohort, write_cohort
from selfvitmil.cohort.camelyon16 import has_all_lesions
from selfvitmil.errors import CohortError, CohortProblems, ConfigError


def table(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode("utf-8"))
    return path


def files(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    return root


def labels_of(cohort: Cohort) -> dict[str, str | None]:
    return {row.slide: row.label for row in cohort.rows}


# ---------------------------------------------------------------------------------------------------- cohort.csv


def test_all_columns_of_cohort_csv(tmp_path: Path):
    source = table(
        tmp_path / "study" / "cohort.csv",
        "slide,path,label,patient,split,mpp,annotation\na,../s/a.svs,tumor,p1,train,0.25,a.xml\nb,/abs/b.svs,,,,,\n",
    )
    a, b = read_cohort(source).rows
    assert a == SlideRow("a", tmp_path / "s" / "a.svs", "tumor", "p1", "train", 0.25, tmp_path / "study" / "a.xml")
    assert b == SlideRow("b", Path("/abs/b.svs"), None, "b", None, None, None)


PLAIN = "slide,path,label,mpp\nä,a.svs,0,0.5\nb,b.svs,1,\n"
DIALECTS = {
    "plain": PLAIN,
    "byte order mark": "\ufeff" + PLAIN,
    "windows lines": PLAIN.replace("\n", "\r\n"),
    "old mac lines": PLAIN.replace("\n", "\r"),
    "blank lines": "\n" + PLAIN.replace("\n", "\n\n , ,,\n"),
    "semicolons": PLAIN.replace(",", ";").replace("0.5", "0,5"),
    "tabs": PLAIN.replace(",", "\t"),
    "spaces": PLAIN.replace(",", " , ").replace("\n", " \n"),
    "quotes": '"slide","path","label","mpp"\n"ä" , "a.svs","0","0.5"\n"b","b.svs",1,""\n',
    "capitals": PLAIN.replace("slide,path,label,mpp", "Slide,PATH,Label,MPP"),
    "floats": PLAIN.replace(",1,", ",1.0,").replace(",0,", ",0.0,"),
    "row numbers": ",slide,path,label,mpp\n0,ä,a.svs,0,0.5\n1,b,b.svs,1,\n",
    "no last line end": PLAIN.rstrip(),
}


@pytest.mark.parametrize("text", DIALECTS.values(), ids=DIALECTS.keys())
def test_csv_dialects_read_alike(tmp_path: Path, text: str):
    rows = read_cohort(table(tmp_path / "cohort.csv", text)).rows
    assert [(r.slide, r.path.name, r.label, r.mpp) for r in rows] == [
        ("ä", "a.svs", "0", 0.5),
        ("b", "b.svs", "1", None),
    ]


BAD_TABLES = {
    "typo": ("slide,path,lable\na,a.svs,1\n", "unknown column 'lable'", "unknown-column"),
    "another tool's word": ("slide,path,case_id\na,a.svs,1\n", "unknown column 'case_id'", "unknown-column"),
    "no path column": ("slide,label\na,1\n", "no column 'path'", "missing-column"),
    "no slide": ("slide,path\n,a.svs\nb,b.svs\n", "line 2", "empty-cells"),
    "no path": ("slide,path\na,a.svs\nb,\n", "line 3", "empty-cells"),
    "empty": ("", "empty", "empty-table"),
    "no rows": ("slide,path\n", "no slide", "no-slides"),
    "same name": ("slide,path\na,a.svs\n\na,b.svs\n", "line 2 (a) = line 4 (a)", "repeated-slides"),
    "same but for case": ("slide,path\nAb,1.svs\naB,2.svs\n", "line 2 (Ab) = line 3 (aB)", "repeated-slides"),
    "same but for accents": ("slide,path\n\u00e9,1.svs\ne\u0301,2.svs\n", "line 2", "repeated-slides"),
    "slash": ("slide,path\na/b,1.svs\n", "slash", "invalid-slide-names"),
    "leading dot": ("slide,path\n..,1.svs\n", "begins with a dot", "invalid-slide-names"),
    "control": ("slide,path\na\x07b,1.svs\n", "control character", "invalid-slide-names"),
    "long": (f"slide,path\n{'ä' * 101},1.svs\n", "more than 200 bytes", "invalid-slide-names"),
    "mpp word": ("slide,path,mpp\na,a.svs,\nb,b.svs,40x\n", "line 3: mpp '40x'", "invalid-mpp"),
    "mpp zero": ("slide,path,mpp\na,a.svs,0\n", "line 2", "invalid-mpp"),
    "mpp in mm": ("slide,path,mpp\na,a.svs,0.0005\n", "line 2", "invalid-mpp"),
    "mpp in nm": ("slide,path,mpp\na,a.svs,250\n", "line 2", "invalid-mpp"),
    "mpp as magnification": ("slide,path,mpp\na,a.svs,20\n", "line 2", "invalid-mpp"),
    "mpp too fine": ("slide,path,mpp\na,a.svs,0.01\n", "line 2", "invalid-mpp"),
    "mpp nan": ("slide,path,mpp\na,a.svs,inf\n", "line 2", "invalid-mpp"),
    "torn patient": (
        "slide,path,patient,split\na,a.svs,p,train\nb,b.svs,q,train\nc,c.svs,p,test\n",
        "line 2 (a, patient p, train), line 4 (c, patient p, test)",
        "patient-in-several-splits",
    ),
    "case of labels": ("slide,path,label\na,a.svs,Tumor\nb,b.svs,tumor\n", "line 2 (Tumor), line 3", "label-spellings"),
    "too many cells": ("slide,path,label\na,a.svs,x, y\n", "line 2 has 4 cells", "too-many-cells"),
    "open quote": ('slide,path,label\na,"a.svs,1\nb,b.svs,1\n', "quote", "unclosed-quote"),
    "open quote in a long table": ('slide,path\na,"a.svs\n' + "b,b.svs\n" * 20_000, "quote", "unclosed-quote"),
    "stray quotes": (
        'slide,path,label\na,a.svs,"1\nb,b.svs,0"\n',
        "ends on line 3 has a line break",
        "line-break-in-cell",
    ),
    "column twice": ("slide,path,Path\na,a.svs,b.svs\n", "Path", "duplicate-columns"),
}


@pytest.mark.parametrize(("text", "what", "code"), BAD_TABLES.values(), ids=BAD_TABLES.keys())
def test_bad_tables_are_refused_with_place_and_remedy(tmp_path: Path, text: str, what: str, code: str):
    with pytest.raises(CohortError) as caught:
        read_cohort(table(tmp_path / "cohort.csv", text))
    # If the table can be read, missing files and labels are reported too.
    first, *_ = caught.value.problems if isinstance(caught.value, CohortProblems) else (caught.value,)
    assert first.what.startswith("cohort.csv")
    assert what in first.reason
    assert first.code == code
    assert first.how
    assert str(tmp_path) not in str(caught.value)


def test_files_that_are_no_tables(tmp_path: Path):
    for name, content, reason in (
        ("cohort.csv", "slide,path\nä,a.svs\n".encode("latin-1"), "line 2 is not UTF-8"),
        ("cohort.csv", "slide,path\na,a.svs\n".encode("utf-16"), "not UTF-8"),
        ("cohort.csv", b"slide,path\na\0,a.svs\n", "null bytes"),
        ("cohort.xlsx", b"not a zip file", "xlsx"),
        ("cohort.ods", b"", "not a readable table"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(CohortError, match=reason):
            read_cohort(tmp_path / name)
    with pytest.raises(ConfigError, match=r"absent\.csv: no such file", check=has_code("file-not-found")):
        read_cohort(tmp_path / "absent.csv")


def test_missing_labels_are_counted_and_missing_files_collected(tmp_path: Path):
    files(tmp_path, "a.svs", "b.svs")
    text = "slide,path,label,annotation\na,a.svs,1,\nb,b.svs,NA,lost.xml\nc,gone.svs,nan,\n"
    cohort = read_cohort(table(tmp_path / "cohort.csv", text))
    assert cohort.unlabelled == ("b", "c")
    assert len(cohort.warnings) == 1
    assert cohort.warnings[0].startswith("2 of 3 slides have no label")
    assert [row.slide for row in cohort.missing_files()] == ["b", "c"]


def test_helpers(tmp_path: Path):
    rows = [
        SlideRow("a", tmp_path / "a", "10", "p", "train"),
        SlideRow("b", tmp_path / "b", "9", "p", "train"),
        SlideRow("c", tmp_path / "c", "9", "", "test"),
        SlideRow("d", tmp_path / "d", None, "", "test"),
    ]
    cohort = make_cohort(rows)
    assert list(cohort.class_counts.items()) == [("9", 2), ("10", 1)]  # numbers by value, not as words
    assert {patient: [row.slide for row in owned] for patient, owned in cohort.patients.items()} == {
        "c": ["c"],
        "d": ["d"],
        "p": ["a", "b"],
    }
    assert cohort["c"] == rows[2]
    assert cohort.select("test").slides == ("c", "d")
    assert cohort.select("test", labelled=True).slides == ("c",)
    assert cohort.select(labelled=True).slides == ("a", "b", "c")
    with pytest.raises(CohortError, match="slide_1", check=has_code("unknown-slide")):
        _ = make_cohort([SlideRow("slide_1", tmp_path)])["slide_2"]


names = st.text(
    st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"], exclude_characters="/"), min_size=1
).filter(
    lambda s: s == s.strip() and not s.startswith(".") and len(s.encode()) <= 200 and s.casefold() not in ("na", "nan")
)


@settings(deadline=None)  # it syncs files to disk
@given(
    slide=names,
    parts=st.lists(names, min_size=1, max_size=3),
    label=st.none() | st.sampled_from(["0", "tumor, or not", 'a "b"', "日本"]),
    patient=st.just("") | st.sampled_from(["p;1", "007"]),
    split=st.none() | st.sampled_from(["train", "val", "external"]),
    mpp=st.none() | st.floats(0.05, 10),
)
def test_written_cohort_reads_back_the_same(tmp_path_factory, slide, parts, label, patient, split, mpp):
    root = tmp_path_factory.getbasetemp()
    row = SlideRow(slide, root.joinpath("slides", *parts), label, patient, split, mpp, root / "x" / "ä.xml")
    write_cohort(root / "study" / "cohort.csv", Cohort((row,)))
    (again,) = read_cohort(root / "study" / "cohort.csv").rows
    assert again == row


def test_written_cohort_has_the_fixed_columns_and_no_absolute_path(tmp_path: Path):
    rows = (SlideRow("a", tmp_path / "s" / "a.svs"), SlideRow("b", tmp_path / "study" / "b.svs", "1", "p"))
    write_cohort(tmp_path / "study" / "cohort.csv", Cohort(rows))
    with (tmp_path / "study" / "cohort.csv").open(newline="", encoding="utf-8") as file:
        header, *body = csv.reader(file)
    assert tuple(header) == COLUMNS
    assert body == [["a", "../s/a.svs", "", "", "", "", ""], ["b", "b.svs", "1", "p", "", "", ""]]
    assert os.listdir(tmp_path / "study") == ["cohort.csv"]
    with pytest.raises(CohortError, check=has_code("repeated-slides")):
        write_cohort(tmp_path / "study" / "cohort.csv", Cohort((rows[0], rows[0])))


def test_paths_survive_a_study_that_is_reached_through_a_link(tmp_path: Path):
    files(tmp_path, "home/slides/a.svs")
    (tmp_path / "disk" / "deep" / "study").mkdir(parents=True)
    (tmp_path / "home" / "study").symlink_to(tmp_path / "disk" / "deep" / "study")
    write_cohort(tmp_path / "home" / "study" / "cohort.csv", read_cohort(tmp_path / "home" / "slides"))
    for study in (tmp_path / "home" / "study", tmp_path / "disk" / "deep" / "study"):
        (row,) = read_cohort(study / "cohort.csv").rows
        assert row.path.samefile(tmp_path / "home" / "slides" / "a.svs")


def test_reading_tables_loads_nothing_heavy():
    code = "import sys, selfvitmil.cohort; print(sorted({'torch','openslide','openpyxl','pandas'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


# ---------------------------------------------------------------------------------------------------- folders


def test_folder_is_searched_to_its_depths(tmp_path: Path):
    files(tmp_path, "b.SVS", "x/a.tif", "x/y/c.ndpi", "x/._a.tif", ".hidden/h.svs", "x/a.jpg", "n.png", "notes.txt")
    files(tmp_path, "m.mrxs", "m/Data0000.dat", "m/inner.tif", "dicom/one/2.dcm", "dicom/one/1.dcm", "dicom/two/1.dcm")
    (tmp_path / "x" / "back").symlink_to(tmp_path)
    (tmp_path / "lost.svs").symlink_to(tmp_path / "nowhere")
    cohort = read_cohort(tmp_path)
    assert {row.slide: str(row.path.relative_to(tmp_path)) for row in cohort.rows} == {
        "a": "x/a.tif",
        "b": "b.SVS",
        "c": "x/y/c.ndpi",
        "lost": "lost.svs",
        "m": "m.mrxs",
        "one": "dicom/one/1.dcm",
        "two": "dicom/two/1.dcm",
    }
    assert list(cohort.slides) == sorted(cohort.slides)
    assert any("2 folders of .dcm" in warning for warning in cohort.warnings)
    assert any("None of the 7 slides has a label" in warning for warning in cohort.warnings)
    assert [row.slide for row in cohort.missing_files()] == ["lost"]


def test_folders_that_cannot_be_a_cohort(tmp_path: Path):
    with pytest.raises(CohortError, check=has_code("no-slides")):
        read_cohort(files(tmp_path / "empty", "a.jpg"))
    with pytest.raises(
        CohortError, match=r"two/A\.tif \(A\) = one/a\.svs \(a\).*cohort\.csv", check=has_code("several-problems")
    ):
        read_cohort(files(tmp_path / "twins", "one/a.svs", "two/A.tif"))
    with pytest.raises(CohortError, check=has_code("mixed-dicom-folder")):
        read_cohort(files(tmp_path / "mixed", "a.svs", "1.dcm"))
    with pytest.raises(ConfigError, check=has_code("two-slide-folders")):
        read_cohort(tmp_path / "twins", slides_folder=tmp_path / "twins")
    with pytest.raises(ConfigError, check=has_code("label-column-without-table")):
        read_cohort(tmp_path / "twins", label_column="x")


def test_unreadable_subfolder_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    files(tmp_path / "slides", "a.svs", "secret/b.svs")
    scandir = os.scandir

    def refuse(folder):
        if Path(folder).name == "secret":
            raise PermissionError(13, "Permission denied")
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(
        CohortError, match="secret: the folder cannot be read, Permission denied", check=has_code("unreadable-folder")
    ):
        read_cohort(tmp_path / "slides")


def test_folder_with_a_cohort_csv_says_that_it_is_not_read(tmp_path: Path):
    table(files(tmp_path, "a.svs") / "cohort.csv", "slide,path,label\na,a.svs,1\n")
    cohort = read_cohort(tmp_path)
    assert labels_of(cohort) == {"a": None}
    assert any("cohort.csv that was not read" in warning for warning in cohort.warnings)


# ---------------------------------------------------------------------------------------------------- labels


@pytest.mark.parametrize("column", ["slide", "slide_id", "FILENAME", "Image", "WSI", "Slide ID"])
def test_labels_of_a_folder_whatever_the_slide_is_called(tmp_path: Path, column: str):
    files(tmp_path / "s", "x/a.svs", "b.1.tif", "C.svs", "d.svs")
    source = table(tmp_path / "l.csv", f"{column};Label;remark\na.svs;1\nb.1;0.0;hm\nsub/c.SVS;1;\n")
    cohort = read_cohort(tmp_path / "s", source)
    assert labels_of(cohort) == {"a": "1", "b.1": "0", "C": "1", "d": None}
    assert cohort.warnings == ("1 of 4 slides have no label and are not used for training: d.",)


def test_labels_fill_all_other_fields_too(tmp_path: Path):
    files(tmp_path / "s", "a.svs")
    source = table(tmp_path / "l.csv", "slide,label,case_id,split,mpp,annotation\na,1,77.0,Validation,0.25,../a.xml\n")
    (row,) = read_cohort(tmp_path / "s", source).rows
    expected = (tmp_path.parent / "a.xml", "1", "77", "val", 0.25)
    assert (row.annotation, row.label, row.patient, row.split, row.mpp) == expected


def test_labels_from_a_spreadsheet(tmp_path: Path):
    files(tmp_path / "s", "101.svs", "102.svs", "b.svs")
    book = openpyxl.Workbook()
    sheet = book.active
    assert sheet is not None
    for row in (["slide", "label", "patient", None], [101, 1, 7], [], [102.0, 0.0, 8], ["b.svs", True, None]):
        sheet.append(row)
    book.create_sheet("remarks")
    book.save(tmp_path / "l.xlsx")
    cohort = read_cohort(tmp_path / "s", tmp_path / "l.xlsx")
    assert {r.slide: (r.label, r.patient) for r in cohort.rows} == {
        "101": ("1", "7"),
        "102": ("0", "8"),
        "b": ("True", "b"),
    }
    assert any("only the first sheet" in warning for warning in cohort.warnings)
    sheet["A6"] = "zz"
    book.save(tmp_path / "l.xlsx")
    with pytest.raises(CohortError, match=r"row 6 \(zz\)", check=has_code("slides-not-found")):
        read_cohort(tmp_path / "s", tmp_path / "l.xlsx")


def test_labels_that_fit_no_slide_or_each_other(tmp_path: Path):
    files(tmp_path / "s", "a.svs", "b.svs")
    with pytest.raises(
        CohortError, match=r"unknown slides: line 3 \(c\), line 4 \(d\.svs\),", check=has_code("several-problems")
    ):
        read_cohort(tmp_path / "s", table(tmp_path / "l.csv", "slide,label\na,1\nc,1\n/data/d.svs,0\n"))
    with pytest.raises(CohortError, match=r"line 3: a \(label: 1 or 0\)", check=has_code("several-problems")):
        read_cohort(tmp_path / "s", table(tmp_path / "l.csv", "slide,label\na,1\na.svs,0\n"))
    with pytest.raises(CohortError, match="any of grade, stage", check=has_code("ambiguous-label-column")):
        read_cohort(tmp_path / "s", table(tmp_path / "l.csv", "slide,grade,stage\na,1,2\n"))
    with pytest.raises(CohortError, check=has_code("missing-column")):
        read_cohort(tmp_path / "s", table(tmp_path / "l.csv", "a.svs,label\nb.svs,1\n"))
    with pytest.raises(CohortError, check=has_code("unknown-patients")):
        read_cohort(tmp_path / "s", table(tmp_path / "l.csv", "patient,label\np,1\n"))
    with pytest.raises(CohortError, match=r"no column 'grad'.*Did you mean 'grade'", check=has_code("missing-column")):
        read_cohort(tmp_path / "s", table(tmp_path / "l.csv", "slide,grade\na,1\n"), label_column="grad")


def test_labels_for_a_cohort_csv(tmp_path: Path):
    source = table(tmp_path / "cohort.csv", "slide,path,label\na,a.svs,\nb.tif,b.svs,0\n")
    cohort = read_cohort(source, table(tmp_path / "l.csv", "slide,grade\nA,II\nb.tif,\n"), label_column="GRADE")
    assert labels_of(cohort) == {"a": "II", "b.tif": "0"}
    with pytest.raises(CohortError, match=r"b\.tif \(label: 0 or 1\)", check=has_code("several-problems")):
        read_cohort(source, table(tmp_path / "l.csv", "slide,label\nb.tif,1\n"))


# ---------------------------------------------------------------------------------------------------- other tools


def test_clam_table(tmp_path: Path):
    files(tmp_path / "s", "deep/slide_0.svs", "slide_1.svs", "extra.svs")
    source = table(
        tmp_path / "clam.csv",
        "case_id,slide_id,label,oncotree\npatient_0,slide_1,tumor,X\npatient_0,slide_0,normal,X\n",
    )
    cohort = read_cohort(source, slides_folder=tmp_path / "s")
    assert [(r.slide, r.path, r.label, r.patient) for r in cohort.rows] == [
        ("slide_1", tmp_path / "s" / "slide_1.svs", "tumor", "patient_0"),
        ("slide_0", tmp_path / "s" / "deep" / "slide_0.svs", "normal", "patient_0"),
    ]
    assert cohort.warnings == ("1 slides of the folder are not in clam.csv and are ignored: extra.svs.",)
    with pytest.raises(CohortError, match="--slides-folder", check=has_code("no-paths")):
        read_cohort(source)
    table(source, source.read_text() + "patient_9,slide_9,tumor,X\npatient_0,slide_1.svs,normal,X\n")
    with pytest.raises(
        CohortError, match=r"not in the slides folder: line 4 \(slide_9\)", check=has_code("several-problems")
    ):
        read_cohort(source, slides_folder=tmp_path / "s")
    files(tmp_path / "s", "slide_9.svs")
    with pytest.raises(
        CohortError, match=r"line 2 \(slide_1\) = line 5 \(slide_1\)", check=has_code("repeated-slides")
    ):
        read_cohort(source, slides_folder=tmp_path / "s")
    files(tmp_path / "s", "other/slide_9.tif")
    with pytest.raises(
        CohortError,
        match=r"line 4: several files are named slide_9: other/slide_9\.tif, slide_9\.svs",
        check=has_code("several-problems"),
    ):
        read_cohort(source, slides_folder=tmp_path / "s")


def test_stamp_tables(tmp_path: Path):
    files(tmp_path / "s", "a1.svs", "a2.svs", "b1.svs", "c1.svs")
    slide_table = table(tmp_path / "slide.csv", "PATIENT,FILENAME\nA,a1.h5\nA,x/a2.svs.h5\nB,b1.svs\nC,c1\n")
    clini = table(tmp_path / "clini.csv", "PATIENT,isMSIH,AGE\nA,MSIH,50\nB,nonMSIH,60\nD,MSIH,70\n")
    cohort = read_cohort(slide_table, clini, label_column="isMSIH", slides_folder=tmp_path / "s")
    assert {r.slide: (r.patient, r.label) for r in cohort.rows} == {
        "a1": ("A", "MSIH"),
        "a2": ("A", "MSIH"),
        "b1": ("B", "nonMSIH"),
        "c1": ("C", None),
    }
    assert cohort.warnings[0] == "clini.csv: 1 patients have no slide: line 4 (D)."
    assert cohort.warnings[1].startswith("1 of 4 slides have no label")
    with pytest.raises(CohortError, match="any of isMSIH, AGE", check=has_code("ambiguous-label-column")):
        read_cohort(slide_table, clini, slides_folder=tmp_path / "s")
    table(clini, "PATIENT,isMSIH\nA,MSIH\nA,nonMSIH\n")
    with pytest.raises(CohortError, match=r"line 3: a1 \(label: MSIH or nonMSIH\)", check=has_code("several-problems")):
        read_cohort(slide_table, clini, slides_folder=tmp_path / "s")
    table(clini, "PATIENT,isMSIH\nA,MSIH\nA,MSIH\n")
    cohort = read_cohort(slide_table, clini, slides_folder=tmp_path / "s")
    assert labels_of(cohort) == {"a1": "MSIH", "a2": "MSIH", "b1": None, "c1": None}
    assert "taken from 'isMSIH'" in cohort.warnings[0]


def test_tables_with_paths_of_other_tools(tmp_path: Path):
    manifest = table(
        tmp_path / "m.csv", "sample_id,image_path,mask_path,spacing_at_level_0,patient_id\ns1,d/x.svs,m.tif,0.25,p\n"
    )
    (row,) = read_cohort(manifest).rows
    assert (row.slide, row.path, row.mpp, row.patient) == ("s1", tmp_path / "d" / "x.svs", 0.25, "p")
    (row,) = read_cohort(table(tmp_path / "p.csv", "path,label\nd/x.y.svs,1\n"), slides_folder=tmp_path / "..").rows
    assert (row.slide, row.path) == ("x.y", tmp_path.parent / "d" / "x.y.svs")
    with pytest.raises(CohortError, check=has_code("missing-column")):
        read_cohort(table(tmp_path / "p.csv", "foo,label\nd/x.y.svs,1\n"))


# ---------------------------------------------------------------------------------------------------- Camelyon16

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


# ---------------------------------------------------------------------------------------------------- merging


def test_merge_adds_fills_and_keeps(tmp_path: Path):
    files(tmp_path, "a.svs", "b.svs", "c.svs", "new/d.svs")
    old = make_cohort(
        [
            SlideRow("a", tmp_path / "a.svs", "1", "p"),
            SlideRow("b", tmp_path / "b.svs"),
            SlideRow("d", tmp_path / "old" / "d.svs", "0"),
            SlideRow("z", tmp_path / "z.svs", "1"),
        ]
    )
    new = make_cohort(
        [
            SlideRow("c", tmp_path / "c.svs", "1"),
            SlideRow("b", tmp_path / "x" / ".." / "b.svs", "0", "q", "train", 0.5, tmp_path / "b.xml"),
            SlideRow("a", tmp_path / "a.svs"),
            SlideRow("d", tmp_path / "new" / "d.svs"),
        ]
    )
    merged, report = merge_cohorts(old, new)
    assert merged.rows == (
        old["a"],
        SlideRow("b", tmp_path / "b.svs", "0", "q", "train", 0.5, tmp_path / "b.xml"),
        SlideRow("d", tmp_path / "new" / "d.svs", "0"),
        old["z"],
        new["c"],
    )
    assert (report.added, report.filled, report.moved, report.only_old) == (("c",), ("b",), ("d",), ("z",))
    assert merged.warnings == ()
    assert merge_cohorts(merged, new)[0].rows == merged.rows
    with pytest.raises(
        CohortError, match="path: another file", check=has_code("conflicting-values")
    ):  # z is at neither place, so it has not moved
        merge_cohorts(old, make_cohort([SlideRow("z", tmp_path / "elsewhere" / "z.svs")]))


def test_merge_refuses_contradictions_and_lists_them_all(tmp_path: Path):
    files(tmp_path, "a.svs", "b.svs", "c.svs", "other/c.svs")
    old = make_cohort(
        [
            SlideRow("a", tmp_path / "a.svs", "1", "p", mpp=0.25),
            SlideRow("b", tmp_path / "b.svs", "1"),
            SlideRow("c", tmp_path / "c.svs", "1"),
        ]
    )
    new = make_cohort(
        [
            SlideRow("a", tmp_path / "a.svs", "0", "q", mpp=0.5),
            SlideRow("b", tmp_path / "b.svs", "1"),
            SlideRow("c", tmp_path / "other" / "c.svs"),
        ]
    )
    with pytest.raises(CohortError, check=has_code("conflicting-values")) as caught:
        merge_cohorts(old, new)
    for conflict in ("a (label: 1 or 0)", "a (patient: p or q)", "a (mpp: 0.25 or 0.5)", "c (path: another file)"):
        assert conflict in caught.value.what
    assert "b (" not in caught.value.what
    with pytest.raises(CohortError, check=has_code("repeated-slides")):
        merge_cohorts(old, make_cohort([SlideRow("A", tmp_path / "a.svs")]))
    torn = make_cohort(
        [
            SlideRow("b", tmp_path / "b.svs", split="train", patient="p"),
            SlideRow("e", tmp_path, split="test", patient="e"),
        ]
    )
    merged, _ = merge_cohorts(old, torn)
    with pytest.raises(CohortError, check=has_code("patient-in-several-splits")):
        merge_cohorts(merged, make_cohort([SlideRow("a", tmp_path / "a.svs", patient="p", split="test")]))


def test_all_problems_of_a_folder_and_its_labels_are_told_at_once(tmp_path: Path):
    files(tmp_path / "s", "one/a.svs", "two/a.tif", "b.svs", "c.svs")
    source = table(
        tmp_path / "l.csv", "slide,label,patient,split\nb,X,p,train\nc,x,p,test\nb,Y,p,train\nlost,X,q,test\n"
    )
    with pytest.raises(CohortProblems, check=has_code("several-problems")) as caught:
        read_cohort(tmp_path / "s", source)
    said = [str(problem) for problem in caught.value.problems]
    assert len(said) == 5
    for number, words in enumerate(
        ("same name", "line 5 (lost)", "b (label: X or Y)", "more than one split", "differ only in case")
    ):
        assert words in said[number]
        assert words in str(caught.value)


def test_all_problems_of_a_table_are_told_at_once(tmp_path: Path):
    files(tmp_path, "a.svs", "b.svs")
    text = "slide,path,label,patient,split\na,a.svs,x,p,train\nA,b.svs,x,p,test\nc,c.svs,x,q,test\n"
    with pytest.raises(CohortProblems, check=has_code("several-problems")) as caught:
        read_cohort(table(tmp_path / "cohort.csv", text))
    said = [str(problem) for problem in caught.value.problems]
    assert len(said) == 4
    for number, words in enumerate(("same name", "more than one split", "all labels are x", "do not exist: c")):
        assert words in said[number]
