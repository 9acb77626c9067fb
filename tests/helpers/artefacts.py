"""Plant artefacts into pixels of a slide, with the mask of where they are. All sizes in microns, at any resolution."""

from __future__ import annotations

import numpy as np
from PIL import Image, ImageDraw
from scipy import ndimage

INKS = {"blue": (20, 60, 190), "green": (20, 130, 70), "black": (25, 25, 28), "red": (225, 25, 45)}


def region(shape: tuple[int, ...], mpp: float, center_um: tuple[float, float], radius_um: float) -> np.ndarray:
    y, x = np.mgrid[: shape[0], : shape[1]] * mpp
    return np.hypot(x - center_um[0], y - center_um[1]) < radius_um


def stroke(shape: tuple[int, ...], mpp: float, points_um: list[tuple[float, float]], width_um: float) -> np.ndarray:
    image = Image.new("1", shape[1::-1])
    ImageDraw.Draw(image).line([(x / mpp, y / mpp) for x, y in points_um], 1, round(width_um / mpp), joint="curve")
    return np.asarray(image)


def pen(pixels: np.ndarray, mask: np.ndarray, ink: str, cover: float = 0.85) -> np.ndarray:
    """Ink covers most of the light, with soft edges."""
    alpha = ndimage.gaussian_filter(mask.astype(np.float32), 3)[..., None] * cover
    return (pixels * (1 - alpha) + np.array(INKS[ink]) * alpha).astype(np.uint8)


def blur(pixels: np.ndarray, mask: np.ndarray, mpp: float, sigma_um: float) -> np.ndarray:
    blurred = ndimage.gaussian_filter(pixels.astype(np.float32), (sigma_um / mpp, sigma_um / mpp, 0))
    return np.where(mask[..., None], blurred, pixels).astype(np.uint8)


def fold(pixels: np.ndarray, mask: np.ndarray, mpp: float) -> np.ndarray:
    """A second and a third layer of the same tissue: their transmissions multiply."""
    light = pixels.astype(np.float32) / 255
    layers = light * np.roll(light, round(150 / mpp), axis=0) * np.roll(light, round(210 / mpp), axis=1)
    return np.where(mask[..., None], layers * 255, pixels).astype(np.uint8)


def bubble(pixels: np.ndarray, mpp: float, center_um: tuple[float, float], radius_um: float) -> tuple[np.ndarray, ...]:
    """A dark grey rim of 30 um; returns the pixels and the mask of the rim."""
    rim = region(pixels.shape, mpp, center_um, radius_um) & ~region(pixels.shape, mpp, center_um, radius_um - 30)
    alpha = ndimage.gaussian_filter(rim.astype(np.float32), 2)[..., None] * 0.9
    return (pixels * (1 - alpha) + 70 * alpha).astype(np.uint8), rim


def blood(pixels: np.ndarray, mask: np.ndarray, mpp: float, seed: int = 0) -> np.ndarray:
    """Packed red cells of 7 um in the colour that they have on H&E slides of the lung."""
    rng = np.random.default_rng(seed)
    small = tuple(max(1, round(edge * mpp / 7)) for edge in mask.shape)
    shade = np.asarray(Image.fromarray(rng.random(small, dtype=np.float32)).resize(mask.shape[::-1], 3))[..., None]
    red = np.array([228, 118, 112]) + shade * np.array([10, 40, 38])
    return np.where(mask[..., None], red, pixels).clip(0, 255).astype(np.uint8)
