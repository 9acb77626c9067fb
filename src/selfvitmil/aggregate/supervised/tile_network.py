"""Tile classifier: an encoder, usually a ResNet-18, with a linear head; loading it and scoring slides with it.

Tiles are read from the slides as in pretraining (`data.sources`, `data.loader`) and normalized as in training.
`tile_training.py` trains it.

Axes in names: B tiles of a batch, N tiles of a slide, D width, H and W height and width, 3 is RGB.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import expit
from torch import Tensor, nn

from selfvitmil import stain
from selfvitmil.aggregate.scoring import BagScore
from selfvitmil.aggregate.supervised import model_files
from selfvitmil.aggregate.supervised.pooling import bag_score
from selfvitmil.data import loader
from selfvitmil.data.sources import Indices, Pixels, SlideTiles, TileSource, TrainSlide
from selfvitmil.encoder import Encoder, EncoderConfig, build_backbone, check_fits
from selfvitmil.runtime.device import choose_device, choose_precision
from selfvitmil.settings import SupervisedSettings

KIND = "supervised-tile-network"
SCORE_BATCH = 256
"""Tiles per batch in scoring."""

StainMethod = Literal["slide", "tile", "none"]


class TileNetwork(nn.Module):
    """An encoder with a linear head: normalized images to the tumour logit."""

    def __init__(self, encoder: Encoder):
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(encoder.dim, 1)

    def forward(self, images_B3HW: Tensor) -> Tensor:
        """Return logits (B,) in float32: half precision would produce ties between many tiles."""
        embeddings_BD = self.encoder(images_B3HW)
        with torch.autocast(images_B3HW.device.type, enabled=False):
            return self.head(embeddings_BD.float())[:, 0]


def load_tile_network(folder: Path) -> tuple[TileNetwork, dict[str, Any]]:
    """Return the network of a folder, in evaluation mode, and its config."""
    tensors, config = model_files.read_model(folder, KIND)
    encoder_config = EncoderConfig(**config["encoder"])
    backbone = build_backbone(encoder_config.architecture, encoder_config.model_args)
    network = TileNetwork(Encoder(backbone, encoder_config))
    network.load_state_dict(tensors)
    return network.eval(), config


# ---------------------------------------------------------------------------------------------------- scoring


def tile_probabilities(
    network: TileNetwork,
    slides: Sequence[TrainSlide],
    settings: SupervisedSettings | None = None,
    *,
    stain_method: StainMethod,
    reader: str = "auto",
) -> list[NDArray[np.float64]]:
    """Return the tumour probability of each tile of every slide's table, for equal class priors."""
    settings = settings or SupervisedSettings()
    source = SlideTiles(slides, stain_method=stain_method, reader=reader)
    check_fits(network.encoder.config, source.mpp or 0.0, source.size_px, stain_method)
    device = choose_device(settings.device)
    dtype = choose_precision(settings.precision, device)
    tiles = np.arange(sum(source.counts))
    logits = score_tiles(network.to(device).eval(), source, tiles, device, dtype, num_workers(settings))
    network.to("cpu")
    return np.split(expit(logits), np.cumsum(source.counts)[:-1])


def score_slides(
    network: TileNetwork,
    slides: Sequence[TrainSlide],
    settings: SupervisedSettings | None = None,
    *,
    stain_method: StainMethod,
    reader: str = "auto",
) -> list[BagScore]:
    """Return one score per slide, pooled over all tiles of its table by `settings.pool`."""
    settings = settings or SupervisedSettings()
    found = tile_probabilities(network, slides, settings, stain_method=stain_method, reader=reader)
    pairs = zip(slides, found, strict=True)
    return [bag_score(slide.slide, each, settings.pool, settings.k) for slide, each in pairs]


@torch.inference_mode()
def score_tiles(
    network: TileNetwork, source: TileSource, tiles: Indices, device: torch.device, dtype: torch.dtype, workers: int
) -> NDArray[np.float64]:
    """Return the logits of tiles, given by their indices in the source, in the same order."""
    firsts = np.cumsum(source.counts)
    logits: list[Tensor] = []
    done = 0
    for tiles_B3HW in _in_batches(loader.read_ahead(source, loader.requests_of(source, tiles), workers)):
        groups = np.searchsorted(firsts, tiles[done : done + len(tiles_B3HW)], side="right")
        done += len(tiles_B3HW)
        tiles_B3HW, maps_B33 = tiles_B3HW.to(device), source.maps(groups)
        if maps_B33 is not None:
            tiles_B3HW = stain.apply_maps(tiles_B3HW, maps_B33)
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            logits.append(network(network.encoder.normalize(tiles_B3HW)))
    return torch.cat(logits).double().cpu().numpy()


def _in_batches(parts: Iterator[Pixels]) -> Iterator[Tensor]:
    """Yield the tiles of many small parts in batches of about `SCORE_BATCH`."""
    waiting: list[Tensor] = []
    for part in parts:
        waiting.append(part.tiles_B3HW)
        if sum(map(len, waiting)) >= SCORE_BATCH:
            yield torch.cat(waiting)
            waiting = []
    if waiting:
        yield torch.cat(waiting)


def num_workers(settings: SupervisedSettings) -> int:
    """Return the number of worker processes that read tiles."""
    return loader.default_workers() if settings.workers is None else settings.workers
