"""Annotations: contours drawn on a slide, as files, as masks and as fractions of boxes.

Reads ASAP XML, QuPath GeoJSON (plain or gzipped, of current and older versions) and the JSON of Camelyon16 polygons
distributed with NCRF; the format is detected from the content. Writes ASAP XML and QuPath GeoJSON. All coordinates are
level-0 pixels and are kept exactly, so that reading, writing and reading again gives equal annotations.

A polygon is valid if the area it encloses is unambiguous. A line that only *touches* itself is valid (real annotations
contain many), a line that *crosses* itself is not: `read_annotations` rejects it, or with `repair=True` takes
everything the line encloses. Even-odd and winding-number filling are therefore equivalent here.

`annotation` is the data with its area, masks and coverage; `files` reads and writes it.
"""

from selfvitmil.annotations.annotation import (
    EXCLUDED_GROUPS,
    TUMOUR_GROUPS,
    Annotation,
    box_coverage,
    mask_to_annotations,
    to_mask,
)
from selfvitmil.annotations.files import read_annotations, write_annotations

__all__ = [
    "EXCLUDED_GROUPS", "TUMOUR_GROUPS", "Annotation", "box_coverage", "mask_to_annotations", "read_annotations",
    "to_mask", "write_annotations",
]  # fmt: skip
