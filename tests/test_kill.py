"""Training that is really killed, at any moment, and goes on as if nothing had happened. On a CPU, to the bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from PIL import Image

from selfvitmil.runtime.training import read_metrics

STEPS = 40
STUDY = f"""
[pretrain]
method = "dino"
architecture = "vit_tiny_patch16_224"
width = 32
depth = 2
heads = 2
patch_px = 8
batch = 8
steps = {STEPS}
num_local = 2
local_px = 16
out_dim = 32
head_width = 32
bottleneck = 16
drop_path = 0.3
log_steps = 1
shuffle_tiles = 16
checkpoint_minutes = 1e-4
"""

# Loading torch takes longer than all the training here, so it is done once: each command runs in a fork of a process
# that has imported everything, in a session of its own, as a shell or a batch system would start it.
NURSERY = """
    import json, os, sys
    from selfvitmil import cli
    from selfvitmil.pretrain import train
    while line := sys.stdin.readline():
        child = os.fork()
        if child == 0:
            os.setsid()
            os.dup2(2, 1)
            cli.main(json.loads(line))
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Nursery:
    """Starts `selfvitmil` commands, one after the other."""

    def __init__(self, process: subprocess.Popen[str]):
        self._process = process

    def start(self, *arguments: object) -> int:
        """The process id of the command, which is also that of its group and session."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([str(argument) for argument in arguments]) + "\n")
        self._process.stdin.flush()
        return self._read()

    def wait(self) -> int:
        """Exit status of the command; the negative number of the signal that killed it."""
        return self._read()

    def _read(self) -> int:
        assert self._process.stdout is not None
        return int(self._process.stdout.readline())


@pytest.fixture
def nursery(tmp_path: Path) -> Iterator[Nursery]:
    with (
        (tmp_path / "output.txt").open("w") as output,
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(NURSERY)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        ) as process,
    ):
        yield Nursery(process)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(timeout=60) == 0, (tmp_path / "output.txt").read_text()


@pytest.fixture
def images(tmp_path: Path) -> Path:
    folder = tmp_path / "images"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for k in range(40):
        pixels = rng.integers(60, 250, (8, 8, 3), dtype=np.uint8).repeat(4, axis=0).repeat(4, axis=1)
        Image.fromarray(pixels).save(folder / f"{k}.png")
    return folder


def new_study(folder: Path) -> Path:
    folder.mkdir()
    (folder / "study.toml").write_text(STUDY)
    return folder


def wait_for_step(study: Path, step: int) -> None:
    """Until the metrics of this step are written."""
    deadline = time.monotonic() + 60
    while not any(line["step"] >= step for line in read_metrics(study / "encoders" / "dino")):
        assert time.monotonic() < deadline, f"step {step} does not come"
        time.sleep(0.005)


def members(session: int) -> list[psutil.Process]:
    """Living processes of a session."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, ProcessLookupError, PermissionError):
            continue
    return found


def assert_all_gone(session: int, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while left := members(session):
        assert time.monotonic() < deadline, f"still there: {[process.cmdline() for process in left]}"
        time.sleep(0.05)


def tensors_of(value: Any, name: str = "") -> dict[str, Any]:
    """All that a state holds, flat."""
    if isinstance(value, dict):
        return {key: part for k in value for key, part in tensors_of(value[k], f"{name}/{k}").items()}
    if isinstance(value, list):
        return tensors_of(dict(enumerate(value)), name)
    return {name: value}


def assert_same_run(study: Path, other: Path) -> None:
    folders = [path / "encoders" / "dino" for path in (study, other)]
    for name in ("model.safetensors", "config.json"):
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes()
    found, wanted = (tensors_of(torch.load(folder / "state.pt", weights_only=True)) for folder in folders)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        same = torch.equal(found[name], value) if isinstance(value, torch.Tensor) else found[name] == value
        assert same, name
    losses = [
        [(line["step"], line["loss"], line["feature_rank"]) for line in read_metrics(folder)] for folder in folders
    ]
    assert losses[0] == losses[1]
    assert len(losses[0]) == STEPS


@pytest.mark.slow
def test_killed_and_warned_runs_end_in_the_same_bits(nursery: Nursery, images: Path, tmp_path: Path):
    rng = np.random.default_rng()  # the moment is to be any: whatever it is, the outcome must be the same
    whole, killed, warned = (new_study(tmp_path / name) for name in ("whole", "killed", "warned"))

    def start(study: Path, workers: int = 0) -> int:
        return nursery.start("pretrain", study, "--images", images, "--pretrain.workers", workers)

    def interrupt(study: Path, signal_number: int, first: int, last: int, workers: int = 0) -> int:
        """Start, send the signal to the whole group some time after a step between these two; the exit status."""
        group = start(study, workers)
        wait_for_step(study, int(rng.integers(first, last)))
        time.sleep(rng.uniform(0, 0.03))
        assert len(members(group)) > workers, "reading processes are there"
        os.killpg(group, signal_number)
        status = nursery.wait()
        assert_all_gone(group, seconds=15)
        return status

    start(whole)
    assert nursery.wait() == 0

    assert interrupt(killed, signal.SIGKILL, 3, 15) == -signal.SIGKILL
    assert (killed / "encoders" / "dino" / "state.pt").exists()
    assert interrupt(killed, signal.SIGKILL, 22, 32) == -signal.SIGKILL
    start(killed)
    assert nursery.wait() == 0
    assert_same_run(killed, whole)

    # Batch systems warn all processes, those that read tiles too.
    assert interrupt(warned, signal.SIGTERM, 3, 30, workers=1) == 130
    state = torch.load(warned / "encoders" / "dino" / "state.pt", weights_only=True)
    assert state["step"] == read_metrics(warned / "encoders" / "dino")[-1]["step"] + 1, "nothing done is lost"
    assert not (warned / "encoders" / "dino" / "config.json").exists()
    start(warned)
    assert nursery.wait() == 0
    assert_same_run(warned, whole)


@pytest.mark.slow
def test_processes_that_read_tiles_end_with_the_trainer(nursery: Nursery, images: Path, tmp_path: Path):
    study = new_study(tmp_path / "study")
    trainer = nursery.start("pretrain", study, "--images", images, "--pretrain.workers", 2)
    wait_for_step(study, 3)
    assert len(members(trainer)) > 2
    os.kill(trainer, signal.SIGKILL)
    assert nursery.wait() == -signal.SIGKILL
    assert_all_gone(trainer, seconds=10)
