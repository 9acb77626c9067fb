"""The map of a slide: a score for every tile with its place, and what the model said of the whole slide.

File layout (version 1), `maps/<model>/<slide>.h5`: `coords` (N, 2) int64 top left corners in level-0 pixels; `grid`
(N, 2) int32, column and row of each tile; `score` (N,) float32 from 0 to 1, what pictures show; `detection` (N,)
float32, which compares across slides; under `columns/` what they were made from, of `attention`, `instance`, `product`
and `effect` those that the method has; `annotated` (N,) float32 where the slide has an annotation. File attributes
`schema`, `format_version`, `made_from`, `frame` and `told` (both JSON). Equal maps give equal bytes.

N tiles.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from selfvitmil.cohort.positive_class import is_negative_name
from selfvitmil.cohort.table import check_slide_name
from selfvitmil.errors import ArtefactError
from selfvitmil.store.failures import without_folders
from selfvitmil.store.files import atomic_path
from selfvitmil.tiles import boxes_l0
from selfvitmil.untrusted import open_hdf5

SCHEMA = "selfvitmil.map"
FORMAT_VERSION = 1
MAIN_METHOD = "self-vit-mil"
"""Stands first, and for the study, where there are maps or results of several methods."""
COLUMNS = ("attention", "instance", "product", "effect")
"""What a map may be made from: weight in the bag, probability of the tile alone, their product, and what the slide's
probability loses when the tile is taken out."""

Floats = NDArray[np.float32]


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
class Verdict:
    """What the model said of the slide; the very numbers of the evaluation."""

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
    """Name of the class that the map shows evidence for."""
    split: str
    """Whose models made it."""
    part: str
    """`test`, `val` or `train`: whether these models were trained on the slide; `new` for slides of no split."""
    seeds: tuple[int, ...]

    @property
    def is_positive(self) -> bool:
        """Whether the decision is the class that the map shows, and of several classes none that means negative."""
        means_negative = len(self.classes) > 2 and is_negative_name(self.decision)
        return self.decision == self.shown and not means_negative

    @property
    def shown_probability(self) -> float:
        """Probability of the class that the map shows."""
        if len(self.probability) == 1:
            return self.probability[0]
        return self.probability[self.classes.index(self.shown)]


@dataclass(frozen=True, eq=False)
class SlideMap:
    """The map of one slide by one model."""

    slide: str
    model: str
    """Name of its folder under maps/."""
    method: str
    """The aggregator."""
    kind: str
    """What `score` was made from: one of `COLUMNS`."""
    scale: str
    """How: `winsor`, `zero-outliers`, `percentile` or `none`."""
    gated: bool
    """Whether scores of slides that were not found positive are 0."""
    frame: Frame
    verdict: Verdict
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
    details: Mapping[str, Any] = field(default_factory=dict)
    """Encoder, tiling, why this `kind` is shown (`shown_because`) and the like, for people."""

    def __len__(self) -> int:
        return len(self.coords_l0)

    @property
    def only_ranks(self) -> bool:
        """Whether scores only rank the tiles within the slide: it is not called positive, so no region is a lesion."""
        return not self.verdict.is_positive

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

    def heat_map(self, values: Floats | None = None) -> Floats:
        """[row, column] of the scores, or of other (N,) values; NaN where there is no tile."""
        columns, rows = self.grid.max(axis=0, initial=-1) + 1
        picture = np.full((rows, columns), np.nan, np.float32)
        picture[self.grid[:, 1], self.grid[:, 0]] = self.score if values is None else values
        return picture


def main_first(model: str) -> tuple[bool, str]:
    """Sorts names of models: those of the main method, then the others, by the alphabet."""
    return MAIN_METHOD not in model, model


# ---------------------------------------------------------------------------------------------------- files


def write_map(path: Path, slide_map: SlideMap, made_from: str) -> None:
    """Write atomically; equal maps give equal bytes."""
    told = {
        "slide": slide_map.slide,
        "model": slide_map.model,
        "method": slide_map.method,
        "kind": slide_map.kind,
        "scale": slide_map.scale,
        "gated": slide_map.gated,
        "verdict": asdict(slide_map.verdict),
        "warnings": list(slide_map.warnings),
        "details": dict(slide_map.details),
    }
    with atomic_path(path) as temporary, h5py.File(temporary, "w") as file:
        file.attrs["schema"] = SCHEMA
        file.attrs["format_version"] = FORMAT_VERSION
        file.attrs["made_from"] = made_from
        file.attrs["frame"] = json.dumps(asdict(slide_map.frame))
        file.attrs["told"] = json.dumps(told, ensure_ascii=False)
        file.create_dataset("coords", data=slide_map.coords_l0.astype(np.int64))
        file.create_dataset("grid", data=slide_map.grid)
        for name, values in (("score", slide_map.score), ("detection", slide_map.detection)):
            file.create_dataset(name, data=values.astype(np.float32))
        for name in COLUMNS:
            if name in slide_map.columns:
                file.create_dataset(f"columns/{name}", data=slide_map.columns[name].astype(np.float32))
        if slide_map.annotated is not None:
            file.create_dataset("annotated", data=slide_map.annotated.astype(np.float32))


def read_map(path: Path) -> SlideMap:
    """Read a map; ArtefactError where the file is damaged or of another version."""
    try:
        with open_hdf5(path) as file:
            slide_map = _read(file)
    except (OSError, KeyError, ValueError, TypeError) as error:
        why = without_folders(str(error)).strip("'\"")
        raise ArtefactError(f"{path.name}: not a readable map", why, "Remove it and localize again") from None
    if not all(len(values) == len(slide_map) for values in (slide_map.score, slide_map.detection)):
        raise ArtefactError(f"{path.name}: not a readable map", "its parts differ in length", "Localize again")
    return slide_map


def _read(file: Any) -> SlideMap:
    _check_version(file)
    told, frame = json.loads(file.attrs["told"]), json.loads(file.attrs["frame"])
    check_slide_name(told["slide"])
    return SlideMap(
        slide=told["slide"],
        model=told["model"],
        method=told["method"],
        kind=told["kind"],
        scale=told["scale"],
        gated=told["gated"],
        frame=Frame(**{**frame, "size_l0": tuple(frame["size_l0"])}),
        verdict=_verdict(told["verdict"]),
        coords_l0=file["coords"][:],
        score=file["score"][:],
        detection=file["detection"][:],
        columns={name: values[:] for name, values in file.get("columns", {}).items()},
        annotated=file["annotated"][:] if "annotated" in file else None,
        warnings=tuple(told["warnings"]),
        details=told["details"],
    )


def map_made_from(path: Path) -> str | None:
    """What a map on disk was made from; None where there is none, or none that can be read."""
    try:
        with open_hdf5(path) as file:
            _check_version(file)
            return str(file.attrs["made_from"])
    except (OSError, KeyError, ValueError):
        return None


def _check_version(file: Any) -> None:
    schema, version = file.attrs.get("schema"), file.attrs.get("format_version")
    if schema != SCHEMA or version != FORMAT_VERSION:
        raise ValueError(
            f"it is {schema or 'no file of ours'}, version {version}, not {SCHEMA}, version {FORMAT_VERSION}"
        )


def _verdict(told: Mapping[str, Any]) -> Verdict:
    plain: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in told.items()}
    return Verdict(**plain)
