"""Labelled tiles of real tissue, and synthetic slides composed of them; used by `pretrain_budget.py`.

FOLDER/tiles.csv lists tiles with patient, field of view and class. Two layouts are known: LungHist700 (columns file,
class, tumour, group, field) and BreakHis (tile, image, patient, label, subtype; tiles in FOLDER/tiles/).
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from selfvitmil.errors import ConfigError

SAME_PATIENT = {"P31": "P07"}
"""Groups of LungHist700 that belong in one fold, as its description asks."""
TRAIN_SHARE = 0.6
SPLIT_SEED = 0
Indices = NDArray[np.int64]


# ---------------------------------------------------------------------------------------------------- tiles


@dataclass(frozen=True)
class Tiles:
    """The tiles of a data set, and what is known of each."""

    paths: tuple[Path, ...]
    classes: NDArray[np.str_]
    patients: NDArray[np.str_]
    fields: NDArray[np.str_]
    is_tumour: NDArray[np.bool_]


def read_table(folder: Path) -> Tiles:
    """Read `tiles.csv` in one of the two layouts."""
    with (folder / "tiles.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    columns = set(rows[0]) if rows else set[str]()
    if {"file", "class", "tumour", "group", "field"} <= columns:
        paths = [folder / row["file"] for row in rows]
        names, tumour = [row["class"] for row in rows], [row["tumour"] == "1" for row in rows]
        patients = [SAME_PATIENT.get(row["group"], row["group"]) for row in rows]
        fields = [row["field"] for row in rows]
    elif {"tile", "image", "patient", "label", "subtype"} <= columns:
        paths = [folder / "tiles" / row["tile"] for row in rows]
        names, tumour = [row["subtype"] for row in rows], [row["label"] == "malignant" for row in rows]
        patients, fields = [row["patient"] for row in rows], [row["image"] for row in rows]
    else:
        raise ConfigError(
            f"{folder.name}/tiles.csv: has the columns {', '.join(sorted(columns))}",
            "neither the layout of LungHist700 nor that of BreakHis",
            "See the head of benchmarks/tile_cohorts.py",
        )
    joined = [f"{patient}/{field}" for patient, field in zip(patients, fields, strict=True)]
    return Tiles(tuple(paths), np.array(names), np.array(patients), np.array(joined), np.array(tumour))


def load_tiles(paths: Sequence[Path], downscale: int = 1) -> torch.Tensor:
    """All tiles (N, 3, H, W) as uint8; with `downscale`, the means of so many times so many pixels."""

    def load(path: Path) -> torch.Tensor:
        with Image.open(path) as image:
            return torch.from_numpy(np.array(image.convert("RGB").reduce(downscale))).permute(2, 0, 1)

    with ThreadPoolExecutor(8) as pool:
        return torch.stack(list(pool.map(load, paths)))


def train_patients(tiles: Tiles) -> set[str]:
    """Patients for training: the same share of those with normal tissue as of the others."""
    rng = np.random.default_rng(SPLIT_SEED)
    with_normal = np.unique(tiles.patients[~tiles.is_tumour])
    others = np.setdiff1d(np.unique(tiles.patients), with_normal)
    parts = [rng.permutation(each) for each in (with_normal, others)]
    return {str(name) for part in parts for name in part[: round(TRAIN_SHARE * len(part))]}


# ---------------------------------------------------------------------------------------------------- slides


@dataclass(frozen=True)
class Slide:
    """Which tiles a synthetic slide is made of, and which of them lie in which lesion."""

    rows: Indices
    lesions: Indices
    """Number of the lesion from 1 on, 0 outside; every tumour field is a lesion."""

    @property
    def label(self) -> int:
        return int(self.lesions.any())


@dataclass(frozen=True)
class SlideShape:
    """How large synthetic slides are."""

    tiles: int = 240
    lesion_tiles: int = 24
    hosts: int = 3
    """Patients whose normal tissue makes the background."""


def make_slides(tiles: Tiles, rows: Indices, count: int, shape: SlideShape, seed: int) -> list[Slide]:
    """Synthetic slides of these tiles, negative and positive in turn.

    The background is normal tissue of some patients, in whole fields. A positive slide has tumour fields besides, of
    one of these patients where there is any, else of another; a negative one has normal fields of another patient
    there, so that a further patient says nothing.
    """
    rng = np.random.default_rng(seed)
    normal, tumour = (rows[tiles.is_tumour[rows] == kind] for kind in (False, True))
    candidates = np.unique(tiles.patients[normal])
    slides: list[Slide] = []
    for number in range(count):
        # At least one patient with normal tissue is left for the place of the lesion.
        hosts = rng.permutation(candidates)[: min(shape.hosts, len(candidates) - 1)]
        is_positive = bool(number % 2)
        if is_positive:
            pool = tumour[np.isin(tiles.patients[tumour], hosts)]
            guest = rng.choice(tiles.patients[pool if len(pool) else tumour])
            pool = tumour[tiles.patients[tumour] == guest]
        else:
            pool = normal[tiles.patients[normal] == rng.choice(np.setdiff1d(candidates, hosts))]
        guests = _draw_fields(tiles, pool, shape.lesion_tiles, rng)
        own = normal[np.isin(tiles.patients[normal], hosts)]
        background = _draw_fields(tiles, own, shape.tiles - shape.lesion_tiles, rng)
        lesions = np.zeros(len(background) + len(guests), dtype=np.int64)
        if is_positive:
            lesions[len(background) :] = np.unique(tiles.fields[guests], return_inverse=True)[1] + 1
        slides.append(Slide(np.concatenate([background, guests]), lesions))
    return slides


def _draw_fields(tiles: Tiles, rows: Indices, wanted: int, rng: np.random.Generator) -> Indices:
    """Tiles of whole fields in random order, `wanted` of them; all fields once before any comes again."""
    fields = np.unique(tiles.fields[rows])
    drawn: list[Indices] = []
    while sum(map(len, drawn)) < wanted:
        drawn += [rows[tiles.fields[rows] == field] for field in rng.permutation(fields)]
    return np.concatenate(drawn)[:wanted]
