"""Tile tables: a slide and its tissue mask in, one HDF5 file of tile coordinates per slide out.

Only coordinates are stored; tiles are read from the slide when needed. The grid is regular in microns, so a tile of 224
px at 0.5 um/px is 112 um wide on every scanner. Next to the table are a picture of the kept tiles (`<slide>.jpg`) and
the contour of the tissue (`<slide>.geojson`, for QuPath).

File layout (version 1): dataset `coords` (N, 2) int64, level-0 top left, in reading order, with TRIDENT's attributes;
`tissue` (N,) float32; with `tile.quality`, group `quality` with `scores` (N, 5) float32 and `flagged` (N, 5) bool,
whose columns its attribute `kinds` names, and the same with `coords` in `quality/excluded` for the tiles that
`tile.exclude` dropped; `annotated` (N,) float32, the fraction of each tile inside annotated tumour, if the cohort links
an annotation; `parents/<tiling>` (N,) int64, row of the coarse tile around each tile, -1 where none fits into the
slide; group `stain` with the slide's fit; file attributes `schema`, `format_version`, `made_from` (hash of settings
and inputs), `settings` and `inputs` (JSON), from which a rerun finds what changed.
"""

# scipy and h5py have no types.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import hashlib
import io
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from scipy import ndimage

from selfvitmil import stain
from selfvitmil.annotations import box_coverage, mask_to_annotations, read_annotations, write_annotations
from selfvitmil.cohort.table import check_slide_name
from selfvitmil.engine import is_transient
from selfvitmil.errors import AnnotationError, ArtefactError, MissingMppError, SlideError, TissueError
from selfvitmil.geometry import box_fractions, extent_l0, grid_origins, nominal_magnification
from selfvitmil.quality import TileQuality, draw_examples, measure_quality
from selfvitmil.settings import QUALITY_KINDS, StudySettings, TileSettings, tiling_name, upsampling_warning
from selfvitmil.slides import Slide, SlideRef, fingerprint
from selfvitmil.store.files import file_fingerprint, hash_of, open_hdf5, write_bytes
from selfvitmil.store.layout import quality_examples_of, thumbnail_of
from selfvitmil.store.provenance import (
    FRESH,
    MISSING,
    UP_TO_DATE,
    BuildOutcome,
    Change,
    ChangeKind,
    Freshness,
    Provenance,
    damaged,
    outcome_of,
    stale,
)
from selfvitmil.tissue import Tissue, find_tissue, grey_of, own_mask_path

SCHEMA = "selfvitmil.tiles"
FORMAT_VERSION = 1
QUALITY_VERSION = 1
"""Of the rules of quality control; another version makes tables with quality stale."""
SECTIONS = {"slide", "tissue", "stain", "tile"}
"""Sections of the settings that affect a tile table."""
MAX_TILES = 10_000_000
"""Maximum number of tile positions per slide: twenty times a whole glass slide at 0.25 um/px in tiles of 224 px."""
QC_EDGE_PX = 1200
"""Longer edge of the quality-control picture."""

Coords = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class TileTable:
    """The tiles of one slide at one resolution."""

    slide: str
    """Name of the slide in the study."""
    coords_l0: Coords
    """(N, 2) top left corners (x, y) in level-0 pixels."""
    tissue: NDArray[np.float32]
    """(N,) tissue fraction of each tile."""
    size_px: int
    """Edge of a tile in its own pixels."""
    mpp: float
    """Microns per tile pixel."""
    overlap_px: int
    """Overlap of neighbouring tiles in tile pixels."""
    slide_mpp: float
    """Microns per level-0 pixel."""
    size_l0: tuple[int, int]
    """(width, height) of the slide in level-0 pixels."""
    stain: stain.StainFit | None = None
    """The slide's stain fit; None when stains are normalized per tile or not at all."""
    annotated: NDArray[np.float32] | None = None
    """(N,) fraction of each tile inside annotated tumour; None without an annotation."""
    quality: TileQuality | None = None
    """Quality of the tiles; None where it was not measured."""
    excluded: tuple[Coords, TileQuality] | None = None
    """Corners (M, 2) and quality of the tiles that `tile.exclude` dropped; None where it was not measured."""
    parents: Mapping[str, Coords] = field(default_factory=dict)
    """Tiling name of a coarser table -> (N,) row of the parent tile, or -1."""
    parent_digests: Mapping[str, str] = field(default_factory=dict)
    """Tiling name -> digest of the coarse coordinates that the rows refer to."""
    attributes: Mapping[str, Any] = field(default_factory=dict)
    """Counts and warnings shown in `tiles.csv`."""
    fingerprint: str | None = None
    """Fingerprint of the slide that was tiled; None for a table that was not read from a file."""

    def __len__(self) -> int:
        return len(self.coords_l0)

    @property
    def extent_l0(self) -> float:
        """Edge of a tile in level-0 pixels."""
        return extent_l0(self.size_px, self.mpp, self.slide_mpp)

    @property
    def boxes_l0(self) -> NDArray[np.float64]:
        """Tiles as (N, 4) boxes (x0, y0, x1, y1) in level-0 pixels."""
        return boxes_l0(self.coords_l0, self.extent_l0)

    @property
    def digest(self) -> str:
        """SHA-256 of the coordinates, in hexadecimal."""
        return hashlib.sha256(np.ascontiguousarray(self.coords_l0).tobytes()).hexdigest()


# ---------------------------------------------------------------------------------------------------- the grid


def boxes_l0(coords_l0: Coords, extent: float) -> NDArray[np.float64]:
    """Convert corners (x, y) to boxes (x0, y0, x1, y1)."""
    corners = coords_l0.astype(np.float64)
    return np.concatenate([corners, corners + extent], axis=1)


def grid(size_l0: tuple[int, int], slide_mpp: float, size_px: int, tile_mpp: float, overlap_px: int = 0) -> Coords:
    """Return all tiles that fit completely into the slide, in reading order."""
    extent = extent_l0(size_px, tile_mpp, slide_mpp)
    stride = extent_l0(size_px - overlap_px, tile_mpp, slide_mpp)
    x, y = (grid_origins(edge, extent, stride) for edge in size_l0)
    return np.stack(np.meshgrid(x, y), axis=-1).reshape(-1, 2)


def mask_fractions(boxes: NDArray[np.float64], tissue: Tissue, slide_mpp: float) -> NDArray[np.float64]:
    """Return the fraction of each level-0 box that the tissue mask covers."""
    return box_fractions(tissue.mask, boxes * (slide_mpp / tissue.mpp))


def pixel_fractions(slide: Slide, coords_l0: Coords, tissue: Tissue, tile: TileSettings) -> NDArray[np.float64]:
    """Return the fraction of each tile's pixels darker than the slide's threshold (as the authors' code does).

    Tiles that cannot reach `min_tissue` are not read and get 0: if that fraction of a tile's pixels is below the
    threshold, its mean grey is at most min_tissue * threshold + (1 - min_tissue) * 255, and the thumbnail gives the
    mean.
    """
    if tissue.threshold is None:
        raise TissueError(
            f"{slide.path.name}: no grey threshold",
            "the slide has hardly any glass, and tissue.fraction_from = pixels needs a grey threshold",
            "Use tissue.fraction_from = mask for this study",
            code="no-threshold",
        )
    thumbnail = slide.thumbnail(8.0)
    boxes = boxes_l0(coords_l0, extent_l0(tile.size_px, tile.mpp, slide.mpp)) * (slide.mpp / 8.0)
    bound = tile.min_tissue * tissue.threshold + (1 - tile.min_tissue) * 255
    means = _box_means(grey_of(thumbnail).astype(np.float64), boxes)
    fractions = np.zeros(len(coords_l0))
    for row in np.flatnonzero(means <= bound + 6):  # 6 grey levels for the rounding and compression of coarse levels
        x, y = coords_l0[row]
        fractions[row] = np.mean(grey_of(slide.read_tile(int(x), int(y), tile.size_px, tile.mpp)) < tissue.threshold)
    return fractions


def _box_means(values: NDArray[np.float64], boxes: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the mean of an image over boxes, fractional edges rounded outwards."""
    table = np.zeros((values.shape[0] + 1, values.shape[1] + 1))
    table[1:, 1:] = values.cumsum(axis=0).cumsum(axis=1)
    x0, y0 = np.floor(boxes[:, :2]).astype(int).T
    x1, y1 = np.minimum(np.ceil(boxes[:, 2:]).astype(int), values.shape[::-1]).T
    return (table[y1, x1] - table[y0, x1] - table[y1, x0] + table[y0, x0]) / ((x1 - x0) * (y1 - y0))


def parent_rows(fine: TileTable, size_l0: tuple[int, int], parent_mpp: float) -> tuple[Coords, Coords]:
    """Return the coarse tiles that contain at least one fine tile, and the row of each fine tile among them (-1: none).

    Both grids start at the slide's corner; the parent is the coarse tile that contains the centre of the fine tile.
    """
    extent = extent_l0(fine.size_px, parent_mpp, fine.slide_mpp)
    x, y = (grid_origins(edge, extent, extent) for edge in size_l0)
    column, row = ((fine.coords_l0 + fine.extent_l0 / 2) // extent).astype(np.int64).T
    fits = (column < len(x)) & (row < len(y))
    cell = np.where(fits, row * max(len(x), 1) + column, -1)
    used, rows = np.unique(cell, return_inverse=True)
    if len(used) and used[0] == -1:
        used, rows = used[1:], rows - 1
    coords = (
        np.stack([x[used % max(len(x), 1)], y[used // max(len(x), 1)]], axis=1)
        if len(used)
        else np.empty((0, 2), np.int64)
    )
    return coords, rows.astype(np.int64)


# ---------------------------------------------------------------------------------------------------- one slide


@dataclass(frozen=True)
class TileJob:
    """Input of one worker call: the slide to tile."""

    slide: SlideRef
    folder: Path
    """The study's `tiles` folder."""
    settings: StudySettings
    annotation: Path | None = None


@dataclass(frozen=True)
class TiledSlide:
    """Result for one slide."""

    num_tiles: int
    outcome: BuildOutcome
    attributes: Mapping[str, Any]


def tile_slide(job: TileJob) -> TiledSlide:
    """Tile one slide and write its files, unless they are up to date. Raises SelfVitMilError on failure.

    If a slide can be read but not tiled with these settings (no tissue, a mask that does not fit, no microns per
    pixel), files of earlier settings are removed, so that later stages do not use them by mistake. If it cannot be read
    they are kept, because its drive may be temporarily unavailable.
    """
    provenance = _provenance(job)
    freshness = _freshness(job, provenance)
    target = job.folder / tiling_name(job.settings.tile) / f"{job.slide.name}.h5"
    if freshness.is_up_to_date:
        table = read_tiles(target)
        return TiledSlide(len(table), UP_TO_DATE, table.attributes)
    try:
        with job.slide.open() as slide:
            tissue = find_tissue(slide, job.settings.tissue, job.slide.name)
            tables = _cut(slide, tissue, job)
            picture = draw_qc_picture(tables[0], tissue, qc_thumbnail(slide, tissue))
            examples = _examples(slide, tables[0])
    except (TissueError, AnnotationError, MissingMppError) as error:
        if not is_transient(error):
            for path in (*_tables(job), *_companion_files(job), quality_examples_of(target)):
                path.unlink(missing_ok=True)
        raise
    for table in tables[1:]:  # coarse tables first: the fine table marks completion
        write_tiles(job.folder / tiling_name(job.settings.tile, table.mpp) / target.name, table, provenance)
    fine = tables[0]
    write_bytes(thumbnail_of(target), picture)
    contours = mask_to_annotations(tissue.mask, tissue.mpp, fine.slide_mpp, group="Tissue")
    write_annotations(target.with_suffix(".geojson"), contours)
    if examples is None:
        quality_examples_of(target).unlink(missing_ok=True)
    else:
        write_bytes(quality_examples_of(target), examples)
    write_tiles(target, fine, provenance)
    return TiledSlide(len(fine), outcome_of(freshness), fine.attributes)


def _cut(slide: Slide, tissue: Tissue, job: TileJob) -> list[TileTable]:
    """Return the fine table and its parents."""
    tile = job.settings.tile
    _check_number(slide, tile)
    candidates = grid(slide.size_l0, slide.mpp, tile.size_px, tile.mpp, tile.overlap_px)
    boxes = boxes_l0(candidates, extent_l0(tile.size_px, tile.mpp, slide.mpp))
    if job.settings.tissue.fraction_from == "pixels":
        fractions = pixel_fractions(slide, candidates, tissue, tile)
    else:
        fractions = mask_fractions(boxes, tissue, slide.mpp)
    kept = fractions >= tile.min_tissue
    if not kept.any():
        raise TissueError(
            f"{slide.path.name}: none of {len(candidates)} tiles has at least {tile.min_tissue:.0%} tissue",
            f"the slide has {tissue.area_mm2:.2f} mm2 of tissue",
            "Lower tile.min_tissue or tile.size_px, or take the slide out of the cohort",
            code="no-tiles",
        )
    quality, dropped = None, np.zeros(len(kept), bool)
    if tile.with_quality:
        quality = measure_quality(slide, tissue, boxes[kept])
        dropped[kept] = quality.has_any(tile.exclude)
        kept &= ~dropped
        if not kept.any():
            raise TissueError(
                f"{slide.path.name}: tile.exclude leaves none of {dropped.sum()} tiles",
                f"they are flagged as {', '.join(kind for kind, number in quality.counts().items() if number)}",
                "Look at the slide, exclude fewer kinds, or take the slide out of the cohort",
                code="all-tiles-excluded",
            )
    coverage, counts, notes = _annotated(job.annotation, boxes, kept)
    fine = TileTable(
        slide=job.slide.name,
        coords_l0=candidates[kept],
        tissue=fractions[kept].astype(np.float32),
        size_px=tile.size_px,
        mpp=tile.mpp,
        overlap_px=tile.overlap_px,
        slide_mpp=slide.mpp,
        size_l0=slide.size_l0,
        annotated=None if coverage is None else coverage[kept].astype(np.float32),
    )
    if quality is not None:
        is_dropped = dropped[kept | dropped]
        fine = replace(
            fine, quality=quality.part(~is_dropped), excluded=(candidates[dropped], quality.part(is_dropped))
        )
        counts |= {"flagged": quality.counts(), "excluded": int(dropped.sum())}
    if warning := upsampling_warning(slide.mpp, tile.mpp):
        notes.append(warning)
    fit = _fit_stain(slide, fine, job.settings)
    if fit is not None and fit.reason:
        notes.append(f"stains not fitted, pixels stay as scanned: {fit.reason}")
    attributes = {
        "tissue_mm2": round(tissue.area_mm2, 4),
        "pen_fraction": round(tissue.pen_fraction, 5),
        "stain_fitted": fit.fitted if fit is not None else None,
        "reader": slide.reader,
        "mpp_source": slide.mpp_source,
        **counts,
        "warnings": [*slide.warnings, *tissue.warnings, *notes],
    }
    return _with_parents(replace(fine, stain=fit, attributes=attributes), tissue, tile)


def _check_number(slide: Slide, tile: TileSettings) -> None:
    """Raise TissueError if the slide would have implausibly many tiles."""
    stride = extent_l0(tile.size_px - tile.overlap_px, tile.mpp, slide.mpp)
    number = math.prod(edge / stride for edge in slide.size_l0)
    if number > MAX_TILES:
        width, height = (edge * slide.mpp / 1000 for edge in slide.size_l0)
        raise TissueError(
            f"{slide.path.name}: {number:,.0f} tile positions",
            f"at {slide.mpp:g} microns per pixel the slide is {width:.0f} x {height:.0f} mm, and tiles are "
            f"{(tile.size_px - tile.overlap_px) * tile.mpp:g} um apart",
            "Check the slide's mpp, tile.mpp, tile.size_px and tile.overlap_px",
            code="too-many-tiles",
        )


def _with_parents(fine: TileTable, tissue: Tissue, tile: TileSettings) -> list[TileTable]:
    """Return the table with the rows of its parents, and the coarser tables."""
    coarse = {tiling_name(tile, mpp): _parent_table(fine, tissue, mpp) for mpp in tile.parent_mpp}
    rows = {name: parent_rows(fine, fine.size_l0, table.mpp)[1] for name, table in coarse.items()}
    digests = {name: table.digest for name, table in coarse.items()}
    orphans = sum(int((row < 0).sum()) for row in rows.values())
    if orphans:
        note = f"{orphans} tiles at the slide's edge have no parent that fits into the slide"
        fine = replace(fine, attributes={**fine.attributes, "warnings": [*fine.attributes["warnings"], note]})
    return [replace(fine, parents=rows, parent_digests=digests), *coarse.values()]


def _parent_table(fine: TileTable, tissue: Tissue, mpp: float) -> TileTable:
    coords, _ = parent_rows(fine, fine.size_l0, mpp)
    boxes = boxes_l0(coords, extent_l0(fine.size_px, mpp, fine.slide_mpp))
    fractions = mask_fractions(boxes, tissue, fine.slide_mpp).astype(np.float32)
    return replace(fine, coords_l0=coords, tissue=fractions, mpp=mpp, annotated=None, quality=None, excluded=None)


def _examples(slide: Slide, table: TileTable) -> bytes | None:
    """Return a picture of flagged tiles, excluded ones too; None where quality was not measured."""
    if table.quality is None or table.excluded is None:
        return None
    coords = np.concatenate([table.coords_l0, table.excluded[0]])
    both = (table.quality, table.excluded[1])
    scores, flagged = (np.concatenate([getattr(one, name) for one in both]) for name in ("scores", "flagged"))

    def read(row: int) -> NDArray[np.uint8]:
        x, y = coords[row].tolist()
        return slide.read_tile(x, y, table.size_px, table.mpp)

    return draw_examples(TileQuality(scores, flagged), read)


def _annotated(
    path: Path | None, boxes: NDArray[np.float64], kept: NDArray[np.bool_]
) -> tuple[NDArray[np.float64] | None, dict[str, Any], list[str]]:
    """Return the tumour fraction of every candidate tile, how many the tissue filter drops, and notes for the user."""
    if path is None:
        return None, {}, []
    regions = read_annotations(path, repair=True)
    coverage = box_coverage(regions, boxes)
    tumour, lost = coverage > 0, (coverage > 0) & ~kept
    notes = [
        f"{region.name or 'a polygon'} in {path.name} "
        + ("crosses itself and was repaired" if region.has_area else "encloses nothing, so no tile lies in it")
        for region in regions
        if region.repaired
    ]
    if unknown := sorted({region.group for region in regions if region.has_area and region.kind == "other"}):
        notes.append(f"classes in {path.name} that mean neither tumour nor exclusion: {', '.join(unknown)}")
    if lost.any():
        share = float(coverage[lost].sum() / coverage.sum())
        notes.append(
            f"{lost.sum()} of {tumour.sum()} tiles with annotated tumour are not kept ({share:.1%} of its area)"
        )
    return coverage, {"tumour_tiles": int(tumour.sum()), "tumour_tiles_lost": int(lost.sum())}, notes


def _fit_stain(slide: Slide, table: TileTable, settings: StudySettings) -> stain.StainFit | None:
    if settings.stain.method != "slide":
        return None
    generator = np.random.default_rng([settings.stain.seed, len(table)])
    chosen = np.sort(generator.permutation(len(table))[: settings.stain.sample_tiles])
    tiles = [slide.read_tile(int(x), int(y), table.size_px, table.mpp) for x, y in table.coords_l0[chosen]]
    return stain.fit_slide(np.stack(tiles))


# ---------------------------------------------------------------------------------------------------- freshness


def _tables(job: TileJob) -> list[Path]:
    """Return the table of every scale, the fine one first."""
    tile = job.settings.tile
    names = [tiling_name(tile), *(tiling_name(tile, mpp) for mpp in tile.parent_mpp)]
    return [job.folder / name / f"{job.slide.name}.h5" for name in names]


def _companion_files(job: TileJob) -> list[Path]:
    """Return the picture and the tissue contours, which are next to the fine table."""
    return [_tables(job)[0].with_suffix(suffix) for suffix in (".jpg", ".geojson")]


def without_mask_folder(settings: StudySettings) -> StudySettings:
    """Return the settings as artefacts store them: without the mask folder; masks count by their content."""
    return settings.model_copy(update={"tissue": settings.tissue.model_copy(update={"folder": None})})


def _relevant(settings: StudySettings) -> dict[str, Any]:
    """Return all settings that affect a table."""
    record = without_mask_folder(settings).model_dump(mode="json", include=SECTIONS)
    # Absent where they are off: tables of versions that did not have them stay up to date.
    wanted = {"quality": settings.tile.with_quality, "exclude": settings.tile.exclude}
    record["tile"] = {key: value for key, value in record["tile"].items() if wanted.get(key, True)}
    if settings.tile.with_quality:
        record["tile"]["quality"] = QUALITY_VERSION
    return record


def _inputs(job: TileJob) -> dict[str, str | float | None]:
    """Return the identity of the input files: a change makes the tables stale."""
    own = job.settings.tissue.folder
    if own is not None and not own.is_dir():
        raise TissueError(
            f"{own.name}: no such folder",
            "tissue.folder should contain the tissue masks",
            "Correct tissue.folder, and check that the drive is mounted",
            code="no-mask-folder",
        )
    mask = own_mask_path(own, job.slide.name) if own is not None else None
    return {
        "slide": _fingerprint(job.slide.path),
        "mpp": job.slide.mpp,
        "annotation": file_fingerprint(job.annotation) if job.annotation is not None else None,
        "mask": hash_of(file_fingerprint(mask)) if mask is not None else None,
    }


def _fingerprint(path: Path) -> str:
    if not path.exists():
        raise SlideError(
            f"{path.name}: no such file",
            "the cohort lists it, but the path does not exist",
            "Correct its path in cohort.csv",
            code="file-not-found",
        )
    return fingerprint(path)


def _provenance(job: TileJob) -> Provenance:
    return Provenance("tile", FORMAT_VERSION, _relevant(job.settings), _inputs(job))


def tiles_freshness(job: TileJob) -> Freshness:
    """Return whether the files of a slide are up to date; raises SelfVitMilError where the slide cannot be read."""
    return _freshness(job, _provenance(job))


def _freshness(job: TileJob, now: Provenance) -> Freshness:
    for target in _tables(job):
        if not target.exists():
            return MISSING
        stored = _stored_provenance(target)
        if stored is None:
            return damaged(target)
        freshness = now.compare(stored)
        if not freshness.is_up_to_date:
            return freshness
    missing = [Change(ChangeKind.MISSING_FILE, path.name) for path in _companion_files(job) if not path.exists()]
    return stale(*missing) if missing else FRESH


def _stored_provenance(path: Path) -> Provenance | None:
    """Return what a tile table was built from; None where the file is damaged."""
    try:
        with open_hdf5(path) as file:
            if "coords" not in file or "tissue" not in file:
                return None
            settings, inputs = (json.loads(str(file.attrs[key])) for key in ("settings", "inputs"))
            return Provenance("tile", int(str(file.attrs["format_version"])), settings, inputs)
    except (OSError, KeyError, ValueError):
        return None


# ---------------------------------------------------------------------------------------------------- files


def write_tiles(path: Path, table: TileTable, provenance: Provenance) -> None:
    """Write a table atomically; equal tables give equal bytes."""
    content = io.BytesIO()
    with h5py.File(content, "w") as file:
        file.attrs["schema"] = SCHEMA
        file.attrs["format_version"] = FORMAT_VERSION
        file.attrs["made_from"] = provenance.digest
        file.attrs["settings"] = json.dumps(provenance.settings, sort_keys=True)
        file.attrs["inputs"] = json.dumps(provenance.inputs, sort_keys=True)
        file.attrs["attributes"] = json.dumps(table.attributes, sort_keys=True)
        coords = file.create_dataset("coords", data=table.coords_l0.astype(np.int64))
        coords.attrs.update(trident_attributes(table))
        coords.attrs["mpp"] = table.mpp
        coords.attrs["level0_mpp"] = table.slide_mpp
        file.create_dataset("tissue", data=table.tissue.astype(np.float32))
        if table.annotated is not None:
            file.create_dataset("annotated", data=table.annotated.astype(np.float32))
        if table.quality is not None and table.excluded is not None:
            group = file.create_group("quality")
            group.attrs["kinds"] = list(QUALITY_KINDS)
            _write_quality(group, table.quality)
            group.create_dataset("excluded/coords", data=table.excluded[0].astype(np.int64))
            _write_quality(group["excluded"], table.excluded[1])
        for name, rows in table.parents.items():
            file.create_dataset(f"parents/{name}", data=rows.astype(np.int64)).attrs["coords_sha256"] = (
                table.parent_digests[name]
            )
        if table.stain is not None:
            file.create_group("stain").attrs["fit"] = json.dumps(table.stain.to_attributes(), sort_keys=True)
    write_bytes(path, content.getvalue())


def _write_quality(group: Any, quality: TileQuality) -> None:
    group.create_dataset("scores", data=quality.scores)
    group.create_dataset("flagged", data=quality.flagged)


def _read_quality(group: Any) -> TileQuality:
    return TileQuality(group["scores"][:], group["flagged"][:])


def read_tiles(path: Path) -> TileTable:
    """Read the tile table of a slide.

    Parameters
    ----------
    path
        `tiles/<tiling>/<slide>.h5` of a study.

    Returns
    -------
    TileTable
        The tiles of the slide at one resolution: corners in level-0 pixels, tissue and tumour fractions, stain fit.

    Raises
    ------
    ArtefactError
        The file does not exist, is damaged, or is not a tile table of this format version.
    """
    try:
        with open_hdf5(path) as file:
            return _table_from(file)
    except (OSError, KeyError, ValueError) as error:
        raise ArtefactError(
            f"{path.name}: not a readable tile table",
            str(error).strip("'\""),
            "Remove it and run `selfvitmil tile` again",
            code="unreadable-tiles",
        ) from None


def count_tiles(path: Path) -> int | None:
    """Return the number of tiles of a tile table without reading them; None where it is missing or damaged."""
    try:
        with open_hdf5(path) as file:
            return int(file["coords"].shape[0])  # pyright: ignore[reportAttributeAccessIssue]
    except (OSError, KeyError, ValueError):
        return None


def _table_from(file: Any) -> TileTable:
    if file.attrs["schema"] != SCHEMA or file.attrs["format_version"] != FORMAT_VERSION:
        raise ValueError(
            f"{file.attrs['schema']} in format {file.attrs['format_version']}, expected {SCHEMA} {FORMAT_VERSION}"
        )
    coords = file["coords"]
    check_slide_name(str(coords.attrs["name"]))
    parents, quality = file.get("parents", {}), file.get("quality")
    return TileTable(
        slide=str(coords.attrs["name"]),
        coords_l0=coords[:],
        tissue=file["tissue"][:],
        size_px=int(coords.attrs["patch_size"]),
        mpp=float(coords.attrs["mpp"]),
        overlap_px=int(coords.attrs["overlap"]),
        slide_mpp=float(coords.attrs["level0_mpp"]),
        size_l0=(int(coords.attrs["level0_width"]), int(coords.attrs["level0_height"])),
        stain=stain.StainFit.from_attributes(json.loads(file["stain"].attrs["fit"])) if "stain" in file else None,
        annotated=file["annotated"][:] if "annotated" in file else None,
        quality=_read_quality(quality) if quality is not None else None,
        excluded=(quality["excluded/coords"][:], _read_quality(quality["excluded"])) if quality is not None else None,
        parents={name: parents[name][:] for name in parents},
        parent_digests={name: str(parents[name].attrs["coords_sha256"]) for name in parents},
        attributes=json.loads(file.attrs["attributes"]),
        fingerprint=json.loads(file.attrs["inputs"]).get("slide"),
    )


def check_tiled(table: TileTable, slide: SlideRef) -> None:
    """Raise SlideError unless the slide's file is the one that was tiled, at the same microns per pixel.

    Tiles are read at `table.slide_mpp`; `slide.mpp` is the current value in the cohort, None if it has none.
    """
    check_mpp(table, slide.mpp)
    if table.fingerprint is not None and _fingerprint(slide.path) != table.fingerprint:
        raise SlideError(
            f"{slide.path.name}: not the file that was tiled",
            "its content has changed since its tile table was built",
            "Run `selfvitmil tile` again",
            code="slide-changed",
        )


def check_mpp(table: TileTable, mpp: float | None) -> None:
    """Raise SlideError if `mpp` differs from the microns per level-0 pixel that the table was built with."""
    if mpp is not None and mpp != table.slide_mpp:
        raise SlideError(
            f"{table.slide}: tiled with {table.slide_mpp:g} microns per pixel, but now {mpp:g} is given",
            "the tiles would cover other regions of the slide",
            "Run `selfvitmil tile` again",
            code="mpp-changed",
        )


def trident_attributes(table: TileTable) -> dict[str, Any]:
    """Return TRIDENT's attributes of `coords`, so that compatible tools open our files; its magnifications are
    nominal."""
    return {
        "patch_size": table.size_px,
        "patch_size_level0": round(table.extent_l0),
        "level0_magnification": nominal_magnification(table.slide_mpp),
        "target_magnification": nominal_magnification(table.mpp),
        "overlap": table.overlap_px,
        "name": table.slide,
        "savetodir": "",
        "level0_width": table.size_l0[0],
        "level0_height": table.size_l0[1],
    }


# ---------------------------------------------------------------------------------------------------- picture


def qc_thumbnail(slide: Slide, tissue: Tissue) -> NDArray[np.uint8]:
    """Return the slide at a size for viewing: finer than the tissue thumbnail if the slide is small."""
    mpp = max(max(slide.size_l0) * slide.mpp / QC_EDGE_PX, slide.mpp)
    if mpp < tissue.mpp:
        return slide.thumbnail(mpp)
    height, width = (max(1, round(edge * tissue.mpp / mpp)) for edge in tissue.mask.shape)
    return np.asarray(Image.fromarray(tissue.thumbnail).resize((width, height), Image.Resampling.BOX))


def draw_qc_picture(table: TileTable, tissue: Tissue, picture: NDArray[np.uint8]) -> bytes:
    """Return a JPEG of the slide with the contour of its tissue in green and kept tiles tinted blue."""
    height, width = picture.shape[:2]
    tint = Image.new("RGBA", (width, height))
    pen = ImageDraw.Draw(tint)
    for x0, y0, x1, y1 in table.boxes_l0 * (width / table.size_l0[0]):
        pen.rectangle((x0, y0, x1, y1), fill=(30, 90, 255, 40), outline=(30, 90, 255, 130))
    blended = Image.alpha_composite(Image.fromarray(picture).convert("RGBA"), tint)
    mask = np.asarray(Image.fromarray(tissue.mask).resize((width, height), Image.Resampling.NEAREST))
    pixels = np.array(blended.convert("RGB"))
    inner = np.asarray(ndimage.binary_erosion(mask, iterations=2), dtype=bool)
    pixels[mask & ~inner] = (0, 160, 60)
    content = io.BytesIO()
    Image.fromarray(pixels).save(content, "JPEG", quality=88)
    return content.getvalue()
