"""Check whether a slide can be processed: open it, read samples of it, and report known problems."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from selfvitmil import annotations
from selfvitmil.settings import upsampling_warning
from selfvitmil.slides import SlideRef, fingerprint

NUM_REGIONS = 16
REGION_PX = 224
LARGE_L0 = 20_000
"""Slides wider than this without a pyramid are slow to read as a whole."""


@dataclass(frozen=True)
class CheckJob:
    """Input of one worker call: the slide to check."""

    slide: SlideRef
    annotation: Path | None = None
    tile_mpp: float | None = None
    """Microns per pixel of the tiles to be cut."""


@dataclass(frozen=True)
class SlideCheck:
    """A row of `check.csv`."""

    slide: str
    format: str
    reader: str
    width: int
    height: int
    mpp: float
    mpp_source: str
    levels: str
    compression: str
    fingerprint: str
    warnings: tuple[str, ...]


def check_slide(job: CheckJob) -> SlideCheck:
    """Open the slide, read regions spread over it, and read its annotation. Raises SelfVitMilError on failure."""
    with job.slide.open() as slide:
        mpp = slide.mpp
        width, height = slide.size_l0
        generator = np.random.default_rng([width, height])
        for x, y in generator.random((NUM_REGIONS, 2)):
            slide.read_tile(int(x * width), int(y * height), REGION_PX, mpp)
        coarsest = slide.levels[-1]
        slide.read_tile(0, 0, REGION_PX, mpp * coarsest.downsample)
        warnings = list(slide.warnings)
        if len(slide.levels) == 1 and max(width, height) > LARGE_L0:
            warnings.append("no pyramid: looking at the whole slide means decoding all of it, which is slow")
        if job.tile_mpp is not None and (warning := upsampling_warning(mpp, job.tile_mpp)):
            warnings.append(warning)
        if job.annotation is not None:
            repaired = [
                region for region in annotations.read_annotations(job.annotation, repair=True) if region.repaired
            ]
            if repaired:
                warnings.append(
                    f"outlines in {job.annotation.name} that cross themselves or enclose nothing are repaired when "
                    f"read: {len(repaired)} regions"
                )
        return SlideCheck(
            slide=job.slide.name,
            format=slide.vendor,
            reader=slide.reader,
            width=width,
            height=height,
            mpp=mpp,
            mpp_source=slide.mpp_source,
            levels=" ".join(f"{level.downsample:g}" for level in slide.levels),
            compression=slide.compression,
            fingerprint=fingerprint(job.slide.path),
            warnings=tuple(warnings),
        )
