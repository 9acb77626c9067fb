"""The reader of other TIFF, PNG and JPEG: pixels against the arrays that were written, and files that are traps."""

from __future__ import annotations

import pickle
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from PIL import Image

from helpers.error_codes import has_code
from selfvitmil.cohort import read_cohort
from selfvitmil.errors import CohortError, MissingMppError, SlideError
from selfvitmil.slides import image as reader
from selfvitmil.slides import open_slide
from selfvitmil.store.guard import helper

WIDTH, HEIGHT = 300, 220


@pytest.fixture
def pixels() -> np.ndarray:
    rng = np.random.default_rng(0)
    smooth = rng.integers(0, 255, (HEIGHT // 20, WIDTH // 20, 3)).astype(np.uint8)
    image = np.asarray(Image.fromarray(smooth).resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC)).astype(int)
    return np.clip(image + rng.integers(-9, 9, image.shape), 0, 255).astype(np.uint8)


def halved(pixels: np.ndarray) -> np.ndarray:
    return pixels.reshape(HEIGHT // 2, 2, WIDTH // 2, 2, 3).mean(axis=(1, 3)).round().astype(np.uint8)


def check(path: Path, pixels: np.ndarray, mpp: float | None = 0.5) -> Any:
    """Compare a region over the slide's edge, and the whole, with the array."""
    with open_slide(path, mpp=mpp) as slide:
        assert (slide.reader, slide.size_l0, slide.mpp) == ("image", (WIDTH, HEIGHT), pytest.approx(0.5))
        np.testing.assert_array_equal(slide.thumbnail(slide.mpp), pixels)
        region = slide.read_region(200, 100, (150, 150), slide.mpp)
        np.testing.assert_array_equal(region[:120, :100], pixels[100:, 200:])
        assert (region[120:] == 255).all()
        assert (region[:, 100:] == 255).all()
        again = pickle.loads(pickle.dumps(slide))
        np.testing.assert_array_equal(again.read_tile(7, 9, 50, slide.mpp), pixels[9:59, 7:57])
        return slide


MICRONS: dict[str, Any] = {"PhysicalSizeX": 500, "PhysicalSizeXUnit": "nm", "PhysicalSizeY": 0.5}


@pytest.mark.parametrize("tile", [(64, 80), None], ids=["tiles", "strips"])
@pytest.mark.parametrize("compression", [None, "zlib"])
def test_ome_tiff_has_its_levels_and_microns(
    tmp_path: Path, pixels: np.ndarray, tile: tuple[int, int] | None, compression: str | None
) -> None:
    path = tmp_path / "a.ome.tif"
    options: dict[str, Any] = {"tile": tile, "compression": compression, "photometric": "rgb", "predictor": False}
    with tifffile.TiffWriter(path, ome=True) as file:
        file.write(pixels, subifds=1, metadata={"axes": "YXS", **MICRONS}, **options)
        file.write(halved(pixels), subfiletype=1, **options)
    slide = check(path, pixels, mpp=None)
    assert slide.mpp_source == "OME PhysicalSize"
    assert [level.size for level in slide.levels] == [(WIDTH, HEIGHT), (WIDTH // 2, HEIGHT // 2)]
    np.testing.assert_array_equal(slide._pixels(1, 1, (0, 0, 150, 110), np.uint8), halved(pixels))


def test_ome_tiff_may_store_its_colours_as_three_pages(tmp_path: Path, pixels: np.ndarray) -> None:
    path = tmp_path / "a.ome.tif"
    options: dict[str, Any] = {"tile": (64, 64), "compression": "zlib", "photometric": "minisblack"}
    with tifffile.TiffWriter(path, ome=True) as file:
        file.write(np.moveaxis(pixels, -1, 0), subifds=1, metadata={"axes": "CYX", **MICRONS}, **options)
        file.write(np.moveaxis(halved(pixels), -1, 0), subfiletype=1, **options)
    assert len(check(path, pixels, mpp=None).levels) == 2


@pytest.mark.parametrize("compression", ["tiff_lzw", "tiff_adobe_deflate", "packbits", None])
def test_tiff_without_tiles(tmp_path: Path, pixels: np.ndarray, compression: str | None) -> None:
    path = tmp_path / "a.tif"
    Image.fromarray(pixels).save(path, **({"compression": compression} if compression else {}))
    check(path, pixels)


@pytest.mark.parametrize("subsampling", [0, 2])
def test_jpeg_in_strips_equals_pillow(tmp_path: Path, pixels: np.ndarray, subsampling: int) -> None:
    path = tmp_path / "a.tif"
    Image.fromarray(pixels).save(path, compression="jpeg", subsampling=subsampling)
    with Image.open(path) as image:
        check(path, np.asarray(image.convert("RGB")))


@pytest.mark.parametrize("options", [
    {"planarconfig": "separate"},
    {"planarconfig": "separate", "tile": (64, 64)},
    {"byteorder": ">", "compression": "zlib", "predictor": True},
    {"resolution": (20_000, 20_000), "resolutionunit": "CENTIMETER"},
])  # fmt: skip
def test_unusual_tiff(tmp_path: Path, pixels: np.ndarray, options: dict[str, Any]) -> None:
    path = tmp_path / "a.tif"
    data = np.moveaxis(pixels, -1, 0) if "planarconfig" in options else pixels
    tifffile.imwrite(path, data, photometric="rgb", **options)
    check(path, pixels, mpp=None if "resolution" in options else 0.5)


def test_one_uncompressed_strip_is_read_in_parts(
    tmp_path: Path, pixels: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "STRIP_BYTES", 64 * WIDTH * 3)
    monkeypatch.setattr(reader, "MAX_IMAGE_PX", 64 * WIDTH)  # the whole would be too large
    path = tmp_path / "a.tif"
    tifffile.imwrite(path, pixels, photometric="rgb", rowsperstrip=HEIGHT)
    check(path, pixels)


def test_png_and_jpeg(tmp_path: Path, pixels: np.ndarray) -> None:
    Image.fromarray(pixels).save(tmp_path / "a.png")
    check(tmp_path / "a.png", pixels)
    Image.fromarray(pixels).save(tmp_path / "a.jpg", dpi=(300, 300))
    with Image.open(tmp_path / "a.jpg") as image:
        check(tmp_path / "a.jpg", np.asarray(image))
    with open_slide(tmp_path / "a.jpg") as slide, pytest.raises(MissingMppError) as raised:
        assert slide.mpp
    assert "JPEG image" in str(raised.value)


def test_transparent_pixels_are_white_and_palettes_are_colours(tmp_path: Path, pixels: np.ndarray) -> None:
    alpha = np.full((HEIGHT, WIDTH, 1), 255, np.uint8)
    alpha[150:] = 0
    expected = np.where(alpha == 0, 255, pixels).astype(np.uint8)
    Image.fromarray(np.dstack([pixels, alpha])).save(tmp_path / "a.png")
    check(tmp_path / "a.png", expected)
    tifffile.imwrite(tmp_path / "a.tif", np.dstack([pixels, alpha]), photometric="rgb", extrasamples=["unassalpha"])
    check(tmp_path / "a.tif", expected)
    palette = Image.fromarray(pixels).quantize(200)
    palette.save(tmp_path / "p.png")
    check(tmp_path / "p.png", np.asarray(palette.convert("RGB")))


def test_an_exif_rotation_is_ignored_and_told(tmp_path: Path, pixels: np.ndarray) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    for name in ("a.jpg", "a.png"):
        Image.fromarray(pixels).save(tmp_path / name, exif=exif)
        with open_slide(tmp_path / name, mpp=0.5) as slide:
            assert slide.size_l0 == (WIDTH, HEIGHT)
            assert "rotation" in slide.warnings[0]


def png(width: int, height: int, depth: int = 8, rows: bytes = b"") -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


@pytest.mark.parametrize("edge", [12_300, 200_000])  # within and beyond what Pillow itself refuses
def test_a_png_that_claims_to_be_huge_is_refused_without_decoding(
    tmp_path: Path, edge: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(helper, "check", lambda kind, path: None)
    monkeypatch.setattr(Image.Image, "load", lambda image: pytest.fail("it was decoded"))
    path = tmp_path / "a.png"
    path.write_bytes(png(edge, edge))
    with pytest.raises(SlideError, match="vips") as raised:
        open_slide(path)
    assert raised.value.code == "image-too-large"


def test_what_is_not_8_bit_rgb_is_refused(tmp_path: Path, pixels: np.ndarray) -> None:
    image = Image.fromarray(pixels)
    image.convert("CMYK").save(tmp_path / "cmyk.jpg")
    image.convert("L").save(tmp_path / "grey.png")
    Image.fromarray(pixels[..., 0].astype(np.uint16)).save(tmp_path / "grey16.png")
    (tmp_path / "rgb16.png").write_bytes(png(8, 8, 16, bytes(8 * (1 + 8 * 6))))
    tifffile.imwrite(tmp_path / "rgb16.tif", pixels.astype(np.uint16), photometric="rgb")
    tifffile.imwrite(tmp_path / "grey.tif", pixels[..., 0], photometric="minisblack")
    image.quantize(16).save(tmp_path / "palette.tif")
    for path in tmp_path.iterdir():
        with pytest.raises(SlideError) as raised:
            open_slide(path)
        assert raised.value.code == "unsupported-image", path.name


@pytest.mark.parametrize(("name", "compression"), [("a.png", None), ("a.jpg", None), ("a.tif", "tiff_lzw")])
def test_truncated_images_are_errors_at_every_length(
    tmp_path: Path, pixels: np.ndarray, name: str, compression: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(helper, "check", lambda kind, path: None)
    path = tmp_path / name
    Image.fromarray(pixels).save(path, **({"compression": compression} if compression else {}))
    whole = path.read_bytes()
    for length in (3, 9, 100, len(whole) // 3, len(whole) * 9 // 10):
        path.write_bytes(whole[:length])
        with pytest.raises(SlideError) as raised, open_slide(path, mpp=0.5) as slide:
            slide.thumbnail(2.0)
        assert raised.value.how


def test_random_damage_gives_pixels_or_a_clear_error(
    tmp_path: Path, pixels: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(helper, "check", lambda kind, path: None)
    rng, path = np.random.default_rng(1), tmp_path / "a.tif"
    Image.fromarray(pixels).save(path, compression="tiff_lzw")
    whole = np.frombuffer(path.read_bytes(), np.uint8)
    for _ in range(60):
        damaged = whole.copy()
        damaged[rng.integers(0, len(whole), 4)] = rng.integers(0, 256, 4)
        damaged[rng.integers(len(whole) - 200, len(whole), 2)] = rng.integers(0, 256, 2)  # the directory
        path.write_bytes(damaged.tobytes())
        try:
            with open_slide(path, mpp=0.5) as slide:
                slide.read_tile(0, 0, 64, 0.5)
        except SlideError:
            continue


def test_a_folder_of_images_is_a_cohort_unless_it_has_slides(tmp_path: Path, pixels: np.ndarray) -> None:
    for name in ("a.png", "b.JPG"):
        Image.fromarray(pixels).save(tmp_path / name)
    (tmp_path / "notes.txt").touch()
    cohort = read_cohort(tmp_path)
    assert list(cohort.slides) == ["a", "b"]
    assert any("taken as slides (2)" in text for text in cohort.warnings)
    tifffile.imwrite(tmp_path / "c.tif", pixels, photometric="rgb")
    cohort = read_cohort(tmp_path)
    assert list(cohort.slides) == ["c"]
    assert any("not taken" in text for text in cohort.warnings)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(CohortError, check=has_code("no-slides")):
        read_cohort(empty)


def test_the_reader_is_told_where_it_cannot_read(tmp_path: Path) -> None:
    (tmp_path / "a.tif").write_bytes(b"not a picture at all")
    with pytest.raises(SlideError, check=has_code("reader-unsuitable")):
        open_slide(tmp_path / "a.tif", reader="image")
    with pytest.raises(SlideError, check=has_code("not-a-slide")):
        open_slide(tmp_path / "a.tif")
