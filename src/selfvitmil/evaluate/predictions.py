"""Predictions, one row per method, slide, split and seed: write and read `predictions.csv`.

Columns: method, slide, patient, split, part (`val` or `test`), label, seed (a number or `ensemble`), score, max, bag,
calibrated, threshold, threshold_from, decision, protocol, and with two classes negative and positive (their names).
`score` is the probability of the positive class; `max` and `bag` are the two streams of DSMIL and its relatives, empty
for methods that have one. With more classes these four are a column per class (`score_<class>`), in class order.
Numbers are written so that reading gives back the same ones, bit for bit.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from selfvitmil.errors import ArtefactError
from selfvitmil.store.files import write_csv

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
    label: int
    """Class index of the slide's label."""
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
    decision: int
    """Class index."""
    protocol: str


def write_predictions(path: Path, predictions: Iterable[Prediction], class_names: Sequence[str]) -> None:
    """Write the table atomically; equal predictions give equal bytes."""
    rows = (_cells(prediction, class_names) for prediction in predictions)
    write_csv(path, [_header(class_names), *rows])


def read_predictions(path: Path) -> tuple[list[Prediction], tuple[str, ...]]:
    """Return the rows of `predictions.csv` and the class names in class order; raise ArtefactError if invalid."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            header, *rows = csv.reader(file)
        class_names = _class_names(header, rows)
        if header != _header(class_names):
            raise ValueError(f"its columns are {', '.join(header)}")
        return [_prediction(dict(zip(header, row, strict=True)), class_names) for row in rows], class_names
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise ArtefactError(
            f"{path.name}: not a readable table of predictions", str(error), "Remove it and evaluate again"
        ) from None


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
    head = [row.method, row.slide, row.patient, row.split, row.part, class_names[row.label], seed]
    tail = list(class_names) if len(class_names) == 2 else []
    return [*head, *streams, threshold, row.threshold_from, class_names[row.decision], row.protocol, *tail]


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
