"""Common interface and geometry of all slide readers.

A slide is one pyramidal file. `read_tile` takes a level-0 corner, a size in output pixels and the target microns per
pixel, and returns pixels at exactly that resolution: the area mean of the nearest finer level, interpolated where there
is none (see `resample`). Areas outside the slide or not scanned are white. Label, macro and thumbnail images stored by
the scanner are never read: they may show patient names.

A reader only provides the pixels of a rectangle of one level; all geometry is here, so that readers agree. `find_mpp`
decides on the microns per pixel: a value of the caller, of the file, or a guess from the objective power with a
warning, since real objectives differ from their nominal power by a few per cent. Nothing else is guessed.
"""

from __future__ import annotations

import ctypes
import math
import os
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from selfvitmil import geometry
from selfvitmil.errors import ConfigError, MissingMppError, SlideError
from selfvitmil.settings import slide_mpp_problem
from selfvitmil.slides.resample import Grid, Pixels, resample
from selfvitmil.store.failures import without_folders

# ---------------------------------------------------------------------------------------------------- microns per pixel

MAX_ANISOTROPY = 0.01
"""Maximum relative difference between x and y; tiles are square in microns only to that precision."""

_OME_UNITS_UM = {"mm": 1e3, "cm": 1e4, "nm": 1e-3, "µm": 1.0, "μm": 1.0, "um": 1.0, "&#181;m": 1.0, "&#xB5;m": 1.0}


@dataclass(frozen=True)
class Mpp:
    """Microns per level-0 pixel, or the reason why there is no value."""

    value: float | None
    source: str = ""
    problem: str = ""
    """Without a value: what the file says instead."""
    warnings: tuple[str, ...] = ()
    is_guess: bool = False
    """Whether the value was derived from the objective power."""


def find_mpp(
    properties: Mapping[str, str], vendor: str, override: float | None = None, otherwise: float | None = None
) -> Mpp:
    """Return the value to use; `override` replaces the file's value, `otherwise` only a missing or guessed one."""
    found = _from_file(properties, vendor)
    if override is None:
        return found if otherwise is None else _unless_stated(found, otherwise)
    if found.value is not None and abs(found.value - override) > MAX_ANISOTROPY * override:
        warning = f"mpp {override:g} was given, the file says {found.value:g} ({found.source})"
        return Mpp(override, "override", warnings=(warning,))
    return Mpp(override, "override")


def _unless_stated(found: Mpp, otherwise: float) -> Mpp:
    """Return `otherwise`, unless the file states a plausible value of its own."""
    if found.value is None or found.is_guess:
        return Mpp(otherwise, "given")
    if abs(found.value - otherwise) <= MAX_ANISOTROPY * otherwise:
        return found
    note = f"the file says mpp {found.value:g} ({found.source}), which is used, not the {otherwise:g} that was given"
    how = "--slide.force-mpp or the cohort's column mpp overrule files"
    return replace(found, warnings=(*found.warnings, f"{note}; {how}"))


def _from_file(properties: Mapping[str, str], vendor: str) -> Mpp:
    stated, source = _stated(properties, vendor)
    if stated is not None:
        x, y = stated
        if abs(x - y) > MAX_ANISOTROPY * (x + y) / 2:
            return Mpp(None, problem=f"{x:g} microns across but {y:g} down per pixel ({source}): pixels are not square")
        mpp = (x + y) / 2
        warnings = () if x == y else (f"mpp differs a little, {x:g} across and {y:g} down; the mean is used",)
        problem = slide_mpp_problem(mpp)
        if not problem:
            return Mpp(mpp, source, warnings=warnings)
        if source not in _GUESSED_BY_SOFTWARE:
            return Mpp(None, problem=f"{source} says {mpp:g}, but {problem}")
    power = objective_power(properties)
    if power is not None:
        mpp = 10 / power
        warning = f"no mpp in the file: {mpp:g} guessed from the objective power of {power:g}x"
        return Mpp(mpp, f"objective power {power:g}x", warnings=(warning,), is_guess=True)
    if stated is not None:
        return Mpp(None, problem=f"its {source} gives {stated[0]:g} microns per pixel, which is implausible")
    if vendor in ("png", "jpeg"):
        return Mpp(None, problem=f"a {vendor.upper()} image has none; its dots per inch are for printing")
    return Mpp(None, problem="no openslide.mpp-x/-y, no resolution tag, no objective power")


_GUESSED_BY_SOFTWARE = ("tiff resolution tag",)
"""Sources that image software fills with a default value."""


def _stated(properties: Mapping[str, str], vendor: str) -> tuple[tuple[float, float] | None, str]:
    ome = _ome_mpp(properties.get("tiff.ImageDescription", ""))
    if ome is not None:
        return ome, "OME PhysicalSize"
    x, y = (_positive(properties.get(f"openslide.mpp-{axis}")) for axis in "xy")
    if x is None or y is None:
        return None, ""
    # For plain TIFF files OpenSlide computes its mpp from the resolution tags and their unit.
    return (x, y), "tiff resolution tag" if vendor == "generic-tiff" else "openslide.mpp-x"


def _ome_mpp(description: str) -> tuple[float, float] | None:
    """Return PhysicalSizeX and -Y of the first image of an OME-XML header, which OpenSlide ignores."""
    pixels = re.search(r"<(?:\w+:)?Pixels\b[^>]*>", description) if "<OME" in description[:2000] else None
    if pixels is None:
        return None
    sizes: list[float] = []
    for axis in "XY":
        size = re.search(rf'\bPhysicalSize{axis}="([^"]*)"', pixels[0])
        unit = re.search(rf'\bPhysicalSize{axis}Unit="([^"]*)"', pixels[0])
        value = _positive(size[1]) if size else None
        scale = _OME_UNITS_UM.get(unit[1]) if unit else 1.0  # OME's default is the micron
        if value is None or scale is None:
            return None
        sizes.append(value * scale)
    return sizes[0], sizes[1]


def objective_power(properties: Mapping[str, str]) -> float | None:
    """Return the nominal magnification of the objective, if stated."""
    return _positive(properties.get("openslide.objective-power"))


def _positive(text: str | None) -> float | None:
    try:
        value = float(text) if text is not None else math.nan
    except ValueError:
        return None
    return value if 0 < value < math.inf else None


# ---------------------------------------------------------------------------------------------------- slide

Box = tuple[int, int, int, int]
"""(x0, y0, x1, y1), half open, in pixels of a level (or of a downscaled level)."""

LEVEL_TOLERANCE = 0.005
"""A level may be coarser than requested by up to this fraction: it is then the intended level."""
DAMAGED = "Copy the file again from its source, or leave the slide out"
MAX_SOURCE_PX = 2048 * 2048
"""Source pixels processed at a time (as float32: 50 MB); larger rectangles are processed in parts."""


@dataclass(frozen=True)
class Level:
    """One resolution level of the pyramid."""

    size: tuple[int, int]
    """(width, height) in its own pixels."""
    downsample: float
    """Level-0 pixels per pixel of this level."""


@dataclass(frozen=True)
class SlideInfo:
    """Metadata of an opened slide; small, so that it can be sent to workers."""

    levels: tuple[Level, ...]
    mpp: Mpp
    vendor: str
    objective_power: float | None
    compression: str
    warnings: tuple[str, ...]


class Slide(ABC):
    """An open slide, from `open_slide`. Use it in a `with` block, or call `close`.

    Positions are level-0 pixels from the top left corner; sizes are output pixels. Pixels are resampled to exactly the
    requested microns per pixel, as area means of the nearest finer level, or interpolated where there is none. What
    lies outside the slide or was not scanned is white.

    Pickles as path and metadata: the file is opened again at the first read. Reading from several threads is safe;
    after `close` the next read opens the file again.
    """

    reader: ClassVar[str]
    """`openslide`, `jpegtiff` or `image`."""

    def __init__(self, path: Path, info: SlideInfo, handle: Any = None):
        keep_freed_memory()
        self.path = path
        self.info = info
        self._handle = handle
        self._owner = os.getpid()
        self._opening = threading.Lock()

    # ------------------------------------------------------------------------------------------------ metadata

    @property
    def name(self) -> str:
        """File name with its suffix, used in errors. Studies name slides by the column `slide` of the cohort."""
        return self.path.name

    @property
    def mpp(self) -> float:
        """Microns per level-0 pixel.

        Raises
        ------
        MissingMppError
            Neither the file nor the caller of `open_slide` gave a usable value.
        """
        if self.info.mpp.value is None:
            raise MissingMppError(
                f"{self.name}: no usable microns-per-pixel value in the file ({self.info.mpp.problem})",
                "tile size in microns is undefined without it",
                "If the scanner's value is known, pass --slide.mpp 0.25, or fill the column mpp of cohort.csv",
                code="no-mpp",
            )
        return self.info.mpp.value

    @property
    def mpp_source(self) -> str:
        """Source of the value: `override`, `given`, `openslide.mpp-x`, `tiff resolution tag` ...; empty without one."""
        return self.info.mpp.source

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings about this slide for the user."""
        return self.info.warnings + self.info.mpp.warnings

    @property
    def levels(self) -> tuple[Level, ...]:
        """Levels of the pyramid, largest first."""
        return self.info.levels

    @property
    def size_l0(self) -> tuple[int, int]:
        """(width, height) of level 0, in pixels."""
        return self.info.levels[0].size

    @property
    def vendor(self) -> str:
        """Format name of OpenSlide: `aperio`, `generic-tiff`, `mirax` ...; or `png`, `jpeg`."""
        return self.info.vendor

    @property
    def objective_power(self) -> float | None:
        """Nominal magnification, if stated. For display only; calculations use mpp."""
        return self.info.objective_power

    @property
    def compression(self) -> str:
        """Compression of level 0, if known: `jpeg`, `jpeg 2000` ... or `unknown`."""
        return self.info.compression

    # ------------------------------------------------------------------------------------------------ pixels

    def read_tile(self, x_l0: float, y_l0: float, size_px: int, mpp: float) -> Pixels:
        """Read a square tile at exactly `mpp` microns per pixel.

        Parameters
        ----------
        x_l0, y_l0
            Top left corner in level-0 pixels; fractions and positions outside the slide are allowed.
        size_px
            Edge of the tile in output pixels.
        mpp
            Microns per output pixel. The tile covers `size_px * mpp` microns.

        Returns
        -------
        NDArray[np.uint8]
            RGB pixels, (size_px, size_px, 3).

        Raises
        ------
        SlideError
            The region cannot be read, or the file has changed or disappeared.
        MissingMppError
            The slide has no microns per pixel.
        ConfigError
            `size_px` or `mpp` is not positive.
        """
        return self.read_region(x_l0, y_l0, (size_px, size_px), mpp)

    def read_region(self, x_l0: float, y_l0: float, size_px: tuple[int, int], mpp: float) -> Pixels:
        """Read a rectangle at exactly `mpp` microns per pixel. Beyond the result, memory is bounded.

        Parameters
        ----------
        x_l0, y_l0
            Top left corner in level-0 pixels; fractions and positions outside the slide are allowed.
        size_px
            (width, height) in output pixels.
        mpp
            Microns per output pixel.

        Returns
        -------
        NDArray[np.uint8]
            RGB pixels, (height, width, 3).

        Raises
        ------
        SlideError, MissingMppError, ConfigError
            As for `read_tile`.
        """
        width, height = size_px
        if width < 1 or height < 1 or not 0 < mpp < math.inf:
            size = f"{width} px" if width == height else f"{width} x {height} px"
            raise ConfigError(
                f"invalid tile of {size} at {mpp:g} microns per pixel",
                "size and microns per pixel must be positive",
                "Correct them",
                code="invalid-tile-size",
            )
        return self._read(x_l0, y_l0, width, height, mpp)

    def thumbnail(self, mpp: float) -> Pixels:
        """Read the whole slide at exactly `mpp` microns per pixel. Beyond the result, memory is bounded.

        Parameters
        ----------
        mpp
            Microns per output pixel.

        Returns
        -------
        NDArray[np.uint8]
            RGB pixels, (height, width, 3), of the size given by `geometry.size_at_mpp`.

        Raises
        ------
        SlideError, MissingMppError, ConfigError
            As for `read_tile`.
        """
        if not 0 < mpp < math.inf:
            raise ConfigError(
                f"invalid thumbnail at {mpp:g} microns per pixel",
                "microns per pixel must be positive",
                "Correct it",
                code="invalid-tile-size",
            )
        width, height = geometry.size_at_mpp(self.size_l0, self.mpp, mpp)
        return self._read(0, 0, width, height, mpp)

    def _read(self, x_l0: float, y_l0: float, width: int, height: int, mpp: float) -> Pixels:
        wanted = mpp / self.mpp
        index = level_for(self.levels, wanted)
        downsample = self.levels[index].downsample
        grid = Grid.over(x_l0 / downsample, y_l0 / downsample, width, height, wanted / downsample)
        shrink = self._shrink(index, grid)
        grid = grid.shrunk(shrink)
        if width * height * max(1.0, grid.factor) ** 2 <= MAX_SOURCE_PX:
            return self._read_grid(index, shrink, grid)
        out = np.empty((height, width, 3), np.uint8)
        step = max(1, int(math.sqrt(MAX_SOURCE_PX) / max(1.0, grid.factor)))
        for top in range(0, height, step):
            for left in range(0, width, step):
                part = grid.part(left, top, min(left + step, width), min(top + step, height))
                out[top : top + part.height, left : left + part.width] = self._read_grid(index, shrink, part)
        return out

    def _read_grid(self, index: int, shrink: int, grid: Grid) -> Pixels:
        return resample(self._pixels(index, shrink, grid.box, grid.source_dtype), grid)

    # ------------------------------------------------------------------------------------------------ for readers

    @abstractmethod
    def _open(self) -> Any:
        """Open the file. The handle closes itself when it is no longer referenced."""

    def _shrink(self, index: int, grid: Grid) -> int:
        """Return the factor by which the reader itself may downscale a level for this grid."""
        del index, grid
        return 1

    @abstractmethod
    def _pixels(self, index: int, shrink: int, box: Box, dtype: type[np.generic]) -> NDArray[Any]:
        """Return the pixels of a rectangle of a downscaled level as a new array, white outside."""

    def _use(self) -> Any:
        """Return the open handle. Callers keep a reference while reading, so that a concurrent `close` is harmless."""
        handle = self._handle
        if handle is None or self._owner != os.getpid():
            with self._opening:
                handle = self._handle
                if handle is None or self._owner != os.getpid():
                    handle = self._handle = self._open()
                    self._owner = os.getpid()
        return handle

    def _unreadable(self, index: int, box: Box, reason: str) -> SlideError:
        """Return the error for a rectangle of a level that cannot be read."""
        x0, y0, x1, y1 = (round(edge * self.levels[index].downsample) for edge in box)
        return SlideError(
            f"{self.name}: unreadable from ({x0}, {y0}) to ({x1}, {y1}), in level-0 pixels",
            without_path(reason, self.path),
            DAMAGED,
            code="unreadable-region",
        )

    def close(self) -> None:
        """Close the file; a later read opens it again."""
        self._handle = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path, self.info)

    def __repr__(self) -> str:
        width, height = self.size_l0
        mpp = f"{self.info.mpp.value:g} mpp" if self.info.mpp.value else "no mpp"
        return f"<{type(self).__name__} {self.name}: {width} x {height}, {mpp}, {len(self.levels)} levels>"


@cache
def keep_freed_memory() -> None:
    """Make the C library keep freed arrays of some megabytes for reuse; called once per process.

    glibc returns such arrays to the system when they are freed and takes fresh, zeroed pages for the next tile: 700
    page faults for a resampled 224 px tile, 1.1 ms instead of 0.22 ms. By default it adapts, but not if
    MALLOC_TRIM_THRESHOLD_ is set, as dask does for its workers. Other C libraries are not changed.
    """
    try:
        set_option = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    set_option(M_MMAP_THRESHOLD, 32 << 20)
    set_option(M_TRIM_THRESHOLD, 64 << 20)


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # numbers of mallopt's options in glibc's malloc.h


def level_for(levels: tuple[Level, ...], downsample: float) -> int:
    """Return the index of the coarsest level that is not coarser than `downsample`; 0 if all are coarser."""
    fitting = [k for k, level in enumerate(levels) if level.downsample <= downsample * (1 + LEVEL_TOLERANCE)]
    return max(fitting, key=lambda k: levels[k].downsample, default=0)


def levels_of(sizes: tuple[tuple[int, int], ...]) -> tuple[Level, ...]:
    """Return levels with their downsample factors, from their sizes.

    Scanners downscale by whole factors, mostly powers of two, and round the edges: 4443 x 3567 becomes 2221 x 1783.
    Using the ratio of the sizes, 2.0005, as downsample would misplace the far end of a wide slide by several pixels and
    blur every tile. So a factor is taken as whole if both edges agree with it to within a pixel.
    """
    width, height = sizes[0]
    levels: list[Level] = []
    for size in sizes:
        ratio = (width / size[0] + height / size[1]) / 2
        likely = (2 ** max(0, round(math.log2(ratio))), max(1, round(ratio)))
        agreeing = [k for k in likely if abs(width / k - size[0]) < 1 and abs(height / k - size[1]) < 1]
        levels.append(Level(size, float(agreeing[0]) if agreeing else ratio))
    return tuple(levels)


def read_at(descriptor: int, count: int, offset: int) -> bytes:
    """Read `count` bytes at `offset`, fewer at the end of the file. A network drive may deliver them in parts."""
    data = os.pread(descriptor, count, offset)
    while len(data) < count and (more := os.pread(descriptor, count - len(data), offset + len(data))):
        data += more
    return data


def without_path(message: str, path: Path) -> str:
    """Format a library's message for our errors, without folder names."""
    text = without_folders(message.strip().rstrip("."), [path.parent])
    return text[:1].lower() + text[1:] if text else "unknown reason"
