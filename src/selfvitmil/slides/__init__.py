"""Opening slides and reading tiles at an exact resolution.

    with open_slide("a.svs") as slide:
        tile = slide.read_tile(x_l0=8192, y_l0=4096, size_px=224, mpp=0.5)      # uint8 (224, 224, 3)

Two readers stand behind it: `jpegtiff` decodes JPEG-compressed TIFF and SVS directly and fast, `openslide` reads
everything else; `auto` chooses per file. They share geometry and resampling and agree on the pixels. Importing this
package loads neither OpenSlide nor any decoder; opening a slide does.
"""

from __future__ import annotations

import os
import re
import threading
from collections import OrderedDict
from pathlib import Path

from selfvitmil.errors import ConfigError, SlideError
from selfvitmil.settings import slide_mpp_problem
from selfvitmil.slides.base import DAMAGED, Level, Slide, SlideInfo, levels_of, without_path
from selfvitmil.store.files import file_fingerprint, hash_of

__all__ = ["Level", "Slide", "SlideCache", "fingerprint", "open_slide"]

READERS = ("auto", "openslide", "jpegtiff")


def open_slide(
    path: str | Path, *, reader: str = "auto", mpp: float | None = None, otherwise_mpp: float | None = None
) -> Slide:
    """Open a slide; `reader` is `auto`, `openslide` or `jpegtiff`.

    `mpp` replaces the microns per pixel that the file says, `otherwise_mpp` serves where it does not say them.

    Raises SlideError at once when the file is no slide. One that does not say its microns per pixel opens, and raises
    MissingMppError when they are first needed.
    """
    if reader not in READERS:
        raise ConfigError(f"reader {reader!r} is not known", how=f"Choose one of {', '.join(READERS)}")
    for given in (mpp, otherwise_mpp):
        if given is not None and (problem := slide_mpp_problem(given)):
            raise ConfigError(f"mpp {given:g} was given", problem, "Give the scanner's microns per pixel")
    path = Path(os.path.abspath(path))
    _check_file(path)

    from selfvitmil.slides import jpegtiff, openslide  # heavy, and not needed to find slides in a folder
    from selfvitmil.slides.mpp import find_mpp, objective_power

    probe = openslide.probe(path)
    reason = "OpenSlide was asked for"
    layout = None
    if reader != "openslide":
        try:
            layout = jpegtiff.open_layout(path, probe.vendor)
            if layout.sizes[: len(probe.sizes)] != probe.sizes:
                raise jpegtiff.UnsupportedLayout("its pages are other levels than OpenSlide sees")
        except jpegtiff.UnsupportedLayout as error:
            layout, reason = None, str(error)
        except jpegtiff.TruncatedFile as error:
            raise SlideError(f"{path.name}: the file is cut short", str(error), DAMAGED) from None
        except OSError as error:
            raise SlideError(f"{path.name}: the file cannot be read", without_path(str(error), path), DAMAGED) from None
    if layout is None and reader == "jpegtiff":
        raise SlideError(
            f"{path.name}: the reader jpegtiff cannot read this slide", reason, "Leave --slide.reader at auto"
        )
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


def _check_file(path: Path) -> None:
    where = "Check the path, and that the drive is there"
    try:
        if path.is_dir():
            raise SlideError(f"{path.name}: this is a folder", "a slide is a file", "Name the slide's file itself")
        if path.stat().st_size == 0:
            raise SlideError(f"{path.name}: the file is empty", "not even a header came with it", DAMAGED)
        with path.open("rb"):
            pass
    except FileNotFoundError:
        raise SlideError(
            f"{path.name}: no such file", "the path does not exist", where, code="file-not-found"
        ) from None
    except OSError as error:
        raise SlideError(
            f"{path.name}: the file cannot be read", without_path(error.strerror or "", path), where
        ) from None


def fingerprint(path: Path) -> str:
    """Identity of a slide's content, of all its files where it has several; see `file_fingerprint`."""
    prints = [file_fingerprint(file) for file in _files_of(path)]
    return prints[0] if len(prints) == 1 else hash_of(*prints)


def _files_of(path: Path) -> list[Path]:
    """The files that hold a slide's pixels: several for MIRAX, DICOM and Hamamatsu's VMS and VMU."""
    suffix = path.suffix.lower()
    if suffix == ".mrxs" and path.with_suffix("").is_dir():
        return [path, *sorted(file for file in path.with_suffix("").iterdir() if file.is_file())]
    if suffix == ".dcm":
        return sorted(file for file in path.parent.iterdir() if file.suffix.lower() == ".dcm")
    if suffix in (".vms", ".vmu"):
        # Lines such as ImageFile(1,0)=b.jpg, MapFile=m.jpg; not MacroImage=, which is never looked at.
        text = path.read_bytes().decode("utf-8", errors="surrogateescape")
        named = re.findall(r"^(?:ImageFile|MapFile|OptimisationFile)[^=\n]*=([^\r\n]+)", text, re.MULTILINE)
        beside = [path.parent / name.strip() for name in named]
        return [path, *(file for file in beside if file.is_file())]
    return [path]


class SlideCache:
    """Open slides, at most `max_open` of them: a further one closes the one that was used longest ago.

    A slide that was closed this way still works for whoever holds it: its next read opens it again.
    """

    def __init__(self, max_open: int = 32):
        if max_open < 1:
            raise ConfigError(f"a cache of {max_open} slides was asked for", "it could hold none", "Allow at least one")
        self.max_open = max_open
        self._slides: OrderedDict[tuple[str, str, float | None], Slide] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, path: str | Path, *, reader: str = "auto", mpp: float | None = None) -> Slide:
        """The slide, opened if it is not open yet."""
        key = (os.path.abspath(path), reader, mpp)
        with self._lock:
            slide = self._slides.get(key)
            if slide is not None:
                self._slides.move_to_end(key)
                return slide
        slide = open_slide(path, reader=reader, mpp=mpp)
        with self._lock:
            slide = self._slides.setdefault(key, slide)
            while len(self._slides) > self.max_open:
                self._slides.popitem(last=False)[1].close()
        return slide

    def close(self) -> None:
        """Close all slides."""
        with self._lock:
            for slide in self._slides.values():
                slide.close()
            self._slides.clear()

    def __len__(self) -> int:
        return len(self._slides)
