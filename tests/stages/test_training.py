"""Trainings in several processes: the same models as in one, and nothing of the test slides leaves this one."""

from __future__ import annotations

import dataclasses
import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from helpers.planted import planted
from selfvitmil.aggregate import train as aggregate_train
from selfvitmil.aggregate.train import BagStore
from selfvitmil.engine import Engine
from selfvitmil.evaluate import Trial, hold_out_test_labels, make_splits, protocol
from selfvitmil.evaluate.dataset import Case
from selfvitmil.evaluate.protocol import Training, fit_method, make_model, trainings_of
from selfvitmil.settings import EngineSettings, EvaluateSettings, TrainSettings
from selfvitmil.stages import train as pipeline_training
from selfvitmil.stages.train import make_models
from selfvitmil.store.provenance import BUILT, MISSING, UP_TO_DATE

TRAIN = TrainSettings(aggregator="dsmil", epochs=4, seeds=2, split="k-fold", folds=2, device="cpu")


@pytest.fixture
def trial(tmp_path: Path) -> Trial:
    cases = planted(tmp_path, patients=12, shift=6.0)
    return hold_out_test_labels(cases, make_splits(cases, TRAIN), EvaluateSettings())


def made(trial: Trial, folder: Path, workers: int) -> tuple[list[Training], dict[Path, str]]:
    trainings = trainings_of("dsmil", trial, TRAIN, folder)
    with Engine(EngineSettings(workers=workers)) as engine:
        notes = make_models([(trial, each) for each in trainings], engine, BagStore("cpu"), lambda line: None)
    return trainings, notes


def weights_of(trainings: list[Training]) -> list[bytes]:
    return [(each.place / "model.safetensors").read_bytes() for each in trainings if each.place is not None]


@pytest.mark.slow
def test_other_processes_make_the_same_models(trial: Trial, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pipeline_training, "WORTH_STARTING_S", 0.0)
    blocked = tmp_path / "elsewhere" / "fold0" / "seed1"
    blocked.parent.mkdir(parents=True)
    blocked.write_text("a file where the folder of a model should be")
    elsewhere, outcomes = made(trial, tmp_path / "elsewhere", workers=2)
    assert outcomes == {each.place: BUILT for each in elsewhere if each.place != blocked}
    blocked.unlink()  # what failed elsewhere is left to who asked
    fitted = fit_method("dsmil", trial, TRAIN, folder=tmp_path / "elsewhere", outcomes=outcomes)
    assert [run.outcome for run in fitted.runs] == [BUILT] * 4
    here = trainings_of("dsmil", trial, TRAIN, tmp_path / "here")
    fit_method("dsmil", trial, TRAIN, folder=tmp_path / "here")
    assert weights_of(elsewhere) == weights_of(here)
    assert len(set(weights_of(here))) == 4
    assert made(trial, tmp_path / "elsewhere", workers=2)[1] == {}
    assert [run.outcome for run in fit_method("dsmil", trial, TRAIN, folder=tmp_path / "elsewhere").runs] == [
        UP_TO_DATE
    ] * 4


def test_a_worker_reads_bags_and_chooses_the_evidence_once(
    trial: Trial, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Its models are those of one store per training, byte for byte."""
    reads: list[str] = []
    choices: list[int] = []
    read, choose = Case.read, aggregate_train.choose_evidence
    monkeypatch.setattr(Case, "read", lambda case: reads.append(case.slide) or read(case))
    monkeypatch.setattr(aggregate_train, "choose_evidence", lambda *given: choices.append(1) or choose(*given))
    protocol.shared_bags.cache_clear()
    shared, alone = (trainings_of("dsmil", trial, TRAIN, tmp_path / name) for name in ("shared", "alone"))
    for training in shared:
        make_model(training)
    assert len(reads) == len(set(reads))
    assert len(choices) == len(trial.splits)
    for training in alone:
        protocol.shared_bags.cache_clear()
        make_model(training)
    assert len(choices) == len(trial.splits) + len(alone)
    assert weights_of(shared) == weights_of(alone)


def test_models_made_in_turns_are_those_made_alone(trial: Trial, tmp_path: Path):
    """As on a GPU: splits take turns, each with one seed after the other."""
    told: list[dict[str, object]] = []
    together = trainings_of("dsmil", trial, TRAIN, tmp_path / "together")
    todo = [(trial, each, MISSING) for each in together]
    outcomes = pipeline_training._make_in_turns(todo, BagStore("cpu"), told.append)
    assert outcomes == dict.fromkeys([each.place for each in together], BUILT)
    assert {(line["split"], line["seed"], line["epoch"]) for line in told} == {
        (each.split, each.seed, epoch) for each in together for epoch in range(1, 5)
    }
    alone = trainings_of("dsmil", trial, TRAIN, tmp_path / "alone")
    fit_method("dsmil", trial, TRAIN, folder=tmp_path / "alone")
    assert weights_of(together) == weights_of(alone)
    assert len(set(weights_of(alone))) == 4


@pytest.mark.parametrize("fixed", [False, True])
def test_evidence_chosen_here_is_not_chosen_again_elsewhere(
    trial: Trial, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fixed: bool
):
    """A training that asks for a certain kind of evidence gets that one, whatever others have chosen."""
    own = TRAIN.model_copy(update={"options": {"evidence": "negative"} if fixed else {}})
    first, *others = trainings_of("dsmil", trial, TRAIN, tmp_path / "models")
    asked = [(trial, each) for each in (first, *trainings_of("dsmil", trial, own, tmp_path / "own")[1:])]
    sent: dict[str, Training] = {}

    def sends(self: Engine, function: object, items: dict[str, Training], **how: object) -> list[object]:
        sent.update(items)
        return []

    def make_one(training: Training, *given: Any) -> protocol.Model:
        monkeypatch.setattr(pipeline_training, "WORTH_STARTING_S", 0.0)  # all others are sent
        return make(training, *given)

    make = Training.make
    monkeypatch.setattr(Training, "make", make_one)
    monkeypatch.setattr(Engine, "map", sends)
    with Engine(EngineSettings(workers=2)) as engine:
        make_models(asked, engine, BagStore("cpu"), lambda line: None)
    monkeypatch.undo()
    found = first.stored()
    assert isinstance(found, protocol.Model)
    assert [each.evidence == found.evidence for each in sent.values()] == [each.split == "fold0" for each in others]
    training = next(each for each in sent.values() if each.split == "fold0")
    for one in (training, dataclasses.replace(training, evidence=None, place=tmp_path / "anew")):
        make_model(one)
    assert weights_of([training]) == [(tmp_path / "anew" / "model.safetensors").read_bytes()]
    kind = json.loads((tmp_path / "anew" / "config.json").read_text())["recipe"]["options"]["evidence"]
    assert not fixed or kind == "negative"


def test_short_trainings_start_no_process(trial: Trial, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Engine, "_outcomes", None)
    monkeypatch.setattr(pipeline_training, "WORTH_STARTING_S", 600.0)  # on a busy machine five seconds are soon over
    trainings, notes = made(trial, tmp_path / "models", workers=2)
    assert set(notes) == {each.place for each in trainings}


def test_all_is_left_to_who_asked_without_further_processes(trial: Trial, tmp_path: Path):
    assert made(trial, tmp_path / "models", workers=0)[1] == {}
    assert not (tmp_path / "models").exists()


def test_what_is_sent_away_knows_no_test_label(trial: Trial, tmp_path: Path):
    for training in trainings_of("dsmil", trial, TRAIN, tmp_path / "models"):
        (split,) = (each for each in trial.splits if each.name == training.split)
        sent = pickle.loads(pickle.dumps(training))
        told = {case.slide for case in (*sent.training, *sent.chosen_on)}
        assert told.isdisjoint(case.slide for case in split.test)
        assert not any(case.slide.encode() in pickle.dumps(training) for case in split.test)
