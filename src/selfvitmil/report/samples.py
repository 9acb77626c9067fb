"""Training tiles and the views that pretraining made of them, made once more for people to look at.

The views of a training step are a function of seed, tile, step and settings (`pretrain.views`), so those of the first
step can be reproduced from the slides: the same tiles, the same crops, the same colours. Where the tiles of the study
are no longer those of the training, nothing is shown, and a line says why.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from selfvitmil import stain
from selfvitmil.data.loader import order_of
from selfvitmil.data.sources import SlideTiles, TrainSlide
from selfvitmil.data.views import make_views
from selfvitmil.errors import ConfigError, SelfVitMilError
from selfvitmil.pretrain.recipes import recipes_of
from selfvitmil.pseudonyms import Names
from selfvitmil.report.contents import Contents, EncoderFolder
from selfvitmil.report.markup import Markup, join, tag
from selfvitmil.report.neighbors import spread
from selfvitmil.report.pictures import picture
from selfvitmil.settings import StudySettings, tiling_name, without_removed
from selfvitmil.store.layout import StudyLayout

NUM_SAMPLES = 4
NUM_LARGE = 2
"""Large views of a tile, with every method; others are small."""
LARGE_PX, SMALL_PX = 128, 72
"""Largest edges of tiles and large views, and of small views, on the page."""

Pixels = NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class Sample:
    """A training tile and its views in the first step."""

    slide: str
    tile: Pixels
    """(H, W, 3), with its stains normalized where the training did so."""
    large: Sequence[Pixels]
    small: Sequence[Pixels]


def sample_views(study: Contents, encoder: EncoderFolder, names: Names) -> Markup:
    """Tiles with their views, or a line that says why there are none."""
    title = tag("h4", "Tiles and their views")
    try:
        samples = read_samples(study, encoder)
    except SelfVitMilError as error:
        why = names.text(error.reason)
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError):  # a config or settings of another kind
        why = "its config.json or settings.toml cannot be used"
    else:
        words = (
            "Training tiles and the views made of them in the first step. The encoder learns to recognize views of one "
            "tile. Views should differ as slides differ and still show the tissue: where they do not, weaken the crops "
            "or the colour changes."
        )
        return join((title, tag("p", words), tag("div", *(_shown(one, names) for one in samples), class_="samples")))
    return join((title, tag("p", f"Not shown: {why}.", class_="missing")))


def _shown(sample: Sample, names: Names) -> Markup:
    slide = names.slide(sample.slide)
    tile = picture(sample.tile, f"training tile of {slide}", edge_px=LARGE_PX, quality=72)
    large = [picture(view, f"large view {k}", edge_px=LARGE_PX, quality=72) for k, view in enumerate(sample.large, 1)]
    small = [picture(view, f"small view {k}", edge_px=SMALL_PX, quality=72) for k, view in enumerate(sample.small, 1)]
    return tag(
        "figure",
        tag("div", tile, class_="source"),
        tag("div", *large, class_="large"),
        tag("div", *small, class_="small") if small else "",
        tag("figcaption", tag("strong", slide), f": tile, {len(large)} large and {len(small)} small views"),
        class_="sample",
    )


# ---------------------------------------------------------------------------------------------------- making them


def read_samples(study: Contents, encoder: EncoderFolder) -> list[Sample]:
    """Tiles of the first training step and their views. SelfVitMilError where these cannot be made any more."""
    if not encoder.config:
        raise ConfigError("its training is not finished")
    settings = StudySettings.model_validate(without_removed(encoder.settings))
    own, source, readable = settings.pretrain, *_training_tiles(study, encoder, settings)
    pool = next(order_of(source, own).pools(0, 1))
    tiles = choose_tiles(pool.tiles[pool.batches[0]], source.counts, readable)
    firsts = np.concatenate([[0], np.cumsum(source.counts)])
    groups = np.searchsorted(firsts, tiles, side="right") - 1
    parts = [
        source.reader.read(int(group), source.request(int(group), np.array([tile - firsts[group]]))).tiles_B3HW
        for group, tile in zip(groups, tiles, strict=True)
    ]
    tiles_B3HW, maps_B33 = torch.cat(parts), source.maps(groups)
    recipes = recipes_of(own, source.size_px, _patch_px(encoder.config))
    colours = encoder.config["pretrained_cfg"]
    mean, std = colours["mean"], colours["std"]
    ids_B = torch.from_numpy(source.ids[tiles])
    views = make_views(tiles_B3HW, ids_B, 0, recipes, mean, std, seed=own.seed, maps_B33=maps_B33)
    if maps_B33 is not None:
        tiles_B3HW = stain.apply_maps(tiles_B3HW, maps_B33)
    flat_VB = [as_pixels(view_B3SS, mean, std) for part_VB3SS in views for view_B3SS in part_VB3SS]
    return [
        Sample(
            source.names[group],
            tiles_B3HW[k].permute(1, 2, 0).numpy(),
            [view_B[k] for view_B in flat_VB[:NUM_LARGE]],
            [view_B[k] for view_B in flat_VB[NUM_LARGE:]],
        )
        for k, group in enumerate(groups)
    ]


def _training_tiles(
    study: Contents, encoder: EncoderFolder, settings: StudySettings
) -> tuple[SlideTiles, NDArray[np.bool_]]:
    """The tiles that the encoder was trained on, and of which slides they can still be read."""
    rows = [row for row in study.cohort.rows if row.slide in set(encoder.slides)] if study.cohort else []
    layout, tiling = StudyLayout(study.study), tiling_name(settings.tile)
    slides = [TrainSlide(row.slide, row.path, layout.tile_table(tiling, row.slide), row.mpp) for row in rows]
    slides = [slide for slide in slides if slide.table.exists()]
    if not slides:
        raise ConfigError("tiles of the slides that it was trained on are not in this study")
    source = SlideTiles(slides, stain_method=settings.stain.method, reader=settings.slide.reader)
    told = encoder.provenance
    if (told.get("slides"), told.get("tiles")) != (len(source.counts), sum(source.counts)):
        raise ConfigError("the study's tiles are no longer those that it was trained on")
    readable = [slide.path.exists() for slide in slides]
    if not any(readable):
        raise ConfigError("no file of the slides that it was trained on is there")
    return source, np.array(readable)


def choose_tiles(batch: NDArray[np.int64], counts: Sequence[int], readable: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Some tiles of a batch, of as many readable slides as possible; ConfigError where none can be read."""
    tiles = np.unique(batch)
    groups = np.searchsorted(np.cumsum(counts), tiles, side="right")
    slides = spread(np.unique(groups[readable[groups]]), NUM_SAMPLES)
    if not len(slides):
        raise ConfigError("no file of the slides of its first step is there")
    each, more = divmod(NUM_SAMPLES, len(slides))
    parts = [spread(tiles[groups == slide], each + (place < more)) for place, slide in enumerate(slides)]
    return np.concatenate(parts)


def as_pixels(view_B3SS: torch.Tensor, mean: Sequence[float], std: Sequence[float]) -> Pixels:
    """Normalized views as pixels (B, S, S, 3)."""
    scale, shift = (torch.tensor(values).view(3, 1, 1) for values in (std, mean))
    grey = ((view_B3SS.float() * scale + shift) * 255).round().clamp(0, 255)
    return grey.to(torch.uint8).permute(0, 2, 3, 1).numpy()


def _patch_px(config: Mapping[str, Any]) -> int | None:
    """Edge of the patches of a ViT, by its config alone; None of a network without a class token."""
    if (config.get("selfvitmil") or {}).get("layout") == "pooled":
        return None
    told = (config.get("model_args") or {}).get("patch_size")
    named = re.search(r"patch(\d+)", str(config.get("architecture", "")))
    return int(told) if told else int(named.group(1)) if named else None
