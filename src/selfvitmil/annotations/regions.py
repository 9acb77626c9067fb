"""The area that an outline encloses: whether it is clear, how to mend it where it is not, and its shape.

An outline cuts the plane into faces and goes round each of them a number of times, its holes the other way. It is sound
when that number is 0 or 1 everywhere and not 0 throughout: then even-odd and winding-number filling agree. Nearly all
outlines are valid to shapely, which is quick to find out; only the others are taken apart into faces, and those that
merely touch themselves turn out sound.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import shapely
from numpy.typing import NDArray

from selfvitmil.annotations.annotation import Annotation, Ring, Shape, label_of, signed_area
from selfvitmil.errors import AnnotationError

_MAX_CROSSINGS = 10_000  # of a line with itself that are sorted out; a scribble has as many as its points squared
_AREA_NOISE = 1e-6  # level-0 px²: smaller overlaps come from rounding, not from a hand


class _TooManyCrossings(ValueError):
    """An outline crosses itself too often to be sorted out."""


def check_outlines(annotations: Sequence[Annotation], file_name: str, repair: bool) -> tuple[Annotation, ...]:
    """The annotations with every outline sound, or an error that lists those that are not."""
    problems: list[str] = []
    kept: list[Annotation] = []
    for index, (annotation, simple) in enumerate(zip(annotations, _is_simple(annotations), strict=True)):
        problem = "" if simple else _problem(annotation)
        if problem:
            problems.append(f"{label_of(index, annotation.name)} {problem}")
        for k, piece in enumerate(_repaired(annotation, file_name) if problem and repair else [annotation]):
            part = kept[-1].part + 1 if annotation.part + k > 0 else 0
            kept.append(piece if piece.part == part else replace(piece, part=part))
    if problems and not repair:
        listed = "; ".join(problems[:10]) + (f"; and {len(problems) - 10} more" if len(problems) > 10 else "")
        raise AnnotationError(
            f"{file_name} has {len(problems)} of {len(annotations)} annotations that enclose no clear area: {listed}",
            "so what is inside and what is outside cannot be told",
            "Open it in ASAP or QuPath and draw these again, or have them mended on reading (repair=True), "
            "which takes everything that a crossing line goes round",
        )
    return tuple(kept)


def _is_simple(annotations: Sequence[Annotation]) -> NDArray[np.bool_]:
    """Which are sound at the first look, as nearly all are: valid polygons, or without area but not without points."""
    simple = np.array([len(annotation.polygon) > 0 for annotation in annotations], dtype=bool)
    with_area = [index for index, annotation in enumerate(annotations) if annotation.has_area]
    simple[with_area] = shapely.is_valid(polygons_of([annotations[index] for index in with_area]))
    return simple


def _problem(annotation: Annotation) -> str:
    """What is wrong with an outline that is not simple; "" when it merely touches itself."""
    if len(annotation.polygon) == 0:
        return "is empty, it has no points"
    if any(len(np.unique(ring, axis=0)) < 3 for ring in annotation.rings):
        return "has fewer than 3 different points"
    try:
        faces, windings = _faces(annotation)
    except _TooManyCrossings as error:
        return str(error)
    doubtful = (windings < 0) | (windings > 1)
    if doubtful.any():
        x, y = shapely.get_coordinates(shapely.point_on_surface(faces[doubtful][0]))[0]
        crosses = "has holes that cross or lie outside" if annotation.holes else "crosses itself"
        return f"{crosses} near x = {x:.0f}, y = {y:.0f}"
    return "" if windings.any() else "has no area"


def _repaired(annotation: Annotation, file_name: str) -> list[Annotation]:
    """All that the line goes round, as sound polygons; a line or points where it goes round nothing."""
    region = region_of(annotation, f"{file_name}: ")
    if region.is_empty:
        shape: Shape = "points" if len(annotation.polygon) < 2 else "line"
        return [replace(annotation, holes=(), shape=shape, repaired=True)]
    return [
        replace(annotation, polygon=outer, holes=holes, shape="polygon", repaired=True)
        for outer, holes in rings_of(region)
    ]


def polygons_of(annotations: Sequence[Annotation]) -> NDArray[Any]:
    """As shapely polygons, sound or not; None where a ring has fewer than three points."""
    polygons = np.full(len(annotations), None, dtype=object)
    usable = [k for k, some in enumerate(annotations) if min(map(len, some.rings)) >= 3]
    rings = [(place, ring) for place, k in enumerate(usable) for ring in annotations[k].rings]
    if usable:
        of_ring = np.repeat(np.arange(len(rings)), [len(ring) for _, ring in rings])
        lines: Any = shapely.linearrings(np.concatenate([ring for _, ring in rings]), indices=of_ring)
        polygons[usable] = shapely.polygons(lines, indices=[place for place, _ in rings])
    return polygons


def region_of(annotation: Annotation, where: str = "") -> Any:
    """All that the line goes round, as a valid shapely geometry."""
    try:
        faces, windings = _faces(annotation)
    except _TooManyCrossings as error:
        raise AnnotationError(
            f"{where}annotation {annotation.name!r} {error}",
            "which no hand draws and which takes too long to sort out",
            "Draw it again, or remove it",
        ) from None
    return shapely.union_all(faces[windings != 0])


def _faces(annotation: Annotation) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """The faces into which the lines of an annotation cut the plane, and how often it goes round each.

    Lines that run forth and back, as to a keyhole, are left out first.
    """
    edges, weights = _net_edges(edges_of([annotation]))
    lines: Any = shapely.linestrings(edges)
    tree, crossings = shapely.STRtree(lines), 0
    for start in range(0, len(lines), 64):
        crossings += tree.query(lines[start : start + 64], predicate="crosses").shape[1] / 2
        if crossings > _MAX_CROSSINGS:
            raise _TooManyCrossings(f"crosses itself more than {_MAX_CROSSINGS} times")
    faces = shapely.get_parts(shapely.polygonize([shapely.union_all(lines)]))
    faces = faces[shapely.area(faces) > _AREA_NOISE]
    points = shapely.get_coordinates(shapely.point_on_surface(faces))
    return faces, np.array([_winding(edges, weights, *point) for point in points], dtype=np.int64)


def _winding(edges: NDArray[np.float64], weights: NDArray[np.int64], x: float, y: float) -> int:
    """How often the lines go round a point: the edges left of it, counted by their direction."""
    (x0, y0), (x1, y1) = edges[:, 0].T, edges[:, 1].T
    crossed = (y0 <= y) != (y1 <= y)
    x0, y0, x1, y1 = x0[crossed], y0[crossed], x1[crossed], y1[crossed]
    left = x0 + (y - y0) * (x1 - x0) / (y1 - y0) < x
    return int((weights[crossed] * np.sign(y0 - y1))[left].sum())


def edges_of(annotations: Sequence[Annotation]) -> NDArray[np.float64]:
    """All edges (E, 2, 2) as pairs of points, outlines turning from +x to +y and holes the other way."""
    edges = [np.empty((0, 2, 2))]
    for annotation in annotations:
        for place, ring in enumerate(annotation.rings):
            is_hole = place > 0
            directed = ring[::-1] if (signed_area(ring) > 0) == is_hole else ring
            edges.append(np.stack([directed, np.roll(directed, -1, axis=0)], axis=1))
    return np.concatenate(edges)


def _net_edges(edges: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Each edge once, in the direction from its smaller point, and how often it is gone that way rather than back."""
    (x0, y0), (x1, y1) = edges[:, 0].T, edges[:, 1].T
    forth = (x0 < x1) | ((x0 == x1) & (y0 < y1))
    once, place = np.unique(np.where(forth[:, None, None], edges, edges[:, ::-1]), axis=0, return_inverse=True)
    weights = np.zeros(len(once), dtype=np.int64)
    np.add.at(weights, place.ravel(), np.where(forth, 1, -1))
    counts = (weights != 0) & (once[:, 0] != once[:, 1]).any(axis=1)
    return once[counts], weights[counts]


def rings_of(region: Any) -> Iterator[tuple[Ring, tuple[Ring, ...]]]:
    """Outline and holes of every polygon of a shapely geometry."""
    for part in shapely.get_parts(region):
        if part.geom_type == "Polygon" and not part.is_empty:
            rings = [shapely.get_coordinates(ring)[:-1] for ring in shapely.get_rings(part)]
            yield rings[0], tuple(rings[1:])
