"""The folder of results: `predictions.csv` and `metrics.json`, and rows of the comparison table from scored methods.

Equal results give equal bytes; neither times nor paths are in them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from selfvitmil import artefact
from selfvitmil.evaluate.predictions import write_predictions
from selfvitmil.evaluate.protocol import MethodResult
from selfvitmil.evaluate.scores import Scores, are_disjoint, read_interval, samples_of
from selfvitmil.evaluate.table import ComparisonRow, JudgedOn, PairedRow, Published, paired_rows
from selfvitmil.metrics import Interval
from selfvitmil.settings import EvaluateSettings

FORMAT_VERSION = 1


def write_results(
    folder: Path, results: Sequence[MethodResult], scores: Sequence[Scores], evaluate: EvaluateSettings
) -> None:
    """Write `predictions.csv` and `metrics.json` of one or more methods on the same classes."""
    rows = [row for result in results for row in result.predictions]
    write_predictions(folder / "predictions.csv", rows, results[0].class_names)
    told = {
        "format_version": FORMAT_VERSION,
        "settings": evaluate.model_dump(mode="json"),
        "methods": [scored.to_json() for scored in scores],
    }
    text = json.dumps(told, indent=1, ensure_ascii=False, allow_nan=False)
    artefact.write_text(folder / "metrics.json", text + "\n")


# ---------------------------------------------------------------------------------------------------- comparison


def judged_on(result: MethodResult, cohort: str, *, camelyon16_test: bool = False) -> JudgedOn:
    """What the test slides are, in the table's words; `cohort` is its name."""
    labels = {row.slide: row.label for row in result.predictions if row.part == "test"}
    counts = tuple((name, list(labels.values()).count(k)) for k, name in enumerate(result.class_names))
    number = len(result.splits)
    split = f"test slides of the split {result.splits[0]}"
    if number > 1:
        overlap = "" if are_disjoint(result.predictions) else ", which overlap"
        split = f"test slides of {number} splits{overlap}"
    protocol: Literal["honest", "optimistic"] = "optimistic" if result.protocol == "optimistic" else "honest"
    return JudgedOn(cohort, split, counts, protocol=protocol, camelyon16_test=camelyon16_test)


def compare_results(results: Sequence[MethodResult], baseline: str, evaluate: EvaluateSettings) -> dict[str, PairedRow]:
    """Every method against the one called `baseline`, by their ensembles' scores of the same test slides.

    Empty where test sets overlap: a slide has several scores there, and no paired test is valid.
    """
    if len(results) < 2 or not all(are_disjoint(result.predictions) for result in results):
        return {}
    samples = {result.method: samples_of(result.predictions) for result in results}
    first = next(iter(samples.values()))
    return paired_rows(
        dict(zip(first.names, first.labels.tolist(), strict=True)),
        {method: dict(zip(own.names, own.scores.tolist(), strict=True)) for method, own in samples.items()},
        baseline,
        patients=dict(zip(first.names, first.patients, strict=True)),
        level=evaluate.confidence,
        resamples=evaluate.bootstrap,
        seed=evaluate.seed,
    )


def comparison_row(
    result: MethodResult,
    scores: Scores,
    on: JudgedOn,
    *,
    features: str = "",
    paired: Mapping[str, PairedRow] | None = None,
    published: Published | None = None,
) -> ComparisonRow:
    """The row of a method: the ensemble's figures by slide, AUC of each seed, where the threshold came from."""
    level = scores.slide
    thresholds = {row.threshold_from for row in result.predictions if row.part == "test" and row.seed is None}
    binary = len(result.class_names) == 2
    return ComparisonRow(
        method=result.aggregator,
        display_name=result.method,
        features=features or result.encoder,
        judged_on=on,
        seed_aucs=_seed_aucs(scores),
        auc=_of_ensemble(level, "auc"),
        accuracy=_of_ensemble(level, "accuracy"),
        balanced_accuracy=_of_ensemble(level, "balanced_accuracy"),
        sensitivity=_of_ensemble(level, "sensitivity") if binary else None,
        specificity=_of_ensemble(level, "specificity") if binary else None,
        threshold_from=", ".join(sorted(thresholds)),
        paired=(paired or {}).get(result.method),
        training_seconds=sum(run.seconds for run in result.runs),
        warnings=result.warnings,
        published=published,
    )


def _of_ensemble(level: Mapping[str, object], name: str) -> Interval:
    """The ensemble's metric; where splits overlap the mean over them, from the smallest to the largest."""
    told = level.get("ensemble")
    if isinstance(told, Mapping):
        return read_interval(told[name])
    splits = level["splits"]
    assert isinstance(splits, Mapping)
    values = [own["ensemble"][name]["value"] for own in splits.values() if own["ensemble"][name] is not None]
    if not values:
        return read_interval(None)
    words = f"mean, smallest and largest of {len(values)} splits whose test slides overlap"
    return Interval(sum(values) / len(values), min(values), max(values), words, level=math.nan)


def _seed_aucs(scores: Scores) -> tuple[float, ...]:
    """AUC of each seed: of its pooled test slides, or its mean over splits that overlap."""
    level = scores.slide
    if level["seeds"]:
        return tuple(read_interval(own["auc"]).value for own in level["seeds"].values())
    aucs: list[float] = []
    for seed in scores.about["seeds"]:
        found = [own["seeds"][str(seed)]["auc"] for own in level["splits"].values()]
        values = [told["value"] for told in found if told is not None]
        aucs.append(sum(values) / len(values) if values else math.nan)
    return tuple(aucs)
