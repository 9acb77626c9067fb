"""`plan --power`: how wide the confidence intervals of an evaluation will be, from the labels of the cohort alone.

Only counts of patients per class and test set enter, no prediction: nothing is trained and nothing is written.
"""

from __future__ import annotations

from dataclasses import dataclass

from selfvitmil.cohort import Cohort
from selfvitmil.errors import ConfigError
from selfvitmil.metrics import Interval
from selfvitmil.metrics.power import (
    TestSet,
    expected_auc_interval,
    expected_share_interval,
    patients_for_auc,
    patients_for_share,
)
from selfvitmil.stages.base import StageResult
from selfvitmil.study import Study

AUCS = (0.7, 0.8, 0.9, 0.95)
"""True values that intervals are shown for: nobody knows the own one before the study."""
SHARE = 0.9
"""True sensitivity and specificity."""
MULTIPLES = (1, 2, 4, 10)


@dataclass(frozen=True)
class PowerRow:
    """Expected intervals with a multiple of the study's test patients."""

    multiple: int
    num_positive: int
    num_negative: int
    aucs: tuple[Interval, ...]
    """For each of `AUCS`."""
    sensitivity: Interval
    specificity: Interval


@dataclass(frozen=True)
class ClassPower:
    """One class against all others."""

    positive: str
    rows: tuple[PowerRow, ...]
    needed: tuple[tuple[int, int], ...]
    """Positive and negative test patients for the width, for each of `AUCS`."""
    needed_share: int
    """Patients of a class for a sensitivity (or specificity) of `SHARE` with the width."""


@dataclass(frozen=True)
class PowerResult(StageResult):
    """What an evaluation of this cohort can show."""

    classes: tuple[ClassPower, ...]
    """The positive class of two, or each of several against the rest."""
    num_sets: int
    """Test sets: 1, or folds whose AUC is averaged."""
    width: float
    """Of the intervals that patients are counted for."""
    confidence: float


def power(study: Study, width: float = 0.1) -> PowerResult:
    """Return the intervals to expect on the test patients of the study's splits. Raises as training would."""
    from selfvitmil.outcomes import need_classes
    from selfvitmil.stages.check import check_labels

    if not 0 < width < 1:
        raise ConfigError(
            f"--width {width:g}", "the width of an interval is between 0 and 1", "Pass 0.1", code="invalid-width"
        )
    settings, cohort = study.settings, study.cohort
    trial, level = check_labels(cohort, settings), settings.evaluate.confidence
    tests = [tuple(case.slide for case in split.test) for split in trial.splits]
    need_classes(trial.outcome, "plan --power", "it knows intervals of AUC, sensitivity and specificity")
    overlap = len({slide for test in tests for slide in test}) < sum(map(len, tests))
    if overlap:  # repeats of one experiment: more of them are no more patients
        tests = tests[:1]
    names = trial.class_names[1:] if trial.num_classes == 1 else trial.class_names
    classes: list[ClassPower] = []
    notes = ["note: test sets overlap; counted is the first of them"] if overlap else []
    for name in names:
        found = [_patients(cohort, test, name) for test in tests]
        sets = [TestSet(*each) for each in found if min(each)]
        if not sets:
            notes.append(f"note: no test set has patients of {name} and of another class")
            continue
        classes.append(_class_power(name, sets, width, level))
    return PowerResult(tuple(classes), len(tests), width, level, notes=tuple(notes))


def _patients(cohort: Cohort, slides: tuple[str, ...], positive: str) -> tuple[int, int]:
    """Return positive and other patients; a patient is positive if one slide is."""
    everyone = {cohort[slide].patient for slide in slides}
    own = {cohort[slide].patient for slide in slides if cohort[slide].label == positive}
    return len(own), len(everyone - own)


def _class_power(name: str, sets: list[TestSet], width: float, level: float) -> ClassPower:
    rows: list[PowerRow] = []
    for multiple in MULTIPLES:
        larger = [each.times(multiple) for each in sets]
        num_positive, num_negative = (
            sum(getattr(each, key) for each in larger) for key in ("num_positive", "num_negative")
        )
        aucs = tuple(expected_auc_interval(auc, larger, level) for auc in AUCS)
        shares = (expected_share_interval(SHARE, num, level) for num in (num_positive, num_negative))
        rows.append(PowerRow(multiple, num_positive, num_negative, aucs, *shares))
    prevalence = rows[0].num_positive / (rows[0].num_positive + rows[0].num_negative)
    needed = tuple(patients_for_auc(auc, width, prevalence, level) for auc in AUCS)
    return ClassPower(name, tuple(rows), needed, patients_for_share(SHARE, width, level))
