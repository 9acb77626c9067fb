"""Steps as CUDA graphs, and several trainings in turns on one device.

A step on a small bag is a hundred kernels of a few microseconds each: launching them takes longer than running them,
and running them leaves most of a GPU idle. So each step is captured once and replayed (`Recorder`), and trainings take
turns (`in_turns`): a training is a generator that queues an epoch on its own stream and yields, and the epochs of
several trainings then run at the same time. Each has random numbers of its own (`Surroundings`), so what it computes
does not depend on the others.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import islice
from typing import Any, TypeVar

import torch

from selfvitmil.aggregate.bag_tensors import BagStore, LabelledBag, few_threads

T = TypeVar("T")
Step = Callable[[], None]

MAX_GRAPHS = 2000
"""Largest number of graphs: each holds some driver memory, and with more bags the gain per epoch is small."""
MIN_EPOCHS = 4
"""Epochs below which capturing CUDA graphs costs more than replaying them saves."""


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


def surrounded(surroundings: Surroundings, steps: Iterator[T]) -> Iterator[T]:
    """Yield what `steps` yields; only its own code runs in its surroundings."""
    while True:
        with surroundings():
            try:
                value = next(steps)
            except StopIteration:
                return
        yield value


def in_turns(trainings: Iterable[Iterator[T | None]], most: int) -> Iterator[T]:
    """Advance up to `most` trainings in turn until all have ended; yield what they yield, except for None."""
    left = iter(trainings)
    active = deque(islice(left, most))
    while active:
        training = active.popleft()
        try:
            found = next(training)
        except StopIteration:
            active.extend(islice(left, 1))
            continue
        active.append(training)
        if found is not None:
            yield found
