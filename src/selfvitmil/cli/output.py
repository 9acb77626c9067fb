"""What the commands print: results as tables and lines on standard output, complaints on standard error.

A table is as wide as the terminal and 100 characters elsewhere. Columns that do not fit are left out from the right,
which a line says: files have them all. What an earlier stage of the same command said already is not said again, and
neither is that a slide which failed there is missing later.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from selfvitmil.errors import ConfigError

if TYPE_CHECKING:
    from selfvitmil.stages.base import StageResult
    from selfvitmil.store.failures import Failure

MAX_ROWS = 40
"""Rows of a table that are printed; files have all of them."""
WIDTH = 100
"""Characters of a line that is not written to a terminal."""
GAP = 2
"""Spaces between columns."""
WORDS = 24
"""A column of words may be folded to this width before columns are left out."""
NUMBERS = re.compile(r"[-+−<>≈]?[\d.,]*(?: ?[±x] ?[\d.,-]+)?(?: ?\[[^\]]*\])?(?: ?(?:%|s|min|h|days|[kMGT]B))?|-")
"""A cell that must not be folded."""


@dataclass
class Printed:
    """What the command has printed so far, and how it prints."""

    quiet: bool = False
    as_json: bool = False
    log: TextIO | None = None
    lines: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    """Slides whose failure was printed."""
    results: list[dict[str, Any]] = field(default_factory=list)
    """For `--json`."""


_printed = Printed()


@contextmanager
def printing(*, quiet: bool = False, as_json: bool = False, log_file: Path | None = None) -> Generator[Printed]:
    """Say how the command inside prints; with `log_file` all is appended there too."""
    from selfvitmil.engine.progress import output_to

    global _printed
    before = _printed
    try:
        log = nullcontext() if log_file is None else log_file.open("a", encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"--log-file {log_file}: cannot be written", str(error.strerror), "Name another file", code="log-file"
        ) from None
    with log as file:
        _printed = Printed(quiet, as_json, file)
        try:
            with output_to(file, quiet=quiet):
                yield _printed
        finally:
            _printed = before


def end(results: Iterable[StageResult]) -> int:
    """Print what was done; return the exit status."""
    status = 0
    for result in results:
        show(result)
        status = 130 if result.interrupted else 3 if result.failures else status
    return status


def show(result: StageResult) -> None:
    """Print a result; with `--json` it is kept for the end."""
    from selfvitmil.cohort.table import listing
    from selfvitmil.rendering import failure_line, render

    words = render(result)
    if _printed.as_json:
        _printed.results.append(_as_data(result, words))
        return
    table = [*words.table[: MAX_ROWS + 1]]
    console = _Console(_width())
    if table:
        left_out = console.table(table)
        if left_out:
            fit = "1 more column does" if left_out == 1 else f"{left_out} more columns do"
            console.line(f"({fit} not fit: widen the terminal, or use --json)")
        if len(words.table) - 1 > MAX_ROWS:
            console.line(f"... and {len(words.table) - 1 - MAX_ROWS} more")
    for line in words.lines:
        if line not in _printed.lines:
            _printed.lines.add(line)
            console.line(line)
    new, known = _new_failures(result.failures)
    for failure in new[:MAX_ROWS]:
        console.line(failure_line(failure), is_failure=True)
    if known:
        console.line(f"missing since they failed before: {listing(known, 5)}")
    if new:
        console.line(f"{len(new)} failed; see failures.csv", is_failure=True)


def _new_failures(failures: Sequence[Failure]) -> tuple[list[Failure], list[str]]:
    """Return the failures of slides that have not failed before in this command, and the names of the others."""
    new = [failure for failure in failures if failure.slide not in _printed.failed]
    known = [failure.slide for failure in failures if failure.slide in _printed.failed]
    _printed.failed |= {failure.slide for failure in new}
    return new, list(dict.fromkeys(known))


def _as_data(result: StageResult, words: Any) -> dict[str, Any]:
    """Return a result for `--json`: its words, the table with a record per row, and its failures."""
    header, *rows = words.table or ((),)
    names = [" ".join(name.split()) for name in header]
    return {
        "result": type(result).__name__,
        "lines": list(words.lines),
        "table": [dict(zip(names, row, strict=True)) for row in rows],
        "failures": [
            {"slide": each.slide, "stage": each.stage, "reason": each.reason, "remedy": each.remedy}
            for each in result.failures
        ],
        "interrupted": result.interrupted,
    }


def _width() -> int:
    """Return the width of the terminal, or `WIDTH` where standard output is none."""
    if not sys.stdout.isatty():
        return WIDTH
    from selfvitmil.cli.overview import terminal_width

    return terminal_width()


class _Console:
    """Prints tables and lines: with `--quiet` failures alone, on standard error; all of it into the log file."""

    def __init__(self, width: int) -> None:
        from rich.console import Console

        # Names of slides and figures in brackets are no markup, and `:x:` in a name is no picture.
        plain: dict[str, Any] = {"soft_wrap": True, "markup": False, "emoji": False, "highlight": False, "width": width}
        self._width = width
        self._console = None if _printed.quiet else Console(**plain)
        self._log = None if _printed.log is None else Console(file=_printed.log, no_color=True, **plain)

    def line(self, text: str, *, is_failure: bool = False) -> None:
        for console in filter(None, (self._console, self._log)):
            console.print(text)
        if self._console is None and is_failure:
            complain(text)

    def table(self, rows: Sequence[Sequence[str]]) -> int:
        """Print a table, header first; return how many columns did not fit."""
        from rich.table import Table

        columns = list(zip(*rows, strict=True))
        kept = columns_that_fit(columns, self._width)
        table = Table(box=None, pad_edge=False)
        for column in columns[:kept]:
            table.add_column(column[0], no_wrap=not _folds(column), overflow="fold")
        for row in rows[1:]:
            table.add_row(*row[:kept])
        for console in filter(None, (self._console, self._log)):
            console.print(table)
        return len(columns) - kept


def columns_that_fit(columns: Sequence[Sequence[str]], width: int) -> int:
    """Return how many columns, from the left, fit into a line; at least one. Columns of words may be folded."""
    used, kept = 0, 0
    for column in columns:
        natural = max(len(line) for cell in column for line in cell.split("\n") or [""])
        used += (min(natural, WORDS) if _folds(column) else natural) + GAP * bool(kept)
        if used > width and kept:
            break
        kept += 1
    return kept


def _folds(column: Sequence[str]) -> bool:
    """Return whether a column has words that may stand in several lines."""
    return not all(NUMBERS.fullmatch(cell) for cell in column[1:]) and any(" " in cell for cell in column[1:])


def print_json(value: Any) -> int:
    """Print a value as JSON; return the exit status."""
    print(json.dumps(value, indent=1))
    return 0


def print_results(command: str, status: int, error: Mapping[str, str] | None = None) -> None:
    """Print all results of a command as one JSON object (`--json`)."""
    found = {"command": command, "exit_status": status, "results": _printed.results}
    print_json(found | ({"error": dict(error)} if error else {}))


def say(line: str) -> None:
    """Print at once: what comes next takes its time."""
    print(line, flush=True)


def complain(message: str) -> None:
    """Print what is wrong to standard error."""
    print(f"selfvitmil: {message}", file=sys.stderr)
    if _printed.log is not None:
        print(f"selfvitmil: {message}", file=_printed.log, flush=True)


@contextmanager
def torch_announced() -> Generator[None]:
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
            if not _printed.quiet:
                print("loading PyTorch", file=sys.stderr, flush=True)
