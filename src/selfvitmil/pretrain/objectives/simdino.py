"""SimDINO (Wu et al., ICML 2025, arXiv 2502.10385): DINO without prototypes, centring and temperatures.

The student's output of a view points where the teacher's output of another, large view of the same tile points; that
all outputs become the same is prevented by their coding rate, which is large when they spread over many directions:

    loss = -mean over (large view g of the teacher, view v != g of the student) of cos(student_v, teacher_g)
           - gamma * mean over the student's large views of R(Z)
    R(Z) = 1/2 logdet(I + p / (n * eps) * Z^T Z),   gamma = (p + n) / (p * n)

with Z the n x p outputs of a view, of length one, n the tiles of the whole batch (of all processes) and p their width.

Axes in names: V views, B tiles, K outputs.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from selfvitmil.pretrain.objectives import NUM_GLOBAL, LossOutput, NetworkOutputs, Objective, at_least_float32
from selfvitmil.pretrain.objectives.dino import dino_mlp


class SimDINOHead(nn.Module):
    """The head of SimDINO: DINO's MLP with outputs of length one, and no last layer."""

    def __init__(self, dim: int, out_dim: int = 256, hidden_dim: int = 2048, num_layers: int = 3):
        super().__init__()
        self.mlp = dino_mlp(dim, out_dim, hidden_dim, num_layers)

    def forward(self, embeddings_BD: torch.Tensor) -> torch.Tensor:
        return functional.normalize(at_least_float32(self.mlp(embeddings_BD)), dim=-1)


class SimDINO(Objective):
    """Agreement with the teacher, and a coding rate."""

    has_teacher = True
    joins = "outputs"

    def make_head(self, dim: int) -> nn.Module:
        own = self.settings
        return SimDINOHead(dim, own.chosen("bottleneck"), own.head_width, own.head_layers)

    def forward(self, outputs: NetworkOutputs) -> LossOutput:
        assert outputs.teacher_2BK is not None
        student_VBK, teacher_2BK = (
            at_least_float32(rows) for rows in (outputs.student_VBK, outputs.teacher_2BK.detach())
        )
        with torch.autocast(student_VBK.device.type, enabled=False):
            agreement = crossed_cosine(student_VBK, teacher_2BK)
            large_2BK = outputs.part.join(student_VBK[:NUM_GLOBAL])
            rate = torch.stack([coding_rate(view_BK, self.settings.coding_eps) for view_BK in large_2BK]).mean()
        tiles, width = large_2BK.shape[1:]
        value = -agreement - (width + tiles) / (width * tiles) * rate
        return LossOutput(value, lambda: {"agreement": agreement.detach(), "coding_rate": rate.detach()})


def crossed_cosine(student_VBK: torch.Tensor, teacher_2BK: torch.Tensor) -> torch.Tensor:
    """Mean cosine over tiles and all pairs of a large view of the teacher and another view of the student."""
    student_VBK, teacher_2BK = (functional.normalize(rows, dim=-1) for rows in (student_VBK, teacher_2BK))
    cosines = [
        torch.linalg.vecdot(student_VBK[view], teacher_2BK[large]).mean()
        for large in range(NUM_GLOBAL)
        for view in range(len(student_VBK))
        if view != large
    ]
    return torch.stack(cosines).mean()


def coding_rate(outputs_BK: torch.Tensor, eps: float) -> torch.Tensor:
    """Half the log-determinant of I + p / (n * eps) * Z^T Z, for n outputs of width p brought to length one."""
    directions_BK = functional.normalize(outputs_BK, dim=-1)
    tiles, width = outputs_BK.shape
    gram_KK = directions_BK.T @ directions_BK
    eye_KK = torch.eye(width, dtype=gram_KK.dtype, device=gram_KK.device)
    return 0.5 * torch.logdet(eye_KK + width / (tiles * eps) * gram_KK)
