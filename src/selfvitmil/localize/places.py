"""Where the tiles of a bag lie in their slide, whoever wrote the feature file.

Ours tell everything. TRIDENT's tell tiles in level-0 pixels but not how many microns a pixel has, STAMP's tell microns
but no pixels, CLAM's may tell corners alone. What a file leaves open is taken from the slide's tile table, from the
cohort, or from the slide itself; where nobody knows it, BagError says what to give.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from selfvitmil import annotations
from selfvitmil.annotations import Annotation
from selfvitmil.bags import Bag
from selfvitmil.errors import AnnotationError, BagError, MissingMppError, SlideError
from selfvitmil.localize.maps import Floats, Frame
from selfvitmil.slides import open_slide
from selfvitmil.tiles import TileTable, boxes_l0

SLIP = 0.01
"""Share of the slide's longer edge by which a pen may slip over it: points so near do not count as outside."""
MOST_OUTSIDE = 0.1
"""Share of an annotation's points that may lie outside before it is taken for another slide's."""


@dataclass(frozen=True)
class SlideFacts:
    """What a map needs to know of a slide beside its tiles; None where it is not known."""

    mpp: float | None = None
    size_l0: tuple[int, int] | None = None


@dataclass(frozen=True, eq=False)
class Places:
    """The tiles of a bag in their slide."""

    frame: Frame
    coords_l0: NDArray[np.int64]
    """(N, 2) top left corners, in the order of the bag."""
    warnings: tuple[str, ...] = ()


def place_tiles(bag: Bag, table: TileTable | None = None, look: Callable[[], SlideFacts] | None = None) -> Places:
    """The places of a bag's tiles. `table` is the slide's tile table; `look` asks cohort and slide, if it must be."""
    if bag.coords is None:
        raise BagError(
            f"{bag.slide}: its feature file has no coordinates",
            "a map needs to know where each vector comes from",
            "Give feature files with coordinates (.h5), or tile and embed the slide again",
        )
    facts = _facts(bag, table, look)
    if facts.mpp is None or facts.size_l0 is None:
        missing = "its microns per pixel" if facts.mpp is None else "its size in pixels"
        raise BagError(
            f"{bag.slide}: neither its feature file nor anything else tells {missing}",
            "so its tiles have no place in the slide",
            "Put the slide's file where cohort.csv names it; microns per pixel may also stand in its column mpp",
        )
    pixel = facts.mpp if bag.unit == "um" else 1.0
    coords_l0 = np.rint(np.asarray(bag.coords, np.float64) / pixel).astype(np.int64)
    extent, size_px, warnings = _tile_size(bag, coords_l0, pixel)
    overlap_px = float(bag.attributes.get("overlap", 0))
    frame = Frame(
        slide_mpp=facts.mpp,
        size_l0=facts.size_l0,
        extent_l0=extent,
        stride_l0=extent * (size_px - overlap_px) / size_px,
        tile_mpp=bag.mpp or facts.mpp * extent / size_px,
        size_px=size_px,
    )
    if (coords_l0 < 0).any() or (coords_l0 >= facts.size_l0).any():
        raise BagError(
            f"{bag.slide}: tiles of its feature file lie outside the slide",
            f"corners go to {tuple(coords_l0.max(axis=0).tolist())}, the slide has {facts.size_l0} pixels",
            "See whether the feature file is of another slide, or of another scan of it",
        )
    return Places(frame, coords_l0, warnings)


def _facts(bag: Bag, table: TileTable | None, look: Callable[[], SlideFacts] | None) -> SlideFacts:
    told = bag.attributes
    mpp = float(told["level0_mpp"]) if "level0_mpp" in told else None
    size = None
    if "level0_width" in told and "level0_height" in told:
        size = int(told["level0_width"]), int(told["level0_height"])
    if table is not None:
        mpp, size = mpp or table.slide_mpp, size or table.size_l0
    if look is not None and (mpp is None or size is None):
        seen = look()
        mpp, size = mpp or seen.mpp, size or seen.size_l0
    return SlideFacts(mpp, size)


def _tile_size(bag: Bag, coords_l0: NDArray[np.int64], pixel: float) -> tuple[float, int, tuple[str, ...]]:
    """Edge of a tile in level-0 pixels, as the encoder saw it, and what to warn of."""
    size_px = bag.attributes.get("patch_size", bag.attributes.get("tile_size_px"))
    if bag.tile_extent is not None:
        extent = bag.tile_extent / pixel
        return extent, int(size_px or round(extent)), ()
    steps = np.concatenate([np.diff(np.unique(axis)) for axis in coords_l0.T])
    if not len(steps):
        raise BagError(
            f"{bag.slide}: its feature file does not say how large its tiles are",
            "and its only tile has no neighbour to tell it by",
            "Give feature files of TRIDENT, STAMP or selfvitmil",
        )
    extent = float(steps.min())
    warning = f"its feature file does not say how large tiles are: taken as their least distance, {extent:g} px"
    return extent, int(size_px or round(extent)), (warning,)


def look_at_slide(path: Path, reader: str, mpp: float | None, otherwise_mpp: float | None = None) -> SlideFacts:
    """What the slide's file tells, `mpp` over what it says, `otherwise_mpp` where it says none.

    Of a slide that cannot be opened no more than what was given.
    """
    try:
        with open_slide(path, reader=reader, mpp=mpp, otherwise_mpp=otherwise_mpp) as slide:
            try:
                return SlideFacts(slide.mpp, slide.size_l0)
            except MissingMppError:
                return SlideFacts(None, slide.size_l0)
    except SlideError:
        return SlideFacts(mpp or otherwise_mpp, None)


# ---------------------------------------------------------------------------------------------------- annotations


def check_outlines(outlines: tuple[Annotation, ...], size_l0: tuple[int, int], name: str) -> tuple[str, ...]:
    """Warnings on outlines that leave the slide; AnnotationError where they are most likely another slide's.

    The one rule of maps, pictures and lesion scores: points outside by more than `SLIP` are told of, and a file with a
    larger share of them than `MOST_OUTSIDE` is refused. What lies outside counts nowhere. `name` is that of the file.
    """
    points = np.concatenate([ring for each in outlines for ring in each.rings] or [np.empty((0, 2))])
    if not len(points):
        return (f"{name} has no outline",)
    slack = SLIP * max(size_l0)
    share = float(((points < -slack) | (points > np.asarray(size_l0) + slack)).any(axis=1).mean())
    if share > MOST_OUTSIDE:
        raise AnnotationError(
            f"{name}: {share:.0%} of its points lie outside the slide of {size_l0[0]} x {size_l0[1]} pixels",
            "it is of another slide, or not in level-0 pixels",
            "Correct the column annotation of cohort.csv",
        )
    return (f"{share:.1%} of the points in {name} lie outside the slide",) if share else ()


def annotated_shares(
    places: Places, table: TileTable | None, outlines: tuple[Annotation, ...] | None
) -> tuple[Floats | None, tuple[str, ...]]:
    """(N,) share of each tile inside annotated tumour: from the tile table where it knows these tiles, else computed.

    None where the slide has no annotation. Warns where outlined tumour touches not one tile.
    """
    shares = _from_table(places.coords_l0, table)
    if shares is None and outlines is not None:
        boxes = boxes_l0(places.coords_l0, places.frame.extent_l0)
        shares = annotations.box_coverage(outlines, boxes).astype(np.float32)
    tumour = [each for each in outlines or () if each.kind == "tumour" and each.has_area]
    if shares is not None and tumour and not shares.any():
        return shares, ("no tile lies in its annotated tumour: is the annotation of another slide?",)
    return shares, ()


def _from_table(coords_l0: NDArray[np.int64], table: TileTable | None) -> Floats | None:
    """The table's shares in the order of the bag, which may have fewer tiles; None where it knows not all of them."""
    if table is None or table.annotated is None:
        return None
    rows = {(x, y): row for row, (x, y) in enumerate(table.coords_l0.tolist())}
    found = [rows.get((x, y), -1) for x, y in coords_l0.tolist()]
    return None if min(found) < 0 else table.annotated[found]
