"""Results as text: what a stage or command returns becomes lines and a table, for the terminal and for notebooks.

Stages and commands return data (`stages.base.StageResult`). The words for it are made here and nowhere else, one
function per kind of result. Only `cli` prints them; `_repr_html_` of a result shows the same in a notebook.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from selfvitmil.formatting import html_table

if TYPE_CHECKING:
    from selfvitmil.stages.base import StageResult
    from selfvitmil.store.failures import Failure

Table = tuple[tuple[str, ...], ...]
"""Rows of cells, header first."""


@dataclass(frozen=True)
class Rendered:
    """A result in words."""

    lines: tuple[str, ...] = ()
    table: Table = ()


def render(result: StageResult) -> Rendered:
    """Return the words for a result. Its failures are not part of them: see `failure_line`."""
    names = [each.__name__ for each in type(result).__mro__]
    return next(_RENDERERS[name] for name in names if name in _RENDERERS)(result)


def failure_line(failure: Failure) -> str:
    """Return the line on a slide that failed."""
    return f"FAILED {failure.slide} ({failure.stage}): {failure.reason}. {failure.remedy}"


def to_html(result: StageResult) -> str:
    """Return a result for notebooks: its table, its lines, its failures; everything is escaped."""
    words = render(result)
    lines = "<br>".join(map(escape, (*words.lines, *map(failure_line, result.failures))))
    return (html_table(words.table) if words.table else "") + f"<p>{lines}</p>"


def _plain(result: StageResult) -> Rendered:
    """Render a result that has nothing but notes."""
    return Rendered(result.notes)


def _summary(result: Any) -> Rendered:
    return Rendered(result.lines, result.table)


_RENDERERS: dict[str, Callable[[Any], Rendered]] = {
    "StageResult": _plain,
    "Summary": _summary,
}
"""By the name of the result's class, so that rendering one kind does not import the modules of all others."""
