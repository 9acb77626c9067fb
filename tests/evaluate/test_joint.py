"""Targets that are trained jointly: the loss against a slow loop, and planted targets through the command line."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.cli import Done, rows_of, selfvitmil
from helpers.error_codes import has_code
from helpers.planted_outcomes import planted_outcomes
from selfvitmil.aggregate import NAMES, build
from selfvitmil.aggregate.joint import part_of
from selfvitmil.cohort.table import Cohort, SlideRow
from selfvitmil.errors import ArtefactError, ConfigError
from selfvitmil.localize.heatmap import read_heatmap
from selfvitmil.outcomes import choose_joint, joint_place, outcome_from_json
from selfvitmil.outcomes.continuous import Continuous
from selfvitmil.outcomes.joint import ClassTarget, Joint
from selfvitmil.outcomes.multilabel import MultiLabel
from selfvitmil.outcomes.survival import DiscreteSurvival, Survival
from selfvitmil.settings import TrainSettings

NAN = math.nan
PARTS = (
    ClassTarget(("sex",), ("f", "m")),
    ClassTarget(("type",), ("a", "b", "c")),
    Continuous(("value",), 2.0, 3.0),
    MultiLabel(("x", "y")),
    Survival(),
)
WEIGHTS = (1.0, 0.5, 2.0, 1.0, 3.0)


def joint(sigmoids: bool = False) -> Joint:
    whole = Joint.of(PARTS, WEIGHTS)
    return whole.with_sigmoids() if sigmoids else whole


def targets() -> torch.Tensor:
    """Six slides: every target lacks on some, one label of two on another, and the last one has a time only."""
    rows = [
        (1.0, 2.0, 0.3, 1.0, 0.0, 3.0, 1.0),
        (0.0, NAN, -1.2, 0.0, NAN, 5.0, 0.0),
        (NAN, 0.0, NAN, 1.0, 1.0, 2.0, 1.0),
        (1.0, 1.0, 0.9, NAN, NAN, NAN, NAN),
        (0.0, 0.0, NAN, 0.0, 1.0, 4.0, 1.0),
        (NAN, NAN, NAN, NAN, NAN, 1.0, 1.0),
    ]
    return torch.tensor(rows, dtype=torch.float64)


# ---------------------------------------------------------------------------------------------------- loss


def slow_loss(raw: np.ndarray, target: np.ndarray, sigmoids: bool) -> float:
    """The weighted sum of the targets' mean losses over the slides that have a value, slide by slide."""

    def sigmoid(x: float) -> float:
        return 1 / (1 + math.exp(-x))

    def entropy(logit: float, label: float) -> float:
        return -math.log(sigmoid(logit) if label else 1 - sigmoid(logit))

    def mean(values: list[float]) -> float:
        return sum(values) / len(values) if values else 0.0

    slides = list(zip(raw, target, strict=True))
    sex = mean([entropy(r[0], t[0]) for r, t in slides if not math.isnan(t[0])])
    kinds = [(r[1:4], int(t[1])) for r, t in slides if not math.isnan(t[1])]
    if sigmoids:
        kind = mean([entropy(r[k], float(k == own)) for r, own in kinds for k in range(3)])
    else:
        kind = mean([-math.log(math.exp(r[own]) / sum(map(math.exp, r))) for r, own in kinds])
    value = mean([(r[4] - t[2]) ** 2 for r, t in slides if not math.isnan(t[2])])
    labels = mean([entropy(r[5 + k], t[3 + k]) for r, t in slides for k in range(2) if not math.isnan(t[3 + k])])
    followed = [(r[7], t[5], t[6]) for r, t in slides if not math.isnan(t[5])]
    cox = 0.0
    for risk, time, event in followed:
        if event:
            cox -= risk - math.log(sum(math.exp(other) for other, later, _ in followed if later >= time))
    cox /= max(1.0, sum(event for *_, event in followed))
    return float(np.dot(WEIGHTS, [sex, kind, value, labels, cox]))


@pytest.mark.parametrize("sigmoids", [False, True])
@pytest.mark.parametrize("slides", [(0, 1, 2, 3, 4, 5), (1, 2), (0,), (3,), (5,)])
def test_loss_and_gradient_are_the_sum_over_targets_of_a_slow_loop(slides: tuple[int, ...], sigmoids: bool):
    raw = np.random.default_rng(0).normal(size=(6, 8))[list(slides)]
    target = targets()[list(slides)]
    given = torch.tensor(raw, requires_grad=True)
    loss = joint(sigmoids).loss(given, target)
    loss.backward()
    assert loss.item() == pytest.approx(slow_loss(raw, target.numpy(), sigmoids), abs=1e-12)
    assert given.grad is not None
    step, expected = 1e-5, np.zeros_like(raw)
    for place in np.ndindex(*raw.shape):
        ends = [raw.copy(), raw.copy()]
        ends[0][place] += step
        ends[1][place] -= step
        above, below = (slow_loss(end, target.numpy(), sigmoids) for end in ends)
        expected[place] = (above - below) / (2 * step)
    np.testing.assert_allclose(given.grad.numpy(), expected, atol=1e-8)


@pytest.mark.parametrize("together", [False, True])
def test_a_slide_without_a_value_gives_the_targets_outputs_no_gradient(together: bool):
    target, whole = targets(), joint()
    for place, own in enumerate(whole.numbers):
        unknown = target[:, own].isnan().all(1).nonzero()[:, 0].tolist()
        assert unknown or place == 4 or place == 3
        for slide in unknown:
            rows = list(range(6)) if together else [slide]
            raw = torch.randn(len(rows), 8, dtype=torch.float64, requires_grad=True)
            whole.loss(raw, target[rows]).backward()
            assert raw.grad is not None
            assert torch.equal(raw.grad[rows.index(slide), whole.outputs[place]], raw.new_zeros(1).expand(
                whole.parts[place].num_outputs
            ))  # fmt: skip


def test_validation_loss_compares_the_times_of_all_slides():
    whole, target = joint(), targets()
    raw = torch.randn(6, 8, dtype=torch.float64)
    alone = np.array([float(whole.loss(raw[[slide]], target[[slide]])) for slide in range(6)])
    cox = WEIGHTS[-1] * float(Survival().loss(raw[[0, 1, 2, 4, 5], 7:], target[[0, 1, 2, 4, 5], 5:]))
    assert whole.validation_loss(alone, whole.score(raw), target) == pytest.approx(alone.mean() + cox)


def test_skill_is_the_mean_of_the_targets_own_metrics_between_chance_and_perfect():
    whole = Joint.of([ClassTarget(("sex",), ("f", "m")), Continuous(("value",), 0.0, 4.0)])
    found = [(0.0, 1.0), (1.0, NAN), (0.0, 3.0), (1.0, NAN)]
    scores = np.array([[0.1, 2.0], [0.3, 0.0], [0.4, 5.0], [0.8, 0.0]])
    auc, mae = 3 / 4, (1 + 2) / 2
    assert whole.validation_metric(found, scores) == pytest.approx(((2 * auc - 1) + (1 - mae / 4)) / 2)
    assert whole.validation_metric(found[::2], scores[::2]) == pytest.approx(1 - mae / 4)  # one class: undefined


def test_a_joint_outcome_comes_back_from_its_description():
    for whole in (joint(), joint(sigmoids=True)):
        assert outcome_from_json(json.loads(json.dumps(whole.to_json()))) == whole
    nested = {"kind": "joint", "parts": [joint().to_json()], "weights": [1.0]}
    with pytest.raises(ValueError, match="plain parts"):
        outcome_from_json(nested)


def test_strata_are_refined_only_where_each_keeps_ten_patients():
    whole = Joint.of([ClassTarget(("sex",), ("f", "m")), ClassTarget(("type",), ("a", "b"))])
    for rare, expected in ((10, {"f, a", "f, b", "m, a", "m, b"}), (3, {"f", "m"})):
        found = {f"s{n}": (float(n % 2), float(n // 2 < rare)) for n in range(48)}
        found["s48"] = (NAN, 1.0)
        strata = whole.strata(found, {slide: slide for slide in found})
        assert set(strata.values()) == expected
        assert set(strata) == set(found)


# ---------------------------------------------------------------------------------------------------- networks


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name == "transmil")) for name in NAMES if "multiscale" not in name],
)
def test_every_aggregator_has_outputs_for_each_target_or_refuses(name: str):
    torch.manual_seed(0)
    options: dict[str, Any] = {"evidence": "free"} if name == "self-vit-mil" else {}
    whole = Joint.of(PARTS)
    module = build(name, 6, whole.num_outputs, **options)
    if name.startswith("clam"):
        with pytest.raises(ConfigError, check=has_code("method-needs-classes")):
            module.predict(whole)
        return
    module.predict(whole)
    module.eval()
    bag, coords = torch.randn(7, 6), torch.arange(14.0).reshape(7, 2)
    output = module(bag, coords)
    scores, logits = module.probabilities(output), output.logits_C
    assert len(logits) == 8
    for place, part in enumerate(PARTS):
        own = part_of(module, place)
        found = own(bag, coords)
        torch.testing.assert_close(found.logits_C, logits[whole.outputs[place]], rtol=0, atol=0)
        torch.testing.assert_close(own.probabilities(found), scores[whole.scores[place]])
        evidence = own.critical_evidence(found)
        assert evidence.shape == (7, part.num_outputs)
        tiles = own.tile_logits(found)
        if tiles is not None:
            assert own.instance_probabilities(tiles).shape[0] == 7
    module.outcome_loss([module(bag, coords) for _ in range(6)], targets().float()).backward()
    assert any(weight.grad is not None and weight.grad.abs().sum() > 0 for weight in module.parameters())


def test_a_model_of_one_target_has_no_others():
    module = build("mean", 6, 1)
    module.predict(Continuous(("value",)))
    with pytest.raises(ArtefactError, check=has_code("unreadable-model")):
        part_of(module, 0)
    several = build("mean", 6, 8)
    several.predict(joint())
    with pytest.raises(ArtefactError, check=has_code("unreadable-model")):
        part_of(several, 5)


# ---------------------------------------------------------------------------------------------------- settings


def cohort() -> Cohort:
    rows = [
        SlideRow(f"s{n}", Path(f"s{n}"), label="ab"[n % 2], extra=(
            ("grade", str(n % 3)), ("value", str(n * 1.5)), ("os", str(1 + n)), ("dead", str(n % 2)), ("same", "1"),
        ))
        for n in range(20)
    ]  # fmt: skip
    return Cohort(tuple(rows))


def test_targets_are_read_from_their_names():
    train = TrainSettings(joint=("label", "value", "grade:ordinal", "os+dead", "os+dead:survival-discrete"))
    with pytest.raises(ConfigError, check=has_code("invalid-joint-targets")):
        choose_joint(cohort(), train)  # the last two have the same columns
    train = TrainSettings(joint=("label", "value", "grade:ordinal", "os+dead"), joint_weights=(1, 1, 2, 1))
    whole, lines = choose_joint(cohort(), train)
    assert [part.kind for part in whole.parts] == ["classes", "continuous", "ordinal", "survival"]
    assert whole.weights == (1, 1, 2, 1)
    assert any("continuous" in line for line in lines)
    assert joint_place(train) is None
    assert joint_place(train.model_copy(update={"target": ("OS", "dead")})) == 3


REFUSED: dict[str, dict[str, Any]] = {
    "invalid-joint-targets": {"joint": ("label",)},
    "outcome-of-joint": {"joint": ("label", "value"), "outcome": "ordinal"},
    "target-not-joint": {"joint": ("label", "value"), "target": ("grade",)},
    "not-with-joint": {"joint": ("label", "value"), "tune": True},
    "unknown-target": {"joint": ("label", "valu")},
    "unknown-positive-class": {"joint": ("label", "value"), "positive": "c"},
    "one-class": {"joint": ("label", "same")},
}


@pytest.mark.parametrize("code", REFUSED)
def test_settings_that_contradict_each_other_are_refused(code: str):
    with pytest.raises(ConfigError, check=has_code(code)):
        choose_joint(cohort(), TrainSettings(**REFUSED[code]))


# ---------------------------------------------------------------------------------------------------- planted truth

QUICK = ("--train.seeds", 2, "--train.epochs", 20, "--evaluate.bootstrap", 100, "--train.aggregator", "mean")
JOINT = ("--train.joint", "mutated", "--train.joint", "value", "--train.joint", "time+event:survival-discrete")
NAMES_OF = {
    "mutated": "features_vit_mean_mutated_with_value-time-event",
    "value": "features_vit_mean_value_with_mutated-time-event",
    "time": "features_vit_mean_time-event_with_mutated-value",
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Feature files with planted targets; of every third slide `mutated` is not known, of every fourth `value`."""
    folder = tmp_path_factory.mktemp("planted")
    write_table(planted_outcomes(folder), lambda row, number: row)
    return folder


def write_table(table: Path, change: Callable[[dict[str, str], int], dict[str, str]], to: Path | None = None) -> Path:
    rows = rows_of(table)
    for number, row in enumerate(rows):
        if number % 7 in (1, 4):
            row["mutated"] = ""
        if number % 4 == 1:
            row["value"] = ""
    to = to or table
    with to.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(change(row, number) for number, row in enumerate(rows))
    return to


def learn(command: str, study: Path, made: Path, *arguments: object, table: Path | None = None) -> Done:
    given = ("--features", made / "features_vit", "--labels", table or made / "table.csv")
    done = selfvitmil(command, study, *given, *QUICK, *arguments)
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def study(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("joint") / "study"
    learn("evaluate", folder, made, *JOINT)
    return folder


def metrics_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "metrics.json").read_text())["methods"][0]["slide"]["ensemble"]


def test_every_planted_target_is_found(study: Path):
    found = {name: metrics_of(study / "results" / folder) for name, folder in NAMES_OF.items()}
    assert {path.name for path in study.glob("results/*")} == set(NAMES_OF.values())
    assert found["mutated"]["auc"]["value"] > 0.9
    assert found["value"]["r2"]["value"] > 0.5
    assert found["time"]["c_index"]["value"] > 0.7


def test_results_are_files_as_of_separate_trainings(study: Path, made: Path, tmp_path: Path):
    """The same slides, columns and metrics; a slide without a value is in no row of that target."""
    learn("evaluate", tmp_path / "alone", made, "--train.target", "mutated")
    joint, alone = study / "results" / NAMES_OF["mutated"], tmp_path / "alone/results/features_vit_mean_mutated"
    own, other = rows_of(joint / "predictions.csv"), rows_of(alone / "predictions.csv")
    assert list(own[0]) == list(other[0])
    tested = [{row["slide"]: row["label"] for row in rows if row["part"] == "test"} for rows in (own, other)]
    assert tested[0] == tested[1]
    known = {row["slide"] for row in rows_of(made / "table.csv") if row["mutated"] and row["split"] == "test"}
    assert set(tested[0]) == known
    assert set(metrics_of(joint)) == set(metrics_of(alone))
    assert {path.name for path in joint.glob("*.svg")} == {path.name for path in alone.glob("*.svg")}


def test_slides_without_a_value_train_the_other_targets(study: Path, made: Path):
    (config, *_) = study.glob("models/**/config.json")
    learned = json.loads(config.read_text())["trained_on"]
    without = {row["slide"] for row in rows_of(made / "table.csv") if not row["mutated"]}
    assert without & set(learned)
    assert len(list(study.glob("models/**/model.safetensors"))) == 2  # one network per seed, whatever the target


@pytest.mark.slow
def test_heatmaps_and_report_are_of_each_target(study: Path, made: Path):
    before = {path: path.stat().st_mtime_ns for path in study.glob("models/**/model.safetensors")}
    learn("localize", study, made, *JOINT, "--localize.no-pictures")
    assert {path: path.stat().st_mtime_ns for path in study.glob("models/**/model.safetensors")} == before
    maps = {path.name: sorted(path.glob("*.h5")) for path in study.glob("maps/*")}
    assert set(maps) == set(NAMES_OF.values())
    assert read_heatmap(maps[NAMES_OF["mutated"]][0]).prediction.shown == "1"
    assert read_heatmap(maps[NAMES_OF["time"]][0]).prediction.shown == "high risk"
    done = selfvitmil("report", study)
    assert done.returncode == 0, done.stderr
    page = (study / "report" / "index.html").read_text()
    assert all(name in page for name in NAMES_OF.values())


def test_a_command_may_name_one_target(study: Path, made: Path):
    done = learn("evaluate", study, made, *JOINT, "--train.target", "value", "--name", "own")
    assert "trained jointly with mutated, time and event" in done.stdout
    own, whole = (study / "results" / name / "predictions.csv" for name in ("own", NAMES_OF["value"]))
    assert own.read_bytes() == whole.read_bytes()


def test_test_slides_have_no_say_in_joint_models(study: Path, made: Path, tmp_path: Path):
    """Other targets of the test slides leave weights, epochs and scores as they are."""

    def other(row: dict[str, str], number: int) -> dict[str, str]:
        changed = {"mutated": str(number // 3 % 2), "value": f"{number}.5", "time": f"{1 + number}.25"}
        return {**row, **changed} if row["split"] == "test" else row

    table = write_table(made / "table.csv", other, tmp_path / "other.csv")
    learn("train", tmp_path / "study", made, *JOINT, table=table)
    files = sorted(study.glob("models/**/model.safetensors"))
    others = sorted((tmp_path / "study").glob("models/**/model.safetensors"))
    assert [path.read_bytes() for path in files] == [path.read_bytes() for path in others]


@pytest.mark.slow
def test_comparison_has_a_table_for_each_target(made: Path, tmp_path: Path):
    methods = [part for name in ("mean", "max") for part in ("--compare.methods", name)]
    learn("compare", tmp_path / "study", made, *JOINT[:4], *methods)
    tables = {path.parent.name: path.read_text() for path in tmp_path.glob("study/results/*/table.csv")}
    assert set(tables) == {"compare_mutated_with_value", "compare_value_with_mutated"}
    assert "mae" in tables["compare_value_with_mutated"].casefold()


def test_choosing_on_test_slides_is_refused(made: Path, tmp_path: Path):
    given = ("--features", made / "features_vit", "--labels", made / "table.csv", *QUICK, *JOINT)
    done = selfvitmil("evaluate", tmp_path / "study", *given, "--evaluate.protocol", "optimistic")
    assert done.returncode == 2
    assert "train.joint" in done.stderr


def test_cox_risk_sets_are_of_the_slides_with_follow_up():
    """Slides without follow-up take no place in the risk sets of a step."""
    whole = Joint.of([ClassTarget(("sex",), ("f", "m")), Survival()])
    assert whole.needs_batch
    assert not Joint.of([ClassTarget(("sex",), ("f", "m")), DiscreteSurvival()]).needs_batch
    target = torch.tensor([[1.0, 2.0, 1.0], [0.0, NAN, NAN], [1.0, 4.0, 0.0]])
    raw = torch.randn(3, 2)
    far = raw.clone()
    far[1, 1] = 50.0
    torch.testing.assert_close(whole.loss(far, target), whole.loss(raw, target))
