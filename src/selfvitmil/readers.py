"""Tiles of slides, read ahead of the encoder: by threads, or by processes into memory which they share with the caller.

Threads do where a network on a CPU takes the tiles. A GPU takes ten thousand a second, and threads that read so many
spend their time waiting for Python's lock, which also keeps the GPU waiting for its caller. So for a GPU every reader
is a process of its own that decodes straight into place; nothing is copied or pickled but corners of tiles.

    readers = TileReaders(num_readers=15, batch=512, size_px=224)
    for part in readers.read(TileRequest(path, mpp=0.5), coords_l0):    # batches, in the order of the corners
        part.tiles_BHW3                                                 # uint8, valid until the next but one

The memory is an anonymous file (memfd), which the small /dev/shm of containers does not limit; Linux has it, others do
not (`TileReaders.available`). Readers are started as commands of their own, because worker processes of dask may not
have children of `multiprocessing`. They end when their caller does.
"""

from __future__ import annotations

import mmap
import os
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from selfvitmil import stain
from selfvitmil.engine import is_transient
from selfvitmil.errors import EngineError, SelfVitMilError
from selfvitmil.slides import SlideCache

RUN = 16
"""Neighbouring tiles that one reader takes in one go: they share compressed blocks of the slide."""
READ_AHEAD = 3
"""Batches that are read before they are needed."""
IN_USE = 2
"""Batches that the caller may still be looking at."""
AT_ONCE = 4
"""Runs that wait at a reader, so that it has work while the caller is busy."""


@dataclass(frozen=True)
class TileRequest:
    """What tiles are read from, and how."""

    path: Path
    mpp: float
    """Microns per pixel of the tiles."""
    reader: str = "auto"
    slide_mpp: float | None = None
    """Microns per level-0 pixel, over whatever the slide says."""
    normalize_tiles: bool = False
    """Bring each tile's own stains to the reference."""


class TileBatch(NamedTuple):
    """Tiles that were read."""

    tiles_BHW3: NDArray[np.uint8]
    unfitted: int
    """Of these, how many kept their colours because their own stains could not be found."""
    waited_s: float
    """How long the caller waited for them."""


def read_run(
    cache: SlideCache, request: TileRequest, corners_l0: NDArray[np.int64], out_BHW3: NDArray[np.uint8]
) -> int:
    """Read tiles into `out_BHW3`; how many of them kept their colours (see `TileBatch.unfitted`)."""
    slide = cache.get(request.path, reader=request.reader, mpp=request.slide_mpp)
    unfitted = 0
    for (x_l0, y_l0), out in zip(corners_l0, out_BHW3, strict=True):
        tile = slide.read_tile(int(x_l0), int(y_l0), out.shape[0], request.mpp)
        if request.normalize_tiles:
            tile, fitted = stain.normalize_or_keep(tile)
            unfitted += not fitted
        out[:] = tile
    return unfitted


def read_with_threads(
    request: TileRequest, coords_l0: NDArray[np.int64], size_px: int, batch: int, num_threads: int
) -> Iterator[TileBatch]:
    """The tiles with these corners, batch by batch, read ahead by threads of this process."""
    with ThreadPoolExecutor(num_threads) as pool, closing(SlideCache()) as cache:
        cache.get(request.path, reader=request.reader, mpp=request.slide_mpp)  # opened once, by one thread
        waiting: deque[tuple[NDArray[np.uint8], list[Future[int]]]] = deque()

        def submit(start: int) -> None:
            corners_l0 = coords_l0[start : start + batch]
            tiles_BHW3 = np.empty((len(corners_l0), size_px, size_px, 3), np.uint8)
            parts = [slice(first, first + RUN) for first in range(0, len(corners_l0), RUN)]
            waiting.append(
                (tiles_BHW3, [pool.submit(read_run, cache, request, corners_l0[p], tiles_BHW3[p]) for p in parts])
            )

        starts = iter(range(0, len(coords_l0), batch))
        for start in islice(starts, READ_AHEAD):
            submit(start)
        while waiting:
            begin = time.perf_counter()
            tiles_BHW3, futures = waiting.popleft()
            unfitted = sum(future.result() for future in futures)
            waited_s = time.perf_counter() - begin
            if (start := next(starts, None)) is not None:
                submit(start)
            yield TileBatch(tiles_BHW3, unfitted, waited_s)


class TileReaders:
    """Reader processes with their shared memory. For one thread at a time."""

    available = hasattr(os, "memfd_create")
    """Whether this system has what is needed."""

    def __init__(self, num_readers: int, batch: int, size_px: int):
        self.slots = READ_AHEAD + IN_USE
        shape = (self.slots, batch, size_px, size_px, 3)
        memory = os.memfd_create("selfvitmil-tiles")
        os.ftruncate(memory, int(np.prod(shape)))
        self.tiles_KBHW3 = _mapped(memory, shape)
        self._readers = [_start_reader(memory, shape) for _ in range(num_readers)]
        os.close(memory)
        self._connections = [connection for connection, _ in self._readers]
        self._waiting = [0] * num_readers
        """Runs that each reader still has to answer for."""

    def read(self, request: TileRequest, coords_l0: NDArray[np.int64]) -> Iterator[TileBatch]:
        """The tiles with these corners, batch by batch. An error of a reader is raised here; the readers live on."""
        while any(self._waiting):  # what a caller who gave up had asked for would be written over what comes now
            self._replies(request)
        size = self.tiles_KBHW3.shape[1]
        number = -(-len(coords_l0) // size)
        runs: deque[tuple[int, int]] = deque()
        missing, unfitted = [0] * number, [0] * number
        submitted = 0
        for current in range(number):
            for batch in range(submitted, min(number, current + READ_AHEAD)):
                stop = min((batch + 1) * size, len(coords_l0))
                starts = range(batch * size, stop, RUN)
                runs.extend((start, min(start + RUN, stop)) for start in starts)
                missing[batch], submitted = len(starts), batch + 1
            begin = time.perf_counter()
            self._hand_out(runs, request, coords_l0)
            while missing[current]:
                for start, result in self._replies(request):
                    if isinstance(result, Exception):
                        raise result
                    missing[start // size] -= 1
                    unfitted[start // size] += result
                self._hand_out(runs, request, coords_l0)
            count = min(size, len(coords_l0) - current * size)
            tiles_BHW3 = self.tiles_KBHW3[current % self.slots, :count]
            yield TileBatch(tiles_BHW3, unfitted[current], time.perf_counter() - begin)

    def _hand_out(self, runs: deque[tuple[int, int]], request: TileRequest, coords_l0: NDArray[np.int64]) -> None:
        """Give runs to the readers that have least to do."""
        size = self.tiles_KBHW3.shape[1]
        while runs:
            reader = min(range(len(self._waiting)), key=self._waiting.__getitem__)
            if self._waiting[reader] >= AT_ONCE:
                return
            start, stop = runs.popleft()
            place = ((start // size) % self.slots, start % size)
            try:
                self._connections[reader].send((start, request, coords_l0[start:stop], place))
            except OSError:
                raise self._reader_died(reader, request) from None
            self._waiting[reader] += 1

    def _replies(self, request: TileRequest) -> list[tuple[int, int | Exception]]:
        """What readers have to say, as (first tile, tiles that kept their colours or error); waits until one has."""
        replies: list[tuple[int, int | Exception]] = []
        for connection in wait(self._connections):
            reader = self._connections.index(connection)  # pyright: ignore[reportArgumentType]
            try:
                replies.append(self._connections[reader].recv())
            except (EOFError, OSError):
                raise self._reader_died(reader, request) from None
            self._waiting[reader] -= 1
        return replies

    def _reader_died(self, reader: int, request: TileRequest) -> EngineError:
        status = self._readers[reader][1].wait()
        self.close()
        return EngineError(
            f"{request.path.name}: a process that read its tiles died",
            f"it ended with status {status}" + (", out of memory perhaps" if status == -9 else ""),
            "Try `selfvitmil check`, which tells whether the slide crashes its reader, or fewer --embed.readers",
        )

    @property
    def alive(self) -> bool:
        return bool(self._connections) and all(process.poll() is None for _, process in self._readers)

    def close(self) -> None:
        """End the readers. The memory goes when nobody looks at it any more."""
        for connection in self._connections:
            connection.close()  # they end when nobody can ask them any more
        for _, process in self._readers:
            try:
                process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._connections, self._readers, self._waiting = [], [], []


def _mapped(memory: int, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    return np.frombuffer(mmap.mmap(memory, 0), dtype=np.uint8).reshape(shape)


def _start_reader(memory: int, shape: tuple[int, ...]) -> tuple[Connection, subprocess.Popen[bytes]]:
    ours, theirs = socket.socketpair()
    numbers = [str(value) for value in (memory, theirs.fileno(), *shape)]
    # `-c` and not `-m`: the package has been imported by then, and Python warns of running a module a second time.
    code = "import sys; from selfvitmil import readers; readers.serve(*map(int, sys.argv[1:]))"
    command = [sys.executable, "-c", code, *numbers]
    with theirs:
        process = subprocess.Popen(
            command, pass_fds=(memory, theirs.fileno()), stdin=subprocess.DEVNULL, start_new_session=True
        )
    return Connection(ours.detach()), process


def serve(memory: int, channel: int, *shape: int) -> None:
    """A reader process: answers until its caller is gone."""
    tiles_KBHW3 = _mapped(memory, shape)
    os.close(memory)
    cache = SlideCache()
    connection = Connection(channel)
    while True:
        try:
            start, request, corners_l0, (slot, first) = connection.recv()
        except (EOFError, OSError):
            return
        result: int | Exception
        try:
            result = read_run(cache, request, corners_l0, tiles_KBHW3[slot, first : first + len(corners_l0)])
        except SelfVitMilError as error:
            error.transient = is_transient(error)  # pickling loses what it came of
            result = error
        try:
            connection.send((start, result))
        except OSError:
            return
