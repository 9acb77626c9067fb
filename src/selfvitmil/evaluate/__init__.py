"""Evaluation of aggregators: data set, splits, protocol, metrics, comparison table and figures.

dataset.py           labelled slides with valid bags; training, validation and test set; held-out test labels
predictions.py       decision threshold and calibration with their origin; predictions.csv
tuning.py            settings chosen by nested cross-validation: space, choice, tuning.json
protocol.py          a method over splits and seeds: training, stored models, scoring, decisions
method_metrics.py    all metrics of a method, by slide and by patient: metrics.json
decisions.py         decision curves and conformal prediction sets
comparison.py        rows of a comparison: paired tests, published results, advice; the results folder
comparison_table.py  the rows as table.csv, table.md and cells
figures.py           SVG figures

Names are imported from their module when they are first used: predictions are read without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from selfvitmil.evaluate.comparison import compare_results, comparison_row, evaluated_on, write_results
    from selfvitmil.evaluate.dataset import (
        FINAL_SCORING,
        Case,
        Cases,
        CoarseScale,
        HeldOutLabelError,
        HeldOutLabels,
        Trial,
        find_cases,
        hold_out_test_labels,
        join_scales,
        make_splits,
    )
    from selfvitmil.evaluate.method_metrics import Samples, Scores, samples_of, score_method, score_samples
    from selfvitmil.evaluate.predictions import Prediction, read_predictions, write_predictions
    from selfvitmil.evaluate.protocol import (
        Fitted,
        MethodResult,
        Run,
        Stored,
        check_models,
        choose_thresholds,
        ensemble_scores,
        evaluate_method,
        fit_method,
        run_method,
        stored_models,
    )

__all__ = [
    "FINAL_SCORING", "Case", "Cases", "CoarseScale", "Fitted", "HeldOutLabelError", "HeldOutLabels", "MethodResult",
    "Prediction", "Run", "Samples", "Scores", "Stored", "Trial", "check_models", "choose_thresholds", "compare_results",
    "comparison_row", "ensemble_scores", "evaluate_method", "evaluated_on", "find_cases", "fit_method",
    "hold_out_test_labels", "join_scales", "make_splits", "read_predictions", "run_method", "samples_of",
    "score_method", "score_samples", "stored_models", "write_predictions", "write_results",
]  # fmt: skip

_NAMES = {
    "comparison": ("compare_results", "comparison_row", "evaluated_on", "write_results"),
    "dataset": (
        "FINAL_SCORING", "Case", "Cases", "CoarseScale", "HeldOutLabelError", "HeldOutLabels", "Trial", "find_cases",
        "hold_out_test_labels", "join_scales", "make_splits",
    ),
    "method_metrics": ("Samples", "Scores", "samples_of", "score_method", "score_samples"),
    "predictions": ("Prediction", "read_predictions", "write_predictions"),
    "protocol": (
        "Fitted", "MethodResult", "Run", "Stored", "check_models", "choose_thresholds", "ensemble_scores",
        "evaluate_method", "fit_method", "run_method", "stored_models",
    ),
}  # fmt: skip
_HOME = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
