"""Bags as tensors on the training device: cached in GPU memory while they fit, else memory-mapped files.

On a CPU nothing is copied: a bag is a tensor on the mapped file, and `chunked_bag.py` reads it in chunks. On a GPU bags
are uploaded in their own dtype (float16 for ours) and kept until `cache_gb` is full; further bags are uploaded on each
request, through pinned memory, the next one (`prefetch`) during the computation on the current one. One store serves
many training runs (folds, seeds, methods): each bag is uploaded, checked and measured once.

Bags are keyed by identity, not by name: the same slide may come with other embeddings.

N instances, D dimensions, P parts (chunks of a bag, or bags).
"""

from __future__ import annotations

import queue
import warnings
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from selfvitmil.bags import Bag, check_bag
from selfvitmil.errors import BagError
from selfvitmil.runtime.device import choose_device, cpu_threads
from selfvitmil.settings import TrainSettings

ONE_THREAD_ELEMENTS = 1 << 22
"""Number of values of the largest bag below which one CPU thread is faster than several."""
CHUNK_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 26}
"""Values converted to float64 at a time: what fits into a CPU cache, what keeps a GPU busy."""
STAGING_BYTES = 4 << 20
"""Size of one pinned staging buffer."""
STAGING_THREADS = 4
"""Copy threads: one copies a few GB/s from a mapped file, and a GPU accepts several times that."""


@contextmanager
def few_threads(bags: Sequence[Bag], device: torch.device) -> Iterator[None]:
    """Use one CPU thread where bags are small: several threads spend more time synchronizing than computing.

    On a shared machine that overhead is 50 times the work: threads spin at barriers for one that is not scheduled. The
    number of threads depends on the bags alone, so results stay bit-identical.
    """
    with cpu_threads(1 if one_thread_does(bags, device) else None):
        yield


def one_thread_does(bags: Iterable[Bag], device: torch.device) -> bool:
    """Whether one CPU thread is enough for the largest of these bags."""
    return device.type == "cpu" and max((bag.features_ND.size for bag in bags), default=0) < ONE_THREAD_ELEMENTS


class BagStore:
    """Bags as tensors on one device."""

    def __init__(self, device: str | torch.device = "auto", cache_gb: float | None = None):
        """`cache_gb`: GPU memory for bags; None means three quarters of what is free now."""
        self.device = choose_device(device)
        self._room_bytes = 0
        self._staging: _Staging | None = None
        if self.device.type == "cuda":
            free_bytes = torch.cuda.mem_get_info(self.device)[0]
            self._room_bytes = round(0.75 * free_bytes) if cache_gb is None else round(cache_gb * 1e9)
            self._staging = _Staging(self.device)
        self._kept: dict[Bag, Tensor] = {}
        self._coming: dict[Bag, Future[_Upload]] = {}
        self._coords: dict[Bag, Tensor] = {}
        self._moments: dict[Bag, Moments] = {}
        self.evidence_choices: dict[Any, Any] = {}
        """Choices of `aggregate.evidence` on these bags, reused by training runs with other seeds."""

    @classmethod
    def of(cls, settings: TrainSettings) -> BagStore:
        """Return a store with the device and cache size of the settings."""
        return cls(settings.device, settings.cache_gb)

    def features(self, bag: Bag) -> Tensor:
        """Return the bag's embeddings (N, D) on the device."""
        kept = self._kept.get(bag)
        if kept is not None:
            return kept
        host_ND = _on_host(bag)
        if self._staging is None:
            self._kept[bag] = host_ND
            return host_ND
        coming = self._coming.pop(bag, None)
        features_ND = (self._staging.upload(host_ND) if coming is None else coming.result()).received()
        if host_ND.nbytes <= self._room_bytes:
            self._room_bytes -= host_ND.nbytes
            self._kept[bag] = features_ND
        return features_ND

    def prefetch(self, bag: Bag) -> None:
        """Start uploading a bag that is not cached and will be requested next."""
        if self._staging is not None and bag not in self._kept and bag not in self._coming:
            self._coming[bag] = self._staging.upload_later(_on_host(bag))

    def holds(self, bags: Sequence[Bag]) -> bool:
        """Whether all these bags stay cached at a fixed address on the device."""
        return all(bag in self._kept for bag in bags)

    def coords(self, bag: Bag) -> Tensor:
        """Return the tile corners (N, 2) on the device; raise BagError where the bag has none."""
        if bag not in self._coords:
            if bag.coords is None:
                why, how = "this aggregator was built with coordinates=True", "Build it with coordinates=False"
                raise BagError(f"{bag.slide}: its feature file has no coordinates", why, how)
            self._coords[bag] = torch.from_numpy(np.array(bag.coords)).to(self.device)
        return self._coords[bag]

    def check(self, bags: Sequence[Bag]) -> None:
        """Raise BagError for the first bag that is empty or contains NaN or infinity."""
        for bag in bags:
            if len(bag) == 0:
                check_bag(bag)
        deviations = []
        for bag, following in zip(bags, [*bags[1:], None], strict=False):
            if following is not None and following not in self._moments:
                self.prefetch(following)
            deviations.append(self.moments(bag).squares_D.sum())
        finite = torch.stack(deviations).isfinite().tolist() if deviations else []
        for bag, is_finite in zip(bags, finite, strict=True):
            if not is_finite:
                check_bag(bag)  # its message names the row
                raise BagError(f"{bag.slide}: its values are too large", "their variance overflows")

    def moments(self, bag: Bag) -> Moments:
        """Return mean and sum of squared deviations of the bag's embeddings."""
        if bag not in self._moments:
            self._moments[bag] = measure(self.features(bag))
        return self._moments[bag]

    def standardization(self, bags: Sequence[Bag]) -> tuple[Tensor, Tensor]:
        """Return mean and standard deviation (D,) over all instances of these bags, float64 on the CPU."""
        whole = merge([self.moments(bag) for bag in bags])
        return whole.mean_D.cpu(), (whole.squares_D / whole.count).sqrt().cpu()


def _on_host(bag: Bag) -> Tensor:
    """Return a tensor that shares the bag's memory."""
    with warnings.catch_warnings():
        # Mapped files are read-only, which torch tensors cannot express; nothing here writes into a bag.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(bag.features_ND)


# ---------------------------------------------------------------------------------------------------- moments


@dataclass(frozen=True, eq=False)
class Moments:
    """Count, mean and sum of squared deviations of some instances, in float64."""

    count: int
    mean_D: Tensor
    squares_D: Tensor


def measure(bag_ND: Tensor) -> Moments:
    """Return the moments of a bag, computed chunk by chunk."""
    num_rows = max(1, CHUNK_ELEMENTS.get(bag_ND.device.type, 1 << 20) // bag_ND.shape[1])
    # Reused: allocating memory for every chunk costs a CPU more than the arithmetic.
    buffer = torch.empty(min(num_rows, len(bag_ND)), bag_ND.shape[1], dtype=torch.float64, device=bag_ND.device)
    parts = []
    for chunk in bag_ND.split(num_rows):
        values = buffer[: len(chunk)].copy_(chunk)
        mean_D = values.mean(0)
        parts.append(Moments(len(chunk), mean_D, values.sub_(mean_D).square_().sum(0)))
    return merge(parts)


def merge(parts: Sequence[Moments]) -> Moments:
    """Return the moments of all parts combined."""
    means_PD = torch.stack([part.mean_D for part in parts])
    counts_P1 = torch.tensor([[float(part.count)] for part in parts], device=means_PD.device, dtype=torch.float64)
    count = sum(part.count for part in parts)
    mean_D = (counts_P1 * means_PD).sum(0) / count
    within_D = torch.stack([part.squares_D for part in parts]).sum(0)
    return Moments(count, mean_D, within_D + (counts_P1 * (means_PD - mean_D).square()).sum(0))


# ---------------------------------------------------------------------------------------------------- uploading


@dataclass(frozen=True, eq=False)
class _Upload:
    """A tensor that is being copied to the device."""

    features_ND: Tensor
    arrived: torch.cuda.Event

    def received(self) -> Tensor:
        """Return the tensor for use in the current stream, which waits for the copy and keeps the memory alive."""
        current = torch.cuda.current_stream(self.features_ND.device)
        current.wait_event(self.arrived)
        self.features_ND.record_stream(current)
        return self.features_ND


class _Staging:
    """Uploads of memory-mapped bags: threads copy pieces to pinned memory, from which the device fetches them."""

    def __init__(self, device: torch.device):
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._free: queue.SimpleQueue[tuple[Tensor, torch.cuda.Event]] = queue.SimpleQueue()
        for _ in range(4 * STAGING_THREADS):
            piece = torch.empty(STAGING_BYTES, dtype=torch.uint8, pin_memory=True)
            self._free.put((piece, torch.cuda.Event()))
        self._copiers = ThreadPoolExecutor(STAGING_THREADS)
        self._ahead = ThreadPoolExecutor(1)

    def upload(self, host_ND: Tensor) -> _Upload:
        """Copy to the device; return when the host tensor has been read completely."""
        with torch.cuda.stream(self._stream):
            target_ND = torch.empty(host_ND.shape, dtype=host_ND.dtype, device=self._device)
        source, target = host_ND.flatten(), target_ND.flatten()
        size = STAGING_BYTES // host_ND.element_size()
        pieces = zip(source.split(size), target.split(size), strict=True)
        for done in [self._copiers.submit(self._copy, *piece) for piece in pieces]:
            done.result()
        arrived = torch.cuda.Event()
        arrived.record(self._stream)
        return _Upload(target_ND, arrived)

    def upload_later(self, host_ND: Tensor) -> Future[_Upload]:
        """Upload in the background."""
        return self._ahead.submit(self.upload, host_ND)

    def _copy(self, source: Tensor, target: Tensor) -> None:
        piece, fetched = self._free.get()
        fetched.synchronize()
        pinned = piece[: source.nbytes].view(source.dtype).copy_(source)
        with torch.cuda.stream(self._stream):
            target.copy_(pinned, non_blocking=True)
            fetched.record(self._stream)
        self._free.put((piece, fetched))
