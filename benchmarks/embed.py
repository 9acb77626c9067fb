"""Tiles per second of embedding: the encoder alone, and from slides that this script writes to feature files.

    python benchmarks/embed.py [--architecture vit_base_patch16_224] [--batch 512] [--rounds 7]

The encoder alone takes uint8 tiles that are already on its device, in the precision that `embed` chooses there. Plain
timm (`forward_features`, in the same precision, its pixels normalized outside the clock), our encoder, and our encoder
compiled take turns; the median round counts. Vectors are checked against float32 (`error_*`: norm of the difference
over norm). `fraction_of_peak` is the rate of matrix products of the compiled encoder, where it was measured, else of
the plain one, as a share of one large product of the same precision on the same device, measured in the same run.
`fraction_of_sgemm` on a CPU, with one thread: the same, with that product taking its turn among the others.
`tiles_per_s_end_to_end` is `embed_slides` over all slides but the first, which warms up; `data_wait_share` is the part
of the time in which the encoder waits for tiles, and `tiles_per_s_reading` what the readers alone can do. Without a GPU
nothing is compiled unless asked for, and the way from slides is measured with a small network. Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from selfvitmil import embed
from selfvitmil.data.readers import SlideTiles, TileRequest
from selfvitmil.embed import EmbeddedSlide, EmbedJob, embed_slide, embed_slides, readers_for
from selfvitmil.encoder import Encoder, build_encoder, load_encoder, save_encoder
from selfvitmil.runtime.device import peak_tflops, synchronize
from selfvitmil.settings import EmbedSettings, parse
from selfvitmil.slides import SlideRef, synthetic
from selfvitmil.tiles import TileJob, read_tiles
from selfvitmil.tiling import tile_slide

SMALL = {"embed_dim": 192, "depth": 6, "num_heads": 3}
"""The network of the way from slides, without a GPU."""
SGEMM_EDGE = 1536


def gflop_per_tile(encoder: Encoder) -> float:
    """Floating-point operations of the matrix products for one tile; a multiply-add is two."""
    size = encoder.config.size_px
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        encoder(torch.zeros(1, 3, size, size))
    return counter.get_total_flops() / 1e9


def take_turns(contenders: dict[str, Callable[[], Any]], device: torch.device, rounds: int, tiles: int) -> Any:
    """Tiles per second of each, by the median round."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    repeats = 5 if device.type == "cuda" else 1
    for _ in range(rounds):
        for name, call in contenders.items():
            synchronize(device)
            start = time.perf_counter()
            for _ in range(repeats):
                call()
            synchronize(device)
            seconds[name].append((time.perf_counter() - start) / repeats)
    return {name: tiles / statistics.median(times) for name, times in seconds.items()}


def compute(folder: Path, arguments: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """The encoder alone."""
    low = torch.randint(0, 256, (arguments.batch, 3, 28, 28), generator=torch.Generator().manual_seed(0)).float()
    size = (arguments.tile_px, arguments.tile_px)
    tiles_B3HW = torch.nn.functional.interpolate(low, size, mode="bilinear").to(torch.uint8).to(device)
    settings = EmbedSettings(batch=arguments.batch, device=device.type)
    models = {"eager": embed.load_for(str(folder), settings)}
    facts: dict[str, Any] = {}
    if arguments.compile == "on":
        models["compute"] = embed.load_for(str(folder), settings.model_copy(update={"compile": True}))
        start = time.perf_counter()
        models["compute"](tiles_B3HW)
        synchronize(device)
        facts["compile_s"] = round(time.perf_counter() - start, 1)
    exact = load_encoder(folder).to(device).eval()
    with torch.inference_mode():
        images_B3HW = exact.normalize(tiles_B3HW)
        wanted = torch.cat([exact(part) for part in images_B3HW.split(64)]).double()
    for name, model in models.items():
        facts[f"error_{name}"] = float(f"{(model(tiles_B3HW).double() - wanted).norm() / wanted.norm():.2g}")
    dtype = models["eager"].dtype

    @torch.inference_mode()
    def plain() -> Any:
        with torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32):
            return exact.backbone.forward_features(images_B3HW)

    a, b = (torch.randn(SGEMM_EDGE, SGEMM_EDGE) for _ in range(2))
    contenders: dict[str, Callable[[], Any]] = {"timm": plain}
    if device.type == "cpu":
        contenders["sgemm"] = lambda: torch.mm(a, b)
    contenders |= {name: (lambda model=model: model(tiles_B3HW)) for name, model in models.items()}
    for call in contenders.values():
        call()
    paces = take_turns(contenders, device, arguments.rounds, arguments.batch)
    paces.setdefault("compute", paces["eager"])
    products_per_s = paces.pop("sgemm", 0.0) / arguments.batch
    facts |= {f"tiles_per_s_{name}": round(pace, 1) for name, pace in paces.items()}
    facts["ratio_to_timm"] = round(paces["compute"] / paces["timm"], 3)
    facts["peak_tflops"] = round(peak_tflops(device, dtype), 3)
    gflop = gflop_per_tile(build_encoder(arguments.architecture, img_size=arguments.tile_px))
    facts["gflop_per_tile"] = round(gflop, 2)
    facts["fraction_of_peak"] = round(paces["compute"] * gflop / 1000 / facts["peak_tflops"], 3)
    if device.type == "cpu":
        limit = products_per_s * 2 * SGEMM_EDGE**3 / 1e9
        facts["fraction_of_sgemm"] = round(paces["compute"] * gflop / limit, 3)
    return facts


def end_to_end(folder: Path, arguments: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """From slide files to feature files."""
    settings = EmbedSettings(batch=arguments.batch, device=device.type, compile=arguments.compile == "on")
    jobs: list[EmbedJob] = []
    for seed in range(arguments.slides):
        path = folder / f"s{seed}.svs"
        edge = 4096 * int(arguments.copies**0.5 + 0.999)
        synthetic.write_sparse_slide(path, (edge, edge), seed=seed, copies=arguments.copies)
        tile_slide(
            TileJob(
                SlideRef(path.stem, path), folder / "tiles", parse({"tile": {"size_px": arguments.tile_px}}, "made")
            )
        )
        table = folder / "tiles" / f"0.5mpp_{arguments.tile_px}px_0px" / f"{path.stem}.h5"
        bag = folder / "bags" / f"{path.stem}.h5"
        jobs.append(EmbedJob(SlideRef(path.stem, path), table, bag, str(folder / "encoder"), "made", "slide", settings))
    embed_slide(jobs[0])
    start, tiles, waited = time.perf_counter(), 0, 0.0
    for _, result in embed_slides({job.slide.name: job for job in jobs[1:]}):
        assert isinstance(result, EmbeddedSlide), result
        tiles, waited = tiles + result.num_tiles, waited + result.wait_share * result.num_tiles
    spent = time.perf_counter() - start
    return {
        "tiles_per_s_end_to_end": round(tiles / spent, 1),
        "data_wait_share": round(waited / tiles, 3),
        "tiles_per_s_reading": round(reading_pace(jobs[1], device), 1),
        "tiles": tiles,
    }


def reading_pace(job: EmbedJob, device: torch.device) -> float:
    """Tiles per second when nothing is encoded."""
    table = read_tiles(job.table)
    tiles = SlideTiles("", TileRequest(job.slide, table.mpp), table.coords_l0)
    with readers_for(job.settings, device, table.size_px) as readers:
        start = time.perf_counter()
        for _ in readers.read([tiles], shared=False):
            pass
        return len(table) / (time.perf_counter() - start)


def main() -> None:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--architecture", default="vit_base_patch16_224")
    parser.add_argument("--batch", type=int, default=512 if on_gpu else 8)
    parser.add_argument("--tile-px", type=int, default=224)
    parser.add_argument("--rounds", type=int, default=7 if on_gpu else 4)
    parser.add_argument("--slides", type=int, default=3, help="made slides, the first of which warms up")
    parser.add_argument("--copies", type=int, default=100 if on_gpu else 1, help="nodes of 4096 px in a slide")
    parser.add_argument("--compile", default="on" if on_gpu else "off", choices=["on", "off"])
    arguments = parser.parse_args()
    device = torch.device("cuda" if on_gpu else "cpu")
    if not on_gpu:
        torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.manual_seed(0)
        told = {"img_size": arguments.tile_px, "mpp": 0.5, "stain": "slide"}
        save_encoder(folder / "encoder", build_encoder(arguments.architecture, **told))
        facts = compute(folder / "encoder", arguments, device)
        print(json.dumps(facts), flush=True)
        if not on_gpu:  # or the slides would take an hour
            save_encoder(folder / "encoder", build_encoder("vit_tiny_patch16_224", model_args=SMALL, **told))
        facts |= end_to_end(folder, arguments, device)
    facts |= {"architecture": arguments.architecture, "batch": arguments.batch}
    facts["device"] = torch.cuda.get_device_name(device) if on_gpu else "cpu"
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
