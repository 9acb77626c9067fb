"""The viewer's server: tiles, documents, caches, the exported folder."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openslide import OpenSlide
from openslide.deepzoom import DeepZoomGenerator
from PIL import Image
from starlette.testclient import TestClient

from helpers.heatmaps import PREDICTION, make_heatmap
from helpers.viewer import (
    MODELS,
    MPP,
    OUTLINE,
    SIZE,
    STATIC,
    app_of,
    make_study,
    packaged_files,
    viewed,
)
from selfvitmil import cli, open_slide
from selfvitmil.bags.retrieval import SIMILAR, SimilarSlide, write_similar
from selfvitmil.errors import SelfVitMilError
from selfvitmil.localize.detection import find_lesions
from selfvitmil.localize.heatmap import read_heatmap, write_heatmap
from selfvitmil.report.slide_sections import ends
from selfvitmil.slides import SlideRef
from selfvitmil.slides.synthetic import make_problem_files
from selfvitmil.store.layout import StudyLayout
from selfvitmil.view import export, server, tiles
from selfvitmil.view import study as viewed_study
from selfvitmil.view.guard import names_for
from selfvitmil.view.tiles import DeepZoom, OpenSlides

pytestmark = pytest.mark.usefixtures("impatient")

STATIC_FOLDER = Path(export.__file__).parent / "static"


@pytest.fixture
def study(tmp_path: Path, slide_file: Path) -> Path:
    return make_study(tmp_path / "study", slide_file)


@pytest.fixture
def client(study: Path) -> Iterator[TestClient]:
    with TestClient(app_of(study)[0], base_url="http://127.0.0.1") as client:
        yield client


@pytest.fixture
def packaged() -> dict[str, export.StaticFile]:
    return packaged_files()


def ids(client: TestClient) -> dict[str, str]:
    return {row["name"]: row["id"] for row in client.get("/api/study.json").json()["slides"]}


def models(client: TestClient) -> dict[str, str]:
    return {model["name"]: model["id"] for model in client.get("/api/study.json").json()["models"]}


# ---------------------------------------------------------------------------------------------------- tiles


@given(st.integers(1, 200_000), st.integers(1, 200_000), st.data())
def test_levels_and_tiles_are_those_of_openslides_deep_zoom(width: int, height: int, data: st.DataObject) -> None:
    plain = SimpleNamespace(
        dimensions=(width, height), level_dimensions=[(width, height)], level_downsamples=[1.0], properties={},
        color_profile=None, get_best_level_for_downsample=lambda _: 0,
    )  # fmt: skip
    theirs = DeepZoomGenerator(plain, tiles.TILE_PX, tiles.OVERLAP_PX)  # pyright: ignore[reportArgumentType]
    ours = DeepZoom((width, height))
    assert ours.max_level + 1 == theirs.level_count
    assert tuple(ours.size(k) for k in range(theirs.level_count)) == theirs.level_dimensions
    assert tuple(ours.num_tiles(k) for k in range(theirs.level_count)) == theirs.level_tiles
    level = data.draw(st.integers(0, ours.max_level))
    column, row = (data.draw(st.integers(0, count - 1)) for count in ours.num_tiles(level))
    assert ours.box(level, column, row)[2:] == theirs.get_tile_dimensions(level, (column, row))
    location, _, _ = theirs.get_tile_coordinates(level, (column, row))
    assert tuple(edge * ours.downsample(level) for edge in ours.box(level, column, row)[:2]) == location


def test_tiles_are_cut_from_the_whole_level(client: TestClient, study: Path) -> None:
    slide_id = ids(client)["other"]
    zoom = DeepZoom(SIZE)
    for level in (zoom.max_level, zoom.max_level - 1, 8, 3, 0):
        with open_slide(study / "slides/other.svs") as slide:
            whole = slide.read_region(0, 0, zoom.size(level), slide.mpp * zoom.downsample(level))
        columns, rows = zoom.num_tiles(level)
        for column, row in {(0, 0), (columns - 1, rows - 1), (columns // 2, rows // 2)}:
            answer = client.get(f"/api/slides/{slide_id}/tiles/{level}/{column}_{row}.jpg")
            assert answer.headers["content-type"] == "image/jpeg"
            left, top = max(0, column * 254 - 1), max(0, row * 254 - 1)
            expected = whole[top : row * 254 + 255, left : column * 254 + 255]
            assert answer.content == tiles.to_jpeg(expected)


def test_tiles_look_like_openslides(client: TestClient, study: Path) -> None:
    theirs = DeepZoomGenerator(OpenSlide(study / "slides/other.svs"), 254, 1)
    slide_id = ids(client)["other"]
    for level, column, row in ((11, 2, 2), (10, 1, 1), (9, 0, 0)):
        answer = client.get(f"/api/slides/{slide_id}/tiles/{level}/{column}_{row}.jpg")
        ours = np.asarray(Image.open(io.BytesIO(answer.content)), np.float64)
        other = np.asarray(theirs.get_tile(level, (column, row)), np.float64)
        assert ours.shape == other.shape
        assert np.abs(ours - other).mean() < 6  # the loss of the JPEG; a shift by one pixel is far more
        assert np.abs(ours[:, 1:] - other[:, :-1]).mean() > 1.5 * np.abs(ours - other).mean()


def test_thumbnails_show_the_whole_slide(client: TestClient, study: Path) -> None:
    answer = client.get(f"/api/slides/{ids(client)['other']}/thumbnail.jpg")
    picture = Image.open(io.BytesIO(answer.content))
    assert max(picture.size) == tiles.THUMBNAIL_PX
    assert picture.size[0] / picture.size[1] == pytest.approx(SIZE[0] / SIZE[1], rel=0.01)
    theirs = OpenSlide(study / "slides/other.svs").get_thumbnail((240, 240)).resize(picture.size)
    assert np.abs(np.asarray(picture, np.float64) - np.asarray(theirs, np.float64)).mean() < 6
    assert not picture.getexif()


def test_a_slide_without_mpp_is_shown_without_a_scale(tmp_path: Path) -> None:
    made = make_problem_files(tmp_path)
    (tmp_path / "cohort.csv").write_text("slide,path\na,no_mpp.tif\nb,odd_size.svs\n")
    with TestClient(app_of(tmp_path)[0], base_url="http://localhost") as client:
        slide = client.get(f"/api/slides/{ids(client)['a']}.json").json()
        assert slide["mpp"] is None
        assert (slide["width"], slide["height"]) == OpenSlide(made["no_mpp"]).dimensions
        assert client.get(f"/api/slides/{slide['id']}/tiles/{slide['max_level']}/0_0.jpg").status_code == 200
        odd = client.get(f"/api/slides/{ids(client)['b']}.json").json()
        assert client.get(f"/api/slides/{odd['id']}/tiles/5/0_0.jpg").status_code == 200


# ---------------------------------------------------------------------------------------------------- documents


def test_the_list_says_what_is_known_of_every_slide(client: TestClient) -> None:
    data = client.get("/api/study.json").json()
    assert [(row["name"], row["label"], row["status"]) for row in data["slides"]] == [
        ("Meier_01", "tumor", "ok"),
        ("other", "normal", "ok"),
        ("unlabelled", None, "failed"),
        ("missing", "normal", "missing"),
    ]
    assert [model["name"] for model in data["models"]] == list(MODELS)
    tumor, normal, failed, missing = data["slides"]
    dsmil, abmil = models(client)["vit_dsmil"], models(client)["vit_abmil"]
    assert tumor["predictions"][dsmil]["probability"] == 0.9
    assert tumor["predictions"][dsmil]["positive"]
    assert not normal["predictions"][dsmil]["positive"]
    assert (tumor["predictions"][dsmil]["lesions"], normal["predictions"][dsmil]["lesions"]) == (2, 0)
    assert tumor["predictions"][abmil]["lesions"] is None  # no table of lesions there
    assert failed["predictions"] == {}
    assert "no tissue" in failed["problem"]
    assert missing["thumbnail"] is None
    assert "not where the cohort says" in missing["problem"]
    assert [failure["slide"] for failure in data["failures"]] == [failed["id"]]


def test_ids_stay_the_same(study: Path, client: TestClient) -> None:
    before = ids(client)
    (study / "cohort.csv").write_text("slide,path\nnew,x.svs\nother,slides/other.svs\n")
    with TestClient(app_of(study)[0], base_url="http://127.0.0.1") as again:
        assert ids(again)["other"] == before["other"]


def test_a_map_arrives_as_it_is(client: TestClient, study: Path) -> None:
    slide, model = ids(client)["Meier_01"], models(client)["vit_dsmil"]
    data = client.get(f"/api/slides/{slide}/maps/{model}.json").json()
    heatmap = read_heatmap(study / "maps/vit_dsmil/Meier_01.h5")
    assert data["coords"] == heatmap.coords_l0.ravel().tolist()
    assert data["columns"] == ["score", "detection", "attention", "instance", "product", "annotated"]
    for name in data["columns"]:
        values = {"score": heatmap.score, "detection": heatmap.detection, "annotated": heatmap.annotated}
        expected = values.get(name, heatmap.columns.get(name))
        np.testing.assert_allclose(data[name], expected, rtol=5e-4)
    assert data["frame"]["size_l0"] == list(SIZE)
    assert data["prediction"]["probability"] == 0.9
    assert data["prediction"]["classes"] == ["normal", "tumor"]


def test_tiles_are_ranked_by_what_is_behind_a_score_that_was_cut_off(client: TestClient, study: Path) -> None:
    """As in report and predictions, and by digits that are not sent."""
    path = study / "maps/vit_dsmil/Meier_01.h5"
    heatmap = read_heatmap(path)
    behind = np.full(len(heatmap), 0.25, np.float32)
    behind[[3, 20, 7, 11]] = (0.999991, 0.999993, 0.999992, 0.5)
    score = np.where(behind > 0.9, 1, behind / 2).astype(np.float32)
    write_heatmap(path, replace(heatmap, kind="instance", score=score, columns={"instance": behind}), "made")
    slide, model = ids(client)["Meier_01"], models(client)["vit_dsmil"]
    data = client.get(f"/api/slides/{slide}/maps/{model}.json").json()
    assert {data["instance"][tile] for tile in (3, 7, 20)} == {1.0}
    rest = [tile for tile in range(len(score)) if tile not in (20, 7, 3, 11)]
    assert data["strongest_first"] == [20, 7, 3, 11, *rest]
    assert ends(read_heatmap(path), 5)[0].tolist() == data["strongest_first"][:5]


def test_lesions_and_annotations_have_their_outlines(client: TestClient, study: Path) -> None:
    slide, model = ids(client)["Meier_01"], models(client)["vit_dsmil"]
    (lesion,) = client.get(f"/api/slides/{slide}/lesions/{model}.json").json()
    (expected,) = find_lesions(read_heatmap(study / "maps/vit_dsmil/Meier_01.h5"), 0.5)
    assert lesion["area_mm2"] == expected.area_mm2 == pytest.approx(2 * (224 * MPP) ** 2 / 1e6)
    xs, ys = zip(*lesion["rings"][0], strict=True)
    assert (min(xs), max(xs), min(ys), max(ys)) == (224, 672, 224, 448)
    (outline,) = client.get(f"/api/slides/{slide}/annotation.json").json()
    np.testing.assert_allclose(outline["rings"][0], OUTLINE)
    assert client.get(f"/api/slides/{ids(client)['other']}/annotation.json").status_code == 404


def test_terms_of_lymph_nodes_and_lesions_on_negative_slides(client: TestClient, study: Path) -> None:
    prediction = replace(PREDICTION, probability=(0.1,), decision="normal")
    for model in MODELS:
        negative = make_heatmap(6, 4, (1, 1, 2, 1), extent_l0=224.0, slide_mpp=MPP, slide="other", model=model)
        negative = replace(negative, frame=replace(negative.frame, size_l0=SIZE), prediction=prediction)
        write_heatmap(study / "maps" / model / "other.h5", negative, "made")
    (study / "maps" / "vit_abmil" / "settings.toml").write_text('[localize]\nstaging = "lymph-node"\n')

    def told(slide: str, model: str) -> list[tuple[bool, str]]:
        answer = client.get(f"/api/slides/{ids(client)[slide]}/lesions/{models(client)[model]}.json").json()
        return [(one["finding"], one["size_words"]) for one in answer]

    size = "2 tiles of 56 µm, 125 µm across"
    assert told("Meier_01", "vit_dsmil") == [(True, size)]
    assert told("Meier_01", "vit_abmil") == [(True, f"{size}; size of isolated tumour cells (under 0.2 mm)")]
    assert told("other", "vit_dsmil") == told("other", "vit_abmil") == [(False, size)]


def test_lesions_are_those_of_the_settings_that_made_the_maps(client: TestClient, study: Path) -> None:
    (study / "maps/vit_dsmil/settings.toml").write_text("[localize]\nlesion_threshold = 0.999\n")
    slide = ids(client)["Meier_01"]
    assert client.get(f"/api/slides/{slide}/lesions/{models(client)['vit_dsmil']}.json").json() == []
    assert len(client.get(f"/api/slides/{slide}/lesions/{models(client)['vit_abmil']}.json").json()) == 1


def test_numbers_that_are_none_are_null() -> None:
    from selfvitmil.view.study import number_text

    assert json.loads(f"[{number_text(float('nan'))},{number_text(1e-7)},{number_text(0.123456)}]") == [
        None,
        1e-7,
        0.1235,
    ]


def test_a_study_without_maps_labels_or_failures(tmp_path: Path, slide_file: Path) -> None:
    shutil.copy(slide_file, tmp_path / "a.svs")
    (tmp_path / "cohort.csv").write_text("slide,path\na,a.svs\n")
    with TestClient(app_of(tmp_path)[0], base_url="http://127.0.0.1") as client:
        data = client.get("/api/study.json").json()
        assert (data["models"], data["failures"]) == ([], [])
        (row,) = data["slides"]
        assert (row["label"], row["split"], row["predictions"], row["status"]) == (None, None, {}, "ok")
        assert client.get(f"/api/slides/{row['id']}.json").json()["maps"] == []
        assert client.get(row["thumbnail"]).status_code == 200


def test_the_main_method_comes_first(study: Path) -> None:
    shutil.copytree(study / "maps/vit_dsmil", study / "maps/vit_self-vit-mil")
    with TestClient(app_of(study)[0], base_url="http://127.0.0.1") as client:
        data = client.get("/api/study.json").json()
        assert [model["name"] for model in data["models"]] == ["vit_self-vit-mil", *MODELS]


def test_a_damaged_map_or_table_hides_nothing_else(study: Path) -> None:
    broken = study / "maps/vit_dsmil/other.h5"
    broken.write_bytes(broken.read_bytes()[:900])
    (study / "maps/vit_dsmil/Meier_01.h5").write_bytes(b"")
    (study / "failures.csv").write_text("slide,stage\na,b\n")
    with TestClient(app_of(study)[0], base_url="http://127.0.0.1") as client:
        data = client.get("/api/study.json").json()
        assert [model["name"] for model in data["models"]] == ["vit_abmil"]
        reasons = [failure["reason"] for failure in data["failures"]]
        assert len(reasons) == 3
        assert sum("the heatmap of vit_dsmil is not shown" in reason for reason in reasons) == 2
        assert sum(reason.startswith("failures.csv: not a readable table") for reason in reasons) == 1


def test_ten_thousand_slides_are_read_once(tmp_path: Path, study: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [f"s{k:05d},slides/s{k:05d}.svs,tumor" for k in range(10_000)]
    (study / "cohort.csv").write_text("\n".join(["slide,path,label", *lines]))
    source = study / "maps/vit_dsmil/Meier_01.h5"
    for k in range(50):
        shutil.copy(source, study / f"maps/vit_dsmil/s{k:05d}.h5")
    opened: list[str] = []
    monkeypatch.setattr(viewed_study, "REFRESH_S", 0.0)
    read = viewed_study.read_summary
    monkeypatch.setattr(viewed_study, "read_summary", lambda path: opened.append(path.name) or read(path))
    shown = viewed(study)
    data = shown.study_data()
    assert len(data["slides"]) == 10_000
    assert sum(bool(row["predictions"]) for row in data["slides"]) == 50
    assert len(opened) == 50
    shown.study_data()
    assert len(opened) == 50
    os.utime(study / "maps/vit_dsmil/s00007.h5", (1, 1))
    (study / "maps/vit_dsmil/s00008.h5").unlink()
    assert sum(bool(row["predictions"]) for row in shown.study_data()["slides"]) == 49
    assert opened[50:] == ["s00007.h5"]


def test_many_who_open_the_page_share_one_list(study: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = viewed(study)
    built: list[int] = []
    whole = shown.study_data
    monkeypatch.setattr(shown, "study_data", lambda: built.append(1) or whole())
    monkeypatch.setattr(server, "LOOK_AGAIN_S", 3600.0)
    app = server.make_app(shown, STATIC, hosts=names_for("127.0.0.1"))
    with TestClient(app, base_url="http://127.0.0.1") as client:
        answers = [client.get("/api/study.json").json() for _ in range(20)]
        assert len(built) == 1
        assert answers == [answers[0]] * 20
        monkeypatch.setattr(server, "LOOK_AGAIN_S", 0.0)
        (study / "slides/other.svs").unlink()
        assert {row["status"] for row in client.get("/api/study.json").json()["slides"]} >= {"missing"}
    assert len(built) == 2


# ---------------------------------------------------------------------------------------------------- changes


def test_a_slide_that_is_deleted_or_cut_short_is_told_and_the_rest_goes_on(client: TestClient, study: Path) -> None:
    path = study / "slides/other.svs"
    slide, sound = ids(client)["other"], ids(client)["Meier_01"]
    tile = f"/api/slides/{slide}/tiles/11/1_1.jpg"
    whole = path.read_bytes()
    assert client.get(tile).status_code == 200
    path.write_bytes(whole[: len(whole) // 3])
    answer = client.get(tile)
    assert answer.status_code == 502
    assert answer.json()["error"].startswith("other.svs")
    path.unlink()
    for address in (tile, f"/api/slides/{slide}.json", f"/api/slides/{slide}/thumbnail.jpg"):
        answer = client.get(address)
        assert answer.status_code == 410
        assert "no longer exists" in answer.json()["error"]
    assert client.get("/api/study.json").json()["slides"][1]["status"] == "missing"
    assert client.get(f"/api/slides/{sound}/tiles/11/1_1.jpg").status_code == 200
    path.write_bytes(whole)
    assert client.get(tile).status_code == 200


def test_a_slide_that_is_replaced_shows_its_new_pixels(client: TestClient, study: Path) -> None:
    tile = f"/api/slides/{ids(client)['other']}/tiles/9/0_0.jpg"
    before = client.get(tile)
    made = make_problem_files(study / "hostile")
    os.replace(made["all_black"], study / "slides/other.svs")
    after = client.get(tile, headers={"if-none-match": before.headers["etag"]})
    assert after.status_code == 200
    assert np.asarray(Image.open(io.BytesIO(after.content))).mean() < 5


def test_maps_that_are_made_or_removed_meanwhile_are_seen(
    client: TestClient, study: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(viewed_study, "REFRESH_S", 0.0)
    slide, model = ids(client)["other"], models(client)["vit_dsmil"]
    address = f"/api/slides/{slide}/maps/{model}.json"
    path = study / "maps/vit_dsmil/other.h5"
    content = path.read_bytes()
    assert client.get(address).status_code == 200
    path.unlink()
    assert client.get(address).status_code == 404
    path.write_bytes(content)
    assert client.get(address).status_code == 200


def test_what_a_browser_has_is_not_sent_again(client: TestClient) -> None:
    slide = ids(client)["other"]
    for address in ("/", "/static/main.js", f"/api/slides/{slide}/tiles/11/0_0.jpg", "/api/study.json"):
        first = client.get(address)
        again = client.get(address, headers={"if-none-match": first.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        assert "private" in first.headers["cache-control"]


# ---------------------------------------------------------------------------------------------------- many at once


def test_what_many_ask_for_is_made_once(study: Path) -> None:
    app, _ = app_of(study)
    viewer = app.app.state.viewer  # pyright: ignore[reportAttributeAccessIssue, reportFunctionMemberAccess]
    made: list[int] = []
    ready = threading.Event()

    def make() -> bytes:
        made.append(1)
        ready.wait(5)
        return b"x" * 10

    async def ask() -> list[bytes]:
        waiting = [asyncio.create_task(viewer.tiles.get("key", make)) for _ in range(40)]
        await asyncio.sleep(0.05)
        waiting[3].cancel()
        ready.set()
        return [task.result() for task in (await asyncio.wait(waiting))[0] if not task.cancelled()]

    assert asyncio.run(ask()) == [b"x" * 10] * 39
    assert len(made) == 1
    viewer.close()


def test_what_is_kept_is_bounded_and_the_oldest_goes() -> None:
    made: list[str] = []

    def maker(key: str, size: int):
        def make() -> bytes:
            made.append(key)
            if key == "bad":
                raise ValueError("cannot be made")
            return bytes(size)

        return make

    async def ask() -> None:
        with ThreadPoolExecutor(1) as pool:
            kept = server.BytesCache(pool, 100)
            for key, size in (("a", 40), ("b", 40), ("a", 40), ("c", 40), ("a", 40), ("b", 40), ("huge", 101)):
                assert len(await kept.get(key, maker(key, size))) == size
                assert kept.stored.currsize <= 100
            for _ in range(2):  # failures are not kept
                with pytest.raises(ValueError, match="cannot be made"):
                    await kept.get("bad", maker("bad", 1))

    asyncio.run(ask())
    assert made == ["a", "b", "c", "b", "huge", "bad", "bad"]


def test_few_slides_are_open_at_a_time(tmp_path: Path, slide_file: Path) -> None:
    paths = [Path(shutil.copy(slide_file, tmp_path / f"{k}.svs")) for k in range(5)]
    slides = OpenSlides(max_open=2)
    opened = [slides.get(SlideRef(path.stem, path)) for path in paths]
    assert len(slides) == 2
    assert slides.get(SlideRef(paths[4].stem, paths[4])) is opened[4]
    # one that was closed for others still reads
    np.testing.assert_array_equal(tiles.read_tile(opened[0], 8, 0, 0), tiles.read_tile(opened[4], 8, 0, 0))
    slides.close()


# ---------------------------------------------------------------------------------------------------- the folder


def folder_data(path: Path, start: str) -> dict:
    text = path.read_text(encoding="utf-8")
    assert text.startswith(start)
    return json.loads(text.removeprefix(start).rstrip().removesuffix(";"))


def test_the_exported_folder_holds_what_the_server_says(
    client: TestClient, study: Path, tmp_path: Path, packaged: dict[str, export.StaticFile]
) -> None:
    out = tmp_path / "to mail"
    said: list[str] = []
    made = export.write_folder(viewed(study), out, top_mpp=0.5, say=said.append)
    assert (made.num_slides, made.failures) == (2, ())
    data = folder_data(out / "data/study.js", "window.SELFVITMIL_DATA = ")
    assert data["study"]["exported"]
    assert [row["name"] for row in data["study"]["slides"]] == ["Meier_01", "other"]
    num_tiles = 0
    for row in data["study"]["slides"]:
        own = folder_data(out / f"data/{row['id']}.js", f'window.SELFVITMIL_DATA.slides["{row["id"]}"] = ')
        served = client.get(f"/api/slides/{row['id']}.json").json()
        assert own["slide"]["max_level"] == served["max_level"] - 1
        assert own["slide"]["width"] == served["width"]
        for model in served["maps"]:
            assert own["maps"][model] == client.get(f"/api/slides/{row['id']}/maps/{model}.json").json()
            assert own["lesions"][model] == client.get(f"/api/slides/{row['id']}/lesions/{model}.json").json()
        assert len(own["annotation"]) == row["annotation"]
        assert (out / row["thumbnail"]).read_bytes() == client.get(f"/api/slides/{row['id']}/thumbnail.jpg").content
        for tile in (out / "tiles" / row["id"]).rglob("*.jpg"):
            address = tile.relative_to(out / "tiles" / row["id"]).as_posix()
            assert tile.read_bytes() == client.get(f"/api/slides/{row['id']}/tiles/{address}").content
            num_tiles += 1
        zoom = DeepZoom(SIZE)
        top = list((out / "tiles" / row["id"] / str(zoom.max_level - 1)).iterdir())
        assert len(top) == np.prod(zoom.num_tiles(zoom.max_level - 1))
    assert f"{num_tiles} pictures" in said[0]
    assert made.size_bytes == sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    page = (out / "index.html").read_text()
    assert 'type="module"' not in page
    for source in re.findall(r'(?:src|href)="([^"#]+)"', page):
        assert (out / source).is_file(), source
    assert (out / "static/vendor/openseadragon.LICENSE.txt").is_file()


def similar_of(client: TestClient, names: dict[str, str], slide: str) -> list[tuple[str, float]]:
    found = client.get(f"/api/slides/{names[slide]}.json").json()["similar"]
    by_id = {id: name for name, id in names.items()}
    return [(by_id[each["slide"]], each["similarity"]) for each in found]


def test_similar_slides_are_those_found_last_and_an_export_keeps_its_own(
    client: TestClient, study: Path, tmp_path: Path, packaged: dict[str, export.StaticFile]
) -> None:
    names = {row["name"]: row["id"] for row in client.get("/api/study.json").json()["slides"]}
    assert similar_of(client, names, "Meier_01") == []
    folder = StudyLayout(study).slide_features("t", "vit_mean")
    try:
        for value in (0.5, 0.75):
            similar = {
                "Meier_01": [SimilarSlide("unlabelled", value), SimilarSlide("other", 0.25), SimilarSlide("x", 0)]
            }
            write_similar(folder, similar, None)
            assert similar_of(client, names, "Meier_01") == [("unlabelled", value), ("other", 0.25)]
            assert similar_of(client, names, "other") == []
        export.write_folder(
            viewed(study), tmp_path / "out", slides=["Meier_01", "other"], top_mpp=2, say=lambda _: None
        )
        own = folder_data(
            tmp_path / "out" / "data" / f"{names['Meier_01']}.js",
            f'window.SELFVITMIL_DATA.slides["{names["Meier_01"]}"] = ',
        )
        assert own["slide"]["similar"] == [{"slide": names["other"], "similarity": 0.25}]
        (folder / SIMILAR).write_text("no table")
        assert similar_of(client, names, "Meier_01") == []
    finally:
        shutil.rmtree(study / "bags")


def test_an_export_names_no_folder_of_this_machine(study: Path, tmp_path: Path, packaged: object) -> None:
    out = tmp_path / "out"
    export.write_folder(viewed(study), out, say=lambda _: None)
    for path in out.rglob("*"):
        if path.is_file():
            assert str(tmp_path).encode() not in path.read_bytes(), path
            assert str(Path.home()).encode() + b"/" not in path.read_bytes(), path


def test_an_export_leaves_out_what_fails_and_nothing_behind(study: Path, tmp_path: Path, packaged: object) -> None:
    path = study / "slides/other.svs"
    path.write_bytes(path.read_bytes()[:5000])
    made = export.write_folder(viewed(study), tmp_path / "out", slides=["other", "Meier_01"], say=lambda _: None)
    assert made.num_slides == 1
    assert [failure.slide for failure in made.failures] == ["other"]
    with pytest.raises(SelfVitMilError, match="exists already"):
        export.write_folder(viewed(study), tmp_path / "out", say=lambda _: None)
    with pytest.raises(SelfVitMilError, match="nearest is other"):
        export.write_folder(viewed(study), tmp_path / "second", slides=["othr"], say=lambda _: None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "study"]


@pytest.mark.parametrize(
    ("mpp", "top_mpp", "halvings"), [(0.25, 2.0, 3), (0.2425, 2.0, 4), (0.2501, 0.25, 0), (0.5, 0.1, 0), (0.25, 0.3, 1)]
)
def test_the_finest_level_of_an_export_is_not_finer_than_asked(mpp: float, top_mpp: float, halvings: int) -> None:
    opened = tiles.OpenedSlide(None, DeepZoom((50_000, 20_000)), mpp)  # pyright: ignore[reportArgumentType]
    level = export.top_level(opened, top_mpp)
    assert opened.zoom.downsample(level) == 2**halvings


def test_the_bundled_script_has_every_module_and_loads_none(packaged: dict[str, export.StaticFile]) -> None:
    script = packaged["vendor/viewer.js"].content.decode()
    modules = [name for name in packaged if re.fullmatch(r"[\w-]+\.js", name)]
    assert len(modules) > 5
    assert set(re.findall(r"^  // ([\w-]+\.js)$", script, re.MULTILINE)) == set(modules)
    assert not re.search(r"^\s*(?:import|export)\b", script, re.MULTILINE)
    built_from = json.loads((STATIC_FOLDER / "vendor" / "versions.json").read_text())["modules"]
    parts = (part for name in sorted(modules) for part in (name.encode(), packaged[name].content))
    assert built_from == hashlib.sha256(b"\0".join(parts)).hexdigest(), "a module was edited: run `pip install -e .`"


# ---------------------------------------------------------------------------------------------------- the command


def test_a_port_in_use_ends_with_words_and_status_2(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(SystemExit) as ended:
            cli.main(["view", str(study), "--port", str(port), "--no-browser"])
    assert ended.value.code == 2
    assert f"port {port} is in use" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--port", "70000"], ["--host", "no such host"], ["--slides", "other"]])
def test_impossible_flags_end_with_status_2(study: Path, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["view", str(study), "--no-browser", *arguments])
    assert ended.value.code == 2


def test_a_study_without_a_cohort_is_told_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["view", str(tmp_path), "--no-browser"])
    assert ended.value.code == 2
    assert "no cohort.csv" in capsys.readouterr().err


def test_without_openseadragon_the_command_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(export.resources, "files", lambda _: tmp_path)
    with pytest.raises(SelfVitMilError, match=r"openseadragon.*viewer.js.*npm.*network"):
        export.static_files()


def test_the_command_writes_a_folder(
    study: Path, tmp_path: Path, packaged: object, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["view", str(study), "--export", str(tmp_path / "out"), "--slides", "other", "--export-mpp", "1"]
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 0
    assert (tmp_path / "out/index.html").is_file()
    assert "1 slides" in capsys.readouterr().out


def test_what_comes_from_npm_is_pinned_and_names_no_registry(packaged: dict[str, export.StaticFile]) -> None:
    root = Path(__file__).parents[2]
    package = json.loads((root / "package.json").read_text())
    lock = (root / "package-lock.json").read_text()
    assert "resolved" not in lock
    built_from = json.loads((STATIC_FOLDER / "vendor" / "versions.json").read_text())
    for name in ("openseadragon", "esbuild"):
        locked = json.loads(lock)["packages"][f"node_modules/{name}"]
        assert locked["version"] == package["dependencies"][name] == built_from[name]
        assert locked["integrity"].startswith("sha512-")
    listed = subprocess.run(
        ["git", "ls-files", "src/selfvitmil/view/static/vendor"], cwd=root, capture_output=True, text=True
    )
    assert not listed.stdout  # nobody else's source is committed


def test_a_viewer_does_without_torch() -> None:
    modules = "selfvitmil.commands.view, selfvitmil.view.server, selfvitmil.view.export"
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


def test_addresses_to_open(monkeypatch: pytest.MonkeyPatch) -> None:
    address = server.listen("127.0.0.1", 0)
    with address.listener:
        assert address.url == f"http://127.0.0.1:{address.port}/"
    monkeypatch.setattr(server.socket, "gethostname", lambda: "workstation")
    address = server.listen("0.0.0.0", 0)
    with address.listener:
        assert address.url == f"http://workstation:{address.port}/?token={address.token}"
