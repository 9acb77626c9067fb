"""Patients from slide names, where no table names them and the names leave no doubt.

Two patterns are known: TCGA barcodes (`TCGA-A1-A0SB` is the patient) and `<patient>_<block>_<stain>` as in
`S21-0417_A2_HE`. A guess must hold for every slide of the cohort and put several slides with one patient, else there is
none: a wrong patient is worse than a warning.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from selfvitmil.cohort.table import Cohort, SlideRow, listing, make_cohort, specific_warnings
from selfvitmil.errors import CohortError

_TCGA = re.compile(r"(TCGA-[A-Z0-9]{2}-[A-Z0-9]{4})(?![A-Z0-9])", re.IGNORECASE)
# A block has a letter and a number: a plain number may as well be a case (`S21_34_HE`: case 34 of the year 2021).
_BLOCK = r"(?:[A-Z]\d{1,2}|\d{1,2}[A-Z])"
_STAIN = r"(?:H&E|H-E|HES?|PAS|IHC|HER2|ER|PR|KI-?67|P53|PD-?L1|CD\d{1,3}|CK\d{1,2}|MASSON|TRICHROME|RETICULIN|GIEMSA)"
_BLOCK_STAIN = re.compile(rf"(.+?)([_-]){_BLOCK}\2{_STAIN}(?:\2\d{{1,2}})?", re.IGNORECASE)
MOST_SLIDES_SHARE = 0.25
"""Of the cohort's slides that one guessed patient may have; a prefix that more of them share names something else."""


@dataclass(frozen=True)
class PatientGuess:
    """What the slide names say of patients."""

    pattern: str
    """In words."""
    patients: tuple[str, ...]
    """One for each slide, in the cohort's order."""

    def __str__(self) -> str:
        slides = Counter(self.patients)
        largest, number = slides.most_common(1)[0]
        return (
            f"patients are guessed from slide names ({self.pattern}): {len(slides)} patients of {len(self.patients)} "
            f"slides, for instance {largest} with {number}. The column patient of cohort.csv holds the guess: correct "
            "it there, with the slide's own name where a slide has a patient of its own"
        )


def guess_patients(slides: Sequence[str]) -> PatientGuess | None:
    """The patients of all slides by their names, or None where the names do not tell for sure."""
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
    """The cohort with guessed patients for slides that have no stated one, where the names tell; and the guess.

    Where some patients are stated, as after slides were added to a cohort, the names must tell these too. CohortError
    where slides of a guessed patient are in different splits.
    """
    if all(row.patient_stated for row in cohort.rows):
        return cohort, None
    guess = guess_patients(cohort.slides)
    if guess is None or any(
        row.patient_stated and row.patient != patient for row, patient in zip(cohort.rows, guess.patients, strict=True)
    ):
        return cohort, None
    rows = [replace(row, patient=patient) for row, patient in zip(cohort.rows, guess.patients, strict=True)]
    if torn := _in_several_splits(rows):
        raise CohortError(
            f"by their names ({guess.pattern}) patients have slides in more than one split: {listing(torn)}",
            "slides of one patient resemble each other, and metrics on the test set would be too good",
            "Put all slides of a patient into one split, or fill the column patient where the names mislead",
        )
    return make_cohort(rows, "the cohort", warnings=specific_warnings(cohort)), guess


def _of_barcode(slide: str) -> str | None:
    found = _TCGA.match(slide)
    return found[1].upper() if found else None


def _of_block(slide: str) -> str | None:
    found = _BLOCK_STAIN.fullmatch(slide)
    return found[1] if found else None


def _plausible(patients: Sequence[str]) -> bool:
    """Whether these can be names of patients: each with a digit, none a bare year, none with most of the slides."""
    if any(re.search(r"\d", patient) is None or re.fullmatch(r"(19|20)\d\d", patient) for patient in patients):
        return False
    return max(Counter(patients).values()) <= max(2, MOST_SLIDES_SHARE * len(patients))


def _in_several_splits(rows: Sequence[SlideRow]) -> list[str]:
    splits: dict[str, set[str]] = {}
    for row in rows:
        if row.split is not None:
            splits.setdefault(row.patient, set()).add(row.split)
    return [f"{patient} ({', '.join(sorted(found))})" for patient, found in splits.items() if len(found) > 1]
