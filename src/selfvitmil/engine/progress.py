"""Progress of a map: a bar in a terminal and in a notebook, plain lines on standard error elsewhere."""

from __future__ import annotations

import sys
import time
from html import escape
from typing import Any

_LINE_EVERY_S = 10.0
_NOTEBOOK_EVERY_S = 0.3
_LINE_EVERY_SHARE = 0.05


class Progress:
    """Count outcomes and print plain lines, at intervals suitable for the log of a long job."""

    def __init__(self, stage: str, unit: str, total: int, items_are: str = "slides"):
        self._stage = stage
        self._unit = unit
        self._items_are = items_are
        self._total = total
        self._done = self._failed = self._amount = 0
        self._began = time.monotonic()
        self._shown_at = float("-inf")
        self._shown_done = 0
        self._told_waiting = float("-inf")

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        if self._shown_done < self._done:
            self._show()

    def advance(self, failed: bool, amount: int) -> None:
        """Record one more finished item, which represents `amount` of the unit."""
        self._done += 1
        self._failed += failed
        self._amount += amount
        if self._is_due():
            self._show()

    def waiting(self, why: str, seconds: float) -> None:
        """Report that there has been no worker for `seconds`."""
        if seconds >= 5 and time.monotonic() - self._told_waiting >= 60:
            self._told_waiting = time.monotonic()
            print(f"{self._stage}: {why}", file=sys.stderr, flush=True)

    def _is_due(self) -> bool:
        now = time.monotonic()
        pause = max(_LINE_EVERY_S, 0.02 * (now - self._began))
        step = self._done - self._shown_done >= _LINE_EVERY_SHARE * self._total and now - self._shown_at >= 1.0
        return step or now - self._shown_at >= pause or self._done == self._total

    def _show(self) -> None:
        self._shown_at, self._shown_done = time.monotonic(), self._done
        seconds = time.monotonic() - self._began
        left = seconds / self._done * (self._total - self._done)
        times = f"{_clock(seconds)} so far" + (f", about {_clock(left)} left" if left else "")
        print(f"{self._stage}: {self._counts()}, {times}", file=sys.stderr, flush=True)

    def _counts(self) -> str:
        rate = self._amount / max(time.monotonic() - self._began, 1e-9)
        return f"{self._done}/{self._total} {self._items_are}, {self._failed} failed, {_number(rate)} {self._unit}/s"


class Bar(Progress):
    """The same as a progress bar in a terminal."""

    def __init__(self, stage: str, unit: str, total: int, items_are: str = "slides"):
        from rich import progress as rich
        from rich.console import Console

        super().__init__(stage, unit, total, items_are)
        self._rich = rich.Progress(
            rich.TextColumn("{task.description}", markup=False),
            rich.BarColumn(),
            rich.TextColumn("{task.fields[counts]}", markup=False),
            rich.TimeElapsedColumn(),
            rich.TimeRemainingColumn(),
            console=Console(stderr=True),
            redirect_stdout=sys.stdout.isatty(),  # do not redirect output piped into a file
        )
        self._task = self._rich.add_task(stage, total=total, counts="starting")

    def __enter__(self) -> Progress:
        self._rich.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._rich.stop()

    def waiting(self, why: str, seconds: float) -> None:
        if seconds >= 5:
            self._rich.update(self._task, counts=why)

    def _is_due(self) -> bool:
        return True

    def _show(self) -> None:
        self._rich.update(self._task, completed=self._done, counts=self._counts())


class NotebookBar(Progress):
    """The same as a progress bar below a notebook's cell; needs IPython, which a notebook has, and no widgets."""

    def __enter__(self) -> Progress:
        from IPython.display import display  # pyright: ignore[reportMissingImports]

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


def show_progress(stage: str, unit: str, total: int, items_are: str = "slides") -> Progress:
    """Return the kind that suits where this runs, for use in a `with` statement."""
    kind = NotebookBar if in_notebook() else Bar if sys.stderr.isatty() else Progress
    return kind(stage, unit, total, items_are)


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def announce(*lines: str) -> None:
    """Write lines to standard error at once: what a user must know before or while something takes long."""
    for line in lines:
        print(line, file=sys.stderr, flush=True)
