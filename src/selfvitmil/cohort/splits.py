"""Split a cohort into training, validation and test sets: by patient, stratified by label, seeded.

A patient's slides stay together, because they resemble each other. For stratification a patient has the rarest label
among its slides (rarest in the whole cohort, by slides; of equally rare ones the last in class order), so one tumour
slide among normal ones makes a tumour patient as long as tumours are the rarer class. Every set gets at least one
patient of every class, and as close to its fraction as whole patients allow. Slides without a label are not split
(`Cohort.unlabelled`). The result depends on names, labels and the seed, not on the order of rows.

`val` is always the fraction of the remaining training patients that is set aside, 0 for none.
Existing splits are read in CLAM's formats: `splits_<k>.csv` (three ragged columns of slide names), or
`splits_<k>_bool.csv`, and in Patho-Bench's: one table with columns `fold_<k>` that hold train, val or test.

If no table states the patients, they are derived from the slide names where these are unambiguous (`guess_patients`).
Two patterns are recognized: TCGA barcodes (`TCGA-A1-A0SB` is the patient) and `<patient>_<block>_<stain>` as in
`S21-0417_A2_HE`. The pattern must match every slide of the cohort and assign several slides to one patient, otherwise
nothing is guessed: a wrong patient is worse than a warning.
"""

from __future__ import annotations

import difflib
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from selfvitmil.cohort.files import read_sheet
from selfvitmil.cohort.table import Cohort, in_several_splits, leakage_error, listing, make_cohort, specific_warnings
from selfvitmil.errors import CohortError, ConfigError

SIDES = ("train", "val", "test")
FINAL_FIT = "all"
"""Name of the split of all labelled slides, without a test set."""


@dataclass(frozen=True)
class Split:
    """Slide names of the training, validation and test sets, each sorted."""

    name: str
    """For instance `fold0`; names the folder of models trained on it."""
    train: tuple[str, ...]
    val: tuple[str, ...]
    test: tuple[str, ...]
    whole: Split | None = None
    """The split of all slides that a joint training learns from, of which this has those with one target's value."""


# ---------------------------------------------------------------------------------------------------- creating


def monte_carlo(
    cohort: Cohort, repeats: int, *, test: float = 0.2, val: float = 0.0, seed: int = 0
) -> tuple[Split, ...]:
    """Return `repeats` independent hold-out splits. Their test sets overlap: this is not a cross-validation."""
    _check_count("repeats", repeats, 1)
    seed = _checked_seed(seed)
    return tuple(_hold_out(cohort, f"repeat{r}", test, val, (seed, r)) for r in range(repeats))


def k_fold(cohort: Cohort, k: int, *, val: float = 0.0, seed: int = 0) -> tuple[Split, ...]:
    """Return `k` splits whose test sets partition the labelled slides."""
    _check_count("k", k, 2)
    seed = _checked_seed(seed)
    by_class = _patients_by_class(cohort)
    _check_classes(by_class, "the cohort")
    small = [f"{label} ({len(patients)})" for label, patients in by_class.items() if len(patients) < k]
    if small:
        raise CohortError(
            f"{k} folds, but fewer patients of the classes {listing(small)}",
            "every fold needs a patient of every class",
            "Use fewer folds, or add patients",
            code="too-few-patients",
        )
    generator = np.random.default_rng([seed, 0])
    # Dealt out like cards, one class after the other: folds differ by at most one patient, per class and in total.
    dealt = [patient for patients in by_class.values() for patient in _shuffled(patients, generator)]
    folds = [_split_of(cohort, f"fold{fold}", set(dealt[fold::k])) for fold in range(k)]
    return tuple(_carved(cohort, split, val, (seed, fold)) for fold, split in enumerate(folds))


def hold_out(cohort: Cohort, *, test: float = 0.3, seed: int = 0) -> Cohort:
    """Return the cohort with a newly drawn split column: the fraction `test` of the patients of every class is tested.

    All other slides are for training. Slides without a label follow their patient, else go to training, where they are
    used for self-supervision only. Slides with another value in the column (`external`, `unused`) are left out.
    """
    out = {row.slide for row in cohort.rows if row.split and row.split not in SIDES}
    inside = Cohort(tuple(row for row in cohort.rows if row.slide not in out), cohort.warnings)
    drawn = set(_hold_out(inside, "", test, 0.0, (_checked_seed(seed),)).test)
    patients = {cohort[slide].patient for slide in drawn}
    rows = [
        row if row.slide in out else replace(row, split="test" if row.patient in patients else "train")
        for row in cohort.rows
    ]
    return Cohort(tuple(rows), cohort.warnings)


def patients_by_class(cohort: Cohort) -> dict[str, int]:
    """Return the number of patients per class, in class order; a patient with several classes counts as the rarest."""
    return {label: len(patients) for label, patients in _patients_by_class(cohort).items()}


def split_table(cohort: Cohort) -> tuple[tuple[str, ...], ...]:
    """Return slides and patients of every class and split, header first; a patient may be in several classes."""
    names = [name for name in SIDES if cohort.select(split=name).rows]
    names += sorted({row.split for row in cohort.rows if row.split} - set(names))
    rows: list[tuple[str, ...]] = []
    for label in (*cohort.classes, None):
        own = [row for row in cohort.rows if row.label == label]
        parts = [[row for row in own if row.split == name] for name in names]
        cells = [f"{len(part)} slides of {len({row.patient for row in part})} patients" for part in parts]
        if own:
            rows.append((label or "no label", *cells))
    return (("class", *names), *rows)


def split_from_column(cohort: Cohort, *, val: float = 0.0, seed: int = 0) -> Split:
    """Return the split of the cohort's own column; `val` is taken from train only if the column has no val.

    Slides with another value in the column (`external`, `unused`) are in none of the three; a value that looks like a
    misspelt train, val or test, and an empty one, are errors.
    """
    rows = [row for row in cohort.rows if row.label is not None]
    odd = [row for row in rows if row.split is None or _misspelt(row.split)]
    if odd:
        places = listing(f"{row.slide} ({row.split or 'empty'})" for row in odd)
        raise CohortError(
            f"cohort.csv: labelled slides without a usable split: {places}",
            "the others have one, so these would be left out by accident",
            "Fill the column split with train, val or test, or with unused",
            code="missing-split",
        )
    train, held, test = (tuple(sorted(row.slide for row in rows if row.split == side)) for side in SIDES)
    for side, slides in (("train", train), ("test", test)):
        if not slides:
            raise CohortError(
                f"cohort.csv: no labelled slide has the split {side}",
                "there would be nothing to " + ("train on" if side == "train" else "evaluate"),
                "Fill the column split, or let the split be drawn",
                code="empty-split",
            )
    split = Split("given", train, held, test)
    _check_classes(_patients_by_class(cohort, train), "the training set")
    return carve_validation(cohort, split, val, seed=seed) if not held else split


def all_labelled(cohort: Cohort, *, val: float, seed: int = 0) -> Split:
    """Return the split of a final fit: all labelled slides, the fraction `val` of their patients for validation.

    There is no test set. Slides with another value in the column `split` than train, val or test (`external`, `unused`)
    are left out.
    """
    rows = [row for row in cohort.rows if row.label is not None and (not row.split or row.split in SIDES)]
    split = Split(FINAL_FIT, tuple(sorted(row.slide for row in rows)), (), ())
    _check_classes(_patients_by_class(cohort, split.train), "the cohort")
    return carve_validation(cohort, split, val, seed=seed)


def carve_validation(cohort: Cohort, split: Split, val: float, *, seed: int = 0) -> Split:
    """Return the split with the fraction `val` of its training patients moved to validation."""
    return _carved(cohort, split, val, (_checked_seed(seed),))


def _hold_out(cohort: Cohort, name: str, test: float, val: float, entropy: tuple[int, ...]) -> Split:
    by_class = _patients_by_class(cohort)
    _check_classes(by_class, "the cohort")
    if not 0 < test < 1:
        raise ConfigError(
            f"test = {test}",
            "the test set is a fraction of the patients",
            "Give a number between 0 and 1",
            code="invalid-fraction",
        )
    drawn = _draw(by_class, test, np.random.default_rng([*entropy, 0]), "test")
    return _carved(cohort, _split_of(cohort, name, drawn), val, entropy)


def _split_of(cohort: Cohort, name: str, test_patients: set[str]) -> Split:
    labelled = [row for row in cohort.rows if row.label is not None]
    train = sorted(row.slide for row in labelled if row.patient not in test_patients)
    test = sorted(row.slide for row in labelled if row.patient in test_patients)
    return Split(name, tuple(train), (), tuple(test))


def _carved(cohort: Cohort, split: Split, val: float, entropy: tuple[int, ...]) -> Split:
    if not 0 <= val < 1:
        raise ConfigError(
            f"val = {val}",
            "the validation set is a fraction of the training patients",
            "Give a number from 0 to below 1",
            code="invalid-fraction",
        )
    if val == 0:
        return split
    by_class = _patients_by_class(cohort, split.train)
    drawn = _draw(by_class, val, np.random.default_rng([*entropy, 1]), "validation")
    held = [slide for slide in split.train if cohort[slide].patient in drawn]
    train = tuple(slide for slide in split.train if cohort[slide].patient not in drawn)
    return replace(split, train=train, val=tuple(sorted((*split.val, *held))))


def _patients_by_class(cohort: Cohort, slides: Iterable[str] | None = None) -> dict[str, list[str]]:
    """Return sorted patients of each class, in class order; of the given slides, or of all labelled ones."""
    by_class: dict[str, list[str]] = {label: [] for label in cohort.class_counts}
    for patient, label in rarest_class(cohort, slides).items():
        by_class[label].append(patient)
    return {label: patients for label, patients in by_class.items() if patients}


def rarest_class(cohort: Cohort, slides: Iterable[str] | None = None) -> dict[str, str]:
    """Return sorted patient -> rarest of the labels of the given slides, or of all; rarity is that in the cohort."""
    rarity = {label: (count, -place) for place, (label, count) in enumerate(cohort.class_counts.items())}
    rows = cohort.rows if slides is None else [cohort[slide] for slide in slides]
    labels: dict[str, set[str]] = defaultdict(set)
    for row in rows:
        if row.label is not None:
            labels[row.patient].add(row.label)
    return {patient: min(labels[patient], key=lambda label: rarity[label]) for patient in sorted(labels)}


def _draw(by_class: dict[str, list[str]], fraction: float, generator: np.random.Generator, side: str) -> set[str]:
    """Draw patients for one set: the nearest whole number to the fraction of all, distributed over classes by size."""
    patients = sum(map(len, by_class.values()))
    total = math.floor(fraction * patients + 0.5)
    if not 0 < total < patients:
        left = "an empty set" if total == 0 else "no training patients"
        raise CohortError(
            f"{fraction:g} of {patients} patients for {side} leaves {left}",
            "both sets need patients",
            "Choose another fraction",
            code="empty-split",
        )
    single = [label for label, members in by_class.items() if len(members) < 2]
    if single:
        raise CohortError(
            f"only one patient of the classes {listing(single)} for {side} and training",
            "both sets need a patient of every class",
            "Add patients, merge the class with another, or leave it out",
            code="too-few-patients",
        )
    quotas = {label: math.floor(fraction * len(members)) for label, members in by_class.items()}
    by_remainder = sorted(by_class, key=lambda label: quotas[label] - fraction * len(by_class[label]))
    for label in by_remainder[: max(0, total - sum(quotas.values()))]:
        quotas[label] += 1
    drawn: set[str] = set()
    for label, members in by_class.items():
        quota = min(max(quotas[label], 1), len(members) - 1)
        drawn.update(_shuffled(members, generator)[:quota])
    return drawn


def _shuffled(patients: list[str], generator: np.random.Generator) -> list[str]:
    return [patients[i] for i in generator.permutation(len(patients))]


def _misspelt(split: str) -> bool:
    return split not in SIDES and bool(difflib.get_close_matches(split, SIDES, n=1, cutoff=0.7))


def _check_classes(by_class: dict[str, list[str]], whole: str) -> None:
    if len(by_class) < 2:
        raise CohortError(
            f"{whole} has {f'one class only ({next(iter(by_class))})' if by_class else 'no labelled slide'}",
            "a classifier needs two",
            "Add slides of another class, or correct the labels",
            code="one-class",
        )


def _check_count(name: str, value: int, least: int) -> None:
    if value < least:
        raise ConfigError(
            f"{name} = {value}", f"at least {least} is needed", f"Give a larger {name}", code="value-too-small"
        )


def _checked_seed(seed: int) -> int:
    _check_count("seed", seed, 0)
    return seed


# ---------------------------------------------------------------------------------------------------- files


def read_splits(folder: Path, cohort: Cohort) -> tuple[Split, ...]:
    """Read the splits of a folder in the order of their numbers, named `fold<k>`; checked against the cohort.

    `splits_<k>.csv` takes precedence over `splits_<k>_bool.csv`, and both over a table `k=all.tsv`.
    """
    files: dict[int, Path] = {}
    for path in sorted(folder.glob("splits_*.csv"), reverse=True):  # ".csv" sorts below "_bool.csv", and so wins
        if match := re.fullmatch(r"splits_(\d+)(_bool)?\.csv", path.name):
            files[int(match[1])] = path
    table = next(iter(sorted(folder.glob("k=*.tsv"))), None)
    if not files and table is not None:
        return _read_fold_columns(table, cohort)
    if not files:
        raise CohortError(
            f"{folder.name}: no splits in this folder",
            "splits are files named splits_0.csv, splits_1.csv and so on, or one named k=all.tsv",
            "Give the folder that contains them",
            code="no-split-files",
        )
    splits = [_read_split(files[k], k) for k in sorted(files)]
    for k, split in zip(sorted(files), splits, strict=True):
        check_split(split, cohort, files[k].name)
    return tuple(splits)


def _read_fold_columns(path: Path, cohort: Cohort) -> tuple[Split, ...]:
    """Read Patho-Bench's table: a row per slide, a column `fold_<k>` per split; empty cells are in no set."""
    sheet = read_sheet(path)
    slides = sheet.cells(sheet.find("slide"))
    folds = [name for name in sheet.columns if re.fullmatch(r"fold_\d+", name)]
    if not folds or not any(slides):
        raise CohortError(
            f"{path.name}: no splits in this table",
            "it needs a column slide_id, and fold_0, fold_1 and so on",
            "Give Patho-Bench's table of the task",
            code="no-split-files",
        )
    splits: list[Split] = []
    for name in folds:
        sides: dict[str, list[str]] = {side: [] for side in SIDES}
        for slide, cell in zip(slides, sheet.cells(sheet.named(name)), strict=True):
            if cell and cell.casefold() not in sides:
                raise CohortError(
                    f"{path.name}: {name} of {slide} is {cell!r}",
                    f"a set is one of {', '.join(SIDES)}",
                    "Correct the file",
                    code="invalid-split-file",
                )
            if cell:
                sides[cell.casefold()].append(slide)
        train, val, test = (tuple(sides[side]) for side in SIDES)
        splits.append(Split(name.replace("_", ""), train, val, test))
        check_split(splits[-1], cohort, f"{path.name}, {name}")
    return tuple(splits)


def _read_split(path: Path, k: int) -> Split:
    sheet = read_sheet(path)
    columns = [[row[index] for row in sheet.rows] for index in map(sheet.named, SIDES)]
    if path.stem.endswith("_bool"):
        names = [row[0] for row in sheet.rows]
        sides = [tuple(n for n, cell in zip(names, column, strict=True) if _true(cell, path)) for column in columns]
    else:
        sides = [tuple(filter(None, column)) for column in columns]
    train, val, test = sides
    return Split(f"fold{k}", train, val, test)


def _true(cell: str, path: Path) -> bool:
    if cell.casefold() not in ("true", "false"):
        raise CohortError(
            f"{path.name}: {cell!r} is neither True nor False", how="Correct the file", code="invalid-split-file"
        )
    return cell.casefold() == "true"


def check_split(split: Split, cohort: Cohort, source: str) -> None:
    """Raise CohortError for unknown, unlabelled or repeated slides, and for patients in several sets."""
    everything = [*split.train, *split.val, *split.test]
    unknown = [slide for slide in everything if slide not in cohort]
    if unknown:
        raise CohortError(
            f"{source}: slides that are not in the cohort: {listing(unknown)}",
            "the split was made for another cohort",
            "Give the splits of this cohort, or correct the names",
            code="unknown-slides",
        )
    twice = [slide for slide, count in Counter(everything).items() if count > 1]
    if twice:
        raise CohortError(
            f"{source}: slides that occur twice: {listing(twice)}", how="Keep each slide once", code="repeated-slides"
        )
    bare = [slide for slide in everything if cohort[slide].label is None]
    if bare:
        raise CohortError(
            f"{source}: slides without a label: {listing(bare)}",
            "they can be neither trained on nor evaluated",
            "Label them",
            code="unlabelled-slides",
        )
    torn = in_several_splits((cohort[slide].patient, side) for side in SIDES for slide in getattr(split, side))
    if torn:
        patients = listing(f"{patient} ({names})" for patient, names in torn.items())
        raise leakage_error(f"{source}: patients in more than one set: {patients}", "Split by patient")


# ---------------------------------------------------------------------------------------------------- patients by name


_TCGA = re.compile(r"(TCGA-[A-Z0-9]{2}-[A-Z0-9]{4})(?![A-Z0-9])", re.IGNORECASE)
# A block has a letter and a number: a plain number may also be a case (`S21_34_HE`: case 34 of the year 2021).
_BLOCK = r"(?:[A-Z]\d{1,2}|\d{1,2}[A-Z])"
_STAIN = r"(?:H&E|H-E|HES?|PAS|IHC|HER2|ER|PR|KI-?67|P53|PD-?L1|CD\d{1,3}|CK\d{1,2}|MASSON|TRICHROME|RETICULIN|GIEMSA)"
_BLOCK_STAIN = re.compile(rf"(.+?)([_-]){_BLOCK}\2{_STAIN}(?:\2\d{{1,2}})?", re.IGNORECASE)
MOST_SLIDES_SHARE = 0.25
"""Maximum fraction of the slides that one guessed patient may have; a more common prefix has another meaning."""


@dataclass(frozen=True)
class PatientGuess:
    """Patients derived from the slide names."""

    pattern: str
    """Description for the user."""
    patients: tuple[str, ...]
    """One per slide, in the cohort's order."""

    def __str__(self) -> str:
        slides = Counter(self.patients)
        largest, number = slides.most_common(1)[0]
        return (
            f"patients are guessed from slide names ({self.pattern}): {len(slides)} patients of {len(self.patients)} "
            f"slides, for instance {largest} with {number}. The column patient of cohort.csv holds the guess: correct "
            "it there, with the slide's own name for a slide whose patient has no other slide"
        )


def guess_patients(slides: Sequence[str]) -> PatientGuess | None:
    """Return the patients of all slides by their names, or None if the names are ambiguous."""
    patterns: tuple[tuple[str, Callable[[str], str | None], Callable[[Sequence[str]], bool]], ...] = (
        ("TCGA barcodes", _of_barcode, lambda _: True),
        ("<patient>_<block>_<stain>", _of_block, _plausible),
    )
    for words, patient_of, plausible in patterns:
        found = [patient_of(slide) for slide in slides]
        patients = [patient for patient in found if patient is not None]
        if len(patients) == len(slides) and len(set(patients)) < len(slides) and plausible(patients):
            return PatientGuess(words, tuple(patients))
    return None


def with_guessed_patients(cohort: Cohort) -> tuple[Cohort, PatientGuess | None]:
    """Return the cohort with guessed patients for slides without a stated one, and the guess, if there is one.

    If some patients are stated, as after slides were added to a cohort, the names must agree with them. CohortError if
    slides of a guessed patient are in different splits.
    """
    if all(row.patient_stated for row in cohort.rows):
        return cohort, None
    guess = guess_patients(cohort.slides)
    if guess is None or any(
        row.patient_stated and row.patient != patient for row, patient in zip(cohort.rows, guess.patients, strict=True)
    ):
        return cohort, None
    rows = [replace(row, patient=patient) for row, patient in zip(cohort.rows, guess.patients, strict=True)]
    if torn := in_several_splits((row.patient, row.split) for row in rows if row.split is not None):
        patients = listing(f"{patient} ({names})" for patient, names in torn.items())
        raise leakage_error(
            f"by their names ({guess.pattern}) patients have slides in more than one split: {patients}",
            "Put all slides of a patient into one split, or fill the column patient where the names are misleading",
        )
    return make_cohort(rows, "the cohort", warnings=specific_warnings(cohort)), guess


def _of_barcode(slide: str) -> str | None:
    found = _TCGA.match(slide)
    return found[1].upper() if found else None


def _of_block(slide: str) -> str | None:
    found = _BLOCK_STAIN.fullmatch(slide)
    return found[1] if found else None


def _plausible(patients: Sequence[str]) -> bool:
    """Return whether these can be patient names: each with a digit, none a bare year, none with most of the slides."""
    if any(re.search(r"\d", patient) is None or re.fullmatch(r"(19|20)\d\d", patient) for patient in patients):
        return False
    return max(Counter(patients).values()) <= max(2, MOST_SLIDES_SHARE * len(patients))
