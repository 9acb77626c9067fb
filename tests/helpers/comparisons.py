"""Rows of a comparison table."""

from __future__ import annotations

from typing import Any

from selfvitmil.evaluate.comparison import PUBLISHED, ComparisonRow, EvaluatedOn, PairedRow
from selfvitmil.metrics import Interval

YOUDEN = "Youden's point of the validation slides"
ON = EvaluatedOn("demo", "given test split", (("normal", 80), ("tumor", 49)))


def interval(value: float) -> Interval:
    return Interval(value, value - 0.1, value + 0.05, "DeLong on the logit scale")


def row(method: str, auc: float = 0.8, **changed: Any) -> ComparisonRow:
    paired = PairedRow(method, "mean", interval(0.02), "paired DeLong test", 0.01234, 0.0491, 0.0005, 0.002, 4)
    told = {
        "method": method,
        "display_name": method,
        "features": "DINO ViT-S/16 at 0.5 mpp",
        "evaluated_on": ON,
        "seed_aucs": (0.79, 0.81, 0.83),
        "auc": interval(auc),
        "accuracy": interval(0.75),
        "balanced_accuracy": interval(0.74),
        "sensitivity": interval(0.7),
        "specificity": interval(0.78),
        "threshold_from": YOUDEN,
        "paired": paired if method != "mean" else None,
        "training_seconds": 61.24,
        "published": PUBLISHED.get(method),
    }
    return ComparisonRow(**(told | changed))
