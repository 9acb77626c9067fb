"""Tiles to vectors: a tile table, its slide and an encoder come in, a feature file per slide goes out.

Threads read tiles from the slide in the order of the table while the encoder works on those already there; the stain
map of the slide is applied on the encoder's device. A feature file is current when encoder, tiles and stain are those
it was made from; then it is left alone.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from selfvitmil import stain
from selfvitmil.bags import read_bag, write_bag
from selfvitmil.encoder import Encoder, check_fits, load_encoder
from selfvitmil.engine import num_cores
from selfvitmil.errors import BagError, ConfigError, EncoderError, StainError
from selfvitmil.pretrain.surroundings import choose_precision
from selfvitmil.settings import EmbedSettings, EngineSettings
from selfvitmil.slides import Slide, open_slide
from selfvitmil.tiles import TileTable, read_tiles

READ_AHEAD = 3
"""Batches that are read before they are needed."""


@dataclass(frozen=True)
class EmbedJob:
    """All that a worker needs to embed one slide."""

    slide: str
    path: Path
    table: Path
    """Its tile table."""
    bag: Path
    """Where the feature file goes: bags/<tiling>/features_<encoder>/<slide>.h5."""
    encoder: str
    """Folder, checkpoint, timm or hub name, as `load_encoder` takes it."""
    name: str
    """What the encoder is called in the study."""
    stain_method: str
    """`slide`, `tile` or `none`."""
    settings: EmbedSettings
    reader: str = "auto"
    mpp: float | None = None


@dataclass(frozen=True)
class EmbedResult:
    """What became of one slide."""

    num_tiles: int
    note: str
    """`made`, `current`, or `made again: ...`."""
    wait_share: float
    """Share of the time in which the encoder waited for tiles."""
    warnings: tuple[str, ...] = ()


def embed_slide(job: EmbedJob) -> EmbedResult:
    """Embed one slide, unless its feature file is current. Raises SelfVitMilError where it cannot."""
    table = read_tiles(job.table)
    model = load_for(job.encoder, job.settings)  # pyright: ignore[reportArgumentType]
    check_fits(model.encoder.config, table.mpp, table.size_px, job.stain_method)
    made_from = {"encoder": model.identity, "tiles": table.digest, "stain": _stain_identity(table, job.stain_method)}
    note = _why_stale(job.bag, made_from)
    if note is None:
        return EmbedResult(len(table), "current", 0.0)
    with open_slide(job.path, reader=job.reader, mpp=job.mpp) as slide:
        tiles = _batches(slide, table, job)
        features_ND, wait_share, unfitted = _encode(model, tiles, table, job)
    _check_finite(features_ND, job)
    write_bag(job.bag, features_ND, table, job.name, made_from)
    warnings = (f"{unfitted} tiles keep their colours: their stains could not be fitted",) if unfitted else ()
    return EmbedResult(len(table), note, wait_share, warnings)


def _stain_identity(table: TileTable, method: str) -> Any:
    return table.stain.to_attributes() if method == "slide" and table.stain is not None else method


def _why_stale(bag: Path, made_from: Mapping[str, Any]) -> str | None:
    if not bag.exists():
        return "made"
    try:
        before = json.loads(read_bag(bag).attributes.get("made_from", "{}"))
    except BagError:
        return "made again: the feature file is damaged"
    changed = [key for key in made_from if before.get(key) != made_from[key]]
    return f"made again: another {' and '.join(changed)} than before" if changed else None


def workers_for(settings: EngineSettings, device: str) -> EngineSettings:
    """Where nothing else was asked for: a worker per GPU; with a single one the calling process does it."""
    asked = settings.workers is not None or settings.cluster is not None or settings.batch.kind != "none"
    if asked or device == "cpu" or not torch.cuda.is_available():
        return settings
    gpus = torch.cuda.device_count() if device == "auto" else 1
    return settings.model_copy(update={"workers": 0 if gpus == 1 else gpus})


# ---------------------------------------------------------------------------------------------------- the encoder


@dataclass(frozen=True)
class LoadedEncoder:
    """An encoder on its device."""

    encoder: Encoder
    identity: str
    device: torch.device
    dtype: torch.dtype
    batch: int | None = None
    """Tiles that every call must have, where the encoder is compiled for that many; a smaller batch is filled up."""

    @torch.inference_mode()
    def __call__(self, tiles_B3HW: torch.Tensor) -> torch.Tensor:
        """Vectors in float16 of uint8 tiles on the encoder's device."""
        number = len(tiles_B3HW)
        if self.batch is not None and number < self.batch:
            missing = (self.batch - number, *tiles_B3HW.shape[1:])
            tiles_B3HW = torch.cat([tiles_B3HW, tiles_B3HW.new_zeros(missing)])
        autocast = self.dtype != torch.float32
        with torch.autocast(self.device.type, dtype=self.dtype, enabled=autocast):
            return self.encoder.encode(tiles_B3HW)[:number].half()


@lru_cache(maxsize=1)  # settings are frozen, hence hashable
def load_for(source: str, settings: EmbedSettings) -> LoadedEncoder:
    """The encoder on its device, loaded once per process."""
    device = choose_device(settings.device)
    encoder = load_encoder(source).to(device).eval()
    identity = encoder.identity()
    if device.type == "cuda":
        use_patch_product(encoder)
    if settings.compile:
        # Of the encoder, not of its network: tokens are not taken by calling the network itself.
        encoder.compile(dynamic=False)
    batch = settings.batch if settings.compile else None
    return LoadedEncoder(encoder, identity, device, choose_precision(settings.precision, device), batch)


class PatchProduct(nn.Module):
    """A convolution whose windows do not overlap, as the one matrix product that it is."""

    def __init__(self, convolution: nn.Conv2d):
        super().__init__()
        self.weight, self.bias = convolution.weight, convolution.bias

    def forward(self, images_B3HW: torch.Tensor) -> torch.Tensor:
        batch, _, height, width = images_B3HW.shape
        p, q = self.weight.shape[2:]
        patches = images_B3HW.reshape(batch, 3, height // p, p, width // q, q).permute(0, 2, 4, 1, 3, 5)
        tokens = functional.linear(patches.flatten(3), self.weight.flatten(1), self.bias)
        return tokens.permute(0, 3, 1, 2)


def use_patch_product(encoder: Encoder) -> None:
    """Replace a ViT's embedding of patches by the product that it is; names and values of its weights stay."""
    patches: Any = getattr(encoder.backbone, "patch_embed", None)
    convolution = getattr(patches, "proj", None)
    if type(convolution) is not nn.Conv2d or convolution.stride != convolution.kernel_size:
        return
    if convolution.in_channels == 3 and convolution.padding == (0, 0) and convolution.dilation == (1, 1):
        patches.proj = PatchProduct(convolution)


def choose_device(wanted: str) -> torch.device:
    """`auto` claims a GPU that no other worker on this machine has claimed, or takes the CPU where there is none."""
    if wanted != "auto":
        try:
            device = torch.device(wanted)
            torch.empty(1, device=device)
        except (RuntimeError, AssertionError) as error:
            raise ConfigError(
                f"device {wanted!r} cannot be used", str(error).splitlines()[0], "Use --embed.device auto"
            ) from None
        return device
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", _claim_gpu(torch.cuda.device_count()))


_claims: list[int] = []


def _claim_gpu(number: int) -> int:
    """The first GPU whose lock file is free, held as long as this process lives; with all taken, share the first."""
    for index in range(number):
        path = Path(tempfile.gettempdir()) / f"selfvitmil-{os.getuid()}-gpu{index}.lock"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            continue
        _claims.append(descriptor)
        return index
    return 0


# ---------------------------------------------------------------------------------------------------- the work


def _batches(slide: Slide, table: TileTable, job: EmbedJob) -> Iterator[tuple[torch.Tensor, int, float]]:
    """Batches (B, H, W, 3) in the table's order, tiles among them whose stains did not fit, and seconds waited for."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 1
    threads = job.settings.reader_threads or max(1, num_cores() // gpus)
    size = job.settings.batch
    pin = torch.cuda.is_available() and job.settings.device != "cpu"
    with ThreadPoolExecutor(threads) as pool, _quick_switches():
        waiting: deque[tuple[torch.Tensor, list[Future[bool]]]] = deque()

        def submit(start: int) -> None:
            corners = table.coords_l0[start : start + size]
            shape = (len(corners), table.size_px, table.size_px, 3)
            tiles_BHW3 = torch.empty(shape, dtype=torch.uint8, pin_memory=pin)
            places = zip(corners, tiles_BHW3.numpy(), strict=True)
            waiting.append(
                (tiles_BHW3, [pool.submit(_read, slide, x, y, table, job.stain_method, out) for (x, y), out in places])
            )

        starts = iter(range(0, len(table), size))
        for start in islice(starts, READ_AHEAD):
            submit(start)
        while waiting:
            begin = time.perf_counter()
            tiles_BHW3, futures = waiting.popleft()
            unfitted = sum(not future.result() for future in futures)
            waited = time.perf_counter() - begin
            if (start := next(starts, None)) is not None:
                submit(start)
            yield tiles_BHW3, unfitted, waited


@contextmanager
def _quick_switches() -> Iterator[None]:
    """Let the thread that feeds the encoder have its turn soon: every call into torch takes one, among many readers."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def _read(slide: Slide, x: int, y: int, table: TileTable, method: str, out: NDArray[np.uint8]) -> bool:
    """Read one tile into `out`; whether its stains could be normalized (where every tile is normalized for itself)."""
    out[:] = slide.read_tile(int(x), int(y), table.size_px, table.mpp)
    if method != "tile":
        return True
    try:
        out[:] = stain.normalize_tile(out)
    except StainError:
        return False
    return True


def _encode(
    model: LoadedEncoder, batches: Iterator[tuple[torch.Tensor, int, float]], table: TileTable, job: EmbedJob
) -> tuple[NDArray[np.float16], float, int]:
    features_ND = np.empty((len(table), model.encoder.dim), np.float16)
    fit = table.stain if job.stain_method == "slide" else None
    begin, waited, unfitted, row = time.perf_counter(), 0.0, 0, 0
    pending: tuple[int, torch.Tensor] | None = None
    for tiles_BHW3, num_unfitted, seconds in batches:
        waited, unfitted = waited + seconds, unfitted + num_unfitted
        tiles_B3HW = tiles_BHW3.to(model.device, non_blocking=True).permute(0, 3, 1, 2)
        if fit is not None and fit.fitted:
            tiles_B3HW = stain.apply(tiles_B3HW, fit)
        try:
            vectors = model(tiles_B3HW)
        except torch.OutOfMemoryError:
            raise EncoderError(
                f"{job.slide}: the GPU's memory is full",
                f"{len(tiles_BHW3)} tiles at once are too many for this encoder",
                f"Lower --embed.batch, for instance to {max(1, len(tiles_BHW3) // 4)}",
            ) from None
        if pending is not None:  # fetch the batch before this one: the GPU is already at work on the next
            features_ND[pending[0] : pending[0] + len(pending[1])] = pending[1].cpu().numpy()
        pending, row = (row, vectors), row + len(tiles_BHW3)
    if pending is not None:
        features_ND[pending[0] :] = pending[1].cpu().numpy()
    return features_ND, waited / max(time.perf_counter() - begin, 1e-9), unfitted


def _check_finite(features_ND: NDArray[np.float16], job: EmbedJob) -> None:
    if not np.isfinite(features_ND).all():
        raise EncoderError(
            f"{job.slide}: the encoder gives vectors that are not numbers",
            "values beyond 65504 do not fit into float16, or the encoder itself is damaged",
            "Try --embed.precision fp32; if that does not help, the encoder cannot be used",
        )
