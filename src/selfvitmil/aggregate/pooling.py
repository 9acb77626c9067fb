"""Instance pooling: a linear scorer judges every instance alone; the bag's logit is a mean, a maximum or a top-k mean.

`mean`: the mean of all instance logits, which is the same number as a linear classifier on the mean embedding.
`max`: the largest instance logit of each class (classical MIL). `topk`: the mean of the k largest of each class. Loss:
cross-entropy of the bag's logits. None has attention. On good self-supervised embeddings these are strong baselines.

N instances, D dimensions, C classes, K picked instances.
"""

from __future__ import annotations

from torch import Tensor, nn

from selfvitmil.aggregate.contract import Aggregator, AggregatorOutput, check_range, register
from selfvitmil.aggregate.rows import Rows


@register("mean")
class MeanPooling(Aggregator):
    """Bag logit = mean of the instance logits = linear classifier of the mean embedding."""

    def __init__(self, dim: int, num_classes: int, *, standardize: bool = False):
        super().__init__(dim, num_classes, standardize)
        self.scorer = nn.Linear(dim, num_classes)

    def aggregate(self, rows: Rows, coords_N2: Tensor | None) -> AggregatorOutput:
        instance_logits_NC = rows.project(self.scorer)
        return AggregatorOutput(instance_logits_NC.mean(0), None, instance_logits_NC)


class _TopPooling(Aggregator):
    def __init__(self, dim: int, num_classes: int, num_top: int, standardize: bool):
        super().__init__(dim, num_classes, standardize)
        check_range("k", num_top, 1, whole=True)
        self.num_top = num_top
        self.scorer = nn.Linear(dim, num_classes)

    def aggregate(self, rows: Rows, coords_N2: Tensor | None) -> AggregatorOutput:
        instance_logits_NC = rows.project(self.scorer)
        _, logits_KC = top_instances(rows, instance_logits_NC, self.scorer, self.num_top)
        return AggregatorOutput(logits_KC.mean(0), None, instance_logits_NC)


@register("max")
class MaxPooling(_TopPooling):
    """Bag logit of a class = that of the instance which speaks most for it."""

    def __init__(self, dim: int, num_classes: int, *, standardize: bool = False):
        super().__init__(dim, num_classes, 1, standardize)


@register("topk")
class TopkPooling(_TopPooling):
    """Bag logit of a class = mean of its `k` largest instance logits; of all where the bag is smaller."""

    def __init__(self, dim: int, num_classes: int, *, k: int = 10, standardize: bool = False):
        super().__init__(dim, num_classes, k, standardize)


def top_instances(rows: Rows, logits_NC: Tensor, scorer: nn.Linear, k: int) -> tuple[Tensor, Tensor]:
    """Places (K, C) of each class's k best instances by a linear scorer, best first, and their logits (K, C).

    The logits are computed again from those rows alone: their gradient then costs K * C rows instead of the whole bag.
    """
    top_KC = logits_NC.detach().topk(min(k, len(rows)), dim=0).indices
    return top_KC, (rows.take(top_KC) * scorer.weight).sum(-1) + scorer.bias
