"""The FROC curve as SVG, of one model or of several in one figure, and the files of lesion scores.

Drawn as the figures of an evaluation are. False positives per slide are linear up to 1/4, the first of the challenge's
six marks, and logarithmic beyond, so that the marks have equal distances and the beginning at 0 is still there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from selfvitmil.errors import MetricError
from selfvitmil.evaluate.figures import (
    BLUE,
    INK,
    ORANGE,
    Protocol,
    as_svg,
    finish,
    percent,
    styled,
    with_limits,
)
from selfvitmil.formatting import shorten
from selfvitmil.localize.lesion_scores import Floats, LesionScores, froc_curve
from selfvitmil.localize.methods import LesionTable
from selfvitmil.metrics import FPS, Froc
from selfvitmil.store.files import write_text

COLORS = (BLUE, ORANGE, "#009e73", "#cc79a7", "#e69f00", "#56b4e9", INK)
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.5, 1)), (0, (6, 1.5, 1.5, 1.5)))
MARKS = ("1/4", "1/2", "1", "2", "4", "8")
LESION_FILES = ("lesions.json", "lesion_slides.csv", "lesions.csv", "lesions.md", "froc.svg")
"""All that is written here into a folder of results, of one model or of several."""


@styled
def draw_froc(
    scores: Mapping[str, LesionScores], title: str = "FROC curve", *, protocol: Protocol = "honest"
) -> Figure:
    """Sensitivity for lesions over false positives per slide, by the name of each model; marks at the challenge's six.

    All must be scored on the same slides. MetricError where none has a curve.
    """
    curves = {name: own.froc for name, own in scores.items() if own.froc is not None}
    if not curves:
        why = next((own.reasons.get("froc", "") for own in scores.values()), "") or "there is none to draw"
        raise MetricError("a FROC curve of nothing", why, "Score heatmaps of positive slides with their annotations")
    figure = Figure()
    axes = figure.subplots()
    handles: dict[str, Any] = {}
    most = 8.0
    for place, (name, froc) in enumerate(curves.items()):
        color, dashes = COLORS[place % len(COLORS)], DASHES[place % len(DASHES)]
        fps, sensitivity = _fine(*froc_curve(froc))
        most = max(most, min(float(fps[-1]), 16.0))
        (line,) = axes.plot(fps, sensitivity, color=color, ls=dashes, lw=2.2, label=name)
        if fps[-1] < FPS[-1]:
            axes.plot([fps[-1], FPS[-1]], [sensitivity[-1]] * 2, color=color, ls=(0, (1, 2)), lw=1, label="beyond")
        (dots,) = axes.plot(FPS, froc.sensitivity_at, "o", color=color, mec="white", ms=6, zorder=4, label="marks")
        handles[shorten(name, 26)] = (line, dots)
    axes.set_xscale("symlog", linthresh=FPS[0], base=2, linscale=1.0)
    axes.set(xlim=(0, most * 1.08), ylim=(-0.02, 1.02), xlabel="false positives per slide", ylabel="lesions found")
    axes.set_xticks((0.0, *FPS), ("0", *MARKS))
    axes.set_xticks((), minor=True)
    axes.grid(visible=True)
    return finish(figure, 3.6, title, _caption(scores, curves), handles, protocol)


def _fine(fps: Floats, sensitivity: Floats) -> tuple[Floats, Floats]:
    """With points between, since what is straight by false positives is bent on the axis."""
    between = np.concatenate([np.linspace(0, FPS[0], 10), np.geomspace(FPS[0], 16.0, 100)])
    between = np.setdiff1d(between[between < fps[-1]], fps)
    order = np.argsort(np.concatenate([fps, between]), kind="stable")
    added = np.interp(between, fps, sensitivity)
    return np.concatenate([fps, between])[order], np.concatenate([sensitivity, added])[order]


def _caption(scores: Mapping[str, LesionScores], curves: Mapping[str, Froc]) -> list[str]:
    first = next(iter(scores.values()))
    froc, positive = next(iter(curves.values())), int(first.positive.sum())
    lesions = sum(case.num_lesions for case in froc.cases)
    itc = sum(len(case.itc_labels) for case in froc.cases)
    told = [f"{name} {with_limits(found)}" for name in curves if (found := scores[name].intervals["froc"])]
    level = percent(first.evaluate.confidence)
    sizes = "true microns" if first.about["froc_frame"] == "microns" else "level-0 pixels taken as 0.243 um"
    sure = any(found and found.low == found.high for name in curves if (found := scores[name].intervals["froc"]))
    short = [name for name, each in curves.items() if each.fps_per_slide.max() < FPS[-1]]
    few = f", {itc} under 0.2 mm not counted" if itc else ""
    return [
        f"{positive} positive and {len(first.slides) - positive} negative slides, {lesions} lesions{few}.",
        f"Marks: the six rates whose mean is the score: {'; '.join(told)} ({level} limits, bootstrap over slides).",
        "Limits have no width where all resamples agree; that is no certainty." if sure else "",
        "Thin dots: no more points; the last sensitivity holds." if short else "",
        f"Points at least {first.about['point_radius_um']:g} um apart; sizes in {sizes}.",
    ]


froc_figure = as_svg(draw_froc)


def write_lesion_scores(folder: Path, scores: LesionScores, *, protocol: Protocol = "honest") -> list[str]:
    """Write `lesions.json`, `lesion_slides.csv` and `froc.svg` of one model; why the figure could not be drawn."""
    _write_json(folder / "lesions.json", scores.to_json() | {"protocol": protocol})
    write_text(folder / "lesion_slides.csv", scores.csv())
    return _write_figure(folder / "froc.svg", {str(scores.about["model"]): scores}, protocol)


def write_lesion_table(folder: Path, table: LesionTable, *, protocol: Protocol = "honest") -> list[str]:
    """Write `lesions.json`, `lesions.csv`, `lesions.md` and `froc.svg` of several models."""
    _write_json(folder / "lesions.json", table.to_json() | {"protocol": protocol})
    write_text(folder / "lesions.csv", table.csv())
    write_text(folder / "lesions.md", table.markdown())
    return _write_figure(folder / "froc.svg", table.scores, protocol)


def _write_json(path: Path, told: dict[str, Any]) -> None:
    write_text(path, json.dumps(told, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def _write_figure(path: Path, scores: Mapping[str, LesionScores], protocol: Protocol) -> list[str]:
    try:
        text = froc_figure(scores, protocol=protocol)
    except MetricError as error:
        path.unlink(missing_ok=True)  # one of an earlier run would pass for this run's
        return [f"{path.name} is not drawn: {error}"]
    write_text(path, text)
    return []
