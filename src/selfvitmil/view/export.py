"""The viewer's own files, and the viewer as a folder: opens from disk with a double click, needs no server.

    index.html               the page, with classic scripts in place of modules, which pages from disk may not load
    static/                  styles, OpenSeadragon, vendor/viewer.js (our modules, bundled when the package is built)
    data/study.js            window.SELFVITMIL_DATA = {study, slides: {}}
    data/<id>.js             everything about one slide, loaded when it is opened
    thumbnails/<id>.jpg      tiles/<id>/<level>/<column>_<row>.jpg

Pictures go down to a given resolution, which bounds the size. It can be mailed: nothing in it names a folder of this
machine.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from selfvitmil.errors import ConfigError, SelfVitMilError
from selfvitmil.store.failures import Failure
from selfvitmil.store.files import temporary_beside, write_error
from selfvitmil.view import tiles
from selfvitmil.view.study import ViewedSlide, ViewedStudy, to_json

MEDIA_TYPES = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
    "png": "image/png",
    "txt": "text/plain; charset=utf-8",
}
BUILT = ("vendor/openseadragon.min.js", "vendor/viewer.js")
"""Files that the build step adds."""
MAX_SLIDES = 20
"""In a folder for which no slides were named."""
PICTURE_BYTES = 20_000
"""Of a tile, to estimate the size."""
MAX_EDGE_PX = 8192
"""Of the finest level of a slide of unknown resolution."""
MODULE_TAG = '<script type="module" src="static/main.js"></script>'
SCRIPT_TAGS = '<script src="data/study.js" defer></script>\n  <script src="static/vendor/viewer.js" defer></script>'
CHARSET_TAG = '<meta charset="utf-8">'
POLICY = (
    "default-src 'none'; script-src 'self' file:; style-src 'self' file:; img-src 'self' file: data: blob:; "
    "base-uri 'none'; form-action 'none'"
)
"""What the page may load: what lies beside it, and nothing from a network."""


@dataclass(frozen=True)
class StaticFile:
    """Content of one file."""

    content: bytes
    media_type: str


def static_files() -> dict[str, StaticFile]:
    """Return all files of the viewer by their name below `static/`; SelfVitMilError where built ones are missing."""
    folder = resources.files("selfvitmil.view") / "static"
    files = _files_in(folder, "")
    files.update(_files_in(folder / "vendor", "vendor/"))
    if missing := [name.removeprefix("vendor/") for name in BUILT if name not in files]:
        raise SelfVitMilError(
            f"{' and '.join(missing)}: missing from this installation of selfvitmil",
            "the web viewer is built with packages from npm while selfvitmil is installed, and that did not work",
            "Install a released wheel, or build again with a network: `pip install --force-reinstall --no-deps .` "
            "(`-e .` in a checkout)",
            code="viewer-not-built",
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


# ---------------------------------------------------------------------------------------------------- the folder


@dataclass(frozen=True)
class Exported:
    """What was written."""

    num_slides: int
    size_bytes: int
    notes: tuple[str, ...]
    failures: tuple[Failure, ...]


def write_folder(
    study: ViewedStudy,
    out: Path,
    *,
    slides: Sequence[str] = (),
    top_mpp: float = 2.0,
    say: Callable[[str], None] = print,
) -> Exported:
    """Write the folder, which must not exist or be empty; a slide that fails is left out and reported."""
    if not 0 < top_mpp < math.inf:
        raise ConfigError(
            f"--export-mpp {top_mpp:g}",
            "no picture has that",
            "Give microns per pixel, for instance 2",
            code="invalid-mpp",
        )
    files = static_files()
    chosen, notes = choose_slides(study, slides)
    plans, failures = _plans(chosen, top_mpp)
    num_tiles = sum(math.prod(plan.opened.zoom.num_tiles(level)) for plan in plans for level in plan.levels)
    say(f"{len(plans)} slides, {num_tiles} pictures, about {num_tiles * PICTURE_BYTES / 1e6:.0f} MB")
    written: list[ViewedSlide] = []
    shown = {plan.slide.id for plan in plans}
    with _new_folder(out) as folder, ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        write_static(folder, files)
        for plan in plans:
            try:
                _write_slide(folder, study, plan, shown, pool)
                written.append(plan.slide)
            except SelfVitMilError as error:
                _remove_slide(folder, plan.slide)
                failures.append(Failure.of(plan.slide.row.slide, "view", error))
        _write_text(folder / "data" / "study.js", f"window.SELFVITMIL_DATA = {to_json(_study_data(study, written))};\n")
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return Exported(len(written), size, tuple(notes), tuple(failures))


def choose_slides(study: ViewedStudy, names: Sequence[str]) -> tuple[list[ViewedSlide], list[str]]:
    """Return the slides that were named, else those with heatmaps, else all, and of these at most `MAX_SLIDES`."""
    if names:
        wanted = {study.id_of(name) for name in names}
        return [slide for id, slide in study.slides.items() if id in wanted], []
    with_heatmaps = [slide for slide in study.slides.values() if study.models_of(slide)]
    possible = with_heatmaps or list(study.slides.values())
    notes: list[str] = []
    if len(possible) > MAX_SLIDES:
        kind = "slides with heatmaps" if with_heatmaps else "slides"
        notes.append(f"the first {MAX_SLIDES} of {len(possible)} {kind}; --slides names others")
    return possible[:MAX_SLIDES], notes


# ---------------------------------------------------------------------------------------------------- one slide


@dataclass(frozen=True)
class _Plan:
    slide: ViewedSlide
    opened: tiles.OpenedSlide
    levels: range


def _plans(chosen: Sequence[ViewedSlide], top_mpp: float) -> tuple[list[_Plan], list[Failure]]:
    plans: list[_Plan] = []
    failures: list[Failure] = []
    for slide in chosen:
        try:
            opened = tiles.open_for_viewing(slide.ref)
        except (SelfVitMilError, OSError) as error:
            failures.append(Failure.of(slide.row.slide, "view", error))
            continue
        plans.append(_Plan(slide, opened, range(top_level(opened, top_mpp) + 1)))
        opened.slide.close()  # opens again when it is its turn
    return plans, failures


def top_level(opened: tiles.OpenedSlide, top_mpp: float) -> int:
    """Return the finest level not finer than `top_mpp`, to within 1 %: scanners' values are not round."""
    zoom = opened.zoom
    if opened.mpp is None:
        halvings = math.ceil(math.log2(max(zoom.size_l0) / MAX_EDGE_PX))
    else:
        halvings = math.ceil(math.log2(top_mpp / opened.mpp * 0.99))
    return min(zoom.max_level, max(0, zoom.max_level - halvings))


def _write_slide(
    folder: Path, study: ViewedStudy, plan: _Plan, shown: Collection[str], pool: ThreadPoolExecutor
) -> None:
    slide, opened = plan.slide, plan.opened

    def write_tile(place: tuple[int, int, int]) -> None:
        level, column, row = place
        path = folder / "tiles" / slide.id / str(level) / f"{column}_{row}.jpg"
        path.write_bytes(tiles.to_jpeg(tiles.read_tile(opened, level, column, row)))

    try:
        _write_bytes(folder / "thumbnails" / f"{slide.id}.jpg", tiles.to_jpeg(tiles.read_thumbnail(opened)))
        for level in plan.levels:
            (folder / "tiles" / slide.id / str(level)).mkdir(parents=True)
            columns, rows = opened.zoom.num_tiles(level)
            list(pool.map(write_tile, ((level, column, row) for row in range(rows) for column in range(columns))))
        _write_text(folder / "data" / f"{slide.id}.js", _slide_script(study, plan, shown))
    finally:
        opened.slide.close()


def _slide_script(study: ViewedStudy, plan: _Plan, shown: Collection[str]) -> str:
    slide = plan.slide
    info = study.slide_data(slide, plan.opened)
    info["similar"] = [each for each in info["similar"] if each["slide"] in shown]
    info |= {"max_level": plan.levels[-1], "levels": info["levels"][: len(plan.levels)]}
    heatmaps = {model: study.heatmap_json(slide, model) for model in info["maps"]}
    lesions = {model: to_json(study.lesions_data(slide, model)) for model in info["maps"]}
    annotation = to_json(study.annotation_data(slide) if slide.row.annotation is not None else [])
    parts = {"slide": to_json(info), "maps": _object(heatmaps), "lesions": _object(lesions), "annotation": annotation}
    return f'window.SELFVITMIL_DATA.slides["{slide.id}"] = {_object(parts)};\n'


def _object(parts: Mapping[str, str]) -> str:
    """Return a JSON object from values that are JSON already."""
    return "{" + ",".join(f"{to_json(key)}:{text}" for key, text in parts.items()) + "}"


def _remove_slide(folder: Path, slide: ViewedSlide) -> None:
    shutil.rmtree(folder / "tiles" / slide.id, ignore_errors=True)
    (folder / "thumbnails" / f"{slide.id}.jpg").unlink(missing_ok=True)
    (folder / "data" / f"{slide.id}.js").unlink(missing_ok=True)


# ---------------------------------------------------------------------------------------------------- the rest


def write_static(folder: Path, files: Mapping[str, StaticFile]) -> None:
    """Write the page and what it needs, with our modules as one script."""
    page = files["index.html"].content.decode("utf-8")
    for tag in (CHARSET_TAG, MODULE_TAG):
        if page.count(tag) != 1:
            raise ValueError(f"index.html must have {tag} once")
    page = page.replace(MODULE_TAG, SCRIPT_TAGS)
    page = page.replace(CHARSET_TAG, f'{CHARSET_TAG}\n  <meta http-equiv="Content-Security-Policy" content="{POLICY}">')
    _write_text(folder / "index.html", page)
    for name, file in files.items():
        if name != "index.html" and not (name.endswith(".js") and "/" not in name):  # modules are in viewer.js
            _write_bytes(folder / "static" / name, file.content)


def _study_data(study: ViewedStudy, written: Sequence[ViewedSlide]) -> dict[str, Any]:
    ids = {slide.id for slide in written}
    data = study.study_data()
    rows = [{**row, "thumbnail": f"thumbnails/{row['id']}.jpg"} for row in data["slides"] if row["id"] in ids]
    used = {model for row in rows for model in row["predictions"]}
    data |= {
        "exported": True,
        "slides": rows,
        "models": [model for model in data["models"] if model["id"] in used],
        "failures": [failure for failure in data["failures"] if failure["slide"] in ids],
    }
    return {"study": data, "slides": {}}


@contextmanager
def _new_folder(out: Path) -> Generator[Path]:
    """Yield a temporary folder beside `out` that takes its place in the end, or is removed."""
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ConfigError(
            f"{out.name}: exists already", "nothing in it may be lost", "Choose a new folder", code="out-exists"
        )
    temporary = temporary_beside(out.absolute())
    try:
        temporary.mkdir(parents=True)
        yield temporary
        os.replace(temporary, out)
    except OSError as error:
        raise write_error(out, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write_text(path: Path, text: str) -> None:
    _write_bytes(path, text.encode("utf-8"))


def _write_bytes(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
