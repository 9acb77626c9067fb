"""`status`: what a study has done, what failed, what is next. From the files alone, without the study's lock.

It may be asked at any time and from any machine that sees the folder; it opens no slide and loads no torch, so that it
answers at once. Whether an artefact is current only its stage can tell (`plan` asks them); here, what is there counts.
"""

from __future__ import annotations

import re
import socket
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from selfvitmil.commands.run_record import RunRecord, process_exists, read_record
from selfvitmil.errors import ConfigError, SelfVitMilError
from selfvitmil.formatting import duration
from selfvitmil.stages import STAGES
from selfvitmil.stages.base import Progress, Snapshot
from selfvitmil.store.failures import Failure, read_failures
from selfvitmil.store.layout import StudyLayout
from selfvitmil.study.folder import CohortSource, Summary, find_cohort


@dataclass(frozen=True)
class StudyStatus:
    """A study as it is at the moment."""

    study: str
    slides: int | None
    """In the cohort; None when there is no readable cohort.csv."""
    running: str
    """Who works on it, in words; empty when nobody does."""
    stages: tuple[Progress, ...]
    failures: tuple[Failure, ...]
    next: str
    run: RunRecord | None = None

    def to_json(self) -> dict[str, Any]:
        told = asdict(self)
        return {**told, "failed_by_stage": dict(Counter(failure.stage for failure in self.failures))}

    def summary(self) -> Summary:
        """For people."""
        slides = "no readable cohort.csv" if self.slides is None else f"{self.slides} slides in the cohort"
        lines = [f"{self.study}: {slides}; {self.running or 'nobody works on it'}"]
        for stage, number in sorted(Counter(failure.stage for failure in self.failures).items()):
            reasons = [failure for failure in self.failures if failure.stage == stage]
            lines.append(f"failed in {stage}: {number}, for instance {reasons[0].reason}. {reasons[0].remedy}")
        rows = [
            (each.stage, each.place, _count(each), str(each.failed or ""), _ago(each.newest), each.words)
            for each in self.stages
        ]
        table = (("stage", "where", "done", "failed", "newest", ""), *rows) if rows else ()
        return Summary((*lines, f"next: {self.next}"), table=table)


def status(study: Path) -> StudyStatus:
    """Look at a study; ConfigError when the folder is not there."""
    if not study.is_dir():
        what = "this is a file, and a study is a folder" if study.exists() else "there is no such folder"
        raise ConfigError(f"{study.name}: {what}", how="Name the folder of a study")
    slides, trouble = _slides(study)
    failures = read_failures(study)
    record = read_record(study)
    snapshot = Snapshot(study, slides, Counter(failure.stage for failure in failures))
    stages = tuple(progress for stage in STAGES for progress in stage.status(snapshot))
    running = _running(study, record)
    number = None if slides is None else len(slides)
    following = trouble or _next(study, stages, record, running)
    return StudyStatus(study.resolve().name, number, running, stages, tuple(failures), following, record)


def _slides(study: Path) -> tuple[frozenset[str] | None, str]:
    """The slides of the cohort, or what is wrong with it."""
    try:
        return frozenset(find_cohort(study, CohortSource())[0].slides), ""
    except SelfVitMilError as error:
        return None, str(error)


# ---------------------------------------------------------------------------------------------------- who and what next


def _running(study: Path, record: RunRecord | None) -> str:
    """Who holds the study: by the name in its lock file, or the run that is between two stages."""
    holder = _holder(study)
    if holder is None and record is not None and record.alive:
        holder = (record.host, record.pid, "run")
    if holder is None:
        return ""
    host, pid, command = holder
    if host == socket.gethostname() and not process_exists(pid):
        return ""
    where = "" if host == socket.gethostname() else f" on {host} (or was killed there)"
    run = f", as part of a run that began {_ago(record.started)}" if record is not None and record.pid == pid else ""
    return f"`{command}` works on it, process {pid}{where}{run}"


def _holder(study: Path) -> tuple[str, int, str] | None:
    try:
        text = StudyLayout(study).lock.read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.match(r"host (.*), pid (\d+), selfvitmil (.*)", text)
    return (found[1], int(found[2]), found[3].strip()) if found else None


def _next(study: Path, stages: tuple[Progress, ...], record: RunRecord | None, running: str) -> str:
    if running:
        left = _left(record) if record is not None and record.alive else ()
        return f"wait; after this come {', '.join(left)}" if left else "wait for it"
    again = f"selfvitmil run {study.name}"
    if record is not None and record.ended != "finished":
        how = {"interrupted": "was interrupted", "stopped": "stopped at an error"}.get(record.ended or "", "was killed")
        return f"the last run {how} in {record.now or 'its beginning'}: `{again}` goes on from there"
    if any(each.failed for each in stages):
        return f"see failures.csv, put right what it names, then `{again}`"
    missing = [
        stage for stage in ("tile", "embed") if any(each.stage == stage and not each.complete for each in stages)
    ]
    there = {each.stage for each in stages}
    missing += [stage for stage in ("tile", "embed", "evaluate", "localize", "report") if stage not in there]
    if missing:
        return f"`{again}` does what is missing ({', '.join(dict.fromkeys(missing))}); `plan` says what that takes"
    return f"all stages have results: `selfvitmil view {study.name}` shows them"


def _left(record: RunRecord | None) -> tuple[str, ...]:
    if record is None or record.now not in record.stages:
        return ()
    return record.stages[record.stages.index(record.now) + 1 :]


# ---------------------------------------------------------------------------------------------------- words


def _count(progress: Progress) -> str:
    return str(progress.done) if progress.asked is None else f"{progress.done} of {progress.asked}"


def _ago(moment: float | None) -> str:
    return "" if moment is None else f"{duration(max(0.0, time.time() - moment))} ago"
