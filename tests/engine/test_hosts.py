"""Several hosts with their own addresses and one shared folder: some die, some are cut off, and nothing is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from PIL import Image

from faults.miniature import digests
from helpers.cli import selfvitmil
from helpers.hosts import Host, NotPermitted, hosts
from helpers.studies import MICRO
from selfvitmil.runtime.training import read_metrics
from selfvitmil.slides import synthetic

pytestmark = pytest.mark.slow
PYTHON = sys.executable
ONE_THREAD = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture
def three(tmp_path: Path) -> Iterator[list[Host]]:
    logs = tmp_path / "logs"
    logs.mkdir()
    try:
        with hosts(3, logs) as found:
            yield found
    except NotPermitted as why:
        pytest.skip(f"no network namespaces here: {why}")


def wait_until(condition: Callable[[], object], what: str, seconds: float = 90.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, what
        time.sleep(0.02)


def start_worker(host: Host, scheduler: str) -> None:
    """Start a worker and wait until it has reached the scheduler."""
    before = host.output().count("Registered to")
    options = ["--nthreads", "1", "--memory-limit", "0", "--no-dashboard", "--no-nanny"]
    host.start(PYTHON, "-m", "distributed.cli.dask_worker", scheduler, *options, **ONE_THREAD)
    wait_until(lambda: host.output().count("Registered to") > before, "a worker registers")


def test_slides_on_a_cluster_one_worker_killed_and_one_host_cut_off(three: list[Host], tmp_path: Path):
    """The host that is cut off is suspended too, and writes its slide when all is done."""
    boss, one, other = three
    synthetic.make_cohort(tmp_path / "made", slides=12, seed=5, size=(3072, 3072), slides_per_patient=1)
    studies = [tmp_path / name for name in ("local", "cluster")]
    for study in studies:
        study.mkdir()
        (study / "study.toml").write_text(MICRO.replace("[engine]\nworkers = 0\n", ""))
    arguments = ["--cohort", str(tmp_path / "made" / "cohort.csv")]
    assert selfvitmil("tile", studies[0], *arguments, "--workers", 0).returncode == 0

    # Closes a connection whose other end does not answer; the default is 30 s.
    quick = {"DASK_DISTRIBUTED__COMM__TIMEOUTS__TCP": "12s", **ONE_THREAD}
    scheduler = f"tcp://{boss.address}:8786"
    command = ["-m", "distributed.cli.dask_scheduler", "--host", boss.address, "--port", "8786", "--no-dashboard"]
    boss.start(PYTHON, *command, **quick)
    wait_until(lambda: "Scheduler at" in boss.output(), "the scheduler starts")
    for host in (one, one, other):
        start_worker(host, scheduler)
    killed, cut_off = one.processes[0], other.processes[0]

    tables = studies[1] / "tiles"
    run = boss.start(
        PYTHON, "-m", "selfvitmil", "tile", str(studies[1]), *arguments, "--cluster", scheduler, "--insecure", **quick
    )
    wait_until(lambda: len(list(tables.glob("*/*.h5"))) >= 2, "slides are tiled")
    os.killpg(killed.pid, signal.SIGKILL)
    os.killpg(cut_off.pid, signal.SIGSTOP)
    other.cut_off()
    assert run.wait(timeout=180) == 0, boss.output()
    expected = digests(studies[0])
    assert digests(studies[1]) == expected
    assert cut_off.poll() is None

    other.reconnect()
    os.killpg(cut_off.pid, signal.SIGCONT)
    time.sleep(5)  # it ends the slide that it had
    assert digests(studies[1]) == expected
    wait_until(lambda: not list(studies[1].rglob("*.part")), "no temporary file stays", 20)


STEPS = 30
PRETRAIN = f"""
[pretrain]
method = "dino"
architecture = "vit_tiny_patch16_224"
width = 32
depth = 2
heads = 2
patch_px = 8
batch = 8
steps = {STEPS}
num_local = 1
local_px = 16
out_dim = 32
head_width = 32
bottleneck = 16
log_steps = 1
shuffle_tiles = 16
checkpoint_minutes = 1e-4
workers = 0
"""


@pytest.mark.timeout(900)
def test_training_on_two_nodes_restarts_when_one_is_killed(three: list[Host], tmp_path: Path):
    """torchrun with two nodes of one process over gloo: killed in the middle, it ends as the undisturbed run."""
    rng = np.random.default_rng(0)
    (tmp_path / "images").mkdir()
    for k in range(40):
        pixels = rng.integers(60, 250, (8, 8, 3), dtype=np.uint8).repeat(4, axis=0).repeat(4, axis=1)
        Image.fromarray(pixels).save(tmp_path / "images" / f"{k}.png")
    studies = [tmp_path / name for name in ("whole", "killed")]
    for study in studies:
        study.mkdir()
        (study / "study.toml").write_text(PRETRAIN)
    train(three[:2], studies[0], tmp_path / "images", kill_at=None)
    train(three[:2], studies[1], tmp_path / "images", kill_at=8)
    whole, killed = (study / "encoders" / "dino" for study in studies)
    assert (whole / "model.safetensors").read_bytes() == (killed / "model.safetensors").read_bytes()
    losses = [[(line["step"], line["loss"]) for line in read_metrics(folder)] for folder in (whole, killed)]
    assert losses[0] == losses[1]
    assert len(losses[0]) == STEPS


def train(nodes: list[Host], study: Path, images: Path, kill_at: int | None) -> None:
    """Train on all nodes; at this step kill the process of the second one."""
    options = ["--nnodes", str(len(nodes)), "--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-backend", "c10d"]
    options += ["--rdzv-endpoint", f"{nodes[0].address}:29500", "--rdzv-id", study.name]
    command = [*options, "-m", "selfvitmil", "pretrain", str(study), "--images", str(images)]
    variables = {"GLOO_SOCKET_IFNAME": "eth0", **ONE_THREAD}
    agents: list[subprocess.Popen[bytes]] = []
    for node in nodes:  # all have one host name, by which torchrun would find out who keeps the store
        place = ["--local-addr", node.address, "--rdzv-conf", f"is_host={int(node is nodes[0])}"]
        agents.append(node.start(PYTHON, "-m", "torch.distributed.run", *place, *command, **variables))
    if kill_at is not None:
        folder = study / "encoders" / "dino"
        wait_until(lambda: any(line["step"] >= kill_at for line in read_metrics(folder)), "training begins", 240)
        [process] = psutil.Process(agents[1].pid).children()
        process.kill()
    for agent in agents:
        try:
            status: int | None = agent.wait(timeout=400)
        except subprocess.TimeoutExpired:
            status = None
        assert status == 0, "\n\n".join(each.output() for each in nodes)
