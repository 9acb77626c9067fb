"""The page on the quality of tiles: how many are flagged as what in which slide, and examples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from selfvitmil.quality import SHEET_PX
from selfvitmil.report.render import Shown, Table, picture_file, render_template
from selfvitmil.settings import QUALITY_KINDS
from selfvitmil.store.layout import quality_examples_of

MAX_SLIDES = 40
"""Slides with examples on the page: those with the largest share of flagged tiles."""


@dataclass(frozen=True)
class QualityData:
    """What the page shows."""

    tiling: str
    num_tiles: int
    counts: Mapping[str, int]
    """Kind -> flagged tiles of all slides."""
    num_excluded: int
    exclude: tuple[str, ...]
    slides: Table
    examples: tuple[tuple[str, Shown], ...]
    num_hidden: int
    """Slides with flagged tiles whose examples are not shown."""


def quality_page_of(folder: Path, slides: Mapping[str, tuple[int, Mapping[str, Any]]], exclude: tuple[str, ...]) -> str:
    """Return the page of a tiling; `slides`: name -> kept tiles and the attributes of the tile table."""
    rows: list[tuple[Any, ...]] = [
        (slide, kept, info["excluded"], *(info["flagged"][kind] for kind in QUALITY_KINDS))
        for slide, (kept, info) in slides.items()
        if "flagged" in info
    ]
    rows.sort(key=lambda row: (-sum(row[3:]) / (row[1] + row[2]), row[0]))
    flagged = [row[0] for row in rows if sum(row[3:])]
    examples = [
        (
            slide,
            picture_file(quality_examples_of(folder / f"{slide}.h5"), f"flagged tiles of {slide}", edge_px=SHEET_PX),
        )
        for slide in flagged[:MAX_SLIDES]
    ]
    return render_template(
        "quality.html.j2",
        QualityData(
            tiling=folder.name,
            num_tiles=sum(row[1] + row[2] for row in rows),
            counts={kind: sum(row[3 + k] for row in rows) for k, kind in enumerate(QUALITY_KINDS)},
            num_excluded=sum(row[2] for row in rows),
            exclude=exclude,
            slides=Table.of(("slide", "tiles kept", "excluded", *QUALITY_KINDS), rows),
            examples=tuple((slide, shown or "This picture cannot be read.") for slide, shown in examples),
            num_hidden=len(flagged) - len(examples),
        ),
    )
