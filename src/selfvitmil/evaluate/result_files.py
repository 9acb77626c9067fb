"""Results folder (`predictions.csv`, `metrics.json`) and rows of the comparison table.

Equal results give byte-identical files; they contain neither times nor paths.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from selfvitmil.aggregate.evidence import evidence_words
from selfvitmil.evaluate.comparison_table import ComparisonRow, EvaluatedOn, PairedRow, Published, paired_rows
from selfvitmil.evaluate.method_metrics import Samples, Scores, are_disjoint, estimator_of, read_interval, samples_of
from selfvitmil.evaluate.predictions import write_predictions
from selfvitmil.evaluate.protocol import MethodResult
from selfvitmil.settings import EvaluateSettings
from selfvitmil.store.files import write_text

FORMAT_VERSION = 2
"""2: of several splits AUC, average precision and p-values are within splits; 1 ranked the scores of all together."""


def write_results(
    folder: Path,
    results: Sequence[MethodResult],
    scores: Sequence[Scores],
    evaluate: EvaluateSettings,
    advice: Sequence[str] = (),
) -> None:
    """Write `predictions.csv` and `metrics.json` of one or more methods on the same classes, with any `advice`."""
    rows = [row for result in results for row in result.predictions]
    write_predictions(folder / "predictions.csv", rows, results[0].class_names)
    told = {
        "format_version": FORMAT_VERSION,
        "settings": evaluate.model_dump(mode="json"),
        **({"advice": list(advice)} if advice else {}),
        "methods": [scored.to_json() for scored in scores],
    }
    text = json.dumps(told, indent=1, ensure_ascii=False, allow_nan=False)
    write_text(folder / "metrics.json", text + "\n")


# ---------------------------------------------------------------------------------------------------- comparison


def evaluated_on(result: MethodResult, cohort: str, *, camelyon16_test: bool = False) -> EvaluatedOn:
    """Return the description of the test set for the table; `cohort` is the cohort's name."""
    labels = {row.slide: row.label for row in result.predictions if row.part == "test"}
    counts = tuple((name, list(labels.values()).count(k)) for k, name in enumerate(result.class_names))
    number = len(result.splits)
    split = f"test slides of the split {result.splits[0]}"
    if number > 1:
        overlap = "" if are_disjoint(result.predictions) else ", which overlap"
        split = f"test slides of {number} splits{overlap}"
    protocol: Literal["honest", "optimistic"] = "optimistic" if result.protocol == "optimistic" else "honest"
    return EvaluatedOn(
        cohort, split, counts, protocol=protocol, estimator=estimator_of(result), camelyon16_test=camelyon16_test
    )


def compare_results(results: Sequence[MethodResult], baseline: str, evaluate: EvaluateSettings) -> dict[str, PairedRow]:
    """Return paired tests of every method against `baseline`, by the ensembles' scores of the same test slides.

    Slides are ranked within splits; test slides of several splits count as one observation.
    """
    if len(results) < 2:
        return {}
    samples = {result.method: samples_of(result.predictions, overlap=True) for result in results}
    first = next(iter(samples.values()))
    folds = None if first.folds is None else dict(zip(_keys(first), first.folds, strict=True))
    return paired_rows(
        dict(zip(_keys(first), first.labels.tolist(), strict=True)),
        {method: dict(zip(_keys(own), own.scores.tolist(), strict=True)) for method, own in samples.items()},
        baseline,
        patients=dict(zip(_keys(first), first.patients, strict=True)),
        folds=folds,
        level=evaluate.confidence,
        resamples=evaluate.bootstrap,
        seed=evaluate.seed,
    )


def _keys(samples: Samples) -> list[str]:
    """Return a key for each prediction: the slide, with the split where there are several."""
    if samples.folds is None:
        return list(samples.names)
    return [f"{slide} in {split}" for slide, split in zip(samples.names, samples.folds, strict=True)]


def comparison_row(
    result: MethodResult,
    scores: Scores,
    on: EvaluatedOn,
    *,
    features: str = "",
    paired: Mapping[str, PairedRow] | None = None,
    published: Published | None = None,
) -> ComparisonRow:
    """Return the row of a method: slide-level metrics of the ensemble, AUC of each seed, origin of the threshold."""
    whole = scores.slide["ensemble"]
    thresholds = {row.threshold_from for row in result.predictions if row.part == "test" and row.seed is None}
    binary = len(result.class_names) == 2
    return ComparisonRow(
        method=result.aggregator,
        display_name=result.method,
        features=features or result.encoder,
        evaluated_on=on,
        seed_aucs=tuple(read_interval(own["auc"]).value for own in scores.slide["seeds"].values()),
        auc=read_interval(whole["auc"]),
        accuracy=read_interval(whole["accuracy"]),
        balanced_accuracy=read_interval(whole["balanced_accuracy"]),
        sensitivity=read_interval(whole["sensitivity"]) if binary else None,
        specificity=read_interval(whole["specificity"]) if binary else None,
        threshold_from=", ".join(sorted(thresholds)),
        paired=(paired or {}).get(result.method),
        training_seconds=sum(run.seconds for run in result.runs),
        warnings=result.warnings,
        transductive=bool(result.transductive),
        published=published,
        recipe="-" if result.recipe is None else result.recipe.kind,
        recipe_words="" if result.recipe is None else result.recipe.words,
        evidence=evidence_words(list(result.evidence.values())),
    )
