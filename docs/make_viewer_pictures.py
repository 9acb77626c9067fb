"""Makes the pictures of the web viewer for the documentation, in a real browser; needs Chromium and Playwright.

It opens the same made study as the browser tests do (tests/helpers/browser.py), with larger slides.
"""

from __future__ import annotations

import io
import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from helpers import browser as viewing  # pyright: ignore[reportMissingImports]
from helpers.browser import Planned  # pyright: ignore[reportMissingImports]

PICTURES = Path(__file__).parent / "pictures"
PLAN = (
    Planned("node_01", "tumor", 2, 0.93, 3),
    Planned("node_02", "normal", 0, 0.12, 4),
    Planned("node_03", "tumor", 1, 0.31, 5),
    Planned("node_04", "tumor", 2, 0.88, 6),
    Planned("node_05", "normal", 0, 0.55, 8),
    Planned("node_06", "normal", 0, 0.05, 9),
)


def main() -> None:
    if viewing.CHROMIUM is None:
        print("no Chromium: the pictures of the viewer stay as they are", file=sys.stderr)
        return
    with tempfile.TemporaryDirectory() as name:
        study = viewing.make_study(
            Path(name, "lymph_nodes"), PLAN, edge_l0=6144, extent_l0=224, lesion_um=(250.0, 420.0)
        )
        with viewing.serving(study.viewed()) as url, viewing.browsing() as browser:
            page = open_viewer(browser, url, (1440, 900))
            save(page, "viewer.jpg")
            page.keyboard.press("n")
            wait(page)
            page.mouse.move(830, 260)
            save(page, "viewer_tile.jpg")
            page = open_viewer(browser, url, (1440, 900), dark=True)
            page.keyboard.press("s")
            page.keyboard.press("c")
            page.wait_for_selector("#pane-second[data-tiles=loaded]")
            page.get_by_role("button", name="Zoom in").first.click()
            save(page, "viewer_side_by_side.jpg")
            page = open_viewer(browser, url, (1024, 768), touch=True)
            save(page, "viewer_tablet.jpg")


def open_viewer(browser: Any, url: str, size: tuple[int, int], dark: bool = False, touch: bool = False) -> Any:
    page = browser.new_page(
        viewport={"width": size[0], "height": size[1]},
        color_scheme="dark" if dark else "light",
        reduced_motion="reduce",
        has_touch=touch,
    )
    page.goto(url)
    page.wait_for_selector("html[data-ready]")
    wait(page)
    return page


def wait(page: Any) -> None:
    """Until all that was asked for is there."""
    page.wait_for_load_state("networkidle")
    page.wait_for_selector("#pane-first[data-tiles=loaded]")


def save(page: Any, name: str) -> None:
    wait(page)
    PICTURES.mkdir(exist_ok=True)
    with Image.open(io.BytesIO(page.screenshot())) as shot:
        shot.convert("RGB").save(PICTURES / name, quality=84, optimize=True)


if __name__ == "__main__":
    main()
