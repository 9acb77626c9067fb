"""Tile tables: one HDF5 file of tile coordinates per slide. `selfvitmil.tiling` makes them.

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from selfvitmil.cohort.table import check_slide_name
from selfvitmil.errors import ArtefactError, SlideError, TissueError
from selfvitmil.geometry import extent_l0, grid_origins, nominal_magnification
from selfvitmil.settings import QUALITY_KINDS, QualityKind, StudySettings, tiling_name
from selfvitmil.slides import SlideRef, fingerprint
from selfvitmil.stain import StainFit
from selfvitmil.store.files import file_fingerprint, hash_of, open_hdf5, write_bytes
from selfvitmil.store.provenance import (
    FRESH,
    MISSING,
    BuildOutcome,
    Change,
    ChangeKind,
    Freshness,
    Provenance,
    damaged,
    stale,
)

SCHEMA = "selfvitmil.tiles"
FORMAT_VERSION = 1
QUALITY_VERSION = 1
"""Of the rules of quality control; another version makes tables with quality stale."""
SECTIONS = {"slide", "tissue", "stain", "tile"}
"""Sections of the settings that affect a tile table."""

Coords = NDArray[np.int64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class TileQuality:
    """Quality of the tiles of one slide."""

    scores: NDArray[np.float32]
    """(N, 5) in the order of QUALITY_KINDS."""
    flagged: Mask
    """(N, 5), True where a tile shows this kind."""

    def has_any(self, kinds: Sequence[QualityKind]) -> Mask:
        """Return which tiles are flagged as any of these kinds, (N,)."""
        return np.any(self.flagged[:, [QUALITY_KINDS.index(kind) for kind in kinds]], axis=1)

    def counts(self) -> dict[str, int]:
        """Return the number of flagged tiles of each kind."""
        return dict(zip(QUALITY_KINDS, self.flagged.sum(axis=0).tolist(), strict=True))

    def part(self, rows: Mask) -> TileQuality:
        """Return the quality of some tiles."""
        return TileQuality(self.scores[rows], self.flagged[rows])


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
    stain: StainFit | None = None
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


# ---------------------------------------------------------------------------------------------------- freshness


def table_files(job: TileJob) -> list[Path]:
    """Return the table of every scale, the fine one first."""
    tile = job.settings.tile
    names = [tiling_name(tile), *(tiling_name(tile, mpp) for mpp in tile.parent_mpp)]
    return [job.folder / name / f"{job.slide.name}.h5" for name in names]


def companion_files(job: TileJob) -> list[Path]:
    """Return the picture and the tissue contours, which are next to the fine table."""
    return [table_files(job)[0].with_suffix(suffix) for suffix in (".jpg", ".geojson")]


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
    mask = None
    if own is not None:
        from selfvitmil.tissue import own_mask_path

        mask = own_mask_path(own, job.slide.name)
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


def provenance_of(job: TileJob) -> Provenance:
    return Provenance("tile", FORMAT_VERSION, _relevant(job.settings), _inputs(job))


def tiles_freshness(job: TileJob) -> Freshness:
    """Return whether the files of a slide are up to date; raises SelfVitMilError where the slide cannot be read."""
    return freshness_of(job, provenance_of(job))


def freshness_of(job: TileJob, now: Provenance) -> Freshness:
    for target in table_files(job):
        if not target.exists():
            return MISSING
        stored = _stored_provenance(target)
        if stored is None:
            return damaged(target)
        freshness = now.compare(stored)
        if not freshness.is_up_to_date:
            return freshness
    missing = [Change(ChangeKind.MISSING_FILE, path.name) for path in companion_files(job) if not path.exists()]
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
        stain=StainFit.from_attributes(json.loads(file["stain"].attrs["fit"])) if "stain" in file else None,
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
