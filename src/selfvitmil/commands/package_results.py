"""The results that a model card quotes: metrics of the packaged models on their test set, found in the study's results.

They are quoted only where they are of these very models: the same scores of validation slides, the same thresholds. Two
packages have no test set of their own. The ensemble of all splits is described by the metrics over the splits, each
tested on slides that its models never saw. A final fit on all slides is described by the results of the same procedure
(method, settings, seeds) on other splits of the same slides, whose models must still be there and up to date.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from selfvitmil.errors import ArtefactError, CohortError, ConfigError
from selfvitmil.settings import StudySettings, parse, read_toml, without_removed
from selfvitmil.stages.train import results_name

if TYPE_CHECKING:
    from pathlib import Path

    from selfvitmil.evaluate import Cases, Fitted, Prediction, Trial
    from selfvitmil.study import LearningSet, Study

Json = dict[str, Any]
NOT_PROCEDURE = {"split", "split_folder", "folds", "site", "device", "cache_gb"}
"""Settings of `train` in which a final fit may differ from what its results were obtained with."""


def quoted_results(
    of: Study,
    results: str | None,
    about: Mapping[str, Any],
    learning: LearningSet,
    trial: Trial,
    fitted: Fitted,
    validated: Sequence[Prediction],
) -> Json:
    """Return `evaluation` and `reference` of package.json; evaluation is None where there are no results to quote.

    `validated` are the predictions of validation slides that the package's threshold comes from.
    """
    from selfvitmil.evaluate.method_metrics import are_disjoint
    from selfvitmil.package import FINAL_FIT

    cases, fit = learning.cases, about.get("fit")
    folder = of.layout.results(results_name(results or about["name"], "", of.settings))
    if results is not None and not folder.is_dir():
        what = f"--results {results}: there is no such folder of results"
        raise ConfigError(what, how="See results/ in the study", code="unknown-results")
    if fit == FINAL_FIT:
        found = _procedure(folder, learning, of.settings)
        if found is None:
            return {"evaluation": None, "reference": _references(validated, cases, of.settings)}
        trial, fitted = found
    evaluation, tested = _evaluation(folder, trial, fitted)
    if evaluation is None:
        return {"evaluation": None, "reference": _references(validated, cases, of.settings)}
    seen = {slide for split in trial.splits for slide in trial.transductive.get(split.name, ())}
    evaluation["transductive"] = len(seen)
    evaluation["subgroups"] = _subgroups(tested, cases, of.settings) if are_disjoint(tested) else []
    if fit is not None:
        evaluation |= {"num": len({row.slide for row in tested}), "splits": len(trial.splits)}
        tested = []  # not of the packaged models: drift is measured against their validation slides alone
    return {"evaluation": evaluation, "reference": _references([*validated, *tested], cases, of.settings)}


def _procedure(folder: Path, learning: LearningSet, settings: StudySettings) -> tuple[Trial, Fitted] | None:
    """Return the models of these results, where the same procedure trained them on splits of the same slides."""
    from selfvitmil.evaluate import hold_out_test_labels, make_splits, stored_models

    try:
        used = parse(without_removed(read_toml(folder / "settings.toml")), "settings.toml")
        same = used.train.model_dump(exclude=NOT_PROCEDURE) == settings.train.model_dump(exclude=NOT_PROCEDURE)
        if not same or used.evaluate.protocol != settings.evaluate.protocol:
            return None
        splits = make_splits(learning.cases, used.train, used.evaluate)
        trial = hold_out_test_labels(learning.cases, splits, used.evaluate)
        name = settings.train.aggregator
        return trial, stored_models(name, trial, used.train, learning.features.models / name).fitted
    except (ArtefactError, CohortError, ConfigError):
        return None


def _evaluation(folder: Path, trial: Trial, fitted: Fitted) -> tuple[Json | None, list[Prediction]]:
    """Return metrics and predictions of these models on their test sets; None where there are none, or of others."""
    from selfvitmil.evaluate import read_predictions
    from selfvitmil.package import CARD_METRICS

    try:
        rows, _ = read_predictions(folder / "predictions.csv")
        metrics = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
        methods, confidence = metrics["methods"], float(metrics["settings"]["confidence"])
    except (ArtefactError, OSError, ValueError, KeyError, TypeError):
        return None, []
    rows = [row for row in rows if row.method == fitted.aggregator]
    info = next((each for each in methods if each["method"] == fitted.aggregator), None)
    if info is None or not _are_of(info, rows, fitted):
        return None, []
    names = [split.name for split in trial.splits]
    if len(names) == 1:
        whole = info["slide"]["splits"].get(names[0], info["slide"])["ensemble"]
    else:
        all_splits = {each["split"] for each in info["choices"]} == set(names)
        whole = info["slide"]["ensemble"] if all_splits else None
    if whole is None:
        return None, []
    shown = CARD_METRICS if trial.outcome is None else trial.outcome.shown_metrics
    figures = {
        name: {key: whole[name].get(key) for key in ("value", "low", "high")} for name in shown if whole.get(name)
    }
    tested = [row for row in rows if row.part == "test" and row.split in names]
    return {"num": whole["num"], "confidence": confidence, "figures": figures}, tested


def _are_of(info: Mapping[str, Any], rows: Sequence[Prediction], fitted: Fitted) -> bool:
    """Whether results have the thresholds, calibrations and validation scores of these models."""
    chosen = {each["split"]: each for each in info["choices"] if each["seed"] == "ensemble"}
    for (split, seed), choice in fitted.choices.items():
        own = choice.to_json()
        if seed is None and (split not in chosen or any(chosen[split][key] != own[key] for key in own)):
            return False
    scores = {(row.split, row.seed, row.slide): row.score for row in rows if row.part == "val"}
    return all(
        scores.get((run.split, run.seed, slide)) == each.probabilities
        for run in fitted.runs
        for slide, each in run.chosen_on.items()
    )


def _subgroups(tested: Sequence[Prediction], cases: Cases, settings: StudySettings) -> list[dict[str, Any]]:
    """Return metrics of the test slides by site, where the cohort names several; the sites themselves stay here."""
    from selfvitmil.evaluate.subgroups import subgroup_tables

    slides = {row.slide for row in tested}
    found: list[dict[str, Any]] = []
    for column in cases.cohort.site_columns if cases.outcome is None else ():
        values = {row.slide: row.value(column) for row in cases.cohort.rows if row.slide in slides}
        if len(set(values.values()) - {None}) < 2:
            continue
        try:
            table = subgroup_tables(tested, {column: values}, cases.class_names, settings.evaluate)[0]
        except CohortError:
            continue  # more values than can be subgroups
        groups = [
            {
                "slides": group.num_slides,
                "metrics": {
                    name: None if each is None else {"value": each.value, "low": each.low, "high": each.high}
                    for name, each in group.metrics.items()
                },
            }
            for group in table.groups
        ]
        found.append({"column": column, "groups": groups})
    return found


def _references(predictions: Sequence[Prediction], cases: Cases, settings: StudySettings) -> list[dict[str, Any]]:
    """Return how the models scored their validation and test slides, without names: what drift is measured against."""
    from selfvitmil.evaluate.external import reference_scores

    parts: tuple[Literal["val", "test"], ...] = ("val", "test")
    found = [reference_scores(predictions, part, cases.class_names, settings.evaluate, cases.outcome) for part in parts]
    return [each.to_json() for each in found if each is not None]
