"""Workers of a dask cluster: of a scheduler that is already running, or as jobs of Slurm, PBS or LSF.

Workers at an address are only used, never started or stopped. Jobs of a batch system are submitted on demand through
dask-jobqueue: one job, one core, one slide at a time. They read the TLS key of the run from a private folder in the
home directory, which all nodes of a cluster share. dask-jobqueue does not resubmit a rejected job; we do, since a busy
batch system rejects jobs occasionally.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import ctypes
import functools
import logging
import math
import os
import queue
import shutil
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dask.config
from distributed import Client, Future, KilledWorker
from distributed.core import Status
from distributed.security import Security

from selfvitmil import __version__
from selfvitmil.engine.work import ONE_THREAD, Job, Receiver, Result, Stopped, WorkerDied, Workers
from selfvitmil.errors import ConfigError, EngineError
from selfvitmil.settings import ClusterSettings, EngineSettings

_POLL_S = 0.5
"""Interval at which the scheduler is asked for its workers."""
_CONNECT_S = 8
_RESULT_S = 30.0
"""Timeout for the result of a finished task; its worker may have died in between."""
_TIDY_S = 1.0
"""Time for the `finally` clauses of interrupted slides."""


@contextmanager
def open_workers(settings: EngineSettings) -> Iterator[Workers]:
    """Yield the workers of the configured cluster; stop those that were started."""
    options = {
        "distributed.scheduler.http.routes": [],
        "distributed.worker.http.routes": [],
        "distributed.scheduler.work-stealing": False,
        "distributed.scheduler.active-memory-manager.start": False,
        "distributed.scheduler.worker-ttl": None,  # a slide may block the interpreter for minutes
        "distributed.diagnostics.nvml": False,
        "distributed.deploy.lost-worker-timeout": "2 minutes",  # then the job of a dead worker is replaced
    }
    opened = _external(settings) if settings.cluster is not None else _batch(settings.batch)
    with dask.config.set(options), _quiet_dask(), opened as workers:
        yield workers


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


@contextmanager
def _external(settings: EngineSettings) -> Iterator[Workers]:
    """Yield the workers at `settings.cluster`; they keep running afterwards."""
    address = str(settings.cluster)
    security = None
    if address.startswith("tls://"):
        security = Security(
            require_encryption=True,
            tls_ca_file=str(settings.tls_ca),
            tls_client_cert=str(settings.tls_cert),
            tls_client_key=str(settings.tls_key),
        )
    try:
        client = Client(address, security=security, timeout=_CONNECT_S, set_as_default=False)
    except (OSError, ValueError) as error:
        raise EngineError(
            f"the scheduler at {address} cannot be reached",
            _first_line(error),
            "Check that it is running, that its port is reachable and that the certificates match",
            code="scheduler-unreachable",
        ) from None
    with client:
        yield ClusterWorkers(client)


def _first_line(error: BaseException) -> str:
    """Return the first line of another library's exception."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


# ---------------------------------------------------------------------------------------------------- workers


class ClusterWorkers(Workers):
    """Workers of a dask scheduler, by address. Every task names its worker, so dask queues nothing behind a slide."""

    def __init__(self, client: Client):
        self._client = client
        self._run = uuid.uuid4().hex
        self._alive: set[str] = set()
        self._asked = float("-inf")
        self._tasks: dict[str, tuple[Future, str, Receiver]] = {}  # by address
        self._finished: queue.SimpleQueue[tuple[str, Future, Any]] = queue.SimpleQueue()  # filled by dask's threads

    def any_alive(self) -> bool:
        return bool(self._addresses())

    def free(self) -> list[str]:
        return [address for address in self._addresses() if address not in self._tasks]

    def _addresses(self) -> set[str]:
        """Return the addresses of the workers, at most `_POLL_S` old."""
        if time.monotonic() - self._asked >= _POLL_S:
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

    def submit(self, worker: str, job: Job, receive: Receiver) -> None:
        future = self._client.submit(run_job, __version__, self._run, job, workers=[worker], pure=False)
        self._tasks[worker] = future, job.name, receive
        future.add_done_callback(functools.partial(self._collect, worker))

    def _collect(self, address: str, future: Future) -> None:
        """Fetch the result of a task that has ended; called by a thread of dask."""
        result: Any = concurrent.futures.CancelledError()
        if future.status in ("finished", "error"):  # otherwise there is nothing to wait for
            try:
                result = future.result(timeout=_RESULT_S)
            except BaseException as error:  # a cancellation is not an Exception
                result = error
        self._finished.put((address, future, result))

    def wait(self, seconds: float) -> None:
        with suppress(queue.Empty):
            address, future, result = self._finished.get(timeout=seconds)
            if address in self._tasks and self._tasks[address][0] is future:  # otherwise dropped before
                self._end(address, _as_result(result))
        for address in self._tasks.keys() - self._addresses():
            self._end(address, WorkerDied(None))

    def _end(self, address: str, result: Result) -> None:
        future, name, receive = self._tasks.pop(address)
        if isinstance(result, WorkerDied):
            self._alive.discard(address)
            future.cancel()
        receive((name, result))

    def interrupt(self, receive: Receiver) -> None:
        addresses = [address for address, task in self._tasks.items() if task[2] is receive]
        futures = [self._tasks.pop(address)[0] for address in addresses]
        # In a thread, because a worker blocked in native code may never answer.
        ask = functools.partial(self._client.run, stop_jobs, self._run, workers=addresses, on_error="ignore")
        threading.Thread(target=_ignoring_errors, args=(ask,), daemon=True).start()
        until = time.monotonic() + _TIDY_S
        while not all(future.done() for future in futures) and time.monotonic() < until:
            time.sleep(0.02)
        _ignoring_errors(functools.partial(self._client.cancel, futures, force=True))


def _as_result(result: Any) -> Result:
    """Return what a task gave; raise EngineError for an exception outside the work on its slide."""
    if isinstance(result, bytes):
        return result
    if isinstance(result, KilledWorker | TimeoutError | asyncio.CancelledError | concurrent.futures.CancelledError):
        return WorkerDied(None)
    raise EngineError(
        "the cluster's workers cannot run selfvitmil",
        _first_line(result),
        f"Install selfvitmil {__version__} in the environment of the scheduler and of the workers",
        code="worker-environment",
    )


def _ignoring_errors(function: Callable[[], object]) -> None:
    with suppress(Exception):
        function()


# ---------------------------------------------------------------------------------------------------- in a worker

_threads: dict[int, str] = {}
"""Threads of this worker that process a slide -> the run that it belongs to."""
_threads_lock = threading.Lock()


def run_job(version: str, run: str, job: Job) -> bytes | None:
    """Process one slide in a worker; return its pickled Outcome, None if `stop_jobs` interrupted it."""
    if version != __version__:
        raise EngineError(f"selfvitmil {__version__} on the worker, {version} here", code="version-mismatch")
    thread = threading.get_ident()
    outcome = None
    with suppress(Stopped):
        with _threads_lock:
            _threads[thread] = run
        outcome = job.run()
        with _threads_lock:  # otherwise `Stopped` could arrive after `suppress`
            del _threads[thread]
    _threads.pop(thread, None)
    return outcome


def stop_jobs(run: str) -> None:
    """Interrupt the slides of a run in this worker with an exception, so that their `finally` clauses clean up."""
    with _threads_lock:
        for thread in [thread for thread, owner in _threads.items() if owner == run]:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(Stopped))


# ---------------------------------------------------------------------------------------------------- batch systems

_BATCH = {  # kind: dask-jobqueue's class, the command that submits
    "slurm": ("SLURMCluster", "sbatch"),
    "pbs": ("PBSCluster", "qsub"),
    "lsf": ("LSFCluster", "bsub"),
}

_AGAIN_S = 60.0
"""Delay before a rejected job is resubmitted."""
_PATIENCE_S = 600.0
"""How long all jobs may be rejected, with no worker left, once the batch system has accepted some. If it accepted none,
the error is raised at once: then the settings are wrong."""


@dataclass
class Answers:
    """Responses of the batch system to our jobs."""

    accepted: int = 0
    refused: dict[str, str] = field(default_factory=dict)
    """Job name -> reason, until the job is accepted."""


@contextmanager
def _batch(batch: ClusterSettings) -> Iterator[Workers]:
    """Yield workers whose jobs are submitted on demand and cancelled at the end."""
    submit = _BATCH[batch.kind][1]
    if shutil.which(submit) is None:
        raise EngineError(
            f"{batch.kind}: command {submit} not found",
            "no job can be submitted from here",
            f"Run this on a machine of the cluster that has {submit}, or leave out engine.batch.kind to work here",
            code="batch-command-not-found",
        )
    answers = Answers()
    with ExitStack() as stack:
        folder = stack.enter_context(_shared_folder())
        cluster = stack.enter_context(_batch_cluster(batch, folder, answers))
        client = stack.enter_context(Client(cluster, security=cluster.security, set_as_default=False))
        yield BatchWorkers(client, cluster, batch, answers, folder)


class BatchWorkers(ClusterWorkers):
    """Workers as jobs of a batch system."""

    def __init__(self, client: Client, cluster: Any, batch: ClusterSettings, answers: Answers, folder: Path):
        super().__init__(client)
        self._cluster = cluster
        self._batch = batch
        self._answers = answers
        self._number = 0
        self._since: dict[str, float] = {}
        limit = time_limit_s(batch)
        self._useful_s = math.inf if limit is None else limit - _margin(limit)
        """Age at which a worker gets no more slides."""
        self.waiting_message = f"waiting for jobs of {batch.kind} to start (their logs are in {folder})"

    def free(self) -> list[str]:
        now = time.monotonic()
        return [each for each in super().free() if now - self._since.setdefault(each, now) < self._useful_s]

    def ask_for(self, number: int) -> None:
        if min(number, self._batch.jobs) > self._number:
            self._number = min(number, self._batch.jobs)
            # adapt, unlike scale, replaces a job that has reached its time limit
            self._cluster.adapt(minimum_jobs=self._number, maximum_jobs=self._number)

    def check_timeout(self, seconds: float) -> None:
        refused = list(self._answers.refused.values())
        if len(refused) >= self._number and seconds >= (_PATIENCE_S if self._answers.accepted else 0):
            raise EngineError(
                f"{self._batch.kind} rejects the job",
                refused[0],
                "Correct the settings under engine.batch",
                code="job-rejected",
            )


@contextmanager
def _shared_folder() -> Iterator[Path]:
    """Yield a private folder for the run's key; in the home directory, which all nodes of a cluster share."""
    cache = Path.home() / ".cache" / "selfvitmil"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        folder = tempfile.TemporaryDirectory(prefix="jobs-", dir=cache, ignore_cleanup_errors=True)
    except OSError as error:
        raise EngineError(
            "~/.cache/selfvitmil cannot be written",
            f"{error.strerror}, and the jobs read the key of this run from there",
            "Free space in your home directory, or correct its permissions",
            code="cache-not-writable",
        ) from None
    with folder:
        yield Path(folder.name)


def _batch_cluster(batch: ClusterSettings, folder: Path, answers: Answers) -> Any:
    """Return the dask-jobqueue cluster, without jobs yet."""
    try:
        import dask_jobqueue
    except ImportError:
        raise ConfigError(
            f"engine.batch.kind = {batch.kind!r} needs the package dask-jobqueue",
            "it is not installed",
            "Install it with: pip install 'selfvitmil[cluster]'",
            code="missing-package",
        ) from None
    cluster_class = getattr(dask_jobqueue, _BATCH[batch.kind][0])
    cluster: Any = None

    class RecordingJob(cluster_class.job_cls):
        """A job that records why the batch system rejected it, which dask-jobqueue only logs, and is resubmitted."""

        async def start(self) -> None:
            try:
                await super().start()
            except Exception as error:
                complaint = str(error).rpartition("stderr:")[2].split()
                answers.refused[self.name] = " ".join(complaint) or type(error).__name__
                self.status = Status.failed  # otherwise the cluster cannot be closed
                asyncio.get_running_loop().call_later(_AGAIN_S, self.make_way)
                raise
            answers.accepted += 1
            answers.refused.pop(self.name, None)

        def make_way(self) -> None:
            """Remove the job from dask's list, so that dask submits a new one."""
            if cluster is not None and cluster.workers.get(self.name) is self:
                del cluster.workers[self.name]

    try:
        cluster = cluster_class(job_cls=RecordingJob, **_options(batch, folder))
    except ValueError as error:  # such as an invalid amount of memory
        raise ConfigError(
            f"engine.batch: {_first_line(error)}",
            how="Correct the settings under engine.batch",
            code="invalid-batch-settings",
        ) from None
    return cluster


def _options(batch: ClusterSettings, folder: Path) -> dict[str, Any]:
    """Return the arguments of dask-jobqueue's cluster."""
    walltime = batch.walltime
    if batch.kind == "lsf" and walltime.count(":") == 2:
        walltime = walltime.rpartition(":")[0]  # LSF accepts hours and minutes only
    environment = {**ONE_THREAD, "DASK_DISTRIBUTED__WORKER__HTTP__ROUTES": "[]"}
    secure = {"security": _key_files(folder), "protocol": "tls://"}
    no_dashboard = {"dashboard": False, "dashboard_address": "127.0.0.1:0"}
    return {
        "cores": 1,
        "processes": 1,
        "memory": batch.memory,
        "walltime": walltime,
        "queue": batch.queue,
        "project" if batch.kind == "lsf" else "account": batch.account,
        "job_name": "selfvitmil",
        "job_extra_directives": list(batch.directives),
        "job_script_prologue": [*(f"export {name}={value}" for name, value in environment.items()), *batch.prologue],
        # The batch system enforces the memory limit; dask's own would pause a worker for ever.
        "worker_extra_args": [
            *("--memory-limit", "0", "--no-dashboard", "--dashboard-address", "127.0.0.1:0"),
            *_lifetime(batch),
        ],
        "log_directory": str(folder),
        "silence_logs": "critical",
        # A task is returned the first time its worker dies, and the engine decides.
        "scheduler_options": {**no_dashboard, **secure, "allowed_failures": 0},
        **secure,
    }


def _lifetime(batch: ClusterSettings) -> list[str]:
    """Return the options by which a worker ends by itself before its job is killed, and not all at once."""
    limit = time_limit_s(batch)
    if limit is None:
        return []
    margin = _margin(limit)
    return ["--lifetime", f"{limit - margin / 2:.0f}s", "--lifetime-stagger", f"{margin / 4:.0f}s"]


def _margin(limit_s: float) -> float:
    """Return how long before its time limit a job gets no more slides: the last one shall not look like a crash."""
    return min(0.1 * limit_s, 900.0)


def time_limit_s(batch: ClusterSettings) -> float | None:
    """Return the time limit of a job in seconds; None where it is written in an unknown way."""
    days, dash, clock = batch.walltime.rpartition("-")
    try:
        numbers, whole_days = [int(part) for part in clock.split(":")], int(days) if dash else 0
    except ValueError:
        return None
    # What a single number means, and the first of two: seconds of it.
    units = {"slurm": (3600, 3600) if dash else (60, 60), "pbs": (1, 60), "lsf": (60, 3600)}[batch.kind]
    if len(numbers) > 3:
        return None
    first = 3600 if len(numbers) == 3 else units[len(numbers) - 1]
    return 86400.0 * whole_days + sum(number * first / 60**k for k, number in enumerate(numbers))


def _key_files(folder: Path) -> Security:
    """Write a key and certificate for this run as private files in `folder`."""
    new = Security.temporary()
    files = {"ca": new.tls_ca_file, "cert": new.tls_worker_cert, "key": new.tls_worker_key}
    for name, content in files.items():
        descriptor = os.open(folder / f"{name}.pem", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(content)
    ca, cert, key = (str(folder / f"{name}.pem") for name in files)
    roles = ("client", "scheduler", "worker")
    return Security(
        require_encryption=True,
        tls_ca_file=ca,
        **{f"tls_{role}_cert": cert for role in roles},
        **{f"tls_{role}_key": key for role in roles},
    )
