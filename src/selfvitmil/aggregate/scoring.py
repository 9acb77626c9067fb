"""What a trained aggregator says of bags, in plain numbers: probabilities, both streams, entropy, critical instance.

`score` tells it of slides, `score_tiles` of their tiles too. Both go through one forward pass (`_passes`), so what is
told of a slide is the same to the bit; and it depends on that slide's bag alone, not on those scored along with it.

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

from selfvitmil.aggregate.chowder import Chowder
from selfvitmil.aggregate.contract import Aggregator, AggregatorOutput
from selfvitmil.aggregate.dsmil import DsmilOutput
from selfvitmil.aggregate.store import BagStore, few_threads
from selfvitmil.bags import Bag
from selfvitmil.errors import BagError

MAX_EFFECT_INSTANCES = 4096
"""Instances of the largest bag that effects are computed for: leaving each out once costs as many bags as it has."""

Floats = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class BagScore:
    """What an aggregator says of one slide."""

    slide: str
    probabilities: tuple[float, ...]
    """One number where the label is binary (that of being positive), else one per class."""
    max_probabilities: tuple[float, ...] | None
    """Of DSMIL's critical instances alone."""
    bag_probabilities: tuple[float, ...] | None
    """Of DSMIL's attention stream alone."""
    attention_entropy: float | None
    """Of the positive or predicted class, as a share of log N: 1 means that all instances get the same attention."""
    critical: int | None
    """The instance with most evidence for that class: DSMIL's critical one, else by attention, else by logit."""


class Judgement(NamedTuple):
    """The same as tensors on the device, none of which has been waited for."""

    probabilities_C: Tensor
    entropy: Tensor
    """NaN where the method has no attention or the bag one instance."""
    evidence_N: Tensor
    """Of each instance for that class, larger is more."""
    streams_2C: Tensor | None
    """Probabilities of DSMIL's critical instances and of its attention."""


def score(module: Aggregator, bags: Sequence[Bag], *, store: BagStore | None = None) -> list[BagScore]:
    """Score bags whole, on the store's device, else on the module's; the module itself stays as and where it is.

    BagError where a bag has another dimension than the module, no instance, or values that are not numbers.
    """
    store = store or BagStore(next(module.parameters()).device)
    judged = [each.judgement for each in _passes(module, bags, store)]
    return [_plain(bag.slide, *values) for bag, values in zip(bags, _fetched(judged), strict=True)]


@dataclass(frozen=True, eq=False)
class TileScores:
    """What an aggregator says of one slide and of each of its tiles; a column per class, one where it is binary."""

    bag: BagScore
    attention_NC: Floats | None
    """Weights that sum to 1 over the bag; None where there are none, or none that show evidence for the class."""
    instance_NC: Floats | None
    """Probabilities of the tile alone, larger for what speaks for the class; None where the method has none."""
    effect_NC: Floats | None = None
    """What the slide's probability loses when the tile is taken out; only where it was asked for."""


def score_tiles(
    module: Aggregator, bags: Sequence[Bag], *, store: BagStore | None = None, effect: bool = False
) -> Iterator[TileScores]:
    """Score bags with their tiles, one after the other; `.bag` is what `score` gives, to the bit.

    `effect=True` also leaves every tile out once, which takes as many passes as there are tiles. BagError as of
    `score`, and with `effect` for a bag of more than `MAX_EFFECT_INSTANCES` tiles.
    """
    store = store or BagStore(next(module.parameters()).device)
    for bag in bags if effect else ():
        check_effect(bag)
    for each in _passes(module, bags, store):
        effect_NC = _effects(each, store) if effect else None
        bag_score = _plain(each.bag.slide, *_fetched([each.judgement])[0])
        attention_NC = each.output.attention_NC if each.module.attention_is_evidence else None
        yield TileScores(bag_score, _floats(attention_NC), _floats(each.instance_NC), effect_NC)


class _Pass(NamedTuple):
    """One bag's way through an aggregator."""

    bag: Bag
    module: Aggregator
    """On the store's device, ready to judge."""
    features_ND: Tensor
    coords_N2: Tensor | None
    output: AggregatorOutput
    judgement: Judgement
    instance_NC: Tensor | None


def _passes(module: Aggregator, bags: Sequence[Bag], store: BagStore) -> Iterator[_Pass]:
    """The forward pass of every bag; nothing is taken from the device."""
    for bag in bags:
        if bag.dim != module.dim:
            why = f"the aggregator was trained on {module.dim}"
            raise BagError(f"{bag.slide}: vectors of {bag.dim} dimensions", why, "Use the encoder it was trained with")
    store.check(bags)
    module = copy.deepcopy(module).to(store.device).eval()
    for bag, following in zip(bags, [*bags[1:], None], strict=False):
        # Not inference_mode: what is uploaded here may be trained on later. Threads by this bag alone: the others
        # must not change a bit of its score. Nothing of this reaches the caller, who goes on outside of the block.
        with torch.no_grad(), few_threads([bag], store.device):
            features_ND = store.features(bag)
            if following is not None:
                store.prefetch(following)
            coords_N2 = store.coords(bag) if module.needs_coordinates else None
            output = module(features_ND, coords_N2)
            told = judge(module, output), _instance_probabilities(module, output)
        yield _Pass(bag, module, features_ND, coords_N2, output, *told)


def judge(module: Aggregator, output: AggregatorOutput, of_class: int | None = None) -> Judgement:
    """What the output says, for the class `of_class`, or the one that it finds most probable."""
    probabilities_C = module.probabilities(output)
    column = probabilities_C.argmax(keepdim=True) if of_class is None else slice(of_class, of_class + 1)
    entropy = probabilities_C.new_full((), math.nan)
    if output.attention_NC is not None and len(output.attention_NC) > 1:
        attention_N = output.attention_NC[:, column].squeeze(1)
        tiny = torch.finfo(attention_N.dtype).tiny
        entropy = -(attention_N * attention_N.clamp(min=tiny).log()).sum() / math.log(len(attention_N))
    streams_2C = None
    if isinstance(output, DsmilOutput):
        streams_2C = torch.stack([output.max_logits_C.sigmoid(), output.bag_logits_C.sigmoid()])
    return Judgement(probabilities_C, entropy, evidence(module, output)[:, column].squeeze(1), streams_2C)


def evidence(module: Aggregator, output: AggregatorOutput) -> Tensor:
    """Evidence (N, C) of the instances for the classes: the logits that DSMIL picks by, else attention, else logits.

    CHOWDER's network reads highest and lowest scores alike, so it may learn to score what speaks for a class lowest.
    Its scores are turned round where a bag of nothing but its lowest score would be more of the class.
    """
    if output.attention_NC is not None and not isinstance(output, DsmilOutput):
        return output.attention_NC
    scores_NC = _instance_logits(module, output)
    assert scores_NC is not None
    return scores_NC


def _instance_logits(module: Aggregator, output: AggregatorOutput) -> Tensor | None:
    """Logits (N, C) of the instances, turned so that larger speaks for the class."""
    scores_NC = output.instance_logits_NC
    if scores_NC is None or not isinstance(module, Chowder):
        return scores_NC
    ends_2C = torch.stack([scores_NC.amax(0), scores_NC.amin(0)])
    highest_C, lowest_C = module.slide(ends_2C[:, :, None].expand(-1, -1, module.top + module.bottom))[..., 0]
    return torch.where(highest_C >= lowest_C, scores_NC, -scores_NC)


def _instance_probabilities(module: Aggregator, output: AggregatorOutput) -> Tensor | None:
    logits_NC = _instance_logits(module, output)
    return None if logits_NC is None else module.instance_probabilities(logits_NC)


# ---------------------------------------------------------------------------------------------------- leaving out


def check_effect(bag: Bag) -> None:
    """BagError for a bag that has too many tiles for effects."""
    if len(bag) > MAX_EFFECT_INSTANCES:
        raise BagError(
            f"{bag.slide}: {len(bag)} tiles are too many to leave each of them out once",
            f"that would be as many passes over the whole bag; the limit is {MAX_EFFECT_INSTANCES}",
            "Map attention or instance scores instead (localize.score)",
        )


def _effects(whole: _Pass, store: BagStore) -> Floats:
    """(N, C) the slide's probability minus that of the bag without the tile; 0 where nothing else would be left."""
    number = len(whole.features_ND)
    if number == 1:
        return np.zeros((1, whole.module.num_classes), np.float32)
    with torch.no_grad(), few_threads([whole.bag], store.device):
        rest_ND = whole.features_ND[1:].clone()
        rest_N2 = None if whole.coords_N2 is None else whole.coords_N2[1:].clone()
        left = []
        for row in range(number):
            if row:  # the tile before takes the place of this one: one row is copied, not the bag
                rest_ND[row - 1] = whole.features_ND[row - 1]
                if rest_N2 is not None and whole.coords_N2 is not None:
                    rest_N2[row - 1] = whole.coords_N2[row - 1]
            left.append(whole.module.probabilities(whole.module(rest_ND, rest_N2)).double())
        return (whole.judgement.probabilities_C.double() - torch.stack(left)).float().cpu().numpy()


# ---------------------------------------------------------------------------------------------------- on the host


def _floats(values_NC: Tensor | None) -> Floats | None:
    return None if values_NC is None else np.ascontiguousarray(values_NC.float().cpu().numpy())


def _fetched(judged: Sequence[Judgement]) -> list[tuple[list[float], list[list[float]] | None, float, int]]:
    """All judgements on the host, in a few copies for all bags together."""
    if not judged:
        return []
    probabilities = torch.stack([each.probabilities_C for each in judged]).double().tolist()
    entropies = torch.stack([each.entropy for each in judged]).double().tolist()
    critical = torch.stack([each.evidence_N.argmax() for each in judged]).tolist()
    streams = [each.streams_2C for each in judged if each.streams_2C is not None]
    listed = torch.stack(streams).double().tolist() if streams else [None] * len(judged)
    return list(zip(probabilities, listed, entropies, critical, strict=True))


def _plain(
    slide: str, probabilities: list[float], streams: list[list[float]] | None, entropy: float, critical: int
) -> BagScore:
    of_max, of_bag = (None, None) if streams is None else (tuple(each) for each in streams)
    known = None if math.isnan(entropy) else entropy
    return BagScore(slide, tuple(probabilities), of_max, of_bag, known, critical)
