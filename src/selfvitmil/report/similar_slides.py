"""Slides beside the slides of other patients that have the most similar embeddings, as `slide-embeddings` left them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from selfvitmil.bags.similar import newest_similar, read_similar
from selfvitmil.cohort import Cohort
from selfvitmil.errors import ArtefactError
from selfvitmil.pseudonyms import Names
from selfvitmil.report.render import Shown, picture_file
from selfvitmil.store.layout import StudyLayout, feature_name

NUM_QUERIES, NUM_SIMILAR = 4, 5
EDGE_PX = 150
"""Longer edge of a slide's picture."""


@dataclass(frozen=True)
class SimilarSlideShown:
    """A query, or one of the slides like it."""

    slide: str
    patient: str
    label: str
    similarity: float | None
    """Cosine similarity to the query; None for the query itself."""
    picture: Shown


@dataclass(frozen=True)
class SimilarSlidesData:
    """Queries, each followed by the slides most like it."""

    embedding: str
    agreement: str
    """How often labels of similar slides agree, in words; empty where that was not measured."""
    slides: tuple[SimilarSlideShown, ...]


def similar_slides_data(
    layout: StudyLayout, cohort: Cohort | None, pictures: Mapping[str, Path], names: Names
) -> SimilarSlidesData | None:
    """Return some slides with those most like them; None where no slide embeddings can be read.

    `pictures` are pictures of slides with their tissue, by slide.
    """
    folder = newest_similar(layout)
    if folder is None or cohort is None:
        return None
    try:
        similar, agreement = read_similar(folder)
    except ArtefactError:
        return None
    rows = {row.slide: row for row in cohort.rows}

    def shown(slide: str, similarity: float | None) -> SimilarSlideShown:
        name, row = names.slide(slide), rows[slide]
        image = (
            picture_file(pictures[slide], f"slide {name}", edge_px=EDGE_PX, quality=72) if slide in pictures else None
        )
        return SimilarSlideShown(name, names.patient(row.patient), row.label or "", similarity, image or "no picture")

    chosen = _queries({slide: rows[slide].label for slide in similar if slide in rows}, names)
    slides: list[SimilarSlideShown] = []
    for query in chosen:
        slides.append(shown(query, None))
        slides += [shown(other, value) for other, value in similar[query][:NUM_SIMILAR] if other in rows]
    return SimilarSlidesData(feature_name(folder), _words(agreement), tuple(slides))


def _queries(labels: Mapping[str, str | None], names: Names) -> list[str]:
    """Return slides of every label in turn, in the order of the names that are shown."""
    ordered = sorted(labels, key=names.slide)
    kinds = dict.fromkeys(labels[slide] for slide in ordered)
    by_label: Sequence[Sequence[str]] = [[slide for slide in ordered if labels[slide] == kind] for kind in kinds]
    return [slide for turn in zip_longest(*by_label) for slide in turn if slide is not None][:NUM_QUERIES]


def _words(agreement: Mapping[str, Any] | None) -> str:
    try:
        k, share, chance = ((agreement or {})[key] for key in ("k", "share", "chance"))
        return (
            f"Of the {k} nearest slides of other patients, a share of {share['value']:.2f} ({share['low']:.2f} to "
            f"{share['high']:.2f}) has the label of the query; by chance it would be {chance:.2f}."
        )
    except (KeyError, TypeError, ValueError):
        return ""
