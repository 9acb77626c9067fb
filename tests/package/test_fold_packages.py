"""`package` of a study with several splits: the models of all as one ensemble, or a final fit on all slides."""

from __future__ import annotations

import csv
import itertools
import json
import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from helpers.cli import Done, rows_of, selfvitmil
from helpers.error_codes import has_code
from selfvitmil.aggregate.train import load_model
from selfvitmil.bags import read_bag
from selfvitmil.commands.package import package
from selfvitmil.encoder import build_encoder, save_encoder
from selfvitmil.errors import ConfigError
from selfvitmil.package import Package, Predictor, open_package
from selfvitmil.settings import LocalizeSettings
from selfvitmil.slides import synthetic
from selfvitmil.study import FeatureChoice, open_study
from selfvitmil.tiles import read_tiles

TILING, FOLDS, SEEDS = "1mpp_48px_0px", 3, 2
pytestmark = pytest.mark.slow

STUDY = """
[tile]
mpp = 1.0
size_px = 48
[embed]
batch = 64
[train]
aggregator = "mean"
split = "k-fold"
folds = 3
validation = 0.4
seeds = 2
epochs = 6
[evaluate]
bootstrap = 100
calibration = "temperature"
[localize]
pictures = false
geojson = "none"
"""
SURVIVAL = {"train": {"outcome": "survival"}, "evaluate": {"calibration": "none"}}
ALL, VALUE = ("--train.split", "all"), ("--train.target", "value", "--train.outcome", "continuous")


def done(result: Done, status: int = 0) -> Done:
    assert result.returncode == status, result.stdout + result.stderr
    return result


def write_rows(table: Path, rows: list[dict[str, str]]) -> None:
    with table.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study of small slides with three evaluated folds and a column of values."""
    folder = tmp_path_factory.mktemp("folds") / "study"
    synthetic.make_cohort(folder.parent / "cohort", slides=15, seed=2, size=(832, 832), test_fraction=0.3)
    table = folder.parent / "cohort" / "cohort.csv"
    rows = rows_of(table)
    for number, row in enumerate(rows):
        patient = int(row["patient"].split("_")[1])
        row["time"], row["event"] = str(1 + patient * 7 % 13), str(int(patient % 3 > 0))
        row["value"], row["hospital"] = str(number * 37 % 23), ("Springfield", "Shelbyville")[number % 2]
    write_rows(table, rows)
    folder.mkdir()
    (folder / "study.toml").write_text(STUDY)
    torch.manual_seed(4)
    args = {"embed_dim": 24, "depth": 4, "num_heads": 2}
    save_encoder(folder / "encoders" / "tiny", build_encoder("vit_tiny_patch16_224", img_size=48, model_args=args))
    done(selfvitmil("tile", folder, "--cohort", table, "--workers", 0))
    done(selfvitmil("embed", folder, "--encoder", "tiny", "--workers", 0))
    done(selfvitmil("evaluate", folder))
    return folder


@pytest.fixture(scope="module")
def ensemble(study: Path) -> tuple[Done, Package]:
    said = done(selfvitmil("package", study, "--split", "ensemble", "--out", study.parent / "ensemble"))
    return said, open_package(study.parent / "ensemble")


@pytest.fixture(scope="module")
def final(study: Path) -> tuple[Done, Package]:
    done(selfvitmil("train", study, *ALL))
    said = done(selfvitmil("package", study, *ALL, "--out", study.parent / "final"))
    return said, open_package(study.parent / "final")


def predictions(study: Path, name: str = "tiny_mean") -> list[dict[str, str]]:
    return rows_of(study / "results" / name / "predictions.csv")


def pooled(study: Path, column: str = "score", name: str = "tiny_mean") -> dict[str, float]:
    """Validation slide -> mean score over the seeds of all folds that validate on it, from the results' table."""
    found: dict[str, list[float]] = defaultdict(list)
    for row in predictions(study, name):
        if row["part"] == "val" and row["seed"] != "ensemble":
            found[row["slide"]].append(float(row[column]))
    return {slide: float(np.mean(scores)) for slide, scores in found.items()}


def by_hand(folders: list[Path], bag: Path) -> list[float]:
    """Probability by each stored model."""
    with h5py.File(bag) as file:
        vectors = torch.from_numpy(np.asarray(file["features"])).float()
    found: list[float] = []
    for folder in folders:
        model = load_model(folder)[0]
        with torch.inference_mode():
            found.append(float(torch.sigmoid(model(vectors).logits_C).squeeze()))
    return found


# ---------------------------------------------------------------------------------------------------- the ensemble


def test_the_ensemble_is_the_mean_over_folds_and_seeds(study: Path, ensemble: tuple[Done, Package]):
    models = study / "models" / TILING / "tiny" / "mean"
    folders = [models / f"fold{fold}" / f"seed{seed}" for fold in range(FOLDS) for seed in range(SEEDS)]
    predictor, threshold = Predictor(ensemble[1], LocalizeSettings(), device="cpu"), ensemble[1].choice.threshold
    assert threshold is not None
    for slide in [row["slide"] for row in rows_of(study / "cohort.csv")][:4]:
        bag = study / "bags" / TILING / "features_tiny" / f"{slide}.h5"
        own = predictor.predict(slide, "x", read_bag(bag), read_tiles(study / "tiles" / TILING / f"{slide}.h5"))
        expected = by_hand(folders, bag)
        assert len(set(expected)) == FOLDS * SEEDS
        assert own.score[0] == pytest.approx(np.mean(expected), abs=1e-6)
        assert [own.seeds[f"fold{k // SEEDS}/seed{k % SEEDS}"][0] for k in range(len(folders))] == pytest.approx(
            expected, abs=1e-6
        )
        assert own.decision == ("tumor" if own.score[0] >= threshold else "normal")


def test_its_threshold_is_that_of_pooled_validation_predictions(study: Path, ensemble: tuple[Done, Package]):
    scores, labels = pooled(study), {row["slide"]: row["label"] for row in rows_of(study / "cohort.csv")}
    rows = [row for row in predictions(study) if row["part"] == "val" and row["seed"] == "0"]
    assert len(rows) > len(scores) > max(sum(row["split"] == f"fold{fold}" for row in rows) for fold in range(FOLDS))

    def youden(threshold: float) -> float:
        called = {label: [score >= threshold for slide, score in scores.items() if labels[slide] == label]
                  for label in ("normal", "tumor")}  # fmt: skip
        return float(np.mean(called["tumor"]) - np.mean(called["normal"]))

    known = sorted(scores.values())
    between = [(low + high) / 2 for low, high in itertools.pairwise(known)] + [np.nextafter(known[-1], 2)]
    best = max(between, key=lambda threshold: (round(youden(threshold), 9), threshold))
    assert ensemble[1].choice.threshold == pytest.approx(best, abs=1e-12)
    assert ensemble[1].choice.threshold_from == "Youden on validation slides of 3 splits"
    assert sum(ensemble[1].about["chosen_on"]["slides"].values()) == len(scores)
    [reference] = ensemble[1].references
    assert reference.num == len(scores)
    single = json.loads((study / "results" / "tiny_mean" / "metrics.json").read_text())["methods"][0]["choices"]
    assert ensemble[1].choice.threshold not in [each["threshold"] for each in single if each["seed"] == "ensemble"]


def test_its_card_has_cross_validated_metrics_and_says_so(study: Path, ensemble: tuple[Done, Package]):
    said, model = ensemble
    card = (model.folder / "MODEL_CARD.md").read_text()
    whole = json.loads((study / "results" / "tiny_mean" / "metrics.json").read_text())["methods"][0]["slide"][
        "ensemble"
    ]
    assert model.about["evaluation"]["figures"]["auc"]["value"] == whole["auc"]["value"]
    assert f"| auc | {whole['auc']['value']:.3f} |" in card
    assert "The ensemble itself has not been tested" in card
    assert "by cross-validation: 3 splits, the 2 models of each tested on slides that they never saw" in card
    assert "6 models (2 seeds on each of 3 splits)" in card
    assert "(15 slides together)" in card
    assert "| hospital 1 | 7 |" in card
    assert "6 models of 3 splits" in said.stdout
    assert "has not been tested" in said.stdout


def test_it_names_neither_slides_nor_splits_by_place(study: Path, ensemble: tuple[Done, Package]):
    words = [word for row in rows_of(study / "cohort.csv") for word in (row["slide"], row["patient"], row["hospital"])]
    for path in ensemble[1].folder.rglob("*"):
        assert not path.is_file() or not [word for word in words if word.encode() in path.read_bytes()], path.name
    configs = ensemble[1].folder.glob("models/*/*/config.json")
    assert {json.loads(path.read_text())["split"] for path in configs} == {"ensemble"}


def test_new_slides_are_predicted_by_all_models(study: Path, ensemble: tuple[Done, Package], tmp_path: Path):
    row = rows_of(study / "cohort.csv")[0]
    path = (study / row["path"]).resolve()
    said = done(
        selfvitmil("predict", ensemble[1].folder, path, "--out", tmp_path, "--workers", 0, "--embed.device", "cpu")
    )
    assert "slides of 3 splits" in said.stdout
    answer = json.loads((tmp_path / "predictions.json").read_text())
    seeds = [values["tumor"] for values in answer["slides"][0]["seeds"].values()]
    assert len(seeds) == FOLDS * SEEDS
    assert answer["slides"][0]["probability"]["tumor"] == pytest.approx(np.mean(seeds), abs=1e-12)
    [told] = answer["models"].values()
    assert (told["fit"], told["folds"]) == ("ensemble", FOLDS)


def test_labels_of_test_slides_change_nothing_of_an_ensemble(study: Path, tmp_path: Path):
    """Two splits with the same test slides, whose labels are exchanged after training."""
    shutil.copytree(study, tmp_path / "study", ignore=shutil.ignore_patterns("results", "models"))
    shutil.copytree(study.parent / "cohort", tmp_path / "cohort")
    rows = rows_of(tmp_path / "study" / "cohort.csv")
    by_label = {label: [row["slide"] for row in rows if row["label"] == label] for label in ("normal", "tumor")}
    test = [slide for slides in by_label.values() for slide in slides[:2]]
    for number in range(2):
        val = [slide for slides in by_label.values() for slide in slides[2 + 2 * number : 4 + 2 * number]]
        sides = [[row["slide"] for row in rows if row["slide"] not in {*test, *val}], val, test]
        lines = [",".join(side[k] if k < len(side) else "" for side in sides) for k in range(max(map(len, sides)))]
        (tmp_path / "splits").mkdir(exist_ok=True)
        (tmp_path / "splits" / f"splits_{number}.csv").write_text("\n".join(["train,val,test", *lines]))
    flags = ("--train.split", "files", "--train.split-folder", tmp_path / "splits")
    done(selfvitmil("train", tmp_path / "study", *flags))
    found: list[Package] = []
    for name in ("before", "after"):
        done(selfvitmil("package", tmp_path / "study", *flags, "--split", "ensemble", "--out", tmp_path / name))
        found.append(open_package(tmp_path / name))
        exchanged = {"normal": "tumor", "tumor": "normal"}
        rows = [{**row, "label": exchanged[row["label"]]} if row["slide"] in test else row for row in rows]
        rows = [{**row, "annotation": ""} for row in rows]
        write_rows(tmp_path / "study" / "cohort.csv", rows)
    before, after = found
    assert before.about["evaluation"] is None
    assert "no cross-validated results" in (before.folder / "MODEL_CARD.md").read_text()
    assert before.choice.threshold is not None
    assert (before.ood.num_train, before.ood.num_val) == (len(rows) - len(test) - 4, 4)  # without the test slides
    same = ("choice", "chosen_on", "reference", "prediction_sets", "training", "seeds")
    assert all(before.about[key] == after.about[key] for key in same)
    assert before.about["files"] == {**after.about["files"], "MODEL_CARD.md": before.about["files"]["MODEL_CARD.md"]}


def test_other_outcomes_have_ensembles_too(study: Path, tmp_path: Path):
    done(selfvitmil("evaluate", study, *VALUE, "--name", "value", "--evaluate.calibration", "none"))
    flags = (*VALUE, "--results", "value", "--evaluate.calibration", "none")
    done(selfvitmil("package", study, *flags, "--split", "ensemble", "--out", tmp_path / "model"))
    model = open_package(tmp_path / "model")
    expected = sorted(pooled(study, "predicted", "value").values())
    np.testing.assert_allclose(model.validation_scores[:, 0], expected, rtol=1e-9)
    metrics = json.loads((study / "results" / "value" / "metrics.json").read_text())["methods"][0]
    assert model.about["evaluation"]["figures"]["mae"]["value"] == metrics["slide"]["ensemble"]["mae"]["value"]
    assert "The ensemble itself has not been tested" in (model.folder / "MODEL_CARD.md").read_text()


# ---------------------------------------------------------------------------------------------------- a final fit


def test_a_final_fit_learns_from_all_slides_and_tests_none(study: Path, final: tuple[Done, Package]):
    said, model = final
    cohort = {row["slide"]: row["patient"] for row in rows_of(study / "cohort.csv")}
    config = json.loads((study / "models" / TILING / "tiny" / "mean" / "all" / "seed0" / "config.json").read_text())
    assert sorted([*config["trained_on"], *config["chosen_on"]]) == sorted(cohort)
    assert not {cohort[slide] for slide in config["trained_on"]} & {cohort[slide] for slide in config["chosen_on"]}
    assert model.about["data"]["test"]["patients"] == 0
    assert model.choice.threshold_from == "Youden on validation"
    assert "2 models of all labelled slides" in said.stdout
    assert "this very model has not been tested" in said.stdout


def test_its_card_quotes_the_cross_validation_of_the_procedure(study: Path, final: tuple[Done, Package]):
    card = (final[1].folder / "MODEL_CARD.md").read_text()
    whole = json.loads((study / "results" / "tiny_mean" / "metrics.json").read_text())["methods"][0]["slide"][
        "ensemble"
    ]
    assert "This very model has not been tested" in card
    assert "estimates of the procedure (the same method, settings and seeds) by cross-validation" in card
    assert f"| auc | {whole['auc']['value']:.3f} |" in card


def test_its_card_may_quote_a_held_out_test_set(study: Path, final: tuple[Done, Package], tmp_path: Path):
    done(selfvitmil("evaluate", study, "--train.split", "given", "--name", "held"))
    done(selfvitmil("package", study, *ALL, "--results", "held", "--out", tmp_path / "model"))
    rows = [row for row in predictions(study, "held") if (row["part"], row["seed"]) == ("test", "ensemble")]
    evaluation = open_package(tmp_path / "model").about["evaluation"]
    assert (evaluation["num"], evaluation["splits"]) == (len(rows), 1)
    assert (
        "on a test set: 2 models tested on slides that they never saw"
        in (tmp_path / "model" / "MODEL_CARD.md").read_text()
    )


def test_results_of_another_procedure_are_not_quoted(study: Path, tmp_path: Path):
    flags = (*ALL, "--train.epochs", 2)
    done(selfvitmil("train", study, *flags))
    said = done(selfvitmil("package", study, *flags, "--out", tmp_path / "model"))
    assert "no results of this procedure" in said.stdout
    assert open_package(tmp_path / "model").about["evaluation"] is None


@pytest.mark.parametrize("command", ["evaluate", "compare", "localize"])
def test_a_final_fit_cannot_be_evaluated(study: Path, command: str):
    assert done(selfvitmil(command, study, *ALL), 2).code == "final-fit-untested"


# ---------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("flags", "split", "code", "words"),
    [
        ({}, None, "split-needed", "--split ensemble"),
        ({}, "all", "unknown-split", "--train.split all"),
        ({}, "fold9", "unknown-split", "ensemble"),
        (SURVIVAL, "ensemble", "split-scales", "a final fit"),
        ({"train": {"split": "given"}}, "ensemble", "one-split", "Leave --split out"),
    ],
)
def test_what_cannot_be_packaged_is_refused(
    study: Path, tmp_path: Path, flags: dict[str, Any], split: str | None, code: str, words: str
):
    with pytest.raises(ConfigError, match=words, check=has_code(code)):
        package(open_study(study, flags), tmp_path / "model", FeatureChoice(), split)
    assert not list(tmp_path.iterdir())


def test_an_ensemble_of_folds_with_an_encoder_each_is_refused(study: Path, tmp_path: Path):
    shutil.copytree(study, tmp_path / "study", ignore=shutil.ignore_patterns("results", "models"))
    shutil.copytree(study.parent / "cohort", tmp_path / "cohort")
    bags = tmp_path / "study" / "bags" / TILING
    for fold in range(FOLDS):
        shutil.copytree(study / "encoders" / "tiny", tmp_path / "study" / "encoders" / f"own_fold{fold}")
        (tmp_path / "study" / "encoders" / f"own_fold{fold}" / "settings.toml").write_text("[pretrain]\nper_split=true")
        shutil.copytree(bags / "features_tiny", bags / f"features_own_fold{fold}")
    with pytest.raises(ConfigError, match="--encoder own_fold0", check=has_code("encoder-per-split")):
        package(open_study(tmp_path / "study"), tmp_path / "model", FeatureChoice("own"), "ensemble")
    assert not (tmp_path / "model").exists()
