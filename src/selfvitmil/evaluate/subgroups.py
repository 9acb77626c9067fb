"""Metrics of subgroups (sites, scanners, the values of any other column), and whether they differ by more than chance.

`subgroup_tables` cuts a method's test slides by the values of one column and scores every part by itself: number of
slides and patients, AUC, sensitivity, specificity (accuracy with more than two classes), Brier score, mean score.
Slides without a value are counted but not scored.

`heterogeneity` tests whether a metric is the same in all subgroups. It is Cochran's Q with the subgroups' own limits in
place of standard errors: a subgroup's deviation from a common value is measured by the limit on that side, so the test
works for limits that are not symmetric (Wilson, DeLong on the logit scale, Newcombe for a perfect ranking). The common
value is the one that fits best. Under equal metrics Q has about a chi-squared distribution with one degree of freedom
less than there are subgroups. Simulated with equal metrics in 3 subgroups of 30 slides, tests at 5 % reject in 3 % of
studies for an AUC of 0.85 and in 4 % for a sensitivity of 0.8; with 80 slides each in 5 and 4 %. With 5 subgroups of 16
slides and an AUC of 0.85 it is 1 %: small subgroups rarely prove a difference. All p-values of a study, of every metric
and column, are corrected together by Holm's method (1979). Where patients have several slides, the test is by patient.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
from scipy.optimize import minimize_scalar  # pyright: ignore[reportMissingTypeStubs, reportUnknownVariableType]
from scipy.stats import chi2  # pyright: ignore[reportMissingTypeStubs]

from selfvitmil import formatting
from selfvitmil.errors import CohortError, MetricError
from selfvitmil.evaluate.comparison import holm
from selfvitmil.evaluate.comparison_table import METRIC_NAMES
from selfvitmil.evaluate.method_metrics import Samples, are_disjoint, read_interval, samples_of, score_samples
from selfvitmil.evaluate.outcome_results import scored_predictions
from selfvitmil.evaluate.predictions import Prediction
from selfvitmil.metrics import Interval
from selfvitmil.metrics.classification import normal_quantile
from selfvitmil.outcomes import Outcome
from selfvitmil.settings import EvaluateSettings
from selfvitmil.store.files import write_csv

MAX_GROUPS = 50
"""Most values of a column whose subgroups are scored: more are names, dates or measurements."""
SIGNIFICANT = 0.05
"""Corrected p-value below which a warning is given."""
METRICS = {
    "auc": "AUC", "sensitivity": "sensitivity", "specificity": "specificity", "accuracy": "accuracy", **METRIC_NAMES,
}  # fmt: skip
"""Metrics with confidence limits that a subgroup may have, and their names."""

Level = Literal["slide", "patient"]


@dataclass(frozen=True)
class Subgroup:
    """Metrics of the test slides (or patients) with one value of the column."""

    value: str
    num_slides: int
    num_patients: int
    counts: Mapping[str, int]
    """Class -> slides, or patients where the level is `patient`."""
    metrics: Mapping[str, Interval | None]
    """Those of `METRICS` that apply; None where one is undefined."""
    brier: float | None
    mean_score: float | None
    """Mean score of the positive class; None with more than two classes."""
    reasons: Mapping[str, str]
    """Metric -> why it is undefined."""


@dataclass(frozen=True)
class Heterogeneity:
    """Test of whether a metric is equal in all subgroups."""

    metric: str
    num_groups: int
    common: float
    """Value that fits all subgroups best."""
    q: float
    """Sum of squared deviations in standard errors."""
    p_value: float
    p_holm: float
    """Corrected for all metrics and columns that are tested."""


@dataclass(frozen=True)
class SubgroupTable:
    """The subgroups of one column, by slide or by patient."""

    column: str
    level: Level
    groups: tuple[Subgroup, ...]
    tests: tuple[Heterogeneity, ...]
    num_without_value: int
    """Test slides whose cell of the column is empty."""
    num_shared: int = 0
    """Patients with slides in several subgroups, which the test takes as independent."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """One sentence for every metric that differs by more than chance."""
        lines: list[str] = []
        for test in self.tests:
            if test.p_holm >= SIGNIFICANT:
                continue
            known = [(group.metrics[test.metric], group) for group in self.groups]
            ranked = sorted((own.value, group.value) for own, group in known if own is not None)
            (least, worst), (most, best) = ranked[0], ranked[-1]
            lines.append(
                f"{METRICS[test.metric]} differs between the values of {self.column} by more than chance "
                f"({worst} {least:.3f}, {best} {most:.3f}; Cochran's Q over {test.num_groups} subgroups by "
                f"{self.level}, p {formatting.p_value(test.p_holm)} after Holm's correction)"
            )
        return tuple(lines)

    def cells(self) -> list[list[str]]:
        """Return the table as text, header first."""
        names = list(self.groups[0].metrics) if self.groups else []
        classes = list(self.groups[0].counts) if self.groups else []
        header = [
            self.column,
            "slides",
            "patients",
            *classes,
            *(METRICS[name] for name in names),
            "Brier",
            "mean score",
        ]
        rows = [
            [
                group.value,
                str(group.num_slides),
                str(group.num_patients),
                *(str(group.counts[name]) for name in classes),
                *(formatting.with_limits(group.metrics[name]) for name in names),
                formatting.number(group.brier),
                formatting.number(group.mean_score),
            ]
            for group in self.groups
        ]
        return [header, *rows]

    def to_json(self) -> dict[str, Any]:
        groups = [
            {**asdict(replace(group, metrics={})), "metrics": {key: _json(own) for key, own in group.metrics.items()}}
            for group in self.groups
        ]
        return {
            "column": self.column,
            "level": self.level,
            "groups": groups,
            "tests": [asdict(test) for test in self.tests],
            "test": "Cochran's Q with confidence limits as standard errors, p-values corrected by Holm's method",
            "num_without_value": self.num_without_value,
            "num_shared": self.num_shared,
            "warnings": list(self.warnings),
        }


def _json(interval: Interval | None) -> dict[str, Any] | None:
    return None if interval is None else asdict(interval)


# ---------------------------------------------------------------------------------------------------- test


def heterogeneity(intervals: Sequence[Interval]) -> tuple[float, float, float]:
    """Return the common value, Q and p-value of equal values in independent groups, from their confidence intervals.

    Raises MetricError for fewer than two intervals.
    """
    if len(intervals) < 2:
        raise MetricError(
            f"{len(intervals)} subgroups with this metric",
            "at least two are compared",
            "Use a column with more values",
            code="too-few-subgroups",
        )
    value = np.array([each.value for each in intervals])
    z = normal_quantile(intervals[0].level)
    # A limit may coincide with the value only at 0 or 1, which no common value is beyond.
    down = np.maximum([each.value - each.low for each in intervals], 1e-12) / z
    up = np.maximum([each.high - each.value for each in intervals], 1e-12) / z

    def q(common: float) -> float:
        deviation = value - common
        return float(((deviation / np.where(deviation > 0, down, up)) ** 2).sum())

    if value.min() == value.max():
        return float(value[0]), 0.0, 1.0
    # Each term is convex, and so is the sum.
    minimize = cast("Any", minimize_scalar)
    found = minimize(q, bounds=(float(value.min()), float(value.max())), method="bounded", options={"xatol": 1e-9})
    common = float(found.x)
    statistic = q(common)
    distribution: Any = chi2
    return common, statistic, float(distribution.sf(statistic, len(intervals) - 1))


# ---------------------------------------------------------------------------------------------------- tables


def subgroup_tables(
    predictions: Sequence[Prediction],
    columns: Mapping[str, Mapping[str, str | None]],
    class_names: Sequence[str],
    evaluate: EvaluateSettings,
    outcome: Outcome | None = None,
) -> tuple[SubgroupTable, ...]:
    """Return the subgroups of the ensemble's test predictions by the values (slide -> cell) of every column.

    A column has a table by slide; where patients have several slides a second one is by patient, with the test. Slides
    of different splits are ranked within their split. With another `outcome` than classes the metric is its primary
    one, and the mean score that of its ranks. Raises CohortError where no slide has a value, or where the
    values are too many to be subgroups.
    """
    found = [
        table
        for column, values in columns.items()
        for table in _column_tables(predictions, values, column, class_names, evaluate, outcome)
    ]
    corrected = iter(holm([test.p_value for table in found for test in table.tests]))
    return tuple(
        replace(table, tests=tuple(replace(test, p_holm=next(corrected)) for test in table.tests)) for table in found
    )


def _column_tables(
    predictions: Iterable[Prediction],
    values: Mapping[str, str | None],
    column: str,
    class_names: Sequence[str],
    evaluate: EvaluateSettings,
    outcome: Outcome | None,
) -> list[SubgroupTable]:
    rows = [row for row in predictions if row.part == "test" and row.seed is None]
    given = {row.slide: values.get(row.slide) or "" for row in rows}
    groups = sorted({value for value in given.values() if value})
    check_groups(column, groups, len(given))
    patients = {row.slide: row.patient for row in rows}
    levels: list[Level] = ["slide"]
    if len(set(patients.values())) < len(patients):
        levels.append("patient")
    without = sum(not value for value in given.values())
    places = {(patients[slide], value) for slide, value in given.items() if value}
    shared = sum(count > 1 for count in Counter(patient for patient, _ in places).values())
    overlap = not are_disjoint(rows)
    tables: list[SubgroupTable] = []
    for level in levels:
        members = {value: [row for row in rows if given[row.slide] == value] for value in groups}
        if outcome is not None:
            parts = [_outcome_subgroup(value, own, level, outcome, evaluate) for value, own in members.items()]
        else:
            parts = [_subgroup(value, own, level, overlap, class_names, evaluate) for value, own in members.items()]
        tests = _tests(parts) if level == levels[-1] else ()
        tables.append(SubgroupTable(column, level, tuple(parts), tests, without, shared))
    return tables


def check_groups(column: str, groups: Sequence[str], num_slides: int) -> None:
    """Raise CohortError where a column's values are no subgroups of so many slides."""
    if not groups:
        raise CohortError(
            f"column {column!r}: empty for all {num_slides} test slides",
            "subgroups are formed by its values",
            "Fill it, or name another column",
            code="empty-subgroup-column",
        )
    if len(groups) > MAX_GROUPS or (len(groups) > 5 and len(groups) > num_slides / 2):
        raise CohortError(
            f"column {column!r}: {len(groups)} values in {num_slides} slides",
            "these look like names or measurements, and metrics of so few slides say nothing",
            "Name a column with few values, or group its values first",
            code="too-many-subgroups",
        )


def _subgroup(
    value: str, rows: Sequence[Prediction], level: Level, overlap: bool, class_names: Sequence[str],
    evaluate: EvaluateSettings,
) -> Subgroup:  # fmt: skip
    samples = samples_of(rows, level=level, overlap=overlap)
    binary = len(class_names) == 2
    scored = _scored(samples, class_names, evaluate)
    reasons: dict[str, str] = dict(scored["reasons"])
    names = ("auc", "sensitivity", "specificity") if binary else ("auc", "accuracy")
    metrics = {name: read_interval(scored[name]) if scored[name] is not None else None for name in names}
    brier = None if scored["brier"] is None else float(scored["brier"]["value"])
    if overlap:
        why = "test sets of the splits overlap, so slides would count several times"
        metrics |= {name: None for name in names if name != "auc"}
        reasons |= {name: why for name in names if name != "auc"}
    counts = {name: int((samples.labels == k).sum()) for k, name in enumerate(class_names)}
    slides = {row.slide: row for row in rows}
    if overlap and level == "slide":
        counts = {name: sum(row.label == k for row in slides.values()) for k, name in enumerate(class_names)}
    mean = float(np.mean(samples.scores[:, 0])) if binary else None
    shown = {name: why for name, why in reasons.items() if name in (*names, "brier")}
    num_patients = len({row.patient for row in rows})
    return Subgroup(value, len(slides), num_patients, counts, metrics, brier, mean, shown)


def _outcome_subgroup(
    value: str, rows: Sequence[Prediction], level: Level, outcome: Outcome, evaluate: EvaluateSettings
) -> Subgroup:
    """Return the primary metric of a subgroup; of several splits the mean, since each has models of its own."""
    by_split: dict[str, list[Prediction]] = defaultdict(list)
    for row in rows:
        by_split[row.split].append(row)
    parts = [scored_predictions(outcome, own, level, own[0].threshold, evaluate) for own in by_split.values()]
    reasons: dict[str, str] = {}
    found: list[Interval] = []
    for part in parts:
        try:
            found.append(outcome.primary_metric(part))
        except MetricError as error:
            reasons[outcome.primary] = error.reason
    known = [each for each in found if math.isfinite(each.low) and math.isfinite(each.high)]
    metric = None
    if known:
        middle, low, high = (float(np.mean([getattr(own, end) for own in known])) for end in ("value", "low", "high"))
        metric, reasons = Interval(middle, low, high, known[0].method, known[0].level), {}
    elif found:
        reasons[outcome.primary] = "its limits are undefined"
    ranks = np.concatenate([outcome.rank(part.scores) for part in parts])
    slides, patients = {row.slide for row in rows}, {row.patient for row in rows}
    return Subgroup(
        value, len(slides), len(patients), {}, {outcome.primary: metric}, None, float(ranks.mean()), reasons
    )


def _scored(samples: Samples, class_names: Sequence[str], evaluate: EvaluateSettings) -> dict[str, Any]:
    # With two classes the limits are DeLong's; the bootstrap beside them is not shown, so the least number will do.
    few = evaluate.model_copy(update={"bootstrap": 100})
    return score_samples(samples, class_names, few if len(class_names) == 2 else evaluate)


def _tests(groups: Sequence[Subgroup]) -> tuple[Heterogeneity, ...]:
    found: list[Heterogeneity] = []
    for name in groups[0].metrics:
        known = [own for group in groups if (own := group.metrics[name]) is not None and not math.isnan(own.value)]
        if len(known) > 1:
            common, statistic, p_value = heterogeneity(known)
            found.append(Heterogeneity(name, len(known), common, statistic, p_value, p_value))
    return tuple(found)


def write_subgroups(path: Path, tables: Sequence[SubgroupTable]) -> None:
    """Write all subgroups of all columns as one CSV table: a row per subgroup and level."""
    names = list(dict.fromkeys(name for table in tables for group in table.groups for name in group.metrics))
    classes = list(dict.fromkeys(name for table in tables for group in table.groups for name in group.counts))
    limits = [f"{name}{end}" for name in names for end in ("", "_low", "_high")]
    header = ["column", "value", "level", "slides", "patients", *(f"num_{name}" for name in classes), *limits]
    rows: list[list[Any]] = []
    for table in tables:
        for group in table.groups:
            cells: list[Any] = []
            for name in names:
                own = group.metrics.get(name)
                cells += ["", "", ""] if own is None else [repr(end) for end in (own.value, own.low, own.high)]
            counts = [group.counts.get(name, "") for name in classes]
            head = [table.column, group.value, table.level, group.num_slides, group.num_patients, *counts]
            rows.append([*head, *cells, _repr(group.brier), _repr(group.mean_score)])
    write_csv(path, [[*header, "brier", "mean_score"], *rows])


def _repr(value: float | None) -> str:
    return "" if value is None else repr(value)
