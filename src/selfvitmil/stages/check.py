"""The stage `check`: open every slide, read some of it, and report what will cause problems.

At the end are the checks of the study itself, without which no run begins.
"""

from __future__ import annotations

import csv
import importlib.metadata
import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from selfvitmil.annotations import read_annotations
from selfvitmil.cohort import Cohort
from selfvitmil.cohort.files import is_slide
from selfvitmil.cohort.table import listing
from selfvitmil.engine import Engine
from selfvitmil.errors import ArtefactError, ConfigError, SelfVitMilError, raise_problems
from selfvitmil.formatting import cell
from selfvitmil.settings import StudySettings, upsampling_warning
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
    say_nothing_done,
)
from selfvitmil.store.failures import read_failures
from selfvitmil.store.files import write_csv
from selfvitmil.store.layout import CONFIG_FILE, StudyLayout
from selfvitmil.study import Study, map_slides

if TYPE_CHECKING:
    from selfvitmil.commands.run import RunPlan
    from selfvitmil.evaluate import Cases, Trial
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
        folder, recorded = study.claims_folder(self.name), {}
        if folder.is_dir():  # several machines have worked on it
            from selfvitmil.engine.claims import results_of

            recorded = results_of(folder)
        return check(study, engine, recorded)

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


# ---------------------------------------------------------------------------------------------------- checks
# What a run must not begin with: each check raises, before anything is touched, an error that says so. Files of a newer
# version are left alone; an encoder, which took hours, is neither overwritten nor used in place of another one
# (`stages.pretrain`); labels that cannot be learned from are found by the very functions that would refuse them later.


def check_study(of: Study) -> None:
    """ConfigError where the folder is not one to work in."""
    study, source = of.root, of.source
    if study.exists() and not study.is_dir():
        raise ConfigError(
            f"{study.name}: this is a file", "a study is a folder", "Name a folder, new or old", code="study-is-file"
        )
    if source.cohort is not None or StudyLayout(study).cohort.exists():
        return
    inside = sorted(path.name for path in study.iterdir() if not path.name.startswith(".")) if study.exists() else []
    what = "is empty" if study.exists() else "does not exist yet"
    if inside:
        what = f"holds {listing(inside, 4)} and no cohort.csv"
    how = "Give --cohort with a folder of slides or a table of them; `selfvitmil demo` makes slides to try with"
    if any(map(is_slide, inside)):
        how = f"A study is a folder of its own: name a new one, and give this one with --cohort {study.name}"
    raise ConfigError(
        f"{study.name}: this folder {what}",
        "so there are no slides to work on, and nothing was done",
        how,
        code="no-cohort",
    )


def check_formats(study: Path) -> None:
    """ArtefactError when a newer version of this program has worked on the study: ours would undo its work."""
    import selfvitmil.bags.files as bags
    import selfvitmil.encoder.files as encoders
    import selfvitmil.localize.heatmap as heatmap
    import selfvitmil.tiles as tiles

    layout = StudyLayout(study)
    known = (
        (layout.tiles_folder, "*/*.h5", tiles.FORMAT_VERSION),
        (layout.bags_folder, "*/features_*/*.h5", bags.FORMAT_VERSION),
        (layout.heatmaps_folder, "*/*.h5", heatmap.FORMAT_VERSION),
        (layout.encoders_folder, f"*/{CONFIG_FILE}", encoders.FORMAT_VERSION),
    )
    for folder, pattern, ours in known:
        for path in sorted(folder.glob(pattern)):
            version = _format_of(path)
            if version is not None and version > ours:
                raise ArtefactError(
                    f"{layout.name(path)} has format version {version}",
                    f"a newer selfvitmil wrote it, and this one, which knows version {ours}, would undo its work",
                    "Update selfvitmil, or start a new study; nothing was done",
                    code="newer-format-version",
                )


def _format_of(path: Path) -> int | None:
    """The format version of a file of ours; None of any other, and of a damaged one, which its stage will tell of."""
    from selfvitmil.store.files import open_hdf5

    try:
        if path.suffix == ".json":
            return json.loads(path.read_text(encoding="utf-8")).get("selfvitmil", {}).get("format_version")
        with open_hdf5(path) as file:
            attributes: Any = file.attrs
            version = attributes.get("format_version")
            return None if version is None else int(version)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def check_labels(cohort: Cohort, settings: StudySettings) -> Trial:
    """The splits that learning will use, tried out: days of work on slides must not end at labels that do not do."""
    from selfvitmil.cohort.table import order_classes
    from selfvitmil.evaluate import Cases, hold_out_test_labels, make_splits
    from selfvitmil.evaluate.dataset import Case, check_two_classes
    from selfvitmil.outcomes import Classes, choose_joint, choose_outcome

    try:
        train, given = settings.train, cohort
        outcome, _ = choose_joint(cohort, train) if train.joint else choose_outcome(cohort, train)
        if isinstance(outcome, Classes):
            cohort = outcome.labels(cohort)
        else:
            targets = outcome.read(cohort)
            cohort = outcome.in_strata(cohort, targets)
            rows = cohort.select(labelled=True).rows
            found = [Case(row.slide, row.patient, row.path, "", targets[row.slide]) for row in rows]
            cases = Cases(tuple(found), (), cohort, 0, "", "", outcome=outcome)
            if train.joint:
                return _check_targets(cases, given, settings)
            return hold_out_test_labels(cases, make_splits(cases, settings.train, settings.evaluate), settings.evaluate)
        labelled = cohort.select(labelled=True)
        if not labelled.rows:
            how = "Give --labels with a table of slides and their labels"
            raise ConfigError(
                "the cohort has no labelled slide", "there is nothing to learn from", how, code="no-labels"
            )
        check_two_classes(set(cohort.classes), "the cohort")
        classes = order_classes(cohort.classes, settings.train.positive).names
        found = [Case(row.slide, row.patient, row.path, "", classes.index(row.label or "")) for row in labelled.rows]
        cases = Cases(tuple(found), classes, cohort, 0, "", "")
        return hold_out_test_labels(cases, make_splits(cases, settings.train, settings.evaluate), settings.evaluate)
    except SelfVitMilError as error:
        how = f"{error.how}. To go as far as that needs no labels, add --until embed".removeprefix(". ")
        raise_problems([say_nothing_done(error, how), *cohort.missing_problems], "the cohort")
        raise


def _check_targets(whole: Cases, cohort: Cohort, settings: StudySettings) -> Trial:
    """Try out the splits of each of the targets that are trained jointly; return those of the one in the settings, else
    of all together."""
    from selfvitmil.evaluate import hold_out_test_labels, make_splits
    from selfvitmil.evaluate.joint import target_cases
    from selfvitmil.outcomes import joint_place, joint_targets

    place = joint_place(settings.train)
    trials: list[Trial] = []
    of_targets = [target_cases(whole, number, cohort) for number in range(len(joint_targets(settings.train)))]
    for cases in (*of_targets, whole):
        splits = make_splits(cases, settings.train, settings.evaluate)
        trials.append(hold_out_test_labels(cases, splits, settings.evaluate))
    return trials[-1 if place is None else place]


def check_files(study: Study) -> None:
    """CohortError where not one slide is there, which is a wrong path; single ones fail later, alone."""
    cohort = study.cohort
    there = any(row.path.exists() for row in cohort.rows)
    if not there and not any(study.layout.tiles_folder.glob("*/*.h5")):
        raise_problems([say_nothing_done(each, each.how) for each in cohort.missing_problems], "the cohort")
