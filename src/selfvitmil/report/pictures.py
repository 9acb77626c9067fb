"""Pictures and figures as data inside the page: JPEG of a size that can be mailed, SVG as it is.

An SVG stands in the page as a picture of its own, so that its styles and names do not meet those of others, and nothing
in it runs or loads. Pictures are stored anew from their pixels alone: remarks that a file may carry stay behind.
"""

from __future__ import annotations

import base64
import io
import re
from html import unescape
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from selfvitmil.pseudonyms import Names
from selfvitmil.report.markup import Markup, tag


def picture(pixels: Image.Image | NDArray[np.uint8], alt: str, *, edge_px: int, quality: int = 78) -> Markup:
    """A picture no longer than `edge_px`."""
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    shown = _on_white(image)
    shown.thumbnail((edge_px, edge_px), Image.Resampling.LANCZOS)
    content = io.BytesIO()
    shown.save(content, "JPEG", quality=quality, optimize=True)
    return _image("image/jpeg", content.getvalue(), alt, shown.width, shown.height)


def picture_file(path: Path, alt: str, *, edge_px: int, quality: int = 78) -> Markup | None:
    """A picture from a file; None where it cannot be read."""
    try:
        with Image.open(path) as image:
            image.draft("RGB", (edge_px, edge_px))  # a large JPEG is decoded no finer than needed
            return picture(image, alt, edge_px=edge_px, quality=quality)
    except (OSError, ValueError):
        return None


def figure(svg: str, names: Names) -> Markup:
    """A figure, called by its own title; a line instead where it shows a name that must not be seen."""
    shown = names.svg(re.sub(r"<!DOCTYPE[^>]*>", "", svg))
    title = svg_title(svg)
    if shown is None:
        return tag("p", f"The figure {title} is left out, since it shows names.", class_="missing")
    size = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', shown)
    # Figures count in points; a page in pixels.
    width, height = (round(float(edge) * 4 / 3) for edge in size.groups()) if size else (None, None)
    return tag("figure", _image("image/svg+xml", shown.encode("utf-8"), title, width, height), class_="chart")


def svg_title(svg: str) -> str:
    """What the figure calls itself."""
    found = re.search(r"<dc:title>(.*?)</dc:title>|<title>(.*?)</title>", svg, re.DOTALL)
    return unescape(next(filter(None, found.groups()), "figure")) if found else "figure"


def _on_white(image: Image.Image) -> Image.Image:
    if image.mode in ("RGBA", "LA", "P"):
        layer = image.convert("RGBA")
        ground = Image.new("RGBA", layer.size, "white")
        return Image.alpha_composite(ground, layer).convert("RGB")
    return image.convert("RGB").copy()


def _image(kind: str, content: bytes, alt: str, width: int | None, height: int | None) -> Markup:
    source = f"data:{kind};base64,{base64.b64encode(content).decode('ascii')}"
    return tag("img", alt=alt, width=width, height=height, src=source)
