"""Results as text: what a stage or command returns becomes lines and a table, for the terminal and for notebooks.

Stages and commands return data (`stages.base.StageResult`). The words for it are made here and nowhere else, one
function per kind of result. Only `cli` prints them; `_repr_html_` of a result shows the same in a notebook.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from selfvitmil.formatting import duration, html_table

if TYPE_CHECKING:
    from selfvitmil.stages.base import StageResult
    from selfvitmil.store.failures import Failure

Table = tuple[tuple[str, ...], ...]
"""Rows of cells, header first."""


@dataclass(frozen=True)
class Rendered:
    """A result in words."""

    lines: tuple[str, ...] = ()
    table: Table = ()


def render(result: StageResult) -> Rendered:
    """Return the words for a result. Its failures are not part of them: see `failure_line`."""
    names = [each.__name__ for each in type(result).__mro__]
    return next(_RENDERERS[name] for name in names if name in _RENDERERS)(result)


def failure_line(failure: Failure) -> str:
    """Return the line on a slide that failed."""
    return f"FAILED {failure.slide} ({failure.stage}): {failure.reason}. {failure.remedy}"


def to_html(result: StageResult) -> str:
    """Return a result for notebooks: its table, its lines, its failures; everything is escaped."""
    words = render(result)
    lines = "<br>".join(map(escape, (*words.lines, *map(failure_line, result.failures))))
    return (html_table(words.table) if words.table else "") + f"<p>{lines}</p>"


def _plain(result: StageResult) -> Rendered:
    """Render a result that has nothing but notes."""
    return Rendered(result.notes)


def _summary(result: Any) -> Rendered:
    return Rendered(result.lines, result.table)


# ---------------------------------------------------------------------------------------------------- commands


def size(number: float) -> str:
    """Return bytes in words: `3.2 GB`."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if number >= factor:
            return f"{number / factor:.1f} {unit}"
    return f"{number / 1e3:.0f} kB"


def _plan(result: Any) -> Rendered:
    measures, gpu = result.measures, result.measures.gpu
    lines = list(result.notes)
    if measures.unreadable:
        names = ", ".join(measures.unreadable[:5])
        lines.append(f"{len(measures.unreadable)} slides cannot be opened and count as empty: {names}")
    how = f"estimated from {measures.num_sampled} slides" if measures.num_sampled else "counted"
    lines.append(f"{len(measures.tiles)} slides, {sum(measures.tiles.values()):,} tiles ({how})")
    if measures.read_per_s:
        lines.append(f"measured: one process reads {measures.read_per_s:,.0f} tiles/s; {measures.processes} are used")
    if measures.encoder is not None:
        lines.append(
            f"measured: the encoder ({measures.encoder.num_weights / 1e6:.1f} million weights, feature dimension "
            f"{measures.encoder.network.dim}) embeds {measures.encoder.tiles_per_s:,.1f} tiles/s on the "
            f"{'GPU' if gpu else 'CPU'}"
        )
    besides = f", plus {' and '.join(each.name for each in result.unknown)}" if result.unknown else ""
    hours = f", {result.gpu_seconds / 3600:.1f} GPU-hours of it" if gpu else "; no GPU was found"
    lines.append(f"in total about {duration(result.seconds)}{hours}{besides}; expect an error of a factor of 2 to 3")
    short = "" if result.enough_disk else ": NOT ENOUGH"
    lines.append(f"disk: {size(result.disk)} needed, {size(result.disk_free)} free{short}")
    lines += [_memory_line(stage, result.memory_for(stage)) for stage in result.too_large]
    lines.append("nothing was written; `run` with the same flags does it")
    header = ("stage", "what would be done", "disk", "memory", "time", *["GPU-hours"] * gpu, "basis")
    rows = [(each.name, each.pending.line, *_estimate_cells(each.estimate, gpu)) for each in result.stages]
    return Rendered(tuple(lines), (header, *rows))


def _doctor(result: Any) -> Rendered:
    rows = [(check.status, check.name, check.found) for check in result.checks]
    lines = [f"{check.status} {check.name}: {check.remedy}" for check in result.checks if check.remedy]
    end = {
        "PASS": "everything is in place",
        "WARN": "usable; the warnings say what would be better",
        "FAIL": "something that is required does not work",
    }[result.status]
    return Rendered((*lines, end), (("", "what", "found"), *rows))


def _predict(result: Any) -> Rendered:
    from selfvitmil.localize.detection import RANKS_ONLY
    from selfvitmil.package import RESEARCH_ONLY

    package, choice = result.package, result.package.choice
    positive = package.about["positive"]
    rows = []
    for slide in result.slides:
        prediction = slide.heatmap.prediction
        own = prediction.classes.index(prediction.decision)
        probability = prediction.probability[0 if len(prediction.probability) == 1 else own]
        lesions = "-" if slide.heatmap.only_ranks else str(len(slide.lesions))
        unusual = ", ".join(dict.fromkeys(each.about for each in slide.findings))
        rows.append((slide.slide, prediction.decision, f"{probability:.4f}", str(len(slide.heatmap)), lesions, unusual))
    lines = [f"{slide.slide}: {note}" for slide in result.slides for note in slide.notes]
    if negative := sum(slide.heatmap.only_ranks for slide in result.slides):
        lines.append(f"{negative} slides are not called positive: there {RANKS_ONLY}")
    if choice.threshold is not None:
        chosen = sum(package.about["chosen_on"]["slides"].values())
        where = f"{choice.threshold_from}, {chosen} slides of split {package.split}"
        lines.append(f"{positive} from {choice.threshold:.4f} on ({where})")
    model = f"{package.name} {package.identity[:12]}"
    lines.append(f"{len(result.slides)} of {result.num_asked} slides predicted by {model}; see {result.out.name}")
    lines.append(f"{RESEARCH_ONLY}.")
    header = ("slide", "decision", f"probability{f' of {positive}' if positive else ''}", "tiles", "lesions", "OOD")
    return Rendered(tuple(lines), (header, *rows))


def _package(result: Any) -> Rendered:
    lines = list(result.notes)
    if not result.evaluated:
        lines.append("note: no results of these models; run `selfvitmil evaluate` first, and the model card has them")
    lines.append(
        f"{result.num_models} models of split {result.split}, encoder and card in {result.out.name} "
        f"({size(result.num_bytes)})"
    )
    return Rendered(tuple(lines))


def _estimate_cells(estimate: Any, with_gpu: bool) -> tuple[str, ...]:
    """Return the cells of a plan's table from disk on."""
    if not estimate.basis or estimate.basis == "unknown":
        return ("", "", "", *[""] * with_gpu, estimate.basis)
    hours = f"{estimate.seconds / 3600:.2f}" if estimate.on_gpu else ""
    memory = f"{'GPU ' * estimate.on_gpu}{size(estimate.memory)}"
    return (size(estimate.disk), memory, duration(estimate.seconds), *[hours] * with_gpu, estimate.basis)


def _memory_line(stage: Any, memory: int) -> str:
    """Return the warning that a stage does not fit into memory, with what makes it smaller."""
    needed, how = stage.estimate.memory, "fewer --workers"
    if stage.name == "pretrain":
        how = f"--pretrain.accumulate {1 << math.ceil(math.log2(needed / memory))}, which changes no result"
    elif stage.name == "embed":
        how = "a smaller --embed.batch"
    return f"memory: {stage.name} needs about {size(needed)} of {size(memory)}: NOT ENOUGH; use {how}"


_RENDERERS: dict[str, Callable[[Any], Rendered]] = {
    "StageResult": _plain,
    "Summary": _summary,
    "PlanResult": _plan,
    "DoctorResult": _doctor,
    "PackageResult": _package,
    "PredictResult": _predict,
}
"""By the name of the result's class, so that rendering one kind does not import the modules of all others."""
