"""Training an aggregator on labelled bags, from bags and numbers to a module and its history; and its folder.

One bag a step, the weights of the best validation epoch are kept. Random numbers come from the seed alone: on a CPU
equal seeds give equal bits, whatever ran before in the process. The trainer knows training and validation bags only;
who calls it decides which slides those are.

    recipes.py   with which numbers            steps.py     one training or validation step
    store.py     bags on the device            graphs.py    steps recorded as CUDA graphs
    optim.py     what moves the weights        monitor.py   which epoch is best, what to warn of
    scoring.py   what a module says of bags

T training bags, V validation bags, C classes.
"""

from __future__ import annotations

import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import torch

from selfvitmil.aggregate import model_selection
from selfvitmil.aggregate.bag_store import BagStore, few_threads
from selfvitmil.aggregate.base import Aggregator, build
from selfvitmil.aggregate.cuda_graphs import MAX_GRAPHS, Recorder, Step, own_stream
from selfvitmil.aggregate.dsmil import AUTO
from selfvitmil.aggregate.evidence import SEED, EvidenceChoice, choose_evidence
from selfvitmil.aggregate.optim import Mover, learning_rates
from selfvitmil.aggregate.recipes import Recipe, recipe_of
from selfvitmil.aggregate.scoring import BagScore, score
from selfvitmil.aggregate.steps import Floats, LabelledBag, Slots, Steps
from selfvitmil.errors import ArtefactError, BagError, ConfigError
from selfvitmil.settings import TrainSettings
from selfvitmil.store.files import write_bytes, write_text
from selfvitmil.untrusted import read_json

__all__ = ["BagScore", "BagStore", "LabelledBag", "Trained", "load_model", "save_model", "score", "train"]

MIN_EPOCHS = 4
"""Epochs below which recording the steps costs more than replaying them saves."""
SCHEMA = "selfvitmil.aggregator"
FORMAT_VERSION = 3


@dataclass(frozen=True, eq=False)
class Trained:
    """A trained aggregator and how it came about."""

    module: Aggregator
    """On the CPU, in evaluation mode, with the weights of the chosen epoch."""
    recipe: Recipe
    """As it was followed, for the dimension of these bags; its option `evidence` is the chosen one."""
    epoch: int
    """The chosen one, counted from 1."""
    history: tuple[dict[str, Any], ...]
    """One per epoch: epoch, lr (of its last step), train_loss, val_loss, val_auc, attention_entropy, critical_churn,
    seconds; None where something has no value."""
    warnings: tuple[str, ...]
    evidence: EvidenceChoice | None = None
    """How the kind of evidence was chosen, where the recipe left it open."""


def train(
    name: str,
    training: Sequence[LabelledBag],
    validation: Sequence[LabelledBag],
    num_classes: int,
    settings: TrainSettings,
    seed: int,
    *,
    store: BagStore | None = None,
    report: Callable[[dict[str, Any]], None] | None = None,
) -> Trained:
    """Train the method `name` on the training bags; the epoch is chosen on the validation bags.

    `num_classes` is 1 for two classes, else their number. `store` keeps bags on its device from one training to the
    next; without one, a store for `settings.device` lives as long as this call. `report` is called with each epoch's
    line of the history. Raises ConfigError or BagError where nothing can be learned, naming the slides.
    """
    dim = _check_cohort(training, validation, num_classes)
    recipe = recipe_of(name, settings).for_dim(dim)
    store = store or BagStore.of(settings)
    store.check([each.bag for each in (*training, *validation)])
    recipe, choice = _with_evidence(recipe, [*training, *validation], num_classes, store)
    with _surroundings(seed, [*training, *validation], store.device):
        module = build(name, dim, num_classes, **recipe.module_options)
        if recipe.standardize:
            module.set_standardization(*store.standardization([each.bag for each in training]))
        module.to(store.device)
        run = _Run(module, recipe, store, training, validation, seed)
        for line in run.epochs():
            if report is not None:
                report(line)
        module.load_state_dict(run.best_weights)
        module.zero_grad()
        module.cpu().eval()
    doubts = (
        [] if recipe.options.get("evidence") == "average" else model_selection.doubts(run.history[run.best_epoch - 1])
    )
    return Trained(module, recipe, run.best_epoch, tuple(run.history), (*run.warnings, *doubts), choice)


def _with_evidence(
    recipe: Recipe, bags: Sequence[LabelledBag], num_classes: int, store: BagStore
) -> tuple[Recipe, EvidenceChoice | None]:
    """The recipe with a kind of evidence where it leaves that open; the store remembers the choice."""
    if recipe.options.get("evidence") != AUTO:
        return recipe, None
    key = (num_classes, recipe.epochs, tuple((each.patient, each.label, each.bag) for each in bags))
    if key not in store.evidence_choices:
        with _surroundings(SEED, bags, store.device):
            store.evidence_choices[key] = choose_evidence(bags, num_classes, recipe, store)
    choice = store.evidence_choices[key]
    return replace(recipe, options={**recipe.options, "evidence": choice.evidence}), choice


# ---------------------------------------------------------------------------------------------------- at the door


def _check_cohort(training: Sequence[LabelledBag], validation: Sequence[LabelledBag], num_classes: int) -> int:
    """The dimension of all bags; ConfigError or BagError where they cannot be learned from together."""
    if not validation:
        why = "the epoch is chosen on them"
        raise ConfigError("no validation bags", why, "Keep some slides for validation (train.validation)")
    if not training:
        raise ConfigError("no training bags", "there is nothing to learn from")
    twice = sorted({each.slide for each in training} & {each.slide for each in validation})
    if twice:
        why = "a slide that is learned by heart judges nothing"
        raise ConfigError(f"{_listed(twice)} both in training and in validation", why, "Split anew, by patient")
    for each in (*training, *validation):
        if not 0 <= each.label < max(num_classes, 2) or each.label != int(each.label):
            why = f"classes are numbered from 0 to {max(num_classes, 2) - 1}"
            raise ConfigError(f"{each.slide}: label {each.label!r}", why)
    present = sorted({each.label for each in training})
    if len(present) == 1:
        why = f"all {len(training)} training slides are of class {present[0]}"
        raise ConfigError("one class only in training", why, "Add training slides of another class, or split anew")
    slides_of: dict[int, list[str]] = defaultdict(list)
    for each in (*training, *validation):
        slides_of[each.bag.dim].append(each.slide)
    if len(slides_of) > 1:
        why = "; ".join(f"{dim} in {_listed(slides)}" for dim, slides in sorted(slides_of.items()))
        raise BagError("vectors of several dimensions", why, "Embed all slides with one encoder")
    return training[0].bag.dim


def _listed(names: Sequence[str], most: int = 5) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


@contextmanager
def _surroundings(seed: int, bags: Sequence[LabelledBag], device: torch.device) -> Iterator[None]:
    """What a training runs in: a stream, random numbers and a number of threads of its own."""
    of_bags = partial(few_threads, [each.bag for each in bags])
    with ExitStack() as stack:
        for context in (own_stream, _fast_products, partial(_own_randomness, seed), of_bags):
            stack.enter_context(context(device))
        yield


@contextmanager
def _own_randomness(seed: int, device: torch.device) -> Iterator[None]:
    """Random numbers that depend on the seed alone; the caller's go on afterwards as if nothing had happened."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield


@contextmanager
def _fast_products(device: torch.device) -> Iterator[None]:
    """Float32 products in TF32 on a GPU: it holds float16 embeddings exactly and rounds the weights to as many bits."""
    before = torch.get_float32_matmul_precision()
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


# ---------------------------------------------------------------------------------------------------- epochs


class _Run:
    """One training: its epochs, its history, its best weights."""

    def __init__(
        self,
        module: Aggregator,
        recipe: Recipe,
        store: BagStore,
        training: Sequence[LabelledBag],
        validation: Sequence[LabelledBag],
        seed: int,
    ):
        self.history: list[dict[str, Any]] = []
        self.warnings: list[str] = []
        self.best_epoch = 0
        self.best_weights = {name: value.clone() for name, value in module.state_dict().items()}
        self._module = module
        self._recipe = recipe
        self._store = store
        self._seed = seed
        self._steps = Steps(module, recipe, store, training, validation)
        self._mover = Mover(module, recipe, store.device, keep_gradients=recipe.accumulate > 1)
        self._steps_per_epoch = math.ceil(len(training) / recipe.accumulate)
        self._schedule = learning_rates(recipe, self._steps_per_epoch)
        wanted, labels = recipe.monitor, self._steps.validation.labels
        self._monitor, warning = model_selection.choose_monitor(wanted, labels, module.num_classes)
        self.warnings += [warning] if warning else []
        absent = sorted(set(range(module.num_classes)) - {each.label for each in training})
        if module.num_classes > 1 and absent:
            listed = ", ".join(map(str, absent))
            self.warnings.append(f"no training slide of class {listed}: it cannot be learned. Add some, or split anew")
        self._best_worth = -math.inf
        self._learn, self._move = self._learning_steps()
        self._judge: list[Step] = [partial(self._steps.validate, place) for place in range(len(validation))]

    def epochs(self) -> Iterator[dict[str, Any]]:
        """Train; yields each epoch's line of the history."""
        for epoch in range(1, self._recipe.epochs + 1):
            start = time.perf_counter()
            lr = self._train_epoch(epoch)
            self._validate()
            line = self._line(epoch, lr)
            if epoch == 1 and self._can_be_recorded():
                self._record()
            line["seconds"] = round(time.perf_counter() - start, 4)
            self.history.append(line)
            yield line
            waited = epoch - self.best_epoch
            if 0 < self._recipe.patience <= waited and epoch >= self._recipe.min_epochs:
                return

    def _learning_steps(self) -> tuple[list[Step], Step]:
        """What is done for each training bag, and what after `accumulate` of them."""
        places = range(len(self._steps.training.bags))
        if self._recipe.accumulate > 1:
            return [partial(self._steps.learn, place) for place in places], self._mover.step

        def learn_and_move(place: int) -> None:
            self._steps.learn(place)
            self._mover.step()

        return [partial(learn_and_move, place) for place in places], _nothing

    def _can_be_recorded(self) -> bool:
        """Whether the steps of the epochs to come can be CUDA graphs, and will be repeated often enough to be."""
        bags = [each.bag for each in (*self._steps.training.bags, *self._steps.validation.bags)]
        few = len(bags) <= MAX_GRAPHS and self._recipe.epochs >= MIN_EPOCHS
        on_gpu = self._store.device.type == "cuda"
        return on_gpu and few and not self._module.waits_for_device and self._store.holds(bags)

    def _record(self) -> None:
        """From now on steps are replayed; where that cannot be, they go on as before."""
        recorder = Recorder()
        try:
            self._module.train()
            learn = recorder.record(self._learn)
            move = recorder.record([self._move])[0] if self._recipe.accumulate > 1 else self._move
            self._module.eval()
            judge = recorder.record(self._judge)
        except RuntimeError as error:
            self._mover.clear()
            reason = str(error).splitlines()[0]
            self.warnings.append(f"training ran slower than it could: its steps make no CUDA graphs ({reason})")
            return
        self._learn, self._move, self._judge = learn, move, judge

    def _train_epoch(self, epoch: int) -> float:
        """All training bags once, in an order that seed and epoch decide; the learning rate of the last step."""
        self._module.train()
        bags, accumulate, lr = self._steps.training.bags, self._recipe.accumulate, 0.0
        order = self._order(epoch)
        for number, start in enumerate(range(0, len(order), accumulate)):
            together = order[start : start + accumulate]
            lr = self._schedule.value_at((epoch - 1) * self._steps_per_epoch + number)
            self._mover.set_lr(lr)
            if accumulate > 1:
                self._steps.share.fill_(1 / len(together))
            for offset, place in enumerate(together, start + 1):
                if offset < len(order):
                    self._store.prefetch(bags[order[offset]].bag)
                self._learn[place]()
            self._move()
            self._mover.settle()
        return lr

    def _order(self, epoch: int) -> list[int]:
        return np.random.default_rng((self._seed, epoch)).permutation(len(self._steps.training.bags)).tolist()

    def _validate(self) -> None:
        self._module.eval()
        bags = self._steps.validation.bags
        for judge, following in zip(self._judge, [*bags[1:], None], strict=True):
            if following is not None:
                self._store.prefetch(following.bag)
            judge()

    def _line(self, epoch: int, lr: float) -> dict[str, Any]:
        """The epoch's line; keeps the weights where they are the best so far."""
        training, validation, num_classes = self._steps.training, self._steps.validation, self._module.num_classes
        losses, judged, labels = training.fetch_losses(), validation.fetch(), validation.labels
        _check_losses(epoch, training, losses, self._order(epoch))
        _check_losses(epoch, validation, judged.losses, range(len(validation.bags)))
        val_loss = float(np.average(judged.losses, weights=validation.weights_of_bags))
        worth = model_selection.worth(self._monitor, labels, judged.probabilities, val_loss)
        if worth > self._best_worth:  # of equals the earliest
            self._best_worth, self.best_epoch = worth, epoch
            for name, weight in self._module.state_dict().items():
                self.best_weights[name].copy_(weight)
        sizes = np.array([len(each.bag) for each in validation.bags])
        return {
            "epoch": epoch,
            "lr": lr,
            "train_loss": float((losses * training.weights_of_bags).mean()),
            "val_loss": val_loss,
            "val_auc": model_selection.auc(labels, judged.probabilities),
            "attention_entropy": model_selection.mean_entropy(labels, judged.entropies, num_classes),
            "critical_churn": model_selection.churn(labels, judged.fallen, sizes, num_classes) if epoch > 1 else None,
        }


def _nothing() -> None:
    """The move of a step that has moved already."""


def _check_losses(epoch: int, slots: Slots, losses: Floats, order: Iterable[int]) -> None:
    """ConfigError, naming the first bag in `order` whose loss is not a number: the weights are past saving."""
    if not np.isfinite(losses).all():
        first = next(slots.bags[place].slide for place in order if not math.isfinite(losses[place]))
        why = "the weights have run away"
        how = "Lower train.lr, or set train.clip_grad 1 or train.standardize true"
        raise ConfigError(f"{first}: the loss is not a finite number in epoch {epoch}", why, how)


# ---------------------------------------------------------------------------------------------------- the folder


def save_model(folder: Path, trained: Trained, told: Mapping[str, Any]) -> None:
    """Write model.safetensors, config.json and metrics.jsonl into `folder`, each whole or not at all.

    `told` is what the caller knows beyond the training (classes, encoder, split ...): plain values, no absolute path,
    no time; they stand in config.json beside `aggregator` (arguments of `build`), `recipe`, `epoch` and `warnings`.
    """
    known = {
        "schema": SCHEMA,
        "format_version": FORMAT_VERSION,
        "aggregator": trained.module.config,
        "recipe": asdict(trained.recipe),
        "epoch": trained.epoch,
        "warnings": trained.warnings,
        "evidence": None if trained.evidence is None else asdict(trained.evidence),
    }
    clash = sorted(set(known) & set(told))
    assert not clash, f"told overrules {clash}"
    lines = [json.dumps(line, sort_keys=True) for line in trained.history]
    write_text(folder / "metrics.jsonl", "".join(f"{line}\n" for line in lines))
    weights = {name: value.contiguous() for name, value in trained.module.state_dict().items()}
    write_bytes(folder / "model.safetensors", safetensors.torch.save(weights, metadata={"format": "pt"}))
    # Last, so that a folder with a config is a whole one.
    config = json.dumps({**told, **known}, indent=2, sort_keys=True, ensure_ascii=False)
    write_text(folder / "config.json", config + "\n")


def load_model(folder: Path) -> tuple[Aggregator, dict[str, Any]]:
    """The aggregator of such a folder, on the CPU, ready to judge, and its config; ArtefactError where it is broken."""
    how = "Train it again"
    try:
        config = read_json(folder / "config.json")
        if config["format_version"] != FORMAT_VERSION:
            why = f"its format is version {config['format_version']}, this program reads {FORMAT_VERSION}"
            raise ArtefactError(f"{folder.name}: an aggregator of another time", why, how)
        state = safetensors.torch.load_file(folder / "model.safetensors")
        with torch.device("meta"):  # without memory: the config may claim any size
            expected = build(**config["aggregator"]).state_dict()
        if {name: value.shape for name, value in expected.items()} != {
            name: value.shape for name, value in state.items()
        }:
            raise ValueError("config.json describes another network than model.safetensors holds")
        module = build(**config["aggregator"])
        module.load_state_dict(state)
    except FileNotFoundError as error:
        why = f"it has no {Path(str(error.filename or 'model.safetensors')).name}"
        raise ArtefactError(f"{folder.name}: no trained aggregator", why, how) from None
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, ConfigError, safetensors.SafetensorError) as error:
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise ArtefactError(f"{folder.name}: the aggregator cannot be read", why, how) from None
    return module.eval(), config
