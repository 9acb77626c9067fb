"""Aggregators by the highest instance scores: mean, max and top-k pooling, CHOWDER, MIL-RNN. None has attention.

**Pooling.** A linear classifier scores every instance. `mean`: the mean of all instance logits, equal to a linear
classifier on the mean embedding. `max`: the largest instance logit of each class, the standard MIL assumption
(T. G. Dietterich, R. H. Lathrop and T. Lozano-Perez, Artificial Intelligence 89, 1997). `topk`: the mean of the k
largest of each class. On good self-supervised embeddings these are strong baselines.

**CHOWDER.** P. Courtiol, E. W. Tramel, M. Sanselme and G. Wainrib, "Classification and Disease Localization in
Histopathology Using Only Global Labels: A Weakly-Supervised Approach", 2018, arXiv:1802.02212. A scorer gives each
instance one score per class; a small MLP takes the `top` highest and `bottom` lowest of them, in descending order, and
returns the class's logit (the same MLP for every class). Two published forms set the defaults:

    form         scorer                       top, bottom   slide MLP               further
    "current"    D -> 128 (sigmoid) -> C      10, 10        20 -> 128 -> 64 -> 1    Xavier-uniform weights, biases 0
    "original"   linear, D -> C               5, 5          10 -> 200 -> 100 -> 1   dropout 0.5, L2 0.5 on the scorer

with sigmoids between the layers. Loss: cross-entropy plus `scorer_l2` times the sum of the scorer's squared weights. A
bag of n < top + bottom instances has too few scores: then slot j of R = top + bottom takes the sorted score number
floor(j n / R). Every score appears about equally often, none is padded, and the rule is continuous at n = R. Gradients
reach only the selected instances.

**MIL-RNN.** G. Campanella, M. G. Hanna, L. Geneslaw et al., "Clinical-grade computational pathology using weakly
supervised deep learning on whole slide images", Nature Medicine 25, 2019. Stage 1: a linear scorer, trained with the
slide label on the highest-scoring instance of each slide. Stage 2: the `s` highest-scoring instances, in descending
order, are read by h_t = relu(W1 x_t + W2 h_{t-1}); the last state is classified. As the selection is hard and the
embeddings are frozen, no gradient flows from stage 2 to stage 1; so one module trains both at once, and the loss is the
sum of both cross-entropies, of which each term updates its own stage only (`mining_loss`, `sequence_loss`). Instances
are ranked by the probability of the positive class; with C >= 2 by the largest probability of any class but class 0,
the normal class (for C = 2 that is the published two-way scorer). A bag of fewer than `s` instances is a shorter
sequence.

N instances, D dimensions, C classes, K selected instances, R selected scores of CHOWDER, S length of a sequence.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from selfvitmil.aggregate.bag_tensors import ChunkedBag
from selfvitmil.aggregate.base import Aggregator, AggregatorOutput, check_choice, check_range, register


@register("mean")
class MeanPooling(Aggregator):
    """Mean pooling: the bag logit is the mean of the instance logits, a linear classifier of the mean embedding.

    Args:
        dim: Feature dimension D of the embeddings.
        num_classes: Number of classes C; 1 means a binary label with a single logit.
        standardize: Standardize each input dimension; statistics are set by `set_standardization`.

    The output has `instance_logits` (N, C) and no attention. A baseline without a paper of its own.
    """

    def __init__(self, dim: int, num_classes: int, *, standardize: bool = False):
        super().__init__(dim, num_classes, standardize)
        self.scorer = nn.Linear(dim, num_classes)

    def aggregate(self, bag: ChunkedBag, coords_N2: Tensor | None) -> AggregatorOutput:
        instance_logits_NC = bag.project(self.scorer)
        return AggregatorOutput(instance_logits_NC.mean(0), None, instance_logits_NC)


class _TopPooling(Aggregator):
    def __init__(self, dim: int, num_classes: int, num_top: int, standardize: bool):
        super().__init__(dim, num_classes, standardize)
        check_range("k", num_top, 1, whole=True)
        self.num_top = num_top
        self.scorer = nn.Linear(dim, num_classes)

    def aggregate(self, bag: ChunkedBag, coords_N2: Tensor | None) -> AggregatorOutput:
        instance_logits_NC = bag.project(self.scorer)
        _, logits_KC = top_instances(bag, instance_logits_NC, self.scorer, self.num_top)
        return AggregatorOutput(logits_KC.mean(0), None, instance_logits_NC)


@register("max")
class MaxPooling(_TopPooling):
    """Max pooling: the bag logit of a class is its largest instance logit (Dietterich et al. 1997).

    Args:
        dim: Feature dimension D of the embeddings.
        num_classes: Number of classes C; 1 means a binary label with a single logit.
        standardize: Standardize each input dimension; statistics are set by `set_standardization`.

    The output has `instance_logits` (N, C) and no attention.
    """

    def __init__(self, dim: int, num_classes: int, *, standardize: bool = False):
        super().__init__(dim, num_classes, 1, standardize)


@register("topk")
class TopKPooling(_TopPooling):
    """Top-k pooling: the bag logit of a class is the mean of its `k` largest instance logits.

    Args:
        dim: Feature dimension D of the embeddings.
        num_classes: Number of classes C; 1 means a binary label with a single logit.
        k: Number of instances per class; all of them where the bag is smaller.
        standardize: Standardize each input dimension; statistics are set by `set_standardization`.

    The output has `instance_logits` (N, C) and no attention. A baseline without a paper of its own.
    """

    def __init__(self, dim: int, num_classes: int, *, k: int = 10, standardize: bool = False):
        super().__init__(dim, num_classes, k, standardize)


def top_instances(bag: ChunkedBag, logits_NC: Tensor, scorer: nn.Linear, k: int) -> tuple[Tensor, Tensor]:
    """Return the indices (K, C) of each class's k highest-scoring instances, highest first, and their logits (K, C).

    The logits are recomputed from those rows alone: their gradient then costs K * C rows instead of the whole bag.
    """
    top_KC = logits_NC.detach().topk(min(k, len(bag)), dim=0).indices
    return top_KC, (bag.take(top_KC) * scorer.weight).sum(-1) + scorer.bias


# ---------------------------------------------------------------------------------------------------- CHOWDER


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
        loss, penalty = self.bag_loss(output.logits_C, label), self.penalty(output)
        return loss if penalty is None else loss + penalty

    def penalty(self, output: AggregatorOutput) -> Tensor | None:
        """Return the L2 penalty on the scorer."""
        if self.scorer_l2 == 0:
            return None
        penalty = self.scorer.weight.square().sum()
        if self.scorer_out is not None:
            penalty = penalty + self.scorer_out.weight.square().sum()
        return self.scorer_l2 * penalty

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


# ---------------------------------------------------------------------------------------------------- MIL-RNN


@dataclass(frozen=True, eq=False)
class MILRNNOutput(AggregatorOutput):
    """Adds the stage 1 logits of the highest-scoring instance."""

    top_logits_C: Tensor


@register("mil-rnn")
class MILRNN(Aggregator):
    """Instance mining and a recurrent aggregator on frozen embeddings (Campanella et al., Nature Medicine 2019).

    Args:
        dim: Feature dimension D of the embeddings.
        num_classes: Number of classes C; 1 means a binary label with a single logit.
        s: Length of the sequence: number of highest-scoring instances.
        hidden: Units of the recurrent state.
        shuffle: Feed the sequence in random order during training.
        standardize: Standardize each input dimension; statistics are set by `set_standardization`.

    The output has `instance_logits` (N, C) and no attention.
    """

    def __init__(
        self,
        dim: int,
        num_classes: int,
        *,
        s: int = 10,
        hidden: int = 128,
        shuffle: bool = False,
        standardize: bool = False,
    ):
        super().__init__(dim, num_classes, standardize)
        check_range("s", s, 1, whole=True)
        check_range("hidden", hidden, 1, whole=True)
        check_choice("shuffle", shuffle, (False, True))
        self.s = s
        self.shuffle = shuffle
        self.waits_for_device = shuffle
        self.scorer = nn.Linear(dim, num_classes)
        self.input = nn.Linear(dim, hidden)
        self.state = nn.Linear(hidden, hidden)
        self.classifier = nn.Linear(hidden, num_classes)

    def aggregate(self, bag: ChunkedBag, coords_N2: Tensor | None) -> MILRNNOutput:
        instance_logits_NC = bag.project(self.scorer)
        top_S = self._ranking_score(instance_logits_NC.detach()).topk(min(self.s, len(bag))).indices
        selected_SD = bag.take(top_S)
        top_logits_C = self.scorer(selected_SD[0])
        if self.shuffle and self.training:
            selected_SD = selected_SD[torch.randperm(len(selected_SD), device=selected_SD.device)]
        inputs_SH = self.input(selected_SD)
        state_H = inputs_SH.new_zeros(inputs_SH.shape[1])
        for input_H in inputs_SH:
            state_H = (input_H + self.state(state_H)).relu()
        return MILRNNOutput(self.classifier(state_H), None, instance_logits_NC, top_logits_C)

    def loss(self, output: AggregatorOutput, label: Tensor | float) -> Tensor:
        """Return the sum of both stages' losses."""
        return self.mining_loss(output, label) + self.sequence_loss(output, label)

    def trained_logits(self, output: AggregatorOutput) -> tuple[Tensor, ...]:
        assert isinstance(output, MILRNNOutput)
        return output.top_logits_C, output.logits_C

    def mining_loss(self, output: AggregatorOutput, label: Tensor | float) -> Tensor:
        """Return the stage 1 loss: cross-entropy of the highest-scoring instance with the slide label."""
        assert isinstance(output, MILRNNOutput)
        return self.bag_loss(output.top_logits_C, label)

    def sequence_loss(self, output: AggregatorOutput, label: Tensor | float) -> Tensor:
        """Return the stage 2 loss: cross-entropy of the recurrent network with the slide label."""
        return self.bag_loss(output.logits_C, label)

    def _ranking_score(self, logits_NC: Tensor) -> Tensor:
        if self.outcome is not None:
            return self.outcome.evidence(logits_NC).amax(1)
        return logits_NC[:, 0] if self.num_classes == 1 else logits_NC.log_softmax(1)[:, 1:].amax(1)
