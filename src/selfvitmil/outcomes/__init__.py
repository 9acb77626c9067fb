"""Outcomes: what a model predicts of a slide, from the cells of the cohort to metrics and words.

`choose_outcome` finds the outcome of a study by its settings and cohort. Classes come back as `Classes`, which names
their column only: they are the case that training and evaluation are written for. All others are an `Outcome`; see
`base.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from selfvitmil.cohort.table import Cohort, column_key, listing, order_classes
from selfvitmil.errors import CohortError, ConfigError
from selfvitmil.outcomes.base import Outcome, Scored, Target, as_array, check_columns
from selfvitmil.settings import TrainSettings

if TYPE_CHECKING:
    from selfvitmil.outcomes.joint import Joint

__all__ = [
    "Classes", "Outcome", "Scored", "Target", "as_array", "choose_joint", "choose_outcome", "joint_place",
    "joint_targets", "need_classes", "outcome_from_json",
]  # fmt: skip

KINDS = {
    "survival": "survival.Survival",
    "survival-discrete": "survival.DiscreteSurvival",
    "continuous": "continuous.Continuous",
    "ordinal": "ordinal.Ordinal",
    "multilabel": "multilabel.MultiLabel",
    "classes": "joint.ClassTarget",
    "joint": "joint.Joint",
}
"""Kind of outcome -> module and class, which are loaded when a cohort has it; `classes` only within `joint`."""
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
    if info.get("kind") not in KINDS:
        raise ValueError(f"unknown outcome {info.get('kind')!r}")
    return _kind(info["kind"]).of_json({key: value for key, value in info.items() if key != "kind"})


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


# ---------------------------------------------------------------------------------------------------- joint


def joint_targets(train: TrainSettings) -> tuple[tuple[str, ...], ...]:
    """Return the columns of each target of `train.joint`."""
    return tuple(_columns_and_kind(text)[0] for text in train.joint)


def _columns_and_kind(text: str) -> tuple[tuple[str, ...], str]:
    """Return columns and kind of a target: `grade:ordinal`, `time+event`, `tumor_percent`, `kras+braf:multilabel`."""
    names, _, kind = text.rpartition(":")
    if not names or kind not in (*KINDS, "binary", "multiclass") or kind in ("joint", "classes"):
        names, kind = text, ""
    columns = tuple(names.split("+"))
    return columns, kind or ("auto" if len(columns) == 1 else "survival")


def joint_place(train: TrainSettings) -> int | None:
    """Return which of the targets of `train.joint` `train.target` names; None where it names none.

    Raises ConfigError for settings that contradict each other.
    """
    targets, asked = joint_targets(train), tuple(map(column_key, train.target))
    keys = [tuple(map(column_key, each)) for each in targets]
    if len(set(keys)) < 2 or len(set(keys)) < len(keys):
        raise ConfigError(
            f"train.joint names {listing(train.joint) or 'no target'}",
            "targets are trained jointly where there are at least two, each once",
            "Name all of them, or use train.target for one",
            code="invalid-joint-targets",
        )
    if train.joint_weights and len(train.joint_weights) != len(targets):
        raise ConfigError(
            f"train.joint_weights has {len(train.joint_weights)} numbers for {len(targets)} targets",
            how="Give one for each target of train.joint, in its order",
            code="invalid-joint-targets",
        )
    if train.outcome != "auto":
        raise ConfigError(
            f"train.outcome {train.outcome!r} with train.joint",
            "every target has a kind of its own there",
            f"Write it behind the target, as in {train.joint[0].partition(':')[0]}:{train.outcome}",
            code="outcome-of-joint",
        )
    if not asked:
        return None
    if asked not in keys:
        raise ConfigError(
            f"train.target {listing(train.target)} is none of the targets that are trained jointly",
            f"train.joint has {listing(train.joint)}",
            "Name one of them, or none for all",
            code="target-not-joint",
        )
    return keys.index(asked)


def choose_joint(cohort: Cohort, train: TrainSettings) -> tuple[Joint, tuple[str, ...]]:
    """Return the outcome with all targets of `train.joint`, and lines on what was taken where a kind was not given.

    Raises ConfigError as `choose_outcome` does, and for settings that a joint training does not have.
    """
    from selfvitmil.outcomes.joint import ClassTarget, Joint

    joint_place(train)
    for name, value in {"train.tune": train.tune, "train.class_weights": train.class_weights == "balanced"}.items():
        if value:
            raise ConfigError(
                f"{name} with train.joint",
                "it is for one target",
                "Leave it out, or train the targets one by one (train.target)",
                code="not-with-joint",
            )
    parts: list[Outcome] = []
    lines: list[str] = []
    for text in train.joint:
        columns, kind = _columns_and_kind(text)
        alone = train.model_copy(update={"target": columns, "outcome": kind, "joint": (), "joint_weights": ()})
        found, line = choose_outcome(cohort, alone)
        lines += [line.replace("(train.outcome)", "(train.joint)")] if line else []
        if isinstance(found, Outcome):
            parts.append(found)
            continue
        names = found.labels(cohort).classes
        if len(names) < 2:
            raise ConfigError(
                f"{found.column} has {f'one class only ({names[0]})' if names else 'no label'}",
                "a classifier needs at least two classes",
                "Correct the cells, or leave it out of train.joint",
                code="one-class",
            )
        positive = train.positive if train.positive in names else None
        parts.append(ClassTarget(columns, order_classes(names, positive).names, positive))
    if train.positive is not None and not any(
        isinstance(part, ClassTarget) and train.positive in part.classes for part in parts
    ):
        raise ConfigError(
            f"train.positive {train.positive!r}: no target of train.joint has this class",
            how="Correct it, or leave it out",
            code="unknown-positive-class",
        )
    return Joint.of(parts, train.joint_weights), tuple(lines)


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
