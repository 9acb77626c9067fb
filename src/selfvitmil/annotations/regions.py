"""The area enclosed by an outline: check whether it is unambiguous, repair it if not, and compute its shape.

An outline divides the plane into faces and winds around each of them a number of times, its holes in the other
direction. It is valid if that number is 0 or 1 everywhere and not 0 throughout: then even-odd and winding-number
filling agree. Nearly all outlines are valid in shapely, which is a fast check; only the others are divided into faces,
and those that merely touch themselves turn out to be valid.
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

_MAX_CROSSINGS = 10_000  # self-crossings of a line that are resolved; their number can grow as the square of its points
_AREA_NOISE = 1e-6  # level-0 px²: smaller overlaps are rounding errors


class _TooManyCrossings(ValueError):
    """An outline crosses itself too often to be resolved."""


def check_outlines(annotations: Sequence[Annotation], file_name: str, repair: bool) -> tuple[Annotation, ...]:
    """Return the annotations with every outline valid, or raise AnnotationError that lists the invalid ones."""
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
            f"{file_name} has {len(problems)} of {len(annotations)} annotations without a clear area: {listed}",
            "inside and outside are ambiguous",
            "Open it in ASAP or QuPath and draw these again, or have them repaired on reading (repair=True), "
            "which takes everything that a crossing line encloses",
            code="ambiguous-outlines",
        )
    return tuple(kept)


def _is_simple(annotations: Sequence[Annotation]) -> NDArray[np.bool_]:
    """Return which are valid at first check, as nearly all are: valid polygons, or points and lines with points."""
    simple = np.array([len(annotation.polygon) > 0 for annotation in annotations], dtype=bool)
    with_area = [index for index, annotation in enumerate(annotations) if annotation.has_area]
    simple[with_area] = shapely.is_valid(polygons_of([annotations[index] for index in with_area]))
    return simple


def _problem(annotation: Annotation) -> str:
    """Return what is wrong with an outline that is not simple; "" if it merely touches itself."""
    if len(annotation.polygon) == 0:
        return "has no points"
    if any(len(np.unique(ring, axis=0)) < 3 for ring in annotation.rings):
        return "has fewer than 3 different points"
    try:
        faces, windings = _faces(annotation)
    except _TooManyCrossings as error:
        return str(error)
    doubtful = (windings < 0) | (windings > 1)
    if doubtful.any():
        x, y = shapely.get_coordinates(shapely.point_on_surface(faces[doubtful][0]))[0]
        crosses = "has holes that cross or are outside" if annotation.holes else "crosses itself"
        return f"{crosses} near x = {x:.0f}, y = {y:.0f}"
    return "" if windings.any() else "has no area"


def _repaired(annotation: Annotation, file_name: str) -> list[Annotation]:
    """Return everything that the line encloses, as valid polygons; a line or points if it encloses nothing."""
    region = region_of(annotation, f"{file_name}: ")
    if region.is_empty:
        shape: Shape = "points" if len(annotation.polygon) < 2 else "line"
        return [replace(annotation, holes=(), shape=shape, repaired=True)]
    return [
        replace(annotation, polygon=outer, holes=holes, shape="polygon", repaired=True)
        for outer, holes in rings_of(region)
    ]


def polygons_of(annotations: Sequence[Annotation]) -> NDArray[Any]:
    """Return shapely polygons, valid or not; None if a ring has fewer than three points."""
    polygons = np.full(len(annotations), None, dtype=object)
    usable = [k for k, some in enumerate(annotations) if min(map(len, some.rings)) >= 3]
    rings = [(place, ring) for place, k in enumerate(usable) for ring in annotations[k].rings]
    if usable:
        of_ring = np.repeat(np.arange(len(rings)), [len(ring) for _, ring in rings])
        lines: Any = shapely.linearrings(np.concatenate([ring for _, ring in rings]), indices=of_ring)
        polygons[usable] = shapely.polygons(lines, indices=[place for place, _ in rings])
    return polygons


def region_of(annotation: Annotation, where: str = "") -> Any:
    """Return everything that the line encloses, as a valid shapely geometry."""
    try:
        faces, windings = _faces(annotation)
    except _TooManyCrossings as error:
        raise AnnotationError(
            f"{where}annotation {annotation.name!r} {error}",
            "the outline is too complex to repair",
            "Draw it again, or remove it",
            code="too-many-crossings",
        ) from None
    return shapely.union_all(faces[windings != 0])


def _faces(annotation: Annotation) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Return the faces into which the lines of an annotation divide the plane, and its winding number around each.

    Lines that run back and forth, as to a keyhole, are removed first.
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
    """Return the winding number of the lines around a point: the edges left of it, counted by direction."""
    (x0, y0), (x1, y1) = edges[:, 0].T, edges[:, 1].T
    crossed = (y0 <= y) != (y1 <= y)
    x0, y0, x1, y1 = x0[crossed], y0[crossed], x1[crossed], y1[crossed]
    left = x0 + (y - y0) * (x1 - x0) / (y1 - y0) < x
    return int((weights[crossed] * np.sign(y0 - y1))[left].sum())


def edges_of(annotations: Sequence[Annotation]) -> NDArray[np.float64]:
    """Return all edges (E, 2, 2) as pairs of points, outlines turning from +x to +y and holes in the other
    direction."""
    edges = [np.empty((0, 2, 2))]
    for annotation in annotations:
        for place, ring in enumerate(annotation.rings):
            is_hole = place > 0
            directed = ring[::-1] if (signed_area(ring) > 0) == is_hole else ring
            edges.append(np.stack([directed, np.roll(directed, -1, axis=0)], axis=1))
    return np.concatenate(edges)


def _net_edges(edges: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return each edge once, directed from its smaller point, and its net number of traversals in that direction."""
    (x0, y0), (x1, y1) = edges[:, 0].T, edges[:, 1].T
    forth = (x0 < x1) | ((x0 == x1) & (y0 < y1))
    once, place = np.unique(np.where(forth[:, None, None], edges, edges[:, ::-1]), axis=0, return_inverse=True)
    weights = np.zeros(len(once), dtype=np.int64)
    np.add.at(weights, place.ravel(), np.where(forth, 1, -1))
    counts = (weights != 0) & (once[:, 0] != once[:, 1]).any(axis=1)
    return once[counts], weights[counts]


def rings_of(region: Any) -> Iterator[tuple[Ring, tuple[Ring, ...]]]:
    """Yield outline and holes of every polygon of a shapely geometry."""
    for part in shapely.get_parts(region):
        if part.geom_type == "Polygon" and not part.is_empty:
            rings = [shapely.get_coordinates(ring)[:-1] for ring in shapely.get_rings(part)]
            yield rings[0], tuple(rings[1:])
