"""Coarse grid for planning a synthetic slide: smooth random fields, interpolation, and spaced points."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage
from scipy.spatial import KDTree

Map = NDArray[np.floating[Any]]
"""Values on the cells of the plan or on pixels: float32."""
Points = NDArray[np.floating[Any]]
"""Values at points, mostly (x, y) rows: float64."""


@dataclass(frozen=True)
class Grid:
    """Cell centres of the coarse grid, and random fields on it."""

    shape: tuple[int, int]
    cell_um: float
    mpp: float
    width_um: float
    height_um: float

    @classmethod
    def over(cls, size_px: tuple[int, int], step_px: int, mpp: float) -> Grid:
        width, height = size_px
        # One cell more than needed to cover the slide, so that interpolation stays inside.
        shape = (math.ceil(height / step_px) + 1, math.ceil(width / step_px) + 1)
        return cls(shape, step_px * mpp, mpp, width * mpp, height * mpp)

    @property
    def short_um(self) -> float:
        return min(self.width_um, self.height_um)

    @property
    def area_mm2(self) -> float:
        return self.width_um * self.height_um / 1e6

    def xy(self) -> tuple[Points, Points]:
        """Return cell centres, x as a row and y as a column."""
        x = (np.arange(self.shape[1]) + 0.5) * self.cell_um
        y = (np.arange(self.shape[0]) + 0.5) * self.cell_um
        return x[None, :], y[:, None]

    def distance_to(self, point_um: tuple[float, float]) -> Points:
        x, y = self.xy()
        return np.hypot(x - point_um[0], y - point_um[1])

    def noise(self, rng: np.random.Generator, scale_um: float) -> Map:
        """Return smooth noise of about unit variance with features of about `scale_um`: B-splines on ever finer
        lattices."""
        out = np.zeros(self.shape)
        for share, weight in ((1.0, 1.0), (0.5, 0.45), (0.25, 0.2)):
            step = max(1.5, scale_um * share / self.cell_um)
            values = rng.standard_normal([int(extent / step) + 5 for extent in self.shape])
            for extent in self.shape:  # one axis, then the other
                values = _spline(values, np.arange(extent) / step + rng.random()).T
            out += weight * values
        return (out / 0.56).astype(np.float32)  # standard deviation of the spline basis


def _spline(knots: Points, at: Points) -> Points:
    """Evaluate a uniform cubic B-spline over the rows of `knots`, at positions counted in rows."""
    low = at.astype(np.int64)
    t = (at - low)[:, None]
    basis = ((1 - t) ** 3, 3 * t**3 - 6 * t**2 + 4, -3 * t**3 + 3 * t**2 + 3 * t + 1, t**3)
    return sum((weight / 6 * knots[low + k] for k, weight in enumerate(basis)), np.zeros(()))


def sample(grid: Grid, values: Map, xy_um: Points) -> Points:
    """Return values of a field at points, linearly interpolated between cell centres."""
    if not len(xy_um):
        return np.empty(0)
    return ndimage.map_coordinates(values, xy_um.T[::-1] / grid.cell_um - 0.5, order=1, mode="nearest")


def smooth_step(values: Map, low: float | Map, high: float | Map) -> Map:
    """Return 0 below `low`, 1 above `high`, smooth between; falling if `low` > `high`."""
    t = np.clip((values - low) / (high - low), 0, 1)
    return t * t * (3 - 2 * t)


def scatter(rng: np.random.Generator, grid: Grid, spacing_um: float, jitter: float) -> Points:
    """Return points over the slide on a jittered triangular lattice."""
    rows = np.arange(0, grid.height_um + spacing_um, spacing_um * math.sqrt(0.75))
    columns = np.arange(-spacing_um, grid.width_um + spacing_um, spacing_um)
    x = columns[None, :] + (np.arange(len(rows)) % 2 * spacing_um / 2)[:, None]
    xy = np.stack([x, np.broadcast_to(rows[:, None], x.shape)], axis=-1).reshape(-1, 2)
    return xy + rng.normal(0, jitter * spacing_um, xy.shape)


def loosen(xy: Points, apart_um: float, rounds: int) -> Points:
    """Push points that are closer than `apart_um` away from each other."""
    for _ in range(rounds):
        if len(xy) < 2:
            return xy
        pairs = KDTree(xy).query_pairs(apart_um, output_type="ndarray")
        gap = xy[pairs[:, 1]] - xy[pairs[:, 0]]
        length = np.hypot(gap[:, 0], gap[:, 1])[:, None] + 1e-9
        push = gap / length * (apart_um - length) * 0.45
        moved = xy.copy()
        for axis in range(2):
            moved[:, axis] += np.bincount(pairs[:, 1], push[:, axis], len(xy))
            moved[:, axis] -= np.bincount(pairs[:, 0], push[:, axis], len(xy))
        xy = moved
    return xy
