"""The protocol that the default of pretraining is chosen by: sets x configurations x seeds x budgets, as time allows.

    python benchmarks/pretrain_protocol.py --root FOLDER --out RESULTS.jsonl --minutes 9 [--jobs 3] [--mps]
    python benchmarks/pretrain_protocol.py --root FOLDER --out RESULTS.jsonl --table     # print the table for the docs
    python benchmarks/pretrain_protocol.py --root FOLDER --out RESULTS.jsonl --plan      # what is left, and how long

FOLDER/lunghist700 and FOLDER/breakhis hold the tiles (see tile_cohorts.py). Every run is one of `pretrain_budget.py`,
whose measures it has; all budgets of a set, configuration and seed come from one run where the schedule is constant.
Budget 1 is `--steps` steps of the preset; a configuration with another batch sees as many tiles.

Runs are ordered by what they tell: the preset with all seeds on all sets, then the other configurations with one seed,
then with the other seeds. `--jobs` processes share a GPU, each does one run after the other, so that it compiles once;
`--mps` lets their kernels run side by side (NVIDIA's Multi-Process Service, started and ended here).

Results are appended as soon as an encoder is assessed, and what stands in the file is not done again: call it as often
as needed. A run is begun only where it is expected to end within `--minutes`. What a run takes is estimated at first,
then corrected by the runs that ended. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from pretrain_budget import (
    Benchmark,
    find,
    one_run_serves_all,
    parse_arguments,
    read_results,
    settings_from,
    summarize,
)

CONFIGURATIONS: dict[str, list[str]] = {
    "preset": [],
    "batch 512, rate x 1.4": ["batch=512", "lr=3.5e-4"],  # lr is for a batch of 256 and scaled in proportion
    "batch 512, rate x 2": ["batch=512"],
    "rate 2.5e-4": ["lr=2.5e-4"],
    "stronger stains": ["stain_jitter=1.0", "stain_scale=0.4", "stain_shift=0.1"],
    "stain shift 0.8": ["stain_jitter=1.0", "stain_shift=0.8"],  # near sigma 0.06 of log / log(1e-6), as published
    "last fifth decays": ["decay_share=0.2"],
    "dino, koleo": ['method="dino"', "koleo=0.1"],
    "simdino": ['method="simdino"'],
    "resnet18": ['architecture="resnet18"'],
    "conv stem": ['architecture="vit_small_patch16_convstem_224"'],
    "momentum 0.998": ["momentum=0.998"],
}
"""Settings over those of the preset, by name, the most promising first."""
SETS = ("lunghist700", "breakhis")
TABLE = ("tile_auc_knn", "tile_auc_linear", "auc_mean", "auc_self-vit-mil", "froc_self-vit-mil", "hits_self-vit-mil")
START_S = {"cuda": 40.0, "cpu": 15.0}
"""Guess of what a run takes before its first step and after its last."""
ASSESS_S = {"cuda": 12.0, "cpu": 60.0}
"""Guess of what assessing an encoder takes."""
PACE = {"cuda": 9_000.0, "cpu": 60.0}
"""Guess of the tiles per second of all jobs together."""


@dataclass(frozen=True)
class Run:
    """One training, and the encoders that come from it."""

    name: str
    """Of the configuration."""
    given: tuple[str, ...]
    """Arguments of pretrain_budget.py."""
    seed: int
    budgets: tuple[int, ...]
    """Those that are not done yet."""

    @property
    def arguments(self) -> argparse.Namespace:
        return parse_arguments(self.given)

    def tiles(self) -> int:
        """Tiles that have to be trained on."""
        arguments = self.arguments
        settings = settings_from(arguments, 1, self.seed)
        budgets = max(self.budgets) if one_run_serves_all(settings) else sum(self.budgets)
        return budgets * arguments.steps * settings.batch

    def __str__(self) -> str:
        return f"{self.name}, {self.arguments.data.name}, seed {self.seed}, budgets {' '.join(map(str, self.budgets))}"


def runs_of(own: argparse.Namespace) -> list[Run]:
    """All runs of the protocol, the most telling first, with what is still to be done of each."""
    names = [name for name in CONFIGURATIONS if own.only is None or name in own.only]
    first, *others = own.seeds
    order = [(name, seed) for name in names[:1] for seed in own.seeds]
    order += [(name, first) for name in names[1:]] + [(name, seed) for seed in others for name in names[1:]]
    results = read_results(own.out)
    runs: list[Run] = []
    for name, seed in order:
        for data in own.sets:
            given = arguments_of(own, name, data, seed)
            arguments = parse_arguments(given)
            wanted = [0] * (name == names[0]) + own.budgets
            missing = tuple(budget for budget in wanted if find(results, arguments, budget, seed) is None)
            runs.append(Run(name, given, seed, missing))
    return runs


def arguments_of(own: argparse.Namespace, name: str, data: str, seed: int) -> tuple[str, ...]:
    """Return the arguments of pretrain_budget.py for one run."""
    rest = ["--preset", own.preset, "--seeds", str(seed), "--device", own.device, "--out", str(own.out), *own.more]

    def with_changes(changes: Sequence[str], steps: int) -> list[str]:
        words = [word for change in (*own.set, *changes) for word in ("--set", change)]
        return ["--data", str(own.root / data), "--steps", str(steps), *rest, *words]

    batches = [
        settings_from(parse_arguments(with_changes(changes, 1)), 1, seed).batch
        for changes in ([], CONFIGURATIONS[name])
    ]
    return tuple(with_changes(CONFIGURATIONS[name], max(own.steps * batches[0] // batches[1], 1)))


# ---------------------------------------------------------------------------------------------------- doing them


def do_run(run: Run) -> float:
    """Train and assess in a process of its own; return its seconds."""
    start = time.perf_counter()
    torch.set_num_threads(max((os.cpu_count() or 1) // max(int(os.environ.get("PROTOCOL_JOBS", "1")), 1), 1))
    for line in Benchmark(run.arguments).run(run.budgets, run.seed):
        shown = {name: round(value, 3) for name, value in line.items() if name.startswith(("tile_auc_", "auc_"))}
        print(f"{run.name}, {line['data']}, seed {line['seed']}, {line['steps']} steps: {shown}", flush=True)
    return time.perf_counter() - start


class Estimate:
    """What a run takes, corrected by those that ended."""

    def __init__(self, device: str, jobs: int):
        self.device, self.jobs = device, jobs
        self.ratios: list[float] = []

    def guess(self, run: Run) -> float:
        spent = START_S[self.device] + ASSESS_S[self.device] * len(run.budgets)
        return spent + run.tiles() * self.jobs / PACE[self.device]

    def seconds(self, run: Run) -> float:
        """Seconds of the run beside the other jobs; a fifth more than the longest so far would say."""
        return self.guess(run) * (1.2 * max(self.ratios) if self.ratios else 1.0)

    def add(self, run: Run, seconds: float) -> None:
        self.ratios.append(seconds / self.guess(run))


def do_all(runs: Sequence[Run], own: argparse.Namespace) -> dict[str, Any]:
    """Do what fits into the time; return how many encoders were asked for, done and left."""
    end = time.monotonic() + own.minutes * 60
    estimate, failed = Estimate(own.device, own.jobs), 0
    waiting, going = list(runs), dict[Future[float], Run]()
    os.environ["PROTOCOL_JOBS"] = str(own.jobs)
    with ProcessPoolExecutor(own.jobs, mp_context=get_context("spawn")) as pool:
        while True:
            while len(going) < own.jobs:
                left = end - time.monotonic()
                fitting = next((run for run in waiting if estimate.seconds(run) <= left), None)
                if fitting is None:
                    break
                waiting.remove(fitting)
                print(f"begun: {fitting}; about {estimate.seconds(fitting):.0f} of {left:.0f} s", flush=True)
                going[pool.submit(do_run, fitting)] = fitting
            if not going:
                break
            for future in wait(going, return_when=FIRST_COMPLETED).done:
                run = going.pop(future)
                error = future.exception()
                if error is None:
                    estimate.add(run, future.result())
                else:
                    failed += 1
                    print(f"failed: {run}: {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)
    return {"failed": failed, "left": len(waiting)}


@contextmanager
def multi_process_service(wanted: bool) -> Iterator[None]:
    """Let several processes run kernels on a GPU at the same time within the block, where that can be started."""
    control = shutil.which("nvidia-cuda-mps-control")
    if not wanted or control is None:
        if wanted:
            print("nvidia-cuda-mps-control is not installed: processes take turns on the GPU", flush=True)
        yield
        return
    with tempfile.TemporaryDirectory() as folder:
        places = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        os.environ |= places
        subprocess.run([control, "-d"], check=False)
        try:
            yield
        finally:
            subprocess.run([control], input="quit\n", text=True, check=False, timeout=30)
            for name in places:
                del os.environ[name]


# ---------------------------------------------------------------------------------------------------- the table


def table(own: argparse.Namespace) -> str:
    """Return the results as a table in Markdown: means and standard deviations over seeds, and what gets worse."""
    results = read_results(own.out)
    rows: list[str] = []
    verdicts: list[str] = []
    for data in own.sets:
        for name in CONFIGURATIONS:
            found = [
                line
                for seed in own.seeds
                for budget in (0, *own.budgets)
                if (line := find(results, parse_arguments(arguments_of(own, name, data, seed)), budget, seed))
            ]
            if found:
                rows += _rows(name, data, found)
                falls = summarize(found)["falls"]
                verdicts += [
                    f"* {name}, {data}: worse than half of it by more than the spread: {', '.join(falls)}."
                ] * (len(falls) > 0)
    measures = [name.replace("_", " ") for name in TABLE]
    head = ["set", "configuration", "steps", "seeds", "quality", *measures]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|", *rows, ""]
    return "\n".join(lines + (verdicts or ["No budget is worse than half of it by more than the spread over seeds."]))


def _rows(name: str, data: str, found: Sequence[Mapping[str, Any]]) -> list[str]:
    rows: list[str] = []
    for budget in sorted({line["budget"] for line in found}):
        lines = [line for line in found if line["budget"] == budget]
        cells = [_mean_sd([line[measure] for line in lines if measure in line]) for measure in ("quality", *TABLE)]
        label = name if budget else "untrained"
        rows.append(f"| {data} | {label} | {lines[0]['steps']:,} | {len(lines)} | {' | '.join(cells)} |")
    return rows


def _mean_sd(values: Sequence[float]) -> str:
    if not values:
        return ""
    spread = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.3f}{spread}"


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--root", type=Path, required=True, help="the folder that holds the sets")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=9.0, help="time of this call")
    parser.add_argument("--sets", nargs="+", default=list(SETS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--budgets", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--steps", type=int, default=500, help="steps of budget 1 of the preset")
    parser.add_argument("--preset", default="quick")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting for all runs")
    parser.add_argument("--only", nargs="+", choices=list(CONFIGURATIONS), help="only these configurations")
    parser.add_argument("--jobs", type=int, default=3 if device == "cuda" else 1, help="runs at the same time")
    parser.add_argument("--mps", action="store_true", help="let their kernels run side by side on a GPU")
    parser.add_argument("--device", default=device, choices=("cuda", "cpu"))
    parser.add_argument("--plan", action="store_true", help="only say what is left and how long it takes")
    parser.add_argument("--table", action="store_true", help="only print the table")
    own, own.more = parser.parse_known_args(given)  # the rest is for pretrain_budget.py: --downscale 2 for instance
    return own


def main(given: Sequence[str] | None = None) -> None:
    own = parse(given)
    if own.table:
        print(table(own))
        return
    runs = [run for run in runs_of(own) if run.budgets]
    estimate = Estimate(own.device, own.jobs)
    total = sum(estimate.guess(run) for run in runs) / own.jobs
    print(f"{len(runs)} runs are left, about {total / 60:.0f} minutes with {own.jobs} at a time", flush=True)
    if own.plan:
        for run in runs:
            print(f"{estimate.guess(run):6.0f} s  {run}")
        return
    with multi_process_service(own.mps):
        print(json.dumps(do_all(runs, own)), flush=True)


if __name__ == "__main__":
    main()
