"""Files that are either whole or not there: atomic writes, identity hashes, the study's lock, `failures.csv`.

Every file of a study is written under a temporary name in its own folder, synced to disk and renamed, so that a reader
never sees half of one. Every artefact stores one hash over all the settings and inputs that made it; a rerun compares
hashes and redoes only what is not current.
"""

from __future__ import annotations

import csv
import errno
import fcntl
import hashlib
import io
import json
import os
import re
import socket
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from selfvitmil.errors import ArtefactError, LockError, SelfVitMilError

# ---------------------------------------------------------------------------------------------------- whole files


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A temporary path beside `path`; on leaving without error it is synced and renamed to `path`, else removed.

    with atomic_path(folder / "a.h5") as temporary, h5py.File(temporary, "w") as file: ...
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        _sync(temporary)
        os.replace(temporary, path)
        _sync(path.parent)
    except OSError as error:
        raise _explained(path, error) from error
    finally:
        with suppress(OSError):  # gone already after the rename, or never made
            temporary.unlink()


def write_bytes(path: Path, content: bytes) -> None:
    """Write a whole file atomically."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(content)


def write_text(path: Path, content: str) -> None:
    """Write a whole UTF-8 file atomically."""
    write_bytes(path, content.encode("utf-8"))


def csv_text(rows: Iterable[Iterable[Any]]) -> str:
    """Rows, the header first, as the text of a csv file."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def write_csv(path: Path, rows: Iterable[Iterable[Any]]) -> None:
    """Write rows, the header first, atomically."""
    write_text(path, csv_text(rows))


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary files that a killed process left in `folder`. Call with the study locked."""
    for temporary in folder.rglob(".*.part"):
        temporary.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_REMEDIES = {
    errno.ENOSPC: "Free some space on that disk and run the same command again",
    errno.EDQUOT: "Free some of your quota and run the same command again",
    errno.EACCES: "Give yourself the right to write there, or choose another folder",
    errno.EPERM: "Give yourself the right to write there, or choose another folder",
    errno.EROFS: "That file system is read-only; choose another folder",
}


def _explained(path: Path, error: OSError) -> ArtefactError:
    reason = error.strerror or str(error)
    remedy = _REMEDIES.get(error.errno or 0, "Check the disk and run the same command again")
    return ArtefactError(f"{path.name} cannot be written", f"{reason[:1].lower()}{reason[1:]}", remedy)


# ---------------------------------------------------------------------------------------------------- identity


def hash_of(*parts: Any) -> str:
    """One hash over settings (pydantic models), plain values and mappings of them, in hexadecimal."""
    text = json.dumps([_plain(part) for part in parts], sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def _plain(value: Any) -> Any:
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def sha256(path: Path) -> str:
    """Of the whole file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fingerprint(path: Path, blocks: int = 16, block_bytes: int = 1 << 16) -> str:
    """Identity of a file's content: its length and evenly spread blocks of it, ends included.

    A slide has gigabytes, so not all of it is read. Neither its name nor its dates count: copying changes nothing.
    """
    digest = hashlib.sha256()
    with path.open("rb") as file:
        length = file.seek(0, os.SEEK_END)
        digest.update(str(length).encode())
        last = max(0, length - block_bytes)
        for k in range(blocks):
            file.seek(last * k // (blocks - 1))
            digest.update(file.read(block_bytes))
            if last == 0:
                break
    return digest.hexdigest()


# ---------------------------------------------------------------------------------------------------- lock


@contextmanager
def study_lock(study: Path, command: str) -> Iterator[None]:
    """Hold the study for this process; raise LockError, naming host and pid, when another one has it.

    The operating system drops the lock when its holder dies, however it dies, so a killed run blocks nobody.
    """
    path = study / ".lock"
    try:
        study.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise _explained(path, error) from error
    with os.fdopen(descriptor, "r+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise LockError(
                f"{study.name}: another process works on this study ({_holder(file)})",
                "two at once could undo each other's work",
                "Wait until it has finished, or stop it",
            ) from None
        holder = _holder(file)
        if holder and f"host {socket.gethostname()}," not in holder:
            # Some network drives do not share locks between machines: then the name in the file is all we have.
            raise LockError(
                f"{study.name}: another machine's process works on this study, or was killed there ({holder})",
                "this file system may not tell the two apart",
                "When that process is gone, remove the file .lock in the study and run the same command again",
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


def _holder(file: io.TextIOBase) -> str:
    file.seek(0)
    return file.read().strip()


# ---------------------------------------------------------------------------------------------------- failures


@dataclass(frozen=True, order=True)
class Failure:
    """One slide that a stage could not do."""

    slide: str
    stage: str
    reason: str
    remedy: str

    @classmethod
    def of(cls, slide: str, stage: str, error: BaseException) -> Failure:
        """From any exception. One that was not raised on purpose is shown with its type and the line it came through.

        Files are named without their folders, since a `failures.csv` may be mailed.
        """
        if isinstance(error, SelfVitMilError):
            return cls(slide, stage, error.reason, error.how)
        if isinstance(error, OSError):
            remedy = _REMEDIES_ANY.get(
                error.errno or 0, "Check the file and its drive, then run the same command again"
            )
            return cls(slide, stage, _reason_of_os_error(error), remedy)
        return cls(slide, stage, _unexpected(error), "Please report this, with the slide's format")


_REMEDIES_ANY = {
    **_REMEDIES,
    errno.EACCES: "Give yourself the right to read or write it",
    errno.EPERM: "Give yourself the right to read or write it",
    errno.ENOENT: "See whether it was moved or renamed, or its drive is not mounted",
}
"""For an OSError of which we do not know whether it came from reading or writing."""


def _reason_of_os_error(error: OSError) -> str:
    if not error.strerror:  # a library's own words
        return _unexpected(error)
    words = without_folders(f"{error.strerror[:1].lower()}{error.strerror[1:]}")
    if isinstance(error.filename, str | bytes):
        return f"{Path(os.fsdecode(error.filename)).name}: {words}"
    return f"{words}{_place(error)}"


def _unexpected(error: BaseException) -> str:
    text = without_folders(str(error))
    return f"{type(error).__name__}{': ' if text else ''}{text}{_place(error)}"


def _place(error: BaseException) -> str:
    """The innermost line of ours that the exception went through, as ` (tiles.py:123)`."""
    package = Path(__file__).parent
    lines = [
        f" ({Path(frame.filename).relative_to(package).as_posix()}:{frame.lineno})"
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename).is_relative_to(package)
    ]
    return lines[-1] if lines else ""


_FOLDERS = re.compile(r"""(?<=["'])/[^"'\n]*/|(?<![\w.:/])/(?:[^\s"'/]+/)+""")
"""The folders of an absolute path: all up to the last slash between quotes, or up to a blank outside of them."""


def without_folders(text: str) -> str:
    """In one line, with absolute paths cut down to the name of the file."""
    return " ".join(_FOLDERS.sub("", text).split())


FAILURE_COLUMNS = ("slide", "stage", "reason", "what to do")


def read_failures(study: Path) -> list[Failure]:
    """The rows of `failures.csv`; none when there is no such file."""
    path = study / "failures.csv"
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file))
    return [Failure(*row) for row in rows[1:]]


def record_failures(study: Path, stage: str, tried: Iterable[str], failures: Iterable[Failure]) -> None:
    """Bring `failures.csv` up to date for the slides that `stage` has just tried; other rows stay."""
    tried = set(tried)
    kept = [row for row in read_failures(study) if row.stage != stage or row.slide not in tried]
    rows = sorted({*kept, *failures})
    path = study / "failures.csv"
    if not rows and not path.exists():
        return
    write_csv(path, [FAILURE_COLUMNS, *map(astuple, rows)])
