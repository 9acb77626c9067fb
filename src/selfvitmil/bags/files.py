"""Feature files: a row per tile of a slide. Writes ours; reads ours and those of TRIDENT, CLAM, STAMP and torchmil.

Ours are HDF5 files that the other tools open unchanged: `features` (N, D) float16 and `coords` (N, 2) int64 (level-0
top left), contiguous and uncompressed, with TRIDENT's attributes on `coords`. A contiguous file can be memory-mapped
instead of read: `read_bag` returns a memory map where the file allows it.

N instances, D dimensions.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from selfvitmil.errors import BagError
from selfvitmil.store.files import load_torch, open_hdf5, write_hdf5
from selfvitmil.store.layout import patches_of
from selfvitmil.tiles import TileTable, trident_attributes

SCHEMA = "selfvitmil.bag"
FORMAT_VERSION = 1
CHECK_ROWS = 4096
FEATURE_SUFFIXES = (".h5", ".pt", ".npy")

Features = NDArray[np.floating]


@dataclass(frozen=True, eq=False)
class Bag:
    """All embeddings of a slide with their coordinates."""

    slide: str
    features_ND: Features
    """Memory-mapped and read-only where the file allows it."""
    coords: NDArray[np.float64] | NDArray[np.int64] | None
    """(N, 2) top left corners (x, y) in `unit`; None if the file has none."""
    unit: Literal["l0", "um"] = "l0"
    """Level-0 pixels, or microns (STAMP)."""
    tile_extent: float | None = None
    """Edge of a tile in `unit`."""
    mpp: float | None = None
    """Microns per tile pixel, if the file states it."""
    encoder: str = ""
    attributes: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __len__(self) -> int:
        return self.features_ND.shape[0]

    @property
    def dim(self) -> int:
        return self.features_ND.shape[1]


# ---------------------------------------------------------------------------------------------------- writing


def write_bag(path: Path, features_ND: Features, table: TileTable, encoder: str, made_from: Mapping[str, Any]) -> None:
    """Write the features of a slide, and the coordinates where TRIDENT's readers expect them.

    `path` is bags/<tiling>/features_<encoder>/<slide>.h5. Equal content gives identical bytes.
    """
    if features_ND.shape[0] != len(table):
        raise BagError(
            f"{path.name}: {features_ND.shape[0]} embeddings for {len(table)} tiles",
            "each tile needs one",
            code="bag-length-mismatch",
        )
    _write(patches_of(path, table.slide), table, None, "", {})
    _write(path, table, features_ND.astype(np.float16), encoder, made_from)


def _write(
    path: Path, table: TileTable, features_ND: Features | None, encoder: str, made_from: Mapping[str, Any]
) -> None:
    with write_hdf5(path) as file:
        if features_ND is not None:
            file.attrs["schema"] = SCHEMA
            file.attrs["format_version"] = FORMAT_VERSION
            file.attrs["made_from"] = json.dumps(made_from, sort_keys=True)
            features = file.create_dataset("features", data=features_ND)
            features.attrs.update({"name": table.slide, "savetodir": "", "encoder": encoder})
        coords = file.create_dataset("coords", data=table.coords_l0.astype(np.int64))
        coords.attrs.update({**trident_attributes(table), "mpp": table.mpp, "level0_mpp": table.slide_mpp})


# ---------------------------------------------------------------------------------------------------- reading


def is_feature_file(path: Path) -> bool:
    """Return whether a cohort names a feature file where a slide would stand."""
    return path.suffix.lower() in FEATURE_SUFFIXES


def find_bags(folder: Path) -> dict[str, Path]:
    """Return slide name -> feature file for a folder of ours, TRIDENT's, CLAM's, STAMP's or torchmil's.

    Where a slide has several, .h5 takes precedence over .npy and .pt. STAMP repeats the folders of the slides: folders
    below are searched where this one has no feature file.
    """
    places = [place for name in (".", "h5_files", "pt_files") if (place := folder / name).is_dir()]
    found: dict[str, Path] = {}
    for place in places:
        for path in sorted(place.iterdir()):
            if path.suffix in FEATURE_SUFFIXES and not path.name.startswith("."):
                found.setdefault(path.stem, path)
    found = found or _nested(folder)
    if not found:
        raise BagError(
            f"{folder.name}: no feature files",
            "the folder contains neither .h5 nor .pt nor .npy files",
            "Give the folder that contains them",
            code="no-feature-files",
        )
    return found


def _nested(folder: Path) -> dict[str, Path]:
    """Return the .h5 files in folders below; BagError where two have the same name."""
    found: dict[str, Path] = {}
    for path in sorted(folder.rglob("*.h5")):
        if path.name.startswith(".") or path.stem.endswith("_patches"):
            continue
        if path.stem in found:
            places = " and ".join(each.parent.relative_to(folder).as_posix() for each in (found[path.stem], path))
            raise BagError(
                f"{folder.name}: several feature files are named {path.name}",
                f"they are in {places}",
                "Give the folder of one encoder",
                code="ambiguous-feature-files",
            )
        found[path.stem] = path
    return found


def read_bag(path: Path) -> Bag:
    """Open a feature file of any known kind; raise BagError if it is damaged or of an unknown kind."""
    if path.suffix == ".pt":
        return _read_pt(path)
    if path.suffix == ".npy":
        return _read_npy(path)
    try:
        with open_hdf5(path) as file:
            name = next((name for name in ("features", "feats") if name in file), None)
            if name is None:
                raise KeyError(f"it has no dataset named features or feats, only {sorted(file)}")
            dataset: Any = file[name]
            bag = _with_places(Bag(path.stem, _mapped(path, dataset), None), path, file)
            if dataset.ndim == 1:  # of a whole slide; TRIDENT keeps the coordinates of its tiles beside it
                bag = replace(bag, coords=None)
    except (OSError, KeyError, ValueError) as error:
        raise _unreadable(path, error) from None
    if bag.features_ND.ndim != 2 or (bag.coords is not None and len(bag.coords) != len(bag)):
        coords = None if bag.coords is None else bag.coords.shape
        raise _unreadable(path, ValueError(f"features are {bag.features_ND.shape}, coordinates {coords}"))
    return bag


def _unreadable(path: Path, error: Exception) -> BagError:
    why = str(error).strip("'\"")
    return BagError(
        f"{path.name}: not a readable feature file", why, "Remove it and embed the slide again", code="unreadable-bag"
    )


def _mapped(path: Path, dataset: Any) -> Features:
    """Return the dataset as a read-only memory map, or read it if it is chunked or compressed."""
    if dataset.dtype.kind not in "fiu":
        raise ValueError(f"its features have the non-numeric type {dataset.dtype}")
    shape = dataset.shape
    if dataset.ndim == 3 and dataset.shape[0] == 1:  # (1, N, D) of old files
        shape = dataset.shape[1:]
    elif dataset.ndim == 1:  # (D,) of a whole slide
        shape = (1, *dataset.shape)
    offset = dataset.id.get_offset()
    if offset is None or dataset.size == 0 or not dataset.dtype.isnative:
        return dataset[:].reshape(shape)
    if offset + dataset.nbytes > os.path.getsize(path):
        raise ValueError("the file is truncated")
    return np.memmap(path, dtype=dataset.dtype, mode="r", offset=offset, shape=shape)


MAPPED_BYTES = 1 << 16
"""Coordinates from this size on are memory-mapped; processes may have a few ten thousand maps."""


def _coords(path: Path, dataset: Any) -> Features:
    """Return the coordinates (N, 2); those of large slides do not stay in memory."""
    if dataset.nbytes >= MAPPED_BYTES and dataset.dtype.kind in "fiu":
        return _mapped(path, dataset)
    return dataset[:].reshape(-1, 2) if dataset.ndim == 3 else dataset[:]


def _with_places(bag: Bag, path: Path, file: Any) -> Bag:
    """Add coordinates and tile metadata."""
    attributes = {key: _plain(value) for key, value in file.attrs.items()}
    if "coords" not in file:
        return replace(
            bag, encoder=str(attributes.get("extractor", attributes.get("encoder", ""))), attributes=attributes
        )
    coords = _coords(path, file["coords"])
    if str(attributes.get("unit", "")) == "um":  # STAMP
        extent = attributes.get("tile_size_um", attributes.get("tile_size"))
        mpp = extent / attributes["tile_size_px"] if extent and attributes.get("tile_size_px") else None
        encoder = str(attributes.get("extractor", ""))
        return replace(
            bag, coords=coords, unit="um", tile_extent=extent, mpp=mpp, encoder=encoder, attributes=attributes
        )
    if "feats" in file and "unit" not in attributes and round(_stride(coords)) == STAMP_1_PX:
        extent, scale = STAMP_1_UM, STAMP_1_UM / STAMP_1_PX
        attributes |= {"tile_size_um": extent, "tile_size_px": STAMP_1_PX}
        encoder = str(attributes.get("extractor", ""))
        return replace(
            bag, coords=coords * scale, unit="um", tile_extent=extent, mpp=scale, encoder=encoder, attributes=attributes
        )
    of_coords = {key: _plain(value) for key, value in file["coords"].attrs.items()}
    extent = of_coords.get("patch_size_level0")
    if "mpp" in of_coords and "level0_mpp" in of_coords:  # ours is exact, TRIDENT's is rounded to whole pixels
        extent = of_coords["patch_size"] * of_coords["mpp"] / of_coords["level0_mpp"]
    name = "features" if "features" in file else "feats"
    return replace(
        bag,
        coords=coords.astype(np.int64, copy=False),
        tile_extent=float(extent) if extent is not None else None,
        mpp=of_coords.get("mpp"),
        encoder=str(file[name].attrs.get("encoder", "")),
        attributes={**attributes, **of_coords},
    )


STAMP_1_PX, STAMP_1_UM = 224, 256.0
"""Edge of a tile in the first version of STAMP, whose files say neither: coordinates count these pixels."""


def _stride(coords: NDArray[Any]) -> float:
    """Return the smallest distance of tiles along x or y; 0 where there is none."""
    gaps = [np.diff(np.unique(axis)) for axis in np.asarray(coords, np.float64).T]
    return min((float(gap.min()) for gap in gaps if len(gap)), default=0.0)


def _read_npy(path: Path) -> Bag:
    """Read torchmil's arrays, without executing pickles. Its coordinates have no stated unit and are left out."""
    try:
        features_ND = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise _unreadable(path, error) from None
    if features_ND.ndim not in (1, 2) or features_ND.dtype.kind not in "fiu":
        raise _unreadable(path, ValueError(f"it is no (N, D) array of numbers, but {features_ND.shape}"))
    return Bag(path.stem, np.atleast_2d(features_ND), None)


def _plain(value: Any) -> Any:
    return cast("np.generic[Any]", value).item() if isinstance(value, np.generic) else value


def _read_pt(path: Path) -> Bag:
    """Read CLAM's tensor files, without executing pickles."""
    import torch

    try:
        tensor: Any = load_torch(path, mmap=True)
    except Exception as error:  # torch raises pickle's, zip's and its own errors here
        raise _unreadable(path, error) from None
    if isinstance(tensor, dict):
        found = cast("dict[str, Any]", tensor)
        tensor = found.get("features", found.get("feats"))
    if not isinstance(tensor, torch.Tensor) or tensor.ndim not in (2, 3):
        raise _unreadable(path, ValueError("it contains no (N, D) tensor"))
    if tensor.is_floating_point() and tensor.dtype not in (torch.float16, torch.float32, torch.float64):
        tensor = tensor.float()  # NumPy has no bfloat16; float32 represents it exactly
    return Bag(path.stem, tensor.detach().reshape(-1, tensor.shape[-1]).numpy(), None)


def check_bag(bag: Bag) -> None:
    """Raise BagError for a bag that cannot be used for training: empty, or with NaN or infinite values."""
    if len(bag) == 0:
        raise BagError(
            f"{bag.slide}: the bag is empty",
            "it has no instance",
            "Tile and embed the slide again, or drop it",
            code="empty-bag",
        )
    for start in range(0, len(bag), CHECK_ROWS):
        finite = np.isfinite(bag.features_ND[start : start + CHECK_ROWS]).all(axis=1)
        if not finite.all():
            row = start + int(np.argmin(finite))
            raise BagError(
                f"{bag.slide}: NaN or infinity in row {row} of its features",
                "a mean over the bag would be NaN too",
                "Embed the slide again; with half precision, check the encoder for overflow",
                code="non-finite-features",
            )


# ---------------------------------------------------------------------------------------------------- two scales


def concat_scales(fine: Bag, coarse: Bag, parent_N: NDArray[np.int64]) -> Bag:
    """Concatenate each fine embedding with that of its parent, as DSMIL-LC does for 20x and 5x; orphan tiles are
    dropped.

    `parent_N` is the row of each fine instance's parent in `coarse`, -1 if there is none (`TileTable.parents`).
    """
    if len(parent_N) != len(fine) or parent_N.max(initial=-1) >= len(coarse):
        raise BagError(
            f"{fine.slide}: the two scales do not match",
            f"{len(parent_N)} parents for {len(fine)} instances, pointing into {len(coarse)}",
            "Tile both scales in one run with tile.parent_mpp, then embed both again",
            code="scale-mismatch",
        )
    kept = np.flatnonzero(parent_N >= 0)
    joined = np.concatenate([fine.features_ND[kept], coarse.features_ND[parent_N[kept]]], axis=1)
    coords = None if fine.coords is None else fine.coords[kept]
    orphans = int(len(fine) - len(kept))
    return replace(fine, features_ND=joined, coords=coords, attributes={**fine.attributes, "without_parent": orphans})
