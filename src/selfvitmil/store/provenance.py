"""What an artefact was built from, whether it is still up to date, and what a stage did with it.

A stage describes what its result depends on as a `Provenance`: its version, its settings, and the identities of its
inputs. Compared with what is stored in an artefact this gives a `Freshness`, which names every change:

    now = Provenance("tile", FORMAT_VERSION, settings, {"slide": fingerprint(path)})
    freshness = now.compare(stored)            # stored: the Provenance read from the file
    freshness.state is State.STALE and freshness.changes[0].name == "tile.mpp"

Some artefacts store one hash only; `compare_digests` handles them. What a stage did with an artefact is a
`BuildOutcome`, whose words are for summaries only.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, cast

from selfvitmil.store.failures import Failure
from selfvitmil.store.files import hash_of, to_plain

# ---------------------------------------------------------------------------------------------------- changes


class ChangeKind(Enum):
    """What differs between an artefact and what would be built now."""

    SETTING = "setting"
    INPUT = "input"
    VERSION = "version"
    MISSING_FILE = "missing file"
    DAMAGED_FILE = "damaged file"
    UNNAMED = "unnamed"
    """Only a hash is stored, so it is not known which setting or input changed."""


@dataclass(frozen=True)
class Change:
    """One difference that makes an artefact stale."""

    kind: ChangeKind
    name: str
    """Dotted name of the setting (`tile.mpp`), name of the input (`slide`) or of the file."""
    before: Any = None
    now: Any = None


# ---------------------------------------------------------------------------------------------------- freshness


class State(Enum):
    """Whether an artefact can be used as it is."""

    UP_TO_DATE = "up to date"
    MISSING = "missing"
    STALE = "stale"


@dataclass(frozen=True)
class Freshness:
    """State of an artefact; a stale one always says what changed."""

    state: State
    changes: tuple[Change, ...] = ()

    def __post_init__(self) -> None:
        assert bool(self.changes) == (self.state is State.STALE), "stale artefacts, and no others, have changes"

    @property
    def is_up_to_date(self) -> bool:
        return self.state is State.UP_TO_DATE


FRESH = Freshness(State.UP_TO_DATE)
MISSING = Freshness(State.MISSING)


def stale(*changes: Change) -> Freshness:
    """Return the freshness of an artefact that must be rebuilt because of these changes."""
    return Freshness(State.STALE, changes)


def damaged(path: Path) -> Freshness:
    """Return the freshness of an artefact that cannot be read."""
    return stale(Change(ChangeKind.DAMAGED_FILE, path.name))


# ---------------------------------------------------------------------------------------------------- provenance


@dataclass(frozen=True)
class Provenance:
    """Everything that the content of an artefact depends on."""

    stage: str
    """Which command builds it."""
    version: int | None
    """Of the stage or its file format; another version makes an artefact stale."""
    settings: Mapping[str, Any]
    """May be nested; changes are named by dotted keys. None counts as absent."""
    inputs: Mapping[str, Any]
    """Identity of every input: mostly hashes. None counts as absent."""

    @property
    def digest(self) -> str:
        """Return one hash over version, settings and inputs; it does not depend on the order of keys."""
        return hash_of({"settings": self.settings, "inputs": self.inputs}, self.version)

    def compare(self, stored: Provenance, *, optional: Collection[str] = ()) -> Freshness:
        """Return whether an artefact with the provenance `stored` is up to date, and every change if not.

        `optional` names settings and inputs that count only where both have them: those that earlier versions did not
        store. With another version nothing else is compared, since that version may have stored other things.
        """
        if stored.version != self.version:
            return stale(Change(ChangeKind.VERSION, self.stage, stored.version, self.version))
        changes = [
            Change(ChangeKind.SETTING, *difference)
            for difference in _differences(_normal(stored.settings), _normal(self.settings), optional)
        ]
        before, now = _normal(stored.inputs), _normal(self.inputs)
        changes += [
            Change(ChangeKind.INPUT, key, before.get(key), now.get(key))
            for key in _keys(before, now, optional)
            if before.get(key) != now.get(key)
        ]
        return stale(*changes) if changes else FRESH


def compare_digests(stored: str | None, now: str, named: Iterable[Change] = ()) -> Freshness:
    """Return whether an artefact that stores one hash is up to date.

    `named` are the changes that what is stored beside the hash reveals; without any the change is unnamed.
    """
    if stored == now:
        return FRESH
    return stale(*(tuple(named) or (Change(ChangeKind.UNNAMED, "settings or inputs"),)))


def _normal(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values as JSON gives them back: lists for tuples, text for keys."""
    return json.loads(json.dumps(to_plain(values)))


def _keys(before: Mapping[str, Any], now: Mapping[str, Any], optional: Collection[str]) -> list[str]:
    """Return the keys to compare, sorted."""
    return sorted(key for key in {*before, *now} if key not in optional or (key in before and key in now))


def _differences(
    before: Mapping[str, Any], now: Mapping[str, Any], optional: Collection[str] = (), prefix: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    """Yield dotted key, value before and value now of everything that differs."""
    for key in _keys(before, now, optional):
        old, new = before.get(key), now.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            nested = cast(tuple[dict[str, Any], dict[str, Any]], (old, new))
            yield from _differences(*nested, prefix=f"{prefix}{key}.")
        elif old != new:
            yield f"{prefix}{key}", old, new


# ---------------------------------------------------------------------------------------------------- outcomes


class BuildStatus(Enum):
    """What became of the artefact of one slide, or of one model."""

    BUILT = "built"
    """It did not exist before."""
    UP_TO_DATE = "up to date"
    """It was left as it is."""
    REBUILT = "rebuilt"
    """It was stale."""
    FAILED = "failed"


@dataclass(frozen=True)
class BuildOutcome:
    """What became of one artefact, with the reason."""

    status: BuildStatus
    changes: tuple[Change, ...] = ()
    """Why it was rebuilt."""
    failure: Failure | None = None
    """Why it failed."""

    def __post_init__(self) -> None:
        assert bool(self.changes) == (self.status is BuildStatus.REBUILT), "what is rebuilt, and only that, has changes"
        assert (self.failure is not None) == (self.status is BuildStatus.FAILED), "what failed has a failure"

    def __str__(self) -> str:
        """Return the words for people: `rebuilt: tile.mpp 0.5 -> 1.0`."""
        reason = describe_changes(self.changes) if self.failure is None else self.failure.reason
        return f"{self.status.value}: {reason}" if reason else self.status.value


BUILT = BuildOutcome(BuildStatus.BUILT)
UP_TO_DATE = BuildOutcome(BuildStatus.UP_TO_DATE)


def rebuilt(*changes: Change) -> BuildOutcome:
    """Return the outcome of an artefact that was stale because of these changes."""
    return BuildOutcome(BuildStatus.REBUILT, changes)


def failed(failure: Failure) -> BuildOutcome:
    """Return the outcome of an artefact that could not be built."""
    return BuildOutcome(BuildStatus.FAILED, failure=failure)


def outcome_of(freshness: Freshness) -> BuildOutcome:
    """Return the outcome of a stage that finds an artefact so, and builds it unless it is up to date."""
    if freshness.state is State.STALE:
        return rebuilt(*freshness.changes)
    return BUILT if freshness.state is State.MISSING else UP_TO_DATE


# ---------------------------------------------------------------------------------------------------- words


def describe_changes(changes: Iterable[Change]) -> str:
    """Return the words for changes: `tile.mpp 0.5 -> 1.0, slide changed`."""
    return ", ".join(map(_describe, changes))


def _describe(change: Change) -> str:
    if change.kind is ChangeKind.MISSING_FILE:
        return f"{change.name} missing"
    if change.kind is ChangeKind.DAMAGED_FILE:
        return f"{change.name} damaged"
    if change.kind is ChangeKind.UNNAMED:
        return f"{change.name} changed (recorded as a hash only)"
    if change.kind is ChangeKind.VERSION:
        return f"{change.name} version {change.before} -> {change.now}"
    if change.kind is ChangeKind.INPUT and not _are_numbers(change):  # hashes tell a reader nothing
        return f"{change.name} changed"
    return f"{change.name} {change.before} -> {change.now}"


def _are_numbers(change: Change) -> bool:
    return all(isinstance(value, int | float | None) for value in (change.before, change.now))
