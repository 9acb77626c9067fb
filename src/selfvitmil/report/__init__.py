"""One self-contained HTML page of a study: what was run, on what, how well it does, and where the evidence lies.

data.py       the study, read once into what the page shows
encoders.py   pretraining curves, quality and views;  neighbors.py  tiles with similar embeddings
results.py    comparisons, evaluations and lesion scores;  slides.py  the section of one slide
figures.py    pictures and figures as data inside the page
render.py     the page from that data, by the templates in templates/ and style.css
"""

from __future__ import annotations

from selfvitmil.report.render import Report, write_report

__all__ = ["Report", "write_report"]
