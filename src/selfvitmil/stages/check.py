"""The stage `check`: open every slide, read some of it, and report what will cause problems."""

from __future__ import annotations

import csv
import importlib.metadata
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from selfvitmil.annotations import read_annotations
from selfvitmil.engine import Engine
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
    Snapshot,
    Stage,
    StageResult,
    data_frame,
    passed,
)
from selfvitmil.store.failures import read_failures
from selfvitmil.store.files import write_csv
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


def check(study: Study, engine: Engine) -> CheckResult:
    """Open every slide of the cohort and read some of it; writes `check.csv` and `failures.csv`."""
    settings = study.settings
    with study.lock("check"):
        jobs = {
            row.slide: CheckJob(SlideRef.of(row, settings.slide), row.annotation, settings.tile.mpp)
            for row in study.store_cohort().rows
        }
        done, failures = map_slides(engine, study.root, "check", check_slide, jobs)
        found = _with_twins(done)
        header = [name for name in SlideCheck.__dataclass_fields__ if name != "fingerprint"]
        cells = [[cell(getattr(row, name)) for name in header] for row in found.values()]
        write_csv(study.layout.check_table, [header, *cells])
    return CheckResult(found, len(jobs), failures=tuple(failures), notes=study.cohort_notes)


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


class Check(Stage):
    """Open every slide once."""

    name = "check"
    done_when_nothing_pending = True

    def pending(self, plan: RunPlan) -> Pending:
        info = {failure.slide for failure in read_failures(plan.study.root) if failure.stage == self.name}
        if plan.layout.check_table.exists():
            with plan.layout.check_table.open(newline="", encoding="utf-8") as file:
                info |= {row["slide"] for row in csv.DictReader(file)}
        todo = {slide: "not looked at yet" for slide in plan.cohort.slides if slide not in info}
        return Pending(todo, len(plan.cohort) - len(todo))

    def doctor(self) -> Iterable[MachineCheck]:
        return check_readers()

    def estimate(self, plan: RunPlan, measures: Measures) -> Estimate:
        number, rate = len(plan.pending(self.name).todo), measures.read_per_s
        seconds = measures.over_workers(number * (CHECKED_TILES / rate if rate else 1.0))
        return Estimate(seconds, number * BYTES_PER_SLIDE, measures.workers_bytes, Basis.DERIVED)

    def run(self, plan: RunPlan, engines: Engines) -> CheckResult:
        return check(plan.study, engines.slides)

    def status(self, snapshot: Snapshot) -> Iterable[Progress]:
        table = snapshot.layout.check_table
        if table.exists():
            done = max(0, len(table.read_text(encoding="utf-8").splitlines()) - 1)
            yield snapshot.progress(self.name, table, [table], snapshot.num_slides, done=done)
