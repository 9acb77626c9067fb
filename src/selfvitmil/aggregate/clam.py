"""CLAM-SB: gated attention pooling plus a clustering loss on the most and least attended instances.

M. Y. Lu, D. F. K. Williamson, T. Y. Chen, R. J. Chen, M. Barbieri and F. Mahmood, "Data-efficient and weakly supervised
computational pathology on whole-slide images", Nature Biomedical Engineering 5, 2021, arXiv:2004.09666.

The bag branch is ABMIL with gated attention. In addition each class has a binary instance classifier. It is trained on
pseudo-labels: the `k` most attended instances of a slide are positive for the slide's class and the `k` least attended
are negative. With `subtyping` (mutually exclusive classes) the most attended instances are also negative for all other
classes. Loss:

    bag_weight * cross-entropy(bag) + (1 - bag_weight) * mean over those instances of softplus(margin - y (in - out))

with y = +1 or -1; the margin is 1 for `svm` (smooth top-1 SVM at temperature 1, Berrada et al., ICLR 2018,
arXiv:1802.07595) and 0 for `ce` (cross-entropy). A bag of fewer than 2k instances gives N // 2 to each side; a single
instance has no instance loss. For a binary label there are two instance classifiers, "negative" and "positive";
the instance logits are those of "positive".

N instances, D dimensions, H hidden units, C classes, K selected instances.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from selfvitmil.aggregate.abmil import ABMIL
from selfvitmil.aggregate.base import AggregatorOutput, check_choice, check_range, register
from selfvitmil.aggregate.chunked_bag import ChunkedBag


@dataclass(frozen=True, eq=False)
class CLAMOutput(AggregatorOutput):
    """Adds the logits (in minus out) of the selected instances for every instance classifier."""

    most_attended_KC: Tensor
    least_attended_KC: Tensor


@register("clam-sb")
class CLAM_SB(ABMIL):
    """Single-branch CLAM (Lu et al., Nature Biomedical Engineering 2021, arXiv:2004.09666).

    Args:
        dim: Feature dimension D of the embeddings.
        num_classes: Number of classes C; 1 means a binary label with a single logit.
        hidden: Units of the linear layer with ReLU in front of the attention; 0 uses the embeddings as they are.
        attention_dim: Units of the gated attention network.
        dropout: Dropout rate on the hidden layer and inside the attention network.
        k: Number of most and of least attended instances in the instance loss.
        bag_weight: Weight of the bag loss; the instance loss has the weight 1 - bag_weight.
        instance_loss: "svm" (smooth SVM loss) or "ce" (cross-entropy).
        subtyping: Treat the classes as mutually exclusive in the instance loss.
        standardize: Standardize each input dimension; statistics are set by `set_standardization`.

    The output has `attention` (N, C), equal for all classes, and `instance_logits` (N, C).
    """

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

    def aggregate(self, bag: ChunkedBag, coords_N2: Tensor | None) -> CLAMOutput:
        hidden = self.hidden_rows(bag)
        attention_N1 = self.attention_logits(hidden).softmax(0)
        logits_C = self.classifier(hidden.pool(attention_N1)[0])
        two_way = hidden.project(self.instance_classifiers)
        evidence_NC = two_way[:, 1::2] - two_way[:, 0::2]
        order_N = attention_N1[:, 0].detach().argsort(descending=True, stable=True)
        k = min(self.k, len(bag) // 2)
        return CLAMOutput(
            logits_C=logits_C,
            attention_NC=attention_N1.expand(-1, self.num_classes),
            instance_logits_NC=evidence_NC[:, 1:] if self.num_classes == 1 else evidence_NC,
            most_attended_KC=evidence_NC.index_select(0, order_N[:k]),
            least_attended_KC=evidence_NC.index_select(0, order_N[len(bag) - k :]),
        )

    def loss(self, output: AggregatorOutput, label: Tensor | float) -> Tensor:
        """Return the weighted sum of bag loss and instance loss; the module's docstring has the formula."""
        assert isinstance(output, CLAMOutput)
        bag = self.bag_loss(output.logits_C, label)
        return self.bag_weight * bag + (1 - self.bag_weight) * self._instance_loss(output, label)

    def instance_probabilities(self, logits_NC: Tensor) -> Tensor:
        """Return one sigmoid per class for any number of classes: each class has its own binary classifier."""
        return logits_NC.sigmoid()

    def _instance_loss(self, output: CLAMOutput, label: Tensor | float) -> Tensor:
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
