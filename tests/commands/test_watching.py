"""`predict --watch`: slides that arrive are predicted once, when they are whole; restarts; the viewer follows."""

from __future__ import annotations

import os
import shutil
import time
from contextlib import suppress
from pathlib import Path

import pytest

from helpers.cli import rows_of
from helpers.error_codes import has_code
from helpers.tiny_package import make_package
from selfvitmil.commands import view, watch
from selfvitmil.commands.predict import predict_settings
from selfvitmil.commands.watch import SETTLE_S, Watcher, state_of
from selfvitmil.engine import Engine
from selfvitmil.errors import ConfigError
from selfvitmil.package import open_package
from selfvitmil.settings import EngineSettings, StudySettings
from selfvitmil.slides import synthetic
from selfvitmil.study import Study


class Stopped(Exception):
    """The test ends the watcher where it would wait."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("watched")
    make_package(folder / "model")
    for k, name in enumerate("abc"):
        synthetic.make_slide(folder / "made" / f"{name}.svs", seed=k, size=(1024, 1024), lesions=0)
    return folder


def arrive(place: Path, incoming: Path, name: str, *, age_s: float = 2 * SETTLE_S) -> Path:
    incoming.mkdir(exist_ok=True)
    file = Path(shutil.copy(place / "made" / f"{name[0]}.svs", incoming / f"{name}.svs"))
    then = time.time() - age_s
    os.utime(file, (then, then))
    return file


def watched(place: Path, incoming: Path, out: Path) -> list[list[str]]:
    """The names of the slides of each round, until the watcher would wait."""

    def stop(_: float) -> None:
        raise Stopped

    package = open_package(place / "model")
    settings = predict_settings(package, {"localize": {"pictures": False, "geojson": "none"}})
    rounds: list[list[str]] = []
    with Engine(EngineSettings(workers=0)) as engine, suppress(Stopped):
        for result in watch.watch(package, [incoming], out, settings, engine, 5.0, pause=stop):
            rounds.append([each.slide for each in result.slides])
    return rounds


def test_slides_are_predicted_once_when_they_are_whole(place: Path, tmp_path: Path):
    incoming, out = tmp_path / "in", tmp_path / "out"
    arrive(place, incoming, "a")
    late = arrive(place, incoming, "b", age_s=1)  # may still be being copied
    assert watched(place, incoming, out) == [["a"]]
    assert watched(place, incoming, out) == []  # a new watcher knows what the former did
    os.utime(late, (0, time.time() - SETTLE_S - 1))
    arrive(place, incoming, "c")
    assert sorted(watched(place, incoming, out)[0]) == ["b", "c"]
    assert sorted(row["slide"] for row in rows_of(out / "predictions.csv")) == ["a", "b", "c"]


def test_a_broken_slide_is_tried_again_when_it_changes(place: Path, tmp_path: Path):
    incoming, out = tmp_path / "in", tmp_path / "out"
    broken = arrive(place, incoming, "a")
    broken.write_bytes(broken.read_bytes()[:2000])
    os.utime(broken, (0, time.time() - 2 * SETTLE_S))
    arrive(place, incoming, "b")
    assert sorted(map(len, watched(place, incoming, out))) == [1]
    assert [row["slide"] for row in rows_of(out / "failures.csv")] == ["a"]
    watcher = Watcher(open_package(place / "model"), [incoming], out)
    assert set(watcher.waiting()) == {"a"}
    watcher.failed["a"] = state_of(broken)
    assert watcher.waiting() == {}
    arrive(place, incoming, "a", age_s=3 * SETTLE_S)  # copied again, whole
    assert set(watcher.waiting()) == {"a"}
    assert watched(place, incoming, out) == [["a"]]
    assert rows_of(out / "failures.csv") == []


def test_of_two_files_with_one_name_the_first_is_predicted(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    incoming = tmp_path / "in"
    arrive(place, incoming, "a")
    (incoming / "more").mkdir()
    arrive(place, incoming / "more", "a")
    watcher = Watcher(open_package(place / "model"), [incoming], tmp_path / "out")
    for _ in range(2):
        assert set(watcher.waiting()) == {"a"}
    assert capsys.readouterr().err.count("another slide has this name") == 1


def test_a_slide_of_several_files_is_whole_when_all_are(tmp_path: Path):
    main, data = tmp_path / "s.mrxs", tmp_path / "s"
    main.write_bytes(b"12")
    data.mkdir()
    (data / "part.dat").write_bytes(b"345")
    os.utime(main, (0, 1000))
    os.utime(data / "part.dat", (0, 5000))
    os.utime(data, (0, 2000))
    size, changed = state_of(main)
    assert changed == 5000
    assert size >= 5


def test_the_viewer_follows(place: Path, tmp_path: Path):
    incoming, out = tmp_path / "in", tmp_path / "out"
    arrive(place, incoming, "a")
    assert watched(place, incoming, out) == [["a"]]
    viewed = view.viewed_study(Study(out, StudySettings()), pseudonyms=False)
    assert [row["name"] for row in viewed.study_data()["slides"]] == ["a"]
    arrive(place, incoming, "b", age_s=1)
    assert watched(place, incoming, out) == []
    listed = {row["name"]: row for row in viewed.study_data()["slides"]}
    assert (set(listed), listed["b"]["predictions"]) == ({"a", "b"}, {})
    assert viewed.study_data()["queue"]
    assert [listed[name]["waits"] for name in "ab"] == [False, True]


@pytest.mark.parametrize(("every", "folder", "code"), [(0.0, "in", "watch-pause"), (5.0, "nowhere", "watch-folder")])
def test_what_cannot_be_watched_is_refused(place: Path, tmp_path: Path, every: float, folder: str, code: str):
    (tmp_path / "in").mkdir()
    package = open_package(place / "model")
    with Engine(EngineSettings(workers=0)) as engine, pytest.raises(ConfigError, check=has_code(code)):
        next(watch.watch(package, [tmp_path / folder], tmp_path / "out", package.settings, engine, every))
