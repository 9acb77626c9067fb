"""LeJEPA (Balestriero and LeCun 2025, arXiv 2511.08544): views predict the mean of their tile, outputs stay Gaussian.

With z the head's outputs, the loss is (1 - w) * invariance + w * SIGReg:

* invariance: mean over views, tiles and dimensions of (z - mean of z over the views of the tile) squared;
* SIGReg (sketched isotropic Gaussian regularization): the outputs of a view, projected on a random direction, are
  compared with a standard normal distribution by their characteristic functions (the test of Epps and Pulley). For each
  direction: number of tiles * integral over t from -3 to 3 of exp(-t^2 / 2) * |mean of exp(i t x) - exp(-t^2 / 2)|^2,
  by the trapezoid rule at 17 points of the half from 0 to 3. The mean over directions (fresh ones every step) and
  views.

There is no teacher, and no balance to be found but w. A moving average of the student is kept as the encoder, which the
paper does not ask for. The head has batch norms, which see the whole batch, so that the result depends neither on
`accumulate` nor on the number of GPUs.

Axes in names: V views, B tiles, K outputs, A directions, T points.
"""

from __future__ import annotations

import torch
from torch import nn

from selfvitmil.pretrain.objectives import LossOutput, NetworkOutputs, Objective, at_least_float32, make_mlp

POINTS = 17
"""Points at which characteristic functions are compared."""
LARGEST_T = 3.0
"""Last of these points; the first is 0."""


class LeJEPA(Objective):
    """Invariance and SIGReg."""

    joins = "head"

    def make_head(self, dim: int) -> nn.Module:
        own = self.settings
        widths = [dim, *[own.head_width] * (own.head_layers - 1), own.chosen("bottleneck")]
        # Without running means, which would not be used: parts of a batch can then run side by side.
        return make_mlp(widths, lambda width: [nn.BatchNorm1d(width, track_running_stats=False), nn.ReLU()])

    def forward(self, outputs: NetworkOutputs) -> LossOutput:
        outputs_VBK, own = at_least_float32(outputs.student_VBK), self.settings
        directions_KA = random_directions(outputs_VBK.shape[-1], own.directions, own.seed, outputs.step).to(outputs_VBK)
        with torch.autocast(outputs_VBK.device.type, enabled=False):
            invariance, sigreg = invariance_loss(outputs_VBK), sigreg_loss(outputs_VBK, directions_KA)
        value = (1 - own.sigreg) * invariance + own.sigreg * sigreg
        return LossOutput(value, lambda: {"invariance": invariance.detach(), "sigreg": sigreg.detach()})


def random_directions(dim: int, count: int, seed: int, step: int) -> torch.Tensor:
    """(dim, count) directions of length one, the same in all parts and processes of a step."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    directions_KA = torch.randn(dim, count, generator=generator)
    return directions_KA / directions_KA.norm(dim=0)


def invariance_loss(outputs_VBK: torch.Tensor) -> torch.Tensor:
    """Mean squared difference from the mean of the tile's views, over views, tiles and outputs."""
    return (outputs_VBK - outputs_VBK.mean(dim=0)).square().mean()


def sigreg_loss(outputs_VBK: torch.Tensor, directions_KA: torch.Tensor) -> torch.Tensor:
    """How far the outputs of each view are from a standard normal distribution, along these directions.

    The sums over points are built one point at a time, which needs a seventeenth of the memory.
    """
    points_T = torch.linspace(0, LARGEST_T, POINTS).tolist()
    gap = LARGEST_T / (POINTS - 1)
    projected_VBA = outputs_VBK @ directions_KA
    total_VA = torch.zeros_like(projected_VBA[:, 0])
    for place, t in enumerate(points_T):
        normal = torch.exp(torch.tensor(-t * t / 2)).item()
        angles_VBA = projected_VBA * t
        error_VA = (angles_VBA.cos().mean(dim=1) - normal).square() + angles_VBA.sin().mean(dim=1).square()
        # Both halves of the axis are alike: inner points count twice, and so does the last one with half its weight.
        total_VA = total_VA + error_VA * normal * gap * (1 if place in (0, POINTS - 1) else 2)
    return total_VA.mean() * outputs_VBK.shape[1]
