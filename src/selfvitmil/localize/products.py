"""What is made from one map by a worker: lesions and points, pictures, files for other tools.

Lesions and points are found anew every time, which is quick. Files are left alone as long as they are there and
`<slide>.json` beside them says that they were made from this map, with these settings, annotation and slide.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selfvitmil.errors import SelfVitMilError
from selfvitmil.settings import LocalizeSettings
from selfvitmil.store.failures import Failure
from selfvitmil.store.files import file_fingerprint, hash_of, write_text
from selfvitmil.store.provenance import MISSING, Change, ChangeKind, Freshness, compare_digests, stale

if TYPE_CHECKING:
    from selfvitmil.localize.lesions import Lesion
    from selfvitmil.localize.maps import SlideMap

VERSION = 2
"""Of how files are made from maps; a higher one makes them stale. Since 2 slides that are not called positive have
highest-ranked regions and no lesions."""
LESION_COLUMNS = (
    "slide", "lesion", "score", "mean_score", "area_mm2", "diameter_um", "tile_um", "size", "x_l0", "y_l0", "tiles",
)  # fmt: skip
POINT_COLUMNS = ("slide", "detection", "x_l0", "y_l0")


@dataclass(frozen=True)
class ProductJob:
    """All that a worker needs to know."""

    map_file: Path
    slide_file: Path | None
    """None where there is none at hand; then no picture is drawn."""
    annotation: Path | None
    reader: str
    settings: LocalizeSettings


@dataclass(frozen=True)
class Products:
    """What became of one slide."""

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
    """Of what could not be made, though the map and all else could."""


@dataclass(frozen=True)
class Product:
    """Some files that are made together, what they depend on, and how they are made."""

    name: str
    made_from: str
    make: Callable[[], Sequence[Path]]


@dataclass
class Record:
    """`<slide>.json`: which files were made from what."""

    map: str = ""
    products: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Record:
        try:
            told = json.loads(path.read_text(encoding="utf-8"))
            return cls(str(told["map"]), {str(name): dict(value) for name, value in told["products"].items()})
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return cls()  # then everything is rebuilt

    def files(self, product: str) -> list[str]:
        """Return the names of the files of a product."""
        return self.products.get(product, {}).get("files", [])

    def freshness(self, folder: Path, product: Product) -> Freshness:
        """Return whether the files of a product are up to date."""
        if product.name not in self.products:
            return MISSING
        missing = [name for name in self.files(product.name) if not (folder / name).exists()]
        if missing:
            return stale(*(Change(ChangeKind.MISSING_FILE, name) for name in missing))
        return compare_digests(self.products[product.name].get("made_from"), product.made_from)

    def write(self, path: Path) -> None:
        write_text(path, json.dumps({"map": self.map, "products": self.products}, indent=1, sort_keys=True))


def make_products(job: ProductJob) -> Products:
    """Find lesions and points of a map and write the files that were asked for and are not current."""
    from selfvitmil.localize.lesions import find_lesions, find_points
    from selfvitmil.localize.maps import read_map
    from selfvitmil.localize.overlay import shown_words

    settings = job.settings
    slide_map = read_map(job.map_file)
    lesions = find_lesions(slide_map, settings.lesion_threshold, settings.min_lesion_mm2)
    points = find_points(slide_map, settings.point_radius_um, settings.point_min)
    products, warnings = _wanted(job, slide_map, lesions)
    found = () if slide_map.only_ranks else lesions
    num_made, failure = _make(job, slide_map.slide, products)
    return Products(
        cells=_cells(slide_map, found),
        lesions=tuple(_lesion_row(lesion, settings.staging) for lesion in found),
        points=tuple(tuple(row) for row in points.tolist()),
        num_made=num_made,
        shows=shown_words(slide_map),
        only_ranks=slide_map.only_ranks,
        warnings=(*slide_map.warnings, *warnings),
        failure=failure,
    )


# ---------------------------------------------------------------------------------------------------- files


def _wanted(job: ProductJob, slide_map: SlideMap, lesions: Sequence[Lesion]) -> tuple[list[Product], list[str]]:
    """The products that were asked for, and why one of them cannot be."""
    settings, slide = job.settings, slide_map.slide
    folder = job.map_file.parent
    on_lesions = settings.lesion_threshold, settings.min_lesion_mm2
    products: list[Product] = []
    warnings: list[str] = []

    def add(name: str, make: Callable[[], Sequence[Path]], *parts: Any) -> None:
        products.append(Product(name, hash_of(VERSION, *parts), make))

    if settings.geojson != "none":
        file = folder / f"{slide}.geojson{'.gz' * (settings.geojson == 'gzip')}"
        add("geojson", partial(_geojson, file, slide_map, lesions), on_lesions, settings.geojson)
    if settings.asap:
        add("asap", partial(_asap, folder / f"{slide}.xml", slide_map, lesions), on_lesions)
    if settings.tiff:
        add("tiff", partial(_tiff, folder / f"{slide}.tiff", slide_map))
    if settings.pictures and job.slide_file is None:
        warnings.append("no picture is drawn, for the slide's file is not there; map, lesions and exports are made")
    elif settings.pictures and job.slide_file is not None:
        from selfvitmil.slides import fingerprint

        annotation = None if job.annotation is None else file_fingerprint(job.annotation)
        inputs = annotation, fingerprint(job.slide_file)
        draw = partial(_pictures, job, job.slide_file, slide_map, lesions)
        add("pictures", draw, on_lesions, settings.colors, settings.picture_px, inputs)
    return products, warnings


def _make(job: ProductJob, slide: str, products: Sequence[Product]) -> tuple[int, Failure | None]:
    """Make what is not current; how many files that were, and the failure among them."""
    from selfvitmil.localize.maps import map_made_from

    folder, record_file = job.map_file.parent, job.map_file.with_suffix(".json")
    record, origin = Record.read(record_file), map_made_from(job.map_file) or ""
    origin = hash_of(origin)
    if record.map != origin:  # what an earlier map gave and nobody makes anew would show what is no longer so
        _remove(folder, [name for product in record.products for name in record.files(product)])
        record = Record(origin)
    num_made, failure = 0, None
    for product in products:
        if record.freshness(folder, product).is_up_to_date:
            continue
        _remove(folder, record.files(product.name))
        record.products.pop(product.name, None)
        record.write(record_file)  # before: should we be killed, what is half new must not pass for what was there
        try:
            files = [path.name for path in product.make()]
        except (SelfVitMilError, OSError) as error:
            failure = Failure.of(slide, "localize", error)
            continue
        record.products[product.name] = {"made_from": product.made_from, "files": files}
        num_made += len(files)
    record.write(record_file)
    return num_made, failure


def _remove(folder: Path, names: Sequence[str]) -> None:
    for name in names:
        (folder / Path(name).name).unlink(missing_ok=True)


def _geojson(path: Path, slide_map: SlideMap, lesions: Sequence[Lesion]) -> list[Path]:
    from selfvitmil.localize.export import write_geojson_map

    write_geojson_map(path, slide_map, lesions)
    return [path]


def _asap(path: Path, slide_map: SlideMap, lesions: Sequence[Lesion]) -> list[Path]:
    from selfvitmil.localize.export import write_asap_lesions

    write_asap_lesions(path, slide_map, lesions)
    return [path]


def _tiff(path: Path, slide_map: SlideMap) -> list[Path]:
    from selfvitmil.localize.pyramid import write_pyramid

    write_pyramid(path, slide_map)
    return [path]


def _pictures(job: ProductJob, slide_file: Path, slide_map: SlideMap, lesions: Sequence[Lesion]) -> list[Path]:
    from selfvitmil.annotations import read_annotations
    from selfvitmil.localize.overlay import write_overlays
    from selfvitmil.localize.places import check_outlines
    from selfvitmil.slides import open_slide

    outlines = () if job.annotation is None else read_annotations(job.annotation, repair=True)
    if job.annotation is not None:
        check_outlines(outlines, slide_map.frame.size_l0, job.annotation.name)
    with open_slide(slide_file, reader=job.reader, mpp=slide_map.frame.slide_mpp) as slide:
        found = () if slide_map.only_ranks else lesions
        return write_overlays(job.map_file.parent, slide_map, slide, job.settings, outlines, found)


# ---------------------------------------------------------------------------------------------------- rows


def _lesion_row(lesion: Lesion, staging: str) -> tuple[Any, ...]:
    x, y = lesion.centroid_l0
    return (
        lesion.number, lesion.score, lesion.mean_score, lesion.area_mm2, lesion.diameter_um, lesion.tile_um,
        lesion.size_words(staging), x, y, len(lesion.rows),
    )  # fmt: skip


def _cells(slide_map: SlideMap, lesions: Sequence[Lesion]) -> tuple[str, ...]:
    from selfvitmil.localize.lesions import hottest_tile

    verdict = slide_map.verdict
    largest = max(lesions, key=lambda lesion: lesion.area_mm2, default=None)
    measured = "" if largest is None else f"{largest.area_mm2:.3g} mm2, {largest.size_words('none')}"
    hottest = ""
    if slide_map.score.any():
        x, y = slide_map.coords_l0[hottest_tile(slide_map)].tolist()
        hottest = f"at {x}, {y}"
    probability = f"{verdict.shown_probability:.3f} {verdict.shown}"
    number = "-" if slide_map.only_ranks else str(len(lesions))
    return probability, verdict.decision, slide_map.kind, number, measured, hottest
