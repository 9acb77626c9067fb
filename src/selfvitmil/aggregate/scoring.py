"""Inference with a trained aggregator: probabilities, stream probabilities, attention entropy, critical instance.

`score` returns these for slides, `score_tiles` for their tiles as well. Both share one forward pass (`_passes`), so
slide scores are bit-identical; and a score depends on that slide's bag alone, not on the other bags of the call.

N instances, C classes.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from selfvitmil.aggregate.bag_tensors import BagStore, few_threads
from selfvitmil.aggregate.base import Aggregator, AggregatorOutput
from selfvitmil.bags import Bag
from selfvitmil.errors import BagError

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
    summaries = [each.summary for each in _passes(module, bags, store)]
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
        bag_score = _to_score(each.bag.slide, *_fetch([each.summary])[0])
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
    module = copy.deepcopy(module).to(store.device).eval()
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


def summarize_output(module: Aggregator, output: AggregatorOutput, of_class: int | None = None) -> OutputSummary:
    """Return probabilities, attention entropy and tile evidence for `of_class`, by default the most probable class."""
    probabilities_C = module.probabilities(output)
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
        return np.zeros((1, whole.module.num_classes), np.float32)
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


def _fetch(summaries: Sequence[OutputSummary]) -> list[tuple[list[float], list[list[float]] | None, float, int]]:
    """Copy all summaries to the host, in a few copies for all bags together."""
    if not summaries:
        return []
    probabilities = torch.stack([each.probabilities_C for each in summaries]).double().tolist()
    entropies = torch.stack([each.entropy for each in summaries]).double().tolist()
    critical = torch.stack([each.evidence_N.argmax() for each in summaries]).tolist()
    streams = [each.streams_2C for each in summaries if each.streams_2C is not None]
    listed = torch.stack(streams).double().tolist() if streams else [None] * len(summaries)
    return list(zip(probabilities, listed, entropies, critical, strict=True))


def _to_score(
    slide: str, probabilities: list[float], streams: list[list[float]] | None, entropy: float, critical: int
) -> BagScore:
    of_max, of_bag = (None, None) if streams is None else (tuple(each) for each in streams)
    known = None if math.isnan(entropy) else entropy
    return BagScore(slide, tuple(probabilities), of_max, of_bag, known, critical)
