"""Seconds from a slide file to its tile table, and memory on a very large slide.

    python benchmarks/tiling.py [--slides 4] [--size 6144]

`seconds_table` is the way from the file to the table alone (thumbnail, tissue, grid, fractions, HDF5);
`seconds_all` adds what `selfvitmil tile` also does: stain fit, picture, outline, fingerprint. Both are medians over
rounds that alternate between the two. `peak_mb_100k` is the peak resident memory of a fresh process that tiles a sparse
slide of 100,000 x 100,000 pixels, `base_mb` that of the same process before it opens the slide.
Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from selfvitmil import tiles, tiling
from selfvitmil.settings import StudySettings
from selfvitmil.slides import SlideRef, open_slide, synthetic
from selfvitmil.store.provenance import Provenance
from selfvitmil.tiles import TileJob, TileTable, write_tiles
from selfvitmil.tiling import tile_slide
from selfvitmil.tissue import find_tissue


def table_only(path: Path, folder: Path) -> int:
    """The shortest way to a table."""
    settings = StudySettings()
    tile = settings.tile
    with open_slide(path) as slide:
        tissue = find_tissue(slide, settings.tissue, path.stem)
        coords = tiles.grid(slide.size_l0, slide.mpp, tile.size_px, tile.mpp)
        boxes = tiles.boxes_l0(coords, tile.size_px * tile.mpp / slide.mpp)
        fractions = tiling.mask_fractions(boxes, tissue, slide.mpp).astype(np.float32)
        kept = fractions >= tile.min_tissue
        table = TileTable(path.stem, coords[kept], fractions[kept], tile.size_px, tile.mpp, 0, slide.mpp, slide.size_l0)
    write_tiles(folder / f"{path.stem}.h5", table, Provenance("tile", tiles.FORMAT_VERSION, {}, {}))
    return len(table)


def whole_stage(path: Path, folder: Path) -> int:
    """What `selfvitmil tile` does for one slide."""
    return tile_slide(TileJob(SlideRef(path.stem, path), folder, StudySettings())).num_tiles


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def tile_large(path: Path, folder: Path) -> None:
    """Run in a process of its own: its peak memory is what is measured."""
    base, start = peak_mb(), time.perf_counter()
    num_tiles = whole_stage(path, folder)
    print(json.dumps({"base": base, "peak": peak_mb(), "seconds": time.perf_counter() - start, "tiles": num_tiles}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slides", type=int, default=4)
    parser.add_argument("--size", type=int, default=6144, help="edge of the made slides in level-0 pixels")
    parser.add_argument("--large", nargs=2, type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.large:
        tile_large(*arguments.large)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        paths = [folder / f"s{seed}.svs" for seed in range(arguments.slides)]
        for seed, path in enumerate(paths):
            synthetic.make_slide(path, seed=seed, size=(arguments.size, arguments.size), layout="svs40")
        seconds: dict[str, list[float]] = {"table": [], "all": []}
        counts: list[int] = []
        for round_ in range(3):
            for path in paths:
                for key, function in (("table", table_only), ("all", whole_stage)):
                    start = time.perf_counter()
                    count = function(path, folder / f"{key}{round_}")
                    seconds[key].append(time.perf_counter() - start)
                    counts.append(count)
                assert counts[-1] == counts[-2], "both ways must find the same tiles"
        large = folder / "large.tif"
        synthetic.write_sparse_slide(large, size_l0=(100_000, 100_000))
        command = [sys.executable, __file__, "--large", str(large), str(folder / "large")]
        memory = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    result = {
        "seconds_table": round(float(np.median(seconds["table"])), 4),
        "seconds_all": round(float(np.median(seconds["all"])), 4),
        "tiles_per_slide": int(np.mean(counts)),
        "peak_mb_100k": round(memory["peak"]),
        "base_mb": round(memory["base"]),
        "seconds_100k": round(memory["seconds"], 2),
        "tiles_100k": memory["tiles"],
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
