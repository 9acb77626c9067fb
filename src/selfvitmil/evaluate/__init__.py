"""Judging aggregators: which slides, which splits, by what protocol, with which numbers.

cases.py        a cohort and its feature files -> cases: labelled slides with a sound bag
guard.py        the seal on test labels
trial.py        splits, with the test labels under seal
models.py       trainings, and the models that they leave
protocol.py     a method over splits and seeds: trained, scored, decided
choices.py      threshold and calibration, and where they come from
predictions.py  predictions.csv
scores.py       all metrics, by slide and by patient
results.py      the folder of results; rows of the comparison
table.py        the comparison table, published rows
figures.py      SVG figures
"""

from __future__ import annotations

from selfvitmil.evaluate.cases import Case, Cases, CoarseScale, find_cases, join_scales
from selfvitmil.evaluate.guard import FINAL_SCORING, SealedLabelError, SealedLabels
from selfvitmil.evaluate.predictions import Prediction, read_predictions, write_predictions
from selfvitmil.evaluate.protocol import (
    Fitted,
    MethodResult,
    Run,
    Stored,
    check_models,
    conclude,
    fit_method,
    judge_method,
    run_method,
    stored_models,
)
from selfvitmil.evaluate.results import compare_results, comparison_row, judged_on, write_results
from selfvitmil.evaluate.scores import Samples, Scores, samples_of, score_method, score_samples
from selfvitmil.evaluate.trial import Trial, make_splits, seal

__all__ = [
    "FINAL_SCORING",
    "Case",
    "Cases",
    "CoarseScale",
    "Fitted",
    "MethodResult",
    "Prediction",
    "Run",
    "Samples",
    "Scores",
    "SealedLabelError",
    "SealedLabels",
    "Stored",
    "Trial",
    "check_models",
    "compare_results",
    "comparison_row",
    "conclude",
    "find_cases",
    "fit_method",
    "join_scales",
    "judge_method",
    "judged_on",
    "make_splits",
    "read_predictions",
    "run_method",
    "samples_of",
    "score_method",
    "score_samples",
    "seal",
    "stored_models",
    "write_predictions",
    "write_results",
]
