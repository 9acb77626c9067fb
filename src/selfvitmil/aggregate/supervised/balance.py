"""Which labelled tiles make up which step: batches of which half is tumour.

Each class is a stream of tiles without end, pass after pass over its tiles (at most `tiles_per_slide` of a slide in a
pass, drawn anew each time, neighbours together as in pretraining). So the rarer class comes round more often, and a
step is a function of (seed, step) alone: a run that was stopped needs no state of its order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from selfvitmil.pretrain.feed import Order, Pool
from selfvitmil.pretrain.sources import Indices


@dataclass(frozen=True, eq=False)
class BalancedOrder(Order):
    """Batches of which half is tumour, from labels of all tiles of a source (numbered through all slides)."""

    labels: NDArray[np.int8] = field(kw_only=True)

    def of_class(self, label: int) -> tuple[Order, Indices]:
        """An order of the tiles of one class among themselves, and their numbers among all tiles."""
        of_slide = np.split(self.labels == label, np.cumsum(self.counts)[:-1])
        counts = tuple(int(mine.sum()) for mine in of_slide)
        own = Order(counts, batch=1, seed=self.seed + label, tiles_per_slide=self.tiles_per_slide, run=self.run)
        return own, np.flatnonzero(self.labels == label)

    def pools(self, first_step: int, last_step: int) -> Iterator[Pool]:
        """The batches of steps `first_step` to before `last_step`, pool by pool."""
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

    def _drawn(self, number: int, label: int, own: Order, rows: Indices) -> Indices:
        """One class's part of the batches of a pool, (batches, tiles): the next piece of its stream, shuffled."""
        size = (self.batch + 1 - label) // 2
        start, stop = (self.batches_per_pool * size * k for k in (number, number + 1))
        one_pass = own.tiles_per_epoch
        passes = range(start // one_pass, -(-stop // one_pass))
        stream = np.concatenate([own.epoch(k)[max(start - k * one_pass, 0) : stop - k * one_pass] for k in passes])
        shuffled = np.random.default_rng([self.seed, number, label]).permutation(stream)
        return rows[shuffled].reshape(self.batches_per_pool, size)
