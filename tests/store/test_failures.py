"""failures.csv: what is written, read again and never lost."""

from __future__ import annotations

import errno
import os
import pickle
import re
import unicodedata
from collections.abc import Callable
from pathlib import Path

import h5py
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.error_codes import has_code
from selfvitmil.errors import ArtefactError, MissingMppError, SlideError
from selfvitmil.store import files
from selfvitmil.store.failures import FAILURE_COLUMNS, Failure, read_failures, record_failures, without_folders


def test_failures_are_replaced_only_for_what_was_tried(tmp_path: Path):
    record_failures(
        tmp_path, "tile", ["a", "b"], [Failure("a", "tile", "broken, really", "fix"), Failure("b", "tile", "x", "y")]
    )
    record_failures(tmp_path, "check", ["a"], [Failure("a", "check", "broken", "fix")])
    record_failures(tmp_path, "tile", ["b"], [])
    assert read_failures(tmp_path) == [
        Failure("a", "check", "broken", "fix"),
        Failure("a", "tile", "broken, really", "fix"),
    ]
    assert (tmp_path / "failures.csv").read_text().splitlines()[0] == ",".join(FAILURE_COLUMNS)


def test_a_broken_slide_has_one_row_however_many_stages_lack_it(tmp_path: Path):
    record_failures(tmp_path, "check", ["a", "b"], [Failure("a", "check", "a.svs: cut short", "Copy it")])
    record_failures(tmp_path, "tile", ["a", "b"], [Failure("a", "tile", "a.svs: cut short", "Copy it")])
    missing = Failure("a", "embed vit 0.5mpp", "a: no tile table in tiles/0.5mpp", "Run tile")
    record_failures(tmp_path, missing.stage, ["a"], [missing])
    record_failures(tmp_path, "train", ["a", "b"], [Failure("a", "train", "a: no feature file", "Run embed")])
    _, *rows = (tmp_path / "failures.csv").read_text().splitlines()
    assert rows == ["a,check,a.svs: cut short,Copy it,embed vit 0.5mpp; tile; train"]
    assert [(each.slide, each.stage) for each in read_failures(tmp_path)] == [
        ("a", stage) for stage in ("check", "embed vit 0.5mpp", "tile", "train")
    ]
    # Its file was copied again: check succeeds, and then tile.
    record_failures(tmp_path, "check", ["a"], [])
    record_failures(tmp_path, "tile", ["a"], [])
    left = {each.stage: each.reason for each in read_failures(tmp_path)}
    assert left == dict.fromkeys(["embed vit 0.5mpp", "train"], "a: not done, because of its failure in check")
    record_failures(tmp_path, "embed vit 0.5mpp", ["a"], [])
    record_failures(tmp_path, "train", ["a"], [])
    assert read_failures(tmp_path) == []


def test_failures_of_the_version_before_are_read(tmp_path: Path):
    (tmp_path / "failures.csv").write_text("slide,stage,reason,what to do\na,tile,x,y\n")
    assert read_failures(tmp_path) == [Failure("a", "tile", "x", "y")]


def test_emptied_failures_are_none(tmp_path: Path):
    (tmp_path / "failures.csv").write_text("\n")
    assert read_failures(tmp_path) == []


@pytest.mark.parametrize(
    "content",
    [
        b"slide,stage,reason,what to do,who\na,tile,x,y,me\n",
        "slide,stage,reason,what to do\nM\u00fcller,tile,x,y\n".encode("cp1252"),
        b"slide,stage,reason,what to do\na,tile,x, but not y,z\n",
        b"a,tile,x,y\n",
        b"PK\x03\x04\x00\x00",
        b"slide;stage;reason;what to do\na;tile;x;y\n",
    ],
    ids=["a further column", "not UTF-8", "an unquoted comma", "no header", "a workbook", "semicolons"],
)
def test_failures_that_cannot_be_read_are_put_aside_and_what_is_new_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes
):
    for number in (1, 2):
        (tmp_path / "failures.csv").write_bytes(content)
        with pytest.raises(
            ArtefactError, match=r"failures\.csv: not a readable table", check=has_code("invalid-failures-table")
        ) as caught:
            read_failures(tmp_path)
        assert caught.value.code == "invalid-failures-table"
        failure = Failure("c", "tile", "x", "y")
        record_failures(tmp_path, "tile", ["c"], [failure])
        assert read_failures(tmp_path) == [failure]
        assert (tmp_path / f"failures-unreadable-{number}.csv").read_bytes() == content
        assert f"failures-unreadable-{number}.csv" in capsys.readouterr().err


def test_errors_survive_pickling_and_read_as_sentences():
    error = MissingMppError("a.svs: no mpp", "so a size in microns has no meaning", "Pass --slide.mpp 0.25")
    again = pickle.loads(pickle.dumps(error))
    assert isinstance(again, SlideError)
    assert str(again) == "a.svs: no mpp, so a size in microns has no meaning. Pass --slide.mpp 0.25"
    assert Failure.of("a", "tile", again) == Failure("a", "tile", error.reason, error.how)


def failure_of(function: Callable[[], object]) -> Failure:
    try:
        function()
    except Exception as error:
        return Failure.of("a", "tile", error)
    raise AssertionError("nothing was raised")


def test_an_error_of_the_system_names_the_file_and_the_remedy_but_no_folder(tmp_path: Path):
    missing = failure_of((tmp_path / "Dr Who" / "a.svs").read_bytes)
    assert missing.reason == "a.svs: no such file or directory"
    assert "not mounted" in missing.remedy
    assert failure_of(tmp_path.read_bytes).reason == f"{tmp_path.name}: is a directory"
    full = Failure.of("a", "tile", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    assert (full.reason, full.remedy[:15]) == ("no space left on device", "Free some space")
    assert Failure.of("a", "tile", OSError(errno.EIO, "Input/output error", 3)).reason == "input/output error"


def test_words_of_other_libraries_lose_their_folders(tmp_path: Path):
    folder = tmp_path / "Dr Who"
    folder.mkdir()
    (folder / "a.h5").write_text("not HDF5")
    damaged = failure_of(lambda: h5py.File(folder / "a.h5"))
    assert damaged.reason.startswith("OSError: Unable to")
    assert damaged.remedy.startswith("Check the file")
    missing = failure_of(lambda: h5py.File(folder / "b.h5"))
    assert "'b.h5'" in missing.reason
    assert "Who" not in missing.reason
    texts = {
        "cannot identify '/home/Dr Who/a.svs'": "cannot identify 'a.svs'",
        'bad "/x/a b.svs" and /y/z/c.svs:3': 'bad "a b.svs" and c.svs:3',
        "1/2 of tls://host:1/x, either/or\n  /": "1/2 of tls://host:1/x, either/or /",
    }
    for text, told in texts.items():
        assert Failure.of("a", "tile", ValueError(text)).reason == f"ValueError: {told}"


def test_errors_of_ours_lose_folders_as_well(tmp_path: Path):
    folder = tmp_path / "Smith John"
    folder.mkdir()
    (folder / "s1.h5").write_text("not HDF5")

    def read(name: str) -> None:
        try:
            h5py.File(folder / name)
        except OSError as error:
            raise ArtefactError(f"{name}: not readable", str(error), f"See {folder}/log\n of it") from None

    for name in ("s1.h5", "gone.h5"):
        failure = failure_of(lambda name=name: read(name))
        assert failure.reason.startswith(f"{name}: not readable, ")
        assert failure.remedy == "See log of it"
        assert str(tmp_path) not in failure.reason
        assert "Smith" not in failure.reason


def test_an_unexpected_error_tells_the_innermost_line_of_ours():
    failure = failure_of(lambda: files.hash_of({1, 2}))  # raised by json, which we called
    words, file, line = re.findall(r"(.*) \(([\w/]+\.py):(\d+)\)", failure.reason)[0]
    assert words == "TypeError: Object of type set is not JSON serializable"
    assert file == "store/files.py"
    assert "json.dumps" in Path(files.__file__).read_text().splitlines()[int(line) - 1]
    assert Failure.of("a", "tile", KeyError()).reason == "KeyError"  # no words, and it went through no line of ours


# ------------------------------------------------------------------------------- no folder names

PLAIN_TEXTS = [
    "1/2 of 3/4, and/or, either/or, n/a, w/o, I/O, 0.5 um/px, 30 tiles/s, input/output error",
    "a / b / c, 05/03/2024, f(x)/2/3, 50%/40%, </p> and <a/b/c>",
    "https://example.org/a/b.html?c=/d/e, tls://host:1/x/y, s3://bucket/a/b.svs",
    "no tile table in tiles/0.5mpp_224px_0px/s1.h5, see results/<name>/x/y and ~/.cache/selfvitmil/jobs",
]


@pytest.mark.parametrize("text", PLAIN_TEXTS)
def test_what_is_no_absolute_path_stays(text: str):
    assert without_folders(text) == text
    assert without_folders(text, ["/data/slides", "/"]) == text


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("/data/Smith John/1962/slide 1.svs", "slide 1.svs"),
        ("/data/Doe, Jane/s 1.svs: no such file", "s 1.svs: no such file"),
        ("/data/Dr. Smith/Smith 1/2.svs", "2.svs"),
        ("error:/data/smith/x.svs", "error:x.svs"),
        ("(name=/data/smith/x.svs)", "(name=x.svs)"),
        ("host:/export/smith/x.svs and //server/smith/x.svs", "host:x.svs and x.svs"),
        ("file:///home/smith/x.svs", "x.svs"),
        ("cannot open '/home/O'Brien/a b/s.h5', /home/O'Brien/s.h5", "cannot open 's.h5', s.h5"),
        ('"/home/O\'Brien/a, b/s.h5"', '"s.h5"'),
        ("C:\\Users\\John Smith\\x.svs or \\\\server\\smith\\x.svs", "x.svs or x.svs"),
        ("/data/a/x.svs or tiles/a.h5, 1/2", "x.svs or tiles/a.h5, 1/2"),
        ("/data/my slides has 1/2 of them and/or 0.5 um/px", "my slides has 1/2 of them and/or 0.5 um/px"),
        ("/data/x.svs: Input/output error", "x.svs: Input/output error"),
        ("in /data/smith/ and /home", "in smith/ and "),
    ],
)
def test_folders_are_cut(text: str, told: str):
    assert without_folders(text) == told


def test_known_folders_are_cut_at_their_end_and_nowhere_else():
    known = ["/data/slides", Path("/data/Meyer; Uwe: 2 of them and more of it/"), "/"]
    for text, told in {
        "/data/slides/a b; c/x.svs is gone": "a b; c/x.svs is gone",  # nobody can tell whether that is a sentence
        "/data/slides/Smith John/x.svs is gone": "x.svs is gone",
        "/data/slides2/Smith/x.svs is gone": "x.svs is gone",
        "/data/slides old/x.svs is gone": "x.svs is gone",
        "/mnt/data/slides/x.svs is gone": "x.svs is gone",
        "/data/Meyer; Uwe: 2 of them and more of it/x.svs": "x.svs",
        "file:///data/Meyer; Uwe: 2 of them and more of it/x.svs": "x.svs",
        "in /data/slides: none, in /data/slides.": "in : none, in .",
    }.items():
        assert without_folders(text, known) == told
    accents = "/data/M\u00fcller; Bj\u00f6rn"
    assert without_folders(f"{unicodedata.normalize('NFD', accents)}/x.svs", [accents]) == "x.svs"


WORDS = st.sampled_from(["Smith", "O'Brien", "Dr.", "Doe,", "1962", "Müller-Ä", "a_b", "0.5mpp", "2", "(old)", "s.1"])
FOLDERS = st.lists(st.lists(WORDS, min_size=1, max_size=5).map(" ".join), min_size=1, max_size=4)


@given(FOLDERS, st.sampled_from(["{}", "bad {}: gone", "'{}' is 1/2", 'of "{}"', "(x={})", "see:{}, a/b"]))
def test_of_any_absolute_path_the_name_is_left(folders: list[str], sentence: str):
    path = "/".join(["", *folders, "s 1.svs"])
    assert without_folders(sentence.format(path)) == sentence.format("s 1.svs")
