"""CHOWDER: a slide is classified from its highest and lowest instance scores.

P. Courtiol, E. W. Tramel, M. Sanselme and G. Wainrib, "Classification and Disease Localization in Histopathology Using
Only Global Labels: A Weakly-Supervised Approach", 2018, arXiv:1802.02212.

A scorer gives each instance one score per class; a small MLP takes the `top` highest and `bottom` lowest of them, in
descending order, and returns the class's logit (the same MLP for every class). Two published forms set the defaults:

    form         scorer                       top, bottom   slide MLP               further
    "current"    D -> 128 (sigmoid) -> C      10, 10        20 -> 128 -> 64 -> 1    Xavier-uniform weights, biases 0
    "original"   linear, D -> C               5, 5          10 -> 200 -> 100 -> 1   dropout 0.5, L2 0.5 on the scorer

with sigmoids between the layers. Loss: cross-entropy plus `scorer_l2` times the sum of the scorer's squared weights.

A bag of n < top + bottom instances has too few scores: then slot j of R = top + bottom takes the sorted score number
floor(j n / R). Every score appears about equally often, none is padded, and the rule is continuous at n = R. Gradients
reach only the selected instances. There is no attention; the instance logits are the scores.

N instances, D dimensions, C classes, R selected scores.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from selfvitmil.aggregate.base import Aggregator, AggregatorOutput, check_choice, check_range, register
from selfvitmil.aggregate.chunked_bag import ChunkedBag

FORMS: dict[str, dict[str, Any]] = {
    "current": {"top": 10, "bottom": 10, "scorer_hidden": 128, "slide_hidden": (128, 64), "dropout": 0.0, "l2": 0.0},
    "original": {"top": 5, "bottom": 5, "scorer_hidden": 0, "slide_hidden": (200, 100), "dropout": 0.5, "l2": 0.5},
}


@register("chowder")
class CHOWDER(Aggregator):
    """Extreme instance scores and an MLP (Courtiol et al. 2018, arXiv:1802.02212); None takes the form's value.

    Args:
        dim: Feature dimension D of the embeddings.
        num_classes: Number of classes C; 1 means a binary label with a single logit.
        form: "current" (Owkin's code of 2023) or "original" (the paper): the defaults of the arguments below.
        top: Number of highest scores per class.
        bottom: Number of lowest scores per class.
        scorer_hidden: Hidden units of the instance scorer; 0 makes it linear.
        slide_hidden: Widths of the hidden layers of the slide MLP.
        dropout: Dropout rate in the slide MLP.
        scorer_l2: Weight of the L2 penalty on the scorer.
        standardize: Standardize each input dimension; statistics are set by `set_standardization`.

    The output has `instance_logits` (N, C) and no attention.
    """

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

    def aggregate(self, bag: ChunkedBag, coords_N2: Tensor | None) -> AggregatorOutput:
        scores_NC = bag.project(self.scorer)
        if self.scorer_out is not None:
            scores_NC = self.scorer_out(scores_NC.sigmoid())
        return AggregatorOutput(self.slide(self._extremes(scores_NC).T)[:, 0], None, scores_NC)

    def loss(self, output: AggregatorOutput, label: Tensor | float) -> Tensor:
        """Return the cross-entropy plus the L2 penalty on the scorer."""
        loss = self.bag_loss(output.logits_C, label)
        if self.scorer_l2 == 0:
            return loss
        penalty = self.scorer.weight.square().sum()
        if self.scorer_out is not None:
            penalty = penalty + self.scorer_out.weight.square().sum()
        return loss + self.scorer_l2 * penalty

    def tile_logits(self, output: AggregatorOutput) -> Tensor | None:
        """Return the instance scores (N, C), oriented so that larger means more evidence for the class.

        The slide MLP takes highest and lowest scores alike, so training may give evidence for a class the lowest
        scores. A class's scores are negated where a bag with only its lowest score would get the higher logit.
        """
        scores_NC = output.instance_logits_NC
        assert scores_NC is not None
        ends_2C = torch.stack([scores_NC.amax(0), scores_NC.amin(0)])
        highest_C, lowest_C = self.slide(ends_2C[:, :, None].expand(-1, -1, self.top + self.bottom))[..., 0]
        return torch.where(highest_C >= lowest_C, scores_NC, -scores_NC)

    def _extremes(self, scores_NC: Tensor) -> Tensor:
        """Return the highest and the lowest scores of each class in descending order: (R, C)."""
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
