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

from helpers.cohorts import files, labels_of, table
from helpers.error_codes import has_code
from selfvitmil.cohort import COLUMNS, Cohort, SlideRow, make_cohort, merge_cohorts, read_cohort, write_cohort
from selfvitmil.errors import CohortError, CohortProblems, ConfigError

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
    with pytest.raises(ConfigError, match=r"/absent\.csv: no such file", check=has_code("file-not-found")):
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
        read_cohort(files(tmp_path / "empty", "a.txt"))
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
    assert report.columns == ("label", "patient", "split", "mpp", "annotation")
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


# ---------------------------------------------------------------------------------------------------- further columns


SURVIVAL = "slide,path,label,patient,Time,event,site\na,a.svs,1,p,12.5,1,Graz\nb,b.svs,0,q,NA,0.0,\n"


def test_further_columns_are_read_looked_up_and_written_back(tmp_path: Path):
    cohort = read_cohort(table(tmp_path / "cohort.csv", SURVIVAL))
    a, b = cohort.rows
    assert cohort.extra_columns == ("Time", "event", "site")
    assert (a.value("time"), a.value("EVENT"), a.value("site"), a.value("label")) == ("12.5", "1", "Graz", "1")
    assert (b.value("time"), b.value("event"), b.value("site"), b.value("age")) == (None, "0", None, None)
    assert len({a, b}) == 2  # hashable
    write_cohort(tmp_path / "cohort.csv", cohort)
    assert (tmp_path / "cohort.csv").read_text().splitlines() == [
        "slide,path,label,patient,split,mpp,annotation,Time,event,site",
        "a,a.svs,1,p,,,,12.5,1,Graz",
        "b,b.svs,0,q,,,,,0,",
    ]
    assert read_cohort(tmp_path / "cohort.csv").rows == cohort.rows


@pytest.mark.parametrize("column", ["lable", "labels", "pateint", "case_id", "spilt", "mmpp"])
def test_a_misspelt_column_is_not_a_further_one(tmp_path: Path, column: str):
    with pytest.raises(CohortError, check=has_code("unknown-column")):
        read_cohort(table(tmp_path / "cohort.csv", f"slide,path,{column}\na,a.svs,1\n"))


@pytest.mark.parametrize(
    "column", ["time", "event", "site", "scanner", "age", "stage", "grade", "label_2", "size", "batch", "date", "state"]
)
def test_columns_with_a_meaning_of_their_own_are_kept(tmp_path: Path, column: str):
    (row,) = read_cohort(table(tmp_path / "cohort.csv", f"slide,path,{column}\na,a.svs,1\n")).rows
    assert row.value(column) == "1"


def test_a_table_by_slide_or_by_patient_brings_further_columns(tmp_path: Path):
    source = table(tmp_path / "cohort.csv", "slide,path,patient,site\na,a.svs,p,\nb,b.svs,p,x\nc,c.svs,q,\n")
    book = openpyxl.Workbook()
    assert book.active is not None
    for line in (("PATIENT", "time", "event", "remark"), ("p", 3, 1.0, "two\nlines"), ("q", 4.5, 0, None)):
        book.active.append(line)
    book.save(tmp_path / "clini.xlsx")
    by_patient = read_cohort(source, tmp_path / "clini.xlsx")
    assert [row.value("time") for row in by_patient.rows] == ["3", "3", "4.5"]
    assert [row.value("event") for row in by_patient.rows] == ["1", "1", "0"]
    assert by_patient.rows[0].value("remark") == "two lines"
    assert by_patient.extra_columns == ("site", "time", "event", "remark")
    by_slide = read_cohort(source, table(tmp_path / "l.csv", "slide,KRAS,Site\na,1,y\nc,0,z\n"), targets=("kras",))
    assert [(row.value("KRAS"), row.value("site")) for row in by_slide.rows] == [("1", "y"), (None, "x"), ("0", "z")]
    assert by_slide.extra_columns == ("site", "KRAS")
    assert by_slide.classes == ()
    with pytest.raises(CohortError, match=r"site: x or y", check=has_code("several-problems")):
        read_cohort(source, table(tmp_path / "l.csv", "slide,label,site\nb,1,y\n"))


def test_a_table_without_label_is_ambiguous_unless_it_has_a_target(tmp_path: Path):
    source = table(tmp_path / "cohort.csv", "slide,path\na,a.svs\n")
    labels = table(tmp_path / "l.csv", "slide,KRAS,age\na,1,60\n")
    with pytest.raises(CohortError, check=has_code("ambiguous-label-column")):
        read_cohort(source, labels)
    assert read_cohort(source, labels, targets=("age",)).rows[0].extra == (("KRAS", "1"), ("age", "60"))
    with pytest.raises(CohortError, check=has_code("unknown-column")):
        read_cohort(source, table(tmp_path / "l.csv", "slide,lable,age\na,1,60\n"))
    labelled = table(tmp_path / "cohort.csv", "slide,path,label\na,a.svs,1\n")
    (row,) = read_cohort(labelled, table(tmp_path / "l.csv", "slide,age\na,60\n")).rows
    assert (row.label, row.value("age")) == ("1", "60")


def test_a_table_that_contradicts_itself_or_the_cohort_says_which(tmp_path: Path):
    source = table(tmp_path / "cohort.csv", "slide,path,label\na,a.svs,\nb,b.svs,0\n")
    with pytest.raises(CohortError, match=r"contradicts itself: line 3: a \(label: 1 or 0\)") as caught:
        read_cohort(source, table(tmp_path / "l.csv", "slide,label\na,1\na,0\n"))
    assert "--replace-labels" not in str(caught.value)
    with pytest.raises(CohortError, match=r"contradicts the cohort: line 2: b \(label: 0 or 1\)") as caught:
        read_cohort(source, table(tmp_path / "l.csv", "slide,label\nb,1\n"))
    assert "--replace-labels" in str(caught.value)


def test_features_of_a_slide_are_no_other_place_of_its_file(tmp_path: Path):
    files(tmp_path, "a.svs", "uni/a.h5", "virchow/a.h5", "elsewhere/a.svs")
    slides = make_cohort([SlideRow("a", tmp_path / "a.svs", "1")])
    uni, virchow = (make_cohort([SlideRow("a", tmp_path / name / "a.h5", "1")]) for name in ("uni", "virchow"))
    for old, new in ((slides, uni), (uni, virchow)):
        merged, report = merge_cohorts(old, new)
        assert (merged.rows, report.filled, report.moved) == (old.rows, (), ())
    with pytest.raises(CohortError, match="path: another file"):
        merge_cohorts(uni, make_cohort([SlideRow("a", tmp_path / "elsewhere" / "a.svs", "1")]))


def test_merging_keeps_further_columns_and_refuses_contradictions(tmp_path: Path):
    old = read_cohort(table(tmp_path / "cohort.csv", "slide,path,site,age\na,a.svs,x,\nb,b.svs,,50\n"))
    new = read_cohort(table(tmp_path / "new.csv", "slide,path,Site,time\na,a.svs,x,3\nb,b.svs,y,\nc,c.svs,z,5\n"))
    merged, report = merge_cohorts(old, new)
    assert merged.extra_columns == ("site", "age", "time")
    assert [row.value("site") for row in merged.rows] == ["x", "y", "z"]
    assert [row.value("time") for row in merged.rows] == ["3", None, "5"]
    assert (report.added, report.filled, report.columns) == (("c",), ("a", "b"), ("time", "site"))
    again, report = merge_cohorts(merged, new)
    assert (again.rows, report.filled) == (merged.rows, ())
    other = read_cohort(table(tmp_path / "new.csv", "slide,path,site\na,a.svs,q\n"))
    with pytest.raises(CohortError, match="site: x or q", check=has_code("conflicting-values")):
        merge_cohorts(old, other)
