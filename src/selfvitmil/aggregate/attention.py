"""Aggregators by attention over the instances: ABMIL, its gated form, CLAM-SB, and TransMIL.

**ABMIL.** M. Ilse, J. M. Tomczak and M. Welling, "Attention-based Deep Multiple Instance Learning", ICML 2018,
arXiv:1802.04712. The bag embedding is the attention-weighted mean of the instances:

    s = softmax_i( w . tanh(V h_i) )                       plain
    s = softmax_i( w . (tanh(V h_i) * sigmoid(U h_i)) )    gated
    logits = W_c sum_i s_i h_i + b_c

where h_i is the embedding after a linear layer with ReLU (`hidden` units, common practice for slides), or with
`hidden=0` the embedding itself as in the paper. One attention serves all classes. There are no instance logits: the
classifier is trained on attention-weighted means only, so its output on a single instance is not meaningful.

**CLAM-SB.** M. Y. Lu, D. F. K. Williamson, T. Y. Chen, R. J. Chen, M. Barbieri and F. Mahmood, "Data-efficient and
weakly supervised computational pathology on whole-slide images", Nature Biomedical Engineering 5, 2021,
arXiv:2004.09666. The bag branch is gated ABMIL. In addition each class has a binary instance classifier, trained on
pseudo-labels: the `k` most attended instances of a slide are positive for the slide's class and the `k` least attended
are negative. With `subtyping` (mutually exclusive classes) the most attended instances are also negative for all other
classes. Loss:

    bag_weight * cross-entropy(bag) + (1 - bag_weight) * mean over those instances of softplus(margin - y (in - out))

with y = +1 or -1; the margin is 1 for `svm` (smooth top-1 SVM at temperature 1, Berrada et al., ICLR 2018,
arXiv:1802.07595) and 0 for `ce` (cross-entropy). A bag of fewer than 2k instances gives N // 2 to each side; a single
instance has no instance loss. For a binary label there are two instance classifiers, "negative" and "positive"; the
instance logits are those of "positive".

**TransMIL.** Z. Shao, H. Bian, Y. Chen, Y. Wang, J. Zhang, X. Ji and Y. Zhang, "TransMIL: Transformer based Correlated
Multiple Instance Learning for Whole Slide Image Classification", NeurIPS 2021, arXiv:2106.00908:

    tokens = [cls, relu(W h_i + b) ...]; layer; PPEG; layer; logits = W_c LayerNorm(cls) + b_c
    layer(x) = x + NystromAttention(LayerNorm(x))          PPEG(x) = x + the sum of depthwise 7x7, 5x5, 3x3 convolutions

PPEG needs a 2D grid. As published the tiles fill a square row by row in storage order, padded by repeating the first
tiles: the result then depends on the order of the bag (`is_order_dependent`). With `coordinates=True` tiles keep their
positions in the slide, are sorted row by row, and the storage order does not matter.

Nystrom attention (Xiong et al., AAAI 2021, arXiv:2102.03902): for landmarks q', k' (means of segments of the sequence,
which is zero-padded at its front), softmax(q k^T) becomes softmax(q k'^T) pinv(softmax(q' k'^T)) softmax(q' k^T), with
six iterations of the pseudo-inverse (in float32 or higher) and a depthwise convolution of the values added. The outer
factors use torch's fused attention, so that memory is linear in N.

`attention_NC` is the row of the cls token in the last layer, through the same three factors: the mean over heads,
negative entries (the approximation has some) set to 0, repeated tiles added to their originals, normalized to sum 1,
equal for all classes, without gradient. It ignores what the convolutions contribute, so it is approximate.

N instances, D dimensions, H hidden units, C classes, K selected instances; of TransMIL T tokens, A heads, M landmarks,
E width of a head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from selfvitmil.aggregate.bag_tensors import ChunkedBag
from selfvitmil.aggregate.base import Aggregator, AggregatorOutput, check_choice, check_range, register
from selfvitmil.errors import BagError, ConfigError


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
    """ABMIL with gated attention (Ilse et al., ICML 2018, arXiv:1802.04712): `ABMIL` with `gated=True` by default."""


# ---------------------------------------------------------------------------------------------------- CLAM


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

    needs_classes = True  # its instance loss takes the most attended tiles as examples of the class

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


# ---------------------------------------------------------------------------------------------------- TransMIL


KERNEL = 33
"""Kernel size of the value convolution, in tokens."""
PINV_STEPS = 6
POSITION_KERNELS = (7, 5, 3)
MAX_CELLS = 1 << 22
"""Largest number of grid cells; coordinates that need more do not lie on a regular tile grid."""
CHUNK_TOKENS = 8192


@register("transmil")
class TransMIL(Aggregator):
    """Transformer over the bag (Shao et al., NeurIPS 2021, arXiv:2106.00908).

    Args:
        dim: Feature dimension D of the embeddings.
        num_classes: Number of classes C; 1 means a binary label with a single logit.
        hidden: Token width; a multiple of `heads`.
        heads: Number of attention heads.
        landmarks: Number of landmarks of the Nystrom attention; None means half of `hidden`, as published.
        dropout: Dropout rate on the output of each attention layer.
        coordinates: Place tiles by their coordinates for the position encoding; the module then needs `coords_N2`.
        standardize: Standardize each input dimension; statistics are set by `set_standardization`.

    The output has `attention` (N, C), equal for all classes and without gradient, and no instance logits.
    """

    def __init__(
        self,
        dim: int,
        num_classes: int,
        *,
        hidden: int = 512,
        heads: int = 8,
        landmarks: int | None = None,
        dropout: float = 0.1,
        coordinates: bool = False,
        standardize: bool = False,
    ):
        super().__init__(dim, num_classes, standardize)
        check_range("hidden", hidden, 1, whole=True)
        check_range("heads", heads, 1, whole=True)
        check_range("dropout", dropout, 0, 0.99)
        check_choice("coordinates", coordinates, (False, True))
        if landmarks is None:
            landmarks = max(1, hidden // 2)
        check_range("landmarks", landmarks, 1, whole=True)
        if hidden % heads:
            raise ConfigError(
                f"hidden={hidden} with heads={heads}", "hidden must be a multiple of heads", code="invalid-heads"
            )
        self.needs_coordinates = coordinates
        self.is_order_dependent = not coordinates
        self.waits_for_device = coordinates  # the grid size is read on the host
        self.project = nn.Linear(dim, hidden)
        self.cls_token = nn.Parameter(torch.randn(1, hidden))
        self.layer1 = _Layer(hidden, heads, landmarks, dropout)
        self.position = _Position(hidden)
        self.layer2 = _Layer(hidden, heads, landmarks, dropout)
        self.norm = nn.LayerNorm(hidden)
        self.classifier = nn.Linear(hidden, num_classes)

    def aggregate(self, bag: ChunkedBag, coords_N2: Tensor | None) -> AggregatorOutput:
        positions = square_grid(len(bag), bag.bag_ND.device)
        if self.needs_coordinates and coords_N2 is not None:
            positions = coordinate_grid(coords_N2)
        tiles_NH = bag.project(self.project).relu()
        tokens_TH = torch.cat([self.cls_token, tiles_NH[positions.order_T]])
        tokens_TH = self.layer1(tokens_TH, self.layer1.factors(tokens_TH))
        tokens_TH = torch.cat([tokens_TH[:1], self.position(tokens_TH[1:], positions)])
        factors = self.layer2.factors(tokens_TH)
        tokens_TH = self.layer2(tokens_TH, factors)
        logits_C = self.classifier(self.norm(tokens_TH[0]))

        attention_T = cls_attention(factors, len(tokens_TH))[1:]
        attention_N = attention_T.new_zeros(len(bag)).index_add(0, positions.order_T, attention_T)
        attention_N = attention_N + torch.finfo(attention_N.dtype).tiny  # uniform where all entries were negative
        attention_NC = (attention_N / attention_N.sum())[:, None].expand(-1, self.num_classes)
        return AggregatorOutput(logits_C, attention_NC, None)


# ---------------------------------------------------------------------------------------------------- attention


class Factors(NamedTuple):
    """Factors of Nystrom attention; the sequence is padded at its front to a multiple of the landmarks."""

    query_ATE: Tensor
    key_ATE: Tensor
    value_ATE: Tensor
    query_AME: Tensor
    key_AME: Tensor
    pinv_AMM: Tensor


class _Layer(nn.Module):
    def __init__(self, hidden: int, heads: int, landmarks: int, dropout: float):
        super().__init__()
        self.heads = heads
        self.landmarks = landmarks
        self.norm = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.value_kernel = nn.Conv1d(heads, heads, KERNEL, padding=KERNEL // 2, groups=heads, bias=False)
        self.out = nn.Linear(hidden, hidden)
        self.dropout = nn.Dropout(dropout)

    def factors(self, tokens_TH: Tensor) -> Factors:
        padding = -len(tokens_TH) % self.landmarks
        normed_TH = F.pad(self.norm(tokens_TH), (0, 0, padding, 0))
        qkv = self.qkv(normed_TH).view(len(normed_TH), 3, self.heads, -1).permute(1, 2, 0, 3)
        query_ATE, key_ATE, value_ATE = qkv[0] * qkv.shape[-1] ** -0.5, qkv[1], qkv[2]
        query_AME = query_ATE.unflatten(1, (self.landmarks, -1)).mean(2)
        key_AME = key_ATE.unflatten(1, (self.landmarks, -1)).mean(2)
        kernel_AMM = (query_AME @ key_AME.transpose(1, 2)).softmax(-1)
        return Factors(query_ATE, key_ATE, value_ATE, query_AME, key_AME, iterative_pinv(kernel_AMM))

    def forward(self, tokens_TH: Tensor, factors: Factors) -> Tensor:
        query, key, value, few_queries, few_keys, pinv = factors
        summed_AME = pinv.to(value.dtype) @ _attend(few_queries, key, value)
        mixed_ATE = _attend(query, few_keys, summed_AME) + self._convolve(value)
        mixed_TH = mixed_ATE[:, -len(tokens_TH) :].transpose(0, 1).flatten(1)
        return tokens_TH + self.dropout(self.out(mixed_TH))

    def _convolve(self, value_ATE: Tensor) -> Tensor:
        # One kernel per head, shared by its channels: channels are the batch.
        return self.value_kernel(value_ATE.permute(2, 0, 1)).permute(1, 2, 0)


def _attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return softmax(query key^T) value without materializing the matrix."""
    return F.scaled_dot_product_attention(query[None], key[None], value[None], scale=1.0)[0]


def iterative_pinv(matrix_AMM: Tensor) -> Tensor:
    """Return the pseudo-inverse by Razavi's third-order iteration, scaled by the largest row and column sum."""
    with torch.autocast(matrix_AMM.device.type, enabled=False):
        x = matrix_AMM.to(torch.promote_types(matrix_AMM.dtype, torch.float32))
        unit = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
        seven, fifteen, thirteen = 7 * unit, 15 * unit, 13 * unit
        z = x.transpose(1, 2) / (x.abs().sum(-1).max() * x.abs().sum(-2).max())
        for _ in range(PINV_STEPS):
            xz = x @ z
            z = 0.25 * z @ (thirteen - xz @ (fifteen - xz @ (seven - xz)))
        return z


@torch.no_grad()
def cls_attention(factors: Factors, num_tokens: int) -> Tensor:
    """Return the cls token's row of the approximate attention: mean over heads, negative entries set to 0; (T,)."""
    query_AE = factors.query_ATE[:, -num_tokens]
    weight_AM = (query_AE[:, None] @ factors.key_AME.transpose(1, 2)).softmax(-1).to(factors.pinv_AMM.dtype)
    weight_AM = (weight_AM @ factors.pinv_AMM)[:, 0]
    chunks = factors.key_ATE.split(CHUNK_TOKENS, dim=1)
    logits = [(factors.query_AME @ chunk.transpose(1, 2)).logsumexp(-1) for chunk in chunks]
    total_AM = torch.stack(logits).logsumexp(0)
    parts = [
        weight_AM[:, None] @ (factors.query_AME @ chunk.transpose(1, 2) - total_AM[..., None]).exp().to(weight_AM.dtype)
        for chunk in chunks
    ]
    return torch.cat(parts, dim=-1)[:, 0].mean(0)[-num_tokens:].clamp(min=0)


# ---------------------------------------------------------------------------------------------------- positions


class Grid(NamedTuple):
    """Positions of a bag's tokens on the 2D grid of PPEG."""

    order_T: Tensor
    """Index of each token's instance."""
    cell_T: Tensor
    """Index of each token's grid cell, in row-major order."""
    columns: int
    rows: int


def square_grid(num_tiles: int, device: torch.device) -> Grid:
    """Return the square grid of the paper: tiles in storage order, padded by repeating the first tiles."""
    side = math.isqrt(num_tiles - 1) + 1
    cell_T = torch.arange(side * side, device=device)
    return Grid(cell_T % num_tiles, cell_T, side, side)


def coordinate_grid(coords_N2: Tensor) -> Grid:
    """Return the grid of the tiles' own positions in the slide; raise BagError where they share no regular grid."""
    cells_N2 = grid_cells(coords_N2)
    columns, rows = (int(last) + 1 for last in cells_N2.amax(0))
    if columns * rows > MAX_CELLS:
        how = "Build the aggregator with coordinates=False, or pass the corners of a regular tiling"
        raise BagError(
            f"{len(cells_N2)} tiles on a grid of {columns} x {rows}",
            "the coordinates do not lie on one regular grid",
            how,
            code="irregular-grid",
        )
    cell_N, order_N = (cells_N2[:, 1] * columns + cells_N2[:, 0]).sort(stable=True)
    return Grid(order_N, cell_N, columns, rows)


def grid_cells(coords_N2: Tensor) -> Tensor:
    """Return column and row (N, 2) of each tile; the step is the smallest distance of two corners along an axis.

    Rounding of the corners does not accumulate: distances are counted from neighbour to neighbour. Gaps wider than the
    PPEG kernel are narrowed to the smallest gap that it cannot bridge, so that distant tissue pieces do not make the
    grid large and empty.
    """
    axes = [torch.unique(axis_N, return_inverse=True) for axis_N in coords_N2.double().unbind(1)]
    gaps = [values.diff() for values, _ in axes]
    every_gap = torch.cat(gaps)
    step = every_gap.min() if len(every_gap) else every_gap.new_ones(())
    farthest = POSITION_KERNELS[0] // 2 + 1
    cells = []
    for gap, (_, inverse_N) in zip(gaps, axes, strict=True):
        places = F.pad((gap / step).round().clamp(max=farthest).cumsum(0), (1, 0))
        cells.append(places.long()[inverse_N])
    return torch.stack(cells, dim=1)


class _Position(nn.Module):
    """PPEG: three depthwise convolutions over the grid, fused into one and added to the tokens."""

    def __init__(self, hidden: int):
        super().__init__()
        self.kernels = nn.ModuleList(
            nn.Conv2d(hidden, hidden, size, padding=size // 2, groups=hidden) for size in POSITION_KERNELS
        )

    def forward(self, tokens_TH: Tensor, positions: Grid) -> Tensor:
        """Return the tokens with position encoding; tokens that share a cell are averaged, empty cells are 0."""
        num_cells, widest = positions.columns * positions.rows, POSITION_KERNELS[0]
        count = tokens_TH.new_zeros(num_cells).index_add(0, positions.cell_T, tokens_TH.new_ones(len(positions.cell_T)))
        grid = tokens_TH.new_zeros(num_cells, tokens_TH.shape[1]).index_add(0, positions.cell_T, tokens_TH)
        grid = (grid / count.clamp(min=1)[:, None]).T.reshape(1, -1, positions.rows, positions.columns)
        kernels = [kernel for kernel in self.kernels if isinstance(kernel, nn.Conv2d)]
        weights = [F.pad(kernel.weight, [(widest - kernel.kernel_size[0]) // 2] * 4) for kernel in kernels]
        # Not the sum of a stack: its gradients share their memory, and bags that accumulate in it would count thrice.
        first_H, *others = (kernel.bias for kernel in kernels if kernel.bias is not None)
        bias_H = sum(others, start=first_H)
        grid = F.conv2d(grid, torch.stack(weights).sum(0), bias_H, padding=widest // 2, groups=grid.shape[1])
        return tokens_TH + grid.flatten(2)[0].T[positions.cell_T]
