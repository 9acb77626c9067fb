"""Commands that work on slides: `synth`, `check`, `tile`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from selfvitmil.cohort import Cohort
from selfvitmil.engine import Engine
from selfvitmil.errors import SelfVitMilError
from selfvitmil.settings import StudySettings, tiling_name, to_toml
from selfvitmil.stages.base import Basis, Engines, Estimate, Pending, Progress, Snapshot, Stage
from selfvitmil.stages.measure import Measures
from selfvitmil.stages.run_plan import RunPlan
from selfvitmil.store.failures import read_failures
from selfvitmil.store.files import write_csv, write_text
from selfvitmil.store.layout import StudyLayout, tiling_summary
from selfvitmil.store.provenance import MISSING, UP_TO_DATE
from selfvitmil.study.folder import (
    CohortSource,
    Summary,
    cell,
    few,
    map_slides,
    num_tiles,
    open_study,
    outcomes_of,
    rebuilt_lines,
    study_cohort,
    why_build,
)


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
            write_csv(tiling_summary(folder / name), [TILES_HEADER, *rows])
        lines += _tile_lines(done, len(jobs), name)
    return Summary(tuple(lines), tuple(failures))


def tile_jobs(study: Path, cohort: Cohort, settings: StudySettings) -> dict[str, Any]:
    """What there is to cut, slide by slide."""
    from selfvitmil.slides import SlideRef
    from selfvitmil.tiles import TileJob

    folder = StudyLayout(study).tiles_folder
    return {
        row.slide: TileJob(SlideRef.of(row, settings.slide), folder, settings, row.annotation) for row in cohort.rows
    }


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
    up_to_date = sum(result.outcome == UP_TO_DATE for result in done.values())
    total = f"{counts.sum():,} tiles of {len(done)} of {asked} slides in tiles/{name}"
    left_alone = f" ({up_to_date} were up to date)" if up_to_date else ""
    return [*rebuilt_lines(outcomes_of(done)), *few(warnings, f"tiles/{name}/tiles.csv"), total + left_alone]


BYTES_PER_TILE, BYTES_PER_SLIDE = 28, 400_000
"""Usual sizes of a tile's row and of a slide's picture."""


class Tile(Stage):
    """Cut the tissue of every slide into tiles."""

    name = "tile"
    done_when_nothing_pending = True

    def pending(self, plan: RunPlan) -> Pending:
        from selfvitmil.tiles import tiles_freshness

        failed = {failure.slide for failure in read_failures(plan.study) if failure.stage == self.name}
        todo: dict[str, str] = {}
        hopeless: set[str] = set()
        for slide, job in tile_jobs(plan.study, plan.cohort, plan.settings).items():
            try:
                freshness = tiles_freshness(job)
            except (SelfVitMilError, OSError):
                todo[slide] = "stale: its file cannot be read"
                hopeless.add(slide)
                continue
            if freshness == MISSING and slide in failed:
                todo[slide] = "that failed the last time"
                hopeless.add(slide)
            elif not freshness.is_up_to_date:
                todo[slide] = why_build(freshness)
        return Pending(todo, len(plan.cohort) - len(todo), frozenset(hopeless))

    def estimate(self, plan: RunPlan, measures: Measures) -> Estimate:
        todo = plan.pending(self.name).todo
        disk = measures.tiles_of(todo) * BYTES_PER_TILE + len(todo) * BYTES_PER_SLIDE
        seconds = measures.over_workers(len(todo) * measures.tile_s)
        return Estimate(seconds, disk, measures.workers_bytes, Basis.MEASURED)

    def run(self, plan: RunPlan, engines: Engines) -> Summary:
        return tile(plan.study, CohortSource(), plan.settings, engines.slides)

    def status(self, snapshot: Snapshot) -> Iterable[Progress]:
        for folder in snapshot.layout.all_tilings():
            yield snapshot.slide_files(self.name, folder, self.name)
