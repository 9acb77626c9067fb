"""What moves the weights of an aggregator: optimizers of the recipes, learning rates, Lookahead.

On a GPU every number that changes from step to step (learning rate, step counts) lives on the device, so that a step
can be recorded once and replayed (`graphs.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from selfvitmil.aggregate.recipes import Recipe
from selfvitmil.pretrain.optim import parameter_groups
from selfvitmil.pretrain.schedule import CosineSchedule

MOMENTUM = 0.9
"""Of SGD, Nesterov's form, as MIL-RNN has it."""
LOOKAHEAD_STEPS = 6
LOOKAHEAD_SHARE = 0.5


def learning_rates(recipe: Recipe, steps_per_epoch: int) -> CosineSchedule:
    """Linear warm-up, whose last step has the full rate, then half a cosine to `min_lr`; counted in optimizer steps."""
    warmup_steps = recipe.warmup_epochs * steps_per_epoch
    first = recipe.lr / max(warmup_steps, 1)
    return CosineSchedule(recipe.lr, recipe.min_lr, recipe.epochs * steps_per_epoch, warmup_steps, first)


class Mover:
    """An optimizer together with what surrounds a step of it: learning rate, clipping, Lookahead, clearing.

    `step` may be recorded; `set_lr` and `settle` are called outside of what is recorded.
    """

    def __init__(self, module: nn.Module, recipe: Recipe, device: torch.device, keep_gradients: bool):
        self._parameters = [each for each in module.parameters() if each.requires_grad]
        self._clip_grad = recipe.clip_grad
        self._keep_gradients = keep_gradients
        self._optimizer = make_optimizer(module, recipe, device)
        self._lookahead = Lookahead(self._parameters) if recipe.optimizer == "lookahead-radam" else None

    def step(self) -> None:
        """Clip the gradients, move the weights, clear the gradients."""
        if self._clip_grad > 0:
            nn.utils.clip_grad_norm_(self._parameters, self._clip_grad)
        self._optimizer.step()
        self.clear()

    def clear(self) -> None:
        """No gradients; kept ones become 0 where they are, since what was recorded adds to them there."""
        self._optimizer.zero_grad(set_to_none=not self._keep_gradients)

    def set_lr(self, value: float) -> None:
        for group in self._optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(value)
            else:
                group["lr"] = value

    def settle(self) -> None:
        """After every step: what Lookahead does between steps."""
        if self._lookahead is not None:
            self._lookahead.count_step()


def make_optimizer(module: nn.Module, recipe: Recipe, device: torch.device) -> torch.optim.Optimizer:
    """The recipe's optimizer; AdamW and RAdam spare biases and norms their weight decay, Adam and SGD spare nothing."""
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
    """Zhang et al. 2019: after every `every` steps the weights go back part of the way to where they were then.

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
        """One more step was made."""
        self._steps += 1
        if self._steps % self._every:
            return
        torch._foreach_lerp_(self._slow, self._weights, self._share)  # pyright: ignore[reportPrivateImportUsage]
        torch._foreach_copy_(self._weights, self._slow)  # pyright: ignore[reportPrivateImportUsage]
