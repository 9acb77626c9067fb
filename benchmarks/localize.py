"""Seconds and memory of a map of many tiles: made, written, read, drawn on its grid, searched for lesions, exported.

    python benchmarks/localize.py [--tiles 200000]

Each part runs in a fresh process, whose peak resident memory is compared with that before it began. `map` is what
`selfvitmil localize` does for a slide beside the forward pass and reading the slide: two seeds of attention and
instance probabilities made into a map, its file written and read back, the heat-map on the tile grid, lesions, points,
and an overlay with lesions on a blank picture of 2,000 pixels. The tiles score as noise a few tiles wide, which gives
about a hundred lesions. `geojson` and `geojson_gz` write all tiles and lesions for QuPath.
`pictures` is the processor time of one slide's pictures, both colours, with reading a synthetic slide of 4,096 pixels.
Checks that the file reads back as the same map and that the GeoJSON has every tile. Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import gzip
import json
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from selfvitmil.geometry import size_at_mpp
from selfvitmil.localize.detection import find_lesions, find_points
from selfvitmil.localize.export import write_geojson
from selfvitmil.localize.heatmap import Frame, Heatmap, SlidePrediction, read_heatmap, write_heatmap
from selfvitmil.localize.overlay import draw_overlay, write_overlays
from selfvitmil.localize.scores import build_heatmap
from selfvitmil.settings import LocalizeSettings
from selfvitmil.slides import open_slide, synthetic

SETTINGS = LocalizeSettings()
PREDICTION = SlidePrediction(
    probability=(0.9,),
    max_probability=(0.95,),
    bag_probability=(0.85,),
    decision="tumor",
    threshold=0.5,
    threshold_from="fixed",
    classes=("normal", "tumor"),
    shown="tumor",
    split="given",
    part="test",
    seeds=(0, 1),
)


@dataclass(frozen=True)
class Scored:
    """What `score_tiles` says of a slide by one seed, as far as maps look at it."""

    attention_NC: NDArray[np.float32]
    instance_NC: NDArray[np.float32]
    effect_NC: None = None


def places(num_tiles: int) -> tuple[Frame, NDArray[np.int64]]:
    """Tiles of 224 pixels at 0.5 um/px on a slide of 0.25 um/px, in a field nearly square."""
    columns = int(np.ceil(np.sqrt(num_tiles)))
    row = np.arange(num_tiles)
    coords = np.stack([row % columns, row // columns], axis=1) * 448
    width, height = (coords.max(axis=0) + 448).tolist()
    return Frame(0.25, (width, height), 448.0, 448.0, 0.5, 224), coords


def scored(num_tiles: int, seed: int) -> Scored:
    columns = int(np.ceil(np.sqrt(num_tiles)))
    rng = np.random.default_rng(seed)
    noise = ndimage.gaussian_filter(rng.normal(size=(columns, columns)), 1.5).ravel()[:num_tiles]
    weight = np.exp(3 * noise / noise.std())
    return Scored(
        (weight / weight.sum()).astype(np.float32)[:, None], (1 / (1 + np.exp(-weight))).astype(np.float32)[:, None]
    )


def made(num_tiles: int) -> Heatmap:
    frame, coords = places(num_tiles)
    both: Any = [scored(num_tiles, seed) for seed in (0, 1)]
    return build_heatmap("large", "vit_dsmil", "dsmil", frame, coords, both, PREDICTION, SETTINGS)


def map_part(num_tiles: int, folder: Path) -> dict[str, Any]:
    frame, coords = places(num_tiles)
    both: Any = [scored(num_tiles, seed) for seed in (0, 1)]
    before, seconds = resident_mb(), Clock()
    heatmap = build_heatmap("large", "vit_dsmil", "dsmil", frame, coords, both, PREDICTION, SETTINGS)
    seconds("make")
    write_heatmap(folder / "large.h5", heatmap, "benchmark")
    seconds("write")
    again = read_heatmap(folder / "large.h5")
    seconds("read")
    picture = again.as_grid()
    seconds("heat_map")
    lesions = find_lesions(again, SETTINGS.lesion_threshold)
    seconds("lesions")
    points = find_points(again, SETTINGS.point_radius_um)
    seconds("points")
    thumbnail_mpp = frame.slide_mpp * max(frame.size_l0) / SETTINGS.picture_px
    width, height = size_at_mpp(frame.size_l0, frame.slide_mpp, thumbnail_mpp)
    page = draw_overlay(again, np.full((height, width, 3), 255, np.uint8), thumbnail_mpp, lesions=lesions)
    page.save(folder / "large.png")
    seconds("overlay")
    np.testing.assert_array_equal(again.score, heatmap.score)
    assert np.isfinite(picture).sum() == num_tiles
    assert all(len(again.columns[name]) == num_tiles for name in again.columns)
    told = {"lesions": len(lesions), "points": len(points), "grew_mb": peak_mb() - before}
    return {"seconds": seconds.told, "seconds_all": sum(seconds.told.values()), "peak_mb": peak_mb(), **told}


def export_part(num_tiles: int, path: Path) -> dict[str, Any]:
    heatmap = made(num_tiles)
    lesions = find_lesions(heatmap, SETTINGS.lesion_threshold)
    before, seconds = resident_mb(), Clock()
    write_geojson(path, heatmap, lesions)
    seconds("write")
    grew = max(0.0, peak_mb() - before)
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        num_written = sum(b'"objectType":"tile"' in line for line in file)
    assert num_written == num_tiles
    return {"seconds": seconds.told["write"], "grew_mb": grew, "file_mb": path.stat().st_size / 1e6}


def pictures_part(folder: Path, rounds: int = 3) -> dict[str, Any]:
    size = (4096, 4096)
    synthetic.make_slide(folder / "slide.svs", 0, size=size, mpp=0.5, layout="svs20")
    corners = np.arange(0, size[0] - 223, 224)
    coords = np.stack(np.meshgrid(corners, corners), axis=-1).reshape(-1, 2)
    both: Any = [scored(len(coords), seed) for seed in (0, 1)]
    frame = Frame(0.5, size, 224.0, 224.0, 0.5, 224)
    heatmap = build_heatmap("slide", "vit_dsmil", "dsmil", frame, coords, both, PREDICTION, SETTINGS)
    lesions, best, written = find_lesions(heatmap, SETTINGS.lesion_threshold), np.inf, []
    with open_slide(folder / "slide.svs") as slide:
        for _ in range(rounds):
            start = time.process_time()
            written = write_overlays(folder, heatmap, slide, SETTINGS, lesions=lesions)
            best = min(best, time.process_time() - start)
    megabytes = sum(path.stat().st_size for path in written) / 1e6
    return {"core_seconds": float(best), "pictures": len(written), "files_mb": megabytes}


class Clock:
    """Seconds since the last call, by name."""

    def __init__(self) -> None:
        self.told: dict[str, float] = {}
        self.last = time.perf_counter()

    def __call__(self, name: str) -> None:
        now = time.perf_counter()
        self.told[name], self.last = now - self.last, now


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def resident_mb() -> float:
    """What the process holds now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def rounded(told: Any) -> Any:
    if isinstance(told, dict):
        return {name: rounded(value) for name, value in told.items()}
    return round(told, 3 if told < 10 else 1) if isinstance(told, float) else told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiles", type=int, default=200_000)
    parser.add_argument("--part", choices=("map", "pictures", "geojson", "geojson_gz"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part == "map":
        print(json.dumps(map_part(arguments.tiles, arguments.folder)))
        return
    if arguments.part == "pictures":
        print(json.dumps(pictures_part(arguments.folder)))
        return
    if arguments.part:
        name = "large.geojson.gz" if arguments.part == "geojson_gz" else "large.geojson"
        print(json.dumps(export_part(arguments.tiles, arguments.folder / name)))
        return
    told: dict[str, Any] = {"benchmark": "localize", "tiles": arguments.tiles}
    with tempfile.TemporaryDirectory() as folder:
        for part in ("map", "pictures", "geojson", "geojson_gz"):
            command = [sys.executable, __file__, "--part", part, "--folder", folder, "--tiles", str(arguments.tiles)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            told[part] = rounded(json.loads(done.stdout.splitlines()[-1]))
            print(f"{part}: {json.dumps(told[part])}")
    print(json.dumps(told))


if __name__ == "__main__":
    main()
