"""TransMIL (Shao et al. 2021): two transformer layers with Nystrom attention and a convolution that sees positions.

    tokens = [cls, relu(W h_i + b) ...]; layer; PPEG; layer; logits = W_c LayerNorm(cls) + b_c
    layer(x) = x + NystromAttention(LayerNorm(x))          PPEG(x) = x + the sum of depthwise 7x7, 5x5, 3x3 convolutions

PPEG needs a plane. As published that is the storage order of the tiles, row by row in a square, filled up by repeating
the first tiles: the result then depends on the order of the bag (`is_order_dependent`). With `coordinates=True` tiles
stand where they stand in the slide, are sorted row by row, and order does not matter.

Nystrom attention: for landmarks q', k' (means of segments of the sequence, which is padded with zeros at its front),
softmax(q k^T) is replaced by softmax(q k'^T) pinv(softmax(q' k'^T)) softmax(q' k^T), with six iterations towards the
pseudo-inverse (never below float32) and a depthwise convolution of the values added. The outer factors are computed by
torch's fused attention, so that memory grows with N only.

`attention_NC` is the row of the cls token in the last layer, through the same three factors: the mean over heads,
negative entries (the approximation has some) set to 0, repeated tiles added to their originals, scaled to sum 1, the
same for all classes, without gradient. It leaves out what the convolutions carry: an indication, not a proof. There are
no instance logits. Loss: cross-entropy.

N instances, T tokens, H hidden width, C classes, A heads, M landmarks, E width of a head.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from selfvitmil.aggregate.contract import Aggregator, AggregatorOutput, check_choice, check_range, register
from selfvitmil.aggregate.rows import Rows
from selfvitmil.errors import BagError, ConfigError

KERNEL = 33
"""Tokens that the convolution of the values spans."""
PINV_STEPS = 6
POSITION_KERNELS = (7, 5, 3)
MAX_CELLS = 1 << 22
"""Cells of the plane beyond which coordinates cannot lie on a grid of tiles."""
CHUNK_TOKENS = 8192


@register("transmil")
class TransMil(Aggregator):
    """Transformer over the bag; `landmarks=None` means half of `hidden`, as published."""

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
            raise ConfigError(f"hidden={hidden} with heads={heads}", "each head takes an equal share of the width")
        self.needs_coordinates = coordinates
        self.is_order_dependent = not coordinates
        self.waits_for_device = coordinates  # to know how large the plane is
        self.project = nn.Linear(dim, hidden)
        self.cls_token = nn.Parameter(torch.randn(1, hidden))
        self.layer1 = _Layer(hidden, heads, landmarks, dropout)
        self.position = _Position(hidden)
        self.layer2 = _Layer(hidden, heads, landmarks, dropout)
        self.norm = nn.LayerNorm(hidden)
        self.classifier = nn.Linear(hidden, num_classes)

    def aggregate(self, rows: Rows, coords_N2: Tensor | None) -> AggregatorOutput:
        plane = square_plane(len(rows), rows.bag_ND.device)
        if self.needs_coordinates and coords_N2 is not None:
            plane = true_plane(coords_N2)
        tiles_NH = rows.project(self.project).relu()
        tokens_TH = torch.cat([self.cls_token, tiles_NH[plane.order_T]])
        tokens_TH = self.layer1(tokens_TH, self.layer1.factors(tokens_TH))
        tokens_TH = torch.cat([tokens_TH[:1], self.position(tokens_TH[1:], plane)])
        factors = self.layer2.factors(tokens_TH)
        tokens_TH = self.layer2(tokens_TH, factors)
        logits_C = self.classifier(self.norm(tokens_TH[0]))

        attention_T = cls_attention(factors, len(tokens_TH))[1:]
        attention_N = attention_T.new_zeros(len(rows)).index_add(0, plane.order_T, attention_T)
        attention_N = attention_N + torch.finfo(attention_N.dtype).tiny  # uniform where all entries were negative
        attention_NC = (attention_N / attention_N.sum())[:, None].expand(-1, self.num_classes)
        return AggregatorOutput(logits_C, attention_NC, None)


# ---------------------------------------------------------------------------------------------------- attention


class Factors(NamedTuple):
    """What Nystrom attention is made of; the sequence is padded at its front to a multiple of the landmarks."""

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
        # One kernel per head, the same for all its entries: entries are the batch.
        return self.value_kernel(value_ATE.permute(2, 0, 1)).permute(1, 2, 0)


def _attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """softmax(query key^T) value, without making the matrix."""
    return F.scaled_dot_product_attention(query[None], key[None], value[None], scale=1.0)[0]


def iterative_pinv(matrix_AMM: Tensor) -> Tensor:
    """Approximate pseudo-inverse by Razavi's third-order iteration, scaled by the largest row and column sum of all."""
    with torch.autocast(matrix_AMM.device.type, enabled=False):
        x = matrix_AMM.to(torch.promote_types(matrix_AMM.dtype, torch.float32))
        unit = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
        z = x.transpose(1, 2) / (x.abs().sum(-1).max() * x.abs().sum(-2).max())
        for _ in range(PINV_STEPS):
            xz = x @ z
            z = 0.25 * z @ (13 * unit - xz @ (15 * unit - xz @ (7 * unit - xz)))
        return z


@torch.no_grad()
def cls_attention(factors: Factors, num_tokens: int) -> Tensor:
    """Row of the first real token in the approximate attention, mean over heads, negative entries set to 0: (T,)."""
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


class Plane(NamedTuple):
    """Where the tokens of a bag stand for PPEG."""

    order_T: Tensor
    """Which instance a token is."""
    cell_T: Tensor
    """Its cell, counted row by row."""
    columns: int
    rows: int


def square_plane(num_tiles: int, device: torch.device) -> Plane:
    """Storage order in a square, filled up with the first tiles."""
    side = math.isqrt(num_tiles - 1) + 1
    cell_T = torch.arange(side * side, device=device)
    return Plane(cell_T % num_tiles, cell_T, side, side)


def true_plane(coords_N2: Tensor) -> Plane:
    """Tiles where they lie in the slide, row by row."""
    cells_N2 = grid_cells(coords_N2)
    columns, rows = (int(last) + 1 for last in cells_N2.amax(0))
    if columns * rows > MAX_CELLS:
        how = "Build the aggregator with coordinates=False, or give the corners of a regular tiling"
        raise BagError(f"{len(cells_N2)} tiles on a grid of {columns} x {rows}", "their corners share no grid", how)
    cell_N, order_N = (cells_N2[:, 1] * columns + cells_N2[:, 0]).sort(stable=True)
    return Plane(order_N, cell_N, columns, rows)


def grid_cells(coords_N2: Tensor) -> Tensor:
    """Columns and rows (N, 2) of tiles from their corners, by the smallest distance of two corners along an axis.

    Rounded corners are fine: distances are counted from neighbour to neighbour. Gaps wider than PPEG's kernel reaches
    are narrowed to what it cannot bridge either, so that far pieces of tissue do not span an empty plane.
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
    """PPEG: three depthwise convolutions over the plane, done as one, added to the tokens."""

    def __init__(self, hidden: int):
        super().__init__()
        self.kernels = nn.ModuleList(
            nn.Conv2d(hidden, hidden, size, padding=size // 2, groups=hidden) for size in POSITION_KERNELS
        )

    def forward(self, tokens_TH: Tensor, plane: Plane) -> Tensor:
        """Tokens of one cell count there as their mean, empty cells as 0."""
        num_cells, widest = plane.columns * plane.rows, POSITION_KERNELS[0]
        count = tokens_TH.new_zeros(num_cells).index_add(0, plane.cell_T, tokens_TH.new_ones(len(plane.cell_T)))
        grid = tokens_TH.new_zeros(num_cells, tokens_TH.shape[1]).index_add(0, plane.cell_T, tokens_TH)
        grid = (grid / count.clamp(min=1)[:, None]).T.reshape(1, -1, plane.rows, plane.columns)
        kernels = [kernel for kernel in self.kernels if isinstance(kernel, nn.Conv2d)]
        weights = [F.pad(kernel.weight, [(widest - kernel.kernel_size[0]) // 2] * 4) for kernel in kernels]
        biases = [kernel.bias for kernel in kernels if kernel.bias is not None]
        grid = F.conv2d(
            grid, torch.stack(weights).sum(0), torch.stack(biases).sum(0), padding=widest // 2, groups=grid.shape[1]
        )
        return tokens_TH + grid.flatten(2)[0].T[plane.cell_T]
