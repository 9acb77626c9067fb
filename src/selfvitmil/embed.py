"""Embedding: a tile table, its slide and an encoder in, one feature file per slide out.

Tiles are read from the slide in the order of the table (`readers`) while the encoder processes earlier ones; the
slide's stain transform is applied on the encoder's device. A feature file is up to date if encoder, slide, tiles and
everything else that changes the numbers are those it was built from; then it is kept.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from selfvitmil import stain
from selfvitmil.bags import FORMAT_VERSION, read_bag, write_bag
from selfvitmil.encoder import Encoder, check_fits, load_encoder
from selfvitmil.encoder.files import WEIGHT_FILES
from selfvitmil.encoder.network import patch_product
from selfvitmil.engine import num_cores
from selfvitmil.errors import BagError, EncoderError
from selfvitmil.runtime.device import PRECISIONS, choose_device, choose_precision
from selfvitmil.settings import EmbedSettings, EngineSettings
from selfvitmil.slides import SlideRef
from selfvitmil.store.files import file_fingerprint
from selfvitmil.store.provenance import MISSING, UP_TO_DATE, BuildOutcome, Freshness, Provenance, damaged, outcome_of
from selfvitmil.tiles import TileTable, check_tiled, read_tiles

if TYPE_CHECKING:
    from selfvitmil.data.readers import TileBatch, TileReaders

SETTINGS = ("reader", "precision", "layout")
"""What feature files store of their provenance besides inputs."""
OPTIONAL_PROVENANCE = ("slide", "slide_mpp", "reader", "precision", "layout")
"""What the first feature files did not store: its absence alone does not make a file stale."""


@dataclass(frozen=True)
class EmbedJob:
    """Input of one worker call: the slide to embed."""

    slide: SlideRef
    table: Path
    """Tile table."""
    bag: Path
    """Output: bags/<tiling>/features_<encoder>/<slide>.h5."""
    encoder: str
    """Folder, checkpoint, timm or hub name, as for `load_encoder`."""
    name: str
    """Name of the embeddings in the study: the encoder, plus the layout if one was requested."""
    stain_method: str
    """`slide`, `tile` or `none`."""
    settings: EmbedSettings


@dataclass(frozen=True)
class EmbeddedSlide:
    """Result for one slide."""

    num_tiles: int
    outcome: BuildOutcome
    wait_share: float
    """Fraction of the time that the encoder waited for tiles."""
    warnings: tuple[str, ...] = ()


def embed_slide(job: EmbedJob) -> EmbeddedSlide:
    """Embed one slide, unless its feature file is up to date. Raises SelfVitMilError on failure."""
    table = read_tiles(job.table)
    model = load_for(job.encoder, job.settings)
    check_fits(model.encoder.config, table.mpp, table.size_px, job.stain_method)
    now = _provenance(job, model.identity, table, layout=model.encoder.config.layout)
    freshness = _freshness(job.bag, now)
    if freshness.is_up_to_date:
        return EmbeddedSlide(len(table), UP_TO_DATE, 0.0)
    check_tiled(table, job.slide)
    features_ND, wait_share, unfitted = _encode(model, batches(table, job, model.device), table, job)
    write_bag(job.bag, features_ND, table, job.name, {**now.settings, **now.inputs, "precision": str(model.dtype)})
    warnings = (f"{unfitted} tiles keep their colours: their stains could not be fitted",) if unfitted else ()
    return EmbeddedSlide(len(table), outcome_of(freshness), wait_share, warnings)


def features_freshness(job: EmbedJob, identity: str) -> Freshness:
    """Return whether the feature file of a slide is up to date for an encoder of that `identity`."""
    return _freshness(job.bag, _provenance(job, identity, read_tiles(job.table)))


def _provenance(job: EmbedJob, identity: str, table: TileTable, **settings: Any) -> Provenance:
    """Return what embeddings depend on, beyond rounding: batch, device and compilation do not make a file stale.

    Nor does the precision, unless one is requested: with `auto` the device decides.
    """
    fit = table.stain if job.stain_method == "slide" else None
    inputs = {
        "encoder": identity,  # covers the layout
        "slide": table.fingerprint,
        "slide_mpp": table.slide_mpp,
        "tiles": table.digest,
        "stain": job.stain_method if fit is None else fit.to_attributes(),
    }
    settings = {"reader": job.slide.reader, **settings}
    if job.settings.precision != "auto":
        settings["precision"] = str(PRECISIONS[job.settings.precision])
    return Provenance("embed", FORMAT_VERSION, settings, inputs)


def _freshness(bag: Path, now: Provenance) -> Freshness:
    if not bag.exists():
        return MISSING
    try:
        attributes = read_bag(bag).attributes
        record, version = json.loads(attributes.get("made_from", "{}")), attributes.get("format_version")
    except BagError:
        return damaged(bag)
    settings = {key: value for key, value in record.items() if key in SETTINGS}
    inputs = {key: value for key, value in record.items() if key not in SETTINGS}
    return now.compare(Provenance("embed", version, settings, inputs), optional=OPTIONAL_PROVENANCE)


def workers_for(settings: EngineSettings, device: str) -> EngineSettings:
    """Use one worker per GPU unless the user set something else; with a single GPU the calling process does the
    work."""
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
    """Batch size of every call if the encoder is compiled for a fixed one; smaller batches are padded."""

    @torch.inference_mode()
    def __call__(self, tiles_B3HW: torch.Tensor) -> torch.Tensor:
        """Return float16 embeddings of uint8 tiles on the encoder's device."""
        number = len(tiles_B3HW)
        tiles_B3HW = tiles_B3HW.contiguous()  # another memory format would recompile a compiled encoder
        if self.batch is not None and number < self.batch:
            missing = (self.batch - number, *tiles_B3HW.shape[1:])
            tiles_B3HW = torch.cat([tiles_B3HW, tiles_B3HW.new_zeros(missing)])
        autocast = self.dtype != torch.float32
        with torch.autocast(self.device.type, dtype=self.dtype, enabled=autocast):
            return self.encoder.encode(tiles_B3HW)[:number].half()


def load_for(source: str, settings: EmbedSettings) -> LoadedEncoder:
    """Return the encoder on its device, loaded once per process and again when its files have changed."""
    path = Path(source)
    files = [path, *(path / name for name in ("config.json", *WEIGHT_FILES))]
    content = tuple(file_fingerprint(file) for file in files if file.is_file())
    return _load(source, content, settings)  # pyright: ignore[reportArgumentType]


@lru_cache(maxsize=1)  # settings are frozen, hence hashable
def _load(source: str, content: tuple[str, ...], settings: EmbedSettings) -> LoadedEncoder:
    del content  # only a cache key: the files may have been replaced
    device = choose_device(settings.device, flag="--embed.device", claim=True)
    encoder = load_encoder(source, layout=settings.layout).to(device).eval()
    identity = encoder.identity()
    if device.type == "cuda":
        use_patch_product(encoder)
    if settings.compile:
        # Compile the encoder, not its backbone: tokens are not obtained by calling the backbone itself.
        encoder.compile(dynamic=False)
    batch = settings.batch if settings.compile else None
    return LoadedEncoder(encoder, identity, device, choose_precision(settings.precision, device), batch)


class PatchProduct(nn.Module):
    """Patch embedding as a matrix product (`patch_product`) instead of a convolution."""

    def __init__(self, convolution: nn.Conv2d):
        super().__init__()
        self.weight, self.bias = convolution.weight, convolution.bias

    def forward(self, images_B3HW: torch.Tensor) -> torch.Tensor:
        return patch_product(images_B3HW, self.weight, self.bias).permute(0, 3, 1, 2)


def use_patch_product(encoder: Encoder) -> None:
    """Replace a ViT's patch-embedding convolution by the equivalent matrix product; weights keep names and values."""
    patches: Any = getattr(encoder.backbone, "patch_embed", None)
    convolution = getattr(patches, "proj", None)
    if type(convolution) is not nn.Conv2d or convolution.stride != convolution.kernel_size:
        return
    if convolution.in_channels == 3 and convolution.padding == (0, 0) and convolution.dilation == (1, 1):
        patches.proj = PatchProduct(convolution)


# ---------------------------------------------------------------------------------------------------- the work


def batches(table: TileTable, job: EmbedJob, device: torch.device) -> Iterator[TileBatch]:
    """Yield batches in the table's order, read by processes if the encoder is on a GPU, else by threads."""
    from selfvitmil.data.readers import TileReaders, TileRequest, read_with_threads

    request = TileRequest(job.slide.at_mpp(table.slide_mpp), table.mpp, job.stain_method == "tile")
    gpus = torch.cuda.device_count() if device.type == "cuda" else 1
    num_readers = job.settings.readers or max(1, num_cores() // gpus)
    if device.type == "cuda" and TileReaders.available and num_readers > 1:
        yield from _reader_processes(num_readers, job.settings.batch, table.size_px).read(request, table.coords_l0)
    else:
        yield from read_with_threads(request, table.coords_l0, table.size_px, job.settings.batch, num_readers)


_processes: dict[tuple[int, int, int], TileReaders] = {}


def _reader_processes(num_readers: int, batch: int, size_px: int) -> TileReaders:
    """Return the reader processes of this process, kept between slides, with memory pinned for the GPU."""
    from selfvitmil.data.readers import TileReaders

    key = (num_readers, batch, size_px)
    if key not in _processes or not _processes[key].alive:
        for readers in _processes.values():
            readers.close()
        _processes.clear()
        _processes[key] = TileReaders(*key)
        memory = torch.from_numpy(_processes[key].tiles_KBHW3)
        # Without pinning it is only slower, so the result is ignored.
        runtime: Any = torch.cuda.cudart()
        runtime.cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
    return _processes[key]


def _encode(
    model: LoadedEncoder, batches: Iterator[TileBatch], table: TileTable, job: EmbedJob
) -> tuple[NDArray[np.float16], float, int]:
    features_ND = np.empty((len(table), model.encoder.dim), np.float16)
    fit = table.stain if job.stain_method == "slide" else None
    begin, waited, unfitted, row = time.perf_counter(), 0.0, 0, 0
    finite = torch.ones((), dtype=torch.bool, device=model.device)
    pending: tuple[int, torch.Tensor] | None = None
    for batch in batches:
        waited, unfitted = waited + batch.waited_s, unfitted + batch.unfitted
        tiles_BHW3 = torch.from_numpy(batch.tiles_BHW3).to(model.device, non_blocking=True)
        tiles_B3HW = tiles_BHW3.permute(0, 3, 1, 2)
        if fit is not None and fit.fitted:
            tiles_B3HW = stain.apply(tiles_B3HW, fit)
        try:
            embeddings = model(tiles_B3HW)
        except torch.OutOfMemoryError:
            raise EncoderError(
                f"{job.slide.name}: out of GPU memory",
                f"a batch of {len(tiles_BHW3)} tiles is too large for this encoder",
                f"Lower --embed.batch, for instance to {max(1, len(tiles_BHW3) // 4)}",
                code="out-of-gpu-memory",
            ) from None
        finite &= embeddings.isfinite().all()
        if pending is not None:  # fetch the previous batch while the GPU works on this one
            features_ND[pending[0] : pending[0] + len(pending[1])] = pending[1].cpu().numpy()
        pending, row = (row, embeddings), row + len(tiles_BHW3)
    if pending is not None:
        features_ND[pending[0] :] = pending[1].cpu().numpy()
    if not finite:
        raise EncoderError(
            f"{job.slide.name}: the encoder returned NaN or infinite embeddings",
            "values beyond 65504 do not fit into float16, or the encoder is damaged",
            "Try --embed.precision fp32; if that does not help, the encoder cannot be used",
            code="non-finite-embeddings",
        )
    return features_ND, waited / max(time.perf_counter() - begin, 1e-9), unfitted
