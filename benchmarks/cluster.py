"""Slides per hour with 1, 2 and 4 workers, what the engine adds to each slide, and how it holds 100,000 queued ones.

    python benchmarks/cluster.py [--workers 1 2 4] [--slides 40] [--size-px 2048] [--queued 100000] [--take 3000]

Workers are those of a dask scheduler on this machine, connected over TCP as those of a cluster are, and beside them
local processes. Both tile the same synthetic slides; the tile tables must be equal byte for byte. A machine with
fewer cores than workers has no more slides per hour to give; `waiting_per_hour` is for slides that take a second of
waiting for storage and no processor, and shows what workers add by themselves.

The overhead is measured with a function that does nothing, `--take` slides of `--queued`: the others wait in the queue
all the while. Memory is what the engine's process has more than before, queue and all. Nothing leaves this machine.
Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from distributed import LocalCluster

from selfvitmil.commands.synth import synth
from selfvitmil.engine import Engine
from selfvitmil.settings import EngineSettings, SynthSettings
from selfvitmil.stages.tile import tile
from selfvitmil.study import CohortSource, Study, study_settings
from view import memory_mb


@contextmanager
def engine(kind: str, workers: int) -> Iterator[Engine]:
    """Workers of this machine, or of a scheduler on it."""
    if kind == "processes":
        with Engine(EngineSettings(workers=workers)) as made:
            yield made
        return
    options = {"dashboard_address": None, "worker_dashboard_address": None, "memory_limit": 0}
    cluster: Any = LocalCluster(n_workers=workers, threads_per_worker=1, host="127.0.0.1", **options)
    with cluster, Engine(EngineSettings(cluster=cluster.scheduler_address, insecure=True)) as made:
        yield made


def nothing(number: int) -> int:
    return number


def waiting(_: int) -> None:
    """A slide whose storage takes a second."""
    time.sleep(1.0)


def start(made: Engine, workers: int) -> None:
    """Wait until all workers have started."""
    for _ in made.map(nothing, {f"start{k}": k for k in range(20 * workers)}, stage="start"):
        pass


def tiled(folder: Path, made: Engine) -> tuple[float, dict[str, bytes]]:
    """Tile the cohort into a new study; return the seconds and the tables."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        study = Study(Path(name), study_settings(Path(name), {}), CohortSource(cohort=folder / "cohort.csv"))
        begin = time.perf_counter()
        tile(study, made)
        seconds = time.perf_counter() - begin
        return seconds, {path.name: path.read_bytes() for path in Path(name).glob("tiles/*/*.h5")}


def waiting_per_hour(made: Engine, workers: int) -> int:
    """Slides per hour where each takes a second without a processor; perfect would be 3,600 a worker."""
    items, begin = {f"slide_{k}": k for k in range(15 * workers)}, time.perf_counter()
    assert all(outcome.failure is None for outcome in made.map(waiting, items, stage="waiting"))
    return round(3600 * len(items) / (time.perf_counter() - begin))


def overhead(made: Engine, queued: int, take: int) -> dict[str, float]:
    """Seconds, processor time of this process and memory with a long queue."""
    before = memory_mb(os.getpid(), "VmRSS")
    items = {f"slide_{k:06d}": k for k in range(queued)}
    used, begin = time.process_time(), time.perf_counter()
    outcomes = made.map(nothing, items, stage="nothing")
    assert len(list(islice(outcomes, take))) == take
    seconds, cpu = time.perf_counter() - begin, time.process_time() - used
    grown = memory_mb(os.getpid(), "VmRSS") - before
    outcomes.close()  # type: ignore[attr-defined]
    return {
        "ms_per_slide": round(seconds / take * 1e3, 2),
        "cpu_ms_per_slide": round(cpu / take * 1e3, 2),
        "slides_per_s": round(take / seconds),
        "queue_mb": round(grown, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--slides", type=int, default=40)
    parser.add_argument("--size-px", type=int, default=2048)
    parser.add_argument("--queued", type=int, default=100_000)
    parser.add_argument("--take", type=int, default=3000)
    given = parser.parse_args()
    result: dict[str, Any] = {"benchmark": "cluster", "cores": os.cpu_count(), "slides": given.slides}
    result |= {"load_average": round(os.getloadavg()[0], 1), "queued": given.queued, "tiling": {}, "overhead": {}}
    with tempfile.TemporaryDirectory(prefix="selfvitmil-cluster-") as name:
        folder = Path(name)
        with Engine(EngineSettings()) as made:
            synth(folder, SynthSettings(slides=given.slides, size_px=given.size_px), made)
        first: dict[str, bytes] = {}
        for workers in given.workers:
            for kind in ("processes", "dask"):
                with engine(kind, workers) as made:
                    start(made, workers)
                    seconds, tables = tiled(folder, made)
                    first = first or tables
                    if tables != first or len(tables) != given.slides:
                        raise SystemExit(f"{kind}, {workers} workers: other tile tables")
                    key = f"{kind}, {workers}"
                    result["tiling"][key] = {
                        "seconds": round(seconds, 2),
                        "slides_per_hour": round(3600 * given.slides / seconds),
                        "waiting_per_hour": waiting_per_hour(made, workers),
                    }
                    result["overhead"][key] = overhead(made, given.queued, given.take)
                print(key, result["tiling"][key], result["overhead"][key], flush=True)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
