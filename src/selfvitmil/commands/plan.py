"""`plan`: what `run` would do and what it takes on this machine: tiles, disk, memory, time, stage by stage.

From slide headers, a close look at a few slides and a few seconds of measuring; every figure says where it comes from:
`measured` here, `reckoned` from what was measured, or `usual`, a figure of other machines. Nothing is written.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from selfvitmil.commands.doctor import memory_bytes
from selfvitmil.commands.run import as_before, device_lines
from selfvitmil.commands.run_record import read_record
from selfvitmil.engine import num_cores
from selfvitmil.errors import SelfVitMilError
from selfvitmil.formatting import duration
from selfvitmil.settings import StudySettings
from selfvitmil.stages.base import Estimate
from selfvitmil.stages.measure import Measures, measure_aggregators, measure_encoder, measure_slides, untrained_network
from selfvitmil.stages.run_plan import Request, RunPlan, plan_run
from selfvitmil.study.folder import Summary
from selfvitmil.study.methods import compared_methods


def plan(study: Path, request: Request, settings: StudySettings) -> Summary:
    """Say what a run would do, and what it takes. Reads only."""
    before = read_record(study)
    request = as_before(request, before, study)
    run_plan = plan_run(study, request, settings, offline=True)
    measures, notes = _measure(run_plan)
    estimates = {stage.name: stage.estimate_pending(run_plan, measures) for stage in run_plan.stages}
    split = run_plan.split_table
    lines = [f"split {'; '.join(map(' '.join, zip(split[0], row, strict=True)))}" for row in split[1:]]
    lines = [*run_plan.lines(), *lines, *device_lines(run_plan, before), *measures.slides.notes, *notes]
    lines += [*_basis_lines(measures), *_totals(study, estimates, measures)]
    lines.append("nothing was written; `run` with the same flags does it")
    header = ("stage", "what would be done", "disk", "memory", "time", *["GPU-hours"] * measures.gpu, "by")
    rows = [(name, run_plan.pending(name).line, *_cells(each, measures.gpu)) for name, each in estimates.items()]
    return Summary(tuple(lines), table=(header, *rows))


def _cells(estimate: Estimate, with_gpu: bool) -> tuple[str, ...]:
    """The columns of the table from disk on."""
    if not estimate.basis or math.isnan(estimate.seconds):
        return ("", "", "", *[""] * with_gpu, estimate.basis)
    hours = f"{estimate.seconds / 3600:.2f}" if estimate.on_gpu else ""
    memory = f"{'GPU ' * estimate.on_gpu}{size(estimate.memory)}"
    return (size(estimate.disk), memory, duration(estimate.seconds), *[hours] * with_gpu, estimate.basis)


# ---------------------------------------------------------------------------------------------------- measuring


def _measure(plan: RunPlan) -> tuple[Measures, list[str]]:
    import torch

    request, settings = plan.request, plan.settings
    slides = measure_slides(plan.study, plan.cohort, settings)
    network, note = _encoder(plan)
    encoder = measure_encoder(network, settings) if network is not None else None
    mean = round(sum(slides.tiles.values()) / max(len(slides.tiles), 1))
    steps: dict[str, float] = {}
    if encoder is not None and (plan.has("compare") or plan.has("evaluate")):
        steps = measure_aggregators(_methods(request, settings), encoder.dim, mean, settings)
    engine = settings.engine
    processes = num_cores() if engine.workers is None else max(engine.workers, 1)
    if engine.batch.kind != "none":
        processes = engine.batch.jobs
    return Measures(slides, encoder, steps, processes, torch.cuda.is_available()), [note] if note else []


def _encoder(plan: RunPlan) -> tuple[Any, str]:
    """The encoder to measure with, or why there is none."""
    from selfvitmil.encoder import load_encoder

    settings, source = plan.settings, next(iter(plan.sources.values()), None)  # none where no encoder is asked for
    if not plan.request.trains_encoder and source is not None and not Path(source).exists():
        return None, f"note: {source} is not on this disk, and a plan fetches nothing: its rate is not known"
    try:
        if source is not None and (Path(source, "config.json").exists() or Path(source).is_file()):
            return load_encoder(source, layout=settings.embed.layout), ""
        return untrained_network(settings), ""
    except SelfVitMilError as error:
        return None, f"note: the encoder cannot be measured: {error}"


def _methods(request: Request, settings: StudySettings) -> list[str]:
    if request.one_method:
        return [settings.train.aggregator]
    rows = compared_methods(settings, two_scales=bool(settings.tile.parent_mpp))
    return list(dict.fromkeys(row.method for row in rows))


# ---------------------------------------------------------------------------------------------------- words


def size(number: float) -> str:
    """Bytes in words: `3.2 GB`."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if number >= factor:
            return f"{number / factor:.1f} {unit}"
    return f"{number / 1e3:.0f} kB"


def _basis_lines(measures: Measures) -> list[str]:
    slides, encoder = measures.slides, measures.encoder
    total = sum(slides.tiles.values())
    counted = f"estimated from {slides.num_sampled} slides looked at" if slides.num_estimated else "counted"
    lines = [f"{len(slides.tiles)} slides, {total:,} tiles ({counted})"]
    if slides.read_per_s:
        lines.append(f"measured: one process reads {slides.read_per_s:,.0f} tiles/s; {measures.processes} are used")
    if encoder is not None:
        place = "GPU" if measures.gpu else "CPU"
        lines.append(
            f"measured: the encoder ({encoder.num_weights / 1e6:.1f} million weights, vectors of {encoder.dim}) makes "
            f"{encoder.tiles_per_s:,.1f} vectors/s on the {place}"
        )
    return lines


def _totals(study: Path, estimates: Mapping[str, Estimate], measures: Measures) -> list[str]:
    known = [each for each in estimates.values() if not math.isnan(each.seconds)]
    unknown = [name for name, each in estimates.items() if math.isnan(each.seconds)]
    besides = f", and {' and '.join(unknown)} besides" if unknown else ""
    gpu = sum(each.seconds for each in known if each.on_gpu)
    hours = f", {gpu / 3600:.1f} GPU-hours of it" if measures.gpu else "; no GPU was found"
    lines = [f"in all about {duration(sum(each.seconds for each in known))}{hours}{besides}"]
    place = study.absolute()
    while not place.exists():
        place = place.parent
    disk, free = sum(each.disk for each in estimates.values()), shutil.disk_usage(place).free
    lines.append(f"disk: {size(disk)} needed, {size(free)} free{'' if free > 1.1 * disk else ': NOT ENOUGH'}")
    return [*lines, *filter(None, (_memory_line(name, each) for name, each in estimates.items()))]


def _memory_line(stage: str, each: Estimate) -> str:
    """Whether a stage is too large for the machine, and what makes it smaller; empty where it is not."""
    import torch

    there = torch.cuda.get_device_properties(0).total_memory if each.on_gpu else memory_bytes()
    if each.memory <= there:
        return ""
    how = "fewer --workers"
    if stage == "pretrain":
        how = f"--pretrain.accumulate {1 << math.ceil(math.log2(each.memory / there))}, which changes no result"
    elif stage == "embed":
        how = "a smaller --embed.batch"
    return f"memory: {stage} needs about {size(each.memory)}, {size(there)} are there: NOT ENOUGH; use {how}"
