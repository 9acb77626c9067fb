"""Tiles with waves in four directions: patterns that a tiny encoder can learn in a few steps."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from PIL import Image


def wave_tiles(number: int, size_px: int, frequency: float = 0.25) -> Iterator[Image.Image]:
    """Yield tiles; number k shows the direction k % 4."""
    rng = np.random.default_rng(0)
    y, x = np.mgrid[:size_px, :size_px]
    for k in range(number):
        kind = k % 4
        wave = np.sin((x * (1 + kind) + y * (4 - kind)) * frequency + rng.uniform(0, 6))
        pixels = 150 + 60 * wave[..., None] * rng.uniform(0.5, 1, 3) + rng.normal(0, 8, (size_px, size_px, 3))
        yield Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
