"""What `--lesions` adds to results: maps of trained models beside outlines whose truth is planted."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest

from helpers.cli import rows_of
from helpers.outcomes import changed
from helpers.planted import planted
from selfvitmil.annotations import Annotation, write_annotations
from selfvitmil.bags import read_bag
from selfvitmil.engine import Engine
from selfvitmil.localize.heatmap import Heatmap, read_heatmap
from selfvitmil.settings import EngineSettings, StudySettings, resolve_settings
from selfvitmil.stages.compare import compare
from selfvitmil.stages.evaluate import EvaluateResult, evaluate
from selfvitmil.stages.lesions import compare_lesions, evaluate_lesions
from selfvitmil.stages.localize import LocalizeResult, localize
from selfvitmil.store.provenance import BuildStatus
from selfvitmil.study import FeatureChoice, Study

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


def evaluated(study: Path, settings: StudySettings) -> EvaluateResult:
    with Engine(EngineSettings(workers=0)) as engine:
        return evaluate(Study(study, settings), choice_of(study), engine)


def test_lesions_of_one_method(study: Path):
    settings = settings_of()
    evaluated(study, settings)
    summary = evaluate_lesions(Study(study, settings), choice_of(study))
    assert not summary.failures
    told = json.loads((study / "results" / "features_vit_dsmil" / "lesions.json").read_text())
    hits = []
    for slide in ("tumor_12_0", "tumor_13_0", "tumor_14_0"):
        found = read_heatmap(study / "maps" / "features_vit_dsmil" / f"{slide}.h5")
        hottest = int(np.argmax(found.columns[found.kind]))
        hits.append(found.coords_l0[hottest, 0] < lesion_tiles(choice_of(study).folder, slide) * TILE_L0)
    assert told["scores"]["hit_rate"]["value"] == np.mean(hits)
    assert told["slides"]["positive"] == 3
    assert [left["slide"] for left in told["slides"]["left_out"]] == ["tumor_15_0"]
    assert "tumor_15_0" in "\n".join(summary.notes)
    assert told["threshold"]["validation_slides"], "the threshold was not chosen on validation"
    assert not {"tumor_12_0", "tumor_13_0"} & set(told["threshold"]["validation_slides"])
    assert (study / "results" / "features_vit_dsmil" / "froc.svg").exists()


def test_lesions_of_two_methods_side_by_side(study: Path):
    settings = settings_of()
    from selfvitmil.engine import Engine
    from selfvitmil.settings import EngineSettings

    with Engine(EngineSettings(workers=0)) as engine:
        compare(Study(study, settings), choice_of(study), engine)
    summary = compare_lesions(Study(study, settings), choice_of(study))
    assert summary.comparison is not None
    assert list(summary.comparison.scores) == ["dsmil", "mean"]
    told = json.loads((study / "results" / "compare" / "lesions.json").read_text())
    assert set(told["methods"]) == {"dsmil", "mean"}
    text = (study / "results" / "compare" / "lesions.md").read_text()
    assert "dsmil" in text
    assert "FROC" in text


def slow_average_precision(tumour: np.ndarray, scores: np.ndarray) -> float:
    ranked = tumour[np.argsort(-scores, kind="stable")]
    return float(np.mean([ranked[: place + 1].mean() for place in np.flatnonzero(ranked)]))


@pytest.mark.slow
def test_validation_annotations_choose_what_heatmaps_show_and_those_of_test_slides_do_not(study: Path, tmp_path: Path):
    shutil.copytree(study.parent, tmp_path / "copy")
    copy, settings = tmp_path / "copy" / "study", settings_of()
    table = copy / "cohort.csv"
    table.write_text(table.read_text().replace(str(study.parent), str(copy.parent)))
    evaluated(copy, settings)

    def localized(**chosen: object) -> LocalizeResult:
        own = settings.model_copy(update={"localize": settings.localize.model_copy(update=chosen)})
        with Engine(EngineSettings(workers=0)) as engine:
            return localize(Study(copy, own), choice_of(copy), engine)

    def maps() -> dict[str, Heatmap]:
        return {path.stem: read_heatmap(path) for path in (copy / "maps" / "features_vit_dsmil").glob("*.h5")}

    def spoil(slide: str) -> None:
        """Outline the other end of the slide."""
        right = 448 * 500.0
        corners = np.array([(right / 2, 0), (right, 0), (right, 448), (right / 2, 448)], float)
        write_annotations(copy.parent / f"{slide}.geojson", [Annotation("lesion", "Tumor", corners)])

    summary = localized(parts=("test", "val"))
    judges = [one for one in maps().values() if one.prediction.part == "val" and one.slide.startswith("tumor")]
    assert judges
    found = {
        kind: np.mean([slow_average_precision(one.annotated > 0.5, one.columns[kind]) for one in judges])
        for kind in ("instance", "attention")
    }
    best = max(found, key=lambda kind: found[kind])
    assert {one.kind for one in maps().values()} == {best}
    told = {one.details["shown_because"] for one in maps().values()}
    assert told == {f"best on {len(judges)} annotated validation slides (average precision of tiles: "
                    f"instance {found['instance']:.3f}, attention {found['attention']:.3f})"}  # fmt: skip
    assert all(next(iter(told)) in product.shows for product in summary.exports.values())
    spoil("tumor_12_0")  # a test slide: its own map alone is rebuilt
    again = localized(parts=("test", "val")).outcomes
    assert [slide for slide, outcome in again.items() if outcome.status is BuildStatus.REBUILT] == ["tumor_12_0"]
    spoil(judges[0].slide)  # a validation slide: all maps are
    again = localized(parts=("test", "val")).outcomes
    assert all("validation annotations" in changed(outcome) for outcome in again.values())
    localized(score="attention")
    assert maps()["tumor_12_0"].kind == "attention"
    assert maps()["tumor_12_0"].details["shown_because"] == "set by localize.score"


def test_models_that_are_not_there_are_not_made(study: Path):
    with pytest.raises(Exception, match="no up-to-date models"):
        evaluate_lesions(Study(study, settings_of(aggregator="chowder")), choice_of(study))


def test_an_older_map_of_a_slide_that_fails_now_is_not_judged(study: Path, tmp_path: Path):
    shutil.copytree(study.parent, tmp_path / "copy")
    copy, settings = tmp_path / "copy" / "study", settings_of()
    evaluated(copy, settings)
    before = evaluate_lesions(Study(copy, settings), choice_of(copy))
    assert not before.failures
    with h5py.File(copy.parent / "foreign" / "features_vit" / "tumor_12_0.h5", "r+") as file:
        coords = file["coords"][()]
        coords[0] = (10**7, 10**7)  # far outside of the slide
        file["coords"][...] = coords
    assert (copy / "maps" / "features_vit_dsmil" / "tumor_12_0.h5").exists()
    summary = evaluate_lesions(Study(copy, settings), choice_of(copy))
    assert [failure.slide for failure in summary.failures] == ["tumor_12_0"]
    told = json.loads((copy / "results" / "features_vit_dsmil" / "lesions.json").read_text())
    assert told["slides"]["positive"] == 2
    judged = {row["slide"] for row in rows_of(copy / "results" / "features_vit_dsmil" / "lesion_slides.csv")}
    assert "tumor_13_0" in judged
    assert "tumor_12_0" not in judged
    assert [(row["slide"], row["stage"]) for row in rows_of(copy / "failures.csv")] == [("tumor_12_0", "lesions")]


@pytest.mark.slow
def test_results_keep_nothing_of_earlier_ones_and_all_that_is_the_users(study: Path, tmp_path: Path):
    shutil.copytree(study.parent, tmp_path / "copy")
    copy, settings = tmp_path / "copy" / "study", settings_of(epochs=2)
    several = settings_of(epochs=2, split="monte-carlo", folds=3, seeds=1)
    folder = copy / "results" / "features_vit_dsmil"
    figures = {f"{name}.svg" for name in ("roc", "pr", "calibration", "confusion")}
    lesions = {"lesions.json", "lesion_slides.csv", "froc.svg"}

    def there() -> set[str]:
        return {path.name for path in folder.iterdir()}

    def evaluate(settings: StudySettings) -> str:
        return "\n".join(evaluated(copy, settings).notes)

    evaluate(settings)
    evaluate_lesions(Study(copy, settings), choice_of(copy))
    for name in ("my_roc.svg", "notes.txt"):
        (folder / name).write_text("mine")
    assert "removed" not in evaluate(settings)
    assert there() >= figures | lesions  # of the same models as before
    assert "lesions.json, lesion_slides.csv, froc.svg removed" in evaluate(several)
    per_split = {f"repeat{k}_{name}" for k in range(3) for name in figures}
    assert there() == {
        "predictions.csv", "metrics.json", "settings.toml", "training.svg", *per_split, "my_roc.svg", "notes.txt",
    }  # fmt: skip
    evaluate(settings)
    assert not there() & per_split
    assert there() >= {*figures, "my_roc.svg", "notes.txt"}
