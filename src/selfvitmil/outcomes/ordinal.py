"""Ordered levels, such as grades: one output per step between neighbouring levels.

Each output is the logit that the slide is above a level, trained by cross-entropy (Frank & Hall 2001; Niu et al. 2016,
"Ordinal regression with multiple output CNN"). The score is these probabilities, made to fall from level to level. The
predicted level is the number of steps with a probability of one half or more, and slides are ranked by the sum. By
patient it is the highest level of the slides.

The order of levels is that of `train.levels`; numbers need none.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from selfvitmil.cohort.table import Cohort, SlideRow, listing
from selfvitmil.errors import CohortError, ConfigError
from selfvitmil.metrics import Interval, regression
from selfvitmil.metrics import ordinal as metrics
from selfvitmil.outcomes.base import (
    Floats,
    Outcome,
    Scored,
    Target,
    as_array,
    check_columns,
    paired_bootstrap,
    quantile_names,
)  # fmt: skip

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Ordinal(Outcome):
    """One of several levels in an order; targets are the places of the levels, from 0."""

    levels: tuple[str, ...] = ()
    """From the lowest to the highest."""

    kind: ClassVar[str] = "ordinal"
    score_words: ClassVar[str] = "probability of being above each level"
    poles: ClassVar[tuple[str, str]] = ("a low level", "a high level")
    primary: ClassVar[str] = "kappa"
    primary_words: ClassVar[str] = "quadratic weighted kappa"
    chance: ClassVar[float] = 0.0
    shown_metrics: ClassVar[Mapping[str, str]] = {
        "kappa": "kappa",
        "accuracy": "accuracy",
        "within_one": "within one",
        "spearman": "Spearman",
    }
    rank_words: ClassVar[str] = "expected steps above the lowest level:"
    plots: ClassVar[tuple[str, ...]] = ("confusion",)
    patient_words: ClassVar[str] = "highest level of the patient's slides"

    @classmethod
    def of(cls, columns: tuple[str, ...], cohort: Cohort, levels: tuple[str, ...]) -> Self:
        """Return the outcome with the given levels, or the numbers of the column; ConfigError for text without."""
        (column,) = columns
        check_columns(columns, cohort)
        if not levels:
            cells = {cell for row in cohort.rows if (cell := row.value(column)) is not None}
            try:
                levels = tuple(sorted(cells, key=float))
            except ValueError:
                raise ConfigError(
                    f"train.outcome 'ordinal': the order of {column} is not known",
                    f"its cells are not numbers: {listing(sorted(cells))}",
                    f"Set train.levels from the lowest to the highest, for instance {' '.join(sorted(cells)[:3])}",
                    code="unknown-order",
                ) from None
        return cls(columns, levels)

    @property
    def target_names(self) -> tuple[str, ...]:
        return ("level",)

    @property
    def score_names(self) -> tuple[str, ...]:
        return tuple(f"above_{level}" for level in self.levels[:-1])

    @property
    def num_outputs(self) -> int:
        return len(self.levels) - 1

    @property
    def groups(self) -> tuple[str, ...]:
        return self.levels

    # ------------------------------------------------------------------------------------------ targets

    def parse(self, row: SlideRow) -> Target | None:
        cell = row.value(self.columns[0])
        if cell is None:
            return None
        if cell not in self.levels:
            raise CohortError(
                f"{row.slide}: {self.columns[0]} is {cell!r}",
                f"the levels are {listing(self.levels)}",
                "Correct it, leave it empty to exclude the slide, or name all levels in train.levels",
                code="unknown-level",
            )
        return (float(self.levels.index(cell)),)

    def strata(self, targets: Mapping[str, Target], patient_of: Mapping[str, str]) -> dict[str, str]:
        levels: dict[str, list[float]] = defaultdict(list)
        for slide, (level,) in targets.items():
            levels[patient_of[slide]].append(level)
        names = quantile_names({patient: max(own) for patient, own in levels.items()}, "quantile", 2)
        return {slide: names[patient_of[slide]] for slide in targets}

    def check_training(self, split: str, targets: Sequence[Target]) -> None:
        missing = [level for place, level in enumerate(self.levels) if (float(place),) not in set(targets)]
        if len(self.levels) - len(missing) < 2:
            raise CohortError(
                f"{split}: all training slides have the same {self.columns[0]}",
                "there is nothing to learn from",
                "Use another split, or another target",
                code="constant-target",
            )

    def is_high(self, targets: Sequence[Target]) -> list[int]:
        values = as_array(targets)[:, 0]
        above = values > np.median(values)
        return [int(each) for each in (above if above.any() else values >= np.median(values))]

    def describe(self, targets: Sequence[Target]) -> str:
        counts = Counter(self.levels[int(level)] for (level,) in targets)
        return f"{len(targets)} slides: {', '.join(f'{counts[level]} {level}' for level in self.levels)}"

    # ------------------------------------------------------------------------------------------ networks

    def loss(self, raw_NC: Tensor, target_NT: Tensor) -> Tensor:
        import torch
        from torch.nn import functional as F

        step_C = torch.arange(raw_NC.shape[1], device=raw_NC.device)
        above_NC = (target_NT > step_C).to(raw_NC.dtype)
        return F.binary_cross_entropy_with_logits(raw_NC, above_NC)

    def score(self, raw_C: Tensor) -> Tensor:
        return raw_C.sigmoid().cummin(-1).values

    # ------------------------------------------------------------------------------------------ evaluation

    def rank(self, scores_NK: Floats) -> Floats:
        return scores_NK.sum(axis=1)

    def decide(self, scores_NK: Floats, cut: float | None) -> list[int | None]:
        return [int(number) for number in (scores_NK >= 0.5).sum(axis=1)]

    def choose(self, targets: Sequence[Target], scores_NK: Floats, where: str) -> tuple[float | None, str]:
        return None, "steps with a probability of 0.5 or more"

    def _called(self, scores_NK: Floats) -> Any:
        return np.array(self.decide(scores_NK, None), dtype=np.int64)

    def primary_metric(self, scored: Scored) -> Interval:
        level = scored.targets[:, 0].astype(np.int64)
        called, number, confidence = self._called(scored.scores), len(self.levels), scored.evaluate.confidence
        return metrics.quadratic_weighted_kappa(level, called, number, groups=scored.patients, level=confidence)

    def compute(self, scored: Scored) -> dict[str, Callable[[], Any]]:
        level, evaluate = scored.targets[:, 0].astype(np.int64), scored.evaluate
        called = self._called(scored.scores)

        def agreement() -> metrics.OrdinalAgreement:
            confidence = evaluate.confidence
            return metrics.ordinal_agreement(level, called, len(self.levels), groups=scored.patients, level=confidence)

        drawn = {"level": evaluate.confidence, "resamples": evaluate.bootstrap, "seed": evaluate.seed}
        return {
            "kappa": lambda: self.primary_metric(scored),
            "accuracy": lambda: agreement().exact,
            "within_one": lambda: agreement().within_one,
            "mean_distance": lambda: {"value": agreement().mean_distance},
            "spearman": lambda: regression.spearman(
                level.astype(np.float64), self.rank(scored.scores), groups=scored.patients, **drawn
            ),
        }

    def paired(self, scored: Scored, baseline: Floats) -> tuple[Interval, str, float]:
        level = scored.targets[:, 0]

        def kappa(scores_NK: Floats) -> Callable[[Floats], Floats]:
            called = self._called(scores_NK).astype(np.float64)
            return lambda drawn_RN: resampled_kappa(level, called, drawn_RN)

        difference, p_value = paired_bootstrap(scored, kappa(scored.scores), kappa(baseline))
        return difference, "paired bootstrap of kappa over patients", p_value

    def by_patient(self, targets_NT: Floats, scores_NK: Floats) -> tuple[Floats, Floats]:
        return targets_NT.max(axis=0), scores_NK.max(axis=0)


def resampled_kappa(level: Floats, called: Floats, drawn_RN: Floats) -> Floats:
    """Return the quadratic weighted kappas (R,) of resamples; `drawn_RN` is how often each slide was drawn."""
    weight = drawn_RN / drawn_RN.sum(axis=1, keepdims=True)
    mean_level, mean_called = weight @ level, weight @ called
    spread = weight @ level**2 - mean_level**2 + weight @ called**2 - mean_called**2
    with np.errstate(invalid="ignore", divide="ignore"):
        return 1 - (weight @ (level - called) ** 2) / (spread + (mean_level - mean_called) ** 2)
