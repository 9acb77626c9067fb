"""A continuous value: one output, trained by squared error on targets that are standardized with the training slides.

The score is the value in the target's own unit. By patient it is the mean over the slides, of target and score.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
from scipy.special import stdtr, stdtrit  # pyright: ignore[reportMissingTypeStubs]

from selfvitmil.cohort.table import SlideRow
from selfvitmil.errors import CohortError
from selfvitmil.metrics import Interval
from selfvitmil.metrics import regression as metrics
from selfvitmil.outcomes.base import Floats, Outcome, Scored, Target, as_array, parse_number, quantile_names

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Continuous(Outcome):
    """A number per slide."""

    center: float = 0.0
    """Mean of the training slides' values."""
    scale: float = 1.0
    """Their standard deviation."""

    kind: ClassVar[str] = "continuous"
    score_words: ClassVar[str] = "predicted value, in the target's unit"
    poles: ClassVar[tuple[str, str]] = ("a low value", "a high value")
    rank_words: ClassVar[str] = "predicted value"
    plots: ClassVar[tuple[str, ...]] = ("scatter", "bland_altman")
    primary: ClassVar[str] = "mae"
    primary_words: ClassVar[str] = "MAE"
    higher_is_better: ClassVar[bool] = False
    shown_metrics: ClassVar[Mapping[str, str]] = {
        "mae": "MAE",
        "r2": "R²",
        "pearson": "Pearson",
        "spearman": "Spearman",
    }

    @property
    def target_names(self) -> tuple[str, ...]:
        return ("value",)

    @property
    def score_names(self) -> tuple[str, ...]:
        return ("predicted",)

    @property
    def num_outputs(self) -> int:
        return 1

    # ------------------------------------------------------------------------------------------ targets

    def parse(self, row: SlideRow) -> Target | None:
        value = parse_number(row, self.columns[0])
        return None if value is None else (value,)

    def strata(self, targets: Mapping[str, Target], patient_of: Mapping[str, str]) -> dict[str, str]:
        values: dict[str, list[float]] = defaultdict(list)
        for slide, (value,) in targets.items():
            values[patient_of[slide]].append(value)
        names = quantile_names({patient: float(np.mean(own)) for patient, own in values.items()}, "quantile", 2)
        return {slide: names[patient_of[slide]] for slide in targets}

    def check_training(self, split: str, targets: Sequence[Target]) -> None:
        if len(set(targets)) < 2:
            raise CohortError(
                f"{split}: all training slides have the same {self.columns[0]}",
                "there is nothing to learn from",
                "Use another split, or another target",
                code="constant-target",
            )

    def fitted(self, targets: Sequence[Target]) -> Self:
        values = as_array(targets)[:, 0]
        return replace(self, center=float(values.mean()), scale=float(values.std()) or 1.0)

    def encoded(self, target: Target) -> Target:
        return ((target[0] - self.center) / self.scale,)

    def is_high(self, targets: Sequence[Target]) -> list[int]:
        values = as_array(targets)[:, 0]
        return [int(value > np.median(values)) for value in values]

    def describe(self, targets: Sequence[Target]) -> str:
        values = as_array(targets)[:, 0]
        return f"{len(values)} slides, {values.min():g} to {values.max():g}, mean {values.mean():.4g}"

    # ------------------------------------------------------------------------------------------ networks

    def loss(self, raw_NC: Tensor, target_NT: Tensor) -> Tensor:
        return (raw_NC - target_NT).square().mean()

    def score(self, raw_C: Tensor) -> Tensor:
        return raw_C * self.scale + self.center

    # ------------------------------------------------------------------------------------------ evaluation

    def primary_metric(self, scored: Scored) -> Interval:
        return metrics.mae(scored.targets[:, 0], scored.scores[:, 0], **_drawn(scored))

    def compute(self, scored: Scored) -> dict[str, Callable[[], Any]]:
        value, predicted, drawn = scored.targets[:, 0], scored.scores[:, 0], _drawn(scored)
        return {
            "mae": lambda: metrics.mae(value, predicted, **drawn),
            "rmse": lambda: metrics.rmse(value, predicted, **drawn),
            "r2": lambda: metrics.r2(value, predicted, **drawn),
            "pearson": lambda: metrics.pearson(value, predicted, **drawn),
            "spearman": lambda: metrics.spearman(value, predicted, **drawn),
        }

    def validation_metric(self, targets: Sequence[Target], scores_NK: Floats) -> float | None:
        return float(np.abs(as_array(targets)[:, 0] - scores_NK[:, 0]).mean())

    def skill(self, metric: float) -> float:
        """Return 1 - MAE / standard deviation of the training slides' values."""
        return 1 - metric / self.scale

    def paired(self, scored: Scored, baseline: Floats) -> tuple[Interval, str, float]:
        """Return the difference in MAE and a paired t-test of the patients' mean absolute errors."""
        value, level = scored.targets[:, 0], scored.evaluate.confidence
        gain = np.abs(scored.scores[:, 0] - value) - np.abs(baseline[:, 0] - value)
        patients = np.array(scored.patients)
        means = np.array([gain[patients == patient].mean() for patient in np.unique(patients)])
        difference, degrees = float(means.mean()), len(means) - 1
        if degrees < 1:
            return Interval(difference, -np.inf, np.inf, "one patient", level), "none", float("nan")
        error = float(means.std(ddof=1) / np.sqrt(len(means)))
        reach = float(stdtrit(degrees, 0.5 + level / 2)) * error
        p_value = 1.0 if error == 0 else float(2 * stdtr(degrees, -abs(difference) / error))
        interval = Interval(difference, difference - reach, difference + reach, "Student's t over patients", level)
        return interval, "paired t-test of absolute errors over patients", p_value


def _drawn(scored: Scored) -> dict[str, Any]:
    evaluate = scored.evaluate
    drawn = {"level": evaluate.confidence, "resamples": evaluate.bootstrap, "seed": evaluate.seed}
    return {**drawn, "groups": scored.patients}
