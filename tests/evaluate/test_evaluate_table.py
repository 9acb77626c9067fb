"""The comparison table: published numbers as in the paper, paired tests, and what a reader is told below the table."""

from __future__ import annotations

import csv
import io
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.comparisons import ON, YOUDEN, row
from selfvitmil import metrics
from selfvitmil.errors import MetricError
from selfvitmil.evaluate.comparison import PUBLISHED, ComparisonRow, holm, paired_rows
from selfvitmil.evaluate.comparison_table import read_table, table_cells, table_csv, table_markdown, table_notes
from selfvitmil.evaluate.method_metrics import Estimator
from selfvitmil.metrics import Interval, multiclass_auc, paired_auc_test

# ---------------------------------------------------------------------------------------------------- published


def test_published_rows_are_those_of_the_paper(shared: Path):
    (paper,) = (shared / "paper").glob("*.txt")
    text = paper.read_text(encoding="utf-8")
    rows = re.findall(
        r"^\s*([\w-]+)(?:\\text.*?)?[^&\n]*& (?:Single|Multiple) & ([^&]+)&([^\\]+)\\\\", text, re.MULTILINE
    )
    found = {
        name.lower().replace("fully-supervised", "fully supervised"): (accuracy.strip(" {}"), auc.strip())
        for name, accuracy, auc in rows
    }
    ours = {
        entry.name.lower(): ("-" if entry.accuracy is None else f"{entry.accuracy:.4f}", f"{entry.auc:.4f}")
        for entry in PUBLISHED.values()
    }
    assert len(ours) == 8
    assert ours == found


def test_published_rows_say_what_made_them():
    assert "9,894" in PUBLISHED["mil-rnn"].trained_on
    assert "optimistic" in PUBLISHED["self-vit-mil"].protocol
    assert "test slides" in PUBLISHED["dsmil"].protocol
    assert "SimCLR" in PUBLISHED["abmil"].features
    assert "ImageNet" in PUBLISHED["transmil"].features
    for entry in PUBLISHED.values():
        assert all((entry.features, entry.trained_on, entry.protocol, entry.source))
        # Accuracies of 129 slides are whole 129ths.
        assert entry.accuracy is None or any(round(k / 129, 4) == entry.accuracy for k in range(130))
    for method in ("mean", "max", "topk", "clam-sb", "abmil-gated", "mean-colour", "random-encoder", "probe"):
        assert method not in PUBLISHED


# ---------------------------------------------------------------------------------------------------- paired tests


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8), st.floats(0, 1))
def test_holm_rejects_what_the_step_down_procedure_rejects(p_values: list[float], level: float):
    rejected, rest = set(), set(range(len(p_values)))
    while rest:
        smallest = min(rest, key=lambda i: p_values[i])
        if p_values[smallest] * len(rest) > level:
            break
        rejected.add(smallest)
        rest.remove(smallest)
    corrected = holm(p_values)
    # At p values equal to the level both sides are right; ties among p values are rejected together or not at all.
    expected = {i for i in range(len(p_values)) if any(p_values[i] == p_values[j] for j in rejected)}
    if level < 1:
        assert {i for i, p in enumerate(corrected) if p <= level} in (rejected, expected)
    assert all(raw <= p <= 1 for raw, p in zip(p_values, corrected, strict=True))


def test_holm_by_hand():
    np.testing.assert_allclose(holm([0.04, 0.01, 0.03, 0.5]), [0.09, 0.04, 0.09, 0.5])
    assert holm([]) == ()


def binary_scores(num_slides: int = 40) -> tuple[dict[str, int], dict[str, dict[str, float]]]:
    rng = np.random.default_rng(5)
    slides = [f"s{i:02d}" for i in range(num_slides)]
    labels = rng.integers(0, 2, num_slides)
    shared_noise = rng.normal(0, 0.6, num_slides)
    scores = {
        method: dict(zip(slides, (gain * labels + shared_noise + rng.normal(0, 0.5, num_slides)).tolist(), strict=True))
        for method, gain in (("mean", 0.6), ("dsmil", 1.2), ("abmil", 0.8))
    }
    return dict(zip(slides, labels.tolist(), strict=True)), scores


def test_two_classes_are_tested_by_delong_and_by_the_bootstrap():
    labels, scores = binary_scores()
    patients = {slide: slide[:2] + str(int(slide[2]) // 2) for slide in labels}
    # The order in which a method's scores come must not matter.
    mixed = {method: dict(reversed(list(own.items()))) for method, own in scores.items()}
    rows = paired_rows(labels, mixed, "mean", patients=patients, resamples=300, seed=7)
    assert list(rows) == ["dsmil", "abmil"]
    names = list(labels)
    for method, paired in rows.items():
        expected = paired_auc_test(
            [labels[slide] for slide in names],
            [scores[method][slide] for slide in names],
            [scores["mean"][slide] for slide in names],
            groups=[patients[slide] for slide in names],
            resamples=300,
            seed=7,
        )
        assert paired.difference == expected.difference
        assert (paired.p_value, paired.bootstrap_p_value) == (expected.p_value, expected.bootstrap_p_value)
        assert (paired.baseline, paired.test, paired.num_comparisons) == ("mean", "paired DeLong test", 2)
    small, large = sorted(paired.p_value for paired in rows.values())
    assert sorted(paired.holm_p_value for paired in rows.values()) == [2 * small, max(2 * small, large)]
    # One-element sequences are what an aggregator of two classes gives.
    columns = {method: {slide: (score,) for slide, score in own.items()} for method, own in scores.items()}
    assert paired_rows(labels, columns, "mean", patients=patients, resamples=300, seed=7) == rows


def slow_macro(labels: np.ndarray, scores_NC: np.ndarray) -> float:
    parts = []
    for k in range(scores_NC.shape[1]):
        gap = scores_NC[labels == k, k][:, None] - scores_NC[labels != k, k][None, :]
        parts.append(((gap > 0) + 0.5 * (gap == 0)).mean())
    return float(np.mean(parts))


def test_several_classes_are_tested_by_the_bootstrap_of_the_macro_auc():
    rng = np.random.default_rng(8)
    labels = np.repeat([0, 1, 2], [12, 10, 8])
    noise = rng.normal(0, 1, (30, 3))
    arrays = {"mean": noise + 0.5 * np.eye(3)[labels], "same": noise + 0.5 * np.eye(3)[labels]}
    arrays["good"] = noise + rng.normal(0, 0.5, (30, 3)) + 2 * np.eye(3)[labels]
    named = {m: {f"s{i}": row.tolist() for i, row in enumerate(array)} for m, array in arrays.items()}
    rows = paired_rows({f"s{i}": int(k) for i, k in enumerate(labels)}, named, "mean", resamples=1000)
    good, same = rows["good"], rows["same"]
    value = slow_macro(labels, arrays["good"]) - slow_macro(labels, arrays["mean"])
    assert good.difference.value == pytest.approx(value, abs=1e-12)
    differences = []
    for _ in range(600):
        drawn = np.concatenate([rng.choice(np.flatnonzero(labels == k), (labels == k).sum()) for k in range(3)])
        differences.append(
            slow_macro(labels[drawn], arrays["good"][drawn]) - slow_macro(labels[drawn], arrays["mean"][drawn])
        )
    low, high = np.quantile(differences, [0.025, 0.975])
    assert (good.difference.low, good.difference.high) == pytest.approx((low, high), abs=0.02)
    assert good.p_value == good.bootstrap_p_value < 0.01
    assert good.test == "paired bootstrap of the macro AUC, 1000 resamples"
    assert (same.difference.value, same.p_value, same.holm_p_value) == (0, 1, 1)
    assert good.holm_p_value == 2 * good.p_value


def test_a_perfect_difference_names_its_test():
    labels = {f"s{i}": int(i > 2) for i in range(6)}
    scores = {"mean": {s: 1.0 - v for s, v in labels.items()}, "dsmil": {s: float(v) for s, v in labels.items()}}
    test = paired_rows(labels, scores, "mean", resamples=100)["dsmil"].test
    assert test == "z-test by limits of both added as squares (no variance for DeLong)"


def test_paired_test_refuses_different_slides():
    labels, scores = binary_scores()
    fewer = {**scores, "abmil": {slide: score for slide, score in scores["abmil"].items() if slide != "s07"}}
    with pytest.raises(MetricError, match=r"abmil: 1 of 40 slides have no score and 0 .*\(s07\).*same slides"):
        paired_rows(labels, fewer, "mean")
    other = {**scores, "dsmil": {slide.replace("s1", "t1"): score for slide, score in scores["dsmil"].items()}}
    with pytest.raises(MetricError, match=r"dsmil: 10 of 40 slides have no score and 10 .*\(s10, s11, s12 \.\.\.\)"):
        paired_rows(labels, other, "mean")
    with pytest.raises(MetricError, match="max: the baseline is not among the methods mean, dsmil, abmil"):
        paired_rows(labels, scores, "max")
    assert paired_rows(labels, {"mean": scores["mean"]}, "mean") == {}


# ---------------------------------------------------------------------------------------------------- rendering


def test_seeds_have_mean_and_sample_sd():
    made = row("dsmil", seed_aucs=(0.7, 0.8, 0.85, 0.9))
    mean = (0.7 + 0.8 + 0.85 + 0.9) / 4
    assert made.auc_mean == pytest.approx(mean)
    assert made.auc_sd == pytest.approx(math.sqrt(sum((x - mean) ** 2 for x in made.seed_aucs) / 3))
    assert math.isnan(row("dsmil", seed_aucs=(0.7,)).auc_sd)


def test_cells_round_and_keep_published_numbers_apart():
    rows = [
        row("dsmil", 0.81249),
        row("mean", 0.7, training_seconds=None, seed_aucs=(0.7,)),
        row("mil-rnn", 0.6, paired=replace(row("x").paired, p_value=0.0004, holm_p_value=1.0), training_seconds=7200.0),  # pyright: ignore
        row("max", sensitivity=Interval(math.nan, 0, 1, "Wilson"), training_seconds=601.0),
    ]
    header, *lines = table_cells(rows)
    named = [dict(zip(header, line, strict=True)) for line in lines]
    assert named[0] == {
        "method": "dsmil",
        "recipe": "-",
        "AUC [95 %]": "0.812 [0.712, 0.862]",
        "AUC\nof seeds": "0.810 ± 0.020",
        "seeds": "3",
        "acc.": "0.750",
        "bal.\nacc.": "0.740",
        "sens.": "0.700",
        "spec.": "0.780",
        "p": "0.012",
        "p\nHolm": "0.049",
        "training": "1.0 min",
        "published\nAUC": "0.8944",
        "published\nacc.": "0.8682",
        "notes": "1 3",
    }
    assert (named[1]["AUC\nof seeds"], named[1]["p"], named[1]["p\nHolm"], named[1]["training"]) == (
        "0.700",
        "-",
        "-",
        "-",
    )
    assert (named[1]["published\nAUC"], named[1]["published\nacc."]) == ("-", "-")
    assert (named[2]["p"], named[2]["p\nHolm"], named[2]["training"]) == ("<0.001", "1.000", "2.0 h")
    assert (named[2]["published\nAUC"], named[2]["published\nacc."]) == ("0.8990", "-")
    assert (named[3]["sens."], named[3]["training"]) == ("-", "10 min")


def test_cells_fit_160_columns():
    long = "a method with a name that nobody would give it"
    rows = [row("self-vit-mil", 0.9, display_name=long, warnings=("w1", "w2", f"w{k}")) for k in range(3, 12)]
    rows[0] = replace(rows[0], evaluated_on=ON, training_seconds=5999.0)
    cells = table_cells(rows)
    assert len({len(line) for line in cells}) == 1
    widths = [max(len(part) for line in cells for part in line[k].split("\n")) for k in range(len(cells[0]))]
    assert sum(widths) + 2 * (len(widths) - 1) <= 160
    assert cells[1][0].endswith("…")


def test_notes_tell_data_threshold_seeds_and_test_of_every_number():
    rows = [
        row("dsmil", warnings=("attention is uniform",)),
        row("mean"),
        row("max", warnings=("attention is uniform",), threshold_from="fixed at 0.5"),
        row("topk", auc=0.9, features="mean colour of the tile"),
    ]
    notes, cells = table_notes(rows), table_cells(rows)
    general = [note for note in notes if not note.startswith("[")]
    assert general[0] == "Measured on 80 normal + 49 tumor slides of demo (given test split)."
    assert any("mean probability of 3 seeds (95 % interval, DeLong on the logit scale)" in note for note in general)
    assert "p: paired DeLong test against mean, two-sided; 'Holm': corrected for 4 comparisons." in general
    assert "not comparable with numbers on demo" in general[-1]
    assert "not measured here" in general[-1]
    numbered = {note.split(" ")[0].strip("[]"): note for note in notes if note.startswith("[")}
    assert list(numbered) == [str(k) for k in range(1, len(numbered) + 1)]

    def told(line: list[str]) -> str:
        return " ".join(numbered[mark] for mark in line[-1].split(" "))

    dsmil, mean, most, top = (told(line) for line in cells[1:])
    assert "attention is uniform" in dsmil
    assert "Published DSMIL: features: ResNet18, SimCLR" in dsmil
    assert "attention is uniform" in most
    assert "attention" not in mean + top
    assert "threshold: fixed at 0.5" in most
    assert YOUDEN in mean
    assert "mean colour" in top
    assert "DINO" in mean


def test_what_is_said_of_published_numbers_depends_on_the_test_slides():
    official = replace(ON, cohort="Camelyon16", split="official test set", camelyon16_test=True)
    last = next(note for note in table_notes([row("dsmil", evaluated_on=official)]) if "not measured here" in note)
    assert "which are the test slides here too" in last
    assert "not comparable" not in last
    assert not any("ublished" in note for note in table_notes([row("mean")]))


def test_optimistic_is_written_on_the_table():
    rows = [row("dsmil", evaluated_on=replace(ON, protocol="optimistic"))]
    assert table_cells(rows)[0][0] == "method\nOPTIMISTIC"
    assert "| method OPTIMISTIC |" in table_markdown(rows)
    assert table_notes(rows)[0].startswith(
        "OPTIMISTIC: epoch, threshold and kind of evidence were chosen on the test set"
    )
    assert next(csv.DictReader(io.StringIO(table_csv(rows))))["protocol"] == "optimistic"
    assert "OPTIMISTIC" not in table_markdown([row("dsmil")])


@pytest.mark.parametrize("estimator", Estimator)
def test_the_table_says_what_intervals_and_p_values_are_conditional_on(estimator: Estimator):
    on = replace(ON, estimator=estimator)
    rows = [row("dsmil", evaluated_on=on), row("mean", evaluated_on=on)]
    assert table_notes(rows).count(estimator.conditional_on) == 1
    assert estimator.conditional_on in table_markdown(rows)
    for record in csv.DictReader(io.StringIO(table_csv(rows))):
        assert (record["estimator"], record["conditional_on"]) == (estimator, estimator.conditional_on)


def test_paired_tests_of_folds_are_within_folds():
    rng = np.random.default_rng(11)
    names = [f"s{i:02d}" for i in range(40)]
    labels = {name: i % 2 for i, name in enumerate(names)}
    folds = {name: f"fold{i // 10}" for i, name in enumerate(names)}
    offset = dict(zip(sorted(set(folds.values())), (-5.0, 0.0, 3.0, 9.0), strict=True))
    plain = {m: {name: rng.normal() + labels[name] for name in names} for m in ("a", "b")}
    moved = {"a": {name: score + offset[folds[name]] for name, score in plain["a"].items()}, "b": plain["b"]}
    found = [paired_rows(labels, scores, "b", folds=folds, resamples=200)["a"] for scores in (plain, moved)]
    assert found[0] == found[1]
    label, fold = np.array(list(labels.values())), np.array(list(folds.values()))
    a, b = (np.array(list(plain[m].values())) for m in ("a", "b"))
    parts = [[metrics.auc(label[fold == k], one[fold == k]) for k in set(fold)] for one in (a, b)]
    expected = np.mean(parts[0]) - np.mean(parts[1])
    assert found[0].difference.value == pytest.approx(expected)
    assert paired_rows(labels, moved, "b", resamples=200)["a"].difference.value != pytest.approx(expected, abs=0.01)
    several = {m: {name: [-score, score / 2, score] for name, score in own.items()} for m, own in plain.items()}
    three = {name: i % 3 for i, name in enumerate(names)}
    test = paired_rows(three, several, "b", folds=folds, resamples=200)["a"]
    values = [multiclass_auc(list(three.values()), list(several[m].values()), folds=fold).macro.value for m in "ab"]
    assert test.difference.value == pytest.approx(values[0] - values[1])


def test_csv_reads_back():
    rows = [row("self-vit-mil", 0.8765432), row("mean", warnings=("a", 'b "c", d'))]
    first, second = csv.DictReader(io.StringIO(table_csv(rows)))
    assert float(first["auc"]) == pytest.approx(0.8765432, rel=1e-5)
    assert float(first["auc_low"]) == pytest.approx(0.7765432, rel=1e-5)
    assert first["seed_aucs"] == "0.79;0.81;0.83"
    assert (first["num_seeds"], first["threshold_from"], first["test_slides"]) == ("3", YOUDEN, "normal=80;tumor=49")
    assert (first["published_auc"], first["published_accuracy"]) == ("0.9426", "0.9147")
    assert first["published_on_these_slides"] == "no"
    assert (first["p_value"], first["p_value_holm"], first["bootstrap_p_value"]) == ("0.01234", "0.0491", "0.0005")
    assert (first["baseline"], first["test_against_baseline"]) == ("mean", "paired DeLong test")
    assert (second["published_auc"], second["p_value"], second["warnings"]) == ("", "", 'a; b "c", d')
    assert None not in first


@pytest.mark.parametrize("method", ["dsmil", "mean", "abmil"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"warnings": ("a", 'b "c", d'), "evidence": ("few tiles (1; 2)", "many"), "transductive": True},
        {"recipe": "ours", "recipe_words": "ours: lr 0.1 (published 0.2); x", "training_seconds": None},
        {"evaluated_on": replace(ON, counts=(("a=b;c", 5), ("tumor", 6)), protocol="optimistic")},
        {"evaluated_on": replace(ON, counts=(("a", 5), ("b", 6), ("c", 7)), estimator=Estimator.WITHIN_FOLDS)},
        {"sensitivity": None, "specificity": None, "seed_aucs": (0.8,)},
        {"evaluated_on": replace(ON, camelyon16_test=True)},
    ],
)
def test_rows_are_read_back_from_the_csv(method: str, changes: dict[str, Any]):
    rows = [row(method, **changes), row("mean", **changes), row("topk", **changes)]
    found = read_table(table_csv(rows))
    assert [table_cells(found, intervals=True), table_notes(found)] == [
        table_cells(comparisons_of(rows), intervals=True),
        table_notes(comparisons_of(rows)),
    ]
    assert [each.method for each in found] == [each.method for each in rows]
    assert table_csv(found) == table_csv(rows)


def comparisons_of(rows: list[ComparisonRow]) -> list[ComparisonRow]:
    """The rows with the number of comparisons that their table has."""
    number = sum(each.paired is not None for each in rows)
    return [
        each if each.paired is None else replace(each, paired=replace(each.paired, num_comparisons=number))
        for each in rows
    ]


def test_markdown_is_one_table_whatever_the_names():
    rows = [row("dsmil", display_name="a|b\\c\nd"), row("mean")]
    table, notes = table_markdown(rows).split("\n\n")
    lines = table.split("\n")
    assert len(lines) == 4
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines} == {16}
    assert "| a\\|b\\\\c d |" in lines[2]
    assert "0.750 [0.650, 0.800]" in lines[2]
    assert [line.removeprefix("- ") for line in notes.rstrip("\n").split("\n")] == table_notes(rows)


def test_several_classes():
    on = replace(ON, counts=(("a", 5), ("b", 6), ("c", 7)))
    rows = [row("mean", evaluated_on=on, sensitivity=None, specificity=None)]
    header, line = table_cells(rows)
    assert header[1:4] == ["recipe", "macro AUC [95 %]", "macro AUC\nof seeds"]
    assert line[7:9] == ["-", "-"]
    assert "5 a + 6 b + 7 c slides" in table_notes(rows)[0]
    assert "macro_auc" in table_csv(rows).split("\n")[0].split(",")


def test_rows_judged_otherwise_do_not_stand_in_one_table():
    for render in (table_cells, table_csv, table_markdown, table_notes):
        with pytest.raises(MetricError, match="dsmil and max have different test sets"):
            render([row("dsmil"), row("max", evaluated_on=replace(ON, protocol="optimistic"))])
        with pytest.raises(MetricError, match="without rows"):
            render([])
