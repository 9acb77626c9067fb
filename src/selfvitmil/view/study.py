"""A study as the viewer shows it: slides, models and heatmaps under opaque ids, as plain data.

In come the study folder and its cohort; out go dictionaries that become JSON. An id is looked up here and nowhere else:
no part of a request ever becomes part of a path. Slides and annotations are the files that the cohort names. Heatmaps
are found by listing their folders; only files inside the study count: a link that leads out of it is refused, with a
failure. Reading the predictions of 10,000 heatmaps takes seconds, so it is done once; later only changed files are
opened.
"""

from __future__ import annotations

import csv
import hashlib
import json
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from selfvitmil import __version__
from selfvitmil.annotations import Annotation, read_annotations
from selfvitmil.bags.files import is_feature_file
from selfvitmil.bags.retrieval import SIMILAR, SimilarSlides, newest_similar, read_similar
from selfvitmil.cohort import Cohort, SlideRow
from selfvitmil.errors import ArtefactError, ConfigError, SelfVitMilError
from selfvitmil.localize.grid import GridRef
from selfvitmil.localize.heatmap import SCHEMA, SlidePrediction, main_first, prediction_from_json, read_heatmap
from selfvitmil.pseudonyms import Names, names_of
from selfvitmil.settings import LocalizeSettings, StudySettings, read_toml, resolve_settings, without_removed
from selfvitmil.slides import SlideRef
from selfvitmil.store.failures import Failure, fold_failures, read_failures
from selfvitmil.store.files import open_hdf5
from selfvitmil.store.layout import StudyLayout
from selfvitmil.view.tiles import OVERLAP_PX, TILE_PX, FileState, OpenedSlide, state_of

NOTICE = "For research only. Not a medical device: do not use it for diagnosis."
REFRESH_S = 2.0
"""Folders are listed again at most this often."""


# ---------------------------------------------------------------------------------------------------- heatmaps


@dataclass(frozen=True)
class HeatmapEntry:
    """A heatmap file that can be shown, and its prediction."""

    path: Path
    state: FileState
    summary: Mapping[str, Any]
    """`method`, `kind`, `scale`, and `prediction` as `prediction_data` returns it."""


@dataclass(frozen=True)
class Model:
    """The heatmaps of one model."""

    id: str
    name: str
    """Name of its folder under maps/."""
    heatmaps: Mapping[str, HeatmapEntry]
    """By slide."""
    num_lesions: Mapping[str, int] | None
    """By slide, those without any left out; None where no table of lesions was written."""
    settings: LocalizeSettings | None
    """That they were built with; None where they are unknown."""


@dataclass(frozen=True)
class Found:
    """What the last listing found."""

    models: Mapping[str, Model] = field(default_factory=dict[str, Model])
    """By id."""
    failures: tuple[Failure, ...] = ()
    """Heatmaps that exist but cannot be shown."""


class HeatmapIndex:
    """The heatmaps of a study. May be used from several threads."""

    def __init__(self, study: Path, slides: Collection[str]):
        self.study = study.resolve()
        self._slides = frozenset(slides)
        self._lock = threading.Lock()
        self._found = Found()
        self._refused: dict[Path, tuple[FileState, str]] = {}
        self._looked = -math.inf

    def watch(self, slides: Collection[str]) -> None:
        """Look for heatmaps of these slides from now on."""
        with self._lock:
            self._slides = frozenset(slides)
            self._looked = -math.inf

    def found(self) -> Found:
        """Return what exists now, or did a moment ago."""
        with self._lock:
            if time.monotonic() - self._looked >= REFRESH_S:
                folders = sorted(self._folders(), key=lambda path: main_first(path.name))
                models = [self._model(folder) for folder in folders]
                self._found = Found({model.id: model for model in models if model.heatmaps}, self._failures())
                self._looked = time.monotonic()
            return self._found

    def _folders(self) -> Iterator[Path]:
        folder = StudyLayout(self.study).heatmaps_folder
        if folder.is_dir():
            yield from (path for path in folder.iterdir() if path.is_dir() and self._is_inside(path))

    def _model(self, folder: Path) -> Model:
        id = opaque_id("m", folder.name)
        known = self._found.models.get(id)
        heatmaps: dict[str, HeatmapEntry] = {}
        with os.scandir(folder) as entries:
            for entry in entries:
                slide = entry.name.removesuffix(".h5")
                if slide == entry.name or slide not in self._slides or not entry.is_file():
                    continue
                path, state = Path(entry.path), state_of(entry.stat())
                if known and slide in known.heatmaps and known.heatmaps[slide].state == state:
                    heatmaps[slide] = known.heatmaps[slide]
                elif (fresh := self._read(path, state, entry.is_symlink())) is not None:
                    heatmaps[slide] = fresh
        return Model(id, folder.name, heatmaps, self._count_lesions(folder / "lesions.csv"), self._settings(folder))

    def _read(self, path: Path, state: FileState, is_link: bool) -> HeatmapEntry | None:
        if self._refused.get(path, (None, ""))[0] == state:
            return None
        if is_link and not self._is_inside(path):
            self._refused[path] = state, "it is a link that leads out of the study"
            return None
        try:
            entry = HeatmapEntry(path, state, read_summary(path))
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
            return None  # heatmaps are shown without the count

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
                path.stem, "view", f"the heatmap of {path.parent.name} is not shown, {why}", "Localize this slide again"
            )
            for path, (_, why) in sorted(self._refused.items())
        )


def _table_state(path: Path) -> FileState | None:
    """Return by what a change of a file is seen; None where it does not exist."""
    try:
        return state_of(path.stat())
    except OSError:
        return None


def opaque_id(letter: str, name: str) -> str:
    """Return an id that is the same in every run, and fit for a web address whatever the name."""
    return letter + hashlib.sha256(name.encode()).hexdigest()[:12]


def read_summary(path: Path) -> Mapping[str, Any]:
    """Read method and prediction of a heatmap without its tiles; raises ArtefactError where it cannot be read."""
    try:
        with open_hdf5(path) as file:
            attributes: Any = file.attrs
            if attributes.get("schema") != SCHEMA:
                raise ValueError("it is no file of ours")
            stored = json.loads(str(attributes["told"]))
        prediction = prediction_data(prediction_from_json(stored["verdict"]))
        return {**{key: stored[key] for key in ("method", "kind", "scale")}, "prediction": prediction}
    except (OSError, KeyError, ValueError, TypeError, AttributeError) as error:
        why = "it cannot be read" if isinstance(error, OSError) else f"it lacks a part ({error})"
        raise ArtefactError(
            f"{path.name}: not a readable heatmap", why, "Localize this slide again", code="unreadable-heatmap"
        ) from None


# ---------------------------------------------------------------------------------------------------- study


@dataclass(frozen=True)
class ViewedSlide:
    """A slide of the cohort."""

    id: str
    name: str
    """As the viewer shows it."""
    row: SlideRow
    ref: SlideRef | GridRef
    """A grid where the cohort names a feature file in place of a slide."""


class ViewedStudy:
    """One study while it is viewed. Methods may be called from several threads."""

    def __init__(
        self,
        folder: Path,
        cohort: Cohort,
        settings: StudySettings,
        names: Names | None = None,
        follow: tuple[Path, Callable[[], tuple[Cohort, Names]]] | None = None,
        queue: bool = False,
    ):
        """`follow` is the table of the cohort and how to read it: slides that are added appear with the next list.

        `queue`: these are predictions, and slides without one wait for theirs.
        """
        self.queue = queue
        self.folder = folder.resolve()
        self.settings = settings
        self.index = HeatmapIndex(folder, ())
        self._similar: tuple[Any, SimilarSlides] = (None, {})
        """Where similar slides were read, and what was read."""
        self._follow, self._lock = follow, threading.Lock()
        self._state = _table_state(follow[0]) if follow else None
        self._take(cohort, names or names_of(folder, cohort, pseudonyms=False))

    def _take(self, cohort: Cohort, names: Names) -> None:
        self.cohort, self.names = cohort, names
        slides: dict[str, ViewedSlide] = {}
        # Accession numbers follow dates, and so does the cohort's order: pseudonyms must hide it too.
        rows = sorted(cohort.rows, key=lambda row: self.names.slide(row.slide)) if self.names.hidden else cohort.rows
        for row in rows:
            ref = SlideRef.of(row, self.settings.slide)
            if is_feature_file(row.path):
                ref = GridRef(row.slide, row.path, partial(self._any_heatmap, row.slide))
            name = self.names.slide(row.slide)
            slide = ViewedSlide(opaque_id("s", name), name, row, ref)
            slides[slide.id] = slide
        assert len(slides) == len(cohort.rows)
        self.slides = slides
        self._ids = {slide.row.slide: slide.id for slide in slides.values()}
        self.index.watch(self._ids)

    def _refresh(self) -> None:
        """Take up a table of the cohort that was changed; one that cannot be read changes nothing."""
        if self._follow is None:
            return
        table, read = self._follow
        with self._lock:
            state = _table_state(table)
            if state is None or state == self._state:
                return
            try:
                cohort, names = read()
            except (SelfVitMilError, OSError):
                return
            self._state = state
            self._take(cohort, names)

    def id_of(self, slide: str) -> str:
        """Return the id of a slide by its name in the cohort; raises CohortError, naming the nearest."""
        return self._ids[self.cohort[slide].slide]

    def heatmap_entry(self, slide: ViewedSlide, model: str) -> HeatmapEntry:
        """Return the heatmap of a slide by a model, given by its id; raises KeyError when there is none."""
        return self.index.found().models[model].heatmaps[slide.row.slide]

    def _any_heatmap(self, slide: str) -> Path | None:
        """Return a heatmap file of a slide, by its name; all have the same tiles."""
        models = self.index.found().models.values()
        return next((model.heatmaps[slide].path for model in models if slide in model.heatmaps), None)

    def models_of(self, slide: ViewedSlide) -> list[str]:
        """Return ids of the models that have a heatmap of the slide."""
        return [model.id for model in self.index.found().models.values() if slide.row.slide in model.heatmaps]

    # ------------------------------------------------------------------------------------------------ as plain data

    def study_data(self) -> dict[str, Any]:
        """Return the list of slides with the predictions of every model."""
        self._refresh()
        found = self.index.found()
        models = list(found.models.values())
        failures = self._recorded_failures()
        failed = {failure.slide: failure for failure in reversed(failures)}
        return {
            "title": "study" if self.names.hidden else self.folder.name,
            "version": __version__,
            "research_notice": NOTICE,
            "exported": False,
            "pseudonyms": self.names.hidden,
            "queue": self.queue,
            "models": [model_data(model) for model in models],
            "slides": [self._slide_row(slide, models, failed.get(slide.row.slide)) for slide in self.slides.values()],
            "failures": self._failures_data((*(cause for cause, _ in fold_failures(failures)), *found.failures)),
        }

    def _recorded_failures(self) -> list[Failure]:
        path = StudyLayout(self.folder).failures
        if not path.resolve().is_relative_to(self.folder):
            return []
        try:
            return read_failures(self.folder)
        except ArtefactError as error:  # one table that was edited by hand hides no slide
            return [Failure.of("", "view", error)]

    def _slide_row(self, slide: ViewedSlide, models: Sequence[Model], failure: Failure | None) -> dict[str, Any]:
        row = slide.row
        exists = row.path.exists()
        problem = ""
        if not exists:
            problem = "The slide's file is not where the cohort says. Was it moved, or is its drive not mounted?"
        elif failure is not None:
            problem = self.names.text(f"{failure.stage}: {failure.reason}")
        done = any(row.slide in model.heatmaps for model in models)
        return {
            "id": slide.id,
            "name": slide.name,
            "waits": self.queue and exists and failure is None and not done,
            "label": row.label,
            "patient": self.names.patient(row.patient),
            "split": row.split,
            "status": "missing" if not exists else "failed" if failure else "ok",
            "problem": problem,
            "thumbnail": f"api/slides/{slide.id}/thumbnail.jpg" if exists else None,
            "annotation": row.annotation is not None,
            "predictions": {
                model.id: short_prediction(model, row.slide) for model in models if row.slide in model.heatmaps
            },
        }

    def _failures_data(self, failures: Iterable[Failure]) -> list[dict[str, Any]]:
        data = [
            {
                "slide": self._ids.get(failure.slide),
                "name": self.names.slide(failure.slide) if failure.slide in self._ids else "",
                "stage": failure.stage,
                "reason": self.names.text(failure.reason),
                "remedy": self.names.text(failure.remedy),
            }
            for failure in failures
        ]
        return sorted(data, key=lambda one: str(one["name"])) if self.names.hidden else data

    def slide_data(self, slide: ViewedSlide, opened: OpenedSlide) -> dict[str, Any]:
        """Return what a viewer must know before it asks for tiles."""
        zoom = opened.zoom
        width, height = zoom.size_l0
        levels = range(zoom.max_level + 1)
        return {
            "id": slide.id,
            "name": slide.name,
            "width": width,
            "height": height,
            "mpp": opened.mpp,
            "tile_size": TILE_PX,
            "overlap": OVERLAP_PX,
            "max_level": zoom.max_level,
            "levels": [{"level": k, "width": zoom.size(k)[0], "height": zoom.size(k)[1]} for k in levels],
            "annotation": slide.row.annotation is not None,
            "maps": self.models_of(slide),
            "similar": self.similar_data(slide),
            "warnings": [self.names.text(text) for text in opened.slide.warnings],
        }

    def similar_data(self, slide: ViewedSlide) -> list[dict[str, Any]]:
        """Return the slides most like this one, as `slide-embeddings` found them last; none where it did not run."""
        folder = newest_similar(StudyLayout(self.folder))
        if folder is None or not (folder / SIMILAR).resolve().is_relative_to(self.folder):
            return []
        state = (folder, _table_state(folder / SIMILAR))
        if self._similar[0] != state:
            try:
                self._similar = (state, read_similar(folder)[0])
            except ArtefactError:
                self._similar = (state, {})
        found = self._similar[1].get(slide.row.slide, ())
        return [{"slide": self._ids[other], "similarity": value} for other, value in found if other in self._ids]

    def heatmap_json(self, slide: ViewedSlide, model: str) -> str:
        """Return the heatmap of a slide as JSON text: the longest answer there is, so it is written straight."""
        from selfvitmil.localize.detection import rank_tiles

        heatmap = read_heatmap(self.heatmap_entry(slide, model).path)
        numbers = {"score": heatmap.score, "detection": heatmap.detection, **heatmap.columns}
        if heatmap.annotated is not None:
            numbers["annotated"] = heatmap.annotated
        head = {
            "slide": slide.id,
            "model": model,
            "name": heatmap.model,
            "method": heatmap.method,
            "kind": heatmap.kind,
            "scale": heatmap.scale,
            "gated": heatmap.gated,
            "shown_because": heatmap.details.get("shown_because", ""),
            "warnings": [self.names.text(text) for text in heatmap.warnings],
            "frame": asdict(heatmap.frame),
            "prediction": prediction_data(heatmap.prediction),
            "columns": list(numbers),
        }
        arrays = {
            "coords": ",".join(map(str, heatmap.coords_l0.ravel().tolist())),
            "strongest_first": ",".join(map(str, rank_tiles(heatmap).tolist())),
        }
        arrays.update((name, ",".join(map(number_text, values.tolist()))) for name, values in numbers.items())
        return f"{to_json(head)[:-1]},{','.join(f'{json.dumps(name)}:[{text}]' for name, text in arrays.items())}}}"

    def lesions_data(self, slide: ViewedSlide, model: str) -> list[dict[str, Any]]:
        """Return the contours of what the heatmap shows, with their measurements, highest first.

        Lesions where the slide is called positive (`finding`), else its highest-ranked regions.
        """
        from selfvitmil.localize.detection import find_lesions

        heatmap = read_heatmap(self.heatmap_entry(slide, model).path)
        localize = self.index.found().models[model].settings or self.settings.localize
        staging = "none" if heatmap.only_ranks else localize.staging
        return [
            {
                "number": lesion.number,
                "score": lesion.score,
                "mean_score": lesion.mean_score,
                "area_mm2": lesion.area_mm2,
                "centroid_l0": lesion.centroid_l0,
                "peak_l0": lesion.peak_l0,
                "diameter_um": lesion.diameter_um,
                "tile_um": lesion.tile_um,
                "size_words": lesion.size_words(staging),
                "finding": not heatmap.only_ranks,
                "num_tiles": len(lesion.rows),
                "rings": rings_of(lesion.annotation),
            }
            for lesion in find_lesions(heatmap, localize.lesion_threshold, localize.min_lesion_mm2)
        ]

    def annotation_data(self, slide: ViewedSlide) -> list[dict[str, Any]]:
        """Return the annotated regions; raises KeyError where the cohort names no file."""
        if slide.row.annotation is None:
            raise KeyError(slide.id)
        return [
            {
                "name": "" if self.names.hidden else region.name,  # people write all sorts of things there
                "group": region.group,
                "kind": region.kind,
                "rings": rings_of(region),
            }
            for region in read_annotations(slide.row.annotation, repair=True)
        ]


# ---------------------------------------------------------------------------------------------------- pieces


def model_data(model: Model) -> dict[str, Any]:
    """Return what all heatmaps of a model share; None where it differs between them."""
    summaries = [entry.summary for entry in model.heatmaps.values()]
    predictions = [summary["prediction"] for summary in summaries]
    return {
        "id": model.id,
        "name": model.name,
        **{key: _only(summary[key] for summary in summaries) for key in ("method", "kind", "scale")},
        "classes": predictions[0]["classes"],
        "shown": _only(prediction["shown"] for prediction in predictions),
    }


def _only(values: Iterable[Any]) -> Any:
    different = set(values)
    return different.pop() if len(different) == 1 else None


def prediction_data(prediction: SlidePrediction) -> dict[str, Any]:
    """Return plain values; `probability` is that of the class shown, `probabilities` are all."""
    return {
        **asdict(prediction),
        "probability": prediction.shown_probability,
        "probabilities": prediction.probability,
        "positive": prediction.is_positive,
    }


def short_prediction(model: Model, slide: str) -> dict[str, Any]:
    """Return what the list of slides shows."""
    prediction = model.heatmaps[slide].summary["prediction"]
    keys = ("probability", "decision", "positive", "shown", "threshold", "threshold_from", "part", "split")
    num_lesions = None if model.num_lesions is None else model.num_lesions.get(slide, 0)
    said = {"value_words": prediction["value_words"]} if prediction["value_words"] else {}
    return {**{key: prediction[key] for key in keys}, **said, "lesions": num_lesions}


def rings_of(annotation: Annotation) -> list[list[list[float]]]:
    """Return contour and holes, to a tenth of a level-0 pixel."""
    return [np.round(ring, 1).tolist() for ring in (annotation.polygon, *annotation.holes)]


def number_text(value: float) -> str:
    """Return four digits, which are more than a screen can show."""
    return f"{value:.4g}" if math.isfinite(value) else "null"


def to_json(value: Any) -> str:
    """Return compact JSON; raises ValueError for NaN and infinity, which no browser reads."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
