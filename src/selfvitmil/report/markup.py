"""HTML from Python values. Whatever is not made here is text, and escaped: no page breaks on a slide called `<b>`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from html import escape, unescape

VOID = {"br", "hr", "img", "meta"}


class Markup(str):
    """HTML that was made by these functions; other strings are text."""

    __slots__ = ()


def tag(name: str, /, *children: str, **attributes: str | int | None) -> Markup:
    """An element; attributes that are None are left out, `class_` and `for_` lose their underscore."""
    told = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in VOID:
        return Markup(f"<{name}{told}>")
    return Markup(f"<{name}{told}>{join(children)}</{name}>")


def join(parts: Iterable[str], between: str = "") -> Markup:
    """Parts one behind the other, texts among them escaped."""
    return Markup(between.join(part if isinstance(part, Markup) else escape(part, quote=False) for part in parts))


def table(header: Sequence[str], rows: Iterable[Sequence[str]], *, kind: str = "", caption: str = "") -> Markup:
    """A table in a box that scrolls by itself where the screen is narrow. Columns of numbers are set to the right."""
    cells = [list(row) for row in rows]
    numeric = [bool(cells) and all(_is_number(row[k]) for row in cells) for k in range(len(header))]
    looks = ["number" if number else None for number in numeric]
    head = tag("tr", *(tag("th", *_lines(text), class_=look) for text, look in zip(header, looks, strict=True)))
    body = join(
        (tag("tr", *(tag("td", text, class_=look) for text, look in zip(row, looks, strict=True))) for row in cells),
        "\n",
    )
    told = tag("caption", caption) if caption else Markup()
    head = tag("thead", head) if any(header) else Markup()
    return tag("div", tag("table", told, head, tag("tbody", body), class_=kind or None), class_="scroll")


def section(anchor: str, title: str, *children: str) -> Markup:
    """A part of the page that the list of contents points to."""
    return tag("section", tag("h2", title), *children, id=anchor)


def facts(pairs: Iterable[tuple[str, str]]) -> Markup:
    """Names and values; pairs without a value are left out."""
    rows = [tag("div", tag("dt", name), tag("dd", value)) for name, value in pairs if value]
    return tag("dl", *rows, class_="facts")


def bullets(items: Iterable[str], kind: str = "notes") -> Markup:
    listed = list(items)
    return tag("ul", *(tag("li", item) for item in listed), class_=kind) if listed else Markup()


def missing(what: str, command: str = "") -> Markup:
    """Says that something is not there, and how to get it."""
    how = (": run ", tag("code", f"selfvitmil {command}")) if command else ()
    return tag("p", what, *how, ".", class_="missing")


def unfold(title: str, *children: str) -> Markup:
    """Something long, which shows when it is asked for, and in print."""
    return tag("details", tag("summary", title), *children)


def map_text(page: str, change: Callable[[str], str]) -> str:
    """The page with every text of it changed: between tags, and in the attributes that people are shown."""

    def changed(found: re.Match[str]) -> str:
        return f'{found.group(1)}"{escape(change(unescape(found.group(2))))}"'

    parts = re.split(r"(<[^>]*>)", page)
    parts[::2] = [escape(change(unescape(part)), quote=False) if part.strip() else part for part in parts[::2]]
    parts[1::2] = [re.sub(r'(\b(?:alt|title|aria-label)=)"([^"]*)"', changed, part, count=3) for part in parts[1::2]]
    return "".join(parts)


def _lines(text: str) -> list[str]:
    """The text with its line ends kept."""
    if isinstance(text, Markup):
        return [text]
    first, *rest = text.split("\n")
    return [first, *(part for line in rest for part in (tag("br"), line))]


def _is_number(text: str) -> bool:
    return (
        re.fullmatch(r"[-+−<>~≈]?[\d,.]+(?:\s?(?:%|s|min|h|MB|mm²|µm))?|[-–]|", unescape(re.sub(r"<[^>]*>", "", text)))
        is not None
    )
