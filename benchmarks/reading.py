"""Tiles per second: our reader against openslide-python with an area resize, one thread each.

    python benchmarks/reading.py [--size 4096] [--rounds 5] [--cmu CMU-1-Small-Region.svs]

Both read the same 224 px tiles at 0.5 microns per pixel: tissue tiles of a regular grid, once row by row (as tiling and
embedding do) and once in random order (as pre-training does). The other side reads the best level with `read_region`
and shrinks with Pillow's `reduce` where the factor is whole and a box-filter `resize` elsewhere, its fastest ways.
Every round times both, and the bare JPEG decoding of the tiles that our reader decoded, from newly opened slides with
empty caches; the best round of each counts. Time is the processor time of this process, so that other load on the
machine matters less; opening is left out.

| slide      | what it is                                                        |
|------------|-------------------------------------------------------------------|
| `no20x`    | 0.25 mpp, levels 1, 4, 16: tiles are half of level 0              |
| `with20x`  | 0.25 mpp, levels 1, 2, 4, ...: tiles are pixels of level 1        |
| `camelyon` | 0.243 mpp, levels 1, 2, 4, ...: level 1 shrunk 1.029 times        |
| `aperio`   | 0.2527 mpp, levels 1, 4, 16: level 0 shrunk 1.979 times           |
| `cmu`      | a real Aperio slide of 0.499 mpp: level 0 shrunk 1.002 times      |
| `cmu_own`  | the same at its own 0.499 mpp: tiles are pixels of level 0        |

Our pixels are checked against the area mean of OpenSlide's, computed here by itself. Ends with one JSON line: for each
slide `ratio_*` (ours over theirs) and `fraction_*` (of the speed of bare decoding); `fraction_of_decode_limit` is that
of `no20x`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openslide
import simplejpeg
from numpy.typing import NDArray
from PIL import Image

from selfvitmil import geometry
from selfvitmil.slides import jpegtiff, open_slide, synthetic

SIZE_PX = 224
MAX_MEAN, MAX_P99 = 1.0, 6.0
Places = list[tuple[int, int]]
Decoded = list[tuple[bytes, dict[str, Any]]]


def ours(path: Path, mpp: float, places: Places) -> Iterator[NDArray[np.uint8]]:
    jpegtiff.shared_cache.clear()
    with open_slide(path) as slide:
        yield slide.read_tile(0, 0, 1, mpp)  # opened and warm; the clock starts here
        for x, y in places:
            yield slide.read_tile(x, y, SIZE_PX, mpp)


def theirs(path: Path, mpp: float, places: Places) -> Iterator[NDArray[np.uint8]]:
    with openslide.OpenSlide(path) as slide:
        wanted = mpp / float(slide.properties["openslide.mpp-x"])
        level = slide.get_best_level_for_downsample(wanted + 1e-6)
        extent = SIZE_PX * wanted / slide.level_downsamples[level]
        edge = int(np.ceil(extent - 1e-6))
        yield np.asarray(slide.read_region((0, 0), level, (1, 1)))
        for place in places:
            picture = slide.read_region(place, level, (edge, edge)).convert("RGB")
            if edge != SIZE_PX and abs(extent - edge) < 1e-6 and edge % SIZE_PX == 0:
                picture = picture.reduce(edge // SIZE_PX)
            elif abs(extent - SIZE_PX) > 1e-6:
                picture = picture.resize((SIZE_PX, SIZE_PX), Image.Resampling.BOX, box=(0, 0, extent, extent))
            yield np.asarray(picture)


def bare_decoding(decoded: Decoded) -> Iterator[NDArray[np.uint8]]:
    yield np.empty(0, np.uint8)
    for stream, smallest in decoded:
        yield simplejpeg.decode_jpeg(stream, **smallest)


def decoded_by_us(path: Path, mpp: float, places: Places) -> Decoded:
    """What our reader hands to the JPEG decoder, in order."""
    decoded: Decoded = []
    original = jpegtiff._decode_jpeg

    def noted(stream: bytes, tile_size: tuple[int, int], shrink: int) -> Any:
        width, height = tile_size[0] // shrink, tile_size[1] // shrink
        decoded.append((stream, {"min_width": width, "min_height": height} if shrink > 1 else {}))
        return original(stream, tile_size, shrink)

    list(ours(path, mpp, places[:1]))  # what is measured once per file has been measured then
    jpegtiff._decode_jpeg = noted
    try:
        list(ours(path, mpp, places))
    finally:
        jpegtiff._decode_jpeg = original
    return decoded


def tissue_places(path: Path, mpp: float) -> Places:
    """Corners of the grid's tiles that are not mostly glass, row by row."""
    with open_slide(path) as slide:
        thumbnail = slide.thumbnail(8.0).mean(axis=2)
        extent = geometry.extent_l0(SIZE_PX, mpp, slide.mpp)
        width, height = slide.size_l0
        columns, rows = (geometry.grid_origins(edge, extent, extent) for edge in (width, height))
        scale = slide.mpp / 8.0
        step = round(extent * scale)
    corners = [(int(x), int(y), round(x * scale), round(y * scale)) for y in rows for x in columns]
    return [(x, y) for x, y, j, i in corners if thumbnail[i : i + step, j : j + step].mean() < 225]


def area_mean(path: Path, mpp: float, x_l0: int, y_l0: int) -> NDArray[np.float64]:
    """The truth: dense weights, double precision, pixels of the level as OpenSlide shows them from its corner."""
    with openslide.OpenSlide(path) as slide:
        wanted = mpp / float(slide.properties["openslide.mpp-x"])
        level = slide.get_best_level_for_downsample(wanted + 1e-6)
        downsample = round(slide.level_downsamples[level])
        whole = np.asarray(slide.read_region((0, 0), level, slide.level_dimensions[level]).convert("RGB"), np.float64)
    factor = wanted / downsample

    def weights(start: float, length: int) -> NDArray[np.float64]:
        low = (start + np.arange(SIZE_PX) * factor)[:, None]
        pixel = np.arange(length)[None, :]
        return np.clip(np.minimum(low + factor, pixel + 1) - np.maximum(low, pixel), 0, None) / factor

    down, along = weights(y_l0 / downsample, whole.shape[0]), weights(x_l0 / downsample, whole.shape[1])
    return np.stack([down @ whole[..., channel] @ along.T for channel in range(3)], axis=-1)


def best_seconds(tasks: dict[str, Callable[[], Iterator[Any]]], rounds: int) -> dict[str, float]:
    best = dict.fromkeys(tasks, np.inf)
    for k in range(rounds):
        names = list(tasks) if k % 2 else list(tasks)[::-1]
        for name in names:
            tiles = tasks[name]()
            next(tiles)
            start = time.process_time()
            for _ in tiles:
                pass
            best[name] = min(best[name], time.process_time() - start)
    return best


def compare(path: Path, mpp: float, rounds: int) -> dict[str, float]:
    """Both orders of reading, added up."""
    grid = tissue_places(path, mpp)
    shuffled = [grid[k] for k in np.random.default_rng(0).permutation(len(grid))]
    sample = shuffled[:6]
    differences = [
        np.abs(tile - np.floor(area_mean(path, mpp, *place) + 0.5))
        for tile, place in zip(list(ours(path, mpp, sample))[1:], sample, strict=True)
    ]
    mean, p99 = float(np.mean(differences)), float(np.percentile(differences, 99))
    assert mean < MAX_MEAN, f"{path.name}: our tiles differ by {mean:.2f} grey levels"
    assert p99 < MAX_P99, f"{path.name}: one pixel in a hundred of ours differs by {p99:.1f} grey levels"
    seconds = {"ours": 0.0, "theirs": 0.0, "bare": 0.0}
    for places in (grid, shuffled):
        decoded = decoded_by_us(path, mpp, places)
        tasks: dict[str, Callable[[], Iterator[Any]]] = {
            "ours": lambda places=places: ours(path, mpp, places),
            "theirs": lambda places=places: theirs(path, mpp, places),
            "bare": lambda decoded=decoded: bare_decoding(decoded),
        }
        for name, best in best_seconds(tasks, rounds).items():
            seconds[name] += best
    return {
        "ratio": seconds["theirs"] / seconds["ours"],
        "fraction": seconds["bare"] / seconds["ours"],
        "tiles_per_second": 2 * len(grid) / seconds["ours"],
        "mean": mean,
        "p99": p99,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--size", type=int, default=4096, help="edge of the made slides in level-0 pixels")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cmu", type=Path, help="a real slide to measure as well")
    options = parser.parse_args()
    made: dict[str, tuple[Any, float]] = {
        "no20x": ("svs40", 0.25),
        "with20x": ("svs20", 0.25),
        "camelyon": ("tiff", 0.243),
        "aperio": ("svs40", 0.2527),
    }
    summary: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        slides: dict[str, tuple[Path, float]] = {}
        for name, (layout, slide_mpp) in made.items():
            path = Path(folder) / f"{name}.{'tif' if layout == 'tiff' else 'svs'}"
            synthetic.make_slide(path, 0, size=(options.size, options.size), mpp=slide_mpp, layout=layout)
            slides[name] = path, 0.5
        if options.cmu:
            slides |= {"cmu": (options.cmu, 0.5), "cmu_own": (options.cmu, open_slide(options.cmu).mpp)}
        for name, (path, mpp) in slides.items():
            result = compare(path, mpp, options.rounds)
            print(
                f"{name:10s} {result['ratio']:5.2f} times openslide-python, {result['fraction']:.2f} of bare decoding, "
                f"{result['tiles_per_second']:.0f} tiles/s, "
                f"off by {result['mean']:.2f} grey levels (mean), {result['p99']:.0f} (p99)"
            )
            summary[f"ratio_{name}"] = round(result["ratio"], 2)
            summary[f"fraction_{name}"] = round(result["fraction"], 2)
            summary[f"mean_difference_{name}"] = round(result["mean"], 3)
    summary["fraction_of_decode_limit"] = summary["fraction_no20x"]
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
