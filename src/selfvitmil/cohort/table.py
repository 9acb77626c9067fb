"""The cohort itself: its rows, the rules they obey, `cohort.csv` and the merging of two cohorts.

Rules, checked by `make_cohort` for every source and again before writing: slide names are unique (also on file systems
that ignore case) and can be file names, a patient lies in one split only, no two labels differ in case alone.
Paths are absolute in memory and relative to the table in the file, so that a study can be moved with its slides.
"""

from __future__ import annotations

import difflib
import math
import os
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from selfvitmil.errors import CohortError, raise_problems
from selfvitmil.store.files import write_csv

COLUMNS = ("slide", "path", "label", "patient", "split", "mpp", "annotation")
"""Columns of `cohort.csv`, in order. Only `slide` and `path` must be filled."""

_MAX_NAME_BYTES = 200  # a file name has 255 at most; `<slide>_patches.h5` and its temporary name need the rest


@dataclass(frozen=True)
class SlideRow:
    """One slide: what is known of it before it is opened."""

    slide: str
    """Its name, unique in the cohort; names all its artefacts."""
    path: Path
    """The file; absolute. It need not exist: a missing one fails later, alone, at its stage."""
    label: str | None = None
    """Truth of the slide; None when not known."""
    patient: str = ""
    """Its owner; a slide without one is its own patient."""
    split: str | None = None
    """Usually train, val or test; other words name further sets."""
    mpp: float | None = None
    """Microns per level-0 pixel that overrides what the file says."""
    annotation: Path | None = None
    """Outlines of its lesions; absolute."""
    patient_stated: bool = False
    """Whether a table names the patient, be it by the slide's own name; else the slide only counts as its own."""

    def __post_init__(self) -> None:
        if not self.patient:
            object.__setattr__(self, "patient", self.slide)
        elif self.patient != self.slide:
            object.__setattr__(self, "patient_stated", True)

    def found_as(self, slide: str, path: Path) -> SlideRow:
        """The row with the name and the file under which its slide was found."""
        return replace(self, slide=slide, path=path, patient=self.patient if self.patient_stated else "")

    @property
    def lesions_complete(self) -> bool:
        """Whether all lesions of the slide are outlined, so that lesion scores may count it (its label is good anyway).

        False for one slide of Camelyon16's test set alone. It is known by its name among annotated test slides, because
        the columns of `cohort.csv` have no place for such a remark.
        """
        annotated_tumour = self.annotation is not None and self.label == "tumor" and self.split == "test"
        return not (annotated_tumour and self.slide.casefold() == "test_114")


@dataclass(frozen=True)
class Cohort:
    """All slides of a study, in the order of their table."""

    rows: tuple[SlideRow, ...]
    warnings: tuple[str, ...] = ()
    """What the reader of the table should know; one sentence each."""

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def _by_name(self) -> dict[str, SlideRow]:
        return {row.slide: row for row in self.rows}

    def __contains__(self, slide: str) -> bool:
        return slide in self._by_name

    def __getitem__(self, slide: str) -> SlideRow:
        """The row of that name; CohortError, naming the nearest, when there is none."""
        if slide not in self._by_name:
            nearest = difflib.get_close_matches(slide, self._by_name, n=1)
            raise CohortError(
                f"{slide}: no slide of the cohort has this name",
                f"the nearest is {nearest[0]}" if nearest else "",
                "See the column slide of cohort.csv",
            )
        return self._by_name[slide]

    @property
    def slides(self) -> tuple[str, ...]:
        """Names of all slides."""
        return tuple(row.slide for row in self.rows)

    @property
    def unlabelled(self) -> tuple[str, ...]:
        """Names of the slides without a label."""
        return tuple(row.slide for row in self.rows if row.label is None)

    @property
    def class_counts(self) -> dict[str, int]:
        """Slides per label, in class order: numbers by value, then words alphabetically."""
        counts = Counter(row.label for row in self.rows if row.label is not None)
        return {label: counts[label] for label in sorted(counts, key=_class_order)}

    @property
    def classes(self) -> tuple[str, ...]:
        """The labels in class order; the place of a label here is its number as a class."""
        return tuple(self.class_counts)

    @property
    def patients(self) -> dict[str, tuple[SlideRow, ...]]:
        """Rows of each patient, patients sorted by name."""
        owned: dict[str, list[SlideRow]] = defaultdict(list)
        for row in self.rows:
            owned[row.patient].append(row)
        return {patient: tuple(owned[patient]) for patient in sorted(owned)}

    @property
    def patient_warning(self) -> str:
        """What to know of slides whose patient no table states; empty when all are stated, or there is one slide."""
        unstated = [row.slide for row in self.rows if not row.patient_stated]
        if not unstated or len(self.rows) == 1:
            return ""
        if len(unstated) == len(self.rows):
            which = "No patient column was given: each slide counts as its own patient"
        else:
            which = f"{len(unstated)} slides have no patient and count each as its own: {listing(unstated)}"
        return (
            f"{which}. Slides of one patient may stand in training and test set, and metrics and confidence intervals "
            "may be too good. Fill the column patient of cohort.csv (with the slide's name where that is right)."
        )

    def select(self, split: str | None = None, *, labelled: bool = False) -> Cohort:
        """The rows of one split, or all; with `labelled` only those that have a label. May be empty."""
        rows = (row for row in self.rows if split is None or row.split == split)
        return Cohort(tuple(row for row in rows if row.label is not None or not labelled))

    @property
    def common_problems(self) -> list[CohortError]:
        """What stops a study though the table does not contradict itself: no labels, one class, files not there."""
        problems: list[CohortError] = []
        if not self.classes:
            how = "Fill the column label, or give --labels"
            problems.append(CohortError("no slide has a label", "there is nothing to learn from", how))
        elif len(self.classes) == 1:
            what, how = f"all labels are {self.classes[0]}", "Add slides of another class, or correct the labels"
            problems.append(CohortError(what, "a classifier needs two classes", how))
        return [*problems, *self.missing_problems]

    @property
    def missing_problems(self) -> list[CohortError]:
        """An error on the files that are not there, if any."""
        gone = self.missing_files()
        what = f"files of {len(gone)} slides, or their annotations, do not exist: {listing(row.slide for row in gone)}"
        return [CohortError(what, how="Correct the paths, or add the files")] if gone else []

    def missing_files(self) -> tuple[SlideRow, ...]:
        """Rows whose slide or annotation is not there. Asks the file system once per file."""
        return tuple(
            row for row in self.rows if not all(os.path.exists(file) for file in (row.path, row.annotation) if file)
        )


def _class_order(label: str) -> tuple[int, float, str]:
    try:
        number = float(label)
    except ValueError:
        number = math.nan
    return (0, number, label) if math.isfinite(number) else (1, 0.0, label)


def listing(items: Iterable[str], limit: int = 10) -> str:
    """Items for an error's text: the first few, and how many more there are."""
    items = list(items)
    more = f" and {len(items) - limit} more" if len(items) > limit else ""
    return ", ".join(items[:limit]) + more


def name_key(name: str) -> str:
    """Names with equal keys would be one file on some file systems (macOS ignores case and how accents are encoded)."""
    return unicodedata.normalize("NFC", name).casefold()


# ---------------------------------------------------------------------------------------------------- rules


def make_cohort(
    rows: Sequence[SlideRow],
    source: str = "the cohort",
    *,
    where: Sequence[str] | None = None,
    warnings: Iterable[str] = (),
    problems: list[CohortError] | None = None,
) -> Cohort:
    """Check the rows against each other and make a cohort of them; one CohortError lists all that is wrong.

    `source` and `where` (one entry a row: `line 7`, or a path within the folder) tell in errors which rows are meant.
    With `problems` errors are added to that list, for one who finds more, and not raised.
    """
    where = where if where is not None else [row.slide for row in rows]
    if not rows:
        raise CohortError(
            f"{source}: there is no slide in it", "a study needs at least one", "Give a table with rows or a folder"
        )
    checks = (_check_names, _check_unique, _check_patients, _check_labels)
    found = [error for check in checks if (error := check(rows, source, where)) is not None]
    if problems is None:
        raise_problems(found, source)
    else:
        problems += found
    return Cohort(tuple(rows), (*warnings, *general_warnings(rows)))


def general_warnings(rows: Sequence[SlideRow]) -> tuple[str, ...]:
    """Warnings that any cohort with these rows has, whatever it was read from."""
    missing = [row.slide for row in rows if row.label is None]
    if not missing:
        return ()
    if len(missing) == len(rows):
        return (f"None of the {len(rows)} slides has a label; a classifier cannot be trained without.",)
    return (f"{len(missing)} of {len(rows)} slides have no label and take no part in training: {listing(missing)}.",)


def specific_warnings(cohort: Cohort) -> tuple[str, ...]:
    """The cohort's warnings that come from its source."""
    general = general_warnings(cohort.rows)
    return tuple(warning for warning in cohort.warnings if warning not in general)


def check_slide_name(name: str) -> None:
    """ValueError where a slide's name, as a file tells it, cannot be a file name: other files are named after it."""
    if problem := _name_problem(name):
        raise ValueError(f"it is of the slide {name!r}, which is no name of a slide: {problem}")


def _name_problem(name: str) -> str:
    if not name:
        return "it is empty"
    if name != name.strip():
        return "it begins or ends with a space"
    if name.startswith("."):
        return "it begins with a dot"
    if "/" in name:
        return "it has a slash"
    if _has_control(name):
        return "it has a control character"
    if len(name.encode("utf-8")) > _MAX_NAME_BYTES:
        return f"it has more than {_MAX_NAME_BYTES} bytes"
    return ""


def _has_control(text: str) -> bool:
    """Whether it has line breaks and the like, or bytes that are not UTF-8 (Python hands those over as surrogates)."""
    return not text.isprintable() and any(unicodedata.category(character) in ("Cc", "Cs") for character in text)


def _check_names(rows: Sequence[SlideRow], source: str, where: Sequence[str]) -> CohortError | None:
    problems = [
        f"{place} ({row.slide!r}: {problem})"
        for place, row in zip(where, rows, strict=True)
        if (problem := _name_problem(row.slide))
    ]
    if problems:
        return CohortError(
            f"{source}: slide names that cannot be used: {listing(problems)}",
            "a slide's artefacts are files of its name",
            "Give other names in the column slide of a cohort.csv; the files themselves may stay as they are",
        )
    return None


def _check_unique(rows: Sequence[SlideRow], source: str, where: Sequence[str]) -> CohortError | None:
    places: dict[str, list[str]] = defaultdict(list)
    for place, row in zip(where, rows, strict=True):
        places[name_key(row.slide)].append(f"{place} ({row.slide})")
    repeated = [" = ".join(group) for group in places.values() if len(group) > 1]
    if repeated:
        return CohortError(
            f"{source}: slides of the same name: {listing(repeated)}",
            "names are file names, and some file systems ignore case",
            "Give a cohort.csv whose column slide has a name of its own for each",
        )
    return None


def _check_patients(rows: Sequence[SlideRow], source: str, where: Sequence[str]) -> CohortError | None:
    splits: dict[str, set[str]] = defaultdict(set)
    for row in rows:
        if row.split is not None:
            splits[row.patient].add(row.split)
    torn = {patient for patient, names in splits.items() if len(names) > 1}
    if torn:
        places = [
            f"{place} ({row.slide}, patient {row.patient}, {row.split})"
            for place, row in zip(where, rows, strict=True)
            if row.patient in torn and row.split is not None
        ]
        return CohortError(
            f"{source}: patients with slides in more than one split: {listing(places)}",
            "slides of one patient resemble each other, and scores on the test set would be too good",
            "Put all slides of a patient into the same split",
        )
    return None


def _check_labels(rows: Sequence[SlideRow], source: str, where: Sequence[str]) -> CohortError | None:
    spellings: dict[str, set[str]] = defaultdict(set)
    for row in rows:
        if row.label is not None:
            spellings[row.label.casefold()].add(row.label)
    doubtful = {label for labels in spellings.values() if len(labels) > 1 for label in labels}
    if doubtful:
        places = [f"{place} ({row.label})" for place, row in zip(where, rows, strict=True) if row.label in doubtful]
        return CohortError(
            f"{source}: labels that differ in case alone: {listing(places)}",
            "they would count as different classes",
            "Write each class in one way",
        )
    return None


# ---------------------------------------------------------------------------------------------------- file


def write_cohort(path: Path, cohort: Cohort) -> None:
    """Write `cohort.csv`, atomically; `read_cohort` reads it back to the same rows."""
    make_cohort(cohort.rows, path.name)
    folder = Path(os.path.realpath(path.parent))
    rows = (
        [_relative(cell, folder) if isinstance(cell, Path) else cell for cell in _stated(row).values()]
        for row in cohort.rows
    )
    write_csv(path, [COLUMNS, *rows])


def _stated(row: SlideRow) -> dict[str, Any]:
    """The fields as a table holds them: None where nothing is said, as of a patient that no table states."""
    values = {name: getattr(row, name) for name in COLUMNS}
    return values if row.patient_stated else values | {"patient": None}


def absolute(path: Path) -> Path:
    """The path from the root, without `..`; links stay, except where a `..` would leave one the wrong way."""
    if ".." in path.parts:
        return Path(os.path.realpath(path.parent), path.name) if path.name != ".." else Path(os.path.realpath(path))
    return Path(os.path.abspath(path))


def _relative(path: Path, folder: Path) -> str:
    relative = os.path.relpath(absolute(path), folder)
    if _has_control(relative):
        raise CohortError(
            f"{path.name!r}: its path has characters that a table cannot hold",
            "they are line breaks, control characters or bytes that are not UTF-8",
            "Rename the file or its folder",
        )
    return f"./{relative}" if relative != relative.lstrip() else relative


def resolve_path(value: str, folder: Path) -> Path:
    """The absolute path that `value` means in a table in `folder`, which must be free of links."""
    while value.startswith("../"):
        folder, value = folder.parent, value[3:].lstrip("/")
    return folder / value


# ---------------------------------------------------------------------------------------------------- merging


@dataclass(frozen=True)
class MergeReport:
    """What merging did, as slide names."""

    added: tuple[str, ...]
    """Slides that the old cohort did not have."""
    filled: tuple[str, ...]
    """Old slides of which the new cohort knows more."""
    moved: tuple[str, ...]
    """Old slides whose file is gone from its old place and is at a new one."""
    only_old: tuple[str, ...]
    """Old slides that the new cohort does not name; they stay."""


def merge_cohorts(old: Cohort, new: Cohort) -> tuple[Cohort, MergeReport]:
    """Add to the cohort of a study: old rows stay, their empty fields are filled, new slides follow at the end.

    Fields that contradict each other are a CohortError that lists them all. A path may change only when the old file
    is gone and the new one exists.
    """
    newer = {row.slide: row for row in new.rows}
    rows: list[SlideRow] = []
    filled: list[str] = []
    moved: list[str] = []
    conflicts: list[str] = []
    for row in old.rows:
        addition = newer.get(row.slide)
        if addition is None:
            rows.append(row)
            continue
        if _same_file(row.path, addition.path):
            addition = replace(addition, path=row.path)
        elif not os.path.exists(row.path) and os.path.exists(addition.path):
            row = replace(row, path=addition.path)
            moved.append(row.slide)
        combined, disagreements = combine(row, addition)
        conflicts += disagreements
        rows.append(combined)
        if combined != row:
            filled.append(row.slide)
    if conflicts:
        raise CohortError(
            f"cohort.csv and the new table contradict each other: {listing(conflicts)}",
            "it cannot be told which is right",
            "Correct one of the two; to forget a row, delete it from cohort.csv",
        )
    added = tuple(row for row in new.rows if row.slide not in old)
    merged = make_cohort([*rows, *added], "the merged cohort", warnings=specific_warnings(new))
    only_old = tuple(row.slide for row in old.rows if row.slide not in newer)
    return merged, MergeReport(tuple(row.slide for row in added), tuple(filled), tuple(moved), only_old)


def combine(row: SlideRow, addition: SlideRow) -> tuple[SlideRow, list[str]]:
    """`row` with its empty fields filled from `addition`, and the fields in which both say something different."""
    changes: dict[str, Any] = {}
    conflicts: list[str] = []
    ours = _stated(row)
    for name, theirs in _stated(addition).items():
        if theirs is None or ours[name] == theirs:
            continue
        if ours[name] is None:
            changes[name] = theirs
        elif not isinstance(theirs, Path):
            conflicts.append(f"{row.slide} ({name}: {ours[name]} or {theirs})")
        elif not _same_file(ours[name], theirs):
            conflicts.append(f"{row.slide} ({name}: another file)")
    if "patient" in changes:
        changes["patient_stated"] = True
    return replace(row, **changes), conflicts


def _same_file(one: Path, other: Path) -> bool:
    return one == other or os.path.realpath(one) == os.path.realpath(other)
