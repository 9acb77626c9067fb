"""What both supervised baselines share: tile labels from annotated tumour regions and slide labels, and model folders.

A tile of a positive slide is tumour when enough of its area lies inside an annotated tumour region. Tiles with less
overlap are excluded. So is, by default, all other tissue of positive slides: in many cohorts (Camelyon16 among them)
some lesions are not annotated. All tiles of negative slides are normal.

A model folder has `model.safetensors`, `config.json` and `metrics.jsonl`. The config is written last and holds the
checksum of the weights, so that files of two models cannot be mixed up.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
from numpy.typing import NDArray
from torch import Tensor

from selfvitmil.annotations import Annotation, box_coverage, read_annotations
from selfvitmil.bags import Bag
from selfvitmil.cohort import SlideRow
from selfvitmil.cohort.camelyon16 import has_all_lesions
from selfvitmil.cohort.table import listing
from selfvitmil.errors import ArtefactError, BagError, CohortError, ConfigError
from selfvitmil.formatting import percent
from selfvitmil.settings import SupervisedSettings
from selfvitmil.store.files import read_json_lines, write_bytes, write_text
from selfvitmil.tiles import TileTable, boxes_l0, read_tiles

TUMOUR, NORMAL, LEFT_OUT = 1, 0, -1

Labels = NDArray[np.int8]
Indices = NDArray[np.int64]
Coverage = NDArray[np.floating]


@dataclass(frozen=True)
class AnnotatedSlide:
    """A training or validation slide with its label and its annotated lesions."""

    slide: str
    label: int
    """1 for tumour, else 0."""
    patient: str
    path: Path
    table: Path | None
    """Tile table; None where only embeddings of another tool's tiles exist (probe only)."""
    annotation: Path | None = None
    """Annotation file of its lesions; None uses the overlap stored in the tile table."""
    mpp: float | None = None
    """Microns per level-0 pixel from the cohort; overrides the slide's own value."""
    lesions_complete: bool = True
    """Whether all of its lesions are annotated, as far as is known."""

    @classmethod
    def of(cls, row: SlideRow, label: int, table: Path | None) -> AnnotatedSlide:
        """Return the slide of a cohort row."""
        return cls(row.slide, label, row.patient, row.path, table, row.annotation, row.mpp, has_all_lesions(row))


@dataclass(frozen=True, eq=False)
class LabelledTiles:
    """A slide and the labels of its tiles."""

    slide: AnnotatedSlide
    labels_N: Labels
    """1 tumour, 0 normal, -1 excluded; rows as in the tile table."""


# ---------------------------------------------------------------------------------------------------- one slide


def coverage_of_table(table: TileTable, annotation: Sequence[Annotation] | None) -> Coverage | None:
    """Return the fraction of each tile inside annotated tumour; without annotations that of the tile table, or None."""
    return table.annotated if annotation is None else box_coverage(annotation, table.boxes_l0)


def coverage_of_bag(bag: Bag, annotation: Sequence[Annotation] | None) -> Coverage | None:
    """Return the same for the tiles of a feature file; raise BagError where it has no level-0 coordinates."""
    if annotation is None:
        return None
    if bag.coords is None or bag.unit != "l0" or bag.tile_extent is None:
        raise BagError(
            f"{bag.slide}: the feature file has no tile coordinates in level-0 pixels",
            "they are needed to compare tiles with the annotations",
            "Use feature files written by selfvitmil or TRIDENT",
            code="bag-without-coords",
        )
    return box_coverage(annotation, boxes_l0(bag.coords.astype(np.int64), bag.tile_extent))


def label_by_coverage(
    slide: str, number: int, coverage_N: Coverage | None, positive: bool, min_overlap: float, use_unannotated: bool
) -> Labels:
    """Return 1 (tumour), 0 (normal) or -1 (excluded) for every tile, by its overlap with annotated tumour."""
    if not positive:
        _check_negative(slide, coverage_N)
        return np.full(number, NORMAL, dtype=np.int8)
    labels_N = np.full(number, LEFT_OUT, dtype=np.int8)
    # An annotation without tumour in a positive slide means that its lesions were not annotated.
    if coverage_N is None or not coverage_N.any():
        return labels_N
    if use_unannotated:
        labels_N[coverage_N == 0] = NORMAL
    labels_N[(coverage_N > 0) & (coverage_N >= min_overlap)] = TUMOUR
    return labels_N


def _check_negative(slide: str, coverage_N: Coverage | None) -> None:
    if coverage_N is not None and coverage_N.any():
        raise CohortError(
            f"{slide}: labelled as negative, but its annotation contains tumour",
            f"{int((coverage_N > 0).sum())} of its tiles would have contradictory labels",
            "Correct the label or the annotation in cohort.csv",
            code="tumour-in-negative-slide",
        )


# ---------------------------------------------------------------------------------------------------- many slides


def label_slides(
    slides: Sequence[AnnotatedSlide], settings: SupervisedSettings, bags: Mapping[str, Bag] | None = None
) -> tuple[list[LabelledTiles], list[str]]:
    """Return the tile labels of all slides that have any, and notes on excluded slides.

    With `bags` the rows are those of the feature files: where there is a tile table as well, both must list the same
    tiles in the same order.
    """
    labelled: list[LabelledTiles] = []
    bare: list[str] = []
    grazed: list[str] = []
    for slide in slides:
        labels_N, annotated = _labels_of(slide, settings, None if bags is None else bags[slide.slide])
        if (labels_N != LEFT_OUT).any():
            labelled.append(LabelledTiles(slide, labels_N))
        if slide.label and not (labels_N == TUMOUR).any():
            (grazed if annotated else bare).append(slide.slide)
    notes: list[str] = []
    if bare:
        notes.append(f"{len(bare)} positive slides have no annotated tumour and are excluded: {listing(bare)}")
    if grazed:
        share = f"{percent(settings.min_overlap)} tumour"
        notes.append(f"{len(grazed)} positive slides have no tile of at least {share}: {listing(grazed)}")
    return labelled, notes


def _labels_of(slide: AnnotatedSlide, settings: SupervisedSettings, bag: Bag | None) -> tuple[Labels, bool]:
    """Return the labels of a slide's tiles, and whether annotated tumour overlaps any of them."""
    if slide.label not in (0, 1):
        raise ConfigError(
            f"{slide.slide}: label {slide.label}",
            "the supervised baseline is binary: tumour (1) and normal (0)",
            "Compare without it",
            code="not-binary",
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
        raise ConfigError(
            f"{slide.slide}: has no tile table",
            "it is needed for the tile labels",
            "Run `selfvitmil tile`",
            code="no-tile-table",
        )
    # Tissue outside annotations is normal only where all lesions are annotated.
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
            f"{bag.slide}: its embeddings do not match its tile table",
            f"the feature file lists {stored}, the table {len(table)}, and they must be the same in the same order",
            "Embed the slide again",
            code="tile-table-mismatch",
        )


def sample_rows(labels_N: Labels, most: int, generator: np.random.Generator) -> Indices:
    """Return the indices of labelled rows, at most `most` per class, in ascending order."""
    chosen: list[Indices] = []
    for label in (NORMAL, TUMOUR):
        rows = np.flatnonzero(labels_N == label)
        chosen.append(rows if len(rows) <= most else generator.choice(rows, most, replace=False))
    return np.sort(np.concatenate(chosen))


def check_sides(training: Sequence[LabelledTiles], validation: Sequence[LabelledTiles]) -> None:
    """Raise where a class has no tiles, or where a patient is in both training and validation."""
    shared = sorted({each.slide.patient for each in training} & {each.slide.patient for each in validation})
    if shared:
        raise CohortError(
            f"patients in both training and validation: {listing(shared)}",
            "slides of one patient are correlated (data leakage)",
            "Split by patient",
            code="patient-in-several-splits",
        )
    for name, side in (("training", training), ("validation", validation)):
        if not any((each.labels_N == TUMOUR).any() for each in side):
            raise ConfigError(
                f"no tumour tile in the {name} slides",
                "the supervised baseline is trained on annotated tumour regions"
                if name == "training"
                else "its hyperparameters are chosen on tiles of validation slides",
                "Add annotations of positive slides (ASAP XML or QuPath GeoJSON) in the column annotation of cohort.csv"
                + (", or raise train.validation" if name == "validation" else ""),
                code="no-tumour-tiles",
            )
        if not any((each.labels_N == NORMAL).any() for each in side):
            raise ConfigError(
                f"no normal tile in the {name} slides",
                "there is no negative slide among them",
                "Add negative slides; or, if all lesions are annotated, use --supervised.use-unannotated",
                code="no-normal-tiles",
            )


FORMAT_VERSION = 1
WEIGHTS, CONFIG, METRICS = "model.safetensors", "config.json", "metrics.jsonl"


# ---------------------------------------------------------------------------------------------------- model folders


def write_model(
    folder: Path,
    kind: str,
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any],
    history: Iterable[Mapping[str, Any]],
) -> None:
    """Write a model folder; the same model gives byte-identical weights and config."""
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    weights = safetensors.torch.save(plain, metadata={"format": "pt"})
    write_bytes(folder / WEIGHTS, weights)
    write_text(folder / METRICS, "".join(json.dumps(line) + "\n" for line in history))
    head = {"kind": kind, "format_version": FORMAT_VERSION, "weights_sha256": hashlib.sha256(weights).hexdigest()}
    write_text(folder / CONFIG, json.dumps({**head, **config}, indent=2, sort_keys=True) + "\n")


def read_config(folder: Path, kind: str) -> dict[str, Any]:
    """Return the config of a model; raise ArtefactError where there is none of this kind."""
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        info = (config["kind"], config["format_version"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _unreadable(folder, f"{CONFIG} is missing or damaged ({type(error).__name__})") from None
    if info != (kind, FORMAT_VERSION):
        raise _unreadable(folder, f"it is a {info[0]} in format {info[1]}, expected a {kind} in {FORMAT_VERSION}")
    return config


def read_model(folder: Path, kind: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return weights and config of a model written by `write_model`; raise ArtefactError if invalid."""
    config = read_config(folder, kind)
    try:
        weights = (folder / WEIGHTS).read_bytes()
        if hashlib.sha256(weights).hexdigest() != config["weights_sha256"]:
            raise ValueError(f"{WEIGHTS} is damaged, or not the one that {CONFIG} describes")
        return safetensors.torch.load(weights), config
    except OSError:
        raise _unreadable(folder, f"{WEIGHTS} is missing") from None
    except (ValueError, KeyError, safetensors.SafetensorError) as error:
        raise _unreadable(folder, str(error)) from None


def read_history(folder: Path) -> tuple[dict[str, Any], ...]:
    """Return the lines of `metrics.jsonl`; raise ArtefactError where one cannot be read, since it was written whole."""
    lines, damaged = read_json_lines(folder / METRICS)
    if damaged or not lines:
        raise _unreadable(folder, f"{METRICS} is damaged or missing")
    return tuple(lines)


def _unreadable(folder: Path, why: str) -> ArtefactError:
    return ArtefactError(
        f"{folder.name}: not a readable model", why, "Remove the folder and train it again", code="unreadable-model"
    )
