"""The table of similar slides beside slide embeddings, and the agreement of labels: what report and viewer show."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from selfvitmil.errors import ArtefactError
from selfvitmil.store.files import read_json, write_csv, write_text
from selfvitmil.store.layout import StudyLayout, feature_name

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
