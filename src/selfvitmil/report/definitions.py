"""What the metrics of the report mean, in one sentence or two each, and which words of tables stand for them."""

from __future__ import annotations

import re

DEFINITIONS = {
    "AUC": "Area under the ROC curve: the share of pairs of a positive and a negative slide in which the positive one "
    "has the higher score. 0.5 is chance, 1 a perfect ranking. It does not depend on a threshold.",
    "macro AUC": "Mean over the classes of the AUC of each class against all others.",
    "average precision": "Mean of the precision over all positive slides, each at its own score (area under the "
    "precision-recall curve). Chance is the share of positives.",
    "accuracy": "Share of slides with the right decision. It depends on how many slides of each class there are.",
    "balanced accuracy": "Mean of the sensitivities of all classes; with two classes the mean of sensitivity and "
    "specificity. Chance is 1 divided by the number of classes.",
    "sensitivity": "Share of the positive slides that are called positive (recall, true positive rate).",
    "specificity": "Share of the negative slides that are called negative (true negative rate).",
    "positive predictive value": "Share of the slides called positive that are positive (precision). It holds for the "
    "share of positives in this test set only.",
    "negative predictive value": "Share of the slides called negative that are negative. It holds for the share of "
    "positives in this test set only.",
    "F1": "Harmonic mean of sensitivity and positive predictive value.",
    "macro F1": "Mean of the F1 of all classes.",
    "Brier score": "Mean squared difference between probability and outcome. 0 is perfect; always stating the share of "
    "positives p gives p (1 - p).",
    "calibration error (ECE)": "Mean difference between stated probability and the share of positives among slides "
    "with about that probability. 0 is perfect calibration.",
    "p": "Probability of a difference at least this large if both methods were equally good (two-sided test).",
    "p Holm": "The p-value corrected for the number of comparisons by Holm's method.",
    "AUC of seeds": "Mean and standard deviation of the AUC over training runs with different random seeds.",
    "FROC": "Sensitivity for lesions at a given number of false positives per slide; the score is the mean over 1/4, "
    "1/2, 1, 2, 4 and 8 false positives per slide (Camelyon16).",
    "coverage": "Share of the annotated tumour area that tiles above the threshold of the heatmap cover.",
    "Dice": "Overlap of marked and annotated area: twice the common area divided by the sum of both areas.",
    "tile AUC": "AUC of tile scores within a slide: tiles with annotated tumour against tiles without.",
    "tile AP": "Average precision of tile scores within a slide.",
    "hit rate": "Share of positive slides whose highest-scoring tile has annotated tumour.",
    "integrated Brier score": "Mean squared difference between the predicted probability to be event-free and what "
    "happened, over time and patients, weighted for censoring. 0 is perfect; always stating 0.5 gives 0.25.",
    "C-index": "Share of pairs of patients in which the one whose event comes first has the higher risk. 0.5 is "
    "chance.",
    "Harrell's C-index": "Share of comparable pairs of patients in which the one whose event comes first has the "
    "higher risk. 0.5 is chance. It depends on how many patients are censored.",
    "Uno's C-index": "The same share with pairs weighted by the probability of not being censored, so that it does not "
    "depend on how long patients were followed.",
    "time-dependent AUC": "AUC of the risk between patients with an event up to a given time and those without "
    "one then.",
    "hazard ratio, high against low risk": "How many times as often events happen in the group with the high risk, by "
    "Cox's model. 1 is no difference.",
    "p of the log-rank test": "Probability of survival curves at least this different if both groups were alike.",
    "mean absolute error": "Mean distance between predicted and true value, in the unit of the value.",
    "root mean squared error": "Square root of the mean squared distance between predicted and true value; large "
    "errors count more.",
    "R²": "Share of the variance of the true values that predictions explain. 0 is predicting their mean; it may be "
    "negative.",
    "Pearson's correlation": "How well predicted and true values lie on a straight line, from -1 to 1.",
    "Spearman's correlation": "Pearson's correlation of the ranks: how well the order is predicted.",
    "quadratic weighted kappa": "Agreement of predicted and true level beyond chance; an error counts by the square of "
    "its distance in levels. 1 is perfect, 0 chance.",
    "at most one level off": "Share of slides whose predicted level is the true one or next to it.",
    "mean distance in levels": "Mean number of levels between prediction and truth.",
    "macro average precision": "Mean over the labels of the average precision of each.",
    "95 % CI": "Confidence interval: in 95 of 100 repetitions with other test slides of the same kind, such an "
    "interval contains the true value. It does not cover how results vary with other training slides or seeds.",
}
"""Name of a metric -> what it means."""
_ALIASES = {
    "acc.": "accuracy",
    "bal. acc.": "balanced accuracy",
    "sens.": "sensitivity",
    "spec.": "specificity",
    "ECE": "calibration error (ECE)",
    "balanced_accuracy": "balanced accuracy",
}


def definition_of(text: str) -> tuple[str, str] | None:
    """Return id and definition of the metric that a cell names, with or without limits behind it; None for others."""
    name = " ".join(re.sub(r"\[[^\]]*\]", "", text).split())
    name = _ALIASES.get(name, name)
    return (definition_id(name), DEFINITIONS[name]) if name in DEFINITIONS else None


def definition_id(name: str) -> str:
    """Return the id of the element that explains a metric."""
    return "def-" + re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
