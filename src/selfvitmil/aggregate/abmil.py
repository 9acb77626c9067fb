"""ABMIL (Ilse et al. 2018): the bag's vector is a mean of its instances, weighted by learned attention.

    s = softmax_i( w . tanh(V h_i) )                       plain
    s = softmax_i( w . (tanh(V h_i) * sigmoid(U h_i)) )    gated
    logits = W_c sum_i s_i h_i + b_c

where h_i is the embedding after a linear layer with ReLU (`hidden` units, usual for slides), or with `hidden=0` the
embedding itself as in the paper. One attention serves all classes. Loss: cross-entropy. There are no instance logits:
the classifier is trained on weighted means only, and what it says of an instance without attention means nothing.

N instances, D dimensions, H hidden units, C classes.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from selfvitmil.aggregate.contract import Aggregator, AggregatorOutput, check_choice, check_range, register
from selfvitmil.aggregate.rows import Rows


@register("abmil")
@register("abmil-gated", gated=True)
class Abmil(Aggregator):
    """Attention-based pooling; `dropout` acts on the hidden layer and inside the attention."""

    def __init__(
        self,
        dim: int,
        num_classes: int,
        *,
        gated: bool = False,
        hidden: int = 512,
        attention_dim: int = 256,
        dropout: float = 0.25,
        standardize: bool = False,
    ):
        super().__init__(dim, num_classes, standardize)
        check_choice("gated", gated, (False, True))
        check_range("hidden", hidden, 0, whole=True)
        check_range("attention_dim", attention_dim, 1, whole=True)
        check_range("dropout", dropout, 0, 0.99)
        width = hidden or dim
        self.dropout = dropout
        self.project = nn.Linear(dim, hidden) if hidden else None
        self.attention_v = nn.Linear(width, attention_dim)
        self.attention_u = nn.Linear(width, attention_dim) if gated else None
        self.attention_w = nn.Linear(attention_dim, 1)
        self.classifier = nn.Linear(width, num_classes)

    def aggregate(self, rows: Rows, coords_N2: Tensor | None) -> AggregatorOutput:
        hidden = self.hidden_rows(rows)
        attention_N1 = self.attention_logits(hidden).softmax(0)
        logits_C = self.classifier(hidden.pool(attention_N1)[0])
        return AggregatorOutput(logits_C, attention_N1.expand(-1, self.num_classes), None)

    def hidden_rows(self, rows: Rows) -> Rows:
        """What attention and weighted mean both see."""
        if self.project is None:
            return rows
        hidden_NH = rows.project(self.project).relu()
        return Rows(F.dropout(hidden_NH, self.dropout, self.training), rows.dtype)

    def attention_logits(self, hidden: Rows) -> Tensor:
        """Attention before the softmax: (N, 1)."""
        inner = hidden.project(self.attention_v).tanh()
        inner = F.dropout(inner, self.dropout, self.training)
        if self.attention_u is not None:
            gate = hidden.project(self.attention_u).sigmoid()
            inner = inner * F.dropout(gate, self.dropout, self.training)
        return self.attention_w(inner)
