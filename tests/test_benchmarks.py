"""`benchmarks/all.py`: what it makes of a benchmark that ends well, fails, or takes too long; and that it knows all."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def runner() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmarks_all", FOLDER / "all.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def script(folder: Path, text: str) -> Path:
    path = folder / "fake.py"
    path.write_text(text)
    return path


def test_every_script_is_run_or_named(runner: ModuleType):
    there = {path.stem for path in FOLDER.glob("*.py")} - {"all", "breakhis_layout"}  # the latter only prepares data
    assert there <= {*runner.CPU, *runner.CUDA, *runner.BY_HAND}
    assert {*runner.CPU, *runner.CUDA} <= there


def test_a_result_is_the_last_line_with_machine_and_versions(runner: ModuleType, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(runner, "others_share", lambda: 0.5)
    path = script(tmp_path, "import sys\nprint('{\"early\": 1}')\nprint('{\"ratio\": %s}' % sys.argv[1])\n")
    record, words = runner.run_one(path, ["3.5"], 60.0)
    assert record["result"] == {"ratio": 3.5}
    assert record["command"] == "python benchmarks/fake.py 3.5"
    assert record["busy"]
    assert "busy" in words
    assert record["versions"]["python"].startswith(f"{sys.version_info.major}.")
    assert record["machine"]["cores"] > 0
    assert str(tmp_path) not in json.dumps(record)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("raise SystemExit('they compute different things')", "they compute different things"),
        ("print('no json')", "no result"),
        ("print('[1]')", "no result"),
        ("import time; time.sleep(60)", "stopped after 1 s"),
    ],
)
def test_what_gives_no_result_says_why(runner: ModuleType, tmp_path: Path, monkeypatch, text: str, told: str):
    monkeypatch.setattr(runner, "others_share", lambda: 0.0)
    record, words = runner.run_one(script(tmp_path, text), [], 1.0 if "sleep" in text else 60.0)
    assert record is None
    assert told in words


def test_the_share_of_others_is_a_share(runner: ModuleType):
    share = runner.others_share(0.2)
    assert share is None or 0.0 <= share <= 1.0


def test_unknown_names_are_refused():
    done = subprocess.run(
        [sys.executable, str(FOLDER / "all.py"), "--only", "raeding"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "raeding" in done.stderr
    assert "reading" in done.stderr
