"""`predict --labels`: a frozen model on another, labelled cohort; labels change nothing but the evaluation."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import brier_score_loss, roc_auc_score

from helpers.cli import Done, rows_of, selfvitmil
from helpers.error_codes import has_code
from helpers.tiny_package import make_package
from selfvitmil.commands.validate import check_same_classes, external_labels, validate
from selfvitmil.errors import CohortError, ConfigError
from selfvitmil.metrics import auc_interval, paired_auc_test, wilson
from selfvitmil.package import open_package
from selfvitmil.package.labels import parse_label_map, read_labels
from selfvitmil.slides import synthetic

NUMBER = 16
FIXED = ("predictions.csv", "predictions.json")
FILES = {"s00": Path("s00.svs")}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Slides, two models of two classes and one of three; and a folder with predictions of the first model."""
    folder = tmp_path_factory.mktemp("validation")
    for number in range(NUMBER):
        synthetic.make_slide(folder / "slides" / f"s{number:02}.svs", number, size=(1024, 1024))
    for seed, name in enumerate(("model", "other")):
        torch.manual_seed(seed)
        make_package(folder / name, name=name)
    make_package(folder / "three", name="three", classes=("a", "b", "c"))
    done(predict(folder, folder / "plain"))
    return folder


def done(result: Done, status: int = 0) -> Done:
    assert result.returncode == status, result.stdout + result.stderr
    return result


def predict(place: Path, out: Path, *flags: Any, model: str = "model") -> Done:
    return selfvitmil("predict", place / model, place / "slides", "--out", out, "--workers", 0, "--no-maps", *flags)


def probabilities(place: Path) -> dict[str, float]:
    return {row["slide"]: float(row["probability"]) for row in rows_of(place / "plain" / "predictions.csv")}


def write_table(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return path


def planted(place: Path, path: Path, *, wrong: Sequence[int] = ()) -> Path:
    """A table whose labels agree with the ranks of the predictions but for those of `wrong`; two slides a patient."""
    ranked = sorted(probabilities(place), key=probabilities(place).__getitem__)
    rows = []
    for rank, slide in enumerate(ranked):
        positive = (rank >= NUMBER // 2) != (rank in wrong)
        own = {"slide": slide, "diagnosis": "malignant" if positive else "benign", "patient": f"p{rank // 2}"}
        rows.append({**own, "site": "AB"[rank % 2], "scanner": "one" if rank % 3 else "two"})
    return write_table(path, rows)


MAP = ("--label-column", "diagnosis", "--label-map", "malignant=tumor", "--label-map", "benign=normal")


@pytest.fixture(scope="module")
def validated(place: Path) -> tuple[Done, Path, Path]:
    """Output, folder and labels of a validation against another model, by site and scanner."""
    table = planted(place, place / "labels.csv", wrong=(2, 3, 11))
    out = place / "labelled"
    shutil.copytree(place / "plain", out)
    result = done(predict(place, out, "--labels", table, *MAP, "--by", "site,scanner", "--against", place / "other"))
    return result, out / "validation" / open_package(place / "model").tag, table


def truth_of(place: Path, table: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rows, scores = rows_of(table), probabilities(place)
    label = np.array([row["diagnosis"] == "malignant" for row in rows], dtype=int)
    return label, np.array([scores[row["slide"]] for row in rows]), np.array([row["patient"] for row in rows])


@pytest.mark.slow
def test_labels_change_no_byte_of_predictions(place: Path, tmp_path: Path):
    tables = [planted(place, tmp_path / "right.csv"), planted(place, tmp_path / "wrong.csv", wrong=range(NUMBER))]
    aucs = []
    for table in tables:
        out = tmp_path / table.stem
        done(predict(place, out, "--labels", table, *MAP))
        for name in FIXED:
            assert (out / name).read_bytes() == (place / "plain" / name).read_bytes()
        [metrics] = (out / "validation").glob("*/metrics.json")
        aucs.append(json.loads(metrics.read_text())["slide"]["auc"]["value"])
    assert aucs == [1.0, 0.0]


def test_labels_change_no_file_of_the_package(place: Path, validated: tuple[Done, Path, Path], tmp_path: Path):
    torch.manual_seed(0)
    fresh = make_package(tmp_path / "model", name="model")
    for path in sorted(fresh.rglob("*")):
        if path.is_file():
            assert (place / "model" / path.relative_to(fresh)).read_bytes() == path.read_bytes(), path.name


def test_metrics_are_those_of_other_libraries(place: Path, validated: tuple[Done, Path, Path]):
    _, folder, table = validated
    label, score, patient = truth_of(place, table)
    found = json.loads((folder / "metrics.json").read_text())
    own = found["slide"]
    assert own["auc"]["value"] == pytest.approx(roc_auc_score(label, score))
    limits = auc_interval(label, score, groups=patient)
    assert (own["auc"]["low"], own["auc"]["high"]) == pytest.approx((limits.low, limits.high))
    assert own["brier"]["value"] == pytest.approx(brier_score_loss(label, score))
    decided = score >= 0.5
    assert own["threshold"] == 0.5
    sensitivity = wilson(int(decided[label == 1].sum()), int(label.sum()))
    assert (own["sensitivity"]["value"], own["sensitivity"]["low"]) == pytest.approx(
        (sensitivity.value, sensitivity.low)
    )
    assert found["labels"] == {"slides": NUMBER, "evaluated": NUMBER} | {
        "out_of_distribution": found["labels"]["out_of_distribution"]
    }
    names = np.unique(patient)
    by_patient = [label[patient == name].max() for name in names], [score[patient == name].max() for name in names]
    assert found["patient"]["auc"]["value"] == pytest.approx(roc_auc_score(*by_patient))


def test_the_other_model_is_compared_on_the_same_slides(place: Path, validated: tuple[Done, Path, Path]):
    _, folder, table = validated
    label, score, patient = truth_of(place, table)
    rows = rows_of(folder.parent.parent / "predictions.csv")
    other = open_package(place / "other").tag
    theirs = {row["slide"]: float(row["probability"]) for row in rows if row["model"] == other}
    expected = paired_auc_test(label, score, [theirs[row["slide"]] for row in rows_of(table)], groups=patient)
    found = json.loads((folder / "metrics.json").read_text())["slide"]["comparison"]
    assert found["other"] == other
    assert found["p_value"] == pytest.approx(expected.p_value)
    assert found["difference"]["value"] == pytest.approx(expected.auc_a - expected.auc_b)


def test_subgroups_are_counted_and_scored(place: Path, validated: tuple[Done, Path, Path]):
    result, folder, table = validated
    label, score, _ = truth_of(place, table)
    rows = {(row["column"], row["value"], row["level"]): row for row in rows_of(folder / "subgroups.csv")}
    assert {key[:2] for key in rows} == {("site", "A"), ("site", "B"), ("scanner", "one"), ("scanner", "two")}
    for column, value in (("site", "A"), ("scanner", "one")):
        own = np.array([row[column] == value for row in rows_of(table)])
        found = rows[column, value, "slide"]
        assert int(found["slides"]) == own.sum()
        assert float(found["auc"]) == pytest.approx(roc_auc_score(label[own], score[own]))
    assert "site A, by patient" in result.stdout


class Text(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.words: list[str] = []
        self.ids: list[str] = []

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.ids += [value or "" for name, value in attrs if name == "id"]


def test_the_page_has_all_sections_and_names_no_slide(validated: tuple[Done, Path, Path]):
    _, folder, _ = validated
    page = Text()
    page.feed((folder / "index.html").read_text())
    assert {"what", "metrics", "calibration", "drift", "comparison", "subgroups"} <= set(page.ids)
    text = " ".join(page.words)
    assert not any(f"s{number:02}" in text for number in range(NUMBER))
    assert (folder / "roc.svg").exists()
    assert (folder / "calibration.svg").exists()


def test_a_second_validation_replaces_the_first(place: Path, validated: tuple[Done, Path, Path], tmp_path: Path):
    _, folder, table = validated
    out = tmp_path / "out"
    shutil.copytree(folder.parent.parent, out)
    done(predict(place, out, "--labels", table, *MAP))
    own = out / "validation" / folder.name
    assert not (own / "subgroups.csv").exists()
    assert json.loads((own / "metrics.json").read_text())["subgroups"] == []


def test_slides_without_label_or_prediction_take_no_part(place: Path, tmp_path: Path):
    rows = rows_of(planted(place, tmp_path / "all.csv"))
    kept = [*rows[1:], {**rows[0], "slide": "elsewhere"}]
    kept[1]["diagnosis"] = "unclear"
    table = write_table(tmp_path / "labels.csv", kept)
    shutil.copytree(place / "plain", tmp_path / "out")
    result = done(predict(place, tmp_path / "out", "--labels", table, *MAP, "--label-map", "unclear="))
    assert "1 labelled slides have no prediction and take no part: elsewhere" in result.stdout
    assert "2 predicted slides have no label and take no part" in result.stdout
    [metrics] = (tmp_path / "out" / "validation").glob("*/metrics.json")
    assert json.loads(metrics.read_text())["slide"]["num"] == NUMBER - 2


def test_three_classes(place: Path, tmp_path: Path):
    rows = [
        {"slide": f"s{number:02}", "label": "abc"[number % 3], "site": "AB"[number // 8]} for number in range(NUMBER)
    ]
    table = write_table(tmp_path / "labels.csv", rows)
    done(predict(place, tmp_path / "out", "--labels", table, "--by", "site", model="three"))
    [metrics] = (tmp_path / "out" / "validation").glob("*/metrics.json")
    found = json.loads(metrics.read_text())
    scores = {
        row["slide"]: [float(row[f"probability_{name}"]) for name in "abc"]
        for row in rows_of(tmp_path / "out" / "predictions.csv")
    }
    given = np.array([scores[row["slide"]] for row in rows])
    expected = roc_auc_score(
        [row["label"] for row in rows], given / given.sum(axis=1, keepdims=True), multi_class="ovr"
    )
    assert found["slide"]["auc"]["value"] == pytest.approx(expected, abs=0.05)
    assert found["slide"]["calibration"] is None
    assert [group["value"] for group in found["subgroups"][0]["groups"]] == ["A", "B"]


# ---------------------------------------------------------------------------------------------------- wrong input


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        ({"label_map": ["malignant"]}, "invalid-label-map"),
        ({"label_map": ["malignant=tumour", "benign=normal"]}, "unknown-class"),
        ({"label_map": ["malignant=tumor"]}, "unknown-label"),
        ({"label_map": ["malign=tumor", "benign=normal"]}, "unknown-label"),
        ({"label_map": ["malignant=tumor", "benign=normal"], "by": ["hospital"]}, "missing-column"),
    ],
)
def test_wrong_flags_are_refused_before_any_work(place: Path, tmp_path: Path, flags: dict[str, Any], code: str):
    table = planted(place, tmp_path / "labels.csv")
    with pytest.raises((ConfigError, CohortError), check=has_code(code)):
        external_labels(open_package(place / "model"), [place / "slides"], table, label_column="diagnosis", **flags)


def test_the_suggested_mapping_of_a_negative_name_is_the_negative_class(place: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match="benign=normal"):
        read_labels(planted(place, tmp_path / "t.csv"), ("normal", "tumor"), FILES, label_column="diagnosis")


def test_a_flag_of_the_evaluation_without_labels_is_refused(place: Path):
    with pytest.raises(ConfigError, check=has_code("labels-needed")):
        external_labels(open_package(place / "model"), [place / "slides"], None, by=["site"])
    assert external_labels(open_package(place / "model"), [place / "slides"], None) is None


def test_models_that_cannot_be_compared(place: Path):
    model, other, three = (open_package(place / name) for name in ("model", "other", "three"))
    check_same_classes(model, other)
    with pytest.raises(ConfigError, check=has_code("classes-differ")):
        check_same_classes(model, three)
    with pytest.raises(ConfigError, check=has_code("same-model")):
        check_same_classes(model, model)


def test_labels_of_other_slides_are_an_error(place: Path, tmp_path: Path):
    table = write_table(tmp_path / "t.csv", [{"slide": "x", "label": "tumor"}, {"slide": "y", "label": "normal"}])
    labels = read_labels(table, ("normal", "tumor"), FILES)
    with pytest.raises(ConfigError, check=has_code("no-labelled-predictions")):
        validate(open_package(place / "model"), place / "plain", labels)


def test_a_mapping_may_leave_slides_out():
    assert parse_label_map(["a = b", "c="]) == {"a": "b", "c": ""}
