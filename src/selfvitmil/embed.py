"""Embedding: a tile table, its slide and an encoder in, one feature file per slide out.

Slides flow through: while the encoder works, the next slides are checked and their tiles read (`readers`), and
finished feature files are written. A GPU gets full batches, which small slides share. The slide's stain transform is
applied on the encoder's device. A feature file is up to date if encoder, slide, tiles and
everything else that changes the numbers are those it was built from; then it is kept.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Generator, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import nn

from selfvitmil import stain
from selfvitmil.bags import FORMAT_VERSION, read_bag, write_bag
from selfvitmil.encoder import Encoder, check_fits, load_encoder
from selfvitmil.encoder.files import WEIGHT_FILES
from selfvitmil.encoder.network import patch_product
from selfvitmil.engine import num_cores
from selfvitmil.errors import BagError, EncoderError
from selfvitmil.runtime.device import PRECISIONS, choose_device, choose_precision
from selfvitmil.settings import EmbedSettings
from selfvitmil.slides import SlideRef
from selfvitmil.store.files import file_fingerprint
from selfvitmil.store.provenance import MISSING, UP_TO_DATE, BuildOutcome, Freshness, Provenance, damaged, outcome_of
from selfvitmil.tiles import TileTable, check_tiled, read_tiles

if TYPE_CHECKING:
    from selfvitmil.data.readers import ProcessReaders, Readers, SlideTiles, TileBatch, TileRequest

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
    ((_, result),) = embed_slides({job.slide.name: job})
    if isinstance(result, Exception):
        raise result
    return result


def embed_slides(jobs: Mapping[str, EmbedJob]) -> Iterator[tuple[str, EmbeddedSlide | Exception]]:
    """Embed slides whose feature files are not up to date; yield each by its key as it is done, or why it failed.

    All jobs have the same encoder and settings. While the encoder works, the next slides are checked and read, and
    finished ones written, by other threads and processes.
    """
    if not jobs:
        return
    first = next(iter(jobs.values()))
    try:
        model = load_for(first.encoder, first.settings)
    except Exception as error:
        yield from ((key, error) for key in jobs)
        return
    with ThreadPoolExecutor(1, "check") as checking, ThreadPoolExecutor(WRITERS, "features") as writing:
        stream = _Stream(model, jobs, checking, writing)
        try:
            yield from stream.results()
        finally:
            checking.shutdown(wait=False, cancel_futures=True)


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


# ---------------------------------------------------------------------------------------------------- the encoder


@dataclass(frozen=True)
class LoadedEncoder:
    """An encoder on its device."""

    encoder: Encoder
    identity: str
    device: torch.device
    dtype: torch.dtype
    batch: int | None = None
    """Batch size of every call if it is fixed; smaller batches are padded."""

    @property
    def shares_batches(self) -> bool:
        """Whether slides may share batches: with a fixed size a tile's embedding does not depend on its neighbours."""
        return self.batch is not None

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
        encoder.compile(dynamic=False)  # pyright: ignore[reportUnknownMemberType]
    # A fixed size lets small slides share batches. On a CPU small batches cost nothing, and padding would.
    batch = settings.batch if settings.compile or device.type == "cuda" else None
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

CHECKED_AHEAD = 16
"""Slides whose tile tables and feature files are checked before the readers need them."""
WRITERS = 4
"""Threads that write feature files: they mostly wait for the disk to sync."""
MOST_UNWRITTEN = 16
"""Slides that may wait to be written; the encoder waits for the disk beyond that."""


class _ToEmbed:
    """A slide that is to be embedded, and its embeddings so far."""

    def __init__(self, job: EmbedJob, table: TileTable, model: LoadedEncoder, freshness: Freshness, now: Provenance):
        self.job, self.table, self._freshness = job, table, freshness
        self._made_from = {**now.settings, **now.inputs, "precision": str(model.dtype)}
        fit = table.stain if job.stain_method == "slide" else None
        self.fit = fit if fit is not None and fit.fitted else None
        self.features_ND = np.empty((len(table), model.encoder.dim), np.float16)
        self.missing = len(table)
        self.unfitted = 0
        self.spent_s = self.waited_s = 0.0

    @property
    def request(self) -> TileRequest:
        from selfvitmil.data.readers import TileRequest

        job, table = self.job, self.table
        return TileRequest(job.slide.at_mpp(table.slide_mpp), table.mpp, job.stain_method == "tile")

    def write(self) -> EmbeddedSlide:
        """Check the embeddings and write the feature file."""
        if not np.isfinite(self.features_ND).all():
            raise EncoderError(
                f"{self.job.slide.name}: the encoder returned NaN or infinite embeddings",
                "values beyond 65504 do not fit into float16, or the encoder is damaged",
                "Try --embed.precision fp32; if that does not help, the encoder cannot be used",
                code="non-finite-embeddings",
            )
        write_bag(self.job.bag, self.features_ND, self.table, self.job.name, self._made_from)
        unfitted = f"{self.unfitted} tiles keep their colours: their stains could not be fitted"
        warnings = (unfitted,) if self.unfitted else ()
        wait_share = self.waited_s / max(self.spent_s, 1e-9)
        return EmbeddedSlide(len(self.table), outcome_of(self._freshness), wait_share, warnings)


def _check(job: EmbedJob, model: LoadedEncoder) -> _ToEmbed | EmbeddedSlide:
    """Return the slide to embed, or its result if the feature file is up to date."""
    table = read_tiles(job.table)
    check_fits(model.encoder.config, table.mpp, table.size_px, job.stain_method)
    now = _provenance(job, model.identity, table, layout=model.encoder.config.layout)
    freshness = _freshness(job.bag, now)
    if freshness.is_up_to_date:
        return EmbeddedSlide(len(table), UP_TO_DATE, 0.0)
    check_tiled(table, job.slide)
    return _ToEmbed(job, table, model, freshness, now)


class _Stream:
    """Slides on their way from tile table to feature file."""

    def __init__(self, model: LoadedEncoder, jobs: Mapping[str, EmbedJob], checking: Executor, writing: Executor):
        self._model, self._jobs = model, jobs
        self._checking, self._writing = checking, writing
        self._open: dict[str, _ToEmbed] = {}
        self._unwritten: dict[str, Future[EmbeddedSlide]] = {}
        self._done: deque[tuple[str, EmbeddedSlide | Exception]] = deque()
        self._pending: tuple[TileBatch, torch.Tensor] | None = None

    def results(self) -> Iterator[tuple[str, EmbeddedSlide | Exception]]:
        """Yield the result of every slide."""
        for size_px, slides in groupby(self._to_read(), key=lambda slide: self._open[slide.key].table.size_px):
            with readers_for(next(iter(self._jobs.values())).settings, self._model.device, size_px) as readers:
                begin = time.perf_counter()
                for batch in readers.read(slides, shared=self._model.shares_batches):
                    self._encode(batch)
                    begin = self._note_time(batch, begin)
                    yield from self._written(most=MOST_UNWRITTEN)
                self._fetch()
        yield from self._written(most=0)

    def _to_read(self) -> Iterator[SlideTiles]:
        """Yield the slides to read, some of them checked ahead; the other results are done."""
        from selfvitmil.data.readers import SlideTiles

        left = iter(self._jobs.items())
        checks: deque[tuple[str, Future[_ToEmbed | EmbeddedSlide]]] = deque()
        while True:
            for key, job in islice(left, CHECKED_AHEAD - len(checks)):
                checks.append((key, self._checking.submit(_check, job, self._model)))
            if not checks:
                return
            key, check = checks.popleft()
            try:
                found = check.result()
            except Exception as error:
                self._done.append((key, error))
                continue
            if isinstance(found, EmbeddedSlide):
                self._done.append((key, found))
                continue
            self._open[key] = found
            if len(found.table):
                yield SlideTiles(key, found.request, found.table.coords_l0)
            else:
                self._finish(key)

    def _encode(self, batch: TileBatch) -> None:
        """Encode a batch, and fetch the previous one while the device works on this one."""
        for part in batch.parts:
            if part.error is not None:
                self._fail(part.key, part.error)
        embeddings = None
        if any(part.key in self._open for part in batch.parts):
            try:
                embeddings = self._model(self._normalized(batch))
            except Exception as error:
                for part in batch.parts:
                    self._fail(part.key, self._encoder_error(error, part.key, len(batch.tiles_BHW3)))
        self._fetch()
        self._pending = None if embeddings is None else (batch, embeddings)

    def _normalized(self, batch: TileBatch) -> torch.Tensor:
        """Return the tiles on the device, with the stains of their slides normalized."""
        tiles_BHW3 = torch.from_numpy(batch.tiles_BHW3)  # pyright: ignore[reportUnknownMemberType]
        tiles_BHW3 = tiles_BHW3.to(self._model.device, non_blocking=True)
        tiles_B3HW = tiles_BHW3.permute(0, 3, 1, 2)
        fits = [self._open[part.key].fit if part.key in self._open else None for part in batch.parts]
        if all(fit is None for fit in fits):
            return tiles_B3HW
        parts = [
            tiles_B3HW[part.place] if fit is None else stain.apply(tiles_B3HW[part.place], fit)
            for part, fit in zip(batch.parts, fits, strict=True)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _encoder_error(self, error: Exception, key: str, num_tiles: int) -> Exception:
        if not isinstance(error, torch.OutOfMemoryError):
            return error
        return EncoderError(
            f"{self._jobs[key].slide.name}: out of GPU memory",
            f"a batch of {num_tiles} tiles is too large for this encoder",
            f"Lower --embed.batch, for instance to {max(1, num_tiles // 4)}",
            code="out-of-gpu-memory",
        )

    def _fetch(self) -> None:
        """Put the embeddings of the previous batch into those of their slides; complete slides are written."""
        if self._pending is None:
            return
        batch, embeddings = self._pending
        self._pending = None
        try:
            features_BD = embeddings.cpu().numpy()
        except Exception as error:  # a GPU reports errors of its computations here
            for part in batch.parts:
                self._fail(part.key, self._encoder_error(error, part.key, len(batch.tiles_BHW3)))
            return
        for part in batch.parts:
            slide = self._open.get(part.key)
            if slide is None:
                continue
            slide.features_ND[part.rows] = features_BD[part.place]
            slide.unfitted += part.unfitted
            slide.missing -= part.rows.stop - part.rows.start
            if not slide.missing:
                self._finish(part.key)

    def _note_time(self, batch: TileBatch, begin: float) -> float:
        """Divide the time of a batch among its slides by their tiles; return the time now."""
        now = time.perf_counter()
        for part in batch.parts:
            share = (part.place.stop - part.place.start) / len(batch.tiles_BHW3)
            if (slide := self._open.get(part.key)) is not None:
                slide.spent_s += share * (now - begin)
                slide.waited_s += share * batch.waited_s
        return now

    def _fail(self, key: str, error: Exception) -> None:
        if self._open.pop(key, None) is not None:
            self._done.append((key, error))

    def _finish(self, key: str) -> None:
        self._unwritten[key] = self._writing.submit(self._open.pop(key).write)

    def _written(self, most: int) -> Iterator[tuple[str, EmbeddedSlide | Exception]]:
        """Yield what is done; wait while more than `most` slides are not written."""
        while len(self._unwritten) > most:
            wait(self._unwritten.values(), return_when=FIRST_COMPLETED)
            self._collect()
        self._collect()
        while self._done:
            yield self._done.popleft()

    def _collect(self) -> None:
        for key in [key for key, future in self._unwritten.items() if future.done()]:
            future = self._unwritten.pop(key)
            error = future.exception()
            self._done.append((key, error if isinstance(error, Exception) else future.result()))


@contextmanager
def readers_for(settings: EmbedSettings, device: torch.device, size_px: int) -> Generator[Readers]:
    """Give readers: processes, which are kept for the next call, if the encoder is on a GPU, else threads."""
    from selfvitmil.data.readers import ProcessReaders, ThreadReaders

    gpus = torch.cuda.device_count() if device.type == "cuda" else 1
    num_readers = settings.readers or max(1, num_cores() // gpus)
    if device.type == "cuda" and ProcessReaders.available and num_readers > 1:
        yield _reader_processes(num_readers, settings.batch, size_px)
    else:
        with ThreadReaders(num_readers, settings.batch, size_px) as readers:
            yield readers


_processes: dict[tuple[int, int, int], ProcessReaders] = {}


def _reader_processes(num_readers: int, batch: int, size_px: int) -> ProcessReaders:
    """Return the reader processes of this process, kept between calls, with memory pinned for the GPU."""
    from selfvitmil.data.readers import ProcessReaders

    key = (num_readers, batch, size_px)
    if key not in _processes or not _processes[key].alive:
        for readers in _processes.values():
            readers.close()
        _processes.clear()
        _processes[key] = ProcessReaders(*key)
        memory = torch.from_numpy(_processes[key].tiles_KBHW3)  # pyright: ignore[reportUnknownMemberType]
        # Without pinning it is only slower, so the result is ignored.
        cast("Any", torch.cuda.cudart()).cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
    return _processes[key]
