"""CHOWDER (Courtiol et al. 2018): a slide is judged by its highest and lowest instance scores.

A scorer gives each instance one score per class; a small network sees the `top` highest and `bottom` lowest of them, in
descending order, and returns the class's logit (the same network for every class). Two forms, which set the defaults of
what is not given:

    form         scorer                       top, bottom   slide network           besides
    "current"    D -> 128 (sigmoid) -> C      10, 10        20 -> 128 -> 64 -> 1    Xavier-uniform weights, biases 0
    "original"   linear, D -> C               5, 5          10 -> 200 -> 100 -> 1   dropout 0.5, L2 0.5 on the scorer

with sigmoids between the layers. Loss: cross-entropy plus `scorer_l2` times the sum of the scorer's squared weights.

A bag of n < top + bottom instances has too few scores: then slot j of R = top + bottom takes the sorted score number
floor(j n / R). Every score appears about equally often, none is invented, and at n = R nothing jumps. Gradients reach
only the instances that were picked. There is no attention; the instance logits are the scores.

N instances, D dimensions, C classes, R picked scores.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from selfvitmil.aggregate.contract import Aggregator, AggregatorOutput, check_choice, check_range, register
from selfvitmil.aggregate.rows import Rows

FORMS: dict[str, dict[str, Any]] = {
    "current": {"top": 10, "bottom": 10, "scorer_hidden": 128, "slide_hidden": (128, 64), "dropout": 0.0, "l2": 0.0},
    "original": {"top": 5, "bottom": 5, "scorer_hidden": 0, "slide_hidden": (200, 100), "dropout": 0.5, "l2": 0.5},
}


@register("chowder")
class Chowder(Aggregator):
    """Highest and lowest scores, then a small network; None means the form's own value."""

    def __init__(
        self,
        dim: int,
        num_classes: int,
        *,
        form: str = "current",
        top: int | None = None,
        bottom: int | None = None,
        scorer_hidden: int | None = None,
        slide_hidden: Sequence[int] | None = None,
        dropout: float | None = None,
        scorer_l2: float | None = None,
        standardize: bool = False,
    ):
        super().__init__(dim, num_classes, standardize)
        check_choice("form", form, tuple(FORMS))
        chosen = FORMS[form]
        self.top: int = chosen["top"] if top is None else top
        self.bottom: int = chosen["bottom"] if bottom is None else bottom
        self.scorer_l2: float = chosen["l2"] if scorer_l2 is None else scorer_l2
        hidden: int = chosen["scorer_hidden"] if scorer_hidden is None else scorer_hidden
        widths: Sequence[int] = chosen["slide_hidden"] if slide_hidden is None else slide_hidden
        rate: float = chosen["dropout"] if dropout is None else dropout
        check_range("top", self.top, 1, whole=True)
        check_range("bottom", self.bottom, 0, whole=True)
        check_range("scorer_hidden", hidden, 0, whole=True)
        for width in widths:
            check_range("slide_hidden", width, 1, whole=True)
        check_range("dropout", rate, 0, 0.99)
        check_range("scorer_l2", self.scorer_l2, 0)
        self.scorer = nn.Linear(dim, hidden or num_classes)
        self.scorer_out = nn.Linear(hidden, num_classes) if hidden else None
        self.slide = _network([self.top + self.bottom, *widths], rate)
        for layer in self.modules():
            if isinstance(layer, nn.Linear):
                nn.init.xavier_uniform_(layer.weight)
                nn.init.zeros_(layer.bias)

    def aggregate(self, rows: Rows, coords_N2: Tensor | None) -> AggregatorOutput:
        scores_NC = rows.project(self.scorer)
        if self.scorer_out is not None:
            scores_NC = self.scorer_out(scores_NC.sigmoid())
        return AggregatorOutput(self.slide(self._extremes(scores_NC).T)[:, 0], None, scores_NC)

    def loss(self, output: AggregatorOutput, label: Tensor | float) -> Tensor:
        """Cross-entropy plus the penalty on the scorer."""
        loss = self.bag_loss(output.logits_C, label)
        if self.scorer_l2 == 0:
            return loss
        penalty = self.scorer.weight.square().sum()
        if self.scorer_out is not None:
            penalty = penalty + self.scorer_out.weight.square().sum()
        return loss + self.scorer_l2 * penalty

    def _extremes(self, scores_NC: Tensor) -> Tensor:
        """The highest and the lowest scores of each class, descending: (R, C)."""
        num_scores, num_slots = scores_NC.shape[0], self.top + self.bottom
        if num_scores < num_slots:
            slots = torch.arange(num_slots, device=scores_NC.device) * num_scores // num_slots
            return scores_NC.sort(dim=0, descending=True).values[slots]
        highest = scores_NC.topk(self.top, dim=0).values
        lowest = scores_NC.topk(self.bottom, dim=0, largest=False).values.flip(0)
        return torch.cat([highest, lowest])


def _network(widths: list[int], dropout: float) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nn.Sigmoid(), nn.Dropout(dropout)]
    return nn.Sequential(*layers, nn.Linear(widths[-1], 1))
