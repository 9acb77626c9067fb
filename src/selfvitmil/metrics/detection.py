"""Lesion detection: FROC as in the Camelyon16 challenge (Ehteshami Bejnordi et al., JAMA 2017), and point suppression.

A *case* is one slide: a mask at pyramid level `level` (255, or True, is tumour) or None for a normal slide, and rows
(probability, x_l0, y_l0) of points in level-0 pixels. Everything follows the official evaluation code, also where
another rule would seem better:

* Tumour regions are dilated by 37.5 um, so two within 75 um are one lesion; holes are filled, so tissue that an
annotation
  excludes inside a tumour counts as tumour. Pixels that touch at a corner are connected.
* A lesion whose ellipse of equal second moments has a major axis below 275 um (200 um plus 75 of dilation) is isolated
  tumour cells (ITC): not in the denominator, and points in it are neither hits nor false positives.
* A lesion's score is its best point, stored in float32, or 0 if there is none; other points, and all of a normal slide,
  are false positives in float64. A lesion's float32 is compared with a float64 threshold in float32.
* Thresholds are the distinct scores without the smallest, which is meant to be the 0 of a missed lesion. If every
  lesion is hit (and there are no ITC) a real point is lost.
* False positives are averaged over all slides. The curve ends in (0, 0); the score is the mean of the interpolated
  sensitivities at 1/4, 1/2, 1, 2, 4 and 8; beyond the curve's last point its last sensitivity is used.

The ellipse is that of scikit-image: moments of the pixel centres, without the 1/12 for the extent of a pixel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import ndimage  # pyright: ignore[reportMissingTypeStubs]

from selfvitmil.errors import MetricError
from selfvitmil.metrics.classification import Floats, check_scores

_images: Any = ndimage
"""scipy has no types."""
GAP_UM = 75.0
"""Tumour regions closer than this, about five cells, are one lesion."""
ITC_UM = 275.0
"""Major axis, including dilation, below which a lesion is isolated tumour cells."""
FPS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""False positives per slide at which the sensitivities are averaged."""

Case = tuple[ArrayLike | None, ArrayLike]


@dataclass(frozen=True)
class CaseDetections:
    """One slide: label k (from 1) is a lesion of the evaluation mask, `lesion_scores[k - 1]` its best point or 0."""

    lesion_scores: NDArray[np.float32]
    itc_labels: tuple[int, ...]
    false_positives: Floats

    @property
    def num_lesions(self) -> int:
        """Number of lesions to detect, without isolated tumour cells."""
        return len(self.lesion_scores) - len(self.itc_labels)


@dataclass(frozen=True)
class Froc:
    """The curve from low to high thresholds, the sensitivities at `FPS`, their mean, and the detections per slide."""

    fps_per_slide: Floats
    sensitivity: Floats
    sensitivity_at: Floats
    score: float
    cases: tuple[CaseDetections, ...]
    warnings: tuple[str, ...]


def froc(cases: Sequence[Case], level: int = 5, mpp_l0: float = 0.243) -> Froc:
    """Return the free-response ROC over all slides; the challenge uses level 5 and 0.243 um for every slide."""
    if not len(cases):
        raise MetricError(
            "FROC without slides", "there is nothing to evaluate", "Pass one case per slide", code="no-cases"
        )
    if not (mpp_l0 > 0 and level >= 0):
        raise MetricError(
            f"FROC at level {level} with {mpp_l0} um/px",
            "level must not be negative and um/px must be positive",
            "The challenge uses 5 and 0.243",
            code="invalid-froc-level",
        )
    detections: list[CaseDetections] = []
    warnings: list[str] = []
    for number, (mask, points) in enumerate(cases):
        rows = _check_points(points, number)
        if mask is None:
            detections.append(_normal(rows))
            continue
        tumour = _check_mask(mask, number)
        if tumour.any():
            detections.append(_detect(tumour, rows, level, mpp_l0, number))
        else:
            detections.append(_normal(rows))
            warnings.append(f"case {number}: no tumour in its mask, scored as a normal slide")
    fps_per_slide, sensitivity = _curve(detections)
    at = _sensitivity_at(fps_per_slide, sensitivity)
    return Froc(fps_per_slide, sensitivity, at, float(at.mean()), tuple(detections), tuple(warnings))


def evaluation_mask(tumour: NDArray[np.bool_], level: int = 5, mpp_l0: float = 0.243) -> NDArray[np.int32]:
    """Return the lesions of a tumour mask at `level`, numbered from 1 in the order of their first pixels, row by
    row."""
    reach = GAP_UM / (mpp_l0 * 2**level * 2)
    margin = int(np.ceil(reach)) + 1
    near = tumour.copy()
    # Dilation is local: distances are needed only around each tumour region, not over the whole slide.
    regions: list[tuple[slice, slice]] = _images.find_objects(_connected(tumour))
    for rows, columns in regions:
        box = _widen(rows, margin), _widen(columns, margin)
        distance: NDArray[np.float64] = _images.distance_transform_edt(~tumour[box])
        near[box] |= distance < reach
    return _connected(_images.binary_fill_holes(near))


def major_axes(labels: NDArray[np.int32]) -> Floats:
    """Return, for each label from 1, the major axis in pixels of the ellipse with the same second moments."""
    y, x = np.nonzero(labels)
    label = labels[y, x] - 1
    count = np.bincount(label)
    dx = x - (np.bincount(label, x) / count)[label]
    dy = y - (np.bincount(label, y) / count)[label]
    xx, yy, xy = (np.bincount(label, product) / count for product in (dx * dx, dy * dy, dx * dy))
    return 4 * np.sqrt((xx + yy) / 2 + np.sqrt(((xx - yy) / 2) ** 2 + xy**2))


def suppress_points(
    scores: ArrayLike, xy_um: ArrayLike, radius_um: float, min_score: float = -np.inf
) -> NDArray[np.int64]:
    """Greedy non-maximum suppression: return the indices of the points that are kept, best first.

    Repeatedly, the best remaining point is kept and all others within `radius_um` of it are removed, until none scores
    at least `min_score`. Ties are resolved from top to bottom, then left to right, whatever the order of the points.
    `xy_um` are positions (N, 2) in microns: level-0 pixels times the slide's mpp.
    """
    position = np.asarray(xy_um, dtype=np.float64).reshape(-1, 2)
    score = check_scores(scores, len(position))
    if not (radius_um >= 0 and np.isfinite(position).all()):
        raise MetricError(
            f"non-maximum suppression within {radius_um} um",
            "the radius must not be negative and the positions must be finite",
            "Pass level-0 positions times the slide's mpp, and a radius in microns",
            code="invalid-radius",
        )
    order = np.lexsort((position[:, 0], position[:, 1], -score))
    from scipy.spatial import KDTree  # pyright: ignore[reportMissingTypeStubs]

    tree: Any = KDTree(position)
    left = score >= min_score
    kept: list[int] = []
    for index in order:
        if left[index]:
            kept.append(int(index))
            left[tree.query_ball_point(position[index], radius_um)] = False
    return np.array(kept, dtype=np.int64)


def _check_points(points: ArrayLike, number: int) -> Floats:
    rows = np.asarray(points, dtype=np.float64)
    rows = rows.reshape(0, 3) if rows.size == 0 else rows
    if rows.ndim != 2 or rows.shape[1] != 3 or not np.isfinite(rows).all() or (rows[:, 0] < 0).any():
        raise MetricError(
            f"case {number}: points of shape {rows.shape}",
            "a row is (probability, x_l0, y_l0), all finite, no probability negative (a missed lesion has 0)",
            "Pass rows of three numbers, or an empty list for a slide without points",
            code="invalid-froc-points",
        )
    return rows


def _check_mask(mask: ArrayLike, number: int) -> NDArray[np.bool_]:
    given = np.asarray(mask)
    if given.ndim != 2 or not given.size:
        raise MetricError(
            f"case {number}: mask of shape {given.shape}",
            "a mask is an array [y, x]",
            "Pass None for a normal slide",
            code="invalid-froc-mask",
        )
    if given.dtype == np.bool_:
        return given
    tumour = given == 255
    if not (tumour | (given == 0)).all():
        raise MetricError(
            f"case {number}: the mask contains {given[~tumour & (given != 0)][0]}",
            "the official code uses 255 for tumour and 0 for the rest; ASAP writes 1 or 2",
            "Pass a boolean mask, or multiply it by 255",
            code="invalid-froc-mask",
        )
    return tumour


def _normal(rows: Floats) -> CaseDetections:
    return CaseDetections(np.zeros(0, dtype=np.float32), (), rows[:, 0].copy())


def _detect(tumour: NDArray[np.bool_], rows: Floats, level: int, mpp_l0: float, number: int) -> CaseDetections:
    """Return which lesion each point of a tumour slide hits."""
    height, width = tumour.shape
    x, y = np.floor(rows[:, 1] / 2**level).astype(np.int64), np.floor(rows[:, 2] / 2**level).astype(np.int64)
    outside = (x < 0) | (x >= width) | (y < 0) | (y >= height)
    if outside.any():
        first = rows[outside][0]
        raise MetricError(
            f"case {number}: {int(outside.sum())} of {len(rows)} points are outside the mask, one at "
            f"x_l0 = {first[1]:g}, y_l0 = {first[2]:g}",
            f"the mask of {width} x {height} pixels at level {level} is of another slide or another level",
            "Pass points in level-0 pixels and the mask of the same slide",
            code="points-outside-mask",
        )
    labels = evaluation_mask(tumour, level, mpp_l0)
    itc = np.flatnonzero(major_axes(labels) < ITC_UM / (mpp_l0 * 2**level)) + 1
    hit = labels[y, x]
    best = np.zeros(int(labels.max()), dtype=np.float32)
    counted = (hit > 0) & ~np.isin(hit, itc)
    np.maximum.at(best, hit[counted] - 1, rows[counted, 0].astype(np.float32))
    return CaseDetections(best, tuple(int(label) for label in itc), rows[hit == 0, 0].copy())


def _connected(mask: Any) -> NDArray[np.int32]:
    """Label connected components, by edges and corners, from 1 in the order of their first pixels."""
    return _images.label(mask, np.ones((3, 3)))[0]


def _widen(span: slice, margin: int) -> slice:
    return slice(max(0, span.start - margin), span.stop + margin)


def _curve(cases: Sequence[CaseDetections]) -> tuple[Floats, Floats]:
    """Return (false positives per slide, sensitivity) at every threshold, from low to high."""
    num_lesions = sum(case.num_lesions for case in cases)
    if num_lesions == 0:
        raise MetricError(
            f"FROC of {len(cases)} slides",
            "none of them has a lesion of 0.2 mm or more, so sensitivity is undefined",
            "Add tumour slides with their annotation",
            code="no-lesions",
        )
    false = np.sort(np.concatenate([case.false_positives for case in cases]))
    true = np.sort(np.concatenate([case.lesion_scores for case in cases]))
    thresholds = np.unique(np.concatenate([false, true.astype(np.float64)]))[1:]
    num_false = len(false) - np.searchsorted(false, thresholds, "left")
    num_true = len(true) - np.searchsorted(true, thresholds.astype(np.float32), "left")
    return np.append(num_false, 0) / len(cases), np.append(num_true, 0) / num_lesions


def _sensitivity_at(fps_per_slide: Floats, sensitivity: Floats) -> Floats:
    return np.interp(FPS, fps_per_slide[::-1], sensitivity[::-1])
