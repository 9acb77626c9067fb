"""Find the microns per level-0 pixel (mpp) of a slide, and where the value comes from.

Input: the properties that OpenSlide reports for any format, and optionally a value from the user. Output: a value with
its source and warnings, or no value with the reason. A file that states its objective power but no plausible mpp gets
10 divided by the power, with a warning, since real objectives differ from that by a few per cent. Nothing else is
guessed: if the value is missing, differs between the axes, or is impossible for light microscopy, the user has to give
it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from selfvitmil.settings import slide_mpp_problem

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
