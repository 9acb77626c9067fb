"""Linear probe: logistic regression on the frozen embeddings of labelled tiles.

Embeddings are standardized over the training tiles; classes are balanced by weights; the L2 penalty is the one with the
lowest loss on tiles of validation slides. The fit is exact (full-batch L-BFGS), so seeds differ only in which tiles of
large slides are sampled. Embeddings stay in the bags' own dtype and are converted chunk by chunk: memory is that of the
sampled rows and little more.

N tiles of a slide or of all, D dimensions, C = 1 class.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from selfvitmil.aggregate.bag_tensors import ChunkedBag, measure
from selfvitmil.aggregate.base import Aggregator, AggregatorOutput
from selfvitmil.aggregate.supervised.base import (
    AnnotatedSlide,
    LabelledTiles,
    check_sides,
    label_slides,
    sample_rows,
    write_model,
)
from selfvitmil.bags import Bag
from selfvitmil.errors import BagError
from selfvitmil.metrics import auc
from selfvitmil.runtime.device import choose_device
from selfvitmil.settings import SupervisedSettings

Pool = Literal["max", "topk"]

KIND = "supervised-probe"
CHUNK_BYTES = 1 << 25
"""Bytes of embeddings converted at a time."""
MAX_ITERATIONS = 200
"""L-BFGS iterations for each penalty; each fit starts from the solution of the next stronger penalty."""


class TileProbe(Aggregator):
    """A linear tile classifier as an aggregator: the slide probability is pooled from the tile probabilities."""

    def __init__(self, dim: int, *, pool: Pool = "topk", k: int = 10):
        super().__init__(dim, 1, standardize=True)
        self.pool: Pool = pool
        self.k = k
        self.scorer = nn.Linear(dim, 1)
        self.config = {"name": KIND, "dim": dim, "num_classes": 1, "pool": pool, "k": k}

    def aggregate(self, bag: ChunkedBag, coords_N2: Tensor | None) -> AggregatorOutput:
        logits_NC = bag.project(self.scorer).double()  # float32 sigmoids of confident tiles would all be 1
        top_K = logits_NC[:, 0].topk(1 if self.pool == "max" else min(self.k, len(bag))).values
        # The logit of the mean of their sigmoids.
        logit = F.logsigmoid(top_K).logsumexp(0) - F.logsigmoid(-top_K).logsumexp(0)
        return AggregatorOutput(logit.reshape(1), None, logits_NC)


@dataclass(frozen=True, eq=False)
class TrainedProbe:
    """A fitted probe with its history."""

    module: TileProbe
    """On the CPU, in eval mode; `train.score` scores bags with it."""
    l2: float
    """L2 penalty chosen on the validation tiles."""
    history: tuple[dict[str, float], ...]
    """One entry per penalty, strongest first: l2, evaluations, train_loss, val_loss, val_auc."""
    num_tiles: dict[str, int]
    """Numbers of tiles used: train_tumour, train_normal, val_tumour, val_normal."""
    warnings: tuple[str, ...]


def train_probe(
    training: Sequence[AnnotatedSlide],
    validation: Sequence[AnnotatedSlide],
    bags: Mapping[str, Bag],
    settings: SupervisedSettings | None = None,
    seed: int = 0,
) -> TrainedProbe:
    """Fit a probe to the labelled tiles of the training slides; `bags` holds the embeddings of all slides by name."""
    settings = settings or SupervisedSettings()
    labelled = [label_slides(side, settings, bags) for side in (training, validation)]
    check_sides(labelled[0][0], labelled[1][0])
    device = choose_device(settings.device)
    train, val = (
        _gather(side, bags, settings.tiles_per_slide, (seed, number), device)
        for number, (side, _) in enumerate(labelled)
    )
    if val.embeddings_ND.shape[1] != train.embeddings_ND.shape[1]:
        raise _mixed_dimensions({train.embeddings_ND.shape[1], val.embeddings_ND.shape[1]}, "training and validation")
    mean_D, std_D = train.moments()
    weights = torch.zeros(len(mean_D) + 1, dtype=torch.float64, device=device)
    history: list[dict[str, float]] = []
    best: tuple[float, float, Tensor] | None = None
    for l2 in sorted(settings.l2, reverse=True):
        weights, evaluations = _fit(train, mean_D, std_D, l2, weights)
        logits_N = val.logits(weights, mean_D, std_D)
        val_loss = float(val.loss(logits_N))
        history.append(
            {
                "l2": l2,
                "evaluations": evaluations,
                "train_loss": float(train.loss(train.logits(weights, mean_D, std_D))),
                "val_loss": val_loss,
                "val_auc": auc(val.labels_N.cpu().numpy().astype(np.int64), logits_N.cpu().numpy()),
            }
        )
        if best is None or val_loss < best[0]:
            best = val_loss, l2, weights
    assert best is not None
    probe = _as_module(best[2].cpu(), mean_D.cpu(), std_D.cpu(), settings)
    counts = {f"{name}_{kind}": n for name, data in (("train", train), ("val", val)) for kind, n in data.counts()}
    warnings = (*(f"training: {note}" for note in labelled[0][1]), *(f"validation: {n}" for n in labelled[1][1]))
    return TrainedProbe(probe, best[1], tuple(history), counts, warnings)


def save_probe(folder: Path, trained: TrainedProbe, info: Mapping[str, Any]) -> None:
    """Write the probe's folder: weights, penalty, tile counts. For inspection only: every comparison refits the probe.

    `info` is further metadata from the caller (encoder, split, seed).
    """
    config = {**info, "module": trained.module.config, "l2": trained.l2, "num_tiles": trained.num_tiles}
    write_model(folder, KIND, trained.module.state_dict(), config, trained.history)


# ---------------------------------------------------------------------------------------------------- data


@dataclass(frozen=True, eq=False)
class _LabelledEmbeddings:
    """Embeddings of labelled tiles of many slides, with weights that sum to one half for each class."""

    embeddings_ND: Tensor
    """In the bags' own dtype."""
    labels_N: Tensor
    """0 or 1, float64."""
    weights_N: Tensor

    def centred(self, mean_D: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield chunks of the embeddings minus `mean_D` in float32, each valid until the next: they share a buffer."""
        dim = self.embeddings_ND.shape[1]
        rows = max(1, CHUNK_BYTES // (4 * dim))
        memory = torch.empty((min(rows, len(self.embeddings_ND)), dim), device=self.embeddings_ND.device)
        for start in range(0, len(self.embeddings_ND), rows):
            part = slice(start, start + rows)
            piece = self.embeddings_ND[part]
            yield part, memory[: len(piece)].copy_(piece).sub_(mean_D)

    def counts(self) -> list[tuple[str, int]]:
        tumour = int(self.labels_N.sum())
        return [("tumour", tumour), ("normal", len(self.labels_N) - tumour)]

    def moments(self) -> tuple[Tensor, Tensor]:
        """Return mean and standard deviation of each dimension, float32; 1 for a constant dimension."""
        moments = measure(self.embeddings_ND)
        std_D = (moments.squares_D / moments.count).sqrt()
        return moments.mean_D.float(), torch.where(std_D > 1e-6, std_D, 1.0).float()

    def logits(self, weights: Tensor, mean_D: Tensor, std_D: Tensor) -> Tensor:
        """Return float64 logits (N,) for weights (D + 1,) of standardized embeddings, the bias last."""
        weight_D = weights[:-1].float() / std_D
        return torch.cat([chunk.mv(weight_D) for _, chunk in self.centred(mean_D)]).double() + weights[-1]

    def loss(self, logits_N: Tensor) -> Tensor:
        """Return the class-balanced log loss."""
        return (self.weights_N * F.softplus((1 - 2 * self.labels_N) * logits_N)).sum()


def _gather(
    slides: Sequence[LabelledTiles], bags: Mapping[str, Bag], most: int, entropy: tuple[int, int], device: torch.device
) -> _LabelledEmbeddings:
    """Return the sampled rows of all slides in one tensor; raise BagError for values that are not finite."""
    dims = {bags[each.slide.slide].dim for each in slides}
    if len(dims) > 1:
        raise _mixed_dimensions(dims, "the slides")
    rows_of = [
        sample_rows(each.labels_N, most, np.random.default_rng([*entropy, number]))
        for number, each in enumerate(slides)
    ]
    dtype = np.result_type(*(bags[each.slide.slide].features_ND.dtype for each in slides))
    embeddings_ND = np.empty((sum(map(len, rows_of)), dims.pop()), dtype=dtype)
    start = 0
    for each, rows in zip(slides, rows_of, strict=True):
        part = embeddings_ND[start : start + len(rows)]
        part[:] = bags[each.slide.slide].features_ND[rows]
        if not np.isfinite(part).all():
            raise BagError(
                f"{each.slide.slide}: its embeddings contain NaN or infinity",
                "the probe cannot be fitted",
                "Embed the slide again; with half precision, check the encoder for overflow",
                code="non-finite-features",
            )
        start += len(rows)
    labels_N = np.concatenate([each.labels_N[rows] for each, rows in zip(slides, rows_of, strict=True)])
    weights_N = 0.5 / np.bincount(labels_N, minlength=2)[labels_N]
    tensors = (
        torch.from_numpy(values).to(device) for values in (embeddings_ND, labels_N.astype(np.float64), weights_N)
    )
    return _LabelledEmbeddings(*tensors)


def _mixed_dimensions(dims: set[int], where: str) -> BagError:
    return BagError(
        f"embeddings of {where} have {' and '.join(map(str, sorted(dims)))} dimensions",
        "they come from different encoders",
        "Embed all slides with one encoder",
        code="mixed-embeddings",
    )


# ---------------------------------------------------------------------------------------------------- fit


def _fit(data: _LabelledEmbeddings, mean_D: Tensor, std_D: Tensor, l2: float, start: Tensor) -> tuple[Tensor, int]:
    """Return the weights (D + 1,) that minimize balanced log loss + l2 / 2 |w|^2, and the number of passes."""
    weights = start.clone().requires_grad_()
    optimizer = torch.optim.LBFGS(
        [weights],
        max_iter=MAX_ITERATIONS,
        tolerance_grad=1e-6,
        tolerance_change=1e-10,
        history_size=20,
        line_search_fn="strong_wolfe",
    )
    passes = 0

    @torch.no_grad()
    def evaluate() -> Tensor:
        nonlocal passes
        passes += 1
        loss, gradient = _objective(data, mean_D, std_D, l2, weights)
        weights.grad = gradient
        return loss

    optimizer.step(evaluate)  # pyright: ignore[reportArgumentType]
    return weights.detach(), passes


def _objective(
    data: _LabelledEmbeddings, mean_D: Tensor, std_D: Tensor, l2: float, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Return loss and gradient in one pass over the embeddings: autograd would keep them all in float32."""
    weight_D = weights[:-1].float() / std_D
    loss = 0.5 * l2 * weights[:-1].square().sum()
    gradient = torch.cat([l2 * weights[:-1], weights.new_zeros(1)])
    for part, chunk in data.centred(mean_D):
        logits = chunk.mv(weight_D).double() + weights[-1]
        sign = 1 - 2 * data.labels_N[part]
        loss = loss + (data.weights_N[part] * F.softplus(sign * logits)).sum()
        residual = data.weights_N[part] * sign * torch.sigmoid(sign * logits)
        gradient[:-1] += (residual.float() @ chunk) / std_D
        gradient[-1] += residual.sum()
    return loss, gradient


def _as_module(weights: Tensor, mean_D: Tensor, std_D: Tensor, settings: SupervisedSettings) -> TileProbe:
    probe = TileProbe(len(mean_D), pool=settings.pool, k=settings.k)
    with torch.no_grad():
        probe.scorer.weight.copy_(weights[None, :-1])
        probe.scorer.bias.copy_(weights[-1:])
    probe.set_standardization(mean_D, std_D)
    return probe.eval()
