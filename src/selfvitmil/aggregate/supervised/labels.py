"""Which tiles are tumour, which normal, and which nobody knows: from outlines of lesions and labels of slides.

A tile of a positive slide is tumour when enough of it lies inside outlined tumour. Tiles that only graze an outline are
left out. So is, unless asked for, all other tissue of positive slides: in many cohorts (Camelyon16 among them) some
slides have lesions that nobody outlined. All tiles of negative slides are normal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from selfvitmil.annotations import Annotation, box_coverage, read_annotations
from selfvitmil.bags import Bag
from selfvitmil.cohort import SlideRow
from selfvitmil.cohort.table import listing
from selfvitmil.errors import BagError, CohortError, ConfigError
from selfvitmil.formatting import percent
from selfvitmil.settings import SupervisedSettings
from selfvitmil.tiles import TileTable, boxes_l0, read_tiles

TUMOUR, NORMAL, LEFT_OUT = 1, 0, -1

Labels = NDArray[np.int8]
Indices = NDArray[np.int64]
Coverage = NDArray[np.floating]


@dataclass(frozen=True)
class AnnotatedSlide:
    """A slide to learn from or to choose by: its label, and where its lesions are outlined."""

    slide: str
    label: int
    """1 where there is tumour, else 0."""
    patient: str
    path: Path
    table: Path | None
    """Its tile table; none where vectors of another tool's tiles are all there is (probe only)."""
    annotation: Path | None = None
    """Outlines of its lesions; none takes what the tile table knows of them."""
    mpp: float | None = None
    """Microns per level-0 pixel from the cohort, over whatever the slide says."""
    lesions_complete: bool = True
    """Whether all of its lesions are outlined, as far as is known."""

    @classmethod
    def of(cls, row: SlideRow, label: int, table: Path | None) -> AnnotatedSlide:
        """From a row of the cohort."""
        return cls(row.slide, label, row.patient, row.path, table, row.annotation, row.mpp, row.lesions_complete)


@dataclass(frozen=True, eq=False)
class LabelledTiles:
    """A slide and the labels of its tiles."""

    slide: AnnotatedSlide
    labels_N: Labels
    """1 tumour, 0 normal, -1 left out; rows as in the tile table."""


# ---------------------------------------------------------------------------------------------------- one slide


def coverage_of_table(table: TileTable, annotation: Sequence[Annotation] | None) -> Coverage | None:
    """Share of each tile inside outlined tumour; without outlines as tiling measured it, None where nothing says."""
    return table.annotated if annotation is None else box_coverage(annotation, table.boxes_l0)


def coverage_of_bag(bag: Bag, annotation: Sequence[Annotation] | None) -> Coverage | None:
    """The same for the tiles of a feature file."""
    if annotation is None:
        return None
    if bag.coords is None or bag.unit != "l0" or bag.tile_extent is None:
        raise BagError(
            f"{bag.slide}: the feature file does not say where its tiles lie in level-0 pixels",
            "so they cannot be compared with the outlines of lesions",
            "Use feature files that selfvitmil or TRIDENT wrote",
        )
    return box_coverage(annotation, boxes_l0(bag.coords.astype(np.int64), bag.tile_extent))


def label_by_coverage(
    slide: str, number: int, coverage_N: Coverage | None, positive: bool, min_overlap: float, use_unannotated: bool
) -> Labels:
    """1 tumour, 0 normal, -1 left out for every tile of a slide, by the share of it inside outlined tumour."""
    if not positive:
        _check_negative(slide, coverage_N)
        return np.full(number, NORMAL, dtype=np.int8)
    labels_N = np.full(number, LEFT_OUT, dtype=np.int8)
    # An annotation without any tumour in it tells nothing of a positive slide: its lesions were not outlined.
    if coverage_N is None or not coverage_N.any():
        return labels_N
    if use_unannotated:
        labels_N[coverage_N == 0] = NORMAL
    labels_N[(coverage_N > 0) & (coverage_N >= min_overlap)] = TUMOUR
    return labels_N


def _check_negative(slide: str, coverage_N: Coverage | None) -> None:
    if coverage_N is not None and coverage_N.any():
        raise CohortError(
            f"{slide}: its label says no tumour, its annotation outlines tumour",
            f"{int((coverage_N > 0).sum())} of its tiles would be normal and tumour at once",
            "Correct the label or the annotation in cohort.csv",
        )


# ---------------------------------------------------------------------------------------------------- many slides


def label_slides(
    slides: Sequence[AnnotatedSlide], settings: SupervisedSettings, bags: Mapping[str, Bag] | None = None
) -> tuple[list[LabelledTiles], list[str]]:
    """Labels of all slides that have any, and notes on those that are left out.

    With `bags` the rows are those of the feature files: where there is a tile table as well, both must list the same
    tiles in the same order.
    """
    labelled: list[LabelledTiles] = []
    bare: list[str] = []
    grazed: list[str] = []
    for slide in slides:
        labels_N, outlined = _labels_of(slide, settings, None if bags is None else bags[slide.slide])
        if (labels_N != LEFT_OUT).any():
            labelled.append(LabelledTiles(slide, labels_N))
        if slide.label and not (labels_N == TUMOUR).any():
            (grazed if outlined else bare).append(slide.slide)
    notes: list[str] = []
    if bare:
        notes.append(f"{len(bare)} positive slides have no outline of tumour and are left out: {listing(bare)}")
    if grazed:
        share = f"{percent(settings.min_overlap)} tumour"
        notes.append(f"{len(grazed)} positive slides have no tile of at least {share}: {listing(grazed)}")
    return labelled, notes


def _labels_of(slide: AnnotatedSlide, settings: SupervisedSettings, bag: Bag | None) -> tuple[Labels, bool]:
    """Labels of a slide's tiles, and whether outlines touch any of them."""
    if slide.label not in (0, 1):
        raise ConfigError(
            f"{slide.slide}: label {slide.label}",
            "the supervised baseline tells tumour (1) from normal (0) and knows no other classes",
            "Compare without it",
        )
    regions = None if slide.annotation is None else read_annotations(slide.annotation, repair=True)
    if slide.table is not None:
        table = read_tiles(slide.table)
        if bag is not None:
            check_same_tiles(bag, table)
        number, coverage_N = len(table), coverage_of_table(table, regions)
    elif bag is not None:
        number, coverage_N = len(bag), coverage_of_bag(bag, regions)
    else:
        raise ConfigError(f"{slide.slide}: has no tile table", "its tiles cannot be found", "Run `selfvitmil tile`")
    # Tissue off the outlines is normal only where all lesions are outlined.
    use_unannotated = settings.use_unannotated and slide.lesions_complete
    labels_N = label_by_coverage(
        slide.slide, number, coverage_N, slide.label == 1, settings.min_overlap, use_unannotated
    )
    return labels_N, coverage_N is not None and bool(coverage_N.any())


def check_same_tiles(bag: Bag, table: TileTable) -> None:
    """Raise BagError unless row k of the bag is tile k of the table."""
    if bag.coords is None or bag.unit != "l0" or not np.array_equal(bag.coords, table.coords_l0):
        stored = "no coordinates" if bag.coords is None else f"{len(bag)} tiles"
        raise BagError(
            f"{bag.slide}: its vectors are not those of its tile table",
            f"the feature file lists {stored}, the table {len(table)}, and they must be the same in the same order",
            "Embed the slide again",
        )


def sample_rows(labels_N: Labels, most: int, generator: np.random.Generator) -> Indices:
    """Rows with a label, at most so many of each class, in rising order."""
    chosen: list[Indices] = []
    for label in (NORMAL, TUMOUR):
        rows = np.flatnonzero(labels_N == label)
        chosen.append(rows if len(rows) <= most else generator.choice(rows, most, replace=False))
    return np.sort(np.concatenate(chosen))


def check_sides(training: Sequence[LabelledTiles], validation: Sequence[LabelledTiles]) -> None:
    """Refuse what cannot be learned from or chosen by: a class without tiles, a patient on both sides."""
    shared = sorted({each.slide.patient for each in training} & {each.slide.patient for each in validation})
    if shared:
        raise CohortError(
            f"patients both to train on and to choose by: {listing(shared)}",
            "slides of one patient resemble each other, and the choice would be too good",
            "Split by patient",
        )
    for name, side in (("training", training), ("validation", validation)):
        if not any((each.labels_N == TUMOUR).any() for each in side):
            raise ConfigError(
                f"no tile of the {name} slides is known to be tumour",
                "the supervised baseline learns from outlined lesions"
                if name == "training"
                else "what it learns is judged on tiles of slides that it was not trained on",
                "Name outlines of positive slides (ASAP XML or QuPath GeoJSON) in the column annotation of cohort.csv"
                + (", or raise train.validation" if name == "validation" else ""),
            )
        if not any((each.labels_N == NORMAL).any() for each in side):
            raise ConfigError(
                f"no tile of the {name} slides is known to be normal",
                "there is no negative slide among them",
                "Add negative slides; or, if all lesions are outlined, use --supervised.use-unannotated",
            )
