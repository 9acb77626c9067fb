"""`status`: what a study has done, what failed, what is next. From the files alone, without the study's lock.

It may be asked at any time and from any machine that sees the folder; it opens no slide and loads no torch, so that it
answers at once. Whether an artefact is current only its stage can tell (`plan` asks them); here, what is there counts.
"""

from __future__ import annotations

import json
import re
import socket
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from selfvitmil.errors import ConfigError, SelfVitMilError
from selfvitmil.formatting import duration
from selfvitmil.pipeline.record import RunRecord, process_exists, read_record
from selfvitmil.pipeline.study import CohortSource, Summary, find_cohort
from selfvitmil.store.failures import Failure, read_failures
from selfvitmil.store.layout import StudyLayout, feature_name


@dataclass(frozen=True)
class Progress:
    """How far one stage is, in one folder of the study."""

    stage: str
    place: str
    """The folder, from the study on."""
    done: int
    asked: int | None
    """Slides of the cohort (or steps), where that is what is counted."""
    failed: int
    newest: float | None
    """When the newest file was written, seconds since 1970."""
    words: str = ""

    @property
    def complete(self) -> bool:
        return self.asked is not None and self.done + self.failed >= self.asked


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
    stages = tuple(_stages(study, slides, failures))
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


# ---------------------------------------------------------------------------------------------------- stages


def _stages(study: Path, slides: frozenset[str] | None, failures: Iterable[Failure]) -> Iterable[Progress]:
    layout, failed = StudyLayout(study), Counter(failure.stage for failure in failures)

    def files(stage: str, folder: Path, failed_as: str) -> Progress:
        found = [path for path in folder.glob("*.h5") if slides is None or path.stem in slides]
        asked = None if slides is None else len(slides)
        return Progress(stage, layout.name(folder), len(found), asked, failed[failed_as], _newest(found))

    if (table := layout.check_table).exists():
        done = max(0, len(table.read_text(encoding="utf-8").splitlines()) - 1)
        asked = None if slides is None else len(slides)
        yield Progress("check", table.name, done, asked, failed["check"], _newest([table]))
    for folder in layout.all_tilings():
        yield files("tile", folder, "tile")
    for folder in layout.all_encoders():
        yield _pretraining(layout, folder)
    for folder in layout.all_features():
        yield files("embed", folder, f"embed {feature_name(folder)} {folder.parent.name}")
    for folder in layout.all_models():
        models = list(folder.rglob("config.json"))
        yield Progress("train", layout.name(folder), len(models), None, failed["train"], _newest(models))
    for folder in layout.all_results():
        files_ = [path for path in (folder / "metrics.json", folder / "table.csv") if path.exists()]
        stage = "compare" if (folder / "table.csv").exists() else "evaluate"
        yield Progress(stage, layout.name(folder), int(bool(files_)), 1, failed[stage], _newest(files_), _auc(folder))
        if (judged := folder / "lesions.json").exists():
            yield Progress("lesions", layout.name(folder), 1, 1, failed["lesions"], _newest([judged]))
    for folder in layout.all_heatmaps():
        maps = list(folder.glob("*.h5"))
        yield Progress("localize", layout.name(folder), len(maps), None, failed["localize"], _newest(maps))
    if (page := layout.report).exists():
        yield Progress("report", layout.name(page), 1, 1, 0, _newest([page]))


def _pretraining(layout: StudyLayout, folder: Path) -> Progress:
    """An encoder: finished, or how far its training is by the last line of its metrics."""
    metrics = folder / "metrics.jsonl"
    last: dict[str, Any] = {}
    if metrics.exists():
        for text in metrics.read_text(encoding="utf-8").splitlines():
            try:
                last = json.loads(text)
            except json.JSONDecodeError:  # the line that is being written
                break
    step = int(last.get("step", -1)) + 1
    told = [f"loss {last['loss']:.3f}"] if "loss" in last else []
    told += [f"{last['tiles_per_s']:.0f} tiles/s"] if "tiles_per_s" in last else []
    told += ["ALARM"] if "alarm" in last else []
    newest = _newest([path for path in (metrics, folder / "config.json", folder / "state.pt") if path.exists()])
    if (folder / "config.json").exists():
        return Progress("pretrain", layout.name(folder), 1, 1, 0, newest, ", ".join(["finished", *told]))
    kept = "with a checkpoint" if (folder / "state.pt").exists() else "no checkpoint yet"
    words = ", ".join([f"not finished, step {step}", *told, kept])
    return Progress("pretrain", layout.name(folder), 0, 1, 0, newest, words)


def _auc(folder: Path) -> str:
    """The AUC of each method, best first; nothing where it cannot be read."""
    try:
        methods = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))["methods"]
        scores = [(each["slide"]["ensemble"]["auc"]["value"], each["method"]) for each in methods]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return "AUC " + ", ".join(f"{value:.3f} {name}" for value, name in sorted(scores, reverse=True)[:3])


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


def _newest(paths: Iterable[Path]) -> float | None:
    times = [path.stat().st_mtime for path in paths if path.exists()]
    return max(times, default=None)


def _count(progress: Progress) -> str:
    return str(progress.done) if progress.asked is None else f"{progress.done} of {progress.asked}"


def _ago(moment: float | None) -> str:
    return "" if moment is None else f"{duration(max(0.0, time.time() - moment))} ago"
