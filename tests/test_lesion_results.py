"""What `--lesions` adds to results: maps of trained models beside outlines whose truth is planted."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from planted import planted
from selfvitmil import pipeline
from selfvitmil.annotations import Annotation, write_annotations
from selfvitmil.bags import read_bag
from selfvitmil.localize.maps import read_map
from selfvitmil.pipeline import CohortSource, FeatureChoice
from selfvitmil.settings import StudySettings, resolve_settings

TILE_L0 = 448


def settings_of(**train: object) -> StudySettings:
    return resolve_settings(
        None,
        {
            "train": {"seeds": 2, "epochs": 12, "patience": 12, "aggregator": "dsmil", **train},
            "evaluate": {"bootstrap": 100},
            "compare": {"methods": ["dsmil", "mean"], "baseline": "mean"},
        },
    )


def lesion_tiles(bags: Path, slide: str) -> int:
    """The planted lesion is the first third of a positive slide's tiles."""
    return len(read_bag(bags / f"{slide}.h5")) // 3


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Feature files with planted lesions that are outlined in every positive slide but one."""
    folder = tmp_path_factory.mktemp("lesions")
    cases = planted(folder / "foreign", patients=16, shift=6.0, splits=True)
    bags = folder / "foreign" / "features_vit"
    (folder / "study").mkdir()
    with (folder / "study" / "cohort.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["slide", "path", "label", "patient", "split", "mpp", "annotation"])
        for row in cases.cohort.rows:
            outline = ""
            if row.label == "tumor" and row.slide != "tumor_15_0":
                outline = str(folder / f"{row.slide}.geojson")
                right = lesion_tiles(bags, row.slide) * TILE_L0
                corners = [(0, 0), (right, 0), (right, TILE_L0), (0, TILE_L0)]
                write_annotations(Path(outline), [Annotation("lesion", "Tumor", np.array(corners, float))])
            path = bags / f"{row.slide}.h5"
            writer.writerow([row.slide, path, row.label, row.patient, row.split, "0.25", outline])
    return folder / "study"


def choice_of(study: Path) -> FeatureChoice:
    return FeatureChoice(folder=study.parent / "foreign" / "features_vit")


def test_lesions_of_one_method(study: Path):
    settings = settings_of()
    pipeline.evaluate(study, CohortSource(), choice_of(study), settings)
    summary = pipeline.evaluate_lesions(study, CohortSource(), choice_of(study), settings)
    assert not summary.failures
    told = json.loads((study / "results" / "features_vit_dsmil" / "lesions.json").read_text())
    hits = []
    for slide in ("tumor_12_0", "tumor_13_0", "tumor_14_0"):
        found = read_map(study / "maps" / "features_vit_dsmil" / f"{slide}.h5")
        hottest = int(np.argmax(found.columns[found.kind]))
        hits.append(found.coords_l0[hottest, 0] < lesion_tiles(choice_of(study).folder, slide) * TILE_L0)
    assert told["scores"]["hit_rate"]["value"] == np.mean(hits)
    assert told["slides"]["positive"] == 3
    assert [left["slide"] for left in told["slides"]["left_out"]] == ["tumor_15_0"]
    assert "tumor_15_0" in "\n".join(summary.lines)
    assert told["threshold"]["validation_slides"], "the threshold was not chosen on validation"
    assert not {"tumor_12_0", "tumor_13_0"} & set(told["threshold"]["validation_slides"])
    assert (study / "results" / "features_vit_dsmil" / "froc.svg").exists()


def test_lesions_of_two_methods_side_by_side(study: Path):
    settings = settings_of()
    from selfvitmil.engine import Engine
    from selfvitmil.settings import EngineSettings

    with Engine(EngineSettings(workers=0)) as engine:
        pipeline.compare(study, CohortSource(), choice_of(study), settings, engine)
    summary = pipeline.compare_lesions(study, CohortSource(), choice_of(study), settings)
    assert [row[0] for row in summary.table[1:]] == ["dsmil", "mean"]
    told = json.loads((study / "results" / "compare" / "lesions.json").read_text())
    assert set(told["methods"]) == {"dsmil", "mean"}
    text = (study / "results" / "compare" / "lesions.md").read_text()
    assert "dsmil" in text
    assert "FROC" in text


def test_models_that_are_not_there_are_not_made(study: Path):
    with pytest.raises(Exception, match="no current models"):
        pipeline.evaluate_lesions(study, CohortSource(), choice_of(study), settings_of(aggregator="chowder"))
