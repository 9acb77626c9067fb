"""`split`: a held-out test set by patient, written to the column split of cohort.csv; and the same as a proposal.

A study without that column would be cross-validated, with an encoder per fold. Where there are patients enough, `run`
and `pretrain` propose a held-out test set instead, print it and store it, so that later commands mean the same split.
"""

from __future__ import annotations

from pathlib import Path

from selfvitmil.cohort import Cohort, hold_out, write_cohort
from selfvitmil.cohort.splits import patients_by_class, split_table
from selfvitmil.errors import CohortError, ConfigError
from selfvitmil.pipeline.pretraining import split_encoders
from selfvitmil.pipeline.study import CohortSource, Summary, open_study, study_cohort
from selfvitmil.settings import StudySettings
from selfvitmil.store.layout import StudyLayout

TEST_FRACTION = 0.3
MIN_PATIENTS = 10
"""Of the rarest class for a proposal: fewer would leave a test set of one or two of its patients."""


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
    lines += [_words(drawn, test, seed), "the column split of cohort.csv holds it; edit it there as you like"]
    if cohort.patient_warning:
        lines.append(f"warning: {cohort.patient_warning}")
    if any(StudyLayout(study).encoders_folder.glob("*/config.json")):
        lines.append(
            "note: encoders that are there may have seen slides of this test set; `run` and `compare` check it"
        )
    return Summary(tuple(lines), table=split_table(drawn))


def propose_split(
    study: Path, name: str, cohort: Cohort, settings: StudySettings
) -> tuple[Cohort, list[str], tuple[tuple[str, ...], ...]]:
    """The cohort with a proposed split where self-supervision needs one and none is given; lines and a table on it.

    The cohort stays as it is, with a line that says why, where a class has too few patients for a test set of its own.
    """
    own = settings.pretrain
    asked = own.transductive or own.per_split or settings.train.split != "auto"
    there = StudyLayout(study).encoder_config(name).exists() or bool(split_encoders(study, name))
    if asked or there or len(cohort.classes) < 2 or any(row.split for row in cohort.rows):
        return cohort, [], ()
    patients = patients_by_class(cohort)
    few = [f"{label} ({number})" for label, number in patients.items() if number < MIN_PATIENTS]
    if few:
        line = (
            f"note: there is no column split, and fewer than {MIN_PATIENTS} patients of {', '.join(few)}: too few for "
            "a held-out test set, so all are tested on in turn (k-fold). `selfvitmil split STUDY` holds some out anyway"
        )
        return cohort, [line], ()
    try:
        drawn = hold_out(cohort, test=TEST_FRACTION, seed=settings.train.seed)
    except CohortError:  # what is wrong with the labels is said where splits are made
        return cohort, [], ()
    how = (
        "the column split of cohort.csv holds it once `run` has begun. Change it there or with `selfvitmil split STUDY "
        "--overwrite --test 0.2 --seed 1`; --train.split k-fold cross-validates instead, with an encoder per fold"
    )
    words = f"no column split was given, so one is proposed: {_words(drawn, TEST_FRACTION, settings.train.seed)}"
    return drawn, [words, how], split_table(drawn)


def _words(cohort: Cohort, test: float, seed: int) -> str:
    number = {name: len({row.patient for row in cohort.select(split=name).rows}) for name in ("train", "test")}
    return (
        f"test set: {number['test']} of {sum(number.values())} patients ({test:.0%}), drawn by patient and stratified "
        f"by label, seed {seed}; {number['train']} patients to train on"
    )
