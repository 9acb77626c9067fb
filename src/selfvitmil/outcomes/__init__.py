"""Outcomes: what a model predicts of a slide, from the cells of the cohort to metrics and words.

`choose_outcome` finds the outcome of a study by its settings and cohort. Classes come back as `Classes`, which names
their column only: they are the case that training and evaluation are written for. All others are an `Outcome`; see
`base.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, cast

from selfvitmil.cohort.table import Cohort, column_key, listing
from selfvitmil.errors import CohortError, ConfigError
from selfvitmil.outcomes.base import Outcome, Scored, Target, as_array, check_columns
from selfvitmil.settings import TrainSettings

__all__ = [
    "Classes", "Outcome", "Scored", "Target", "as_array", "choose_outcome", "need_classes", "outcome_from_json",
]  # fmt: skip

KINDS = {
    "survival": "survival.Survival",
    "survival-discrete": "survival.DiscreteSurvival",
    "continuous": "continuous.Continuous",
    "ordinal": "ordinal.Ordinal",
    "multilabel": "multilabel.MultiLabel",
}
"""Kind of outcome -> module and class, which are loaded when a cohort has it."""
MANY_VALUES = 10
"""Different numbers in a column above which `auto` takes them as continuous values."""
FOLLOW_UP = ("time", "event")


@dataclass(frozen=True)
class Classes:
    """Classes of one column; the loss, metrics and words of classes are those of the modules themselves."""

    column: str
    said: str = ""
    """How this was found, where it was not set and the column is not `label`."""

    def labels(self, cohort: Cohort) -> Cohort:
        """Return the cohort with the cells of the column as labels."""
        if column_key(self.column) == "label":
            return cohort
        rows = tuple(replace(row, label=row.value(self.column)) for row in cohort.rows)
        return Cohort(rows, cohort.warnings)


def outcome_from_json(info: Mapping[str, Any]) -> Outcome:
    """Return the outcome that a file describes; ValueError for one that this version does not know."""
    fields: dict[str, Any] = {key: value for key, value in info.items() if key != "kind"}
    fields = {
        key: tuple(cast("list[Any]", value)) if isinstance(value, list) else value for key, value in fields.items()
    }
    if info.get("kind") not in KINDS:
        raise ValueError(f"unknown outcome {info.get('kind')!r}")
    return _kind(info["kind"])(**fields)


def _kind(name: str) -> type[Outcome]:
    module, _, kind = KINDS[name].partition(".")
    return getattr(import_module(f"selfvitmil.outcomes.{module}"), kind)


def choose_outcome(cohort: Cohort, train: TrainSettings) -> tuple[Classes | Outcome, str]:
    """Return the outcome that settings and cohort ask for, and a line that says what was taken where `auto` chose.

    Raises ConfigError for a column that the cohort does not have and for settings that contradict each other.
    """
    columns = train.target or (FOLLOW_UP if train.outcome.startswith("survival") else ("label",))
    kind, reason = train.outcome, ""
    if kind == "auto":
        kind, columns, reason = _guess(cohort, train)
    if kind in ("binary", "multiclass"):
        return _classes(cohort, kind, columns), reason
    if kind != "multilabel":
        _check_number(kind, columns, 2 if kind.startswith("survival") else 1)
    if kind == "ordinal":
        from selfvitmil.outcomes.ordinal import Ordinal

        return Ordinal.of(columns, cohort, train.levels), reason
    return _kind(kind)(columns), reason


def need_classes(outcome: Outcome | None, command: str, why: str) -> None:
    """Raise ConfigError where a command that is written for classes meets another outcome; `why` it is."""
    if outcome is not None:
        raise ConfigError(
            f"{command} with the outcome {outcome.kind}",
            why,
            "Use other commands, or set train.target and train.outcome to classes",
            code="command-needs-classes",
        )


def _check_number(kind: str, columns: tuple[str, ...], number: int) -> None:
    if len(columns) != number:
        what = "time and event" if number == 2 else "one column"
        raise ConfigError(
            f"train.target names {len(columns)} columns: {listing(columns)}",
            f"the outcome {kind} needs {what}",
            "Correct train.target",
            code="wrong-number-of-targets",
        )


def _classes(cohort: Cohort, kind: str, columns: tuple[str, ...]) -> Classes:
    _check_number(kind, columns, 1)
    classes = Classes(columns[0])
    check_columns(columns, cohort)
    found = classes.labels(cohort).classes
    if kind == "binary" and len(found) > 2:
        raise ConfigError(
            f"train.outcome 'binary', and {columns[0]} has {len(found)} classes: {listing(found)}",
            "a binary outcome has two",
            "Set train.outcome multiclass, or correct the cells",
            code="not-binary",
        )
    return classes


def _guess(cohort: Cohort, train: TrainSettings) -> tuple[str, tuple[str, ...], str]:
    """Return kind, columns and, unless it is the column label, a line on the choice."""
    has = {column_key(name) for name in cohort.extra_columns}
    if not train.target:
        if cohort.classes or not set(FOLLOW_UP) <= has:
            return "multiclass", ("label",), ""
        return "survival", FOLLOW_UP, "outcome: survival, since slides have time and event and no label (train.outcome)"
    columns = train.target
    if tuple(map(column_key, columns)) == FOLLOW_UP:
        return "survival", columns, "outcome: survival, since the targets are time and event (train.outcome)"
    if len(columns) > 1:
        raise ConfigError(
            f"train.target names {len(columns)} columns, and train.outcome is auto",
            "they may be time and event, or several labels",
            "Set train.outcome",
            code="ambiguous-outcome",
        )
    column = next(iter(columns))
    check_columns(columns, cohort)
    cells = {cell for row in cohort.rows if (cell := row.value(column)) is not None}
    try:
        numbers = _kind("continuous")(columns).read(cohort)
    except (CohortError, ConfigError):
        numbers = {}
    if numbers and len(set(numbers.values())) > MANY_VALUES:
        return (
            "continuous",
            columns,
            f"outcome: continuous, since {column} has {len(cells)} different numbers (train.outcome)",
        )
    return (
        "multiclass",
        columns,
        f"outcome: classes of {column}, which has {len(cells)} different values (train.outcome)",
    )
