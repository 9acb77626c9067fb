"""How the main method does in subgroups: by the further columns of the cohort, and by format of the slide files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from selfvitmil.cohort.table import column_key
from selfvitmil.errors import SelfVitMilError
from selfvitmil.report.answer import main_result
from selfvitmil.settings import EvaluateSettings

if TYPE_CHECKING:
    from selfvitmil.outcomes import Outcome
    from selfvitmil.report.data import StudyFiles
    from selfvitmil.report.validation import SubgroupSection

MOST_COLUMNS = 6
"""Columns that are shown: of many comparisons some differ by chance."""


@dataclass(frozen=True)
class SubgroupsData:
    """Metrics by the values of each column."""

    sections: tuple[SubgroupSection, ...]
    warnings: tuple[str, ...]
    left_out: tuple[str, ...]
    """Columns whose values are no subgroups, and why."""


def subgroups_data(files: StudyFiles, evaluate: EvaluateSettings) -> SubgroupsData:
    """Return the subgroups of the method that the answer is about; none without predictions."""
    found = main_result(files.results)
    if found is None:
        return SubgroupsData((), (), ())
    folder, info = found
    outcome = _outcome(info)
    own_columns = {column_key(column) for column in (() if outcome is None else outcome.columns)}
    rows = [row for row in folder.predictions if row.method == info.get("method")]
    tested = {row.slide for row in rows if row.part == "test" and row.seed is None}
    columns: dict[str, Mapping[str, str | None]] = {}
    for column, values in _columns(files).items():
        if column_key(column) in own_columns:  # what is predicted
            continue
        own = {slide: value for slide, value in values.items() if slide in tested}
        if len({value for value in own.values() if value}) > 1:
            columns[column] = own
    if not columns:
        return SubgroupsData((), (), ())
    from selfvitmil.evaluate.subgroups import subgroup_tables
    from selfvitmil.report.validation import subgroup_section

    usable: dict[str, Mapping[str, str | None]] = {}
    left_out: list[str] = []
    for column, own in columns.items():
        try:
            subgroup_tables(rows, {column: own}, folder.class_names, evaluate, outcome)
        except SelfVitMilError as error:
            left_out.append(f"{column}: {error.what.partition(': ')[2] or error.what}")
            continue
        if len(usable) < MOST_COLUMNS:
            usable[column] = own
        else:
            left_out.append(f"{column}: only {MOST_COLUMNS} columns are shown")
    tables = subgroup_tables(rows, usable, folder.class_names, evaluate, outcome) if usable else ()
    return SubgroupsData(
        tuple(subgroup_section(table, evaluate.confidence) for table in tables),
        tuple(warning for table in tables for warning in table.warnings),
        tuple(left_out),
    )


def _outcome(info: Mapping[str, Any]) -> Outcome | None:
    """Return the outcome of a method in metrics.json; None for classes."""
    stored: Mapping[str, Any] | None = info.get("outcome")
    if not stored:
        return None
    from selfvitmil.outcomes import outcome_from_json

    return outcome_from_json({key: own for key, own in stored.items() if key not in ("primary", "higher_is_better")})


def _columns(files: StudyFiles) -> dict[str, dict[str, str | None]]:
    """Return the columns that may form subgroups: name -> slide -> value."""
    found: dict[str, dict[str, str | None]] = {}
    cohort = files.cohort
    if cohort is not None:
        for column in cohort.extra_columns:
            found[column] = {row.slide: row.value(column) for row in cohort.rows}
    formats = {slide: row.get("format") or None for slide, row in files.checked.items()}
    if formats:
        found.setdefault("file format", formats)
    return found
