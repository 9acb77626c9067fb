"""Makes the pictures of a heatmap, a report and a terminal for the documentation from a finished demo; needs Chromium
and Playwright. `make docs` calls it; without a demo or Chromium the pictures stay as they are.

    selfvitmil demo demo && python docs/make_demo_pictures.py demo

Shown is no chosen example but the test slide with a lesion whose probability is the median of them all.
"""

from __future__ import annotations

import csv
import fcntl
import html
import io
import os
import pty
import struct
import subprocess
import sys
import tempfile
import termios
from collections import defaultdict
from pathlib import Path
from typing import Any

from PIL import Image, ImageOps
from rich.console import Console
from rich.text import Text

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from helpers import browser as viewing  # pyright: ignore[reportMissingImports]

PICTURES = Path(__file__).parent / "pictures"
MODEL = "demo_self-vit-mil"
WIDTH = 700
DESK, PHONE, PAPER = (1300, 900), (390, 960), (794, 1123)
"""Screens of a desk and a phone, and a sheet of A4, in CSS pixels."""
GAP = 16
TERMINAL_ROWS = 34


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("the folder of a finished demo is missing")
    study = Path(sys.argv[1])
    if viewing.CHROMIUM is None or not (study / "report" / "index.html").exists():
        print("no Chromium or no finished demo: the pictures of the demo stay as they are", file=sys.stderr)
        return
    slide = median_slide(study)
    with Image.open(study / "maps" / MODEL / f"{slide}_zoom_inferno.png") as page:
        page = page.convert("RGB")
        page.thumbnail((2 * WIDTH, 2 * WIDTH), Image.Resampling.LANCZOS)
        save(page, "map.png")
    with viewing.browsing() as browser, tempfile.TemporaryDirectory() as folder:
        save(terminal(browser, Path(folder), study), "terminal.png")
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
    if media == "print":  # the first page is the answer alone; margins are those of style.css
        page.evaluate("document.querySelectorAll('#answer ~ *, footer').forEach(each => each.remove())")
        page.evaluate("document.body.style.padding = '14mm 12mm'")
    taken = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    page.close()
    return taken


def terminal(browser: Any, folder: Path, study: Path) -> Image.Image:
    """The end of `selfvitmil compare` on a terminal of 80 columns; what is up to date is not computed again."""
    shown = Text.from_ansi(on_a_terminal([sys.executable, "-m", "selfvitmil", "compare", study.name], study.parent))
    table = [line for line in shown.split("\n") if not line.plain.startswith(("embed ", "recipe of "))][-TERMINAL_ROWS:]
    lines = [Text.assemble(("$ ", "dim"), f"selfvitmil compare {study.name}"), *table]
    console = Console(record=True, width=80, file=io.StringIO(), force_terminal=True)
    for line in lines:
        console.print(line)
    body = console.export_html(inline_styles=True, code_format="{code}")
    style = "margin:0;padding:14px 18px;background:#1b1f24;color:#e6e6e6;font:15px/1.35 DejaVu Sans Mono,monospace"
    page_file = folder / "terminal.html"
    page_file.write_text(f'<meta charset="utf-8"><pre style="{html.escape(style)}">{body}</pre>', encoding="utf-8")
    page = browser.new_page(viewport={"width": 800, "height": 600}, device_scale_factor=1.25)
    page.goto(page_file.as_uri())
    page.evaluate("document.body.style.margin = 0")
    taken = Image.open(io.BytesIO(page.locator("pre").screenshot())).convert("RGB")
    page.close()
    return taken


def on_a_terminal(command: list[str], where: Path) -> str:
    """What a command writes to a terminal of 80 columns, colours included."""
    lead, end = pty.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 80, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80"}
    process = subprocess.Popen(command, cwd=where, stdin=end, stdout=end, stderr=end, env=environment)
    os.close(end)
    parts: list[bytes] = []
    while True:
        try:
            parts.append(os.read(lead, 1 << 16))
        except OSError:  # how a terminal says that its last program has gone
            break
    os.close(lead)
    process.wait()
    return b"".join(parts).decode(errors="replace").replace("\r\n", "\n").rpartition("\r")[2]


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
