"""Results as words: every kind of result has them, and the last table of a run says what the comparison found."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from helpers.comparisons import ON, row
from selfvitmil import commands, stages
from selfvitmil.commands.run import RunOutcome, RunResult, StageReport, StageState
from selfvitmil.evaluate.comparison import ComparisonRow
from selfvitmil.evaluate.comparison_table import table_csv
from selfvitmil.metrics import Interval
from selfvitmil.rendering import _RENDERERS, render, to_html
from selfvitmil.stages.base import Pending, StageResult
from selfvitmil.stages.compare import CompareResult
from selfvitmil.stages.lesions import LesionsResult
from selfvitmil.stages.tile import TileResult
from selfvitmil.store.failures import Failure
from selfvitmil.store.provenance import BUILT, UP_TO_DATE, Change, ChangeKind, rebuilt
from selfvitmil.tiles import TiledSlide


def all_results(kind: type[StageResult] = StageResult) -> list[type[StageResult]]:
    return [kind, *(each for own in kind.__subclasses__() for each in all_results(own))]


def test_every_kind_of_result_has_words():
    """Importing the packages' modules defines all kinds."""
    import importlib
    import pkgutil

    for package in (stages, commands):
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)
    ours = {each.__name__ for each in all_results() if each.__module__.startswith("selfvitmil.")}
    assert ours == set(_RENDERERS)


def test_a_kind_without_words_of_its_own_has_those_of_its_base():
    @dataclass(frozen=True)
    class Other(StageResult):
        pass

    assert render(Other(notes=("a",))).lines == ("a",)


def test_notebooks_show_failures_and_escape_names():
    page = to_html(StageResult(notes=("<i>",), failures=(Failure("<s>", "tile", "broken", "Copy it again"),)))
    assert "&lt;i&gt;" in page
    assert "FAILED &lt;s&gt; (tile): broken. Copy it again" in page


def test_tiles_are_summed_and_reasons_are_grouped():
    change = Change(ChangeKind.SETTING, "tile.mpp", 0.5, 1.0)
    slides = {f"s{k}": TiledSlide(10, rebuilt(change), {}) for k in range(3)}
    slides |= {"t": TiledSlide(5, UP_TO_DATE, {"warnings": ["pen marks"]}), "u": TiledSlide(500, BUILT, {})}
    lines = render(TileResult("0.5mpp", slides, 6)).lines
    assert lines[0] == "3 slides rebuilt: tile.mpp 0.5 -> 1.0"
    assert "t: pen marks" in lines
    assert [line for line in lines if line.startswith("u: 500 tiles")]  # fifty times the median
    assert lines[-1] == "535 tiles of 5 of 6 slides in tiles/0.5mpp (1 were up to date)"


def test_a_run_says_how_each_stage_ended():
    failed = StageResult(failures=(Failure("s1", "tile", "broken", ""),))
    reports = {
        "check": StageReport(StageState.UP_TO_DATE, Pending(num_up_to_date=3)),
        "tile": StageReport(StageState.DONE, Pending(), num_failed=1, seconds=61.0),
        "embed": StageReport(StageState.STOPPED, Pending(), seconds=2.0),
    }
    words = render(RunResult(reports, {"tile": failed}))
    assert [row[1:] for row in words.table[1:]] == [
        ("up to date (3 slides)", ""),
        ("done, 1 slide failed", "1.0 min"),
        ("could not be done: see the message below", "2.0 s"),
    ]
    assert words.lines[0].startswith("1 slide failed")


# ---------------------------------------------------------------------------------------------------- ends of runs


def compared(made: ComparisonRow) -> CompareResult:
    text = table_csv([made])
    return CompareResult(Path("results/compare"), tuple(csv.DictReader(io.StringIO(text))), (made,))


def outcome(made: ComparisonRow, hit_rate: float | None = None) -> RunOutcome:
    lesions: Any = None
    if hit_rate is not None:
        scores = SimpleNamespace(intervals={"hit_rate": Interval(hit_rate, 0.0, 1.0, "Wilson", 0.95)})
        table: Any = SimpleNamespace(scores={made.display_name: scores})
        lesions = LesionsResult(comparison=table)
    return RunOutcome(Path("study"), "self-vit-mil", compared(made), lesions, Path("study/report/index.html"))


@pytest.mark.parametrize("protocol", ["honest", "optimistic"])
def test_a_run_ends_with_the_table_of_its_comparison(protocol: Any):
    made = row("self-vit-mil", 0.7, evaluated_on=replace(ON, protocol=protocol))
    words = render(outcome(made, hit_rate=0.75))
    header, line = words.table
    assert header[1:] == ("AUC [95 %]", "of seeds", "sens.", "spec.", "top tile\nin a lesion")
    assert ("OPTIMISTIC" in header[0]) == (protocol == "optimistic")
    assert line[1].startswith("0.700 [")
    assert line[3:] == ("0.700", "0.780", "0.75")
    assert words.lines[0].startswith("AUC of self-vit-mil: 0.700 [")
    assert ("OPTIMISTIC" in words.lines[0]) == (protocol == "optimistic")
    assert words.lines[1:] == (f"report: {Path('study/report/index.html')}", "viewer: selfvitmil view study")


def test_a_run_without_scored_heatmaps_has_no_column_for_them():
    header, line = render(outcome(row("self-vit-mil", 0.7))).table
    assert header[-1] == "spec."
    assert len(line) == len(header)


def test_a_method_without_scored_heatmaps_has_a_dash():
    made = row("self-vit-mil", 0.7)
    scored = outcome(made, hit_rate=0.75)
    lesions: Any = scored.lesions
    lesions.comparison.scores.clear()
    assert render(scored).table[1][-1] == "-"


def test_a_run_on_three_classes_ends_with_the_macro_auc():
    on = replace(ON, counts=(("a", 3), ("b", 4), ("c", 5)))
    words = render(outcome(row("self-vit-mil", 0.876, evaluated_on=on, sensitivity=None, specificity=None)))
    shown = dict(zip(*words.table, strict=True))
    assert shown["macro AUC [95 %]"] == "0.876 [0.776, 0.926]"
    assert (shown["acc."], shown["bal. acc."]) == ("0.750", "0.740")
    assert words.lines[0].startswith("macro AUC of self-vit-mil: 0.876 [0.776, 0.926]")
    assert "3 a and 4 b and 5 c slides" in words.lines[0]
