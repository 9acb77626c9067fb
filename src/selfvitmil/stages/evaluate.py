"""The stage `evaluate`: one aggregator on the test set, with metrics, predictions and figures."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selfvitmil import formatting
from selfvitmil.engine import Engine
from selfvitmil.settings import StudySettings, to_toml
from selfvitmil.stages.base import Basis, Engines, Estimate, Pending, Progress, Snapshot, Stage
from selfvitmil.stages.measure import Measures
from selfvitmil.stages.run_plan import RunPlan
from selfvitmil.stages.train import (
    SECTIONS,
    below,
    estimate_training,
    evidence_lines,
    fit_models,
    pending_models,
    prepare,
    remove_earlier_results,
    results_name,
    results_progress,
)
from selfvitmil.store.files import write_text
from selfvitmil.store.layout import StudyLayout, model_folder
from selfvitmil.study.features import FeatureChoice
from selfvitmil.study.folder import CohortSource, Summary, open_study
from selfvitmil.study.methods import try_method
from selfvitmil.study.preflight import nothing_done

if TYPE_CHECKING:
    from selfvitmil.evaluate import MethodResult


SHOWN = ("auc", "accuracy", "balanced_accuracy", "sensitivity", "specificity", "f1", "pr_auc", "brier", "ece")
"""Figures that `evaluate` prints; metrics.json has them all."""


def evaluate(
    study: Path,
    source: CohortSource,
    choice: FeatureChoice,
    settings: StudySettings,
    engine: Engine,
    name: str | None = None,
) -> Summary:
    """Evaluate an aggregator on the test set, training missing models first; writes `results/<name>/`."""
    from selfvitmil.evaluate import FINAL_SCORING, evaluate_method, hold_out_test_labels, score_method, write_results
    from selfvitmil.evaluate.figures import write_figures

    with open_study(study, "evaluate"):
        lines, cases, splits, features = prepare(study, source, choice, settings, "evaluate")
        method = settings.train.aggregator
        trial = hold_out_test_labels(cases, splits, settings.evaluate)
        fitted = fit_models(method, cases, trial, settings.train, features.models / method, engine)
        trial.labels.open(FINAL_SCORING)
        result = evaluate_method(fitted, trial)
        folder = StudyLayout(study).results(results_name(name or f"{features.encoder}_{method}", settings))
        scores = score_method(result, settings.evaluate)
        lines += remove_earlier_results(folder, [result])
        write_results(folder, [result], [scores], settings.evaluate)
        histories = _histories(features.models / method, result)
        undrawn = write_figures(folder, result, settings.evaluate, histories)
        write_text(folder / "settings.toml", to_toml(settings, SECTIONS))
    lines += evidence_lines(method, fitted)
    lines += [f"note: {warning}" for warning in (*result.warnings, *undrawn)]
    lines.append(f"predictions.csv, metrics.json and figures in {below(study, folder)}")
    return Summary(tuple(lines), cases.failures, _score_table(scores.to_json(), settings.evaluate.confidence))


def _histories(folder: Path, result: MethodResult) -> dict[tuple[str, int], list[dict[str, Any]]]:
    """The course of every training, as its model's folder tells."""
    from selfvitmil.evaluate.protocol import model_name

    found: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for run in result.runs:
        place = model_folder(folder, model_name(run.split, result.protocol == "optimistic"), run.seed)
        lines = (place / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        found[run.split, run.seed] = [json.loads(line) for line in lines]
    return found


def _score_table(told: Mapping[str, Any], confidence: float) -> tuple[tuple[str, ...], ...]:
    """The figures of slides, and of patients where they differ, for the terminal."""
    header = ("", "ensemble", f"{formatting.percent(confidence)} interval", "mean of seeds", "sd")
    rows: list[tuple[str, ...]] = []
    for level in ("slide", "patient"):
        if "same_as" in told[level]:
            continue
        for name in SHOWN:
            row = _score_row(told[level], name)
            if row is not None:
                rows.append((f"{name.replace('_', ' ')}, by {level}", *row))
    return (header, *rows)


def _score_row(level: Mapping[str, Any], name: str) -> tuple[str, str, str, str] | None:
    whole = level.get("ensemble") or {}
    told = whole.get(name)
    value, limits = "-", ""
    if isinstance(told, Mapping):
        value, limits = formatting.value_and_limits(told)
    elif isinstance(told, int | float):
        value = f"{told:.3f}"
    spread = (level.get("over_seeds") or {}).get(name) or {}
    mean, sd = spread.get("mean"), spread.get("sd")
    if value == "-" and mean is None:
        return None
    return value, limits, formatting.number(mean), formatting.number(sd)


EVALUATE_S = 2.0
"""Usual seconds to score trained models."""


class Evaluate(Stage):
    """Evaluate the study's own method on the test set."""

    name = "evaluate"
    is_learning = True

    def preflight(self, plan: RunPlan) -> None:
        assert plan.labels is not None
        train, localize = plan.settings.train, plan.settings.localize
        with nothing_done():
            try_method(train.aggregator, train, plan.labels.num_classes, localize if plan.has("localize") else None)

    def pending(self, plan: RunPlan) -> Pending:
        return pending_models(plan, plan.settings.train.aggregator)

    def estimate(self, plan: RunPlan, measures: Measures) -> Estimate:
        if plan.request.one_method:
            return estimate_training(plan, measures)
        return Estimate(EVALUATE_S, 1e6, 1e9, Basis.TYPICAL)  # its models come from the comparison

    def run(self, plan: RunPlan, engines: Engines) -> Summary:
        return evaluate(plan.study, CohortSource(), FeatureChoice(plan.encoder), plan.settings, engines.slides)

    def status(self, snapshot: Snapshot) -> Iterable[Progress]:
        for folder in snapshot.layout.all_results():
            if not (folder / "table.csv").exists():
                yield results_progress(self.name, snapshot, folder)
