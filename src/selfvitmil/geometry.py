"""Conversions between level-0 pixels, tile pixels and microns. Pure functions of numbers and arrays.

Slide coordinates are *level-0 pixels*: `x_l0` runs right, `y_l0` runs down, the origin is the top left corner of the
largest level. A *tile* is `size_px` pixels wide at `tile_mpp` microns per pixel, so it covers
`size_px * tile_mpp / slide_mpp` level-0 pixels, usually not a whole number: extents are floats, only stored coordinates
are rounded. A *mask* is an array `[y, x]` whose pixel (i, j) covers the square from (j, i) to (j + 1, i + 1) times its
`mpp`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def extent_l0(size_px: float, tile_mpp: float, slide_mpp: float) -> float:
    """Return the edge in level-0 pixels of `size_px` pixels at `tile_mpp`."""
    return size_px * tile_mpp / slide_mpp


def size_at_mpp(size_l0: tuple[int, int], slide_mpp: float, mpp: float) -> tuple[int, int]:
    """Return (width, height) of the whole slide at `mpp`; a partly covered last pixel counts."""
    width, height = (max(1, int(np.ceil(edge * slide_mpp / mpp - 1e-6))) for edge in size_l0)
    return width, height


def grid_origins(extent: int, size: float, stride: float) -> NDArray[np.int64]:
    """Return the left edges, in whole level-0 pixels, of the tiles of a regular grid that fit completely into `extent`.

    The grid itself is not rounded, so rounding errors do not accumulate: origin k is round(k * stride).
    """
    last = int(np.floor((extent - size) / stride + 1e-9))
    if last < 0:
        return np.empty(0, dtype=np.int64)
    origins = np.round(np.arange(last + 1) * stride).astype(np.int64)
    # Rounding up may push the last tile over the edge by a fraction of a pixel.
    return np.minimum(origins, int(np.floor(extent - size + 1e-6)))


def box_fractions(mask: NDArray[np.bool_], boxes_xyxy: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the fraction of each box, given as (x0, y0, x1, y1) in mask pixels, that is True in `mask`.

    Exact for boxes with fractional edges: the integral of the mask up to any point is the bilinear interpolation of the
    summed-area table. The area outside the mask counts as False.
    """
    height, width = mask.shape
    table = np.zeros((height + 1, width + 1), dtype=np.float64)
    table[1:, 1:] = mask.cumsum(axis=0, dtype=np.float64).cumsum(axis=1)

    def integral(x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.float64]:
        x, y = np.clip(x, 0, width), np.clip(y, 0, height)
        i, j = np.minimum(y.astype(np.int64), height - 1), np.minimum(x.astype(np.int64), width - 1)
        v, u = y - i, x - j
        upper = (1 - u) * table[i, j] + u * table[i, j + 1]
        lower = (1 - u) * table[i + 1, j] + u * table[i + 1, j + 1]
        return (1 - v) * upper + v * lower

    x0, y0, x1, y1 = np.asarray(boxes_xyxy, dtype=np.float64).T
    inside = integral(x1, y1) - integral(x0, y1) - integral(x1, y0) + integral(x0, y0)
    return np.clip(inside / ((x1 - x0) * (y1 - y0)), 0.0, 1.0)


def nominal_magnification(mpp: float) -> int:
    """Return the objective magnification usually named for this resolution (40 for 0.25 um/px); for labels only."""
    for limit, magnification in ((0.16, 80), (0.2, 60), (0.3, 40), (0.6, 20), (1.2, 10), (2.4, 5)):
        if mpp < limit:
            return magnification
    return max(1, round(10 / mpp))
