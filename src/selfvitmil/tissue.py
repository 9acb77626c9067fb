"""Where on the glass is tissue? A thumbnail comes in, a boolean mask goes out (True = tissue).

Grey Otsu on a thumbnail of fixed microns per pixel, with the traps of the field closed: scanners' pure black and white
padding is left out of the histogram; a blank slide is an error, not a slide full of tissue; a slide cut so tightly
that no glass is left counts as all tissue, and says so; pen marks are measured. The mask's outline can be written as
GeoJSON, edited in QuPath and given back (`tissue.method = "own"`).
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from scipy import ndimage

from selfvitmil import annotations
from selfvitmil.errors import TissueError
from selfvitmil.geometry import size_at_mpp
from selfvitmil.settings import TissueSettings
from selfvitmil.slides import Slide

Mask = NDArray[np.bool_]
Pixels = NDArray[np.uint8]

# Glass is bright and has next to no colour (chroma: largest minus smallest channel).
GLASS_MIN_GREY = 200
GLASS_MAX_CHROMA = 15
OUTLINE_SUFFIXES, PICTURE_SUFFIXES = (".geojson", ".geojson.gz", ".xml"), (".png", ".tif", ".tiff")
"""Files of own masks, in the order in which they are looked for."""


@dataclass(frozen=True, eq=False)
class Tissue:
    """A tissue mask with its frame and how it came about."""

    mask: Mask
    mpp: float
    """Microns per mask pixel."""
    threshold: float | None
    """Grey level below which a pixel is tissue; None where no such threshold made the mask."""
    pen_fraction: float
    """Share of the thumbnail that looks drawn on."""
    thumbnail: Pixels
    """The picture the mask was found on, in the same frame."""
    warnings: tuple[str, ...] = ()

    @property
    def area_mm2(self) -> float:
        return float(self.mask.sum()) * self.mpp**2 / 1e6


def find_tissue(slide: Slide, settings: TissueSettings, name: str) -> Tissue:
    """The tissue of a slide; `name` is its name in the cohort, by which own masks are found."""
    mpp = slide.mpp * settings.thumbnail_downsample if settings.thumbnail_downsample else settings.mpp
    thumbnail = slide.thumbnail(mpp)
    if settings.method == "own":
        mask, threshold, warnings = _own_mask(slide, settings, name, mpp), None, ()
    else:
        mask, threshold, warnings = segment(thumbnail, settings, name)
        mask = clean(mask, mpp, settings.min_area_um2, settings.max_hole_um2)
    pen = pen_marks(thumbnail)
    pen_fraction = float(pen.mean())
    if settings.pen == "exclude":
        mask = mask & ~pen
    if pen_fraction > 0.001:
        done = (
            "cut out of the tissue"
            if settings.pen == "exclude"
            else "still part of it; tissue.pen = exclude cuts it out"
        )
        warnings += (f"{pen_fraction:.1%} of the slide looks like pen, {done}",)
    if not mask.any():
        raise TissueError(
            f"{slide.path.name}: no tissue found",
            f"no dark region of at least {settings.min_area_um2:g} um2 stands out from the glass",
            "Look at the slide; if it has tissue, lower tissue.min_contrast or tissue.min_area_um2, try "
            "tissue.method = saturation, or draw the outline in QuPath and give it with tissue.method = own",
        )
    return Tissue(mask, mpp, threshold, pen_fraction, thumbnail, warnings)


# ---------------------------------------------------------------------------------------------------- thresholds


def grey_of(pixels: Pixels) -> Pixels:
    """ITU-R 601 luma in 8 bits, as Pillow's "L"."""
    return np.asarray(Image.fromarray(pixels).convert("L"))


def chroma_of(pixels: Pixels) -> Pixels:
    """Largest minus smallest channel: 0 is grey, 255 a pure colour."""
    red, green, blue = pixels[..., 0], pixels[..., 1], pixels[..., 2]
    return np.maximum(np.maximum(red, green), blue) - np.minimum(np.minimum(red, green), blue)


def otsu_threshold(values: Pixels) -> float:
    """The t in 1..255 for which `values < t` and `values >= t` differ most (largest variance between classes)."""
    histogram = np.bincount(values.ravel(), minlength=256).astype(np.float64)
    levels = np.arange(256)
    below = np.concatenate([[0.0], np.cumsum(histogram)[:-1]])
    sum_below = np.concatenate([[0.0], np.cumsum(histogram * levels)[:-1]])
    total, sum_all = histogram.sum(), (histogram * levels).sum()
    with np.errstate(divide="ignore", invalid="ignore"):
        between = (sum_all * below - sum_below * total) ** 2 / (below * (total - below))
    between = np.nan_to_num(between, nan=0.0, posinf=0.0)
    # All thresholds in an empty stretch of the histogram are equally good: take the middle one.
    best = np.flatnonzero(between >= between.max() * (1 - 1e-12))
    return float(best.mean())


def segment(pixels: Pixels, settings: TissueSettings, name: str) -> tuple[Mask, float | None, tuple[str, ...]]:
    """Raw mask, grey threshold and warnings from a thumbnail, by Otsu's threshold on grey or on saturation."""
    grey = grey_of(pixels)
    real = ~(padding(pixels))
    if not real.any():
        raise TissueError(
            f"{name}: the slide is empty",
            "all of it is pure white or pure black, as scanners fill what they did not scan",
            "Leave it out of the cohort, or scan it again",
        )
    evidence = grey if settings.method == "otsu" else chroma_of(pixels)
    threshold = otsu_threshold(evidence[real])
    lower = evidence < threshold
    tissue = (lower if settings.method == "otsu" else ~lower) & real
    glass = real & ~tissue
    if _is_glass(pixels, glass):
        contrast = abs(float(evidence[glass].mean()) - float(evidence[tissue].mean())) if tissue.any() else 0.0
        if contrast < settings.min_contrast:
            raise TissueError(
                f"{name}: no tissue found",
                f"it differs from the glass by {contrast:.0f} grey levels only",
                f"Look at the slide; if this is tissue, lower tissue.min_contrast ({settings.min_contrast:g})",
            )
        return tissue, threshold if settings.method == "otsu" else None, ()
    # Otsu has split the tissue itself, because there is hardly any glass: take all that is not like glass.
    tissue = real & ((grey < GLASS_MIN_GREY) | (chroma_of(pixels) > GLASS_MAX_CHROMA))
    share = float(tissue.mean())
    return tissue, None, (f"hardly any glass in the picture, {share:.0%} of it was taken as tissue by colour alone",)


def padding(pixels: Pixels) -> Mask:
    """Pixels that no scanner saw: pure white or pure black (within what JPEG makes of it)."""
    return (pixels.min(axis=-1) >= 254) | (pixels.max(axis=-1) <= 3)


def _is_glass(pixels: Pixels, region: Mask) -> bool:
    """Whether a region looks like glass on the whole."""
    if not region.any():
        return False
    mean = pixels[region].mean(axis=0)
    return bool(mean.mean() >= GLASS_MIN_GREY and mean.max() - mean.min() <= GLASS_MAX_CHROMA)


# ---------------------------------------------------------------------------------------------------- shapes


def clean(mask: Mask, mpp: float, min_area_um2: float, max_hole_um2: float) -> Mask:
    """Without specks and with small holes filled, sizes in square microns."""
    without_specks = _drop_small(mask, min_area_um2 / mpp**2)
    return ~_drop_small(~without_specks, max_hole_um2 / mpp**2, keep_border=True)


def _drop_small(mask: Mask, min_pixels: float, keep_border: bool = False) -> Mask:
    labels: NDArray[np.int32]
    number: int
    labels, number = ndimage.label(mask)  # pyright: ignore[reportGeneralTypeIssues, reportAssignmentType]
    keep = np.bincount(labels.ravel(), minlength=number + 1) >= min_pixels
    if keep_border:  # what touches the border goes on outside, so its size is unknown
        for edge in (labels[0], labels[-1], labels[:, 0], labels[:, -1]):
            keep[edge] = True
    keep[0] = False
    return keep[labels]


def pen_marks(pixels: Pixels) -> Mask:
    """Pixels in colours that pens have and H&E does not: green, cyan, clear blue, and neutral near-black.

    Red pen is not told from blood. Small flecks (under 25 pixels) are ignored.
    """
    red, green, blue = (pixels[..., k].astype(np.int16) for k in range(3))
    strong = chroma_of(pixels) > 60
    greenish = strong & (green > red + 20) & (green >= blue - 40)
    bluish = strong & (blue > red + 60) & (green > red + 10)
    black = (pixels.max(axis=-1) < 60) & (chroma_of(pixels) < 20) & ~padding(pixels)
    return _drop_small(greenish | bluish | black, 25)


# ---------------------------------------------------------------------------------------------------- own masks


def own_mask_path(folder: Path, name: str) -> Path | None:
    """The file that `own` takes for a slide: outlines before pictures; None when there is none."""
    paths = (folder / f"{name}{suffix}" for suffix in (*OUTLINE_SUFFIXES, *PICTURE_SUFFIXES))
    return next((path for path in paths if path.exists()), None)


def _own_mask(slide: Slide, settings: TissueSettings, name: str, mpp: float) -> Mask:
    folder = settings.folder
    assert folder is not None  # StudySettings sees to it
    path = own_mask_path(folder, name)
    if path is None:
        raise TissueError(
            f"{name}: no tissue mask",
            f"the folder {folder.name} has no {name}.geojson, .xml, .png or .tif",
            "Add one for this slide, or take the slide out of the cohort",
        )
    if path.suffix in PICTURE_SUFFIXES:
        return _picture_mask(path, slide, mpp)
    return _outline_mask(path, slide, settings.exclude, mpp)


def _outline_mask(path: Path, slide: Slide, exclude: tuple[str, ...], mpp: float) -> Mask:
    regions = annotations.read_annotations(path)
    out = [region for region in regions if any(fnmatchcase(region.group, pattern) for pattern in exclude)]
    inside = [region for region in regions if region not in out]
    if not inside:
        raise TissueError(
            f"{path.name}: no region to take as tissue",
            "all its classes are excluded or it is empty",
            "Draw the tissue's outline in it, or take the slide out of the cohort",
        )
    frame = (slide.size_l0, slide.mpp, mpp)
    tissue, other = (
        annotations.to_mask(some, *frame, groups={region.group for region in some}) for some in (inside, out)
    )
    return tissue & ~other


def _picture_mask(path: Path, slide: Slide, mpp: float) -> Mask:
    """A picture of the whole slide, non-zero = tissue, brought to the thumbnail's frame by nearest pixel."""
    try:
        with Image.open(path) as image:
            picture = np.asarray(image.convert("L")) > 0
    except OSError as error:
        raise TissueError(
            f"{path.name}: cannot be read as a picture", str(error), "Save the mask as 8-bit PNG"
        ) from None
    height, width = picture.shape
    wanted, found = slide.size_l0[0] / slide.size_l0[1], width / height
    if abs(found / wanted - 1) > 0.02 + 1 / min(width, height):
        raise TissueError(
            f"{path.name}: the mask is {width} x {height}, the slide {slide.size_l0[0]} x {slide.size_l0[1]}",
            "their shapes differ, so the mask is of another slide or of a part of this one",
            "Export a mask of the whole slide at any one scale",
        )
    columns, rows = size_at_mpp(slide.size_l0, slide.mpp, mpp)
    x = np.minimum(((np.arange(columns) + 0.5) * mpp / slide.mpp / slide.size_l0[0] * width).astype(int), width - 1)
    y = np.minimum(((np.arange(rows) + 0.5) * mpp / slide.mpp / slide.size_l0[1] * height).astype(int), height - 1)
    return picture[np.ix_(y, x)]
