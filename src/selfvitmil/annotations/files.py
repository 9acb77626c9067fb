"""Read annotation files of any known format; write ASAP XML or QuPath GeoJSON.

The format of an input file is detected from its content, that of an output file from its name. Input files are not
trusted: their unpacked size is limited, and any invalid content raises an AnnotationError with the file name.
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

_MAX_BYTES = 1 << 31  # of an unpacked file: far above any real one, and a limit for decompression bombs


def read_annotations(path: str | Path, *, repair: bool = False) -> tuple[Annotation, ...]:
    """Read all annotations of an ASAP XML, QuPath GeoJSON or NCRF JSON file, in the order of the file.

    A geometry of several parts becomes several annotations. Raises AnnotationError that lists every outline that
    crosses itself or encloses nothing. With `repair` such outlines are repaired and marked `repaired` instead: a
    crossing outline becomes everything it encloses; one that encloses nothing is kept as a `line` or `points`, which
    have no area.
    """
    path = Path(path)
    try:
        return check_outlines(list(_parse(_unpacked(path))), path.name, repair)
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
    if isinstance(document, dict) and "type" not in document and document.keys() & {"positive", "negative"}:
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
