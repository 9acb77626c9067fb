"""Training step and validation step on one bag, as functions of the bag's index.

They read and write tensors at fixed addresses (weights, gradients, targets, one entry per bag for losses and scores)
and exchange no values with the host, so that each can be captured as a CUDA graph and replayed (`cuda_graphs.py`), and
nothing synchronizes within an epoch. The epoch's results are fetched at once.

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
    """A bag with the label of its slide."""

    slide: str
    bag: Bag
    label: int
    """Class index; 0 or 1 for a binary label."""
    of_patient: str = ""
    """Patient identifier; empty where every slide counts as its own patient."""

    @property
    def patient(self) -> str:
        return self.of_patient or self.slide


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

    def __init__(self, bags: Sequence[LabelledBag], num_classes: int, weights: Sequence[float], device: torch.device):
        self.bags = bags
        self.labels = np.array([each.label for each in bags], dtype=np.int64)
        self.weights_of_bags = np.array(weights, dtype=np.float64)
        one_hot = torch.eye(max(num_classes, 2))[torch.from_numpy(self.labels)]
        self._losses = torch.zeros(len(bags), device=device)
        # One view per bag, created once: creating views in every step costs as much as using them.
        self.targets = (one_hot[:, 1:] if num_classes == 1 else one_hot).to(device).unbind()
        self.weights = torch.tensor(weights, device=device, dtype=torch.float32).unbind()
        self.losses = self._losses.unbind()

    def fetch_losses(self) -> Floats:
        """Return the losses on the host; synchronizes with the device."""
        return self._losses.double().cpu().numpy()


class ValidationBuffers(TrainingBuffers):
    """The same for validation bags, with probabilities, attention entropies and critical instances."""

    def __init__(self, bags: Sequence[LabelledBag], num_classes: int, weights: Sequence[float], device: torch.device):
        super().__init__(bags, num_classes, weights, device)
        self._probabilities = torch.zeros(len(bags), num_classes, device=device)
        self._entropies = torch.zeros(len(bags), device=device)
        self._overtaken, critical = torch.zeros(2, len(bags), device=device, dtype=torch.int64).unbind()
        self.probabilities, self.entropies = self._probabilities.unbind(), self._entropies.unbind()
        self.overtaken, self.critical = self._overtaken.unbind(), critical.unbind()
        # Column of the evidence: the bag's own class; a binary label has a single column.
        self.columns = [0 if num_classes == 1 else each.label for each in bags]

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
        weight_of = class_weights(training, module.num_classes, recipe.class_weights)
        weights = [[weight_of[each.label] for each in bags] for bags in (training, validation)]
        self.training = TrainingBuffers(training, module.num_classes, weights[0], store.device)
        self.validation = ValidationBuffers(validation, module.num_classes, weights[1], store.device)
        self.share = torch.ones((), device=store.device)
        """Weight of a bag's loss in its optimizer step: 1 / number of bags in the step."""

    def train_step(self, index: int) -> None:
        """Accumulate the gradient of one training bag and store its loss."""
        buffers = self.training
        features_ND, coords_N2 = self._inputs(buffers.bags[index].bag)
        num_seen = self._num_seen(len(features_ND))
        if num_seen < len(features_ND):
            seen = draw(len(features_ND), num_seen, features_ND.device)
            features_ND = features_ND.index_select(0, seen)
            coords_N2 = None if coords_N2 is None else coords_N2.index_select(0, seen)
        output = self.module(features_ND, coords_N2)
        loss = self.module.loss(output, buffers.targets[index])
        factor = self.share if self.recipe.accumulate > 1 else None
        if self.recipe.class_weights != "none":
            factor = buffers.weights[index] if factor is None else factor * buffers.weights[index]
        (loss if factor is None else loss * factor).backward()
        buffers.losses[index].copy_(loss.detach())

    @torch.no_grad()
    def validation_step(self, index: int) -> None:
        """Store loss, probabilities, entropy and critical instance of one validation bag."""
        buffers = self.validation
        output = self.module(*self._inputs(buffers.bags[index].bag))
        summary = summarize_output(self.module, output, buffers.columns[index])
        buffers.losses[index].copy_(self.module.loss(output, buffers.targets[index]))
        buffers.probabilities[index].copy_(summary.probabilities_C)
        buffers.entropies[index].copy_(summary.entropy)
        evidence_N, critical = summary.evidence_N, buffers.critical[index]
        buffers.overtaken[index].copy_((evidence_N > evidence_N.index_select(0, critical.reshape(1))).sum())
        critical.copy_(evidence_N.argmax())

    def _inputs(self, bag: Bag) -> tuple[Tensor, Tensor | None]:
        return self.store.features(bag), self.store.coords(bag) if self.module.needs_coordinates else None

    def _num_seen(self, num_instances: int) -> int:
        kept = max(1, num_instances - int(self.recipe.instance_dropout * num_instances))
        return min(kept, self.recipe.max_instances or kept)


def draw(num_instances: int, num_drawn: int, device: torch.device) -> Tensor:
    """Return indices of instances drawn without replacement, in their original order.

    Their number is fixed, so that the device need not be synchronized.
    """
    return torch.rand(num_instances, device=device).topk(num_drawn, sorted=False).indices.sort().values


def class_weights(training: Sequence[LabelledBag], num_classes: int, rule: str) -> list[float]:
    """Return the loss weight of each class: 1, or balanced, number of bags / (classes * bags of the class)."""
    counts = np.bincount([each.label for each in training], minlength=max(num_classes, 2))
    if rule == "none":
        return [1.0] * len(counts)
    present = int((counts > 0).sum())
    return [len(training) / (present * int(count)) if count else 1.0 for count in counts]
