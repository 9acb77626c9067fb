"""The lock of a study: one process at a time writes into it."""

from __future__ import annotations

import errno
import fcntl
import io
import os
import socket
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from selfvitmil.errors import LockError
from selfvitmil.store.files import write_error
from selfvitmil.store.layout import StudyLayout

_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL}
"""Error numbers of file systems without locks: Lustre without its option `flock`, some network drives."""


@contextmanager
def study_lock(study: Path, command: str) -> Generator[None, None, None]:
    """Hold the study for this process; raise LockError with host and pid when another process holds it.

    The operating system releases the lock when its holder dies, so on one machine a killed run blocks nobody. Between
    machines, and on a file system without locks, only the line counts that the holder writes into the file and removes
    at its end. A killed run leaves that line and looks like one that still works, so the study stays locked until the
    user removes the file.
    """
    path = StudyLayout(study).lock
    try:
        study.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise write_error(path, error) from error
    with os.fdopen(descriptor, "r+", encoding="utf-8") as file:
        locked = _flock(file, study)
        holder = _holder(file)
        if holder and (not locked or f"host {socket.gethostname()}," not in holder):
            raise LockError(
                f"{study.name}: another process works on this study, or was killed while it did ({holder})",
                "this file system cannot distinguish the two",
                "When that process is gone, remove the file .lock in the study and run the same command again",
                code="study-locked",
            )
        file.seek(0)
        file.truncate()
        file.write(f"host {socket.gethostname()}, pid {os.getpid()}, selfvitmil {command}\n")
        file.flush()
        try:
            yield
        finally:
            file.seek(0)
            file.truncate()


def _flock(file: io.TextIOBase, study: Path) -> bool:
    """Lock the file; return False where the file system has no locks, raise LockError when another process has it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise LockError(
            f"{study.name}: another process works on this study ({_holder(file)})",
            "two at once could undo each other's work",
            "Wait until it has finished, or stop it",
            code="study-locked",
        ) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise write_error(StudyLayout(study).lock, error) from error
        return False
    return True


def _holder(file: io.TextIOBase) -> str:
    file.seek(0)
    return file.read().strip()
