"""CLAM-SB (Lu et al. 2021): gated attention pooling plus an instance loss on the most and least attended instances.

The bag's side is ABMIL with gated attention. Beside it each class owns a two-way classifier that tells instances of the
class from others. There are no instance labels: the `k` most attended instances of a slide count as instances of its
class and the `k` least attended as none of it. With `subtyping` (classes exclude each other in every instance) the most
attended instances also count as "none of it" for all other classes. Loss:

    bag_weight * cross-entropy(bag) + (1 - bag_weight) * mean over those instances of softplus(margin - y (in - out))

with y = +1 or -1; the margin is 1 for `svm` (the smooth top-1 SVM at temperature 1) and 0 for `ce` (cross-entropy). A
bag of fewer than 2k instances gives N // 2 to each side, a single instance has no instance loss. For one class (binary)
there are two such classifiers, for "negative" and "positive"; the instance logits are those of "positive".

N instances, D dimensions, H hidden units, C classes, K picked instances.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from selfvitmil.aggregate.abmil import Abmil
from selfvitmil.aggregate.contract import AggregatorOutput, check_choice, check_range, register
from selfvitmil.aggregate.rows import Rows


@dataclass(frozen=True, eq=False)
class ClamOutput(AggregatorOutput):
    """Adds the evidence (in minus out) of the picked instances for every instance classifier."""

    most_attended_KC: Tensor
    least_attended_KC: Tensor


@register("clam-sb")
class ClamSb(Abmil):
    """Single-branch CLAM."""

    def __init__(
        self,
        dim: int,
        num_classes: int,
        *,
        hidden: int = 512,
        attention_dim: int = 256,
        dropout: float = 0.25,
        k: int = 8,
        bag_weight: float = 0.7,
        instance_loss: str = "svm",
        subtyping: bool = False,
        standardize: bool = False,
    ):
        super().__init__(
            dim,
            num_classes,
            gated=True,
            hidden=hidden,
            attention_dim=attention_dim,
            dropout=dropout,
            standardize=standardize,
        )
        check_range("k", k, 1, whole=True)
        check_range("bag_weight", bag_weight, 0, 1)
        check_choice("instance_loss", instance_loss, ("svm", "ce"))
        check_choice("subtyping", subtyping, (False, True))
        self.k = k
        self.bag_weight = bag_weight
        self.margin = 1.0 if instance_loss == "svm" else 0.0
        self.subtyping = subtyping
        self.instance_classifiers = nn.Linear(hidden or dim, 2 * max(num_classes, 2))  # out, in; out, in; ...
        for layer in self.modules():
            if isinstance(layer, nn.Linear):
                nn.init.xavier_normal_(layer.weight)
                nn.init.zeros_(layer.bias)

    def aggregate(self, rows: Rows, coords_N2: Tensor | None) -> ClamOutput:
        hidden = self.hidden_rows(rows)
        attention_N1 = self.attention_logits(hidden).softmax(0)
        logits_C = self.classifier(hidden.pool(attention_N1)[0])
        two_way = hidden.project(self.instance_classifiers)
        evidence_NC = two_way[:, 1::2] - two_way[:, 0::2]
        order_N = attention_N1[:, 0].detach().argsort(descending=True, stable=True)
        k = min(self.k, len(rows) // 2)
        return ClamOutput(
            logits_C=logits_C,
            attention_NC=attention_N1.expand(-1, self.num_classes),
            instance_logits_NC=evidence_NC[:, 1:] if self.num_classes == 1 else evidence_NC,
            most_attended_KC=evidence_NC.index_select(0, order_N[:k]),
            least_attended_KC=evidence_NC.index_select(0, order_N[len(rows) - k :]),
        )

    def loss(self, output: AggregatorOutput, label: Tensor | float) -> Tensor:
        """Bag loss and instance loss, weighted; see the head of this file."""
        assert isinstance(output, ClamOutput)
        bag = self.bag_loss(output.logits_C, label)
        return self.bag_weight * bag + (1 - self.bag_weight) * self._instance_loss(output, label)

    def instance_probabilities(self, logits_NC: Tensor) -> Tensor:
        """One sigmoid per class whatever their number: each class has a two-way classifier of its own."""
        return logits_NC.sigmoid()

    def _instance_loss(self, output: ClamOutput, label: Tensor | float) -> Tensor:
        most_KC, least_KC = output.most_attended_KC, output.least_attended_KC
        if most_KC.shape[0] == 0:
            return most_KC.sum()
        of_class_C = self.target(label, output.logits_C)
        if self.num_classes == 1:
            of_class_C = torch.cat([1 - of_class_C, of_class_C])
        inside_C = F.softplus(self.margin - torch.cat([most_KC, -least_KC])).mean(0)
        if not self.subtyping:
            return (of_class_C * inside_C).sum()
        outside_C = F.softplus(self.margin + most_KC).mean(0)
        return (of_class_C * inside_C + (1 - of_class_C) * outside_C).mean()
