"""Train a ResNet-18 tile classifier (tumour or normal) on the pixels of labelled tiles: the supervised baseline.

Input: annotated slides. Output: a model folder (`model.safetensors`, `config.json`, `metrics.jsonl`). Tiles are
prefetched from the slides, half of every batch is tumour (`balanced_sampling.py`); they are rotated, flipped and
augmented in stain and colour on the device, but not cropped: the tumour of a tile may lie in any corner. The epoch is
chosen by the AUC of validation tiles. An interrupted run resumes after its last epoch.

Axes in names: B tiles of a batch, V views, S edge of a view, H and W height and width, 3 is RGB.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from selfvitmil.aggregate.supervised import model_files
from selfvitmil.aggregate.supervised.balanced_sampling import BalancedOrder
from selfvitmil.aggregate.supervised.tile_labels import (
    NORMAL,
    TUMOUR,
    AnnotatedSlide,
    LabelledTiles,
    check_sides,
    label_slides,
    sample_rows,
)
from selfvitmil.aggregate.supervised.tile_network import (
    KIND,
    StainMethod,
    TileNetwork,
    load_tile_network,
    num_workers,
    score_tiles,
)
from selfvitmil.data.loader import Batch, TileLoader, channel_statistics
from selfvitmil.data.sources import Indices, SlideTiles, TrainSlide
from selfvitmil.data.views import ViewRecipe, make_views
from selfvitmil.encoder import Encoder, build_encoder, check_fits, load_encoder
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
    with every epoch's history line. `stain_method` and `reader` are those of `SlideTiles`.
    """
    settings = settings or SupervisedSettings()
    labelled = [label_slides(side, settings) for side in (training, validation)]
    check_sides(labelled[0][0], labelled[1][0])
    warnings = (*(f"training: {note}" for note in labelled[0][1]), *(f"validation: {n}" for n in labelled[1][1]))
    sides = [_Side.of(side, stain_method, reader) for side, _ in labelled]
    run = _Run(sides[0], sides[1], settings, seed, choose_device(settings.device))
    freshness = MISSING
    if (folder / model_files.CONFIG).exists():
        try:
            freshness = _freshness(model_files.read_config(folder, KIND), run)
            if freshness.is_up_to_date:
                network, config = load_tile_network(folder)
                return TrainedNetwork(network, config["epoch"], model_files.read_history(folder), UP_TO_DATE, warnings)
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
    model_files.write_model(folder, KIND, network.state_dict(), config, run.history)
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
        tiles = [TrainSlide(one.slide, one.path, one.table, one.mpp) for one in chosen if one.table is not None]
        source = SlideTiles(tiles, stain_method=stain_method, reader=reader)
        return cls(source, slides, np.concatenate([each.labels_N for each in slides]))

    def counts(self) -> dict[str, int]:
        return {"tumour": int((self.labels == TUMOUR).sum()), "normal": int((self.labels == NORMAL).sum())}

    def identity(self) -> list[Any]:
        return [*self.source.identity(), hash_of(self.labels.tobytes().hex())]

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
            pin=self.device.type == "cuda",
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
            maps_B33=batch.maps_B33,
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
