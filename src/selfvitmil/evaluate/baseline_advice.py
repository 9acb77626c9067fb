"""Advice where a simple method is clearly better than the main one on validation slides.

Based on validation slides only: the advice exists before any test label is opened.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from selfvitmil import metrics
from selfvitmil.evaluate.evaluation_splits import Trial
from selfvitmil.evaluate.protocol import Fitted

SUGGESTS = {
    "mean": "the evidence is spread over the whole slide (diffuse) rather than in few tiles (focal)",
    "abmil": "the evidence is a mixture of many tiles rather than a few critical ones",
    "abmil-gated": "the evidence is a mixture of many tiles rather than a few critical ones",
    "max": "the evidence lies in single tiles (focal)",
    "topk": "the evidence lies in a few tiles (focal)",
}
"""Interpretation where a simple method is better."""
CLEARLY = 2.0
"""Difference of squared errors over patients, in standard errors, above which a method is clearly better."""


@dataclass(frozen=True)
class SimpleRow:
    """A simple method that is clearly better than the main one on validation slides."""

    method: str
    main: str
    auc: float
    main_auc: float
    slides: int
    splits: int

    @property
    def words(self) -> str:
        told = (
            f"{self.method} is clearly better than {self.main} on the {self.slides} validation slides (AUC "
            f"{self.auc:.3f} against {self.main_auc:.3f}), which suggests that {SUGGESTS[self.method]}. Consider "
            f"--train.aggregator {self.method}"
        )
        if self.splits == 1:
            return told
        return f"{told}, on new test slides: those of one split were validation slides of another"


def better_simple_rows(fitted: Sequence[Fitted], trial: Trial, main: str) -> list[SimpleRow]:
    """Return simple methods that are clearly better than the row called `main`, best first.

    Methods are compared by squared errors of the ensembles' probabilities, per patient. Empty for several classes,
    where `main` is not among the rows, and under the optimistic protocol, which has no validation set.
    """
    rows = {each.method: each for each in fitted}
    if main not in rows or trial.num_classes != 1 or trial.optimistic:
        return []
    labels, patients, folds, own = _validation(rows[main], trial)
    own_auc, found = metrics.auc(labels, own, folds=folds), []
    for method in SUGGESTS:
        if method not in rows or method == main:
            continue
        *_, other = _validation(rows[method], trial)
        gain = (own - labels) ** 2 - (other - labels) ** 2
        means = np.array([gain[patients == patient].mean() for patient in np.unique(patients)])
        error = means.std(ddof=1) / np.sqrt(len(means)) if len(means) > 1 else np.inf
        auc = metrics.auc(labels, other, folds=folds)
        if means.mean() > CLEARLY * error and auc > own_auc:
            found.append(SimpleRow(method, main, auc, own_auc, len(labels), len(trial.splits)))
    return sorted(found, key=lambda row: -row.auc)


def _validation(fitted: Fitted, trial: Trial) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return labels, patients, splits and seed-averaged probabilities of all validation slides."""
    labels, patients, folds, scores = [], [], [], []
    for split in trial.splits:
        runs = [run for run in fitted.runs if run.split == split.name]
        for case in split.val:
            labels.append(case.label)
            patients.append(case.patient)
            folds.append(split.name)
            scores.append(np.mean([run.chosen_on[case.slide].probabilities[0] for run in runs]))
    return np.array(labels), np.array(patients), np.array(folds), np.array(scores)
