"""Colours of a synthetic slide: concentrations of the two stains in, pixels out.

Colours follow the Beer-Lambert law, through one table of 256 x 256 colours. A lesion must not be recognizable by its
mean colour. `mix_palette` renders the site of each lesion twice, as the normal tissue it replaces and as the lesion. It
finds the strengths of the two stains that give lesions the usual colour of the slide's normal tissue, and then a small
local gain per channel that ensures this in every part of each lesion.
"""

# scipy has no types.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage, optimize

from selfvitmil.slides.synthetic.anatomy import Anatomy, Field
from selfvitmil.slides.synthetic.painter import (
    E_UNIT,
    H_UNIT,
    SENSOR_PX,
    TURNS,
    Bytes,
    Concentrations,
    View,
    Window,
    paint,
    paint_both,
    soft,
    textures,
    windows,
)


@dataclass(frozen=True, eq=False)
class Stain:
    """Stain colours of a slide: optical density = concentrations times strengths times `vectors`."""

    vectors: Field
    """(3, 2): unit optical density (natural logarithm) in red, green, blue of haematoxylin and eosin."""
    strengths: tuple[float, float]
    """Optical density of one unit of concentration of each stain."""
    glass: tuple[float, float, float]
    """Red, green and blue of clear glass."""

    def table(self) -> NDArray[np.uint32]:
        """Return colours as RGBX words, indexed by haematoxylin byte * 256 + eosin byte."""
        h = np.arange(256)[:, None, None] * (self.strengths[0] / H_UNIT) * self.vectors[:, 0]
        e = np.arange(256)[None, :, None] * (self.strengths[1] / E_UNIT) * self.vectors[:, 1]
        colours = np.zeros((256, 256, 4), np.uint8)
        colours[..., :3] = np.round(np.asarray(self.glass) * np.exp(-(h + e)))
        return colours.reshape(-1, 4).view(np.uint32).ravel()

    def neither(self) -> Field:
        """Return the direction in optical density that is orthogonal to both stains."""
        direction = np.cross(self.vectors[:, 0], self.vectors[:, 1])
        return direction / np.linalg.norm(direction)


def draw_stain(rng: np.random.Generator) -> Stain:
    """Draw stain vectors, strengths and illumination as they vary between laboratories and scanners."""
    blueness = rng.uniform(0, 1)  # the two stains of a laboratory shift together
    haematoxylin = np.array([0.48, 0.75, 0.45]) + blueness * np.array([0.12, 0.0, -0.17]) + rng.normal(0, 0.02, 3)
    eosin = np.array([0.24, 0.78, 0.56]) + blueness * np.array([-0.04, 0.14, -0.24]) + rng.normal(0, 0.02, 3)
    vectors = np.stack([haematoxylin / np.linalg.norm(haematoxylin), eosin / np.linalg.norm(eosin)], axis=-1)
    strengths = (float(rng.uniform(0.75, 1.1)), float(rng.uniform(0.7, 1.1)))
    light = rng.uniform(238, 246)
    red, green, blue = (float(value) for value in np.clip(light + rng.normal(0, 1.2, 3), 234, 248))
    return Stain(vectors, strengths, (red, green, blue))


# ---------------------------------------------------------------------------------------------------- pixels


@dataclass(frozen=True, eq=False)
class Palette:
    """Everything that converts concentrations to colours."""

    table: NDArray[np.uint32]
    lesion_table: NDArray[np.uint32]
    gains: tuple[Field, ...]
    """Gain in red, green and blue of light through lesions, on cells of GAIN_PX; empty without lesions."""
    painted: dict[Window, Concentrations]
    """Windows that were rendered to find the above."""
    tint: Field
    """Grey levels by which red, green and blue follow the unevenness of the illumination's hue."""


GAIN_PX = 16
MATCH_UM = 26.0
"""Standard deviation of the Gaussian over which the mean colour of a lesion is matched."""
USUAL_UM = 112.0
"""Edge of the squares whose colour is compared: a tile of 224 pixels at 0.5 um."""
TINT = 2.5
"""Standard deviation of the illumination's hue, in grey levels: larger than the mismatch allowed for lesions."""
MOST_SURVEYED = 64
"""Approximate number of windows used for the mean colour of a slide's normal tissue."""


def render(anatomy: Anatomy, palette: Palette, window: Window, noise_seed: int) -> Bytes:
    """Return the pixels of a window as (height, width, 4) RGBX bytes."""
    concentrations = palette.painted.get(window) or paint(anatomy, window)
    pixels = coloured(concentrations, palette.table)
    view = View(anatomy, window)
    if palette.gains and view.any_above(anatomy.lesion_um, -8):
        cover = view.lesion_cover(view.upsample(anatomy.lesion_um))
        own = coloured(concentrations, palette.lesion_table)
        for channel, gain in enumerate(palette.gains):
            lit = np.minimum(own[..., channel] * view.upsample(gain, GAIN_PX), 248)
            pixels[..., channel] = pixels[..., channel] * (1 - cover) + lit * cover + 0.5
    _drop_dust(view, pixels)
    dx, dy = np.random.default_rng((noise_seed, window.x0, window.y0)).integers(0, SENSOR_PX, 2)
    # Wrapping bytes add like signed numbers; glass and ink are far enough from 255 and 0.
    pixels += textures(anatomy.mpp).sensor[dy : dy + window.height, dx : dx + window.width]
    tint = view.upsample(anatomy.tint)
    for channel, share in enumerate(palette.tint.tolist()):
        pixels[..., channel] += np.rint(share * tint).astype(np.int8).view(np.uint8)
    return pixels


def coloured(concentrations: Concentrations, table: NDArray[np.uint32]) -> Bytes:
    """Return the colours of stain concentrations as (height, width, 4) RGBX bytes."""
    words = table.take((concentrations[0].astype(np.uint16) << 8) | concentrations[1])
    return words.view(np.uint8).reshape(*words.shape, 4)


def _drop_dust(view: View, pixels: Bytes) -> None:
    for x, y, radius in view.anatomy.dust_um.tolist():
        box = view.box_px(x, y, radius * 2)
        if box is None:
            continue
        distance, turn = view.polar(box, x, y)
        edge = radius * (1 + 0.35 * np.cos(2 * TURNS + x) + 0.25 * np.cos(3 * TURNS + y))
        shade = soft(edge.astype(np.float32)[turn.astype(np.int32)] - distance, 1.2)
        here = pixels[box[1] : box[3], box[0] : box[2], :3]
        here[...] = np.round(here * (1 - 0.6 * shade[..., None]))


# ---------------------------------------------------------------------------------------------------- lesions' colours


def mix_palette(anatomy: Anatomy, stain: Stain) -> Palette:
    """Return the colours of a slide; its lesions have the mean colour of its normal tissue."""
    table, tint = stain.table(), TINT * stain.neither()
    if not anatomy.lesions_um:
        return Palette(table, table, (), {}, tint)
    survey = _survey(anatomy, table, tint)
    inside, target = survey.inside, survey.target()
    samples = np.concatenate(
        [_samples(concentrations, inside[_gain_cells(window)]) for window, concentrations in survey.painted.items()]
    )
    strengths = _balance(stain, samples[:: len(samples) // 20_000 + 1], target[inside].mean(axis=0))
    lesion_table = Stain(stain.vectors, strengths, stain.glass).table()
    lesion = np.zeros_like(target)
    for window, concentrations in survey.painted.items():
        lesion[_gain_cells(window)] = _cell_means(coloured(concentrations, lesion_table))
    gains = _local_gains(target, lesion, inside, MATCH_UM / (GAIN_PX * anatomy.mpp))
    return Palette(table, lesion_table, gains, survey.painted, tint)


@dataclass(frozen=True, eq=False)
class _Survey:
    """Samples of a slide on cells of GAIN_PX: all of its lesions and some of the rest."""

    normal: Field
    """Mean colours; in lesions, those of the normal tissue they replace."""
    inside: NDArray[np.bool_]
    """In a lesion."""
    tissue: NDArray[np.bool_]
    """In normal tissue."""
    light: Field
    """Grey levels added by the hue of the illumination."""
    painted: dict[Window, Concentrations]
    cell_um: float

    def target(self) -> Field:
        """Return the target mean colours of lesions: those of the replaced tissue, shifted per lesion to the usual
        colour.

        Without the shift, a few lesions would have a distinct colour by chance.
        """
        usual = self._usual_colour()
        lesions: NDArray[np.int32] = ndimage.label(self.inside)[0]  # pyright: ignore[reportIndexIssue, reportAssignmentType]
        target = self.normal.copy()
        for lesion in range(1, lesions.max() + 1):
            cells = lesions == lesion
            inherited = np.sqrt(target[cells])  # the square root keeps values below glass
            target[cells] = (usual - self.light[cells].mean(axis=0)) * inherited / inherited.mean(axis=0)
        return target

    def _usual_colour(self) -> Field:
        """Return the median of the mean colours of tile-sized squares in normal tissue.

        Not their mean: fibres and gaps would give it a hue that hardly any square has.
        """
        edge = max(1, round(USUAL_UM / self.cell_um))
        share = ndimage.uniform_filter(self.tissue.astype(np.float64), edge, mode="constant")
        masked = np.moveaxis((self.normal + self.light) * self.tissue[..., None], -1, 0)
        sums = np.stack([ndimage.uniform_filter(channel, edge, mode="constant") for channel in masked], axis=-1)
        full = share > min(0.95, 0.98 * share.max())
        return np.median(sums[full] / share[full][:, None], axis=0)


def _survey(anatomy: Anatomy, table: NDArray[np.uint32], tint: Field) -> _Survey:
    shape = (-(-anatomy.size_px[1] // GAIN_PX), -(-anatomy.size_px[0] // GAIN_PX))
    normal, light = np.zeros((*shape, 3)), np.zeros((*shape, 3))
    inside, tissue = np.zeros(shape, bool), np.zeros(shape, bool)
    painted: dict[Window, Concentrations] = {}
    with_tissue = [w for w in windows(anatomy.size_px) if View(anatomy, w).any_above(anatomy.depth_um, 0)]
    every = len(with_tissue) // MOST_SURVEYED + 1
    for number, window in enumerate(with_tissue):
        view = View(anatomy, window)
        if view.any_above(anatomy.lesion_um, 0):
            without, painted[window] = paint_both(anatomy, window)
        elif number % every == 0:
            without = painted[window] = paint(anatomy, window)
        else:
            continue
        cells = _gain_cells(window)
        normal[cells] = _cell_means(coloured(without, table))
        light[cells] = _at_cells(view, anatomy.tint)[..., None] * tint
        inside[cells] = _at_cells(view, anatomy.lesion_um) > 0
        tissue[cells] = (_at_cells(view, anatomy.depth_um) > 0) & ~inside[cells]
    return _Survey(normal, inside, tissue, light, painted, GAIN_PX * anatomy.mpp)


def _balance(stain: Stain, samples: Field, target: Field) -> tuple[float, float]:
    """Return the strengths of the two stains for which the lesions' samples (bytes) have the mean colour `target`."""

    def miss(scales: Field) -> Field:
        density = samples * (scales * stain.strengths / (H_UNIT, E_UNIT)) @ stain.vectors.T
        return (np.asarray(stain.glass) * np.exp(-density)).mean(axis=0) - target

    scales = optimize.least_squares(miss, (1.0, 1.0), bounds=(0.6, 1.7)).x
    return float(stain.strengths[0] * scales[0]), float(stain.strengths[1] * scales[1])


def _local_gains(target: Field, lesion: Field, inside: NDArray[np.bool_], spread: float) -> tuple[Field, ...]:
    """Return gains for which the local means of `lesion` equal those of `target` everywhere inside."""
    target = _smooth(target, inside, spread)
    gain = np.ones_like(target)
    for _ in range(3):  # iterated, since a varying gain shifts the means a little
        gain = np.clip(gain * target / _smooth(lesion * gain, inside, spread), 0.7, 1.25)
    return tuple(np.ascontiguousarray(gain[..., channel], dtype=np.float32) for channel in range(3))


def _at_cells(view: View, values: Field) -> Field:
    """Return a field at the centres of the cells of GAIN_PX that are completely in a window."""
    middles = view.upsample(values)[GAIN_PX // 2 :: GAIN_PX, GAIN_PX // 2 :: GAIN_PX]
    return middles[: view.window.height // GAIN_PX, : view.window.width // GAIN_PX]


def _gain_cells(window: Window) -> tuple[slice, slice]:
    """Return the cells of GAIN_PX that are completely in a window."""
    x, y = window.x0 // GAIN_PX, window.y0 // GAIN_PX
    return slice(y, y + window.height // GAIN_PX), slice(x, x + window.width // GAIN_PX)


def _samples(concentrations: Concentrations, inside: NDArray[np.bool_]) -> Field:
    """Return concentrations (bytes) of some of the pixels of the cells that are `inside`."""
    every = GAIN_PX // 4
    rows, columns = (4 * extent for extent in inside.shape)
    picked = np.repeat(np.repeat(inside, 4, axis=0), 4, axis=1)
    return np.stack([values[::every, ::every][:rows, :columns][picked] for values in concentrations], axis=-1).astype(
        np.float64
    )


def _cell_means(pixels: Bytes) -> Field:
    """Return mean red, green and blue of the cells of GAIN_PX that are completely in an image."""
    height, width = pixels.shape[0] // GAIN_PX, pixels.shape[1] // GAIN_PX
    rows = pixels[: height * GAIN_PX, : width * GAIN_PX].reshape(height, GAIN_PX, width * GAIN_PX * 4)
    sums = rows.sum(axis=1, dtype=np.uint32).reshape(height, width, GAIN_PX, 4).sum(axis=2)
    return sums[..., :3] / GAIN_PX**2


def _smooth(values: Field, inside: NDArray[np.bool_], spread: float) -> Field:
    """Return the Gaussian mean over the cells that are `inside`."""
    weight = ndimage.gaussian_filter(inside.astype(np.float64), spread)[..., None] + 1e-9
    return (ndimage.gaussian_filter(values * inside[..., None], (spread, spread, 0)) + 1e-9) / weight
