"""FROC: the challenge's own numbers, a slow reading of its definition, and each of its rules on slides made by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import ndimage

from helpers.error_codes import has_code
from selfvitmil.errors import MetricError
from selfvitmil.metrics import FPS, froc, suppress_points
from selfvitmil.metrics.detection import evaluation_mask, major_axes

GOLDEN = Path(__file__).parents[1] / "golden" / "froc_official.npz"
PIXEL_UM = 0.243 * 32


def golden_cases():
    golden = np.load(GOLDEN)
    cases = [(golden[f"mask{i}"] if golden[f"tumor{i}"] else None, golden[f"points{i}"]) for i in range(8)]
    return golden, cases


def blank(width: int = 200, height: int = 150):
    return np.zeros((height, width), dtype=np.uint8)


def with_squares(*corners: tuple[int, int], size: int = 40):
    """A mask with square tumours at these (x, y): at 40 pixels (311 um) a side they are no isolated tumour cells."""
    mask = blank()
    for x, y in corners:
        mask[y : y + size, x : x + size] = 255
    return mask


def point(probability: float, x: float, y: float):
    """A point at the middle of mask pixel (x, y), in level-0 pixels."""
    return [probability, 32 * x + 16, 32 * y + 16]


# ------------------------------------------------------------------------------------------------ the golden numbers


def test_official_score_and_sensitivities():
    golden, cases = golden_cases()
    result = froc(cases)
    assert result.score == pytest.approx(float(golden["froc"]), abs=1e-12)
    np.testing.assert_allclose(result.sensitivity_at, golden["eval_sensitivity"], rtol=0, atol=1e-12)
    np.testing.assert_array_equal(golden["eval_fps"], FPS)


def test_official_detections_of_each_slide():
    golden, cases = golden_cases()
    for i, case in enumerate(froc(cases).cases):
        np.testing.assert_array_equal(case.lesion_scores, golden[f"tp{i}"])
        np.testing.assert_array_equal(case.false_positives, golden[f"fp{i}"])
        assert list(case.itc_labels) == list(golden[f"itc{i}"])
        assert case.num_lesions == golden[f"num_lesions{i}"]
        assert case.lesion_scores.dtype == np.float32


def test_official_curve_up_to_the_order_of_a_float32_tie():
    golden, cases = golden_cases()
    result = froc(cases)
    np.testing.assert_array_equal(result.sensitivity, golden["sensitivity"])
    # 0.215 is there as a lesion's float32 and as a false positive's float64; the program has their points swapped.
    differ = np.flatnonzero(result.fps_per_slide != golden["fps_per_slide"])
    assert differ.tolist() == [24, 25]
    np.testing.assert_array_equal(result.fps_per_slide[[25, 24]], golden["fps_per_slide"][[24, 25]])
    assert (np.diff(result.fps_per_slide) <= 0).all()


# ----------------------------------------------------------------------------------------------- the definition, slowly


def slow_labels(tumour, level, mpp_l0):
    """All pixels, all pairs: near enough to tumour; outside flooded from the border; pieces numbered row by row."""
    height, width = tumour.shape
    pixels = np.stack(np.indices(tumour.shape), axis=-1).reshape(-1, 2)
    gaps = np.linalg.norm(pixels[:, None] - pixels[tumour.ravel()][None], axis=2).min(axis=1)
    near = (gaps < 75 / (mpp_l0 * 2**level * 2)).reshape(height, width)

    def flood(starts, free, steps):
        seen, stack = set(starts), list(starts)
        while stack:
            y, x = stack.pop()
            for dy, dx in steps:
                there = (y + dy, x + dx)
                if 0 <= there[0] < height and 0 <= there[1] < width and free[there] and there not in seen:
                    seen.add(there)
                    stack.append(there)
        return seen

    edges = [(0, 1), (1, 0), (0, -1), (-1, 0)]
    border = [(y, x) for y in range(height) for x in range(width) if y in (0, height - 1) or x in (0, width - 1)]
    outside = flood([spot for spot in border if not near[spot]], ~near, edges)
    filled = np.array([[(y, x) not in outside for x in range(width)] for y in range(height)])
    labels = np.zeros((height, width), dtype=int)
    for y, x in np.argwhere(filled):
        if not labels[y, x]:
            number = labels.max() + 1
            for spot in flood([(y, x)], filled, [*edges, (1, 1), (1, -1), (-1, 1), (-1, -1)]):
                labels[spot] = number
    return labels


@pytest.mark.parametrize("seed", range(12))
def test_lesions_are_as_defined(seed):
    rng = np.random.default_rng(seed)
    height, width = rng.integers(12, 34, 2)
    field = ndimage.gaussian_filter(rng.normal(size=(height, width)), rng.uniform(0.5, 2))
    tumour = field > np.quantile(field, rng.uniform(0.8, 0.99))
    level, mpp_l0 = int(rng.integers(4, 8)), rng.uniform(0.2, 0.5)
    labels = evaluation_mask(tumour, level, mpp_l0)
    np.testing.assert_array_equal(labels, slow_labels(tumour, level, mpp_l0))
    for label, axis in enumerate(major_axes(labels), start=1):
        spots = np.argwhere(labels == label).T
        moments = np.cov(spots, bias=True) if spots.shape[1] > 1 else np.zeros((2, 2))
        assert axis == pytest.approx(4 * np.sqrt(np.linalg.eigvalsh(moments)[-1]), abs=1e-6)


def test_growing_in_boxes_equals_growing_the_whole_slide():
    rng = np.random.default_rng(0)
    tumour = ndimage.binary_dilation(rng.random((300, 400)) > 0.9995, iterations=6)
    whole = ndimage.distance_transform_edt(~tumour) < 75 / (PIXEL_UM * 2)
    expected, _ = ndimage.label(ndimage.binary_fill_holes(whole), np.ones((3, 3)))
    np.testing.assert_array_equal(evaluation_mask(tumour), expected)


def slow_curve(cases):
    """The challenge's loop over thresholds: floats of both widths, compared in the lesions' float32."""
    false = [p for case in cases for p in case.false_positives]
    true = [p for case in cases for p in case.lesion_scores]
    points = [
        (sum(p >= t for p in false) / len(cases), sum(p >= np.float32(t) for p in true))
        for t in sorted({float(p) for p in false + true})[1:]
    ]
    num_lesions = sum(case.num_lesions for case in cases)
    return np.array([(fps, hits / num_lesions) for fps, hits in [*points, (0, 0)]])


@pytest.mark.parametrize("seed", range(6))
def test_curve_and_score_against_the_loop(seed):
    rng = np.random.default_rng(seed)
    cases = []
    for _ in range(7):
        rows = [point(np.round(rng.random(), 1), *rng.integers(0, 150, 2)) for _ in range(rng.integers(0, 12))]
        mask = with_squares(*rng.integers(0, 110, (rng.integers(1, 4), 2)), size=int(rng.integers(10, 45)))
        cases.append((mask if rng.random() < 0.6 else None, rows))
    result = froc([*cases, (with_squares((100, 100)), [point(0.7, 110, 110), point(0.7, 5, 5)])])
    expected = slow_curve(result.cases)
    np.testing.assert_array_equal(np.stack([result.fps_per_slide, result.sensitivity], axis=1), expected)
    six = [np.interp(fps, expected[::-1, 0], expected[::-1, 1]) for fps in (0.25, 0.5, 1, 2, 4, 8)]
    assert result.score == pytest.approx(np.mean(six))


# --------------------------------------------------------------------------------------------------- rule after rule


@pytest.mark.parametrize(("gap", "lesions"), [(9, 1), (10, 2)])
def test_tumours_within_75_um_are_one_lesion(gap, lesions):
    """Columns `gap` pixels apart: 9 are 70 um, 10 are 78 um."""
    mask = with_squares((20, 20), (20 + 39 + gap, 20))
    case = froc([(mask, [point(0.9, 30, 30), point(0.4, 100, 100)])]).cases[0]
    assert case.num_lesions == lesions
    assert sorted(case.lesion_scores) == pytest.approx([0.0] * (lesions - 1) + [0.9])


def test_points_beside_a_tumour_hit_up_to_37_um():
    mask = with_squares((50, 50))
    rows = [point(0.9, 93, 60), point(0.8, 94, 60)]
    case = froc([(mask, rows)]).cases[0]
    assert case.lesion_scores.tolist() == [np.float32(0.9)]
    assert case.false_positives.tolist() == [0.8]


def test_isolated_tumour_cells_are_neither_found_nor_missed_nor_false():
    mask = with_squares((100, 80))
    mask[20:30, 20:30] = 255
    rows = [point(0.9, 25, 25), point(0.6, 110, 90), point(0.3, 5, 5)]
    result = froc([(mask, rows)])
    case = result.cases[0]
    assert case.itc_labels == (1,)
    assert case.num_lesions == 1
    assert case.lesion_scores.tolist() == [0.0, np.float32(0.6)]
    assert case.false_positives.tolist() == [0.3]
    assert result.sensitivity.max() == 1.0


@pytest.mark.parametrize(("length", "axis", "isolated"), [(23, 34.390138818, True), (24, 35.540546349, False)])
def test_isolated_tumour_cells_end_at_a_major_axis_of_275_um(length, axis, isolated):
    """A bar of one row, grown to 9 rows with round ends; axes from scikit-image 0.26; 275 um are 35.37 pixels."""
    mask = blank()
    mask[50, 50 : 50 + length] = 255
    assert major_axes(evaluation_mask(mask == 255)) == pytest.approx([axis], abs=1e-8)
    assert froc([(mask | with_squares((120, 80)), [])]).cases[0].num_lesions == (1 if isolated else 2)


def test_major_axis_of_known_shapes():
    labels = np.zeros((60, 80), dtype=np.int32)
    labels[2, 3:13] = 1
    labels[10, 10] = 2
    y, x = np.ogrid[:60, :80]
    labels[((x - 50) / 25.0) ** 2 + ((y - 35) / 10.0) ** 2 <= 1] = 3
    axes = major_axes(labels)
    # A row of n centres has variance (n^2 - 1) / 12; a full ellipse has its own axis.
    assert axes[:2] == pytest.approx([4 * np.sqrt(99 / 12), 0.0])
    assert axes[2] == pytest.approx(50, rel=0.02)


def test_holes_in_a_tumour_count_as_tumour():
    mask = with_squares((20, 20), size=80)
    mask[45:75, 45:75] = 0
    case = froc([(mask, [point(0.9, 60, 60)])]).cases[0]
    assert case.lesion_scores.tolist() == [np.float32(0.9)]
    assert not len(case.false_positives)


def test_a_bay_open_to_the_border_is_no_hole():
    mask = blank()
    mask[:80, :100] = 255
    mask[:60, 30:70] = 0
    assert froc([(mask, [point(0.9, 50, 20)])]).cases[0].false_positives.tolist() == [0.9]


def test_best_point_of_a_lesion_counts_once():
    rows = [point(0.5, 60, 60), point(0.9, 61, 60), point(0.7, 62, 60)]
    result = froc([(with_squares((50, 50), (130, 50)), rows)])
    assert result.cases[0].lesion_scores.tolist() == [np.float32(0.9), 0.0]
    assert result.sensitivity.tolist() == [0.5, 0.0]
    assert result.score == 0.5


def test_smallest_score_is_lost_when_all_lesions_are_hit():
    mask = with_squares((50, 50))
    alone = froc([(mask, [point(0.9, 60, 60)])])
    assert alone.fps_per_slide.tolist() == [0.0]
    assert alone.score == 0.0
    # A false positive below takes its place at the bottom, and the lesion is found.
    assert froc([(mask, [point(0.9, 60, 60), point(0.1, 5, 5)])]).score == 1.0


def test_false_positives_are_averaged_over_all_slides():
    tumour = (with_squares((50, 50), (130, 50)), [point(0.9, 60, 60), point(0.95, 5, 5)])
    normal = (None, [point(0.99, 10, 10), point(0.2, 11, 10)])
    result = froc([tumour, normal, (None, []), (None, np.empty((0, 3)))])
    np.testing.assert_allclose(result.fps_per_slide, [0.75, 0.5, 0.5, 0.25, 0.0])
    np.testing.assert_allclose(result.sensitivity, [0.5, 0.5, 0.0, 0.0, 0.0])
    np.testing.assert_allclose(result.sensitivity_at, [0.0, 0.5, 0.5, 0.5, 0.5, 0.5])
    assert result.score == pytest.approx(2.5 / 6)


def test_lesions_and_false_positives_of_equal_probability_leave_together():
    """0.7 rounds down to float32; compared in float64 the lesion would be lost one threshold too early."""
    mask = with_squares((50, 50), (130, 50))
    result = froc([(mask, [point(0.7, 60, 60), point(0.7, 5, 5), point(0.8, 5, 6)])])
    assert float(np.float32(0.7)) < 0.7
    points = list(zip(result.fps_per_slide, result.sensitivity, strict=True))
    assert points == [(2, 0.5), (2, 0.5), (1, 0.0), (0, 0.0)]


def test_slide_without_points_and_boolean_mask():
    assert froc([(with_squares((50, 50)) == 255, [])]).score == 0.0


def test_level_and_resolution_set_the_sizes():
    mask = with_squares((50, 50), (100, 50))
    assert froc([(mask, [])]).cases[0].num_lesions == 2
    assert froc([(mask, [])], level=3).cases[0].num_lesions == 1
    assert froc([(mask, [[0.9, 8 * 60, 8 * 60]])], level=3).cases[0].lesion_scores.tolist() == [np.float32(0.9)]


def test_mask_without_tumour_counts_as_normal_and_says_so():
    tumour = (with_squares((50, 50)), [point(0.9, 60, 60)])
    rows = [point(0.5, 10, 10)]
    empty, none = froc([tumour, (blank(), rows)]), froc([tumour, (None, rows)])
    assert empty.score == none.score
    assert empty.warnings == ("case 1: no tumour in its mask, scored as a normal slide",)
    assert none.warnings == ()


@pytest.mark.parametrize(
    ("cases", "text"),
    [
        ([], "FROC without slides"),
        ([(None, [[0.9, 1, 1]]), (None, [])], "FROC of 2 slides"),
        ([(with_squares((5, 5), size=3), [])], "a lesion of 0.2 mm or more"),
        ([(with_squares((50, 50)) // 255, [])], "case 0: the mask contains 1"),
        ([(None, []), (with_squares((50, 50)), [point(0.9, 200, 5)])], "case 1: 1 of 1 points are outside"),
        ([(with_squares((50, 50)), [[0.9, -1, 5]])], "outside the mask"),
        ([(with_squares((50, 50)), [[np.nan, 1, 1]])], "all finite"),
        ([(with_squares((50, 50)), [[-0.1, 1, 1]])], "no probability negative"),
        ([(with_squares((50, 50)), [[0.5, 1]])], "points of shape (1, 2)"),
        ([(np.zeros((4, 4, 3)), [])], "mask of shape (4, 4, 3)"),
    ],
)
def test_what_cannot_be_scored_is_said(cases, text):
    with pytest.raises(MetricError) as caught:
        froc(cases)
    assert text in str(caught.value)
    assert caught.value.how


def test_impossible_resolution_is_refused():
    with pytest.raises(MetricError, match="0 um/px"):
        froc([(with_squares((50, 50)), [])], mpp_l0=0)


# ------------------------------------------------------------------------------------------------ points from tiles


def slow_suppression(scores, xy, radius, min_score):
    left = {i for i, score in enumerate(scores) if score >= min_score}
    kept = []
    while left:
        best = min(left, key=lambda i: (-scores[i], xy[i][1], xy[i][0]))
        kept.append(best)
        left -= {i for i in left if np.hypot(*(xy[i] - xy[best])) <= radius}
    return kept


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(0, 10_000), st.integers(0, 60), st.sampled_from([0.0, 1.0, 2.5, 100.0]), st.sampled_from([0.0, 0.5]))
def test_suppression_is_greedy(seed, count, radius, min_score):
    rng = np.random.default_rng(seed)
    spots = np.stack(np.meshgrid(np.arange(8), np.arange(8)), axis=-1).reshape(-1, 2).astype(float)
    xy = rng.permutation(spots)[:count]
    scores = rng.integers(0, 5, count) / 4
    kept = suppress_points(scores, xy, radius, min_score)
    assert kept.tolist() == slow_suppression(scores, xy, radius, min_score)
    order = rng.permutation(count)
    np.testing.assert_array_equal(xy[order][suppress_points(scores[order], xy[order], radius, min_score)], xy[kept])


def test_suppression_of_nothing_and_of_nonsense():
    assert suppress_points([], np.empty((0, 2)), 100.0).tolist() == []
    for scores, xy, radius in [([0.5], [[0.0, np.nan]], 1.0), ([0.5], [[0, 0]], -1.0), ([np.nan], [[0, 0]], 1.0)]:
        with pytest.raises(MetricError):
            suppress_points(scores, xy, radius)
    with pytest.raises(MetricError, check=has_code("length-mismatch")):
        suppress_points([0.5, 0.6], [[0, 0]], 1.0)
