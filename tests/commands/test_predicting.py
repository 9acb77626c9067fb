"""`predict`: which slides are found, where predictions cannot be written, and that no call loses earlier ones."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from helpers.cli import Done, rows_of, selfvitmil
from helpers.error_codes import has_code
from helpers.tiny_package import make_package
from selfvitmil.commands import view
from selfvitmil.commands.predict import find_new_slides, predict
from selfvitmil.errors import ConfigError
from selfvitmil.package import PredictionFiles, open_package
from selfvitmil.settings import StudySettings
from selfvitmil.slides import synthetic
from selfvitmil.store.lock import study_lock
from selfvitmil.study import Study


def slides_in(folder: Path, *names: str) -> Path:
    folder.mkdir()
    for name in names:
        (folder / name).touch()
    return folder


def test_a_slide_that_is_named_twice_is_one_slide(tmp_path: Path):
    folder = slides_in(tmp_path / "slides", "a.svs", "b.svs")
    cohort = find_new_slides([folder / "b.svs", folder, folder / ".." / "slides" / "a.svs"])
    assert sorted(cohort.slides) == ["a", "b"]


def test_two_slides_of_one_name_are_refused(tmp_path: Path):
    first, second = slides_in(tmp_path / "first", "a.svs"), slides_in(tmp_path / "second", "A.svs")
    with pytest.raises(ConfigError, match=r"first/a\.svs = second/A\.svs", check=has_code("duplicate-slides")):
        find_new_slides([first, second])


@pytest.mark.parametrize(("out", "code"), [("model", "out-is-model"), ("file", "out-is-file")])
def test_folders_where_predictions_cannot_be_written(tmp_path: Path, out: str, code: str):
    folder = slides_in(tmp_path / "slides", "a.svs")
    (tmp_path / "file").write_text("mine")
    model: Any = SimpleNamespace(folder=tmp_path / "model")
    nobody: Any = None
    with pytest.raises(ConfigError) as refused:
        predict(model, [folder], tmp_path / out, StudySettings(), nobody)
    assert refused.value.code == code
    assert (tmp_path / "file").read_text() == "mine"


# ---------------------------------------------------------------------------------------------------- answers


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three slides, two models of two classes and one of three; and a folder with the answers of one for two slides."""
    folder = tmp_path_factory.mktemp("predicting")
    for number, name in enumerate("abc"):
        synthetic.make_slide(folder / "slides" / f"{name}.svs", number, size=(1024, 1024))
    make_package(folder / "model")
    make_package(folder / "other")  # the same name, other weights
    make_package(folder / "three", name="tiny_three", classes=("x", "y", "z"))
    assert ask(folder, "model", folder / "out", "a", "b").returncode == 0
    return folder


@pytest.fixture
def out(place: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(place / "out", tmp_path / "out"))


def ask(place: Path, model: str, out: Path, *slides: str, flags: tuple[object, ...] = ("--no-maps",)) -> Done:
    paths = [place / "slides" / f"{slide}.svs" for slide in slides]
    return selfvitmil("predict", place / model, *paths, "--out", out, "--workers", 0, *flags)


def answers(out: Path) -> dict[tuple[str, str], dict[str, str]]:
    return {(row["slide"], row["model"]): row for row in rows_of(out / "predictions.csv")}


def told(out: Path) -> dict[tuple[str, str], dict[str, Any]]:
    slides = json.loads((out / "predictions.json").read_text())["slides"]
    return {(each["slide"], each["model"]): each for each in slides}


def test_a_further_call_keeps_the_answers_of_earlier_ones(place: Path, out: Path):
    before, before_json = answers(out), told(out)
    assert {slide for slide, _ in before} == {"a", "b"}
    assert ask(place, "model", out, "c").returncode == 0
    tag = open_package(place / "model").tag
    assert list(answers(out)) == [("a", tag), ("b", tag), ("c", tag)] == list(told(out))
    assert {key: row for key, row in answers(out).items() if key in before} == before
    assert {key: each for key, each in told(out).items() if key in before_json} == before_json


def test_the_same_slide_by_the_same_model_is_one_row(place: Path, out: Path):
    before = (out / "predictions.csv").read_bytes(), (out / "predictions.json").read_bytes()
    assert ask(place, "model", out, "b").returncode == 0
    assert (out / "predictions.csv").read_bytes() == before[0]
    assert (out / "predictions.json").read_bytes() == before[1]


def test_rows_of_another_model_stay_and_each_says_whose_it_is(place: Path, out: Path):
    before = answers(out)
    assert ask(place, "other", out, "a").returncode == 0
    assert ask(place, "three", out, "a").returncode == 0
    packages = [open_package(place / name) for name in ("model", "other", "three")]
    tags = [package.tag for package in packages]
    assert tags[0].startswith("tiny_mean_")
    assert all(tag.endswith(package.identity[:12]) for tag, package in zip(tags, packages, strict=True))
    now = answers(out)
    assert set(now) == {("a", tags[0]), ("b", tags[0]), ("a", tags[1]), ("a", tags[2])}
    for key, row in before.items():
        assert {column: now[key][column] for column in row} == row
    assert now["a", tags[1]]["probability"] != before["a", tags[0]]["probability"]
    three = now["a", tags[2]]
    assert three["probability"] == ""
    assert sum(float(three[f"probability_{name}"]) for name in "xyz") == pytest.approx(1)
    models = json.loads((out / "predictions.json").read_text())["models"]
    assert {tag: models[tag]["identity"] for tag in tags} == {each.tag: each.identity for each in packages}


def test_maps_and_their_tables_are_kept_by_model(place: Path, out: Path):
    flags = ("--localize.no-pictures", "--localize.geojson", "none")
    for model in ("model", "other"):
        assert ask(place, model, out, "a", flags=flags).returncode == 0
    for name in ("model", "other"):
        package = open_package(place / name)
        files = told(out)["a", package.tag]["map"]["files"]
        assert files == [f"maps/{package.tag}/a.h5"]
        assert (out / files[0]).is_file()
        assert (out / "maps" / package.tag / "points.csv").is_file()


def test_predictions_can_be_viewed(place: Path, out: Path):
    flags = ("--localize.no-pictures", "--localize.geojson", "none")
    assert ask(place, "model", out, "a", flags=flags).returncode == 0
    assert ask(place, "model", out, "b", flags=flags).returncode == 0
    viewed = view.viewed_study(Study(out, StudySettings()), pseudonyms=False)
    listed = {row["name"]: row for row in viewed.study_data()["slides"]}
    assert {"a", "b"} <= set(listed)
    assert listed["a"]["status"] == "ok"
    tag = open_package(place / "model").tag
    (model,) = viewed.study_data()["models"]
    assert model["name"] == tag
    shown = listed["a"]["predictions"][model["id"]]
    assert shown["probability"] == pytest.approx(float(answers(out)["a", tag]["probability"]), abs=1e-6)
    assert shown["part"] == "new"


def test_a_failure_takes_no_answer_away(place: Path, out: Path, tmp_path: Path):
    before = answers(out)
    (tmp_path / "d.svs").write_bytes(b"no slide")
    result = selfvitmil(
        "predict", place / "model", place / "gone" / "a.svs", tmp_path / "d.svs", "--out", out, "--workers", 0,
        "--no-maps",
    )  # fmt: skip
    assert result.returncode == 3
    assert answers(out) == before
    failures = json.loads((out / "predictions.json").read_text())["failures"]
    tag = open_package(place / "model").tag
    assert {(each["slide"], each["model"]) for each in failures} == {("a", tag), ("d", tag)}
    # Another model's success says nothing of this one; its own does.
    assert ask(place, "other", out, "a").returncode == 0
    left = json.loads((out / "predictions.json").read_text())["failures"]
    assert {each["slide"] for each in left} == {"a", "d"}
    assert ask(place, "model", out, "a").returncode == 0
    left = json.loads((out / "predictions.json").read_text())["failures"]
    assert {each["slide"] for each in left} == {"d"}


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("predictions.csv", "slide;model;decision\na;x;normal\n"),
        ("predictions.csv", "slide,model\na,x,too many\n"),
        ("predictions.csv", 'slide,model\n"a,x\n'),
        ("predictions.csv", "slide,model\na,x\na,x\n"),
        ("predictions.csv", ""),
        ("predictions.csv", "\udcff"),
        ("predictions.json", "{"),
        ("predictions.json", '{"format_version": 1, "slides": []}'),
        ("predictions.json", "[]"),
    ],
)
def test_answers_that_cannot_be_read_are_not_overwritten(place: Path, out: Path, file: str, content: str):
    (out / file).write_bytes(content.encode("utf-8", "surrogateescape"))
    kept = {path: path.read_bytes() for path in out.glob("predictions.*")}
    result = ask(place, "model", out, "c")
    assert result.returncode == 3
    assert file in result.stderr
    assert result.code == "unreadable-predictions"
    assert {path: path.read_bytes() for path in out.glob("predictions.*")} == kept
    assert not list((out / "work").rglob("c.h5"))  # told before the work


def test_remarks_of_people_stay(place: Path, out: Path):
    lines = (out / "predictions.csv").read_text().splitlines()
    (out / "predictions.csv").write_text(
        "".join(f"{line},{note}\n" for line, note in zip(lines, ("remark", "see", "ok"), strict=True))
    )
    assert ask(place, "model", out, "a", "c").returncode == 0
    assert [row["remark"] for row in rows_of(out / "predictions.csv")] == ["see", "ok", ""]


def test_another_slide_of_the_same_name_does_not_replace_the_answer(place: Path, out: Path, tmp_path: Path):
    before = answers(out)
    for name in ("a.svs", "B.svs"):
        shutil.copy(place / "slides" / ("c.svs" if name == "a.svs" else "b.svs"), tmp_path / name)
        result = selfvitmil("predict", place / "model", tmp_path / name, "--out", out, "--workers", 0, "--no-maps")
        assert result.returncode == 3
        assert "another slide of this name" in result.stdout
        assert answers(out) == before
    (tmp_path / "copy").mkdir()
    same = shutil.copy(place / "slides" / "a.svs", tmp_path / "copy" / "a.svs")
    again = selfvitmil("predict", place / "model", same, "--out", out, "--workers", 0, "--no-maps")
    assert again.returncode == 0, again.stdout


def test_two_calls_at_once_lose_nothing(place: Path, out: Path):
    before = (out / "predictions.csv").read_bytes()
    with study_lock(out, "predict"):
        result = ask(place, "model", out, "c")
    assert result.returncode == 3
    assert result.code == "study-locked"
    assert (out / "predictions.csv").read_bytes() == before


def test_json_prints_this_call_alone(place: Path, out: Path):
    result = ask(place, "model", out, "c", flags=("--no-maps", "--json"))
    assert [each["slide"] for each in json.loads(result.stdout)["slides"]] == ["c"]
    assert len(PredictionFiles.read(out).slides) == 3
