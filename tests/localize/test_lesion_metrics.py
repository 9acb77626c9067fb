"""Maps beside annotations: against shapely's areas, slow loops over pixels and pairs, and MONAI's FROC."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import math
import sys
import types
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import shapely
from scipy import ndimage

from helpers.heatmaps import make_heatmap
from selfvitmil.annotations import Annotation, box_coverage, to_mask, write_annotations
from selfvitmil.cohort.table import SlideRow
from selfvitmil.errors import AnnotationError, ArtefactError, CohortError, MetricError
from selfvitmil.localize.detection import find_points, highest_scoring_tile
from selfvitmil.localize.heatmap import write_heatmap
from selfvitmil.localize.lesion_metrics import (
    ONE_ORDER,
    THRESHOLDS,
    LesionCase,
    choose_threshold,
    common_cases,
    lesion_case,
    score_lesions,
)
from selfvitmil.localize.lesion_results import (
    SCORES,
    FrocDraws,
    compare_lesions,
    draw_froc,
    froc_curve,
    froc_figure,
    lesion_cells,
    lesion_notes,
    write_lesion_scores,
    write_lesion_table,
)
from selfvitmil.metrics import FPS, CaseDetections, wilson
from selfvitmil.metrics.detection import _curve, _sensitivity_at
from selfvitmil.settings import EvaluateSettings, LocalizeSettings

SETTINGS = LocalizeSettings()
EVALUATE = EvaluateSettings(bootstrap=200)


def outline(*boxes: tuple[float, float, float, float], group: str = "Tumor", tile: float = 448.0):
    """Rectangles (column, row, columns, rows) in tiles, as annotations."""
    return tuple(
        Annotation(f"{number}", group, tile * np.array([(x, y), (x + w, y), (x + w, y + h), (x, y + h)]))
        for number, (x, y, w, h) in enumerate(boxes)
    )


def case(
    seed: int, found=(4, 3, 5, 3), truth=((4.2, 3.3, 4.6, 3.0),), part: str = "test", slide: str = "", **changes
) -> LesionCase:
    """A slide with a lesion at `truth` that the map has at `found`, or a negative slide where `truth` is empty."""
    heatmap = make_heatmap(14, 11, found, seed=seed, slide=slide or f"s{seed}")
    heatmap = replace(heatmap, prediction=replace(heatmap.prediction, part=part))
    return LesionCase(heatmap, outline(*truth) if truth else None, **changes)


def blob(seed: int, part: str = "test", stride: float = 1.0, mpp: float = 0.25, **changes) -> LesionCase:
    """A slide with two smooth lesions of odd shape and a map that knows them roughly; tiles may overlap."""
    rng = np.random.default_rng(seed)
    extent = 112 / mpp
    columns, rows = round(13 / stride), round(10 / stride)
    y, x = (axis.ravel() for axis in np.mgrid[:rows, :columns])
    coords = np.round(np.stack([x, y], axis=1) * extent * stride).astype(np.int64)
    size = tuple((coords.max(axis=0) + math.ceil(extent) + 1).tolist())
    rings = []
    for centre in ((3.5, 4.0), (9.0, 6.0)):
        angle = np.linspace(0, 2 * np.pi, 40, endpoint=False)
        radius = rng.uniform(1.4, 2.6) * (1 + 0.3 * np.sin(3 * angle + rng.uniform(0, 6)))
        rings.append(extent * (np.array(centre) + radius[:, None] * np.stack([np.cos(angle), np.sin(angle)], axis=1)))
    truth = tuple(Annotation(f"{k}", "Tumor", ring) for k, ring in enumerate(rings))
    share = box_coverage(truth, np.concatenate([coords, coords + extent], axis=1))
    score = np.clip(share + rng.normal(0, 0.35, len(share)), 0, 1).astype(np.float32)
    base = make_heatmap(1, 1, None, slide=f"s{seed}")
    frame = replace(base.frame, slide_mpp=mpp, size_l0=size, extent_l0=extent, stride_l0=extent * stride)
    told = {"coords_l0": coords, "score": score, "detection": score * np.float32(0.9), "columns": {}, "annotated": None}
    prediction = replace(base.prediction, part=part)
    return LesionCase(replace(base, frame=frame, prediction=prediction, **told, **changes), truth)


def negative(seed: int, called: bool = True, **changes) -> LesionCase:
    plain = case(seed, found=None, truth=(), **changes)
    prediction = plain.heatmap.prediction
    if not called:
        prediction = replace(prediction, decision="normal", probability=(0.1,))
    detection = plain.heatmap.score * np.float32(prediction.shown_probability)
    return LesionCase(replace(plain.heatmap, prediction=prediction, detection=detection))


def union_of(annotations):
    return shapely.union_all([shapely.Polygon(one.polygon) for one in annotations])


def marked(lesion: LesionCase, threshold: float, edge: float):
    centres = lesion.heatmap.centres_l0[lesion.heatmap.score >= np.float32(threshold)]
    return shapely.union_all(shapely.box(*(centres - edge / 2).T, *(centres + edge / 2).T))


# ---------------------------------------------------------------------------------------------------- areas


@pytest.mark.parametrize("stride", [1.0, 0.5])
def test_areas_are_those_of_shapely(stride):
    """Where tiles overlap, each stands for the square that is nearer to its centre than to others'."""
    lesion = blob(0, stride=stride)
    frame, threshold = lesion.heatmap.frame, 0.6
    tumour, mm2 = union_of(lesion.annotations), frame.slide_mpp**2 / 1e6
    found = marked(lesion, threshold, frame.stride_l0)
    scores = score_lesions([lesion], [], LocalizeSettings(lesion_threshold=threshold), EVALUATE)
    (slide,) = scores.slides
    assert slide.tumour_mm2 == pytest.approx(tumour.area * mm2)
    assert slide.marked_mm2 == pytest.approx(found.area * mm2)
    assert slide.covered_mm2 == pytest.approx(tumour.intersection(found).area * mm2)
    assert slide.false_mm2 == pytest.approx(found.difference(tumour).area * mm2)
    assert slide.dice == pytest.approx(2 * tumour.intersection(found).area / (tumour.area + found.area))
    everything = marked(lesion, 0.0, frame.stride_l0)
    assert slide.reachable_mm2 == pytest.approx(tumour.intersection(everything).area * mm2)
    assert slide.normal_mm2 == pytest.approx(everything.difference(tumour).area * mm2)
    value = {name: None if one is None else one.value for name, one in scores.intervals.items()}
    assert value["coverage"] == pytest.approx(tumour.intersection(found).area / tumour.area)
    assert value["false_share_positive"] == pytest.approx(
        found.difference(tumour).area / everything.difference(tumour).area
    )
    assert value["false_mm2_negative"] is None


def test_tumour_where_no_tile_lies_counts_as_missed():
    full = case(0, found=(0, 0, 4, 4), truth=((0, 0, 4, 4),))
    kept = ~((full.heatmap.grid < 2).all(axis=1))
    fields = {name: getattr(full.heatmap, name)[kept] for name in ("coords_l0", "score", "detection")}
    holed = LesionCase(replace(full.heatmap, columns={}, annotated=None, **fields), full.annotations)
    for lesion, coverage in ((full, 1.0), (holed, 12 / 16)):
        (slide,) = score_lesions([lesion], [], SETTINGS, EVALUATE).slides
        assert slide.covered_mm2 / slide.tumour_mm2 == pytest.approx(coverage)


def test_excluded_tissue_is_no_tumour():
    plain = case(0, found=(4, 3, 4, 4), truth=((4, 3, 4, 4),))
    holed = LesionCase(plain.heatmap, plain.annotations + outline((5, 4, 2, 2), group="Exclusion"))
    (slide,) = score_lesions([holed], [], SETTINGS, EVALUATE).slides
    assert slide.tumour_mm2 == pytest.approx(12 * 0.112**2)
    assert slide.false_mm2 == pytest.approx(4 * 0.112**2)
    assert slide.normal_tiles == 14 * 11 - 12


def test_scores_over_slides_by_hand():
    """Two positive and three negative slides whose areas are whole numbers of tiles."""
    tile = 0.112**2
    cases = [
        case(0, found=(4, 3, 4, 3), truth=((4, 3, 4, 3),)),  # 12 of 12 covered, no false
        case(1, found=(4, 3, 4, 3), truth=((6, 3, 4, 3),)),  # 6 of 12 covered, 6 false
        negative(2),
        negative(3, called=False),
        case(4, found=(0, 0, 3, 2), truth=(), positive=False),  # 6 tiles false, called positive
        case(5, found=(0, 0, 2, 2), truth=(), positive=False),
    ]
    cases[5] = LesionCase(
        replace(cases[5].heatmap, prediction=replace(cases[5].heatmap.prediction, decision="normal")), positive=False
    )
    scores = score_lesions(cases, [], SETTINGS, EVALUATE)
    value = {name: one.value for name, one in scores.intervals.items() if one is not None}
    assert value["coverage"] == pytest.approx(0.75)
    assert value["coverage_pooled"] == pytest.approx(18 / 24)
    assert value["dice"] == pytest.approx((1 + 0.5) / 2)
    assert value["lesions_touched"] == 1
    assert value["false_mm2_positive"] == pytest.approx(3 * tile)
    assert value["false_share_positive"] == pytest.approx(6 / (2 * (154 - 12)))
    assert value["false_mm2_negative"] == pytest.approx((6 + 4) * tile / 4)
    assert value["false_share_negative"] == pytest.approx(10 / (4 * 154))
    assert value["called_mm2_negative"] == pytest.approx(6 * tile / 4)
    assert scores.intervals["coverage"].low == pytest.approx(0.5)
    assert scores.intervals["coverage"].high == pytest.approx(1.0)


# ---------------------------------------------------------------------------------------------------- threshold


def test_threshold_is_the_best_of_validation_by_a_loop():
    val = [blob(seed, part="val") for seed in (1, 2, 3)]
    means = []
    for threshold in THRESHOLDS:
        dice = []
        for lesion in val:
            tumour = union_of(lesion.annotations)
            found = marked(lesion, threshold, lesion.heatmap.frame.stride_l0)
            dice.append(2 * tumour.intersection(found).area / (tumour.area + found.area))
        means.append(np.mean(dice))
    chosen = choose_threshold(val, SETTINGS)
    assert max(means) == pytest.approx(chosen.val_dice)
    assert means[list(THRESHOLDS).index(chosen.value)] == pytest.approx(max(means))
    assert chosen.words == "largest mean Dice over 3 annotated validation slides"
    assert score_lesions([blob(9)], val, SETTINGS, EVALUATE).threshold == chosen


def test_of_equal_thresholds_the_middle_one():
    """All between 0.3, the highest outside, and 0.8, the lowest inside, mark the same tiles."""
    exact = case(0, found=(4, 3, 5, 3), truth=((4, 3, 5, 3),), part="val")
    inside = exact.heatmap.annotated > 0
    low, high = exact.heatmap.score[~inside].max(), exact.heatmap.score[inside].min()
    best = [threshold for threshold in THRESHOLDS if low < threshold <= high]
    assert choose_threshold([exact], SETTINGS).value == best[len(best) // 2]


def test_without_outlined_validation_slides_the_threshold_is_the_setting_and_says_so():
    settings = LocalizeSettings(lesion_threshold=0.7)
    for val in ([], [negative(1, part="val")], [case(2, truth=(), positive=True, part="val")]):
        chosen = choose_threshold(val, settings)
        assert (chosen.value, chosen.val_dice) == (0.7, None)
        assert chosen.words == "localize.lesion_threshold 0.7, as no annotated validation slide has a heatmap"
    nowhere = case(3, part="val")
    nowhere = LesionCase(replace(nowhere.heatmap, score=np.zeros(154, np.float32)), nowhere.annotations)
    assert "mark no annotated tumour" in choose_threshold([nowhere], settings).words


# ---------------------------------------------------------------------------------------------------- tiles


def pair_auc(label, score):
    """Pairs one by one."""
    wins = [(a > b) + 0.5 * (a == b) for a in score[label] for b in score[~label]]
    return float(np.mean(wins))


def step_ap(label, score):
    """Precision at each tile that is tumour, ties counted together."""
    return float(np.mean([label[score >= value].mean() for value in score[label]]))


def test_tile_scores_by_pairs_and_steps():
    lesions = [blob(4), blob(5), negative(6)]
    scores = score_lesions(lesions, [], SETTINGS, EVALUATE)
    labels, detections, aucs, aps = [], [], [], []
    for lesion, slide in zip(lesions, scores.slides, strict=True):
        boxes = shapely.box(*lesion.heatmap.boxes_l0.T)
        share = shapely.area(shapely.intersection(boxes, union_of(lesion.annotations or ()))) / shapely.area(boxes)
        known = (share >= 0.5) | (share < 0.01)
        label, score = share[known] >= 0.5, lesion.heatmap.score[known]
        assert (slide.tumour_tiles, slide.normal_tiles) == (label.sum(), (~label).sum())
        assert slide.between_tiles == (~known).sum()
        labels.append(label)
        detections.append(lesion.heatmap.detection[known])
        if label.any():
            aucs.append(pair_auc(label, score))
            aps.append(step_ap(label, score))
    assert scores.intervals["tile_auc"].value == pytest.approx(np.mean(aucs))
    assert scores.intervals["tile_ap"].value == pytest.approx(np.mean(aps))
    label, detection = np.concatenate(labels), np.concatenate(detections)
    assert scores.pooled["auc"] == pytest.approx(pair_auc(label, detection))
    assert scores.pooled["average_precision"] == pytest.approx(step_ap(label, detection))
    told = scores.to_json()["tiles"]
    assert told["between"] > 0
    assert told["tumour"] == label.sum()


def test_tiles_of_different_models_are_ranked_within_splits_and_froc_warns():
    def of_split(lesion: LesionCase, split: str, factor: float) -> LesionCase:
        heatmap = lesion.heatmap
        prediction = replace(heatmap.prediction, split=split)
        detection = heatmap.detection * np.float32(factor)
        return LesionCase(replace(heatmap, prediction=prediction, detection=detection), lesion.annotations)

    lesions = [blob(seed) for seed in (1, 2, 3)]
    splits = ("fold0", "fold1", "fold1")
    alike, dimmer = (
        score_lesions([of_split(*one) for one in zip(lesions, splits, factors, strict=True)], [], SETTINGS, EVALUATE)
        for factors in ((1.0, 1.0, 1.0), (1.0, 0.25, 0.25))
    )
    assert alike.pooled["auc"] is not None
    assert dimmer.pooled == pytest.approx(alike.pooled)
    parts = [score_lesions(some, [], SETTINGS, EVALUATE) for some in (lesions[:1], lesions[1:])]
    pairs = [sum(s.tumour_tiles for s in one.slides) * sum(s.normal_tiles for s in one.slides) for one in parts]
    assert alike.pooled["auc"] == pytest.approx(np.average([one.pooled["auc"] for one in parts], weights=pairs))
    assert ONE_ORDER.format(2) in alike.warnings
    assert not any("one order" in text for one in parts for text in one.warnings)


def test_hit_rate_of_the_hottest_tile():
    right = case(0)
    wrong = case(1, found=(0, 0, 2, 2))
    brushed = case(2, found=(4, 3, 1, 1), truth=((4.8, 3.0, 4, 4),))  # a fifth of the tile is outlined
    scores = score_lesions([right, wrong, brushed, negative(3)], [], SETTINGS, EVALUATE)
    assert [slide.hit for slide in scores.slides] == [True, False, True, None]
    assert [slide.hit_half for slide in scores.slides] == [True, False, False, None]
    assert scores.intervals["hit_rate"] == wilson(2, 3)
    assert scores.intervals["hit_rate_half"] == wilson(1, 3)


def test_hottest_of_equal_scores_is_the_one_with_most_behind_it():
    score = np.array([0.2, 1, 1, 1], np.float32)
    heatmap = replace(make_heatmap(2, 2, None), score=score, columns={"attention": score * [9, 1, 3, 2]})
    assert highest_scoring_tile(heatmap) == 2


def test_a_map_that_points_nowhere_hits_nothing():
    plain = case(0)
    blank = np.zeros(154, np.float32)
    flat = LesionCase(replace(plain.heatmap, score=blank, detection=blank), plain.annotations)
    scores = score_lesions([flat], [], SETTINGS, EVALUATE)
    assert (scores.slides[0].hit, scores.slides[0].touched) == (False, 0)
    assert scores.froc.score == 0


# ---------------------------------------------------------------------------------------------------- lesions, FROC


def slow_detections(lesion: LesionCase, settings: LocalizeSettings, pixel_um: float, mpp: float):
    """Mask, lesions and points of a positive slide at `pixel_um`, whatever the slide's own frame, by whole arrays."""
    frame = lesion.heatmap.frame
    scale = frame.slide_mpp / mpp  # as if its pixels were those of the challenge
    size = tuple(math.ceil(edge * scale) for edge in frame.size_l0)
    moved = [replace(one, polygon=one.polygon * scale) for one in lesion.annotations]
    mask = to_mask(moved, size, mpp, pixel_um)
    grown = ndimage.distance_transform_edt(~mask) < 75 / (0.243 * 32 * 2)
    labels, _ = ndimage.label(ndimage.binary_fill_holes(grown), np.ones((3, 3)))
    points = find_points(lesion.heatmap, settings.point_radius_um, settings.point_min)
    points[:, 1:] *= scale
    return mask, labels, points


@pytest.fixture
def monai_froc(monkeypatch):
    """MONAI's FROC file alone: the whole of MONAI takes longer to import than all else here takes to run."""
    found = importlib.util.find_spec("monai")
    assert found is not None
    assert found.origin is not None
    config = types.ModuleType("monai.config")
    config.NdarrayOrTensor = object  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "monai", types.ModuleType("monai"))
    monkeypatch.setitem(sys.modules, "monai.config", config)
    spec = importlib.util.spec_from_file_location("froc", Path(found.origin).parent / "metrics" / "froc.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def long_axis(spots):
    return 4 * math.sqrt(np.linalg.eigvalsh(np.cov(spots, bias=True))[-1])


@pytest.mark.parametrize("frame", ["microns", "challenge"])
def test_froc_agrees_with_monai(frame, monai_froc):
    """MONAI takes lesions and points as they are: the mask and its lesions are made here, from the definition.

    Both leave out the smallest threshold. MONAI would compare a float64 with a lesion's float32 as they are, ours in
    float32; probabilities here are of float32, so it makes no difference.
    """
    settings = LocalizeSettings(froc_frame=frame, point_radius_um=150, point_min=0.2)
    mpps = (0.25, 0.22, 0.5)
    lesions = [blob(seed, mpp=mpp) for seed, mpp in zip((0, 1, 2), mpps, strict=True)]
    normal = [negative(7), negative(8, called=False)]
    scores = score_lesions([*lesions, *normal], [], settings, EVALUATE)
    false, true, num_targets = [], [], 0
    for lesion, mpp in zip(lesions, mpps, strict=True):
        own = 0.243 if frame == "microns" else mpp
        _, labels, points = slow_detections(lesion, settings, own * 32, own)
        axes = [long_axis(np.argwhere(labels == label).T) for label in range(1, labels.max() + 1)]
        itc = [label for label, axis in enumerate(axes, start=1) if axis < 275 / (0.243 * 32)]
        found = monai_froc.compute_fp_tp_probs(
            points[:, 0], points[:, 2], points[:, 1], labels, itc, resolution_level=5
        )
        false.append(found[0])
        true.append(found[1])
        num_targets += found[2]
    false += [find_points(one.heatmap, 150, 0.2)[:, 0] for one in normal]
    curve = monai_froc.compute_froc_curve_data(np.concatenate(false), np.concatenate(true), num_targets, 5)
    assert scores.froc.score == pytest.approx(monai_froc.compute_froc_score(*curve), abs=1e-12)
    assert sum(one.num_lesions for one in scores.froc.cases) == num_targets
    fps, sensitivity = froc_curve(scores.froc)
    np.testing.assert_allclose(
        np.interp(np.linspace(0, 12, 50), fps, sensitivity),
        np.interp(np.linspace(0, 12, 50), curve[0][::-1], curve[1][::-1]),
    )


def test_frames_differ_where_pixels_are_not_the_challenges():
    """A lesion of 3 x 2 tiles of 112 um is grown 411 um long in truth; read at 0.243 um a pixel of 0.5 um halves it."""
    plain = case(0, found=(4, 3, 3, 2), truth=((4, 3, 3, 2),))
    coarse = replace(
        plain.heatmap,
        coords_l0=plain.heatmap.coords_l0 // 2,
        frame=replace(plain.heatmap.frame, slide_mpp=0.5, extent_l0=224.0, stride_l0=224.0, size_l0=(3136, 2464)),
    )
    lesion = LesionCase(coarse, outline((4, 3, 3, 2), tile=224.0))
    (in_microns,) = score_lesions([lesion], [], LocalizeSettings(froc_frame="microns"), EVALUATE).slides
    in_pixels = score_lesions([lesion], [], LocalizeSettings(froc_frame="challenge"), EVALUATE)
    assert (in_microns.lesions, in_microns.itc, in_microns.touched) == (1, 0, 1)
    assert (in_pixels.slides[0].lesions, in_pixels.slides[0].itc, in_pixels.slides[0].itc_touched) == (0, 1, 1)
    assert in_pixels.froc is None
    assert "a lesion of 0.2 mm or more" in in_pixels.to_json()["reasons"]["froc"]


def dimmed(lesion: LesionCase, *, right: bool) -> LesionCase:
    """With lower scores on one side of the slide."""
    heatmap = lesion.heatmap
    dim = (heatmap.centres_l0[:, 0] > heatmap.frame.size_l0[0] / 2) == right
    return LesionCase(replace(heatmap, score=np.where(dim, heatmap.score / 2, heatmap.score)), lesion.annotations)


@pytest.mark.parametrize("stride", [1.0, 0.5])
def test_lesions_touched_by_a_loop_over_pixels(stride):
    settings = LocalizeSettings(lesion_threshold=0.97)
    lesions = [dimmed(blob(seed, stride=stride), right=seed % 2 == 0) for seed in range(4)]
    scores = score_lesions(lesions, [], settings, EVALUATE)
    counts = []
    for lesion in lesions:
        mask, labels, _ = slow_detections(lesion, settings, 0.243 * 32, 0.243)
        heatmap = lesion.heatmap
        touched = set()
        for y, x in np.argwhere(mask):
            place = (np.array([x, y]) + 0.5) * 0.243 * 32 / heatmap.frame.slide_mpp
            away = np.abs(heatmap.centres_l0 - place).max(axis=1)
            nearest = int(np.argmin(away))
            if away[nearest] <= heatmap.frame.stride_l0 / 2 + 1 and heatmap.score[nearest] >= 0.97:
                touched.add(int(labels[y, x]))
        counts.append(len(touched))
    assert [slide.touched for slide in scores.slides] == counts
    assert 0 < sum(counts) < sum(slide.lesions for slide in scores.slides)


def random_detections(rng, num_cases: int, most: int):
    """Slides with a few lesions, one of them perhaps isolated tumour cells, or with none; scores with ties."""
    found = []
    for _ in range(num_cases):
        scores = (rng.random(rng.integers(0, 4)).round(1) * (rng.random() < 0.7)).astype(np.float32)
        itc = (1,) if len(scores) > 1 and rng.random() < 0.3 else ()
        if itc:
            scores[0] = 0
        found.append(CaseDetections(scores, itc, np.float32(rng.random(rng.integers(0, most))).astype(np.float64)))
    return found


@pytest.mark.parametrize(("seed", "most"), [(0, 8), (1, 8), (2, 60), (3, 400), (4, 400)])
def test_draws_of_slides_are_the_froc_of_repeated_slides(seed, most):
    """Also where a slide has more false positives than matter, and most are left out."""
    rng = np.random.default_rng(seed)
    cases = random_detections(rng, 7, most)
    cases[0] = CaseDetections(np.array([0.5, 0.9], np.float32), (), cases[0].false_positives)
    weights = rng.integers(0, 3, size=(40, 7))
    weights[:, 0] = np.maximum(weights[:, 0], 1)
    draws = FrocDraws(cases, int(weights.sum(axis=1).max()))
    expected = [
        _sensitivity_at(*_curve([one for one, times in zip(cases, row, strict=True) for _ in range(times)])).mean()
        for row in weights.tolist()
    ]
    np.testing.assert_allclose(draws(weights.astype(np.float64)), expected)
    without = np.ones((1, 7)) * [one.num_lesions == 0 for one in cases]
    assert np.isnan(draws(without)).all()


def test_limits_of_froc_are_those_of_slides_drawn_one_by_one():
    lesions = [blob(seed) for seed in range(6)] + [negative(seed) for seed in (10, 11, 12, 13)]
    scores = score_lesions(lesions, [], LocalizeSettings(point_min=0.3), EvaluateSettings(bootstrap=2000))
    rng, cases = np.random.default_rng(1), scores.froc.cases
    kinds = [[case for case in cases if (case.num_lesions > 0) == positive] for positive in (True, False)]
    drawn = [
        _sensitivity_at(*_curve([kind[k] for kind in kinds for k in rng.integers(len(kind), size=len(kind))])).mean()
        for _ in range(2000)
    ]
    low, high = np.quantile(drawn, [0.025, 0.975])
    assert scores.intervals["froc"].value == scores.froc.score
    assert scores.intervals["froc"].low == pytest.approx(low, abs=0.05)
    assert scores.intervals["froc"].high == pytest.approx(high, abs=0.05)


def test_patients_are_drawn_whole():
    """Three patients, one of them with all slides that are covered by half: means of all resamples are of thirds."""
    cases = [
        case(0, found=(4, 3, 4, 3), truth=((4, 3, 4, 3),), patient="a"),
        case(1, found=(4, 3, 4, 3), truth=((6, 3, 4, 3),), patient="b"),
        case(2, found=(4, 3, 4, 3), truth=((6, 3, 4, 3),), patient="b"),
    ]
    place = list(SCORES).index("coverage")
    drawn = np.unique(score_lesions(cases, [], SETTINGS, EVALUATE).drawn[:, place].round(6))
    np.testing.assert_allclose(drawn, [0.5, (1 + 2 * 0.5) / 3, 1.0], atol=1e-6)


# ---------------------------------------------------------------------------------------------------- who is judged


def test_slides_that_cannot_be_judged_are_left_out_and_named():
    cases = [
        case(0),
        case(1, truth=(), positive=True),
        case(2, complete=False),
        case(3, truth=((1, 1, 2, 2),), positive=False, file="s3.xml"),
        LesionCase(case(4).heatmap, outline((1, 1, 2, 2), group="Lymphocytes"), file="s4.xml"),
        negative(5),
    ]
    scores = score_lesions(cases, [], SETTINGS, EVALUATE)
    assert [slide.slide for slide in scores.slides] == ["s0", "s5"]
    assert dict(scores.left_out) == {
        "s1": "it is positive and has no annotation",
        "s2": "not all of its lesions are annotated",
        "s3": "s3.xml has tumour, but its label is not tumor",
        "s4": "it is positive and s4.xml has no tumour (groups: Lymphocytes)",
    }
    told = scores.to_json()
    assert told["slides"]["positive"] == told["slides"]["negative"] == 1
    assert [one["slide"] for one in told["slides"]["left_out"]] == ["s1", "s2", "s3", "s4"]
    for slide, why in scores.left_out:
        assert f"{slide} takes no part in lesion scores: {why}" in scores.warnings
    rows = scores.rows()
    assert [(row["slide"], bool(row["left_out"])) for row in rows] == [
        ("s0", False), ("s5", False), ("s1", True), ("s2", True), ("s3", True), ("s4", True)
    ]  # fmt: skip
    assert len(scores.froc.cases) == 2


def test_nothing_to_judge():
    with pytest.raises(
        MetricError, match=r"none of 1 heatmaps can be scored, s1: it is positive and has no annotation"
    ):
        score_lesions([case(1, truth=(), positive=True)], [], SETTINGS, EVALUATE)
    with pytest.raises(MetricError, match="there is no heatmap of a test slide"):
        score_lesions([], [], SETTINGS, EVALUATE)


def test_annotations_outside_the_slide_are_refused_by_name():
    for box, share in (((13.0, 3.0, 3.0, 2.0), 50), ((40.0, 40.0, 2.0, 2.0), 100), ((-2.0, 1.0, 4.0, 2.0), 50)):
        with pytest.raises(AnnotationError, match=rf"other\.xml: {share}% of its points lie outside") as caught:
            case(0, truth=(box,), file="other.xml")
        assert "6272 x 4928 pixels" in str(caught.value)
    assert case(0, truth=((13.0, 3.0, 1.1, 2.0),)).warnings == ()  # a pen that slips over the edge
    assert case(0, truth=()).warnings == ()


def test_the_part_of_an_outline_outside_the_slide_is_told_and_counts_nowhere():
    """One point of 21 lies far left of the slide: the same outline cut off at the edge gives the same numbers."""
    heatmap = case(0).heatmap
    tile = heatmap.frame.extent_l0
    right = np.stack([np.full(20, 3.0), np.linspace(1, 4, 20)], axis=1) * tile
    tip = np.array([[-3.0, 2.5]]) * tile
    edge = np.array([[0.0, 3.25], [0.0, 1.75]]) * tile  # where the lines to the tip cross the left edge
    far, cut = (
        LesionCase(heatmap, (Annotation("a", "tumor", np.concatenate([right, end])),), file="a.xml")
        for end in (tip, edge)
    )
    told, expected = (score_lesions([each], [], SETTINGS, EVALUATE) for each in (far, cut))
    assert "s0: 4.8% of the points in a.xml lie outside the slide" in told.warnings
    assert not any("outside" in text for text in expected.warnings)
    assert told.csv() == expected.csv()
    assert told.froc is not None
    assert expected.froc is not None
    np.testing.assert_array_equal(told.froc.sensitivity_at, expected.froc.sensitivity_at)


def test_cases_that_do_not_belong_together():
    def fails(match, test, val=()):
        with pytest.raises(MetricError, match=match):
            score_lesions(test, val, SETTINGS, EVALUATE)

    fails("several heatmaps of s0", [case(0), case(0)])
    fails("several heatmaps of s0", [case(0)], [case(0, part="val")])
    fails(r"may not evaluate: s1 \(train\)", [case(0), case(1, part="train")])
    fails(r"may not choose a threshold: s1 \(test\)", [case(0)], [case(1)])
    other = case(1)
    fails("heatmaps of different kinds", [case(0), LesionCase(replace(other.heatmap, model="b"), other.annotations)])
    shown = replace(other.heatmap.prediction, shown="normal")
    fails(
        "heatmaps of different kinds",
        [case(0), LesionCase(replace(other.heatmap, prediction=shown), other.annotations)],
    )


def test_case_of_a_cohorts_row(tmp_path: Path):
    plain = case(0, slide="test_114")
    map_file, drawn = tmp_path / "test_114.h5", tmp_path / "test_114.xml"
    write_heatmap(map_file, plain.heatmap, "x")
    write_annotations(drawn, plain.annotations)
    row = SlideRow("test_114", tmp_path / "a.svs", "tumor", "p7", "test", annotation=drawn)
    read = lesion_case(row, map_file)
    assert (read.positive, read.complete, read.patient, read.file) == (True, False, "p7", "test_114.xml")
    assert [one.polygon.tolist() for one in read.annotations] == [one.polygon.tolist() for one in plain.annotations]
    np.testing.assert_array_equal(read.heatmap.score, plain.heatmap.score)
    assert "not all" in read.refused
    assert lesion_case(replace(row, split="train"), map_file).refused == ""
    assert lesion_case(replace(row, label="normal", annotation=None), plain.heatmap).positive is False
    assert "has no annotation" in lesion_case(replace(row, annotation=None), plain.heatmap).refused
    with pytest.raises(CohortError, match="test_114: it has no label"):
        lesion_case(replace(row, label=None), map_file)
    with pytest.raises(ArtefactError, match="s9: its heatmap is of test_114"):
        lesion_case(replace(row, slide="s9"), map_file)
    write_annotations(drawn, outline((40, 40, 2, 2)))
    with pytest.raises(AnnotationError, match=r"test_114\.xml: 100% of its points lie outside"):
        lesion_case(row, map_file)


# ---------------------------------------------------------------------------------------------------- results


@pytest.fixture(scope="module")
def some():
    test = [blob(seed) for seed in range(3)] + [negative(seed) for seed in (10, 11)]
    return score_lesions(test, [blob(20, part="val")], SETTINGS, EVALUATE)


def test_json_and_csv_are_plain(some):
    told = json.loads(json.dumps(some.to_json(), allow_nan=False))
    assert list(told["scores"]) == list(SCORES)
    froc = told["scores"]["froc"]
    assert froc["low"] <= froc["value"] == some.froc.score <= froc["high"]
    assert list(told["froc"]["sensitivity_at"].values()) == some.froc.sensitivity_at.tolist()
    assert told["threshold"]["validation_slides"] == ["s20"]
    assert told["reasons"] == {}
    assert any("3 positive slides and are rough" in warning for warning in told["warnings"])
    rows = list(csv.DictReader(io.StringIO(some.csv())))
    assert [row["slide"] for row in rows] == ["s0", "s1", "s2", "s10", "s11"]
    assert [row["hit"] for row in rows[3:]] == ["", ""]
    assert float(rows[1]["dice"]) == pytest.approx(some.slides[1].dice, rel=1e-5)


@pytest.mark.parametrize("kind", ["positive", "negative"])
def test_one_kind_of_slides_leaves_the_other_scores_out_with_reasons(kind):
    cases = [case(0), case(1)] if kind == "positive" else [negative(0), negative(1)]
    told = score_lesions(cases, [], SETTINGS, EVALUATE).to_json()
    json.dumps(told, allow_nan=False)
    missing = {name for name, found in told["scores"].items() if found is None}
    of_negative = {name for name in SCORES if name.endswith("negative")}
    assert missing == (of_negative if kind == "positive" else set(SCORES) - of_negative)
    assert missing <= set(told["reasons"])
    assert (told["froc"] is None) == (kind == "negative")


def test_curve_without_points_between_is_the_same_line(some):
    fps, sensitivity = froc_curve(some.froc)
    assert len(fps) < len(some.froc.fps_per_slide)
    at = np.linspace(0, some.froc.fps_per_slide.max(), 500)
    whole = np.interp(at, some.froc.fps_per_slide[::-1], some.froc.sensitivity[::-1])
    np.testing.assert_allclose(np.interp(at, fps, sensitivity), whole)
    np.testing.assert_allclose(np.interp(FPS, fps, sensitivity), some.froc.sensitivity_at)


# ---------------------------------------------------------------------------------------------------- side by side


def rival(lesion: LesionCase, noise: float) -> LesionCase:
    """The same slide by a model whose map is worse."""
    rng = np.random.default_rng(len(lesion.slide))
    score = np.clip(lesion.heatmap.score + rng.normal(0, noise, len(lesion.heatmap)), 0, 1).astype(np.float32)
    worse = replace(lesion.heatmap, model="vit_worse", score=score, detection=score * np.float32(0.9))
    return LesionCase(worse, lesion.annotations, positive=lesion.positive, patient=lesion.patient)


@pytest.fixture(scope="module")
def table():
    test = [blob(seed) for seed in range(6)] + [negative(seed) for seed in (10, 11, 12)]
    settings = LocalizeSettings(point_min=0.3)
    good = score_lesions(test, [], settings, EVALUATE)
    bad = score_lesions([rival(one, 0.6) for one in test], [], settings, EVALUATE)
    return compare_lesions({"dsmil": bad, "self-vit-mil": good, "again": good}, "dsmil")


def test_differences_are_paired(table):
    assert set(table.differences) == {"self-vit-mil", "again"}
    good, bad = table.scores["self-vit-mil"], table.scores["dsmil"]
    tests = table.differences["self-vit-mil"]
    for place, score in enumerate(SCORES):
        assert tests[score].interval.value == pytest.approx(good.values[place] - bad.values[place])
    # By hand for the mean coverage: the same slides drawn for both.
    place = list(SCORES).index("dice")
    gain = np.array([a.dice - b.dice for a, b in zip(good.slides, bad.slides, strict=True) if a.positive])
    drawn = np.random.default_rng(5).integers(6, size=(4000, 6))
    low, high = np.quantile(gain[drawn].mean(axis=1), [0.025, 0.975])
    assert tests["dice"].interval.low == pytest.approx(low, abs=0.03)
    assert tests["dice"].interval.high == pytest.approx(high, abs=0.03)
    assert tests["dice"].p_value == pytest.approx(2 / 201)
    assert tests["dice"].holm_p_value == pytest.approx(4 / 201)
    assert tests["tile_auc"].interval.low > 0


def test_a_model_beside_itself_differs_by_nothing(some):
    same = compare_lesions({"a": some, "b": some}, "a").differences["b"]
    assert all(test.interval.value == test.interval.low == test.interval.high == 0 for test in same.values())
    assert all(test.p_value == 1 for test in same.values())


def test_table_in_all_forms(table):
    header, *lines = table.cells()
    assert header[:2] == ["heatmaps of", "FROC [95 %]"]
    assert [line[0] for line in lines] == ["dsmil", "self-vit-mil", "again"]
    assert all(len(line) == len(header) for line in lines)
    assert lines[0][-3:] == ["-", "-", "-"]
    assert lines[1][2] == f"{table.scores['self-vit-mil'].intervals['coverage'].value:.3f}"
    text = table.markdown()
    assert text.splitlines()[2].count("|") == text.splitlines()[0].count("|") == len(header) + 1
    assert "6 positive and 3 negative test slides" in text
    assert "against dsmil" in text
    records = list(csv.DictReader(io.StringIO(table.csv())))
    assert float(records[1]["dice_p"]) == pytest.approx(2 / 201, rel=1e-5)
    assert records[0]["dice_difference"] == ""
    told = json.loads(json.dumps(table.to_json(), allow_nan=False))
    assert set(told["methods"]) == {"dsmil", "self-vit-mil", "again"}
    assert lesion_cells(told) == [header, *lines]
    assert lesion_notes(told) == table.notes()
    assert told["differences"]["again"]["dice"]["value"] == pytest.approx(
        float(records[2]["dice_difference"]), rel=1e-4
    )


def test_only_what_was_judged_alike_stands_side_by_side(some):
    other = score_lesions([blob(seed) for seed in range(3)], [], SETTINGS, EVALUATE)
    with pytest.raises(MetricError, match="heatmaps of a and of b were scored on different slides"):
        compare_lesions({"a": some, "b": other}, "a")
    with pytest.raises(MetricError, match="no heatmaps of the baseline 'mean'"):
        compare_lesions({"a": some}, "mean")


def test_cases_that_all_models_have():
    a, b = [case(0), case(1), case(2)], [case(2), case(0), case(3)]
    kept, warnings = common_cases({"a": a, "b": b})
    assert [one.slide for one in kept["a"]] == [one.slide for one in kept["b"]] == ["s0", "s2"]
    assert kept["b"][0] is b[1]
    assert warnings == ("a has no heatmap of s3: left out for all", "b has no heatmap of s1: left out for all")


# ---------------------------------------------------------------------------------------------------- figure, files


def test_figure_shows_every_curve_and_the_six_marks(table):
    axes = draw_froc(table.scores).axes[0]
    lines = {str(line.get_label()): line for line in axes.get_lines()}
    for name in table.scores:
        fps, sensitivity = froc_curve(table.scores[name].froc)
        x, y = lines[name].get_xdata(), lines[name].get_ydata()
        assert set(zip(fps, sensitivity, strict=True)) <= set(zip(x, y, strict=True))
        assert (np.diff(x) >= 0).all()
        at = [0.3, *FPS, 7.7]
        np.testing.assert_allclose(np.interp(at, x, y), np.interp(at, fps, sensitivity))
    assert [text.get_text() for text in axes.get_xticklabels()] == ["0", "1/4", "1/2", "1", "2", "4", "8"]
    marks = axes.transData.transform([(at, 0) for at in FPS])[:, 0]
    np.testing.assert_allclose(np.diff(marks), np.diff(marks)[0], rtol=0.01)


def test_figure_is_sound_repeatable_and_says_optimistic(table):
    text = froc_figure(table.scores, protocol="optimistic")
    assert text == froc_figure(table.scores, protocol="optimistic")
    words = " ".join("".join(element.itertext()) for element in ET.fromstring(text).iter())
    for word in ("OPTIMISTIC", "self-vit-mil", "6 positive and 3 negative slides", "lesions found"):
        assert word in words
    assert "OPTIMISTIC" not in froc_figure(table.scores)


def test_files(tmp_path: Path, some, table):
    assert write_lesion_scores(tmp_path / "one", some) == []
    names = {path.name for path in (tmp_path / "one").iterdir()}
    assert names == {"lesions.json", "lesion_slides.csv", "froc.svg"}
    assert json.loads((tmp_path / "one" / "lesions.json").read_text())["protocol"] == "honest"
    assert write_lesion_table(tmp_path / "all", table) == []
    assert {path.name for path in (tmp_path / "all").iterdir()} == {
        "lesions.json", "lesions.csv", "lesions.md", "froc.svg"
    }  # fmt: skip
    without = score_lesions([negative(0)], [], SETTINGS, EVALUATE)
    (note,) = write_lesion_scores(tmp_path / "one", without)
    assert note.startswith("froc.svg is not drawn: FROC of 1 slides, none of them has a lesion")
    assert not (tmp_path / "one" / "froc.svg").exists()
