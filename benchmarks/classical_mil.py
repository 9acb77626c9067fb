"""Classical MIL sets (Musk1, Musk2, Elephant and others of that form): repeated 10-fold accuracy and AUC.

    python benchmarks/classical_mil.py FOLDER [--repeats 5] [--folds 10] [--methods dsmil abmil] [--processes 2]

Every FOLDER/*.csv is a set: no header, a row per instance: label of its bag (0 or 1), name of its bag, embedding. One
setting serves all sets: the methods' default recipes, except that all bags of a step-sized cohort are seen in whole (no
instance dropout: a bag of two has none to spare).

A repeat splits the bags into folds, stratified by label; each fold is judged once by a module that was trained on the
others. Of those a sixth is held back, stratified, to choose the epoch on; standardization is fitted on the rest alone.
So no bag has any part in what judges it, and the threshold is 0.5 throughout. A repeat's accuracy is that over all
bags, its AUC the mean over the folds' (scores of different modules are not compared). Printed are mean and sd over the
repeats, and a 95 % interval over the bags: for the accuracy by bootstrap of the bags, each with its share of repeats
that were right. Published figures are printed as such; they are not verified, and how their epochs were chosen is not
known to us. The last line is JSON: {set: {method: {...}}}.
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
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from selfvitmil import metrics
from selfvitmil.aggregate.train import LabelledBag, score, train
from selfvitmil.bags import Bag
from selfvitmil.settings import TrainSettings

PUBLISHED_ACCURACY = {"dsmil": {"musk1": 0.932, "musk2": 0.930, "elephant": 0.925}}
"""As printed by the method's authors (10-fold, 5 repeats); not verified."""
SETTINGS = {"instance_dropout": 0.0, "device": "cpu"}
HELD_BACK = 6
"""One in so many training bags chooses the epoch."""
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


def run_fold(bags: Sequence[LabelledBag], method: str, repeat: int, fold: int, num_folds: int) -> Fold:
    torch.set_num_threads(1)
    fold_of = stratified_parts([each.label for each in bags], num_folds, np.random.default_rng(repeat))
    seen = [bag for bag, part in zip(bags, fold_of, strict=True) if part != fold]
    places = np.flatnonzero(fold_of == fold)
    part_of = stratified_parts([each.label for each in seen], HELD_BACK, np.random.default_rng([repeat, fold]))
    kept, held = ([bag for bag, part in zip(seen, part_of, strict=True) if (part == 0) == back] for back in (0, 1))
    settings = TrainSettings.model_validate({"aggregator": method, **SETTINGS})
    trained = train(method, kept, held, 1, settings, seed=1000 * repeat + fold)
    found = score(trained.module, [bags[place].bag for place in places])
    return Fold(places, np.array([each.probabilities[0] for each in found]))


# ---------------------------------------------------------------------------------------------------- judging


def summary(labels: NDArray[np.int64], repeats: Sequence[Sequence[Fold]]) -> dict[str, object]:
    """Accuracy and AUC over the repeats, and an interval of each."""
    right_RB = np.array([_right(labels, folds) for folds in repeats])
    accuracies = right_RB.mean(axis=1)
    areas_RF = np.array([[_fold_auc(labels, fold) for fold in folds] for folds in repeats])
    areas = np.nanmean(areas_RF, axis=1)
    rng = np.random.default_rng(0)
    drawn = rng.integers(len(labels), size=(2000, len(labels)))
    of_bags = np.quantile(right_RB.mean(axis=0)[drawn].mean(axis=1), [0.025, 0.975])
    of_fold = np.nanmean(areas_RF, axis=0)
    drawn = rng.integers(len(of_fold), size=(2000, len(of_fold)))
    of_folds = np.nanquantile(np.nanmean(of_fold[drawn], axis=1), [0.025, 0.975])
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
    results: dict[str, dict[str, object]] = {}
    with ProcessPoolExecutor(arguments.processes, multiprocessing.get_context("spawn")) as pool:
        for path in paths:
            bags = read_set(path)
            labels = np.array([each.label for each in bags])
            num_folds = min(arguments.folds, int(np.bincount(labels, minlength=2).min()))
            instances = sum(len(each.bag) for each in bags)
            print(
                f"\n{path.stem}: {len(bags)} bags ({labels.sum()} positive), {instances} instances, {bags[0].bag.dim} dimensions"
            )
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


def print_line(method: str, found: dict[str, object], seconds: float) -> None:
    low, high = found["accuracy_interval"]  # pyright: ignore[reportGeneralTypeIssues]
    published = found["published_accuracy"]
    told = "" if published is None else f"   published {published:.3f}, not verified"
    print(
        f"{method:14} accuracy {found['accuracy']:.3f} (sd {found['accuracy_sd']}, 95 % {low:.3f}-{high:.3f})   "
        f"AUC {found['auc']:.3f} (sd {found['auc_sd']})   {seconds:.0f} s{told}",
        flush=True,
    )


if __name__ == "__main__":
    main()
