"""Report and viewer in a second browser: what they show, by the keyboard alone, light and dark.

Needs Firefox (Debian: `apt-get install firefox-esr`); without it the tests are skipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from helpers.browser import AXE, MadeStudy, make_study, serving
from helpers.firefox import FIREFOX, Firefox, browsing_with_firefox
from helpers.report_study import plant
from selfvitmil.localize.heatmap import read_heatmap
from selfvitmil.report import write_report
from selfvitmil.settings import StudySettings

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(FIREFOX is None, reason="no Firefox: apt-get install firefox-esr"),
    pytest.mark.skipif(not AXE.exists(), reason="no axe-core: run npm ci"),
]


@pytest.fixture(scope="module", params=["light", "dark"])
def browser(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Firefox]:
    with browsing_with_firefox(tmp_path_factory.mktemp("firefox"), dark=request.param == "dark") as one:
        assert one.evaluate("return matchMedia('(prefers-color-scheme: dark)').matches") == (request.param == "dark")
        yield one


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_report(plant(tmp_path_factory.mktemp("planted") / "study"), StudySettings()).path.as_uri()


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> MadeStudy:
    return make_study(tmp_path_factory.mktemp("viewed") / "study")


@pytest.fixture(scope="module")
def viewer(study: MadeStudy) -> Iterator[str]:
    with serving(study.viewed()) as url:
        yield url


def test_report(browser: Firefox, report: str):
    browser.open(report, 1300, 900)
    places = browser.evaluate(
        "return ['.number-card', '.means', '.limits-card', '.against', '.examples']"
        ".map(part => document.querySelector(part).getBoundingClientRect().bottom)"
    )
    assert max(places) <= 900
    assert browser.accessibility_problems() == []
    browser.evaluate("document.querySelector('table.slides .sort').focus()")
    browser.press("Enter")
    assert browser.evaluate("return document.querySelector('table.slides th[aria-sort]').ariaSort") == "ascending"
    browser.evaluate("document.querySelector('#answer .term').focus()")
    browser.press("Enter")
    browser.wait("document.querySelector('#def-auc').matches(':popover-open')")
    browser.press("Escape")
    browser.wait("!document.querySelector('#def-auc').matches(':popover-open')")
    browser.open(report, 500, 900)  # the narrowest window that Firefox makes
    assert browser.evaluate("return document.documentElement.scrollWidth <= innerWidth")


def test_viewer(browser: Firefox, viewer: str, study: MadeStudy):
    browser.open(viewer, 1200, 720)
    browser.wait("document.querySelector('#pane-first[data-tiles=loaded]')")
    assert browser.evaluate("return [...document.querySelectorAll('#rows .name')].map(each => each.textContent)") == [
        "node_01", "node_10", "node_02"
    ]  # fmt: skip
    browser.wait("document.documentElement.hasAttribute('data-slide')")
    assert browser.accessibility_problems() == []
    browser.press("n")
    model = browser.evaluate("return document.querySelector('#model').selectedOptions[0].textContent")
    heatmap = read_heatmap(study.folder / "maps" / model / "node_01.h5")
    browser.wait(f"new URLSearchParams(location.hash.slice(1)).get('tile') === '{int(np.argmax(heatmap.score))}'")
    browser.press("?")
    browser.wait("document.querySelector('#help').open")
    browser.press("Escape")
    browser.wait("!document.querySelector('#help').open")
    browser.evaluate("document.querySelector('#rows').focus()")
    browser.press("ArrowDown", "Enter")
    browser.wait("document.querySelector('#slide-name').textContent === 'node_10'")
    browser.wait("document.querySelector('#pane-first[data-tiles=loaded]')")


def test_exported_folder_opens_from_disk(browser: Firefox, study: MadeStudy, tmp_path: Path):
    from selfvitmil.view.export import write_folder

    write_folder(study.viewed(), tmp_path / "folder", top_mpp=0.5, say=lambda _: None)
    browser.open((tmp_path / "folder" / "index.html").as_uri(), 1200, 720)
    browser.wait("document.querySelector('#pane-first[data-tiles=loaded]')")
    browser.wait("document.querySelectorAll('#gallery canvas[data-drawn=true]').length > 0")
