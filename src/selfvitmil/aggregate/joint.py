"""One target of an aggregator that was trained on several jointly (`outcomes.joint`).

`part_of` returns an aggregator for that target alone: the network is the whole one, of whose outputs only those of the
target are passed on. Scores, heatmaps, results and packages see a model like any other.
"""

from __future__ import annotations

import re
from dataclasses import fields, replace

from torch import Tensor

from selfvitmil.aggregate.bag_tensors import ChunkedBag
from selfvitmil.aggregate.base import Aggregator, AggregatorOutput
from selfvitmil.errors import ArtefactError
from selfvitmil.outcomes.joint import ClassTarget, Joint


class PartOf(Aggregator):
    """The outputs of one target of a jointly trained aggregator.

    Args:
        whole: The aggregator, whose outcome is `Joint`.
        place: Which of its targets.
    """

    def __init__(self, whole: Aggregator, place: int):
        assert isinstance(whole.outcome, Joint)
        part = whole.outcome.parts[place]
        super().__init__(whole.dim, part.num_outputs)
        self.whole = whole
        self.outputs = whole.outcome.outputs[place]
        self.outcome = None if isinstance(part, ClassTarget) else part
        self.config = whole.config
        self.one_sigmoid_per_class = whole.one_sigmoid_per_class
        self.is_order_dependent = whole.is_order_dependent
        self.attention_is_evidence = whole.attention_is_evidence
        self.needs_coordinates = whole.needs_coordinates
        self.waits_for_device = whole.waits_for_device

    def forward(self, bag_ND: Tensor, coords_N2: Tensor | None = None) -> AggregatorOutput:
        """Return the target's columns of everything that the whole aggregator computes per output."""
        return _columns(self.whole(bag_ND, coords_N2), self.outputs)

    def aggregate(self, bag: ChunkedBag, coords_N2: Tensor | None) -> AggregatorOutput:
        return _columns(self.whole.aggregate(bag, coords_N2), self.outputs)

    def tile_logits(self, output: AggregatorOutput) -> Tensor | None:
        return self.whole.tile_logits(output)

    def critical_evidence(self, output: AggregatorOutput) -> Tensor:
        return self.whole.critical_evidence(output)

    def slide_embedding(self, bag_ND: Tensor, coords_N2: Tensor | None = None) -> Tensor:
        return self.whole.slide_embedding(bag_ND, coords_N2)


def part_of(module: Aggregator, place: int | None) -> Aggregator:
    """Return the aggregator of one target of a jointly trained one; the module itself where `place` is None.

    Raises ArtefactError for a module that has no such target.
    """
    if place is None:
        return module
    targets = len(module.outcome.parts) if isinstance(module.outcome, Joint) else 0
    if not 0 <= place < targets:
        raise ArtefactError(
            "the model does not predict this target",
            f"it was trained on {targets} targets jointly" if targets else "it was trained on one target",
            "Train it again",
            code="unreadable-model",
        )
    return PartOf(module, place).train(module.training)


def _columns(output: AggregatorOutput, own: slice) -> AggregatorOutput:
    """Return the output with these columns of all tensors whose last axis is C, by their names."""
    per_output = [each.name for each in fields(output) if re.search(r"_[A-Z0-9]*C$", each.name)]
    values = {name: getattr(output, name) for name in per_output}
    return replace(output, **{name: value[..., own] for name, value in values.items() if value is not None})
