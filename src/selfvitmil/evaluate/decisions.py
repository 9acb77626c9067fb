"""What decisions a method supports: its decision curves on the test set, and conformal prediction sets.

A decision curve (Vickers and Elkin 2006, doi:10.1177/0272989X06295361) tells at which threshold probabilities a
decision by the model is of more use than treating everyone or no one. A prediction set holds all classes that cannot be
excluded: its threshold comes from the validation slides of the split, so that sets of new patients contain the true
class with the probability `evaluate.coverage`, and the test set shows how often they do. Both count patients: where
some have several slides, a patient's score is that of `method_metrics`. With more than two classes each has a curve
against the rest.

Validation slides also choose the epoch, so they are a little easier than new ones, and coverage may fall short of what
was asked for by as much; the interval on the test set tells. Sets are made of uncalibrated scores, since calibration is
fitted on the same slides.

N patients, C classes, T threshold probabilities.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from selfvitmil import metrics
from selfvitmil.errors import MetricError
from selfvitmil.evaluate.method_metrics import Samples, are_disjoint, attempt, interval_json, normalized, samples_of
from selfvitmil.evaluate.predictions import Prediction
from selfvitmil.metrics import ConformalThreshold, DecisionCurve
from selfvitmil.metrics.classification import bootstrap, percentile_interval
from selfvitmil.settings import EvaluateSettings
from selfvitmil.store.files import write_csv

Json = dict[str, Any]
Level = Literal["slide", "patient"]
METHOD = "lac"
"""Least ambiguous sets: of all sets with their coverage the smallest on average (Sadinle et al. 2019)."""
SET_FILE, CURVE_FILE = "prediction_sets.csv", "decision_curve.csv"
OVERLAP = "test sets of the splits overlap, so patients would count several times"


def level_of(predictions: Iterable[Prediction]) -> Level:
    """Return `patient` where a patient has several slides, else `slide`."""
    pairs = {(row.patient, row.slide) for row in predictions}
    return "patient" if len({patient for patient, _ in pairs}) < len(pairs) else "slide"


# ---------------------------------------------------------------------------------------------------- curves


def decision_curves(
    samples: Samples, class_names: Sequence[str], evaluate: EvaluateSettings
) -> dict[str, DecisionCurve]:
    """Return class -> decision curve: of the positive class of two, of each of more against the rest."""
    probabilities_NK = samples.probabilities
    columns = {class_names[1]: 0} if len(class_names) == 2 else {name: k for k, name in enumerate(class_names)}
    how: Json = {"level": evaluate.confidence, "resamples": evaluate.bootstrap, "seed": evaluate.seed}
    curves: dict[str, DecisionCurve] = {}
    for name, column in columns.items():
        labels = samples.labels == (1 if len(class_names) == 2 else column)
        if labels.all() or not labels.any():
            raise MetricError(
                f"all or none of the patients are {name}", "a decision curve needs both", code="one-class"
            )
        curves[name] = metrics.decision_curve(
            labels.astype(np.int64), probabilities_NK[:, column], groups=samples.patients, **how
        )
    return curves


def useful_range(curve: DecisionCurve) -> tuple[float, float] | None:
    """Return the longest range of threshold probabilities in which the model beats treating everyone and no one."""
    better = curve.model > np.maximum(curve.treat_all, 0.0) + 1e-12
    edges = np.flatnonzero(np.diff(np.r_[False, better, False].astype(np.int8)))
    if not len(edges):
        return None
    starts, ends = edges[::2], edges[1::2]
    longest = int(np.argmax(ends - starts))
    low, high = curve.thresholds[[starts[longest], ends[longest] - 1]]
    return round(float(low), 6), round(float(high), 6)


def curves_json(curves: Mapping[str, DecisionCurve], samples: Samples) -> Json:
    found = {name: useful_range(curve) for name, curve in curves.items()}
    ranges = {name: None if own is None else {"low": own[0], "high": own[1]} for name, own in found.items()}
    return {"num": len(samples), "calibrated": samples.calibrated, "better_than_all_and_none": ranges}


def write_curves(path: Path, curves: Mapping[str, DecisionCurve]) -> None:
    """Write the net benefit of every class at every threshold probability."""
    rows: list[list[Any]] = [["class", "threshold", "model", "low", "high", "treat_all", "treat_none"]]
    for name, curve in curves.items():
        columns = (curve.thresholds, curve.model, curve.low, curve.high, curve.treat_all, curve.treat_none)
        rows += [[name, *(f"{value:.6g}" for value in row)] for row in zip(*columns, strict=True)]
    write_csv(path, rows)


# ---------------------------------------------------------------------------------------------------- sets


@dataclass(frozen=True, eq=False)
class PredictionSets:
    """Prediction sets of the test slides, or patients, of one or several splits."""

    samples: Samples
    sets_NC: NDArray[np.bool_]
    thresholds: Mapping[str, ConformalThreshold]
    """By split."""


def set_threshold(
    validation: Sequence[Prediction], class_names: Sequence[str], coverage: float, level: Level
) -> ConformalThreshold:
    """Return the threshold of prediction sets from the validation slides of one split.

    Raises MetricError where these are too few for the coverage.
    """
    samples = samples_of([replace(row, part="test") for row in validation], level=level)
    needed = math.ceil(coverage / (1 - coverage) - 1e-9)
    if len(samples) < needed:
        raise MetricError(
            f"{len(samples)} validation {level}s are too few",
            f"sets that contain the true class in {coverage:.3g} of cases need {needed}",
            "Lower evaluate.coverage, raise train.validation, or add slides",
            code="too-few-validation-slides",
        )
    return metrics.conformal_threshold(samples.labels, _scores(samples), 1 - coverage, METHOD)


def package_sets(validation: Sequence[Prediction], class_names: Sequence[str], coverage: float) -> Json:
    """Return what a package tells of prediction sets: their threshold, or why there is none; no names."""
    level = level_of(validation)
    try:
        found = set_threshold(validation, class_names, coverage, level)
    except MetricError as error:
        return {"reason": error.reason}
    return {"quantile": found.quantile, "alpha": found.alpha, "count": found.count, "level": level}


def packaged_threshold(info: Mapping[str, Any] | None) -> tuple[ConformalThreshold | None, str]:
    """Return the threshold of a `package_sets`, or why there is none. Raises KeyError, TypeError or ValueError."""
    if info is None:
        return None, "the package is of an earlier version, without a threshold for them: package the model again"
    if "reason" in info:
        return None, str(info["reason"])
    return ConformalThreshold(float(info["quantile"]), float(info["alpha"]), METHOD, int(info["count"])), ""


def _scores(samples: Samples) -> NDArray[np.float64]:
    """Return uncalibrated scores: (N,) of the positive class of two, else (N, C) that sum to 1."""
    scores = normalized(samples.scores)
    return scores[:, 0] if scores.shape[1] == 1 else scores


def sets_of(samples: Samples, thresholds: Mapping[str, ConformalThreshold]) -> PredictionSets:
    """Return the sets of samples whose split has a threshold."""
    kept = np.array([split in thresholds for split in samples.splits])
    own = _only(samples, kept)
    scores = _scores(own)
    sets: NDArray[np.bool_] | None = None
    for split, threshold in thresholds.items():
        of_split = metrics.prediction_sets(scores, threshold)
        rows = np.array([name == split for name in own.splits])
        sets = of_split if sets is None else np.where(rows[:, None], of_split, sets)
    assert sets is not None, "sets need a threshold"
    return PredictionSets(own, sets, thresholds)


def _only(samples: Samples, kept: NDArray[np.bool_]) -> Samples:
    texts = {
        name: tuple(each for each, take in zip(getattr(samples, name), kept, strict=True) if take)
        for name in ("names", "patients", "splits")
    }
    arrays = {name: getattr(samples, name)[kept] for name in ("labels", "scores", "probabilities", "decisions")}
    return replace(samples, **texts, **arrays)


def sets_json(found: PredictionSets, class_names: Sequence[str], level: Level, evaluate: EvaluateSettings) -> Json:
    """Return coverage, with its Wilson interval, and mean size of the sets, with a bootstrap interval."""
    coverage = metrics.set_coverage(found.samples.labels, found.sets_NC, level=evaluate.confidence)
    size, patients = found.sets_NC.sum(axis=1), np.unique(found.samples.patients, return_inverse=True)[1]
    values = bootstrap(
        lambda drawn_RN: drawn_RN @ size / drawn_RN.sum(axis=1), np.zeros_like(patients), patients,
        evaluate.bootstrap, evaluate.seed,
    )  # fmt: skip
    return {
        "level": level,
        "method": METHOD,
        "wanted": round(1 - next(iter(found.thresholds.values())).alpha, 6),
        "num": len(found.samples),
        "coverage": interval_json(coverage.coverage),
        "per_class": {
            name: None if own is None else interval_json(own)
            for name, own in zip(class_names, coverage.per_class, strict=True)
        },
        "mean_size": interval_json(percentile_interval(coverage.mean_size, values, evaluate.confidence)),
        "empty": coverage.empty,
        "single": coverage.single,
        "thresholds": [
            {"split": split, "quantile": each.quantile, "count": each.count} for split, each in found.thresholds.items()
        ],
    }


def set_of_slide(scores: Sequence[float], class_names: Sequence[str], threshold: ConformalThreshold) -> tuple[str, ...]:
    """Return the classes in the prediction set of one slide, the likeliest first, from its uncalibrated scores."""
    scores_1C = normalized([scores]) if len(scores) > 1 else np.array([[1 - scores[0], scores[0]]])
    return _in_order(metrics.prediction_sets(scores_1C, threshold)[0], scores_1C[0], class_names)


def _in_order(set_C: NDArray[np.bool_], scores_C: NDArray[np.float64], class_names: Sequence[str]) -> tuple[str, ...]:
    return tuple(class_names[int(k)] for k in np.argsort(-scores_C, kind="stable") if set_C[k])


def write_sets(path: Path, found: PredictionSets, class_names: Sequence[str], level: Level) -> None:
    """Write one row per slide, or patient: its label and the classes of its set, the likeliest first."""
    rows: list[list[Any]] = [[level, "split", "label", "set", "size", "covered"]]
    scores = _scores(found.samples)
    scores_NC = np.stack([1 - scores, scores], axis=1) if scores.ndim == 1 else scores
    for row, name in enumerate(found.samples.names):
        own = _in_order(found.sets_NC[row], scores_NC[row], class_names)
        label = int(found.samples.labels[row])
        cells = [class_names[label], "; ".join(own), len(own), "yes" if found.sets_NC[row, label] else "no"]
        rows.append([name, found.samples.splits[row], *cells])
    write_csv(path, rows)


# ---------------------------------------------------------------------------------------------------- one method


@dataclass(frozen=True, eq=False)
class Decisions:
    """Decision curves and prediction sets of one method; None where there are none, and `reasons` say why."""

    level: Level
    samples: Samples
    curves: Mapping[str, DecisionCurve] | None
    sets: PredictionSets | None
    reasons: Mapping[str, str]

    def to_json(self, class_names: Sequence[str], evaluate: EvaluateSettings) -> Json:
        return {
            "decision_curve": None if self.curves is None else curves_json(self.curves, self.samples),
            "prediction_sets": None if self.sets is None else sets_json(self.sets, class_names, self.level, evaluate),
            "reasons": dict(self.reasons),
        }

    def write(self, folder: Path, class_names: Sequence[str]) -> None:
        """Write `decision_curve.csv` and `prediction_sets.csv`, or remove earlier ones."""
        for name in (CURVE_FILE, SET_FILE):
            (folder / name).unlink(missing_ok=True)
        if self.curves is not None:
            write_curves(folder / CURVE_FILE, self.curves)
        if self.sets is not None:
            write_sets(folder / SET_FILE, self.sets, class_names, self.level)


def decisions_of(
    predictions: Sequence[Prediction],
    class_names: Sequence[str],
    evaluate: EvaluateSettings,
    thresholds: Mapping[str, ConformalThreshold] | None = None,
) -> Decisions:
    """Return what the ensemble's predictions of the test slides support.

    The thresholds of prediction sets come from the validation slides among the predictions, unless they are given.
    """
    rows = [row for row in predictions if row.seed is None]
    level, reasons = level_of(row for row in rows if row.part == "test"), dict[str, str]()
    samples = samples_of(rows, level=level, overlap=True)
    if not are_disjoint(rows):
        return Decisions(level, samples, None, None, {"decision_curve": OVERLAP, "prediction_sets": OVERLAP})
    curves = attempt(reasons, "decision_curve", lambda: decision_curves(samples, class_names, evaluate))
    if thresholds is None:
        thresholds = _thresholds(rows, class_names, evaluate, level, reasons)
    return Decisions(level, samples, curves, sets_of(samples, thresholds) if thresholds else None, reasons)


def _thresholds(
    rows: Sequence[Prediction],
    class_names: Sequence[str],
    evaluate: EvaluateSettings,
    level: Level,
    reasons: dict[str, str],
) -> dict[str, ConformalThreshold]:
    found: dict[str, ConformalThreshold] = {}
    splits = list(dict.fromkeys(row.split for row in rows))
    for split in splits:
        own = [row for row in rows if row.part == "val" and row.split == split]
        name = "prediction_sets" if len(splits) == 1 else f"prediction_sets of {split}"
        if not own:
            reasons[name] = "there are no validation slides to choose their threshold on"
            continue
        threshold = attempt(reasons, name, lambda own=own: set_threshold(own, class_names, evaluate.coverage, level))
        if threshold is not None:
            found[split] = threshold
    return found
