"""What surrounds a training run: its processes and device, precision, signals, and a stopwatch for the device."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel

from selfvitmil.settings import PretrainSettings

ATTENTION = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
"""Implementations of attention on a GPU, the fastest for short sequences first."""


@dataclass(frozen=True)
class Place:
    """Where this process computes, and which of how many it is."""

    device: torch.device
    rank: int = 0
    world: int = 1


@contextmanager
def processes(device: str | None) -> Iterator[Place]:
    """This process's place among those that torchrun started; alone without torchrun."""
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    local = int(os.environ.get("LOCAL_RANK", "0"))
    chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if chosen.type == "cuda":
        chosen = torch.device("cuda", chosen.index if chosen.index is not None else local)
        torch.cuda.set_device(chosen)
    ours = world > 1 and not dist.is_initialized()
    if ours:
        dist.init_process_group("nccl" if chosen.type == "cuda" else "gloo")
    try:
        yield Place(chosen, rank, world)
    finally:
        if ours:
            dist.destroy_process_group()


@contextmanager
def arithmetic(settings: PretrainSettings, device: torch.device) -> Iterator[None]:
    """Products of float32 in TF32 on a GPU (the precision of fp16), and the same bits every time when asked for."""
    precision = torch.get_float32_matmul_precision()
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    if device.type == "cuda" and settings.precision != "fp32":
        torch.set_float32_matmul_precision("high")
    backends = sdpa_kernel(ATTENTION, set_priority=True)
    if device.type != "cuda" or settings.deterministic:
        backends = nullcontext()
    if settings.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    try:
        with backends:
            yield
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.use_deterministic_algorithms(was_deterministic)


@contextmanager
def stop_on_signal() -> Iterator[threading.Event]:
    """An event that SIGTERM (batch systems warn with it, some twice) and Ctrl-C set; a second Ctrl-C acts at once."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def ask(number: Any, frame: Any) -> None:
        del frame
        asked.set()
        if number == signal.SIGINT:
            signal.signal(number, before[number])

    for number in before:
        signal.signal(number, ask)
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def choose_precision(precision: str, device: torch.device) -> torch.dtype:
    """The type of the networks' products."""
    if precision == "auto":
        if device.type != "cuda":
            return torch.float32  # bf16 is several times slower on most CPUs
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    return PRECISIONS[precision]


def peak_tflops(device: torch.device, dtype: torch.dtype) -> float:
    """Rate of one large matrix product, measured: what the utilisation in the metrics is a share of."""
    edge, repeats = (8192, 10) if device.type == "cuda" else (768, 3)
    a, b = (torch.randn(edge, edge, device=device, dtype=dtype) for _ in range(2))
    best = math.inf
    for _ in range(3):
        synchronize(device)
        start = time.perf_counter()
        for _ in range(repeats):
            torch.mm(a, b)
        synchronize(device)
        best = min(best, (time.perf_counter() - start) / repeats)
    return 2 * edge**3 / best / 1e12


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Later:
    """Numbers on the device, on their way to Python.

    Asked for in the usual way they would come after all that was given to the device meanwhile, and whoever looks at
    the last step while the next one runs would wait for both.
    """

    def __init__(self, numbers: torch.Tensor):
        self._numbers, self._there = numbers, None
        if numbers.device.type == "cuda":
            self._numbers = torch.empty_like(numbers, device="cpu", pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            self._there = torch.cuda.Event()
            self._there.record()

    def values(self) -> list[float]:
        """Waits until they are there, and for nothing else."""
        if self._there is not None:
            self._there.synchronize()
        return self._numbers.tolist()


class Stopwatch:
    """Seconds of the phases of a step, by events on the device, read later, so that nothing waits."""

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"
        self._marks: list[tuple[str, Any]] = []
        self._last: list[tuple[str, Any]] = []

    def start(self) -> None:
        """A new step begins."""
        self._last, self._marks = self._marks, []
        self("start")

    def __call__(self, phase: str) -> None:
        """What was done since the last mark was `phase`."""
        mark: Any = time.perf_counter()
        if self._cuda:
            mark = torch.cuda.Event(enable_timing=True)
            mark.record()
        self._marks.append((phase, mark))

    def last_step(self) -> dict[str, float]:
        """Seconds of each phase of the step before the current one, which must be over on the device."""
        seconds: dict[str, float] = {}
        for (_, before), (phase, after) in zip(self._last, self._last[1:], strict=False):
            spent = before.elapsed_time(after) / 1000 if self._cuda else after - before
            seconds[phase] = seconds.get(phase, 0.0) + spent
        return {phase: round(spent, 5) for phase, spent in seconds.items()}
