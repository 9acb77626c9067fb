"""Read slides through OpenSlide: all formats it supports, and the metadata of formats that `jpegtiff` reads faster.

OpenSlide takes level-0 positions also when reading another level, and interpolates if the position falls between that
level's pixels. Positions are chosen on a pixel or nearest to one: on a level whose size is not an exact fraction of
level 0, the pixels may therefore be off by half a level-0 pixel.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import openslide
from numpy.typing import NDArray
from PIL import Image

from selfvitmil.engine.work import TRANSIENT_ERRNOS
from selfvitmil.errors import SlideError
from selfvitmil.slides.base import DAMAGED, Box, Slide, without_path


@dataclass(frozen=True)
class Probe:
    """Metadata of a file as OpenSlide reports it."""

    vendor: str
    sizes: tuple[tuple[int, int], ...]
    properties: Mapping[str, str]
    handle: openslide.OpenSlide


def probe(path: Path) -> Probe:
    """Open a file with OpenSlide; raise SlideError if it is not a slide."""
    handle = _open(path)
    properties = dict(handle.properties)
    return Probe(properties.get("openslide.vendor", "unknown"), handle.level_dimensions, properties, handle)


def _open(path: Path) -> openslide.OpenSlide:
    try:
        return openslide.OpenSlide(path)
    except openslide.OpenSlideUnsupportedFormatError:
        raise SlideError(
            f"{path.name}: not a slide",
            "its content is in none of the formats that OpenSlide supports, whatever its suffix",
            "Check that the file is complete (copy it again), or convert it to a tiled, pyramidal TIFF",
            code="not-a-slide",
        ) from None
    except (openslide.OpenSlideError, OSError) as error:
        trouble = SlideError(
            f"{path.name}: the slide cannot be opened", without_path(str(error), path), DAMAGED, code="unreadable-slide"
        )
        trouble.transient = _is_io_failure(error)
        raise trouble from None


def _is_io_failure(error: Exception) -> bool:
    """Return whether the drive failed: OpenSlide reports it only as text."""
    return any(words in str(error) for words in ("I/O error", *map(os.strerror, TRANSIENT_ERRNOS)))


class OpenSlideSlide(Slide):
    """A slide read by OpenSlide."""

    reader: ClassVar[str] = "openslide"

    def _open(self) -> openslide.OpenSlide:
        return _open(self.path)

    def _pixels(self, index: int, shrink: int, box: Box, dtype: type[np.generic]) -> NDArray[Any]:
        handle: openslide.OpenSlide = self._use()
        width, height = self.levels[index].size
        x0, y0, x1, y1 = box
        inner = max(x0, 0), max(y0, 0), min(x1, width), min(y1, height)
        if inner == box:
            return self._read_region(handle, index, box).astype(dtype, copy=False)
        canvas = np.full((y1 - y0, x1 - x0, 3), 255, dtype)
        if inner[0] < inner[2] and inner[1] < inner[3]:
            pixels = self._read_region(handle, index, inner)
            canvas[inner[1] - y0 : inner[3] - y0, inner[0] - x0 : inner[2] - x0] = pixels
        return canvas

    def _read_region(self, handle: openslide.OpenSlide, index: int, box: Box) -> NDArray[np.uint8]:
        x0, y0, x1, y1 = box
        downsample = handle.level_downsamples[index]
        place_l0 = round(x0 * downsample), round(y0 * downsample)
        try:
            picture = handle.read_region(place_l0, index, (x1 - x0, y1 - y0))
        except openslide.OpenSlideError as error:
            self.close()  # after an error OpenSlide refuses all further reads; other regions may be fine
            trouble = self._unreadable(index, box, str(error))
            trouble.transient = _is_io_failure(error)
            raise trouble from None
        return _on_white(picture)


def _on_white(picture: Image.Image) -> NDArray[np.uint8]:
    """Return RGB pixels; transparent pixels were not scanned and become white."""
    if picture.getchannel("A").getextrema() != (255, 255):
        glass = Image.new("RGBA", picture.size, (255, 255, 255, 255))
        picture = Image.alpha_composite(glass, picture)
    return np.array(picture.convert("RGB"))
