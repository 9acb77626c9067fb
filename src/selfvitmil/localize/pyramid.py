"""The map of a slide as a pyramidal TIFF, for any viewer.

A map comes in, a BigTIFF in RGB goes out: tiles of 256 pixels, losslessly compressed, levels that halve as pages of
their own. That is what OpenSlide calls a generic TIFF, and what QuPath, ASAP, libvips and tifffile read; the usual
OME-TIFF keeps its levels where OpenSlide does not look. It covers the same area as the slide, and its resolution tags
say so: a pixel is `downsample` level-0 pixels, a power of two that leaves 16 to 32 pixels to the edge of a tile.

What has no tile is black: viewers that lay the file over the slide, channel by channel, take dark for little.
No level is ever held whole. Equal maps give equal bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import tifffile

from selfvitmil.localize.maps import SlideMap
from selfvitmil.localize.raster import Colors, Pixels, Raster, color_table
from selfvitmil.store.files import atomic_path

TILE_PX = 256
LEAST_PX = 16
"""The edge of a slide's tile has at least this many pixels, where the slide has them."""


def downsample_of(slide_map: SlideMap) -> int:
    """Level-0 pixels per pixel of the heatmap's largest level."""
    return 2 ** max(0, math.floor(math.log2(slide_map.frame.extent_l0 / LEAST_PX)))


def write_pyramid(path: Path, slide_map: SlideMap, colors: Colors = "inferno") -> None:
    """Write the map's scores in these colours."""
    downsample = downsample_of(slide_map)
    with atomic_path(path) as temporary, tifffile.TiffWriter(temporary, bigtiff=True) as file:
        for k, size_px in enumerate(level_sizes(slide_map.frame.size_l0, downsample)):
            level_downsample = downsample * 2**k
            per_cm = 10_000 / (slide_map.frame.slide_mpp * level_downsample)
            file.write(
                _tiles(Raster.over(slide_map, size_px, level_downsample), colors),
                shape=(size_px[1], size_px[0], 3),
                dtype=np.uint8,
                tile=(TILE_PX, TILE_PX),
                photometric="rgb",
                compression="zlib",
                subfiletype=1 if k else 0,  # a smaller copy of the first page
                resolution=(per_cm, per_cm),
                resolutionunit="CENTIMETER",
                description=_description(slide_map, colors, downsample) if k == 0 else None,
                metadata=None,
                software="selfvitmil",
            )


def level_sizes(size_l0: tuple[int, int], downsample: int) -> list[tuple[int, int]]:
    """(width, height) of every level, down to one tile; partly covered last pixels count."""
    sizes: list[tuple[int, int]] = []
    while not sizes or max(sizes[-1]) > TILE_PX:
        width, height = (-(-edge // (downsample * 2 ** len(sizes))) for edge in size_l0)
        sizes.append((width, height))
    return sizes


def _tiles(raster: Raster, colors: Colors) -> Iterator[Pixels]:
    """Row by row; those over the edge are filled up with black."""
    width, height = raster.size_px
    for top in range(0, height, TILE_PX):
        index = raster.rows(top, min(top + TILE_PX, height))
        band = np.zeros((TILE_PX, -(-width // TILE_PX) * TILE_PX, 3), np.uint8)
        band[: len(index), :width] = color_table(colors)[index]
        for left in range(0, width, TILE_PX):
            yield np.ascontiguousarray(band[:, left : left + TILE_PX])


def _description(slide_map: SlideMap, colors: Colors, downsample: int) -> bytes:
    """For people, in UTF-8."""
    words = (
        f"selfvitmil heat-map of {slide_map.slide} by {slide_map.model}: {slide_map.kind}, {slide_map.scale}, "
        f"evidence for {slide_map.verdict.shown}, colours {colors} from 0 to 1, "
        f"1 px = {downsample} level-0 px of the slide"
    )
    return words.encode()
