"""DINO (Caron et al., ICCV 2021, arXiv 2104.14294): the student predicts the teacher's distribution of another view.

The teacher's outputs are kept from collapsing by a moving centre, or by balancing each batch with Sinkhorn and Knopp's
iteration (SwAV, arXiv 2006.09882; DINOv2, arXiv 2304.07193). Two regularizers may keep the embeddings of a batch apart:
KoLeo (nearest neighbours; Sablayrolles et al., arXiv 1806.03198) or KDE (all others, weighted by a kernel). The
formulas are in `pretrain.loss`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from selfvitmil.pretrain import loss as losses
from selfvitmil.pretrain.head import DinoHead
from selfvitmil.pretrain.objectives.contract import RECENT_LINES, Objective, Outcome, Seen
from selfvitmil.pretrain.optim import cancel_gradients


@dataclass(frozen=True)
class DinoNumbers:
    """The settings of the same names, and what they come to for a run."""

    out_dim: int
    head_width: int
    bottleneck: int
    head_layers: int
    norm_last_layer: bool
    freeze_steps: int
    student_temp: float
    centering: Literal["mean", "sinkhorn"]
    center_momentum: float
    koleo: float
    kde: float
    kde_concentration: float


class Dino(Objective):
    """Cross-entropy between views, with its centre."""

    has_teacher = True
    remedy = "Use --pretrain.method lejepa or --pretrain.centering sinkhorn, a lower --pretrain.lr or fewer steps"
    center_K: torch.Tensor

    def __init__(self, numbers: DinoNumbers):
        super().__init__()
        self.numbers = numbers
        self.joins_teacher = numbers.centering == "sinkhorn"
        self.joins = "embeddings" if numbers.koleo > 0 or numbers.kde > 0 else "nothing"
        self.register_buffer("center_K", torch.zeros(numbers.out_dim))

    def make_head(self, dim: int) -> nn.Module:
        own = self.numbers
        return DinoHead(
            dim,
            own.out_dim,
            own.head_width,
            own.bottleneck,
            own.head_layers,
            norm_last_layer=own.norm_last_layer,
        )

    def forward(self, seen: Seen) -> Outcome:
        own, part = self.numbers, seen.part
        assert seen.teacher_2BK is not None
        student_RK, teacher_RK = seen.student_VBK.flatten(0, 1), seen.teacher_2BK.flatten(0, 1)
        if own.centering == "sinkhorn":
            all_RK, rows = part.joint.join_teacher(teacher_RK, part.number)
            targets_RK = losses.balanced_probabilities(all_RK, seen.teacher_temp, alone=part.joint.is_alone)[rows]
        else:
            targets_RK = losses.teacher_probabilities(teacher_RK, self.center_K, seen.teacher_temp)
        value = losses.crossed_cross_entropy(student_RK, targets_RK, own.student_temp, len(seen.student_VBK))
        if self.joins == "embeddings":
            large_2BD = part.join(seen.embeddings_VBD[: losses.NUM_GLOBAL])
            if own.koleo > 0:
                value = value + own.koleo * torch.stack([losses.koleo_loss(view_BD) for view_BD in large_2BD]).sum()
            if own.kde > 0:
                each = [losses.kde_loss(view_BD, own.kde_concentration) for view_BD in large_2BD]
                value = value + own.kde * torch.stack(each).sum()
        return Outcome(
            value,
            lambda: {
                "teacher_entropy": losses.teacher_entropy(targets_RK),
                "kl": losses.teacher_student_kl(student_RK, targets_RK, own.student_temp),
            },
            state=teacher_RK.mean(dim=0, dtype=torch.float32),
        )

    def after_step(self, states: Sequence[torch.Tensor]) -> None:
        rows_RK = torch.stack(list(states))
        self.center_K.copy_(losses.update_center(self.center_K, rows_RK, self.numbers.center_momentum))

    def before_update(self, head: nn.Module, step: int) -> None:
        """Leave the head's last layer as it is at the start of the run."""
        if step < self.numbers.freeze_steps:
            assert isinstance(head, DinoHead)
            cancel_gradients(head.last_layer)

    def collapse_advice(self, lines: Sequence[Mapping[str, Any]]) -> str | None:
        entropies, kls, ranks = ([line[key] for line in lines] for key in ("teacher_entropy", "kl", "feature_rank"))
        entropy, kl = (sum(each[-RECENT_LINES:]) / RECENT_LINES for each in (entropies, kls))
        reached = losses.collapse_reason(entropy, kl, self.numbers.out_dim)
        if reached:
            return reached
        drift = losses.drift_reason(entropies, ranks, self.numbers.out_dim, RECENT_LINES)
        return f"{drift}. {self.remedy}" if drift else None
