"""Share of the time in which an accelerator waits while many small slides are embedded; no GPU needed.

    python benchmarks/embed_flow.py [--against OTHER/src] [--slides 140] [--tiles-per-s 3000] [--rounds 3]

The accelerator is simulated: a stand-in for the encoder sleeps as long as its tiles would take at `--tiles-per-s`,
partial batches proportionally less, and returns numbers computed from the pixels. All else is real: tile tables, slide
files, readers (threads), feature files synced to disk. Stains are not normalized, as the accelerator would do it.
`idle_share` is the share of the time in which the stand-in does not sleep. `--against` names the `src` folder of
another version, which takes turns with this one in processes of their own; its feature files must have the same bytes.
The median round counts. Ends with one JSON line.

The stand-in says nothing about a real GPU's speed; it shows what reading, checking and writing add to it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from selfvitmil import embed
from selfvitmil.embed import EmbedJob
from selfvitmil.settings import EmbedSettings, parse
from selfvitmil.slides import SlideRef, synthetic
from selfvitmil.tiles import TileJob
from selfvitmil.tiling import tile_slide

SIZE_PX = 64
BATCH = 256
DIM = 384
DIFFERENT = 10
"""Slides that are really made; the others are copies of them."""


class Accelerator:
    """The stand-in for a LoadedEncoder."""

    identity, device, dtype, batch, shares_batches = "stand-in", torch.device("cpu"), torch.float32, None, True
    encoder = SimpleNamespace(config=SimpleNamespace(layout="cls"), dim=DIM)

    def __init__(self, tiles_per_s: float):
        self._tiles_per_s = tiles_per_s
        self.busy_s = 0.0

    def __call__(self, tiles_B3HW: torch.Tensor) -> torch.Tensor:
        begin = time.perf_counter()
        embeddings = tiles_B3HW[:, :, 0, 0].half().repeat(1, DIM // 3)
        time.sleep(max(0.0, len(tiles_B3HW) / self._tiles_per_s - (time.perf_counter() - begin)))
        self.busy_s += time.perf_counter() - begin
        return embeddings


def make_slides(folder: Path, number: int) -> None:
    settings = parse({"tile": {"size_px": SIZE_PX}, "stain": {"method": "none"}}, "made")
    for k in range(number):
        path = folder / f"s{k}.svs"
        if k < DIFFERENT:
            synthetic.make_slide(path, seed=k, size=(2048, 2048))
        else:
            os.link(folder / f"s{k % DIFFERENT}.svs", path)
        tile_slide(TileJob(SlideRef(path.stem, path), folder / "tiles", settings))


def measure(folder: Path, out: Path, tiles_per_s: float) -> dict[str, Any]:
    """Embed all slides, with the version of the package that is imported."""
    model: Any = Accelerator(tiles_per_s)
    patched: Any = embed
    patched.load_for, patched.check_fits = (lambda *_: model), (lambda *_: None)
    settings = EmbedSettings(batch=BATCH, device="cpu")
    tables = sorted((folder / "tiles" / f"0.5mpp_{SIZE_PX}px_0px").glob("*.h5"))
    jobs = {
        table.stem: EmbedJob(
            SlideRef(table.stem, folder / f"{table.stem}.svs"), table, out / "features_x" / table.name, "x", "x",
            "none", settings,
        )
        for table in tables
    }  # fmt: skip
    begin = time.perf_counter()
    if hasattr(embed, "embed_slides"):
        results: list[Any] = [result for _, result in embed.embed_slides(jobs)]
    else:
        results = [embed.embed_slide(job) for job in jobs.values()]
    seconds = time.perf_counter() - begin
    for result in results:
        if isinstance(result, Exception):
            raise result
    digest = hashlib.sha256()
    for job in jobs.values():
        digest.update(job.bag.read_bytes())
    tiles = sum(result.num_tiles for result in results)
    return {
        "seconds": seconds,
        "idle_share": 1 - model.busy_s / seconds,
        "wait_share": sum(result.wait_share * result.num_tiles for result in results) / tiles,
        "tiles": tiles,
        "digest": digest.hexdigest(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="the src folder of another version")
    parser.add_argument("--slides", type=int, default=140)
    parser.add_argument("--tiles-per-s", type=float, default=3000, help="of the simulated accelerator")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--measure", type=Path, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure[0], options.measure[1], options.tiles_per_s)))
        return
    versions = {"ours": Path(embed.__file__).parents[1]}
    if options.against:
        versions["other"] = options.against.resolve()
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in versions}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_slides(folder, options.slides)
        for k in range(options.rounds):
            for version, source in list(versions.items())[:: 1 if k % 2 else -1]:
                command = [sys.executable, __file__, "--tiles-per-s", str(options.tiles_per_s)]
                command += ["--measure", name, str(folder / f"{version}{k}")]
                text = subprocess.check_output(command, env={**os.environ, "PYTHONPATH": str(source)}, text=True)
                found[version].append(json.loads(text))
                print(version, text.strip(), flush=True)
    digests = {each["digest"] for rounds in found.values() for each in rounds}
    assert len(digests) == 1, "the feature files differ"
    facts: dict[str, Any] = {"slides": options.slides, "tiles": found["ours"][0]["tiles"]}
    facts["simulated_tiles_per_s"] = options.tiles_per_s
    for version, rounds in found.items():
        for key in ("seconds", "idle_share", "wait_share"):
            facts[f"{key}_{version}"] = round(statistics.median(each[key] for each in rounds), 3)
    if "other" in found:
        facts["ratio"] = round(facts["seconds_other"] / facts["seconds_ours"], 2)
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
