"""Four kinds of evidence: which methods learn from few tiles, from absence, from proportions, from a diffuse change?

    python benchmarks/evidence.py [--seeds 5] [--slides 60] [--tissue plain relu] [--processes 2]

Bags with known evidence, half of the slides positive, 120 slides for the test:

    few          5 % of the tiles of a positive slide show a pattern
    absence      20 % of the tiles of a *negative* slide do, none of a positive one
    proportion   10 % of the tiles of a negative slide, 30 % of a positive one
    diffuse      no pattern; every tile of a positive slide is shifted a little

`plain`: independent normal tiles of 128 dimensions with a small offset for every slide. `relu`: the tissue of
small_cohorts.py, 512 dimensions, several kinds of tissue and a lesion of its own character on every slide. A fifth of
the training slides is for validation. The default self-vit-mil and dsmil have to come within 0.02 of the best method of
the table on every kind.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from selfvitmil import metrics
from selfvitmil.aggregate.train import LabelledBag, score, train
from selfvitmil.bags import Bag
from selfvitmil.settings import TrainSettings
from small_cohorts import Cell, Tissue

SHARES = {"few": (0.0, 0.05), "absence": (0.2, 0.0), "proportion": (0.1, 0.3), "diffuse": (0.0, 0.0)}
"""Of tiles with the pattern, in negative and in positive slides."""
METHODS = (
    "self-vit-mil", "dsmil", "self-vit-mil:published", "dsmil:published", "abmil", "abmil-gated", "clam-sb", "chowder",
    "mil-rnn", "transmil", "mean", "max", "topk",
)  # fmt: skip
WATCHED = ("self-vit-mil", "dsmil")
TEST_SLIDES = 120
PLAIN_DIM = 128


class Outcome(NamedTuple):
    auc: float
    evidence: str
    """The kind that was chosen, where the method chooses."""


class Plain:
    """Independent normal tiles; what a pattern and a diffuse change add to them."""

    def __init__(self, rng: np.random.Generator):
        self.pattern, self.change = (_unit(rng.normal(size=PLAIN_DIM)) for _ in range(2))

    def slide(self, kind: str, label: int, rng: np.random.Generator) -> NDArray[np.float32]:
        number = int(rng.integers(60, 160))
        tiles = rng.normal(size=(number, PLAIN_DIM)) + 0.15 * rng.normal(size=PLAIN_DIM)
        count = _count(SHARES[kind][label], number)
        tiles[rng.choice(number, count, replace=False)] += 4 * self.pattern
        if kind == "diffuse" and label:
            tiles += 0.6 * self.change
        return tiles.astype(np.float32)


class Relu:
    """The tissue of small_cohorts.py."""

    def __init__(self, rng: np.random.Generator):
        self.cell = Cell("relu", 0.6, 0.0, 0, 512)
        self.tissue, self.faint = Tissue(self.cell, rng), 0.25

    def slide(self, kind: str, label: int, rng: np.random.Generator) -> NDArray[np.float32]:
        share = 1.0 if kind == "diffuse" and label else SHARES[kind][label]
        self.tissue.strength = self.cell.strength * (self.faint if kind == "diffuse" else 1.0)
        return self.tissue.slide(int(share > 0), share, rng).features_ND


TISSUES = {"plain": Plain, "relu": Relu}


def _unit(vector: NDArray[np.float64]) -> NDArray[np.float64]:
    return vector / np.linalg.norm(vector)


def _count(share: float, number: int) -> int:
    return max(1, round(share * number)) if share else 0


def run_cell(tissue: str, kind: str, seed: int, slides: int, methods: Sequence[str]) -> dict[str, Outcome]:
    """All methods on one cohort."""
    torch.set_num_threads(1)
    rng = np.random.default_rng([seed, list(SHARES).index(kind), list(TISSUES).index(tissue)])
    world = TISSUES[tissue](rng)
    training, test = (
        [(Bag(f"{part}{k}", world.slide(kind, k % 2, rng), None), k % 2) for k in range(count)]
        for part, count in (("train", slides), ("test", TEST_SLIDES))
    )
    labelled = [LabelledBag(bag.slide, bag, label) for bag, label in training]
    parts = [[each for k, each in enumerate(labelled) if (k // 2 % 5 == 0) == held] for held in (False, True)]
    outcomes: dict[str, Outcome] = {}
    for method in methods:
        name, _, recipe = method.partition(":")
        settings = TrainSettings.model_validate({"aggregator": name, "recipe": recipe or "default", "device": "cpu"})
        trained = train(name, parts[0], parts[1], 1, settings, seed)
        scores = [each.probabilities[0] for each in score(trained.module, [bag for bag, _ in test])]
        chosen = trained.evidence.evidence if trained.evidence is not None else ""
        outcomes[method] = Outcome(metrics.auc([label for _, label in test], scores), chosen)
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--slides", type=int, default=60)
    parser.add_argument("--tissue", nargs="+", choices=list(TISSUES), default=["plain"])
    parser.add_argument("--methods", nargs="+", default=list(METHODS), metavar="METHOD[:published]")
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    found: dict[tuple[str, str], dict[str, list[Outcome]]] = defaultdict(lambda: defaultdict(list))
    with ProcessPoolExecutor(arguments.processes, multiprocessing.get_context("spawn")) as pool:
        running = {
            pool.submit(run_cell, tissue, kind, seed, arguments.slides, arguments.methods): (tissue, kind)
            for seed in range(arguments.seeds)
            for tissue in arguments.tissue
            for kind in SHARES
        }
        for done in as_completed(running):
            for method, outcome in done.result().items():
                found[running[done]][method].append(outcome)
    gaps: dict[str, dict[str, float]] = defaultdict(dict)
    for tissue in arguments.tissue:
        print(f"\n{tissue}, AUC (sd over {arguments.seeds} seeds)\n{'method':24}" + "".join(f"{k:>16}" for k in SHARES))
        for method in arguments.methods:
            cells = [[each.auc for each in found[tissue, kind][method]] for kind in SHARES]
            print(f"{method:24}" + "".join(f"   {np.mean(own):.3f} ({np.std(own):.3f})" for own in cells))
        for method in (each for each in WATCHED if each in arguments.methods):
            for kind in SHARES:
                means = {name: float(np.mean([one.auc for one in own])) for name, own in found[tissue, kind].items()}
                gaps[method][f"{tissue} {kind}"] = round(max(means.values()) - means[method], 3)
                chosen = [each.evidence for each in found[tissue, kind][method]]
                print(f"{method}, {kind}: chose {', '.join(f'{kind} {chosen.count(kind)}x' for kind in set(chosen))}")
    result = {"seeds": arguments.seeds, "slides": arguments.slides, "gap_to_best": gaps}
    print(json.dumps({**result, "worst_gap": {method: max(own.values()) for method, own in gaps.items()}}))


if __name__ == "__main__":
    main()
