"""`status`: what a study has done, what failed, what is next. From the files alone, without the study's lock.

It may be asked at any time and from any machine that sees the folder; it opens no slide and loads no torch, so that it
answers at once. Only its stage knows whether an artefact is up to date (`plan` asks it); here, what exists counts.
"""

from __future__ import annotations

import re
import shlex
import socket
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from selfvitmil.cohort.table import listing
from selfvitmil.commands.run import RunRecord, process_exists, read_record
from selfvitmil.errors import ConfigError, SelfVitMilError
from selfvitmil.formatting import ago
from selfvitmil.settings import StudySettings
from selfvitmil.stages import STAGES
from selfvitmil.stages.base import Progress, Snapshot, StageResult, data_frame
from selfvitmil.store.failures import Failure, read_failures
from selfvitmil.store.layout import StudyLayout
from selfvitmil.store.lock import present_shards
from selfvitmil.study import Study


@dataclass(frozen=True)
class StatusResult(StageResult):
    """A study as it is at the moment."""

    study: str
    slides: int | None
    """In the cohort; None when there is no readable cohort.csv."""
    running: str
    """Who works on it, in words; empty when nobody does."""
    stages: tuple[Progress, ...]
    failed: tuple[Failure, ...]
    """Rows of failures.csv."""
    next: str
    """What to do now, in words."""
    run: RunRecord | None = None

    def to_json(self) -> dict[str, Any]:
        info = asdict(self)
        kept = {key: info[key] for key in ("study", "slides", "running", "stages")}
        by_stage = dict(Counter(failure.stage for failure in self.failed))
        return {**kept, "failures": info["failed"], "next": self.next, "run": info["run"], "failed_by_stage": by_stage}

    def to_frame(self) -> Any:
        """Return a pandas DataFrame with a row for every folder of every stage."""
        return data_frame([asdict(each) for each in self.stages], "stage")


def status(study: Path) -> StatusResult:
    """Look at a study; ConfigError when the folder is not there."""
    if not study.is_dir():
        what = "this is a file, and a study is a folder" if study.exists() else "there is no such folder"
        raise ConfigError(f"{study.name}: {what}", how="Name the folder of a study", code="no-study")
    slides, trouble = _slides(study)
    failures = read_failures(study)
    record = read_record(study)
    snapshot = Snapshot(study, slides, Counter(failure.stage for failure in failures))
    stages = tuple(progress for stage in STAGES for progress in stage.status(snapshot))
    running = _running(study, record)
    number = None if slides is None else len(slides)
    following = trouble or _next(study, stages, record, running)
    return StatusResult(study.resolve().name, number, running, stages, tuple(failures), following, record)


def _slides(study: Path) -> tuple[frozenset[str] | None, str]:
    """The slides of the cohort, or what is wrong with it."""
    try:
        return frozenset(Study(study, StudySettings()).cohort.slides), ""
    except SelfVitMilError as error:
        return None, str(error)


# ---------------------------------------------------------------------------------------------------- who and what next


def _running(study: Path, record: RunRecord | None) -> str:
    """Who holds the study: by the name in its lock file, or the run that is between two stages."""
    holder = _holder(study)
    if holder is None and record is not None and record.alive:
        holder = (record.host, record.pid, "run")
    if holder is None:
        return _running_shards(study)
    host, pid, command = holder
    if host == socket.gethostname() and not process_exists(pid):
        return ""
    where = "" if host == socket.gethostname() else f" on {host} (or was killed there)"
    run = f", as part of a run that began {ago(record.started)}" if record is not None and record.pid == pid else ""
    return f"`{command}` works on it, process {pid}{where}{run}"


def _running_shards(study: Path) -> str:
    """The shards of a run that have given a sign of life lately."""
    shards = [each for each in present_shards(study) if each.is_alive(time.time())]
    if not shards:
        return ""
    hosts = sorted({each.host for each in shards})
    return f"{len(shards)} shards of `run` work on it, on {listing(hosts, 4)}"


def _holder(study: Path) -> tuple[str, int, str] | None:
    try:
        text = StudyLayout(study).lock.read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.match(r"host (.*), pid (\d+), selfvitmil (.*)", text)
    return (found[1], int(found[2]), found[3].strip()) if found else None


def _next(study: Path, stages: tuple[Progress, ...], record: RunRecord | None, running: str) -> str:
    if running:
        left: tuple[str, ...] = ()
        if record is not None and record.alive and record.now in record.stages:
            left = record.stages[record.stages.index(record.now) + 1 :]
        return f"wait; after this come {', '.join(left)}" if left else "wait for it"
    again = f"selfvitmil run {shlex.quote(study.name)}"
    if record is not None and record.ended != "finished":
        how = {"interrupted": "was interrupted", "stopped": "stopped at an error"}.get(record.ended or "", "was killed")
        return f"the last run {how} in {record.now or 'its beginning'}: `{again}` resumes there"
    if any(each.failed for each in stages):
        return f"see failures.csv, put right what it names, then `{again}`"
    there = {each.stage for each in stages}
    unfinished = {each.stage for each in stages if not each.complete}
    missing = [
        stage.name
        for stage in STAGES
        if (stage.is_essential and stage.name not in there) or (stage.by_slide and stage.name in unfinished)
    ]
    if missing:
        return f"`{again}` does what is missing ({', '.join(missing)}); `plan` says what that takes"
    return f"all stages have results: `selfvitmil view {shlex.quote(study.name)}` shows them"
