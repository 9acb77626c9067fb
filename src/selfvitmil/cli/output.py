"""What the commands print: results as tables and lines on standard output, complaints on standard error."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from selfvitmil.stages.base import StageResult

MAX_ROWS = 40
"""Rows of a table that are printed; files have all of them."""


def end(results: Iterable[StageResult]) -> int:
    """Print what was done; return the exit status."""
    status = 0
    for result in results:
        show(result)
        status = 130 if result.interrupted else 3 if result.failures else status
    return status


def show(result: StageResult) -> None:
    from rich.console import Console
    from rich.table import Table

    from selfvitmil.rendering import failure_line, render

    # Names of slides and figures in brackets are no markup, and `:x:` in a name is no picture.
    width = None if sys.stdout.isatty() else 160
    console = Console(soft_wrap=True, markup=False, emoji=False, highlight=False, width=width)
    words = render(result)
    if words.table:
        header, *rows = words.table
        table = Table(*header, box=None, pad_edge=False)
        for row in rows[:MAX_ROWS]:
            table.add_row(*row)
        console.print(table)
        if len(rows) > MAX_ROWS:
            console.print(f"... and {len(rows) - MAX_ROWS} more")
    for line in (*words.lines, *map(failure_line, result.failures[:MAX_ROWS])):
        console.print(line)
    if result.failures:
        console.print(f"{len(result.failures)} failed; see failures.csv")


def print_json(value: Any) -> int:
    """Print a value as JSON; return the exit status."""
    print(json.dumps(value, indent=1))
    return 0


def say(line: str) -> None:
    """Print at once: what comes next takes its time."""
    print(line, flush=True)


def complain(message: str) -> None:
    """Print what is wrong to standard error."""
    print(f"selfvitmil: {message}", file=sys.stderr)


@contextmanager
def torch_announced() -> Iterator[None]:
    """Say so on standard error as soon as PyTorch is loaded inside: that takes seconds, and nothing else moves."""
    watch = _TorchWatch()
    sys.meta_path.insert(0, watch)
    try:
        yield
    finally:
        sys.meta_path.remove(watch)


class _TorchWatch:
    """A finder of modules that finds none, and is asked for each that is imported."""

    def __init__(self) -> None:
        self._silent = "torch" in sys.modules or os.environ.get("RANK", "0") != "0"

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        # Parts of torch are sought only once it is being imported; the package itself also by those who ask for it.
        if not self._silent and name.startswith("torch."):
            self._silent = True
            print("loading PyTorch", file=sys.stderr, flush=True)
