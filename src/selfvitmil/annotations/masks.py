"""Annotations as a mask of the slide at any mpp, and as covered fractions of boxes.

Both use tumour annotations, or those of the given groups, minus excluded regions; annotations may overlap. A mask is
filled by pixel centres, coverage is computed from the polygons.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np
import shapely
from numpy.typing import ArrayLike, NDArray

from selfvitmil.annotations.annotation import Annotation
from selfvitmil.annotations.regions import edges_of, polygons_of, region_of
from selfvitmil.geometry import size_at_mpp

_STRIP_PIXELS = 1 << 22  # pixels of a mask filled at a time


def to_mask(
    annotations: Iterable[Annotation],
    size_l0: tuple[int, int],
    slide_mpp: float,
    mpp: float,
    *,
    groups: Collection[str] | None = None,
) -> NDArray[np.bool_]:
    """Return the mask [y, x] of the whole slide at `mpp`: tumour, or the given `groups`, without excluded regions.

    A pixel is inside if its centre is. A centre exactly on an outline belongs to the area right of it or below it, so
    that adjacent areas share no pixel. The mask has the size given by `geometry.size_at_mpp`.
    """
    width, height = size_at_mpp(size_l0, slide_mpp, mpp)
    filled, removed = _chosen(annotations, groups)
    mask = np.zeros((height, width), dtype=bool)
    _fill(mask, edges_of(filled) * (slide_mpp / mpp), True)
    _fill(mask, edges_of(removed) * (slide_mpp / mpp), False)
    return mask


def _fill(mask: NDArray[np.bool_], edges_px: NDArray[np.float64], value: bool) -> None:
    """Set the pixels of `mask` whose centre is enclosed by the edges, given in mask pixels.

    Each edge adds its direction to the first pixel right of it in every row that it crosses; the cumulative sum along a
    row is then the winding number of each pixel. In strips, because the sums need more memory than the mask.
    """
    height, width = mask.shape
    (x0, y0), (x1, y1) = edges_px[:, 0].T - 0.5, edges_px[:, 1].T - 0.5
    direction = np.sign(y0 - y1).astype(np.int32)
    # Always from the upper end, so that an edge and its reverse cross a row at exactly the same position.
    upper = y0 <= y1
    x0, y0, x1, y1 = (np.where(upper, *pair) for pair in ((x0, x1), (y0, y1), (x1, x0), (y1, y0)))
    slope = (x1 - x0) / np.where(y1 > y0, y1 - y0, 1.0)
    first, last = np.ceil(y0), np.ceil(y1)
    rows = max(1, _STRIP_PIXELS // (width + 1))
    for top in range(0, height, rows):
        bottom = min(height, top + rows)
        begin = np.clip(first, top, bottom).astype(np.int64)
        count = np.clip(last, top, bottom).astype(np.int64) - begin
        if not count.any():
            continue
        edge = np.repeat(np.arange(len(count)), count)
        row = np.arange(len(edge)) - np.repeat(np.cumsum(count) - count - begin, count)
        column = np.clip(np.ceil(x0[edge] + (row - y0[edge]) * slope[edge]), 0, width).astype(np.int64)
        windings = np.zeros((bottom - top, width + 1), dtype=np.int32)
        np.add.at(windings.ravel(), (row - top) * (width + 1) + column, direction[edge])
        np.cumsum(windings, axis=1, out=windings)
        mask[top:bottom][windings[:, :width] > 0] = value


def box_coverage(
    annotations: Iterable[Annotation],
    boxes_l0_xyxy: ArrayLike,
    *,
    groups: Collection[str] | None = None,
) -> NDArray[np.float64]:
    """Return the fraction of each box (x0, y0, x1, y1) in level-0 pixels that is tumour, or in `groups`, and not
    excluded.

    Computed from the polygons, so exact up to rounding.
    """
    boxes_xyxy = np.asarray(boxes_l0_xyxy, dtype=np.float64).reshape(-1, 4)
    filled, removed = (shapely.union_all(_regions(some)) for some in _chosen(annotations, groups))
    pieces = _subdivided(shapely.difference(filled, removed))
    x0, y0, x1, y1 = boxes_xyxy.T
    boxes: Any = shapely.box(x0, y0, x1, y1)
    of_box, of_piece = shapely.STRtree(pieces).query(boxes, predicate="intersects")
    areas = shapely.area(shapely.intersection(boxes[of_box], pieces[of_piece]))
    return np.clip(np.bincount(of_box, areas, minlength=len(boxes)) / shapely.area(boxes), 0.0, 1.0)


def _regions(annotations: Sequence[Annotation]) -> NDArray[Any]:
    """Return valid shapely geometries; outlines that touch themselves are assembled from their faces."""
    regions = polygons_of(annotations)
    for index in np.flatnonzero(~shapely.is_valid(regions)).tolist():
        regions[index] = region_of(annotations[index])
    return regions


def _subdivided(region: Any, max_points: int = 128) -> NDArray[Any]:
    """Split the polygons of a geometry until each is small, so that a box is intersected with short outlines only."""
    done, waiting = [], list(shapely.get_parts(region))
    while waiting:
        part = waiting.pop()
        if shapely.get_num_coordinates(part) <= max_points:
            done.append(part)
            continue
        x0, y0, x1, y1 = part.bounds
        x, y = ((x0 + x1) / 2, y1) if x1 - x0 > y1 - y0 else (x1, (y0 + y1) / 2)
        halves = [shapely.box(x0, y0, x, y), shapely.box(x if x < x1 else x0, y if y < y1 else y0, x1, y1)]
        pieces = shapely.get_parts(shapely.intersection(part, halves))
        waiting.extend(pieces[shapely.area(pieces) > 0])
    return np.array(done, dtype=object)


def _chosen(
    annotations: Iterable[Annotation], groups: Collection[str] | None
) -> tuple[list[Annotation], list[Annotation]]:
    """Return the annotations to fill and those to remove."""
    filled, removed = [], []
    for annotation in annotations:
        wanted = annotation.kind == "tumour" if groups is None else annotation.group in groups
        if annotation.has_area and wanted:
            filled.append(annotation)
        elif annotation.has_area and annotation.kind == "excluded":
            removed.append(annotation)
    return filled, removed
