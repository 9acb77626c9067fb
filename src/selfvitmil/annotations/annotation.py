"""The `Annotation` class, and what all readers of annotation files share.

An `Annotation` is frozen and validated: its points are finite (x, y) in level-0 pixels. Whether its outline encloses an
unambiguous area is checked on reading, in `regions`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from selfvitmil.errors import AnnotationError

# The names that Camelyon16, Camelyon17 and QuPath use; compared without regard to case.
TUMOUR_GROUPS = frozenset({"_0", "_1", "tumor", "tumour", "metastases"})
EXCLUDED_GROUPS = frozenset({"_2", "none", "exclusion", "normal", "ignore*"})

Ring = NDArray[np.float64]
Kind = Literal["tumour", "excluded", "other"]
Shape = Literal["polygon", "rectangle", "spline", "line", "points"]

GROUP_COLORS: dict[Kind, str] = {"tumour": "#C80000", "excluded": "#A0A0A0", "other": "#0078C8"}

_MAX_COORDINATE = 1e9


@dataclass(frozen=True, eq=False)
class Annotation:
    """One outline on a slide. Equality ignores ids and repairs."""

    name: str
    group: str
    """The class name in the file: ASAP's group, QuPath's classification; "" if there is none."""
    polygon: Ring
    """The outline, (K, 2) of (x, y) in level-0 pixels, first point not repeated; the points of a `line` or `points`."""
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
    measurements: Mapping[str, float] = field(default_factory=dict)
    extra: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Further content of a GeoJSON file, under "feature", "geometry" and "properties"; written back unchanged."""
    id: str = ""
    part: int = 0
    """Index in a geometry of several parts (QuPath's MultiPolygon), which share everything but their points."""
    repaired: bool = False
    """Whether the outline was changed on reading because it crossed itself or enclosed nothing."""

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
        if ring.ndim != 2 or ring.shape[1] != 2 or not (np.abs(ring) < _MAX_COORDINATE).all():
            raise AnnotationError(
                f"annotation {self.name!r} has points that are not (x, y) pairs of numbers within a slide",
                "points must be finite level-0 coordinates",
                "Check the numbers it was made from",
                code="invalid-points",
            )
        ring.setflags(write=False)
        return ring

    @property
    def kind(self) -> Kind:
        """Meaning of the group."""
        group = self.group.casefold()
        return "tumour" if group in TUMOUR_GROUPS else "excluded" if group in EXCLUDED_GROUPS else "other"

    @property
    def rings(self) -> tuple[Ring, ...]:
        """The outline, then the holes."""
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


# ---------------------------------------------------------------------------------------------------- reading


class Malformed(ValueError):
    """Invalid content of an annotation file; the reader adds the file name."""


def label_of(index: int, name: str) -> str:
    """Return how messages refer to an annotation, by its index in the file."""
    return f"annotation {index + 1} ({name!r})" if name else f"annotation {index + 1}"


def ring_of(points: object, label: str) -> Ring:
    """Return the points of a file as (K, 2)."""
    try:
        ring: NDArray[Any] = np.array(points)
    except (ValueError, OverflowError):
        ring = np.empty(0, dtype=object)
    if ring.size == 0 and ring.dtype != object:
        return np.empty((0, 2))
    if ring.ndim != 2 or ring.shape[1] != 2 or ring.dtype.kind not in "iuf":
        raise Malformed(f"{label} has coordinates that are not pairs of finite numbers")
    ring = ring.astype(np.float64)
    if not (np.abs(ring) < _MAX_COORDINATE).all():
        raise Malformed(f"{label} has a coordinate far outside any slide")
    return ring


def without_closing_point(ring: Ring) -> Ring:
    """Return the ring without the last point if it repeats the first."""
    return ring[:-1] if len(ring) > 1 and (ring[0] == ring[-1]).all() else ring
