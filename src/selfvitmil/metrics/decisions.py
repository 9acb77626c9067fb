"""What a threshold decides: confusion, accuracy and its relatives with intervals, and the threshold itself.

A sample is called positive when score >= threshold. A ratio whose denominator is zero (the precision where nothing is
called positive) is NaN with an interval from 0 to 1: nothing is known about it.

Proportions have Wilson intervals. Balanced accuracy is a mean of independent proportions, whose Wilson limits add as
squares. F1 = 2 J / (1 + J) is a rising function of J = TP / (TP + FP + FN), a proportion of the samples that are or
are called positive, so J's Wilson limits go through the same function.
All of them take samples as independent: where patients have several slides, score patients.
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
    """Counts and what follows from them for positives (class 1, or one class against the rest)."""

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
        """Counts as [true class, called class]."""
        return np.array(
            [[self.true_negatives, self.false_positives], [self.false_negatives, self.true_positives]], dtype=np.int64
        )


@dataclass(frozen=True)
class MulticlassDecisions:
    """Counts as [true class, called class]; balanced accuracy is the mean sensitivity, macro F1 the mean F1."""

    confusion: NDArray[np.int64]
    accuracy: Interval
    balanced_accuracy: Interval
    macro_f1: float
    per_class: tuple[Decisions, ...]


def decide(labels: ArrayLike, scores: ArrayLike, threshold: float, level: float = 0.95) -> Decisions:
    """All metrics of the rule score >= threshold. Compares in float64, as `youden_threshold` does."""
    label = check_labels(labels)
    called = (check_scores(scores, len(label), infinite=True) >= threshold).astype(np.int64)
    if np.isnan(threshold):
        raise MetricError("the threshold is NaN", "nothing can be compared with it", "Choose one on validation slides")
    return _from_confusion(confusion_matrix(label, called, 2), level)


def decide_multiclass(
    labels: ArrayLike, called: ArrayLike, num_classes: int, level: float = 0.95
) -> MulticlassDecisions:
    """The same for `called` classes (usually the largest probability); a class that never occurs makes means NaN."""
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
    """Counts as [true class, called class]."""
    label, call = check_labels(labels, num_classes), check_labels(called, num_classes)
    if len(label) != len(call):
        raise MetricError(
            f"{len(label)} labels and {len(call)} decisions", "one is needed for each", "Pass them in one order"
        )
    return np.bincount(label * num_classes + call, minlength=num_classes**2).reshape(num_classes, num_classes)


def youden_threshold(labels: ArrayLike, scores: ArrayLike) -> float:
    """The threshold with the largest sensitivity + specificity, halfway between the two scores that it parts.

    Of equally good ones the highest (fewest false positives) is taken, as argmax along a ROC curve does. Where no
    threshold beats calling everything negative, that is what is returned: the next number above all scores.
    """
    label = check_labels(labels)
    score = check_scores(scores, len(label))
    check_both_classes(label)
    order = np.argsort(-score, kind="stable")
    starts = first_of_ties(score[order])
    distinct = score[order][starts]
    true = np.cumsum(np.add.reduceat(label[order], starts))
    false = np.cumsum(np.add.reduceat(1 - label[order], starts))
    # Youden's index times both class sizes is a whole number: ties are real ties.
    index = true * int(false[-1]) - false * int(true[-1])
    best = int(np.argmax(index))
    if index[best] <= 0:
        return float(np.nextafter(distinct[0], np.inf))
    upper, lower = float(distinct[best]), float(distinct[best + 1])
    middle = lower + (upper - lower) / 2
    # Between neighbouring floats there is no middle; the rule is >=, so the upper one parts them too.
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
