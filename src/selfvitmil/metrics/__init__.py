"""Metrics for scores, decisions, probabilities and detections. Pure functions of arrays, without torch.

`ranking`: AUC with DeLong and bootstrap intervals, paired test, multiclass. `curves`: ROC, precision-recall and their
bands. `decisions`: metrics at a threshold, and Youden's threshold. `calibration`: Brier score, reliability, Platt and
temperature scaling. `detection`: FROC of the Camelyon16 challenge, non-maximum suppression. `intervals`: shared parts.

Labels are integers from 0; scores rank, higher is more positive; `MetricError` is raised if a metric is undefined.
"""

from selfvitmil.metrics.calibration import (
    Platt,
    Reliability,
    Temperature,
    brier,
    fit_platt,
    fit_temperature,
    reliability,
    to_logits,
    top_class,
)
from selfvitmil.metrics.curves import (
    CurveBands,
    PrCurve,
    RocCurve,
    average_precision,
    curve_bands,
    pr_curve,
    roc_curve,
)
from selfvitmil.metrics.decisions import (
    Decisions,
    MulticlassDecisions,
    confusion_matrix,
    decide,
    decide_multiclass,
    youden_threshold,
)
from selfvitmil.metrics.detection import FPS, CaseDetections, Froc, froc, suppress_points
from selfvitmil.metrics.intervals import Interval, wilson
from selfvitmil.metrics.ranking import (
    AucInterval,
    MulticlassAuc,
    PairedAuc,
    auc,
    auc_interval,
    multiclass_auc,
    paired_auc_test,
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
