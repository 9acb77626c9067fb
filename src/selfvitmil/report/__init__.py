"""One self-contained HTML page of a study: what was run, on what, how well it does, and where the evidence lies.

contents.py   what a study holds, read once; what is missing is noted
markup.py     HTML from Python values, escaped
pictures.py   pictures and figures as data inside the page
curves.py     the course of a pretraining as figures
assessment.py what the quality of a pretraining says, in one sentence
samples.py    training tiles and the views made of them
neighbors.py  tiles and those of other patients with the most similar embeddings
pretraining.py the part about encoders
sections.py   the parts of the page about the study as a whole
result_sections.py  the parts about how well methods do
slides.py     the part of one slide
page.py       all of it together, written to a file
"""

from __future__ import annotations

from selfvitmil.report.page import Report, write_report

__all__ = ["Report", "write_report"]
