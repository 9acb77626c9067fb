"""The command `export`: the feature files of an encoder in another tool's form."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from selfvitmil.engine import Engine
from selfvitmil.errors import ConfigError
from selfvitmil.stages.base import StageResult
from selfvitmil.study import Study, encoder_name, features_name, map_slides, num_tiles, split_features_name


@dataclass(frozen=True)
class ExportResult(StageResult):
    """What `export` wrote."""

    folder: Path
    tool: str
    slides: tuple[str, ...]
    num_slides: int
    """Slides that have features."""


def export(study: Study, encoder: str, out: Path, to: str, engine: Engine, dtype: str | None = None) -> ExportResult:
    """Write the feature files of an encoder in another tool's form into the folder `out`."""
    from selfvitmil.bags.export import export_slide, plan_export

    name = encoder_name(encoder)
    if split_features_name(name)[1] is None:
        name = features_name(name, study.settings.embed.layout)
    folder = study.layout.features(study.tiling, name)
    if not folder.is_dir():
        what = f"{study.name}: there are no features of encoder {encoder!r} for tiles {study.tiling}"
        raise ConfigError(what, how="Run `selfvitmil embed` first, or name another encoder", code="no-features")
    with study.lock("export"):
        jobs, stage = plan_export(folder, out, to, dtype), f"export {to}"
        done, failures = map_slides(engine, study.root, stage, export_slide, jobs, unit="tiles", count=num_tiles)
    return ExportResult(out, to, tuple(done), len(jobs), failures=tuple(failures))
