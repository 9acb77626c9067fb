"""The web viewer in a real browser: what a reader sees and does, compared with the files of the study.

Needs Chromium (Debian: `apt-get install chromium`) and Playwright; without either the tests are skipped.
"""

from __future__ import annotations

import base64
import io
import json
import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageDraw

pytest.importorskip("playwright.sync_api", reason="no Playwright: the viewer cannot be tried in a browser")

from helpers.browser import CHROMIUM, MadeStudy, accessibility_problems, browsing, make_study, serving
from selfvitmil.cohort import SlideRow
from selfvitmil.cohort.table import make_cohort
from selfvitmil.localize.detection import rank_tiles
from selfvitmil.localize.heatmap import Heatmap, read_heatmap, write_heatmap
from selfvitmil.settings import StudySettings
from selfvitmil.slides import open_slide
from selfvitmil.view.export import write_folder
from selfvitmil.view.server import BackgroundViewer
from selfvitmil.view.study import ViewedStudy

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: the viewer cannot be tried in a browser"),
]
WAIT_MS = 20_000


# ---------------------------------------------------------------------------------------------------- set-up


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> MadeStudy:
    return make_study(tmp_path_factory.mktemp("viewed") / "study")


@pytest.fixture(scope="module")
def address(study: MadeStudy) -> Iterator[str]:
    with serving(study.viewed()) as url:
        yield url


@pytest.fixture(scope="module")
def folder(study: MadeStudy, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The study as a folder, down to 0.5 microns per pixel only: coarser than the slides."""
    out = tmp_path_factory.mktemp("exported") / "folder"
    write_folder(study.viewed(), out, top_mpp=0.5, say=lambda _: None)
    return (out / "index.html").as_uri()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with browsing() as one:
        yield one


@pytest.fixture
def desk(browser: Any) -> Iterator[SimpleNamespace]:
    """A window; in the end nothing may have gone wrong in it, and nothing outside may have been asked for."""
    context = browser.new_context(viewport={"width": 1200, "height": 720}, reduced_motion="reduce")
    context.set_default_timeout(WAIT_MS)
    page = context.new_page()
    told = SimpleNamespace(page=page, troubles=[], requests=[])
    page.on("console", lambda line: told.troubles.append(line.text) if line.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: told.troubles.append(str(error)))
    page.on("request", lambda request: told.requests.append(request.url))
    yield told
    home = page.url.split("#")[0].rsplit("/", 1)[0]
    context.close()
    assert told.troubles == []
    assert [url for url in told.requests if not url.startswith(home)] == []


def open_page(page: Any, url: str) -> None:
    page.goto(url)
    page.wait_for_selector("html[data-ready]")
    page.wait_for_selector("#pane-first[data-tiles=loaded]")


def wait(page: Any, condition: Callable[[], bool]) -> None:
    """Until something is so; Playwright's own way evaluates text as script, which the page's policy refuses."""
    end = time.monotonic() + WAIT_MS / 1000
    while not condition():
        assert time.monotonic() < end, f"waited in vain at {page.url}"
        page.wait_for_timeout(30)


def rows(page: Any, name: re.Pattern[str] | None = None) -> Any:
    return page.get_by_role("listbox", name="Slides").get_by_role("option", **({"name": name} if name else {}))


def names(page: Any) -> list[str]:
    return page.locator("#rows .name").all_inner_texts()


def hash_of(page: Any) -> dict[str, str]:
    return {key: values[0] for key, values in parse_qs(urlsplit(page.url).fragment).items()}


def map_of(study: MadeStudy, slide: str = "node_01", model: str = "vit_dsmil") -> Heatmap:
    return read_heatmap(study.folder / "maps" / model / f"{slide}.h5")


def choose_model(page: Any, name: str = "vit_dsmil") -> None:
    """Choose it, and wait until its map is there: until then keys and link go by the other model."""
    field = page.get_by_label("Model", exact=True)
    field.select_option(label=name)
    wait(page, lambda: hash_of(page).get("model") == field.input_value())
    page.wait_for_selector("html[data-slide]")


def picture(page: Any, pane: str = "#pane-first") -> NDArray[np.int16]:
    """What a viewer shows once it has come to rest: tiles arrive and views glide."""
    page.wait_for_selector(f"{pane}[data-tiles=loaded]")
    end, last = time.monotonic() + WAIT_MS / 1000, None
    while True:
        shot = page.locator(pane).screenshot()
        pixels = np.asarray(Image.open(io.BytesIO(shot)).convert("RGB")).astype(np.int16)
        if last is not None and np.array_equal(pixels, last):
            return pixels
        assert time.monotonic() < end, "the picture does not come to rest"
        last = pixels
        page.wait_for_timeout(100)


def look(page: Any, **changes: str) -> None:
    """Reopen the page with another state, as a link does."""
    words = {**hash_of(page), **changes}
    page.goto("about:blank")
    open_page(page, page_address(page, words))
    page.wait_for_selector("html[data-slide]")


def page_address(page: Any, words: dict[str, str]) -> str:
    return page.home + "#" + "&".join(f"{key}={value}" for key, value in words.items())


def places(page: Any, points_l0: Any) -> NDArray[np.float64]:
    """(K, 2) where places (K, 2) of the slide are on the screen, from the link to the view alone."""
    wait(page, lambda: "w" in hash_of(page))
    box = page.locator("#pane-first").bounding_box()
    x, y, w = (float(hash_of(page)[key]) for key in "xyw")
    middle = (box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    return (np.asarray(points_l0, np.float64) - (x, y)) * box["width"] / w + middle


def place(page: Any, x_l0: float, y_l0: float) -> tuple[float, float]:
    x, y = places(page, [(x_l0, y_l0)])[0]
    return float(x), float(y)


def drawn_mask(page: Any, size: tuple[int, int], rings: list[Any]) -> NDArray[np.bool_]:
    """[y, x] of the first viewer: where regions of the slide are on it."""
    box = page.locator("#pane-first").bounding_box()
    canvas = Image.new("1", size)
    ends = np.cumsum([len(ring) for ring in rings])
    for points in np.split(places(page, np.concatenate(rings)) - (box["x"], box["y"]), ends[:-1]):
        ImageDraw.Draw(canvas).polygon([(float(x), float(y)) for x, y in points], fill=1)
    return np.asarray(canvas)


def bare(page: Any, shape: tuple[int, ...]) -> NDArray[np.bool_]:
    """[y, x] of the first viewer: what no button, scale bar or small picture covers."""
    free = np.ones(shape[:2], bool)
    pane = page.locator("#pane-first").bounding_box()
    for part in page.locator("#pane-first").locator(".zoom, .scale, .magnification, .navigator").all():
        box = part.bounding_box()
        left, top = int(box["x"] - pane["x"]) - 12, int(box["y"] - pane["y"]) - 12
        free[max(top, 0) : top + int(box["height"]) + 24, max(left, 0) : left + int(box["width"]) + 24] = False
    return free


# ---------------------------------------------------------------------------------------------------- the list


def test_list_shows_sorts_and_finds(desk: SimpleNamespace, address: str):
    page = desk.page
    open_page(page, address)
    assert names(page) == ["node_01", "node_10", "node_02"]  # by score: 0.93, 0.31, 0.12
    first = rows(page).first
    assert first.inner_text().split("\n") == ["node_01", "tumor", "→ tumor", "0.93"]
    page.get_by_label("Sort").select_option(label="Name")
    assert names(page) == ["node_01", "node_02", "node_10"]
    page.get_by_label("Sort").select_option(label="Errors first")
    assert names(page) == ["node_10", "node_01", "node_02"]
    assert "wrong" in rows(page).first.inner_text()
    page.get_by_label("Search slides").fill("normal node")
    assert names(page) == ["node_10", "node_02"]  # one was decided normal, one is labelled so
    assert page.locator("#count").inner_text().startswith("2 of 3 slides")
    assert "For research only" in page.locator("#notice").inner_text()


def test_list_of_ten_thousand(desk: SimpleNamespace, address: str, study: MadeStudy):
    page = desk.page
    data = study.viewed().study_data()
    some = data["slides"]
    data["slides"] = [{**some[k % 3], "id": f"s{k}", "name": f"slide_{k:05d}"} for k in range(10_000)]
    data["slides"][0] |= {"id": some[0]["id"]}
    page.route("**/api/study.json", lambda route: route.fulfill(json=json.loads(json.dumps(data))))
    open_page(page, address + f"#slide={some[0]['id']}&sort=name")
    page.get_by_role("listbox", name="Slides").focus()
    page.keyboard.press("End")
    wait(page, lambda: page.locator("#rows .active .name").all_inner_texts() == ["slide_09999"])
    assert rows(page).count() < 60
    page.get_by_label("Search slides").fill("slide_0777")
    assert page.locator("#count").inner_text().startswith("10 of 10,000 slides")


def test_predictions_that_arrive_are_shown_without_a_reload(desk: SimpleNamespace, tmp_path: Path, study: MadeStudy):
    page = desk.page
    page.clock.install()
    first, second = study.rows[:2]
    write_heatmap(tmp_path / "maps" / "m" / f"{first.slide}.h5", map_of(study, first.slide), "made")
    cohort = make_cohort(study.rows[:2], "cohort.csv")
    queue = ViewedStudy(tmp_path, cohort, StudySettings(), queue=True)
    with serving(queue) as url:
        page.goto(url)
        page.wait_for_selector("html[data-ready]")
        waiting = rows(page, re.compile(second.slide))
        assert waiting.inner_text().split("\n") == [second.slide, "waits"]
        assert page.locator("#count").inner_text() == "2 slides · 1 waiting"
        write_heatmap(tmp_path / "maps" / "m" / f"{second.slide}.h5", map_of(study, second.slide), "made")
        page.wait_for_timeout(2100)  # folders are listed again at most every two seconds
        page.clock.fast_forward(10_100)
        wait(page, lambda: page.locator("#count").inner_text() == "2 slides")
        assert "0.12" in waiting.inner_text()
        page.goto("about:blank")
        desk.requests.clear()


# ---------------------------------------------------------------------------------------------------- the map


@pytest.mark.parametrize("kind", ["served", "folder"])
def test_map_lies_on_the_lesion(desk: SimpleNamespace, request: Any, study: MadeStudy, kind: str):
    page = desk.page
    page.home = request.getfixturevalue("address" if kind == "served" else "folder")
    open_page(page, page.home)
    choose_model(page)
    wait(page, lambda: "w" in hash_of(page))
    look(page, colors="red", opacity="1", fade="0", threshold="0.5", lesions="0", annotation="0")
    pixels = picture(page)
    red = (pixels[..., 0] > 100) & (pixels[..., 1] < 12) & (pixels[..., 2] < 12)
    heatmap = map_of(study)
    tiles = heatmap.boxes_l0[heatmap.score >= 0.5]
    size = (pixels.shape[1], pixels.shape[0])
    wanted = drawn_mask(page, size, [[(x0, y0), (x1, y0), (x1, y1), (x0, y1)] for x0, y0, x1, y1 in tiles])
    lesion = drawn_mask(page, size, list(study.synthetic["node_01"].lesions))
    free = bare(page, pixels.shape)
    assert lesion[free].sum() > 2000
    assert (red & wanted & free).sum() / ((red | wanted) & free).sum() > 0.97
    assert (red & lesion & free).sum() / (lesion & free).sum() > 0.75


def test_layer_threshold_and_outlines(desk: SimpleNamespace, address: str, study: MadeStudy):
    page = desk.page
    open_page(page, address)
    choose_model(page)
    page.get_by_label("Lesions found").uncheck()
    page.get_by_label("Annotation").uncheck()
    heatmap = map_of(study)
    lowest, top = np.argmin(heatmap.score), np.argmax(heatmap.score)
    page.get_by_label("Fade low values").uncheck()
    page.get_by_label("Opacity").fill("1")
    (low_x, low_y), (top_x, top_y) = (place(page, *heatmap.centres_l0[tile]) for tile in (lowest, top))
    box = page.locator("#pane-first").bounding_box()

    def color(x: float, y: float) -> NDArray[np.int16]:
        return picture(page)[int(y - box["y"]), int(x - box["x"])]

    assert color(low_x, low_y).max() < 30  # black, as the paper has it
    assert color(top_x, top_y)[0] > 150
    assert color(top_x, top_y)[1:].max() < 12
    page.get_by_label("Hide below").fill("0.3")
    assert color(low_x, low_y).max() > 60  # tissue
    assert color(top_x, top_y)[1:].max() < 12
    page.keyboard.press("h")
    assert color(top_x, top_y)[1:].max() > 40
    without = picture(page)
    page.get_by_label("Annotation").check()
    changed = (np.abs(picture(page) - without).max(axis=-1) > 60) & bare(page, without.shape)
    ring = study.synthetic["node_01"].lesions[0]
    left, bottom = places(page, ring)[:, 0].min() - box["x"], places(page, ring)[:, 1].max() - box["y"]
    across = np.nonzero(changed)
    assert abs(across[1].min() - left) < 6
    assert abs(across[0].max() - bottom) < 6


def test_tooltip_tells_the_values_of_the_tile(desk: SimpleNamespace, address: str, study: MadeStudy):
    page = desk.page
    open_page(page, address)
    choose_model(page)
    heatmap = map_of(study)
    tile = int(np.argsort(heatmap.score)[-3])
    page.wait_for_selector("#score option[value=product]", state="attached")
    page.mouse.move(*place(page, *heatmap.centres_l0[tile]))
    tip = page.locator("#pane-first .tip")
    tip.wait_for(state="visible")
    told = dict(zip(tip.locator("dt").all_inner_texts(), tip.locator("dd").all_inner_texts(), strict=True))
    assert float(told["Score"]) == pytest.approx(heatmap.score[tile], abs=0.006)
    assert float(told["Detection"]) == pytest.approx(heatmap.detection[tile], abs=0.006)
    assert float(told["Attention"]) == pytest.approx(heatmap.columns["attention"][tile], rel=0.06)
    page.mouse.move(*place(page, 4, 4))  # glass
    tip.wait_for(state="hidden")


@pytest.mark.parametrize("kind", ["served", "folder"])
def test_keys_go_from_tile_to_tile(desk: SimpleNamespace, request: Any, study: MadeStudy, kind: str):
    page = desk.page
    open_page(page, request.getfixturevalue("address" if kind == "served" else "folder"))
    choose_model(page)
    page.locator("#pane-first .openseadragon-canvas").first.focus()
    heatmap = map_of(study)
    order = np.argsort(-heatmap.score, kind="stable")
    for key, rank in (("n", 0), ("n", 1), ("p", 0)):
        page.keyboard.press(key)
        x, y = heatmap.centres_l0[order[rank]]
        wanted = {"tile": str(order[rank]), "x": f"{x:.1f}", "y": f"{y:.1f}"}
        wait(page, lambda wanted=wanted: wanted.items() <= hash_of(page).items())
        read = page.locator("#live").inner_text()
        assert read.startswith(f"Tile {rank + 1}: Score {heatmap.score[order[rank]]:.2f}")
    suspicious = int((heatmap.score >= 0.5).sum())
    assert page.locator("#tile-place").inner_text() == f"1 of {suspicious}"
    assert float(hash_of(page)["w"]) < heatmap.frame.size_l0[0]  # closer than the whole slide


def test_of_equal_scores_the_strongest_tile_is_that_of_the_report(
    desk: SimpleNamespace, tmp_path: Path, study: MadeStudy
):
    """Many scores are cut off at 1: then what is behind them decides, in more digits than are sent."""
    heatmap = map_of(study)
    rng = np.random.default_rng(0)
    cut = np.flatnonzero(heatmap.score >= 0.5)
    behind = np.zeros(len(heatmap), np.float32)
    behind[cut] = 0.9999 + 1e-5 * rng.permutation(len(cut)) / len(cut)
    score = (behind > 0).astype(np.float32)
    changed = replace(heatmap, kind="instance", score=score, columns={"instance": behind})
    write_heatmap(tmp_path / "maps" / "vit_dsmil" / "node_01.h5", changed, "made")
    order = rank_tiles(changed)
    assert order[0] != cut[0]
    page = desk.page
    with serving(MadeStudy(tmp_path, study.rows[:1], {}).viewed()) as url:
        open_page(page, url)
        page.wait_for_selector("html[data-slide]")
        for key, tile in (("t", order[0]), ("n", order[1]), ("n", order[2])):
            page.keyboard.press(key)
            wait(page, lambda tile=tile: hash_of(page).get("tile") == str(tile))
        assert page.locator("#tile-place").inner_text() == f"3 of {len(cut)}"
        page.goto("about:blank")
        desk.requests.clear()


def test_lesions_can_be_gone_to(desk: SimpleNamespace, address: str, study: MadeStudy):
    page = desk.page
    open_page(page, address)
    choose_model(page)
    page.locator("#lesions button").first.click()
    ring = study.synthetic["node_01"].lesions[0]
    wait(page, lambda: float(hash_of(page).get("w", 1e9)) < 1000)
    words = hash_of(page)
    assert np.linalg.norm(ring.mean(axis=0) - [float(words["x"]), float(words["y"])]) < 2 * 64
    assert page.locator("#live").inner_text().startswith("Lesion 1:")


def test_a_slide_that_is_called_negative_has_no_lesions(desk: SimpleNamespace, address: str, study: MadeStudy):
    """node_10 has a lesion that the model marks, and is called normal all the same."""
    page = desk.page
    open_page(page, address)
    choose_model(page)
    assert page.locator("#lesions-heading").inner_text() == "Lesions"
    assert page.locator("#ranks-only").count() == 0
    page.locator("#rows").get_by_text("node_10").click()
    wait(page, lambda: page.locator("#slide-name").inner_text() == "node_10")
    wait(page, lambda: page.locator("#ranks-only").count() == 1)
    wait(page, lambda: page.locator("#lesions-heading").inner_text() == "Highest-ranked regions")
    assert "colours only rank tiles within this slide" in page.locator("#ranks-only").inner_text()
    assert page.locator("#tiles-heading").inner_text() == "Highest-ranked tiles"
    assert page.locator("#lesions-note").inner_text().startswith("No lesions")
    assert page.locator("#legend-high").inner_text() == "highest in this slide"
    assert not page.locator("#lesions-switch").is_visible()
    panel = page.locator("#panel").inner_text()
    assert "metastasis" not in panel
    assert "isolated tumour cells" not in panel
    page.locator("#lesions button").first.click()
    wait(page, lambda: page.locator("#live").inner_text().startswith("Region 1:"))


def test_scale_bar_is_as_long_as_it_says(desk: SimpleNamespace, address: str, study: MadeStudy):
    page = desk.page
    open_page(page, address)
    seen = set()
    for _ in range(3):
        wait(page, lambda: "w" in hash_of(page))
        before = page.url
        bar = page.locator("#pane-first .scale")
        microns = float(re.sub(r"[^\d.]", "", bar.inner_text())) * (1000 if "mm" in bar.inner_text() else 1)
        length_px = page.locator("#pane-first .ruler").bounding_box()["width"]
        um_per_px = (
            float(hash_of(page)["w"])
            * study.synthetic["node_01"].mpp
            / page.locator("#pane-first").bounding_box()["width"]
        )
        assert length_px * um_per_px == pytest.approx(microns, rel=0.02)
        seen.add(microns)
        page.get_by_role("button", name="Zoom in").first.click()
        wait(page, lambda before=before: page.url != before)
    assert len(seen) > 1
    region = page.locator("#pane-first .navigator .displayregion").bounding_box()
    small = page.locator("#pane-first .navigator").bounding_box()
    assert region["width"] / small["width"] == pytest.approx(float(hash_of(page)["w"]) / 1536, abs=0.1)


# ---------------------------------------------------------------------------------------------------- views


def um_per_px(page: Any, study: MadeStudy) -> float:
    width = page.locator("#pane-first").bounding_box()["width"]
    return float(hash_of(page)["w"]) * study.synthetic["node_01"].mpp / width


def test_magnification_is_that_of_the_screen(desk: SimpleNamespace, address: str, study: MadeStudy):
    page = desk.page
    open_page(page, address)
    for _ in range(2):
        wait(page, lambda: "w" in hash_of(page))
        before = page.url
        words = page.locator("#pane-first .magnification").inner_text()
        times, microns = (float(re.sub(r"[^\d.]", "", part)) for part in words.split("·"))
        assert microns == pytest.approx(um_per_px(page, study), rel=0.06)
        assert times == pytest.approx(10 / um_per_px(page, study), rel=0.06)  # 10x is 1 micron per pixel
        page.get_by_role("button", name="Zoom in").first.click()
        wait(page, lambda before=before: page.url != before)


def test_ruler_by_mouse_and_by_keys(desk: SimpleNamespace, address: str, study: MadeStudy):
    page = desk.page
    open_page(page, address)
    wait(page, lambda: "w" in hash_of(page))
    picture(page)
    pane, ruler = page.locator("#pane-first").bounding_box(), page.locator("#pane-first .measured")
    page.keyboard.press("r")
    x, y = pane["x"] + pane["width"] / 2, pane["y"] + pane["height"] / 2
    page.mouse.click(x - 60, y - 80)
    page.mouse.move(x, y)
    page.wait_for_timeout(400)  # two clicks in a hurry zoom in
    page.mouse.click(x, y)
    expected = 100 * um_per_px(page, study)
    assert float(ruler.get_attribute("data-um")) == pytest.approx(expected, rel=0.03)
    assert float(re.sub(r"[^\d.]", "", ruler.inner_text())) == pytest.approx(expected, rel=0.03)
    page.keyboard.press("r")
    assert ruler.is_hidden()
    page.keyboard.press("+")
    page.keyboard.press("+")
    picture(page)
    before = {key: float(value) for key, value in hash_of(page).items() if key in "xyw"}
    page.keyboard.press("r")
    page.keyboard.press("ArrowRight")
    picture(page)
    wait(page, lambda: float(hash_of(page)["x"]) != before["x"])
    page.keyboard.press("r")
    moved = (float(hash_of(page)["x"]) - before["x"]) * study.synthetic["node_01"].mpp
    assert float(ruler.get_attribute("data-um")) == pytest.approx(moved, rel=0.05)


def test_gallery_shows_the_strongest_tiles(desk: SimpleNamespace, request: Any, study: MadeStudy, address: str):
    page = desk.page
    open_page(page, address)
    choose_model(page)
    buttons = page.locator("#gallery button")
    assert buttons.count() == 8
    page.wait_for_selector("#gallery canvas[data-drawn=true]")
    wait(page, lambda: page.locator("#gallery canvas[data-drawn=true]").count() == 8)
    heatmap = map_of(study)
    order = rank_tiles(heatmap)[:8]
    assert buttons.all_inner_texts() == [f"{heatmap.score[row]:.2f}" for row in order]
    truth = open_slide(study.rows[0].path)
    for place in (0, 5):
        shot = page.locator("#gallery canvas").nth(place).evaluate("each => each.toDataURL('image/png')")
        shown = np.asarray(Image.open(io.BytesIO(base64.b64decode(shot.split(",")[1]))).convert("RGB")).astype(float)
        x, y = (int(corner) for corner in heatmap.coords_l0[order[place]])
        edge, px = heatmap.frame.extent_l0, len(shown)
        real = truth.read_region(x, y, (px, px), edge * truth.mpp / px).astype(float)
        assert np.abs(shown - real).mean() < 14  # JPEG and resampling
        other = truth.read_region(x + 4 * edge, y, (px, px), edge * truth.mpp / px).astype(float)
        assert np.abs(shown - real).mean() < 0.7 * np.abs(shown - other).mean()
    buttons.nth(2).click()
    wait(page, lambda: hash_of(page).get("tile") == str(order[2]))
    assert page.locator("#gallery button[aria-current]").count() == 1


def test_a_notebook_shows_it_in_a_cell(browser: Any, study: MadeStudy, tmp_path: Path):
    shown = BackgroundViewer(study.viewed())
    try:
        (tmp_path / "index.html").write_text(f"<!doctype html><title>notebook</title>{shown._repr_html_()}")
        handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
        with ThreadingHTTPServer(("127.0.0.1", 0), handler) as notebook:
            Thread(target=notebook.serve_forever, daemon=True).start()
            page = browser.new_page(viewport={"width": 1000, "height": 760})
            page.set_default_timeout(WAIT_MS)
            page.goto(f"http://localhost:{notebook.server_port}/index.html")  # another site than the viewer's
            cell = page.frame_locator("iframe")
            cell.locator("#pane-first[data-tiles=loaded]").wait_for()
            assert cell.locator("#rows .name").all_inner_texts() == ["node_01", "node_10", "node_02"]
            page.close()
            notebook.shutdown()
    finally:
        shown.close()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_no_serious_barrier(browser: Any, address: str, theme: str):
    page = browser.new_context(viewport={"width": 1200, "height": 720}, color_scheme=theme).new_page()
    page.set_default_timeout(WAIT_MS)
    open_page(page, address)
    choose_model(page)
    assert accessibility_problems(page) == []
    page.keyboard.press("?")
    page.wait_for_selector("dialog[open]")
    assert accessibility_problems(page) == []


@pytest.mark.parametrize("kind", ["served", "folder"])
def test_a_link_reopens_the_view(desk: SimpleNamespace, request: Any, kind: str):
    page = desk.page
    open_page(page, request.getfixturevalue("address" if kind == "served" else "folder"))
    rows(page, re.compile("node_10")).click()
    wait(page, lambda: page.locator("#slide-name").text_content() == "node_10")
    page.wait_for_selector("#pane-first[data-tiles=loaded]")
    choose_model(page)
    page.get_by_label("Colours").select_option(label="Viridis")
    page.get_by_label("Value", exact=True).select_option(label="Tile alone")
    page.get_by_label("Hide below").fill("0.2")
    page.keyboard.press("n")
    wait(page, lambda: {"tile", "threshold"} <= hash_of(page).keys())
    page.mouse.move(2, 2)
    seen, link = picture(page), page.url
    page.goto("about:blank")
    open_page(page, link)
    wait(page, lambda: page.locator("#tile-place").inner_text().startswith("1 of"))
    assert page.locator("#slide-name").text_content() == "node_10"
    assert page.get_by_label("Colours").input_value() == "viridis"
    assert page.get_by_label("Hide below").input_value() == "0.2"
    different = np.abs(picture(page) - seen).max(axis=-1) > 24
    assert different[bare(page, seen.shape)].mean() < 0.002


def test_strange_links_do_no_harm(desk: SimpleNamespace, address: str):
    page = desk.page
    open_page(page, address + "#slide=%3Cimg%20src=x%3E&x=NaN&w=-3&opacity=99&score=__proto__&tile=1e99&model=../x")
    assert page.locator("#slide-name").text_content() == "node_01"
    assert "no slide that the link names" in page.locator("#toast").inner_text()
    assert page.get_by_label("Opacity").input_value() == "1"


def test_side_by_side_is_linked(desk: SimpleNamespace, address: str):
    page = desk.page
    open_page(page, address)
    page.keyboard.press("s")
    page.wait_for_selector("#pane-second[data-tiles=loaded]")
    shown = [page.get_by_label(f"Model of the {which} viewer").input_value() for which in ("first", "second")]
    assert len(set(shown)) == 2
    for name in ("Lesions found", "Annotation"):
        page.get_by_label(name).uncheck()
    page.keyboard.press("t")
    wait(page, lambda: "tile" in hash_of(page))
    looks = [picture(page, pane).mean() for pane in ("#pane-first", "#pane-second")]
    assert abs(looks[0] - looks[1]) > 1  # two maps
    page.keyboard.press("h")
    wait(page, lambda: "w" in hash_of(page) and "map" in hash_of(page))
    before = {key: float(hash_of(page)[key]) for key in "xw"}
    page.locator("#pane-second .openseadragon-canvas").first.hover()
    page.mouse.wheel(0, 300)
    wait(page, lambda: float(hash_of(page)["w"]) > 1.1 * before["w"])
    page.keyboard.press("ArrowLeft")
    wait(page, lambda: float(hash_of(page)["x"]) < before["x"] - 0.1 * before["w"])
    assert page.locator("#pane-first .scale").inner_text() == page.locator("#pane-second .scale").inner_text()
    assert np.abs(apart(page)).max() <= 1
    page.keyboard.press("s")
    page.wait_for_selector("#pane-second", state="hidden")


def apart(page: Any) -> tuple[int, int]:
    """(x, y) in pixels by which the second viewer must be moved to show in its middle what the first one shows."""
    first, second = (picture(page, pane).mean(axis=-1) for pane in ("#pane-first", "#pane-second"))
    middles = []
    for grey in (first, second):
        top, left = grey.shape[0] // 2 - 100, grey.shape[1] // 2 - 100
        middle = grey[top : top + 200, left : left + 200]
        middles.append(np.fft.fft2(middle - middle.mean()))
    correlation = np.fft.ifft2(middles[0] * middles[1].conj()).real
    y, x = np.unravel_index(correlation.argmax(), correlation.shape)
    return int((x + 100) % 200 - 100), int((y + 100) % 200 - 100)


# ---------------------------------------------------------------------------------------------------- access


def test_everything_has_a_name_and_a_key(desk: SimpleNamespace, address: str):
    page = desk.page
    open_page(page, address)
    for role in ("button", "combobox", "checkbox", "slider", "searchbox"):
        for element in page.get_by_role(role).all():
            snapshot = element.aria_snapshot()
            assert re.match(rf'- {role} "[^"]+"', snapshot), snapshot
    page.keyboard.press("?")
    page.get_by_role("dialog", name="Help and keys").wait_for()
    assert page.locator("#keys tr").count() > 10
    page.get_by_label("Use single-letter keys").uncheck()
    page.keyboard.press("Escape")
    before = page.get_by_label("Show the heatmap").is_checked()
    page.keyboard.press("h")
    assert page.get_by_label("Show the heatmap").is_checked() == before
    page.keyboard.press("/")  # no letter, so it still works
    assert page.evaluate("document.activeElement.id") == "search"
    page.keyboard.press("Enter")
    page.get_by_role("listbox", name="Slides").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    wait(page, lambda: page.locator("#slide-name").text_content() == "node_10")


@pytest.mark.parametrize(("width", "height"), [(1024, 768), (390, 844)])
def test_small_screens(desk: SimpleNamespace, address: str, width: int, height: int):
    page = desk.page
    page.set_viewport_size({"width": width, "height": height})
    open_page(page, address)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.get_by_role("button", name="Map and findings").click()
    page.get_by_role("heading", name="Suspicious tiles").wait_for()
    if width < 800:
        page.keyboard.press("Escape")
        page.get_by_role("button", name="Slides", exact=True).click()
        rows(page, re.compile("node_02")).click()
        wait(page, lambda: page.locator("#slide-name").text_content() == "node_02")
    page.get_by_role("button", name="Next suspicious tile").click()
    wait(page, lambda: "tile" in hash_of(page))


def test_dark_and_light(desk: SimpleNamespace, address: str):
    page = desk.page
    page.emulate_media(color_scheme="dark")
    open_page(page, address)
    luminance = "parseInt(getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0])"
    assert page.evaluate(luminance) < 60
    page.keyboard.press("d")
    assert page.evaluate(luminance) > 200
    page.reload()
    page.wait_for_selector("html[data-ready]")
    assert page.evaluate(luminance) > 200


# ---------------------------------------------------------------------------------------------------- what is missing


def test_an_annotation_that_comes_late_is_not_drawn_on_the_next_slide(desk: SimpleNamespace, address: str):
    page = desk.page

    def go(name: str) -> None:
        rows(page, re.compile(name)).click()
        wait(page, lambda: page.locator("#slide-name").text_content() == name)
        page.wait_for_selector("#pane-first[data-tiles=loaded]")

    open_page(page, address)
    go("node_02")  # nobody outlined anything there
    held: list[Any] = []
    page.route("**/annotation.json", lambda route: held.append(route))
    go("node_01")
    wait(page, lambda: len(held) == 1)
    go("node_02")
    page.wait_for_selector("html[data-slide]")
    with page.expect_response("**/annotation.json"):
        held[0].continue_()
    page.wait_for_timeout(200)
    choose_model(page, "vit_dsmil")
    choose_model(page, "vit_abmil")
    assert page.get_by_label("Annotation").is_disabled()


def test_a_slide_whose_annotation_cannot_be_read_still_has_its_map(desk: SimpleNamespace, address: str):
    page = desk.page
    refusal = {"status": 502, "json": {"error": "node_01.xml: it is cut short"}}
    page.route("**/annotation.json", lambda route: route.fulfill(**refusal))
    open_page(page, address)
    page.wait_for_selector("html[data-slide]")
    page.locator("#heatmap-controls").wait_for(state="visible")
    assert page.locator("#pane-first .trouble").inner_text().endswith("is not shown: node_01.xml: it is cut short")
    assert page.get_by_label("Annotation").is_disabled()
    assert [line for line in desk.troubles if "failed to load" not in line.lower()] == []
    desk.troubles.clear()


def test_a_map_that_cannot_be_read_takes_no_other_along(desk: SimpleNamespace, address: str):
    page = desk.page
    open_page(page, address)
    first, second = (
        page.get_by_label("Model", exact=True).locator("option").nth(k).get_attribute("value") for k in (0, 1)
    )
    page.goto("about:blank")
    refusal = {"status": 502, "json": {"error": "the heatmap is cut short"}}
    page.route(f"**/maps/{second}.json", lambda route: route.fulfill(**refusal))
    open_page(page, f"{address}#model={first}&beside={second}")
    page.wait_for_selector("html[data-slide]")
    assert "cut short" in page.locator("#heatmap-note").inner_text()
    assert page.locator("#heatmap-controls").is_visible()  # of the other one
    page.get_by_label("Model", exact=True).select_option(second)
    wait(page, lambda: hash_of(page).get("model") == second)
    page.wait_for_selector("html[data-slide]")
    assert not page.locator("#heatmap-controls").is_visible()  # the heatmap before is not taken for it
    assert [line for line in desk.troubles if "failed to load" not in line.lower()] == []
    desk.troubles.clear()


def test_study_without_maps_and_labels(desk: SimpleNamespace, tmp_path: Path, study: MadeStudy):
    page = desk.page
    bare_rows = [SlideRow(row.slide, row.path) for row in study.rows[:2]]
    plain = MadeStudy(tmp_path, tuple(bare_rows), {})
    with serving(plain.viewed()) as url:
        open_page(page, url)
        assert names(page) == ["node_01", "node_02"]
        assert "selfvitmil localize" in page.locator("#heatmap-note").inner_text()
        assert "No label" in page.locator("#prediction").inner_text()
        page.keyboard.press("n")
        assert "selfvitmil localize" in page.locator("#toast").inner_text()
        page.goto("about:blank")
        desk.requests.clear()


def test_slides_that_are_not_there(desk: SimpleNamespace, tmp_path: Path, study: MadeStudy):
    page = desk.page
    broken = tmp_path / "node_03.svs"
    broken.write_bytes(b"no slide at all")
    shutil.copy(study.rows[0].path, tmp_path / "node_05.svs")
    listed = (
        study.rows[0],
        SlideRow("node_05", tmp_path / "node_05.svs", "tumor"),
        SlideRow("node_03", broken, "tumor"),
        SlideRow("node_04", tmp_path / "gone.svs", "tumor"),
    )
    with serving(MadeStudy(study.folder, listed, {}).viewed()) as url:
        open_page(page, url)
        rows(page, re.compile("node_04.*Missing", re.DOTALL)).click()
        alert = page.locator("#pane-first .trouble")
        alert.wait_for(state="visible")
        assert "not where the cohort says" in alert.inner_text()
        rows(page, re.compile("node_03")).click()
        wait(page, lambda: "node_03" in alert.inner_text())
        rows(page, re.compile("node_01")).click()
        page.wait_for_selector("#pane-first[data-tiles=loaded]")
        assert not alert.is_visible()
        rows(page, re.compile("node_05")).click()
        wait(page, lambda: page.locator("#slide-name").text_content() == "node_05")
        page.wait_for_selector("#pane-first[data-tiles=loaded]")
        (tmp_path / "node_05.svs").unlink()
        for _ in range(3):
            page.keyboard.press("+")
        alert.wait_for(state="visible")
        wait(page, lambda: "could not be read: node_05: The slide's file no longer exists" in alert.inner_text())
        page.goto("about:blank")
    # the browser and OpenSeadragon note such answers themselves
    assert [line for line in desk.troubles if "failed to load" not in line.lower()] == []
    desk.troubles.clear()
    desk.requests.clear()
