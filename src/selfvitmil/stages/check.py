"""The stage `check`: open every slide, read some of it, and report what will cause problems."""

from __future__ import annotations

import csv
import importlib.metadata
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from selfvitmil.engine import Engine
from selfvitmil.errors import SelfVitMilError
from selfvitmil.settings import StudySettings
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
    passed,
)
from selfvitmil.stages.measure import Measures
from selfvitmil.stages.run_plan import RunPlan
from selfvitmil.store.failures import read_failures
from selfvitmil.store.files import write_csv
from selfvitmil.store.layout import StudyLayout
from selfvitmil.study.folder import CohortSource, Summary, cell, few, map_slides, open_study, study_cohort


def check(study: Path, source: CohortSource, settings: StudySettings, engine: Engine) -> Summary:
    """Open every slide of the cohort and read some of it; writes `check.csv` and `failures.csv`."""
    from selfvitmil.slides import SlideRef
    from selfvitmil.slides.check import CheckJob, SlideCheck, check_slide

    with open_study(study, "check"):
        cohort, lines = study_cohort(study, source)
        jobs = {
            row.slide: CheckJob(SlideRef.of(row, settings.slide), row.annotation, settings.tile.mpp)
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
        told = {failure.slide for failure in read_failures(plan.study) if failure.stage == self.name}
        if plan.layout.check_table.exists():
            with plan.layout.check_table.open(newline="", encoding="utf-8") as file:
                told |= {row["slide"] for row in csv.DictReader(file)}
        todo = {slide: "not looked at yet" for slide in plan.cohort.slides if slide not in told}
        return Pending(todo, len(plan.cohort) - len(todo))

    def doctor(self) -> Iterable[MachineCheck]:
        return check_readers()

    def estimate(self, plan: RunPlan, measures: Measures) -> Estimate:
        number, rate = len(plan.pending(self.name).todo), measures.read_per_s
        seconds = measures.over_workers(number * (CHECKED_TILES / rate if rate else 1.0))
        return Estimate(seconds, number * BYTES_PER_SLIDE, measures.workers_bytes, Basis.DERIVED)

    def run(self, plan: RunPlan, engines: Engines) -> Summary:
        return check(plan.study, CohortSource(), plan.settings, engines.slides)

    def status(self, snapshot: Snapshot) -> Iterable[Progress]:
        table = snapshot.layout.check_table
        if table.exists():
            done = max(0, len(table.read_text(encoding="utf-8").splitlines()) - 1)
            yield snapshot.progress(self.name, table, [table], snapshot.num_slides, done=done)
