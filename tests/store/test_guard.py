"""Files that break the libraries which read them: this process survives, and says which file it was."""

from __future__ import annotations

import multiprocessing
import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import h5py
import numpy as np
import pytest
import tifffile
import torch

from helpers.error_codes import has_code
from helpers.viewer import STATIC, make_slide_file, make_study, viewed
from selfvitmil.bags import read_bag
from selfvitmil.encoder import load_encoder
from selfvitmil.engine import Engine
from selfvitmil.errors import BagError, EncoderError, SlideError
from selfvitmil.settings import EngineSettings
from selfvitmil.slides import open_slide, synthetic
from selfvitmil.store import files, guard
from selfvitmil.store.files import open_hdf5, write_hdf5
from selfvitmil.tiles import read_tiles


def with_huge_tiles(path: Path) -> Path:
    """A slide whose header claims tiles of 2^20 pixels each way: OpenSlide asks for 4 TB and aborts."""
    synthetic.make_slide(path, seed=3, size=(1024, 1024), mpp=0.5)
    data = bytearray(path.read_bytes())
    with tifffile.TiffFile(path) as tiff:
        page = tiff.pages[0]
        assert isinstance(page, tifffile.TiffPage)
        for code in (322, 323):
            tag = page.tags[code]
            entry = (code, 4, 1, 1 << 20)
            form = "HHQQ" if tiff.is_bigtiff else "HHII"
            data[tag.offset : tag.offset + struct.calcsize("<" + form)] = struct.pack(tiff.byteorder + form, *entry)
    path.write_bytes(data)
    return path


def test_the_slide_does_abort_a_process(tmp_path: Path):
    """Otherwise the tests below show nothing."""
    path = with_huge_tiles(tmp_path / "huge.tif")
    code = "import openslide, sys; openslide.OpenSlide(sys.argv[1]).read_region((0, 0), 0, (1, 1))"
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, check=False)
    assert done.returncode == -signal.SIGABRT


def test_a_file_of_this_process_needs_no_helper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Until somebody changes it."""
    asked: list[Path] = []
    monkeypatch.setattr(guard, "helper", own := guard.Helper())
    monkeypatch.setattr(files, "helper", own)
    monkeypatch.setattr(own, "_ask", lambda kind, path: asked.append(path))
    path = tmp_path / "own.h5"
    with write_hdf5(path) as file:
        file["values"] = np.arange(3)
    with open_hdf5(path) as file:
        assert "values" in file
    assert not asked
    os.utime(path, ns=(1, 1))
    with open_hdf5(path):
        assert asked == [path]


def test_a_slide_that_aborts_openslide_is_an_error(tmp_path: Path):
    path = with_huge_tiles(tmp_path / "huge.tif")
    with pytest.raises(SlideError, match=r"huge\.tif: .*crashes", check=has_code("crashing-slide")):
        open_slide(path, reader="openslide")
    synthetic.make_slide(tmp_path / "sound.svs", seed=3, size=(1024, 1024), mpp=0.5)
    with open_slide(tmp_path / "sound.svs") as slide:  # a new helper was started
        assert slide.size_l0 == (1024, 1024)


def test_the_viewer_survives_a_slide_that_aborts_openslide(tmp_path: Path):
    from starlette.testclient import TestClient

    from selfvitmil.view.guard import names_for
    from selfvitmil.view.server import make_app

    study = make_study(tmp_path / "study", make_slide_file(tmp_path / "a.svs"))
    with_huge_tiles(tmp_path / "huge.tif").replace(study / "slides" / "other.svs")
    shown = viewed(study)
    app = make_app(shown, STATIC, hosts=names_for("127.0.0.1"))
    with TestClient(app, base_url="http://127.0.0.1:8000") as client:
        answers = {
            slide.name: client.get(f"/api/slides/{slide.id}/tiles/8/0_0.jpg").status_code
            for slide in shown.slides.values()
        }
    assert answers["other"] == 502, "a slide that cannot be read"
    assert answers["Meier_01"] == 200


def crashing(path: Path) -> Path:
    """An HDF5 file; the stand-in for the library dies or loops on files of this name."""
    with h5py.File(path, "w") as file:
        file["features"] = np.ones((3, 4), np.float32)
    return path


@pytest.fixture
def fragile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> guard.Helper:
    """A helper whose HDF5 library crashes on crash.h5 and loops on loop.h5."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "h5py.py").write_text(
        "import os, time\n"
        "def File(path, mode):\n"
        "    name = os.path.basename(path)\n"
        "    if 'crash' in name: os.abort()\n"
        "    while 'loop' in name: time.sleep(1)\n"
        "    raise ValueError\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "lib"))
    monkeypatch.setattr(guard, "LIMIT_S", 4)
    helper = guard.Helper()
    monkeypatch.setattr(guard, "helper", helper)
    return helper


@pytest.mark.slow
def test_hdf5_files_that_crash_or_hang_the_library_are_errors(fragile: guard.Helper, tmp_path: Path):
    for name, says in (("crash.h5", "crashes"), ("loop.h5", "has not ended after 4 s")):
        path = crashing(tmp_path / name)
        with pytest.raises(guard.UnsafeFile, match=says), open_hdf5(path):
            pass
        with pytest.raises(BagError, match=rf"{name}: .*{says}.*Remove it", check=has_code("unreadable-bag")):
            read_bag(path)
    assert len(read_bag(crashing(tmp_path / "sound.h5"))) == 3


def test_without_a_helper_files_are_read_all_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A program without Python at hand, or a machine at its limit of processes, says nothing about files."""
    for program in ("/nonexistent/python", "/bin/false"):
        monkeypatch.setattr(guard, "helper", guard.Helper())
        monkeypatch.setattr(guard.sys, "executable", program)
        assert len(read_bag(crashing(tmp_path / "a.h5"))) == 3
        assert not guard.helper._available


def test_a_file_is_opened_first_once_per_content(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    helper = guard.Helper()
    monkeypatch.setattr(guard, "helper", helper)
    asked: list[str] = []
    monkeypatch.setattr(helper, "_ask", lambda kind, path: asked.append(path.name))
    path = crashing(tmp_path / "a.h5")
    for _ in range(3):
        read_bag(path)
    assert asked == ["a.h5"]
    with h5py.File(path, "a") as file:
        file["coords"] = np.zeros((3, 2), np.int64)
    read_bag(path)
    assert asked == ["a.h5", "a.h5"]


def test_the_helper_ends_with_its_process(tmp_path: Path):
    path = crashing(tmp_path / "a.h5")
    code = (
        "import sys; from pathlib import Path; from selfvitmil.store import guard\n"
        "guard.helper.check('hdf5', Path(sys.argv[1])); print(guard.helper._process.pid)"
    )
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=True)
    until = time.monotonic() + 10
    while Path(f"/proc/{int(done.stdout)}").exists():
        assert time.monotonic() < until
        time.sleep(0.05)


def hang(seconds: float) -> int:
    """Loop as a damaged file makes the library loop, in a worker with a short limit."""
    guard.WORKER_LIMIT_S = 1
    with guard.limited():
        time.sleep(seconds)
    return multiprocessing.current_process().pid or 0


@pytest.mark.slow
def test_a_worker_that_hangs_is_ended_and_its_slide_named():
    with Engine(EngineSettings(workers=1)) as engine:
        found = {each.name: each for each in engine.map(hang, {"bad": 60.0, "good": 0.0}, stage="tile")}
    assert found["good"].value not in (None, os.getpid())
    failure = found["bad"].failure
    assert failure is not None
    assert failure.code == "worker-hung"
    assert "bad" in failure.reason


def test_torchs_advice_to_run_the_files_code_is_not_passed_on(tmp_path: Path):
    class Foreign:
        def __reduce__(self):
            return print, ("run",)

    for name, content in (("foreign.pt", Foreign()), ("cut.pt", torch.ones(50, 50))):
        torch.save(content, tmp_path / name)
    (tmp_path / "cut.pt").write_bytes((tmp_path / "cut.pt").read_bytes()[:3000])
    for name, says in (("foreign.pt", "could run code; nothing was run"), ("cut.pt", "damaged")):
        with pytest.raises(BagError, match=says, check=has_code("unreadable-bag")) as caught:
            read_bag(tmp_path / name)
        assert name in str(caught.value)
        assert "weights_only" not in str(caught.value)
        with pytest.raises(EncoderError) as refused:
            load_encoder(str(tmp_path / name))
        assert "weights_only" not in str(refused.value)


@pytest.mark.parametrize("read", [read_bag, read_tiles])
def test_damaged_structures_are_named(read: object, tmp_path: Path):
    """The library's RuntimeError and TypeError arrive as errors of ours, with the file's name and what to do."""
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["features"] = np.ones((3, 4), np.float32)
        file.create_group("more")["x"] = 1
    sound = (tmp_path / "a.h5").read_bytes()
    heap = sound.find(b"HEAP")
    (tmp_path / "b.h5").write_bytes(sound[: heap + 8] + b"\xff" * 24 + sound[heap + 32 :])
    with pytest.raises((BagError, Exception), match=r"b\.h5: not a readable.*Remove it") as caught:
        read(tmp_path / "b.h5")  # type: ignore[operator]
    assert caught.type.__module__ == "selfvitmil.errors"
