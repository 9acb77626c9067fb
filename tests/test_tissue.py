"""Tissue masks against planted truth."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.error_codes import has_code
from selfvitmil import tissue
from selfvitmil.errors import TissueError
from selfvitmil.settings import TissueSettings

GLASS, PINK, PURPLE = (243, 242, 244), (222, 170, 205), (150, 90, 160)


def picture(
    height: int = 120, width: int = 160, colour: tuple[int, int, int] = GLASS, noise: float = 2.0
) -> np.ndarray:
    generator = np.random.default_rng(0)
    pixels = np.full((height, width, 3), colour, dtype=np.float64) + generator.normal(0, noise, (height, width, 3))
    return np.clip(pixels, 0, 255).astype(np.uint8)


def paint(pixels: np.ndarray, rows: slice, columns: slice, colour: tuple[int, int, int]) -> np.ndarray:
    generator = np.random.default_rng(1)
    shape = pixels[rows, columns].shape
    pixels[rows, columns] = np.clip(np.array(colour) + generator.normal(0, 6, shape), 0, 255)
    return pixels


def brute_otsu(values: np.ndarray) -> float:
    """Variance between classes for every threshold, from the definition."""
    scores = []
    for threshold in range(1, 256):
        low, high = values[values < threshold], values[values >= threshold]
        scores.append(len(low) * len(high) * (low.mean() - high.mean()) ** 2 if len(low) and len(high) else 0.0)
    return max(scores)


@given(st.lists(st.integers(0, 255), min_size=2, max_size=60).filter(lambda values: len(set(values)) > 1))
def test_otsu_maximises_the_variance_between_classes(values: list[int]):
    array = np.array(values, dtype=np.uint8)
    threshold = tissue.otsu_threshold(array)
    low, high = array[array < threshold].astype(float), array[array >= threshold].astype(float)
    score = len(low) * len(high) * (low.mean() - high.mean()) ** 2
    assert score == pytest.approx(brute_otsu(array.astype(float)), rel=1e-9)


@pytest.mark.parametrize("method", ["otsu", "saturation"])
def test_planted_tissue_is_found(method: str):
    pixels = paint(picture(), slice(30, 90), slice(40, 120), PINK)
    mask, _, warnings = tissue.segment(pixels, TissueSettings(method=method), "s")  # pyright: ignore[reportArgumentType]
    truth = np.zeros(mask.shape, bool)
    truth[30:90, 40:120] = True
    assert (mask == truth).mean() > 0.99
    assert warnings == ()


def test_white_padding_does_not_move_the_threshold():
    """A small biopsy on grey glass beside a large unscanned area: plain Otsu would split glass from padding."""
    pixels = paint(picture(400, 400, (236, 236, 236)), slice(10, 30), slice(10, 30), PINK)
    pixels[:, 200:] = 255
    mask, threshold, _ = tissue.segment(pixels, TissueSettings(), "s")
    assert threshold is not None
    assert threshold < 230
    assert mask[10:30, 10:30].mean() > 0.95
    assert mask.mean() < 0.005


def test_black_padding_is_not_tissue():
    pixels = paint(picture(), slice(30, 90), slice(40, 120), PURPLE)
    pixels[:, :20] = 0
    mask, _, _ = tissue.segment(pixels, TissueSettings(), "s")
    assert not mask[:, :20].any()
    assert mask[35:85, 45:115].all()


def test_a_slide_without_glass_is_all_tissue_and_says_so():
    pixels = paint(picture(colour=PINK, noise=5), slice(0, 120), slice(80, 160), PURPLE)
    mask, threshold, warnings = tissue.segment(pixels, TissueSettings(), "s")
    assert mask.mean() > 0.99
    assert threshold is None
    assert "hardly any glass" in warnings[0]


@pytest.mark.parametrize("colour", [(255, 255, 255), (0, 0, 0)])
def test_all_white_and_all_black_are_empty(colour: tuple[int, int, int]):
    pixels = np.full((50, 50, 3), colour, dtype=np.uint8)
    with pytest.raises(TissueError, match="empty"):
        tissue.segment(pixels, TissueSettings(), "s")


def test_bare_glass_is_not_tissue():
    with pytest.raises(TissueError, check=has_code("no-tissue")):
        tissue.segment(picture(noise=3), TissueSettings(), "s")


def test_specks_go_and_holes_are_filled_by_area():
    mask = np.zeros((100, 100), bool)
    mask[10:60, 10:60] = True
    mask[20:24, 20:24] = False  # a hole of 16 pixels
    mask[35:50, 35:50] = False  # a hole of 225 pixels
    mask[80:84, 80:84] = True  # a speck of 16 pixels
    cleaned = tissue.clean(mask, mpp=10.0, min_area_um2=2_000, max_hole_um2=2_000)  # 20 pixels
    expected = mask.copy()
    expected[20:24, 20:24] = True
    expected[80:84, 80:84] = False
    assert np.array_equal(cleaned, expected)


def test_glass_cut_off_by_the_border_is_not_a_hole():
    mask = np.ones((40, 40), bool)
    mask[:3, :3] = False
    assert not tissue.clean(mask, 1.0, 0, 1_000)[:3, :3].any()


@pytest.mark.parametrize(("colour", "is_pen"), [
    ((30, 140, 60), True), ((40, 90, 200), True), ((25, 25, 30), True),
    (PINK, False), (PURPLE, False), ((95, 60, 140), False), ((180, 40, 60), False), (GLASS, False),
])  # fmt: skip
def test_pen_colours_are_told_from_stains(colour: tuple[int, int, int], is_pen: bool):
    pixels = picture(60, 60)
    pixels[20:40, 20:40] = colour
    assert tissue.pen_marks(pixels)[20:40, 20:40].mean() == float(is_pen)
    assert not tissue.pen_marks(pixels)[:15].any()
