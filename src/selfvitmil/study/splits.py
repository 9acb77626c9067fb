"""A held-out test set by patient, proposed where self-supervision needs one and none is given."""

from __future__ import annotations

from pathlib import Path

from selfvitmil.cohort import Cohort, hold_out
from selfvitmil.cohort.splits import patients_by_class, split_table
from selfvitmil.errors import CohortError
from selfvitmil.settings import StudySettings
from selfvitmil.store.layout import StudyLayout
from selfvitmil.study.encoders import split_encoders

TEST_FRACTION = 0.3


MIN_PATIENTS = 10
"""Of the rarest class for a proposal: fewer would leave a test set of one or two of its patients."""


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
    words = (
        f"no column split was given, so one is proposed: {describe_split(drawn, TEST_FRACTION, settings.train.seed)}"
    )
    return drawn, [words, how], split_table(drawn)


def describe_split(cohort: Cohort, test: float, seed: int) -> str:
    number = {name: len({row.patient for row in cohort.select(split=name).rows}) for name in ("train", "test")}
    return (
        f"test set: {number['test']} of {sum(number.values())} patients ({test:.0%}), drawn by patient and stratified "
        f"by label, seed {seed}; {number['train']} patients to train on"
    )
