"""All metrics of a method's predictions on the test set: per seed, over seeds, of the ensemble; by slide and patient.

The output is nested plain data for `metrics.json`: an interval is {value, low, high, level, method}; a metric that is
undefined (the AUC of a test set with one class) is null, and `reasons` says why.

Every split has its own models, whose scores differ in offset and scale, so slides of different splits are never ranked
together: AUC and average precision compare slides within a split (`Estimator`). Where test sets are disjoint (k-fold),
decisions by each split's threshold are pooled. Where they overlap (Monte Carlo), a slide would count several times, and
all other metrics are means over splits. Mean and standard deviation over splits are given in either case.

Patients: with two classes a patient is positive if any slide is, the score is the maximum over the slides, and the
patient is predicted positive if any slide is. With more classes the score is the mean, its largest entry decides, and
patients whose slides have different labels are excluded and listed.

N slides or patients, K columns of scores: one where there are two classes, else one per class.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from selfvitmil import metrics
from selfvitmil.errors import MetricError
from selfvitmil.evaluate.predictions import Prediction
from selfvitmil.evaluate.protocol import MethodResult
from selfvitmil.metrics import AucInterval, Interval
from selfvitmil.metrics.classification import (
    bootstrap,
    bootstrap_p_value,
    check_folds,
    check_groups,
    percentile_interval,
)
from selfvitmil.metrics.ranking import resampled_auc, resampled_macro_auc
from selfvitmil.settings import EvaluateSettings


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


# ---------------------------------------------------------------------------------------------------- metrics


Json = dict[str, Any]
T = TypeVar("T")

OVER = (
    "auc", "pr_auc", "accuracy", "balanced_accuracy", "f1", "macro_f1", "sensitivity", "specificity", "ppv", "npv",
    "brier", "ece",
)  # fmt: skip
"""Metrics with mean and standard deviation over seeds and splits."""

SLIDE_WORDS = (
    "each slide by itself; AUC limits keep a patient's slides together, Wilson limits take slides as independent"
)
PATIENT_WORDS = "largest score of the patient's slides, by the slides' threshold; positive where one slide is"
PATIENT_WORDS_MULTI = "mean score of the patient's slides, the largest decides"
SAME_AS_SLIDE = "every patient has one slide: the same numbers as by slide"


@dataclass(frozen=True, eq=False)
class Samples:
    """Labels and predictions of one seed or of the ensemble, by slide or by patient, as arrays."""

    names: tuple[str, ...]
    labels: NDArray[np.int64]
    scores: NDArray[np.float64]
    """(N, K) uncalibrated probabilities of the aggregator."""
    probabilities: NDArray[np.float64]
    """(N, K) calibrated probabilities, or the scores without calibration; several classes are normalized to sum 1."""
    decisions: NDArray[np.int64]
    patients: tuple[str, ...]
    splits: tuple[str, ...]
    """Split whose models scored the sample."""
    calibrated: bool
    thresholds: tuple[float, ...]
    """Distinct decision thresholds."""
    threshold_from: tuple[str, ...]
    left_out: tuple[str, ...] = ()
    """Patients whose slides have different labels (more than two classes)."""

    def __len__(self) -> int:
        return len(self.names)

    @property
    def folds(self) -> tuple[str, ...] | None:
        """Splits within which samples are ranked; None for a single split."""
        return self.splits if len(set(self.splits)) > 1 else None


@dataclass(frozen=True, eq=False)
class Scores:
    """All metrics of one method; `slide` and `patient` have the structure of `metrics.json`."""

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
    overlap: bool = False,
) -> Samples:
    """Return the test slides of one method and seed (None: the ensemble) as arrays; of one split, or of all.

    Raises MetricError where a slide occurs twice: predictions of several methods, or, unless `overlap` is set, of
    overlapping test sets.
    """
    rows = [row for row in predictions if row.part == "test" and row.seed == seed and split in (None, row.split)]
    if level == "patient":
        return _by_patient(rows, overlap)
    return _samples(rows, overlap)


def _samples(rows: Sequence[Prediction], overlap: bool) -> Samples:
    counts = Counter((row.slide, row.split if overlap else "") for row in rows)
    twice = [slide for (slide, _), count in counts.items() if count > 1]
    if twice:
        raise MetricError(
            f"{twice[0]}: several predictions in one set, as of {len(twice)} slides",
            "a slide counts once",
            "Take the predictions of one method and, where test sets overlap, of one split",
            code="repeated-slides",
        )
    calibrated = bool(rows) and all(row.calibrated is not None for row in rows)
    return Samples(
        names=tuple(row.slide for row in rows),
        labels=np.array([row.label for row in rows], dtype=np.int64),
        scores=np.array([row.score for row in rows], dtype=np.float64),
        probabilities=normalized([(row.calibrated if calibrated else None) or row.score for row in rows]),
        decisions=np.array([row.decision for row in rows], dtype=np.int64),
        patients=tuple(row.patient for row in rows),
        splits=tuple(row.split for row in rows),
        calibrated=calibrated,
        thresholds=tuple(dict.fromkeys(row.threshold for row in rows if row.threshold is not None)),
        threshold_from=tuple(dict.fromkeys(row.threshold_from for row in rows)),
    )


def normalized(probabilities: ArrayLike) -> NDArray[np.float64]:
    """Return (N, K) probabilities; several classes are divided by their sum, uniform where all are 0.

    Probabilities of an aggregator with one sigmoid per class (DSMIL) need not sum to 1, while Brier score and ECE are
    defined for distributions over classes. One-vs-rest ranking uses the scores without normalization.
    """
    given = np.asarray(probabilities, dtype=np.float64)
    if given.ndim < 2 or given.shape[1] < 2:
        return given
    total = given.sum(axis=1, keepdims=True)
    return np.where(total > 0, given / np.where(total > 0, total, 1.0), 1 / given.shape[1])


def _by_patient(rows: Sequence[Prediction], overlap: bool) -> Samples:
    slides = _samples(rows, overlap)
    members: dict[tuple[str, str], list[int]] = defaultdict(list)  # of (split, patient)
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
        splits=tuple(rows[own[0]].split for own in groups),
        calibrated=slides.calibrated,
        thresholds=slides.thresholds,
        threshold_from=slides.threshold_from,
        left_out=left_out,
    )


def are_disjoint(predictions: Iterable[Prediction]) -> bool:
    """Whether the test sets of all splits are disjoint, so that decisions may be pooled."""
    places = {(row.split, row.slide) for row in predictions if row.part == "test"}
    return len(places) == len({slide for _, slide in places})


# ---------------------------------------------------------------------------------------------------- one set


def score_samples(samples: Samples, class_names: Sequence[str], evaluate: EvaluateSettings) -> Json:
    """Return all metrics of one set of slides or patients; several splits are ranked within each split."""
    binary = len(class_names) == 2
    reasons = _without_pairs(samples, binary)
    info = (_score_binary if binary else _score_multiclass)(samples, class_names, evaluate, reasons)
    return {**_about_samples(samples, class_names), **info, "reasons": reasons}


def _about_samples(samples: Samples, class_names: Sequence[str]) -> Json:
    """Return counts, thresholds and kind of probabilities of the samples."""
    label_of = dict(zip(samples.names, samples.labels.tolist(), strict=True))
    counts = Counter(label_of.values())
    thresholds = samples.thresholds
    given = "as given by the aggregator"
    if samples.scores.ndim == 2 and samples.scores.shape[1] > 1:
        proper = np.allclose(samples.scores.sum(axis=1), 1.0, atol=1e-4)
        given += "" if proper else "; Brier score and ECE: divided by their sum over the classes"
    info: Json = {
        "num": len(label_of),
        "counts": {name: counts[k] for k, name in enumerate(class_names)},
        "threshold": thresholds[0] if len(thresholds) == 1 else list(thresholds) or None,
        "threshold_from": ", ".join(samples.threshold_from),
        "probabilities": "calibrated" if samples.calibrated else given,
    }
    if samples.left_out:
        info["left_out"] = {"patients": list(samples.left_out), "why": "their slides have different labels"}
    return info


def _without_pairs(samples: Samples, binary: bool) -> dict[str, str]:
    """Return the splits excluded from AUC and average precision with the reason; empty for several classes."""
    if samples.folds is None or not binary:
        return {}
    labels: dict[str, set[int]] = {split: set() for split in samples.splits}
    for split, label in zip(samples.splits, samples.labels.tolist(), strict=True):
        labels[split].add(label)
    why = "its test slides are of one class: there is nothing to rank"
    return {f"auc and pr_auc of {split}": why for split, found in labels.items() if len(found) < 2}


def _score_binary(
    samples: Samples, class_names: Sequence[str], evaluate: EvaluateSettings, reasons: dict[str, str]
) -> Json:
    labels, score, probability = samples.labels, samples.scores[:, 0], samples.probabilities[:, 0]
    decided = attempt(reasons, "decisions", lambda: metrics.decide(labels, samples.decisions, 0.5, evaluate.confidence))
    curve = attempt(reasons, "reliability", lambda: metrics.reliability(labels, probability, level=evaluate.confidence))
    names = ("accuracy", "balanced_accuracy", "f1", "sensitivity", "specificity", "ppv", "npv")
    return {
        "auc": attempt(reasons, "auc", lambda: _auc(labels, score, samples, evaluate)),
        "pr_auc": attempt(reasons, "pr_auc", lambda: _pr_auc(labels, score, samples)),
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
        "auc": attempt(reasons, "auc", lambda: _macro_auc(samples, evaluate)),
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
    """Return one-vs-rest metrics of one class."""
    own = None if decided is None else decided.per_class[k]
    names = ("f1", "sensitivity", "specificity", "ppv", "npv")
    return {
        "num": int(label.sum()),
        "auc": attempt(reasons, f"{name}: auc", lambda: _auc(label, score, samples, evaluate)),
        "pr_auc": attempt(reasons, f"{name}: pr_auc", lambda: _pr_auc(label, score, samples)),
        **{key: _interval(getattr(own, key, None), f"{name}: {key}", reasons) for key in names},
    }


def _auc(label: Any, score: Any, samples: Samples, evaluate: EvaluateSettings) -> Json:
    return interval_json(metrics.auc_interval(label, score, **_drawn(samples, evaluate)))


def _pr_auc(label: Any, score: Any, samples: Samples) -> Json:
    return {"value": metrics.average_precision(label, score, folds=samples.folds)}


def _macro_auc(samples: Samples, evaluate: EvaluateSettings) -> Json:
    return interval_json(metrics.multiclass_auc(samples.labels, samples.scores, **_drawn(samples, evaluate)).macro)


def _drawn(samples: Samples, evaluate: EvaluateSettings) -> Json:
    """Return the arguments of AUC intervals: ranking within splits, resampling by patient."""
    drawn = {"level": evaluate.confidence, "resamples": evaluate.bootstrap, "seed": evaluate.seed}
    return {**drawn, "groups": samples.patients, "folds": samples.folds}


def score_overlapping(
    samples: Samples, parts: Sequence[Json], class_names: Sequence[str], evaluate: EvaluateSettings
) -> Json:
    """Return all metrics of overlapping test sets: AUC within splits, all others as means over splits.

    `parts` are the metrics of the single splits. The limits of a mean are the means of the splits' limits: the error of
    a mean is at most the mean of the errors, whatever the dependence between splits.
    """
    binary = len(class_names) == 2
    reasons = _without_pairs(samples, binary)
    info = {name: _mean_of(parts, name, reasons) for name in OVER if name in parts[0]}
    labels, scores = samples.labels, samples.scores
    info["auc"] = attempt(
        reasons,
        "auc",
        lambda: _auc(labels, scores[:, 0], samples, evaluate) if binary else _macro_auc(samples, evaluate),
    )
    for name in ("confusion", "reliability"):
        info[name] = None
        reasons[name] = "test sets of the splits overlap, so slides would count several times: see the single splits"
    return {**_about_samples(samples, class_names), **info, "reasons": reasons}


def _mean_of(parts: Sequence[Json], name: str, reasons: dict[str, str]) -> Json | None:
    """Return the mean over the splits that have the metric, with mean limits where they exist."""
    found = [part[name] for part in parts if part[name] is not None]
    if not found:
        reasons[name] = "no split has it"
        return None
    mean = {key: float(np.mean([one[key] for one in found])) for key in ("value", "low", "high") if key in found[0]}
    if "low" not in mean:
        return mean
    method = f"mean over {len(found)} splits of: {found[0]['method']}"
    return {**mean, "level": found[0]["level"], "method": method}


def attempt(reasons: dict[str, str], name: str, compute: Callable[[], T]) -> T | None:
    """Return `compute()`, or None where it raises MetricError; the reason is added to `reasons`."""
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
    """Return an interval in the form of `metrics.json`; for an AUC with bootstrap limits and their agreement."""
    info = {name: getattr(interval, name) for name in ("value", "low", "high", "level", "method")}
    if isinstance(interval, AucInterval):
        other = interval.bootstrap
        info |= {
            "bootstrap": {"low": other.low, "high": other.high, "method": other.method},
            "agree": interval.agree,
            "statement": interval.statement,
        }
    return info


def read_interval(info: Mapping[str, Any] | None) -> Interval:
    """Return the interval of a metric of `metrics.json`; NaN where it is undefined."""
    if info is None:
        return Interval(math.nan, math.nan, math.nan, "not computed")
    return Interval(info["value"], info["low"], info["high"], info["method"], info["level"])


def _curve(curve: metrics.Reliability) -> Json:
    return {name: getattr(curve, name).tolist() for name in ("probability", "share", "low", "high", "count")}


# ---------------------------------------------------------------------------------------------------- one method


def score_method(result: MethodResult, evaluate: EvaluateSettings) -> Scores:
    """Return all metrics of a method, by slide and by patient."""
    if result.outcome is not None:
        from selfvitmil.evaluate.outcome_results import score_outcome

        return Scores(*score_outcome(result, evaluate))
    test = [row for row in result.predictions if row.part == "test"]
    slides_of = Counter(row.patient for row in {row.slide: row for row in test}.values())
    several = max(slides_of.values(), default=0) > 1
    slide = {**_level(result, "slide", SLIDE_WORDS, evaluate), "ensemble_gain": ensemble_gain(result, evaluate)}
    words = PATIENT_WORDS if len(result.class_names) == 2 else PATIENT_WORDS_MULTI
    patient = _level(result, "patient", words, evaluate) if several else None
    names, binary = result.class_names, len(result.class_names) == 2
    classes = {
        "classes": list(names),
        "positive": names[1] if binary else None,
        "positive_from": result.positive_from or None,
    }
    score = {"score": f"probability of {names[1]}" if binary else "probability of each class"}

    def per_class(rows: Sequence[Prediction]) -> Json:
        counts = Counter(row.label for row in rows)
        return {name: counts[k] for k, name in enumerate(names)}

    from selfvitmil.evaluate.decisions import decisions_of  # it is written in terms of this module

    decisions = decisions_of(result.predictions, names, evaluate).to_json(names, evaluate)
    return Scores({**about_result(result, classes, score, per_class), "decisions": decisions}, slide, patient)


def about_result(
    result: MethodResult, predicted: Json, score: Json, count: Callable[[Sequence[Prediction]], Any]
) -> Json:
    """Return the provenance of the metrics: data, thresholds, recipe, seeds, and what is `predicted`, with its `score`.

    `count` tells the slides among predictions.
    """
    return {
        "method": result.method,
        "aggregator": result.aggregator,
        "encoder": result.encoder,
        "transductive": {split: len(slides) for split, slides in result.transductive.items()} or None,
        "tiling": result.tiling,
        "protocol": result.protocol,
        "test_labels_opened_for": result.labels_opened,
        **predicted,
        "recipe": None if result.recipe is None else asdict(result.recipe),
        **({"tuned": {split: own.to_json() for split, own in result.tuned.items()}} if result.tuned else {}),
        "evidence": {split: {**asdict(own), "reason": own.reason} for split, own in result.evidence.items()},
        **score,
        "seeds": list(result.seeds),
        "slides": _counts(result, count),
        "choices": [
            {"split": split, "seed": "ensemble" if seed is None else seed, **choice.to_json()}
            for (split, seed), choice in result.choices.items()
        ],
        "trainings": [{"split": run.split, "seed": run.seed, "epoch": run.epoch} for run in result.runs],
        "warnings": list(result.warnings),
    }


def _counts(result: MethodResult, count: Callable[[Sequence[Prediction]], Any]) -> Json:
    """Return slides and patients of validation and test set, for every split."""
    info: Json = {}
    for split in result.splits:
        info[split] = {}
        for part in ("val", "test"):
            rows = [row for row in result.predictions if (row.split, row.part, row.seed) == (split, part, None)]
            info[split][part] = {"slides": count(rows), "patients": len({row.patient for row in rows})}
    return info


def _level(result: MethodResult, level: Literal["slide", "patient"], words: str, evaluate: EvaluateSettings) -> Json:
    names, seeds = result.class_names, (*result.seeds, None)
    estimator = estimator_of(result)

    def scored(seed: int | None, split: str | None) -> Json:
        samples = samples_of(result.predictions, seed=seed, split=split, level=level)
        return score_samples(samples, names, evaluate)

    def scored_together(seed: int | None) -> Json:
        if estimator == Estimator.WITHIN_FOLDS:
            return scored(seed, None)
        samples = samples_of(result.predictions, seed=seed, level=level, overlap=True)
        return score_overlapping(samples, [own[seed] for own in by_split.values()], names, evaluate)

    by_split = {split: {seed: scored(seed, split) for seed in seeds} for split in result.splits}
    info = {
        "words": words,
        "estimator": estimator.value,
        "estimator_words": estimator.words,
        "conditional_on": estimator.conditional_on,
    }
    if estimator == Estimator.ONE_TEST_SET:
        return {**info, **with_seeds(next(iter(by_split.values())), OVER), "splits": {}, "over_splits": None}
    return {
        **info,
        **with_seeds({seed: scored_together(seed) for seed in seeds}, OVER),
        "splits": {split: with_seeds(own, OVER) for split, own in by_split.items()},
        "over_splits": spread([own[None] for own in by_split.values()], "splits", OVER),
    }


def ensemble_gain(result: MethodResult, evaluate: EvaluateSettings) -> Json | None:
    """Return the AUC of the ensemble minus the mean AUC of the single seeds, on the same slides, with limits from
    resampled patients; None for one seed, or where the AUC is undefined."""
    if len(result.seeds) < 2:
        return None
    sets = [samples_of(result.predictions, seed=seed, overlap=True) for seed in (None, *result.seeds)]
    label, groups = sets[0].labels, check_groups(sets[0].patients, len(sets[0]))

    def compute() -> Json:
        fold = check_folds(sets[0].folds, label)
        if sets[0].scores.shape[1] == 1:
            whole, *single = (resampled_auc(label, own.scores[:, 0], fold) for own in sets)
        else:
            whole, *single = (resampled_macro_auc(label, own.scores, fold) for own in sets)

        def gain(drawn_RN: NDArray[np.float64]) -> NDArray[np.float64]:
            return whole(drawn_RN) - np.mean([each(drawn_RN) for each in single], axis=0)

        value = float(gain(np.ones((1, len(label))))[0])
        if math.isnan(value):
            raise MetricError("no gain of the ensemble", "the AUC is undefined without slides of every class",
                              code="one-class")  # fmt: skip
        values = bootstrap(gain, label, groups, evaluate.bootstrap, evaluate.seed)
        found = percentile_interval(value, values, evaluate.confidence)
        return {**interval_json(found), "p_value": bootstrap_p_value(values), "metric": "auc"}

    return attempt({}, "", compute)


def estimator_of(result: MethodResult) -> Estimator:
    """Return how the test sets of these splits are combined."""
    if len(result.splits) == 1:
        return Estimator.ONE_TEST_SET
    disjoint = are_disjoint(result.predictions)
    return Estimator.WITHIN_FOLDS if disjoint else Estimator.WITHIN_OVERLAPPING_SPLITS


def with_seeds(scored: Mapping[int | None, Json], names: Sequence[str]) -> Json:
    """Return metrics of the ensemble, of each seed, and the spread of those named over seeds."""
    seeds = {str(seed): own for seed, own in scored.items() if seed is not None}
    return {"ensemble": scored[None], "seeds": seeds, "over_seeds": spread(list(seeds.values()), "seeds", names)}


def spread(sets: Sequence[Json], what: str, names: Sequence[str]) -> Json:
    """Return mean and sample standard deviation of every metric over the sets that have it, with their number."""
    info: Json = {}
    for name in names:
        if not any(name in one for one in sets):
            continue
        values = [one[name]["value"] for one in sets if one.get(name) is not None]
        info[name] = {
            "mean": float(np.mean(values)) if values else None,
            "sd": float(np.std(values, ddof=1)) if len(values) > 1 else None,
            what: len(values),
        }
    return info
