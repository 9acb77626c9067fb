"""What learns: networks, their loss and their schedules, put together from the settings, for DINO and for SimCLR.

A learner takes views and gives a loss; after the optimizer's step it moves what does not learn by gradients (teacher,
centre). It knows nothing of tiles, files or processes. `Numbers` are the settings with every "none" filled in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from selfvitmil.encoder import Encoder, build_backbone, build_encoder, load_encoder
from selfvitmil.encoder.network import has_class_token
from selfvitmil.errors import ConfigError, EncoderError
from selfvitmil.pretrain import loss as losses
from selfvitmil.pretrain import schedule
from selfvitmil.pretrain.head import DinoHead
from selfvitmil.pretrain.joint import JointBatch
from selfvitmil.pretrain.optim import cancel_gradients, update_teacher
from selfvitmil.pretrain.schedule import CosineSchedule, TeacherTemperature
from selfvitmil.pretrain.simclr import SimclrHead, nt_xent_loss
from selfvitmil.pretrain.tokens import class_token, has_shortcut
from selfvitmil.pretrain.views import ViewRecipe
from selfvitmil.settings import PretrainSettings

DEFAULT_ARCHITECTURE = {"dino": "vit_small_patch16_224", "simclr": "resnet18_instancenorm"}
OWN_SCALE = 0.15
"""By how much views may shrink or enlarge the tile, in the middle of their range, and still show it at its scale."""


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
        return Schedules(
            lr=CosineSchedule(self.lr, self.min_lr, total, self.warmup_steps, self.warmup_lr),
            weight_decay=CosineSchedule(self.weight_decay, self.weight_decay_end, total),
            momentum=CosineSchedule(self.momentum, 1.0, total),
            teacher_temp=TeacherTemperature(
                settings.warmup_teacher_temp,
                settings.teacher_temp,
                settings.warmup_temp_epochs if settings.warmup_temp_epochs is not None else self.warmup_steps,
                self.steps_per_epoch if in_epochs else 1,
                settings.temp_ramp,
            ),
        )


@dataclass(frozen=True)
class Schedules:
    """The numbers that change from step to step."""

    lr: CosineSchedule
    weight_decay: CosineSchedule
    momentum: CosineSchedule
    teacher_temp: TeacherTemperature

    def at(self, step: int) -> dict[str, float]:
        """All of them at one step."""
        return {name: getattr(self, name).value_at(step) for name in ("lr", "weight_decay", "momentum", "teacher_temp")}


def settle_numbers(settings: PretrainSettings, num_tiles: int, steps_per_epoch: int) -> Numbers:
    """Fill in what the settings leave to the size of the run."""
    total = settings.steps or settings.epochs * steps_per_epoch

    def steps(epochs: int | None, suggested: int) -> int:
        return suggested if epochs is None else min(epochs * steps_per_epoch, total)

    momentum, lr = settings.momentum, settings.chosen("lr")
    as_they_are = ("optimizer", "min_lr", "warmup_lr", "weight_decay", "weight_decay_end", "clip_grad")
    return Numbers(
        total_steps=total,
        steps_per_epoch=steps_per_epoch,
        warmup_steps=steps(settings.warmup_epochs, schedule.suggested_warmup_steps(total)),
        freeze_steps=steps(settings.freeze_last_layer_epochs, schedule.suggested_freeze_steps(total)),
        lr=schedule.scaled_learning_rate(lr, settings.batch) if settings.chosen("scale_lr") else lr,
        **{name: settings.chosen(name) for name in as_they_are},
        momentum=schedule.suggested_momentum(settings.batch, total) if momentum is None else momentum,
        out_dim=settings.out_dim or schedule.suggested_out_dim(num_tiles),
    )


# ---------------------------------------------------------------------------------------------------- views


def recipes_of(settings: PretrainSettings, tile_px: int, patch_px: int | None) -> tuple[ViewRecipe, ...]:
    """How the views of a tile are made: two large ones, with DINO small ones besides."""
    large = settings.global_px or tile_px
    base = ViewRecipe(
        size_px=large,
        scale=settings.chosen("global_scale"),
        hflip=settings.hflip,
        vflip=settings.vflip,
        right_angles=settings.right_angles,
        stain=settings.stain_jitter,
        stain_scale=settings.stain_scale,
        stain_shift=settings.stain_shift,
        jitter=settings.jitter,
        grey=settings.grey,
        **{name: settings.chosen(name) for name in ("brightness", "contrast", "saturation", "hue")},
    )
    if settings.method == "simclr":  # resampled as torchvision does where nothing is said, and DSMIL with it
        return (replace(base, blur=settings.blur[2], interpolation="bilinear"),) * 2
    unit = patch_px or 1
    small = settings.local_px or max(round(large * 3 / 7 / unit), 1) * unit
    for name, size in (("global_px", large), ("local_px", small)):
        if size % unit:
            raise ConfigError(
                f"pretrain.{name} {size} is no multiple of {unit}",
                f"the ViT cuts its views into patches of {unit} px",
                f"Use {max(round(size / unit), 1) * unit}",
            )
    first, second, third = settings.blur
    return (
        replace(base, blur=first),
        replace(base, blur=second, solarize=settings.solarize),
        *[replace(base, size_px=small, scale=settings.local_scale, blur=third)] * settings.num_local,
    )


def made_for_px(recipe: ViewRecipe, tile_px: int) -> int:
    """Edge of the tiles that an encoder of these large views is for.

    Views that show the whole tile smaller make an encoder for tiles of their own size, at a coarser resolution. Views
    that are cut out of the tile at about its own scale (by the middle of their range) leave it as it is.
    """
    zoom = tile_px * math.sqrt(sum(recipe.scale) / 2) / recipe.size_px
    return tile_px if abs(zoom - 1) < OWN_SCALE else recipe.size_px


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
    encoder = load_encoder(settings.init)
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
    return encoder


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


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Random numbers of torch from this seed; afterwards the generator goes on where it was."""
    before = torch.get_rng_state()
    torch.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(before)


def embedding_of(backbone: nn.Module) -> Callable[[nn.Module, torch.Tensor], torch.Tensor]:
    """What turns images into the vectors that training compares."""
    return class_token if has_shortcut(backbone) else _call


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
    """DINO when there is a teacher, SimCLR when there is none."""

    center_K: torch.Tensor

    def __init__(self, encoder: Encoder, settings: PretrainSettings, numbers: Numbers, seed: int):
        super().__init__()
        self.settings = settings
        self.numbers = numbers
        config = encoder.config
        drop = {"drop_path_rate": settings.drop_path} if has_class_token(encoder.backbone) else {}
        dino = settings.method == "dino"
        with seeded(seed + 1):
            backbone = build_backbone(config.architecture, {**config.model_args, **drop}) if dino else encoder.backbone
            backbone.load_state_dict(encoder.backbone.state_dict())
            self.student = Branch(backbone, self._make_head(width_of(encoder.backbone)))
        self.teacher = Branch(encoder.backbone, self._make_head(width_of(encoder.backbone))) if dino else None
        if self.teacher is not None:
            self.teacher.head.load_state_dict(self.student.head.state_dict())
            self.teacher.requires_grad_(False)
        self.register_buffer("center_K", torch.zeros(numbers.out_dim if dino else 0))
        self.train()

    def _make_head(self, dim: int) -> nn.Module:
        settings = self.settings
        if settings.method == "simclr":
            return SimclrHead(dim, settings.bottleneck)
        return DinoHead(
            dim,
            self.numbers.out_dim,
            settings.head_width,
            settings.bottleneck,
            settings.head_layers,
            norm_last_layer=settings.norm_last_layer,
        )

    def train(self, mode: bool = True) -> Learner:
        super().train(mode)
        if self.teacher is not None:
            self.teacher.eval()  # no path of the teacher is ever dropped
        return self

    @property
    def result(self) -> nn.Module:
        """The network worth keeping."""
        return (self.student if self.teacher is None else self.teacher).backbone

    @property
    def joins_teacher(self) -> bool:
        """Whether the loss of a tile depends on what the teacher says of the other tiles of the batch."""
        return self.teacher is not None and self.settings.centering == "sinkhorn"

    @property
    def joins_student(self) -> bool:
        """Whether the loss compares the student's embeddings of different tiles."""
        return self.teacher is None or self.settings.koleo > 0

    def teach(self, views: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """The teacher's logits and embeddings of the large views, without gradient."""
        assert self.teacher is not None
        with torch.no_grad():
            return self.teacher(_global_views(views))

    def look_ahead(self, views: Sequence[torch.Tensor]) -> torch.Tensor:
        """(V, B, D): the student's embeddings of the large views, which are what tiles are compared by."""
        # The same call as in the step itself: it drops the same paths, whatever other views come with the large ones.
        embeddings_RD = self.student.embed(self.student.backbone, views[0].flatten(0, 1))
        return embeddings_RD.unflatten(0, (-1, views[0].shape[1]))[: losses.NUM_GLOBAL]

    def finish_step(self, momentum: float, teacher_means: Sequence[torch.Tensor]) -> None:
        """Move teacher and centre, after the optimizer's step."""
        if self.teacher is not None:
            update_teacher(self.teacher, self.student, momentum)
            rows_RK = torch.stack(list(teacher_means))
            self.center_K.copy_(losses.update_center(self.center_K, rows_RK, self.settings.center_momentum))

    def freeze(self, step: int) -> None:
        """Leave the head's last layer as it is at the start of the run; before the optimizer's step."""
        if isinstance(self.student.head, DinoHead) and step < self.numbers.freeze_steps:
            cancel_gradients(self.student.head.last_layer)


@dataclass
class Outcome:
    """Loss of one part of a batch, and what tells how training goes."""

    loss: torch.Tensor
    embeddings_RD: torch.Tensor
    """Of the first large view (the teacher's with DINO), for rank and spread."""
    student_RK: torch.Tensor
    teacher_RK: torch.Tensor | None
    targets_RK: torch.Tensor | None
    """The teacher's distributions, which the student learns to predict."""


@dataclass(frozen=True)
class Part:
    """A part of a batch, and what it knows of the others."""

    joint: JointBatch
    number: int = 0
    taught: tuple[torch.Tensor, torch.Tensor] | None = None
    """What the teacher says of this part (`Learner.teach`), where it was asked before."""

    def join(self, own_VBD: torch.Tensor) -> torch.Tensor:
        return self.joint.join(own_VBD, self.number)


def compute_loss(
    learner: Learner,
    student: nn.Module,
    views: Sequence[torch.Tensor],
    teacher_temp: float,
    mark: Callable[[str], None],
    part: Part | None = None,
) -> Outcome:
    """Forward through teacher and student; `student` is the learner's own or its wrapper for several processes.

    The loss is the mean over the tiles of this part where tiles do not depend on each other, else that of the whole
    batch; averaged over parts and processes both are the loss of the whole batch.
    """
    settings, part = learner.settings, part or Part(JointBatch())
    tiles = views[0].shape[1]
    if learner.teacher is None:
        projections_RD, embeddings_RD = student(views, part.join)
        mark("student")
        value = nt_xent_loss(projections_RD, settings.temperature)
        return Outcome(value, embeddings_RD[:tiles], projections_RD, None, None)
    teacher_RK, embeddings_RD = part.taught or learner.teach(views)
    mark("teacher")
    student_RK, student_RD = student(views)
    num_views = sum(len(view_VB3SS) for view_VB3SS in views)
    if settings.centering == "sinkhorn":
        all_RK, own = part.joint.join_teacher(teacher_RK, part.number)
        targets_RK = losses.balanced_probabilities(all_RK, teacher_temp, alone=part.joint.is_alone)[own]
    else:
        targets_RK = losses.teacher_probabilities(teacher_RK, learner.center_K, teacher_temp)
    value = losses.crossed_cross_entropy(student_RK, targets_RK, settings.student_temp, num_views)
    if settings.koleo > 0:
        large_VBD = part.join(student_RD.unflatten(0, (num_views, tiles))[: losses.NUM_GLOBAL])
        value = value + settings.koleo * torch.stack([losses.koleo_loss(view_BD) for view_BD in large_VBD]).sum()
    mark("student")
    return Outcome(value, embeddings_RD[:tiles], student_RK, teacher_RK, targets_RK)


def _global_views(views: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The two that the teacher sees. Views of equal size come as one tensor, whatever their kind."""
    return [views[0][: losses.NUM_GLOBAL]]


def diagnose(learner: Learner, outcome: Outcome) -> dict[str, float]:
    """Numbers that tell whether the run learns or collapses."""
    settings = learner.settings
    found: dict[str, torch.Tensor] = {
        "feature_rank": losses.effective_rank(outcome.embeddings_RD),
        "feature_std": losses.feature_std(outcome.embeddings_RD),
    }
    if outcome.targets_RK is not None:
        found["teacher_entropy"] = losses.teacher_entropy(outcome.targets_RK)
        found["kl"] = losses.teacher_student_kl(outcome.student_RK, outcome.targets_RK, settings.student_temp)
    return {name: float(value) for name, value in found.items()}


def collapse_advice(learner: Learner, recent: Sequence[dict[str, Any]]) -> str | None:
    """What went wrong, judged by the mean of recent lines of metrics; None while all is well."""
    if learner.teacher is None:
        rank = sum(line["feature_rank"] for line in recent) / len(recent)
        spread = sum(line["feature_std"] for line in recent) / len(recent)
        if rank < 1.5 or spread < 0.01:
            return f"collapse to one embedding: feature rank {rank:.2f}, spread {spread:.3f}. Lower the learning rate"
        return None
    entropy, kl = (sum(line[key] for line in recent) / len(recent) for key in ("teacher_entropy", "kl"))
    return losses.collapse_reason(entropy, kl, learner.numbers.out_dim)


# ---------------------------------------------------------------------------------------------------- arithmetic


def gflop_per_tile(encoder: Encoder, settings: PretrainSettings, recipes: Sequence[ViewRecipe], out_dim: int) -> float:
    """Floating-point operations (a multiply-add is two) of matrix products that one tile costs in a step.

    The student's forward counts three times (backward costs two of them), the teacher's once; both as the network as a
    whole has it, so the shortcut of `tokens` counts as speed.
    """
    config = encoder.config
    with torch.device("meta"):
        backbone = build_backbone(config.architecture, config.model_args).eval()
        dim = width_of(backbone)
        head: nn.Module = SimclrHead(dim, settings.bottleneck)
        if settings.method == "dino":
            head = DinoHead(dim, out_dim, settings.head_width, settings.bottleneck, settings.head_layers)
        in_head = 2 * sum(weight.numel() for weight in head.parameters() if weight.ndim == 2)
        costs: dict[int, float] = {}
        for size in {recipe.size_px for recipe in recipes}:
            with FlopCounterMode(display=False) as counter, torch.no_grad():
                backbone(torch.empty(1, 3, size, size))
            costs[size] = counter.get_total_flops() + in_head
    student = 3 * sum(costs[recipe.size_px] for recipe in recipes)
    teacher = sum(costs[recipe.size_px] for recipe in recipes[: losses.NUM_GLOBAL]) * (settings.method == "dino")
    return (student + teacher) / 1e9
