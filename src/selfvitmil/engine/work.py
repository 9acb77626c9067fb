"""The work on one slide with its retries, and worker processes on this machine.

A local worker is a spawned process at the end of a pipe. It uses one thread and has one slide at a time; when it dies,
another one is started. SIGTERM interrupts its slide with an exception, so that `finally` clauses clean up.
"""

from __future__ import annotations

import errno
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Generator, ItemsView, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing import connection, resource_tracker
from typing import Any, Generic, Protocol, TypeVar

from selfvitmil.errors import EngineError
from selfvitmil.store.failures import Failure

T = TypeVar("T")
Item = TypeVar("Item")


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """Result for one slide: `failure` is None on success, and then `value` is what the function returned."""

    name: str
    value: T | None
    failure: Failure | None
    seconds: float
    """Processing time, including retries."""


# ---------------------------------------------------------------------------------------------------- retries

_FIRST_PAUSE_S = 1.0

_TRANSIENT = "EIO ESTALE EAGAIN EBUSY EINTR ETIMEDOUT EHOSTDOWN EHOSTUNREACH ENETDOWN ENETRESET ENETUNREACH ENOTCONN"
TRANSIENT_ERRNOS = {getattr(errno, name) for name in (*_TRANSIENT.split(), "ECONNREFUSED")}
"""Errors of network drives that may go away; ConnectionError and TimeoutError count as well."""


def is_transient(error: BaseException | None) -> bool:
    """Return whether a retry can help: the error or one of its causes is a drive failure or has `.transient = True`.

    Causes are `__cause__` and `__context__`, also with `from None`, which hides them only from the traceback. Our own
    errors without such a cause (a damaged file, no tissue) would occur again, and so would a missing file, a full disk
    and missing permissions.
    """
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        if isinstance(error, ConnectionError | TimeoutError) or getattr(error, "transient", False):
            return True
        if isinstance(error, OSError) and error.errno in TRANSIENT_ERRNOS:
            return True
        seen.append(error)
        error = error.__cause__ or error.__context__
    return False


def attempt(
    function: Callable[[Item], T], name: str, item: Item, stage: str, retries: int, tries: int = 0
) -> Outcome[T]:
    """Process one slide, with retries where they can help; `tries` were made before."""
    began = time.perf_counter()
    while True:
        tries += 1
        try:
            return Outcome(name, function(item), None, time.perf_counter() - began)
        except (Exception, SystemExit) as error:
            if tries > retries or not is_transient(error):
                return Outcome(name, None, _failure(name, stage, error, tries), time.perf_counter() - began)
        time.sleep(_FIRST_PAUSE_S * 2 ** (tries - 1))


Stream = Callable[[Mapping[str, Item]], Iterator[tuple[str, T | Exception]]]
"""Processes many slides in one process: yields each by its name, with the result or the error. It takes the slides from
`items()` as it goes, once."""


class Admitted(Mapping[str, Item]):
    """A mapping whose `items()` asks for every item, when it is reached, whether to yield it."""

    def __init__(self, items: Mapping[str, Item], admit: Callable[[str], bool]):
        self._items, self._admit = items, admit

    def __getitem__(self, name: str) -> Item:
        return self._items[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def items(self) -> ItemsView[str, Item]:
        return _AdmittedItems(self._items, self._admit)


class _AdmittedItems(ItemsView[str, Item]):
    def __init__(self, items: Mapping[str, Item], admit: Callable[[str], bool]):
        super().__init__(items)
        self._all, self._admit = items, admit

    def __iter__(self) -> Iterator[tuple[str, Item]]:
        return ((name, item) for name, item in self._all.items() if self._admit(name))


def attempt_all(
    stream: Stream[Item, T], function: Callable[[Item], T], items: Mapping[str, Item], stage: str, retries: int
) -> Iterator[Outcome[T]]:
    """Process slides by `stream`; where a retry can help, by `function` one by one after all others."""
    again: list[str] = []
    began = time.perf_counter()
    for name, result in stream(items):
        seconds, began = time.perf_counter() - began, time.perf_counter()
        if not isinstance(result, Exception):
            yield Outcome(name, result, None, seconds)
        elif retries and is_transient(result):
            again.append(name)
        else:
            yield Outcome(name, None, Failure.of(name, stage, result), seconds)
    for name in again:
        yield attempt(function, name, items[name], stage, retries, tries=1)


def _failure(name: str, stage: str, error: BaseException, tries: int) -> Failure:
    if error.__traceback__ is not None:  # drop our own frame
        error = error.with_traceback(error.__traceback__.tb_next)
    failure = Failure.of(name, stage, error)
    return replace(failure, reason=f"{failure.reason} (tried {tries} times)") if tries > 1 else failure


# ---------------------------------------------------------------------------------------------------- workers


@dataclass(frozen=True)
class Job:
    """One slide for a worker."""

    name: str
    payload: bytes
    """Function and item, pickled: a worker unpickles them where it can report an error."""
    stage: str
    retries: int

    @classmethod
    def of(cls, name: str, function: Callable[[Item], Any], item: Item, stage: str, retries: int) -> Job:
        """Return a job; raise whatever pickling the item raises."""
        import cloudpickle  # pyright: ignore[reportMissingTypeStubs]

        pickler: Any = cloudpickle
        return cls(name, pickler.dumps((function, item)), stage, retries)

    def run(self) -> bytes:
        """Process the slide in this process; return its Outcome, pickled."""
        try:
            function, item = pickle.loads(self.payload)
            return pickle.dumps(attempt(function, self.name, item, self.stage, self.retries))
        except Exception as error:  # the job cannot be unpickled here, or its value cannot be pickled
            return pickle.dumps(Outcome(self.name, None, Failure.of(self.name, self.stage, error), 0.0))


@dataclass(frozen=True)
class WorkerDied:
    """What a worker gave instead of an outcome."""

    exit_code: int | None
    """As in subprocess; None if unknown."""


Result = bytes | WorkerDied
"""Of a job: its Outcome, pickled, or the death of its worker."""
Receiver = Callable[[tuple[str, Result]], None]
"""Gets the name of a job and its result."""


class Stopped(BaseException):
    """Raised inside the work on a slide when the run is interrupted; not caught by `except Exception`."""


class Workers(Protocol):
    """Workers of one kind. All methods are called by one thread."""

    local = False
    waiting_message = "waiting for workers of the cluster"
    """Message for the user while there is no worker."""

    def ask_for(self, number: int) -> None:
        """Request workers for this many slides, within the limits of the settings."""

    def any_alive(self) -> bool:
        """Return whether there is any worker."""
        ...

    def check_timeout(self, seconds: float) -> None:
        """Raise EngineError if there has been no worker for too long."""

    def free(self) -> list[str]:
        """Return the workers that have no slide."""
        ...

    def submit(self, worker: str, job: Job, receive: Receiver) -> None:
        """Run a job on a free worker; `receive` gets the result during a later `wait`."""

    def wait(self, seconds: float) -> None:
        """Wait for results and pass them on; return after `seconds` at the latest."""

    def interrupt(self, receive: Receiver) -> None:
        """Stop the jobs that were submitted with this receiver, which gets no result any more."""


# ---------------------------------------------------------------------------------------------------- on this machine

ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "NUMEXPR_NUM_THREADS": "1",
    "VECLIB_MAXIMUM_THREADS": "1",
}
"""One thread per worker: there is already one worker per core."""

_START_S = 60.0
"""Timeout for starting a worker."""
_TIDY_S = 1.0
"""Time for the `finally` clauses of interrupted slides."""


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Process:
    """One worker process and our end of its pipe."""

    def __init__(self) -> None:
        self.pipe, theirs = multiprocessing.Pipe()
        self.process = multiprocessing.get_context("spawn").Process(target=_serve, args=(theirs,), daemon=True)
        self.started = False
        self.job: tuple[str, Receiver] | None = None
        with theirs, _settings_for_children(), script_not_imported():
            self.process.start()


class LocalWorkers(Workers):
    """Up to `most` worker processes of this machine, started on demand, by the number of their pipe."""

    local = True
    waiting_message = "starting a worker"

    def __init__(self, most: int):
        self._most = most
        self._number = 0
        self._processes: dict[str, _Process] = {}
        self._failed_starts = 0

    def ask_for(self, number: int) -> None:
        self._number = max(self._number, min(number, self._most))

    def any_alive(self) -> bool:
        return any(process.started for process in self._processes.values())

    def check_timeout(self, seconds: float) -> None:
        died = self._failed_starts >= self._number
        if died or seconds > _START_S:
            raise EngineError(
                "the worker processes failed to start",
                "they died while starting" if died else f"none started within {_START_S:.0f} s",
                "Check whether memory, disk or the number of processes is at its limit (`--workers 0` starts none)",
                code="workers-not-started",
            )

    def free(self) -> list[str]:
        while len(self._processes) + self._failed_starts < self._number:
            process = _Process()
            self._processes[str(process.pipe.fileno())] = process
        return [name for name, process in self._processes.items() if process.started and process.job is None]

    def submit(self, worker: str, job: Job, receive: Receiver) -> None:
        process = self._processes[worker]
        process.job = job.name, receive
        with suppress(OSError):  # it has just died, as `wait` will find
            process.pipe.send(job)

    def wait(self, seconds: float) -> None:
        pipes = {process.pipe: worker for worker, process in self._processes.items()}
        for pipe in connection.wait(list(pipes), seconds):
            worker = pipes[pipe]  # pyright: ignore[reportArgumentType]
            process = self._processes[worker]
            try:
                message = process.pipe.recv_bytes()
            except (EOFError, OSError):
                self._remove_dead(worker)
                continue
            if process.job is None:
                process.started, self._failed_starts = True, 0
            else:
                (name, receive), process.job = process.job, None
                receive((name, message))

    def _remove_dead(self, worker: str) -> None:
        process = self._processes.pop(worker)
        process.pipe.close()
        process.process.join(_TIDY_S)
        if not process.started:
            self._failed_starts += 1
        if process.job is not None:
            name, receive = process.job
            receive((name, WorkerDied(process.process.exitcode)))

    def interrupt(self, receive: Receiver) -> None:
        busy = [worker for worker, process in self._processes.items() if process.job and process.job[1] == receive]
        self._stop([self._processes.pop(worker) for worker in busy])

    def close(self) -> None:
        """Stop all processes."""
        self._stop(list(self._processes.values()))
        self._processes.clear()

    def _stop(self, processes: list[_Process]) -> None:
        for process in processes:
            process.process.terminate()
        until = time.monotonic() + _TIDY_S
        for process in processes:
            process.process.join(max(0.0, until - time.monotonic()))
            process.process.kill()
            process.process.join()
            process.pipe.close()


@contextmanager
def script_not_imported() -> Generator[None]:
    """Start processes of `multiprocessing` that do not import the user's script, whose functions cloudpickle sends.

    They would run it a second time, and a script without `if __name__ == "__main__":` would start itself in each.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")  # has no file, so there is nothing to import
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextmanager
def _settings_for_children() -> Generator[None]:
    """Start processes with one thread, and without Ctrl-C: a terminal sends it to all, and we stop them ourselves."""
    before = {name: os.environ.get(name) for name in ONE_THREAD}
    resource_tracker.ensure_running()  # otherwise multiprocessing starts it later and unblocks SIGINT
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    os.environ.update(ONE_THREAD)  # numpy reads them when it is imported
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


# ---------------------------------------------------------------------------------------------------- in a process


def _serve(pipe: connection.Connection[bytes, Job]) -> None:
    """Process the jobs that come through the pipe until it closes."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        signal.signal(signal.SIGTERM, _stop)
        pipe.send_bytes(b"started")
        while True:
            job = pipe.recv()
            pipe.send_bytes(job.run())
    except (EOFError, OSError):
        pass
    except Stopped:
        signal.raise_signal(signal.SIGTERM)  # end as the signal would have ended it


def _stop(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    raise Stopped


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
