"""Read tiles ahead of the encoder, with threads or with processes that share memory with the caller.

Threads suffice when the encoder runs on a CPU. A GPU takes ten thousand tiles per second, and threads reading that many
contend for Python's global interpreter lock, which also delays the GPU. So for a GPU every reader is a separate process
that decodes directly into shared memory; only tile corners are pickled.

    readers = TileReaders(num_readers=15, batch=512, size_px=224)
    request = TileRequest(SlideRef("a", path), mpp=0.5)
    for part in readers.read(request, coords_l0):    # batches, in the order of the corners
        part.tiles_BHW3                              # uint8, valid until the next but one

The memory is an anonymous file (memfd), which a small /dev/shm in containers does not limit; it exists on Linux only
(`TileReaders.available`). Readers are started as separate commands, because dask worker processes must not have
`multiprocessing` children. They exit when their caller does.
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
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from selfvitmil import stain
from selfvitmil.data import RUN
from selfvitmil.engine import is_transient
from selfvitmil.errors import EngineError, SelfVitMilError
from selfvitmil.slides import SlideCache, SlideRef

READ_AHEAD = 3
"""Batches read ahead."""
IN_USE = 2
"""Batches that the caller may still be using."""
AT_ONCE = 4
"""Runs queued at a reader, so that it has work while the caller is busy."""


@dataclass(frozen=True)
class TileRequest:
    """The slide to read tiles from, and how."""

    slide: SlideRef
    mpp: float
    """Microns per pixel of the tiles."""
    normalize_tiles: bool = False
    """Normalize each tile by its own stains."""


class TileBatch(NamedTuple):
    """A batch of tiles."""

    tiles_BHW3: NDArray[np.uint8]
    unfitted: int
    """Number of tiles left unnormalized because their stains could not be fitted."""
    waited_s: float
    """Time the caller waited for the batch."""


def read_run(
    cache: SlideCache, request: TileRequest, corners_l0: NDArray[np.int64], out_BHW3: NDArray[np.uint8]
) -> int:
    """Read tiles into `out_BHW3`; return how many were left unnormalized (see `TileBatch.unfitted`)."""
    slide = cache.get(request.slide)
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
    """Yield the tiles with these corners batch by batch, read ahead by threads of this process."""
    with ThreadPoolExecutor(num_threads) as pool, closing(SlideCache()) as cache:
        cache.get(request.slide)  # opened once, by one thread
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
    """Whether this system supports it."""

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
        """Runs that each reader has not answered yet."""

    def read(self, request: TileRequest, coords_l0: NDArray[np.int64]) -> Iterator[TileBatch]:
        """Yield the tiles with these corners batch by batch. An error of a reader is raised here; the readers keep
        running."""
        while any(
            self._waiting
        ):  # drain requests of a caller that stopped early, or they would overwrite the new tiles
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
        """Send runs to the readers with the fewest pending ones."""
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
        """Wait for replies and return them as (first tile, number of unnormalized tiles or error)."""
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
            f"{request.slide.path.name}: a reader process died",
            f"it exited with status {status}" + (", possibly out of memory" if status == -9 else ""),
            "Run `selfvitmil check` to test whether the slide crashes its reader, or use fewer --embed.readers",
            code="reader-died",
        )

    @property
    def alive(self) -> bool:
        return bool(self._connections) and all(process.poll() is None for _, process in self._readers)

    def close(self) -> None:
        """Stop the readers. The memory is freed when it is no longer referenced."""
        for connection in self._connections:
            connection.close()  # a reader exits when its connection closes
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
    # `-c` instead of `-m`: the package is already imported by then, and Python warns about running a module twice.
    code = "import sys; from selfvitmil.data import readers; readers.serve(*map(int, sys.argv[1:]))"
    command = [sys.executable, "-c", code, *numbers]
    with theirs:
        process = subprocess.Popen(
            command, pass_fds=(memory, theirs.fileno()), stdin=subprocess.DEVNULL, start_new_session=True
        )
    return Connection(ours.detach()), process


def serve(memory: int, channel: int, *shape: int) -> None:
    """Run a reader process: answer requests until the caller is gone."""
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
            error.transient = is_transient(error)  # pickling loses the cause
            result = error
        try:
            connection.send((start, result))
        except OSError:
            return
