"""Prints the part of requirements.lock that selfvitmil needs at run time, with its hashes: no tools of development.

    python3 container/runtime_lock.py requirements.lock > runtime.lock

`uv pip compile` notes behind every package what asked for it (`# via`). Kept are the packages that the project itself
asks for, its extras included, and everything that those ask for in turn.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

PROJECT = "selfvitmil (pyproject.toml)"
"""What asks for a dependency or an extra; groups are `selfvitmil (pyproject.toml:dev)`."""


def runtime_lock(text: str) -> str:
    """Return the entries of a lock file that are needed at run time, unchanged and in their order."""
    entries = re.findall(r"^(?:[A-Za-z0-9][^\n]*\n(?:[ \t]+[^\n]*(?:\n|\Z))*)", text, re.MULTILINE)
    named = [(re.split(r"[=\[ ]", entry)[0], entry) for entry in entries]
    asked_by: dict[str, set[str]] = {}
    for name, entry in named:
        comment = entry.partition("# via")[2].replace("#", " ")
        asked_by.setdefault(name, set()).update(line.strip() for line in comment.splitlines() if line.strip())
    needed = {name for name, askers in asked_by.items() if PROJECT in askers}
    while more := {name for name, askers in asked_by.items() if name not in needed and askers & needed}:
        needed |= more
    if not needed:
        raise SystemExit("this lock file does not say what its packages are needed for (# via)")
    return "".join(entry for name, entry in named if name in needed)


if __name__ == "__main__":
    sys.stdout.write(runtime_lock(Path(sys.argv[1]).read_text(encoding="utf-8")))
