"""Whole files or none, identity, the lock, failures."""

from __future__ import annotations

import csv
import errno
import io
import os
import pickle
import re
import subprocess
import sys
import time
import unicodedata
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path

import h5py
import pytest
from hypothesis import given
from hypothesis import strategies as st

from selfvitmil import artefact
from selfvitmil.artefact import Failure, read_failures, record_failures
from selfvitmil.errors import ArtefactError, LockError, MissingMppError, SlideError
from selfvitmil.settings import TileSettings


def test_a_failing_write_leaves_the_old_file_and_nothing_else(tmp_path: Path):
    path = tmp_path / "a.txt"
    artefact.write_text(path, "old")

    def interrupted():
        with artefact.atomic_path(path) as temporary:
            temporary.write_text("half of the new")
            raise RuntimeError("power cut")

    with pytest.raises(RuntimeError):
        interrupted()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_full_disk_and_forbidden_folder_are_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(self: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(ArtefactError, match=r"a\.h5 cannot be written, no space left on device\. Free some space"):
        artefact.write_bytes(tmp_path / "a.h5", b"x")
    monkeypatch.undo()
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(ArtefactError, match=r"b\.h5 cannot be written"):
        artefact.write_bytes(tmp_path / "file" / "b.h5", b"x")


def test_leftovers_of_a_killed_process_are_swept(tmp_path: Path):
    (tmp_path / "tiles").mkdir()
    (tmp_path / "tiles" / ".a.h5.123.part").write_text("half")
    (tmp_path / "tiles" / "b.part").write_text("the user's own")
    artefact.remove_leftovers(tmp_path)
    assert [path.name for path in (tmp_path / "tiles").iterdir()] == ["b.part"]


def test_hash_sees_every_setting_and_no_order():
    base = artefact.hash_of(TileSettings(), {"b": 1, "a": (1, 2)})
    assert artefact.hash_of(TileSettings(), {"a": [1, 2], "b": 1}) == base
    changed = {"size_px": 225, "mpp": 0.51, "overlap_px": 1, "min_tissue": 0.6, "parent_mpp": (2.0,)}
    changed |= {"pack": True, "pack_encoding": "png", "pack_quality": 90}
    for name, value in changed.items():
        assert artefact.hash_of(TileSettings(**{name: value}), {"b": 1, "a": (1, 2)}) != base
    assert set(TileSettings.model_fields) == set(changed)


def test_fingerprint_is_of_content_only(tmp_path: Path):
    content = bytes(range(256)) * 20_000  # 5 MB
    first, copy, changed, longer = (tmp_path / name for name in "abcd")
    first.write_bytes(content)
    copy.write_bytes(content)
    os.utime(copy, (0, 0))
    changed.write_bytes(content[:-1] + b"!")
    longer.write_bytes(content + b"!")
    prints = [artefact.fingerprint(path) for path in (first, copy, changed, longer)]
    assert prints[0] == prints[1]
    assert len(set(prints)) == 3


HOLDER = """
import sys, time
from pathlib import Path
from selfvitmil.artefact import study_lock
with study_lock(Path(sys.argv[1]), "tile"):
    print("held", flush=True)
    time.sleep(60)
"""


def test_lock_names_its_holder_and_dies_with_it(tmp_path: Path):
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(LockError, match=f"pid {holder.pid}"), artefact.study_lock(tmp_path, "tile"):
            pass
    finally:
        holder.kill()
        holder.wait()
    time.sleep(0.05)
    with artefact.study_lock(tmp_path, "tile"):
        assert f"pid {os.getpid()}" in (tmp_path / ".lock").read_text()
    assert (tmp_path / ".lock").read_text() == ""


def test_lock_of_another_machine_is_respected(tmp_path: Path):
    (tmp_path / ".lock").write_text("host elsewhere, pid 17, selfvitmil tile\n")
    with pytest.raises(LockError, match=r"host elsewhere, pid 17.*remove the file \.lock"):
        artefact.study_lock(tmp_path, "tile").__enter__()


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_on_a_file_system_without_locks_the_name_in_the_file_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
):
    def no_locks(*arguments: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(artefact.fcntl, "flock", no_locks)
    with artefact.study_lock(tmp_path, "tile"):
        with (
            pytest.raises(LockError, match=rf"pid {os.getpid()}, selfvitmil tile.*remove the file \.lock"),
            artefact.study_lock(tmp_path, "embed"),
        ):
            pass
        assert "selfvitmil tile" in (tmp_path / ".lock").read_text()  # that of the first is still there
    with artefact.study_lock(tmp_path, "embed"):
        assert "selfvitmil embed" in (tmp_path / ".lock").read_text()


def test_a_drive_that_fails_at_locking_is_not_taken_for_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def broken(*arguments: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(artefact.fcntl, "flock", broken)
    with pytest.raises(ArtefactError, match=r"\.lock cannot be written, input/output error") as caught:
        artefact.study_lock(tmp_path, "tile").__enter__()
    assert not isinstance(caught.value, LockError)


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
    assert (tmp_path / "failures.csv").read_text().splitlines()[0] == "slide,stage,reason,what to do"


ROWS = [Failure("Ä; 1", "check", "broken, really", "fix; it"), Failure("b", "tile", 'no "tissue"', "")]


@pytest.mark.parametrize(
    "saved_again",
    [
        lambda rows: "\ufeff" + table(rows, ";", "\r\n"),
        lambda rows: table([*rows[:2], [""] * 4, *rows[2:], [], ["", ""]], ","),
        lambda rows: table([[*row, "", ""] for row in rows], "\t"),
        lambda rows: table([row[:3] if not row[-1] else row for row in rows], ";"),
    ],
    ids=["semicolons", "blank rows", "tabs, empty columns", "short rows"],
)
def test_failures_that_a_spreadsheet_saved_again_are_read(
    tmp_path: Path, saved_again: Callable[[list[list[str]]], str]
):
    rows = [list(artefact.FAILURE_COLUMNS), *(list(astuple(row)) for row in ROWS)]
    (tmp_path / "failures.csv").write_text(saved_again(rows), encoding="utf-8", newline="")
    assert read_failures(tmp_path) == ROWS
    record_failures(tmp_path, "tile", ["c"], [Failure("c", "tile", "x", "y")])
    assert read_failures(tmp_path) == sorted([*ROWS, Failure("c", "tile", "x", "y")])


def table(rows: list[list[str]], separator: str, end: str = "\n") -> str:
    text = io.StringIO()
    csv.writer(text, delimiter=separator, lineterminator=end).writerows(rows)
    return text.getvalue()


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
    ],
    ids=["a further column", "not UTF-8", "an unquoted comma", "no header", "a workbook"],
)
def test_failures_that_cannot_be_read_are_put_aside_and_what_is_new_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes
):
    for number in (1, 2):
        (tmp_path / "failures.csv").write_bytes(content)
        with pytest.raises(ArtefactError, match=r"failures\.csv: not a readable table"):
            read_failures(tmp_path)
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


PLAIN_TEXTS = [
    "1/2 of 3/4, and/or, either/or, n/a, w/o, I/O, 0.5 um/px, 30 tiles/s, input/output error",
    "a / b / c, 05/03/2024, f(x)/2/3, 50%/40%, </p> and <a/b/c>",
    "https://example.org/a/b.html?c=/d/e, tls://host:1/x/y, s3://bucket/a/b.svs",
    "no tile table in tiles/0.5mpp_224px_0px/s1.h5, see results/<name>/x/y and ~/.cache/selfvitmil/jobs",
]


@pytest.mark.parametrize("text", PLAIN_TEXTS)
def test_what_is_no_absolute_path_stays(text: str):
    assert artefact.without_folders(text) == text
    assert artefact.without_folders(text, ["/data/slides", "/"]) == text


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
    assert artefact.without_folders(text) == told


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
        assert artefact.without_folders(text, known) == told
    accents = "/data/M\u00fcller; Bj\u00f6rn"
    assert artefact.without_folders(f"{unicodedata.normalize('NFD', accents)}/x.svs", [accents]) == "x.svs"


WORDS = st.sampled_from(["Smith", "O'Brien", "Dr.", "Doe,", "1962", "Müller-Ä", "a_b", "0.5mpp", "2", "(old)", "s.1"])
FOLDERS = st.lists(st.lists(WORDS, min_size=1, max_size=5).map(" ".join), min_size=1, max_size=4)


@given(FOLDERS, st.sampled_from(["{}", "bad {}: gone", "'{}' is 1/2", 'of "{}"', "(x={})", "see:{}, a/b"]))
def test_of_any_absolute_path_the_name_is_left(folders: list[str], sentence: str):
    path = "/".join(["", *folders, "s 1.svs"])
    assert artefact.without_folders(sentence.format(path)) == sentence.format("s 1.svs")


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
    failure = failure_of(lambda: artefact.hash_of({1, 2}))  # raised by json, which we called
    words, file, line = re.findall(r"(.*) \((\w+\.py):(\d+)\)", failure.reason)[0]
    assert words == "TypeError: Object of type set is not JSON serializable"
    assert file == "artefact.py"
    assert "json.dumps" in Path(artefact.__file__).read_text().splitlines()[int(line) - 1]
    assert Failure.of("a", "tile", KeyError()).reason == "KeyError"  # no words, and it went through no line of ours
