"""`sbatch`: write a script that submits a whole study to Slurm, as four jobs that wait for each other.

    tile      an array of shards (`run --shard`), on CPUs
    encoder   pretraining on the GPUs of one node; left out where an encoder is given
    embed     an array of shards, each with one GPU
    run       everything else, and what the arrays left undone

Each job may be killed at any moment: the next call of the same script does what is missing. A job that reaches its time
limit is warned five minutes earlier, ends by itself, and is submitted again.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from selfvitmil.commands.run import Request
from selfvitmil.errors import ConfigError
from selfvitmil.settings import ClusterSettings
from selfvitmil.stages.base import StageResult
from selfvitmil.stages.check import check_files, check_study
from selfvitmil.store.files import write_text
from selfvitmil.study import Study, encoder_source, remember_settings

WARNING_S = 300
"""Seconds between the warning of Slurm and the end of a job."""
MOST_REQUEUES = 20


@dataclass(frozen=True)
class Jobs:
    """How many machines to ask for."""

    shards: int = 10
    """Jobs of the array that tiles."""
    embed_shards: int = 1
    """Jobs of the array that embeds, each with one GPU."""
    gpus: int = 1
    """GPUs of the job that trains the encoder."""
    cpus: int = 4
    """CPUs of a job, and for each GPU."""
    gpu: str = "gpu"
    """What Slurm calls a GPU after `--gres=`: `gpu`, or `gpu:a100`."""


@dataclass(frozen=True)
class SbatchResult(StageResult):
    """The script that was written."""

    script: Path
    jobs: tuple[tuple[str, str], ...]
    """Name of every job, and its command."""


def sbatch(study: Study, request: Request, jobs: Jobs, typed: Mapping[str, Any] | None = None) -> SbatchResult:
    """Write `submit.sh` into the study; submits nothing."""
    check_study(study)
    check_files(study)
    if min(jobs.shards, jobs.embed_shards, jobs.gpus, jobs.cpus) < 1:
        raise ConfigError(
            "--shards, --embed-shards, --gpus and --cpus must be positive",
            how="Use at least 1 of each",
            code="invalid-number-of-jobs",
        )
    with study.lock("sbatch"):
        study.store_cohort()
        remember_settings(study.root, typed or {})
        study.layout.sbatch_logs.mkdir(exist_ok=True)
        steps = _steps(study, request, jobs)
        script = study.layout.sbatch_script
        write_text(script, _script(study, steps))
    shown = tuple((step.name, step.command) for step in steps)
    return SbatchResult(script, shown, notes=study.cohort_notes)


@dataclass(frozen=True)
class _Step:
    """One job or array of jobs."""

    name: str
    command: str
    cpus: int
    array: int = 0
    gres: str = ""
    """GPUs, as Slurm is asked for them."""
    needs_success: bool = False
    """Whether the job before must have succeeded; an array may have failed on single slides."""


def _steps(study: Study, request: Request, jobs: Jobs) -> list[_Step]:
    root = shlex.quote(str(study.root.resolve()))
    which: list[str] = []
    if request.encoder is not None:
        source = encoder_source(study.root, request.encoder)
        which += ["--encoder", str(Path(source).resolve()) if Path(source).exists() else source]
    which += ["--name", request.name] if request.name is not None else []
    named = "".join(f" {shlex.quote(word)}" for word in which)
    workers = ' --workers "${SLURM_CPUS_PER_TASK:-1}"'
    method = " --one-method" if request.one_method else ""
    until = f" --until {shlex.quote(request.until)}" if request.until is not None else ""
    shard = '--shard "$SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT"'
    one = f"{jobs.gpu}:1"
    steps = [_Step("tile", f"selfvitmil run {root}{named} --until tile {shard}{workers}", jobs.cpus, jobs.shards)]
    if request.trains_encoder:
        several = f"torchrun --standalone --nproc-per-node {jobs.gpus} -m selfvitmil" if jobs.gpus > 1 else "selfvitmil"
        own_name = f" --name {shlex.quote(request.name)}" if request.name is not None else ""
        command = f"{several} pretrain {root}{own_name}"
        steps.append(_Step("encoder", command, jobs.cpus * jobs.gpus, gres=f"{jobs.gpu}:{jobs.gpus}"))
    after = request.trains_encoder
    command = f"selfvitmil run {root}{named} --until embed {shard}"
    steps.append(_Step("embed", command, jobs.cpus, jobs.embed_shards, one, needs_success=after))
    steps.append(_Step("run", f"selfvitmil run {root}{named}{method}{until}", jobs.cpus, gres=one))
    return steps


_HEAD = """#!/bin/bash
# Written by `selfvitmil sbatch`. Submits the study as jobs that wait for each other; may be called again at any time.
set -euo pipefail

# A job that is warned of its time limit passes the warning on, waits for the end of its command, and is queued again.
run_until_warned() {
  "$@" & child=$!
  warned=0
  trap 'warned=1; kill -TERM "$child" 2>/dev/null || true' TERM
  status=0; wait "$child" || status=$?
  if [ "$warned" = 1 ]; then
    wait "$child" || true
    if [ "${SLURM_RESTART_COUNT:-0}" -lt @MOST@ ]; then scontrol requeue "$SLURM_JOB_ID"; fi
  fi
  exit "$status"
}
"""


def _script(study: Study, steps: Sequence[_Step]) -> str:
    batch = study.settings.engine.batch
    text = [_HEAD.replace("@MOST@", str(MOST_REQUEUES))]
    before = ""
    for step in steps:
        text.append(_job(study, step, batch, before))
        before = step.name
    names = " ".join(f"{step.name} ${step.name}" for step in steps)
    text.append(f'echo "submitted: {names}"\n')
    return "\n".join(text)


def _job(study: Study, step: _Step, batch: ClusterSettings, before: str) -> str:
    """Return the lines that submit one job; its number is in a variable of its name."""
    logs = study.layout.sbatch_logs.resolve()
    options = [
        f"--job-name={step.name}",
        f"--output={logs}/{step.name}-%A_%a.log" if step.array else f"--output={logs}/{step.name}-%j.log",
        f"--cpus-per-task={step.cpus}",
        f"--mem={_memory(batch.memory)}",
        f"--time={batch.walltime}",
        f"--signal=B:TERM@{WARNING_S}",
        "--requeue",
        "--open-mode=append",
    ]
    options += [f"--array=1-{step.array}"] if step.array else []
    options += [f"--partition={batch.queue}"] if batch.queue is not None else []
    options += [f"--account={batch.account}"] if batch.account is not None else []
    options += [f"--gres={step.gres}"] if step.gres else []
    options += batch.directives
    after = "afterok" if step.needs_success else "afterany"
    wait = f' "--dependency={after}:${before}"' if before else ""
    lines = [
        f"{step.name}=$(sbatch --parsable{wait} \\",
        *(f"  {shlex.quote(option)} \\" for option in options[:-1]),
        f"  {shlex.quote(options[-1])} <<JOB",
        "#!/bin/bash",
        "$(declare -f run_until_warned)",
        "$(cat <<'COMMAND'",
        *batch.prologue,
        f"run_until_warned {step.command}",
        "COMMAND",
        ")",
        "JOB",
        ")",
        "",
    ]
    return "\n".join(lines)


def _memory(text: str) -> str:
    """Return an amount of memory as Slurm writes it."""
    return text.upper().removesuffix("B").replace(" ", "")
