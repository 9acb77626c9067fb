"""`python -m faults.campaign`: the whole campaign, with the counts of what was tried and what came of it.

A failure prints the line that repeats it alone: `--part io --only tile:17:28:1`.
"""

from __future__ import annotations

import argparse
import errno
import os
import random
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from faults import damage, shim
from faults.children import Done, run_command, scratch
from faults.miniature import NAMES, STAGES, Miniature, differences
from faults.recovery import Tally, after_rerun, tail

T = TypeVar("T")


# ---------------------------------------------------------------------------------------------------- I/O faults


@dataclass(frozen=True)
class IoFault:
    """The n-th call of a stage fails, once or from then on."""

    stage: int
    at: int
    kind: int
    lasting: bool
    crash: bool = False

    def __str__(self) -> str:
        kind = "crash" if self.crash else self.kind
        return f"{NAMES[self.stage]}:{self.at}:{kind}:{int(self.lasting)}"

    @classmethod
    def parse(cls, text: str) -> IoFault:
        """Return the fault that `str` gave."""
        stage, at, kind, lasting = text.split(":")
        crash = kind == "crash"
        return cls(NAMES.index(stage), int(at), 0 if crash else int(kind), lasting == "1", crash)


def try_io_fault(mini: Miniature, fault: IoFault, name: str = "io") -> tuple[bool, list[str]]:
    """Return whether the fault fired, and what was wrong."""
    work = mini.copy(fault.stage, name)
    report = mini.place / f"{name}.report"
    report.unlink(missing_ok=True)
    layer = shim.Shim(
        (work, mini.place / "made"), fault.at, fault.kind, fault.lasting, crash=fault.crash, report=report
    )
    done = run_with(layer, STAGES[fault.stage].command(work))
    fired = bool(layer_report(report)[1])
    problems = []
    if not done.is_clean and not (fault.crash and done.status == 137):
        problems.append(f"not an error of ours (status {done.status}): {tail(done)}")
    if fired:
        problems += after_rerun(mini, fault.stage, work)
    return fired, [f"{layer_report(report)[2]}: {each}" for each in problems]


def run_with(layer: shim.Shim, command: list[str]) -> Done:
    """Run a command above the layer; what happened is in the layer's report."""

    def prepare() -> None:
        shim.install(layer)
        leave = os._exit

        def close_and_leave(status: int) -> None:
            layer.close()
            leave(status)

        os._exit = close_and_leave  # type: ignore[assignment]

    return run_command(command, prepare)


def layer_report(path: Path) -> tuple[int, int, str]:
    """Calls, faults, the first fault."""
    calls, faults, first = (path.read_text() + "\n\n").split("\n")[:3] if path.exists() else ("0", "0", "")
    return int(calls), int(faults), first


def count_calls(mini: Miniature, k: int) -> int:
    """File operations of an undisturbed stage."""
    work, report = mini.copy(k, "count"), mini.place / "count.report"
    layer = shim.Shim((work, mini.place / "made"), report=report)
    done = run_with(layer, STAGES[k].command(work))
    assert done.status == 0, done.output
    wrong = differences(work, mini.expected[k])
    assert not wrong, f"{NAMES[k]} over the shim: {wrong}"
    return layer_report(report)[0]


def io_faults(mini: Miniature, tally: Tally, seed: int, until: float, stages: list[int]) -> None:
    """Fail calls of all stages, in an order drawn by the seed; with enough time every call is tried.

    Which error, and whether for good, goes round with the number of the call and the seed.
    """
    faults: dict[int, list[IoFault]] = {}
    for k in stages:
        calls = list(range(1, count_calls(mini, k) + 1))
        random.Random(f"{seed} {k}").shuffle(calls)
        print(f"io: {NAMES[k]} makes {len(calls)} calls", flush=True)
        faults[k] = [_fault_of(k, at, seed) for at in calls]
    for fault in in_turns(faults, until):
        fired, problems = try_io_fault(mini, fault)
        if fired or problems:
            tally.add(f"io {NAMES[fault.stage]}", f"--part io --only {fault}", problems)


def in_turns(by_stage: Mapping[int, Sequence[T]], until: float) -> Iterator[T]:
    """Yield what to try in each stage, next always in the stage that took the least time so far."""
    left, spent = {k: iter(each) for k, each in by_stage.items()}, dict.fromkeys(by_stage, 0.0)
    while left and time.monotonic() < until:
        k = min(left, key=lambda k: spent[k])
        begin = time.monotonic()
        try:
            yield next(left[k])
        except StopIteration:  # all of this stage was tried
            del left[k]
        spent[k] += time.monotonic() - begin


def _fault_of(stage: int, at: int, seed: int) -> IoFault:
    turn = at + seed
    kind = shim.KINDS[turn % 5]
    lasting = bool(turn // 5 % 2) and kind in (errno.EIO, errno.ENOSPC, errno.EDQUOT)
    return IoFault(stage, at, kind, lasting)


def crashes(mini: Miniature, tally: Tally, seed: int, until: float, stages: list[int], per_stage: int = 30) -> None:
    """Lose power at calls spread over each stage: what was not synced is dropped or torn."""
    faults: dict[int, list[IoFault]] = {}
    for k in stages:
        calls = count_calls(mini, k)
        step = max(1, calls // per_stage)
        places = list(range(1 + seed % step, calls + 1, step))
        random.Random(f"{seed} {k}").shuffle(places)
        faults[k] = [IoFault(k, at, 0, lasting=False, crash=True) for at in places]
    for fault in in_turns(faults, until):
        fired, problems = try_io_fault(mini, fault, "crash")
        repeat = f"--only {fault}"
        tally.add(f"power {NAMES[fault.stage]}", repeat, problems if fired else [*problems, "it did not fire"])


# ---------------------------------------------------------------------------------------------------- kills


def kills(mini: Miniature, tally: Tally, seed: int, until: float, stages: list[int], per_stage: int = 25) -> None:
    """SIGKILL at random moments of each stage."""
    durations = {}
    for k in stages:
        begin = time.monotonic()
        run_command(STAGES[k].command(mini.copy(k, "kill")))
        durations[k] = time.monotonic() - begin
    for k, turn in in_turns({k: [(k, turn) for turn in range(per_stage)] for k in stages}, until):
        moment = random.Random(f"{seed} {k} {turn}").uniform(0, durations[k])
        work = mini.copy(k, "kill")
        done = run_command(STAGES[k].command(work), kill_after=moment)
        if done.status < 0:  # else it was quicker
            tally.add(f"kill {NAMES[k]}", f"--part kill --seed {seed}", after_rerun(mini, k, work))


# ---------------------------------------------------------------------------------------------------- all

PARTS = {
    "io": io_faults,
    "kill": kills,
    "power": crashes,
    "damage": damage.damages,
    "together": damage.together,
    "commands": damage.commands,
}
SHARES = {"io": 0.5, "kill": 0.15, "power": 0.15, "damage": 0.1, "together": 0.03, "commands": 0.07}
"""Shares of the time that parts may take."""
USUAL_MINUTES = 28.0


def main() -> int:
    """Run the parts that were asked for; return 1 where something did not recover."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=list(PARTS), action="append")
    parser.add_argument("--sample", action="store_true", help="a disk that is full halfway through each stage, no more")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=USUAL_MINUTES)
    parser.add_argument("--stage", choices=NAMES, action="append")
    parser.add_argument("--only", help="one I/O fault, as a failure prints it")
    given = parser.parse_args()
    print(f"seed {given.seed}", flush=True)
    begin = time.monotonic()
    place, tally = scratch(), Tally()
    try:
        mini = Miniature(place)
        print(f"the miniature study took {time.monotonic() - begin:.0f} s", flush=True)
        if given.only:
            fault = IoFault.parse(given.only)
            fired, problems = try_io_fault(mini, fault)
            tally.add("io" if fired else "io, did not fire", f"--part io --only {fault}", problems)
        elif given.sample:
            for k, name in enumerate(NAMES):
                fault = IoFault(k, count_calls(mini, k) // 2, errno.ENOSPC, lasting=True)
                fired, problems = try_io_fault(mini, fault)
                tally.add(f"io {name}", f"--only {fault}", problems if fired else ["the fault did not fire"])
        else:
            stages = [k for k, name in enumerate(NAMES) if not given.stage or name in given.stage]
            parts = given.part or list(PARTS)
            total = sum(SHARES[name] for name in parts)
            for name in parts:
                # What a part leaves is for those after it.
                left = begin + 60 * given.minutes - time.monotonic()
                PARTS[name](mini, tally, given.seed, time.monotonic() + left * SHARES[name] / total, stages)
                total -= SHARES[name]
    finally:
        shutil.rmtree(place, ignore_errors=True)
    for what, number in tally.tried.items():
        print(f"{what:24} {number:6}")
    print(f"{sum(tally.tried.values())} faults, {len(tally.problems)} problems, {time.monotonic() - begin:.0f} s")
    return 1 if tally.problems else 0


if __name__ == "__main__":
    sys.exit(main())
