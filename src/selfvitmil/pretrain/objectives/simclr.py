"""SimCLR (Chen et al., ICML 2020, arXiv 2002.05709): the contrastive loss NT-Xent and its projection head.

Every tile has two views. A view's projection must point to that of the other view of the same tile, and away from all
other projections of the batch (of all processes and parts, see `JointBatch`). DSMIL's own features come from it.

Axes in names: D dimensions, R rows (two views times tiles, grouped by view).
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from selfvitmil.errors import ConfigError
from selfvitmil.pretrain.objectives import LossOutput, NetworkOutputs, Objective, at_least_float32


class SimCLRHead(nn.Sequential):
    """Linear, ReLU, linear: as wide as the embedding, then `out_dim`."""

    def __init__(self, dim: int, out_dim: int = 256):
        super().__init__(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, out_dim))


class SimCLR(Objective):
    """NT-Xent between the two views of each tile of the whole batch. The student itself is kept."""

    has_average = False
    joins = "head"

    def make_head(self, dim: int) -> nn.Module:
        return SimCLRHead(dim, self.settings.chosen("bottleneck"))

    def forward(self, outputs: NetworkOutputs) -> LossOutput:
        return LossOutput(nt_xent_loss(outputs.student_VBK.flatten(0, 1), self.settings.temperature))


def nt_xent_loss(projections_RD: torch.Tensor, temperature: float = 0.5) -> torch.Tensor:
    """Mean over rows of -log(exp(cos(row, partner) / t) / sum over all other rows of exp(cos(row, other) / t)).

    Rows are grouped by view: all tiles of the first view, then the same tiles of the second.
    """
    rows = len(projections_RD)
    if rows % 2 or rows < 4:
        raise ConfigError(
            f"{rows} projections cannot be contrasted",
            "the loss takes two views of at least two tiles",
            "Use a larger batch",
            code="batch-too-small",
        )
    with torch.autocast(projections_RD.device.type, enabled=False):
        directions_RD = functional.normalize(at_least_float32(projections_RD), dim=-1)
        logits_RR = (directions_RD @ directions_RD.T / temperature).fill_diagonal_(-torch.inf)
        return functional.cross_entropy(logits_RR, torch.arange(rows, device=logits_RR.device).roll(rows // 2))
