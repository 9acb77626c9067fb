"""Writes docs/reference/settings.md from the settings themselves; `make docs` calls it, a test holds it current."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel

from selfvitmil.settings import StudySettings

HEAD = """# Settings

Every setting of a study, in the order of the data. In `study.toml` a setting stands in its section, on the command line
it is a flag: `[tile] mpp = 0.5` is `--tile.mpp 0.5`; the `engine` section's flags have no prefix (`--workers 4`).
A flag outweighs the file, the file outweighs the preset, the preset outweighs the default.

Made from `settings.py` by `make docs`; edit there.
"""


def page() -> str:
    text = HEAD
    for section, field in StudySettings.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            text += table(section, field.annotation)
    return text


def table(section: str, model: type[BaseModel]) -> str:
    """One section, and after it the sections inside it."""
    text = f"\n## {section}\n\n{model.__doc__}\n\n| setting | default | meaning |\n|---|---|---|\n"
    inner = ""
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            inner += table(f"{section}.{name}", field.annotation)
            continue
        default = field.get_default(call_default_factory=True)
        shown = "" if default is None else f"`{list(default) if isinstance(default, tuple) else default}`"
        text += f"| `{name}` | {shown} | {' '.join((field.description or '').split())} |\n"
    return text + inner


if __name__ == "__main__":
    (Path(__file__).parent / "reference" / "settings.md").write_text(page(), encoding="utf-8")
