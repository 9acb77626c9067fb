"""The command `export`: the feature files of an encoder, and tables of labels and splits, in another tool's form."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from selfvitmil.cohort import Cohort, Split
from selfvitmil.cohort.tool_tables import tool_tables
from selfvitmil.engine import Engine
from selfvitmil.errors import ConfigError, SelfVitMilError
from selfvitmil.stages.base import StageResult
from selfvitmil.store.files import write_text
from selfvitmil.study import Study, encoder_name, features_name, map_slides, num_tiles, split_features_name


@dataclass(frozen=True)
class ExportResult(StageResult):
    """What `export` wrote."""

    folder: Path
    tool: str
    slides: tuple[str, ...]
    num_slides: int
    """Slides that have features."""
    tables: tuple[str, ...] = ()
    """Tables of labels, patients and splits."""


def export(study: Study, encoder: str, out: Path, to: str, engine: Engine, dtype: str | None = None) -> ExportResult:
    """Write the feature files of an encoder in another tool's form into the folder `out`, and the tool's tables."""
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
        tables, notes = _tables(study, to, done)
        for place, text in tables.items():
            write_text(out / place, text)
    return ExportResult(out, to, tuple(done), len(jobs), tuple(tables), failures=tuple(failures), notes=tuple(notes))


def _tables(study: Study, to: str, slides: Collection[str]) -> tuple[dict[str, str], list[str]]:
    """Return the tool's tables of the slides that were written, by their place, and notes."""
    if not study.layout.cohort.exists():
        return {}, ["note: no tables of labels and splits were written: the study has no cohort.csv"]
    cohort = Cohort(tuple(row for row in study.cohort.rows if row.slide in slides))
    splits: tuple[Split, ...] = ()
    notes: list[str] = []
    if to != "stamp":  # STAMP splits by itself
        from selfvitmil.evaluate.dataset import draw_splits

        try:
            splits = draw_splits(cohort, study.settings.train, study.settings.train.validation)
        except SelfVitMilError as error:
            notes = [f"note: no splits were written: {error.reason}"]
    tables, further = tool_tables(to, cohort, splits)
    return tables, [*notes, *further] if tables else further
