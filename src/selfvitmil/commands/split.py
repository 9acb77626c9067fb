"""`split`: a held-out test set by patient, written to the column split of cohort.csv; and the same as a proposal.

A study without that column would be cross-validated, with an encoder per fold. Where there are patients enough, `run`
and `pretrain` propose a held-out test set instead, print it and store it, so that later commands mean the same split.
"""

from __future__ import annotations

from selfvitmil.cohort import hold_out
from selfvitmil.cohort.splits import split_table
from selfvitmil.errors import ConfigError
from selfvitmil.stages.pretrain import TEST_FRACTION, SplitResult, describe_split
from selfvitmil.study import Study


def split(study: Study, test: float = TEST_FRACTION, seed: int = 0, *, overwrite: bool = False) -> SplitResult:
    """Draw a test set by patient, stratified by label, and write it to the column split of the study's cohort.csv."""
    with study.lock("split"):
        cohort = study.store_cohort()
        if any(row.split for row in cohort.rows) and not overwrite:
            raise ConfigError(
                f"{study.name}: cohort.csv has a column split already",
                "it is not replaced unasked",
                "Add --overwrite to draw another one, or edit the column",
                code="split-exists",
            )
        study.change_cohort(hold_out(cohort, test=test, seed=seed))
        drawn = study.store_cohort()
    notes = [*study.cohort_notes, describe_split(drawn, test, seed)]
    notes.append("the column split of cohort.csv holds it; edit it there as you like")
    if cohort.patient_warning:
        notes.append(f"warning: {cohort.patient_warning}")
    if any(study.layout.encoders_folder.glob("*/config.json")):
        notes.append(
            "note: encoders that are there may have seen slides of this test set; `run` and `compare` check it"
        )
    return SplitResult(split_table(drawn), notes=tuple(notes))
