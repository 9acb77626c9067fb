"""The data of one target among several that are trained jointly.

Its slides are those with a value of the target, in the splits of all slides of the training (`Split.whole`). From there
on it is evaluated as if it were the only target: held-out labels, thresholds, metrics and files are its own.
"""

from __future__ import annotations

from dataclasses import replace

from selfvitmil.cohort import Cohort
from selfvitmil.cohort.table import order_classes
from selfvitmil.evaluate.dataset import Cases
from selfvitmil.outcomes import Classes
from selfvitmil.outcomes.joint import ClassTarget, Joint


def target_cases(whole: Cases, place: int, cohort: Cohort) -> Cases:
    """Return the slides with a value of the target in this place; `cohort` has the cells that were read."""
    joint = whole.outcome
    assert isinstance(joint, Joint)
    part = joint.parts[place]
    targets = {case.slide: own for case in whole.cases if (own := joint.target_of(place, case.label)) is not None}
    shared = replace(whole, whole=whole, target_place=place)
    if isinstance(part, ClassTarget):
        cases = (replace(case, label=int(targets[case.slide][0])) for case in whole.cases if case.slide in targets)
        order = order_classes(part.classes, part.positive)
        own = Classes(part.columns[0]).labels(cohort)
        return replace(shared, cases=tuple(cases), class_names=part.classes, cohort=own, order=order, outcome=None)
    cases = (replace(case, label=targets[case.slide]) for case in whole.cases if case.slide in targets)
    return replace(shared, cases=tuple(cases), cohort=part.in_strata(cohort, targets), outcome=part)
