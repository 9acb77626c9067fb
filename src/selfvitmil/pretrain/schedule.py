"""Which learning rate, weight decay, momentum and temperature hold at which step, and how they fit batch and data size.

Schedules are functions of an integer step without state, so a resumed run needs none of theirs. They equal DINO's:
linear warm-up whose last step has the full value, then half a cosine. `ConstantSchedule`
stays at the full value instead, so that a longer run passes through the same states as a shorter one. The rules below
propose hyperparameters for a batch size, a number of tiles and a number of steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from selfvitmil.runtime.training import CosineSchedule, suggested_warmup_steps
from selfvitmil.settings import PretrainSettings


@dataclass(frozen=True)
class ConstantSchedule:
    """`base` throughout, after a linear warm-up from `warmup_start` whose last step already has it.

    With `decay_steps`, the last ones of `total_steps` fall linearly towards `final`, which later steps have. No other
    step depends on `total_steps`.
    """

    base: float
    total_steps: int
    warmup_steps: int = 0
    warmup_start: float = 0.0
    decay_steps: int = 0
    final: float = 0.0

    def value_at(self, step: int) -> float:
        """Value for step 0, 1, 2, ..."""
        if step < self.warmup_steps:
            return self.warmup_start + (self.base - self.warmup_start) * step / max(self.warmup_steps - 1, 1)
        decayed = step - (self.total_steps - self.decay_steps)
        if self.decay_steps == 0 or decayed <= 0:
            return self.base
        return self.base + (self.final - self.base) * min(decayed / self.decay_steps, 1.0)


@dataclass(frozen=True)
class TeacherTemperature:
    """The teacher's softmax temperature: `warmup_temp` at first, `temp` from epoch `warmup_epochs` on.

    `linear` climbs from epoch to epoch, and the last epoch of the warm-up already has `temp` (DINO's code); `step`
    keeps `warmup_temp` until the warm-up is over (the words of Self-ViT-MIL).
    """

    warmup_temp: float
    temp: float
    warmup_epochs: int
    steps_per_epoch: int
    ramp: Literal["linear", "step"] = "linear"

    def value_at(self, step: int) -> float:
        """Value for step 0, 1, 2, ...; it changes only from one epoch to the next."""
        epoch = step // self.steps_per_epoch
        if epoch >= self.warmup_epochs:
            return self.temp
        if self.ramp == "step":
            return self.warmup_temp
        return self.warmup_temp + (self.temp - self.warmup_temp) * epoch / max(self.warmup_epochs - 1, 1)


# ---- rules for batch and data size -------------------------------------------------------------------------------

CONSTANT_WARMUP_STEPS = 150
"""Steps of warm-up of a constant schedule, whatever the length of the run."""
CONSTANT_MOMENTUM = 0.99
"""Momentum of the average under a constant schedule: a half-life of 69 steps, whatever the length of the run."""


def scaled_learning_rate(base: float, batch: int) -> float:
    """Learning rate for `batch` tiles a step (over all processes), from one that is meant for 256."""
    return base * batch / 256


def suggested_momentum(batch: int, total_steps: int) -> float:
    """Momentum of the teacher at the start of a run of `total_steps` with `batch` tiles each.

    DINO names two points, 0.996 for a batch of 1024 and 0.9995 for one of 256: 1 - momentum goes with batch ** 1.5. So
    small batches, whose steps are noisier, are averaged over more tiles (177,000 and 355,000 to the half-life). But a
    teacher that is half made of its random start teaches nothing: the half-life must not exceed a tenth of the run.
    """
    by_batch = 0.004 * (batch / 1024) ** 1.5
    by_length = 1 - 0.5 ** (1 / max(total_steps / 10, 1))
    return 1 - min(max(by_batch, by_length), 0.01)


def suggested_out_dim(num_tiles: int) -> int:
    """Outputs of the head for `num_tiles` different tiles: a power of two from 1,024 to 65,536.

    DINO's 65,536 outputs met 1.28 million images, 20 for each. Far fewer tiles than that leave most outputs without
    any, the teacher stays near uniform and the loss near log K, which users report as "flat".
    """
    return 2 ** min(max(round(math.log2(max(num_tiles, 1) / 20)), 10), 16)


def suggested_constant_warmup_steps(total_steps: int) -> int:
    """Steps of warm-up of a constant schedule: as many for every run, but at most half of a very short one."""
    return min(CONSTANT_WARMUP_STEPS, total_steps // 2)


def suggested_freeze_steps(total_steps: int) -> int:
    """Steps at the start during which the head's last layer stays as it is: a hundredth of the run, DINO's first epoch.

    Until the embeddings mean something, moving the outputs towards them is how collapse begins.
    """
    return math.ceil(total_steps / 100)


# ---------------------------------------------------------------------------------------------------- of a run


@dataclass(frozen=True)
class Hyperparameters:
    """The settings resolved for a number of tiles and steps: every None is filled in."""

    total_steps: int
    steps_per_epoch: int
    warmup_steps: int
    freeze_steps: int
    optimizer: str
    lr: float
    """Scaled to the batch, where it is to be."""
    min_lr: float
    warmup_lr: float
    weight_decay: float
    weight_decay_end: float
    clip_grad: float
    momentum: float
    out_dim: int

    def schedules(self, settings: PretrainSettings) -> Schedules:
        """Return the schedules of this run."""
        total = self.total_steps
        # Without a length in epochs, the temperature climbs from step to step.
        in_epochs = settings.warmup_temp_epochs is not None
        teacher_temp = TeacherTemperature(
            settings.warmup_teacher_temp,
            settings.teacher_temp,
            settings.warmup_temp_epochs if settings.warmup_temp_epochs is not None else self.warmup_steps,
            self.steps_per_epoch if in_epochs else 1,
            settings.temp_ramp,
        )
        if settings.chosen("schedule") == "constant":
            decay_steps = round(settings.decay_share * total)
            return Schedules(
                lr=ConstantSchedule(self.lr, total, self.warmup_steps, self.warmup_lr, decay_steps, self.min_lr),
                weight_decay=ConstantSchedule(self.weight_decay, total),
                momentum=ConstantSchedule(self.momentum, total),
                teacher_temp=teacher_temp,
            )
        return Schedules(
            lr=CosineSchedule(self.lr, self.min_lr, total, self.warmup_steps, self.warmup_lr),
            weight_decay=CosineSchedule(self.weight_decay, self.weight_decay_end, total),
            momentum=CosineSchedule(self.momentum, 1.0, total),
            teacher_temp=teacher_temp,
        )


@dataclass(frozen=True)
class Schedules:
    """Values that change from step to step."""

    lr: CosineSchedule | ConstantSchedule
    weight_decay: CosineSchedule | ConstantSchedule
    momentum: CosineSchedule | ConstantSchedule
    teacher_temp: TeacherTemperature

    def at(self, step: int) -> dict[str, float]:
        """Return all values at one step."""
        return {name: getattr(self, name).value_at(step) for name in ("lr", "weight_decay", "momentum", "teacher_temp")}


def resolve_hyperparameters(settings: PretrainSettings, num_tiles: int, steps_per_epoch: int) -> Hyperparameters:
    """Fill in what the settings leave to the size of the run."""
    total = settings.steps or settings.epochs * steps_per_epoch

    def steps(epochs: int | None, suggested: int) -> int:
        return suggested if epochs is None else min(epochs * steps_per_epoch, total)

    if settings.chosen("schedule") == "constant":  # nothing of it may depend on the length of the run
        warmup, momentum = suggested_constant_warmup_steps(total), CONSTANT_MOMENTUM
        freeze = math.ceil(warmup / 10)
    else:
        warmup, momentum = suggested_warmup_steps(total), suggested_momentum(settings.batch, total)
        freeze = suggested_freeze_steps(total)
    lr = settings.chosen("lr")
    as_they_are = ("optimizer", "min_lr", "warmup_lr", "weight_decay", "weight_decay_end", "clip_grad")
    return Hyperparameters(
        total_steps=total,
        steps_per_epoch=steps_per_epoch,
        warmup_steps=settings.warmup_steps or steps(settings.warmup_epochs, warmup),
        freeze_steps=steps(settings.freeze_last_layer_epochs, freeze),
        lr=scaled_learning_rate(lr, settings.batch) if settings.chosen("scale_lr") else lr,
        **{name: settings.chosen(name) for name in as_they_are},
        momentum=momentum if settings.momentum is None else settings.momentum,
        out_dim=settings.out_dim or suggested_out_dim(num_tiles),
    )
