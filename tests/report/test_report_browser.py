"""The report in a real browser: what is on the first screen, on a phone, on paper, for a keyboard and a screen reader.

Needs Chromium (Debian: `apt-get install chromium`) and Playwright; without either the tests are skipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("playwright.sync_api", reason="no Playwright: the report cannot be tried in a browser")

from helpers.browser import CHROMIUM, accessibility_problems, browsing
from helpers.report_study import NASTY, plant
from selfvitmil.report import write_report
from selfvitmil.settings import StudySettings

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: the report cannot be tried in a browser"),
]
DESK, PHONE = {"width": 1300, "height": 900}, {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    study = plant(tmp_path_factory.mktemp("planted") / "study")
    with (study / "cohort.csv").open("a", encoding="utf-8") as table:  # so many that the table has a filter
        table.writelines(f"more_{k:02d},files/m{k}.svs,normal,,train,,\n" for k in range(12))
    return write_report(study, StudySettings()).path.as_uri()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with browsing() as one:
        yield one


@pytest.fixture(params=["light", "dark"])
def scheme(request: pytest.FixtureRequest) -> str:
    return request.param


def opened(browser: Any, address: str, size: Any = None, scheme: str = "light") -> Any:
    page = browser.new_context(viewport=size or DESK, color_scheme=scheme).new_page()
    page.set_default_timeout(20_000)
    page.troubles = []
    page.on("console", lambda line: page.troubles.append(line.text) if line.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: page.troubles.append(str(error)))
    page.goto(address)
    return page


def bottom(page: Any, selector: str) -> float:
    box = page.locator(selector).bounding_box()
    return box["y"] + box["height"]


def test_answer_fits_the_first_screen(browser: Any, address: str):
    page = opened(browser, address)
    for part in (".number-card", ".means", ".limits-card", ".against", ".examples"):
        assert bottom(page, part) <= DESK["height"], part
    assert page.locator(".example").count() == 3
    assert page.troubles == []


def test_phone_never_scrolls_sideways(browser: Any, address: str):
    page = opened(browser, address, PHONE)
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    assert page.evaluate("[...document.querySelectorAll('.scroll')].some(each => each.scrollWidth > each.clientWidth)")
    size = page.evaluate("parseFloat(getComputedStyle(document.querySelector('.meaning')).fontSize)")
    assert size >= 13


def cells(page: Any, column: int) -> list[str]:
    return page.locator(f"table.slides tbody tr:visible td:nth-child({column})").all_inner_texts()


def test_tables_sort_and_filter_by_keyboard(browser: Any, address: str):
    page = opened(browser, address)
    button = page.get_by_role("button", name="Sort by tiles")
    button.focus()
    page.keyboard.press("Enter")
    numbers = [int(text) for text in cells(page, 5) if text]
    assert numbers == sorted(numbers)
    assert page.locator("table.slides th[aria-sort=ascending]").inner_text() == "tiles"
    page.keyboard.press("Enter")
    assert [int(text) for text in cells(page, 5) if text] == numbers[::-1]
    assert cells(page, 5)[-1] == ""  # slides without a value stay at the end
    field = page.locator("#slides input[type=search]")
    field.fill("test wrong")
    assert cells(page, 1) == ["B-2046"]
    assert page.locator("#slides [role=status]").inner_text().startswith("1 of ")


def test_metrics_explain_themselves(browser: Any, address: str):
    page = opened(browser, address)
    page.locator("#answer .term", has_text="AUC").click()
    told = page.locator("#def-auc")
    assert told.is_visible()
    assert "0.5 is chance" in told.inner_text()
    page.keyboard.press("Escape")
    assert told.is_hidden()


def test_examples_lead_to_their_slides(browser: Any, address: str):
    page = opened(browser, address)
    page.locator(".example a", has_text=NASTY).click()
    article = page.locator(page.evaluate("location.hash"))
    assert NASTY in article.locator("h3").inner_text()
    assert article.is_visible()


def test_paper_has_whole_tables_and_no_controls(browser: Any, address: str, tmp_path: Path):
    page = opened(browser, address)
    page.emulate_media(media="print")
    assert page.locator(".sort:visible, .filter:visible, nav:visible").count() == 0
    cut = (
        "[...document.querySelectorAll('.scroll')].filter(each => getComputedStyle(each).overflow !== 'visible').length"
    )
    assert page.evaluate(cut) == 0
    assert page.locator("table.slides tbody tr:visible").count() == 16


def test_no_serious_barrier(browser: Any, address: str, scheme: str):
    page = opened(browser, address, scheme=scheme)
    page.locator("#answer .term", has_text="AUC").click()
    assert accessibility_problems(page) == []
    assert page.troubles == []
