"""What a trained aggregator says of bags, in plain numbers: probabilities, both streams, entropy, critical instance.

N instances, C classes.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from selfvitmil.aggregate.chowder import Chowder
from selfvitmil.aggregate.contract import Aggregator, AggregatorOutput
from selfvitmil.aggregate.dsmil import DsmilOutput
from selfvitmil.aggregate.store import BagStore, few_threads
from selfvitmil.bags import Bag
from selfvitmil.errors import BagError


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
    for bag in bags:
        if bag.dim != module.dim:
            why = f"the aggregator was trained on {module.dim}"
            raise BagError(f"{bag.slide}: vectors of {bag.dim} dimensions", why, "Use the encoder it was trained with")
    store.check(bags)
    module = copy.deepcopy(module).to(store.device).eval()
    judged = []
    # Not inference_mode: what is uploaded here may be trained on later.
    with torch.no_grad(), few_threads(bags, store.device):
        for bag, following in zip(bags, [*bags[1:], None], strict=False):
            features_ND = store.features(bag)
            if following is not None:
                store.prefetch(following)
            coords_N2 = store.coords(bag) if module.needs_coordinates else None
            judged.append(judge(module, module(features_ND, coords_N2)))
    return [_plain(bag.slide, *values) for bag, values in zip(bags, _fetched(judged), strict=True)]


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
    scores_NC = output.instance_logits_NC
    assert scores_NC is not None
    if not isinstance(module, Chowder):
        return scores_NC
    ends_2C = torch.stack([scores_NC.amax(0), scores_NC.amin(0)])
    highest_C, lowest_C = module.slide(ends_2C[:, :, None].expand(-1, -1, module.top + module.bottom))[..., 0]
    return torch.where(highest_C >= lowest_C, scores_NC, -scores_NC)


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
