"""One map over workers: which slide goes to which worker next, and what becomes of one whose worker died."""

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
"""How long a task should last at least: its worker waits about 10 ms for the next."""
_TASK_S_PER_WORKER = 0.02
"""The same for the scheduler, which a task costs about 5 ms: 50 of them a second, however many workers it serves."""
_MOST_SLIDES = 16
"""Slides in one task, where they are that quick."""


@dataclass(frozen=True)
class _Task:
    """Slides given to a worker together: one, or a few where they are quick."""

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
        self._singles: deque[str] = deque()  # were in a task of several whose worker died
        self._suspects: deque[str] = deque()  # their worker died on them, perhaps not by their fault
        self._suspected: set[str] = set()  # all that ever were in the line above
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
        """Forget what is left; ask the slides in work to stop and wait a moment for them to do so."""
        tasks, self._running = self._running, {}
        for line in (self._waiting, self._singles, self._suspects):
            line.clear()
        if tasks:
            self._workers.interrupt({task.address: task.future for task in tasks.values()})

    # ------------------------------------------------------------------------------------- giving

    def _hand_out(self, alive: set[str]) -> Iterator[Outcome[T]]:
        for address in [address for address in alive if address not in self._workers.busy]:
            jobs: list[tuple[str, bytes]] = []
            while not jobs and (names := self._next(len(alive))):
                for name in names:
                    try:
                        jobs.append((name, self._pickled(name)))
                    except Exception as error:  # pickling runs the item's own code, which may raise anything
                        yield Outcome(name, None, Failure.of(name, self._stage, error), 0.0)
            if jobs:
                future = self._workers.submit(address, jobs, self._stage, self._retries, self._finished.put)
                self._running[str(future.key)] = _Task([name for name, _ in jobs], address, future, time.monotonic())

    def _pickled(self, name: str) -> bytes:
        import cloudpickle

        return cloudpickle.dumps((self._function, self._items[name]))

    def _next(self, num_workers: int) -> list[str]:
        """Names for the next task; none when there is nothing to give at the moment."""
        if self._singles:
            return [self._singles.popleft()]
        if self._waiting:
            return [self._waiting.popleft() for _ in range(self._num_together(num_workers))]
        # On this machine a suspect runs with no other slide beside it: if memory fails again, it is the slide's own.
        if self._suspects and not (self._workers.local and self._running):
            return [self._suspects.popleft()]
        return []

    def _num_together(self, num_workers: int) -> int:
        """How many of those in line the next task gets, judged by the slowest of late."""
        slowest = max(self._recent_s, default=float("inf"))
        quick = int(max(_TASK_S, _TASK_S_PER_WORKER * num_workers) / max(slowest, 1e-4))
        # At the end of the line tasks shrink to one slide, so that no worker is left with more than its share.
        return max(1, min(_MOST_SLIDES, quick, len(self._waiting) // (4 * num_workers)))

    # ------------------------------------------------------------------------------------- taking

    def _settle(self, key: str, result: Result) -> Iterator[Outcome[T]]:
        task = self._running.get(key)
        if task is None:
            return  # given up before
        if isinstance(result, list):
            del self._running[key]
            self._singles.extend(task.names[len(result) :])  # stopped there, by someone else who shares the workers
            for pickled in result:
                outcome: Outcome[T] = pickle.loads(pickled)
                self._recent_s.append(outcome.seconds)
                yield outcome
        elif is_loss(result):
            yield from self._lost(task)
        else:  # what concerns one slide never comes this way
            raise EngineError(
                "the cluster's workers cannot do our work",
                first_line(result),
                f"Install selfvitmil {__version__} in the environment of the scheduler and of the workers",
            )

    def _lost(self, task: _Task) -> Iterator[Outcome[T]]:
        """The worker died on its slide, or left: the slide has failed, or gets a second chance."""
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
"""Exit codes that do not tell whether the slide was to blame (255: reaped by someone else)."""
_CRASHES = ("SIGSEGV", "SIGBUS", "SIGABRT", "SIGILL", "SIGFPE", "SIGTRAP", "SIGSYS")


def _worker_died(name: str, exit_code: int | None) -> EngineError:
    what = f"{name}: its worker process died while on this slide"
    memory = "Close other programs, use a machine with more memory or give the jobs more of it"
    if exit_code in (None, 255):
        return EngineError(what, "twice, and left no word; out of memory, or at the time limit of its job?", memory)
    sign = {-member.value: member.name for member in signal.Signals}.get(exit_code, f"status {exit_code}")
    if sign in ("SIGKILL", "SIGTERM"):
        return EngineError(what, f"twice, the second time with no slide beside it ({sign}); out of memory?", memory)
    if sign in _CRASHES:
        return EngineError(
            what,
            f"it crashed in native code ({sign})",
            "Open the slide in another viewer to see whether it is damaged, and copy or scan it again if so",
        )
    return EngineError(what, f"it ended with {sign}", "Please report this, with the slide's format")
