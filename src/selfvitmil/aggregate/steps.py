"""A training step and a validation step on one bag, as functions of the bag's place in its list.

They read and write tensors that stay where they are (weights, gradients, targets, one slot per bag for losses and
scores), take no number from the host and give none back, so that each can be recorded as a CUDA graph and replayed
(`graphs.py`), and nothing waits for the device within an epoch. The epoch's results are fetched at once.

T training bags, V validation bags, N instances, D dimensions, C classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from selfvitmil.aggregate.bag_store import BagStore
from selfvitmil.aggregate.base import Aggregator
from selfvitmil.aggregate.recipes import Recipe
from selfvitmil.aggregate.scoring import summarize_output
from selfvitmil.bags import Bag

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class LabelledBag:
    """A bag of the cohort with the truth of its slide."""

    slide: str
    bag: Bag
    label: int
    """Index of its class; 0 or 1 where the label is binary."""
    of_patient: str = ""
    """Whose slide it is; empty where every slide is a patient of its own."""

    @property
    def patient(self) -> str:
        return self.of_patient or self.slide


@dataclass(frozen=True, eq=False)
class Judged:
    """What an epoch found out about the validation bags."""

    losses: Floats
    probabilities: Floats
    """(V, C)."""
    entropies: Floats
    """Of attention, as shares of log N; NaN where there is none."""
    fallen: NDArray[np.int64]
    """How many instances have more evidence now than the one that had most of it in the epoch before."""


class Slots:
    """Labels, weights and results of a list of bags, on the device."""

    def __init__(self, bags: Sequence[LabelledBag], num_classes: int, weights: Sequence[float], device: torch.device):
        self.bags = bags
        self.labels = np.array([each.label for each in bags], dtype=np.int64)
        self.weights_of_bags = np.array(weights, dtype=np.float64)
        one_hot = torch.eye(max(num_classes, 2))[torch.from_numpy(self.labels)]
        self._losses = torch.zeros(len(bags), device=device)
        # One view for each bag, made once: making them in every step costs as much as what is done with them.
        self.targets = (one_hot[:, 1:] if num_classes == 1 else one_hot).to(device).unbind()
        self.weights = torch.tensor(weights, device=device, dtype=torch.float32).unbind()
        self.losses = self._losses.unbind()

    def fetch_losses(self) -> Floats:
        """The losses on the host, which waits for the device here."""
        return self._losses.double().cpu().numpy()


class JudgedSlots(Slots):
    """The same for validation bags, of which more is asked."""

    def __init__(self, bags: Sequence[LabelledBag], num_classes: int, weights: Sequence[float], device: torch.device):
        super().__init__(bags, num_classes, weights, device)
        self._probabilities = torch.zeros(len(bags), num_classes, device=device)
        self._entropies = torch.zeros(len(bags), device=device)
        self._fallen, critical = torch.zeros(2, len(bags), device=device, dtype=torch.int64).unbind()
        self.probabilities, self.entropies = self._probabilities.unbind(), self._entropies.unbind()
        self.fallen, self.critical = self._fallen.unbind(), critical.unbind()
        # Whose evidence is asked for: the bag's own class; with a binary label there is one column only.
        self.columns = [0 if num_classes == 1 else each.label for each in bags]

    def fetch(self) -> Judged:
        """The results on the host, which waits for the device here."""
        probabilities, entropies = (each.double().cpu().numpy() for each in (self._probabilities, self._entropies))
        return Judged(self.fetch_losses(), probabilities, entropies, self._fallen.cpu().numpy().copy())


class Steps:
    """Both steps of one training."""

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
        weight_of = class_weights(training, module.num_classes, recipe.class_weights)
        weights = [[weight_of[each.label] for each in bags] for bags in (training, validation)]
        self.training = Slots(training, module.num_classes, weights[0], store.device)
        self.validation = JudgedSlots(validation, module.num_classes, weights[1], store.device)
        self.share = torch.ones((), device=store.device)
        """Of a bag's loss in the loss of its step: 1 / bags of the step."""

    def learn(self, place: int) -> None:
        """Add the gradient of one training bag, and note its loss."""
        slots = self.training
        features_ND, coords_N2 = self._inputs(slots.bags[place].bag)
        num_seen = self._num_seen(len(features_ND))
        if num_seen < len(features_ND):
            seen = draw(len(features_ND), num_seen, features_ND.device)
            features_ND = features_ND.index_select(0, seen)
            coords_N2 = None if coords_N2 is None else coords_N2.index_select(0, seen)
        output = self.module(features_ND, coords_N2)
        loss = self.module.loss(output, slots.targets[place])
        factor = self.share if self.recipe.accumulate > 1 else None
        if self.recipe.class_weights != "none":
            factor = slots.weights[place] if factor is None else factor * slots.weights[place]
        (loss if factor is None else loss * factor).backward()
        slots.losses[place].copy_(loss.detach())

    @torch.no_grad()
    def validate(self, place: int) -> None:
        """Note what the module says of one validation bag."""
        slots = self.validation
        output = self.module(*self._inputs(slots.bags[place].bag))
        summary = summarize_output(self.module, output, slots.columns[place])
        slots.losses[place].copy_(self.module.loss(output, slots.targets[place]))
        slots.probabilities[place].copy_(summary.probabilities_C)
        slots.entropies[place].copy_(summary.entropy)
        evidence_N, critical = summary.evidence_N, slots.critical[place]
        slots.fallen[place].copy_((evidence_N > evidence_N.index_select(0, critical.reshape(1))).sum())
        critical.copy_(evidence_N.argmax())

    def _inputs(self, bag: Bag) -> tuple[Tensor, Tensor | None]:
        return self.store.features(bag), self.store.coords(bag) if self.module.needs_coordinates else None

    def _num_seen(self, num_instances: int) -> int:
        kept = max(1, num_instances - int(self.recipe.instance_dropout * num_instances))
        return min(kept, self.recipe.max_instances or kept)


def draw(num_instances: int, num_drawn: int, device: torch.device) -> Tensor:
    """Places of some instances, drawn without replacement, in their old order.

    A fixed number of them, so that the device need not be asked how many there are.
    """
    return torch.rand(num_instances, device=device).topk(num_drawn, sorted=False).indices.sort().values


def class_weights(training: Sequence[LabelledBag], num_classes: int, rule: str) -> list[float]:
    """Weight of a bag's loss by its class: 1, or balanced, number of bags / (number of classes * bags of the class)."""
    counts = np.bincount([each.label for each in training], minlength=max(num_classes, 2))
    if rule == "none":
        return [1.0] * len(counts)
    present = int((counts > 0).sum())
    return [len(training) / (present * int(count)) if count else 1.0 for count in counts]
