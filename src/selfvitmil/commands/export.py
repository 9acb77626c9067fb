"""The command `export`: the feature files of an encoder in another tool's form."""

from __future__ import annotations

from pathlib import Path

from selfvitmil.engine import Engine
from selfvitmil.errors import ConfigError
from selfvitmil.settings import StudySettings, tiling_name
from selfvitmil.store.layout import StudyLayout
from selfvitmil.study.encoders import encoder_name, features_name, split_features_name
from selfvitmil.study.folder import Summary, map_slides, num_tiles, open_study


def export(
    study: Path, encoder: str, out: Path, to: str, settings: StudySettings, engine: Engine, dtype: str | None = None
) -> Summary:
    """Write the feature files of an encoder in another tool's form into the folder `out`."""
    from selfvitmil.bags.export import export_slide, plan_export

    name, tiling = encoder_name(encoder), tiling_name(settings.tile)
    if split_features_name(name)[1] is None:
        name = features_name(name, settings.embed.layout)
    folder = StudyLayout(study).features(tiling, name)
    if not folder.is_dir():
        what = f"{study.name}: there are no vectors of encoder {encoder!r} for tiles {tiling}"
        raise ConfigError(what, how="Run `selfvitmil embed` first, or name another encoder")
    with open_study(study, "export"):
        jobs = plan_export(folder, out, to, dtype)
        done, failures = map_slides(engine, study, f"export {to}", export_slide, jobs, unit="tiles", count=num_tiles)
    return Summary((f"{len(done)} of {len(jobs)} slides written to {out} for {to}",), tuple(failures))
