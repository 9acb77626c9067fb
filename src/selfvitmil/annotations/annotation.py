"""An annotation: a region drawn on a slide, whether its area is unambiguous, its mask and its coverage of boxes.

An `Annotation` is frozen and validated: its points are finite (x, y) in level-0 pixels. Whether its contour encloses an
unambiguous area is checked on reading (`check_contours`): an contour divides the plane into faces and winds around each
of them a number of times, its holes in the other direction. It is valid if that number is 0 or 1 everywhere and not 0
throughout: then even-odd and winding-number filling agree. Nearly all contours are valid in shapely, which is a fast
check; only the others are divided into faces, and those that merely touch themselves turn out to be valid.

Masks and coverage use tumour annotations, or those of the given groups, minus excluded regions; annotations may
overlap. A mask is filled by pixel centres, coverage is computed from the polygons. `mask_to_annotations` converts a
mask back.
"""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# (shapely and scipy are typed in part)

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import shapely
from numpy.typing import ArrayLike, NDArray

from selfvitmil.errors import AnnotationError
from selfvitmil.geometry import size_at_mpp

# The names that Camelyon16, Camelyon17 and QuPath use; compared without regard to case.
TUMOUR_GROUPS = frozenset({"_0", "_1", "tumor", "tumour", "metastases"})
EXCLUDED_GROUPS = frozenset({"_2", "none", "exclusion", "normal", "ignore", "ignore*"})
_TUMOUR = """
    tumor tumour tumors tumours metastasis metastases metastatic cancer carcinoma adenocarcinoma melanoma sarcoma
    lymphoma malignant malignancy neoplasm neoplasia
"""
_QUALIFYING = """
    region regions area areas roi tissue cell cells nest nests epithelium epithelial gland glands main primary invasive
    infiltrating in situ positive negative ductal lobular squamous basal serous mucinous papillary clear large small
    lymph node nodes macro micro
"""
TUMOUR_WORDS = frozenset(_TUMOUR.split())
QUALIFIERS = frozenset(_QUALIFYING.split())
"""Words that may stand beside those of a tumour: `Tumor region`, QuPath's `Tumor: Positive` (tumour with a stained
marker) and `Tumor: Negative` (without), `invasive carcinoma`. Any other word makes it another thing: `tumor stroma`."""

Ring = NDArray[np.float64]
Kind = Literal["tumour", "excluded", "other"]
Shape = Literal["polygon", "rectangle", "spline", "line", "points"]

GROUP_COLORS: dict[Kind, str] = {"tumour": "#C80000", "excluded": "#A0A0A0", "other": "#0078C8"}

MAX_COORDINATE = 1e9
_MAX_CROSSINGS = 10_000  # self-crossings of a line that are resolved; their number can grow as the square of its points
_AREA_NOISE = 1e-6  # level-0 px²: smaller overlaps are rounding errors
_STRIP_PIXELS = 1 << 22  # pixels of a mask filled at a time
_MAX_POINTS = 128  # of a polygon that boxes are intersected with


@dataclass(frozen=True, eq=False)
class Annotation:
    """One contour on a slide. Equality ignores ids and repairs."""

    name: str
    group: str
    """The class name in the file: ASAP's group, QuPath's classification; "" if there is none."""
    polygon: Ring
    """The contour, (K, 2) of (x, y) in level-0 pixels, first point not repeated; the points of a `line` or `points`."""
    holes: tuple[Ring, ...] = ()
    shape: Shape = "polygon"
    """`line` and `points` have no area; a `spline` counts as the polygon through its points."""
    color: str | None = None
    """As "#RRGGBB"; None if it is that of the group."""
    group_color: str | None = None
    """As "#RRGGBB"; set on construction if None: red for tumour, grey for excluded regions, blue for the rest."""
    object_type: str = "annotation"
    """QuPath's object type: annotation, detection, tile or cell."""
    locked: bool = False
    measurements: Mapping[str, float] = field(default_factory=dict[str, float])
    extra: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])
    """Further content of a GeoJSON file, under "feature", "geometry" and "properties"; written back unchanged."""
    id: str = ""
    part: int = 0
    """Index in a geometry of several parts (QuPath's MultiPolygon), which share everything but their points."""
    repaired: bool = False
    """Whether the contour was changed on reading because it crossed itself or enclosed nothing."""

    def __post_init__(self) -> None:
        set_field = object.__setattr__
        set_field(self, "polygon", self._frozen(self.polygon))
        set_field(self, "holes", tuple(self._frozen(hole) for hole in self.holes))
        if self.group_color is None or not self.group:
            set_field(self, "group_color", GROUP_COLORS[self.kind])
        if self.color == self.group_color:
            set_field(self, "color", None)

    def _frozen(self, points: ArrayLike) -> Ring:
        ring = np.array(points, dtype=np.float64) + 0.0  # + 0.0 turns -0.0 into 0.0
        ring = ring.reshape(0, 2) if ring.size == 0 else ring
        if ring.ndim != 2 or ring.shape[1] != 2 or not (np.abs(ring) < MAX_COORDINATE).all():
            raise AnnotationError(
                f"annotation {self.name!r} has points that are not (x, y) pairs of numbers within a slide",
                "points must be finite level-0 coordinates",
                "Check the numbers that it was created from",
                code="invalid-points",
            )
        ring.setflags(write=False)
        return ring

    @property
    def kind(self) -> Kind:
        """Meaning of the group."""
        group = self.group.casefold().strip()
        if group in EXCLUDED_GROUPS:
            return "excluded"
        words = {word for word in re.split(r"[\W_]+", group) if word and not word.isdigit()}
        named = not words.isdisjoint(TUMOUR_WORDS) and words <= TUMOUR_WORDS | QUALIFIERS
        return "tumour" if named or group in TUMOUR_GROUPS else "other"

    @property
    def rings(self) -> tuple[Ring, ...]:
        """The contour, then the holes."""
        return (self.polygon, *self.holes)

    @property
    def has_area(self) -> bool:
        """Whether it encloses an area."""
        return self.shape not in ("line", "points")

    def _key(self) -> tuple[object, ...]:
        rings = tuple(ring.tobytes() for ring in self.rings)
        colors = (self.color, self.group_color)
        # As text, because a measurement may be NaN, which is not equal to itself.
        details = json.dumps([dict(self.measurements), self.extra], sort_keys=True)
        return (self.name, self.group, rings, self.shape, colors, self.object_type, self.locked, details)

    def __eq__(self, other: object) -> bool:
        return self._key() == other._key() if isinstance(other, Annotation) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._key())


def signed_area(ring: Ring) -> float:
    """Return the signed area, positive if the line turns from +x to +y."""
    x, y = (ring - ring[:1]).T  # the first point is 0, so the closing edge adds nothing
    return float(x[:-1] @ y[1:] - y[:-1] @ x[1:]) / 2


def label_of(index: int, name: str) -> str:
    """Return how messages refer to an annotation, by its index in the file."""
    return f"annotation {index + 1} ({name!r})" if name else f"annotation {index + 1}"


# ---------------------------------------------------------------------------------------------------- area


class _TooManyCrossings(ValueError):
    """An contour crosses itself too often to be resolved."""


def check_contours(annotations: Sequence[Annotation], file_name: str, repair: bool) -> tuple[Annotation, ...]:
    """Return the annotations with every contour valid, or raise AnnotationError that lists the invalid ones."""
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
    """Return what is wrong with an contour that is not simple; "" if it merely touches itself."""
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
            "the contour is too complex to repair",
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
    """Return all edges (E, 2, 2) as pairs of points, contours turning from +x to +y and holes in the other
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
    """Yield contour and holes of every polygon of a shapely geometry."""
    for part in shapely.get_parts(region):
        if part.geom_type == "Polygon" and not part.is_empty:
            rings = [shapely.get_coordinates(ring)[:-1] for ring in shapely.get_rings(part)]
            yield rings[0], tuple(rings[1:])


# ---------------------------------------------------------------------------------------------------- masks


def to_mask(
    annotations: Iterable[Annotation],
    size_l0: tuple[int, int],
    slide_mpp: float,
    mpp: float,
    *,
    groups: Collection[str] | None = None,
) -> NDArray[np.bool_]:
    """Return the mask [y, x] of the whole slide at `mpp`: tumour, or the given `groups`, without excluded regions.

    A pixel is inside if its centre is. A centre exactly on an contour belongs to the area right of it or below it, so
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
    """Return valid shapely geometries; contours that touch themselves are assembled from their faces."""
    regions = polygons_of(annotations)
    for index in np.flatnonzero(~shapely.is_valid(regions)).tolist():
        regions[index] = region_of(annotations[index])
    return regions


def _subdivided(region: Any) -> NDArray[Any]:
    """Split the polygons of a geometry until each is small, so that a box is intersected with short contours only."""
    done: list[Any] = []
    waiting: list[Any] = list(shapely.get_parts(region))
    while waiting:
        part = waiting.pop()
        if shapely.get_num_coordinates(part) <= _MAX_POINTS:
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
    filled: list[Annotation] = []
    removed: list[Annotation] = []
    for annotation in annotations:
        wanted = annotation.kind == "tumour" if groups is None else annotation.group in groups
        if annotation.has_area and wanted:
            filled.append(annotation)
        elif annotation.has_area and annotation.kind == "excluded":
            removed.append(annotation)
    return filled, removed


# ---------------------------------------------------------------------------------------------------- contours


def mask_to_annotations(mask: NDArray[np.bool_], mpp: float, slide_mpp: float, group: str) -> tuple[Annotation, ...]:
    """Return the contours, along pixel edges, of the regions of a mask [y, x] at `mpp`, as valid polygons with holes.

    Pixels that share an edge are connected. `to_mask` gives the same mask back.
    """
    if not mask.any():
        return ()
    # Only the bounding box of the mask is processed.
    columns, rows = (np.flatnonzero(mask.any(axis=axis)) for axis in (0, 1))
    left, top, right, bottom = columns[0], rows[0], columns[-1] + 1, rows[-1] + 1
    origin, scale = np.array([left, top]), mpp / slide_mpp
    return tuple(
        Annotation(
            f"{group} {number}", group, (outer + origin) * scale, tuple((hole + origin) * scale for hole in holes)
        )
        for number, (outer, holes) in enumerate(_contours(mask[top:bottom, left:right]), start=1)
    )


def _contours(mask: NDArray[np.bool_]) -> list[tuple[Ring, tuple[Ring, ...]]]:
    """Return contour and holes, in mask pixels, of every region of edge-connected pixels.

    The border consists of straight runs, directed so that the region is on the right side as seen on the screen: along
    the top of a region to the right, down its right side and so on. Each run ends where one of the other orientation
    begins; following them gives closed lines, one contour and any number of holes per region.
    """
    from scipy import ndimage  # pyright: ignore[reportMissingTypeStubs]

    areas: Any = ndimage.label(np.pad(mask, 1))[0]  # pyright: ignore[reportIndexIssue]
    across = _runs(areas)
    down = _runs(areas.T)[:, [3, 2, 1, 0, 4]]  # mirrored, so in reverse direction
    follow = _next_run(down, across, -1)[_next_run(across, down, 1)].tolist()
    contours: dict[int, Ring] = {}
    holes: dict[int, list[Ring]] = {}
    seen = bytearray(len(follow))
    for start in range(len(follow)):
        line: list[int] = []
        run = start
        while not seen[run]:
            seen[run] = True
            line.append(run)
            run = follow[run]
        if line:
            ring, area = across[line, :4].reshape(-1, 2).astype(np.float64), int(across[start, 4])
            if signed_area(ring) > 0:
                contours[area] = ring
            else:
                holes.setdefault(area, []).append(ring)
    return [(ring, tuple(holes.get(area, ()))) for area, ring in sorted(contours.items())]


def _runs(areas: NDArray[np.int32]) -> NDArray[np.int64]:
    """Return all horizontal border runs: x and y of the start, x and y of the end, index of the region; row by row.

    Coordinates are those of the mask before padding by one pixel.
    """
    above, below = areas[:-1], areas[1:]
    runs: list[NDArray[Any]] = []
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
    region meets itself at a corner, lines turn left: this separates a hole from its contour, which otherwise would
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
