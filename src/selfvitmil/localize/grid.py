"""A stand-in for a slide that is not at hand: blank, with the tiles of its heatmap in light grey.

Cohorts of another tool's feature files name no slides. Heatmaps are drawn and viewed on this grid until they do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from selfvitmil.errors import SlideError
from selfvitmil.localize.heatmap import NO_SLIDE, Heatmap, read_heatmap
from selfvitmil.slides import Slide
from selfvitmil.slides.base import Box, Level, Mpp, SlideInfo

TILE_GREY = 224


class GridSlide(Slide):
    """The tiles of a heatmap on white, read as a slide is."""

    reader = "grid"

    def __init__(self, heatmap: Heatmap, path: Path):
        frame = heatmap.frame
        info = SlideInfo(
            (Level(frame.size_l0, 1.0),), Mpp(frame.slide_mpp, "heatmap"), "grid", None, "none", (NO_SLIDE,)
        )
        super().__init__(path, info, handle=heatmap)

    def _read(self, x_l0: float, y_l0: float, width: int, height: int, mpp: float) -> NDArray[np.uint8]:
        from selfvitmil.localize.overlay import NO_TILE, Raster

        heatmap: Heatmap = self._use()
        raster = Raster.over(heatmap, (width, height), mpp / self.mpp, (x_l0, y_l0))
        grey = np.where(raster.rows(0, height) == NO_TILE, 255, TILE_GREY).astype(np.uint8)
        return np.repeat(grey[:, :, None], 3, axis=2)

    def _open(self) -> Any:
        return self._handle

    def _pixels(self, index: int, shrink: int, box: Box, dtype: type[np.generic]) -> NDArray[Any]:
        del index, shrink
        return self._read(box[0], box[1], box[2] - box[0], box[3] - box[1], self.mpp).astype(dtype)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._use(), self.path)

    def close(self) -> None:
        """Keep the heatmap: there is no file to close."""


@dataclass(frozen=True)
class GridRef:
    """Names a slide that is not at hand, like a SlideRef; its heatmap is looked for when it is opened."""

    name: str
    feature_file: Path
    find: Callable[[], Path | None]
    """Return a heatmap of the slide, or None."""

    @property
    def path(self) -> Path:
        """The file that is opened: the heatmap, or the feature file as long as there is none."""
        return self.find() or self.feature_file

    def at_mpp(self, mpp: float) -> GridRef:
        """Return the same: a heatmap has its microns per pixel."""
        del mpp
        return self

    def open(self) -> Slide:
        """Open the grid of the slide's heatmap. Raises SlideError where there is none."""
        path = self.find()
        if path is None:
            raise SlideError(
                f"{self.name}: the study has its features, but neither the slide nor a heatmap",
                "there is nothing to show",
                "Run `selfvitmil localize` first, or name the slides with `selfvitmil check STUDY --slides-folder DIR`",
                code="slide-not-at-hand",
            )
        return GridSlide(read_heatmap(path), path)
