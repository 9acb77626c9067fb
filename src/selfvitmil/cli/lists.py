"""Values of list options: `--compare.methods a b c`, `--compare.methods a,b,c` and the repeated flag mean the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import get_args, get_origin

from pydantic import BaseModel

from selfvitmil.settings import EngineSettings, StudySettings

VERBATIM = ("batch",)
"""Sections whose texts may have commas."""
OTHERS = ("--by",)
"""List options of commands that take commas too; names of slides and folders may have some."""


@cache
def list_options() -> frozenset[str]:
    """Return the flags whose values are lists of any length."""
    found = [*_of(StudySettings, ""), *_of(EngineSettings, "")]
    return frozenset((*found, *OTHERS))


def _of(model: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, info in model.model_fields.items():
        flag = f"{prefix}{name.replace('_', '-')}"
        kind = info.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            if name not in VERBATIM:
                yield from _of(kind, f"{flag}.")
        elif get_origin(kind) is tuple and get_args(kind)[-1] is Ellipsis:
            yield f"--{flag}"


def split_lists(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with values of list options that are separated by commas as values of their own."""
    found: list[str] = []
    inside = False
    for each in arguments:
        if each.startswith("--"):
            name, joined, value = each.partition("=")
            inside = name in list_options()
            if inside and joined:
                found += [name, *_parts(value)]
            else:
                found.append(each)
        else:
            found += _parts(each) if inside else [each]
    return found


def _parts(value: str) -> list[str]:
    parts = [part.strip() for part in value.split(",")]
    return [part for part in parts if part] or [value]
