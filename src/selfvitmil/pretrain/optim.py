"""Moving the weights: groups of parameters, clipping tensor by tensor, a frozen last layer, the averaged teacher.

All of it works on lists of tensors at once and never waits for the device: no number of it is looked at from Python.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

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
