"""The first screen of the report: its numbers, its words, its three slides."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.heatmaps import PREDICTION, make_heatmap
from helpers.report_study import EVALUATE, GONE, MODEL, NASTY, WRONG, plant, predictions, result
from selfvitmil.aggregate import NAMES
from selfvitmil.cohort import SlideRow, make_cohort, write_cohort
from selfvitmil.evaluate.comparison import COLOR_ROW, UNTRAINED_ROW, comparison_row, evaluated_on, write_results
from selfvitmil.evaluate.comparison_table import table_csv
from selfvitmil.evaluate.method_metrics import score_method
from selfvitmil.pseudonyms import Names
from selfvitmil.report import read_report_data
from selfvitmil.report.answer import (
    SIMPLE_BASELINES,
    ZOOM_TILES,
    AnswerData,
    axis_limits,
    certainty,
    choose_examples,
    zoomed_box,
)
from selfvitmil.report.render import DEFINITIONS, definition_id, definition_of
from selfvitmil.report.results import METRICS
from selfvitmil.report.slide_sections import Decision, error_words
from selfvitmil.settings import StudySettings
from selfvitmil.store.files import write_text


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plant(tmp_path_factory.mktemp("planted") / "study")


def answer_of(study: Path) -> AnswerData:
    return read_report_data(study, StudySettings(), most_slides=0).answer


def write_scores(
    study: Path, scores: dict[str, list[float]], labels: list[int], protocol: Any = "honest", **changes: Any
) -> None:
    """A comparison of methods on the same test slides."""
    results = []
    for method, values in scores.items():
        rows = [
            replace(
                row, method=method, slide=f"s{k}", patient=f"p{k}", label=labels[k], score=(value,), seed=seed,
                decision=int(value >= 0.5), protocol=protocol,
            )
            for seed in (0, None)
            for k, (row, value) in enumerate(zip(itertools.cycle(predictions(seed)[:1]), values, strict=False))
        ]  # fmt: skip
        results.append(result(method=method, predictions=tuple(rows), warnings=(), protocol=protocol, **changes))
    scored = [score_method(one, EVALUATE) for one in results]
    folder = study / "results" / "compare"
    write_results(folder, results, scored, EVALUATE)
    rows = [comparison_row(one, own, evaluated_on(one, "c")) for one, own in zip(results, scored, strict=True)]
    write_text(folder / "table.csv", table_csv(rows))


def pairs_won(labels: list[int], scores: list[float]) -> float:
    """The AUC by counting pairs."""
    won = [
        (positive > negative) + 0.5 * (positive == negative)
        for (positive, a), (negative, b) in itertools.product(zip(scores, labels, strict=True), repeat=2)
        if (a, b) == (1, 0)
    ]
    return float(np.mean(won))


# ---------------------------------------------------------------------------------------------------- numbers


def test_answer_has_the_numbers_of_the_main_method(study: Path):
    answer = answer_of(study)
    labels, scores = [1, 0, 1], [0.9, 0.2, 0.3]
    assert answer.question == "Can tumor slides be separated from normal slides?"
    assert (answer.metric, answer.value) == ("AUC", f"{pairs_won(labels, scores):.3f}")
    assert "4 slides of 4 patients (1 normal, 3 tumor)" in answer.basis
    assert "Tested on 3 slides of 3 patients (1 normal, 2 tumor) that no model was trained on." in answer.basis
    sensitivity, specificity = answer.sayings  # at 0.5 one of two positives and the only negative are right
    assert sensitivity.sentence.startswith("Of 100 tumor slides about 50 would be found (95 % CI ")
    assert specificity.sentence.startswith("Of 100 normal slides about 100 would be called normal (95 % CI ")
    assert answer.threshold == "Threshold 0.50, Youden on validation."
    assert any("Few test slides (1 normal, 2 tumor)" in text for text in answer.limitations)


def test_long_warnings_are_short_on_the_first_screen(tmp_path: Path):
    long = (
        "the critical tile is unstable, so its position is not reliable evidence. Try a lower learning rate, (1 of 3)"
    )
    one = result(warnings=(long,))
    write_results(tmp_path / "results" / MODEL, [one], [score_method(one, EVALUATE)], EVALUATE)
    said = answer_of(tmp_path).limitations[-1]
    assert said == "The critical tile is unstable, so its position is not reliable evidence."


def test_margin_is_the_difference_of_areas_on_the_same_slides(tmp_path: Path):
    rng = np.random.default_rng(1)
    labels = [0] * 40 + [1] * 40
    good = [float(value) for value in np.clip(rng.normal(0.25 + 0.5 * np.array(labels), 0.15), 0.01, 0.99)]
    poor = [float(value) for value in rng.uniform(0, 1, 80)]
    middling = [0.5 * (a + b) for a, b in zip(good, poor, strict=True)]
    write_scores(tmp_path, {"self-vit-mil": good, "mean": poor, "max": middling, "abmil": good}, labels)
    answer = answer_of(tmp_path)
    found = re.match(r"(0\.\d+) above the best simple baseline, max pooling with AUC (0\.\d+) \(95 % CI", answer.margin)
    assert found is not None
    areas = [pairs_won(labels, scores) for scores in (good, middling)]
    assert float(found.group(2)) == pytest.approx(areas[1], abs=6e-4)
    assert float(found.group(1)) == pytest.approx(areas[0] - areas[1], abs=6e-4)
    assert answer.picture is not None
    assert [bar.name for bar in answer.picture.bars] == ["self-vit-mil", "mean pooling", "max pooling"]
    assert [bar.is_main for bar in answer.picture.bars] == [True, False, False]
    for bar, scores in zip(answer.picture.bars, (good, poor, middling), strict=True):
        first, last = (0.0, 1.0) if answer.picture.ticks[0] == "0" else (0.5, 1.0)
        assert first + (last - first) * bar.at / 100 == pytest.approx(pairs_won(labels, scores), abs=2e-3)
        assert bar.low <= bar.at <= bar.high


def test_a_method_no_better_than_a_baseline_is_not_praised(tmp_path: Path):
    rng = np.random.default_rng(2)
    labels = [0, 1] * 15
    one, other = ([float(value) for value in rng.uniform(0, 1, 30)] for _ in range(2))
    write_scores(tmp_path, {"self-vit-mil": one, "mean": other}, labels)
    assert answer_of(tmp_path).margin.startswith("Not shown to be better than the best simple baseline, mean pooling")


def test_study_without_a_comparison_says_so(study: Path, tmp_path: Path):
    one = result()
    write_results(tmp_path / "results" / MODEL, [one], [score_method(one, EVALUATE)], EVALUATE)
    assert answer_of(tmp_path).margin == "Not compared with simple baselines yet: run selfvitmil compare."


def test_honest_results_come_before_optimistic_ones(tmp_path: Path):
    labels, scores = [0, 1, 0, 1, 1], [0.1, 0.9, 0.6, 0.4, 0.8]
    write_scores(tmp_path, {"self-vit-mil": scores}, labels)
    (tmp_path / "results" / "compare").rename(tmp_path / "results" / "z_honest")
    write_scores(tmp_path, {"self-vit-mil": [0.1, 0.9, 0.2, 0.8, 0.8]}, labels, protocol="optimistic")
    answer = answer_of(tmp_path)
    assert answer.value == f"{pairs_won(labels, scores):.3f}"
    assert not any("Optimistic" in text for text in answer.limitations)


def test_several_classes_are_answered_by_class(tmp_path: Path):
    rng = np.random.default_rng(0)
    rows = []
    for seed in (0, None):
        for k in range(30):
            score = rng.dirichlet(1 + 6 * np.eye(3)[k % 3])
            own = replace(predictions(seed)[0], slide=f"s{k}", patient=f"p{k}", label=k % 3, seed=seed)
            rows.append(replace(own, score=tuple(score), decision=int(score.argmax()), threshold=None))
    one = result(class_names=("a", "b", "c"), predictions=tuple(rows), warnings=())
    write_results(tmp_path / "results" / "three", [one], [score_method(one, EVALUATE)], EVALUATE)
    answer = answer_of(tmp_path)
    assert answer.metric == "macro AUC"
    assert answer.question == "Can slides of a, b and c be separated?"
    assert answer.sayings[0].sentence.startswith("Of 100 slides of each class about ")
    told = [row for row in rows if row.seed is None]
    found = {name: np.mean([row.decision == k for row in told if row.label == k]) for k, name in enumerate("abc")}
    worst = min(found, key=lambda name: found[name])
    assert answer.sayings[1].sentence.startswith(f"Most often missed: {worst}; of 100 about {100 * found[worst]:.0f} ")


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({}, "does not name sites"),
        ({"site": ("A", "A")}, "All slides are of one site (A)"),
        ({"Site": ("A", "B")}, "Every Site of the test slides has training slides too"),
        ({"site": ("B", "C")}, ""),
    ],
)
def test_what_is_known_of_other_sites_is_told(tmp_path: Path, columns: dict[str, tuple[str, str]], words: str):
    """The first value is of the test slide, both are of training slides but for the last case."""
    rows = []
    for k in range(4):
        split = "test" if k == 0 else "train"
        extra = tuple(
            (name, values[0] if k == 0 else values[-1] if k % 2 else values[0]) for name, values in columns.items()
        )
        if words == "" and k:
            extra = tuple((name, values[1]) for name, values in columns.items())
        rows.append(SlideRow(f"s{k}", tmp_path / f"s{k}.svs", "ab"[k % 2], f"p{k}", split, extra=extra))
    write_cohort(tmp_path / "cohort.csv", make_cohort(rows))
    write_scores(tmp_path, {"self-vit-mil": [0.1, 0.9, 0.6, 0.4]}, [0, 1, 0, 1])
    told = [text for text in answer_of(tmp_path).limitations if "site" in text.lower()]
    assert (words in told[0]) if words else told == []


# ---------------------------------------------------------------------------------------------------- slides


def decided(probability: float, label: str, part: str = "test") -> Decision:
    return Decision(probability, "tumor", "tumor" if probability >= 0.4 else "normal", part, label)


def predicted(probability: float) -> Any:
    return replace(PREDICTION, probability=(probability,), decision="tumor" if probability >= 0.4 else "normal")


def test_examples_are_the_surest_hit_the_nearest_case_and_the_surest_error():
    told = {
        "sure": (0.95, "tumor"), "hit": (0.7, "tumor"), "near": (0.45, "tumor"), "false alarm": (0.8, "normal"),
        "missed": (0.3, "tumor"), "negative": (0.05, "normal"),
    }  # fmt: skip
    decisions = {slide: decided(*own) for slide, own in told.items()}
    found = {slide: predicted(own[0]) for slide, own in told.items()}
    chosen = choose_examples(found, decisions, Names())
    assert list(chosen.items()) == [("hit", "sure"), ("borderline", "near"), ("error", "false alarm")]
    training = {**decisions, "better": decided(0.99, "tumor", "train")}
    assert choose_examples({**found, "better": predicted(0.99)}, training, Names()) == chosen
    right = {slide: own for slide, own in decisions.items() if own.is_correct}
    assert "error" not in choose_examples(found, right, Names())


def test_certainty_is_the_distance_from_the_decision():
    assert certainty(predicted(0.9)) == pytest.approx(0.5)
    assert certainty(replace(PREDICTION, probability=(0.2, 0.5, 0.3), threshold=None)) == pytest.approx(0.2)


def test_enlarged_region_holds_the_highest_tile_and_lies_in_the_slide():
    for seed in range(8):
        heatmap = make_heatmap(20, 15, (seed * 2, seed, 1, 1), seed=seed)
        box = zoomed_box(heatmap)
        assert box is not None
        x0, y0, x1, y1 = box
        x, y = heatmap.coords_l0[int(heatmap.score.argmax())]
        extent = heatmap.frame.extent_l0
        assert x0 <= x
        assert x + extent <= x1
        assert y0 <= y
        assert y + extent <= y1
        assert (x1 - x0, y1 - y0) == (ZOOM_TILES * extent, ZOOM_TILES * extent)
        assert min(x0, y0) >= 0
        assert x1 <= heatmap.frame.size_l0[0]
        assert y1 <= heatmap.frame.size_l0[1]
    assert zoomed_box(replace(make_heatmap(), score=np.zeros(108, np.float32))) is None


def test_first_screen_shows_a_hit_a_borderline_case_and_an_error(study: Path):
    answer = answer_of(study)
    assert [(one.title, one.slide) for one in answer.heatmaps] == [
        ("A clear hit", NASTY),
        ("A borderline case", GONE),
        ("The worst error", WRONG),
    ]
    assert answer.heatmaps[0].zoom is not None  # the only slide whose file is there
    assert answer.heatmaps[0].words.startswith("Predicted tumor, ground truth tumor; probability of tumor 0.90")


def test_wrong_slides_tell_what_is_known_of_the_reason():
    heatmap = make_heatmap(4, 4, (1, 1, 1, 1), prediction=predicted(0.35))
    inside = np.zeros(16, np.float32)
    inside[5] = 0.8  # the tile at column 1, row 1, which scores highest
    told = error_words(replace(heatmap, annotated=inside), decided(0.35, "tumor"))
    assert told[0] == "The probability of tumor is 0.05 below the threshold: a borderline case."
    assert told[1] == "Annotated tumour touches only 1 of 16 tiles."
    assert "noticed" in told[2]
    elsewhere = error_words(replace(heatmap, annotated=np.roll(inside, 3)), decided(0.35, "tumor"))
    assert "looked elsewhere" in elsewhere[2]
    assert error_words(heatmap, decided(0.35, "normal")) == ()


# ---------------------------------------------------------------------------------------------------- parts


@pytest.mark.parametrize(
    ("metric", "least", "most", "ends"),
    [
        ("AUC", 0.7, 0.9, (0.5, 1.0)),
        ("AUC", 0.4, 0.9, (0.0, 1.0)),
        ("R2", 0.6, 0.9, (0.0, 1.0)),
        ("MAE", 3.1, 7.4, (3, 8)),
    ],
)
def test_axis_holds_all_limits(metric: str, least: float, most: float, ends: tuple[float, float]):
    assert axis_limits(metric, least, most) == pytest.approx(ends)


def test_every_metric_of_the_page_has_a_definition():
    assert [name for name in METRICS.values() if name not in DEFINITIONS] == []
    for cell, name in (("AUC [95 %]", "AUC"), ("bal.\nacc. [95 %]", "balanced accuracy"), ("p\nHolm", "p Holm")):
        assert definition_of(cell) == (definition_id(name), DEFINITIONS[name])
    assert definition_of("slide_003") is None
    assert len({definition_id(name) for name in DEFINITIONS}) == len(DEFINITIONS)


def test_simple_baselines_are_rows_of_a_comparison():
    """A renamed method would leave the first screen without it."""
    assert {*SIMPLE_BASELINES} <= {*NAMES, UNTRAINED_ROW, COLOR_ROW}
