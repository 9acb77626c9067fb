"""`doctor`: does this machine have what is needed? Every check ends in PASS, WARN or FAIL, the latter with the remedy.

Things are tried, not only looked up: a synthetic slide is read both ways, a GPU multiplies, the study's file system has
to rename and lock. Nothing is asked of the network.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from selfvitmil import __version__
from selfvitmil.engine import num_cores
from selfvitmil.errors import SelfVitMilError
from selfvitmil.store.failures import Failure
from selfvitmil.store.files import write_text
from selfvitmil.study.folder import Summary

Verdict = Literal["PASS", "WARN", "FAIL"]
LOW_DISK_GB, LOW_MEMORY_GB, LOW_GPU_GB = 20, 8, 8
"""Below these a real study is likely to run out."""
EXTRAS = {
    "anndata": ("anndata", "export to AnnData"),
    "tensorboard": ("tensorboard", "pretrain.tensorboard"),
    "dask_jobqueue": ("cluster", "Slurm, PBS and LSF"),
}
"""Module -> extra of the package that brings it, and what it is for."""


@dataclass(frozen=True)
class Check:
    """One thing that was looked at."""

    name: str
    verdict: Verdict
    found: str
    remedy: str = ""
    """The line that fixes it; empty where nothing is amiss."""

    def to_json(self) -> dict[str, str]:
        return asdict(self)


def doctor(study: Path | None = None) -> list[Check]:
    """All checks; those of the file system only with a `study`, which need not exist yet."""
    checks: list[Check] = []
    parts: list[Callable[[], Iterator[Check]]] = [_software, _machine, _torch, _readers, _extras, _viewer]
    if study is not None:
        parts.append(lambda: _folder(study))
    for part in parts:
        try:
            checks += part()
        except Exception as error:  # a check that breaks is a finding like any other
            failure = Failure.of("", "", error)
            name = getattr(part, "__name__", "folder").strip("_")
            checks.append(Check(name, "FAIL", failure.reason, f"{failure.remedy}: this should not happen"))
    return checks


def doctor_summary(checks: list[Check]) -> Summary:
    """For people."""
    rows = [(check.verdict, check.name, check.found) for check in checks]
    lines = [f"{check.verdict} {check.name}: {check.remedy}" for check in checks if check.remedy]
    worst = next((verdict for verdict in ("FAIL", "WARN") if any(check.verdict == verdict for check in checks)), "PASS")
    end = {
        "FAIL": "something that is needed does not work",
        "WARN": "it works; see the warnings for what would be better",
        "PASS": "all is well",
    }[worst]
    return Summary((*lines, end), table=(("", "what", "found"), *rows))


def _check(name: str, good: bool, found: str, remedy: str, otherwise: Verdict = "WARN") -> Check:
    return Check(name, "PASS", found) if good else Check(name, otherwise, found, remedy)


# ---------------------------------------------------------------------------------------------------- software, machine


def _software() -> Iterator[Check]:
    version = platform.python_version()
    yield _check(
        "Python", sys.version_info >= (3, 11), version, "Use Python 3.11 or newer: python3.12 -m venv .venv", "FAIL"
    )
    broken = [
        requirement.split(";")[0].strip()
        for requirement in importlib.metadata.requires("selfvitmil") or ()
        if "extra ==" not in requirement and not _installed(requirement)
    ]
    remedy = f"pip install {' '.join(repr(each) for each in broken)}"
    found = f"{__version__}, {'needs ' + ', '.join(broken) if broken else 'with all that it needs'}"
    yield _check("selfvitmil", not broken, found, remedy, "FAIL")


def _installed(requirement: str) -> bool:
    """Whether a package is there in a version that is new enough (requirements here are plain lower bounds)."""
    name, _, least = requirement.split(";")[0].strip().partition(">=")
    try:
        have = importlib.metadata.version(name.strip())
    except importlib.metadata.PackageNotFoundError:
        return False
    return _numbers(have) >= _numbers(least) if least else True


def _numbers(version: str) -> tuple[int, ...]:
    parts = version.split("+")[0].split(".")
    return tuple(int("".join(filter(str.isdigit, part)) or 0) for part in parts[:3])


def _machine() -> Iterator[Check]:
    cores = num_cores()
    yield _check("cores", cores >= 2, str(cores), "More cores cut tiles faster; --workers sets how many are used")
    memory_gb = memory_bytes() / 1e9
    remedy = f"Use --workers {max(1, int(memory_gb // 2))} and smaller batches (--embed.batch 64)"
    yield _check("memory", memory_gb >= LOW_MEMORY_GB, f"{memory_gb:.1f} GB", remedy)


def memory_bytes() -> int:
    """Memory that this process may use: the machine's, or less where its control group allows less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")):
        try:
            total = min(total, int(limit.read_text()))
        except (OSError, ValueError):  # not Linux, no limit, or another kind of control group
            continue
    return total


def existing_folder(study: Path) -> Path:
    """Return the study's folder, or the nearest folder above it that exists."""
    return next(place for place in (study.absolute(), *study.absolute().parents) if place.exists())


def _torch() -> Iterator[Check]:
    import torch

    yield Check("torch", "PASS", torch.__version__)
    if not torch.cuda.is_available():
        built = "this torch is built without CUDA" if torch.version.cuda is None else "CUDA finds none"
        remedy = (
            "For a NVIDIA GPU: nvidia-smi must list it, and torch must be a CUDA build (pytorch.org tells which); "
            "without one, use a small encoder"
        )
        yield Check("GPU", "WARN", f"none ({built}): pretraining and embedding run on the CPU", remedy)
        return
    for index in range(torch.cuda.device_count()):
        yield _gpu(torch, index)


def _gpu(torch: Any, index: int) -> Check:
    name = f"GPU {index}"
    try:
        free, total = torch.cuda.mem_get_info(index)
        ones = torch.ones(64, 64, device=f"cuda:{index}")
        right = bool((ones @ ones == 64).all())
    except RuntimeError as error:
        line = str(error).splitlines()[0]
        return Check(name, "FAIL", f"cannot be used: {line}", "Restart the machine or its driver; see nvidia-smi")
    half = "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "no bf16, fp16 is used"
    found = f"{torch.cuda.get_device_name(index)}, {total / 1e9:.0f} GB ({free / 1e9:.0f} free), {half}"
    if not right:
        return Check(name, "FAIL", f"{found}: a product came out wrong", "The device is broken: choose another one")
    remedy = "Others use it, or it is small: lower --embed.batch, raise --pretrain.accumulate"
    return _check(name, free / 1e9 >= LOW_GPU_GB, found, remedy)


# ---------------------------------------------------------------------------------------------------- slides


def _readers() -> Iterator[Check]:
    """Read a synthetic slide with both readers and compare the pixels."""
    import numpy as np
    import openslide

    from selfvitmil.slides import open_slide, synthetic

    version = importlib.metadata.version
    versions = {
        "openslide": f"OpenSlide {openslide.__library_version__}, openslide-python {openslide.__version__}",
        "jpegtiff": f"simplejpeg {version('simplejpeg')}, tifffile {version('tifffile')}",
    }
    tiles: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="selfvitmil-doctor-") as folder:
        path = Path(folder) / "made.svs"
        synthetic.make_slide(path, seed=0, size=(1024, 1024), mpp=0.5)
        for reader, found in versions.items():
            try:
                with open_slide(path, reader=reader) as slide:
                    tiles[reader] = slide.read_tile(256, 256, 224, 0.5).astype(int)
            except SelfVitMilError as error:
                yield Check(f"reader {reader}", "FAIL", f"{found}: {error.reason}", READER_REMEDY)
            else:
                yield Check(f"reader {reader}", "PASS", f"{found}; a synthetic slide was read")
    if len(tiles) == 2:
        apart = int(np.abs(tiles["openslide"] - tiles["jpegtiff"]).max())
        remedy = "Use --slide.reader openslide, and report the versions above"
        yield _check("readers agree", apart <= 2, f"largest difference {apart} of 255", remedy, "FAIL")


READER_REMEDY = "pip install --force-reinstall openslide-python openslide-bin simplejpeg tifffile"


# ---------------------------------------------------------------------------------------------------- extras, viewer


def _extras() -> Iterator[Check]:
    for module, (extra, purpose) in EXTRAS.items():
        if importlib.util.find_spec(module) is not None:
            yield Check(f"extra {extra}", "PASS", f"there, for {purpose}")
        else:
            # Nothing is amiss without an extra, so this is no warning.
            yield Check(
                f"extra {extra}", "PASS", f'not installed: pip install "selfvitmil[{extra}]" if {purpose} is wanted'
            )


def _viewer() -> Iterator[Check]:
    vendor = resources.files("selfvitmil") / "view" / "static" / "vendor"
    found = sorted(item.name for item in vendor.iterdir()) if vendor.is_dir() else []
    scripts = [name for name in found if name.endswith(".js")] or [name for name in found if "openseadragon" in name]
    remedy = "Install a wheel, which carries it; in a checkout `pip install -e .` fetches OpenSeadragon while building"
    words = ", ".join(scripts) if scripts else "the browser part is not there: `selfvitmil view` cannot show slides"
    yield _check("viewer", bool(scripts), words, remedy)


# ---------------------------------------------------------------------------------------------------- the folder


def _folder(study: Path) -> Iterator[Check]:
    """Space, and whether files can be written, renamed and locked where the study lies or will lie."""
    place = existing_folder(study)
    free_gb = shutil.disk_usage(place).free / 1e9
    remedy = f"Free some, or use another disk; `selfvitmil plan {study.name}` says how much a study needs"
    yield _check("disk", free_gb >= LOW_DISK_GB, f"{free_gb:.1f} GB free for {study.name}", remedy)
    if not place.is_dir():
        yield Check("writing", "FAIL", f"{place.name} is a file, and a study is a folder", "Name another folder")
        return
    if not os.access(place, os.W_OK):
        yield Check(
            "writing", "FAIL", f"{place.name or place} cannot be written to", f"chmod u+w {place}, or another folder"
        )
        return
    try:
        with tempfile.TemporaryDirectory(prefix=".selfvitmil-doctor-", dir=place) as folder:
            write_text(Path(folder) / "whole.txt", "whole")
            yield Check("writing", "PASS", "files are written, synced and renamed")
            yield _locking(Path(folder) / "lock")
    except (SelfVitMilError, OSError) as error:
        reason = error.reason if isinstance(error, SelfVitMilError) else str(error.strerror or error)
        yield Check("writing", "FAIL", reason, "Choose a folder on a disk that can be written to")


def _locking(path: Path) -> Check:
    """Whether a second hold on a lock is refused, as it must be."""
    with path.open("w") as first, path.open("r+") as second:
        try:
            fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            remedy = "Mount the drive with locks (NFS: without nolock), or keep the study on a local disk"
            return Check("locking", "FAIL", f"the file system has no locks ({error.strerror})", remedy)
        try:
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return Check("locking", "PASS", "two commands cannot work on the study at once")
    remedy = "Keep the study on a local disk, or take care yourself that one command works on it at a time"
    return Check("locking", "WARN", "the file system gives one lock to two", remedy)
