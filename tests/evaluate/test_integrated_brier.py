"""The integrated Brier score of a survival evaluation: curves by the baseline of validation slides."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from helpers.error_codes import has_code
from selfvitmil import metrics
from selfvitmil.errors import MetricError
from selfvitmil.outcomes import Scored
from selfvitmil.outcomes.survival import DiscreteSurvival, Survival
from selfvitmil.settings import EvaluateSettings


def scored(seed: int = 0, number: int = 120) -> Scored:
    """Test and validation patients whose hazards are exp(risk)."""
    generator = np.random.default_rng(seed)
    risk = generator.normal(size=2 * number)
    death, end = generator.exponential(np.exp(-risk)), generator.uniform(0.1, 3, 2 * number)
    targets = np.stack([np.minimum(death, end), death <= end], axis=1).astype(float)
    test, val = (targets[part] for part in (slice(0, number), slice(number, None)))
    names = tuple(map(str, range(number)))
    groups = tuple(int(each > 0) for each in risk[:number])
    return Scored(
        test, risk[:number, None], groups, names, None, targets, EvaluateSettings(), (val, risk[number:, None])
    )


def test_score_is_that_of_the_true_curves_or_nearly_and_better_than_without_a_model():
    given = scored()
    found = Survival().compute(given)["integrated_brier"]()
    (time, event), (known_time, known_event) = given.targets.T, given.known.T
    times = metrics.evaluation_times(known_time, known_event, time, event)
    true = np.exp(-np.exp(given.scores[:, :1]) * times)
    ideal = metrics.integrated_brier_score(known_time, known_event, time, event, true, times)
    none = metrics.brier_score_survival(known_time, known_event, time, event, true, times).integrated_reference
    assert found.value == pytest.approx(ideal.value, abs=0.02)
    assert found.value < none - 0.02
    assert found.low < found.value < found.high


def test_without_validation_slides_or_curves_there_is_none():
    with pytest.raises(MetricError, check=has_code("no-validation-slides")):
        Survival().compute(replace(scored(), validation=None))["integrated_brier"]()
    given = scored()
    hazards = np.repeat(1 / (1 + np.exp(-given.scores)), 4, axis=1)
    with pytest.raises(MetricError, check=has_code("no-survival-curves")):
        DiscreteSurvival().compute(replace(given, scores=hazards))["integrated_brier"]()
