"""An estimate of an encoder's quality that needs no labels, measured while it is trained.

A fixed sample of training tiles is seen in two fixed views each. An encoder that knows the tissue finds the same
neighbours for a tile by either view; one that knows only colours, positions or noise does not. So for every tile the k
nearest tiles of *other* slides (by cosine similarity) are found among the first views and among the second views, and

    agreement = tiles that are in both sets / k,    expected by chance = k / number of candidates,
    quality   = mean over tiles of (agreement - expected) / (1 - expected).

It is 0 for random embeddings and 1 where the view makes no difference. Neighbours come from other slides since tiles of
one slide resemble each other by their stain. For the same reason the views differ strongly in stain and colour. They
are cut out of the tile at the scale of the run's large views, all at the middle of its range, so that the two views of
a tile show different parts of the same tissue. Embeddings are those of the encoder's own layout, which is what a slide
is classified by, and not those of the class token alone that the objective trains.

Beside it: alignment (mean squared distance of the two views of a tile) and uniformity (log of the mean Gaussian
potential of pairs of tiles) of Wang and Isola (2020, arXiv 2005.10242) on embeddings of length one, and the effective
rank of the embeddings. All of it is deterministic and draws from no generator of torch: runs come out the same with and
without it.

All evaluations see the same tiles, so two of them are compared tile by tile: the standard error is that of the mean
*difference*, which is smaller than that of either. The evaluation with the best quality so far is the peak.

* Kept are the latest weights that are not worse than the peak by more than one standard error. Later weights are
  preferred as long as the measure cannot tell them from the best, since a falling learning rate improves more than the
  measure sees. Everything is compared with the peak and not with what is kept, or else many small steps downhill would
  pass unnoticed.
* An evaluation is low where it is worse than the peak by more than three standard errors and by more than a tenth of
  the peak. Two low ones in a row raise an alarm. Where they last for a fifth of the run, and the last is no better than
  the first of them, the run ends early.
* Evaluations before the end of the warm-up count for neither: an untrained network compares colours and edges, which
  views share, and so may start with a quality that a sound run passes later.

Under torchrun the first process measures and decides, the others wait for its decision.

Axes in names: N tiles of the sample, D length of an embedding, 2 the views, S edge of a view, 3 is RGB.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from selfvitmil.data.loader import read_ahead, requests_of
from selfvitmil.data.sources import Indices, TileSource
from selfvitmil.data.views import ViewRecipe, make_views
from selfvitmil.encoder import Encoder
from selfvitmil.pretrain.objectives import at_least_float32
from selfvitmil.runtime.device import evaluation_mode, full_float32

EVALUATIONS = 20
"""Evaluations of a run, where they cost little enough."""
FEWEST_EVALUATIONS = 8
MOST_TILES = 1024
"""Tiles of the sample, where they cost little enough."""
WANTED_TILES = 256
"""With fewer tiles there are fewer evaluations, down to `FEWEST_EVALUATIONS`."""
FEWEST_TILES = 64
"""With fewer tiles nothing is measured: the noise would decide."""
SHARE = 0.03
"""Most arithmetic of all evaluations, as a share of the training's."""
NEIGHBOURS = 10
FEWEST_CANDIDATES = 5
"""Candidates for each neighbour; where other slides have fewer tiles, all other tiles are candidates."""
FEWEST_SLIDES = 10
"""Slides from which on the standard error is that over slides; with fewer it is that over tiles."""
BATCH = 128
"""Views that are embedded at once."""
POTENTIAL = 2.0
"""t of the Gaussian potential exp(-t * squared distance)."""
_TAG = 0x51AB
"""Sets the random numbers of this module apart from others with the same seed."""


# ---------------------------------------------------------------------------------------------------- how much


@dataclass(frozen=True)
class EvaluationPlan:
    """When quality is measured, and on how many tiles."""

    tiles: int
    every: int
    """Steps between evaluations; the last step has one too."""
    total_steps: int

    def is_due(self, step: int) -> bool:
        """Whether the weights after so many steps are measured."""
        return step % self.every == 0 or step == self.total_steps

    @property
    def evaluations(self) -> int:
        return -(-self.total_steps // self.every)

    @property
    def patience(self) -> int:
        """Low evaluations in a row that make a fifth of the run, which end it."""
        return max(FEWEST_LOW, round(self.evaluations / 5))


def plan_evaluations(total_steps: int, training_cost: float, view_cost: float, num_tiles: int) -> EvaluationPlan | None:
    """As many evaluations and tiles as `SHARE` of the training allows; None where that is too little to measure by.

    `training_cost` is the arithmetic of the whole run, `view_cost` that of the forward pass of one view, in one unit.
    """
    affordable = SHARE * training_cost / (2 * view_cost)
    evaluations = int(min(max(affordable // WANTED_TILES, FEWEST_EVALUATIONS), EVALUATIONS, total_steps))
    tiles = int(min(affordable // evaluations, MOST_TILES, num_tiles))
    if tiles < FEWEST_TILES:
        return None
    return EvaluationPlan(tiles, -(-total_steps // evaluations), total_steps)


# ---------------------------------------------------------------------------------------------------- formulas


@dataclass(frozen=True)
class QualityMetrics:
    """Label-free quality metrics of an encoder."""

    agreement_N: Tensor
    """Agreement of every tile, corrected for chance (float64, on the CPU). Its mean is the quality."""
    quality_se: float
    alignment: float
    uniformity: float
    rank: float

    @property
    def quality(self) -> float:
        return float(self.agreement_N.mean())

    def to_line(self) -> dict[str, float]:
        """Return the metrics by the names that metrics.jsonl has for them."""
        found = {name: getattr(self, name) for name in ("quality", "quality_se", "alignment", "uniformity")}
        return found | {"sample_rank": self.rank}


def measure(embeddings_2ND: Tensor, groups_N: Tensor) -> QualityMetrics:
    """Return all metrics of this module for the embeddings of both views; `groups_N` is the slide of each tile."""
    agreement_N = neighbour_agreement(embeddings_2ND, groups_N).cpu()
    directions_2ND = functional.normalize(embeddings_2ND.float(), dim=-1)
    return QualityMetrics(
        agreement_N,
        standard_error(agreement_N, groups_N),
        alignment(directions_2ND),
        uniformity(directions_2ND),
        float(effective_rank(embeddings_2ND[0])),
    )


def neighbour_agreement(embeddings_2ND: Tensor, groups_N: Tensor, most: int = NEIGHBOURS) -> Tensor:
    """(N,) share of the nearest tiles of other slides that both views of a tile have in common, corrected for chance.

    Where all tiles are of one slide, or a tile has too few candidates in others, all other tiles are candidates. Each
    tile has `most` neighbours, and fewer where there are not `FEWEST_CANDIDATES` tiles to choose each from.
    """
    candidates_NN = _candidates(groups_N.to(embeddings_2ND.device), most)
    count_N = candidates_NN.sum(dim=1)
    k = max(min(most, int(count_N.min()) // FEWEST_CANDIDATES), 1)
    first_NN, second_NN = (
        _nearest(embeddings_ND, candidates_NN, k, view) for view, embeddings_ND in enumerate(embeddings_2ND)
    )
    agreement_N = (first_NN & second_NN).sum(dim=1).double() / k
    expected_N = k / count_N.double()
    return (agreement_N - expected_N) / (1 - expected_N)


def _candidates(groups_N: Tensor, most: int) -> Tensor:
    """(N, N): which tiles may be a tile's neighbours."""
    elsewhere_NN = groups_N[:, None] != groups_N
    if int(elsewhere_NN.sum(dim=1).min()) >= FEWEST_CANDIDATES * most:
        return elsewhere_NN
    return ~torch.eye(len(groups_N), dtype=torch.bool, device=groups_N.device)


def _nearest(embeddings_ND: Tensor, candidates_NN: Tensor, k: int, view: int) -> Tensor:
    """(N, N): which `k` candidates are most similar to a tile.

    Equally similar ones are taken in an order that differs from view to view: the neighbours that an encoder finds
    which says the same of all tiles agree no more than by chance.
    """
    count = len(embeddings_ND)
    directions_ND = functional.normalize(embeddings_ND.float(), dim=-1)
    with full_float32():
        similar_NN = (directions_ND @ directions_ND.T).masked_fill(~candidates_NN, -torch.inf)
    order_N = torch.from_numpy(np.random.default_rng([_TAG, view]).permutation(count)).to(similar_NN.device)
    places_NK = similar_NN[:, order_N].sort(dim=1, descending=True, stable=True).indices[:, :k]
    return torch.zeros_like(candidates_NN).scatter(1, order_N[places_NK], value=True)


def alignment(directions_2ND: Tensor) -> float:
    """Mean squared distance between the two views of a tile."""
    return float((directions_2ND[0] - directions_2ND[1]).square().sum(dim=1).mean())


def uniformity(directions_2ND: Tensor) -> float:
    """Log of the mean of exp(-2 * squared distance) over all pairs of tiles, averaged over the two views."""
    count = directions_2ND.shape[1]
    pairs = count * (count - 1)
    found: list[float] = []
    with full_float32():
        for directions_ND in directions_2ND:
            potential_NN = -POTENTIAL * (2 - 2 * directions_ND @ directions_ND.T).double()
            potential_NN.fill_diagonal_(-torch.inf)
            found.append(float(torch.logsumexp(potential_NN.flatten(), dim=0)) - float(np.log(pairs)))
    return sum(found) / len(found)


@torch.no_grad()
def effective_rank(features_ND: Tensor) -> Tensor:
    """Exponential of the entropy of the normalized singular values: how many directions the embeddings really use.

    The mean is not subtracted. It would leave only rounding noise, which has full rank, when all embeddings are equal.
    """
    values = torch.linalg.svdvals(at_least_float32(features_ND))
    shares = values / values.sum().clamp_min(torch.finfo(values.dtype).tiny)
    return torch.special.entr(shares).sum().exp()


@torch.no_grad()
def feature_std(features_ND: Tensor) -> Tensor:
    """Spread of the directions of embeddings: about 1 when they fill the sphere, 0 when all are the same."""
    directions_ND = functional.normalize(at_least_float32(features_ND), dim=-1)
    return directions_ND.std(dim=0, correction=0).mean() * math.sqrt(features_ND.shape[-1])


def standard_error(values_N: Tensor, groups_N: Tensor) -> float:
    """Standard error of the mean, by leaving out one slide after the other; by tiles where slides are too few.

    The jackknife: with G groups and m_g the mean without group g, the square root of (G - 1) / G times the sum of
    (m_g - mean of all m_g) squared.
    """
    groups = np.unique(groups_N.numpy(), return_inverse=True)[1]
    values = values_N.numpy()
    if groups.max() + 1 < FEWEST_SLIDES:
        groups = np.arange(len(values))
    count = groups.max() + 1
    without = (values.sum() - np.bincount(groups, values)) / (len(values) - np.bincount(groups))
    return float(np.sqrt((count - 1) / count * np.square(without - without.mean()).sum()))


# ---------------------------------------------------------------------------------------------------- the sample


@dataclass(frozen=True)
class Sample:
    """Two fixed views of some tiles."""

    views_2N3SS: Tensor
    """uint8, on the CPU."""
    groups_N: Tensor
    """Number of the slide of each tile."""

    def measure(self, encoder: Encoder) -> QualityMetrics:
        """Return the quality of an encoder on these tiles; the encoder is left unchanged."""
        rows_R3SS = self.views_2N3SS.flatten(0, 1)
        with full_float32():
            rows_RD = embed_tiles(encoder, rows_R3SS.split(BATCH))
        assert rows_RD is not None
        return measure(rows_RD.unflatten(0, self.views_2N3SS.shape[:2]), self.groups_N)


def read_sample(source: TileSource, recipe: ViewRecipe, num_tiles: int, seed: int, workers: int) -> Sample:
    """Read tiles of as many slides as possible and make their views; the same ones on every call."""
    tiles_N = choose_tiles(source.counts, num_tiles, seed)
    firsts = np.concatenate([[0], np.cumsum(source.counts)])
    groups_N = np.searchsorted(firsts, tiles_N, side="right") - 1
    views: list[Tensor] = []
    done = 0
    for pixels in read_ahead(source, requests_of(source, tiles_N), workers):
        part = slice(done, done + len(pixels.tiles_B3HW))
        ids_B = torch.from_numpy(source.ids[tiles_N[part]])
        views.append(two_views(pixels.tiles_B3HW, ids_B, recipe, seed, source.stain_transforms(groups_N[part])))
        done = part.stop
    return Sample(torch.cat(views, dim=1), torch.from_numpy(groups_N))


def choose_tiles(counts: Sequence[int], num_tiles: int, seed: int) -> Indices:
    """Numbers of so many tiles, in rising order, drawn at random from all slides alike as far as these have enough."""
    generator = np.random.default_rng([seed, _TAG])
    sizes = np.asarray(counts)
    quotas = np.zeros(len(sizes), dtype=np.int64)
    while (left := num_tiles - quotas.sum()) > 0 and (open_slides := np.flatnonzero(quotas < sizes)).size:
        each = left // len(open_slides)
        if each == 0:
            open_slides, each = generator.permutation(open_slides)[:left], 1
        quotas[open_slides] = np.minimum(quotas[open_slides] + each, sizes[open_slides])
    firsts = np.concatenate([[0], np.cumsum(sizes)])
    chosen = [
        first + np.sort(generator.permutation(size)[:quota])
        for first, size, quota in zip(firsts, sizes, quotas, strict=False)
    ]
    return np.concatenate(chosen).astype(np.int64)


def two_views(
    tiles_B3HW: Tensor, ids_B: Tensor, recipe: ViewRecipe, seed: int, transforms_B33: np.ndarray | None = None
) -> Tensor:
    """(2, B, 3, S, S) as uint8: two views by `view_recipe`, each a function of the tile and the seed alone."""
    recipes, black, grey_level = (view_recipe(recipe),) * 2, (0.0,) * 3, (1 / 255,) * 3
    # A step that no training has: its views are none of these.
    (views,) = make_views(
        tiles_B3HW, ids_B, 2**32 - 1, recipes, black, grey_level, seed=seed, transforms_B33=transforms_B33
    )
    return views.round().clamp(0, 255).to(torch.uint8)


def view_recipe(large: ViewRecipe) -> ViewRecipe:
    """Views of the size and mean scale of a run's large views, with colours so varied that these say little."""
    area = sum(large.scale) / 2
    return replace(
        large,
        scale=(area, area),
        ratio=(1.0, 1.0),
        hflip=0.5,
        vflip=0.5,
        right_angles=True,
        stain=1.0,
        stain_scale=0.4,
        stain_shift=0.1,
        jitter=1.0,
        brightness=0.3,
        contrast=0.3,
        saturation=0.4,
        hue=0.08,
        grey=0.2,
        blur=0.0,
        solarize=0.0,
    )


@torch.no_grad()
def embed_tiles(
    encoder: Encoder,
    batches: Iterable[Tensor],
    dtype: torch.dtype = torch.float32,
    stop: Callable[[], bool] = lambda: False,
) -> Tensor | None:
    """Return the float32 embeddings (N, D) of uint8 tiles on the encoder's device; None when `stop` returned True."""
    device = encoder.scale_311.device
    embeddings: list[Tensor] = []
    with evaluation_mode(encoder), torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
        for tiles_B3HW in batches:
            if stop():
                return None
            embeddings.append(encoder.encode(tiles_B3HW.to(device)).float())
    return torch.cat(embeddings)


# ---------------------------------------------------------------------------------------------------- decisions

KEEP_WITHIN = 1.0
"""Standard errors by which kept weights may be worse than the best."""
LOW_BEYOND = 3.0
"""Standard errors by which a low evaluation is worse than the best."""
LOW_SHARE = 0.1
"""Share of the best quality by which a low evaluation is worse at least."""
ALARM_AFTER = 2
"""Low evaluations in a row that raise an alarm."""
CHANCE_WITHIN = 2.0
"""Standard errors above 0 within which quality is no better than chance."""
FEWEST_LOW = 3
"""Low evaluations in a row that end a run, at least."""


@dataclass(frozen=True)
class Ending:
    """How a run ended and which of its weights are the encoder. Steps are counted from 1; no quality, not measured."""

    total_steps: int
    """Steps that the settings ask for."""
    ended_step: int
    """Steps that were done: fewer where the run was stopped early."""
    kept_step: int
    """The step after which the weights of the encoder were taken."""
    kept_quality: float | None = None
    best_quality: float | None = None
    last_quality: float | None = None

    @property
    def stopped_early(self) -> bool:
        return self.ended_step < self.total_steps

    @property
    def words(self) -> str:
        """What a reader should know; nothing where the last weights of the whole run were kept."""
        kept = f"kept the weights of step {self.kept_step:,}"
        if self.stopped_early:
            return (
                f"stopped early at step {self.ended_step:,} of {self.total_steps:,}: quality fell from "
                f"{self.best_quality:.3f} to {self.last_quality:.3f}; {kept}"
            )
        if self.kept_step < self.ended_step:
            return f"{kept}, whose quality is {self.kept_quality:.3f} ({self.last_quality:.3f} at the end)"
        return ""


@dataclass
class QualityHistory:
    """Evaluations of a run so far, as far as decisions need them."""

    patience: int
    """Low evaluations in a row that end the run."""
    first_step: int
    """Evaluations before this step do not count."""
    peak: float | None = None
    peak_N: Tensor | None = None
    """Agreement of every tile at the peak."""
    kept_step: int | None = None
    kept_quality: float | None = None
    last_quality: float | None = None
    low: int = 0
    """Low evaluations in a row."""
    first_low: float = 0.0
    """Quality of the first of these."""
    fell: bool = False
    """Whether the quality stayed low for so long that the run is to end."""

    def add(self, step: int, measured: QualityMetrics, groups_N: Tensor) -> bool:
        """Add the evaluation after so many steps; return whether its weights are to be kept."""
        quality = self.last_quality = measured.quality
        if step < self.first_step:
            return False
        if self.peak is None or self.peak_N is None or quality >= self.peak:
            self.peak, self.peak_N, self.low = quality, measured.agreement_N, 0
            return self._keep(step, quality)
        fall = self.peak - quality
        error = standard_error(self.peak_N - measured.agreement_N, groups_N)
        if fall > LOW_BEYOND * error and fall > LOW_SHARE * self.peak:
            self.first_low = quality if self.low == 0 else self.first_low
            self.low += 1
            self.fell = self.fell or (self.low >= self.patience and quality <= self.first_low)
        else:
            self.low = 0
        return self._keep(step, quality) if fall <= KEEP_WITHIN * error else False

    def _keep(self, step: int, quality: float) -> bool:
        self.kept_step, self.kept_quality = step, quality
        return True

    @property
    def alarm(self) -> str | None:
        """What is wrong at the last evaluation."""
        if self.low < ALARM_AFTER or self.peak is None or self.last_quality is None:
            return None
        return f"the quality of the embeddings fell from {self.peak:.3f} to {self.last_quality:.3f}"


@dataclass
class QualityMonitor:
    """Measures the quality of a run at intervals, holds the best weights, and decides on early stopping."""

    plan: EvaluationPlan | None
    """None where the run is too short to be measured."""
    history: QualityHistory
    remedy: str
    """What to change where the quality falls."""
    keeps: bool
    """Whether the best weights are kept (`pretrain.keep`)."""
    stops: bool
    """Whether the run ends early when its quality fell (`pretrain.stop_early`)."""
    sample: Sample | None = None
    """Only in the process that measures."""
    group: Any = None
    """Processes that wait for the decision; None where there is one process."""
    kept: dict[str, Tensor] = field(default_factory=dict)
    """Weights of the network of `history.kept_step`, on the CPU."""

    def is_due(self, step: int) -> bool:
        """Whether the weights after so many steps are to be measured."""
        return self.plan is not None and self.plan.is_due(step)

    @property
    def ends(self) -> bool:
        """Whether the run is to end before its last step."""
        return self.stops and self.history.fell

    def evaluate(self, encoder: Encoder, step: int) -> dict[str, Any]:
        """Measure and decide; return the metrics in the first process, else nothing."""
        found: dict[str, Any] = {}
        if self.sample is not None:
            measured = self.sample.measure(encoder)
            if self.history.add(step, measured, self.sample.groups_N) and self.keeps:
                weights = encoder.backbone.state_dict()
                self.kept = {name: value.detach().to("cpu", copy=True) for name, value in weights.items()}
            found = measured.to_line()
            if self.history.alarm:
                found["alarm"] = f"{self.history.alarm}. {self.remedy}"
        if self.group is not None:
            decided = [getattr(self.history, name) for name in _DECIDED]
            dist.broadcast_object_list(decided, src=0, group=self.group)
            for name, value in zip(_DECIDED, decided, strict=True):
                setattr(self.history, name, value)
        return found

    def ending(self, step: int, total_steps: int) -> Ending:
        """Return how the run ends after so many steps."""
        own = self.history
        qualities = {"best_quality": own.peak, "last_quality": own.last_quality}
        if self.keeps and own.kept_step is not None:
            return Ending(total_steps, step, own.kept_step, own.kept_quality, **qualities)
        return Ending(total_steps, step, step, own.last_quality, **qualities)

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs to make the same decisions."""
        return {"course": asdict(self.history), "kept": self.kept}

    def load(self, state: dict[str, Any]) -> None:
        """Continue from what `state` gave."""
        self.history, self.kept = QualityHistory(**state["course"]), state["kept"]


_DECIDED = ("peak", "kept_step", "kept_quality", "last_quality", "fell")
"""What all processes know of the history."""
