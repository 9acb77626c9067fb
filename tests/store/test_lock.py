"""One process at a time works on a study."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from helpers.error_codes import has_code
from selfvitmil.errors import ArtefactError, LockError
from selfvitmil.store import lock
from selfvitmil.store.lock import study_lock

HOLDER = """
import sys, time
from pathlib import Path
from selfvitmil.store.lock import study_lock
with study_lock(Path(sys.argv[1]), "tile"):
    print("held", flush=True)
    time.sleep(60)
"""


def test_lock_names_its_holder_and_dies_with_it(tmp_path: Path):
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with (
            pytest.raises(LockError, match=f"pid {holder.pid}", check=has_code("study-locked")),
            study_lock(tmp_path, "tile"),
        ):
            pass
    finally:
        holder.kill()
        holder.wait()
    time.sleep(0.05)
    with study_lock(tmp_path, "tile"):
        assert f"pid {os.getpid()}" in (tmp_path / ".lock").read_text()
    assert (tmp_path / ".lock").read_text() == ""


def test_lock_of_another_machine_is_respected(tmp_path: Path):
    (tmp_path / ".lock").write_text("host elsewhere, pid 17, selfvitmil tile\n")
    with pytest.raises(
        LockError, match=r"host elsewhere, pid 17.*remove the file \.lock", check=has_code("study-locked")
    ):
        study_lock(tmp_path, "tile").__enter__()


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_on_a_file_system_without_locks_the_name_in_the_file_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
):
    def no_locks(*arguments: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(lock.fcntl, "flock", no_locks)
    with study_lock(tmp_path, "tile"):
        with (
            pytest.raises(
                LockError,
                match=rf"pid {os.getpid()}, selfvitmil tile.*remove the file \.lock",
                check=has_code("study-locked"),
            ),
            study_lock(tmp_path, "embed"),
        ):
            pass
        assert "selfvitmil tile" in (tmp_path / ".lock").read_text()  # that of the first is still there
    with study_lock(tmp_path, "embed"):
        assert "selfvitmil embed" in (tmp_path / ".lock").read_text()


def test_a_drive_that_fails_at_locking_is_not_taken_for_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def broken(*arguments: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(lock.fcntl, "flock", broken)
    with pytest.raises(
        ArtefactError, match=r"\.lock cannot be written, input/output error", check=has_code("not-writable")
    ) as caught:
        study_lock(tmp_path, "tile").__enter__()
    assert not isinstance(caught.value, LockError)
