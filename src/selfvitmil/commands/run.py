"""`run`: all stages one after the other, from slides to the report.

Yields first what it found and what it will do (`run_plan`), then a result after each stage, and last what was done and
how long it took. Stages skip what is up to date by themselves; a slide that fails stops no other. The same command
resumes a run that was stopped at any moment.

`run.json` in the study records what the last run was asked for, where it is and how it ended. `status` reads it from
another terminal while the run goes on; the next run reads which encoder was meant and whether there was a GPU. It is a
log, not an artefact: it holds times, and paths relative to the study.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

from selfvitmil import __version__
from selfvitmil.cohort import Cohort
from selfvitmil.cohort.camelyon16 import compare_tile_counts, is_camelyon16_name
from selfvitmil.commands.run_plan import Request, RunPlan, plan_run
from selfvitmil.engine import Engine
from selfvitmil.errors import ArtefactError, ConfigError, LockError, SelfVitMilError
from selfvitmil.settings import StudySettings, flags_to_toml, tiling_name
from selfvitmil.stages.base import Engines, Pending, Stage, StageResult
from selfvitmil.stages.compare import CompareResult
from selfvitmil.stages.lesions import LesionsResult
from selfvitmil.stages.pretrain import SplitResult
from selfvitmil.stages.report import ReportResult
from selfvitmil.store.files import write_text
from selfvitmil.store.layout import StudyLayout
from selfvitmil.study import Study


class StageState(Enum):
    """How a stage of a run ended."""

    DONE = "done"
    UP_TO_DATE = "up to date"
    """There was nothing to do."""
    INTERRUPTED = "interrupted"
    """By a signal."""
    STOPPED = "could not be done"
    """By an error, which the run raises."""


@dataclass(frozen=True)
class StageReport:
    """What became of one stage of a run."""

    state: StageState
    pending: Pending
    """What was to do before."""
    num_failed: int = 0
    """Slides that failed."""
    seconds: float | None = None


@dataclass(frozen=True)
class RunStart(StageResult):
    """What a run found in the study and is about to do."""

    pending: Mapping[str, Pending]
    """Stage -> what is left to do."""
    num_slides: int


@dataclass(frozen=True)
class RunResult(StageResult):
    """What a run did, stage by stage."""

    stages: Mapping[str, StageReport]
    results: Mapping[str, StageResult] = field(repr=False)
    """Results of the stages that had something to do, by name."""

    @property
    def seconds(self) -> float:
        return sum(report.seconds or 0.0 for report in self.stages.values())


@dataclass(frozen=True)
class RunOutcome(StageResult):
    """How well the methods do, and where to look: what a finished run ends with."""

    study: Path
    method: str
    """The study's own method."""
    comparison: CompareResult | None
    lesions: LesionsResult | None
    page: Path | None
    """The report."""


def run(
    study: Study, request: Request, engine: Engine, typed: Mapping[str, Any] | None = None
) -> Iterator[StageResult]:
    """Run all stages that were asked for: yields the plan, a result after each stage, and the outcome.

    `typed` are the settings that came as flags: a study that has no study.toml gets one of them.
    """
    _refuse_torchrun()
    before = read_record(study.root)
    request = as_before(request, before, study.root)
    plan = plan_run(study, request)
    if plan.split_table:
        yield SplitResult(plan.split_table)
    pending = {stage.name: plan.pending(stage.name) for stage in plan.stages}
    yield RunStart(pending, len(plan.cohort), notes=(*plan.lines(), *device_lines(plan, before)))
    _store_cohort(study)
    if _remember(study.root, typed or {}):
        yield StageResult(
            notes=("study.toml written: the settings given now hold for all later commands on this study",)
        )
    course = _Course(plan, new_record(tuple(pending), _relative(request, study.root), request.name, _device()))
    with _device_engine(plan.settings, engine) as device_engine:
        for stage in plan.stages:
            yield from course.take(stage, Engines(engine, device_engine))
            if course.over:
                break
    yield course.closing()
    if not course.over:
        yield course.outcome()


# ---------------------------------------------------------------------------------------------------- stage by stage


@dataclass
class _Course:
    """The stages as they are gone through."""

    plan: RunPlan
    record: RunRecord
    stages: dict[str, StageReport] = field(default_factory=dict)
    results: dict[str, StageResult] = field(default_factory=dict)
    over: bool = False
    """Whether a signal ended a stage before its end."""

    def take(self, stage: Stage, engines: Engines) -> Iterator[StageResult]:
        """Run one stage; on an error say what was done so far, then raise it."""
        pending = self.plan.pending(stage.name)
        if stage.is_idle(self.plan):
            self.stages[stage.name] = StageReport(StageState.UP_TO_DATE, pending)
            return
        self._note(replace(self.record, now=stage.name))
        begin = time.perf_counter()
        try:
            result = stage.run(self.plan, engines)
        except SelfVitMilError:
            self._end(stage.name, begin, StageReport(StageState.STOPPED, pending), "stopped")
            yield self.closing()
            raise
        except BaseException as error:
            self._note(replace(self.record, ended="interrupted" if isinstance(error, KeyboardInterrupt) else "stopped"))
            raise
        self.results[stage.name] = result
        self.over = result.interrupted
        state = StageState.INTERRUPTED if self.over else StageState.DONE
        report = StageReport(state, pending, len(result.failures))
        self._end(stage.name, begin, report, "interrupted" if self.over else None)
        yield result

    def _end(self, stage: str, begin: float, report: StageReport, ended: str | None) -> None:
        seconds = round(time.perf_counter() - begin, 1)
        self.stages[stage] = replace(report, seconds=seconds)
        self._note(replace(self.record, seconds={**self.record.seconds, stage: seconds}, ended=ended))

    def _note(self, record: RunRecord) -> None:
        self.record = record
        write_record(self.plan.study.root, record)

    def closing(self) -> RunResult:
        """Return what was done."""
        if self.record.ended is None:
            self._note(replace(self.record, now=None, ended="finished"))
        notes = camelyon16_lines(self.plan.study.root, self.plan.cohort, self.plan.settings)
        return RunResult(dict(self.stages), dict(self.results), notes=tuple(notes))

    def outcome(self) -> RunOutcome:
        """Return the results, and where to look."""
        found = self.results.values()
        return RunOutcome(
            self.plan.study.root,
            self.plan.settings.train.aggregator,
            next((each for each in found if isinstance(each, CompareResult)), None),
            next((each for each in found if isinstance(each, LesionsResult)), None),
            next((each.page for each in found if isinstance(each, ReportResult)), None),
        )


# ---------------------------------------------------------------------------------------------------- before


def _refuse_torchrun() -> None:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            "`run` was started by torchrun",
            "only pretraining is for several processes at once",
            "Use torchrun with `selfvitmil pretrain`; `run` then finds the encoder and goes on",
            code="run-under-torchrun",
        )


def as_before(request: Request, before: RunRecord | None, study: Path) -> Request:
    """The request with what the last run was asked for, where this one does not say."""
    if before is None or request.encoder is not None or request.name is not None:
        return request
    encoder = before.encoder
    if encoder is not None and (study / encoder).exists():
        encoder = str(study / encoder)
    return replace(request, encoder=encoder, name=before.name)


def _relative(request: Request, study: Path) -> str | None:
    """The encoder for the record: a path as seen from the study."""
    encoder = request.encoder
    return os.path.relpath(encoder, study) if encoder is not None and Path(encoder).exists() else encoder


def _store_cohort(study: Study) -> None:
    """Write the study's cohort.csv; the first thing that is written, so it meets a folder that cannot be."""
    try:
        with study.lock("run"):
            study.store_cohort()
    except LockError:
        raise
    except ArtefactError as error:
        raise ArtefactError(
            f"{study.name}: nothing can be written into this study ({error.reason})",
            "so nothing was done",
            f"{error.how}. `selfvitmil status` and `plan` need to read only",
            code="not-writable",
        ) from None


def _remember(study: Path, typed: Mapping[str, Any]) -> bool:
    """Write flags of a study without a study.toml as one, so that later commands mean the same; whether it was done."""
    kept = {key: value for key, value in typed.items() if key != "engine"}
    if not kept or StudyLayout(study).settings.exists():
        return False
    head = "# The settings that the first `selfvitmil run` of this study was given.\n"
    write_text(StudyLayout(study).settings, head + flags_to_toml(_absolute(kept)))
    return True


def _absolute(value: Any) -> Any:
    """Settings whose paths mean the same wherever a later command is typed."""
    if isinstance(value, Mapping):
        return {key: _absolute(each) for key, each in value.items()}
    return value.absolute() if isinstance(value, Path) else value


def _device() -> str:
    """Name of the GPU, or CPU."""
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else "CPU"


def device_lines(plan: RunPlan, before: RunRecord | None) -> list[str]:
    """Lines on the GPU: gone since the last run, or more than one; ConfigError when one is asked for and not there."""
    import torch

    from selfvitmil.runtime.device import choose_device

    settings = plan.settings
    device = _device()
    busy = [stage.name for stage in plan.stages if stage.runs_encoder and plan.pending(stage.name).todo]
    for section in ("embed", "train", "supervised"):
        wanted = getattr(settings, section).device
        if wanted.startswith("cuda") and device == "CPU":
            gone = f"; the last run had {before.device}" if before is not None and before.device != "CPU" else ""
            raise ConfigError(
                f"{section}.device is {wanted}, and no GPU can be used here{gone}",
                "so nothing was done",
                f"Use --{section}.device auto to go on with the CPU; `selfvitmil doctor` looks for the GPU",
                code="device-unavailable",
            )
        try:
            choose_device(wanted)
        except ConfigError:
            raise ConfigError(
                f"{section}.device {wanted!r} cannot be used here",
                "so nothing was done",
                f"Use --{section}.device auto; others are cpu, cuda, and cuda:1 for the second GPU",
                code="device-unavailable",
            ) from None
    lines: list[str] = []
    if before is not None and before.device != "CPU" and device == "CPU" and busy:
        lines.append(
            f"the last run had a GPU ({before.device}), and none can be used now: {' and '.join(busy)} will run on the "
            "CPU, many times slower; what is done stays. `selfvitmil doctor` looks for the GPU"
        )
    number = torch.cuda.device_count() if device != "CPU" else 0
    if number > 1 and "pretrain" in busy:
        lines.append(
            f"{number} GPUs are here, and this command trains the encoder on one: stop it and use "
            f"`torchrun --nproc-per-node {number} -m selfvitmil pretrain STUDY --name {plan.encoder}` first for all"
        )
    return lines


def _device_engine(settings: StudySettings, engine: Engine) -> Any:
    """The workers that embed tiles: those of all stages, unless a GPU wants fewer of them."""
    from selfvitmil.embed import workers_for

    wanted = workers_for(settings.engine, settings.embed.device)
    return nullcontext(engine) if wanted == settings.engine else Engine(wanted)


# ---------------------------------------------------------------------------------------------------- after


def camelyon16_lines(study: Path, cohort: Cohort, settings: StudySettings) -> list[str]:
    """Return how many tiles there are beside the paper's, for Camelyon16 under a preset that cuts as the paper does."""
    if settings.preset not in ("paper", "authors-code") or not all(
        is_camelyon16_name(f"{slide}.tif") for slide in cohort.slides
    ):
        return []
    from selfvitmil.tiles import count_tiles

    folder = StudyLayout(study).tiling(tiling_name(settings.tile))
    counts: dict[str, list[int]] = {}
    for row in cohort.rows:
        if (count := count_tiles(folder / f"{row.slide}.h5")) is not None:
            counts.setdefault(row.split or "", []).append(count)
    return compare_tile_counts(counts)


# ---------------------------------------------------------------------------------------------------- run.json


@dataclass(frozen=True)
class RunRecord:
    """One run of a study."""

    stages: tuple[str, ...] = ()
    """All that were asked for, in their order."""
    encoder: str | None = None
    """As it was asked for; a path starts at the study."""
    name: str | None = None
    device: str = "CPU"
    """Name of the GPU, or `CPU`."""
    version: str = __version__
    host: str = ""
    pid: int = 0
    started: float = 0.0
    """Seconds since 1970."""
    now: str | None = None
    """The stage it is in, or was in when it ended."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Stage -> how long it took, for those that are over."""
    ended: str | None = None
    """None while it runs (or when it was killed); `finished`, `interrupted` or `stopped`."""

    @property
    def alive(self) -> bool:
        """Whether its process runs; one on another machine is believed to."""
        return self.ended is None and (self.host != socket.gethostname() or process_exists(self.pid))


def new_record(stages: tuple[str, ...], encoder: str | None, name: str | None, device: str) -> RunRecord:
    host, pid = socket.gethostname(), os.getpid()
    return RunRecord(stages, encoder, name, device, host=host, pid=pid, started=round(time.time(), 1))


def write_record(study: Path, record: RunRecord) -> None:
    write_text(StudyLayout(study).run_record, json.dumps(asdict(record), indent=1) + "\n")


def read_record(study: Path) -> RunRecord | None:
    """None when there is none, or none that can be read: it is only a log."""
    try:
        info: dict[str, Any] = json.loads(StudyLayout(study).run_record.read_text(encoding="utf-8"))
        known = {key: value for key, value in info.items() if key in RunRecord.__dataclass_fields__}
        return RunRecord(**{**known, "stages": tuple(known["stages"])})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def process_exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
