"""Outcomes other than classes: losses against slow loops, and planted risks and values through the command line."""

from __future__ import annotations

import json
import math
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from sklearn.metrics import cohen_kappa_score, roc_auc_score

from helpers.cli import Done, rows_of, selfvitmil
from helpers.error_codes import has_code
from helpers.planted_outcomes import planted_outcomes
from selfvitmil.aggregate import NAMES, build
from selfvitmil.cohort.table import Cohort, SlideRow
from selfvitmil.errors import CohortError, ConfigError
from selfvitmil.evaluate.comparison_table import read_table
from selfvitmil.evaluate.predictions import Prediction, read_outcome, read_predictions, write_predictions
from selfvitmil.localize.detection import highest_scoring_tile
from selfvitmil.localize.heatmap import read_heatmap
from selfvitmil.outcomes import Outcome, outcome_from_json
from selfvitmil.outcomes.continuous import Continuous
from selfvitmil.outcomes.multilabel import MultiLabel
from selfvitmil.outcomes.ordinal import Ordinal, resampled_kappa
from selfvitmil.outcomes.survival import DiscreteSurvival, Survival, cox_loss, hazard_loss
from selfvitmil.stages.evaluate import draw_curve

QUICK = ("--train.seeds", 2, "--train.epochs", 20, "--evaluate.bootstrap", 100)


KINDS: dict[str, tuple[object, ...]] = {
    "survival": ("--train.outcome", "survival"),
    "survival-discrete": ("--train.outcome", "survival-discrete"),
    "continuous": ("--train.target", "value", "--train.outcome", "continuous"),
    "ordinal": ("--train.target", "grade", "--train.outcome", "ordinal",
                "--train.levels", "low", "--train.levels", "middle", "--train.levels", "high"),
    "multilabel": ("--train.target", "mutated", "--train.target", "inflamed", "--train.outcome", "multilabel",
                   "--localize.of-class", "mutated"),
}  # fmt: skip
"""Kind -> flags of a study of the planted table."""
PLANTED_DIMENSION = {"multilabel": 1}
"""Dimension along which the tiles are shifted that heatmaps show evidence of; 0 with the others."""

# ---------------------------------------------------------------------------------------------------- losses


def test_cox_loss_is_the_partial_likelihood():
    generator = np.random.default_rng(0)
    risk, time = generator.normal(size=12), generator.integers(1, 6, 12).astype(float)
    event = generator.integers(0, 2, 12).astype(float)
    slow = 0.0
    for i in range(12):
        if event[i]:
            slow -= risk[i] - math.log(sum(math.exp(risk[j]) for j in range(12) if time[j] >= time[i]))
    fast = cox_loss(*(torch.from_numpy(each) for each in (risk, time, event)))
    assert float(fast) == pytest.approx(slow / event.sum(), abs=1e-12)


def test_cox_loss_without_events_has_no_gradient():
    risk = torch.randn(5, requires_grad=True)
    cox_loss(risk, torch.arange(5.0), torch.zeros(5)).backward()
    assert risk.grad is not None
    assert torch.equal(risk.grad, torch.zeros(5))


def test_hazard_loss_is_the_likelihood_of_every_interval():
    generator = np.random.default_rng(1)
    raw, interval = generator.normal(size=(10, 4)), generator.integers(0, 4, 10)
    event = generator.integers(0, 2, 10)
    hazard, slow = 1 / (1 + np.exp(-raw)), 0.0
    for i in range(10):
        for k in range(interval[i]):
            slow -= math.log(1 - hazard[i, k])
        if event[i]:
            slow -= math.log(hazard[i, interval[i]])
    fast = hazard_loss(*(torch.from_numpy(each) for each in (raw, interval, event)))
    assert float(fast) == pytest.approx(slow / 10, abs=1e-12)


def test_ordinal_loss_is_the_likelihood_of_every_step():
    generator = np.random.default_rng(2)
    raw, level, slow = generator.normal(size=(8, 3)), generator.integers(0, 4, 8), 0.0
    for i in range(8):
        for k in range(3):
            above = 1 / (1 + math.exp(-raw[i, k]))
            slow -= math.log(above if level[i] > k else 1 - above)
    outcome = Ordinal(("grade",), ("a", "b", "c", "d"))
    fast = outcome.loss(torch.from_numpy(raw), torch.from_numpy(level.astype(float))[:, None])
    assert float(fast) == pytest.approx(slow / 24, abs=1e-12)
    probabilities = outcome.score(torch.from_numpy(raw)).numpy()
    assert (np.diff(probabilities, axis=1) <= 0).all()


def test_labels_that_are_not_known_have_no_say():
    generator = np.random.default_rng(3)
    raw, label = generator.normal(size=(8, 3)), generator.integers(0, 2, (8, 3)).astype(float)
    label[generator.uniform(size=(8, 3)) < 0.3] = math.nan
    each = [
        -math.log(p if label[i, k] else 1 - p)
        for i in range(8) for k in range(3) for p in [1 / (1 + math.exp(-raw[i, k]))] if not math.isnan(label[i, k])
    ]  # fmt: skip
    fast = MultiLabel(("a", "b", "c")).loss(torch.from_numpy(raw), torch.from_numpy(label))
    assert 8 < len(each) < 24
    assert float(fast) == pytest.approx(np.mean(each), abs=1e-12)


def test_resampled_kappa_and_macro_auc_agree_with_scikit_learn():
    generator = np.random.default_rng(4)
    level = generator.integers(0, 4, 30)
    called = np.clip(level + generator.integers(-1, 2, 30), 0, 3)
    drawn = np.stack([np.ones(30, int), np.bincount(generator.integers(0, 30, 30), minlength=30)])
    fast = resampled_kappa(level.astype(float), called.astype(float), drawn.astype(float))
    slow = [cohen_kappa_score(level.repeat(n), called.repeat(n), weights="quadratic") for n in drawn]
    assert fast == pytest.approx(slow, abs=1e-12)
    outcome = MultiLabel(("a", "b"))
    target, score = generator.integers(0, 2, (30, 2)).astype(float), generator.uniform(size=(30, 2))
    target[:5, 0] = math.nan
    expected = np.mean([roc_auc_score(target[5:, 0], score[5:, 0]), roc_auc_score(target[:, 1], score[:, 1])])
    assert outcome.validation_metric([tuple(row) for row in target], score) == pytest.approx(expected, abs=1e-12)


def test_values_are_standardized_with_training_slides_and_come_back():
    outcome = Continuous(("value",)).fitted([(10.0,), (20.0,), (30.0,)])
    (encoded,) = outcome.encoded((20.0 + math.sqrt(200 / 3),))
    assert encoded == pytest.approx(1.0)
    assert float(outcome.score(torch.tensor([encoded], dtype=torch.float64))) == pytest.approx(20 + math.sqrt(200 / 3))


@pytest.mark.parametrize(
    "outcome",
    [
        Survival(), DiscreteSurvival(cuts=(1.0, 2.0, 3.0)), Continuous(("value",), 2.0, 3.0),
        Ordinal(("grade",), ("low", "high")), MultiLabel(("a", "b")),
    ],
)  # fmt: skip
def test_an_outcome_comes_back_from_its_description(outcome: Outcome):
    assert outcome_from_json(json.loads(json.dumps(outcome.to_json()))) == outcome


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name == "transmil"))
        for name in NAMES
        if name != "self-vit-mil-multiscale"
    ],
)
@pytest.mark.parametrize(
    "outcome",
    [
        Survival(), DiscreteSurvival(cuts=(1.0, 2.0, 3.0)), Continuous(("value",)),
        Ordinal(("grade",), ("low", "middle", "high")), MultiLabel(("a", "b", "c")),
    ],
)  # fmt: skip
def test_every_aggregator_learns_every_outcome_or_refuses(name: str, outcome: Outcome):
    torch.manual_seed(0)
    options = {"evidence": "free"} if name == "self-vit-mil" else {}
    if name.startswith("clam"):
        with pytest.raises(ConfigError) as refused:
            build(name, 6, outcome.num_outputs, **options).predict(outcome)
        assert refused.value.code == "method-needs-classes"
        return
    module = build(name, 6, outcome.num_outputs, **options)
    module.predict(outcome)
    bags, places = [torch.randn(7, 6) for _ in range(4)], torch.arange(14.0).reshape(7, 2)
    outputs = [module(bag, places) for bag in bags]
    target = torch.tensor([[1.0, 1.0, 1.0], [2.0, 0.0, 0.0], [3.0, 1.0, 1.0], [0.0, 1.0, math.nan]])
    if isinstance(outcome, MultiLabel):
        target = target.clamp(max=1.0)
    loss = module.outcome_loss(outputs, target[:, : len(outcome.target_names)])
    loss.backward()
    assert math.isfinite(loss.item())
    assert any(weight.grad is not None and weight.grad.abs().sum() > 0 for weight in module.parameters())
    assert module.probabilities(outputs[0]).shape == (len(outcome.score_names),)


# ---------------------------------------------------------------------------------------------------- planted truth


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("planted")
    planted_outcomes(folder)
    return folder


@pytest.fixture(scope="module")
def permuted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("permuted")
    planted_outcomes(folder, permuted=True)
    return folder


def learn(command: str, study: Path, made: Path, *arguments: object) -> Done:
    given = ("--features", made / "features_vit", "--labels", made / "table.csv")
    return selfvitmil(command, study, *given, *QUICK, *arguments)


def metrics_of(study: Path) -> dict[str, float]:
    (file,) = study.glob("results/*/metrics.json")
    found = json.loads(file.read_text())["methods"][0]["slide"]["ensemble"]
    return {name: each["value"] for name, each in found.items() if isinstance(each, dict) and "value" in each}


@pytest.mark.parametrize("kind", ["survival", "survival-discrete"])
def test_planted_risk_is_found_and_permuted_risk_is_not(kind: str, made: Path, permuted: Path, tmp_path: Path):
    asked = ("--train.outcome", kind, "--train.aggregator", "mean")
    done = learn("evaluate", tmp_path / "study", made, *asked)
    assert done.returncode == 0, done.stderr
    assert "c index, by slide" in done.stdout
    assert metrics_of(tmp_path / "study")["c_index"] > 0.75
    assert learn("evaluate", tmp_path / "control", permuted, *asked).returncode == 0
    assert metrics_of(tmp_path / "control")["c_index"] < 0.7


@pytest.mark.slow
def test_planted_value_is_found_and_permuted_value_is_not(made: Path, permuted: Path, tmp_path: Path):
    asked = ("--train.target", "value", "--train.aggregator", "mean")
    done = learn("evaluate", tmp_path / "study", made, *asked)
    assert done.returncode == 0, done.stderr
    assert "outcome: continuous" in done.stdout
    assert metrics_of(tmp_path / "study")["r2"] > 0.5
    assert learn("evaluate", tmp_path / "control", permuted, *asked).returncode == 0
    assert metrics_of(tmp_path / "control")["r2"] < 0.3


@pytest.mark.slow
def test_planted_grade_and_labels_are_found_and_permuted_ones_are_not(made: Path, permuted: Path, tmp_path: Path):
    wanted = {"ordinal": ("kappa", 0.6, 0.35), "multilabel": ("macro_auc", 0.9, 0.75)}
    for kind, (metric, least, most) in wanted.items():
        asked = (*KINDS[kind], "--train.aggregator", "mean")
        for name, data in (("study", made), ("control", permuted)):
            done = learn("evaluate", tmp_path / f"{name}_{kind}", data, *asked)
            assert done.returncode == 0, done.stderr
        assert metrics_of(tmp_path / f"study_{kind}")[metric] > least
        assert metrics_of(tmp_path / f"control_{kind}")[metric] < most


@pytest.mark.slow
def test_compare_writes_table_and_predictions_that_read_back(made: Path, tmp_path: Path):
    methods = [part for name in ("mean", "max", "dsmil") for part in ("--compare.methods", name)]
    done = learn("compare", tmp_path / "study", made, "--train.outcome", "survival", *methods)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "study" / "results" / "compare_survival"
    rows = read_table((folder / "table.csv").read_text())
    assert [row.method for row in rows] == ["mean", "max", "dsmil"]
    assert "auc.svg" not in done.stdout
    assert "C-index [95 %]" in (folder / "table.md").read_text()
    predictions, groups = read_predictions(folder / "predictions.csv")
    assert groups == ("low", "high")
    truth = {row["slide"]: row for row in rows_of(made / "table.csv")}
    for row in predictions:
        assert row.label == (float(truth[row.slide]["time"]), float(truth[row.slide]["event"]))
        assert row.decision == int(row.score[0] >= (row.threshold or 0.0))
    copy = tmp_path / "copy.csv"
    write_predictions(copy, predictions, (), read_outcome(folder / "predictions.csv"))
    assert copy.read_bytes() == (folder / "predictions.csv").read_bytes()


def test_test_slides_have_no_say_in_the_risk_groups(made: Path, tmp_path: Path):
    """Other outcomes of the test slides leave models, scores and cut as they are."""
    asked = ("--train.outcome", "survival", "--train.aggregator", "mean")
    other = tmp_path / "other.csv"
    lines = (made / "table.csv").read_text().splitlines()
    changed = [
        ",".join([*cells[:3], "1.5", *cells[4:]]) if cells[2] == "test" else ",".join(cells)
        for cells in (line.split(",") for line in lines)
    ]
    assert changed != lines
    other.write_text("\n".join(changed) + "\n")
    given = ("--features", made / "features_vit")
    for name, table in (("own", made / "table.csv"), ("other", other)):
        done = selfvitmil("evaluate", tmp_path / name, *given, "--labels", table, *QUICK, *asked)
        assert done.returncode == 0, done.stderr
    own, others = (rows_of(next((tmp_path / name).glob("results/*/predictions.csv"))) for name in ("own", "other"))
    chosen = [(row["slide"], row["part"], row["seed"], row["risk"], row["threshold"], row["group"]) for row in own]
    assert [
        (row["slide"], row["part"], row["seed"], row["risk"], row["threshold"], row["group"]) for row in others
    ] == chosen
    assert [row["time"] for row in own] != [row["time"] for row in others]


@pytest.mark.slow
def test_a_study_may_have_several_targets(made: Path, tmp_path: Path):
    """Models and results of one target stay where another is evaluated."""
    study, mean = tmp_path / "study", ("--train.aggregator", "mean")
    for kind in ("survival", "ordinal", "continuous"):
        assert learn("evaluate", study, made, *KINDS[kind], *mean).returncode == 0
    results = {path.name: (path / "predictions.csv").read_bytes() for path in study.glob("results/*")}
    assert set(results) == {f"features_vit_mean_{name}" for name in ("survival", "grade", "value")}
    files = {path: path.stat().st_mtime_ns for path in study.glob("models/**/model.safetensors")}
    assert len(files) == 6
    assert learn("evaluate", study, made, *KINDS["survival"], *mean).returncode == 0
    assert {path: path.stat().st_mtime_ns for path in study.glob("models/**/model.safetensors")} == files
    assert {path.name: (path / "predictions.csv").read_bytes() for path in study.glob("results/*")} == results


# ---------------------------------------------------------------------------------------------------- refusals


def test_invalid_cells_are_named(made: Path, tmp_path: Path):
    text = (made / "table.csv").read_text()
    (tmp_path / "table.csv").write_text(text.replace(",1,", ",maybe,", 1))
    given = ("--features", made / "features_vit", "--labels", tmp_path / "table.csv")
    done = selfvitmil("evaluate", tmp_path / "study", *given, *QUICK, "--train.outcome", "survival")
    assert done.returncode != 0
    assert "maybe" in done.stderr


@pytest.mark.parametrize(
    ("cell", "event"),
    [("Dead", 1), ("Alive", 0), ("1:DECEASED", 1), ("0:LIVING", 0), ("Deceased", 1), ("living", 0), ("0:CENSORED", 0),
     ("1:Recurred/Progressed", 1), ("0:DiseaseFree", 0), ("1", 1), ("TRUE", 1), ("no", 0)],
)  # fmt: skip
def test_words_of_registries_are_events(cell: str, event: int):
    row = SlideRow("a", Path("a.svs"), extra=(("time", "2.5"), ("event", cell)))
    assert Survival().parse(row) == (2.5, float(event))
    plain = cell in ("1", "TRUE", "no")
    assert [f"{cell.casefold()} = {event} (" in each for each in Survival().remarks(Cohort((row,)))] == [True] * (
        not plain
    )


def test_slides_without_follow_up_are_left_out_and_named():
    cells = {"a": "3", "b": "0", "c": "-2", "d": ""}
    rows = [SlideRow(name, Path(name), extra=(("time", time), ("event", "Dead"))) for name, time in cells.items()]
    assert Survival().read(Cohort(tuple(rows))) == {"a": (3.0, 1.0)}
    words, left_out = Survival().remarks(Cohort(tuple(rows)))
    assert words == "event: dead = 1 (it happened)"
    assert "2 slides" in left_out
    assert "b, c" in left_out


FIGURES = {
    "survival": {"kaplan_meier"}, "survival-discrete": {"kaplan_meier"}, "continuous": {"scatter", "bland_altman"},
    "ordinal": {"confusion"}, "multilabel": {"roc"},
}  # fmt: skip


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind != "survival")) for kind in KINDS]
)
def test_heatmaps_and_report_show_evidence_for_a_high_outcome(kind: str, made: Path, tmp_path: Path):
    """Of slides with planted tiles, the highest-scoring tile of the heatmap is one of them."""
    study, flags = tmp_path / "study", (*KINDS[kind], "--train.aggregator", "dsmil")
    for command in ("evaluate", "localize"):
        done = learn(command, study, made, *flags)
        assert done.returncode == 0, done.stderr
    (folder,) = study.glob("results/*")
    assert FIGURES[kind] <= {path.stem for path in folder.glob("*.svg")}
    hits = []
    for path in sorted(study.glob("maps/*/*.h5")):
        heatmap = read_heatmap(path)
        with h5py.File(made / "features_vit" / path.name) as file:
            planted = file["features"][:, PLANTED_DIMENSION.get(kind, 0)] > 3  # pyright: ignore
        if planted.any() and not planted.all():
            hits.append(bool(planted[highest_scoring_tile(heatmap)]))
        assert heatmap.prediction.value_words
    assert len(hits) >= 9
    assert np.mean(hits) > 0.85
    done = selfvitmil("report", study)
    assert done.returncode == 0, done.stderr
    page = (study / "report" / "index.html").read_text()
    shown = {"survival": ["Harrell", "integrated Brier score", "By mutated"], "ordinal": ["kappa", "By inflamed"]}
    assert all(name in page for name in shown.get(kind, []))
    assert "By event" not in page or kind not in ("survival", "survival-discrete")


def test_strata_of_few_patients_with_labels_are_at_least_two():
    outcome, patients = MultiLabel(("a", "b")), {f"s{k}": f"p{k}" for k in range(6)}
    for targets in ([(1.0, 0.0)] * 3 + [(0.0, 1.0)] * 3, [(1.0, 1.0)] * 6, [(1.0, 0.0)] * 5 + [(0.0, 0.0)]):
        strata = outcome.strata(dict(zip(patients, targets, strict=True)), patients)
        assert len(set(strata.values())) > 1


def test_curves_of_classes_are_refused_for_other_outcomes():
    values = {"score": (0.2,), "max": None, "bag": None, "calibrated": None, "threshold": None, "seed": None}
    about = {"method": "m", "slide": "s", "patient": "p", "split": "x", "part": "test", "decision": None}
    row = Prediction(**values, **about, label=(1.0, 1.0), threshold_from="none", protocol="honest")  # pyright: ignore
    with pytest.raises(ConfigError, check=has_code("figure-of-classes")):
        draw_curve("roc", [row], ())


def test_no_event_is_refused():
    with pytest.raises(CohortError) as error:
        Survival().check_training("fold0", [(1.0, 0.0), (2.0, 1.0)])
    assert error.value.code == "too-few-events"
