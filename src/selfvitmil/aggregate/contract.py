"""What every aggregator promises: what goes in, what comes out, how it is built, trained and told apart.

In goes one bag: (N, D) embeddings in float16, bfloat16, float32 or float64, and if wanted the (N, 2) top left corners
of its tiles as (x, y) in any one unit. Out comes an `AggregatorOutput`. A module computes in the dtype of its own
weights and reads the bag in chunks (`rows.py`). `num_classes=1` means a binary label with one logit; with more classes
there is one logit each, which `probabilities` turns into one sigmoid per class (DSMIL) or a softmax (all others).

What a trainer needs: `loss(output, label)`, `probabilities(output)`, `is_order_dependent`, `config` (rebuilds the
module: `build(**module.config)`), and with `standardize=True` the method `set_standardization`.

N instances, D dimensions, C classes.
"""

from __future__ import annotations

import difflib
import inspect
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from selfvitmil.aggregate.rows import Rows
from selfvitmil.errors import BagError, ConfigError


@dataclass(frozen=True, eq=False)
class AggregatorOutput:
    """What an aggregator says of one bag; a method's own output class may add fields."""

    logits_C: Tensor
    """Evidence for each class of the slide, before `probabilities`."""
    attention_NC: Tensor | None
    """Weights that sum to 1 over the bag, a column per class (the same one where a method has one for all)."""
    instance_logits_NC: Tensor | None
    """Evidence of each instance by itself, where the method is trained to give it."""


class Aggregator(nn.Module):
    """Base of all aggregators. A subclass takes its settings as keywords and implements `aggregate`."""

    one_sigmoid_per_class = False
    """With C >= 2: classes are judged one by one instead of against each other."""
    is_order_dependent = False
    """Whether shuffling the instances changes more than the order of the results."""
    attention_is_evidence = True
    """Whether attention points at evidence for the class that is shown, and so may be drawn as a heatmap."""
    needs_coordinates = False
    """Whether `coords_N2` must be given."""
    waits_for_device = False
    """Whether a step takes numbers from the device to the host, or looks at random states: CUDA graphs cannot."""
    config: dict[str, Any]
    """Arguments of `build` that make this module again (without its weights); all settings, resolved."""

    input_mean_D: Tensor
    input_std_D: Tensor

    def __init__(self, dim: int, num_classes: int, standardize: bool = False):
        super().__init__()
        self.dim = dim
        self.num_classes = num_classes
        self.standardize = standardize
        if standardize:
            self.register_buffer("input_mean_D", torch.zeros(dim))
            self.register_buffer("input_std_D", torch.ones(dim))

    def forward(self, bag_ND: Tensor, coords_N2: Tensor | None = None) -> AggregatorOutput:
        """The output for one bag; raises BagError where the bag does not fit this module."""
        self._check(bag_ND, coords_N2)
        dtype = next(self.parameters()).dtype
        if self.standardize:
            return self.aggregate(Rows(bag_ND, dtype, self.input_mean_D, self.input_std_D), coords_N2)
        return self.aggregate(Rows(bag_ND, dtype), coords_N2)

    @abstractmethod
    def aggregate(self, rows: Rows, coords_N2: Tensor | None) -> AggregatorOutput:
        """The output for the rows of a bag that was checked."""

    def loss(self, output: AggregatorOutput, label: Tensor | float) -> Tensor:
        """The method's loss on one bag. `label`: 0 or 1 for one class, a class index, or a vector of C targets."""
        return self.bag_loss(output.logits_C, label)

    def bag_loss(self, logits_C: Tensor, label: Tensor | float) -> Tensor:
        """Cross-entropy of logits and label: sigmoid for one class or one by one, else softmax."""
        target_C = self.target(label, logits_C)
        if self.num_classes == 1 or self.one_sigmoid_per_class:
            return F.binary_cross_entropy_with_logits(logits_C, target_C)
        return -(target_C * logits_C.log_softmax(0)).sum()

    def probabilities(self, output: AggregatorOutput) -> Tensor:
        """Probability of each class: (C,), for one class that of being positive."""
        if self.num_classes == 1 or self.one_sigmoid_per_class:
            return output.logits_C.sigmoid()
        return output.logits_C.softmax(0)

    def instance_probabilities(self, logits_NC: Tensor) -> Tensor:
        """Probability of each class for each instance by itself, from its logits: (N, C)."""
        if self.num_classes == 1 or self.one_sigmoid_per_class:
            return logits_NC.sigmoid()
        return logits_NC.softmax(1)

    def target(self, label: Tensor | float, like: Tensor) -> Tensor:
        """The label as (C,) numbers between 0 and 1, without waiting for the device."""
        given = torch.as_tensor(label, device=like.device)
        if given.ndim > 0 and given.numel() == self.num_classes:
            return given.reshape(-1).to(like.dtype)
        if given.numel() != 1:
            raise ConfigError(f"a label of shape {tuple(given.shape)} for {self.num_classes} classes")
        if self.num_classes == 1:
            return given.reshape(1).to(like.dtype)
        if not isinstance(label, Tensor) and not (0 <= label < self.num_classes and label == int(label)):
            raise ConfigError(f"label {label!r} for {self.num_classes} classes", how="Classes are numbered from 0")
        return (torch.arange(self.num_classes, device=like.device) == given).to(like.dtype).reshape(-1)

    def set_standardization(self, mean_D: Tensor, std_D: Tensor) -> None:
        """From now on the module sees (h - mean) / std; a dimension that never varies is only centred."""
        if not self.standardize:
            raise ConfigError("this aggregator was built without standardize=True")
        with torch.no_grad():
            self.input_mean_D.copy_(mean_D)
            self.input_std_D.copy_(torch.where(std_D > 0, std_D, torch.ones_like(std_D)))

    def _check(self, bag_ND: Tensor, coords_N2: Tensor | None) -> None:
        if bag_ND.ndim != 2 or not bag_ND.is_floating_point():
            shape = tuple(bag_ND.shape)
            raise BagError(f"a bag of shape {shape} and {bag_ND.dtype}", "one bag is (instances, dimensions) of floats")
        if bag_ND.shape[0] == 0:
            raise BagError("a bag without instances", "there is nothing to judge it by", "Leave the slide out")
        if bag_ND.shape[1] != self.dim:
            why = f"this aggregator was built for {self.dim}"
            raise BagError(f"vectors of {bag_ND.shape[1]} dimensions", why, "Use the encoder that it was trained with")
        if coords_N2 is not None and tuple(coords_N2.shape) != (bag_ND.shape[0], 2):
            why = f"{bag_ND.shape[0]} instances need one (x, y) each"
            raise BagError(f"coordinates of shape {tuple(coords_N2.shape)}", why)
        if coords_N2 is None and self.needs_coordinates:
            why, how = "this aggregator was built with coordinates=True", "Give coords_N2, or build it without"
            raise BagError("a bag without coordinates", why, how)


# ---------------------------------------------------------------------------------------------------- registry

_REGISTRY: dict[str, tuple[type[Aggregator], dict[str, Any]]] = {}
_Class = TypeVar("_Class", bound=type[Aggregator])


def register(name: str, **preset: Any) -> Callable[[_Class], _Class]:
    """Class decorator: `build(name)` makes this class, with `preset` in place of its defaults."""

    def enter(aggregator: _Class) -> _Class:
        _REGISTRY[name] = (aggregator, preset)
        return aggregator

    return enter


def settings_of(name: str) -> dict[str, Any]:
    """The settings of a method with their defaults."""
    if name not in _REGISTRY:
        known = sorted(_REGISTRY)
        raise ConfigError(f"unknown aggregator {name!r}{nearest(name, known)}", how=f"There are {', '.join(known)}")
    aggregator, preset = _REGISTRY[name]
    return {**_keywords(aggregator), **preset}


def build(name: str, dim: int, num_classes: int, **settings: Any) -> Aggregator:
    """A new aggregator for bags of `dim` dimensions; weights come from torch's random generator.

    `settings` are the keywords of the method's class (`settings_of(name)` lists them). ConfigError where one is unknown
    or makes no sense.
    """
    defaults = settings_of(name)
    for what, value in (("dim", dim), ("num_classes", num_classes)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{what}={value!r}", "it must be a whole number above 0")
    for key in settings:
        if key not in defaults:
            how = f"{name} has {', '.join(defaults)}"
            raise ConfigError(f"unknown setting {key!r} of aggregator {name}{nearest(key, list(defaults))}", how=how)
    resolved = {**defaults, **settings}
    module = _REGISTRY[name][0](dim, num_classes, **resolved)
    module.config = {"name": name, "dim": dim, "num_classes": num_classes, **resolved}
    return module


def _keywords(aggregator: type[Aggregator]) -> dict[str, Any]:
    parameters = inspect.signature(aggregator).parameters.values()
    return {each.name: each.default for each in parameters if each.name not in ("dim", "num_classes")}


def nearest(name: str, known: list[str]) -> str:
    """The end of an error message that names what was probably meant."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f", did you mean {close[0]!r}?" if close else ""


def check_choice(setting: str, value: Any, choices: tuple[Any, ...]) -> None:
    """ConfigError unless `value` is one of `choices`."""
    if value not in choices:
        meant = nearest(value, [each for each in choices if isinstance(each, str)]) if isinstance(value, str) else ""
        raise ConfigError(f"{setting}={value!r}{meant}", how=f"Choose one of {', '.join(map(repr, choices))}")


def check_range(setting: str, value: float, low: float, high: float = float("inf"), whole: bool = False) -> None:
    """ConfigError unless `value` is a number from `low` to `high`, and a whole one where asked."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not low <= value <= high or (whole and value != int(value)):
        kind = "whole number" if whole else "number"
        span = f"of at least {low}" if high == float("inf") else f"from {low} to {high}"
        raise ConfigError(f"{setting}={value!r}", f"it must be a {kind} {span}")
