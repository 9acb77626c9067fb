"""MIL-RNN: top-1 instance mining, then a recurrent network over the highest-scoring instances.

G. Campanella, M. G. Hanna, L. Geneslaw et al., "Clinical-grade computational pathology using weakly supervised deep
learning on whole slide images", Nature Medicine 25, 2019.

Stage 1: a linear scorer, trained with the slide label on the highest-scoring instance of each slide. Stage 2: the `s`
highest-scoring instances, in descending order, are read by h_t = relu(W1 x_t + W2 h_{t-1}); the last state is
classified. As the selection is hard and the embeddings are frozen, no gradient flows from stage 2 to stage 1; so one
module trains both at once, and the loss is the sum

    cross-entropy(scorer on the top instance) + cross-entropy(recurrent network)

of which each term updates its own stage only (`mining_loss` and `sequence_loss` return them separately). Instances are
ranked by the probability of the positive class; with C >= 2 by the largest probability of any class but class 0, the
normal class (for C = 2 that is the published two-way scorer). A bag of fewer than `s` instances is a shorter sequence.
`shuffle` feeds the sequence in random order in training. The bag logits are the recurrent network's; there is no
attention.

N instances, D dimensions, C classes, S selected instances.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from selfvitmil.aggregate.base import Aggregator, AggregatorOutput, check_choice, check_range, register
from selfvitmil.aggregate.chunked_bag import ChunkedBag


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

    def mining_loss(self, output: AggregatorOutput, label: Tensor | float) -> Tensor:
        """Return the stage 1 loss: cross-entropy of the highest-scoring instance with the slide label."""
        assert isinstance(output, MILRNNOutput)
        return self.bag_loss(output.top_logits_C, label)

    def sequence_loss(self, output: AggregatorOutput, label: Tensor | float) -> Tensor:
        """Return the stage 2 loss: cross-entropy of the recurrent network with the slide label."""
        return self.bag_loss(output.logits_C, label)

    def _ranking_score(self, logits_NC: Tensor) -> Tensor:
        return logits_NC[:, 0] if self.num_classes == 1 else logits_NC.log_softmax(1)[:, 1:].amax(1)
