"""Write docs/reference/errors.md from the error codes in the source; `make docs` calls it, a test checks it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "selfvitmil"

HEAD = """# Error codes

Errors that selfvitmil raises on purpose are subclasses of `selfvitmil.errors.SelfVitMilError`, with the fields `what`,
`why` and `how` for people and `code` for programs. Messages may be reworded; a code keeps its meaning.

```python
from selfvitmil import open_slide
from selfvitmil.errors import SlideError

try:
    open_slide("missing.svs")
except SlideError as error:
    print(error.code)  # file-not-found
```

Generated from the source by `make docs`.

| code | class | raised in | message |
|---|---|---|---|
"""


def page() -> str:
    rows = sorted({row for path in SOURCE.rglob("*.py") for row in codes(path)})
    return HEAD + "".join(f"| `{code}` | `{name}` | `{module}` | {what} |\n" for code, name, module, what in rows)


def codes(path: Path) -> Iterator[tuple[str, str, str, str]]:
    """(code, class, module, message) of every call in a file that has a constant keyword `code`."""
    module = ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id.endswith("Error"):
            for keyword in node.keywords:
                if keyword.arg == "code" and isinstance(keyword.value, ast.Constant):
                    yield str(keyword.value.value), node.func.id, module, _message(node)


def _message(call: ast.Call) -> str:
    """The first argument with `...` for everything that is filled in; empty where it is computed elsewhere."""
    first = call.args[0] if call.args else None
    if isinstance(first, ast.Constant):
        return _escaped(str(first.value))
    if not isinstance(first, ast.JoinedStr):
        return ""
    parts = [str(part.value) if isinstance(part, ast.Constant) else "..." for part in first.values]
    return _escaped("".join(parts))


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


if __name__ == "__main__":
    (Path(__file__).parent / "reference" / "errors.md").write_text(page(), encoding="utf-8")
