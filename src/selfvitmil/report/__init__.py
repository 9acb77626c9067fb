"""One self-contained HTML page of a study: the answer first, then the evidence, then how it was made.

answer.py     the first screen: how good, compared with what, three heatmaps, what limits the conclusion
data.py       the study, read once into what the page shows; `write_report` writes that page
encoders.py   pretraining curves, quality and views
neighbors.py  tiles and slides with similar embeddings
results.py    comparisons, evaluations and lesion scores
slide_sections.py  the section of one slide, read by the workers
analyses.py   prediction sets, decision curves, tuned settings, metrics by site, scanner and other columns
validation.py  the page of an external validation
render.py     the page from that data, by the templates in templates/, style.css and page.js; what the metrics mean
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from selfvitmil.report.data import MAX_SLIDES, Report, ReportData, read_report_data, write_report
    from selfvitmil.report.render import render_page

__all__ = ["MAX_SLIDES", "Report", "ReportData", "read_report_data", "render_page", "write_report"]


def __getattr__(name: str) -> Any:
    """Import a name when it is first used: workers read sections of slides without what the rest of the page needs."""
    if name in __all__:
        return getattr(importlib.import_module(f"{__name__}.{'render' if name == 'render_page' else 'data'}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
