"""The stage `tile`: find tissue, cut it into tiles, fit the stains."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selfvitmil.engine import Engine
from selfvitmil.errors import SelfVitMilError
from selfvitmil.formatting import cell
from selfvitmil.settings import to_toml
from selfvitmil.stages.base import (
    Basis,
    Engines,
    Estimate,
    Pending,
    Progress,
    SlideWork,
    Snapshot,
    Stage,
    StageResult,
    data_frame,
    why_build,
)
from selfvitmil.store.failures import read_failures
from selfvitmil.store.files import write_csv, write_text
from selfvitmil.store.layout import quality_page, tiling_summary
from selfvitmil.store.provenance import MISSING
from selfvitmil.study import Study, map_slides, num_tiles

if TYPE_CHECKING:
    from selfvitmil.commands.run import RunPlan
    from selfvitmil.stages.measure import Measures
    from selfvitmil.tiles import TiledSlide, TileJob


@dataclass(frozen=True)
class TileResult(StageResult):
    """What `tile` did."""

    tiling: str
    """Name of the folder below tiles/."""
    slides: Mapping[str, TiledSlide]
    """Slides that have tiles now, with the outcome of each; the others are in `failures`."""
    num_slides: int
    """Slides of the cohort."""

    def to_frame(self) -> Any:
        """Return tiles.csv as a pandas DataFrame, one row per slide."""
        return data_frame([_tiles_row(slide, found) for slide, found in self.slides.items()], "slide")


def tile(study: Study, engine: Engine) -> TileResult:
    """Find tissue, cut tiles, fit stains; writes `tiles/<tiling>/` and `failures.csv`."""
    from selfvitmil.tiles import SECTIONS, without_mask_folder

    settings, folder = study.settings, study.layout.tiling(study.tiling)
    with study.lock("tile"):
        study.store_cohort()
        work = tile_work(study)
        done, failures = map_slides(engine, study.root, work.stage, work.function, work.jobs, **work.options)
        if done:
            write_text(folder / "settings.toml", to_toml(without_mask_folder(settings), SECTIONS))
            rows = [_tiles_row(slide, found) for slide, found in done.items()]
            header = max(map(list, rows), key=len)  # with quality, there are more columns
            write_csv(tiling_summary(folder), [header, *([cell(row.get(key)) for key in header] for row in rows)])
            _write_quality_page(folder, done, settings.tile.exclude)
        study.forget_claims("tile")
    return TileResult(study.tiling, done, len(work.jobs), failures=tuple(failures), notes=study.cohort_notes)


def tile_work(study: Study) -> SlideWork:
    """Return the work on single slides."""
    return SlideWork("tile", _tile, tile_jobs(study), {"unit": "tiles", "count": num_tiles})


def _tile(job: TileJob) -> TiledSlide:
    """Tile a slide in a worker: only there is what finds tissue and measures quality loaded."""
    from selfvitmil.tiling import tile_slide

    return tile_slide(job)


def tile_jobs(study: Study) -> dict[str, TileJob]:
    """Return what there is to cut, slide by slide."""
    from selfvitmil.slides import SlideRef
    from selfvitmil.tiles import TileJob

    folder, settings = study.layout.tiles_folder, study.settings
    return {
        row.slide: TileJob(SlideRef.of(row, settings.slide), folder, settings, row.annotation)
        for row in study.cohort.rows
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


def _tiles_row(slide: str, found: TiledSlide) -> dict[str, Any]:
    """Return a row of tiles.csv."""
    info = {"slide": slide, "tiles": found.num_tiles}
    row = {**info, **{column: found.attributes.get(column) for column in TILES_HEADER[2:]}}
    if "flagged" in found.attributes:
        row |= {"excluded": found.attributes["excluded"], **found.attributes["flagged"]}
    return row


def _write_quality_page(folder: Path, done: Mapping[str, TiledSlide], exclude: tuple[str, ...]) -> None:
    """Write the page on the quality of tiles, or remove that of earlier settings."""
    path = quality_page(folder)
    if not any("flagged" in found.attributes for found in done.values()):
        path.unlink(missing_ok=True)
        return
    from selfvitmil.report.tile_quality import quality_page_of

    slides = {slide: (found.num_tiles, found.attributes) for slide, found in done.items()}
    write_text(path, quality_page_of(folder, slides, exclude))


BYTES_PER_TILE, BYTES_PER_SLIDE = 28, 400_000
"""Usual sizes of a tile's row and of a slide's picture."""


class Tile(Stage):
    """Cut the tissue of every slide into tiles."""

    name = "tile"
    is_shared = True
    by_slide = True
    is_essential = True
    done_when_nothing_pending = True

    def slide_work(self, study: Study, encoders: Sequence[str]) -> Iterable[SlideWork]:
        return (tile_work(study),)

    def assemble(self, study: Study, encoders: Sequence[str], engine: Engine) -> TileResult:
        return tile(study, engine)

    def pending(self, plan: RunPlan) -> Pending:
        from selfvitmil.tiles import tiles_freshness

        failed = {failure.slide for failure in read_failures(plan.study.root) if failure.stage == self.name}
        todo: dict[str, str] = {}
        hopeless: set[str] = set()
        for slide, job in tile_jobs(plan.study).items():
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

    def run(self, plan: RunPlan, engines: Engines) -> TileResult:
        return tile(plan.study, engines.slides)

    def status(self, snapshot: Snapshot) -> Iterable[Progress]:
        for folder in snapshot.layout.all_tilings():
            yield snapshot.slide_files(self.name, folder, self.name)
