"""`package` and `predict`: a model that leaves its study, and what it says of new slides."""

from __future__ import annotations

import csv
import json
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from helpers.cli import Done, rows_of, selfvitmil
from helpers.error_codes import has_code
from selfvitmil.commands.package import package
from selfvitmil.encoder import build_encoder, load_encoder, save_encoder
from selfvitmil.errors import ArtefactError, ConfigError
from selfvitmil.localize.heatmap import read_heatmap
from selfvitmil.package import fit_distribution, ood, open_package
from selfvitmil.package.ood import SlideStatistics
from selfvitmil.slides import open_slide, synthetic
from selfvitmil.slides.synthetic.pyramid import encode_pyramid, write_pyramid
from selfvitmil.stain import StainFit
from selfvitmil.store.files import file_fingerprint, hash_of
from selfvitmil.study import FeatureChoice, open_study

SIZE = (1536, 1536)
TILING, COARSE = "1mpp_48px_0px", "2mpp_48px_0px"
STUDY = """
[tile]
mpp = 1.0
size_px = 48
parent_mpp = [2.0]
[embed]
batch = 64
[train]
aggregator = "dsmil"
seeds = 2
epochs = 25
options.dsmil = {evidence = "free", top = 1} # with seed 4 below it learns something by vectors of chance
[evaluate]
bootstrap = 100
calibration = "temperature"
[localize]
picture_px = 300
colors = ["red"]
"""


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study of made slides with an untrained encoder and an evaluated aggregator."""
    folder = tmp_path_factory.mktemp("package") / "study"
    synthetic.make_cohort(folder.parent / "cohort", slides=12, seed=1, size=SIZE, test_fraction=0.25)
    table = folder.parent / "cohort" / "cohort.csv"
    head, *rows = table.read_text(encoding="utf-8").splitlines()
    sites = [f"{row},{'Springfield' if k % 3 else 'Shelbyville'}" for k, row in enumerate(rows)]
    table.write_text("\n".join([f"{head},hospital", *sites]), encoding="utf-8")
    folder.mkdir()
    (folder / "study.toml").write_text(STUDY)
    torch.manual_seed(4)  # an encoder by whose vectors something is learned: else there is no calibration
    args = {"embed_dim": 48, "depth": 4, "num_heads": 3}
    save_encoder(folder / "encoders" / "tiny", build_encoder("vit_tiny_patch16_224", img_size=48, model_args=args))
    names = [row["slide"] for row in rows_of(folder.parent / "cohort" / "cohort.csv")]
    (folder / "encoders" / "tiny" / "slides.txt").write_text("\n".join(names))  # as pretraining leaves it
    done(selfvitmil("tile", folder, "--cohort", folder.parent / "cohort" / "cohort.csv", "--workers", 0))
    done(selfvitmil("embed", folder, "--encoder", "tiny", "--workers", 0))
    done(selfvitmil("evaluate", folder))
    return folder


@pytest.fixture(scope="module")
def model(study: Path) -> Path:
    done(selfvitmil("package", study, "--out", study.parent / "model"))
    return study.parent / "model"


def done(result: Done, status: int = 0) -> Done:
    assert result.returncode == status, result.stdout + result.stderr
    return result


def slides_of(study: Path, split: str) -> list[Path]:
    rows = rows_of(study / "cohort.csv")
    return [(study / row["path"]).resolve() for row in rows if row["split"] == split]


def answers_of(folder: Path) -> dict[str, Any]:
    return {each["slide"]: each for each in json.loads((folder / "predictions.json").read_text())["slides"]}


def write_slide(path: Path, pixels: np.ndarray, mpp: float = 0.25) -> Path:
    """A slide with these pixels."""
    padded = np.concatenate([pixels, np.full((*pixels.shape[:2], 1), 255, np.uint8)], axis=2)
    height, width = pixels.shape[:2]
    render = lambda x, y, w, h: np.ascontiguousarray(padded[y : y + h, x : x + w])  # noqa: E731
    write_pyramid(path, encode_pyramid((width, height), render, "svs40", 85), mpp)
    return path


@pytest.mark.slow
def test_the_card_says_that_the_encoder_has_seen_test_slides(study: Path, model: Path):
    evaluation = json.loads((model / "package.json").read_text())["evaluation"]
    assert evaluation["transductive"] == len(slides_of(study, "test"))  # its slides.txt names all slides
    cards = [path.read_text() for path in model.glob("*.md")]
    assert any("transductive" in card for card in cards)


# ---------------------------------------------------------------------------------------------------- same numbers


def test_predict_gives_the_numbers_of_evaluate_to_the_bit(study: Path, model: Path, tmp_path: Path):
    done(selfvitmil("predict", model, *slides_of(study, "test"), "--out", tmp_path, "--workers", 0, "--no-maps"))
    found = {row["slide"]: row for row in rows_of(tmp_path / "predictions.csv")}
    judged = [row for row in rows_of(study / "results" / "tiny_dsmil" / "predictions.csv") if row["part"] == "test"]
    ensemble = [row for row in judged if row["seed"] == "ensemble"]
    assert {row["slide"] for row in ensemble} == set(found)
    assert len({row["score"] for row in ensemble}) > 1
    for row in ensemble:
        own = found[row["slide"]]
        names = {"score": "probability", "max": "max", "bag": "bag", "calibrated": "calibrated"}
        for theirs, ours in {**names, **{key: key for key in ("threshold", "threshold_from", "decision")}}.items():
            assert row[theirs] == own[ours] != "", (row["slide"], theirs)
    assert "prediction_set" not in rows_of(tmp_path / "predictions.csv")[0]  # too few validation slides for 0.9
    answers = answers_of(tmp_path)
    for row in judged:
        if row["seed"] != "ensemble":
            assert float(row["score"]) == answers[row["slide"]]["seeds"][row["seed"]]["tumor"]
    assert all(outside(answer) == set() for answer in answers.values())
    assert not (tmp_path / "maps").exists()


def test_maps_are_those_of_localize(study: Path, model: Path, tmp_path: Path):
    plain = ("--workers", 0, "--localize.no-pictures", "--localize.geojson", "none")
    done(selfvitmil("localize", study, *plain))
    done(selfvitmil("predict", model, *slides_of(study, "test"), "--out", tmp_path, *plain))
    for path in slides_of(study, "test"):
        ours = read_heatmap(tmp_path / "maps" / open_package(model).tag / f"{path.stem}.h5")
        theirs = read_heatmap(study / "maps" / "tiny_dsmil" / f"{path.stem}.h5")
        assert ours.frame == theirs.frame
        assert (ours.coords_l0 == theirs.coords_l0).all()
        assert (ours.score == theirs.score).all()
        assert ours.prediction.probability == theirs.prediction.probability
        assert ours.prediction.part == "new"


def test_the_layout_travels_with_the_model(study: Path, tmp_path: Path):
    """A package of embeddings that were asked for in another layout than the encoder's own."""
    own = tmp_path / "study"
    shutil.copytree(study, own)
    shutil.copytree(study.parent / "cohort", tmp_path / "cohort")
    (own / "study.toml").write_text(STUDY.replace("batch = 64", 'batch = 64\nlayout = "cls4+clsmean"'))
    done(selfvitmil("embed", own, "--encoder", "tiny", "--workers", 0))
    done(selfvitmil("evaluate", own, "--train.epochs", 2))
    done(selfvitmil("package", own, "--out", tmp_path / "model", "--train.epochs", 2))
    assert load_encoder(study / "encoders" / "tiny").config.layout == "cls4+patchmean"
    assert load_encoder(tmp_path / "model" / "encoder").config.layout == "cls4+clsmean"
    slides = slides_of(own, "test")
    done(selfvitmil("predict", tmp_path / "model", *slides, "--out", tmp_path / "out", "--workers", 0, "--no-maps"))
    found = {row["slide"]: row["probability"] for row in rows_of(tmp_path / "out" / "predictions.csv")}
    judged = rows_of(own / "results" / "tiny__cls4-clsmean_dsmil" / "predictions.csv")
    assert found == {row["slide"]: row["score"] for row in judged if (row["seed"], row["part"]) == ("ensemble", "test")}
    refused = selfvitmil("predict", tmp_path / "model", slides[0], "--out", tmp_path / "x", "--embed.layout", "cls4")
    assert refused.returncode == 2
    assert refused.code == "layout-of-package"


def test_two_scales_travel_too(study: Path, tmp_path: Path):
    flags = ("--train.aggregator", "dsmil-lc", "--train.seeds", 1, "--train.epochs", 2)
    done(selfvitmil("evaluate", study, *flags))
    done(selfvitmil("package", study, "--out", tmp_path / "model", *flags))
    slide = slides_of(study, "test")[0]
    done(selfvitmil("predict", tmp_path / "model", slide, "--out", tmp_path / "out", "--workers", 0, "--no-maps"))
    rows = rows_of(study / "results" / "tiny_dsmil-lc" / "predictions.csv")
    [judged] = [row for row in rows if (row["slide"], row["seed"]) == (slide.stem, "ensemble")]
    assert rows_of(tmp_path / "out" / "predictions.csv")[0]["probability"] == judged["score"]
    assert open_package(tmp_path / "model").about["dim"] == 2 * 5 * 48


def test_three_classes_of_one_fold(study: Path, tmp_path: Path):
    three = study.parent / "three"  # beside the study, where the cohort's paths hold
    shutil.copytree(study, three, ignore=shutil.ignore_patterns("results", "models", "maps"))
    rows = rows_of(three / "cohort.csv")
    with (three / "cohort.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        for number, row in enumerate(rows):
            writer.writerow({**row, "label": "abc"[number % 3], "patient": "", "split": ""})
    flags = ("--train.split", "k-fold", "--train.folds", 2, "--train.aggregator", "mean", "--train.epochs", 2)
    done(selfvitmil("evaluate", three, *flags))
    half = ("--evaluate.coverage", 0.5)  # the validation slides are too few for more
    done(selfvitmil("package", three, "--split", "fold1", "--out", tmp_path / "model", *flags, *half))
    judged = [row for row in rows_of(three / "results" / "tiny_mean" / "predictions.csv") if row["split"] == "fold1"]
    judged = [row for row in judged if (row["part"], row["seed"]) == ("test", "ensemble")][:2]
    paths = {row["slide"]: (three / row["path"]).resolve() for row in rows}
    slides = [paths[row["slide"]] for row in judged]
    done(selfvitmil("predict", tmp_path / "model", *slides, "--out", tmp_path / "out", "--workers", 0, "--no-maps"))
    found = {row["slide"]: row for row in rows_of(tmp_path / "out" / "predictions.csv")}
    for row in judged:
        own = found[row["slide"]]
        assert [row[f"score_{name}"] for name in "abc"] == [own[f"probability_{name}"] for name in "abc"]
        assert row["decision"] == own["decision"]
        assert own["threshold"] == ""
        scores = {name: float(own[f"probability_{name}"]) for name in "abc"}
        sets = open_package(tmp_path / "model").about["prediction_sets"]
        assert sets["level"] == "slide"
        kept = [name for name in "abc" if 1 - scores[name] / sum(scores.values()) <= sets["quantile"]]
        assert own["prediction_set"] == "; ".join(sorted(kept, key=lambda name: -scores[name]))
        assert own["set_coverage"] == "0.5"
        assert answers_of(tmp_path / "out")[row["slide"]]["prediction_set"] == own["prediction_set"].split("; ")
    assert answers_of(tmp_path / "out")[judged[0]["slide"]]["map"]["shows"] == judged[0]["decision"]


# ---------------------------------------------------------------------------------------------------- new slides


@pytest.fixture(scope="module")
def strange(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An ordinary slide, slides that differ from all that the model knows, and files that are no use."""
    folder = tmp_path_factory.mktemp("strange")
    synthetic.make_slide(folder / "plain.svs", 1003, size=SIZE, lesions=1)
    with open_slide(folder / "plain.svs") as slide:
        pixels = slide.read_region(0, 0, slide.size_l0, slide.mpp)
    grey = pixels.mean(axis=2, keepdims=True).astype(np.uint8)
    write_slide(folder / "grey.svs", np.repeat(grey, 3, axis=2))
    blurred = np.asarray(Image.fromarray(pixels).resize((48, 48), Image.Resampling.BOX).resize(SIZE))
    write_slide(folder / "blurred.svs", blurred)
    write_slide(folder / "coarse.svs", pixels, mpp=0.5)
    write_slide(folder / "too_coarse.svs", pixels, mpp=1.2)
    write_slide(folder / "white.svs", np.full_like(pixels, 244))
    (folder / "broken.svs").write_bytes((folder / "plain.svs").read_bytes()[:5000])
    return folder


@pytest.fixture(scope="module")
def answered(model: Path, strange: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Done, Path]:
    out = tmp_path_factory.mktemp("answers")
    given = (strange, strange.parent / "gone.svs")
    return selfvitmil("predict", model, *given, "--out", out, "--workers", 0, "--no-maps"), out


def outside(answer: dict[str, Any]) -> set[str]:
    return {each["about"] for each in answer["outside"]}


def test_ordinary_slides_give_no_warning_and_odd_ones_do(answered: tuple[Done, Path]):
    result, out = answered
    answers = answers_of(out)
    assert outside(answers["plain"]) == set()
    assert outside(answers["grey"]) >= {"stain", "features"}
    assert "features" in outside(answers["blurred"])
    assert "mpp" in outside(answers["coarse"])
    assert any("detail is missing" in each["text"] for each in answers["too_coarse"]["outside"])
    assert answers["plain"]["ood"]["score"] <= answers["plain"]["ood"]["threshold"]
    assert answers["blurred"]["ood"]["score"] > answers["blurred"]["ood"]["threshold"]
    assert answers["plain"]["ood"]["guaranteed"] is False
    assert "blurred: its tiles look unlike" in result.stdout


def test_bad_slides_fail_alone(answered: tuple[Done, Path], strange: Path):
    result, out = answered
    assert result.returncode == 3
    failed = {row["slide"]: row for row in rows_of(out / "failures.csv")}
    assert set(failed) == {"white", "broken", "gone"}
    assert "no such file" in failed["gone"]["reason"]
    told = json.loads((out / "predictions.json").read_text())
    assert {each["slide"] for each in told["failures"]} == set(failed)
    assert set(answers_of(out)) == {path.stem for path in strange.glob("*.svs")} - set(failed)
    assert str(strange) not in (out / "predictions.json").read_text() + (out / "failures.csv").read_text()


def test_one_command_answers_with_map_pictures_and_geojson(model: Path, strange: Path, tmp_path: Path):
    command = ("predict", model, strange / "plain.svs", "--out", tmp_path / "out", "--workers", 0)
    result = done(selfvitmil(*command))
    assert "For research only" in result.stdout
    answer = answers_of(tmp_path / "out")["plain"]
    maps = tmp_path / "out" / "maps" / open_package(model).tag
    heatmap = read_heatmap(maps / "plain.h5")
    placement = {f"maps/{maps.name}/plain{ending}" for ending in (".h5", "_red.png", ".geojson")}
    assert set(answer["map"]["files"]) >= placement
    assert all((tmp_path / "out" / name).stat().st_size for name in answer["map"]["files"])
    tiles = [(tile["x_l0"], tile["y_l0"], tile["score"]) for tile in answer["top_tiles"]]
    best = sorted(heatmap.score.tolist(), reverse=True)[: len(tiles)]
    assert [score for *_, score in tiles] == best
    rows = {tuple(coords): score for coords, score in zip(heatmap.coords_l0.tolist(), heatmap.score, strict=True)}
    assert all(rows[x, y] == score for x, y, score in tiles)
    features = json.loads((maps / "plain.geojson").read_text())["features"]
    # Lesions where the slide is called positive, else regions under another name.
    listed, empty = (
        ("lesions", "highest_ranked_regions")
        if answer["decision"] == "tumor"
        else ("highest_ranked_regions", "lesions")
    )
    assert answer["only_ranks"] == (answer["decision"] == "normal")
    assert answer[empty] == []
    area = sum(region["area_mm2"] for region in answer[listed])
    tile_mm2 = (heatmap.frame.extent_l0 * heatmap.frame.slide_mpp / 1000) ** 2
    assert area == pytest.approx(tile_mm2 * int((heatmap.score >= 0.5).sum()))
    kinds = [feature["properties"]["objectType"] for feature in features]
    assert kinds.count("tile") == len(heatmap)
    assert kinds.count("annotation") == len(answer[listed]) > 0

    files = [path for path in (tmp_path / "out").rglob("*") if path.suffix in (".h5", ".png", ".geojson", ".json")]
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in files}
    again = done(selfvitmil(*command, "--json"))
    assert json.loads(again.stdout)["slides"][0]["slide"] == "plain"
    assert all(path.read_bytes() == content for path, (_, content) in before.items())
    kept = [path for path in files if "work" in path.parts or path.suffix in (".png", ".geojson")]
    assert kept
    assert all(path.stat().st_mtime_ns == before[path][0] for path in kept)


def test_slides_called_negative_have_no_lesions(answered: tuple[Done, Path]):
    result, out = answered
    answers = answers_of(out)
    assert {answer["decision"] for answer in answers.values()} == {"normal", "tumor"}
    rows = {row["slide"]: row for row in rows_of(out / "predictions.csv")}
    for slide, answer in answers.items():
        positive = answer["decision"] == "tumor"
        assert answer["only_ranks"] is not positive
        assert rows[slide]["lesions"] == (str(len(answer["lesions"])) if positive else "")
        assert positive or answer["lesions"] == []
        assert not any("metasta" in one["size"] or "tumour cells" in one["size"] for one in answer["lesions"])
        assert all(one["tile_um"] == 48 for one in answer["lesions"] + answer["highest_ranked_regions"])
    assert "colours only rank tiles within this slide" in result.stdout


def test_slides_of_one_name_are_refused(model: Path, strange: Path, tmp_path: Path):
    (tmp_path / "other").mkdir()
    shutil.copy(strange / "plain.svs", tmp_path / "other" / "Plain.svs")
    both = (strange / "plain.svs", tmp_path / "other")
    result = done(selfvitmil("predict", model, *both, "--out", tmp_path / "out"), 2)
    assert "other/Plain.svs" in result.stderr
    assert not (tmp_path / "out").exists()


def test_microns_per_pixel_can_be_given(model: Path, tmp_path: Path):
    path = tmp_path / "slides" / "nameless.tif"
    synthetic.make_slide(path, 1003, size=SIZE, layout="tiff")
    with_mpp = done(selfvitmil("predict", model, path, "--out", tmp_path / "a", "--workers", 0, "--no-maps"))
    assert "mpp" not in outside(answers_of(tmp_path / "a")["nameless"]), with_mpp.stdout
    flags = ("--workers", 0, "--no-maps", "--slide.mpp", 0.5, "--slide.force-mpp")
    done(selfvitmil("predict", model, path, "--out", tmp_path / "b", *flags))
    answer = answers_of(tmp_path / "b")["nameless"]
    assert answer["slide_mpp"] == 0.5
    assert "mpp" in outside(answer)


# ---------------------------------------------------------------------------------------------------- the folder


def test_the_folder_names_no_slide_no_patient_and_no_place(study: Path, model: Path):
    rows = rows_of(study / "cohort.csv")
    words = {row["slide"] for row in rows} | {row["patient"] for row in rows} | {Path(row["path"]).name for row in rows}
    words |= {file_fingerprint(path) for path in slides_of(study, "train")} | {str(study.parent), str(Path.home())}
    for path in model.rglob("*"):
        if path.is_file():
            assert not [word for word in words if word.encode() in path.read_bytes()], path.name
    assert {path.suffix for path in model.rglob("*") if path.is_file()} == {".json", ".md", ".toml", ".safetensors"}


def test_what_is_expected_is_measured_on_training_slides_alone(study: Path, model: Path):
    config = json.loads((study / "models" / TILING / "tiny" / "dsmil" / "given" / "seed0" / "config.json").read_text())
    bags = []
    for slide in config["trained_on"]:
        with h5py.File(study / "bags" / TILING / "features_tiny" / f"{slide}.h5") as file:
            bags.append(np.asarray(file["features"]).astype(np.float64))
    package = open_package(model)
    np.testing.assert_allclose(package.ood.mean_D, np.concatenate(bags).mean(axis=0), rtol=1e-9)
    np.testing.assert_allclose(package.ood.std_D, np.concatenate(bags).std(axis=0), rtol=1e-9)
    assert package.ood.usual["tiles"].least == min(map(len, bags))
    assert package.ood.usual["tiles"].most == max(map(len, bags))
    assert len(package.ood.scores) == len(config["chosen_on"])


def test_the_card_tells_data_threshold_and_figures(study: Path, model: Path):
    card = (model / "MODEL_CARD.md").read_text()
    metrics = json.loads((study / "results" / "tiny_dsmil" / "metrics.json").read_text())["methods"][0]
    auc = metrics["slide"]["ensemble"]["auc"]
    assert f"| auc | {auc['value']:.3f} | {auc['low']:.3f} to {auc['high']:.3f} |" in card
    assert "Youden on validation" in card
    assert "no medical device" in card
    assert "; 95 % intervals;" in card
    assert "keep_min_lr" not in card
    counts = metrics["slides"]["given"]["test"]["slides"]
    assert f"| tested on | {counts['normal']} | {counts['tumor']} |" in card


def test_the_card_has_subgroups_by_site_without_the_sites(study: Path, model: Path):
    card, text = ((model / name).read_text() for name in ("MODEL_CARD.md", "package.json"))
    cohort = rows_of(study / "cohort.csv")
    counts = Counter(row["hospital"] for row in cohort if row["split"] == "test")
    assert len(counts) == 2
    for number, name in enumerate(sorted(counts), 1):
        assert f"| hospital {number} | {counts[name]} |" in card
        assert name not in card + text
    assert "## Out of scope" in card
    assert f"its metrics rest on {sum(counts.values())} test slides" in card


def altered_weights(folder: Path) -> None:
    path = folder / "models" / "seed1" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def rewrite(folder: Path, **changes: Any) -> None:
    """Change package.json and make its checksum fit."""
    told = json.loads((folder / "package.json").read_text()) | changes
    told["identity"] = hash_of({key: value for key, value in told.items() if key != "identity"})
    (folder / "package.json").write_text(json.dumps(told))


def other_threshold(folder: Path) -> None:
    text = (folder / "package.json").read_text()
    (folder / "package.json").write_text(text.replace('"threshold": 0.5', '"threshold": 0.1'))


def path_outside(folder: Path) -> None:
    rewrite(folder, files={"../secret": "0"})


@pytest.mark.parametrize(
    ("change", "code", "names"),
    [
        (altered_weights, "package-altered", "models/seed1/model.safetensors"),
        (other_threshold, "package-altered", "package.json"),
        (lambda folder: (folder / "encoder" / "config.json").unlink(), "package-incomplete", "encoder/config.json"),
        (lambda folder: (folder / "package.json").unlink(), "no-package", "package.json"),
        (lambda folder: (folder / "package.json").write_text("{"), "unreadable-package", "package.json"),
        (lambda folder: rewrite(folder, format_version=99), "other-format-version", "99"),
        (lambda folder: rewrite(folder, schema="other"), "no-package", "other"),
        (lambda folder: rewrite(folder, seeds=[0, 7]), "invalid-package", "models/seed7/"),
        (path_outside, "invalid-package-file", "../secret"),
        (shutil.rmtree, "no-package", "model"),
    ],
)
def test_an_altered_package_is_refused(
    model: Path, tmp_path: Path, change: Callable[[Path], Any], code: str, names: str
):
    shutil.copytree(model, tmp_path / "model")
    change(tmp_path / "model")
    with pytest.raises(ArtefactError, check=has_code(code)) as error:
        open_package(tmp_path / "model")
    assert names in error.value.reason
    assert str(tmp_path) not in str(error.value)


def test_a_package_of_a_newer_version_says_both_versions_and_what_to_do(model: Path, tmp_path: Path):
    shutil.copytree(model, tmp_path / "model")
    rewrite(tmp_path / "model", format_version=99)
    with pytest.raises(ArtefactError, match=r"version 99, this program reads 2\. Update"):
        open_package(tmp_path / "model")


def test_nothing_is_done_with_an_altered_package(model: Path, strange: Path, tmp_path: Path):
    shutil.copytree(model, tmp_path / "model")
    altered_weights(tmp_path / "model")
    result = done(selfvitmil("predict", tmp_path / "model", strange / "plain.svs", "--out", tmp_path / "out"), 3)
    assert "altered" in result.stderr
    assert not (tmp_path / "out").exists()


# ---------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("flags", "options", "code"),
    [
        ({"train": {"split": "k-fold", "folds": 3}}, {}, "split-needed"),
        ({}, {"split": "fold7"}, "unknown-split"),
        ({"evaluate": {"protocol": "optimistic"}}, {}, "package-optimistic"),
        ({}, {"choice": FeatureChoice(folder=Path())}, "package-needs-encoder"),
        ({}, {"results": "elsewhere"}, "unknown-results"),
    ],
)
def test_what_cannot_be_packaged_is_refused(
    study: Path, tmp_path: Path, flags: dict[str, Any], options: dict[str, Any], code: str
):
    choice, options = options.get("choice", FeatureChoice()), {k: v for k, v in options.items() if k != "choice"}
    with pytest.raises(ConfigError) as refused:
        package(open_study(study, flags), tmp_path / "model", choice, **options)
    assert refused.value.code == code
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--train.epochs", 7), "no up-to-date models of given (seed0, seed1: recipe.epochs"),
        (
            ("--train.aggregator", "abmil"),
            "Run `selfvitmil train` with the same flags first (--train.aggregator abmil)",
        ),
    ],
)
def test_models_that_are_not_there_or_not_current_are_not_packaged(
    study: Path, tmp_path: Path, flags: tuple[object, ...], words: str
):
    result = done(selfvitmil("package", study, "--out", tmp_path / "model", *flags), 3)
    assert words in result.stderr
    assert not list(tmp_path.iterdir())


def test_a_folder_with_things_in_it_is_left_alone(study: Path, tmp_path: Path):
    (tmp_path / "mine.txt").write_text("precious")
    result = done(selfvitmil("package", study, "--out", tmp_path), 2)
    assert result.code == "out-exists"
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_a_package_is_whole_or_not_there(study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def no_space(folder: Path, expected: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("selfvitmil.package.files._write_distribution", no_space)
    result = done(selfvitmil("package", study, "--out", tmp_path / "model"), 3)
    assert "no space left" in result.stderr
    assert not list(tmp_path.iterdir())


def test_one_split_of_several_can_be_chosen_and_equal_packages_are_equal(study: Path, tmp_path: Path):
    flags = ("--train.split", "k-fold", "--train.folds", 3, "--train.aggregator", "mean", "--train.epochs", 2)
    done(selfvitmil("train", study, *flags))
    for name in ("one", "two"):
        result = done(selfvitmil("package", study, "--out", tmp_path / name, "--split", "fold1", *flags))
        assert "no results of these models" in result.stdout
    package = open_package(tmp_path / "one")
    assert package.split == "fold1"
    assert package.about["evaluation"] is None
    assert "were not evaluated" in (tmp_path / "one" / "MODEL_CARD.md").read_text()
    files = [path.relative_to(tmp_path / "one") for path in (tmp_path / "one").rglob("*") if path.is_file()]
    assert all((tmp_path / "one" / path).read_bytes() == (tmp_path / "two" / path).read_bytes() for path in files)


def test_an_encoder_that_has_changed_is_refused(study: Path, tmp_path: Path):
    torch.manual_seed(1)
    args = {"embed_dim": 48, "depth": 4, "num_heads": 3}
    save_encoder(tmp_path / "tiny", build_encoder("vit_tiny_patch16_224", img_size=48, model_args=args))
    result = done(selfvitmil("package", study, "--out", tmp_path / "m", "--encoder", tmp_path / "tiny"), 3)
    assert result.code == "stale-features"


# ---------------------------------------------------------------------------------------------------- measures


def measures(vectors: np.ndarray, **changes: Any) -> SlideStatistics:
    mean = vectors.mean(axis=0)
    told = {"slide_mpp": 0.25, "num_tiles": len(vectors), "stain": None, "num_embeddings": len(vectors)}
    return SlideStatistics(**{**told, **changes}, mean_D=mean, squares_D=((vectors - mean) ** 2).sum(axis=0))


def test_a_training_slide_is_measured_against_the_others():
    rng = np.random.default_rng(0)
    bags = [rng.normal(rng.normal(size=5), rng.uniform(0.5, 2, 5), (int(rng.integers(3, 30)), 5)) for _ in range(6)]
    usual = fit_distribution([measures(bag) for bag in bags[:4]], [measures(bag) for bag in bags[4:]], 0.5).usual[
        "distance"
    ]
    own = []
    for k, bag in enumerate(bags[:4]):
        rest = np.concatenate([other for j, other in enumerate(bags[:4]) if j != k])
        shift = (bag.mean(axis=0) - rest.mean(axis=0)) / rest.std(axis=0)
        spread = (bag.std(axis=0) - rest.std(axis=0)) / rest.std(axis=0)
        own.append(np.sqrt((shift**2 + spread**2).mean()))
    assert (usual.least, usual.median, usual.most) == pytest.approx((min(own), np.median(own), max(own)))
    assert usual.log_mean == pytest.approx(np.log(own).mean())
    assert usual.log_spread == pytest.approx(np.log(own).std(ddof=1))


def test_a_dimension_that_never_varies_does_not_count():
    vectors = np.random.default_rng(0).normal(size=(20, 3))
    vectors[:, 1] = 7.0
    found = fit_distribution([measures(vectors)] * 3, [], 0.5)
    assert found.distance_of(measures(vectors)) == pytest.approx(0)
    assert found.distance_of(measures(vectors + 100)) == pytest.approx(
        np.sqrt(np.mean((100 / np.delete(vectors, 1, axis=1).std(axis=0)) ** 2))
    )


def drawn(rng: np.random.Generator, number: int, shift: float = 0.0, dim: int = 8) -> list[SlideStatistics]:
    """Slides of one laboratory: tiles, stains and embeddings vary between slides as they do within a cohort."""
    usual = np.array([[0.56, 0.22], [0.72, 0.80], [0.41, 0.56]])
    found = []
    for _ in range(number):
        vectors = rng.normal(rng.normal(shift, 0.5, dim), np.exp(rng.normal(0, 0.2, dim)), (20, dim))
        stains = usual + rng.normal(0, 0.03, (3, 2))
        fit = StainFit(stains / np.linalg.norm(stains, axis=0), np.exp(rng.normal([0.6, 0.0], 0.15)))
        found.append(measures(vectors, stain=fit, num_tiles=int(np.exp(rng.normal(6, 0.6)))))
    return found


@pytest.mark.parametrize(("num_val", "most"), [(19, 0.05), (60, 0.05), (9, 0.1)])
def test_slides_like_the_training_slides_are_flagged_at_the_stated_rate(num_val: int, most: float):
    """All measures together, in the mean over cohorts; with too few validation slides it is said that nothing is."""
    rng = np.random.default_rng(num_val)
    rates = []
    for _ in range(60):
        found = fit_distribution(drawn(rng, 30), drawn(rng, num_val), 0.5)
        assert found.guaranteed == (num_val >= 19)
        rates.append(np.mean([bool(found.findings(slide)) for slide in drawn(rng, 50)]))
    error = np.std(rates) / np.sqrt(len(rates))
    assert np.mean(rates) <= most + 2 * error
    if num_val >= 19:  # and not by never flagging anything: the rate is ceil(0.95 (n + 1)) of n + 1
        assert np.mean(rates) >= 1 - np.ceil(0.95 * (num_val + 1)) / (num_val + 1) - 2 * error


def test_slides_of_another_laboratory_are_flagged():
    rng = np.random.default_rng(1)
    found = fit_distribution(drawn(rng, 30), drawn(rng, 30), 0.5)
    shifted = [{each.about for each in found.findings(slide)} for slide in drawn(rng, 40, shift=3.0)]
    assert np.mean(["features" in about for about in shifted]) > 0.95
    text = found.findings(drawn(rng, 1, shift=3.0)[0])[0].text
    assert f"threshold {found.threshold:.1f} (flags 5% of slides like those of the training)" in text


def test_more_tissue_alone_is_not_out_of_distribution():
    """Slides of one size to learn from, then larger ones of the same kind: all but one of 15 were flagged once."""
    rng = np.random.default_rng(5)

    def sized(number: int, low: int, high: int) -> list[SlideStatistics]:
        return [replace(each, num_tiles=int(rng.integers(low, high))) for each in drawn(rng, number)]

    found = fit_distribution(sized(36, 41, 71), sized(20, 41, 71), 0.5)
    assert not any("tiles" in {each.about for each in found.findings(slide)} for slide in sized(15, 119, 172))
    assert all("tiles" in {each.about for each in found.findings(slide)} for slide in sized(15, 2000, 3000))
    assert all("tiles" in {each.about for each in found.findings(slide)} for slide in sized(15, 1, 2))


def test_the_threshold_is_the_conformal_quantile_of_validation_slides():
    """Against the definition: with the threshold among n scores, the share of ranks above it."""
    rng = np.random.default_rng(0)
    for number in (19, 20, 39, 100, 377):
        scores = rng.normal(size=number).tolist()
        threshold = ood.conformal_threshold(scores, 0.05)
        above = sum(score > threshold for score in scores)
        assert (above + 1) / (number + 1) <= 0.05 + 1e-12 or above == 0
        assert (above + 2) / (number + 1) > 0.05  # and no smaller one would do
    assert ood.conformal_threshold([1.0] * 18, 0.05) is None
    assert ood.num_needed(0.05) == 19


def test_a_validation_slide_without_a_stain_fit_does_not_switch_the_warning_off():
    rng = np.random.default_rng(5)
    train, val = drawn(rng, 30), drawn(rng, 19)
    unfitted = replace(val[0], stain=StainFit.unfitted("no tissue"))
    found = fit_distribution(train, [unfitted, *val[1:]], 0.5)
    assert np.isfinite(found.threshold)
    assert not found.guaranteed
    assert found.findings(unfitted)
    assert found.findings(drawn(rng, 1, shift=6.0)[0])


def test_with_few_validation_slides_the_threshold_lies_above_all_scores_and_no_rate_is_promised():
    rng = np.random.default_rng(3)
    train, val = drawn(rng, 12), drawn(rng, 4)
    found = fit_distribution(train, val, 0.5)
    assert not found.guaranteed
    assert found.threshold >= max(found.scores)
    assert not any(found.findings(slide) for slide in val)
    text = found.findings(drawn(rng, 1, shift=9.0)[0])[0].text
    assert "above all of 12 training and 4 validation slides; a rate of 5% cannot be guaranteed" in text


def test_stains_far_from_the_usual_are_told():
    rng = np.random.default_rng(0)
    usual = np.array([[0.56, 0.22], [0.72, 0.80], [0.41, 0.56]])

    def fit(vectors: np.ndarray, strength: tuple[float, float] = (1.9, 1.0)) -> StainFit:
        return StainFit(vectors / np.linalg.norm(vectors, axis=0), np.array(strength))

    vectors = rng.normal(size=(50, 4))
    slides = [measures(vectors, stain=fit(usual + rng.normal(0, 0.02, (3, 2)))) for _ in range(8)]
    found = fit_distribution(slides[:6], slides[6:], 0.5)

    def about(stain: StainFit) -> list[str]:
        return [each.text for each in found.findings(measures(vectors, stain=stain)) if each.about == "stain"]

    assert about(fit(usual)) == []
    assert "its eosin differs by" in about(fit(usual[:, [0, 0]] * [1.0, 0.9] + [[0, 0.3], [0, 0], [0, 0]]))[0]
    assert "its hematoxylin has a strength of 9.00" in about(fit(usual, (9.0, 1.0)))[0]
    assert "could not be fitted" in about(StainFit.unfitted("all grey"))[0]
    assert ood.angle_deg(np.array([1.0, 0, 0]), np.array([0.0, 1, 0])) == pytest.approx(90)


@settings(max_examples=20)
@given(st.integers(1, 6), st.integers(0, 100))
def test_the_training_distribution_survives_json(number: int, seed: int):
    rng = np.random.default_rng(seed)
    found = fit_distribution([measures(rng.normal(size=(5, 3))) for _ in range(number)], [], 0.5)
    again = ood.TrainingDistribution.from_plain(
        json.loads(json.dumps(found.to_plain(), allow_nan=False)), found.mean_D, found.std_D
    )
    assert again.to_plain() == found.to_plain()


def test_answers_read_back(answered: tuple[Done, Path]):
    _, out = answered
    with (out / "predictions.csv").open(newline="", encoding="utf-8") as file:
        rows = {row["slide"]: row for row in csv.DictReader(file)}
    for slide, answer in answers_of(out).items():
        assert float(rows[slide]["probability"]) == answer["probability"]["tumor"]
        assert set(rows[slide]["outside"].split()) == outside(answer)
