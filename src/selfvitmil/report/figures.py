"""Pictures as data inside the page: JPEG of a size that can be mailed, SVG figures, and the curves of a pretraining.

An SVG stands in the page as a picture of its own, so that its styles and ids do not meet those of others, and nothing
in it runs or loads. Pictures are encoded from their pixels alone: metadata that a file may carry stays behind.
"""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray
from PIL import Image

from selfvitmil.errors import MetricError
from selfvitmil.evaluate import figures
from selfvitmil.pseudonyms import Names

BAND_ERRORS = 2.0
"""Standard errors of the band around the quality of an encoder, and beyond which two measurements differ."""
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
"""Values in a line of `metrics.jsonl`, and the titles of their panels."""


@dataclass(frozen=True)
class Picture:
    """An encoded picture for the page."""

    media_type: str
    content: bytes
    alt: str
    width: int | None
    height: int | None

    @property
    def src(self) -> str:
        """The picture as a data URI."""
        return f"data:{self.media_type};base64,{base64.b64encode(self.content).decode('ascii')}"


Shown = Picture | str
"""A picture, or the sentence that stands in its place."""


def picture(pixels: Image.Image | NDArray[np.uint8], alt: str, *, edge_px: int, quality: int = 78) -> Picture:
    """Encode a picture as JPEG, no longer than `edge_px`."""
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    if image.mode in ("RGBA", "LA", "P"):
        layer = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer)
    shown = image.convert("RGB").copy()
    shown.thumbnail((edge_px, edge_px), Image.Resampling.LANCZOS)
    content = io.BytesIO()
    shown.save(content, "JPEG", quality=quality, optimize=True)
    return Picture("image/jpeg", content.getvalue(), alt, shown.width, shown.height)


def picture_file(path: Path, alt: str, *, edge_px: int, quality: int = 78) -> Picture | None:
    """Encode the picture in a file; None where it cannot be read."""
    try:
        with Image.open(path) as image:
            image.draft("RGB", (edge_px, edge_px))  # decodes a large JPEG no finer than needed
            return picture(image, alt, edge_px=edge_px, quality=quality)
    except (OSError, ValueError):
        return None


def chart(svg: str, names: Names) -> Shown:
    """Return an SVG figure with its own title as alternative text; a sentence where it shows a name to be hidden."""
    shown, title = names.svg(re.sub(r"<!DOCTYPE[^>]*>", "", svg)), svg_title(svg)
    if shown is None:
        return f"The figure {title} is left out, since it shows names."
    size = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', shown)
    # Figures are sized in points, the page in pixels.
    width, height = (round(float(edge) * 4 / 3) for edge in size.groups()) if size else (None, None)
    return Picture("image/svg+xml", shown.encode("utf-8"), title, width, height)


def svg_title(svg: str) -> str:
    """Return the title stored in an SVG figure."""
    found = re.search(r"<dc:title>(.*?)</dc:title>|<title>(.*?)</title>", svg, re.DOTALL)
    return unescape(next(filter(None, found.groups()), "figure")) if found else "figure"


# ---------------------------------------------------------------------------------------------------- curves


@figures.styled
def draw_pretraining(lines: Sequence[Mapping[str, Any]], title: str = "Pretraining") -> Figure:
    """Draw a panel over steps for each of `PANELS` that the lines of `metrics.jsonl` have.

    Raises MetricError where they have none.
    """
    shown = [(key, name) for key, name in PANELS if any(is_finite(line.get(key)) for line in lines)]
    if not shown:
        raise MetricError(f"{title}: no numbers", "there is nothing to draw", "Train it again")
    figure = Figure()
    panels: list[Axes] = list(figure.subplots(-(-len(shown) // 2), 2, squeeze=False).ravel())
    for axes, (key, name) in zip(panels, shown, strict=False):
        points = [(line["step"], line[key]) for line in lines if "step" in line and is_finite(line.get(key))]
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


@figures.styled
def draw_quality(
    measured: Sequence[tuple[float | None, ...]], kept_step: int | None = None, title: str = "Quality"
) -> Figure:
    """Draw quality over steps with its error band, from tuples that begin with step, quality and standard error.

    A line marks the step whose weights were kept, where it is known.
    """
    figure = Figure()
    axes = figure.subplots()
    steps, quality, error = (np.array(values, dtype=np.float64) for values in list(zip(*measured, strict=True))[:3])
    low, high = quality - BAND_ERRORS * error, quality + BAND_ERRORS * error
    band = axes.fill_between(steps, low, high, color=figures.PALE, lw=0)
    (line,) = axes.plot(steps, quality, "o-", color=figures.BLUE, lw=1.6, ms=3.5)
    handles: dict[str, Any] = {"quality": (band, line)}
    if kept_step is not None:
        handles["weights kept"] = axes.axvline(kept_step, color=figures.ORANGE, lw=1.4, ls="--")
    axes.axhline(0, color=figures.GREY, lw=0.8)
    axes.set_ylim(min(0.0, float(low.min())))
    axes.set_xlabel("step")
    axes.set_ylabel("quality")
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.grid(visible=True)
    caption = [
        "Agreement of the nearest neighbours of two views of a tile: 0 is chance, 1 is full agreement.",
        f"Band: {BAND_ERRORS:g} standard errors.",
    ]
    return figures.finish(figure, 1.9, title, caption, handles, "honest")


pretraining_figure = figures.as_svg(draw_pretraining)
quality_figure = figures.as_svg(draw_quality)


def is_finite(value: Any) -> bool:
    """Return whether a value from JSON is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and bool(np.isfinite(value))
