"""Score heatmaps against annotations: how well they find annotated lesions, and what they show where there is none.

A case is the heatmap of a slide and its annotation. Slides that cannot be scored fairly, as positive ones without an
annotation or with some lesions not annotated, are left out of all metrics and listed with the reason.

Scores, of the test cases:

* FROC as the challenge computes it (`metrics.froc`), of points that `find_points` takes from the heatmap. The mask is
  filled straight from the polygons at level 5. In the frame `microns` its pixels are 0.243 * 32 um on every slide, and
  points are moved accordingly, so that 75 and 275 um are what they say; in the frame `challenge` they are 32 level-0
  pixels, taken as 0.243 um each, as its program does.
* Areas at one threshold of the heatmap's score. A tile stands for the square around its centre that is as wide as the
  stride (or the tile, where that is smaller), so that overlapping tiles count once. Coverage: share of annotated tumour
  under tiles that reach the threshold; tumour without a tile counts as missed. False-positive area: of these tiles
  outside annotations. Dice: twice the overlap by the sum of both areas. Lesions touched: those of the
  challenge's evaluation mask, isolated tumour cells apart, with annotated tumour under such a tile.
* The threshold is that of `THRESHOLDS` with the largest mean Dice over annotated validation slides, the middle one of
  equals; without such slides it is the setting `lesion_threshold`. No test slide is used.
* Single tiles: one is tumour from `TUMOUR_SHARE` of it annotated on, normal below `NORMAL_SHARE`, and neither between,
  where it is left out. AUC and average precision within each slide, by score; and of all tiles of all slides together,
  by detection, which compares across slides. Slides of different splits have heatmaps of different models: their tiles
  are ranked within splits, and a warning says that FROC puts their detections into one order.
* Hit rate: how often the highest-scoring tile (among equals by the evidence behind the score) has annotated tumour.

Limits are percentiles of a bootstrap that draws patients whole, positive and negative ones apart; of hit rates,
Wilson's.

N tiles.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from selfvitmil import metrics
from selfvitmil.annotations import Annotation, box_coverage, read_annotations, to_mask
from selfvitmil.cohort.camelyon16 import CHALLENGE_LEVEL, CHALLENGE_MPP, has_all_lesions
from selfvitmil.cohort.table import SlideRow, listing
from selfvitmil.errors import ArtefactError, CohortError, MetricError
from selfvitmil.evaluate.method_metrics import attempt
from selfvitmil.localize.detection import find_points, highest_scoring_tile
from selfvitmil.localize.heatmap import Heatmap, check_annotations, read_heatmap
from selfvitmil.localize.lesion_results import Json, LesionScores, ScoredSlide, Threshold
from selfvitmil.localize.scores import NORMAL_SHARE, TUMOUR_SHARE
from selfvitmil.metrics.detection import ITC_UM, evaluation_mask, major_axes
from selfvitmil.settings import EvaluateSettings, LocalizeSettings

THRESHOLDS = np.arange(1, 201) / 200
"""Thresholds to choose from."""
_MARGIN_PX = 16
"""Of evaluation masks around tumour: more than it grows by, which is 5."""
FEW = 10
"""With fewer positive slides a warning says that limits are rough."""

ONE_ORDER = (
    "FROC puts detections of the models of {} splits into one order, although their scores may differ in offset: "
    "it can be too low"
)
"""Warning; with the number of splits."""

Floats = NDArray[np.float64]


# ---------------------------------------------------------------------------------------------------- cases


@dataclass(frozen=True, eq=False)
class LesionCase:
    """The heatmap of a slide and its annotation. Raises AnnotationError where the annotation is another slide's."""

    heatmap: Heatmap
    annotations: tuple[Annotation, ...] | None = None
    """None where the slide has no annotation, as normal slides."""
    positive: bool | None = None
    """Whether its label is the class that the heatmap shows; None means: where it has annotations."""
    complete: bool = True
    """Whether all lesions are annotated."""
    patient: str = ""
    file: str = "its annotation"
    """Name of the annotation's file."""
    warnings: tuple[str, ...] = field(default=(), init=False)
    """On annotations that leave the slide."""

    def __post_init__(self) -> None:
        if self.positive is None:
            object.__setattr__(self, "positive", self.annotations is not None)
        if not self.patient:
            object.__setattr__(self, "patient", self.slide)
        if self.annotations:
            warnings = check_annotations(self.annotations, self.heatmap.frame.size_l0, self.file)
            object.__setattr__(self, "warnings", warnings)

    @property
    def slide(self) -> str:
        return self.heatmap.slide

    @property
    def tumour(self) -> list[Annotation]:
        """Return what is annotated as tumour."""
        return [one for one in self.annotations or () if one.kind == "tumour" and one.has_area]

    @property
    def refused(self) -> str:
        """Why it cannot be scored; empty where it can."""
        if not len(self.heatmap):
            return "its heatmap has no tile"
        if not self.complete:
            return "not all of its lesions are annotated"
        if self.positive and self.annotations is None:
            return "it is positive and has no annotation"
        if self.positive and not self.tumour:
            groups = sorted({one.group for one in self.annotations or ()}) or ["none"]
            return f"it is positive and {self.file} has no tumour (groups: {listing(groups)})"
        if not self.positive and self.tumour:
            return f"{self.file} has tumour, but its label is not {self.heatmap.prediction.shown}"
        return ""


def read_outlines(path: Path) -> tuple[Annotation, ...]:
    """Return the annotations of a file, with outlines that cross themselves repaired."""
    return read_annotations(path, repair=True)


def lesion_case(
    row: SlideRow, heatmap: Heatmap | Path, read: Callable[[Path], tuple[Annotation, ...]] = read_outlines
) -> LesionCase:
    """Return the case of a cohort's slide from its heatmap and the annotation that the cohort names.

    `read` reads annotations; one that remembers them serves the heatmaps of many models of a slide.

    Raises ArtefactError where the heatmap is unreadable or of another slide, AnnotationError where the annotation is
    unreadable or of another slide, CohortError where the slide has no label.
    """
    found = heatmap if isinstance(heatmap, Heatmap) else read_heatmap(heatmap)
    if found.slide != row.slide:
        raise ArtefactError(
            f"{row.slide}: its heatmap is of {found.slide}",
            "heatmaps are scored against the slide's own lesions",
            "Localize again",
            code="heatmap-of-other-slide",
        )
    if row.label is None:
        raise CohortError(
            f"{row.slide}: it has no label",
            "so its heatmap cannot be scored",
            "Fill the column label",
            code="unlabelled-slides",
        )
    return LesionCase(
        found,
        None if row.annotation is None else read(row.annotation),
        positive=row.label == found.prediction.shown,
        complete=has_all_lesions(row),
        patient=row.patient,
        file="" if row.annotation is None else row.annotation.name,
    )


def common_cases(
    cases: Mapping[str, Sequence[LesionCase]],
) -> tuple[dict[str, list[LesionCase]], tuple[str, ...]]:
    """Of every model the cases of those slides that all have, in the order of the first; and who lacks which."""
    slides = {name: {case.slide: case for case in own} for name, own in cases.items()}
    first = next(iter(cases.values()), ())
    everywhere = {case.slide for case in first if all(case.slide in own for own in slides.values())}
    anywhere = {slide for own in slides.values() for slide in own}
    kept = {name: [own[case.slide] for case in first if case.slide in everywhere] for name, own in slides.items()}
    warnings = [
        f"{name} has no heatmap of {listing(missing)}: left out for all"
        for name, own in slides.items()
        if (missing := sorted(anywhere - own.keys()))
    ]
    return kept, tuple(warnings)


# ---------------------------------------------------------------------------------------------------- one slide


def tumour_shares(case: LesionCase, edge_l0: float) -> Floats:
    """(N,) share of the square of this edge around each tile's centre that is annotated as tumour."""
    if not case.positive:
        return np.zeros(len(case.heatmap))
    centres = case.heatmap.centres_l0
    boxes = np.concatenate([centres - edge_l0 / 2, centres + edge_l0 / 2], axis=1)
    return box_coverage(case.annotations or (), boxes)


@dataclass(frozen=True, eq=False)
class _Areas:
    """The tiles of a heatmap against the annotations."""

    score: NDArray[np.float32]
    annotated: Floats
    """(N,) share of each tile's square."""
    square_mm2: float
    tumour_mm2: float
    """Annotated in all, also where no tile lies."""

    @classmethod
    def of(cls, case: LesionCase) -> _Areas:
        frame = case.heatmap.frame
        edge, (width, height) = min(frame.stride_l0, frame.extent_l0), frame.size_l0
        whole = float(box_coverage(case.annotations or (), [[0, 0, width, height]])[0]) if case.positive else 0.0
        pixel_mm2 = frame.slide_mpp**2 / 1e6
        shares = tumour_shares(case, edge)
        return cls(case.heatmap.score, shares, edge**2 * pixel_mm2, whole * width * height * pixel_mm2)

    def at(self, thresholds: Floats) -> tuple[Floats, Floats]:
        """For each threshold the area of the tiles that reach it, and that of annotated tumour under them, in mm2."""
        order = np.argsort(-self.score, kind="stable")
        annotated = np.concatenate([[0.0], np.cumsum(self.annotated[order])])
        # In float32, as lesions are found.
        count = np.searchsorted(-self.score[order], -thresholds.astype(np.float32), "right")
        return count.astype(np.float64) * self.square_mm2, annotated[count] * self.square_mm2

    def dice(self, thresholds: Floats) -> Floats:
        marked, covered = self.at(thresholds)
        return 2 * covered / (marked + self.tumour_mm2)


@dataclass(frozen=True, eq=False)
class _Tiles:
    """Tiles of known kind: what they were detected with, and whether they are tumour."""

    detection: NDArray[np.float32]
    tumour: NDArray[np.bool_]


def _score_slide(case: LesionCase, threshold: float, frame: str) -> tuple[ScoredSlide, _Tiles]:
    heatmap, areas = case.heatmap, _Areas.of(case)
    marked, covered = (float(area[0]) for area in areas.at(np.array([threshold])))
    apart = heatmap.frame.stride_l0 >= heatmap.frame.extent_l0
    share = areas.annotated if apart else tumour_shares(case, heatmap.frame.extent_l0)
    tumour, normal = share >= TUMOUR_SHARE, share < NORMAL_SHARE
    known = tumour | normal
    peaks, is_itc = _lesion_peaks(case, frame) if case.positive else (np.empty(0, np.float32), np.empty(0, bool))
    touched = peaks >= np.float32(threshold)
    two_kinds = tumour.any() and normal.any()
    highest = highest_scoring_tile(heatmap)
    found = bool(heatmap.score[highest] > 0)
    x, y = heatmap.centres_l0[highest].tolist()
    scored = ScoredSlide(
        slide=case.slide,
        patient=case.patient,
        positive=bool(case.positive),
        called=heatmap.prediction.is_positive,
        probability=heatmap.prediction.shown_probability,
        threshold=threshold,
        tissue_mm2=len(heatmap) * areas.square_mm2,
        tumour_mm2=areas.tumour_mm2,
        reachable_mm2=float(areas.annotated.sum()) * areas.square_mm2,
        covered_mm2=covered,
        marked_mm2=marked,
        false_mm2=max(0.0, marked - covered),
        dice=float(areas.dice(np.array([threshold]))[0]) if case.positive else math.nan,
        lesions=int((~is_itc).sum()),
        touched=int((touched & ~is_itc).sum()),
        itc=int(is_itc.sum()),
        itc_touched=int((touched & is_itc).sum()),
        tumour_tiles=int(tumour.sum()),
        normal_tiles=int(normal.sum()),
        between_tiles=int((~known).sum()),
        tile_auc=metrics.auc(tumour[known], heatmap.score[known]) if two_kinds else math.nan,
        tile_ap=metrics.average_precision(tumour[known], heatmap.score[known]) if two_kinds else math.nan,
        hottest_x_l0=x,
        hottest_y_l0=y,
        hit=found and bool(share[highest] >= NORMAL_SHARE) if case.positive else None,
        hit_half=found and bool(tumour[highest]) if case.positive else None,
    )
    return scored, _Tiles(heatmap.detection[known], tumour[known])


# ---------------------------------------------------------------------------------------------------- FROC


def _pixel_l0(heatmap: Heatmap, frame: str) -> float:
    """Edge of a pixel of the evaluation mask."""
    unit = CHALLENGE_MPP / heatmap.frame.slide_mpp if frame == "microns" else 1.0
    return 2**CHALLENGE_LEVEL * unit


def _mask(case: LesionCase, frame: str) -> NDArray[np.bool_]:
    slide = case.heatmap.frame
    mpp = _pixel_l0(case.heatmap, frame) * slide.slide_mpp
    return to_mask(case.annotations or (), slide.size_l0, slide.slide_mpp, mpp)


def _lesion_peaks(case: LesionCase, frame: str) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Return for each lesion of the evaluation mask the best score of a tile with its annotated tumour (-1 where there
    is no tile), and whether it is isolated tumour cells."""
    heatmap, tumour = case.heatmap, _mask(case, frame)
    columns, lines = (np.flatnonzero(tumour.any(axis=axis)) for axis in (0, 1))
    if not len(columns):
        return np.empty(0, np.float32), np.empty(0, bool)
    # Beyond the reach of growing tumour there is nothing, and slides are large.
    left, top = max(0, columns[0] - _MARGIN_PX), max(0, lines[0] - _MARGIN_PX)
    tumour = tumour[top : lines[-1] + _MARGIN_PX, left : columns[-1] + _MARGIN_PX]
    labels = evaluation_mask(tumour, CHALLENGE_LEVEL, CHALLENGE_MPP)
    y, x = np.nonzero(tumour)
    centre = (np.stack([x + left, y + top], axis=1) + 0.5) * _pixel_l0(heatmap, frame)
    extent_l0, stride_l0 = heatmap.frame.extent_l0, heatmap.frame.stride_l0
    corner = np.asarray(heatmap.origin_l0) + (extent_l0 - stride_l0) / 2
    column, line = np.floor((centre - corner) / stride_l0).astype(np.int64).T
    picture = heatmap.as_grid()
    height, width = picture.shape
    inside = (column >= 0) & (column < width) & (line >= 0) & (line < height)
    score = np.full(len(x), -1, np.float32)
    score[inside] = np.nan_to_num(picture[line[inside], column[inside]], nan=-1)
    peaks = np.full(int(labels.max()), -1, np.float32)
    np.maximum.at(peaks, labels[y, x] - 1, score)
    return peaks, major_axes(labels) < ITC_UM / (CHALLENGE_MPP * 2**CHALLENGE_LEVEL)


class _FrocCases(Sequence[tuple[Any, Any]]):
    """Cases for `metrics.froc`, each built when it is asked for: masks of a hundred slides would fill the memory."""

    def __init__(self, cases: Sequence[LesionCase], settings: LocalizeSettings):
        self.cases, self.settings = cases, settings

    def __len__(self) -> int:
        return len(self.cases)

    def __getitem__(self, index: Any) -> tuple[Any, Any]:
        case = self.cases[int(index)]
        settings = self.settings
        points = find_points(case.heatmap, settings.point_radius_um, settings.point_min)
        # Edge tiles of other tools may have their centres outside.
        points[:, 1:] = np.clip(points[:, 1:], 0, np.asarray(case.heatmap.frame.size_l0) - 1)
        points[:, 1:] *= 2**CHALLENGE_LEVEL / _pixel_l0(case.heatmap, settings.froc_frame)
        return (_mask(case, settings.froc_frame) if case.positive else None), points


# ---------------------------------------------------------------------------------------------------- all slides


def choose_threshold(val_cases: Sequence[LesionCase], settings: LocalizeSettings) -> Threshold:
    """Return that with the largest mean Dice over annotated validation slides; else the setting `lesion_threshold`."""
    usable = [case for case in val_cases if case.positive and not case.refused]
    fixed = f"localize.lesion_threshold {settings.lesion_threshold:g}"
    if not usable:
        return Threshold(settings.lesion_threshold, f"{fixed}, as no annotated validation slide has a heatmap")
    dice = np.mean([_Areas.of(case).dice(THRESHOLDS) for case in usable], axis=0)
    names = tuple(case.slide for case in usable)
    if dice.max() == 0:
        return Threshold(
            settings.lesion_threshold, f"{fixed}, as heatmaps of validation slides mark no annotated tumour", 0.0, names
        )
    best = np.flatnonzero(dice == dice.max())
    chosen = int(best[len(best) // 2])
    words = f"largest mean Dice over {len(usable)} annotated validation slides"
    return Threshold(float(THRESHOLDS[chosen]), words, float(dice[chosen]), names)


def score_lesions(
    test_cases: Sequence[LesionCase],
    val_cases: Sequence[LesionCase],
    settings: LocalizeSettings,
    evaluate: EvaluateSettings,
) -> LesionScores:
    """Score the heatmaps of one model.

    MetricError where no slide can be scored, or cases do not belong together.
    """
    _check_together(test_cases, val_cases)
    left_out = tuple((case.slide, case.refused) for case in (*test_cases, *val_cases) if case.refused)
    cases = [case for case in test_cases if not case.refused]
    if not cases:
        listed = listing(f"{slide}: {why}" for slide, why in left_out)
        raise MetricError(
            f"none of {len(test_cases)} heatmaps can be scored",
            listed or "there is no heatmap of a test slide",
            "Localize",
            code="no-scored-heatmaps",
        )
    threshold = choose_threshold(val_cases, settings)
    scored = [_score_slide(case, threshold.value, settings.froc_frame) for case in cases]
    reasons: dict[str, str] = {}
    warnings = [f"{slide} takes no part in lesion scores: {why}" for slide, why in left_out]
    warnings += [f"{case.slide}: {text}" for case in cases for text in case.warnings]
    froc = attempt(reasons, "froc", lambda: metrics.froc(_FrocCases(cases, settings), CHALLENGE_LEVEL, CHALLENGE_MPP))
    if froc is not None:
        warnings += [_with_name(warning, cases) for warning in froc.warnings]
    num_positive = sum(bool(case.positive) for case in cases)
    if 0 < num_positive < FEW:
        warnings.append(f"limits rest on {num_positive} positive slides and are rough")
    tiles = [tiles for _, tiles in scored]
    detection, tumour = (np.concatenate([getattr(each, name) for each in tiles]) for name in ("detection", "tumour"))
    splits, split_of = np.unique([case.heatmap.prediction.split for case in cases], return_inverse=True)
    if len(splits) > 1:
        warnings.append(ONE_ORDER.format(len(splits)))
    folds = np.repeat(split_of, [len(each.tumour) for each in tiles])
    pooled = {
        name: attempt(reasons, f"pooled {name}", lambda score=score: score(tumour, detection, folds=folds))
        for name, score in (("auc", metrics.auc), ("average_precision", metrics.average_precision))
    }
    return LesionScores(
        slides=tuple(slide for slide, _ in scored),
        left_out=left_out,
        threshold=threshold,
        froc=froc,
        pooled=pooled,
        about=_about(cases[0].heatmap, settings),
        evaluate=evaluate,
        reasons=reasons,
        warnings=tuple(warnings),
    )


def _check_together(test_cases: Sequence[LesionCase], val_cases: Sequence[LesionCase]) -> None:
    names = [case.slide for case in (*test_cases, *val_cases)]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise MetricError(
            f"several heatmaps of {listing(twice)}",
            "a slide counts once, to choose or to evaluate",
            "Pass each slide once",
            code="repeated-slides",
        )
    kinds = {(case.heatmap.model, case.heatmap.kind, case.heatmap.scale, case.heatmap.gated,
             case.heatmap.prediction.shown) for case in (*test_cases, *val_cases)}  # fmt: skip
    if len(kinds) > 1:
        listed = listing(sorted(", ".join(map(str, one)) for one in kinds))
        raise MetricError(
            "heatmaps of different kinds",
            f"model, evidence, scale, gating and class are {listed}",
            "Localize all slides by one model with the same settings",
            code="mixed-heatmaps",
        )
    for cases, parts, what in ((test_cases, ("test", "new"), "evaluate"), (val_cases, ("val",), "choose a threshold")):
        wrong = [f"{case.slide} ({part})" for case in cases if (part := case.heatmap.prediction.part) not in parts]
        if wrong:
            raise MetricError(
                f"heatmaps of slides that may not {what}: {listing(wrong)}",
                "a model is evaluated on slides that neither trained it nor chose its threshold",
                "Pass heatmaps of test slides to evaluate, of validation slides to choose the threshold",
                code="wrong-split",
            )


def _about(heatmap: Heatmap, settings: LocalizeSettings) -> Json:
    return {
        "model": heatmap.model,
        "method": heatmap.method,
        "mapped": heatmap.kind,
        "scale": heatmap.scale,
        "gated": heatmap.gated,
        "shown": heatmap.prediction.shown,
        "froc_frame": settings.froc_frame,
        "point_radius_um": settings.point_radius_um,
        "point_min": settings.point_min,
        "tumour_share": TUMOUR_SHARE,
        "normal_share": NORMAL_SHARE,
    }


def _with_name(warning: str, cases: Sequence[LesionCase]) -> str:
    """A warning of `metrics.froc`, which numbers its cases, with the slide's name."""
    number, _, rest = warning.removeprefix("case ").partition(":")
    return f"{cases[int(number)].slide}:{rest}"
