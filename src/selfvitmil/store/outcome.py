"""What a stage did with one artefact, as data; and the words for it, which only summaries use."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from selfvitmil.store.failures import Failure
from selfvitmil.store.provenance import Change, ChangeKind, Freshness, State


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
