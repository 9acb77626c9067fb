"""What the label-free quality of a pretraining run says about the run, in one plain sentence.

Quality is measured now and then while an encoder is trained: chance-corrected agreement of the neighbours of two views
of a tile, 0 for random embeddings, 1 where the view makes no difference. Two measurements differ where they are more
than `CLEARLY` standard errors of their difference apart. All of them see the same tiles, so this standard error, which
takes them as independent, is too large, and small differences count as none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

CLEARLY = 2.0
"""Standard errors beyond which a difference counts."""
END_SHARE = 0.25
"""Share of the run, at its end, over which quality must not have risen to have levelled off."""
FEWEST = 4
"""Measurements from which on a course can be told."""
COLLAPSED_RANK = 1.5
"""Effective rank of the embeddings of the measured tiles below which they all point one way."""


class Course(Enum):
    """How quality went on."""

    COLLAPSED = "collapsed"
    FELL = "fell"
    IMPROVING = "improving"
    LEVELLED_OFF = "levelled off"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Assessment:
    """The course of a run, and the sentence for people."""

    course: Course
    sentence: str


class Measurement(NamedTuple):
    """Quality of the weights after so many steps."""

    steps: int
    quality: float
    error: float
    """Standard error of the quality."""
    rank: float | None = None
    """Effective rank of the embeddings, where it was measured."""


def measurements(lines: Sequence[Mapping[str, Any]]) -> list[Measurement]:
    """The measurements among lines of `metrics.jsonl`; none of encoders that were trained without them."""
    found: list[Measurement] = []
    for line in lines:
        values = [_number(line.get(key)) for key in ("step", "quality", "quality_se", "sample_rank")]
        step, quality, error, rank = values
        if step is not None and quality is not None and error is not None:
            found.append(Measurement(int(step) + 1, quality, error, rank))
    return found


def assess(measured: Sequence[Measurement], kept_step: int | None = None, warmup_steps: int = 0) -> Assessment | None:
    """Say what became of the run; None where nothing was measured.

    `kept_step` is the number of steps after which the weights of the encoder were taken, None for the last ones.
    Measurements before `warmup_steps` do not count: an untrained network compares colours, which views share.
    """
    if not measured:
        return None
    kept = _kept(measured, kept_step)
    if kept.quality <= CLEARLY * kept.error or (kept.rank is not None and kept.rank < COLLAPSED_RANK):
        return Assessment(Course.COLLAPSED, "The features collapsed: do not use this encoder.")
    trained = [one for one in measured if one.steps >= warmup_steps]
    if len(trained) < FEWEST:
        words = f"Quality was measured {len(trained)} times after the warm-up: too few to tell whether more steps help."
        return Assessment(Course.UNKNOWN, words)
    best = max(trained, key=lambda one: one.quality)
    after = [one for one in trained if one.steps > best.steps][-2:]
    if after and all(_is_better(best, one) for one in after):
        return Assessment(Course.FELL, _fell_words(best, kept))
    return _end_of(trained, kept)


def _kept(measured: Sequence[Measurement], kept_step: int | None) -> Measurement:
    """The last measurement up to the kept weights."""
    before = [one for one in measured if kept_step is None or one.steps <= kept_step]
    return before[-1] if before else measured[0]


def _fell_words(best: Measurement, kept: Measurement) -> str:
    if _is_better(best, kept):
        return (
            f"Quality fell after step {best.steps:,} and the later, worse weights were kept: train again with "
            f"--pretrain.steps {best.steps}."
        )
    return f"Quality fell after step {best.steps:,}; the weights of step {kept.steps:,} were kept."


def _end_of(trained: Sequence[Measurement], kept: Measurement) -> Assessment:
    """Whether quality rose to the end or levelled off before.

    It is level from the first measurement on after which no rise shows. That may be for lack of measurements: so the
    level must last for a while, and the rise before it must have been steeper.
    """
    level = next(k for k in range(len(trained)) if not _rises_from(trained[k:]))
    last, since = trained[-1].steps, trained[level].steps
    if last - since < END_SHARE * last or not _slows_at(trained, level):
        words = "The encoder was still improving when training ended: more steps may help."
        return Assessment(Course.IMPROVING, words)
    state = f"has levelled off since step {since:,}" if level else f"has not risen since step {since:,}"
    which = f" (the weights of step {kept.steps:,} were kept)" if kept.steps < last else ""
    return Assessment(Course.LEVELLED_OFF, f"Quality {state}{which}: longer training is unlikely to help.")


def _rises_from(ahead: Sequence[Measurement]) -> bool:
    """Whether quality gets clearly better after the first of these: in one of them, or by their trend."""
    trend = _slope(ahead)
    by_trend = len(ahead) >= FEWEST and trend.value > CLEARLY * trend.error
    return by_trend or any(_is_better(one, ahead[0]) for one in ahead[1:])


def _slows_at(trained: Sequence[Measurement], level: int) -> bool:
    """Whether quality rose more steeply before a measurement than, over as many at most, after it."""
    after = trained[level:]
    before, later = _slope(trained[max(level - len(after), 0) : level + 1]), _slope(after)
    return level == 0 or before.value - later.value > math.hypot(before.error, later.error)


def _is_better(one: Measurement, other: Measurement) -> bool:
    return one.quality - other.quality > CLEARLY * math.hypot(one.error, other.error)


class Slope(NamedTuple):
    """Rise per step, and its standard error."""

    value: float
    error: float


def _slope(measured: Sequence[Measurement]) -> Slope:
    """Of the line through the measurements by weighted least squares; with one alone its error is infinite."""
    weights = [1 / max(one.error, 1e-9) ** 2 for one in measured]
    centre = sum(weight * one.steps for weight, one in zip(weights, measured, strict=True)) / sum(weights)
    spread = sum(weight * (one.steps - centre) ** 2 for weight, one in zip(weights, measured, strict=True))
    rise = sum(weight * (one.steps - centre) * one.quality for weight, one in zip(weights, measured, strict=True))
    return Slope(rise / spread, 1 / math.sqrt(spread)) if spread > 0 else Slope(0.0, math.inf)


def _number(value: Any) -> float | None:
    told = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if told else None
