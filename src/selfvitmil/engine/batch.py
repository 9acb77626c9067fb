"""Workers as jobs of Slurm, PBS or LSF, through dask-jobqueue: one job, one core, one slide at a time.

The jobs read the TLS key of the run from a private folder in the home directory, which all nodes of a cluster share.
dask-jobqueue does not resubmit a rejected job; we do, since a busy batch system rejects jobs occasionally.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selfvitmil.engine.workers import ALLOWED_FAILURES, ONE_THREAD, Workers, first_line
from selfvitmil.errors import ConfigError, EngineError
from selfvitmil.settings import ClusterSettings

if TYPE_CHECKING:
    from distributed import Client

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
def batch_workers(batch: ClusterSettings) -> Iterator[Workers]:
    """Yield workers whose jobs are submitted on demand and cancelled at the end."""
    from distributed import Client

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
        cluster = _batch_cluster(batch, folder, answers)
        stack.callback(cluster.close)
        client = Client(cluster, security=cluster.security, set_as_default=False)
        stack.callback(client.close)
        yield _BatchWorkers(client, cluster, batch, answers, folder)


class _BatchWorkers(Workers):
    def __init__(self, client: Client, cluster: Any, batch: ClusterSettings, answers: Answers, folder: Path):
        super().__init__(client)
        self._cluster = cluster
        self._batch = batch
        self._answers = answers
        self._number = 0
        self.waiting_message = f"waiting for jobs of {batch.kind} to start (their logs are in {folder})"

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


def _key_files(folder: Path) -> Any:
    """Write a key and certificate for this run as private files in `folder`."""
    from distributed.security import Security

    made = Security.temporary()
    files = {"ca": made.tls_ca_file, "cert": made.tls_worker_cert, "key": made.tls_worker_key}
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


def _recording_job(job_class: Any, answers: Answers) -> Any:
    """Return a job class that records why the batch system rejected a job, which dask-jobqueue only logs, and resubmits
    it."""
    from distributed.core import Status

    class RecordingJob(job_class):
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
            cluster = self._cluster()
            if cluster is not None and cluster.workers.get(self.name) is self:
                del cluster.workers[self.name]

    return RecordingJob


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
    job_class = _recording_job(cluster_class.job_cls, answers)
    try:
        return cluster_class(job_cls=job_class, **_options(batch, folder))
    except ValueError as error:  # such as an invalid amount of memory
        raise ConfigError(
            f"engine.batch: {first_line(error)}",
            how="Correct the settings under engine.batch",
            code="invalid-batch-settings",
        ) from None


def _options(batch: ClusterSettings, folder: Path) -> dict[str, Any]:
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
        "worker_extra_args": ["--memory-limit", "0", "--no-dashboard", "--dashboard-address", "127.0.0.1:0"],
        "log_directory": str(folder),
        "silence_logs": "critical",
        "scheduler_options": {**no_dashboard, **secure, "allowed_failures": ALLOWED_FAILURES},
        **secure,
    }
