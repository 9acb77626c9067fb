"""The page of a study, rendered from its data by Jinja2 templates into one file that needs nothing else.

Every value is escaped. The page forbids itself every connection: its policy allows pictures that are data inside it and
the one style sheet whose hash it names. Equal studies give equal pages while the versions of the program and its
libraries are the same.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from selfvitmil.formatting import duration, percent
from selfvitmil.report.data import MAX_SLIDES, ReportData, read_report_data
from selfvitmil.settings import StudySettings
from selfvitmil.store.files import write_text
from selfvitmil.store.layout import StudyLayout

NUMBER = re.compile(r"[-+−<>~≈]?[\d,.]+(?:\s?(?:%|s|min|h|MB|mm²|µm))?|[-–]|")
"""A cell of a column of numbers, which is set to the right."""


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
    the key is kept in the study. Raises ConfigError where the folder is no study or has no such results.
    """
    data = read_report_data(study, settings, pseudonyms=pseudonyms, results=results, most_slides=most_slides)
    page = render_page(data)
    path = StudyLayout(study).report if out is None else out
    if path.suffix.lower() not in (".html", ".htm"):
        path /= "index.html"
    write_text(path, page)
    size = len(page.encode("utf-8"))
    return Report(path, size, len(data.slide_sections), data.num_mapped, data.problems)


def render_page(data: ReportData) -> str:
    """Return the page as HTML."""
    css = (resources.files("selfvitmil.report") / "style.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(css.encode("utf-8")).digest()).decode("ascii")
    environment = Environment(
        loader=PackageLoader("selfvitmil.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "columns": columns,
        "duration": duration,
        "fixed": fixed,
        "limits_below": limits_below,
        "number_columns": number_columns,
        "percent": percent,
        "sentence": lambda text: f"{text[:1].upper()}{text[1:]}",
    }
    return environment.get_template("page.html.j2").render(data=data, css=Markup(css), style_hash=digest)


def columns(items: Iterable[Any], *fields: str) -> list[list[Any]]:
    """Return rows of a table: these fields of each item."""
    return [[getattr(item, field) for field in fields] for item in items]


def fixed(value: float | None) -> str:
    """Return a value with three decimals; nothing where there is none."""
    return "" if value is None else f"{value:.3f}"


def limits_below(cell: str) -> Markup:
    """Put the limits of `0.912 [0.850, 0.961]` below the value, or a table would be wider than the page."""
    found = re.fullmatch(r"(.+?) (\[.+\])", cell, re.DOTALL)
    return Markup('{}<span class="limits">{}</span>').format(*found.groups()) if found else Markup.escape(cell)


def number_columns(rows: Iterable[Sequence[Any]]) -> list[bool]:
    """Return which columns hold numbers only."""
    return [all(NUMBER.fullmatch(str(cell)) for cell in column) for column in zip(*rows, strict=True)]
