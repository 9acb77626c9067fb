"""Several targets of different kinds, trained together: one network with outputs for each of them.

The outputs of the network are divided among the targets in their order. The loss is the sum of the targets' losses,
each times its weight. A slide that lacks the value of a target takes no part in that target's loss: the loss of an
optimizer step is the mean over the slides whose value is known. Every target is evaluated by itself, as if it had been
trained alone (`evaluate.joint`); what is done with all of them together is the training and the choice of the epoch: by
the sum of the losses on validation slides, or where `monitor` is a metric by the mean skill (`Outcome.skill`).

N slides, V validation slides, T numbers of all targets, C outputs of all targets, K numbers of all scores.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain, pairwise
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Self

import numpy as np

from selfvitmil.cohort.table import Cohort, SlideRow, listing
from selfvitmil.errors import CohortError, MetricError
from selfvitmil.metrics import Interval, auc, multiclass_auc
from selfvitmil.outcomes.base import (
    PATIENTS_PER_STRATUM,
    Floats,
    Json,
    Outcome,
    Scored,
    Target,
)

if TYPE_CHECKING:
    from torch import Tensor


class _TrainedOnly(Outcome):
    """An outcome that is never evaluated as such: its targets are, one by one."""

    shown_metrics: ClassVar[Mapping[str, str]] = {}
    rank_words: ClassVar[str] = "score"
    poles: ClassVar[tuple[str, str]] = ("the first class", "another class")

    def primary_metric(self, scored: Scored) -> Interval:
        self._refuse()

    def compute(self, scored: Scored) -> dict[str, Callable[[], Any]]:
        self._refuse()

    def paired(self, scored: Scored, baseline: Floats) -> tuple[Interval, str, float]:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise AssertionError(f"{self.words} is evaluated target by target")


@dataclass(frozen=True)
class ClassTarget(_TrainedOnly):
    """Classes of one column among other targets: a logit for two of them, else one per class.

    Alone they are no `Outcome` but the case that the modules of training and evaluation are written for, and losses and
    probabilities are the same as there.
    """

    classes: tuple[str, ...] = ()
    """Of two the second one is positive."""
    positive: str | None = None
    """The class that was named as the positive one."""
    sigmoids: bool = False
    """One sigmoid per class instead of a softmax, with more than two."""

    kind: ClassVar[str] = "classes"
    score_words: ClassVar[str] = "probability of the positive class, or of each class"
    primary: ClassVar[str] = "auc"
    primary_words: ClassVar[str] = "AUC"

    @property
    def target_names(self) -> tuple[str, ...]:
        return ("class",)

    @property
    def score_names(self) -> tuple[str, ...]:
        return self.classes[1:] if len(self.classes) == 2 else self.classes

    @property
    def num_outputs(self) -> int:
        return len(self.score_names)

    def parse(self, row: SlideRow) -> Target | None:
        cell = row.value(self.columns[0])
        return None if cell is None else (float(self.classes.index(cell)),)

    def strata(self, targets: Mapping[str, Target], patient_of: Mapping[str, str]) -> dict[str, str]:
        of_patient: dict[str, int] = {}
        for slide, (label,) in targets.items():
            of_patient[patient_of[slide]] = max(int(label), of_patient.get(patient_of[slide], 0))
        return {slide: self.classes[of_patient[patient_of[slide]]] for slide in targets}

    def check_training(self, split: str, targets: Sequence[Target]) -> None:
        missing = [name for place, name in enumerate(self.classes) if (float(place),) not in set(targets)]
        if missing:
            raise CohortError(
                f"{split}: no training slide of {listing(missing)} ({self.columns[0]})",
                "a class without training slides cannot be learned",
                "Use another split, or fewer folds",
                code="missing-class",
            )

    def is_high(self, targets: Sequence[Target]) -> list[int]:
        return [int(label > 0) for (label,) in targets]

    def loss(self, raw_NC: Tensor, target_NT: Tensor) -> Tensor:
        import torch
        from torch.nn import functional as F

        if self.num_outputs == 1:
            return F.binary_cross_entropy_with_logits(raw_NC, target_NT)
        if self.sigmoids:
            class_C = torch.arange(self.num_outputs, device=raw_NC.device)
            return F.binary_cross_entropy_with_logits(raw_NC, (class_C == target_NT).to(raw_NC.dtype))
        return F.cross_entropy(raw_NC, target_NT[:, 0].long())

    def score(self, raw_C: Tensor) -> Tensor:
        return raw_C.sigmoid() if self.num_outputs == 1 or self.sigmoids else raw_C.softmax(-1)

    def with_sigmoids(self) -> Self:
        return replace(self, sigmoids=True)

    def validation_metric(self, targets: Sequence[Target], scores_NK: Floats) -> float | None:
        labels = [int(label) for (label,) in targets]
        try:
            if self.num_outputs == 1:
                return auc(labels, scores_NK[:, 0])
            return multiclass_auc(labels, scores_NK, resamples=100).macro.value
        except MetricError:
            return None

    def describe(self, targets: Sequence[Target]) -> str:
        counts = Counter(int(label) for (label,) in targets)
        return f"{len(targets)} slides: " + ", ".join(f"{counts[k]} {name}" for k, name in enumerate(self.classes))


@dataclass(frozen=True)
class Joint(_TrainedOnly):
    """Several targets of one network; a target has the numbers of all of them, NaN where a slide lacks one."""

    parts: tuple[Outcome, ...] = ()
    weights: tuple[float, ...] = ()
    """Of the parts' losses."""

    kind: ClassVar[str] = "joint"
    score_words: ClassVar[str] = "scores of all targets"
    primary: ClassVar[str] = "skill"
    primary_words: ClassVar[str] = "mean skill"

    @classmethod
    def of(cls, parts: Iterable[Outcome], weights: Sequence[float] = ()) -> Self:
        """Return the outcome with these targets; without `weights` all count the same."""
        parts = tuple(parts)
        columns = tuple(chain.from_iterable(part.columns for part in parts))
        return cls(columns, parts, tuple(weights) or (1.0,) * len(parts))

    @property
    def needs_batch(self) -> bool:
        return any(part.needs_batch for part in self.parts)

    @property
    def target_names(self) -> tuple[str, ...]:
        return tuple(f"{'_'.join(part.columns)}_{name}" for part in self.parts for name in part.target_names)

    @property
    def score_names(self) -> tuple[str, ...]:
        return tuple(f"{'_'.join(part.columns)}_{name}" for part in self.parts for name in part.score_names)

    @property
    def num_outputs(self) -> int:
        return sum(part.num_outputs for part in self.parts)

    @cached_property
    def outputs(self) -> tuple[slice, ...]:
        """Which outputs of the network belong to each part."""
        return _slices([part.num_outputs for part in self.parts])

    @cached_property
    def numbers(self) -> tuple[slice, ...]:
        """Which numbers of a target belong to each part."""
        return _slices([len(part.target_names) for part in self.parts])

    @cached_property
    def scores(self) -> tuple[slice, ...]:
        """Which numbers of a score belong to each part."""
        return _slices([len(part.score_names) for part in self.parts])

    @property
    def names(self) -> tuple[str, ...]:
        """What the parts are called."""
        return tuple(" and ".join(part.columns) for part in self.parts)

    @property
    def words(self) -> str:
        return f"joint ({'; '.join(', '.join(part.columns) for part in self.parts)})"

    # ------------------------------------------------------------------------------------------ targets

    def target_of(self, place: int, target: Target) -> Target | None:
        """Return the target of one part; None where it is not known."""
        own = target[self.numbers[place]]
        return None if all(map(math.isnan, own)) else own

    def known(self, place: int, targets: Iterable[Target]) -> list[Target]:
        """Return the targets of one part of the slides on which it is known."""
        found = (self.target_of(place, target) for target in targets)
        return [own for own in found if own is not None]

    def parse(self, row: SlideRow) -> Target | None:
        own = [part.parse(row) for part in self.parts]
        return None if all(each is None for each in own) else self._joined(own)

    def _joined(self, own: Sequence[Target | None]) -> Target:
        unknown = [(math.nan,) * len(part.target_names) for part in self.parts]
        return tuple(chain.from_iterable(each or nan for each, nan in zip(own, unknown, strict=True)))

    def read(self, cohort: Cohort, table: str = "cohort.csv") -> dict[str, Target]:
        """Return the targets of all slides that have one of them; each part checks its own columns."""
        found = [part.read(cohort, table) for part in self.parts]
        slides = [row.slide for row in cohort.rows if any(row.slide in own for own in found)]
        return {slide: self._joined([own.get(slide) for own in found]) for slide in slides}

    def remarks(self, cohort: Cohort) -> tuple[str, ...]:
        return tuple(chain.from_iterable(part.remarks(cohort) for part in self.parts))

    def strata(self, targets: Mapping[str, Target], patient_of: Mapping[str, str]) -> dict[str, str]:
        """Return the strata of the first target, divided by those of a further one wherever each keeps ten patients.

        Patients without a value are put into the largest stratum.
        """
        found: dict[str, tuple[str, ...]] = {patient_of[slide]: () for slide in targets}
        for place, part in enumerate(self.parts):
            known = {slide: own for slide, target in targets.items() if (own := self.target_of(place, target))}
            names = {patient_of[slide]: name for slide, name in part.strata(known, patient_of).items()} if known else {}
            usual = Counter(names.values()).most_common(1)[0][0] if names else ""
            finer = {patient: (*own, names.get(patient, usual)) for patient, own in found.items()}
            if place == 0 or min(Counter(finer.values()).values()) >= PATIENTS_PER_STRATUM:
                found = finer
        return {slide: ", ".join(found[patient_of[slide]]) for slide in targets}

    def check_training(self, split: str, targets: Sequence[Target]) -> None:
        for place, part in enumerate(self.parts):
            part.check_training(split, self.known(place, targets))

    def fitted(self, targets: Sequence[Target]) -> Self:
        return replace(
            self, parts=tuple(part.fitted(self.known(place, targets)) for place, part in enumerate(self.parts))
        )

    def encoded(self, target: Target) -> Target:
        own = [self.target_of(place, target) for place in range(len(self.parts))]
        return self._joined(
            [None if each is None else part.encoded(each) for part, each in zip(self.parts, own, strict=True)]
        )

    def is_high(self, targets: Sequence[Target]) -> list[int]:
        """Return 1 for slides on which a larger share of the known targets is high than on the median slide."""
        high = np.full((len(self.parts), len(targets)), np.nan)
        for place, part in enumerate(self.parts):
            own = [self.target_of(place, target) for target in targets]
            where = [number for number, each in enumerate(own) if each is not None]
            high[place, where] = part.is_high([each for each in own if each is not None])
        share = np.nanmean(high, axis=0)
        above = share > np.median(share)
        return [int(each) for each in (above if above.any() else share >= np.median(share))]

    def describe(self, targets: Sequence[Target]) -> str:
        own = [part.describe(self.known(place, targets)) for place, part in enumerate(self.parts)]
        return "; ".join(f"{', '.join(part.columns)}: {words}" for part, words in zip(self.parts, own, strict=True))

    # ------------------------------------------------------------------------------------------ networks

    def loss(self, raw_NC: Tensor, target_NT: Tensor) -> Tensor:
        losses = [self._part_loss(place, raw_NC[:, self.outputs[place]], target_NT) for place in range(len(self.parts))]
        return sum(losses[1:], losses[0])

    def _part_loss(self, place: int, raw_NC: Tensor, target_NT: Tensor) -> Tensor:
        """Return the weighted loss of one part's outputs, over the slides on which its target is known."""
        import torch

        part, own_NT = self.parts[place], target_NT[:, self.numbers[place]]
        known_N = ~own_NT.isnan().all(1)
        if len(raw_NC) == 1:  # without a look at the values: such a step may be captured as a CUDA graph
            return self.weights[place] * known_N[0] * part.loss(raw_NC, torch.where(known_N[:, None], own_NT, 0.0))
        if not known_N.any():
            return 0.0 * raw_NC.sum()
        return self.weights[place] * part.loss(raw_NC[known_N], own_NT[known_N])

    def validation_loss(self, losses_V: Floats, scores_VK: Tensor, target_VT: Tensor) -> float:
        """Return the mean of the slides' losses, to which losses that compare slides with each other are added: a slide
        by itself has none of these, and their scores are the raw outputs."""
        together = [
            float(self._part_loss(place, scores_VK[:, self.scores[place]], target_VT))
            for place, part in enumerate(self.parts)
            if part.needs_batch
        ]
        return float(losses_V.mean()) + sum(together)

    def with_sigmoids(self) -> Self:
        return replace(self, parts=tuple(part.with_sigmoids() for part in self.parts))

    def score(self, raw_C: Tensor) -> Tensor:
        import torch

        return torch.cat(
            [part.score(raw_C[..., own]) for part, own in zip(self.parts, self.outputs, strict=True)], dim=-1
        )

    # ------------------------------------------------------------------------------------------ evaluation

    def validation_metric(self, targets: Sequence[Target], scores_NK: Floats) -> float | None:
        """Return the mean skill of the parts whose metric is defined on these slides; None if none is."""
        skills: list[float] = []
        for place, part in enumerate(self.parts):
            own = [self.target_of(place, target) for target in targets]
            where = [number for number, each in enumerate(own) if each is not None]
            known = [each for each in own if each is not None]
            metric = part.validation_metric(known, scores_NK[where, self.scores[place]]) if known else None
            if metric is not None:
                skills.append(part.skill(metric))
        return float(np.mean(skills)) if skills else None

    def skill(self, metric: float) -> float:
        return metric

    # ------------------------------------------------------------------------------------------ files

    def to_json(self) -> Json:
        return {"kind": self.kind, "parts": [part.to_json() for part in self.parts], "weights": list(self.weights)}

    @classmethod
    def of_json(cls, info: Mapping[str, Any]) -> Self:
        from selfvitmil.outcomes import outcome_from_json

        parts = [outcome_from_json(part) for part in info["parts"] if part.get("kind") != cls.kind]
        if len(parts) != len(info["parts"]) or len(parts) != len(info["weights"]):
            raise ValueError("a joint outcome has plain parts, each with a weight")
        return cls.of(parts, info["weights"])


def _slices(widths: Sequence[int]) -> tuple[slice, ...]:
    ends = [0, *accumulate(widths)]
    return tuple(slice(start, end) for start, end in pairwise(ends))
