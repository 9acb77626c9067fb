"""`doctor`: what it finds on a sound machine, and that each thing that is amiss is found and comes with its remedy."""

from __future__ import annotations

import fcntl
import importlib.metadata
import importlib.util
import json
import os
import shutil
import socket
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from helpers.cli import selfvitmil
from selfvitmil import slides
from selfvitmil.commands.doctor import Check, memory_bytes
from selfvitmil.commands.doctor import doctor as look
from selfvitmil.errors import SlideError


def found(study: Path | None = None) -> dict[str, Check]:
    return {check.name: check for check in look(study)}


def test_a_sound_machine_passes_without_the_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def no_network(*_: object) -> None:
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", no_network)
    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    done = selfvitmil("doctor", tmp_path / "study", "--json")
    assert done.returncode == 0, done.stdout
    checks = {each["name"]: each for each in json.loads(done.stdout)}
    for name in ("Python", "selfvitmil", "torch", "reader openslide", "reader jpegtiff", "readers agree"):
        assert checks[name]["verdict"] == "PASS", checks[name]
    for name in ("writing", "locking"):
        assert checks[name]["verdict"] == "PASS", checks[name]
    assert importlib.metadata.version("simplejpeg") in checks["reader jpegtiff"]["found"]
    assert all(bool(each["remedy"]) == (each["verdict"] != "PASS") for each in checks.values())
    assert list(tmp_path.iterdir()) == []  # nothing is left behind


def test_for_people_there_is_a_table_and_the_lines_that_fix_it():
    done = selfvitmil("doctor")
    assert done.returncode == 0
    assert "PASS  reader openslide" in done.stdout
    assert "locking" not in done.stdout  # of no study, no folder


def test_a_reader_that_does_not_read_fails(monkeypatch: pytest.MonkeyPatch):
    honest = slides.open_slide

    def broken(path: Path, *, reader: str = "auto", **more: Any) -> Any:
        if reader == "jpegtiff":
            raise SlideError("made.svs: the reader jpegtiff cannot read this slide", "of a test")
        return honest(path, reader=reader, **more)

    monkeypatch.setattr(slides, "open_slide", broken)
    done = selfvitmil("doctor")
    assert done.returncode == 3
    assert "FAIL reader jpegtiff: pip install --force-reinstall" in done.stdout
    assert "PASS  reader openslide" in done.stdout


def test_packages_that_are_missing_or_too_old(monkeypatch: pytest.MonkeyPatch):
    honest = importlib.metadata.version

    def version(name: str) -> str:
        if name == "scipy":
            raise importlib.metadata.PackageNotFoundError(name)
        return "1.9.3" if name == "numpy" else honest(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    check = found()["selfvitmil"]
    assert check.verdict == "FAIL"
    assert check.remedy == "pip install 'numpy>=2.0' 'scipy>=1.14'"


def test_an_extra_that_is_not_there_is_no_fault(monkeypatch: pytest.MonkeyPatch):
    honest = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "anndata" else honest(name))
    check = found()["extra anndata"]
    assert check.verdict == "PASS"
    assert 'pip install "selfvitmil[anndata]"' in check.found


def test_little_memory_and_a_full_disk_are_warnings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**12, 10**12 - 10**9, 10**9))
    monkeypatch.setattr("selfvitmil.commands.doctor.memory_bytes", lambda: 4 * 10**9)
    checks = found(tmp_path)
    assert checks["disk"].verdict == checks["memory"].verdict == "WARN"
    assert "1.0 GB free" in checks["disk"].found
    assert "--workers 2" in checks["memory"].remedy
    assert memory_bytes() <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "access", lambda path, mode: not str(path).startswith(str(tmp_path)))
    done = selfvitmil("doctor", tmp_path / "study")
    assert done.returncode == 3
    assert "FAIL writing" in done.stdout


def test_a_file_where_a_study_would_be(tmp_path: Path):
    (tmp_path / "study").touch()
    check = found(tmp_path / "study")["writing"]
    assert (check.verdict, check.found) == ("FAIL", "study is a file, and a study is a folder")


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def no_locks(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", no_locks)
        assert found(tmp_path)["locking"].verdict == "FAIL"
    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", lambda *_: None)
        assert found(tmp_path)["locking"].verdict == "WARN"


def test_a_check_that_breaks_is_a_finding(monkeypatch: pytest.MonkeyPatch):
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("of a test")

    monkeypatch.setattr("selfvitmil.commands.doctor.num_cores", broken)
    check = found()["machine"]
    assert check.verdict == "FAIL"
    assert "ZeroDivisionError" in check.found
