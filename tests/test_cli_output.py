"""How commands print: widths, repeated lines, failures, the flags that every command has, lists, help."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from helpers.cli import selfvitmil
from selfvitmil.cli import flags, output, parser
from selfvitmil.cli.flags import FIRST
from selfvitmil.cli.parser import app
from selfvitmil.commands import status as status_command
from selfvitmil.rendering import command
from selfvitmil.settings import StudySettings, TrainSettings, read_toml, resolve_settings
from selfvitmil.stages.base import StageResult
from selfvitmil.store.failures import Failure, fold_failures
from selfvitmil.store.layout import StudyLayout
from selfvitmil.study import KEPT_HEAD, remember_settings

WIDE = [
    ["method", "AUC [95 %]", "notes", "p", "training"],
    ["self-vit-mil", "0.944 [0.759, 0.989]", "trained on many slides of all sites", "0.001", "12 min"],
    ["abmil", "0.889 [0.644, 0.973]", "-", "-", "3.3 s"],
]


# ---------------------------------------------------------------------------------------------------- tables


def printed(rows: list[list[str]], width: int, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> tuple[str, int]:
    monkeypatch.setattr(output, "_width", lambda: width)
    left_out = output._Console(width).table(rows)
    return capsys.readouterr().out, left_out


@pytest.mark.parametrize("width", [30, 44, 60, 80, 100, 200])
def test_no_number_is_cut_and_no_line_is_too_long(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    text, left_out = printed(WIDE, width, monkeypatch, capsys)
    assert max(map(len, text.splitlines())) <= max(width, len("self-vit-mil"))
    assert "…" not in text
    kept = len(WIDE[0]) - left_out
    for row in WIDE:
        for cell in row[:kept]:
            if not output._folds([row[0], cell]):
                assert cell in text
    for cell in (row[kept] for row in WIDE[1:] if left_out):
        assert cell not in text or cell == "-"


def test_a_wide_terminal_shows_all_columns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    assert printed(WIDE, 100, monkeypatch, capsys)[1] == 0
    assert printed(WIDE, 40, monkeypatch, capsys)[1] == 3


# ---------------------------------------------------------------------------------------------------- lines


def test_what_was_said_is_not_said_again(capsys: pytest.CaptureFixture[str]):
    failure = Failure("b", "tile", "b.svs: cannot be read", "Copy it again")
    later = Failure("b", "embed", "b: no tile table in tiles/x", "Run tile")
    with output.printing():
        status = output.end(
            [
                StageResult(failures=(failure,), notes=("classes: a and b", "one")),
                StageResult(failures=(later,), notes=("classes: a and b", "two")),
            ]
        )
    lines = capsys.readouterr().out.splitlines()
    assert status == 3
    assert lines == [
        "classes: a and b",
        "one",
        "FAILED b (tile): b.svs: cannot be read. Copy it again",
        "1 failed; see failures.csv",
        "two",
        "missing since they failed before: b",
    ]


def test_consequences_of_a_failure_are_folded():
    cause = Failure("b", "check", "b.svs: cannot be read", "Copy it")
    same = Failure("b", "tile", "b.svs: cannot be read", "Copy it")
    later = [
        Failure("b", "embed", "b: no tile table in tiles/x", ""),
        Failure("b", "compare", "b: no feature file", ""),
    ]
    other = Failure("c", "embed", "c: no tile table in tiles/x", "Run tile")
    found = fold_failures([cause, same, *later, other])
    assert found == [(cause, ("tile", "embed", "compare")), (other, ())]
    second = Failure("b", "localize", "b.xml: not an annotation", "Correct it")
    assert fold_failures([cause, later[0], second]) == [(cause, ("embed",)), (second, ())]


# ---------------------------------------------------------------------------------------------------- common flags


@pytest.fixture
def cohort(tmp_path: Path) -> Path:
    folder = tmp_path / "made slides"
    done = selfvitmil("synth", folder, "--slides", 2, "--size-px", 1024, "--workers", 0)
    assert done.returncode == 0
    return folder


def test_json_quiet_and_log_file_of_any_command(cohort: Path, tmp_path: Path):
    study, log = tmp_path / "study", tmp_path / "log.txt"
    done = selfvitmil(
        "check", study, "--cohort", cohort / "cohort.csv", "--workers", 0, "--json", "--quiet", "--log-file", log
    )
    told = json.loads(done.stdout)
    assert done.stderr == ""
    assert (told["command"], told["exit_status"]) == ("check", 0)
    assert [row["slide"] for row in told["results"][0]["table"]] == ["slide_001", "slide_002"]
    assert "check: 2/2 slides, 0 failed" in log.read_text()  # the log has what quiet hides
    quiet = selfvitmil("check", study, "--workers", 0, "--quiet", f"--log-file={log}")
    assert (quiet.stdout, quiet.stderr) == ("", "")
    assert "2 of 2 slides can be worked with" in log.read_text()


def test_errors_are_json_too_and_are_told_when_quiet(tmp_path: Path):
    done = selfvitmil("check", tmp_path / "new", "--json", "--quiet")
    told = json.loads(done.stdout)
    assert done.returncode == told["exit_status"] == 2
    assert told["error"]["code"]
    assert told["error"]["what"] in done.stderr


def test_a_log_that_cannot_be_written_is_a_usage_error(tmp_path: Path):
    done = selfvitmil("check", tmp_path, "--log-file", tmp_path / "no folder" / "log.txt")
    assert done.returncode == 2
    assert "cannot be written" in done.stderr


@pytest.mark.parametrize("how", ["status", "exception"])
def test_an_interrupted_command_ends_with_a_line(how: str, monkeypatch: pytest.MonkeyPatch):
    def stopped(*_: Any, **__: Any) -> int:
        if how == "exception":
            raise KeyboardInterrupt
        return 130

    if how == "exception":
        monkeypatch.setattr(status_command, "status", stopped)  # the parser of arguments must let it through
    else:
        monkeypatch.setattr(parser, "app", stopped)
    done = selfvitmil("status", "study")
    assert done.returncode == 130
    assert done.stderr == "selfvitmil: interrupted; finished work is kept, and the same command resumes\n"


# ---------------------------------------------------------------------------------------------------- lists


@pytest.mark.parametrize(
    "given",
    [
        ["--compare.methods", "mean", "max", "abmil"],
        ["--compare.methods", "mean,max,abmil"],
        ["--compare.methods", "mean,", "max", ",abmil"],
        ["--compare.methods=mean,max,abmil"],
        ["--compare.methods", "mean", "--compare.methods", "max", "--compare.methods", "abmil"],
    ],
)
def test_lists_are_given_by_spaces_commas_or_repeated_flags(given: list[str]):
    _, bound, _ = app.parse_args(flags.split_lists(["compare", "study", *given, "--train.seeds", "2"]))
    assert bound.arguments["compare"].methods == ("mean", "max", "abmil")
    assert bound.arguments["train"].seeds == 2


def test_other_values_keep_their_commas():
    given = ["localize", "study", "--slides", "a,b", "--name", "x,y", "--batch.directives", "--gres=gpu:1,2"]
    assert flags.split_lists(given) == given


# ---------------------------------------------------------------------------------------------------- help


@pytest.mark.parametrize("name", FIRST)
def test_first_options_exist(name: str):
    known = {flag for argument in app[name].assemble_argument_collection() for flag in argument.names}
    assert [flag for flag in FIRST[name] if flag not in known] == []
    assert len(FIRST[name]) <= 10


def test_help_is_short_and_the_rest_is_a_flag_away(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "80")
    short, whole = selfvitmil("run", "--help").stdout, selfvitmil("run", "--help-all").stdout
    assert len(short.splitlines()) < 50
    assert "more options and settings: selfvitmil run --help-all" in short
    assert "--cohort" in short
    for flag in ("--train.weight-decay", "--localize.z-limit", "--pretrain.method"):
        assert flag not in short
        assert flag in whole


# ---------------------------------------------------------------------------------------------------- commands to paste


def test_printed_commands_can_be_pasted():
    text = command("view", "/data/my study's")
    assert shlex.split(text) == ["selfvitmil", "view", "/data/my study's"]
    assert command("view", "study") == "selfvitmil view study"


# ---------------------------------------------------------------------------------------------------- kept settings


def test_settings_given_as_flags_are_kept(tmp_path: Path):
    path = StudyLayout(tmp_path).settings
    assert remember_settings(tmp_path, {}) == ()
    assert remember_settings(tmp_path, {"train": {"seeds": 2}, "engine": {"workers": 0}})
    assert read_toml(path) == {"train": {"seeds": 2}}
    assert remember_settings(tmp_path, {"train": {"seeds": 3, "folds": 4}})
    assert read_toml(path) == {"train": {"seeds": 2, "folds": 4}}  # what is stored holds
    assert remember_settings(tmp_path, {"train": {"seeds": 3}}) == ()
    assert path.read_text().startswith(KEPT_HEAD)
    assert resolve_settings(path, {}).train == StudySettings(train=TrainSettings(seeds=2, folds=4)).train


def test_a_study_toml_of_the_user_is_never_changed(tmp_path: Path):
    path = StudyLayout(tmp_path).settings
    path.write_text("[train]\nseeds = 1\n")
    assert remember_settings(tmp_path, {"train": {"folds": 4}}) == ()
    assert path.read_text() == "[train]\nseeds = 1\n"
