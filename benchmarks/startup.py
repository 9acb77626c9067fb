"""Seconds until the first line of output: `--help`, and commands that are about to work.

    python benchmarks/startup.py [--rounds 5]

Every round starts each command once as a process of its own; the best round counts. The commands are given a folder
without a cohort or a model without files, so that they end with an error after their imports. Ends with one JSON line:
`help_s`; `first_line_s`, the slowest command's first line; `seconds`, all of them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time

COMMANDS = {
    "help": ["--help"],
    "command_help": ["tile", "--help"],
    **{name: [name, "FOLDER"] for name in ("check", "tile", "pretrain", "train", "compare", "evaluate", "localize")},
    **{name: [name, "FOLDER"] for name in ("run", "plan", "status", "report")},
    "doctor": ["doctor"],
}


def first_line(arguments: list[str], folder: str) -> float:
    """Return the seconds from the start of the process to its first line."""
    command = [sys.executable, "-m", "selfvitmil", *(folder if each == "FOLDER" else each for each in arguments)]
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        seconds = time.perf_counter() - began
        process.communicate()
    assert line, command
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    best: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(rounds):
            for name, arguments in COMMANDS.items():
                best[name] = min(best.get(name, float("inf")), first_line(arguments, folder))
    for name, seconds in best.items():
        print(f"{name:<14}{seconds:6.2f} s")
    slowest = max(seconds for name, seconds in best.items() if name != "help")
    seconds = {name: round(value, 3) for name, value in best.items()}
    print(json.dumps({"help_s": seconds["help"], "first_line_s": round(slowest, 3), "seconds": seconds}))


if __name__ == "__main__":
    main()
