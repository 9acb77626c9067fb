"""Instance pooling: a linear classifier scores every instance; the bag logit is the mean, maximum or top-k mean.

`mean`: the mean of all instance logits, equal to a linear classifier on the mean embedding. `max`: the largest instance
logit of each class, the standard MIL assumption (T. G. Dietterich, R. H. Lathrop and T. Lozano-Perez, Artificial
Intelligence 89, 1997). `topk`: the mean of the k largest of each class. Loss: cross-entropy of the bag logits. None has
attention. On good self-supervised embeddings these are strong baselines.

N instances, D dimensions, C classes, K selected instances.
"""

from __future__ import annotations

from torch import Tensor, nn

from selfvitmil.aggregate.base import Aggregator, AggregatorOutput, check_range, register
from selfvitmil.aggregate.chunked_bag import ChunkedBag


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
