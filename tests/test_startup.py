"""What starts quickly: help without the parser, and commands without the libraries that they do not need."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from selfvitmil import __version__
from selfvitmil.cli.output import torch_announced
from selfvitmil.cli.overview import COMMANDS, overview
from selfvitmil.cli.parser import app


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "selfvitmil", *arguments],
        capture_output=True,
        text=True,
        encoding="utf-8",
        env={**os.environ, "PYTHONUTF8": "1", **environment},
        check=False,
    )


@pytest.mark.parametrize("width", [60, 80, 133])
def test_the_overview_fits_the_terminal_and_names_every_command(width: int):
    shown = overview(width)
    assert max(map(len, shown.splitlines())) <= width
    assert [line.split()[0] for line in shown.splitlines() if re.match(r"  \w", line)] == list(COMMANDS)
    words = " ".join(shown.split())
    assert all(text.replace("`", "") in words for text in COMMANDS.values())


def test_colours_change_no_character():
    coloured = overview(80, colour=True)
    assert "  \x1b[36mtile\x1b[0m " in coloured
    for code in ("\x1b[1m", "\x1b[36m", "\x1b[0m"):
        coloured = coloured.replace(code, "")
    assert coloured == overview(80)


def test_every_command_has_words_and_a_parser():
    assert set(COMMANDS) == {name for name in app if not name.startswith("-")}


@pytest.mark.parametrize("given", [[], ["-h"], ["--help"]])
def test_help_prints_the_overview(given: list[str]):
    done = run(*given, COLUMNS="100")
    assert (done.returncode, done.stdout, done.stderr) == (0, overview(100) + "\n", "")


def test_help_is_plain_ascii():
    assert run("--help", PYTHONIOENCODING="ascii", COLUMNS="40").returncode == 0
    assert overview(80).isascii()


def test_version():
    assert run("--version").stdout == f"{__version__}\n"


def test_help_loads_nothing_but_the_standard_library_and_words():
    code = "import sys; from selfvitmil import cli\ntry: cli.main(['--help'])\nexcept SystemExit: print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, encoding="utf-8", check=True)
    loaded = set(done.stdout.splitlines()[-1].split())
    assert {name for name in loaded if name.startswith("selfvitmil")} == {
        "selfvitmil",
        "selfvitmil.cli",
        "selfvitmil.cli.overview",
    }
    assert not loaded & {"cyclopts", "pydantic", "rich", "numpy", "inspect", "importlib.metadata", "dataclasses"}


def test_pytorch_is_announced_once_and_only_when_it_is_loaded(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("import torch.nn\nimport torch.optim\n")
    for part in ("nn", "optim"):
        (tmp_path / "torch" / f"{part}.py").write_text("")
    code = (
        "import importlib.util, sys\nfrom selfvitmil.cli.output import torch_announced\n"
        "with torch_announced():\n    importlib.util.find_spec('torch'); print('sought', file=sys.stderr)\n"
        "    import torch\n    print('loaded', file=sys.stderr)\n"
        "with torch_announced():\n    import torch.nn.functional_\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.stderr.split()[:4] == ["sought", "loading", "PyTorch", "loaded"]
    assert done.stderr.count("loading PyTorch") == 1
    before = list(sys.meta_path)
    with torch_announced():
        pass
    assert sys.meta_path == before


# "torch" itself is in sys.modules when "loading PyTorch" is printed; `doctor` works before its first line.
SLOW_TO_IMPORT = {
    *("torch.nn", "torchvision", "timm", "matplotlib", "pandas", "sklearn", "dask", "distributed", "openslide"),
    *("scipy.optimize", "scipy.sparse", "scipy.spatial", "scipy.stats"),
}
WITHOUT_ARRAYS_OF_TILES = ("check", "run", "status")
COMMANDS_OF_A_STUDY = ("tile", "pretrain", "train", "compare", "evaluate", "localize", "report", "plan", "view")


@pytest.mark.slow
def test_no_command_imports_slow_libraries_before_its_first_line(tmp_path):
    """Each command is forked from a process that has loaded the parser, and ends at the first character it prints."""
    code = (
        "import os, sys\nfrom selfvitmil import cli\nfrom selfvitmil.cli import parser\n"
        "class First:\n"
        "    encoding = 'utf-8'\n"
        "    def isatty(self): return False\n"
        "    def flush(self): pass\n"
        "    def write(self, text):\n"
        "        os.write(1, (' '.join([name, *sys.modules]) + '\\n').encode())\n"
        "        os._exit(0)\n"
        "for name in sys.argv[2:]:\n"
        "    if os.fork() == 0:\n"
        "        sys.stdout = sys.stderr = First()\n"
        "        cli.main([name, sys.argv[1]])\n"
        "        os._exit(1)\n"
        "    os.wait()\n"
    )
    names = (*WITHOUT_ARRAYS_OF_TILES, *COMMANDS_OF_A_STUDY)
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), *names],
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=True,
    )
    loaded = {line.split()[0]: set(line.split()[1:]) for line in done.stdout.splitlines()}
    assert set(loaded) == set(names)
    assert {name: found & SLOW_TO_IMPORT for name, found in loaded.items() if found & SLOW_TO_IMPORT} == {}
    assert not {"scipy", "h5py", "PIL"} & set.union(*map(loaded.__getitem__, WITHOUT_ARRAYS_OF_TILES))
    assert all("selfvitmil.cli.parser" in found for found in loaded.values())
