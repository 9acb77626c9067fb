"""Moving the weights: groups of parameters, clipping tensor by tensor, a frozen last layer, the averaged teacher.

All of it works on lists of tensors at once and never waits for the device: no number of it is looked at from Python.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


def parameter_groups(*modules: nn.Module) -> list[dict[str, Any]]:
    """Two groups of trainable parameters for an optimizer: with weight decay, and (biases and all 1-D tensors) without.

    The schedule of the weight decay must touch the first group only; the second has `weight_decay` 0.
    """
    decayed: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for module in modules:
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                (others if name.endswith("bias") or parameter.ndim <= 1 else decayed).append(parameter)
    return [{"params": decayed}, {"params": others, "weight_decay": 0.0}]


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
    computes those that belong to the averaged weights.
    """
    for mine, theirs in zip(teacher.buffers(), student.buffers(), strict=True):
        mine.copy_(theirs)
    own: list[torch.Tensor] = list(teacher.parameters())
    targets: list[torch.Tensor] = list(student.parameters())
    torch._foreach_mul_(own, momentum)  # pyright: ignore[reportPrivateImportUsage]
    torch._foreach_add_(own, targets, alpha=1 - momentum)  # pyright: ignore[reportPrivateImportUsage]
