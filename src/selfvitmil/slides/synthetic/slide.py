"""Write one synthetic slide with its ground truth; and files that test error handling."""

from __future__ import annotations

import dataclasses
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from selfvitmil.errors import ConfigError
from selfvitmil.geometry import size_at_mpp
from selfvitmil.slides.synthetic.anatomy import Anatomy, grow_anatomy, is_tissue
from selfvitmil.slides.synthetic.colour import Palette, Stain, draw_stain, mix_palette, render
from selfvitmil.slides.synthetic.painter import Window
from selfvitmil.slides.synthetic.pyramid import (
    FORMS,
    EncodedLevel,
    EncodedPyramid,
    Layout,
    Pixels,
    Render,
    encode_jpeg,
    encode_pyramid,
    write_pyramid,
)
from selfvitmil.store.files import write_bytes

TISSUE_MPP = 8.0
SMALLEST_SIDE_UM = 200.0
SMALLEST_LESION_UM = 40.0


@dataclass(frozen=True, eq=False)
class SlideTruth:
    """Ground truth of a synthetic slide."""

    name: str
    size_l0: tuple[int, int]
    mpp: float
    layout: Layout
    lesions: tuple[NDArray[np.float64], ...]
    """Outlines, (K, 2) of (x, y) in level-0 pixels, first point not repeated."""
    tissue_mask: NDArray[np.bool_]
    """[y, x] at `tissue_mpp`; the insides of fat cells and vessels are not tissue."""
    tissue_mpp: float
    stain_vectors: NDArray[np.float64]
    """(3, 2): unit optical density (natural logarithm) in red, green, blue of haematoxylin and eosin."""
    stain_strengths: tuple[float, float]
    """Optical density of one unit of concentration; the nucleus of a lymphocyte has about 1.25 of haematoxylin."""
    glass: tuple[float, float, float]
    """Red, green and blue of clear glass."""

    @property
    def positive(self) -> bool:
        """Whether the slide contains a lesion."""
        return bool(self.lesions)

    def to_json(self) -> dict[str, Any]:
        """Return plain values for JSON, without the mask."""
        return {
            "slide": self.name,
            "size_l0": list(self.size_l0),
            "mpp": self.mpp,
            "layout": self.layout,
            "positive": self.positive,
            "lesions_l0": [outline.round(2).tolist() for outline in self.lesions],
            "tissue_mpp": self.tissue_mpp,
            "stain_vectors": self.stain_vectors.round(6).tolist(),
            "stain_strengths": [round(value, 6) for value in self.stain_strengths],
            "glass": [round(value, 3) for value in self.glass],
        }


def make_slide(
    path: Path,
    seed: int = 0,
    *,
    size: tuple[int, int] = (4096, 4096),
    mpp: float = 0.25,
    lesions: int = 0,
    lesion_um: tuple[float, float] = (150.0, 400.0),
    layout: Layout = "svs40",
    jpeg_quality: int = 85,
) -> SlideTruth:
    """Write a slide of a lymph node, `size` = (width, height) in level-0 pixels, with `lesions` metastases.

    The diameters of the lesions are within `lesion_um` microns. The same arguments give identical bytes.
    Raises ConfigError if the lesions do not fit into the tissue.
    """
    scene = _make_scene(seed, size, mpp, lesions, lesion_um)
    pyramid = encode_pyramid(size, scene.render, layout, jpeg_quality)
    write_pyramid(path, pyramid, mpp)
    return scene.truth(path.stem, layout)


@dataclass(frozen=True, eq=False)
class _Scene:
    """Everything needed to render a slide."""

    anatomy: Anatomy
    stain: Stain
    palette: Palette
    seed: int

    def render(self, x0: int, y0: int, width: int, height: int) -> Pixels:
        return render(self.anatomy, self.palette, Window(x0, y0, width, height), self.seed)

    def truth(self, name: str, layout: Layout) -> SlideTruth:
        size, mpp = self.anatomy.size_px, self.anatomy.mpp
        columns, rows = size_at_mpp(size, mpp, TISSUE_MPP)
        y, x = np.mgrid[:rows, :columns]
        centres_um = (np.stack([x.ravel(), y.ravel()], axis=-1) + 0.5) * TISSUE_MPP
        return SlideTruth(
            name=name,
            size_l0=size,
            mpp=mpp,
            layout=layout,
            lesions=tuple(np.asarray(outline, np.float64) / mpp for outline in self.anatomy.lesions_um),
            tissue_mask=is_tissue(self.anatomy, centres_um).reshape(rows, columns),
            tissue_mpp=TISSUE_MPP,
            stain_vectors=np.asarray(self.stain.vectors, np.float64),
            stain_strengths=self.stain.strengths,
            glass=self.stain.glass,
        )


def _make_scene(seed: int, size: tuple[int, int], mpp: float, lesions: int, lesion_um: tuple[float, float]) -> _Scene:
    if not 0.1 <= mpp <= 1.0 or min(size) * mpp < SMALLEST_SIDE_UM:
        raise ConfigError(
            f"invalid synthetic slide of {size[0]} x {size[1]} pixels of {mpp:g} um",
            f"its sides must be at least {SMALLEST_SIDE_UM:g} um, its pixels 0.1 to 1 um",
            "Choose another size or mpp",
            code="invalid-synthetic-size",
        )
    if not SMALLEST_LESION_UM <= lesion_um[0] <= lesion_um[1] or lesions < 0:
        raise ConfigError(
            f"invalid request for {lesions} lesions of {lesion_um[0]:g} to {lesion_um[1]:g} um",
            f"the number must not be negative, and diameters must be an ascending range from {SMALLEST_LESION_UM:g} um",
            "Give 0 or more lesions, and the smaller diameter first",
            code="invalid-lesions",
        )
    stain_rng, anatomy_rng = np.random.default_rng(seed).spawn(2)
    stain = draw_stain(stain_rng)
    anatomy = grow_anatomy(anatomy_rng, size, mpp, lesions, lesion_um)
    return _Scene(anatomy, stain, mix_palette(anatomy, stain), seed)


# ---------------------------------------------------------------------------------------------------- huge


def write_sparse_slide(
    path: Path,
    size_l0: tuple[int, int] = (100_000, 100_000),
    *,
    seed: int = 0,
    mpp: float = 0.25,
    copies: int = 9,
    lesions: int = 0,
) -> SlideTruth:
    """Write a slide of any size in a small file: copies of one 4096-pixel node on glass, equal tiles stored once."""
    layout, edge = "svs40", 4096
    quality, form = 85, FORMS[layout]
    scene = _make_scene(seed, (edge, edge), mpp, lesions, (150.0, 400.0))
    node = encode_pyramid((edge, edge), scene.render, layout, quality)
    origins = _spread(size_l0, edge, copies)
    glass = np.broadcast_to(np.array([*np.round(scene.stain.glass), 0], np.uint8), (form.tile_px, form.tile_px, 4))
    blank = encode_jpeg(glass, form.jpeg_subsampling, quality)
    levels = []
    for k, small in enumerate(node.levels):
        downsample = form.step**k
        size = (size_l0[0] // downsample, size_l0[1] // downsample)
        place = _placed(size, small.size, [(x // downsample, y // downsample) for x, y in origins], form.tile_px)
        levels.append(EncodedLevel(size, [blank, *small.tiles], place))
    write_pyramid(path, EncodedPyramid(layout, levels, node.thumbnail, quality), mpp)
    return _copied(scene.truth(path.stem, layout), size_l0, origins)


def _spread(size_l0: tuple[int, int], edge: int, copies: int) -> list[tuple[int, int]]:
    """Return the positions of the copies in rows, on whole tiles of every level."""
    across = int(np.ceil(np.sqrt(copies)))
    spacing = [extent // across // edge * edge for extent in size_l0]
    if min(spacing) < edge:
        raise ConfigError(
            f"{copies} nodes of {edge} pixels do not fit into {size_l0[0]} x {size_l0[1]}",
            "they would overlap",
            "Use fewer copies or a larger slide",
            code="copies-do-not-fit",
        )
    return [(k % across * spacing[0], k // across * spacing[1]) for k in range(copies)]


def _placed(
    size: tuple[int, int], node: tuple[int, int], origins: list[tuple[int, int]], tile_px: int
) -> NDArray[np.int64]:
    """Return the index of the stored tile at each position of a level: 0 is glass, the others are the node's tiles."""
    columns, rows = (-(-extent // tile_px) for extent in size)
    node_columns, node_rows = (-(-extent // tile_px) for extent in node)
    place = np.zeros((rows, columns), np.int64)
    numbers = 1 + np.arange(node_columns * node_rows).reshape(node_rows, node_columns)
    for x, y in origins:
        j, i = x // tile_px, y // tile_px
        place[i : i + node_rows, j : j + node_columns] = numbers
    return place.ravel()


def _copied(truth: SlideTruth, size_l0: tuple[int, int], origins: list[tuple[int, int]]) -> SlideTruth:
    """Return the ground truth of a slide with copies of a node at `origins`."""
    columns, rows = size_at_mpp(size_l0, truth.mpp, truth.tissue_mpp)
    mask = np.zeros((rows, columns), bool)
    for x, y in origins:
        j, i = (round(value * truth.mpp / truth.tissue_mpp) for value in (x, y))
        part = mask[i : i + truth.tissue_mask.shape[0], j : j + truth.tissue_mask.shape[1]]
        part |= truth.tissue_mask[: part.shape[0], : part.shape[1]]
    outlines = tuple(outline + np.array(origin) for origin in origins for outline in truth.lesions)
    return dataclasses.replace(truth, size_l0=size_l0, lesions=outlines, tissue_mask=mask)


# ---------------------------------------------------------------------------------------------------- problem files


def make_hostile(folder: Path) -> dict[str, Path]:
    """Write files that test error handling: damaged ones, and valid but unusual ones."""
    size, mpp = (1024, 1024), 0.25
    scene = _make_scene(5, size, mpp, 0, (100.0, 100.0))
    whole = encode_pyramid(size, scene.render, "svs40", 80)
    tiff = encode_pyramid(size, scene.render, "tiff", 80)
    paths = {
        "truncated": folder / "truncated.svs",
        "zero_bytes": folder / "zero_bytes.svs",
        "wrong_suffix": folder / "wrong_suffix.tif",
        "text": folder / "text.svs",
        "single_level": folder / "single_level.tif",
        "no_mpp": folder / "no_mpp.tif",
        "all_white": folder / "all_white.svs",
        "all_black": folder / "all_black.svs",
        "odd_size": folder / "odd_size.svs",
        "unicode_name": folder / "Präparat größe 切片 №1.svs",
    }
    write_pyramid(paths["unicode_name"], whole, mpp)
    content = paths["unicode_name"].read_bytes()
    write_bytes(paths["truncated"], content[: len(content) * 2 // 5])
    write_bytes(paths["zero_bytes"], b"")
    picture = io.BytesIO()
    Image.fromarray(scene.render(0, 0, 256, 256)[..., :3].copy()).save(picture, "png")
    write_bytes(paths["wrong_suffix"], picture.getvalue())
    write_bytes(paths["text"], b"This is not a slide.\n")
    write_pyramid(paths["single_level"], dataclasses.replace(tiff, levels=tiff.levels[:1]), mpp)
    write_pyramid(paths["no_mpp"], tiff, None)
    write_pyramid(paths["all_white"], encode_pyramid(size, _flat(255), "svs20", 80), mpp)
    write_pyramid(paths["all_black"], encode_pyramid(size, _flat(0), "svs20", 80), mpp)
    write_pyramid(paths["odd_size"], encode_pyramid((1001, 873), scene.render, "svs20", 80), mpp)
    return paths


def _flat(value: int) -> Render:
    return lambda x0, y0, width, height: np.full((height, width, 4), value, np.uint8)
