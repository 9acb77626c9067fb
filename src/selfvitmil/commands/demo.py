"""The command `demo`: the full pipeline on synthetic slides."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import resources
from pathlib import Path

from selfvitmil.commands.run import run
from selfvitmil.commands.synth import synth
from selfvitmil.engine import Engine
from selfvitmil.settings import StudySettings, SynthSettings
from selfvitmil.stages.run_plan import Request
from selfvitmil.store.files import write_bytes
from selfvitmil.store.layout import StudyLayout
from selfvitmil.study.folder import CohortSource, Summary

SLIDES = SynthSettings(slides=64, size_px=2560)
"""A third of them is for testing."""


def start_demo(study: Path) -> None:
    """Give a new study the demo's settings; one that has settings keeps them."""
    if not StudyLayout(study).settings.exists():
        write_bytes(StudyLayout(study).settings, (resources.files("selfvitmil") / "presets" / "demo.toml").read_bytes())


def demo(study: Path, settings: StudySettings, engine: Engine) -> Iterator[Summary]:
    """Run the full pipeline on synthetic slides, from writing them to the report; yields a summary after each step."""
    slides = StudyLayout(study).synthetic_slides
    if not (StudyLayout(slides).cohort).exists():
        yield synth(slides, SLIDES, engine)
    yield from run(study, Request(CohortSource(cohort=StudyLayout(slides).cohort), name="demo"), settings, engine)
