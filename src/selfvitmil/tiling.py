"""Cutting a slide: find its tissue, keep the tiles that have enough of it, fit the stains, write the tile table.

`tile_slide` does all of it for one slide, in a worker; what it writes is described in `selfvitmil.tiles`.
"""

# scipy has no types.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import io
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from scipy import ndimage

from selfvitmil import stain
from selfvitmil.annotations import box_coverage, mask_to_annotations, read_annotations, write_annotations
from selfvitmil.engine import is_transient
from selfvitmil.errors import AnnotationError, MissingMppError, TissueError
from selfvitmil.geometry import box_fractions, extent_l0
from selfvitmil.quality import draw_examples, measure_quality
from selfvitmil.settings import StudySettings, TileSettings, tiling_name, upsampling_warning
from selfvitmil.slides import Slide
from selfvitmil.store.files import write_bytes
from selfvitmil.store.layout import quality_examples_of, thumbnail_of
from selfvitmil.store.provenance import (
    UP_TO_DATE,
    outcome_of,
)
from selfvitmil.tiles import (
    Coords,
    TiledSlide,
    TileJob,
    TileQuality,
    TileTable,
    boxes_l0,
    companion_files,
    freshness_of,
    grid,
    parent_rows,
    provenance_of,
    read_tiles,
    table_files,
    write_tiles,
)
from selfvitmil.tissue import Tissue, find_tissue, grey_of

MAX_TILES = 10_000_000
"""Maximum number of tile positions per slide: twenty times a whole glass slide at 0.25 um/px in tiles of 224 px."""
QC_EDGE_PX = 1200
"""Longer edge of the quality-control picture."""


def tile_slide(job: TileJob) -> TiledSlide:
    """Tile one slide and write its files, unless they are up to date. Raises SelfVitMilError on failure.

    If a slide can be read but not tiled with these settings (no tissue, a mask that does not fit, no microns per
    pixel), files of earlier settings are removed, so that later stages do not use them by mistake. If it cannot be read
    they are kept, because its drive may be temporarily unavailable.
    """
    provenance = provenance_of(job)
    freshness = freshness_of(job, provenance)
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
            for path in (*table_files(job), *companion_files(job), quality_examples_of(target)):
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
