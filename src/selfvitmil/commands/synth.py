"""The command `synth`: write a cohort of synthetic slides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from selfvitmil.engine import Engine
from selfvitmil.errors import ConfigError
from selfvitmil.settings import SynthSettings
from selfvitmil.study.folder import Summary, map_slides


def synth(folder: Path, settings: SynthSettings, engine: Engine) -> Summary:
    """Write a cohort of synthetic slides into `folder`."""
    from selfvitmil.slides import synthetic

    if folder.exists() and any(path.name != ".lock" for path in folder.iterdir()):
        raise ConfigError(
            f"{folder.name}: this folder is not empty",
            "synthetic slides would mix with existing files",
            "Name a new one",
        )
    plans = synthetic.plan_cohort(
        slides=settings.slides,
        positives=settings.positives,
        seed=settings.seed,
        size=(settings.size_px, settings.size_px),
        layout=settings.layout,
    )
    jobs = {plan.name: (plan, folder) for plan in plans}
    truths, failures = map_slides(engine, folder, "synth", _write_planned, jobs)
    synthetic.finish_cohort(folder, list(truths.values()))
    lines = [f"{len(truths)} slides written to {folder}"]
    if settings.hostile:
        lines.append(f"{len(synthetic.make_hostile(folder / 'hostile'))} hostile files written to {folder / 'hostile'}")
    return Summary(tuple(lines), tuple(failures))


def _write_planned(job: Any) -> Any:
    from selfvitmil.slides import synthetic

    plan, folder = job
    return synthetic.write_planned(plan, folder)
