"""DINO (Caron et al., ICCV 2021, arXiv 2104.14294): the student predicts the teacher's distribution of another view.

The teacher's outputs are kept from collapsing by a moving centre, or by balancing each batch with Sinkhorn and Knopp's
iteration (SwAV, arXiv 2006.09882; DINOv2, arXiv 2304.07193). Two regularizers may keep the embeddings of a batch apart:
KoLeo (nearest neighbours; Sablayrolles et al., arXiv 1806.03198) or KDE (all others, weighted by a kernel). The
formulas are in `pretrain.loss`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from selfvitmil.pretrain import loss as losses
from selfvitmil.pretrain.objectives import (
    NUM_GLOBAL,
    RECENT_LINES,
    LossOutput,
    NetworkOutputs,
    Objective,
    at_least_float32,
    make_mlp,
)
from selfvitmil.pretrain.optim import cancel_gradients
from selfvitmil.settings import PretrainSettings


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


def dino_mlp(dim: int, out_dim: int, hidden_dim: int, num_layers: int) -> nn.Sequential:
    mlp = make_mlp([dim, *[hidden_dim] * (num_layers - 1), out_dim], lambda width: [nn.GELU()])
    for layer in mlp:
        if isinstance(layer, nn.Linear):
            nn.init.trunc_normal_(layer.weight, std=0.02)
            nn.init.zeros_(layer.bias)
    return mlp


class DINOHead(nn.Module):
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
        self.mlp = dino_mlp(dim, bottleneck_dim, hidden_dim, num_layers)
        self.last_layer = WeightNormLinear(bottleneck_dim, out_dim, train_lengths=not norm_last_layer)

    def forward(self, embeddings_BD: torch.Tensor) -> torch.Tensor:
        bottleneck_BD = at_least_float32(self.mlp(embeddings_BD))  # a square in half precision may overflow
        bottleneck_BD = functional.normalize(bottleneck_BD, dim=-1)
        # Divided by a temperature of 0.04, cosines in bfloat16 would be off by up to 0.1.
        with torch.autocast(embeddings_BD.device.type, enabled=False):
            return self.last_layer(bottleneck_BD)


class DINO(Objective):
    """Cross-entropy between the distributions of different views, with a moving centre or Sinkhorn-Knopp."""

    has_teacher = True
    remedy = "Use --pretrain.method lejepa or --pretrain.centering sinkhorn, a lower --pretrain.lr or fewer steps"
    center_K: torch.Tensor

    def __init__(self, settings: PretrainSettings, out_dim: int, freeze_steps: int):
        """`freeze_steps` are the first steps with a fixed last layer."""
        super().__init__(settings)
        self.out_dim, self.freeze_steps = out_dim, freeze_steps
        self.joins_teacher = settings.centering == "sinkhorn"
        self.joins = "embeddings" if settings.koleo > 0 or settings.kde > 0 else "nothing"
        self.register_buffer("center_K", torch.zeros(out_dim))

    def make_head(self, dim: int) -> nn.Module:
        own = self.settings
        return DINOHead(
            dim, self.out_dim, own.head_width, own.chosen("bottleneck"), own.head_layers, own.norm_last_layer
        )

    def forward(self, outputs: NetworkOutputs) -> LossOutput:
        part, settings = outputs.part, self.settings
        assert outputs.teacher_2BK is not None
        student_RK, teacher_RK = outputs.student_VBK.flatten(0, 1), outputs.teacher_2BK.flatten(0, 1)
        if self.joins_teacher:
            all_RK, rows = part.joint.join_teacher(teacher_RK, part.number)
            targets_RK = losses.sinkhorn_knopp(all_RK, outputs.teacher_temp, alone=part.joint.is_alone)[rows]
        else:
            targets_RK = losses.teacher_probabilities(teacher_RK, self.center_K, outputs.teacher_temp)
        value = losses.crossed_cross_entropy(student_RK, targets_RK, settings.student_temp, len(outputs.student_VBK))
        if self.joins == "embeddings":
            large_2BD = part.join(outputs.embeddings_VBD[:NUM_GLOBAL])
            if settings.koleo > 0:
                each = [losses.koleo_loss(view_BD) for view_BD in large_2BD]
                value = value + settings.koleo * torch.stack(each).sum()
            if settings.kde > 0:
                each = [losses.kde_loss(view_BD, settings.kde_concentration) for view_BD in large_2BD]
                value = value + settings.kde * torch.stack(each).sum()
        return LossOutput(
            value,
            lambda: {
                "teacher_entropy": losses.teacher_entropy(targets_RK),
                "kl": losses.teacher_student_kl(student_RK, targets_RK, settings.student_temp),
            },
            state=teacher_RK.mean(dim=0, dtype=torch.float32),
        )

    def after_step(self, states: Sequence[torch.Tensor]) -> None:
        rows_RK = torch.stack(list(states))
        self.center_K.copy_(losses.update_center(self.center_K, rows_RK, self.settings.center_momentum))

    def before_update(self, head: nn.Module, step: int) -> None:
        """Leave the head's last layer as it is at the start of the run."""
        if step < self.freeze_steps:
            assert isinstance(head, DINOHead)
            cancel_gradients(head.last_layer)

    def is_settled(self, step: int) -> bool:
        return step >= self.freeze_steps

    def collapse_advice(self, lines: Sequence[Mapping[str, Any]]) -> str | None:
        entropies, kls, ranks = ([line[key] for line in lines] for key in ("teacher_entropy", "kl", "feature_rank"))
        entropy, kl = (sum(each[-RECENT_LINES:]) / RECENT_LINES for each in (entropies, kls))
        reached = losses.collapse_reason(entropy, kl, self.out_dim)
        if reached:
            return reached
        drift = losses.drift_reason(entropies, ranks, self.out_dim, RECENT_LINES)
        return f"{drift}. {self.remedy}" if drift else None
