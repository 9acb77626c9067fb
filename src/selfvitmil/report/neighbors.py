"""Tiles and slides beside those of other patients that have the most similar embeddings.

The first half is pure: embeddings of length one in, rows out. Queries are spread over the embeddings by principal
direction divisive partitioning (Boley 1998): the most scattered cluster is split along its first principal component
until there are enough, and the most central tile of each is shown. Nothing is drawn at random, and outliers get no
cluster of their own. The second part reads feature files and slides. Label and macro images are never read. The
third shows what the command `slide-embeddings` found of slides.

Axes in names: N tiles, D feature dimension.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from selfvitmil.bags import Bag, find_bags, read_bag
from selfvitmil.bags.retrieval import Embeddings, Neighbors, Rows, nearest, newest_similar, read_similar
from selfvitmil.cohort import Cohort, SlideRow
from selfvitmil.errors import ArtefactError, BagError, SelfVitMilError, SlideError
from selfvitmil.pseudonyms import Names
from selfvitmil.report.encoders import evenly_spaced
from selfvitmil.report.render import Shown, picture, picture_file
from selfvitmil.slides import SlideCache, SlideRef
from selfvitmil.store.files import section
from selfvitmil.store.layout import StudyLayout, feature_name

NUM_QUERIES, NUM_NEIGHBORS = 6, 5
NUM_SLIDE_QUERIES, NUM_SIMILAR = 4, 5
TILE_PX = 104
"""Largest edge of a tile on the page."""
EDGE_PX = 150
"""Longer edge of a slide's picture."""
MOST_FEATURES = 2
"""Features folders whose neighbours are shown."""
MOST_SLIDES = 200
"""Slides that are searched; of more, so many evenly spaced ones."""
MOST_VALUES = 32_000_000
"""Values of all embeddings that are searched, 128 MB; of more, evenly spaced tiles of every slide."""
MOST_CLUSTERED = 4000
"""Tiles among which queries are chosen."""
SPLIT_TURNS = 20
"""Turns of the power iteration that finds a principal component."""


@dataclass(frozen=True)
class NeighborTile:
    """A query, or one of its neighbours."""

    slide: str
    similarity: float | None
    """Cosine similarity to the query; None for the query itself."""
    picture: Shown


@dataclass(frozen=True)
class NeighborData:
    """Queries of one encoder, each followed by its neighbours."""

    encoder: str
    description: str
    """What is shown; why nothing is, where there are no tiles."""
    tiles: tuple[NeighborTile, ...] = ()


def neighbor_data(layout: StudyLayout, cohort: Cohort | None, features: str, reader: str, names: Names) -> NeighborData:
    """Return the neighbours in the features `<tiling>/<encoder>`, with the pictures of their tiles."""
    tiling, encoder = features.split("/", 1)
    try:
        if cohort is None:
            raise BagError("no cohort.csv says where the slides are", code="no-cohort")
        pool = read_pool(layout.features(tiling, encoder), cohort)
        found = find_neighbors(pool)
    except SelfVitMilError as error:
        return NeighborData(encoder, error.reason)
    except OSError:
        return NeighborData(encoder, "its feature files cannot be read")
    cache = SlideCache()
    try:
        tiles = tuple(tile for one in found for tile in _show(pool, one, names, cache, reader))
    finally:
        cache.close()
    return NeighborData(encoder, _describe(pool, len(found)), tiles)


def _describe(pool: Pool, num_queries: int) -> str:
    searched = f"{len(pool.unit_ND):,}"
    which = f"all {searched}" if len(pool.unit_ND) == pool.num_tiles else f"{searched} of {pool.num_tiles:,}"
    others = "patients" if any(slide.row.patient_stated for slide in pool.slides) else "slides"
    return (
        f"Framed: {num_queries} tiles of different slides, one of each cluster of the embeddings. Beside each the "
        f"{NUM_NEIGHBORS} tiles of other {others} with the most similar embeddings (cosine similarity), among {which} "
        f"tiles of {len(pool.slides)} slides."
    )


def _show(pool: Pool, found: Neighbors, names: Names, cache: SlideCache, reader: str) -> Iterator[NeighborTile]:
    """Yield the query, then its neighbours."""
    for place, tile in enumerate((found.query, *found.rows)):
        slide = names.slide(pool.slides[int(pool.slide_N[tile])].row.slide)
        similarity = float(found.similarity[place - 1]) if place else None
        alt = (
            f"query tile of {slide}"
            if similarity is None
            else f"neighbour of {slide}, cosine similarity {similarity:.3f}"
        )
        try:
            shown: Shown = picture(read_tile(pool, int(tile), cache, reader), alt, edge_px=TILE_PX, quality=70)
        except SelfVitMilError:
            shown = "cannot be read"
        yield NeighborTile(slide, similarity, shown)


def shown_features(
    features: Iterable[str], trained: Sequence[str], known: Sequence[str], pictured: Sequence[str]
) -> list[str]:
    """Return `<tiling>/<encoder>` of the first features of a trained encoder and of one that is not in the study.

    `trained` and `known` are the encoders that were trained in the study, and all of it. Baselines of a comparison are
    encoders of the study without a training, and are not shown. Tilings that are `pictured`, the finest ones, go first.
    """
    found = sorted(features, key=lambda key: key.split("/")[0] not in pictured)
    own = [key for key in found if any(_is_of(key, encoder) for encoder in trained)]
    foreign = [key for key in found if not any(_is_of(key, encoder) for encoder in known)]
    return [*own[:1], *foreign[:1]][:MOST_FEATURES]


def _is_of(features: str, encoder: str) -> bool:
    """Return whether these features are of this encoder, in any layout."""
    name = features.split("/", 1)[1]
    return name == encoder or name.startswith(f"{encoder}__")


# ---------------------------------------------------------------------------------------------------- search, pure


def choose_queries(unit_ND: Embeddings, slide_N: Rows, most: int) -> list[int]:
    """Return rows of up to `most` tiles of different slides and clusters, those of large clusters first."""
    looked = evenly_spaced(np.arange(len(unit_ND)), MOST_CLUSTERED)
    clusters = [looked[cluster] for cluster in split_clusters(unit_ND[looked], most)]
    chosen: list[int] = []
    for cluster in sorted(clusters, key=len, reverse=True):
        free = cluster[~np.isin(slide_N[cluster], slide_N[chosen])]
        if len(free):
            central = unit_ND[free] @ unit_ND[cluster].mean(axis=0)
            chosen.append(int(free[np.argmax(central)]))
    return chosen


def split_clusters(points_ND: Embeddings, number: int) -> list[Rows]:
    """Return rows of up to `number` clusters: again and again the most scattered one is split in two."""
    clusters: list[Rows] = [np.arange(len(points_ND))]
    scatter = [_scatter(points_ND)]
    while len(clusters) < min(number, len(points_ND)):
        widest = int(np.argmax(scatter))
        rows = clusters.pop(widest)
        scatter.pop(widest)
        upper = _upper_half(points_ND[rows])
        parts = [part for part in (rows[upper], rows[~upper]) if len(part)]
        clusters += parts
        # What does not split is not tried again.
        scatter += [_scatter(points_ND[part]) if len(parts) == 2 else -1.0 for part in parts]
        if max(scatter) <= 0:
            break
    return clusters


def _scatter(points_ND: Embeddings) -> float:
    """Return the sum of squared distances from the mean."""
    return float(((points_ND - points_ND.mean(axis=0)) ** 2).sum())


def _upper_half(points_ND: Embeddings) -> NDArray[np.bool_]:
    """Return which points lie above the mean along the first principal component."""
    centred_ND = points_ND - points_ND.mean(axis=0)
    direction_D = centred_ND[np.argmax((centred_ND**2).sum(axis=1))]
    for _ in range(SPLIT_TURNS):
        turned_D = centred_ND.T @ (centred_ND @ direction_D)
        length = float(np.linalg.norm(turned_D))
        if length == 0:
            break
        direction_D = turned_D / length
    return centred_ND @ direction_D > 0


# ---------------------------------------------------------------------------------------------------- feature files


class _Embedded(NamedTuple):
    """A slide with its feature file."""

    row: SlideRow
    bag: Bag


@dataclass(frozen=True, eq=False)
class Pool:
    """The tiles that are searched."""

    slides: Sequence[_Embedded]
    unit_ND: Embeddings
    """Embeddings of length one."""
    slide_N: Rows
    """Number of each tile's slide."""
    patient_N: Rows
    """Number of each tile's patient."""
    row_N: Rows
    """Row of each tile in its feature file."""
    num_tiles: int
    """Tiles that these slides have, searched or not."""


def read_pool(folder: Path, cohort: Cohort) -> Pool:
    """Read embeddings of the slides whose file and features are there.

    Feature files that cannot be read or lack coordinates are left out, as are embeddings with NaN. Raises BagError
    where fewer than two patients are left.
    """
    files = find_bags(folder)
    rows = [row for row in cohort.rows if row.slide in files and row.path.exists()]
    numbers = evenly_spaced(np.arange(len(rows)), MOST_SLIDES)
    slides = list(_embedded([rows[int(number)] for number in numbers], files))
    parts = [_unit_rows(slide.bag, MOST_VALUES // slide.bag.dim // len(slides)) for slide in slides]
    found = [(slide, part) for slide, part in zip(slides, parts, strict=True) if len(part.rows)]
    patients = list(dict.fromkeys(slide.row.patient for slide, _ in found))
    if len(patients) < 2:
        raise BagError("files and features of slides of at least two patients are needed", code="too-few-patients")
    counts = [len(part.rows) for _, part in found]
    patient = [patients.index(slide.row.patient) for slide, _ in found]
    return Pool(
        slides=[slide for slide, _ in found],
        unit_ND=np.concatenate([part.unit_ND for _, part in found]),
        slide_N=np.repeat(np.arange(len(found)), counts),
        patient_N=np.repeat(np.array(patient, dtype=np.int64), counts),
        row_N=np.concatenate([part.rows for _, part in found]),
        num_tiles=sum(len(slide.bag) for slide, _ in found),
    )


class _Part(NamedTuple):
    """Embeddings of a slide, and their rows in its feature file."""

    unit_ND: Embeddings
    rows: Rows


def _unit_rows(bag: Bag, most: int) -> _Part:
    """Return evenly spaced embeddings of a slide, scaled to length one, without those of no length."""
    rows = evenly_spaced(np.arange(len(bag)), max(most, 1))
    values = np.asarray(bag.features_ND[rows], dtype=np.float32)
    length = np.linalg.norm(values, axis=1)
    good = np.isfinite(length) & (length > 0)
    return _Part(values[good] / length[good, None], rows[good])


def _embedded(rows: Sequence[SlideRow], files: dict[str, Path]) -> Iterator[_Embedded]:
    """Yield the slides of one feature dimension whose features have coordinates."""
    dim: int | None = None
    for row in rows:
        try:
            bag = read_bag(files[row.slide])
        except SelfVitMilError:
            continue
        placed = bag.coords is not None and bag.unit == "l0" and bag.tile_extent is not None
        if placed and len(bag) and bag.dim == (dim or bag.dim):
            dim = bag.dim
            yield _Embedded(row, bag)


def find_neighbors(pool: Pool) -> list[Neighbors]:
    """Return queries and their nearest tiles of other patients."""
    queries = choose_queries(pool.unit_ND, pool.slide_N, NUM_QUERIES)
    return [nearest(pool.unit_ND, pool.patient_N, query, NUM_NEIGHBORS) for query in queries]


def read_tile(pool: Pool, tile: int, cache: SlideCache, reader: str) -> NDArray[np.uint8]:
    """Read a tile of the pool, no finer than it is shown. Raises SlideError where the slide has changed."""
    row, bag = pool.slides[int(pool.slide_N[tile])]
    assert bag.coords is not None
    assert bag.tile_extent is not None
    info = bag.attributes
    slide = cache.get(SlideRef(row.slide, row.path, info.get("level0_mpp", row.mpp), reader))
    size_l0 = (info.get("level0_width", slide.size_l0[0]), info.get("level0_height", slide.size_l0[1]))
    if slide.size_l0 != size_l0:
        raise SlideError(f"{row.path.name}: has another size than the slide that was embedded", code="slide-changed")
    x_l0, y_l0 = (int(corner) for corner in bag.coords[pool.row_N[tile]])
    size_px = min(int(info.get("patch_size", TILE_PX)), TILE_PX)
    return slide.read_tile(x_l0, y_l0, size_px, bag.tile_extent * slide.mpp / size_px)


# ---------------------------------------------------------------------------------------------------- slides


@dataclass(frozen=True)
class SimilarSlideShown:
    """A query, or one of the slides like it."""

    slide: str
    patient: str
    label: str
    similarity: float | None
    """Cosine similarity to the query; None for the query itself."""
    picture: Shown


@dataclass(frozen=True)
class SimilarSlidesData:
    """Queries, each followed by the slides most like it."""

    embedding: str
    agreement: str
    """How often labels of similar slides agree, in words; empty where that was not measured."""
    slides: tuple[SimilarSlideShown, ...]


def similar_slides_data(
    layout: StudyLayout, cohort: Cohort | None, pictures: Mapping[str, Path], names: Names
) -> SimilarSlidesData | None:
    """Return some slides with those most like them; None where no slide embeddings can be read.

    `pictures` are pictures of slides with their tissue, by slide.
    """
    folder = newest_similar(layout)
    if folder is None or cohort is None:
        return None
    try:
        similar, agreement = read_similar(folder)
    except ArtefactError:
        return None
    rows = {row.slide: row for row in cohort.rows}

    def shown(slide: str, similarity: float | None) -> SimilarSlideShown:
        name, row = names.slide(slide), rows[slide]
        image = (
            picture_file(pictures[slide], f"slide {name}", edge_px=EDGE_PX, quality=72) if slide in pictures else None
        )
        return SimilarSlideShown(name, names.patient(row.patient), row.label or "", similarity, image or "no picture")

    chosen = _queries({slide: rows[slide].label for slide in similar if slide in rows}, names)
    slides: list[SimilarSlideShown] = []
    for query in chosen:
        slides.append(shown(query, None))
        slides += [shown(other, value) for other, value in similar[query][:NUM_SIMILAR] if other in rows]
    return SimilarSlidesData(feature_name(folder), _words(agreement), tuple(slides))


def _queries(labels: Mapping[str, str | None], names: Names) -> list[str]:
    """Return slides of every label in turn, in the order of the names that are shown."""
    ordered = sorted(labels, key=names.slide)
    kinds = dict.fromkeys(labels[slide] for slide in ordered)
    by_label: Sequence[Sequence[str]] = [[slide for slide in ordered if labels[slide] == kind] for kind in kinds]
    return [slide for turn in zip_longest(*by_label) for slide in turn if slide is not None][:NUM_SLIDE_QUERIES]


def _words(agreement: Mapping[str, Any] | None) -> str:
    try:
        k, share, chance = (section(agreement)[key] for key in ("k", "share", "chance"))
        return (
            f"Of the {k} nearest slides of other patients, a share of {share['value']:.2f} ({share['low']:.2f} to "
            f"{share['high']:.2f}) has the label of the query; by chance it would be {chance:.2f}."
        )
    except (KeyError, TypeError, ValueError):
        return ""
