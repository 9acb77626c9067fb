"""`doctor`: a sound machine passes, and each thing that a machine lacks is found with its code and remedy."""

from __future__ import annotations

import errno
import fcntl
import importlib.metadata
import importlib.util
import json
import shutil
import socket
from collections import namedtuple
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from packaging.requirements import Requirement

from helpers.cli import selfvitmil
from selfvitmil import slides
from selfvitmil.commands import doctor as command
from selfvitmil.errors import SlideError
from selfvitmil.stages import STAGES
from selfvitmil.stages.base import CheckStatus, MachineCheck
from selfvitmil.stages.check import check_readers
from selfvitmil.stages.pretrain import check_gpus

PASS, WARN, FAIL = CheckStatus
Usage = namedtuple("Usage", "total used free")


def by_name(checks: Iterable[MachineCheck]) -> dict[str, MachineCheck]:
    return {check.name: check for check in checks}


def outcome(check: MachineCheck) -> tuple[CheckStatus, str]:
    assert bool(check.remedy) == bool(check.code) == (check.status is not PASS)
    return check.status, check.code


def test_a_sound_machine_passes_without_the_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def no_network(*_: object) -> None:
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", no_network)
    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    done = selfvitmil("doctor", tmp_path / "study", "--json")
    assert done.returncode == 0, done.stdout
    checks = {each["name"]: each for each in json.loads(done.stdout)}
    required = {"Python", "selfvitmil", "torch", "reader openslide", "reader jpegtiff", "readers agree"}
    required |= {"writing", "locking"}
    assert {name for name in required if checks[name]["status"] != "PASS"} == set()
    assert list(tmp_path.iterdir()) == []  # nothing is left behind


def test_every_stage_is_asked_and_one_failure_makes_the_exit_status(monkeypatch: pytest.MonkeyPatch):
    for stage in STAGES:
        lacks = [MachineCheck(stage.name, FAIL, "missing", "of-a-test", f"get {stage.name}")]
        monkeypatch.setattr(type(stage), "doctor", lambda _, lacks=lacks: lacks)
    result = command.doctor()
    assert result.status is FAIL
    assert [check.name for check in result.checks if check.code == "of-a-test"] == [stage.name for stage in STAGES]
    done = selfvitmil("doctor")
    assert done.returncode == 3
    assert "FAIL tile: get tile" in done.stdout


def test_a_check_that_breaks_is_a_finding(monkeypatch: pytest.MonkeyPatch):
    def broken() -> int:
        raise ZeroDivisionError("of a test")

    monkeypatch.setattr(command, "num_cores", broken)
    monkeypatch.setattr(command, "STAGES", ())
    found = by_name(command.doctor().checks)
    assert outcome(found["machine"]) == (FAIL, "check-failed")
    assert "ZeroDivisionError" in found["machine"].found
    assert "selfvitmil" in found  # the others are checked all the same


# ---------------------------------------------------------------------------------------------------- software


@pytest.mark.parametrize(
    ("package", "installed", "wanted"),
    [("scipy", None, "scipy>=1.14"), ("numpy", "1.26.4", "numpy>=2.0"), ("torch", "2.8.1+cu126", "torch>=2.9")],
)
def test_packages_that_are_missing_or_too_old(
    package: str, installed: str | None, wanted: str, monkeypatch: pytest.MonkeyPatch
):
    honest = importlib.metadata.version

    def version(name: str) -> str:
        if name == package and installed is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed or "" if name == package else honest(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    check = by_name(command.check_software())["selfvitmil"]
    assert outcome(check) == (FAIL, "missing-packages")
    assert check.remedy == f"pip install {wanted!r}"


@pytest.mark.parametrize(
    ("requirement", "satisfied"),
    [
        ("numpy>=2.0", True),
        ("numpy>=999", False),
        ("no-such-package", False),
        ('no-such-package; extra == "cluster"', True),
        ('no-such-package; python_version < "3"', True),
    ],
)
def test_requirements_with_markers(requirement: str, satisfied: bool):
    assert command.is_satisfied(Requirement(requirement)) == satisfied


def test_an_extra_that_is_not_installed_is_no_fault(monkeypatch: pytest.MonkeyPatch):
    honest = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "anndata" else honest(name))
    found = by_name(command.check_extras())
    assert outcome(found["extra anndata"]) == (PASS, "")
    assert "selfvitmil[anndata]" in found["extra anndata"].found
    assert "selfvitmil[cluster]" not in found["extra cluster"].found


def test_a_viewer_without_its_scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(command.resources, "files", lambda _: tmp_path)
    assert [outcome(check) for check in command.check_viewer()] == [(WARN, "no-viewer")]


# ---------------------------------------------------------------------------------------------------- machine


def test_one_core_and_little_memory(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(command, "num_cores", lambda: 1)
    monkeypatch.setattr(command, "memory_bytes", lambda: 4 * 10**9)
    found = by_name(command.check_machine())
    assert outcome(found["cores"]) == (WARN, "few-cores")
    assert outcome(found["memory"]) == (WARN, "low-memory")
    assert "--workers 2" in found["memory"].remedy


def test_memory_is_limited_by_the_control_group(monkeypatch: pytest.MonkeyPatch):
    honest = command.memory_bytes()
    monkeypatch.setattr(Path, "read_text", lambda self: "1000" if self.name == "memory.max" else "max")
    assert command.memory_bytes() == 1000 < honest


def test_no_gpu_is_a_warning(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert outcome(by_name(check_gpus())["GPU"]) == (WARN, "no-gpu")


@pytest.mark.parametrize(
    ("free_gb", "factor", "wanted"),
    [
        (70, 1.0, (PASS, "")),
        (1, 1.0, (WARN, "low-gpu-memory")),
        (70, 1.5, (FAIL, "gpu-wrong-result")),
        (None, 1.0, (FAIL, "gpu-unusable")),
    ],
)
def test_gpus_have_to_compute(
    free_gb: int | None, factor: float, wanted: tuple[CheckStatus, str], monkeypatch: pytest.MonkeyPatch
):
    def memory(_: int) -> tuple[int, int]:
        if free_gb is None:
            raise RuntimeError("CUDA error: of a test\nmore")
        return free_gb * 10**9, 80 * 10**9

    honest = torch.ones
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", memory)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    monkeypatch.setattr(torch, "ones", lambda *size, device: factor * honest(*size))
    assert outcome(by_name(check_gpus())["GPU 0"]) == wanted


# ---------------------------------------------------------------------------------------------------- readers


def test_a_reader_that_does_not_read_fails(monkeypatch: pytest.MonkeyPatch):
    honest = slides.open_slide

    def broken(path: Path, *, reader: str = "auto", **more: Any) -> Any:
        if reader == "jpegtiff":
            raise SlideError("the reader jpegtiff cannot read this slide", "of a test")
        return honest(path, reader=reader, **more)

    monkeypatch.setattr(slides, "open_slide", broken)
    found = by_name(check_readers())
    assert outcome(found["reader jpegtiff"]) == (FAIL, "reader-failed")
    assert outcome(found["reader openslide"]) == (PASS, "")
    assert "readers agree" not in found


def test_readers_that_differ_fail(monkeypatch: pytest.MonkeyPatch):
    honest = slides.Slide.read_tile

    def shifted(self: slides.Slide, *args: Any) -> Any:
        return np.roll(honest(self, *args), 1 if self.reader == "jpegtiff" else 0, axis=0)

    monkeypatch.setattr(slides.Slide, "read_tile", shifted)
    assert outcome(by_name(check_readers())["readers agree"]) == (FAIL, "readers-differ")


# ---------------------------------------------------------------------------------------------------- folder


def test_little_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10**12, 10**12 - 10**9, 10**9))
    found = by_name(command.check_folder(tmp_path / "study"))
    assert outcome(found["disk"]) == (WARN, "low-disk")
    assert "1.0 GB free" in found["disk"].found


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(command, "write_text", full)
    check = by_name(command.check_folder(tmp_path))["writing"]
    assert outcome(check) == (FAIL, "not-writable")
    assert "no space left" in check.found
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder that even root cannot write to")
def test_a_folder_that_cannot_be_written():
    found = by_name(command.check_folder(Path("/proc/study")))
    assert outcome(found["writing"]) == (FAIL, "not-writable")
    assert "locking" not in found


def test_a_file_where_a_study_would_be(tmp_path: Path):
    (tmp_path / "study").touch()
    found = by_name(command.check_folder(tmp_path / "study"))
    assert outcome(found["writing"]) == (FAIL, "not-a-folder")


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def no_locks(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    assert outcome(by_name(command.check_folder(tmp_path))["locking"]) == (PASS, "")
    monkeypatch.setattr(fcntl, "flock", no_locks)
    assert outcome(by_name(command.check_folder(tmp_path))["locking"]) == (FAIL, "no-locks")
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    assert outcome(by_name(command.check_folder(tmp_path))["locking"]) == (WARN, "weak-locks")
