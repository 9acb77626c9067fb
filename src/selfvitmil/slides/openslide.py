"""Slides through OpenSlide: every format that it knows, and the metadata of those that others read faster.

OpenSlide speaks of places in level-0 pixels also when it reads another level, and interpolates between that level's
pixels when the place falls between them. Places are chosen that fall on a pixel, or nearest to one: on a level whose
size is no exact fraction of level 0, OpenSlide's pixels may so be off by half a level-0 pixel.
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
    """What OpenSlide says about a file."""

    vendor: str
    sizes: tuple[tuple[int, int], ...]
    properties: Mapping[str, str]
    handle: openslide.OpenSlide


def probe(path: Path) -> Probe:
    """Open a file with OpenSlide; raises SlideError when it is no slide."""
    handle = _open(path)
    properties = dict(handle.properties)
    return Probe(properties.get("openslide.vendor", "unknown"), handle.level_dimensions, properties, handle)


def _open(path: Path) -> openslide.OpenSlide:
    try:
        return openslide.OpenSlide(path)
    except openslide.OpenSlideUnsupportedFormatError:
        raise SlideError(
            f"{path.name}: this is not a slide",
            "its content is none of the formats that OpenSlide knows, whatever its name says",
            "Check that the file is whole (copy it again), or convert it to a tiled, pyramidal TIFF",
        ) from None
    except (openslide.OpenSlideError, OSError) as error:
        trouble = SlideError(f"{path.name}: the slide cannot be opened", without_path(str(error), path), DAMAGED)
        trouble.transient = _is_io_failure(error)
        raise trouble from None


def _is_io_failure(error: Exception) -> bool:
    """Whether the drive failed: OpenSlide says so in words only."""
    return any(words in str(error) for words in ("I/O error", *map(os.strerror, TRANSIENT_ERRNOS)))


class OpenSlideSlide(Slide):
    """A slide that OpenSlide reads."""

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
            self.close()  # OpenSlide refuses all further reading after an error; other regions may be sound
            trouble = self._unreadable(index, box, str(error))
            trouble.transient = _is_io_failure(error)
            raise trouble from None
        return _on_white(picture)


def _on_white(picture: Image.Image) -> NDArray[np.uint8]:
    """RGB pixels; what is transparent was never scanned, and shows white glass."""
    if picture.getchannel("A").getextrema() != (255, 255):
        glass = Image.new("RGBA", picture.size, (255, 255, 255, 255))
        picture = Image.alpha_composite(glass, picture)
    return np.array(picture.convert("RGB"))
