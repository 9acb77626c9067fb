"""One I/O error in each stage; `make faults` tries them all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


@pytest.mark.slow
def test_every_stage_recovers_from_a_full_disk():
    """In a process of its own: the campaign forks, which a worker with threads must not."""
    environment = os.environ | {"PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "faults.campaign", "--sample"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "10 faults, 0 problems" in done.stdout
