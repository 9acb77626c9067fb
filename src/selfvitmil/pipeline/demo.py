"""The whole way on made slides."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import resources
from pathlib import Path

from selfvitmil import artefact
from selfvitmil.engine import Engine
from selfvitmil.pipeline.encoders import embed, pretrain
from selfvitmil.pipeline.learning import FeatureChoice, compare
from selfvitmil.pipeline.slides import check, synth, tile
from selfvitmil.pipeline.study import CohortSource, Summary
from selfvitmil.settings import StudySettings, SynthSettings


def start_demo(study: Path) -> None:
    """Give a new study the demo's settings; one that has settings keeps them."""
    if not (study / "study.toml").exists():
        artefact.write_bytes(
            study / "study.toml", (resources.files("selfvitmil") / "presets" / "demo.toml").read_bytes()
        )


def demo(study: Path, settings: StudySettings, engine: Engine) -> Iterator[Summary]:
    """The whole way on made slides: yields a summary after each step."""
    slides = study / "slides"
    if not (slides / "cohort.csv").exists():
        yield synth(slides, SynthSettings(), engine)
    source = CohortSource(cohort=slides / "cohort.csv")
    yield check(study, source, settings, engine)
    yield tile(study, source, settings, engine)
    yield pretrain(study, "demo", settings)
    yield embed(study, ["demo"], settings, engine)
    yield compare(study, CohortSource(), FeatureChoice("demo"), settings, engine)
