"""Base class, output type and registry of the aggregators, and inference with a trained one.

Input: one bag, (N, D) embeddings in float16, bfloat16, float32 or float64, and optionally the (N, 2) top-left corners
of its tiles as (x, y) in any one unit. Output: an `AggregatorOutput`. A module computes in the dtype of its own weights
and reads the bag in chunks (`ChunkedBag`). `num_classes=1` means a binary label with one logit; with C >= 2 classes
there is one logit per class, which `probabilities` turns into one sigmoid per class (DSMIL) or a softmax (all others).

An outcome other than classes (`predict`) replaces label, loss and probabilities: `logits_C` are then its raw outputs,
`probabilities` its scores.

The trainer uses `loss(output, label)`, `probabilities(output)`, `is_order_dependent`, `config` (rebuilds the module:
`build(**module.config)`), and with `standardize=True` the method `set_standardization`. Scoring and heatmaps use the
per-tile evidence that each aggregator offers: `attention_evidence`, `tile_logits` and `critical_evidence`.

`score` returns probabilities, those of the streams, attention entropy and the critical instance of slides,
`score_tiles` the scores of their tiles as well. Both share one forward pass (`_passes`), so slide scores are
bit-identical; and a score depends on that slide's bag alone, not on the other bags of the call.

N instances, D dimensions, C classes.
"""

from __future__ import annotations

import copy
import difflib
import functools
import inspect
import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from selfvitmil.aggregate.bag_tensors import BagStore, ChunkedBag, few_threads
from selfvitmil.bags import Bag
from selfvitmil.errors import BagError, ConfigError
from selfvitmil.outcomes import Outcome, outcome_from_json


@dataclass(frozen=True, eq=False)
class AggregatorOutput:
    """Output of an aggregator for one bag; the output class of a method may add fields."""

    logits_C: Tensor
    """Slide logit of each class, before `probabilities`."""
    attention_NC: Tensor | None
    """Weights that sum to 1 over the bag, a column per class (equal columns where one attention serves all classes)."""
    instance_logits_NC: Tensor | None
    """Logits of each instance alone, where the method trains an instance classifier."""

    @property
    def logits(self) -> Tensor:
        """Slide logits (C,): the same as `logits_C`."""
        return self.logits_C

    @property
    def attention(self) -> Tensor | None:
        """Attention weights (N, C), None where the method has none: the same as `attention_NC`."""
        return self.attention_NC

    @property
    def instance_logits(self) -> Tensor | None:
        """Instance logits (N, C), None where the method has none: the same as `instance_logits_NC`."""
        return self.instance_logits_NC

    @property
    def stream_logits(self) -> tuple[Tensor, Tensor] | None:
        """Slide logits (C,) of the instance stream and of the attention stream; None for single-stream methods."""
        return None


class Aggregator(nn.Module):
    """Base class of all aggregators. A subclass takes its settings as keywords and implements `aggregate`.

    Args:
        dim: Feature dimension D of the embeddings.
        num_classes: Number of classes C; 1 means a binary label with a single logit.
        standardize: Standardize every input dimension with the mean and standard deviation that
            `set_standardization` sets; the trainer takes them from the training bags.

    Raises ConfigError for an invalid argument.
    """

    one_sigmoid_per_class = False
    """With C >= 2: one sigmoid per class (multi-label) instead of a softmax over the classes."""
    is_order_dependent = False
    """Whether permuting the instances changes more than the order of the outputs."""
    attention_is_evidence = True
    """Whether high attention means evidence for the shown class, so that it may be drawn as a heatmap."""
    needs_coordinates = False
    """Whether `coords_N2` is required."""
    waits_for_device = False
    """Whether a step copies values to the host or reads random states, which CUDA graphs do not allow."""
    needs_classes = False
    """Whether the method is defined for classes only."""
    outcome: Outcome | None = None
    """What it predicts; None for classes."""
    config: dict[str, Any]
    """Arguments of `build` that recreate this module (without its weights); all settings, resolved."""

    input_mean_D: Tensor
    input_std_D: Tensor

    def __init__(self, dim: int, num_classes: int, standardize: bool = False):
        super().__init__()
        for what, value in (("dim", dim), ("num_classes", num_classes)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(
                    f"{what}={value!r}", "it must be a positive integer", code="invalid-aggregator-setting"
                )
        self.dim = dim
        self.num_classes = num_classes
        self.standardize = standardize
        if standardize:
            self.register_buffer("input_mean_D", torch.zeros(dim))
            self.register_buffer("input_std_D", torch.ones(dim))

    def forward(self, bag_ND: Tensor, coords_N2: Tensor | None = None) -> AggregatorOutput:
        """Return the output for one bag of embeddings (N, D); raise BagError where the bag does not fit this module."""
        self._check(bag_ND, coords_N2)
        dtype = next(self.parameters()).dtype
        if self.standardize:
            return self.aggregate(ChunkedBag(bag_ND, dtype, self.input_mean_D, self.input_std_D), coords_N2)
        return self.aggregate(ChunkedBag(bag_ND, dtype), coords_N2)

    def predict(self, outcome: Outcome) -> None:
        """Predict another outcome than classes from now on; ConfigError if the method is defined for classes only."""
        if self.needs_classes:
            raise ConfigError(
                f"{self.config['name']} with the outcome {outcome.kind}",
                "its loss is defined for classes only",
                "Choose another method (train.aggregator, compare.methods)",
                code="method-needs-classes",
            )
        self.outcome = outcome.with_sigmoids() if self.one_sigmoid_per_class else outcome
        self.config = {**self.config, "outcome": self.outcome.to_json()}

    @abstractmethod
    def aggregate(self, bag: ChunkedBag, coords_N2: Tensor | None) -> AggregatorOutput:
        """Return the output for a bag that passed the checks."""

    def trained_logits(self, output: AggregatorOutput) -> tuple[Tensor, ...]:
        """Return the slide logits (C,) that the loss acts on: several for methods with several streams."""
        return (output.logits_C,)

    def penalty(self, output: AggregatorOutput) -> Tensor | None:
        """Return what the method adds to the loss of the logits; None for most."""
        return None

    def outcome_loss(self, outputs: Sequence[AggregatorOutput], target_NT: Tensor) -> Tensor:
        """Return the loss of bags with the encoded targets of `outcome`: the mean over streams, and mean penalties."""
        assert self.outcome is not None
        streams = zip(*(self.trained_logits(output) for output in outputs), strict=True)
        losses = [self.outcome.loss(torch.stack(logits), target_NT) for logits in streams]
        penalties = [term for output in outputs if (term := self.penalty(output)) is not None]
        loss = torch.stack(losses).mean()
        return loss + torch.stack(penalties).mean() if penalties else loss

    def loss(self, output: AggregatorOutput, label: Tensor | float) -> Tensor:
        """Return the method's loss on one bag. `label`: 0 or 1 for one class, a class index, or C targets."""
        return self.bag_loss(output.logits_C, label)

    def bag_loss(self, logits_C: Tensor, label: Tensor | float) -> Tensor:
        """Return the cross-entropy of slide logits and label: sigmoids for one class or multi-label, else softmax."""
        target_C = self.target(label, logits_C)
        if self.num_classes == 1 or self.one_sigmoid_per_class:
            return F.binary_cross_entropy_with_logits(logits_C, target_C)
        return -(target_C * logits_C.log_softmax(0)).sum()

    def probabilities(self, output: AggregatorOutput) -> Tensor:
        """Return the probability of each class (C,); for one class that of the positive class; the outcome's score."""
        if self.outcome is not None:
            return self.outcome.score(output.logits_C)
        if self.num_classes == 1 or self.one_sigmoid_per_class:
            return output.logits_C.sigmoid()
        return output.logits_C.softmax(0)

    def instance_probabilities(self, logits_NC: Tensor) -> Tensor:
        """Return the class probabilities (N, C) of each instance alone, from its logits.

        With another outcome it is the sigmoid of its raw output: above 0.5 means more than the average slide.
        """
        if self.outcome is not None:
            return self.outcome.evidence(logits_NC).sigmoid()
        if self.num_classes == 1 or self.one_sigmoid_per_class:
            return logits_NC.sigmoid()
        return logits_NC.softmax(1)

    # ------------------------------------------------------------------------------------------ per-tile evidence

    def attention_evidence(self, output: AggregatorOutput) -> Tensor | None:
        """Return the attention (N, C) that may be drawn as a heatmap; None where the method offers none."""
        if not self.attention_is_evidence or output.attention_NC is None or self.outcome is None:
            return output.attention_NC if self.attention_is_evidence else None
        return self.outcome.evidence(output.attention_NC)

    def tile_logits(self, output: AggregatorOutput) -> Tensor | None:
        """Return the tile scores (N, C), larger meaning more evidence for the class; None where there are none."""
        return output.instance_logits_NC

    def critical_evidence(self, output: AggregatorOutput) -> Tensor:
        """Return the evidence (N, C) that ranks the tiles: attention where the method has one, else tile logits."""
        evidence_NC = self.tile_logits(output) if output.attention_NC is None else output.attention_NC
        assert evidence_NC is not None
        return evidence_NC

    def slide_embedding(self, bag_ND: Tensor, coords_N2: Tensor | None = None) -> Tensor:
        """Return the embedding of the slide (E,): the input of the layer `classifier`, which all else is computed from.

        Raises ConfigError where the method has none, because it pools scores instead of embeddings.
        """
        layer = getattr(self, "classifier", None)
        if not isinstance(layer, nn.Module):
            raise ConfigError(
                f"{self.config['name']} has no embedding of a slide",
                "it pools the scores of tiles, not their embeddings",
                "Use a model of an attention method, or --pooling mean or max",
                code="no-slide-embedding",
            )
        seen: list[Tensor] = []
        hook = layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        try:
            self(bag_ND, coords_N2)
        finally:
            hook.remove()
        return seen[-1].flatten()

    # ------------------------------------------------------------------------------------------ inputs and labels

    def target(self, label: Tensor | float, like: Tensor) -> Tensor:
        """Return the label as (C,) values between 0 and 1, without synchronizing with the device."""
        given = torch.as_tensor(label, device=like.device)
        if given.ndim > 0 and given.numel() == self.num_classes:
            return given.reshape(-1).to(like.dtype)
        if given.numel() != 1:
            raise ConfigError(
                f"a label of shape {tuple(given.shape)} for {self.num_classes} classes", code="invalid-label"
            )
        if self.num_classes == 1:
            return given.reshape(1).to(like.dtype)
        if not isinstance(label, Tensor) and not (0 <= label < self.num_classes and label == int(label)):
            raise ConfigError(
                f"label {label!r} for {self.num_classes} classes",
                how="Classes are numbered from 0",
                code="invalid-label",
            )
        return (torch.arange(self.num_classes, device=like.device) == given).to(like.dtype).reshape(-1)

    def set_standardization(self, mean_D: Tensor, std_D: Tensor) -> None:
        """Standardize inputs as (h - mean) / std from now on; a constant dimension (std 0) is only centred."""
        if not self.standardize:
            raise ConfigError("this aggregator was built without standardize=True", code="not-standardized")
        with torch.no_grad():
            self.input_mean_D.copy_(mean_D)
            self.input_std_D.copy_(torch.where(std_D > 0, std_D, torch.ones_like(std_D)))

    def _check(self, bag_ND: Tensor, coords_N2: Tensor | None) -> None:
        if bag_ND.ndim != 2 or not bag_ND.is_floating_point():
            shape = tuple(bag_ND.shape)
            raise BagError(
                f"a bag of shape {shape} and {bag_ND.dtype}",
                "one bag is (instances, dimensions) of floats",
                code="invalid-bag-shape",
            )
        if bag_ND.shape[0] == 0:
            raise BagError(
                "a bag without instances", "there is nothing to aggregate", "Exclude the slide", code="empty-bag"
            )
        if bag_ND.shape[1] != self.dim:
            why = f"this aggregator was built for {self.dim}"
            raise BagError(
                f"embeddings of {bag_ND.shape[1]} dimensions",
                why,
                "Use the encoder that it was trained with",
                code="dimension-mismatch",
            )
        if coords_N2 is not None and tuple(coords_N2.shape) != (bag_ND.shape[0], 2):
            why = f"{bag_ND.shape[0]} instances need one (x, y) each"
            raise BagError(f"coordinates of shape {tuple(coords_N2.shape)}", why, code="invalid-coords-shape")
        if coords_N2 is None and self.needs_coordinates:
            why, how = "this aggregator was built with coordinates=True", "Pass coords_N2, or build it without"
            raise BagError("a bag without coordinates", why, how, code="bag-without-coords")


# ---------------------------------------------------------------------------------------------------- registry

CLASSES: dict[str, type[Aggregator]] = {}
"""Name -> class, by `register`."""
_Class = TypeVar("_Class", bound=type[Aggregator])


def register(name: str, **defaults: Any) -> Callable[[_Class], _Class]:
    """Class decorator: `build(name)` makes this class; `defaults` replace defaults of an inherited constructor.

    A module constructed directly gets the same `config` as one from `build`. A class that inherits its constructor
    inherits the description of the arguments, too.
    """

    def enter(aggregator: _Class) -> _Class:
        CLASSES[name] = aggregator
        inherited: Any = aggregator.__init__
        if "__init__" not in vars(aggregator):
            arguments = (aggregator.__base__.__doc__ or "").partition("    Args:")  # pyright: ignore[reportOptionalMemberAccess]
            aggregator.__doc__ = f"{(aggregator.__doc__ or '').rstrip()}\n\n{arguments[1]}{arguments[2]}"
        signature = _with_defaults(inspect.signature(inherited), defaults)

        @functools.wraps(inherited)
        def constructor(self: Aggregator, *args: Any, **kwargs: Any) -> None:
            given = signature.bind(self, *args, **kwargs)
            given.apply_defaults()
            inherited(*given.args, **given.kwargs)
            if type(self) is aggregator:
                _, *arguments = given.arguments.items()
                self.config = {"name": name, **dict(arguments)}

        constructor.__signature__ = signature  # pyright: ignore[reportAttributeAccessIssue]
        aggregator.__init__ = constructor  # pyright: ignore[reportAttributeAccessIssue]
        return aggregator

    return enter


def _with_defaults(signature: inspect.Signature, defaults: dict[str, Any]) -> inspect.Signature:
    parameters = signature.parameters.values()
    return signature.replace(
        parameters=[each.replace(default=defaults.get(each.name, each.default)) for each in parameters]
    )


def settings_of(name: str) -> dict[str, Any]:
    """Return the settings of a method with their defaults; raise ConfigError for an unknown name."""
    if name not in CLASSES:
        known = sorted(CLASSES)
        raise ConfigError(
            f"unknown aggregator {name!r}{nearest(name, known)}",
            how=f"There are {', '.join(known)}",
            code="unknown-aggregator",
        )
    parameters = inspect.signature(CLASSES[name]).parameters.values()
    return {each.name: each.default for each in parameters if each.name not in ("dim", "num_classes")}


def build(
    name: str, dim: int, num_classes: int, outcome: Mapping[str, Any] | None = None, **settings: Any
) -> Aggregator:
    """Return a new aggregator for embeddings of `dim` dimensions; weights come from torch's random generator.

    `name` is one of `selfvitmil.aggregate.NAMES`; `settings` are keywords of the method's class (`settings_of(name)`
    lists them); `outcome` describes another outcome than classes (`Outcome.to_json`). `selfvitmil.aggregators` offers
    the classes themselves. Raises ConfigError for an unknown name or setting and for an invalid value.
    """
    defaults = settings_of(name)
    for key in settings:
        if key not in defaults:
            how = f"{name} has {', '.join(defaults)}"
            raise ConfigError(
                f"unknown setting {key!r} of aggregator {name}{nearest(key, list(defaults))}",
                how=how,
                code="unknown-aggregator-setting",
            )
    module = CLASSES[name](dim, num_classes, **settings)
    if outcome is not None:
        module.predict(outcome_from_json(outcome))
    return module


def nearest(name: str, known: list[str]) -> str:
    """Return the end of an error message that suggests the closest known name; empty where none is close."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f", did you mean {close[0]!r}?" if close else ""


def check_choice(setting: str, value: Any, choices: tuple[Any, ...]) -> None:
    """Raise ConfigError unless `value` is one of `choices`."""
    if value not in choices:
        meant = nearest(value, [each for each in choices if isinstance(each, str)]) if isinstance(value, str) else ""
        raise ConfigError(
            f"{setting}={value!r}{meant}",
            how=f"Choose one of {', '.join(map(repr, choices))}",
            code="invalid-aggregator-setting",
        )


def check_range(setting: str, value: float, low: float, high: float = float("inf"), whole: bool = False) -> None:
    """Raise ConfigError unless `value` is a number from `low` to `high`, and an integer where `whole` is set."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not low <= value <= high or (whole and value != int(value)):
        kind = "integer" if whole else "number"
        span = f"of at least {low}" if high == float("inf") else f"from {low} to {high}"
        raise ConfigError(
            f"{setting}={value!r}",
            f"it must be {'an' if whole else 'a'} {kind} {span}",
            code="invalid-aggregator-setting",
        )


# ---------------------------------------------------------------------------------------------------- inference

MAX_EFFECT_INSTANCES = 4096
"""Largest bag for leave-one-out effects: they cost one forward pass per instance."""

Floats = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class BagScore:
    """Scores of one slide."""

    slide: str
    probabilities: tuple[float, ...]
    """One value for a binary label (probability of the positive class), else one per class."""
    max_probabilities: tuple[float, ...] | None
    """Probabilities of DSMIL's instance stream (critical instances) alone."""
    bag_probabilities: tuple[float, ...] | None
    """Probabilities of DSMIL's attention stream alone."""
    attention_entropy: float | None
    """Normalized attention entropy (divided by log N) of the positive or predicted class; 1 means uniform attention."""
    critical: int | None
    """Index of the instance with the most evidence for that class (`Aggregator.critical_evidence`)."""


class OutputSummary(NamedTuple):
    """The same as tensors on the device, without synchronization."""

    probabilities_C: Tensor
    entropy: Tensor
    """NaN where the method has no attention or the bag has one instance."""
    evidence_N: Tensor
    """Evidence of each instance for that class; larger is more."""
    streams_2C: Tensor | None
    """Probabilities of DSMIL's instance stream and of its attention stream."""


def score(module: Aggregator, bags: Sequence[Bag], *, store: BagStore | None = None) -> list[BagScore]:
    """Score whole bags on the store's device, else on the module's; the module itself is not changed or moved.

    Raises BagError where a bag has another dimension than the module, no instance, or values that are not finite.
    """
    store = store or BagStore(next(module.parameters()).device)
    summaries = [_Numbers.of(each.summary) for each in _passes(module, bags, store)]
    return [_to_score(bag.slide, *values) for bag, values in zip(bags, _fetch(summaries), strict=True)]


@dataclass(frozen=True, eq=False)
class TileScores:
    """Scores of one slide and of each of its tiles; a column per class, one for a binary label."""

    bag: BagScore
    attention_NC: Floats | None
    """Weights that sum to 1 over the bag; None where the method offers none as evidence for the class."""
    instance_NC: Floats | None
    """Tile probabilities, larger meaning more evidence for the class; None where the method has no tile scores."""
    effect_NC: Floats | None = None
    """Drop of the slide probability when the tile is left out; only where it was requested."""


def score_tiles(
    module: Aggregator, bags: Sequence[Bag], *, store: BagStore | None = None, effect: bool = False
) -> Iterator[TileScores]:
    """Score bags with their tiles, one after the other; `.bag` is bit-identical to the result of `score`.

    `effect=True` adds leave-one-out effects, at the cost of one forward pass per tile. Raises BagError as `score` does,
    and with `effect` for a bag of more than `MAX_EFFECT_INSTANCES` tiles.
    """
    store = store or BagStore(next(module.parameters()).device)
    for bag in bags if effect else ():
        check_effect(bag)
    for each in _passes(module, bags, store):
        effect_NC = _effects(each, store) if effect else None
        bag_score = _to_score(each.bag.slide, *_fetch([_Numbers.of(each.summary)])[0])
        attention_NC = each.module.attention_evidence(each.output)
        yield TileScores(bag_score, _floats(attention_NC), _floats(each.instance_NC), effect_NC)


class _Pass(NamedTuple):
    """Forward pass of one bag through an aggregator."""

    bag: Bag
    module: Aggregator
    """On the store's device, in evaluation mode."""
    features_ND: Tensor
    coords_N2: Tensor | None
    output: AggregatorOutput
    summary: OutputSummary
    instance_NC: Tensor | None


def _passes(module: Aggregator, bags: Sequence[Bag], store: BagStore) -> Iterator[_Pass]:
    """Yield the forward pass of every bag; nothing is copied to the host."""
    for bag in bags:
        if bag.dim != module.dim:
            why = f"the aggregator was trained on {module.dim}"
            what, how = f"{bag.slide}: embeddings of {bag.dim} dimensions", "Use the encoder it was trained with"
            raise BagError(what, why, how, code="dimension-mismatch")
    store.check(bags)
    if module.training or not _is_on(module, store.device):
        module = copy.deepcopy(module).to(store.device).eval()  # the caller's stays as it is
    for bag, following in zip(bags, [*bags[1:], None], strict=False):
        # Not inference_mode: tensors uploaded here may be used for training later. The thread count depends on this
        # bag alone, so that other bags cannot change its score; the context ends before control returns to the caller.
        with torch.no_grad(), few_threads([bag], store.device):
            features_ND = store.features(bag)
            if following is not None:
                store.prefetch(following)
            coords_N2 = store.coords(bag) if module.needs_coordinates else None
            output = module(features_ND, coords_N2)
            results = summarize_output(module, output), _tile_probabilities(module, output)
        yield _Pass(bag, module, features_ND, coords_N2, output, *results)


def _is_on(module: Aggregator, device: torch.device) -> bool:
    """Whether all weights are on a device; `cuda` without a number is the current GPU."""
    index = torch.cuda.current_device() if device.type == "cuda" and device.index is None else device.index
    return all(each.device.type == device.type and each.device.index == index for each in module.parameters())


def summarize_output(module: Aggregator, output: AggregatorOutput, of_class: int | None = None) -> OutputSummary:
    """Return probabilities, attention entropy and tile evidence for `of_class`, by default the most probable class."""
    probabilities_C = module.probabilities(output)
    if module.outcome is not None:
        return _summarize_outcome(module, module.outcome, output, probabilities_C)
    column = probabilities_C.argmax(keepdim=True) if of_class is None else slice(of_class, of_class + 1)
    entropy = probabilities_C.new_full((), math.nan)
    if output.attention_NC is not None and len(output.attention_NC) > 1:
        attention_N = output.attention_NC[:, column].squeeze(1)
        tiny = torch.finfo(attention_N.dtype).tiny
        entropy = -(attention_N * attention_N.clamp(min=tiny).log()).sum() / math.log(len(attention_N))
    streams_2C = None
    if output.stream_logits is not None:
        streams_2C = torch.stack([logits_C.sigmoid() for logits_C in output.stream_logits])
    evidence_NC = module.critical_evidence(output)
    return OutputSummary(probabilities_C, entropy, evidence_NC[:, column].squeeze(1), streams_2C)


def _summarize_outcome(
    module: Aggregator, outcome: Outcome, output: AggregatorOutput, scores_K: Tensor
) -> OutputSummary:
    """Return the same of another outcome: entropy of the mean attention, evidence in one column."""
    entropy = scores_K.new_full((), math.nan)
    if output.attention_NC is not None and len(output.attention_NC) > 1:
        attention_N = output.attention_NC.mean(1)
        tiny = torch.finfo(attention_N.dtype).tiny
        entropy = -(attention_N * attention_N.clamp(min=tiny).log()).sum() / math.log(len(attention_N))
    streams = output.stream_logits
    streams_2K = None if streams is None else torch.stack([outcome.score(logits_C) for logits_C in streams])
    return OutputSummary(scores_K, entropy, module.critical_evidence(output).mean(1), streams_2K)


def _tile_probabilities(module: Aggregator, output: AggregatorOutput) -> Tensor | None:
    logits_NC = module.tile_logits(output)
    return None if logits_NC is None else module.instance_probabilities(logits_NC)


# ---------------------------------------------------------------------------------------------------- leave-one-out


def check_effect(bag: Bag) -> None:
    """Raise BagError for a bag that has too many tiles for leave-one-out effects."""
    if len(bag) > MAX_EFFECT_INSTANCES:
        raise BagError(
            f"{bag.slide}: {len(bag)} tiles are too many for leave-one-out effects",
            f"each tile costs one forward pass over the whole bag; the limit is {MAX_EFFECT_INSTANCES}",
            "Use attention or tile scores for the heatmap instead (localize.score)",
            code="too-many-tiles",
        )


def _effects(whole: _Pass, store: BagStore) -> Floats:
    """Return (N, C) slide probability minus that of the bag without the tile; 0 for a bag of one tile."""
    number = len(whole.features_ND)
    if number == 1:
        return np.zeros((1, len(whole.summary.probabilities_C)), np.float32)
    with torch.no_grad(), few_threads([whole.bag], store.device):
        rest_ND = whole.features_ND[1:].clone()
        rest_N2 = None if whole.coords_N2 is None else whole.coords_N2[1:].clone()
        left = []
        for row in range(number):
            if row:  # swap in the previous tile: one row is copied instead of the bag
                rest_ND[row - 1] = whole.features_ND[row - 1]
                if rest_N2 is not None and whole.coords_N2 is not None:
                    rest_N2[row - 1] = whole.coords_N2[row - 1]
            left.append(whole.module.probabilities(whole.module(rest_ND, rest_N2)).double())
        return (whole.summary.probabilities_C.double() - torch.stack(left)).float().cpu().numpy()


# ---------------------------------------------------------------------------------------------------- on the host


def _floats(values_NC: Tensor | None) -> Floats | None:
    return None if values_NC is None else np.ascontiguousarray(values_NC.float().cpu().numpy())


class _Numbers(NamedTuple):
    """What is kept of a summary until all bags are scored: nothing per tile, which a large cohort has millions of."""

    all_X: Tensor
    """Entropy, critical instance, probabilities and, where there are any, those of the streams."""
    num_classes: int

    @classmethod
    def of(cls, summary: OutputSummary) -> _Numbers:
        parts = [summary.entropy.reshape(1), summary.evidence_N.argmax().reshape(1), summary.probabilities_C]
        if summary.streams_2C is not None:
            parts.append(summary.streams_2C.flatten())
        return cls(torch.cat([each.double() for each in parts]), len(summary.probabilities_C))


def _fetch(summaries: Sequence[_Numbers]) -> list[tuple[list[float], list[list[float]] | None, float, int]]:
    """Copy all summaries to the host, in one copy for all bags together."""
    rows = torch.stack([each.all_X for each in summaries]).tolist() if summaries else []
    found: list[tuple[list[float], list[list[float]] | None, float, int]] = []
    for (entropy, critical, *values), each in zip(rows, summaries, strict=True):
        probabilities, streams = values[: each.num_classes], values[each.num_classes :]
        listed = [streams[: each.num_classes], streams[each.num_classes :]] if streams else None
        found.append((probabilities, listed, entropy, int(critical)))
    return found


def _to_score(
    slide: str, probabilities: list[float], streams: list[list[float]] | None, entropy: float, critical: int
) -> BagScore:
    of_max, of_bag = (None, None) if streams is None else (tuple(each) for each in streams)
    known = None if math.isnan(entropy) else entropy
    return BagScore(slide, tuple(probabilities), of_max, of_bag, known, critical)
