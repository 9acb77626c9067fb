"""Annotations: outlines drawn on a slide, as files, as masks and as fractions of boxes.

Reads ASAP XML, QuPath GeoJSON (plain or gzipped, of current and older versions) and the JSON of Camelyon16 polygons
distributed with NCRF; the format is detected from the content. Writes ASAP XML and QuPath GeoJSON. All coordinates are
level-0 pixels and are kept exactly, so that reading, writing and reading again gives equal annotations.

A polygon is valid if the area it encloses is unambiguous. A line that only *touches* itself is valid (real annotations
contain many), a line that *crosses* itself is not: `read_annotations` rejects it, or with `repair=True` takes
everything the line encloses. Even-odd and winding-number filling are therefore equivalent here.

`annotation` is the data, `files` reads and writes it with `asap` and `geojson`, `regions` checks and repairs outlines,
`masks` rasterizes masks and measures boxes, `contours` converts a mask back to annotations.
"""

from selfvitmil.annotations.annotation import EXCLUDED_GROUPS, TUMOUR_GROUPS, Annotation
from selfvitmil.annotations.contours import mask_to_annotations
from selfvitmil.annotations.files import read_annotations, write_annotations
from selfvitmil.annotations.masks import box_coverage, to_mask

__all__ = [
    "EXCLUDED_GROUPS",
    "TUMOUR_GROUPS",
    "Annotation",
    "box_coverage",
    "mask_to_annotations",
    "read_annotations",
    "to_mask",
    "write_annotations",
]
