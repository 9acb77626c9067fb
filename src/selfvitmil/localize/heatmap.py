"""The heatmap of a slide: a score for every tile with its position, the model's prediction for the slide, and the file.

File layout (version 1), `maps/<model>/<slide>.h5`: `coords` (N, 2) int64 top left corners in level-0 pixels; `grid`
(N, 2) int32, column and row of each tile; `score` (N,) float32 from 0 to 1, what pictures show; `detection` (N,)
float32, which compares across slides; under `columns/` the evidence behind them, of `attention`, `instance`,
`product` and `effect` those that the method has; `annotated` (N,) float32 where the slide has an annotation. File
attributes `schema`, `format_version`, `made_from`, `frame` and `told` (both JSON; the prediction is `told["verdict"]`).
Equal heatmaps give equal bytes.

Positions of tiles come from the feature file, whoever wrote it. Ours have everything; TRIDENT's have tiles in level-0
pixels but no microns per pixel, STAMP's have microns but no pixels, CLAM's may have corners alone. What a file lacks is
taken from the slide's tile table, from the cohort, or from the slide itself; where none has it, BagError says what to
give.

N tiles.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from selfvitmil.annotations import Annotation, box_coverage
from selfvitmil.bags import Bag
from selfvitmil.cohort.table import check_slide_name, is_negative_name
from selfvitmil.errors import AnnotationError, ArtefactError, BagError, MissingMppError, SlideError
from selfvitmil.slides import SlideRef
from selfvitmil.store.failures import without_folders
from selfvitmil.store.files import open_hdf5, write_hdf5
from selfvitmil.tiles import TileTable, boxes_l0

SCHEMA = "selfvitmil.map"
FORMAT_VERSION = 1
NO_SLIDE = "a grid of tiles, for want of the slide (add slides with `selfvitmil check STUDY --slides-folder DIR`)"
"""What is drawn in place of a slide whose file is not at hand."""
MAIN_METHOD = "self-vit-mil"
"""Comes first where there are heatmaps or results of several methods."""
COLUMNS = ("attention", "instance", "product", "effect")
"""Evidence that a heatmap may show: weight in the bag, probability of the tile alone, their product, and the drop of
the slide's probability when the tile is left out."""
STORED = ("slide", "model", "method", "kind", "scale", "gated")
"""Fields of a heatmap that its file stores as they are."""

Floats = NDArray[np.float32]
SLIP = 0.01
"""Share of the slide's longer edge by which a pen may slip over it: points so near do not count as outside."""
MOST_OUTSIDE = 0.1
"""Share of an annotation's points that may lie outside before it is taken for another slide's."""


@dataclass(frozen=True)
class Frame:
    """Where the tiles lie."""

    slide_mpp: float
    """Microns per level-0 pixel."""
    size_l0: tuple[int, int]
    """(width, height) of the slide."""
    extent_l0: float
    """Edge of a tile."""
    stride_l0: float
    """From one tile to the next; less than the extent where tiles overlap."""
    tile_mpp: float
    """Microns per pixel that the encoder saw."""
    size_px: int
    """Edge of a tile as the encoder saw it."""


@dataclass(frozen=True)
class SlidePrediction:
    """The model's prediction for the slide; the same numbers as in the evaluation."""

    probability: tuple[float, ...]
    """Of being positive, or of each of several classes; mean over the seeds."""
    max_probability: tuple[float, ...] | None
    bag_probability: tuple[float, ...] | None
    decision: str
    """Name of the class."""
    threshold: float | None
    threshold_from: str
    classes: tuple[str, ...]
    shown: str
    """Name of the class that the heatmap shows evidence for."""
    split: str
    """The split whose models predict."""
    part: str
    """`test`, `val` or `train`: whether these models were trained on the slide; `new` for slides of no split."""
    seeds: tuple[int, ...]
    value_words: str = ""
    """The prediction in words, with another outcome than classes. `probability` is then the share of validation slides
    with a lower prediction, `classes` are low and high."""

    @property
    def is_positive(self) -> bool:
        """Whether the decision is the class that the heatmap shows, and of several classes none that means negative."""
        means_negative = len(self.classes) > 2 and is_negative_name(self.decision)
        return self.decision == self.shown and not means_negative

    @property
    def shown_probability(self) -> float:
        """Probability of the class that the heatmap shows."""
        if len(self.probability) == 1:
            return self.probability[0]
        return self.probability[self.classes.index(self.shown)]


@dataclass(frozen=True, eq=False)
class Heatmap:
    """The heatmap of one slide by one model."""

    slide: str
    model: str
    """Name of its folder under maps/."""
    method: str
    """The aggregator."""
    kind: str
    """The evidence behind `score`: one of `COLUMNS`."""
    scale: str
    """Its scale: `winsor`, `zero-outliers`, `percentile` or `none`."""
    gated: bool
    """Whether scores of slides that are not called positive are 0."""
    frame: Frame
    prediction: SlidePrediction
    coords_l0: NDArray[np.int64]
    """(N, 2) top left corners (x, y)."""
    score: Floats
    """(N,) from 0 to 1."""
    detection: Floats
    """(N,) from 0 to 1: score times the slide's probability, so that points of different slides can be ranked."""
    columns: Mapping[str, Floats]
    annotated: Floats | None = None
    """(N,) share of each tile inside annotated tumour."""
    warnings: tuple[str, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Encoder, tiling, why this `kind` is shown (`shown_because`) and the like, for people."""

    def __len__(self) -> int:
        return len(self.coords_l0)

    @property
    def only_ranks(self) -> bool:
        """Whether scores only rank the tiles within the slide: it is not called positive, so no region is a lesion."""
        return not self.prediction.is_positive

    @cached_property
    def grid(self) -> NDArray[np.int32]:
        """(N, 2) column and row of each tile."""
        if not len(self):
            return np.empty((0, 2), np.int32)
        return np.rint((self.coords_l0 - self.coords_l0.min(axis=0)) / self.frame.stride_l0).astype(np.int32)

    @property
    def origin_l0(self) -> tuple[int, int]:
        """Top left corner of the grid's first cell."""
        x, y = self.coords_l0.min(axis=0)
        return int(x), int(y)

    @property
    def boxes_l0(self) -> NDArray[np.float64]:
        """(N, 4) the tiles as (x0, y0, x1, y1)."""
        return boxes_l0(self.coords_l0, self.frame.extent_l0)

    @property
    def centres_l0(self) -> NDArray[np.float64]:
        """(N, 2)."""
        return self.coords_l0.astype(np.float64) + self.frame.extent_l0 / 2

    def as_grid(self, values: Floats | None = None) -> Floats:
        """Return the scores, or other (N,) values, as an array [row, column]; NaN where there is no tile."""
        columns, rows = self.grid.max(axis=0, initial=-1) + 1
        picture = np.full((rows, columns), np.nan, np.float32)
        picture[self.grid[:, 1], self.grid[:, 0]] = self.score if values is None else values
        return picture


def main_first(model: str) -> tuple[bool, str]:
    """Return the sort key of a model's name: those of the main method come first, each group in alphabetical order."""
    return MAIN_METHOD not in model, model


# ---------------------------------------------------------------------------------------------------- files


def write_heatmap(path: Path, heatmap: Heatmap, made_from: str) -> None:
    """Write a heatmap atomically; equal heatmaps give equal bytes."""
    stored = {name: getattr(heatmap, name) for name in STORED}
    stored |= {
        "verdict": {key: value for key, value in asdict(heatmap.prediction).items() if key != "value_words" or value},
        "warnings": list(heatmap.warnings),
        "details": dict(heatmap.details),
    }
    with write_hdf5(path) as file:
        file.attrs["schema"] = SCHEMA
        file.attrs["format_version"] = FORMAT_VERSION
        file.attrs["made_from"] = made_from
        file.attrs["frame"] = json.dumps(asdict(heatmap.frame))
        file.attrs["told"] = json.dumps(stored, ensure_ascii=False)
        file.create_dataset("coords", data=heatmap.coords_l0.astype(np.int64))
        file.create_dataset("grid", data=heatmap.grid)
        for name, values in (("score", heatmap.score), ("detection", heatmap.detection)):
            file.create_dataset(name, data=values.astype(np.float32))
        for name in COLUMNS:
            if name in heatmap.columns:
                file.create_dataset(f"columns/{name}", data=heatmap.columns[name].astype(np.float32))
        if heatmap.annotated is not None:
            file.create_dataset("annotated", data=heatmap.annotated.astype(np.float32))


def read_heatmap(path: Path) -> Heatmap:
    """Read a heatmap; raises ArtefactError where the file is damaged or of another version."""
    try:
        with open_hdf5(path) as file:
            heatmap = _read(file)
    except (OSError, KeyError, ValueError, TypeError) as error:
        why = without_folders(str(error)).strip("'\"")
        raise ArtefactError(
            f"{path.name}: not a readable heatmap", why, "Remove it and localize again", code="unreadable-heatmap"
        ) from None
    if not all(len(values) == len(heatmap) for values in (heatmap.score, heatmap.detection)):
        raise ArtefactError(
            f"{path.name}: not a readable heatmap",
            "its parts differ in length",
            "Localize again",
            code="unreadable-heatmap",
        )
    return heatmap


def _read(file: Any) -> Heatmap:
    _check_version(file)
    stored: dict[str, Any] = json.loads(file.attrs["told"])
    frame: dict[str, Any] = json.loads(file.attrs["frame"])
    frame["size_l0"] = tuple(frame["size_l0"])
    check_slide_name(stored["slide"])
    return Heatmap(
        **{name: stored[name] for name in STORED},
        frame=Frame(**frame),
        prediction=prediction_from_json(stored["verdict"]),
        coords_l0=file["coords"][:],
        score=file["score"][:],
        detection=file["detection"][:],
        columns={name: values[:] for name, values in file.get("columns", {}).items()},
        annotated=file["annotated"][:] if "annotated" in file else None,
        warnings=tuple(stored["warnings"]),
        details=stored["details"],
    )


def heatmap_made_from(path: Path) -> str | None:
    """Return what a heatmap on disk was built from; None where there is none, or none that can be read."""
    try:
        with open_hdf5(path) as file:
            _check_version(file)
            attributes: Any = file.attrs
            return str(attributes["made_from"])
    except (OSError, KeyError, ValueError):
        return None


def _check_version(file: Any) -> None:
    schema, version = file.attrs.get("schema"), file.attrs.get("format_version")
    if schema != SCHEMA or version != FORMAT_VERSION:
        raise ValueError(
            f"it is {schema or 'no file of ours'}, version {version}, not {SCHEMA}, version {FORMAT_VERSION}"
        )


def prediction_from_json(stored: Mapping[str, Any]) -> SlidePrediction:
    """Return the prediction that a file stores; raises TypeError where a field is missing or unknown."""
    plain: dict[str, Any] = {
        key: tuple(cast("list[Any]", value)) if isinstance(value, list) else value for key, value in stored.items()
    }
    return SlidePrediction(**plain)


# ---------------------------------------------------------------------------------------------------- positions


@dataclass(frozen=True)
class SlideGeometry:
    """Resolution and size of a slide; None where unknown."""

    mpp: float | None = None
    size_l0: tuple[int, int] | None = None


@dataclass(frozen=True, eq=False)
class TilePlacement:
    """The tiles of a bag in their slide."""

    frame: Frame
    coords_l0: NDArray[np.int64]
    """(N, 2) top left corners, in the order of the bag."""
    warnings: tuple[str, ...] = ()


def place_tiles(
    bag: Bag, table: TileTable | None = None, look: Callable[[], SlideGeometry] | None = None
) -> TilePlacement:
    """Return the positions of a bag's tiles; `table` is its tile table, `look` asks cohort and slide if needed."""
    if bag.coords is None:
        raise BagError(
            f"{bag.slide}: its feature file has no coordinates",
            "a heatmap needs the position of each embedding",
            "Give feature files with coordinates (.h5), or tile and embed the slide again",
            code="bag-without-coords",
        )
    facts = _facts(bag, table, look)
    if facts.mpp is None or facts.size_l0 is None:
        missing = "microns per pixel" if facts.mpp is None else "size in pixels"
        raise BagError(
            f"{bag.slide}: {missing} is unknown: neither the feature file nor anything else has it",
            "so the positions of its tiles are undefined",
            "Put the slide's file where cohort.csv names it; microns per pixel may also stand in its column mpp",
            code="unknown-slide-size",
        )
    pixel = facts.mpp if bag.unit == "um" else 1.0
    coords_l0 = np.rint(np.asarray(bag.coords, np.float64) / pixel).astype(np.int64)
    extent, size_px, warnings = _tile_size(bag, coords_l0, pixel)
    overlap_px = float(bag.attributes.get("overlap", 0))
    frame = Frame(
        slide_mpp=facts.mpp,
        size_l0=facts.size_l0,
        extent_l0=extent,
        stride_l0=extent * (size_px - overlap_px) / size_px,
        tile_mpp=bag.mpp or facts.mpp * extent / size_px,
        size_px=size_px,
    )
    if (coords_l0 < 0).any() or (coords_l0 >= facts.size_l0).any():
        raise BagError(
            f"{bag.slide}: tiles of its feature file lie outside the slide",
            f"corners go to {tuple(coords_l0.max(axis=0).tolist())}, the slide has {facts.size_l0} pixels",
            "See whether the feature file is of another slide, or of another scan of it",
            code="tiles-outside-slide",
        )
    return TilePlacement(frame, coords_l0, warnings)


def _facts(bag: Bag, table: TileTable | None, look: Callable[[], SlideGeometry] | None) -> SlideGeometry:
    stored = bag.attributes
    mpp = float(stored["level0_mpp"]) if "level0_mpp" in stored else None
    size = None
    if "level0_width" in stored and "level0_height" in stored:
        size = int(stored["level0_width"]), int(stored["level0_height"])
    if table is not None:
        mpp, size = mpp or table.slide_mpp, size or table.size_l0
    if look is not None and (mpp is None or size is None):
        seen = look()
        mpp, size = mpp or seen.mpp, size or seen.size_l0
    return SlideGeometry(mpp, size)


def _tile_size(bag: Bag, coords_l0: NDArray[np.int64], pixel: float) -> tuple[float, int, tuple[str, ...]]:
    """Return the edge of a tile in level-0 pixels, as the encoder saw it, and warnings."""
    size_px = bag.attributes.get("patch_size", bag.attributes.get("tile_size_px"))
    if bag.tile_extent is not None:
        extent = bag.tile_extent / pixel
        return extent, int(size_px or round(extent)), ()
    steps = np.concatenate([np.diff(np.unique(axis)) for axis in coords_l0.T])
    if not len(steps):
        raise BagError(
            f"{bag.slide}: its feature file does not have the size of its tiles",
            "and with one tile it cannot be measured",
            "Give feature files of TRIDENT, STAMP or selfvitmil",
            code="unknown-tile-size",
        )
    extent = float(steps.min())
    warning = f"its feature file does not have the size of tiles: taken as their least distance, {extent:g} px"
    return extent, int(size_px or round(extent)), (warning,)


def read_slide_geometry(ref: SlideRef) -> SlideGeometry:
    """Return size and microns per pixel of a slide; where it cannot be opened, only the value that was given."""
    try:
        with ref.open() as slide:
            try:
                return SlideGeometry(slide.mpp, slide.size_l0)
            except MissingMppError:
                return SlideGeometry(None, slide.size_l0)
    except SlideError:
        return SlideGeometry(ref.mpp or ref.default_mpp, None)


# ---------------------------------------------------------------------------------------------------- annotations


def check_annotations(regions: tuple[Annotation, ...], size_l0: tuple[int, int], name: str) -> tuple[str, ...]:
    """Return warnings on annotations that leave the slide; raises AnnotationError where they are another slide's.

    Heatmaps, overlays and lesion scores share this rule: points outside by more than `SLIP` are warned of, and a file
    with a larger share of them than `MOST_OUTSIDE` is refused. What lies outside counts nowhere.
    """
    points = np.concatenate([ring for each in regions for ring in each.rings] or [np.empty((0, 2))])
    if not len(points):
        return (f"{name} has no contour",)
    slack = SLIP * max(size_l0)
    share = float(((points < -slack) | (points > np.asarray(size_l0) + slack)).any(axis=1).mean())
    if share > MOST_OUTSIDE:
        raise AnnotationError(
            f"{name}: {share:.0%} of its points lie outside the slide of {size_l0[0]} x {size_l0[1]} pixels",
            "it is of another slide, or not in level-0 pixels",
            "Correct the column annotation of cohort.csv",
            code="annotation-outside-slide",
        )
    return (f"{share:.1%} of the points in {name} lie outside the slide",) if share else ()


def annotated_shares(
    placement: TilePlacement, table: TileTable | None, regions: tuple[Annotation, ...] | None
) -> tuple[Floats | None, tuple[str, ...]]:
    """Return (N,) shares of tiles inside annotated tumour: from the tile table where it has these tiles, else computed.

    None where the slide has no annotation. Warns where annotated tumour touches no tile.
    """
    shares = _from_table(placement.coords_l0, table)
    if shares is None and regions is not None:
        boxes = boxes_l0(placement.coords_l0, placement.frame.extent_l0)
        shares = box_coverage(regions, boxes).astype(np.float32)
    tumour = [each for each in regions or () if each.kind == "tumour" and each.has_area]
    if shares is not None and tumour and not shares.any():
        return shares, ("no tile lies in its annotated tumour: is the annotation of another slide?",)
    return shares, ()


def _from_table(coords_l0: NDArray[np.int64], table: TileTable | None) -> Floats | None:
    """Return the table's shares in the order of the bag, which may have fewer tiles; None where some are missing."""
    if table is None or table.annotated is None:
        return None
    rows = {(x, y): row for row, (x, y) in enumerate(table.coords_l0.tolist())}
    found = [rows.get((x, y), -1) for x, y in coords_l0.tolist()]
    return None if min(found) < 0 else table.annotated[found]
