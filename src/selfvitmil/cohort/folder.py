"""Finding the slides in a folder and its subfolders.

Three formats are more than one file: MIRAX (`x.mrxs` beside a folder `x`) is the one file, its folder is not searched;
Hamamatsu VMS is its `.vms` file, the `.jpg` beside it are ignored as all ordinary images are; DICOM is a folder of
`.dcm` files, one slide however many there are, named after the folder and opened by the first of them in sorted order.
Hidden files and folders (also macOS's `._x.svs`) are skipped. Links are followed, each folder is entered once.
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
"""Endings of slide files, in lower case; upper case is found too."""


@dataclass(frozen=True)
class FoundSlide:
    """A slide on disk: its name, its file and, for messages, where in the folder it lies."""

    name: str
    path: Path
    where: str


@dataclass(frozen=True)
class Listing:
    """One folder of a tree: its place under the root (`.` for the root itself) and the names of its files."""

    folder: Path
    relative: Path
    files: tuple[str, ...]


def is_slide(file_name: str) -> bool:
    """Whether the name ends like a slide's."""
    return os.path.splitext(file_name)[1].lower() in SLIDE_SUFFIXES


def find_slides(root: Path) -> tuple[list[FoundSlide], list[str]]:
    """All slides under `root`, sorted by name, and warnings."""
    found: list[FoundSlide] = []
    dicom = 0
    for place in walk(root):
        slides = [file for file in place.files if is_slide(file)]
        parts = [file for file in slides if file.lower().endswith(".dcm")]
        if parts and len(parts) < len(slides):
            raise CohortError(
                f"{place.folder.name}: holds .dcm files and other slides ({listing(slides, 4)})",
                "all .dcm files of a folder count as one slide",
                "Give every DICOM slide a folder of its own, or give a cohort.csv",
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
            "Give the folder that holds the slides, or a cohort.csv",
        )
    warnings = [f"{dicom} folders of .dcm files are taken as one slide each."] if dicom else []
    return sorted(found, key=lambda slide: (slide.name, slide.where)), warnings


def walk(root: Path) -> Iterator[Listing]:
    """The folders of the tree in sorted order; an unreadable one is an error, a loop of links ends where it closes."""
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
                f"{error.strerror or error}, and slides in it would be missed",
                "Give yourself the right to read it, or move it out of the way",
            ) from None
        files = tuple(sorted({entry.name for entry in visible} - set(folders)))
        data_of_mirax = {file[:-5] for file in files if file.lower().endswith(".mrxs")}
        waiting += [folder / name for name in reversed(folders) if name not in data_of_mirax]
        yield Listing(folder, folder.relative_to(base), files)
