"""A method over splits and seeds: who is trained on what, what is chosen where, what is kept and used again."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from helpers import planted
from selfvitmil.aggregate.train import load_model, score
from selfvitmil.cohort import Cohort, Split
from selfvitmil.errors import ArtefactError, CohortError, ConfigError
from selfvitmil.evaluate import protocol
from selfvitmil.evaluate.dataset import Cases, hold_out_test_labels, make_splits
from selfvitmil.evaluate.protocol import MethodResult, check_models, fit_method, run_method, stored_models
from selfvitmil.metrics import youden_threshold
from selfvitmil.settings import EvaluateSettings, TrainSettings
from selfvitmil.store.provenance import BUILT, UP_TO_DATE, BuildOutcome, Change, ChangeKind, rebuilt

QUICK = TrainSettings(epochs=3, seeds=2, folds=2, validation=0.25, lr=0.05, device="cpu")
HONEST = EvaluateSettings(bootstrap=100)


def changed(settings: Any, **fields: Any) -> Any:
    return type(settings).model_validate({**settings.model_dump(), **fields})


# ---------------------------------------------------------------------------------------------------- splits


@st.composite
def cohorts(draw: st.DrawFn) -> Cohort:
    """Patients with one to three slides of any label, some without; four patients of each pure label."""
    labels = draw(st.sampled_from([("0", "1"), ("a", "b", "c")]))
    owners = [[label] for label in labels for _ in range(4)]
    owners += draw(st.lists(st.lists(st.sampled_from([*labels, None]), min_size=1, max_size=3), max_size=12))
    rows = [planted.row(f"s{p}_{k}", label, f"p{p}") for p, own in enumerate(owners) for k, label in enumerate(own)]
    Random(draw(st.integers(0, 9))).shuffle(rows)
    return Cohort(tuple(rows))


@given(cohorts(), st.sampled_from(["auto", "k-fold", "monte-carlo"]), st.integers(0, 99), st.integers(2, 4))
@hypothesis_settings(max_examples=60)
def test_patients_never_straddle_and_nobody_is_lost(cohort: Cohort, kind: str, seed: int, folds: int):
    cases = planted.fake_cases(cohort)
    splits = make_splits(cases, TrainSettings.model_validate({"split": kind, "seed": seed, "folds": folds}))
    assert len(splits) == folds
    for split in splits:
        trial = hold_out_test_labels(cases, [split], HONEST)
        sides = [{case.patient for case in getattr(trial.splits[0], side)} for side in ("train", "val", "test")]
        assert all(sides)
        assert sum(map(len, sides)) == len(set().union(*sides))
        together = sorted([*split.train, *split.val, *split.test])
        assert together == sorted(case.slide for case in cases.cases)
    if kind != "monte-carlo":
        assert sorted(slide for split in splits for slide in split.test) == sorted(cases.by_slide)


def test_given_split_wins_where_there_is_one(tmp_path: Path):
    cases = planted.planted(tmp_path, patients=8, splits=True)
    (split,) = make_splits(cases, QUICK)
    assert split.name == "given"
    assert {slide[-4:-2] for slide in split.test} == {"06", "07"}
    assert len(split.val) == 3
    assert not {*split.val} & {*split.test}
    drawn = make_splits(cases, changed(QUICK, split="k-fold"))
    assert [one.name for one in drawn] == ["fold0", "fold1"]


def test_split_files_lose_failed_slides_and_get_a_validation(tmp_path: Path):
    cases = planted.planted(tmp_path, patients=8, splits=True)
    names = sorted(cases.by_slide)
    sides = itertools.zip_longest(names[:6] + names[8:14], names[6:8] + names[14:], fillvalue="")
    rows = [f"{k},{train},,{test}\n" for k, (train, test) in enumerate(sides)]
    (tmp_path / "splits").mkdir()
    (tmp_path / "splits" / "splits_7.csv").write_text("".join([",train,val,test\n", *rows]))
    lost = cases.only(set(names) - {names[0], names[15]})
    (split,) = make_splits(lost, changed(QUICK, split="files", split_folder=tmp_path / "splits"))
    assert split.name == "fold7"
    assert split.test == (*names[6:8], names[14])
    assert sorted([*split.train, *split.val]) == names[1:6] + names[8:14]
    assert len(split.val) == 3
    with pytest.raises(ConfigError, match="split_folder"):
        make_splits(lost, TrainSettings.model_construct(**{**dict(QUICK), "split": "files", "split_folder": None}))


def test_a_class_with_fewer_patients_than_folds():
    rows = [planted.row(f"{label}{k}", label) for label, n in (("normal", 9), ("tumor", 3)) for k in range(n)]
    with pytest.raises(CohortError, match="4 folds, but fewer patients of the classes tumor \\(3\\)"):
        make_splits(planted.fake_cases(Cohort(tuple(rows))), changed(QUICK, folds=4))


def four_each(labels: tuple[str, ...] = ("a", "b")) -> Cases:
    rows = [planted.row(f"{label}{k}", label, f"p{label}{k}") for label in labels for k in range(4)]
    return planted.fake_cases(Cohort(tuple(rows)))


@pytest.mark.parametrize(
    ("split", "words"),
    [
        (Split("s", ("a0", "a1"), ("a2", "b2"), ("a3", "b3")), "no training slide of b"),
        (Split("s", ("a0", "b1"), (), ("a3", "b3")), "no validation slide"),
        (Split("s", ("a0", "b1"), ("b2",), ("a3", "b3")), "no validation slide of a"),
        (Split("s", ("a0", "b1"), ("a2", "b2"), ()), "no test slide"),
        (Split("s", ("a0", "b1"), ("a2", "b2"), ("a0",)), "occur twice"),
        (Split("s", ("a0", "b1"), ("a2", "b2"), ("x",)), "not in the cohort"),
    ],
)
def test_splits_that_cannot_be_judged_are_refused(split: Split, words: str):
    with pytest.raises(CohortError, match=words):
        hold_out_test_labels(four_each(), [split], HONEST)


def test_a_straddling_patient_is_refused():
    rows = [planted.row(f"{label}{k}", label, "same" if k == 0 else "") for label in "ab" for k in range(3)]
    with pytest.raises(CohortError, match="patients in more than one set: same"):
        hold_out_test_labels(
            planted.fake_cases(Cohort(tuple(rows))), [Split("s", ("a0", "b1"), ("a1", "b2"), ("b0",))], HONEST
        )


def test_poor_validation_of_several_classes_is_a_warning():
    split = Split("s", ("a0", "b0", "c0"), ("a1", "b1"), ("a2", "b2"))
    trial = hold_out_test_labels(four_each(("a", "b", "c")), [split], HONEST)
    assert trial.warnings == ("s: validation has no slide of c",)


def test_optimistic_leaves_given_validation_slides_out_and_says_so():
    split = Split("s", ("a0", "b0"), ("a1",), ("a2", "b2"))
    trial = hold_out_test_labels(four_each(), [split], changed(HONEST, protocol="optimistic"))
    assert [case.slide for case in trial.chosen_on(trial.splits[0])] == ["a2", "b2"]
    (warning,) = trial.warnings
    assert "s: 1 validation slides" in warning


def test_settings_without_meaning_are_refused_at_the_door():
    split = Split("s", ("a0", "b0", "c0"), ("a1", "b1"), ("a2", "b2"))
    with pytest.raises(ConfigError, match="platt"):
        hold_out_test_labels(four_each(("a", "b", "c")), [split], changed(HONEST, calibration="platt"))


# ---------------------------------------------------------------------------------------------------- one method


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Cases:
    return planted.planted(tmp_path_factory.mktemp("binary"), patients=12, slides_each=2, shift=2.0)


@pytest.fixture(scope="module")
def result(cases: Cases) -> MethodResult:
    return run_method("dsmil", cases, make_splits(cases, QUICK), QUICK, HONEST)


def chosen(result: MethodResult, **wanted: Any) -> list[Any]:
    return [row for row in result.predictions if all(getattr(row, key) == value for key, value in wanted.items())]


def test_every_slide_is_predicted_by_every_seed_and_the_ensemble(cases: Cases, result: MethodResult):
    splits = make_splits(cases, QUICK)
    for split in splits:
        for seed in (0, 1, None):
            for part in ("val", "test"):
                rows = chosen(result, split=split.name, seed=seed, part=part)
                assert [row.slide for row in rows] == list(getattr(split, part))
                assert all(row.label == cases.by_slide[row.slide].label for row in rows)
                assert all(row.patient == cases.by_slide[row.slide].patient for row in rows)
    assert result.seeds == (0, 1)
    assert result.splits == ("fold0", "fold1")


def test_ensemble_is_the_mean_of_the_seeds(result: MethodResult):
    for row in chosen(result, seed=None):
        seeds = [one for seed in (0, 1) for one in chosen(result, seed=seed, split=row.split, slide=row.slide)]
        for stream in ("score", "max", "bag"):
            assert getattr(row, stream)[0] == pytest.approx(
                sum(getattr(one, stream)[0] for one in seeds) / 2, abs=1e-15
            )


def test_thresholds_come_from_own_validation_scores(result: MethodResult):
    seen = set()
    for split in result.splits:
        for seed in (0, 1, None):
            rows = chosen(result, split=split, seed=seed)
            val = [row for row in rows if row.part == "val"]
            threshold = youden_threshold([row.label for row in val], [row.score[0] for row in val])
            assert {row.threshold for row in rows} == {threshold}
            assert all(row.decision == int(row.score[0] >= threshold) for row in rows)
            seen.add(threshold)
    assert len(seen) > 2
    assert {row.threshold_from for row in result.predictions} == {"Youden on validation"}


def test_a_method_with_one_stream_leaves_the_others_empty(cases: Cases):
    splits = make_splits(cases, QUICK)[:1]
    for row in run_method("mean", cases, splits, QUICK, HONEST, title="plain mean").predictions:
        assert (row.method, row.max, row.bag, row.calibrated) == ("plain mean", None, None, None)


def test_planted_answer_is_found(tmp_path: Path):
    cases = planted.planted(tmp_path, patients=10, shift=8.0)
    settings = changed(QUICK, epochs=15, lr=3e-3)
    found = run_method("abmil-gated", cases, make_splits(cases, settings)[:1], settings, HONEST)
    assert all(row.decision == row.label for row in chosen(found, part="test", seed=None))


def test_fixed_threshold_and_calibration(cases: Cases):
    splits = make_splits(cases, QUICK)[:1]
    settings = changed(HONEST, threshold="fixed")
    plain = run_method("mean", cases, splits, QUICK, settings)
    assert {(row.threshold, row.threshold_from) for row in plain.predictions} == {(0.5, "fixed 0.5")}
    platt = run_method("mean", cases, splits, QUICK, changed(settings, calibration="platt"))
    for row in platt.predictions:
        assert row.calibrated is not None
        assert row.decision == int(row.calibrated[0] >= 0.5)
        assert row.threshold is not None
        assert row.decision == int(row.score[0] >= row.threshold)
        assert row.threshold_from == "fixed 0.5 after Platt scaling on validation"
    by_score = sorted(chosen(platt, part="test", seed=0), key=lambda row: row.score)
    assert [row.calibrated for row in by_score] == sorted(row.calibrated for row in by_score)
    assert [row.score for row in plain.predictions] == [row.score for row in platt.predictions]


def test_calibration_that_cannot_be_fitted_is_said_not_invented(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    cases = planted.planted(tmp_path, patients=6, splits=True)
    honest_score = protocol.score_bags

    def upside_down(module: Any, bags: Any, store: Any = None) -> Any:
        scores = honest_score(module, bags, store=store)
        level = {one.slide: 0.9 if one.slide.startswith("normal") else 0.2 for one in scores}
        return [type(one)(one.slide, (level[one.slide],), None, None, None, None) for one in scores]

    monkeypatch.setattr(protocol, "score_bags", upside_down)
    settings = changed(HONEST, calibration="temperature")
    found = run_method("mean", cases, make_splits(cases, QUICK), QUICK, settings)
    assert all(row.calibrated is None for row in found.predictions)
    assert any(text.startswith("not calibrated (3 of 3 times)") for text in found.warnings)


def test_three_classes_by_the_largest_probability(tmp_path: Path):
    cases = planted.planted(tmp_path, ("a", "b", "c"), patients=8)
    settings = changed(QUICK, epochs=15, seeds=2)
    evaluate = changed(HONEST, calibration="temperature")
    for name in ("mean", "dsmil"):
        found = run_method(name, cases, make_splits(cases, settings)[:1], settings, evaluate)
        for row in found.predictions:
            assert len(row.score) == 3
            assert row.calibrated is not None
            assert sum(row.calibrated) == pytest.approx(1)
            assert row.decision == int(np.argmax(row.score))
            assert (row.threshold, row.threshold_from) == (None, "largest probability")


def test_report_names_the_training(cases: Cases):
    lines: list[dict[str, Any]] = []
    run_method("mean", cases, make_splits(cases, QUICK)[:1], QUICK, HONEST, report=lines.append)
    assert {(line["method"], line["split"], line["seed"]) for line in lines} == {
        ("mean", "fold0", 0),
        ("mean", "fold0", 1),
    }
    assert [line["epoch"] for line in lines if line["seed"] == 0] == [1, 2, 3]


def test_equal_seeds_give_equal_predictions(cases: Cases, result: MethodResult):
    again = run_method("dsmil", cases, make_splits(cases, QUICK), QUICK, HONEST)
    assert again.predictions == result.predictions
    other = run_method("dsmil", cases, make_splits(cases, QUICK), changed(QUICK, seed=7, seeds=1), HONEST)
    assert other.seeds == (7,)
    assert {row.score for row in chosen(other, seed=7)} != {row.score for row in chosen(result, seed=0)}


def test_train_alone_opens_no_test_bag(cases: Cases, monkeypatch: pytest.MonkeyPatch):
    (split, _) = make_splits(cases, QUICK)
    trial = hold_out_test_labels(cases, [split], HONEST)
    opened: list[str] = []
    honest_bag = type(trial).bag
    monkeypatch.setattr(type(trial), "bag", lambda self, case: (opened.append(case.slide), honest_bag(self, case))[1])
    fitted = fit_method("mean", trial, QUICK, score_test=False)
    assert set(opened) == {*split.train, *split.val}
    assert all(set(run.chosen_on) == set(split.val) for run in fitted.runs)


# ---------------------------------------------------------------------------------------------------- stored models


def outcomes(result: MethodResult) -> list[BuildOutcome]:
    return [run.outcome for run in result.runs]


def test_models_are_kept_used_again_and_made_again(tmp_path: Path):
    cases = planted.planted(tmp_path, patients=6, splits=True)
    splits, folder = make_splits(cases, QUICK), tmp_path / "models" / "mean"
    first = run_method("mean", cases, splits, QUICK, HONEST, folder=folder)
    assert outcomes(first) == [BUILT, BUILT]
    assert sorted(path.parent.relative_to(folder).as_posix() for path in folder.rglob("config.json")) == [
        "given/seed0",
        "given/seed1",
    ]
    again = run_method("mean", cases, splits, QUICK, HONEST, folder=folder)
    assert outcomes(again) == [UP_TO_DATE, UP_TO_DATE]
    assert again.predictions == first.predictions
    assert [run.epoch for run in again.runs] == [run.epoch for run in first.runs]
    assert [run.seconds for run in again.runs] == [run.seconds for run in first.runs]
    # neither other choices nor more seeds touch what is there
    more = run_method("mean", cases, splits, changed(QUICK, seeds=3), changed(HONEST, threshold="fixed"), folder=folder)
    assert outcomes(more) == [UP_TO_DATE, UP_TO_DATE, BUILT]
    before = json.loads((folder / "given" / "seed0" / "config.json").read_text())["recipe"]["lr"]
    faster = run_method("mean", cases, splits, changed(QUICK, lr=0.01), HONEST, folder=folder)
    assert Change(ChangeKind.SETTING, "recipe.lr", before, 0.01) in faster.runs[0].outcome.changes
    assert all(change.name.startswith("recipe.") for change in faster.runs[0].outcome.changes)
    (folder / "given" / "seed0" / "model.safetensors").write_bytes(b"half")
    damaged = run_method("mean", cases, splits, changed(QUICK, lr=0.01), HONEST, folder=folder)
    assert outcomes(damaged) == [rebuilt(Change(ChangeKind.DAMAGED_FILE, "stored model")), UP_TO_DATE]


def test_other_labels_slides_or_features_make_models_stale(tmp_path: Path):
    cases = planted.planted(tmp_path, patients=6, splits=True)
    (split,), folder = make_splits(cases, QUICK), tmp_path / "models"
    settings = changed(QUICK, seeds=1)

    def outcome(cases: Cases, split: Split) -> BuildOutcome:
        return run_method("mean", cases, [split], settings, HONEST, folder=folder).runs[0].outcome

    def names(outcome: BuildOutcome) -> list[str]:
        return [change.name for change in outcome.changes]

    assert outcome(cases, split) == BUILT
    assert outcome(cases, Split(split.name, split.train, split.val, split.test[:-1])) == UP_TO_DATE
    assert names(outcome(cases, Split(split.name, split.train[:-1], split.val, split.test))) == ["trained_on"]
    assert names(outcome(cases, split)) == ["trained_on"]
    planted.write_features(tmp_path, split.train[0], np.ones((3, planted.DIM)))
    again = planted.find_cases(cases.cohort, {case.slide: case.path for case in cases.cases})
    assert outcome(again, split) == rebuilt(Change(ChangeKind.UNNAMED, "settings or inputs"))  # features: a hash
    planted.write_features(tmp_path, split.test[0], np.ones((3, planted.DIM)))
    again = planted.find_cases(cases.cohort, {case.slide: case.path for case in cases.cases})
    assert outcome(again, split) == UP_TO_DATE


def test_stored_models_tell_their_origin_and_score_as_predicted(tmp_path: Path):
    cases = planted.planted(tmp_path, patients=6, splits=True)
    (split,), folder = make_splits(cases, QUICK), tmp_path / "models"
    found = run_method("dsmil", cases, [split], QUICK, HONEST, folder=folder)
    module, config = load_model(folder / "given" / "seed1")
    slides = list(split.test)
    scores = score(module, [cases.by_slide[slide].read() for slide in slides])
    rows = chosen(found, seed=1, part="test")
    assert [row.score for row in rows] == [one.probabilities for one in scores]
    assert [(row.max, row.bag) for row in rows] == [(one.max_probabilities, one.bag_probabilities) for one in scores]
    assert config["classes"] == ["normal", "tumor"]
    assert (config["split"], config["seed"], config["protocol"]) == ("given", 1, "honest")
    assert (config["trained_on"], config["chosen_on"]) == (list(split.train), list(split.val))
    assert str(tmp_path) not in json.dumps(config)


def test_stored_models_are_those_of_a_fit_and_are_never_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    cases, train = planted.planted(tmp_path, patients=6), changed(QUICK, split="k-fold", folds=3)
    trial, folder = hold_out_test_labels(cases, make_splits(cases, train), HONEST), tmp_path / "models"
    fitted = fit_method("mean", trial, train, folder=folder, score_test=False)
    monkeypatch.setattr(protocol, "train_aggregator", None)
    stored = stored_models("mean", trial, train, folder)
    assert stored.fitted.choices == fitted.choices
    for own, other in zip(stored.fitted.runs, fitted.runs, strict=True):
        assert {slide: vars(score) for slide, score in own.chosen_on.items()} == {
            slide: vars(score) for slide, score in other.chosen_on.items()
        }
        assert own.test == {}
        slide = next(iter(own.chosen_on))
        (again,) = score(stored.modules[own.split, own.seed], [cases.by_slide[slide].read()])
        assert vars(again) == vars(own.chosen_on[slide])
    before = check_models("mean", trial, train, folder)
    assert sorted(before) == ["fold0", "fold1", "fold2"]
    assert len(set(before.values())) == 3


def test_models_that_are_not_up_to_date_are_named(tmp_path: Path):
    cases = planted.planted(tmp_path, patients=6, splits=True)
    trial, folder = hold_out_test_labels(cases, make_splits(cases, QUICK), HONEST), tmp_path / "models"
    for ask in (check_models, stored_models):
        with pytest.raises(ArtefactError, match=r"mean: no up-to-date models of given \(seed0, seed1: there is none\)"):
            ask("mean", trial, QUICK, folder)
    fit_method("mean", trial, QUICK, folder=folder, score_test=False)
    (folder / "given" / "seed0" / "model.safetensors").write_bytes(b"half")
    with pytest.raises(ArtefactError, match=r"\(seed0: stored model damaged; seed2: there is none\)"):
        check_models("mean", trial, changed(QUICK, seeds=3), folder)
    with pytest.raises(ArtefactError, match=r"damaged; seed1: recipe\.lr .* -> 0\.01, .*--train.aggregator mean"):
        check_models("mean", trial, changed(QUICK, lr=0.01), folder)


def test_protocols_keep_their_models_apart(tmp_path: Path):
    cases = planted.planted(tmp_path, patients=6, splits=True)
    optimistic = changed(HONEST, protocol="optimistic")
    for evaluate in (HONEST, optimistic, HONEST, optimistic):
        found = run_method(
            "mean", cases, make_splits(cases, QUICK, evaluate), QUICK, evaluate, folder=tmp_path / "models"
        )
    assert set(outcomes(found)) == {UP_TO_DATE}  # pyright: ignore[reportPossiblyUnboundVariable]
    assert {path.name for path in (tmp_path / "models").iterdir()} == {"given", "given_optimistic"}
    config = load_model(tmp_path / "models" / "given_optimistic" / "seed0")[1]
    assert (config["protocol"], config["epoch_from"]) == ("optimistic", "TEST (optimistic)")
