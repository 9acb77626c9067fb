"""Slides to report on a synthetic cohort: seconds and peak memory of every stage.

    python benchmarks/end_to_end.py [--slides 140] [--size-px 2048] [--workers 2] [--steps 20] [--epochs 10] [--seeds 3]
    python benchmarks/end_to_end.py --preset quick --size-px 5376 --steps 60 --out results

Settings are those of `selfvitmil demo`, or of a preset for a GPU, with a short pretraining: what is measured is
everything else. Writing the slides is timed as `synth` and belongs to no sum. Memory is what processes allocate
(resident pages that belong to no file), of the command and its workers together, looked at ten times a second; mapped
feature files do not count.

`cpu_s` is the processor time of the command and its workers: of use where other work slows the machine down. `--out`
writes `end_to_end.json` (on a GPU `end_to_end_cuda.json`) into a folder after every stage, as the page of benchmarks
reads it, with the memory on the GPU and with where the main thread was: the functions in which most looks found it (the
innermost of this package, and the innermost of all).

Checks that every stage ended without a failure and that the page has a section for each slide it should. Ends with one
JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

from all import machine, others_share, record_of
from selfvitmil.commands.demo import start_demo
from selfvitmil.commands.run import Request, RunStart, run
from selfvitmil.commands.synth import synth
from selfvitmil.engine import Engine
from selfvitmil.errors import SelfVitMilError
from selfvitmil.settings import StudySettings, SynthSettings
from selfvitmil.stages.base import StageResult
from selfvitmil.stages.compare import CompareResult
from selfvitmil.stages.embed import EmbedResult
from selfvitmil.stages.pretrain import SplitResult
from selfvitmil.stages.report import ReportResult
from selfvitmil.study import CohortSource, Study, study_settings

LOOK_EVERY_S = 0.1
MOST_PLACES = 12
"""Functions that are told of a stage."""


class Watch(threading.Thread):
    """Looks at the memory of this process and its children, and at its main thread, until it is stopped."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak_mb = 0.0
        self.places: Counter[str] = Counter()
        self._stopped = threading.Event()

    def run(self) -> None:
        while not self._stopped.wait(LOOK_EVERY_S):
            self.peak_mb = max(self.peak_mb, tree_mb(os.getpid()))
            self.places[place_of(sys._current_frames().get(threading.main_thread().ident or 0))] += 1

    def __enter__(self) -> Watch:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopped.set()
        self.join()

    def take(self) -> tuple[float, dict[str, float]]:
        """The peak since the last call, and the share of the looks that found each place."""
        peak, self.peak_mb = max(self.peak_mb, tree_mb(os.getpid())), 0.0
        places, self.places = self.places, Counter()
        number = max(places.total(), 1)
        return peak, {place: round(count / number, 3) for place, count in places.most_common(MOST_PLACES)}


def place_of(frame: FrameType | None) -> str:
    """The innermost function of this package, and the innermost of all."""
    inner = "" if frame is None else frame.f_code.co_qualname
    while frame is not None and not frame.f_globals.get("__name__", "").startswith("selfvitmil."):
        frame = frame.f_back
    if frame is None:
        return inner
    own = f"{frame.f_globals['__name__'].removeprefix('selfvitmil.')}.{frame.f_code.co_qualname}:{frame.f_lineno}"
    return own if own.split(":")[0].endswith(inner) else f"{own} > {inner}"


def tree_mb(pid: int) -> float:
    """Anonymous memory of a process and all its children; 0 for one that has ended.

    Proportional: a child that has just been forked shares all of its parent's memory, which counts once.
    """
    try:
        status = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8")
        children = [
            int(child)
            for task in Path(f"/proc/{pid}/task").iterdir()
            for child in (task / "children").read_text(encoding="utf-8").split()
        ]
    except OSError:
        return 0.0
    own = next((int(line.split()[1]) for line in status.splitlines() if line.startswith("Pss_Anon")), 0)
    return own / 1024 + sum(map(tree_mb, children))


def tree_cpu_s(pid: int) -> float:
    """Processor time of a process, its children and those that have ended."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        children = [
            int(child)
            for task in Path(f"/proc/{pid}/task").iterdir()
            for child in (task / "children").read_text(encoding="utf-8").split()
        ]
    except OSError:
        return 0.0
    return sum(map(int, words[11:15])) / os.sysconf("SC_CLK_TCK") + sum(map(tree_cpu_s, children))


def measure(root: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run all stages of a new study; seconds and peak memory of each."""
    settings = settings_of(root, arguments)
    told: dict[str, Any] = {"slides": arguments.slides}
    told |= {key: {} for key in ("seconds", "cpu_s", "peak_mb", "gpu_mb", "places")}
    told["others_share"] = others_share()
    page: ReportResult | None = None
    watch = Watch()

    def note(name: str, seconds: float) -> None:
        told["seconds"][name] = round(seconds, 2)
        told["cpu_s"][name] = round(tree_cpu_s(os.getpid()) - sum(told["cpu_s"].values()), 2)
        peak_mb, told["places"][name] = watch.take()
        told["peak_mb"][name] = round(peak_mb)
        if on_gpu := gpu_mb():
            told["gpu_mb"][name] = round(on_gpu)
        print(f"{name}: {seconds:.1f} s, {peak_mb:,.0f} MB", flush=True)
        save(told, arguments.out)

    with watch, Engine(settings.engine) as engine:
        begin = time.perf_counter()
        synth(root / "slides", SynthSettings(slides=arguments.slides, size_px=arguments.size_px), engine)
        note("synth", time.perf_counter() - begin)
        study = Study(root, settings, CohortSource(cohort=root / "slides" / "cohort.csv"))
        begin = time.perf_counter()
        for result in run(study, Request(name="demo"), engine):
            if result.failures:
                sys.exit(f"failed: {result.failures[0]}")
            name = type(result).__name__.removesuffix("Result").lower()
            if isinstance(result, RunStart):
                note("start", time.perf_counter() - begin)
            if type(result).__module__.startswith("selfvitmil.stages.") and not isinstance(result, SplitResult):
                note(name, time.perf_counter() - begin)
            begin = time.perf_counter()
            told |= details_of(result)
            page = result if isinstance(result, ReportResult) else page
    if page is None or page.num_sections != min(page.most_slides, page.num_with_heatmap):
        sys.exit("the report lacks slides")
    rest = (value for stage, value in told["seconds"].items() if stage not in ("synth", "pretrain"))
    told |= {"seconds_without_pretraining": round(sum(rest), 2)}
    save(told, arguments.out)
    return told


def settings_of(root: Path, arguments: argparse.Namespace) -> StudySettings:
    """The settings of the demo, or of the preset, with what the flags say."""
    flags: dict[str, Any] = {
        "pretrain": {"steps": arguments.steps, "warmup_steps": 1},
        "train": {"seeds": arguments.seeds} | ({} if arguments.epochs is None else {"epochs": arguments.epochs}),
        "compare": {
            "random_encoder": False,
            "mean_color": False,
            "supervised": "none",
            "methods": arguments.methods or (),
        },
        "engine": {} if arguments.workers is None else {"workers": arguments.workers},
    }
    if arguments.preset == "demo":
        start_demo(root)
    else:
        flags["preset"] = arguments.preset
    return study_settings(root, flags)


def details_of(result: StageResult) -> dict[str, Any]:
    """What a stage tells of itself beyond its time."""
    if isinstance(result, EmbedResult):
        slides = [slide for each in result.features for slide in each.slides.values()]
        shares = [slide.wait_share for slide in slides]
        return {"tiles": sum(slide.num_tiles for slide in slides), "wait_share": round(sum(shares) / len(shares), 3)}
    if isinstance(result, CompareResult):
        return {"training_s": {row.display_name: row.training_seconds for row in result.table}}
    if isinstance(result, ReportResult):
        return {"report_mb": round(result.size_bytes / 1e6, 2), "report_sections": result.num_sections}
    return {}


def gpu_mb() -> float:
    """Most memory that this process has had on the GPU since the last call; 0 without one."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return 0.0
    peak = torch.cuda.max_memory_allocated() / 1e6
    torch.cuda.reset_peak_memory_stats()
    return peak


def save(told: dict[str, Any], folder: Path | None) -> None:
    """Write what was measured so far."""
    if folder is None or "torch" not in sys.modules:  # whose import is part of what is measured
        return
    folder.mkdir(parents=True, exist_ok=True)
    name = "end_to_end_cuda.json" if machine()["gpus"] else "end_to_end.json"
    command = " ".join(["python benchmarks/end_to_end.py", *sys.argv[1:]])
    record = record_of(command, sum(told["seconds"].values()), told["others_share"], told)
    (folder / name).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--preset", choices=("demo", "quick", "default"), default="demo")
    parser.add_argument("--slides", type=int, default=140)
    parser.add_argument("--size-px", type=int, default=2048, help="edge of a slide in level-0 pixels")
    parser.add_argument("--workers", type=int, help="processes; 0 works in this one; by default one per core")
    parser.add_argument("--steps", type=int, default=20, help="of pretraining")
    parser.add_argument("--epochs", type=int, help="of every training, at most; by default as recipes say")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--methods", nargs="+", help="rows of the comparison; by default all")
    parser.add_argument("--folder", type=Path, help="where to keep the study; by default it is thrown away")
    parser.add_argument("--out", type=Path, help="folder for end_to_end.json")
    arguments = parser.parse_args(given)
    with tempfile.TemporaryDirectory() as temporary:
        try:
            told = measure(arguments.folder or Path(temporary) / "study", arguments)
        except SelfVitMilError as error:  # too few slides for a split, for instance
            sys.exit(f"{arguments.slides} slides: {error}")
    del told["places"]
    print(json.dumps({"benchmark": "end_to_end", **told}))


if __name__ == "__main__":
    main()
