"""`run`: all stages one after the other, from slides to the report.

Yields first what it found and what it will do (`RunPlan`), then a result after each stage, and last what was done and
how long it took. Stages skip what is up to date by themselves; a slide that fails stops no other. The same command
resumes a run that was stopped at any moment.

`plan_run` makes the plan that `run` prints first and then follows, and that `plan` estimates; it only reads. The stages
themselves say what they would rebuild, so the plan cannot differ from what happens. What would stop a run later is an
error there (the checks at the end of `stages.check`, and `Stage.preflight`).

`run.json` in the study records what the last run was asked for, where it is and how it ended. `status` reads it from
another terminal while the run goes on; the next run reads which encoder was meant and whether there was a GPU. It is a
log, not an artefact: it holds times, and paths relative to the study. `plan` makes estimates of it.
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
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selfvitmil import __version__
from selfvitmil.cohort import Cohort
from selfvitmil.cohort.camelyon16 import compare_tile_counts, is_camelyon16_name
from selfvitmil.cohort.table import listing
from selfvitmil.engine import Engine, num_cores
from selfvitmil.engine.progress import placed
from selfvitmil.errors import ArtefactError, ConfigError, LockError, SelfVitMilError
from selfvitmil.settings import StudySettings, tiling_name
from selfvitmil.stages import STAGES
from selfvitmil.stages.base import Engines, Pending, Stage, StageResult
from selfvitmil.stages.check import check_files, check_formats, check_labels, check_study
from selfvitmil.stages.compare import CompareResult
from selfvitmil.stages.lesions import LesionsResult
from selfvitmil.stages.pretrain import (
    EncoderRun,
    SplitResult,
    encoder_runs,
    propose_split,
    seen_test_slides,
    settle_scope,
    tested_splits,
)
from selfvitmil.stages.report import ReportResult
from selfvitmil.store.files import hash_of, write_text
from selfvitmil.store.layout import StudyLayout
from selfvitmil.study import Study, encoder_name, encoder_sources, features_name, remember_settings

if TYPE_CHECKING:
    from selfvitmil.evaluate import Trial


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
    planned: Mapping[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])
    """Stage -> least and most seconds by the `plan` before this run; empty where there was none."""

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
    refuse_torchrun()
    before = read_record(study.root)
    request = as_before(request, before, study.root)
    plan = plan_run(study, request)
    if plan.split_table:
        yield SplitResult(plan.split_table)
    pending = {stage.name: plan.pending(stage.name) for stage in plan.stages}
    yield RunStart(pending, len(plan.cohort), notes=(*plan.lines(), *device_lines(plan, before)))
    _store_cohort(study)
    yield from (StageResult(notes=(note,)) for note in remember_settings(study.root, typed or {}))
    course = _Course(plan, _new_record(plan, before))
    with device_engine(plan.settings, engine) as with_encoder:
        for stage in plan.stages:
            yield from course.take(stage, Engines(engine, with_encoder))
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
        begin, names = time.perf_counter(), [each.name for each in self.plan.stages]
        try:
            with placed(f"{names.index(stage.name) + 1}/{len(names)}"):
                done = list(self._results(stage, engines))
        except SelfVitMilError:
            self._end(stage, begin, StageReport(StageState.STOPPED, pending), "stopped")
            yield self.closing()
            raise
        except BaseException as error:
            self._note(replace(self.record, ended="interrupted" if isinstance(error, KeyboardInterrupt) else "stopped"))
            raise
        self.results[stage.name] = done[-1]
        self.over = done[-1].interrupted
        state = StageState.INTERRUPTED if self.over else StageState.DONE
        failed = {failure.slide for result in done for failure in result.failures}
        self._end(stage, begin, StageReport(state, pending, len(failed)), "interrupted" if self.over else None)
        yield from done

    def _results(self, stage: Stage, engines: Engines) -> Iterator[StageResult]:
        """Yield what the stage did: once, or for each of the targets that are trained jointly."""
        if not stage.by_target:
            yield stage.run(self.plan, engines)
            return
        for study, _ in self.plan.study.targets():
            result = stage.run(replace(self.plan, study=study), engines)
            yield result
            if result.interrupted:
                return

    def _end(self, stage: Stage, begin: float, report: StageReport, ended: str | None) -> None:
        seconds = round(time.perf_counter() - begin, 1)
        self.stages[stage.name] = replace(report, seconds=seconds)
        record = replace(self.record, seconds={**self.record.seconds, stage.name: seconds}, ended=ended)
        if report.state is StageState.DONE and (slides := timed_slides(self.plan, stage)):
            record = replace(record, timings={**record.timings, stage.name: (seconds, slides)})
        self._note(record)

    def _note(self, record: RunRecord) -> None:
        self.record = record
        write_record(self.plan.study.root, record)

    def closing(self) -> RunResult:
        """Return what was done."""
        if self.record.ended is None:
            self._note(replace(self.record, now=None, ended="finished"))
        notes = camelyon16_lines(self.plan.study.root, self.plan.cohort, self.plan.settings)
        planned = {name: limits for name, limits in self.record.planned.items() if name in self.record.seconds}
        return RunResult(dict(self.stages), dict(self.results), planned, notes=tuple(notes))

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


def refuse_torchrun() -> None:
    """Raise ConfigError under torchrun."""
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


def device_name() -> str:
    """Name of the GPU, or CPU."""
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else "CPU"


def device_lines(plan: RunPlan, before: RunRecord | None) -> list[str]:
    """Lines on the GPU: gone since the last run, or more than one; ConfigError when one is asked for and not there."""
    import torch

    from selfvitmil.runtime.device import choose_device

    settings = plan.settings
    device = device_name()
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


def device_engine(settings: StudySettings, engine: Engine) -> Any:
    """The workers that embed tiles: those of all stages, unless a GPU wants fewer of them."""
    from selfvitmil.runtime.device import workers_for

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
    planned: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Stage -> least and most seconds by the `plan` before."""
    conditions: str = ""
    """Hash of what `timings` depend on beside the slides."""
    timings: dict[str, tuple[float, int]] = field(default_factory=dict)
    """Stage -> seconds it took when it was last run to its end, and for how many slides."""

    @property
    def alive(self) -> bool:
        """Whether its process runs; one on another machine is believed to."""
        return self.ended is None and (self.host != socket.gethostname() or process_exists(self.pid))


def _new_record(plan: RunPlan, before: RunRecord | None) -> RunRecord:
    """Return the record of a run that begins, with the timings of the last one where they hold for it."""
    device, request = device_name(), plan.request
    conditions = conditions_of(plan, device)
    return RunRecord(
        tuple(stage.name for stage in plan.stages),
        _relative(request, plan.study.root),
        request.name,
        device,
        host=socket.gethostname(),
        pid=os.getpid(),
        started=round(time.time(), 1),
        planned=take_plan(plan, device),
        conditions=conditions,
        timings=before.timings if before is not None and before.conditions == conditions else {},
    )


def write_record(study: Path, record: RunRecord) -> None:
    write_text(StudyLayout(study).run_record, json.dumps(asdict(record), indent=1) + "\n")


def read_record(study: Path) -> RunRecord | None:
    """None when there is none, or none that can be read: it is only a log."""
    try:
        info: dict[str, Any] = json.loads(StudyLayout(study).run_record.read_text(encoding="utf-8"))
        known: dict[str, Any] = {key: value for key, value in info.items() if key in RunRecord.__dataclass_fields__}
        known["stages"] = tuple(known["stages"])
        return RunRecord(**known)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


# ---------------------------------------------------------------------------------------------------- times
# `run.json` keeps how long each stage took, for how many slides and under which conditions; `plan` extrapolates from
# that. A plan writes nothing into the study, which may not even exist: its ranges lie in the user's folder of program
# states until the next `run` of the same study under the same conditions has compared itself with them.


def conditions_of(plan: RunPlan, device: str) -> str:
    """Return a hash of what times depend on beside the slides: settings, encoder, GPU and cores."""
    return hash_of(plan.settings, plan.encoder, plan.request.one_method, device, num_cores())


def timed_slides(plan: RunPlan, stage: Stage) -> int:
    """Return how many slides a stage's time is proportional to; 0 where it is not, or models may be used again."""
    if stage.name == "pretrain":  # its steps decide, and its own log has their rate
        return 0
    if stage.is_shared:
        return len(plan.pending(stage.name).changing)
    return len(plan.cohort) if plan.pending("embed").changing else 0


def plan_file(study: Path) -> Path:
    """Return where the last plan of a study lies until a run has used it. RuntimeError without a home directory."""
    base = os.environ.get("XDG_STATE_HOME")
    folder = Path(base) if base else Path.home() / ".local" / "state"
    return folder / "selfvitmil" / "plans" / f"{hash_of(str(study.resolve()))[:24]}.json"


def take_plan(plan: RunPlan, device: str) -> dict[str, tuple[float, float]]:
    """Return what was last planned for those stages that have the same to do now, and forget it."""
    try:
        path = plan_file(plan.study.root)
        info: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        path.unlink()
        if info["conditions"] != conditions_of(plan, device):
            return {}
        found = {name: (line, (float(low), float(high))) for name, (line, low, high) in info["stages"].items()}
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, AttributeError):
        return {}
    return {
        name: limits for name, (line, limits) in found.items() if plan.has(name) and plan.pending(name).line == line
    }


def process_exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


# ---------------------------------------------------------------------------------------------------- the plan

PRETRAIN = "pretrain"
"""As an encoder: the one that the study trains for itself."""


@dataclass(frozen=True)
class Request:
    """What a run was asked for, beyond the settings."""

    encoder: str | None = None
    """`pretrain`, an encoder of the study, a folder, a file, a timm or hub name; None: as in the last run."""
    name: str | None = None
    """Name of an encoder that is trained here."""
    one_method: bool = False
    """Evaluate train.aggregator alone and skip the comparison."""
    until: str | None = None
    """The last stage to run."""

    @property
    def trains_encoder(self) -> bool:
        return self.encoder in (None, PRETRAIN)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages that were asked for; ConfigError when `until` is none of them."""
        absent = {"compare": self.one_method, "pretrain": not self.trains_encoder}
        stages = [stage for stage in STAGES if stage.in_run and not absent.get(stage.name)]
        names = [stage.name for stage in stages]
        if self.until is None:
            return tuple(stages)
        if self.until not in names:
            raise ConfigError(
                f"--until {self.until}: this run has no such stage",
                how=f"It has {', '.join(names)}",
                code="unknown-stage",
            )
        return tuple(stages[: names.index(self.until) + 1])


@dataclass(frozen=True, eq=False)
class RunPlan:
    """A study as the stages of one run see it: everything is read once, when it is first asked for."""

    study: Study
    """With the settings that the look at the study settled (`pretrain.per_split`), and with the split it proposes."""
    request: Request
    runs: tuple[EncoderRun, ...] = ()
    """The encoders that are trained here, finished ones too."""
    labels: Trial | None = None
    """The splits that learning will use; None where no stage learns."""
    notes: tuple[str, ...] = ()
    """What was found that deserves a line."""
    split_table: tuple[tuple[str, ...], ...] = ()
    """The split that is proposed and not stored yet, header first; empty where none is."""
    offline: bool = False
    """Ask no hub for an encoder's identity."""
    _pending: dict[str, Pending] = field(default_factory=dict)

    @property
    def settings(self) -> StudySettings:
        return self.study.settings

    @property
    def cohort(self) -> Cohort:
        return self.study.cohort

    @property
    def layout(self) -> StudyLayout:
        return self.study.layout

    @property
    def stages(self) -> tuple[Stage, ...]:
        return self.request.stages

    def has(self, name: str) -> bool:
        """Whether the run has this stage."""
        return any(stage.name == name for stage in self.stages)

    def pending(self, name: str) -> Pending:
        """What a stage has left to do; nothing where the run does not have it."""
        if name not in self._pending:
            stage = next((each for each in self.stages if each.name == name), None)
            self._pending[name] = Pending() if stage is None else stage.pending(self)
        return self._pending[name]

    @property
    def tiling(self) -> str:
        return self.study.tiling

    # ------------------------------------------------------------------------------------------------ encoder

    @property
    def encoder(self) -> str:
        """Name of the encoder in the study, or of those of all splits together."""
        request = self.request
        if request.trains_encoder:
            return request.name or self.settings.pretrain.method
        return encoder_name(str(request.encoder))

    @cached_property
    def sources(self) -> Mapping[str, str]:
        """Encoder -> where its weights are, or will be when it is trained here; several where every split has one."""
        if self.request.trains_encoder:
            return {run.name: str(self.layout.encoder(run.name)) for run in self.runs}
        return encoder_sources(self.study.root, str(self.request.encoder))

    @cached_property
    def seen(self) -> dict[str, tuple[str, ...]]:
        """Encoder -> test slides that it has seen, or other slides of their patients."""
        folders = {name: Path(source) for name, source in self.sources.items()}
        return seen_test_slides(folders, self.cohort, tested_splits(self.cohort, self.settings))

    @property
    def features(self) -> str:
        """Name of the encoder's feature files."""
        return features_name(self.encoder, self.settings.embed.layout)

    @cached_property
    def loaded(self) -> dict[str, Any]:
        """The encoders that exist; None where only a hub has one and is not asked."""
        from selfvitmil.encoder import load_encoder

        unfinished: Mapping[str, str] = self.pending("pretrain").todo if self.request.trains_encoder else {}
        layout = self.settings.embed.layout
        return {
            name: None if self.offline and not Path(source).exists() else load_encoder(source, layout=layout)
            for name, source in self.sources.items()
            if name not in unfinished
        }

    # ------------------------------------------------------------------------------------------------ notes

    def lines(self) -> list[str]:
        """Notes on what lies in the study and stays as it is, on slides that are gone, on a given encoder."""
        lines = list(self.notes)
        tile, cohort = self.settings.tile, self.cohort
        mine = {self.tiling, *(tiling_name(tile, mpp) for mpp in tile.parent_mpp)}
        others = [path.name for path in self.layout.all_tilings()]
        if left := [name for name in others if name not in mine]:
            lines.append(f"found tiles of another size or resolution, which stay as they are: {listing(left)}")
        tables = sorted(path.stem for path in self.layout.tiling(self.tiling).glob("*.h5"))
        if removed := [slide for slide in tables if slide not in cohort]:
            lines.append(
                f"found {len(removed)} slides that cohort.csv no longer names: {listing(removed)}; their files stay, "
                "and nothing is learned from them"
            )
        if gone := [row.slide for row in cohort.missing_files()]:
            lines.append(f"found {len(gone)} slides whose files are not there any more: {listing(gone)}")
        lines += [
            f"note: {name} was trained on {len(slides)} test slides or other slides of their patients: "
            f"{listing(slides)}; results are labelled transductive"
            for name, slides in self.seen.items()
        ]
        return lines


def plan_run(study: Study, request: Request, *, offline: bool = False) -> RunPlan:
    """Look at the study and plan a run of `request`. Raises what would stop the run. Writes nothing."""
    check_study(study)
    name = _check_name(request, study.settings)
    notes = list(study.cohort_notes)
    check_formats(study.root)
    stages = request.stages
    trains, table = any(stage.name == "pretrain" for stage in stages), ()
    if trains:
        info, table = propose_split(study, name)
        notes += info
    labels = None
    if any(stage.is_learning for stage in stages):
        labels = check_labels(study.cohort, study.settings)
        notes += [f"warning: {study.cohort.patient_warning}"] if study.cohort.patient_warning else []
    check_files(study)
    runs: tuple[EncoderRun, ...] = ()
    if trains:
        settings, info = settle_scope(study.root, name, study.cohort, study.settings)
        study, notes = study.with_settings(settings), [*notes, *info]
        runs = encoder_runs(study.cohort, name, settings)
    plan = RunPlan(study, request, runs, labels, tuple(notes), table, offline)
    for stage in sorted(stages, key=lambda each: not each.is_learning):  # methods first: others may load an encoder
        stage.preflight(plan)
    for stage in stages:
        plan.pending(stage.name)
    return plan


def _check_name(request: Request, settings: StudySettings) -> str:
    """Name of an encoder that is trained here; ConfigError where a given one cannot be used."""
    if request.name is not None and not request.trains_encoder:
        raise ConfigError(
            f"--name {request.name} was given",
            f"and {request.encoder} is trained already",
            code="name-of-trained-encoder",
        )
    if request.name is not None and encoder_name(request.name) != request.name:
        what = f"--name {request.name} does not do as a folder's name"
        raise ConfigError(what, how=f"Try {encoder_name(request.name)!r}", code="invalid-name")
    return request.name or settings.pretrain.method
