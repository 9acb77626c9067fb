"""Pictures of heatmaps: the slide, its tiles tinted by their score, and all that is needed to read it.

A heatmap and a picture of the slide come in, a page goes out: caption, the tinted slide, scale bar, legend, colour bar.
No text covers any tissue. A pixel belongs to a tile when its centre lies in it, so tiles are squares with hard edges,
never blurred: a model scores whole tiles. Where tiles overlap, the mean of their scores is shown. Pixels are painted in
bands, so that large pictures need little memory.

| colours              | a tile is covered by                                             |
|----------------------|------------------------------------------------------------------|
| `red`                | a dark, transparent square, the redder the higher its score      |
| `inferno`, `viridis` | the colour of its score, the more transparent the lower it is    |

Equal input gives equal bytes.
"""

from __future__ import annotations

import math
import unicodedata
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Literal

import matplotlib
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from selfvitmil.annotations import Annotation
from selfvitmil.errors import SlideError
from selfvitmil.geometry import size_at_mpp
from selfvitmil.localize.detection import RANKS_ONLY, Lesion, highest_scoring_tile
from selfvitmil.localize.heatmap import Heatmap
from selfvitmil.settings import LocalizeSettings
from selfvitmil.slides import Slide
from selfvitmil.store.files import atomic_path

Colors = Literal["red", "inferno", "viridis"]
Pixels = NDArray[np.uint8]

NO_TILE = 256
"""Index of pixels where there is no tile; scores have 0 to 255."""
OPACITY: dict[Colors, tuple[float, float]] = {"red": (0.5, 0.62), "inferno": (0.2, 0.7), "viridis": (0.25, 0.7)}
"""Of tiles with score 0 and 1."""
BAND_PX = 256
"""Rows painted at a time, so that large pictures need little memory."""
LINES_FROM_PX = 24
"""Tiles that are this wide in a picture are parted by thin lines."""
LINE_SHADE = 0.75
"""What such a line leaves of a pixel's brightness."""
BoxL0 = tuple[float, float, float, float]
"""(x0, y0, x1, y1) in level-0 pixels."""

ZOOM_TILES = (10, 24)
"""Least and most tiles across the enlarged region."""
ZOOM_PX = 1000
"""Most pixels across it; it is shown twice."""

INK, GREY, ALARM, PAPER = "#222222", "#767676", "#b34700", "#ffffff"
ANNOTATED, EXCLUDED, OTHER, FOUND, FRAME = "#00e5ff", "#b8b8b8", "#7fb4ff", "#ffffff", "#39ff14"

KINDS = {
    "attention": "attention, the weight of the tile among all tiles of the slide",
    "instance": "probability of the tile on its own",
    "product": "attention times the probability of the tile on its own",
    "effect": "how much the slide's probability falls when the tile is left out",
}
SCALES = {
    "winsor": "z-scores with extremes cut off, 0 the least and 1 the most in this slide",
    "zero-outliers": "z-scores with extremes set to 0, else 0 the least and 1 the most in this slide",
    "percentile": "the share of this slide's tiles that have less",
    "none": "0 the least and 1 the most in this slide",
}
PARTS = {
    "test": "Test slide: the model was not trained on it.",
    "val": "Validation slide: the model was not trained on it, but chosen with it.",
    "train": "Training slide.",
    "new": "New slide: the model was not trained on it.",
}
NOTICE = "For research only, not for diagnosis."


@dataclass(frozen=True, eq=False)
class Raster:
    """The tiles of a heatmap as rectangles of whole pixels of some picture."""

    boxes_px: NDArray[np.int64]
    """(N, 4) x0, y0, x1, y1, half open, cut to the picture; none is empty."""
    weight: NDArray[np.int64]
    """(N,) scores in 1 / 2**24, so that sums are exact."""
    size_px: tuple[int, int]

    @classmethod
    def over(
        cls, heatmap: Heatmap, size_px: tuple[int, int], downsample: float, origin_l0: tuple[float, float] = (0, 0)
    ) -> Raster:
        """For a picture of `size_px` from `origin_l0` on, whose pixels are `downsample` level-0 pixels wide."""
        boxes = _meeting(heatmap.boxes_l0)
        boxes = np.ceil((boxes - np.tile(origin_l0, 2)) / downsample - 0.5).astype(np.int64)
        boxes[:, 2:] = np.maximum(boxes[:, 2:], boxes[:, :2] + 1)  # tiles finer than pixels share them
        boxes = np.clip(boxes, 0, np.tile(size_px, 2))
        inside = (boxes[:, 2:] > boxes[:, :2]).all(axis=1)
        weight = np.rint(heatmap.score[inside].astype(np.float64) * 2**24).astype(np.int64)
        return cls(boxes[inside], weight, size_px)

    def rows(self, top: int, bottom: int) -> NDArray[np.int64]:
        """[y, x] of these rows: 0 to 255 for the mean score of the tiles at a pixel, or `NO_TILE`."""
        here = (self.boxes_px[:, 1] < bottom) & (self.boxes_px[:, 3] > top)
        x0, y0, x1, y1 = self.boxes_px[here].T
        y0, y1 = np.maximum(y0, top) - top, np.minimum(y1, bottom) - top
        # The score changes at edges of tiles only: these cut the picture into far fewer cells than it has pixels.
        xs, ys = np.unique([0, *x0, *x1, self.size_px[0]]), np.unique([0, *y0, *y1, bottom - top])
        i0, i1, j0, j1 = (_places(*each) for each in ((xs, x0), (xs, x1), (ys, y0), (ys, y1)))
        total, count = np.zeros((len(ys), len(xs)), np.int64), np.zeros((len(ys), len(xs)), np.int64)
        for j, i, sign in ((j0, i0, 1), (j0, i1, -1), (j1, i0, -1), (j1, i1, 1)):
            np.add.at(total, (j, i), sign * self.weight[here])
            np.add.at(count, (j, i), sign)
        for part in (total, count):
            np.cumsum(part, axis=0, out=part)
            np.cumsum(part, axis=1, out=part)
        mean = total / np.maximum(count, 1) / 2.0**24
        cells = np.where(count > 0, np.rint(255 * mean), NO_TILE).astype(np.int64)
        across, down = (np.repeat(np.arange(len(each) - 1), np.diff(each)) for each in (xs, ys))
        return cells.take(across, axis=1).take(down, axis=0)

    def bands(self) -> Iterator[tuple[int, int]]:
        """(top, bottom) of the bands of the picture."""
        height = self.size_px[1]
        return ((top, min(top + BAND_PX, height)) for top in range(0, height, BAND_PX))


def _meeting(boxes: NDArray[np.float64]) -> NDArray[np.float64]:
    """Boxes whose right and lower edges meet the next tile where only the rounding of stored corners parts them."""
    boxes = boxes.copy()
    for start, end in ((0, 2), (1, 3)):
        starts = np.unique(boxes[:, start])
        if len(starts):
            place = np.clip(np.searchsorted(starts, boxes[:, end] - 1), 0, len(starts) - 1)
            near = np.abs(starts[place] - boxes[:, end]) <= 1
            boxes[near, end] = starts[place[near]]
    return boxes


@cache
def color_table(colors: Colors) -> Pixels:
    """(257, 3) colours of the scores 0 to 1 in 256 steps; black, the last one, is for no tile."""
    if colors == "red":
        table = np.zeros((256, 3), np.uint8)
        table[:, 0] = np.arange(256)
    else:
        table = matplotlib.colormaps[colors](np.arange(256), bytes=True)[:, :3]
    table = np.concatenate([table, np.zeros((1, 3), np.uint8)])
    table.setflags(write=False)
    return table


@cache
def opacity_table(colors: Colors) -> NDArray[np.float32]:
    """(257,) how much of a tile's colour covers the tissue; 0 where there is no tile."""
    table = np.append(np.linspace(*OPACITY[colors], 256), 0).astype(np.float32)
    table.setflags(write=False)
    return table


@cache
def _tint_table(colors: Colors) -> Pixels:
    """(3, 257 * 256) channels of a pixel under the colour of a score, by 256 * score + channel."""
    under = np.arange(256, dtype=np.float32)[:, None]
    color, opacity = color_table(colors)[:, None].astype(np.float32), opacity_table(colors)[:, None, None]
    return np.rint(under + (color - under) * opacity).astype(np.uint8).reshape(-1, 3).T.copy()


def tint(pixels: Pixels, index: NDArray[np.int64], colors: Colors) -> Pixels:
    """Pixels under the colours of these scores; what is under no tile stays as it is."""
    first = 256 * index
    return np.stack([table.take(first + pixels[..., c]) for c, table in enumerate(_tint_table(colors))], axis=-1)


def paint_tiles(
    heatmap: Heatmap,
    thumbnail: Pixels,
    thumbnail_mpp: float,
    colors: Colors = "red",
    origin_l0: tuple[float, float] = (0, 0),
) -> Pixels:
    """A picture of the slide, or of a part of it from `origin_l0` on, with its tiles tinted and nothing else."""
    height, width = thumbnail.shape[:2]
    raster = Raster.over(heatmap, (width, height), thumbnail_mpp / heatmap.frame.slide_mpp, origin_l0)
    painted = np.empty_like(thumbnail)
    for top, bottom in raster.bands():
        painted[top:bottom] = tint(thumbnail[top:bottom], raster.rows(top, bottom), colors)
    if _has_lines(heatmap, thumbnail_mpp):
        _part_tiles(painted, raster)
    return painted


def _has_lines(heatmap: Heatmap, mpp: float) -> bool:
    """Return whether tiles are large enough at `mpp`, and do not overlap, so that thin lines part them."""
    frame = heatmap.frame
    return frame.extent_l0 * frame.slide_mpp / mpp >= LINES_FROM_PX and frame.stride_l0 > frame.extent_l0 - 1


def _part_tiles(painted: Pixels, raster: Raster) -> None:
    """Darken the upper and left edge of every tile."""
    darker = (np.arange(256) * LINE_SHADE).astype(np.uint8)
    for x0, y0, x1, y1 in raster.boxes_px:
        for edge in (painted[y0, x0:x1], painted[y0 + 1 : y1, x0]):
            edge[...] = darker[edge]


# ---------------------------------------------------------------------------------------------------- words


def scale_bar(mpp: float, most_px: float) -> tuple[float, str]:
    """Microns, and words for them: the longest of 1, 2, 5, 10, 20 ... that takes `most_px` pixels or less."""
    most = mpp * most_px * (1 + 1e-9)
    unit = 10.0 ** math.floor(math.log10(most))
    microns = max(step * unit for step in (1, 2, 5) if step * unit <= most)
    return microns, f"{microns / 1000:g} mm" if microns >= 1000 else f"{microns:g} µm"


def score_words(heatmap: Heatmap) -> str:
    """Return what the colours mean."""
    kind, scale = KINDS.get(heatmap.kind, heatmap.kind), SCALES.get(heatmap.scale, heatmap.scale)
    tile = f"Tiles of {heatmap.frame.extent_l0 * heatmap.frame.slide_mpp:.3g} µm."
    return f"Score: evidence for {heatmap.prediction.shown}, by {kind}; {scale}. {tile}"


def shown_words(heatmap: Heatmap) -> str:
    """Return which evidence the heatmap shows, and why."""
    why = heatmap.details.get("shown_because", "")
    return f"{KINDS.get(heatmap.kind, heatmap.kind)}{f': {why}' if why else ''}"


def prediction_words(heatmap: Heatmap) -> str:
    """Return probability, decision, and where its threshold came from."""
    prediction = heatmap.prediction
    if prediction.value_words:
        return f"{prediction.value_words[:1].upper()}{prediction.value_words[1:]}. Called {prediction.decision}."
    if prediction.threshold is None:
        rule = "the most probable class" if not prediction.threshold_from else prediction.threshold_from
    else:
        rule = f"threshold {prediction.threshold:.3g}: {prediction.threshold_from}"
    probability = f"{prediction.shown} {prediction.shown_probability:.3f}"
    return f"Probability of {probability}, decision: {prediction.decision} ({rule})."


def _places(edges: NDArray[np.int64], values: NDArray[np.int64]) -> NDArray[np.intp]:
    return np.searchsorted(edges, values)


def caveats(heatmap: Heatmap) -> str:
    """Return what must not be overlooked in this heatmap; mostly nothing."""
    prediction = heatmap.prediction
    words: list[str] = []
    if not prediction.is_positive:
        shown = "all scores are set to 0" if heatmap.gated else RANKS_ONLY
        instead = "" if prediction.decision == prediction.shown else f", not {prediction.shown}"
        words.append(f"Called {prediction.decision}{instead}: {shown}.")
    elif not heatmap.score.any():
        words.append("The tiles do not differ: the heatmap is uninformative.")
    if prediction.part == "train":
        words.append("The model was trained on this slide.")
    if heatmap.model.endswith("_optimistic"):
        words.append("OPTIMISTIC: the model was chosen with the test slides.")
    return " ".join(words)


def model_words(heatmap: Heatmap) -> str:
    """Return the model, and whether the slide was new to it."""
    prediction = heatmap.prediction
    trainings = f", mean of {len(prediction.seeds)} trainings" if len(prediction.seeds) > 1 else ""
    split = f", split {prediction.split}" if prediction.split else ""
    return f"Model {heatmap.model}{split}{trainings}. {PARTS.get(prediction.part, prediction.part)}"


def printable(text: str) -> str:
    """In one line, without characters that control or cannot be shown."""
    return " ".join("".join(" " if unicodedata.category(one)[0] in "CZ" else one for one in text).split())


def shortened(text: str, width: float, length: Callable[[str], float]) -> str:
    """Cut in the middle where it is too long: names of slides differ at their ends."""
    if length(text) <= width:
        return text
    fits, too_many = 0, len(text)
    while too_many - fits > 1:
        kept = (fits + too_many) // 2
        fits, too_many = (kept, too_many) if length(_without_middle(text, kept)) <= width else (fits, kept)
    return _without_middle(text, fits)


def _without_middle(text: str, kept: int) -> str:
    """With `kept` characters of it left, half of them on either side."""
    return f"{text[: kept - kept // 2].rstrip()}…{text[len(text) - kept // 2 :].lstrip()}"


def wrapped(text: str, width: float, length: Callable[[str], float]) -> list[str]:
    """Lines no wider than `width`; a word that is wider is cut."""
    lines: list[str] = []
    for word in (shortened(word, width, length) for word in text.split()):
        if lines and length(f"{lines[-1]} {word}") <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


# ---------------------------------------------------------------------------------------------------- the page


@cache
def _font(size_px: int, bold: bool = False) -> ImageFont.FreeTypeFont:
    """DejaVu Sans, which comes with matplotlib, laid out in the same way on every machine."""
    name = "DejaVuSans-Bold.ttf" if bold else "DejaVuSans.ttf"
    path = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / name
    return ImageFont.truetype(str(path), size_px, layout_engine=ImageFont.Layout.BASIC)


@dataclass(frozen=True)
class _Line:
    text: str
    font: ImageFont.FreeTypeFont
    color: str = INK

    def folded(self, width: float) -> list[_Line]:
        return [_Line(text, self.font, self.color) for text in wrapped(self.text, width, self.font.getlength)]

    @property
    def height(self) -> int:
        return round(self.font.size * 1.35)


@dataclass(frozen=True)
class _Block:
    """A part of the foot of the page."""

    width: int
    draw: Callable[[ImageDraw.ImageDraw, int, int], None]
    """With a pen, at (left, top)."""


@dataclass(frozen=True)
class _View:
    """Which part of a slide a picture shows."""

    origin_l0: tuple[float, float]
    mpp: float
    slide_mpp: float

    def to_px(self, points_l0: NDArray[np.float64]) -> NDArray[np.float64]:
        """Points as pens take them: whole numbers are the centres of pixels."""
        return (points_l0 - self.origin_l0) * (self.slide_mpp / self.mpp) - 0.5


def draw_overlay(
    heatmap: Heatmap,
    thumbnail: Pixels,
    thumbnail_mpp: float,
    *,
    colors: Colors = "red",
    annotations: Sequence[Annotation] = (),
    lesions: Sequence[Lesion] = (),
    box_l0: BoxL0 | None = None,
    title: str = "",
    frame_l0: BoxL0 | None = None,
    beside: bool = False,
) -> Image.Image:
    """Draw the page for one heatmap.

    `thumbnail` shows `box_l0` of the slide, or all of it, at `thumbnail_mpp`. `annotations` are drawn, and `lesions`,
    regions that were found. `title` stands for the slide's name. `frame_l0` marks a region that another picture
    enlarges. `beside` puts the tissue without tiles to the left.
    """
    origin = (0.0, 0.0) if box_l0 is None else box_l0[:2]
    view = _View(origin, thumbnail_mpp, heatmap.frame.slide_mpp)
    height, width = thumbnail.shape[:2]
    size = max(13, round(max(width * (1 + beside), height) / 72))
    marks = _marks(annotations, lesions, frame_l0)
    panels = [thumbnail] if beside else []
    panels.append(paint_tiles(heatmap, thumbnail, thumbnail_mpp, colors, origin))
    tile_px = heatmap.frame.extent_l0 * heatmap.frame.slide_mpp / thumbnail_mpp
    shown = [_marked(Image.fromarray(panel), marks, view, _line_px(size, tile_px)) for panel in panels]
    page_width = max(sum(panel.width for panel in shown) + size // 2 * (len(shown) - 1), 30 * size)

    head = _head(heatmap, title or heatmap.slide, page_width, size)
    tissue = _mean_under(heatmap, thumbnail, view)
    ground = tint(tissue, np.zeros((), np.int64), colors)
    blocks = [
        _scale_block(thumbnail_mpp, width, size),
        _color_block(colors, tissue, size, min(12 * size, page_width // 3)),
    ]
    blocks += [_legend_block(mark, size, ground) for mark in _legend(marks)]
    text = f"{printable(score_words(heatmap))} {NOTICE}"
    foot = _Line(text, _font(round(size * 0.85)), GREY).folded(page_width)
    return _page(shown, head, blocks, foot, page_width, size)


def draw_layer(
    heatmap: Heatmap,
    size_px: tuple[int, int],
    mpp: float,
    *,
    colors: Colors = "red",
    annotations: Sequence[Annotation] = (),
    lesions: Sequence[Lesion] = (),
) -> Image.Image:
    """Tiles and lines alone, transparent (RGBA) and without words: laid over a thumbnail of `size_px` at `mpp`.

    Heatmaps of many models then share one thumbnail. The result looks as `paint_tiles` does, to one grey level.
    """
    raster = Raster.over(heatmap, size_px, mpp / heatmap.frame.slide_mpp)
    entry = np.concatenate([raster.rows(top, bottom) for top, bottom in raster.bands()])
    if _has_lines(heatmap, mpp):
        for x0, y0, x1, y1 in raster.boxes_px:
            entry[y0, x0:x1] |= _DARKENED
            entry[y0 + 1 : y1, x0] |= _DARKENED
    layer = Image.fromarray(_layer_table(colors)[entry])
    view = _View((0.0, 0.0), mpp, heatmap.frame.slide_mpp)
    return _marked(layer, _marks(annotations, lesions, None), view, 1)


def draw_panel(
    heatmap: Heatmap,
    thumbnail: Pixels,
    thumbnail_mpp: float,
    *,
    annotations: Sequence[Annotation] = (),
    lesions: Sequence[Lesion] = (),
    box_l0: BoxL0 | None = None,
    frame_l0: BoxL0 | None = None,
    painted: bool = True,
) -> Image.Image:
    """Draw the tissue with tiles (where `painted`) and lines and without words; arguments as for `draw_overlay`."""
    origin = (0.0, 0.0) if box_l0 is None else box_l0[:2]
    view = _View(origin, thumbnail_mpp, heatmap.frame.slide_mpp)
    pixels = paint_tiles(heatmap, thumbnail, thumbnail_mpp, "red", origin) if painted else thumbnail
    line = max(1, round(max(pixels.shape[:2]) / 220))
    return _marked(Image.fromarray(pixels), _marks(annotations, lesions, frame_l0), view, line)


_DARKENED = 512
"""Added to the index of pixels on the edge of a tile."""


@cache
def _layer_table(colors: Colors) -> Pixels:
    """(1024, 4) colour and opacity of an index, and from `_DARKENED` on of one on the edge of a tile."""
    table = np.zeros((2 * _DARKENED, 4), np.uint8)
    color, opacity = color_table(colors).astype(np.float64), opacity_table(colors).astype(np.float64)
    for start, kept in ((0, 1.0), (_DARKENED, LINE_SHADE)):
        # kept * (under + (color - under) * opacity), as a colour laid over what is under it
        covered = 1 - kept * (1 - opacity)
        rows = slice(start, start + len(color))
        table[rows, :3] = np.rint(color * (kept * opacity / np.maximum(covered, 1e-9))[:, None])
        table[rows, 3] = np.rint(255 * covered)
    table.setflags(write=False)
    return table


def _head(heatmap: Heatmap, title: str, width: int, size: int) -> list[_Line]:
    name = _Line(printable(title), _font(round(size * 1.3), bold=True))
    short = _Line(shortened(name.text, width, name.font.getlength), name.font)
    plain = [_Line(printable(words), _font(size)) for words in (prediction_words(heatmap), model_words(heatmap))]
    alarm = _Line(printable(caveats(heatmap)), _font(size, bold=True), ALARM)
    return [short, *(line for text in (*plain, alarm) for line in text.folded(width))]


def _page(
    panels: list[Image.Image], head: list[_Line], blocks: list[_Block], foot: list[_Line], width: int, size: int
) -> Image.Image:
    """Everything below each other, with a margin."""
    margin, gap = size, size // 2
    rows = _rows(blocks, width, 2 * size)
    row_height = round(2.6 * size)
    panels_top = margin + sum(line.height for line in head) + gap
    rows_top = panels_top + panels[0].height + size
    foot_top = rows_top + row_height * len(rows)
    page = Image.new("RGB", (width + 2 * margin, foot_top + sum(line.height for line in foot) + margin // 2), PAPER)
    pen = ImageDraw.Draw(page)
    _write(pen, head, margin, margin)
    left = margin
    for panel in panels:
        pen.rectangle((left - 1, panels_top - 1, left + panel.width, panels_top + panel.height), outline="#d0d0d0")
        page.paste(panel, (left, panels_top))
        left += panel.width + gap
    for k, row in enumerate(rows):
        left = margin
        for block in row:
            block.draw(pen, left, rows_top + k * row_height)
            left += block.width + 2 * size
    _write(pen, foot, margin, foot_top)
    return page


def _rows(blocks: list[_Block], width: int, gap: int) -> list[list[_Block]]:
    """As many blocks in a row as fit."""
    rows: list[list[_Block]] = [[]]
    for block in blocks:
        if rows[-1] and sum(one.width + gap for one in rows[-1]) + block.width > width:
            rows.append([])
        rows[-1].append(block)
    return rows


def _write(pen: ImageDraw.ImageDraw, lines: list[_Line], left: int, top: int) -> None:
    for line in lines:
        pen.text((left, top), line.text, font=line.font, fill=line.color)
        top += line.height


# ---------------------------------------------------------------------------------------------------- bar and legend


def _scale_block(mpp: float, width_px: int, size: int) -> _Block:
    microns, words = scale_bar(mpp, max(width_px / 4, 5 * size))
    length = max(1, round(microns / mpp))

    def draw(pen: ImageDraw.ImageDraw, left: int, top: int) -> None:
        pen.rectangle((left, top, left + length - 1, top + size // 3), fill=INK)
        pen.text((left, top + size * 0.6), words, font=_font(size), fill=INK)

    return _Block(max(length, math.ceil(_font(size).getlength(words))), draw)


def _color_block(colors: Colors, tissue: Pixels, size: int, width: int) -> _Block:
    """The colours as they look on the tissue of this slide."""
    index = np.rint(np.linspace(0, 255, width)).astype(np.int64)[None]
    strip = tint(np.broadcast_to(tissue, (1, width, 3)).astype(np.uint8), index, colors)[0]
    font = _font(size)

    def draw(pen: ImageDraw.ImageDraw, left: int, top: int) -> None:
        for k, color in enumerate(strip):
            pen.line((left + k, top, left + k, top + size - 1), fill=_rgb(color))
        for share, words, anchor in ((0, "0", "la"), (0.5, "score", "ma"), (1, "1", "ra")):
            pen.text((left + share * (width - 1), top + size * 1.15), words, font=font, fill=INK, anchor=anchor)

    return _Block(width, draw)


def _mean_under(heatmap: Heatmap, thumbnail: Pixels, view: _View) -> Pixels:
    """Mean colour of the tiles' pixels; a pale pink where there are none."""
    height, width = thumbnail.shape[:2]
    raster = Raster.over(heatmap, (width, height), view.mpp / view.slide_mpp, view.origin_l0)
    total, count = np.zeros(3), 0
    for top, bottom in raster.bands():
        inside = raster.rows(top, bottom) != NO_TILE
        by_column = (thumbnail[top:bottom] * inside[..., None]).sum(axis=0, dtype=np.uint32)
        total, count = total + by_column.sum(axis=0), count + np.count_nonzero(inside)
    return np.rint(total / count if count else np.array([225, 190, 210])).astype(np.uint8)


# ---------------------------------------------------------------------------------------------------- lines


@dataclass(frozen=True)
class _Mark:
    words: str
    color: str
    lines_l0: tuple[NDArray[np.float64], ...]
    shape: str = "polygon"


def _marks(annotations: Sequence[Annotation], lesions: Sequence[Lesion], frame_l0: BoxL0 | None) -> list[_Mark]:
    """Return what is drawn over the tiles; annotations last, since they are the ground truth."""
    words = {"tumour": ("annotated", ANNOTATED), "excluded": ("annotated: left out", EXCLUDED)}
    marks = [_Mark("found by the model", FOUND, lesion.annotation.rings) for lesion in lesions]
    for kind in ("other", "excluded", "tumour"):
        for each in annotations:
            if each.kind == kind:
                label, color = words.get(kind, (f"annotated: {printable(each.group) or 'no class'}", OTHER))
                marks.append(_Mark(label, color, each.rings, each.shape))
    if frame_l0 is not None:
        x0, y0, x1, y1 = frame_l0
        corners = np.array([(x0, y0), (x1, y0), (x1, y1), (x0, y1)], np.float64)
        marks.append(_Mark("enlarged in the zoom picture", FRAME, (corners,)))
    return marks


def _line_px(size: int, tile_px: float = math.inf) -> int:
    """Width of lines beside words of this size; thin where they would cover small tiles."""
    return max(1, int(min(size / 6.5, tile_px / 6)))


def _strokes(width: int, color: str) -> tuple[tuple[int, str], ...]:
    """A bright line in a dark casing, which shows on every colour."""
    return (width + 2 * max(1, width // 2), INK), (width, color)


def _marked(panel: Image.Image, marks: list[_Mark], view: _View, width: int) -> Image.Image:
    """Draw into the panel."""
    pen = ImageDraw.Draw(panel)
    for mark in marks:
        lines = [_thinned(view.to_px(line)) for line in mark.lines_l0 if len(line)]
        for line_width, color in _strokes(width, mark.color):
            for line in lines:
                if mark.shape == "points":
                    for x, y in line:
                        pen.ellipse((x - line_width, y - line_width, x + line_width, y + line_width), fill=color)
                else:
                    line = line if mark.shape == "line" else [*line, line[0]]
                    pen.line(line, fill=color, width=line_width, joint="curve")
    return panel


def _thinned(points: NDArray[np.float64]) -> list[tuple[float, float]]:
    """Leave out points in the same pixel as the one before: contours may have very many."""
    pixel = np.rint(points)
    kept = np.append(True, (pixel[1:] != pixel[:-1]).any(axis=1))
    return [(float(x), float(y)) for x, y in points[kept]]


def _legend(marks: list[_Mark]) -> list[_Mark]:
    """One of each kind, annotations first."""
    kinds = {mark.words: mark for mark in marks}
    return sorted(kinds.values(), key=lambda mark: [ANNOTATED, EXCLUDED, OTHER, FOUND, FRAME].index(mark.color))


def _legend_block(mark: _Mark, size: int, ground: Pixels) -> _Block:
    """A piece of the line on the colour of tissue, and what it means."""
    font, sample = _font(size), 2 * size
    words = shortened(mark.words, 16 * size, font.getlength)

    def draw(pen: ImageDraw.ImageDraw, left: int, top: int) -> None:
        middle = top + size // 2
        pen.rectangle((left, top, left + sample, top + size), fill=_rgb(ground))
        for line_width, color in _strokes(_line_px(size), mark.color):
            pen.line((left, middle, left + sample, middle), fill=color, width=line_width)
        pen.text((left + sample + size // 2, middle), words, font=font, fill=INK, anchor="lm")

    return _Block(sample + size // 2 + math.ceil(font.getlength(words)), draw)


def _rgb(color: Pixels) -> tuple[int, int, int]:
    red, green, blue = (int(value) for value in color)
    return red, green, blue


# ---------------------------------------------------------------------------------------------------- files


def zoom_box(heatmap: Heatmap, lesions: Sequence[Lesion] = ()) -> BoxL0 | None:
    """Return the square around the highest-scoring lesion, else tile; None where no tile has a score above 0."""
    if not len(heatmap) or heatmap.score.max() <= 0:
        return None
    frame = heatmap.frame
    least, most = (tiles * frame.extent_l0 for tiles in ZOOM_TILES)
    centre, edge = heatmap.centres_l0[highest_scoring_tile(heatmap)], least
    if lesions:
        highest = max(lesions, key=lambda lesion: (lesion.score, lesion.area_mm2))
        low, high = highest.annotation.polygon.min(axis=0), highest.annotation.polygon.max(axis=0)
        edge = max(float((high - low).max()) + 4 * frame.extent_l0, least)
        # Of a lesion too large to be enlarged, the part around its highest-scoring tile is shown.
        centre = (low + high) / 2 if edge <= most else np.array(highest.peak_l0)
    edge = min(edge, most, *frame.size_l0)
    x0, y0 = (
        round(float(np.clip(c - edge / 2, 0, size - edge))) for c, size in zip(centre, frame.size_l0, strict=True)
    )
    return x0, y0, x0 + math.floor(edge), y0 + math.floor(edge)


def write_overlays(
    folder: Path,
    heatmap: Heatmap,
    slide: Slide,
    settings: LocalizeSettings = LocalizeSettings(),
    annotations: Sequence[Annotation] = (),
    lesions: Sequence[Lesion] = (),
) -> list[Path]:
    """Write `<slide>_<colours>.png` of the whole slide and `<slide>_zoom_<colours>.png` of its highest-scoring region.

    Without any score above 0 there is no such region: no zoom is written, and one of an earlier run is removed.
    """
    _check_slide(heatmap, slide)
    mpp = max(max(slide.size_l0) * slide.mpp / settings.picture_px, slide.mpp)
    box = zoom_box(heatmap, lesions)
    whole, part = slide.thumbnail(mpp), None
    part_mpp = mpp
    if box is not None:
        part_mpp = max((box[2] - box[0]) * slide.mpp / min(settings.picture_px // 2, ZOOM_PX), slide.mpp)
        size_px = size_at_mpp((round(box[2] - box[0]), round(box[3] - box[1])), slide.mpp, part_mpp)
        part = slide.read_region(box[0], box[1], size_px, part_mpp)
    draw = partial(draw_overlay, heatmap, annotations=annotations, lesions=lesions)
    pages: dict[Path, Callable[[], Image.Image]] = {}
    for colors in settings.colors:
        pages[folder / f"{heatmap.slide}_{colors}.png"] = partial(draw, whole, mpp, colors=colors, frame_l0=box)
        zoom = folder / f"{heatmap.slide}_zoom_{colors}.png"
        if part is None:
            zoom.unlink(missing_ok=True)
        else:
            pages[zoom] = partial(draw, part, part_mpp, colors=colors, box_l0=box, beside=True)
    # Packing a PNG takes as long as drawing it, and Python's lock is not held meanwhile.
    with ThreadPoolExecutor(max(len(pages), 1)) as pool:
        return list(pool.map(_save, pages, pages.values()))


def _check_slide(heatmap: Heatmap, slide: Slide) -> None:
    frame = heatmap.frame
    if slide.size_l0 != frame.size_l0 or not math.isclose(slide.mpp, frame.slide_mpp, rel_tol=1e-3):
        raise SlideError(
            f"{slide.name}: not the slide of the heatmap {heatmap.slide}",
            f"it has {slide.size_l0[0]} x {slide.size_l0[1]} px of {slide.mpp:g} um, the heatmap "
            f"{frame.size_l0[0]} x {frame.size_l0[1]} of {frame.slide_mpp:g}",
            "Correct the slide's path or mpp in cohort.csv, or tile, embed and localize it again",
            code="heatmap-of-other-slide",
        )


def _save(path: Path, draw_page: Callable[[], Image.Image]) -> Path:
    page = draw_page()
    with atomic_path(path) as temporary:
        # Tissue has no repetitions but runs: searching for others takes half of the time and saves 3 % of the bytes.
        page.save(temporary, "PNG", compress_type=zlib.Z_RLE)
    return path
