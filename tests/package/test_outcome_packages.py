"""`package` and `predict` of models with another outcome than classes, and their validation on labelled slides."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.cli import Done, rows_of, selfvitmil
from helpers.error_codes import has_code
from selfvitmil.encoder import build_encoder, save_encoder
from selfvitmil.errors import ConfigError
from selfvitmil.metrics.survival import harrell_c
from selfvitmil.package import open_package
from selfvitmil.package.labels import read_labels
from selfvitmil.slides import synthetic

STUDY = """
[tile]
mpp = 1.0
size_px = 48
[embed]
batch = 64
[train]
aggregator = "dsmil"
seeds = 2
epochs = 4
[evaluate]
bootstrap = 100
[localize]
pictures = false
geojson = "none"
"""
KINDS: dict[str, tuple[str, ...]] = {
    "survival": ("--train.outcome", "survival"),
    "survival-discrete": ("--train.outcome", "survival-discrete"),
    "continuous": ("--train.target", "value", "--train.outcome", "continuous"),
    "ordinal": ("--train.target", "grade", "--train.outcome", "ordinal"),
    "multilabel": ("--train.target", "mutated", "--train.target", "inflamed", "--train.outcome", "multilabel"),
}


WEIGHTED = ("uno_c", "auc_t")
"""Metrics weighted by the censoring of the training slides, which another cohort does not have."""


def done(result: Done, status: int = 0) -> Done:
    assert result.returncode == status, result.stdout + result.stderr
    return result


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study of 20 small slides whose table has columns for every outcome, tiled and embedded."""
    folder = tmp_path_factory.mktemp("outcomes") / "study"
    synthetic.make_cohort(folder.parent / "cohort", slides=20, seed=2, size=(1024, 1024), test_fraction=0.4)
    table = folder.parent / "cohort" / "cohort.csv"
    rows, generator = rows_of(table), np.random.default_rng(0)
    of_patient = {row["patient"]: generator.uniform(1, 30) for row in rows}
    for number, row in enumerate(rows):
        row["label"], row["annotation"] = "", ""
        row["time"] = f"{of_patient[row['patient']]:.3f}"
        row["event"] = "1" if int(row["patient"].split("_")[1]) % 3 else "0"
        row["value"], row["grade"] = f"{generator.normal(50, 9):.3f}", str(1 + number % 3)
        row["mutated"], row["inflamed"] = str(number % 2), str(number // 2 % 2)
        row["site"] = "AB"[number % 2]
    with table.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    folder.mkdir()
    (folder / "study.toml").write_text(STUDY)
    torch.manual_seed(4)
    args = {"embed_dim": 48, "depth": 4, "num_heads": 3}
    save_encoder(folder / "encoders" / "tiny", build_encoder("vit_tiny_patch16_224", img_size=48, model_args=args))
    done(selfvitmil("tile", folder, "--cohort", table, "--workers", 0))
    done(selfvitmil("embed", folder, "--encoder", "tiny", "--workers", 0))
    return folder


@pytest.fixture(scope="module")
def models(study: Path) -> dict[str, Path]:
    """Kind -> package, each after `evaluate` with the same flags."""
    folders = {kind: study.parent / f"model-{kind}" for kind in KINDS}
    for kind, folder in folders.items():
        done(selfvitmil("evaluate", study, *KINDS[kind], "--name", kind))
        done(selfvitmil("package", study, *KINDS[kind], "--results", kind, "--out", folder))
    return folders


def held_out(study: Path) -> list[Path]:
    return [(study / row["path"]).resolve() for row in rows_of(study / "cohort.csv") if row["split"] == "test"]


def evaluated(study: Path, kind: str) -> dict[str, dict[str, str]]:
    rows = rows_of(study / "results" / kind / "predictions.csv")
    return {row["slide"]: row for row in rows if row["part"] == "test" and row["seed"] == "ensemble"}


@pytest.mark.parametrize("kind", KINDS)
def test_predict_gives_the_scores_of_evaluate_to_the_bit(
    kind: str, study: Path, models: dict[str, Path], tmp_path: Path
):
    package = open_package(models[kind])
    assert package.outcome is not None
    assert package.outcome.kind == kind
    said = done(selfvitmil("predict", models[kind], *held_out(study), "--out", tmp_path, "--workers", 0, "--no-maps"))
    assert "score" in said.stdout
    found = {row["slide"]: row for row in rows_of(tmp_path / "predictions.csv")}
    own = evaluated(study, kind)
    assert set(found) == set(own)
    for slide, row in own.items():
        for name in package.outcome.score_names:
            assert found[slide][name] == row[name] != ""
        assert found[slide]["threshold"] == row["threshold"]
        if row["group"]:
            assert found[slide]["decision"] == row["group"]
    answer = json.loads((tmp_path / "predictions.json").read_text())
    assert set(answer["slides"][0]["score"]) == set(package.outcome.score_names)
    card = (models[kind] / "MODEL_CARD.md").read_text()
    assert package.outcome.words in card
    assert next(iter(package.outcome.shown_metrics.values())) in card


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_validation_on_the_held_out_gives_the_metrics_of_evaluate(
    kind: str, study: Path, models: dict[str, Path], tmp_path: Path
):
    """The same slides by another way: the same primary metric, no drift against the package's own test slides."""
    flags = ("--labels", study / "cohort.csv", "--by", "site", "--workers", 0, "--no-maps", "--out", tmp_path)
    said = done(selfvitmil("predict", models[kind], *held_out(study), *flags))
    assert "external validation" in said.stdout
    (folder,) = (tmp_path / "validation").iterdir()
    found = json.loads((folder / "metrics.json").read_text())
    outcome = open_package(models[kind]).outcome
    assert outcome is not None
    (method,) = json.loads((study / "results" / kind / "metrics.json").read_text())["methods"]
    for level in ("slide", "patient"):
        own = method[level]["ensemble"]
        assert found[level]["num"] == own["num"]
        for name in outcome.shown_metrics:
            if name not in WEIGHTED and own[name] is not None:
                assert found[level][name]["value"] == pytest.approx(own[name]["value"], abs=1e-12), name
    drift = [each for each in found["changes"] if each["against"] == "test"]
    assert drift
    assert all(each["difference"] == pytest.approx(0, abs=1e-9) for each in drift if each["metric"] not in WEIGHTED)
    assert [group["value"] for group in found["subgroups"][0]["groups"]] == ["A", "B"]
    page = (folder / "index.html").read_text()
    assert outcome.words in page
    assert "data:image/svg" in page
    assert set(outcome.plots) <= {path.stem for path in folder.glob("*.svg")}


@pytest.mark.slow
def test_c_index_of_a_validation_is_that_of_its_table(study: Path, models: dict[str, Path], tmp_path: Path):
    flags = ("--labels", study / "cohort.csv", "--workers", 0, "--no-maps", "--out", tmp_path)
    done(selfvitmil("predict", models["survival"], *held_out(study), *flags))
    truth = {row["slide"]: row for row in rows_of(study / "cohort.csv")}
    rows = rows_of(tmp_path / "predictions.csv")
    time, event = (np.array([float(truth[row["slide"]][name]) for row in rows]) for name in ("time", "event"))
    risk = np.array([float(row["risk"]) for row in rows])
    ordered = [
        (risk[i] > risk[j]) + (risk[i] == risk[j]) / 2
        for i in range(len(rows)) for j in range(len(rows)) if event[i] and time[i] < time[j]
    ]  # fmt: skip
    (file,) = (tmp_path / "validation").glob("*/metrics.json")
    found = json.loads(file.read_text())["slide"]["c_index"]["value"]
    assert found == pytest.approx(np.mean(ordered), abs=1e-12)
    assert found == pytest.approx(harrell_c(time, event, risk).value, abs=1e-12)


@pytest.mark.slow
def test_a_package_names_no_slide_and_stays_the_same_by_labels(study: Path, models: dict[str, Path], tmp_path: Path):
    names = [row["slide"] for row in rows_of(study / "cohort.csv")]
    texts = "".join((models["survival"] / name).read_text() for name in ("package.json", "MODEL_CARD.md"))
    assert not any(name in texts for name in names)
    slide = held_out(study)[:6]
    written = []
    for name, labels in (("with", ("--labels", study / "cohort.csv")), ("without", ())):
        done(selfvitmil("predict", models["survival"], *slide, *labels, "--out", tmp_path / name, "--workers", 0))
        written.append((tmp_path / name / "predictions.csv").read_bytes())
    assert written[0] == written[1]


@pytest.mark.slow
def test_run_compares_methods_and_ends_with_their_table(study: Path, tmp_path: Path):
    """All stages after embedding by one command; the table at the end and `status` tell the outcome's own metric."""
    shutil.copytree(study, tmp_path / "study")
    methods = ("--compare.methods", "mean", "--compare.methods", "dsmil")
    asked = (*KINDS["continuous"], "--encoder", "tiny", *methods, "--workers", 0)
    said = done(selfvitmil("run", tmp_path / "study", "--cohort", study.parent / "cohort" / "cohort.csv", *asked))
    found = json.loads((tmp_path / "study" / "results" / "compare_value" / "metrics.json").read_text())
    errors = {each["method"]: each["slide"]["ensemble"]["mae"]["value"] for each in found["methods"]}
    assert f"MAE of dsmil: {errors['dsmil']:.3f}" in said.stdout
    assert "annotations mark tumour" in said.stdout
    status = done(selfvitmil("status", tmp_path / "study"))
    best = min(errors, key=errors.__getitem__)
    assert f"mae {errors[best]:.3f} {best}" in status.stdout
    page = (tmp_path / "study" / "report" / "index.html").read_text()
    assert "mean absolute error" in page
    done(selfvitmil("view", tmp_path / "study", "--export", tmp_path / "viewer"))
    assert all("predicted value" in path.read_text() for path in (tmp_path / "viewer" / "data").glob("s*.js"))


@pytest.mark.slow
def test_labels_of_classes_are_refused(study: Path, models: dict[str, Path]):
    outcome = open_package(models["survival"]).outcome
    how: dict[str, Any] = {"outcome": outcome}
    with pytest.raises(ConfigError, check=has_code("labels-of-classes")):
        read_labels(study / "cohort.csv", (), {}, label_column="grade", **how)
    with pytest.raises(ConfigError, check=has_code("labels-of-classes")):
        read_labels(study / "cohort.csv", (), {}, label_map={"a": "b"}, **how)


@pytest.mark.slow
def test_models_of_different_outcomes_are_not_compared(study: Path, models: dict[str, Path], tmp_path: Path):
    flags = ("--labels", study / "cohort.csv", "--against", models["continuous"], "--workers", 0, "--out", tmp_path)
    said = done(selfvitmil("predict", models["survival"], *held_out(study), *flags), 2)
    assert said.code == "classes-differ"


@pytest.mark.slow
def test_a_package_of_a_joint_training_predicts_one_target(study: Path, tmp_path: Path):
    joint = ("--train.joint", "mutated", "--train.joint", "value")
    done(selfvitmil("evaluate", study, *joint))
    refused = done(selfvitmil("package", study, *joint, "--out", tmp_path / "none"), 2)
    assert "train.target" in refused.stderr
    for target, column, own in (
        ("mutated", "score", "mutated_with_value"),
        ("value", "predicted", "value_with_mutated"),
    ):
        model, out = tmp_path / target, tmp_path / f"predicted-{target}"
        done(selfvitmil("package", study, *joint, "--train.target", target, "--out", model))
        package = open_package(model)
        assert package.about["joint"]["with"] == ["value" if target == "mutated" else "mutated"]
        assert package.about["evaluation"] is not None
        assert "trained jointly with" in (model / "MODEL_CARD.md").read_text()
        done(selfvitmil("predict", model, *held_out(study), "--out", out, "--workers", 0, "--no-maps"))
        found = {row["slide"]: row for row in rows_of(out / "predictions.csv")}
        expected = evaluated(study, f"tiny_dsmil_{own}")
        assert set(found) == set(expected)
        name = "probability" if target == "mutated" else column
        assert all(found[slide][name] == row[column] != "" for slide, row in expected.items())
