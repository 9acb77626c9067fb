"""From probabilities to decisions: decision curves (Vickers & Elkin 2006) and conformal prediction sets.

Net benefit at threshold probability p counts true positives less false positives weighted by the odds p / (1 - p), per
sample: someone who treats at a risk of p accepts (1 - p) / p false positives for a true one.

Split-conformal sets (Vovk et al. 2005; Angelopoulos & Bates 2021, arXiv:2107.07511) contain the true class with
probability 1 - alpha or more, over draws of calibration and test samples from one population, whatever the model. One
sample per patient is needed for that: slides of one patient are not exchangeable with those of another.

Axes in names: N samples, C classes, T thresholds, R resamples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from selfvitmil.errors import MetricError
from selfvitmil.metrics.classification import (
    Floats,
    Interval,
    bootstrap,
    check_distributions,
    check_groups,
    check_labels,
    check_probabilities,
    normal_quantile,
    wilson,
)

Method = Literal["lac", "aps"]


@dataclass(frozen=True)
class DecisionCurve:
    """Net benefit (T,) of the model with pointwise bootstrap limits, and of treating everyone; of no one it is 0."""

    thresholds: Floats
    model: Floats
    low: Floats
    high: Floats
    treat_all: Floats

    @property
    def treat_none(self) -> Floats:
        return np.zeros_like(self.thresholds)


@dataclass(frozen=True)
class ConformalThreshold:
    """A class belongs to the set if its score is at most `quantile`; infinite if alpha is too small for `count`."""

    quantile: float
    alpha: float
    method: Method
    count: int


@dataclass(frozen=True)
class Coverage:
    """Fraction of sets that contain the true class, overall and per class (None if it does not occur); mean size of
    a set, and fractions that are empty and that name one class."""

    coverage: Interval
    per_class: tuple[Interval | None, ...]
    mean_size: float
    empty: float
    single: float


def decision_curve(
    labels: ArrayLike,
    probabilities: ArrayLike,
    thresholds: ArrayLike | None = None,
    *,
    groups: ArrayLike | None = None,
    level: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
) -> DecisionCurve:
    """Return the net benefit of treating if probability >= threshold, for (N,) calibrated probabilities of class 1.

    `thresholds` (T,) lie between 0 and 1, by default 0.01 to 0.99. Limits are percentiles over patients (`groups`); the
    prevalence varies with the resample.
    """
    label = check_labels(labels)
    given = check_probabilities(probabilities, len(label))
    cut = np.linspace(0.01, 0.99, 99) if thresholds is None else np.atleast_1d(np.asarray(thresholds, dtype=np.float64))
    if cut.ndim != 1 or not ((cut > 0) & (cut < 1)).all():
        raise MetricError(
            "a threshold probability outside 0 to 1",
            "its odds are undefined",
            "Pass thresholds between 0.01 and 0.99",
            code="invalid-thresholds",
        )
    normal_quantile(level)
    worth_NT = np.where(label[:, None] == 1, 1.0, -(cut / (1 - cut)))
    benefit_NT = worth_NT * (given[:, None] >= cut)
    group = check_groups(groups, len(label))
    values_RT = bootstrap(
        lambda drawn_RN: drawn_RN @ benefit_NT / drawn_RN.sum(axis=1, keepdims=True),
        np.zeros_like(label),
        group,
        resamples,
        seed,
    )
    low, high = np.quantile(values_RT, [(1 - level) / 2, (1 + level) / 2], axis=0)
    return DecisionCurve(cut, benefit_NT.mean(axis=0), low, high, worth_NT.mean(axis=0))


def conformal_threshold(
    labels: ArrayLike, probabilities: ArrayLike, alpha: float = 0.1, method: Method = "lac"
) -> ConformalThreshold:
    """Return the threshold from calibration samples that the model was not trained on, for sets with coverage
    1 - alpha: the ceil((n + 1)(1 - alpha))-th smallest score.

    The score of a class is 1 - probability (`lac`, Sadinle et al. 2019: the smallest sets) or the summed probability of
    it and all likelier classes (`aps`, Romano et al. 2020, without randomization: larger sets, more even coverage).
    `probabilities` are (N,) of class 1 or (N, C).
    """
    if not 0 < alpha < 1:
        raise MetricError(f"alpha of {alpha}", "it must be between 0 and 1", "Pass 0.1 for 90 %", code="invalid-level")
    given = _columns(probabilities)
    label = check_labels(labels, given.shape[1])
    scores = _scores(check_distributions(given, len(label), given.shape[1]), method)[np.arange(len(label)), label]
    place = int(np.ceil((len(label) + 1) * (1 - alpha) - 1e-9))
    quantile = float(np.sort(scores)[place - 1]) if place <= len(label) else np.inf
    return ConformalThreshold(quantile, alpha, method, len(label))


def prediction_sets(probabilities: ArrayLike, threshold: ConformalThreshold) -> NDArray[np.bool_]:
    """Return which classes belong to each sample's set, (N, C); a set may be empty or hold every class."""
    given = _columns(probabilities)
    return _scores(check_distributions(given, len(given), given.shape[1]), threshold.method) <= threshold.quantile


def set_coverage(labels: ArrayLike, sets_NC: ArrayLike, *, level: float = 0.95) -> Coverage:
    """Return how often prediction sets contain the true class, with Wilson intervals, and how large they are."""
    sets = np.asarray(sets_NC, dtype=bool)
    label = check_labels(labels, sets.shape[1])
    hit, size = sets[np.arange(len(label)), label], sets.sum(axis=1)
    per_class = tuple(
        wilson(int(hit[label == k].sum()), int((label == k).sum()), level) if (label == k).any() else None
        for k in range(sets.shape[1])
    )
    return Coverage(
        wilson(int(hit.sum()), len(hit), level),
        per_class,
        float(size.mean()),
        float((size == 0).mean()),
        float((size == 1).mean()),
    )


def _columns(probabilities: ArrayLike) -> Floats:
    given = np.asarray(probabilities, dtype=np.float64)
    return np.stack([1 - given, given], axis=1) if given.ndim == 1 else given


def _scores(probabilities_NC: Floats, method: Method) -> Floats:
    if method == "lac":
        return 1 - probabilities_NC
    order = np.argsort(-probabilities_NC, axis=1, kind="stable")
    summed = np.cumsum(np.take_along_axis(probabilities_NC, order, axis=1), axis=1)
    summed[:, -1] = 1.0  # rounding would break ties among the least likely classes
    scores = np.empty_like(probabilities_NC)
    np.put_along_axis(scores, order, np.minimum(summed, 1.0), axis=1)
    return scores
