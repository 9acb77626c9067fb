"""Results of heatmaps scored against annotations: per slide and over slides, with CIs; tables, FROC curve, files.

`lesion_metrics.py` computes the scores and says what each means. All but FROC are sums over slides, divided by each
other, so that a bootstrap over slides is a product of matrices; `FrocDraws` does the same for FROC.

`compare_lesions` puts several models side by side. Each has the threshold that its own validation heatmaps chose.
Differences to the baseline are paired: the same resamples of slides for both, so that slides which are hard for all do
not widen them.

In the FROC figure false positives per slide are linear up to 1/4, the first of the challenge's six marks, and
logarithmic beyond, so that the marks have equal distances and the curve starts at 0.

N slides, R resamples.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from selfvitmil.cohort.table import listing
from selfvitmil.errors import MetricError
from selfvitmil.evaluate import figures
from selfvitmil.evaluate.comparison import holm
from selfvitmil.evaluate.figures import (
    BLUE,
    INK,
    ORANGE,
    Protocol,
    as_svg,
    finish,
    styled,
)
from selfvitmil.evaluate.method_metrics import interval_json, read_interval
from selfvitmil.formatting import markdown_list, markdown_table, number, p_value, percent, shorten, with_limits
from selfvitmil.metrics import FPS, CaseDetections, Froc, Interval, wilson
from selfvitmil.metrics.classification import bootstrap, bootstrap_p_value, check_groups, percentile_interval
from selfvitmil.settings import EvaluateSettings
from selfvitmil.store.files import csv_text, write_text

SCORES = {
    "froc": "FROC score: mean sensitivity at 1/4, 1/2, 1, 2, 4 and 8 false positives per slide",
    "coverage": "share of annotated tumour area covered, mean over slides",
    "coverage_pooled": "share of annotated tumour area covered, all slides together",
    "lesions_touched": "share of annotated lesions touched, those under 0.2 mm apart",
    "dice": "Dice overlap with the annotations, mean over positive slides",
    "false_mm2_positive": "false-positive area on positive slides, mm2 per slide",
    "false_share_positive": "share of normal tissue on positive slides that is false-positive",
    "false_mm2_negative": "false-positive area on negative slides, mm2 per slide",
    "false_share_negative": "share of tissue on negative slides that is false-positive",
    "called_mm2_negative": "the same, counting only negative slides that the model calls positive",
    "tile_auc": "AUC of tiles within a slide, mean over positive slides",
    "tile_ap": "average precision of tiles within a slide, mean over positive slides",
    "hit_rate": "share of positive slides whose highest-scoring tile has annotated tumour",
    "hit_rate_half": "share of positive slides whose highest-scoring tile is tumour by the rule for tiles",
}
"""Names and meanings of the scores that have confidence intervals."""

Floats = NDArray[np.float64]
Json = dict[str, Any]
COLUMNS = {
    "froc": "FROC",
    "coverage": "coverage",
    "lesions_touched": "lesions\ntouched",
    "dice": "Dice",
    "false_mm2_positive": "false mm2\npositive",
    "false_mm2_negative": "false mm2\nnegative",
    "called_mm2_negative": "of these\ncalled",
    "tile_auc": "tile\nAUC",
    "tile_ap": "tile\nAP",
    "hit_rate": "hit\nrate",
}
"""Scores that the table shows, and their heads."""
TESTED = ("froc", "coverage", "false_mm2_negative")
"""Scores whose p-values the table shows; csv and JSON have all."""
COLORS = (BLUE, ORANGE, "#009e73", "#cc79a7", "#e69f00", "#56b4e9", INK)
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.5, 1)), (0, (6, 1.5, 1.5, 1.5)))
MARKS = ("1/4", "1/2", "1", "2", "4", "8")
LESION_FILES = ("lesions.json", "lesion_slides.csv", "lesions.csv", "lesions.md", "froc.svg")
"""All that is written here into a folder of results, of one model or of several."""


@dataclass(frozen=True)
class ScoredSlide:
    """One slide at the threshold; NaN, or None, where something is not defined for it."""

    slide: str
    patient: str
    positive: bool
    called: bool
    """Whether the model calls the slide positive."""
    probability: float
    threshold: float
    tissue_mm2: float
    """Under tiles."""
    tumour_mm2: float
    reachable_mm2: float
    """Annotated tumour under any tile."""
    covered_mm2: float
    """Annotated tumour under tiles that reach the threshold."""
    marked_mm2: float
    """Tiles that reach the threshold."""
    false_mm2: float
    dice: float
    lesions: int
    """Annotated ones that count: not those under 0.2 mm, which the challenge takes for isolated tumour cells."""
    touched: int
    itc: int
    itc_touched: int
    tumour_tiles: int
    normal_tiles: int
    between_tiles: int
    tile_auc: float
    tile_ap: float
    hottest_x_l0: float
    hottest_y_l0: float
    hit: bool | None
    """Whether the highest-scoring tile has annotated tumour; None for negative slides."""
    hit_half: bool | None
    """Whether it is tumour by the rule for tiles."""

    @property
    def normal_mm2(self) -> float:
        """Under tiles and not annotated."""
        return self.tissue_mm2 - self.reachable_mm2


@dataclass(frozen=True)
class Threshold:
    """The score from which a tile is marked, and where that comes from."""

    value: float
    words: str
    val_dice: float | None = None
    val_slides: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class LesionScores:
    """How the heatmaps of one model agree with the annotations of the test slides."""

    slides: tuple[ScoredSlide, ...]
    left_out: tuple[tuple[str, str], ...]
    """Slides that cannot be scored, with the reason; of validation too."""
    threshold: Threshold
    froc: Froc | None
    """Its `cases` are in the order of `slides`."""
    pooled: dict[str, float | None]
    """AUC and average precision of all tiles of all slides, ranked within splits, which have different models."""
    about: Json
    evaluate: EvaluateSettings
    reasons: dict[str, str]
    """Why a score is missing."""
    warnings: tuple[str, ...]

    @property
    def positive(self) -> NDArray[np.bool_]:
        return np.array([slide.positive for slide in self.slides])

    @cached_property
    def ratios(self) -> dict[str, tuple[Floats, Floats]]:
        """Each score but FROC as two numbers per slide: its value is the sum of the first by that of the second."""
        per_slide = {
            name: np.array([getattr(slide, name) for slide in self.slides], dtype=np.float64) for name in _PER_SLIDE
        }
        positive, called = self.positive, np.array([slide.called for slide in self.slides])
        false, normal = per_slide["false_mm2"], per_slide["normal_mm2"]

        def mean(values: Floats, among: NDArray[np.bool_]) -> tuple[Floats, Floats]:
            valid = among & np.isfinite(values)
            return np.where(valid, values, 0.0), valid.astype(np.float64)

        covered, tumour = per_slide["covered_mm2"], per_slide["tumour_mm2"]
        return {
            "coverage": mean(covered / np.where(tumour > 0, tumour, np.nan), positive),
            "coverage_pooled": (covered, tumour),
            "lesions_touched": (per_slide["touched"], per_slide["lesions"]),
            "dice": mean(per_slide["dice"], positive),
            "false_mm2_positive": mean(false, positive),
            "false_share_positive": (false * positive, normal * positive),
            "false_mm2_negative": mean(false, ~positive),
            "false_share_negative": (false * ~positive, normal * ~positive),
            "called_mm2_negative": mean(false * called, ~positive),
            "tile_auc": mean(per_slide["tile_auc"], positive),
            "tile_ap": mean(per_slide["tile_ap"], positive),
            "hit_rate": mean(per_slide["hit"], positive),
            "hit_rate_half": mean(per_slide["hit_half"], positive),
        }

    @cached_property
    def values(self) -> Floats:
        """The scores in the order of `SCORES`; NaN where one is missing."""
        ones = np.ones((1, len(self.slides)))
        froc = math.nan if self.froc is None else self.froc.score
        return np.append(froc, self._ratios_of(ones)[0])

    @cached_property
    def drawn(self) -> Floats:
        """(R, scores) of bootstrap resamples. Models scored on the same slides have the same resamples."""
        patients = check_groups([slide.patient for slide in self.slides], len(self.slides))
        most = int(np.bincount(patients).max()) * (int(patients.max()) + 1)
        draws = None if self.froc is None else FrocDraws(self.froc.cases, most)

        def statistic(weights_RN: Floats) -> Floats:
            froc_R = np.full(len(weights_RN), np.nan) if draws is None else draws(weights_RN)
            return np.column_stack([froc_R, self._ratios_of(weights_RN)])

        settings = self.evaluate
        return bootstrap(statistic, self.positive.astype(np.int64), patients, settings.bootstrap, settings.seed)

    def _ratios_of(self, weights_RN: Floats) -> Floats:
        pairs = [self.ratios[name] for name in SCORES if name != "froc"]
        above, below = (weights_RN @ np.column_stack(part) for part in zip(*pairs, strict=True))
        return np.divide(above, below, out=np.full_like(above, np.nan), where=below > 0)

    @cached_property
    def intervals(self) -> dict[str, Interval | None]:
        """Every score with its limits; None where it is missing."""
        found: dict[str, Interval | None] = {}
        for place, (name, value) in enumerate(zip(SCORES, self.values.tolist(), strict=True)):
            if math.isnan(value):
                found[name] = None
            elif name.startswith("hit_rate"):
                hits, slides = (round(float(part.sum())) for part in self.ratios[name])
                found[name] = wilson(hits, slides, self.evaluate.confidence)
            else:
                found[name] = limits(value, self.drawn[:, place], self.evaluate.confidence)
        return found

    def rows(self) -> list[dict[str, Any]]:
        """A row for every slide, also those left out; None where there is no number."""
        reasons = dict(self.left_out)
        rows = [{**_plain(slide), "left_out": ""} for slide in self.slides]
        empty = dict.fromkeys(rows[0])
        return rows + [{**empty, "slide": slide, "left_out": why} for slide, why in reasons.items()]

    def csv(self) -> str:
        """The rows as a file."""
        return record_csv(self.rows())

    def to_json(self) -> Json:
        """All of it but single slides, as plain data without NaN."""
        positive = int(self.positive.sum())
        why = {name: "no slide to count it on" for name, found in self.intervals.items() if found is None}
        return {
            "format_version": 1,
            **self.about,
            "slides": {
                "positive": positive,
                "negative": len(self.slides) - positive,
                "left_out": [{"slide": slide, "why": reason} for slide, reason in self.left_out],
            },
            "threshold": {
                "value": self.threshold.value,
                "from": self.threshold.words,
                "validation_dice": self.threshold.val_dice,
                "validation_slides": list(self.threshold.val_slides),
            },
            "scores": {
                name: None if found is None else {**interval_json(found), "words": SCORES[name]}
                for name, found in self.intervals.items()
            },
            "froc": None if self.froc is None else froc_json(self.froc),
            "tiles": {
                **{kind: sum(getattr(slide, f"{kind}_tiles") for slide in self.slides) for kind in _KINDS},
                **self.pooled,
            },
            "reasons": why | self.reasons,
            "warnings": list(self.warnings),
        }


_PER_SLIDE = (
    "false_mm2", "normal_mm2", "covered_mm2", "tumour_mm2", "touched", "lesions", "dice", "tile_auc", "tile_ap", "hit",
    "hit_half",
)  # fmt: skip
_KINDS = ("tumour", "normal", "between")


def limits(value: float, values_R: Floats, level: float) -> Interval:
    """Percentiles of those resamples in which the score is defined."""
    defined = values_R[np.isfinite(values_R)]
    return percentile_interval(value, defined if len(defined) else np.array([value]), level)


def _plain(slide: ScoredSlide) -> dict[str, Any]:
    values = {name: getattr(slide, name) for name in ScoredSlide.__dataclass_fields__}
    return {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in values.items()}


def record_csv(rows: Sequence[dict[str, Any]]) -> str:
    """Rows of equal columns as text of a csv file; numbers to six digits, empty where there is none."""
    return csv_text([list(rows[0]), *(map(_cell, row.values()) for row in rows)])


def _cell(value: Any) -> Any:
    if isinstance(value, bool):
        return int(value)
    return f"{value:.6g}" if isinstance(value, float) else value


# ---------------------------------------------------------------------------------------------------- FROC


def froc_json(froc: Froc) -> Json:
    """Sensitivities at the six marks and the curve, from strict to lax, by its corners alone."""
    fps, sensitivity = froc_curve(froc)
    words = ("1/4", "1/2", "1", "2", "4", "8")
    return {
        "lesions": sum(case.num_lesions for case in froc.cases),
        "small_lesions_not_counted": sum(len(case.itc_labels) for case in froc.cases),
        "sensitivity_at": dict(zip(words, froc.sensitivity_at.tolist(), strict=True)),
        "curve": {"false_positives_per_slide": fps.tolist(), "sensitivity": sensitivity.tolist()},
    }


def froc_curve(froc: Froc) -> tuple[Floats, Floats]:
    """False positives per slide, rising, and sensitivity; without points between others of the same sensitivity."""
    fps, sensitivity = froc.fps_per_slide[::-1], froc.sensitivity[::-1]
    same = sensitivity[1:] == sensitivity[:-1]
    kept = ~(np.append(False, same) & np.append(same, False))
    return fps[kept], sensitivity[kept]


class FrocDraws:
    """The FROC score when slides are drawn several times or not at all: `metrics.froc` of such a set, but quick."""

    def __init__(self, cases: Sequence[CaseDetections], most_slides: int):
        """`most_slides`: how many may be drawn, which is more than there are where patients have several."""
        false = [_needed(case.false_positives, int(FPS[-1]) * most_slides + 1) for case in cases]
        true = [case.lesion_scores for case in cases]
        self.false_slide = np.repeat(np.arange(len(cases)), [len(each) for each in false])
        self.true_slide = np.repeat(np.arange(len(cases)), [len(each) for each in true])
        false_all, true_all = np.concatenate(false), np.concatenate(true)
        thresholds = np.unique(np.concatenate([false_all, true_all.astype(np.float64)]))
        # A score counts at all thresholds up to this place; a lesion's in float32, as the challenge compares them.
        self.false_place = np.searchsorted(thresholds, false_all)
        self.true_place = np.searchsorted(thresholds.astype(np.float32), true_all, "right") - 1
        self.num_thresholds = len(thresholds)
        self.num_lesions = np.array([case.num_lesions for case in cases], dtype=np.float64)

    def __call__(self, weights_RN: Floats) -> Floats:
        return np.array([self._score(weights) for weights in weights_RN])

    def _score(self, weights: Floats) -> float:
        lesions = weights @ self.num_lesions
        if lesions == 0:
            return math.nan
        false = np.bincount(self.false_place, weights[self.false_slide], self.num_thresholds)
        true = np.bincount(self.true_place, weights[self.true_slide], self.num_thresholds)
        smallest = int(np.argmax((false > 0) | (true > 0)))  # of the slides drawn; the challenge leaves it out
        fps, found = (np.append(0.0, np.cumsum(counts[:smallest:-1])) for counts in (false, true))
        return float(np.interp(FPS, fps / weights.sum(), found / lesions).mean())


def _needed(false_positives: Floats, most: int) -> Floats:
    """The highest `most` with their equals; beyond more than 8 per slide are reached whichever slides are drawn.

    Where some are left out, -1 stands for them, as the smallest, which FROC leaves out.
    """
    if len(false_positives) <= most:
        return false_positives
    cut = np.partition(false_positives, -most)[-most]
    return np.append(false_positives[false_positives >= cut], -1.0)


# ---------------------------------------------------------------------------------------------------- several models


@dataclass(frozen=True)
class Difference:
    """A score of a model minus the baseline's on the same slides."""

    interval: Interval
    p_value: float
    """Two-sided, from the bootstrap."""
    holm_p_value: float
    """Corrected for the number of models that are compared with the baseline."""


@dataclass(frozen=True, eq=False)
class LesionTable:
    """Models beside each other."""

    scores: Mapping[str, LesionScores]
    """By the name of the row."""
    baseline: str
    differences: Mapping[str, Mapping[str, Difference]]
    """Row, score -> difference; without the baseline, and without scores that one of the two has not."""

    def cells(self, *, intervals: bool = False) -> list[list[str]]:
        """The header and a line of cells for each row; headers may have two lines."""
        return lesion_cells(self.to_json(), intervals=intervals)

    def notes(self, *, definitions: bool = True) -> list[str]:
        """What stands below the table; without `definitions` only what is said of these heatmaps."""
        return lesion_notes(self.to_json(), definitions=definitions)

    def markdown(self) -> str:
        """The table with intervals, and its notes as a list below."""
        return f"{markdown_table(self.cells(intervals=True))}\n\n{markdown_list(self.notes())}\n"

    def csv(self) -> str:
        """A line for every row with all scores, limits and differences."""
        return record_csv([self._record(name) for name in self.scores])

    def _record(self, name: str) -> dict[str, Any]:
        scores, tests = self.scores[name], self.differences.get(name, {})
        record: dict[str, Any] = {"maps_of": name, "model": scores.about["model"], "mapped": scores.about["mapped"]}
        record |= {"threshold": scores.threshold.value, "threshold_from": scores.threshold.words}
        for score, found in scores.intervals.items():
            record |= {score: found and found.value, f"{score}_low": found and found.low}
            record |= {f"{score}_high": found and found.high}
        record["baseline"] = self.baseline
        for score in SCORES:
            test = tests.get(score)
            record |= {f"{score}_difference": test and test.interval.value}
            record |= {f"{score}_difference_low": test and test.interval.low}
            record |= {f"{score}_difference_high": test and test.interval.high}
            record |= {f"{score}_p": test and test.p_value, f"{score}_p_holm": test and test.holm_p_value}
        return record

    def to_json(self) -> dict[str, Any]:
        """All of it as plain data without NaN."""
        return {
            "format_version": 1,
            "baseline": self.baseline,
            "methods": {name: scores.to_json() for name, scores in self.scores.items()},
            "differences": {
                name: {
                    score: {
                        **interval_json(test.interval),
                        "p_value": test.p_value,
                        "holm_p_value": test.holm_p_value,
                    }
                    for score, test in tests.items()
                }
                for name, tests in self.differences.items()
            },
        }


def lesion_cells(stored: Mapping[str, Any], *, intervals: bool = False) -> list[list[str]]:
    """Return header and rows of the table in a `lesions.json` of several models; headers may have two lines."""
    methods: Mapping[str, Any] = stored["methods"]
    found = (score for own in methods.values() for score in own["scores"].values() if score)
    level = next((f" [{percent(score['level'])}]" for score in found), "")
    rest = level if intervals else ""
    header = ["heatmaps of", f"FROC{level}", *(f"{head}{rest}" for head in list(COLUMNS.values())[1:])]
    header += ["threshold", *(f"p\n{COLUMNS[name].replace(chr(10), ' ')}" for name in TESTED)]
    rows = [_line(name, own, stored["differences"].get(name, {}), intervals) for name, own in methods.items()]
    return [header, *rows]


def _line(name: str, own: Mapping[str, Any], tests: Mapping[str, Any], intervals: bool) -> list[str]:
    found = {score: read_interval(own["scores"].get(score)) for score in COLUMNS}
    return [
        name if intervals else shorten(name, 24),
        *(with_limits(each) if intervals or score == "froc" else number(each.value) for score, each in found.items()),
        f"{own['threshold']['value']:.3g}",
        *(p_value(tests[score]["p_value"]) if score in tests else "-" for score in TESTED),
    ]


def lesion_notes(stored: Mapping[str, Any], *, definitions: bool = True) -> list[str]:
    """Return what stands below that table: slides, definitions of the columns, thresholds and warnings."""
    methods: Mapping[str, Any] = stored["methods"]
    first = next(iter(methods.values()))
    slides = f"{first['slides']['positive']} positive and {first['slides']['negative']} negative test slides"
    notes = [f"Heatmaps of {slides} against their annotations; FROC in the frame {first['froc_frame']!r}."]
    if definitions:
        notes += [f"{head.replace(chr(10), ' ')}: {SCORES[score]}." for score, head in COLUMNS.items()]
    if definitions and len(methods) > 1:
        notes.append(f"p: paired bootstrap over slides against {stored['baseline']}, two-sided, not corrected.")
    origins = {name: own["threshold"]["from"] for name, own in methods.items()}
    if len(set(origins.values())) == 1:
        notes.append(f"Threshold of every row: {origins.popitem()[1]}.")
    else:
        notes += [f"Threshold of {name}: {text}." for name, text in origins.items()]
    return notes + list(dict.fromkeys(text for own in methods.values() for text in own["warnings"]))


def compare_lesions(scores: Mapping[str, LesionScores], baseline: str) -> LesionTable:
    """Rows in the given order, each but the baseline compared with it; MetricError unless scored alike."""
    if baseline not in scores:
        raise MetricError(
            f"no heatmaps of the baseline {baseline!r}",
            f"there are those of {listing(scores)}",
            "Name one",
            code="unknown-baseline",
        )
    _check_alike(scores)
    base, found = scores[baseline], {name: own for name, own in scores.items() if name != baseline}
    differences: dict[str, dict[str, Difference]] = {name: {} for name in found}
    for place, score in enumerate(SCORES):
        pairs: dict[str, tuple[Interval, float]] = {}
        for name, own in found.items():
            value = float(own.values[place] - base.values[place])
            drawn = own.drawn[:, place] - base.drawn[:, place]
            if np.isfinite(value):
                pairs[name] = limits(value, drawn, base.evaluate.confidence), bootstrap_p_value(drawn)
        corrected = holm([p for _, p in pairs.values()])
        for (name, (interval, p)), holm_p in zip(pairs.items(), corrected, strict=True):
            differences[name][score] = Difference(interval, p, holm_p)
    return LesionTable(scores, baseline, differences)


def _check_alike(scores: Mapping[str, LesionScores]) -> None:
    names = list(scores)
    first = scores[names[0]]
    rules = ("froc_frame", "point_radius_um", "point_min", "tumour_share")
    for name in names[1:]:
        own = scores[name]
        same_slides = [(s.slide, s.positive, s.patient) for s in own.slides] == [
            (s.slide, s.positive, s.patient) for s in first.slides
        ]
        same_rules = own.evaluate == first.evaluate and all(own.about[key] == first.about[key] for key in rules)
        if not (same_slides and same_rules):
            raise MetricError(
                f"heatmaps of {names[0]} and of {name} were scored on different slides or in different ways",
                "side by side they would look comparable",
                "Score the heatmaps of the slides that all models have (common_cases), with the same settings",
                code="not-comparable",
            )


# ---------------------------------------------------------------------------------------------------- FROC curve


@styled
def draw_froc(
    scores: Mapping[str, LesionScores], title: str = "FROC curve", *, protocol: Protocol = "honest"
) -> Figure:
    """Sensitivity for lesions over false positives per slide, by the name of each model; marks at the challenge's six.

    All must be scored on the same slides. MetricError where none has a curve.
    """
    curves = {name: own.froc for name, own in scores.items() if own.froc is not None}
    if not curves:
        why = next((own.reasons.get("froc", "") for own in scores.values()), "") or "there is none to draw"
        raise MetricError(
            "a FROC curve of nothing",
            why,
            "Score heatmaps of positive slides with their annotations",
            code="no-lesions",
        )
    figure = Figure()
    axes: Any = figure.subplots()
    handles: dict[str, Any] = {}
    most = 8.0
    for place, (name, froc) in enumerate(curves.items()):
        color, dashes = COLORS[place % len(COLORS)], DASHES[place % len(DASHES)]
        fps, sensitivity = _fine(*froc_curve(froc))
        most = max(most, min(float(fps[-1]), 16.0))
        (line,) = axes.plot(fps, sensitivity, color=color, ls=dashes, lw=2.2, label=name)
        if fps[-1] < FPS[-1]:
            axes.plot([fps[-1], FPS[-1]], [sensitivity[-1]] * 2, color=color, ls=(0, (1, 2)), lw=1, label="beyond")
        (dots,) = axes.plot(FPS, froc.sensitivity_at, "o", color=color, mec="white", ms=6, zorder=4, label="marks")
        handles[shorten(name, 26)] = (line, dots)
    axes.set_xscale("symlog", linthresh=FPS[0], base=2, linscale=1.0)
    axes.set(xlim=(0, most * 1.08), ylim=(-0.02, 1.02), xlabel="false positives per slide", ylabel="lesions found")
    axes.set_xticks((0.0, *FPS), ("0", *MARKS))
    axes.set_xticks((), minor=True)
    axes.grid(visible=True)
    return finish(figure, 3.6, title, _caption(scores, curves), handles, protocol)


def _fine(fps: Floats, sensitivity: Floats) -> tuple[Floats, Floats]:
    """With points between, since what is straight by false positives is bent on the axis."""
    between = np.concatenate([np.linspace(0, FPS[0], 10), np.geomspace(FPS[0], 16.0, 100)])
    between = np.setdiff1d(between[between < fps[-1]], fps)
    order = np.argsort(np.concatenate([fps, between]), kind="stable")
    added = np.interp(between, fps, sensitivity)
    return np.concatenate([fps, between])[order], np.concatenate([sensitivity, added])[order]


def _caption(scores: Mapping[str, LesionScores], curves: Mapping[str, Froc]) -> list[str]:
    first = next(iter(scores.values()))
    froc, positive = next(iter(curves.values())), int(first.positive.sum())
    lesions = sum(case.num_lesions for case in froc.cases)
    itc = sum(len(case.itc_labels) for case in froc.cases)
    scored = [f"{name} {figures.with_limits(found)}" for name in curves if (found := scores[name].intervals["froc"])]
    level = figures.percent(first.evaluate.confidence)
    sizes = "true microns" if first.about["froc_frame"] == "microns" else "level-0 pixels taken as 0.243 um"
    sure = any(found and found.low == found.high for name in curves if (found := scores[name].intervals["froc"]))
    short = [name for name, each in curves.items() if each.fps_per_slide.max() < FPS[-1]]
    few = f", {itc} under 0.2 mm not counted" if itc else ""
    return [
        f"{positive} positive and {len(first.slides) - positive} negative slides, {lesions} lesions{few}.",
        f"Marks: the six rates whose mean is the score: {'; '.join(scored)} ({level} limits, bootstrap over slides).",
        "Limits have no width where all resamples agree; that is no certainty." if sure else "",
        "Thin dots: no more points; the last sensitivity holds." if short else "",
        f"Points at least {first.about['point_radius_um']:g} um apart; sizes in {sizes}.",
    ]


froc_figure = as_svg(draw_froc)


def write_lesion_scores(folder: Path, scores: LesionScores, *, protocol: Protocol = "honest") -> list[str]:
    """Write `lesions.json`, `lesion_slides.csv` and `froc.svg` of one model; why the figure could not be drawn."""
    _write_json(folder / "lesions.json", scores.to_json() | {"protocol": protocol})
    write_text(folder / "lesion_slides.csv", scores.csv())
    return _write_figure(folder / "froc.svg", {str(scores.about["model"]): scores}, protocol)


def write_lesion_table(folder: Path, table: LesionTable, *, protocol: Protocol = "honest") -> list[str]:
    """Write `lesions.json`, `lesions.csv`, `lesions.md` and `froc.svg` of several models."""
    _write_json(folder / "lesions.json", table.to_json() | {"protocol": protocol})
    write_text(folder / "lesions.csv", table.csv())
    write_text(folder / "lesions.md", table.markdown())
    return _write_figure(folder / "froc.svg", table.scores, protocol)


def _write_json(path: Path, data: dict[str, Any]) -> None:
    write_text(path, json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def _write_figure(path: Path, scores: Mapping[str, LesionScores], protocol: Protocol) -> list[str]:
    try:
        text = froc_figure(scores, protocol=protocol)
    except MetricError as error:
        path.unlink(missing_ok=True)  # one of an earlier run would pass for this run's
        return [f"{path.name} is not drawn: {error.why or error}"]
    write_text(path, text)
    return []
