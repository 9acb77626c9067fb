"""Who may write into a study: one process alone (`study_lock`), or several shards of a run (`shard_lock`).

The operating system releases the lock of a process that dies, so on one machine a killed run blocks nobody. Between
machines, and on a file system without locks, other signs count. A process that works alone writes a line into `.lock`
and removes it at its end; a killed one leaves that line, and the study stays locked until the user removes the file. A
shard has a file below `.shards/` whose modification time it renews while it lives; without a renewal for some minutes
it counts as dead. Ages are measured by the clock of the file system alone, so the clocks of the machines do not matter.

Who works alone writes its line first and looks for shards then; a shard writes its file first and looks for the line
then. So of two that begin at the same moment at least one sees the other.
"""

from __future__ import annotations

import errno
import fcntl
import io
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from selfvitmil.errors import LockError
from selfvitmil.store.files import write_error
from selfvitmil.store.layout import StudyLayout

_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL}
"""Error numbers of file systems without locks: Lustre without its option `flock`, some network drives."""
_ALIVE = ".alive"
"""Suffix of a shard's file."""
_BEATS = 20
"""Renewals of a shard's file within the time after which it counts as dead."""
_POLL_S = 1.0


@contextmanager
def study_lock(study: Path, command: str, announce: Callable[[str], object] = str) -> Generator[None, None, None]:
    """Hold the study for this process alone; raise LockError when another process or a shard works on it.

    A shard on another machine that may be dead is waited for, until it gives a sign of life or counts as dead;
    `announce` gets a line that says so.
    """
    with _lock_file(study) as file:
        locked = _flock(file, study, fcntl.LOCK_EX)
        _refuse_other(file, study, locked)
        file.seek(0)
        file.truncate()
        file.write(f"host {socket.gethostname()}, pid {os.getpid()}, selfvitmil {command}\n")
        file.flush()
        try:
            _outlive_shards(study, locked, announce)
            yield
        finally:
            file.seek(0)
            file.truncate()


@contextmanager
def _lock_file(study: Path) -> Generator[io.TextIOWrapper, None, None]:
    path = StudyLayout(study).lock
    try:
        study.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise write_error(path, error) from error
    with os.fdopen(descriptor, "r+", encoding="utf-8") as file:
        yield file


def _flock(file: io.TextIOBase, study: Path, how: int) -> bool:
    """Lock the file; return False where the file system has no locks, raise LockError when another process has it."""
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _locked(study, _holder(file) or "; ".join(map(str, present_shards(study)))) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise write_error(StudyLayout(study).lock, error) from error
        return False
    return True


def _refuse_other(file: io.TextIOBase, study: Path, locked: bool) -> None:
    """Raise LockError when the line of a process elsewhere is in the file."""
    holder = _holder(file)
    if holder and (not locked or f"host {socket.gethostname()}," not in holder):
        raise LockError(
            f"{study.name}: another process works on this study, or was killed while it did ({holder})",
            "this file system cannot distinguish the two",
            "When that process is gone, remove the file .lock in the study and run the same command again",
            code="study-locked",
        )


def _locked(study: Path, holder: str) -> LockError:
    return LockError(
        f"{study.name}: another process works on this study ({holder})",
        "two at once could undo each other's work",
        "Wait until it has finished, or stop it",
        code="study-locked",
    )


def _holder(file: io.TextIOBase) -> str:
    file.seek(0)
    return file.read().strip()


# ---------------------------------------------------------------------------------------------------- shards


@dataclass(frozen=True)
class PresentShard:
    """A shard as its file shows it."""

    token: str
    shard: str
    """`3/40`."""
    host: str
    pid: int
    expiry_s: float
    """Without a renewal for so long it counts as dead."""
    renewed: float
    """Modification time of its file, by the clock of the file system."""

    def __str__(self) -> str:
        return f"shard {self.shard}, host {self.host}, pid {self.pid}"

    def is_alive(self, now: float) -> bool:
        """Return whether it counts as alive at a time of the file system's clock."""
        return now - self.renewed <= self.expiry_s


def present_shards(study: Path) -> list[PresentShard]:
    """Return the shards that have a file in the study, dead ones too."""
    found: list[PresentShard] = []
    for path in sorted(StudyLayout(study).shards.glob(f"*{_ALIVE}")):
        with suppress(OSError, ValueError, KeyError, TypeError):  # it has just ended, or is just being written
            with path.open(encoding="utf-8") as file:  # opened, so that a network drive asks its server
                info: dict[str, Any] = json.loads(file.read())
                renewed = os.fstat(file.fileno()).st_mtime
            words = str(info["shard"]), str(info["host"]), int(info["pid"])
            found.append(PresentShard(path.name.removesuffix(_ALIVE), *words, float(info["expiry_s"]), renewed))
    return found


class ShardPresence:
    """The file that shows that this shard lives; a thread renews it."""

    def __init__(self, study: Path, shard: str, expiry_s: float):
        self.folder = StudyLayout(study).shards
        host, pid = socket.gethostname(), os.getpid()
        self.token = f"{host}-{pid}-{secrets.token_hex(4)}"
        self.expiry_s = expiry_s
        self.lost = False
        """Whether others took this shard for dead: the study may be in other hands."""
        self._study = study
        self._path = self.folder / f"{self.token}{_ALIVE}"
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew_often, daemon=True)
        try:
            self.folder.mkdir(exist_ok=True)
            with self._path.open("x", encoding="utf-8") as file:
                json.dump({"shard": shard, "host": host, "pid": pid, "expiry_s": expiry_s}, file)
        except OSError as error:
            raise write_error(self._path, error) from error

    def start(self) -> None:
        """Begin to renew the file."""
        self._thread.start()

    def end(self) -> None:
        """Remove the file."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        with suppress(OSError):  # removed by others, who took this shard for dead
            self._path.unlink()

    def now(self) -> float:
        """Return the time by the file system's clock, which also shows that this shard lives."""
        try:
            os.utime(self._path)
            return self._path.stat().st_mtime
        except FileNotFoundError:
            self.lost = True
            return time.time()

    def others_alive(self) -> dict[str, float]:
        """Return the other shards that count as alive, each with the time of its last renewal."""
        try:
            now, shards = self.now(), present_shards(self._study)
        except OSError as error:
            raise write_error(self._path, error) from error
        return {each.token: each.renewed for each in shards if each.token != self.token and each.is_alive(now)}

    def _renew_often(self) -> None:
        while not self._ended.wait(self.expiry_s / _BEATS) and not self.lost:
            with suppress(OSError):  # a drive that hiccups: there are more renewals than needed
                self.now()


@contextmanager
def shard_lock(study: Path, shard: str, expiry_s: float) -> Generator[ShardPresence, None, None]:
    """Share the study with other shards; raise LockError when a process works on it alone.

    Such a process is waited for as long as a shard may be silent: the last shard of a run assembles its results alone,
    while others may just begin.
    """
    patience = time.monotonic() + expiry_s
    with _lock_file(study) as file:
        while True:
            try:
                presence = _join(file, study, shard, expiry_s)
                break
            except LockError:
                if time.monotonic() > patience:
                    raise
            time.sleep(min(_POLL_S, expiry_s / _BEATS))
        presence.start()
        try:
            yield presence
        finally:
            presence.end()


def _join(file: io.TextIOBase, study: Path, shard: str, expiry_s: float) -> ShardPresence:
    """Return the presence of a shard that shares the lock; raise LockError, and leave nothing, when it cannot."""
    locked = _flock(file, study, fcntl.LOCK_SH)
    presence = None
    try:
        presence = ShardPresence(study, shard, expiry_s)
        _refuse_other(file, study, locked)
    except BaseException:
        if presence is not None:
            presence.end()
        if locked:
            fcntl.flock(file, fcntl.LOCK_UN)
        raise
    return presence


def _outlive_shards(study: Path, locked: bool, announce: Callable[[str], object]) -> None:
    """Return when no shard works on the study; raise LockError when one does. Files of dead ones are removed.

    Where the operating system has given us the lock, no shard of this machine is alive.
    """
    lock, folder = StudyLayout(study).lock, StudyLayout(study).shards
    first: dict[str, float] = {}
    said = False
    while shards := present_shards(study):
        os.utime(lock)
        now = lock.stat().st_mtime
        waited_for: list[PresentShard] = []
        for each in shards:
            if (locked and each.host == socket.gethostname()) or not each.is_alive(now):
                (folder / f"{each.token}{_ALIVE}").unlink(missing_ok=True)
            elif first.setdefault(each.token, each.renewed) != each.renewed:
                raise _locked(study, str(each))
            else:
                waited_for.append(each)
        if not waited_for:
            return
        if not said:
            said = True
            words = "; ".join(f"{each}, last sign of life {now - each.renewed:.0f} s ago" for each in waited_for)
            announce(f"waiting for a sign of life of {words}")
        time.sleep(min(_POLL_S, min(each.expiry_s for each in waited_for) / _BEATS))
