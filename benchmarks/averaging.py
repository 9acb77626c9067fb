"""What averages and tuning are worth on small cohorts: ensembles of seeds, averaged weights, chosen settings.

    python benchmarks/averaging.py [--methods abmil mean] [--cohorts 6] [--seeds 3] [--slides 40] [--epochs 60]

Cohorts are those of `small_cohorts.py` (kind `relu`). Per cohort and method, AUC on 120 slides that nobody has seen, as
differences from the mean of single seeds: the ensemble of the seeds (mean probability); the mean of their weights,
which start from different random numbers; running averages of the weights over 5 and 15 epochs (train.average_epochs);
and one seed with settings chosen by cross-validation (train.tune). Mean and standard error over cohorts. The last line
is JSON.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from selfvitmil import metrics
from selfvitmil.aggregate import Aggregator
from selfvitmil.aggregate.train import BagStore, LabelledBag, score, train
from selfvitmil.bags import Bag
from selfvitmil.cohort import Cohort, SlideRow, Split
from selfvitmil.evaluate.dataset import BagFile, Case, Cases, hold_out_test_labels
from selfvitmil.evaluate.tuning import tune
from selfvitmil.settings import EvaluateSettings, TrainSettings
from small_cohorts import CENTRE, Slide, made_slides


def bags(slides: Sequence[Slide], part: str) -> list[LabelledBag]:
    return [
        LabelledBag(f"{part}{k}", Bag(f"{part}{k}", slide.features_ND, None), slide.label)
        for k, slide in enumerate(slides)
    ]


def probabilities(module: Aggregator, test: Sequence[LabelledBag]) -> np.ndarray:
    return np.array([each.probabilities[0] for each in score(module, [bag.bag for bag in test])])


def mean_weights(modules: Sequence[Aggregator]) -> Aggregator:
    module = copy.deepcopy(modules[0])
    states = [dict(each.state_dict()) for each in modules]
    module.load_state_dict({name: torch.stack([state[name] for state in states]).mean(0) for name in states[0]})
    return module


def tuned_settings(kept: Sequence[LabelledBag], held: Sequence[LabelledBag], settings: TrainSettings) -> TrainSettings:
    """Choose settings as `train.tune` does, on bags in memory."""
    every = {each.slide: each for each in (*kept, *held)}
    cases = tuple(Case(name, name, Path(name), name, each.label) for name, each in every.items())
    rows = tuple(SlideRow(case.slide, case.path, str(case.label)) for case in cases)
    test = Case("test", "test", Path("test"), "test", 0)
    data = Cases((*cases, test), ("0", "1"), Cohort((*rows, SlideRow("test", Path("test"), "0"))), 0, "", "")
    split = Split("given", tuple(each.slide for each in kept), tuple(each.slide for each in held), ("test",))
    trial, store = hold_out_test_labels(data, [split], EvaluateSettings()), BagStore("cpu")

    def bag_of(case: BagFile) -> Bag:
        return every[case.slide].bag

    name = settings.aggregator
    asked = settings.model_copy(update={"tune": True})
    (found,) = tune([(name, trial, asked, None)], lambda _, todo: [each.score(bag_of, store) for each in todo])
    return found["given"].apply(name, asked)


def one_cohort(method: str, seed: int, given: argparse.Namespace) -> dict[str, float]:
    slides, tests = made_slides(CENTRE._replace(slides=given.slides, dim=given.dim, strength=given.strength), seed)
    every, test = bags(slides, "train"), bags(tests, "test")
    held = [each for k, each in enumerate(every) if k // 2 % 5 == 0]
    kept = [each for k, each in enumerate(every) if k // 2 % 5 != 0]
    labels = [each.label for each in test]
    settings = TrainSettings(aggregator=method, device="cpu", epochs=given.epochs)

    def auc(module: Aggregator) -> float:
        return metrics.auc(labels, probabilities(module, test))

    def trained(settings: TrainSettings, number: int) -> list[Aggregator]:
        return [train(method, kept, held, 1, settings, k).module for k in range(number)]

    plain = trained(settings, given.seeds)
    found = {"single": float(np.mean([auc(each) for each in plain]))}
    found["ensemble"] = metrics.auc(labels, np.mean([probabilities(each, test) for each in plain], axis=0))
    found["mean of weights"] = auc(mean_weights(plain))
    for epochs in (5, 15):
        averaged = trained(settings.model_copy(update={"average_epochs": epochs}), given.seeds)
        found[f"average of {epochs} epochs"] = float(np.mean([auc(each) for each in averaged]))
    found["tuned"] = float(np.mean([auc(each) for each in trained(tuned_settings(kept, held, settings), given.seeds)]))
    return found


def summary(found: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    info: dict[str, Any] = {"single": round(float(np.mean([each["single"] for each in found])), 4)}
    for name in list(found[0])[1:]:
        gains = np.array([each[name] - each["single"] for each in found])
        error = float(gains.std(ddof=1) / np.sqrt(len(gains))) if len(gains) > 1 else None
        info[name] = {"gain": round(float(gains.mean()), 4), "error": None if error is None else round(error, 4)}
    return info


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=["abmil", "mean"])
    parser.add_argument("--cohorts", type=int, default=6)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--slides", type=int, default=40)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--strength", type=float, default=0.6)
    parser.add_argument("--epochs", type=int, default=60)
    given = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, list[dict[str, float]]] = defaultdict(list)
    for seed in range(given.cohorts):
        for method in given.methods:
            start = time.perf_counter()
            results[method].append(one_cohort(method, seed, given))
            shown = ", ".join(f"{name} {value:.3f}" for name, value in results[method][-1].items())
            print(f"{method}, cohort {seed}: {shown} ({time.perf_counter() - start:.0f} s)", flush=True)
    print(json.dumps({method: summary(found) for method, found in results.items()}))


if __name__ == "__main__":
    main()
