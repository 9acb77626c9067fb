"""Safe readers for files from others.

Models, feature files and whole studies are exchanged between institutions. A file must contain its own data: it must
not make us read another file, start a program, contact a network or allocate memory that its size does not justify.
Each reader raises `UnsafeFile`, a ValueError that says what was found; callers add the file's name and what to do.

Not covered: vulnerabilities of the parsers themselves (HDF5, expat, libjpeg). Keep those libraries up to date.
"""

from __future__ import annotations

import json
import os
import stat
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import h5py

MAX_JSON_BYTES = 64 << 20
"""Largest JSON or TOML file that is parsed; configs and model descriptions take a few kilobytes."""
MAX_OBJECTS = 10_000
"""Maximum number of groups and datasets in one HDF5 file; ours have fewer than 20."""
MAX_EXPANSION = 100
"""Maximum bytes in memory per byte in the file; float features compress by less than 3, coordinates by less than 50."""
SMALL_BYTES = 256 << 20
"""Data up to this size in memory may be compressed by any factor."""


class UnsafeFile(ValueError):
    """A file that refers to other files, or claims more data than it stores."""


# ---------------------------------------------------------------------------------------------------- JSON


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


def open_hdf5(path: Path) -> h5py.File:
    """Open an HDF5 file for reading, as a context manager; raise UnsafeFile if part of its data is elsewhere.

    Rejected anywhere in the file: external, soft and user-defined links, datasets with external storage, virtual
    datasets, and shapes that the stored bytes cannot fill.
    """
    import h5py

    file = h5py.File(path, "r")
    try:
        _check_hdf5(file)
    except BaseException:
        file.close()
        raise
    return file


def _check_hdf5(file: h5py.File) -> None:
    import h5py

    seen: set[Any] = {file.id}
    groups: list[Any] = [file]
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
            if isinstance(item, h5py.Dataset):
                _check_dataset(item, where)
            elif isinstance(item, h5py.Group):
                groups.append(item)


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
    """Call `torch.load` on the CPU with `weights_only=True`; raise UnsafeFile if tensors claim more data than is
    stored.

    Other exceptions of torch propagate: arbitrary bytes can make its parsers fail in any way.
    """
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
        elif isinstance(item, dict | list | tuple) and id(item) not in seen:
            seen.add(id(item))
            waiting += item.values() if isinstance(item, dict) else item
