"""Projection heads of DINO, SimDINO and others. DINO's: embedding to the logits that student and teacher compare.

An MLP down to a bottleneck, its output scaled to length one, then a linear layer without bias whose rows have a length
of their own (weight normalization; fixed at one by default). So a logit is a cosine. Weights carry the names of DINO's
checkpoints, `mlp.*` and `last_layer.weight_g`, `last_layer.weight_v`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional

from selfvitmil.pretrain.loss import at_least_float32


class WeightNormLinear(nn.Module):
    """A linear layer without bias whose rows are directions `weight_v` with lengths `weight_g`."""

    def __init__(self, dim: int, out_dim: int, train_lengths: bool):
        super().__init__()
        self.weight_g = nn.Parameter(torch.ones(out_dim, 1), requires_grad=train_lengths)
        self.weight_v = nn.Parameter(torch.empty(out_dim, dim).uniform_(-(dim**-0.5), dim**-0.5))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return functional.linear(rows.to(self.weight_v.dtype), self.weight())

    def weight(self) -> torch.Tensor:
        """The effective matrix (out_dim, dim). Scaling it is cheaper than scaling the logits, which are more."""
        return self.weight_v * (self.weight_g / torch.linalg.vector_norm(self.weight_v, dim=1, keepdim=True))


def make_mlp(widths: Sequence[int], between: Callable[[int], list[nn.Module]]) -> nn.Sequential:
    """Linear layers of these widths, with what `between` gives for a width after each but the last."""
    layers: list[nn.Module] = []
    for width_in, width_out in pairwise(widths[:-1]):
        layers += [nn.Linear(width_in, width_out), *between(width_out)]
    return nn.Sequential(*layers, nn.Linear(widths[-2], widths[-1]))


def _dino_mlp(dim: int, out_dim: int, hidden_dim: int, num_layers: int) -> nn.Sequential:
    mlp = make_mlp([dim, *[hidden_dim] * (num_layers - 1), out_dim], lambda width: [nn.GELU()])
    for layer in mlp:
        if isinstance(layer, nn.Linear):
            nn.init.trunc_normal_(layer.weight, std=0.02)
            nn.init.zeros_(layer.bias)
    return mlp


class DirectionHead(nn.Module):
    """The head of SimDINO: DINO's MLP with outputs of length one, and no last layer."""

    def __init__(self, dim: int, out_dim: int = 256, hidden_dim: int = 2048, num_layers: int = 3):
        super().__init__()
        self.mlp = _dino_mlp(dim, out_dim, hidden_dim, num_layers)

    def forward(self, embeddings_BD: torch.Tensor) -> torch.Tensor:
        return functional.normalize(at_least_float32(self.mlp(embeddings_BD)), dim=-1)


class DinoHead(nn.Module):
    """MLP of `num_layers` with GELU, then cosines to `out_dim` directions.

    `norm_last_layer` fixes the lengths of the last layer's rows at one, which steadies large models.
    """

    def __init__(
        self,
        dim: int,
        out_dim: int = 65536,
        hidden_dim: int = 2048,
        bottleneck_dim: int = 256,
        num_layers: int = 3,
        norm_last_layer: bool = True,
    ):
        super().__init__()
        self.mlp = _dino_mlp(dim, bottleneck_dim, hidden_dim, num_layers)
        self.last_layer = WeightNormLinear(bottleneck_dim, out_dim, train_lengths=not norm_last_layer)

    def forward(self, embeddings_BD: torch.Tensor) -> torch.Tensor:
        bottleneck_BD = at_least_float32(self.mlp(embeddings_BD))  # a square in half precision may overflow
        bottleneck_BD = functional.normalize(bottleneck_BD, dim=-1)
        # Divided by a temperature of 0.04, cosines in bfloat16 would be off by up to 0.1.
        with torch.autocast(embeddings_BD.device.type, enabled=False):
            return self.last_layer(bottleneck_BD)
