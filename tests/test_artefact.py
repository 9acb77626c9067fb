"""Whole files or none, identity, the lock, failures."""

from __future__ import annotations

import errno
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

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
    for name, value in {"size_px": 225, "mpp": 0.51, "overlap_px": 1, "min_tissue": 0.6, "parent_mpp": (2.0,)}.items():
        assert artefact.hash_of(TileSettings(**{name: value}), {"b": 1, "a": (1, 2)}) != base
    assert set(TileSettings.model_fields) == {"size_px", "mpp", "overlap_px", "min_tissue", "parent_mpp"}


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
