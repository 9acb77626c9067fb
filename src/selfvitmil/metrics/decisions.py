"""Metrics at a threshold: confusion matrix, accuracy, sensitivity and others with intervals; Youden's threshold.

A sample is predicted positive if score >= threshold. A ratio with a zero denominator (such as precision without
positive predictions) is NaN with an interval from 0 to 1.

Proportions have Wilson intervals (Wilson 1927). Balanced accuracy is a mean of independent proportions, whose Wilson
limits are combined as a root of squares (Newcombe 1998). F1 = 2 J / (1 + J) is an increasing function of J = TP / (TP +
FP + FN), a proportion, so J's Wilson limits are transformed by the same function. All of them treat samples as
independent: if patients have several slides, evaluate per patient.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from selfvitmil.errors import MetricError
from selfvitmil.metrics.intervals import (
    Interval,
    check_both_classes,
    check_labels,
    check_scores,
    first_of_ties,
    mean_of_independent,
    wilson,
)


@dataclass(frozen=True)
class Decisions:
    """Counts and metrics of the positive class (class 1, or one class against the rest)."""

    true_negatives: int
    false_positives: int
    false_negatives: int
    true_positives: int
    accuracy: Interval
    balanced_accuracy: Interval
    f1: Interval
    sensitivity: Interval
    specificity: Interval
    ppv: Interval
    npv: Interval

    @property
    def confusion(self) -> NDArray[np.int64]:
        """Counts as [true class, predicted class]."""
        return np.array(
            [[self.true_negatives, self.false_positives], [self.false_negatives, self.true_positives]], dtype=np.int64
        )


@dataclass(frozen=True)
class MulticlassDecisions:
    """Counts as [true class, predicted class]; balanced accuracy is the mean sensitivity, macro F1 the mean F1."""

    confusion: NDArray[np.int64]
    accuracy: Interval
    balanced_accuracy: Interval
    macro_f1: float
    per_class: tuple[Decisions, ...]


def decide(labels: ArrayLike, scores: ArrayLike, threshold: float, level: float = 0.95) -> Decisions:
    """Return all metrics of the rule score >= threshold. Compares in float64, as `youden_threshold` does."""
    label = check_labels(labels)
    called = (check_scores(scores, len(label), infinite=True) >= threshold).astype(np.int64)
    if np.isnan(threshold):
        raise MetricError(
            "the threshold is NaN",
            "scores cannot be compared with it",
            "Choose a threshold on validation slides",
            code="nan-threshold",
        )
    return _from_confusion(confusion_matrix(label, called, 2), level)


def decide_multiclass(
    labels: ArrayLike, called: ArrayLike, num_classes: int, level: float = 0.95
) -> MulticlassDecisions:
    """Return the metrics for predicted classes (usually the most probable); a class that never occurs makes means
    NaN."""
    confusion = confusion_matrix(labels, called, num_classes)
    total = int(confusion.sum())
    per_class = tuple(_from_confusion(_one_vs_rest(confusion, k), level) for k in range(num_classes))
    return MulticlassDecisions(
        confusion,
        wilson(int(np.trace(confusion)), total, level),
        mean_of_independent([one.sensitivity for one in per_class], "Wilson limits added as squares"),
        float(np.mean([one.f1.value for one in per_class])),
        per_class,
    )


def confusion_matrix(labels: ArrayLike, called: ArrayLike, num_classes: int) -> NDArray[np.int64]:
    """Return counts as [true class, predicted class]."""
    label, call = check_labels(labels, num_classes), check_labels(called, num_classes)
    if len(label) != len(call):
        raise MetricError(
            f"{len(label)} labels and {len(call)} decisions",
            "their numbers must be equal",
            "Pass them in the same order",
            code="length-mismatch",
        )
    return np.bincount(label * num_classes + call, minlength=num_classes**2).reshape(num_classes, num_classes)


def youden_threshold(labels: ArrayLike, scores: ArrayLike) -> float:
    """Return the threshold that maximizes sensitivity + specificity (Youden 1950), midway between two scores.

    Ties are resolved to the highest threshold (fewest false positives), as argmax along a ROC curve does. If no
    threshold is better than predicting everything negative, the next number above all scores is returned.
    """
    label = check_labels(labels)
    score = check_scores(scores, len(label))
    check_both_classes(label)
    order = np.argsort(-score, kind="stable")
    starts = first_of_ties(score[order])
    distinct = score[order][starts]
    true = np.cumsum(np.add.reduceat(label[order], starts))
    false = np.cumsum(np.add.reduceat(1 - label[order], starts))
    # Youden's index times both class sizes is an integer, so ties are exact.
    index = true * int(false[-1]) - false * int(true[-1])
    best = int(np.argmax(index))
    if index[best] <= 0:
        return float(np.nextafter(distinct[0], np.inf))
    upper, lower = float(distinct[best]), float(distinct[best + 1])
    middle = lower + (upper - lower) / 2
    # Between adjacent floats there is no midpoint; the rule is >=, so the upper one separates them too.
    return middle if lower < middle <= upper else upper


def _one_vs_rest(confusion: NDArray[np.int64], k: int) -> NDArray[np.int64]:
    true_positives = confusion[k, k]
    false_negatives, false_positives = confusion[k].sum() - true_positives, confusion[:, k].sum() - true_positives
    true_negatives = confusion.sum() - true_positives - false_negatives - false_positives
    return np.array([[true_negatives, false_positives], [false_negatives, true_positives]])


def _from_confusion(confusion: NDArray[np.int64], level: float) -> Decisions:
    tn, fp, fn, tp = (int(count) for count in confusion.ravel())
    sensitivity, specificity = wilson(tp, tp + fn, level), wilson(tn, tn + fp, level)
    overlap = wilson(tp, tp + fp + fn, level)
    value, low, high = (2 * j / (1 + j) for j in (overlap.value, overlap.low, overlap.high))
    return Decisions(
        tn,
        fp,
        fn,
        tp,
        accuracy=wilson(tp + tn, tn + fp + fn + tp, level),
        balanced_accuracy=mean_of_independent([sensitivity, specificity], "Wilson limits added as squares"),
        f1=Interval(value, low, high, "Wilson limits of TP / (TP + FP + FN)", level),
        sensitivity=sensitivity,
        specificity=specificity,
        ppv=wilson(tp, tp + fp, level),
        npv=wilson(tn, tn + fn, level),
    )
