"""Steps as CUDA graphs, and several trainings in turns on one device.

A step on a small bag is a hundred kernels of a few microseconds each: launching them takes longer than running them,
and running them leaves most of a GPU idle. So each step is captured once and replayed (`Recorder`), and trainings take
turns (`in_turns`): a training is a generator that queues an epoch on its own stream and yields, and the epochs of
several trainings then run at the same time. It goes on when its epoch is done (`Queued`), so that a slow method holds
up no other. Each has random numbers of its own (`Surroundings`), so what it computes does not depend on the others.
"""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch

from selfvitmil.aggregate.bag_tensors import BagStore, LabelledBag, few_threads

K = TypeVar("K")
T = TypeVar("T")
Step = Callable[[], None]

MAX_GRAPHS = 2000
"""Largest number of graphs: each holds some driver memory, and with more bags the gain per epoch is small."""
MIN_EPOCHS = 4
"""Epochs below which capturing CUDA graphs costs more than replaying them saves."""
LOOK_EVERY_S = 2e-5
"""How often trainings are looked at while all of them wait for the GPU."""


# ---------------------------------------------------------------------------------------------------- graphs


def can_capture(bags: Sequence[LabelledBag], num_steps: int, epochs: int, store: BagStore) -> bool:
    """Whether steps on these bags can be captured, and will be repeated often enough."""
    worth = num_steps <= MAX_GRAPHS and epochs >= MIN_EPOCHS
    return store.device.type == "cuda" and worth and store.holds([each.bag for each in bags])


class Recorder:
    """Captures steps in one memory pool, which lives as long as the graphs."""

    def __init__(self) -> None:
        gc.collect()  # frees the memory of earlier graphs; it takes a tenth of a second, so not with every record
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, steps: Sequence[Step]) -> list[Step]:
        """Return a replay for each step, without computing anything; raise RuntimeError where capture fails."""
        torch.cuda.synchronize()
        with _no_garbage_collection():
            return [self._recorded(step) for step in steps]

    def _recorded(self, step: Step) -> Step:
        graph = torch.cuda.CUDAGraph()
        # thread_local: another thread may be pinning memory meanwhile.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            step()
        except BaseException:
            with suppress(RuntimeError):  # the failed capture reports its error a second time
                graph.capture_end()
            raise
        graph.capture_end()
        return graph.replay


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Disable garbage collection: freeing tensors or graphs during a capture invalidates it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


# ---------------------------------------------------------------------------------------------------- surroundings


class Surroundings:
    """What a training finds in the process whenever it goes on: its random state, stream, precision and threads.

    with surroundings(): ...

    The random state inside is kept from one block to the next; that outside is as it was. On a GPU all work is in a
    stream of its own, where it can be captured, and the generator's state is one of its own, from which captured steps
    draw too.
    """

    def __init__(self, bags: Sequence[LabelledBag], device: torch.device):
        self._bags = [each.bag for each in bags]
        self._device = device
        self._random: torch.Tensor | None = None
        self._stream: torch.cuda.Stream | None = None
        self._generator: Any = None
        if device.type == "cuda":
            torch.cuda.init()
            self._stream = torch.cuda.Stream(device)
            self._stream.wait_stream(torch.cuda.current_stream(device))
            self._generator = _generator(device).clone_state()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(self._random_state())
            stack.enter_context(_tf32(self._device))
            stack.enter_context(few_threads(self._bags, self._device))
            if self._stream is not None:
                stack.enter_context(self._state_on_gpu())
                stack.enter_context(torch.cuda.stream(self._stream))
            yield

    def queued(self) -> Queued:
        """Return a mark behind all work that was queued so far."""
        if self._stream is None:
            return Queued()
        event = torch.cuda.Event()
        event.record(self._stream)
        return Queued(event.query)

    def seed(self, seed: int) -> None:
        """Seed torch's generators; called within the block."""
        torch.default_generator.manual_seed(seed)
        if self._device.type == "cuda":
            _generator(self._device).manual_seed(seed)

    @contextmanager
    def _random_state(self) -> Iterator[None]:
        outside = torch.get_rng_state()
        if self._random is not None:
            torch.set_rng_state(self._random)
        try:
            yield
        finally:
            self._random = torch.get_rng_state()
            torch.set_rng_state(outside)

    @contextmanager
    def _state_on_gpu(self) -> Iterator[None]:
        generator = _generator(self._device)
        outside = generator.graphsafe_get_state()
        generator.graphsafe_set_state(self._generator)
        try:
            yield
        finally:
            generator.graphsafe_set_state(outside)


def _generator(device: torch.device) -> Any:
    """Return the default generator of a GPU."""
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]


@contextmanager
def _tf32(device: torch.device) -> Iterator[None]:
    """Use TF32 for float32 products on a GPU: it holds float16 embeddings exactly and rounds weights to 10 bits."""
    before = torch.get_float32_matmul_precision()
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


# ---------------------------------------------------------------------------------------------------- in turns


@dataclass(frozen=True)
class Queued:
    """What a training yields while the device is at work on it."""

    is_done: Callable[[], bool] = lambda: True
    """Whether the device has done all of it, so that going on waits for nothing; on a CPU it has."""


def surrounded(surroundings: Surroundings, steps: Iterator[T | None]) -> Iterator[T | Queued]:
    """Yield what `steps` yields, `Queued` for None; only its own code runs in its surroundings."""
    while True:
        with surroundings():
            try:
                value = next(steps)
            except StopIteration:
                return
        yield surroundings.queued() if value is None else value


@dataclass
class Seeds(Generic[K, T]):
    """Trainings that differ in their seeds alone."""

    train: Callable[[deque[K]], Iterator[T | Queued]]
    """Makes them one after the other and takes each from `left` when it begins, so that it may be called again."""
    left: deque[K] = field(default_factory=deque)
    """Those that have not begun."""
    epoch_s: float = 0.0
    """Longest time of the host for an epoch: the first one is no replay, and its time grows with its kernels."""

    def note(self, line: dict[str, Any]) -> None:
        """Take note of an epoch's history line."""
        self.epoch_s = max(self.epoch_s, line["seconds"])


def seeds_in_turns(groups: Sequence[Seeds[K, T]], most: int) -> Iterator[T]:
    """Make all trainings, up to `most` at the same time: first one of each group, then further ones of those that
    will take longest."""
    first = iter(groups)

    def begin() -> Iterator[T | Queued] | None:
        group = next(first, None) or max(groups, key=lambda group: len(group.left) * group.epoch_s)
        return group.train(group.left) if group.left else None

    return in_turns(begin, most)


def in_turns(begin: Callable[[], Iterator[T | Queued] | None], most: int) -> Iterator[T]:
    """Advance up to `most` trainings until all have ended; yield what they yield, except for `Queued`.

    `begin` is asked for another training while there is room, and returns None where there is none at the moment.
    Next is always the one that has waited longest of those whose work is done.
    """
    active: deque[tuple[Iterator[T | Queued], Queued]] = deque()
    while True:
        if len(active) < most and (training := begin()) is not None:
            active.append((training, Queued()))
        if not active:
            return
        training, _ = _take_ready(active)
        try:
            found = next(training)
        except StopIteration:
            continue
        if isinstance(found, Queued):
            active.append((training, found))
        else:
            active.append((training, Queued()))
            yield found


def _take_ready(active: deque[tuple[Iterator[T | Queued], Queued]]) -> tuple[Iterator[T | Queued], Queued]:
    """Remove and return the first whose work is done; waits until there is one."""
    while True:
        for place, each in enumerate(active):
            if each[1].is_done():
                del active[place]
                return each
        time.sleep(LOOK_EVERY_S)
