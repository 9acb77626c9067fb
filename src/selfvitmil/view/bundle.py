"""Our ES modules as one classic script: pages opened from disk may not load modules.

Every module becomes a function of its own, so names need not be unique; imports become constants taken from what the
other function returned. Only the forms that our modules use are known, anything else is an error: named imports from
`./name.js`, and `export` before a function, class or constant.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

IMPORT = re.compile(r'^import\s*\{([^}]*)\}\s*from\s*"\./([\w.-]+)";[ \t]*$', re.MULTILINE)
EXPORT = re.compile(r"^export\s+(?=(?:async\s+function\*?|function\*?|class|const)\s+([A-Za-z_$][\w$]*))", re.MULTILINE)
UNKNOWN = re.compile(r"^(?:import|export)\b.*|\bimport\s*\(\s*[\"'`].*|\bimport\.meta\b.*", re.MULTILINE)
COMMENT = re.compile(r"/\*.*?\*/|^\s*//.*$", re.DOTALL | re.MULTILINE)


def bundle(modules: Mapping[str, str], entry: str) -> str:
    """One script that does what `entry` does; ValueError for what cannot be joined."""
    parts = [
        f"const {_variable(name)} = (() => {{\n{_as_body(name, modules[name])}\n}})();"
        for name in _order(modules, entry)
    ]
    return "(() => {\n" + '"use strict";\n' + "\n".join(parts) + "\n})();\n"


def _order(modules: Mapping[str, str], entry: str) -> list[str]:
    """The entry and all that it needs, each after what it needs itself."""
    ordered: list[str] = []

    def visit(name: str, above: tuple[str, ...]) -> None:
        if name in above:
            raise ValueError(f"{name} imports itself through {', '.join(above)}")
        if name in ordered:
            return
        if name not in modules:
            raise ValueError(f"{above[-1]} imports {name}, which is not there")
        for found in IMPORT.finditer(modules[name]):
            visit(found[2], (*above, name))
        ordered.append(name)

    visit(entry, ())
    return ordered


def _as_body(name: str, source: str) -> str:
    exported = [found[1] for found in EXPORT.finditer(source)]
    body = EXPORT.sub("", IMPORT.sub(_as_constants, source))
    strange = UNKNOWN.search(COMMENT.sub("", body))
    if strange:
        raise ValueError(f"{name}: {strange[0].strip()!r} is a form that cannot be joined")
    return f"{body}\nreturn {{ {', '.join(exported)} }};"


def _as_constants(found: re.Match[str]) -> str:
    names = re.sub(r"\s+as\s+", ": ", " ".join(found[1].split()))
    return f"const {{ {names} }} = {_variable(found[2])};"


def _variable(name: str) -> str:
    return "module_" + re.sub(r"\W", "_", name.removesuffix(".js"))
