"""Watching a training: which epoch is the best on validation, and what to tell the user about it. Pure functions.

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
"""Entropy of attention, as a share of log N, above which it no longer tells instances apart."""
UNSETTLED = 0.5
"""Share of bags whose critical instance was given up from one epoch to the next, above which it means little."""
GIVEN_UP = 0.05
"""Share of a bag's instances that must have overtaken the last critical one: in a large lesion many are as good."""


def choose_monitor(wanted: str, labels: Labels, num_classes: int) -> tuple[str, str | None]:
    """What the epoch is chosen by, and a warning where that is not what was wanted."""
    if wanted == "loss" or _missing(labels, num_classes) is None:
        return wanted, None
    return "loss", (
        f"no AUC can be computed on validation ({_missing(labels, num_classes)}), so the epoch was chosen by loss. "
        "Give validation slides of every class, or set train.monitor to loss"
    )


def _missing(labels: Labels, num_classes: int) -> str | None:
    absent = sorted(set(range(max(num_classes, 2))) - set(labels.tolist()))
    return f"it has no slide of class {', '.join(map(str, absent))}" if absent else None


def auc(labels: Labels, probabilities_VC: Floats) -> float | None:
    """AUC, with several classes the mean of each against the rest; None where a class is missing."""
    num_classes = probabilities_VC.shape[1]
    if _missing(labels, num_classes):
        return None
    if num_classes == 1:
        return metrics.auc(labels, probabilities_VC[:, 0])
    return float(np.mean([metrics.auc(labels == k, probabilities_VC[:, k]) for k in range(num_classes)]))


def accuracy(labels: Labels, probabilities_VC: Floats) -> float:
    """Share of bags judged rightly: at the threshold that suits them best (Youden's), or by the largest probability."""
    if probabilities_VC.shape[1] > 1:
        return float((probabilities_VC.argmax(axis=1) == labels).mean())
    threshold = metrics.youden_threshold(labels, probabilities_VC[:, 0])
    return float(((probabilities_VC[:, 0] >= threshold) == (labels == 1)).mean())


def worth(monitor: str, labels: Labels, probabilities_VC: Floats, loss: float) -> float:
    """How good an epoch is; larger is better. `authors` is the criterion of Self-ViT-MIL's code."""
    if monitor == "loss":
        return -loss
    area = auc(labels, probabilities_VC)
    assert area is not None
    return area if monitor == "auc" else (area + accuracy(labels, probabilities_VC) + 1 - loss) / 4


def mean_entropy(labels: Labels, entropies: Floats, num_classes: int) -> float | None:
    """Mean entropy of attention over the positive bags; with several classes over all, each for its own class."""
    known = entropies[_tells(labels, num_classes) & ~np.isnan(entropies)]
    return float(known.mean()) if len(known) else None


def churn(labels: Labels, fallen: Labels, num_instances: Labels, num_classes: int) -> float | None:
    """Share of the positive bags (of all, with several classes) whose last critical instance was given up.

    `fallen` is how many instances have overtaken it since the epoch before.
    """
    counted = _tells(labels, num_classes)
    if not counted.any():
        return None
    return float((fallen >= np.maximum(1, GIVEN_UP * num_instances))[counted].mean())


def _tells(labels: Labels, num_classes: int) -> NDArray[np.bool_]:
    """Bags that hold something to find: where the label is binary the positive ones."""
    return labels > 0 if num_classes == 1 else np.ones(len(labels), dtype=bool)


def doubts(line: dict[str, Any]) -> list[str]:
    """What the chosen epoch's line of the history should make its user doubt."""
    found, epoch = [], line["epoch"]
    entropy, changed = line["attention_entropy"], line["critical_churn"]
    if entropy is not None and entropy > UNIFORM:
        found.append(
            f"attention is all but uniform at the chosen epoch {epoch} (entropy {entropy:.3f} of the largest possible, "
            "on validation slides): the aggregator judges the average tile, and its attention shows nothing. Try "
            "train.standardize true, another learning rate, a longer warm-up, or more training slides"
        )
    if changed is not None and changed > UNSETTLED:
        found.append(
            f"the critical tile has not settled: from epoch {epoch - 1} to the chosen epoch {epoch} it was given up for"
            f" others on {changed:.0%} of the validation slides, so which tile counts as evidence is mostly chance. Try"
            " a lower learning rate, a longer warm-up, or with DSMIL several critical tiles (train.options.top 3)"
        )
    return found
