"""The whole page: parts, style and what a browser may do with it, in one file that needs nothing else.

The page forbids itself every connection: its policy allows pictures that are data inside it and the one style sheet
whose hash it names. Equal studies give equal pages while the versions of the program and its libraries are the same.
"""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from selfvitmil.pseudonyms import Names, names_of
from selfvitmil.report import pretraining, result_sections, sections, slides
from selfvitmil.report.contents import Contents, read_contents
from selfvitmil.report.markup import Markup, join, map_text, tag
from selfvitmil.settings import StudySettings
from selfvitmil.store.files import write_text
from selfvitmil.store.layout import StudyLayout

MAX_SLIDES = 40
"""Slides with a section of their own, unless more are asked for: about 20 MB."""


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
    results: tuple[str, ...] = (),
    most_slides: int = MAX_SLIDES,
) -> Report:
    """Write the page of a study to `out`, by default `report/index.html` in it; a folder gets an `index.html`.

    `results`: names of the results to show, all where it is empty. `pseudonyms`: slides and patients are renamed, and
    the key is kept in the study. ConfigError where the folder is no study or has no such results.
    """
    contents = read_contents(study, results)
    names = names_of(study, contents.cohort, pseudonyms=pseudonyms, slides=contents.slides, patients=contents.patients)
    page, chosen = make_page(contents, names, settings, most_slides)
    path = _target(study, out)
    write_text(path, page)
    problems = tuple(contents.problems)
    return Report(path, len(page.encode("utf-8")), len(chosen.slides), chosen.possible, problems)


def _target(study: Path, out: Path | None) -> Path:
    if out is None:
        return StudyLayout(study).report
    return out if out.suffix.lower() in (".html", ".htm") else out / "index.html"


def make_page(
    contents: Contents, names: Names, settings: StudySettings, most_slides: int = MAX_SLIDES
) -> tuple[str, slides.Chosen]:
    """The page as text, and the slides that have a section of their own."""
    findings = contents.findings()
    chosen = slides.choose(contents, names, findings, most_slides)
    simple = [part(contents, names) for part in (sections.overview, sections.cohort, sections.tissue)]
    simple.append(pretraining.pretraining(contents, names, settings))
    simple += [
        part(contents, names)
        for part in (result_sections.comparison, result_sections.evaluation, result_sections.localization)
    ]
    about_slides = [
        slides.slide_table(contents, names, findings, chosen),
        slides.slide_sections(contents, names, settings, findings, chosen),
    ]
    last = [part(contents, names) for part in (sections.failures, sections.timings, sections.versions)]
    title = f"Study {contents.name}: report"
    body = tag(
        "body",
        tag("header", tag("h1", title), sections.research_note(), _contents_list()),
        tag("main", *simple, *about_slides, *last),
        tag("footer", sections.research_note()),
    )
    shown = map_text(join((tag("title", title), body)), names.text)
    head, rest = shown.split("</title>", 1)
    return f"{_start()}{head}</title>\n</head>\n{rest}\n</html>\n", chosen


def _contents_list() -> Markup:
    parts = {
        "overview": "What was run", "cohort": "Cohort", "tissue": "Tissue", "pretraining": "Pretraining",
        "comparison": "Comparison", "evaluation": "Evaluation", "localization": "Localization", "slides": "All slides",
        "maps": "Slide by slide", "failures": "Failures", "timings": "Timings", "versions": "Versions",
    }  # fmt: skip
    links = (tag("a", name, href=f"#{anchor}") for anchor, name in parts.items())
    return tag("nav", *links, aria_label="Contents")


def _start() -> str:
    """Everything of the head but the title; the style is trusted by its hash."""
    css = (resources.files("selfvitmil.report") / "style.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(css.encode("utf-8")).digest()).decode("ascii")
    policy = f"default-src 'none'; img-src data:; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    metas = (
        tag("meta", charset="utf-8"),
        Markup(f'<meta http-equiv="Content-Security-Policy" content="{policy}">'),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", name="referrer", content="no-referrer"),
    )
    return f'<!DOCTYPE html>\n<html lang="en">\n<head>\n{join(metas, chr(10))}\n<style>{css}</style>\n'
