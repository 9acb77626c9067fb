"""ASAP XML: elements `Annotation` with their `Coordinate`s, and the `Group`s with their colours.

ASAP's polygons have no holes. In XML a hole becomes a *keyhole*: the line runs from the first point of the outline to
the hole, around it and straight back. The detour encloses nothing, so every tool that fills the polygon gets the
correct area, and reading recovers the hole. (Polygons in a group `Exclusion` would also remove islands inside the
hole.) ASAP's format has no measurements, locks and ids; nested groups and groups without annotations are not kept.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from io import BufferedIOBase
from xml.parsers import expat
from xml.sax.saxutils import quoteattr

import numpy as np

from selfvitmil.annotations.annotation import (
    Annotation,
    Malformed,
    Ring,
    Shape,
    label_of,
    ring_of,
    signed_area,
    without_closing_point,
)
from selfvitmil.errors import AnnotationError

ASAP_TYPES: dict[str, Shape] = {
    "Polygon": "polygon",
    "Rectangle": "rectangle",
    "Spline": "spline",
    "Measurement": "line",
    "Dot": "points",
    "PointSet": "points",
    "None": "points",
}
AREA_TYPES = {shape: name for name, shape in ASAP_TYPES.items() if shape in ("polygon", "rectangle", "spline")}

_MAX_DEPTH = 64  # of nested XML elements; ASAP needs four
_NOT_IN_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def parse_asap(data: bytearray) -> list[Annotation]:
    """Parse ASAP XML from parser events, without a tree; a document type declaration is rejected before it is read."""
    open_tags: list[str] = []
    found: list[tuple[dict[str, str], list[dict[str, str]]]] = []
    group_colors: dict[str, str] = {}

    def start(tag: str, attributes: dict[str, str]) -> None:
        if not open_tags and tag != "ASAP_Annotations":
            raise Malformed(f"its root element is <{tag}> instead of <ASAP_Annotations>")
        open_tags.append(tag)
        if len(open_tags) > _MAX_DEPTH:
            raise Malformed(f"its elements are nested more than {_MAX_DEPTH} deep")
        if tag == "Annotation":
            found.append((attributes, []))
        elif tag == "Coordinate" and found:
            found[-1][1].append(attributes)
        elif tag == "Group" and attributes.get("Color"):
            group_colors[attributes.get("Name", "")] = attributes["Color"].upper()

    def refuse(*_: object) -> None:
        raise Malformed("it declares a document type or entities, which ASAP does not use and which may be unsafe")

    parser = expat.ParserCreate()
    parser.StartElementHandler = start
    parser.EndElementHandler = lambda _: open_tags.pop()
    parser.StartDoctypeDeclHandler = parser.EntityDeclHandler = refuse
    try:
        parser.Parse(data, True)
    except Malformed:
        raise
    except (expat.ExpatError, LookupError, ValueError) as error:
        raise Malformed(f"it is not complete XML ({error})") from None
    return [_asap_annotation(index, *item, group_colors) for index, item in enumerate(found)]


def _asap_annotation(
    index: int, attributes: Mapping[str, str], points: list[dict[str, str]], group_colors: Mapping[str, str]
) -> Annotation:
    name, group = attributes.get("Name", ""), attributes.get("PartOfGroup", "")
    label = label_of(index, name)
    if attributes.get("Type") not in ASAP_TYPES:
        raise Malformed(f"{label} is of the type {attributes.get('Type')!r}, not one of {', '.join(ASAP_TYPES)}")
    shape = ASAP_TYPES[attributes["Type"]]
    rows = [
        (_number(p.get("Order", k), label), _number(p.get("X"), label), _number(p.get("Y"), label))
        for k, p in enumerate(points)
    ]
    rows.sort(key=lambda row: row[0])
    ring, holes = ring_of([row[1:] for row in rows], label), ()
    if shape in AREA_TYPES:
        ring, holes = _split_keyholes(without_closing_point(ring))
    color = attributes.get("Color", "").upper() or None
    return Annotation(name, group, ring, holes, shape, color, group_colors.get(group))


def _number(text: str | int | None, label: str) -> float:
    try:
        number = float("" if text is None else text)
    except ValueError:
        number = np.nan
    if not np.isfinite(number) or "_" in str(text):  # Python would accept 1_000
        raise Malformed(f"{label} has the coordinate {text!r}, which is not a finite number")
    return number


def write_asap(file: BufferedIOBase, annotations: Iterable[Annotation]) -> None:
    """Write annotations one at a time; a group has the colour of its first annotation."""

    def line(text: str) -> None:
        file.write(text.encode("utf-8") + b"\n")

    groups: dict[str, str | None] = {}
    line('<?xml version="1.0" encoding="UTF-8"?>\n<ASAP_Annotations>\n<Annotations>')
    for annotation in annotations:
        points = _join_keyholes(annotation).tolist()
        no_area = "Measurement" if annotation.shape == "line" else "Dot" if len(points) == 1 else "PointSet"
        head = {
            "Name": annotation.name,
            "Type": AREA_TYPES.get(annotation.shape, no_area),
            "PartOfGroup": annotation.group,
            "Color": annotation.color or annotation.group_color or "",
        }
        line(f"<Annotation {_attributes(head)}><Coordinates>")
        for order, (x, y) in enumerate(points):
            line(f'<Coordinate Order="{order}" X="{x!r}" Y="{y!r}"/>')
        line("</Coordinates></Annotation>")
        groups.setdefault(annotation.group, annotation.group_color)
    line("</Annotations>\n<AnnotationGroups>")
    for group, color in groups.items():
        if group not in ("", "None"):  # both mean no group in ASAP
            head = {"Name": group, "PartOfGroup": "None", "Color": color or ""}
            line(f"<Group {_attributes(head)}><Attributes/></Group>")
    line("</AnnotationGroups>\n</ASAP_Annotations>")


def _attributes(values: Mapping[str, str]) -> str:
    for value in values.values():
        if _NOT_IN_XML.search(value):
            raise AnnotationError(
                f"the name {value!r} cannot be written as XML",
                "it contains control characters",
                "Rename it, or write GeoJSON instead",
                code="invalid-xml-name",
            )
    return " ".join(f"{name}={quoteattr(value)}" for name, value in values.items())


def _join_keyholes(annotation: Annotation) -> Ring:
    """Return the outline and its holes as one line: after the outline, for each hole the way there, around and back."""
    outer = annotation.polygon
    pieces = [outer]
    for hole in annotation.holes:
        around = hole if signed_area(hole) * signed_area(outer) < 0 else np.concatenate([hole[:1], hole[:0:-1]])
        pieces += [outer[:1], around, around[:1]]
    return np.concatenate(pieces)


def _split_keyholes(ring: Ring) -> tuple[Ring, tuple[Ring, ...]]:
    """Reverse `_join_keyholes`; a line of any other form is unchanged."""
    if not (ring[1:] == ring[:1]).all(axis=1).any():
        return ring, ()  # the usual case: it never returns to its first point
    # For each point the index where the line returns to it, or 0.
    _, point = np.unique(ring, axis=0, return_inverse=True)
    order = np.argsort(point.ravel(), kind="stable")
    again = np.zeros(len(ring) + 2, dtype=np.int64)
    same = point.ravel()[order[1:]] == point.ravel()[order[:-1]]
    again[order[:-1][same]] = order[1:][same]

    outer, holes, end = ring[: again[0]], [], again[0]
    while 0 < end < len(ring):
        back = again[end + 1] if (ring[end] == ring[0]).all() else 0
        if not back or signed_area(ring[end + 1 : back]) * signed_area(outer) >= 0:
            return ring, ()
        holes.append(ring[end + 1 : back])
        end = back + 1
    return (outer, tuple(holes)) if holes else (ring, ())
