"""Train an aggregator on labelled bags; save and load its folder.

One bag per step; the weights of the best validation epoch are kept. Random numbers depend on the seed alone: on a CPU
equal seeds give bit-identical weights, whatever ran before in the process. The trainer sees training and validation
bags only; the caller decides which slides those are. `recipes.py` has the hyperparameters, `selection.py` chooses the
epoch, `base.py` has inference.

Training step and validation step (`Steps`) are functions of the bag's index. They read and write tensors at fixed
addresses (weights, gradients, targets, one entry per bag for losses and scores) and exchange no values with the host,
so that on a GPU each can be captured as a CUDA graph and replayed: a replay costs one launch instead of a hundred.
Every bag has its own graph: its features stay at one address, so nothing is padded or copied. All graphs share one
memory pool, in which no step leaves data behind, so they may be replayed in any order. One step of each kind must have
run before, on the same stream, so that libraries are initialized and optimizers have their state; then all are
captured, which computes nothing, and the first epoch goes on with replays. A step that synchronizes with the device
(`Aggregator.waits_for_device`) cannot be captured.

T training bags, V validation bags, N instances, D dimensions, C classes.
"""

from __future__ import annotations

import copy
import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.overrides import TorchFunctionMode

from selfvitmil.aggregate import selection
from selfvitmil.aggregate.bag_tensors import BagStore, LabelledBag, draw
from selfvitmil.aggregate.base import Aggregator, AggregatorOutput, BagScore, build, score, summarize_output
from selfvitmil.aggregate.dsmil import AUTO
from selfvitmil.aggregate.graphs import Queued, Recorder, Step, Surroundings, can_capture, surrounded
from selfvitmil.aggregate.recipes import Recipe, TrainingOptimizer, learning_rates, recipe_of
from selfvitmil.aggregate.selection import SEED, EvidenceChoice, choose_evidence
from selfvitmil.bags import Bag
from selfvitmil.cohort.table import listing
from selfvitmil.errors import ArtefactError, BagError, ConfigError
from selfvitmil.outcomes import Outcome
from selfvitmil.runtime.device import synchronize
from selfvitmil.settings import TrainSettings
from selfvitmil.store.files import read_json, write_bytes, write_text

__all__ = ["BagScore", "BagStore", "LabelledBag", "Trained", "load_model", "save_model", "score", "train"]

SCHEMA = "selfvitmil.aggregator"
FORMAT_VERSION = 3


@dataclass(frozen=True, eq=False)
class Trained:
    """A trained aggregator with its recipe and history."""

    module: Aggregator
    """On the CPU, in evaluation mode, with the weights of the chosen epoch."""
    recipe: Recipe
    """Recipe as used, for the dimension of these bags; its option `evidence` is the chosen one."""
    epoch: int
    """Chosen epoch, counted from 1."""
    history: tuple[dict[str, Any], ...]
    """One entry per epoch: epoch, lr (of its last step), train_loss, val_loss, val_auc, attention_entropy,
    critical_churn, seconds; None where a value is undefined."""
    warnings: tuple[str, ...]
    evidence: EvidenceChoice | None = None
    """Choice of the kind of evidence, where the recipe says `auto`."""


def train(
    name: str,
    training: Sequence[LabelledBag],
    validation: Sequence[LabelledBag],
    num_classes: int,
    settings: TrainSettings,
    seed: int,
    *,
    outcome: Outcome | None = None,
    store: BagStore | None = None,
    evidence: EvidenceChoice | None = None,
    report: Callable[[dict[str, Any]], None] | None = None,
) -> Trained:
    """Train the method `name` on the training bags; the epoch is chosen on the validation bags.

    `num_classes` is 1 for two classes, else their number; `outcome` is another one than classes. `store` keeps bags on
    its device between training runs; without one, a store for `settings.device` lives as long as this call. `evidence`
    is the choice of the kind of evidence where it is known. `report` is called with each epoch's history line. Raises
    ConfigError or BagError for bags that cannot be trained on, naming the slides.
    """
    given = (training, validation, num_classes, settings)
    of_epoch = None if report is None else lambda _, line: report(line)
    found = train_seeds(name, *given, [seed], outcome=outcome, store=store, evidence=evidence, report=of_epoch)
    (trained,) = (each for each in found if not isinstance(each, Queued))
    return trained


def train_seeds(
    name: str,
    training: Sequence[LabelledBag],
    validation: Sequence[LabelledBag],
    num_classes: int,
    settings: TrainSettings,
    seeds: Iterable[int],
    *,
    outcome: Outcome | None = None,
    store: BagStore | None = None,
    evidence: EvidenceChoice | None = None,
    report: Callable[[int, dict[str, Any]], None] | None = None,
) -> Iterator[Trained | Queued]:
    """Train with one seed after the other, as `train` does; yield each result, and `Queued` while the device works.

    Between two values other trainings may run (`in_turns`). Network, optimizer and captured steps are those of the
    first seed, set back to the start for every other one. Each seed is asked for when its training begins.
    """
    dim = _check_cohort(training, validation, num_classes, outcome)
    recipe = recipe_of(name, settings).for_dim(dim)
    if outcome is not None:
        outcome = outcome.fitted([each.label for each in training])
        recipe = _with_risk_sets(recipe, outcome, settings, len(training))
    store = store or BagStore.of(settings)
    bags = [*training, *validation]
    store.check([each.bag for each in bags])
    recipe, choice = _with_evidence(recipe, bags, num_classes, store, outcome, evidence)
    synchronize(store.device)  # bags may have come on another stream
    surroundings = Surroundings(bags, store.device)

    def prepared(seed: int) -> Aggregator:
        surroundings.seed(seed)
        module = build(name, dim, num_classes, **recipe.module_options)
        if outcome is not None:
            module.predict(outcome)
        if recipe.standardize:
            module.set_standardization(*store.standardization([each.bag for each in training]))
        return module

    def epochs() -> Iterator[Trained | None]:
        run: _Run | None = None
        for seed in seeds:
            module = prepared(seed)
            if run is None:
                run = _Run(copy.deepcopy(module).to(store.device), recipe, store, training, validation, seed)
            else:
                run.restart(module, seed)
            for line in run.epochs():
                if line is None:
                    yield None
                elif report is not None:
                    report(seed, line)
            yield run.result(module, choice)

    yield from surrounded(surroundings, epochs())


RISK_SET = 32
"""Usual number of bags in an optimizer step whose loss compares slides with each other."""


def _with_risk_sets(recipe: Recipe, outcome: Outcome, settings: TrainSettings, num_bags: int) -> Recipe:
    """Return the recipe with as many bags in each step as the loss needs, in steps of about equal size.

    Such a loss is a mean over many comparisons, and an epoch has few steps, so the learning rate grows with the square
    root of the number of bags, unless it is set.
    """
    if not outcome.needs_batch:
        return recipe
    accumulate = settings.accumulate or math.ceil(num_bags / max(1, round(num_bags / RISK_SET)))
    if accumulate < 2:
        raise ConfigError(
            f"train.accumulate {accumulate} with the outcome {outcome.kind}",
            "its loss compares the slides of one step with each other",
            "Leave it out, or set 16 or more",
            code="too-few-bags-per-step",
        )
    factor = math.sqrt(accumulate) if settings.lr is None else 1.0
    min_lr = recipe.min_lr * (factor if settings.min_lr is None else 1.0)
    return replace(recipe, accumulate=accumulate, lr=recipe.lr * factor, min_lr=min_lr)


def choice_numbers(recipe: Recipe) -> tuple[Any, ...]:
    """Return what the choice of the kind of evidence depends on, beside the bags."""
    return tuple(getattr(recipe, each.name) for each in fields(recipe) if each.name not in _NOT_OF_CHOICE)


_NOT_OF_CHOICE = ("options", "source", "departs", "average_epochs")
"""Fields of a recipe that the choice of the kind of evidence does not depend on."""


def _with_evidence(
    recipe: Recipe,
    bags: Sequence[LabelledBag],
    num_classes: int,
    store: BagStore,
    outcome: Outcome | None = None,
    known: EvidenceChoice | None = None,
) -> tuple[Recipe, EvidenceChoice | None]:
    """Return the recipe with `evidence` resolved where it is `auto`; the store caches a choice that is not `known`.

    With another outcome than classes, slides with the higher half of the targets stand for the positive class.
    """
    if recipe.options.get("evidence") != AUTO:
        return recipe, None
    if outcome is not None:
        halves = zip(bags, outcome.is_high([each.label for each in bags]), strict=True)
        bags = [replace(each, label=high) for each, high in halves]
        plain = replace(recipe, accumulate=1)
        found, choice = _with_evidence(plain, bags, 1, store, known=known)
        kind = str(found.options["evidence"])
        if num_classes > 1 and kind in ("positive", "negative"):
            kind = "free"
        chosen = None if choice is None else replace(choice, evidence=kind)
        return replace(recipe, options={**recipe.options, "evidence": kind}), chosen
    if known is not None:
        return replace(recipe, options={**recipe.options, "evidence": known.evidence}), known
    key = (num_classes, choice_numbers(recipe), tuple((each.patient, each.label, each.bag) for each in bags))
    if key not in store.evidence_choices:
        surroundings = Surroundings(bags, store.device)
        with surroundings():
            surroundings.seed(SEED)
            store.evidence_choices[key] = choose_evidence(bags, num_classes, recipe, store)
        synchronize(store.device)
    choice = store.evidence_choices[key]
    return replace(recipe, options={**recipe.options, "evidence": choice.evidence}), choice


# ---------------------------------------------------------------------------------------------------- input checks


def _check_cohort(
    training: Sequence[LabelledBag],
    validation: Sequence[LabelledBag],
    num_classes: int,
    outcome: Outcome | None = None,
) -> int:
    """Return the feature dimension of all bags; raise ConfigError or BagError where they cannot be used together."""
    if not validation:
        why = "the epoch is chosen on them"
        raise ConfigError(
            "no validation bags", why, "Keep some slides for validation (train.validation)", code="no-validation-bags"
        )
    if not training:
        raise ConfigError("no training bags", code="no-training-bags")
    twice = sorted({each.slide for each in training} & {each.slide for each in validation})
    if twice:
        why = "validation on training slides would hide overfitting"
        raise ConfigError(
            f"{listing(twice, 5)} both in training and in validation",
            why,
            "Split again, by patient",
            code="slide-in-several-splits",
        )
    if outcome is not None:
        outcome.check_training("training", [each.label for each in training])
        return _common_dim([*training, *validation])
    for each in (*training, *validation):
        if not 0 <= each.label < max(num_classes, 2) or each.label != int(each.label):
            why = f"classes are numbered from 0 to {max(num_classes, 2) - 1}"
            raise ConfigError(f"{each.slide}: label {each.label!r}", why, code="invalid-label")
    present = sorted({each.label for each in training})
    if len(present) == 1:
        why = f"all {len(training)} training slides are of class {present[0]}"
        raise ConfigError(
            "one class only in training", why, "Add training slides of another class, or split again", code="one-class"
        )
    return _common_dim([*training, *validation])


def _common_dim(bags: Sequence[LabelledBag]) -> int:
    """Return the feature dimension of all bags; BagError where there are several."""
    slides_of: dict[int, list[str]] = defaultdict(list)
    for each in bags:
        slides_of[each.bag.dim].append(each.slide)
    if len(slides_of) > 1:
        why = "; ".join(f"{dim} in {listing(slides, 5)}" for dim, slides in sorted(slides_of.items()))
        raise BagError(
            "embeddings of several dimensions", why, "Embed all slides with one encoder", code="mixed-embeddings"
        )
    return bags[0].bag.dim


# ---------------------------------------------------------------------------------------------------- epochs


class _Run:
    """One training run: epochs, history and best weights."""

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
        self.best_epoch = 0
        self.best_weights = {name: value.clone() for name, value in module.state_dict().items()}
        self._warnings: list[str] = []
        self._module = module
        self._recipe = recipe
        self._store = store
        self._seed = seed
        self._steps = Steps(module, recipe, store, training, validation)
        self._optimizer = TrainingOptimizer(module, recipe, store.device, keep_gradients=recipe.accumulate > 1)
        self._steps_per_epoch = math.ceil(len(training) / recipe.accumulate)
        self._schedule = learning_rates(recipe, self._steps_per_epoch)
        self._monitor = recipe.monitor
        if module.outcome is None:
            wanted, labels = recipe.monitor, self._steps.validation.labels
            self._monitor, warning = selection.choose_monitor(wanted, labels, module.num_classes)
            self._warnings += [warning] if warning else []
        absent = sorted(set(range(module.num_classes)) - {each.label for each in training})
        if module.outcome is None and module.num_classes > 1 and absent:
            listed = ", ".join(map(str, absent))
            self._warnings.append(
                f"no training slide of class {listed}: it cannot be learned. Add some, or split again"
            )
        self._best_criterion = -math.inf
        averaged = module.parameters() if recipe.average_epochs else ()
        self._average = [each.detach().clone() for each in averaged]
        self._captured = False
        self._train_steps, self._update = self._make_train_steps()
        self._validation_steps: list[Step] = [
            partial(self._steps.validation_step, index) for index in range(len(validation))
        ]

    def restart(self, module: Aggregator, seed: int) -> None:
        """Begin anew from the weights of `module`, on the same tensors."""
        self.history, self.best_epoch, self._best_criterion = [], 0, -math.inf
        self._seed = seed
        start = module.state_dict()
        with torch.no_grad():
            for name, value in self._module.state_dict().items():
                value.copy_(start[name])
                self.best_weights[name].copy_(value)
        self._optimizer.restart()
        self._steps.validation.restart()

    def epochs(self) -> Iterator[dict[str, Any] | None]:
        """Train; yield None when an epoch is queued on the device, then its history line."""
        for epoch in range(1, self._recipe.epochs + 1):
            start = time.perf_counter()
            lr = self._train_epoch(epoch)
            self._average_weights(epoch)
            self._validate()
            seconds = time.perf_counter() - start
            yield None
            start = time.perf_counter()
            line = self._line(epoch, lr)
            self._swap_average()
            line["seconds"] = round(seconds + time.perf_counter() - start, 4)
            self.history.append(line)
            yield line
            waited = epoch - self.best_epoch
            if 0 < self._recipe.patience <= waited and epoch >= self._recipe.min_epochs:
                return

    def result(self, module: Aggregator, evidence: EvidenceChoice | None) -> Trained:
        """Return what was learned; `module` gets the best weights."""
        module.load_state_dict(self.best_weights)
        warnings = list(self._warnings)
        if self._recipe.options.get("evidence") != "average":
            warnings += selection.attention_warnings(self.history[self.best_epoch - 1])
        history = tuple(self.history)
        return Trained(module.eval(), self._recipe, self.best_epoch, history, tuple(warnings), evidence)

    def _make_train_steps(self) -> tuple[list[Step], Step]:
        """Return the step of each training bag, and the optimizer step after `accumulate` bags."""
        indices = range(len(self._steps.training.bags))
        if self._recipe.accumulate > 1:
            return [partial(self._steps.train_step, index) for index in indices], self._optimizer.step

        def train_and_update(index: int) -> None:
            self._steps.train_step(index)
            self._optimizer.step()

        return [partial(train_and_update, index) for index in indices], _no_update

    def _can_capture(self) -> bool:
        """Whether the steps can be captured as CUDA graphs and will be repeated often enough."""
        bags = [*self._steps.training.bags, *self._steps.validation.bags]
        one_by_one = not self._steps.together and not self._module.waits_for_device
        return one_by_one and can_capture(bags, len(bags), self._recipe.epochs, self._store)

    def _capture(self) -> None:
        """Replace the steps by replays of CUDA graphs; where capture fails, keep them and warn."""
        self._captured = True
        for each in (*self._steps.training.bags, *self._steps.validation.bags):
            self._steps.inputs(each.bag)  # uploads what is not there yet
        self._module.eval()
        self._validation_steps[0]()  # what it stores, the epoch's validation stores anew
        recorder = Recorder()
        try:
            validation_steps = recorder.record(self._validation_steps)
            self._module.train()
            train_steps = recorder.record(self._train_steps)
            update = recorder.record([self._update])[0] if self._recipe.accumulate > 1 else self._update
        except RuntimeError as error:
            self._optimizer.zero_grad()
            reason = str(error).splitlines()[0]
            self._warnings.append(f"training ran without CUDA graphs and is slower ({reason})")
            return
        finally:
            self._module.train()
        self._train_steps, self._update, self._validation_steps = train_steps, update, validation_steps

    def _train_epoch(self, epoch: int) -> float:
        """Train on all bags once, in an order given by seed and epoch; return the last step's learning rate."""
        self._module.train()
        bags, accumulate, lr = self._steps.training.bags, self._recipe.accumulate, 0.0
        order = self._order(epoch)
        for number, start in enumerate(range(0, len(order), accumulate)):
            together = order[start : start + accumulate]
            lr = self._schedule.value_at((epoch - 1) * self._steps_per_epoch + number)
            self._optimizer.set_lr(lr)
            if accumulate > 1:
                self._steps.share.fill_(1 / len(together))
            if self._steps.together:
                self._steps.train_together(together)
            for offset, index in enumerate(() if self._steps.together else together, start + 1):
                if offset < len(order):
                    self._store.prefetch(bags[order[offset]].bag)
                self._train_steps[index]()
            self._update()
            self._optimizer.after_step()
            if number == 0 and not self._captured and self._can_capture():
                self._capture()
        return lr

    @torch.no_grad()
    def _average_weights(self, epoch: int) -> None:
        """Update the running average of the weights and put it in their place, where the recipe asks for one."""
        if not self._average:
            return
        share = 1 / min(epoch, self._recipe.average_epochs)
        for average, weight in zip(self._average, self._module.parameters(), strict=True):
            average.lerp_(weight, share)
        self._swap_average()

    @torch.no_grad()
    def _swap_average(self) -> None:
        """Exchange weights and average in place: captured steps go on with the same tensors."""
        for average, weight in zip(self._average, self._module.parameters(), strict=False):
            kept = weight.clone()
            weight.copy_(average)
            average.copy_(kept)

    def _order(self, epoch: int) -> list[int]:
        return np.random.default_rng((self._seed, epoch)).permutation(len(self._steps.training.bags)).tolist()

    def _validate(self) -> None:
        self._module.eval()
        bags = self._steps.validation.bags
        for step, following in zip(self._validation_steps, [*bags[1:], None], strict=True):
            if following is not None:
                self._store.prefetch(following.bag)
            step()

    def _line(self, epoch: int, lr: float) -> dict[str, Any]:
        """Return the epoch's history line; keep the weights if they are the best so far."""
        training, validation, num_classes = self._steps.training, self._steps.validation, self._module.num_classes
        losses, results, labels = training.fetch_losses(), validation.fetch(), validation.labels
        _check_losses(epoch, training, losses, self._order(epoch))
        _check_losses(epoch, validation, results.losses, range(len(validation.bags)))
        outcome = self._module.outcome
        if outcome is None:
            val_loss = float(np.average(results.losses, weights=validation.weights_of_bags))
            criterion = selection.criterion(self._monitor, labels, results.probabilities, val_loss)
            metric = selection.auc(labels, results.probabilities)
        else:
            targets = [each.label for each in validation.bags]
            val_loss = self._steps.validation_loss(results)
            metric = outcome.validation_metric(targets, results.probabilities)
            sign = 1.0 if outcome.higher_is_better else -1.0
            criterion = -val_loss if self._monitor == "loss" or metric is None else sign * metric
        if criterion > self._best_criterion:  # the earliest epoch among ties
            self._best_criterion, self.best_epoch = criterion, epoch
            for name, weight in self._module.state_dict().items():
                self.best_weights[name].copy_(weight)
        sizes = np.array([len(each.bag) for each in validation.bags])
        return {
            "epoch": epoch,
            "lr": lr,
            "train_loss": float((losses * training.weights_of_bags).mean()),
            "val_loss": val_loss,
            "val_auc": metric if outcome is None else None,
            **({} if outcome is None else {f"val_{outcome.primary}": metric}),
            "attention_entropy": selection.mean_entropy(labels, results.entropies, num_classes),
            "critical_churn": selection.churn(labels, results.overtaken, sizes, num_classes) if epoch > 1 else None,
        }


def _no_update() -> None:
    """Do nothing: the optimizer step is part of the training step."""


def _check_losses(epoch: int, buffers: TrainingBuffers, losses: Floats, order: Iterable[int]) -> None:
    """Raise ConfigError with the first bag in `order` whose loss is not finite: training has diverged."""
    if not np.isfinite(losses).all():
        first = next(buffers.bags[index].slide for index in order if not math.isfinite(losses[index]))
        why = "training has diverged"
        how = "Lower train.lr, or set train.clip_grad 1 or train.standardize true"
        raise ConfigError(
            f"{first}: the loss is not a finite number in epoch {epoch}", why, how, code="training-diverged"
        )


# ---------------------------------------------------------------------------------------------------- model folder


def save_model(folder: Path, trained: Trained, info: Mapping[str, Any]) -> None:
    """Write model.safetensors, config.json and metrics.jsonl into `folder`, each atomically.

    `info` is further metadata from the caller (classes, encoder, split ...): plain values without absolute paths or
    times, stored in config.json beside `aggregator` (arguments of `build`), `recipe`, `epoch` and `warnings`.
    """
    known = {
        "schema": SCHEMA,
        "format_version": FORMAT_VERSION,
        "aggregator": trained.module.config,
        "recipe": trained.recipe.to_json(),
        "epoch": trained.epoch,
        "warnings": trained.warnings,
        "evidence": None if trained.evidence is None else asdict(trained.evidence),
    }
    clash = sorted(set(known) & set(info))
    assert not clash, f"info overrules {clash}"
    lines = [json.dumps(line, sort_keys=True) for line in trained.history]
    write_text(folder / "metrics.jsonl", "".join(f"{line}\n" for line in lines))
    weights = {name: value.contiguous() for name, value in trained.module.state_dict().items()}
    write_bytes(folder / "model.safetensors", safetensors.torch.save(weights, metadata={"format": "pt"}))
    # Last, so that a folder with a config is complete.
    config = json.dumps({**info, **known}, indent=2, sort_keys=True, ensure_ascii=False)
    write_text(folder / "config.json", config + "\n")


class _NothingDrawn(TorchFunctionMode):
    """Leaves new weights as they are: drawing normal numbers for tensors without memory imports torch's compiler."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ in ("normal_", "uniform_"):
            return args[0] if args else kwargs["tensor"]
        func = torch.empty if func.__name__ == "randn" else func
        return func(*args, **(kwargs or {}))


def load_model(folder: Path) -> tuple[Aggregator, dict[str, Any]]:
    """Return a folder's aggregator, on the CPU in evaluation mode, and its config; raise ArtefactError if invalid."""
    how = "Train it again"
    try:
        config = read_json(folder / "config.json")
        if config["format_version"] != FORMAT_VERSION:
            why = f"its format is version {config['format_version']}, this program reads {FORMAT_VERSION}"
            raise ArtefactError(
                f"{folder.name}: an aggregator of another format version", why, how, code="other-format-version"
            )
        state = safetensors.torch.load_file(folder / "model.safetensors")
        with torch.device("meta"), _NothingDrawn():  # no allocation: the config may claim any size
            module = build(**config["aggregator"])
        if {name: value.shape for name, value in module.state_dict().items()} != {
            name: value.shape for name, value in state.items()
        }:
            raise ValueError("config.json describes another network than model.safetensors holds")
        if len(state) != sum(1 for _ in (*module.parameters(), *module.buffers())):
            module = build(**config["aggregator"])  # it has tensors that files do not hold
        # Copied: in a mapped file tensors lie at any address, and the address may change the last bits of a product.
        module.load_state_dict({name: value.clone() for name, value in state.items()}, assign=True)
    except FileNotFoundError as error:
        why = f"it has no {Path(str(error.filename or 'model.safetensors')).name}"
        raise ArtefactError(f"{folder.name}: no trained aggregator", why, how, code="no-model") from None
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, ConfigError, safetensors.SafetensorError) as error:
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise ArtefactError(
            f"{folder.name}: the aggregator cannot be read", why, how, code="unreadable-model"
        ) from None
    return module.eval(), config


# ---------------------------------------------------------------------------------------------------- steps


Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class ValidationResults:
    """Results of one epoch on the validation bags."""

    losses: Floats
    probabilities: Floats
    """(V, C)."""
    entropies: Floats
    """Normalized attention entropies (divided by log N); NaN where there is no attention."""
    overtaken: NDArray[np.int64]
    """Number of instances with more evidence than the previous epoch's critical instance."""


class TrainingBuffers:
    """Labels, weights and losses of a list of bags, on the device."""

    def __init__(
        self,
        bags: Sequence[LabelledBag],
        num_classes: int,
        weights: Sequence[float],
        device: torch.device,
        outcome: Outcome | None = None,
    ):
        self.bags = bags
        self.labels = np.array([each.label if outcome is None else 1 for each in bags], dtype=np.int64)
        self.weights_of_bags = np.array(weights, dtype=np.float64)
        one_hot = torch.eye(max(num_classes, 2))[torch.from_numpy(self.labels % max(num_classes, 2))]
        self._losses = torch.zeros(len(bags), device=device)
        # One view per bag, created once: creating views in every step costs as much as using them.
        targets = one_hot[:, 1:] if num_classes == 1 else one_hot
        if outcome is not None:
            targets = torch.tensor([outcome.encoded(each.label) for each in bags], dtype=torch.float32)
        self.all_targets = targets.to(device)
        self.targets = self.all_targets.unbind()
        self.weights = torch.tensor(weights, device=device, dtype=torch.float32).unbind()
        self.losses = self._losses.unbind()

    def fetch_losses(self) -> Floats:
        """Return the losses on the host; synchronizes with the device."""
        return self._losses.double().cpu().numpy()


class ValidationBuffers(TrainingBuffers):
    """The same for validation bags, with probabilities, attention entropies and critical instances."""

    def __init__(
        self,
        bags: Sequence[LabelledBag],
        num_classes: int,
        weights: Sequence[float],
        device: torch.device,
        outcome: Outcome | None = None,
    ):
        super().__init__(bags, num_classes, weights, device, outcome)
        width = num_classes if outcome is None else len(outcome.score_names)
        self._probabilities = torch.zeros(len(bags), width, device=device)
        self._entropies = torch.zeros(len(bags), device=device)
        self._overtaken, self._critical = torch.zeros(2, len(bags), device=device, dtype=torch.int64).unbind()
        self.probabilities, self.entropies = self._probabilities.unbind(), self._entropies.unbind()
        self.overtaken, self.critical = self._overtaken.unbind(), self._critical.unbind()
        # Column of the evidence: the bag's own class; a binary label has a single column.
        self.columns = [0 if num_classes == 1 or outcome is not None else each.label for each in bags]

    def restart(self) -> None:
        """Forget the critical instances of another training."""
        self._critical.zero_()

    def fetch(self) -> ValidationResults:
        """Return the results on the host; synchronizes with the device."""
        probabilities, entropies = (each.double().cpu().numpy() for each in (self._probabilities, self._entropies))
        return ValidationResults(self.fetch_losses(), probabilities, entropies, self._overtaken.cpu().numpy().copy())


class Steps:
    """Training and validation step of one training run."""

    def __init__(
        self,
        module: Aggregator,
        recipe: Recipe,
        store: BagStore,
        training: Sequence[LabelledBag],
        validation: Sequence[LabelledBag],
    ):
        self.module = module
        self.recipe = recipe
        self.store = store
        outcome = module.outcome
        weights = [[1.0] * len(bags) for bags in (training, validation)]
        if outcome is None:
            weight_of = class_weights(training, module.num_classes, recipe.class_weights)
            weights = [[weight_of[each.label] for each in bags] for bags in (training, validation)]
        self.training = TrainingBuffers(training, module.num_classes, weights[0], store.device, outcome)
        self.validation = ValidationBuffers(validation, module.num_classes, weights[1], store.device, outcome)
        self.together = outcome is not None and outcome.needs_batch
        """Whether the bags of an optimizer step have one loss (`train_together`)."""
        self.share = torch.ones((), device=store.device)
        """Weight of a bag's loss in its optimizer step: 1 / number of bags in the step."""

    def train_step(self, index: int) -> None:
        """Accumulate the gradient of one training bag and store its loss."""
        buffers = self.training
        output = self.module(*self._seen(index))
        loss = self._loss(output, buffers.targets[index])
        factor = self.share if self.recipe.accumulate > 1 else None
        if self.recipe.class_weights != "none":
            factor = buffers.weights[index] if factor is None else factor * buffers.weights[index]
        (loss if factor is None else loss * factor).backward()
        buffers.losses[index].copy_(loss.detach())

    def train_together(self, indices: Sequence[int]) -> None:
        """Accumulate the gradient of the common loss of several training bags, and store it as the loss of each.

        The graphs of all bags are kept until then, so that the gradient is exact, dropout included.
        """
        buffers = self.training
        outputs = [self.module(*self._seen(index)) for index in indices]
        loss = self.module.outcome_loss(outputs, buffers.all_targets[list(indices)])
        loss.backward()
        for index in indices:
            buffers.losses[index].copy_(loss.detach())

    def validation_loss(self, results: ValidationResults) -> float:
        """Return the loss of all validation bags."""
        assert self.module.outcome is not None
        scores_VK = torch.from_numpy(results.probabilities)
        targets_VT = self.validation.all_targets.cpu().double()
        return self.module.outcome.validation_loss(results.losses, scores_VK, targets_VT)

    def _loss(self, output: AggregatorOutput, target: Tensor) -> Tensor:
        if self.module.outcome is None:
            return self.module.loss(output, target)
        return self.module.outcome_loss([output], target[None])

    def _seen(self, index: int) -> tuple[Tensor, Tensor | None]:
        """Return the instances of a training bag that a step sees."""
        features_ND, coords_N2 = self.inputs(self.training.bags[index].bag)
        num_seen = self._num_seen(len(features_ND))
        if num_seen < len(features_ND):
            seen = draw(len(features_ND), num_seen, features_ND.device)
            features_ND = features_ND.index_select(0, seen)
            coords_N2 = None if coords_N2 is None else coords_N2.index_select(0, seen)
        return features_ND, coords_N2

    @torch.no_grad()
    def validation_step(self, index: int) -> None:
        """Store loss, probabilities, entropy and critical instance of one validation bag."""
        buffers = self.validation
        output = self.module(*self.inputs(buffers.bags[index].bag))
        summary = summarize_output(self.module, output, buffers.columns[index])
        buffers.losses[index].copy_(self._loss(output, buffers.targets[index]))
        buffers.probabilities[index].copy_(summary.probabilities_C)
        buffers.entropies[index].copy_(summary.entropy)
        evidence_N, critical = summary.evidence_N, buffers.critical[index]
        buffers.overtaken[index].copy_((evidence_N > evidence_N.index_select(0, critical.reshape(1))).sum())
        critical.copy_(evidence_N.argmax())

    def inputs(self, bag: Bag) -> tuple[Tensor, Tensor | None]:
        """Return the features of a bag on the device, and its coordinates where the method needs them."""
        return self.store.features(bag), self.store.coords(bag) if self.module.needs_coordinates else None

    def _num_seen(self, num_instances: int) -> int:
        kept = max(1, num_instances - int(self.recipe.instance_dropout * num_instances))
        return min(kept, self.recipe.max_instances or kept)


def class_weights(training: Sequence[LabelledBag], num_classes: int, rule: str) -> list[float]:
    """Return the loss weight of each class: 1, or balanced, number of bags / (classes * bags of the class)."""
    counts = np.bincount([each.label for each in training], minlength=max(num_classes, 2))
    if rule == "none":
        return [1.0] * len(counts)
    present = int((counts > 0).sum())
    return [len(training) / (present * int(count)) if count else 1.0 for count in counts]
