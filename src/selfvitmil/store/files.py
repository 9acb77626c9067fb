"""Atomic writes, and identities of files and settings.

Every file of a study is written under a temporary name in its own folder, synced to disk and renamed, so that a reader
never sees a partial file.
"""

from __future__ import annotations

import csv
import errno
import hashlib
import io
import json
import os
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

from selfvitmil.errors import ArtefactError

# ---------------------------------------------------------------------------------------------------- atomic writes


@contextmanager
def atomic_path(path: Path) -> Generator[Path, None, None]:
    """Yield a temporary path beside `path`, synced and renamed to `path` at the end, or removed after an error.

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
        raise write_error(path, error) from error
    finally:
        with suppress(OSError):  # already renamed, or never created
            temporary.unlink()


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file atomically."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(content)


def write_text(path: Path, content: str) -> None:
    """Write a UTF-8 file atomically."""
    write_bytes(path, content.encode("utf-8"))


def csv_text(rows: Iterable[Iterable[Any]]) -> str:
    """Return rows, header first, as the text of a CSV file."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def write_csv(path: Path, rows: Iterable[Iterable[Any]]) -> None:
    """Write rows, header first, as a CSV file atomically."""
    write_text(path, csv_text(rows))


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary files that a killed process left in `folder`. Call only while the study is locked."""
    for temporary in folder.rglob(".*.part"):
        temporary.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


WRITE_REMEDIES = {
    errno.ENOSPC: "Free some space on that disk and run the same command again",
    errno.EDQUOT: "Free some of your quota and run the same command again",
    errno.EACCES: "Correct the permissions of that folder, or choose another",
    errno.EPERM: "Correct the permissions of that folder, or choose another",
    errno.EROFS: "That file system is read-only; choose another folder",
}


def write_error(path: Path, error: OSError) -> ArtefactError:
    """Return the error to raise when `path` cannot be written: what failed, why, and what to do."""
    reason = error.strerror or str(error)
    remedy = WRITE_REMEDIES.get(error.errno or 0, "Check the disk and run the same command again")
    return ArtefactError(
        f"{path.name} cannot be written", f"{reason[:1].lower()}{reason[1:]}", remedy, code="not-writable"
    )


# ---------------------------------------------------------------------------------------------------- identity


def hash_of(*parts: Any) -> str:
    """Return one SHA-256 over settings (pydantic models), plain values and mappings of them, in hexadecimal."""
    text = json.dumps([to_plain(part) for part in parts], sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def to_plain(value: Any) -> Any:
    """Return settings, mappings and sequences of them as values that JSON can hold."""
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in cast(Mapping[Any, Any], value).items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in cast(Sequence[Any], value)]
    return str(value) if isinstance(value, Path) else value


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def file_fingerprint(path: Path, blocks: int = 16, block_bytes: int = 1 << 16) -> str:
    """Return the identity of a file's content: a hash of its length and of evenly spaced blocks, both ends included.

    Slides have gigabytes, so the file is sampled. Name and dates do not count: a copy has the same fingerprint.
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
