"""Quality of tiles by fixed rules, without training: pen, folds, bubbles, blood and defocus.

Colours and darkness are measured on a thumbnail of the slide at 8 um/px, in optical density relative to the slide's own
glass; defocus in each tile at 1 um/px. What is dark, red or blurred is so relative to the slide's own tissue, because
stain, section thickness and scanner differ more between slides than a fold or a blur changes a tile.

| kind     | which pixels (8 um/px) or tiles (1 um/px)                                                                |
|----------|----------------------------------------------------------------------------------------------------------|
| `pen`    | colours of markers: green, cyan, clear blue, near-black (`tissue.pen_marks`), and bright saturated red   |
| `fold`   | far darker than the slide's tissue: two or more layers (optical densities add up)                        |
| `blood`  | absorbs more blue and less red, for its green, than the slide's tissue: haemoglobin does                 |
| `bubble` | grey: the rim of an air bubble or the edge of the cover glass; stains always have a colour               |
| `blur`   | fine structure has far less energy than coarse structure, compared with the slide's other tiles          |

The score of a tile is the fraction of it that such pixels cover; for `blur` the sharpness relative to the slide's
median, where lower is worse. Related rules: Kothari et al. 2013 (folds), Janowczyk et al. 2019 (HistoQC).
"""

# scipy has no types.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from scipy import ndimage

from selfvitmil.geometry import box_fractions
from selfvitmil.settings import QUALITY_KINDS, QualityKind
from selfvitmil.slides import Slide
from selfvitmil.tiles import Mask, TileQuality
from selfvitmil.tissue import Tissue, chroma_of, grey_of, padding, pen_marks

Pixels = NDArray[np.uint8]
Floats = NDArray[np.float32]

THUMBNAIL_MPP = 8.0
SHARPNESS_MPP = 1.0
MIN_FRACTION: dict[QualityKind, float] = {"pen": 0.1, "fold": 0.2, "bubble": 0.2, "blood": 0.4}
"""Fraction of a tile from which it is flagged."""
MIN_SHARPNESS = 0.2
"""Sharpness relative to the slide's median below which a tile is flagged as blurred."""
MIN_GLASS = 150
"""Grey level that glass has at least; some cameras expose as darkly."""
MIN_OD = 0.08
"""Mean optical density from which a pixel is tissue."""


def measure_quality(slide: Slide, tissue: Tissue, boxes_l0: NDArray[np.float64]) -> TileQuality:
    """Measure tiles given as level-0 boxes (x0, y0, x1, y1)."""
    suits = tissue.mpp == THUMBNAIL_MPP
    thumbnail = tissue.thumbnail if suits else slide.thumbnail(THUMBNAIL_MPP)
    boxes = boxes_l0 * (slide.mpp / THUMBNAIL_MPP)
    found = artefacts(thumbnail)
    columns = {kind: box_fractions(pixels, boxes) for kind, pixels in found.items()}
    columns["blur"] = relative_sharpness(np.array([_sharpness_of(slide, box) for box in boxes_l0.tolist()]))
    flagged = {kind: columns[kind] >= least for kind, least in MIN_FRACTION.items()}
    flagged["blur"] = columns["blur"] < MIN_SHARPNESS
    stacked = (np.stack([values[kind] for kind in QUALITY_KINDS], axis=1) for values in (columns, flagged))
    scores, flags = stacked
    return TileQuality(scores.astype(np.float32), flags.astype(bool))


# ---------------------------------------------------------------------------------------------------- colours


def artefacts(thumbnail: Pixels) -> dict[QualityKind, Mask]:
    """Return the pixels of a thumbnail at 8 um/px that show each kind but `blur`; a pixel has one kind at most."""
    density = optical_density(thumbnail)
    mean = density.mean(axis=-1)
    red, green, blue = (density[..., k] for k in range(3))
    pen = pen_marks(thumbnail) | red_pen(thumbnail)
    near_pen = np.asarray(ndimage.binary_dilation(pen, iterations=2), dtype=bool)
    tissue = (mean > MIN_OD) & ~near_pen
    grey = tissue & (mean > 0.15) & (density.max(axis=-1) - density.min(axis=-1) < 0.2 * mean)
    fold = tissue & ~grey & (mean > upper_threshold(mean[tissue], 0.84, relative=0.7))
    redness = (blue - red) / np.maximum(green, 0.02)
    blood = tissue & (redness > upper_threshold(redness[tissue], 0.16, absolute=0.3))
    return {"pen": pen, "fold": fold, "bubble": grey, "blood": blood & ~fold}


def optical_density(pixels: Pixels) -> Floats:
    """Return -log10 of the transmitted light per channel, relative to the glass of this image where it has any."""
    grey, real = grey_of(pixels), ~padding(pixels)
    brightest = float(np.quantile(grey[real], 0.99)) if real.any() else 255.0
    glass = pixels[real & (grey >= brightest - 15) & (chroma_of(pixels) <= 25)]
    is_glass = brightest >= MIN_GLASS and len(glass) >= 0.003 * grey.size
    white = np.median(glass, axis=0) if is_glass else np.array([255.0] * 3)
    values = np.arange(256, dtype=np.float32)[:, None]
    table = -np.log10((values + 1) / (white + 1)).astype(np.float32)
    return np.stack([table[:, k][pixels[..., k]] for k in range(3)], axis=-1)


def red_pen(pixels: Pixels) -> Mask:
    """Return pixels as bright and saturated a red as markers have: both other colours are nearly absent."""
    red, green, blue = (pixels[..., k].astype(np.int16) for k in range(3))
    return (red > 150) & (red - np.maximum(green, blue) > 120) & (np.abs(green - blue) < 50)


def upper_threshold(values: NDArray[Any], side: float, relative: float = 0.0, absolute: float = 0.0) -> float:
    """Return the value above which pixels differ from a slide's usual tissue.

    At least so much above the median: a fraction of it (two layers have twice the density of one), or a difference. If
    the slide's own tissue varies much, as epidermis and dermis do, three times the distance from the median to the
    quantile `side`: 0.16 and 0.84 are one standard deviation of a normal distribution. The lower one stays the same
    where much of the slide is above the threshold.
    """
    if not len(values):
        return float("inf")
    middle, other = np.quantile(values, (0.5, side))
    return float(middle + max(relative * abs(middle), absolute, 3 * abs(other - middle)))


# ---------------------------------------------------------------------------------------------------- sharpness


def _sharpness_of(slide: Slide, box: Sequence[float]) -> float:
    mpp = max(SHARPNESS_MPP, slide.mpp)
    size = round((box[2] - box[0]) * slide.mpp / mpp)
    return sharpness(slide.read_tile(box[0], box[1], max(size, 32), mpp))


def sharpness(pixels: Pixels) -> float:
    """Return the energy of structures of 2 to 3 pixels relative to those of 8 to 12; NaN without such structure.

    Both are variances of a Laplacian, of the tile and of the tile at a quarter of its size. Their ratio does not depend
    on stain and contrast, and only little on the tissue, while a blur takes away the fine structure alone.
    """
    grey = pixels.mean(axis=-1, dtype=np.float32)
    edge = min(grey.shape) // 4 * 4
    coarse = grey[:edge, :edge].reshape(edge // 4, 4, edge // 4, 4).mean(axis=(1, 3))
    low = _laplacian_variance(coarse)
    return _laplacian_variance(grey) / low if low > 4.0 else float("nan")


def _laplacian_variance(grey: Floats) -> float:
    inner = grey[1:-1, 1:-1]
    return float((grey[:-2, 1:-1] + grey[2:, 1:-1] + grey[1:-1, :-2] + grey[1:-1, 2:] - 4 * inner).var())


def relative_sharpness(sharp: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return sharpness divided by its median over the slide; 1 where a tile has no structure."""
    known = np.isfinite(sharp)
    if not known.any():
        return np.ones_like(sharp)
    return np.where(known, sharp / max(float(np.median(sharp[known])), 1e-9), 1.0)


# ---------------------------------------------------------------------------------------------------- picture

EXAMPLES, EXAMPLE_PX, LABEL_PX = 8, 112, 90
"""Most tiles shown per kind, their edge, and the width of the column with the names of the kinds."""
SHEET_PX = LABEL_PX + EXAMPLES * EXAMPLE_PX
"""Width of the picture."""


def draw_examples(quality: TileQuality, read: Callable[[int], Pixels]) -> bytes:
    """Return a JPEG with a row for each kind: its worst tiles, which `read` returns by their rows."""
    sheet = Image.new("RGB", (SHEET_PX, len(QUALITY_KINDS) * EXAMPLE_PX), "white")
    pen = ImageDraw.Draw(sheet)
    for k, (kind, number) in enumerate(quality.counts().items()):
        pen.text((6, k * EXAMPLE_PX + EXAMPLE_PX // 2 - 12), f"{kind}\n{number} tiles", fill="black")
        rows = np.flatnonzero(quality.flagged[:, k])
        worst = quality.scores[rows, k] * (1 if kind == "blur" else -1)
        for place, row in enumerate(rows[np.argsort(worst, kind="stable")][:EXAMPLES].tolist()):
            tile = Image.fromarray(read(row)).resize((EXAMPLE_PX - 2, EXAMPLE_PX - 2), Image.Resampling.BOX)
            sheet.paste(tile, (LABEL_PX + place * EXAMPLE_PX, k * EXAMPLE_PX))
    content = io.BytesIO()
    sheet.save(content, "JPEG", quality=80)
    return content.getvalue()
