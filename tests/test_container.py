"""The Containerfile: held against rules for images, and its steps run in an empty folder; no engine is needed."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
LOCK = (ROOT / "requirements.lock").read_text(encoding="utf-8")
runtime_lock = runpy.run_path(str(ROOT / "container" / "runtime_lock.py"))["runtime_lock"]
SPEED_ONLY = ("UV_NO_CACHE", "UV_LINK_MODE", "UV_COMPILE_BYTECODE")
"""Variables that change nothing but time and space; without them the test takes gigabytes from the machine's cache."""


@dataclass
class Stage:
    """One FROM of a Containerfile."""

    base: str
    name: str
    steps: list[tuple[str, str]] = field(default_factory=list)
    """Instructions with their arguments."""

    def of(self, instruction: str) -> list[str]:
        return [text for word, text in self.steps if word == instruction]


def stages() -> list[Stage]:
    text = (ROOT / "Containerfile").read_text(encoding="utf-8")
    lines = "\n".join(line for line in text.splitlines() if not line.startswith("#")).replace("\\\n", " ").splitlines()
    found: list[Stage] = []
    for line in filter(str.strip, lines):
        word, _, rest = line.partition(" ")
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            found.append(Stage(base, name))
        elif found:
            found[-1].steps.append((word, " ".join(rest.split())))
    return found


def names_in(lock: str) -> set[str]:
    return {canonicalize_name(name) for name in re.findall(r"^([A-Za-z0-9._-]+)==", lock, re.MULTILINE)}


def closure(name: str) -> set[str]:
    """What a package needs here, by the metadata of what is installed."""
    found, todo = set(), [name]
    while todo:
        for line in importlib.metadata.requires(todo.pop()) or ():
            requirement = Requirement(line)
            needed = canonicalize_name(requirement.name)
            if (requirement.marker is None or requirement.marker.evaluate({"extra": ""})) and needed not in found:
                found.add(needed)
                todo.append(needed)
    return found


# ---------------------------------------------------------------------------------------------------- rules


def test_locked_packages_of_run_time_are_complete_and_no_others():
    kept = runtime_lock(LOCK)
    assert closure("selfvitmil") - {"setuptools"} <= names_in(kept)
    assert not names_in(kept) & {"pytest", "ruff", "basedpyright", "playwright", "mkdocs-material", "monai", "torchmil"}
    entries = re.split(r"\n(?=[A-Za-z0-9])", kept)
    assert all(entry in LOCK and "--hash=sha256:" in entry for entry in (each.strip() for each in entries))


def test_everything_installed_is_locked_with_hashes():
    installs = [
        command
        for stage in stages()
        for run in stage.of("RUN")
        for command in run.split("&&")
        if "pip install" in command
    ]
    assert len(installs) == 3
    for command in installs:
        assert "--require-hashes -" in command or "--no-deps --no-index" in command, command
    build = (ROOT / "container" / "build.lock").read_text(encoding="utf-8")
    asked = {Requirement(line) for line in (ROOT / "container" / "build.in").read_text(encoding="utf-8").split()}
    for requirement in asked:
        version = re.search(rf"^{requirement.name}==(\S+)", build, re.MULTILINE)
        assert version, requirement
        assert requirement.specifier.contains(version[1])


def test_image_follows_the_rules():
    build, final = stages()
    assert build.name == "build"
    for stage in (build, final):
        assert stage.base == "${BASE}"  # to be named by whoever builds
        assert not stage.of("ADD")
    default = re.search(r"^ARG BASE=(\S+)$", (ROOT / "Containerfile").read_text(encoding="utf-8"), re.MULTILINE)
    assert default
    assert re.fullmatch(r"python:3\.\d+-slim-\w+", default[1])  # a version, and no registry's host
    assert final.of("COPY") == ["--from=build /opt/selfvitmil /opt/selfvitmil"]  # no tools, no sources
    assert all(text.startswith("apt-get ") and "rm -rf /var/lib/apt/lists" in text for text in final.of("RUN"))
    (user,) = final.of("USER")
    assert all(int(part) > 0 for part in user.split(":"))  # numeric, so that an engine can check that it is not root
    assert json.loads(final.of("ENTRYPOINT")[0]) == ["selfvitmil"]
    for stage in (build, final):
        for line in stage.of("ENV"):
            assert not re.search(r"TOKEN|PASSWORD|SECRET|KEY", line)
    assert {".git", ".venv", "node_modules", "demo", "**/vendor"} <= set(left_out())


# ---------------------------------------------------------------------------------------------------- its steps


@pytest.fixture
def root() -> Iterator[Path]:
    """An empty folder that every user may read, for / of the image."""
    folder = Path(tempfile.mkdtemp(prefix="container-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def left_out() -> list[str]:
    return (ROOT / ".dockerignore").read_text(encoding="utf-8").split()  # podman reads it, too


def inside(text: str, root: Path) -> str:
    """Return text with the image's own folders moved below `root`."""
    return re.sub(r"(?<![\w.}])/(src|opt|data)\b", rf"{root}/\1", text).replace("cd / ", f"cd {root} ")


def copy(arguments: str, work: Path) -> None:
    *sources, target = shlex.split(arguments)
    ignored = shutil.ignore_patterns(*(pattern.removeprefix("**/") for pattern in left_out()))
    for source in sources:
        if (ROOT / source).is_dir():
            shutil.copytree(ROOT / source, work / target, ignore=ignored, dirs_exist_ok=True)
        else:
            place = work / target / Path(source).name if target == "./" else work / target
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / source, place)


def variables(stage: Stage, root: Path) -> dict[str, str]:
    pairs = (pair.partition("=") for line in stage.of("ENV") for pair in shlex.split(line))
    return {name: inside(value, root) for name, _, value in pairs if name not in SPEED_ONLY}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_its_steps_make_a_program_that_runs_as_nobody_without_a_network(root: Path):
    build, final = stages()
    work = root / build.of("WORKDIR")[0].lstrip("/")
    work.mkdir(parents=True)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    kept |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", **variables(build, root)}
    for word, text in build.steps:
        if word == "COPY":
            copy(text, work)
        elif word == "RUN":
            done = subprocess.run(
                ["sh", "-c", inside(text, root)], cwd=work, env=kept, capture_output=True, text=True, check=False
            )
            if re.search("Failed to fetch|network was disabled|ConnectionError|NewConnectionError", done.stderr):
                pytest.skip("packages cannot be fetched: the package index is not reached")
            assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    shutil.rmtree(work)  # the final image has nothing of it
    shutil.rmtree(root / "opt" / "tools")

    user = int(final.of("USER")[0].split(":")[0])
    data = root / final.of("WORKDIR")[0].lstrip("/")
    data.mkdir()
    environment = {**variables(final, root), "HOME": str(data)}
    environment["PATH"] = environment["PATH"].replace("$PATH", "/usr/bin:/bin")
    (name,) = json.loads(final.of("ENTRYPOINT")[0])
    program = str(root / "opt" / "selfvitmil" / "bin" / name)
    as_nobody: list[str] = []
    if (
        os.geteuid() == 0
        and subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False).returncode == 0
    ):
        os.chown(data, user, user)
        as_nobody = ["unshare", "--net", "setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"]
        touched = subprocess.run([*as_nobody, "touch", program], capture_output=True, check=False)
        assert touched.returncode != 0  # what is installed is not the user's to change

    def run(*arguments: object) -> str:
        command = [*as_nobody, program, *map(str, arguments)]
        done = subprocess.run(
            command, cwd=data, env=environment, capture_output=True, text=True, timeout=200, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert "FAIL" not in run(*json.loads(final.of("CMD")[0]))
    run("synth", "made", "--slides", 2, "--size-px", 1024, "--workers", 0)
    run("tile", "study", "--cohort", "made/cohort.csv", "--tile.mpp", 1, "--tile.size-px", 64, "--workers", 0)
    assert len(list((data / "study" / "tiles" / "1mpp_64px_0px").glob("*.h5"))) == 2
