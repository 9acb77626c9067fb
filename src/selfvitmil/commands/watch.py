"""`predict --watch`: predict slides as they arrive in a folder, until interrupted.

A slide counts as whole when its files have not changed for `SETTLE_S`. What was predicted is known from
`predictions.csv`, so a watcher that was stopped or killed goes on where it was. A slide that failed is tried again when
its files change, and after a restart. Slides that wait are listed for the viewer, which shows them without a
prediction.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from selfvitmil.cohort import SlideRow
from selfvitmil.cohort.files import find_slides
from selfvitmil.cohort.table import name_key
from selfvitmil.commands.predict import PredictResult, list_slides, predict
from selfvitmil.engine import Engine, announce
from selfvitmil.errors import ConfigError, LockError
from selfvitmil.settings import StudySettings

if TYPE_CHECKING:
    from selfvitmil.package import Package

SETTLE_S = 30.0
"""A file that was changed later than this may still be being copied."""
AT_ONCE = 8
"""Slides of one round: their predictions are written at its end."""
State = tuple[int, float]
"""Bytes and time of the last change of all files of a slide."""


@dataclass
class Watcher:
    """What is known of the slides in the watched folders."""

    package: Package
    folders: Sequence[Path]
    out: Path
    failed: dict[str, State] = field(default_factory=dict)
    """Slides that failed -> what their files were like."""
    said: set[str] = field(default_factory=set)

    def waiting(self) -> dict[str, tuple[SlideRow, State]]:
        """Return the slides without a prediction of this model that have not failed as they are."""
        from selfvitmil.package import PredictionFiles

        known = {row["slide"] for row in PredictionFiles.read(self.out).rows if row.get("model") == self.package.tag}
        found: dict[str, tuple[SlideRow, State]] = {}
        taken: dict[str, Path] = {}
        for folder in self.folders:
            for slide in find_slides(folder)[0] if folder.is_dir() else ():
                first = taken.setdefault(name_key(slide.name), slide.path)
                if first != slide.path:
                    self._say_once(f"{slide.path.name}: left out, another slide has this name ({first.name})")
                    continue
                state = state_of(slide.path)
                if slide.name not in known and self.failed.get(slide.name) != state:
                    found[slide.name] = SlideRow(slide.name, slide.path), state
        return found

    def ready(self, waiting: dict[str, tuple[SlideRow, State]], now: float) -> list[SlideRow]:
        """Return those whose files have come to rest, the oldest first."""
        whole = [(state, row) for row, state in waiting.values() if now - state[1] >= SETTLE_S]
        return [row for _, row in sorted(whole, key=lambda each: (each[0][1], each[1].slide))]

    def _say_once(self, line: str) -> None:
        if line not in self.said:
            self.said.add(line)
            announce(line)


def state_of(path: Path) -> State:
    """Return size and last change of a slide: of its file with a folder of that name beside it, or its .dcm files."""
    beside = path.with_suffix("")
    files = [path, *(beside.rglob("*") if beside.is_dir() else ())]
    if path.suffix.lower() == ".dcm":
        files = [each for each in path.parent.iterdir() if each.suffix.lower() == ".dcm"]
    found: list[os.stat_result] = []
    for file in files:
        try:
            found.append(os.stat(file))
        except OSError:
            continue  # it was moved away meanwhile
    return sum(each.st_size for each in found), max((each.st_mtime for each in found), default=time.time())


def watch(
    package: Package,
    folders: Sequence[Path],
    out: Path,
    settings: StudySettings,
    engine: Engine,
    every_s: float,
    *,
    maps: bool = True,
    pause: Callable[[float], None] = time.sleep,
) -> Iterator[PredictResult]:
    """Predict slides as they arrive; yields the result of every round. Ends only by an error or a signal."""
    if every_s <= 0:
        raise ConfigError(
            f"--watch {every_s:g}", "it is a number of seconds", "Give for instance 60", code="watch-pause"
        )
    files = [folder for folder in folders if not folder.is_dir()]
    if files:
        raise ConfigError(
            f"{files[0].name}: no folder to watch",
            "it does not exist or is a file",
            "Name folders",
            code="watch-folder",
        )
    watcher, before = Watcher(package, folders, out), -1
    while True:
        waiting = watcher.waiting()
        ready = watcher.ready(waiting, time.time())
        if len(waiting) != before:
            before = len(waiting)
            announce(f"watch: {len(ready)} of {len(waiting)} slides that wait are whole; looking every {every_s:g} s")
            list_slides(out, [row for row, _ in waiting.values()])
        if not ready:
            pause(every_s)
            continue
        rows = ready[:AT_ONCE]
        try:
            result = predict(package, [row.path for row in rows], out, settings, engine, maps=maps)
        except LockError as error:
            announce(f"watch: {error}")
            pause(every_s)
            continue
        watcher.failed |= {each.slide: waiting[each.slide][1] for each in result.failures if each.slide in waiting}
        yield result
