"""The seal on test labels: nothing can be chosen by them, because nobody can read them before the final scoring.

A `SealedLabels` holds the labels of every split's test slides. Until `open` is called, reading one is an error that
names the slide. `open` is refused while a training runs, and after it no training may begin: so what was trained,
chosen and stored cannot depend on a test label. The authors' protocol, which chooses on the test set, opens the seal
at the start and trains on; the reason of the opening is then told in every output.

Python hides nothing from those who dig; this guards against mistakes, which is how test labels leak in practice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NoReturn

from selfvitmil.errors import SealedLabelError

FINAL_SCORING = "final scoring"
OPTIMISTIC = "optimistic protocol: epoch and threshold are chosen on the test set, so its figures are too good"


class SealedLabels:
    """Labels of the test slides of every split: split name -> slide -> class index."""

    def __init__(self, labels: Mapping[str, Mapping[str, int]]):
        kept = {split: dict(of_split) for split, of_split in labels.items()}
        self._read = lambda split, slide: kept[split][slide]  # in a closure: printing or copying an object shows none
        self._reason = ""
        self._optimistic = False
        self._running: list[str] = []

    @property
    def reason(self) -> str:
        """Why the labels were opened; empty while they are sealed."""
        return self._reason

    def label(self, split: str, slide: str) -> int:
        """The class index of a test slide; SealedLabelError while the seal holds."""
        if not self._reason:
            raise SealedLabelError(
                f"{slide}: its label is sealed",
                f"it is a test slide of {split}, and what is chosen by test labels cannot be judged by them",
                "Choose on validation slides; test labels are opened for the final scoring alone",
            )
        return self._read(split, slide)

    def open(self, reason: str, *, optimistic: bool = False) -> None:
        """Open the labels for good. With `optimistic` trainings may go on, and `reason` says what that costs."""
        if not reason:
            raise SealedLabelError("test labels were to be opened without a reason", "outputs tell it", "Give one")
        if self._running and not optimistic:
            raise SealedLabelError(
                f"test labels were to be opened while {self._running[-1]} is being trained",
                "a training that can see them proves nothing",
                "Finish all trainings first",
            )
        if not self._reason:
            self._reason, self._optimistic = reason, optimistic

    @contextmanager
    def training(self, what: str) -> Iterator[None]:
        """Around every training, named `what`: refused once the labels are open, and keeps them from being opened."""
        if self._reason and not self._optimistic:
            raise SealedLabelError(
                f"a training of {what} was begun after the test labels were opened",
                f"they were opened for: {self._reason}",
                "Train everything first, then score; or start a new run",
            )
        self._running.append(what)
        try:
            yield
        finally:
            self._running.remove(what)

    def __reduce__(self) -> NoReturn:
        raise SealedLabelError(
            "sealed test labels were to be copied or sent to another process", "that breaks the seal"
        )

    def __repr__(self) -> str:
        return f"SealedLabels({self._reason or 'sealed'})"
