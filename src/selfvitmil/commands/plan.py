"""`plan`: what `run` would do and what it takes on this machine: tiles, disk, memory and time, stage by stage.

Tiles are counted, or estimated from slide headers and a few slides; rates are those of earlier runs of the study
(`run.json`), or come from a few seconds of measurement (`stages.measure`). Each estimate has its `Basis` and a
range. Nothing is written into the study.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from selfvitmil.commands.doctor import existing_folder, memory_bytes
from selfvitmil.commands.run import (
    Request,
    RunPlan,
    as_before,
    conditions_of,
    device_lines,
    device_name,
    plan_file,
    plan_run,
    read_record,
    timed_slides,
)
from selfvitmil.engine import num_cores
from selfvitmil.errors import SelfVitMilError
from selfvitmil.stages.base import Basis, Estimate, Pending, StageResult
from selfvitmil.stages.measure import Measures, measure_aggregators, measure_encoder, measure_slides
from selfvitmil.stages.pretrain import untrained_network
from selfvitmil.stages.train import trained_rows
from selfvitmil.store.files import write_text
from selfvitmil.study import Study

if TYPE_CHECKING:
    from selfvitmil.commands.run import RunRecord
    from selfvitmil.encoder import Encoder
    from selfvitmil.stages.base import Stage


@dataclass(frozen=True)
class StagePlan:
    """One stage of a plan."""

    name: str
    pending: Pending
    estimate: Estimate


@dataclass(frozen=True)
class PlanResult(StageResult):
    """What a run would do and take."""

    stages: tuple[StagePlan, ...]
    measures: Measures
    disk_free: int
    """Bytes."""
    memory: int
    """Bytes of this machine that the process may use."""
    gpu_memory: int
    """Bytes of the first GPU; 0 without one."""

    @property
    def seconds(self) -> float:
        """Time of all stages whose time is known."""
        return sum(each.estimate.seconds for each in self.stages if each not in self.unknown)

    @property
    def range_s(self) -> tuple[float, float]:
        """Least and most time of all stages whose time is known."""
        limits = [each.estimate.range_s for each in self.stages if each not in self.unknown]
        return sum(low for low, _ in limits), sum(high for _, high in limits)

    @property
    def gpu_seconds(self) -> float:
        return sum(each.estimate.seconds for each in self.stages if each.estimate.on_gpu and each not in self.unknown)

    @property
    def unknown(self) -> tuple[StagePlan, ...]:
        """Stages whose time is not known."""
        return tuple(each for each in self.stages if math.isnan(each.estimate.seconds))

    @property
    def disk(self) -> float:
        """Bytes that all stages write."""
        return sum(each.estimate.disk for each in self.stages)

    @property
    def enough_disk(self) -> bool:
        return self.disk_free > 1.1 * self.disk

    def memory_for(self, stage: StagePlan) -> int:
        """Return the memory of the device that the stage runs on, in bytes."""
        return self.gpu_memory if stage.estimate.on_gpu else self.memory

    @property
    def too_large(self) -> tuple[StagePlan, ...]:
        """Stages that need more memory than there is."""
        return tuple(each for each in self.stages if each.estimate.memory > self.memory_for(each))


def plan(study: Study, request: Request) -> PlanResult:
    """Return what a run would do, and what it takes. Writes nothing into the study; takes some seconds."""
    import torch

    before = read_record(study.root)
    request = as_before(request, before, study.root)
    run_plan = plan_run(study, request, offline=True)
    measures, note = _measure(run_plan)
    stages = tuple(_stage_plan(run_plan, stage, measures, before) for stage in run_plan.stages)
    ranges = {each.name: each.estimate.range_s for each in stages if each.estimate.seconds > 0}
    keep_plan(run_plan, device_name(), ranges)
    header, *rows = run_plan.split_table or ((),)
    split = [f"split {'; '.join(map(' '.join, zip(header, row, strict=True)))}" for row in rows]
    return PlanResult(
        stages,
        measures,
        disk_free=shutil.disk_usage(existing_folder(study.root)).free,
        memory=memory_bytes(),
        gpu_memory=cast("Any", torch.cuda).get_device_properties(0).total_memory if measures.gpu else 0,
        notes=(*run_plan.lines(), *split, *device_lines(run_plan, before), *([note] if note else [])),
    )


def _stage_plan(plan: RunPlan, stage: Stage, measures: Measures, before: RunRecord | None) -> StagePlan:
    """Return the estimate of a stage, its time from earlier runs of the study where these tell."""
    estimate = stage.estimate_pending(plan, measures)
    seconds = expected_s(plan, stage, device_name(), before, measures.startup_s)
    if estimate.basis and seconds is not None:
        estimate = replace(estimate, seconds=seconds, basis=Basis.RECORDED)
    return StagePlan(stage.name, plan.pending(stage.name), estimate)


def expected_s(plan: RunPlan, stage: Stage, device: str, before: RunRecord | None, startup_s: float) -> float | None:
    """Return the seconds that a stage takes by what it took in earlier runs; None where they do not tell.

    What is beyond the start of workers grows in proportion to the slides.
    """
    slides = timed_slides(plan, stage)
    if (
        before is None
        or not slides
        or stage.name not in before.timings
        or before.conditions != conditions_of(plan, device)
    ):
        return None
    seconds, num_before = before.timings[stage.name]
    fixed_s = min(startup_s, seconds)
    return fixed_s + (seconds - fixed_s) * slides / num_before


def keep_plan(plan: RunPlan, device: str, ranges: Mapping[str, tuple[float, float]]) -> None:
    """Store the least and most seconds of each stage; where that fails, the next run has nothing to compare with."""
    stages = {name: (plan.pending(name).line, *limits) for name, limits in ranges.items()}
    text = json.dumps({"conditions": conditions_of(plan, device), "stages": stages})
    with suppress(OSError, RuntimeError, SelfVitMilError):
        write_text(plan_file(plan.study.root), f"{text}\n")


def _measure(plan: RunPlan) -> tuple[Measures, str]:
    """Return the measurements that the stages of this run need, and a note where one cannot be taken."""
    import torch

    settings, engine, gpu = plan.settings, plan.settings.engine, torch.cuda.is_available()
    measures = replace(measure_slides(plan.study.root, plan.cohort, settings), processes=max(num_cores(), 1), gpu=gpu)
    if engine.batch.kind != "none":
        measures = replace(measures, processes=engine.batch.jobs)
    elif engine.workers is not None:
        measures = replace(measures, processes=max(engine.workers, 1))
        if engine.workers == 0:
            measures = replace(measures, startup_s=0.0)
    network, note = _encoder(plan)
    if network is None:
        return measures, note
    measures = replace(measures, encoder=measure_encoder(network, settings))
    if plan.has("compare") or plan.has("evaluate"):
        device = torch.device("cuda" if gpu and settings.train.device != "cpu" else "cpu")
        bag_s = measure_aggregators(trained_rows(plan), network.dim, measures.mean_tiles, device)
        measures = replace(measures, bag_s=bag_s)
    return measures, note


def _encoder(plan: RunPlan) -> tuple[Encoder | None, str]:
    """Return the encoder to measure, or why there is none."""
    from selfvitmil.encoder import load_encoder

    source = next(iter(plan.sources.values()), None)  # none where the run ends before an encoder is used
    if not plan.request.trains_encoder and source is not None and not Path(source).exists():
        return None, f"note: {source} is not on this disk, and `plan` downloads nothing: its rate is unknown"
    try:
        if source is None or plan.pending("pretrain").todo:
            return untrained_network(plan.settings), ""
        return load_encoder(source, layout=plan.settings.embed.layout), ""
    except SelfVitMilError as error:
        return None, f"note: the rate of the encoder is unknown: {error}"
