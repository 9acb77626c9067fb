"""Tiles per second of pretraining, end to end: tiles are read from slides that this script writes first.

    python benchmarks/pretrain.py [--architecture vit_base_patch16_224] [--batch 256] [--steps 120] [--deterministic]
        [--preset quick] [--method lejepa]

With `--preset` network and views are those of a preset, else those of DINO with ViT-B/16. `start_s` are the seconds
until the first line of metrics, in which networks are compiled.

It runs the command's own training stage on slides in a temporary folder and reads the pace off its metrics, without the
first `--skip` steps (compiling, filling of buffers). `mfu` is `tiles_per_s * gflop_per_tile` over `peak_tflops`, the
rate of one large matrix product of the same precision on the same device, measured in the same run; `gflop_per_tile`
counts the student's forward three times and the teacher's once. `phase_ms` are milliseconds of a step on the device:
views (stain map and augmentation), teacher, student (forward and loss), backward, update (clipping, AdamW, teacher,
centre); of a recorded step, tiles and step. `reading_tiles_per_s` is what the reading processes alone can do. Ends with
one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from selfvitmil.data.loader import TileLoader, TileOrder, default_workers
from selfvitmil.data.sources import SlideTiles, TrainSlide
from selfvitmil.encoder import load_encoder
from selfvitmil.pretrain.train import Origin, pretrain
from selfvitmil.runtime.device import choose_precision, peak_tflops
from selfvitmil.settings import PretrainSettings, StudySettings, resolve_settings
from selfvitmil.slides import SlideRef, synthetic
from selfvitmil.tiles import TileJob
from selfvitmil.tiling import tile_slide


def write_slide(seed: int, folder: Path, size: int, tile_px: int) -> TrainSlide:
    """A made slide and its tile table."""
    path = folder / f"s{seed}.svs"
    synthetic.make_slide(path, seed=seed, size=(size, size))
    settings = StudySettings.model_validate({"tile": {"size_px": tile_px}})
    tile_slide(TileJob(SlideRef(path.stem, path), folder / "tiles", settings))
    return TrainSlide(SlideRef(path.stem, path), folder / "tiles" / f"0.5mpp_{tile_px}px_0px" / f"{path.stem}.h5")


def reading_pace(source: SlideTiles, batch: int, workers: int, steps: int) -> float:
    """Tiles per second when nothing is trained; the first fifth of the steps starts the workers."""
    order = TileOrder(source.counts, batch)
    start, first = 0.0, steps // 5
    with TileLoader(source, order, 0, steps, workers=workers) as feed:
        for number, _ in enumerate(feed):
            if number == first:
                start = time.perf_counter()
    return (steps - 1 - first) * batch / (time.perf_counter() - start)


def measure(source: SlideTiles, folder: Path, settings: PretrainSettings, skip: int) -> dict[str, Any]:
    """Train, and read the pace off the metrics."""
    lines: list[dict[str, Any]] = []
    began, first = time.perf_counter(), 0.0

    def report(line: dict[str, Any]) -> None:
        nonlocal first
        first = first or time.perf_counter() - began
        lines.append(line)
        print(f"step {line['step']}: loss {line['loss']:.4f}, {line['tiles_per_s']} tiles/s", flush=True)

    result = pretrain(source, folder, settings, Origin("made slides"), report=report)
    steady = [line for line in lines if line["step"] > skip]
    pace = statistics.median(line["tiles_per_s"] for line in steady)
    found = {
        "tiles_per_s": round(pace, 1),
        "data_wait_share": round(statistics.median(line["data_wait_share"] for line in steady), 4),
        "mfu": round(statistics.median(line["mfu"] for line in steady), 3),
        "gflop_per_tile": load_encoder(folder).config.provenance["gflop_per_tile"],
    }
    phases = steady[-1]["phase_s"]
    found["phase_ms"] = {
        name: round(1000 * statistics.median(line["phase_s"][name] for line in steady), 1) for name in phases
    }
    found |= {"step_ms": round(1000 * settings.batch / pace, 1), "start_s": round(first, 1)}
    return found | {"warnings": list(result.warnings)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=("quick", "paper", "authors-code"), help="network and views")
    parser.add_argument("--method", default="dino", help="where no preset is given")
    parser.add_argument("--architecture", default="vit_base_patch16_224")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--tile-px", type=int, default=224)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--skip", type=int, default=40)
    parser.add_argument("--slides", type=int, default=32)
    parser.add_argument("--size", type=int, default=4096, help="edge of the made slides in level-0 pixels")
    parser.add_argument("--workers", type=int, default=default_workers())
    parser.add_argument("--deterministic", action="store_true", help="the same bits every time: what that costs")
    parser.add_argument(
        "--compile", nargs="+", default=["on" if torch.cuda.is_available() else "off"], choices=["auto", "on", "off"]
    )
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        start = time.perf_counter()
        with ProcessPoolExecutor(max(arguments.workers, 1)) as pool:
            many = [[value] * arguments.slides for value in (folder, arguments.size, arguments.tile_px)]
            slides = list(pool.map(write_slide, range(arguments.slides), *many))
        source = SlideTiles(slides, stain_method="slide")
        print(f"{sum(source.counts)} tiles of {len(slides)} slides made in {time.perf_counter() - start:.0f} s")
        facts: dict[str, Any] = {
            "reading_tiles_per_s": round(reading_pace(source, arguments.batch, arguments.workers, 40), 1)
        }
        facts |= {name: getattr(arguments, name) for name in ("workers", "batch", "deterministic")}
        facts["device"] = device.type
        if device.type == "cuda":
            facts["device"] = torch.cuda.get_device_name(device)
        facts["peak_tflops"] = round(peak_tflops(device, choose_precision("auto", device)), 3)
        for choice in arguments.compile or ["on" if device.type == "cuda" else "off"]:
            shared = ("batch", "steps", "workers", "deterministic")
            values: dict[str, Any] = {name: getattr(arguments, name) for name in shared} | {"compile": choice}
            if arguments.preset:
                own = resolve_settings(flags={"preset": arguments.preset}).pretrain.model_dump(exclude_unset=True)
                values = own | values
            else:
                values |= {"method": arguments.method, "architecture": arguments.architecture, "out_dim": 65536}
            settings = PretrainSettings.model_validate(values)
            found = measure(source, folder / f"encoder-{choice}", settings, arguments.skip)
            print(json.dumps(found | {"compile": choice} | facts), flush=True)


if __name__ == "__main__":
    main()
