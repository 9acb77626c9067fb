"""The viewer's server under load: 50 clients over 20 slides, tile after tile without a pause; and one huge slide.

    python benchmarks/view.py [--clients 50] [--slides 20] [--tiles 40]

The server runs in a process of its own, as the command starts it; the clients share another. Each client walks through
its own tiles of tissue, at all levels, first cold, then the same tiles again. "First picture" is what a browser asks
for to fill a window of 1000 pixels with a slide of 100,000 x 100,000: what the slide is, then the 16 tiles of the level
that fits, six at a time. Some tiles are compared with pixels read straight from the slide.
Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np

from selfvitmil.cohort import read_cohort
from selfvitmil.settings import StudySettings
from selfvitmil.slides import SlideRef
from selfvitmil.slides.synthetic import write_sparse_slide
from selfvitmil.view import server, tiles
from selfvitmil.view.export import StaticFile
from selfvitmil.view.guard import names_for
from selfvitmil.view.server import make_app
from selfvitmil.view.study import ViewedStudy

EDGE = 16_384
HUGE = 100_000
PAGE = {"index.html": StaticFile(b"page", "text/html")}
REACH = {"cold_p95_s": 0.5, "cached_p95_s": 0.1, "growth_mb": 300, "first_picture_s": 1.0}


def make_study(folder: Path, num_slides: int) -> None:
    """One slide full of tissue under many names, and a huge one."""
    write_sparse_slide(folder / "slide_00.svs", (EDGE, EDGE), seed=1, copies=16)
    for k in range(1, num_slides):
        shutil.copy(folder / "slide_00.svs", folder / f"slide_{k:02d}.svs")
    write_sparse_slide(folder / "huge.svs", (HUGE, HUGE), seed=2, copies=400)
    names = [*(f"slide_{k:02d}" for k in range(num_slides)), "huge"]
    (folder / "cohort.csv").write_text("slide,path\n" + "".join(f"{name},{name}.svs\n" for name in names))


def run_server(folder: Path, address: server.Address) -> None:
    study = ViewedStudy(folder, read_cohort(folder / "cohort.csv"), StudySettings())
    app = make_app(study, PAGE, hosts=names_for("127.0.0.1"))
    server.make_server(app).run(sockets=[address.listener])


class Connection:
    """One connection that stays open, as a browser's."""

    def __init__(self, port: int):
        self.port = port
        self.streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def get(self, target: str) -> bytes:
        if self.streams is None:
            self.streams = await asyncio.open_connection("127.0.0.1", self.port)
        reader, writer = self.streams
        writer.write(f"GET {target} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        body = await reader.readexactly(int(head.split("content-length: ")[1].split("\r\n")[0]))
        if not head.startswith("http/1.1 200"):
            raise RuntimeError(f"{target}: {head.splitlines()[0]} {body[:200]!r}")
        return body


async def walk(port: int, targets: list[str], taken: list[float]) -> None:
    connection = Connection(port)
    for target in targets:
        started = time.perf_counter()
        await connection.get(target)
        taken.append(time.perf_counter() - started)


async def load(port: int, walks: list[list[str]]) -> tuple[list[float], float]:
    taken: list[float] = []
    started = time.perf_counter()
    await asyncio.gather(*(walk(port, targets, taken) for targets in walks))
    return taken, time.perf_counter() - started


async def first_picture(port: int, slide: str) -> float:
    zoom = tiles.DeepZoom((HUGE, HUGE))
    columns, rows = zoom.num_tiles(10)
    wanted = [f"/api/slides/{slide}/tiles/10/{c}_{r}.jpg" for r in range(rows) for c in range(columns)]
    started = time.perf_counter()
    await Connection(port).get(f"/api/slides/{slide}.json")
    await load(port, [wanted[k::6] for k in range(6)])
    return time.perf_counter() - started


def walks_of(ids: list[str], num_clients: int, num_tiles: int) -> list[list[str]]:
    """Different tiles for every client: half of them of full resolution, the others of coarser levels."""
    rng = random.Random(1)
    zoom = tiles.DeepZoom((EDGE, EDGE))
    half = num_clients * num_tiles // 2
    chosen: list[str] = []
    for levels in ([zoom.max_level], range(9, zoom.max_level)):
        places = [
            f"/api/slides/{slide}/tiles/{level}/{column}_{row}.jpg"
            for slide in ids
            for level in levels
            for column in range(zoom.num_tiles(level)[0])
            for row in range(zoom.num_tiles(level)[1])
        ]
        chosen += rng.sample(places, half)
    rng.shuffle(chosen)
    return [chosen[k::num_clients] for k in range(num_clients)]


def check_pixels(folder: Path, port: int, slide: str) -> None:
    """What is served is what the slide holds."""
    zoom = tiles.DeepZoom((EDGE, EDGE))
    opened = tiles.open_for_viewing(SlideRef("slide", folder / "slide_00.svs"))
    for level, column, row in ((zoom.max_level, 20, 21), (11, 3, 4), (9, 1, 1)):
        served = asyncio.run(Connection(port).get(f"/api/slides/{slide}/tiles/{level}/{column}_{row}.jpg"))
        scale = zoom.downsample(level)
        pixels = opened.slide.read_region(
            (column * 254 - 1) * scale,
            (row * 254 - 1) * scale,
            zoom.box(level, column, row)[2:],
            opened.slide.mpp * scale,
        )
        if served != tiles.to_jpeg(pixels):
            raise RuntimeError(f"tile {level}/{column}_{row} is not what the slide holds")


def memory_mb(pid: int, field: str) -> float:
    """`VmRSS` or `VmHWM` (its peak)."""
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) / 1024


def cpu_s(pid: int) -> float:
    """Seconds of processor that the server has used; unlike waiting times, nearly the same on a busy machine."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def wait_for(port: int) -> dict[str, str]:
    """Ids by name, once the server answers."""
    for _ in range(300):
        try:
            data = json.loads(await Connection(port).get("/api/study.json"))
            return {row["name"]: row["id"] for row in data["slides"]}
        except OSError:
            await asyncio.sleep(0.1)
    raise RuntimeError("the server does not answer")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--slides", type=int, default=20)
    parser.add_argument("--tiles", type=int, default=40, help="of each client")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_study(folder, options.slides)
        address = server.listen("127.0.0.1", 0)
        process = multiprocessing.get_context("fork").Process(target=run_server, args=(folder, address), daemon=True)
        process.start()
        pid = process.pid or 0
        ids = asyncio.run(wait_for(address.port))
        before = memory_mb(pid, "VmRSS")
        used = [cpu_s(pid)]
        huge = asyncio.run(first_picture(address.port, ids.pop("huge")))
        used.append(cpu_s(pid))
        check_pixels(folder, address.port, ids["slide_00"])
        walks = walks_of(list(ids.values()), options.clients, options.tiles)
        used.append(cpu_s(pid))
        cold, cold_s = asyncio.run(load(address.port, walks))
        used.append(cpu_s(pid))
        cached, cached_s = asyncio.run(load(address.port, walks))
        used.append(cpu_s(pid))
        growth = memory_mb(pid, "VmHWM") - before
        process.terminate()
        process.join()
    result = {
        "clients": options.clients,
        "slides": options.slides,
        "tiles": len(cold),
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 1),
        "cold_p50_s": round(float(np.quantile(cold, 0.5)), 4),
        "cold_p95_s": round(float(np.quantile(cold, 0.95)), 4),
        "cold_tiles_per_s": round(len(cold) / cold_s, 1),
        "cold_cpu_ms_per_tile": round((used[3] - used[2]) / len(cold) * 1e3, 2),
        "cached_p50_s": round(float(np.quantile(cached, 0.5)), 4),
        "cached_p95_s": round(float(np.quantile(cached, 0.95)), 4),
        "cached_tiles_per_s": round(len(cached) / cached_s, 1),
        "cached_cpu_ms_per_tile": round((used[4] - used[3]) / len(cached) * 1e3, 2),
        "before_mb": round(before),
        "growth_mb": round(growth),
        "first_picture_s": round(huge, 3),
        "first_picture_cpu_s": round(used[1] - used[0], 3),
    }
    for key, reach in REACH.items():
        print(f"{key}: {result[key]} (reach: < {reach})")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
