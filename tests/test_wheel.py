"""The package as users get it: built, installed outside the checkout, and run there."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "selfvitmil"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the source archive, and the wheel that was built from it."""
    out = tmp_path_factory.mktemp("dist")
    done = subprocess.run(
        [sys.executable, "-m", "uv", "build", "--quiet", "--out-dir", str(out), str(ROOT)],
        capture_output=True,
        text=True,
        timeout=200,
    )
    if any(sign in done.stderr for sign in ("Failed to fetch", "network was disabled")):
        pytest.skip("the build's own requirements cannot be fetched: the package registry is not reached")
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (found,) = built.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of a new virtual environment with the wheel, which sees our dependencies but not this checkout."""
    folder = tmp_path_factory.mktemp("elsewhere") / "venv"
    venv.create(folder, with_pip=False, symlinks=True)
    command = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*command, "--python", str(folder / "bin" / "python"), str(wheel)], check=True, timeout=100)
    own = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    # Each line names a folder to look into; .pth files in there, such as that of the checkout, do not count.
    (own / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin"


def run(program: Path, *arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.run(
        [str(program), *map(str, arguments)], cwd=cwd, env=environment, capture_output=True, text=True, timeout=200
    )


def test_archives_hold_what_they_should_and_nothing_else(built: Path, wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
    tops = {name.split("/")[0] for name in names}
    assert len(tops) == 2
    assert tops == {"selfvitmil", next(top for top in tops if top.endswith(".dist-info"))}
    here = {
        f"selfvitmil/{path.relative_to(SOURCE).as_posix()}"
        for path in SOURCE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {name for name in names if name.startswith("selfvitmil/")} == here
    for needed in (
        "presets/paper.toml",
        "presets/demo.toml",
        "view/static/index.html",
        "view/static/style.css",
        "report/style.css",
        "report/templates/page.html.j2",
    ):
        assert f"selfvitmil/{needed}" in names, needed
    assert {f"selfvitmil/view/static/vendor/{file}" for file in ("openseadragon.min.js", "viewer.js")} <= set(names)
    assert any(name.endswith("licenses/LICENSE") for name in names)
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        files = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    for needed in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE", "Makefile", "tests/conftest.py"):
        assert needed in files, needed
    assert {name for name in files if name.startswith(".")} <= {".npmrc", ".gitignore", ".dockerignore"}
    assert not [name for name in files if "__pycache__" in name or name.startswith(("site/", "demo/", "dist/"))]


def test_it_runs_outside_the_checkout(installed: Path, tmp_path: Path):
    where = run(installed / "python", "-c", "import selfvitmil; print(selfvitmil.__file__)", cwd=tmp_path)
    assert Path(where.stdout.strip()).is_relative_to(installed.parent), where.stdout + where.stderr
    selfvitmil = installed / "selfvitmil"
    told = run(selfvitmil, "--help", cwd=tmp_path)
    assert told.returncode == 0, told.stderr
    assert "Trained models on new slides" in told.stdout
    healthy = run(selfvitmil, "doctor", cwd=tmp_path)
    assert healthy.returncode == 0, healthy.stdout + healthy.stderr
    assert "FAIL" not in healthy.stdout
    made = run(selfvitmil, "synth", "made", "--slides", 2, "--size-px", 1024, "--workers", 0, cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    flags = ("--tile.mpp", 1, "--tile.size-px", 64, "--workers", 0)
    cut = run(selfvitmil, "tile", "study", "--cohort", "made/cohort.csv", *flags, cwd=tmp_path)
    assert cut.returncode == 0, cut.stdout + cut.stderr
    assert len(list((tmp_path / "study" / "tiles" / "1mpp_64px_0px").glob("*.h5"))) == 2
    page = run(selfvitmil, "report", "study", cwd=tmp_path)
    assert page.returncode == 0, page.stdout + page.stderr
    assert "<style" in (tmp_path / "study" / "report" / "index.html").read_text(encoding="utf-8")
