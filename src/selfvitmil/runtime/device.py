"""Device, precision, CPU threads, random seeds and timing of a training or inference loop.

Also distributed data parallelism: rank and world size of this process, its process group, and signals that end a run.
"""

from __future__ import annotations

import fcntl
import math
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from selfvitmil.errors import ConfigError
from selfvitmil.settings import EngineSettings

PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
ATTENTION = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
"""Implementations of attention on a GPU, the fastest for short sequences first."""


# ---------------------------------------------------------------------------------------------------- device


def choose_device(wanted: str | torch.device, *, flag: str = "--train.device", claim: bool = False) -> torch.device:
    """Return the device that `wanted` names; `auto` is a GPU if there is one, else the CPU.

    With `claim`, `auto` takes a GPU that no other process of this user has claimed; otherwise it is the current one.
    Raises ConfigError, which names the setting `flag`, for a device that cannot be used.
    """
    if str(wanted) == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
        if claim and wanted == "cuda":
            return torch.device("cuda", _own_gpu())
    try:
        device = torch.device(wanted)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"device {str(wanted)!r} cannot be used",
            str(error).splitlines()[0],
            f"Use {flag} auto",
            code="device-unavailable",
        ) from None
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


@cache  # otherwise the next call would find this process's own GPU claimed
def _own_gpu() -> int:
    return _claim_gpu(torch.cuda.device_count())


_claims: list[int] = []


def _claim_gpu(number: int) -> int:
    """Return the first GPU whose lock file is free and lock it while this process lives; if all are taken, use the
    first."""
    for index in range(number):
        path = Path(tempfile.gettempdir()) / f"selfvitmil-{os.getuid()}-gpu{index}.lock"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            continue
        _claims.append(descriptor)
        return index
    return 0


@contextmanager
def cpu_threads(count: int | None) -> Iterator[None]:
    """Let torch use `count` CPU threads within the block; None leaves their number as it is."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if count is not None:
            torch.set_num_threads(before)


def workers_for(settings: EngineSettings, device: str) -> EngineSettings:
    """Use one worker per GPU unless the user set something else; with a single GPU the calling process does the
    work."""
    asked = settings.workers is not None or settings.cluster is not None or settings.batch.kind != "none"
    if asked or device == "cpu" or not torch.cuda.is_available():
        return settings
    gpus = torch.cuda.device_count() if device == "auto" else 1
    return settings.model_copy(update={"workers": 0 if gpus == 1 else gpus})


# ---------------------------------------------------------------------------------------------------- precision


def choose_precision(precision: str, device: torch.device) -> torch.dtype:
    """Return the autocast type of `bf16`, `fp16`, `fp32` or `auto`: half precision on a GPU, float32 on a CPU."""
    if precision == "auto":
        if device.type != "cuda":
            return torch.float32  # bf16 is several times slower on most CPUs
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    return PRECISIONS[precision]


@contextmanager
def arithmetic(device: torch.device, *, precision: str, deterministic: bool) -> Iterator[None]:
    """Compute float32 matrix products in TF32 on a GPU unless `precision` is `fp32`; bit-reproducibly if asked."""
    matmul = torch.get_float32_matmul_precision()
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    if device.type == "cuda" and precision != "fp32":
        torch.set_float32_matmul_precision("high")
    backends = sdpa_kernel(ATTENTION, set_priority=True)
    if device.type != "cuda" or deterministic:
        backends = nullcontext()
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    try:
        with backends:
            yield
    finally:
        torch.set_float32_matmul_precision(matmul)
        torch.use_deterministic_algorithms(was_deterministic)


@contextmanager
def full_float32() -> Iterator[None]:
    """Compute float32 matrix products in float32 within the block, even where training allows TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


# ---------------------------------------------------------------------------------------------------- state of torch


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch's CPU generator within the block, then restore its state."""
    before = torch.get_rng_state()
    torch.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(before)


@contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Put a module into evaluation mode within the block, then restore the mode of each submodule."""
    before = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, training in before:
            part.training = training


# ---------------------------------------------------------------------------------------------------- timing


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has finished what it was given; does nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_tflops(device: torch.device, dtype: torch.dtype) -> float:
    """Measure the rate of one large matrix product in TFLOP/s, of which model FLOPs utilization (MFU) is a share."""
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


class AsyncValues:
    """Values on their way from the device to Python.

    `tensor.tolist()` waits for everything that the device was given meanwhile: reading the loss of the last step while
    the next one runs would wait for both. This waits for the values alone.
    """

    def __init__(self, values: torch.Tensor):
        self._values, self._copied = values, None
        if values.device.type == "cuda":
            self._values = torch.empty_like(values, device="cpu", pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def get(self) -> list[float]:
        """Wait for the copy and return the values."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._values.tolist()


class PhaseTimer:
    """Times the phases of a training step by events on the device, which are read later, so that nothing waits."""

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"
        self._marks: list[tuple[str, Any]] = []
        self._last: list[tuple[str, Any]] = []

    def start(self) -> None:
        """Begin a new step."""
        self._last, self._marks = self._marks, []
        self("start")

    def __call__(self, phase: str) -> None:
        """Assign the time since the last mark to `phase`."""
        mark: Any = time.perf_counter()
        if self._cuda:
            mark = torch.cuda.Event(enable_timing=True)
            mark.record()
        self._marks.append((phase, mark))

    def last_step(self) -> dict[str, float]:
        """Return the seconds of each phase of the previous step, which must be over on the device."""
        seconds: dict[str, float] = {}
        for (_, before), (phase, after) in zip(self._last, self._last[1:], strict=False):
            spent = before.elapsed_time(after) / 1000 if self._cuda else after - before
            seconds[phase] = seconds.get(phase, 0.0) + spent
        return {phase: round(spent, 5) for phase, spent in seconds.items()}


# ---------------------------------------------------------------------------------------------------- several processes


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
