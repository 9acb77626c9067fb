"""Training steps captured as CUDA graphs and replayed: a replay costs one launch instead of a hundred.

Every bag has its own graph: its features stay at one address, so nothing is padded or copied. All graphs share one
memory pool, in which no step leaves data behind, so they may be replayed in any order. A step must have run at least
once before, on the same stream, so that libraries are initialized and optimizers have their state; the first epoch does
that. A step that synchronizes with the device (`Aggregator.waits_for_device`) cannot be captured. Random numbers of
torch's generator are drawn anew in every replay.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import torch

Step = Callable[[], None]

MAX_GRAPHS = 2000
"""Largest number of graphs: each holds some driver memory, and with more bags the gain per epoch is small."""


@contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """Run all work in a separate stream, where it can be captured; does nothing on a CPU."""
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
    """Captures steps in one memory pool, which lives as long as the graphs."""

    def __init__(self) -> None:
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
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
