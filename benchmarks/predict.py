"""Seconds from a slide's file to the answer of a packaged model, and where they go; on a CPU, and on a GPU if there.

    python benchmarks/predict.py [--size-px 8192] [--architecture vit_small_patch16_224] [--seeds 5] [--rounds 3]

The script makes a slide, packages an untrained encoder with untrained aggregators, and predicts the slide several
times, into an empty folder each, by the functions that `predict` calls: `tile_slide` (open, tissue, tiles, stain fit),
`embed_slide` (its share of waiting is `read_s`, the rest `encode_s`), `score_tiles` of every seed (`aggregate_s`), the
map with lesions and warnings (`map_s`), and overlays and GeoJSON (`pictures_s`). Medians over rounds; the first, which
loads and warms up, is `first_s` and counts for nothing else. `load_s` is opening the package, checksums included.
Answers of all rounds on one device must be the same to the bit. Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from selfvitmil.aggregate import build
from selfvitmil.aggregate.bag_tensors import measure
from selfvitmil.aggregate.recipes import recipe_of
from selfvitmil.aggregate.train import Trained, save_model
from selfvitmil.bags import read_bag
from selfvitmil.embed import EmbedJob, embed_slide
from selfvitmil.encoder import Encoder, build_encoder, save_encoder
from selfvitmil.evaluate.predictions import Choice
from selfvitmil.localize.export import ExportJob, export_heatmap
from selfvitmil.localize.heatmap import write_heatmap
from selfvitmil.package import (
    SETTINGS,
    Package,
    PackageParts,
    Predictor,
    SlideStatistics,
    fit_distribution,
    open_package,
    write_package,
)
from selfvitmil.settings import StudySettings, TrainSettings, parse, tiling_name, to_toml
from selfvitmil.slides import SlideRef, synthetic
from selfvitmil.tiles import TileJob, read_tiles
from selfvitmil.tiling import tile_slide

STAGES = ("tile_s", "read_s", "encode_s", "aggregate_s", "map_s", "pictures_s")


def settings_for(arguments: argparse.Namespace, device: str) -> StudySettings:
    told = {
        "tile": {"mpp": arguments.mpp, "size_px": arguments.tile_px},
        "embed": {"batch": arguments.batch, "device": device},
    }
    return parse(told, "the command line")


def save_models(folder: Path, dim: int, seeds: int) -> dict[str, Path]:
    """Untrained aggregators where trained ones would lie."""
    places: dict[str, Path] = {}
    names = ("split", "classes", "protocol", "epoch_from", "encoder", "tiling")
    for seed in range(seeds):
        torch.manual_seed(seed)
        module = build("dsmil", dim, 1).eval()
        trained = Trained(module, recipe_of("dsmil", TrainSettings()).for_dim(dim), 1, (), ())
        place = places[f"seed{seed}"] = folder / f"seed{seed}"
        save_model(place, trained, {**dict.fromkeys(names, ""), "seed": seed})
    return places


def make_package(folder: Path, slide: Path, encoder: Encoder, settings: StudySettings, seeds: int) -> None:
    """A package that expects slides like this one."""
    work = folder.with_name("making")
    save_encoder(work / "encoder", encoder)
    table, bag = cut_and_embed(slide, work, work / "encoder", settings)[:2]
    measures = SlideStatistics.of(table, measure(torch.from_numpy(bag.features_ND.copy())))
    choice = Choice(0.5, "fixed 0.5", None, "none")
    about = {
        "name": "bench_dsmil", "method": "dsmil", "classes": ["normal", "tumor"], "positive": "tumor",
        "encoders": [{"folder": "encoder", "name": "bench", "mpp": settings.tile.mpp}], "dim": encoder.dim,
        "protocol": "honest", "split": "given", "seeds": list(range(seeds)), "choice": choice.to_json(),
        "chosen_on": {"part": "validation", "slides": {"normal": 0, "tumor": 0}},
    }  # fmt: skip
    models = save_models(work / "models", encoder.dim, seeds)
    text = to_toml(settings, SETTINGS)
    expected = fit_distribution([measures] * 3, [], settings.tile.mpp)
    write_package(folder, PackageParts(about, "", text, expected, {"encoder": encoder}, models))


def cut_and_embed(slide: Path, work: Path, encoder: Path, settings: StudySettings) -> tuple[Any, Any, dict[str, float]]:
    """Tile table, bag, and seconds of each stage."""
    start = time.perf_counter()
    tile_slide(TileJob(SlideRef(slide.stem, slide), work / "tiles", settings))
    tiled = time.perf_counter()
    tiling = tiling_name(settings.tile)
    table, bag = work / "tiles" / tiling / f"{slide.stem}.h5", work / "bags" / tiling / "features_bench" / "slide.h5"
    job = EmbedJob(
        SlideRef(slide.stem, slide), table, bag, str(encoder), "bench", settings.stain.method, settings.embed
    )
    share = embed_slide(job).wait_share
    embedded = time.perf_counter() - tiled
    seconds = {"tile_s": tiled - start, "read_s": embedded * share, "encode_s": embedded * (1 - share)}
    return read_tiles(table), replace(read_bag(bag), slide=slide.stem), seconds


def answer(package: Package, predictor: Predictor, slide: Path, out: Path, settings: StudySettings) -> tuple[Any, Any]:
    """The slide's probability, and seconds of each stage."""
    table, bag, seconds = cut_and_embed(slide, out / "work", package.folder / "encoder", settings)
    start = time.perf_counter()
    scores = predictor.scores(bag)
    scored = time.perf_counter()
    told = predictor.combine(slide.stem, slide.name, bag, table, scores)
    answered = time.perf_counter()
    write_heatmap(out / "maps" / f"{slide.stem}.h5", told.heatmap, package.identity)
    export_heatmap(ExportJob(out / "maps" / f"{slide.stem}.h5", SlideRef(slide.stem, slide), None, settings.localize))
    seconds["aggregate_s"] = scored - start
    seconds["map_s"] = answered - scored
    seconds["pictures_s"] = time.perf_counter() - answered
    return told.heatmap.prediction.probability, seconds


def run(package_folder: Path, slide: Path, arguments: argparse.Namespace, device: str, folder: Path) -> dict[str, Any]:
    settings = settings_for(arguments, device)
    start = time.perf_counter()
    package = open_package(package_folder)
    predictor = Predictor(package, settings.localize, device)
    load_s = time.perf_counter() - start
    rounds: list[dict[str, float]] = []
    answers = set()
    for number in range(arguments.rounds + 1):
        probability, seconds = answer(package, predictor, slide, folder / f"{device}{number}", settings)
        answers.add(probability)
        rounds.append(seconds)
    if len(answers) > 1:
        raise SystemExit(f"answers differ from round to round on {device}: {sorted(answers)}")
    first, *others = rounds
    median = {stage: statistics.median(each[stage] for each in others) for stage in STAGES}
    total = sum(median.values())
    return {
        "load_s": round(load_s, 3),
        "first_s": round(sum(first.values()), 3),
        "slide_s": round(total, 3),
        **{stage: round(value, 3) for stage, value in median.items()},
        "shares": {stage.removesuffix("_s"): round(value / total, 3) for stage, value in median.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size-px", type=int, default=8192)
    parser.add_argument("--architecture", default="vit_small_patch16_224")
    parser.add_argument("--tile-px", type=int, default=224)
    parser.add_argument("--mpp", type=float, default=0.5)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--devices", nargs="*", default=["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"])
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        slide = folder / "slide.svs"
        synthetic.make_slide(slide, 1, size=(arguments.size_px, arguments.size_px), lesions=2)
        torch.manual_seed(0)
        encoder = build_encoder(arguments.architecture, img_size=arguments.tile_px)
        make_package(folder / "model", slide, encoder, settings_for(arguments, arguments.devices[-1]), arguments.seeds)
        found = {device: run(folder / "model", slide, arguments, device, folder) for device in arguments.devices}
        tiles = len(read_tiles(next((folder / f"{arguments.devices[0]}0" / "work" / "tiles").glob("*/slide.h5"))))
    told = {
        "benchmark": "predict",
        "architecture": arguments.architecture,
        "size_px": arguments.size_px,
        "tiles": tiles,
    }
    print(json.dumps({**told, "threads": torch.get_num_threads(), **found}))


if __name__ == "__main__":
    main()
