"""What was tried, and whether a study recovered."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from faults.children import Done, run_command
from faults.miniature import STAGES, Miniature, differences


@dataclass
class Tally:
    """What was tried, and what failed."""

    tried: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    def add(self, what: str, repeat: str, problems: list[str]) -> None:
        self.tried[what] += 1
        for each in problems:
            line = f"{what}: {each}   [repeat: {repeat}]"
            self.problems.append(line)
            print(line, flush=True)


def after_rerun(mini: Miniature, k: int, work: Path) -> list[str]:
    """Run stage number k again, undisturbed; return what is wrong then."""
    done = run_command(STAGES[k].command(work))
    if done.status != 0:
        return [f"the rerun ends with status {done.status}: {tail(done)}"]
    return [f"after the rerun: {line}" for line in differences(work, mini.expected[k])]


def tail(done: Done) -> str:
    return " / ".join(done.output.strip().splitlines()[-6:])[-700:]
