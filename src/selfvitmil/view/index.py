"""Which maps a study has: its folders listed, and of every map what it says of its slide.

Reading that from 10,000 maps takes seconds, so it is done once; later only files that have changed are opened. Only
files that really lie inside the study count: a link that leads out of it is refused and said so.
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from selfvitmil.errors import ArtefactError, ConfigError
from selfvitmil.localize.heatmap import SCHEMA, SlidePrediction, main_first
from selfvitmil.settings import LocalizeSettings, read_toml, resolve_settings, without_removed
from selfvitmil.store.failures import Failure
from selfvitmil.store.layout import StudyLayout
from selfvitmil.untrusted import open_hdf5

REFRESH_S = 2.0
"""Folders are listed again at most this often."""

State = tuple[int, int, int]
"""Changes when a file does."""


@dataclass(frozen=True)
class HeatmapEntry:
    """A map file that can be shown, and what it says of its slide."""

    path: Path
    state: State
    told: Mapping[str, Any]
    """`method`, `kind`, `scale`, and `prediction` as `prediction_data` makes it."""


@dataclass(frozen=True)
class Model:
    """What one model made of the slides."""

    id: str
    name: str
    """Name of its folder under maps/."""
    maps: Mapping[str, HeatmapEntry]
    """By slide."""
    num_lesions: Mapping[str, int] | None
    """By slide, those without any left out; None where no table of lesions was written."""
    settings: LocalizeSettings | None
    """What they were made with; None where that is not told."""


@dataclass(frozen=True)
class Found:
    """What there was when it was last looked."""

    models: Mapping[str, Model] = field(default_factory=dict)
    """By id."""
    failures: tuple[Failure, ...] = ()
    """Maps that are there but cannot be shown."""


class HeatmapIndex:
    """The maps of a study. May be asked from several threads."""

    def __init__(self, study: Path, slides: Collection[str]):
        self.study = study.resolve()
        self._slides = frozenset(slides)
        self._lock = threading.Lock()
        self._found = Found()
        self._refused: dict[Path, tuple[State, str]] = {}
        self._looked = -REFRESH_S

    def found(self) -> Found:
        """What there is now, or was a moment ago."""
        with self._lock:
            if time.monotonic() - self._looked >= REFRESH_S:
                models = [
                    self._model(folder) for folder in sorted(self._folders(), key=lambda path: main_first(path.name))
                ]
                self._found = Found({model.id: model for model in models if model.maps}, self._failures())
                self._looked = time.monotonic()
            return self._found

    def _folders(self) -> Iterator[Path]:
        folder = StudyLayout(self.study).heatmaps_folder
        if folder.is_dir():
            yield from (path for path in folder.iterdir() if path.is_dir() and self._is_inside(path))

    def _model(self, folder: Path) -> Model:
        known = self._found.models.get(opaque_id("m", folder.name))
        maps: dict[str, HeatmapEntry] = {}
        with os.scandir(folder) as entries:
            for entry in entries:
                slide = entry.name.removesuffix(".h5")
                if slide == entry.name or slide not in self._slides or not entry.is_file():
                    continue
                path, state = Path(entry.path), state_of(entry.stat())
                if known and slide in known.maps and known.maps[slide].state == state:
                    maps[slide] = known.maps[slide]
                elif (fresh := self._read(path, state, entry.is_symlink())) is not None:
                    maps[slide] = fresh
        id = opaque_id("m", folder.name)
        return Model(id, folder.name, maps, self._count_lesions(folder / "lesions.csv"), self._settings(folder))

    def _read(self, path: Path, state: State, is_link: bool) -> HeatmapEntry | None:
        if self._refused.get(path, (None, ""))[0] == state:
            return None
        if is_link and not self._is_inside(path):
            self._refused[path] = state, "it is a link that leads out of the study"
            return None
        try:
            entry = HeatmapEntry(path, state, read_told(path))
        except ArtefactError as error:
            self._refused[path] = state, error.why
            return None
        self._refused.pop(path, None)
        return entry

    def _is_inside(self, path: Path) -> bool:
        return path.resolve().is_relative_to(self.study)

    def _count_lesions(self, path: Path) -> Mapping[str, int] | None:
        try:
            if not self._is_inside(path):
                return None
            with path.open(newline="", encoding="utf-8") as file:
                return Counter(row["slide"] for row in csv.DictReader(file))
        except (OSError, ValueError, KeyError):
            return None  # a count is a nicety; the maps themselves are what is shown

    def _settings(self, folder: Path) -> LocalizeSettings | None:
        path = folder / "settings.toml"
        if not path.is_file() or not self._is_inside(path):
            return None
        try:
            return resolve_settings(None, without_removed(read_toml(path))).localize
        except ConfigError:  # of another version
            return None

    def _failures(self) -> tuple[Failure, ...]:
        self._refused = {path: reason for path, reason in self._refused.items() if path.is_symlink() or path.exists()}
        return tuple(
            Failure(
                path.stem, "view", f"the map of {path.parent.name} is not shown, {why}", "Localize this slide again"
            )
            for path, (_, why) in sorted(self._refused.items())
        )


def opaque_id(letter: str, name: str) -> str:
    """The same in every run, and fit for a web address whatever the name."""
    return letter + hashlib.sha256(name.encode()).hexdigest()[:12]


def state_of(stat: os.stat_result) -> State:
    """Changes when the file does."""
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def read_told(path: Path) -> Mapping[str, Any]:
    """What a map says of its slide, without its tiles; ArtefactError where it cannot be read."""
    try:
        with open_hdf5(path) as file:
            if file.attrs.get("schema") != SCHEMA:
                raise ValueError("it is no file of ours")
            told = json.loads(str(file.attrs["told"]))
        return {
            **{key: told[key] for key in ("method", "kind", "scale")},
            "prediction": prediction_data(told["verdict"]),
        }
    except (OSError, KeyError, ValueError, TypeError, AttributeError) as error:
        why = "it cannot be read" if isinstance(error, OSError) else f"it lacks a part ({error})"
        raise ArtefactError(f"{path.name}: not a readable map", why, "Localize this slide again") from None


def prediction_data(told: Mapping[str, Any]) -> dict[str, Any]:
    """A prediction in plain values; `probability` is that of the class shown, `probabilities` are all."""
    plain: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in told.items()}
    prediction = SlidePrediction(**plain)
    return {
        **asdict(prediction),
        "probability": prediction.shown_probability,
        "probabilities": prediction.probability,
        "positive": prediction.is_positive,
    }
