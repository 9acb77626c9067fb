"""Read annotation files of any known format; write ASAP XML or QuPath GeoJSON.

The format of an input file is detected from its content, that of an output file from its name. Input files are not
trusted: their unpacked size is limited, and any invalid content raises an AnnotationError with the file name.

ASAP XML has elements `Annotation` with their `Coordinate`s, and the `Group`s with their colours. Its polygons have no
holes. In XML a hole becomes a *keyhole*: the line runs from the first point of the contour to the hole, around it and
straight back. The detour encloses nothing, so every tool that fills the polygon gets the correct area, and reading
recovers the hole. (Polygons in a group `Exclusion` would also remove islands inside the hole.) The format has no
measurements, locks and ids; nested groups and groups without annotations are not kept.

GeoJSON is read in all variants of QuPath since 0.2, and NCRF's JSON of Camelyon16 polygons. A feature is one QuPath
object; if its geometry has several parts it becomes several annotations, which are joined again on writing. Content
without a field in `Annotation` is kept in `extra` and written back. ASAP's rectangles and splines are marked by a
property `asapType`, since GeoJSON has polygons only.
"""

from __future__ import annotations

import gzip
import json
import re
import uuid
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import BufferedIOBase
from pathlib import Path
from typing import Any, TypeGuard, cast
from xml.parsers import expat
from xml.sax.saxutils import quoteattr

import numpy as np
from numpy.typing import NDArray

from selfvitmil.annotations.annotation import (
    GROUP_COLORS,
    MAX_COORDINATE,
    Annotation,
    Ring,
    Shape,
    check_contours,
    label_of,
    signed_area,
)
from selfvitmil.errors import AnnotationError
from selfvitmil.store.files import atomic_path

_MAX_BYTES = 1 << 31  # of an unpacked file: far above any real one, and a limit for decompression bombs
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
_NAMESPACE = uuid.uuid5(uuid.NAMESPACE_DNS, "selfvitmil.annotations")


class Malformed(ValueError):
    """Invalid content of an annotation file; the reader adds the file name."""


def read_annotations(path: str | Path, *, repair: bool = False) -> tuple[Annotation, ...]:
    """Read all annotations of an ASAP XML, QuPath GeoJSON or NCRF JSON file.

    Parameters
    ----------
    path
        The file, plain or gzipped. Its format is detected from its content.
    repair
        Repair polygons that cross themselves or enclose nothing, and mark them `repaired`: a crossing polygon becomes
        everything it encloses; one that encloses nothing is kept as a `line` or `points`, which have no area.

    Returns
    -------
    tuple[Annotation, ...]
        The annotations in the order of the file, in level-0 pixels. A geometry of several parts becomes several
        annotations.

    Raises
    ------
    AnnotationError
        The file cannot be read or is in another format; or, without `repair`, polygons cross themselves or enclose
        nothing: the message lists all of them.
    """
    path = Path(path)
    try:
        return check_contours(list(_parse(_unpacked(path))), path.name, repair)
    except (Malformed, RecursionError) as error:
        raise AnnotationError(
            f"{path.name} cannot be read as annotations",
            str(error) if isinstance(error, Malformed) else "its elements are nested too deeply",
            "Export it again from ASAP (as XML) or QuPath (as GeoJSON)",
            code="invalid-annotation-file",
        ) from None


def _unpacked(path: Path) -> bytearray:
    data = bytearray()
    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            file: BufferedIOBase = gzip.GzipFile(fileobj=raw) if packed else raw
            while len(data) <= _MAX_BYTES and (block := file.read(1 << 16)):
                data += block
    except (EOFError, gzip.BadGzipFile, zlib.error):
        raise Malformed("the gzip file is truncated or damaged") from None
    except OSError as error:
        reason = error.strerror or str(error)
        raise AnnotationError(
            f"{path.name} cannot be read",
            reason[:1].lower() + reason[1:],
            "Check the path and the file permissions",
            code="unreadable-annotation-file",
        ) from error
    if len(data) > _MAX_BYTES:
        raise Malformed(f"it has more than {_MAX_BYTES >> 30} GiB")
    return data


def _parse(data: bytearray) -> Iterable[Annotation]:
    start = data[:256].decode(json.detect_encoding(data[:4]), "replace").lstrip("\ufeff \t\r\n")
    if not start:
        raise Malformed("it is empty")
    if start[0] == "<":
        return parse_asap(data)
    if start[0] not in "{[":
        raise Malformed("it is neither XML nor JSON")
    try:
        # QuPath up to 0.4 wrote a bare NaN for a missing measurement; as text it is rejected where a number is
        # required.
        document = json.loads(data, parse_constant=str)
    except ValueError as error:
        raise Malformed(f"it is not complete JSON ({error})") from None
    if _is_object(document) and "type" not in document and document.keys() & {"positive", "negative"}:
        return parse_ncrf(document)
    return parse_geojson(document)


def write_annotations(path: str | Path, annotations: Iterable[Annotation]) -> None:
    """Write ASAP XML (`.xml`) or QuPath GeoJSON (`.geojson`, `.json`, either with `.gz`) atomically.

    `annotations` may be a generator. The same annotations give identical bytes.
    """
    path = Path(path)
    suffix = re.search(r"\.(xml|geojson|json)(\.gz)?$", path.name.lower())
    if not suffix or suffix.group() == ".xml.gz":
        raise AnnotationError(
            f"{path.name}: unknown suffix of an annotation file",
            "the suffix determines the format",
            "Use .xml for ASAP, or .geojson or .geojson.gz for QuPath",
            code="unknown-annotation-suffix",
        )
    write = write_asap if suffix.group(1) == "xml" else write_geojson
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        if suffix.group(2):
            with gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0, compresslevel=6) as packed:
                write(packed, annotations)
        else:
            write(file, annotations)


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
    if not (np.abs(ring) < MAX_COORDINATE).all():
        raise Malformed(f"{label} has a coordinate far outside any slide")
    return ring


def _is_object(value: object) -> TypeGuard[dict[str, Any]]:
    return isinstance(value, dict)


def _is_list(value: object) -> TypeGuard[list[Any]]:
    return isinstance(value, list)


def without_closing_point(ring: Ring) -> Ring:
    """Return the ring without the last point if it repeats the first."""
    return ring[:-1] if len(ring) > 1 and (ring[0] == ring[-1]).all() else ring


# ---------------------------------------------------------------------------------------------------- ASAP XML


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
    """Return the contour and its holes as one line: after the contour, for each hole the way there, around and back."""
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

    outer, end = ring[: again[0]], again[0]
    holes: list[Ring] = []
    while 0 < end < len(ring):
        back = again[end + 1] if (ring[end] == ring[0]).all() else 0
        if not back or signed_area(ring[end + 1 : back]) * signed_area(outer) >= 0:
            return ring, ()
        holes.append(ring[end + 1 : back])
        end = back + 1
    return (outer, tuple(holes)) if holes else (ring, ())


# ---------------------------------------------------------------------------------------------------- GeoJSON


def parse_geojson(document: object) -> Iterator[Annotation]:
    """Parse a collection, a list, a single feature or a bare geometry."""
    if _is_object(document):
        if document.get("type") == "FeatureCollection":
            document = document.get("features")
        elif document.get("type") == "Feature":
            document = [document]
        elif "coordinates" in document or "geometries" in document:
            document = [{"type": "Feature", "geometry": document}]
    if not _is_list(document):
        raise Malformed("it is neither GeoJSON nor lists of positive and negative polygons")
    for index, feature in enumerate(document):
        if not _is_object(feature) or feature.get("type") != "Feature":
            raise Malformed(f"entry {index + 1} is not a GeoJSON feature")
        yield from _parse_feature(feature, index)


def _parse_feature(feature: Mapping[str, Any], index: int) -> Iterator[Annotation]:
    properties: Any = feature.get("properties") or {}
    if not _is_object(properties):
        raise Malformed(f"entry {index + 1} has properties that are not an object")
    properties = dict(properties)
    name = str(properties.pop("name", None) or "")
    label = label_of(index, name)
    geometry = feature.get("geometry")
    if not _is_object(geometry):
        raise Malformed(f"{label} has no geometry")
    group, group_color = _parse_classification(properties.pop("classification", None), label)
    # QuPath wrote the object type as `id` until 0.2, as `object_type` in 2021 and as `objectType` since.
    old_id = re.fullmatch("Path([A-Za-z]+)Object", str(feature.get("id")))
    old_type = properties.pop("object_type", None) or (old_id.group(1).lower() if old_id else "annotation")
    drawn_as = ASAP_TYPES.get(str(properties.pop("asapType", "Polygon")), "polygon")
    common: dict[str, Any] = {
        "color": _parse_color(properties.pop("color", None), properties.pop("colorRGB", None)),
        "group_color": group_color,
        "object_type": str(properties.pop("objectType", None) or old_type),
        "locked": bool(properties.pop("isLocked", False)),
        "measurements": _parse_measurements(properties.pop("measurements", None), label),
        "id": "" if old_id or feature.get("id") is None else str(feature["id"]),
    }
    rest = {
        "feature": {key: feature[key] for key in feature.keys() - {"type", "id", "geometry", "properties"}},
        "geometry": {key: geometry[key] for key in geometry.keys() - {"type", "coordinates", "geometries"}},
        "properties": properties,
    }
    extra = {key: value for key, value in rest.items() if value}
    parts = list(_parse_geometry(geometry, label)) or [("polygon", np.empty((0, 2)), ())]
    for part, (shape, ring, holes) in enumerate(parts):
        shape = drawn_as if shape == "polygon" else shape
        yield Annotation(name, group, ring, holes, shape, **common, extra=extra, part=part)


def _parse_geometry(geometry: Mapping[str, Any], label: str) -> Iterator[tuple[Shape, Ring, tuple[Ring, ...]]]:
    kind, coordinates = geometry.get("type"), geometry.get("coordinates")
    if kind == "GeometryCollection" and _is_list(geometry.get("geometries")):
        for member in geometry["geometries"]:
            if not _is_object(member):
                raise Malformed(f"{label} has an invalid geometry")
            yield from _parse_geometry(member, label)
        return
    if not _is_list(coordinates):
        raise Malformed(f"{label} has a geometry of type {kind!r} without coordinates")
    match kind:
        case "Polygon" | "MultiPolygon":
            for rings in [coordinates] if kind == "Polygon" else coordinates:
                if not _is_list(rings):
                    raise Malformed(f"{label} has coordinates that are not pairs of finite numbers")
                outer, *holes = [without_closing_point(ring_of(ring, label)) for ring in rings] or [np.empty((0, 2))]
                yield "polygon", outer, tuple(holes)
        case "LineString" | "MultiLineString":
            for line in [coordinates] if kind == "LineString" else coordinates:
                yield "line", ring_of(line, label), ()
        case "Point" | "MultiPoint":
            yield "points", ring_of([coordinates] if kind == "Point" else coordinates, label), ()
        case _:
            raise Malformed(f"{label} has a geometry of the unknown type {kind!r}")


def _parse_classification(value: object, label: str) -> tuple[str, str | None]:
    """Return name and colour of the class: an object, in some exporters a string, and often missing."""
    if value is None or isinstance(value, str):
        return value or "", None
    if not _is_object(value):
        raise Malformed(f"{label} has a classification that is neither a name nor an object")
    names = value.get("names")  # QuPath's form of a derived class
    name = ": ".join(map(str, names)) if _is_list(names) else str(value.get("name") or "")
    return name, _parse_color(value.get("color"), value.get("colorRGB"))


def _parse_color(color: object, packed: object) -> str | None:
    """Convert [r, g, b], or the older signed integer 0xAARRGGBB, to "#RRGGBB"; None if there is neither."""
    if isinstance(packed, int) and not _is_list(color):
        color = [packed >> 16 & 255, packed >> 8 & 255, packed & 255]
    if _is_list(color) and len(color) >= 3 and all(isinstance(c, int) and 0 <= c <= 255 for c in color[:3]):
        return "#{:02X}{:02X}{:02X}".format(*color[:3])
    return None


def _parse_measurements(value: Any, label: str) -> dict[str, float]:
    """Parse {name: value} or the older [{"name": name, "value": value}]; null means NaN."""
    try:
        entries: Any = {entry["name"]: entry["value"] for entry in value} if _is_list(value) else value or {}
        pairs = cast(Mapping[str, Any], entries).items()
        return {str(name): float("nan" if number is None else number) for name, number in pairs}
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
        raise Malformed(f"{label} has measurements that are not pairs of a name and a number") from None


def parse_ncrf(document: Mapping[str, Any]) -> Iterator[Annotation]:
    """Parse {"positive": polygons, "negative": polygons}, each with a name and its vertices."""
    for group, key in (("Tumor", "positive"), ("Exclusion", "negative")):
        entries = document.get(key, [])
        if not _is_list(entries):
            raise Malformed(f"its {key!r} is not a list of polygons")
        for index, entry in enumerate(entries):
            if not _is_object(entry) or "vertices" not in entry:
                raise Malformed(f"entry {index + 1} of {key!r} has no vertices")
            name = str(entry.get("name", ""))
            yield Annotation(name, group, without_closing_point(ring_of(entry["vertices"], label_of(index, name))))


def write_geojson(file: BufferedIOBase, annotations: Iterable[Annotation]) -> None:
    """Write one feature at a time, so that memory use does not depend on their number."""
    write_features(file, feature_texts(annotations))


def write_features(file: BufferedIOBase, features: Iterable[str]) -> None:
    """Write a collection of features given as JSON text."""
    file.write(b'{"type":"FeatureCollection","features":[')
    for index, text in enumerate(features):
        file.write(b",\n" if index else b"\n")
        file.write(text.encode("ascii"))
    file.write(b"\n]}\n")


def feature_texts(annotations: Iterable[Annotation]) -> Iterator[str]:
    """Yield the JSON text of every object."""
    for index, parts in enumerate(_objects(annotations)):
        text = json.dumps(_feature(parts), separators=(",", ":"))
        # Derived from position and content instead of random, so that the same annotations give identical bytes.
        identity = json.dumps(parts[0].id or str(uuid.uuid5(_NAMESPACE, f"{index} {text}")))
        yield f'{{"type":"Feature","id":{identity},{text[1:]}'


def _objects(annotations: Iterable[Annotation]) -> Iterator[list[Annotation]]:
    """Group annotations that are parts of one object."""
    parts: list[Annotation] = []
    for annotation in annotations:
        if parts and not _belongs(parts[-1], annotation):
            yield parts
            parts = []
        parts.append(annotation)
    if parts:
        yield parts


def _belongs(last: Annotation, annotation: Annotation) -> bool:
    one, two = ((some.id, some.name, some.group, some.object_type) for some in (last, annotation))
    return annotation.part == last.part + 1 and one == two


def _feature(parts: Sequence[Annotation]) -> dict[str, Any]:
    """Return the feature of one object, without type and id."""
    first = parts[0]
    geometries = [_geometry(part) for part in parts]
    if len(parts) == 1:
        geometry = geometries[0]
    elif all(part["type"] == "Polygon" for part in geometries):
        geometry = {"type": "MultiPolygon", "coordinates": [part["coordinates"] for part in geometries]}
    else:
        geometry = {"type": "GeometryCollection", "geometries": geometries}
    properties: dict[str, Any] = {"objectType": first.object_type, "isLocked": first.locked}
    if first.name:
        properties["name"] = first.name
    if first.group:
        properties["classification"] = {"name": first.group, "color": _rgb(first.group_color)}
    if first.color:
        properties["color"] = _rgb(first.color)
    if first.shape in ("rectangle", "spline"):
        properties["asapType"] = AREA_TYPES[first.shape]
    if first.measurements:
        properties["measurements"] = {name: _json_number(value) for name, value in first.measurements.items()}
    return {
        "geometry": geometry | dict(first.extra.get("geometry", {})),
        "properties": properties | dict(first.extra.get("properties", {})),
        **first.extra.get("feature", {}),
    }


def _geometry(annotation: Annotation) -> dict[str, Any]:
    if annotation.has_area:
        rings = [_plain(np.concatenate([ring, ring[:1]])) for ring in annotation.rings]
        return {"type": "Polygon", "coordinates": rings}
    points = _plain(annotation.polygon)
    if annotation.shape == "points" and len(points) == 1:
        return {"type": "Point", "coordinates": points[0]}
    return {"type": "LineString" if annotation.shape == "line" else "MultiPoint", "coordinates": points}


def _plain(ring: Ring) -> list[list[float]]:
    """Return lists, whole numbers without .0, which halves most files."""
    whole = ring.astype(np.int64)
    return (whole if (whole == ring).all() else ring).tolist()


def _json_number(value: float) -> float | str:
    """Return a JSON value: QuPath writes and reads NaN and infinity as these strings."""
    return float(value) if np.isfinite(value) else "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"


def _rgb(color: str | None) -> list[int]:
    match = re.fullmatch("#([0-9A-Fa-f]{2})([0-9A-Fa-f]{2})([0-9A-Fa-f]{2})", color or "")
    return [int(part, 16) for part in match.groups()] if match else _rgb(GROUP_COLORS["other"])
