"""Calibration of probabilities: Brier score, reliability, expected calibration error; Platt and temperature scaling.

Both fits use logits and Platt's smoothed targets: a class with n samples has the target (n + 1) / (n + C) instead of 1.
So they stay finite if a small validation set is separated perfectly, as it often is. Both keep the order of scores; a
validation set whose logits do not increase with the labels raises an error instead of inverting them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import brentq
from scipy.special import expit, softmax
from scipy.special import logit as logit_of

from selfvitmil.errors import MetricError
from selfvitmil.metrics.intervals import (
    Floats,
    Labels,
    check_both_classes,
    check_labels,
    check_probabilities,
    check_scores,
    wilson,
)


@dataclass(frozen=True)
class Reliability:
    """One row per non-empty bin: mean probability, fraction of positives with Wilson limits, number of samples."""

    probability: Floats
    share: Floats
    low: Floats
    high: Floats
    count: NDArray[np.int64]

    @property
    def ece(self) -> float:
        """Expected calibration error: the mean gap between probability and fraction, weighted by samples."""
        return float((np.abs(self.probability - self.share) * self.count).sum() / self.count.sum())


@dataclass(frozen=True)
class Platt:
    """probability = sigmoid(slope * logit + intercept), slope > 0."""

    slope: float
    intercept: float

    def apply(self, logits: ArrayLike) -> Floats:
        return expit(self.slope * np.asarray(logits, dtype=np.float64) + self.intercept)


@dataclass(frozen=True)
class Temperature:
    """probability = sigmoid(logit / temperature) of (N,) logits, or the softmax over classes of (N, C)."""

    temperature: float

    def apply(self, logits: ArrayLike) -> Floats:
        cooled = np.asarray(logits, dtype=np.float64) / self.temperature
        return expit(cooled) if cooled.ndim < 2 else softmax(cooled, axis=-1)


def brier(labels: ArrayLike, probabilities: ArrayLike) -> float:
    """Return the mean squared error of (N,) probabilities of class 1, or of (N, C) summed over classes (0 to 2).

    Brier 1950: rows of (N, C) are distributions over the classes. Others, such as one sigmoid per class, raise an
    error.
    """
    if np.ndim(probabilities) == 2:
        num_classes = np.shape(probabilities)[1]
        label = check_labels(labels, num_classes)
        given = _check_distributions(probabilities, len(label), num_classes)
        return float(((given - np.eye(num_classes)[label]) ** 2).sum(axis=1).mean())
    label = check_labels(labels)
    return float(((check_probabilities(probabilities, len(label)) - label) ** 2).mean())


def top_class(labels: ArrayLike, probabilities_NC: ArrayLike) -> tuple[Labels, Floats]:
    """Return whether the most probable class is correct (0, 1) and its probability: multiclass input of
    `reliability`."""
    num_classes = np.shape(probabilities_NC)[-1]
    label = check_labels(labels, num_classes)
    given = _check_distributions(probabilities_NC, len(label), num_classes)
    return (given.argmax(axis=1) == label).astype(np.int64), given.max(axis=1)


def reliability(
    labels: ArrayLike,
    probabilities: ArrayLike,
    num_bins: int = 10,
    level: float = 0.95,
) -> Reliability:
    """Return predicted against observed fractions of positives in bins of equal width."""
    label = check_labels(labels)
    given = check_probabilities(probabilities, len(label))
    if num_bins < 1:
        raise MetricError(f"{num_bins} bins", "at least 1 is needed", "10 is usual", code="invalid-bins")
    index = np.minimum((given * num_bins).astype(np.int64), num_bins - 1)
    count = np.bincount(index, minlength=num_bins)
    used = count > 0
    positives = np.bincount(index, label, num_bins)[used].astype(np.int64)
    probability = np.bincount(index, given, num_bins)[used] / count[used]
    bars = [wilson(int(part), int(whole), level) for part, whole in zip(positives, count[used], strict=True)]
    low, high = np.array([bar.low for bar in bars]), np.array([bar.high for bar in bars])
    return Reliability(probability, positives / count[used], low, high, count[used])


def to_logits(probabilities: ArrayLike, clip: float = 1e-6) -> Floats:
    """Return the logits of (N,) probabilities, clipped to [clip, 1 - clip]: 1 has no finite logit."""
    given = np.asarray(probabilities, dtype=np.float64)
    return logit_of(np.clip(check_probabilities(given, len(given)), clip, 1 - clip))


def fit_platt(labels: ArrayLike, logits: ArrayLike) -> Platt:
    """Fit slope and intercept by minimizing the cross-entropy to smoothed targets (Platt 1999), with Newton's
    method."""
    label, given = _check(labels, logits)
    target = _soft_targets(label, 2)[:, 1]
    mean, spread = given.mean(), given.std()
    if spread == 0:
        raise _no_order(f"all {len(given)} logits are {given[0]:.4g}")
    # In standard units one start and one tolerance suit logits of any scale.
    columns = np.stack([(given - mean) / spread, np.ones_like(given)], axis=1)

    def loss(parameters: Floats) -> float:
        fitted = columns @ parameters
        return float((np.logaddexp(0.0, fitted) - target * fitted).sum())

    parameters = np.array([0.0, logit_of(target.mean())])
    for _ in range(100):
        fitted = expit(columns @ parameters)
        gradient = columns.T @ (fitted - target)
        curvature = (columns.T * (fitted * (1 - fitted))) @ columns + 1e-12 * np.eye(2)
        step = np.linalg.solve(curvature, gradient)
        if float(gradient @ step) < 1e-20 * len(given):
            break
        length = 1.0
        while length > 1e-10 and loss(parameters - length * step) > loss(parameters):
            length /= 2
        parameters = parameters - length * step
    slope = float(parameters[0] / spread)
    if slope <= 0:
        raise _no_order(f"the fitted slope is {slope:.3g}")
    return Platt(slope, float(parameters[1] - slope * mean))


def fit_temperature(labels: ArrayLike, logits: ArrayLike) -> Temperature:
    """Fit the temperature that minimizes the cross-entropy to smoothed targets, for (N,) or (N, C) logits (Guo et al.
    2017).

    The loss is convex in 1 / temperature, so its minimum is where the slope changes sign.
    """
    label, given = _check(labels, logits)
    columns = np.stack([np.zeros_like(given), given], axis=1) if given.ndim == 1 else given
    target = _soft_targets(label, columns.shape[1])

    def slope(inverse: float) -> float:
        return float(((softmax(inverse * columns, axis=1) - target) * columns).sum())

    if slope(0.0) >= 0:
        raise _no_order("no temperature is better than an infinite one")
    high = 1.0 / np.abs(columns).max()
    while slope(high) < 0:
        high *= 2
    inverse = float(brentq(slope, 0.0, high, xtol=1e-14 * high))  # pyright: ignore[reportArgumentType]
    return Temperature(1 / inverse)


def _check_distributions(probabilities_NC: ArrayLike, count: int, num_classes: int) -> Floats:
    given = check_probabilities(probabilities_NC, count, num_classes)
    total = given.sum(axis=1)
    if not np.allclose(total, 1.0, atol=1e-3):
        raise MetricError(
            f"probabilities of {num_classes} classes that sum to {total.min():.3g} up to {total.max():.3g}",
            "one probability per class is needed, summing to 1",
            "Divide each row by its sum first",
            code="not-a-distribution",
        )
    return given


def _check(labels: ArrayLike, logits: ArrayLike) -> tuple[Labels, Floats]:
    columns = np.shape(logits)[1] if np.ndim(logits) == 2 else None
    label = check_labels(labels, columns or 2)
    given = check_scores(logits, len(label), columns)
    check_both_classes(label)
    return label, given


def _soft_targets(label: Labels, num_classes: int) -> Floats:
    """Return smoothed targets: the posterior mean of each class given its number of samples."""
    count = np.bincount(label, minlength=num_classes)[label][:, None]
    return (count * np.eye(num_classes)[label] + 1) / (count + num_classes)


def _no_order(what: str) -> MetricError:
    return MetricError(
        f"calibration: {what}",
        "logits that do not increase with the labels cannot be calibrated without inverting their order",
        "Leave the scores uncalibrated and report it, or use more validation slides",
        code="cannot-calibrate",
    )
