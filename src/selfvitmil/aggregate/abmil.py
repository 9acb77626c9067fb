"""ABMIL, attention-based MIL pooling: the bag embedding is the attention-weighted mean of the instances.

M. Ilse, J. M. Tomczak and M. Welling, "Attention-based Deep Multiple Instance Learning", ICML 2018, arXiv:1802.04712.

    s = softmax_i( w . tanh(V h_i) )                       plain
    s = softmax_i( w . (tanh(V h_i) * sigmoid(U h_i)) )    gated
    logits = W_c sum_i s_i h_i + b_c

where h_i is the embedding after a linear layer with ReLU (`hidden` units, common practice for slides), or with
`hidden=0` the embedding itself as in the paper. One attention serves all classes. Loss: cross-entropy. There are no
instance logits: the classifier is trained on attention-weighted means only, so its output on a single instance is not
meaningful.

N instances, D dimensions, H hidden units, C classes.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from selfvitmil.aggregate.base import Aggregator, AggregatorOutput, check_choice, check_range, register
from selfvitmil.aggregate.chunked_bag import ChunkedBag


@register("abmil")
class ABMIL(Aggregator):
    """Attention-based MIL pooling (Ilse et al., ICML 2018, arXiv:1802.04712).

    Args:
        dim: Feature dimension D of the embeddings.
        num_classes: Number of classes C; 1 means a binary label with a single logit.
        gated: Use gated attention, tanh(V h) * sigmoid(U h), instead of tanh(V h).
        hidden: Units of the linear layer with ReLU in front of the attention; 0 uses the embeddings as they are.
        attention_dim: Units of the attention network.
        dropout: Dropout rate on the hidden layer and inside the attention network.
        standardize: Standardize each input dimension; statistics are set by `set_standardization`.

    The output has `attention` (N, C), equal for all classes, and no instance logits.
    """

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

    def aggregate(self, bag: ChunkedBag, coords_N2: Tensor | None) -> AggregatorOutput:
        hidden = self.hidden_rows(bag)
        attention_N1 = self.attention_logits(hidden).softmax(0)
        logits_C = self.classifier(hidden.pool(attention_N1)[0])
        return AggregatorOutput(logits_C, attention_N1.expand(-1, self.num_classes), None)

    def hidden_rows(self, bag: ChunkedBag) -> ChunkedBag:
        """Return the instances after the hidden layer: the input of the attention and of the weighted mean."""
        if self.project is None:
            return bag
        hidden_NH = bag.project(self.project).relu()
        return ChunkedBag(F.dropout(hidden_NH, self.dropout, self.training), bag.dtype)

    def attention_logits(self, hidden: ChunkedBag) -> Tensor:
        """Return the attention logits before the softmax: (N, 1)."""
        inner = hidden.project(self.attention_v).tanh()
        inner = F.dropout(inner, self.dropout, self.training)
        if self.attention_u is not None:
            gate = hidden.project(self.attention_u).sigmoid()
            inner = inner * F.dropout(gate, self.dropout, self.training)
        return self.attention_w(inner)


@register("abmil-gated", gated=True)
class GatedABMIL(ABMIL):
    """ABMIL with gated attention (Ilse et al., ICML 2018, arXiv:1802.04712): `ABMIL` with `gated=True` by default.

    Args:
        dim: Feature dimension D of the embeddings.
        num_classes: Number of classes C; 1 means a binary label with a single logit.
        gated: Use gated attention, tanh(V h) * sigmoid(U h); True by default.
        hidden: Units of the linear layer with ReLU in front of the attention; 0 uses the embeddings as they are.
        attention_dim: Units of the attention network.
        dropout: Dropout rate on the hidden layer and inside the attention network.
        standardize: Standardize each input dimension; statistics are set by `set_standardization`.
    """
