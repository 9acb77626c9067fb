"""Open slides and read tiles at an exact resolution.

    with open_slide("a.svs") as slide:
        tile = slide.read_tile(x_l0=8192, y_l0=4096, size_px=224, mpp=0.5)      # uint8 (224, 224, 3)

There are three readers: `jpegtiff` decodes JPEG-compressed TIFF and SVS directly and fast, `openslide` reads the other
formats of scanners, `image` reads what OpenSlide does not: OME-TIFF, TIFF without tiles, PNG and JPEG; `auto` chooses
per file. They share geometry and resampling and agree on the pixels. Importing this package loads neither OpenSlide nor
any decoder; opening a slide does.
"""

from __future__ import annotations

import os
import re
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from cachetools import LRUCache

from selfvitmil.errors import ConfigError, SlideError
from selfvitmil.settings import SlideSettings, slide_mpp_problem
from selfvitmil.slides.base import DAMAGED, Level, Slide, SlideInfo, find_mpp, levels_of, objective_power, without_path
from selfvitmil.store.files import file_fingerprint, hash_of
from selfvitmil.store.guard import UnsafeFile, check_first

if TYPE_CHECKING:
    from selfvitmil.cohort import SlideRow
    from selfvitmil.slides.jpegtiff import Layout
    from selfvitmil.slides.openslide import Probe

__all__ = ["Level", "Slide", "SlideCache", "SlideRef", "fingerprint", "open_slide"]

READERS = ("auto", "openslide", "jpegtiff", "image")


@dataclass(frozen=True)
class SlideRef:
    """Names a slide and how to open it; small, hashable, and sent to workers."""

    name: str
    """Its name in the study (the column `slide` of the cohort)."""
    path: Path
    mpp: float | None = None
    """Microns per level-0 pixel from the cohort or a tile table; overrides the value in the file."""
    reader: str = "auto"
    default_mpp: float | None = None
    """Used where the file has no value (`slide.mpp`)."""
    force_default: bool = False
    """Use `default_mpp` also where the file has a value (`slide.force_mpp`)."""

    @classmethod
    def of(cls, row: SlideRow, settings: SlideSettings) -> SlideRef:
        """Return the slide of a row of the cohort, opened as the settings say."""
        return cls(row.slide, row.path, row.mpp, settings.reader, settings.mpp, settings.force_mpp)

    def at_mpp(self, mpp: float) -> SlideRef:
        """Return the same slide with these microns per level-0 pixel, mostly those of its tile table."""
        return replace(self, mpp=mpp)

    def open(self) -> Slide:
        """Open the slide; see `open_slide`."""
        mpp = self.mpp or (self.default_mpp if self.force_default else None)
        return open_slide(self.path, reader=self.reader, mpp=mpp, otherwise_mpp=self.default_mpp)


def open_slide(
    path: str | Path, *, reader: str = "auto", mpp: float | None = None, otherwise_mpp: float | None = None
) -> Slide:
    """Open a slide file.

    A slide without microns per pixel opens too, and raises MissingMppError when the value is first needed.

    Parameters
    ----------
    path
        The slide file: any format that OpenSlide supports, OME-TIFF, TIFF without tiles, PNG or JPEG.
    reader
        `openslide`, `jpegtiff` (faster; JPEG-compressed TIFF and SVS only), `image` (TIFF, PNG and JPEG), or `auto`,
        which takes `jpegtiff` where it can read the file and `image` where OpenSlide cannot.
    mpp
        Microns per level-0 pixel, in place of the value in the file.
    otherwise_mpp
        Microns per level-0 pixel if the file states none or only an objective power.

    Returns
    -------
    Slide
        The open slide. Use it in a `with` block, or call `close`.

    Raises
    ------
    SlideError
        The file does not exist, is empty, truncated or not a slide, or `reader` cannot read it.
    ConfigError
        `reader` is unknown, or `mpp` or `otherwise_mpp` is implausible.
    """
    if reader not in READERS:
        raise ConfigError(
            f"unknown reader {reader!r}", how=f"Choose one of {', '.join(READERS)}", code="unknown-reader"
        )
    for given in (mpp, otherwise_mpp):
        if given is not None and (problem := slide_mpp_problem(given)):
            raise ConfigError(
                f"mpp {given:g} was given", problem, "Give the scanner's microns per pixel", code="invalid-mpp"
            )
    path = Path(os.path.abspath(path))
    _check_file(path)

    from selfvitmil.slides import jpegtiff, openslide  # heavy, and not needed to list slides

    try:
        check_first("slide", path)
    except UnsafeFile as error:
        raise SlideError(
            f"{path.name}: the slide cannot be opened", str(error), DAMAGED, code="crashing-slide"
        ) from None
    if reader == "image":
        return _open_image(path, mpp, otherwise_mpp)
    try:
        probe = openslide.probe(path)
    except SlideError as error:
        if error.code != "not-a-slide" or reader != "auto":
            raise
        return _open_image(path, mpp, otherwise_mpp, error)
    layout = None if reader == "openslide" else _jpegtiff_layout(path, probe, is_required=reader == "jpegtiff")
    if layout is None and reader == "auto" and probe.vendor == "generic-tiff" and _openslide_misses(path):
        return _open_image(path, mpp, otherwise_mpp)
    compression = jpegtiff.tiff_compression(path) if layout is None else "jpeg"
    info = SlideInfo(
        levels=levels_of(probe.sizes if layout is None else layout.sizes),
        mpp=find_mpp(probe.properties, probe.vendor, override=mpp, otherwise=otherwise_mpp),
        vendor=probe.vendor,
        objective_power=objective_power(probe.properties),
        compression=compression,
        warnings=("JPEG 2000 compression: reading takes several times as long",) if compression == "jpeg 2000" else (),
    )
    if layout is None:
        return openslide.OpenSlideSlide(path, info, probe.handle)
    return jpegtiff.JpegTiffSlide(path, info, layout)


def _jpegtiff_layout(path: Path, probe: Probe, *, is_required: bool) -> Layout | None:
    """Return where the JPEG tiles of a slide lie; None where the reader `jpegtiff` is not for it."""
    from selfvitmil.slides import jpegtiff

    try:
        layout = jpegtiff.open_layout(path, probe.vendor)
        if layout.sizes[: len(probe.sizes)] != probe.sizes:
            raise jpegtiff.UnsupportedLayout("its levels differ from those that OpenSlide reports")
    except jpegtiff.UnsupportedLayout as error:
        if not is_required:
            return None
        raise SlideError(
            f"{path.name}: the reader jpegtiff cannot read this slide",
            str(error),
            "Leave --slide.reader at auto",
            code="reader-unsuitable",
        ) from None
    except jpegtiff.TruncatedFile as error:
        raise SlideError(f"{path.name}: the file is truncated", str(error), DAMAGED, code="truncated-slide") from None
    except OSError as error:
        raise _unreadable(path, error) from None
    return layout


def _openslide_misses(path: Path) -> bool:
    """Return whether the reader `image` sees levels or colours of a generic TIFF that OpenSlide does not."""
    from selfvitmil.slides import image

    try:
        layout = image.open_layout(path)
    except (SlideError, OSError):
        return False
    return layout is not None and layout.adds_to


def _open_image(
    path: Path, mpp: float | None, otherwise_mpp: float | None, no_slide: SlideError | None = None
) -> Slide:
    """Open a file with the reader `image`; `no_slide` is OpenSlide's error where it was asked first."""
    from selfvitmil.slides import image

    try:
        layout = image.open_layout(path)
    except OSError as error:
        raise _unreadable(path, error) from None
    if layout is None:
        raise no_slide or SlideError(
            f"{path.name}: the reader image cannot read this slide",
            "it is no TIFF, PNG or JPEG file",
            "Leave --slide.reader at auto",
            code="reader-unsuitable",
        )
    info = SlideInfo(
        levels=levels_of(layout.sizes),
        mpp=find_mpp(layout.properties, layout.kind, override=mpp, otherwise=otherwise_mpp),
        vendor=layout.kind,
        objective_power=None,
        compression=layout.compression,
        warnings=layout.warnings,
    )
    return image.ImageSlide(path, info, layout)


def _unreadable(path: Path, error: OSError) -> SlideError:
    return SlideError(
        f"{path.name}: the file cannot be read", without_path(str(error), path), DAMAGED, code="unreadable-slide"
    )


def _check_file(path: Path) -> None:
    where = "Check the path, and that the drive is mounted"
    try:
        if path.is_dir():
            raise SlideError(
                f"{path.name}: a folder, not a file", "a slide is a file", "Give the slide file", code="is-a-folder"
            )
        if path.stat().st_size == 0:
            raise SlideError(f"{path.name}: the file is empty", "it has no header", DAMAGED, code="empty-file")
        with path.open("rb"):
            pass
    except FileNotFoundError:
        raise SlideError(
            f"{path.name}: no such file", "the path does not exist", where, code="file-not-found"
        ) from None
    except OSError as error:
        raise SlideError(
            f"{path.name}: the file cannot be read",
            without_path(error.strerror or "", path),
            where,
            code="unreadable-slide",
        ) from None


def fingerprint(path: Path) -> str:
    """Return the identity of a slide's content, over all its files if it has several; see `file_fingerprint`."""
    prints = [file_fingerprint(file) for file in _files_of(path)]
    return prints[0] if len(prints) == 1 else hash_of(*prints)


def _files_of(path: Path) -> list[Path]:
    """Return the files that contain a slide's pixels: several for MIRAX, DICOM and Hamamatsu's VMS and VMU."""
    suffix = path.suffix.lower()
    if suffix == ".mrxs" and path.with_suffix("").is_dir():
        return [path, *sorted(file for file in path.with_suffix("").iterdir() if file.is_file())]
    if suffix == ".dcm":
        return sorted(file for file in path.parent.iterdir() if file.suffix.lower() == ".dcm")
    if suffix in (".vms", ".vmu"):
        # Lines such as ImageFile(1,0)=b.jpg, MapFile=m.jpg; not MacroImage=, which is never read.
        text = path.read_bytes().decode("utf-8", errors="surrogateescape")
        named = re.findall(r"^(?:ImageFile|MapFile|OptimisationFile)[^=\n]*=([^\r\n]+)", text, re.MULTILINE)
        beside = [path.parent / name.strip() for name in named]
        return [path, *(file for file in beside if file.is_file())]
    return [path]


class _OpenSlides(LRUCache[SlideRef, Slide]):
    def popitem(self) -> tuple[SlideRef, Slide]:
        """Close the slide that was used longest ago."""
        ref, slide = super().popitem()
        slide.close()
        return ref, slide


class SlideCache:
    """LRU cache of at most `max_open` open slides.

    A slide that the cache closed still works for its holder: the next read opens it again.
    """

    def __init__(self, max_open: int = 32):
        if max_open < 1:
            raise ConfigError(
                f"cache of {max_open} slides", "max_open must be at least 1", "Use 1 or more", code="invalid-cache-size"
            )
        self._slides = _OpenSlides(max_open)
        self._lock = threading.Lock()

    def get(self, ref: SlideRef) -> Slide:
        """Return the slide, opened if necessary."""
        with self._lock:
            slide = self._slides.get(ref)
        if slide is not None:
            return slide
        slide = ref.open()
        with self._lock:
            return self._slides.setdefault(ref, slide)

    def close(self) -> None:
        """Close all slides."""
        with self._lock:
            while self._slides:
                self._slides.popitem()

    def __len__(self) -> int:
        return len(self._slides)
