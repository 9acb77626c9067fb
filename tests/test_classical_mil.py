"""`benchmarks/classical_mil.py`: what it reads and refuses, and that only the marked rows look at the answers."""

from __future__ import annotations

import importlib.util
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "classical_mil.py"
GOOD = "1,7,0.5,2\n0,3,1,2\n1,7,0.25,-1\n0,4,1,1\n1,8,0,0\n"


@pytest.fixture(scope="module")
def classical() -> ModuleType:
    spec = importlib.util.spec_from_file_location("classical_mil", SCRIPT)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def made_set(path: Path, num_bags: int, shift: float, seed: int = 0) -> Path:
    """Bags of 1 to 4 instances; one instance of a positive bag is shifted, by 0 for labels that mean nothing."""
    rng = np.random.default_rng(seed)
    rows = []
    for bag in range(num_bags):
        instances = rng.normal(size=(int(rng.integers(1, 5)), 4))
        instances[0] += shift * (bag % 2)
        rows += [",".join([str(bag % 2), str(bag), *map(str, each)]) for each in instances.tolist()]
    path.write_text("\n".join(rows))
    return path


def test_rows_of_a_bag_come_together_in_the_order_of_the_file(classical: ModuleType, tmp_path: Path):
    (tmp_path / "a.csv").write_text(GOOD)
    bags = classical.read_set(tmp_path / "a.csv")
    assert [(each.slide, each.label) for each in bags] == [("7", 1), ("3", 0), ("4", 0), ("8", 1)]
    assert [len(each.bag) for each in bags] == [2, 1, 1, 1]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "0 rows"),
        ("label,bag,a,b\n" + GOOD, "no header"),
        (GOOD.replace("0.25", "nan"), "row 3 holds"),
        (GOOD.replace("0.25", "1e60"), "row 3 holds"),
        (GOOD.replace("0.25", ""), "no header"),
        (GOOD + "1,9,0\n", "no header"),
        ("1,1\n0,2\n", "2 rows of 2 columns"),
        (GOOD.replace("1,7,0.25", "0,7,0.25"), "bag 7 has labels [0.0, 1.0]"),
        (GOOD.replace("1,8", "2,8"), "bag 8 has labels [2.0]"),
        ("1,1,0\n1,2,0\n1,3,0\n", "0 bags of one label"),
        ("1,1,0\n1,2,0\n0,3,0\n", "1 bags of one label"),
    ],
)
def test_files_of_another_form_are_refused_by_name(classical: ModuleType, tmp_path: Path, text: str, told: str):
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(SystemExit) as caught:
        classical.read_set(tmp_path / "a.csv")
    assert str(caught.value).startswith("a.csv: ")
    assert told in str(caught.value)


def test_parts_hold_both_labels(classical: ModuleType):
    labels = [0] * 13 + [1] * 10
    part_of = classical.stratified_parts(labels, 10, np.random.default_rng(0))
    for part in range(10):
        assert {label for label, other in zip(labels, part_of, strict=True) if other == part} == {0, 1}


def test_optimistic_takes_the_best_epoch_at_the_best_threshold(classical: ModuleType):
    rng = np.random.default_rng(0)
    labels = np.array([0, 1] * 5)
    for _ in range(50):
        by_epoch = rng.random((4, 10)).round(1)
        fold = classical.best_on_test(labels, np.arange(10), list(by_epoch))
        # Both labels are equally frequent, so that Youden's threshold is the one of most right decisions.
        most = max(
            int(((each >= cut) == (labels == 1)).sum()) for each in by_epoch for cut in [*np.unique(each).tolist(), 2.0]
        )
        assert int((fold.positive == (labels == 1)).sum()) == most
        assert any(np.array_equal(fold.probabilities, each) for each in by_epoch)


def test_accuracy_is_over_bags_and_auc_over_folds(classical: ModuleType):
    labels = np.array([0, 1, 0, 1, 0])
    scores = np.array([0.1, 0.2, 0.9, 0.95, 0.4])
    folds = [
        classical.Fold(places, scores[places], scores[places] >= 0.5) for places in (np.arange(2), np.arange(2, 5))
    ]
    found = classical.summary(labels, [folds])
    assert (found["accuracy"], found["auc"], found["accuracy_sd"]) == (0.6, 1.0, None)


def test_repeats_of_the_same_folds_do_not_narrow_the_interval(classical: ModuleType):
    rng = np.random.default_rng(0)
    labels = np.tile([0, 1], 20)
    scores = rng.normal(size=40) + labels
    folds = [classical.Fold(places, scores[places], scores[places] >= 0.5) for places in np.split(np.arange(40), 4)]
    once, often = (classical.summary(labels, [folds] * number)["auc_interval"] for number in (1, 6))
    assert often == pytest.approx(once)


def test_labels_that_mean_nothing_are_learned_by_the_optimistic_row_alone(
    classical: ModuleType, tmp_path: Path, monkeypatch
):
    monkeypatch.setattr(classical, "FOR_ALL", {"epochs": 8, "warmup_epochs": 1, "device": "cpu"})
    bags = classical.read_set(made_set(tmp_path / "made.csv", 24, 0.0))
    labels = np.array([each.label for each in bags])
    accuracy = {}
    for row in ("dsmil", "dsmil:optimistic"):
        folds = [classical.run_fold(bags, row, 0, fold, 3) for fold in range(3)]
        accuracy[row] = classical.summary(labels, [folds])["accuracy"]
    assert abs(accuracy["dsmil"] - 0.5) < 0.2  # two standard errors
    assert accuracy["dsmil:optimistic"] > accuracy["dsmil"] + 0.1


def test_rows_are_marked_and_the_last_line_is_json(classical: ModuleType, tmp_path: Path, monkeypatch, capsys):
    made_set(tmp_path / "musk1.csv", 8, 3.0)
    monkeypatch.setattr(classical, "ProcessPoolExecutor", lambda *_: ThreadPoolExecutor(1))  # spares a start of torch
    rows = ["dsmil", "dsmil:optimistic"]
    monkeypatch.setattr(
        sys, "argv", ["classical_mil.py", str(tmp_path), "--repeats=1", "--folds=2", "--methods", *rows]
    )
    classical.main()
    *_, honest, optimistic, last = capsys.readouterr().out.splitlines()
    assert "OPTIMISTIC" not in honest
    assert "published 0.932, whose code chooses on test folds, not verified" in honest
    assert "OPTIMISTIC: epoch and threshold chosen on the test folds" in optimistic
    found = json.loads(last)["musk1"]
    assert {row: each["protocol"] for row, each in found.items()} == dict(
        zip(rows, ("honest", "optimistic"), strict=True)
    )
    assert {"accuracy", "accuracy_sd", "accuracy_interval", "auc", "auc_sd", "auc_interval"} < set(found["dsmil"])


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "no csv file"),
        (["--methods", "dsmill"], "did you mean 'dsmil'"),
        (["--methods", "dsmil:hopeful"], "dsmil:optimistic"),
        (["--repeats", "0"], "at least 1"),
    ],
)
def test_what_cannot_be_run_is_told(classical: ModuleType, tmp_path: Path, monkeypatch, capsys, arguments, told: str):
    monkeypatch.setattr(sys, "argv", ["classical_mil.py", str(tmp_path), *arguments])
    with pytest.raises(SystemExit) as caught:
        classical.main()
    assert told in f"{caught.value} {capsys.readouterr().err}"
