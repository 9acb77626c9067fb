"""A large cohort of tiny slides, some of them broken, from `check` to `evaluate` and the report; then many viewers.

    python benchmarks/load.py [--slides 10000] [--broken 30] [--workers 2] [--viewers 500] [--out FOLDER]
    python benchmarks/load.py --study FOLDER      # the viewers alone, on a study that --out kept

The cohort repeats 40 synthetic slides of 1024 px under many names (hard links), with a patient of its own for each.
Broken slides are cut short, empty or no slides at all. Every command runs in a process of its own; of each: seconds,
processor time, peak of the memory that processes allocate (command and workers together), and its exit status. The
peaks of two sizes of `--slides` say whether memory is flat.

Checks that every command ends, with status 3 where it met slides that fail, that failures.csv has one row for each
broken slide, that all others were embedded, and that a second run of `tile` does nothing.

A viewer takes the list of slides, then a new slide every ten seconds: what the slide is, and the tiles that fill a
window. Viewers come one after another within the first quarter of the time; all traffic stays on this machine.
Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from end_to_end import tree_mb
from view import Connection, cpu_s, memory_mb, wait_for

EDGE = 1024
DISTINCT = 40
SETTINGS = """
[tile]
mpp = 1.0
size_px = 224

[train]
seeds = 1
epochs = 2

[evaluate]
bootstrap = 200
"""
ENCODER = ("--encoder", "mean_color")
COMMANDS: dict[str, tuple[str, ...]] = {
    "check": ("--cohort", "{cohort}"),
    "tile": (),
    "tile again": (),
    "embed": ENCODER,
    "train": ENCODER,
    "evaluate": ENCODER,
    "report": (),
}
VIEWS_EVERY_S = 10.0
REACH = {"p95_s": 0.5, "errors": 1}


# ---------------------------------------------------------------------------------------------------- the cohort


def make_cohort(folder: Path, slides: int, broken: int, workers: int) -> Path:
    """Write the slides and their table; the broken ones are spread over it. Return the table."""
    run_command(
        ["synth", str(folder / "made"), "--slides", str(min(DISTINCT, slides)), "--size-px", str(EDGE)], workers
    )
    with (folder / "made" / "cohort.csv").open(newline="", encoding="utf-8") as file:
        made = list(csv.DictReader(file))
    (folder / "slides").mkdir()
    every = slides // broken if broken else slides + 1
    rng = random.Random(0)
    rows: list[tuple[str, ...]] = []
    for k in range(slides):
        source = made[k % len(made)]
        path = folder / "made" / source["path"]
        name = f"slide_{k:05d}{path.suffix}"
        if k % every == every - 1 and k // every < broken:
            content = (path.read_bytes()[: rng.randrange(9, 2000)], b"", b"<html>not found</html>")[k // every % 3]
            (folder / "slides" / name).write_bytes(content)
        else:
            os.link(path, folder / "slides" / name)
        side = ("train", "train", "train", "val", "test")[k // len(made) % 5] if slides > 5 * DISTINCT else ""
        rows.append((Path(name).stem, f"slides/{name}", source["label"], f"patient_{k:05d}", side or source["split"]))
    with (folder / "cohort.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("slide", "path", "label", "patient", "split"), *rows])
    return folder / "cohort.csv"


# ---------------------------------------------------------------------------------------------------- commands


def run_command(arguments: list[str], workers: int) -> dict[str, Any]:
    """Run a command; return its status, seconds, processor time, peak memory and the end of its output."""
    begin = time.perf_counter()
    command = [sys.executable, "-m", "selfvitmil", *arguments]
    command += [] if arguments[0] == "report" else ["--workers", str(workers)]
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        peak_mb, ended = 0.0, threading.Event()

        def look() -> None:
            nonlocal peak_mb
            while not ended.wait(0.2):
                peak_mb = max(peak_mb, tree_mb(process.pid))

        watch = threading.Thread(target=look, daemon=True)
        watch.start()
        _, status, used = os.wait4(process.pid, 0)
        ended.set()
        watch.join()
        output.seek(0)
        text = output.read().decode(errors="replace")
    code = os.waitstatus_to_exitcode(status)
    if "Traceback" in text or code not in (0, 3):
        sys.exit(f"{' '.join(arguments)}: status {code}\n{text[-3000:]}")
    return {
        "status": code,
        "seconds": round(time.perf_counter() - begin, 1),
        "cpu_s": round(used.ru_utime + used.ru_stime, 1),
        "peak_mb": round(peak_mb),
        "output": text,
    }


def run_study(study: Path, cohort: Path, slides: int, broken: int, workers: int, until: str) -> dict[str, Any]:
    """Run the commands; check what they left."""
    study.mkdir()
    (study / "study.toml").write_text(SETTINGS)
    stages: dict[str, dict[str, Any]] = {}
    for name, flags in COMMANDS.items():
        arguments = [name.split()[0], str(study), *(flag.format(cohort=cohort) for flag in flags)]
        stages[name] = run_command(arguments, workers)
        words = stages[name].pop("output")
        print(f"{name}: {stages[name]}\n    {words.strip().splitlines()[-1]}", flush=True)
        check_failures(study, broken, name)
        if name == until:
            break
    statuses = {stages[name]["status"] for name in ("check", "tile", "embed") if name in stages}
    embedded = len(list(study.glob("bags/*/features_*/*.h5")))
    if statuses != {3 if broken else 0} or ("embed" in stages and embedded != slides - broken):
        sys.exit(f"statuses {statuses}, {embedded} slides embedded")
    pages = {f"{path.name}_mb": round(path.stat().st_size / 1e6, 2) for path in study.glob("report/*.html")}
    return {
        "stages": stages,
        **pages,
        "cpu_ms_per_slide": {name: round(each["cpu_s"] / slides * 1e3, 1) for name, each in stages.items()},
    }


def check_failures(study: Path, broken: int, name: str) -> None:
    """Every broken slide has one row in failures.csv, that of its first failure."""
    with (study / "failures.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    if [row["stage"] for row in rows] != ["check"] * broken or len({row["slide"] for row in rows}) != broken:
        sys.exit(f"after {name}: failures.csv has {len(rows)} rows, not {broken}")


# ---------------------------------------------------------------------------------------------------- viewers


class Viewers:
    """What all viewers met."""

    def __init__(self, port: int, seconds: float, ids: list[str]):
        self.port, self.ids = port, ids
        self.until = time.monotonic() + seconds
        self.taken: dict[str, list[float]] = {"list": [], "slide": [], "tile": []}
        self.errors: Counter[str] = Counter()

    async def get(self, connection: Connection, kind: str, target: str) -> bytes:
        begin = time.perf_counter()
        try:
            return await connection.get(target)
        except (RuntimeError, OSError, asyncio.IncompleteReadError) as error:
            self.errors[f"{kind}: {type(error).__name__} {str(error)[:80]}"] += 1
            connection.streams = None
            return b""
        finally:
            self.taken[kind].append(time.perf_counter() - begin)

    async def one(self, number: int, wait_s: float) -> None:
        """One viewer: the list, then slide after slide."""
        rng = random.Random(number)
        await asyncio.sleep(wait_s)
        connection = Connection(self.port)
        await self.get(connection, "list", "/api/study.json")
        while time.monotonic() < self.until:
            id = rng.choice(self.ids)
            await self.get(connection, "slide", f"/api/slides/{id}.json")
            # A slide of 1024 px at level 10 has 5 x 5 tiles; a window shows the middle ones.
            for column, row in ((1, 1), (2, 1), (1, 2), (2, 2)):
                await self.get(connection, "tile", f"/api/slides/{id}/tiles/10/{column}_{row}.jpg")
            await asyncio.sleep(rng.uniform(0.5, 1.5) * VIEWS_EVERY_S)

    async def all(self, number: int, within_s: float) -> None:
        await asyncio.gather(*(self.one(k, within_s * k / number) for k in range(number)))


def view(study: Path, viewers: int, seconds: float) -> dict[str, Any]:
    """Start the viewer's command and look at the study from many sides."""
    command = [sys.executable, "-m", "selfvitmil", "view", str(study), "--no-browser", "--port", "0"]
    with tempfile.TemporaryFile("w+") as errors:
        begin = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            assert process.stdout is not None
            port = next(int(found[1]) for line in process.stdout if (found := re.search(r"http://[^:]+:(\d+)", line)))
            asyncio.run(wait_for(port))
            listed = json.loads(asyncio.run(Connection(port).get("/api/study.json")))["slides"]
            first_list_s = time.perf_counter() - begin
            before = memory_mb(process.pid, "VmRSS")
            met = Viewers(port, seconds, [row["id"] for row in listed if row["status"] == "ok"])
            asyncio.run(met.all(viewers, seconds / 4))
            used, growth = cpu_s(process.pid), memory_mb(process.pid, "VmHWM") - before
        finally:
            process.terminate()
            process.wait()
        errors.seek(0)
        if "Traceback" in (text := errors.read()):
            sys.exit(text[-3000:])
    for error, number in met.errors.most_common():
        print(f"{number} x {error}", flush=True)
    every = [each for kind in met.taken.values() for each in kind]
    return {
        "viewers": viewers,
        "requests": len(every),
        "errors": met.errors.total(),
        "first_list_s": round(first_list_s, 2),
        "p50_s": round(float(np.quantile(every, 0.5)), 3),
        "p95_s": round(float(np.quantile(every, 0.95)), 3),
        "p95_s_of": {kind: round(float(np.quantile(taken, 0.95)), 3) for kind, taken in met.taken.items() if taken},
        "cpu_ms_per_request": round(used / len(every) * 1e3, 2),
        "growth_mb": round(growth),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--slides", type=int, default=10_000)
    parser.add_argument("--broken", type=int, default=30)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--until", choices=list(COMMANDS), default="report", help="the last command")
    parser.add_argument("--viewers", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long the viewers look")
    parser.add_argument("--out", type=Path, help="folder to keep slides and study in")
    parser.add_argument("--study", type=Path, help="a study that is there already: the viewers alone")
    given = parser.parse_args()
    result: dict[str, Any] = {"benchmark": "load", "slides": given.slides, "broken": given.broken}
    result |= {"workers": given.workers, "cores": os.cpu_count(), "load_average": round(os.getloadavg()[0], 1)}
    folder = given.out or Path(tempfile.mkdtemp(prefix="selfvitmil-load-"))
    try:
        study = given.study
        if study is None:
            folder.mkdir(parents=True, exist_ok=True)
            study = folder / "study"
            cohort = make_cohort(folder, given.slides, given.broken, given.workers)
            result |= run_study(study, cohort, given.slides, given.broken, given.workers, given.until)
        if given.viewers:
            result["view"] = view(study, given.viewers, given.seconds)
            for key, reach in REACH.items():
                print(f"{key}: {result['view'][key]} (reach: < {reach})")
    finally:
        if given.out is None:
            shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
