"""`run.json`: what the last `run` of a study was asked for, where it is and how it ended. A log, not an artefact.

`status` reads it from another terminal while the run goes on; the next `run` reads which encoder was meant and whether
there was a GPU. It holds times, and paths relative to the study.
"""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from selfvitmil import __version__
from selfvitmil.store.files import write_text
from selfvitmil.store.layout import StudyLayout


@dataclass(frozen=True)
class RunRecord:
    """One run of a study."""

    stages: tuple[str, ...] = ()
    """All that were asked for, in their order."""
    encoder: str | None = None
    """As it was asked for; a path starts at the study."""
    name: str | None = None
    device: str = "CPU"
    """Name of the GPU, or `CPU`."""
    version: str = __version__
    host: str = ""
    pid: int = 0
    started: float = 0.0
    """Seconds since 1970."""
    now: str | None = None
    """The stage it is in, or was in when it ended."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Stage -> how long it took, for those that are over."""
    ended: str | None = None
    """None while it runs (or when it was killed); `finished`, `interrupted` or `stopped`."""

    def entering(self, stage: str) -> RunRecord:
        return replace(self, now=stage)

    def leaving(self, stage: str, seconds: float) -> RunRecord:
        return replace(self, seconds={**self.seconds, stage: round(seconds, 1)})

    @property
    def alive(self) -> bool:
        """Whether its process runs; one on another machine is believed to."""
        return self.ended is None and (self.host != socket.gethostname() or process_exists(self.pid))


def new_record(stages: tuple[str, ...], encoder: str | None, name: str | None, device: str) -> RunRecord:
    host, pid = socket.gethostname(), os.getpid()
    return RunRecord(stages, encoder, name, device, host=host, pid=pid, started=round(time.time(), 1))


def write_record(study: Path, record: RunRecord) -> None:
    write_text(StudyLayout(study).run_record, json.dumps(asdict(record), indent=1) + "\n")


def read_record(study: Path) -> RunRecord | None:
    """None when there is none, or none that can be read: it is only a log."""
    try:
        told: dict[str, Any] = json.loads(StudyLayout(study).run_record.read_text(encoding="utf-8"))
        known = {key: value for key, value in told.items() if key in RunRecord.__dataclass_fields__}
        return RunRecord(**{**known, "stages": tuple(known["stages"])})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def process_exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
