"""Open files from outside first in a process that may die: damaged ones make native libraries crash or hang.

HDF5 and OpenSlide parse such files in C. About 1 in 500 HDF5 files with a few wrong bytes makes the library loop for
ever or crash, and a slide's header can make OpenSlide ask for terabytes, at which it aborts. A command, a notebook or
the viewer's server must survive that. So a file is opened in a helper process first, once per content; where that one
dies or does not end, UnsafeFile is raised here, and the file is not touched. Workers of the engine need no helper: they
may die. There a clock ends what hangs.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

Kind = Literal["hdf5", "slide"]
LIMIT_S = 60
"""A file that takes longer to open hangs."""
WORKER_LIMIT_S = 600
"""The same for all that a worker reads of it."""
MAX_READ_BYTES = 64 << 20
"""Compressed datasets up to this size are read too, larger ones are not: a network drive may be slow."""
MAX_REMEMBERED = 100_000


class UnsafeFile(ValueError):
    """A file that refers to other files, claims more data than it stores, or breaks what reads it."""


class Helper:
    """The process that opens files first; started when it is first needed, and again after each death."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner = 0
        self._available = True
        self._process: subprocess.Popen[bytes] | None = None
        self._sound: set[Any] = set()

    def check(self, kind: Kind, path: Path) -> None:
        """Raise UnsafeFile if opening the file kills the helper or does not end; other problems are not reported."""
        key = _identity(kind, path)
        if key is None:
            return  # whoever opens it says what is wrong
        with self._lock:
            if key not in self._sound:
                self._ask(kind, path)
                self._remember(key)

    def trust(self, kind: Kind, path: Path) -> None:
        """Take a file that this process has just written for sound."""
        key = _identity(kind, path)
        if key is not None:
            with self._lock:
                self._remember(key)

    def _remember(self, key: Any) -> None:
        if len(self._sound) >= MAX_REMEMBERED:
            self._sound.clear()
        self._sound.add(key)

    def _ask(self, kind: Kind, path: Path) -> None:
        process = self._running()
        if process is None or process.stdin is None or process.stdout is None:
            return
        try:
            process.stdin.write(json.dumps([kind, os.fspath(path.absolute())]).encode() + b"\n")
            process.stdin.flush()
            ready, _, _ = select.select([process.stdout], [], [], LIMIT_S)
            if ready and process.stdout.readline():
                return
        except BrokenPipeError:
            ready = [process.stdout]
        self._process = None
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()
        what = "crashes" if ready else f"has not ended after {LIMIT_S} s"
        raise UnsafeFile(f"it is damaged: the library that opens it {what}")

    def _running(self) -> subprocess.Popen[bytes] | None:
        """Return the helper of this process; a fork has one of its own. None where none can be started."""
        if self._owner != os.getpid():
            self._owner, self._process, self._available = os.getpid(), None, True
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._process = _start() if self._available else None
        self._available = self._process is not None
        return self._process


def _start() -> subprocess.Popen[bytes] | None:
    """Start a helper and wait until it is ready; None where that fails, which no file is to blame for."""
    command = [sys.executable, "-P", "-c", "from selfvitmil.store.guard import serve; serve()"]
    pipe = subprocess.PIPE
    try:
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, start_new_session=True)
    except OSError:
        return None
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], LIMIT_S)
    if ready and process.stdout.readline():
        return process
    process.kill()
    process.communicate()
    return None


def _identity(kind: Kind, path: Path) -> tuple[object, ...] | None:
    """Return what changes with the content of a file; None where there is no file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return kind, os.fspath(path), status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


helper = Helper()


def check_first(kind: Kind, path: Path) -> None:
    """Open a file in the helper, unless this process may die; raises UnsafeFile."""
    if not _may_die():
        helper.check(kind, path)


@contextmanager
def limited() -> Generator[None, None, None]:
    """End this process if what is inside does not end, where it may die."""
    if not _may_die() or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.setitimer(signal.ITIMER_REAL, WORKER_LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _may_die() -> bool:
    return multiprocessing.parent_process() is not None


# ---------------------------------------------------------------------------------------------------- in the helper


def serve() -> None:
    """Open the files that are named on standard input; answer each with a line."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _limit_memory()
    sys.stdout.buffer.write(b"ready\n")
    sys.stdout.buffer.flush()
    for line in sys.stdin.buffer:
        kind, path = json.loads(line)
        signal.alarm(LIMIT_S + 5)  # should the process that asks have died
        with suppress(Exception):  # whoever opens it says what is wrong
            {"hdf5": _try_hdf5, "slide": _try_slide}[kind](Path(path))
        signal.alarm(0)
        sys.stdout.buffer.write(b"done\n")
        sys.stdout.buffer.flush()


def _limit_memory() -> None:
    """Allow as much address space as this machine has memory, so that a huge request fails here."""
    import resource

    with suppress(ValueError, OSError, AttributeError):
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _try_hdf5(path: Path) -> None:
    """Read all that readers read, but for large data."""
    import h5py  # pyright: ignore[reportMissingTypeStubs]

    from selfvitmil.store.files import check_hdf5

    with h5py.File(path, "r") as file:
        for item in check_hdf5(file):
            with suppress(Exception):
                dict(item.attrs)
            size: Any = getattr(item, "nbytes", None)
            if size is not None and size <= MAX_READ_BYTES:
                with suppress(Exception):
                    item[()]


def _try_slide(path: Path) -> None:
    """Open the slide and decode a pixel of each level; of an ordinary image, all of it."""
    import openslide

    try:
        with openslide.OpenSlide(path) as slide:
            for level in range(slide.level_count):
                slide.read_region((0, 0), level, (1, 1))
    except openslide.OpenSlideUnsupportedFormatError:
        from PIL import Image

        with Image.open(path, formats=("PNG", "JPEG")) as image:
            image.load()
