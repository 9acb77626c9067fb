"""Networks of pretraining: student, averaged teacher and objective, put together from the settings.

A learner takes views and returns a loss; after the optimizer's step it updates what has no gradient (moving average,
centre). It is independent of tiles, files and processes.

`JointBatchNorm2d` normalizes by the batch of all processes, on any device. For inference, `recompute_statistics`
replaces the running statistics of batch norms by those of plain tiles under the final weights (precise batch norm, Wu
and Johnson 2021, arXiv 2105.07576): training views are strongly augmented and of two sizes, and averaged weights are
not those that the running statistics were measured with.

Axes in names: V views, B images, D width, R rows (views times tiles, grouped by view), K outputs, C channels, P
processes, H and W height and width, S edge of a view, 3 is RGB.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.flop_counter import FlopCounterMode

from selfvitmil.data.views import ViewRecipe
from selfvitmil.encoder import Encoder, build_backbone, build_encoder, load_encoder
from selfvitmil.encoder.network import has_class_token
from selfvitmil.errors import ConfigError, EncoderError
from selfvitmil.pretrain.objectives import (
    NUM_GLOBAL,
    JointBatch,
    LossOutput,
    NetworkOutputs,
    Part,
    at_least_float32,
    make_objective,
)
from selfvitmil.pretrain.optim import Hyperparameters, add_adapters, check_lora, share_frozen, update_teacher
from selfvitmil.pretrain.quality import effective_rank, feature_std
from selfvitmil.pretrain.vit import embedding_of
from selfvitmil.runtime.device import evaluation_mode, seeded
from selfvitmil.settings import PretrainSettings

DEFAULT_ARCHITECTURE = dict.fromkeys(("dino", "simdino", "lejepa"), "vit_small_patch16_224") | {
    "simclr": "resnet18_instancenorm"
}
STATISTICS_TILES = 1024
"""Tiles that statistics for inference are computed on, at most; as many from every slide."""
PIXELS_AT_ONCE = 64 * 224**2
"""Pixels in one pass, at most: 64 tiles of 224 px, whose activations take less memory than a step of training."""
FEWEST_AT_ONCE = 16
"""Tiles in one pass, at least, where there are so many."""


# ---------------------------------------------------------------------------------------------------- networks


def start_encoder(settings: PretrainSettings, tile_px: int, seed: int) -> Encoder:
    """Return the encoder that training starts from: random weights, or those of `init`."""
    architecture = settings.architecture or DEFAULT_ARCHITECTURE[settings.method]
    names = {"width": "embed_dim", "depth": "depth", "heads": "num_heads", "patch_px": "patch_size"}
    args = {theirs: getattr(settings, ours) for ours, theirs in names.items() if getattr(settings, ours) is not None}
    if settings.init == "scratch":
        with seeded(seed):
            layout: dict[str, Any] = {"layout": "cls+patchmean"} if args.get("depth", 4) < 4 else {}
            try:
                return build_encoder(architecture, img_size=settings.global_px or tile_px, model_args=args, **layout)
            except EncoderError as error:
                if error.code != "invalid-model-args":
                    raise
                given = ", ".join(f"pretrain.{name} {getattr(settings, name)}" for name in names if names[name] in args)
                how = "These settings are the shape of a ViT: leave them out for another network, or correct them"
                raise ConfigError(f"{architecture} with {given}", error.why, how, code="network-shape") from None
    encoder = _for_any_size(load_encoder(settings.init))
    found, wanted = encoder.config.architecture, settings.architecture
    shape = _shape_of(encoder.backbone)
    if wanted is not None and wanted.split(".")[0] != found:
        raise _mismatch(settings, "architecture", f"its network is {found}, not {wanted}")
    for ours in names:
        if getattr(settings, ours) not in (None, shape.get(ours)):
            raise _mismatch(settings, ours, f"has another {ours} than pretrain.{ours}")
    if settings.lora:
        check_lora(encoder.backbone, settings.lora)
    return encoder


def _mismatch(settings: PretrainSettings, setting: str, problem: str) -> EncoderError:
    return EncoderError(
        f"{settings.init.rstrip('/').split('/')[-1]}: {problem}",
        "weights of one network do not fit another",
        f"Leave pretrain.{setting} out, or start from other weights",
        code="init-mismatch",
    )


def _for_any_size(encoder: Encoder) -> Encoder:
    """Return the encoder for images of any size: views are smaller than tiles, and some ViTs accept one size only."""
    config = encoder.config
    if not has_class_token(encoder.backbone) or getattr(encoder.backbone, "dynamic_img_size", True):
        return encoder
    args = {**config.model_args, "dynamic_img_size": True}
    backbone = build_backbone(config.architecture, args)
    backbone.load_state_dict(encoder.backbone.state_dict())
    return Encoder(backbone, config.model_copy(update={"model_args": args}), encoder.warnings).eval()


def _shape_of(backbone: Any) -> dict[str, int | None]:
    """Return width, depth, heads and patch_px of a ViT, as the settings name them; empty for other networks."""
    if not has_class_token(backbone):
        return {}
    heads = backbone.blocks[0].attn.num_heads
    depth = len(backbone.blocks)
    return {"width": backbone.embed_dim, "depth": depth, "heads": heads, "patch_px": patch_px_of(backbone)}


def patch_px_of(backbone: Any) -> int | None:
    """Return the edge of a ViT's patches in pixels; None for other networks."""
    return backbone.patch_embed.patch_size[0] if has_class_token(backbone) else None


def width_of(backbone: Any) -> int:
    """Return the width of the network's own output."""
    return backbone.num_features if has_class_token(backbone) else backbone.head_hidden_size


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
        """Return logits (R, K) and embeddings (R, D); `join` extends embeddings (V, B, D) to the whole batch."""
        embeddings_RD = self.embed(self.backbone, [view_VB3SS.flatten(0, 1) for view_VB3SS in views])
        if join is None:
            return self.head(embeddings_RD), embeddings_RD
        embeddings_VBD = embeddings_RD.unflatten(0, (-1, views[0].shape[1]))
        return self.head(join(embeddings_VBD).flatten(0, 1)), embeddings_RD


class Learner(nn.Module):
    """Student, objective, and the student's moving average, which is the teacher if the objective has one."""

    def __init__(self, encoder: Encoder, settings: PretrainSettings, numbers: Hyperparameters, seed: int):
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
        """Set the training mode of the student; the teacher stays in evaluation mode, except its batch norms."""
        super().train(mode)
        if self.teacher is not None:
            self.teacher.eval()  # no path of the teacher is ever dropped
            for norm in batch_norms_of(self.teacher.backbone) if self.objective.has_teacher else ():
                norm.train(mode)  # by its own batch, as DINO's teacher: stored statistics are the student's
        return self

    @property
    def result(self) -> nn.Module:
        """Network that becomes the encoder."""
        return (self.student if self.teacher is None else self.teacher).backbone

    @property
    def joins(self) -> bool:
        """Whether the loss of a tile depends on the other tiles of its batch."""
        return self.objective.joins != "nothing" or self.objective.joins_teacher

    def teach(self, views: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the teacher's outputs and embeddings of the global views, without gradient, rows grouped by view."""
        assert self.teacher is not None
        with torch.no_grad():
            # Views of equal size come as one tensor, whatever their kind.
            return self.teacher([views[0][:NUM_GLOBAL]])

    def look_ahead(self, views: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return (V, B, D): what `JointBatch.join` will need, from the student's current weights."""
        # Drops the same paths as the step itself, whatever other views come with the large ones.
        everything = self.objective.joins == "head"
        needed = views if everything else views[:1]
        rows_RD = self.student.embed(self.student.backbone, [view_VB3SS.flatten(0, 1) for view_VB3SS in needed])
        rows_VBD = rows_RD.unflatten(0, (-1, views[0].shape[1]))
        if everything:
            return rows_VBD
        large_2BD = rows_VBD[:NUM_GLOBAL]
        if self.objective.joins == "embeddings":
            return large_2BD
        return self.student.head(large_2BD.flatten(0, 1)).unflatten(0, large_2BD.shape[:2])

    def finish_step(self, momentum: float | torch.Tensor, states: Sequence[torch.Tensor]) -> None:
        """Update the moving average and other state without gradients, after the optimizer's step."""
        if self.teacher is not None:
            pair = (self.teacher, self.student)
            if not self.objective.has_teacher:  # its head is not used
                pair = (self.teacher.backbone, self.student.backbone)
            update_teacher(*pair, momentum)
        if states:
            self.objective.after_step(states)


def compute_loss(
    learner: Learner,
    student: nn.Module,
    views: Sequence[torch.Tensor],
    teacher_temp: float | torch.Tensor,
    mark: Callable[[str], None],
    part: Part | None = None,
) -> LossOutput:
    """Compute the loss from teacher and student; `student` is the learner's own or its DDP wrapper."""
    objective, part = learner.objective, part or Part(JointBatch())
    tiles = views[0].shape[1]
    taught: tuple[torch.Tensor, torch.Tensor] | None = None
    if objective.has_teacher:
        taught = part.taught or learner.teach(views)
        mark("teacher")
    outputs_RK, embeddings_RD = student(views, part.join if objective.joins == "head" else None)
    num_views = sum(len(view_VB3SS) for view_VB3SS in views)
    seen = NetworkOutputs(
        student_VBK=outputs_RK.unflatten(0, (num_views, -1)),
        embeddings_VBD=embeddings_RD.unflatten(0, (num_views, tiles)),
        teacher_2BK=None if taught is None else taught[0].unflatten(0, (NUM_GLOBAL, tiles)),
        part=part,
        teacher_temp=teacher_temp,
    )
    outcome = objective(seen)
    outcome.embeddings_BD = (embeddings_RD if taught is None else taught[1])[:tiles].detach()
    mark("student")
    return outcome


def diagnose(outcome: LossOutput) -> dict[str, float]:
    """Return the metrics that show whether the run learns or collapses."""
    found = {
        "feature_rank": effective_rank(outcome.embeddings_BD),
        "feature_std": feature_std(outcome.embeddings_BD),
    }
    return {name: float(value) for name, value in (found | outcome.metrics()).items()}


# ---------------------------------------------------------------------------------------------------- arithmetic


def gflop_per_tile(encoder: Encoder, settings: PretrainSettings, recipes: Sequence[ViewRecipe], out_dim: int) -> float:
    """Return the GFLOP (10^9 operations, a multiply-add is two) of matrix products per tile and step.

    The student's forward pass counts three times (backward costs two of them), the teacher's once. Both are counted for
    the complete network, so the shortcut of `vit.class_tokens` counts as speed.
    """
    with torch.device("meta"):
        objective = make_objective(settings, out_dim, freeze_steps=0)
        head = objective.make_head(width_of(encoder.backbone))
        in_head = 2 * sum(weight.numel() for weight in head.parameters() if weight.ndim == 2) / 1e9
    costs = {size: forward_gflop(encoder, size) + in_head for size in {recipe.size_px for recipe in recipes}}
    student = 3 * sum(costs[recipe.size_px] for recipe in recipes)
    teacher = sum(costs[recipe.size_px] for recipe in recipes[:NUM_GLOBAL]) * objective.has_teacher
    return student + teacher


def forward_gflop(encoder: Encoder, size_px: int) -> float:
    """Return the GFLOP of a forward pass of one image of `size_px` through the network, without a head."""
    config = encoder.config
    with torch.device("meta"):
        backbone = build_backbone(config.architecture, config.model_args).eval()
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            backbone(torch.empty(1, 3, size_px, size_px))
    return counter.get_total_flops() / 1e9


# ---------------------------------------------------------------------------------- batch norms at inference


def batch_norms_of(network: nn.Module) -> list[_BatchNorm]:
    """The batch norms that use stored statistics at inference."""
    found = [module for module in network.modules() if isinstance(module, _BatchNorm)]
    return [norm for norm in found if norm.running_mean is not None]


@torch.no_grad()
def recompute_statistics(network: nn.Module, batches: Iterable[torch.Tensor]) -> None:
    """Replace the stored mean and variance of every batch norm by those of its inputs over these images, exactly.

    `batches` are normalized images (B, 3, H, W) on the network's device, each with several slides in it; all images
    count alike. Within a batch the network normalizes as in training, so with one batch it gives at inference what it
    gave for that batch. The variance is the unbiased one, as torch stores it. All else of the network stays as it was;
    nothing is exchanged with other processes. Without batch norms nothing happens, and no batch is asked for.
    """
    norms = batch_norms_of(network)
    if not norms:
        return
    moments = {norm: _Moments() for norm in norms}

    def note(norm: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        moments[norm].add(inputs[0])  # pyright: ignore[reportArgumentType]

    counted = [norm.num_batches_tracked.clone() for norm in norms if norm.num_batches_tracked is not None]
    hooks = [norm.register_forward_pre_hook(note) for norm in norms]
    try:
        with evaluation_mode(network), alone(network):
            for norm in norms:
                norm.training = True
            for images_B3HW in batches:
                network(images_B3HW)
    finally:
        for hook in hooks:
            hook.remove()
    for norm, found in moments.items():
        assert norm.running_mean is not None
        assert norm.running_var is not None
        norm.running_mean.copy_(found.mean_C)
        norm.running_var.copy_(found.squares_C / max(found.count - 1, 1))
    for count, before in zip((norm.num_batches_tracked for norm in norms), counted, strict=True):
        assert count is not None
        count.copy_(before)


@contextmanager
def statistics_of(network: nn.Module, batches: Iterable[torch.Tensor]) -> Iterator[None]:
    """`recompute_statistics` for the time of a `with` block; afterwards the statistics of training are back."""
    buffers = [buffer for norm in batch_norms_of(network) for buffer in norm.buffers()]
    before = [buffer.clone() for buffer in buffers]
    try:
        recompute_statistics(network, batches)
        yield
    finally:
        for buffer, value in zip(buffers, before, strict=True):
            buffer.copy_(value)


class _Moments:
    """Count, mean and sum of squared differences from the mean, per channel, of numbers that come in parts."""

    def __init__(self):
        self.count = 0
        self.mean_C = self.squares_C = torch.zeros(())

    def add(self, inputs: torch.Tensor) -> None:
        """Inputs (B, C, ...) of a batch norm. Chan's formula, in float64 on the CPU, which every machine has."""
        others = [axis for axis in range(inputs.ndim) if axis != 1]
        var_C, mean_C = torch.var_mean(at_least_float32(inputs), dim=others, correction=0)
        var_C, mean_C = var_C.double().cpu(), mean_C.double().cpu()
        count = inputs.numel() // inputs.shape[1]
        total = self.count + count
        away_C = mean_C - self.mean_C
        self.squares_C = self.squares_C + var_C * count + away_C**2 * (self.count * count / total)
        self.mean_C = self.mean_C + away_C * (count / total)
        self.count = total


def passes_of(tiles_N3SS: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Tiles in parts of nearly equal size that fit into memory; how many depends on the size of a tile alone."""
    at_once = max(PIXELS_AT_ONCE // tiles_N3SS[0, 0].numel(), FEWEST_AT_ONCE)
    return tiles_N3SS.tensor_split(-(-len(tiles_N3SS) // at_once))


# ---------------------------------------------------------------------------------- batch norms over processes


class JointBatchNorm2d(nn.BatchNorm2d):
    """A batch norm that in training normalizes by the equal parts of a batch that all processes have.

    torch's own SyncBatchNorm does so on GPUs alone. A loss that is averaged over the processes gets the gradient that
    it has for the whole batch in one process.
    """

    alone = False
    """Whether this process computes something that others do not, and must not wait for them."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not self.training or self.alone or not dist.is_initialized():
            return super().forward(input)
        x_BCHW = at_least_float32(input)
        with torch.autocast(x_BCHW.device.type, enabled=False):
            var_C, mean_C = torch.var_mean(x_BCHW, dim=(0, 2, 3), correction=0)
            var_PC, mean_PC = _gather(torch.stack([var_C, mean_C])).unbind(1)
            mean_C = mean_PC.mean(dim=0)
            var_C = var_PC.mean(dim=0) + (mean_PC - mean_C).square().mean(dim=0)
            self._note(mean_C.detach(), var_C.detach(), x_BCHW.numel() // len(mean_C) * len(mean_PC))
            scale_C = torch.rsqrt(var_C + self.eps)
            shift_C = -mean_C * scale_C
            if self.affine:
                scale_C, shift_C = scale_C * self.weight, shift_C * self.weight + self.bias
            return torch.addcmul(shift_C[:, None, None], x_BCHW, scale_C[:, None, None]).to(input.dtype)

    @torch.no_grad()
    def _note(self, mean_C: torch.Tensor, var_C: torch.Tensor, count: int) -> None:
        """Move the stored statistics, as torch does."""
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        share = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean_C.to(self.running_mean), share)
        self.running_var.lerp_((var_C * count / max(count - 1, 1)).to(self.running_var), share)


def join_processes(network: nn.Module) -> None:
    """Turn the batch norms of a network into `JointBatchNorm2d`; weights, statistics and hooks stay what they are.

    Those of a kind of their own (timm's BatchNormAct2d of EfficientNets, for instance) are left alone.
    """
    for module in network.modules():
        if type(module) is nn.BatchNorm2d:
            module.__class__ = JointBatchNorm2d


@contextmanager
def alone(network: nn.Module) -> Iterator[None]:
    """In this block, batch norms of the network wait for no other process."""
    joint = [module for module in network.modules() if isinstance(module, JointBatchNorm2d)]
    for norm in joint:
        norm.alone = True
    try:
        yield
    finally:
        for norm in joint:
            norm.alone = False


class _Gather(torch.autograd.Function):
    """(P, ...) of tensors that all processes have; the gradient of each is the sum of what all processes found."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor) -> torch.Tensor:
        shares = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(shares, own.contiguous())
        return torch.stack(shares)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        total = gradients[0].contiguous().clone()
        dist.all_reduce(total)
        return total[dist.get_rank()]


def _exchange(own: torch.Tensor) -> torch.Tensor:
    return _Gather.apply(own)  # pyright: ignore[reportReturnType]


_gather: Any = torch.compiler.disable(_exchange)
"""Never part of a compiled graph: it waits for other processes."""
