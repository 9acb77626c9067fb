"""Engine: the interface for the stages. It starts workers on demand and stops them at the end."""

from __future__ import annotations

import logging
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import FrameType, TracebackType
from typing import Any, TypeVar, cast

from selfvitmil.engine.batch import batch_workers
from selfvitmil.engine.external import check_address, external_workers
from selfvitmil.engine.local import local_workers, num_cores
from selfvitmil.engine.progress import Progress, show_progress
from selfvitmil.engine.run import Run
from selfvitmil.engine.work import Outcome, attempt
from selfvitmil.engine.workers import Workers
from selfvitmil.settings import EngineSettings

T = TypeVar("T")
Item = TypeVar("Item")


class Engine:
    """Workers for one command, started at the first map with work to do and shared by all its stages.

    with Engine(settings.engine) as engine:
        for outcome in engine.map(tile_slide, jobs, stage="tile", unit="tiles", count=len): ...

    Leaving the block stops the workers. Ctrl-C and SIGTERM raise KeyboardInterrupt in the calling thread; slides being
    processed are then asked to stop, so that they can remove their temporary files, and their processes are killed a
    second later. A slide stuck in native code may leave a `.part` file, which the next run removes.
    """

    def __init__(self, settings: EngineSettings):
        check_address(settings)
        self._settings = settings
        self._stack = ExitStack()
        self._open = False
        self._workers: Workers | None = None
        self._runs: list[Run[Any]] = []

    def __enter__(self) -> Engine:
        self._stack.enter_context(_sigterm_interrupts())
        self._open = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._open = False
        with self._stack:
            for run in self._runs:
                run.stop()
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
    ) -> Iterator[Outcome[T]]:
        """Apply `function` to every item; yield each outcome as it completes, every name exactly once.

        `function` is defined at the top of a module (or is a `functools.partial` of such a one); it, the items and its
        results must be picklable. It may be called twice for a slide whose worker died, so its writes must be atomic.
        `stage` and `items_are` are shown in failures and progress. `count` returns how many of `unit` (tiles, say) a
        value represents, for the rate shown in the progress.
        """
        if not items:
            return
        with show_progress(stage, unit, total=len(items), items_are=items_are) as progress:
            for outcome in self._outcomes(function, items, stage, progress):
                failed = outcome.failure is not None
                amount = 1 if count is None else 0 if failed else count(cast(T, outcome.value))
                progress.advance(failed, amount)
                yield outcome

    def _outcomes(
        self, function: Callable[[Item], T], items: Mapping[str, Item], stage: str, progress: Progress
    ) -> Iterator[Outcome[T]]:
        settings = self._settings
        if settings.workers == 0:
            for name, item in items.items():
                yield attempt(function, name, item, stage, settings.retries)
            return
        assert self._open, "workers need a `with` block that stops them"
        if self._workers is None:
            self._workers = self._stack.enter_context(_open_workers(settings))
        self._workers.ask_for(len(items))
        run: Run[T] = Run(self._workers, function, items, stage, settings.retries)
        self._runs.append(run)
        try:
            yield from run.outcomes(progress)
        finally:
            run.stop()
            self._runs.remove(run)


@contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """Treat SIGTERM (sent by batch systems) like Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


_DASK = {
    "distributed.scheduler.http.routes": [],
    "distributed.worker.http.routes": [],
    "distributed.scheduler.work-stealing": False,
    "distributed.scheduler.active-memory-manager.start": False,
    "distributed.scheduler.worker-ttl": None,  # a slide may block the interpreter for minutes
    "distributed.worker.profile.enabled": False,
    "distributed.diagnostics.nvml": False,
}


@contextmanager
def _open_workers(settings: EngineSettings) -> Iterator[Workers]:
    """Start workers as configured; stop them and clean up afterwards."""
    import dask.config
    import distributed  # noqa: F401  (its loggers must exist to be silenced)

    # dask drops a worker with its nanny if it stays away this long after a death. A local nanny always restarts it; a
    # batch job may be gone, and is then replaced.
    patience = "2 minutes" if settings.batch.kind != "none" else "1000 days"
    with ExitStack() as stack:
        folder = tempfile.TemporaryDirectory(prefix="selfvitmil-", ignore_cleanup_errors=True)
        own = {"temporary-directory": stack.enter_context(folder), "distributed.deploy.lost-worker-timeout": patience}
        stack.enter_context(dask.config.set({**_DASK, **own}))
        stack.enter_context(_quiet_dask())
        if settings.cluster is not None:
            yield stack.enter_context(external_workers(settings))
        elif settings.batch.kind != "none":
            yield stack.enter_context(batch_workers(settings.batch))
        else:
            yield stack.enter_context(local_workers(settings.workers or num_cores()))


@contextmanager
def _quiet_dask() -> Iterator[None]:
    """Silence dask's log: a dead worker is reported once, by us, with its slide."""
    names = [name for name in logging.root.manager.loggerDict if name.split(".")[0] in ("distributed", "tornado")]
    levels = {name: logging.getLogger(name).level for name in {*names, "distributed", "tornado", "asyncio"}}
    for name in levels:
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
