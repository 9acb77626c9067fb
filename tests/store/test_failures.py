"""failures.csv: what is written, read again and never lost."""

from __future__ import annotations

import errno
import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path

import h5py
import pytest

from selfvitmil.errors import ArtefactError, MissingMppError, SlideError
from selfvitmil.store import files
from selfvitmil.store.failures import Failure, read_failures, record_failures


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
        with pytest.raises(ArtefactError, match=r"failures\.csv: not a readable table") as caught:
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
