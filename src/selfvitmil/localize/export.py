"""Maps for other tools: tiles and lesions as GeoJSON for QuPath, lesions as XML for ASAP.

In QuPath a tile is an object of type `tile` with its numbers as measurements, so that *Measure > Show measurement maps*
colours the slide by any of them; a lesion is an annotation of a class of its own, which our readers do not take for
annotated truth. ASAP knows neither tiles nor measurements: there the name of a lesion carries its score and size. On a
slide that is not called positive regions have another class and name: they are its highest-ranked ones and no lesions.

Files are written tile by tile, so that 200,000 of them cost no memory, and whole or not at all.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np

from selfvitmil.annotations import write_annotations
from selfvitmil.annotations.geojson import feature_texts, write_features
from selfvitmil.errors import AnnotationError
from selfvitmil.localize.lesions import Lesion
from selfvitmil.localize.maps import COLUMNS, SlideMap
from selfvitmil.store.files import atomic_path

MEASUREMENTS = {"instance": "instance probability"}
"""What columns of a map are called in QuPath, where not by their own name."""

_CHUNK = 2_000  # tiles whose numbers are plain Python at a time


def write_geojson_map(path: Path, slide_map: SlideMap, lesions: Sequence[Lesion]) -> None:
    """Write lesions and tiles as a FeatureCollection for QuPath; `.geojson`, packed where the name ends in `.gz`."""
    if not path.name.lower().endswith((".geojson", ".geojson.gz")):
        raise AnnotationError(
            f"{path.name} is no name for a map of QuPath", "it is GeoJSON", "Use .geojson or .geojson.gz"
        )
    parts = (part for lesion in lesions for part in lesion.parts)
    features = chain(feature_texts(parts), _tile_texts(slide_map))
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        if path.name.lower().endswith(".gz"):
            with gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0, compresslevel=6) as packed:
                write_features(packed, features)
        else:
            write_features(file, features)


def write_asap_lesions(path: Path, slide_map: SlideMap, lesions: Sequence[Lesion]) -> None:
    """Write the outlines of lesions as XML for ASAP; their names tell model, score and size."""
    write_annotations(
        path,
        (
            replace(
                lesion.annotation,
                name=f"{slide_map.model} {lesion.annotation.name}: score {lesion.score:.3f}, "
                f"{lesion.area_mm2:.3g} mm2, {lesion.size_words('none')}",
            )
            for lesion in lesions
        ),
    )


def _tile_texts(slide_map: SlideMap) -> Iterator[str]:
    """A feature for every tile, numbers to six digits that count: attention may be very small."""
    extent = round(slide_map.frame.extent_l0, 2)
    measured = {"score": slide_map.score, "detection": slide_map.detection}
    measured |= {MEASUREMENTS.get(name, name): slide_map.columns[name] for name in COLUMNS if name in slide_map.columns}
    if slide_map.annotated is not None:
        measured["annotated"] = slide_map.annotated
    ring = ",".join(["[%.12g,%.12g]"] * 5)
    numbers = ",".join(f'"{name}":%s' for name in measured)
    text = (
        '{"type":"Feature","geometry":{"type":"Polygon","coordinates":[[' + ring + "]]},"
        '"properties":{"objectType":"tile","measurements":{' + numbers + "}}}"
    )
    for start in range(0, len(slide_map), _CHUNK):
        rows = slice(start, start + _CHUNK)
        (x0, y0), columns = slide_map.coords_l0[rows].T, [values[rows] for values in measured.values()]
        x1, y1 = x0 + extent, y0 + extent
        places = (axis.tolist() for axis in (x0, y0, x1, y0, x1, y1, x0, y1, x0, y0))
        for row in zip(*places, *map(_number_texts, columns), strict=True):
            yield text % row


def _number_texts(values: np.ndarray) -> list[str]:
    """As JSON; QuPath writes and reads what is no number as these words."""
    words = [f"{value:.6g}" for value in values.tolist()]
    for row in np.flatnonzero(~np.isfinite(values)):
        words[row] = {"nan": '"NaN"', "inf": '"Infinity"', "-inf": '"-Infinity"'}[words[row]]
    return words
