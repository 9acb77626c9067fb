"""README and documentation: links lead somewhere, command lines parse, code runs, nothing is left out."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import cyclopts
import pytest

from helpers.pages import DOCS, PAGES, ROOT, command_of, fences, inline_code, prose
from selfvitmil.cli.flags import SHORT, split_lists
from selfvitmil.cli.parser import app, output_flags
from selfvitmil.settings import StudySettings

COMMANDS = [name for name in app if not name.startswith("-")]

OTHERS = (
    "--nproc-per-node",
    "--gres",
    "--constraint",
    "--dtype",
    "--lifetime",
    "--lifetime-stagger",
    "--forceall",
    "--number",
)
"""Flags of other programs that the pages name alone."""

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())


def parse(arguments: list[str]) -> None:
    arguments, _ = output_flags(split_lists(arguments))
    app.parse_args(arguments, exit_on_error=False, print_error=False)


@cache
def anchors(page: Path) -> set[str]:
    """Of a page's headings, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.+)$", prose(page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip()) for heading in headings}


# ---------------------------------------------------------------------------------------------------- links


@pages
def test_links_and_pictures_lead_somewhere(page: Path):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page.read_text(encoding="utf-8"))):
        if re.match(r"\w+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


@pytest.mark.slow
def test_the_site_builds_and_asks_nobody_else(tmp_path: Path):
    """`--strict` makes errors of pages without a place in the menu, and of links and anchors that lead nowhere."""
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    built = list((tmp_path / "site").rglob("*.html"))
    assert len(built) > len(PAGES) - 2  # but README.md of the root; and a page for errors
    for html in built:
        text = html.read_text(encoding="utf-8")
        outside = re.findall(r"<(?:script|link|img|iframe)\b[^>]*(?:src|href)=[\"']?(?:https?:)?//[^>]*>", text)
        assert not outside, html.name


# ---------------------------------------------------------------------------------------------------- commands


@pages
def test_command_lines_parse(page: Path):
    text = page.read_text(encoding="utf-8")
    for language, body in fences(text):
        if language in ("python", "toml", "text"):
            continue
        for line in body.replace("\\\n", " ").splitlines():
            arguments = command_of(line)
            if arguments is not None:
                parse(arguments)
    for span in inline_code(text):
        arguments = command_of(span)
        if arguments is not None:
            try:
                parse(arguments)
            except cyclopts.MissingArgumentError:
                assert arguments[0] in COMMANDS  # `selfvitmil tile` as the name of a command


def test_a_wrong_flag_would_be_seen():
    assert command_of("torchrun --nproc-per-node 4 -m selfvitmil pretrain STUDY --name a  # b") == [
        "pretrain", "STUDY", "--name", "a"
    ]  # fmt: skip
    assert command_of("pip install selfvitmil") is None
    with pytest.raises(cyclopts.UnknownOptionError):
        parse(["tile", "STUDY", "--tile.mp", "0.5"])
    with pytest.raises(cyclopts.CycloptsError):
        parse(["tlie", "STUDY"])


@cache
def all_flags() -> set[str]:
    arguments = [each for name in COMMANDS for each in app[name].assemble_argument_collection()]
    common = {"--help", "--help-all", "--version", "--quiet", "--json", "--log-file", *SHORT}
    return common | {flag for each in arguments for flag in each.names if flag.startswith("--")}


@pages
def test_flags_that_are_named_exist(page: Path):
    for span in inline_code(page.read_text(encoding="utf-8")):
        for word in span.split() if span.startswith("--") else ():
            flag = word.split("=")[0]
            if flag.startswith("--") and flag not in OTHERS and not flag.endswith("*"):
                assert flag in all_flags(), span


def test_the_reference_leaves_nothing_out():
    commands = (DOCS / "reference" / "commands.md").read_text(encoding="utf-8")
    for name in COMMANDS:
        assert f"`selfvitmil {name}" in commands, name
    settings = (DOCS / "reference" / "settings.md").read_text(encoding="utf-8")
    for section in StudySettings.model_fields:
        assert section == "preset" or f"\n## {section}\n" in settings, section


@pytest.mark.parametrize("page", sorted((DOCS / "how-to").glob("*.md")), ids=lambda page: page.stem)
def test_a_how_to_begins_with_a_command_and_its_output(page: Path):
    """At most two sentences before the command, and a line between it and its output (a block of the language text)."""
    parts = re.split(r"^(```\w*\n.*?^```)\n", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    title, command, between, output = parts[:4]
    heading, _, before = title.strip().partition("\n")
    assert heading.startswith("# ")
    assert len(re.findall(r"[.?!](\s|$)", before)) <= 2
    assert command_of(command.splitlines()[1]) or "podman" in command or "pip install" in command
    assert len(between.split()) < 30
    assert output.startswith("```text\n")
    assert len(output.splitlines()) > 2


# ---------------------------------------------------------------------------------------------------- code


def source_of(module: str) -> Path | None:
    """The file of one of our modules."""
    place = ROOT / "src" / Path(*module.split("."))
    return next((file for file in (place.with_suffix(".py"), place / "__init__.py") if file.exists()), None)


@cache
def names_in(file: Path) -> set[str]:
    """What a module defines or imports; read, not loaded, since torch alone takes seconds."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.ImportFrom | ast.Import):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


@pages
def test_python_in_pages_compiles_and_imports_what_there_is(page: Path):
    for language, body in fences(page.read_text(encoding="utf-8")):
        for node in ast.walk(ast.parse(body)) if language == "python" else ():
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "selfvitmil":
                file = source_of(node.module or "")
                assert file, node.module
                for name in (alias.name for alias in node.names):
                    assert name in names_in(file) or source_of(f"{node.module}.{name}"), f"{node.module}.{name}"


@pytest.mark.slow
def test_the_examples_of_the_python_page_run(tmp_path: Path):
    page = (DOCS / "reference" / "python-api.md").read_text(encoding="utf-8")
    code = "\n".join(body for language, body in fences(page) if language == "python")
    code += "\nassert found.value > 0.8, found\nassert len(table) > 20\nassert not tiled.failures\n"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "missing.svs: no such file" in done.stdout


@pytest.mark.slow
def test_the_example_script_runs_and_finds_what_was_planted(tmp_path: Path):
    script = DOCS / "examples" / "features_to_table.py"
    done = subprocess.run([sys.executable, str(script), str(tmp_path / "made")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = {line.split("|")[1].strip(): line for line in done.stdout.splitlines() if line.startswith("| ")}
    assert float(rows["max"].split("|")[3].split()[0]) > 0.95
    shares = [int(share) for share in re.findall(r"(\d+)% of the attention", done.stdout)]
    assert len(shares) == 3
    assert min(shares) > 80


# ---------------------------------------------------------------------------------------------------- pages


def test_benchmarks_page_is_current():
    done = subprocess.run(
        [sys.executable, "-c", "import make_benchmarks_page as m; print(m.page(), end='')"],
        cwd=DOCS,
        capture_output=True,
        text=True,
        check=True,
    )
    written = (DOCS / "reference" / "benchmarks.md").read_text(encoding="utf-8")
    assert done.stdout == written, "run `make docs`"


def test_readme_is_short_and_its_tree_is_that_of_the_package():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    tree = next(body for _, body in fences(text) if body.startswith("src/selfvitmil/"))
    package, _, others = tree.partition("\nbenchmarks/")
    listed = {line.split()[0] for line in package.splitlines()[1:] if re.match(r"  \w", line)}
    source = ROOT / "src" / "selfvitmil"
    there = {path.name for path in source.glob("*.py") if not path.name.startswith("_")}
    there |= {f"{path.parent.name}/" for path in source.glob("*/__init__.py")} | {"presets/"}
    assert listed == there
    for line in f"benchmarks/{others}".splitlines():
        assert (ROOT / line.split()[0]).exists(), line
