"""`split`: a held-out test set by patient, written to the column split of cohort.csv; and the same as a proposal.

A study without that column would be cross-validated, with an encoder per fold. Where there are patients enough, `run`
and `pretrain` propose a held-out test set instead, print it and store it, so that later commands mean the same split.
"""

from __future__ import annotations

from pathlib import Path

from selfvitmil.cohort import hold_out, write_cohort
from selfvitmil.cohort.splits import split_table
from selfvitmil.errors import ConfigError
from selfvitmil.store.layout import StudyLayout
from selfvitmil.study.folder import CohortSource, Summary, open_study, study_cohort
from selfvitmil.study.splits import TEST_FRACTION, describe_split


def split(
    study: Path, source: CohortSource, test: float = TEST_FRACTION, seed: int = 0, *, overwrite: bool = False
) -> Summary:
    """Draw a test set by patient, stratified by label, and write it to the column split of the study's cohort.csv."""
    with open_study(study, "split"):
        cohort, lines = study_cohort(study, source)
        if any(row.split for row in cohort.rows) and not overwrite:
            raise ConfigError(
                f"{study.name}: cohort.csv has a column split already",
                "it is not replaced unasked",
                "Add --overwrite to draw another one, or edit the column",
            )
        drawn = hold_out(cohort, test=test, seed=seed)
        write_cohort(StudyLayout(study).cohort, drawn)
    lines += [describe_split(drawn, test, seed), "the column split of cohort.csv holds it; edit it there as you like"]
    if cohort.patient_warning:
        lines.append(f"warning: {cohort.patient_warning}")
    if any(StudyLayout(study).encoders_folder.glob("*/config.json")):
        lines.append(
            "note: encoders that are there may have seen slides of this test set; `run` and `compare` check it"
        )
    return Summary(tuple(lines), table=split_table(drawn))
