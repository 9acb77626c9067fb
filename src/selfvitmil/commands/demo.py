"""The command `demo`: the full pipeline on synthetic slides."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import resources
from pathlib import Path

from selfvitmil.commands.run import Request, run
from selfvitmil.commands.synth import synth
from selfvitmil.engine import Engine
from selfvitmil.settings import StudySettings, SynthSettings
from selfvitmil.stages.base import StageResult
from selfvitmil.store.files import write_bytes
from selfvitmil.store.layout import StudyLayout
from selfvitmil.study import CohortSource, Study

SLIDES = SynthSettings(slides=64, size_px=2560)
"""A third of them is for testing."""


def start_demo(study: Path) -> None:
    """Give a new study the demo's settings; one that has settings keeps them."""
    if not StudyLayout(study).settings.exists():
        write_bytes(StudyLayout(study).settings, (resources.files("selfvitmil") / "presets" / "demo.toml").read_bytes())


def demo(root: Path, settings: StudySettings, engine: Engine) -> Iterator[StageResult]:
    """Run the full pipeline on synthetic slides, from writing them to the report; yields a result after each step."""
    slides = StudyLayout(root).synthetic_slides
    table = StudyLayout(slides).cohort
    if not table.exists():
        yield synth(slides, SLIDES, engine)
    yield from run(Study(root, settings, CohortSource(cohort=table)), Request(name="demo"), engine)
