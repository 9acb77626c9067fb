"""Many methods and seeds on small bags: one training after the other, and in turns on one device.

    python benchmarks/turns.py [--seeds 5] [--bags 64] [--tiles 164] [--dim 1920] [--epochs N] [--methods dsmil ...]

The rows are those of `compare`: every method by its recipe, and two by their published ones too. In turns, all of them
are trained with every seed; alone, each with the first seed, which is scaled to all seeds. Both have the same random
numbers: `loss_difference` is the largest relative difference between their training losses, over all epochs that both
have. On a CPU taking turns saves nothing, and weights are the same bits; without a GPU sizes are small unless told
otherwise. Capturing and uploading count. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from mil_epoch import make_bags
from selfvitmil.aggregate.bag_tensors import BagStore, LabelledBag
from selfvitmil.aggregate.graphs import Queued, Seeds, seeds_in_turns
from selfvitmil.aggregate.train import Trained, train, train_seeds
from selfvitmil.settings import StudySettings, TrainSettings
from selfvitmil.stages.train import MOST_AT_ONCE, Compared, compared_methods

Bags = list[LabelledBag]


def rows_of(arguments: argparse.Namespace) -> list[Compared]:
    """The rows of a comparison, or those that are named."""
    settings = StudySettings(train=TrainSettings(epochs=arguments.epochs, device=arguments.device))
    rows = compared_methods(settings, two_scales=False)
    return [row for row in rows if not arguments.methods or row.title in arguments.methods]


def alone(rows: list[Compared], training: Bags, validation: Bags, store: BagStore) -> dict[str, tuple[Trained, float]]:
    """Row -> the training with the first seed, and its seconds."""
    found: dict[str, tuple[Trained, float]] = {}
    for row in rows:
        begin = time.perf_counter()
        trained = train(row.method, training, validation, 1, row.train, 0, store=store)
        found[row.title] = trained, time.perf_counter() - begin
    return found


def together(
    rows: list[Compared], training: Bags, validation: Bags, store: BagStore, seeds: int, most: int
) -> dict[str, list[Trained]]:
    """Row -> its trainings with every seed, in turns."""
    found: dict[str, list[tuple[int, Trained]]] = {row.title: [] for row in rows}

    def seeds_of(row: Compared) -> Seeds[int, tuple[str, int, Trained]]:
        def steps(left: deque[int]) -> Iterator[tuple[str, int, Trained] | Queued]:
            taken: list[int] = []

            def own() -> Iterator[int]:
                while left:
                    taken.append(left.popleft())
                    yield taken[-1]

            def note(_: int, line: dict[str, Any]) -> None:
                group.note(line)

            for trained in train_seeds(row.method, training, validation, 1, row.train, own(), store=store, report=note):
                yield trained if isinstance(trained, Queued) else (row.title, taken[-1], trained)

        group = Seeds(steps, deque(range(seeds)))
        return group

    for title, seed, trained in seeds_in_turns(list(map(seeds_of, rows)), most):
        found[title].append((seed, trained))
    return {title: [trained for _, trained in sorted(own, key=lambda each: each[0])] for title, own in found.items()}


def difference(one: Trained, other: Trained) -> float:
    """Largest relative difference between the training losses of two trainings."""
    lines = zip(one.history, other.history, strict=False)
    losses = np.array([[line["train_loss"] for line in pair] for pair in lines])
    return float(np.max(np.abs(losses[:, 0] - losses[:, 1]) / np.maximum(np.abs(losses[:, 1]), 1e-6)))


def main(given: list[str] | None = None) -> None:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5 if gpu else 2)
    parser.add_argument("--bags", type=int, default=64 if gpu else 12, help="to train on; a quarter more to validate")
    parser.add_argument("--tiles", type=int, default=164 if gpu else 50)
    parser.add_argument("--dim", type=int, default=1920 if gpu else 96)
    parser.add_argument("--epochs", type=int, default=None if gpu else 6)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--methods", nargs="+", help="titles of rows; by default all")
    parser.add_argument("--most", type=int, default=MOST_AT_ONCE, help="trainings at the same time")
    arguments = parser.parse_args(given)
    rows = rows_of(arguments)
    bags = make_bags(arguments.bags + max(4, arguments.bags // 4), arguments.tiles, arguments.dim, None)
    training, validation = bags[: arguments.bags], bags[arguments.bags :]
    seconds: dict[str, float] = {}
    begin = time.perf_counter()
    train("mean", training, validation, 1, TrainSettings(epochs=5, device=arguments.device), 0)  # libraries, the GPU
    seconds["warm_up"] = time.perf_counter() - begin
    begin = time.perf_counter()
    in_turn = together(rows, training, validation, BagStore(arguments.device), arguments.seeds, arguments.most)
    seconds["in_turns"] = time.perf_counter() - begin
    one_by_one = alone(rows, training, validation, BagStore(arguments.device))
    seconds["alone_one_seed"] = sum(spent for _, spent in one_by_one.values())
    said = (text for found in in_turn.values() for each in found for text in each.warnings)
    result: dict[str, Any] = {
        "benchmark": "turns",
        "seconds": {name: round(value, 2) for name, value in seconds.items()},
        "ratio": round(arguments.seeds * seconds["alone_one_seed"] / seconds["in_turns"], 2),
        "seconds_alone": {title: round(spent, 2) for title, (_, spent) in one_by_one.items()},
        "epochs": {title: [len(each.history) for each in found] for title, found in in_turn.items()},
        "loss_difference": {title: difference(in_turn[title][0], found) for title, (found, _) in one_by_one.items()},
        "warnings": sorted({text for text in said if "CUDA" in text}),
        "seeds": arguments.seeds,
        "bags": [len(training), len(validation)],
        "tiles": arguments.tiles,
        "dim": arguments.dim,
        "device": str(BagStore(arguments.device).device),
    }  # fmt: skip
    print(json.dumps(result))


if __name__ == "__main__":
    main()
