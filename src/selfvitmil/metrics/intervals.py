"""Shared parts of all metrics: the interval, validation of labels and scores, Wilson's interval, the bootstrap.

Axes in names: N samples (slides, patients or tiles), C classes, R resamples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import ndtri

from selfvitmil.errors import MetricError

Labels = NDArray[np.int64]
Floats = NDArray[np.float64]

# Resampling weights are generated in pieces of about this many numbers, to bound memory for any cohort size.
_PIECE = 2**21


@dataclass(frozen=True)
class Interval:
    """An estimate with its confidence interval; an undefined value is NaN."""

    value: float
    low: float
    high: float
    method: str
    level: float = 0.95


def check_labels(labels: ArrayLike, num_classes: int = 2) -> Labels:
    """Return labels as integers 0 .. num_classes - 1, or raise MetricError that shows the first invalid one."""
    given = np.asarray(labels)
    if given.ndim != 1 or not len(given):
        raise MetricError(
            f"labels of shape {given.shape}",
            "one label per sample is needed",
            "Pass a list of labels",
            code="invalid-labels",
        )
    numeric = given.dtype.kind in "biuf"
    known = np.isin(given, np.arange(num_classes)) if numeric else np.zeros(len(given), dtype=bool)
    if not known.all():
        wrong = int(np.argmin(known))
        raise MetricError(
            f"label {given[wrong].item()!r} at position {wrong}",
            f"labels must be integers from 0 to {num_classes - 1}",
            "Convert class names to numbers, and leave out samples without a label",
            code="invalid-labels",
        )
    return given.astype(np.int64)


def check_scores(scores: ArrayLike, count: int, columns: int | None = None, infinite: bool = False) -> Floats:
    """Return scores as float64, one (or `columns`) per sample, never NaN and finite unless `infinite`."""
    given = np.asarray(scores, dtype=np.float64)
    shape = (count,) if columns is None else (count, columns)
    if given.shape != shape:
        raise MetricError(
            f"scores of shape {given.shape}",
            f"the labels require shape {shape}",
            "Pass scores in the order of the labels",
            code="length-mismatch",
        )
    bad = np.isnan(given) if infinite else ~np.isfinite(given)
    if bad.any():
        raise MetricError(
            f"{int(bad.sum())} of {given.size} scores are NaN or infinite, the first at position {np.argwhere(bad)[0]}",
            "no metric can be computed from them",
            "Look for NaN in the embeddings, or leave these samples out and report it",
            code="non-finite-scores",
        )
    return given


def check_probabilities(probabilities: ArrayLike, count: int, columns: int | None = None) -> Floats:
    given = check_scores(probabilities, count, columns)
    if given.size and (given.min() < 0 or given.max() > 1):
        raise MetricError(
            f"probabilities from {given.min():.4g} to {given.max():.4g}",
            "probabilities must be between 0 and 1",
            "Apply the sigmoid or softmax to logits first",
            code="invalid-probabilities",
        )
    return given


def check_both_classes(labels: Labels) -> None:
    if labels.min() == labels.max():
        raise MetricError(
            f"all {len(labels)} labels are {labels[0]}",
            "samples of at least two classes are needed",
            "Use a split with positives and negatives",
            code="one-class",
        )


def check_binary(labels: ArrayLike, scores: ArrayLike) -> tuple[Labels, Floats]:
    """Return validated labels 0 and 1, both present, with scores that can be ranked."""
    label = check_labels(labels)
    score = check_scores(scores, len(label), infinite=True)
    check_both_classes(label)
    return label, score


def check_groups(groups: ArrayLike | None, count: int) -> Labels:
    """Return the group index (patient) of each sample, from 0; without groups each sample is its own."""
    if groups is None:
        return np.arange(count)
    given = np.asarray(groups)
    if given.shape != (count,):
        raise MetricError(
            f"groups of shape {given.shape}",
            f"there are {count} samples",
            "Pass one group (patient) per sample",
            code="length-mismatch",
        )
    return np.unique(given, return_inverse=True)[1].astype(np.int64)


def check_folds(folds: ArrayLike | None, label: Labels) -> Labels:
    """Return the fold index of each sample, 0 for all without folds; at least one fold must have both classes."""
    if folds is None:
        return np.zeros(len(label), dtype=np.int64)
    fold = check_groups(folds, len(label))
    if not pairs_of_folds(label, fold).any():
        raise MetricError(
            f"no fold of {int(fold.max()) + 1} has both classes",
            "scores of different folds come from different models and cannot be ranked together",
            "Use fewer folds, or stratify them by label",
            code="folds-with-one-class",
        )
    return fold


def pairs_of_folds(label: Labels, fold: Labels) -> NDArray[np.int64]:
    """Return the number of (positive, negative) pairs of each fold."""
    return np.bincount(fold, label == 1).astype(np.int64) * np.bincount(fold, label == 0).astype(np.int64)


def first_of_ties(ordered: Floats | Labels) -> NDArray[np.int64]:
    """Return the index where each distinct value begins in an ordered array."""
    return np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))


def normal_quantile(level: float) -> float:
    """Return the number of standard deviations of a two-sided interval of this level."""
    if not 0 < level < 1:
        raise MetricError(
            f"confidence level {level}", "it must be between 0 and 1", "Pass 0.95 for 95 %", code="invalid-level"
        )
    return float(ndtri(0.5 + level / 2))


def wilson(successes: int, trials: int, level: float = 0.95) -> Interval:
    """Return a proportion with Wilson's score interval (Wilson 1927). Without trials: NaN, with an interval from 0 to
    1."""
    z = normal_quantile(level)
    if not 0 <= successes <= trials:
        raise MetricError(
            f"{successes} of {trials}", "successes must not exceed trials", "Check the counts", code="invalid-counts"
        )
    if trials == 0:
        return Interval(np.nan, 0.0, 1.0, "Wilson", level)
    share = successes / trials
    centre = share + z * z / (2 * trials)
    reach = z * np.sqrt(share * (1 - share) / trials + (z / (2 * trials)) ** 2)
    scale = 1 + z * z / trials
    # At the ends, rounding would leave 1e-17 instead of 0.
    low = 0.0 if successes == 0 else (centre - reach) / scale
    high = 1.0 if successes == trials else (centre + reach) / scale
    return Interval(share, float(low), float(high), "Wilson", level)


def mean_of_independent(parts: Sequence[Interval], method: str) -> Interval:
    """Return the interval of the mean of independent estimates by the square-and-add method (Newcombe 1998)."""
    value = float(np.mean([part.value for part in parts]))
    down = float(np.sqrt(sum((part.value - part.low) ** 2 for part in parts))) / len(parts)
    up = float(np.sqrt(sum((part.high - part.value) ** 2 for part in parts))) / len(parts)
    if np.isnan(value):
        return Interval(value, 0.0, 1.0, method, parts[0].level)
    return Interval(value, value - down, value + up, method, parts[0].level)


def bootstrap(
    statistic: Callable[[Floats], Floats], labels: Labels, groups: Labels, resamples: int, seed: int
) -> Floats:
    """Return values (R, ...) of `statistic` over seeded resamples; it takes how often each sample was drawn, (R, N).

    Whole groups are drawn with replacement, among those with samples of the same classes: every resample has every
    class, and as many groups of each kind as the data. With one sample per group this is the stratified bootstrap.
    """
    if resamples < 100:
        raise MetricError(
            f"{resamples} resamples", "at least 100 are needed", "Use 1,000 or more", code="too-few-resamples"
        )
    return np.concatenate([statistic(weights) for weights in _weights(labels, groups, resamples, seed)])


def _weights(labels: Labels, groups: Labels, resamples: int, seed: int) -> Iterator[Floats]:
    rng = np.random.default_rng(seed)
    num_groups = int(groups.max()) + 1
    holds = np.zeros((num_groups, int(labels.max()) + 1), dtype=bool)
    holds[groups, labels] = True
    kind = np.unique(np.packbits(holds, axis=1), axis=0, return_inverse=True)[1].reshape(-1)
    strata = [np.flatnonzero(kind == k) for k in range(kind.max() + 1)]
    piece = max(1, _PIECE // len(groups))
    for start in range(0, resamples, piece):
        rows = min(piece, resamples - start)
        drawn = np.empty((rows, num_groups))
        for members in strata:
            size = len(members)
            picks = rng.integers(size, size=(rows, size)) + size * np.arange(rows)[:, None]
            drawn[:, members] = np.bincount(picks.ravel(), minlength=rows * size).reshape(rows, size)
        yield drawn[:, groups]


def bootstrap_p_value(differences_R: Floats) -> float:
    """Return the two-sided p-value of a difference from its resamples: twice the fraction on the rarer side of 0, among
    the resamples in which it is defined, with the estimate itself counted."""
    defined = differences_R[np.isfinite(differences_R)]
    rarer_side = min(int((defined <= 0).sum()), int((defined >= 0).sum()))
    return min(1.0, 2 * (rarer_side + 1) / (len(defined) + 1))


def percentile_interval(value: float, values_R: Floats, level: float) -> Interval:
    """Return percentile limits from the resamples in which the value is defined."""
    low, high = np.quantile(values_R[np.isfinite(values_R)], [(1 - level) / 2, (1 + level) / 2])
    return Interval(value, float(low), float(high), f"bootstrap percentiles, {len(values_R)} resamples", level)
