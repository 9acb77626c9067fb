"""The command `synth`: write a cohort of synthetic slides."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from selfvitmil.engine import Engine
from selfvitmil.errors import ConfigError
from selfvitmil.settings import SynthSettings
from selfvitmil.stages.base import StageResult
from selfvitmil.study import map_slides


@dataclass(frozen=True)
class SynthResult(StageResult):
    """What `synth` wrote."""

    folder: Path
    slides: tuple[str, ...]
    hostile: tuple[str, ...] = ()
    """Damaged and unusual files, for tests."""


def synth(folder: Path, settings: SynthSettings, engine: Engine) -> SynthResult:
    """Write a cohort of synthetic slides into `folder`."""
    from selfvitmil.slides import synthetic

    if folder.exists() and any(path.name != ".lock" for path in folder.iterdir()):
        raise ConfigError(
            f"{folder.name}: this folder is not empty",
            "synthetic slides would mix with existing files",
            "Name a new one",
            code="folder-not-empty",
        )
    plans = synthetic.plan_cohort(
        slides=settings.slides,
        positives=settings.positives,
        seed=settings.seed,
        size=(settings.size_px, settings.size_px),
        layout=settings.layout,
        outcomes=settings.outcomes,
    )
    jobs = {plan.name: (plan, folder) for plan in plans}
    written, failures = map_slides(engine, folder, "synth", _write_planned, jobs)
    synthetic.finish_cohort(folder, list(written.values()))
    hostile = synthetic.make_problem_files(folder / "hostile") if settings.hostile else ()
    return SynthResult(folder, tuple(written), tuple(map(str, hostile)), failures=tuple(failures))


def _write_planned(job: Any) -> Any:
    from selfvitmil.slides import synthetic

    plan, folder = job
    return synthetic.write_planned(plan, folder)
