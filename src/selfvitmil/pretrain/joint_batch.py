"""Losses and batch norms over the whole batch, whatever the number of processes and of accumulation parts.

A batch is spread over processes, and in each of them over the parts of `accumulate`. The nearest neighbour of an
embedding (KoLeo), the shares that Sinkhorn-Knopp balances, the negatives of SimCLR: all are taken from the whole batch,
so that neither the number of processes nor that of the parts changes the loss.

`JointBatch.join` gives a part the rows of all others beside its own. Every part computes the loss of the whole batch
and has its gradient with respect to its own rows only. The losses of all n parts and processes are averaged afterwards,
so those gradients are multiplied by n: together they are the gradient of the whole batch. Parts that run side by side
in threads wait for each other; parts that run one after the other were computed once before, without gradient
(`JointBatch.look_ahead`), which costs one more forward pass of the views in question.

`JointBatchNorm2d` normalizes by the batch of all processes, on any device. For inference, `recompute_statistics`
replaces the running statistics of batch norms by those of plain tiles under the final weights (precise batch norm, Wu
and Johnson 2021, arXiv 2105.07576): training views are strongly augmented and of two sizes, and averaged weights are
not those that the running statistics were measured with.

Axes in names: V views, B tiles of a part, D dimensions, R rows (views times tiles, grouped by view), K outputs, C
channels, P processes, H and W height and width, 3 is RGB.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from selfvitmil.pretrain.loss import at_least_float32

NUM_TILES = 1024
"""Tiles that statistics for inference are computed on, at most; as many from every slide."""
PIXELS_AT_ONCE = 64 * 224**2
"""Pixels in one pass, at most: 64 tiles of 224 px, whose activations take less memory than a step of training."""
FEWEST_AT_ONCE = 16
"""Tiles in one pass, at least, where there are so many."""


# ---------------------------------------------------------------------------------------------------- joint batch


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


# ---------------------------------------------------------------------------------------------------- for inference


def batch_norms_of(network: nn.Module) -> list[_BatchNorm]:
    """The batch norms that use stored statistics at inference."""
    found = [module for module in network.modules() if isinstance(module, _BatchNorm)]
    return [norm for norm in found if norm.running_mean is not None]


@torch.no_grad()
def recompute_statistics(network: nn.Module, batches: Iterable[torch.Tensor]) -> None:
    """Replace the stored mean and variance of every batch norm by those of its inputs over these images, exactly.

    `batches` are normalized images (B, 3, H, W) on the network's device, each with several slides in it; all images
    count alike. Within a batch the network normalizes as in training, so with one batch it gives at inference what it
    gave for that batch. The variance is the unbiased one, as torch stores it. All else of the network stays as it was;
    nothing is exchanged with other processes. Without batch norms nothing happens, and no batch is asked for.
    """
    norms = batch_norms_of(network)
    if not norms:
        return
    moments = {norm: _Moments() for norm in norms}

    def note(norm: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        moments[norm].add(inputs[0])  # pyright: ignore[reportArgumentType]

    counted = [norm.num_batches_tracked.clone() for norm in norms if norm.num_batches_tracked is not None]
    hooks = [norm.register_forward_pre_hook(note) for norm in norms]
    try:
        with _normalizing_by_batch(network, norms), alone(network):
            for images_B3HW in batches:
                network(images_B3HW)
    finally:
        for hook in hooks:
            hook.remove()
    for norm, found in moments.items():
        assert norm.running_mean is not None
        assert norm.running_var is not None
        norm.running_mean.copy_(found.mean_C)
        norm.running_var.copy_(found.squares_C / max(found.count - 1, 1))
    for count, before in zip((norm.num_batches_tracked for norm in norms), counted, strict=True):
        assert count is not None
        count.copy_(before)


@contextmanager
def statistics_of(network: nn.Module, batches: Iterable[torch.Tensor]) -> Iterator[None]:
    """`recompute_statistics` for the time of a `with` block; afterwards the statistics of training are back."""
    buffers = [buffer for norm in batch_norms_of(network) for buffer in norm.buffers()]
    before = [buffer.clone() for buffer in buffers]
    try:
        recompute_statistics(network, batches)
        yield
    finally:
        for buffer, value in zip(buffers, before, strict=True):
            buffer.copy_(value)


class _Moments:
    """Count, mean and sum of squared differences from the mean, per channel, of numbers that come in parts."""

    def __init__(self):
        self.count = 0
        self.mean_C = self.squares_C = torch.zeros(())

    def add(self, inputs: torch.Tensor) -> None:
        """Inputs (B, C, ...) of a batch norm. Chan's formula, in float64 on the CPU, which every machine has."""
        others = [axis for axis in range(inputs.ndim) if axis != 1]
        var_C, mean_C = torch.var_mean(at_least_float32(inputs), dim=others, correction=0)
        var_C, mean_C = var_C.double().cpu(), mean_C.double().cpu()
        count = inputs.numel() // inputs.shape[1]
        total = self.count + count
        away_C = mean_C - self.mean_C
        self.squares_C = self.squares_C + var_C * count + away_C**2 * (self.count * count / total)
        self.mean_C = self.mean_C + away_C * (count / total)
        self.count = total


@contextmanager
def _normalizing_by_batch(network: nn.Module, norms: Iterable[nn.Module]) -> Iterator[None]:
    """Batch norms as in training, all else as at inference; afterwards every part is in the mode it had."""
    before = [(part, part.training) for part in network.modules()]
    network.eval()
    for norm in norms:
        norm.training = True
    try:
        yield
    finally:
        for part, training in before:
            part.training = training


def passes_of(tiles_N3SS: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Tiles in parts of nearly equal size that fit into memory; how many depends on the size of a tile alone."""
    at_once = max(PIXELS_AT_ONCE // tiles_N3SS[0, 0].numel(), FEWEST_AT_ONCE)
    return tiles_N3SS.tensor_split(-(-len(tiles_N3SS) // at_once))


# ---------------------------------------------------------------------------------------------------- several processes


class JointBatchNorm2d(nn.BatchNorm2d):
    """A batch norm that in training normalizes by the equal parts of a batch that all processes have.

    torch's own SyncBatchNorm does so on GPUs alone. A loss that is averaged over the processes gets the gradient that
    it has for the whole batch in one process.
    """

    alone = False
    """Whether this process computes something that others do not, and must not wait for them."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not self.training or self.alone or not dist.is_initialized():
            return super().forward(input)
        x_BCHW = at_least_float32(input)
        with torch.autocast(x_BCHW.device.type, enabled=False):
            var_C, mean_C = torch.var_mean(x_BCHW, dim=(0, 2, 3), correction=0)
            var_PC, mean_PC = _gather(torch.stack([var_C, mean_C])).unbind(1)
            mean_C = mean_PC.mean(dim=0)
            var_C = var_PC.mean(dim=0) + (mean_PC - mean_C).square().mean(dim=0)
            self._note(mean_C.detach(), var_C.detach(), x_BCHW.numel() // len(mean_C) * len(mean_PC))
            scale_C = torch.rsqrt(var_C + self.eps)
            shift_C = -mean_C * scale_C
            if self.affine:
                scale_C, shift_C = scale_C * self.weight, shift_C * self.weight + self.bias
            return torch.addcmul(shift_C[:, None, None], x_BCHW, scale_C[:, None, None]).to(input.dtype)

    @torch.no_grad()
    def _note(self, mean_C: torch.Tensor, var_C: torch.Tensor, count: int) -> None:
        """Move the stored statistics, as torch does."""
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        share = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean_C.to(self.running_mean), share)
        self.running_var.lerp_((var_C * count / max(count - 1, 1)).to(self.running_var), share)


def join_processes(network: nn.Module) -> None:
    """Turn the batch norms of a network into `JointBatchNorm2d`; weights, statistics and hooks stay what they are.

    Those of a kind of their own (timm's BatchNormAct2d of EfficientNets, for instance) are left alone.
    """
    for module in network.modules():
        if type(module) is nn.BatchNorm2d:
            module.__class__ = JointBatchNorm2d


@contextmanager
def alone(network: nn.Module) -> Iterator[None]:
    """In this block, batch norms of the network wait for no other process."""
    joint = [module for module in network.modules() if isinstance(module, JointBatchNorm2d)]
    for norm in joint:
        norm.alone = True
    try:
        yield
    finally:
        for norm in joint:
            norm.alone = False


class _Gather(torch.autograd.Function):
    """(P, ...) of tensors that all processes have; the gradient of each is the sum of what all processes found."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor) -> torch.Tensor:
        shares = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(shares, own.contiguous())
        return torch.stack(shares)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        total = gradients[0].contiguous().clone()
        dist.all_reduce(total)
        return total[dist.get_rank()]


def _exchange(own: torch.Tensor) -> torch.Tensor:
    return _Gather.apply(own)  # pyright: ignore[reportReturnType]


_gather: Any = torch.compiler.disable(_exchange)
"""Never part of a compiled graph: it waits for other processes."""
