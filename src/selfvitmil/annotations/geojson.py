"""GeoJSON of QuPath, in all variants since 0.2, and NCRF's JSON of Camelyon16 polygons.

A feature is one QuPath object; if its geometry has several parts it becomes several annotations, which are joined again
on writing. Content without a field in `Annotation` is kept in `extra` and written back. ASAP's rectangles and splines
are marked by a property `asapType`, since GeoJSON has polygons only.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import BufferedIOBase
from typing import Any

import numpy as np

from selfvitmil.annotations.annotation import (
    GROUP_COLORS,
    Annotation,
    Malformed,
    Ring,
    Shape,
    label_of,
    ring_of,
    without_closing_point,
)
from selfvitmil.annotations.asap import AREA_TYPES, ASAP_TYPES

_NAMESPACE = uuid.uuid5(uuid.NAMESPACE_DNS, "selfvitmil.annotations")


def parse_geojson(document: object) -> Iterator[Annotation]:
    """Parse a collection, a list, a single feature or a bare geometry."""
    if isinstance(document, dict):
        if document.get("type") == "FeatureCollection":
            document = document.get("features")
        elif document.get("type") == "Feature":
            document = [document]
        elif "coordinates" in document or "geometries" in document:
            document = [{"type": "Feature", "geometry": document}]
    if not isinstance(document, list):
        raise Malformed("it is neither GeoJSON nor lists of positive and negative polygons")
    for index, feature in enumerate(document):
        if not isinstance(feature, dict) or feature.get("type") != "Feature":
            raise Malformed(f"entry {index + 1} is not a GeoJSON feature")
        yield from _parse_feature(feature, index)


def _parse_feature(feature: Mapping[str, Any], index: int) -> Iterator[Annotation]:
    properties = feature.get("properties") or {}
    if not isinstance(properties, dict):
        raise Malformed(f"entry {index + 1} has properties that are not an object")
    properties = dict(properties)
    name = str(properties.pop("name", None) or "")
    label = label_of(index, name)
    geometry = feature.get("geometry")
    if not isinstance(geometry, dict):
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
    if kind == "GeometryCollection" and isinstance(geometry.get("geometries"), list):
        for member in geometry["geometries"]:
            if not isinstance(member, dict):
                raise Malformed(f"{label} has an invalid geometry")
            yield from _parse_geometry(member, label)
        return
    if not isinstance(coordinates, list):
        raise Malformed(f"{label} has a geometry of type {kind!r} without coordinates")
    match kind:
        case "Polygon" | "MultiPolygon":
            for rings in [coordinates] if kind == "Polygon" else coordinates:
                if not isinstance(rings, list):
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
    if not isinstance(value, dict):
        raise Malformed(f"{label} has a classification that is neither a name nor an object")
    names = value.get("names")  # QuPath's form of a derived class
    name = ": ".join(map(str, names)) if isinstance(names, list) else str(value.get("name") or "")
    return name, _parse_color(value.get("color"), value.get("colorRGB"))


def _parse_color(color: object, packed: object) -> str | None:
    """Convert [r, g, b], or the older signed integer 0xAARRGGBB, to "#RRGGBB"; None if there is neither."""
    if isinstance(packed, int) and not isinstance(color, list):
        color = [packed >> 16 & 255, packed >> 8 & 255, packed & 255]
    if isinstance(color, list) and len(color) >= 3 and all(isinstance(c, int) and 0 <= c <= 255 for c in color[:3]):
        return "#{:02X}{:02X}{:02X}".format(*color[:3])
    return None


def _parse_measurements(value: Any, label: str) -> dict[str, float]:
    """Parse {name: value} or the older [{"name": name, "value": value}]; null means NaN."""
    try:
        if isinstance(value, list):
            value = {entry["name"]: entry["value"] for entry in value}
        return {str(name): float("nan" if number is None else number) for name, number in (value or {}).items()}
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
        raise Malformed(f"{label} has measurements that are not pairs of a name and a number") from None


def parse_ncrf(document: Mapping[str, Any]) -> Iterator[Annotation]:
    """Parse {"positive": polygons, "negative": polygons}, each with a name and its vertices."""
    for group, key in (("Tumor", "positive"), ("Exclusion", "negative")):
        entries = document.get(key, [])
        if not isinstance(entries, list):
            raise Malformed(f"its {key!r} is not a list of polygons")
        for index, entry in enumerate(entries):
            if not isinstance(entry, dict) or "vertices" not in entry:
                raise Malformed(f"entry {index + 1} of {key!r} has no vertices")
            name = str(entry.get("name", ""))
            yield Annotation(name, group, without_closing_point(ring_of(entry["vertices"], label_of(index, name))))


# ---------------------------------------------------------------------------------------------------- writing


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
