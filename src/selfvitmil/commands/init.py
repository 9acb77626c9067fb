"""`init`: a study.toml to edit, with every setting, its meaning and its value, generated from the settings."""

from __future__ import annotations

import json
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from pydantic import BaseModel

from selfvitmil.errors import ConfigError
from selfvitmil.settings import STUDY_ENGINE, EngineSettings, StudySettings, resolve_settings
from selfvitmil.stages.base import StageResult
from selfvitmil.store.files import write_text
from selfvitmil.store.layout import StudyLayout

HEAD = """\
# Settings of this study. Lines that begin with # and a name show what holds: take the # away to change it.
# A flag (--tile.mpp 0.5) outweighs this file, this file outweighs the preset, the preset outweighs the defaults.
"""


@dataclass(frozen=True)
class InitResult(StageResult):
    """What `init` wrote."""

    study: Path
    has_cohort: bool
    """Whether the study has a cohort.csv already."""


def init(study: Path, preset: str = "default") -> InitResult:
    """Write `study.toml` with comments; refuses to overwrite one."""
    path = StudyLayout(study).settings
    if path.exists():
        raise ConfigError(
            f"{study.name}: there is a study.toml already",
            "it is not overwritten",
            "Edit it, or remove it first",
            code="study-exists",
        )
    write_text(path, commented_settings(preset))
    return InitResult(study, StudyLayout(study).cohort.exists())


def commented_settings(preset: str = "default") -> str:
    """The file. With the # taken from all lines `#name = value`, it says what holds without them."""
    settings = resolve_settings(None, {"preset": preset})
    values = json.loads(settings.model_dump_json())
    text = f"{HEAD}\n{_comment(StudySettings.model_fields['preset'].description)}"
    text += f"{'#' * (preset == 'default')}preset = {json.dumps(preset)}\n"
    return text + _sections(StudySettings, values, "")


def _sections(model: type[BaseModel], values: dict[str, Any], prefix: str) -> str:
    """The sections inside a model, each with its keys and followed by those inside it."""
    text = ""
    for name, field in model.model_fields.items():
        if (
            model is not EngineSettings
            and isinstance(field.annotation, type)
            and issubclass(field.annotation, BaseModel)
        ):
            inner = field.annotation
            text += f"\n\n{_comment(inner.__doc__)}[{prefix}{name}]\n{_keys(inner, values[name])}"
            text += _sections(inner, values[name], f"{prefix}{name}.")
    return text


def _keys(model: type[BaseModel], values: dict[str, Any]) -> str:
    text = ""
    for key, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            continue
        if model is EngineSettings and key not in STUDY_ENGINE:
            continue  # a study's file may not say it
        text += f"\n{_comment(field.description)}{_line(key, values[key])}"
    return text


def _line(key: str, value: Any) -> str:
    if value is None:  # TOML has no word for it
        return f"# {key} is not set\n"
    return f"#{key} = {_inline(value)}\n"


def _inline(value: Any) -> str:
    """Return a value on one line; JSON's strings, numbers, booleans and arrays of them are TOML's too."""
    if isinstance(value, dict):
        items = cast("dict[str, Any]", value).items()
        return f"{{{', '.join(f'{name} = {_inline(each)}' for name, each in items)}}}"
    return json.dumps(value, ensure_ascii=False)


def _comment(text: str | None) -> str:
    return "".join(f"# {line}\n" for line in textwrap.wrap(" ".join((text or "").split()), 116))
