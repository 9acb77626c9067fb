"""Test labels stay out of reach until the final scoring, whatever a trainer does with what it is handed."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers import planted
from selfvitmil.cohort import Split
from selfvitmil.errors import SelfVitMilError
from selfvitmil.evaluate import protocol
from selfvitmil.evaluate.dataset import (
    FINAL_SCORING,
    Cases,
    HeldOutLabelError,
    HeldOutLabels,
    hold_out_test_labels,
    make_splits,
)
from selfvitmil.evaluate.protocol import evaluate_method, fit_method, run_method
from selfvitmil.settings import EvaluateSettings, TrainSettings

QUICK = TrainSettings(epochs=1, warmup_epochs=0, seeds=2, folds=2, validation=0.25, device="cpu")
HONEST = EvaluateSettings(bootstrap=100)
OPTIMISTIC = EvaluateSettings(bootstrap=100, protocol="optimistic")


def held_out() -> HeldOutLabels:
    return HeldOutLabels({"fold0": {"a": 1, "b": 0}, "fold1": {"c": 1}})


def test_held_out_labels_name_the_slide_and_open_once_and_for_all():
    labels = held_out()
    with pytest.raises(HeldOutLabelError, match=r"^a: its label is held out") as error:
        labels.label("fold0", "a")
    assert isinstance(error.value, SelfVitMilError)
    assert labels.reason == ""
    labels.open(FINAL_SCORING)
    assert (labels.label("fold0", "a"), labels.label("fold0", "b"), labels.label("fold1", "c")) == (1, 0, 1)
    labels.open("a second thought")
    assert labels.reason == FINAL_SCORING


def test_no_training_after_opening_and_no_opening_during_training():
    labels = held_out()
    with labels.training("dsmil"):
        with pytest.raises(HeldOutLabelError, match="while dsmil is being trained"):
            labels.open(FINAL_SCORING)
        with pytest.raises(HeldOutLabelError):
            labels.label("fold0", "a")
    labels.open(FINAL_SCORING)
    with pytest.raises(HeldOutLabelError, match="abmil"), labels.training("abmil"):
        pass


def test_a_failed_training_does_not_keep_the_labels_shut():
    labels = held_out()
    with pytest.raises(ZeroDivisionError), labels.training("dsmil"):
        raise ZeroDivisionError
    labels.open(FINAL_SCORING)


def test_optimistic_opening_lets_trainings_go_on_and_keeps_its_reason():
    labels = held_out()
    labels.open("chosen on test", optimistic=True)
    with labels.training("dsmil"):
        assert labels.label("fold0", "a") == 1
    labels.open(FINAL_SCORING)
    assert labels.reason == "chosen on test"


def test_labels_are_neither_shown_nor_copied():
    labels = held_out()
    assert "held out" in repr(labels)
    assert not any(isinstance(value, dict) and "a" in value for value in vars(labels).values())
    for attempt in (lambda: pickle.dumps(labels), lambda: copy.deepcopy(labels)):
        with pytest.raises(HeldOutLabelError):
            attempt()
    with pytest.raises(HeldOutLabelError):
        labels.open("")


# ---------------------------------------------------------------------------------------------------- in the protocol


def reachable(start: Any, deepest: int = 8) -> Iterator[Any]:
    """All objects that can be reached from `start`: items, attributes, closures, arguments of partial functions."""
    seen: set[int] = set()
    waiting = [(start, 0)]
    while waiting:
        thing, depth = waiting.pop()
        if id(thing) in seen or depth > deepest or isinstance(thing, str | bytes | int | float | type):
            continue
        seen.add(id(thing))
        yield thing
        parts: list[Any] = []
        if isinstance(thing, dict):
            parts += [*thing.keys(), *thing.values()]
        elif isinstance(thing, list | tuple | set | frozenset):
            parts += thing
        parts += list(getattr(thing, "__dict__", {}).values())
        for name in ("func", "args", "keywords", "__self__"):
            if hasattr(thing, name):
                parts.append(getattr(thing, name))
        parts += [cell.cell_contents for cell in getattr(thing, "__closure__", None) or ()]
        waiting += [(part, depth + 1) for part in parts]


def labels_found(things: Iterator[Any]) -> dict[str, int]:
    """Slide -> label, by whatever tells one: objects with both, mappings of names to numbers, held-out labels."""
    found: dict[str, int] = {}
    for thing in things:
        if isinstance(thing, HeldOutLabels):
            for split in ("given", "fold0", "fold1"):
                for slide in ("tumor_05_0", "normal_05_0"):
                    found[slide] = thing.label(split, slide)
        slide, label = getattr(thing, "slide", None), getattr(thing, "label", None)
        if isinstance(slide, str) and isinstance(label, int):
            found[slide] = label
        if isinstance(thing, dict):
            found |= {key: value for key, value in thing.items() if isinstance(key, str) and type(value) is int}
    return found


@pytest.fixture
def peeking(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, int]]:
    """Every training first collects all the labels that it can reach."""
    reached: list[dict[str, int]] = []
    honest_train = protocol.train_aggregator

    def train(*args: Any, **kwargs: Any) -> Any:
        reached.append(labels_found(reachable([args, kwargs])))
        return honest_train(*args, **kwargs)

    monkeypatch.setattr(protocol, "train_aggregator", train)
    return reached


def runs_of(cases: Cases, splits: tuple[Split, ...]) -> list[Split]:
    return [split for split in splits for _ in range(QUICK.seeds)]


@pytest.mark.parametrize("kind", ["given", "k-fold"])
def test_a_trainer_reaches_no_test_label(tmp_path: Path, peeking: list[dict[str, int]], kind: Any):
    cases = planted.planted(tmp_path, patients=6, splits=True)
    settings = QUICK.model_copy(update={"split": kind})
    splits = make_splits(cases, settings)
    run_method("mean", cases, splits, settings, HONEST, report=lambda line: None)
    assert len(peeking) == len(splits) * QUICK.seeds
    for found, split in zip(peeking, runs_of(cases, splits), strict=True):
        assert {*split.train, *split.val} <= set(found)  # the search does find labels
        assert not set(split.test) & set(found)


def test_a_trainer_that_is_handed_the_seal_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    cases = planted.planted(tmp_path, patients=6, splits=True)
    trial = hold_out_test_labels(cases, make_splits(cases, QUICK), HONEST)
    attempts: list[str] = []

    def train(*args: Any, **kwargs: Any) -> Any:
        with pytest.raises(HeldOutLabelError):
            trial.labels.open(FINAL_SCORING)
        attempts.append("open")
        return labels_found(reachable(trial))

    monkeypatch.setattr(protocol, "train_aggregator", train)
    with pytest.raises(HeldOutLabelError, match="_05_0: "):
        fit_method("mean", trial, QUICK)
    assert attempts == ["open"]


def test_what_is_known_before_opening_holds_no_test_label(tmp_path: Path):
    cases = planted.planted(tmp_path, patients=6, splits=True)
    (split,) = make_splits(cases, QUICK)
    trial = hold_out_test_labels(cases, [split], HONEST)
    fitted = fit_method("mean", trial, QUICK)
    parts = [*trial.splits, *trial.splits[0].test, fitted]
    assert not set(split.test) & set(labels_found(reachable(parts)))
    with pytest.raises(HeldOutLabelError):
        evaluate_method(fitted, trial)
    with pytest.raises(HeldOutLabelError):
        trial.opened(trial.splits[0])
    trial.labels.open(FINAL_SCORING)
    assert evaluate_method(fitted, trial).labels_opened == FINAL_SCORING
    with pytest.raises(HeldOutLabelError, match="max"):
        fit_method("max", trial, QUICK)


def test_optimistic_trains_on_all_chooses_on_test_and_says_so(tmp_path: Path, peeking: list[dict[str, int]]):
    cases = planted.planted(tmp_path, patients=6, splits=True)
    (split,) = make_splits(cases, QUICK, OPTIMISTIC)
    assert (len(split.train), split.val, len(split.test)) == (8, (), 4)
    result = run_method("mean", cases, [split], QUICK, OPTIMISTIC)
    assert all(set(split.test) <= set(found) for found in peeking)
    assert result.protocol == "optimistic"
    assert "too good" in result.labels_opened
    assert {row.part for row in result.predictions} == {"test"}
    assert {row.threshold_from for row in result.predictions} == {"Youden on TEST (optimistic)"}
    assert {row.protocol for row in result.predictions} == {"optimistic"}
