"""Render any window of a synthetic lymph node as concentrations of the two stains.

A window depends only on the plan and its position, so windows join without seams and a slide of any size is rendered in
little memory. Cells are images from a fixed collection, stamped into the window. Colours are added later.
"""

# scipy has no types.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import scipy.fft
from numpy.typing import NDArray
from scipy import ndimage

from selfvitmil.slides.synthetic.anatomy import (
    BLAST,
    FAT,
    HISTIOCYTE,
    LUMEN,
    LYMPHOCYTE,
    RED_CELL,
    SPINDLE,
    TUMOUR_BODY,
    TUMOUR_NUCLEUS,
    VESSEL,
    Anatomy,
    Cavities,
    Cells,
    Field,
)

Bytes = NDArray[np.uint8]

BLOCK_PX = 512
"""Largest edge of a window."""
H_UNIT, E_UNIT = 64.0, 100.0
"""Byte values of one unit of concentration."""


def soft(inside_um: Field, width_um: float) -> Field:
    """Return a smooth step from 0 to 1 across an edge, as wide as the optical blur."""
    t = np.clip(inside_um / width_um + 0.5, 0, 1)
    return t * t * (3 - 2 * t)


def to_bytes(values: Field, unit: float) -> Bytes:
    """Convert concentrations to bytes of 1 / `unit`, rounded and clipped."""
    return np.clip(values * unit + 0.5, 0, 255).astype(np.uint8)


# ---------------------------------------------------------------------------------------------------- textures


@dataclass(frozen=True, eq=False)
class Textures:
    """Periodic noise of unit variance; arrays are long enough that each window of a block is a slice."""

    grain: Field
    mesh: Field
    wave: Field
    fibre: Field
    """One-dimensional: 16 values per micron."""
    sensor: Bytes

    def window(self, name: str, x0: int, y0: int, width: int, height: int) -> Field:
        """Return a texture in a window of level-0 pixels, (height, width)."""
        texture: Field = getattr(self, name)
        period = len(texture) - BLOCK_PX
        x0, y0 = x0 % period, y0 % period
        return texture[y0 : y0 + height, x0 : x0 + width]


FIBRE_LENGTH = 1 << 14
SENSOR_PX = 384


@lru_cache(maxsize=4)
def textures(mpp: float) -> Textures:
    """Return the textures at this resolution, the same for all slides."""
    rng = np.random.default_rng(11)
    grain, mesh, wave = (
        _periodic_noise(rng, period, scale_um / mpp) for period, scale_um in ((480, 0.55), (640, 1.3), (800, 7.0))
    )
    fibre = ndimage.gaussian_filter1d(rng.standard_normal(FIBRE_LENGTH), 8, mode="wrap") * 4
    fibre += ndimage.gaussian_filter1d(rng.standard_normal(FIBRE_LENGTH), 30, mode="wrap") * 6
    sensor = np.round(rng.normal(0, 1.2, (SENSOR_PX, SENSOR_PX, 4))).astype(np.int8).view(np.uint8)
    sensor = np.tile(sensor, (BLOCK_PX // SENSOR_PX + 2, BLOCK_PX // SENSOR_PX + 2, 1))
    return Textures(grain, mesh, wave, (fibre / fibre.std()).astype(np.float32), sensor)


def _periodic_noise(rng: np.random.Generator, period: int, scale_px: float) -> Field:
    frequency = np.hypot(scipy.fft.fftfreq(period)[:, None], scipy.fft.rfftfreq(period)[None, :])
    z = (2 * np.pi * scale_px * frequency).astype(np.float32)
    white = np.asarray(scipy.fft.rfft2(rng.standard_normal((period, period), dtype=np.float32)))
    noise = np.asarray(scipy.fft.irfft2(white * z * np.exp(-0.5 * z * z), s=(period, period)))
    noise = (noise / noise.std()).astype(np.float32)
    repeats = BLOCK_PX // period + 2
    return np.tile(noise, (repeats, repeats))[: period + BLOCK_PX, : period + BLOCK_PX].copy()


# ---------------------------------------------------------------------------------------------------- images of cells


@dataclass(frozen=True, eq=False)
class Stamp:
    """Image of a cell: bytes for both stains. With a `mask` it covers what is below, otherwise the darker value is
    kept."""

    haematoxylin: Bytes
    eosin: Bytes | None = None
    mask: NDArray[np.bool_] | None = None


NUM_ANGLES = 24


@lru_cache(maxsize=4)
def stamps(mpp: float) -> dict[int, list[Stamp]]:
    """Return images of every kind of cell; those of spindle cells are in NUM_ANGLES groups by direction."""
    rng = np.random.default_rng(12)  # used in this order
    return {
        LYMPHOCYTE: [_lymphocyte(rng, mpp) for _ in range(160)],
        BLAST: [_vesicular(rng, mpp, rng.uniform(4.2, 5.4), rng.uniform(0.55, 0.9)) for _ in range(64)],
        HISTIOCYTE: [_vesicular(rng, mpp, rng.uniform(4.6, 6.0), rng.uniform(0.35, 0.55)) for _ in range(32)],
        SPINDLE: [_spindle(rng, mpp, np.pi * turn / NUM_ANGLES) for turn in range(NUM_ANGLES) for _ in range(8)],
        RED_CELL: [_red_cell(rng, mpp) for _ in range(24)],
        TUMOUR_BODY: [_tumour_body(rng, mpp) for _ in range(64)],
        TUMOUR_NUCLEUS: [_tumour_nucleus(rng, mpp) for _ in range(128)],
    }


@dataclass(frozen=True, eq=False)
class _Disc:
    """Polar coordinates around the centre of an image, in microns."""

    x: Field
    y: Field
    mpp: float

    @classmethod
    def of(cls, radius_um: float, mpp: float) -> _Disc:
        """Return the coordinates of a square image that contains a disc of this radius."""
        reach = int(np.ceil(radius_um / mpp))
        steps = np.arange(-reach, reach + 1, dtype=np.float32) * np.float32(mpp)
        return cls(steps[None, :], steps[:, None], mpp)

    def inside(self, rng: np.random.Generator, radius: float, stretch: float, wobble: float, angle: float) -> Field:
        """Return the approximate distance inside an irregular ellipse, in microns."""
        cosine, sine = np.float32(np.cos(angle)), np.float32(np.sin(angle))
        along, aside = self.x * cosine + self.y * sine, self.y * cosine - self.x * sine
        along, aside = along / np.float32(np.sqrt(stretch)), aside * np.float32(np.sqrt(stretch))
        turns = np.arange(-256, 257) * (np.pi / 256)
        edge = np.ones_like(turns)
        for order in range(2, 7):
            edge += rng.normal(0, wobble / order) * np.cos(order * turns + rng.uniform(0, 2 * np.pi))
        at = np.arctan2(aside, along) * np.float32(256 / np.pi) + np.float32(256.5)
        return (radius * edge).astype(np.float32)[at.astype(np.int32)] - np.hypot(along, aside)

    def noise(self, rng: np.random.Generator, name: str) -> Field:
        """Return a random part of a texture, of the size of the image."""
        height, width = len(self.y), self.x.shape[1]
        return textures(self.mpp).window(name, int(rng.integers(600)), int(rng.integers(600)), width, height)


def _lymphocyte(rng: np.random.Generator, mpp: float) -> Stamp:
    """Draw a small, round, dark nucleus with clumps of chromatin."""
    disc = _Disc.of(5.2, mpp)
    inside = disc.inside(rng, rng.uniform(2.9, 3.75), rng.uniform(1.0, 1.3), 0.11, rng.uniform(0, np.pi))
    dark, focus = rng.triangular(0.75, 1.25, 1.75), rng.choice([0.9, 1.2, 1.8], p=[0.45, 0.4, 0.15])
    chromatin = 1 + 0.24 * disc.noise(rng, "grain") + 0.17 * disc.noise(rng, "mesh")
    rim = rng.uniform(-0.05, 0.2) * np.exp(-(((inside - 0.6) / 0.6) ** 2))
    return Stamp(to_bytes(dark * soft(inside, focus) * (chromatin + rim), H_UNIT))


def _vesicular(rng: np.random.Generator, mpp: float, radius: float, dark: float) -> Stamp:
    """Draw a larger, paler nucleus with a rim and small nucleoli, in a little cytoplasm."""
    disc = _Disc.of(radius + 3.5, mpp)
    inside = disc.inside(rng, radius * 0.93, rng.uniform(1.0, 1.55), 0.12, rng.uniform(0, np.pi))
    nucleus = soft(inside, 1.0) * (1 + 0.3 * disc.noise(rng, "grain") + 0.22 * disc.noise(rng, "mesh"))
    haematoxylin = dark * (nucleus + 0.45 * np.exp(-(((inside - 0.45) / 0.5) ** 2)))
    for _ in range(rng.integers(0, 3)):
        x, y = rng.uniform(-0.5, 0.5, 2) * radius
        haematoxylin += 0.7 * np.exp(-((disc.x - x) ** 2 + (disc.y - y) ** 2) / rng.uniform(0.2, 0.5))
    return Stamp(to_bytes(haematoxylin, H_UNIT), to_bytes(0.22 * soft(inside + 1.8, 1.6), E_UNIT))


def _spindle(rng: np.random.Generator, mpp: float, angle: float) -> Stamp:
    """Draw the long thin nucleus of a fibroblast or an endothelial cell."""
    disc = _Disc.of(9.0, mpp)
    inside = disc.inside(rng, rng.uniform(2.3, 3.0), rng.uniform(3.0, 6.5), 0.14, angle + rng.normal(0, 0.12))
    dark = rng.uniform(0.8, 1.5)
    return Stamp(to_bytes(dark * soft(inside * 0.7, 0.7) * (1 + 0.2 * disc.noise(rng, "grain")), H_UNIT))


def _red_cell(rng: np.random.Generator, mpp: float) -> Stamp:
    disc = _Disc.of(4.2, mpp)
    inside = disc.inside(rng, rng.uniform(2.5, 3.2), rng.uniform(1.0, 1.4), 0.1, rng.uniform(0, np.pi))
    eosin = soft(inside, 0.6) * (0.85 - 0.2 * soft(inside - 1.6, 1.6))
    return Stamp(to_bytes(0.0 * eosin, H_UNIT), to_bytes(eosin, E_UNIT))


def _tumour_body(rng: np.random.Generator, mpp: float) -> Stamp:
    """Draw granular cytoplasm, which takes some haematoxylin too."""
    disc = _Disc.of(17.0, mpp)
    inside = disc.inside(rng, rng.uniform(11.5, 14.2), rng.uniform(1.0, 1.35), 0.2, rng.uniform(0, np.pi))
    grain, mesh = disc.noise(rng, "grain"), disc.noise(rng, "mesh")
    border = np.exp(-(((inside - 0.6) / 0.7) ** 2))
    eosin = rng.uniform(0.42, 0.60) + 0.06 * mesh + 0.05 * grain + 0.07 * border
    haematoxylin = rng.uniform(0.20, 0.34) + 0.06 * mesh + 0.04 * grain + 0.04 * border
    return Stamp(to_bytes(haematoxylin, H_UNIT), to_bytes(eosin, E_UNIT), inside > 0)


def _tumour_nucleus(rng: np.random.Generator, mpp: float) -> Stamp:
    """Draw a vesicular nucleus of 14 to 22 um: rim, clumped chromatin, one to three nucleoli; few are dark, few divide.

    It is darker against its cytoplasm than in many tumours, so that lesion tiles, including lumina, have the same
    contrast as lymphocyte tiles: otherwise the spread of colours would reveal them.
    """
    disc = _Disc.of(15.0, mpp)
    angle, radius = rng.uniform(0, np.pi), rng.uniform(7.0, 9.4) * (1.2 if rng.random() < 0.12 else 1.0)
    inside = disc.inside(rng, radius, rng.uniform(1.0, 1.5), 0.15, angle)
    grain, mesh = disc.noise(rng, "grain"), disc.noise(rng, "mesh")
    if rng.random() < 0.03:
        plate = disc.inside(rng, 3.2, 3.5, 0.3, angle)
        haematoxylin = 0.25 + 0.05 * mesh + 1.9 * soft(plate, 0.9) * (1 + 0.2 * grain)
        return Stamp(to_bytes(haematoxylin, H_UNIT), to_bytes(0.42 + 0.05 * mesh, E_UNIT), inside > 0.2)
    dark = rng.uniform(1.1, 1.5) if rng.random() < 0.10 else rng.uniform(0.56, 0.98)
    haematoxylin = dark * (1 + 0.27 * grain + 0.24 * mesh + 0.45 * np.exp(-(((inside - 0.5) / 0.5) ** 2)))
    eosin = 0.46 + 0.03 * mesh
    for _ in range(rng.integers(1, 4)):
        x, y = rng.uniform(-0.42, 0.42, 2) * radius
        spot = np.exp(-((disc.x - x) ** 2 + (disc.y - y) ** 2) / rng.uniform(0.6, 1.5))
        haematoxylin, eosin = haematoxylin + 1.1 * spot, eosin + 0.35 * spot
    return Stamp(to_bytes(haematoxylin, H_UNIT), to_bytes(eosin, E_UNIT), inside > 0.2)


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


Concentrations = tuple[Bytes, Bytes]
"""Haematoxylin and eosin of a window, each (height, width) bytes in units of H_UNIT and E_UNIT."""


def paint(anatomy: Anatomy, window: Window) -> Concentrations:
    """Render a window with its lesions."""
    return _paint(View(anatomy, window), with_normal=False)[-1]


def paint_both(anatomy: Anatomy, window: Window) -> tuple[Concentrations, Concentrations]:
    """Render a window without lesions (the normal tissue they replace), and with its lesions."""
    normal, real = _paint(View(anatomy, window), with_normal=True)
    return normal, real


def _paint(view: View, *, with_normal: bool) -> list[Concentrations]:
    anatomy = view.anatomy
    grain, mesh, wave = view.texture("grain"), view.texture("mesh"), view.texture("wave")
    light = 0.03 + 0.007 * view.upsample(anatomy.glass) + 0.005 * grain  # the grain hides the steps of the bytes
    if not view.any_above(anatomy.depth_um, -12):
        return [(to_bytes(light, H_UNIT), to_bytes(light, E_UNIT))] * (2 if with_normal else 1)
    haematoxylin, eosin = _ground(view, grain, mesh, wave)
    h_bytes, e_bytes = to_bytes(haematoxylin, H_UNIT), to_bytes(eosin, E_UNIT)
    _drop_cavities(view, h_bytes, e_bytes, anatomy.cavities)
    inside = view.upsample(anatomy.lesion_um) if view.any_above(anatomy.lesion_um, -8) else None
    painted: list[Concentrations] = []
    if with_normal:
        painted.append((h_bytes.copy(), e_bytes.copy()))
        _drop_cells(view, *painted[0], anatomy.cells)
    painted.append((h_bytes, e_bytes))
    _drop_cells(view, h_bytes, e_bytes, anatomy.cells, ~anatomy.replaced)
    if inside is not None:
        _lesion(view, h_bytes, e_bytes, inside, grain, mesh, wave)
    h_gain, e_gain = view.upsample(anatomy.h_gain), view.upsample(anatomy.e_gain)
    if not view.all_above(anatomy.depth_um, 12):
        cover = soft(view.upsample(anatomy.depth_um) + 0.4 * mesh + 0.9 * wave, 3.0)
        h_gain *= cover
        e_gain *= cover
    return [
        (_stained(h_bytes, h_gain, light * H_UNIT), _stained(e_bytes, e_gain, light * E_UNIT))
        for h_bytes, e_bytes in painted
    ]


def _stained(values: Bytes, gain: Field, light: Field) -> Bytes:
    """Apply the optics: blur, local stain uptake, and glass that is not quite clear."""
    _blur(values)
    return to_bytes(values * gain + light, 1.0)


class View:
    """A window with the parts of the plan it needs."""

    def __init__(self, anatomy: Anatomy, window: Window):
        self.anatomy, self.window = anatomy, window

    def texture(self, name: str) -> Field:
        """Return a texture at every pixel of the window."""
        w = self.window
        return textures(self.anatomy.mpp).window(name, w.x0, w.y0, w.width, w.height)

    def _cells(self, values: Field) -> Field:
        """Return the cells of a field that the window needs."""
        w, step = self.window, self.anatomy.step_px
        rows = slice(max(0, w.y0 // step - 1), (w.y0 + w.height) // step + 2)
        columns = slice(max(0, w.x0 // step - 1), (w.x0 + w.width) // step + 2)
        return values[rows, columns]

    def any_above(self, values: Field, limit: float) -> bool:
        """Return whether a coarse field exceeds `limit` anywhere in the window."""
        return bool((self._cells(values) > limit).any())

    def all_above(self, values: Field, limit: float) -> bool:
        """Return whether a coarse field exceeds `limit` everywhere in the window."""
        return bool((self._cells(values) > limit).all())

    def upsample(self, values: Field, step_px: int | None = None) -> Field:
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

    def lesion_cover(self, inside_um: Field) -> Field:
        """Return how much a lesion covers each pixel: its border follows the cells, not the smooth contour."""
        return soft(inside_um + 1.5 * self.texture("mesh") + 1.0 * self.texture("wave"), 2.5)

    def box_px(self, x_um: float, y_um: float, reach_um: float) -> tuple[int, int, int, int] | None:
        """Return the part of the window within `reach_um` of a point, as (x0, y0, x1, y1) in the window."""
        w, mpp = self.window, self.anatomy.mpp
        x, y, reach = x_um / mpp - w.x0, y_um / mpp - w.y0, reach_um / mpp
        x0, x1 = max(0, int(x - reach)), min(w.width, int(x + reach) + 1)
        y0, y1 = max(0, int(y - reach)), min(w.height, int(y + reach) + 1)
        return (x0, y0, x1, y1) if x0 < x1 and y0 < y1 else None

    def polar(self, box: tuple[int, int, int, int], x_um: float, y_um: float) -> tuple[Field, Field]:
        """Return distance and direction from a point to every pixel of a box; directions range from 0 to 512."""
        w, mpp = self.window, self.anatomy.mpp
        dx = ((np.arange(box[0], box[2]) + w.x0) * mpp - x_um).astype(np.float32)[None, :]
        dy = ((np.arange(box[1], box[3]) + w.y0) * mpp - y_um).astype(np.float32)[:, None]
        return np.hypot(dx, dy), np.arctan2(dy, dx) * np.float32(256 / np.pi) + np.float32(256.5)


@lru_cache(maxsize=8)
def _between(start: int, count: int, step: int, cells: int) -> tuple[NDArray[np.int64], Field]:
    """Return, for `count` pixels from `start`, the cell whose centre precedes each, and the weight of the next."""
    at = np.clip((np.arange(start, start + count) + 0.5) / step - 0.5, 0, cells - 1.001)
    low = at.astype(np.int64)
    return low, (at - low).astype(np.float32)


def _ground(view: View, grain: Field, mesh: Field, wave: Field) -> tuple[Field, Field]:
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


def _collagen(view: View, mesh: Field, wave: Field) -> Field:
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
    view: View, h_bytes: Bytes, e_bytes: Bytes, cells: Cells, there: NDArray[np.bool_] | np.bool_ = np.True_
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
        _drop(h_bytes, e_bytes, stamp, cx, cy, flips)


def _drop(h_bytes: Bytes, e_bytes: Bytes, stamp: Stamp, cx: int, cy: int, flips: int) -> None:
    half = stamp.haematoxylin.shape[0] // 2
    height, width = h_bytes.shape
    top, bottom, left, right = cy - half, cy + half + 1, cx - half, cx + half + 1
    y0, y1, x0, x1 = max(top, 0), min(bottom, height), max(left, 0), min(right, width)
    if y0 >= y1 or x0 >= x1:
        return
    cut = (slice(y0 - top, y1 - top), slice(x0 - left, x1 - left))
    here = h_bytes[y0:y1, x0:x1]
    picture = _flipped(stamp.haematoxylin, flips)[cut]
    if stamp.mask is None:
        np.maximum(here, picture, out=here)
        if stamp.eosin is not None:
            there = e_bytes[y0:y1, x0:x1]
            np.maximum(there, _flipped(stamp.eosin, flips)[cut], out=there)
    else:
        mask = _flipped(stamp.mask, flips)[cut]
        np.copyto(here, picture, where=mask)
        if stamp.eosin is not None:
            np.copyto(e_bytes[y0:y1, x0:x1], _flipped(stamp.eosin, flips)[cut], where=mask)


def _flipped(picture: NDArray[Any], flips: int) -> NDArray[Any]:
    """Return one of the eight orientations of a square image."""
    if flips & 1:
        picture = picture[::-1]
    if flips & 2:
        picture = picture[:, ::-1]
    return picture.T if flips & 4 else picture


TURNS = np.arange(513) * (np.pi / 256) - np.pi
"""The directions of `View.polar`."""


def _drop_cavities(view: View, h_bytes: Bytes, e_bytes: Bytes, cavities: Cavities) -> None:
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
        _hollow(h_bytes[part], e_bytes[part], outside + 0.35 * view.texture("mesh")[part], int(kind), radius)


def _hollow(h_here: Bytes, e_here: Bytes, outside: Field, kind: int, radius: float) -> None:
    """Clear a cavity, given the distance outside its edge, and draw its wall."""
    clear = soft(-outside, 0.9)
    wall_um = {FAT: 1.1, LUMEN: 0.8}.get(kind, 1.5 + 0.28 * radius)
    wall = soft(wall_um - outside, 1.2) * (1 - clear)
    rest = {FAT: 0.05, LUMEN: 0.12}.get(kind, 0.10)
    collagen = 0.55 + 0.12 * np.sin(outside * 3.2) if kind == VESSEL else 0.55
    eosin = e_here * (1 - clear - wall) + E_UNIT * (wall * collagen + clear * rest)
    h_here[...] = to_bytes(h_here * (1 - clear - 0.8 * wall), 1.0)
    e_here[...] = to_bytes(eosin, 1.0)


def _lesion(view: View, h_bytes: Bytes, e_bytes: Bytes, inside: Field, grain: Field, mesh: Field, wave: Field) -> None:
    """Draw the lesion over the background: tumour cells, lumina, and fibrous septa between nests."""
    anatomy = view.anatomy
    cover = view.lesion_cover(inside)
    septum = soft(view.upsample(anatomy.septum) - 0.72 + 0.10 * mesh, 0.25)
    eosin = 0.44 + 0.05 * mesh + 0.04 * grain
    eosin += septum * (0.85 * _collagen(view, mesh, wave) - eosin)
    gap = soft(mesh + 0.6 * wave - 1.55, 0.5)
    eosin *= 1 - 0.8 * gap
    haematoxylin = (0.26 + 0.04 * mesh + 0.04 * grain - 0.07 * septum) * (1 - 0.8 * gap)
    h_bytes[...] = to_bytes(h_bytes + cover * (haematoxylin * H_UNIT - h_bytes), 1.0)
    e_bytes[...] = to_bytes(e_bytes + cover * (eosin * E_UNIT - e_bytes), 1.0)
    _drop_cells(view, h_bytes, e_bytes, anatomy.tumour_cells)
    _drop_cavities(view, h_bytes, e_bytes, anatomy.lumina)
