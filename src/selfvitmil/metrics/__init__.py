"""Metrics for scores, decisions, probabilities and detections. Pure functions of arrays, without torch.

`ranking`: AUC with DeLong and bootstrap intervals, paired test, multiclass; ROC and precision-recall curves with bands.
`classification`: metrics at a threshold, Youden's threshold, Wilson intervals, Brier score, reliability, Platt and
temperature scaling. `detection`: FROC of the Camelyon16 challenge, non-maximum suppression. `survival`: C-index,
time-dependent AUC, Brier score, Kaplan-Meier curves, log-rank test. `regression`: errors, correlations, Bland-Altman.
`ordinal`: quadratic weighted kappa. `decision`: decision curves, conformal prediction sets.
`power`: confidence intervals to expect.

Labels are integers from 0; scores rank, higher is more positive; `MetricError` is raised if a metric is undefined.
`regression`, `ordinal` and `survival`, of which a study with classes needs nothing, load when first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

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
from selfvitmil.metrics.decision import (
    ConformalThreshold,
    Coverage,
    DecisionCurve,
    conformal_threshold,
    decision_curve,
    prediction_sets,
    set_coverage,
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

if TYPE_CHECKING:
    from selfvitmil.metrics.ordinal import OrdinalAgreement, ordinal_agreement, quadratic_weighted_kappa
    from selfvitmil.metrics.regression import (
        BlandAltman,
        CalibrationLine,
        RegressionMetrics,
        bland_altman,
        calibration_line,
        mae,
        pearson,
        r2,
        regression_metrics,
        rmse,
        spearman,
    )
    from selfvitmil.metrics.survival import (
        BreslowBaseline,
        Concordance,
        HazardRatio,
        KaplanMeier,
        LogRank,
        PairedConcordance,
        SurvivalBrier,
        TimeDependentAuc,
        breslow_baseline,
        brier_score_survival,
        evaluation_times,
        harrell_c,
        hazard_ratio,
        integrated_brier_score,
        kaplan_meier,
        log_rank,
        paired_c_test,
        restricted_mean_survival,
        time_dependent_auc,
        uno_c,
    )

__all__ = [
    "FPS", "AucInterval", "BlandAltman", "BreslowBaseline", "CalibrationLine", "CaseDetections", "Concordance",
    "ConformalThreshold", "Coverage", "CurveBands", "DecisionCurve", "Decisions", "Froc", "HazardRatio", "Interval",
    "KaplanMeier", "LogRank", "MulticlassAuc", "MulticlassDecisions", "OrdinalAgreement", "PairedAuc",
    "PairedConcordance", "Platt", "PrCurve", "RegressionMetrics", "Reliability", "RocCurve", "SurvivalBrier",
    "Temperature", "TimeDependentAuc", "auc", "auc_interval", "average_precision", "bland_altman", "breslow_baseline",
    "brier", "brier_score_survival", "calibration_line", "conformal_threshold", "confusion_matrix", "curve_bands",
    "decide", "decide_multiclass", "decision_curve", "evaluation_times", "fit_platt", "fit_temperature", "froc",
    "harrell_c", "hazard_ratio", "integrated_brier_score", "kaplan_meier", "log_rank", "mae", "multiclass_auc",
    "ordinal_agreement", "paired_auc_test", "paired_c_test", "pearson", "pr_curve", "prediction_sets",
    "quadratic_weighted_kappa", "r2", "regression_metrics", "reliability", "restricted_mean_survival", "rmse",
    "roc_curve", "set_coverage", "spearman", "suppress_points", "time_dependent_auc", "to_logits", "top_class", "uno_c",
    "wilson", "youden_threshold",
]  # fmt: skip

_LOADED_LATER = ("ordinal", "regression", "survival")


def __getattr__(name: str) -> Any:
    if name in __all__:
        for module in _LOADED_LATER:
            if name in vars(found := import_module(f"selfvitmil.metrics.{module}")):
                return getattr(found, name)
    raise AttributeError(f"module 'selfvitmil.metrics' has no attribute {name!r}")
