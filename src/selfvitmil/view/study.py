"""A study as the viewer shows it: slides and models under opaque ids, and everything told of them as plain data.

In come the study folder and its cohort; out go dictionaries that become JSON. An id is looked up here and nowhere else:
no part of a request is ever made into a path. Maps are found by listing their folders (see `index`); slides and
annotations are the files that the cohort names.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from selfvitmil import __version__
from selfvitmil.annotations import Annotation, read_annotations
from selfvitmil.cohort import Cohort, SlideRow
from selfvitmil.errors import ArtefactError
from selfvitmil.localize.heatmap import read_heatmap
from selfvitmil.pseudonyms import Names, names_of
from selfvitmil.settings import StudySettings
from selfvitmil.store.failures import Failure, read_failures
from selfvitmil.store.layout import StudyLayout
from selfvitmil.view.index import HeatmapEntry, HeatmapIndex, Model, opaque_id, prediction_data
from selfvitmil.view.tiles import OVERLAP_PX, TILE_PX, OpenedSlide, Source

NOTICE = "For research only. Not a medical device: do not use it for diagnosis."


@dataclass(frozen=True)
class ViewedSlide:
    """A slide of the cohort."""

    id: str
    name: str
    """What it is called in the viewer."""
    row: SlideRow
    source: Source


class ViewedStudy:
    """One study, for as long as it is looked at. Methods may be called from several threads."""

    def __init__(self, folder: Path, cohort: Cohort, settings: StudySettings, names: Names | None = None):
        self.folder = folder.resolve()
        self.cohort = cohort
        self.settings = settings
        self.names = names or names_of(folder, cohort, pseudonyms=False)
        self.slides: dict[str, ViewedSlide] = {}
        # Accession numbers follow dates, and so does the cohort's order: it must not outlive the names.
        rows = sorted(cohort.rows, key=lambda row: self.names.slide(row.slide)) if self.names.hidden else cohort.rows
        given = settings.slide
        for row in rows:
            source = Source(row.path, given.reader, row.mpp or given.forced_mpp, given.mpp)
            name = self.names.slide(row.slide)
            slide = ViewedSlide(opaque_id("s", name), name, row, source)
            self.slides[slide.id] = slide
        assert len(self.slides) == len(cohort.rows)
        self._ids = {slide.row.slide: slide.id for slide in self.slides.values()}
        self.index = HeatmapIndex(folder, self._ids)

    @property
    def title(self) -> str:
        return "study" if self.names.hidden else self.folder.name

    def id_of(self, slide: str) -> str:
        """Id of a slide by its name in the cohort; CohortError, naming the nearest, when there is none."""
        return self._ids[self.cohort[slide].slide]

    def heatmap_entry(self, slide: ViewedSlide, model: str) -> HeatmapEntry:
        """The map of a slide by a model, given by its id; KeyError when there is none."""
        return self.index.found().models[model].maps[slide.row.slide]

    def maps_of(self, slide: ViewedSlide) -> list[str]:
        """Ids of the models that have a map of the slide."""
        return [model.id for model in self.index.found().models.values() if slide.row.slide in model.maps]

    # ------------------------------------------------------------------------------------------------ as plain data

    def study_data(self) -> dict[str, Any]:
        """The list of slides with what each model said of them."""
        found = self.index.found()
        models = list(found.models.values())
        failures = self._recorded_failures()
        failed = {failure.slide: failure for failure in reversed(failures)}
        return {
            "title": self.title,
            "version": __version__,
            "research_notice": NOTICE,
            "exported": False,
            "pseudonyms": self.names.hidden,
            "models": [model_data(model) for model in models],
            "slides": [self._slide_row(slide, models, failed.get(slide.row.slide)) for slide in self.slides.values()],
            "failures": self._failures_data((*failures, *found.failures)),
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
        there = row.path.exists()
        problem = ""
        if not there:
            problem = "The slide's file is not where the cohort says. Was it moved, or is its drive not mounted?"
        elif failure is not None:
            problem = self.names.text(f"{failure.stage}: {failure.reason}")
        return {
            "id": slide.id,
            "name": slide.name,
            "label": row.label,
            "patient": self.names.patient(row.patient),
            "split": row.split,
            "status": "missing" if not there else "failed" if failure else "ok",
            "problem": problem,
            "thumbnail": f"api/slides/{slide.id}/thumbnail.jpg" if there else None,
            "annotation": row.annotation is not None,
            "predictions": {
                model.id: short_prediction(model, row.slide) for model in models if row.slide in model.maps
            },
        }

    def _failures_data(self, failures: Iterable[Failure]) -> list[dict[str, Any]]:
        told = [self._failure_data(failure) for failure in failures]
        return sorted(told, key=lambda one: one["name"]) if self.names.hidden else told

    def _failure_data(self, failure: Failure) -> dict[str, Any]:
        return {
            "slide": self._ids.get(failure.slide),
            "name": self.names.slide(failure.slide) if failure.slide in self._ids else "",
            "stage": failure.stage,
            "reason": self.names.text(failure.reason),
            "remedy": self.names.text(failure.remedy),
        }

    def slide_data(self, slide: ViewedSlide, opened: OpenedSlide) -> dict[str, Any]:
        """What a viewer must know before it asks for tiles."""
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
            "maps": self.maps_of(slide),
            "warnings": [self.names.text(text) for text in opened.slide.warnings],
        }

    def heatmap_json(self, slide: ViewedSlide, model: str) -> str:
        """The map of a slide as JSON: the longest answer there is, so it is written straight."""
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
            "prediction": prediction_data(asdict(heatmap.prediction)),
            "columns": list(numbers),
        }
        arrays = {
            "coords": ",".join(map(str, heatmap.coords_l0.ravel().tolist())),
            "strongest_first": ",".join(map(str, rank_tiles(heatmap).tolist())),
        }
        arrays.update((name, ",".join(map(number_text, values.tolist()))) for name, values in numbers.items())
        return f"{to_json(head)[:-1]},{','.join(f'{json.dumps(name)}:[{text}]' for name, text in arrays.items())}}}"

    def lesions_data(self, slide: ViewedSlide, model: str) -> list[dict[str, Any]]:
        """Outlines of what the map shows, with their measurements, highest first.

        Lesions where the slide is called positive, else its highest-ranked regions: `finding` tells.
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
        """What people outlined; KeyError where the cohort names no file."""
        if slide.row.annotation is None:
            raise KeyError(slide.id)
        outlines = read_annotations(slide.row.annotation, repair=True)
        return [
            {
                "name": "" if self.names.hidden else outline.name,  # people write all sorts of things there
                "group": outline.group,
                "kind": outline.kind,
                "rings": rings_of(outline),
            }
            for outline in outlines
        ]


# ---------------------------------------------------------------------------------------------------- pieces


def model_data(model: Model) -> dict[str, Any]:
    """What is the same for all maps of a model; None where it differs between them."""
    told = [entry.told for entry in model.maps.values()]
    predictions = [one["prediction"] for one in told]
    return {
        "id": model.id,
        "name": model.name,
        **{key: _only(one[key] for one in told) for key in ("method", "kind", "scale")},
        "classes": predictions[0]["classes"],
        "shown": _only(prediction["shown"] for prediction in predictions),
    }


def _only(values: Iterable[Any]) -> Any:
    different = set(values)
    return different.pop() if len(different) == 1 else None


def short_prediction(model: Model, slide: str) -> dict[str, Any]:
    """What the list of slides shows."""
    prediction = model.maps[slide].told["prediction"]
    keys = ("probability", "decision", "positive", "shown", "threshold", "threshold_from", "part", "split")
    num_lesions = None if model.num_lesions is None else model.num_lesions.get(slide, 0)
    return {**{key: prediction[key] for key in keys}, "lesions": num_lesions}


def rings_of(outline: Annotation) -> list[list[list[float]]]:
    """Outline and holes, to a tenth of a level-0 pixel."""
    rings: Sequence[Any] = (outline.polygon, *outline.holes)
    return [np.round(ring, 1).tolist() for ring in rings]


def number_text(value: float) -> str:
    """Four digits are more than a screen can show."""
    return f"{value:.4g}" if math.isfinite(value) else "null"


def to_json(value: Any) -> str:
    """Compact; what is not a number is refused rather than sent as something no browser reads."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
