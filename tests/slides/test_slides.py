"""Slides: both readers against OpenSlide's own pixels, the area mean against slow loops, and files that are no slides.

The slides are tiny and written here, with a TIFF writer of our own, so that every oddity of the format can be made.
"""

from __future__ import annotations

import errno
import io
import itertools
import json
import os
import pickle
import struct
import threading
import tracemalloc
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import openslide
import pytest
import simplejpeg
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from helpers.error_codes import has_code
from selfvitmil import geometry
from selfvitmil.cohort import SlideRow
from selfvitmil.engine import Engine, is_transient, work
from selfvitmil.errors import ConfigError, MissingMppError, SlideError
from selfvitmil.settings import EngineSettings, SlideSettings
from selfvitmil.slides import SlideCache, SlideRef, base, fingerprint, jpegtiff, open_slide
from selfvitmil.slides.base import find_mpp
from selfvitmil.slides.resample import Grid, _weighted, resample
from selfvitmil.stages.check import CheckJob, check_slide

# ---------------------------------------------------------------------------------------------------- making slides

SHORT, LONG, RATIONAL, ASCII, BYTES, LONG8 = 3, 4, 5, 2, 7, 16
CODES = {SHORT: "H", LONG: "I", LONG8: "Q"}
APERIO = "Aperio Image Library v1\r\n{w}x{h} (64x64) JPEG/RGB Q=80"


@lru_cache
def texture(width: int, height: int) -> np.ndarray:
    """Pink ground with dark discs and grain: edges as sharp as those of nuclei."""
    rng = np.random.default_rng(0)
    y, x = np.mgrid[:height, :width]
    image = np.stack([220 + 20 * np.sin(x / 37), 160 + 30 * np.cos(y / 29), 200 + 10 * np.sin((x + y) / 19)], axis=-1)
    for _ in range(width * height // 900):
        left, top, radius = rng.integers(0, width), rng.integers(0, height), rng.uniform(3, 10)
        here = (slice(top, top + 24), slice(left, left + 24))
        distance = np.hypot(x[here] - left - 12, y[here] - top - 12) - radius
        image[here] += np.clip(0.5 - distance / 2, 0, 1)[..., None] * (np.array([90, 50, 130]) - image[here])
    return np.clip(image + rng.normal(0, 4, image.shape), 0, 255).astype(np.uint8)


def shrunk(image: np.ndarray, factor: int) -> np.ndarray:
    height, width = image.shape[0] // factor, image.shape[1] // factor
    blocks = image[: height * factor, : width * factor].reshape(height, factor, width, factor, 3)
    return blocks.mean(axis=(1, 3)).round().astype(np.uint8)


def segments(stream: bytes) -> list[tuple[int, bytes]]:
    """Marker segments of a JPEG, the scan as the last one."""
    found, place = [], 2
    while stream[place + 1] != 0xDA:
        stop = place + 2 + int.from_bytes(stream[place + 2 : place + 4], "big")
        found.append((stream[place + 1], stream[place:stop]))
        place = stop
    return [*found, (0xDA, stream[place:])]


def ycbcr_jpeg(block: np.ndarray, subsampling: str = "444") -> bytes:
    return simplejpeg.encode_jpeg(np.ascontiguousarray(block), quality=80, colorsubsampling=subsampling)


def rgb_jpeg(block: np.ndarray) -> bytes:
    """RGB without any mark of it, components numbered as those of YCbCr are: what Aperio scanners write."""
    file = io.BytesIO()
    Image.fromarray(block).save(file, "jpeg", quality=80, keep_rgb=True, subsampling=0)
    out = b"\xff\xd8"
    for code, segment in segments(file.getvalue()):
        if code == 0xC0:
            segment = bytearray(segment)
            segment[10::3] = bytes([1, 2, 3])
        elif code == 0xDA:
            segment = bytearray(segment)
            segment[5:11:2] = bytes([1, 2, 3])
        out += b"" if 0xE0 <= code <= 0xEF else bytes(segment)
    return out


def without_tables(stream: bytes) -> tuple[bytes, bytes]:
    """A JPEG as TIFF files hold it: (tables, the rest)."""
    tables = b"".join(segment for code, segment in segments(stream) if code in (0xDB, 0xC4))
    rest = b"".join(segment for code, segment in segments(stream) if code not in (0xDB, 0xC4, 0xE0))
    return b"\xff\xd8" + tables + b"\xff\xd9", b"\xff\xd8" + rest


def page(image: np.ndarray, tile: int = 64, encode: Any = ycbcr_jpeg, empty: tuple[int, ...] = (), **tags: Any) -> dict:
    """A page of a TIFF: tags, tiles, sub-pages. Tags are given as t258=(type, values), None leaves one out."""
    height, width = image.shape[:2]
    padded = np.pad(image, ((0, -height % tile), (0, -width % tile), (0, 0)))  # black: no reader may show any of it
    corners = itertools.product(range(0, height, tile), range(0, width, tile))
    tiles = [encode(np.ascontiguousarray(padded[y : y + tile, x : x + tile])) for y, x in corners]
    basic = {
        **{256: (LONG, [width]), 257: (LONG, [height]), 258: (SHORT, [8, 8, 8]), 259: (SHORT, [7]), 262: (SHORT, [6])},
        **{277: (SHORT, [3]), 284: (SHORT, [1]), 322: (SHORT, [tile]), 323: (SHORT, [tile]), 530: (SHORT, [1, 1])},
    }
    basic |= {int(name[1:]): value for name, value in tags.items()}
    tiles = [b"" if k in empty else data for k, data in enumerate(tiles)]
    return {"tags": {code: tag for code, tag in basic.items() if tag}, "tiles": tiles, "below": [], "repeat": 1}


def write_tiff(path: Path, pages: list[dict], big: bool = False) -> Path:
    word, size = ("Q", 8) if big else ("I", 4)

    def write_page(file: io.BufferedWriter, page: dict) -> int:
        offsets, counts = [], []
        for tile in page["tiles"]:
            offsets.append(file.tell() if tile else 0)
            counts.append(len(tile))
            file.write(tile)
        below = [write_page(file, child) for child in page["below"]]
        where = LONG8 if big else LONG
        tags = {324: (where, offsets * page["repeat"]), 325: (LONG, counts * page["repeat"]), **page["tags"]}
        tags |= {330: (where, below)} if below else {}
        entries = b""
        for code, (kind, values) in sorted(tags.items()):
            if kind == RATIONAL:
                raw = b"".join(struct.pack("<II", *value) for value in values)
            else:
                raw = values if kind in (ASCII, BYTES) else struct.pack(f"<{len(values)}{CODES[kind]}", *values)
            if len(raw) > size:
                place = file.tell()
                file.write(raw)
                raw = struct.pack(f"<{word}", place)
            entries += struct.pack(f"<HH{word}", code, kind, len(values)) + raw.ljust(size, b"\0")
        place = file.tell()
        file.write(struct.pack("<Q" if big else "<H", len(tags)) + entries + bytes(size))
        return place

    with path.open("wb") as file:
        file.write(struct.pack("<2sHHHQ", b"II", 43, 8, 0, 0) if big else struct.pack("<2sHI", b"II", 42, 0))
        link = file.tell() - size
        for entry in pages:
            place = write_page(file, entry)
            end = file.tell()
            file.seek(link)
            file.write(struct.pack(f"<{word}", place))
            file.seek(end)
            link = end - size
    return path


def resolution(mpp: float, mpp_y: float | None = None) -> dict[str, Any]:
    """Tags that say so, in pixels per centimetre."""
    across, down = (RATIONAL, [(round(1e8 / mpp), 10_000)]), (RATIONAL, [(round(1e8 / (mpp_y or mpp)), 10_000)])
    return {"t282": across, "t283": down, "t296": (SHORT, [3])}


def text(value: str) -> tuple[int, bytes]:
    return ASCII, value.encode() + b"\0"


def plain_pages(mpp: float = 0.25, size: tuple[int, int] = (400, 300), **options: Any) -> list[dict]:
    """A pyramid of three levels as generic TIFF has it."""
    image = texture(*size)
    levels = [image, shrunk(image, 2), shrunk(image, 4)]
    kinds = [{}, {"t254": (LONG, [1])}, {"t254": (LONG, [1])}]
    return [page(level, **resolution(mpp), **kind, **options) for level, kind in zip(levels, kinds, strict=True)]


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return write_tiff(tmp_path / "plain.tif", plain_pages())


# ---------------------------------------------------------------------------------------------------- what is right


def openslide_level(path: Path, index: int) -> np.ndarray:
    """All pixels of a level as OpenSlide shows them, on white."""
    with openslide.OpenSlide(path) as slide:
        picture = slide.read_region((0, 0), index, slide.level_dimensions[index])
        glass = Image.new("RGBA", picture.size, "white")
        return np.asarray(Image.alpha_composite(glass, picture).convert("RGB"))


def slow_area_mean(image: np.ndarray, x: float, y: float, size: tuple[int, int], factor: float) -> np.ndarray:
    """The definition, pixel by pixel; white outside the image. Not rounded."""
    width, height = size
    out = np.empty((height, width, 3))
    for i, j in itertools.product(range(height), range(width)):
        top, left = y + i * factor, x + j * factor
        total, area = np.zeros(3), 0.0
        for row in range(int(np.floor(top)), int(np.ceil(top + factor))):
            for column in range(int(np.floor(left)), int(np.ceil(left + factor))):
                part = min(top + factor, row + 1) - max(top, row)
                part *= min(left + factor, column + 1) - max(left, column)
                inside = 0 <= row < image.shape[0] and 0 <= column < image.shape[1]
                total += part * (image[row, column] if inside else 255)
                area += part
        out[i, j] = total / area
    return out


def slow_linear(image: np.ndarray, x: float, y: float, size: tuple[int, int], factor: float) -> np.ndarray:
    out = np.empty((size[1], size[0], 3))
    for i, j in itertools.product(range(size[1]), range(size[0])):
        v, u = y + (i + 0.5) * factor - 0.5, x + (j + 0.5) * factor - 0.5
        row, column = int(np.floor(v)), int(np.floor(u))
        value = np.zeros(3)
        for a, b in itertools.product((0, 1), (0, 1)):
            weight = (1 - abs(v - row - a)) * (1 - abs(u - column - b))
            inside = 0 <= row + a < image.shape[0] and 0 <= column + b < image.shape[1]
            value += weight * (image[row + a, column + b] if inside else 255)
        out[i, j] = value
    return out


def window(image: np.ndarray, x: int, y: int, width: int, height: int) -> np.ndarray:
    """A part of an image, white outside."""
    out = np.full((height, width, 3), 255, np.uint8)
    for i, j in itertools.product(range(height), range(width)):
        if 0 <= y + i < image.shape[0] and 0 <= x + j < image.shape[1]:
            out[i, j] = image[y + i, x + j]
    return out


# ---------------------------------------------------------------------------------------------------- resampling


@settings(max_examples=60, deadline=None)
@given(
    x=st.floats(0, 3), y=st.floats(0, 3), factor=st.floats(1, 5), width=st.integers(1, 6), height=st.integers(1, 6),
    seed=st.integers(0, 9),
)  # fmt: skip
def test_area_mean_equals_the_slow_loop(x: float, y: float, factor: float, width: int, height: int, seed: int) -> None:
    image = np.random.default_rng(seed).integers(0, 256, (40, 40, 3), dtype=np.uint8)
    grid = Grid.over(x, y, width, height, factor)
    x0, y0, x1, y1 = grid.box
    result = resample(image[y0:y1, x0:x1].astype(grid.source_dtype), grid)
    exact = slow_area_mean(image, grid.x, grid.y, (width, height), grid.factor)
    assert result.dtype == np.uint8
    assert np.abs(result - exact).max() <= (2 if grid.is_near_one else 0.5 + 1e-3)


@settings(max_examples=30, deadline=None)
@given(x=st.floats(0, 1), y=st.floats(0, 1), drift=st.floats(0.0001, 0.005), seed=st.integers(0, 9))
def test_near_one_is_the_area_mean_to_two_grey_levels_in_noise(x: float, y: float, drift: float, seed: int) -> None:
    image = np.random.default_rng(seed).integers(0, 256, (110, 110, 3), dtype=np.uint8)
    grid = Grid.over(x, y, 100, 100, 1 + drift)
    x0, y0, x1, y1 = grid.box
    result = resample(image[y0:y1, x0:x1].astype(grid.source_dtype), grid)
    exact = _weighted(image[y0:y1, x0:x1], grid) if not grid.is_whole else result
    difference = np.abs(result.astype(int) - exact)
    assert difference.max() <= 2
    assert difference.mean() <= 0.3


@settings(max_examples=40, deadline=None)
@given(x=st.floats(1, 4), y=st.floats(1, 4), factor=st.floats(0.1, 0.99), width=st.integers(1, 9))
def test_finer_than_the_source_is_interpolated(x: float, y: float, factor: float, width: int) -> None:
    image = np.random.default_rng(0).integers(0, 256, (20, 20, 3), dtype=np.uint8)
    grid = Grid.over(x, y, width, 5, factor)
    x0, y0, x1, y1 = grid.box
    result = resample(image[y0:y1, x0:x1], grid)
    assert np.abs(result - slow_linear(image, grid.x, grid.y, (width, 5), grid.factor)).max() <= 0.5 + 1e-3


@pytest.mark.parametrize("factor", [1, 2, 3, 4, 6, 7, 16])
def test_whole_factors_are_exact_and_round_half_up(factor: int) -> None:
    image = np.random.default_rng(factor).integers(0, 256, (factor * 5, factor * 4, 3), dtype=np.uint8)
    image[:, :factor] = 255
    image[: factor // 2, factor : 2 * factor] = 254  # with an even factor a half: must go up
    image[factor // 2 : factor, factor : 2 * factor] = 255
    result = resample(image, Grid.over(0, 0, 4, 5, factor))
    for i, j, channel in itertools.product(range(5), range(4), range(3)):
        block = image[i * factor : (i + 1) * factor, j * factor : (j + 1) * factor, channel]
        assert result[i, j, channel] == int(Fraction(int(block.sum()), factor**2) + Fraction(1, 2))


def test_nearly_whole_grids_are_taken_as_whole_only_where_it_cannot_be_seen() -> None:
    assert Grid.over(448.0, 2 + 1e-9, 224, 224, 0.5 / 0.25000001).is_whole
    assert not Grid.over(448.0, 2.0, 224, 224, 0.5 / 0.2501).is_whole
    assert not Grid.over(448.3, 2.0, 224, 224, 2).is_whole


def test_a_part_of_a_grid_has_the_pixels_of_the_whole() -> None:
    image = texture(90, 80)
    grid = Grid.over(1.3, 2.6, 30, 25, 2.7)

    def pixels(grid: Grid) -> np.ndarray:
        x0, y0, x1, y1 = grid.box
        return resample(image[y0:y1, x0:x1], grid)

    np.testing.assert_array_equal(pixels(grid.part(7, 3, 21, 24)), pixels(grid)[3:24, 7:21])


# ---------------------------------------------------------------------------------------------------- own resolution

FLAVOURS: dict[str, dict[str, Any]] = {
    "444": {},
    "422": {"encode": lambda block: ycbcr_jpeg(block, "422"), "t530": (SHORT, [2, 1])},
    "420": {"encode": lambda block: ycbcr_jpeg(block, "420"), "t530": (SHORT, [2, 2])},
    "rgb": {"encode": rgb_jpeg, "t262": (SHORT, [2]), "t530": None},
    # The TIFF says RGB and the JPEG says YCbCr, or the other way round: OpenSlide believes the TIFF.
    "rgb with a JFIF marker": {"t262": (SHORT, [2]), "t530": None},
    "ycbcr without any marker": {"encode": rgb_jpeg},
    "tables apart": {
        "encode": lambda block: without_tables(ycbcr_jpeg(block, "420"))[1],
        "t347": (BYTES, without_tables(ycbcr_jpeg(texture(64, 64), "420"))[0]),
    },
    "rgb with tables apart": {
        "encode": lambda block: without_tables(rgb_jpeg(block))[1],
        "t347": (BYTES, without_tables(rgb_jpeg(texture(64, 64)))[0]),
        "t262": (SHORT, [2]),
    },
    "tiles of 48": {"tile": 48},
    "empty tiles": {"empty": (1, 8)},
}


@pytest.mark.parametrize("vendor", ["generic-tiff", "aperio"])
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_at_a_levels_own_resolution_pixels_equal_openslides(flavour: str, vendor: str, tmp_path: Path) -> None:
    image = texture(301, 203)
    levels = [image, shrunk(image, 4)]
    options = FLAVOURS[flavour]
    if vendor == "aperio":
        options = {**options, "empty": ()}  # those have a test of their own
    head: dict[str, Any] = resolution(0.25)
    if vendor == "aperio":
        head["t270"] = text(APERIO.format(w=301, h=203) + "|AppMag = 40|MPP = 0.25")
    pages = [page(levels[0], **options, **head)]
    reduced = {"t254": (LONG, [1])} if vendor == "generic-tiff" else {"t270": head["t270"]}
    pages.append(page(levels[1], **{**options, "empty": ()}, **reduced))
    path = write_tiff(tmp_path / "a.tif", pages, big=flavour == "444")

    with open_slide(path) as fast, open_slide(path, reader="openslide") as slow:
        assert (fast.reader, slow.reader, fast.vendor) == ("jpegtiff", "openslide", vendor)
        assert (fast.levels, fast.mpp, fast.mpp_source) == (slow.levels, slow.mpp, slow.mpp_source)
        for index, downsample in enumerate((1, 4)):
            truth = openslide_level(path, index)
            for x, y in ((0, 0), (-17, -9), (201, 101), (5, 3)):
                expected = window(truth, x, y, 120, 120)
                tile = fast.read_tile(x * downsample, y * downsample, 120, 0.25 * downsample)
                np.testing.assert_array_equal(tile, expected)
                assert tile.flags.c_contiguous
                assert tile.flags.writeable
                if index == 0:  # in level 1 OpenSlide's places fall between pixels, for 301 / 4 is no whole number
                    np.testing.assert_array_equal(slow.read_tile(x, y, 120, 0.25), expected)


def test_the_jpeg_is_not_what_is_guessed_from_its_bytes(tmp_path: Path) -> None:
    """The trap itself: decoded as it stands, an unmarked RGB tile comes out in false colours."""
    image = texture(64, 64)
    path = write_tiff(tmp_path / "a.tif", [page(image, encode=rgb_jpeg, t262=(SHORT, [2]), **resolution(0.25))])
    tile = open_slide(path, reader="jpegtiff").read_tile(0, 0, 64, 0.25)
    assert np.abs(tile.astype(int) - image).mean() < 8
    assert np.abs(simplejpeg.decode_jpeg(rgb_jpeg(image)).astype(int) - image).mean() > 30


@pytest.mark.parametrize("flavour", ["444", "422", "420", "rgb"])
@pytest.mark.parametrize("mpp", [0.27, 0.4946, 0.5, 0.5144, 0.825, 1.0, 1.025, 2.0, 2.15, 4.0])
def test_other_resolutions_are_the_area_mean_of_openslides_pixels(flavour: str, mpp: float, tmp_path: Path) -> None:
    image = texture(522, 390)
    path = write_tiff(tmp_path / "a.tif", [page(image, **FLAVOURS[flavour], **resolution(0.25))])
    truth = openslide_level(path, 0)
    factor = mpp / 0.25
    size = max(3, int(14 / factor))
    differences = []
    with open_slide(path, reader="jpegtiff") as fast, open_slide(path, reader="openslide") as slow:
        far_x, far_y = 522 - round(size * factor) + 3, 388 - round(size * factor)
        for x, y in ((0, 0), (7, 13), (64, 16), (far_x, 8), (0, far_y), (512, 384), (128, 200), (31, 300)):
            expected = slow_area_mean(truth, x, y, (size, size), factor)
            assert np.abs(slow.read_tile(x, y, size, mpp) - expected).max() <= 0.5 + 1e-3
            differences.append(np.abs(fast.read_tile(x, y, size, mpp) - np.floor(expected + 0.5)))
    difference = np.concatenate([part.ravel() for part in differences])
    assert difference.mean() < 1
    assert np.percentile(difference, 99) < 6
    if factor % 2:  # nothing that the JPEG decoder could shrink by
        assert difference.max() <= 1


@pytest.mark.parametrize(("colourful", "expected"), [(False, 2), (True, 1)])
def test_subsampled_colours_are_shrunk_by_the_decoder_only_where_that_is_faithful(
    colourful: bool, expected: int, tmp_path: Path
) -> None:
    """Stripes of two pixels in red and blue: colours that are sharp when the decoder shrinks, smoothed when not."""
    image = texture(256, 256)[..., 1:2].repeat(3, axis=2)
    if colourful:
        image[64:128, 64:128:4] = image[64:128, 65:128:4] = (240, 40, 40)
        image[64:128, 66:128:4] = image[64:128, 67:128:4] = (40, 40, 240)
    path = write_tiff(tmp_path / "a.tif", [page(image, **FLAVOURS["420"], **resolution(0.25))])
    truth = openslide_level(path, 0)
    with open_slide(path, reader="jpegtiff") as slide:
        assert slide._shrink(0, Grid.over(64, 64, 32, 32, 2)) == expected
        assert slide._shrink(0, Grid.over(65, 64, 32, 32, 2)) == 1
        difference = np.abs(slide.read_tile(64, 64, 32, 0.5) - slow_area_mean(truth, 64, 64, (32, 32), 2))
        assert difference.mean() < 1
        assert np.percentile(difference, 99) < 6


@pytest.mark.parametrize("reader", ["jpegtiff", "openslide"])
def test_finer_than_level_0_is_interpolated(reader: str, plain: Path) -> None:
    expected = slow_linear(openslide_level(plain, 0), 33, 21, (16, 16), 0.4)
    tile = open_slide(plain, reader=reader).read_tile(33, 21, 16, 0.1)
    assert np.abs(tile - expected).max() <= 0.5 + 1e-3


@pytest.mark.parametrize("reader", ["jpegtiff", "openslide"])
def test_the_nearest_finer_level_is_read(reader: str, tmp_path: Path) -> None:
    """Each level is of one colour, so a tile's colour tells where it came from."""
    sizes = [(256, 256), (128, 128), (64, 64)]
    colours = [(200, 0, 0), (0, 200, 0), (0, 0, 200)]
    pages = [
        page(np.full((h, w, 3), colour, np.uint8), **resolution(0.25), **({"t254": (LONG, [1])} if k else {}))
        for k, ((w, h), colour) in enumerate(zip(sizes, colours, strict=True))
    ]
    slide = open_slide(write_tiff(tmp_path / "a.tif", pages), reader=reader)
    for mpp, index in ((0.2, 0), (0.25, 0), (0.49, 0), (0.498, 1), (0.5, 1), (0.99, 1), (1.0, 2), (3.0, 2)):
        tile = slide.read_tile(16, 16, 8, mpp)
        assert tile[2, 2].argmax() == index, f"{mpp} mpp"


def test_levels_below_the_first_page_are_found(tmp_path: Path) -> None:
    first, *smaller = plain_pages(t270=text("<OME><Pixels/></OME>"))
    first["below"] = smaller
    path = write_tiff(tmp_path / "a.ome.tif", [first], big=True)
    with open_slide(path) as slide:
        assert slide.reader == "jpegtiff"
        assert [level.downsample for level in slide.levels] == [1, 2, 4]
        assert slide.levels[1].size == (200, 150)
        decoded = simplejpeg.decode_jpeg(smaller[0]["tiles"][0])
        np.testing.assert_array_equal(slide.read_tile(0, 0, 64, 0.5), decoded)
    assert len(open_slide(path, reader="openslide").levels) == 1


def test_thumbnails_and_labels_of_scanners_are_no_levels(tmp_path: Path) -> None:
    description = text(APERIO.format(w=400, h=300) + "|MPP = 0.25")
    striped = page(texture(64, 64), t270=text("Aperio Image Library v1\r\nlabel 64x64"), t322=None, t323=None)
    tags = striped["tags"]
    tags |= {273: (LONG, [8]), 279: (LONG, [len(striped["tiles"][0])]), 278: (LONG, [64])}
    path = write_tiff(tmp_path / "a.svs", [page(texture(400, 300), t270=description), striped])
    with open_slide(path) as slide:
        assert slide.reader == "jpegtiff"
        assert [level.size for level in slide.levels] == [(400, 300)]


def test_a_whole_downsample_is_recognised_behind_rounded_sizes() -> None:
    levels = base.levels_of(((4443, 3567), (2221, 1783), (1481, 1189), (1110, 891), (70, 56), (400, 250)))
    assert [level.downsample for level in levels[:5]] == [1, 2, 3, 4, 64]
    assert levels[5].downsample == pytest.approx((4443 / 400 + 3567 / 250) / 2)


# ---------------------------------------------------------------------------------------------------- bad or unusual


def uncompressed(mpp: float = 0.25) -> dict:
    return page(texture(100, 90), encode=lambda block: block.tobytes(), **resolution(mpp), t259=(SHORT, [1]),
                t262=(SHORT, [2]), t530=None)  # fmt: skip


def test_what_is_no_jpeg_goes_to_openslide(tmp_path: Path) -> None:
    path = write_tiff(tmp_path / "raw.tif", [uncompressed()])
    with open_slide(path) as slide:
        assert (slide.reader, slide.compression) == ("openslide", "none")
        np.testing.assert_array_equal(slide.read_tile(10, 20, 32, 0.25), texture(100, 90)[20:52, 10:42])
    with pytest.raises(SlideError, match=r"raw.tif.*jpegtiff cannot read.*8-bit colour JPEG"):
        open_slide(path, reader="jpegtiff")


@pytest.mark.parametrize("missing_in", [0, 1])
def test_missing_tiles_that_openslide_makes_up_go_to_openslide(missing_in: int, tmp_path: Path) -> None:
    image, description = texture(400, 300), text(APERIO.format(w=400, h=300))
    pages = [page(image, t270=description), page(shrunk(image, 4), t270=description)]
    pages[missing_in]["tiles"][1] = b""
    assert open_slide(write_tiff(tmp_path / "a.svs", pages)).reader == "openslide"
    alone = write_tiff(tmp_path / "b.svs", pages[:1])
    assert open_slide(alone).reader == "jpegtiff"
    truth = openslide_level(alone, 0)
    np.testing.assert_array_equal(open_slide(alone, mpp=1.0).thumbnail(1.0), truth)


def test_damaged_tiles_are_named_and_spoil_no_others(tmp_path: Path) -> None:
    pages = plain_pages()[:1]
    pages[0]["tiles"][1] = b"\xff\xd8 this is no picture at all"
    pages[0]["tiles"][2] = pages[0]["tiles"][2][:500] + bytes(len(pages[0]["tiles"][2]) - 500)
    path = write_tiff(tmp_path / "a.tif", pages)
    truth = simplejpeg.decode_jpeg(pages[0]["tiles"][0])
    for reader, bad in (
        ("jpegtiff", (64, 128)),
        ("openslide", (64,)),
    ):  # OpenSlide shows half a tile as grey, in silence
        slide = open_slide(path, reader=reader)
        for x in bad:
            with pytest.raises(SlideError, match=rf"a.tif: unreadable from \({x}, 0\) to \(") as caught:
                slide.read_tile(x, 0, 32, 0.25)
            assert str(tmp_path) not in str(caught.value)
            np.testing.assert_array_equal(slide.read_tile(0, 0, 64, 0.25), truth)


def test_bytes_too_many_in_a_tile_do_no_harm(tmp_path: Path) -> None:
    pages = plain_pages()[:1]
    sound = pages[0]["tiles"][0]
    pages[0]["tiles"][0] = sound[:-2] + b"\0\0\0" + sound[-2:]
    tile = open_slide(write_tiff(tmp_path / "a.tif", pages), reader="jpegtiff").read_tile(0, 0, 64, 0.25)
    np.testing.assert_array_equal(tile, simplejpeg.decode_jpeg(sound))


def test_a_drive_that_brings_bytes_in_parts_is_no_truncated_file(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_slide(plain, reader="jpegtiff") as slide:
        whole = slide.read_tile(30, 20, 150, 0.25)
    pread, asked = os.pread, []

    def in_parts(descriptor: int, count: int, offset: int) -> bytes:
        asked.append(count)
        return pread(descriptor, min(count, 100), offset)

    monkeypatch.setattr(jpegtiff.os, "pread", in_parts)
    with open_slide(plain, reader="jpegtiff") as slide:
        np.testing.assert_array_equal(slide.read_tile(30, 20, 150, 0.25), whole)
    assert max(asked) > 300


def halved(path: Path) -> list[int]:
    """Pixels of a tile for which the reader first finds out how well the decoder shrinks."""
    with open_slide(path, reader="jpegtiff") as slide:
        return slide.read_tile(0, 0, 64, 0.5).ravel().tolist()


def test_a_drive_that_fails_once_at_any_moment_costs_a_second_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_tiff(tmp_path / "a.tif", [plain_pages(encode=lambda block: ycbcr_jpeg(block, "420"))[0]])
    monkeypatch.setattr(work, "_FIRST_PAUSE_S", 0.0)
    pread, calls, failing = os.pread, 0, -1

    def hiccup(descriptor: int, count: int, offset: int) -> bytes:
        nonlocal calls
        calls += 1
        if calls == failing:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return pread(descriptor, count, offset)

    def tried(retries: int) -> Any:
        nonlocal calls
        calls = 0
        monkeypatch.setattr(jpegtiff, "_known_faithful", {})
        [outcome] = Engine(EngineSettings(workers=0, retries=retries)).map(halved, {"a": path}, stage="tile")
        return outcome

    monkeypatch.setattr(jpegtiff.os, "pread", hiccup)
    sound = tried(retries=0).value
    places = range(1, calls + 1)
    assert len(places) > 20  # opening, judging, reading
    for failing in places:  # noqa: B007
        assert tried(retries=1).value == sound
        assert "nput/output error" in tried(retries=0).failure.reason


def test_what_openslide_says_of_a_failing_drive_may_pass(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slide = open_slide(plain, reader="openslide")

    def broken(reason: str) -> SlideError:
        def read_region(*arguments: Any) -> None:
            raise openslide.OpenSlideError(reason)

        monkeypatch.setattr(openslide.OpenSlide, "read_region", read_region)
        with pytest.raises(SlideError) as caught:
            slide.read_tile(0, 0, 8, 0.25)
        monkeypatch.undo()
        return caught.value

    hiccup = broken(f"I/O error reading file {plain}")
    assert hiccup.why == f"i/O error reading file {plain.name}"
    assert is_transient(hiccup)
    assert is_transient(broken(f"Couldn't open {plain}: Stale file handle"))
    assert not is_transient(broken("JPEG decoder: not a JPEG file"))
    assert slide.read_tile(0, 0, 8, 0.25).shape == (8, 8, 3)


def bad_files(folder: Path) -> dict[str, Path]:
    folder.mkdir()
    whole = write_tiff(folder / "whole.tif", plain_pages()).read_bytes()
    contents = {
        "empty.svs": b"",
        "text.svs": b"this is a list of slides\n" * 10,
        "truncated.tif": whole[: len(whole) // 2],
        "header.tif": whole[:8],
        "zeros.ndpi": bytes(5000),
        "ünïcode schnitt.mrxs": b"x",
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return {name: folder / name for name in contents} | {"missing.svs": folder / "missing.svs", "in": folder}


@pytest.mark.parametrize("reader", ["auto", "openslide", "jpegtiff"])
def test_what_is_no_slide_is_refused_at_once(reader: str, tmp_path: Path) -> None:
    for name, path in bad_files(tmp_path / "in").items():
        with pytest.raises(SlideError) as caught:
            open_slide(path, reader=reader)
        error = caught.value
        assert error.what.startswith(f"{name}: ")
        assert error.why
        assert error.how
        assert str(tmp_path) not in str(error)


def test_a_file_whose_tiles_are_cut_off_is_refused_at_once(tmp_path: Path) -> None:
    pages = plain_pages()
    pages[0]["tags"][324] = (LONG, [10**7 if k % 5 == 1 else 8 for k in range(35)])
    with pytest.raises(SlideError, match="truncated, 7 of its 51 JPEG tiles"):
        open_slide(write_tiff(tmp_path / "a.tif", pages))


def test_any_truncation_is_an_error_of_ours_or_none(plain: Path, tmp_path: Path) -> None:
    content = plain.read_bytes()
    for length in range(0, len(content), 997):
        path = tmp_path / "cut.tif"
        path.write_bytes(content[:length])
        try:
            open_slide(path).thumbnail(1.0)
        except SlideError:
            continue
        assert length > 0.99 * len(content), f"{length} of {len(content)} bytes passed for a whole slide"


@pytest.mark.parametrize("reader", ["auto", "openslide"])
def test_any_damage_is_an_error_of_ours_or_none(reader: str, plain: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    content = np.frombuffer(plain.read_bytes(), np.uint8)
    refused = 0
    for _ in range(60):
        damaged = content.copy()
        # Half of the damage goes into the tail, where the smaller levels and their directories lie.
        start = rng.choice([0, len(damaged) - 9000])
        damaged[rng.integers(start, len(damaged), 40)] = rng.integers(0, 256, 40)
        path = tmp_path / "damaged.tif"
        path.write_bytes(damaged.tobytes())
        try:
            with open_slide(path, reader=reader, mpp=0.25) as slide:
                for mpp in (0.25, 0.5, 1.0):
                    slide.read_tile(0, 0, 300, mpp)
        except SlideError:
            refused += 1
    assert refused > 20


def test_a_slide_that_vanishes_or_changes_is_an_error_of_ours(plain: Path) -> None:
    slide = open_slide(plain)
    copy = pickle.loads(pickle.dumps(slide))
    write_tiff(plain, plain_pages(size=(200, 100)))
    with pytest.raises(SlideError, match="changed"):
        copy.read_tile(0, 0, 8, 0.25)
    plain.unlink()
    with pytest.raises(SlideError, match=r"plain\.tif"):
        copy.read_tile(0, 0, 8, 0.25)


@pytest.mark.parametrize(("size_px", "mpp"), [(0, 0.5), (8, 0.0), (8, -1.0), (8, float("nan"))])
def test_tiles_that_cannot_be_are_refused(size_px: int, mpp: float, plain: Path) -> None:
    with pytest.raises(ConfigError):
        open_slide(plain).read_tile(0, 0, size_px, mpp)


def test_unknown_readers_and_impossible_mpp_are_refused(plain: Path) -> None:
    with pytest.raises(ConfigError, check=has_code("unknown-reader")):
        open_slide(plain, reader="bioformats")
    with pytest.raises(ConfigError, match="mpp 0"):
        open_slide(plain, mpp=0.0)


# ---------------------------------------------------------------------------------------------------- mpp


@pytest.mark.parametrize(
    ("properties", "vendor", "value", "source"),
    [
        ({"openslide.mpp-x": "0.2527", "openslide.mpp-y": "0.2527"}, "aperio", 0.2527, "openslide.mpp-x"),
        ({"openslide.mpp-x": "0.250", "openslide.mpp-y": "0.252"}, "mirax", 0.251, "openslide.mpp-x"),
        ({"openslide.mpp-x": "0.243", "openslide.mpp-y": "0.243"}, "generic-tiff", 0.243, "tiff resolution tag"),
        ({"openslide.objective-power": "20"}, "aperio", 0.5, "objective power 20x"),
        ({"openslide.mpp-x": "0", "openslide.mpp-y": "0", "openslide.objective-power": "40"}, "aperio", 0.25,
         "objective power 40x"),
        ({"tiff.ImageDescription": '<?xml?><OME><Pixels PhysicalSizeX="0.5" PhysicalSizeY="0.5"/></OME>'},
         "generic-tiff", 0.5, "OME PhysicalSize"),
        ({"tiff.ImageDescription": '<OME><Pixels PhysicalSizeX="500" PhysicalSizeXUnit="nm" PhysicalSizeY="500" '
          'PhysicalSizeYUnit="nm"/></OME>'}, "generic-tiff", 0.5, "OME PhysicalSize"),
        *(({"openslide.mpp-x": str(25400 / dpi), "openslide.mpp-y": str(25400 / dpi)}, "generic-tiff", None, "")
          for dpi in (1, 72, 96, 300)),
        ({"openslide.mpp-x": "0.25", "openslide.mpp-y": "0.5"}, "mirax", None, ""),
        ({"openslide.mpp-x": "nan", "openslide.mpp-y": "nan"}, "mirax", None, ""),
        ({"openslide.mpp-x": "about a quarter"}, "aperio", None, ""),
        ({}, "aperio", None, ""),
    ],
)  # fmt: skip
def test_who_says_the_mpp(properties: dict[str, str], vendor: str, value: float | None, source: str) -> None:
    found = find_mpp(properties, vendor)
    assert found.value == (None if value is None else pytest.approx(value))
    assert found.source == source
    assert bool(found.problem) == (value is None)
    assert find_mpp(properties, vendor, override=0.3).value == 0.3


def test_doubtful_mpp_comes_with_a_warning() -> None:
    assert "20x" in find_mpp({"openslide.objective-power": "20"}, "aperio").warnings[0]
    assert "differs" in find_mpp({"openslide.mpp-x": "0.250", "openslide.mpp-y": "0.252"}, "mirax").warnings[0]
    stated = {"openslide.mpp-x": "0.25", "openslide.mpp-y": "0.25"}
    assert find_mpp(stated, "aperio").warnings == ()
    assert find_mpp(stated, "aperio", override=0.25).warnings == ()
    assert "0.5 was given, the file says 0.25" in find_mpp(stated, "aperio", override=0.5).warnings[0]


@pytest.mark.parametrize("mpp", [25.0, 40.0, 250.0, 0.01, 0.0002])
def test_an_mpp_that_no_scanner_has_is_an_error_until_the_user_says_better(mpp: float) -> None:
    stated = {"openslide.mpp-x": str(mpp), "openslide.mpp-y": str(mpp), "openslide.objective-power": "20"}
    found = find_mpp(stated, "aperio")
    assert found.value is None
    assert f"openslide.mpp-x says {mpp:g}" in found.problem
    assert find_mpp(stated, "aperio", otherwise=0.25).value == 0.25
    assert find_mpp(stated, "aperio", override=0.5).value == 0.5


@pytest.mark.parametrize("mpp", [25.0, 0.01, 0.0, -1.0, float("nan"), float("inf")])
def test_an_mpp_that_no_scanner_has_cannot_be_given(mpp: float, plain: Path) -> None:
    with pytest.raises(ConfigError, match=r"0\.05 to 10"):
        open_slide(plain, mpp=mpp)
    with pytest.raises(ConfigError, match=r"0\.05 to 10"):
        open_slide(plain, otherwise_mpp=mpp)


def test_an_mpp_for_slides_without_one_leaves_the_others_alone() -> None:
    stated = {"openslide.mpp-x": "0.5", "openslide.mpp-y": "0.5"}
    kept = find_mpp(stated, "aperio", otherwise=0.25)
    assert (kept.value, kept.source) == (0.5, "openslide.mpp-x")
    assert "which is used, not the 0.25 that was given" in kept.warnings[0]
    assert find_mpp(stated, "aperio", otherwise=0.5).warnings == ()
    assert find_mpp(stated, "aperio", override=0.3, otherwise=0.25).value == 0.3
    for vague in ({}, {"openslide.objective-power": "20"}, {"openslide.mpp-x": "25", "openslide.mpp-y": "25"}):
        assert find_mpp(vague, "aperio", otherwise=0.25).value == 0.25


@pytest.mark.parametrize("reader", ["jpegtiff", "openslide"])
@pytest.mark.parametrize(
    "tags",
    [
        {},
        {"t282": (RATIONAL, [(72, 1)]), "t283": (RATIONAL, [(72, 1)]), "t296": (SHORT, [2])},
        {"t282": (RATIONAL, [(4, 1)]), "t283": (RATIONAL, [(4, 1)]), "t296": (SHORT, [1])},
        resolution(0.25, 0.5),
    ],
    ids=["no tags", "72 dpi", "no unit", "pixels that are not square"],
)
def test_without_mpp_a_slide_opens_and_asks_for_it(reader: str, tags: dict[str, Any], tmp_path: Path) -> None:
    path = write_tiff(tmp_path / "a.tif", [page(texture(100, 90), **tags)])
    slide = open_slide(path, reader=reader)
    assert (slide.size_l0, slide.mpp_source) == ((100, 90), "")
    for use in (lambda: slide.mpp, lambda: slide.read_tile(0, 0, 8, 0.5), lambda: slide.thumbnail(8)):
        with pytest.raises(MissingMppError, match=r"a.tif: .* pass --slide.mpp 0.25, or fill the column mpp"):
            use()
    given = open_slide(path, reader=reader, mpp=0.25)
    assert (given.mpp, given.mpp_source) == (0.25, "override")
    assert given.read_tile(0, 0, 8, 0.5).shape == (8, 8, 3)


def test_both_readers_report_the_same(tmp_path: Path) -> None:
    description = text(APERIO.format(w=301, h=203) + "|AppMag = 20|MPP = 0.5015")
    pages = [page(texture(301, 203), t270=description), page(texture(75, 50), t270=description)]
    path = write_tiff(tmp_path / "a.svs", pages)
    fast, slow = open_slide(path, reader="jpegtiff"), open_slide(path, reader="openslide")
    assert fast.info == slow.info
    assert (fast.mpp, fast.mpp_source, fast.objective_power) == (0.5015, "openslide.mpp-x", 20)
    assert (fast.compression, fast.name, fast.warnings) == ("jpeg", "a.svs", ())


# ---------------------------------------------------------------------------------------------------- regions


@pytest.fixture(scope="module")
def plain_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiff(tmp_path_factory.mktemp("plain") / "plain.tif", plain_pages())


@pytest.mark.parametrize("reader", ["jpegtiff", "openslide"])
@given(
    corner=st.tuples(st.integers(-9, 48), st.integers(-9, 36)),
    size=st.tuples(st.integers(1, 70), st.integers(1, 70)),
    cut=st.tuples(*[st.floats(0, 0.999)] * 4),
    mpp=st.sampled_from([0.25, 0.5, 1.0, 2.0, 0.6, 1.7]),
)
@settings(max_examples=60)
def test_a_region_is_the_crop_of_a_larger_one(
    reader: str,
    plain_once: Path,
    corner: tuple[int, int],
    size: tuple[int, int],
    cut: tuple[float, float, float, float],
    mpp: float,
) -> None:
    """Also beyond the slide's edges. Equal where pixels are whole sums of the slide's; else to a rounding."""
    wanted = mpp / 0.25
    x_l0, y_l0 = (edge * 8 for edge in corner)  # on whole pixels of every level
    left, top = (int(share * edge) for share, edge in zip(cut[:2], size, strict=True))
    wide, high = (
        1 + int(share * (edge - start)) for share, edge, start in zip(cut[2:], size, (left, top), strict=True)
    )
    wide, high = min(wide, size[0] - left), min(high, size[1] - top)
    with open_slide(plain_once, reader=reader) as slide:
        whole = slide.read_region(x_l0, y_l0, size, mpp)
        part = slide.read_region(x_l0 + left * wanted, y_l0 + top * wanted, (wide, high), mpp)
    assert whole.shape == (size[1], size[0], 3)
    difference = np.abs(whole[top : top + high, left : left + wide].astype(int) - part)
    assert difference.max() <= (0 if wanted in (1, 2, 4, 8) else 1)


@pytest.mark.parametrize("mpp", [0.25, 0.5, 1.0, 2.0])
def test_a_region_is_its_tiles_put_together(mpp: float, plain: Path) -> None:
    edge, wanted = 20, mpp / 0.25
    with open_slide(plain) as slide:
        region = slide.read_region(-16, 8, (3 * edge, 2 * edge), mpp)
        for row, column in itertools.product(range(2), range(3)):
            tile = slide.read_tile(-16 + column * edge * wanted, 8 + row * edge * wanted, edge, mpp)
            np.testing.assert_array_equal(region[row * edge :, column * edge :][:edge, :edge], tile)


# ---------------------------------------------------------------------------------------------------- thumbnails


@pytest.mark.parametrize("reader", ["jpegtiff", "openslide"])
@pytest.mark.parametrize("mpp", [1.0, 1.7, 5.0])
def test_a_thumbnail_is_the_area_mean_of_all(reader: str, mpp: float, plain: Path) -> None:
    truth = openslide_level(plain, 2)
    with open_slide(plain, reader=reader) as slide:
        thumbnail = slide.thumbnail(mpp)
        width, height = geometry.size_at_mpp((400, 300), 0.25, mpp)
        assert thumbnail.shape == (height, width, 3)
        expected = slow_area_mean(truth, 0, 0, (width, height), mpp)
        assert np.abs(thumbnail - expected).max() <= 0.5 + 1e-3


def test_a_thumbnail_made_in_parts_is_the_same(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_slide(plain) as slide:
        whole = slide.thumbnail(1.3)
        monkeypatch.setattr(base, "MAX_SOURCE_PX", 500)
        np.testing.assert_array_equal(slide.thumbnail(1.3), whole)


@pytest.mark.parametrize(("edge", "downsamples"), [(100_000, (1, 4, 16, 64)), (16_000, (1,))])
def test_thumbnails_of_large_slides_take_little_memory(edge: int, downsamples: tuple[int, ...], tmp_path: Path) -> None:
    """Every tile of these slides is the same few bytes, so that they are quickly written."""
    pages = []
    for downsample in downsamples:
        extent = edge // downsample
        one = page(texture(512, 512), 512, **resolution(0.25), **({"t254": (LONG, [1])} if downsample > 1 else {}))
        one["tags"] |= {256: (LONG, [extent]), 257: (LONG, [extent])}
        one["repeat"] = (-(-extent // 512)) ** 2
        pages.append(one)
    path = write_tiff(tmp_path / "large.tif", pages, big=True)
    jpegtiff.shared_cache.clear()
    with open_slide(path) as slide:
        tracemalloc.start()
        thumbnail = slide.thumbnail(8.0)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert thumbnail.shape == (edge // 32, edge // 32, 3)
    assert peak < 250e6


# ---------------------------------------------------------------------------------------------------- being open


@pytest.mark.parametrize("reader", ["jpegtiff", "openslide"])
def test_slides_travel_to_other_processes(reader: str, plain: Path) -> None:
    slide = open_slide(plain, reader=reader, mpp=0.3)
    tile = slide.read_tile(40, 30, 50, 0.7)
    luggage = pickle.dumps(slide)
    assert len(luggage) < 2000
    copy = pickle.loads(luggage)
    assert copy._handle is None  # opened where it is first read
    assert (copy.info, copy.path, copy.reader) == (slide.info, slide.path, reader)
    np.testing.assert_array_equal(copy.read_tile(40, 30, 50, 0.7), tile)


@pytest.mark.parametrize("reader", ["jpegtiff", "openslide"])
def test_closing_lets_go_of_the_file_and_reading_opens_it_again(reader: str, plain: Path) -> None:
    def num_open() -> int:
        links = (Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd"))
        return sum(os.readlink(link) == str(plain) for link in links if link.is_symlink())

    if not Path("/proc/self/fd").is_dir():
        pytest.skip("no /proc to count open files in")
    with open_slide(plain, reader=reader) as slide:
        tile = slide.read_tile(0, 0, 64, 0.25)
        if reader == "jpegtiff":
            assert num_open() == 1
    assert num_open() == 0
    np.testing.assert_array_equal(slide.read_tile(0, 0, 64, 0.25), tile)
    slide.close()
    assert num_open() == 0


def test_a_slide_reference_opens_with_the_mpp_that_has_priority(plain: Path) -> None:
    row, file_mpp = SlideRow("a", plain), open_slide(plain).mpp
    assert SlideRef.of(row, SlideSettings()).open().mpp == file_mpp
    assert SlideRef.of(row, SlideSettings(mpp=0.4)).open().mpp == file_mpp
    forced = SlideRef.of(row, SlideSettings(mpp=0.4, force_mpp=True))
    assert (forced.open().mpp, forced.mpp) == (0.4, None)
    assert forced.at_mpp(0.3).open().mpp == 0.3
    ref = SlideRef.of(replace(row, mpp=0.3), SlideSettings(mpp=0.4, force_mpp=True, reader="openslide"))
    with ref.open() as slide:
        assert (ref.name, slide.mpp, slide.reader) == ("a", 0.3, "openslide")


def test_the_cache_closes_what_was_used_longest_ago(tmp_path: Path) -> None:
    paths = [write_tiff(tmp_path / f"{k}.tif", plain_pages()[:1]) for k in range(3)]
    cache = SlideCache(max_open=2)
    refs = [SlideRef(path.stem, path) for path in paths]
    first, second = cache.get(refs[0]), cache.get(refs[1])
    assert cache.get(refs[0]) is first
    assert cache.get(refs[0].at_mpp(0.5)) is not first  # other options, another slide: pushes the second out
    assert (len(cache), second._handle) == (2, None)
    assert second.read_tile(0, 0, 8, 0.5).shape == (8, 8, 3)
    assert cache.get(refs[1]) is not second
    cache.close()
    assert len(cache) == 0
    with pytest.raises(ConfigError):
        SlideCache(max_open=0)


def test_decoded_tiles_are_kept_and_bounded(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[int] = []
    original = jpegtiff._decode

    def counted(descriptor: int, level: Any, number: int, shrink: int) -> Any:
        decoded.append(number)
        return original(descriptor, level, number, shrink)

    monkeypatch.setattr(jpegtiff, "_decode", counted)
    cache = jpegtiff.TileCache(max_bytes=3 * 64 * 64 * 3)
    monkeypatch.setattr(jpegtiff, "shared_cache", cache)
    slide = open_slide(plain, reader="jpegtiff")
    slide.read_tile(0, 0, 64, 0.25)
    slide.read_tile(8, 8, 32, 0.25)
    assert decoded == [0]
    slide.read_tile(0, 0, 300, 0.25)  # 25 tiles; 3 fit
    assert cache._tiles.currsize == 3 * 64 * 64 * 3
    before = len(decoded)
    slide.read_tile(0, 0, 64, 0.25)
    assert len(decoded) == before + 1


@pytest.mark.parametrize("reader", ["jpegtiff", "openslide"])
def test_threads_may_share_a_slide(reader: str, plain: Path) -> None:
    slide = open_slide(plain, reader=reader)
    places = [(x, y) for x in range(0, 300, 60) for y in range(0, 200, 60)]
    expected = {place: slide.read_tile(*place, size_px=50, mpp=0.4) for place in places}
    wrong: list[tuple[int, int]] = []

    def read(seed: int) -> None:
        for k in np.random.default_rng(seed).permutation(len(places)):
            if not np.array_equal(slide.read_tile(*places[k], size_px=50, mpp=0.4), expected[places[k]]):
                wrong.append(places[k])
            if seed == 0:
                slide.close()

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_forked_process_reads_the_same(plain: Path) -> None:
    for reader in ("jpegtiff", "openslide"):
        slide = open_slide(plain, reader=reader)
        tile = slide.read_tile(3, 5, 40, 0.6)
        child = os.fork()
        if child == 0:
            os._exit(0 if np.array_equal(slide.read_tile(3, 5, 40, 0.6), tile) else 1)
        assert os.waitpid(child, 0)[1] == 0


def test_a_slide_of_several_files_is_known_by_all_of_them(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    for path in (tmp_path / "a.mrxs", folder / "Data0000.dat", folder / "0.dcm", folder / "1.dcm"):
        path.write_bytes(path.name.encode())
    before = [fingerprint(path) for path in (tmp_path / "a.mrxs", folder / "0.dcm")]
    assert fingerprint(folder / "1.dcm") == before[1]  # one slide, whichever file names it
    (folder / "Data0000.dat").write_bytes(b"changed")
    assert fingerprint(tmp_path / "a.mrxs") != before[0]
    assert fingerprint(folder / "0.dcm") == before[1]
    (folder / "1.dcm").write_bytes(b"changed")
    assert fingerprint(folder / "0.dcm") != before[1]


@pytest.mark.parametrize("suffix", [".vms", ".VMU"])
def test_a_hamamatsu_slide_is_known_by_the_files_it_names(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"a{suffix}"
    names = ["a.jpg", "a (1,0).jpg", "mäp.jpg", "a.opt"]
    keys = ["ImageFile", "ImageFile(1,0)", "MapFile", "OptimisationFile"]
    lines = [f"{key}={name}" for key, name in zip(keys, names, strict=True)]
    head = "[Virtual Microscope Specimen]"
    path.write_bytes("\r\n".join([head, *lines, "MapFile(9)=gone.jpg", "MacroImage=macro.jpg", ""]).encode())
    for name in [*names, "macro.jpg", "b.jpg"]:
        (tmp_path / name).write_bytes(b"x")
    before = fingerprint(path)
    (tmp_path / "macro.jpg").write_bytes(b"a label with a name on it")
    (tmp_path / "b.jpg").write_bytes(b"another slide's")
    assert fingerprint(path) == before
    for name in names:
        (tmp_path / name).write_bytes(b"changed")
        assert fingerprint(path) != before
        (tmp_path / name).write_bytes(b"x")
    assert fingerprint(path) == before


def test_check_tells_of_outlines_that_enclose_nothing(plain: Path) -> None:
    bow_tie, line = [[0, 0], [9, 9], [9, 0], [0, 9], [0, 0]], [[0, 0], [9, 9], [0, 0], [0, 0]]
    features = [
        {"type": "Feature", "geometry": {"type": "Polygon", "coordinates": [points]}, "properties": {}}
        for points in (bow_tie, line)
    ]
    outlines = plain.with_name("a.geojson")
    outlines.write_text(json.dumps({"type": "FeatureCollection", "features": features}))
    told = check_slide(CheckJob(SlideRef("a", plain), outlines)).warnings
    words = "contours in a.geojson that cross themselves or enclose nothing are repaired when read"
    assert told == (f"{words}: 3 regions",)  # both halves of the bow tie, and the line


# ---------------------------------------------------------------------------------------------------- real slides


def test_a_real_aperio_slide_equals_openslide(shared: Path) -> None:
    path = shared / "data/slides/CMU-1-Small-Region.svs"
    truth = openslide_level(path, 0)
    with open_slide(path) as slide, open_slide(path, reader="openslide") as slow:
        assert (slide.reader, slide.mpp, slide.objective_power, slide.vendor) == ("jpegtiff", 0.499, 20, "aperio")
        assert slide.info == slow.info
        np.testing.assert_array_equal(slide.thumbnail(0.499), truth)
        rng = np.random.default_rng(0)
        for mpp in (0.499, 0.5, 0.998, 0.987, 1.0267, 1.996, 4.0):
            tiles = [(int(x), int(y)) for x, y in rng.integers(-50, 2000, (12, 2))]
            tiles += [(500, 600), (496, 608)]
            pairs = [(slide.read_tile(x, y, 112, mpp), slow.read_tile(x, y, 112, mpp)) for x, y in tiles]
            difference = np.abs(np.array([a.astype(int) - b for a, b in pairs]))
            assert difference.mean() < 0.5
            assert np.percentile(difference, 99) <= 3


def test_a_real_jpeg_2000_slide_without_mpp(shared: Path) -> None:
    path = shared / "data/slides/tcga-cr-7395-01a-01-ts1.svs"
    slide = open_slide(path)
    assert (slide.reader, slide.compression, slide.objective_power) == ("openslide", "jpeg 2000", None)
    assert any("JPEG 2000" in warning for warning in slide.warnings)
    with pytest.raises(MissingMppError, match=r"tcga-cr-7395-01a-01-ts1\.svs"):
        slide.read_tile(0, 0, 224, 0.5)
    slide = open_slide(path, mpp=0.25)
    assert [level.downsample for level in slide.levels] == [1, 2]
    assert slide.thumbnail(8).shape == (112, 139, 3)
    assert slide.read_tile(2000, 1500, 224, 0.5).std() > 5
