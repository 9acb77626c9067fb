"""Tiles for training: which ones, in which order, and read ahead of the training by worker processes.

Input is a source of tiles (see `sources`), output are batches of uint8 tiles with a stable number and a stain
transform each. Which tiles make up a step is a pure function of (seed, step) and of nothing else, neither
of the number of processes nor of what was read before, so a resumed run needs no state but its step.

What is unusual is the order. Neighbouring tiles share compressed blocks of the slide, so they are read in runs of up
to `RUN` neighbours; the runs of all slides are shuffled. Some hundred runs make a pool, which is held in memory, and
batches are drawn at random from the pool. So a batch mixes many slides while disk and decoder see runs. If all tiles of
the source fit into the allowed memory, each is read once and kept.

Axes in names: B tiles of a batch, H and W height and width, 3 is RGB.
"""

from __future__ import annotations

import math
import multiprocessing
import multiprocessing.connection
import os
import queue
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from selfvitmil import stain
from selfvitmil.data import RUN
from selfvitmil.data.sources import Indices, Pixels, TileReader, TileSource
from selfvitmil.engine import num_cores
from selfvitmil.engine.work import script_not_imported
from selfvitmil.errors import ConfigError, EngineError, SelfVitMilError
from selfvitmil.settings import PretrainSettings

REPEAT_ID = 0x1E3779B97F4A7C15
"""Added to the id of a tile for each time that it came before in the same step; any large odd number does."""

# ---------------------------------------------------------------------------------------------------- order, pure


@dataclass(frozen=True)
class TileOrder:
    """Which tiles make up which step. Tiles are numbered through all slides, slide after slide, in table order."""

    counts: tuple[int, ...]
    """Tiles of every slide."""
    batch: int
    seed: int = 0
    sampler: Literal["mixed", "one-slide"] = "mixed"
    tiles_per_slide: int | None = None
    resample: bool = True
    run: int = RUN
    pool: int = 2048
    """Tiles from which batches are drawn, rounded up to whole batches."""

    @property
    def tiles_per_epoch(self) -> int:
        """Tiles chosen for an epoch; those that do not fill a last batch are left to other epochs."""
        if self.sampler == "one-slide":
            return len(self.counts) * (self.tiles_per_slide or 0)
        return sum(min(count, self.tiles_per_slide or count) for count in self.counts)

    @property
    def steps_per_epoch(self) -> int:
        """Whole batches of an epoch."""
        return self.tiles_per_epoch // self.batch

    @property
    def batches_per_pool(self) -> int:
        """Batches drawn from one pool."""
        return -(-self.pool // self.batch)

    def epoch(self, epoch: int) -> Indices:
        """Return the tiles of an epoch in reading order, cut to whole batches."""
        return _epoch_cached(self, epoch)

    def pools(self, first_step: int, last_step: int) -> Iterator[Pool]:
        """Yield the batches of steps `first_step` to `last_step` - 1, pool by pool."""
        step = first_step
        while step < last_step:
            epoch, place = divmod(step, self.steps_per_epoch)
            number, skip = divmod(place, self.batches_per_pool)
            start = number * self.batches_per_pool * self.batch
            tiles = self.epoch(epoch)[start : start + self.batches_per_pool * self.batch]
            places = np.arange(len(tiles))
            if self.sampler == "mixed":
                places = np.random.default_rng([self.seed, epoch, 2, number]).permutation(places)
            batches = [np.sort(part) for part in places.reshape(-1, self.batch)][skip : skip + last_step - step]
            yield Pool(step, tiles, batches)
            step += len(batches)


def order_of(source: TileSource, settings: PretrainSettings) -> TileOrder:
    """Return the order of the tiles of this source in a run with these settings."""
    return TileOrder(
        source.counts,
        settings.batch,
        settings.seed,
        settings.sampler,
        settings.tiles_per_slide,
        settings.resample,
        run=source.run,
        pool=settings.shuffle_tiles,
    )


class Pool(NamedTuple):
    """Tiles that are in memory together, and the batches that are drawn from them."""

    first_step: int
    tiles: Indices
    """In reading order."""
    batches: list[Indices]
    """Indices into `tiles`, ascending."""

    def share(self, rank: int, world_size: int) -> Pool:
        """Return the part of process `rank`: an equal part of each batch, neighbours together."""
        size = len(self.batches[0]) // world_size
        parts = [batch[rank * size : (rank + 1) * size] for batch in self.batches]
        used = np.unique(np.concatenate(parts))
        return Pool(self.first_step, self.tiles[used], [np.searchsorted(used, part) for part in parts])


def count_repeats(tiles: Indices) -> Indices:
    """Return how often each tile occurs before its own position, (N,)."""
    order = np.argsort(tiles, kind="stable")
    in_order = tiles[order]
    repeats = np.empty(len(tiles), dtype=np.int64)
    repeats[order] = np.arange(len(tiles)) - np.searchsorted(in_order, in_order)
    return repeats


@lru_cache(maxsize=2)
def _epoch_cached(order: TileOrder, epoch: int) -> Indices:
    choice = np.random.default_rng([order.seed, epoch if order.resample else 0, 0])
    firsts = np.concatenate([[0], np.cumsum(order.counts)])
    choose = _choose_exactly if order.sampler == "one-slide" else _choose_runs
    runs = [
        run + first for count, first in zip(order.counts, firsts, strict=False) for run in choose(order, count, choice)
    ]
    if order.sampler == "mixed":
        shuffled = np.random.default_rng([order.seed, epoch, 1]).permutation(len(runs))
        runs = [runs[k] for k in shuffled]
    tiles = np.concatenate(runs)[: order.steps_per_epoch * order.batch]
    if order.sampler == "one-slide":  # neighbours together, within each batch
        tiles = np.sort(tiles.reshape(-1, order.batch), axis=1).reshape(-1)
    tiles.flags.writeable = False
    return tiles


def _choose_runs(order: TileOrder, count: int, generator: np.random.Generator) -> list[Indices]:
    """Return runs of neighbours, cut at positions that differ between epochs, as many as `tiles_per_slide` allows."""
    edges = np.unique(np.clip(np.arange(-int(generator.integers(order.run)), count + order.run, order.run), 0, count))
    runs = [np.arange(start, stop) for start, stop in pairwise(edges)]
    left = order.tiles_per_slide
    if left is None or left >= count:
        return runs
    chosen: list[Indices] = []
    for k in generator.permutation(len(runs)):
        chosen.append(runs[k][:left])
        left -= len(chosen[-1])
        if left <= 0:
            break
    return chosen


def _choose_exactly(order: TileOrder, count: int, generator: np.random.Generator) -> list[Indices]:
    wanted = order.tiles_per_slide or count
    return [generator.choice(count, wanted, replace=count < wanted).astype(np.int64)]


# ---------------------------------------------------------------------------------------------------- reading ahead


class Batch(NamedTuple):
    """Tiles of one step for one process."""

    step: int
    tiles_B3HW: torch.Tensor
    """uint8 in the CPU's memory, pinned for a GPU; or on the GPU, where it keeps all of them."""
    ids_B: torch.Tensor
    view_ids_B: torch.Tensor
    """Seed of each tile's views: its id, or another number if the tile occurs again in the step (of all processes), so
    that its copies get different views."""
    transforms_B33: NDArray[np.float64] | None
    """(B, 3, 3) stain transforms, to be applied on the device; None when there is nothing to apply (any more)."""
    unfitted: int
    """Number of tiles, since the last batch with a count, whose stains could not be fitted."""


class Request(NamedTuple):
    """Tiles of one slide that a worker reads in one go."""

    group: int
    what: Any


def requests_of(source: TileSource, tiles: Indices) -> Iterator[Request]:
    """Yield requests for tiles in reading order: one slide each, and at most one run."""
    firsts = np.concatenate([[0], np.cumsum(source.counts)])
    groups = np.searchsorted(firsts, tiles, side="right") - 1
    for part in np.split(np.arange(len(tiles)), np.flatnonzero(np.diff(groups)) + 1):
        for start in range(0, len(part), RUN):
            chosen = part[start : start + RUN]
            group = int(groups[chosen[0]])
            yield Request(group, source.request(group, tiles[chosen] - firsts[group]))


class _Requests(Dataset[Any]):
    """Called by the workers of a DataLoader. Errors are returned as values: a DataLoader would garble them."""

    def __init__(self, reader: TileReader):
        self.reader = reader

    def __getitem__(self, request: Request) -> Pixels | SelfVitMilError:
        try:
            return self.reader.read(*request)
        except SelfVitMilError as error:
            return error


def _as_it_is(pixels: Any) -> Any:
    return pixels


def _start_worker(number: int) -> None:
    """Ignore termination signals in a worker: batch systems send them to all processes, and only the trainer reacts."""
    del number
    for warning in (signal.SIGTERM, signal.SIGINT):
        signal.signal(warning, signal.SIG_IGN)
    threading.Thread(target=_end_with_trainer, daemon=True).start()


def _end_with_trainer() -> None:
    """End this worker when the trainer is gone, even by kill -9.

    A DataLoader's worker looks whether its parent lives. That is the fork server, which in turn lives as long as any
    worker does: without this they would outlive the trainer for ever.
    """
    trainer = multiprocessing.parent_process()
    if trainer is not None:
        multiprocessing.connection.wait([trainer.sentinel])
        os._exit(1)


def default_workers() -> int:
    """Return one worker per core that this process may use, less one for the training itself."""
    return max(num_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")) - 1, 1)


def read_ahead(source: TileSource, requests: Iterator[Request], workers: int) -> Iterator[Pixels]:
    """Yield the tiles of the requests in order, read ahead by `workers` processes; 0 reads in this one."""
    options: dict[str, Any] = {"batch_size": None, "sampler": requests, "collate_fn": _as_it_is}
    options["generator"] = torch.Generator()  # or it would draw from the one that the training uses
    if workers:
        context = multiprocessing.get_context("forkserver")  # a fork of a process with threads may hang
        context.set_forkserver_preload(["selfvitmil.data.loader"])
        options |= {"num_workers": workers, "prefetch_factor": 4, "worker_init_fn": _start_worker}
        options |= {"multiprocessing_context": context}
    loader = DataLoader(_Requests(source.reader), **options)
    try:
        with script_not_imported():
            tiles = iter(loader)
        for pixels in tiles:
            if isinstance(pixels, SelfVitMilError):
                raise pixels
            yield Pixels(*pixels)
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise EngineError(
            "a process that reads tiles died",
            str(error).split("\n")[0].rstrip("."),
            "Use fewer --pretrain.workers when memory is short, more --shm-size in a container, or find the slide that "
            "crashes its reader with `selfvitmil check`",
            code="worker-died",
        ) from error


SHARE_OF_GPU = 0.25
"""Share of a GPU's free memory that tiles may take."""
UPLOADED_AT_ONCE = 256
"""Tiles whose stains are normalized together: at 224 px their intermediate values take 0.6 GB."""


class TileLoader:
    """Batches of steps `first_step` to before `last_step`, read ahead in the background. Use it in a `with` block."""

    def __init__(
        self,
        source: TileSource,
        order: TileOrder,
        first_step: int,
        last_step: int,
        *,
        rank: int = 0,
        world_size: int = 1,
        workers: int = 0,
        device: torch.device | None = None,
        most_kept_bytes: int = 0,
    ):
        """Prepare to read for a training on `device`.

        All tiles of the source are kept if they fit, else none: on a GPU in a quarter of its free memory, with their
        stains normalized, or in this machine's memory in `most_kept_bytes`. 0 bytes keep none at all.
        """
        self.source, self.order = source, order
        self.waited_s = 0.0
        """Seconds that the training has waited for tiles."""
        self._span = (first_step, last_step)
        self._part = (rank, world_size)
        self._gpu = device if device is not None and device.type == "cuda" else None
        self._workers = workers
        size = sum(source.counts) * 3 * math.prod(source.shape_px)
        self._on_gpu = bool(
            self._gpu and most_kept_bytes and size <= SHARE_OF_GPU * torch.cuda.mem_get_info(self._gpu)[0]
        )
        self._keeps = self._on_gpu or size <= most_kept_bytes
        self._queue: queue.Queue[Batch | BaseException | None] = queue.Queue(maxsize=order.batches_per_pool)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tiles", daemon=True)

    def __enter__(self) -> TileLoader:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join(timeout=60)

    def __iter__(self) -> Iterator[Batch]:
        while True:
            start = time.perf_counter()
            got = self._queue.get()
            self.waited_s += time.perf_counter() - start
            if got is None:
                return
            if isinstance(got, BaseException):
                raise got
            yield got

    def _run(self) -> None:
        try:
            for batch in self._batches():
                if not self._put(batch):
                    return
            self._put(None)
        except BaseException as error:  # whatever it is, the training must hear of it
            self._put(error)

    def _put(self, item: Batch | BaseException | None) -> bool:
        while not self._stop.is_set():
            try:
                self._queue.put(item, timeout=0.1)
            except queue.Full:
                continue
            return True
        return False

    def _pools(self) -> Iterator[Pool]:
        return (pool.share(*self._part) for pool in self.order.pools(*self._span))

    def _unread(self) -> Iterator[Indices]:
        """Yield, for each pool, the tiles that must be read for it, in reading order."""
        was_read = np.zeros(sum(self.source.counts), dtype=bool)
        for pool in self._pools():
            tiles = pool.tiles[~was_read[pool.tiles]]
            was_read[tiles] = self._keeps
            yield tiles

    def _batches(self) -> Iterator[Batch]:
        requests = (request for tiles in self._unread() for request in requests_of(self.source, tiles))
        pixels = read_ahead(self.source, requests, self._workers)
        in_place = self._keeps and not self._on_gpu
        pool_size = self.order.batches_per_pool * self.order.batch
        read_T3HW = self._memory(sum(self.source.counts) if in_place else pool_size)
        kept_T3HW = self._memory(sum(self.source.counts), self._gpu) if self._on_gpu else read_T3HW
        for whole, unread in zip(self.order.pools(*self._span), self._unread(), strict=True):
            pool = whole.share(*self._part)
            rows = torch.from_numpy(unread if in_place else np.arange(len(unread)))
            filled, unfitted = 0, 0
            while filled < len(unread):
                part = next(pixels)
                read_T3HW[rows[filled : filled + len(part.tiles_B3HW)]] = part.tiles_B3HW
                filled, unfitted = filled + len(part.tiles_B3HW), unfitted + part.unfitted
                if self._stop.is_set():
                    return
            if self._on_gpu:
                self._upload(kept_T3HW, unread, read_T3HW)
            for number, places in enumerate(pool.batches):
                batch = pool.tiles[places]
                repeats = np.split(count_repeats(whole.tiles[whole.batches[number]]), self._part[1])[self._part[0]]
                from_rows = kept_T3HW, batch if self._keeps else places
                yield self._gather(pool.first_step + number, batch, repeats, *from_rows, 0 if number else unfitted)

    def _memory(self, tiles: int, device: torch.device | None = None) -> torch.Tensor:
        return torch.empty((tiles, 3, *self.source.shape_px), dtype=torch.uint8, device=device)

    def _upload(self, kept_T3HW: torch.Tensor, tiles: Indices, read_T3HW: torch.Tensor) -> None:
        """Put the tiles with these numbers, which are the first that were read, into the GPU's memory."""
        for start in range(0, len(tiles), UPLOADED_AT_ONCE):
            some = tiles[start : start + UPLOADED_AT_ONCE]
            tiles_B3HW = read_T3HW[start : start + len(some)].to(kept_T3HW.device)
            transforms_B33 = self._transforms(some)
            if transforms_B33 is not None:
                tiles_B3HW = stain.apply_transforms(tiles_B3HW, transforms_B33)
            kept_T3HW[torch.from_numpy(some).to(kept_T3HW.device)] = tiles_B3HW

    def _transforms(self, tiles: Indices) -> NDArray[np.float64] | None:
        firsts = np.concatenate([[0], np.cumsum(self.source.counts)])
        return self.source.stain_transforms(np.searchsorted(firsts, tiles, side="right") - 1)

    def _gather(
        self, step: int, batch: Indices, repeats: Indices, memory_T3HW: torch.Tensor, rows: Indices, unfitted: int
    ) -> Batch:
        chosen = torch.from_numpy(rows)
        if self._on_gpu:
            # Pinned, so that this thread does not wait for the training steps that the device was given before.
            tiles_B3HW = memory_T3HW.index_select(0, chosen.pin_memory().to(memory_T3HW.device, non_blocking=True))
        else:
            pinned = self._gpu is not None
            tiles_B3HW = torch.empty((len(batch), *memory_T3HW.shape[1:]), dtype=torch.uint8, pin_memory=pinned)
            torch.index_select(memory_T3HW, 0, chosen, out=tiles_B3HW)
        ids = self.source.ids[batch]
        numbers = [torch.from_numpy(each) for each in (ids, ids + repeats * REPEAT_ID)]
        ids_B, view_ids_B = (each.pin_memory() if self._gpu else each for each in numbers)
        transforms_B33 = None if self._on_gpu else self._transforms(batch)
        return Batch(step, tiles_B3HW, ids_B, view_ids_B, transforms_B33, unfitted)


def sample_tiles(source: TileSource, num_tiles: int, seed: int) -> Indices:
    """Return the numbers of about `num_tiles` tiles, ascending: equally many from every slide, rounded up."""
    per_slide = -(-num_tiles // len(source.counts))
    order = TileOrder(source.counts, batch=1, seed=seed, tiles_per_slide=per_slide, run=min(source.run, 4))
    return np.sort(order.epoch(0))


def read_plain(source: TileSource, tiles: Indices, workers: int) -> Iterator[torch.Tensor]:
    """Yield these tiles in order, not augmented, stains normalized: uint8 (B, 3, H, W), some at a time."""
    firsts = np.concatenate([[0], np.cumsum(source.counts)])
    done = 0
    for pixels in read_ahead(source, requests_of(source, tiles), workers):
        tiles_B3HW = pixels.tiles_B3HW
        groups = np.searchsorted(firsts, tiles[done : done + len(tiles_B3HW)], side="right") - 1
        transforms_B33 = source.stain_transforms(groups)
        yield tiles_B3HW if transforms_B33 is None else stain.apply_transforms(tiles_B3HW, transforms_B33)
        done += len(tiles_B3HW)


def read_plain_sample(source: TileSource, num_tiles: int, size_px: int, seed: int, workers: int) -> torch.Tensor:
    """Return at most `num_tiles` tiles, uint8 (N, 3, S, S) with S = `size_px`, in an order that the seed determines."""
    parts = [
        fit_tiles(tiles_B3HW, size_px)
        for tiles_B3HW in read_plain(source, sample_tiles(source, num_tiles, seed), workers)
    ]
    tiles_N3SS = torch.cat(parts)
    order = np.random.default_rng([seed, 3]).permutation(len(tiles_N3SS))[:num_tiles]
    return tiles_N3SS[torch.from_numpy(order)]


def fit_tiles(tiles_B3HW: torch.Tensor, size_px: int) -> torch.Tensor:
    """Return the central square of uint8 tiles, (B, 3, S, S), resampled (bicubic) if its edge is not `size_px`."""
    height, width = tiles_B3HW.shape[2:]
    edge = min(height, width)
    top, left = (height - edge) // 2, (width - edge) // 2
    squares_B3SS = tiles_B3HW[:, :, top : top + edge, left : left + edge]
    if edge == size_px:
        return squares_B3SS
    resized_B3SS = functional.interpolate(squares_B3SS.float(), (size_px, size_px), mode="bicubic", antialias=True)
    return resized_B3SS.round().clamp(0, 255).to(torch.uint8)


def channel_statistics(
    source: TileSource, num_tiles: int, seed: int, workers: int
) -> tuple[tuple[float, float, float], tuple[float, float, float]]:
    """Return mean and standard deviation of each channel of stain-normalized tiles, 1 = white, over a sample.

    Every slide has the same weight. Sums of grey levels are whole numbers, so the result does not depend on the order.
    Raises ConfigError if all pixels have nearly one colour.
    """
    histogram = np.zeros((3, 256), dtype=np.int64)
    for images_B3HW in read_plain(source, sample_tiles(source, num_tiles, seed), workers):
        for channel in range(3):
            histogram[channel] += np.bincount(images_B3HW[:, channel].numpy().ravel(), minlength=256)
    levels = np.arange(256) / 255
    mean = histogram @ levels / histogram.sum(axis=1)
    std = np.sqrt(np.maximum(histogram @ levels**2 / histogram.sum(axis=1) - mean**2, 0))
    if std.min() < 1 / 255:
        raise ConfigError(
            "all pixels of the tiles have nearly one colour",
            f"their standard deviations are {', '.join(f'{value:.4f}' for value in std)} of white",
            "Look at the tiles, or give pretrain.mean and pretrain.std",
            code="one-colour",
        )
    return tuple(mean.tolist()), tuple(std.tolist())
