"""Read README and documentation: code blocks, and the commands in them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]

WORDS = {"TOOL": "clam", "COMMAND": "check", "[STUDY]": "STUDY"}
"""Words that stand for something in command lines, where a parser would not take them as they are."""


def fences(text: str) -> Iterator[tuple[str, str]]:
    """(language, content) of every code block, also of those inside lists."""
    for indent, language, body in re.findall(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", text, re.DOTALL | re.MULTILINE):
        yield language, re.sub(rf"^{indent}", "", body, flags=re.MULTILINE)


def prose(text: str) -> str:
    return re.sub(r"^( *)```.*?^\1```", "", text, flags=re.DOTALL | re.MULTILINE)


def inline_code(text: str) -> list[str]:
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose(text))]


def command_of(line: str) -> list[str] | None:
    """The arguments that a shell line gives to selfvitmil; None when it calls something else."""
    if not re.search(r"(^|[ /])selfvitmil ", line):
        return None
    words = shlex.split(line, comments=True)
    for k, word in enumerate(words):
        if Path(word).name == "selfvitmil" and (k == 0 or words[k - 1] == "-m"):
            after = words[k + 1 :]
            end = next((i for i, each in enumerate(after) if each in ("|", "&&", ";", ">")), len(after))
            return [WORDS.get(each, each) for each in after[:end]]
    return None


def command_lines(page: Path) -> list[str]:
    """The shell lines of a page that call selfvitmil, in order; continued lines are joined, comments left out."""
    found: list[str] = []
    for language, body in fences(page.read_text(encoding="utf-8")):
        for line in body.replace("\\\n", " ").splitlines() if language not in ("python", "toml", "text") else ():
            if command_of(line) is not None:
                found.append(" ".join(re.sub(r"\s#.*", "", line).split()))
    return found
