"""What a study holds, read once for its report. What is missing is empty; what cannot be read is noted, not raised."""

from __future__ import annotations

import csv
import json
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from selfvitmil.cohort import Cohort, read_cohort
from selfvitmil.errors import ConfigError, SelfVitMilError
from selfvitmil.evaluate.predictions import Prediction, read_predictions
from selfvitmil.localize.heatmap import MAIN_METHOD, Heatmap, SlidePrediction, main_first, read_heatmap
from selfvitmil.runtime.training import read_metrics
from selfvitmil.store.failures import Failure, read_failures
from selfvitmil.store.layout import SETTINGS_FILE, SLIDES_FILE, StudyLayout, feature_name, tiling_summary

T = TypeVar("T")
Record = dict[str, str]


@dataclass(frozen=True)
class Tiling:
    """The slides cut in one way."""

    name: str
    rows: Mapping[str, Record]
    """Rows of `tiles.csv` by slide."""
    pictures: Mapping[str, Path]
    """Pictures of tissue and kept tiles, by slide."""


@dataclass(frozen=True)
class EncoderFolder:
    """An encoder of the study."""

    name: str
    config: Mapping[str, Any]
    metrics: Sequence[Mapping[str, Any]]
    settings: Mapping[str, Any]
    slides: Sequence[str] = ()
    """Slides that it was trained on, as far as its folder tells."""

    @property
    def provenance(self) -> Mapping[str, Any]:
        """What its config tells of its training; empty where it tells nothing."""
        own = self.config.get("selfvitmil")
        told = own.get("provenance") if isinstance(own, dict) else None
        return told if isinstance(told, dict) else {}


@dataclass(frozen=True)
class Results:
    """A folder of results: of one method, or a comparison of several."""

    name: str
    folder: Path
    metrics: Mapping[str, Any]
    predictions: Sequence[Prediction]
    class_names: tuple[str, ...]
    figures: Mapping[str, Path]
    """SVG files by their names without suffix."""
    table: str | None
    """Text of `table.md`."""
    records: Sequence[Record]
    """Rows of `table.csv`."""
    lesions: Mapping[str, Any] | None
    """Localization scores, `lesions.json`."""
    lesion_table: str | None
    """Text of `lesions.md`, where the maps of several models were compared."""
    lesion_slides: Mapping[str, Record]
    """Rows of `lesion_slides.csv` by slide."""

    @property
    def methods(self) -> Sequence[Mapping[str, Any]]:
        return self.metrics.get("methods") or []

    @property
    def is_comparison(self) -> bool:
        return self.table is not None or bool(self.records) or len(self.methods) > 1


@dataclass(frozen=True)
class Maps:
    """The maps of one model."""

    model: str
    files: Mapping[str, Path]
    """By slide, those that can be read."""
    predictions: Mapping[str, SlidePrediction]
    lesions: Mapping[str, Sequence[Record]]
    """Rows of `lesions.csv`, by slide."""
    settings: Mapping[str, Any]

    def read(self, slide: str) -> Heatmap:
        return read_heatmap(self.files[slide])

    def overlay(self, slide: str) -> Path | None:
        """The picture that was drawn with the map: as in the paper where there are several."""
        folder = self.files[slide].parent
        named = [folder / f"{slide}_{colors}.png" for colors in ("red", "inferno", "viridis")]
        return next((path for path in named if path.exists()), None)


@dataclass(frozen=True)
class Finding:
    """What the study's main model says of a slide."""

    probability: float
    """Of the class that is looked for; of the one decided for where there are more than two."""
    shown: str
    decision: str
    threshold: float | None
    threshold_from: str
    part: str
    label: str | None

    @property
    def is_right(self) -> bool | None:
        """None where the truth is not known."""
        return None if self.label is None else self.label == self.decision

    @property
    def is_positive(self) -> bool:
        return self.decision == self.shown


@dataclass(frozen=True)
class Contents:
    """All that a report tells of."""

    study: Path
    cohort: Cohort | None
    checked: Mapping[str, Record]
    tilings: Sequence[Tiling]
    encoders: Sequence[EncoderFolder]
    bags: Mapping[str, int]
    """Number of feature files by `<tiling>/<encoder>`."""
    models: int
    results: Sequence[Results]
    maps: Sequence[Maps]
    """Those of the main model first."""
    failures: Sequence[Failure]
    settings: Mapping[str, Mapping[str, Any]]
    """Every `settings.toml` of the study, and its `study.toml`, by where they lie in it."""
    problems: Sequence[str] = field(default_factory=tuple)
    """What could not be read."""

    @property
    def name(self) -> str:
        return self.study.resolve().name

    @property
    def slides(self) -> list[str]:
        """Every slide that is named anywhere, those of the cohort first and in its order."""
        named = [*(row.slide for row in self.cohort.rows)] if self.cohort else []
        for tiling in self.tilings:
            named += [*tiling.rows, *tiling.pictures]
        named += [row.slide for results in self.results for row in results.predictions]
        named += [slide for maps in self.maps for slide in (*maps.files, *maps.lesions)]
        named += [*self.checked, *(failure.slide for failure in self.failures)]
        return list(dict.fromkeys(named))

    @property
    def patients(self) -> list[str]:
        named = [row.patient for row in self.cohort.rows] if self.cohort else []
        named += [row.patient for results in self.results for row in results.predictions]
        return list(dict.fromkeys(named))

    def label(self, slide: str) -> str | None:
        return self.cohort[slide].label if self.cohort and slide in self.cohort else None

    def lesion_row(self, model: str, slide: str) -> Record:
        """How the heatmap of a slide agrees with its annotation; empty where that was not scored."""
        own = next((results for results in self.results if results.name == model), None)
        return {} if own is None else dict(own.lesion_slides.get(slide, {}))

    def findings(self) -> dict[str, Finding]:
        """By slide: what the first maps say, else the ensemble of the main method; of a test slide as a test slide."""
        found: dict[str, Finding] = {}
        predictions, class_names = _main_predictions(self.results)
        for row in predictions:
            if row.slide not in found or row.part == "test":
                found[row.slide] = _finding(row, class_names)
        for maps in self.maps[:1]:
            for slide, prediction in maps.predictions.items():
                found[slide] = Finding(
                    prediction.shown_probability, prediction.shown, prediction.decision, prediction.threshold,
                    prediction.threshold_from, prediction.part, self.label(slide),
                )  # fmt: skip
        return found


def _main_predictions(results: Sequence[Results]) -> tuple[list[Prediction], tuple[str, ...]]:
    """Of the ensemble, with the class names; results of the main method go first, comparisons last."""
    for one in sorted(results, key=lambda one: (one.is_comparison, MAIN_METHOD not in one.name)):
        methods = list(dict.fromkeys(row.method for row in one.predictions))
        if methods:
            main = MAIN_METHOD if MAIN_METHOD in methods else methods[0]
            return [row for row in one.predictions if row.seed is None and row.method == main], one.class_names
    return [], ()


def _finding(row: Prediction, names: tuple[str, ...]) -> Finding:
    binary = len(names) == 2
    return Finding(
        probability=row.score[0] if binary else row.score[row.decision],
        shown=names[1] if binary else names[row.decision],
        decision=names[row.decision],
        threshold=row.threshold,
        threshold_from=row.threshold_from,
        part=row.part,
        label=names[row.label],
    )


# ---------------------------------------------------------------------------------------------------- reading


class _Reader:
    """Reads what is there and remembers what could not be read."""

    def __init__(self, study: Path):
        self.study = study
        self.problems: list[str] = []

    def attempt(self, path: Path, read: Callable[[Path], T], otherwise: T) -> T:
        if not path.exists():
            return otherwise
        try:
            return read(path)
        except SelfVitMilError as error:
            self.problems.append(str(error))
        except (OSError, ValueError, KeyError, TypeError) as error:
            where = path.relative_to(self.study).as_posix()
            self.problems.append(f"{where} cannot be read ({type(error).__name__})")
        return otherwise

    def records(self, path: Path) -> list[Record]:
        return self.attempt(path, _records, [])

    def by_slide(self, path: Path) -> dict[str, Record]:
        return {row["slide"]: row for row in self.records(path) if row.get("slide")}


def read_contents(study: Path, only: Sequence[str] = ()) -> Contents:
    """Read a study; `only`: names of the results to show, all where it is empty.

    ConfigError where the folder is no study, or has no such results.
    """
    if not StudyLayout(study).has_any_artefact():
        why = "it holds none of the things that commands write" if study.is_dir() else "there is no such folder"
        raise ConfigError(f"{study.name}: not a study", why, "Name the folder that other commands were given")
    reader, layout = _Reader(study), StudyLayout(study)
    results = [_results(reader, folder) for folder in layout.all_results()]
    unknown = [name for name in only if name not in {one.name for one in results}]
    if unknown:
        there = ", ".join(one.name for one in results) or "none"
        raise ConfigError(f"{study.name}: no results called {unknown[0]!r}", f"there are {there}", "Name one of these")
    return Contents(
        study=study,
        cohort=reader.attempt(layout.cohort, read_cohort, None),
        checked=reader.by_slide(layout.check_table),
        tilings=[_tiling(reader, folder) for folder in layout.all_tilings()],
        encoders=[_encoder(reader, folder) for folder in layout.all_encoders()],
        bags=_count_bags(study),
        models=sum(1 for _ in layout.models_folder.rglob("model.safetensors")),
        results=[one for one in results if not only or one.name in only],
        maps=sorted(
            (_maps(reader, folder) for folder in layout.all_heatmaps()),
            key=lambda maps: main_first(maps.model),
        ),
        failures=reader.attempt(layout.failures, lambda path: read_failures(path.parent), []),
        settings={where: reader.attempt(path, _toml, {}) for where, path in _settings_files(study)},
        problems=list(dict.fromkeys(reader.problems)),
    )


def _tiling(reader: _Reader, folder: Path) -> Tiling:
    pictures = {path.stem: path for path in sorted(folder.glob("*.jpg"))}
    return Tiling(folder.name, reader.by_slide(tiling_summary(folder)), pictures)


def _encoder(reader: _Reader, folder: Path) -> EncoderFolder:
    return EncoderFolder(
        folder.name,
        reader.attempt(folder / "config.json", _json, {}),
        reader.attempt(folder / "metrics.jsonl", lambda path: read_metrics(path.parent), []),
        reader.attempt(folder / "settings.toml", _toml, {}),
        reader.attempt(folder / SLIDES_FILE, _text, "").splitlines(),
    )


def _results(reader: _Reader, folder: Path) -> Results:
    predictions, names = reader.attempt(folder / "predictions.csv", read_predictions, ([], ()))
    return Results(
        name=folder.name,
        folder=folder,
        metrics=reader.attempt(folder / "metrics.json", _json, {}),
        predictions=predictions,
        class_names=names,
        figures={path.stem: path for path in sorted(folder.glob("*.svg"))},
        table=reader.attempt(folder / "table.md", _text, None),
        records=reader.records(folder / "table.csv"),
        lesions=reader.attempt(folder / "lesions.json", _json, None),
        lesion_table=reader.attempt(folder / "lesions.md", _text, None),
        lesion_slides=reader.by_slide(folder / "lesion_slides.csv"),
    )


def _maps(reader: _Reader, folder: Path) -> Maps:
    files: dict[str, Path] = {}
    predictions: dict[str, SlidePrediction] = {}
    for path in sorted(folder.glob("*.h5")):
        heatmap = reader.attempt(path, read_heatmap, None)
        if heatmap is not None and len(heatmap):
            files[heatmap.slide], predictions[heatmap.slide] = path, heatmap.prediction
    lesions: dict[str, list[Record]] = {}
    for row in reader.records(folder / "lesions.csv"):
        lesions.setdefault(row.get("slide", ""), []).append(row)
    return Maps(folder.name, files, predictions, lesions, reader.attempt(folder / "settings.toml", _toml, {}))


def _count_bags(study: Path) -> dict[str, int]:
    counts: dict[str, int] = {}
    for folder in StudyLayout(study).all_features():
        counts[f"{folder.parent.name}/{feature_name(folder)}"] = sum(1 for _ in folder.glob("*.h5"))
    return counts


def _settings_files(study: Path) -> Iterator[tuple[str, Path]]:
    """The resolved settings beside everything that was made, in the order of the data."""
    layout = StudyLayout(study)
    yield layout.settings.name, layout.settings
    for folder in layout.artefact_folders:
        for path in sorted(folder.rglob(SETTINGS_FILE)):
            yield layout.name(path.parent), path


def _records(path: Path) -> list[Record]:
    with path.open(newline="", encoding="utf-8") as file:
        return [{key: value or "" for key, value in row.items() if key} for row in csv.DictReader(file)]


def _json(path: Path) -> dict[str, Any]:
    told = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(told, dict):
        raise TypeError("not an object")
    return told


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _toml(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text(encoding="utf-8"))
