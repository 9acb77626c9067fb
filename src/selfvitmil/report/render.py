"""The page from its data by Jinja2 templates, and what these can show: pictures and tables.

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
from collections.abc import Iterable
from dataclasses import dataclass
from html import unescape
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup
from numpy.typing import NDArray
from PIL import Image

from selfvitmil.pseudonyms import Names
from selfvitmil.report.definitions import DEFINITIONS, definition_id, definition_of

if TYPE_CHECKING:
    from selfvitmil.report.data import ReportData
    from selfvitmil.report.results import SlideData

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
    environment.filters["limits_below"] = limits_below
    environment.filters["definition"] = lambda cell: definition_of(str(cell))
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


def is_finite(value: Any) -> bool:
    """Return whether a value from JSON is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
