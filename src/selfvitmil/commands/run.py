"""`run`: all stages one after the other, from slides to the report.

Prints first what it found and what it will do (`stages.run_plan`), then runs stage after stage, and prints last what
was done and how long it took. Stages skip what is up to date by themselves; a slide that fails stops no other. The
same command resumes a run that was stopped at any moment.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from selfvitmil.cohort import Cohort
from selfvitmil.cohort.camelyon16 import compare_tile_counts, is_camelyon16_name
from selfvitmil.commands.run_outcome import outcome_lines, outcome_table
from selfvitmil.commands.run_record import RunRecord, new_record, read_record, write_record
from selfvitmil.engine import Engine
from selfvitmil.errors import ArtefactError, ConfigError, LockError, SelfVitMilError
from selfvitmil.formatting import duration
from selfvitmil.settings import StudySettings, flags_to_toml, tiling_name
from selfvitmil.stages.base import Engines, Stage
from selfvitmil.stages.run_plan import Request, RunPlan, plan_run
from selfvitmil.store.failures import Failure
from selfvitmil.store.files import write_text
from selfvitmil.store.layout import StudyLayout
from selfvitmil.study.folder import Summary, open_study, store_cohort


def run(
    study: Path,
    request: Request,
    settings: StudySettings,
    engine: Engine,
    typed: Mapping[str, Any] | None = None,
) -> Iterator[Summary]:
    """Run all stages that were asked for: yields the plan, a summary after each stage, and the outcome.

    `typed` are the settings that came as flags: a study that has no study.toml gets one of them.
    """
    _refuse_torchrun()
    before = read_record(study)
    request = as_before(request, before, study)
    plan = plan_run(study, request, settings)
    if plan.split_table:
        yield Summary((), table=plan.split_table)
    first = [*plan.lines(), *device_lines(plan, before), f"{len(plan.cohort)} slides in the cohort"]
    yield Summary(tuple(first), table=plan.table)
    _store_cohort(study, plan.cohort)
    yield from _remember(study, typed or {})
    names = tuple(stage.name for stage in plan.stages)
    course = _Course(plan, new_record(names, _relative(request, study), request.name, _device()))
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
    """The stages as they are gone through: what each did, how long it took, what failed."""

    plan: RunPlan
    record: RunRecord
    did: dict[str, str] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    over: bool = False
    """Whether a signal ended a stage before its end."""

    @property
    def study(self) -> Path:
        return self.plan.study

    def take(self, stage: Stage, engines: Engines) -> Iterator[Summary]:
        """Run one stage; on an error say what was done so far, then raise it."""
        if stage.is_idle(self.plan):
            self.did[stage.name] = self.plan.pending(stage.name).line
            return
        self._note(self.record.entering(stage.name))
        begin = time.perf_counter()
        try:
            summary = stage.run(self.plan, engines)
        except SelfVitMilError:
            self._end(stage.name, begin, "could not be done: see the message below", "stopped")
            yield self.closing()
            raise
        except BaseException as error:
            self._note(replace(self.record, ended="interrupted" if isinstance(error, KeyboardInterrupt) else "stopped"))
            raise
        self.failures += summary.failures
        self.over = summary.interrupted
        failed = f", {len(summary.failures)} slides failed" if summary.failures else ""
        words = f"{'interrupted' if self.over else 'done'}{failed}"
        self._end(stage.name, begin, words, "interrupted" if self.over else None)
        yield summary

    def _end(self, stage: str, begin: float, words: str, ended: str | None) -> None:
        seconds = time.perf_counter() - begin
        self.did[stage] = words
        self._note(replace(self.record.leaving(stage, seconds), ended=ended))

    def _note(self, record: RunRecord) -> None:
        self.record = record
        write_record(self.study, record)

    def closing(self) -> Summary:
        """What was done."""
        if self.record.ended is None:
            self._note(replace(self.record, now=None, ended="finished"))
        taken = self.record.seconds
        rows = [(stage, words, duration(taken[stage]) if stage in taken else "") for stage, words in self.did.items()]
        lines = camelyon16_lines(self.study, self.plan.cohort, self.plan.settings)
        if slides := sorted({failure.slide for failure in self.failures}):
            lines.append(f"{len(slides)} slides failed in one stage or another: failures.csv says why and what to do")
        lines.append(f"all of it took {duration(sum(taken.values()))}")
        return Summary(tuple(lines), table=(("stage", "what was done", "time"), *rows))

    def outcome(self) -> Summary:
        """The results, and where to look."""
        table: tuple[tuple[str, ...], ...] = ()
        lines: list[str] = []
        if "compare" in self.did:
            table = outcome_table(self.study, self.plan.settings)
            lines += outcome_lines(self.study, self.plan.settings)
        page = StudyLayout(self.study).report
        if "report" in self.did and page.exists():
            lines += [f"report: {page}", f"viewer: selfvitmil view {self.study}"]
        return Summary(tuple(lines), table=table)


# ---------------------------------------------------------------------------------------------------- before


def _refuse_torchrun() -> None:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            "`run` was started by torchrun",
            "only pretraining is for several processes at once",
            "Use torchrun with `selfvitmil pretrain`; `run` then finds the encoder and goes on",
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


def _store_cohort(study: Path, cohort: Cohort) -> None:
    """Write the study's cohort.csv; the first thing that is written, so it meets a folder that cannot be."""
    try:
        with open_study(study, "run"):
            store_cohort(study, cohort)
    except LockError:
        raise
    except ArtefactError as error:
        raise ArtefactError(
            f"{study.name}: nothing can be written into this study ({error.reason})",
            "so nothing was done",
            f"{error.how}. `selfvitmil status` and `plan` need to read only",
        ) from None


def _remember(study: Path, typed: Mapping[str, Any]) -> Iterator[Summary]:
    """Flags of a study without a study.toml become one, so that later commands mean the same."""
    kept = {key: value for key, value in typed.items() if key != "engine"}
    if not kept or StudyLayout(study).settings.exists():
        return
    head = "# The settings that the first `selfvitmil run` of this study was given.\n"
    write_text(StudyLayout(study).settings, head + flags_to_toml(_absolute(kept)))
    yield Summary(("study.toml written: the settings given now hold for all later commands on this study",))


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
    device, busy = _device(), [stage for stage in ("pretrain", "embed") if plan.pending(stage).todo]
    for section in ("embed", "train", "supervised"):
        wanted = getattr(settings, section).device
        if wanted.startswith("cuda") and device == "CPU":
            gone = f"; the last run had {before.device}" if before is not None and before.device != "CPU" else ""
            raise ConfigError(
                f"{section}.device is {wanted}, and no GPU can be used here{gone}",
                "so nothing was done",
                f"Use --{section}.device auto to go on with the CPU; `selfvitmil doctor` looks for the GPU",
            )
        try:
            choose_device(wanted)
        except ConfigError:
            raise ConfigError(
                f"{section}.device {wanted!r} cannot be used here",
                "so nothing was done",
                f"Use --{section}.device auto; others are cpu, cuda, and cuda:1 for the second GPU",
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
    from contextlib import nullcontext

    from selfvitmil.embed import workers_for

    wanted = workers_for(settings.engine, settings.embed.device)
    return nullcontext(engine) if wanted == settings.engine else Engine(wanted)


# ---------------------------------------------------------------------------------------------------- after


def camelyon16_lines(study: Path, cohort: Cohort, settings: StudySettings) -> list[str]:
    """How many tiles there are beside the paper's, for Camelyon16 under a preset that cuts as the paper does."""
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
