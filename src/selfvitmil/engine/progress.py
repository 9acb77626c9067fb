"""Progress where it is watched: a bar in a terminal and below a notebook's cell, plain lines elsewhere.

`placed` says which stage of a run this is, `output_to` sends everything to a log file too, or to nothing else.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from html import escape
from typing import Any, TextIO

_LINE_EVERY_S = 10.0
_NOTEBOOK_EVERY_S = 0.3
_LINE_EVERY_SHARE = 0.05


class Progress:
    """Count outcomes and print plain lines, at intervals suitable for the log of a long job.

    `begun` items were done before, in an earlier run; `place` is the stage's place in a run, such as `3/9`.
    """

    def __init__(self, stage: str, unit: str, total: int, items_are: str = "slides", *, begun: int = 0):
        self._stage = f"{_place} {stage}" if _place else stage
        self._unit, self._total, self._items_are = unit, total, items_are
        self._done = self._begun = begun
        self._failed: int | None = 0
        self._amount, self._note = 0, ""
        self._began = time.monotonic()
        self._shown_at = float("-inf")
        self._shown_done = begun
        self._reported_waiting = float("-inf")

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        if self._shown_done < self._done:
            self._show()

    def advance(self, failed: bool, amount: int) -> None:
        """Record one more finished item, which represents `amount` of the unit."""
        self._done += 1
        self._failed = (self._failed or 0) + failed
        self._amount += amount
        if self._is_due():
            self._show()

    def reach(self, done: int, amount: int, note: str = "") -> None:
        """Record that `done` items are finished, none of which can fail; `note` is shown beside the counts."""
        self._failed, self._done, self._note = None, done, note
        self._amount += amount
        if self._is_due():
            self._show()

    def leave_out(self) -> None:
        """Record that one item is not for this process."""
        self._total -= 1

    def waiting(self, why: str, seconds: float) -> None:
        """Report that there has been no worker for `seconds`."""
        if seconds >= 5 and time.monotonic() - self._reported_waiting >= 60:
            self._reported_waiting = time.monotonic()
            announce(f"{self._stage}: {why}")

    def _is_due(self) -> bool:
        now = time.monotonic()
        pause = max(_LINE_EVERY_S, 0.02 * (now - self._began))
        step = self._done - self._shown_done >= _LINE_EVERY_SHARE * self._total and now - self._shown_at >= 1.0
        return step or now - self._shown_at >= pause or self._done == self._total

    def _show(self) -> None:
        self._shown_at, self._shown_done = time.monotonic(), self._done
        announce(self._line())

    def _line(self) -> str:
        seconds = time.monotonic() - self._began
        left = seconds / max(self._done - self._begun, 1) * (self._total - self._done)
        times = f"{_clock(seconds)} so far" + (f", about {_clock(left)} left" if left else "")
        return f"{self._stage}: {self._counts()}, {times}"

    def _counts(self) -> str:
        rate = self._amount / max(time.monotonic() - self._began, 1e-9)
        failed = "" if self._failed is None else f", {self._failed} failed"
        note = f", {self._note}" if self._note else ""
        return f"{self._done}/{self._total} {self._items_are}{failed}, {_number(rate)} {self._unit}/s{note}"


class Bar(Progress):
    """The same as a progress bar in a terminal."""

    def __init__(self, stage: str, unit: str, total: int, items_are: str = "slides", *, begun: int = 0):
        from rich import progress as rich
        from rich.console import Console

        super().__init__(stage, unit, total, items_are, begun=begun)
        self._logged_at = float("-inf")
        self._rich = rich.Progress(
            rich.TextColumn("{task.description}", markup=False),
            rich.BarColumn(),
            rich.TextColumn("{task.fields[counts]}", markup=False),
            rich.TimeElapsedColumn(),
            rich.TimeRemainingColumn(),
            console=Console(stderr=True),
            redirect_stdout=sys.stdout.isatty(),  # do not redirect output piped into a file
        )
        self._task = self._rich.add_task(self._stage, total=total, completed=begun, counts="starting")

    def __enter__(self) -> Progress:
        self._rich.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._rich.stop()
        _log(self._line())

    def waiting(self, why: str, seconds: float) -> None:
        if seconds >= 5:
            self._rich.update(self._task, counts=why)

    def _is_due(self) -> bool:
        return True

    def _show(self) -> None:
        self._rich.update(self._task, completed=self._done, counts=self._counts())
        if time.monotonic() - self._logged_at >= _LINE_EVERY_S:
            self._logged_at = time.monotonic()
            _log(self._line())


class NotebookBar(Progress):
    """The same as a progress bar below a notebook's cell; needs IPython, which a notebook has, and no widgets."""

    def __enter__(self) -> Progress:
        from IPython.display import display  # pyright: ignore[reportMissingImports, reportUnknownVariableType]

        self._handle: Any = display(self._bar(), display_id=True)
        return self

    def __exit__(self, *error: object) -> None:
        self._show()

    def _is_due(self) -> bool:
        return time.monotonic() - self._shown_at >= _NOTEBOOK_EVERY_S or self._done == self._total

    def _show(self) -> None:
        self._shown_at, self._shown_done = time.monotonic(), self._done
        self._handle.update(self._bar())

    def _bar(self) -> Any:
        from IPython.display import HTML  # pyright: ignore[reportMissingImports]

        bar = f'<progress value="{self._done}" max="{max(self._total, 1)}"></progress>'
        took = _clock(time.monotonic() - self._began)
        return HTML(f"<div>{escape(self._stage)} {bar} {escape(self._counts())}, {took}</div>")


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook. Imports nothing."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


def show_progress(stage: str, unit: str, total: int, items_are: str = "slides", *, begun: int = 0) -> Progress:
    """Return the kind that suits where this runs, for use in a `with` statement."""
    kind = NotebookBar if in_notebook() else Bar if sys.stderr.isatty() and not _quiet else Progress
    return kind(stage, unit, total, items_are, begun=begun)


@contextmanager
def placed(place: str) -> Generator[None]:
    """Show the place of a stage in a run, such as `3/9`, before its name."""
    global _place
    before, _place = _place, place
    try:
        yield
    finally:
        _place = before


@contextmanager
def output_to(log: TextIO | None, *, quiet: bool = False) -> Generator[None]:
    """Write what is announced to `log` too, each line with its time; with `quiet` to nowhere else."""
    global _quiet, _log_file
    before = _quiet, _log_file
    _quiet, _log_file = quiet, log
    try:
        yield
    finally:
        _quiet, _log_file = before


_place = ""
_quiet = False
_log_file: TextIO | None = None


def _log(line: str) -> None:
    if _log_file is not None:
        print(time.strftime("%Y-%m-%d %H:%M:%S"), line, file=_log_file, flush=True)


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def announce(*lines: str) -> None:
    """Write lines to standard error at once: what a user must know before or while something takes long."""
    for line in lines:
        _log(line)
        if not _quiet:
            print(line, file=sys.stderr, flush=True)
