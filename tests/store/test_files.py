"""Atomic writes; identities of files and settings."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from helpers.error_codes import has_code
from selfvitmil.errors import ArtefactError
from selfvitmil.settings import TileSettings
from selfvitmil.store.files import atomic_path, file_fingerprint, hash_of, remove_leftovers, write_bytes, write_text


def test_a_failing_write_leaves_the_old_file_and_nothing_else(tmp_path: Path):
    path = tmp_path / "a.txt"
    write_text(path, "old")

    def interrupted():
        with atomic_path(path) as temporary:
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
    with pytest.raises(
        ArtefactError,
        match=r"a\.h5 cannot be written, no space left on device\. Free some space",
        check=has_code("not-writable"),
    ):
        write_bytes(tmp_path / "a.h5", b"x")
    monkeypatch.undo()
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(ArtefactError, match=r"b\.h5 cannot be written", check=has_code("not-writable")):
        write_bytes(tmp_path / "file" / "b.h5", b"x")


def test_leftovers_of_a_killed_process_are_swept(tmp_path: Path):
    (tmp_path / "tiles").mkdir()
    (tmp_path / "tiles" / ".a.h5.123.part").write_text("half")
    (tmp_path / "tiles" / "b.part").write_text("the user's own")
    remove_leftovers(tmp_path)
    assert [path.name for path in (tmp_path / "tiles").iterdir()] == ["b.part"]


def test_hash_sees_every_setting_and_no_order():
    base = hash_of(TileSettings(), {"b": 1, "a": (1, 2)})
    assert hash_of(TileSettings(), {"a": [1, 2], "b": 1}) == base
    changed = {"size_px": 225, "mpp": 0.51, "overlap_px": 1, "min_tissue": 0.6, "parent_mpp": (2.0,)}
    changed |= {"quality": True, "exclude": ("pen",)}
    for name, value in changed.items():
        assert hash_of(TileSettings(**{name: value}), {"b": 1, "a": (1, 2)}) != base
    assert set(TileSettings.model_fields) == set(changed)


def test_fingerprint_is_of_content_only(tmp_path: Path):
    content = bytes(range(256)) * 20_000  # 5 MB
    first, copy, changed, longer = (tmp_path / name for name in "abcd")
    first.write_bytes(content)
    copy.write_bytes(content)
    os.utime(copy, (0, 0))
    changed.write_bytes(content[:-1] + b"!")
    longer.write_bytes(content + b"!")
    prints = [file_fingerprint(path) for path in (first, copy, changed, longer)]
    assert prints[0] == prints[1]
    assert len(set(prints)) == 3
