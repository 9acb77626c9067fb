"""A simple method that is clearly better on validation is named, with what that suggests of the disease."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers import planted
from selfvitmil.evaluate import fit_method, hold_out_test_labels, make_splits
from selfvitmil.evaluate.comparison import better_simple_rows
from selfvitmil.settings import EvaluateSettings, TrainSettings

TRAIN = TrainSettings(seeds=1, epochs=30, validation=0.4, device="cpu", split="given")


@pytest.mark.slow
def test_a_clearly_better_simple_method_is_named_and_an_equal_one_is_not(tmp_path: Path):
    cases = planted.planted(tmp_path, patients=30, shift=6.0, splits=True)
    trial = hold_out_test_labels(cases, make_splits(cases, TRAIN), EvaluateSettings())
    blind = TRAIN.model_copy(update={"aggregator": "dsmil", "options": {"evidence": "negative"}})
    sharp = TRAIN.model_copy(update={"aggregator": "dsmil"})
    mean = fit_method("mean", trial, TRAIN, score_test=False)
    (found,) = better_simple_rows([fit_method("dsmil", trial, blind, score_test=False), mean], trial, "dsmil")
    assert (found.method, found.main, found.slides) == ("mean", "dsmil", len(trial.splits[0].val))
    assert found.auc > 0.9 > found.main_auc
    assert "diffuse" in found.words
    assert better_simple_rows([fit_method("dsmil", trial, sharp, score_test=False), mean], trial, "dsmil") == []
    assert better_simple_rows([mean], trial, "dsmil") == []
