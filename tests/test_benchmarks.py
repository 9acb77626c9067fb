"""`benchmarks/all.py`: what it makes of a benchmark that ends well, fails, or takes too long; and that it knows all."""

from __future__ import annotations

import importlib.util
import itertools
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from PIL import Image

FOLDER = Path(__file__).parents[1] / "benchmarks"


def load(name: str) -> ModuleType:
    if str(FOLDER) not in sys.path:  # as when a script is run: some take parts of others
        sys.path.append(str(FOLDER))
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", FOLDER / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def runner() -> ModuleType:
    return load("all")


def script(folder: Path, text: str) -> Path:
    path = folder / "fake.py"
    path.write_text(text)
    return path


def test_every_script_is_run_or_named(runner: ModuleType):
    there = {path.stem for path in FOLDER.glob("*.py")} - {"all", "breakhis_layout"}  # the latter only prepares data
    assert there <= {*runner.CPU, *runner.CUDA, *runner.BY_HAND}
    assert {*runner.CPU, *runner.CUDA} <= there


@pytest.fixture(scope="module")
def tissue(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten patients with fields of normal (smooth) and tumour (rough) tissue, two tiles each."""
    folder = tmp_path_factory.mktemp("tissue")
    rng = np.random.default_rng(0)
    lines = ["file,class,tumour,group,field"]
    for patient, tumour, field, tile in itertools.product(range(10), (0, 1), range(3), range(2)):
        name = f"P{patient}_{tumour}_{field}_{tile}.png"
        pixels = 140 + rng.normal(0, 40 if tumour else 10, (32, 32, 3))
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / name)
        lines.append(f"{name},{'tumour' if tumour else 'normal'},{tumour},P{patient},{tumour}_{field}")
    (folder / "tiles.csv").write_text("\n".join(lines) + "\n")
    return folder


def test_the_budget_benchmark_keeps_patients_and_fields_apart(tissue: Path):
    budget = load("pretrain_budget")
    tiles = budget.read_table(tissue)
    chosen = budget.train_patients(tiles)
    assert len(chosen) == 6
    rows = np.flatnonzero(np.isin(tiles.patients, sorted(chosen)))
    for number, slide in enumerate(budget.make_slides(tiles, rows, 20, 8, 2, seed=0)):
        assert slide.label == number % 2
        assert set(tiles.patients[slide.rows]) <= chosen
        np.testing.assert_array_equal(slide.in_lesion, tiles.is_tumour[slide.rows])
        assert len(slide.rows) == 8
        assert len(set(tiles.fields[slide.rows][-2:])) == 1, "whole fields"
        assert len(set(tiles.patients[slide.rows])) == (1 if number % 2 else 2)


@pytest.mark.slow
def test_the_budget_benchmark_runs_and_takes_up_where_it_stopped(tissue: Path, tmp_path: Path, capsys):
    small = {"width": 16, "depth": 1, "heads": 2, "patch_px": 8, "batch": 8, "num_local": 1, "local_px": 16}
    small |= {"out_dim": 16, "head_width": 16, "bottleneck": 8, "koleo": 0.0, "global_px": 32}
    given = ["--data", str(tissue), "--steps", "1", "--budgets", "1", "2", "--seeds", "0", "1", "--device", "cpu"]
    given += [word for key, value in small.items() for word in ("--set", f"{key}={value}")]
    given += ["--set", "global_scale=[0.9, 1.0]", "--set", "local_scale=[0.2, 0.3]", "--methods", "mean"]
    given += ["--slides", "20", "--test-slides", "8", "--slide-tiles", "8", "--lesion-tiles", "4"]
    budget = load("pretrain_budget")
    budget.main([*given, "--out", str(tmp_path / "runs.jsonl")])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(result["budgets"]) == {"1", "2"}
    mean, sd = result["budgets"]["2"]["auc_mean"]
    assert 0 <= mean <= 1
    assert sd >= 0
    lines = (tmp_path / "runs.jsonl").read_text()
    assert len(lines.splitlines()) == 4
    budget.main([*given, "--out", str(tmp_path / "runs.jsonl")])
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == result
    assert (tmp_path / "runs.jsonl").read_text() == lines


def test_a_budget_that_makes_slides_worse_is_listed():
    runs = [
        {"budget": budget, "knn20": 0.5, "auc_mean": auc + 0.01 * seed}
        for seed in range(3)
        for budget, auc in ((0, 0.99), (1, 0.90), (2, 0.96), (4, 0.82))
    ]
    assert load("pretrain_budget").summarize(runs)["falls"] == ["mean at 4"]


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
