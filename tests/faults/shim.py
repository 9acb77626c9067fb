"""A layer under the file operations of a process in which the n-th call fails.

Installed in a fork only. Counted are calls on files below the given folders: open, write, read, fsync, rename, mkdir,
unlink, mmap, pread. HDF5 files are read through Python file objects here, so that the library's reads count too; its
writes count as one, at the end. Not covered: OpenSlide and safetensors, which read files in native code.
"""

from __future__ import annotations

import builtins
import errno
import io
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SHORT = 0
"""In place of an error number: fewer bytes are written or read than asked for."""
KINDS = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EINTR, SHORT)
_POSSIBLE = {
    "open": {errno.EIO, errno.EINTR},
    "create": {errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EINTR},
    "write": {errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EINTR, SHORT},
    "read": {errno.EIO, errno.EINTR, SHORT},
    "mmap": {errno.EIO},
    "fsync": {errno.EIO, errno.ENOSPC, errno.EDQUOT},
    "rename": {errno.EIO, errno.ENOSPC, errno.EDQUOT},
    "mkdir": {errno.EIO, errno.ENOSPC, errno.EDQUOT},
    "unlink": {errno.EIO},
}


@dataclass
class Shim:
    """Fails call number `at` (the first is 1; 0 never) on files below `folders`."""

    folders: tuple[Path, ...]
    at: int = 0
    kind: int = errno.EIO
    lasting: bool = False
    """Whether all later calls that this kind of fault can hit fail as well."""
    count: int = 0
    fired: list[str] = field(default_factory=list)
    crash: bool = False
    """Instead of failing call number `at`, the machine loses power there: what was not synced is gone or torn."""
    dirty: dict[str, int] = field(default_factory=dict)
    """Files written to since they were last synced, with their length then: what is behind it may be lost."""
    renamed: list[tuple[str, bytes | None]] = field(default_factory=list)
    """Names that were replaced in folders not synced since, with what they held before."""
    report: Path | None = None
    """Where to write what happened: the number of calls, and the first that failed."""

    def concerns(self, path: Any) -> bool:
        if isinstance(path, int):
            try:
                path = os.readlink(f"/proc/self/fd/{path}")
            except OSError:
                return False
        try:
            text = os.fsdecode(os.path.abspath(os.fspath(path)))
        except TypeError:
            return False
        return any(text.startswith(f"{folder}/") for folder in self.folders)

    def fails(self, operation: str, path: Any) -> int | None:
        """The kind of fault that this call meets, if any."""
        self.count += 1
        first = self.count == self.at
        if first and self.crash:
            self.lose_power(operation, path)
        if not first and not (self.lasting and self.fired):
            return None
        # EINTR for ever would be a hang by design: Python tries again.
        kind = self.kind if self.kind in _POSSIBLE[operation] else errno.EIO
        if not first and (self.kind not in _POSSIBLE[operation] or kind in (errno.EINTR, SHORT)):
            return None
        self.fired.append(f"{operation} {path}")
        return kind

    def check(self, operation: str, path: Any) -> None:
        """Raise the error of this call, if it meets one."""
        kind = self.fails(operation, path)
        if kind is not None:
            kind = kind or errno.EIO
            name = os.fspath(path) if isinstance(path, str | bytes | os.PathLike) else None  # as the system does
            raise OSError(kind, os.strerror(kind), name)

    def writing(self, path: Any) -> None:
        """Note that a file is about to get content which is not on the disk yet."""
        name = os.path.abspath(os.fsdecode(path))
        self.dirty.setdefault(name, os.path.getsize(name) if os.path.exists(name) else 0)

    def synced(self, descriptor: int) -> None:
        """Note that a file, or the names of a folder, are on the disk."""
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        self.dirty.pop(path, None)
        self.renamed = [(name, old) for name, old in self.renamed if os.path.dirname(name) != path]

    def replacing(self, source: Any, target: Any) -> None:
        """Note that a name is about to stand for another file."""
        old, new = (os.path.abspath(os.fsdecode(each)) for each in (source, target))
        before = None
        if os.path.isfile(new):
            with _io_open(new, "rb") as file:
                before = file.read()
        self.renamed.append((new, before))
        if old in self.dirty:
            self.dirty[new] = self.dirty.pop(old)

    def lose_power(self, operation: str, path: Any) -> None:
        """Undo what was not synced, and end the process."""
        self.fired.append(f"{operation} {path}")
        for number, name in enumerate(sorted(self.dirty)):
            if os.path.isfile(name):
                kept, length = self.dirty[name], os.path.getsize(name)
                os.truncate(name, (kept, (kept + length) // 2, kept)[(number + self.at) % 3])
                if (number + self.at) % 3 == 2:  # the length was written, the content was not
                    os.truncate(name, length)
        for name, before in reversed(self.renamed):
            if before is None:
                _os_unlink(name)
            else:
                with _io_open(name, "wb") as file:
                    file.write(before)
        self.close()
        _os_exit(137)

    def close(self) -> None:
        if self.report is not None:
            text = f"{self.count}\n{len(self.fired)}\n{self.fired[0] if self.fired else ''}\n"
            descriptor = _os_open(self.report, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.write(descriptor, text.encode())
            os.close(descriptor)


_os_open, _os_unlink, _os_exit = os.open, os.unlink, os._exit
_io_open = io.open


def install(shim: Shim) -> None:
    """Put the layer under this process, for good."""
    import h5py

    class File(io.FileIO):
        def write(self, content: Any, /) -> int:
            kind = shim.fails("write", self.name)
            shim.writing(self.name)
            if kind == SHORT:
                view = memoryview(content).cast("B")
                return super().write(view[: max(1, len(view) // 2)])
            if kind is not None:
                raise OSError(kind, os.strerror(kind), self.name)
            return super().write(content)

        def readinto(self, buffer: Any, /) -> int:
            kind = shim.fails("read", self.name)
            if kind == SHORT:
                view = memoryview(buffer).cast("B")
                return super().readinto(view[: max(1, len(view) // 2)]) or 0
            if kind is not None:
                raise OSError(kind, os.strerror(kind), self.name)
            return super().readinto(buffer) or 0

        def readall(self) -> bytes:
            shim.check("read", self.name)
            return super().readall()

    def open_file(
        file: Any, mode: str = "r", buffering: int = -1, encoding: Any = None, errors: Any = None, newline: Any = None,
        closefd: bool = True, opener: Any = None,
    ) -> Any:  # fmt: skip
        if isinstance(file, int) or opener is not None or not shim.concerns(file):
            return _io_open(file, mode, buffering, encoding, errors, newline, closefd, opener)
        shim.check("open" if mode.strip("bt+") == "r" else "create", file)
        raw = File(os.fspath(file), mode.replace("b", "").replace("t", ""))
        if buffering == 0:
            return raw
        if "+" in mode:
            buffer: Any = io.BufferedRandom(raw)
        else:
            buffer = io.BufferedReader(raw) if raw.readable() else io.BufferedWriter(raw)
        if "b" in mode:
            return buffer
        return io.TextIOWrapper(buffer, encoding or "utf-8", errors, newline)

    def counted(operation: str, function: Callable[..., Any], which: int = 0) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            path = arguments[which] if len(arguments) > which else None
            if shim.concerns(path):
                shim.check(operation, path)
            return function(*arguments, **options)

        return call

    def os_open(path: Any, flags: int, *rest: Any, **options: Any) -> int:
        if shim.concerns(path):
            shim.check("create" if flags & os.O_CREAT else "open", path)
        return _os_open(path, flags, *rest, **options)

    def pread(descriptor: int, length: int, offset: int, read: Any = os.pread) -> bytes:
        kind = shim.fails("read", descriptor) if shim.concerns(descriptor) else None
        if kind == SHORT:
            return read(descriptor, max(1, length // 2), offset)
        if kind is not None:
            raise OSError(kind, os.strerror(kind))
        return read(descriptor, length, offset)

    class Map(mmap.mmap):
        def __new__(cls, descriptor: int, *arguments: Any, **options: Any) -> Any:
            if descriptor >= 0 and shim.concerns(descriptor):
                shim.check("mmap", descriptor)
            return super().__new__(cls, descriptor, *arguments, **options)

    original = h5py.File

    class Hdf5(original):
        _torn = ""

        def __init__(self, name: Any, mode: str = "r", *rest: Any, **options: Any):
            if not isinstance(name, str | os.PathLike) or not shim.concerns(name):
                super().__init__(name, mode, *rest, **options)
            elif mode == "r":
                super().__init__(_Whole(open_file(name, "rb", 0)), mode, *rest, **options)
            else:  # by the library's own driver, since the layout of the file depends on the driver
                shim.check("create", name)
                shim.writing(name)
                super().__init__(name, mode, *rest, **options)
                self._torn = os.fspath(name)

        def close(self) -> None:
            path, self._torn = self._torn, ""
            super().close()
            kind = shim.fails("write", path) if path else None
            if kind is not None:  # HDF5 loops over short writes: what fails in the end is the disk
                os.truncate(path, os.path.getsize(path) // 2)
                kind = kind if kind not in (SHORT, errno.EINTR) else errno.ENOSPC
                raise OSError(kind, f"Can't write (errno = {kind})", path)

    h5py.File = Hdf5
    io.open = builtins.open = open_file  # type: ignore[assignment]
    os.open = os_open

    def fsync(descriptor: int, sync: Any = os.fsync) -> None:
        if shim.concerns(descriptor):
            shim.check("fsync", descriptor)
            shim.synced(descriptor)
        sync(descriptor)

    def renaming(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(source: Any, target: Any, **options: Any) -> Any:
            if shim.concerns(source):
                shim.check("rename", source)
                shim.replacing(source, target)
            return function(source, target, **options)

        return call

    os.fsync = fsync
    os.replace = renaming(os.replace)
    os.rename = renaming(os.rename)
    os.mkdir = counted("mkdir", os.mkdir)
    os.unlink = os.remove = counted("unlink", os.unlink)
    os.pread = pread
    mmap.mmap = Map


class _Whole:
    """What HDF5 needs of a file, with the loops that its own driver has around short reads and writes."""

    def __init__(self, raw: Any):
        self._raw = raw

    def __getattr__(self, name: str) -> Any:
        return getattr(self._raw, name)

    def write(self, content: Any) -> int:
        view = memoryview(content).cast("B")
        done = 0
        while done < len(view):
            done += self._raw.write(view[done:])
        return done

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        done = 0
        while done < len(view) and (count := self._raw.readinto(view[done:])):
            done += count
        return done
