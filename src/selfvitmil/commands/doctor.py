"""`doctor`: does this machine have what is needed? Each check ends in PASS, WARN or FAIL, with a remedy.

Things are tried, not only looked up: the study's file system has to write, rename and lock, and every stage checks what
it needs itself (`Stage.doctor`): slides are read, GPUs multiply. The network is not used.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from packaging.requirements import Requirement

from selfvitmil import __version__
from selfvitmil.engine import num_cores
from selfvitmil.errors import SelfVitMilError
from selfvitmil.stages import STAGES
from selfvitmil.stages.base import CheckStatus, MachineCheck, StageResult, passed
from selfvitmil.store.failures import Failure
from selfvitmil.store.files import write_text

PASS, WARN, FAIL = CheckStatus
LOW_DISK_GB, LOW_MEMORY_GB = 20, 8
"""Below these a real study is likely to run out."""
EXTRAS = {
    "anndata": ("anndata", "export to AnnData"),
    "tensorboard": ("tensorboard", "pretrain.tensorboard"),
    "dask_jobqueue": ("cluster", "Slurm, PBS and LSF"),
}
"""Module -> extra of the package that installs it, and what it is for."""


@dataclass(frozen=True)
class DoctorResult(StageResult):
    """All checks of a machine."""

    checks: tuple[MachineCheck, ...]

    @property
    def status(self) -> CheckStatus:
        """The worst of the checks."""
        found = {check.status for check in self.checks}
        return FAIL if FAIL in found else WARN if WARN in found else PASS


def doctor(study: Path | None = None) -> DoctorResult:
    """Check this machine; its file system only with a `study`, which need not exist yet."""
    parts: dict[str, Callable[[], Iterable[MachineCheck]]] = {
        "software": check_software,
        "machine": check_machine,
        **{f"stage {stage.name}": stage.doctor for stage in STAGES},
        "extras": check_extras,
        "viewer": check_viewer,
    }
    if study is not None:
        parts["folder"] = lambda: check_folder(study)
    checks: list[MachineCheck] = []
    for name, part in parts.items():
        try:
            checks += part()
        except Exception as error:  # a check that breaks is a finding like any other
            failure = Failure.of("", "", error)
            checks.append(MachineCheck(name, FAIL, failure.reason, "check-failed", failure.remedy))
    return DoctorResult(tuple(checks))


def check_software() -> Iterable[MachineCheck]:
    """Check the versions of all required packages."""
    yield passed("Python", platform.python_version())
    requirements = map(Requirement, importlib.metadata.requires("selfvitmil") or ())
    missing = [f"{each.name}{each.specifier}" for each in requirements if not is_satisfied(each)]
    if missing:
        remedy = f"pip install {' '.join(map(repr, missing))}"
        found = f"{__version__}, which requires {', '.join(missing)}"
        yield MachineCheck("selfvitmil", FAIL, found, "missing-packages", remedy)
    else:
        yield passed("selfvitmil", f"{__version__}, all required packages are installed")


def is_satisfied(requirement: Requirement) -> bool:
    """Return whether a package is installed in a suitable version, or is not needed here (an extra, another system)."""
    if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
        return True
    try:
        return requirement.specifier.contains(importlib.metadata.version(requirement.name), prereleases=True)
    except importlib.metadata.PackageNotFoundError:
        return False


def check_machine() -> Iterable[MachineCheck]:
    """Check cores and memory."""
    cores, memory_gb = num_cores(), memory_bytes() / 1e9
    if cores >= 2:
        yield passed("cores", str(cores))
    else:
        yield MachineCheck(
            "cores", WARN, str(cores), "few-cores", "More cores tile faster; --workers sets their number"
        )
    if memory_gb >= LOW_MEMORY_GB:
        yield passed("memory", f"{memory_gb:.1f} GB")
    else:
        remedy = f"Use --workers {max(1, int(memory_gb // 2))} and smaller batches (--embed.batch 64)"
        yield MachineCheck("memory", WARN, f"{memory_gb:.1f} GB", "low-memory", remedy)


def memory_bytes() -> int:
    """Return the memory that this process may use: the machine's, or the limit of its control group."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")):
        try:
            total = min(total, int(limit.read_text()))
        except (OSError, ValueError):  # not Linux, no limit, or another kind of control group
            continue
    return total


def check_extras() -> Iterable[MachineCheck]:
    """Report which extras are installed; none of them is required."""
    for module, (extra, purpose) in EXTRAS.items():
        found = f"installed, for {purpose}"
        if importlib.util.find_spec(module) is None:
            found = f'not installed; for {purpose}: pip install "selfvitmil[{extra}]"'
        yield passed(f"extra {extra}", found)


def check_viewer() -> Iterable[MachineCheck]:
    """Check that the viewer's script for browsers was built."""
    vendor = resources.files("selfvitmil") / "view" / "static" / "vendor"
    names = sorted(item.name for item in vendor.iterdir()) if vendor.is_dir() else []
    scripts = [name for name in names if name.endswith(".js")]
    if scripts:
        yield passed("viewer", ", ".join(scripts))
    else:
        found = "the scripts for the browser are missing: `selfvitmil view` cannot show slides"
        remedy = (
            "Install a wheel, which has them; in a checkout `pip install -e .` fetches OpenSeadragon while building"
        )
        yield MachineCheck("viewer", WARN, found, "no-viewer", remedy)


# ---------------------------------------------------------------------------------------------------- the folder


def existing_folder(study: Path) -> Path:
    """Return the study's folder, or the nearest folder above it that exists."""
    return next(place for place in (study.absolute(), *study.absolute().parents) if place.exists())


def check_folder(study: Path) -> Iterable[MachineCheck]:
    """Check free space, and whether files can be written, renamed and locked in the folder of a study."""
    place = existing_folder(study)
    free_gb = shutil.disk_usage(place).free / 1e9
    found = f"{free_gb:.1f} GB free for {study.name}"
    if free_gb >= LOW_DISK_GB:
        yield passed("disk", found)
    else:
        remedy = f"Free some, or use another disk; `selfvitmil plan {study.name}` estimates what a study needs"
        yield MachineCheck("disk", WARN, found, "low-disk", remedy)
    if not place.is_dir():
        found = f"{place.name} is a file, and a study is a folder"
        yield MachineCheck("writing", FAIL, found, "not-a-folder", "Name another folder")
        return
    try:
        with tempfile.TemporaryDirectory(prefix=".selfvitmil-doctor-", dir=place) as folder:
            write_text(Path(folder) / "file.txt", "text")
            yield passed("writing", "files are written, synced and renamed")
            yield _check_locks(Path(folder) / "lock")
    except (SelfVitMilError, OSError) as error:
        reason = error.reason if isinstance(error, SelfVitMilError) else str(error.strerror or error).lower()
        found = f"{place.name or place} cannot be written to: {reason}"
        yield MachineCheck("writing", FAIL, found, "not-writable", f"chmod u+w {place}, or choose another folder")


def _check_locks(path: Path) -> MachineCheck:
    """Check that a second lock on a locked file is refused."""
    with path.open("w") as first, path.open("r+") as second:
        try:
            fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            remedy = "Mount the drive with locks (NFS: without nolock), or keep the study on a local disk"
            return MachineCheck("locking", FAIL, f"no file locks ({error.strerror})", "no-locks", remedy)
        try:
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return passed("locking", "two commands cannot write to the study at once")
    remedy = "Keep the study on a local disk, or make sure that one command at a time works on it"
    return MachineCheck("locking", WARN, "the file system grants one lock twice", "weak-locks", remedy)
