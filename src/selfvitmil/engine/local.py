"""Worker processes on this machine: they listen on 127.0.0.1, use one thread each, and a dead one is replaced."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from typing import TYPE_CHECKING, Any

from selfvitmil.engine.workers import ALLOWED_FAILURES, ONE_THREAD, Workers
from selfvitmil.errors import EngineError

if TYPE_CHECKING:
    from distributed import Client

_PATIENCE_S = 60.0
"""Timeout for starting or restarting a worker."""
_REAPED_S = 5.0
"""The scheduler sees the connection break slightly before the process is reaped; timeout for that."""


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def local_workers(most: int) -> Iterator[Workers]:
    """Yield up to `most` processes, started on demand."""
    from distributed import Client, LocalCluster
    from distributed.security import Security

    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise EngineError(
            "workers cannot be started while a worker imports this script",
            "each would start more of them",
            'Put `if __name__ == "__main__":` around the use of Engine',
            code="unguarded-script",
        )
    exits = _WorkerExits()
    security = Security.temporary()
    with ExitStack() as stack:
        with _sigint_blocked():
            cluster = LocalCluster(
                n_workers=0,
                threads_per_worker=1,
                worker_class=_recording_nanny(exits),
                host="127.0.0.1",
                security=security,
                dashboard_address="127.0.0.1:0",
                worker_dashboard_address="127.0.0.1:0",
                scheduler_kwargs={"dashboard": False, "allowed_failures": ALLOWED_FAILURES},
                memory_limit=0,  # dask would pause a worker near its limit, possibly for ever
                env=ONE_THREAD,
                silence_logs=logging.CRITICAL,
            )
            stack.callback(cluster.close)
            client = Client(cluster, security=security, set_as_default=False)
            stack.callback(client.close)
            stack.callback(lambda: client.sync(_close_nannies, list(cluster.workers.values())))
        yield _LocalWorkers(client, cluster, most, exits)


async def _close_nannies(nannies: list[Any]) -> None:
    # dask's own shutdown waits 4 s for a running slide before it kills the worker
    await asyncio.gather(*(nanny.close(timeout=1) for nanny in nannies), return_exceptions=True)


@contextmanager
def _sigint_blocked() -> Iterator[None]:
    """Block Ctrl-C for threads and processes started inside, which a terminal sends to all; we stop them ourselves."""
    resource_tracker.ensure_running()  # otherwise multiprocessing starts it later and unblocks SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# ---------------------------------------------------------------------------------------------------- exit codes


@dataclass
class _WorkerExits:
    """How worker processes ended, as recorded by their nannies."""

    exit_codes: dict[str, int] = field(default_factory=dict)  # by address
    failed_starts: int = 0


class _LocalWorkers(Workers):
    local = True
    waiting_message = "starting a worker"

    def __init__(self, client: Client, cluster: Any, most: int, exits: _WorkerExits):
        super().__init__(client)
        self._cluster = cluster
        self._most = most
        self._exits = exits
        self._number = 0
        self._met = False

    def ask_for(self, number: int) -> None:
        if min(number, self._most) > self._number:
            self._number = min(number, self._most)
            self._cluster.scale(self._number)

    def alive(self) -> set[str]:
        alive = super().alive()
        self._met = self._met or bool(alive)
        return alive

    def check_timeout(self, seconds: float) -> None:
        failed_starts = not self._met and self._exits.failed_starts >= self._number
        if failed_starts or seconds > _PATIENCE_S:
            raise EngineError(
                "the worker processes failed to start",
                "they died while starting" if failed_starts else f"none started within {_PATIENCE_S:.0f} s",
                "Check whether memory, disk or the number of processes is at its limit (`--workers 0` starts none). "
                'A script of your own needs `if __name__ == "__main__":` around its use of Engine',
                code="workers-not-started",
            )

    def exit_code(self, address: str) -> int | None:
        until = time.monotonic() + _REAPED_S
        while address not in self._exits.exit_codes and time.monotonic() < until:
            time.sleep(0.01)
        return self._exits.exit_codes.get(address)


def _recording_nanny(exits: _WorkerExits) -> Any:
    """Return a Nanny class that records how its process ended and restores our environment variables."""
    from distributed import Nanny

    before = {name: os.environ.get(name) for name in (*ONE_THREAD, "PYTHONHASHSEED", "MALLOC_TRIM_THRESHOLD_")}
    starting = 0

    class RecordingNanny(Nanny):
        def __init__(self, *arguments: Any, **options: Any):
            super().__init__(*arguments, **options)
            self.pre_spawn_env = {**self.pre_spawn_env, **ONE_THREAD}
            # dask returns freed memory at once; allocating arrays of some megabytes then costs more than filling them
            self.pre_spawn_env.pop("MALLOC_TRIM_THRESHOLD_", None)

        async def instantiate(self) -> Any:
            # numpy reads OMP_NUM_THREADS and similar variables at import, so dask sets them here for the child to
            # inherit; left in place, they would slow down later computations of this process.
            nonlocal starting
            starting += 1
            start = asyncio.ensure_future(super().instantiate())
            while self.pid is None and not start.done():
                await asyncio.sleep(0.005)
            starting -= 1
            if starting == 0:
                _restore_environment(before)
            return await start

        def _on_worker_exit_sync(self, exitcode: int) -> None:
            if self.worker_address is None:
                exits.failed_starts += 1
            else:
                exits.exit_codes[self.worker_address] = exitcode
            super()._on_worker_exit_sync(exitcode)

    return RecordingNanny


def _restore_environment(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
