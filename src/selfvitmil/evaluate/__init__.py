"""Evaluation of aggregators: data set, splits, protocol, metrics and comparison table.

dataset.py            a cohort and its feature files -> labelled slides with valid bags
held_out_labels.py    test labels that cannot be read before the final scoring
evaluation_splits.py  training, validation and test slides of every split, test labels held out
models.py             training runs and their stored models
protocol.py           a method over splits and seeds: training, scoring, decisions
thresholds.py         decision threshold and calibration, and their origin
predictions.py        predictions.csv
method_metrics.py     all metrics of a method, by slide and by patient
estimators.py         how metrics of several test sets are combined
result_files.py       the results folder; rows of the comparison
comparison_table.py   the comparison table, paired tests, published rows
baseline_advice.py    advice where a simple method is better on validation slides
figures.py            SVG figures; figure_files.py writes them
"""

from __future__ import annotations

from selfvitmil.evaluate.dataset import Case, Cases, CoarseScale, find_cases, join_scales
from selfvitmil.evaluate.evaluation_splits import Trial, hold_out_test_labels, make_splits
from selfvitmil.evaluate.held_out_labels import FINAL_SCORING, HeldOutLabelError, HeldOutLabels
from selfvitmil.evaluate.method_metrics import Samples, Scores, samples_of, score_method, score_samples
from selfvitmil.evaluate.predictions import Prediction, read_predictions, write_predictions
from selfvitmil.evaluate.protocol import (
    Fitted,
    MethodResult,
    Run,
    Stored,
    check_models,
    choose_thresholds,
    evaluate_method,
    fit_method,
    run_method,
    stored_models,
)
from selfvitmil.evaluate.result_files import compare_results, comparison_row, evaluated_on, write_results

__all__ = [
    "FINAL_SCORING",
    "Case",
    "Cases",
    "CoarseScale",
    "Fitted",
    "HeldOutLabelError",
    "HeldOutLabels",
    "MethodResult",
    "Prediction",
    "Run",
    "Samples",
    "Scores",
    "Stored",
    "Trial",
    "check_models",
    "choose_thresholds",
    "compare_results",
    "comparison_row",
    "evaluate_method",
    "evaluated_on",
    "find_cases",
    "fit_method",
    "hold_out_test_labels",
    "join_scales",
    "make_splits",
    "read_predictions",
    "run_method",
    "samples_of",
    "score_method",
    "score_samples",
    "stored_models",
    "write_predictions",
    "write_results",
]
