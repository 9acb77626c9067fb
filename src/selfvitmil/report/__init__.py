"""One self-contained HTML page of a study: what was run, on what, how well it does, and where the evidence lies.

data.py       the study, read once into what the page shows
encoders.py   pretraining curves, quality and views;  neighbors.py  tiles with similar embeddings
results.py    comparisons, evaluations and lesion scores;  slides.py  the section of one slide
render.py     the page from that data, by the templates in templates/ and style.css
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from selfvitmil.report.data import MAX_SLIDES, ReportData, read_report_data
from selfvitmil.report.render import render_page
from selfvitmil.settings import StudySettings
from selfvitmil.store.files import write_text
from selfvitmil.store.layout import StudyLayout

__all__ = ["MAX_SLIDES", "Report", "ReportData", "read_report_data", "render_page", "write_report"]


@dataclass(frozen=True)
class Report:
    """What was written."""

    path: Path
    size_bytes: int
    num_sections: int
    """Slides with a section of their own."""
    num_mapped: int
    """Slides that might have one."""
    problems: tuple[str, ...]
    """Files of the study that could not be read."""


def write_report(
    study: Path,
    settings: StudySettings,
    *,
    out: Path | None = None,
    pseudonyms: bool = False,
    results: Sequence[str] = (),
    most_slides: int = MAX_SLIDES,
) -> Report:
    """Write the page of a study to `out`, by default `report/index.html` in it; a folder gets an `index.html`.

    `results`: names of the results to show, all where it is empty. `pseudonyms`: slides and patients are renamed, and
    the key is kept in the study. Raises ConfigError where the folder is no study or has no such results. Equal studies
    give equal pages while the versions of the program and its libraries are the same.
    """
    data = read_report_data(study, settings, pseudonyms=pseudonyms, results=results, most_slides=most_slides)
    page = render_page(data)
    path = StudyLayout(study).report if out is None else out
    if path.suffix.lower() not in (".html", ".htm"):
        path /= "index.html"
    write_text(path, page)
    size = len(page.encode("utf-8"))
    return Report(path, size, len(data.slide_sections), data.num_mapped, data.problems)
