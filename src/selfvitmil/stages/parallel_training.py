"""Many trainings at once, where bags are so small that one thread of the CPU is enough for each.

Other processes make the models and store them; whoever asked for them then finds them current. Which process trains
changes no bit of a model: it depends on its `Training` alone. On a GPU trainings share the bags that lie there, and
large bags keep all cores busy with one training; then, and with `engine.workers` 0, they follow each other in this
process.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from selfvitmil.engine import Engine
from selfvitmil.store.provenance import BuildOutcome, Freshness, outcome_of

if TYPE_CHECKING:
    from selfvitmil.aggregate.train import BagStore
    from selfvitmil.evaluate import Trial
    from selfvitmil.evaluate.protocol import Report, Training


WORTH_STARTING_S = 5.0
"""Seconds of trainings in this process after which others are asked: as long as they take to start."""


def make_models(
    asked: Iterable[tuple[Trial, Training]], engine: Engine, store: BagStore, report: Report
) -> dict[Path, BuildOutcome]:
    """Make models that are missing or stale, some of them in other processes; the outcome of each, by its folder.

    A training that fails in another process is left out: the caller repeats it, and its error says why.
    """
    from selfvitmil.evaluate.protocol import make_model

    todo = [(trial, each, found) for trial, each in asked if isinstance(found := each.stored(), Freshness)]
    if engine.num_local < 2 or len(todo) < 3 or not _are_small(todo, store):
        return {}
    outcomes: dict[Path, BuildOutcome] = {}
    start = time.monotonic()
    while todo and time.monotonic() - start < WORTH_STARTING_S:
        trial, training, freshness = todo.pop(0)
        with trial.labels.training(str(training)):
            training.make(freshness, trial.bag, store, report)
        outcomes[_place(training)] = outcome_of(freshness)
    items = {str(_place(training)): training for _, training, _ in todo}
    expected = {_place(training): outcome_of(freshness) for _, training, freshness in todo}
    with ExitStack() as stack:
        for trial, training, _ in todo:
            stack.enter_context(trial.labels.training(str(training)))
        for outcome in engine.map(make_model, items, stage="train", items_are="trainings", unit="trainings"):
            if outcome.failure is None:
                outcomes[Path(outcome.name)] = expected[Path(outcome.name)]
    return outcomes


def _are_small(todo: Iterable[tuple[Trial, Training, Freshness]], store: BagStore) -> bool:
    from selfvitmil.aggregate.bag_tensors import one_thread_does

    bags = (trial.bag(case) for trial, each, _ in todo for case in (*each.training, *each.chosen_on))
    return one_thread_does(bags, store.device)


def _place(training: Training) -> Path:
    assert training.place is not None, "models that are made elsewhere are found by their folders"
    return training.place
