"""Export feature files to other tools: CLAM, STAMP, AnnData, and TRIDENT's layout in another precision.

Input: a folder of feature files of any known kind; output: a folder that the other tool opens. Our own files already
have TRIDENT's layout; exporting to it is for tools that do not cast float16. Writes are atomic; files of the same name
are replaced.

N instances, D dimensions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from selfvitmil.bags.files import Bag, Features, find_bags, read_bag
from selfvitmil.errors import BagError, ConfigError
from selfvitmil.store.files import atomic_path, write_hdf5

Tool = Literal["clam", "stamp", "anndata", "trident"]
Dtype = Literal["float16", "float32"]

TOOLS: Mapping[str, Dtype] = {"clam": "float32", "stamp": "float16", "anndata": "float32", "trident": "float32"}
"""Tools, and the default precision of each."""
DTYPES = ("float16", "float32")
ATTRIBUTES = (
    "patch_size",
    "patch_size_level0",
    "level0_magnification",
    "target_magnification",
    "overlap",
    "level0_width",
    "level0_height",
    "mpp",
    "level0_mpp",
)
"""Attributes of `coords` that TRIDENT's readers use, and the exact resolution."""


# ---------------------------------------------------------------------------------------------------- a folder of bags


@dataclass(frozen=True)
class ExportJob:
    """Input of one worker call: the slide to export."""

    slide: str
    path: Path
    """Feature file."""
    folder: Path
    """Output folder."""
    to: Tool
    dtype: Dtype


@dataclass(frozen=True)
class ExportResult:
    """Result for one slide."""

    num_tiles: int


def plan_export(source: Path, folder: Path, to: str, dtype: str | None = None) -> dict[str, ExportJob]:
    """Return a job for every feature file in `source`; raise ConfigError for invalid choices."""
    tool, precision = _check_choice(to, dtype)
    here, there = source.resolve(), folder.resolve()
    if here == there or here in there.parents or there in here.parents:
        raise ConfigError(
            f"{folder.name}: the export folder overlaps the folder of the feature files",
            "exported files could replace them, or be mistaken for them",
            "Choose a folder outside it",
            code="export-folder-overlap",
        )
    return {name: ExportJob(name, path, folder, tool, precision) for name, path in find_bags(source).items()}


def export_slide(job: ExportJob) -> ExportResult:
    """Write the other tool's files of one slide. Raises SelfVitMilError on failure."""
    bag = read_bag(job.path)
    writers = {"clam": export_clam, "stamp": export_stamp, "anndata": export_anndata, "trident": export_trident}
    writers[job.to](bag, job.folder, job.dtype)
    return ExportResult(len(bag))


def _check_choice(to: str, dtype: str | None) -> tuple[Any, Any]:
    if to not in TOOLS or dtype not in (None, *DTYPES):
        raise ConfigError(
            f"no export to {to} in {dtype or 'its default precision'}",
            how=f"Choose one of {', '.join(TOOLS)}, and {' or '.join(DTYPES)}",
            code="unknown-export",
        )
    if to == "clam" and dtype == "float16":
        raise ConfigError(
            "CLAM cannot train on float16",
            "it does not cast, and its networks are float32",
            "Leave out --dtype",
            code="clam-needs-float32",
        )
    if to == "anndata" and find_spec("anndata") is None:
        raise ConfigError(
            "anndata is not installed",
            "it is needed to write these files",
            "pip install 'selfvitmil[anndata]'",
            code="missing-package",
        )
    return to, dtype or TOOLS[to]


# ---------------------------------------------------------------------------------------------------- one bag


def export_clam(bag: Bag, folder: Path, dtype: Dtype = "float32") -> None:
    """Write CLAM's `h5_files/<slide>.h5` and `pt_files/<slide>.pt`; float32 only, since CLAM does not cast."""
    import torch

    _check_choice("clam", dtype)
    features_ND = _features(bag, dtype)
    with write_hdf5(folder / "h5_files" / f"{bag.slide}.h5") as file:
        file.create_dataset("features", data=features_ND)
        if bag.coords is not None:
            file.create_dataset("coords", data=_corners_l0(bag).astype(np.int32))
    with atomic_path(folder / "pt_files" / f"{bag.slide}.pt") as temporary:
        torch.save(torch.as_tensor(features_ND), temporary)


def export_stamp(bag: Bag, folder: Path, dtype: Dtype = "float16") -> None:
    """Write STAMP's `<slide>.h5`: `feats`, and `coords` in microns."""
    slide_mpp, size_px = bag.attributes.get("level0_mpp"), bag.attributes.get("patch_size")
    if bag.coords is None or bag.mpp is None or slide_mpp is None or size_px is None:
        raise BagError(
            f"{bag.slide}: coordinates in microns are not available",
            "the feature file has no microns-per-pixel value",
            "Export from feature files written by selfvitmil",
            code="bag-without-mpp",
        )
    with write_hdf5(folder / f"{bag.slide}.h5") as file:
        file.create_dataset("feats", data=_features(bag, dtype))
        file.create_dataset("coords", data=(np.asarray(bag.coords) * slide_mpp).astype(np.float32))
        file.attrs.update({"extractor": bag.encoder, "unit": "um", "feat_type": "tile"})
        file.attrs.update({"tile_size_um": size_px * bag.mpp, "tile_size_px": size_px})


def export_trident(bag: Bag, folder: Path, dtype: Dtype = "float32") -> None:
    """Write TRIDENT's `features_<encoder>/<slide>.h5`, and `patches/<slide>_patches.h5` with the coordinates only."""
    corners = _corners_l0(bag)
    known = {key: bag.attributes[key] for key in ATTRIBUTES if key in bag.attributes}
    attributes = {**known, "name": bag.slide, "savetodir": ""}
    encoder = re.sub(r"[^A-Za-z0-9._-]", "_", bag.encoder) or "unknown"
    places = {f"patches/{bag.slide}_patches.h5": None, f"features_{encoder}/{bag.slide}.h5": _features(bag, dtype)}
    for place, features_ND in places.items():
        with write_hdf5(folder / place) as file:
            if features_ND is not None:
                features = file.create_dataset("features", data=features_ND)
                features.attrs.update({"name": bag.slide, "savetodir": "", "encoder": bag.encoder})
            file.create_dataset("coords", data=corners).attrs.update(attributes)


def export_anndata(bag: Bag, folder: Path, dtype: Dtype = "float32") -> None:
    """Write `<slide>.h5ad`: a row per tile in `X`, level-0 top left corners in `obsm["spatial"]`, as in LazySlide.

    `obs` has the tile's row in its table (`tile_id`) and its slide (`library_id`), `uns` the metadata of the slide and
    its tiles: `slide`, `encoder`, `mpp`, `slide_mpp`, `tile_px`, and the tile's edge in level-0 pixels `tile_l0`.
    """
    _check_choice("anndata", dtype)
    import anndata  # pyright: ignore[reportMissingTypeStubs]
    import pandas as pd  # pyright: ignore[reportMissingTypeStubs]

    about = {
        "slide": bag.slide,
        "encoder": bag.encoder or None,
        "mpp": bag.mpp,
        "slide_mpp": bag.attributes.get("level0_mpp"),
        "tile_px": bag.attributes.get("patch_size"),
        "tile_l0": bag.tile_extent,
    }
    rows = np.arange(len(bag))
    table = anndata.AnnData(
        X=_features(bag, dtype),
        obs=pd.DataFrame(
            {"tile_id": rows, "library_id": pd.Categorical([bag.slide] * len(bag))},
            index=pd.Index([f"{bag.slide}_{row}" for row in rows]),
        ),
        uns={key: value for key, value in about.items() if value is not None},
    )
    table.obsm["spatial"] = _corners_l0(bag)
    with atomic_path(folder / f"{bag.slide}.h5ad") as temporary:
        table.write_h5ad(temporary)


def _features(bag: Bag, dtype: Dtype) -> Features:
    with np.errstate(over="ignore"):
        features_ND = np.ascontiguousarray(bag.features_ND, dtype=dtype)
    if dtype == "float16" and bag.features_ND.dtype != np.float16:
        lost = np.isinf(features_ND) & np.isfinite(bag.features_ND)
        if lost.any():
            raise BagError(
                f"{bag.slide}: {lost.sum()} values do not fit into float16",
                "they are beyond 65504",
                "Export with --dtype float32",
                code="float16-overflow",
            )
    return features_ND


def _corners_l0(bag: Bag) -> NDArray[np.int64]:
    if bag.coords is None or bag.unit != "l0":
        why = (
            "it has no coordinates" if bag.coords is None else "its coordinates are microns, without microns per pixel"
        )
        raise BagError(
            f"{bag.slide}: the feature file has no level-0 coordinates",
            why,
            "Export from feature files of selfvitmil, TRIDENT or CLAM (.h5)",
            code="bag-without-coords",
        )
    return np.asarray(bag.coords, dtype=np.int64)
