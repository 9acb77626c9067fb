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

Axes in names: N tiles of the sample, D length of an embedding, 2 the views, S edge of a view, 3 is RGB.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from selfvitmil.data.loader import read_ahead, requests_of
from selfvitmil.data.sources import Indices, TileSource
from selfvitmil.data.views import ViewRecipe, make_views
from selfvitmil.encoder import Encoder
from selfvitmil.pretrain.loss import effective_rank
from selfvitmil.pretrain.probe import embed_tiles
from selfvitmil.runtime.device import full_float32

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
class Plan:
    """When to measure, and on how many tiles."""

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


def plan_evaluations(total_steps: int, training_cost: float, view_cost: float, num_tiles: int) -> Plan | None:
    """As many evaluations and tiles as `SHARE` of the training allows; None where that is too little to measure by.

    `training_cost` is the arithmetic of the whole run, `view_cost` that of the forward pass of one view, in one unit.
    """
    affordable = SHARE * training_cost / (2 * view_cost)
    evaluations = int(min(max(affordable // WANTED_TILES, FEWEST_EVALUATIONS), EVALUATIONS, total_steps))
    tiles = int(min(affordable // evaluations, MOST_TILES, num_tiles))
    if tiles < FEWEST_TILES:
        return None
    return Plan(tiles, -(-total_steps // evaluations), total_steps)


# ---------------------------------------------------------------------------------------------------- formulas


@dataclass(frozen=True)
class Measured:
    """What the sample says of an encoder."""

    agreement_N: Tensor
    """Agreement of every tile, corrected for chance (float64, on the CPU). Its mean is the quality."""
    quality_se: float
    alignment: float
    uniformity: float
    rank: float

    @property
    def quality(self) -> float:
        return float(self.agreement_N.mean())


def measure(embeddings_2ND: Tensor, groups_N: Tensor) -> Measured:
    """All numbers of this module for the embeddings of both views; `groups_N` says which slide a tile is of."""
    agreement_N = neighbour_agreement(embeddings_2ND, groups_N).cpu()
    directions_2ND = functional.normalize(embeddings_2ND.float(), dim=-1)
    return Measured(
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

    def measure(self, encoder: Encoder) -> Measured:
        """What these tiles say of an encoder, which is left as it was."""
        rows_R3SS = self.views_2N3SS.flatten(0, 1)
        with full_float32():
            rows_RD = embed_tiles(encoder, rows_R3SS.split(BATCH))
        assert rows_RD is not None
        return measure(rows_RD.unflatten(0, self.views_2N3SS.shape[:2]), self.groups_N)


def read_sample(source: TileSource, recipe: ViewRecipe, num_tiles: int, seed: int, workers: int) -> Sample:
    """Read tiles of as many slides as possible and make their views; the same ones whenever it is asked."""
    tiles_N = choose_tiles(source.counts, num_tiles, seed)
    firsts = np.concatenate([[0], np.cumsum(source.counts)])
    groups_N = np.searchsorted(firsts, tiles_N, side="right") - 1
    views: list[Tensor] = []
    done = 0
    for pixels in read_ahead(source, requests_of(source, tiles_N), workers):
        part = slice(done, done + len(pixels.tiles_B3HW))
        ids_B = torch.from_numpy(source.ids[tiles_N[part]])
        views.append(two_views(pixels.tiles_B3HW, ids_B, recipe, seed, source.maps(groups_N[part])))
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
    tiles_B3HW: Tensor, ids_B: Tensor, recipe: ViewRecipe, seed: int, maps_B33: np.ndarray | None = None
) -> Tensor:
    """(2, B, 3, S, S) as uint8: two views by `view_recipe`, each a function of the tile and the seed alone."""
    recipes, black, grey_level = (view_recipe(recipe),) * 2, (0.0,) * 3, (1 / 255,) * 3
    # A step that no training has: its views are none of these.
    (views,) = make_views(tiles_B3HW, ids_B, 2**32 - 1, recipes, black, grey_level, seed=seed, maps_B33=maps_B33)
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
