"""Decision thresholds, calibration, and predictions: write and read `predictions.csv`.

Threshold and calibration are chosen on the scores of validation slides, or on the test set under the `optimistic`
protocol, and carry a text that says so. A threshold applies to the uncalibrated score of the aggregator; calibration
changes probabilities but not the ranking of slides.

`predictions.csv` has one row per method, slide, split and seed. Columns: method, slide, patient, split, part (`val` or
`test`), label, seed (a number or `ensemble`), score, max, bag, calibrated, threshold, threshold_from, decision,
protocol, and with two classes negative and positive (their names). `score` is the probability of the positive class;
`max` and `bag` are the two streams of DSMIL and its relatives, empty for methods that have one. With more classes these
four are a column per class (`score_<class>`), in class order. Another outcome than classes has columns of its own for
target and score (`time`, `event`, `risk`; `value`, `predicted`), `group` in place of decision, and `outcome`. Numbers
are written so that reading gives back the same ones, bit for bit.

N slides, K columns of scores: one where there are two classes, else one per class.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from selfvitmil.errors import ArtefactError, ConfigError, MetricError
from selfvitmil.metrics import Platt, Temperature, fit_platt, fit_temperature, to_logits, youden_threshold
from selfvitmil.outcomes import Outcome, outcome_from_json
from selfvitmil.settings import EvaluateSettings
from selfvitmil.store.files import write_csv

Floats = NDArray[np.float64]
Where = Literal["validation", "TEST (optimistic)"]

LARGEST = "largest probability"


@dataclass(frozen=True)
class Choice:
    """Decision threshold and calibration, with their origin."""

    threshold: float | None
    """Scores from here on are positive; None with more than two classes, where the largest probability decides."""
    threshold_from: str
    calibration: Platt | Temperature | None
    calibration_from: str
    """For example `Platt scaling on validation`, or the reason why there is none."""
    outcome: Outcome | None = None
    """What is predicted; None for classes."""

    def decide(self, scores_NK: Floats) -> Any:
        """Return the class index of each slide; of another outcome the group, or None."""
        if self.outcome is not None:
            return self.outcome.decide(scores_NK, self.threshold)
        if self.threshold is None:
            return scores_NK.argmax(axis=1)
        return (scores_NK[:, 0] >= self.threshold).astype(np.int64)

    def calibrate(self, scores_NK: Floats) -> Floats | None:
        """Return calibrated probabilities in the columns of the scores; None without calibration."""
        if self.calibration is None:
            return None
        return self.calibration.apply(_logits(scores_NK)).reshape(scores_NK.shape)

    def to_json(self) -> dict[str, object]:
        fitted: Mapping[str, float] = vars(self.calibration) if self.calibration is not None else {}
        return {
            "threshold": self.threshold,
            "threshold_from": self.threshold_from,
            "calibration_from": self.calibration_from,
            "calibration": dict(fitted) or None,
        }


def check_choices(settings: EvaluateSettings, num_classes: int) -> None:
    """Raise ConfigError for a calibration that is undefined for this number of classes."""
    if settings.calibration == "platt" and num_classes > 1:
        raise ConfigError(
            f"evaluate.calibration 'platt' with {num_classes} classes",
            "Platt scaling is defined for a single probability",
            "Use evaluate.calibration 'temperature'",
            code="not-binary",
        )


def choose(labels: Sequence[int], scores: ArrayLike, settings: EvaluateSettings, where: str) -> Choice:
    """Return threshold and calibration chosen on labelled scores (N, K); `where` names the slides."""
    scores_NK = np.asarray(scores, dtype=np.float64)
    calibration, calibration_from = _calibration(labels, scores_NK, settings, where)
    if scores_NK.shape[1] > 1:
        return Choice(None, LARGEST, calibration, calibration_from)
    if settings.threshold == "youden":
        threshold = youden_threshold(labels, scores_NK[:, 0])
        return Choice(threshold, f"Youden on {where}", calibration, calibration_from)
    if isinstance(calibration, Platt):
        # A temperature leaves 0.5 where it is.
        return Choice(
            calibration.score_of_one_half, f"fixed 0.5 after {calibration_from}", calibration, calibration_from
        )
    return Choice(0.5, "fixed 0.5", calibration, calibration_from)


def _calibration(
    labels: Sequence[int], scores_NK: Floats, settings: EvaluateSettings, where: str
) -> tuple[Platt | Temperature | None, str]:
    if settings.calibration == "none":
        return None, "none"
    fit, words = (fit_platt, "Platt") if settings.calibration == "platt" else (fit_temperature, "temperature")
    try:
        return fit(labels, _logits(scores_NK)), f"{words} scaling on {where}"
    except MetricError as error:
        return None, f"none: {error.reason}"


def _logits(scores_NK: Floats) -> Floats:
    """Return logits (N,) of one column of probabilities; of several columns their logarithms, inverted by a softmax."""
    if scores_NK.shape[1] == 1:
        return to_logits(scores_NK[:, 0])
    return np.log(np.clip(scores_NK, 1e-6, 1.0))


# ---------------------------------------------------------------------------------------------------- predictions.csv


Values = tuple[float, ...]
STREAMS = ("score", "max", "bag", "calibrated")


@dataclass(frozen=True)
class Prediction:
    """Prediction of one method for one slide."""

    method: str
    slide: str
    patient: str
    split: str
    """Name of the split, for example `fold0`."""
    part: Literal["val", "test"]
    label: Any
    """Class index of the slide's label; with another outcome than classes its target, a tuple of numbers."""
    seed: int | None
    """None for the ensemble: the mean over all seeds."""
    score: Values
    """Probability of the positive class (one value), or of each of more than two classes."""
    max: Values | None
    bag: Values | None
    calibrated: Values | None
    threshold: float | None
    """Threshold of `score`; None with more than two classes."""
    threshold_from: str
    decision: Any
    """Class index; with another outcome the index of its group, None where nothing is decided."""
    protocol: str


def write_predictions(
    path: Path, predictions: Iterable[Prediction], class_names: Sequence[str], outcome: Outcome | None = None
) -> None:
    """Write the table atomically; equal predictions give equal bytes."""
    if outcome is not None:
        write_csv(path, [_outcome_header(outcome), *(_outcome_cells(row, outcome) for row in predictions)])
        return
    rows = (_cells(prediction, class_names) for prediction in predictions)
    write_csv(path, [_header(class_names), *rows])


def read_predictions(path: Path) -> tuple[list[Prediction], tuple[str, ...]]:
    """Return the rows of `predictions.csv` and the class names in class order; raise ArtefactError if invalid."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            header, *rows = csv.reader(file)
        if "outcome" in header:
            outcome = outcome_from_json(json.loads(rows[0][header.index("outcome")]))
            if header != _outcome_header(outcome):
                raise ValueError(f"its columns are {', '.join(header)}")
            return [_outcome_prediction(dict(zip(header, row, strict=True)), outcome) for row in rows], outcome.groups
        class_names = _class_names(header, rows)
        if header != _header(class_names):
            raise ValueError(f"its columns are {', '.join(header)}")
        return [_prediction(dict(zip(header, row, strict=True)), class_names) for row in rows], class_names
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise ArtefactError(
            f"{path.name}: not a readable table of predictions",
            str(error),
            "Remove it and evaluate again",
            code="unreadable-predictions",
        ) from None


def read_outcome(path: Path) -> Outcome | None:
    """Return the outcome of a `predictions.csv`; None for classes. Raises ArtefactError as `read_predictions`."""
    read_predictions(path)
    with path.open(newline="", encoding="utf-8") as file:
        header, first, *_ = csv.reader(file)
    return outcome_from_json(json.loads(first[header.index("outcome")])) if "outcome" in header else None


_HEAD = ["method", "slide", "patient", "split", "part"]
_TAIL = ["threshold", "threshold_from", "group", "protocol", "outcome"]


def _outcome_header(outcome: Outcome) -> list[str]:
    return [*_HEAD, *outcome.target_names, "seed", *outcome.score_names, *_TAIL]


def _outcome_cells(row: Prediction, outcome: Outcome) -> list[str]:
    head = [row.method, row.slide, row.patient, row.split, row.part, *(repr(float(value)) for value in row.label)]
    seed = "ensemble" if row.seed is None else str(row.seed)
    threshold = "" if row.threshold is None else repr(float(row.threshold))
    group = "" if row.decision is None else outcome.groups[int(row.decision)]
    tail = [threshold, row.threshold_from, group, row.protocol, json.dumps(outcome.to_json())]
    return [*head, seed, *(repr(float(value)) for value in row.score), *tail]


def _outcome_prediction(cells: dict[str, str], outcome: Outcome) -> Prediction:
    return Prediction(
        **{name: cells[name] for name in ("method", "slide", "patient", "split", "threshold_from", "protocol")},
        part="val" if cells["part"] == "val" else "test",
        label=tuple(float(cells[name]) for name in outcome.target_names),
        seed=None if cells["seed"] == "ensemble" else int(cells["seed"]),
        score=tuple(float(cells[name]) for name in outcome.score_names),
        max=None,
        bag=None,
        calibrated=None,
        threshold=float(cells["threshold"]) if cells["threshold"] else None,
        decision=outcome.groups.index(cells["group"]) if cells["group"] else None,
    )


def _columns(stream: str, class_names: Sequence[str]) -> list[str]:
    return [stream] if len(class_names) == 2 else [f"{stream}_{name}" for name in class_names]


def _header(class_names: Sequence[str]) -> list[str]:
    streams = [column for stream in STREAMS for column in _columns(stream, class_names)]
    tail = ["negative", "positive"] if len(class_names) == 2 else []
    head = ["method", "slide", "patient", "split", "part", "label", "seed"]
    return [*head, *streams, "threshold", "threshold_from", "decision", "protocol", *tail]


def _cells(row: Prediction, class_names: Sequence[str]) -> list[str]:
    width = len(_columns("score", class_names))
    streams: list[str] = []
    for stream in STREAMS:
        values: Values | None = getattr(row, stream)
        streams += [""] * width if values is None else [repr(float(value)) for value in values]
    seed = "ensemble" if row.seed is None else str(row.seed)
    threshold = "" if row.threshold is None else repr(float(row.threshold))
    head = [row.method, row.slide, row.patient, row.split, row.part, class_names[int(row.label)], seed]
    tail = list(class_names) if len(class_names) == 2 else []
    return [*head, *streams, threshold, row.threshold_from, class_names[int(row.decision)], row.protocol, *tail]


def _class_names(header: Sequence[str], rows: Sequence[Sequence[str]]) -> tuple[str, ...]:
    if "positive" in header:
        return rows[0][header.index("negative")], rows[0][header.index("positive")]
    return tuple(column.removeprefix("score_") for column in header if column.startswith("score_"))


def _prediction(cells: dict[str, str], class_names: Sequence[str]) -> Prediction:
    streams: dict[str, Values | None] = {}
    for stream in STREAMS:
        texts = [cells[column] for column in _columns(stream, class_names)]
        streams[stream] = tuple(map(float, texts)) if texts[0] else None
    if streams["score"] is None:
        raise ValueError(f"{cells['slide']} has no score")
    if cells["part"] not in ("val", "test"):
        raise ValueError(f"{cells['slide']} has part {cells['part']!r}")
    return Prediction(
        method=cells["method"],
        slide=cells["slide"],
        patient=cells["patient"],
        split=cells["split"],
        part="val" if cells["part"] == "val" else "test",
        label=class_names.index(cells["label"]),
        seed=None if cells["seed"] == "ensemble" else int(cells["seed"]),
        score=streams["score"],
        max=streams["max"],
        bag=streams["bag"],
        calibrated=streams["calibrated"],
        threshold=float(cells["threshold"]) if cells["threshold"] else None,
        threshold_from=cells["threshold_from"],
        decision=class_names.index(cells["decision"]),
        protocol=cells["protocol"],
    )
