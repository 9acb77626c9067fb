"""What is chosen by scores whose labels may be known: the threshold of a decision and the calibration of scores.

Both are chosen on validation slides, or on the test set itself under the `optimistic` protocol, and carry the words
that say so. A threshold always belongs to the score as the aggregator gives it; a calibration changes what a score
says as a probability, not how slides are ranked.

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
    """How scores become decisions and probabilities, and where that comes from."""

    threshold: float | None
    """Positive from here on; None with more than two classes, where the largest probability decides."""
    threshold_from: str
    calibration: Platt | Temperature | None
    calibration_from: str
    """For instance `Platt scaling on validation`, or why there is none."""

    def decide(self, scores_NK: Floats) -> NDArray[np.int64]:
        """Class index of each slide."""
        if self.threshold is None:
            return scores_NK.argmax(axis=1)
        return (scores_NK[:, 0] >= self.threshold).astype(np.int64)

    def calibrate(self, scores_NK: Floats) -> Floats | None:
        """Calibrated probabilities in the columns of the scores; None without a calibration."""
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
    """Refuse at the door what has no meaning for these classes."""
    if settings.calibration == "platt" and num_classes > 1:
        raise ConfigError(
            f"evaluate.calibration 'platt' with {num_classes} classes",
            "Platt scaling is for one probability",
            "Use evaluate.calibration 'temperature'",
        )


def choose(labels: Sequence[int], scores: ArrayLike, settings: EvaluateSettings, where: Where) -> Choice:
    """Threshold and calibration from the (N, K) scores of slides whose labels may be known; `where` names them."""
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
    """(N,) logits of one column of probabilities; of several their logarithms, which a softmax turns back."""
    if scores_NK.shape[1] == 1:
        return to_logits(scores_NK[:, 0])
    return np.log(np.clip(scores_NK, 1e-6, 1.0))
