"""Files from one heatmap: lesions and points, overlays, GeoJSON for QuPath, XML for ASAP, a pyramidal TIFF.

`export_heatmap` runs in a worker. Lesions and points are found anew every time, which is quick. Files are left alone as
long as they exist and `<slide>.json` beside them says that they were built from this heatmap, with these settings,
annotation and slide.

* **GeoJSON**: in QuPath a tile is an object of type `tile` with its numbers as measurements, so that *Measure > Show
  measurement maps* colours the slide by any of them; a lesion is an annotation of a class of its own, which our readers
  do not take for ground truth. Written tile by tile, so that 200,000 of them cost no memory.
* **ASAP** knows neither tiles nor measurements: there the name of a lesion carries its score and size.
* **TIFF**: a BigTIFF in RGB with tiles of 256 pixels, losslessly compressed, each level a page of its own. OpenSlide
  calls that a generic TIFF; QuPath, ASAP, libvips and tifffile read it (OpenSlide does not find the levels of an
  OME-TIFF). It covers the area of the slide, and its resolution tags say so: a pixel is `downsample` level-0 pixels, a
  power of two that leaves 16 to 32 pixels to the edge of a tile. Where there is no tile it is black: viewers that lay
  the file over the slide, channel by channel, take dark for little. No level is held in memory whole.

On a slide that is not called positive regions have another class and name: they are its highest-ranked ones and no
lesions. Every file is written atomically; equal heatmaps give equal bytes.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import tifffile

from selfvitmil.annotations import Annotation, read_annotations, write_annotations
from selfvitmil.annotations.files import feature_texts, write_features
from selfvitmil.errors import AnnotationError, SelfVitMilError
from selfvitmil.localize.detection import Lesion, find_lesions, find_points, highest_scoring_tile
from selfvitmil.localize.heatmap import COLUMNS, NO_SLIDE, Heatmap, check_annotations, heatmap_made_from, read_heatmap
from selfvitmil.localize.overlay import Colors, Pixels, Raster, color_table, shown_words, write_overlays
from selfvitmil.settings import LocalizeSettings
from selfvitmil.slides import Slide, SlideRef, fingerprint
from selfvitmil.store.failures import Failure
from selfvitmil.store.files import atomic_path, file_fingerprint, hash_of, write_text
from selfvitmil.store.provenance import MISSING, Change, ChangeKind, Freshness, compare_digests, stale

MEASUREMENTS = {"instance": "instance probability"}
"""Names of columns in QuPath, where they differ."""

_CHUNK = 2_000  # tiles whose numbers are plain Python at a time
TILE_PX = 256
LEAST_PX = 16
"""The edge of a slide's tile has at least this many pixels in the TIFF, where the slide has them."""


def write_geojson(path: Path, heatmap: Heatmap, lesions: Sequence[Lesion]) -> Path:
    """Write lesions and tiles as a FeatureCollection for QuPath; gzipped where the name ends in `.gz`."""
    if not path.name.lower().endswith((".geojson", ".geojson.gz")):
        raise AnnotationError(
            f"{path.name}: wrong ending",
            "QuPath reads GeoJSON",
            "Use .geojson or .geojson.gz",
            code="unknown-annotation-suffix",
        )
    parts = (part for lesion in lesions for part in lesion.parts)
    features = chain(feature_texts(parts), _tile_texts(heatmap))
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        if path.name.lower().endswith(".gz"):
            with gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0, compresslevel=6) as packed:
                write_features(packed, features)
        else:
            write_features(file, features)
    return path


def write_asap(path: Path, heatmap: Heatmap, lesions: Sequence[Lesion]) -> Path:
    """Write the contours of lesions as XML for ASAP; their names have model, score and size."""

    def named(lesion: Lesion) -> Annotation:
        size = f"{lesion.area_mm2:.3g} mm2, {lesion.size_words('none')}"
        name = f"{heatmap.model} {lesion.annotation.name}: score {lesion.score:.3f}, {size}"
        return replace(lesion.annotation, name=name)

    write_annotations(path, map(named, lesions))
    return path


def _tile_texts(heatmap: Heatmap) -> Iterator[str]:
    """Yield a feature for every tile, numbers to six significant digits: attention may be very small."""
    extent = round(heatmap.frame.extent_l0, 2)
    measured = {"score": heatmap.score, "detection": heatmap.detection}
    measured |= {MEASUREMENTS.get(name, name): heatmap.columns[name] for name in COLUMNS if name in heatmap.columns}
    if heatmap.annotated is not None:
        measured["annotated"] = heatmap.annotated
    ring = ",".join(["[%.12g,%.12g]"] * 5)
    numbers = ",".join(f'"{name}":%s' for name in measured)
    text = (
        '{"type":"Feature","geometry":{"type":"Polygon","coordinates":[[' + ring + "]]},"
        '"properties":{"objectType":"tile","measurements":{' + numbers + "}}}"
    )
    for start in range(0, len(heatmap), _CHUNK):
        rows = slice(start, start + _CHUNK)
        (x0, y0), columns = heatmap.coords_l0[rows].T, [values[rows] for values in measured.values()]
        x1, y1 = x0 + extent, y0 + extent
        corners = (axis.tolist() for axis in (x0, y0, x1, y0, x1, y1, x0, y1, x0, y0))
        for row in zip(*corners, *map(_number_texts, columns), strict=True):
            yield text % row


def _number_texts(values: np.ndarray) -> list[str]:
    """Return numbers as JSON; QuPath writes and reads NaN and infinity as strings."""
    words = [f"{value:.6g}" for value in values.tolist()]
    for row in np.flatnonzero(~np.isfinite(values)):
        words[row] = {"nan": '"NaN"', "inf": '"Infinity"', "-inf": '"-Infinity"'}[words[row]]
    return words


# ---------------------------------------------------------------------------------------------------- TIFF


def downsample_of(heatmap: Heatmap) -> int:
    """Return level-0 pixels per pixel of the heatmap's largest level."""
    return 2 ** max(0, math.floor(math.log2(heatmap.frame.extent_l0 / LEAST_PX)))


def write_pyramid(path: Path, heatmap: Heatmap, colors: Colors = "inferno") -> Path:
    """Write the heatmap's scores in these colours."""
    downsample = downsample_of(heatmap)
    with atomic_path(path) as temporary, tifffile.TiffWriter(temporary, bigtiff=True) as file:
        for k, size_px in enumerate(level_sizes(heatmap.frame.size_l0, downsample)):
            level_downsample = downsample * 2**k
            per_cm = 10_000 / (heatmap.frame.slide_mpp * level_downsample)
            file.write(
                _tiles(Raster.over(heatmap, size_px, level_downsample), colors),
                shape=(size_px[1], size_px[0], 3),
                dtype=np.uint8,
                tile=(TILE_PX, TILE_PX),
                photometric="rgb",
                compression="zlib",
                subfiletype=1 if k else 0,  # a smaller copy of the first page
                resolution=(per_cm, per_cm),
                resolutionunit="CENTIMETER",
                description=_description(heatmap, colors, downsample) if k == 0 else None,
                metadata=None,
                software="selfvitmil",
            )
    return path


def level_sizes(size_l0: tuple[int, int], downsample: int) -> list[tuple[int, int]]:
    """Return (width, height) of every level, down to one tile; partly covered last pixels count."""
    sizes: list[tuple[int, int]] = []
    while not sizes or max(sizes[-1]) > TILE_PX:
        width, height = (-(-edge // (downsample * 2 ** len(sizes))) for edge in size_l0)
        sizes.append((width, height))
    return sizes


def _tiles(raster: Raster, colors: Colors) -> Iterator[Pixels]:
    """Yield tiles row by row; those over the edge are filled up with black."""
    width, height = raster.size_px
    for top in range(0, height, TILE_PX):
        index = raster.rows(top, min(top + TILE_PX, height))
        band = np.zeros((TILE_PX, -(-width // TILE_PX) * TILE_PX, 3), np.uint8)
        band[: len(index), :width] = color_table(colors)[index]
        for left in range(0, width, TILE_PX):
            yield np.ascontiguousarray(band[:, left : left + TILE_PX])


def _description(heatmap: Heatmap, colors: Colors, downsample: int) -> bytes:
    """Return the text of the image description, in UTF-8."""
    words = (
        f"selfvitmil heat-map of {heatmap.slide} by {heatmap.model}: {heatmap.kind}, {heatmap.scale}, "
        f"evidence for {heatmap.prediction.shown}, colours {colors} from 0 to 1, "
        f"1 px = {downsample} level-0 px of the slide"
    )
    return words.encode()


# ---------------------------------------------------------------------------------------------------- all files

VERSION = 2
"""Of how files are built from heatmaps; a higher one makes them stale. Since 2 slides that are not called positive have
highest-ranked regions and no lesions."""
LESION_COLUMNS = (
    "slide", "lesion", "score", "mean_score", "area_mm2", "diameter_um", "tile_um", "size", "x_l0", "y_l0", "tiles",
)  # fmt: skip
POINT_COLUMNS = ("slide", "detection", "x_l0", "y_l0")


@dataclass(frozen=True)
class ExportJob:
    """All that a worker needs to know."""

    heatmap_file: Path
    slide: SlideRef | None
    """None where its file is not at hand; then no overlay is drawn, unless `on_grid`."""
    annotation: Path | None
    settings: LocalizeSettings
    on_grid: bool = False
    """Whether the cohort names no slide but its features, and overlays are drawn on the grid of tiles."""


@dataclass(frozen=True)
class ExportResult:
    """What was found in one heatmap and written from it."""

    cells: tuple[str, ...]
    """Of its row in the command's table."""
    lesions: tuple[tuple[Any, ...], ...]
    """Rows of lesions.csv without the slide; none where the slide is not called positive."""
    points: tuple[tuple[Any, ...], ...]
    num_made: int
    """Files that were written now."""
    shows: str = ""
    """What the heatmap shows, and why."""
    only_ranks: bool = False
    """Whether the slide is not called positive."""
    warnings: tuple[str, ...] = ()
    failure: Failure | None = None
    """Of files that could not be written, though the heatmap and all else could."""


@dataclass(frozen=True)
class FileGroup:
    """Files that are written together, what they depend on, and how they are written."""

    name: str
    digest: str
    write: Callable[[], Sequence[Path]]


@dataclass
class ExportRecord:
    """`<slide>.json`: which files were built from what."""

    map: str = ""
    products: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> ExportRecord:
        """Read the record; an empty one where the file is missing or damaged, so that everything is rebuilt."""
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
            return cls(str(stored["map"]), {str(name): dict(value) for name, value in stored["products"].items()})
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return cls()

    def files(self, group: str) -> list[str]:
        """Return the names of the files of a group."""
        return self.products.get(group, {}).get("files", [])

    def freshness(self, folder: Path, group: FileGroup) -> Freshness:
        """Return whether the files of a group are up to date."""
        if group.name not in self.products:
            return MISSING
        missing = [name for name in self.files(group.name) if not (folder / name).exists()]
        if missing:
            return stale(*(Change(ChangeKind.MISSING_FILE, name) for name in missing))
        return compare_digests(self.products[group.name].get("made_from"), group.digest)

    def write(self, path: Path) -> None:
        write_text(path, json.dumps({"map": self.map, "products": self.products}, indent=1, sort_keys=True))


def export_heatmap(job: ExportJob) -> ExportResult:
    """Find lesions and points of a heatmap and write the files that were asked for and are not up to date."""
    settings = job.settings
    heatmap = read_heatmap(job.heatmap_file)
    regions = find_lesions(heatmap, settings.lesion_threshold, settings.min_lesion_mm2)
    points = find_points(heatmap, settings.point_radius_um, settings.point_min)
    warnings = list(heatmap.warnings)
    if settings.pictures and job.slide is None:
        missing = "no overlay is drawn: the slide's file does not exist; heatmap, lesions and exports are written"
        warnings.append(f"pictures show {NO_SLIDE}" if job.on_grid else missing)
    num_made, failure = _write_stale(job, heatmap.slide, _wanted_files(job, heatmap, regions))
    lesions = () if heatmap.only_ranks else regions
    return ExportResult(
        cells=_cells(heatmap, lesions),
        lesions=tuple(_lesion_row(lesion, settings.staging) for lesion in lesions),
        points=tuple(tuple(row) for row in points.tolist()),
        num_made=num_made,
        shows=shown_words(heatmap),
        only_ranks=heatmap.only_ranks,
        warnings=tuple(warnings),
        failure=failure,
    )


def _wanted_files(job: ExportJob, heatmap: Heatmap, regions: Sequence[Lesion]) -> list[FileGroup]:
    settings, path = job.settings, job.heatmap_file.parent / heatmap.slide
    on_lesions = settings.lesion_threshold, settings.min_lesion_mm2
    groups: list[FileGroup] = []

    def add(name: str, write: Callable[[], Sequence[Path]], *depends_on: Any) -> None:
        groups.append(FileGroup(name, hash_of(VERSION, *depends_on), write))

    if settings.geojson != "none":
        file = path.with_name(f"{path.name}.geojson{'.gz' * (settings.geojson == 'gzip')}")
        add("geojson", lambda: [write_geojson(file, heatmap, regions)], on_lesions, settings.geojson)
    if settings.asap:
        add("asap", lambda: [write_asap(path.with_name(f"{path.name}.xml"), heatmap, regions)], on_lesions)
    if settings.tiff:
        add("tiff", lambda: [write_pyramid(path.with_name(f"{path.name}.tiff"), heatmap)])
    if settings.pictures and (job.slide is not None or job.on_grid):
        annotation = None if job.annotation is None else file_fingerprint(job.annotation)
        inputs = annotation, None if job.slide is None else fingerprint(job.slide.path)
        draw = partial(_draw_overlays, job, job.slide, heatmap, regions)
        add("pictures", draw, on_lesions, settings.colors, settings.picture_px, inputs)
    return groups


def _write_stale(job: ExportJob, slide: str, groups: Sequence[FileGroup]) -> tuple[int, Failure | None]:
    """Write what is not up to date; return how many files that were, and the failure among them."""
    folder, record_file = job.heatmap_file.parent, job.heatmap_file.with_suffix(".json")
    record, origin = ExportRecord.read(record_file), hash_of(heatmap_made_from(job.heatmap_file) or "")
    if record.map != origin:  # files of an earlier heatmap that are not rebuilt would show what is no longer so
        _remove(folder, [name for group in record.products for name in record.files(group)])
        record = ExportRecord(origin)
    num_made, failure = 0, None
    for group in groups:
        if record.freshness(folder, group).is_up_to_date:
            continue
        _remove(folder, record.files(group.name))
        record.products.pop(group.name, None)
        record.write(record_file)  # before: if we are killed, what is half new must not pass for what was there
        try:
            files = [path.name for path in group.write()]
        except (SelfVitMilError, OSError) as error:
            failure = Failure.of(slide, "localize", error)
            continue
        record.products[group.name] = {"made_from": group.digest, "files": files}
        num_made += len(files)
    record.write(record_file)
    return num_made, failure


def _remove(folder: Path, names: Sequence[str]) -> None:
    for name in names:
        (folder / Path(name).name).unlink(missing_ok=True)


def _open(slide: SlideRef | None, heatmap: Heatmap, file: Path) -> Slide:
    """Return the slide; where it is not at hand, the grid of its tiles."""
    if slide is not None:
        return slide.at_mpp(heatmap.frame.slide_mpp).open()
    from selfvitmil.localize.grid import GridSlide

    return GridSlide(heatmap, file)


def _draw_overlays(job: ExportJob, slide: SlideRef | None, heatmap: Heatmap, regions: Sequence[Lesion]) -> list[Path]:
    annotations = () if job.annotation is None else read_annotations(job.annotation, repair=True)
    if job.annotation is not None:
        check_annotations(annotations, heatmap.frame.size_l0, job.annotation.name)
    with _open(slide, heatmap, job.heatmap_file) as opened:
        lesions = () if heatmap.only_ranks else regions
        return write_overlays(job.heatmap_file.parent, heatmap, opened, job.settings, annotations, lesions)


def _lesion_row(lesion: Lesion, staging: str) -> tuple[Any, ...]:
    x, y = lesion.centroid_l0
    return (
        lesion.number, lesion.score, lesion.mean_score, lesion.area_mm2, lesion.diameter_um, lesion.tile_um,
        lesion.size_words(staging), x, y, len(lesion.rows),
    )  # fmt: skip


def _cells(heatmap: Heatmap, lesions: Sequence[Lesion]) -> tuple[str, ...]:
    prediction = heatmap.prediction
    largest = max(lesions, key=lambda lesion: lesion.area_mm2, default=None)
    measured = "" if largest is None else f"{largest.area_mm2:.3g} mm2, {largest.size_words('none')}"
    highest = ""
    if heatmap.score.any():
        x, y = heatmap.coords_l0[highest_scoring_tile(heatmap)].tolist()
        highest = f"at {x}, {y}"
    probability = prediction.value_words or f"{prediction.shown_probability:.3f} {prediction.shown}"
    number = "-" if heatmap.only_ranks else str(len(lesions))
    return probability, prediction.decision, heatmap.kind, number, measured, highest
