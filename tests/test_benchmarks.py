"""`benchmarks/all.py`: what it makes of a benchmark that ends well, fails, or takes too long; and that it knows all."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.optimize import minimize

from selfvitmil import metrics

FOLDER = Path(__file__).parents[1] / "benchmarks"
PARTS = ("tile_cohorts", "encoder_worth")
"""Modules of other scripts."""


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
    there = {path.stem for path in FOLDER.glob("*.py")} - {
        "all",
        "breakhis_layout",
        *PARTS,
    }  # the second only prepares data
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


def test_synthetic_slides_keep_patients_and_fields_apart(tissue: Path):
    cohorts = load("tile_cohorts")
    tiles = cohorts.read_table(tissue)
    chosen = cohorts.train_patients(tiles)
    assert len(chosen) == 6
    rows = np.flatnonzero(np.isin(tiles.patients, sorted(chosen)))
    shape = cohorts.SlideShape(tiles=16, lesion_tiles=4, hosts=2)
    for number, slide in enumerate(cohorts.make_slides(tiles, rows, 20, shape, seed=0)):
        assert slide.label == number % 2
        assert set(tiles.patients[slide.rows]) <= chosen
        np.testing.assert_array_equal(slide.lesions > 0, tiles.is_tumour[slide.rows])
        assert len(slide.rows) == 16
        hosts, guests = (set(tiles.patients[part]) for part in (slide.rows[:12], slide.rows[12:]))
        assert len(hosts) <= 2
        assert len(guests) == 1
        assert guests <= hosts if slide.label else not guests & hosts
        if slide.label:
            fields = tiles.fields[slide.rows[12:]]
            assert len(set(fields)) == slide.lesions.max() == 2, "whole fields of two tiles, each a lesion"
            assert len(set(zip(fields, slide.lesions[12:], strict=True))) == 2


def test_tiles_are_shrunk_by_the_mean_of_their_pixels(tissue: Path):
    cohorts = load("tile_cohorts")
    paths = cohorts.read_table(tissue).paths[:3]
    whole, half = cohorts.load_tiles(paths).float(), cohorts.load_tiles(paths, 2).float()
    means = whole.unflatten(3, (16, 2)).unflatten(2, (16, 2)).mean(dim=(3, 5))
    assert (half - means).abs().max() <= 0.5


def test_lesion_froc_equals_the_challenge_metric_where_no_lesion_is_small():
    """Fields as blocks of a mask, far apart and large enough; no two scores are equal."""
    worth, cohorts = load("encoder_worth"), load("tile_cohorts")
    rng = np.random.default_rng(0)
    slides, evidence, cases = [], [], []
    for number in range(12):
        lesions = np.repeat(np.arange(3) if number % 2 else [0], 40)
        scores = rng.random(len(lesions)) * 0.9 + 0.02 * lesions + 0.001
        slides.append(cohorts.Slide(np.arange(len(lesions)), lesions))
        evidence.append(scores)
        mask = np.zeros((40, 40), dtype=np.uint8)  # a tile is a pixel; rows of 40 tiles, lesions 10 rows apart
        points = [(score, k % 40, 10 * lesion) for k, (score, lesion) in enumerate(zip(scores, lesions, strict=True))]
        mask[10 * np.unique(lesions[lesions > 0])] = 255
        cases.append((mask if number % 2 else None, np.array(points)))
    theirs = metrics.froc(cases, level=0, mpp_l0=100.0)
    assert worth.lesion_froc(slides, evidence) == pytest.approx(theirs.score, abs=0.01)


def test_probes_of_tumour_tiles_equal_slow_formulas():
    worth = load("encoder_worth")
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, 150)
    train, test = rng.normal(size=(150, 6)) + labels[:, None], rng.normal(size=(40, 6)) + 0.5
    given = torch.from_numpy(train).float(), labels, torch.from_numpy(test).float()
    shares = []
    for row in test:
        cosines = [other @ row / np.linalg.norm(other) / np.linalg.norm(row) for other in train]
        nearest = np.argsort(cosines)[::-1][:20]
        votes = [np.exp(cosines[k] / 0.07) for k in nearest]
        shares.append(sum(vote for vote, k in zip(votes, nearest, strict=True) if labels[k]) / sum(votes))
    np.testing.assert_allclose(worth.neighbour_scores(*given), shares, atol=1e-4)

    x, unseen = ((part - train.mean(axis=0)) / train.std(axis=0) for part in (train, test))

    def loss(weights: np.ndarray) -> float:
        logits = x @ weights[:6] + weights[6]
        # The two classes share the weight of this one: half of it each, with opposite signs.
        return float(np.mean(np.logaddexp(0, np.where(labels, -logits, logits))) + 0.01 / 4 * np.sum(weights[:6] ** 2))

    weights = minimize(loss, np.zeros(7), tol=1e-8).x
    np.testing.assert_allclose(worth.linear_scores(*given, strength=0.01), unseen @ weights[:6] + weights[6], atol=0.01)


SMALL = {"width": 16, "depth": 1, "heads": 2, "patch_px": 8, "batch": 8, "num_local": 1, "local_px": 16}
SMALL |= {"head_width": 16, "bottleneck": 8, "global_px": 32, "directions": 8, "warmup_steps": 1, "log_steps": 1}


def budget_arguments(tissue: Path, *more: str) -> list[str]:
    given = ["--data", str(tissue), "--steps", "1", "--budgets", "1", "2", "--seeds", "0", "1", "--device", "cpu"]
    given += [word for key, value in SMALL.items() for word in ("--set", f"{key}={value}")]
    given += ["--set", "global_scale=[0.9, 1.0]", "--set", "local_scale=[0.2, 0.3]", "--methods", "mean"]
    given += ["--slides", "20", "--test-slides", "8", "--slide-tiles", "12", "--lesion-tiles", "4", "--hosts", "1"]
    return [*given, *more]


@pytest.mark.slow
def test_the_budget_benchmark_runs_and_takes_up_where_it_stopped(tissue: Path, tmp_path: Path, capsys, monkeypatch):
    budget = load("pretrain_budget")
    runs: list[tuple[int, ...]] = []
    train = budget.train_snapshots

    def counted(source, settings, steps, device):
        runs.append(tuple(steps))
        return train(source, settings, steps, device)

    monkeypatch.setattr(budget, "train_snapshots", counted)
    given = budget_arguments(tissue, "--out", str(tmp_path / "runs.jsonl"), "--untrained")
    budget.main(given)
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert runs == [(1, 2)] * 2, "one run serves all budgets of a seed"
    assert set(result["budgets"]) == {"0", "1", "2"}
    assert {"knn20", "linear", "tile_auc_knn", "tile_auc_linear", "auc_mean", "froc_mean", "hits_mean"} == set(
        result["budgets"]["2"]
    )
    for mean, sd in result["budgets"]["2"].values():
        assert 0 <= mean <= 1
        assert sd >= 0
    lines = (tmp_path / "runs.jsonl").read_text()
    assert len(lines.splitlines()) == 6
    budget.main(given)
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == result
    assert (tmp_path / "runs.jsonl").read_text() == lines
    assert len(runs) == 2
    cosine = ["--set", 'schedule="cosine"', "--seeds", "0"]
    budget.main([*budget_arguments(tissue), *cosine])
    assert runs[2:] == [(1,), (2,)], "with a cosine every budget is a run of its own"


def protocol_arguments(tissue: Path, out: Path, *more: str) -> list[str]:
    own = ["--root", str(tissue.parent), "--sets", tissue.name, "--out", str(out), "--only", "preset", "rate 2.5e-4"]
    return [*own, *budget_arguments(tissue, *more)[2:]]


def test_the_protocol_does_the_most_telling_runs_first(tissue: Path, tmp_path: Path):
    protocol, budget = load("pretrain_protocol"), load("pretrain_budget")
    out = tmp_path / "runs.jsonl"
    own = protocol.parse(protocol_arguments(tissue, out, "--jobs", "2"))
    runs = protocol.runs_of(own)
    assert [(run.name, run.seed, run.budgets) for run in runs] == [
        ("preset", 0, (0, 1, 2)), ("preset", 1, (0, 1, 2)), ("rate 2.5e-4", 0, (1, 2)), ("rate 2.5e-4", 1, (1, 2)),
    ]  # fmt: skip
    assert [run.tiles() for run in runs] == [16] * 4, "one run serves all budgets"
    arguments = runs[0].arguments
    done = budget.key_of(arguments, 1, 0)
    out.write_text(json.dumps(done) + '\n{"data": "cut o')
    assert protocol.runs_of(own)[0].budgets == (0, 2)
    decayed = protocol.Run("x", (*runs[0].given, "--set", "decay_share=0.2"), 0, (1, 2))
    assert decayed.tiles() == 24, "each budget is a run of its own"
    larger = protocol.parse(protocol_arguments(tissue, out, "--steps", "6", "--only", "batch 512, rate x 2"))
    assert [run.arguments.steps for run in protocol.runs_of(larger)] == [1, 1], "as many tiles, not steps"

    estimate = protocol.Estimate("cpu", 2)
    guess = estimate.seconds(runs[0])
    assert guess == estimate.guess(runs[0]) > 3 * protocol.ASSESS_S["cpu"]
    estimate.add(runs[0], guess / 2)
    assert estimate.seconds(runs[0]) == pytest.approx(0.6 * guess)


@pytest.mark.slow
def test_the_protocol_runs_and_prints_its_table(tissue: Path, tmp_path: Path):
    out = tmp_path / "runs.jsonl"
    given = protocol_arguments(tissue, out, "--seeds", "0")

    def run(*more: str) -> list[str]:
        command = [sys.executable, str(FOLDER / "pretrain_protocol.py"), *given, *more]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()

    assert run("--minutes", "0.01")[-1] == '{"failed": 0, "left": 2}'
    assert not out.exists()
    assert run("--minutes", "60")[-1] == '{"failed": 0, "left": 0}'
    assert len(out.read_text().splitlines()) == 5
    assert run("--minutes", "60")[0].startswith("0 runs are left")
    rows = [line for line in run("--table") if line.startswith(f"| {tissue.name}")]
    assert [row.split(" | ")[1:4] for row in rows] == [
        ["untrained", "0", "1"], ["preset", "1", "1"], ["preset", "2", "1"], ["rate 2.5e-4", "1", "1"],
        ["rate 2.5e-4", "2", "1"],
    ]  # fmt: skip
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert f"{lines[1]['tile_auc_knn']:.3f}" in rows[1]


def test_a_budget_that_is_worse_than_half_of_it_is_listed():
    runs = [
        {"budget": budget, "knn20": 0.5 - 0.1 * budget, "auc_mean": auc + 0.01 * seed, "tile_auc_knn": 0.9}
        for seed in range(3)
        for budget, auc in ((0, 0.99), (1, 0.90), (2, 0.96), (4, 0.82), (8, 0.815))
    ]
    budget = load("pretrain_budget")
    summary = budget.summarize(runs)
    assert summary["falls"] == ["auc_mean at 4"]
    assert not summary["dependable"]
    assert budget.summarize([run for run in runs if run["budget"] < 4])["dependable"]
    assert "spearman" not in summary


def test_quality_is_ranked_against_every_measure():
    budget = load("pretrain_budget")
    runs = [
        {"budget": 2**k, "quality": k, "auc_mean": 0.5 + 0.1 * k, "tile_auc_knn": (0.9, 0.8, 0.85, 0.6)[k]}
        for k in range(4)
    ]
    assert budget.summarize(runs)["spearman"] == {"auc_mean": 1.0, "tile_auc_knn": -0.8}
    lines = [
        {"step": 0, "loss": 2.0, "quality": 0.1},
        {"step": 5, "loss": 1.0},
        {"step": 9, "loss": 0.5, "quality": 1.0},
    ]
    assert budget.facts_at(lines, 6) == {"loss": 1.0, "quality": 0.1}


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


def test_growth_is_the_slope_between_cohorts(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Planted powers of the number of slides; short stages and those of one size have no exponent."""
    scaling = load("scaling")
    paths: list[Path] = []
    for slides in (1000, 10, 100):  # in any order
        cpu_s = {"tile": 0.5 * slides, "compare": 0.01 * slides**1.5, "check": 0.0005 * slides, "synth": 0.0}
        told = {"slides": slides, "tiles": 8 * slides, "cpu_s": cpu_s, "seconds": cpu_s, "peak_mb": {"tile": 900}}
        paths.append(tmp_path / f"{slides}.json")
        paths[-1].write_text(json.dumps({"result": told}))
    scaling.main(["--measured", *map(str, paths)])
    result = json.loads(capsys.readouterr().out)
    assert [each["slides"] for each in result["cohorts"]] == [10, 100, 1000]
    found = result["exponent_seconds"]
    assert found == {"tile": [1, 1], "compare": [1.5, 1.5], "check": [None, None], "synth": [None, None]}
    assert result["exponent_mb"] == {"tile": [0, 0]}


@pytest.mark.slow
def test_too_few_slides_for_a_split_are_refused_with_a_message():
    end_to_end = load("end_to_end")
    with pytest.raises(SystemExit, match=r"^4 slides: .*patient"):
        end_to_end.main(["--slides", "4", "--size-px", "1024", "--workers", "0"])


def test_processor_time_counts_children_that_live_and_that_have_ended():
    end_to_end = load("end_to_end")
    burn = "import time\nwhile time.process_time() < 0.4: pass\nprint(flush=True)\ninput()"
    before = end_to_end.tree_cpu_s(os.getpid())
    child = subprocess.Popen([sys.executable, "-c", burn], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    alive = end_to_end.tree_cpu_s(os.getpid()) - before
    child.communicate(b"\n")
    ended = end_to_end.tree_cpu_s(os.getpid()) - before
    assert 0.35 < alive <= ended + 0.02
