"""Labels of another cohort, in the class names of a packaged model.

The table is read and checked before inference, so that a misspelt class is reported at once, but it is joined to
predictions only after these were written: inference takes no argument that holds a label.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from selfvitmil.cohort import Cohort, read_cohort
from selfvitmil.cohort.table import column_key, is_negative_name, listing, name_key
from selfvitmil.errors import CohortError, ConfigError
from selfvitmil.outcomes import Outcome

LEAVE_OUT = ""
"""What --label-map maps a label to whose slides are left out."""


@dataclass(frozen=True)
class ExternalLabel:
    """What the table says of a slide."""

    label: Any
    """Class index of the model; with another outcome than classes its target, a tuple of numbers."""
    patient: str
    values: Mapping[str, str | None]
    """Column of subgroups -> its cell."""


@dataclass(frozen=True)
class ExternalLabels:
    """All labelled slides of the table."""

    table: str
    """Name of its file."""
    slides: Mapping[str, ExternalLabel]
    """Slide's name, compared without case -> label."""
    names: Mapping[str, str]
    """The same key -> the slide's name in the table."""
    columns: tuple[str, ...]
    left_out: tuple[str, ...]
    """Labels whose slides are left out by --label-map."""
    warnings: tuple[str, ...]

    def of(self, slide: str) -> ExternalLabel | None:
        return self.slides.get(name_key(slide))


def parse_label_map(texts: Sequence[str]) -> dict[str, str]:
    """Return label -> class of `malignant=tumor` arguments; `unknown=` leaves slides of that label out."""
    found: dict[str, str] = {}
    for text in texts:
        label, equals, name = (part.strip() for part in text.partition("="))
        if not equals or not label or label in found:
            why = "it names a label twice" if label in found else "it is not LABEL=CLASS"
            how = "Write for instance --label-map malignant=tumor"
            raise ConfigError(f"--label-map {text!r}", why, how, code="invalid-label-map")
        found[label] = name
    return found


def read_labels(
    path: Path,
    classes: Sequence[str],
    slides: Mapping[str, Path],
    *,
    label_column: str | None = None,
    label_map: Mapping[str, str] | None = None,
    columns: Sequence[str] = (),
    outcome: Outcome | None = None,
) -> ExternalLabels:
    """Read the labels of slides from a table of slides; `columns` are those of subgroups.

    A model of another outcome than classes reads the columns that it was trained on.

    `slides` (name -> file) are those of this call, which the table may name by their files. Raises ConfigError for
    labels that are neither a class of the model nor mapped to one, CohortError for a table that contradicts itself.
    """
    cohort = read_cohort(path, label_column=label_column, features=slides)
    label_map = dict(label_map or {})
    targets: Mapping[str, Any] = {}
    remarks: tuple[str, ...] = ()
    if outcome is None:
        _check_labels(path.name, cohort, classes, label_map)
    elif label_column is not None or label_map:
        raise ConfigError(
            f"--label-{'map' if label_column is None else 'column'} with a model of {outcome.words}",
            "it is about class labels, and this model has none",
            f"Name the columns of {path.name} {listing(outcome.columns)}, and leave the flag out",
            code="labels-of-classes",
        )
    else:
        targets, remarks = outcome.read(cohort, path.name), outcome.remarks(cohort)
    known = {column_key(name) for name in cohort.extra_columns}
    if missing := [name for name in columns if column_key(name) not in known]:
        raise CohortError(
            f"{path.name}: no column {missing[0]!r} to form subgroups by",
            f"its further columns are {listing(cohort.extra_columns)}" if known else "it has no further columns",
            "Name one of them with --by" if known else "Add the column to the table",
            code="missing-column",
        )
    found: dict[str, ExternalLabel] = {}
    names: dict[str, str] = {}
    for row in cohort.rows:
        name = label_map.get(row.label, row.label) if row.label is not None else None
        label = targets.get(row.slide) if outcome is not None else classes.index(name) if name else None
        if label is not None:
            values = {column: row.value(column) for column in columns}
            found[name_key(row.slide)] = ExternalLabel(label, row.patient, values)
            names[name_key(row.slide)] = row.slide
    left_out = tuple(label for label, name in label_map.items() if name == LEAVE_OUT)
    warnings = [*([cohort.patient_warning] if cohort.patient_warning else []), *remarks]
    return ExternalLabels(path.name, found, names, tuple(columns), left_out, tuple(warnings))


def _check_labels(table: str, cohort: Cohort, classes: Sequence[str], label_map: Mapping[str, str]) -> None:
    """Raise ConfigError where a label is no class, or the mapping names what is not there."""
    if not cohort.classes:
        raise ConfigError(
            f"{table}: no slide has a label",
            "an evaluation needs them",
            "Fill the column label, or name another column with --label-column",
            code="no-labels",
        )
    if unknown := [name for name in label_map.values() if name not in (*classes, LEAVE_OUT)]:
        raise ConfigError(
            f"--label-map: {unknown[0]!r} is no class of the model",
            f"its classes are {listing(classes)}",
            "Map labels to these, or to nothing (`unknown=`) to leave their slides out",
            code="unknown-class",
        )
    if unused := [label for label in label_map if label not in cohort.classes]:
        raise ConfigError(
            f"--label-map: {table} has no label {unused[0]!r}",
            f"its labels are {listing(cohort.classes)}",
            "Correct the name, or leave the mapping out",
            code="unknown-label",
        )
    if strange := [label for label in cohort.classes if label not in classes and label not in label_map]:
        folded = {name.casefold(): name for name in classes}
        likely = classes[0] if len(classes) == 2 and is_negative_name(strange[0]) else classes[-1]
        example = f'--label-map "{strange[0]}={folded.get(strange[0].casefold(), likely)}"'
        raise ConfigError(
            f"{table}: labels that are no classes of the model: {listing(map(repr, strange))}",
            f"its classes are {listing(classes)}",
            f"Say what each of them means, for instance {example}; an empty class leaves the slides out",
            code="unknown-label",
        )
