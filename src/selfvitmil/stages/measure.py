"""What `plan` measures in a few seconds: the number of tiles, and how fast this machine reads tiles and computes.

Nothing is written into the study. Stages turn these measurements into an `Estimate`.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from selfvitmil.cohort import Cohort, SlideRow
from selfvitmil.errors import SelfVitMilError, StainError
from selfvitmil.settings import StudySettings, tiling_name
from selfvitmil.slides import Slide, SlideRef
from selfvitmil.store.layout import StudyLayout
from selfvitmil.tiles import TileJob, count_tiles, read_tiles
from selfvitmil.tiling import tile_slide

if TYPE_CHECKING:
    from selfvitmil.encoder import Encoder
    from selfvitmil.stages.train import Compared

SAMPLED_SLIDES = 5
HEADERS_S, SAMPLE_S, READ_S, FORWARD_S = 10.0, 8.0, 0.4, 2.0
"""Time limits: headers of all slides, tissue of the sample, reading tiles of one slide, the encoder's forward pass."""
CPU_BATCH = 4
"""Tiles per batch on a CPU, where larger batches are no faster."""
MAX_INSTANCES = 1024
"""Instances of the bag that aggregators are timed with; beyond, their time is taken as proportional."""
EPOCHS_SHARE = 0.5
"""Typical share of the epochs that a training with early stopping runs."""
STARTUP_S = 3.0
"""Typical time until worker processes have started."""
WORKER_BYTES = 0.4e9
"""Typical memory of a process that reads tiles."""


@dataclass(frozen=True)
class EncoderRate:
    """An encoder and its speed on this machine."""

    network: Encoder
    tiles_per_s: float
    gflop_per_s: float
    """Achieved in the forward pass, in 10^9 floating-point operations per second."""

    @property
    def num_weights(self) -> int:
        return sum(weight.numel() for weight in self.network.backbone.parameters())

    def activations_per_block(self, size_px: int) -> int:
        """Return tokens x width of an image of this size; 0 for networks other than ViTs."""
        from selfvitmil.pretrain.learner import patch_px_of

        backbone: Any = self.network.backbone
        patch_px = patch_px_of(backbone)
        return 0 if patch_px is None else ((size_px // patch_px) ** 2 + 1) * backbone.num_features

    def activations(self, view_sizes_px: Sequence[int]) -> int:
        """Return tokens x width x blocks over views of these sizes; 0 for networks other than ViTs."""
        blocks: Any = getattr(self.network.backbone, "blocks", ())
        return sum(self.activations_per_block(size) for size in view_sizes_px) * len(blocks)


@dataclass(frozen=True)
class Measures:
    """All measurements of a plan."""

    tiles: Mapping[str, int] = field(default_factory=dict[str, int])
    """Slide -> number of tiles: counted in its tile table, else estimated."""
    num_sampled: int = 0
    """Slides that were tiled for the estimate; 0 where all are counted."""
    unreadable: tuple[str, ...] = ()
    """Slides that cannot be opened, taken as having no tiles."""
    tile_s: float = 0.0
    """Seconds to tile one slide in one process."""
    read_per_s: float = 0.0
    """Tiles that one process reads per second; 0 where none could be read."""
    encoder: EncoderRate | None = None
    """None where its weights are not on this disk."""
    bag_s: Mapping[str, float] = field(default_factory=dict[str, float])
    """Row of the comparison -> seconds to train it on one bag of mean size, over all epochs."""
    processes: int = 1
    """Worker processes."""
    gpu: bool = False
    startup_s: float = STARTUP_S
    """Until worker processes have started."""

    @property
    def workers_bytes(self) -> float:
        return self.processes * WORKER_BYTES

    @property
    def mean_tiles(self) -> int:
        return round(sum(self.tiles.values()) / max(len(self.tiles), 1))

    def tiles_of(self, slides: Iterable[str]) -> int:
        return sum(self.tiles.get(slide, 0) for slide in slides)

    def over_workers(self, seconds: float) -> float:
        """Return the time that work of so many seconds takes with all worker processes."""
        return self.startup_s + seconds / self.processes

    def with_reading(self, tiles_per_s: float) -> float:
        """Return the rate of a network with its readers: they overlap on a GPU and take turns on a CPU."""
        reading = self.read_per_s * self.processes or math.inf
        return min(tiles_per_s, reading) if self.gpu else 1 / (1 / tiles_per_s + 1 / reading)


# ---------------------------------------------------------------------------------------------------- slides


def measure_slides(study: Path, cohort: Cohort, settings: StudySettings) -> Measures:
    """Count the tiles of tiled slides; estimate those of the others from their area and a few slides tiled for it."""
    folder = StudyLayout(study).tiling(tiling_name(settings.tile))
    counted = {row.slide: n for row in cohort.rows if (n := count_tiles(folder / f"{row.slide}.h5")) is not None}
    untiled = [row for row in cohort.rows if row.slide not in counted]
    areas_um2 = _slide_areas(untiled, settings)
    sample = _sample([row for row in untiled if areas_um2.get(row.slide)] or cohort.rows, settings)
    num_tiles, sampled_um2, tile_s, read_per_s = np.array(sample).reshape(-1, 4).sum(axis=0).tolist()
    per_um2 = num_tiles / sampled_um2 if sample else 0.0
    mean_um2 = sum(areas_um2.values()) / max(len(areas_um2), 1)  # for slides whose header was not read in time
    estimated = {row.slide: round(areas_um2.get(row.slide, mean_um2) * per_um2) for row in untiled}
    return Measures(
        tiles=counted | estimated,
        num_sampled=len(sample) if untiled else 0,
        unreadable=tuple(slide for slide, area in areas_um2.items() if not area),
        tile_s=tile_s / max(len(sample), 1),
        read_per_s=read_per_s / max(len(sample), 1),
    )


def _slide_areas(rows: Sequence[SlideRow], settings: StudySettings) -> dict[str, float]:
    """Return slide -> area in square microns from its header; 0 where it cannot be opened."""
    end = time.perf_counter() + HEADERS_S
    areas_um2: dict[str, float] = {}
    for row in rows:
        if time.perf_counter() > end:
            break
        areas_um2[row.slide] = 0.0
        with suppress(SelfVitMilError), _open(row, settings) as slide:
            areas_um2[row.slide] = slide.size_l0[0] * slide.size_l0[1] * slide.mpp**2
    return areas_um2


def _sample(rows: Sequence[SlideRow], settings: StudySettings) -> list[tuple[int, float, float, float]]:
    """Tile a few slides, spread over the cohort, into a temporary folder, and read some of their tiles.

    Return (tiles, area in square microns, seconds of tiling, tiles read per second) of each.
    """
    places: Any = np.linspace(0, len(rows) - 1, min(SAMPLED_SLIDES, len(rows))).round().astype(int)
    chosen = [row for place, row in enumerate(rows) if place in places]
    end = time.perf_counter() + SAMPLE_S
    sample: list[tuple[int, float, float, float]] = []
    with tempfile.TemporaryDirectory(prefix="selfvitmil-plan-") as folder:
        for row in chosen:
            if sample and time.perf_counter() > end:
                break
            begin = time.perf_counter()
            with suppress(SelfVitMilError):  # its stage reports the error
                tile_slide(TileJob(SlideRef.of(row, settings.slide), Path(folder), settings))
                tile_s = time.perf_counter() - begin
                table = read_tiles(Path(folder, tiling_name(settings.tile), f"{row.slide}.h5"))
                area_um2 = table.size_l0[0] * table.size_l0[1] * table.slide_mpp**2
                sample.append((len(table), area_um2, tile_s, _read_rate(row, table.coords_l0, settings)))
    return sample


def _read_rate(row: SlideRow, coords_l0: Any, settings: StudySettings) -> float:
    """Return tiles read per second, with stain normalization where it is done tile by tile."""
    from selfvitmil import stain

    tile, number, begin = settings.tile, 0, time.perf_counter()
    with _open(row, settings) as slide:
        for x_l0, y_l0 in coords_l0:
            pixels = slide.read_tile(int(x_l0), int(y_l0), tile.size_px, tile.mpp)
            if settings.stain.method == "tile":
                with suppress(StainError):
                    stain.normalize_tile(pixels)
            number += 1
            if time.perf_counter() - begin > READ_S:
                break
    return number / (time.perf_counter() - begin)


def _open(row: SlideRow, settings: StudySettings) -> Slide:
    return SlideRef.of(row, settings.slide).open()


# ---------------------------------------------------------------------------------------------------- networks


def measure_encoder(encoder: Encoder, settings: StudySettings) -> EncoderRate:
    """Time the forward pass on noise, with the device, precision and batch that `embed` would use."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from selfvitmil.embed import LoadedEncoder
    from selfvitmil.runtime.device import choose_precision, synchronize

    device = torch.device("cuda" if torch.cuda.is_available() and settings.embed.device != "cpu" else "cpu")
    model = LoadedEncoder(encoder.to(device).eval(), "", device, choose_precision(settings.embed.precision, device))
    size, number = encoder.config.size_px, settings.embed.batch if device.type == "cuda" else CPU_BATCH
    tiles_B3HW = torch.randint(0, 256, (number, 3, size, size), dtype=torch.uint8, device=device)
    with FlopCounterMode(display=False) as counter:
        model(tiles_B3HW[:1])
    model(tiles_B3HW)  # warm-up
    end, fastest_s = time.perf_counter() + FORWARD_S, math.inf
    while math.isinf(fastest_s) or time.perf_counter() < end:
        begin = time.perf_counter()
        model(tiles_B3HW)
        synchronize(device)
        fastest_s = min(fastest_s, time.perf_counter() - begin)  # not slowed down by other processes
    rate = number / fastest_s
    return EncoderRate(encoder, rate, rate * counter.get_total_flops() / 1e9)


def measure_aggregators(rows: Sequence[Compared], dim: int, num_instances: int, device: Any) -> dict[str, float]:
    """Return by row the seconds to train it on one bag for its typical number of epochs: a step of each is timed."""
    import torch

    from selfvitmil.aggregate import build
    from selfvitmil.aggregate.bag_tensors import few_threads
    from selfvitmil.aggregate.recipes import recipe_of
    from selfvitmil.bags import Bag
    from selfvitmil.runtime.device import synchronize

    features_ND = np.random.default_rng(0).standard_normal((max(1, min(num_instances, MAX_INSTANCES)), dim), np.float32)
    bag_ND = torch.tensor(features_ND, device=device)
    found: dict[str, float] = {}
    for row in rows:
        recipe = recipe_of(row.method, row.train)
        module = build(row.method, dim, 1, **recipe.module_options).to(device).train()
        optimizer: Any = torch.optim.AdamW(module.parameters(), fused=True)
        step_s = math.inf
        with few_threads([Bag("noise", features_ND, None)], device):
            for _ in range(3):
                begin = time.perf_counter()
                module(bag_ND).logits_C.sum().backward()
                optimizer.step()
                synchronize(device)
                step_s = min(step_s, time.perf_counter() - begin)
        epochs = recipe.epochs * (EPOCHS_SHARE if recipe.patience else 1)
        found[row.title] = epochs * step_s * max(num_instances / len(features_ND), 1.0)
    return found
