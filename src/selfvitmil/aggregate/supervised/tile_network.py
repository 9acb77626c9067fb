"""Tile classifier (tumour or normal): an encoder, usually a ResNet-18, with a linear head; supervised baseline.

Input: annotated slides. Output: a model folder (`model.safetensors`, `config.json`, `metrics.jsonl`), and scores of
slides. Tiles are read from the slides as in pretraining (`data.sources`, `data.loader`).

Half of every batch is tumour: each class is an endless stream of passes over its tiles (at most `tiles_per_slide` of a
slide per pass, redrawn each time, neighbours together as in pretraining), so the rarer class is oversampled. A batch is
a function of (seed, step) alone: resuming needs no sampler state. Tiles are rotated, flipped and augmented in stain and
colour on the device, but not cropped: the tumour of a tile may lie in any corner. The epoch is chosen by the AUC of
validation tiles. An interrupted run resumes after its last epoch.

Axes in names: B tiles of a batch, N tiles of a slide, D width, V views, S edge of a view, H and W height and width.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import expit
from torch import Tensor, nn
from torch.nn import functional as F

from selfvitmil import stain
from selfvitmil.aggregate.base import BagScore
from selfvitmil.aggregate.supervised.base import (
    CONFIG,
    NORMAL,
    TUMOUR,
    AnnotatedSlide,
    LabelledTiles,
    check_sides,
    label_slides,
    read_config,
    read_history,
    read_model,
    sample_rows,
    write_model,
)
from selfvitmil.data import loader
from selfvitmil.data.loader import Batch, Pool, TileLoader, TileOrder, channel_statistics
from selfvitmil.data.sources import Indices, Pixels, SlideTiles, TileSource, TrainSlide
from selfvitmil.data.views import ViewRecipe, make_views
from selfvitmil.encoder import Encoder, EncoderConfig, build_backbone, build_encoder, check_fits, load_encoder
from selfvitmil.errors import ArtefactError, EncoderError
from selfvitmil.metrics import auc
from selfvitmil.runtime.device import choose_device, choose_precision
from selfvitmil.runtime.training import (
    CHECKPOINT_FILE,
    CosineSchedule,
    parameter_groups,
    read_checkpoint,
    suggested_warmup_steps,
    write_checkpoint,
)
from selfvitmil.settings import SupervisedSettings
from selfvitmil.slides import SlideRef
from selfvitmil.store.files import hash_of
from selfvitmil.store.provenance import (
    MISSING,
    UP_TO_DATE,
    BuildOutcome,
    Freshness,
    Provenance,
    compare_digests,
    damaged,
    outcome_of,
)

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
    tensors, config = read_model(folder, KIND)
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
) -> list[NDArray[np.float64]]:
    """Return the tumour probability of each tile of every slide's table, for equal class priors."""
    settings = settings or SupervisedSettings()
    source = SlideTiles(slides, stain_method=stain_method)
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
) -> list[BagScore]:
    """Return one score per slide, pooled over all tiles of its table by `settings.pool`."""
    settings = settings or SupervisedSettings()
    found = tile_probabilities(network, slides, settings, stain_method=stain_method)
    pairs = zip(slides, found, strict=True)
    return [bag_score(slide.slide.name, each, settings.pool, settings.k) for slide, each in pairs]


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
        tiles_B3HW, transforms_B33 = tiles_B3HW.to(device), source.stain_transforms(groups)
        if transforms_B33 is not None:
            tiles_B3HW = stain.apply_transforms(tiles_B3HW, transforms_B33)
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


# ---------------------------------------------------------------------------------------------------- slide scores


def slide_probability(probabilities_N: NDArray[np.float64], pool: Literal["max", "topk"], k: int) -> float:
    """Return the largest tile probability, or the mean of the `k` largest (of all where there are fewer)."""
    number = 1 if pool == "max" else min(k, len(probabilities_N))
    return float(np.partition(probabilities_N, -number)[-number:].mean())


def bag_score(slide: str, probabilities_N: NDArray[np.float64], pool: Literal["max", "topk"], k: int) -> BagScore:
    """Return the slide's score in the common form; `critical` is the tile with the highest probability."""
    return BagScore(
        slide=slide,
        probabilities=(slide_probability(probabilities_N, pool, k),),
        max_probabilities=None,
        bag_probabilities=None,
        attention_entropy=None,
        critical=int(probabilities_N.argmax()),
    )


# ---------------------------------------------------------------------------------------------------- balanced batches


@dataclass(frozen=True, eq=False)
class BalancedOrder(TileOrder):
    """Class-balanced batches, from labels of all tiles of a source (numbered across slides)."""

    labels: NDArray[np.int8] = field(kw_only=True)

    def of_class(self, label: int) -> tuple[TileOrder, Indices]:
        """Return an order over the tiles of one class, and their indices among all tiles."""
        of_slide = np.split(self.labels == label, np.cumsum(self.counts)[:-1])
        counts = tuple(int(mine.sum()) for mine in of_slide)
        own = TileOrder(counts, batch=1, seed=self.seed + label, tiles_per_slide=self.tiles_per_slide, run=self.run)
        return own, np.flatnonzero(self.labels == label)

    def pools(self, first_step: int, last_step: int) -> Iterator[Pool]:
        """Yield the batches of steps `first_step` up to (not including) `last_step`, pool by pool."""
        streams = [self.of_class(label) for label in (0, 1)]
        step = first_step
        while step < last_step:
            number, skip = divmod(step, self.batches_per_pool)
            halves = [self._drawn(number, label, *stream) for label, stream in enumerate(streams)]
            tiles, places = np.unique(np.concatenate(halves, axis=1), return_inverse=True)
            batches = [np.sort(part) for part in places.reshape(self.batches_per_pool, self.batch)]
            batches = batches[skip : skip + last_step - step]
            yield Pool(step, tiles, batches)
            step += len(batches)

    def _drawn(self, number: int, label: int, own: TileOrder, rows: Indices) -> Indices:
        """Return one class's share of a pool's batches, (batches, tiles): the next piece of its stream, shuffled."""
        size = (self.batch + 1 - label) // 2
        start, stop = (self.batches_per_pool * size * k for k in (number, number + 1))
        one_pass = own.tiles_per_epoch
        passes = range(start // one_pass, -(-stop // one_pass))
        stream = np.concatenate([own.epoch(k)[max(start - k * one_pass, 0) : stop - k * one_pass] for k in passes])
        shuffled = np.random.default_rng([self.seed, number, label]).permutation(stream)
        return rows[shuffled].reshape(self.batches_per_pool, size)


# ---------------------------------------------------------------------------------------------------- training


STAGE_VERSION = 1
"""Part of a run's hash: incremented when the same settings produce other results."""
NOT_IN_HASH = {"workers", "device", "l2", "pool", "k", "init"}
"""Settings that do not change the weights (`init` is covered by the hash of its weights)."""
MIN_STEPS = 50
"""Minimum steps per epoch, where its length is not set."""
MEASURED_TILES = 2048
"""Tiles on which mean and standard deviation of the colours are measured."""
VIEW = ViewRecipe(
    scale=(1.0, 1.0),
    ratio=(1.0, 1.0),
    stain=0.8,
    jitter=0.8,
    brightness=0.2,
    contrast=0.2,
    saturation=0.2,
    hue=0.04,
    grey=0.0,
    blur=0.0,
)
"""Augmentation; weaker in colour than in pretraining, where colour would be a shortcut."""


@dataclass(frozen=True, eq=False)
class TrainedNetwork:
    """A trained tile network with its history."""

    network: TileNetwork
    """On the CPU, in evaluation mode."""
    epoch: int
    """Epoch chosen on the validation tiles, counted from 1."""
    history: tuple[dict[str, Any], ...]
    """One entry per epoch: epoch, lr, train_loss, val_loss, val_auc, seconds."""
    outcome: BuildOutcome
    warnings: tuple[str, ...]
    resumed_after: int = 0
    """Epochs that a checkpoint of an interrupted training had done."""


def train_tile_network(
    training: Sequence[AnnotatedSlide],
    validation: Sequence[AnnotatedSlide],
    folder: Path,
    settings: SupervisedSettings | None = None,
    seed: int = 0,
    *,
    stain_method: StainMethod,
    reader: str = "auto",
    report: Callable[[dict[str, Any]], None] | None = None,
) -> TrainedNetwork:
    """Train on the labelled tiles of the training slides and write the model folder, unless it is up to date.

    After every epoch the checkpoint `state.pt` is written there, from which the same call resumes. `report` is called
    with every epoch's history line. `reader` opens the slides.
    """
    settings = settings or SupervisedSettings()
    labelled = [label_slides(side, settings) for side in (training, validation)]
    check_sides(labelled[0][0], labelled[1][0])
    warnings = (*(f"training: {note}" for note in labelled[0][1]), *(f"validation: {n}" for n in labelled[1][1]))
    sides = [_Side.of(side, stain_method, reader) for side, _ in labelled]
    run = _Run(sides[0], sides[1], settings, seed, choose_device(settings.device))
    freshness = MISSING
    if (folder / CONFIG).exists():
        try:
            freshness = _freshness(read_config(folder, KIND), run)
            if freshness.is_up_to_date:
                network, config = load_tile_network(folder)
                return TrainedNetwork(network, config["epoch"], read_history(folder), UP_TO_DATE, warnings)
        except ArtefactError:
            freshness = damaged(folder)
    started = run.resume(folder)
    run.train(folder, report or (lambda line: None))
    network = run.result()
    config = {
        "made_from": run.made_from,
        "encoder": network.encoder.config.model_dump(mode="json"),
        "settings": settings.model_dump(mode="json", exclude={"workers", "device", "l2", "init"}),
        "num_tiles": {"train": sides[0].counts(), "val": sides[1].counts()},
        "seed": seed,
        "epoch": run.best_epoch,
    }
    write_model(folder, KIND, network.state_dict(), config, run.history)
    (folder / CHECKPOINT_FILE).unlink(missing_ok=True)
    warnings = (*warnings, *run.warnings)
    return TrainedNetwork(network, run.best_epoch, tuple(run.history), outcome_of(freshness), warnings, started)


def _freshness(config: Mapping[str, Any], run: _Run) -> Freshness:
    """Compare hashes; a stale model names changed settings, not changed slides or annotations."""
    now = Provenance(KIND, None, {"supervised": run.settings.model_dump(mode="json", exclude=NOT_IN_HASH)}, {})
    before = {key: value for key, value in config.get("settings", {}).items() if key not in NOT_IN_HASH}
    named = now.compare(Provenance(KIND, None, {"supervised": before}, {})).changes
    return compare_digests(config.get("made_from"), run.made_from, named)


# ---------------------------------------------------------------------------------------------------- data


@dataclass(frozen=True, eq=False)
class _Side:
    """All tiles of the training or validation slides, and their labels."""

    source: SlideTiles
    slides: list[LabelledTiles]
    labels: NDArray[np.int8]

    @classmethod
    def of(cls, slides: list[LabelledTiles], stain_method: StainMethod, reader: str) -> _Side:
        chosen = [each.slide for each in slides]
        refs = [SlideRef(one.slide, one.path, one.mpp, reader) for one in chosen]
        tiles = [TrainSlide(ref, one.table) for ref, one in zip(refs, chosen, strict=True) if one.table is not None]
        source = SlideTiles(tiles, stain_method=stain_method)
        return cls(source, slides, np.concatenate([each.labels_N for each in slides]))

    def counts(self) -> dict[str, int]:
        return {"tumour": int((self.labels == TUMOUR).sum()), "normal": int((self.labels == NORMAL).sum())}

    def identity(self) -> list[Any]:
        return [*self.source.inputs().values(), hash_of(self.labels.tobytes().hex())]

    def sample(self, most: int, seed: int) -> Indices:
        """Return indices of labelled tiles, at most `most` per slide and class."""
        firsts = np.cumsum([0, *self.source.counts])
        chosen = [
            first + sample_rows(each.labels_N, most, np.random.default_rng([seed, number]))
            for number, (first, each) in enumerate(zip(firsts, self.slides, strict=False))
        ]
        return np.concatenate(chosen)


# ---------------------------------------------------------------------------------------------------- training run


class _Run:
    """One training run: data, network, optimizer and epochs."""

    def __init__(self, train: _Side, val: _Side, settings: SupervisedSettings, seed: int, device: torch.device):
        self.train_side, self.val_side, self.settings, self.seed, self.device = train, val, settings, seed, device
        self.order = BalancedOrder(
            train.source.counts, settings.batch, seed, tiles_per_slide=settings.tiles_per_slide, labels=train.labels
        )
        rarer = min(self.order.of_class(label)[0].tiles_per_epoch for label in (0, 1))
        self.steps_per_epoch = settings.steps_per_epoch or max(MIN_STEPS, math.ceil(2 * rarer / settings.batch))
        self.val_tiles = val.sample(settings.tiles_per_slide, seed)
        self.workers = num_workers(settings)
        self.network = self._start()
        self.made_from = hash_of(
            settings.model_dump(mode="json", exclude=NOT_IN_HASH),
            [seed, train.source.size_px, train.source.mpp, train.source.stain_method, STAGE_VERSION],
            self.network.encoder.identity(),
            train.identity(),
            val.identity(),
        )
        self.by_id = np.argsort(train.source.ids)
        self.epoch, self.best_epoch = 0, 0
        self.history: list[dict[str, Any]] = []
        self.warnings: list[str] = []

    def _start(self) -> TileNetwork:
        """Return the initial network; its normalization is not set yet where it starts from scratch."""
        settings, source = self.settings, self.train_side.source
        with torch.random.fork_rng([]):
            torch.manual_seed(self.seed)
            if settings.init == "scratch":
                encoder = build_encoder(settings.architecture, img_size=source.size_px)
            else:
                encoder = load_encoder(settings.init)
                check_fits(encoder.config, source.mpp or 0.0, encoder.config.size_px, source.stain_method)
            return TileNetwork(encoder)

    # ------------------------------------------------------------------------------------------------ setup

    def resume(self, folder: Path) -> int:
        """Set up the device, restoring a checkpoint of this run if there is one; return the completed epochs."""
        state = read_checkpoint(folder)
        if state is not None and state["made_from"] != self.made_from:
            state = None  # from other settings: it will be overwritten
        config = self.network.encoder.config
        colours = (config.mean, config.std)
        if state is not None:
            colours = state["colours"]
        elif self.settings.init == "scratch":
            colours = channel_statistics(self.train_side.source, MEASURED_TILES, self.seed, self.workers)
        source = self.train_side.source
        facts = {"mean": tuple(colours[0]), "std": tuple(colours[1]), "mpp": source.mpp, "size_px": source.size_px}
        facts |= {"stain": source.stain_method, "trained_on": f"train split, {len(source.counts)} slides with labels"}
        facts["provenance"] = {"method": "supervised", "init": Path(self.settings.init).name}
        self.network.encoder = Encoder(self.network.encoder.backbone, config.model_copy(update=facts))
        self.network.to(self.device)
        if self.device.type == "cuda":
            self.network.to(memory_format=torch.channels_last)
        self.dtype = choose_precision(self.settings.precision, self.device)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.dtype == torch.float16)
        self.optimizer = torch.optim.AdamW(
            parameter_groups(self.network), lr=0.0, weight_decay=self.settings.weight_decay
        )
        self.best: dict[str, Tensor] = {}
        if state is not None:
            self.network.load_state_dict(state["network"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.scaler.load_state_dict(state["scaler"])
            self.best, self.best_epoch = state["best"], state["best_epoch"]
            self.epoch, self.history = state["epoch"], state["history"]
        return self.epoch

    # ------------------------------------------------------------------------------------------------ epochs

    def train(self, folder: Path, report: Callable[[dict[str, Any]], None]) -> None:
        """Train the remaining epochs, with a checkpoint after each."""
        steps, settings = self.steps_per_epoch, self.settings
        total = settings.epochs * steps
        warmup = suggested_warmup_steps(total)
        schedule = CosineSchedule(settings.lr, settings.lr * 1e-3, total, warmup, settings.lr / max(warmup, 1))
        reading = TileLoader(
            self.train_side.source,
            self.order,
            self.epoch * steps,
            total,
            workers=self.workers,
            device=self.device,
        )
        loss_sum, unfitted, start = torch.zeros((), device=self.device), 0, time.perf_counter()
        with reading:
            for batch in reading:
                lr = schedule.value_at(batch.step)
                loss_sum += self._step(batch, lr)
                unfitted += batch.unfitted
                if (batch.step + 1) % steps:
                    continue
                line: dict[str, Any] = {"epoch": self.epoch + 1, "lr": lr, "train_loss": float(loss_sum) / steps}
                line |= self._validate()
                line["seconds"] = round(time.perf_counter() - start, 3)
                self._finish_epoch(folder, line)
                report(line)
                loss_sum, start = torch.zeros_like(loss_sum), time.perf_counter()
        if unfitted:
            self.warnings.append(f"stain estimation failed for {unfitted} tiles: their colours were not normalized")

    def _step(self, batch: Batch, lr: float) -> Tensor:
        """Run one optimizer step and return its loss, still on the device."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.network.train()
        images_B3HW = self._views(batch)
        labels_B = self._labels(batch.ids_B.numpy()).to(self.device, non_blocking=True)
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            loss = F.binary_cross_entropy_with_logits(self.network(images_B3HW), labels_B)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def _views(self, batch: Batch) -> Tensor:
        config = self.network.encoder.config
        # A tile may occur twice in a batch if its class has few: the index gives each copy its own augmentation.
        ids_B = batch.ids_B + torch.arange(len(batch.ids_B))
        (views_VB3SS,) = make_views(
            batch.tiles_B3HW.to(self.device, non_blocking=True),
            ids_B.to(self.device, non_blocking=True),
            batch.step,
            [replace(VIEW, size_px=self.train_side.source.size_px)],
            config.mean,
            config.std,
            seed=self.seed,
            transforms_B33=batch.transforms_B33,
        )
        return views_VB3SS[0]

    def _labels(self, ids_B: Indices) -> Tensor:
        """Return the labels (B,) of tiles, given by their unique ids."""
        places = self.by_id[np.searchsorted(self.train_side.source.ids, ids_B, sorter=self.by_id)]
        return torch.from_numpy(self.train_side.labels[places].astype(np.float32))

    def _validate(self) -> dict[str, float]:
        """Return class-balanced loss and AUC of the validation tiles."""
        side = self.val_side
        self.network.eval()
        logits = score_tiles(self.network, side.source, self.val_tiles, self.device, self.dtype, self.workers)
        labels = side.labels[self.val_tiles].astype(np.int64)
        losses = np.logaddexp(0, (1 - 2 * labels) * logits)
        balanced = 0.5 * (losses[labels == 0].mean() + losses[labels == 1].mean())
        if not np.isfinite(balanced):
            raise EncoderError(
                f"the loss of epoch {self.epoch + 1} is not a number ({balanced})",
                "training has diverged",
                "Lower supervised.lr; with fp16 use --supervised.precision bf16 or fp32",
                code="training-diverged",
            )
        return {"val_loss": float(balanced), "val_auc": auc(labels, logits)}

    def _finish_epoch(self, folder: Path, line: dict[str, Any]) -> None:
        """Keep the weights if they are the best so far, by AUC and then by loss, and write the checkpoint."""
        before = [(-each["val_auc"], each["val_loss"]) for each in self.history]
        self.history.append(line)
        if not before or (-line["val_auc"], line["val_loss"]) < min(before):
            self.best_epoch = line["epoch"]
            self.best = {name: tensor.detach().cpu().clone() for name, tensor in self.network.state_dict().items()}
        self.epoch += 1
        state = {"made_from": self.made_from, "epoch": self.epoch, "history": self.history}
        state |= {"best": self.best, "best_epoch": self.best_epoch}
        state["colours"] = [list(self.network.encoder.config.mean), list(self.network.encoder.config.std)]
        state |= {"network": self.network.state_dict(), "optimizer": self.optimizer.state_dict()}
        write_checkpoint(folder, state | {"scaler": self.scaler.state_dict()})

    def result(self) -> TileNetwork:
        """Return the network of the chosen epoch, on the CPU."""
        network = self.network.to("cpu").to(memory_format=torch.contiguous_format)
        network.load_state_dict(self.best)
        return network.eval()
