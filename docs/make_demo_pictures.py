"""Makes the pictures of a map and a report for the documentation from a finished demo; needs Chromium and Playwright.

    selfvitmil demo demo && python docs/make_demo_pictures.py demo

Shown is no chosen example but the test slide with a lesion whose probability is the median of them all.
"""

from __future__ import annotations

import csv
import io
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from PIL import Image, ImageOps

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from helpers import browser as viewing  # pyright: ignore[reportMissingImports]

PICTURES = Path(__file__).parent / "pictures"
MODEL = "demo_self-vit-mil"
WIDTH = 700
DESK, PHONE, PAPER = (1300, 900), (390, 960), (703, 960)
"""Screens of a desk and a phone, and a sheet of A4 without its margins, in CSS pixels."""
GAP = 16


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("the folder of a finished demo is missing")
    if viewing.CHROMIUM is None:
        sys.exit("no Chromium: the pictures stay as they are")
    study = Path(sys.argv[1])
    slide = median_slide(study)
    with Image.open(study / "maps" / MODEL / f"{slide}_zoom_inferno.png") as page:
        page = page.convert("RGB")
        page.thumbnail((2 * WIDTH, 2 * WIDTH), Image.Resampling.LANCZOS)
        save(page, "map.png")
    with viewing.browsing() as browser:
        report = study / "report" / "index.html"
        save(shot(browser, report, *DESK), "report.png")
        save(beside(shot(browser, report, *PHONE), shot(browser, report, *PAPER, media="print")), "report_small.png")


def median_slide(study: Path) -> str:
    """Of the positive test slides the one in the middle, by the mean score of all trainings."""
    scores: dict[str, list[float]] = defaultdict(list)
    with (study / "results" / MODEL / "predictions.csv").open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["part"] == "test" and row["label"] == row["positive"]:
                scores[row["slide"]].append(float(row["score"]))
    order = sorted(scores, key=lambda slide: (sum(scores[slide]) / len(scores[slide]), slide))
    return order[len(order) // 2]


def shot(browser: Any, page_file: Path, width: int, height: int, media: str = "screen") -> Image.Image:
    """The top of the report on a screen of this size, or on paper."""
    size = {"width": width, "height": height}
    page = browser.new_page(viewport=size, color_scheme="light", reduced_motion="reduce")
    page.emulate_media(media=media)
    page.goto(page_file.resolve().as_uri())
    taken = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    page.close()
    return taken


def beside(*parts: Image.Image) -> Image.Image:
    """Pictures beside each other, with a thin frame."""
    framed = [ImageOps.expand(part, 1, "#b0b8be") for part in parts]
    sheet = Image.new(
        "RGB", (sum(part.width + GAP for part in framed) - GAP, max(part.height for part in framed)), "white"
    )
    left = 0
    for part in framed:
        sheet.paste(part, (left, 0))
        left += part.width + GAP
    return sheet


def save(picture: Image.Image, name: str) -> None:
    """With a palette that keeps the rare colours of lines: a third of the bytes."""
    few = picture.quantize(256, method=Image.Quantize.MAXCOVERAGE, kmeans=1, dither=Image.Dither.NONE)
    few.save(PICTURES / name, optimize=True)


if __name__ == "__main__":
    main()
