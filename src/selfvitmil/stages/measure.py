"""A few seconds of measuring for `plan`: how many tiles slides have, and how fast this machine reads and computes.

Everything here only reads, and every measurement ends after a time of its own, whatever the machine.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from selfvitmil.cohort import Cohort, SlideRow
from selfvitmil.errors import SelfVitMilError, StainError
from selfvitmil.settings import SlideSettings, StudySettings, tiling_name
from selfvitmil.store.layout import StudyLayout

if TYPE_CHECKING:
    from selfvitmil.slides import Slide


SAMPLE = 5
"""Slides that are looked at closely."""
HEADERS_S, SAMPLE_S, READ_S, COMPUTE_S, LEARN_S = 10.0, 8.0, 2.0, 2.0, 4.0
"""Longest time for headers, for tissue of the sample, for reading tiles of it, for the encoder, for aggregators."""
TILES_AT_ONCE = 4
"""Tiles of a batch on a CPU, where a larger one is no faster."""
WORKER_BYTES = 0.4e9
"""Usual memory of a process that cuts or reads tiles."""
BAG_ROWS = 1024
"""Most instances of the bag that aggregators are timed with; beyond, their time grows with the number."""


# ---------------------------------------------------------------------------------------------------- slides


@dataclass(frozen=True)
class SlideMeasures:
    """What slides have and cost."""

    tiles: dict[str, int]
    """Slide -> tiles: from its table, or estimated."""
    num_estimated: int
    num_sampled: int
    tile_s: float
    """Seconds to cut one slide, one process."""
    read_per_s: float
    """Tiles read in a second by one process."""
    notes: tuple[str, ...] = ()


def measure_slides(study: Path, cohort: Cohort, settings: StudySettings) -> SlideMeasures:
    """Tiles of every slide: counted where there is a table, else by size and the share of tissue of a few slides."""
    tables = StudyLayout(study).tiling(tiling_name(settings.tile))
    known = {row.slide: count for row in cohort.rows if (count := count_tiles(tables / f"{row.slide}.h5")) is not None}
    open_rows = [row for row in cohort.rows if row.slide not in known]
    places, broken = _candidates(open_rows, settings)
    sample = _spread([row for row in open_rows if row.slide in places] or list(cohort.rows))
    seen = _look_closely(sample, settings)
    kept, offered = sum(look.kept for look in seen), sum(look.offered for look in seen)
    share = kept / offered if offered else 0.0
    usual = float(np.mean(list(places.values()))) * share if places else 0.0
    tiles = {
        row.slide: known.get(row.slide, round(places[row.slide] * share if row.slide in places else usual))
        for row in cohort.rows
        if row.slide not in broken
    }
    notes = [f"{len(broken)} slides cannot be opened: {', '.join(sorted(broken)[:5])}"] if broken else []
    tile_s = float(np.mean([look.seconds for look in seen])) if seen else 0.0
    rates = [look.read_per_s for look in seen if look.read_per_s > 0]
    read_per_s = float(np.mean(rates)) if rates else 0.0
    return SlideMeasures(tiles, len(tiles) - len(known), len(seen), tile_s, read_per_s, tuple(notes))


def count_tiles(table: Path) -> int | None:
    """Rows of a tile table; None when there is none that can be read."""
    from selfvitmil.untrusted import open_hdf5

    try:
        with open_hdf5(table) as file:
            return int(file["coords"].shape[0])  # pyright: ignore[reportAttributeAccessIssue]
    except (OSError, KeyError, ValueError):
        return None


def _candidates(rows: Sequence[SlideRow], settings: StudySettings) -> tuple[dict[str, int], set[str]]:
    """Places for tiles on every slide by its header, as far as the time goes; and slides that cannot be opened."""
    from selfvitmil.tiles import grid

    tile, places, broken = settings.tile, {}, set()
    begin = time.perf_counter()
    for row in rows:
        if time.perf_counter() - begin > HEADERS_S:
            break
        try:
            with _opened(row, settings.slide) as slide:
                places[row.slide] = len(grid(slide.size_l0, slide.mpp, tile.size_px, tile.mpp, tile.overlap_px))
        except SelfVitMilError:
            broken.add(row.slide)
    return places, broken


def _spread(rows: Sequence[SlideRow]) -> list[SlideRow]:
    """A few of them, evenly spread over the list."""
    chosen = np.unique(np.linspace(0, len(rows) - 1, min(SAMPLE, len(rows))).round().astype(int))
    return [rows[index] for index in chosen]


@dataclass(frozen=True)
class _Look:
    kept: int
    offered: int
    seconds: float
    read_per_s: float


def _look_closely(rows: Sequence[SlideRow], settings: StudySettings) -> list[_Look]:
    begin = time.perf_counter()
    looks: list[_Look] = []
    for row in rows:
        if looks and time.perf_counter() - begin > SAMPLE_S:
            break
        try:
            looks.append(_look(row, settings, READ_S / SAMPLE))
        except SelfVitMilError:  # its stage will tell
            continue
    return looks


def _opened(row: SlideRow, given: SlideSettings) -> Slide:
    from selfvitmil.slides import open_slide

    return open_slide(row.path, reader=given.reader, mpp=row.mpp or given.forced_mpp, otherwise_mpp=given.mpp)


def _look(row: SlideRow, settings: StudySettings, read_s: float) -> _Look:
    """Find the tissue of one slide, place tiles on it, read some of them."""
    from selfvitmil.geometry import extent_l0
    from selfvitmil.tiles import boxes_l0, grid, mask_fractions
    from selfvitmil.tissue import find_tissue

    tile = settings.tile
    begin = time.perf_counter()
    with _opened(row, settings.slide) as slide:
        tissue = find_tissue(slide, settings.tissue, row.slide)
        places = grid(slide.size_l0, slide.mpp, tile.size_px, tile.mpp, tile.overlap_px)
        boxes = boxes_l0(places, extent_l0(tile.size_px, tile.mpp, slide.mpp))
        kept = places[mask_fractions(boxes, tissue, slide.mpp) >= tile.min_tissue]
        seconds = time.perf_counter() - begin
        rate = _read_rate(slide, kept, settings, read_s)
    if rate and settings.stain.method == "slide":
        seconds += min(settings.stain.sample_tiles, len(kept)) / rate
    if rate and settings.tissue.fraction_from == "pixels":
        seconds += len(kept) / rate  # every tile is read to count its pixels
    return _Look(len(kept), len(places), seconds, rate)


def _read_rate(slide: Any, corners_l0: Any, settings: StudySettings, seconds: float) -> float:
    """Tiles a second, with stain normalization where it is done tile by tile; 0 when there are none."""
    from selfvitmil import stain

    tile, number, begin = settings.tile, 0, time.perf_counter()
    for x_l0, y_l0 in corners_l0:
        pixels = slide.read_tile(int(x_l0), int(y_l0), tile.size_px, tile.mpp)
        if settings.stain.method == "tile":
            with suppress(StainError):
                stain.normalize_tile(pixels)
        number += 1
        if time.perf_counter() - begin > seconds:
            break
    return number / max(time.perf_counter() - begin, 1e-9) if number else 0.0


# ---------------------------------------------------------------------------------------------------- networks


@dataclass(frozen=True)
class EncoderMeasures:
    """What an encoder is and how fast it runs here."""

    tiles_per_s: float
    gflops: float
    """Thousand million operations a second that it reached."""
    num_weights: int
    dim: int
    """Length of a vector."""
    patch_px: int | None
    """Of a ViT; None for other networks, whose activations are not reckoned."""
    width: int = 0
    depth: int = 0

    def activations(self, view_sizes_px: Sequence[int]) -> float:
        """Tokens times width times blocks, over views of these sizes."""
        patch = self.patch_px
        if patch is None:
            return 0.0
        return float(sum((edge // patch) ** 2 + 1 for edge in view_sizes_px) * self.width * self.depth)


def measure_encoder(encoder: Any, settings: StudySettings) -> EncoderMeasures:
    """Run an encoder on noise for a moment, as `embed` would."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from selfvitmil.embed import LoadedEncoder
    from selfvitmil.pretrain.learner import patch_px_of
    from selfvitmil.runtime.device import choose_precision, synchronize

    device = torch.device("cuda" if torch.cuda.is_available() and settings.embed.device != "cpu" else "cpu")
    dtype = choose_precision(settings.embed.precision, device)
    model = LoadedEncoder(encoder.to(device).eval(), "", device, dtype)
    size, number = encoder.config.size_px, settings.embed.batch if device.type == "cuda" else TILES_AT_ONCE
    tiles = torch.randint(0, 256, (number, 3, size, size), dtype=torch.uint8, device=device)
    with FlopCounterMode(display=False) as counter:
        model(tiles[:1])
    model(tiles)
    rounds, begin = 0, time.perf_counter()
    while not rounds or time.perf_counter() - begin < COMPUTE_S:
        model(tiles)
        synchronize(device)
        rounds += 1
    rate = rounds * number / (time.perf_counter() - begin)
    backbone = encoder.backbone
    weights = sum(weight.numel() for weight in backbone.parameters())
    gflops = rate * counter.get_total_flops() / 1e9
    patch_px = patch_px_of(backbone)
    shape = {} if patch_px is None else {"width": backbone.num_features, "depth": len(backbone.blocks)}
    return EncoderMeasures(rate, gflops, weights, encoder.dim, patch_px, **shape)


def measure_training(encoder: Any, settings: StudySettings, numbers: Any, recipes: Any, num_tiles: int) -> float | None:
    """Tiles a second of whole steps on noise: views, loss, gradients, update; None where memory does not hold them."""
    import torch

    from selfvitmil.data.views import make_views
    from selfvitmil.pretrain.learner import Learner, compute_loss
    from selfvitmil.runtime.device import choose_precision, synchronize

    own, size = settings.pretrain, settings.tile.size_px
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = choose_precision(own.precision, device)
    learner = Learner(encoder, own, numbers, own.seed).to(device)
    optimizer = torch.optim.AdamW(learner.student.parameters(), lr=1e-6)
    tiles_B3HW = torch.randint(0, 256, (num_tiles, 3, size, size), dtype=torch.uint8, device=device)
    ids_B = torch.arange(num_tiles, device=device)

    def step(number: int) -> None:
        views = make_views(tiles_B3HW, ids_B, number, recipes, (0.7,) * 3, (0.2,) * 3, dtype=dtype)
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            outcome = compute_loss(learner, learner.student, views, number, own.teacher_temp, lambda phase: None)
        outcome.loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        learner.finish_step(0.99, [] if outcome.state is None else [outcome.state])
        synchronize(device)

    try:
        step(0)  # not counted
        rounds, begin = 0, time.perf_counter()
        while not rounds or time.perf_counter() - begin < COMPUTE_S:
            rounds += 1
            step(rounds)
    except torch.OutOfMemoryError:
        return None
    return rounds * num_tiles / (time.perf_counter() - begin)


def measure_aggregators(
    methods: Sequence[str], dim: int, num_instances: int, settings: StudySettings
) -> dict[str, float]:
    """Method -> seconds of one step on a bag of so many instances; those that the time does not reach get the mean."""
    import torch

    from selfvitmil.aggregate import build
    from selfvitmil.aggregate.bag_store import few_threads
    from selfvitmil.bags import Bag
    from selfvitmil.runtime.device import synchronize

    device = torch.device("cuda" if torch.cuda.is_available() and settings.train.device != "cpu" else "cpu")
    rows = max(1, min(num_instances, BAG_ROWS))
    noise_ND = np.random.default_rng(0).standard_normal((rows, dim), np.float32)
    bag_ND = torch.from_numpy(noise_ND).to(device)
    steps: dict[str, float] = {}
    start = time.perf_counter()
    for method in methods:
        module = build(method, dim, 1).to(device).train()
        seconds: list[float] = []
        while not seconds or (len(seconds) < 3 and time.perf_counter() - start < LEARN_S):
            begin = time.perf_counter()
            with few_threads([Bag("noise", noise_ND, None)], device):
                module(bag_ND).logits_C.sum().backward()
            synchronize(device)
            seconds.append(time.perf_counter() - begin)
        steps[method] = min(seconds) * max(num_instances / rows, 1.0)
        if time.perf_counter() - start > LEARN_S:
            break
    usual = float(np.mean(list(steps.values()))) if steps else 0.0
    return {method: steps.get(method, usual) for method in methods}


# ---------------------------------------------------------------------------------------------------- all of it


@dataclass(frozen=True)
class Measures:
    """All that was measured for a plan."""

    slides: SlideMeasures
    encoder: EncoderMeasures | None
    """None where its weights are not at hand."""
    steps_s: dict[str, float]
    """Method -> seconds of one training step on a bag of the mean size."""
    processes: int
    """That work on slides at once."""
    gpu: bool

    @property
    def workers_bytes(self) -> float:
        return self.processes * WORKER_BYTES

    def tiles_of(self, slides: Iterable[str]) -> int:
        return sum(self.slides.tiles.get(slide, 0) for slide in slides)

    def with_reading(self, rate: float) -> float:
        """Tiles a second of a network and its readers: overlapping on a GPU, by turns on a CPU."""
        reading = self.slides.read_per_s * self.processes or math.inf
        return min(rate, reading) if self.gpu else 1 / (1 / rate + 1 / reading)


def untrained_network(settings: StudySettings) -> Any:
    """The network that would be trained; from scratch where its first weights are not at hand."""
    from selfvitmil.pretrain.learner import start_encoder

    pretrain = settings.pretrain
    if pretrain.init != "scratch" and not Path(pretrain.init).exists():
        pretrain = pretrain.model_copy(update={"init": "scratch"})
    return start_encoder(pretrain, settings.tile.size_px, 0)
