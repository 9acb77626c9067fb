"""Training runs of a method and their stored models: which are up to date and which have to be trained.

A `Training` is all that one model is made from: training slides, the slides that its epoch is chosen on, settings and
seed. It holds nothing of the test slides, so that it may be sent to another process (`make_model`). A model whose
stored hash of recipe, seed, slides, labels and feature files is that of its training is current and used again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from selfvitmil.aggregate import Aggregator
from selfvitmil.aggregate.dsmil import AUTO
from selfvitmil.aggregate.evidence import EvidenceChoice
from selfvitmil.aggregate.recipes import recipe_of
from selfvitmil.aggregate.train import BagStore, LabelledBag, Trained, load_model, save_model
from selfvitmil.aggregate.train import train as train_aggregator
from selfvitmil.bags import Bag
from selfvitmil.errors import SelfVitMilError
from selfvitmil.evaluate.dataset import Case
from selfvitmil.evaluate.evaluation_splits import Trial, TrialSplit
from selfvitmil.settings import TrainSettings
from selfvitmil.store.files import hash_of
from selfvitmil.store.layout import CONFIG_FILE, model_folder
from selfvitmil.store.provenance import (
    MISSING,
    UP_TO_DATE,
    BuildOutcome,
    Change,
    ChangeKind,
    Freshness,
    Provenance,
    compare_digests,
    outcome_of,
    stale,
)

VERSION = 2
"""Of what a training does with its inputs; a higher one makes stored models stale."""

Report = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, eq=False)
class Model:
    """A trained aggregator with epoch, warnings and training time."""

    module: Aggregator
    epoch: int
    outcome: BuildOutcome
    """Up to date where a stored model was used."""
    seconds: float
    """Training time, also of an earlier run."""
    warnings: tuple[str, ...]
    evidence: EvidenceChoice | None
    """Choice of the kind of evidence, where the recipe says `auto`."""


@dataclass(frozen=True, eq=False)
class Training:
    """One training run: a method on one split with one seed, and the folder of its model."""

    name: str
    split: str
    seed: int
    num_classes: int
    settings: TrainSettings
    training: tuple[Case, ...]
    chosen_on: tuple[Case, ...]
    place: Path | None
    """The model's folder; None where it is not stored."""
    about: Mapping[str, Any]
    """Metadata stored with the model."""

    def __str__(self) -> str:
        return f"{self.name}, {self.split}, seed {self.seed}"

    def stored(self) -> Model | Freshness:
        """Return the stored model where it is up to date, else why there is none."""
        if self.place is None or not (self.place / CONFIG_FILE).exists():
            return MISSING
        try:
            module, config = load_model(self.place)
            lines = (self.place / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
            seconds = _seconds(json.loads(line) for line in lines)
            evidence = None if config["evidence"] is None else EvidenceChoice(**config["evidence"])
            freshness = self._freshness(config)
        except (SelfVitMilError, OSError, ValueError, KeyError, TypeError):
            return stale(Change(ChangeKind.DAMAGED_FILE, "stored model"))
        if not freshness.is_up_to_date:
            return freshness
        return Model(module, int(config["epoch"]), UP_TO_DATE, seconds, tuple(config["warnings"]), evidence)

    def _freshness(self, config: Mapping[str, Any]) -> Freshness:
        """Compare hashes; a stale model names the changes that its config reveals, not those of labels and features."""
        stored, now = config.get("made_from"), self.about["made_from"]
        return compare_digests(stored, now, () if stored == now else self._named_changes(config))

    def _named_changes(self, config: Mapping[str, Any]) -> tuple[Change, ...]:
        recipe = asdict(recipe_of(self.name, self.settings).for_dim(int(config["aggregator"]["dim"])))
        stored = dict(config["recipe"])
        if recipe["options"].get("evidence") == AUTO:  # stored is what was chosen
            recipe["options"], stored["options"] = ({**each["options"], "evidence": AUTO} for each in (recipe, stored))
        without = ("source", "departs")
        now, before = (
            Provenance(
                "train",
                VERSION,
                {"recipe": {key: value for key, value in numbers.items() if key not in without}},
                {key: told.get(key) for key in ("classes", "trained_on", "chosen_on")},
            )
            for numbers, told in ((recipe, self.about), (stored, config))
        )
        return now.compare(before).changes

    def make(
        self, freshness: Freshness, bag_of: Callable[[Case], Bag], store: BagStore, report: Report | None
    ) -> Model:
        """Train on labelled training and validation bags only; store the model if it has a folder."""
        trained = self._trained(bag_of, store, report)
        if self.place is not None:
            # An old config must not stay beside new weights if the process is killed in between.
            (self.place / CONFIG_FILE).unlink(missing_ok=True)
            save_model(self.place, trained, dict(self.about))
        seconds = _seconds(trained.history)
        outcome = outcome_of(freshness)
        return Model(trained.module, trained.epoch, outcome, seconds, trained.warnings, trained.evidence)

    def _trained(self, bag_of: Callable[[Case], Bag], store: BagStore, report: Report | None) -> Trained:
        where = {"method": self.name, "split": self.split, "seed": self.seed}
        training, validation = (
            [LabelledBag(case.slide, bag_of(case), case.label, case.patient) for case in part]
            for part in (self.training, self.chosen_on)
        )
        return train_aggregator(
            self.name, training, validation, self.num_classes, self.settings, self.seed,
            store=store, report=None if report is None else partial(_tell, report, where),
        )  # fmt: skip


def trainings_of(
    name: str, trial: Trial, train: TrainSettings, folder: Path | None, splits: Sequence[TrialSplit] | None = None
) -> list[Training]:
    """Return all training runs of a method: every split (or these) with every seed."""
    splits = trial.splits if splits is None else splits
    seeds = range(train.seed, train.seed + train.seeds)
    return [_training(name, trial, train, folder, split, seed) for split in splits for seed in seeds]


def make_model(training: Training) -> None:
    """Train and store one model in a worker process; the `Training` is all it needs."""
    found = training.stored()
    if isinstance(found, Freshness):
        training.make(found, Case.read, BagStore.of(training.settings), None)


def _training(
    name: str, trial: Trial, train: TrainSettings, folder: Path | None, split: TrialSplit, seed: int
) -> Training:
    chosen_on = trial.chosen_on(split)
    about = {
        "made_from": _made_from(name, train, seed, trial.class_names, (split.train, chosen_on)),
        "split": split.name,
        "seed": seed,
        "classes": list(trial.class_names),
        "protocol": trial.evaluate.protocol,
        "epoch_from": trial.where,
        "encoder": trial.encoder,
        "tiling": trial.tiling,
        "trained_on": [case.slide for case in split.train],
        "chosen_on": [case.slide for case in chosen_on],
    }
    place = None if folder is None else model_folder(folder, model_name(split.name, trial.optimistic), seed)
    return Training(name, split.name, seed, trial.num_classes, train, split.train, chosen_on, place, about)


def _made_from(
    name: str, train: TrainSettings, seed: int, class_names: Sequence[str], parts: Sequence[Sequence[Case]]
) -> str:
    """Hash of all that a training depends on: recipe, seed, classes, every slide's patient, label and feature file."""
    resolved = recipe_of(name, train)
    # A field that is seldom set takes no part where it is not, so that models from before it was there stay current.
    without = {"source", "departs"} if resolved.keep_min_lr else {"source", "departs", "keep_min_lr"}
    recipe = {key: value for key, value in asdict(resolved).items() if key not in without}
    slides = [[(case.slide, case.patient, case.label, case.identity) for case in part] for part in parts]
    return hash_of(VERSION, name, recipe, seed, class_names, slides)


def model_name(split: str, optimistic: bool) -> str:
    """Return the folder name of a split's models; each protocol has its own."""
    return f"{split}_optimistic" if optimistic else split


def _tell(report: Report, where: Mapping[str, Any], line: dict[str, Any]) -> None:
    report({**where, **line})


def _seconds(history: Iterable[Mapping[str, Any]]) -> float:
    return sum(float(line["seconds"]) for line in history)
