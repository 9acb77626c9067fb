"""All metrics of a method's predictions: per seed, over seeds, of the ensemble; by slide and by patient.

Only test slides are scored here. What goes out is nested plain data for `metrics.json`: an interval is {value, low,
high, level, method}; a metric that cannot be computed (the AUC of a test set with one class) is null, and `reasons`
beside it says why, while all others stand.

Several splits: where their test sets are disjoint (k-fold), predictions are pooled, each slide scored by the models
that did not see it, and the mean over splits stands beside it. Where test sets overlap (Monte Carlo) they are never
pooled, since a slide would count several times; only the mean over splits is given.

Patients: with two classes a patient is positive where a slide of theirs is, their score is the largest of their slides'
scores, and so they are called positive where one of their slides is. With more classes the score is the mean, the
largest of it decides, and patients whose slides have different labels are left out and named.

N slides or patients, K columns of scores: one where there are two classes, else one per class.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from selfvitmil import metrics
from selfvitmil.errors import MetricError
from selfvitmil.evaluate.predictions import Prediction
from selfvitmil.evaluate.protocol import MethodResult
from selfvitmil.metrics import AucInterval, Interval
from selfvitmil.settings import EvaluateSettings

Json = dict[str, Any]
T = TypeVar("T")

OVER = (
    "auc", "pr_auc", "accuracy", "balanced_accuracy", "f1", "macro_f1", "sensitivity", "specificity", "ppv", "npv",
    "brier", "ece",
)  # fmt: skip
"""Metrics of which means and standard deviations over seeds and splits are given."""

POOLED = (
    "every slide once, by the ensemble of the split in which it is a test slide; decisions by that split's threshold"
)
NOT_POOLED = "test sets of the splits overlap, so pooling would count slides several times: see over_splits"
SLIDE_WORDS = (
    "each slide by itself; AUC limits keep a patient's slides together, Wilson limits take slides as independent"
)
PATIENT_WORDS = "largest score of the patient's slides, by the slides' threshold; positive where one slide is"
PATIENT_WORDS_MULTI = "mean score of the patient's slides, the largest decides"
SAME_AS_SLIDE = "every patient has one slide: the same numbers as by slide"


@dataclass(frozen=True, eq=False)
class Samples:
    """Slides or patients with their truth and what one seed, or the ensemble, says of them: plain arrays."""

    names: tuple[str, ...]
    labels: NDArray[np.int64]
    scores: NDArray[np.float64]
    """(N, K) as the aggregator gives them."""
    probabilities: NDArray[np.float64]
    """(N, K) calibrated where there is a calibration, else the scores."""
    decisions: NDArray[np.int64]
    patients: tuple[str, ...]
    calibrated: bool
    thresholds: tuple[float, ...]
    """The different ones that decided."""
    threshold_from: tuple[str, ...]
    left_out: tuple[str, ...] = ()
    """Patients whose slides have different labels (more than two classes)."""

    def __len__(self) -> int:
        return len(self.names)


@dataclass(frozen=True, eq=False)
class Scores:
    """All metrics of one method; `slide` and `patient` are levels as `to_json` shows them."""

    about: Json
    slide: Json
    patient: Json | None
    """None where every patient has one slide."""

    def to_json(self) -> Json:
        patient = self.patient if self.patient is not None else {"same_as": "slide", "words": SAME_AS_SLIDE}
        return {**self.about, "slide": self.slide, "patient": patient}


# ---------------------------------------------------------------------------------------------------- arrays


def samples_of(
    predictions: Iterable[Prediction],
    *,
    seed: int | None = None,
    split: str | None = None,
    level: Literal["slide", "patient"] = "slide",
) -> Samples:
    """The test slides of one method and seed (None: the ensemble) as arrays; of one split, or of all together.

    MetricError where a slide occurs twice: predictions of several methods, or of splits whose test sets overlap.
    """
    rows = [row for row in predictions if row.part == "test" and row.seed == seed and split in (None, row.split)]
    if level == "patient":
        return _by_patient(rows)
    return _samples(rows)


def _samples(rows: Sequence[Prediction]) -> Samples:
    twice = [slide for slide, count in Counter(row.slide for row in rows).items() if count > 1]
    if twice:
        raise MetricError(
            f"{twice[0]}: several predictions in one set, as of {len(twice)} slides",
            "a slide counts once",
            "Take the predictions of one method and, where test sets overlap, of one split",
        )
    calibrated = bool(rows) and all(row.calibrated is not None for row in rows)
    return Samples(
        names=tuple(row.slide for row in rows),
        labels=np.array([row.label for row in rows], dtype=np.int64),
        scores=np.array([row.score for row in rows], dtype=np.float64),
        probabilities=np.array([row.calibrated if calibrated else row.score for row in rows], dtype=np.float64),
        decisions=np.array([row.decision for row in rows], dtype=np.int64),
        patients=tuple(row.patient for row in rows),
        calibrated=calibrated,
        thresholds=tuple(dict.fromkeys(row.threshold for row in rows if row.threshold is not None)),
        threshold_from=tuple(dict.fromkeys(row.threshold_from for row in rows)),
    )


def _by_patient(rows: Sequence[Prediction]) -> Samples:
    slides = _samples(rows)
    members: dict[tuple[str, str], list[int]] = defaultdict(list)
    for place, row in enumerate(rows):
        members[row.split, row.patient].append(place)
    binary = slides.scores.shape[1:] == (1,)
    left_out = () if binary else tuple(key[1] for key, own in members.items() if len(set(slides.labels[own])) > 1)
    groups = [own for key, own in members.items() if key[1] not in left_out]
    pool = np.max if binary else np.mean
    columns = slides.scores.shape[1:]

    def pooled(values: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.array([pool(values[own], axis=0) for own in groups]).reshape(-1, *columns)

    scores = pooled(slides.scores)
    decisions = [slides.decisions[own].max() for own in groups] if binary else scores.argmax(axis=1)
    names = tuple(rows[own[0]].patient for own in groups)
    return Samples(
        names=names,
        labels=np.array([slides.labels[own].max() for own in groups], dtype=np.int64),
        scores=scores,
        probabilities=pooled(slides.probabilities),
        decisions=np.array(decisions, dtype=np.int64),
        patients=names,
        calibrated=slides.calibrated,
        thresholds=slides.thresholds,
        threshold_from=slides.threshold_from,
        left_out=left_out,
    )


def are_disjoint(predictions: Iterable[Prediction]) -> bool:
    """Whether no slide is a test slide of two splits, so that splits may be pooled."""
    places = {(row.split, row.slide) for row in predictions if row.part == "test"}
    return len(places) == len({slide for _, slide in places})


# ---------------------------------------------------------------------------------------------------- one set


def score_samples(samples: Samples, class_names: Sequence[str], evaluate: EvaluateSettings) -> Json:
    """All metrics of one set of slides or patients."""
    binary = len(class_names) == 2
    counts = Counter(samples.labels.tolist())
    reasons: dict[str, str] = {}
    thresholds = samples.thresholds
    told: Json = {
        "num": len(samples),
        "counts": {name: counts[k] for k, name in enumerate(class_names)},
        "threshold": thresholds[0] if len(thresholds) == 1 else list(thresholds) or None,
        "threshold_from": ", ".join(samples.threshold_from),
        "probabilities": "calibrated" if samples.calibrated else "as given by the aggregator",
    }
    if samples.left_out:
        told["left_out"] = {"patients": list(samples.left_out), "why": "their slides have different labels"}
    told |= (_score_binary if binary else _score_multiclass)(samples, class_names, evaluate, reasons)
    return {**told, "reasons": reasons}


def _score_binary(
    samples: Samples, class_names: Sequence[str], evaluate: EvaluateSettings, reasons: dict[str, str]
) -> Json:
    labels, score, probability = samples.labels, samples.scores[:, 0], samples.probabilities[:, 0]
    decided = attempt(reasons, "decisions", lambda: metrics.decide(labels, samples.decisions, 0.5, evaluate.confidence))
    curve = attempt(reasons, "reliability", lambda: metrics.reliability(labels, probability, level=evaluate.confidence))
    names = ("accuracy", "balanced_accuracy", "f1", "sensitivity", "specificity", "ppv", "npv")
    return {
        "auc": attempt(reasons, "auc", lambda: _auc(labels, score, samples.patients, evaluate)),
        "pr_auc": attempt(reasons, "pr_auc", lambda: {"value": metrics.average_precision(labels, score)}),
        **{name: _interval(getattr(decided, name, None), name, reasons) for name in names},
        "confusion": None if decided is None else decided.confusion.tolist(),
        "brier": attempt(reasons, "brier", lambda: {"value": metrics.brier(labels, probability)}),
        "ece": None if curve is None else {"value": curve.ece},
        "reliability": None if curve is None else _curve(curve),
    }


def _score_multiclass(
    samples: Samples, class_names: Sequence[str], evaluate: EvaluateSettings, reasons: dict[str, str]
) -> Json:
    labels, scores, level = samples.labels, samples.scores, evaluate.confidence
    number = len(class_names)
    decided = attempt(reasons, "decisions", lambda: metrics.decide_multiclass(labels, samples.decisions, number, level))
    top = attempt(reasons, "reliability", lambda: metrics.top_class(labels, samples.probabilities))
    curve = None if top is None else metrics.reliability(*top, level=level)
    per_class = {
        name: _one_class(name, (labels == k).astype(np.int64), scores[:, k], samples, decided, k, evaluate, reasons)
        for k, name in enumerate(class_names)
    }
    precisions = [one["pr_auc"] for one in per_class.values()]
    if None in precisions:
        reasons["pr_auc"] = "a class has none, and so has the mean over classes"
    return {
        "auc": attempt(reasons, "auc", lambda: _macro_auc(labels, scores, samples.patients, evaluate)),
        "pr_auc": None if None in precisions else {"value": float(np.mean([one["value"] for one in precisions]))},
        "accuracy": _interval(getattr(decided, "accuracy", None), "accuracy", reasons),
        "balanced_accuracy": _interval(getattr(decided, "balanced_accuracy", None), "balanced_accuracy", reasons),
        "macro_f1": None if decided is None else _value(decided.macro_f1, "macro_f1", reasons),
        "confusion": None if decided is None else decided.confusion.tolist(),
        "brier": attempt(reasons, "brier", lambda: {"value": metrics.brier(labels, samples.probabilities)}),
        "ece": None if curve is None else {"value": curve.ece},
        "reliability": None if curve is None else _curve(curve),
        "per_class": per_class,
    }


def _one_class(
    name: str, label: NDArray[np.int64], score: NDArray[np.float64], samples: Samples, decided: Any, k: int,
    evaluate: EvaluateSettings, reasons: dict[str, str],
) -> Json:  # fmt: skip
    """One class against the rest."""
    own = None if decided is None else decided.per_class[k]
    names = ("f1", "sensitivity", "specificity", "ppv", "npv")
    return {
        "num": int(label.sum()),
        "auc": attempt(reasons, f"{name}: auc", lambda: _auc(label, score, samples.patients, evaluate)),
        "pr_auc": attempt(reasons, f"{name}: pr_auc", lambda: {"value": metrics.average_precision(label, score)}),
        **{key: _interval(getattr(own, key, None), f"{name}: {key}", reasons) for key in names},
    }


def _auc(label: Any, score: Any, patients: Sequence[str], evaluate: EvaluateSettings) -> Json:
    found = metrics.auc_interval(
        label, score, level=evaluate.confidence, groups=patients, resamples=evaluate.bootstrap, seed=evaluate.seed
    )
    return interval_json(found)


def _macro_auc(label: Any, scores: Any, patients: Sequence[str], evaluate: EvaluateSettings) -> Json:
    found = metrics.multiclass_auc(
        label, scores, level=evaluate.confidence, groups=patients, resamples=evaluate.bootstrap, seed=evaluate.seed
    )
    return interval_json(found.macro)


def attempt(reasons: dict[str, str], name: str, compute: Callable[[], T]) -> T | None:
    """What it computes, or None with the reason noted."""
    try:
        return compute()
    except MetricError as error:
        reasons[name] = error.reason
        return None


def _interval(interval: Interval | None, name: str, reasons: dict[str, str]) -> Json | None:
    if interval is None:
        reasons[name] = reasons["decisions"]
        return None
    if math.isnan(interval.value):
        reasons[name] = "no slide or patient that it is a share of"
        return None
    return interval_json(interval)


def _value(value: float, name: str, reasons: dict[str, str]) -> Json | None:
    if math.isnan(value):
        reasons[name] = "it is undefined for a class without slides, and so is the mean"
        return None
    return {"value": value}


def interval_json(interval: Interval) -> Json:
    """An interval as `metrics.json` has it; of an AUC also the bootstrap's limits and whether the two agree."""
    told = {name: getattr(interval, name) for name in ("value", "low", "high", "level", "method")}
    if isinstance(interval, AucInterval):
        other = interval.bootstrap
        told |= {
            "bootstrap": {"low": other.low, "high": other.high, "method": other.method},
            "agree": interval.agree,
            "statement": interval.statement,
        }
    return told


def read_interval(told: Mapping[str, Any] | None) -> Interval:
    """The interval of a metric of `metrics.json`; one that could not be computed is NaN."""
    if told is None:
        return Interval(math.nan, math.nan, math.nan, "not computed")
    return Interval(told["value"], told["low"], told["high"], told["method"], told["level"])


def _curve(curve: metrics.Reliability) -> Json:
    return {name: getattr(curve, name).tolist() for name in ("probability", "share", "low", "high", "count")}


# ---------------------------------------------------------------------------------------------------- one method


def score_method(result: MethodResult, evaluate: EvaluateSettings) -> Scores:
    """All metrics of a method, by slide and by patient."""
    test = [row for row in result.predictions if row.part == "test"]
    slides_of = Counter(row.patient for row in {row.slide: row for row in test}.values())
    several = max(slides_of.values(), default=0) > 1
    slide = _level(result, "slide", SLIDE_WORDS, evaluate)
    words = PATIENT_WORDS if len(result.class_names) == 2 else PATIENT_WORDS_MULTI
    patient = _level(result, "patient", words, evaluate) if several else None
    return Scores(_about(result), slide, patient)


def _about(result: MethodResult) -> Json:
    """What made the numbers: for every one which data, which threshold, how many seeds."""
    binary = len(result.class_names) == 2
    return {
        "method": result.method,
        "aggregator": result.aggregator,
        "encoder": result.encoder,
        "tiling": result.tiling,
        "protocol": result.protocol,
        "test_labels_opened_for": result.labels_opened,
        "classes": list(result.class_names),
        "positive": result.class_names[1] if binary else None,
        "score": f"probability of {result.class_names[1]}" if binary else "probability of each class",
        "seeds": list(result.seeds),
        "slides": _counts(result),
        "choices": [
            {"split": split, "seed": "ensemble" if seed is None else seed, **choice.to_json()}
            for (split, seed), choice in result.choices.items()
        ],
        "trainings": [{"split": run.split, "seed": run.seed, "epoch": run.epoch} for run in result.runs],
        "warnings": list(result.warnings),
    }


def _counts(result: MethodResult) -> Json:
    """Slides and patients of validation and test, per class, for every split."""
    told: Json = {}
    for split in result.splits:
        told[split] = {}
        for part in ("val", "test"):
            rows = [row for row in result.predictions if (row.split, row.part, row.seed) == (split, part, None)]
            counts = Counter(row.label for row in rows)
            per_class = {name: counts[k] for k, name in enumerate(result.class_names)}
            told[split][part] = {"slides": per_class, "patients": len({row.patient for row in rows})}
    return told


def _level(result: MethodResult, level: Literal["slide", "patient"], words: str, evaluate: EvaluateSettings) -> Json:
    names, seeds = result.class_names, (*result.seeds, None)

    def scored(seed: int | None, split: str | None) -> Json:
        samples = samples_of(result.predictions, seed=seed, split=split, level=level)
        return score_samples(samples, names, evaluate)

    by_split = {split: _with_seeds({seed: scored(seed, split) for seed in seeds}) for split in result.splits}
    if len(by_split) == 1:
        return {"words": words, **next(iter(by_split.values())), "splits": {}, "over_splits": None}
    pooled: Json = {"ensemble": None, "seeds": {}, "over_seeds": None}
    how = NOT_POOLED
    if are_disjoint(result.predictions):
        pooled, how = _with_seeds({seed: scored(seed, None) for seed in seeds}), POOLED
    else:
        pooled["over_seeds"] = _over_seeds_of_means(by_split, result.seeds)
    over_splits = _spread([own["ensemble"] for own in by_split.values()], "splits")
    return {"words": words, "pooled": how, **pooled, "splits": by_split, "over_splits": over_splits}


def _with_seeds(scored: Mapping[int | None, Json]) -> Json:
    seeds = {str(seed): own for seed, own in scored.items() if seed is not None}
    return {"ensemble": scored[None], "seeds": seeds, "over_seeds": _spread(list(seeds.values()), "seeds")}


def _over_seeds_of_means(by_split: Mapping[str, Json], seeds: Sequence[int]) -> Json:
    """Spread over seeds of the mean over splits, where splits cannot be pooled."""
    means = []
    for seed in seeds:
        over = _spread([own["seeds"][str(seed)] for own in by_split.values()], "splits")
        means.append({name: None if told["mean"] is None else {"value": told["mean"]} for name, told in over.items()})
    return _spread(means, "seeds")


def _spread(sets: Sequence[Json], what: str) -> Json:
    """Mean and sample standard deviation of every metric, over those sets that have it (their number beside)."""
    told: Json = {}
    for name in OVER:
        if not any(name in one for one in sets):
            continue
        values = [one[name]["value"] for one in sets if one.get(name) is not None]
        told[name] = {
            "mean": float(np.mean(values)) if values else None,
            "sd": float(np.std(values, ddof=1)) if len(values) > 1 else None,
            what: len(values),
        }
    return told
