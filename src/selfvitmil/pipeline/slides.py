"""Commands that work on slides: `synth`, `check`, `tile`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from selfvitmil.cohort import Cohort, SlideRow
from selfvitmil.engine import Engine
from selfvitmil.errors import ConfigError
from selfvitmil.pipeline.study import (
    CohortSource,
    Summary,
    cell,
    changes,
    few,
    map_slides,
    num_tiles,
    open_study,
    study_cohort,
)
from selfvitmil.settings import StudySettings, SynthSettings, tiling_name, to_toml
from selfvitmil.store.failures import Failure
from selfvitmil.store.files import write_csv, write_text
from selfvitmil.store.layout import StudyLayout


def synth(folder: Path, settings: SynthSettings, engine: Engine) -> Summary:
    """Write a cohort of made slides into `folder`."""
    from selfvitmil.slides import synthetic

    if folder.exists() and any(path.name != ".lock" for path in folder.iterdir()):
        raise ConfigError(
            f"{folder.name}: this folder is not empty", "made slides would mix with what is there", "Name a new one"
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


def check(study: Path, source: CohortSource, settings: StudySettings, engine: Engine) -> Summary:
    """Open every slide of the cohort and read some of it; writes `check.csv` and `failures.csv`."""
    from selfvitmil.slides.check import CheckJob, SlideCheck, check_slide

    with open_study(study, "check"):
        cohort, lines = study_cohort(study, source)
        jobs = {
            row.slide: CheckJob(
                row.slide,
                row.path,
                settings.slide.reader,
                row.mpp or settings.slide.forced_mpp,
                row.annotation,
                settings.slide.mpp,
                settings.tile.mpp,
            )
            for row in cohort.rows
        }
        done, failures = map_slides(engine, study, "check", check_slide, jobs)
        rows = _with_twins(list(done.values()))
        header = [name for name in SlideCheck.__dataclass_fields__ if name != "fingerprint"]
        cells = [[cell(asdict(row)[name]) for name in header] for row in rows]
        write_csv(StudyLayout(study).check_table, [header, *cells])
    lines += few([f"{row.slide}: {warning}" for row in rows for warning in row.warnings], "check.csv")
    lines.append(f"{len(rows)} of {len(jobs)} slides can be worked with; see check.csv")
    shown = ("slide", "format", "reader", "width", "height", "mpp", "mpp_source", "levels")
    table = (shown, *(tuple(cell(asdict(row)[name]) for name in shown) for row in rows))
    return Summary(tuple(lines), tuple(failures), table)


def _with_twins(rows: Sequence[Any]) -> list[Any]:
    """Rows with a warning on slides whose files are the same."""
    first: dict[str, str] = {}
    result = []
    for row in rows:
        twin = first.setdefault(row.fingerprint, row.slide)
        warning = () if twin == row.slide else (f"the same file as {twin}: one slide under two names",)
        result.append(replace(row, warnings=row.warnings + warning))
    return result


def tile(study: Path, source: CohortSource, settings: StudySettings, engine: Engine) -> Summary:
    """Find tissue, cut tiles, fit stains; writes `tiles/<tiling>/` and `failures.csv`."""
    from selfvitmil.tiles import SECTIONS, tile_slide, without_mask_folder

    name = tiling_name(settings.tile)
    folder = StudyLayout(study).tiles_folder
    with open_study(study, "tile"):
        cohort, lines = study_cohort(study, source)
        jobs = tile_jobs(study, cohort, settings)
        done, failures = map_slides(engine, study, "tile", tile_slide, jobs, unit="tiles", count=num_tiles)
        if done:
            write_text(folder / name / "settings.toml", to_toml(without_mask_folder(settings), SECTIONS))
            rows = [_tiles_row(slide, result) for slide, result in done.items()]
            write_csv(folder / name / "tiles.csv", [TILES_HEADER, *rows])
        lines += _tile_lines(done, len(jobs), name)
        if settings.tile.pack:
            packed, unpacked = _pack(study, [cohort[slide] for slide in done], settings, engine)
            lines += packed
            failures += unpacked
    return Summary(tuple(lines), tuple(failures))


def tile_jobs(study: Path, cohort: Cohort, settings: StudySettings) -> dict[str, Any]:
    """What there is to cut, slide by slide."""
    from selfvitmil.tiles import TileJob

    folder = StudyLayout(study).tiles_folder
    return {row.slide: TileJob(row.slide, row.path, folder, settings, row.mpp, row.annotation) for row in cohort.rows}


def _pack(
    study: Path, rows: Sequence[SlideRow], settings: StudySettings, engine: Engine
) -> tuple[list[str], list[Failure]]:
    """Store the tiles of slides whose tables are there."""
    from selfvitmil.packs import PackJob, pack_slide

    tile, slide, name = settings.tile, settings.slide, tiling_name(settings.tile)
    jobs = {
        row.slide: PackJob(
            row.slide, row.path, StudyLayout(study).tile_table(name, row.slide), tile.pack_encoding, tile.pack_quality,
            slide.reader, row.mpp,
        )
        for row in rows
    }  # fmt: skip
    done, failures = map_slides(engine, study, "pack", pack_slide, jobs, unit="tiles", count=num_tiles)
    size_gb = sum(result.num_bytes for result in done.values()) / 1e9
    return [*changes(done), f"{len(done)} packs of {size_gb:.2f} GB in tiles/{name}/packs"], failures


TILES_HEADER = (
    "slide",
    "tiles",
    "tissue_mm2",
    "pen_fraction",
    "stain_fitted",
    "reader",
    "mpp_source",
    "tumour_tiles",
    "tumour_tiles_lost",
    "warnings",
)


def _tiles_row(slide: str, result: Any) -> list[str]:
    return [slide, str(result.num_tiles), *(cell(result.attributes.get(column)) for column in TILES_HEADER[2:])]


def _tile_lines(done: Mapping[str, Any], asked: int, name: str) -> list[str]:
    """What a person wants to read after tiling: changes, warnings, odd counts, totals."""
    warnings = [f"{slide}: {text}" for slide, result in done.items() for text in result.attributes.get("warnings", ())]
    counts = np.array([result.num_tiles for result in done.values()], dtype=np.int64)
    if len(counts) >= 5:
        middle = float(np.median(counts))
        warnings += [
            f"{slide}: {result.num_tiles} tiles, where the median is {middle:.0f}: look at its picture"
            for slide, result in done.items()
            if not middle / 10 <= result.num_tiles <= middle * 10
        ]
    current = sum(result.note == "current" for result in done.values())
    total = f"{counts.sum():,} tiles of {len(done)} of {asked} slides in tiles/{name}"
    left_alone = f" ({current} were current and left alone)" if current else ""
    return [*changes(done), *few(warnings, f"tiles/{name}/tiles.csv"), total + left_alone]
