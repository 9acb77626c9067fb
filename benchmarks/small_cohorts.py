"""How dependable each aggregator is on small cohorts: bags with planted lesions, every method, the users' trainer.

    python benchmarks/small_cohorts.py [--grid axes] [--seeds 3] [--methods dsmil abmil-gated ...] [--processes 2]
    python benchmarks/small_cohorts.py --tiles FOLDER        bags of real tiles: FOLDER/tiles.csv and FOLDER/tiles/

A cell of the grid is a kind of embedding, a strength of the lesion, the share of lesion tiles in positive slides, a
number of slides (a fifth of them for validation) and a number of dimensions; all else stays as it is. A seed draws new
tissue, new slides and new first weights. Every method is trained by `aggregate.train` with its default recipe, which
`METHOD:published` replaces by the published one, and judged on 120 slides that nobody has seen. Printed are AUC (mean
and sd over the seeds) and the share of positive slides whose most suspicious tile lies in the lesion. `gap` is how far
a method stays behind the best of its cell; cells in which nobody reaches 0.65 say nothing and are left out. The last
line is JSON.

Strength 1 means: a lesion tile is as far from the tissue it grows in as two kinds of normal tissue are from each other.
The kinds of embedding:

    gauss   clusters of normal tissue in a space whose directions vary by different amounts
    relu    the same in 48 hidden directions, seen through random units with ReLU and averaged over a tile, as in a CNN:
            never negative, correlated, of very different scales
    tiles   real H&E tiles through a CNN of random weights; the lesion is malignant tiles of one patient among benign
            ones of another, and in negative slides a third, benign patient's take their place. No strength; patients
            of the test slides are not those of the training slides.

In both made kinds a slide has its own mix of tissues, its own offset (its stain) and, if positive, a lesion of its own
character.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import multiprocessing
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import ndtr

from selfvitmil import metrics
from selfvitmil.aggregate.train import LabelledBag, score, train
from selfvitmil.bags import Bag
from selfvitmil.settings import TrainSettings

METHODS = ("dsmil", "self-vit-mil", "abmil", "abmil-gated", "clam-sb", "chowder", "mil-rnn", "mean", "max", "topk")
BASELINES = ("dsmil:published",)
WATCHED = ("dsmil", "self-vit-mil")
TEST_SLIDES = 120
TILES = 120
CHANCE = 0.65
Floats = NDArray[np.float64]


class Cell(NamedTuple):
    kind: str
    strength: float
    fraction: float
    slides: int
    dim: int


CENTRE = Cell("relu", 0.6, 0.07, 80, 512)
GRIDS = {
    "one": [CENTRE],
    "axes": [
        CENTRE,
        CENTRE._replace(strength=0.45),
        CENTRE._replace(strength=1.0, fraction=0.02),
        CENTRE._replace(strength=0.3, fraction=0.2),
        CENTRE._replace(slides=40),
        CENTRE._replace(strength=0.45, slides=200),
        CENTRE._replace(dim=384),
        CENTRE._replace(dim=1024),
        Cell("gauss", 0.35, 0.07, 80, 512),
        Cell("gauss", 0.5, 0.03, 80, 384),
        Cell("gauss", 0.2, 0.2, 40, 1024),
    ],
    "full": [
        Cell(*each)
        for each in itertools.product(
            ("relu", "gauss"), (0.3, 0.45, 0.6, 1.0), (0.02, 0.05, 0.1, 0.2), (40, 80, 200), (384, 512, 1024)
        )
    ],
}


class Slide(NamedTuple):
    """A slide's embeddings, its label, and which of its tiles lie in the lesion."""

    features_ND: NDArray[np.float32]
    label: int
    in_lesion_N: NDArray[np.bool_]


# ---------------------------------------------------------------------------------------------------- made tissue

KINDS_OF_TISSUE = 6
LESION_DIRECTIONS = 4
HIDDEN = 48
CENTRE_SD = 1.2
SLIDE_SD = 0.6
LESION_SD = 0.35


class Tissue:
    """What all slides of a cohort share: kinds of normal tissue, how tiles and slides vary, what a lesion changes."""

    def __init__(self, cell: Cell, rng: np.random.Generator):
        width = HIDDEN if cell.kind == "relu" else cell.dim
        self.kind, self.strength = cell.kind, cell.strength
        falling = (1 + np.arange(width) * (1 if cell.kind == "relu" else 1 / 8)) ** -0.5
        spread = falling / np.sqrt((falling**2).mean())
        self.of_tile = _rotation(width, rng) * spread
        self.of_slide = SLIDE_SD * _rotation(width, rng) * rng.permutation(spread)
        self.centres = CENTRE_SD * rng.normal(size=(KINDS_OF_TISSUE, width))
        apart = CENTRE_SD * np.sqrt(2 * width)
        self.of_lesion = apart * _rotation(width, rng)[:LESION_DIRECTIONS]
        self.units = 1.2 * rng.normal(size=(width, cell.dim)) / np.sqrt(width)
        self.biases = 0.7 * rng.normal(size=cell.dim) - 0.3
        self.scales = np.exp(0.8 * rng.normal(size=cell.dim) - 0.7)

    def slide(self, label: int, fraction: float, rng: np.random.Generator) -> Slide:
        width = self.centres.shape[1]
        kinds = rng.choice(KINDS_OF_TISSUE, TILES, p=rng.dirichlet(np.ones(KINDS_OF_TISSUE)))
        hidden = self.centres[kinds] + rng.normal(size=(TILES, width)) @ self.of_tile.T
        hidden += self.of_slide @ rng.normal(size=width)
        in_lesion = np.zeros(TILES, dtype=bool)
        if label:
            count = max(1, rng.binomial(TILES, fraction))
            in_lesion[rng.choice(TILES, count, replace=False)] = True
            character = np.eye(LESION_DIRECTIONS)[0] + LESION_SD * rng.normal(size=LESION_DIRECTIONS)
            shift = character + LESION_SD * rng.normal(size=(count, LESION_DIRECTIONS))
            hidden[in_lesion] += self.strength * shift @ self.of_lesion
        brightness = np.exp(0.1 * rng.normal())
        features = self._seen_by_units(hidden) * brightness if self.kind == "relu" else hidden
        return Slide(features.astype(np.float32), label, in_lesion)

    def _seen_by_units(self, hidden: Floats, within_tile_sd: float = 0.5) -> Floats:
        """Mean of ReLU over a tile, in which a unit's input varies normally around its mean."""
        inputs = (hidden @ self.units + self.biases) / within_tile_sd
        density = np.exp(-(inputs**2) / 2) / np.sqrt(2 * np.pi)
        return within_tile_sd * (inputs * ndtr(inputs) + density) * self.scales


def _rotation(width: int, rng: np.random.Generator) -> Floats:
    return np.linalg.qr(rng.normal(size=(width, width)))[0]


def made_slides(cell: Cell, seed: int) -> tuple[list[Slide], list[Slide]]:
    """Training and test slides of a cell, half of them positive."""
    rng = np.random.default_rng([seed, *(round(1000 * each) for each in cell[1:])])
    tissue = Tissue(cell, rng)
    training, test = (
        [tissue.slide(k % 2, cell.fraction, rng) for k in range(count)] for count in (cell.slides, TEST_SLIDES)
    )
    return training, test


# ---------------------------------------------------------------------------------------------------- real tiles


class Tiles(NamedTuple):
    features_ND: NDArray[np.float32]
    patients: NDArray[np.str_]
    is_malignant: NDArray[np.bool_]


def embed_tiles(folder: Path) -> Tiles:
    """The tiles through the first three stages of a ResNet-18 of random weights: 448 dimensions."""
    from PIL import Image
    from torchvision.models import resnet18

    with (folder / "tiles.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    torch.manual_seed(0)
    network = resnet18(weights=None)
    stem = torch.nn.Sequential(network.conv1, network.bn1, network.relu, network.maxpool)
    stages = [network.layer1, network.layer2, network.layer3]

    def embed(rows: Sequence[dict[str, str]]) -> torch.Tensor:
        pictures = [
            np.asarray(Image.open(folder / "tiles" / row["tile"]).convert("RGB").resize((112, 112))) for row in rows
        ]
        x = torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).float() / 255
        x, means = stem((x - 0.5) / 0.25), []
        for stage in stages:
            x = stage(x)
            means.append(x.mean((2, 3)))
        return torch.cat(means, dim=1)

    with torch.no_grad():
        some = np.random.default_rng(0).choice(len(table), min(256, len(table)), replace=False)
        embed([table[k] for k in some])  # sets the running statistics of the batch norms
        network.eval()
        features = torch.cat([embed(table[start : start + 64]) for start in range(0, len(table), 64)])
    patients = np.array([row["patient"] for row in table])
    return Tiles(features.numpy(), patients, np.array([row["label"] == "malignant" for row in table]))


def real_slides(tiles: Tiles, cell: Cell, seed: int) -> tuple[list[Slide], list[Slide]]:
    """Training and test slides of real tiles, of different patients."""
    rng = np.random.default_rng([seed, round(1000 * cell.fraction), cell.slides])
    benign, malignant = (rng.permutation(np.unique(tiles.patients[tiles.is_malignant == kind])) for kind in (0, 1))
    parts = []
    for half, count in enumerate((cell.slides, TEST_SLIDES)):
        pools = [
            each[: round(0.6 * len(each))] if half == 0 else each[round(0.6 * len(each)) :]
            for each in (benign, malignant)
        ]
        parts.append([_real_slide(tiles, pools[0], pools[1], k % 2, cell.fraction, rng) for k in range(count)])
    return parts[0], parts[1]


def _real_slide(
    tiles: Tiles, benign: NDArray, malignant: NDArray, label: int, fraction: float, rng: np.random.Generator
) -> Slide:
    patient, other = rng.choice(benign, 2, replace=False)
    guest = rng.choice(malignant) if label else other
    own = np.flatnonzero(tiles.patients == patient)
    count = max(1, round(fraction * TILES))
    picked = rng.choice(own, TILES, replace=len(own) < TILES)
    picked[:count] = rng.choice(np.flatnonzero(tiles.patients == guest), count)
    in_lesion = (np.arange(TILES) < count) & bool(label)
    order = rng.permutation(TILES)
    return Slide(tiles.features_ND[picked[order]], label, in_lesion[order])


# ---------------------------------------------------------------------------------------------------- one cell


class Outcome(NamedTuple):
    auc: float
    lesion_share: float
    epoch: int
    seconds: float


def judge(method: str, training: Sequence[Slide], test: Sequence[Slide], seed: int) -> Outcome:
    """Train a method on these slides, a fifth of them for validation, and judge it on the others."""
    start = time.perf_counter()
    name, _, recipe = method.partition(":")
    settings = TrainSettings.model_validate({"aggregator": name, "recipe": recipe or "default", "device": "cpu"})
    kept, held = [], []
    for k, slide in enumerate(training):
        into = held if k // 2 % 5 == 0 else kept
        into.append(LabelledBag(f"train{k}", Bag(f"train{k}", slide.features_ND, None), slide.label))
    trained = train(name, kept, held, 1, settings, seed)
    found = score(trained.module, [Bag(f"test{k}", slide.features_ND, None) for k, slide in enumerate(test)])
    labels = np.array([slide.label for slide in test])
    auc = metrics.auc(labels, np.array([each.probabilities[0] for each in found]))
    hits = [slide.in_lesion_N[each.critical] for slide, each in zip(test, found, strict=True) if slide.label]
    return Outcome(auc, float(np.mean(hits)), trained.epoch, time.perf_counter() - start)


def run_cell(cell: Cell, seed: int, methods: Sequence[str], tiles: Tiles | None) -> dict[str, Outcome]:
    torch.set_num_threads(1)
    training, test = made_slides(cell, seed) if tiles is None else real_slides(tiles, cell, seed)
    return {method: judge(method, training, test, seed) for method in methods}


# ---------------------------------------------------------------------------------------------------- all of it

Results = dict[Cell, dict[str, list[Outcome]]]


def run_grid(
    cells: Sequence[Cell],
    seeds: Sequence[int],
    methods: Sequence[str],
    tiles: Tiles | None,
    processes: int,
    report: Callable[[Cell, dict[str, list[Outcome]]], None],
) -> Results:
    """All cells and seeds; `report` is called with each cell once it is whole."""
    results: Results = {cell: defaultdict(list) for cell in cells}
    missing = dict.fromkeys(cells, len(seeds))
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        running = {
            pool.submit(run_cell, cell, seed, methods, tiles): cell for cell, seed in itertools.product(cells, seeds)
        }
        for done in as_completed(running):
            cell = running[done]
            for method, outcome in done.result().items():
                results[cell][method].append(outcome)
            missing[cell] -= 1
            if missing[cell] == 0:
                report(cell, results[cell])
    return results


def print_cell(cell: Cell, of_method: dict[str, list[Outcome]]) -> None:
    strength = "" if cell.kind == "tiles" else f"strength {cell.strength:g}, "
    told = f"{strength}{cell.fraction:.0%} lesion, {cell.slides} slides, {cell.dim} dimensions"
    print(f"\n{cell.kind}: {told}\n{'method':18} {'AUC':>6} {'sd':>6} {'gap':>6}  in lesion  epoch  seconds")
    best = best_auc(of_method)
    for method, outcomes in sorted(of_method.items(), key=lambda each: -mean_auc(each[1])):
        spread = np.std([each.auc for each in outcomes], ddof=1) if len(outcomes) > 1 else float("nan")
        share, epoch, seconds = (float(np.mean([each[k] for each in outcomes])) for k in (1, 2, 3))
        area = mean_auc(outcomes)
        print(
            f"{method:18} {area:6.3f} {spread:6.3f} {best - area:6.3f} {share:10.0%} {epoch:6.0f} {seconds:8.1f}",
            flush=True,
        )


def mean_auc(outcomes: Sequence[Outcome]) -> float:
    return float(np.mean([each.auc for each in outcomes]))


def best_auc(of_method: dict[str, list[Outcome]]) -> float:
    return max(mean_auc(outcomes) for outcomes in of_method.values())


def summary(results: Results) -> dict[str, object]:
    """Gaps, AUCs and shares over the cells that tell something."""
    telling = {cell: each for cell, each in results.items() if best_auc(each) >= CHANCE}
    methods = sorted({method for each in telling.values() for method in each})
    gaps = {m: [best_auc(each) - mean_auc(each[m]) for each in telling.values()] for m in methods}
    shares = {m: [one.lesion_share for each in telling.values() for one in each[m]] for m in methods}
    watched = [method for method in WATCHED if method in methods]
    return {
        "worst_gap": {method: round(max(gaps[method]), 3) for method in watched},
        "worst_cell": {method: list(telling)[int(np.argmax(gaps[method]))] for method in watched},
        "mean_gap": {method: round(float(np.mean(gaps[method])), 3) for method in methods},
        "auc": {m: round(float(np.mean([mean_auc(each[m]) for each in telling.values()])), 3) for m in methods},
        "in_lesion": {method: round(float(np.mean(shares[method])), 3) for method in methods},
        "cells": len(results),
        "telling_cells": len(telling),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grid", choices=sorted(GRIDS), default="axes")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--methods", nargs="+", default=[*METHODS, *BASELINES], metavar="METHOD[:published]")
    parser.add_argument("--tiles", type=Path, help="folder of real tiles, in place of made embeddings")
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    cells, tiles = GRIDS[arguments.grid], None
    if arguments.tiles is not None:
        tiles = embed_tiles(arguments.tiles)
        sizes = ((0.05, 80), (0.1, 80), (0.2, 80), (0.2, 40))
        cells = [Cell("tiles", 0, fraction, slides, tiles.features_ND.shape[1]) for fraction, slides in sizes]
    seeds = range(arguments.seeds)
    results = run_grid(cells, seeds, arguments.methods, tiles, arguments.processes, print_cell)
    print(json.dumps({"seeds": arguments.seeds, **summary(results)}))


if __name__ == "__main__":
    main()
