"""JPEG 2000: processor time of OpenSlide, Pillow and imagecodecs for the stored tiles of a slide, one thread.

    python benchmarks/jpeg2000.py SLIDE.svs [--rounds 5]

All stored tiles of level 0 are decoded, the contenders take turns, and the best round of each counts. imagecodecs is
no dependency of ours: it is measured where it is installed. `half_*`: Pillow decodes at half the size, as a tile of
20x from a 40x slide would need; how far its pixels are from the area mean of the whole ones, in levels of 255. Checks
that all give OpenSlide's pixels. The last line is JSON.
"""

from __future__ import annotations

import argparse
import importlib
import io
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import openslide
import tifffile
from numpy.typing import NDArray
from PIL import Image

Pixels = NDArray[np.uint8]
DEFAULT_ROUNDS = 5


def stored_tiles(path: Path) -> tuple[list[bytes], int, int]:
    """The compressed tiles of level 0, their edge, and how many there are in a row."""
    with tifffile.TiffFile(path) as tiff, path.open("rb") as file:
        page: Any = tiff.pages[0]
        tiles: list[bytes] = []
        for start, size in zip(page.dataoffsets, page.databytecounts, strict=True):
            file.seek(start)
            tiles.append(file.read(size))
        return tiles, page.tilewidth, -(-page.imagewidth // page.tilewidth)


def by_pillow(tile: bytes, reduce: int = 0) -> Pixels:
    image: Any = Image.open(io.BytesIO(tile))
    image.reduce = reduce
    image.load()
    return np.asarray(image)


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("slide", type=Path)
    parser.add_argument("--rounds", type=int, default=DEFAULT_ROUNDS)
    arguments = parser.parse_args(given)
    tiles, edge, columns = stored_tiles(arguments.slide)
    decoders: dict[str, Callable[[bytes], Pixels]] = {"pillow": by_pillow, "half": lambda tile: by_pillow(tile, 1)}
    try:
        codecs = importlib.import_module("imagecodecs")
        decoders["imagecodecs"] = lambda tile: codecs.jpeg2k_decode(tile, numthreads=1)
    except ImportError:
        pass
    best: dict[str, float] = {}
    regions: list[Image.Image] = []
    for _ in range(arguments.rounds):
        with openslide.OpenSlide(arguments.slide) as slide:
            slide.read_region((0, 0), 0, (1, 1))
            begin = time.process_time()
            regions = [
                slide.read_region((number % columns * edge, number // columns * edge), 0, (edge, edge))
                for number in range(len(tiles))
            ]
            best["openslide"] = min(best.get("openslide", np.inf), time.process_time() - begin)
        for name, decode in decoders.items():
            begin = time.process_time()
            for tile in tiles:
                decode(tile)
            best[name] = min(best.get(name, np.inf), time.process_time() - begin)
    middle = len(tiles) // 2 + columns // 2
    shown = np.asarray(regions[middle])[..., :3]
    for name, decode in decoders.items():
        assert name == "half" or np.array_equal(decode(tiles[middle]), shown), name
    whole, half = (by_pillow(tiles[middle], reduce).astype(float) for reduce in (0, 1))
    distance = np.abs(whole.reshape(edge // 2, 2, edge // 2, 2, 3).mean((1, 3)) - half)
    print(
        json.dumps(
            {
                "benchmark": "jpeg2000",
                "ms_per_tile": {name: round(1e3 * seconds / len(tiles), 2) for name, seconds in best.items()},
                "ratio": {name: round(best["openslide"] / best[name], 2) for name in decoders},
                "half_mean_difference": round(float(distance.mean()), 2),
                "half_p99_difference": round(float(np.percentile(distance, 99)), 1),
                "tiles": len(tiles),
                "edge_px": edge,
            }
        )
    )


if __name__ == "__main__":
    main()
