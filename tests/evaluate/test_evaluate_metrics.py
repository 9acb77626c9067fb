"""Predictions and their metrics against slow loops, planted truths and published numbers; files of results."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from helpers import planted
from selfvitmil.errors import ArtefactError, MetricError
from selfvitmil.evaluate.comparison import compare_results, comparison_row, evaluated_on, write_results
from selfvitmil.evaluate.comparison_table import table_csv, table_markdown, table_notes
from selfvitmil.evaluate.dataset import make_splits
from selfvitmil.evaluate.method_metrics import (
    Estimator,
    are_disjoint,
    ensemble_gain,
    read_interval,
    samples_of,
    score_method,
    score_samples,
)
from selfvitmil.evaluate.predictions import Prediction, choose, read_predictions, write_predictions
from selfvitmil.evaluate.protocol import MethodResult, Run, run_method
from selfvitmil.settings import EvaluateSettings, TrainSettings
from selfvitmil.store.provenance import BUILT

EVALUATE = EvaluateSettings(bootstrap=200)
BINARY = ("normal", "tumor")


def prediction(slide: str, label: int, score: float | Sequence[float], **fields: Any) -> Prediction:
    scores = (float(score),) if isinstance(score, int | float) else tuple(map(float, score))
    decision = int(scores[0] >= 0.5) if len(scores) == 1 else int(np.argmax(scores))
    basis = Prediction(
        method="m", slide=slide, patient=slide, split="given", part="test", label=label, seed=None, score=scores,
        max=None, bag=None, calibrated=None, threshold=0.5 if len(scores) == 1 else None, threshold_from="fixed 0.5",
        decision=decision, protocol="honest",
    )  # fmt: skip
    return replace(basis, **fields)


def result_of(predictions: Sequence[Prediction], class_names: Sequence[str] = BINARY, **fields: Any) -> MethodResult:
    runs = sorted({(row.split, row.seed) for row in predictions if row.seed is not None})
    basis = MethodResult(
        method="m", aggregator="mean", class_names=tuple(class_names), predictions=tuple(predictions),
        runs=tuple(Run(split, seed, 1, BUILT, 1.5, (), {}, {}) for split, seed in runs),
        choices={}, protocol="honest", labels_opened="final scoring", encoder="vit", tiling="t", warnings=(),
    )  # fmt: skip
    return replace(basis, **fields)


def random_rows(seed: int, num: int = 30, **fields: Any) -> list[Prediction]:
    generator = np.random.default_rng(seed)
    labels = generator.permutation(np.arange(num) % 2)
    scores = 1 / (1 + np.exp(-(generator.normal(size=num) + labels)))
    return [prediction(f"s{k}", int(labels[k]), scores[k], **fields) for k in range(num)]


def slow_auc(rows: Sequence[Prediction]) -> float:
    pairs = [(a.score[0], b.score[0]) for a, b in product(rows, rows) if a.label == 1 and b.label == 0]
    return sum(1.0 if a > b else 0.5 if a == b else 0.0 for a, b in pairs) / len(pairs)


# ---------------------------------------------------------------------------------------------------- predictions.csv

numbers = st.floats(0, 1)


@st.composite
def tables(draw: st.DrawFn) -> tuple[list[Prediction], tuple[str, ...]]:
    names = draw(st.sampled_from([("normal", "tumor"), ("0", "1"), ("a", 'b, "quoted"', "c_d")]))
    width = 1 if len(names) == 2 else 3
    values = st.tuples(*[numbers] * width)
    text = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs", "Zl", "Zp")), min_size=1, max_size=8)
    rows = st.builds(
        Prediction,
        method=text, slide=text, patient=text, split=text, part=st.sampled_from(["val", "test"]),
        label=st.integers(0, len(names) - 1), seed=st.none() | st.integers(0, 9), score=values,
        max=st.none() | values, bag=st.none() | values, calibrated=st.none() | values,
        threshold=st.none() | numbers, threshold_from=text, decision=st.integers(0, len(names) - 1),
        protocol=st.sampled_from(["honest", "optimistic"]),
    )  # fmt: skip
    return draw(st.lists(rows, min_size=1, max_size=5)), names


@given(table=tables())
@hypothesis_settings(max_examples=40)
def test_predictions_read_back_bit_for_bit(tmp_path_factory: pytest.TempPathFactory, table: Any):
    rows, names = table
    path = tmp_path_factory.mktemp("csv") / "predictions.csv"
    write_predictions(path, rows, names)
    assert read_predictions(path) == (rows, names)


def test_columns_that_others_read(tmp_path: Path):
    path = tmp_path / "predictions.csv"
    row = prediction("s", 1, 0.75, patient="p", seed=3, max=(0.5,), bag=(1.0,), split="fold1")
    write_predictions(path, [row, replace(row, seed=None, max=None, bag=None)], BINARY)
    with path.open(newline="") as file:
        first, second = csv.DictReader(file)
    expected = {
        "method": "m", "slide": "s", "patient": "p", "split": "fold1", "part": "test", "label": "tumor", "seed": "3",
        "score": "0.75", "max": "0.5", "bag": "1.0", "calibrated": "", "threshold": "0.5",
        "threshold_from": "fixed 0.5", "decision": "tumor", "protocol": "honest", "negative": "normal",
        "positive": "tumor",
    }  # fmt: skip
    assert first == expected
    assert second == {**expected, "seed": "ensemble", "max": "", "bag": ""}


@pytest.mark.parametrize("damage", [b"", b"slide,score\ns,1\n", b"\xff\xfe", b"half"])
def test_damaged_tables_are_refused(tmp_path: Path, damage: bytes):
    path = tmp_path / "predictions.csv"
    write_predictions(path, random_rows(0, 4), BINARY)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) - 60] if damage == b"half" else damage)
    with pytest.raises(ArtefactError, match=r"predictions\.csv"):
        read_predictions(path)


# ---------------------------------------------------------------------------------------------------- one set


def test_binary_metrics_against_counting():
    rows = random_rows(1)
    told = score_samples(samples_of(rows), BINARY, EVALUATE)
    tp, fp, fn, tn = (
        sum(1 for row in rows if (row.label, int(row.score[0] >= 0.5)) == cell)
        for cell in ((1, 1), (0, 1), (1, 0), (0, 0))
    )
    assert told["confusion"] == [[tn, fp], [fn, tp]]
    assert told["auc"]["value"] == pytest.approx(slow_auc(rows), abs=1e-12)
    expected = {
        "accuracy": (tp + tn) / 30,
        "balanced_accuracy": (tp / (tp + fn) + tn / (tn + fp)) / 2,
        "f1": 2 * tp / (2 * tp + fp + fn),
        "sensitivity": tp / (tp + fn),
        "specificity": tn / (tn + fp),
        "ppv": tp / (tp + fp),
        "npv": tn / (tn + fn),
    }
    for name, value in expected.items():
        assert told[name]["value"] == pytest.approx(value, abs=1e-12)
        assert told[name]["low"] < value < told[name]["high"]
    assert told["brier"]["value"] == pytest.approx(np.mean([(row.score[0] - row.label) ** 2 for row in rows]))
    gaps = [0.0] * 10
    for row in rows:
        gaps[min(int(row.score[0] * 10), 9)] += row.score[0] - row.label
    assert told["ece"]["value"] == pytest.approx(sum(map(abs, gaps)) / 30)
    assert told["counts"] == {"normal": 15, "tumor": 15}
    assert (told["threshold"], told["threshold_from"], told["reasons"]) == (0.5, "fixed 0.5", {})
    assert sum(told["reliability"]["count"]) == 30


def test_pr_auc_against_walking_down_the_ranks():
    rows = [replace(row, score=(round(row.score[0], 1),)) for row in random_rows(2)]  # with ties
    area, recall = 0.0, 0.0
    for threshold in sorted({row.score[0] for row in rows}, reverse=True):
        called = [row.label for row in rows if row.score[0] >= threshold]
        area += (sum(called) / 15 - recall) * sum(called) / len(called)
        recall = sum(called) / 15
    told = score_samples(samples_of(rows), BINARY, EVALUATE)
    assert told["pr_auc"]["value"] == pytest.approx(area, abs=1e-12)


def test_multiclass_metrics_against_counting():
    generator = np.random.default_rng(3)
    labels = np.arange(45) % 3
    scores = generator.dirichlet([1, 1, 1], 45) + np.eye(3)[labels] * 0.4
    scores /= scores.sum(axis=1, keepdims=True)
    rows = [prediction(f"s{k}", int(labels[k]), scores[k].tolist()) for k in range(45)]
    told = score_samples(samples_of(rows), "abc", EVALUATE)
    called = scores.argmax(axis=1)
    assert told["accuracy"]["value"] == pytest.approx((called == labels).mean())
    assert told["confusion"] == [[int(((labels == t) & (called == c)).sum()) for c in range(3)] for t in range(3)]
    f1s, aucs = [], []
    for k, name in enumerate("abc"):
        one = told["per_class"][name]
        against = [replace(row, label=int(row.label == k), score=(row.score[k],)) for row in rows]
        aucs.append(slow_auc(against))
        hits, wrong = ((labels == k) & (called == k)).sum(), ((labels == k) ^ (called == k)).sum()
        f1s.append(2 * hits / (2 * hits + wrong))
        assert one["auc"]["value"] == pytest.approx(aucs[-1], abs=1e-12)
        assert one["f1"]["value"] == pytest.approx(f1s[-1])
        assert one["sensitivity"]["value"] == pytest.approx(hits / 15)
    assert told["auc"]["value"] == pytest.approx(np.mean(aucs))
    assert told["macro_f1"]["value"] == pytest.approx(np.mean(f1s))
    assert told["brier"]["value"] == pytest.approx(((scores - np.eye(3)[labels]) ** 2).sum(axis=1).mean())
    assert told["reasons"] == {}


def test_sigmoids_of_several_classes_are_normalized_for_brier_and_ece_alone():
    """One sigmoid per class, as DSMIL gives them, need not sum to 1."""
    generator = np.random.default_rng(13)
    labels = np.arange(30) % 3
    sigmoids = 1 / (1 + np.exp(-(generator.normal(size=(30, 3)) + 2 * np.eye(3)[labels] - 0.5)))
    sigmoids[7] = 0.0
    rows = [prediction(f"s{k}", int(labels[k]), sigmoids[k].tolist()) for k in range(30)]
    told = score_samples(samples_of(rows), "abc", EVALUATE)
    square, right, stated = 0.0, [], []
    for label, row in zip(labels, sigmoids.tolist(), strict=True):
        shares = [one / sum(row) for one in row] if sum(row) else [1 / 3] * 3
        square += sum((share - (k == label)) ** 2 for k, share in enumerate(shares)) / 30
        right.append(int(np.argmax(shares) == label))
        stated.append(max(shares))
    assert told["brier"]["value"] == pytest.approx(square)
    bins = np.minimum((np.array(stated) * 10).astype(int), 9)
    gaps = [abs((np.array(stated) - right)[bins == k].sum()) for k in range(10)]
    assert told["ece"]["value"] == pytest.approx(sum(gaps) / 30)
    assert "divided by their sum" in told["probabilities"]
    for k, name in enumerate("abc"):  # ranked by the sigmoids themselves
        against = [replace(row, label=int(row.label == k), score=(row.score[k],)) for row in rows]
        assert told["per_class"][name]["auc"]["value"] == pytest.approx(slow_auc(against))


def test_what_cannot_be_computed_is_null_with_a_reason_and_the_rest_stands():
    rows = [prediction(f"s{k}", 0, 0.1 * k) for k in range(4)]
    told = score_samples(samples_of(rows), BINARY, EVALUATE)
    for name in ("auc", "pr_auc", "sensitivity", "balanced_accuracy", "ppv", "f1"):
        assert told[name] is None
        assert told["reasons"][name]
    assert (told["accuracy"]["value"], told["specificity"]["value"]) == (1.0, 1.0)
    assert told["brier"]["value"] == pytest.approx(np.mean([(0.1 * k) ** 2 for k in range(4)]))
    three = [prediction(f"s{k}", k % 2, [0.5, 0.3, 0.2] if k % 2 == 0 else [0.3, 0.6, 0.1]) for k in range(6)]
    told = score_samples(samples_of(three), "abc", EVALUATE)
    assert told["auc"] is None
    assert "class 2" in told["reasons"]["auc"]
    assert told["per_class"]["a"]["auc"]["value"] == 1.0
    assert told["per_class"]["c"]["auc"] is None
    assert told["macro_f1"] is None
    assert told["accuracy"]["value"] == 1.0
    missing = [key for key, value in told.items() if value is None and key != "threshold"]
    assert set(missing) <= set(told["reasons"])


def test_calibrated_probabilities_are_judged_but_ranks_are_of_the_scores():
    rows = [replace(row, calibrated=(0.5,)) for row in random_rows(4)]
    told = score_samples(samples_of(rows), BINARY, EVALUATE)
    assert told["probabilities"] == "calibrated"
    assert told["brier"]["value"] == pytest.approx(0.25)
    assert told["auc"]["value"] == pytest.approx(slow_auc(rows))


# ---------------------------------------------------------------------------------------------------- patients


def test_patients_by_hand():
    rows = [
        prediction("a1", 0, 0.2, patient="a"),
        prediction("a2", 1, 0.7, patient="a"),
        prediction("b1", 0, 0.4, patient="b"),
        prediction("b2", 0, 0.1, patient="b"),
        prediction("c1", 0, 0.9, patient="c"),
    ]
    samples = samples_of(rows, level="patient")
    assert samples.names == ("a", "b", "c")
    assert samples.labels.tolist() == [1, 0, 0]
    assert samples.scores[:, 0].tolist() == [0.7, 0.4, 0.9]
    assert samples.decisions.tolist() == [1, 0, 1]
    scores = score_method(result_of([*rows, *(replace(row, seed=0) for row in rows)]), EVALUATE)
    assert scores.patient is not None
    assert scores.patient["ensemble"]["auc"]["value"] == 0.5
    assert scores.patient["ensemble"]["num"] == 3
    assert "largest score" in scores.patient["words"]


def test_patients_of_several_classes_have_the_mean_and_mixed_ones_are_named():
    rows = [
        prediction("a1", 1, [0.1, 0.6, 0.3], patient="a"),
        prediction("a2", 1, [0.5, 0.2, 0.3], patient="a"),
        prediction("b1", 0, [0.7, 0.2, 0.1], patient="b"),
        prediction("b2", 2, [0.1, 0.2, 0.7], patient="b"),
        prediction("c1", 2, [0.1, 0.2, 0.7], patient="c"),
    ]
    samples = samples_of(rows, level="patient")
    assert samples.names == ("a", "c")
    assert samples.left_out == ("b",)
    assert samples.scores[0] == pytest.approx([0.3, 0.4, 0.3])
    assert samples.decisions.tolist() == [1, 2]
    told = score_samples(samples, "abc", EVALUATE)
    assert told["left_out"]["patients"] == ["b"]
    nobody = samples_of(rows[2:4], level="patient")
    assert set(score_samples(nobody, "abc", EVALUATE)["reasons"]) >= {"auc", "accuracy", "brier"}


def test_patient_level_is_left_to_the_slides_where_they_are_the_same():
    rows = random_rows(5)
    scores = score_method(result_of([*rows, *(replace(row, seed=0) for row in rows)]), EVALUATE)
    assert scores.patient is None
    assert scores.to_json()["patient"]["same_as"] == "slide"


def test_slides_of_a_patient_widen_the_interval():
    rows = random_rows(6, 40)
    twice = [replace(row, slide=f"{row.slide}_{k}", patient=row.slide) for row in rows for k in range(2)]
    once, doubled = (score_samples(samples_of(some), BINARY, EVALUATE)["auc"] for some in (rows, twice))
    assert doubled["value"] == pytest.approx(once["value"])
    width = [told["high"] - told["low"] for told in (once, doubled)]
    assert width[1] == pytest.approx(width[0], rel=0.05)  # copies add nothing


# ---------------------------------------------------------------------------------------------------- seeds and splits


def several(splits: int = 1, seeds: int = 3, overlap: bool = False) -> list[Prediction]:
    rows = []
    for split in range(splits):
        for seed in [*range(seeds), None]:
            own = random_rows(100 * split + (99 if seed is None else seed), 20)
            base = 0 if overlap else 20 * split
            # the same truth for every seed
            rows += [
                replace(row, slide=f"s{base + k}", patient=f"s{base + k}", label=k % 2, split=f"fold{split}", seed=seed)
                for k, row in enumerate(own)
            ]
    return rows


def test_mean_and_sd_over_seeds_of_one_split():
    rows = several()
    slide = score_method(result_of(rows), EVALUATE).slide
    aucs = [slow_auc([row for row in rows if row.seed == seed]) for seed in range(3)]
    assert [slide["seeds"][str(seed)]["auc"]["value"] for seed in range(3)] == pytest.approx(aucs)
    assert slide["over_seeds"]["auc"] == {
        "mean": pytest.approx(np.mean(aucs)),
        "sd": pytest.approx(np.std(aucs, ddof=1)),
        "seeds": 3,
    }
    assert slide["ensemble"]["auc"]["value"] == pytest.approx(slow_auc([row for row in rows if row.seed is None]))
    assert slide["over_splits"] is None


def test_one_seed_has_no_spread():
    slide = score_method(result_of(several(seeds=1)), EVALUATE).slide
    assert slide["over_seeds"]["auc"]["sd"] is None
    assert slide["over_seeds"]["auc"]["seeds"] == 1


def with_offsets(rows: Sequence[Prediction], method: str = "m") -> list[Prediction]:
    """The same ranking within each split and seed; every split's model has an offset of its own."""
    offsets = {"fold0": -4.0, "fold1": 0.0, "fold2": 4.0}
    scores = [1 / (1 + math.exp(-(math.log(row.score[0] / (1 - row.score[0])) + offsets[row.split]))) for row in rows]
    return [replace(row, score=(score,), method=method) for row, score in zip(rows, scores, strict=True)]


def test_folds_are_ranked_one_by_one_and_decisions_counted_together():
    rows = several(splits=3)
    assert are_disjoint(rows)
    slide = score_method(result_of(rows), EVALUATE).slide
    pooled = [row for row in rows if row.seed is None]
    assert slide["ensemble"]["num"] == 60
    within = [
        [slow_auc([row for row in rows if (row.split, row.seed) == (f"fold{k}", seed)]) for k in range(3)]
        for seed in (0, 1, 2, None)
    ]
    assert slide["ensemble"]["auc"]["value"] == pytest.approx(np.mean(within[3]))  # folds are of equal size
    assert slide["estimator"] == Estimator.WITHIN_FOLDS
    assert slide["conditional_on"] == Estimator.WITHIN_FOLDS.conditional_on
    correct = np.mean([row.decision == row.label for row in pooled])
    assert slide["ensemble"]["accuracy"]["value"] == pytest.approx(correct)
    aucs = [slow_auc([row for row in pooled if row.split == f"fold{k}"]) for k in range(3)]
    assert slide["over_splits"]["auc"]["mean"] == pytest.approx(np.mean(aucs))
    assert slide["over_splits"]["auc"]["sd"] == pytest.approx(np.std(aucs, ddof=1))
    assert slide["over_seeds"]["auc"]["mean"] == pytest.approx(np.mean(within[:3]))
    assert set(slide["splits"]) == {"fold0", "fold1", "fold2"}


def test_offsets_of_the_folds_models_change_no_ranking_metric():
    rows = several(splits=3)
    moved = with_offsets(rows)
    assert slow_auc([row for row in moved if row.seed is None]) != pytest.approx(
        slow_auc([row for row in rows if row.seed is None]), abs=1e-3
    )
    for level in ("slide", "patient"):
        pairs = [[replace(row, patient=f"p{int(row.slide[1:]) // 2}") for row in some] for some in (rows, moved)]
        told = [score_method(result_of(some), EVALUATE).to_json()[level] for some in pairs]
        for name in ("auc", "pr_auc"):
            assert told[0]["ensemble"][name] == told[1]["ensemble"][name]
            assert told[0]["over_seeds"][name] == told[1]["over_seeds"][name]
    other = [replace(row, method="n", score=(1 - row.score[0],)) for row in rows]
    tests = [
        compare_results([result_of(some), result_of(other, method="n")], "m", EVALUATE)["n"] for some in (rows, moved)
    ]
    assert tests[0] == tests[1]
    assert tests[0].test == "paired DeLong test within folds"


def test_a_fold_of_one_class_is_named_and_takes_no_part_in_the_ranking():
    rows = [replace(row, label=0) if row.split == "fold2" else row for row in several(splits=3)]
    told = score_method(result_of(rows), EVALUATE).slide["ensemble"]
    kept = [slow_auc([row for row in rows if (row.split, row.seed) == (f"fold{k}", None)]) for k in range(2)]
    assert told["auc"]["value"] == pytest.approx(np.mean(kept))
    assert list(told["reasons"]) == ["auc and pr_auc of fold2"]
    assert told["num"] == 60
    assert sum(map(sum, told["confusion"])) == 60


def test_average_precision_of_folds_is_the_mean_over_all_positives():
    rows = [row for row in with_offsets(several(splits=3)) if row.seed is None]
    reached = [
        np.mean([other.label for other in rows if other.split == row.split and other.score >= row.score])
        for row in rows
        if row.label == 1
    ]
    assert score_samples(samples_of(rows), BINARY, EVALUATE)["pr_auc"]["value"] == pytest.approx(np.mean(reached))


def test_each_fold_decides_by_its_own_threshold():
    rows = []
    for split, threshold in (("fold0", 0.1), ("fold1", 0.8)):
        for k, score in enumerate((0.05, 0.2, 0.7, 0.9)):
            label = int(score >= threshold)
            fields = {"split": split, "threshold": threshold, "decision": label}
            rows += [prediction(f"{split}_{k}", label, score, seed=seed, **fields) for seed in (0, None)]
    slide = score_method(result_of(rows), EVALUATE).slide
    assert slide["ensemble"]["accuracy"]["value"] == 1.0
    assert slide["ensemble"]["threshold"] == [0.1, 0.8]


def test_slides_of_overlapping_test_sets_are_one_observation_each():
    rows = several(splits=3, overlap=True)
    assert not are_disjoint(rows)
    slide = score_method(result_of(rows), EVALUATE).slide
    whole = slide["ensemble"]
    assert slide["estimator"] == Estimator.WITHIN_OVERLAPPING_SPLITS
    assert whole["num"] == 20
    assert (whole["confusion"], whole["reliability"]) == (None, None)
    assert {"confusion", "reliability"} <= set(whole["reasons"])
    for name in ("accuracy", "sensitivity", "brier", "ece", "pr_auc"):
        parts = [own["ensemble"][name] for own in slide["splits"].values()]
        for key in whole[name].keys() & {"value", "low", "high"}:
            assert whole[name][key] == pytest.approx(np.mean([part[key] for part in parts]))
    aucs = [
        [slow_auc([row for row in rows if (row.split, row.seed) == (f"fold{k}", seed)]) for k in range(3)]
        for seed in (0, 1, 2)
    ]
    assert slide["over_seeds"]["auc"]["mean"] == pytest.approx(np.mean(aucs))
    assert slide["over_seeds"]["auc"]["sd"] == pytest.approx(np.std(np.mean(aucs, axis=1), ddof=1))
    row = comparison_row(result_of(rows), score_method(result_of(rows), EVALUATE), evaluated_on(result_of(rows), "c"))
    assert row.evaluated_on.estimator == Estimator.WITHIN_OVERLAPPING_SPLITS
    assert row.auc.low < row.auc.value < row.auc.high
    assert row.seed_aucs == pytest.approx(np.mean(aucs, axis=1))
    assert any(note == row.evaluated_on.estimator.conditional_on for note in table_notes([row]))


def test_the_same_test_set_three_times_is_as_certain_as_once():
    once = [replace(row, split="fold0") for row in several(splits=1, seeds=1)]
    copies = [replace(row, split=f"fold{k}") for row in once for k in range(3)]
    one, three = (score_method(result_of(rows), EVALUATE).slide["ensemble"] for rows in (once, copies))
    for name in ("auc", "accuracy", "balanced_accuracy", "f1"):
        for key in ("value", "low", "high"):
            assert three[name][key] == pytest.approx(one[name][key])
    tests = []
    for rows in (once, copies):
        other = [replace(row, method="n", score=(row.score[0] ** 2 * (1 + row.label),)) for row in rows]
        tests.append(compare_results([result_of(rows), result_of(other, method="n")], "m", EVALUATE)["n"])
    assert tests[0].p_value == pytest.approx(tests[1].p_value)
    assert tests[0].difference.low == pytest.approx(tests[1].difference.low)


def test_methods_of_different_folds_are_not_compared():
    rows = several(splits=2)
    swapped = [replace(row, split={"fold0": "fold1", "fold1": "fold0"}[row.split]) for row in rows]
    with pytest.raises(MetricError, match="same slides"):
        compare_results([result_of(rows), result_of(swapped, method="n")], "m", EVALUATE)


def test_a_seed_that_calls_nothing_positive_has_no_ppv_and_the_others_have():
    rows = [
        replace(row, decision=0) if row.seed == 1 else replace(row, decision=1)
        for row in several(splits=3, overlap=True)
    ]
    over = score_method(result_of(rows), EVALUATE).slide["over_seeds"]
    assert over["ppv"] == {"mean": 0.5, "sd": 0.0, "seeds": 2}  # half of all slides are positive
    assert over["npv"] == {"mean": 0.5, "sd": None, "seeds": 1}
    assert over["accuracy"]["seeds"] == 3


def test_a_slide_counts_once():
    rows = random_rows(7, 6)
    with pytest.raises(MetricError, match="s0: several predictions"):
        samples_of([*rows, *(replace(row, method="other") for row in rows)])
    with pytest.raises(MetricError):
        samples_of(several(splits=2, overlap=True), level="patient")
    assert len(samples_of(several(splits=2, overlap=True), split="fold1")) == 20


# ---------------------------------------------------------------------------------------------------- choices


def test_optimistic_words():
    labels, scores = [0, 0, 1, 1], [[0.1], [0.4], [0.35], [0.8]]
    settings = EvaluateSettings(calibration="platt")
    choice = choose(labels, scores, settings, "TEST (optimistic)")
    assert choice.threshold_from == "Youden on TEST (optimistic)"
    assert choice.calibration_from == "Platt scaling on TEST (optimistic)"
    json.dumps(choice.to_json())


# ---------------------------------------------------------------------------------------------------- files


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[MethodResult]:
    cases = planted.planted(tmp_path_factory.mktemp("files"), patients=8, slides_each=2, shift=3.0)
    train = TrainSettings(epochs=4, seeds=2, folds=2, validation=0.3, lr=0.02, device="cpu")
    evaluate = EvaluateSettings(bootstrap=200, calibration="platt")
    return [run_method(name, cases, make_splits(cases, train), train, evaluate) for name in ("mean", "dsmil")]


def test_results_folder_is_deterministic_and_says_what_made_it(results: list[MethodResult], tmp_path: Path):
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        write_results(folder, results, [score_method(result, EVALUATE) for result in results], EVALUATE)
    for name in ("predictions.csv", "metrics.json"):
        content = (folders[0] / name).read_bytes()
        assert content == (folders[1] / name).read_bytes()
        assert str(tmp_path).encode() not in content
    rows, names = read_predictions(folders[0] / "predictions.csv")
    assert rows == [row for result in results for row in result.predictions]
    assert names == BINARY
    text = (folders[0] / "metrics.json").read_text()
    assert "NaN" not in text
    assert "seconds" not in text
    told = json.loads(text)
    assert [method["method"] for method in told["methods"]] == ["mean", "dsmil"]
    for method in told["methods"]:
        assert method["seeds"] == [0, 1]
        assert method["protocol"] == "honest"
        assert method["test_labels_opened_for"] == "final scoring"
        assert (method["positive"], method["encoder"], method["tiling"]) == ("tumor", "vit", "0.5mpp_224px_0px")
        assert method["slides"]["fold0"]["test"] == {"slides": {"normal": 8, "tumor": 8}, "patients": 8}
        assert len(method["choices"]) == 6
        assert {choice["threshold_from"] for choice in method["choices"]} == {"Youden on validation"}
        assert method["slide"]["ensemble"]["num"] == 32
        assert method["patient"]["ensemble"]["num"] == 16


def test_metrics_of_read_predictions_are_those_of_the_result(results: list[MethodResult], tmp_path: Path):
    write_predictions(tmp_path / "predictions.csv", results[1].predictions, BINARY)
    rows, names = read_predictions(tmp_path / "predictions.csv")
    again = score_samples(samples_of(rows), names, EVALUATE)
    assert again == score_method(results[1], EVALUATE).slide["ensemble"]


def test_rows_of_the_comparison(results: list[MethodResult]):
    paired = compare_results(results, "mean", EVALUATE)
    assert set(paired) == {"dsmil"}
    on = evaluated_on(results[0], "made slides")
    assert on.counts == (("normal", 16), ("tumor", 16))
    scores = [score_method(result, EVALUATE) for result in results]
    rows = [comparison_row(result, own, on, paired=paired) for result, own in zip(results, scores, strict=True)]
    aucs = [own.slide["ensemble"]["auc"]["value"] for own in scores]
    assert [row.auc.value for row in rows] == aucs
    assert paired["dsmil"].difference.value == pytest.approx(aucs[1] - aucs[0])
    assert rows[1].seed_aucs == tuple(scores[1].slide["seeds"][str(k)]["auc"]["value"] for k in range(2))
    assert rows[0].threshold_from == "Youden on validation"
    assert rows[0].features == "vit"
    assert len(table_csv(rows).splitlines()) == 3
    assert "Youden on validation" in table_markdown(rows)
    assert math.isnan(read_interval(None).value)


# ---------------------------------------------------------------------------------------------------- published numbers

REFERENCE = {
    "pred_I": 0.8821,
    "pred_II": 0.7915,
    "pred_I_thres_07": 0.8978,
    "Method_II_noise_norm": 0.9839,
    "Method_II_noise_only": 0.9421,
    "Method_I": 0.9156,
}


@pytest.mark.parametrize(("column", "auc"), REFERENCE.items())
def test_published_scores_of_the_official_test_slides(shared: Path, column: str, auc: float):
    with (shared / "data" / "camelyon16" / "test_reference_scores.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    rows = [prediction(line["slide_name"], int(line["truth"]), float(line[column])) for line in table]
    told = score_samples(samples_of(rows), BINARY, EvaluateSettings())
    assert told["counts"] == {"normal": 80, "tumor": 49}
    assert round(told["auc"]["value"], 4) == auc
    assert told["auc"]["value"] == pytest.approx(slow_auc(rows), abs=1e-12)
    assert told["auc"]["low"] < auc < told["auc"]["high"]
    assert told["auc"]["agree"], told["auc"]["statement"]


# ---------------------------------------------------------------------------------------------------- ensemble


def test_gain_of_the_ensemble_is_its_auc_less_the_mean_of_the_seeds():
    truth = random_rows(0, num=60)
    generator = np.random.default_rng(1)
    of_seeds = {
        seed: [replace(row, seed=seed, score=(float(np.clip(row.score[0] + 0.3 * generator.normal(), 0, 1)),))
               for row in truth]
        for seed in range(4)
    }  # fmt: skip
    whole = [
        replace(row, seed=None, score=(float(np.mean([own[place].score[0] for own in of_seeds.values()])),))
        for place, row in enumerate(truth)
    ]
    result = result_of([*whole, *(row for own in of_seeds.values() for row in own)])
    gain = ensemble_gain(result, EVALUATE)
    assert gain is not None
    assert gain["value"] == pytest.approx(slow_auc(whole) - np.mean([slow_auc(own) for own in of_seeds.values()]))
    assert gain["low"] < gain["value"] < gain["high"]
    assert gain["value"] > 0
    assert score_method(result, EVALUATE).slide["ensemble_gain"] == gain
    alone = result_of([*whole, *of_seeds[0]])
    assert ensemble_gain(alone, EVALUATE) is None
