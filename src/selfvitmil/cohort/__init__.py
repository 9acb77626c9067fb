"""The cohort table: read it from many sources, check it, write it, and split it by patient.

`read_cohort` converts a `cohort.csv`, a folder of slides, a Camelyon16 folder, or the tables of CLAM and STAMP to one
`Cohort`; `write_cohort` stores it in a study; `merge_cohorts` adds to an existing one. `splits` divides its patients
into training, validation and test sets, or reads CLAM's split files, and derives patients from slide names if no table
states them. All that is known about a public data set is in the module of its name (`camelyon16`).

Remarks for the user are in `Cohort.warnings`; contradictions raise a `CohortError`.
"""

from __future__ import annotations

from selfvitmil.cohort.files import SLIDE_SUFFIXES
from selfvitmil.cohort.sources import MergeReport, merge_cohorts, read_cohort, with_slides
from selfvitmil.cohort.splits import (
    PatientGuess,
    Split,
    carve_validation,
    guess_patients,
    hold_out,
    k_fold,
    monte_carlo,
    read_splits,
    split_from_column,
    with_guessed_patients,
)
from selfvitmil.cohort.table import COLUMNS, Cohort, SlideRow, make_cohort, write_cohort

__all__ = [
    "COLUMNS", "SLIDE_SUFFIXES", "Cohort", "MergeReport", "PatientGuess", "SlideRow", "Split", "carve_validation",
    "guess_patients", "hold_out", "k_fold", "make_cohort", "merge_cohorts", "monte_carlo", "read_cohort", "read_splits",
    "split_from_column", "with_guessed_patients", "with_slides", "write_cohort",
]  # fmt: skip
