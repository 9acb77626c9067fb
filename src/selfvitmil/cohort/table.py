"""The cohort: its rows, the order of its classes, the rules of consistency, and `cohort.csv`.

Rules, checked by `make_cohort` for every source and again before writing: slide names are unique (also on file systems
that ignore case) and valid file names, a patient is in one split only, no two labels differ only in case.
Paths are absolute in memory and relative to the table in the file, so that a study can be moved with its slides.
Columns beyond `COLUMNS` (targets, `time`, `event`, `site`, ...) are kept as text in `SlideRow.extra`.

Of two classes the positive one comes last (`order_classes`). Scores are probabilities of the positive class, heatmaps
show evidence for it, and sensitivity is its recall, so it must be the disease and not simply the class that is last in
alphabetical order. The meaning of the names decides: `normal` is negative, whatever the other class is.
"""

from __future__ import annotations

import difflib
import math
import os
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from selfvitmil.errors import CohortError, ConfigError, raise_problems
from selfvitmil.store.files import write_csv

COLUMNS = ("slide", "path", "label", "patient", "split", "mpp", "annotation")
"""Known columns of `cohort.csv`, in order. Only `slide` and `path` must be filled. Further columns follow them."""

SITE_COLUMNS = ("site", "center", "centre", "hospital", "institution", "laboratory", "lab")
"""Further columns that say where a slide is from."""
_MAX_NAME_BYTES = 200  # a file name has 255 at most; `<slide>_patches.h5` and its temporary name need the rest


@dataclass(frozen=True)
class SlideRow:
    """One slide: what is known before it is opened."""

    slide: str
    """Its name, unique in the cohort; all its artefacts are named after it."""
    path: Path
    """The file; absolute. It need not exist: a missing one fails later, alone, in its stage."""
    label: str | None = None
    """Label of the slide; None if unknown."""
    patient: str = ""
    """Patient; a slide without one is its own patient."""
    split: str | None = None
    """Usually train, val or test; other values name further sets."""
    mpp: float | None = None
    """Microns per level-0 pixel; overrides the value in the file."""
    annotation: Path | None = None
    """Annotation file of its lesions; absolute."""
    patient_stated: bool = False
    """Whether a table states the patient (even as the slide's own name); otherwise the slide is its own patient."""
    extra: tuple[tuple[str, str], ...] = ()
    """Further columns of the table, in its order: name and cell, which is empty if the value is unknown."""

    def __post_init__(self) -> None:
        if not self.patient:
            object.__setattr__(self, "patient", self.slide)
        elif self.patient != self.slide:
            object.__setattr__(self, "patient_stated", True)

    def value(self, column: str) -> str | None:
        """Return the cell of a column, a further one or `label`; None if it is empty or the row has no such column.

        Names are compared as those of tables are: case, spaces, `-` and `.` do not matter.
        """
        key = column_key(column)
        if key == "label":
            return self.label
        return next((cell or None for name, cell in self.extra if column_key(name) == key), None)

    def found_as(self, slide: str, path: Path) -> SlideRow:
        """Return the row with the name and file under which its slide was found."""
        return replace(self, slide=slide, path=path, patient=self.patient if self.patient_stated else "")


@dataclass(frozen=True)
class Cohort:
    """All slides of a study, in the order of their table."""

    rows: tuple[SlideRow, ...]
    warnings: tuple[str, ...] = ()
    """Remarks for the user; one sentence each."""

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def _by_name(self) -> dict[str, SlideRow]:
        return {row.slide: row for row in self.rows}

    def __contains__(self, slide: str) -> bool:
        return slide in self._by_name

    def __getitem__(self, slide: str) -> SlideRow:
        """Return the row of that name; CohortError, suggesting the nearest, if there is none."""
        if slide not in self._by_name:
            nearest = difflib.get_close_matches(slide, self._by_name, n=1)
            raise CohortError(
                f"{slide}: no such slide in the cohort",
                f"the nearest is {nearest[0]}" if nearest else "",
                "See the column slide of cohort.csv",
                code="unknown-slide",
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
        """The labels in class order; the index of a label here is its class number."""
        return tuple(self.class_counts)

    @property
    def extra_columns(self) -> tuple[str, ...]:
        """Names of the further columns, in the order in which rows have them."""
        names: dict[str, str] = {}
        for row in self.rows:
            for name, _ in row.extra:
                names.setdefault(column_key(name), name)
        return tuple(names.values())

    def has_column(self, column: str) -> bool:
        """Return whether rows have a further column of that name, however it is spelt."""
        return column_key(column) in map(column_key, self.extra_columns)

    @property
    def site_columns(self) -> tuple[str, ...]:
        """The further columns that say where a slide is from."""
        return tuple(name for name in self.extra_columns if column_key(name) in SITE_COLUMNS)

    @property
    def patients(self) -> dict[str, tuple[SlideRow, ...]]:
        """Rows of each patient, patients sorted by name."""
        owned: dict[str, list[SlideRow]] = defaultdict(list)
        for row in self.rows:
            owned[row.patient].append(row)
        return {patient: tuple(owned[patient]) for patient in sorted(owned)}

    @property
    def patient_warning(self) -> str:
        """Warning about slides without a stated patient; empty if all are stated, or there is one slide."""
        unstated = [row.slide for row in self.rows if not row.patient_stated]
        if not unstated or len(self.rows) == 1:
            return ""
        if len(unstated) == len(self.rows):
            which = "No patient column was given: each slide counts as its own patient"
        else:
            which = f"{len(unstated)} slides have no patient and count each as its own: {listing(unstated)}"
        return (
            f"{which}. Slides of one patient may be in both training and test set (data leakage), and metrics and "
            "confidence intervals may be too optimistic. Fill the column patient of cohort.csv (with the slide's own "
            "name where that is right)."
        )

    def select(self, split: str | None = None, *, labelled: bool = False) -> Cohort:
        """Return the rows of one split, or all; with `labelled` only those with a label. May be empty."""
        rows = (row for row in self.rows if split is None or row.split == split)
        return Cohort(tuple(row for row in rows if row.label is not None or not labelled))

    @property
    def common_problems(self) -> list[CohortError]:
        """Problems that prevent training although the table is consistent: no labels, one class, missing files."""
        problems: list[CohortError] = []
        if not self.classes:
            how = "Fill the column label, or give --labels"
            why = "a classifier cannot be trained without labels"
            problems.append(CohortError("no slide has a label", why, how, code="no-labels"))
        elif len(self.classes) == 1:
            what, how = f"all labels are {self.classes[0]}", "Add slides of another class, or correct the labels"
            problems.append(CohortError(what, "a classifier needs two classes", how, code="one-class"))
        return [*problems, *self.missing_problems]

    @property
    def missing_problems(self) -> list[CohortError]:
        """An error listing the missing files, if any."""
        gone = self.missing_files()
        what = f"files of {len(gone)} slides, or their annotations, do not exist: {listing(row.slide for row in gone)}"
        return [CohortError(what, how="Correct the paths, or add the files", code="missing-files")] if gone else []

    def missing_files(self) -> tuple[SlideRow, ...]:
        """Return rows whose slide or annotation does not exist. Checks the file system once per file."""
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
    """Format items for a message: the first few, and the number of the others."""
    items = list(items)
    more = f" and {len(items) - limit} more" if len(items) > limit else ""
    return ", ".join(items[:limit]) + more


def column_key(column: str) -> str:
    """Return a key that is equal for spellings of the same column: case, spaces, `-` and `.` do not matter."""
    return re.sub(r"[\s\-.]+", "_", column.strip().casefold())


def name_key(name: str) -> str:
    """Return a key that is equal for names that are the same file on some file systems (macOS ignores case)."""
    return unicodedata.normalize("NFC", name).casefold()


# ---------------------------------------------------------------------------------------------------- class order


_NEGATIVE = """
    normal healthy negative neg benign control controls ctrl false absent absence wildtype wt wild unaffected uninvolved
    unremarkable unmutated intact free background low mss stable pmmr n0 pn0 cn0 ypn0 m0 pm0 cm0 r0
    gesund negativ gutartig kontrolle unauffallig
    sain saine normale normaux negatif benin benigne temoin controle
    sano sana negativo negativa benigno benigna saudavel negativi sani benigni controllo
    gezond negatief goedaardig frisk godartad godartet zdrowy zdrowa lagodny ujemny saglikli
    норма нормальныи нормальная здоровыи здоровая отрицательныи доброкачественныи контроль
    正常 阴性 陰性 良性 健康 정상 음성
"""
_NEGATING = """
    no not non none nothing without
    kein keine nein ohne aucun aucune sans ninguno ninguna sin nao nenhum nenhuma sem nessuno nessuna senza
    geen nee zonder ingen inga nej nei utan brak nie bez yok hayir нет без 无 無 否 なし 없음
"""
NEGATIVE_WORDS = frozenset(_NEGATIVE.split())
"""Words that make a class the negative one, in lower case and without accents; MSS is microsatellite stable, pMMR
proficient mismatch repair, N0 without node metastasis, M0 without distant metastasis, R0 without residual tumour."""
NEGATIVE_ENDINGS = ("neg", "negative", "wt", "wildtype")
"""Ends of words that do so: `HER2neg`, `KRASwt`."""
REST = frozenset({"other", "others", "rest", "remaining", "remainder"})
"""Names of whatever is not the other class, which is then positive, unless that is negative: `other` with `EBV`."""
NEGATIONS = frozenset(_NEGATING.split())
"""Words that do so as the first word of a name: `no metastasis`, but not `carcinoma of no special type`."""
NEGATIVE_PREFIXES = ("non", "no", "un")
"""Prefixes that negate the other class: `nontumor` with `tumor`."""
NEGATIVE_SYMBOLS = {"0": "", "-": "", "n": "yjosp", "f": "t"}
"""Complete names that are negative, if the other name is one of these letters, or with any other name."""

Source = Literal["setting", "meaning", "order"]


@dataclass(frozen=True)
class ClassOrder:
    """Class names in the order of their indices, and for two classes how the positive one, the last, was found."""

    names: tuple[str, ...]
    source: Source

    @property
    def reason(self) -> str:
        """How the positive class of two was found, for the user."""
        negative, positive = self.names[0], self.names[-1]
        flag = f"--train.positive {negative!r} swaps them"
        if self.source == "setting":
            return "as train.positive says"
        if self.source == "meaning":
            return f"{negative!r} means negative; {flag}"
        return f"GUESSED from the order of the names; {flag}, if {positive!r} is the negative class"


def order_classes(classes: tuple[str, ...], positive: str | None) -> ClassOrder:
    """Order the classes of a cohort so that the positive one of two comes last.

    `positive` names it; without it the meaning of the names decides (`is_negative_name`), and if both or neither are
    negative the cohort's own order. More than two classes keep their order. ConfigError if `positive` is not a class.
    """
    if positive is not None:
        if positive not in classes or len(classes) != 2:
            binary = "" if len(classes) == 2 else ", and only one of two is positive"
            why = f"the classes are {listing(classes)}{binary}"
            raise ConfigError(
                f"train.positive {positive!r}",
                why,
                "Name one of two classes, or leave it out",
                code="unknown-positive-class",
            )
        return ClassOrder(tuple(sorted(classes, key=positive.__eq__)), "setting")
    if len(classes) != 2:
        return ClassOrder(classes, "order")
    first, second = (is_negative_name(name, other) for name, other in (classes, classes[::-1]))
    if first == second:
        return ClassOrder(classes, "order")
    return ClassOrder(classes if first else (classes[1], classes[0]), "meaning")


def is_negative_name(name: str, other: str = "") -> bool:
    """Return whether a class name means the negative class; `other` is the name of the other class.

    True for a name with a word of `NEGATIVE_WORDS` (`Normal`, `KRAS wild-type`, `tumor-free`) or one that ends in
    `NEGATIVE_ENDINGS` (`KRASwt`), one that begins with a word of `NEGATIONS` (`no tumour`), one that negates the other
    (`nontumor` with `tumor`, `ER-` with `ER+`, `pT0` with `pT+` or `pT2`), `REST` where the other name is not negative,
    and `NEGATIVE_SYMBOLS`. Words that both names share do not count (`low grade` and `high grade`).
    """
    plain, plain_other = _plain(name), _plain(other)
    if plain in NEGATIVE_SYMBOLS:
        return not NEGATIVE_SYMBOLS[plain] or (len(plain_other) == 1 and plain_other in NEGATIVE_SYMBOLS[plain])
    if plain.endswith("-") and plain_other == f"{plain[:-1]}+":
        return True
    if plain.endswith("0") and re.fullmatch(re.escape(plain[:-1]) + r"(\+|[1-9]\w*)", plain_other):
        return True
    if plain in REST:
        return plain_other not in REST and bool(plain_other) and not is_negative_name(other)
    words, joined = _words(name), "".join(_words(name))
    own = [word for word in words if word not in _words(other)]
    if joined in NEGATIVE_WORDS or not NEGATIVE_WORDS.isdisjoint(own) or (words and words[0] in NEGATIONS):
        return True
    if any(word.endswith(NEGATIVE_ENDINGS) for word in own):
        return True
    return bool(plain_other) and any(joined == prefix + "".join(_words(other)) for prefix in NEGATIVE_PREFIXES)


def _plain(name: str) -> str:
    """Return the name in lower case, without accents and surrounding spaces."""
    decomposed = unicodedata.normalize("NFKD", name.strip().casefold())
    kept = "".join(letter for letter in decomposed if not unicodedata.combining(letter))
    return unicodedata.normalize("NFC", kept)


def _words(name: str) -> list[str]:
    return re.findall(r"[^\W_]+", _plain(name))


# ---------------------------------------------------------------------------------------------------- rules


def make_cohort(
    rows: Sequence[SlideRow],
    source: str = "the cohort",
    *,
    where: Sequence[str] | None = None,
    warnings: Iterable[str] = (),
    problems: list[CohortError] | None = None,
) -> Cohort:
    """Check the rows against each other and return a cohort; one CohortError lists all problems.

    `source` and `where` (one entry per row: `line 7`, or a path within the folder) identify rows in errors. With
    `problems`, errors are appended to that list instead of raised.
    """
    where = where if where is not None else [row.slide for row in rows]
    if not rows:
        raise CohortError(
            f"{source}: no slides",
            "a study needs at least one",
            "Give a table with rows or a folder with slides",
            code="no-slides",
        )
    checks = (_check_names, _check_unique, _check_patients, _check_labels)
    found = [error for check in checks if (error := check(rows, source, where)) is not None]
    if problems is None:
        raise_problems(found, source)
    else:
        problems += found
    return Cohort(tuple(rows), (*warnings, *general_warnings(rows)))


def general_warnings(rows: Sequence[SlideRow]) -> tuple[str, ...]:
    """Return the warnings that any cohort with these rows has, independent of its source."""
    missing = [row.slide for row in rows if row.label is None]
    if not missing:
        return ()
    if len(missing) == len(rows) and any(row.extra for row in rows):
        columns = listing(Cohort(tuple(rows)).extra_columns)
        return (
            f"None of the {len(rows)} slides has a label; train.target names another column to predict: {columns}.",
        )
    if len(missing) == len(rows):
        return (f"None of the {len(rows)} slides has a label; a classifier cannot be trained without labels.",)
    return (f"{len(missing)} of {len(rows)} slides have no label and are not used for training: {listing(missing)}.",)


def specific_warnings(cohort: Cohort) -> tuple[str, ...]:
    """Return the cohort's warnings that come from its source."""
    general = general_warnings(cohort.rows)
    return tuple(warning for warning in cohort.warnings if warning not in general)


def check_slide_name(name: str) -> None:
    """Raise ValueError if a slide name read from a file is not a valid file name: other files are named after it."""
    if problem := _name_problem(name):
        raise ValueError(f"invalid slide name {name!r}: {problem}")


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
    """Return whether it has line breaks or other control characters, or bytes that are not UTF-8 (surrogates)."""
    return not text.isprintable() and any(unicodedata.category(character) in ("Cc", "Cs") for character in text)


def _check_names(rows: Sequence[SlideRow], source: str, where: Sequence[str]) -> CohortError | None:
    problems = [
        f"{place} ({row.slide!r}: {problem})"
        for place, row in zip(where, rows, strict=True)
        if (problem := _name_problem(row.slide))
    ]
    if problems:
        return CohortError(
            f"{source}: invalid slide names: {listing(problems)}",
            "artefacts are named after their slide",
            "Use other names in the column slide of a cohort.csv; the files themselves need not be renamed",
            code="invalid-slide-names",
        )
    return None


def _check_unique(rows: Sequence[SlideRow], source: str, where: Sequence[str]) -> CohortError | None:
    places: dict[str, list[str]] = defaultdict(list)
    for place, row in zip(where, rows, strict=True):
        places[name_key(row.slide)].append(f"{place} ({row.slide})")
    repeated = [" = ".join(group) for group in places.values() if len(group) > 1]
    if repeated:
        return CohortError(
            f"{source}: slides with the same name: {listing(repeated)}",
            "names are used as file names, and some file systems ignore case",
            "Give a cohort.csv whose column slide has a unique name for each",
            code="repeated-slides",
        )
    return None


def _check_patients(rows: Sequence[SlideRow], source: str, where: Sequence[str]) -> CohortError | None:
    torn = in_several_splits((row.patient, row.split) for row in rows if row.split is not None)
    if torn:
        places = [
            f"{place} ({row.slide}, patient {row.patient}, {row.split})"
            for place, row in zip(where, rows, strict=True)
            if row.patient in torn and row.split is not None
        ]
        what = f"{source}: patients with slides in more than one split: {listing(places)}"
        return leakage_error(what, "Put all slides of a patient into the same split")
    return None


def in_several_splits(assigned: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return the patients with more than one split, given pairs of patient and split; patient -> `test, train`."""
    splits: dict[str, set[str]] = defaultdict(set)
    for patient, split in assigned:
        splits[patient].add(split)
    return {patient: ", ".join(sorted(names)) for patient, names in splits.items() if len(names) > 1}


def leakage_error(what: str, how: str) -> CohortError:
    """Return the error for patients with slides in more than one split."""
    why = "this is data leakage: slides of one patient resemble each other, and test metrics would be too optimistic"
    return CohortError(what, why, how, code="patient-in-several-splits")


def _check_labels(rows: Sequence[SlideRow], source: str, where: Sequence[str]) -> CohortError | None:
    spellings: dict[str, set[str]] = defaultdict(set)
    for row in rows:
        if row.label is not None:
            spellings[row.label.casefold()].add(row.label)
    doubtful = {label for labels in spellings.values() if len(labels) > 1 for label in labels}
    if doubtful:
        places = [f"{place} ({row.label})" for place, row in zip(where, rows, strict=True) if row.label in doubtful]
        return CohortError(
            f"{source}: labels that differ only in case: {listing(places)}",
            "they would count as different classes",
            "Use one spelling per class",
            code="label-spellings",
        )
    return None


# ---------------------------------------------------------------------------------------------------- file


def write_cohort(path: Path, cohort: Cohort) -> None:
    """Write `cohort.csv` atomically; `read_cohort` reads the same rows back."""
    make_cohort(cohort.rows, path.name)
    folder = Path(os.path.realpath(path.parent))
    extra = cohort.extra_columns
    rows = (
        [_relative(cell, folder) if isinstance(cell, Path) else cell for cell in stated_fields(row).values()]
        + [row.value(column) for column in extra]
        for row in cohort.rows
    )
    write_csv(path, [(*COLUMNS, *extra), *rows])


def stated_fields(row: SlideRow) -> dict[str, Any]:
    """Return the known fields as a table stores them: None for unknown values, such as a patient that is not stated."""
    values = {name: getattr(row, name) for name in COLUMNS}
    return values if row.patient_stated else values | {"patient": None}


def absolute(path: Path) -> Path:
    """Return the absolute path without `..`; links are kept, except where `..` would resolve wrongly."""
    if ".." in path.parts:
        return Path(os.path.realpath(path.parent), path.name) if path.name != ".." else Path(os.path.realpath(path))
    return Path(os.path.abspath(path))


def _relative(path: Path, folder: Path) -> str:
    relative = os.path.relpath(absolute(path), folder)
    if _has_control(relative):
        raise CohortError(
            f"{path.name!r}: its path contains characters that a table cannot store",
            "they are line breaks, control characters or bytes that are not UTF-8",
            "Rename the file or its folder",
            code="invalid-path",
        )
    return f"./{relative}" if relative != relative.lstrip() else relative


def resolve_path(value: str, folder: Path) -> Path:
    """Return the absolute path of `value` in a table in `folder`, which must not contain links."""
    while value.startswith("../"):
        folder, value = folder.parent, value[3:].lstrip("/")
    return folder / value
