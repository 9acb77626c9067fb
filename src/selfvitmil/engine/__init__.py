"""Map work over slides: in this process, in local processes, or on a cluster.

Input: a function and named items; output: outcomes in the order of completion, one per name, each a value or a Failure.
A problem with one slide does not stop the others: an exception becomes a Failure, and so does a crash that kills the
worker process.

A worker has one slide at a time, assigned by the engine. So when a process dies, the slide it was working on is known,
and no other slide was queued behind it. If the exit code is conclusive (a segmentation fault, an exit) the slide has
failed. If the cause may lie elsewhere (the kernel's out-of-memory killer, a batch job at its time limit, a remote
worker that disappeared) the slide is retried once after all others, on this machine with no other slide at the same
time; a second death counts as its failure.

    __init__.py   Engine: the interface for the stages; assigns slides to workers and handles dead workers
    progress.py   a bar in a terminal and in a notebook, plain lines on standard error elsewhere
    work.py       the work on one slide with its retries; worker processes on this machine
    claims.py     which shard of a run works on which slide, agreed by files alone
    cluster.py    workers of a dask cluster: at an address, or as jobs of Slurm, PBS or LSF

Local processes are spawned, not forked, and do not import the script that uses the Engine: it needs no
`if __name__ == "__main__":`. They are connected by pipes and open no port. dask is imported only for a cluster.
"""

from __future__ import annotations

import pickle
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from typing import Any, Generic, TypeVar, cast

from selfvitmil.engine.progress import Progress, announce, show_progress
from selfvitmil.engine.work import (
    Admitted,
    Job,
    LocalWorkers,
    Outcome,
    Result,
    Stream,
    WorkerDied,
    Workers,
    attempt,
    attempt_all,
    is_transient,
    num_cores,
)
from selfvitmil.errors import ConfigError, EngineError
from selfvitmil.settings import EngineSettings
from selfvitmil.store.failures import Failure

__all__ = ["Engine", "Outcome", "announce", "is_transient", "num_cores", "show_progress"]

T = TypeVar("T")
Item = TypeVar("Item")

POLL_S = 0.5
"""Longest wait for a result before the state of the workers is checked."""


class Engine:
    """Workers for one command, started at the first map with work to do and shared by all its stages.

    with Engine(settings.engine) as engine:
        for outcome in engine.map(tile_slide, jobs, stage="tile", unit="tiles", count=len): ...

    Leaving the block stops the workers. Ctrl-C and SIGTERM raise KeyboardInterrupt in the calling thread; slides being
    processed are then asked to stop, so that they can remove their temporary files, and their processes are killed a
    second later. A slide stuck in native code may leave a `.part` file, which the next run removes.
    """

    def __init__(self, settings: EngineSettings):
        _check_address(settings)
        self._settings = settings
        self._stack = ExitStack()
        self._open = False
        self._workers: Workers | None = None
        self._maps: list[_Map[Any]] = []

    def __enter__(self) -> Engine:
        self._stack.enter_context(_sigterm_interrupts())
        self._open = True
        return self

    def __exit__(self, *error: object) -> None:
        self._open = False
        with self._stack:
            for unfinished in self._maps:
                unfinished.stop()
        self._workers = None

    @property
    def num_local(self) -> int:
        """Number of processes of this machine that work at the same time; 1 if the work is done in this one or
        elsewhere."""
        settings = self._settings
        elsewhere = settings.cluster is not None or settings.batch.kind != "none"
        return 1 if elsewhere or settings.workers == 0 else settings.workers or num_cores()

    def map(
        self,
        function: Callable[[Item], T],
        items: Mapping[str, Item],
        *,
        stage: str,
        items_are: str = "slides",
        unit: str = "slides",
        count: Callable[[T], int] | None = None,
        stream: Stream[Item, T] | None = None,
        claim: Callable[[str], bool] | None = None,
    ) -> Iterator[Outcome[T]]:
        """Apply `function` to every item; yield each outcome as it completes, every name exactly once.

        `function` is defined at the top of a module (or is a `functools.partial` of such a one); it, the items and its
        results must be picklable. It may be called twice for a slide whose worker died, so its writes must be atomic.
        `stage` and `items_are` are shown in failures and progress. `count` returns how many of `unit` (tiles, say) a
        value represents, for the rate shown in the progress. `stream` does the same as `function` for many slides that
        may overlap, and is used if the work is done in this process. `claim` is asked for every name right before its
        work begins; where it returns False the item is left out.
        """
        if not items:
            return
        with show_progress(stage, unit, total=len(items), items_are=items_are) as progress:

            def admit(name: str) -> bool:
                admitted = claim is None or claim(name)
                if not admitted:
                    progress.leave_out()
                return admitted

            for outcome in self._outcomes(function, items, stage, progress, stream, admit):
                failed = outcome.failure is not None
                amount = 1 if count is None else 0 if failed else count(cast(T, outcome.value))
                progress.advance(failed, amount)
                yield outcome

    def _outcomes(
        self,
        function: Callable[[Item], T],
        items: Mapping[str, Item],
        stage: str,
        progress: Progress,
        stream: Stream[Item, T] | None,
        admit: Callable[[str], bool],
    ) -> Iterator[Outcome[T]]:
        settings = self._settings
        if settings.workers == 0 and stream is not None:
            yield from attempt_all(stream, function, Admitted(items, admit), stage, settings.retries)
            return
        if settings.workers == 0:
            for name, item in Admitted(items, admit).items():
                yield attempt(function, name, item, stage, settings.retries)
            return
        assert self._open, "workers need a `with` block that stops them"
        if self._workers is None:
            self._workers = self._stack.enter_context(_open_workers(settings))
        self._workers.ask_for(len(items))
        mapping: _Map[T] = _Map(self._workers, function, items, stage, settings.retries, admit)
        self._maps.append(mapping)
        try:
            yield from mapping.outcomes(progress)
        finally:
            mapping.stop()
            self._maps.remove(mapping)


def _check_address(settings: EngineSettings) -> None:
    """Raise ConfigError if the scheduler's address or its TLS files are invalid."""
    address = settings.cluster
    if address is None:
        return
    if address.startswith("tls://"):
        files = {"tls_ca": settings.tls_ca, "tls_cert": settings.tls_cert, "tls_key": settings.tls_key}
        missing = [name for name, path in files.items() if path is None]
        if missing:
            raise ConfigError(
                f"engine.{', engine.'.join(missing)} missing",
                f"the scheduler at {address} requires mutual TLS authentication",
                "Give the certificate files provided by its administrator",
                code="tls-files-missing",
            )
        for name, path in files.items():
            if path is not None and not path.is_file():
                raise ConfigError(
                    f"{path.name}: no such file", f"set in engine.{name}", "Correct the path", code="tls-file-not-found"
                )
    elif not address.startswith("tcp://"):
        raise ConfigError(
            f"engine.cluster = {address!r} is not a scheduler address",
            how="Use tls://host:port",
            code="invalid-scheduler-address",
        )
    elif not settings.insecure:
        raise ConfigError(
            f"engine.cluster = {address!r} is not encrypted",
            "anyone who can reach that port can run code as you",
            "Use a scheduler with TLS (tls://host:port), or pass --insecure in a trusted network",
            code="insecure-scheduler",
        )


def _open_workers(settings: EngineSettings) -> AbstractContextManager[Workers]:
    """Return workers as configured; leaving the context stops those that were started."""
    if settings.cluster is None and settings.batch.kind == "none":
        return closing(LocalWorkers(settings.workers or num_cores()))
    from selfvitmil.engine import cluster

    return cluster.open_workers(settings)


@contextmanager
def _sigterm_interrupts() -> Generator[None]:
    """Treat SIGTERM (sent by batch systems) like Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


# ---------------------------------------------------------------------------------------------------- one map


class _Map(Generic[T]):
    """One map over workers: assigns slides and handles dead workers."""

    def __init__(
        self,
        workers: Workers,
        function: Callable[[Any], T],
        items: Mapping[str, Any],
        stage: str,
        retries: int,
        admit: Callable[[str], bool],
    ):
        self._workers, self._function, self._items, self._admit = workers, function, items, admit
        self._stage, self._retries = stage, retries
        self._waiting = deque(items)
        self._suspects: deque[str] = deque()  # their worker died, perhaps for another reason
        self._suspected: set[str] = set()  # all names that were ever in `_suspects`
        self._running: dict[str, float] = {}  # name: when it was assigned
        self._results: deque[tuple[str, Result]] = deque()
        self._receive = self._results.append

    def outcomes(self, progress: Progress) -> Iterator[Outcome[T]]:
        last_alive = time.monotonic()
        while self._waiting or self._suspects or self._running or self._results:
            yield from self._assign()
            if self._workers.any_alive():
                last_alive = time.monotonic()
            else:
                self._workers.check_timeout(time.monotonic() - last_alive)
                progress.waiting(self._workers.waiting_message, time.monotonic() - last_alive)
            if not self._results:
                self._workers.wait(POLL_S)
            while self._results:
                yield from self._settle(*self._results.popleft())

    def stop(self) -> None:
        """Drop the remaining slides; interrupt those being processed and wait briefly for them."""
        self._waiting.clear()
        self._suspects.clear()
        if self._running:
            self._running.clear()
            self._workers.interrupt(self._receive)

    def _assign(self) -> Iterator[Outcome[T]]:
        for worker in self._workers.free() if self._waiting or self._suspects else []:
            job = None
            while job is None and (name := self._next()) is not None:
                try:
                    job = Job.of(name, self._function, self._items[name], self._stage, self._retries)
                except Exception as error:  # pickling runs code of the item, which may raise anything
                    yield Outcome(name, None, Failure.of(name, self._stage, error), 0.0)
            if job is not None:
                self._running[job.name] = time.monotonic()
                self._workers.submit(worker, job, self._receive)

    def _next(self) -> str | None:
        """Return the next slide to assign, None if there is nothing to assign at the moment."""
        while self._waiting:
            name = self._waiting.popleft()
            if self._admit(name):
                return name
        # On this machine a suspect runs alone: if memory runs out again, the slide is the cause.
        if self._suspects and not (self._workers.local and self._running):
            return self._suspects.popleft()
        return None

    def _settle(self, name: str, result: Result) -> Iterator[Outcome[T]]:
        began = self._running.pop(name)
        if isinstance(result, bytes):
            yield pickle.loads(result)
        elif result.exit_code in _AMBIGUOUS_EXIT_CODES and name not in self._suspected:
            self._suspected.add(name)
            self._suspects.append(name)
        else:
            failure = Failure.of(name, self._stage, _death(name, result))
            yield Outcome(name, None, failure, time.monotonic() - began)


_AMBIGUOUS_EXIT_CODES = (None, 0, -signal.SIGKILL, -signal.SIGTERM)
"""Exit codes that do not show whether the slide was the cause."""
_CRASHES = ("SIGSEGV", "SIGBUS", "SIGABRT", "SIGILL", "SIGFPE", "SIGTRAP", "SIGSYS")


def _death(name: str, died: WorkerDied) -> EngineError:
    """Return the error of a slide whose worker died of it."""
    what = f"{name}: its worker process died while processing this slide"
    memory = "Close other programs, use a machine with more memory or request more memory for the jobs"
    if died.exit_code is None:
        why = "twice, without an exit code; possibly out of memory, or at the time limit of its job"
        return EngineError(what, why, memory, code="worker-died")
    sign = {-member.value: member.name for member in signal.Signals}.get(died.exit_code, f"status {died.exit_code}")
    if sign in ("SIGKILL", "SIGTERM"):
        why = f"twice, the second time with no other slide running ({sign}); possibly out of memory"
        return EngineError(what, why, memory, code="worker-killed")
    if sign == "SIGALRM":
        return EngineError(
            what,
            "reading one of its files did not end",
            "Remove its files in tiles/ and bags/ and run the same command again",
            code="worker-hung",
        )
    if sign in _CRASHES:
        return EngineError(
            what,
            f"it crashed in native code ({sign})",
            "Open the slide in another viewer to check whether it is damaged; if so, copy or scan it again",
            code="worker-crashed",
        )
    return EngineError(
        what, f"it ended with {sign}", "Please report this, with the slide's format", code="worker-exited"
    )
