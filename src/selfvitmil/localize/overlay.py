"""Pictures of maps for people: the slide, its tiles tinted by their score, and all that is needed to read it.

A map and a picture of the slide come in, a page goes out: caption, the tinted slide, scale bar, legend, colour bar. No
word covers any tissue. Tiles are squares with hard edges, never blurred: what a model says, it says of whole tiles.
Where tiles overlap, the mean of their scores is shown.

| colours              | a tile is covered by                                             |
|----------------------|------------------------------------------------------------------|
| `red`                | a dark, transparent square, the redder the higher its score      |
| `inferno`, `viridis` | the colour of its score, the more transparent the lower it is    |

Equal input gives equal bytes.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import matplotlib
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from selfvitmil.annotations import Annotation
from selfvitmil.errors import SlideError
from selfvitmil.geometry import size_at_mpp
from selfvitmil.localize.lesions import RANKS_ONLY, Lesion, hottest_tile
from selfvitmil.localize.maps import SlideMap
from selfvitmil.localize.raster import NO_TILE, Colors, Pixels, Raster, paint_tiles, tint
from selfvitmil.settings import LocalizeSettings
from selfvitmil.slides import Slide
from selfvitmil.store.files import atomic_path

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


# ---------------------------------------------------------------------------------------------------- words


def scale_bar(mpp: float, most_px: float) -> tuple[float, str]:
    """Microns, and words for them: the longest of 1, 2, 5, 10, 20 ... that takes `most_px` pixels or less."""
    most = mpp * most_px * (1 + 1e-9)
    unit = 10.0 ** math.floor(math.log10(most))
    microns = max(step * unit for step in (1, 2, 5) if step * unit <= most)
    return microns, f"{microns / 1000:g} mm" if microns >= 1000 else f"{microns:g} µm"


def score_words(slide_map: SlideMap) -> str:
    """What the colours mean."""
    kind, scale = KINDS.get(slide_map.kind, slide_map.kind), SCALES.get(slide_map.scale, slide_map.scale)
    tile = f"Tiles of {slide_map.frame.extent_l0 * slide_map.frame.slide_mpp:.3g} µm."
    return f"Score: evidence for {slide_map.verdict.shown}, by {kind}; {scale}. {tile}"


def shown_words(slide_map: SlideMap) -> str:
    """What the heatmap shows, and why that and nothing else."""
    why = slide_map.details.get("shown_because", "")
    return f"{KINDS.get(slide_map.kind, slide_map.kind)}{f': {why}' if why else ''}"


def verdict_words(slide_map: SlideMap) -> str:
    """Probability, decision, and where its threshold came from."""
    verdict = slide_map.verdict
    if verdict.threshold is None:
        rule = "the most probable class" if not verdict.threshold_from else verdict.threshold_from
    else:
        rule = f"threshold {verdict.threshold:.3g}: {verdict.threshold_from}"
    return f"Probability of {verdict.shown} {verdict.shown_probability:.3f}, decision: {verdict.decision} ({rule})."


def caveats(slide_map: SlideMap) -> str:
    """What must not be overlooked in this map; mostly nothing."""
    verdict, words = slide_map.verdict, []
    if not verdict.is_positive:
        shown = "all scores are set to 0" if slide_map.gated else RANKS_ONLY
        instead = "" if verdict.decision == verdict.shown else f", not {verdict.shown}"
        words.append(f"Called {verdict.decision}{instead}: {shown}.")
    elif not slide_map.score.any():
        words.append("The tiles do not differ: the map points nowhere.")
    if verdict.part == "train":
        words.append("The model was trained on this slide.")
    if slide_map.model.endswith("_optimistic"):
        words.append("OPTIMISTIC: the model was chosen with the test slides.")
    return " ".join(words)


def model_words(slide_map: SlideMap) -> str:
    """Whose map it is, and whether the slide was new to the model."""
    verdict = slide_map.verdict
    trainings = f", mean of {len(verdict.seeds)} trainings" if len(verdict.seeds) > 1 else ""
    split = f", split {verdict.split}" if verdict.split else ""
    return f"Model {slide_map.model}{split}{trainings}. {PARTS.get(verdict.part, verdict.part)}"


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
    slide_map: SlideMap,
    thumbnail: Pixels,
    thumbnail_mpp: float,
    *,
    colors: Colors = "red",
    outlines: Sequence[Annotation] = (),
    lesions: Sequence[Lesion] = (),
    box_l0: BoxL0 | None = None,
    title: str = "",
    frame_l0: BoxL0 | None = None,
    beside: bool = False,
) -> Image.Image:
    """The page for one map.

    `thumbnail` shows `box_l0` of the slide, or all of it, at `thumbnail_mpp`. `outlines` are annotations, `lesions`
    regions that were found. `title` stands for the slide's name. `frame_l0` marks a region that another picture
    enlarges. `beside` puts the tissue without tiles to the left.
    """
    origin = (0.0, 0.0) if box_l0 is None else box_l0[:2]
    view = _View(origin, thumbnail_mpp, slide_map.frame.slide_mpp)
    height, width = thumbnail.shape[:2]
    size = max(13, round(max(width * (1 + beside), height) / 72))
    marks = _marks(outlines, lesions, frame_l0)
    panels = [thumbnail] if beside else []
    panels.append(paint_tiles(slide_map, thumbnail, thumbnail_mpp, colors, origin))
    tile_px = slide_map.frame.extent_l0 * slide_map.frame.slide_mpp / thumbnail_mpp
    shown = [_marked(Image.fromarray(panel), marks, view, _line_px(size, tile_px)) for panel in panels]
    page_width = max(sum(panel.width for panel in shown) + size // 2 * (len(shown) - 1), 30 * size)

    head = _head(slide_map, title or slide_map.slide, page_width, size)
    tissue = _mean_under(slide_map, thumbnail, view)
    ground = tint(tissue, np.zeros((), np.int64), colors)
    blocks = [
        _scale_block(thumbnail_mpp, width, size),
        _color_block(colors, tissue, size, min(12 * size, page_width // 3)),
    ]
    blocks += [_legend_block(mark, size, ground) for mark in _legend(marks)]
    text = f"{printable(score_words(slide_map))} {NOTICE}"
    foot = _Line(text, _font(round(size * 0.85)), GREY).folded(page_width)
    return _page(shown, head, blocks, foot, page_width, size)


def draw_panel(
    slide_map: SlideMap,
    thumbnail: Pixels,
    thumbnail_mpp: float,
    *,
    colors: Colors = "red",
    outlines: Sequence[Annotation] = (),
    lesions: Sequence[Lesion] = (),
) -> Image.Image:
    """The tinted slide and its lines without any word, for pictures that are too small to hold some."""
    view = _View((0.0, 0.0), thumbnail_mpp, slide_map.frame.slide_mpp)
    panel = paint_tiles(slide_map, thumbnail, thumbnail_mpp, colors, view.origin_l0)
    return _marked(Image.fromarray(panel), _marks(outlines, lesions, None), view, 1)


def _head(slide_map: SlideMap, title: str, width: int, size: int) -> list[_Line]:
    name = _Line(printable(title), _font(round(size * 1.3), bold=True))
    short = _Line(shortened(name.text, width, name.font.getlength), name.font)
    plain = [_Line(printable(words), _font(size)) for words in (verdict_words(slide_map), model_words(slide_map))]
    alarm = _Line(printable(caveats(slide_map)), _font(size, bold=True), ALARM)
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


def _mean_under(slide_map: SlideMap, thumbnail: Pixels, view: _View) -> Pixels:
    """Mean colour of the tiles' pixels; a pale pink where there are none."""
    height, width = thumbnail.shape[:2]
    raster = Raster.over(slide_map, (width, height), view.mpp / view.slide_mpp, view.origin_l0)
    total, count = np.zeros(3), 0
    for top, bottom in raster.bands():
        under = thumbnail[top:bottom][raster.rows(top, bottom) != NO_TILE]
        total, count = total + under.sum(axis=0, dtype=np.float64), count + len(under)
    return np.rint(total / count if count else np.array([225, 190, 210])).astype(np.uint8)


# ---------------------------------------------------------------------------------------------------- lines


@dataclass(frozen=True)
class _Mark:
    words: str
    color: str
    lines_l0: tuple[NDArray[np.float64], ...]
    shape: str = "polygon"


def _marks(outlines: Sequence[Annotation], lesions: Sequence[Lesion], frame_l0: BoxL0 | None) -> list[_Mark]:
    """What is drawn over the tiles; annotations last, since they are the truth."""
    words = {"tumour": ("annotated", ANNOTATED), "excluded": ("annotated: left out", EXCLUDED)}
    marks = [_Mark("found by the model", FOUND, lesion.annotation.rings) for lesion in lesions]
    for kind in ("other", "excluded", "tumour"):
        for outline in outlines:
            if outline.kind == kind:
                label, color = words.get(kind, (f"annotated: {printable(outline.group) or 'no class'}", OTHER))
                marks.append(_Mark(label, color, outline.rings, outline.shape))
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
    """Without points that lie in the same pixel as the one before: outlines may have very many."""
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


def zoom_box(slide_map: SlideMap, lesions: Sequence[Lesion] = ()) -> BoxL0 | None:
    """The square around the hottest lesion, else the hottest tile; None where no tile has any score."""
    if not len(slide_map) or slide_map.score.max() <= 0:
        return None
    frame = slide_map.frame
    least, most = (tiles * frame.extent_l0 for tiles in ZOOM_TILES)
    centre, edge = slide_map.centres_l0[hottest_tile(slide_map)], least
    if lesions:
        hottest = max(lesions, key=lambda lesion: (lesion.score, lesion.area_mm2))
        low, high = hottest.annotation.polygon.min(axis=0), hottest.annotation.polygon.max(axis=0)
        edge = max(float((high - low).max()) + 4 * frame.extent_l0, least)
        # Of a lesion too large to be enlarged, the part around its hottest tile is shown.
        centre = (low + high) / 2 if edge <= most else np.array(hottest.peak_l0)
    edge = min(edge, most, *frame.size_l0)
    x0, y0 = (
        round(float(np.clip(c - edge / 2, 0, size - edge))) for c, size in zip(centre, frame.size_l0, strict=True)
    )
    return x0, y0, x0 + math.floor(edge), y0 + math.floor(edge)


def write_overlays(
    folder: Path,
    slide_map: SlideMap,
    slide: Slide,
    settings: LocalizeSettings = LocalizeSettings(),
    outlines: Sequence[Annotation] = (),
    lesions: Sequence[Lesion] = (),
) -> list[Path]:
    """Write `<slide>_<colours>.png` of the whole slide and `<slide>_zoom_<colours>.png` of its hottest region.

    A map without any score above 0 has no hottest region: no zoom is written, and one of an earlier run is removed.
    """
    _check_slide(slide_map, slide)
    mpp = max(max(slide.size_l0) * slide.mpp / settings.picture_px, slide.mpp)
    box = zoom_box(slide_map, lesions)
    whole, part = slide.thumbnail(mpp), None
    part_mpp = mpp
    if box is not None:
        part_mpp = max((box[2] - box[0]) * slide.mpp / min(settings.picture_px // 2, ZOOM_PX), slide.mpp)
        size_px = size_at_mpp((round(box[2] - box[0]), round(box[3] - box[1])), slide.mpp, part_mpp)
        part = slide.read_region(box[0], box[1], size_px, part_mpp)
    draw = partial(draw_overlay, slide_map, outlines=outlines, lesions=lesions)
    pages: dict[Path, Callable[[], Image.Image]] = {}
    for colors in settings.colors:
        pages[folder / f"{slide_map.slide}_{colors}.png"] = partial(draw, whole, mpp, colors=colors, frame_l0=box)
        zoom = folder / f"{slide_map.slide}_zoom_{colors}.png"
        if part is None:
            zoom.unlink(missing_ok=True)
        else:
            pages[zoom] = partial(draw, part, part_mpp, colors=colors, box_l0=box, beside=True)
    # Packing a PNG takes as long as drawing it, and Python's lock is not held meanwhile.
    with ThreadPoolExecutor(max(len(pages), 1)) as pool:
        return list(pool.map(lambda path: _save(pages[path](), path), pages))


def _check_slide(slide_map: SlideMap, slide: Slide) -> None:
    frame = slide_map.frame
    if slide.size_l0 != frame.size_l0 or not math.isclose(slide.mpp, frame.slide_mpp, rel_tol=1e-3):
        raise SlideError(
            f"{slide.name}: not the slide of the map {slide_map.slide}",
            f"it has {slide.size_l0[0]} x {slide.size_l0[1]} px of {slide.mpp:g} um, the map "
            f"{frame.size_l0[0]} x {frame.size_l0[1]} of {frame.slide_mpp:g}",
            "Correct the slide's path or mpp in cohort.csv, or tile, embed and localize it again",
        )


def _save(page: Image.Image, path: Path) -> Path:
    with atomic_path(path) as temporary:
        page.save(temporary, "PNG", compress_level=3)  # tissue does not pack better at 6, which takes twice as long
    return path
