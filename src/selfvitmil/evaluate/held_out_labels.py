"""Held-out test labels: they cannot be read before the final scoring, so nothing can be selected on them.

`HeldOutLabels` holds the labels of every split's test slides. Until `open` is called, reading one raises an error that
names the slide. `open` fails during a training run, and afterwards no training run may start: so trained, selected and
stored models cannot depend on a test label. The authors' protocol, which selects on the test set, opens the labels at
the start; every output then states the reason.

This prevents mistakes, the usual cause of label leakage, not deliberate access.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NoReturn

from selfvitmil.errors import HeldOutLabelError

FINAL_SCORING = "final scoring"
OPTIMISTIC = "optimistic protocol: epoch and threshold are chosen on the test set, so its figures are too good"


class HeldOutLabels:
    """Labels of the test slides of every split: split name -> slide -> class index."""

    def __init__(self, labels: Mapping[str, Mapping[str, int]]):
        kept = {split: dict(of_split) for split, of_split in labels.items()}
        self._read = lambda split, slide: kept[split][slide]  # a closure: printing or copying does not expose labels
        self._reason = ""
        self._optimistic = False
        self._running: list[str] = []

    @property
    def reason(self) -> str:
        """Reason for opening the labels; empty while they are held out."""
        return self._reason

    def label(self, split: str, slide: str) -> int:
        """Return the class index of a test slide; raise HeldOutLabelError before `open`."""
        if not self._reason:
            raise HeldOutLabelError(
                f"{slide}: its label is held out",
                f"it is a test slide of {split}, and selecting on test labels is data leakage",
                "Use validation slides; test labels are opened for the final scoring only",
            )
        return self._read(split, slide)

    def open(self, reason: str, *, optimistic: bool = False) -> None:
        """Open the labels permanently. With `optimistic`, training may continue, and `reason` states the bias."""
        if not reason:
            raise HeldOutLabelError("test labels opened without a reason", "outputs state it", "Pass a reason")
        if self._running and not optimistic:
            raise HeldOutLabelError(
                f"test labels opened while {self._running[-1]} is being trained",
                "a training run with access to test labels is data leakage",
                "Finish all training runs first",
            )
        if not self._reason:
            self._reason, self._optimistic = reason, optimistic

    @contextmanager
    def training(self, what: str) -> Iterator[None]:
        """Context of a training run named `what`: fails once the labels are open, and keeps them closed meanwhile."""
        if self._reason and not self._optimistic:
            raise HeldOutLabelError(
                f"a training run of {what} started after the test labels were opened",
                f"they were opened for: {self._reason}",
                "Train everything first, then score; or start a new run",
            )
        self._running.append(what)
        try:
            yield
        finally:
            self._running.remove(what)

    def __reduce__(self) -> NoReturn:
        raise HeldOutLabelError(
            "held-out test labels cannot be copied or sent to another process", "they could be read there"
        )

    def __repr__(self) -> str:
        return f"HeldOutLabels({self._reason or 'held out'})"
