"""What tests ask of outcomes."""

from __future__ import annotations

from selfvitmil.store.provenance import BuildOutcome, BuildStatus


def changed(outcome: BuildOutcome) -> list[str]:
    """Names of the changes for which something was rebuilt; fails where it was not."""
    assert outcome.status is BuildStatus.REBUILT, outcome
    return [change.name for change in outcome.changes]
