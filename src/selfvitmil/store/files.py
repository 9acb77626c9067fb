"""Atomic writes, identities of files and settings, and safe readers for files from others.

Every file of a study is written under a temporary name in its own folder, synced to disk and renamed, so that a reader
never sees a partial file.

Models, feature files and whole studies are exchanged between institutions. A file must contain its own data: it must
not make us read another file, start a program, contact a network or allocate memory that its size does not justify.
Each safe reader raises `UnsafeFile`, a ValueError that says what was found; callers add the file's name and what to do.
Not covered: vulnerabilities of the parsers themselves (HDF5, expat, libjpeg). Keep those libraries up to date.
"""

from __future__ import annotations

import csv
import errno
import hashlib
import io
import itertools
import json
import os
import re
import secrets
import socket
import stat
import zipfile
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from selfvitmil.errors import ArtefactError, SelfVitMilError
from selfvitmil.store.guard import UnsafeFile, check_first, helper, limited

if TYPE_CHECKING:
    import h5py  # pyright: ignore[reportMissingTypeStubs]


# ---------------------------------------------------------------------------------------------------- atomic writes


@contextmanager
def atomic_path(path: Path) -> Generator[Path, None, None]:
    """Yield a temporary path beside `path`, synced and renamed to `path` at the end, or removed after an error.

    with atomic_path(folder / "a.h5") as temporary, h5py.File(temporary, "w") as file: ...
    """
    temporary = temporary_beside(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        sync(temporary)
        os.replace(temporary, path)
        sync(path.parent)
    except OSError as error:
        raise write_error(path, error) from error
    finally:
        with suppress(OSError):  # already renamed, or never created
            temporary.unlink()


def temporary_beside(path: Path) -> Path:
    """Return a hidden name beside `path` that nothing else uses, not even a process with our number on another
    machine."""
    head = path.name.encode()[:MAX_HEAD].decode(errors="ignore")
    return path.with_name(f".{head}.{HOST}.{os.getpid()}.{_PROCESS}{next(_COUNT)}.part")


HOST = re.sub(r"[^\w-]", "_", socket.gethostname().partition(".")[0])[:32]
"""Name of this machine, for names of files."""
MAX_HEAD = 160
"""Bytes of a file's name that its temporary name repeats: file systems allow 255 in all."""
_PROCESS = secrets.token_hex(3)
"""Distinguishes processes with the same number on machines with the same name, as containers have."""
_COUNT = itertools.count()


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


def sync(path: Path) -> None:
    """Return when the content of a file, or the names in a folder, are on the disk."""
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


# ---------------------------------------------------------------------------------------------------- files from others

MAX_JSON_BYTES = 64 << 20
"""Largest JSON or TOML file that is parsed; configs and model descriptions take a few kilobytes."""
MAX_OBJECTS = 10_000
"""Maximum number of groups and datasets in one HDF5 file; ours have fewer than 20."""
MAX_EXPANSION = 100
"""Maximum bytes in memory per byte in the file; float features compress by less than 3, coordinates by less than 50."""
SMALL_BYTES = 256 << 20
"""Data up to this size in memory may be compressed by any factor."""


class DamagedFile(UnsafeFile):
    """A file that cannot be parsed."""


class ForeignObject(UnsafeFile):
    """A file that would create objects of a program, which can run any code."""

    def __init__(self, name: str):
        super().__init__(f"it holds more than numbers ({name}), and loading that could run code; nothing was run")
        self.name = name


# ---------------------------------------------------------------------------------------------------- JSON


def section(info: Mapping[str, Any] | None, *keys: str) -> Mapping[str, Any]:
    """Return a part of what a JSON file holds, by the keys on the way to it; empty where there is none."""
    found: Any = info
    for key in keys:
        found = cast("Mapping[str, Any]", found).get(key) if isinstance(found, Mapping) else None
    return cast("Mapping[str, Any]", found if isinstance(found, Mapping) else {})


def read_json(path: Path) -> Any:
    """Parse a JSON file; raise UnsafeFile if it is too large, nested too deeply, or contains NaN or infinity."""
    check_size(path)
    try:
        return json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_constant)
    except RecursionError:
        raise UnsafeFile("its values are nested too deeply") from None


def check_size(path: Path, most_bytes: int = MAX_JSON_BYTES) -> None:
    """Raise UnsafeFile if the file is larger than `most_bytes`."""
    size = path.stat().st_size
    if size > most_bytes:
        raise UnsafeFile(f"it has {size:,} bytes; the limit for such a file is {most_bytes:,}")


def _no_constant(word: str) -> float:
    raise UnsafeFile(f"it contains {word}, which is not a JSON number")


def read_json_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the objects of a log with one per line, and how many lines are none; nothing where there is no file.

    A crash leaves a last line that is torn or full of zeros.
    """
    objects: list[dict[str, Any]] = []
    damaged = 0
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else ():
        try:
            value = json.loads(text)
        except (json.JSONDecodeError, RecursionError):
            value = None
        if isinstance(value, dict):
            objects.append(cast("dict[str, Any]", value))
        else:
            damaged += 1
    return objects, damaged


# ---------------------------------------------------------------------------------------------------- folders


def file_problem(folder: Path, name: str) -> str:
    """Return why `name` is not a plain file inside `folder`, or an empty string if it is. Links are not followed.

    A missing file is not reported here: opening it raises the error.
    """
    parts = name.split("/")
    if not name or "\\" in name or "\0" in name or any(part in ("", ".", "..") for part in parts):
        return "its path leads out of the folder"
    place, mode = folder, 0
    for part in parts:
        place = place / part
        try:
            mode = os.lstat(place).st_mode
        except FileNotFoundError:
            return ""
        if stat.S_ISLNK(mode):
            return "it is a link, and links may lead anywhere"
    return "" if stat.S_ISREG(mode) else "it is not a regular file"


# ---------------------------------------------------------------------------------------------------- HDF5


@contextmanager
def write_hdf5(path: Path) -> Generator[Any]:
    """Yield a new HDF5 file, which takes its place when it is complete."""
    import h5py  # pyright: ignore[reportMissingTypeStubs]

    with atomic_path(path) as temporary, h5py.File(temporary, "w") as file:
        yield file
    helper.trust("hdf5", path)


@contextmanager
def open_hdf5(path: Path) -> Generator[h5py.File, None, None]:
    """Yield an HDF5 file for reading; raise UnsafeFile if it is damaged or part of its data is elsewhere.

    Rejected anywhere in the file: external, soft and user-defined links, datasets with external storage, virtual
    datasets, and shapes that the stored bytes cannot fill. Damaged structures make the library fail in any way,
    wherever they are read, so all exceptions inside the block become UnsafeFile, but for those of the drive (OSError),
    ValueError and KeyError, which every caller handles, and our own.
    """
    import h5py  # pyright: ignore[reportMissingTypeStubs]

    check_first("hdf5", path)
    try:
        with limited(), h5py.File(path, "r") as file:
            check_hdf5(file)
            yield file
    except (OSError, ValueError, KeyError, SelfVitMilError):
        raise
    except Exception as error:
        raise UnsafeFile(f"its HDF5 structures are damaged ({type(error).__name__}: {error})") from error


def check_hdf5(file: h5py.File) -> list[Any]:
    """Return all groups and datasets of a file; raise UnsafeFile if part of its data is elsewhere."""
    import h5py  # pyright: ignore[reportMissingTypeStubs]

    seen: set[Any] = set()
    groups: list[Any] = [file]
    items: list[Any] = [file]
    while groups:
        group = groups.pop()
        for name in group:
            where = f"{group.name}/{name}".lstrip("/")
            link = _link(group, name, where)
            if isinstance(link, h5py.ExternalLink):
                raise UnsafeFile(f"{where} is a link to another file")
            if not isinstance(link, h5py.HardLink):
                raise UnsafeFile(f"{where} is a soft link, which may lead to another file")
            item = group[name]
            if item.id in seen:
                continue
            seen.add(item.id)
            if len(seen) > MAX_OBJECTS:
                raise UnsafeFile(f"it contains more than {MAX_OBJECTS:,} objects")
            items.append(item)
            if isinstance(item, h5py.Dataset):
                _check_dataset(item, where)
            elif isinstance(item, h5py.Group):
                groups.append(item)
    return items


def _link(group: Any, name: str, where: str) -> Any:
    try:
        return group.get(name, getlink=True)
    except TypeError:
        raise UnsafeFile(f"{where} is a link of an unknown kind") from None


def _check_dataset(dataset: Any, where: str) -> None:
    if dataset.external:
        raise UnsafeFile(f"the values of {where} are in another file")
    if dataset.is_virtual:
        raise UnsafeFile(f"{where} is a virtual dataset, whose values may be in other files")
    check_expansion(where, dataset.nbytes, dataset.id.get_storage_size())


def check_expansion(what: str, claimed_bytes: int, stored_bytes: int) -> None:
    """Raise UnsafeFile if data would take far more memory than the file has bytes for it."""
    if claimed_bytes > max(SMALL_BYTES, MAX_EXPANSION * stored_bytes):
        raise UnsafeFile(f"{what} claims {claimed_bytes:,} bytes, but the file stores {stored_bytes:,}")


# ---------------------------------------------------------------------------------------------------- torch


def load_torch(path: Path, **options: Any) -> Any:
    """Call `torch.load` on the CPU with `weights_only=True`; OSError is the drive's, and all else is in our words.

    torch advises to load with `weights_only=False` what it refuses, which would run the code of the file's author.

    Raises
    ------
    ForeignObject
        The file holds more than tensors, numbers and text.
    DamagedFile
        It cannot be parsed.
    UnsafeFile
        Tensors claim more data than is stored.
    """
    try:
        return _load_torch(path, **options)
    except (OSError, UnsafeFile):
        raise
    except Exception as error:  # bytes of any kind make the parsers fail in any way
        foreign = re.search(r"GLOBAL (\S+)", str(error))
        if foreign:
            raise ForeignObject(foreign[1]) from error
        raise DamagedFile("it is damaged, cut short, or no file that PyTorch has written") from error


def _load_torch(path: Path, **options: Any) -> Any:
    import torch

    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            claimed = sum(entry.file_size for entry in archive.infolist())
        check_expansion("the archive", claimed, path.stat().st_size)
    content = torch.load(path, map_location="cpu", weights_only=True, **options)
    for tensor in _tensors(content):
        if tensor.layout != torch.strided:
            raise UnsafeFile(f"it contains a {tensor.layout} tensor")
        # A stride of 0 repeats one stored value.
        if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
            raise UnsafeFile(f"a tensor claims the shape {tuple(tensor.shape)}, but the file stores fewer values")
    return content


def _tensors(content: Any) -> Iterable[Any]:
    """Yield all tensors of nested mappings and lists."""
    import torch

    waiting, seen = [content], set[int]()
    while waiting:
        item = waiting.pop()
        if isinstance(item, torch.Tensor):
            yield item
        elif isinstance(item, dict | list | tuple):
            nested = cast("dict[Any, Any] | list[Any] | tuple[Any, ...]", item)
            if id(nested) not in seen:
                seen.add(id(nested))
                waiting += nested.values() if isinstance(nested, dict) else nested
