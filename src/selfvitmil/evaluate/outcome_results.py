"""Results of outcomes other than classes: metrics by slide and patient, paired tests, and the rows of a table.

The structure of `metrics.json` is that of classes (`method_metrics`): ensemble, single seeds, mean and standard
deviation over seeds, single splits. What is measured is the outcome's own (`Outcome.compute`).
"""

from __future__ import annotations

import csv
import io
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from selfvitmil.errors import MetricError
from selfvitmil.evaluate.comparison_table import OutcomeRow
from selfvitmil.evaluate.method_metrics import about_result, spread, with_seeds
from selfvitmil.evaluate.predictions import Prediction
from selfvitmil.evaluate.protocol import MethodResult
from selfvitmil.formatting import duration, markdown_list, markdown_table, number, p_value, percent, with_limits
from selfvitmil.metrics import Interval
from selfvitmil.outcomes import Outcome, Scored, as_array
from selfvitmil.outcomes.base import Floats
from selfvitmil.settings import EvaluateSettings
from selfvitmil.store.files import csv_text

Json = dict[str, Any]
Level = Literal["slide", "patient"]

SEVERAL_SPLITS = "mean over splits, since every split has models of its own; limits are the means of the splits' limits"


def score_outcome(result: MethodResult, evaluate: EvaluateSettings) -> tuple[Json, Json, Json | None]:
    """Return provenance, metrics by slide, and metrics by patient (None where every patient has one slide)."""
    outcome = result.outcome
    assert outcome is not None
    test = {row.slide: row for row in result.predictions if row.part == "test"}
    several = max(Counter(row.patient for row in test.values()).values(), default=0) > 1
    what = {**outcome.to_json(), "primary": outcome.primary, "higher_is_better": outcome.higher_is_better}
    about = about_result(result, {"outcome": what, "score": outcome.score_words}, {}, len)
    slide = {**_level(result, outcome, "slide", evaluate), "ensemble_gain": _ensemble_gain(result, outcome, evaluate)}
    return about, slide, _level(result, outcome, "patient", evaluate) if several else None


def _level(result: MethodResult, outcome: Outcome, level: Level, evaluate: EvaluateSettings) -> Json:
    seeds = (*result.seeds, None)
    by_split = {
        split: {seed: measure(outcome, scored_rows(result, seed, split, level, evaluate)) for seed in seeds}
        for split in result.splits
    }
    words = "each slide by itself; intervals keep a patient's slides together"
    info: Json = {"words": words if level == "slide" else outcome.patient_words}
    if len(by_split) == 1:
        return {**info, **_with_seeds(next(iter(by_split.values()))), "splits": {}, "over_splits": None}
    info["estimator_words"] = SEVERAL_SPLITS
    ensembles = [own[None] for own in by_split.values()]
    together = {seed: _mean([own[seed] for own in by_split.values()]) for seed in seeds}
    return {
        **info,
        **_with_seeds(together),
        "splits": {split: _with_seeds(own) for split, own in by_split.items()},
        "over_splits": spread(ensembles, "splits", _metric_names(ensembles[0])),
    }


def _ensemble_gain(result: MethodResult, outcome: Outcome, evaluate: EvaluateSettings) -> Json | None:
    """Return the primary metric of the ensemble minus that of single seeds, on the same slides; the mean over seeds and
    splits, with mean limits, which are conservative. None for one seed, or where the metric is undefined."""
    if len(result.seeds) < 2:
        return None
    found: list[Interval] = []
    for split in result.splits:
        whole = scored_rows(result, None, split, "slide", evaluate)
        for seed in result.seeds:
            try:
                found.append(outcome.paired(whole, scored_rows(result, seed, split, "slide", evaluate).scores)[0])
            except MetricError:
                return None
    info: Json = {key: float(np.mean([getattr(own, key) for own in found])) for key in ("value", "low", "high")}
    if not all(map(math.isfinite, info.values())):
        return None
    number = len(found)
    method = f"mean over {number} pairs of ensemble and seed of: {found[0].method}"
    return {**info, "level": evaluate.confidence, "method": method, "metric": outcome.primary}


def scored_rows(result: MethodResult, seed: int | None, split: str, level: Level, evaluate: EvaluateSettings) -> Scored:
    """Return the test slides, or patients, of one split as arrays."""
    assert result.outcome is not None
    rows = [row for row in result.predictions if (row.part, row.seed, row.split) == ("test", seed, split)]
    validated = [row for row in result.predictions if (row.part, row.seed, row.split) == ("val", seed, split)]
    cut = result.choices[split, seed].threshold
    scored = scored_predictions(result.outcome, rows, level, cut, evaluate, as_array(result.known))
    if not validated:
        return scored
    own = scored_predictions(result.outcome, validated, level, cut, evaluate)
    return replace(scored, validation=(own.targets, own.scores))


def scored_predictions(
    outcome: Outcome,
    rows: Sequence[Prediction],
    level: Level,
    cut: float | None,
    evaluate: EvaluateSettings,
    known: Floats | None = None,
) -> Scored:
    """Return slides, or patients, as arrays; without `known` targets of training slides these slides' own stand in."""
    targets, scores = as_array([row.label for row in rows]), as_array([row.score for row in rows])
    patients = tuple(row.patient for row in rows)
    if level == "patient":
        places: dict[str, list[int]] = defaultdict(list)
        for place, patient in enumerate(patients):
            places[patient].append(place)
        pairs = [outcome.by_patient(targets[own], scores[own]) for own in places.values()]
        targets, scores = (np.array(part) for part in zip(*pairs, strict=True))
        patients = tuple(places)
    decisions = tuple(outcome.decide(scores, cut))
    return Scored(targets, scores, decisions, patients, None, targets if known is None else known, evaluate)


def measure(outcome: Outcome, scored: Scored) -> Json:
    """Return all metrics of one set; undefined ones are None with a reason."""
    info: Json = {"num": len(scored.targets), "described": outcome.describe([tuple(row) for row in scored.targets])}
    reasons: dict[str, str] = {}
    for name, compute in outcome.compute(scored).items():
        try:
            found = compute()
        except MetricError as error:
            info[name], reasons[name] = None, error.reason
            continue
        if isinstance(found, Interval):
            found = {key: getattr(found, key) for key in ("value", "low", "high", "level", "method")}
        if not math.isfinite(found["value"]):
            info[name], reasons[name] = None, "it is undefined for these slides"
            continue
        # JSON has no infinity: an open limit is null.
        info[name] = {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in found.items()}
    return {**info, "reasons": reasons}


def _metric_names(info: Json) -> list[str]:
    return [name for name in info if name not in ("num", "described", "reasons")]


def _mean(parts: Sequence[Json]) -> Json:
    """Return the mean over splits of every metric, with mean limits."""
    info: Json = {"num": sum(part["num"] for part in parts), "described": f"{len(parts)} splits", "reasons": {}}
    for name in _metric_names(parts[0]):
        found = [part[name] for part in parts if part[name] is not None]
        if not found:
            info[name], info["reasons"][name] = None, "no split has it"
            continue
        keys = [key for key in ("value", "low", "high") if all(one.get(key) is not None for one in found)]
        info[name] = {key: float(np.mean([one[key] for one in found])) for key in keys}
        if name.endswith("_p"):
            info[name], info["reasons"][name] = None, "p-values of splits have no mean: see the single splits"
        elif "low" in keys:
            info[name] |= {
                "level": found[0]["level"],
                "method": f"mean over {len(found)} splits of: {found[0]['method']}",
            }
    return info


def _with_seeds(scored: Mapping[int | None, Json]) -> Json:
    return with_seeds(scored, _metric_names(scored[None]))


# ---------------------------------------------------------------------------------------------------- table


def outcome_rows(
    results: Sequence[MethodResult], scores: Sequence[Any], baseline: str, cohort: str, evaluate: EvaluateSettings
) -> tuple[OutcomeRow, ...]:
    """Return the rows of a comparison; `scores` are the `Scores` of each result."""
    base = next(result for result in results if result.method == baseline)
    rows: list[OutcomeRow] = []
    for result, scored in zip(results, scores, strict=True):
        row = _outcome_row(result, scored, cohort)
        rows.append(row if result is base else _with_test(row, result, base, evaluate))
    return tuple(rows)


def _outcome_row(result: MethodResult, scores: Any, cohort: str) -> OutcomeRow:
    outcome = result.outcome
    assert outcome is not None
    whole, spread = scores.slide["ensemble"], scores.slide["over_seeds"][outcome.primary]
    optimistic = "OPTIMISTIC: choices were made on the test set. " if result.protocol == "optimistic" else ""
    return OutcomeRow(
        result.aggregator,
        result.method,
        result.encoder,
        "-" if result.recipe is None else result.recipe.kind,
        outcome.kind,
        f"{optimistic}{outcome.words}; test slides of {cohort}: {whole['described']}",
        {head: _interval(whole.get(name)) for name, head in outcome.shown_metrics.items()},
        math.nan if spread["mean"] is None else spread["mean"],
        math.nan if spread["sd"] is None else spread["sd"],
        len(result.seeds),
        training_seconds=sum(run.seconds for run in result.runs),
        warnings=result.warnings,
        recipe_words="" if result.recipe is None else result.recipe.words,
    )


def _with_test(row: OutcomeRow, result: MethodResult, base: MethodResult, evaluate: EvaluateSettings) -> OutcomeRow:
    """Return the row with the paired test against the baseline, where the test set is of one split."""
    assert result.outcome is not None
    if len(result.splits) > 1:
        return row
    split = next(iter(result.splits))
    own, other = (scored_rows(each, None, split, "slide", evaluate) for each in (result, base))
    try:
        difference, test, p = result.outcome.paired(own, other.scores)
    except MetricError:
        return row
    return replace(row, baseline=base.method, difference=difference, test=test, p_value=p)


def _interval(info: Mapping[str, Any] | None) -> Interval:
    if info is None:
        return Interval(math.nan, math.nan, math.nan, "not computed")
    low, high = (math.nan if info.get(key) is None else info[key] for key in ("low", "high"))
    return Interval(info["value"], low, high, info.get("method", ""), info.get("level", 0.95))


def outcome_cells(rows: Sequence[OutcomeRow]) -> list[list[str]]:
    """Return header and rows of the table."""
    heads = list(rows[0].metrics)
    level = percent(next(iter(rows[0].metrics.values())).level)
    header = [
        "method",
        "recipe",
        *(f"{head} [{level}]" for head in heads),
        f"{heads[0]}\nof seeds",
        "seeds",
        "p",
        "training",
    ]
    return [header, *(_cells(row) for row in rows)]


def _cells(row: OutcomeRow) -> list[str]:
    spread = number(row.seed_mean) if math.isnan(row.seed_sd) else f"{row.seed_mean:.3f} ± {row.seed_sd:.3f}"
    values = ["-" if math.isnan(each.value) else with_limits(each) for each in row.metrics.values()]
    p = "-" if math.isnan(row.p_value) else p_value(row.p_value)
    return [row.display_name, row.recipe, *values, spread, str(row.num_seeds), p, duration(row.training_seconds)]


def outcome_notes(rows: Sequence[OutcomeRow]) -> list[str]:
    """Return the notes below the table."""
    tests = sorted({f"p: {row.test} against {row.baseline}, two-sided." for row in rows if row.baseline})
    warnings = dict.fromkeys(note for row in rows for note in row.warnings)
    return [f"Measured on {rows[0].on}.", *tests, *(f"Warning: {note}" for note in warnings)]


def outcome_markdown(rows: Sequence[OutcomeRow]) -> str:
    recipes = [f"Recipe of {row.display_name}: {row.recipe_words}" for row in rows if row.recipe_words]
    return f"{markdown_table(outcome_cells(rows))}\n\n{markdown_list([*outcome_notes(rows), *recipes])}\n"


_FIELDS = ("method", "display_name", "features", "recipe", "recipe_words", "kind", "on")


def outcome_csv(rows: Sequence[OutcomeRow]) -> str:
    """Return the table as CSV with six significant digits."""
    records: list[dict[str, str]] = []
    for row in rows:
        record = {"outcome": row.kind, **{name: getattr(row, name) for name in _FIELDS}}
        for head, each in row.metrics.items():
            for end in ("value", "low", "high"):
                record[f"{head} {end}"] = _full(getattr(each, end))
        record |= {"seed_mean": _full(row.seed_mean), "seed_sd": _full(row.seed_sd), "num_seeds": str(row.num_seeds)}
        record |= {"baseline": row.baseline, "test_against_baseline": row.test, "p_value": _full(row.p_value)}
        for end in ("value", "low", "high"):
            record[f"difference_{end}"] = "" if row.difference is None else _full(getattr(row.difference, end))
        record["level"] = _full(next(iter(row.metrics.values())).level)
        record["training_seconds"] = "" if row.training_seconds is None else f"{row.training_seconds:.1f}"
        records.append(record | {"warnings": "; ".join(row.warnings)})
    return csv_text([list(records[0]), *(record.values() for record in records)])


def read_outcome_csv(text: str) -> list[OutcomeRow]:
    """Return the rows of an `outcome_csv`, with six significant digits."""
    rows: list[OutcomeRow] = []
    for record in csv.DictReader(io.StringIO(text)):
        level = float(record["level"])
        heads = [key.removesuffix(" value") for key in record if key.endswith(" value")]

        def interval(name: str, record: Mapping[str, str] = record, level: float = level) -> Interval:
            value, low, high = (_number(record[f"{name}{end}"]) for end in ("value", "low", "high"))
            return Interval(value, low, high, "", level)

        rows.append(
            OutcomeRow(
                method=record["method"],
                display_name=record["display_name"],
                features=record["features"],
                recipe=record["recipe"],
                recipe_words=record.get("recipe_words", ""),
                kind=record["kind"],
                on=record["on"],
                metrics={head: interval(f"{head} ") for head in heads},
                seed_mean=_number(record["seed_mean"]),
                seed_sd=_number(record["seed_sd"]),
                num_seeds=int(record["num_seeds"]),
                baseline=record["baseline"],
                difference=interval("difference_") if record["difference_value"] else None,
                p_value=_number(record["p_value"]),
                test=record["test_against_baseline"],
                training_seconds=float(record["training_seconds"]) if record["training_seconds"] else None,
                warnings=tuple(filter(None, record["warnings"].split("; "))),
            )
        )
    return rows


def _full(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.6g}"


def _number(text: str) -> float:
    return float(text) if text else math.nan
