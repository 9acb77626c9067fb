"""The table of slides: reading it from many sources, checking it, writing it, and splitting it by patient.

`read_cohort` takes a `cohort.csv`, a folder of slides, a Camelyon16 folder, or the tables of CLAM and STAMP to one
`Cohort`; `write_cohort` stores it in a study; `merge_cohorts` adds to a study that has one. The functions of `splits`
divide its patients into training, validation and test sets, or read such sets from CLAM's files; those of `patients`
find out which slides are of one patient where no table says so.
What a reader should see but what stops nobody is text in `Cohort.warnings`; contradictions are a `CohortError`.
"""

from __future__ import annotations

from selfvitmil.cohort.folder import SLIDE_SUFFIXES
from selfvitmil.cohort.patients import PatientGuess, guess_patients, with_guessed_patients
from selfvitmil.cohort.sources import read_cohort
from selfvitmil.cohort.splits import (
    Split,
    carve_validation,
    hold_out,
    k_fold,
    monte_carlo,
    read_splits,
    split_from_column,
)
from selfvitmil.cohort.table import COLUMNS, Cohort, MergeReport, SlideRow, make_cohort, merge_cohorts, write_cohort

__all__ = [
    "COLUMNS",
    "SLIDE_SUFFIXES",
    "Cohort",
    "MergeReport",
    "PatientGuess",
    "SlideRow",
    "Split",
    "carve_validation",
    "guess_patients",
    "hold_out",
    "k_fold",
    "make_cohort",
    "merge_cohorts",
    "monte_carlo",
    "read_cohort",
    "read_splits",
    "split_from_column",
    "with_guessed_patients",
    "write_cohort",
]
