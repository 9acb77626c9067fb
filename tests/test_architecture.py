"""Who may import whom, and what importing costs."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import selfvitmil

ROOT = Path(selfvitmil.__file__).parent

BELOW = ["errors", "geometry", "settings", "store", "annotations", "metrics", "formatting"]
BELOW += ["engine", "runtime"]
STAGES = [
    "cohort",
    "outcomes",
    "pseudonyms",
    "slides",
    "tissue",
    "stain",
    "tiles",
    "quality",
    "tiling",
    "data",
    "encoder",
    "pretrain",
    "bags",
    "embed",
]
STAGES += ["aggregate", "aggregators", "evaluate", "localize", "report", "view"]
EDGE = ["package", "study", "stages", "commands", "rendering", "api", "cli", "__main__", "__init__"]
FLOW = [*BELOW, *STAGES, *EDGE]


def stage_of(path: Path) -> str:
    return path.relative_to(ROOT).with_suffix("").parts[0]


def imported_modules(path: Path):
    """(stage, line) of every import of our own modules: absolute, relative and `import x.y` forms alike."""
    package = ("selfvitmil", *path.relative_to(ROOT).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = list(package[: len(package) - node.level + 1]) if node.level else []
            base = start + (node.module.split(".") if node.module else [])
            names = [base] if len(base) > 1 else [[*base, alias.name] for alias in node.names]
        else:
            continue
        for parts in names:
            if parts[0] == "selfvitmil" and len(parts) > 1 and parts[1] in FLOW:
                yield parts[1], node.lineno


def test_stages_import_upstream_only():
    for path in ROOT.rglob("*.py"):
        here = stage_of(path)
        for there, line in imported_modules(path):
            allowed = here in EDGE or FLOW.index(there) <= FLOW.index(here)
            assert allowed, f"{path.relative_to(ROOT)}:{line} imports {there}"


def test_only_stages_and_reports_know_pretraining():
    for path in ROOT.rglob("*.py"):
        if stage_of(path) in ("aggregate", "aggregators", "data", "embed", "encoder", "runtime"):
            assert all(there != "pretrain" for there, _ in imported_modules(path)), path.relative_to(ROOT)


def test_every_module_has_its_place_in_the_flow():
    modules = {stage_of(path) for path in ROOT.rglob("*.py")}
    assert modules <= set(FLOW)


def test_import_walker_sees_all_forms(tmp_path: Path, monkeypatch):
    file = tmp_path / "slides" / "a.py"
    file.parent.mkdir()
    file.write_text(
        "import selfvitmil.tiles\nfrom selfvitmil.tiles import x\nfrom selfvitmil import tiles\n"
        "from ..tiles import x\nfrom .. import tiles\nfrom . import b\n"
    )
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    assert [there for there, _ in imported_modules(file)] == ["tiles"] * 5 + ["slides"]


def modules_after(code: str) -> set[str]:
    script = f"import sys\n{code}\nprint(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.split("\n")[-2].split())


def test_import_and_help_stay_light():
    heavy = {"torch", "openslide", "distributed", "scipy", "shapely"}
    assert not modules_after("import selfvitmil") & heavy
    help_code = "from selfvitmil.cli import parser\ntry: parser.app(['tile', '--help'])\nexcept SystemExit: pass"
    assert not modules_after(help_code) & heavy


def test_workers_do_not_load_torch_for_what_needs_none():
    """A process that cuts tiles, exports heatmaps or reads sections of the report would start for seconds longer."""
    modules = ("stages", "tiles", "slides.synthetic", "tiling", "localize.export", "report.slide_sections")
    assert "torch" not in modules_after(f"import {', '.join(f'selfvitmil.{name}' for name in modules)}")


def test_a_wrong_folder_is_said_before_torch_is_loaded():
    call = "cli.main(['predict', 'nowhere', 'a.svs', '--out', 'out'])"
    code = f"from selfvitmil import cli\ntry: {call}\nexcept SystemExit as end: assert end.code == 3"
    assert "torch" not in modules_after(code)


def test_public_names():
    assert selfvitmil.__all__ == ["Encoder", "Slide", "Study", "__version__", "aggregators", "metrics", "open_slide"]
    assert all(hasattr(selfvitmil, name) for name in selfvitmil.__all__)


def test_there_is_one_list_of_stages():
    """No other tuple or list in the package names stages one by one."""
    from selfvitmil.stages import STAGES as ALL

    names = {stage.name for stage in ALL}
    assert len(names) == len(ALL)
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Tuple | ast.List):
                texts = [each.value for each in node.elts if isinstance(each, ast.Constant)]
                listed = len(texts) == len(node.elts) > 1 and names.issuperset(texts)
                assert not listed, f"{path.relative_to(ROOT)}:{node.lineno} lists stages"
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 2000:
                mentioned = names & {word.strip("`,.") for word in node.value.split()}
                assert len(mentioned) < len(names) - 2, f"{path.relative_to(ROOT)}:{node.lineno} lists stages in words"


def test_only_the_command_line_prints():
    """Results are returned; progress and warnings of long work go to standard error through `engine`."""
    printing = {
        path.relative_to(ROOT).as_posix()
        for path in ROOT.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    }
    assert printing <= {"cli/__init__.py", "cli/output.py", "engine/progress.py", "store/failures.py"}
