"""How seconds and memory of every stage grow with the number of slides: cohorts of tiny synthetic slides.

    python benchmarks/scaling.py [--slides 10 100 1000] [--size-px 1024] [--out benchmarks/results]
    python benchmarks/scaling.py --measured A/end_to_end.json B/end_to_end.json

Every cohort is a run of `end_to_end.py` in a process of its own: the demo's settings, two steps of pretraining, three
methods with two epochs and one seed, two workers. `--measured` takes runs that were made before. Seconds are processor
time of all processes, which other work on the machine changes little. The exponent of a stage is the slope of log
seconds (or megabytes) over log slides between two sizes: 1 is linear. Stages that take less than a second for the
larger cohort have no exponent of time: most of it is a constant. `--out` writes scaling.json there, for the page of
benchmarks. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

from all import RESULTS, others_share, record_of

LEAST_S = 1.0
FLAGS = {"--steps": 2, "--epochs": 2, "--seeds": 1, "--workers": 2}
METHODS = ("self-vit-mil", "abmil", "mean")


def measure(slides: int, size_px: int) -> dict[str, Any]:
    """Run the pipeline on a cohort of this size."""
    with tempfile.TemporaryDirectory() as folder:
        given = {"--slides": slides, "--size-px": size_px, **FLAGS, "--out": folder}
        flags = [str(word) for pair in given.items() for word in pair]
        script = str(Path(__file__).with_name("end_to_end.py"))
        command = [sys.executable, script, *flags, "--methods", *METHODS]
        subprocess.run(command, check=True, stdout=sys.stderr)
        return read_result(Path(folder) / "end_to_end.json")


def read_result(path: Path) -> dict[str, Any]:
    """What a run of `end_to_end.py` measured."""
    return json.loads(path.read_text(encoding="utf-8"))["result"]


def exponents(cohorts: list[dict[str, Any]], key: str) -> dict[str, list[float | None]]:
    """Stage -> slopes of log `key` over log slides, from each cohort to the next."""
    return {stage: [_slope(*pair, key, stage) for pair in pairwise(cohorts)] for stage in cohorts[-1][key]}


def _slope(small: dict[str, Any], large: dict[str, Any], key: str, stage: str) -> float | None:
    before, after = small[key].get(stage), large[key][stage]
    if not before or (key == "cpu_s" and after < LEAST_S):
        return None
    return round(math.log(after / before) / math.log(large["slides"] / small["slides"]), 2)


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--slides", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--size-px", type=int, default=1024, help="edge of a slide in level-0 pixels")
    parser.add_argument("--measured", type=Path, nargs="+", help="results of end_to_end.py to use instead")
    parser.add_argument("--out", type=Path, nargs="?", const=RESULTS, help="folder for scaling.json")
    arguments = parser.parse_args(given)
    others = others_share()
    if arguments.measured:
        cohorts = [read_result(path) for path in arguments.measured]
    else:
        cohorts = [measure(slides, arguments.size_px) for slides in arguments.slides]
    cohorts = sorted(
        ({key: each[key] for key in ("slides", "tiles", "seconds", "cpu_s", "peak_mb")} for each in cohorts),
        key=lambda each: each["slides"],
    )
    result = {
        "benchmark": "scaling",
        "cohorts": cohorts,
        "exponent_seconds": exponents(cohorts, "cpu_s"),
        "exponent_mb": exponents(cohorts, "peak_mb"),
    }
    if arguments.out is not None:
        seconds = sum(sum(each["seconds"].values()) for each in cohorts)
        record = record_of("python benchmarks/scaling.py --out", seconds, others, result)
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "scaling.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
