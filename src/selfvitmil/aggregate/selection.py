"""Choices made without the test set: the kind of evidence, by cross-validation; the epoch, on the validation set.

A lesion shows in a few tiles, a mutation may show a little in all of them, and some classes are the absence of
something. An aggregator that looks for the wrong kind of evidence fails to learn, so the kind is chosen before the
aggregator is trained, by cross-validation on the training and validation slides (never on the test set). Each kind and
fold has a linear tile scorer; a slide's logit is the mean of its highest scores (`positive`), the same for the other
class (`negative`), or the mean of all (`average`). All scorers are trained together as the columns of one matrix, so
that the choice costs about as much as one training run of max pooling. The kind with the highest AUC is chosen; ties
are broken by the lower Brier score.

N instances, D dimensions, C classes, K highest scores, M = kinds x folds, V validation bags.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from selfvitmil import metrics
from selfvitmil.aggregate.bag_tensors import BagStore, ChunkedBag, LabelledBag, draw
from selfvitmil.aggregate.base import Aggregator, AggregatorOutput
from selfvitmil.aggregate.dsmil import EVIDENCE
from selfvitmil.aggregate.graphs import Recorder, can_capture
from selfvitmil.aggregate.recipes import Recipe, TrainingOptimizer, learning_rates

FOLDS = 5
"""Folds of the cross-validation; fewer where a class has fewer patients."""
TOP = 3
"""Number of highest scores in a slide's logit, as in the two-stream recipe."""
SEED = 0
"""Seed of folds and training: the choice depends on the slides alone, so all seeds of a split share it."""
BINARY_KINDS = ("positive", "negative", "average")
MULTICLASS_KINDS = ("free", "average")


@dataclass(frozen=True)
class EvidenceChoice:
    """The chosen kind of evidence and the cross-validated metrics of all kinds, each over all slides."""

    evidence: str
    slides: int
    folds: int
    """0 where there were too few patients for cross-validation."""
    brier: Mapping[str, float]
    auc: Mapping[str, float]

    def __post_init__(self) -> None:
        """Put the kinds into one order, also those of a stored choice, whose keys are sorted: results show it."""
        for name in ("brier", "auc"):
            values = getattr(self, name)
            object.__setattr__(self, name, {kind: values[kind] for kind in EVIDENCE if kind in values})

    @property
    def reason(self) -> str:
        """The chosen kind and the reason, in one sentence."""
        if not self.folds:
            return f"{EVIDENCE[self.evidence]} (assumed: too few patients of a class for cross-validation)"
        scores = ", ".join(f"{kind} {self.auc[kind]:.3f}" for kind in self.auc)
        # With several outputs `free` stands for both kinds of few tiles.
        why = "highest AUC" if self.evidence in self.auc else "few tiles have the highest AUC"
        return (
            f"{EVIDENCE[self.evidence]} ({why} in {self.folds}-fold cross-validation on the {self.slides} slides "
            f"of training and model selection: {scores})"
        )


def evidence_words(choices: Sequence[EvidenceChoice]) -> tuple[str, ...]:
    """Return one sentence per chosen kind: the number of splits that chose it and the mean AUC of all kinds there."""
    if len(choices) < 2:
        return tuple(choice.reason for choice in choices)
    found: list[str] = []
    for kind in dict.fromkeys(choice.evidence for choice in choices):
        own = [choice for choice in choices if choice.evidence == kind]
        aucs = {name: float(np.mean([one.auc[name] for one in own if one.auc])) for name in own[0].auc}
        scores = ", ".join(f"{name} {auc:.3f}" for name, auc in aucs.items()) or "assumed: too few patients"
        found.append(
            f"{EVIDENCE[kind]} ({len(own)} of {len(choices)} splits; mean AUC in cross-validation on the slides of "
            f"training and model selection: {scores})"
        )
    return tuple(found)


def choose_evidence(bags: Sequence[LabelledBag], num_classes: int, recipe: Recipe, store: BagStore) -> EvidenceChoice:
    """Cross-validate all kinds of evidence on `bags` with the hyperparameters of `recipe`.

    Random numbers come from torch's generators, which the caller seeds with `SEED`.
    """
    kinds = BINARY_KINDS if num_classes == 1 else MULTICLASS_KINDS
    fold_of = assign_folds(bags)
    if fold_of is None:
        return EvidenceChoice(kinds[0], len(bags), 0, {}, {})
    folds = int(fold_of.max()) + 1
    probabilities = _cross_validate(bags, fold_of, kinds, num_classes, recipe, store)
    labels = np.array([each.label for each in bags])
    targets_SC = labels[:, None] if num_classes == 1 else np.eye(num_classes)[labels]
    brier = {kind: float(np.mean((probabilities[kind] - targets_SC) ** 2)) for kind in kinds}
    present = [c for c in range(targets_SC.shape[1]) if 0 < targets_SC[:, c].sum() < len(bags)]
    auc = {
        kind: float(np.mean([metrics.auc(targets_SC[:, c].astype(int), probabilities[kind][:, c]) for c in present]))
        for kind in kinds
    }
    best = max(kinds, key=lambda kind: (auc[kind], -brier[kind]))
    return EvidenceChoice(best, len(bags), folds, brier, auc)


def assign_folds(bags: Sequence[LabelledBag]) -> np.ndarray | None:
    """Return the fold of every bag, by patient and stratified by class; None if a class has fewer than two patients."""
    label_of: dict[str, int] = {}
    for each in bags:
        label_of[each.patient] = max(each.label, label_of.get(each.patient, 0))
    by_class: dict[int, list[str]] = {}
    for patient, label in sorted(label_of.items()):
        by_class.setdefault(label, []).append(patient)
    folds = min(FOLDS, *map(len, by_class.values()), len(label_of))
    if folds < 2 or len(by_class) < 2:
        return None
    generator = np.random.default_rng(SEED)
    fold_of: dict[str, int] = {}
    for patients in by_class.values():
        for place, patient in enumerate(generator.permutation(np.array(patients, dtype=object))):
            fold_of[patient] = place % folds
    return np.array([fold_of[each.patient] for each in bags])


class _Scorers(Aggregator):
    """One linear tile scorer for every kind, fold and class; see the module's docstring."""

    def __init__(self, dim: int, num_classes: int, kinds: Sequence[str], folds: int):
        super().__init__(dim, num_classes, standardize=True)
        self.kinds = kinds
        self.folds = folds
        self.scorer = nn.Linear(dim, len(kinds) * folds * num_classes)
        nn.init.normal_(self.scorer.weight, std=0.01 / math.sqrt(dim))
        nn.init.zeros_(self.scorer.bias)

    def aggregate(self, bag: ChunkedBag, coords_N2: Tensor | None) -> AggregatorOutput:
        """Return the slide logits of every scorer: (kinds, folds, C)."""
        scores = bag.project(self.scorer).view(len(bag), len(self.kinds), self.folds, self.num_classes)
        highest = scores.topk(min(TOP, len(bag)), dim=0).values.mean(0)
        average = scores.mean(0)
        logits = [
            average[k] if kind == "average" else -highest[k] if kind == "negative" else highest[k]
            for k, kind in enumerate(self.kinds)
        ]
        return AggregatorOutput(torch.stack(logits), None, None)


def _cross_validate(
    bags: Sequence[LabelledBag],
    fold_of: np.ndarray,
    kinds: Sequence[str],
    num_classes: int,
    recipe: Recipe,
    store: BagStore,
) -> dict[str, np.ndarray]:
    """Return kind -> out-of-fold probabilities (slides, C), each at the best epoch of its scorer."""
    folds, device = int(fold_of.max()) + 1, store.device
    recipe = replace(recipe, accumulate=1, clip_grad=0.0)
    scorers = _Scorers(bags[0].bag.dim, num_classes, kinds, folds)
    scorers.set_standardization(*store.standardization([each.bag for each in bags]))
    scorers.to(device)
    optimizer, schedule = (
        TrainingOptimizer(scorers, recipe, device, keep_gradients=False),
        learning_rates(recipe, len(bags)),
    )
    targets = torch.tensor([each.label for each in bags], device=device)
    target_SC = targets[:, None].float() if num_classes == 1 else F.one_hot(targets, num_classes).float()
    learns_SF = torch.from_numpy(fold_of)[:, None].to(device) != torch.arange(folds, device=device)
    held_out = torch.from_numpy(fold_of).to(device)
    best_loss = torch.full((len(kinds), folds), math.inf, device=device)
    found = torch.full((len(bags), len(kinds), num_classes), 0.5, device=device)
    logits = torch.zeros(len(bags), len(kinds), folds, num_classes, device=device)
    rows = logits.unbind()

    def train_step(index: int) -> None:
        features_ND = store.features(bags[index].bag)
        kept = max(1, len(features_ND) - int(recipe.instance_dropout * len(features_ND)))
        if kept < len(features_ND):
            features_ND = features_ND.index_select(0, draw(len(features_ND), kept, device))
        losses = _losses(scorers(features_ND).logits_C, target_SC[index])
        (losses * learns_SF[index]).sum().backward()
        optimizer.step()

    @torch.no_grad()
    def score_step(index: int) -> None:
        rows[index].copy_(scorers(store.features(bags[index].bag)).logits_C)

    train_steps, score_steps = (
        [partial(step, index) for index in range(len(bags))] for step in (train_step, score_step)
    )
    for epoch in range(recipe.epochs):
        scorers.train()
        for number, place in enumerate(np.random.default_rng((SEED, epoch)).permutation(len(bags)).tolist()):
            optimizer.set_lr(schedule.value_at(epoch * len(bags) + number))
            train_steps[place]()
        scorers.eval()
        for step in score_steps:
            step()
        if epoch == 0 and can_capture(bags, 2 * len(bags), recipe.epochs, store):
            try:
                recorder = Recorder()
                score_steps = recorder.record(score_steps)
                scorers.train()
                train_steps = recorder.record(train_steps)
            except RuntimeError:  # they are slower, and give the same
                optimizer.zero_grad()
        with torch.no_grad():
            own = logits.gather(2, held_out[:, None, None, None].expand(-1, len(kinds), 1, num_classes)).squeeze(2)
            losses_SK = _losses(own, target_SC[:, None])
            loss = torch.stack([losses_SK[held_out == fold].mean(0) for fold in range(folds)], dim=1)
            better = loss < best_loss
            best_loss = torch.where(better, loss, best_loss)
            found = torch.where(better.T[held_out][:, :, None], own.sigmoid(), found)
    return {kind: found[:, k].double().cpu().numpy() for k, kind in enumerate(kinds)}


def _losses(logits: Tensor, target_C: Tensor) -> Tensor:
    """Return the cross-entropy with one sigmoid per class, averaged over the classes."""
    return F.binary_cross_entropy_with_logits(logits, target_C.expand_as(logits), reduction="none").mean(-1)


# ---------------------------------------------------------------------------------------------------- epoch


Floats = NDArray[np.float64]
Labels = NDArray[np.int64]

UNIFORM = 0.99
"""Normalized attention entropy above which attention counts as uniform."""
UNSETTLED = 0.5
"""Fraction of bags whose critical instance changed between epochs, above which the critical instance is unstable."""
GIVEN_UP = 0.05
"""Fraction of a bag that must outrank the previous critical instance to count as a change: lesions have many tiles."""


def choose_monitor(wanted: str, labels: Labels, num_classes: int) -> tuple[str, str | None]:
    """Return the criterion that selects the epoch, and a warning where it is not the requested one."""
    if wanted == "loss" or _missing(labels, num_classes) is None:
        return wanted, None
    return "loss", (
        f"AUC is undefined on the validation set ({_missing(labels, num_classes)}), so the epoch was chosen by loss. "
        "Add validation slides of every class, or set train.monitor to loss"
    )


def _missing(labels: Labels, num_classes: int) -> str | None:
    absent = sorted(set(range(max(num_classes, 2))) - set(labels.tolist()))
    return f"it has no slide of class {', '.join(map(str, absent))}" if absent else None


def auc(labels: Labels, probabilities_VC: Floats) -> float | None:
    """Return the AUC, with several classes the macro-average one-vs-rest AUC; None where a class is missing."""
    num_classes = probabilities_VC.shape[1]
    if _missing(labels, num_classes):
        return None
    if num_classes == 1:
        return metrics.auc(labels, probabilities_VC[:, 0])
    return float(np.mean([metrics.auc(labels == k, probabilities_VC[:, k]) for k in range(num_classes)]))


def accuracy(labels: Labels, probabilities_VC: Floats) -> float:
    """Return the accuracy at Youden's threshold of these bags, or with several classes by the largest probability."""
    if probabilities_VC.shape[1] > 1:
        return float((probabilities_VC.argmax(axis=1) == labels).mean())
    threshold = metrics.youden_threshold(labels, probabilities_VC[:, 0])
    return float(((probabilities_VC[:, 0] >= threshold) == (labels == 1)).mean())


def criterion(monitor: str, labels: Labels, probabilities_VC: Floats, loss: float) -> float:
    """Return the value that selects the epoch, larger is better. `authors` is the criterion of Self-ViT-MIL's code."""
    if monitor == "loss":
        return -loss
    area = auc(labels, probabilities_VC)
    assert area is not None
    return area if monitor == "auc" else (area + accuracy(labels, probabilities_VC) + 1 - loss) / 4


def mean_entropy(labels: Labels, entropies: Floats, num_classes: int) -> float | None:
    """Return the mean attention entropy over the positive bags; with several classes over all, each for its class."""
    known = entropies[_informative(labels, num_classes) & ~np.isnan(entropies)]
    return float(known.mean()) if len(known) else None


def churn(labels: Labels, overtaken: Labels, num_instances: Labels, num_classes: int) -> float | None:
    """Return the fraction of positive bags (of all, with several classes) whose critical instance changed.

    `overtaken` is the number of instances that outrank the previous epoch's critical instance.
    """
    counted = _informative(labels, num_classes)
    if not counted.any():
        return None
    return float((overtaken >= np.maximum(1, GIVEN_UP * num_instances))[counted].mean())


def _informative(labels: Labels, num_classes: int) -> NDArray[np.bool_]:
    """Return which bags contain evidence of a class: for a binary label the positive ones, else all."""
    return labels > 0 if num_classes == 1 else np.ones(len(labels), dtype=bool)


def attention_warnings(line: dict[str, Any]) -> list[str]:
    """Return warnings about the attention and the critical instances of the chosen epoch's history line."""
    found, epoch = [], line["epoch"]
    entropy, changed = line["attention_entropy"], line["critical_churn"]
    if entropy is not None and entropy > UNIFORM:
        found.append(
            f"attention is nearly uniform at the chosen epoch {epoch} (normalized entropy {entropy:.3f} on validation "
            "slides): predictions use the average tile, and the attention heatmap is uninformative. Try "
            "train.standardize true, another learning rate, a longer warm-up, or more training slides"
        )
    if changed is not None and changed > UNSETTLED:
        found.append(
            f"the critical tile is unstable: from epoch {epoch - 1} to the chosen epoch {epoch} it changed on "
            f"{changed:.0%} of the validation slides, so its position is not reliable evidence. Try "
            "a lower learning rate, a longer warm-up, or with DSMIL several critical tiles (train.options.top 3)"
        )
    return found
