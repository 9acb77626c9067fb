"""Derive patients from slide names if no table states them and the names are unambiguous.

Two patterns are recognized: TCGA barcodes (`TCGA-A1-A0SB` is the patient) and `<patient>_<block>_<stain>` as in
`S21-0417_A2_HE`. The pattern must match every slide of the cohort and assign several slides to one patient, otherwise
nothing is guessed: a wrong patient is worse than a warning.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from selfvitmil.cohort.table import Cohort, SlideRow, listing, make_cohort, specific_warnings
from selfvitmil.errors import CohortError

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
    if torn := _in_several_splits(rows):
        raise CohortError(
            f"by their names ({guess.pattern}) patients have slides in more than one split: {listing(torn)}",
            "this is data leakage: slides of one patient resemble each other, and test metrics would be too optimistic",
            "Put all slides of a patient into one split, or fill the column patient where the names are misleading",
            code="patient-in-several-splits",
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


def _in_several_splits(rows: Sequence[SlideRow]) -> list[str]:
    splits: dict[str, set[str]] = {}
    for row in rows:
        if row.split is not None:
            splits.setdefault(row.patient, set()).add(row.split)
    return [f"{patient} ({', '.join(sorted(found))})" for patient, found in splits.items() if len(found) > 1]
