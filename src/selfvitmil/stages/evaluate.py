"""The stage `evaluate`: one aggregator on the test set, with metrics, predictions and figures."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from selfvitmil.engine import Engine
from selfvitmil.errors import ConfigError
from selfvitmil.settings import to_toml
from selfvitmil.stages.base import (
    Basis,
    Engines,
    Estimate,
    Pending,
    Progress,
    Snapshot,
    Stage,
    StageResult,
    data_frame,
    nothing_done,
)
from selfvitmil.stages.train import (
    SECTIONS,
    estimate_training,
    evidence_lines,
    fit_models,
    pending_models,
    prepare,
    remove_earlier_results,
    results_name,
    results_progress,
    try_method,
)
from selfvitmil.store.files import write_text
from selfvitmil.store.layout import model_folder
from selfvitmil.study import FeatureChoice, Study

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from selfvitmil.commands.run import RunPlan
    from selfvitmil.evaluate import MethodResult, Scores
    from selfvitmil.evaluate.predictions import Prediction
    from selfvitmil.stages.measure import Measures


@dataclass(frozen=True)
class EvaluateResult(StageResult):
    """One method on the test set."""

    folder: Path
    """Folder of results: predictions.csv, metrics.json, figures."""
    result: MethodResult
    """Predictions, thresholds and trainings."""
    scores: Scores
    confidence: float
    """Level of the confidence intervals."""

    @property
    def method(self) -> str:
        return self.result.method

    @property
    def metrics(self) -> Mapping[str, Any]:
        """All metrics as metrics.json has them: by slide and by patient, of the ensemble and over seeds."""
        return self.scores.to_json()

    @property
    def predictions(self) -> tuple[Prediction, ...]:
        """Every prediction of every seed and split; `seed` None is the mean over seeds."""
        return tuple(self.result.predictions)

    def to_frame(self) -> Any:
        """Return the predictions as a pandas DataFrame."""
        return data_frame([asdict(row) for row in self.predictions], "slide")

    def plot_roc(self) -> Figure:
        """Draw the ROC curve of the mean probability over seeds on the test slides."""
        return draw_curve("roc", self.predictions, self.result.class_names)

    def plot_pr(self) -> Figure:
        """Draw the precision-recall curve of the mean probability over seeds on the test slides."""
        return draw_curve("pr", self.predictions, self.result.class_names)

    def plot_calibration(self) -> Figure:
        """Draw observed frequencies against predicted probabilities of the test slides."""
        return draw_curve("calibration", self.predictions, self.result.class_names)

    def figure(self, name: str) -> Picture:
        """Return a figure of the results' folder, `kaplan_meier` for instance; a notebook shows it."""
        file = self.folder / f"{name}.svg"
        if not file.is_file():
            there = ", ".join(sorted(path.stem for path in self.folder.glob("*.svg"))) or "none"
            raise ConfigError(f"{name}: there is no such figure", f"there are {there}", code="no-figure")
        return Picture(file.read_text(encoding="utf-8"))


@dataclass(frozen=True, repr=False)
class Picture:
    """A drawn figure, as SVG text."""

    svg: str

    def _repr_svg_(self) -> str:
        return self.svg


def draw_curve(
    kind: Literal["roc", "pr", "calibration"], predictions: Iterable[Prediction], class_names: Sequence[str]
) -> Figure:
    """Draw a figure of one method's test slides, by the mean probability over seeds."""
    from selfvitmil.evaluate import figures, samples_of

    predictions = list(predictions)
    if any(isinstance(row.label, tuple) for row in predictions):
        raise ConfigError(
            f"a {kind} figure of an outcome that is not a class",
            "it shows decisions between classes",
            "See the figures in the folder of results",
            code="figure-of-classes",
        )
    samples = samples_of(predictions, overlap=True)
    draw, values = figures.draw_calibration, samples.probabilities
    if kind != "calibration":
        draw, values = figures.draw_roc if kind == "roc" else figures.draw_pr, samples.scores
    column = values[:, 0] if values.shape[1] == 1 else values
    return draw(samples.labels, column, class_names=class_names, folds=samples.folds)


def evaluate(study: Study, choice: FeatureChoice, engine: Engine, name: str | None = None) -> EvaluateResult:
    """Evaluate an aggregator on the test set, training missing models first; writes `results/<name>/`."""
    from selfvitmil.evaluate import FINAL_SCORING, evaluate_method, hold_out_test_labels, score_method, write_results
    from selfvitmil.evaluate.figures import write_figures

    settings = study.settings
    with study.lock("evaluate"):
        notes, learning = prepare(study, choice, "evaluate")
        method, cases, features = settings.train.aggregator, learning.cases, learning.features
        trial = hold_out_test_labels(cases, learning.splits, settings.evaluate)
        fitted = fit_models(method, cases, trial, settings.train, features.models / method, engine)
        trial.labels.open(FINAL_SCORING)
        result = evaluate_method(fitted, trial)
        folder = study.layout.results(results_name(name, f"{features.encoder}_{method}", settings))
        scores = score_method(result, settings.evaluate)
        notes += remove_earlier_results(folder, [result])
        write_results(folder, [result], [scores], settings.evaluate)
        histories = _histories(features.models / method, result)
        undrawn = write_figures(folder, result, settings.evaluate, histories)
        write_text(folder / "settings.toml", to_toml(settings, SECTIONS))
    notes += evidence_lines(method, fitted)
    notes += [f"note: {warning}" for warning in (*result.warnings, *undrawn)]
    confidence = settings.evaluate.confidence
    return EvaluateResult(folder, result, scores, confidence, failures=cases.failures, notes=tuple(notes))


def _histories(folder: Path, result: MethodResult) -> dict[tuple[str, int], list[dict[str, Any]]]:
    """The course of every training, as its model's folder tells."""
    from selfvitmil.evaluate.protocol import model_name

    found: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for run in result.runs:
        place = model_folder(folder, model_name(run.split, result.protocol == "optimistic"), run.seed)
        lines = (place / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        found[run.split, run.seed] = [json.loads(line) for line in lines]
    return found


EVALUATE_S = 10.0
"""Usual seconds to score trained models."""


class Evaluate(Stage):
    """Evaluate the study's own method on the test set."""

    name = "evaluate"
    is_essential = True
    is_learning = True
    by_target = True

    def preflight(self, plan: RunPlan) -> None:
        assert plan.labels is not None
        train, localize = plan.settings.train, plan.settings.localize
        with nothing_done():
            shown = localize if plan.has("localize") else None
            try_method(train.aggregator, train, plan.labels.num_outputs, shown, plan.labels.trained_on)

    def pending(self, plan: RunPlan) -> Pending:
        return pending_models(plan, plan.settings.train.aggregator, tunes=plan.request.one_method)

    def estimate(self, plan: RunPlan, measures: Measures) -> Estimate:
        if plan.request.one_method:
            return estimate_training(plan, measures)
        return Estimate(EVALUATE_S, 1e6, 1e9, Basis.TYPICAL)  # its models come from the comparison

    def run(self, plan: RunPlan, engines: Engines) -> EvaluateResult:
        return evaluate(plan.study, FeatureChoice(plan.encoder), engines.slides)

    def status(self, snapshot: Snapshot) -> Iterable[Progress]:
        for folder in snapshot.layout.all_results():
            if not (folder / "table.csv").exists():
                yield results_progress(self.name, snapshot, folder)
