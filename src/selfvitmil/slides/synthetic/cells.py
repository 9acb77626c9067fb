"""Images of cells, and textures of the background: a fixed collection for every pixel size.

Concentrations of haematoxylin and eosin are stored as bytes, with H_UNIT and E_UNIT byte values per unit.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import scipy.fft
from numpy.typing import NDArray
from scipy import ndimage

from selfvitmil.slides.synthetic.anatomy import (
    BLAST,
    HISTIOCYTE,
    LYMPHOCYTE,
    RED_CELL,
    SPINDLE,
    TUMOUR_BODY,
    TUMOUR_NUCLEUS,
)
from selfvitmil.slides.synthetic.grid import Map

Bytes = NDArray[np.uint8]

BLOCK_PX = 512
"""Largest edge of a window."""
H_UNIT, E_UNIT = 64.0, 100.0
"""Byte values of one unit of concentration."""


def soft(inside_um: Map, width_um: float) -> Map:
    """Return a smooth step from 0 to 1 across an edge, as wide as the optical blur."""
    t = np.clip(inside_um / width_um + 0.5, 0, 1)
    return t * t * (3 - 2 * t)


def to_bytes(values: Map, unit: float) -> Bytes:
    return np.clip(values * unit + 0.5, 0, 255).astype(np.uint8)


# ---------------------------------------------------------------------------------------------------- textures


@dataclass(frozen=True, eq=False)
class Textures:
    """Periodic noise of unit variance; arrays are long enough that each window of a block is a slice."""

    grain: Map
    mesh: Map
    wave: Map
    fibre: Map
    """One-dimensional: 16 values per micron."""
    sensor: Bytes

    def window(self, name: str, x0: int, y0: int, width: int, height: int) -> Map:
        texture: Map = getattr(self, name)
        period = len(texture) - BLOCK_PX
        x0, y0 = x0 % period, y0 % period
        return texture[y0 : y0 + height, x0 : x0 + width]


FIBRE_LENGTH = 1 << 14
SENSOR_PX = 384


@lru_cache(maxsize=4)
def textures(mpp: float) -> Textures:
    rng = np.random.default_rng(11)
    grain, mesh, wave = (
        _periodic_noise(rng, period, scale_um / mpp) for period, scale_um in ((480, 0.55), (640, 1.3), (800, 7.0))
    )
    fibre = ndimage.gaussian_filter1d(rng.standard_normal(FIBRE_LENGTH), 8, mode="wrap") * 4
    fibre += ndimage.gaussian_filter1d(rng.standard_normal(FIBRE_LENGTH), 30, mode="wrap") * 6
    sensor = np.round(rng.normal(0, 1.2, (SENSOR_PX, SENSOR_PX, 4))).astype(np.int8).view(np.uint8)
    sensor = np.tile(sensor, (BLOCK_PX // SENSOR_PX + 2, BLOCK_PX // SENSOR_PX + 2, 1))
    return Textures(grain, mesh, wave, (fibre / fibre.std()).astype(np.float32), sensor)


def _periodic_noise(rng: np.random.Generator, period: int, scale_px: float) -> Map:
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
    """Polar coordinates around the centre of an image, in microns."""

    x: Map
    y: Map
    mpp: float

    @classmethod
    def of(cls, radius_um: float, mpp: float) -> _Disc:
        reach = int(np.ceil(radius_um / mpp))
        steps = np.arange(-reach, reach + 1, dtype=np.float32) * np.float32(mpp)
        return cls(steps[None, :], steps[:, None], mpp)

    def inside(self, rng: np.random.Generator, radius: float, stretch: float, wobble: float, angle: float) -> Map:
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

    def noise(self, rng: np.random.Generator, name: str) -> Map:
        height, width = len(self.y), self.x.shape[1]
        return textures(self.mpp).window(name, int(rng.integers(600)), int(rng.integers(600)), width, height)


def _lymphocyte(rng: np.random.Generator, mpp: float) -> Stamp:
    """A small, round, dark nucleus with clumps of chromatin."""
    disc = _Disc.of(5.2, mpp)
    inside = disc.inside(rng, rng.uniform(2.9, 3.75), rng.uniform(1.0, 1.3), 0.11, rng.uniform(0, np.pi))
    dark, focus = rng.triangular(0.75, 1.25, 1.75), rng.choice([0.9, 1.2, 1.8], p=[0.45, 0.4, 0.15])
    chromatin = 1 + 0.24 * disc.noise(rng, "grain") + 0.17 * disc.noise(rng, "mesh")
    rim = rng.uniform(-0.05, 0.2) * np.exp(-(((inside - 0.6) / 0.6) ** 2))
    return Stamp(to_bytes(dark * soft(inside, focus) * (chromatin + rim), H_UNIT))


def _vesicular(rng: np.random.Generator, mpp: float, radius: float, dark: float) -> Stamp:
    """A larger, paler nucleus with a rim and small nucleoli, in a little cytoplasm."""
    disc = _Disc.of(radius + 3.5, mpp)
    inside = disc.inside(rng, radius * 0.93, rng.uniform(1.0, 1.55), 0.12, rng.uniform(0, np.pi))
    nucleus = soft(inside, 1.0) * (1 + 0.3 * disc.noise(rng, "grain") + 0.22 * disc.noise(rng, "mesh"))
    haematoxylin = dark * (nucleus + 0.45 * np.exp(-(((inside - 0.45) / 0.5) ** 2)))
    for _ in range(rng.integers(0, 3)):
        x, y = rng.uniform(-0.5, 0.5, 2) * radius
        haematoxylin += 0.7 * np.exp(-((disc.x - x) ** 2 + (disc.y - y) ** 2) / rng.uniform(0.2, 0.5))
    return Stamp(to_bytes(haematoxylin, H_UNIT), to_bytes(0.22 * soft(inside + 1.8, 1.6), E_UNIT))


def _spindle(rng: np.random.Generator, mpp: float, angle: float) -> Stamp:
    """The long thin nucleus of a fibroblast or an endothelial cell."""
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
