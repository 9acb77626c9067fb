"""Times of earlier runs make the next plan, and a run says how good the plan before it was; times are planted."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers.studies import MICRO
from selfvitmil.commands import run as run_module
from selfvitmil.commands.plan import expected_s, plan
from selfvitmil.commands.run import Request, RunPlan, RunResult, StageReport, StageState, plan_run, read_record, run
from selfvitmil.commands.run import write_record as write_run_record
from selfvitmil.commands.status import status
from selfvitmil.engine import Engine
from selfvitmil.formatting import duration_range
from selfvitmil.rendering import render
from selfvitmil.settings import EngineSettings
from selfvitmil.slides import synthetic
from selfvitmil.stages import STAGES, measure
from selfvitmil.stages.base import Basis, Estimate, Pending
from selfvitmil.study import open_study

TILE = next(stage for stage in STAGES if stage.name == "tile")
TILING_ONLY = Request(until="tile")


@pytest.fixture(autouse=True)
def quick_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    """One forward pass of the encoder instead of two seconds of them."""
    monkeypatch.setattr(measure, "FORWARD_S", 0.0)


@pytest.fixture(scope="module")
def slides(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("slides")
    for number in range(4):
        synthetic.make_slide(folder / f"s{number}.svs", number, size=(1024, 1024))
    return folder


@pytest.fixture
def study(tmp_path: Path, slides: Path) -> Path:
    """A study of two slides that has done nothing."""
    (tmp_path / "study.toml").write_text(MICRO)
    name_slides(tmp_path, slides, 2)
    return tmp_path


def name_slides(study: Path, slides: Path, number: int) -> None:
    rows = "".join(f"s{k},{slides / f's{k}.svs'}\n" for k in range(number))
    (study / "cohort.csv").write_text(f"slide,path\n{rows}")


def planned_run(study: Path) -> RunPlan:
    return plan_run(open_study(study), TILING_ONLY)


def tile(study: Path) -> RunResult:
    with Engine(EngineSettings(workers=0)) as engine:
        return next(each for each in run(open_study(study), TILING_ONLY, engine) if isinstance(each, RunResult))


def estimate_of(study: Path, name: str) -> Estimate:
    return next(each.estimate for each in plan(open_study(study), TILING_ONLY).stages if each.name == name)


def test_the_next_plan_extrapolates_from_what_a_run_took(study: Path, slides: Path):
    assert estimate_of(study, "tile").basis == Basis.MEASURED
    tile(study)
    record = read_record(study)
    assert record is not None
    assert record.timings["tile"][1] == 2
    write_run_record(study, replace(record, timings={"tile": (10.0, 2)}))
    name_slides(study, slides, 4)
    found = estimate_of(study, "tile")  # two further slides, no worker process to start
    assert (found.seconds, found.basis) == (10.0, Basis.RECORDED)
    assert found.range_s[0] < 10 < found.range_s[1]
    (study / "study.toml").write_text(MICRO.replace("size_px = 32", "size_px = 64"))
    assert estimate_of(study, "tile").basis == Basis.MEASURED  # other tiles take another time


def test_the_start_of_workers_does_not_grow_with_the_slides(study: Path):
    plan = planned_run(study)
    record = run_module.RunRecord(conditions=run_module.conditions_of(plan, "CPU"), timings={"tile": (7.0, 1)})
    assert expected_s(plan, TILE, "CPU", record, 3.0) == 3.0 + 2 * 4.0
    assert expected_s(plan, TILE, "CPU", record, 9.0) == 7.0
    assert expected_s(plan, TILE, "another device", record, 3.0) is None
    assert expected_s(plan, TILE, "CPU", None, 3.0) is None


def test_a_run_with_nothing_to_do_keeps_the_timings_and_interrupted_stages_leave_none(
    study: Path, monkeypatch: pytest.MonkeyPatch
):
    tile(study)
    before = read_record(study)
    tile(study)
    after = read_record(study)
    assert before is not None
    assert after is not None
    assert before.timings == after.timings != {}
    shutil.rmtree(study / "tiles")
    (study / "run.json").unlink()
    function: Any = type(TILE).run
    monkeypatch.setattr(type(TILE), "run", lambda *args: replace(function(*args), interrupted=True))
    tile(study)
    found = read_record(study)
    assert found is not None
    assert "tile" in found.seconds
    assert "tile" not in found.timings


def test_a_run_says_how_good_the_plan_was_and_forgets_it(study: Path):
    plan(open_study(study), TILING_ONLY)
    file = run_module.plan_file(study)
    kept = json.loads(file.read_text())
    kept["stages"]["tile"][1:] = [1000.0, 2000.0]
    file.write_text(json.dumps(kept))
    done = tile(study)
    assert not file.exists()
    assert done.planned["tile"] == (1000.0, 2000.0)
    words = render(done)
    assert words.table[0][-1] == "planned"
    assert words.table[2][-1] == "17 to 33 min"
    assert "times faster" in words.lines[-1]
    shown = status(study)
    assert shown.run is not None
    assert tuple(shown.run.planned["tile"]) == (1000.0, 2000.0)
    assert any("the last run: planned" in line for line in render(shown).lines)
    again = tile(study)
    assert again.planned == {}
    assert "planned" not in " ".join(render(again).lines)


def test_a_plan_of_something_else_is_not_compared(study: Path, slides: Path):
    plan(open_study(study), TILING_ONLY)
    name_slides(study, slides, 3)
    assert "tile" not in tile(study).planned  # it has more to do now
    plan(open_study(study), TILING_ONLY)
    (study / "study.toml").write_text(MICRO.replace("size_px = 32", "size_px = 64"))
    assert tile(study).planned == {}


@pytest.mark.parametrize("content", ["", "[]", '{"conditions": 1}', '{"stages": {"tile": 3}}'])
def test_a_damaged_plan_stops_no_run(study: Path, content: str):
    plan(open_study(study), TILING_ONLY)
    run_module.plan_file(study).write_text(content)
    assert run_module.take_plan(planned_run(study), "CPU") == {}


def test_a_plan_that_cannot_be_kept_is_shown_all_the_same(
    study: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
):
    file = tmp_path_factory.mktemp("state") / "file"
    file.write_text("no folder")
    monkeypatch.setenv("XDG_STATE_HOME", str(file))
    assert plan(open_study(study), TILING_ONLY).seconds > 0
    assert tile(study).planned == {}


@pytest.mark.parametrize(
    ("taken", "words"),
    [(5.0, "took 5.0 s (2.0 times faster)"), (15.0, "took 15 s"), (60.0, "took 1.0 min (3.0 times slower)")],
)
def test_the_factor_is_shown_where_a_plan_was_off(taken: float, words: str):
    stages = {"tile": StageReport(StageState.DONE, Pending(), seconds=taken)}
    last = render(RunResult(stages, {}, {"tile": (10.0, 20.0)})).lines[-1]
    assert last == f"planned 10 to 20 s, {words}"


def test_ranges_name_their_unit_once():
    assert [duration_range(limits) for limits in ((120, 270), (30, 120), (0.2, 3), (0, 0.4))] == [
        "2.0 to 4.5 min",
        "30 s to 2.0 min",
        "up to 3.0 s",
        "up to 0.4 s",
    ]
