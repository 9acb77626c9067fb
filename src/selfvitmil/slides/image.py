"""Read what OpenSlide does not: TIFF with levels in SubIFDs or without tiles, and ordinary PNG and JPEG images.

OME-TIFF stores its smaller levels in SubIFDs, of which OpenSlide sees none, and may store red, green and blue as three
pages. TIFF files of image software have strips instead of tiles. tifffile reads the layout of such files. Each tile or
strip is then decoded by libtiff: it is given to Pillow as a TIFF file of its own, which serves every compression with
one function. PNG and JPEG are decoded completely, so their size is limited, and the decoded images are cached.

Only 8-bit RGB is accepted: how other values become colours is for whoever made the file to say.
"""

from __future__ import annotations

import io
import itertools
import os
import struct
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import tifffile
from numpy.typing import NDArray
from PIL import Image

from selfvitmil.errors import SlideError
from selfvitmil.slides.base import DAMAGED, Box, Slide, read_at, without_path
from selfvitmil.slides.jpegtiff import JPEG, REDUCED_IMAGE, RGB, TileCache, shared_cache
from selfvitmil.slides.resample import Pixels

MAX_IMAGE_PX = 150_000_000
"""Largest image, or strip of a TIFF, that is decoded as a whole: 450 MB of memory."""
IMAGE_CACHE_BYTES = 1 << 30
"""Size of the cache of images and strips that are too large for the cache of tiles, per process."""
LARGE_BYTES = 16 << 20
STRIP_BYTES = 1 << 20
"""Uncompressed pixels without tiles are read in strips of about this size."""

MAGIC = {b"\x89PNG\r\n\x1a\n": "png", b"\xff\xd8\xff": "jpeg"}
TIFF_MAGIC = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
NONE, GREY, SEPARATE = 1, 1, 2
COMPRESSIONS = {NONE: "none", 5: "lzw", JPEG: "jpeg", 8: "deflate", 32946: "deflate", 32773: "packbits"}
CONVERT = "Convert it to a tiled, pyramidal TIFF: `vips tiffsave in out.tif --tile --pyramid --compression jpeg`"


@dataclass(frozen=True, eq=False)
class SegmentedLevel:
    """Positions of the tiles or strips of one level in the file."""

    size: tuple[int, int]
    """(width, height) in the level's own pixels, as `segment_size`."""
    segment_size: tuple[int, int]
    num_across: int
    offsets: NDArray[np.int64]
    """(planes, segments): one plane with all colours, or one each for red, green and blue."""
    counts: NDArray[np.int64]
    compression: int
    photometric: int = RGB
    samples: int = 3
    """Values per pixel of a plane."""
    predictor: int = 1
    tables: bytes = b""
    """JPEG tables shared by all segments."""


@dataclass(eq=False)
class ImageLayout:
    """An open file. Closes itself when it is no longer referenced."""

    kind: str
    """`png`, `jpeg` or `generic-tiff`."""
    sizes: tuple[tuple[int, int], ...]
    levels: tuple[SegmentedLevel, ...]
    """Empty for PNG and JPEG."""
    properties: dict[str, str]
    """Under the names that OpenSlide uses."""
    compression: str
    warnings: tuple[str, ...]
    descriptor: int
    number: int = field(default_factory=itertools.count().__next__)
    """Distinguishes the cached pixels of this opening from all others."""

    @property
    def adds_to(self) -> bool:
        """Whether OpenSlide, which may read the file too, would miss smaller levels or take one colour for grey."""
        return any(len(level.offsets) > 1 for level in self.levels) or len(self.sizes) > 1

    def __del__(self) -> None:
        os.close(self.descriptor)


# ---------------------------------------------------------------------------------------------------- layout


def open_layout(path: Path) -> ImageLayout | None:
    """Open a PNG, JPEG or TIFF file; None for other files. Raises SlideError where it cannot be read here."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        head = read_at(descriptor, 8, 0)
        kind = next((kind for magic, kind in MAGIC.items() if head.startswith(magic)), "")
        if not kind and not head.startswith(TIFF_MAGIC):
            os.close(descriptor)
            return None
        return _image_layout(path, kind, descriptor) if kind else _tiff_layout(path, descriptor)
    except BaseException as error:
        os.close(descriptor)
        if isinstance(error, SlideError | OSError) or not isinstance(error, Exception):
            raise
        # A malformed file can make tifffile fail in any way.
        raise _unsuitable(path, f"its layout is unusual ({type(error).__name__}: {error})", DAMAGED) from None


def _unsuitable(path: Path, why: str, how: str = CONVERT, code: str = "unsupported-image") -> SlideError:
    return SlideError(f"{path.name}: the image cannot be used as a slide", without_path(why, path), how, code=code)


def _check_pixels(path: Path, what: str, size: tuple[int, int]) -> None:
    if size[0] * size[1] > MAX_IMAGE_PX:
        raise _unsuitable(
            path,
            f"{what} {size[0]:,} x {size[1]:,} pixels, which would be decoded as a whole; the limit is "
            f"{MAX_IMAGE_PX // 1_000_000} million",
            code="image-too-large",
        )


def _image_layout(path: Path, kind: str, descriptor: int) -> ImageLayout:
    """Return the layout of a PNG or JPEG file from its header."""
    try:
        with _opened(path, "PNG", "JPEG") as image:
            size, mode = image.size, image.mode
            # Without this check Pillow would decode a whole PNG to find the tag.
            turned = "exif" in image.info and image.getexif().get(0x0112, 1) != 1
    except Image.DecompressionBombError:
        raise _unsuitable(
            path,
            f"its header asks for more than the limit of {MAX_IMAGE_PX // 1_000_000} million pixels",
            code="image-too-large",
        ) from None
    except (OSError, SyntaxError, ValueError) as error:
        raise SlideError(
            f"{path.name}: the slide cannot be opened", without_path(str(error), path), DAMAGED, code="unreadable-slide"
        ) from None
    _check_pixels(path, "it has", size)
    deep = kind == "png" and read_at(descriptor, 1, 24) == b"\x10"  # Pillow would drop the lower bits unsaid
    if deep or mode not in ("RGB", "RGBA", "P"):
        found = "16 bits per colour" if deep else f"colours of the kind {mode}"
        raise _unsuitable(path, f"it has {found}, not 8-bit RGB", "Save it as 8-bit RGB")
    note = "its EXIF tag asks for a rotation, which is ignored: positions are those of the stored pixels"
    return ImageLayout(kind, (size,), (), {}, kind, (note,) if turned else (), descriptor)


def _opened(source: Path | io.BytesIO, *formats: str) -> Image.Image:
    """Open an image with Pillow, whose own, lower limit of pixels only warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        return Image.open(source, formats=formats)


def _tiff_layout(path: Path, descriptor: int) -> ImageLayout:
    with tifffile.TiffFile(path) as tiff:
        if not _has_all_pages(tiff):
            reason = "a directory of its pages is missing, which many programs write at the end of the file"
            raise SlideError(f"{path.name}: the file is truncated", reason, DAMAGED, code="truncated-slide")
        first = tiff.pages.first
        levels = tuple(_segmented_level(path, pages) for pages in _level_pages(path, tiff, first))
        properties = _properties(first)
    length = os.fstat(descriptor).st_size
    missing = sum(int(((level.offsets + level.counts > length) & (level.counts > 0)).sum()) for level in levels)
    if missing:
        total = sum(level.counts.size for level in levels)
        raise SlideError(
            f"{path.name}: the file is truncated",
            f"{missing} of its {total} tiles or strips are beyond its end",
            DAMAGED,
            code="truncated-slide",
        )
    sizes, compression = tuple(level.size for level in levels), COMPRESSIONS[levels[0].compression]
    return ImageLayout("generic-tiff", sizes, levels, properties, compression, (), descriptor)


def _has_all_pages(tiff: tifffile.TiffFile) -> bool:
    """Return whether no page is followed by a directory that is not in the file; tifffile passes over such."""
    number, form, file = len(tiff.pages), tiff.tiff, tiff.filehandle
    if not number:
        return False
    file.seek(tiff.pages[number - 1].offset)
    (num_tags,) = struct.unpack(form.tagnoformat, file.read(form.tagnosize))
    file.seek(num_tags * form.tagsize, 1)
    following = file.read(form.offsetsize)
    if len(following) < form.offsetsize:
        return False
    (offset,) = struct.unpack(form.offsetformat, following)
    return offset == 0 or offset in {page.offset for page in tiff.pages}  # some programs end in a loop


def _properties(page: tifffile.TiffPage) -> dict[str, str]:
    """Return description and microns per pixel of a page under OpenSlide's names."""
    found = {"tiff.ImageDescription": page.description}
    per_unit = {2: 25_400.0, 3: 10_000.0}.get(int(page.resolutionunit or 0))
    for axis, tag in (("x", "XResolution"), ("y", "YResolution")):
        value = page.tags.valueof(tag)
        if per_unit and value and value[0] and value[1]:
            found[f"openslide.mpp-{axis}"] = repr(per_unit * value[1] / value[0])
    return found


def _level_pages(path: Path, tiff: tifffile.TiffFile, first: tifffile.TiffPage) -> list[list[Any]]:
    """Return the pages of each level, largest first: one, or three where each has one colour."""
    planes: list[Any] = [first]
    if first.samplesperpixel == 1 and 'SizeC="3"' in first.description and len(tiff.pages) >= 3:
        planes = [tiff.pages[k] for k in range(3)]
    smaller = [list(pages) for pages in zip(*(plane.pages or () for plane in planes if plane.subifds), strict=True)]
    if not smaller and len(planes) == 1:
        others = [page for page in tiff.pages if isinstance(page, tifffile.TiffPage) and page.index]
        smaller = [[page] for page in others if page.subfiletype & REDUCED_IMAGE]
    smaller = [pages for pages in smaller if _is_level(pages[0], first)]
    if any(page.shape != pages[0].shape for pages in (planes, *smaller) for page in pages):
        raise _unsuitable(path, "its three colours differ in size")
    return [planes, *sorted(smaller, key=lambda pages: -pages[0].imagewidth)]


def _is_level(page: tifffile.TiffPage, first: tifffile.TiffPage) -> bool:
    """Return whether a page is a smaller copy of the first, in the same colours."""
    ratio = first.imagewidth / page.imagewidth
    return ratio > 1 and abs(first.imagelength / ratio - page.imagelength) < 2 and page.dtype == first.dtype


def _segmented_level(path: Path, pages: list[Any]) -> SegmentedLevel:
    page = pages[0]
    compression, photometric = int(page.compression), int(page.photometric)
    planar = page.planarconfig == SEPARATE and page.samplesperpixel > 1
    num_planes = 3 if planar else len(pages)
    samples = 1 if num_planes == 3 else int(page.samplesperpixel)
    if compression not in COMPRESSIONS:
        raise _unsuitable(path, f"its compression, {tifffile.COMPRESSION(compression).name}, is not read here")
    colours = photometric == RGB or (compression == JPEG and num_planes == 1) or len(pages) == 3
    if page.bitspersample != 8 or not colours or samples * num_planes not in (3, 4) or page.fillorder != 1:
        found = f"{page.bitspersample}-bit {page.photometric.name} with {page.samplesperpixel} values per pixel"
        raise _unsuitable(path, f"it is {found}, not 8-bit RGB", "Save it as 8-bit RGB")
    size = page.imagewidth, page.imagelength
    segment = (page.tilewidth, page.tilelength) if page.is_tiled else (size[0], min(page.rowsperstrip, size[1]))
    offsets = np.concatenate([np.asarray(one.dataoffsets, np.int64) for one in pages]).reshape(num_planes, -1)
    counts = np.concatenate([np.asarray(one.databytecounts, np.int64) for one in pages]).reshape(num_planes, -1)
    num_across, num_down = -(-size[0] // segment[0]), -(-size[1] // segment[1])
    if offsets.shape != counts.shape or offsets.shape[1] != num_across * num_down:
        raise _unsuitable(path, "positions of its tiles or strips are missing", DAMAGED)
    if compression == NONE and not page.is_tiled and offsets.shape[1] == 1:
        offsets, counts, segment = _split(offsets, size, samples)
    _check_pixels(path, "it stores pieces of", segment)
    tables = page.jpegtables or b""
    shape = size, segment, num_across, offsets, counts
    return SegmentedLevel(*shape, compression, photometric, samples, int(page.predictor or 1), tables)


def _split(
    offsets: NDArray[np.int64], size: tuple[int, int], samples: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], tuple[int, int]]:
    """Return offsets, byte counts and size of shorter strips for planes that are one uncompressed strip each."""
    width, height = size
    rows = max(1, STRIP_BYTES // (width * samples))
    top = np.arange(0, height, rows, dtype=np.int64)
    counts = np.minimum(rows, height - top) * width * samples
    return (
        offsets + top * width * samples,
        np.broadcast_to(counts, (len(offsets), len(top))),
        (width, min(rows, height)),
    )


# ---------------------------------------------------------------------------------------------------- pixels


def decode(path: Path, layout: ImageLayout, index: int, number: int) -> Pixels:
    """Decode one tile, strip or image to RGB; raises ValueError or OSError."""
    if not layout.levels:
        with _opened(path, "PNG", "JPEG") as image:
            if image.size != layout.sizes[0]:
                raise OSError("the file has changed since it was opened")
            image.load()
            return _rgb(image)
    level = layout.levels[index]
    width, height = level.segment_size
    if level.num_across * level.segment_size[0] == level.size[0] == width:  # a strip; the last one may be shorter
        height = min(height, level.size[1] - number * height)
    planes: list[Pixels] = []
    for offset, count in zip(level.offsets[:, number].tolist(), level.counts[:, number].tolist(), strict=True):
        data = read_at(layout.descriptor, count, offset)
        if len(data) != count:
            raise OSError(f"the file ends {count - len(data)} bytes before the end of a tile or strip")
        planes.append(_plane(data, level, width, height))
    return planes[0] if len(planes) == 1 else np.stack(planes, axis=-1)


def _plane(data: bytes, level: SegmentedLevel, width: int, height: int) -> Pixels:
    if level.compression == NONE and level.samples != 4:
        if len(data) < width * height * level.samples:
            raise ValueError(f"a tile or strip has {len(data)} bytes, {width * height * level.samples} are needed")
        shape = (height, width, 3) if level.samples == 3 else (height, width)
        return np.frombuffer(data, np.uint8, width * height * level.samples).reshape(shape)
    with _opened(io.BytesIO(_as_tiff(data, level, width, height)), "TIFF") as image:
        return np.array(image) if level.samples == 1 else _rgb(image)


def _rgb(image: Image.Image) -> Pixels:
    """Return RGB pixels; transparent pixels were not scanned and become white."""
    if image.mode in ("RGBA", "P", "PA") and (image.mode != "P" or "transparency" in image.info):
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, (255, 255, 255, 255)), image)
    return np.array(image.convert("RGB"))


def _as_tiff(data: bytes, level: SegmentedLevel, width: int, height: int) -> bytes:
    """Return a tile or strip as a TIFF file with one strip."""
    samples, tables = level.samples, level.tables
    tags = {
        256: [width],
        257: [height],
        258: [8] * samples,
        259: [level.compression],
        262: [level.photometric if samples > 1 else GREY],
        273: [0],
        277: [samples],
        278: [height],
        279: [len(data)],
    }
    if level.compression != JPEG:
        tags[317] = [level.predictor]
    if samples == 4:
        tags[338] = [2]  # the fourth value is alpha
    at = 8 + 2 + 12 * (len(tags) + bool(tables)) + 4
    bits, tables_at = at, at + 8
    tags[273] = [tables_at + len(tables)]
    entries = [
        struct.pack("<HHII", tag, 3, samples, bits)
        if tag == 258 and samples > 2
        else struct.pack("<HHII", tag, 4, 1, values[0])
        for tag, values in tags.items()
    ]
    if tables:
        entries.append(struct.pack("<HHII", 347, 7, len(tables), tables_at))
    entries.sort(key=lambda entry: struct.unpack_from("<H", entry)[0])
    head = struct.pack("<2sHIH", b"II", 42, 8, len(entries)) + b"".join(entries) + bytes(4)
    return head + struct.pack("<4H", 8, 8, 8, 8) + tables + data


_large = TileCache(IMAGE_CACHE_BYTES)
os.register_at_fork(after_in_child=_large.clear)


class ImageSlide(Slide):
    """A slide whose TIFF tiles or strips, or whose whole PNG or JPEG image, are decoded by Pillow."""

    reader: ClassVar[str] = "image"

    def _open(self) -> ImageLayout:
        try:
            layout = open_layout(self.path)
        except OSError as error:
            reason = without_path(str(error), self.path)
            raise SlideError(
                f"{self.name}: the slide can no longer be opened", reason, DAMAGED, code="unreadable-slide"
            ) from None
        if layout is None or layout.sizes != tuple(level.size for level in self.levels):
            raise SlideError(
                f"{self.name}: the file has changed since it was first opened",
                "its levels are different",
                "Run the command again",
                code="slide-changed",
            )
        return layout

    def _pixels(self, index: int, shrink: int, box: Box, dtype: type[np.generic]) -> NDArray[Any]:
        layout: ImageLayout = self._use()
        size = layout.sizes[index]
        segment = layout.levels[index].segment_size if layout.levels else size
        left, top, right, bottom = box
        x0, y0, x1, y1 = max(left, 0), max(top, 0), min(right, size[0]), min(bottom, size[1])
        canvas = np.full((bottom - top, right - left, 3), 255, dtype)
        if x0 >= x1 or y0 >= y1:
            return canvas
        num_across = -(-size[0] // segment[0])
        for row in range(y0 // segment[1], -(-y1 // segment[1])):
            ya, yb = max(y0, row * segment[1]), min(y1, (row + 1) * segment[1])
            for column in range(x0 // segment[0], -(-x1 // segment[0])):
                xa, xb = max(x0, column * segment[0]), min(x1, (column + 1) * segment[0])
                pixels = self._segment(layout, index, row * num_across + column)
                if pixels is not None:
                    part = pixels[ya - row * segment[1] : yb - row * segment[1]]
                    canvas[ya - top : yb - top, xa - left : xb - left] = part[
                        :, xa - column * segment[0] : xb - column * segment[0]
                    ]
        return canvas

    def _segment(self, layout: ImageLayout, index: int, number: int) -> Pixels | None:
        """Return the pixels of one tile, strip or image; None if nothing was stored."""
        if layout.levels and not layout.levels[index].counts[:, number].all():
            return None
        key = (-1 - layout.number, index, number, 1)  # negative: never the key of a JPEG tile in the shared cache
        pixels = _large.get(key)
        pixels = shared_cache.get(key) if pixels is None else pixels
        if pixels is None:
            try:
                pixels = decode(self.path, layout, index, number)
            except (ValueError, OSError, SyntaxError) as error:
                raise self._unreadable(index, (0, 0, *layout.sizes[index]), str(error)) from None
            (_large if pixels.nbytes > LARGE_BYTES else shared_cache).put(key, pixels)
        return pixels
