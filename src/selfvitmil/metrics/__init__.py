"""Metrics for scores, decisions, probabilities and detections. Pure functions of arrays, without torch.

`ranking`: AUC with DeLong and bootstrap intervals, paired test, multiclass; ROC and precision-recall curves with bands.
`classification`: metrics at a threshold, Youden's threshold, Wilson intervals, Brier score, reliability, Platt and
temperature scaling. `detection`: FROC of the Camelyon16 challenge, non-maximum suppression.

Labels are integers from 0; scores rank, higher is more positive; `MetricError` is raised if a metric is undefined.
"""

from selfvitmil.metrics.classification import (
    Decisions,
    Interval,
    MulticlassDecisions,
    Platt,
    Reliability,
    Temperature,
    brier,
    confusion_matrix,
    decide,
    decide_multiclass,
    fit_platt,
    fit_temperature,
    reliability,
    to_logits,
    top_class,
    wilson,
    youden_threshold,
)
from selfvitmil.metrics.detection import FPS, CaseDetections, Froc, froc, suppress_points
from selfvitmil.metrics.ranking import (
    AucInterval,
    CurveBands,
    MulticlassAuc,
    PairedAuc,
    PrCurve,
    RocCurve,
    auc,
    auc_interval,
    average_precision,
    curve_bands,
    multiclass_auc,
    paired_auc_test,
    pr_curve,
    roc_curve,
)

__all__ = [
    "FPS",
    "AucInterval",
    "CaseDetections",
    "CurveBands",
    "Decisions",
    "Froc",
    "Interval",
    "MulticlassAuc",
    "MulticlassDecisions",
    "PairedAuc",
    "Platt",
    "PrCurve",
    "Reliability",
    "RocCurve",
    "Temperature",
    "auc",
    "auc_interval",
    "average_precision",
    "brier",
    "confusion_matrix",
    "curve_bands",
    "decide",
    "decide_multiclass",
    "fit_platt",
    "fit_temperature",
    "froc",
    "multiclass_auc",
    "paired_auc_test",
    "pr_curve",
    "reliability",
    "roc_curve",
    "suppress_points",
    "to_logits",
    "top_class",
    "wilson",
    "youden_threshold",
]
