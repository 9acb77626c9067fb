"""Several labels of a slide, each present or not: one output per label, trained by binary cross-entropy.

A cell is 1 or 0 (yes or no, true or false). An empty one is not known: it takes no part in loss and metrics of its
label, and a slide without any label is left out. The score is the probability of each label. By patient a label is
present if it is in one slide, and its probability is the highest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from selfvitmil.cohort.table import SlideRow
from selfvitmil.errors import CohortError, MetricError
from selfvitmil.metrics import Interval, auc_interval, average_precision
from selfvitmil.metrics.ranking import resampled_auc
from selfvitmil.outcomes.base import (
    PATIENTS_PER_STRATUM,
    Floats,
    Outcome,
    Scored,
    Target,
    as_array,
    paired_bootstrap,
    patient_bootstrap,
    quantile_names,
    two_valued,
)  # fmt: skip

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class MultiLabel(Outcome):
    """Labels that may occur together; a target has 1, 0 or NaN (not known) for each."""

    kind: ClassVar[str] = "multilabel"
    score_words: ClassVar[str] = "probability of each label"
    poles: ClassVar[tuple[str, str]] = ("no label", "a label")
    primary: ClassVar[str] = "macro_auc"
    primary_words: ClassVar[str] = "macro AUC"
    shown_metrics: ClassVar[Mapping[str, str]] = {
        "macro_auc": "macro AUC",
        "macro_ap": "macro AP",
        "macro_f1": "macro F1",
    }
    rank_words: ClassVar[str] = "mean probability"
    evidence_per_column: ClassVar[bool] = True
    plots: ClassVar[tuple[str, ...]] = ("roc",)
    patient_words: ClassVar[str] = "highest probability of the patient's slides"

    @property
    def target_names(self) -> tuple[str, ...]:
        return tuple(f"label_{column}" for column in self.columns)

    @property
    def score_names(self) -> tuple[str, ...]:
        return tuple(f"probability_{column}" for column in self.columns)

    @property
    def num_outputs(self) -> int:
        return len(self.columns)

    # ------------------------------------------------------------------------------------------ targets

    def parse(self, row: SlideRow) -> Target | None:
        cells = [two_valued(row, column, "a label is 1 (present) or 0", "invalid-label") for column in self.columns]
        if all(cell is None for cell in cells):
            return None
        return tuple(math.nan if cell is None else float(cell) for cell in cells)

    def strata(self, targets: Mapping[str, Target], patient_of: Mapping[str, str]) -> dict[str, str]:
        """Return the rarest label of each patient, of those that ten patients have, else of those that most have."""
        of_patient: dict[str, set[int]] = {patient_of[slide]: set() for slide in targets}
        for slide, target in targets.items():
            of_patient[patient_of[slide]] |= {place for place, value in enumerate(target) if value == 1}
        counts = {place: sum(place in own for own in of_patient.values()) for place in range(len(self.columns))}
        least = min(PATIENTS_PER_STRATUM, max(counts.values()))
        order = sorted((place for place in counts if counts[place] >= least), key=lambda k: counts[k])
        names = {
            patient: next((self.columns[place] for place in order if place in own), "others")
            for patient, own in of_patient.items()
        }
        if len(set(names.values())) < 2:
            names = quantile_names({patient: float(len(own)) for patient, own in of_patient.items()}, "labels", 2)
        return {slide: names[patient_of[slide]] for slide in targets}

    def check_training(self, split: str, targets: Sequence[Target]) -> None:
        values = as_array(targets)
        for place, column in enumerate(self.columns):
            if not {0.0, 1.0} <= set(values[:, place]):
                raise CohortError(
                    f"{split}: the known labels {column} of the training slides are all the same, or there are none",
                    "there is nothing to learn from",
                    "Leave this column out of train.target, or use another split",
                    code="constant-target",
                )

    def is_high(self, targets: Sequence[Target]) -> list[int]:
        number = np.nansum(as_array(targets), axis=1)
        above = number > np.median(number)
        return [int(each) for each in (above if above.any() else number >= np.median(number))]

    def describe(self, targets: Sequence[Target]) -> str:
        present = np.nansum(as_array(targets), axis=0)
        labels = ", ".join(f"{int(own)} {column}" for column, own in zip(self.columns, present, strict=True))
        return f"{len(targets)} slides: {labels}"

    # ------------------------------------------------------------------------------------------ networks

    def loss(self, raw_NC: Tensor, target_NT: Tensor) -> Tensor:
        from torch.nn import functional as F

        known = ~target_NT.isnan()
        each = F.binary_cross_entropy_with_logits(raw_NC, target_NT.nan_to_num(), reduction="none")
        return (each * known).sum() / known.sum().clamp(min=1)

    def score(self, raw_C: Tensor) -> Tensor:
        return raw_C.sigmoid()

    def evidence(self, values_NC: Tensor) -> Tensor:
        return values_NC

    # ------------------------------------------------------------------------------------------ evaluation

    def rank(self, scores_NK: Floats) -> Floats:
        return scores_NK.mean(axis=1)

    def choose(self, targets: Sequence[Target], scores_NK: Floats, where: str) -> tuple[float | None, str]:
        return None, "labels with a probability of 0.5 or more"

    def decision_words(self, score_K: Floats, cut: float | None) -> str:
        found = [column for column, value in zip(self.columns, score_K, strict=True) if value >= 0.5]
        return ", ".join(found) or "none"

    def primary_metric(self, scored: Scored) -> Interval:
        return self._macro(scored, resampled_auc)

    def compute(self, scored: Scored) -> dict[str, Callable[[], Any]]:
        def of_label(place: int) -> Callable[[], Interval]:
            def interval() -> Interval:
                label, score, known = _label(scored, place)
                patients = np.array(scored.patients)[known]
                return auc_interval(label, score, groups=patients, level=scored.evaluate.confidence)

            return interval

        return {
            "macro_auc": lambda: self.primary_metric(scored),
            "macro_ap": lambda: {"value": self._mean(scored, average_precision)},
            "macro_f1": lambda: {"value": self._mean(scored, _f1)},
            **{f"auc {column}": of_label(place) for place, column in enumerate(self.columns)},
        }

    def _mean(self, scored: Scored, metric: Callable[[Any, Any], float]) -> float:
        values = [metric(label, score) for label, score, _ in _defined(scored)]
        return float(np.mean(values))

    def _macro(self, scored: Scored, resampled: Callable[..., Callable[[Floats], Floats]]) -> Interval:
        return patient_bootstrap(scored, self._resampled(scored, scored.scores, resampled))

    def _resampled(
        self, scored: Scored, scores_NK: Floats, resampled: Callable[..., Callable[[Floats], Floats]]
    ) -> Callable[[Floats], Floats]:
        parts: list[tuple[Any, Callable[[Floats], Floats]]] = []
        for place, (label, _, known) in enumerate(_labels(scored)):
            if len(set(label)) == 2:
                parts.append((known, resampled(label, scores_NK[known, place])))
        _check_any(len(parts))

        def mean(drawn_RN: Floats) -> Floats:
            values = np.array([part(drawn_RN[:, known]) for known, part in parts])
            defined = ~np.isnan(values)  # a resample may lack a label, or all of them
            with np.errstate(invalid="ignore"):
                return np.where(defined, values, 0.0).sum(axis=0) / defined.sum(axis=0)

        return mean

    def validation_metric(self, targets: Sequence[Target], scores_NK: Floats) -> float | None:
        patients = tuple(map(str, range(len(targets))))
        scored = Scored(as_array(targets), scores_NK, (), patients, None, as_array(targets), NO_SETTINGS)
        try:
            return float(self._resampled(scored, scores_NK, resampled_auc)(np.ones((1, len(targets))))[0])
        except MetricError:
            return None

    def paired(self, scored: Scored, baseline: Floats) -> tuple[Interval, str, float]:
        own, other = (self._resampled(scored, each, resampled_auc) for each in (scored.scores, baseline))
        difference, p_value = paired_bootstrap(scored, own, other)
        return difference, "paired bootstrap of the macro AUC over patients", p_value

    def by_patient(self, targets_NT: Floats, scores_NK: Floats) -> tuple[Floats, Floats]:
        known = ~np.isnan(targets_NT).all(axis=0)
        present = np.full(targets_NT.shape[1], np.nan)
        present[known] = np.nanmax(targets_NT[:, known], axis=0)
        return present, scores_NK.max(axis=0)


NO_SETTINGS: Any = None
"""In place of settings of the evaluation, where no interval is computed."""


def _label(scored: Scored, place: int) -> tuple[Any, Floats, Any]:
    """Return labels and scores of the slides on which a label is known, and which these are."""
    known = ~np.isnan(scored.targets[:, place])
    return scored.targets[known, place].astype(np.int64), scored.scores[known, place], known


def _labels(scored: Scored) -> list[tuple[Any, Floats, Any]]:
    return [_label(scored, place) for place in range(scored.targets.shape[1])]


def _defined(scored: Scored) -> list[tuple[Any, Floats, Any]]:
    """Return the labels that occur and are absent; MetricError if there is none."""
    found = [each for each in _labels(scored) if len(set(each[0])) == 2]
    _check_any(len(found))
    return found


def _check_any(number: int) -> None:
    if not number:
        raise MetricError(
            "no label is both present and absent in these slides",
            "the mean over labels is undefined",
            "Use more slides",
            code="one-class",
        )


def _f1(label: Any, score: Floats) -> float:
    called = score >= 0.5
    return float(2 * (called & (label == 1)).sum() / (called.sum() + label.sum()))
