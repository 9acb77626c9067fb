"""MIL-RNN (Campanella et al. 2019): top-1 mining of instances, then a recurrent network over the most suspicious ones.

Stage 1: a linear scorer, trained by the slide's label on the one instance of each slide that it finds most suspicious.
Stage 2: the `s` most suspicious instances, in descending order, are read by h_t = relu(W1 x_t + W2 h_{t-1}); the last
state is classified. As instances are picked hard and their embeddings are frozen, no gradient runs from stage 2 to
stage 1; so one module trains both at once, and the loss is the sum

    cross-entropy(scorer on the top instance) + cross-entropy(recurrent network)

of which each part moves its own stage only (`mining_loss` and `sequence_loss` give them apart). Suspicious means: the
probability of the positive class; with C >= 2 the largest probability of any class but class 0, which counts as the
normal one (for C = 2 that is the published two-way scorer). A bag of fewer than `s` instances is a shorter sequence.
`shuffle` feeds the sequence in random order in training. The bag's logits are the recurrent network's; there is no
attention.

N instances, D dimensions, C classes, S picked instances.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from selfvitmil.aggregate.contract import Aggregator, AggregatorOutput, check_choice, check_range, register
from selfvitmil.aggregate.rows import Rows


@dataclass(frozen=True, eq=False)
class MilRnnOutput(AggregatorOutput):
    """Adds what stage 1 says of the most suspicious instance."""

    top_logits_C: Tensor


@register("mil-rnn")
class MilRnn(Aggregator):
    """Both stages of MIL-RNN on frozen embeddings."""

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

    def aggregate(self, rows: Rows, coords_N2: Tensor | None) -> MilRnnOutput:
        instance_logits_NC = rows.project(self.scorer)
        top_S = self._suspicion(instance_logits_NC.detach()).topk(min(self.s, len(rows))).indices
        picked_SD = rows.take(top_S)
        top_logits_C = self.scorer(picked_SD[0])
        if self.shuffle and self.training:
            picked_SD = picked_SD[torch.randperm(len(picked_SD), device=picked_SD.device)]
        inputs_SH = self.input(picked_SD)
        state_H = inputs_SH.new_zeros(inputs_SH.shape[1])
        for input_H in inputs_SH:
            state_H = (input_H + self.state(state_H)).relu()
        return MilRnnOutput(self.classifier(state_H), None, instance_logits_NC, top_logits_C)

    def loss(self, output: AggregatorOutput, label: Tensor | float) -> Tensor:
        """Sum of both stages' losses."""
        return self.mining_loss(output, label) + self.sequence_loss(output, label)

    def mining_loss(self, output: AggregatorOutput, label: Tensor | float) -> Tensor:
        """Stage 1: the slide's label held against its most suspicious instance."""
        assert isinstance(output, MilRnnOutput)
        return self.bag_loss(output.top_logits_C, label)

    def sequence_loss(self, output: AggregatorOutput, label: Tensor | float) -> Tensor:
        """Stage 2: the slide's label held against the recurrent network."""
        return self.bag_loss(output.logits_C, label)

    def _suspicion(self, logits_NC: Tensor) -> Tensor:
        return logits_NC[:, 0] if self.num_classes == 1 else logits_NC.log_softmax(1)[:, 1:].amax(1)
