"""Outcomes that are planted in a synthetic cohort: what a model can find out about them is in the pixels.

A patient has a burden from 0 to 1, which decides how many lesions the slides have and how large they are. From what was
drawn follow, in columns of the tables:

    tumor_percent     share of the tissue's area within lesions, in percent: a continuous value
    grade             1, 2 or 3 by that share: ordered levels
    metastasis        whether the slide has lesions, and independent of it
    fibrosis          whether broad bands of collagen run through the node: two labels
    time, event       months of follow-up and whether the event happened (1) or follow-up ended before (0). The hazard
                      grows with the mean share of the patient's slides: log hazard = 0.15 * tumor_percent

Event times have a Weibull distribution (shape 2.5, scale 45 months without tumour), follow-up ends between 10 and 60
months after inclusion, whatever the tumour.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from selfvitmil.slides.synthetic.cohort import CohortSlide

LOG_HAZARD_PER_PERCENT = 0.15
SHAPE, SCALE_MONTHS = 2.5, 45.0
FOLLOW_UP_MONTHS = (10.0, 60.0)
GRADES = (5.0, 15.0)
"""Percent of tumour from which the grade is 2, and 3."""
GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True)
class Burden:
    """How much tumour a slide has, from 0 to 1."""

    share: float

    def lesions(self, short_um: float) -> tuple[int, tuple[float, float]]:
        """Return number and range of diameters for a slide whose shorter side has `short_um` microns."""
        if self.share <= 0:
            return 0, (40.0, 40.0)
        largest = max((0.12 + 0.4 * self.share) * short_um, 45.0)
        return 1 + int(2.999 * self.share), (max(40.0, 0.6 * largest), largest)


def burden_of(seed: int, patient: int, slide_seed: int, positives: float) -> Burden:
    """Return the burden of a patient's slide; `positives` is the share of patients with any.

    Patients are spread evenly over all burdens (golden ratio), slides of a patient differ by a tenth.
    """
    start = float(np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(0, 3))).uniform())
    place = (start + patient * GOLDEN) % 1.0 - (1 - positives)
    if place <= 0 or positives <= 0:
        return Burden(0.0)
    own = np.random.default_rng(np.random.SeedSequence(slide_seed, spawn_key=(3,)))
    return Burden(float(np.clip(place / positives + own.normal(0, 0.05), 0.02, 1.0)))


def has_fibrosis(slide_seed: int) -> bool:
    """Return whether a slide has fibrosis; half of all slides do."""
    return bool(np.random.default_rng(np.random.SeedSequence(slide_seed, spawn_key=(4,))).integers(2))


def planted_outcomes(slides: Sequence[CohortSlide]) -> dict[str, dict[str, str]]:
    """Return slide -> column -> cell, from the tumour that was drawn."""
    percent = {slide.name: tumor_percent(slide) for slide in slides}
    of_patient: dict[str, list[float]] = defaultdict(list)
    for slide in slides:
        of_patient[slide.plan.patient].append(percent[slide.name])
    seeds = {slide.plan.patient: slide.plan.seed for slide in reversed(slides)}
    rows: dict[str, dict[str, str]] = {}
    for slide in slides:
        plan, own = slide.plan, percent[slide.name]
        time, event = follow_up(seeds[plan.patient], float(np.mean(of_patient[plan.patient])))
        rows[slide.name] = {
            "time": f"{time:.1f}",
            "event": str(int(event)),
            "tumor_percent": f"{own:.2f}",
            "grade": str(1 + sum(own >= limit for limit in GRADES)),
            "metastasis": str(int(slide.positive)),
            "fibrosis": str(int(plan.fibrosis)),
        }
    return rows


def tumor_percent(slide: CohortSlide) -> float:
    """Return the area of the lesions in percent of the tissue's."""
    tissue = float(slide.tissue_mask.sum()) * slide.tissue_mpp**2
    return 100 * sum(polygon_area(contour) for contour in slide.lesions) * slide.mpp**2 / max(tissue, 1.0)


def polygon_area(contour: NDArray[np.float64]) -> float:
    x, y = contour.T
    return abs(float(np.dot(x, np.roll(y, -1)) - np.dot(y, np.roll(x, -1)))) / 2


def follow_up(seed: int, percent: float) -> tuple[float, bool]:
    """Return months and whether the event happened, by the random numbers of the patient's first slide."""
    generator = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(5,)))
    hazard = math.exp(LOG_HAZARD_PER_PERCENT * percent)
    event_time = SCALE_MONTHS * (generator.exponential() / hazard) ** (1 / SHAPE)
    end = generator.uniform(*FOLLOW_UP_MONTHS)
    return max(min(event_time, end), 0.1), event_time <= end
