"""Fast reader for JPEG-compressed tiled TIFF, including SVS: tiles are decoded directly from the file.

tifffile reads the layout once; after that a read is `pread` of the needed JPEG tiles, libjpeg-turbo, and a copy into
place. Only files with the same meaning here and in OpenSlide are accepted: formats that it calls `aperio` or
`generic-tiff`, with the levels that it reports, 8-bit RGB or YCbCr JPEG in tiles. OpenSlide reads all others. At a
level's own resolution the pixels equal OpenSlide's exactly.

A stored tile is not a complete JPEG file: its tables may be stored separately (tag JPEGTables), and the TIFF, not the
JPEG, says whether it is RGB or YCbCr. Many Aperio files contain RGB without a marker, which a JPEG decoder would take
for YCbCr. So every tile gets a header that says which: an Adobe marker for RGB, a JFIF marker for YCbCr.

JPEG can be decoded at 1/2, 1/4 or 1/8 of its size in less time; `_shrink` decides when that is as good. Decoded tiles
are cached, because neighbouring tiles of a slide share them; the cache is shared by all slides of a process.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import simplejpeg  # pyright: ignore[reportMissingTypeStubs]
import tifffile
from cachetools import LRUCache
from numpy.typing import NDArray

from selfvitmil.errors import SlideError
from selfvitmil.slides.base import DAMAGED, Box, Slide, read_at, without_path
from selfvitmil.slides.resample import Grid, Pixels, reduce_whole

CACHE_BYTES = 64 << 20
"""Size of the cache of decoded tiles, shared by all slides of a process."""

# tifffile would print messages about damaged files; they are raised as errors instead.
logging.getLogger("tifffile").addHandler(logging.NullHandler())

JPEG, RGB, YCBCR, CONTIGUOUS, REDUCED_IMAGE = 7, 2, 6, 1, 1
JPEG_2000 = (33003, 33004, 33005, 34712)
SOI = b"\xff\xd8"
JFIF_MARKER = b"\xff\xe0\x00\x10JFIF\x00\x01\x01\x00\x00\x01\x00\x01\x00\x00"
ADOBE_RGB_MARKER = b"\xff\xee\x00\x0eAdobe\x00\x64\x00\x00\x00\x00\x00"


class UnsupportedLayout(Exception):
    """A layout that this reader does not support and OpenSlide reads instead; the message says why."""


class TruncatedFile(Exception):
    """A truncated slide file; the message says how much is missing."""


# ---------------------------------------------------------------------------------------------------- layout


@dataclass(frozen=True, eq=False)
class TiledLevel:
    """Positions of the JPEG tiles of one level in the file, row by row."""

    size: tuple[int, int]
    """(width, height) in the level's own pixels, as `tile_size`."""
    tile_size: tuple[int, int]
    num_across: int
    num_down: int
    offsets: NDArray[np.int64]
    counts: NDArray[np.int64]
    head: bytes
    """Bytes to put before each tile to make it a JPEG file."""
    subsampling: str
    """Chroma subsampling: `444` is none, `420` half of both edges."""


@dataclass(eq=False)
class Layout:
    """An open file. Closes itself when it is no longer referenced."""

    levels: tuple[TiledLevel, ...]
    descriptor: int
    identity: tuple[int, ...]
    """Distinguishes this file from others, and from itself after a change."""
    number: int = field(default_factory=itertools.count().__next__)
    """Distinguishes the cached tiles of this opening from all others."""

    @property
    def sizes(self) -> tuple[tuple[int, int], ...]:
        """(width, height) of the levels."""
        return tuple(level.size for level in self.levels)

    def __del__(self) -> None:
        os.close(self.descriptor)


def open_layout(path: Path, vendor: str) -> Layout:
    """Open a file of a format that OpenSlide calls `vendor`; raises UnsupportedLayout, TruncatedFile, OSError."""
    if vendor not in ("aperio", "generic-tiff"):
        raise UnsupportedLayout(f"{vendor} files are not supported")
    descriptor = os.open(path, os.O_RDONLY)
    try:
        levels = _read_levels(path, vendor, descriptor)
    except BaseException as error:
        os.close(descriptor)
        if isinstance(error, UnsupportedLayout | TruncatedFile | OSError) or not isinstance(error, Exception):
            raise
        # A malformed TIFF can make tifffile fail in any way; OpenSlide may still read it.
        raise UnsupportedLayout(f"its layout is unusual ({type(error).__name__}: {error})") from error
    status = os.fstat(descriptor)
    return Layout(levels, descriptor, (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns))


def _read_levels(path: Path, vendor: str, descriptor: int) -> tuple[TiledLevel, ...]:
    with tifffile.TiffFile(path) as tiff:
        levels = tuple(_tiled_level(page, descriptor) for page in _level_pages(tiff, vendor))
    _check_length(levels, os.fstat(descriptor).st_size)
    if vendor == "aperio" and len(levels) > 1 and any((level.counts == 0).any() for level in levels):
        # A known fault of some scanners; OpenSlide fills missing tiles of smaller levels from larger ones.
        raise UnsupportedLayout("tiles are missing, which OpenSlide fills in from larger levels")
    return levels


def _level_pages(tiff: tifffile.TiffFile, vendor: str) -> list[Any]:
    """Return the pages that are levels, largest first, with OpenSlide's rules."""
    pages = [page for page in tiff.pages if isinstance(page, tifffile.TiffPage) and page.is_tiled]
    if vendor == "generic-tiff":
        pages = [page for page in pages if page.index == 0 or page.subfiletype & REDUCED_IMAGE]
        pages.sort(key=lambda page: -page.imagewidth)
        if len(pages) == 1:
            pages += _sub_pages(pages[0])
    return pages


def _sub_pages(first: tifffile.TiffPage) -> list[Any]:
    """Return smaller levels in SubIFDs of the first page, as in OME-TIFF; OpenSlide sees the first page only."""
    pages: list[Any] = list(first.pages or ()) if first.subifds else []
    for page in pages:
        ratio = first.imagewidth / page.imagewidth
        is_level = page.subfiletype & REDUCED_IMAGE and abs(first.imagelength / ratio - page.imagelength) < 2
        if not is_level or ratio <= 1:
            raise UnsupportedLayout("the SubIFDs of its first page are not a pyramid")
    return sorted(pages, key=lambda page: -page.imagewidth)


def _tiled_level(page: tifffile.TiffPage, descriptor: int) -> TiledLevel:
    is_plain = (
        page.is_tiled
        and page.compression == JPEG
        and page.photometric in (RGB, YCBCR)
        and page.bitspersample == 8
        and page.samplesperpixel == 3
        and page.planarconfig == CONTIGUOUS
        and page.imagedepth == 1
        and page.tilewidth % 8 == 0
        and page.tilelength % 8 == 0
    )
    if not is_plain:
        raise UnsupportedLayout("not all levels are 8-bit colour JPEG in tiles")
    num_across, num_down = -(-page.imagewidth // page.tilewidth), -(-page.imagelength // page.tilelength)
    offsets = np.asarray(page.dataoffsets, np.int64)
    counts = np.asarray(page.databytecounts, np.int64)
    if not len(offsets) == len(counts) == num_across * num_down:
        raise UnsupportedLayout("positions of tiles are missing")
    marker = ADOBE_RGB_MARKER if page.photometric == RGB else JFIF_MARKER
    head = SOI + marker + _tables(page.jpegtables or b"")
    stored = np.flatnonzero(counts)
    subsampling = "444"
    if len(stored):
        tile = read_at(descriptor, int(counts[stored[0]]), int(offsets[stored[0]]))
        subsampling = _check_tile(head, tile, (page.tilewidth, page.tilelength))
    size, tile_size = (page.imagewidth, page.imagelength), (page.tilewidth, page.tilelength)
    return TiledLevel(size, tile_size, num_across, num_down, offsets, counts, head, subsampling)


def _tables(stream: bytes) -> bytes:
    """Return only the quantization and Huffman tables of the tag JPEGTables."""
    kept = [stream[start:stop] for code, start, stop in _segments(stream) if code in (0xDB, 0xC4)]
    return b"".join(kept)


def _check_tile(head: bytes, tile: bytes, tile_size: tuple[int, int]) -> str:
    """Check the markers of one tile; return its chroma subsampling."""
    codes = [code for code, start, _ in _segments(tile) if start >= _after_marks(tile)]
    if any(0xE0 <= code <= 0xEF for code in codes):
        raise UnsupportedLayout("its JPEG tiles have markers in unusual places")
    height, width, _, subsampling = simplejpeg.decode_jpeg_header(head + tile[_after_marks(tile) :])
    if (width, height) != tile_size:
        raise UnsupportedLayout("its JPEG tiles differ in size from what the TIFF says")
    return str(subsampling)


def _segments(stream: bytes) -> list[tuple[int, int, int]]:
    """Return (code, start, stop) of the marker segments of a JPEG stream, up to the first scan."""
    segments: list[tuple[int, int, int]] = []
    place = 2
    while place + 4 <= len(stream) and stream[place] == 0xFF and stream[place + 1] not in (0xD9, 0xDA):
        stop = place + 2 + int.from_bytes(stream[place + 2 : place + 4], "big")
        segments.append((stream[place + 1], place, stop))
        place = stop
    return segments


def _after_marks(tile: bytes) -> int:
    """Return where a tile's own header ends: after SOI and the application markers and comments that follow it."""
    place = 2
    while tile[place : place + 1] == b"\xff" and (
        b"\xe0" <= tile[place + 1 : place + 2] <= b"\xef" or tile[place + 1 : place + 2] == b"\xfe"
    ):
        place += 2 + int.from_bytes(tile[place + 2 : place + 4], "big")
    return place


def _check_length(levels: Sequence[TiledLevel], length: int) -> None:
    missing = sum(int(((level.offsets + level.counts > length) & (level.counts > 0)).sum()) for level in levels)
    if missing:
        total = sum(len(level.counts) for level in levels)
        raise TruncatedFile(f"{missing} of its {total} JPEG tiles are beyond its end")


def tiff_compression(path: Path) -> str:
    """Return the compression of the first page of a TIFF file; `unknown` for other files."""
    try:
        with tifffile.TiffFile(path) as tiff:
            code = tifffile.COMPRESSION(tiff.pages.first.compression)
    except Exception:  # not a TIFF, or one that tifffile cannot parse; OpenSlide reads it anyway
        return "unknown"
    return "jpeg 2000" if code in JPEG_2000 else code.name.lower()


# ---------------------------------------------------------------------------------------------------- cache


TileKey = tuple[int, int, int, int]
"""Number of the opening, level, tile, shrink factor."""


class TileCache:
    """LRU cache of decoded tiles, limited by their bytes. Thread-safe.

    A hit takes 0.34 us and a new tile 1.2 us (an OrderedDict by hand: 0.24 and 0.46 us), together about 1 % of the
    fastest read of a 224 px tile, 225 us.
    """

    def __init__(self, max_bytes: int):
        self.max_bytes = max_bytes
        self.clear()

    def clear(self) -> None:
        """Remove all tiles."""
        self._tiles: LRUCache[TileKey, Pixels] = LRUCache(self.max_bytes, getsizeof=lambda tile: tile.nbytes)
        self._lock = threading.Lock()

    def get(self, key: TileKey) -> Pixels | None:
        """Return a tile, None if it is not cached."""
        with self._lock:
            return self._tiles.get(key)

    def put(self, key: TileKey, tile: Pixels) -> None:
        """Add a tile, unless it is larger than the cache; the least recently used ones are removed."""
        if tile.nbytes <= self.max_bytes:
            with self._lock:
                self._tiles[key] = tile


shared_cache = TileCache(CACHE_BYTES)
# Another thread may hold the lock during a fork, and a child does not need its parent's tiles.
os.register_at_fork(after_in_child=shared_cache.clear)


# ---------------------------------------------------------------------------------------------------- slide


class JpegTiffSlide(Slide):
    """A slide whose JPEG tiles are decoded here."""

    reader: ClassVar[str] = "jpegtiff"

    def _open(self) -> Layout:
        try:
            layout = open_layout(self.path, self.vendor)
        except (UnsupportedLayout, TruncatedFile, OSError) as error:
            reason = without_path(str(error), self.path)
            raise SlideError(
                f"{self.name}: the slide can no longer be opened", reason, DAMAGED, code="unreadable-slide"
            ) from None
        if layout.sizes != tuple(level.size for level in self.levels):
            raise SlideError(
                f"{self.name}: the file has changed since it was first opened",
                "its levels are different",
                "Run the command again",
                code="slide-changed",
            )
        return layout

    def _shrink(self, index: int, grid: Grid) -> int:
        """Return the factor by which the JPEG decoder may downscale: 1, 2, 4 or 8.

        A JPEG decoder downscales by dropping high frequencies, which is close to the mean over 2, 4 or 8 pixels but not
        equal to it; and if a border of the result falls inside such a pixel, detail is lost that the area mean would
        keep. Difference from the area mean of the full pixels in grey levels, mean and 99th percentile, worst case of
        Camelyon16 patches, breast tiles at 40x, an Aperio region and hard-edged discs in noise, each at JPEG quality
        75, 90 and 95:

            borders on whole output pixels:  factor 2, by 2   4, by 4    8, by 4    8, by 8
                no subsampling                0.46   2         0.43   2   0.27   1   0.45   2
                4:2:0                         1.46  10         0.73   4   0.39   2   0.48   2
                4:2:2                         1.70  12         2.13  14   1.08   6   3.01  22
            borders anywhere, any subsampling, result of r downscaled pixels:
                factor 2.06 r 1  2.6 24     factor 4.1 r 2  1.7 11     factor 8.3 r 4  1.3 5     r 8  0.68 3

        With chroma subsampling the decoder downscales brightness and colours differently, while the colours of the full
        image are smoothed (as in OpenSlide). How much that matters depends on the slide, so it is measured.
        """
        layout: Layout = self._use()
        for shrink in (8, 4, 2):
            if grid.factor / shrink >= 8:
                return shrink
            if grid.factor >= shrink and grid.lies_on(shrink) and self._shrinks_faithfully(layout, index, shrink):
                return shrink
        return 1

    def _shrinks_faithfully(self, layout: Layout, index: int, shrink: int) -> bool:
        try:
            return shrinks_faithfully(layout, index, shrink)
        except OSError as error:
            raise self._unreadable(index, (0, 0, *layout.levels[index].size), str(error)) from None

    def _pixels(self, index: int, shrink: int, box: Box, dtype: type[np.generic]) -> NDArray[Any]:
        layout: Layout = self._use()
        level = layout.levels[index]
        tile_width, tile_height = (edge // shrink for edge in level.tile_size)
        width, height = (-(-edge // shrink) for edge in level.size)
        left, top, right, bottom = box
        x0, y0, x1, y1 = max(left, 0), max(top, 0), min(right, width), min(bottom, height)
        shape = (bottom - top, right - left, 3)
        canvas = np.empty(shape, dtype) if (x0, y0, x1, y1) == box else np.full(shape, 255, dtype)
        if x0 >= x1 or y0 >= y1:  # completely outside, maybe within the padding of the last tiles
            return canvas
        for row in range(y0 // tile_height, -(-y1 // tile_height)):
            tile_top = row * tile_height
            ya, yb = max(y0, tile_top), min(y1, tile_top + tile_height)
            for column in range(x0 // tile_width, -(-x1 // tile_width)):
                tile_left = column * tile_width
                xa, xb = max(x0, tile_left), min(x1, tile_left + tile_width)
                tile = self._tile(layout, index, row * level.num_across + column, shrink)
                place = canvas[ya - top : yb - top, xa - left : xb - left]
                if tile is None:
                    place[...] = 255
                else:
                    place[...] = tile[ya - tile_top : yb - tile_top, xa - tile_left : xb - tile_left]
        return canvas

    def _tile(self, layout: Layout, index: int, number: int, shrink: int) -> Pixels | None:
        """Return one decoded tile, None if nothing was scanned; pixels beyond the level's edges are undefined."""
        level = layout.levels[index]
        if not level.counts[number]:
            return None
        key = (layout.number, index, number, shrink)
        tile = shared_cache.get(key)
        if tile is None:
            try:
                tile = _decode(layout.descriptor, level, number, shrink)
            except (ValueError, OSError) as error:
                row, column = divmod(number, level.num_across)
                x, y = column * level.tile_size[0], row * level.tile_size[1]
                box = (x, y, min(x + level.tile_size[0], level.size[0]), min(y + level.tile_size[1], level.size[1]))
                raise self._unreadable(index, box, str(error)) from None
            shared_cache.put(key, tile)
        return tile


MAX_MEAN, MAX_P99 = 0.8, 4.0
"""Maximum difference in grey levels between a tile downscaled by the decoder and the mean of its full pixels."""
_known_faithful: dict[tuple[Any, ...], bool] = {}


def shrinks_faithfully(layout: Layout, index: int, shrink: int) -> bool:
    """Return whether the decoder's downscaling of this level is as good as the area mean; measured once per file if
    unclear.

    The 8 tiles with the most bytes, which have the most detail, and 8 spread over the level are tested; all must pass.
    Raises OSError if the drive fails: the result, and so the pixels, must not depend on a transient failure.
    """
    level = layout.levels[index]
    if level.subsampling == "444":
        return True
    key = (layout.identity, index, shrink)
    if key not in _known_faithful:
        stored = np.flatnonzero(level.counts)
        detailed = stored[np.argsort(level.counts[stored], kind="stable")][-8:]
        spread = stored[np.linspace(0, len(stored) - 1, 8).astype(int)] if len(stored) else stored
        tested = np.union1d(detailed, spread).tolist()
        _known_faithful[key] = all(_shrinks_well(layout.descriptor, level, number, shrink) for number in tested)
    return _known_faithful[key]


def _shrinks_well(descriptor: int, level: TiledLevel, number: int, shrink: int) -> bool:
    try:
        full = _decode(descriptor, level, number, 1)
        shrunk = _decode_jpeg(_stream(descriptor, level, number), level.tile_size, shrink)
    except ValueError:
        return True  # a damaged tile cannot be tested; reading it raises the error
    difference = np.abs(reduce_whole(full, shrink).astype(np.int16) - shrunk)
    return bool(difference.mean() <= MAX_MEAN and np.percentile(difference, 99) <= MAX_P99)


def _decode(descriptor: int, level: TiledLevel, number: int, shrink: int) -> Pixels:
    """Decode one tile; raises ValueError or OSError."""
    stream = _stream(descriptor, level, number)
    if shrink > 1 and not _ends_on_blocks(level, number):
        return _decode_edge(stream, level, number, shrink)
    return _decode_jpeg(stream, level.tile_size, shrink)


def _stream(descriptor: int, level: TiledLevel, number: int) -> bytes:
    """Return a tile as a complete JPEG file."""
    count = int(level.counts[number])
    data = read_at(descriptor, count, int(level.offsets[number]))
    if len(data) != count:
        raise ValueError(f"the file ends {count - len(data)} bytes before the end of this tile")
    return level.head + data[_after_marks(data) :]


def _ends_on_blocks(level: TiledLevel, number: int) -> bool:
    """Return whether no JPEG block (16 pixels with chroma subsampling) of this tile crosses the level's edge.

    The decoder would mix the undefined pixels beyond the edge into the last downscaled pixels.
    """
    row, column = divmod(number, level.num_across)
    return (level.size[0] % 16 == 0 or column < level.num_across - 1) and (
        level.size[1] % 16 == 0 or row < level.num_down - 1
    )


def _decode_edge(stream: bytes, level: TiledLevel, number: int, shrink: int) -> Pixels:
    """Decode a tile that crosses the level's edge, with white outside, and downscale it."""
    row, column = divmod(number, level.num_across)
    tile = _decode_jpeg(stream, level.tile_size, 1)
    tile[level.size[1] - row * level.tile_size[1] :] = 255
    tile[:, level.size[0] - column * level.tile_size[0] :] = 255
    return reduce_whole(tile, shrink)


def _decode_jpeg(stream: bytes, tile_size: tuple[int, int], shrink: int) -> Pixels:
    width, height = tile_size[0] // shrink, tile_size[1] // shrink
    smallest: dict[str, Any] = {"min_width": width, "min_height": height} if shrink > 1 else {}
    try:
        tile = simplejpeg.decode_jpeg(stream, **smallest)
    except ValueError as error:
        # Superfluous bytes before the end of a stream: nothing is missing.
        if "before marker 0xd9" not in str(error):
            raise ValueError(f"a JPEG tile is damaged ({error})") from None
        tile = simplejpeg.decode_jpeg(stream, strict=False, **smallest)
    if tile.shape != (height, width, 3):
        raise ValueError(f"a JPEG tile is {tile.shape[1]} x {tile.shape[0]} pixels instead of {width} x {height}")
    return tile
