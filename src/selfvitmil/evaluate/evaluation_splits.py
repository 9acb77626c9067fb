"""Splits of a cohort into training, validation and test slides, with held-out test labels.

`make_splits` returns the splits of the settings, `hold_out_test_labels` a `Trial`. The label of a test slide is then
available from `Trial.labels` only, and not before these are opened (`held_out_labels.py`).

Where the encoder was trained on slides of test patients, although without labels, the evaluation is transductive: a
warning and `Trial.transductive` say so, and all results carry it.
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
from selfvitmil.evaluate.dataset import BagFile, Case, Cases
from selfvitmil.evaluate.held_out_labels import OPTIMISTIC, HeldOutLabels
from selfvitmil.evaluate.thresholds import Where, check_choices
from selfvitmil.settings import EvaluateSettings, TrainSettings

# ---------------------------------------------------------------------------------------------------- splits


def make_splits(
    cases: Cases, train: TrainSettings, evaluate: EvaluateSettings = EvaluateSettings()
) -> tuple[Split, ...]:
    """Return the splits of the settings; validation slides are split off by patient where a split has none.

    Slides without label or valid features are removed from splits that name them. Under `optimistic` there is no
    validation set: selection uses the test set. Raises CohortError or ConfigError where a split is impossible.
    """
    val = 0.0 if evaluate.protocol == "optimistic" else train.validation
    if cases.by_split:
        # Encoders were trained for the splits of the whole cohort: slides that failed later must not change them.
        return tuple(_only(split, cases.usable) for split in draw_splits(cases.cohort, train, val))
    return draw_splits(cases.cohort, train, val, cases.usable)


def split_kind(cohort: Cohort, train: TrainSettings) -> Literal["given", "k-fold", "monte-carlo", "files"]:
    """Return the kind of splits; `auto` uses the cohort's column `split` where it is filled, else k-fold."""
    if train.split != "auto":
        return train.split
    return "given" if any(row.split for row in cohort.rows if row.label is not None) else "k-fold"


def draw_splits(cohort: Cohort, train: TrainSettings, val: float, usable: Cohort | None = None) -> tuple[Split, ...]:
    """Return splits of the labelled slides (or of `usable`), with the fraction `val` of training as validation set."""
    usable = cohort.select(labelled=True) if usable is None else usable
    kind = split_kind(usable, train)
    if kind == "given":
        return (split_from_column(usable, val=val, seed=train.seed),)
    if kind == "k-fold":
        return k_fold(usable, train.folds, val=val, seed=train.seed)
    if kind == "monte-carlo":
        return monte_carlo(usable, train.folds, val=val, seed=train.seed)
    if train.split_folder is None:
        raise ConfigError("train.split 'files' without train.split_folder", how="Set the folder of the splits")
    read = (_only(split, usable) for split in read_splits(train.split_folder, cohort))
    return tuple(split if split.val else carve_validation(usable, split, val, seed=train.seed) for split in read)


def _only(split: Split, usable: Cohort) -> Split:
    sides = (split.train, split.val, split.test)
    return Split(split.name, *(tuple(slide for slide in side if slide in usable) for side in sides))


# ---------------------------------------------------------------------------------------------------- transduction


def seen_slides(split: Split, encoder_slides: Collection[str], cohort: Cohort) -> tuple[str, ...]:
    """Return a split's test slides that are, or share a patient with, training slides of an encoder."""
    patients = {cohort[slide].patient for slide in encoder_slides if slide in cohort}
    return tuple(slide for slide in split.test if slide in encoder_slides or cohort[slide].patient in patients)


def find_transductive(cases: Cases, splits: Sequence[Split]) -> dict[str, tuple[str, ...]]:
    """Return split -> test slides seen by its encoder, without the splits that have none."""
    seen = {each.name: seen_slides(each, cases.of_split(each.name).encoder_slides, cases.cohort) for each in splits}
    return {name: slides for name, slides in seen.items() if slides}


def transductive_words(encoder: str, seen: Mapping[str, Sequence[str]], splits: Iterable[Split | TrialSplit]) -> str:
    """Return the sentence shown with metrics on test slides that the encoder has seen; empty where there are none."""
    if not seen:
        return ""
    of = [f"{split.name}: {len(seen[split.name])} of {len(split.test)}" for split in splits if split.name in seen]
    return (
        f"transductive: the encoder {encoder} was trained, without labels, on test slides or on other slides of their "
        f"patients ({listing(of)}); metrics on slides of new patients may be lower"
    )


# ---------------------------------------------------------------------------------------------------- held-out labels


@dataclass(frozen=True)
class TrialSplit:
    """A split whose test slides carry no labels."""

    name: str
    train: tuple[Case, ...]
    val: tuple[Case, ...]
    test: tuple[BagFile, ...]


@dataclass(frozen=True, eq=False)
class Trial:
    """All splits of one data set, with held-out test labels."""

    splits: tuple[TrialSplit, ...]
    labels: HeldOutLabels
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
        """Set that epochs, thresholds and calibrations are chosen on, as text."""
        return "TEST (optimistic)" if self.optimistic else "validation"

    def chosen_on(self, split: TrialSplit) -> tuple[Case, ...]:
        """Return the slides that epoch, threshold and calibration are chosen on."""
        return self.opened(split) if self.optimistic else split.val

    def opened(self, split: TrialSplit) -> tuple[Case, ...]:
        """Return the test slides with their labels; raise HeldOutLabelError before these are opened."""
        return tuple(case.with_label(self.labels.label(split.name, case.slide)) for case in split.test)

    def bag(self, case: BagFile) -> Bag:
        """Return the slide's bag; each file is opened once."""
        if case.path not in self._bags:
            self._bags[case.path] = case.read()
        return self._bags[case.path]


def hold_out_test_labels(cases: Cases, splits: Sequence[Split], evaluate: EvaluateSettings) -> Trial:
    """Divide the slides by the splits and hold out the labels of the test slides.

    Raises CohortError where a patient is on two sides of a split, a class is missing from training, or the validation
    set cannot be used for selection.
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
            warnings.append(f"{split.name}: {len(split.val)} validation slides are not used by the optimistic protocol")
    transductive = find_transductive(cases, splits)
    if transductive:
        warnings.append(transductive_words(cases.encoder, transductive, splits))
    labels = HeldOutLabels(
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
            "a class without training slides cannot be learned",
            "Use another split, or fewer folds",
        )
    if not split.test:
        raise CohortError(f"{split.name}: no test slide", "there is nothing to evaluate on", "Add test slides")


def _check_validation(split: Split, cases: Cases) -> list[str]:
    """Raise CohortError where the validation set is empty or has one class; return warnings for missing classes."""
    if not split.val:
        raise CohortError(
            f"{split.name}: no validation slide",
            "epoch and threshold are chosen on slides outside of training and test set",
            "Add some to the split, or set train.validation",
        )
    missing = _missing(split.val, cases)
    if missing and cases.num_classes == 1:
        raise CohortError(
            f"{split.name}: no validation slide of {listing(missing)}",
            "a threshold cannot be chosen on slides of one class",
            "Add validation slides of both classes, or none: then they are split off the training slides",
        )
    return [f"{split.name}: validation has no slide of {listing(missing)}"] if missing else []


def _missing(slides: Iterable[str], cases: Cases) -> list[str]:
    """Return the classes without any of these slides."""
    present = {cases.by_slide[slide].label for slide in slides}
    return [name for k, name in enumerate(cases.class_names) if k not in present]
