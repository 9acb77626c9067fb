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
import itertools
import json
import os
import re
import socket
import sys
import traceback
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from selfvitmil.errors import ArtefactError, LockError, SelfVitMilError
from selfvitmil.store.layout import StudyLayout

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


_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL}
"""What file systems without locks answer: Lustre without its option `flock`, some network drives."""


@contextmanager
def study_lock(study: Path, command: str) -> Iterator[None]:
    """Hold the study for this process; raise LockError, naming host and pid, when another one has it.

    The operating system drops the lock when its holder dies, however it dies, so on one machine a killed run blocks
    nobody. Between machines, and on a file system without locks, there is only the line that the holder writes into the
    file and removes at its end. A run that was killed leaves it; nobody can tell it from one that still runs, so the
    study stays closed until its user removes the file.
    """
    path = StudyLayout(study).lock
    try:
        study.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise _explained(path, error) from error
    with os.fdopen(descriptor, "r+", encoding="utf-8") as file:
        locked = _flock(file, study)
        holder = _holder(file)
        if holder and (not locked or f"host {socket.gethostname()}," not in holder):
            raise LockError(
                f"{study.name}: another process works on this study, or was killed while it did ({holder})",
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


def _flock(file: io.TextIOBase, study: Path) -> bool:
    """Lock the file; False where the file system has no locks, LockError where another process has this one."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise LockError(
            f"{study.name}: another process works on this study ({_holder(file)})",
            "two at once could undo each other's work",
            "Wait until it has finished, or stop it",
        ) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise _explained(StudyLayout(study).lock, error) from error
        return False
    return True


def _holder(file: io.TextIOBase) -> str:
    file.seek(0)
    return file.read().strip()


# ---------------------------------------------------------------------------------------------------- folders

_WORD = r"""(?:[^\s"'/<>]|(?<=\w)'(?=\w))+"""
"""Part of a folder's name without blanks; with the apostrophe of O'Brien, not with quotes around a path."""
_FILE = r"[^\s/]*\.(?:svs|svslide|tiff?|ndpi|scn|mrxs|bif|czi|dcm|vm[su]|h5|pt|png|jpe?g|json|geojson|csv|xml|toml)"
"""Where a path ends, though blanks and slashes may follow."""
_PAIRS = r"\d/\d(?= of )|(?:and|either)/or|[uµ]m/px|input/output|i/o|n/a|w/o|(?:tiles|slides|steps|[kmg]b)/s"
"""Words with a slash that are no path."""
_FOLDER = rf"(?:(?!{_FILE},? ){_WORD}(?<![;:]) +(?!(?:{_PAIRS})\b(?!\.\w|/))){{0,5}}{_WORD}"
"""A folder's name, which may have a few blanks: to cut too much does less harm than to tell whose home it is."""
_START = r"(?<![\w./~)\]}<>%*])"
"""Before the slash that an absolute path begins with: not in tiles/a.h5, ~/x, </p>, f(x)/2."""
_ROOTS = re.compile(rf"{_START}/(?:home|Users|root|tmp|mnt|media|data|var|srv|scratch)(?![\w-]|\.\w)/*")
"""What may stand for a whole path of one folder."""


def without_folders(text: str, known: Iterable[str | Path] = ()) -> str:
    """A text of whatever origin with absolute paths cut down to the name of the file, fit to be mailed.

    Where a path with blanks begins and ends cannot always be told, so folders that are `known` are cut exactly, and
    vanish where they stand by themselves. Addresses (https://...), relative paths and words such as and/or stay.
    """
    text = _paths(tuple(map(str, known))).sub(lambda found: found["address"] or "", text)
    return _ROOTS.sub("", text)


def _spellings(folder: str) -> Iterator[str]:
    """Of an absolute folder other than the root; macOS takes accents apart."""
    folder = folder.rstrip("/")
    if folder.startswith("/"):
        yield from (folder, *(unicodedata.normalize(form, folder) for form in ("NFC", "NFD")))


@lru_cache(maxsize=32)
def _paths(known: tuple[str, ...]) -> re.Pattern[str]:
    """Addresses, which stay, and the folders of absolute paths, which do not."""
    spelt = sorted({form for folder in known for form in _spellings(folder)}, key=len, reverse=True)
    one_of_known = rf"(?:\bfile://|{_START})(?=/)(?:{'|'.join(map(re.escape, spelt))})" if spelt else r"(?!)"
    name = r"""(?=[^\s"'/\\])"""  # of the file, which stays
    forms = (
        r"""(?P<address>\b(?!file:)[a-z][\w+.-]*://[^\s"'<>,;]*)""",
        rf"""(?<=")/[^"\n]*/{name}""",  # between quotes: all up to the last slash
        rf"""(?<=')/(?:[^'\n]|'(?=\w))*/{name}""",
        rf"{one_of_known}/+(?:{_FOLDER}/+)*{name}",
        # By itself, and whole: neither /data/slides2 nor "/data/slides old/x" means /data/slides.
        rf"{one_of_known}/*(?![\w/-]|\.\w|(?: +{_WORD}){{1,5}}/)",
        rf"(?:\bfile:/+|{_START}(?<!:)/+|(?<=:)/(?!/))(?:{_FOLDER}/+)+{name}",
        rf"""(?:\b[a-z]:|(?<!\S)\\)\\(?:[^\\/:*?"'<>|\n]+\\)+{name}""",  # from Windows
    )
    return re.compile("|".join(forms), re.IGNORECASE)


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
        if isinstance(error, SelfVitMilError):  # of which many hold a library's words
            return cls(slide, stage, _one_line(error.reason), _one_line(error.how))
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
    words = _one_line(f"{error.strerror[:1].lower()}{error.strerror[1:]}")
    if isinstance(error.filename, str | bytes):
        return f"{Path(os.fsdecode(error.filename)).name}: {words}"
    return f"{words}{_place(error)}"


def _unexpected(error: BaseException) -> str:
    text = _one_line(str(error))
    return f"{type(error).__name__}{': ' if text else ''}{text}{_place(error)}"


def _one_line(text: str) -> str:
    return " ".join(without_folders(text).split())


def _place(error: BaseException) -> str:
    """The innermost line of ours that the exception went through, as ` (tiles.py:123)`."""
    package = Path(__file__).parent
    lines = [
        f" ({Path(frame.filename).relative_to(package).as_posix()}:{frame.lineno})"
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename).is_relative_to(package)
    ]
    return lines[-1] if lines else ""


FAILURE_COLUMNS = ("slide", "stage", "reason", "what to do")


def read_failures(study: Path) -> list[Failure]:
    """The rows of `failures.csv`, none when there is no such file; ArtefactError where it is no such table.

    A spreadsheet may have saved it again: with semicolons or tabs, blank rows, empty cells at the end.
    """
    path = StudyLayout(study).failures
    if not path.exists():
        return []
    try:
        text = path.read_text(encoding="utf-8-sig")
        header = next((line for line in text.splitlines() if line.strip(",;\t ")), "")
        reader = csv.reader(io.StringIO(text), delimiter=max(",;\t", key=header.count))
        rows = [_fitted(row) for row in reader if any(row)]
        if rows and rows[0] != FAILURE_COLUMNS:
            raise ValueError(f"its columns are {', '.join(filter(None, rows[0]))}")
    except (OSError, ValueError, csv.Error) as error:
        why = (error.strerror or "") if isinstance(error, OSError) else str(error)
        how = "Move it away: the next command writes it anew"
        raise ArtefactError("failures.csv: not a readable table of failures", why, how) from None
    return [Failure(*row) for row in rows[1:]]


def _fitted(row: list[str]) -> tuple[str, ...]:
    """As many cells as there are columns."""
    width = len(FAILURE_COLUMNS)
    if any(row[width:]):
        raise ValueError(f"a row has {len(row)} cells under {width} columns")
    return (*row[:width], *[""] * (width - len(row)))


def record_failures(study: Path, stage: str, tried: Iterable[str], failures: Iterable[Failure]) -> None:
    """Bring `failures.csv` up to date for the slides that `stage` has just tried; other rows stay.

    One that cannot be read, since somebody edited it, is put aside and a line on stderr says so: the work is done by
    now, and nothing of it may be lost.
    """
    tried = set(tried)
    path = StudyLayout(study).failures
    try:
        before = read_failures(study)
    except ArtefactError as error:
        before = []
        _put_aside(path, error)
    kept = [row for row in before if row.stage != stage or row.slide not in tried]
    rows = sorted({*kept, *failures})
    if not rows and not path.exists():
        return
    write_csv(path, [FAILURE_COLUMNS, *map(astuple, rows)])


def _put_aside(path: Path, error: ArtefactError) -> None:
    places = (path.with_name(f"{path.stem}-unreadable-{k}{path.suffix}") for k in itertools.count(1))
    aside = next(place for place in places if not place.exists())
    try:
        path.rename(aside)
    except OSError as trouble:
        raise _explained(path, trouble) from trouble
    print(f"{error.reason}. It is now {aside.name}, and a new one is written", file=sys.stderr)
