"""Test slides that an encoder has seen: found for every split, labelled in results, avoided by encoders per split."""

from __future__ import annotations

import csv
import json
import re
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from helpers.cli import Done, selfvitmil
from helpers.cohorts import cohort_file
from helpers.planted import row, write_features
from helpers.studies import MICRO, TILING
from selfvitmil.cohort import Cohort, Split, k_fold, read_cohort
from selfvitmil.evaluate.dataset import seen_slides
from selfvitmil.settings import PretrainSettings, StudySettings, TrainSettings
from selfvitmil.slides import synthetic
from selfvitmil.stages.pretrain import encoder_runs, settle_scope

QUICK = ("--train.seeds", 1, "--train.epochs", 1, "--compare.methods", "mean", "--compare.baseline", "mean")
QUICK += ("--train.folds", 3, "--evaluate.bootstrap", 100, "--workers", 0)


def cohort_of(patients: int, slides_each: int) -> Cohort:
    rows = [
        row(f"{label}{p}_{s}", label, f"{label}{p}")
        for label in ("a", "b")
        for p in range(patients)
        for s in range(slides_each)
    ]
    return Cohort(tuple(rows))


def test_a_test_slide_counts_as_seen_by_its_patient():
    cohort = cohort_of(2, 2)
    split = Split("x", (), (), ("a0_0", "a1_0", "b0_0", "b0_1"))
    assert seen_slides(split, {"a0_1", "b0_0", "gone"}, cohort) == ("a0_0", "b0_0", "b0_1")
    assert seen_slides(split, {"b1_0"}, cohort) == ()
    assert seen_slides(split, set(), cohort) == ()


# ---------------------------------------------------------------------------------------------------- labelled


@pytest.fixture
def features(tmp_path: Path) -> tuple[Path, Path]:
    """Feature files of 24 slides of 12 patients, and their table."""
    generator = np.random.default_rng(0)
    names = [f"p{p:02d}s{s}" for p in range(12) for s in range(2)]
    for name in names:
        write_features(tmp_path, name, generator.normal(size=(4, 6)))
    columns = {"label": [str(int(name[1:3]) % 2) for name in names], "patient": [name[:3] for name in names]}
    return tmp_path / "features_vit", cohort_file(tmp_path / "given", names, columns)


@pytest.mark.parametrize("split", ["k-fold", "monte-carlo"])
def test_results_say_how_many_test_slides_the_encoder_has_seen(features: tuple[Path, Path], tmp_path: Path, split: str):
    folder, table = features
    trained_on = ["p00s0", "p01s0", "p01s1", "p02s1", "p03s0", "p04s0"]
    (folder / "encoder_slides.txt").write_text("\n".join(trained_on) + "\n")
    flags = ("--features", folder, "--labels", table, "--train.split", split, *QUICK)
    done = selfvitmil("compare", tmp_path / "study", *flags)
    assert done.returncode == 0, done.stderr
    results = tmp_path / "study" / "results" / "compare"
    wanted: dict[str, set[str]] = defaultdict(set)  # by the file of predictions alone
    with (results / "predictions.csv").open(newline="") as file:
        for each in csv.DictReader(file):
            if each["part"] == "test" and each["patient"] in {slide[:3] for slide in trained_on}:
                wanted[each["split"]].add(each["slide"])
    told = json.loads((results / "metrics.json").read_text())["methods"][0]
    assert told["transductive"] == {name: len(slides) for name, slides in wanted.items()}
    assert any(text.startswith("transductive") for text in told["warnings"])
    with (results / "table.csv").open(newline="") as file:
        assert [each["transductive"] for each in csv.DictReader(file)] == ["yes"]
    assert re.search(r"(?m)^\| mean \| transductive \|", (results / "table.md").read_text())
    assert "warning: transductive" in done.stderr  # before anything is trained
    selfvitmil("report", tmp_path / "study")
    assert "transductive" in (tmp_path / "study" / "report" / "index.html").read_text()
    trained = selfvitmil(
        "train", tmp_path / "study", *flags[:2], "--train.split", split, "--train.folds", 3, *QUICK[:4]
    )
    assert "warning: transductive" in trained.stderr


def test_nothing_is_claimed_of_encoders_whose_slides_are_unknown(features: tuple[Path, Path], tmp_path: Path):
    folder, table = features
    done = selfvitmil("compare", tmp_path / "study", "--features", folder, "--labels", table, *QUICK)
    assert done.returncode == 0, done.stderr
    results = tmp_path / "study" / "results" / "compare"
    assert json.loads((results / "metrics.json").read_text())["methods"][0]["transductive"] is None
    assert "transductive" not in (results / "table.md").read_text()
    assert "transductive" not in done.stdout + done.stderr


# ---------------------------------------------------------------------------------------------------- per split


def settings_of(**train: object) -> StudySettings:
    return StudySettings(train=TrainSettings.model_validate({"folds": 3, **train}))


def test_without_a_split_column_every_split_has_an_encoder_that_knows_none_of_its_test_patients(tmp_path: Path):
    cohort = cohort_of(6, 2)
    settings, lines = settle_scope(tmp_path, "dino", cohort, settings_of())
    assert settings.pretrain.per_split
    assert any("--pretrain.transductive" in line for line in lines)
    runs = encoder_runs(cohort, "dino", settings)
    folds = k_fold(cohort, 3)
    assert [run.name for run in runs] == [f"dino_{fold.name}" for fold in folds]
    for run, fold in zip(runs, folds, strict=True):
        assert {each.patient for each in run.rows}.isdisjoint(cohort[slide].patient for slide in fold.test)
        assert {each.slide for each in run.rows} == set(cohort.slides) - set(fold.test)


def test_one_encoder_stays_one_where_it_sees_no_test_slide(tmp_path: Path):
    sides = {0: "train", 1: "train", 2: "train", 3: "train", 4: "test", 5: "test"}
    rows = [row(f"{label}{p}", label, "", sides[p]) for label in ("a", "b") for p in range(6)]
    cohort = Cohort(tuple(rows))
    for train in ({}, {"split": "given"}):
        assert settle_scope(tmp_path, "dino", cohort, settings_of(**train)) == (settings_of(**train), [])
    settled, _ = settle_scope(tmp_path, "dino", cohort, settings_of(split="k-fold"))
    assert settled.pretrain.per_split
    asked = settings_of(split="k-fold").model_copy(update={"pretrain": PretrainSettings(transductive=True)})
    assert settle_scope(tmp_path, "dino", cohort, asked) == (asked, [])
    (run,) = encoder_runs(cohort, "dino", asked)
    assert len(run.rows) == len(rows)
    assert "transductive" in run.words


def test_slides_without_a_label_are_seen_unless_their_patient_is_tested():
    cohort = cohort_of(4, 1)
    cohort = Cohort(
        (*cohort.rows, row("free", None, "other"), row("of_a0", None, "a0"), row("kept", None, "k", "test"))
    )
    settings = StudySettings(train=TrainSettings(folds=2), pretrain=PretrainSettings(per_split=True))
    runs = encoder_runs(cohort, "e", settings)
    for run, fold in zip(runs, k_fold(cohort, 2), strict=True):
        seen = {each.slide for each in run.rows}
        assert "free" in seen
        assert "kept" not in seen
        assert ("of_a0" in seen) is ("a0_0" not in fold.test)


@pytest.fixture(scope="module")
def per_split(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Done]:
    """A run on slides without a split column, two of each patient, with two folds."""
    place = tmp_path_factory.mktemp("per_split")
    synthetic.make_cohort(place / "made", slides=16, seed=1, size=(1024, 1024), slides_per_patient=1)
    rows = sorted(read_cohort(place / "made" / "cohort.csv").rows, key=lambda each: str(each.label))
    study = place / "study"
    study.mkdir()
    (study / "study.toml").write_text(MICRO.replace("[train]", "[train]\nfolds = 2\nsplit = 'k-fold'"))
    lines = ["slide,path,label,patient", *(f"{r.slide},{r.path},{r.label},p{k // 2}" for k, r in enumerate(rows))]
    (study / "cohort.csv").write_text("\n".join(lines) + "\n")
    return study, selfvitmil("run", study)


def patients_of_test(predictions: Path) -> dict[str, set[str]]:
    found: dict[str, set[str]] = defaultdict(set)
    with predictions.open(newline="") as file:
        for each in csv.DictReader(file):
            if each["part"] == "test":
                found[each["split"]].add(each["patient"])
    return found


@pytest.mark.slow
def test_a_run_with_folds_trains_embeds_and_learns_with_an_encoder_per_fold(per_split: tuple[Path, Done]):
    study, done = per_split
    assert done.returncode == 0, done.stdout + done.stderr
    assert (study / "report" / "index.html").exists()
    cohort = read_cohort(study / "cohort.csv")
    tested = patients_of_test(study / "results" / "compare" / "predictions.csv")
    assert set(tested) == {"fold0", "fold1"}
    for split, patients in tested.items():
        slides = (study / "encoders" / f"dino_{split}" / "slides.txt").read_text().split()
        assert slides
        assert patients.isdisjoint(cohort[slide].patient for slide in slides)
        assert len(list((study / "bags" / TILING / f"features_dino_{split}").glob("*.h5"))) == 16
        config = json.loads((study / "models" / TILING / "dino" / "mean" / split / "seed0" / "config.json").read_text())
        assert patients.isdisjoint(cohort[slide].patient for slide in config["trained_on"])
    told = json.loads((study / "results" / "compare" / "metrics.json").read_text())["methods"]
    assert [each["transductive"] for each in told] == [None, None]
    assert list((study / "maps" / "dino_self-vit-mil").glob("*.h5"))


@pytest.mark.slow
def test_models_of_a_fold_learn_from_the_features_of_its_encoder(per_split: tuple[Path, Done]):
    """Cases of a split point to the feature files of the split's own encoder."""
    study, _ = per_split
    from selfvitmil.stages.train import prepare
    from selfvitmil.study import FeatureChoice, open_study

    _, learning = prepare(open_study(study), FeatureChoice(), "train")
    cases, splits, features = learning.cases, learning.splits, learning.features
    assert features.encoder == cases.encoder == "dino"
    for split in splits:
        own = cases.of_split(split.name)
        assert {own.by_slide[slide].path.parent.name for slide in split.test} == {f"features_dino_{split.name}"}


@pytest.mark.slow
def test_a_second_run_keeps_the_encoders_and_a_package_takes_that_of_its_fold(per_split: tuple[Path, Done]):
    study, _ = per_split
    again = selfvitmil("run", study, "--until", "embed")
    assert again.returncode == 0, again.stderr
    assert "up to date (encoders/dino_fold0); up to date (encoders/dino_fold1)" in " ".join(again.stdout.split())
    packed = selfvitmil("package", study, "--split", "fold1", "--out", study.parent / "model")
    assert packed.returncode == 0, packed.stderr
    about = json.loads((study.parent / "model" / "package.json").read_text())
    assert [each["name"] for each in about["encoders"]] == ["dino_fold1"]
    assert about["evaluation"] is not None


@pytest.mark.slow
def test_other_folds_than_the_encoders_were_trained_for_stop_a_run_and_are_labelled_elsewhere(
    per_split: tuple[Path, Done],
):
    study, _ = per_split
    refused = selfvitmil("run", study, "--train.seed", 5)
    assert refused.returncode == 2
    assert "dino_fold" in refused.stderr
    labelled = selfvitmil("evaluate", study, "--train.seed", 5, "--name", "other", "--workers", 0)
    assert labelled.returncode == 0, labelled.stderr
    told = json.loads((study / "results" / "other" / "metrics.json").read_text())["methods"][0]
    assert told["transductive"]
    missing = selfvitmil("evaluate", study, "--train.split", "monte-carlo", "--name", "x", "--workers", 0)
    assert missing.returncode == 2
    assert missing.code == "missing-split-encoders"
