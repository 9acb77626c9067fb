"""Commands in forks of this process, which has loaded everything: a fault costs milliseconds instead of seconds."""

from __future__ import annotations

import io
import os
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path

LIMIT_S = 120.0
"""A command that takes longer hangs."""


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    status: int
    """Exit status, or the negative number of the signal that killed it."""
    output: str
    seconds: float

    @property
    def is_clean(self) -> bool:
        """Whether it ended by success or by an error of ours."""
        return self.status >= 0 and "Traceback" not in self.output


def run_here(arguments: Sequence[str]) -> Done:
    """Run a command in this process, which loads all that later forks need."""
    from selfvitmil.cli import main

    output, begin = io.StringIO(), time.monotonic()
    status = 0
    with redirect_stdout(output), redirect_stderr(output):
        try:
            main([str(each) for each in arguments])
        except SystemExit as end:
            status = int(end.code or 0)
    until = time.monotonic() + 5  # threads that are ending
    while threading.active_count() > 1 and time.monotonic() < until:
        time.sleep(0.01)
    assert threading.active_count() == 1, "a process with threads must not fork"
    return Done(status, output.getvalue(), time.monotonic() - begin)


def start(arguments: Sequence[str], output: int, prepare: Callable[[], object] = lambda: None) -> int:
    """Start a command in a fork and a session of its own; return its process id."""
    child = os.fork()
    if child:
        return child
    status = 70
    try:
        os.setsid()
        os.dup2(output, 1)
        os.dup2(output, 2)
        from selfvitmil.cli import main
        from selfvitmil.engine import work
        from selfvitmil.store import guard

        work._FIRST_PAUSE_S = 0.001  # before a slide is tried again
        guard.helper.check = lambda kind, path: None  # starting its helper would take most of the time
        prepare()
        main([str(each) for each in arguments])
    except SystemExit as end:
        status = int(end.code or 0)
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        import sys

        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def run_command(
    arguments: Sequence[str], prepare: Callable[[], object] = lambda: None, kill_after: float | None = None
) -> Done:
    """Run a command to its end, or to its death by SIGKILL after so many seconds."""
    with tempfile.TemporaryFile() as output:
        begin = time.monotonic()
        child = start(arguments, output.fileno(), prepare)
        status = _wait(child, begin, kill_after)
        seconds = time.monotonic() - begin
        output.seek(0)
        return Done(status, output.read().decode(errors="replace"), seconds)


def _wait(child: int, begin: float, kill_after: float | None) -> int:
    limit = LIMIT_S if kill_after is None else kill_after
    pause = 0.0005
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        left = limit - (time.monotonic() - begin)
        if left <= 0:
            with suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
            os.kill(child, signal.SIGKILL)  # it may not lead a group of its own yet
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            assert kill_after is not None, f"the command hangs (status {status})"
            return status
        time.sleep(min(pause, left))
        pause = min(pause * 1.5, 0.02)


def scratch() -> Path:
    """A folder in memory where there is one: the campaign's limit is the time of syncs."""
    memory = Path("/dev/shm")
    return Path(tempfile.mkdtemp(prefix="selfvitmil-faults-", dir=memory if os.access(memory, os.W_OK) else None))
