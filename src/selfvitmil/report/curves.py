"""The course of a pretraining as figures: its quality with its error, and a panel for every other number of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from selfvitmil.errors import MetricError
from selfvitmil.evaluate import figures
from selfvitmil.report.assessment import CLEARLY, Measurement

PANELS = (
    ("loss", "loss"),
    ("teacher_entropy", "teacher entropy"),
    ("kl", "teacher to student (KL)"),
    ("feature_rank", "feature rank"),
    ("feature_std", "spread of features"),
    ("knn20", "probe: nearest neighbours"),
    ("linear", "probe: linear classifier"),
    ("alignment", "alignment of views"),
    ("uniformity", "uniformity"),
    ("tiles_per_s", "tiles per second"),
)
"""Numbers of a line of `metrics.jsonl` and what a panel calls them; those that a run has are drawn."""

Lines = Sequence[Mapping[str, Any]]


@figures.styled
def draw_pretraining(lines: Lines, title: str = "Pretraining") -> Figure:
    """A panel for each number, over steps."""
    shown = [(key, name) for key, name in PANELS if any(_is_number(line.get(key)) for line in lines)]
    if not shown:
        raise MetricError(f"{title}: no numbers", "there is nothing to draw", "Train it again")
    figure = Figure()
    panels: list[Axes] = list(figure.subplots(-(-len(shown) // 2), 2, squeeze=False).ravel())
    for axes, (key, name) in zip(panels, shown, strict=False):
        points = [(line["step"], line[key]) for line in lines if "step" in line and _is_number(line.get(key))]
        step, value = np.array(points, dtype=np.float64).T
        axes.plot(step, value, "o-" if len(step) < 8 else "-", color=figures.BLUE, lw=1.6, ms=3.5)
        axes.set_title(name, size=9, weight="bold")
        axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(4))
        axes.grid(visible=True)
    for axes in panels[len(shown) :]:
        axes.set_axis_off()
    for axes in panels[max(0, len(shown) - 2) : len(shown)]:
        axes.set_xlabel("step")
    caption = [f"{len(lines)} measurements over {int(lines[-1].get('step', 0)) + 1} steps."]
    if any(key == "teacher_entropy" for key, _ in shown):
        caption.append("Collapse shows as a rank near 1, or as an entropy near 0 or near its largest possible value.")
    return figures.finish(figure, 1.35 * (len(panels) // 2), title, caption, {}, "honest")


pretraining_figure = figures.as_svg(draw_pretraining)


@figures.styled
def draw_quality(measured: Sequence[Measurement], kept_step: int | None = None, title: str = "Quality") -> Figure:
    """Quality over steps with a band of standard errors; a line marks the weights that were kept, where known."""
    figure = Figure()
    axes = figure.subplots()
    steps, quality, error = (np.array(values, dtype=np.float64) for values in list(zip(*measured, strict=True))[:3])
    band = axes.fill_between(steps, quality - CLEARLY * error, quality + CLEARLY * error, color=figures.PALE, lw=0)
    (line,) = axes.plot(steps, quality, "o-", color=figures.BLUE, lw=1.6, ms=3.5)
    handles: dict[str, Any] = {"quality": (band, line)}
    if kept_step is not None:
        handles["weights kept"] = axes.axvline(kept_step, color=figures.ORANGE, lw=1.4, ls="--")
    axes.axhline(0, color=figures.GREY, lw=0.8)
    axes.set_ylim(min(0.0, float((quality - CLEARLY * error).min())))
    axes.set_xlabel("step")
    axes.set_ylabel("quality")
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.grid(visible=True)
    caption = [
        "Agreement of the nearest neighbours of two views of a tile: 0 is chance, 1 is full agreement.",
        f"Band: {CLEARLY:g} standard errors.",
    ]
    return figures.finish(figure, 1.9, title, caption, handles, "honest")


quality_figure = figures.as_svg(draw_quality)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and np.isfinite(value)
