"""Read the tiles of many slides ahead of the encoder, with threads or with processes that share memory with the caller.

Threads suffice when the encoder runs on a CPU. A GPU takes ten thousand tiles per second, and threads reading that many
contend for Python's global interpreter lock, which also delays the GPU. So for a GPU every reader is a separate process
that decodes directly into shared memory; only tile corners are pickled.

    readers = ProcessReaders(num_readers=15, batch=512, size_px=224)
    slides = (SlideTiles("a", TileRequest(SlideRef("a", path), mpp=0.5), coords_l0), ...)
    for batch in readers.read(slides, shared=True):
        batch.tiles_BHW3                             # uint8, valid until the next but one
        batch.parts                                  # which tiles of which slide they are

Slides are taken from the iterable as readers get to them, so the next ones are opened and read while the caller works
on a batch. With `shared`, a batch may contain tiles of several slides and all batches but the last are full. An error,
or a reader process that dies, ends the slide that was being read and no other.

The memory is an anonymous file (memfd), which a small /dev/shm in containers does not limit; it exists on Linux only
(`ProcessReaders.available`). Readers are started as separate commands, because dask worker processes must not have
`multiprocessing` children. They exit when their caller does.
"""

from __future__ import annotations

import mmap
import os
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from selfvitmil import stain
from selfvitmil.data import RUN
from selfvitmil.engine import is_transient
from selfvitmil.errors import EngineError, SelfVitMilError
from selfvitmil.slides import SlideCache, SlideRef

READ_AHEAD = 3
"""Batches read ahead; processes read ahead more of them if batches are small."""
TILES_PER_PROCESS = 64
"""Tiles read ahead for each process, so that several small slides are open at a time."""
IN_USE = 2
"""Batches that the caller may still be using."""
AT_ONCE = 4
"""Runs queued at a reader, so that it has work while the caller is busy."""
BLOCK_ROWS = 4
"""Rows of the tile grid that a run covers where it can: RUN tiles then form a square."""


@dataclass(frozen=True)
class TileRequest:
    """The slide to read tiles from, and how."""

    slide: SlideRef
    mpp: float
    """Microns per pixel of the tiles."""
    normalize_tiles: bool = False
    """Normalize each tile by its own stains."""


class SlideTiles(NamedTuple):
    """Tiles to read from one slide."""

    key: str
    """Names the slide in batches; unique among the slides that are read together."""
    request: TileRequest
    coords_l0: NDArray[np.int64]
    """(N, 2) top left corners."""


class Part(NamedTuple):
    """The tiles of one slide in a batch."""

    key: str
    rows: slice
    """Which of the slide's tiles they are."""
    place: slice
    """Where they are in the batch."""
    unfitted: int
    """Number of tiles left unnormalized because their stains could not be fitted."""
    error: Exception | None
    """Why the slide cannot be read; pixels are undefined then, and later batches have no good part of the slide."""


class TileBatch(NamedTuple):
    """A batch of tiles."""

    tiles_BHW3: NDArray[np.uint8]
    parts: tuple[Part, ...]
    waited_s: float
    """Time the caller waited for the batch."""


def read_run(
    cache: SlideCache,
    request: TileRequest,
    corners_l0: NDArray[np.int64],
    places: NDArray[np.int64],
    out_BHW3: NDArray[np.uint8],
) -> int:
    """Read tiles into these places of `out_BHW3`; return how many were left unnormalized (see `Part.unfitted`)."""
    slide = cache.get(request.slide)
    unfitted = 0
    for (x_l0, y_l0), place in zip(corners_l0.tolist(), places.tolist(), strict=True):
        tile = slide.read_tile(x_l0, y_l0, out_BHW3.shape[1], request.mpp)
        if request.normalize_tiles:
            tile, fitted = stain.normalize_or_keep(tile)
            unfitted += not fitted
        out_BHW3[place] = tile
    return unfitted


# ---------------------------------------------------------------------------------------------------- batches


@dataclass(eq=False)
class _OpenPart:
    """Tiles of a slide in a batch that is being read."""

    slide: SlideTiles
    rows: slice
    first: int
    """Place of the first tile in the batch."""
    unfitted: int = 0


@dataclass(eq=False)
class _OpenBatch:
    """A batch that is being read."""

    slot: int
    parts: list[_OpenPart]
    missing: int = 0
    """Runs that are not read yet."""

    @property
    def num_tiles(self) -> int:
        return sum(part.rows.stop - part.rows.start for part in self.parts)


@dataclass(eq=False)
class _Run:
    """Some neighbouring tiles of one slide, which one reader reads in one go."""

    batch: _OpenBatch
    part: _OpenPart
    corners_l0: NDArray[np.int64]
    places: NDArray[np.int64]

    @property
    def request(self) -> TileRequest:
        return self.part.slide.request


Reply = tuple[_Run, int | Exception]
"""A run that was read, with the number of unnormalized tiles or an error."""


class Readers(ABC):
    """Readers with memory for their tiles. For one thread at a time. Use them in a `with` block, or call `close`."""

    tiles_KBHW3: NDArray[np.uint8]
    """Batches that are read or in use."""

    def __init__(self, read_ahead: int):
        self._read_ahead = read_ahead

    def read(self, slides: Iterable[SlideTiles], *, shared: bool) -> Iterator[TileBatch]:
        """Yield the tiles of slides batch by batch, in the order given; with `shared` slides share batches.

        Raises nothing for a slide that cannot be read: its parts say so. The next slides are taken from the iterable
        when there is room for their tiles.
        """
        self._drain()
        slots, size = self.tiles_KBHW3.shape[:2]
        errors: dict[str, Exception] = {}
        batches: deque[_OpenBatch] = deque()
        runs: deque[_Run] = deque()
        plan = enumerate(plan_batches(slides, size, shared, errors))
        while True:
            begin = time.perf_counter()
            while len(batches) < self._read_ahead and (planned := next(plan, None)) is not None:
                number, parts = planned
                batches.append(_OpenBatch(number % slots, parts))
                runs.extend(_runs(batches[-1]))
            if not batches:
                return
            self._hand_out(runs)
            while batches[0].missing:
                for run, result in self._replies():
                    run.batch.missing -= 1
                    if isinstance(result, Exception):
                        errors.setdefault(run.part.slide.key, result)
                        _drop(runs, run.part.slide.key)
                    else:
                        run.part.unfitted += result
                self._hand_out(runs)
            batch = batches.popleft()
            parts = tuple(_closed(part, errors) for part in batch.parts)
            tiles_BHW3 = self.tiles_KBHW3[batch.slot, : batch.num_tiles]
            yield TileBatch(tiles_BHW3, parts, time.perf_counter() - begin)

    def _drain(self) -> None:
        """Wait for requests of a caller that stopped early, which would overwrite the new tiles."""
        while self._num_waiting:
            self._replies()

    @property
    @abstractmethod
    def _num_waiting(self) -> int:
        """Runs handed out and not answered."""

    @abstractmethod
    def _hand_out(self, runs: deque[_Run]) -> None:
        """Take runs from the queue as far as readers have room for them."""

    @abstractmethod
    def _replies(self) -> list[Reply]:
        """Wait for replies and return them."""

    @abstractmethod
    def close(self) -> None:
        """Stop the readers."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def plan_batches(
    slides: Iterable[SlideTiles], size: int, shared: bool, failed: Collection[str]
) -> Iterator[list[_OpenPart]]:
    """Yield the parts of each batch; slides that are in `failed` by then are left out."""
    parts: list[_OpenPart] = []
    filled = 0
    for slide in slides:
        start = 0
        while start < len(slide.coords_l0) and slide.key not in failed:
            stop = min(start + size - filled, len(slide.coords_l0))
            parts.append(_OpenPart(slide, slice(start, stop), filled))
            filled, start = filled + stop - start, stop
            if filled == size or not shared:
                yield parts
                parts, filled = [], 0
    if parts:
        yield parts


def compact_runs(coords_l0: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Divide the tiles of a grid into runs of up to RUN neighbours, squares where possible; return their indices.

    Neighbours share JPEG tiles, which each process decodes for itself. With JPEG tiles of 256 px and tiles of 448 px
    (224 px), 16 tiles in a row need 1.6 (2.3) times their own area, 16 in a square 1.3 (1.65) times.
    """
    row = np.unique(coords_l0[:, 1], return_inverse=True)[1]
    order = np.lexsort((row, coords_l0[:, 0], row // BLOCK_ROWS))
    return [order[start : start + RUN] for start in range(0, len(order), RUN)]


def _runs(batch: _OpenBatch) -> Iterator[_Run]:
    """Yield the runs of a batch, and count them as missing."""
    for part in batch.parts:
        coords_l0 = part.slide.coords_l0[part.rows]
        for chosen in compact_runs(coords_l0):
            batch.missing += 1
            yield _Run(batch, part, coords_l0[chosen], part.first + chosen)


def _drop(runs: deque[_Run], key: str) -> None:
    """Remove the runs of a slide."""
    for run in [run for run in runs if run.part.slide.key == key]:
        runs.remove(run)
        run.batch.missing -= 1


def _closed(part: _OpenPart, errors: dict[str, Exception]) -> Part:
    place = slice(part.first, part.first + part.rows.stop - part.rows.start)
    return Part(part.slide.key, part.rows, place, part.unfitted, errors.get(part.slide.key))


# ---------------------------------------------------------------------------------------------------- threads


class ThreadReaders(Readers):
    """Threads of this process, which share open slides and decoded JPEG tiles."""

    def __init__(self, num_readers: int, batch: int, size_px: int):
        super().__init__(READ_AHEAD)
        self.tiles_KBHW3 = np.empty((READ_AHEAD + IN_USE, batch, size_px, size_px, 3), np.uint8)
        self._pool = ThreadPoolExecutor(num_readers, "tiles")
        self._cache = SlideCache()
        self._most = AT_ONCE * num_readers
        self._futures: dict[Future[int], _Run] = {}

    @property
    def _num_waiting(self) -> int:
        return len(self._futures)

    def _hand_out(self, runs: deque[_Run]) -> None:
        while runs and len(self._futures) < self._most:
            run = runs.popleft()
            out_BHW3 = self.tiles_KBHW3[run.batch.slot]
            future = self._pool.submit(read_run, self._cache, run.request, run.corners_l0, run.places, out_BHW3)
            self._futures[future] = run

    def _replies(self) -> list[Reply]:
        replies: list[Reply] = []
        for future in wait_for(self._futures, return_when=FIRST_COMPLETED).done:
            run = self._futures.pop(future)
            try:
                replies.append((run, future.result()))
            except Exception as error:  # whatever it is, it concerns this slide alone
                replies.append((run, error))
        return replies

    def close(self) -> None:
        """Stop the threads after their current runs, and close the slides."""
        self._pool.shutdown(cancel_futures=True)
        self._futures.clear()
        self._cache.close()


# ---------------------------------------------------------------------------------------------------- processes


class ProcessReaders(Readers):
    """Reader processes with their shared memory."""

    available = hasattr(os, "memfd_create")
    """Whether this system supports it."""

    def __init__(self, num_readers: int, batch: int, size_px: int):
        super().__init__(max(READ_AHEAD, -(-TILES_PER_PROCESS * num_readers // batch)))
        self._shape = (self._read_ahead + IN_USE, batch, size_px, size_px, 3)
        self._memory = os.memfd_create("selfvitmil-tiles")
        os.ftruncate(self._memory, int(np.prod(self._shape)))
        self.tiles_KBHW3 = _mapped(self._memory, self._shape)
        self._readers = [_Process(self._memory, self._shape) for _ in range(num_readers)]
        self._deaths: list[Reply] = []
        self._again: deque[_Run] = deque()
        """Runs that a reader had not begun when it died."""

    @property
    def _num_waiting(self) -> int:
        return sum(len(reader.runs) for reader in self._readers) + len(self._deaths)

    def _drain(self) -> None:
        super()._drain()
        self._again.clear()

    def _hand_out(self, runs: deque[_Run]) -> None:
        runs.extendleft(reversed(self._again))
        self._again.clear()
        while runs:
            number = min(range(len(self._readers)), key=lambda k: len(self._readers[k].runs))
            reader = self._readers[number]
            if len(reader.runs) >= AT_ONCE:
                return
            if reader.is_dead:
                reader = self._readers[number] = _Process(self._memory, self._shape)
            run = self._chosen(reader, runs)
            runs.remove(run)
            reader.runs.append(run)
            reader.slide = run.request.slide
            try:
                reader.connection.send((run.request, run.corners_l0, run.places, run.batch.slot))
            except OSError:
                self._bury(reader)

    def _chosen(self, reader: _Process, runs: deque[_Run]) -> _Run:
        """Return a run of the slide that this reader has open; else of one that no other reads; else the first.

        Opening a slide takes as long as reading several tiles, so a small slide is left to few readers.
        """
        for run in runs:
            if run.request.slide == reader.slide:
                return run
        taken = {each.slide for each in self._readers if each.runs}
        return next((run for run in runs if run.request.slide not in taken), runs[0])

    def _replies(self) -> list[Reply]:
        replies, self._deaths = self._deaths, []
        if replies or self._again:  # what a dead reader had not begun is to be handed out first
            return replies
        readers = {reader.connection: reader for reader in self._readers if not reader.is_dead}
        for connection in wait(list(readers)):
            reader = readers[connection]  # pyright: ignore[reportArgumentType]
            try:
                result = reader.connection.recv()
            except (EOFError, OSError):
                self._bury(reader)
            else:
                replies.append((reader.runs.popleft(), result))
        return replies

    def _bury(self, reader: _Process) -> None:
        """Note that a reader died of the run it was reading; another reads what it had not begun.

        A new reader is started with its next run: one that cannot live fails a slide each time, and not for ever.
        """
        reader.is_dead = True
        reader.connection.close()
        status = reader.process.wait()
        if not reader.runs:
            return
        run = reader.runs.popleft()
        error = EngineError(
            f"{run.request.slide.path.name}: a reader process died",
            f"it exited with status {status}" + (", possibly out of memory" if status == -9 else ""),
            "Run `selfvitmil check` to test whether the slide crashes its reader, or use fewer --embed.readers",
            code="reader-died",
        )
        self._deaths.append((run, error))
        self._again.extend(reader.runs)
        reader.runs.clear()

    @property
    def alive(self) -> bool:
        """Whether the readers have not been closed."""
        return bool(self._readers)

    def close(self) -> None:
        """Stop the readers. The memory is freed when it is no longer referenced."""
        for reader in self._readers:
            reader.connection.close()  # a reader exits when its connection closes
        for reader in self._readers:
            try:
                reader.process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                reader.process.kill()
                reader.process.wait()
        if self._readers:
            os.close(self._memory)
        self._readers = []


class _Process:
    """A reader process and our end of its connection."""

    def __init__(self, memory: int, shape: tuple[int, ...]):
        ours, theirs = socket.socketpair()
        numbers = [str(value) for value in (memory, theirs.fileno(), *shape)]
        # `-c` instead of `-m`: the package is already imported by then, and Python warns about running a module twice.
        code = "import sys; from selfvitmil.data import readers; readers.serve(*map(int, sys.argv[1:]))"
        command = [sys.executable, "-c", code, *numbers]
        with theirs:
            self.process = subprocess.Popen(
                command, pass_fds=(memory, theirs.fileno()), stdin=subprocess.DEVNULL, start_new_session=True
            )
        self.connection = Connection(ours.detach())
        self.runs: deque[_Run] = deque()
        """Runs it has not answered, in the order in which it reads them."""
        self.slide: SlideRef | None = None
        """The slide of its last run."""
        self.is_dead = False


def _mapped(memory: int, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    return np.frombuffer(mmap.mmap(memory, 0), dtype=np.uint8).reshape(shape)


def serve(memory: int, channel: int, *shape: int) -> None:
    """Run a reader process: answer requests until the caller is gone."""
    tiles_KBHW3 = _mapped(memory, shape)
    os.close(memory)
    cache = SlideCache()
    connection = Connection(channel)
    while True:
        try:
            request, corners_l0, places, slot = connection.recv()
        except (EOFError, OSError):
            return
        result: int | Exception
        try:
            result = read_run(cache, request, corners_l0, places, tiles_KBHW3[slot])
        except SelfVitMilError as error:
            error.transient = is_transient(error)  # pickling loses the cause
            result = error
        try:
            connection.send(result)
        except OSError:
            return
