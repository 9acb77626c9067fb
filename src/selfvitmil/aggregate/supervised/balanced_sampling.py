"""Class-balanced sampling of labelled tiles: half of every batch is tumour.

Each class is an endless stream of passes over its tiles (at most `tiles_per_slide` of a slide per pass, redrawn each
time, neighbours together as in pretraining), so the rarer class is oversampled. A batch is a function of (seed, step)
alone: resuming needs no sampler state.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from selfvitmil.data.loader import Pool, TileOrder
from selfvitmil.data.sources import Indices


@dataclass(frozen=True, eq=False)
class BalancedOrder(TileOrder):
    """Class-balanced batches, from labels of all tiles of a source (numbered across slides)."""

    labels: NDArray[np.int8] = field(kw_only=True)

    def of_class(self, label: int) -> tuple[TileOrder, Indices]:
        """Return an order over the tiles of one class, and their indices among all tiles."""
        of_slide = np.split(self.labels == label, np.cumsum(self.counts)[:-1])
        counts = tuple(int(mine.sum()) for mine in of_slide)
        own = TileOrder(counts, batch=1, seed=self.seed + label, tiles_per_slide=self.tiles_per_slide, run=self.run)
        return own, np.flatnonzero(self.labels == label)

    def pools(self, first_step: int, last_step: int) -> Iterator[Pool]:
        """Yield the batches of steps `first_step` up to (not including) `last_step`, pool by pool."""
        streams = [self.of_class(label) for label in (0, 1)]
        step = first_step
        while step < last_step:
            number, skip = divmod(step, self.batches_per_pool)
            halves = [self._drawn(number, label, *stream) for label, stream in enumerate(streams)]
            tiles, places = np.unique(np.concatenate(halves, axis=1), return_inverse=True)
            batches = [np.sort(part) for part in places.reshape(self.batches_per_pool, self.batch)]
            batches = batches[skip : skip + last_step - step]
            yield Pool(step, tiles, batches)
            step += len(batches)

    def _drawn(self, number: int, label: int, own: TileOrder, rows: Indices) -> Indices:
        """Return one class's share of a pool's batches, (batches, tiles): the next piece of its stream, shuffled."""
        size = (self.batch + 1 - label) // 2
        start, stop = (self.batches_per_pool * size * k for k in (number, number + 1))
        one_pass = own.tiles_per_epoch
        passes = range(start // one_pass, -(-stop // one_pass))
        stream = np.concatenate([own.epoch(k)[max(start - k * one_pass, 0) : stop - k * one_pass] for k in passes])
        shuffled = np.random.default_rng([self.seed, number, label]).permutation(stream)
        return rows[shuffled].reshape(self.batches_per_pool, size)
