"""What DINO pretraining is worth after so many minutes: accuracy of nearest neighbours and of a linear probe.

    python benchmarks/pretrain_quality.py --tiles FOLDER --minutes 7 [--preset quick]
        [--architecture vit_small_patch16_224] [--batch 256] [--seed 0] [--tile-px 224]
        [--set lr=1e-3 --set out_dim=4096 ...] [--out ENCODER]

FOLDER/{train,test}/<class>/*.{jpg,png}. Self-supervision sees the tiles of `train` and no label; the linear classifier
and the neighbours learn from the labels of `train`, both accuracies are those on `test`, for the teacher's vectors in
its default layout. Tiles of another size than `--tile-px` are resized. All tiles are decoded once and kept in memory.

What counts as time: the wall clock from the end of the first step of the run that makes the weights to the end of its
last, waiting for tiles and writing metrics included. Compiling happens in that first step and so does not count, nor do
decoding, measuring of the mean colours, probing, and a throw-away run before, whose weights are discarded: it measures
the pace, from which the number of steps follows, so that the schedules of learning rate, weight decay, temperature and
momentum reach their end in time (2 % are kept in reserve). A run that is slower than that stops at the deadline.

The strength of the linear probe's penalty is chosen within `train`, on blocks of tiles whose names follow each other:
mostly those of one slide, and the test tiles come from other slides.

Ends with one JSON line, {"knn20": ..., "linear": ..., "tiles_per_s": ...}; the one before it has all the rest.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import statistics
import tempfile
import threading
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from selfvitmil.data.loader import default_workers
from selfvitmil.data.sources import IMAGE_SUFFIXES, TensorTiles
from selfvitmil.encoder import Encoder, load_encoder, save_encoder
from selfvitmil.errors import ConfigError
from selfvitmil.pretrain.learner import start_encoder
from selfvitmil.pretrain.probe import knn_accuracy, linear_accuracy
from selfvitmil.pretrain.quality import embed_tiles
from selfvitmil.pretrain.train import Origin, pretrain
from selfvitmil.runtime.device import choose_precision
from selfvitmil.runtime.training import read_checkpoint
from selfvitmil.settings import PretrainSettings, parse, resolve_settings

RESERVE = 0.02
BLOCKS = 20
"""Blocks of neighbouring names that the training tiles of a class are divided into."""


# ---------------------------------------------------------------------------------------------------- tiles


def list_tiles(folder: Path) -> tuple[list[Path], list[str]]:
    """The tiles of FOLDER/<class>/, in the order of their names whatever their class, and their classes."""
    paths = [path for path in folder.glob("*/*") if path.suffix.lower() in IMAGE_SUFFIXES]
    if not paths:
        raise ConfigError(
            f"{folder.name}: holds no tiles", "they are sought in one folder per class", "Correct --tiles"
        )
    paths.sort(key=lambda path: (path.name, path.parent.name))
    return paths, [path.parent.name for path in paths]


def load_tiles(paths: Sequence[Path], size_px: int) -> tuple[torch.Tensor, int]:
    """All tiles (N, 3, size, size) as uint8, and how many had to be resized."""
    tiles_N3HW = torch.empty((len(paths), 3, size_px, size_px), dtype=torch.uint8)

    def load(number: int) -> bool:
        with Image.open(paths[number]) as image:
            pixels = image.convert("RGB")
        resized = pixels.size != (size_px, size_px)
        if resized:
            pixels = pixels.resize((size_px, size_px), Image.Resampling.BICUBIC)
        tiles_N3HW[number] = torch.from_numpy(np.array(pixels)).permute(2, 0, 1)
        return resized

    with ThreadPoolExecutor(default_workers() + 1) as pool:
        return tiles_N3HW, sum(pool.map(load, range(len(paths))))


def name_blocks(labels: Sequence[int]) -> list[str]:
    """For tiles in the order of their names: the block of its class that each belongs to."""
    places = np.zeros(len(labels), dtype=np.int64)
    for label in set(labels):
        own = np.flatnonzero(np.array(labels) == label)
        places[own] = np.arange(len(own)) * BLOCKS // len(own)
    return [f"{label}-{place}" for label, place in zip(labels, places, strict=True)]


# ---------------------------------------------------------------------------------------------------- time


class Enough(Exception):
    """Ends the throw-away run."""


class Clock:
    """Gets every line of metrics; counts the time from the first of them, which is that of the first step."""

    def __init__(self, batch: int, name: str):
        self.batch, self.name = batch, name
        self.lines: list[dict[str, Any]] = []
        self.times: list[float] = []
        self.left_out = 0.0

    def __call__(self, line: dict[str, Any]) -> None:
        self.lines.append(line)
        self.left_out += line.get("probe_s", 0.0) if len(self.lines) > 1 else 0.0
        self.times.append(time.perf_counter() - self.left_out)
        probed = "".join(f", {key} {line[key]:.3f}" for key in ("knn20", "linear") if key in line)
        told = f"{self.name} {self.elapsed:6.1f} s: step {line['step']}, loss {line['loss']:.4f}"
        print(f"{told}, {line['tiles_per_s']:.0f} tiles/s{probed}", flush=True)

    @property
    def elapsed(self) -> float:
        return self.times[-1] - self.times[0]

    @property
    def tiles_per_s(self) -> float:
        """Over all of the counted time."""
        return (self.lines[-1]["step"] - self.lines[0]["step"]) * self.batch / max(self.elapsed, 1e-9)


def measure_pace(source: TensorTiles, folder: Path, settings: PretrainSettings, seconds: float, device: str) -> float:
    """Tiles per second of a run whose weights are thrown away, without its first step."""
    clock = Clock(settings.batch, "pace")

    def report(line: dict[str, Any]) -> None:
        clock(line)
        if len(clock.lines) > 2 and clock.elapsed > seconds:
            raise Enough

    with suppress(Enough):
        pretrain(source, folder, settings, Origin("nothing"), device=device, report=report)
    torch.compiler.reset()  # what was compiled counts towards a limit of variants
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    return statistics.median(line["tiles_per_s"] for line in clock.lines[1:])


class Deadline:
    """Ends a run so many seconds after its first line of metrics, as a batch system would, with a checkpoint."""

    def __init__(self, clock: Clock, seconds: float, total_steps: int):
        self.clock, self.seconds, self.last_step = clock, seconds, total_steps - 1
        self._timer: threading.Timer | None = None
        self._rung = False

    def __call__(self, line: dict[str, Any]) -> None:
        self.clock(line)
        self.cancel()
        if line["step"] < self.last_step and not self._rung:
            self._timer = threading.Timer(max(self.seconds - self.clock.elapsed, 0), self._ring)
            self._timer.daemon = True
            self._timer.start()

    def _ring(self) -> None:
        self._rung = True
        os.kill(os.getpid(), signal.SIGTERM)

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


def train_for(
    source: TensorTiles, folder: Path, settings: PretrainSettings, seconds: float, device: str
) -> tuple[Encoder, Clock, int]:
    """The encoder after all steps of the settings, or after as many as fit into the time; and how many these were."""
    total = settings.steps or 0
    clock = Clock(settings.batch, "train")
    deadline = Deadline(clock, seconds, total)
    try:
        result = pretrain(source, folder, settings, Origin("tiles of a benchmark"), device=device, report=deadline)
    finally:
        deadline.cancel()
    if result.finished:
        return load_encoder(folder), clock, total
    state = read_checkpoint(folder)
    assert state is not None
    encoder = start_encoder(settings, source.size_px, settings.seed)
    branch = "student.backbone." if settings.method == "simclr" else "teacher.backbone."
    weights = {name.removeprefix(branch): value for name, value in state["learner"].items() if name.startswith(branch)}
    encoder.backbone.load_state_dict(weights)
    colours = {"mean": tuple(state["mean"]), "std": tuple(state["std"])}
    return Encoder(encoder.backbone, encoder.config.model_copy(update=colours)).eval(), clock, result.step


# ---------------------------------------------------------------------------------------------------- all of it


def values_of(pairs: Sequence[str]) -> dict[str, Any]:
    """Settings of pretrain from `KEY=VALUE`; a value that is no TOML is a text."""
    values: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals:
            raise ConfigError(f"--set {pair}", "a setting and its value are expected", "Write --set lr=1e-3")
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            value = text
        values[key.removeprefix("pretrain.")] = value
    return values


def settings_from(arguments: argparse.Namespace, device: str, steps: int) -> PretrainSettings:
    """The settings of both runs: those of the preset, of the benchmark, of `--set`, and the number of steps."""
    values = resolve_settings(flags={"preset": arguments.preset}).pretrain.model_dump(exclude_unset=True)
    told = {name: getattr(arguments, name) for name in ("architecture", "batch", "seed")}
    values |= {name: value for name, value in told.items() if value is not None}
    values |= {
        "workers": 0,
        "log_steps": 50,
        "checkpoint_minutes": 600.0,
        "compile": "on" if device == "cuda" else "off",
    }
    values |= values_of(arguments.set)
    return parse({"pretrain": values | {"steps": steps}}, source="--set").pretrain


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiles", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=7.0)
    parser.add_argument("--preset", default="quick", choices=["quick", "default", "paper", "authors-code"])
    parser.add_argument("--architecture", help="instead of the preset's")
    parser.add_argument("--batch", type=int, help="instead of the preset's")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tile-px", type=int, default=224)
    parser.add_argument("--pace-seconds", type=float, default=20.0, help="length of the throw-away run")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of pretrain")
    parser.add_argument("--out", type=Path, help="folder to keep the encoder in")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args(given)
    device, seconds = arguments.device, 60 * arguments.minutes
    settings_from(arguments, device, 1)  # a wrong setting shows before anything is read

    start = time.perf_counter()
    (train_paths, train_names), (test_paths, test_names) = (
        list_tiles(arguments.tiles / side) for side in ("train", "test")
    )
    classes = sorted({*train_names, *test_names})
    train_labels, test_labels = ([classes.index(name) for name in names] for names in (train_names, test_names))
    train_N3HW, resized = load_tiles(train_paths, arguments.tile_px)
    test_M3HW, resized_too = load_tiles(test_paths, arguments.tile_px)
    print(
        f"{len(train_paths)} training and {len(test_paths)} test tiles of {len(classes)} classes read in "
        f"{time.perf_counter() - start:.0f} s, {resized + resized_too} of them resized",
        flush=True,
    )

    source = TensorTiles(train_N3HW)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        trial = settings_from(arguments, device, 10**6)
        pace = measure_pace(source, folder / "pace", trial, min(arguments.pace_seconds, seconds), device)
        steps = 1 + max(int((1 - RESERVE) * seconds * pace / trial.batch), 1)
        print(f"{pace:.1f} tiles/s: {steps} steps fit into {arguments.minutes:g} minutes", flush=True)
        settings = settings_from(arguments, device, steps)
        encoder, clock, done = train_for(source, folder / "run", settings, seconds, device)
    if done < steps:
        print(f"slower than measured before: stopped at the deadline after {done} of {steps} steps", flush=True)
    if arguments.out is not None:
        save_encoder(arguments.out, encoder)

    start = time.perf_counter()
    dtype = choose_precision("auto", torch.device(device))
    train_ND, test_MD = (embed_tiles(encoder.to(device), part.split(256), dtype) for part in (train_N3HW, test_M3HW))
    assert train_ND is not None
    assert test_MD is not None
    parts = train_ND, np.array(train_labels), test_MD, np.array(test_labels)
    knn, linear = knn_accuracy(*parts), linear_accuracy(*parts, name_blocks(train_labels))
    facts: dict[str, Any] = {
        "minutes": round(clock.elapsed / 60, 3),
        "steps": done,
        "planned_steps": steps,
        "pace_before": round(pace, 1),
        "loss": clock.lines[-1]["loss"],
        "data_wait_share": round(statistics.median(line["data_wait_share"] for line in clock.lines), 4),
        "mfu": round(statistics.median(line["mfu"] for line in clock.lines), 3),
        "knn20_balanced": round(knn.balanced, 4),
        "linear_balanced": round(linear.balanced, 4),
        "linear_strength": linear.strength,
        "dim": train_ND.shape[1],
        "probe_s": round(time.perf_counter() - start, 1),
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "settings": settings.model_dump(mode="json", exclude_unset=True),
    }
    print(json.dumps(facts), flush=True)
    last = {"knn20": round(knn.plain, 4), "linear": round(linear.plain, 4), "tiles_per_s": round(clock.tiles_per_s, 1)}
    print(json.dumps(last), flush=True)


if __name__ == "__main__":
    main()
