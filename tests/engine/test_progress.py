"""Progress where it is watched: a bar below a notebook's cell, plain lines in a log."""

from __future__ import annotations

import re
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from selfvitmil.engine import progress
from selfvitmil.engine.progress import Bar, NotebookBar, Progress, in_notebook, show_progress


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a simulated notebook shows, one entry per state of the bar."""
    pages: list[str] = []
    handle = SimpleNamespace(update=pages.append)

    def display(page: str, *, display_id: bool) -> Any:
        assert display_id
        pages.append(page)
        return handle

    ipython, part = ModuleType("IPython"), ModuleType("IPython.display")
    ipython.get_ipython = lambda: SimpleNamespace(kernel=object())  # pyright: ignore[reportAttributeAccessIssue]
    part.display, part.HTML = display, str  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", part)
    return pages


def test_a_notebook_shows_one_bar_that_is_updated(shown: list[str], capsys: pytest.CaptureFixture[str]):
    with show_progress("tile <b>", "tiles", 4) as bar:
        assert isinstance(bar, NotebookBar)
        for failed in (False, True, False, False):
            bar.advance(failed, 10)
    values = [int(found[1]) for page in shown if (found := re.search(r'value="(\d+)" max="4"', page))]
    assert values[0] == 0
    assert values[-1] == 4
    assert values == sorted(values)
    assert "tile &lt;b&gt;" in shown[-1]
    assert "4/4 slides, 1 failed" in shown[-1]
    assert capsys.readouterr().err == ""


def test_a_notebook_is_not_updated_for_every_slide(shown: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(progress, "_NOTEBOOK_EVERY_S", 1000.0)
    with show_progress("embed", "tiles", 500) as bar:
        for _ in range(500):
            bar.advance(False, 1)
    assert len(shown) <= 4


def test_no_notebook_without_a_kernel(monkeypatch: pytest.MonkeyPatch):
    ipython = ModuleType("IPython")
    ipython.get_ipython = lambda: SimpleNamespace()  # pyright: ignore[reportAttributeAccessIssue]  a terminal shell
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    assert not in_notebook()
    monkeypatch.delitem(sys.modules, "IPython")
    assert not in_notebook()


def test_a_log_has_plain_lines_and_a_terminal_a_bar(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    with show_progress("tile", "tiles", 1) as log:
        assert type(log) is Progress
        log.advance(False, 3)
    assert "tile: 1/1 slides, 0 failed" in capsys.readouterr().err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert type(show_progress("tile", "tiles", 1)) is Bar
