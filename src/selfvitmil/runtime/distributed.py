"""Distributed data parallelism: rank and world size of this process, its process group, and signals that end a run."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Worker:
    """This process of a distributed run: its device, rank and world size."""

    device: torch.device
    rank: int = 0
    world_size: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which measures, logs and writes."""
        return self.rank == 0


@contextmanager
def distributed(device: str | None) -> Iterator[Worker]:
    """Join the process group of torchrun (NCCL on GPUs, Gloo on CPUs) within the block; one process without torchrun.

    `device` None is this process's GPU if there is one, else the CPU.
    """
    world_size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if chosen.type == "cuda":
        chosen = torch.device("cuda", chosen.index if chosen.index is not None else local_rank)
        torch.cuda.set_device(chosen)
    joins = world_size > 1 and not dist.is_initialized()
    if joins:
        dist.init_process_group("nccl" if chosen.type == "cuda" else "gloo")
    try:
        yield Worker(chosen, rank, world_size)
    finally:
        if joins:
            dist.destroy_process_group()


@contextmanager
def stop_on_signal() -> Iterator[threading.Event]:
    """Yield an event that SIGTERM and Ctrl-C set within the block; a second Ctrl-C interrupts at once.

    Batch systems announce the end of a job by SIGTERM, some of them twice.
    """
    requested = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield requested
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def request(number: Any, frame: Any) -> None:
        del frame
        requested.set()
        if number == signal.SIGINT:
            signal.signal(number, before[number])

    for number in before:
        signal.signal(number, request)
    try:
        yield requested
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
