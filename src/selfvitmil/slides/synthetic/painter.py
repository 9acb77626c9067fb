"""Render any window of a synthetic lymph node as concentrations of the two stains.

A window depends only on the plan and its position, so windows join without seams and a slide of any size is rendered in
little memory. Cells are images from a fixed collection, stamped into the window. Colours are added later.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from selfvitmil.slides.synthetic.anatomy import FAT, LUMEN, SPINDLE, VESSEL, Anatomy, Cavities, Cells
from selfvitmil.slides.synthetic.cells import (
    BLOCK_PX,
    E_UNIT,
    FIBRE_LENGTH,
    H_UNIT,
    NUM_ANGLES,
    Bytes,
    Stamp,
    soft,
    stamps,
    textures,
    to_bytes,
)
from selfvitmil.slides.synthetic.grid import Map

# ---------------------------------------------------------------------------------------------------- one window


@dataclass(frozen=True)
class Window:
    """A rectangle of level-0 pixels, at most BLOCK_PX wide and high."""

    x0: int
    y0: int
    width: int
    height: int


def windows(size_px: tuple[int, int]) -> Iterator[Window]:
    """Yield all windows of a slide."""
    for y in range(0, size_px[1], BLOCK_PX):
        for x in range(0, size_px[0], BLOCK_PX):
            yield Window(x, y, min(BLOCK_PX, size_px[0] - x), min(BLOCK_PX, size_px[1] - y))


Maps = tuple[Bytes, Bytes]
"""Haematoxylin and eosin of a window."""


def paint(anatomy: Anatomy, window: Window) -> Maps:
    """Render a window with its lesions."""
    return _paint(View(anatomy, window), with_normal=False)[-1]


def paint_both(anatomy: Anatomy, window: Window) -> tuple[Maps, Maps]:
    """Render a window without lesions (the normal tissue they replace), and with its lesions."""
    normal, real = _paint(View(anatomy, window), with_normal=True)
    return normal, real


def _paint(view: View, *, with_normal: bool) -> list[Maps]:
    anatomy = view.anatomy
    grain, mesh, wave = view.texture("grain"), view.texture("mesh"), view.texture("wave")
    light = 0.03 + 0.007 * view.upsample(anatomy.glass) + 0.005 * grain  # the grain hides the steps of the bytes
    if not view.any_above(anatomy.depth_um, -12):
        return [(to_bytes(light, H_UNIT), to_bytes(light, E_UNIT))] * (2 if with_normal else 1)
    haematoxylin, eosin = _ground(view, grain, mesh, wave)
    h_map, e_map = to_bytes(haematoxylin, H_UNIT), to_bytes(eosin, E_UNIT)
    _drop_cavities(view, h_map, e_map, anatomy.cavities)
    inside = view.upsample(anatomy.lesion_um) if view.any_above(anatomy.lesion_um, -8) else None
    painted: list[Maps] = []
    if with_normal:
        painted.append((h_map.copy(), e_map.copy()))
        _drop_cells(view, *painted[0], anatomy.cells)
    painted.append((h_map, e_map))
    _drop_cells(view, h_map, e_map, anatomy.cells, ~anatomy.replaced)
    if inside is not None:
        _lesion(view, h_map, e_map, inside, grain, mesh, wave)
    h_gain, e_gain = view.upsample(anatomy.h_gain), view.upsample(anatomy.e_gain)
    if not view.all_above(anatomy.depth_um, 12):
        cover = soft(view.upsample(anatomy.depth_um) + 0.4 * mesh + 0.9 * wave, 3.0)
        h_gain *= cover
        e_gain *= cover
    return [
        (_stained(h_map, h_gain, light * H_UNIT), _stained(e_map, e_gain, light * E_UNIT)) for h_map, e_map in painted
    ]


def _stained(values: Bytes, gain: Map, light: Map) -> Bytes:
    """Apply the optics: blur, local stain uptake, and glass that is not quite clear."""
    _blur(values)
    return to_bytes(values * gain + light, 1.0)


class View:
    """A window with the parts of the plan it needs."""

    def __init__(self, anatomy: Anatomy, window: Window):
        self.anatomy, self.window = anatomy, window

    def texture(self, name: str) -> Map:
        w = self.window
        return textures(self.anatomy.mpp).window(name, w.x0, w.y0, w.width, w.height)

    def _cells(self, values: Map) -> Map:
        """Return the cells of a field that the window needs."""
        w, step = self.window, self.anatomy.step_px
        rows = slice(max(0, w.y0 // step - 1), (w.y0 + w.height) // step + 2)
        columns = slice(max(0, w.x0 // step - 1), (w.x0 + w.width) // step + 2)
        return values[rows, columns]

    def any_above(self, values: Map, limit: float) -> bool:
        return bool((self._cells(values) > limit).any())

    def all_above(self, values: Map, limit: float) -> bool:
        return bool((self._cells(values) > limit).all())

    def upsample(self, values: Map, step_px: int | None = None) -> Map:
        """Return a coarse field at every pixel of the window, linearly interpolated between cell centres."""
        step, w = step_px or self.anatomy.step_px, self.window
        low_x, share_x = _between(w.x0, w.width, step, values.shape[1])
        low_y, share_y = _between(w.y0, w.height, step, values.shape[0])
        rows = values[low_y[0] : low_y[-1] + 2]
        columns = rows[:, low_x] * (1 - share_x) + rows[:, low_x + 1] * share_x
        slopes = columns[1:] - columns[:-1]
        out = np.empty((w.height, w.width), np.float32)
        # One row of cells at a time, so that the work fits into the cache.
        starts = np.searchsorted(low_y, np.arange(low_y[0], low_y[-1] + 1)).tolist()
        for cell, (start, stop) in enumerate(pairwise([*starts, w.height])):
            np.multiply(share_y[start:stop, None], slopes[cell], out=out[start:stop])
            out[start:stop] += columns[cell]
        return out

    def lesion_cover(self, inside_um: Map) -> Map:
        """Return how much a lesion covers each pixel: its border follows the cells, not the smooth outline."""
        return soft(inside_um + 1.5 * self.texture("mesh") + 1.0 * self.texture("wave"), 2.5)

    def box_px(self, x_um: float, y_um: float, reach_um: float) -> tuple[int, int, int, int] | None:
        """Return the part of the window within `reach_um` of a point, as (x0, y0, x1, y1) in the window."""
        w, mpp = self.window, self.anatomy.mpp
        x, y, reach = x_um / mpp - w.x0, y_um / mpp - w.y0, reach_um / mpp
        x0, x1 = max(0, int(x - reach)), min(w.width, int(x + reach) + 1)
        y0, y1 = max(0, int(y - reach)), min(w.height, int(y + reach) + 1)
        return (x0, y0, x1, y1) if x0 < x1 and y0 < y1 else None

    def polar(self, box: tuple[int, int, int, int], x_um: float, y_um: float) -> tuple[Map, Map]:
        """Return distance and direction from a point to every pixel of a box; directions range from 0 to 512."""
        w, mpp = self.window, self.anatomy.mpp
        dx = ((np.arange(box[0], box[2]) + w.x0) * mpp - x_um).astype(np.float32)[None, :]
        dy = ((np.arange(box[1], box[3]) + w.y0) * mpp - y_um).astype(np.float32)[:, None]
        return np.hypot(dx, dy), np.arctan2(dy, dx) * np.float32(256 / np.pi) + np.float32(256.5)


@lru_cache(maxsize=8)
def _between(start: int, count: int, step: int, cells: int) -> tuple[NDArray[np.int64], Map]:
    """Return, for `count` pixels from `start`, the cell whose centre precedes each, and the weight of the next."""
    at = np.clip((np.arange(start, start + count) + 0.5) / step - 0.5, 0, cells - 1.001)
    low = at.astype(np.int64)
    return low, (at - low).astype(np.float32)


def _ground(view: View, grain: Map, mesh: Map, wave: Map) -> tuple[Map, Map]:
    """Return the background between the cells: a pale net with gaps, loose sinuses, fibrous stroma."""
    anatomy = view.anatomy
    gap = mesh + 0.5 * wave - 0.6
    eosin = 0.42 + 0.06 * mesh + 0.05 * grain
    if view.any_above(anatomy.sinus, 0.02):
        gap += 0.9 * view.upsample(anatomy.sinus)
    if view.any_above(anatomy.centre, 0.02):
        centre = view.upsample(anatomy.centre)
        gap -= 0.35 * centre
        eosin += 0.05 * centre
    filled = 1 - 0.8 * soft(gap, 0.7)
    eosin *= filled
    haematoxylin = (0.17 + 0.05 * grain + 0.03 * mesh) * filled
    if view.any_above(anatomy.stroma, 0.02):
        stroma = view.upsample(anatomy.stroma)
        eosin += stroma * (_collagen(view, mesh, wave) - eosin)
        haematoxylin += stroma * (0.13 + 0.03 * grain - haematoxylin)
    return haematoxylin, eosin


def _collagen(view: View, mesh: Map, wave: Map) -> Map:
    """Return the eosin of wavy fibres along the level lines of the plan's `across_um`."""
    fibre = textures(view.anatomy.mpp).fibre
    at = (view.upsample(view.anatomy.across_um) + 3.0 * wave + 0.35 * mesh) * 16
    return np.maximum(0.68 + 0.22 * fibre[at.astype(np.int32) & (FIBRE_LENGTH - 1)] + 0.04 * mesh, 0.08)


def _blur(values: Bytes) -> None:
    """Blur in place like the optics: weights 1/4, 1/2, 1/4 along both axes."""
    for ahead, behind in ((values[1:], values[:-1]), (values[:, 1:], values[:, :-1])):
        np.copyto(behind, _average(ahead, behind))
        np.copyto(ahead, _average(ahead, behind))


def _average(a: Bytes, b: Bytes) -> Bytes:
    """Return the mean of bytes in byte arithmetic, rounded up."""
    return (a | b) - ((a ^ b) >> np.uint8(1))


def _drop_cells(
    view: View, h_map: Bytes, e_map: Bytes, cells: Cells, there: NDArray[np.bool_] | np.bool_ = np.True_
) -> None:
    """Stamp the images of the cells selected by `there` into the window."""
    w, reach = view.window, int(17 / view.anatomy.mpp) + 1
    x, y = cells.xy_px[:, 0] - w.x0, cells.xy_px[:, 1] - w.y0
    near = (x > -reach) & (x < w.width + reach) & (y > -reach) & (y < w.height + reach)
    chosen = np.flatnonzero(near & there)
    collections = stamps(view.anatomy.mpp)
    kinds, shapes = cells.kind[chosen].tolist(), cells.shape[chosen].tolist()
    turns = (np.round(cells.angle[chosen] * (NUM_ANGLES / np.pi)).astype(int) % NUM_ANGLES).tolist()
    for cx, cy, kind, shape, turn in zip(x[chosen].tolist(), y[chosen].tolist(), kinds, shapes, turns, strict=True):
        collection = collections[kind]
        if kind == SPINDLE:
            stamp, flips = collection[turn * 8 + (shape >> 3) % 8], 0
        else:
            stamp, flips = collection[(shape >> 3) % len(collection)], shape & 7
        _drop(h_map, e_map, stamp, cx, cy, flips)


def _drop(h_map: Bytes, e_map: Bytes, stamp: Stamp, cx: int, cy: int, flips: int) -> None:
    half = stamp.haematoxylin.shape[0] // 2
    height, width = h_map.shape
    top, bottom, left, right = cy - half, cy + half + 1, cx - half, cx + half + 1
    y0, y1, x0, x1 = max(top, 0), min(bottom, height), max(left, 0), min(right, width)
    if y0 >= y1 or x0 >= x1:
        return
    cut = (slice(y0 - top, y1 - top), slice(x0 - left, x1 - left))
    here = h_map[y0:y1, x0:x1]
    picture = _flipped(stamp.haematoxylin, flips)[cut]
    if stamp.mask is None:
        np.maximum(here, picture, out=here)
        if stamp.eosin is not None:
            there = e_map[y0:y1, x0:x1]
            np.maximum(there, _flipped(stamp.eosin, flips)[cut], out=there)
    else:
        mask = _flipped(stamp.mask, flips)[cut]
        np.copyto(here, picture, where=mask)
        if stamp.eosin is not None:
            np.copyto(e_map[y0:y1, x0:x1], _flipped(stamp.eosin, flips)[cut], where=mask)


def _flipped(picture: NDArray, flips: int) -> NDArray:
    """Return one of the eight orientations of a square image."""
    if flips & 1:
        picture = picture[::-1]
    if flips & 2:
        picture = picture[:, ::-1]
    return picture.T if flips & 4 else picture


TURNS = np.arange(513) * (np.pi / 256) - np.pi
"""The directions of `View.polar`."""


def _drop_cavities(view: View, h_map: Bytes, e_map: Bytes, cavities: Cavities) -> None:
    """Draw fat cells with membranes, vessels with walls, lumina with a little secretion."""
    rows = np.column_stack([cavities.xy_um, cavities.radius_um, cavities.kind, cavities.phase]).tolist()
    for x, y, radius, kind, phase in rows:
        box = view.box_px(x, y, radius * 1.35 + 6)
        if box is None:
            continue
        edge = 1 + 0.09 * np.cos(2 * TURNS + phase) + 0.05 * np.cos(3 * TURNS + 2.3 * phase)
        if kind != FAT:
            edge += 0.10 * np.cos(2 * TURNS + phase) + 0.05 * np.cos(5 * TURNS + 4.1 * phase)
        distance, turn = view.polar(box, x, y)
        outside = distance - (radius * edge).astype(np.float32)[turn.astype(np.int32)]
        part = (slice(box[1], box[3]), slice(box[0], box[2]))
        _hollow(h_map[part], e_map[part], outside + 0.35 * view.texture("mesh")[part], int(kind), radius)


def _hollow(h_here: Bytes, e_here: Bytes, outside: Map, kind: int, radius: float) -> None:
    """Clear a cavity, given the distance outside its edge, and draw its wall."""
    clear = soft(-outside, 0.9)
    wall_um = {FAT: 1.1, LUMEN: 0.8}.get(kind, 1.5 + 0.28 * radius)
    wall = soft(wall_um - outside, 1.2) * (1 - clear)
    rest = {FAT: 0.05, LUMEN: 0.12}.get(kind, 0.10)
    collagen = 0.55 + 0.12 * np.sin(outside * 3.2) if kind == VESSEL else 0.55
    eosin = e_here * (1 - clear - wall) + E_UNIT * (wall * collagen + clear * rest)
    h_here[...] = to_bytes(h_here * (1 - clear - 0.8 * wall), 1.0)
    e_here[...] = to_bytes(eosin, 1.0)


def _lesion(view: View, h_map: Bytes, e_map: Bytes, inside: Map, grain: Map, mesh: Map, wave: Map) -> None:
    """Draw the lesion over the background: tumour cells, lumina, and fibrous septa between nests."""
    anatomy = view.anatomy
    cover = view.lesion_cover(inside)
    septum = soft(view.upsample(anatomy.septum) - 0.72 + 0.10 * mesh, 0.25)
    eosin = 0.44 + 0.05 * mesh + 0.04 * grain
    eosin += septum * (0.85 * _collagen(view, mesh, wave) - eosin)
    gap = soft(mesh + 0.6 * wave - 1.55, 0.5)
    eosin *= 1 - 0.8 * gap
    haematoxylin = (0.26 + 0.04 * mesh + 0.04 * grain - 0.07 * septum) * (1 - 0.8 * gap)
    h_map[...] = to_bytes(h_map + cover * (haematoxylin * H_UNIT - h_map), 1.0)
    e_map[...] = to_bytes(e_map + cover * (eosin * E_UNIT - e_map), 1.0)
    _drop_cells(view, h_map, e_map, anatomy.tumour_cells)
    _drop_cavities(view, h_map, e_map, anatomy.lumina)
