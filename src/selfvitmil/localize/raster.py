"""Scores of tiles to coloured pixels, for pictures of any size.

A map comes in, bands of pixels go out. A pixel belongs to a tile when its centre lies in it, so tiles are squares with
hard edges; where tiles overlap, the mean of their scores counts. Only a band is worked on at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Literal

import matplotlib
import numpy as np
from numpy.typing import NDArray

from selfvitmil.localize.maps import SlideMap

Colors = Literal["red", "inferno", "viridis"]
Pixels = NDArray[np.uint8]

NO_TILE = 256
"""Index of pixels where there is no tile; scores have 0 to 255."""
OPACITY: dict[Colors, tuple[float, float]] = {"red": (0.5, 0.62), "inferno": (0.2, 0.7), "viridis": (0.25, 0.7)}
"""Of tiles with score 0 and 1."""
BAND_PX = 256
"""Rows painted at a time, so that large pictures need little memory."""
LINES_FROM_PX = 24
"""Tiles that are this wide in a picture are parted by thin lines."""


@dataclass(frozen=True, eq=False)
class Raster:
    """The tiles of a map as rectangles of whole pixels of some picture."""

    boxes_px: NDArray[np.int64]
    """(N, 4) x0, y0, x1, y1, half open, cut to the picture; none is empty."""
    weight: NDArray[np.int64]
    """(N,) scores in 1 / 2**24, so that sums are exact."""
    size_px: tuple[int, int]

    @classmethod
    def over(
        cls, slide_map: SlideMap, size_px: tuple[int, int], downsample: float, origin_l0: tuple[float, float] = (0, 0)
    ) -> Raster:
        """For a picture of `size_px` from `origin_l0` on, whose pixels are `downsample` level-0 pixels wide."""
        boxes = _meeting(slide_map.boxes_l0)
        boxes = np.ceil((boxes - np.tile(origin_l0, 2)) / downsample - 0.5).astype(np.int64)
        boxes[:, 2:] = np.maximum(boxes[:, 2:], boxes[:, :2] + 1)  # tiles finer than pixels share them
        boxes = np.clip(boxes, 0, np.tile(size_px, 2))
        inside = (boxes[:, 2:] > boxes[:, :2]).all(axis=1)
        weight = np.rint(slide_map.score[inside].astype(np.float64) * 2**24).astype(np.int64)
        return cls(boxes[inside], weight, size_px)

    def rows(self, top: int, bottom: int) -> NDArray[np.int64]:
        """[y, x] of these rows: 0 to 255 for the mean score of the tiles at a pixel, or `NO_TILE`."""
        here = (self.boxes_px[:, 1] < bottom) & (self.boxes_px[:, 3] > top)
        x0, y0, x1, y1 = self.boxes_px[here].T
        y0, y1 = np.maximum(y0, top) - top, np.minimum(y1, bottom) - top
        shape = (bottom - top + 1, self.size_px[0] + 1)
        total, count = np.zeros(shape, np.int64), np.zeros(shape, np.int32)
        for y, x, sign in ((y0, x0, 1), (y0, x1, -1), (y1, x0, -1), (y1, x1, 1)):
            np.add.at(total, (y, x), sign * self.weight[here])
            np.add.at(count, (y, x), sign)
        for part in (total, count):
            np.cumsum(part, axis=0, out=part)
            np.cumsum(part, axis=1, out=part)
        total, count = total[:-1, :-1], count[:-1, :-1]
        mean = total / np.maximum(count, 1) / 2.0**24
        return np.where(count > 0, np.rint(255 * mean), NO_TILE).astype(np.int64)

    def bands(self) -> Iterator[tuple[int, int]]:
        """(top, bottom) of the bands of the picture."""
        height = self.size_px[1]
        return ((top, min(top + BAND_PX, height)) for top in range(0, height, BAND_PX))


def _meeting(boxes: NDArray[np.float64]) -> NDArray[np.float64]:
    """Boxes whose right and lower edges meet the next tile where only the rounding of stored corners parts them."""
    boxes = boxes.copy()
    for start, end in ((0, 2), (1, 3)):
        starts = np.unique(boxes[:, start])
        if len(starts):
            place = np.clip(np.searchsorted(starts, boxes[:, end] - 1), 0, len(starts) - 1)
            near = np.abs(starts[place] - boxes[:, end]) <= 1
            boxes[near, end] = starts[place[near]]
    return boxes


@cache
def color_table(colors: Colors) -> Pixels:
    """(257, 3) colours of the scores 0 to 1 in 256 steps; black, the last one, is for no tile."""
    if colors == "red":
        table = np.zeros((256, 3), np.uint8)
        table[:, 0] = np.arange(256)
    else:
        table = matplotlib.colormaps[colors](np.arange(256), bytes=True)[:, :3]
    table = np.concatenate([table, np.zeros((1, 3), np.uint8)])
    table.setflags(write=False)
    return table


@cache
def opacity_table(colors: Colors) -> NDArray[np.float32]:
    """(257,) how much of a tile's colour covers the tissue; 0 where there is no tile."""
    table = np.append(np.linspace(*OPACITY[colors], 256), 0).astype(np.float32)
    table.setflags(write=False)
    return table


def tint(pixels: Pixels, index: NDArray[np.int64], colors: Colors) -> Pixels:
    """Pixels under the colours of these scores; what is under no tile stays as it is."""
    under = pixels.astype(np.float32)
    color, opacity = color_table(colors)[index].astype(np.float32), opacity_table(colors)[index][..., None]
    return np.rint(under + (color - under) * opacity).astype(np.uint8)


def paint_tiles(
    slide_map: SlideMap,
    thumbnail: Pixels,
    thumbnail_mpp: float,
    colors: Colors = "red",
    origin_l0: tuple[float, float] = (0, 0),
) -> Pixels:
    """A picture of the slide, or of a part of it from `origin_l0` on, with its tiles tinted and nothing else."""
    height, width = thumbnail.shape[:2]
    raster = Raster.over(slide_map, (width, height), thumbnail_mpp / slide_map.frame.slide_mpp, origin_l0)
    painted = np.empty_like(thumbnail)
    for top, bottom in raster.bands():
        painted[top:bottom] = tint(thumbnail[top:bottom], raster.rows(top, bottom), colors)
    extent_px = slide_map.frame.extent_l0 * slide_map.frame.slide_mpp / thumbnail_mpp
    if extent_px >= LINES_FROM_PX and slide_map.frame.stride_l0 > slide_map.frame.extent_l0 - 1:
        _part_tiles(painted, raster)
    return painted


def _part_tiles(painted: Pixels, raster: Raster) -> None:
    """Darken the upper and left edge of every tile."""
    darker = (np.arange(256) * 0.75).astype(np.uint8)
    for x0, y0, x1, y1 in raster.boxes_px:
        for edge in (painted[y0, x0:x1], painted[y0 + 1 : y1, x0]):
            edge[...] = darker[edge]
