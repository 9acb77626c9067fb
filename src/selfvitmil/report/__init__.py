"""One self-contained HTML page of a study: what was run, on what, how well it does, and where the evidence lies.

data.py       the study, read once into what the page shows; `write_report` writes that page
encoders.py   pretraining curves, quality and views;  neighbors.py  tiles with similar embeddings
results.py    comparisons, evaluations and lesion scores, and the section of one slide
render.py     the page from that data, by the templates in templates/ and style.css
"""

from __future__ import annotations

from selfvitmil.report.data import MAX_SLIDES, Report, ReportData, read_report_data, write_report
from selfvitmil.report.render import render_page

__all__ = ["MAX_SLIDES", "Report", "ReportData", "read_report_data", "render_page", "write_report"]
