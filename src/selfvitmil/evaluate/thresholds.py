"""Decision threshold and calibration of scores, chosen on labelled scores.

Both are chosen on validation slides, or on the test set under the `optimistic` protocol, and carry a text that says so.
A threshold applies to the uncalibrated score of the aggregator; calibration changes probabilities but not the ranking
of slides.

N slides, K columns of scores: one where there are two classes, else one per class.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import expit

from selfvitmil.errors import ConfigError, MetricError
from selfvitmil.metrics import Platt, Temperature, fit_platt, fit_temperature, to_logits, youden_threshold
from selfvitmil.settings import EvaluateSettings

Floats = NDArray[np.float64]
Where = Literal["validation", "TEST (optimistic)"]

LARGEST = "largest probability"


@dataclass(frozen=True)
class Choice:
    """Decision threshold and calibration, with their origin."""

    threshold: float | None
    """Scores from here on are positive; None with more than two classes, where the largest probability decides."""
    threshold_from: str
    calibration: Platt | Temperature | None
    calibration_from: str
    """For example `Platt scaling on validation`, or the reason why there is none."""

    def decide(self, scores_NK: Floats) -> NDArray[np.int64]:
        """Return the class index of each slide."""
        if self.threshold is None:
            return scores_NK.argmax(axis=1)
        return (scores_NK[:, 0] >= self.threshold).astype(np.int64)

    def calibrate(self, scores_NK: Floats) -> Floats | None:
        """Return calibrated probabilities in the columns of the scores; None without calibration."""
        if self.calibration is None:
            return None
        return self.calibration.apply(_logits(scores_NK)).reshape(scores_NK.shape)

    def to_json(self) -> dict[str, object]:
        fitted: Mapping[str, float] = vars(self.calibration) if self.calibration is not None else {}
        return {
            "threshold": self.threshold,
            "threshold_from": self.threshold_from,
            "calibration_from": self.calibration_from,
            "calibration": dict(fitted) or None,
        }


def check_choices(settings: EvaluateSettings, num_classes: int) -> None:
    """Raise ConfigError for a calibration that is undefined for this number of classes."""
    if settings.calibration == "platt" and num_classes > 1:
        raise ConfigError(
            f"evaluate.calibration 'platt' with {num_classes} classes",
            "Platt scaling is defined for a single probability",
            "Use evaluate.calibration 'temperature'",
        )


def choose(labels: Sequence[int], scores: ArrayLike, settings: EvaluateSettings, where: Where) -> Choice:
    """Return threshold and calibration chosen on labelled scores (N, K); `where` names the slides."""
    scores_NK = np.asarray(scores, dtype=np.float64)
    calibration, calibration_from = _calibration(labels, scores_NK, settings, where)
    if scores_NK.shape[1] > 1:
        return Choice(None, LARGEST, calibration, calibration_from)
    if settings.threshold == "youden":
        threshold = youden_threshold(labels, scores_NK[:, 0])
        return Choice(threshold, f"Youden on {where}", calibration, calibration_from)
    if isinstance(calibration, Platt):
        # The score that the calibration maps to 0.5; a temperature leaves 0.5 where it is.
        threshold = float(expit(-calibration.intercept / calibration.slope))
        return Choice(threshold, f"fixed 0.5 after {calibration_from}", calibration, calibration_from)
    return Choice(0.5, "fixed 0.5", calibration, calibration_from)


def _calibration(
    labels: Sequence[int], scores_NK: Floats, settings: EvaluateSettings, where: Where
) -> tuple[Platt | Temperature | None, str]:
    if settings.calibration == "none":
        return None, "none"
    fit, words = (fit_platt, "Platt") if settings.calibration == "platt" else (fit_temperature, "temperature")
    try:
        return fit(labels, _logits(scores_NK)), f"{words} scaling on {where}"
    except MetricError as error:
        return None, f"none: {error.reason}"


def _logits(scores_NK: Floats) -> Floats:
    """Return logits (N,) of one column of probabilities; of several columns their logarithms, inverted by a softmax."""
    if scores_NK.shape[1] == 1:
        return to_logits(scores_NK[:, 0])
    return np.log(np.clip(scores_NK, 1e-6, 1.0))
