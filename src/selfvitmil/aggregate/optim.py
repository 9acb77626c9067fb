"""Optimizers of the training recipes, learning-rate schedule and Lookahead.

On a GPU every value that changes from step to step (learning rate, step counts) lives on the device, so that a step can
be captured once and replayed (`cuda_graphs.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from selfvitmil.aggregate.recipes import Recipe
from selfvitmil.runtime.training import CosineSchedule, parameter_groups

MOMENTUM = 0.9
"""Nesterov momentum of SGD, as in MIL-RNN."""
LOOKAHEAD_STEPS = 6
LOOKAHEAD_SHARE = 0.5


def learning_rates(recipe: Recipe, steps_per_epoch: int) -> CosineSchedule:
    """Return the schedule in optimizer steps: linear warm-up to the full rate, then half a cosine to `min_lr`."""
    warmup_steps = recipe.warmup_epochs * steps_per_epoch
    first = recipe.lr / max(warmup_steps, 1)
    return CosineSchedule(recipe.lr, recipe.min_lr, recipe.epochs * steps_per_epoch, warmup_steps, first)


class TrainingOptimizer:
    """An optimizer with learning rate, gradient-norm clipping, Lookahead and zeroing of gradients.

    `step` may be captured as a CUDA graph; `set_lr` and `after_step` are called outside of the capture.
    """

    def __init__(self, module: nn.Module, recipe: Recipe, device: torch.device, keep_gradients: bool):
        self._parameters = [each for each in module.parameters() if each.requires_grad]
        self._clip_grad = recipe.clip_grad
        self._keep_gradients = keep_gradients
        self._optimizer = make_optimizer(module, recipe, device)
        self._lookahead = Lookahead(self._parameters) if recipe.optimizer == "lookahead-radam" else None

    def step(self) -> None:
        """Clip the gradients, update the weights, zero the gradients."""
        if self._clip_grad > 0:
            nn.utils.clip_grad_norm_(self._parameters, self._clip_grad)
        self._optimizer.step()
        self.zero_grad()

    def zero_grad(self) -> None:
        """Drop the gradients, or set them to 0 in place where captured graphs accumulate into them."""
        self._optimizer.zero_grad(set_to_none=not self._keep_gradients)

    def set_lr(self, value: float) -> None:
        for group in self._optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(value)
            else:
                group["lr"] = value

    def after_step(self) -> None:
        """Apply Lookahead after an optimizer step, where the recipe uses it."""
        if self._lookahead is not None:
            self._lookahead.count_step()


def make_optimizer(module: nn.Module, recipe: Recipe, device: torch.device) -> torch.optim.Optimizer:
    """Return the recipe's optimizer; AdamW and RAdam apply no weight decay to biases and norms, Adam and SGD do."""
    on_gpu = device.type == "cuda"
    lr: Any = torch.full((), recipe.lr, device=device) if on_gpu else recipe.lr
    common: dict[str, Any] = {"lr": lr, "weight_decay": recipe.weight_decay}
    if recipe.optimizer == "sgd":
        return torch.optim.SGD(module.parameters(), momentum=MOMENTUM, nesterov=True, fused=True, **common)
    common |= {"betas": recipe.betas, "capturable": on_gpu}
    if recipe.optimizer == "adam":
        return torch.optim.Adam(module.parameters(), fused=True, **common)
    groups = parameter_groups(module)
    if recipe.optimizer == "adamw":
        return torch.optim.AdamW(groups, fused=True, **common)
    assert recipe.optimizer == "lookahead-radam"
    return torch.optim.RAdam(groups, decoupled_weight_decay=True, foreach=True, **common)


class Lookahead:
    """Lookahead (Zhang et al., NeurIPS 2019, arXiv:1907.08610): every `every` steps, interpolate to the slow weights.

    slow <- slow + share * (weights - slow); weights <- slow
    """

    def __init__(self, parameters: list[nn.Parameter], every: int = LOOKAHEAD_STEPS, share: float = LOOKAHEAD_SHARE):
        self._weights: list[Tensor] = list(parameters)
        self._slow: list[Tensor] = [each.detach().clone() for each in parameters]
        self._every = every
        self._share = share
        self._steps = 0

    @torch.no_grad()
    def count_step(self) -> None:
        """Count a step; update slow and fast weights every `every` steps."""
        self._steps += 1
        if self._steps % self._every:
            return
        torch._foreach_lerp_(self._slow, self._weights, self._share)  # pyright: ignore[reportPrivateImportUsage]
        torch._foreach_copy_(self._weights, self._slow)  # pyright: ignore[reportPrivateImportUsage]
