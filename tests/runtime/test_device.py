"""Devices, precision, threads and seeds."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

from helpers.error_codes import has_code
from selfvitmil.errors import ConfigError
from selfvitmil.runtime import device as runtime
from selfvitmil.runtime.device import choose_device, choose_precision, cpu_threads, evaluation_mode, seeded


def test_unusable_device_is_refused_with_the_setting_to_change():
    assert choose_device("cpu") == torch.device("cpu")
    with pytest.raises(ConfigError, match=r"nonsense.*--embed\.device auto", check=has_code("device-unavailable")):
        choose_device("nonsense", flag="--embed.device")


def test_float32_is_the_precision_of_a_cpu():
    assert choose_precision("auto", torch.device("cpu")) == torch.float32
    assert choose_precision("bf16", torch.device("cpu")) == torch.bfloat16


def test_processes_claim_different_gpus_until_all_are_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(runtime.tempfile, "gettempdir", lambda: str(tmp_path))
    assert [runtime._claim_gpu(2) for _ in range(3)] == [0, 1, 0]


def test_a_process_keeps_its_gpu_for_all_encoders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(runtime.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(runtime, "_own_gpu", cache(runtime._own_gpu.__wrapped__))
    runtime._claim_gpu(3)  # another process has the first
    assert [choose_device("auto", claim=True).index for _ in range(3)] == [1, 1, 1]


def test_threads_generator_and_modes_are_restored():
    network = nn.Sequential(nn.Linear(2, 2), nn.Dropout().eval())
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    with cpu_threads(1), seeded(5), evaluation_mode(network):
        assert torch.get_num_threads() == 1
        drawn = torch.rand(3)
        assert not any(part.training for part in network.modules())
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)
    assert [part.training for part in network.modules()] == [True, True, False]
    with cpu_threads(None), seeded(5):
        assert torch.equal(torch.rand(3), drawn)
