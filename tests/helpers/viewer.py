"""A small study to look at, for tests of the viewer: slides, an annotation, maps, a missing file, a failure."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from helpers.heatmaps import PREDICTION, make_heatmap
from selfvitmil.annotations import Annotation, write_annotations
from selfvitmil.cohort import read_cohort
from selfvitmil.errors import SelfVitMilError
from selfvitmil.localize.heatmap import write_heatmap
from selfvitmil.settings import StudySettings
from selfvitmil.slides.synthetic import make_slide
from selfvitmil.store.failures import Failure, record_failures
from selfvitmil.view.export import StaticFile, static_files
from selfvitmil.view.guard import names_for
from selfvitmil.view.server import make_app
from selfvitmil.view.study import Names, ViewedStudy

SIZE = (1500, 1100)
MPP = 0.25
MODELS = ("vit_abmil", "vit_dsmil")
COHORT = """slide,path,label,patient,split,mpp,annotation
Meier_01,slides/Meier_01.svs,tumor,Anna Meier,test,,Meier_01.xml
other,slides/other.svs,normal,Bert,test,,
unlabelled,slides/unlabelled.svs,,,,,
missing,slides/missing.svs,normal,Carl,train,,
"""
OUTLINE = np.array([[100.0, 100.0], [600.0, 120.0], [500.0, 700.0]])
STATIC = {
    "index.html": StaticFile(b"<!doctype html><title>page</title>", "text/html; charset=utf-8"),
    "main.js": StaticFile(b"export const x = 1;", "text/javascript; charset=utf-8"),
    "vendor/openseadragon.min.js": StaticFile(b"/* zoom */", "text/javascript; charset=utf-8"),
}


def packaged_files() -> dict[str, StaticFile]:
    """Return the viewer's real files; skips where built ones are missing: built without a network."""
    try:
        return static_files()
    except SelfVitMilError as error:
        pytest.skip(f"the viewer was built without a network, and lacks its files: {error}")


def make_slide_file(path: Path) -> Path:
    """The one slide that all tests look at."""
    path.parent.mkdir(parents=True, exist_ok=True)
    make_slide(path, seed=3, size=SIZE, mpp=MPP)
    return path


def make_study(folder: Path, slide_file: Path) -> Path:
    """Four slides: two with maps of two models, one without label and map, one whose file is missing."""
    (folder / "slides").mkdir(parents=True)
    for name in ("Meier_01", "other", "unlabelled"):
        shutil.copy(slide_file, folder / "slides" / f"{name}.svs")
    (folder / "cohort.csv").write_text(COHORT, encoding="utf-8")
    write_annotations(folder / "Meier_01.xml", [Annotation("of Anna Meier", "Tumor", OUTLINE)])
    for model in MODELS:
        for slide, lesion in (("Meier_01", (1, 1, 2, 1)), ("other", None)):
            heatmap = make_heatmap(6, 4, lesion, extent_l0=224.0, slide_mpp=MPP, slide=slide, model=model)
            heatmap = replace(heatmap, frame=replace(heatmap.frame, size_l0=SIZE))
            if lesion is None:
                heatmap = replace(heatmap, prediction=replace(PREDICTION, probability=(0.1,), decision="normal"))
            write_heatmap(folder / "maps" / model / f"{slide}.h5", heatmap, "made")
    (folder / "maps" / "vit_dsmil" / "lesions.csv").write_text("slide,score\nMeier_01,0.9\nMeier_01,0.8\n")
    failure = Failure("unlabelled", "tile", "unlabelled.svs: no tissue was found", "Look at it")
    record_failures(folder, "tile", ["unlabelled"], [failure])
    return folder


def viewed(study: Path, names: Names | None = None) -> ViewedStudy:
    return ViewedStudy(study, read_cohort(study / "cohort.csv"), StudySettings(), names)


def app_of(study: Path, names: Names | None = None, **options):
    """The guarded application as it runs on 127.0.0.1, and the study behind it."""
    shown = viewed(study, names)
    return make_app(shown, STATIC, **{"hosts": names_for("127.0.0.1"), **options}), shown
