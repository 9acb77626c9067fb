"""Tiles of a study beside the tiles of other patients that have the most similar embeddings, for people to look at.

The first half is pure: embeddings of length one in, rows out. Queries are spread over the embeddings by principal
direction divisive partitioning (Boley 1998): the most scattered cluster is split along its first principal component
until there are enough, and of each the most central tile is shown. It draws nothing at random, and outliers get no
cluster of their own. The second half reads feature files and slides. Label and macro images are never read.

Axes in names: N tiles, D length of an embedding, 2 is (x, y).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from selfvitmil.bags import Bag, find_bags, read_bag
from selfvitmil.cohort import Cohort, SlideRow
from selfvitmil.errors import BagError, SelfVitMilError, SlideError
from selfvitmil.pseudonyms import Names
from selfvitmil.report.contents import Contents
from selfvitmil.report.markup import Markup, join, tag
from selfvitmil.report.pictures import picture
from selfvitmil.slides import SlideCache
from selfvitmil.store.layout import StudyLayout

NUM_QUERIES, NUM_NEIGHBORS = 6, 5
TILE_PX = 104
"""Largest edge of a tile on the page."""
MOST_FEATURES = 2
"""Features folders whose neighbours are shown."""
MOST_SLIDES = 200
"""Slides that are searched; of more, so many evenly spaced ones."""
MOST_VALUES = 32_000_000
"""Numbers of all embeddings that are searched, 128 MB; of more, evenly spaced tiles of every slide."""
MOST_CLUSTERED = 4000
"""Tiles among which queries are chosen."""
SPLIT_TURNS = 20
"""Turns of the power iteration that finds a principal component."""

Rows = NDArray[np.int64]
Embeddings = NDArray[np.float32]


# ---------------------------------------------------------------------------------------------------- search, pure


class Neighbors(NamedTuple):
    """Tiles nearest to a query, nearest first."""

    query: int
    rows: Rows
    similarity: NDArray[np.float32]
    """Cosine similarity of each to the query."""


def nearest(unit_ND: Embeddings, owner_N: Rows, query: int, most: int) -> Neighbors:
    """The tiles of other owners (patients) nearest to a tile by cosine similarity; of equal ones the first."""
    similarity_N = unit_ND @ unit_ND[query]
    others = np.flatnonzero(owner_N != owner_N[query])
    order = others[np.argsort(-similarity_N[others], kind="stable")[:most]]
    return Neighbors(query, order, similarity_N[order])


def choose_queries(unit_ND: Embeddings, slide_N: Rows, most: int) -> list[int]:
    """Rows of up to `most` tiles of different slides and different clusters, those of large clusters first."""
    looked = spread(np.arange(len(unit_ND)), MOST_CLUSTERED)
    clusters = [looked[cluster] for cluster in split_clusters(unit_ND[looked], most)]
    chosen: list[int] = []
    for cluster in sorted(clusters, key=len, reverse=True):
        free = cluster[~np.isin(slide_N[cluster], slide_N[chosen])]
        if len(free):
            central = unit_ND[free] @ unit_ND[cluster].mean(axis=0)
            chosen.append(int(free[np.argmax(central)]))
    return chosen


def split_clusters(points_ND: Embeddings, number: int) -> list[Rows]:
    """Rows of up to `number` clusters: again and again the most scattered one is split in two."""
    clusters: list[Rows] = [np.arange(len(points_ND))]
    scatter = [_scatter(points_ND)]
    while len(clusters) < min(number, len(points_ND)):
        widest = int(np.argmax(scatter))
        rows = clusters.pop(widest)
        scatter.pop(widest)
        upper = _upper_half(points_ND[rows])
        parts = [part for part in (rows[upper], rows[~upper]) if len(part)]
        clusters += parts
        # What does not split is done with.
        scatter += [_scatter(points_ND[part]) if len(parts) == 2 else -1.0 for part in parts]
        if max(scatter) <= 0:
            break
    return clusters


def _scatter(points_ND: Embeddings) -> float:
    """Sum of squared distances from the mean."""
    return float(((points_ND - points_ND.mean(axis=0)) ** 2).sum())


def _upper_half(points_ND: Embeddings) -> NDArray[np.bool_]:
    """Which points lie above the mean along the first principal component."""
    centred_ND = points_ND - points_ND.mean(axis=0)
    direction_D = centred_ND[np.argmax((centred_ND**2).sum(axis=1))]
    for _ in range(SPLIT_TURNS):
        turned_D = centred_ND.T @ (centred_ND @ direction_D)
        length = float(np.linalg.norm(turned_D))
        if length == 0:
            break
        direction_D = turned_D / length
    return centred_ND @ direction_D > 0


def spread(items: Rows, most: int) -> Rows:
    """At most `most` of the items, evenly spaced, the first and the last among them."""
    if len(items) <= most:
        return items
    return items[np.round(np.linspace(0, len(items) - 1, most)).astype(np.int64)]


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
    """Embeddings of the slides whose file and features are there. BagError where these are not of two patients.

    Feature files that cannot be read or lack the places of their tiles are left out, as are embeddings with NaN.
    """
    files = find_bags(folder)
    rows = [row for row in cohort.rows if row.slide in files and row.path.exists()]
    numbers = spread(np.arange(len(rows)), MOST_SLIDES)
    slides = list(_embedded([rows[number] for number in numbers], files))
    parts = [_unit_rows(slide.bag, MOST_VALUES // slide.bag.dim // len(slides)) for slide in slides]
    found = [(slide, part) for slide, part in zip(slides, parts, strict=True) if len(part.rows)]
    patients = list(dict.fromkeys(slide.row.patient for slide, _ in found))
    if len(patients) < 2:
        raise BagError("files and features of slides of at least two patients are needed")
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
    """Evenly spaced embeddings of a slide at length one, without those that have none."""
    rows = spread(np.arange(len(bag)), max(most, 1))
    values = np.asarray(bag.features_ND[rows], dtype=np.float32)
    length = np.linalg.norm(values, axis=1)
    good = np.isfinite(length) & (length > 0)
    return _Part(values[good] / length[good, None], rows[good])


def _embedded(rows: Sequence[SlideRow], files: dict[str, Path]) -> Iterator[_Embedded]:
    """Those of one feature dimension whose features tell the places of their tiles on the slide."""
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
    """Queries and their nearest tiles of other patients."""
    queries = choose_queries(pool.unit_ND, pool.slide_N, NUM_QUERIES)
    return [nearest(pool.unit_ND, pool.patient_N, query, NUM_NEIGHBORS) for query in queries]


# ---------------------------------------------------------------------------------------------------- pictures


def neighbor_sections(study: Contents, names: Names, reader: str) -> Markup:
    """A grid of pictures for the features of the encoder that was trained here, and for one from elsewhere."""
    return join(_neighbor_section(study, names, features, reader) for features in shown_features(study))


def shown_features(study: Contents) -> list[str]:
    """`<tiling>/<encoder>` of the first features of a trained encoder and of one that is not in the study.

    Baselines of a comparison are encoders of the study without a training, and are not shown. The finest tiling goes
    first: it has pictures of its slides.
    """
    pictured = [tiling.name for tiling in study.tilings if tiling.pictures]
    found = sorted(study.bags, key=lambda key: key.split("/")[0] not in pictured)
    trained = [key for key in found if any(_is_of(key, encoder.name) for encoder in study.encoders if encoder.metrics)]
    foreign = [key for key in found if not any(_is_of(key, encoder.name) for encoder in study.encoders)]
    return [*trained[:1], *foreign[:1]][:MOST_FEATURES]


def _is_of(features: str, encoder: str) -> bool:
    """Whether these features are of this encoder, in any layout."""
    name = features.split("/", 1)[1]
    return name == encoder or name.startswith(f"{encoder}__")


def _neighbor_section(study: Contents, names: Names, features: str, reader: str) -> Markup:
    tiling, encoder = features.split("/", 1)
    title = tag("h3", f"Nearest neighbours: {encoder}")
    try:
        if study.cohort is None:
            raise BagError("no cohort.csv says where the slides are")
        pool = read_pool(StudyLayout(study.study).features(tiling, encoder), study.cohort)
        found = find_neighbors(pool)
    except (SelfVitMilError, OSError) as error:
        why = error.reason if isinstance(error, SelfVitMilError) else "its feature files cannot be read"
        return join((title, tag("p", f"Not shown: {names.text(why)}.", class_="missing")))
    cache = SlideCache()
    try:
        cells = [cell for one in found for cell in _row(pool, one, names, cache, reader)]
    finally:
        cache.close()
    return join((title, tag("p", _words(pool, len(found))), tag("div", *cells, class_="neighbors")))


def _words(pool: Pool, queries: int) -> str:
    searched, slides = len(pool.unit_ND), len(pool.slides)
    which = f"all {searched:,}" if searched == pool.num_tiles else f"{searched:,} of {pool.num_tiles:,}"
    others = "patients" if any(slide.row.patient_stated for slide in pool.slides) else "slides"
    return (
        f"Framed: {queries} tiles of different slides, one of each cluster of the embeddings. Beside each the "
        f"{NUM_NEIGHBORS} tiles of other {others} with the most similar embeddings (cosine similarity), among {which} "
        f"tiles of {slides} slides. Neighbours should share morphology: kinds of cells and how they are arranged. If "
        "they share only colour, focus or scanner, the encoder has learned these instead of the tissue."
    )


def _row(pool: Pool, found: Neighbors, names: Names, cache: SlideCache, reader: str) -> Iterator[Markup]:
    """The query, then its neighbours."""
    for place, tile in enumerate((found.query, *found.rows)):
        slide = names.slide(pool.slides[pool.slide_N[tile]].row.slide)
        similarity = f"{found.similarity[place - 1]:.3f}" if place else "query"
        alt = f"query tile of {slide}" if not place else f"neighbour of {slide}, cosine similarity {similarity}"
        try:
            shown = picture(read_tile(pool, int(tile), cache, reader), alt, edge_px=TILE_PX, quality=70)
        except SelfVitMilError:
            shown = tag("p", "cannot be read", class_="missing")
        caption = tag("figcaption", tag("strong", similarity), tag("br"), slide)
        yield tag("figure", shown, caption, class_=None if place else "query")


def read_tile(pool: Pool, tile: int, cache: SlideCache, reader: str) -> NDArray[np.uint8]:
    """Pixels of a tile of the pool, no finer than they are shown. SlideError where the slide is another than before."""
    row, bag = pool.slides[pool.slide_N[tile]]
    assert bag.coords is not None
    assert bag.tile_extent is not None
    told = bag.attributes
    slide = cache.get(row.path, reader=reader, mpp=told.get("level0_mpp", row.mpp))
    size_l0 = (told.get("level0_width", slide.size_l0[0]), told.get("level0_height", slide.size_l0[1]))
    if slide.size_l0 != size_l0:
        raise SlideError(f"{row.path.name}: has another size than the slide that was embedded")
    x_l0, y_l0 = (int(corner) for corner in bag.coords[pool.row_N[tile]])
    size_px = min(int(told.get("patch_size", TILE_PX)), TILE_PX)
    return slide.read_tile(x_l0, y_l0, size_px, bag.tile_extent * slide.mpp / size_px)
