"""Optimization: parameter groups with layer-wise decay, gradient clipping, the averaged teacher, LoRA, schedules.

All of it works on lists of tensors at once and never waits for the device: no value is read from Python.

LoRA (Hu et al. 2021, arXiv 2106.09685) continues a large ViT by training few weights. Every linear layer of attention
(`qkv`, or separate `q_proj`, `k_proj`, `v_proj`, and the output `proj`) gets two thin matrices and computes with
`weight + up @ down`. `up` starts at zero, so the network starts unchanged. All weights of the network are frozen; MLPs,
norms and embeddings have no adapter. The paper's scale alpha / rank is 1. Adapters are parametrizations of torch:
reading `layer.weight` gives the sum, so nothing else has to know of them. `merged` gives the plain network to save.

Schedules are functions of an integer step without state, so a resumed run needs none of theirs. They equal DINO's:
linear warm-up whose last step has the full value, then half a cosine. `ConstantSchedule` stays at the full value
instead, so that a longer run passes through the same states as a shorter one.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.nn.utils import parametrize

from selfvitmil.errors import ConfigError
from selfvitmil.runtime.training import CosineSchedule, split_by_decay, suggested_warmup_steps
from selfvitmil.settings import PretrainSettings

LAYER = re.compile(r"(?:blocks|layers?|stages)[._]?(\d+)\.")
"""How names of parameters in a numbered block (of a ViT) or stage (of a ResNet and others) begin in timm's networks."""


class Rate(NamedTuple):
    """How the schedules act on a group of parameters."""

    lr_scale: float
    """What the learning rate is multiplied by."""
    decayed: bool
    """Whether the group has weight decay."""


def layered_groups(network: nn.Module, head: nn.Module, decay: float) -> tuple[list[dict[str, Any]], list[Rate]]:
    """Return groups as of `parameter_groups` for each learning rate of layer-wise decay, and how schedules act on them.

    With `decay` 1 these are the two groups of `parameter_groups(network, head)`.
    """
    scales = layer_scales(network, decay)
    named = [(name, parameter, scales[name]) for name, parameter in network.named_parameters()]
    named += [(name, parameter, 1.0) for name, parameter in head.named_parameters()]
    groups: list[dict[str, Any]] = []
    rates: list[Rate] = []
    for scale in sorted({scale for _, _, scale in named}, reverse=True):
        both = split_by_decay((name, parameter) for name, parameter, own in named if own == scale)
        for group, decayed in zip(both, (True, False), strict=True):
            if group["params"]:
                groups.append(group)
                rates.append(Rate(scale, decayed))
    return groups, rates


def layer_scales(network: nn.Module, decay: float) -> dict[str, float]:
    """Return what the learning rate of each parameter is multiplied by: decay ** (n - k) in block (or stage) k of n.

    What comes before the blocks (patch embedding, class token and registers, positions; the first convolution) counts
    as block 0, what comes after them (the final norm) as block n. A network without numbered blocks has 1 throughout.
    """
    layers = [(name, LAYER.match(name)) for name, _ in network.named_parameters()]
    numbers = sorted({int(found[1]) for _, found in layers if found})
    last = len(numbers)
    scales: dict[str, float] = {}
    layer = 0 if numbers else last
    for name, found in layers:
        if found:
            layer = numbers.index(int(found[1])) + 1
        elif layer:  # the first parameters after a block
            layer = last
        scales[name] = decay ** (last - layer)
    return scales


@torch.no_grad()
def clip_each_gradient(parameters: Iterable[nn.Parameter], max_norm: float) -> torch.Tensor:
    """Scale every gradient that is longer than `max_norm` down to it, each tensor for itself; the norms from before.

    This is DINO's clipping; torch's own clips the length of all gradients together.
    """
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not grads:
        return torch.zeros(0)
    norms = torch.stack(torch._foreach_norm(grads))  # pyright: ignore[reportPrivateImportUsage]
    factors = (max_norm / (norms + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_(grads, list(factors.unbind()))  # pyright: ignore[reportPrivateImportUsage]
    return norms


@torch.no_grad()
def all_finite(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Whether every number of all tensors is finite: one boolean on their device, without waiting for it."""
    norms = torch._foreach_norm(list(tensors))  # pyright: ignore[reportPrivateImportUsage]
    return torch.stack(norms).isfinite().all()


def cancel_gradients(*modules: nn.Module) -> None:
    """Drop the gradients, so that the next step of an optimizer leaves these weights alone (no weight decay either)."""
    for module in modules:
        for parameter in module.parameters():
            parameter.grad = None


@torch.no_grad()
def update_teacher(teacher: nn.Module, student: nn.Module, momentum: float | torch.Tensor) -> None:
    """Move every weight of the teacher towards the student's: momentum * teacher + (1 - momentum) * student.

    Call it after the optimizer's step. Buffers (running means of batch norms) become the student's, until
    `learner.recompute_statistics` computes those that belong to the averaged weights. Weights that both share (frozen
    ones) stay as they are.
    """
    for mine, theirs in zip(teacher.buffers(), student.buffers(), strict=True):
        mine.copy_(theirs)
    pairs = zip(teacher.parameters(), student.parameters(), strict=True)
    moving = [(mine, theirs) for mine, theirs in pairs if mine is not theirs]
    own: list[torch.Tensor] = [mine for mine, _ in moving]
    targets: list[torch.Tensor] = [theirs for _, theirs in moving]
    torch._foreach_mul_(own, momentum)  # pyright: ignore[reportPrivateImportUsage]
    if isinstance(momentum, torch.Tensor):  # `alpha` must be a number
        parts = torch._foreach_mul(targets, 1 - momentum)  # pyright: ignore[reportPrivateImportUsage]
        torch._foreach_add_(own, parts)  # pyright: ignore[reportPrivateImportUsage]
    else:
        torch._foreach_add_(own, targets, alpha=1 - momentum)  # pyright: ignore[reportPrivateImportUsage]


# ---------------------------------------------------------------------------------------------------- LoRA

ADAPTED_LAYERS = ("attn.qkv", "attn.q_proj", "attn.k_proj", "attn.v_proj", "attn.proj")
"""How the names of adapted layers end, in timm's ViTs."""


class Adapter(nn.Module):
    """Adds a product of rank `rank` to a weight (outputs, inputs)."""

    def __init__(self, outputs: int, inputs: int, rank: int):
        super().__init__()
        self.down = nn.Parameter(torch.empty(rank, inputs))
        self.up = nn.Parameter(torch.zeros(outputs, rank))
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self.up @ self.down


def attention_layers(network: nn.Module) -> list[nn.Linear]:
    """Return the layers that adapters are for; none where the network is no ViT of timm's form."""
    return [
        module
        for name, module in network.named_modules()
        if isinstance(module, nn.Linear) and name.startswith("blocks.") and name.endswith(ADAPTED_LAYERS)
    ]


def check_lora(network: nn.Module, rank: int) -> None:
    """ConfigError where adapters of this rank are impossible or pointless."""
    layers = attention_layers(network)
    if not layers:
        raise ConfigError(
            f"pretrain.lora {rank} cannot adapt a {type(network).__name__}",
            "LoRA is for the attention layers of a ViT, and this network has none",
            "Leave pretrain.lora out: all weights are trained then",
            code="lora-unsupported",
        )
    smallest = min(min(layer.in_features, layer.out_features) for layer in layers)
    if rank >= smallest:
        raise ConfigError(
            f"pretrain.lora {rank} is not below the width of the network ({smallest})",
            "such adapters have more weights than the layers that they adapt",
            "Use 4 to 16, or leave pretrain.lora out to train all weights",
            code="lora-rank-too-large",
        )


def add_adapters(network: nn.Module, rank: int) -> None:
    """Freeze all weights of a ViT and add an adapter to each of its attention layers, in place."""
    check_lora(network, rank)
    network.requires_grad_(False)
    for layer in attention_layers(network):
        adapter = Adapter(layer.out_features, layer.in_features, rank).to(layer.weight.device)
        parametrize.register_parametrization(layer, "weight", adapter)


def share_frozen(network: nn.Module, source: nn.Module) -> None:
    """Let `network` use the very frozen parameters of `source`, which has the same layers, instead of a copy.

    A moving average then has nothing to average there, and the weights are in memory once.
    """
    for mine, theirs in zip(network.modules(), source.modules(), strict=True):
        for name, parameter in theirs.named_parameters(recurse=False):
            if not parameter.requires_grad:
                setattr(mine, name, parameter)


def merged(network: nn.Module) -> nn.Module:
    """Return the network with its adapters merged into plain weights: a copy, or itself where it has none."""
    if not any(parametrize.is_parametrized(module) for module in network.modules()):
        return network
    plain = copy.deepcopy(network)
    for name, module in list(plain.named_modules()):
        if parametrize.is_parametrized(module):
            assert isinstance(module, nn.Linear)
            # torch's own removal would change the class that the copy shares with the layer of the original.
            parent, _, own = name.rpartition(".")
            setattr(plain.get_submodule(parent), own, _plain_layer(module))
    return plain


def _plain_layer(layer: nn.Linear) -> nn.Linear:
    """A linear layer of the same function without parametrization."""
    plain = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
    plain.weight = nn.Parameter(layer.weight.detach())
    plain.bias = layer.bias
    return plain.train(layer.training)


# ---------------------------------------------------------------------------------------------------- schedule


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
"""Steps of warm-up of a constant schedule: as many for every run, but at most half of a very short one."""
CONSTANT_MOMENTUM = 0.99
"""Momentum of the average under a constant schedule: a half-life of 69 steps, whatever the length of the run."""


def scaled_learning_rate(base: float, batch: int) -> float:
    """Learning rate for `batch` tiles a step (over all processes), from one that is meant for 256."""
    return base * batch / 256


def suggested_momentum(batch: int, total_steps: int) -> float:
    """Momentum of the teacher at the start of a run of `total_steps` with `batch` tiles each.

    DINO names two points, 0.996 for a batch of 1024 and 0.9995 for one of 256: 1 - momentum goes with batch ** 1.5. So
    small batches, whose steps are noisier, are averaged over more tiles (177,000 and 355,000 to the half-life). But a
    teacher that still is half its random start teaches nothing: the half-life must not exceed a tenth of the run.
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
        total, epochs, steps_per_epoch = self.total_steps, settings.warmup_temp_epochs, self.steps_per_epoch
        if epochs is None:  # without a length in epochs, the temperature climbs from step to step
            epochs, steps_per_epoch = self.warmup_steps, 1
        teacher_temp = TeacherTemperature(
            settings.warmup_teacher_temp, settings.teacher_temp, epochs, steps_per_epoch, settings.temp_ramp
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
        warmup, momentum = min(CONSTANT_WARMUP_STEPS, total // 2), CONSTANT_MOMENTUM
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
