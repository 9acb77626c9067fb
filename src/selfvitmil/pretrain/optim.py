"""Optimization: parameter groups with layer-wise decay, gradient clipping, the averaged teacher, LoRA adapters.

All of it works on lists of tensors at once and never waits for the device: no value is read from Python.

LoRA (Hu et al. 2021, arXiv 2106.09685) continues a large ViT by training few weights. Every linear layer of attention
(`qkv`, or separate `q_proj`, `k_proj`, `v_proj`, and the output `proj`) gets two thin matrices and computes with
`weight + up @ down`. `up` starts at zero, so the network starts unchanged. All weights of the network are frozen; MLPs,
norms and embeddings have no adapter. The paper's scale alpha / rank is 1. Adapters are parametrizations of torch:
reading `layer.weight` gives the sum, so nothing else has to know of them. `merged` gives the plain network to save.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.utils import parametrize

from selfvitmil.errors import ConfigError
from selfvitmil.runtime.training import split_by_decay

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
    """Whether every number of all tensors is finite: one truth value on their device, which nobody waits for."""
    norms = torch._foreach_norm(list(tensors))  # pyright: ignore[reportPrivateImportUsage]
    return torch.stack(norms).isfinite().all()


def cancel_gradients(*modules: nn.Module) -> None:
    """Drop the gradients, so that the next step of an optimizer leaves these weights alone (no weight decay either)."""
    for module in modules:
        for parameter in module.parameters():
            parameter.grad = None


@torch.no_grad()
def update_teacher(teacher: nn.Module, student: nn.Module, momentum: float) -> None:
    """Move every weight of the teacher towards the student's: momentum * teacher + (1 - momentum) * student.

    Call it after the optimizer's step. Buffers (running means of batch norms) become the student's, until `batch_norm`
    computes those that belong to the averaged weights. Weights that both share (frozen ones) stay as they are.
    """
    for mine, theirs in zip(teacher.buffers(), student.buffers(), strict=True):
        mine.copy_(theirs)
    pairs = zip(teacher.parameters(), student.parameters(), strict=True)
    moving = [(mine, theirs) for mine, theirs in pairs if mine is not theirs]
    own: list[torch.Tensor] = [mine for mine, _ in moving]
    targets: list[torch.Tensor] = [theirs for _, theirs in moving]
    torch._foreach_mul_(own, momentum)  # pyright: ignore[reportPrivateImportUsage]
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
