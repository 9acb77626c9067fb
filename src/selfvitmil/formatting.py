"""Format numbers, tables and lists for terminals, Markdown, figures and reports."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any, cast

import numpy as np

if TYPE_CHECKING:
    from selfvitmil.metrics import Interval

# ---------------------------------------------------------------------------------------------------- numbers


def number(value: float | None, digits: int = 3) -> str:
    """Return the value with `digits` decimals, or a dash if there is none."""
    return "-" if value is None or np.isnan(value) else f"{value:.{digits}f}"


def with_limits(interval: Interval | None) -> str:
    """Return for instance `0.912 [0.850, 0.961]`, or a dash if there is no value."""
    if interval is None or np.isnan(interval.value):
        return "-"
    return f"{interval.value:.3f} [{interval.low:.3f}, {interval.high:.3f}]"


def value_and_limits(interval: Mapping[str, Any]) -> tuple[str, str]:
    """Return value and limits of an interval read from JSON; the limits are empty if it has none."""
    low, high = interval.get("low"), interval.get("high")
    return f"{interval['value']:.3f}", "" if low is None or high is None else f"{low:.3f} to {high:.3f}"


def percent(share: float) -> str:
    return f"{100 * share:g} %"


def p_value(value: float) -> str:
    return "<0.001" if value < 0.001 else f"{value:.3f}"


def duration(seconds: float | None) -> str:
    """Return a duration in suitable units: `3.2 s`, `12 min`, `4.5 h`; a dash if it is not known."""
    if seconds is None:
        return "-"
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{seconds / 60:.1f} min" if seconds < 600 else f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} days"


def duration_range(limits: tuple[float, float]) -> str:
    """Return a range of durations: `2.0 to 4.5 min`, `30 s to 2.0 min`, `up to 3.0 s`."""
    low, high = map(duration, limits)
    if limits[0] < 1:
        return f"up to {high}"
    return f"{low.partition(' ')[0] if low.partition(' ')[2] == high.partition(' ')[2] else low} to {high}"


def ago(moment: float | None) -> str:
    """Return how long ago a moment (seconds since 1970) was; empty if there is none."""
    return "" if moment is None else f"{duration(max(0.0, time.time() - moment))} ago"


def cell(value: Any) -> str:
    """Return a value as a cell of a CSV file: five digits of a float, several values joined by semicolons."""
    if isinstance(value, float):
        return f"{value:.5g}"
    return (
        "; ".join(cast("Sequence[str]", value))
        if isinstance(value, tuple | list)
        else ""
        if value is None
        else str(value)
    )


def shorten(text: str, most: int) -> str:
    """Cut the text to at most `most` characters."""
    return text if len(text) <= most else text[: most - 1] + "…"


# ---------------------------------------------------------------------------------------------------- Markdown


def markdown_table(lines: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table of rows of cells, header first."""
    header, *body = lines
    rule = ["---"] * len(header)
    return "\n".join("| " + " | ".join(map(_escaped, line)) + " |" for line in (header, rule, *body))


def _escaped(cell: str) -> str:
    """Escape characters that would end the cell or the row."""
    return cell.replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ")


def markdown_list(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def html_table(rows: Sequence[Sequence[str]]) -> str:
    """Return an HTML table, header first; every cell is escaped."""
    header, *body = rows
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    lines = ["<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in body]
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
