"""`slide-embeddings`: files, neighbours, agreement, tables, probes, and what a model that saw labels may not do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import safetensors.torch
import torch

import selfvitmil as sv
from helpers.cli import rows_of, selfvitmil
from helpers.error_codes import has_code
from helpers.planted import write_features
from selfvitmil.aggregate import build
from selfvitmil.aggregate.train import FORMAT_VERSION, SCHEMA
from selfvitmil.bags import read_bag
from selfvitmil.commands.slide_embeddings import slide_embeddings
from selfvitmil.engine import Engine
from selfvitmil.errors import ConfigError
from selfvitmil.settings import EngineSettings
from selfvitmil.store.failures import read_failures
from selfvitmil.study import FeatureChoice, open_study

DIM = 6
TILING = "0.5mpp_224px_0px"
QUICK = {"train": {"seeds": 1, "epochs": 3, "split": "k-fold", "folds": 3}, "evaluate": {"bootstrap": 100}}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A study of 12 patients with two slides each; tiles of the two labels differ along one dimension."""
    generator = np.random.default_rng(0)
    lines = ["slide,path,label,patient"]
    for patient in range(12):
        for number in range(2):
            features = generator.normal(size=(7, DIM))
            features[:, 0] += 4 * (patient % 2) - 2
            write_features(tmp_path / "study" / "bags" / TILING, f"s{patient}_{number}", features)
            lines.append(f"s{patient}_{number},/slides/s{patient}_{number}.svs,{'ab'[patient % 2]},p{patient}")
    (tmp_path / "study" / "cohort.csv").write_text("\n".join(lines) + "\n")
    return tmp_path / "study"


def run(root: Path, choice: FeatureChoice | None = None, **how: Any):
    with Engine(EngineSettings(workers=0)) as engine:
        return slide_embeddings(open_study(root), choice or FeatureChoice(), engine, **how)


def model(folder: Path, **seen: list[str]) -> Path:
    torch.manual_seed(0)
    module = build("abmil", DIM, 1, hidden=8, attention_dim=4)
    folder.mkdir(parents=True)
    safetensors.torch.save_file(module.state_dict(), folder / "model.safetensors")
    config = {"schema": SCHEMA, "format_version": FORMAT_VERSION, "aggregator": module.config, "seed": 0, **seen}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_embeddings_are_files_that_other_tools_read(root: Path):
    result = run(root)
    assert result.folder == root / "bags" / TILING / "slide_features_vit_mean"
    for row, embedding in zip(result.rows, result.embeddings_SE, strict=True):
        features = read_bag(root / "bags" / TILING / "features_vit" / f"{row.slide}.h5").features_ND
        assert embedding == pytest.approx(features.astype(np.float64).mean(axis=0), abs=1e-6)
        with h5py.File(result.folder / f"{row.slide}.h5") as file:  # as TRIDENT and Patho-Bench have them
            assert np.array_equal(np.asarray(file["features"]), embedding)
    assert result.to_frame().loc["s3_1", "label"] == "b"


def test_neighbours_are_of_other_patients_and_labels_agree_beyond_chance(root: Path):
    result = run(root, neighbors=3)
    patients = {row.slide: row.patient for row in result.rows}
    assert all(each.patient != patients[slide] for slide, found in result.similar.items() for each in found)
    assert result.agreement is not None
    assert result.agreement.share.value > 0.9 > 0.6 > result.agreement.chance
    stored = rows_of(result.folder / "similar_slides.csv")
    assert [line["similar"] for line in stored[:3]] == [each.slide for each in result.similar["s0_0"]]


def test_what_is_up_to_date_stays_and_a_new_feature_file_is_pooled_again(root: Path):
    folder = run(root).folder
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    again = run(root)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert {str(each.outcome) for each in again.built.values()} == {"up to date"}
    write_features(root / "bags" / TILING, "s0_0", np.ones((2, DIM)))
    assert run(root).embeddings_SE[0].tolist() == [1.0] * DIM


def test_one_bad_feature_file_does_not_stop_the_others(root: Path):
    write_features(root / "bags" / TILING, "s0_0", np.full((2, DIM), np.nan))
    result = run(root)
    assert [failure.slide for failure in result.failures] == ["s0_0"]
    assert (len(result.rows), len(read_failures(root))) == (23, 1)


@pytest.mark.parametrize("suffix", ["csv", "h5ad"])
def test_tables_hold_pseudonyms_instead_of_names(root: Path, tmp_path: Path, suffix: str):
    out = tmp_path / f"table.{suffix}"
    result = run(root, out=out, pseudonyms=True)
    if suffix == "csv":
        lines = rows_of(out)
        slides, patients = ([line[key] for line in lines] for key in ("slide", "patient"))
        values = np.array([[float(line[f"e{k}"]) for k in range(DIM)] for line in lines])
    else:
        table = pytest.importorskip("anndata").read_h5ad(out)
        slides, patients, values = list(table.obs_names), list(table.obs["patient"]), table.X
    assert not set(slides) & {row.slide for row in result.rows}
    assert not set(patients) & {row.patient for row in result.rows}
    assert np.allclose(np.sort(values[:, 0]), np.sort(result.embeddings_SE[:, 0]))


def test_a_trained_model_pools_and_slides_that_it_learned_from_are_not_asked_about(root: Path, tmp_path: Path):
    seen = [f"s{patient}_{number}" for patient in range(6) for number in range(2)]
    result = run(root, model=model(tmp_path / "model", trained_on=seen[:10], chosen_on=seen[10:]))
    assert result.embeddings_SE.shape == (24, 8)
    assert result.folder.name == "slide_features_vit_abmil_seed0"
    assert result.agreement is not None
    assert result.agreement.num_queries == 12
    assert (result.folder / "model_slides.txt").read_text().split() == sorted(seen)
    study = open_study(root, QUICK)
    with pytest.raises(ConfigError, check=has_code("embedding-saw-labels")):
        study.learning_set(FeatureChoice(folder=result.folder))
    copied = model(tmp_path / "copy")  # a package names no slides; the same weights in the study do
    model(root / "models" / TILING / "vit" / "abmil" / "given" / "seed0", trained_on=seen)
    assert run(root, model=copied).agreement == result.agreement


def test_a_model_of_unknown_slides_is_said_to_be_doubtful(root: Path, tmp_path: Path):
    (note,) = run(root, model=model(tmp_path / "model")).notes
    assert "optimistic" in note


def test_a_linear_probe_is_the_method_mean_on_the_folder(root: Path):
    folder = run(root).folder
    learning = open_study(root, QUICK).learning_set(FeatureChoice(folder=folder))
    assert {len(read_bag(path)) for path in learning.features.files.values()} == {1}
    assert learning.cases.dim == DIM
    assert len(learning.cases.by_slide) == 24


def test_from_python(root: Path):
    study = sv.Study(root, workers=0)
    nearest = study.similar("s3_0", 2)
    assert [each.slide for each in nearest] == [each.slide for each in study.slide_embeddings().similar["s3_0"][:2]]
    assert study.slide_embeddings("max").embeddings_SE.max() > study.slide_embeddings().embeddings_SE.max()


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        (("--out", "table.parquet"), "unknown-export"),
        (("--neighbors", 0), "invalid-neighbors"),
        (("--similar-to", "s99"), "unknown-slide"),
        (("--model", "nowhere"), "no-model"),
    ],
)
def test_wrong_flags_are_named(root: Path, flags: tuple[str, ...], code: str):
    done = selfvitmil("slide-embeddings", root, "--workers", 0, "--json", *flags)
    assert done.returncode in (2, 3)
    assert json.loads(done.stdout)["error"]["code"] == code


def test_the_command_prints_the_slides_most_like_one(root: Path):
    done = selfvitmil("slide-embeddings", root, "--workers", 0, "--similar-to", "s3_0")
    assert done.returncode == 0, done.stderr
    assert "most like s3_0" in done.stdout
    assert "24 of 24 slides have embeddings of 6 numbers" in done.stdout
