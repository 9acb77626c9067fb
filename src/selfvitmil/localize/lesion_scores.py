"""The numbers of maps beside annotations: of every slide, over slides, with limits; as JSON and csv.

`lesion_metrics.py` computes them and says what each means. All scores but FROC are sums over slides, divided by each
other, so that a bootstrap over slides is a product of matrices; `FrocDraws` does the same for FROC.

N slides, R resamples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from selfvitmil.evaluate.method_metrics import interval_json
from selfvitmil.metrics import FPS, CaseDetections, Froc, Interval, wilson
from selfvitmil.metrics.intervals import bootstrap, check_groups, percentile_interval
from selfvitmil.settings import EvaluateSettings
from selfvitmil.store.files import csv_text

SCORES = {
    "froc": "FROC score: mean sensitivity at 1/4, 1/2, 1, 2, 4 and 8 false positives per slide",
    "coverage": "share of outlined tumour area covered, mean over slides",
    "coverage_pooled": "share of outlined tumour area covered, all slides together",
    "lesions_touched": "share of outlined lesions touched, those under 0.2 mm apart",
    "dice": "Dice overlap with the outlines, mean over positive slides",
    "false_mm2_positive": "false-positive area on positive slides, mm2 per slide",
    "false_share_positive": "share of normal tissue on positive slides that is false-positive",
    "false_mm2_negative": "false-positive area on negative slides, mm2 per slide",
    "false_share_negative": "share of tissue on negative slides that is false-positive",
    "called_mm2_negative": "the same, counting only negative slides that the model calls positive",
    "tile_auc": "AUC of tiles within a slide, mean over positive slides",
    "tile_ap": "average precision of tiles within a slide, mean over positive slides",
    "hit_rate": "share of positive slides whose hottest tile has outlined tumour",
    "hit_rate_half": "share of positive slides whose hottest tile is tumour by the rule for tiles",
}
"""Names and meanings of the scores that have limits."""

Floats = NDArray[np.float64]
Json = dict[str, Any]


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
    """Outlined tumour under any tile."""
    covered_mm2: float
    """Outlined tumour under tiles that reach the threshold."""
    marked_mm2: float
    """Tiles that reach the threshold."""
    false_mm2: float
    dice: float
    lesions: int
    """Outlined ones that count: not those under 0.2 mm, which the challenge takes for isolated tumour cells."""
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
    """Whether the hottest tile has outlined tumour; None for negative slides."""
    hit_half: bool | None
    """Whether it is tumour by the rule for tiles."""

    @property
    def normal_mm2(self) -> float:
        """Under tiles and not outlined."""
        return self.tissue_mm2 - self.reachable_mm2


@dataclass(frozen=True)
class Threshold:
    """Where a map's score marks a tile, and where that comes from."""

    value: float
    words: str
    val_dice: float | None = None
    val_slides: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class LesionScores:
    """How the maps of one model agree with the outlines of the test slides."""

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
        told = {
            name: np.array([getattr(slide, name) for slide in self.slides], dtype=np.float64) for name in _PER_SLIDE
        }
        positive, called = self.positive, np.array([slide.called for slide in self.slides])
        false, normal = told["false_mm2"], told["normal_mm2"]

        def mean(values: Floats, among: NDArray[np.bool_]) -> tuple[Floats, Floats]:
            valid = among & np.isfinite(values)
            return np.where(valid, values, 0.0), valid.astype(np.float64)

        covered, tumour = told["covered_mm2"], told["tumour_mm2"]
        return {
            "coverage": mean(covered / np.where(tumour > 0, tumour, np.nan), positive),
            "coverage_pooled": (covered, tumour),
            "lesions_touched": (told["touched"], told["lesions"]),
            "dice": mean(told["dice"], positive),
            "false_mm2_positive": mean(false, positive),
            "false_share_positive": (false * positive, normal * positive),
            "false_mm2_negative": mean(false, ~positive),
            "false_share_negative": (false * ~positive, normal * ~positive),
            "called_mm2_negative": mean(false * called, ~positive),
            "tile_auc": mean(told["tile_auc"], positive),
            "tile_ap": mean(told["tile_ap"], positive),
            "hit_rate": mean(told["hit"], positive),
            "hit_rate_half": mean(told["hit_half"], positive),
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
    told = {name: getattr(slide, name) for name in ScoredSlide.__dataclass_fields__}
    return {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in told.items()}


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
