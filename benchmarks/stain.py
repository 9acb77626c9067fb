"""Stain normalization on one core: one map per slide against Macenko on every tile.

    python benchmarks/stain.py [--tiles FOLDER] [--count 24] [--rounds 7]

Contenders take turns in one process with one thread; a contender's time is its best round, so that a busy machine hurts
none more than the others. Per-tile contenders are checked against each other: levels may differ by one where float32
and float64 fall on two sides of a whole number. The last line is JSON; `ratio` is the per-slide map against the best
per-tile torchstain (which is in the dependency group `bench`), `ratio_own_tile` our `normalize_tile` against it.
"""

# ruff: noqa: E402 (the environment is set before the imports)
from __future__ import annotations

import os

# Before NumPy is loaded: its BLAS reads these once.
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"):
    os.environ[_name] = "1"

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torchstain.base.normalizers import MacenkoNormalizer

from selfvitmil import stain

STAINS = np.array([[0.60, 0.22], [0.70, 0.85], [0.38, 0.48]]) / [0.997, 1.0006]


def made_tiles(count: int, size_px: int = 224, seed: int = 0) -> NDArray[np.uint8]:
    """Tissue-like tiles by Beer and Lambert: nuclei, stroma, glass, and some noise of the camera."""
    rng = np.random.default_rng(seed)
    tiles = np.empty((count, size_px, size_px, 3), dtype=np.uint8)
    for tile in tiles:
        kind = np.kron(rng.choice(3, (size_px // 8, size_px // 8), p=(0.3, 0.55, 0.15)), np.ones((8, 8), dtype=int))
        strength = rng.gamma(9, 1 / 9, (2, size_px, size_px))
        hematoxylin = np.array([1.4, 0.25, 0.0])[kind] * strength[0]
        eosin = np.array([0.2, 0.9, 0.0])[kind] * strength[1]
        light = 240 * np.exp(-np.stack([hematoxylin, eosin], axis=-1) @ STAINS.T)
        tile[:] = (light + rng.normal(0, 2, light.shape)).clip(0, 255)
    return tiles


def read_tiles(folder: Path, count: int) -> NDArray[np.uint8]:
    """The first `count` images below `folder`, cut to the smallest of them."""
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in (".png", ".jpg", ".jpeg"))[:count]
    images = [np.asarray(Image.open(path).convert("RGB")) for path in paths]
    height, width = np.min([image.shape[:2] for image in images], axis=0)
    return np.stack([image[:height, :width] for image in images])


def contenders(tiles: NDArray[np.uint8]) -> dict[str, Callable[[], Any]]:
    """Each normalizes all tiles, from and to the layout that it prefers."""
    batch_B3HW = torch.from_numpy(tiles).permute(0, 3, 1, 2).contiguous()
    fit = stain.fit_slide(tiles)
    if not fit.fitted:
        raise SystemExit(f"these tiles have no stains to normalize: {fit.reason}")
    by_numpy, by_torch = MacenkoNormalizer(backend="numpy"), MacenkoNormalizer(backend="torch")
    return {
        "slide_map_numpy": lambda: [stain.apply(tile, fit) for tile in tiles],
        "slide_map_torch": lambda: stain.apply(batch_B3HW, fit),
        "own_tile": lambda: [stain.normalize_tile(tile) for tile in tiles],
        "torchstain_numpy": lambda: [by_numpy.normalize(I=tile, stains=False)[0] for tile in tiles],
        "torchstain_torch": lambda: [by_torch.normalize(I=tile, stains=False)[0] for tile in batch_B3HW],
        "fit_slide": lambda: stain.fit_slide(tiles),
    }


def best_seconds(runs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Best wall time of each over `rounds`, taking turns."""
    seconds = dict.fromkeys(runs, float("inf"))
    for _ in range(rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            seconds[name] = min(seconds[name], time.perf_counter() - start)
    return seconds


def check(runs: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Share of levels that differ by more than one between contenders that mean the same; too many end the run."""
    slide = np.stack(runs["slide_map_numpy"]())
    if not np.array_equal(slide, runs["slide_map_torch"]().permute(0, 2, 3, 1).numpy()):
        raise SystemExit("the slide's map gives other bytes in torch than in NumPy")
    own = np.stack(runs["own_tile"]()).astype(int)
    differ: dict[str, float] = {}
    for name in ("torchstain_numpy", "torchstain_torch"):
        other = np.stack([np.asarray(tile) for tile in runs[name]()]).astype(int)
        # Too bright a level becomes 254 in the authors' code and 255 in torchstain: one apart, too.
        differ[name] = float((np.abs(own - other) > 1).mean())
        if differ[name] > 1e-3:
            raise SystemExit(f"{name}: {differ[name]:.2%} of the levels differ from ours by more than one")
    return differ


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiles", type=Path, help="a folder of images instead of made tiles")
    parser.add_argument("--count", type=int, default=24, help="tiles")
    parser.add_argument("--rounds", type=int, default=7, help="turns that every contender gets")
    arguments = parser.parse_args()
    torch.set_num_threads(1)

    tiles = made_tiles(arguments.count) if arguments.tiles is None else read_tiles(arguments.tiles, arguments.count)
    runs = contenders(tiles)
    differ = check(runs)
    seconds = best_seconds(runs, arguments.rounds)
    rates = {name: len(tiles) / value for name, value in seconds.items() if name != "fit_slide"}
    for name, rate in rates.items():
        print(f"{name:18} {rate:8.0f} tiles/s")
    print(f"{'fit_slide':18} {seconds['fit_slide'] * 1e3:8.1f} ms for {len(tiles)} tiles")

    slide = max(rates["slide_map_numpy"], rates["slide_map_torch"])
    per_tile = max(rates["torchstain_numpy"], rates["torchstain_torch"])
    result = {
        "ratio": round(slide / per_tile, 2),
        "ratio_numpy": round(rates["slide_map_numpy"] / per_tile, 2),
        "ratio_torch": round(rates["slide_map_torch"] / per_tile, 2),
        "ratio_own_tile": round(rates["own_tile"] / per_tile, 2),
        "tiles_per_s_slide_map": round(slide, 1),
        "tiles_per_s_own_tile": round(rates["own_tile"], 1),
        "tiles_per_s_torchstain": round(per_tile, 1),
        "fit_slide_ms": round(seconds["fit_slide"] * 1e3, 1),
        "tile_px": list(tiles.shape[1:3]),
        "tiles": len(tiles),
        "levels_off_by_more_than_one": differ,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
