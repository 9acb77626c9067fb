"""Classical MIL sets (Musk1, Musk2, Elephant and others of that form): repeated 10-fold accuracy and AUC.

    python benchmarks/classical_mil.py FOLDER [--repeats 5] [--folds 10] [--methods dsmil abmil] [--processes 2]

Every FOLDER/*.csv is a set: no header, a row per instance: label of its bag (0 or 1), name of its bag, embedding. One
setting per method serves all sets (`SETTINGS`): a fixed number of epochs, the weights of the last one, no validation.
Bags of a few instances and embeddings that were never trained for the task ask for more than a linear judgement of an
instance, so that DSMIL is taken with its v of linear and ReLU, and scored by its attention stream as its authors do.

A repeat splits the bags into folds, stratified by label; each fold is judged by a module that was trained, and whose
standardization was fitted, on the other folds alone, at the threshold 0.5. A repeat's accuracy is that over all bags,
its AUC the mean over the folds' (scores of different modules are not compared). Printed are mean and sd over the
repeats and a 95 % bootstrap interval: of the accuracy over the bags, each with the share of repeats that were right, of
the AUC over the folds of all repeats. Published figures are printed as such; they are not verified, and how their
epochs were chosen is not known to us. The last line is JSON: {set: {method: {...}}}.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from selfvitmil import metrics
from selfvitmil.aggregate import Aggregator, build
from selfvitmil.aggregate.optim import Mover, learning_rates
from selfvitmil.aggregate.recipes import recipe_of
from selfvitmil.aggregate.steps import draw
from selfvitmil.aggregate.train import BagStore, LabelledBag, score
from selfvitmil.bags import Bag
from selfvitmil.settings import TrainSettings

PUBLISHED_ACCURACY = {"dsmil": {"musk1": 0.932, "musk2": 0.930, "elephant": 0.925}}
"""As printed by the method's authors (10-fold, 5 repeats); not verified."""
SETTINGS: dict[str, dict[str, Any]] = {
    "dsmil": {
        "lr": 2e-3,
        "weight_decay": 0.1,
        "instance_dropout": 0.3,
        "options": {"v": "linear_relu", "init": "quiet", "score": "bag"},
    },
    "abmil": {"lr": 5e-4, "weight_decay": 0.01},
}
"""What differs from the method's default recipe; the same for all sets."""
FOR_ALL = {"epochs": 20, "warmup_epochs": 2, "device": "cpu"}
Floats = NDArray[np.float64]


def read_set(path: Path) -> list[LabelledBag]:
    """The bags of a csv file, in the order of their first rows."""
    table = np.loadtxt(path, delimiter=",", dtype=np.float64, ndmin=2)
    rows_of: dict[float, list[int]] = defaultdict(list)
    for row, name in enumerate(table[:, 1].tolist()):
        rows_of[name].append(row)
    bags = []
    for name, rows in rows_of.items():
        labels = set(table[rows, 0].tolist())
        if len(labels) != 1 or not labels <= {0.0, 1.0}:
            raise SystemExit(f"{path.name}: bag {name:g} has labels {sorted(labels)}; each bag needs one, 0 or 1")
        features_ND = table[rows, 2:].astype(np.float32)
        bags.append(LabelledBag(f"{name:g}", Bag(f"{name:g}", features_ND, None), int(labels.pop())))
    return bags


def stratified_parts(labels: Sequence[int], num_parts: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """The part (0, 1, ...) of every bag: parts as equal as can be, in size and in labels."""
    order = np.concatenate([rng.permutation(np.flatnonzero(np.array(labels) == label)) for label in (0, 1)])
    part_of = np.empty(len(labels), dtype=np.int64)
    part_of[order] = np.arange(len(labels)) % num_parts
    return part_of


class Fold(NamedTuple):
    """What a module said of the bags that it never saw."""

    places: NDArray[np.int64]
    probabilities: Floats


def fit(method: str, bags: Sequence[LabelledBag], seed: int) -> Aggregator:
    """A module trained on these bags for the fixed number of epochs."""
    settings = TrainSettings.model_validate({"aggregator": method, **SETTINGS.get(method, {}), **FOR_ALL})
    recipe = recipe_of(method, settings).for_dim(bags[0].bag.dim)
    torch.manual_seed(seed)
    rng, store = np.random.default_rng(seed), BagStore("cpu")
    module = build(method, bags[0].bag.dim, 1, **recipe.options, standardize=True)
    module.set_standardization(*store.standardization([each.bag for each in bags]))
    mover, schedule = Mover(module, recipe, store.device, keep_gradients=False), learning_rates(recipe, len(bags))
    order = np.concatenate([rng.permutation(len(bags)) for _ in range(recipe.epochs)])
    for step, place in enumerate(order.tolist()):
        bag_ND = store.features(bags[place].bag)
        num_seen = len(bag_ND) - int(recipe.instance_dropout * len(bag_ND))
        if num_seen < len(bag_ND):
            bag_ND = bag_ND[draw(len(bag_ND), num_seen, store.device)]
        mover.set_lr(schedule.value_at(step))
        module.loss(module(bag_ND), bags[place].label).backward()
        mover.step()
    return module.eval()


def run_fold(bags: Sequence[LabelledBag], method: str, repeat: int, fold: int, num_folds: int) -> Fold:
    """Judge the bags of one fold by a module that the others trained."""
    torch.set_num_threads(1)
    fold_of = stratified_parts([each.label for each in bags], num_folds, np.random.default_rng(repeat))
    module = fit(method, [bag for bag, part in zip(bags, fold_of, strict=True) if part != fold], 1000 * repeat + fold)
    places = np.flatnonzero(fold_of == fold)
    found = score(module, [bags[place].bag for place in places.tolist()])
    return Fold(places, np.array([each.probabilities[0] for each in found]))


# ---------------------------------------------------------------------------------------------------- judging


def summary(labels: NDArray[np.int64], repeats: Sequence[Sequence[Fold]]) -> dict[str, Any]:
    """Accuracy and AUC over the repeats, and an interval of each."""
    right_RB = np.array([_right(labels, folds) for folds in repeats])
    accuracies = right_RB.mean(axis=1)
    areas_RF = np.array([[_fold_auc(labels, fold) for fold in folds] for folds in repeats])
    areas = np.nanmean(areas_RF, axis=1)
    rng = np.random.default_rng(0)
    drawn = rng.integers(len(labels), size=(2000, len(labels)))
    of_bags = np.quantile(right_RB.mean(axis=0)[drawn].mean(axis=1), [0.025, 0.975])
    of_fold = areas_RF[~np.isnan(areas_RF)]
    drawn = rng.integers(len(of_fold), size=(2000, len(of_fold)))
    of_folds = np.quantile(of_fold[drawn].mean(axis=1), [0.025, 0.975])
    several = len(repeats) > 1
    return {
        "accuracy": round(float(accuracies.mean()), 4),
        "accuracy_sd": round(float(accuracies.std(ddof=1)), 4) if several else None,
        "accuracy_interval": [round(float(each), 4) for each in of_bags],
        "auc": round(float(areas.mean()), 4),
        "auc_sd": round(float(areas.std(ddof=1)), 4) if several else None,
        "auc_interval": [round(float(each), 4) for each in of_folds],
    }


def _right(labels: NDArray[np.int64], folds: Sequence[Fold]) -> NDArray[np.bool_]:
    probabilities = np.full(len(labels), np.nan)
    for fold in folds:
        probabilities[fold.places] = fold.probabilities
    assert not np.isnan(probabilities).any(), "a bag was not judged"
    return (probabilities >= 0.5) == (labels == 1)


def _fold_auc(labels: NDArray[np.int64], fold: Fold) -> float:
    of_fold = labels[fold.places]
    return metrics.auc(of_fold, fold.probabilities) if 0 < of_fold.sum() < len(of_fold) else float("nan")


# ---------------------------------------------------------------------------------------------------- all of it


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="holds the sets, one csv file each")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folds", type=int, default=10)
    parser.add_argument("--methods", nargs="+", default=["dsmil", "abmil"])
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    paths = sorted(arguments.folder.glob("*.csv"))
    if not paths:
        raise SystemExit(f"{arguments.folder.name}: no csv file")
    results: dict[str, dict[str, Any]] = {}
    with ProcessPoolExecutor(arguments.processes, multiprocessing.get_context("spawn")) as pool:
        for path in paths:
            bags = read_set(path)
            labels = np.array([each.label for each in bags])
            num_folds = min(arguments.folds, int(np.bincount(labels, minlength=2).min()))
            instances = sum(len(each.bag) for each in bags)
            told = f"{len(bags)} bags ({labels.sum()} positive), {instances} instances"
            print(f"\n{path.stem}: {told}, {bags[0].bag.dim} dimensions")
            results[path.stem] = {}
            for method in arguments.methods:
                start = time.perf_counter()
                tasks = list(itertools.product(range(arguments.repeats), range(num_folds)))
                running = {pool.submit(run_fold, bags, method, *task, num_folds): task for task in tasks}
                done = {running[each]: each.result() for each in as_completed(running)}
                repeats = [[done[repeat, fold] for fold in range(num_folds)] for repeat in range(arguments.repeats)]
                of_method = summary(labels, repeats)
                of_method["published_accuracy"] = PUBLISHED_ACCURACY.get(method, {}).get(path.stem)
                results[path.stem][method] = of_method
                print_line(method, of_method, time.perf_counter() - start)
    print(json.dumps(results))


def print_line(method: str, found: dict[str, Any], seconds: float) -> None:
    low, high = found["accuracy_interval"]
    published = found["published_accuracy"]
    told = "" if published is None else f"   published {published:.3f}, not verified"
    print(
        f"{method:14} accuracy {found['accuracy']:.3f} (sd {found['accuracy_sd']}, 95 % {low:.3f}-{high:.3f})   "
        f"AUC {found['auc']:.3f} (sd {found['auc_sd']})   {seconds:.0f} s{told}",
        flush=True,
    )


if __name__ == "__main__":
    main()
