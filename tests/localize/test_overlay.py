"""Pictures of maps: pixels against slow loops and planted truth, words against what the map says, files against other
readers."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import openslide
import pytest
import tifffile
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from helpers.heatmaps import PREDICTION, make_heatmap
from selfvitmil.annotations import Annotation
from selfvitmil.errors import SlideError
from selfvitmil.localize import export, overlay
from selfvitmil.localize.detection import find_lesions
from selfvitmil.localize.heatmap import Frame, Heatmap
from selfvitmil.localize.overlay import (
    NO_TILE,
    Colors,
    Raster,
    color_table,
    draw_layer,
    draw_overlay,
    paint_tiles,
    scale_bar,
    shortened,
    wrapped,
    write_overlays,
    zoom_box,
)
from selfvitmil.settings import LocalizeSettings
from selfvitmil.slides import open_slide
from selfvitmil.slides.synthetic import make_slide, write_sparse_slide
from selfvitmil.tiles import grid

ALL_COLORS: tuple[Colors, ...] = ("red", "inferno", "viridis")
SQUARE = np.array([(0.0, 0.0), (1.0, 0.0), (1.0, 1.0), (0.0, 1.0)])


def picture(width: int, height: int, seed: int = 0) -> np.ndarray:
    """Any tissue."""
    return np.random.default_rng(seed).integers(90, 256, (height, width, 3)).astype(np.uint8)


def cut_map(
    size_l0: tuple[int, int], slide_mpp: float, size_px: int = 32, mpp: float = 0.5, overlap_px: int = 0, **changes: Any
) -> Heatmap:
    """All tiles of a slide as tiling cuts them, with random scores."""
    coords = grid(size_l0, slide_mpp, size_px, mpp, overlap_px)
    extent, stride = size_px * mpp / slide_mpp, (size_px - overlap_px) * mpp / slide_mpp
    score = np.random.default_rng(1).random(len(coords)).astype(np.float32)
    told: dict[str, Any] = {
        "frame": Frame(slide_mpp, size_l0, extent, stride, mpp, size_px),
        "coords_l0": coords,
        "score": score,
        "detection": score,
        "columns": {"attention": score},
        "annotated": None,
    }
    return replace(make_heatmap(), **{**told, **changes})


def expected_color(score: float, under: Sequence[int], colors: Colors) -> np.ndarray:
    """A pixel under a tile, from matplotlib's colours or the definition of red."""
    step = round(255 * score)
    top = np.array([step, 0, 0]) if colors == "red" else np.array(matplotlib.colormaps[colors](step, bytes=True)[:3])
    low, high = {"red": (0.5, 0.62), "inferno": (0.2, 0.7), "viridis": (0.25, 0.7)}[colors]
    opacity = low + (high - low) * step / 255
    return (1 - opacity) * np.array(under) + opacity * top


def panel_of(page: Image.Image, size: tuple[int, int], number: int = 0) -> tuple[np.ndarray, tuple[int, int]]:
    """The picture inside a page, and its place: it stands in a thin grey frame."""
    pixels = np.asarray(page)
    line = (pixels == 0xD0).all(axis=-1)
    width, height = size
    for top in range(pixels.shape[0] - height - 1):
        lefts = [x for x in np.flatnonzero(line[top, : -width - 1]) if line[top, x : x + width + 2].all()]
        lefts = [x for x in lefts if line[top + height + 1, x] and line[top + 1, x]]
        if lefts:
            x = lefts[number] + 1
            return pixels[top + 1 : top + 1 + height, x : x + width], (int(x), top + 1)
    raise AssertionError("no panel")


# ---------------------------------------------------------------------------------------------------- tiles


@given(
    downsample=st.floats(3, 40),
    origin=st.tuples(st.integers(-50, 200), st.integers(-50, 200)),
    stride=st.sampled_from([64, 48, 32, 80]),
    colors=st.sampled_from(ALL_COLORS),
    seed=st.integers(0, 99),
)
@settings(max_examples=40)
def test_a_pixel_shows_the_mean_of_the_tiles_that_hold_its_centre(
    downsample: float, origin: tuple[int, int], stride: int, colors: Colors, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    cells = rng.permutation([(x, y) for x in range(5) for y in range(4)])[:12]
    frame = Frame(0.25, (400, 400), 64.0, float(stride), 0.5, 32)
    score = rng.random(12).astype(np.float32)
    heatmap = make_heatmap(frame=frame, coords_l0=cells * stride, score=score)
    under = picture(23, 17, seed)
    painted = paint_tiles(heatmap, under, downsample * 0.25, colors, origin)
    for i, j in product(range(17), range(23)):
        centre = np.array(origin) + (np.array([j, i]) + 0.5) * downsample
        holding = ((heatmap.coords_l0 <= centre) & (centre < heatmap.coords_l0 + 64)).all(axis=1)
        if not holding.any():
            assert (painted[i, j] == under[i, j]).all()
            continue
        mean = float(score[holding].astype(np.float64).mean())
        if abs(255 * mean % 1 - 0.5) > 1e-4:  # not on the border of two colours
            np.testing.assert_allclose(painted[i, j], expected_color(mean, under[i, j], colors), atol=0.51)


@pytest.mark.parametrize(("slide_mpp", "mpp"), [(0.2431, 3.7), (0.4990, 1.3), (0.2507, 0.9), (0.2528, 0.2528)])
def test_tiles_of_odd_extent_lie_in_place_and_leave_no_gap(slide_mpp: float, mpp: float) -> None:
    heatmap = cut_map((900, 700), slide_mpp, size_px=30)
    assert heatmap.frame.extent_l0 % 1 != 0
    width, height = math.ceil(900 * slide_mpp / mpp), math.ceil(700 * slide_mpp / mpp)
    downsample = mpp / slide_mpp
    index = Raster.over(heatmap, (width, height), downsample).rows(0, height)
    for (x, y), score in zip(heatmap.centres_l0, heatmap.score, strict=True):
        assert index[int(y / downsample), int(x / downsample)] == round(255 * float(score))
    # Within the hull of the grid every pixel has a tile, although neighbours' stored corners are rounded.
    x1, y1 = ((heatmap.coords_l0.max(axis=0) + heatmap.frame.extent_l0) / downsample - 0.5).astype(int)
    assert (index[:y1, :x1] != NO_TILE).all()
    assert (index[y1 + 2 :] == NO_TILE).all()
    assert (index[:, x1 + 2 :] == NO_TILE).all()


def test_bands_and_crops_show_the_same_tiles_as_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    heatmap = cut_map((1600, 1200), 0.25, overlap_px=11)
    under = picture(200, 150)
    whole = paint_tiles(heatmap, under, 2.0)
    crop = paint_tiles(heatmap, under[30:90, 50:120], 2.0, origin_l0=(50 * 8, 30 * 8))
    np.testing.assert_array_equal(crop, whole[30:90, 50:120])
    monkeypatch.setattr("selfvitmil.localize.overlay.BAND_PX", 7)
    np.testing.assert_array_equal(paint_tiles(heatmap, under, 2.0), whole)


def test_tiles_finer_than_pixels_share_them() -> None:
    heatmap = cut_map((640, 640), 0.25)
    index = Raster.over(heatmap, (4, 4), 160.0).rows(0, 4)  # tiles of 64 in pixels of 160
    assert (index != NO_TILE).all()
    assert abs(index.mean() / 255 - heatmap.score.mean()) < 0.1


def test_large_tiles_are_parted_by_a_dark_line_at_their_edge_only() -> None:
    heatmap = replace(cut_map((640, 320), 0.25), score=np.full(50, 0.5, np.float32))
    painted = paint_tiles(heatmap, np.full((160, 320, 3), 200, np.uint8), 0.5)  # tiles of 32 px
    inner = painted[1, 1]
    assert (painted.reshape(5, 32, 10, 32, 3)[:, 1:, :, 1:] == inner).all()
    assert (painted[::32].astype(int) < inner).all()
    assert (painted[:, ::32].astype(int) < inner).all()


@pytest.mark.parametrize("colors", ALL_COLORS)
def test_more_evidence_is_brighter_or_redder_and_tissue_stays_visible(colors: Colors) -> None:
    table = color_table(colors).astype(int)
    light = table[:256] @ [0.299, 0.587, 0.114]
    assert (np.diff(light) > -0.5).all()
    pale, dark = (
        paint_tiles(make_heatmap(), np.full((9, 12, 3), grey, np.uint8), 112.0, colors) for grey in (230, 120)
    )
    assert (pale.astype(int) - dark > 25).all()


# ---------------------------------------------------------------------------------------------------- the page


@pytest.mark.parametrize("box_l0", [None, (448, 448, 448 * 9, 448 * 7)])
def test_the_page_holds_the_tinted_slide_to_the_pixel(box_l0: tuple[int, int, int, int] | None) -> None:
    heatmap = make_heatmap()
    x0, y0, x1, y1 = box_l0 or (0, 0, 448 * 12, 448 * 9)
    under = picture((x1 - x0) // 28, (y1 - y0) // 28)
    page = draw_overlay(heatmap, under, 7.0, colors="viridis", box_l0=box_l0)
    panel, _ = panel_of(page, (under.shape[1], under.shape[0]))
    np.testing.assert_array_equal(panel, paint_tiles(heatmap, under, 7.0, "viridis", (x0, y0)))
    row = 5 * 12 + 6  # column 6, row 5
    x, y = ((heatmap.centres_l0[row] - (x0, y0)) / 28).astype(int)
    wanted = expected_color(float(heatmap.score[row]), under[y, x], "viridis")
    np.testing.assert_allclose(panel[y, x], wanted, atol=1)


def test_a_panel_alone_is_the_one_of_the_page() -> None:
    under = picture(192, 144)
    corners = np.array([(1500.0, 1300.0), (3000.0, 1300.0), (3000.0, 2500.0), (1500.0, 2500.0)])
    outlines = [Annotation("a", "Tumor", corners)]
    page = draw_overlay(make_heatmap(), under, 7.0, colors="inferno", annotations=outlines)
    layer = draw_layer(make_heatmap(), (192, 144), 7.0, colors="inferno", annotations=outlines)
    assert layer.mode == "RGBA"
    alone = np.asarray(Image.alpha_composite(Image.fromarray(under).convert("RGBA"), layer).convert("RGB"))
    assert alone.shape == under.shape
    # Lines are as wide as the words of a page ask for; away from them all pixels are the same.
    panel, _ = panel_of(page, (192, 144))
    far = np.ones(under.shape[:2], bool)
    far[42:93, 49:112] = False
    assert np.abs(alone[far].astype(int) - panel[far]).max() <= 2  # opacity has 256 steps
    assert (alone == (0x00, 0xE5, 0xFF)).all(axis=2).sum() > 150


def test_beside_it_stands_the_tissue_alone() -> None:
    under = picture(192, 144)
    page = draw_overlay(make_heatmap(), under, 7.0, beside=True)
    np.testing.assert_array_equal(panel_of(page, (192, 144), 0)[0], under)
    np.testing.assert_array_equal(panel_of(page, (192, 144), 1)[0], paint_tiles(make_heatmap(), under, 7.0))


@pytest.mark.parametrize("box_l0", [None, (448, 896, 448 * 9, 448 * 8)])
def test_outlines_lie_where_they_were_drawn(box_l0: tuple[int, int, int, int] | None) -> None:
    heatmap = make_heatmap()
    x0, y0, x1, y1 = box_l0 or (0, 0, 448 * 12, 448 * 9)
    under = picture((x1 - x0) // 8, (y1 - y0) // 8)
    corners = np.array([(1500.0, 1300.0), (3000.0, 1300.0), (3000.0, 2500.0), (1500.0, 2500.0)])
    page = draw_overlay(heatmap, under, 2.0, annotations=[Annotation("a", "Tumor", corners)], box_l0=box_l0)
    panel, _ = panel_of(page, (under.shape[1], under.shape[0]))
    bright = (panel == (0x00, 0xE5, 0xFF)).all(axis=-1)
    rows, columns = np.nonzero(bright)
    left, right = (1500 - x0) / 8, (3000 - x0) / 8
    top, bottom = (1300 - y0) / 8, (2500 - y0) / 8
    assert abs(columns.min() + columns.max() + 1 - left - right) <= 2
    assert abs(rows.min() + rows.max() + 1 - top - bottom) <= 2
    for x, y in [(left, (top + bottom) / 2), (right, bottom - 9), ((left + right) / 2, top), (left + 9, bottom)]:
        assert bright[int(y) - 1 : int(y) + 2, int(x) - 1 : int(x) + 2].any()
    inside = bright[int(top) + 5 : int(bottom) - 5, int(left) + 5 : int(right) - 5]
    assert not inside.any()
    dark = (panel == 0x22).all(axis=-1)  # the casing makes it visible on bright tissue
    assert dark.sum() > bright.sum() / 2


def test_outlines_of_every_kind_have_their_line_and_legend() -> None:
    heatmap = make_heatmap()
    ring = 448 * 2 * SQUARE
    outlines = [
        Annotation("a", "Tumor", ring + 448),
        Annotation("b", "Exclusion", ring + 448 * 4),
        Annotation("c", "Necrosis", ring + 448 * 6),
        Annotation("d", "", ring + 100, shape="points"),
        Annotation("e", "Vessel", ring + 200, shape="line"),
        Annotation("f", "Tumor", np.empty((0, 2)), shape="points"),
    ]
    lesions = find_lesions(heatmap, 0.5)
    under = picture(384, 288)
    bare = draw_overlay(heatmap, under, 3.5)
    page = draw_overlay(heatmap, under, 3.5, annotations=outlines, lesions=lesions, frame_l0=(0, 0, 900, 900))
    panel, (_, top) = panel_of(page, (384, 288))
    foot = np.asarray(page)[top + 288 + 2 :]
    for color in (overlay.ANNOTATED, overlay.EXCLUDED, overlay.OTHER, overlay.FRAME):
        rgb = [int(color[k : k + 2], 16) for k in (1, 3, 5)]
        assert (panel == rgb).all(axis=-1).sum() > 20
        assert (foot == rgb).all(axis=-1).sum() > 20
    assert page.height > bare.height
    # The lesion's outline is that of its tiles: columns 4 to 6, rows 3 and 4.
    found = (panel == 255).all(axis=-1)
    assert found[3 * 32 - 1 : 3 * 32 + 1, 4 * 32 : 7 * 32].any(axis=0).all()
    assert not found[3 * 32 + 4 : 5 * 32 - 4, 4 * 32 + 4 : 7 * 32 - 4].any()


@pytest.mark.parametrize(("mpp", "width"), [(7.0, 1000), (0.4990, 640), (12.5, 2000), (0.2431, 300), (3.3, 800)])
def test_the_scale_bar_is_as_long_as_it_says(mpp: float, width: int) -> None:
    heatmap = make_heatmap()
    under = np.full((90, width, 3), 230, np.uint8)
    page = draw_overlay(heatmap, under, mpp)
    _, (left, top) = panel_of(page, (width, 90))
    foot = np.asarray(page)[top + 91 :, left : left + width // 2]
    ink = (foot == 0x22).all(axis=-1)
    first = int(np.flatnonzero(ink.any(axis=1))[0])
    runs = np.flatnonzero(np.diff(np.concatenate([[0], ink[first + 1].astype(int), [0]])))
    microns, words = scale_bar(mpp, max(width / 4, 5 * max(13, round(width / 72))))
    assert abs((runs[1] - runs[0]) - microns / mpp) <= 0.5
    assert words == (f"{microns / 1000:g} mm" if microns >= 1000 else f"{microns:g} µm")


@given(st.floats(0.1, 200), st.floats(20, 3000))
def test_scale_bars_are_round_numbers_as_long_as_may_be(mpp: float, most_px: float) -> None:
    microns, _ = scale_bar(mpp, most_px)
    digit = round(microns / 10 ** math.floor(math.log10(microns) + 1e-9), 6)
    assert digit in (1, 2, 5)
    assert microns <= mpp * most_px * (1 + 1e-6)
    assert microns * (2.5 if digit == 2 else 2) > mpp * most_px


def test_the_colour_bar_shows_the_colours_of_the_tiles() -> None:
    score = np.linspace(0, 1, 108).astype(np.float32)
    under = np.full((108, 144, 3), (210, 160, 190), np.uint8)
    page = draw_overlay(make_heatmap(score=score), under, 37.33 * 0.25, colors="inferno")
    panel, (_, top) = panel_of(page, (144, 108))
    foot = np.asarray(page)[top + 110 :].reshape(-1, 3).astype(int)
    for shown in np.unique(panel.reshape(-1, 3)[::97], axis=0).astype(int):
        assert np.abs(foot - shown).max(axis=1).min() <= 4, f"{shown} is not in the colour bar"


# ---------------------------------------------------------------------------------------------------- words


def words_of(heatmap: Heatmap) -> str:
    parts = (overlay.prediction_words, overlay.model_words, overlay.caveats, overlay.score_words)
    return " ".join(part(heatmap) for part in parts)


@pytest.mark.parametrize(
    ("changes", "prediction", "said"),
    [
        (
            {},
            {},
            ["0.900", "decision: tumor", "threshold 0.4: Youden on validation", "not trained on it", "2 trainings"],
        ),
        ({}, {"part": "train"}, ["The model was trained on this slide"]),
        ({}, {"part": "val"}, ["chosen with it"]),
        ({}, {"decision": "normal"}, ["Called normal, not tumor: colours only rank tiles within this slide"]),
        ({"gated": True}, {"decision": "normal"}, ["Called normal, not tumor: all scores are set to 0"]),
        ({"score": np.zeros(108, np.float32)}, {}, ["is uninformative"]),
        ({"model": "vit_dsmil_optimistic"}, {}, ["OPTIMISTIC"]),
        ({}, {"threshold": None, "threshold_from": ""}, ["(the most probable class)"]),
        ({"kind": "effect", "scale": "percentile"}, {}, ["when the tile is left out", "share of this slide's tiles"]),
        ({"kind": "instance"}, {}, ["on its own", "Tiles of 112 µm"]),
    ],
)
def test_the_caption_says_what_the_map_is(changes: dict[str, Any], prediction: dict[str, Any], said: list[str]) -> None:
    words = words_of(make_heatmap(prediction=replace(PREDICTION, **prediction), **changes))
    assert all(part in words for part in said), words


def test_an_ordinary_map_has_no_caveat() -> None:
    assert overlay.caveats(make_heatmap()) == ""


@given(st.text(max_size=60), st.floats(20, 300))
def test_text_is_cut_to_its_width(text: str, width: float) -> None:
    def length(words: str) -> float:
        return 7.0 * len(words)

    clean = overlay.printable(text)
    assert clean.isprintable()
    short = shortened(clean, width, length)
    assert short == clean if length(clean) <= width else length(short) <= width and "…" in short
    lines = wrapped(clean, width, length)
    assert all(length(line) <= width for line in lines)
    if max(map(length, clean.split()), default=0) <= width:
        assert " ".join(lines) == " ".join(clean.split())


def test_a_long_name_keeps_both_its_ends() -> None:
    assert shortened("TCGA-AA-3844-01Z-00-DX1_level3", 16, len) == "TCGA-AA-…_level3"


@pytest.mark.parametrize("title", ["x" * 500, "Präparat größe 切片 №1", "two\nlines\x00\u202e", "words " * 80])
def test_any_title_stays_on_the_page(title: str) -> None:
    prediction = replace(PREDICTION, shown="tumor", decision="y" * 300, threshold_from="z " * 300)
    heatmap = make_heatmap(slide=title, prediction=prediction)
    for shape in ((300, 80, 3), (40, 500, 3)):
        page = np.asarray(draw_overlay(heatmap, np.full(shape, 230, np.uint8), 17.0))
        assert (page[:, -6:] == 255).all()
        assert (page[-3:] == 255).all()


def test_a_title_stands_for_the_name_of_the_slide() -> None:
    under = picture(96, 72)
    named, hidden = (make_heatmap(slide=name) for name in ("patient_7", "x"))
    told = draw_overlay(named, under, 14.0, title="slide 001")
    assert told.tobytes() == draw_overlay(hidden, under, 14.0, title="slide 001").tobytes()
    assert told.tobytes() != draw_overlay(named, under, 14.0).tobytes()


# ---------------------------------------------------------------------------------------------------- files


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Annotation], Heatmap]:
    """A slide with a planted lesion, its outline, and a map that finds it."""
    path = tmp_path_factory.mktemp("made") / "made.svs"
    truth = make_slide(path, seed=7, size=(3000, 2200), lesions=1, lesion_um=(180.0, 220.0))
    heatmap = cut_map((3000, 2200), 0.25, size_px=112, slide="made")
    low, high = truth.lesions[0].min(axis=0), truth.lesions[0].max(axis=0)
    inside = ((heatmap.centres_l0 > low) & (heatmap.centres_l0 < high)).all(axis=1)
    score = np.where(inside, 0.9, 0.1 * heatmap.score).astype(np.float32)
    return path, [Annotation("lesion", "Tumor", truth.lesions[0])], replace(heatmap, score=score)


def test_files_show_the_slide_and_its_hottest_region(made: Any, tmp_path: Path) -> None:
    path, outlines, heatmap = made
    chosen = LocalizeSettings(picture_px=600, colors=("red", "viridis"))
    lesions = find_lesions(heatmap, 0.5)
    with open_slide(path) as slide:
        written = write_overlays(tmp_path, heatmap, slide, chosen, outlines, lesions)
        again = write_overlays(tmp_path / "again", heatmap, slide, chosen, outlines, lesions)
        thumbnail = slide.thumbnail(0.25 * 3000 / 600)
        box = zoom_box(heatmap, lesions)
        assert box is not None
        edge_px = math.ceil((box[2] - box[0]) * 300 / (box[2] - box[0]))
        part = slide.read_region(*box[:2], (edge_px, edge_px), (box[2] - box[0]) * 0.25 / 300)
    assert [file.name for file in written] == [
        *("made_red.png", "made_zoom_red.png", "made_viridis.png", "made_zoom_viridis.png")
    ]
    assert [file.read_bytes() for file in written] == [file.read_bytes() for file in again]
    assert not list(tmp_path.glob(".*"))

    low, high = outlines[0].polygon.min(axis=0), outlines[0].polygon.max(axis=0)
    assert (np.array(box[:2]) <= low).all()
    assert (np.array(box[2:]) >= high).all()
    with Image.open(written[0]) as page:
        panel, _ = panel_of(page, (600, 440))
    plain = paint_tiles(heatmap, thumbnail, 1.25)
    assert (panel == plain).all(axis=-1).mean() > 0.9  # all but lines
    frame = (panel == (0x39, 0xFF, 0x14)).all(axis=-1)
    rows, columns = np.nonzero(frame)
    corners = np.array([columns.min(), rows.min(), columns.max() + 1, rows.max() + 1])
    assert np.abs(corners - np.array(box) / 5).max() <= 2
    with Image.open(written[1]) as page:
        beside, _ = panel_of(page, (300, 300), 0)
        tinted, _ = panel_of(page, (300, 300), 1)
    assert (beside == part).all(axis=-1).mean() > 0.9
    mpp = (box[2] - box[0]) * 0.25 / 300
    assert (tinted == paint_tiles(heatmap, part, mpp, "red", box[:2])).all(axis=-1).mean() > 0.9


def test_a_map_without_scores_has_no_zoom(made: Any, tmp_path: Path) -> None:
    path, _, heatmap = made
    blank = replace(heatmap, score=np.zeros_like(heatmap.score), gated=True)
    chosen = LocalizeSettings(picture_px=200, colors=("red",))
    with open_slide(path) as slide:
        assert len(write_overlays(tmp_path, heatmap, slide, chosen)) == 2
        assert [file.name for file in write_overlays(tmp_path, blank, slide, chosen)] == ["made_red.png"]
    assert [file.name for file in tmp_path.iterdir()] == ["made_red.png"]


def test_the_map_of_another_slide_is_refused(made: Any, tmp_path: Path) -> None:
    path, _, heatmap = made
    with open_slide(path) as slide:
        for frame in (replace(heatmap.frame, size_l0=(3000, 2000)), replace(heatmap.frame, slide_mpp=0.5)):
            with pytest.raises(SlideError, match=r"made\.svs: not the slide of the heatmap made"):
                write_overlays(tmp_path, replace(heatmap, frame=frame), slide)
    assert not list(tmp_path.iterdir())


def test_the_zoom_is_around_what_is_hottest() -> None:
    heatmap = make_heatmap(40, 30, (4, 3, 3, 2))
    lesion = find_lesions(heatmap, 0.5)
    x0, y0, x1, y1 = zoom_box(heatmap, lesion) or ()
    assert (x1 - x0, y1 - y0) == (4480, 4480)
    assert x0 <= 4 * 448
    assert x1 >= 7 * 448
    assert (x0, y0) == (round(5.5 * 448 - 2240), 0)  # its centre, moved into the slide

    # Of several lesions the hottest.
    left, right = np.zeros((30, 40), np.float32), np.zeros((30, 40), np.float32)
    left[20:23, 10:13], right[5, 30] = 0.8, 0.9
    several = make_heatmap(40, 30, score=(left + right).ravel())
    assert zoom_box(several, find_lesions(several, 0.5)) == (11424, 224, 15904, 4704)

    # Without lesions the hottest tile; of those that tie, the one with the most attention.
    score = np.zeros(1200, np.float32)
    score[[205, 1199]] = 1
    attention = np.full(1200, 0.1, np.float32)
    attention[1199] = 0.9
    tied = replace(make_heatmap(40, 30, score=score), columns={"attention": attention})
    assert zoom_box(tied) == (30 * 448, 20 * 448, 40 * 448, 30 * 448)

    # Of a lesion too large to be enlarged, the part around its hottest tile.
    wide = make_heatmap(
        80, 60, (0, 0, 80, 60), score=np.where(np.arange(4800) == 80 * 40 + 60, 1, 0.8).astype(np.float32)
    )
    box = zoom_box(wide, find_lesions(wide, 0.5)) or ()
    assert box == (
        60 * 448 + 224 - 12 * 448,
        40 * 448 + 224 - 12 * 448,
        60 * 448 + 224 + 12 * 448,
        40 * 448 + 224 + 12 * 448,
    )

    small = make_heatmap(3, 2, (0, 0, 1, 1))
    assert zoom_box(small) == (0, 0, 896, 896)  # a square within the slide


@pytest.mark.slow
def test_pictures_of_the_largest_slides_take_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "large.tif"
    write_sparse_slide(path, size_l0=(100_000, 100_000))
    heatmap = cut_map((100_000, 100_000), 0.25, size_px=224, slide="large")
    with open_slide(path) as slide:
        tracemalloc.start()
        write_overlays(tmp_path, heatmap, slide, LocalizeSettings(colors=("red",)))
        export.write_pyramid(tmp_path / "large.tiff", heatmap)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 400e6


# ---------------------------------------------------------------------------------------------------- pyramids


@pytest.mark.parametrize(
    ("size_l0", "slide_mpp", "downsample"),
    [((9000, 7001), 0.25, 16), ((5003, 9000), 0.2431, 16), ((6000, 900), 0.499, 8)],
)
@pytest.mark.parametrize("colors", ["inferno", "red"])
def test_openslide_reads_the_pyramid_in_place(
    size_l0: tuple[int, int], slide_mpp: float, downsample: int, colors: Colors, tmp_path: Path
) -> None:
    heatmap = cut_map(size_l0, slide_mpp, size_px=224)
    path = tmp_path / "made_01.tiff"
    export.write_pyramid(path, heatmap, colors)
    with openslide.OpenSlide(path) as file:
        assert file.properties["openslide.vendor"] == "generic-tiff"
        assert float(file.properties["openslide.mpp-x"]) == pytest.approx(slide_mpp * downsample, rel=1e-6)
        assert file.level_dimensions[0] == tuple(math.ceil(edge / downsample) for edge in size_l0)
        assert file.level_count >= 2
        assert max(file.level_dimensions[-1]) <= 256
        np.testing.assert_allclose(file.level_downsamples, 2.0 ** np.arange(file.level_count), rtol=0.02)
        for level in range(file.level_count):
            factor = downsample * 2**level
            pixels = np.asarray(file.read_region((0, 0), level, file.level_dimensions[level]))[..., :3]
            if heatmap.frame.extent_l0 < 2 * factor:
                continue
            for (x, y), score in zip(heatmap.centres_l0, heatmap.score, strict=True):
                step = round(255 * float(score))
                wanted = (step, 0, 0) if colors == "red" else matplotlib.colormaps[colors](step, bytes=True)[:3]
                assert tuple(pixels[int(y / factor), int(x / factor)]) == tuple(wanted)
    with open_slide(path) as slide:
        assert slide.mpp == pytest.approx(slide_mpp * downsample, rel=1e-6)


def test_the_pyramid_is_a_tiled_big_tiff_that_says_what_it_is(tmp_path: Path) -> None:
    heatmap = make_heatmap(slide="Präparat 切片")
    coords = np.delete(heatmap.coords_l0, 0, axis=0)  # no tile at the corner
    heatmap = replace(heatmap, coords_l0=coords, score=heatmap.score[1:])
    for name in ("a.tiff", "b.tiff"):
        export.write_pyramid(tmp_path / name, heatmap)
    assert (tmp_path / "a.tiff").read_bytes() == (tmp_path / "b.tiff").read_bytes()
    with tifffile.TiffFile(tmp_path / "a.tiff") as file:
        assert file.is_bigtiff
        sizes = [(page.imagewidth, page.imagelength) for page in file.pages]
        assert sizes == [(336, 252), (168, 126)]
        assert all(page.is_tiled and page.compression == 8 and page.photometric == 2 for page in file.pages)
        assert [page.subfiletype for page in file.pages] == [0, 1]
        said = file.pages[0].tags["ImageDescription"].value
        pixels = file.pages[0].asarray()
        across, unit = file.pages[1].tags["XResolution"].value, file.pages[1].tags["ResolutionUnit"].value
    assert (across[1] / across[0] * 1e4, int(unit)) == (pytest.approx(8.0), 3)  # microns per pixel, from centimetres
    assert "1 px = 16 level-0 px" in said
    assert "attention" in said
    assert (pixels[:28, :28] == 0).all()
    step = round(255 * float(heatmap.score[0]))
    assert (pixels[:28, 28:56] == matplotlib.colormaps["inferno"](step, bytes=True)[:3]).all()


def test_a_pyramid_is_never_held_whole(tmp_path: Path) -> None:
    heatmap = cut_map((80_000, 40_000), 0.25, size_px=448)
    heatmap = replace(heatmap, frame=replace(heatmap.frame, extent_l0=448.0))  # half of it: a finer picture
    tracemalloc.start()
    export.write_pyramid(tmp_path / "a.tiff", heatmap)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 80e6  # level 0 alone has 12.5 million pixels, which take 16 bytes and more until they are coloured
