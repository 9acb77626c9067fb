"""Time to event: Cox proportional hazards, and hazards of discrete intervals.

Columns `time` (any unit, positive) and `event` (1 if it happened then, 0 if follow-up ended before: right censoring).
Slides with a time of 0 or less are left out, each with a note: they were never at risk. `EVENTS` has the words that are
read as events, cBioPortal's among them; a note says what the words of a cohort are taken for.

`survival` trains one output, the log hazard ratio, by the negative log partial likelihood (Cox 1972) with Breslow's
rule for ties. The risk set of an event is the slides of one optimizer step with at least that time, so steps have many
bags. On validation slides it is the whole set. `survival-discrete` has one output per interval of time, the logit of
the hazard in it (Singer & Willett 1993; Zadeh & Schmid 2020); its loss needs one bag. Intervals are quantiles of the
training slides' event times.

The cut between low and high risk is the median risk of validation slides. By patient, risk is the mean over the slides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from selfvitmil.cohort.table import Cohort, SlideRow, listing
from selfvitmil.errors import CohortError, MetricError
from selfvitmil.metrics import Interval
from selfvitmil.metrics import survival as metrics
from selfvitmil.outcomes.base import (
    TWO_VALUED,
    Floats,
    Outcome,
    Scored,
    Target,
    as_array,
    parse_number,
    quantile_names,
    two_valued,
)

if TYPE_CHECKING:
    from torch import Tensor

INTERVALS = 4
"""Intervals of `survival-discrete`; fewer where there are few different event times."""
EVENT_MEANING = "an event is 1 (it happened) or 0 (censored), or a word for that such as Dead and Alive"
_HAPPENED = (
    "dead", "deceased", "died", "death", "event", "recurred", "recurrence", "relapse", "relapsed", "progressed",
    "progression", "recurred/progressed", "dead with tumor", "dead with tumour", "dead of disease",
)  # fmt: skip
_CENSORED = (
    "alive", "living", "censored", "diseasefree", "disease free", "disease-free", "no event", "no recurrence",
    "progression free", "progression-free", "alive or dead tumor free", "alive or dead tumour free",
)  # fmt: skip
MEANINGS = ("censored", "it happened")
_WORDS = {**TWO_VALUED, **dict.fromkeys(_HAPPENED, 1), **dict.fromkeys(_CENSORED, 0)}
EVENTS = _WORDS | {f"{event}:{word}": event for word, event in _WORDS.items() if not word[0].isdigit()}
"""Cells of the event column; cBioPortal writes `1:DECEASED`, `0:LIVING`."""


def cox_loss(risk_N: Tensor, time_N: Tensor, event_N: Tensor) -> Tensor:
    """Return the negative log partial likelihood per event, with Breslow's rule for ties; 0 without events."""
    import torch

    at_risk_NN = time_N[None, :] >= time_N[:, None]
    total_N = torch.where(at_risk_NN, risk_N[None, :], -torch.inf).logsumexp(1)
    return ((total_N - risk_N) * event_N).sum() / event_N.sum().clamp(min=1)


def hazard_loss(raw_NC: Tensor, interval_N: Tensor, event_N: Tensor) -> Tensor:
    """Return the negative log likelihood of discrete hazards: survived all intervals before, and the own one or not.

    A slide that is censored within an interval counts as at risk in the intervals before it.
    """
    import torch
    from torch.nn import functional as F

    place_C = torch.arange(raw_NC.shape[1], device=raw_NC.device)
    before_NC = (place_C[None, :] < interval_N[:, None]).to(raw_NC.dtype)
    own_NC = (place_C[None, :] == interval_N[:, None]).to(raw_NC.dtype)
    survived = (F.softplus(raw_NC) * before_NC).sum(1)
    happened = (F.softplus(-raw_NC) * own_NC).sum(1) * event_N
    return (survived + happened).mean()


@dataclass(frozen=True)
class Survival(Outcome):
    """Time to event by Cox's partial likelihood; the score is the log hazard ratio."""

    columns: tuple[str, ...] = ("time", "event")

    kind: ClassVar[str] = "survival"
    score_words: ClassVar[str] = "risk: log hazard ratio, higher means earlier events"
    poles: ClassVar[tuple[str, str]] = ("low risk", "high risk")
    rank_words: ClassVar[str] = "risk"
    plots: ClassVar[tuple[str, ...]] = ("kaplan_meier",)
    primary: ClassVar[str] = "c_index"
    primary_words: ClassVar[str] = "C-index"
    shown_metrics: ClassVar[Mapping[str, str]] = {
        "c_index": "C-index",
        "uno_c": "Uno's C",
        "auc_t": "AUC(t)",
        "hazard_ratio": "HR",
    }
    # Cox's loss ignores a constant that is added to all risks; intervals of time come from a split's training slides.
    is_absolute: ClassVar[bool] = False

    @property
    def target_names(self) -> tuple[str, ...]:
        return ("time", "event")

    @property
    def score_names(self) -> tuple[str, ...]:
        return ("risk",)

    @property
    def num_outputs(self) -> int:
        return 1

    @property
    def needs_batch(self) -> bool:
        return True

    @property
    def groups(self) -> tuple[str, ...]:
        return ("low", "high")

    # ------------------------------------------------------------------------------------------ targets

    def parse(self, row: SlideRow) -> Target | None:
        time = parse_number(row, self.columns[0])
        event = two_valued(row, self.columns[1], EVENT_MEANING, "invalid-event", EVENTS)
        return None if time is None or event is None or time <= 0 else (time, float(event))

    def remarks(self, cohort: Cohort) -> tuple[str, ...]:
        time, event = self.columns
        cells = [(row, cell.casefold()) for row in cohort.rows if (cell := row.value(event)) is not None]
        words = sorted({word for _, word in cells if word in EVENTS and word not in TWO_VALUED})
        meanings = ", ".join(f"{word} = {EVENTS[word]} ({MEANINGS[EVENTS[word]]})" for word in words)
        never = [row.slide for row, _ in cells if (value := parse_number(row, time)) is not None and value <= 0]
        found = [f"{event}: {meanings}"] if words else []
        if never:
            what = f"{len(never)} slides have a {time} of 0 or less and are excluded, as they were never at risk"
            found.append(f"{what}: {listing(never)}. Correct the cells, if they are wrong")
        return tuple(found)

    def read(self, cohort: Any, table: str = "cohort.csv") -> dict[str, Target]:
        """Return the targets; CohortError also where slides of a patient have different ones."""
        targets = super().read(cohort, table)
        of_patient: dict[str, Target] = {}
        for row in cohort.rows:
            if row.slide not in targets:
                continue
            if of_patient.setdefault(row.patient, targets[row.slide]) != targets[row.slide]:
                raise CohortError(
                    f"patient {row.patient}: slides with different times or events",
                    "follow-up belongs to the patient",
                    f"Give all slides of a patient the same {' and '.join(self.columns)}",
                    code="conflicting-follow-up",
                )
        return targets

    def strata(self, targets: Mapping[str, Target], patient_of: Mapping[str, str]) -> dict[str, str]:
        times: dict[bool, dict[str, float]] = {True: {}, False: {}}
        for slide, (time, event) in targets.items():
            times[bool(event)][patient_of[slide]] = time
        least = 1 if all(times.values()) else 2
        names = quantile_names(times[True], "event", least) | quantile_names(times[False], "censored", least)
        return {slide: names[patient_of[slide]] for slide in targets}

    def check_training(self, split: str, targets: Sequence[Target]) -> None:
        if sum(event > 0 for _, event in targets) < 2:
            raise CohortError(
                f"{split}: fewer than two training slides have an event",
                "risks cannot be ordered without events",
                "Use another split, or add slides of patients with events",
                code="too-few-events",
            )

    def is_high(self, targets: Sequence[Target]) -> list[int]:
        """Return 1 where the Nelson-Aalen martingale residual is above its median: events earlier than expected."""
        time, event = as_array(targets).T
        step = event / np.array([(time >= own).sum() for own in time])
        residual = event - np.array([step[time <= own].sum() for own in time])
        return [int(value > np.median(residual)) for value in residual]

    def describe(self, targets: Sequence[Target]) -> str:
        time, event = as_array(targets).T
        return f"{len(time)} slides, {int(event.sum())} with event, median time {np.median(time):g}"

    # ------------------------------------------------------------------------------------------ networks

    def loss(self, raw_NC: Tensor, target_NT: Tensor) -> Tensor:
        return cox_loss(raw_NC[:, 0], target_NT[:, 0], target_NT[:, 1])

    def score(self, raw_C: Tensor) -> Tensor:
        return raw_C

    # ------------------------------------------------------------------------------------------ evaluation

    def primary_metric(self, scored: Scored) -> Interval:
        time, event = scored.targets.T
        return metrics.harrell_c(time, event, self.rank(scored.scores), **_within(scored))

    def compute(self, scored: Scored) -> dict[str, Callable[[], Any]]:
        (time, event), risk = scored.targets.T, self.rank(scored.scores)
        known_time, known_event = scored.known.T
        level = scored.evaluate.confidence
        high = np.array([bool(each) for each in scored.decisions])
        fold = scored.folds

        def log_rank() -> dict[str, float]:
            return {"value": metrics.log_rank(time, event, high, strata=fold).p_value}

        def auc_t() -> Interval:
            times = metrics.evaluation_times(known_time, known_event, time, event)
            return metrics.time_dependent_auc(known_time, known_event, time, event, risk, times, **_within(scored)).mean

        return {
            "c_index": lambda: self.primary_metric(scored),
            "uno_c": lambda: metrics.uno_c(
                known_time, known_event, time, event, risk, _horizon(scored.known.T), **_within(scored)
            ),
            "auc_t": auc_t,
            "hazard_ratio": lambda: metrics.hazard_ratio(time, event, high, strata=fold, level=level),
            "log_rank_p": log_rank,
            "integrated_brier": lambda: self._integrated_brier(scored),
        }

    def _integrated_brier(self, scored: Scored) -> Interval:
        """Return the integrated Brier score of survival curves by Breslow's baseline of the validation slides."""
        if scored.validation is None:
            raise MetricError(
                "no survival curves",
                "risks become survival curves by the baseline hazard of validation slides, and there are none here",
                code="no-validation-slides",
            )
        (own_time, own_event), own_risk = scored.validation[0].T, self.rank(scored.validation[1])
        baseline = metrics.breslow_baseline(own_time, own_event, own_risk)
        (time, event), (known_time, known_event) = scored.targets.T, scored.known.T
        times = metrics.evaluation_times(known_time, known_event, time, event)
        survival_NT = baseline.survival(self.rank(scored.scores), times)
        return metrics.integrated_brier_score(
            known_time, known_event, time, event, survival_NT, times, groups=scored.patients,
            level=scored.evaluate.confidence,
        )  # fmt: skip

    def paired(self, scored: Scored, baseline: Floats) -> tuple[Interval, str, float]:
        time, event = scored.targets.T
        done = metrics.paired_c_test(time, event, self.rank(scored.scores), self.rank(baseline), **_within(scored))
        return done.difference, "paired test of Harrell's C (infinitesimal jackknife)", done.p_value

    def choose(self, targets: Sequence[Target], scores_NK: Floats, where: str) -> tuple[float | None, str]:
        return float(np.median(self.rank(scores_NK))), f"median risk of {where}"


@dataclass(frozen=True)
class DiscreteSurvival(Survival):
    """Time to event by hazards of intervals of time; the score is the hazard in each."""

    cuts: tuple[float, ...] = ()
    """Inner limits of the intervals, from training slides."""
    intervals: int = INTERVALS

    kind: ClassVar[str] = "survival-discrete"
    score_words: ClassVar[str] = "hazard in each interval of time; risk is minus the expected number survived"

    @property
    def score_names(self) -> tuple[str, ...]:
        return tuple(f"hazard_{k + 1}" for k in range(self.intervals))

    @property
    def num_outputs(self) -> int:
        return self.intervals

    @property
    def needs_batch(self) -> bool:
        return False

    def fitted(self, targets: Sequence[Target]) -> Self:
        time, event = as_array(targets).T
        inner = np.quantile(time[event > 0], np.linspace(0, 1, self.intervals + 1)[1:-1])
        return replace(self, cuts=tuple(inner.tolist()))

    def encoded(self, target: Target) -> Target:
        return float(np.searchsorted(self.cuts, target[0], side="left")), target[1]

    def loss(self, raw_NC: Tensor, target_NT: Tensor) -> Tensor:
        return hazard_loss(raw_NC, target_NT[:, 0], target_NT[:, 1])

    def score(self, raw_C: Tensor) -> Tensor:
        return raw_C.sigmoid()

    def rank(self, scores_NK: Floats) -> Floats:
        return -np.cumprod(1 - scores_NK, axis=1).sum(axis=1)

    def _integrated_brier(self, scored: Scored) -> Interval:
        del scored
        raise MetricError(
            "no survival curves in time",
            "intervals of time have other limits in every split; `survival` gives curves in time",
            code="no-survival-curves",
        )


def _within(scored: Scored) -> dict[str, Any]:
    return {"groups": scored.patients, "folds": scored.folds, "level": scored.evaluate.confidence}


def _horizon(known: Floats) -> float:
    """Return the time up to which censoring weights of the known slides are defined."""
    return float(known[0].max())
