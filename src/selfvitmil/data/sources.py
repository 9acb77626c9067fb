"""Sources of tiles: slides by their tile tables, a folder of tile images, memory.

A source knows all tiles that training may see, numbered through; its reader, which is sent to worker processes,
reads a few tiles of one slide at a time. Only the reader opens slides.

Axes in names: B tiles of a batch, H and W height and width, 3 is RGB.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from selfvitmil import stain
from selfvitmil.data import RUN
from selfvitmil.errors import ConfigError, SlideError
from selfvitmil.slides import SlideCache, SlideRef
from selfvitmil.store.failures import without_folders
from selfvitmil.tiles import check_mpp, read_tiles

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg")

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class TrainSlide:
    """A slide to train on, and its tile table."""

    slide: SlideRef
    """Its `mpp`, where the cohort gives one, is that of the table."""
    table: Path


class TileReader(Protocol):
    """Reads tiles, in any process: it is sent to the workers."""

    def read(self, group: int, what: Any) -> Pixels:
        """Read tiles of slide `group`; `what` is what the source's `request` returned."""
        ...


class Pixels(NamedTuple):
    """Tiles that were read."""

    tiles_B3HW: torch.Tensor
    unfitted: int
    """Number of tiles left unnormalized because their stains could not be fitted (stain method `tile`)."""


class TileSource(Protocol):
    """All tiles that training may see."""

    counts: tuple[int, ...]
    """Tiles of every slide (or folder)."""
    names: tuple[str, ...]
    shape_px: tuple[int, int]
    """(height, width) of a tile."""
    size_px: int
    """The shorter of the two."""
    mpp: float | None
    """Microns per pixel of the tiles, where that is known."""
    stain_method: Literal["slide", "tile", "none"]
    """How their stains are normalized: on the device by `stain_transforms`, by the reader, or not at all."""
    ids: Indices
    """A stable and unique number of every tile."""
    run: int
    """Tiles that are best read together."""

    @property
    def reader(self) -> TileReader:
        """Reader that is sent to the workers."""
        ...

    def request(self, group: int, rows: Indices) -> Any:
        """Return what the reader needs to read these rows of slide `group`."""
        ...

    def stain_transforms(self, groups: Indices) -> NDArray[np.float64] | None:
        """Return the stain transforms (B, 3, 3) of tiles of these slides; None when there is nothing to apply."""
        ...

    def inputs(self) -> dict[str, str]:
        """Return what trained weights depend on, by name."""
        ...


@dataclass
class SlideReader:
    """Reads tiles from slides; opens them when it reads, so that starting a worker is cheap."""

    slides: Sequence[SlideRef]
    """With the microns per level-0 pixel of their tile tables."""
    size_px: int
    tile_mpp: float
    normalize_tiles: bool = False
    cache: SlideCache | None = field(default=None, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"cache": None}  # each process opens its own files

    def read(self, group: int, what: Any) -> Pixels:
        """Read the tiles whose top left corners `what` are (B, 2) level-0 pixels."""
        self.cache = self.cache or SlideCache()
        ref = self.slides[group]
        if not ref.path.exists():
            raise SlideError(
                f"{ref.path.name}: the file is gone",
                f"slide {ref.name} was there when it was tiled, and training reads its tiles from it",
                "Bring it back (is the drive connected?), or train without it",
                code="file-not-found",
            )
        slide = self.cache.get(ref)
        tiles = (slide.read_tile(int(x_l0), int(y_l0), self.size_px, self.tile_mpp) for x_l0, y_l0 in what)
        return _pixels(tiles, self.normalize_tiles)


class SlideTiles:
    """The tiles of slides, by their tile tables."""

    run = RUN

    def __init__(self, slides: Sequence[TrainSlide], *, stain_method: Literal["slide", "tile", "none"]):
        if not slides:
            raise ConfigError(
                "there is no slide to train on",
                "none of the chosen split has a tile table",
                "Run `selfvitmil tile`",
                code="no-training-slides",
            )
        tables = [read_tiles(slide.table) for slide in slides]
        for slide, table in zip(slides, tables, strict=True):
            check_mpp(table, slide.slide.mpp)
        shapes = {(table.size_px, table.mpp) for table in tables}
        if len(shapes) > 1:
            raise ConfigError(
                f"tile tables differ: {' and '.join(f'{size} px at {mpp:g} um' for size, mpp in sorted(shapes))}",
                "an encoder learns from tiles of one size and resolution",
                "Train on the tables of one tiling",
                code="mixed-tile-tables",
            )
        self.size_px: int
        self.mpp: float | None
        self.size_px, tile_mpp = shapes.pop()
        self.mpp = tile_mpp
        self.shape_px = (self.size_px, self.size_px)
        self.names = tuple(slide.slide.name for slide in slides)
        self.counts = tuple(len(table) for table in tables)
        self._places = [table.coords_l0 for table in tables]
        """Where the reader finds the tiles of each slide."""
        self.ids = np.concatenate([tile_ids(table.slide, table.coords_l0) for table in tables])
        self._inputs = {
            f"tiles of {slide.slide.name}": f"{slide.slide.name} {table.fingerprint} {table.slide_mpp!r} {table.digest}"
            for slide, table in zip(slides, tables, strict=True)
        }
        transforms = [np.eye(3) if table.stain is None else table.stain.od_transform() for table in tables]
        self._transforms = np.stack(transforms) if stain_method == "slide" else None
        self.reader: TileReader = SlideReader(
            slides=[each.slide.at_mpp(table.slide_mpp) for each, table in zip(slides, tables, strict=True)],
            size_px=self.size_px,
            tile_mpp=tile_mpp,
            normalize_tiles=stain_method == "tile",
        )
        self.stain_method: Literal["slide", "tile", "none"] = stain_method

    def request(self, group: int, rows: Indices) -> Indices:
        return self._places[group][rows]

    def stain_transforms(self, groups: Indices) -> NDArray[np.float64] | None:
        """Return the stain transforms (B, 3, 3) of tiles of these slides; None when there is nothing to apply."""
        return None if self._transforms is None else self._transforms[groups]

    def inputs(self) -> dict[str, str]:
        """Return what trained weights depend on, by name: slides and coordinates of their tiles, stain transforms."""
        digest = "" if self._transforms is None else hashlib.sha256(self._transforms.tobytes()).hexdigest()
        return self._inputs | {"stain transforms": digest}


@dataclass
class ImageReader:
    """Reads tiles stored as one image file each."""

    shape_px: tuple[int, int]

    def read(self, group: int, what: Any) -> Pixels:
        """Read the images at the paths `what`."""
        del group
        return Pixels(_channels_first(np.stack([read_image(path, self.shape_px) for path in what])), 0)


class _PlainTiles:
    """Tiles without a slide: each is read alone, at an unknown resolution, and no stain is normalized."""

    run = 1
    mpp: float | None = None
    stain_method: Literal["slide", "tile", "none"] = "none"
    _digest: str

    def stain_transforms(self, groups: Indices) -> None:
        del groups

    def inputs(self) -> dict[str, str]:
        return {"images": self._digest}


class ImageTiles(_PlainTiles):
    """Tiles from a folder of images of one size, sub-folders included."""

    def __init__(self, folder: Path):
        if not folder.is_dir():
            raise ConfigError(
                f"{folder.name}: there is no such folder",
                how="Correct the path of the folder of tiles",
                code="folder-not-found",
            )
        paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in IMAGE_SUFFIXES)
        if not paths:
            raise ConfigError(
                f"{folder.name}: holds no tiles",
                f"no {', '.join(IMAGE_SUFFIXES)} lies there",
                "Correct the folder",
                code="no-tile-images",
            )
        groups: dict[str, list[Path]] = {}
        for path in paths:
            groups.setdefault(path.parent.relative_to(folder).as_posix(), []).append(path)
        self.names = tuple(groups)
        self.counts = tuple(len(group) for group in groups.values())
        self._paths = list(groups.values())
        with Image.open(paths[0]) as first:
            self.shape_px = (first.height, first.width)
        self.size_px = min(self.shape_px)
        self.reader = ImageReader(self.shape_px)
        relative = [f"{name}/{path.name}" for name, group in groups.items() for path in group]
        self.ids = np.array([_name_hash(name) for name in relative], dtype=np.uint64).view(np.int64)
        self._digest = hashlib.sha256("\n".join(relative).encode()).hexdigest()

    def request(self, group: int, rows: Indices) -> list[Path]:
        return [self._paths[group][row] for row in rows]


@dataclass
class TensorReader:
    """Returns tiles that are in memory."""

    tiles_N3HW: torch.Tensor

    def __getstate__(self) -> dict[str, Any]:
        raise ConfigError(
            "tiles in memory are not sent to other processes",
            "each would get a copy of all of them",
            "Use --pretrain.workers 0",
            code="tiles-in-memory",
        )

    def read(self, group: int, what: Any) -> Pixels:
        """Return the tiles with the numbers `what`, (B,)."""
        del group
        return Pixels(self.tiles_N3HW[torch.from_numpy(what)], 0)


class TensorTiles(_PlainTiles):
    """Tiles that are in memory as uint8 (N, 3, H, W), all in one group; for `workers = 0`."""

    def __init__(self, tiles_N3HW: torch.Tensor, name: str = "tiles"):
        self.names = (name,)
        self.counts = (len(tiles_N3HW),)
        self.shape_px = (tiles_N3HW.shape[2], tiles_N3HW.shape[3])
        self.size_px = min(self.shape_px)
        self.reader = TensorReader(tiles_N3HW)
        corners = np.stack([np.arange(len(tiles_N3HW)), np.zeros(len(tiles_N3HW), dtype=np.int64)], axis=1)
        self.ids = tile_ids(name, corners)
        self._digest = hashlib.sha256(tiles_N3HW.contiguous().numpy().data).hexdigest()

    def request(self, group: int, rows: Indices) -> Indices:
        del group
        return rows


def read_image(path: Path, shape_px: tuple[int, int]) -> NDArray[np.uint8]:
    """Read one tile image, uint8 (H, W, 3). Raises SlideError if it is damaged or of another size."""
    try:
        with Image.open(path) as image:
            pixels = np.asarray(image.convert("RGB"))
    except (OSError, SyntaxError, ValueError) as error:
        raise SlideError(
            f"{path.name}: cannot be read as an image",
            without_folders(str(error), [path.parent]),
            "Remove or replace it",
            code="unreadable-image",
        ) from None
    if pixels.shape[:2] != shape_px:
        raise SlideError(
            f"{path.name}: has {pixels.shape[1]} x {pixels.shape[0]} px, others {shape_px[1]} x {shape_px[0]}",
            "all tiles of a folder must have one size",
            "Bring them to one size, or remove it",
            code="mixed-image-sizes",
        )
    return pixels


def _pixels(tiles: Iterable[NDArray[np.uint8]], normalize: bool) -> Pixels:
    """Return tiles (H, W, 3) as one tensor (B, 3, H, W), each normalized by its own stains if `normalize` is set."""
    done, unfitted = [], 0
    for tile in tiles:
        if normalize:
            tile, fitted = stain.normalize_or_keep(tile)
            unfitted += not fitted
        done.append(tile)
    return Pixels(_channels_first(np.stack(done)), unfitted)


def _channels_first(tiles_BHW3: NDArray[np.uint8]) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(tiles_BHW3.transpose(0, 3, 1, 2)))


def _name_hash(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def tile_ids(slide: str, coords_l0: Indices) -> Indices:
    """Return unique numbers of tiles, computed from the slide's name and the tile's corner alone."""
    with np.errstate(over="ignore"):
        x, y = coords_l0.astype(np.uint64).T
        mixed = np.uint64(_name_hash(slide)) + x * np.uint64(0x9E3779B97F4A7C15) + y * np.uint64(0xC2B2AE3D27D4EB4F)
        # The finalizer of SplitMix64: without it, neighbours would have nearly the same number.
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return (mixed ^ (mixed >> np.uint64(31))).view(np.int64)
