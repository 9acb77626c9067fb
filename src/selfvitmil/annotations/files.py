"""Annotation files: any of the known formats in, ASAP XML or QuPath GeoJSON out.

What a file to read is follows from its content, what a file to write becomes from its name. Files are taken as hostile:
what they unpack to is limited, and every way in which they make no sense ends as an AnnotationError with their name.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterable
from io import BufferedIOBase
from pathlib import Path

from selfvitmil.annotations.annotation import Annotation, Malformed
from selfvitmil.annotations.asap import parse_asap, write_asap
from selfvitmil.annotations.geojson import parse_geojson, parse_ncrf, write_geojson
from selfvitmil.annotations.regions import check_outlines
from selfvitmil.errors import AnnotationError
from selfvitmil.store.files import atomic_path

_MAX_BYTES = 1 << 31  # of a file once unpacked: far above any real one, far below what a packed bomb grows to


def read_annotations(path: str | Path, *, repair: bool = False) -> tuple[Annotation, ...]:
    """All annotations of an ASAP XML, QuPath GeoJSON or NCRF JSON file, in the order of the file.

    A geometry of several parts becomes several annotations. Raises AnnotationError, listing every outline that crosses
    itself or encloses nothing. With `repair` such are mended and marked `repaired` instead: of a crossing outline all
    that it goes round is taken; one that encloses nothing is kept as a `line` or `points`, which have no area.
    """
    path = Path(path)
    try:
        return check_outlines(list(_parse(_unpacked(path))), path.name, repair)
    except (Malformed, RecursionError) as error:
        raise AnnotationError(
            f"{path.name} cannot be read as annotations",
            str(error) if isinstance(error, Malformed) else "its elements are nested without end",
            "Export it again from ASAP (as XML) or QuPath (as GeoJSON)",
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
        raise Malformed("the packed file is cut off or damaged") from None
    except OSError as error:
        reason = error.strerror or str(error)
        raise AnnotationError(
            f"{path.name} cannot be read", reason[:1].lower() + reason[1:], "Check the path and your right to read it"
        ) from error
    if len(data) > _MAX_BYTES:
        raise Malformed(f"it holds more than {_MAX_BYTES >> 30} GiB, which no drawing does")
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
        # QuPath up to 0.4 wrote a bare NaN for a missing measurement; as text it is refused where a number must stand.
        document = json.loads(data, parse_constant=str)
    except ValueError as error:
        raise Malformed(f"it is no complete JSON ({error})") from None
    if isinstance(document, dict) and "type" not in document and document.keys() & {"positive", "negative"}:
        return parse_ncrf(document)
    return parse_geojson(document)


def write_annotations(path: str | Path, annotations: Iterable[Annotation]) -> None:
    """Write ASAP XML (`.xml`) or QuPath GeoJSON (`.geojson`, `.json`, either with `.gz`), whole or not at all.

    `annotations` may be a generator. The same annotations give the same bytes.
    """
    path = Path(path)
    suffix = re.search(r"\.(xml|geojson|json)(\.gz)?$", path.name.lower())
    if not suffix or suffix.group() == ".xml.gz":
        raise AnnotationError(
            f"{path.name} is no name for an annotation file",
            "the ending tells the format",
            "Use .xml for ASAP, or .geojson or .geojson.gz for QuPath",
        )
    write = write_asap if suffix.group(1) == "xml" else write_geojson
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        if suffix.group(2):
            with gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0, compresslevel=6) as packed:
                write(packed, annotations)
        else:
            write(file, annotations)
