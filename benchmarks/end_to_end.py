"""Slides to report on a synthetic cohort: seconds and peak memory of every stage; and how they grow with the cohort.

    python benchmarks/end_to_end.py [--slides 140] [--size-px 2048] [--workers 2] [--steps 20] [--epochs 10] [--seeds 3]
    python benchmarks/end_to_end.py --scaling 10 100 1000 --size-px 1024 --steps 2 --epochs 2 --seeds 1

Settings are those of `selfvitmil demo`, with a short pretraining: what is measured is everything else. Writing the
slides is timed as `synth` and belongs to no sum. Memory is what processes allocate (resident pages that belong to no
file), of the command and its workers together, looked at ten times a second; mapped feature files do not count.

With `--scaling` every cohort is a process of its own. The exponent of a stage is the slope of log seconds (or bytes)
over log slides between the smallest and the largest cohort, of what it takes beyond the smallest: 1 is linear.
Checks that every stage ended without a failure and that the page has a section for each slide it should. Ends with one
JSON line.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from selfvitmil.commands.demo import start_demo
from selfvitmil.commands.run import Request, RunResult, run
from selfvitmil.commands.synth import synth
from selfvitmil.engine import Engine
from selfvitmil.settings import SynthSettings
from selfvitmil.stages.report import ReportResult
from selfvitmil.study import CohortSource, Study, study_settings

LOOK_EVERY_S = 0.1
LEAST_S = 1.0
"""Stages that take less for the largest cohort have no exponent of time: most of it is a constant."""


class Memory(threading.Thread):
    """Looks at the memory of this process and its children until it is stopped."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak_mb = 0.0
        self._stopped = threading.Event()

    def run(self) -> None:
        while not self._stopped.wait(LOOK_EVERY_S):
            self.peak_mb = max(self.peak_mb, tree_mb(os.getpid()))

    def stop(self) -> None:
        self._stopped.set()
        self.join()

    def take(self) -> float:
        """The peak since the last call."""
        peak, self.peak_mb = max(self.peak_mb, tree_mb(os.getpid())), 0.0
        return peak


def tree_mb(pid: int) -> float:
    """Anonymous memory of a process and all its children; 0 for one that has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
        children = [
            int(child)
            for task in Path(f"/proc/{pid}/task").iterdir()
            for child in (task / "children").read_text(encoding="utf-8").split()
        ]
    except OSError:
        return 0.0
    own = next((int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon")), 0)
    return own / 1024 + sum(map(tree_mb, children))


def measure(root: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run all stages of a new study; seconds and peak memory of each."""
    start_demo(root)
    flags = {
        "pretrain": {"steps": arguments.steps, "warmup_steps": 1},
        "train": {"epochs": arguments.epochs, "seeds": arguments.seeds},
        "compare": {"random_encoder": False, "mean_color": False, "supervised": "none"},
        "engine": {"workers": arguments.workers},
    }
    settings = study_settings(root, flags)
    seconds: dict[str, float] = {}
    peak_mb: dict[str, float] = {}
    page: ReportResult | None = None
    memory = Memory()
    memory.start()
    with Engine(settings.engine) as engine:
        begin = time.perf_counter()
        synth(root / "slides", SynthSettings(slides=arguments.slides, size_px=arguments.size_px), engine)
        seconds["synth"], peak_mb["synth"] = time.perf_counter() - begin, memory.take()
        study = Study(root, settings, CohortSource(cohort=root / "slides" / "cohort.csv"))
        for result in run(study, Request(name="demo"), engine):
            if result.failures:
                sys.exit(f"failed: {result.failures[0]}")
            page = result if isinstance(result, ReportResult) else page
            name = type(result).__name__.removesuffix("Result").lower()
            if isinstance(result, RunResult):
                seconds |= {stage: report.seconds or 0.0 for stage, report in result.stages.items()}
            peak_mb[name] = memory.take()
    memory.stop()
    if page is None or page.num_sections != min(page.most_slides, page.num_with_heatmap):
        sys.exit("the report lacks slides")
    return {
        "slides": arguments.slides,
        "seconds": {stage: round(value, 2) for stage, value in seconds.items()},
        "peak_mb": {stage: round(peak_mb[stage]) for stage in seconds if stage in peak_mb},
        "seconds_without_pretraining": round(
            sum(value for stage, value in seconds.items() if stage not in ("synth", "pretrain")), 2
        ),
        "report_mb": round(page.size_bytes / 1e6, 2),
        "report_sections": page.num_sections,
    }


def exponents(cohorts: list[dict[str, Any]], key: str) -> dict[str, float]:
    """Stage -> slope of log `key` over log slides, between the smallest cohort and the largest."""
    first, last = cohorts[0], cohorts[-1]
    span = math.log(last["slides"] / first["slides"])
    return {
        stage: round(math.log(value / max(first[key][stage], 0.1)) / span, 2)
        for stage, value in last[key].items()
        if first[key].get(stage) and (key != "seconds" or value >= LEAST_S)
    }


def scaling(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure cohorts of several sizes, each in a process of its own."""
    cohorts: list[dict[str, Any]] = []
    for slides in sorted(arguments.scaling):
        command = [sys.executable, __file__, "--slides", str(slides)]
        for name in ("size_px", "workers", "steps", "epochs", "seeds"):
            command += [f"--{name.replace('_', '-')}", str(getattr(arguments, name))]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        cohorts.append(json.loads(done.stdout.splitlines()[-1]))
        print(json.dumps(cohorts[-1]), flush=True)
    return {
        "benchmark": "end_to_end",
        "size_px": arguments.size_px,
        "workers": arguments.workers,
        "cohorts": cohorts,
        "exponent_seconds": exponents(cohorts, "seconds"),
        "exponent_mb": exponents(cohorts, "peak_mb"),
    }


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--slides", type=int, default=140)
    parser.add_argument("--size-px", type=int, default=2048, help="edge of a slide in level-0 pixels")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes; 0 works in this one")
    parser.add_argument("--steps", type=int, default=20, help="of pretraining")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--scaling", type=int, nargs="+", metavar="SLIDES", help="cohorts of these sizes")
    parser.add_argument("--folder", type=Path, help="where to keep the study; by default it is thrown away")
    arguments = parser.parse_args(given)
    if arguments.scaling:
        print(json.dumps(scaling(arguments)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        told = measure(arguments.folder or Path(temporary) / "study", arguments)
    for stage, value in told["seconds"].items():
        print(f"{stage}: {value:.1f} s, {told['peak_mb'].get(stage, 0):,} MB")
    print(json.dumps({"benchmark": "end_to_end", **told}))


if __name__ == "__main__":
    main()
