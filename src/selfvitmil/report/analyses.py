"""Further analyses of a method: decision curves, prediction sets, settings that were tuned, and subgroups.

Subgroups are formed by the further columns of the cohort and by format of the slide files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from selfvitmil.cohort.table import column_key
from selfvitmil.errors import SelfVitMilError
from selfvitmil.formatting import number, percent, value_and_limits
from selfvitmil.report.render import Shown, Table
from selfvitmil.settings import EvaluateSettings
from selfvitmil.store.files import section

if TYPE_CHECKING:
    from selfvitmil.outcomes import Outcome
    from selfvitmil.report.data import StudyFiles
    from selfvitmil.report.results import ResultsFolder
    from selfvitmil.report.validation import SubgroupSection

SETS = "Prediction sets contain the true class"
SET_WORDS = (
    "A prediction set holds all classes that cannot be excluded. Its threshold comes from validation slides, which "
    "also chose the epoch, so that coverage may be a little lower than asked for; sets of one class are decisions, "
    "larger ones say that the model does not know."
)
CURVE_WORDS = (
    "At a threshold probability in this range decisions by the model are of more use than treating everyone or no one."
)
NAMES = {"decision_curve": "Decision curve", "prediction_sets": "Prediction sets"}


@dataclass(frozen=True)
class DecisionsData:
    """Prediction sets and decision curves of one method."""

    table: Table
    notes: tuple[str, ...]
    missing: tuple[str, ...]
    """What there is not, and why."""
    charts: tuple[Shown, ...] = ()


def decisions_data(info: Mapping[str, Any] | None, charts: tuple[Shown, ...] = ()) -> DecisionsData | None:
    """Return the section of the `decisions` in metrics.json; None where there are none."""
    if not info:
        return None
    rows: list[tuple[str, str, str]] = []
    notes: list[str] = []
    sets, curve = info.get("prediction_sets"), info.get("decision_curve")
    if sets:
        wanted = percent(float(sets["wanted"]))
        rows.append((f"{SETS} (asked for: {wanted})", *value_and_limits(sets["coverage"])))
        rows += [
            (f"{SETS}, {name}", *value_and_limits(own)) for name, own in sets["per_class"].items() if own is not None
        ]
        rows.append(("Classes in a set, on average", *value_and_limits(sets["mean_size"])))
        rows.append(("Sets of one class", number(sets["single"]), ""))
        rows.append(("Empty sets", number(sets["empty"]), ""))
        notes.append(SET_WORDS)
    if curve:
        for name, own in curve["better_than_all_and_none"].items():
            found = "none" if own is None else f"{own['low']:.2f} to {own['high']:.2f}"
            rows.append((f"Useful threshold probabilities of {name}", found, ""))
        notes.append(CURVE_WORDS)
    missing = [f"{_named(key)}: {why}" for key, why in section(info, "reasons").items()]
    return DecisionsData(Table.of(("", "", "interval"), rows), tuple(notes), tuple(missing), charts)


def _named(key: str) -> str:
    name, _, split = key.partition(" of ")
    return NAMES.get(name, name) + (f" of {split}" if split else "")


@dataclass(frozen=True)
class TuningData:
    """Settings that cross-validation chose, for each split, among which others."""

    words: str
    table: Table


def tuning_data(info: Mapping[str, Any]) -> TuningData | None:
    """Return the section of `tuned` in metrics.json: a row per point, a column per split, the chosen one marked."""
    tuned: Mapping[str, Any] = section(info, "tuned")
    if not tuned:
        return None
    from selfvitmil.evaluate.tuning import point_words

    first = next(iter(tuned.values()))
    points = list(dict.fromkeys(point_words(each["settings"]) for own in tuned.values() for each in own["tried"]))
    columns = {split: _scores(own, point_words) for split, own in tuned.items()}
    rows = [(point, *(scores.get(point, "") for scores in columns.values())) for point in points]
    words = (
        f"Mean {first['metric']} in {first['folds']}-fold cross-validation on training and validation slides alone, by "
        f"patient; * is the choice of the split. Test slides took no part."
    )
    return TuningData(words, Table.of(("settings", *columns), rows))


def _scores(own: Mapping[str, Any], point_words: Callable[[Mapping[str, Any]], str]) -> dict[str, str]:
    return {
        point_words(each["settings"]): ("diverged" if each["mean"] is None else number(each["mean"]))
        + (" *" if place == own["chosen"] else "")
        for place, each in enumerate(own["tried"])
    }


# ---------------------------------------------------------------------------------------------------- subgroups


MOST_COLUMNS = 6
"""Columns that are shown: of many comparisons some differ by chance."""


@dataclass(frozen=True)
class SubgroupsData:
    """Metrics by the values of each column."""

    sections: tuple[SubgroupSection, ...]
    warnings: tuple[str, ...]
    left_out: tuple[str, ...]
    """Columns whose values are no subgroups, and why."""


def subgroups_data(
    files: StudyFiles, main: tuple[ResultsFolder, Mapping[str, Any]] | None, evaluate: EvaluateSettings
) -> SubgroupsData:
    """Return the subgroups of the method that the answer is about (`answer.main_result`); none without predictions."""
    if main is None:
        return SubgroupsData((), (), ())
    folder, info = main
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
