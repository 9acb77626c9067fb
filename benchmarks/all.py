"""Run every benchmark that fits this machine; write each one's figures, with machine and versions, to results/.

    python benchmarks/all.py [--only reading stain ...] [--limit 120] [--out benchmarks/results] [--list]

Each benchmark is a process of its own; the last line that it prints is its result. `<name>.json` is from a CPU,
`<name>_cuda.json` from a GPU. On a CPU the sizes are such that two cores need less than two minutes for each; what
takes longer than `--limit` seconds is stopped and leaves an older result as it was. Benchmarks of a GPU (`CUDA`) run
where there is one. Those that need data of yours, or hours, are named at the end and run by hand.

Figures of a busy machine are no figures: before each benchmark the script looks for two seconds at what others take of
the processors, and from a tenth of them on the result is marked `busy`. `docs/make_benchmarks_page.py` shows results
beside what is to be reached.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import selfvitmil

HERE = Path(__file__).parent
RESULTS = HERE / "results"

CPU: dict[str, list[str]] = {
    "reading": ["--rounds", "3"],
    "tiling": [],
    "stain": [],
    "aggregate": ["--rounds", "3"],
    "mil_epoch": [],
    "embed": ["--rounds", "2"],
    "embed_flow": [],
    "localize": [],
    "predict": ["--size-px", "3072", "--rounds", "2", "--devices", "cpu"],
    "startup": [],
    "view": [],
}
"""Benchmark -> its arguments on a CPU."""
CUDA: dict[str, list[str]] = {
    "pretrain": [],
    "embed": [],
    "mil_epoch": [],
    "aggregate": ["--large"],
    "predict": ["--devices", "cuda"],
    "turns": [],
}
CUDA_LIMIT_S = 600.0
BUSY = 0.1
BY_HAND = {
    "pretrain_quality": "needs labelled tiles and minutes of a GPU",
    "pretrain_budget": "needs labelled tiles of patients and a GPU",
    "pretrain_protocol": "many runs of pretrain_budget",
    "small_cohorts": "takes hours",
    "averaging": "takes an hour",
    "load": "takes hours with 10,000 slides",
    "cluster": "takes minutes",
    "evidence": "takes half an hour",
    "classical_mil": "needs the classical sets",
    "demo_seeds": "takes as long as five demos",
    "end_to_end": "takes minutes",
    "scaling": "takes a quarter of an hour, and writes its result itself",
    "jpeg2000": "needs a JPEG 2000 slide, and imagecodecs beside the locked packages",
}
PACKAGES = (
    "selfvitmil",
    "torch",
    "timm",
    "numpy",
    "openslide-python",
    "openslide-bin",
    "simplejpeg",
    "tifffile",
    "h5py",
)


def machine() -> dict[str, Any]:
    """What the figures depend on; nothing that names the machine."""
    import torch

    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), cpu)
    memory_gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    gpus = [torch.cuda.get_device_name(k) for k in range(torch.cuda.device_count())]
    return {"cpu": cpu, "cores": os.cpu_count(), "memory_gb": round(memory_gb), "gpus": gpus}


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "system": f"{platform.system()} {platform.machine()}"}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):  # a folder on PYTHONPATH
            found[name] = metadata.version(name)
    return {**found, "selfvitmil": selfvitmil.__version__}


def others_share(seconds: float = 2.0) -> float | None:
    """Share of all processors' time that others take while this process waits; None where the system does not say."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return None
    before = [int(word) for word in stat.read_text(encoding="utf-8").split()[1:9]]
    time.sleep(seconds)
    spent = [
        int(word) - start for word, start in zip(stat.read_text(encoding="utf-8").split()[1:9], before, strict=True)
    ]
    return 1.0 - (spent[3] + spent[4]) / max(sum(spent), 1)  # idle, and waiting for disks


def record_of(command: str, seconds: float, others: float | None, result: Any) -> dict[str, Any]:
    """A result with what it depends on, as the page of benchmarks reads it."""
    return {
        "command": command,
        "seconds": round(seconds, 1),
        "others_share": None if others is None else round(others, 2),
        "busy": others is None or others > BUSY,
        "machine": machine(),
        "versions": versions(),
        "result": result,
    }


def last_json(text: str) -> dict[str, Any] | None:
    """The result: the last line, when that is a JSON object."""
    lines = text.strip().splitlines()
    try:
        found = json.loads(lines[-1]) if lines else None
    except json.JSONDecodeError:
        return None
    return found if isinstance(found, dict) else None


def run_one(script: Path, arguments: list[str], limit_s: float) -> tuple[dict[str, Any] | None, str]:
    """The record of one benchmark, or None; and words on how it ended."""
    others, start = others_share(), time.perf_counter()
    try:
        done = subprocess.run(
            [sys.executable, str(script), *arguments], capture_output=True, text=True, timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired:
        return None, f"stopped after {limit_s:g} s"
    seconds = time.perf_counter() - start
    result = last_json(done.stdout)
    if done.returncode != 0 or result is None:
        said = (done.stderr.strip().splitlines() or ["it printed no result"])[-1]
        return None, f"failed: {said}"
    command = " ".join(["python", f"benchmarks/{script.name}", *arguments])
    record = record_of(command, seconds, others, result)
    return record, f"done in {seconds:.0f} s{', on a busy machine' if record['busy'] else ''}"


def jobs(only: list[str] | None, limit_s: float) -> list[tuple[str, Path, list[str], float]]:
    """(name of the result, script, arguments, seconds allowed) of all that this machine can run."""
    import torch

    found = [(name, HERE / f"{name}.py", arguments, limit_s) for name, arguments in CPU.items()]
    if torch.cuda.is_available():
        longer = max(limit_s, CUDA_LIMIT_S)
        found += [(f"{name}_cuda", HERE / f"{name}.py", arguments, longer) for name, arguments in CUDA.items()]
    return [job for job in found if only is None or job[0] in only or job[1].stem in only]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these benchmarks alone")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds that one may take on a CPU")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--list", action="store_true", help="only say what would be run")
    arguments = parser.parse_args()
    known = {*CPU, *CUDA, *(f"{name}_cuda" for name in CUDA)}
    if unknown := sorted(set(arguments.only or ()) - known):
        parser.error(f"no such benchmark: {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    chosen = jobs(arguments.only, arguments.limit)
    missing = 0
    for name, script, options, limit_s in chosen:
        if arguments.list:
            print(name, script.name, *options)
            continue
        print(f"{name} ...", end=" ", flush=True)
        record, words = run_one(script, options, limit_s)
        print(words, flush=True)
        if record is None:
            missing += 1
            continue
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if not arguments.only:
        for name, why in BY_HAND.items():
            print(f"not run: {name}, {why}")
        if not machine()["gpus"]:
            print(f"not run: {', '.join(f'{name}_cuda' for name in CUDA)}, no CUDA device")
    sys.exit(1 if missing else 0)


if __name__ == "__main__":
    main()
