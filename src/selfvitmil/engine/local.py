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
"""How long the machine may take to bring a worker (back) to life."""
_REAPED_S = 5.0
"""The scheduler sees the connection break a little before the process is reaped; how long that may be."""


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def local_workers(most: int) -> Iterator[Workers]:
    """Up to `most` processes, started when asked for."""
    from distributed import Client, LocalCluster
    from distributed.security import Security

    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise EngineError(
            "workers cannot be started while a worker imports this script",
            "each would start more of them",
            'Put `if __name__ == "__main__":` around the use of Engine',
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
                memory_limit=0,  # dask would pause a worker near its limit, for ever if the memory is a library's
                env=ONE_THREAD,
                silence_logs=logging.CRITICAL,
            )
            stack.callback(cluster.close)
            client = Client(cluster, security=security, set_as_default=False)
            stack.callback(client.close)
            stack.callback(lambda: client.sync(_close_nannies, list(cluster.workers.values())))
        yield _LocalWorkers(client, cluster, most, exits)


async def _close_nannies(nannies: list[Any]) -> None:
    # dask's own way of closing waits 4 s for a slide in work before it kills
    await asyncio.gather(*(nanny.close(timeout=1) for nanny in nannies), return_exceptions=True)


@contextmanager
def _sigint_blocked() -> Iterator[None]:
    """Threads and processes started inside never see Ctrl-C, which a terminal sends to all; we stop them ourselves."""
    resource_tracker.ensure_running()  # or multiprocessing does so later, and unblocks SIGINT on the way
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# ---------------------------------------------------------------------------------------------------- exits


@dataclass
class _WorkerExits:
    """How worker processes ended, as their nannies saw it."""

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
                "the worker processes do not come to life",
                "they died while starting" if failed_starts else f"none came within {_PATIENCE_S:.0f} s",
                "See whether memory, disk or the number of processes is at its limit (`--workers 0` starts none). "
                'A script of your own needs `if __name__ == "__main__":` around its use of Engine',
            )

    def exit_code(self, address: str) -> int | None:
        until = time.monotonic() + _REAPED_S
        while address not in self._exits.exit_codes and time.monotonic() < until:
            time.sleep(0.01)
        return self._exits.exit_codes.get(address)


def _recording_nanny(exits: _WorkerExits) -> Any:
    """A Nanny that notes how its process ended, and leaves the environment of ours as it was."""
    from distributed import Nanny

    before = {name: os.environ.get(name) for name in (*ONE_THREAD, "PYTHONHASHSEED", "MALLOC_TRIM_THRESHOLD_")}
    starting = 0

    class RecordingNanny(Nanny):
        def __init__(self, *arguments: Any, **options: Any):
            super().__init__(*arguments, **options)
            self.pre_spawn_env = {**self.pre_spawn_env, **ONE_THREAD}
            # dask has freed memory given back at once; arrays of some megabytes then cost more to get than to fill
            self.pre_spawn_env.pop("MALLOC_TRIM_THRESHOLD_", None)

        async def instantiate(self) -> Any:
            # numpy reads OMP_NUM_THREADS and its like when it is loaded, so dask sets them here for the child to
            # inherit; left behind, they would slow down whatever this process computes later.
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
