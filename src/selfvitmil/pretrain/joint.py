"""Rows of a whole batch, wherever they were computed, for losses that compare tiles with each other.

A batch is spread over processes, and in each of them over the parts of `accumulate`. The nearest neighbour of an
embedding (KoLeo), the shares that Sinkhorn and Knopp balance, the negatives of SimCLR: all of them are searched among
the tiles of the whole batch, so that neither the number of processes nor that of the parts changes the loss.

`JointBatch.join` gives a part the rows of all others beside its own. Every part computes the loss of the whole batch
and knows its gradient with respect to its own rows only. The losses of all n parts and processes are averaged
afterwards, so those gradients count n times each: together they are the gradient of the whole batch.

How a part learns the rows of parts that come later: parts that run side by side in threads wait for each other; parts
that run one after the other were computed once before, without gradient (`JointBatch.look_ahead`), which costs one more
forward pass of the views in question and no memory but their rows.

Axes in names: V views, B tiles of a part, D dimensions, R rows (views times tiles, grouped by view), K outputs.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
import torch.distributed as dist


class JointBatch:
    """The parts of one batch. Without arguments: one part, of one process or of all that run."""

    def __init__(self, parts: int = 1, *, in_threads: bool = False, alone: bool = False):
        """`alone`: this process computes something that others do not, and must not wait for them."""
        self.parts = parts
        self.is_alone = alone or not (dist.is_available() and dist.is_initialized())
        self._barrier = threading.Barrier(parts) if in_threads else None
        self._student: list[torch.Tensor | None] = [None] * parts
        self._teacher: list[torch.Tensor | None] = [None] * parts
        self._everywhere: list[torch.Tensor] | None = None

    # ---------------------------------------------------------------------------------------------- before the parts

    def look_ahead(self, embeddings: Sequence[torch.Tensor]) -> None:
        """Note the embeddings (V, B, D) of all parts of this process, for parts that run one after the other."""
        own_VBD = torch.cat(list(embeddings), dim=1)
        self._everywhere = [
            part_VBD for process_VBD in self._of_processes(own_VBD) for part_VBD in process_VBD.chunk(self.parts, dim=1)
        ]

    def look_ahead_teacher(self, logits: Sequence[torch.Tensor]) -> None:
        """Note the teacher's logits (R, K) of all parts of this process."""
        self._teacher = list(logits)

    # ---------------------------------------------------------------------------------------------- within a part

    def join(self, own_VBD: torch.Tensor, part: int = 0) -> torch.Tensor:
        """Embeddings of all tiles of the batch, (V, tiles, D) in their order, with the gradient of this part's own."""
        if self._barrier is not None:
            self._student[part] = own_VBD.detach()
            self._barrier.wait()
            shares = [share for share in self._student if share is not None]
        elif self._everywhere is not None:
            # Where views of one size were enough, the others have not been looked at.
            shares = self._everywhere
        else:
            shares = self._of_processes(own_VBD.detach())
        if len(shares) == 1:
            return own_VBD
        place = part if self.is_alone else dist.get_rank() * self.parts + part
        counted_VBD = own_VBD.detach() + len(shares) * (own_VBD - own_VBD.detach())
        return torch.cat([*shares[:place], counted_VBD, *shares[place + 1 :]], dim=1)

    def join_teacher(self, own_RK: torch.Tensor, part: int = 0) -> tuple[torch.Tensor, slice]:
        """The teacher's logits of all parts of this process, and which rows of them are this part's own."""
        if self._barrier is not None:
            self._teacher[part] = own_RK
            self._barrier.wait()
        shares = [share for share in self._teacher if share is not None] or [own_RK]
        place = part if len(shares) > 1 else 0
        return torch.cat(shares), slice(place * len(own_RK), (place + 1) * len(own_RK))

    def give_up(self) -> None:
        """Let no other part wait for this one, which failed."""
        if self._barrier is not None:
            self._barrier.abort()

    def _of_processes(self, own_VBD: torch.Tensor) -> list[torch.Tensor]:
        if self.is_alone:
            return [own_VBD]
        shares = [torch.empty_like(own_VBD) for _ in range(dist.get_world_size())]
        dist.all_gather(shares, own_VBD.contiguous())
        return shares
