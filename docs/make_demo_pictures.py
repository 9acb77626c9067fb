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

from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from helpers import browser as viewing  # pyright: ignore[reportMissingImports]

PICTURES = Path(__file__).parent / "pictures"
MODEL = "demo_self-vit-mil"
WIDTH, HEIGHT = 700, 846
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
        save(beside(*shots(browser, study / "report" / "index.html", slide)), "report.png")


def median_slide(study: Path) -> str:
    """Of the positive test slides the one in the middle, by the mean score of all trainings."""
    scores: dict[str, list[float]] = defaultdict(list)
    with (study / "results" / MODEL / "predictions.csv").open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["part"] == "test" and row["label"] == row["positive"]:
                scores[row["slide"]].append(float(row["score"]))
    order = sorted(scores, key=lambda slide: (sum(scores[slide]) / len(scores[slide]), slide))
    return order[len(order) // 2]


def shots(browser: Any, page_file: Path, slide: str) -> list[Image.Image]:
    """The top of the report, and the section of the slide."""
    page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light", reduced_motion="reduce")
    page.goto(page_file.resolve().as_uri())
    taken = [page.screenshot()]
    page.locator("article.slide", has=page.locator("h3", has_text=slide)).evaluate("part => part.scrollIntoView()")
    taken.append(page.screenshot())
    return [Image.open(io.BytesIO(shot)).convert("RGB") for shot in taken]


def beside(*parts: Image.Image) -> Image.Image:
    sheet = Image.new("RGB", (sum(part.width + GAP for part in parts) - GAP, HEIGHT), "white")
    for number, part in enumerate(parts):
        sheet.paste(part, (number * (WIDTH + GAP), 0))
    return sheet


def save(picture: Image.Image, name: str) -> None:
    """With a palette that keeps the rare colours of lines: a third of the bytes."""
    few = picture.quantize(256, method=Image.Quantize.MAXCOVERAGE, kmeans=1, dither=Image.Dither.NONE)
    few.save(PICTURES / name, optimize=True)


if __name__ == "__main__":
    main()
