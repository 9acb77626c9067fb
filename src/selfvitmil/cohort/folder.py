"""Find the slides in a folder and its subfolders.

Three formats have more than one file: of MIRAX (`x.mrxs` with a folder `x`) the file is used and its folder is not
searched; of Hamamatsu VMS the `.vms` file, while its `.jpg` files are ignored like all ordinary images; a folder of
DICOM `.dcm` files is one slide, named after the folder and opened by the first file in sorted order. Hidden files and
folders (including macOS's `._x.svs`) are skipped. Links are followed, each folder is visited once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from selfvitmil.cohort.table import absolute, listing
from selfvitmil.errors import CohortError

SLIDE_SUFFIXES = frozenset(
    (".svs", ".tif", ".tiff", ".ndpi", ".vms", ".vmu", ".scn", ".mrxs", ".svslide", ".bif", ".czi", ".dcm")
)
"""Suffixes of slide files, in lower case; upper case is recognized too."""


@dataclass(frozen=True)
class FoundSlide:
    """A slide on disk: its name, its file and, for messages, its path within the folder."""

    name: str
    path: Path
    where: str


@dataclass(frozen=True)
class Listing:
    """One folder of a tree: its path relative to the root (`.` for the root itself) and its file names."""

    folder: Path
    relative: Path
    files: tuple[str, ...]


def is_slide(file_name: str) -> bool:
    """Return whether the file name has the suffix of a slide."""
    return os.path.splitext(file_name)[1].lower() in SLIDE_SUFFIXES


def find_slides(root: Path) -> tuple[list[FoundSlide], list[str]]:
    """Return all slides under `root`, sorted by name, and warnings."""
    found: list[FoundSlide] = []
    dicom = 0
    for place in walk(root):
        slides = [file for file in place.files if is_slide(file)]
        parts = [file for file in slides if file.lower().endswith(".dcm")]
        if parts and len(parts) < len(slides):
            raise CohortError(
                f"{place.folder.name}: contains .dcm files and other slides ({listing(slides, 4)})",
                "all .dcm files of a folder count as one slide",
                "Put every DICOM slide into its own folder, or give a cohort.csv",
                code="mixed-dicom-folder",
            )
        if parts:
            dicom += 1
            found.append(FoundSlide(place.folder.name, place.folder / parts[0], str(place.relative / parts[0])))
        else:
            found += [
                FoundSlide(Path(file).stem.strip(), place.folder / file, str(place.relative / file)) for file in slides
            ]
    if not found:
        raise CohortError(
            f"{root.name}: no slides in this folder",
            f"no file ends in {', '.join(sorted(SLIDE_SUFFIXES))}",
            "Give the folder that contains the slides, or a cohort.csv",
            code="no-slides",
        )
    warnings = [f"{dicom} folders of .dcm files are taken as one slide each."] if dicom else []
    return sorted(found, key=lambda slide: (slide.name, slide.where)), warnings


def walk(root: Path) -> Iterator[Listing]:
    """Yield the folders of the tree in sorted order; unreadable folders are errors, link loops are visited once."""
    base = absolute(root)
    seen: set[tuple[int, int]] = set()
    waiting = [base]
    while waiting:
        folder = waiting.pop()
        try:
            status = folder.stat()
            identity = (status.st_dev, status.st_ino)
            if identity in seen:
                continue
            seen.add(identity)
            with os.scandir(folder) as entries:
                visible = [entry for entry in entries if not entry.name.startswith(".")]
            folders = sorted(entry.name for entry in visible if entry.is_dir())
        except OSError as error:
            relative = folder.relative_to(base)
            raise CohortError(
                f"{base.name if folder == base else relative}: the folder cannot be read",
                f"{error.strerror or error}, so its slides would be missed",
                "Correct its permissions, or move it elsewhere",
                code="unreadable-folder",
            ) from None
        files = tuple(sorted({entry.name for entry in visible} - set(folders)))
        data_of_mirax = {file[:-5] for file in files if file.lower().endswith(".mrxs")}
        waiting += [folder / name for name in reversed(folders) if name not in data_of_mirax]
        yield Listing(folder, folder.relative_to(base), files)
