"""Retrieval: which slides (or tiles) are most alike by the cosine similarity of their embeddings, and how good that is.

The metric is the agreement of labels among nearest neighbours, leaving out the query's whole patient: the share of a
slide's k nearest slides of other patients that have its label, averaged over slides. It needs no training, so it says
what an embedding holds before any classifier (as k-NN evaluation does for images: Wu et al. 2018, arXiv:1805.01978).

A folder of slide embeddings has the table of similar slides and that agreement: what report and viewer show.

S slides, D dimensions.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from selfvitmil.errors import ArtefactError, MetricError
from selfvitmil.metrics.classification import Interval, bootstrap, percentile_interval
from selfvitmil.store.files import read_json, write_csv, write_text
from selfvitmil.store.layout import StudyLayout, feature_name

Rows = NDArray[np.int64]
Embeddings = NDArray[np.float32]


class Neighbors(NamedTuple):
    """What is nearest to a query, nearest first."""

    query: int
    rows: Rows
    similarity: NDArray[np.float32]
    """Cosine similarity of each to the query."""


def unit_rows(embeddings_SD: NDArray[np.floating]) -> Embeddings:
    """Return embeddings of length one; raise MetricError for one without a direction: zero, NaN or infinite."""
    length_S = np.linalg.norm(embeddings_SD.astype(np.float64), axis=1)
    bad = np.flatnonzero(~np.isfinite(length_S) | (length_S == 0))
    if len(bad):
        raise MetricError(
            f"the embedding in row {bad[0]} has no direction",
            "it is zero or not finite, so cosine similarity is undefined",
            code="embedding-without-direction",
        )
    return (embeddings_SD / length_S[:, None]).astype(np.float32)


def nearest(unit_ND: Embeddings, owner_N: Rows, query: int, most: int) -> Neighbors:
    """Return the rows of other owners (patients) nearest to a row by cosine similarity; of equal ones the first."""
    similarity_N = unit_ND @ unit_ND[query]
    others = np.flatnonzero(owner_N != owner_N[query])
    order = others[np.argsort(-similarity_N[others], kind="stable")[:most]]
    return Neighbors(query, order, similarity_N[order])


def numbered(names: Sequence[str]) -> Rows:
    """Return a number for each name: equal names have equal numbers, in the order of their first appearance."""
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return np.array([numbers[name] for name in names], dtype=np.int64)


@dataclass(frozen=True)
class LabelAgreement:
    """How often the nearest slides of other patients have the query's label."""

    k: int
    share: Interval
    """Mean over queries of the share among the k nearest; limits by bootstrap over patients."""
    chance: float
    """The same if neighbours were drawn at random from the other patients' slides."""
    num_queries: int
    num_patients: int


def label_agreement(
    unit_SD: Embeddings,
    patients: Sequence[str],
    labels: Sequence[str | None],
    *,
    k: int = 5,
    queries: Sequence[bool] | None = None,
    resamples: int = 1000,
    seed: int = 0,
) -> LabelAgreement | None:
    """Return the agreement of labels among the k nearest slides of other patients.

    Slides without a label (None) are neither queries nor neighbours. `queries` says which of the others are asked
    about, by default all. None where the labelled slides have fewer than two patients or two labels, or nothing is
    asked.
    """
    labelled = [number for number, label in enumerate(labels) if label is not None]
    label_L, patient_L = (numbered([str(values[number]) for number in labelled]) for values in (labels, patients))
    asked = [row for row, number in enumerate(labelled) if queries is None or queries[number]]
    if not asked or min(len(set(label_L)), len(set(patient_L))) < 2:
        return None
    unit_LD = unit_SD[labelled]
    share: list[float] = []
    chance: list[float] = []
    for row in asked:
        rows = nearest(unit_LD, patient_L, row, k).rows
        share.append(float((label_L[rows] == label_L[row]).mean()))
        chance.append(float((label_L[patient_L != patient_L[row]] == label_L[row]).mean()))
    share_Q = np.array(share)
    label_Q, patient_Q = (numbered([str(values[row]) for row in asked]) for values in (label_L, patient_L))

    def mean_share(weights_RQ: NDArray[np.float64]) -> NDArray[np.float64]:
        return weights_RQ @ share_Q / weights_RQ.sum(1)

    values_R = bootstrap(mean_share, label_Q, patient_Q, resamples, seed)
    interval = percentile_interval(float(share_Q.mean()), values_R, 0.95)
    return LabelAgreement(k, interval, float(np.mean(chance)), len(asked), len(set(patient_Q.tolist())))


# ---------------------------------------------------------------------------------------------------- files


SIMILAR, AGREEMENT = "similar_slides.csv", "agreement.json"
HEADER = ("slide", "rank", "similar", "similarity")


class SimilarSlide(NamedTuple):
    """A slide near to another."""

    slide: str
    similarity: float
    """Cosine similarity of the embeddings."""


SimilarSlides = Mapping[str, Sequence[SimilarSlide]]
"""Slide -> those most like it, nearest first."""


def write_similar(folder: Path, similar: SimilarSlides, agreement: Mapping[str, Any] | None) -> None:
    """Write both files into a folder of slide embeddings."""
    lines = [
        (slide, rank, other, f"{similarity:.6f}")
        for slide, found in similar.items()
        for rank, (other, similarity) in enumerate(found, start=1)
    ]
    write_csv(folder / SIMILAR, [HEADER, *lines])
    write_text(folder / AGREEMENT, json.dumps(agreement, indent=2) + "\n")


def read_similar(folder: Path) -> tuple[dict[str, list[SimilarSlide]], dict[str, Any] | None]:
    """Return similar slides and the agreement of labels; raise ArtefactError where they cannot be read."""
    found: dict[str, list[SimilarSlide]] = {}
    try:
        with (folder / SIMILAR).open(newline="", encoding="utf-8") as file:
            for line in csv.DictReader(file):
                found.setdefault(line["slide"], []).append(SimilarSlide(line["similar"], float(line["similarity"])))
        return found, read_json(folder / AGREEMENT)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArtefactError(
            f"{SIMILAR} of {feature_name(folder)}: not a readable table",
            str(error).strip("'\""),
            "Run `selfvitmil slide-embeddings` again",
            code="unreadable-similar-slides",
        ) from None


def newest_similar(layout: StudyLayout) -> Path | None:
    """Return the folder of slide embeddings whose similar slides were found last; None where there is none."""
    tables = [folder / SIMILAR for folder in layout.all_slide_features() if (folder / SIMILAR).is_file()]
    return max(tables, key=lambda path: path.stat().st_mtime).parent if tables else None
