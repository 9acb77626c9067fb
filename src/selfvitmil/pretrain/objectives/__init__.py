"""Objectives of self-supervised learning: head, loss of a batch of views, metrics and state; one file per method.

`dino` predicts a teacher's distributions, `simdino` a teacher's directions, `lejepa` the mean of the views of a tile,
`simclr` which views belong together. The loop, the views, the networks and their average are the same for all.
An objective is a module: its buffers (DINO's centre) are saved in checkpoints. It never sees files or devices.

A batch is spread over processes, and in each of them over the parts of `accumulate`. The nearest neighbour of an
embedding (KoLeo), the shares that Sinkhorn-Knopp balances, the negatives of SimCLR: all are taken from the whole batch,
so that neither the number of processes nor that of the parts changes the loss. `JointBatch.join` gives a part the rows
of all others beside its own. Every part computes the loss of the whole batch and has its gradient with respect to its
own rows only. The losses of all n parts and processes are averaged afterwards, so those gradients are multiplied by n:
together they are the gradient of the whole batch. Parts that run side by side in threads wait for each other; parts
that run one after the other were computed once before, without gradient (`JointBatch.look_ahead`), which costs one more
forward pass of the views in question.

Axes in names: V views, B tiles of a part, D dimensions, K outputs of the head, R rows (views times tiles, grouped by
view).
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from selfvitmil.settings import PretrainSettings

NUM_GLOBAL = 2
"""Views that the teacher sees."""
RECENT_LINES = 10
"""Lines of metrics over which the alarms average."""


@dataclass(frozen=True)
class Part:
    """One part of a batch, with access to the rows of the others."""

    joint: JointBatch
    number: int = 0
    taught: tuple[torch.Tensor, torch.Tensor] | None = None
    """Outputs of the teacher for this part (`Learner.teach`), where they were computed before."""

    def join(self, own_VBD: torch.Tensor) -> torch.Tensor:
        """Return these rows of all tiles of the batch; see `JointBatch`."""
        return self.joint.join(own_VBD, self.number)


@dataclass(frozen=True)
class NetworkOutputs:
    """Outputs of student and teacher for one part of a batch."""

    student_VBK: torch.Tensor
    """Outputs of the student's head; of the tiles of the whole batch where the objective's `joins` is `head`."""
    embeddings_VBD: torch.Tensor
    """The student's embeddings of this part, large views first."""
    teacher_2BK: torch.Tensor | None
    """Outputs of the teacher's head for the two large views of this part, where the objective has a teacher."""
    part: Part
    teacher_temp: float | torch.Tensor


@dataclass
class LossOutput:
    """Loss of one part of a batch, with metrics."""

    loss: torch.Tensor
    """The mean over the tiles of the part, or the loss of the whole batch: averaged over parts and processes both are
    the loss of the whole batch."""
    metrics: Callable[[], dict[str, torch.Tensor]] = dict
    """Computes metrics by name; called for steps that are logged."""
    state: torch.Tensor | None = None
    """Passed to `after_step` after the optimizer's step."""
    embeddings_BD: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    """Of the first large view, by the network that is kept where it has seen it: for rank and spread."""


class Objective(nn.Module, ABC):
    """Base class of all objectives. The flags say what the loop has to provide."""

    has_average: bool = True
    """Whether a moving average of the student is kept; it becomes the encoder."""
    has_teacher: bool = False
    """Whether that average is a teacher: it sees the large views, and the student learns from its outputs."""
    joins: Literal["nothing", "embeddings", "outputs", "head"] = "nothing"
    """What is compared across the tiles of a batch: nothing, the embeddings of the large views, the head's outputs of
    the large views, or everything (`head`: the head itself sees the embeddings of all views of the whole batch)."""
    joins_teacher: bool = False
    """Whether the teacher's outputs of all tiles of a batch are compared."""
    remedy: str = "Use a lower --pretrain.lr or fewer steps"
    """What to change where the embeddings get worse from some step on."""

    def __init__(self, settings: PretrainSettings):
        super().__init__()
        self.settings = settings

    @abstractmethod
    def make_head(self, dim: int) -> nn.Module:
        """Return a new projection head for embeddings of this width."""

    def begin_step(self, step: int) -> None:
        """Draw what is random in a step, before its first part."""
        del step

    def is_settled(self, step: int) -> bool:
        """Whether from this step on every step does the same, so that it can be recorded."""
        del step
        return True

    @abstractmethod
    def forward(self, outputs: NetworkOutputs) -> LossOutput:
        """Return the loss of a part of a batch."""

    def after_step(self, states: Sequence[torch.Tensor]) -> None:
        """Update what has no gradient; `states` are those of the step's outcomes, one per part."""
        del states

    def before_update(self, head: nn.Module, step: int) -> None:
        """Change gradients of the head, before the optimizer's step."""
        del head, step

    def collapse_advice(self, lines: Sequence[Mapping[str, Any]]) -> str | None:
        """Return what went wrong and what to do, from the metrics since the warm-up; None for a healthy run.

        There are `RECENT_LINES` of them at least.
        """
        recent = lines[-RECENT_LINES:]
        rank = sum(line["feature_rank"] for line in recent) / len(recent)
        spread = sum(line["feature_std"] for line in recent) / len(recent)
        if rank < 1.5 or spread < 0.01:
            return f"collapse to one embedding: feature rank {rank:.2f}, spread {spread:.3f}. Lower the learning rate"
        return None


def at_least_float32(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in float32; float64 stays as it is."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def make_mlp(widths: Sequence[int], between: Callable[[int], list[nn.Module]]) -> nn.Sequential:
    """Return linear layers of these widths, each but the last followed by the modules of `between(width)`."""
    layers: list[nn.Module] = []
    for width_in, width_out in pairwise(widths[:-1]):
        layers += [nn.Linear(width_in, width_out), *between(width_out)]
    return nn.Sequential(*layers, nn.Linear(widths[-2], widths[-1]))


def make_objective(settings: PretrainSettings, out_dim: int, freeze_steps: int) -> Objective:
    """Return the objective of `settings.method`.

    `out_dim` and `freeze_steps` are what DINO's settings of these names resolve to for the run.
    """
    # Only the objective in use is imported.
    match settings.method:
        case "dino":
            from selfvitmil.pretrain.objectives.dino import DINO

            return DINO(settings, out_dim, freeze_steps)
        case "simdino":
            from selfvitmil.pretrain.objectives.simdino import SimDINO

            return SimDINO(settings)
        case "lejepa":
            from selfvitmil.pretrain.objectives.lejepa import LeJEPA

            return LeJEPA(settings)
        case "simclr":
            from selfvitmil.pretrain.objectives.simclr import SimCLR

            return SimCLR(settings)


# ---------------------------------------------------------------------------------------------------- the whole batch


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
