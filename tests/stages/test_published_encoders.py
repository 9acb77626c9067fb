"""Stains of tiles for published encoders: colours as scanned by default, what is set explicitly otherwise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch

from helpers.cohorts import table
from selfvitmil.bags import read_bag
from selfvitmil.commands.package import _carried_settings
from selfvitmil.encoder import load_encoder, save_encoder
from selfvitmil.engine import Engine
from selfvitmil.settings import EngineSettings, read_toml
from selfvitmil.slides.synthetic import make_slide
from selfvitmil.stages.embed import embed
from selfvitmil.stages.tile import tile
from selfvitmil.study import CohortSource, FeatureChoice, find_features, open_study
from selfvitmil.tiles import read_tiles

SETTINGS = {"tile": {"size_px": 224, "mpp": 0.25}}
ARGS: dict[str, Any] = {"img_size": 224, "patch_size": 56, "embed_dim": 16, "depth": 4, "num_heads": 2}


@pytest.fixture(scope="module")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`uni`: a small network under the tag of a published encoder; `mine`: the same network in a folder of ours."""
    folder = tmp_path_factory.mktemp("encoders")
    torch.manual_seed(0)
    network = timm.create_model("vit_tiny_patch16_224", num_classes=0, **ARGS)
    (folder / "uni").mkdir()
    torch.save(network.state_dict(), folder / "uni" / "pytorch_model.bin")
    config = {"architecture": "vit_tiny_patch16_224", "model_args": ARGS, "pretrained_cfg": {"tag": "uni_mass100k"}}
    (folder / "uni" / "config.json").write_text(json.dumps(config))
    save_encoder(folder / "mine", load_encoder(folder / "uni"))
    return folder


@pytest.fixture(scope="module")
def slide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("slide")
    make_slide(folder / "s.svs", seed=5, size=(1024, 1024))
    return folder


def embedded_with(slide: Path, root: Path, encoder: Path, **stain: str) -> tuple[object, str]:
    """Return the stain in the provenance of the features, and the one in the settings beside them."""
    study = open_study(root, {**SETTINGS, **({"stain": stain} if stain else {})}, source_of(slide))
    with Engine(EngineSettings(workers=0)) as engine:
        tile(study, engine)
        (features,) = embed(study, [str(encoder)], engine).features
    made_from = json.loads(read_bag(features.folder / "s.h5").attributes["made_from"])
    return made_from["stain"], read_toml(features.folder / "settings.toml")["stain"]["method"]


def source_of(slide: Path) -> CohortSource:
    return CohortSource(table(slide / "slides.csv", f"slide,path,label\ns,{slide / 's.svs'},a\n"))


def test_published_encoders_see_colours_as_scanned_unless_a_method_is_set(slide: Path, encoders: Path, tmp_path: Path):
    assert embedded_with(slide, tmp_path / "default", encoders / "uni") == ("none", "none")
    fit, method = embedded_with(slide, tmp_path / "asked", encoders / "uni", method="slide")
    assert isinstance(fit, dict)
    assert method == "slide"


def test_a_package_takes_the_method_of_the_features_not_of_the_tiles(slide: Path, encoders: Path, tmp_path: Path):
    assert embedded_with(slide, tmp_path / "study", encoders / "uni") == ("none", "none")
    study = open_study(tmp_path / "study", SETTINGS)
    features = find_features(study.root, FeatureChoice("uni"), study.settings)
    tables: Any = {"s": read_tiles(study.layout.tile_table(study.tiling, "s"))}
    assert tables["s"].stain is not None
    assert _carried_settings(study.root, features, tables, study.settings).stain.method == "none"


def test_other_encoders_follow_the_default_method(slide: Path, encoders: Path, tmp_path: Path):
    fit, method = embedded_with(slide, tmp_path / "study", encoders / "mine")
    assert isinstance(fit, dict)
    assert method == "slide"
