"""The feature file of a slide: one row per tile. Ours, and those of TRIDENT, CLAM and STAMP, read as they are.

Ours are HDF5 files that the other tools open unchanged: `features` (N, D) float16 and `coords` (N, 2) int64 (level-0
top left), contiguous and uncompressed, with TRIDENT's attributes on `coords`. Contiguous means that a trainer can map
the file into memory instead of reading it: `read_bag` returns such a map where the file allows it.

N instances, D dimensions.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import h5py
import numpy as np
from numpy.typing import NDArray

from selfvitmil.errors import BagError
from selfvitmil.store.files import atomic_path
from selfvitmil.store.layout import patches_of
from selfvitmil.tiles import TileTable, trident_attributes
from selfvitmil.untrusted import load_torch, open_hdf5

SCHEMA = "selfvitmil.bag"
FORMAT_VERSION = 1
CHECK_ROWS = 4096

Features = NDArray[np.floating]


@dataclass(frozen=True, eq=False)
class Bag:
    """All embeddings of a slide with their places."""

    slide: str
    features_ND: Features
    """Memory-mapped, read-only, where the file allows it."""
    coords: NDArray[np.float64] | NDArray[np.int64] | None
    """(N, 2) top left corners (x, y) in `unit`; None where the file stores none."""
    unit: Literal["l0", "um"] = "l0"
    """Level-0 pixels, or microns (STAMP)."""
    tile_extent: float | None = None
    """Edge of a tile in `unit`."""
    mpp: float | None = None
    """Microns per tile pixel, where the file says it."""
    encoder: str = ""
    attributes: Mapping[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return self.features_ND.shape[0]

    @property
    def dim(self) -> int:
        return self.features_ND.shape[1]


# ---------------------------------------------------------------------------------------------------- writing


def write_bag(path: Path, features_ND: Features, table: TileTable, encoder: str, made_from: Mapping[str, Any]) -> None:
    """Write a slide's features, and beside the folder the coordinates where TRIDENT's readers look for them.

    `path` is bags/<tiling>/features_<encoder>/<slide>.h5. Equal content gives equal bytes.
    """
    if features_ND.shape[0] != len(table):
        raise BagError(f"{path.name}: {features_ND.shape[0]} vectors for {len(table)} tiles", "each tile needs its own")
    _write(patches_of(path, table.slide), table, None, "", {})
    _write(path, table, features_ND.astype(np.float16), encoder, made_from)


def _write(
    path: Path, table: TileTable, features_ND: Features | None, encoder: str, made_from: Mapping[str, Any]
) -> None:
    with atomic_path(path) as temporary, h5py.File(temporary, "w") as file:
        if features_ND is not None:
            file.attrs["schema"] = SCHEMA
            file.attrs["format_version"] = FORMAT_VERSION
            file.attrs["made_from"] = json.dumps(made_from, sort_keys=True)
            features = file.create_dataset("features", data=features_ND)
            features.attrs.update({"name": table.slide, "savetodir": "", "encoder": encoder})
        coords = file.create_dataset("coords", data=table.coords_l0.astype(np.int64))
        coords.attrs.update({**trident_attributes(table), "mpp": table.mpp, "level0_mpp": table.slide_mpp})


# ---------------------------------------------------------------------------------------------------- reading


def find_bags(folder: Path) -> dict[str, Path]:
    """Slide name -> feature file, for a folder of ours, TRIDENT's, CLAM's or STAMP's; h5 wins over pt."""
    places = [place for name in (".", "h5_files", "pt_files") if (place := folder / name).is_dir()]
    found: dict[str, Path] = {}
    for place in places:
        for path in sorted(place.iterdir()):
            if path.suffix in (".h5", ".pt") and not path.name.startswith("."):
                found.setdefault(path.stem, path)
    if not found:
        raise BagError(f"{folder.name}: no feature files", "it holds no .h5 and no .pt", "Name the folder they lie in")
    return found


def read_bag(path: Path) -> Bag:
    """Open a feature file of any of the known kinds; raises BagError when it is damaged or of no known kind."""
    if path.suffix == ".pt":
        return _read_pt(path)
    try:
        with open_hdf5(path) as file:
            name = next((name for name in ("features", "feats") if name in file), None)
            if name is None:
                raise KeyError(f"it has no dataset named features or feats, only {sorted(file)}")
            bag = _with_places(Bag(path.stem, _mapped(path, file[name]), None), file)
    except (OSError, KeyError, ValueError) as error:
        raise _unreadable(path, error) from None
    if bag.features_ND.ndim != 2 or (bag.coords is not None and len(bag.coords) != len(bag)):
        coords = None if bag.coords is None else bag.coords.shape
        raise _unreadable(path, ValueError(f"features are {bag.features_ND.shape}, coordinates {coords}"))
    return bag


def _unreadable(path: Path, error: Exception) -> BagError:
    why = str(error).strip("'\"")
    return BagError(f"{path.name}: not a readable feature file", why, "Remove it and make it again")


def _mapped(path: Path, dataset: Any) -> Features:
    """The dataset as a read-only memory map, or read whole where it is chunked or compressed."""
    if dataset.dtype.kind not in "fiu":
        raise ValueError(f"its features are of the type {dataset.dtype}, not numbers")
    shape = (
        dataset.shape[1:] if dataset.ndim == 3 and dataset.shape[0] == 1 else dataset.shape
    )  # (1, N, D) of old files
    offset = dataset.id.get_offset()
    if offset is None or dataset.size == 0 or not dataset.dtype.isnative:
        return dataset[:].reshape(shape)
    if offset + dataset.nbytes > os.path.getsize(path):
        raise ValueError("the file ends before its features do")
    return np.memmap(path, dtype=dataset.dtype, mode="r", offset=offset, shape=shape)


def _with_places(bag: Bag, file: Any) -> Bag:
    """Add coordinates and what is known of the tiles."""
    attributes = {key: _plain(value) for key, value in file.attrs.items()}
    if "coords" not in file:
        return replace(bag, attributes=attributes)
    coords = file["coords"][:].reshape(-1, 2) if file["coords"].ndim == 3 else file["coords"][:]
    if str(attributes.get("unit", "")) == "um":  # STAMP
        extent = attributes.get("tile_size_um", attributes.get("tile_size"))
        mpp = extent / attributes["tile_size_px"] if extent and attributes.get("tile_size_px") else None
        encoder = str(attributes.get("extractor", ""))
        return replace(
            bag, coords=coords, unit="um", tile_extent=extent, mpp=mpp, encoder=encoder, attributes=attributes
        )
    of_coords = {key: _plain(value) for key, value in file["coords"].attrs.items()}
    extent = of_coords.get("patch_size_level0")
    if "mpp" in of_coords and "level0_mpp" in of_coords:  # ours: exact, where TRIDENT's is rounded to whole pixels
        extent = of_coords["patch_size"] * of_coords["mpp"] / of_coords["level0_mpp"]
    name = "features" if "features" in file else "feats"
    return replace(
        bag,
        coords=coords.astype(np.int64),
        tile_extent=float(extent) if extent is not None else None,
        mpp=of_coords.get("mpp"),
        encoder=str(file[name].attrs.get("encoder", "")),
        attributes={**attributes, **of_coords},
    )


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _read_pt(path: Path) -> Bag:
    """CLAM's tensor files; never trusted as pickles."""
    import torch

    try:
        tensor = load_torch(path, mmap=True)
    except Exception as error:  # torch raises pickle's, zip's and its own errors here
        raise _unreadable(path, error) from None
    if isinstance(tensor, dict):
        tensor = tensor.get("features", tensor.get("feats"))
    if not isinstance(tensor, torch.Tensor) or tensor.ndim not in (2, 3):
        raise _unreadable(path, ValueError("it holds no (N, D) tensor"))
    if tensor.is_floating_point() and tensor.dtype not in (torch.float16, torch.float32, torch.float64):
        tensor = tensor.float()  # bfloat16, which NumPy does not have: every value of it is one of float32
    return Bag(path.stem, tensor.detach().reshape(-1, tensor.shape[-1]).numpy(), None)


def check_bag(bag: Bag) -> None:
    """Raise BagError for a bag that nothing can be learned from: empty, or with values that are not numbers."""
    if len(bag) == 0:
        raise BagError(
            f"{bag.slide}: the bag is empty", "it has no instance", "Tile and embed the slide again, or drop it"
        )
    for start in range(0, len(bag), CHECK_ROWS):
        finite = np.isfinite(bag.features_ND[start : start + CHECK_ROWS]).all(axis=1)
        if not finite.all():
            row = start + int(np.argmin(finite))
            raise BagError(
                f"{bag.slide}: NaN or infinity in row {row} of its features",
                "a mean over the bag would be NaN too",
                "Embed the slide again; with half precision, check the encoder for overflow",
            )


# ---------------------------------------------------------------------------------------------------- two scales


def concat_scales(fine: Bag, coarse: Bag, parent_N: NDArray[np.int64]) -> Bag:
    """Each fine vector followed by that of its parent, as DSMIL-LC joins 20x with 5x; tiles without a parent go.

    `parent_N` is the row of each fine instance's parent in `coarse`, -1 where there is none (`TileTable.parents`).
    """
    if len(parent_N) != len(fine) or parent_N.max(initial=-1) >= len(coarse):
        raise BagError(
            f"{fine.slide}: the two scales do not belong together",
            f"{len(parent_N)} parents for {len(fine)} instances, pointing into {len(coarse)}",
            "Tile both scales in one run with tile.parent_mpp, then embed both again",
        )
    kept = np.flatnonzero(parent_N >= 0)
    joined = np.concatenate([fine.features_ND[kept], coarse.features_ND[parent_N[kept]]], axis=1)
    coords = None if fine.coords is None else fine.coords[kept]
    orphans = int(len(fine) - len(kept))
    return replace(fine, features_ND=joined, coords=coords, attributes={**fine.attributes, "without_parent": orphans})
