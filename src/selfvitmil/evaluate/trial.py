"""A trial: the cases of a cohort, parted into training, validation and test by every split, test labels under seal.

`make_splits` finds the splits that the settings ask for, `seal` makes the trial. From then on the label of a test
slide can only be had from `Trial.labels`, and not before these are opened (`guard.py`).

Where the encoder was trained on slides of test patients, though without labels, the trial is transductive: a warning
and `Trial.transductive` say so, and all results carry it on.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from selfvitmil.bags import Bag
from selfvitmil.cohort import Cohort, Split, carve_validation, k_fold, monte_carlo, read_splits, split_from_column
from selfvitmil.cohort.splits import check_split
from selfvitmil.cohort.table import listing
from selfvitmil.errors import CohortError, ConfigError
from selfvitmil.evaluate.cases import BagFile, Case, Cases
from selfvitmil.evaluate.choices import Where, check_choices
from selfvitmil.evaluate.guard import OPTIMISTIC, SealedLabels
from selfvitmil.settings import EvaluateSettings, TrainSettings

# ---------------------------------------------------------------------------------------------------- splits


def make_splits(
    cases: Cases, train: TrainSettings, evaluate: EvaluateSettings = EvaluateSettings()
) -> tuple[Split, ...]:
    """The splits that the settings ask for, over the cases; validation is carved by patient where a split has none.

    Slides that are no cases (they failed, or have no label) are left out of splits that name them. Under `optimistic`
    nothing is carved: the test set is what is chosen on. CohortError or ConfigError where a split cannot be made.
    """
    val = 0.0 if evaluate.protocol == "optimistic" else train.validation
    if cases.by_split:
        # Encoders were trained for the splits of the whole cohort: a slide that failed since must not change them.
        return tuple(_only(split, cases.usable) for split in draw_splits(cases.cohort, train, val))
    return draw_splits(cases.cohort, train, val, cases.usable)


def split_kind(cohort: Cohort, train: TrainSettings) -> Literal["given", "k-fold", "monte-carlo", "files"]:
    """The kind of splits that the settings ask for: `auto` takes the cohort's column where labelled slides have one."""
    if train.split != "auto":
        return train.split
    return "given" if any(row.split for row in cohort.rows if row.label is not None) else "k-fold"


def draw_splits(cohort: Cohort, train: TrainSettings, val: float, usable: Cohort | None = None) -> tuple[Split, ...]:
    """Splits of the cohort's labelled slides, or of those in `usable`, with the fraction `val` carved from training."""
    usable = cohort.select(labelled=True) if usable is None else usable
    kind = split_kind(usable, train)
    if kind == "given":
        return (split_from_column(usable, val=val, seed=train.seed),)
    if kind == "k-fold":
        return k_fold(usable, train.folds, val=val, seed=train.seed)
    if kind == "monte-carlo":
        return monte_carlo(usable, train.folds, val=val, seed=train.seed)
    if train.split_folder is None:
        raise ConfigError("train.split 'files' without train.split_folder", how="Name the folder of the splits")
    read = (_only(split, usable) for split in read_splits(train.split_folder, cohort))
    return tuple(split if split.val else carve_validation(usable, split, val, seed=train.seed) for split in read)


def _only(split: Split, usable: Cohort) -> Split:
    sides = (split.train, split.val, split.test)
    return Split(split.name, *(tuple(slide for slide in side if slide in usable) for side in sides))


# ---------------------------------------------------------------------------------------------------- transduction


def seen_slides(split: Split, encoder_slides: Collection[str], cohort: Cohort) -> tuple[str, ...]:
    """Test slides of a split that an encoder was trained on, or of whose patient it saw another slide."""
    patients = {cohort[slide].patient for slide in encoder_slides if slide in cohort}
    return tuple(slide for slide in split.test if slide in encoder_slides or cohort[slide].patient in patients)


def find_transductive(cases: Cases, splits: Sequence[Split]) -> dict[str, tuple[str, ...]]:
    """Split -> its test slides that its encoder has seen; without the splits of which it saw none."""
    seen = {each.name: seen_slides(each, cases.of_split(each.name).encoder_slides, cases.cohort) for each in splits}
    return {name: slides for name, slides in seen.items() if slides}


def transductive_words(encoder: str, seen: Mapping[str, Sequence[str]], splits: Iterable[Split | TrialSplit]) -> str:
    """The sentence that stands with all metrics on test slides which the encoder has seen; empty where it saw none."""
    if not seen:
        return ""
    of = [f"{split.name}: {len(seen[split.name])} of {len(split.test)}" for split in splits if split.name in seen]
    return (
        f"transductive: the encoder {encoder} was trained, without labels, on test slides or on other slides of their "
        f"patients ({listing(of)}); metrics on slides of new patients may be lower"
    )


# ---------------------------------------------------------------------------------------------------- sealing


@dataclass(frozen=True)
class TrialSplit:
    """A split whose test slides have no labels."""

    name: str
    train: tuple[Case, ...]
    val: tuple[Case, ...]
    test: tuple[BagFile, ...]


@dataclass(frozen=True, eq=False)
class Trial:
    """All splits of one kind of features, ready to be trained on."""

    splits: tuple[TrialSplit, ...]
    labels: SealedLabels
    class_names: tuple[str, ...]
    num_classes: int
    """1 for two classes."""
    evaluate: EvaluateSettings
    encoder: str
    tiling: str
    warnings: tuple[str, ...] = ()
    transductive: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Split -> its test slides that the encoder has seen, or of whose patient it saw another slide."""
    positive_from: str = ""
    """How the positive class of two was found, in words."""
    _bags: dict[Path, Bag] = field(default_factory=dict)

    @property
    def optimistic(self) -> bool:
        return self.evaluate.protocol == "optimistic"

    @property
    def where(self) -> Where:
        """On what epochs, thresholds and calibrations are chosen, in words."""
        return "TEST (optimistic)" if self.optimistic else "validation"

    def chosen_on(self, split: TrialSplit) -> tuple[Case, ...]:
        """The slides that epoch, threshold and calibration are chosen on."""
        return self.opened(split) if self.optimistic else split.val

    def opened(self, split: TrialSplit) -> tuple[Case, ...]:
        """The test slides with their labels; SealedLabelError as long as these are sealed."""
        return tuple(case.with_label(self.labels.label(split.name, case.slide)) for case in split.test)

    def bag(self, case: BagFile) -> Bag:
        """The slide's bag, opened once."""
        if case.path not in self._bags:
            self._bags[case.path] = case.read()
        return self._bags[case.path]


def seal(cases: Cases, splits: Sequence[Split], evaluate: EvaluateSettings) -> Trial:
    """Part the cases as the splits say and put the labels of test slides under seal.

    CohortError where a patient straddles, a class is missing from training, or nothing could be chosen on validation.
    """
    check_choices(evaluate, cases.num_classes)
    optimistic = evaluate.protocol == "optimistic"
    warnings = [cases.usable.patient_warning] if cases.usable.patient_warning else []
    for split in splits:
        check_split(split, cases.usable, split.name)
        _check_split(split, cases)
        if not optimistic:
            warnings += _check_validation(split, cases)
        elif split.val:
            warnings.append(f"{split.name}: {len(split.val)} validation slides take no part in the optimistic protocol")
    transductive = find_transductive(cases, splits)
    if transductive:
        warnings.append(transductive_words(cases.encoder, transductive, splits))
    labels = SealedLabels(
        {split.name: {slide: cases.by_slide[slide].label for slide in split.test} for split in splits}
    )
    if optimistic:
        labels.open(OPTIMISTIC, optimistic=True)
    return Trial(
        tuple(_parted(split, cases.of_split(split.name)) for split in splits),
        labels,
        cases.class_names,
        cases.num_classes,
        evaluate,
        cases.encoder,
        cases.tiling,
        tuple(warnings),
        transductive,
        cases.positive_from,
    )


def _parted(split: Split, cases: Cases) -> TrialSplit:
    train, val, test = (tuple(cases.by_slide[slide] for slide in side) for side in (split.train, split.val, split.test))
    return TrialSplit(split.name, train, val, tuple(case.without_label() for case in test))


def _check_split(split: Split, cases: Cases) -> None:
    missing = _missing(split.train, cases)
    if missing:
        raise CohortError(
            f"{split.name}: no training slide of {listing(missing)}",
            "a class without slides cannot be learned",
            "Use another split, or fewer folds",
        )
    if not split.test:
        raise CohortError(f"{split.name}: no test slide", "there would be nothing to report", "Name test slides")


def _check_validation(split: Split, cases: Cases) -> list[str]:
    """Refuses validation slides that nothing can be chosen on; warns where they are only poor."""
    if not split.val:
        raise CohortError(
            f"{split.name}: no validation slide",
            "epoch and threshold must be chosen on slides that are neither trained nor tested on",
            "Name some in the split, or set train.validation",
        )
    missing = _missing(split.val, cases)
    if missing and cases.num_classes == 1:
        raise CohortError(
            f"{split.name}: no validation slide of {listing(missing)}",
            "no threshold can be chosen on slides of one class",
            "Name validation slides of both classes, or none, so that they are carved from the training slides",
        )
    return [f"{split.name}: validation has no slide of {listing(missing)}"] if missing else []


def _missing(slides: Iterable[str], cases: Cases) -> list[str]:
    """Classes of which none of these slides is."""
    present = {cases.by_slide[slide].label for slide in slides}
    return [name for k, name in enumerate(cases.class_names) if k not in present]
