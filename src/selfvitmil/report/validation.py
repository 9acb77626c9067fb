"""The page of an external validation: metrics, drift, calibration, subgroups, comparison. Names no slide."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from selfvitmil.evaluate.external import NAMES, Change, ExternalValidation, ValidationLevel
from selfvitmil.evaluate.subgroups import METRICS as SUBGROUP_METRICS
from selfvitmil.evaluate.subgroups import SubgroupTable
from selfvitmil.formatting import number, p_value, percent, value_and_limits, with_limits
from selfvitmil.outcomes import Outcome
from selfvitmil.pseudonyms import Names
from selfvitmil.report.analyses import DecisionsData, decisions_data
from selfvitmil.report.render import Shown, Table, chart, render_template
from selfvitmil.report.results import METRICS, metric_names


@dataclass(frozen=True)
class SubgroupSection:
    """Subgroups of one column."""

    title: str
    table: Table
    notes: tuple[str, ...]


@dataclass(frozen=True)
class ValidationPage:
    """What the page shows."""

    name: str
    facts: tuple[tuple[str, str], ...]
    warnings: tuple[str, ...]
    metrics: Table
    undefined: tuple[str, ...]
    calibration: Table | None
    changes: Table | None
    comparison: Table | None
    subgroups: tuple[SubgroupSection, ...]
    charts: tuple[Shown, ...]
    metrics_note: str
    """How decisions are made and intervals computed."""
    decisions: DecisionsData | None = None

    @classmethod
    def of(
        cls,
        name: str,
        facts: Mapping[str, str],
        found: ExternalValidation,
        charts: Sequence[str],
        outcome: Outcome | None = None,
    ) -> ValidationPage:
        undefined = [
            f"{METRICS.get(key, key)}, by {level.level}: {why}"
            for level in found.levels
            for key, why in level.metrics["reasons"].items()
        ]
        return cls(
            name,
            tuple(facts.items()),
            found.warnings,
            _metrics(found),
            tuple(undefined),
            _calibration(found),
            _changes(found.changes),
            _comparison(found),
            tuple(subgroup_section(table, found.confidence) for table in found.subgroups),
            tuple(chart(svg, Names()) for svg in charts),
            OF_CLASSES if outcome is None else _methods(found, outcome),
            decisions_data(found.decisions_json),
        )


def render_validation(page: ValidationPage) -> str:
    """Return the page as HTML, in the report's style."""
    return render_template("validation.html.j2", page)


OF_CLASSES = (
    "Decisions are made by the threshold of the package. Intervals: DeLong's for the AUC, with slides of one patient "
    "kept together; Wilson's for proportions."
)


def _methods(found: ExternalValidation, outcome: Outcome) -> str:
    methods: list[str | None] = [
        own.get("method") for name in outcome.shown_metrics if (own := found.slide.metrics.get(name))
    ]
    return f"Intervals: {'; '.join(dict.fromkeys(filter(None, methods)))}. Score: {outcome.score_words}."


def _cell(level: ValidationLevel, key: str) -> str:
    own: Any = level.metrics.get(key)
    if own is None:
        return ""
    value, limits = value_and_limits(own)
    return f"{value} [{limits}]" if limits else value


def _metrics(found: ExternalValidation) -> Table:
    names = metric_names(found.slide.metrics)
    rows = [(name, *(_cell(level, key) for level in found.levels)) for key, name in names.items()]
    header = ("", *(f"by {level.level} (n = {level.num})" for level in found.levels))
    return Table.of(header, [row for row in rows if any(row[1:])])


def _calibration(found: ExternalValidation) -> Table | None:
    if found.slide.calibration is None:
        return None
    rows: list[tuple[str, ...]] = []
    for level in found.levels:
        own = level.calibration
        assert own is not None
        rows.append(
            (
                f"by {level.level}",
                number(own.mean_probability),
                number(own.prevalence),
                with_limits(own.in_the_large),
                with_limits(own.slope),
                number(own.brier),
                number(own.ece),
            )
        )
    header = ("", "mean probability", "share of positives", "in the large (0)", "slope (1)", "Brier score", "ECE")
    return Table.of(header, rows)


def _changes(changes: Sequence[Change]) -> Table | None:
    if not changes:
        return None
    rows: list[tuple[str, ...]] = []
    for each in changes:
        limits = "" if each.low is None or each.high is None else f"{each.low:+.3f} to {each.high:+.3f}"
        name = NAMES.get(each.metric, each.metric)
        mark = "yes" if each.is_significant else ""
        rows.append(
            (name, each.against, number(each.before), number(each.now), f"{each.difference:+.3f}", limits, mark)
        )
    header = ("", "own slides", "there", "new cohort", "difference", "limits", "beyond chance")
    return Table.of(header, rows)


def _comparison(found: ExternalValidation) -> Table | None:
    rows = [
        (
            f"by {each.level} (n = {each.num})",
            number(each.value),
            number(each.other_value),
            with_limits(each.difference),
            p_value(each.p_value),
            each.test,
        )
        for level in found.levels
        if (each := level.comparison) is not None
    ]
    first = next((level.comparison for level in found.levels if level.comparison is not None), None)
    if first is None:
        return None
    heads = (f"{first.metric} of {name}" for name in (first.model, first.other))
    return Table.of(("", *heads, "difference", "p", "test"), rows)


def subgroup_section(table: SubgroupTable, confidence: float) -> SubgroupSection:
    """Return the subgroups of a column with the tests between them."""
    notes = [
        f"{SUBGROUP_METRICS[test.metric]}: Q = {test.q:.2f} over {test.num_groups} subgroups, "
        f"p {p_value(test.p_value)}, {p_value(test.p_holm)} after Holm's correction."
        for test in table.tests
    ]
    if table.num_without_value:
        notes.append(f"{table.num_without_value} slides have no value and are in no subgroup.")
    if table.tests and table.num_shared:
        notes.append(f"{table.num_shared} patients are in several subgroups, which the tests take as independent.")
    undefined = {f"{group.value}: {why}" for group in table.groups for why in group.reasons.values()}
    header, *rows = table.cells()
    title = f"By {table.column}, {percent(confidence)} limits, each {table.level} by itself"
    return SubgroupSection(title, Table.of(header, rows), (*notes, *sorted(undefined)))
