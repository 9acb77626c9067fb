"""One map over workers: assign slides to workers and handle dead workers."""

from __future__ import annotations

import pickle
import queue
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from selfvitmil import __version__
from selfvitmil.engine.progress import Progress
from selfvitmil.engine.work import Outcome
from selfvitmil.engine.workers import POLL_S, Result, Workers, first_line, is_loss
from selfvitmil.errors import EngineError
from selfvitmil.store.failures import Failure

if TYPE_CHECKING:
    from distributed import Future

T = TypeVar("T")

_TASK_S = 0.2
"""Minimum duration of a task: its worker waits about 10 ms for the next."""
_TASK_S_PER_WORKER = 0.02
"""Minimum duration per worker, for the scheduler: a task costs it about 5 ms, so it handles 50 per second at most."""
_MOST_SLIDES = 16
"""Maximum number of slides in one task."""


@dataclass(frozen=True)
class _Task:
    """Slides sent to a worker together: one, or a few if they are quick."""

    names: list[str]
    address: str
    future: Future
    began: float


class Run(Generic[T]):
    """One map over workers."""

    def __init__(
        self, workers: Workers, function: Callable[[Any], T], items: Mapping[str, Any], stage: str, retries: int
    ):
        self._workers = workers
        self._function = function
        self._items = items
        self._stage = stage
        self._retries = retries
        self._waiting = deque(items)
        self._singles: deque[str] = deque()  # from a task of several slides whose worker died
        self._suspects: deque[str] = deque()  # their worker died, perhaps for another reason
        self._suspected: set[str] = set()  # all names that were ever in `_suspects`
        self._running: dict[str, _Task] = {}  # by key of the future
        self._finished: queue.SimpleQueue[tuple[str, Result]] = queue.SimpleQueue()
        self._recent_s: deque[float] = deque(maxlen=32)

    def outcomes(self, progress: Progress) -> Iterator[Outcome[T]]:
        last_alive = time.monotonic()
        while self._waiting or self._singles or self._suspects or self._running:
            alive = self._workers.alive()
            if alive:
                last_alive = time.monotonic()
            else:
                self._workers.check_timeout(time.monotonic() - last_alive)
                progress.waiting(self._workers.waiting_message, time.monotonic() - last_alive)
            yield from self._hand_out(alive)
            try:
                key, result = self._finished.get(timeout=POLL_S if alive else 0.05)
            except queue.Empty:
                pass
            else:
                yield from self._settle(key, result)
            for task in [task for task in self._running.values() if task.address not in alive]:
                yield from self._lost(task)

    def stop(self) -> None:
        """Drop the remaining slides; interrupt those being processed and wait briefly for them."""
        tasks, self._running = self._running, {}
        for line in (self._waiting, self._singles, self._suspects):
            line.clear()
        if tasks:
            self._workers.interrupt({task.address: task.future for task in tasks.values()})

    # ------------------------------------------------------------------------------------- assigning

    def _hand_out(self, alive: set[str]) -> Iterator[Outcome[T]]:
        for address in [address for address in alive if address not in self._workers.busy]:
            jobs: list[tuple[str, bytes]] = []
            while not jobs and (names := self._next(len(alive))):
                for name in names:
                    try:
                        jobs.append((name, self._pickled(name)))
                    except Exception as error:  # pickling runs code of the item, which may raise anything
                        yield Outcome(name, None, Failure.of(name, self._stage, error), 0.0)
            if jobs:
                future = self._workers.submit(address, jobs, self._stage, self._retries, self._finished.put)
                self._running[str(future.key)] = _Task([name for name, _ in jobs], address, future, time.monotonic())

    def _pickled(self, name: str) -> bytes:
        import cloudpickle

        return cloudpickle.dumps((self._function, self._items[name]))

    def _next(self, num_workers: int) -> list[str]:
        """Return the names for the next task; empty if there is nothing to assign at the moment."""
        if self._singles:
            return [self._singles.popleft()]
        if self._waiting:
            return [self._waiting.popleft() for _ in range(self._num_together(num_workers))]
        # On this machine a suspect runs alone: if memory runs out again, the slide is the cause.
        if self._suspects and not (self._workers.local and self._running):
            return [self._suspects.popleft()]
        return []

    def _num_together(self, num_workers: int) -> int:
        """Return how many waiting slides the next task gets, based on the slowest recent one."""
        slowest = max(self._recent_s, default=float("inf"))
        quick = int(max(_TASK_S, _TASK_S_PER_WORKER * num_workers) / max(slowest, 1e-4))
        # Near the end tasks shrink to one slide, so that no worker is left with more than its share.
        return max(1, min(_MOST_SLIDES, quick, len(self._waiting) // (4 * num_workers)))

    # ------------------------------------------------------------------------------------- collecting

    def _settle(self, key: str, result: Result) -> Iterator[Outcome[T]]:
        task = self._running.get(key)
        if task is None:
            return  # dropped before
        if isinstance(result, list):
            del self._running[key]
            self._singles.extend(task.names[len(result) :])  # interrupted by another client of the same workers
            for pickled in result:
                outcome: Outcome[T] = pickle.loads(pickled)
                self._recent_s.append(outcome.seconds)
                yield outcome
        elif is_loss(result):
            yield from self._lost(task)
        else:  # errors of a slide are never reported this way
            raise EngineError(
                "the cluster's workers cannot run selfvitmil",
                first_line(result),
                f"Install selfvitmil {__version__} in the environment of the scheduler and of the workers",
                code="worker-environment",
            )

    def _lost(self, task: _Task) -> Iterator[Outcome[T]]:
        """Handle a worker that died or left: its slide has failed, or is retried."""
        del self._running[str(task.future.key)]
        task.future.cancel()
        exit_code = self._workers.exit_code(task.address)
        self._workers.forget(task.address)
        if len(task.names) > 1:
            self._singles.extend(task.names)
            return
        [name] = task.names
        if exit_code in _AMBIGUOUS_EXIT_CODES and name not in self._suspected:
            self._suspected.add(name)
            self._suspects.append(name)
        else:
            failure = Failure.of(name, self._stage, _worker_died(name, exit_code))
            yield Outcome(name, None, failure, time.monotonic() - task.began)


_AMBIGUOUS_EXIT_CODES = (None, 0, 255, -signal.SIGKILL, -signal.SIGTERM)
"""Exit codes that do not show whether the slide was the cause (255: reaped by another process)."""
_CRASHES = ("SIGSEGV", "SIGBUS", "SIGABRT", "SIGILL", "SIGFPE", "SIGTRAP", "SIGSYS")


def _worker_died(name: str, exit_code: int | None) -> EngineError:
    what = f"{name}: its worker process died while processing this slide"
    memory = "Close other programs, use a machine with more memory or request more memory for the jobs"
    if exit_code in (None, 255):
        why = "twice, without an exit code; possibly out of memory, or at the time limit of its job"
        return EngineError(what, why, memory, code="worker-died")
    sign = {-member.value: member.name for member in signal.Signals}.get(exit_code, f"status {exit_code}")
    if sign in ("SIGKILL", "SIGTERM"):
        why = f"twice, the second time with no other slide running ({sign}); possibly out of memory"
        return EngineError(what, why, memory, code="worker-killed")
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
