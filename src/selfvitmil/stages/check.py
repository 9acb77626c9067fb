"""The stage `check`: open every slide, read some of it, and report what will cause problems."""

from __future__ import annotations

import csv
import importlib.metadata
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from selfvitmil.annotations import read_annotations
from selfvitmil.engine import Engine
from selfvitmil.engine.claims import results_of
from selfvitmil.errors import SelfVitMilError
from selfvitmil.formatting import cell
from selfvitmil.settings import upsampling_warning
from selfvitmil.slides import SlideRef, fingerprint
from selfvitmil.stages.base import (
    Basis,
    CheckStatus,
    Engines,
    Estimate,
    MachineCheck,
    Pending,
    Progress,
    SlideWork,
    Snapshot,
    Stage,
    StageResult,
    data_frame,
    passed,
)
from selfvitmil.store.failures import read_failures
from selfvitmil.store.files import write_csv
from selfvitmil.store.layout import StudyLayout
from selfvitmil.study import Study, map_slides

if TYPE_CHECKING:
    from selfvitmil.commands.run import RunPlan
    from selfvitmil.stages.measure import Measures

NUM_REGIONS = 16
REGION_PX = 224
LARGE_L0 = 20_000
"""Slides wider than this without a pyramid are slow to read as a whole."""


@dataclass(frozen=True)
class CheckJob:
    """Input of one worker call: the slide to check."""

    slide: SlideRef
    annotation: Path | None = None
    tile_mpp: float | None = None
    """Microns per pixel of the tiles to be cut."""


@dataclass(frozen=True)
class SlideCheck:
    """A row of `check.csv`."""

    slide: str
    format: str
    reader: str
    width: int
    height: int
    mpp: float
    mpp_source: str
    levels: str
    compression: str
    fingerprint: str
    warnings: tuple[str, ...]


def check_slide(job: CheckJob) -> SlideCheck:
    """Open the slide, read regions spread over it, and read its annotation. Raises SelfVitMilError on failure."""
    with job.slide.open() as slide:
        mpp = slide.mpp
        width, height = slide.size_l0
        generator = np.random.default_rng([width, height])
        for x, y in generator.random((NUM_REGIONS, 2)):
            slide.read_tile(int(x * width), int(y * height), REGION_PX, mpp)
        coarsest = slide.levels[-1]
        slide.read_tile(0, 0, REGION_PX, mpp * coarsest.downsample)
        warnings = list(slide.warnings)
        if len(slide.levels) == 1 and max(width, height) > LARGE_L0:
            warnings.append("no pyramid: looking at the whole slide means decoding all of it, which is slow")
        if job.tile_mpp is not None and (warning := upsampling_warning(mpp, job.tile_mpp)):
            warnings.append(warning)
        if job.annotation is not None:
            repaired = [region for region in read_annotations(job.annotation, repair=True) if region.repaired]
            if repaired:
                warnings.append(
                    f"contours in {job.annotation.name} that cross themselves or enclose nothing are repaired when "
                    f"read: {len(repaired)} regions"
                )
        return SlideCheck(
            slide=job.slide.name,
            format=slide.vendor,
            reader=slide.reader,
            width=width,
            height=height,
            mpp=mpp,
            mpp_source=slide.mpp_source,
            levels=" ".join(f"{level.downsample:g}" for level in slide.levels),
            compression=slide.compression,
            fingerprint=fingerprint(job.slide.path),
            warnings=tuple(warnings),
        )


@dataclass(frozen=True)
class CheckResult(StageResult):
    """What `check` found."""

    slides: Mapping[str, SlideCheck]
    """Slides that can be opened; the others are in `failures`."""
    num_slides: int
    """Slides of the cohort."""

    def to_frame(self) -> Any:
        """Return check.csv as a pandas DataFrame, one row per slide."""
        return data_frame([asdict(row) for row in self.slides.values()], "slide")


def check(study: Study, engine: Engine, known: Mapping[str, Any] | None = None) -> CheckResult:
    """Open every slide of the cohort and read some of it; writes `check.csv` and `failures.csv`.

    `known` are slides that shards of a run have checked, as their work recorded them.
    """
    with study.lock("check"):
        study.store_cohort()
        work = check_work(study)
        checked = {slide: found for slide, each in (known or {}).items() if (found := _of_record(each)) is not None}
        jobs = {slide: job for slide, job in work.jobs.items() if slide not in checked}
        done, failures = map_slides(engine, study.root, work.stage, work.function, jobs)
        done |= checked
        found = _with_twins({slide: done[slide] for slide in work.jobs if slide in done})
        header = [name for name in SlideCheck.__dataclass_fields__ if name != "fingerprint"]
        cells = [[cell(getattr(row, name)) for name in header] for row in found.values()]
        write_csv(study.layout.check_table, [header, *cells])
        study.forget_claims("check")
    return CheckResult(found, len(work.jobs), failures=tuple(failures), notes=study.cohort_notes)


def check_work(study: Study) -> SlideWork:
    """Return the work on single slides."""
    settings = study.settings
    jobs = {
        row.slide: CheckJob(SlideRef.of(row, settings.slide), row.annotation, settings.tile.mpp)
        for row in study.cohort.rows
    }
    return SlideWork("check", check_slide, jobs, record=asdict)


def _of_record(recorded: Any) -> SlideCheck | None:
    """Return a check as `check_work` records it; None of anything else."""
    try:
        known: dict[str, Any] = {**recorded, "warnings": tuple(recorded["warnings"])}
        return SlideCheck(**known)
    except (TypeError, KeyError):
        return None


def _with_twins(checks: Mapping[str, SlideCheck]) -> dict[str, SlideCheck]:
    """Return the checks with a warning on slides whose files are the same."""
    first: dict[str, str] = {}
    result: dict[str, SlideCheck] = {}
    for slide, row in checks.items():
        twin = first.setdefault(row.fingerprint, slide)
        warning = () if twin == slide else (f"the same file as {twin}: one slide under two names",)
        result[slide] = replace(row, warnings=row.warnings + warning)
    return result


CHECKED_TILES = 16
"""Tiles that `check` reads of a slide."""


BYTES_PER_SLIDE = 200


LARGEST_DIFFERENCE = 2
"""Of 255, between the two readers' pixels of one tile."""
REINSTALL = "pip install --force-reinstall openslide-python openslide-bin simplejpeg tifffile"


def check_readers() -> Iterable[MachineCheck]:
    """Read a synthetic slide with both readers and compare the pixels."""
    import numpy as np
    import openslide

    from selfvitmil import slides
    from selfvitmil.slides import synthetic

    version = importlib.metadata.version
    versions = {
        "openslide": f"OpenSlide {openslide.__library_version__}, openslide-python {openslide.__version__}",
        "jpegtiff": f"simplejpeg {version('simplejpeg')}, tifffile {version('tifffile')}",
    }
    tiles: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="selfvitmil-doctor-") as folder:
        path = Path(folder) / "synthetic.svs"
        synthetic.make_slide(path, seed=0, size=(1024, 1024), mpp=0.5)
        for reader, found in versions.items():
            try:
                with slides.open_slide(path, reader=reader) as slide:
                    tiles[reader] = slide.read_tile(256, 256, 224, 0.5).astype(int)
            except SelfVitMilError as error:
                found = f"{found}: {error.reason}"
                yield MachineCheck(f"reader {reader}", CheckStatus.FAIL, found, "reader-failed", REINSTALL)
            else:
                yield passed(f"reader {reader}", f"{found}; a synthetic slide was read")
    if len(tiles) == len(versions):
        difference = int(np.abs(tiles["openslide"] - tiles["jpegtiff"]).max())
        found = f"largest difference {difference} of 255"
        if difference <= LARGEST_DIFFERENCE:
            yield passed("readers agree", found)
        else:
            remedy = "Use --slide.reader openslide, and report the versions above"
            yield MachineCheck("readers agree", CheckStatus.FAIL, found, "readers-differ", remedy)


def _looked_at(layout: StudyLayout) -> set[str]:
    """Return the slides that were checked, those that failed too; a damaged check.csv counts as none."""
    failed = {failure.slide for failure in read_failures(layout.root) if failure.stage == "check"}
    try:
        with layout.check_table.open(newline="", encoding="utf-8") as file:
            return failed | {row["slide"] for row in csv.DictReader(file)}
    except (OSError, ValueError, KeyError, csv.Error):
        return failed


class Check(Stage):
    """Open every slide once."""

    name = "check"
    is_shared = True
    done_when_nothing_pending = True

    def slide_work(self, study: Study, encoders: Sequence[str]) -> Iterable[SlideWork]:
        work, looked_at = check_work(study), _looked_at(study.layout)
        return (replace(work, jobs={slide: job for slide, job in work.jobs.items() if slide not in looked_at}),)

    def assemble(self, study: Study, encoders: Sequence[str], engine: Engine) -> CheckResult:
        return check(study, engine, results_of(study.claims_folder(self.name)))

    def pending(self, plan: RunPlan) -> Pending:
        looked_at = _looked_at(plan.layout)
        todo = {slide: "not looked at yet" for slide in plan.cohort.slides if slide not in looked_at}
        return Pending(todo, len(plan.cohort) - len(todo))

    def doctor(self) -> Iterable[MachineCheck]:
        return check_readers()

    def estimate(self, plan: RunPlan, measures: Measures) -> Estimate:
        number, rate = len(plan.pending(self.name).todo), measures.read_per_s
        seconds = measures.over_workers(number * (CHECKED_TILES / rate if rate else 1.0))
        return Estimate(seconds, number * BYTES_PER_SLIDE, measures.workers_bytes, Basis.DERIVED)

    def run(self, plan: RunPlan, engines: Engines) -> CheckResult:
        return self.assemble(plan.study, (), engines.slides)

    def status(self, snapshot: Snapshot) -> Iterable[Progress]:
        table = snapshot.layout.check_table
        if table.exists():
            done = max(0, len(table.read_text(encoding="utf-8", errors="replace").splitlines()) - 1)
            yield snapshot.progress(self.name, table, [table], snapshot.num_slides, done=done)
