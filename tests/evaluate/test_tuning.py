"""Settings chosen by nested cross-validation: what is tried, what is chosen, and that test labels take no part."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from helpers import planted
from helpers.cli import rows_of, selfvitmil
from helpers.error_codes import has_code
from helpers.planted_outcomes import planted_outcomes
from selfvitmil.aggregate import NAMES
from selfvitmil.aggregate.recipes import recipe_of
from selfvitmil.aggregate.train import BagStore, load_model
from selfvitmil.commands.run import Request
from selfvitmil.errors import ArtefactError, CohortError, ConfigError, HeldOutLabelError
from selfvitmil.evaluate.dataset import Cases, Trial, hold_out_test_labels, make_splits
from selfvitmil.evaluate.protocol import check_models, evaluate_method, fit_method
from selfvitmil.evaluate.tuning import (
    InnerTraining,
    Results,
    Tuning,
    choose_point,
    inner_folds,
    tune,
    tuning_points,
    with_point,
)
from selfvitmil.metrics import auc
from selfvitmil.settings import EvaluateSettings, StudySettings, TrainSettings
from selfvitmil.stages.train import compared_methods, num_tuning_trainings

HONEST = EvaluateSettings(bootstrap=100)
HOPELESS = TrainSettings(
    aggregator="mean", lr=1e-8, warmup_epochs=0, epochs=8, seeds=1, device="cpu", tune=True,
    tune_space={"lr_factor": (1.0, 3e6)},
)  # fmt: skip
"""A recipe that learns nothing, and a space with one that does."""


def here(trial: Trial, todo: Any) -> Results:
    store = BagStore("cpu")
    return [each.score(trial.bag, store) for each in todo]


def trial_of(cases: Cases, train: TrainSettings) -> Trial:
    return hold_out_test_labels(cases, make_splits(cases, train, HONEST), HONEST)


def chosen(cases: Cases, train: TrainSettings, folder: Path | None = None) -> dict[str, Tuning]:
    return tune([(train.aggregator, trial_of(cases, train), train, folder)], here)[0]


# ---------------------------------------------------------------------------------------------------- space


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("recipe", ["default", "published"])
def test_default_space_is_small_and_begins_with_the_recipe(name: str, recipe: str):
    train = TrainSettings.model_validate({"aggregator": name, "recipe": recipe})
    points = tuning_points(name, train)
    recipes = [recipe_of(name, with_point(name, train, point)) for point in points]
    assert recipes[0] == recipe_of(name, train)
    assert 4 <= len(points) <= 8
    assert len({(each.lr, each.weight_decay) for each in recipes}) == len(points)


def test_own_space_is_all_combinations_and_a_method_may_have_its_own():
    train = TrainSettings(
        aggregator="dsmil", tune_space={"epochs": (5, 10), "weight_decay": (0.0, 1.0), "dsmil": {"top": (1, 3)}}
    )
    assert [dict(point) for point in tuning_points("dsmil", train)] == [{"top": 3}, {"top": 1}]  # 3 is the recipe's
    assert len(tuning_points("mean", train)) == 4


@pytest.mark.parametrize(
    ("space", "code"),
    [
        ({"learning_rate": (1,)}, "unknown-tuned-setting"),
        ({"epochs": ()}, "empty-tuning-space"),
        ({"epochs": (-1,)}, "invalid-train-options"),
    ],
)
def test_invalid_space_is_refused(space: dict[str, Any], code: str):
    with pytest.raises(ConfigError, check=has_code(code)):
        tuning_points("mean", TrainSettings(aggregator="mean", tune_space=space))


def test_lr_factor_multiplies_the_rate_of_any_recipe():
    for recipe in ("default", "published"):
        plain = TrainSettings.model_validate({"aggregator": "dsmil", "recipe": recipe})
        tripled = plain.model_copy(update={"lr_factor": 3.0})
        before, after = (recipe_of("dsmil", each).for_dim(512) for each in (plain, tripled))
        assert (after.lr, after.min_lr) == pytest.approx((3 * before.lr, 3 * before.min_lr))


@pytest.mark.parametrize("higher", [True, False])
def test_best_mean_is_chosen_and_ties_go_to_the_first(higher: bool):
    scores = [[0.5, None, 0.7], [0.6, None, 0.6], [0.7, None, None], [0.4, None, 0.9]]
    place, means = choose_point(scores, higher_is_better=higher)
    assert means == [pytest.approx(0.6), pytest.approx(0.6), None, pytest.approx(0.65)]
    assert place == (3 if higher else 0)
    with pytest.raises(ConfigError, check=has_code("nothing-to-tune-by")):
        choose_point([[None], [None]], higher_is_better=True)


# ---------------------------------------------------------------------------------------------------- choice


def test_bad_default_is_beaten_and_the_model_says_so(tmp_path: Path):
    cases = planted.planted(tmp_path, patients=12, splits=True, seed=1)
    trial, folder = trial_of(cases, HOPELESS), tmp_path / "mean"
    (tuned,) = tune([("mean", trial, HOPELESS, folder)], here)
    assert tuned["given"].best.settings == {"lr_factor": 3e6}
    assert len(tuned["given"].tried) * tuned["given"].folds == 6
    fitted = fit_method("mean", trial, HOPELESS, folder=folder, tuned=tuned)
    config = load_model(folder / "given" / "seed0")[1]
    assert config["recipe"]["lr"] == pytest.approx(0.03)
    assert config["tuning"]["tried"][config["tuning"]["chosen"]]["settings"] == {"lr_factor": 3e6}
    assert fitted.recipe is not None
    assert fitted.recipe.kind == "tuned"
    assert "learning rate x 3e+06" in fitted.recipe.words
    trial.labels.open("test")
    result = evaluate_method(fitted, trial)
    assert result.tuned == tuned
    tried = tuned["given"].tried
    assert tried[1].mean is not None
    assert tried[0].mean is not None
    assert tried[1].mean > tried[0].mean + 0.2
    test = [row for row in result.predictions if row.part == "test" and row.seed is None]
    assert auc([row.label for row in test], [row.score[0] for row in test]) > 0.7


def test_stored_choice_is_used_again_until_something_changes(tmp_path: Path):
    cases = planted.planted(tmp_path, patients=12, splits=True)
    folder = tmp_path / "mean"
    first = chosen(cases, HOPELESS, folder)
    never = lambda *_: pytest.fail("trained again")  # noqa: E731
    trial = trial_of(cases, HOPELESS)
    assert tune([("mean", trial, HOPELESS, folder)], never) == [first]
    fit_method("mean", trial, HOPELESS, folder=folder)
    assert set(check_models("mean", trial, HOPELESS, folder)) == {"given"}
    other = HOPELESS.model_copy(update={"tune_folds": 2})
    with pytest.raises(ArtefactError, check=has_code("no-tuning")):
        check_models("mean", trial, other, folder)
    assert chosen(cases, other, folder)["given"].folds == 2


def test_same_seed_gives_the_same_choice_and_k_fold_repeats_it_in_every_fold(tmp_path: Path):
    cases = planted.planted(tmp_path, patients=12)
    train = HOPELESS.model_copy(update={"folds": 3, "tune_folds": 2, "epochs": 3})
    first, again = chosen(cases, train), chosen(cases, train)
    assert first == again
    assert list(first) == ["fold0", "fold1", "fold2"]
    assert len({each.made_from for each in first.values()}) == 3


def test_inner_folds_are_by_patient_and_of_training_and_validation_only(tmp_path: Path):
    cases = planted.planted(tmp_path, patients=8, slides_each=2, splits=True)
    trial = trial_of(cases, HOPELESS)
    (split,) = trial.splits
    known = {case.slide: case.patient for case in (*split.train, *split.val)}
    folds = inner_folds([*split.train, *split.val], trial, HOPELESS, "mean")
    assert sorted(slide for fold in folds for slide in fold.test) == sorted(known)
    for fold in folds:
        sides = [{known[slide] for slide in side} for side in (fold.train, fold.val, fold.test)]
        assert all(sides)
        assert sum(map(len, sides)) == len(set().union(*sides)) == len(set(known.values()))


def test_too_few_patients_are_refused(tmp_path: Path):
    cases = planted.planted(tmp_path, patients=4, splits=True)
    with pytest.raises(CohortError, check=has_code("too-few-to-tune")):
        chosen(cases, HOPELESS)


def test_test_labels_change_no_choice_and_cannot_be_read(tmp_path: Path):
    cases = planted.planted(tmp_path, patients=12, splits=True)
    trial = trial_of(cases, HOPELESS)
    test = {case.slide for case in trial.splits[0].test}
    flipped = replace(
        cases, cases=tuple(replace(each, label=1 - each.label) if each.slide in test else each for each in cases.cases)
    )
    assert chosen(cases, HOPELESS) == chosen(flipped, HOPELESS)

    def peeking(trial: Trial, todo: Any) -> Results:
        inner: InnerTraining = todo[0]
        assert not {case.slide for case in (*inner.training.training, *inner.left_out)} & test
        trial.labels.open("a look")
        return []

    with pytest.raises(HeldOutLabelError):
        tune([("mean", trial, HOPELESS, None)], peeking)


def test_point_that_diverges_is_not_chosen(tmp_path: Path):
    cases = planted.planted(tmp_path, patients=12, splits=True)
    train = TrainSettings(
        aggregator="mean", optimizer="sgd", epochs=4, seeds=1, device="cpu", tune=True, standardize=False,
        tune_space={"lr": (1e30, 0.05)},
    )  # fmt: skip
    tuning = chosen(cases, train)["given"]
    assert [each.mean is None for each in tuning.tried] == [True, False]
    assert tuning.chosen == 1


@pytest.mark.parametrize("splits", [True, False])
def test_plan_says_as_many_trainings_as_there_are(tmp_path: Path, splits: bool):
    cases = planted.planted(tmp_path, patients=12, splits=splits)
    settings = StudySettings.model_validate({"train": HOPELESS.model_copy(update={"folds": 2}).model_dump(),
                                             "compare": {"methods": ("mean", "max", "abmil:published")}})  # fmt: skip
    plan = cast(Any, SimpleNamespace(cohort=cases.cohort, settings=settings, labels=None, request=Request()))
    trial, done = trial_of(cases, settings.train), 0

    def counted(_: Trial, todo: Any) -> Results:
        nonlocal done
        done += len(todo)
        return [(0.5, None) for _ in todo]

    rows = compared_methods(settings, two_scales=False)
    tune([(row.method, trial, row.train, None) for row in rows], counted)
    assert done == num_tuning_trainings(plan) == (1 if splits else 2) * 3 * 2 * 2
    one = cast(Any, SimpleNamespace(**vars(plan) | {"request": Request(one_method=True)}))
    assert num_tuning_trainings(one) == done // 2


# ---------------------------------------------------------------------------------------------------- commands


def test_commands_tune_and_tell_what_was_tuned(tmp_path: Path):
    planted.planted(tmp_path / "bags", patients=12, shift=6.0)
    table = tmp_path / "labels.csv"
    slides = sorted(path.stem for path in (tmp_path / "bags" / "features_vit").glob("*.h5"))
    table.write_text("slide,label\n" + "".join(f"{slide},{slide.split('_')[0]}\n" for slide in slides))
    study = tmp_path / "study"
    given = ("--features", tmp_path / "bags" / "features_vit", "--labels", table, "--train.folds", 2)
    flags = (*given, "--train.epochs", 3, "--train.seeds", 1, "--evaluate.bootstrap", 100, "--workers", 0, "--tune")
    flags = (*flags, "--train.tune-folds", 2)
    done = selfvitmil("compare", study, *flags, "--compare.methods", "mean", "max", "abmil:published")
    assert done.returncode == 0, done.stderr
    rows = {row["display_name"]: row for row in rows_of(study / "results" / "compare" / "table.csv")}
    assert {name: row["recipe"] for name, row in rows.items()} == {
        "mean": "tuned", "max": "tuned", "abmil (published)": rows["abmil (published)"]["recipe"],
    }  # fmt: skip
    assert rows["abmil (published)"]["recipe"] != "tuned"
    assert "fold0: " in rows["mean"]["recipe_words"]
    methods = json.loads((study / "results" / "compare" / "metrics.json").read_text())["methods"]
    assert [len(each["tuned"]["fold1"]["tried"]) for each in methods if "tuned" in each] == [6, 6]
    assert len(list(study.rglob("tuning.json"))) == 4


@pytest.mark.parametrize(
    "outcome",
    [("--train.outcome", "survival"), ("--train.target", "value", "--train.outcome", "continuous")],
)
def test_other_outcomes_are_tuned_by_their_own_metric(tmp_path: Path, outcome: tuple[str, ...]):
    table = planted_outcomes(tmp_path)
    study = tmp_path / "study"
    flags = ("--features", tmp_path / "features_vit", "--labels", table, "--train.aggregator", "mean", "--tune")
    flags = (*flags, "--train.epochs", 4, "--train.seeds", 1, "--train.tune-folds", 2, "--workers", 0)
    done = selfvitmil("evaluate", study, *flags, *outcome, "--evaluate.bootstrap", 100)
    assert done.returncode == 0, done.stderr
    (file,) = study.rglob("tuning.json")
    info = json.loads(file.read_text())
    assert info["higher_is_better"] is (outcome[-1] == "survival")
    means = [each["mean"] for each in info["tried"]]
    assert means[info["chosen"]] == (max(means) if info["higher_is_better"] else min(means))
