"""The viewer's own files, as packaged: page, modules, styles, and OpenSeadragon, which the build fetched."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable

from selfvitmil.errors import SelfVitMilError

MEDIA_TYPES = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
    "png": "image/png",
    "txt": "text/plain; charset=utf-8",
}
OPENSEADRAGON = "vendor/openseadragon.min.js"


@dataclass(frozen=True)
class StaticFile:
    """One file, whole."""

    content: bytes
    media_type: str


def static_files() -> dict[str, StaticFile]:
    """All files of the viewer by their name below `static/`; an error where OpenSeadragon is missing."""
    folder = resources.files("selfvitmil.view") / "static"
    files = _files_in(folder, "")
    files.update(_files_in(folder / "vendor", "vendor/"))
    if OPENSEADRAGON not in files:
        raise SelfVitMilError(
            "openseadragon.min.js is missing from this installation of selfvitmil",
            "it is fetched from npm while the package is built, and that did not work",
            "Install a released wheel, or build again with a network: `pip install --force-reinstall --no-deps .` "
            "(`-e .` in a checkout)",
        )
    return files


def _files_in(folder: Traversable, prefix: str) -> dict[str, StaticFile]:
    if not folder.is_dir():
        return {}
    return {
        prefix + file.name: StaticFile(file.read_bytes(), MEDIA_TYPES[suffix])
        for file in folder.iterdir()
        if file.is_file() and (suffix := file.name.rpartition(".")[2]) in MEDIA_TYPES
    }
