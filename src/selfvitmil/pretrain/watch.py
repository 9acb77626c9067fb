"""Which weights of a run are kept, and whether it goes on: decided by the quality of `quality`, noise accounted for.

All evaluations see the same tiles, so two of them are compared tile by tile: the standard error is that of the mean
*difference*, which is smaller than that of either. The evaluation with the best quality so far is the peak.

* Kept are the latest weights that are not worse than the peak by more than one standard error. Later weights are
  preferred as long as the measure cannot tell them from the best, since a falling learning rate improves more than the
  measure sees. Everything is compared with the peak and not with what is kept, or else many small steps downhill would
  pass unnoticed.
* An evaluation is low where it is worse than the peak by more than three standard errors and by more than a tenth of
  the peak. Two low ones in a row raise an alarm. Where they last for a fifth of the run, and the last is no better than
  the first of them, the run ends early.
* Evaluations before the end of the warm-up count for neither: an untrained network compares colours and edges, which
  views share, and so may start with a quality that a sound run passes later.

Under torchrun the first process measures and decides, the others wait for its decision.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor

from selfvitmil.encoder import Encoder
from selfvitmil.pretrain.quality import Measured, Plan, Sample, standard_error

KEEP_WITHIN = 1.0
"""Standard errors by which kept weights may be worse than the best."""
LOW_BEYOND = 3.0
"""Standard errors by which a low evaluation is worse than the best."""
LOW_SHARE = 0.1
"""Share of the best quality by which a low evaluation is worse at least."""
ALARM_AFTER = 2
"""Low evaluations in a row that raise an alarm."""
FEWEST_LOW = 3
"""Low evaluations in a row that end a run, at least."""


@dataclass(frozen=True)
class Ending:
    """How a run ended and which of its weights are the encoder. Steps are counted from 1; no quality, not measured."""

    total_steps: int
    """Steps that the settings ask for."""
    ended_step: int
    """Steps that were done: fewer where the run was stopped early."""
    kept_step: int
    """The step after which the weights of the encoder were taken."""
    kept_quality: float | None = None
    best_quality: float | None = None
    last_quality: float | None = None

    @property
    def stopped_early(self) -> bool:
        return self.ended_step < self.total_steps

    @property
    def words(self) -> str:
        """What a reader should know; nothing where the last weights of the whole run were kept."""
        kept = f"kept the weights of step {self.kept_step:,}"
        if self.stopped_early:
            return (
                f"stopped early at step {self.ended_step:,} of {self.total_steps:,}: quality fell from "
                f"{self.best_quality:.2f} to {self.last_quality:.2f}; {kept}"
            )
        if self.kept_step < self.ended_step:
            return f"{kept}, whose quality is {self.kept_quality:.2f} ({self.last_quality:.2f} at the end)"
        return ""


@dataclass
class Course:
    """The evaluations of a run so far, as far as decisions need them. Pure: it knows neither weights nor files."""

    patience: int
    """Low evaluations in a row that end the run."""
    first_step: int
    """Evaluations before this step do not count."""
    peak: float | None = None
    peak_N: Tensor | None = None
    """Agreement of every tile at the peak."""
    kept_step: int | None = None
    kept_quality: float | None = None
    last_quality: float | None = None
    low: int = 0
    """Low evaluations in a row."""
    first_low: float = 0.0
    """Quality of the first of these."""
    fell: bool = False
    """Whether the quality stayed low for so long that training on is in vain."""

    def add(self, step: int, measured: Measured, groups_N: Tensor) -> bool:
        """Take in the evaluation after so many steps; whether its weights are to be kept."""
        quality = self.last_quality = measured.quality
        if step < self.first_step:
            return False
        if self.peak is None or self.peak_N is None or quality >= self.peak:
            self.peak, self.peak_N, self.low = quality, measured.agreement_N, 0
            return self._keep(step, quality)
        fall = self.peak - quality
        error = standard_error(self.peak_N - measured.agreement_N, groups_N)
        if fall > LOW_BEYOND * error and fall > LOW_SHARE * self.peak:
            self.first_low = quality if self.low == 0 else self.first_low
            self.low += 1
            self.fell = self.fell or (self.low >= self.patience and quality <= self.first_low)
        else:
            self.low = 0
        return self._keep(step, quality) if fall <= KEEP_WITHIN * error else False

    def _keep(self, step: int, quality: float) -> bool:
        self.kept_step, self.kept_quality = step, quality
        return True

    @property
    def alarm(self) -> str | None:
        """What is wrong at the last evaluation."""
        if self.low < ALARM_AFTER or self.peak is None or self.last_quality is None:
            return None
        return f"the quality of the embeddings fell from {self.peak:.2f} to {self.last_quality:.2f}"


def patience_of(plan: Plan) -> int:
    """Low evaluations that make a fifth of the run."""
    return max(FEWEST_LOW, round(plan.evaluations / 5))


@dataclass
class Watch:
    """Measures a run now and then, holds the weights to keep, and says when to end."""

    plan: Plan | None
    """None where the run is too short to be measured."""
    course: Course
    remedy: str
    """What to change where the quality falls."""
    keeps: bool
    """Whether the best weights are kept (`pretrain.keep`)."""
    stops: bool
    """Whether the run ends early when its quality fell (`pretrain.stop_early`)."""
    sample: Sample | None = None
    """Only in the process that measures."""
    group: Any = None
    """Processes that wait for the decision; None where there is one process."""
    kept: dict[str, Tensor] = field(default_factory=dict)
    """Weights of the network of `course.kept_step`, on the CPU."""

    def is_due(self, step: int) -> bool:
        """Whether the weights after so many steps are to be measured."""
        return self.plan is not None and self.plan.is_due(step)

    @property
    def ends(self) -> bool:
        """Whether the run is to end before its last step."""
        return self.stops and self.course.fell

    def look(self, encoder: Encoder, step: int) -> dict[str, Any]:
        """Measure and decide; in the first process numbers for the line of metrics, else nothing."""
        found: dict[str, Any] = {}
        if self.sample is not None:
            measured = self.sample.measure(encoder)
            if self.course.add(step, measured, self.sample.groups_N) and self.keeps:
                weights = encoder.backbone.state_dict()
                self.kept = {name: value.detach().to("cpu", copy=True) for name, value in weights.items()}
            found = _numbers_of(measured)
            if self.course.alarm:
                found["alarm"] = f"{self.course.alarm}. {self.remedy}"
        if self.group is not None:
            decided = [getattr(self.course, name) for name in _DECIDED]
            dist.broadcast_object_list(decided, src=0, group=self.group)
            for name, value in zip(_DECIDED, decided, strict=True):
                setattr(self.course, name, value)
        return found

    def ending(self, step: int, total_steps: int) -> Ending:
        """How the run ends after so many steps."""
        own = self.course
        qualities = {"best_quality": own.peak, "last_quality": own.last_quality}
        if self.keeps and own.kept_step is not None:
            return Ending(total_steps, step, own.kept_step, own.kept_quality, **qualities)
        return Ending(total_steps, step, step, own.last_quality, **qualities)

    def state(self) -> dict[str, Any]:
        """What a resumed run needs to decide alike."""
        return {"course": asdict(self.course), "kept": self.kept}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from what `state` gave."""
        self.course, self.kept = Course(**state["course"]), state["kept"]


_DECIDED = ("peak", "kept_step", "kept_quality", "last_quality", "fell")
"""What all processes know of the course."""


def _numbers_of(measured: Measured) -> dict[str, float]:
    return {
        "quality": measured.quality,
        "quality_se": measured.quality_se,
        "alignment": measured.alignment,
        "uniformity": measured.uniformity,
        "sample_rank": measured.rank,
    }
