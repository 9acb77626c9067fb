"""SimCLR: the contrastive loss (NT-Xent) and its projection head, for the ResNet18 embedder of the DSMIL rows.

Every tile has two views. A view's projection must point to that of the other view of the same tile, and away from all
other projections of the batch; with several processes, from those of all processes. Chen et al., ICML 2020.

Axes in names: B tiles, D dimensions, R rows (two views times tiles, grouped by view), A all rows of all processes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from selfvitmil.errors import ConfigError
from selfvitmil.pretrain.loss import at_least_float32


class SimclrHead(nn.Sequential):
    """Linear, ReLU, linear: as wide as the embedding, then `out_dim`."""

    def __init__(self, dim: int, out_dim: int = 256):
        super().__init__(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, out_dim))


def nt_xent_loss(projections_RD: torch.Tensor, temperature: float = 0.5) -> torch.Tensor:
    """Mean over rows of -log(exp(cos(row, partner) / t) / sum over all other rows of exp(cos(row, other) / t)).

    Rows are grouped by view: all tiles of the first view, then the same tiles of the second. Every process must hold
    the same number of rows; the mean of the processes' losses is the loss of the joint batch, and so are the gradients
    when averaged, as DDP does.
    """
    rows = len(projections_RD)
    if rows % 2 or rows < 4:
        raise ConfigError(
            f"{rows} projections cannot be contrasted",
            "the loss takes two views of at least two tiles",
            "Use a larger batch",
        )
    directions_RD = functional.normalize(at_least_float32(projections_RD), dim=-1)
    rank, others_AD = _gather(directions_RD)
    own = torch.arange(rows, device=directions_RD.device) + rank * rows
    partner = torch.arange(rows, device=directions_RD.device).roll(rows // 2) + rank * rows
    logits_RA = directions_RD @ others_AD.T / temperature
    itself_RA = own[:, None] == torch.arange(len(others_AD), device=own.device)
    return functional.cross_entropy(logits_RA.masked_fill(itself_RA, -torch.inf), partner)


def _gather(rows_RD: torch.Tensor) -> tuple[int, torch.Tensor]:
    """This process's number and the rows of all processes, in order."""
    if not (dist.is_available() and dist.is_initialized()):
        return 0, rows_RD
    return dist.get_rank(), _GatherRows.apply(rows_RD)  # pyright: ignore[reportReturnType]


class _GatherRows(torch.autograd.Function):
    """All processes' rows; the gradient of a row sums what all processes' losses say about it."""

    @staticmethod
    def forward(ctx: Any, rows_RD: torch.Tensor) -> torch.Tensor:
        ctx.rows = len(rows_RD)
        gathered = [torch.empty_like(rows_RD) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, rows_RD.contiguous())
        return torch.cat(gathered)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grad_outputs: torch.Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        grad_AD = grad_outputs[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad_AD)
        start = dist.get_rank() * ctx.rows
        return grad_AD[start : start + ctx.rows]
