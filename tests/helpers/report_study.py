"""A small study with something in every part of the report, made with the writers of the stages where that is quick."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from helpers import heatmaps
from selfvitmil.annotations import Annotation
from selfvitmil.cohort import SlideRow, make_cohort, write_cohort
from selfvitmil.evaluate.comparison import PUBLISHED, comparison_row, evaluated_on, write_results
from selfvitmil.evaluate.comparison_table import table_csv
from selfvitmil.evaluate.figures import roc_figure
from selfvitmil.evaluate.method_metrics import score_method
from selfvitmil.evaluate.predictions import Prediction
from selfvitmil.evaluate.protocol import MethodResult, Run
from selfvitmil.localize.heatmap import Frame, Heatmap, write_heatmap
from selfvitmil.localize.lesion_metrics import LesionCase, score_lesions
from selfvitmil.localize.lesion_results import LesionScores, write_lesion_scores
from selfvitmil.settings import EvaluateSettings, LocalizeSettings, StudySettings, to_toml
from selfvitmil.slides.synthetic import make_slide
from selfvitmil.store.failures import Failure, record_failures
from selfvitmil.store.files import write_text
from selfvitmil.store.provenance import BUILT

NASTY, GONE, TRAIN, WRONG = "Meier <b>H&E", "B-2044", "B-2045", "B-2046"
PATIENTS = {NASTY: "Petra Meier", GONE: "P-77", TRAIN: "P-78", WRONG: "P-79"}
FILE = "accession-9911"
"""Name of a slide's file, which is not the slide's name."""
TILING, MODEL = "0.5mpp_112px_0px", "vit_self-vit-mil"
SECRETS = [*PATIENTS, *PATIENTS.values(), FILE]
EVALUATE = EvaluateSettings(bootstrap=100)


def predictions(seed: int | None) -> list[Prediction]:
    told = {NASTY: (1, 0.9), GONE: (0, 0.2), WRONG: (1, 0.3)}
    return [
        Prediction(
            method="self-vit-mil", slide=slide, patient=PATIENTS[slide], split="given", part="test", label=label,
            seed=seed, score=(score,), max=None, bag=None, calibrated=None, threshold=0.5,
            threshold_from="Youden on validation", decision=int(score >= 0.5), protocol="honest",
        )
        for slide, (label, score) in told.items()
    ]  # fmt: skip


def result(**changes: Any) -> MethodResult:
    told = MethodResult(
        method="self-vit-mil", aggregator="self-vit-mil", class_names=("normal", "tumor"),
        predictions=(*predictions(0), *predictions(None)), runs=(Run("given", 0, 3, BUILT, 61.0, (), {}, {}),),
        choices={}, protocol="honest", labels_opened="final scoring", encoder="vit", tiling=TILING,
        warnings=(f"{TRAIN}: odd bag, left as it is",),
    )  # fmt: skip
    return replace(told, **changes)


def plant(study: Path) -> Path:
    """A small study with something in every part, made with the writers of the stages where that is quick."""
    (study / "files").mkdir(parents=True)
    make_slide(study / "files" / f"{FILE}.svs", seed=3, size=(1024, 1024), lesions=0)
    rows = [
        SlideRow(NASTY, study / "files" / f"{FILE}.svs", "tumor", PATIENTS[NASTY], "test"),
        SlideRow(GONE, study / "files" / "gone.svs", "normal", PATIENTS[GONE], "test"),
        SlideRow(TRAIN, study / "files" / "t.svs", "tumor", PATIENTS[TRAIN], "train"),
        SlideRow(WRONG, study / "files" / "w.svs", "tumor", PATIENTS[WRONG], "test"),
    ]
    write_cohort(study / "cohort.csv", make_cohort(rows))
    settings = StudySettings.model_validate(
        {"tile": {"size_px": 112}, "pretrain": {"batch": 32, "init": f"{study}/weights.pt"}}
    )
    tiles = study / "tiles" / TILING
    tiles.mkdir(parents=True)
    (tiles / "settings.toml").write_text(to_toml(settings, {"tile"}))
    lines = [f'"{slide}",{40 + k},0.5,"classes in {FILE}.xml that mean nothing"' for k, slide in enumerate(PATIENTS)]
    (tiles / "tiles.csv").write_text("slide,tiles,tissue_mm2,warnings\n" + "\n".join(lines) + "\n")
    for slide in PATIENTS:
        Image.new("RGB", (60, 40), "plum").save(tiles / f"{slide}.jpg", exif=_secret_exif())
    encoder = study / "encoders" / "vit"
    encoder.mkdir(parents=True)
    (encoder / "config.json").write_text(
        json.dumps({"architecture": "vit_tiny", "selfvitmil": {"trained_on": "train"}})
    )
    lines = [{"step": k, "loss": 6 - k / 10, "teacher_entropy": 3.0, "tiles_per_s": 8.0} for k in range(0, 10, 3)]
    (encoder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (encoder / "settings.toml").write_text(to_toml(settings, {"pretrain"}))
    plant_results(study / "results")
    plant_maps(study)
    write_lesion_scores(study / "results" / MODEL, lesion_scores())
    reason = f"{WRONG}_patches.h5: cannot be read at /home/jane doe/{WRONG}.svs, for Petra Meier"
    record_failures(study, "tile", [WRONG], [Failure(WRONG, "tile", reason, f"Look into '{study}/x y/z.log'")])
    return study


def _secret_exif() -> Image.Exif:
    exif = Image.Exif()
    exif[0x010E] = "Petra Meier"  # the description of the picture
    return exif


def plant_results(folder: Path) -> None:
    one = result()
    scored = score_method(one, EVALUATE)
    write_results(folder / MODEL, [one], [scored], EVALUATE)
    labels, scores = [1, 0, 1, 0], [0.9, 0.2, 0.3, 0.1]
    write_text(folder / MODEL / "roc.svg", roc_figure(labels, scores, f"ROC of {GONE}", resamples=100))
    row = comparison_row(one, scored, evaluated_on(one, "made"), published=PUBLISHED["self-vit-mil"])
    write_results(folder / "compare", [one], [scored], EVALUATE)
    write_text(folder / "compare" / "table.csv", table_csv([row]))


def make_heatmap(slide: str, probability: float, lesion: tuple[int, int, int, int] | None = (1, 2, 1, 1)) -> Heatmap:
    prediction = replace(
        heatmaps.PREDICTION, probability=(probability,), decision="tumor" if probability >= 0.4 else "normal"
    )
    frame = Frame(0.25, (1024, 1024), 224.0, 224.0, 0.5, 112)
    told = {"slide": slide, "model": MODEL, "method": "self-vit-mil", "frame": frame, "prediction": prediction}
    return heatmaps.make_heatmap(4, 4, lesion, extent_l0=224.0, **told)


def lesion_scores() -> LesionScores:
    """One slide with an outlined lesion of two tiles, one of which the map finds; one without; one left out."""
    outline = Annotation("lesion", "Tumor", np.array([[224, 448], [672, 448], [672, 672], [224, 672]], dtype=float))
    cases = [
        LesionCase(make_heatmap(NASTY, 0.9), (outline,), patient=PATIENTS[NASTY]),
        LesionCase(make_heatmap(GONE, 0.2, lesion=None), patient=PATIENTS[GONE]),
        LesionCase(make_heatmap(WRONG, 0.3), positive=True, patient=PATIENTS[WRONG]),
    ]
    return score_lesions(cases, [], LocalizeSettings(), EVALUATE)


def plant_maps(study: Path) -> None:
    folder = study / "maps" / MODEL
    for slide, probability in ((NASTY, 0.9), (GONE, 0.2), (WRONG, 0.3)):
        write_heatmap(folder / f"{slide}.h5", make_heatmap(slide, probability), "x")
        Image.new("RGB", (80, 80), "red").save(folder / f"{slide}_red.png")
    rows = f'"{NASTY}",1,0.98765,0.0031\n"{GONE}",1,0.77777,0.0031\n'  # the latter is not called positive
    (folder / "lesions.csv").write_text(f"slide,lesion,score,area_mm2\n{rows}")
    (folder / "settings.toml").write_text(to_toml(StudySettings(), {"localize"}))
