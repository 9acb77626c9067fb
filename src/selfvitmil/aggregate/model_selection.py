"""Choice of the epoch on the validation set, and warnings about the chosen one. Pure functions.

V validation bags, C classes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from selfvitmil import metrics

Floats = NDArray[np.float64]
Labels = NDArray[np.int64]

UNIFORM = 0.99
"""Normalized attention entropy above which attention counts as uniform."""
UNSETTLED = 0.5
"""Fraction of bags whose critical instance changed between epochs, above which the critical instance is unstable."""
GIVEN_UP = 0.05
"""Fraction of a bag that must outrank the previous critical instance to count as a change: lesions have many tiles."""


def choose_monitor(wanted: str, labels: Labels, num_classes: int) -> tuple[str, str | None]:
    """Return the criterion that selects the epoch, and a warning where it is not the requested one."""
    if wanted == "loss" or _missing(labels, num_classes) is None:
        return wanted, None
    return "loss", (
        f"AUC is undefined on the validation set ({_missing(labels, num_classes)}), so the epoch was chosen by loss. "
        "Add validation slides of every class, or set train.monitor to loss"
    )


def _missing(labels: Labels, num_classes: int) -> str | None:
    absent = sorted(set(range(max(num_classes, 2))) - set(labels.tolist()))
    return f"it has no slide of class {', '.join(map(str, absent))}" if absent else None


def auc(labels: Labels, probabilities_VC: Floats) -> float | None:
    """Return the AUC, with several classes the macro-average one-vs-rest AUC; None where a class is missing."""
    num_classes = probabilities_VC.shape[1]
    if _missing(labels, num_classes):
        return None
    if num_classes == 1:
        return metrics.auc(labels, probabilities_VC[:, 0])
    return float(np.mean([metrics.auc(labels == k, probabilities_VC[:, k]) for k in range(num_classes)]))


def accuracy(labels: Labels, probabilities_VC: Floats) -> float:
    """Return the accuracy at Youden's threshold of these bags, or with several classes by the largest probability."""
    if probabilities_VC.shape[1] > 1:
        return float((probabilities_VC.argmax(axis=1) == labels).mean())
    threshold = metrics.youden_threshold(labels, probabilities_VC[:, 0])
    return float(((probabilities_VC[:, 0] >= threshold) == (labels == 1)).mean())


def criterion(monitor: str, labels: Labels, probabilities_VC: Floats, loss: float) -> float:
    """Return the value that selects the epoch, larger is better. `authors` is the criterion of Self-ViT-MIL's code."""
    if monitor == "loss":
        return -loss
    area = auc(labels, probabilities_VC)
    assert area is not None
    return area if monitor == "auc" else (area + accuracy(labels, probabilities_VC) + 1 - loss) / 4


def mean_entropy(labels: Labels, entropies: Floats, num_classes: int) -> float | None:
    """Return the mean attention entropy over the positive bags; with several classes over all, each for its class."""
    known = entropies[_informative(labels, num_classes) & ~np.isnan(entropies)]
    return float(known.mean()) if len(known) else None


def churn(labels: Labels, overtaken: Labels, num_instances: Labels, num_classes: int) -> float | None:
    """Return the fraction of positive bags (of all, with several classes) whose critical instance changed.

    `overtaken` is the number of instances that outrank the previous epoch's critical instance.
    """
    counted = _informative(labels, num_classes)
    if not counted.any():
        return None
    return float((overtaken >= np.maximum(1, GIVEN_UP * num_instances))[counted].mean())


def _informative(labels: Labels, num_classes: int) -> NDArray[np.bool_]:
    """Return which bags contain evidence of a class: for a binary label the positive ones, else all."""
    return labels > 0 if num_classes == 1 else np.ones(len(labels), dtype=bool)


def attention_warnings(line: dict[str, Any]) -> list[str]:
    """Return warnings about the attention and the critical instances of the chosen epoch's history line."""
    found, epoch = [], line["epoch"]
    entropy, changed = line["attention_entropy"], line["critical_churn"]
    if entropy is not None and entropy > UNIFORM:
        found.append(
            f"attention is nearly uniform at the chosen epoch {epoch} (normalized entropy {entropy:.3f} on validation "
            "slides): predictions use the average tile, and the attention heatmap is uninformative. Try "
            "train.standardize true, another learning rate, a longer warm-up, or more training slides"
        )
    if changed is not None and changed > UNSETTLED:
        found.append(
            f"the critical tile is unstable: from epoch {epoch - 1} to the chosen epoch {epoch} it changed on "
            f"{changed:.0%} of the validation slides, so its position is not reliable evidence. Try "
            "a lower learning rate, a longer warm-up, or with DSMIL several critical tiles (train.options.top 3)"
        )
    return found
