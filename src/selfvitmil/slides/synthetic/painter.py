"""How a made lymph node looks: any window of a slide's plan goes in, its pixels come out.

A window is painted as two maps, the concentrations of haematoxylin and eosin in bytes, and coloured by Beer-Lambert's
law through one table of 256 x 256 colours. Windows know only the plan and their place, so they meet without seams and a
slide of any size is painted in little memory. Cells are pictures from a fixed collection, dropped into the maps.

A lesion must not be told from normal tissue by its mean colour. `mix_palette` paints the place of each lesion twice, as
the normal tissue that would be there and as the lesion, finds the strengths of the two stains that give the lesions of
the slide the same mean colour, and then the small gain per place and channel that holds this in every part of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
import scipy.fft
from numpy.typing import NDArray
from scipy import ndimage, optimize

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
    Map,
)

Bytes = NDArray[np.uint8]

BLOCK_PX = 512
"""Largest edge of a window."""
H_UNIT, E_UNIT = 64.0, 100.0
"""Byte values of one unit of concentration."""


@dataclass(frozen=True, eq=False)
class Stain:
    """The colours of a slide: optical density = strengths-scaled concentrations times `vectors`."""

    vectors: Map
    """(3, 2): unit optical density (natural logarithm) in red, green, blue of haematoxylin and eosin."""
    strengths: tuple[float, float]
    """Optical density of one unit of concentration of each."""
    glass: tuple[float, float, float]
    """Red, green and blue of clear glass."""

    def table(self) -> NDArray[np.uint32]:
        """Colours as RGBX words, by haematoxylin byte * 256 + eosin byte."""
        h = np.arange(256)[:, None, None] * (self.strengths[0] / H_UNIT) * self.vectors[:, 0]
        e = np.arange(256)[None, :, None] * (self.strengths[1] / E_UNIT) * self.vectors[:, 1]
        colours = np.zeros((256, 256, 4), np.uint8)
        colours[..., :3] = np.round(np.asarray(self.glass) * np.exp(-(h + e)))
        return colours.reshape(-1, 4).view(np.uint32).ravel()

    def neither(self) -> Map:
        """The direction in optical density that neither stain has a part in."""
        direction = np.cross(self.vectors[:, 0], self.vectors[:, 1])
        return direction / np.linalg.norm(direction)


def draw_stain(rng: np.random.Generator) -> Stain:
    """Stain vectors, strengths and light as they vary between laboratories and scanners."""
    blueness = rng.uniform(0, 1)  # the two stains of a laboratory shift together
    haematoxylin = np.array([0.48, 0.75, 0.45]) + blueness * np.array([0.12, 0.0, -0.17]) + rng.normal(0, 0.02, 3)
    eosin = np.array([0.24, 0.78, 0.56]) + blueness * np.array([-0.04, 0.14, -0.24]) + rng.normal(0, 0.02, 3)
    vectors = np.stack([haematoxylin / np.linalg.norm(haematoxylin), eosin / np.linalg.norm(eosin)], axis=-1)
    strengths = (float(rng.uniform(0.75, 1.1)), float(rng.uniform(0.7, 1.1)))
    light = rng.uniform(238, 246)
    red, green, blue = (float(value) for value in np.clip(light + rng.normal(0, 1.2, 3), 234, 248))
    return Stain(vectors, strengths, (red, green, blue))


# ---------------------------------------------------------------------------------------------------- textures


@dataclass(frozen=True, eq=False)
class _Textures:
    """Periodic noise of unit variance; every array is so long that each window of a block is a slice of it."""

    grain: Map
    mesh: Map
    wave: Map
    fibre: Map
    """One-dimensional: 16 values a micron."""
    sensor: Bytes

    def window(self, name: str, x0: int, y0: int, width: int, height: int) -> Map:
        texture: Map = getattr(self, name)
        period = len(texture) - BLOCK_PX
        x0, y0 = x0 % period, y0 % period
        return texture[y0 : y0 + height, x0 : x0 + width]


FIBRE_LENGTH = 1 << 14
SENSOR_PX = 384


@lru_cache(maxsize=4)
def _textures(mpp: float) -> _Textures:
    rng = np.random.default_rng(11)
    grain, mesh, wave = (
        _periodic_noise(rng, period, scale_um / mpp) for period, scale_um in ((480, 0.55), (640, 1.3), (800, 7.0))
    )
    fibre = ndimage.gaussian_filter1d(rng.standard_normal(FIBRE_LENGTH), 8, mode="wrap") * 4
    fibre += ndimage.gaussian_filter1d(rng.standard_normal(FIBRE_LENGTH), 30, mode="wrap") * 6
    sensor = np.round(rng.normal(0, 1.2, (SENSOR_PX, SENSOR_PX, 4))).astype(np.int8).view(np.uint8)
    sensor = np.tile(sensor, (BLOCK_PX // SENSOR_PX + 2, BLOCK_PX // SENSOR_PX + 2, 1))
    return _Textures(grain, mesh, wave, (fibre / fibre.std()).astype(np.float32), sensor)


def _periodic_noise(rng: np.random.Generator, period: int, scale_px: float) -> Map:
    frequency = np.hypot(scipy.fft.fftfreq(period)[:, None], scipy.fft.rfftfreq(period)[None, :])
    z = (2 * np.pi * scale_px * frequency).astype(np.float32)
    white = np.asarray(scipy.fft.rfft2(rng.standard_normal((period, period), dtype=np.float32)))
    noise = np.asarray(scipy.fft.irfft2(white * z * np.exp(-0.5 * z * z), s=(period, period)))
    noise = (noise / noise.std()).astype(np.float32)
    repeats = BLOCK_PX // period + 2
    return np.tile(noise, (repeats, repeats))[: period + BLOCK_PX, : period + BLOCK_PX].copy()


# ---------------------------------------------------------------------------------------------------- pictures of cells


@dataclass(frozen=True, eq=False)
class _Stamp:
    """A cell: bytes to drop into the two maps. With a `mask` it covers what lies below, else the darker wins."""

    haematoxylin: Bytes
    eosin: Bytes | None = None
    mask: NDArray[np.bool_] | None = None


NUM_ANGLES = 24


@lru_cache(maxsize=4)
def _stamps(mpp: float) -> dict[int, list[_Stamp]]:
    """Pictures of every kind of cell; those of spindle cells are in NUM_ANGLES groups by direction."""
    rng = np.random.default_rng(12)
    small = [_lymphocyte(rng, mpp) for _ in range(160)]
    blasts = [_vesicular(rng, mpp, rng.uniform(4.2, 5.4), rng.uniform(0.55, 0.9)) for _ in range(64)]
    histiocytes = [_vesicular(rng, mpp, rng.uniform(4.6, 6.0), rng.uniform(0.35, 0.55)) for _ in range(32)]
    spindles = [_spindle(rng, mpp, np.pi * turn / NUM_ANGLES) for turn in range(NUM_ANGLES) for _ in range(8)]
    red = [_red_cell(rng, mpp) for _ in range(24)]
    bodies = [_tumour_body(rng, mpp) for _ in range(64)]
    nuclei = [_tumour_nucleus(rng, mpp) for _ in range(128)]
    return {
        LYMPHOCYTE: small,
        BLAST: blasts,
        HISTIOCYTE: histiocytes,
        SPINDLE: spindles,
        RED_CELL: red,
        TUMOUR_BODY: bodies,
        TUMOUR_NUCLEUS: nuclei,
    }


@dataclass(frozen=True, eq=False)
class _Disc:
    """Polar coordinates about the middle of a picture, in microns."""

    x: Map
    y: Map
    mpp: float

    @classmethod
    def of(cls, radius_um: float, mpp: float) -> _Disc:
        reach = int(np.ceil(radius_um / mpp))
        steps = np.arange(-reach, reach + 1, dtype=np.float32) * np.float32(mpp)
        return cls(steps[None, :], steps[:, None], mpp)

    def shifted(self, x: float, y: float) -> _Disc:
        return _Disc(self.x - np.float32(x), self.y - np.float32(y), self.mpp)

    def inside(self, rng: np.random.Generator, radius: float, stretch: float, wobble: float, angle: float) -> Map:
        """About the distance inside a wobbly ellipse, in microns."""
        cosine, sine = np.float32(np.cos(angle)), np.float32(np.sin(angle))
        along, aside = self.x * cosine + self.y * sine, self.y * cosine - self.x * sine
        along, aside = along / np.float32(np.sqrt(stretch)), aside * np.float32(np.sqrt(stretch))
        turns = np.arange(-256, 257) * (np.pi / 256)
        edge = np.ones_like(turns)
        for order in range(2, 7):
            edge += rng.normal(0, wobble / order) * np.cos(order * turns + rng.uniform(0, 2 * np.pi))
        at = np.arctan2(aside, along) * np.float32(256 / np.pi) + np.float32(256.5)
        return (radius * edge).astype(np.float32)[at.astype(np.int32)] - np.hypot(along, aside)

    def noise(self, rng: np.random.Generator, name: str) -> Map:
        height, width = len(self.y), self.x.shape[1]
        return _textures(self.mpp).window(name, int(rng.integers(600)), int(rng.integers(600)), width, height)


def _soft(inside_um: Map, width_um: float) -> Map:
    """From 0 to 1 across an edge, as wide as the optics blur it."""
    t = np.clip(inside_um / width_um + 0.5, 0, 1)
    return t * t * (3 - 2 * t)


def _bytes(values: Map, unit: float) -> Bytes:
    return np.clip(values * unit + 0.5, 0, 255).astype(np.uint8)


def _lymphocyte(rng: np.random.Generator, mpp: float) -> _Stamp:
    """A small, round, dark nucleus with clumps of chromatin."""
    disc = _Disc.of(5.2, mpp)
    inside = disc.inside(rng, rng.uniform(2.9, 3.75), rng.uniform(1.0, 1.3), 0.11, rng.uniform(0, np.pi))
    dark, focus = rng.triangular(0.75, 1.25, 1.75), rng.choice([0.9, 1.2, 1.8], p=[0.45, 0.4, 0.15])
    chromatin = 1 + 0.24 * disc.noise(rng, "grain") + 0.17 * disc.noise(rng, "mesh")
    rim = rng.uniform(-0.05, 0.2) * np.exp(-(((inside - 0.6) / 0.6) ** 2))
    return _Stamp(_bytes(dark * _soft(inside, focus) * (chromatin + rim), H_UNIT))


def _vesicular(rng: np.random.Generator, mpp: float, radius: float, dark: float) -> _Stamp:
    """A larger, paler nucleus with a rim and small nucleoli, in a little cytoplasm."""
    disc = _Disc.of(radius + 3.5, mpp)
    inside = disc.inside(rng, radius * 0.93, rng.uniform(1.0, 1.55), 0.12, rng.uniform(0, np.pi))
    nucleus = _soft(inside, 1.0) * (1 + 0.3 * disc.noise(rng, "grain") + 0.22 * disc.noise(rng, "mesh"))
    haematoxylin = dark * (nucleus + 0.45 * np.exp(-(((inside - 0.45) / 0.5) ** 2)))
    for _ in range(rng.integers(0, 3)):
        x, y = rng.uniform(-0.5, 0.5, 2) * radius
        haematoxylin += 0.7 * np.exp(-((disc.x - x) ** 2 + (disc.y - y) ** 2) / rng.uniform(0.2, 0.5))
    return _Stamp(_bytes(haematoxylin, H_UNIT), _bytes(0.22 * _soft(inside + 1.8, 1.6), E_UNIT))


def _spindle(rng: np.random.Generator, mpp: float, angle: float) -> _Stamp:
    """The long thin nucleus of a fibroblast or an endothelial cell."""
    disc = _Disc.of(9.0, mpp)
    inside = disc.inside(rng, rng.uniform(2.3, 3.0), rng.uniform(3.0, 6.5), 0.14, angle + rng.normal(0, 0.12))
    dark = rng.uniform(0.8, 1.5)
    return _Stamp(_bytes(dark * _soft(inside * 0.7, 0.7) * (1 + 0.2 * disc.noise(rng, "grain")), H_UNIT))


def _red_cell(rng: np.random.Generator, mpp: float) -> _Stamp:
    disc = _Disc.of(4.2, mpp)
    inside = disc.inside(rng, rng.uniform(2.5, 3.2), rng.uniform(1.0, 1.4), 0.1, rng.uniform(0, np.pi))
    eosin = _soft(inside, 0.6) * (0.85 - 0.2 * _soft(inside - 1.6, 1.6))
    return _Stamp(_bytes(0.0 * eosin, H_UNIT), _bytes(eosin, E_UNIT))


def _tumour_body(rng: np.random.Generator, mpp: float) -> _Stamp:
    """Plenty of granular cytoplasm, which takes some haematoxylin too."""
    disc = _Disc.of(13.5, mpp)
    inside = disc.inside(rng, rng.uniform(9.0, 11.2), rng.uniform(1.0, 1.35), 0.2, rng.uniform(0, np.pi))
    grain, mesh = disc.noise(rng, "grain"), disc.noise(rng, "mesh")
    border = np.exp(-(((inside - 0.6) / 0.7) ** 2))
    eosin = rng.uniform(0.50, 0.66) + 0.06 * mesh + 0.05 * grain + 0.07 * border
    haematoxylin = rng.uniform(0.24, 0.40) + 0.06 * mesh + 0.04 * grain + 0.04 * border
    return _Stamp(_bytes(haematoxylin, H_UNIT), _bytes(eosin, E_UNIT), inside > 0)


def _tumour_nucleus(rng: np.random.Generator, mpp: float) -> _Stamp:
    """A vesicular nucleus of 12 to 18 um: rim, clumped chromatin, one to three nucleoli; few are dark, few divide."""
    disc = _Disc.of(12.0, mpp)
    angle, radius = rng.uniform(0, np.pi), rng.uniform(5.6, 7.4) * (1.2 if rng.random() < 0.12 else 1.0)
    inside = disc.inside(rng, radius, rng.uniform(1.0, 1.5), 0.15, angle)
    grain, mesh = disc.noise(rng, "grain"), disc.noise(rng, "mesh")
    if rng.random() < 0.03:
        plate = disc.inside(rng, 3.2, 3.5, 0.3, angle)
        haematoxylin = 0.25 + 0.05 * mesh + 1.9 * _soft(plate, 0.9) * (1 + 0.2 * grain)
        return _Stamp(_bytes(haematoxylin, H_UNIT), _bytes(0.42 + 0.05 * mesh, E_UNIT), inside > 0.2)
    dark = rng.uniform(1.1, 1.5) if rng.random() < 0.10 else rng.uniform(0.52, 0.92)
    haematoxylin = dark * (1 + 0.27 * grain + 0.24 * mesh + 0.45 * np.exp(-(((inside - 0.5) / 0.5) ** 2)))
    eosin = 0.34 + 0.03 * mesh
    for _ in range(rng.integers(1, 4)):
        x, y = rng.uniform(-0.42, 0.42, 2) * radius
        spot = np.exp(-((disc.x - x) ** 2 + (disc.y - y) ** 2) / rng.uniform(0.6, 1.5))
        haematoxylin, eosin = haematoxylin + 1.1 * spot, eosin + 0.35 * spot
    return _Stamp(_bytes(haematoxylin, H_UNIT), _bytes(eosin, E_UNIT), inside > 0.2)


# ---------------------------------------------------------------------------------------------------- one window


@dataclass(frozen=True)
class Window:
    """A rectangle of level-0 pixels, at most BLOCK_PX wide and high."""

    x0: int
    y0: int
    width: int
    height: int


Maps = tuple[Bytes, Bytes]
"""Haematoxylin and eosin of a window."""


def paint(anatomy: Anatomy, window: Window) -> Maps:
    """A window with its lesions."""
    return _paint(_View(anatomy, window), with_normal=False)[-1]


def paint_both(anatomy: Anatomy, window: Window) -> tuple[Maps, Maps]:
    """A window as the normal tissue that would be in the place of lesions, and with its lesions."""
    normal, real = _paint(_View(anatomy, window), with_normal=True)
    return normal, real


def _paint(view: _View, *, with_normal: bool) -> list[Maps]:
    anatomy = view.anatomy
    grain, mesh, wave = view.texture("grain"), view.texture("mesh"), view.texture("wave")
    light = 0.03 + 0.007 * view.upsample(anatomy.glass) + 0.005 * grain  # the grain hides the steps of the bytes
    if not view.any_above(anatomy.depth_um, -12):
        return [(_bytes(light, H_UNIT), _bytes(light, E_UNIT))] * (2 if with_normal else 1)
    haematoxylin, eosin = _ground(view, grain, mesh, wave)
    h_map, e_map = _bytes(haematoxylin, H_UNIT), _bytes(eosin, E_UNIT)
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
        cover = _soft(view.upsample(anatomy.depth_um) + 0.4 * mesh + 0.9 * wave, 3.0)
        h_gain *= cover
        e_gain *= cover
    return [
        (_stained(h_map, h_gain, light * H_UNIT), _stained(e_map, e_gain, light * E_UNIT)) for h_map, e_map in painted
    ]


def _stained(values: Bytes, gain: Map, light: Map) -> Bytes:
    """What the optics make of a map: blurred, stained more or less strongly, on glass that is not quite clear."""
    _blur(values)
    return _bytes(values * gain + light, 1.0)


class _View:
    """A window with what it needs of the plan."""

    def __init__(self, anatomy: Anatomy, window: Window):
        self.anatomy, self.window = anatomy, window

    def texture(self, name: str) -> Map:
        w = self.window
        return _textures(self.anatomy.mpp).window(name, w.x0, w.y0, w.width, w.height)

    def _cells(self, values: Map) -> Map:
        """The cells of a map of the plan that the window needs."""
        w, step = self.window, self.anatomy.step_px
        rows = slice(max(0, w.y0 // step - 1), (w.y0 + w.height) // step + 2)
        columns = slice(max(0, w.x0 // step - 1), (w.x0 + w.width) // step + 2)
        return values[rows, columns]

    def any_above(self, values: Map, limit: float) -> bool:
        return bool((self._cells(values) > limit).any())

    def all_above(self, values: Map, limit: float) -> bool:
        return bool((self._cells(values) > limit).all())

    def upsample(self, values: Map, step_px: int | None = None) -> Map:
        """A coarse map at every pixel of the window, linearly between the centres of its cells."""
        step, w = step_px or self.anatomy.step_px, self.window
        low_x, share_x = _between(w.x0, w.width, step, values.shape[1])
        low_y, share_y = _between(w.y0, w.height, step, values.shape[0])
        rows = values[low_y[0] : low_y[-1] + 2]
        columns = rows[:, low_x] * (1 - share_x) + rows[:, low_x + 1] * share_x
        slopes = columns[1:] - columns[:-1]
        out = np.empty((w.height, w.width), np.float32)
        # Row by row of cells, so that the work stays in the cache.
        starts = np.searchsorted(low_y, np.arange(low_y[0], low_y[-1] + 1)).tolist()
        for cell, (start, stop) in enumerate(pairwise([*starts, w.height])):
            np.multiply(share_y[start:stop, None], slopes[cell], out=out[start:stop])
            out[start:stop] += columns[cell]
        return out

    def gain_cells(self, values: Map) -> Map:
        """A map of the plan in the middles of the cells of GAIN_PX that lie whole in the window."""
        middles = self.upsample(values)[GAIN_PX // 2 :: GAIN_PX, GAIN_PX // 2 :: GAIN_PX]
        return middles[: self.window.height // GAIN_PX, : self.window.width // GAIN_PX]

    def lesion_cover(self, inside_um: Map) -> Map:
        """How much a lesion covers each pixel: its border follows the cells, not the smooth outline."""
        return _soft(inside_um + 1.5 * self.texture("mesh") + 1.0 * self.texture("wave"), 2.5)

    def box_px(self, x_um: float, y_um: float, reach_um: float) -> tuple[int, int, int, int] | None:
        """The part of the window within `reach_um` of a point, as (x0, y0, x1, y1) in the window."""
        w, mpp = self.window, self.anatomy.mpp
        x, y, reach = x_um / mpp - w.x0, y_um / mpp - w.y0, reach_um / mpp
        x0, x1 = max(0, int(x - reach)), min(w.width, int(x + reach) + 1)
        y0, y1 = max(0, int(y - reach)), min(w.height, int(y + reach) + 1)
        return (x0, y0, x1, y1) if x0 < x1 and y0 < y1 else None

    def polar(self, box: tuple[int, int, int, int], x_um: float, y_um: float) -> tuple[Map, Map]:
        """Distance and direction from a point to every pixel of a box; directions count from 0 to 512."""
        w, mpp = self.window, self.anatomy.mpp
        dx = ((np.arange(box[0], box[2]) + w.x0) * mpp - x_um).astype(np.float32)[None, :]
        dy = ((np.arange(box[1], box[3]) + w.y0) * mpp - y_um).astype(np.float32)[:, None]
        return np.hypot(dx, dy), np.arctan2(dy, dx) * np.float32(256 / np.pi) + np.float32(256.5)


@lru_cache(maxsize=8)
def _between(start: int, count: int, step: int, cells: int) -> tuple[NDArray[np.int64], Map]:
    """For `count` pixels from `start`: the cell whose centre comes before each, and the share of the next."""
    at = np.clip((np.arange(start, start + count) + 0.5) / step - 0.5, 0, cells - 1.001)
    low = at.astype(np.int64)
    return low, (at - low).astype(np.float32)


def _ground(view: _View, grain: Map, mesh: Map, wave: Map) -> tuple[Map, Map]:
    """What lies between the cells: a pale net with gaps, loose sinuses, fibrous stroma."""
    anatomy = view.anatomy
    gap = mesh + 0.5 * wave - 0.6
    eosin = 0.42 + 0.06 * mesh + 0.05 * grain
    if view.any_above(anatomy.sinus, 0.02):
        gap += 0.9 * view.upsample(anatomy.sinus)
    if view.any_above(anatomy.centre, 0.02):
        centre = view.upsample(anatomy.centre)
        gap -= 0.35 * centre
        eosin += 0.05 * centre
    filled = 1 - 0.8 * _soft(gap, 0.7)
    eosin *= filled
    haematoxylin = (0.17 + 0.05 * grain + 0.03 * mesh) * filled
    if view.any_above(anatomy.stroma, 0.02):
        stroma = view.upsample(anatomy.stroma)
        eosin += stroma * (_collagen(view, mesh, wave) - eosin)
        haematoxylin += stroma * (0.13 + 0.03 * grain - haematoxylin)
    return haematoxylin, eosin


def _collagen(view: _View, mesh: Map, wave: Map) -> Map:
    """Eosin of wavy fibres along the level lines of the plan's `across_um`."""
    fibre = _textures(view.anatomy.mpp).fibre
    at = (view.upsample(view.anatomy.across_um) + 3.0 * wave + 0.35 * mesh) * 16
    return np.maximum(0.68 + 0.22 * fibre[at.astype(np.int32) & (FIBRE_LENGTH - 1)] + 0.04 * mesh, 0.08)


def _blur(values: Bytes) -> None:
    """Blur of the optics: weights 1/4, 1/2, 1/4 along both axes."""
    for ahead, behind in ((values[1:], values[:-1]), (values[:, 1:], values[:, :-1])):
        np.copyto(behind, _average(ahead, behind))
        np.copyto(ahead, _average(ahead, behind))


def _average(a: Bytes, b: Bytes) -> Bytes:
    """The mean of bytes without leaving bytes, rounded up."""
    return (a | b) - ((a ^ b) >> np.uint8(1))


def _drop_cells(
    view: _View, h_map: Bytes, e_map: Bytes, cells: Cells, there: NDArray[np.bool_] | np.bool_ = np.True_
) -> None:
    """Drop the pictures of the cells that are `there` into the maps."""
    w, reach = view.window, int(14 / view.anatomy.mpp) + 1
    x, y = cells.xy_px[:, 0] - w.x0, cells.xy_px[:, 1] - w.y0
    near = (x > -reach) & (x < w.width + reach) & (y > -reach) & (y < w.height + reach)
    chosen = np.flatnonzero(near & there)
    stamps = _stamps(view.anatomy.mpp)
    kinds, shapes = cells.kind[chosen].tolist(), cells.shape[chosen].tolist()
    turns = (np.round(cells.angle[chosen] * (NUM_ANGLES / np.pi)).astype(int) % NUM_ANGLES).tolist()
    for cx, cy, kind, shape, turn in zip(x[chosen].tolist(), y[chosen].tolist(), kinds, shapes, turns, strict=True):
        collection = stamps[kind]
        if kind == SPINDLE:
            stamp, flips = collection[turn * 8 + (shape >> 3) % 8], 0
        else:
            stamp, flips = collection[(shape >> 3) % len(collection)], shape & 7
        _drop(h_map, e_map, stamp, cx, cy, flips)


def _drop(h_map: Bytes, e_map: Bytes, stamp: _Stamp, cx: int, cy: int, flips: int) -> None:
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
    """One of the eight ways to lay a square picture down."""
    if flips & 1:
        picture = picture[::-1]
    if flips & 2:
        picture = picture[:, ::-1]
    return picture.T if flips & 4 else picture


TURNS = np.arange(513) * (np.pi / 256) - np.pi
"""The directions of `_View.polar`."""


def _drop_cavities(view: _View, h_map: Bytes, e_map: Bytes, cavities: Cavities) -> None:
    """Fat cells with their membranes, vessels with their walls, lumina with a little secretion."""
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
    """Clear a cavity, given the distance outside its edge, and paint its wall."""
    clear = _soft(-outside, 0.9)
    wall_um = {FAT: 1.1, LUMEN: 0.8}.get(kind, 1.5 + 0.28 * radius)
    wall = _soft(wall_um - outside, 1.2) * (1 - clear)
    rest = {FAT: 0.05, LUMEN: 0.12}.get(kind, 0.10)
    collagen = 0.55 + 0.12 * np.sin(outside * 3.2) if kind == VESSEL else 0.55
    eosin = e_here * (1 - clear - wall) + E_UNIT * (wall * collagen + clear * rest)
    h_here[...] = _bytes(h_here * (1 - clear - 0.8 * wall), 1.0)
    e_here[...] = _bytes(eosin, 1.0)


def _lesion(view: _View, h_map: Bytes, e_map: Bytes, inside: Map, grain: Map, mesh: Map, wave: Map) -> None:
    """Paint the lesion over the ground: tumour cells, lumina, and fibrous septa between nests."""
    anatomy = view.anatomy
    cover = view.lesion_cover(inside)
    septum = _soft(view.upsample(anatomy.septum) - 0.72 + 0.10 * mesh, 0.25)
    eosin = 0.52 + 0.05 * mesh + 0.04 * grain
    eosin += septum * (0.85 * _collagen(view, mesh, wave) - eosin)
    gap = _soft(mesh + 0.6 * wave - 1.55, 0.5)
    eosin *= 1 - 0.8 * gap
    haematoxylin = (0.30 + 0.04 * mesh + 0.04 * grain - 0.12 * septum) * (1 - 0.8 * gap)
    h_map[...] = _bytes(h_map + cover * (haematoxylin * H_UNIT - h_map), 1.0)
    e_map[...] = _bytes(e_map + cover * (eosin * E_UNIT - e_map), 1.0)
    _drop_cells(view, h_map, e_map, anatomy.tumour_cells)
    _drop_cavities(view, h_map, e_map, anatomy.lumina)


# ---------------------------------------------------------------------------------------------------- colour


@dataclass(frozen=True, eq=False)
class Palette:
    """All that turns concentrations into colours."""

    table: NDArray[np.uint32]
    lesion_table: NDArray[np.uint32]
    gains: tuple[Map, ...]
    """Gain in red, green and blue of the light through lesions, on cells of GAIN_PX; empty when there are none."""
    painted: dict[Window, Maps]
    """Windows that had to be painted to find the above."""
    tint: Map
    """Grey levels by which red, green and blue follow the unevenness of the light's hue."""


GAIN_PX = 16
MATCH_UM = 26.0
"""Standard deviation of the Gaussian over which the mean colour of a lesion is prescribed."""
USUAL_UM = 112.0
"""Edge of the squares whose colour is the measure: a tile of 224 pixels at 0.5 um."""
TINT = 2.5
"""Standard deviation of the hue of the light, in grey levels: more than that by which lesions may miss their target."""
MOST_SURVEYED = 64
"""About the number of windows that tell the mean colour of a slide's normal tissue."""


def windows(size_px: tuple[int, int]) -> Iterator[Window]:
    """All windows of a slide."""
    for y in range(0, size_px[1], BLOCK_PX):
        for x in range(0, size_px[0], BLOCK_PX):
            yield Window(x, y, min(BLOCK_PX, size_px[0] - x), min(BLOCK_PX, size_px[1] - y))


def render(anatomy: Anatomy, palette: Palette, window: Window, noise_seed: int) -> Bytes:
    """Pixels of a window as (height, width, 4) RGBX bytes."""
    maps = palette.painted.get(window) or paint(anatomy, window)
    pixels = _coloured(maps, palette.table)
    view = _View(anatomy, window)
    if palette.gains and view.any_above(anatomy.lesion_um, -8):
        cover = view.lesion_cover(view.upsample(anatomy.lesion_um))
        own = _coloured(maps, palette.lesion_table)
        for channel, gain in enumerate(palette.gains):
            lit = np.minimum(own[..., channel] * view.upsample(gain, GAIN_PX), 248)
            pixels[..., channel] = pixels[..., channel] * (1 - cover) + lit * cover + 0.5
    _drop_dust(view, pixels)
    dx, dy = np.random.default_rng((noise_seed, window.x0, window.y0)).integers(0, SENSOR_PX, 2)
    # Bytes that wrap round add like signed numbers; glass and ink are far enough from 255 and 0.
    pixels += _textures(anatomy.mpp).sensor[dy : dy + window.height, dx : dx + window.width]
    tint = view.upsample(anatomy.tint)
    for channel, share in enumerate(palette.tint.tolist()):
        pixels[..., channel] += np.rint(share * tint).astype(np.int8).view(np.uint8)
    return pixels


def _coloured(maps: Maps, table: NDArray[np.uint32]) -> Bytes:
    words = table.take((maps[0].astype(np.uint16) << 8) | maps[1])
    return words.view(np.uint8).reshape(*words.shape, 4)


def mix_palette(anatomy: Anatomy, stain: Stain) -> Palette:
    """Colours of a slide; those of its lesions are on the mean the colours of its normal tissue."""
    table, tint = stain.table(), TINT * stain.neither()
    if not anatomy.lesions_um:
        return Palette(table, table, (), {}, tint)
    survey = _survey(anatomy, table, tint)
    inside, target = survey.inside, survey.target()
    samples = np.concatenate([_samples(maps, inside[_gain_cells(window)]) for window, maps in survey.painted.items()])
    strengths = _balance(stain, samples[:: len(samples) // 20_000 + 1], target[inside].mean(axis=0))
    lesion_table = Stain(stain.vectors, strengths, stain.glass).table()
    lesion = np.zeros_like(target)
    for window, maps in survey.painted.items():
        lesion[_gain_cells(window)] = _cell_means(_coloured(maps, lesion_table))
    gains = _local_gains(target, lesion, inside, MATCH_UM / (GAIN_PX * anatomy.mpp))
    return Palette(table, lesion_table, gains, survey.painted, tint)


@dataclass(frozen=True, eq=False)
class _Survey:
    """A part of a slide on cells of GAIN_PX: all of its lesions and some of the rest."""

    normal: Map
    """Mean colours, in lesions those of the normal tissue that would be there."""
    inside: NDArray[np.bool_]
    """In a lesion."""
    tissue: NDArray[np.bool_]
    """In normal tissue."""
    light: Map
    """Grey levels that the hue of the light adds."""
    painted: dict[Window, Maps]
    cell_um: float

    def target(self) -> Map:
        """The mean colours that lesions are to have: what would be there, shifted per lesion to the slide's usual.

        Without the shift a few lesions of a few slides have by chance a colour of their own.
        """
        usual = self._usual_colour()
        lesions: NDArray[np.int32] = ndimage.label(self.inside)[0]  # pyright: ignore[reportIndexIssue, reportAssignmentType]
        target = self.normal.copy()
        for lesion in range(1, lesions.max() + 1):
            cells = lesions == lesion
            inherited = np.sqrt(target[cells])  # the root, since nothing may outshine the glass
            target[cells] = (usual - self.light[cells].mean(axis=0)) * inherited / inherited.mean(axis=0)
        return target

    def _usual_colour(self) -> Map:
        """Median of the mean colours of the squares of a tile's size in normal tissue.

        Not their mean: fibres and gaps make that of a hue that hardly any square has.
        """
        edge = max(1, round(USUAL_UM / self.cell_um))
        share = ndimage.uniform_filter(self.tissue.astype(np.float64), edge, mode="constant")
        masked = np.moveaxis((self.normal + self.light) * self.tissue[..., None], -1, 0)
        sums = np.stack([ndimage.uniform_filter(channel, edge, mode="constant") for channel in masked], axis=-1)
        full = share > min(0.95, 0.98 * share.max())
        return np.median(sums[full] / share[full][:, None], axis=0)


def _survey(anatomy: Anatomy, table: NDArray[np.uint32], tint: Map) -> _Survey:
    shape = (-(-anatomy.size_px[1] // GAIN_PX), -(-anatomy.size_px[0] // GAIN_PX))
    normal, light = np.zeros((*shape, 3)), np.zeros((*shape, 3))
    inside, tissue = np.zeros(shape, bool), np.zeros(shape, bool)
    painted: dict[Window, Maps] = {}
    with_tissue = [w for w in windows(anatomy.size_px) if _View(anatomy, w).any_above(anatomy.depth_um, 0)]
    every = len(with_tissue) // MOST_SURVEYED + 1
    for number, window in enumerate(with_tissue):
        view = _View(anatomy, window)
        if view.any_above(anatomy.lesion_um, 0):
            without, painted[window] = paint_both(anatomy, window)
        elif number % every == 0:
            without = painted[window] = paint(anatomy, window)
        else:
            continue
        cells = _gain_cells(window)
        normal[cells] = _cell_means(_coloured(without, table))
        light[cells] = view.gain_cells(anatomy.tint)[..., None] * tint
        inside[cells] = view.gain_cells(anatomy.lesion_um) > 0
        tissue[cells] = (view.gain_cells(anatomy.depth_um) > 0) & ~inside[cells]
    return _Survey(normal, inside, tissue, light, painted, GAIN_PX * anatomy.mpp)


def _balance(stain: Stain, samples: Map, target: Map) -> tuple[float, float]:
    """Strengths of the two stains with which the lesions' samples (bytes) have the mean colour `target`."""

    def miss(scales: Map) -> Map:
        density = samples * (scales * stain.strengths / (H_UNIT, E_UNIT)) @ stain.vectors.T
        return (np.asarray(stain.glass) * np.exp(-density)).mean(axis=0) - target

    scales = optimize.least_squares(miss, (1.0, 1.0), bounds=(0.6, 1.7)).x
    return float(stain.strengths[0] * scales[0]), float(stain.strengths[1] * scales[1])


def _local_gains(target: Map, lesion: Map, inside: NDArray[np.bool_], spread: float) -> tuple[Map, ...]:
    """Gains with which the means of `lesion` about every place inside are those of `target`."""
    target = _smooth(target, inside, spread)
    gain = np.ones_like(target)
    for _ in range(3):  # again, since a gain that varies with place shifts the means a little
        gain = np.clip(gain * target / _smooth(lesion * gain, inside, spread), 0.7, 1.25)
    return tuple(np.ascontiguousarray(gain[..., channel], dtype=np.float32) for channel in range(3))


def _gain_cells(window: Window) -> tuple[slice, slice]:
    """The cells of GAIN_PX that lie whole in a window."""
    x, y = window.x0 // GAIN_PX, window.y0 // GAIN_PX
    return slice(y, y + window.height // GAIN_PX), slice(x, x + window.width // GAIN_PX)


def _samples(maps: Maps, inside: NDArray[np.bool_]) -> Map:
    """Concentrations (bytes) of a part of the pixels of the cells that are `inside`."""
    every = GAIN_PX // 4
    rows, columns = (4 * extent for extent in inside.shape)
    picked = np.repeat(np.repeat(inside, 4, axis=0), 4, axis=1)
    return np.stack([values[::every, ::every][:rows, :columns][picked] for values in maps], axis=-1).astype(np.float64)


def _cell_means(pixels: Bytes) -> Map:
    """Mean red, green and blue of the cells of GAIN_PX that lie whole in a picture."""
    height, width = pixels.shape[0] // GAIN_PX, pixels.shape[1] // GAIN_PX
    rows = pixels[: height * GAIN_PX, : width * GAIN_PX].reshape(height, GAIN_PX, width * GAIN_PX * 4)
    sums = rows.sum(axis=1, dtype=np.uint32).reshape(height, width, GAIN_PX, 4).sum(axis=2)
    return sums[..., :3] / GAIN_PX**2


def _smooth(values: Map, inside: NDArray[np.bool_], spread: float) -> Map:
    """Gaussian mean over the cells that are `inside`."""
    weight = ndimage.gaussian_filter(inside.astype(np.float64), spread)[..., None] + 1e-9
    return (ndimage.gaussian_filter(values * inside[..., None], (spread, spread, 0)) + 1e-9) / weight


def _drop_dust(view: _View, pixels: Bytes) -> None:
    for x, y, radius in view.anatomy.dust_um.tolist():
        box = view.box_px(x, y, radius * 2)
        if box is None:
            continue
        distance, turn = view.polar(box, x, y)
        edge = radius * (1 + 0.35 * np.cos(2 * TURNS + x) + 0.25 * np.cos(3 * TURNS + y))
        shade = _soft(edge.astype(np.float32)[turn.astype(np.int32)] - distance, 1.2)
        here = pixels[box[1] : box[3], box[0] : box[2], :3]
        here[...] = np.round(here * (1 - 0.6 * shade[..., None]))
