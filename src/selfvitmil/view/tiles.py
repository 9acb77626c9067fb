"""Pictures of slides for the viewer: DeepZoom geometry, open slides, tiles and thumbnails as JPEG.

The geometry is that of OpenSlide's DeepZoom: level `max_level` has the slide's full size, each level below half of it,
rounded up; tiles of 254 px that share 1 px with each neighbour. Pixels come through our own readers, so a reader sees
what the encoder saw; label and macro images are never read.
"""

from __future__ import annotations

import math
import os
import threading
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from cachetools import LRUCache
from numpy.typing import NDArray

from selfvitmil.localize.grid import GridRef
from selfvitmil.slides import Slide, SlideRef

TILE_PX = 254
OVERLAP_PX = 1
THUMBNAIL_PX = 240
"""Longer edge of a thumbnail."""
JPEG_QUALITY = 85

FileState = tuple[int, int, int]
"""Inode, size and time of a file; changes when the file does."""


def state_of(stat: os.stat_result) -> FileState:
    """Return what changes when the file does."""
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


@dataclass(frozen=True)
class DeepZoom:
    """Levels and tiles of a slide of this size."""

    size_l0: tuple[int, int]

    @property
    def max_level(self) -> int:
        """Return the level of full size."""
        return math.ceil(math.log2(max(self.size_l0)))

    def downsample(self, level: int) -> int:
        """Return level-0 pixels per pixel of the level."""
        return 1 << (self.max_level - level)

    def size(self, level: int) -> tuple[int, int]:
        """Return (width, height) of the level."""
        width, height = (-(-edge // self.downsample(level)) for edge in self.size_l0)
        return width, height

    def num_tiles(self, level: int) -> tuple[int, int]:
        """Return (columns, rows) of tiles of the level."""
        columns, rows = (-(-edge // TILE_PX) for edge in self.size(level))
        return columns, rows

    def has_tile(self, level: int, column: int, row: int) -> bool:
        """Return whether there is such a tile; cheap for any numbers."""
        if not 0 <= level <= self.max_level:
            return False
        columns, rows = self.num_tiles(level)
        return 0 <= column < columns and 0 <= row < rows

    def box(self, level: int, column: int, row: int) -> tuple[int, int, int, int]:
        """Return (x, y, width, height) of the tile with its overlap, in pixels of the level."""
        spans: list[tuple[int, int]] = []
        for place, edge in zip((column, row), self.size(level), strict=True):
            start = max(0, place * TILE_PX - OVERLAP_PX)
            end = min(edge, (place + 1) * TILE_PX + OVERLAP_PX)
            spans.append((start, end - start))
        (x, width), (y, height) = spans
        return x, y, width, height


@dataclass(frozen=True)
class OpenedSlide:
    """A slide and its levels."""

    slide: Slide
    zoom: DeepZoom
    mpp: float | None
    """None where it is unknown: pictures do without, scale bars and heatmaps cannot."""


@dataclass(eq=False)
class _Entry:
    opening: threading.Lock = field(default_factory=threading.Lock)
    state: FileState | None = None
    opened: OpenedSlide | None = None

    def close(self) -> None:
        """Close the slide; whoever reads from it now keeps its handle until done."""
        if self.opened is not None:
            self.opened.slide.close()


class _Entries(LRUCache[Path, _Entry]):
    def popitem(self) -> tuple[Path, _Entry]:
        path, entry = super().popitem()
        entry.close()
        return path, entry


class OpenSlides:
    """Open slides, at most `max_open`; one whose file has changed since is opened anew."""

    def __init__(self, max_open: int = 16):
        self._entries = _Entries(max_open)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, ref: SlideRef | GridRef) -> OpenedSlide:
        """Return the slide; FileNotFoundError when its file is gone, SlideError when it does not open."""
        path = ref.path
        state = state_of(os.stat(path))
        with self._lock:
            entry = self._entries.setdefault(path, _Entry())
        with entry.opening:
            if entry.opened is None or entry.state != state:
                entry.close()
                entry.opened, entry.state = open_for_viewing(ref), state
            return entry.opened

    def close(self) -> None:
        """Close all."""
        with self._lock:
            while self._entries:
                self._entries.popitem()


def open_for_viewing(ref: SlideRef | GridRef) -> OpenedSlide:
    """Open a slide; raises SlideError when it does not open."""
    slide = ref.open()
    mpp = slide.info.mpp.value
    if mpp is None:
        slide = ref.at_mpp(1.0).open()  # any value serves: levels are ratios
    return OpenedSlide(slide, DeepZoom(slide.size_l0), mpp)


# ---------------------------------------------------------------------------------------------------- pictures


def read_tile(opened: OpenedSlide, level: int, column: int, row: int) -> NDArray[np.uint8]:
    """Return the pixels of a tile that exists."""
    x, y, width, height = opened.zoom.box(level, column, row)
    downsample = opened.zoom.downsample(level)
    return opened.slide.read_region(x * downsample, y * downsample, (width, height), opened.slide.mpp * downsample)


def read_thumbnail(opened: OpenedSlide) -> NDArray[np.uint8]:
    """Return the whole slide, its longer edge `THUMBNAIL_PX` (or what it has, where that is less)."""
    downsample = max(1.0, max(opened.zoom.size_l0) / THUMBNAIL_PX)
    width, height = (max(1, round(edge / downsample)) for edge in opened.zoom.size_l0)
    return opened.slide.read_region(0, 0, (width, height), opened.slide.mpp * downsample)


def to_jpeg(pixels: NDArray[np.uint8]) -> bytes:
    """Return the picture as JPEG without any metadata."""
    import simplejpeg  # pyright: ignore[reportMissingTypeStubs]

    return simplejpeg.encode_jpeg(np.ascontiguousarray(pixels), JPEG_QUALITY, "RGB", "420")
