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

from functools import cache

import torch
from torch import nn

from selfvitmil.pretrain.objectives import LossOutput, NetworkOutputs, Objective, at_least_float32, make_mlp
from selfvitmil.settings import PretrainSettings

POINTS = 17
"""Points at which characteristic functions are compared."""
LARGEST_T = 3.0
"""Last of these points; the first is 0."""


class LeJEPA(Objective):
    """Invariance and SIGReg."""

    joins = "head"
    directions_KA: torch.Tensor

    def __init__(self, settings: PretrainSettings):
        super().__init__(settings)
        # Drawn anew in every step, and so in no checkpoint.
        empty_KA = torch.zeros(settings.chosen("bottleneck"), settings.directions)
        self.register_buffer("directions_KA", empty_KA, persistent=False)

    def begin_step(self, step: int) -> None:
        """Draw the directions of a step, the same in all parts and processes."""
        dim, count = self.directions_KA.shape
        drawn_KA = random_directions(dim, count, self.settings.seed, step)
        if self.directions_KA.device.type == "cuda":
            drawn_KA = drawn_KA.pin_memory()
        self.directions_KA.copy_(drawn_KA, non_blocking=True)

    def make_head(self, dim: int) -> nn.Module:
        own = self.settings
        widths = [dim, *[own.head_width] * (own.head_layers - 1), own.chosen("bottleneck")]
        # Without running means, which would not be used: parts of a batch can then run side by side.
        return make_mlp(widths, lambda width: [nn.BatchNorm1d(width, track_running_stats=False), nn.ReLU()])

    def forward(self, outputs: NetworkOutputs) -> LossOutput:
        outputs_VBK, own = at_least_float32(outputs.student_VBK), self.settings
        with torch.autocast(outputs_VBK.device.type, enabled=False):
            invariance = invariance_loss(outputs_VBK)
            sigreg = sigreg_loss(outputs_VBK, self.directions_KA.to(outputs_VBK))
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
    """How far the outputs of each view are from a standard normal distribution, along these directions."""
    projected_VBA = outputs_VBK @ directions_KA
    points_T, normal_T, weights_T = quadrature(projected_VBA.device, projected_VBA.dtype)
    # All points at once on a GPU, which would wait for kernels; one by one on a CPU, which would wait for memory.
    at_once = POINTS if projected_VBA.device.type == "cuda" else 1
    total = torch.zeros_like(projected_VBA[0, 0, 0])
    for some in range(0, POINTS, at_once):
        part = slice(some, some + at_once)
        angles_TVBA = points_T[part, None, None, None] * projected_VBA
        real_TVA = angles_TVBA.cos().mean(dim=2) - normal_T[part, None, None]
        error_TVA = real_TVA.square() + angles_TVBA.sin().mean(dim=2).square()
        total = total + (error_TVA.mean(dim=(1, 2)) * weights_T[part]).sum()
    return total * outputs_VBK.shape[1]


@cache  # copied to the device once: a step that is being recorded cannot
def quadrature(device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Return the points, the normal distribution's characteristic function there, and the weights of the integral."""
    points_T = torch.linspace(0, LARGEST_T, POINTS, dtype=torch.float64)
    normal_T = torch.exp(-points_T.square() / 2)
    # Both halves of the axis are alike: inner points count twice, and so does the last one with half its weight.
    weights_T = 2 * normal_T * LARGEST_T / (POINTS - 1)
    weights_T[[0, -1]] /= 2
    return tuple(each.to(device, dtype) for each in (points_T, normal_T, weights_T))
