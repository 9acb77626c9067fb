"""Find lesions and points in a heatmap: connected regions of high score with their sizes, and single points for FROC.

A lesion is what the heatmap shows, not a diagnosis: tiles whose score reaches a threshold and that are neighbours on
the tile grid, by edges or corners. Its sizes are those of its tiles, so a small focus in one tile measures as much as
the tile, and a diameter may be too long by a tile's diagonal; texts on sizes therefore give the tile's edge. In studies
of lymph nodes they also name the size class of metastases: a measurement, no diagnosis.

The highest score of every slide is 1, so every slide has such regions. On one that is not called positive they are its
highest-ranked regions and no lesions: names and groups of their contours say so, and tables of lesions leave them out.

Tiles are taken where the regular grid has them, which is within a pixel of their stored corners: neighbours then share
an edge exactly, where rounded corners would leave slits between them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import shapely
from numpy.typing import NDArray
from scipy import ndimage  # pyright: ignore[reportMissingTypeStubs]
from scipy.spatial.distance import pdist

from selfvitmil.annotations import Annotation, mask_to_annotations
from selfvitmil.localize.heatmap import Heatmap
from selfvitmil.metrics import suppress_points

LESION_GROUP = "Lesion by model"
"""Class of contours found by a model; our readers of annotations do not take it for annotated tumour."""
REGION_GROUP = "Highest-ranked region by model"
"""Class of such contours on a slide that is not called positive: they are no lesions."""
RANKS_ONLY = "colours only rank tiles within this slide, and no region counts as a lesion"
"""Note on a slide that is not called positive."""
LESION_COLOR = "#FFB000"
MICRO_UM = 200.0
"""Metastases of lymph nodes from this longest diameter on are micrometastases, below isolated tumour cells."""
MACRO_UM = 2000.0
"""And above this one macrometastases."""

Ring = NDArray[np.float64]
Polygon = tuple[Ring, ...]


@dataclass(frozen=True, eq=False)
class Lesion:
    """One region of a heatmap; a lesion where the slide is called positive."""

    number: int
    """Its rank in the heatmap, from 1."""
    rows: NDArray[np.int64]
    """Its tiles, as rows of the heatmap, ascending."""
    score: float
    """Largest of its tiles."""
    mean_score: float
    area_mm2: float
    """Of its tiles; where they overlap, what they share counts once."""
    centroid_l0: tuple[float, float]
    """Mean of its tiles' centres; may lie outside of a bent lesion."""
    peak_l0: tuple[float, float]
    """Centre of its highest tile; of equals the one with most behind it."""
    diameter_um: float
    """Largest distance of two points of its contour."""
    tile_um: float
    """Edge of a tile: what sizes are measured in."""
    parts: tuple[Annotation, ...]
    """Its contour as valid polygons: one, or several that meet at corners only."""

    def size_words(self, staging: str) -> str:
        """Return its size with the tile's edge, for instance `1 tile, 64 µm`; with `lymph-node` also its size class."""
        across = f"{self.diameter_um / 1000:.2g} mm" if self.diameter_um >= 1000 else f"{self.diameter_um:.0f} µm"
        number, edge = len(self.rows), f"{self.tile_um:.0f} µm"
        size = f"1 tile, {edge}" if number == 1 else f"{number} tiles of {edge}, {across} across"
        return f"{size}; {size_class(self.diameter_um)}" if staging == "lymph-node" else size

    @cached_property
    def annotation(self) -> Annotation:
        """Return its contour as one line, which touches itself where parts meet at a corner."""
        first = self.parts[0]
        outer, *holes = _join([part.rings for part in self.parts])
        return Annotation(
            first.name, first.group, outer, tuple(holes), group_color=first.group_color, measurements=first.measurements
        )


def size_class(diameter_um: float) -> str:
    """Return the size class of lymph-node metastases by the longest diameter: a measurement, no diagnosis."""
    if diameter_um < MICRO_UM:
        return "size of isolated tumour cells (under 0.2 mm)"
    if diameter_um <= MACRO_UM:
        return "size of a micrometastasis (0.2 to 2 mm)"
    return "size of a macrometastasis (over 2 mm)"


def find_lesions(heatmap: Heatmap, threshold: float, min_mm2: float = 0.0) -> tuple[Lesion, ...]:
    """Return regions of tiles that score at least `threshold`, of `min_mm2` or more, by score, area, position."""
    rows = np.flatnonzero(heatmap.score >= threshold)
    if not len(rows):
        return ()
    measure = _Measure(heatmap)
    found = [one for one in map(measure, _regions(rows, heatmap.grid[rows])) if one["area_mm2"] >= min_mm2]
    found.sort(key=lambda one: (-one["score"], -one["area_mm2"], one["rows"][0]))
    return tuple(_lesion(number, heatmap.only_ranks, **one) for number, one in enumerate(found, start=1))


def find_points(heatmap: Heatmap, radius_um: float, min_score: float = 0.0) -> NDArray[np.float64]:
    """Return (K, 3) rows (detection, x_l0, y_l0), best first: tile centres, none within `radius_um` of a better one.

    Tiles whose detection is 0 detect nothing and are no points.
    """
    rows = np.flatnonzero((heatmap.detection > 0) & (heatmap.detection >= min_score))
    centres, detection = heatmap.centres_l0[rows], heatmap.detection[rows].astype(np.float64)
    ranks = _ranks(heatmap.detection, heatmap)[rows]
    kept = suppress_points(ranks, centres * heatmap.frame.slide_mpp, radius_um)
    return np.column_stack([detection[kept], centres[kept]])


def rank_tiles(heatmap: Heatmap) -> NDArray[np.int64]:
    """Return the rows of all tiles from the highest score to the lowest.

    Scores clipped at a limit are equal: then the evidence behind them decides, then the order of tiles.
    """
    return np.lexsort((-_behind(heatmap), -heatmap.score))


def highest_scoring_tile(heatmap: Heatmap) -> int:
    """Return the row of the tile with the highest score."""
    return int(rank_tiles(heatmap)[0])


def _behind(heatmap: Heatmap) -> NDArray[np.float32]:
    """Return the evidence that the scores were computed from."""
    return heatmap.columns.get(heatmap.kind, heatmap.score)


def _ranks(values: NDArray[np.float32], heatmap: Heatmap) -> NDArray[np.int64]:
    """Return ranks of tiles by `values`, among equals by the evidence behind the scores."""
    behind = _behind(heatmap)
    order = np.lexsort((behind, values))
    rises = (np.diff(values[order]) != 0) | (np.diff(behind[order]) != 0)
    ranks = np.empty(len(values), np.int64)
    ranks[order] = np.append(0, np.cumsum(rises))[: len(values)]
    return ranks


# ---------------------------------------------------------------------------------------------------- regions


def _regions(rows: NDArray[np.int64], cells: NDArray[np.int32]) -> list[NDArray[np.int64]]:
    """Rows of the tiles of each region; `cells` are column and line of each row."""
    columns, lines = cells.T
    high = np.zeros((int(lines.max()) + 1, int(columns.max()) + 1), dtype=bool)
    high[lines, columns] = True
    images: Any = ndimage
    label: NDArray[np.int32] = images.label(high, np.ones((3, 3)))[0][lines, columns]
    order = np.argsort(label, kind="stable")
    return np.split(rows[order], np.flatnonzero(np.diff(label[order])) + 1)


class _Measure:
    """Measures regions of one heatmap; caches shapes, because many regions have one or two tiles."""

    def __init__(self, heatmap: Heatmap):
        self.heatmap, self.frame = heatmap, heatmap.frame
        self.origin_l0: Ring = np.array(heatmap.origin_l0)
        self.ranks = _ranks(heatmap.score, heatmap)
        self.shapes: dict[bytes, _Shape] = {}

    def __call__(self, rows: NDArray[np.int64]) -> dict[str, Any]:
        frame, score, cells = self.frame, self.heatmap.score[rows], self.heatmap.grid[rows]
        centres = self.heatmap.coords_l0[rows] + frame.extent_l0 / 2
        first: Any = cells.min(axis=0)
        cells = cells - first
        key = cells.tobytes()
        if key not in self.shapes:
            self.shapes[key] = _shape(cells, frame.extent_l0, frame.stride_l0)
        shape = self.shapes[key]
        corner_l0: Ring = self.origin_l0 + first * frame.stride_l0
        return {
            "rows": rows,
            "score": float(score.max()),
            "mean_score": float(score.mean(dtype=np.float64)),
            "area_mm2": shape.area_l0 * frame.slide_mpp**2 / 1e6,
            "centroid_l0": tuple(centres.mean(axis=0).tolist()),
            "peak_l0": tuple(centres[np.argmax(self.ranks[rows])].tolist()),
            "diameter_um": shape.diameter_l0 * frame.slide_mpp,
            "tile_um": frame.extent_l0 * frame.slide_mpp,
            "polygons": [
                # Tiles may stand out of the slide by the pixel that rounding their corners took.
                [np.clip(np.round(ring + corner_l0, 2), 0, frame.size_l0) for ring in rings]
                for rings in shape.polygons
            ],
        }


def _lesion(number: int, only_ranked: bool, polygons: list[Polygon], **measured: Any) -> Lesion:
    name, group = ("region", REGION_GROUP) if only_ranked else ("lesion", LESION_GROUP)
    measurements = {
        "score": measured["score"],
        "mean score": measured["mean_score"],
        "area mm^2": measured["area_mm2"],
        "longest diameter um": measured["diameter_um"],
        "tile edge um": measured["tile_um"],
        "tiles": float(len(measured["rows"])),
    }
    measurements = {name: float(f"{value:.6g}") for name, value in measurements.items()}
    parts = tuple(
        Annotation(
            f"{name} {number}",
            group,
            outer,
            tuple(holes),
            group_color=LESION_COLOR,
            measurements=measurements,
            part=part,
        )
        for part, (outer, *holes) in enumerate(polygons)
    )
    return Lesion(number=number, parts=parts, **measured)


@dataclass(frozen=True)
class _Shape:
    """The area that tiles cover, in level-0 pixels from its top left corner; polygons are (contour, holes ...)."""

    polygons: list[Polygon]
    area_l0: float
    diameter_l0: float


def _shape(cells: NDArray[np.int32], extent: float, stride: float) -> _Shape:
    """What tiles in these columns and lines cover.

    The edges of all tiles cut the plane into a lattice; its cells that tiles cover are a mask with lines of its own.
    Where tiles stand apart, the contour goes round the gaps between neighbours too, but the area is the tiles' own.
    """
    reach = max(extent, stride)
    (x0, x1, x_lines), (y0, y1, y_lines) = (_lattice(axis, stride, reach) for axis in cells.T)
    covers = np.zeros((len(y_lines), len(x_lines)), dtype=np.int32)
    for y, x, sign in ((y0, x0, 1), (y0, x1, -1), (y1, x0, -1), (y1, x1, 1)):
        np.add.at(covers, (y, x), sign)
    mask = covers.cumsum(axis=0).cumsum(axis=1)[:-1, :-1] > 0
    area = float(np.diff(y_lines) @ mask @ np.diff(x_lines)) * (extent / reach) ** 2

    def placed(ring: Ring) -> Ring:
        column, line = ring.astype(np.int64).T
        return np.stack([x_lines[column], y_lines[line]], axis=1)

    polygons = [tuple(map(placed, piece.rings)) for piece in mask_to_annotations(mask, 1.0, 1.0, LESION_GROUP)]
    hull = shapely.convex_hull(shapely.multipoints(np.concatenate([outer for outer, *_ in polygons])))
    return _Shape(polygons, area, float(pdist(shapely.get_coordinates(hull)).max()))


def _lattice(
    cells: NDArray[np.int32], stride: float, reach: float
) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.float64]]:
    """For tiles in these columns the numbers of the lines at which they begin and end, and where the lines are."""
    starts = cells.astype(np.float64) * stride
    # Rounded, so that the end of one tile and the beginning of the next are one line.
    lines, place = np.unique(np.round(np.concatenate([starts, starts + reach]), 6), return_inverse=True)
    begin, end = np.split(place.ravel(), 2)
    return begin, end, lines


# ---------------------------------------------------------------------------------------------------- one line


def _join(polygons: list[Polygon]) -> list[Ring]:
    """Join polygons (contour, holes ...) that meet at corners to one contour with holes, whose lines touch themselves.

    Parts at the corners of a contour are followed on the way, each from the corner where it is met; so are parts inside
    a hole that meet its line.
    """
    if len(polygons) == 1:
        return list(polygons[0])
    at: dict[tuple[float, float], list[int]] = {}
    for number, rings in enumerate(polygons):
        for point in _points_of(rings[0]):
            at.setdefault(point, []).append(number)
    first = min(range(len(polygons)), key=lambda number: min(_points_of(polygons[number][0])))
    waiting, met = [polygons[first][0]], {first}
    joined: list[NDArray[np.float64]] = []
    holes = list(polygons[first][1:])
    while waiting:
        line: list[tuple[float, float]] = []
        ways = [_points_of(waiting.pop(0))]
        while ways:
            point = next(ways[-1], None)
            if point is None:
                ways.pop()
                continue
            line.append(point)
            for number in at.get(point, ()):
                if number not in met:
                    met.add(number)
                    ring = polygons[number][0]
                    start = int(np.flatnonzero((ring == point).all(axis=1))[0])
                    ways.append(_points_of(np.roll(ring, -start - 1, axis=0)))
                    holes += polygons[number][1:]
        joined.append(np.array(line))
        if not waiting:
            waiting, holes = holes, []
    return joined


def _points_of(ring: NDArray[np.float64]) -> Iterator[tuple[float, float]]:
    return ((x, y) for x, y in ring.tolist())
