"""Write an image as a slide file: JPEG tiles on several levels in an Aperio-like SVS or a generic TIFF.

The image is given as a function that returns any window of it, so that level 0 is never held completely in memory:
stripes of four rows of tiles are rendered, encoded and halved; only a quarter-size copy is kept. The same pixels give
identical bytes.

| layout  | looks like           | levels             | colour | microns per pixel               |
|---------|----------------------|--------------------|--------|---------------------------------|
| `svs40` | Aperio, 40x          | 1, 4, 16: no 20x   | 4:2:0  | in the description              |
| `svs20` | Aperio, 20x included | 1, 2, 4, ...       | 4:2:2  | in the description              |
| `tiff`  | Camelyon16           | 1, 2, 4, ...       | 4:4:4  | as pixels per centimetre (tags) |
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

import numpy as np
import simplejpeg  # pyright: ignore[reportMissingTypeStubs]
from numpy.typing import NDArray
from PIL import Image

from selfvitmil.errors import ConfigError
from selfvitmil.slides.synthetic.painter import BLOCK_PX
from selfvitmil.store.files import atomic_path

Layout = Literal["svs40", "svs20", "tiff"]
Pixels = NDArray[np.uint8]
Render = Callable[[int, int, int, int], Pixels]
"""(x0, y0, width, height) in level-0 pixels -> (height, width, 4) RGBX."""

SMALLEST_PX = 128
"""Minimum length of the longer edge of a level."""


@dataclass(frozen=True)
class _Form:
    suffix: str
    step: int
    tile_px: int
    subsampling: tuple[int, int]

    @property
    def jpeg_subsampling(self) -> str:
        return {(2, 2): "420", (2, 1): "422", (1, 1): "444"}[self.subsampling]


FORMS: dict[Layout, _Form] = {
    "svs40": _Form(".svs", 4, 256, (2, 2)),
    "svs20": _Form(".svs", 2, 256, (2, 1)),
    "tiff": _Form(".tif", 2, 512, (1, 1)),
}


@dataclass(frozen=True, eq=False)
class EncodedLevel:
    """One level as JPEG tiles, row by row."""

    size: tuple[int, int]
    tiles: list[bytes]
    places: NDArray[np.int64] | None = None
    """Index into `tiles` of each position, if tiles are repeated."""


@dataclass(frozen=True, eq=False)
class EncodedPyramid:
    """All levels of a slide, largest first, and a thumbnail."""

    layout: Layout
    levels: list[EncodedLevel]
    thumbnail: Pixels
    jpeg_quality: int


def downsamples(size_l0: tuple[int, int], layout: Layout) -> list[int]:
    """Return the downsample of every level; there are at least two levels."""
    step = FORMS[layout].step
    found = [1, step]
    while max(size_l0) // (found[-1] * step) >= SMALLEST_PX:
        found.append(found[-1] * step)
    return found


def encode_pyramid(size_l0: tuple[int, int], render: Render, layout: Layout, jpeg_quality: int) -> EncodedPyramid:
    """Render an image stripe by stripe and encode all its levels."""
    form, (width, height) = FORMS[layout], size_l0
    wanted = downsamples(size_l0, layout)
    tiles: dict[int, list[bytes]] = {downsample: [] for downsample in wanted}
    small = np.zeros((-(-height // 4), -(-width // 4), 4), np.uint8)

    def encode(downsample: int, pixels: Pixels) -> None:
        if downsample in tiles:
            cropped = pixels[:, : width // downsample]
            tiles[downsample] += _encoded(cropped, form, jpeg_quality)

    for y0 in range(0, height, 4 * form.tile_px):
        stripe = _stripe(render, width, y0, min(4 * form.tile_px, height - y0))
        encode(1, stripe)
        half = _reduced(stripe, 2)
        encode(2, half[: height // 2 - y0 // 2])
        quarter = _reduced(half, 2)
        small[y0 // 4 : y0 // 4 + quarter.shape[0]] = quarter
    for downsample in wanted:
        if downsample >= 4:
            encode(downsample, _reduced(small, downsample // 4)[: height // downsample])
    levels = [EncodedLevel((width // d, height // d), tiles[d]) for d in wanted]
    thumbnail = _reduced(small, max(1, max(small.shape) // 512))
    return EncodedPyramid(layout, levels, thumbnail, jpeg_quality)


def _stripe(render: Render, width: int, y0: int, height: int) -> Pixels:
    stripe = np.empty((height, width, 4), np.uint8)
    for y in range(0, height, BLOCK_PX):
        for x in range(0, width, BLOCK_PX):
            part = stripe[y : y + BLOCK_PX, x : x + BLOCK_PX]
            part[...] = render(x, y0 + y, part.shape[1], part.shape[0])
    return stripe


def _reduced(pixels: Pixels, factor: int) -> Pixels:
    """Return means over squares of `factor` pixels; a partly covered last square counts."""
    height, width = pixels.shape[:2]
    if factor == 1:
        return pixels
    picture = Image.frombuffer("RGBX", (width, height), np.ascontiguousarray(pixels), "raw", "RGBX", 0, 1)
    return np.asarray(picture.reduce(factor))


def _encoded(pixels: Pixels, form: _Form, jpeg_quality: int) -> Iterator[bytes]:
    """Yield the JPEG tiles of some rows of tiles; tiles over the edge are padded with the last pixels."""
    height, width = pixels.shape[:2]
    edge = form.tile_px
    if height % edge or width % edge:
        pixels = np.pad(pixels, ((0, -height % edge), (0, -width % edge), (0, 0)), mode="edge")
    for y in range(0, height, edge):
        for x in range(0, width, edge):
            yield encode_jpeg(pixels[y : y + edge, x : x + edge], form.jpeg_subsampling, jpeg_quality)


def encode_jpeg(pixels: Pixels, subsampling: str, quality: int) -> bytes:
    """Encode RGBX pixels as one JPEG."""
    return simplejpeg.encode_jpeg(np.ascontiguousarray(pixels), quality, "RGBX", subsampling)


# ---------------------------------------------------------------------------------------------------- the file


def write_pyramid(path: Path, pyramid: EncodedPyramid, mpp: float | None) -> None:
    """Write an encoded slide; without `mpp` the file does not state it."""
    pages = [_level_page(pyramid, level, mpp) for level in pyramid.levels]
    if pyramid.layout != "tiff":
        pages.insert(1, _thumbnail_page(pyramid))  # the position that scanners use
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        _write_tiff(file, pages)


@dataclass(frozen=True, eq=False)
class _Page:
    tags: dict[int, tuple[int, bytes]]
    """Tag number -> type and value."""
    chunks: list[bytes]
    places: NDArray[np.int64]
    """Index of the chunk of each tile or strip of the page."""
    offsets_tag: int
    counts_tag: int


ASCII, SHORT, LONG, RATIONAL = 2, 3, 4, 5
BYTES_OF = {ASCII: 1, SHORT: 2, LONG: 4, RATIONAL: 8}
TILE_OFFSETS, TILE_COUNTS, STRIP_OFFSETS, STRIP_COUNTS = 324, 325, 273, 279


def _shorts(*values: int) -> tuple[int, bytes]:
    return SHORT, np.array(values, "<u2").tobytes()


def _longs(*values: int) -> tuple[int, bytes]:
    return LONG, np.array(values, "<u4").tobytes()


def _picture_tags(size: tuple[int, int], subsampling: tuple[int, int]) -> dict[int, tuple[int, bytes]]:
    """Return the tags of an 8-bit YCbCr image in JPEG."""
    return {
        254: _longs(0),
        256: _longs(size[0]),
        257: _longs(size[1]),
        258: _shorts(8, 8, 8),
        259: _shorts(7),
        262: _shorts(6),
        277: _shorts(3),
        284: _shorts(1),
        530: _shorts(*subsampling),
    }


def _level_page(pyramid: EncodedPyramid, level: EncodedLevel, mpp: float | None) -> _Page:
    form, first = FORMS[pyramid.layout], pyramid.levels[0].size
    tags = _picture_tags(level.size, form.subsampling) | {322: _longs(form.tile_px), 323: _longs(form.tile_px)}
    if pyramid.layout != "tiff":
        tags[270] = (ASCII, _description(pyramid, level.size, mpp).encode("ascii") + b"\0")
    else:
        if level.size != first:
            tags[254] = _longs(1)  # a reduced copy of another page
        if mpp is not None:
            per_cm = round(1e7 / (mpp * first[0] / level.size[0]))
            tags[282] = tags[283] = (RATIONAL, np.array([per_cm, 1000], "<u4").tobytes())
            tags[296] = _shorts(3)  # centimetres
    places = np.arange(len(level.tiles)) if level.places is None else level.places
    return _Page(tags, level.tiles, places, TILE_OFFSETS, TILE_COUNTS)


def _thumbnail_page(pyramid: EncodedPyramid) -> _Page:
    """Return a thumbnail in one strip, as in Aperio files."""
    height, width = pyramid.thumbnail.shape[:2]
    first = pyramid.levels[0].size
    text = f"Aperio (made slide)\r\n{first[0]}x{first[1]} -> {width}x{height} - |"
    tags = _picture_tags((width, height), (1, 1)) | {270: (ASCII, text.encode("ascii") + b"\0"), 278: _longs(height)}
    picture = encode_jpeg(pyramid.thumbnail, "444", pyramid.jpeg_quality)
    return _Page(tags, [picture], np.zeros(1, np.int64), STRIP_OFFSETS, STRIP_COUNTS)


def _description(pyramid: EncodedPyramid, size: tuple[int, int], mpp: float | None) -> str:
    """Return an Aperio-like description of a level; readers recognize the format by its first word."""
    width, height = pyramid.levels[0].size
    edge = FORMS[pyramid.layout].tile_px
    text = f"Aperio (made slide)\r\n{width}x{height} [0,0 {width}x{height}] ({edge}x{edge})"
    if size != (width, height):
        text += f" -> {size[0]}x{size[1]}"
    text += f" JPEG/YCC Q={pyramid.jpeg_quality}"
    if mpp is not None:
        text += f"|AppMag = {40 if mpp < 0.36 else 20}|MPP = {mpp:.6g}"
    return text


def _write_tiff(file: IO[bytes], pages: list[_Page]) -> None:
    """Write a classic little-endian TIFF: all directories, then the chunks of all pages.

    tifffile writes existing JPEG data only with imagecodecs installed, and cannot share the bytes of equal tiles.
    """
    lengths = [len(_directory(page, 0, 0, is_last=False)) for page in pages]
    data_at = [8 + sum(lengths)]
    for page in pages:
        data_at.append(data_at[-1] + sum(map(len, page.chunks)))
    if data_at[-1] >= 1 << 32:
        raise ConfigError(
            "the synthetic slide would be larger than 4 GB",
            "classic TIFF cannot store more",
            "Choose a smaller size",
            code="synthetic-slide-too-large",
        )
    file.write(struct.pack("<2sHI", b"II", 42, 8))
    at = 8
    for page, length, start in zip(pages, lengths, data_at, strict=False):
        file.write(_directory(page, at, start, is_last=page is pages[-1]))
        at += length
    for page in pages:
        file.writelines(page.chunks)


def _directory(page: _Page, at: int, data_at: int, *, is_last: bool) -> bytes:
    """Return the directory of a page at byte `at` with its chunks at `data_at`; its length depends on neither."""
    counts = np.array([len(chunk) for chunk in page.chunks])
    offsets = data_at + np.cumsum(counts) - counts
    tags = page.tags | {
        page.offsets_tag: (LONG, offsets[page.places].astype("<u4").tobytes()),
        page.counts_tag: (LONG, counts[page.places].astype("<u4").tobytes()),
    }
    entries, values = struct.pack("<H", len(tags)), b""
    values_at = at + 2 + 12 * len(tags) + 4
    for number, (kind, value) in sorted(tags.items()):
        entries += struct.pack("<HHI", number, kind, len(value) // BYTES_OF[kind])
        if len(value) <= 4:
            entries += value.ljust(4, b"\0")
        else:
            entries += struct.pack("<I", values_at + len(values))
            values += value + b"\0" * (len(value) % 2)
    return entries + struct.pack("<I", 0 if is_last else values_at + len(values)) + values
