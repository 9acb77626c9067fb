"""What learns: networks, their objective and their schedules, put together from the settings.

A learner takes views and gives a loss; after the optimizer's step it moves what does not learn by gradients (average,
centre). It knows nothing of tiles, files or processes. `Numbers` are the settings with every "none" filled in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from selfvitmil.data.views import ViewRecipe
from selfvitmil.encoder import Encoder, build_backbone, build_encoder, load_encoder
from selfvitmil.encoder.network import has_class_token
from selfvitmil.errors import EncoderError
from selfvitmil.pretrain import loss as losses
from selfvitmil.pretrain import schedule
from selfvitmil.pretrain.batch_norm import batch_norms_of
from selfvitmil.pretrain.joint import JointBatch
from selfvitmil.pretrain.lora import add_adapters, check_lora, share_frozen
from selfvitmil.pretrain.objectives.choose import make_objective
from selfvitmil.pretrain.objectives.contract import Outcome, Part, Seen
from selfvitmil.pretrain.optim import update_teacher
from selfvitmil.pretrain.schedule import ConstantSchedule, TeacherTemperature
from selfvitmil.pretrain.tokens import class_token, first_token, has_shortcut
from selfvitmil.runtime.device import seeded
from selfvitmil.runtime.training import CosineSchedule, suggested_warmup_steps
from selfvitmil.settings import PretrainSettings

DEFAULT_ARCHITECTURE = dict.fromkeys(("dino", "simdino", "lejepa"), "vit_small_patch16_224") | {
    "simclr": "resnet18_instancenorm"
}


# ---------------------------------------------------------------------------------------------------- numbers


@dataclass(frozen=True)
class Numbers:
    """What the settings come to for this many tiles and steps."""

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
        """The course of every number that changes during the run."""
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
    """The numbers that change from step to step."""

    lr: CosineSchedule | ConstantSchedule
    weight_decay: CosineSchedule | ConstantSchedule
    momentum: CosineSchedule | ConstantSchedule
    teacher_temp: TeacherTemperature

    def at(self, step: int) -> dict[str, float]:
        """All of them at one step."""
        return {name: getattr(self, name).value_at(step) for name in ("lr", "weight_decay", "momentum", "teacher_temp")}


def settle_numbers(settings: PretrainSettings, num_tiles: int, steps_per_epoch: int) -> Numbers:
    """Fill in what the settings leave to the size of the run."""
    total = settings.steps or settings.epochs * steps_per_epoch

    def steps(epochs: int | None, suggested: int) -> int:
        return suggested if epochs is None else min(epochs * steps_per_epoch, total)

    if settings.chosen("schedule") == "constant":  # nothing of it may depend on the length of the run
        warmup, momentum = schedule.suggested_constant_warmup_steps(total), schedule.CONSTANT_MOMENTUM
        freeze = math.ceil(warmup / 10)
    else:
        warmup, momentum = suggested_warmup_steps(total), schedule.suggested_momentum(settings.batch, total)
        freeze = schedule.suggested_freeze_steps(total)
    lr = settings.chosen("lr")
    as_they_are = ("optimizer", "min_lr", "warmup_lr", "weight_decay", "weight_decay_end", "clip_grad")
    return Numbers(
        total_steps=total,
        steps_per_epoch=steps_per_epoch,
        warmup_steps=settings.warmup_steps or steps(settings.warmup_epochs, warmup),
        freeze_steps=steps(settings.freeze_last_layer_epochs, freeze),
        lr=schedule.scaled_learning_rate(lr, settings.batch) if settings.chosen("scale_lr") else lr,
        **{name: settings.chosen(name) for name in as_they_are},
        momentum=momentum if settings.momentum is None else settings.momentum,
        out_dim=settings.out_dim or schedule.suggested_out_dim(num_tiles),
    )


# ---------------------------------------------------------------------------------------------------- networks


def start_encoder(settings: PretrainSettings, tile_px: int, seed: int) -> Encoder:
    """The encoder that training starts from: random weights, or those of `init`."""
    architecture = settings.architecture or DEFAULT_ARCHITECTURE[settings.method]
    names = {"width": "embed_dim", "depth": "depth", "heads": "num_heads", "patch_px": "patch_size"}
    args = {theirs: getattr(settings, ours) for ours, theirs in names.items() if getattr(settings, ours) is not None}
    if settings.init == "scratch":
        with seeded(seed):
            layout: dict[str, Any] = {"layout": "cls+patchmean"} if args.get("depth", 4) < 4 else {}
            return build_encoder(architecture, img_size=settings.global_px or tile_px, model_args=args, **layout)
    encoder = _for_any_size(load_encoder(settings.init))
    told = encoder.config
    wanted = settings.architecture
    if wanted is not None and wanted.split(".")[0] != told.architecture:
        raise EncoderError(
            f"{settings.init.rstrip('/').split('/')[-1]}: its network is {told.architecture}, not {wanted}",
            "weights of one network do not fit another",
            "Leave pretrain.architecture out, or start from other weights",
        )
    shape = _shape_of(encoder.backbone)
    differing = [ours for ours in names if getattr(settings, ours) not in (None, shape.get(ours))]
    if differing:
        raise EncoderError(
            f"{settings.init.rstrip('/').split('/')[-1]}: has another {differing[0]} than pretrain.{differing[0]}",
            "weights of one network do not fit another",
            f"Leave pretrain.{differing[0]} out, or start from other weights",
        )
    if settings.lora:
        check_lora(encoder.backbone, settings.lora)
    return encoder


def _for_any_size(encoder: Encoder) -> Encoder:
    """The same encoder for images of any size: views are smaller than tiles, and some ViTs refuse all but their own."""
    config = encoder.config
    if not has_class_token(encoder.backbone) or getattr(encoder.backbone, "dynamic_img_size", True):
        return encoder
    args = {**config.model_args, "dynamic_img_size": True}
    backbone = build_backbone(config.architecture, args)
    backbone.load_state_dict(encoder.backbone.state_dict())
    return Encoder(backbone, config.model_copy(update={"model_args": args}), encoder.warnings).eval()


def _shape_of(backbone: Any) -> dict[str, int | None]:
    """What the settings of the same names say of a ViT; nothing for other networks."""
    if not has_class_token(backbone):
        return {}
    heads = backbone.blocks[0].attn.num_heads
    depth = len(backbone.blocks)
    return {"width": backbone.embed_dim, "depth": depth, "heads": heads, "patch_px": patch_px_of(backbone)}


def patch_px_of(backbone: Any) -> int | None:
    """Edge of a ViT's patches; None for other networks."""
    return backbone.patch_embed.patch_size[0] if has_class_token(backbone) else None


def width_of(backbone: Any) -> int:
    """Length of the vector that the network itself gives for an image."""
    return backbone.num_features if has_class_token(backbone) else backbone.head_hidden_size


def embedding_of(backbone: nn.Module) -> Callable[[nn.Module, torch.Tensor], torch.Tensor]:
    """What turns images into the vectors that training compares: a ViT's class token, whatever its own pooling is."""
    if has_shortcut(backbone):
        return class_token
    return first_token if has_class_token(backbone) else _call


def _call(backbone: nn.Module, images: torch.Tensor) -> torch.Tensor:
    return backbone(images)


class Branch(nn.Module):
    """A network and its head: views in, logits (or projections) and embeddings out, rows grouped by view."""

    def __init__(self, backbone: nn.Module, head: nn.Module):
        super().__init__()
        self.backbone = backbone
        self.head = head
        self.embed = embedding_of(backbone)

    def forward(
        self, views: Sequence[torch.Tensor], join: Callable[[torch.Tensor], torch.Tensor] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """With `join`, the head sees the embeddings (V, tiles, D) of the whole batch instead of those of the views."""
        # Views of one size go through the network together: with DINO that makes two passes.
        embeddings_RD = torch.cat([self.embed(self.backbone, view_VB3SS.flatten(0, 1)) for view_VB3SS in views])
        if join is None:
            return self.head(embeddings_RD), embeddings_RD
        embeddings_VBD = embeddings_RD.unflatten(0, (-1, views[0].shape[1]))
        return self.head(join(embeddings_VBD).flatten(0, 1)), embeddings_RD


class Learner(nn.Module):
    """Student, objective, and the student's moving average, which is a teacher where the objective wants one."""

    def __init__(self, encoder: Encoder, settings: PretrainSettings, numbers: Numbers, seed: int):
        super().__init__()
        self.objective = make_objective(settings, numbers.out_dim, numbers.freeze_steps)
        average, config, dim = self.objective.has_average, encoder.config, width_of(encoder.backbone)
        drop = {"drop_path_rate": settings.drop_path} if has_class_token(encoder.backbone) else {}
        with seeded(seed + 1):
            own = build_backbone(config.architecture, {**config.model_args, **drop}) if average else encoder.backbone
            own.load_state_dict(encoder.backbone.state_dict())
            self.student = Branch(own, self.objective.make_head(dim))
            if settings.lora:
                add_adapters(own, settings.lora)
        self.teacher: Branch | None = None
        if average:
            head = self.objective.make_head(dim) if self.objective.has_teacher else nn.Identity()
            self.teacher = Branch(encoder.backbone, head).requires_grad_(False)
            if self.objective.has_teacher:
                head.load_state_dict(self.student.head.state_dict())
            if settings.lora:
                add_adapters(encoder.backbone, settings.lora)
                encoder.backbone.load_state_dict(own.state_dict())
                share_frozen(encoder.backbone.requires_grad_(False), own)
        self.train()

    def train(self, mode: bool = True) -> Learner:
        super().train(mode)
        if self.teacher is not None:
            self.teacher.eval()  # no path of the teacher is ever dropped
            for norm in batch_norms_of(self.teacher.backbone) if self.objective.has_teacher else ():
                norm.train(mode)  # by its own batch, as DINO's teacher: stored statistics are the student's
        return self

    @property
    def result(self) -> nn.Module:
        """The network worth keeping."""
        return (self.student if self.teacher is None else self.teacher).backbone

    @property
    def joins(self) -> bool:
        """Whether the loss of a tile depends on the other tiles of its batch."""
        return self.objective.joins != "nothing" or self.objective.joins_teacher

    def teach(self, views: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """The teacher's outputs and embeddings of the large views, without gradient, rows grouped by view."""
        assert self.teacher is not None
        with torch.no_grad():
            # Views of equal size come as one tensor, whatever their kind.
            return self.teacher([views[0][: losses.NUM_GLOBAL]])

    def look_ahead(self, views: Sequence[torch.Tensor]) -> torch.Tensor:
        """(V, B, D): what `JointBatch.join` will be asked for, of the student as it is."""
        # The same calls as in the step itself: they drop the same paths, whatever other views come with the large ones.
        everything = self.objective.joins == "head"
        rows_RD = torch.cat(
            [
                self.student.embed(self.student.backbone, view_VB3SS.flatten(0, 1))
                for view_VB3SS in (views if everything else views[:1])
            ]
        )
        rows_VBD = rows_RD.unflatten(0, (-1, views[0].shape[1]))
        if everything:
            return rows_VBD
        large_2BD = rows_VBD[: losses.NUM_GLOBAL]
        if self.objective.joins == "embeddings":
            return large_2BD
        return self.student.head(large_2BD.flatten(0, 1)).unflatten(0, large_2BD.shape[:2])

    def finish_step(self, momentum: float, states: Sequence[torch.Tensor]) -> None:
        """Move the average and what else does not learn by gradients, after the optimizer's step."""
        if self.teacher is not None:
            pair = (self.teacher, self.student)
            if not self.objective.has_teacher:  # nobody asks its head
                pair = (self.teacher.backbone, self.student.backbone)
            update_teacher(*pair, momentum)
        if states:
            self.objective.after_step(states)


def compute_loss(
    learner: Learner,
    student: nn.Module,
    views: Sequence[torch.Tensor],
    step: int,
    teacher_temp: float,
    mark: Callable[[str], None],
    part: Part | None = None,
) -> Outcome:
    """Forward through teacher and student; `student` is the learner's own or its wrapper for several processes."""
    objective, part = learner.objective, part or Part(JointBatch())
    tiles = views[0].shape[1]
    taught: tuple[torch.Tensor, torch.Tensor] | None = None
    if objective.has_teacher:
        taught = part.taught or learner.teach(views)
        mark("teacher")
    outputs_RK, embeddings_RD = student(views, part.join if objective.joins == "head" else None)
    num_views = sum(len(view_VB3SS) for view_VB3SS in views)
    seen = Seen(
        student_VBK=outputs_RK.unflatten(0, (num_views, -1)),
        embeddings_VBD=embeddings_RD.unflatten(0, (num_views, tiles)),
        teacher_2BK=None if taught is None else taught[0].unflatten(0, (losses.NUM_GLOBAL, tiles)),
        part=part,
        step=step,
        teacher_temp=teacher_temp,
    )
    outcome = objective(seen)
    outcome.embeddings_BD = (embeddings_RD if taught is None else taught[1])[:tiles]
    mark("student")
    return outcome


def diagnose(outcome: Outcome) -> dict[str, float]:
    """Numbers that tell whether the run learns or collapses."""
    found = {
        "feature_rank": losses.effective_rank(outcome.embeddings_BD),
        "feature_std": losses.feature_std(outcome.embeddings_BD),
    }
    return {name: float(value) for name, value in (found | outcome.metrics()).items()}


# ---------------------------------------------------------------------------------------------------- arithmetic


def gflop_per_tile(encoder: Encoder, settings: PretrainSettings, recipes: Sequence[ViewRecipe], out_dim: int) -> float:
    """Floating-point operations (a multiply-add is two) of matrix products that one tile costs in a step.

    The student's forward counts three times (backward costs two of them), the teacher's once; both as the network as a
    whole has it, so the shortcut of `tokens` counts as speed.
    """
    with torch.device("meta"):
        objective = make_objective(settings, out_dim, freeze_steps=0)
        head = objective.make_head(width_of(encoder.backbone))
        in_head = 2 * sum(weight.numel() for weight in head.parameters() if weight.ndim == 2) / 1e9
    costs = {size: forward_gflop(encoder, size) + in_head for size in {recipe.size_px for recipe in recipes}}
    student = 3 * sum(costs[recipe.size_px] for recipe in recipes)
    teacher = sum(costs[recipe.size_px] for recipe in recipes[: losses.NUM_GLOBAL]) * objective.has_teacher
    return student + teacher


def forward_gflop(encoder: Encoder, size_px: int) -> float:
    """The same of the network's forward pass of one image, without a head."""
    config = encoder.config
    with torch.device("meta"):
        backbone = build_backbone(config.architecture, config.model_args).eval()
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            backbone(torch.empty(1, 3, size_px, size_px))
    return counter.get_total_flops() / 1e9
