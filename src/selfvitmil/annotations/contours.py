"""Convert a mask to annotations: outline and holes of every connected region, along the pixel edges."""

from __future__ import annotations

from typing import Any

import numpy as np
import shapely
from numpy.typing import NDArray

from selfvitmil.annotations.annotation import Annotation, Ring, signed_area
from selfvitmil.annotations.regions import rings_of


def mask_to_annotations(
    mask: NDArray[np.bool_], mpp: float, slide_mpp: float, group: str, *, simplify_um: float = 0.0
) -> tuple[Annotation, ...]:
    """Return the outlines, along pixel edges, of the regions of a mask [y, x] at `mpp`, as valid polygons with holes.

    Pixels that share an edge are connected. `to_mask` gives the same mask back, unless the outlines are simplified:
    then points are removed as long as the line stays within `simplify_um` microns.
    """
    if not mask.any():
        return ()
    # Only the bounding box of the mask is processed.
    columns, rows = (np.flatnonzero(mask.any(axis=axis)) for axis in (0, 1))
    left, top, right, bottom = columns[0], rows[0], columns[-1] + 1, rows[-1] + 1
    origin, scale = np.array([left, top]), mpp / slide_mpp
    polygons = [
        ((outer + origin) * scale, tuple((hole + origin) * scale for hole in holes))
        for outer, holes in _outlines(mask[top:bottom, left:right])
    ]
    if simplify_um > 0:
        exact = np.array([shapely.Polygon(*polygon) for polygon in polygons], dtype=object)
        polygons = [pair for region in shapely.simplify(exact, simplify_um / slide_mpp) for pair in rings_of(region)]
    return tuple(
        Annotation(f"{group} {number}", group, outer, holes) for number, (outer, holes) in enumerate(polygons, start=1)
    )


def _outlines(mask: NDArray[np.bool_]) -> list[tuple[Ring, tuple[Ring, ...]]]:
    """Return outline and holes, in mask pixels, of every region of edge-connected pixels.

    The border consists of straight runs, directed so that the region is on the right side as seen on the screen: along
    the top of a region to the right, down its right side and so on. Each run ends where one of the other orientation
    begins; following them gives closed lines, one outline and any number of holes per region.
    """
    from scipy import ndimage

    areas: Any = ndimage.label(np.pad(mask, 1))[0]  # pyright: ignore[reportIndexIssue]
    across = _runs(areas)
    down = _runs(areas.T)[:, [3, 2, 1, 0, 4]]  # mirrored, so in reverse direction
    follow = _next_run(down, across, -1)[_next_run(across, down, 1)].tolist()
    outlines: dict[int, Ring] = {}
    holes: dict[int, list[Ring]] = {}
    seen = bytearray(len(follow))
    for start in range(len(follow)):
        line, run = [], start
        while not seen[run]:
            seen[run] = True
            line.append(run)
            run = follow[run]
        if line:
            ring, area = across[line, :4].reshape(-1, 2).astype(np.float64), int(across[start, 4])
            if signed_area(ring) > 0:
                outlines[area] = ring
            else:
                holes.setdefault(area, []).append(ring)
    return [(ring, tuple(holes.get(area, ()))) for area, ring in sorted(outlines.items())]


def _runs(areas: NDArray[np.int32]) -> NDArray[np.int64]:
    """Return all horizontal border runs: x and y of the start, x and y of the end, index of the region; row by row.

    Coordinates are those of the mask before padding by one pixel.
    """
    above, below = areas[:-1], areas[1:]
    runs = []
    for inside, outside, forth in ((below, above, True), (above, below, False)):
        border = np.pad((inside > 0) & (outside == 0), ((0, 0), (1, 1))).astype(np.int8)
        step = np.diff(border, axis=1)
        (y, left), (_, right) = np.nonzero(step == 1), np.nonzero(step == -1)
        ends = (left - 1, y, right - 1, y) if forth else (right - 1, y, left - 1, y)
        runs.append(np.stack([*ends, inside[y, left]], axis=1))
    both = np.concatenate(runs).astype(np.int64)
    return both[np.lexsort((both[:, 0], both[:, 1]))]


def _next_run(runs: NDArray[np.int64], others: NDArray[np.int64], right_turn: int) -> NDArray[np.int64]:
    """Return, for each run, the index in `others` of the run that begins where it ends.

    If two regions meet only at a corner, two runs begin there: each line turns right and stays with its region. If a
    region meets itself at a corner, lines turn left: this separates a hole from its outline, which otherwise would
    visit a point twice.
    """
    stride = 1 + others[:, :4].max(initial=0)

    def directions(some: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.sign(some[:, 2] - some[:, 0] + some[:, 3] - some[:, 1])

    begins, ends = others[:, 1] * stride + others[:, 0], runs[:, 3] * stride + runs[:, 2]
    order = np.argsort(begins, kind="stable")
    place = np.searchsorted(begins[order], ends)
    one, two = order[place], order[np.minimum(place + 1, len(order) - 1)]
    meets_itself = others[one, 4] == others[two, 4]
    wanted = directions(runs) * np.where(meets_itself, -right_turn, right_turn)
    return np.where((begins[two] == ends) & (directions(others)[two] == wanted), two, one)
