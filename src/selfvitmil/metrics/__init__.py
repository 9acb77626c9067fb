"""How good are scores, decisions, probabilities, detections? Pure functions of arrays, free of torch.

`ranking`: AUC with DeLong and bootstrap intervals, paired test, several classes. `curves`: ROC, precision-recall, their
bands. `decisions`: what a threshold decides, and Youden's. `calibration`: Brier, reliability, Platt and temperature
scaling. `detection`: the Camelyon16 challenge's FROC, points from scored tiles. `intervals`: what these share.

Labels are whole numbers from 0; scores rank, higher is more positive; what cannot be computed is a `MetricError`.
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
