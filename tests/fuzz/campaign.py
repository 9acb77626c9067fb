"""`python -m fuzz.campaign --number 100000`: damaged inputs for every parser, with counts of what came of them.

A finding prints the line that repeats it: `--target "tile tables" --only 1234`.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from fuzz.isolation import run_all
from fuzz.mutations import edits_of, mutate
from fuzz.targets import Target, make_targets


def fuzz(target: Target, numbers: list[int], place: Path, seed: int) -> tuple[Counter[str], dict[str, int]]:
    """Return how often each answer came, and the findings with the number of the first input of each."""
    place.mkdir(exist_ok=True)
    contents = [example.read_bytes() for example in target.examples]

    def call(name: str) -> str:
        number = int(name)
        which = number % len(contents)
        content = mutate(contents[which], edits_of(f"{seed} {target.name} {number}"))
        return target.try_bytes(content, target.examples[which], place)

    answers: Counter[str] = Counter()
    findings: dict[str, int] = {}
    for name, answer in run_all(call, map(str, numbers)):
        answers[answer.partition(":")[0] if answer.startswith("BAD") else answer] += 1
        if answer.startswith("BAD") and answer.partition(":")[0] not in {key.partition(":")[0] for key in findings}:
            findings[answer] = int(name)
    return answers, findings


def report(name: str, answers: Counter[str], findings: dict[str, int], seconds: float) -> int:
    """Print the counts of a parser; return how many inputs were neither read nor refused."""
    bad = sum(number for answer, number in answers.items() if answer.startswith("BAD"))
    total, read = answers.total(), answers["ok"]
    counts = f"{total:7} inputs: {read:7} read, {total - read - bad:7} refused, {bad:5} bad"
    print(f"{name:18} {counts}, {seconds:.0f} s", flush=True)
    for answer, number in findings.items():
        times = answers[answer.partition(":")[0]]
        print(f"    {times} x {answer}   [--target {name!r} --only {number}]", flush=True)
    return bad


def main() -> int:
    """Fuzz the targets that were asked for; return 1 where something was neither a result nor an error of ours."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--number", type=int, default=1000, help="inputs per parser")
    parser.add_argument("--target", action="append")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="one input, in this process, with its traceback")
    given = parser.parse_args()
    place = Path(tempfile.mkdtemp(prefix="selfvitmil-fuzz-"))
    bad = 0
    try:
        targets = make_targets(place)
        for name in given.target or targets:
            target = targets[name]
            if given.only is not None:
                which = given.only % len(target.examples)
                edits = edits_of(f"{given.seed} {name} {given.only}")
                print(edits)
                (place / "try").mkdir()
                content = mutate(target.examples[which].read_bytes(), edits)
                print(target.try_bytes(content, target.examples[which], place / "try"))
                continue
            begin = time.monotonic()
            answers, findings = fuzz(target, list(range(given.number)), place / "try", given.seed)
            bad += report(name, answers, findings, time.monotonic() - begin)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
