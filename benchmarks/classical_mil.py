"""Classical MIL sets (Musk1, Musk2, Elephant and others of that form): repeated 10-fold accuracy and AUC.

    python benchmarks/classical_mil.py FOLDER [--repeats 5] [--folds 10] [--methods dsmil abmil] [--processes 2]

Every FOLDER/*.csv is a set: no header, a row per instance: label of its bag (0 or 1), number of its bag, embedding. One
setting per method serves all sets (`SETTINGS`): a fixed number of epochs, the weights of the last one, no validation.
Bags of a few instances and embeddings that were never trained for the task ask for more than a linear judgement of an
instance, so that DSMIL is taken with its v of linear and ReLU, three critical instances instead of one (the scorer
that picks them is linear all the same), with free attention, and scored by its attention stream as its authors do.

A repeat splits the bags into folds, stratified by label; each fold is judged by a module that was trained, and whose
standardization was fitted, on the other folds alone, at the threshold 0.5. A repeat's accuracy is that over all bags,
its AUC the mean over the folds' (scores of different modules are not compared). Printed are mean and sd over the
repeats and a 95 % bootstrap interval: of the accuracy over the bags, each with the share of repeats that were right, of
the AUC over the folds of all repeats.

Published accuracies are printed as such and were not verified. The public code that goes with DSMIL's
(`train_mil.py` of binli123/dsmil-wsi) chooses on the test folds: of every fold it keeps the best accuracy of all
epochs, each at Youden's threshold for the test bags. To see like beside like, name the method `dsmil:optimistic`: the
same modules, but epoch and threshold of every fold are chosen on its own test bags. Such a row says what that choice is
worth, not how good the method is, and is marked in every line. The last line is JSON: {set: {method: {...}}}.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from selfvitmil import metrics
from selfvitmil.aggregate import Aggregator, build, settings_of
from selfvitmil.aggregate.recipes import Recipe, TrainingOptimizer, learning_rates, recipe_of
from selfvitmil.aggregate.train import BagStore, LabelledBag, draw, score
from selfvitmil.bags import Bag
from selfvitmil.errors import ConfigError
from selfvitmil.settings import TrainSettings

PUBLISHED_ACCURACY = {
    "dsmil": {"musk1": 0.932, "musk2": 0.930, "elephant": 0.925},
    "abmil": {"musk1": 0.892, "musk2": 0.858, "elephant": 0.868},
}
"""As printed by the methods' authors (Li et al. 2021, Ilse et al. 2018; 10-fold, 5 repeats). Not verified."""
CHOOSE_ON_TEST = ("dsmil",)
"""Methods whose public code chooses on the test folds."""
OPTIMISTIC = "optimistic"
SETTINGS: dict[str, dict[str, Any]] = {
    "dsmil": {
        "lr": 5e-3,
        "accumulate": 4,
        "weight_decay": 0.1,
        "instance_dropout": 0.3,
        "max_instances": 64,
        "options": {"v": "linear_relu", "init": "quiet", "top": 3, "evidence": "free", "score": "bag"},
    },
    "abmil": {"lr": 5e-4, "weight_decay": 0.01},
}
"""The same for all sets; what is not said here is the method's default recipe, which is made for slides."""
FOR_ALL = {"epochs": 20, "warmup_epochs": 2, "device": "cpu"}
Floats = NDArray[np.float64]


def read_set(path: Path) -> list[LabelledBag]:
    """The bags of a csv file, in the order of their first rows; SystemExit where the file is not of that form."""
    table = _read_table(path)
    rows_of: dict[float, list[int]] = defaultdict(list)
    for row, name in enumerate(table[:, 1].tolist()):
        rows_of[name].append(row)
    bags = []
    for name, rows in rows_of.items():
        labels = set(table[rows, 0].tolist())
        if len(labels) != 1 or not labels <= {0.0, 1.0}:
            raise SystemExit(f"{path.name}: bag {name:.15g} has labels {sorted(labels)}; each bag needs one, 0 or 1")
        features_ND = table[rows, 2:].astype(np.float32)
        bags.append(LabelledBag(f"{name:.15g}", Bag(f"{name:.15g}", features_ND, None), int(labels.pop())))
    fewest = int(np.bincount([each.label for each in bags], minlength=2).min())
    if fewest < 2:
        raise SystemExit(f"{path.name}: {fewest} bags of one label; two folds need at least two bags of each")
    return bags


def _read_table(path: Path) -> Floats:
    form = "Every row is: label, number of the bag, embedding, all of them numbers; there is no header"
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        table = (
            np.loadtxt(lines, delimiter=",", dtype=np.float64, comments=None, ndmin=2) if lines else np.empty((0, 0))
        )
    except ValueError as error:
        raise SystemExit(f"{path.name}: {error}. {form}") from None
    if table.shape[1] < 3:
        raise SystemExit(f"{path.name}: {len(table)} rows of {table.shape[1]} columns. {form}")
    bad = np.flatnonzero(~(np.abs(table) <= np.finfo(np.float32).max).all(axis=1))
    if len(bad):
        raise SystemExit(f"{path.name}: row {bad[0] + 1} holds what is not a finite number. {form}")
    return table


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
    positive: NDArray[np.bool_]
    """The decisions."""


def epochs_of(method: str, bags: Sequence[LabelledBag], seed: int) -> Iterator[Aggregator]:
    """One module that is trained on these bags, as it is after every one of the fixed number of epochs."""
    settings = TrainSettings.model_validate({"aggregator": method, **SETTINGS.get(method, {}), **FOR_ALL})
    recipe = recipe_of(method, settings).for_dim(bags[0].bag.dim)
    torch.manual_seed(seed)
    rng, store = np.random.default_rng(seed), BagStore("cpu")
    module = build(method, bags[0].bag.dim, 1, **recipe.options, standardize=True)
    module.set_standardization(*store.standardization([each.bag for each in bags]))
    optimizer = TrainingOptimizer(module, recipe, store.device, keep_gradients=False)
    starts = range(0, len(bags), recipe.accumulate)
    schedule = learning_rates(recipe, len(starts))
    for epoch in range(recipe.epochs):
        module.train()
        order = rng.permutation(len(bags)).tolist()
        for step, start in enumerate(starts, epoch * len(starts)):
            together = order[start : start + recipe.accumulate]
            for place in together:
                bag_ND = _some(store.features(bags[place].bag), recipe)
                (module.loss(module(bag_ND), bags[place].label) / len(together)).backward()
            optimizer.set_lr(schedule.value_at(step))
            optimizer.step()
        yield module.eval()


def _some(bag_ND: Tensor, recipe: Recipe) -> Tensor:
    """The instances of a bag that a training step sees."""
    kept = len(bag_ND) - int(recipe.instance_dropout * len(bag_ND))
    kept = min(kept, recipe.max_instances or kept)
    return bag_ND[draw(len(bag_ND), kept, bag_ND.device)] if kept < len(bag_ND) else bag_ND


def run_fold(bags: Sequence[LabelledBag], row: str, repeat: int, fold: int, num_folds: int) -> Fold:
    """Judge the bags of one fold by a module that the others trained; `row` is a method, maybe with `:optimistic`."""
    torch.set_num_threads(1)
    method, _, protocol = row.partition(":")
    labels = np.array([each.label for each in bags])
    fold_of = stratified_parts(labels.tolist(), num_folds, np.random.default_rng(repeat))
    others = [bag for bag, part in zip(bags, fold_of, strict=True) if part != fold]
    places = np.flatnonzero(fold_of == fold)

    def probabilities(module: Aggregator) -> Floats:
        found = score(module, [bags[place].bag for place in places.tolist()])
        return np.array([each.probabilities[0] for each in found])

    epochs = epochs_of(method, others, 1000 * repeat + fold)
    if protocol == OPTIMISTIC:
        return best_on_test(labels[places], places, [probabilities(module) for module in epochs])
    last = probabilities(deque(epochs, maxlen=1).pop())
    return Fold(places, last, last >= 0.5)


def best_on_test(of_fold: NDArray[np.int64], places: NDArray[np.int64], by_epoch: Sequence[Floats]) -> Fold:
    """The fold after the epoch, and at the threshold, that suit its own test bags best: a look at the answers."""
    at_epochs = [Fold(places, each, each >= metrics.youden_threshold(of_fold, each)) for each in by_epoch]
    return max(at_epochs, key=lambda fold: int((fold.positive == (of_fold == 1)).sum()))


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
    # Every repeat scores the same bags again: a bag is one observation, ranked among those of its own fold.
    places = np.concatenate([fold.places for folds in repeats for fold in folds])
    scores = np.concatenate([fold.probabilities for folds in repeats for fold in folds])
    fold_of = np.repeat(np.arange(areas_RF.size), [len(fold.places) for folds in repeats for fold in folds])
    of_folds = metrics.auc_interval(labels[places], scores, groups=places, folds=fold_of)
    several = len(repeats) > 1
    return {
        "accuracy": round(float(accuracies.mean()), 4),
        "accuracy_sd": round(float(accuracies.std(ddof=1)), 4) if several else None,
        "accuracy_interval": [round(float(each), 4) for each in of_bags],
        "auc": round(float(areas.mean()), 4),
        "auc_sd": round(float(areas.std(ddof=1)), 4) if several else None,
        "auc_interval": [round(of_folds.low, 4), round(of_folds.high, 4)],
    }


def _right(labels: NDArray[np.int64], folds: Sequence[Fold]) -> NDArray[np.bool_]:
    places = np.concatenate([fold.places for fold in folds])
    assert np.array_equal(np.sort(places), np.arange(len(labels))), "a bag was not judged, or twice"
    right = np.empty(len(labels), dtype=np.bool_)
    right[places] = np.concatenate([fold.positive for fold in folds]) == (labels[places] == 1)
    return right


def _fold_auc(labels: NDArray[np.int64], fold: Fold) -> float:
    of_fold = labels[fold.places]
    return metrics.auc(of_fold, fold.probabilities) if 0 < of_fold.sum() < len(of_fold) else float("nan")


# ---------------------------------------------------------------------------------------------------- all of it


def main() -> None:
    arguments = _arguments()
    paths = sorted(arguments.folder.glob("*.csv"))
    if not paths:
        raise SystemExit(f"{arguments.folder.resolve().name}: no csv file in it. Give the folder that holds the sets")
    sets = {path.stem: read_set(path) for path in paths}  # all of them before anything is trained
    results: dict[str, dict[str, Any]] = {}
    with ProcessPoolExecutor(arguments.processes, multiprocessing.get_context("spawn")) as pool:
        for name, bags in sets.items():
            labels = np.array([each.label for each in bags])
            num_folds = min(arguments.folds, int(np.bincount(labels, minlength=2).min()))
            instances = sum(len(each.bag) for each in bags)
            told = f"{len(bags)} bags ({labels.sum()} positive), {instances} instances"
            told += f", {bags[0].bag.dim} dimensions; {arguments.repeats} times {num_folds} folds"
            print(f"\n{name}: {told}")
            results[name] = {}
            for row in arguments.methods:
                start = time.perf_counter()
                tasks = list(itertools.product(range(arguments.repeats), range(num_folds)))
                running = {pool.submit(run_fold, bags, row, *task, num_folds): task for task in tasks}
                done = {running[each]: each.result() for each in as_completed(running)}
                repeats = [[done[repeat, fold] for fold in range(num_folds)] for repeat in range(arguments.repeats)]
                method, _, protocol = row.partition(":")
                results[name][row] = {
                    **summary(labels, repeats),
                    "published_accuracy": PUBLISHED_ACCURACY.get(method, {}).get(name),
                    "protocol": protocol or "honest",
                }
                print_line(row, method, results[name][row], time.perf_counter() - start)
    print(json.dumps(results))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="holds the sets, one csv file each")
    parser.add_argument("--repeats", type=_at_least(1), default=5)
    parser.add_argument("--folds", type=_at_least(2), default=10)
    parser.add_argument("--methods", type=_row, nargs="+", default=["dsmil", "abmil"], metavar="METHOD[:optimistic]")
    parser.add_argument("--processes", type=_at_least(1), default=2)
    return parser.parse_args()


def _at_least(low: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < low:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {low}")
        return int(text)

    return number


def _row(text: str) -> str:
    method, colon, protocol = text.partition(":")
    if colon and protocol != OPTIMISTIC:
        raise argparse.ArgumentTypeError(f"{text!r}: only {method}:{OPTIMISTIC} or {method} is known")
    try:
        settings_of(method)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def print_line(row: str, method: str, found: dict[str, Any], seconds: float) -> None:
    low, high = found["accuracy_interval"]
    published = found["published_accuracy"]
    how = ", whose code chooses on test folds" if method in CHOOSE_ON_TEST else ""
    told = "" if published is None else f"   published {published:.3f}{how}, not verified"
    marked = "   OPTIMISTIC: epoch and threshold chosen on the test folds" if found["protocol"] == OPTIMISTIC else ""
    print(
        f"{row:16} accuracy {found['accuracy']:.3f} (sd {found['accuracy_sd']}, 95 % {low:.3f}-{high:.3f})   "
        f"AUC {found['auc']:.3f} (sd {found['auc_sd']})   {seconds:.0f} s{told}{marked}",
        flush=True,
    )


if __name__ == "__main__":
    main()
