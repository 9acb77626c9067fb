"""A package of untrained networks, written in a second: for tests of what happens to packages and their answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import safetensors.torch
import torch

from selfvitmil.aggregate import build
from selfvitmil.aggregate.train import FORMAT_VERSION, SCHEMA
from selfvitmil.encoder import build_encoder
from selfvitmil.package import SETTINGS, PackageParts, SlideStatistics, fit_distribution, write_package
from selfvitmil.settings import StudySettings, to_toml

SMALL = {"embed_dim": 24, "depth": 4, "num_heads": 2}
DIM = 5 * 24


def make_model(folder: Path, num_classes: int = 1) -> Path:
    """A trained aggregator as `train` leaves it, as far as a package needs it."""
    module = build("mean", DIM, num_classes)
    folder.mkdir(parents=True)
    safetensors.torch.save_file(module.state_dict(), folder / "model.safetensors")
    told = {"schema": SCHEMA, "format_version": FORMAT_VERSION, "aggregator": module.config, "seed": 0, "epoch": 1}
    told |= dict.fromkeys(("recipe", "split", "classes", "protocol", "epoch_from", "encoder", "tiling"), "")
    (folder / "config.json").write_text(json.dumps(told))
    return folder


def make_package(folder: Path, *, name: str = "tiny_mean", classes: Sequence[str] = ("normal", "tumor")) -> Path:
    """Write a package to `folder`; weights come from torch's random generator."""
    rng = np.random.default_rng(0)
    slides = []
    for _ in range(4):
        vectors = rng.normal(size=(9, DIM))
        mean = vectors.mean(axis=0)
        slides.append(SlideStatistics(0.25, 9, None, mean, ((vectors - mean) ** 2).sum(axis=0), 9))
    binary = len(classes) == 2
    about = {
        "name": name, "method": "mean", "classes": list(classes), "positive": classes[1] if binary else None,
        "encoders": [{"folder": "encoder", "name": "tiny", "mpp": 1.0}], "protocol": "honest", "split": "given",
        "dim": DIM, "seeds": [0], "chosen_on": {"part": "validation", "slides": dict.fromkeys(classes, 1)},
        "choice": {
            "threshold": 0.5 if binary else None, "threshold_from": "fixed", "calibration_from": "none",
            "calibration": None,
        },
    }  # fmt: skip
    settings = StudySettings.model_validate({"tile": {"mpp": 1.0, "size_px": 48}, "stain": {"method": "none"}})
    model = make_model(folder.with_name(f"{folder.name}-seed0"), 1 if binary else len(classes))
    torch.manual_seed(0)  # one encoder for all, so that tests embed a slide once
    encoder = build_encoder("vit_tiny_patch16_224", img_size=48, model_args=SMALL)
    settings_toml = to_toml(settings, SETTINGS)
    write_package(
        folder,
        PackageParts(
            about, "card", settings_toml, fit_distribution(slides, [], 1.0), {"encoder": encoder}, {"seed0": model}
        ),
    )
    return folder
