"""Tissue segmentation: a thumbnail in, a boolean mask out (True = tissue).

Otsu's threshold (Otsu 1979) on the grey levels of a thumbnail with fixed microns per pixel. Known problems are handled:
pure black and white padding is excluded from the histogram; a blank slide is an error, not a slide full of tissue; a
slide cropped so tightly that no glass is left counts as all tissue, with a warning; pen marks are measured. The contour
of the mask can be written as GeoJSON, edited in QuPath and used instead (`tissue.method = "own"`).
"""

# scipy has no types.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from scipy import ndimage

from selfvitmil.annotations import read_annotations, to_mask
from selfvitmil.errors import TissueError
from selfvitmil.geometry import size_at_mpp
from selfvitmil.settings import TissueSettings
from selfvitmil.slides import Slide

Mask = NDArray[np.bool_]
Pixels = NDArray[np.uint8]

# Glass is bright and almost colourless (chroma: largest minus smallest channel).
GLASS_MIN_GREY = 200
GLASS_MAX_CHROMA = 15
ANNOTATION_SUFFIXES, PICTURE_SUFFIXES = (".geojson", ".geojson.gz", ".xml"), (".png", ".tif", ".tiff")
"""Suffixes of user-supplied masks, in order of precedence."""


@dataclass(frozen=True, eq=False)
class Tissue:
    """A tissue mask with its resolution and how it was obtained."""

    mask: Mask
    mpp: float
    """Microns per mask pixel."""
    threshold: float | None
    """Grey level below which a pixel is tissue; None if the mask does not come from a threshold."""
    pen_fraction: float
    """Fraction of the thumbnail that looks like pen marks."""
    thumbnail: Pixels
    """The image that was segmented, in the same frame as the mask."""
    warnings: tuple[str, ...] = ()

    @property
    def area_mm2(self) -> float:
        """Area of the tissue in square millimetres."""
        return float(self.mask.sum()) * self.mpp**2 / 1e6


def find_tissue(slide: Slide, settings: TissueSettings, name: str) -> Tissue:
    """Return the tissue of a slide; `name` is its name in the cohort, by which user-supplied masks are found."""
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
            "Look at the slide. If it has tissue, lower tissue.min_contrast or tissue.min_area_um2, try "
            "tissue.method = saturation, or annotate the tissue in QuPath and use tissue.method = own",
            code="no-tissue",
        )
    return Tissue(mask, mpp, threshold, pen_fraction, thumbnail, warnings)


# ---------------------------------------------------------------------------------------------------- thresholds


def grey_of(pixels: Pixels) -> Pixels:
    """Return ITU-R 601 luma in 8 bits, like Pillow's mode "L"."""
    return np.asarray(Image.fromarray(pixels).convert("L"))


def chroma_of(pixels: Pixels) -> Pixels:
    """Return the largest minus the smallest channel: 0 is grey, 255 a pure colour."""
    red, green, blue = pixels[..., 0], pixels[..., 1], pixels[..., 2]
    return np.maximum(np.maximum(red, green), blue) - np.minimum(np.minimum(red, green), blue)


def otsu_threshold(values: Pixels) -> float:
    """Return the t in 1..255 that maximizes the between-class variance of `values < t` and `values >= t` (Otsu
    1979)."""
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
    """Return raw mask, grey threshold and warnings for a thumbnail, by Otsu's threshold on grey or on saturation."""
    grey = grey_of(pixels)
    real = ~(padding(pixels))
    if not real.any():
        raise TissueError(
            f"{name}: the slide is empty",
            "all pixels are pure white or pure black, which scanners use for areas that were not scanned",
            "Leave it out of the cohort, or scan it again",
            code="empty-slide",
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
                f"it differs from the glass by only {contrast:.0f} grey levels",
                f"Look at the slide. If this is tissue, lower tissue.min_contrast ({settings.min_contrast:g})",
                code="no-tissue",
            )
        return tissue, threshold if settings.method == "otsu" else None, ()
    # Without glass, Otsu splits the tissue itself: take everything that does not look like glass.
    tissue = real & ((grey < GLASS_MIN_GREY) | (chroma_of(pixels) > GLASS_MAX_CHROMA))
    share = float(tissue.mean())
    return tissue, None, (f"hardly any glass in the picture, {share:.0%} of it was taken as tissue by colour alone",)


def padding(pixels: Pixels) -> Mask:
    """Return the pixels that were not scanned: pure white or pure black, within JPEG tolerance."""
    return (pixels.min(axis=-1) >= 254) | (pixels.max(axis=-1) <= 3)


def _is_glass(pixels: Pixels, region: Mask) -> bool:
    """Return whether the mean colour of a region is that of glass."""
    if not region.any():
        return False
    mean = pixels[region].mean(axis=0)
    return bool(mean.mean() >= GLASS_MIN_GREY and mean.max() - mean.min() <= GLASS_MAX_CHROMA)


# ---------------------------------------------------------------------------------------------------- shapes


def clean(mask: Mask, mpp: float, min_area_um2: float, max_hole_um2: float) -> Mask:
    """Remove specks and fill small holes; sizes are in square microns."""
    without_specks = _drop_small(mask, min_area_um2 / mpp**2)
    return ~_drop_small(~without_specks, max_hole_um2 / mpp**2, keep_border=True)


def _drop_small(mask: Mask, min_pixels: float, keep_border: bool = False) -> Mask:
    labels: NDArray[np.int32]
    number: int
    labels, number = ndimage.label(mask)  # pyright: ignore[reportGeneralTypeIssues, reportAssignmentType]
    keep = np.bincount(labels.ravel(), minlength=number + 1) >= min_pixels
    if keep_border:  # a region at the border continues outside, so its size is unknown
        for edge in (labels[0], labels[-1], labels[:, 0], labels[:, -1]):
            keep[edge] = True
    keep[0] = False
    return keep[labels]


def pen_marks(pixels: Pixels) -> Mask:
    """Return pixels in colours that pens have and H&E does not: green, cyan, clear blue, and neutral near-black.

    Red pen cannot be distinguished from blood. Specks under 25 pixels are ignored.
    """
    red, green, blue = (pixels[..., k].astype(np.int16) for k in range(3))
    strong = chroma_of(pixels) > 60
    greenish = strong & (green > red + 20) & (green >= blue - 40)
    bluish = strong & (blue > red + 60) & (green > red + 10)
    black = (pixels.max(axis=-1) < 60) & (chroma_of(pixels) < 20) & ~padding(pixels)
    return _drop_small(greenish | bluish | black, 25)


# ---------------------------------------------------------------------------------------------------- supplied masks


def own_mask_path(folder: Path, name: str) -> Path | None:
    """Return the mask file of a slide, annotations before images, or None."""
    paths = (folder / f"{name}{suffix}" for suffix in (*ANNOTATION_SUFFIXES, *PICTURE_SUFFIXES))
    return next((path for path in paths if path.exists()), None)


def _own_mask(slide: Slide, settings: TissueSettings, name: str, mpp: float) -> Mask:
    folder = settings.folder
    assert folder is not None  # StudySettings requires it
    path = own_mask_path(folder, name)
    if path is None:
        raise TissueError(
            f"{name}: no tissue mask",
            f"the folder {folder.name} has no {name}.geojson, .xml, .png or .tif",
            "Add a mask for this slide, or take the slide out of the cohort",
            code="no-tissue-mask",
        )
    if path.suffix in PICTURE_SUFFIXES:
        return _picture_mask(path, slide, mpp)
    return _annotation_mask(path, slide, settings.exclude, mpp)


def _annotation_mask(path: Path, slide: Slide, exclude: tuple[str, ...], mpp: float) -> Mask:
    regions = read_annotations(path)
    out = [region for region in regions if any(fnmatchcase(region.group, pattern) for pattern in exclude)]
    inside = [region for region in regions if region not in out]
    if not inside:
        raise TissueError(
            f"{path.name}: no region to use as tissue",
            "all its classes are excluded, or it is empty",
            "Annotate the tissue in it, or take the slide out of the cohort",
            code="empty-tissue-mask",
        )
    frame = (slide.size_l0, slide.mpp, mpp)
    tissue, other = (to_mask(some, *frame, groups={region.group for region in some}) for some in (inside, out))
    return tissue & ~other


def _picture_mask(path: Path, slide: Slide, mpp: float) -> Mask:
    """Read an image of the whole slide, non-zero = tissue, resampled to the thumbnail's frame by nearest pixel."""
    try:
        with Image.open(path) as image:
            picture = np.asarray(image.convert("L")) > 0
    except OSError as error:
        raise TissueError(
            f"{path.name}: cannot be read as an image",
            str(error),
            "Save the mask as 8-bit PNG",
            code="unreadable-tissue-mask",
        ) from None
    height, width = picture.shape
    wanted, found = slide.size_l0[0] / slide.size_l0[1], width / height
    if abs(found / wanted - 1) > 0.02 + 1 / min(width, height):
        raise TissueError(
            f"{path.name}: the mask is {width} x {height}, the slide {slide.size_l0[0]} x {slide.size_l0[1]}",
            "their aspect ratios differ, so the mask shows another slide or only a part of this one",
            "Export a mask of the whole slide, at any scale",
            code="tissue-mask-mismatch",
        )
    columns, rows = size_at_mpp(slide.size_l0, slide.mpp, mpp)
    x = np.minimum(((np.arange(columns) + 0.5) * mpp / slide.mpp / slide.size_l0[0] * width).astype(int), width - 1)
    y = np.minimum(((np.arange(rows) + 0.5) * mpp / slide.mpp / slide.size_l0[1] * height).astype(int), height - 1)
    return picture[np.ix_(y, x)]
