"""The page from its data by Jinja2 templates, and what these can show: pictures, tables, definitions of metrics.

Every value is escaped. The page forbids itself every connection: its policy allows pictures that are data inside it,
and the one style sheet and the one script (sorting and filtering of tables) whose hashes it names. An SVG figure stands
in the page as a picture of its own, so that nothing in it runs or loads. Pictures are encoded from their pixels alone:
metadata that a file may carry stays behind.
"""

from __future__ import annotations

import base64
import hashlib
import io
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from html import unescape
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup
from numpy.typing import NDArray
from PIL import Image

from selfvitmil.pseudonyms import Names

if TYPE_CHECKING:
    from selfvitmil.report.data import ReportData
    from selfvitmil.report.slide_sections import SlideData

NUMBER = re.compile(r"[-+−<>~≈]?[\d,.]+(?:\s?(?:%|s|min|h|MB|mm²|µm))?|[-–]|")
"""A cell of a column of numbers, which is set to the right."""


def render_page(data: ReportData) -> str:
    """Return the page as HTML."""
    return render_template("page.html.j2", data, "".join(map(_backdrop_rule, data.slide_sections)))


def render_template(name: str, data: Any, further_css: str = "") -> str:
    """Return a page by one of the templates, with the style sheet, rules of its own and their hash."""
    css, script = _packaged("style.css") + further_css, _packaged("page.js")
    environment = Environment(
        loader=FunctionLoader(lambda name: _packaged(f"templates/{name}")),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters = cast("dict[str, Any]", environment.filters)  # pyright: ignore[reportUnknownMemberType]
    filters["limits_below"] = limits_below
    filters["definition"] = definition_of
    return environment.get_template(name).render(
        data=data,
        css=Markup(css),
        style_hash=_hash(css),
        script=Markup(script),
        script_hash=_hash(script),
        definitions=[(definition_id(name), name, text) for name, text in DEFINITIONS.items()],
    )


def _hash(text: str) -> str:
    """Return what the page's policy names a style or script by."""
    return base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")


def _backdrop_rule(section: SlideData) -> str:
    """Put a slide's thumbnail under the transparent heatmaps of its section: it is in the page once for all models."""
    if section.backdrop is None:
        return ""
    return f'#{section.anchor} .overlays img {{ background-image: url("{section.backdrop.src}"); }}\n'


def _packaged(name: str) -> str:
    """Return the text of a file of this package, also where the package is a zip file."""
    return (resources.files("selfvitmil.report") / name).read_text(encoding="utf-8")


def limits_below(cell: str | int) -> Markup:
    """Put the limits of `0.912 [0.850, 0.961]` below the value, or a table would be wider than the page."""
    found = re.fullmatch(r"(.+?) (\[.+\])", str(cell), re.DOTALL)
    return Markup('{}<span class="limits">{}</span>').format(*found.groups()) if found else Markup.escape(cell)


@dataclass(frozen=True)
class Table:
    """A table with a header and rows of cells."""

    header: tuple[str, ...]
    rows: tuple[tuple[str | int, ...], ...]

    @classmethod
    def of(cls, header: Iterable[str], rows: Iterable[Iterable[str | int]]) -> Table:
        return cls(tuple(header), tuple(tuple(row) for row in rows))

    @property
    def number_columns(self) -> list[bool]:
        """Which columns hold numbers only."""
        return [all(NUMBER.fullmatch(str(cell)) for cell in column) for column in zip(*self.rows, strict=True)]


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


def picture(pixels: Image.Image | NDArray[np.uint8], alt: str, *, edge_px: int, quality: int = 76) -> Picture:
    """Encode a picture as WebP, no longer than `edge_px`."""
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    if image.mode in ("RGBA", "LA", "P"):
        layer = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer)
    shown = image.convert("RGB").copy()
    shown.thumbnail((edge_px, edge_px), Image.Resampling.LANCZOS)
    content = io.BytesIO()
    shown.save(content, "WEBP", quality=quality, method=2)  # 4 takes twice as long and saves 3 %
    return Picture("image/webp", content.getvalue(), alt, shown.width, shown.height)


def layer_picture(layer: Image.Image, alt: str) -> Picture:
    """Encode a picture with transparent parts: as it is where it has few tiles, else with some loss."""
    found: list[bytes] = []
    for how in ({"lossless": True, "quality": 20}, {"quality": 40, "alpha_quality": 40}):
        content = io.BytesIO()
        layer.save(content, "WEBP", method=2, **how)
        found.append(content.getvalue())
    return Picture("image/webp", min(found, key=len), alt, layer.width, layer.height)


def picture_file(path: Path, alt: str, *, edge_px: int, quality: int = 76) -> Picture | None:
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


def interval_in(info: Any) -> Mapping[str, Any]:
    """Return an interval that a JSON file holds; empty where it is none, or its value is not known."""
    found = cast("Mapping[str, Any]", info if isinstance(info, Mapping) else {})
    return found if is_finite(found.get("value")) else {}


def is_finite(value: Any) -> bool:
    """Return whether a value from JSON is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


# ---------------------------------------------------------------------------------------------------- definitions


DEFINITIONS = {
    "AUC": "Area under the ROC curve: the share of pairs of a positive and a negative slide in which the positive one "
    "has the higher score. 0.5 is chance, 1 a perfect ranking. It does not depend on a threshold.",
    "macro AUC": "Mean over the classes of the AUC of each class against all others.",
    "average precision": "Mean of the precision over all positive slides, each at its own score (area under the "
    "precision-recall curve). Chance is the share of positives.",
    "accuracy": "Share of slides with the right decision. It depends on how many slides of each class there are.",
    "balanced accuracy": "Mean of the sensitivities of all classes; with two classes the mean of sensitivity and "
    "specificity. Chance is 1 divided by the number of classes.",
    "sensitivity": "Share of the positive slides that are called positive (recall, true positive rate).",
    "specificity": "Share of the negative slides that are called negative (true negative rate).",
    "positive predictive value": "Share of the slides called positive that are positive (precision). It holds for the "
    "share of positives in this test set only.",
    "negative predictive value": "Share of the slides called negative that are negative. It holds for the share of "
    "positives in this test set only.",
    "F1": "Harmonic mean of sensitivity and positive predictive value.",
    "macro F1": "Mean of the F1 of all classes.",
    "Brier score": "Mean squared difference between probability and outcome. 0 is perfect; always stating the share of "
    "positives p gives p (1 - p).",
    "calibration error (ECE)": "Mean difference between stated probability and the share of positives among slides "
    "with about that probability. 0 is perfect calibration.",
    "p": "Probability of a difference at least this large if both methods were equally good (two-sided test).",
    "p Holm": "The p-value corrected for the number of comparisons by Holm's method.",
    "AUC of seeds": "Mean and standard deviation of the AUC over training runs with different random seeds.",
    "FROC": "Sensitivity for lesions at a given number of false positives per slide; the score is the mean over 1/4, "
    "1/2, 1, 2, 4 and 8 false positives per slide (Camelyon16).",
    "coverage": "Share of the annotated tumour area that tiles above the threshold of the heatmap cover.",
    "Dice": "Overlap of marked and annotated area: twice the common area divided by the sum of both areas.",
    "tile AUC": "AUC of tile scores within a slide: tiles with annotated tumour against tiles without.",
    "tile AP": "Average precision of tile scores within a slide.",
    "hit rate": "Share of positive slides whose highest-scoring tile has annotated tumour.",
    "integrated Brier score": "Mean squared difference between the predicted probability to be event-free and what "
    "happened, over time and patients, weighted for censoring. 0 is perfect; always stating 0.5 gives 0.25.",
    "C-index": "Share of pairs of patients in which the one whose event comes first has the higher risk. 0.5 is "
    "chance.",
    "Harrell's C-index": "Share of comparable pairs of patients in which the one whose event comes first has the "
    "higher risk. 0.5 is chance. It depends on how many patients are censored.",
    "Uno's C-index": "The same share with pairs weighted by the probability of not being censored, so that it does not "
    "depend on how long patients were followed.",
    "time-dependent AUC": "AUC of the risk between patients with an event up to a given time and those without "
    "one then.",
    "hazard ratio, high against low risk": "How many times as often events happen in the group with the high risk, by "
    "Cox's model. 1 is no difference.",
    "p of the log-rank test": "Probability of survival curves at least this different if both groups were alike.",
    "mean absolute error": "Mean distance between predicted and true value, in the unit of the value.",
    "root mean squared error": "Square root of the mean squared distance between predicted and true value; large "
    "errors count more.",
    "R²": "Share of the variance of the true values that predictions explain. 0 is predicting their mean; it may be "
    "negative.",
    "Pearson's correlation": "How well predicted and true values lie on a straight line, from -1 to 1.",
    "Spearman's correlation": "Pearson's correlation of the ranks: how well the order is predicted.",
    "quadratic weighted kappa": "Agreement of predicted and true level beyond chance; an error counts by the square of "
    "its distance in levels. 1 is perfect, 0 chance.",
    "at most one level off": "Share of slides whose predicted level is the true one or next to it.",
    "mean distance in levels": "Mean number of levels between prediction and truth.",
    "macro average precision": "Mean over the labels of the average precision of each.",
    "95 % CI": "Confidence interval: in 95 of 100 repetitions with other test slides of the same kind, such an "
    "interval contains the true value. It does not cover how results vary with other training slides or seeds.",
}
"""Name of a metric -> what it means."""
_ALIASES = {
    "acc.": "accuracy",
    "bal. acc.": "balanced accuracy",
    "sens.": "sensitivity",
    "spec.": "specificity",
    "ECE": "calibration error (ECE)",
    "balanced_accuracy": "balanced accuracy",
}


def definition_of(cell: object) -> tuple[str, str] | None:
    """Return id and definition of the metric that a cell names, with or without limits behind it; None for others."""
    name = " ".join(re.sub(r"\[[^\]]*\]", "", str(cell)).split())
    name = _ALIASES.get(name, name)
    return (definition_id(name), DEFINITIONS[name]) if name in DEFINITIONS else None


def definition_id(name: str) -> str:
    """Return the id of the element that explains a metric."""
    return "def-" + re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
