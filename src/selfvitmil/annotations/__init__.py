"""Annotations: outlines that people or programs drew on a slide, as files, as masks and as shares of boxes.

In come ASAP's XML, QuPath's GeoJSON (plain or gzipped, as current and as older versions write it) and the JSON of
Camelyon16 polygons that NCRF distributes; what a file is follows from its content. Out go ASAP XML and QuPath GeoJSON.
All coordinates are level-0 pixels and are kept exactly, so that reading, writing and reading again gives equal
annotations.

A polygon is usable when the area that it encloses can be told without doubt. A line that only *touches* itself is (real
annotations are full of such), a line that *crosses* itself is not: `read_annotations` refuses it, or with `repair=True`
takes everything that the line goes round. Hence even-odd and winding-number filling mean the same everywhere here.

`annotation` is the data, `files` reads and writes it with `asap` and `geojson`, `regions` tells and mends the area that
an outline encloses, `masks` fills masks and measures boxes, `outline` leads from a mask back to annotations.
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
