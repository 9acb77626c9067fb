"""`train`, `evaluate`, `compare` and `export` as a user meets them, on feature files alone and on made slides."""

from __future__ import annotations

import csv
import json
import shutil
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest

from helpers import planted
from helpers.cli import Done, rows_of, selfvitmil
from helpers.outcomes import changed
from selfvitmil.bags import read_bag
from selfvitmil.embed import EmbedJob, embed_slide
from selfvitmil.encoder import EncoderConfig, build_encoder, load_encoder, save_encoder
from selfvitmil.errors import ConfigError
from selfvitmil.settings import EmbedSettings, StudySettings, resolve_settings
from selfvitmil.slides import SlideRef, synthetic
from selfvitmil.stages.compare import _make_baseline
from selfvitmil.store.failures import Failure, record_failures
from selfvitmil.store.provenance import BUILT, UP_TO_DATE, BuildOutcome, Change, ChangeKind, rebuilt
from selfvitmil.study import FeatureChoice, find_features

QUICK = ("--train.seeds", 2, "--train.epochs", 12, "--evaluate.bootstrap", 100)


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Somebody else's feature folder with a table of labels in CLAM's form, and splits in it."""
    folder = tmp_path_factory.mktemp("foreign")
    cases = planted.planted(folder, patients=12, shift=6.0)
    with (folder / "labels.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["case_id", "slide_id", "label", "split"])
        for number, row in enumerate(cases.cohort.rows):
            writer.writerow([row.patient, row.slide, row.label, "test" if number % 12 >= 8 else "train"])
    return folder


@pytest.fixture
def study(foreign: Path, tmp_path: Path) -> Path:
    shutil.copytree(foreign, tmp_path / "foreign")
    return tmp_path / "study"


def learn(command: str, study: Path, *arguments: object) -> Done:
    foreign = study.parent / "foreign"
    given = ("--features", foreign / "features_vit", "--labels", foreign / "labels.csv")
    return selfvitmil(command, study, *given, *QUICK, *arguments)


def test_train_writes_models_and_opens_no_test_slide(study: Path):
    done = learn("train", study, "--train.aggregator", "dsmil", "--train.options.top", 2)
    assert done.returncode == 0, done.stderr
    models = study / "models" / "external" / "features_vit" / "dsmil"
    config = json.loads((models / "given" / "seed1" / "config.json").read_text())
    assert config["aggregator"]["top"] == 2
    test = {row["slide_id"] for row in rows_of(study.parent / "foreign" / "labels.csv") if row["split"] == "test"}
    assert not test & {*config["trained_on"], *config["chosen_on"]}
    assert not (study / "results").exists()
    assert "positive: tumor" in done.stdout
    again = learn("train", study, "--train.aggregator", "dsmil", "--train.options.top", 2)
    assert again.stdout.count("up to date") == 2


def test_evaluate_tells_of_every_test_slide(study: Path):
    done = learn("evaluate", study, "--train.aggregator", "max", "--evaluate.confidence", 0.975)
    assert done.returncode == 0, done.stderr
    assert "97.5 % interval" in done.stdout
    folder = study / "results" / "features_vit_max"
    rows = rows_of(folder / "predictions.csv")
    truth = {row["slide_id"]: row["label"] for row in rows_of(study.parent / "foreign" / "labels.csv")}
    tested = [row for row in rows if row["part"] == "test" and row["seed"] == "ensemble"]
    assert {row["slide"] for row in tested} == {
        row["slide_id"] for row in rows_of(study.parent / "foreign" / "labels.csv") if row["split"] == "test"
    }
    assert all(row["label"] == truth[row["slide"]] for row in tested)
    scores = {label: [float(row["score"]) for row in tested if row["label"] == label] for label in ("normal", "tumor")}
    pairs = [(a > b) + (a == b) / 2 for a in scores["tumor"] for b in scores["normal"]]
    told = json.loads((folder / "metrics.json").read_text())["methods"][0]["slide"]["ensemble"]["auc"]["value"]
    assert told == pytest.approx(sum(pairs) / len(pairs))
    assert told >= 0.9  # instances are shifted by six standard deviations
    for name in ("roc", "pr", "calibration", "confusion", "training"):
        ElementTree.parse(folder / f"{name}.svg")
    assert "optimistic" not in (folder / "metrics.json").read_text().lower().replace('"protocol": "honest"', "")


def test_the_optimistic_protocol_says_so_everywhere(study: Path):
    done = learn("evaluate", study, "--train.aggregator", "mean", "--evaluate.protocol", "optimistic")
    assert done.returncode == 0, done.stderr
    folder = study / "results" / "features_vit_mean_optimistic"
    assert "OPTIMISTIC" in done.stdout
    assert {row["protocol"] for row in rows_of(folder / "predictions.csv")} == {"optimistic"}
    assert all("TEST" in row["threshold_from"] for row in rows_of(folder / "predictions.csv"))
    assert "optimistic" in (folder / "metrics.json").read_text()
    assert "OPTIMISTIC" in (folder / "roc.svg").read_text()


def test_compare_puts_all_rows_into_one_table(study: Path):
    chosen = [word for name in ("dsmil", "abmil", "mean") for word in ("--compare.methods", name)]
    done = learn("compare", study, *chosen)
    assert done.returncode == 0, done.stderr
    folder = study / "results" / "compare"
    rows = {row["method"]: row for row in rows_of(folder / "table.csv")}
    assert list(rows) == ["dsmil", "abmil", "mean"]
    assert rows["dsmil"]["published_auc"] == "0.8944"
    assert not rows["mean"]["published_auc"]
    assert "p Holm" in done.stdout
    assert {row["method"] for row in rows_of(folder / "predictions.csv")} == {"dsmil", "abmil", "mean"}
    ElementTree.parse(folder / "auc.svg")
    assert "| dsmil" in (folder / "table.md").read_text()


def test_equal_runs_give_equal_bytes(study: Path, tmp_path: Path):
    for place in (study, study.parent / "twin"):
        assert learn("evaluate", place, "--train.aggregator", "abmil").returncode == 0
    for path in (study / "results").rglob("*"):
        if path.suffix in (".csv", ".json", ".svg"):
            twin = study.parent / "twin" / path.relative_to(study)
            assert path.read_bytes() == twin.read_bytes(), path.name
    for path in (study / "models").rglob("model.safetensors"):
        assert path.read_bytes() == (study.parent / "twin" / path.relative_to(study)).read_bytes()


def test_a_broken_feature_file_fails_alone(study: Path):
    broken = study.parent / "foreign" / "features_vit" / "tumor_02_0.h5"
    broken.write_bytes(broken.read_bytes()[:1000])
    done = learn("train", study, "--train.aggregator", "mean")
    assert done.returncode == 3
    assert "FAILED tumor_02_0 (train)" in done.stdout
    assert rows_of(study / "failures.csv")[0]["slide"] == "tumor_02_0"
    assert (study / "models" / "external" / "features_vit" / "mean" / "given" / "seed0" / "config.json").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--train.aggregator", "dsmill"), "did you mean 'dsmil'? There are"),
        (("--train.options.topp", 3), "did you mean 'top'?"),
        (("--train.positive", "tumour"), "train.positive 'tumour'"),
        (("--train.split", "k-fold", "--train.folds", 40), "40 folds"),
        (("--train.split", "files"), "train.split_folder"),
        (("--encoder", "demo"), "neither with --encoder"),
    ],
)
def test_wrong_input_is_refused(study: Path, arguments: tuple[object, ...], words: str):
    done = learn("train", study, *arguments)
    assert done.returncode in (2, 3)
    assert words in done.stderr


def test_a_study_without_vectors_says_what_to_do(tmp_path: Path):
    synthetic.make_cohort(tmp_path / "slides", slides=4, seed=1, size=(1536, 1536))
    done = selfvitmil("check", tmp_path / "study", "--cohort", tmp_path / "slides" / "cohort.csv", "--workers", 0)
    assert done.returncode == 0
    done = selfvitmil("train", tmp_path / "study")
    assert done.returncode == 2
    assert done.code == "ambiguous-features"


# ---------------------------------------------------------------------------------------------------- with slides


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study of small slides with an untrained encoder and vectors of two scales."""
    folder = tmp_path_factory.mktemp("embedded")
    synthetic.make_cohort(folder / "slides", slides=14, seed=2, size=(1536, 1536))
    study = folder / "study"
    small = ("--tile.mpp", 1.0, "--tile.size-px", 64, "--tile.parent-mpp", 4.0, "--workers", 0)
    assert selfvitmil("tile", study, "--cohort", folder / "slides" / "cohort.csv", *small).returncode == 0
    args = {"embed_dim": 24, "depth": 4, "num_heads": 2}
    encoder = build_encoder("vit_tiny_patch16_224", img_size=64, model_args=args, stain="slide")
    save_encoder(study / "encoders" / "tiny", encoder)
    assert selfvitmil("embed", study, "--encoder", "tiny", *small).returncode == 0
    return study


SCALES = ("--tile.mpp", 1.0, "--tile.size-px", 64, "--tile.parent-mpp", 4.0)


@pytest.mark.slow
def test_compare_with_all_kinds_of_rows(embedded: Path):
    chosen = [word for name in ("self-vit-mil", "mean", "dsmil-lc") for word in ("--compare.methods", name)]
    asked = ("--compare.random-encoder", "--compare.mean-color", "--compare.supervised", "probe")
    splits = ("--train.split", "k-fold", "--train.folds", 2, "--train.validation", 0.4)
    done = selfvitmil("compare", embedded, *SCALES, "--workers", 0, *QUICK, *splits, *chosen, *asked)
    assert done.returncode == 0, done.stderr
    rows = {row["display_name"]: row for row in rows_of(embedded / "results" / "compare" / "table.csv")}
    assert list(rows) == [
        "self-vit-mil",
        "mean",
        "dsmil-lc",
        "self-vit-mil (two scales)",
        "untrained encoder",
        "mean colour",
        "supervised probe",
    ]
    assert rows["mean colour"]["features"] == "mean_color"
    assert not rows["untrained encoder"]["published_auc"]
    bags = embedded / "bags"
    fine = read_bag(next((bags / "1mpp_64px_0px" / "features_tiny").glob("*.h5")))
    joined = read_bag(next((bags / "1mpp_64px_0px+4mpp_64px_0px" / "features_tiny").glob("*.h5")))
    assert joined.dim == 2 * fine.dim


@pytest.mark.slow
def test_layouts_of_one_encoder_are_kept_apart(embedded: Path):
    one = ("--tile.mpp", 1.0, "--tile.size-px", 64, "--workers", 0)
    bags, layout = embedded / "bags" / "1mpp_64px_0px", ("--embed.layout", "cls4+clsmean")
    before = {path.name: path.read_bytes() for path in (bags / "features_tiny").glob("*.h5")}
    splits = ("--train.split", "k-fold", "--train.folds", 2, "--train.validation", 0.4)
    done = selfvitmil("compare", embedded, *one, *QUICK, *splits, *layout, "--encoder", "tiny")
    assert done.returncode == 2  # not with the embeddings of another layout
    assert done.code == "no-features"
    done = selfvitmil("embed", embedded, "--encoder", "tiny", *one, *layout)
    assert done.returncode == 0, done.stderr
    assert "tiny__cls4-clsmean: layout cls4+clsmean, embeddings of 120 dimensions" in done.stdout
    assert {path.name: path.read_bytes() for path in (bags / "features_tiny").glob("*.h5")} == before
    for path in (bags / "features_tiny__cls4-clsmean").glob("*.h5"):
        bag, other = read_bag(path), read_bag(bags / "features_tiny" / path.name)
        assert json.loads(bag.attributes["made_from"])["layout"] == "cls4+clsmean"
        vectors = bag.features_ND.astype(np.float32)
        parts = vectors.reshape(len(bag), 5, 24)
        assert np.abs(parts[:, 4] - parts[:, :4].mean(axis=1)).max() < 5e-3  # float16
        assert np.abs(vectors[:, :96] - other.features_ND[:, :96].astype(np.float32)).max() < 5e-3
    chosen = ("--compare.methods", "self-vit-mil", "--compare.methods", "mean", "--compare.mean-color")
    rows = ("--compare.random-encoder", *chosen, "--name", "text")
    done = selfvitmil("compare", embedded, *one, *QUICK, *splits, *rows, *layout)
    assert done.returncode == 0, done.stderr
    features = {row["display_name"]: row["features"] for row in rows_of(embedded / "results" / "text" / "table.csv")}
    assert features == {
        "self-vit-mil": "tiny__cls4-clsmean",
        "mean": "tiny__cls4-clsmean",
        "untrained encoder": "untrained_tiny__cls4-clsmean",
        "mean colour": "mean_color",
    }
    untrained = read_bag(next((bags / "features_untrained_tiny__cls4-clsmean").glob("*.h5")))
    assert json.loads(untrained.attributes["made_from"])["layout"] == "cls4+clsmean"


def test_embeddings_of_two_layouts_in_one_folder_are_refused(embedded: Path, tmp_path: Path):
    bags = tmp_path / "bags" / "1mpp_64px_0px" / "features_tiny"
    shutil.copytree(embedded / "bags" / "1mpp_64px_0px" / "features_tiny", bags)
    file = min(bags.glob("*.h5"))
    job = EmbedJob(
        SlideRef(file.stem, embedded.parent / "slides" / "slides" / file.with_suffix(".svs").name),
        embedded / "tiles" / "1mpp_64px_0px" / file.name, file, str(embedded / "encoders" / "tiny"), "tiny", "slide",
        EmbedSettings(layout="cls4+clsmean"),
    )  # fmt: skip
    shape = read_bag(file).features_ND.shape
    assert changed(embed_slide(job).outcome) == ["layout", "encoder"]
    assert read_bag(file).features_ND.shape == shape  # nothing else would tell
    done = selfvitmil("train", tmp_path / "study", "--features", bags, "--labels", embedded / "cohort.csv", *QUICK)
    assert done.returncode == 2
    assert "feature files of different weights or layouts" in done.stderr


def test_baselines_follow_the_tiles_and_the_encoder_of_the_study(tmp_path: Path):
    args = {"embed_dim": 24, "depth": 4, "num_heads": 2}

    def settings(**stages: object) -> StudySettings:
        return StudySettings.model_validate({"tile": {"mpp": 0.5, "size_px": 64}, **stages})

    def make(name: str, like: str = "own", **stages: object) -> BuildOutcome:
        return _make_baseline(tmp_path, name, like, settings(**stages))

    def stored(name: str) -> EncoderConfig:
        return load_encoder(tmp_path / "encoders" / name).config

    save_encoder(tmp_path / "encoders" / "own", build_encoder("vit_tiny_patch16_224", img_size=64, model_args=args))
    for name in ("mean_color", "untrained_own"):
        assert make(name) == BUILT
        before = (tmp_path / "encoders" / name / "model.safetensors").stat().st_mtime_ns
        assert make(name) == UP_TO_DATE
        assert (tmp_path / "encoders" / name / "model.safetensors").stat().st_mtime_ns == before
    outcome = make("mean_color", tile={"mpp": 1.0, "size_px": 64}, stain={"method": "none"})
    assert outcome == rebuilt(
        Change(ChangeKind.SETTING, "mpp", 0.5, 1.0), Change(ChangeKind.SETTING, "stain", "slide", "none")
    )
    assert (stored("mean_color").mpp, stored("mean_color").stain) == (1.0, "none")
    other = build_encoder("vit_tiny_patch16_224", img_size=64, model_args={**args, "embed_dim": 32})
    save_encoder(tmp_path / "encoders" / "own", other)
    assert changed(make("untrained_own")) == ["model_args.embed_dim"]
    assert stored("untrained_own").model_args == other.config.model_args
    trained = build_encoder("vit_tiny_patch16_224", img_size=64, model_args=args, trained_on="train split of demo")
    save_encoder(tmp_path / "encoders" / "mean_color", trained)
    with pytest.raises(ConfigError, match="encoders/mean_color is no baseline"):
        make("mean_color")
    assert stored("mean_color").trained_on == "train split of demo"
    weights = tmp_path / "encoders" / "untrained_own" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert make("untrained_own") == rebuilt(Change(ChangeKind.DAMAGED_FILE, "untrained_own"))
    assert make("untrained_own") == UP_TO_DATE


def test_vectors_that_could_not_be_made_anew_are_not_learned_from(embedded: Path, tmp_path: Path):
    shutil.copytree(embedded / "bags", tmp_path / "bags")
    settings = resolve_settings(None, {"tile": {"mpp": 1.0, "size_px": 64}})
    found = find_features(tmp_path, FeatureChoice("tiny"), settings).files
    failed, *others = sorted(found)
    failure = Failure(failed, "embed tiny 1mpp_64px_0px", "its slide is gone", "")
    record_failures(tmp_path, failure.stage, [failed], [failure])
    assert sorted(find_features(tmp_path, FeatureChoice("tiny"), settings).files) == others
    record_failures(tmp_path, failure.stage, [failed], [])
    assert find_features(tmp_path, FeatureChoice("tiny"), settings).files == found


def test_export_writes_what_the_other_tool_reads(embedded: Path, tmp_path: Path):
    done = selfvitmil(
        "export", embedded, "--encoder", "tiny", "--to", "clam", "--out", tmp_path / "clam", *SCALES, "--workers", 0
    )
    assert done.returncode == 0, done.stderr
    ours = embedded / "bags" / "1mpp_64px_0px" / "features_tiny"
    for path in ours.glob("*.h5"):
        theirs = read_bag(tmp_path / "clam" / "pt_files" / f"{path.stem}.pt")
        assert theirs.features_ND.tolist() == read_bag(path).features_ND.astype("float32").tolist()
    refused = selfvitmil("export", embedded, "--encoder", "tiny", "--to", "clam", "--out", ours, *SCALES)
    assert refused.returncode == 2
    unknown = selfvitmil("export", embedded, "--encoder", "other", "--to", "clam", "--out", tmp_path / "x", *SCALES)
    assert unknown.code == "no-features"


def rename_labels(study: Path, names: dict[str, str]) -> None:
    path = study.parent / "foreign" / "labels.csv"
    rows = [{**row, "label": names.get(row["label"], row["label"])} for row in rows_of(path)]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


@pytest.mark.parametrize("positive", ["metastasis", "zz metastasis"])
def test_the_names_of_the_classes_do_not_decide_what_is_learned(study: Path, positive: str):
    rename_labels(study, {"tumor": positive})
    done = learn("evaluate", study)
    assert done.returncode == 0, done.stderr
    told = json.loads((study / "results" / "features_vit_self-vit-mil" / "metrics.json").read_text())["methods"][0]
    assert told["positive"] == positive
    assert told["slide"]["ensemble"]["auc"]["value"] > 0.9


def test_a_guessed_positive_class_is_told_before_training_and_stored(study: Path):
    rename_labels(study, {"tumor": "lusc", "normal": "luad"})
    done = learn("evaluate", study, "--train.aggregator", "mean")
    assert done.returncode == 0, done.stderr
    assert done.stderr.index("positive: lusc (GUESSED") >= 0
    told = json.loads((study / "results" / "features_vit_mean" / "metrics.json").read_text())["methods"][0]
    assert told["positive"] == "lusc"
    assert "--train.positive 'luad'" in told["positive_from"]


@pytest.mark.slow
def test_every_row_of_a_comparison_tells_its_recipe(study: Path):
    methods = ("--compare.methods", "dsmil", "--compare.methods", "dsmil:published", "--compare.methods", "mean")
    done = learn("compare", study, *methods, "--train.options.top", 2, "--train.aggregator", "dsmil")
    assert done.returncode == 0, done.stderr
    rows = {row["display_name"]: row for row in rows_of(study / "results" / "compare" / "table.csv")}
    assert {name: row["recipe"] for name, row in rows.items()} == {
        "dsmil": "ours", "dsmil (published)": "published", "mean": "ours",
    }  # fmt: skip
    assert "top 2 (published 1)" in rows["dsmil"]["recipe_words"]
    assert "Looks for" in (study / "results" / "compare" / "table.md").read_text()
    assert (rows["dsmil"]["published_auc"], rows["dsmil (published)"]["published_auc"]) == ("", "0.8944")
    models = study / "models" / "external" / "features_vit"
    exact = json.loads((models / "dsmil (published)" / "given" / "seed0" / "config.json").read_text())
    assert (exact["aggregator"]["top"], exact["aggregator"]["evidence"], exact["recipe"]["epochs"]) == (1, "free", 50)
    assert "recipe of dsmil (published): as published: DSMIL's code of 2024" in done.stderr
    refused = learn("compare", study, "--compare.methods", "mean", "--train.options.top", 2)
    assert refused.returncode == 2
    assert refused.code == "options-of-other-method"
