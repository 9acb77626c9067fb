"""A connection to workers and what is known of each: the same for all three kinds, which differ in small methods.

The kinds (`local.py`, `external.py`, `batch.py`) each give a context manager that starts or finds the workers, yields a
`Workers` and tidies up. `run.py` talks to them through `Workers` alone.
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
"""There is one worker per core already."""

ALLOWED_FAILURES = 0
"""dask's allowed-failures for our schedulers: a task is given back the first time its worker dies; we decide."""

POLL_S = 0.5
"""How often the scheduler is asked which workers there are."""

_RESULT_S = 30.0
"""How long a finished task's result may take to arrive; its worker may have died in between."""
_TIDY_S = 1.0
"""How long interrupted slides have for their `finally` clauses."""

Result = list[bytes] | BaseException
"""Of a task: what `do_slides` returned, or why it did not."""


class Workers:
    """A connection to workers, and what is known of each: who is there, who is busy, how one died."""

    local = False
    waiting_message = "waiting for workers of the cluster"
    """What the user is told while there is none."""

    def __init__(self, client: Client):
        self.busy: dict[str, Future] = {}  # by address
        self._client = client
        self._alive: set[str] = set()
        self._asked = float("-inf")

    def ask_for(self, number: int) -> None:
        """Have workers for this many slides, within what the settings allow."""

    def check_timeout(self, seconds: float) -> None:
        """Raise where workers that are away for so long will not come."""

    def exit_code(self, address: str) -> int | None:
        """How the process ended, as in subprocess; None where nobody can tell."""
        return None

    def alive(self) -> set[str]:
        """Addresses of the workers, at most a moment old."""
        if time.monotonic() - self._asked >= POLL_S or not self._alive:
            try:
                self._alive = set(self._client.nthreads())  # pyright: ignore[reportArgumentType]
            except (OSError, TimeoutError):
                raise EngineError(
                    "the connection to the cluster's scheduler broke",
                    "nobody hands out the slides any more",
                    "Run the same command again when it is back; what is finished is kept",
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
        """Have the worker at `address`, and no other, do these; `put` gets the future's key and the result.

        It does so in another thread.
        """
        future = self._client.submit(do_slides, __version__, jobs, stage, retries, workers=[address], pure=False)
        self.busy[address] = future

        def done(future: Future) -> None:
            result: Result = concurrent.futures.CancelledError()
            if future.status in ("finished", "error"):  # else there is nothing to wait for, least of all when closing
                try:
                    result = future.result(timeout=_RESULT_S)
                except BaseException as error:  # a cancellation is no Exception
                    result = error
            # A dead worker counts as busy until `forget`, or it would be given the next slide, and that one its death.
            dead = is_loss(result) and future.status != "cancelled"
            if not dead and self.busy.get(address) is future:
                del self.busy[address]
            put((str(future.key), result))

        future.add_done_callback(done)
        return future

    def forget(self, address: str) -> None:
        """It is gone."""
        self._alive.discard(address)
        self.busy.pop(address, None)

    def interrupt(self, tasks: dict[str, Future]) -> None:
        """Let what these workers do end, and wait a moment for it; given by address."""
        futures = list(tasks.values())
        # In a thread, as the answer of a worker that holds its interpreter in native code may never come.
        ask = functools.partial(self._client.run, stop_slides, workers=list(tasks), on_error="ignore")
        threading.Thread(target=_ignoring_errors, args=(ask,), daemon=True).start()
        until = time.monotonic() + _TIDY_S
        while not all(future.done() for future in futures) and time.monotonic() < until:
            time.sleep(0.02)
        _ignoring_errors(functools.partial(self._client.cancel, futures, force=True))


def is_loss(result: Result) -> bool:
    """Whether dask tells of a worker that is gone, or of its result."""
    from distributed import KilledWorker

    return isinstance(result, KilledWorker | TimeoutError | asyncio.CancelledError | concurrent.futures.CancelledError)


def _ignoring_errors(function: Callable[[], object]) -> None:
    with suppress(Exception):
        function()


def first_line(error: BaseException) -> str:
    """What another library's exception says, short enough for ours."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
