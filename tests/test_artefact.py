"""Whole files or none, identity, the lock, failures."""

from __future__ import annotations

import errno
import os
import pickle
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import h5py
import pytest

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


def test_an_unexpected_error_tells_the_innermost_line_of_ours():
    failure = failure_of(lambda: artefact.hash_of({1, 2}))  # raised by json, which we called
    words, file, line = re.findall(r"(.*) \((\w+\.py):(\d+)\)", failure.reason)[0]
    assert words == "TypeError: Object of type set is not JSON serializable"
    assert file == "artefact.py"
    assert "json.dumps" in Path(artefact.__file__).read_text().splitlines()[int(line) - 1]
    assert Failure.of("a", "tile", KeyError()).reason == "KeyError"  # no words, and it went through no line of ours
