"""Data of an evaluation: labelled slides with valid feature files, their splits, and held-out test labels.

`find_cases` opens and checks every feature file of a cohort. A slide without a label becomes a note, one without a
valid feature file a failure that does not stop the others; bags of different dimensions, encoders or resolutions in one
cohort are an error that lists them, as are missing labels or a single class. Classes are numbered in the cohort's class
order (numbers by value, then words alphabetically). Of two classes the last one is positive, and a score is its
probability; `cohort.positive_class` finds it by the meaning of the names. Bags of two scales are concatenated once and
stored as feature files (`join_scales`): at 20x and 5x a bag has twice the width, and a cohort would not fit into
memory, while files are memory-mapped.

`make_splits` returns the splits of the settings, `hold_out_test_labels` a `Trial`. From then on the label of a test
slide is available from `Trial.labels` (`HeldOutLabels`) only, and not before these are opened for the final scoring. So
trained, selected and stored models cannot depend on a test label. The authors' protocol, which selects on the test set,
opens the labels at the start; every output then states the reason. This prevents mistakes, the usual cause of label
leakage, not deliberate access. Where the encoder was trained on slides of test patients, although without labels, the
evaluation is transductive: a warning and `Trial.transductive` say so, and all results carry it.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NoReturn

import numpy as np

from selfvitmil.bags import Bag, check_bag, concat_scales, read_bag, write_bag
from selfvitmil.cohort import Cohort, Split, carve_validation, k_fold, monte_carlo, read_splits, split_from_column
from selfvitmil.cohort.splits import FINAL_FIT, all_labelled, check_split
from selfvitmil.cohort.table import ClassOrder, listing, order_classes
from selfvitmil.errors import BagError, CohortError, ConfigError, HeldOutLabelError, SelfVitMilError
from selfvitmil.evaluate.predictions import Where, check_choices
from selfvitmil.outcomes import Outcome
from selfvitmil.outcomes.joint import Joint
from selfvitmil.settings import EvaluateSettings, TrainSettings
from selfvitmil.store.failures import Failure
from selfvitmil.store.files import file_fingerprint, hash_of
from selfvitmil.store.provenance import MISSING, Freshness, Provenance, damaged
from selfvitmil.tiles import TileTable, read_tiles


@dataclass(frozen=True)
class BagFile:
    """A slide with its feature file but without its label, as test slides are seen before the final scoring."""

    slide: str
    patient: str
    path: Path
    identity: str
    """Fingerprint of the file's content."""

    def read(self) -> Bag:
        return replace(read_bag(self.path), slide=self.slide)

    def with_label(self, label: Any) -> Case:
        return Case(self.slide, self.patient, self.path, self.identity, label)


@dataclass(frozen=True)
class Case(BagFile):
    """A slide with label and feature file."""

    label: Any
    """Index of its label in `Cases.class_names`; with another outcome than classes its target, a tuple of numbers."""

    def without_label(self) -> BagFile:
        return BagFile(self.slide, self.patient, self.path, self.identity)


@dataclass(frozen=True, eq=False)
class Cases:
    """All labelled slides of a cohort with one set of features, in the cohort's order."""

    cases: tuple[Case, ...]
    class_names: tuple[str, ...]
    cohort: Cohort
    """The whole cohort, including slides without label or valid features."""
    dim: int
    encoder: str
    """Encoder name from the feature files, else from the caller; may be empty."""
    tiling: str
    failures: tuple[Failure, ...] = ()
    notes: tuple[str, ...] = ()
    order: ClassOrder | None = None
    """How the positive class of two was determined."""
    encoder_slides: frozenset[str] = frozenset()
    """Slides that the encoder was trained on, as far as is known."""
    by_split: Mapping[str, Cases] = field(default_factory=dict[str, "Cases"])
    """Where every split has its own encoder: the same slides with the features of that encoder."""
    outcome: Outcome | None = None
    """What is predicted; None for classes. `cohort` then has strata as labels, for splits."""
    whole: Cases | None = None
    """With a target that is trained jointly with others: the slides of all of them, whose outcome is `Joint`."""
    target_place: int | None = None
    """Which of those targets this is."""

    @property
    def trained_on(self) -> Outcome | None:
        """What models are trained to predict: all targets of a joint training, of which `outcome` is one."""
        return self.outcome if self.whole is None else self.whole.outcome

    @property
    def num_outputs(self) -> int:
        """Outputs of the network: those of all targets of a joint training, else `num_classes`."""
        return self.num_classes if self.whole is None else self.whole.num_classes

    def of_split(self, name: str) -> Cases:
        """Return the slides with the features of this split's encoder."""
        return self.by_split.get(name, self)

    @property
    def num_classes(self) -> int:
        """Number of classes as aggregators take it: 1 for two classes. With another outcome its number of outputs."""
        if self.outcome is not None:
            return self.outcome.num_outputs
        return 1 if len(self.class_names) == 2 else len(self.class_names)

    @cached_property
    def by_slide(self) -> dict[str, Case]:
        return {case.slide: case for case in self.cases}

    @cached_property
    def usable(self) -> Cohort:
        """The cohort's rows that have a label and valid features."""
        return Cohort(tuple(row for row in self.cohort.rows if row.slide in self.by_slide))

    def only(self, slides: Collection[str]) -> Cases:
        """Return the subset of the given slides, to compare features that not all slides have."""
        kept = tuple(case for case in self.cases if case.slide in slides)
        if self.outcome is not None:
            by_split = {name: own.only(slides) for name, own in self.by_split.items()}
            return replace(self, cases=kept, by_split=by_split)
        check_two_classes({self.class_names[case.label] for case in kept}, "the slides that all features have")
        return replace(self, cases=kept, by_split={name: own.only(slides) for name, own in self.by_split.items()})

    @property
    def positive_from(self) -> str:
        """How the positive class of two was determined, as text; empty for more than two."""
        return self.order.reason if self.order is not None and self.num_classes == 1 else ""

    @property
    def positive_is_guessed(self) -> bool:
        return self.order is not None and self.num_classes == 1 and self.order.source == "order"

    @property
    def positive_line(self) -> str:
        found = f" ({self.positive_from})" if self.positive_from else ""
        return f"positive: {self.class_names[1]}{found}; scores are its probability"

    def lines(self) -> list[str]:
        """Return lines to print before training: classes with counts, the positive class, excluded slides."""
        if self.outcome is not None:
            described = self.outcome.describe([case.label for case in self.cases])
            notes = (f"note: {note}" for note in self.notes)
            return [f"outcome: {self.outcome.words}: {described}", *self._joint_line, *notes]
        counts = Counter(case.label for case in self.cases)
        classes = ", ".join(f"{k} = {name} ({counts[k]} slides)" for k, name in enumerate(self.class_names))
        lines = [f"classes: {classes}"]
        if self.num_classes == 1:
            lines.append(self.positive_line)
        return [*lines, *self._joint_line, *(f"note: {note}" for note in self.notes)]

    @property
    def trained_with(self) -> tuple[str, ...]:
        """The other targets of a joint training."""
        if self.whole is None or not isinstance(self.whole.outcome, Joint):
            return ()
        return tuple(name for place, name in enumerate(self.whole.outcome.names) if place != self.target_place)

    @property
    def _joint_line(self) -> list[str]:
        if self.whole is None or not isinstance(self.whole.outcome, Joint) or self.target_place is None:
            return []
        own, more = self.whole.outcome.names[self.target_place], len(self.whole.cases) - len(self.cases)
        lack = f"; {more} slides without a value of {own} train the others" if more else ""
        return [f"target {own}, trained jointly with {listing(self.trained_with)}{lack}"]


@dataclass(frozen=True)
class CoarseScale:
    """A coarser scale whose embeddings are appended to those of the tiles inside."""

    tiling: str
    """Name of its tiling, under which the fine tile tables store parent tiles."""
    files: Mapping[str, Path]
    """Slide -> its coarse feature file."""
    tables: Mapping[str, Path]
    """Slide -> its fine tile table (written with tile.parent_mpp)."""
    folder: Path
    """Folder of the joined feature files: bags/<fine>+<coarse>/features_<encoder>."""


# ---------------------------------------------------------------------------------------------------- matching


def find_cases(
    cohort: Cohort,
    bag_files: Mapping[str, Path],
    *,
    coarse: CoarseScale | None = None,
    stage: str = "train",
    encoder: str = "",
    tiling: str = "",
    positive: str | None = None,
    outcome: Outcome | None = None,
) -> Cases:
    """Check labels and feature files (`bags.find_bags`) and match them; `stage` is recorded in failures.

    `encoder` is its name where the files do not state it; `positive` the positive class of two; `outcome` another one
    than classes, whose targets take the place of labels. Raises ConfigError for
    missing labels, a single class or mixed features, BagError where no slide has a valid feature file.
    """
    targets: Mapping[str, Any] = {}
    remarks: tuple[str, ...] = ()
    if outcome is not None:
        targets, remarks = outcome.read(cohort), outcome.remarks(cohort)
        cohort = outcome.in_strata(cohort, targets)
    labelled = cohort.select(labelled=True)
    if not labelled.rows:
        raise ConfigError(
            "no slide of the cohort has a label",
            "labels are needed for training",
            "Fill the column label of cohort.csv, or pass --labels",
            code="no-labels",
        )
    order = None
    classes: tuple[str, ...] = ()
    if outcome is None:
        check_two_classes(set(cohort.classes), "the cohort")
        order = order_classes(cohort.classes, positive)
        classes = order.names
    cases: list[Case] = []
    failures: list[Failure] = []
    facts: dict[str, _Facts] = {}
    for row in labelled.rows:
        try:
            path = _bag_file(row.slide, bag_files, coarse)
            bag = read_bag(path)
            check_bag(replace(bag, slide=row.slide))
        except (SelfVitMilError, OSError) as error:
            failures.append(Failure.of(row.slide, stage, error))
            continue
        label = classes.index(row.label or "") if outcome is None else targets[row.slide]
        cases.append(Case(row.slide, row.patient, path, file_fingerprint(path), label))
        facts[row.slide] = _Facts.of(bag, path)
    _refuse_mixed(facts)
    if not cases:
        raise BagError(
            f"none of {len(labelled)} labelled slides has a valid feature file",
            failures[0].reason,
            "Pass the folder of the feature files, or embed the slides first",
            code="no-feature-files",
        )
    if outcome is None:
        check_two_classes({classes[int(case.label)] for case in cases}, "the remaining cohort")
    first = facts[cases[0].slide]
    notes = (*remarks, *_notes(cohort, bag_files, facts))
    named = first.encoder or encoder
    return Cases(
        tuple(cases), classes, cohort, first.dim, named, tiling, tuple(failures), notes, order, outcome=outcome
    )


@dataclass(frozen=True)
class _Facts:
    """Properties that must agree for all bags of a cohort."""

    dim: int
    encoder: str
    weights: str
    """Shortened hash of the encoder's weights and layout; empty where the file does not state it."""
    resolution: str
    in_memory: int
    """Bytes of a bag that cannot be memory-mapped."""

    @classmethod
    def of(cls, bag: Bag, path: Path) -> _Facts:
        magnification = bag.attributes.get("target_magnification")
        if bag.mpp is not None:
            resolution = f"{bag.mpp:.4g} um/px"
        else:
            resolution = f"{magnification}x" if magnification is not None else "not said"
        mapped = isinstance(bag.features_ND, np.memmap) or path.suffix == ".pt"
        return cls(bag.dim, bag.encoder, _weights(bag), resolution, 0 if mapped else bag.features_ND.nbytes)


def _weights(bag: Bag) -> str:
    return str(json.loads(bag.attributes.get("made_from", "{}")).get("encoder", ""))[:12]


def _bag_file(slide: str, bag_files: Mapping[str, Path], coarse: CoarseScale | None) -> Path:
    fine = _named(slide, bag_files, "feature file", "Embed the slide, or check why embedding failed")
    if coarse is None:
        return fine
    other = _named(slide, coarse.files, f"feature file at {coarse.tiling}", "Embed the coarse scale too")
    table = _named(slide, coarse.tables, "tile table", "Run `selfvitmil tile` with tile.parent_mpp")
    return join_scales(fine, other, read_tiles(table), coarse.tiling, coarse.folder / f"{slide}.h5")


def _named(slide: str, files: Mapping[str, Path], what: str, how: str) -> Path:
    if slide not in files or not files[slide].exists():
        raise BagError(f"{slide}: no {what}", "the slide has a label but no features", how, code="missing-features")
    return files[slide]


def check_two_classes(names: set[str], whole: str) -> None:
    if len(names) < 2:
        raise ConfigError(
            f"{whole} has {f'one class only ({min(names)})' if names else 'no labelled slide'}",
            "a classifier needs at least two classes",
            "Add slides of another class, or correct the labels",
            code="one-class",
        )


def _refuse_mixed(facts: Mapping[str, _Facts]) -> None:
    """Raise one ConfigError that lists every kind of bag, where there is more than one."""
    problems: list[str] = []
    kinds = {"dimensions": "dim", "encoders": "encoder", "weights or layouts": "weights", "resolutions": "resolution"}
    for what, key in kinds.items():
        slides: dict[str, list[str]] = defaultdict(list)
        for slide, fact in facts.items():
            slides[str(getattr(fact, key)) or "not said"].append(slide)
        if len(slides) > 1:
            found = sorted(slides.items(), key=lambda kind: (len(kind[1]), kind[0]))
            info = "; ".join(f"{value} in {listing(names)}" for value, names in found)
            problems.append(f"feature files of different {what}: {info}")
    if problems:
        raise ConfigError(
            ". ".join(problems),
            "embeddings of different kinds cannot be mixed in training",
            "Embed all slides with the same encoder and settings, or keep each kind in its own folder",
            code="mixed-embeddings",
        )


def _notes(cohort: Cohort, bag_files: Mapping[str, Path], facts: Mapping[str, _Facts]) -> tuple[str, ...]:
    notes: list[str] = []
    if cohort.unlabelled:
        notes.append(f"{len(cohort.unlabelled)} slides have no label and are excluded: {listing(cohort.unlabelled)}")
    strangers = sorted(set(bag_files) - set(cohort.slides))
    if strangers:
        notes.append(f"{len(strangers)} feature files belong to no slide of the cohort: {listing(strangers)}")
    held = [fact.in_memory for fact in facts.values() if fact.in_memory]
    if sum(held) > 2**30:
        notes.append(
            f"{len(held)} feature files are chunked or compressed and cannot be memory-mapped: they take "
            f"{sum(held) / 2**30:.1f} GB of memory"
        )
    return tuple(notes)


# ---------------------------------------------------------------------------------------------------- two scales


def join_scales(fine_file: Path, coarse_file: Path, table: TileTable, coarse_tiling: str, target: Path) -> Path:
    """Write the two-scale bag unless it is up to date: each fine embedding followed by that of its parent tile.

    `table` is the fine tile table with the parent tiles. Tiles without a parent are excluded. Returns `target`, an
    ordinary feature file. Raises BagError where the files do not match.
    """
    fine, coarse = read_bag(fine_file), read_bag(coarse_file)
    inputs = {
        "encoder": hash_of(_weights(fine), _weights(coarse)),
        "fine": file_fingerprint(fine_file),
        "coarse": file_fingerprint(coarse_file),
        "tiles": table.digest,
        "parents": table.parent_digests.get(coarse_tiling, ""),
    }
    if _joined_freshness(target, Provenance("join scales", None, {}, inputs)).is_up_to_date:
        return target
    if coarse_tiling not in table.parents:
        raise BagError(
            f"{table.slide}: its tile table has no parent tiles at {coarse_tiling}",
            f"it has {listing(table.parents) or 'none'}",
            "Run `selfvitmil tile` with tile.parent_mpp, then embed both scales again",
            code="no-parent-tiles",
        )
    _check_places(fine, table.digest, "fine")
    _check_places(coarse, table.parent_digests[coarse_tiling], "coarse")
    parents = table.parents[coarse_tiling]
    joined = concat_scales(fine, coarse, parents)
    encoder = fine.encoder if fine.encoder == coarse.encoder else f"{fine.encoder}+{coarse.encoder}"
    write_bag(target, joined.features_ND, _rows_of(table, parents >= 0), encoder, inputs)
    return target


def _check_places(bag: Bag, digest: str, scale: str) -> None:
    coords = np.empty((0, 2), np.int64) if bag.coords is None else np.ascontiguousarray(bag.coords, np.int64)
    if hashlib.sha256(coords.tobytes()).hexdigest() != digest:
        raise BagError(
            f"{bag.slide}: its {scale} feature file does not match its tile table",
            "fine tiles cannot be assigned to coarse tiles",
            "Embed both scales again",
            code="tile-table-mismatch",
        )


def _rows_of(table: TileTable, kept: np.ndarray) -> TileTable:
    return replace(table, coords_l0=table.coords_l0[kept], tissue=table.tissue[kept], annotated=None, parents={})


def _joined_freshness(target: Path, now: Provenance) -> Freshness:
    if not target.exists():
        return MISSING
    try:
        stored = json.loads(read_bag(target).attributes.get("made_from", "{}"))
    except BagError:
        return damaged(target)
    return now.compare(Provenance("join scales", None, {}, stored))


# ---------------------------------------------------------------------------------------------------- held-out labels


FINAL_SCORING = "final scoring"
OPTIMISTIC = "optimistic protocol: epoch and threshold are chosen on the test set, so its figures are too good"


class HeldOutLabels:
    """Labels, or targets, of the test slides of every split: split name -> slide -> class index or target."""

    def __init__(self, labels: Mapping[str, Mapping[str, Any]]):
        kept = {split: dict(of_split) for split, of_split in labels.items()}

        def read(split: str, slide: str) -> Any:  # a closure: printing or copying does not expose labels
            return kept[split][slide]

        self._read = read
        self._reason = ""
        self._optimistic = False
        self._running: list[str] = []

    @property
    def reason(self) -> str:
        """Reason for opening the labels; empty while they are held out."""
        return self._reason

    def label(self, split: str, slide: str) -> Any:
        """Return the class index or target of a test slide; raise HeldOutLabelError before `open`."""
        if not self._reason:
            raise HeldOutLabelError(
                f"{slide}: its label is held out",
                f"it is a test slide of {split}, and selecting on test labels is data leakage",
                "Use validation slides; test labels are opened for the final scoring only",
                code="held-out-label",
            )
        return self._read(split, slide)

    def open(self, reason: str, *, optimistic: bool = False) -> None:
        """Open the labels permanently. With `optimistic`, training may continue, and `reason` states the bias."""
        if not reason:
            raise HeldOutLabelError(
                "test labels opened without a reason",
                "outputs state it",
                "Pass a reason",
                code="test-labels-without-reason",
            )
        if self._running and not optimistic:
            raise HeldOutLabelError(
                f"test labels opened while {self._running[-1]} is being trained",
                "a training run with access to test labels is data leakage",
                "Finish all training runs first",
                code="test-labels-during-training",
            )
        if not self._reason:
            self._reason, self._optimistic = reason, optimistic

    @contextmanager
    def training(self, what: str) -> Generator[None]:
        """Context of a training run named `what`: fails once the labels are open, and keeps them closed meanwhile."""
        if self._reason and not self._optimistic:
            raise HeldOutLabelError(
                f"a training run of {what} started after the test labels were opened",
                f"they were opened for: {self._reason}",
                "Train everything first, then score; or start a new run",
                code="training-after-test-labels",
            )
        self._running.append(what)
        try:
            yield
        finally:
            self._running.remove(what)

    def __reduce__(self) -> NoReturn:
        raise HeldOutLabelError(
            "held-out test labels cannot be copied or sent to another process",
            "they could be read there",
            code="test-labels-copied",
        )

    def __repr__(self) -> str:
        return f"HeldOutLabels({self._reason or 'held out'})"


# ---------------------------------------------------------------------------------------------------- splits


# ---------------------------------------------------------------------------------------------------- splits


def make_splits(
    cases: Cases, train: TrainSettings, evaluate: EvaluateSettings = EvaluateSettings()
) -> tuple[Split, ...]:
    """Return the splits of the settings; validation slides are split off by patient where a split has none.

    Slides without label or valid features are removed from splits that name them. Under `optimistic` there is no
    validation set: selection uses the test set. Raises CohortError or ConfigError where a split is impossible.
    """
    if cases.whole is not None:
        drawn = make_splits(cases.whole, train, evaluate)
        return tuple(replace(_only(split, cases.usable), whole=split) for split in drawn)
    val = 0.0 if evaluate.protocol == "optimistic" else train.validation
    if cases.by_split:
        # Encoders were trained for the splits of the whole cohort: slides that failed later must not change them.
        return tuple(_only(split, cases.usable) for split in draw_splits(cases.cohort, train, val))
    return draw_splits(cases.cohort, train, val, cases.usable)


SplitKind = Literal["given", "k-fold", "monte-carlo", "leave-site-out", "site-k-fold", "files", "all"]


def split_kind(cohort: Cohort, train: TrainSettings) -> SplitKind:
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
    if kind == "leave-site-out":
        from selfvitmil.cohort.sites import leave_one_site_out

        return leave_one_site_out(usable, train.site, val=val, seed=train.seed)
    if kind == "site-k-fold":
        from selfvitmil.cohort.sites import site_folds

        return site_folds(usable, train.site, train.folds, val=val, seed=train.seed)
    if kind == "all":
        return (all_labelled(usable, val=val, seed=train.seed),)
    if train.split_folder is None:
        raise ConfigError(
            "train.split 'files' without train.split_folder", how="Set the folder of the splits", code="no-split-folder"
        )
    read = (_only(split, usable) for split in read_splits(train.split_folder, cohort))
    return tuple(split if split.val else carve_validation(usable, split, val, seed=train.seed) for split in read)


def _only(split: Split, usable: Cohort) -> Split:
    sides = (split.train, split.val, split.test)
    train, val, test = (tuple(slide for slide in side if slide in usable) for side in sides)
    return Split(split.name, train, val, test)


def site_words(cases: Cases, splits: Sequence[Split], train: TrainSettings) -> str:
    """Return a warning where the labels of the first split's training and validation slides go with the site."""
    if not cases.cohort.has_column(train.site):
        return ""
    from selfvitmil.cohort.sites import label_by_site

    first = splits[0]
    found = label_by_site(cases.cohort, train.site, (*first.train, *first.val))
    return found.words if found is not None and found.is_associated else ""


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
    whole: TrialSplit | None = None
    """The slides of all targets of a joint training, without those of the test set."""


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
    transductive: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    """Split -> its test slides that the encoder has seen, or of whose patient it saw another slide."""
    positive_from: str = ""
    """How the positive class of two was found, in words."""
    outcome: Outcome | None = None
    """What is predicted; None for classes."""
    trained_on: Outcome | None = None
    """What models are trained to predict: all targets of a joint training, of which `outcome` is one."""
    num_outputs: int = 1
    """Outputs of the network, of all targets."""
    target_place: int | None = None
    """Which of the targets of a joint training this is."""
    _bags: dict[Path, Bag] = field(default_factory=dict[Path, Bag])

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


def hold_out_test_labels(
    cases: Cases, splits: Sequence[Split], evaluate: EvaluateSettings, *, may_be_final: bool = False
) -> Trial:
    """Divide the slides by the splits and hold out the labels of the test slides.

    `may_be_final` allows the split of a final fit, which has no test slides; without it that is a ConfigError. Raises
    CohortError where a patient is on two sides of a split, a class is missing from training, or the validation
    set cannot be used for selection.
    """
    if cases.outcome is None:
        check_choices(evaluate, cases.num_classes)
    elif evaluate.calibration != "none":
        raise ConfigError(
            f"evaluate.calibration {evaluate.calibration!r} with the outcome {cases.outcome.kind}",
            "probabilities of classes are calibrated only",
            "Leave it out",
            code="calibration-needs-classes",
        )
    optimistic = evaluate.protocol == "optimistic"
    if optimistic and isinstance(cases.trained_on, Joint):
        raise ConfigError(
            "evaluate.protocol 'optimistic' with train.joint",
            "the epoch is chosen on all targets together",
            "Leave it out, or train the targets one by one (train.target)",
            code="not-with-joint",
        )
    warnings = [cases.usable.patient_warning] if cases.usable.patient_warning else []
    for split in splits:
        check_split(split, cases.usable, split.name)
        _check_split(split, cases)
        _check_tested(split, may_be_final=may_be_final)
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
        cases.outcome,
        cases.trained_on,
        cases.num_outputs,
        cases.target_place,
    )


def _parted(split: Split, cases: Cases) -> TrialSplit:
    train, val, test = (tuple(cases.by_slide[slide] for slide in side) for side in (split.train, split.val, split.test))
    whole = None
    if cases.whole is not None and split.whole is not None:
        whole = _parted(replace(split.whole, test=()), cases.whole)
    return TrialSplit(split.name, train, val, tuple(case.without_label() for case in test), whole)


def _check_split(split: Split, cases: Cases) -> None:
    if cases.outcome is not None:
        cases.outcome.check_training(split.name, [cases.by_slide[slide].label for slide in split.train])
    missing = _missing(split.train, cases)
    if missing:
        raise CohortError(
            f"{split.name}: no training slide of {listing(missing)}",
            "a class without training slides cannot be learned",
            "Use another split, or fewer folds",
            code="missing-class",
        )


def _check_tested(split: Split, *, may_be_final: bool) -> None:
    """Raise an error where a split has no test slides, unless it is the split of a final fit and that is fine."""
    if split.test or (may_be_final and split.name == FINAL_FIT):
        return
    if split.name == FINAL_FIT:
        raise ConfigError(
            "train.split 'all' has no test set",
            "a final fit learns from all labelled slides, and only `train` and `package` can do with that",
            "Evaluate with another split (train.split k-fold), then run `selfvitmil train STUDY --train.split all` and "
            "`selfvitmil package STUDY --train.split all`",
            code="final-fit-untested",
        )
    raise CohortError(
        f"{split.name}: no test slide", "there is nothing to evaluate on", "Add test slides", code="no-test-slides"
    )


def _check_validation(split: Split, cases: Cases) -> list[str]:
    """Raise CohortError where the validation set is empty or has one class; return warnings for missing classes."""
    if not split.val:
        raise CohortError(
            f"{split.name}: no validation slide",
            "epoch and threshold are chosen on slides outside of training and test set",
            "Add some to the split, or set train.validation",
            code="no-validation-slides",
        )
    missing = _missing(split.val, cases)
    if missing and cases.num_classes == 1 and cases.outcome is None:
        raise CohortError(
            f"{split.name}: no validation slide of {listing(missing)}",
            "a threshold cannot be chosen on slides of one class",
            "Add validation slides of both classes, or none: then they are split off the training slides",
            code="missing-class",
        )
    return [f"{split.name}: validation has no slide of {listing(missing)}"] if missing else []


def _missing(slides: Iterable[str], cases: Cases) -> list[str]:
    """Return the classes without any of these slides; none with another outcome than classes."""
    if cases.outcome is not None:
        return []
    present = {cases.by_slide[slide].label for slide in slides}
    return [name for k, name in enumerate(cases.class_names) if k not in present]
