"""Which shard of a run works on which slide, agreed by files in a shared folder, without a server.

    FOLDER/slide_7~1          claimed: contains who did
    FOLDER/slide_7~1.done     its work is done
    FOLDER/slide_7~1.failed   it failed

To claim a slide is to create its file, which the file system lets only one succeed at. The claims of a shard that died
or ended are void: others may then claim the slide a second time (`slide_7~2`). A slide that failed is tried once more
by another shard, since the cause may be the machine. A shard that was only cut off, and finishes a slide that another
one has claimed meanwhile, writes the same content under the same name; nothing is lost by that.
"""

from __future__ import annotations

import json
import os
from collections.abc import Container, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from selfvitmil.store.files import read_json, to_plain, write_error, write_text
from selfvitmil.store.lock import ShardPresence

MAX_FAILURES = 2
"""Shards that try a slide which fails."""
_DONE, _FAILED = ".done", ".failed"


@dataclass(frozen=True)
class Situation:
    """The slides of a stage that are not finished."""

    free: Mapping[str, int]
    """Slides that this shard may claim -> by which number; those that failed elsewhere are the last."""
    busy: Mapping[str, str]
    """Slides that others work on -> the token of their shard, empty where it is not known yet."""


@dataclass
class _Slide:
    """What the files say of a slide."""

    claims: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)
    done: bool = False


class Claims:
    """The claims on the slides of one stage."""

    def __init__(self, folder: Path, presence: ShardPresence):
        self._folder, self._presence = folder, presence
        self._mine: dict[str, int] = {}
        self._failed_here: set[str] = set()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise write_error(folder, error) from error

    def situation(self, slides: Iterable[str]) -> Situation:
        """Look at the folder: which of these slides are free, and which in the hands of others."""
        found = self._read()
        alive = self._presence.others_alive()
        free: dict[str, int] = {}
        again: dict[str, int] = {}
        busy: dict[str, str] = {}
        for slide in slides:
            files = found.get(slide, _Slide())
            last = max(files.claims, default=0)
            if files.done or len(files.failed) >= MAX_FAILURES:
                continue
            if last == 0:
                free[slide] = 1
            elif last in files.failed:
                if slide not in self._failed_here:
                    again[slide] = last + 1
            elif (holder := self._holder(slide, last, alive)) is not None:
                busy[slide] = holder
            else:
                again[slide] = last + 1
        return Situation({**free, **again}, busy)

    def take(self, slide: str, number: int) -> bool:
        """Claim a slide; return False where another shard was quicker, or took this one for dead."""
        if self._presence.lost:
            return False
        path = self._claim(slide, number)
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            return False
        except FileNotFoundError:  # the folder is gone: the results were assembled
            self._presence.lost = True
            return False
        except OSError as error:
            raise write_error(path, error) from error
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(self._presence.token)
        self._mine[slide] = number
        return True

    def finish(self, slide: str, *, failed: bool, value: Any = None) -> None:
        """Record that a claimed slide is done or failed; `value` is what assembling needs beyond the study's files."""
        if failed:
            self._failed_here.add(slide)
        if self._folder.is_dir():  # otherwise the results were assembled by others, who took this shard for dead
            path = self._claim(slide, self._mine[slide])
            write_text(path.with_name(path.name + (_FAILED if failed else _DONE)), json.dumps(to_plain(value)))

    def _claim(self, slide: str, number: int) -> Path:
        return self._folder / f"{slide}~{number}"

    def _read(self) -> dict[str, _Slide]:
        found: dict[str, _Slide] = {}
        for name in os.listdir(self._folder) if self._folder.is_dir() else ():
            slide, _, rest = name.rpartition("~")
            number, dot, ending = rest.partition(".")
            if not slide or not number.isdigit():
                continue  # a temporary file
            files = found.setdefault(slide, _Slide())
            files.claims.add(int(number))
            files.done |= f"{dot}{ending}" == _DONE
            if f"{dot}{ending}" == _FAILED:
                files.failed.add(int(number))
        return found

    def _holder(self, slide: str, number: int, alive: Container[str]) -> str | None:
        """Return the token of the living shard that holds a claim, None where no living one does.

        An empty token means that a shard has just created the file, or was killed just then; it holds the claim for as
        long as a shard may be silent.
        """
        path = self._claim(slide, number)
        try:
            token = path.read_text(encoding="utf-8")
            if not token:
                return None if self._presence.now() - path.stat().st_mtime > self._presence.expiry_s else ""
        except FileNotFoundError:
            return None
        except OSError as error:
            raise write_error(path, error) from error
        return token if token in alive else None


def results_of(folder: Path) -> dict[str, Any]:
    """Return what shards recorded of the slides that are done."""
    found: dict[str, Any] = {}
    for path in sorted(folder.glob(f"*~*{_DONE}")):
        with suppress(OSError, ValueError):  # removed meanwhile, or damaged: the slide is processed again
            found[path.name.rpartition("~")[0]] = read_json(path)
    return found
