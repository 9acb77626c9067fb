"""Estimators of metrics over one or several test sets, and what their intervals and p-values are conditional on.

Every split has its own models, whose scores differ in offset and scale. So slides of different splits are never ranked
together (see `metrics.ranking`). The texts here appear in metrics.json, in table notes and in the report.
"""

from __future__ import annotations

from enum import StrEnum


class Estimator(StrEnum):
    """How the test sets of a study are combined into one metric."""

    ONE_TEST_SET = "one-test-set"
    WITHIN_FOLDS = "within-folds"
    """Several splits with disjoint test sets (k-fold)."""
    WITHIN_OVERLAPPING_SPLITS = "within-overlapping-splits"
    """Several splits with overlapping test sets (Monte Carlo)."""

    @property
    def words(self) -> str:
        return _WORDS[self]

    @property
    def conditional_on(self) -> str:
        """What intervals and p-values are conditional on, and so do not cover."""
        return f"{_CONDITIONAL} {_SHARED}" if self != Estimator.ONE_TEST_SET else _CONDITIONAL


_RANKED = (
    "AUC and average precision rank slides within a split only, since every split has models of its own. "
    "The AUC is the mean over splits, weighted by their pairs of slides."
)
_WORDS = {
    Estimator.ONE_TEST_SET: "All test slides are scored by the same models and ranked together.",
    Estimator.WITHIN_FOLDS: (
        f"{_RANKED} The average precision is the mean over all positives. Decisions are made by each split's own "
        "threshold and counted together. Brier score and ECE are of all slides with the probabilities of their own "
        "split's models; in the ECE opposite errors of splits can cancel, so see the single splits too."
    ),
    Estimator.WITHIN_OVERLAPPING_SPLITS: (
        f"{_RANKED} A patient who is in several test sets counts as one observation in the limits of the AUC. All "
        "other metrics are plain means over splits; their limits are the means of the splits' limits, which is "
        "conservative however much the test sets share."
    ),
}
_CONDITIONAL = (
    "Intervals and p-values are conditional on the trained models, with their seeds: the test slides are the random "
    "sample. They do not include how results vary when models are trained on other slides or with other seeds."
)
_SHARED = "Splits share training slides, and this dependence is not included either."
