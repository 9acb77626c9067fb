"""Steps recorded once as CUDA graphs and replayed: a replay costs the host one call instead of a hundred launches.

Every bag has its own graph: its features lie at one address for good, so nothing is padded or copied. All graphs draw
from one pool of memory, in which no step leaves anything behind, so they may be replayed in any order. A step must have
run at least once before, on the same stream, so that libraries have loaded what they need and optimizers have their
state; the trainer's first epoch does that. A step that waits for the device (`Aggregator.waits_for_device`) cannot be
recorded. Random numbers of torch's own generator are drawn anew in every replay.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import torch

Step = Callable[[], None]

MAX_GRAPHS = 2000
"""Each holds some memory of the driver; beyond so many bags a first epoch is not to be repeated that often anyway."""


@contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """All work in a stream of its own, where it can be recorded; on a CPU nothing."""
    if device.type != "cuda":
        yield
        return
    outside, inside = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    inside.wait_stream(outside)
    try:
        with torch.cuda.stream(inside):
            yield
    finally:
        outside.wait_stream(inside)


class Recorder:
    """Records steps, all in one pool of memory, which lives as long as what was recorded."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, steps: Sequence[Step]) -> list[Step]:
        """For each step one that replays it. Nothing is computed. RuntimeError where a step cannot be recorded."""
        torch.cuda.synchronize()
        with _no_garbage_collection():
            return [self._recorded(step) for step in steps]

    def _recorded(self, step: Step) -> Step:
        graph = torch.cuda.CUDAGraph()
        # Only this thread's forbidden calls count: another one may be pinning memory meanwhile.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            step()
        except BaseException:
            with suppress(RuntimeError):  # the recording is spoilt, it says so once more
                graph.capture_end()
            raise
        graph.capture_end()
        return graph.replay


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Collected tensors and graphs would free memory in the middle of a recording, which spoils it."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
