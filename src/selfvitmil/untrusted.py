"""Files that somebody else may have made, opened so that they can do no harm.

Models, feature files and whole studies travel between hospitals. A file must hold its data itself: it may not make us
read another file, start a program, contact a network or reserve memory that its size does not justify. Each reader here
raises `UnsafeFile`, a ValueError whose text says what was found; callers add the file's name and what to do.

What is not covered: errors in the parsers themselves (HDF5, expat, libjpeg). Keep those libraries up to date.
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
"""Largest JSON or TOML file that is parsed; configs and model descriptions have some kilobytes."""
MAX_OBJECTS = 10_000
"""Groups and datasets of one HDF5 file; ours have fewer than 20."""
MAX_EXPANSION = 100
"""Bytes in memory per byte in the file; float features compress by less than 3, coordinates by less than 50."""
SMALL_BYTES = 256 << 20
"""Up to this size in memory, data may be compressed by any factor."""


class UnsafeFile(ValueError):
    """A file that reaches beyond itself, or claims more than it holds."""


# ---------------------------------------------------------------------------------------------------- JSON


def read_json(path: Path) -> Any:
    """Parse a JSON file; UnsafeFile where it is too large, nested without end, or holds NaN or infinity."""
    check_size(path)
    try:
        return json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_constant)
    except RecursionError:
        raise UnsafeFile("its values are nested too deeply") from None


def check_size(path: Path, most_bytes: int = MAX_JSON_BYTES) -> None:
    """UnsafeFile where the file is larger than `most_bytes`."""
    size = path.stat().st_size
    if size > most_bytes:
        raise UnsafeFile(f"it has {size:,} bytes, more than the {most_bytes:,} that are read of such a file")


def _no_constant(word: str) -> float:
    raise UnsafeFile(f"it holds {word}, which is no JSON number")


# ---------------------------------------------------------------------------------------------------- folders


def file_problem(folder: Path, name: str) -> str:
    """Why `name` is not a plain file inside `folder`; empty where it is. Links are not followed.

    A missing file is no problem here: opening it says so.
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
    return "" if stat.S_ISREG(mode) else "it is no regular file"


# ---------------------------------------------------------------------------------------------------- HDF5


def open_hdf5(path: Path) -> h5py.File:
    """Open an HDF5 file for reading, as a context manager; UnsafeFile where it does not hold all of its data itself.

    Refused anywhere in the file: external, soft and user-defined links, datasets whose values lie in other files
    (external storage) or come from other datasets (virtual), and shapes that the stored bytes cannot fill.
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
                raise UnsafeFile(f"it holds more than {MAX_OBJECTS:,} objects")
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
        raise UnsafeFile(f"the values of {where} lie in another file")
    if dataset.is_virtual:
        raise UnsafeFile(f"{where} is a virtual dataset, whose values may lie in other files")
    check_expansion(where, dataset.nbytes, dataset.id.get_storage_size())


def check_expansion(what: str, claimed_bytes: int, stored_bytes: int) -> None:
    """UnsafeFile where data would take far more memory than the file has bytes for it."""
    if claimed_bytes > max(SMALL_BYTES, MAX_EXPANSION * stored_bytes):
        raise UnsafeFile(f"{what} claims {claimed_bytes:,} bytes, the file stores {stored_bytes:,} for it")


# ---------------------------------------------------------------------------------------------------- torch


def load_torch(path: Path, **options: Any) -> Any:
    """`torch.load` on the CPU without running code of the file; UnsafeFile where tensors claim more than is stored.

    Whatever else torch raises comes through: bytes of any kind make its parsers fail in any way.
    """
    import torch

    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            claimed = sum(entry.file_size for entry in archive.infolist())
        check_expansion("the archive", claimed, path.stat().st_size)
    content = torch.load(path, map_location="cpu", weights_only=True, **options)
    for tensor in _tensors(content):
        if tensor.layout != torch.strided:
            raise UnsafeFile(f"it holds a {tensor.layout} tensor")
        # A stride of 0 repeats one stored value without end.
        if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
            raise UnsafeFile(f"a tensor claims the shape {tuple(tensor.shape)}, the file stores fewer values")
    return content


def _tensors(content: Any) -> Iterable[Any]:
    """All tensors of nested mappings and lists."""
    import torch

    waiting, seen = [content], set[int]()
    while waiting:
        item = waiting.pop()
        if isinstance(item, torch.Tensor):
            yield item
        elif isinstance(item, dict | list | tuple) and id(item) not in seen:
            seen.add(id(item))
            waiting += item.values() if isinstance(item, dict) else item
