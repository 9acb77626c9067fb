"""A connection to workers and the state of each: the common part of all three kinds.

The kinds (`local.py`, `external.py`, `batch.py`) each provide a context manager that starts or finds the workers,
yields a `Workers` and cleans up. `run.py` uses only `Workers`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from selfvitmil import __version__
from selfvitmil.engine.work import do_slides, stop_slides
from selfvitmil.errors import EngineError

if TYPE_CHECKING:
    from distributed import Client, Future

ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "NUMEXPR_NUM_THREADS": "1",
    "VECLIB_MAXIMUM_THREADS": "1",
}
"""One thread per worker: there is already one worker per core."""

ALLOWED_FAILURES = 0
"""dask's allowed-failures for our schedulers: a task is returned the first time its worker dies, and we decide."""

POLL_S = 0.5
"""Interval at which the scheduler is asked for its workers."""

_RESULT_S = 30.0
"""Timeout for the result of a finished task; its worker may have died in between."""
_TIDY_S = 1.0
"""Time for the `finally` clauses of interrupted slides."""

Result = list[bytes] | BaseException
"""Result of a task: what `do_slides` returned, or the exception."""


class Workers:
    """A connection to workers: which are alive, which are busy, how one died."""

    local = False
    waiting_message = "waiting for workers of the cluster"
    """Message for the user while there is no worker."""

    def __init__(self, client: Client):
        self.busy: dict[str, Future] = {}  # by address
        self._client = client
        self._alive: set[str] = set()
        self._asked = float("-inf")

    def ask_for(self, number: int) -> None:
        """Request workers for this many slides, within the limits of the settings."""

    def check_timeout(self, seconds: float) -> None:
        """Raise EngineError if there has been no worker for too long."""

    def exit_code(self, address: str) -> int | None:
        """Return the exit code of the process, as in subprocess; None if unknown."""
        return None

    def alive(self) -> set[str]:
        """Return the addresses of the workers, at most `POLL_S` old."""
        if time.monotonic() - self._asked >= POLL_S or not self._alive:
            try:
                self._alive = set(self._client.nthreads())  # pyright: ignore[reportArgumentType]
            except (OSError, TimeoutError):
                raise EngineError(
                    "the connection to the cluster's scheduler was lost",
                    "no more slides can be assigned",
                    "Run the same command again when it is back; finished slides are kept",
                    code="scheduler-lost",
                ) from None
            self._asked = time.monotonic()
        return self._alive

    def submit(
        self,
        address: str,
        jobs: list[tuple[str, bytes]],
        stage: str,
        retries: int,
        put: Callable[[tuple[str, Result]], None],
    ) -> Future:
        """Run these jobs on the worker at `address` only; `put` gets the future's key and the result.

        It is called in another thread.
        """
        future = self._client.submit(do_slides, __version__, jobs, stage, retries, workers=[address], pure=False)
        self.busy[address] = future

        def done(future: Future) -> None:
            result: Result = concurrent.futures.CancelledError()
            if future.status in ("finished", "error"):  # otherwise there is nothing to wait for
                try:
                    result = future.result(timeout=_RESULT_S)
                except BaseException as error:  # a cancellation is not an Exception
                    result = error
            # A dead worker counts as busy until `forget`: otherwise it would get the next slide, which would then be
            # blamed.
            dead = is_loss(result) and future.status != "cancelled"
            if not dead and self.busy.get(address) is future:
                del self.busy[address]
            put((str(future.key), result))

        future.add_done_callback(done)
        return future

    def forget(self, address: str) -> None:
        """Remove a dead worker."""
        self._alive.discard(address)
        self.busy.pop(address, None)

    def interrupt(self, tasks: dict[str, Future]) -> None:
        """Interrupt these tasks, given by worker address, and wait briefly for them."""
        futures = list(tasks.values())
        # In a thread, because a worker blocked in native code may never answer.
        ask = functools.partial(self._client.run, stop_slides, workers=list(tasks), on_error="ignore")
        threading.Thread(target=_ignoring_errors, args=(ask,), daemon=True).start()
        until = time.monotonic() + _TIDY_S
        while not all(future.done() for future in futures) and time.monotonic() < until:
            time.sleep(0.02)
        _ignoring_errors(functools.partial(self._client.cancel, futures, force=True))


def is_loss(result: Result) -> bool:
    """Return whether dask reports that a worker or its result is lost."""
    from distributed import KilledWorker

    return isinstance(result, KilledWorker | TimeoutError | asyncio.CancelledError | concurrent.futures.CancelledError)


def _ignoring_errors(function: Callable[[], object]) -> None:
    with suppress(Exception):
        function()


def first_line(error: BaseException) -> str:
    """Return the first line of another library's exception."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
