"""What the browser tests and the pictures of the documentation start from: a small study, its viewer, a browser.

The study has made slides whose lesions are known, and maps that were not learnt but drawn: high inside the lesions, low
elsewhere, so that what the browser shows can be compared with where the lesions are.
"""

from __future__ import annotations

import shutil
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvicorn
from numpy.typing import NDArray

from helpers.heatmaps import PREDICTION
from selfvitmil.annotations import Annotation, box_coverage, write_annotations
from selfvitmil.cohort import SlideRow
from selfvitmil.cohort.table import make_cohort, write_cohort
from selfvitmil.localize.heatmap import Frame, Heatmap, write_heatmap
from selfvitmil.settings import StudySettings
from selfvitmil.slides.synthetic import SyntheticSlide, make_slide
from selfvitmil.tiles import boxes_l0
from selfvitmil.view.export import static_files
from selfvitmil.view.guard import names_for
from selfvitmil.view.server import make_app
from selfvitmil.view.study import ViewedStudy

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@dataclass(frozen=True)
class Planned:
    """One slide of the study."""

    name: str
    label: str | None
    lesions: int
    probability: float
    """What the maps say of it."""
    seed: int


PLAN = (
    Planned("node_01", "tumor", 1, 0.93, 3),
    Planned("node_02", "normal", 0, 0.12, 4),
    Planned("node_10", "tumor", 1, 0.31, 5),
)
"""The last one is wrong."""


@dataclass(frozen=True)
class MadeStudy:
    """A study and the truth about its slides."""

    folder: Path
    rows: tuple[SlideRow, ...]
    synthetic: dict[str, SyntheticSlide]

    def viewed(self, rows: Sequence[SlideRow] | None = None) -> ViewedStudy:
        """As the viewer takes it."""
        cohort = make_cohort(self.rows if rows is None else rows, "cohort.csv")
        return ViewedStudy(self.folder, cohort, StudySettings())


def make_study(
    folder: Path,
    plan: Sequence[Planned] = PLAN,
    *,
    edge_l0: int = 1536,
    extent_l0: int = 64,
    lesion_um: tuple[float, float] = (90.0, 110.0),
    maps: bool = True,
) -> MadeStudy:
    """Slides, annotations, cohort.csv and, by two models, maps."""
    (folder / "slides").mkdir(parents=True)
    rows, synthetic = [], {}
    for planned in plan:
        path = folder / "slides" / f"{planned.name}.svs"
        truth = make_slide(path, planned.seed, size=(edge_l0, edge_l0), lesions=planned.lesions, lesion_um=lesion_um)
        synthetic[planned.name] = truth
        outlines = [Annotation(f"lesion {k}", "Tumor", ring) for k, ring in enumerate(truth.lesions)]
        annotation = folder / "slides" / f"{planned.name}.xml" if outlines else None
        if annotation:
            write_annotations(annotation, outlines)
        rows.append(SlideRow(planned.name, path, planned.label, f"p_{planned.name}", "test", annotation=annotation))
        for k, model in enumerate(("vit_dsmil", "vit_abmil") if maps else ()):
            drawn = draw_map(planned, truth, outlines, model, extent_l0, seed=7 * planned.seed + k)
            write_heatmap(folder / "maps" / model / f"{planned.name}.h5", drawn, "made")
    write_cohort(folder / "cohort.csv", make_cohort(rows, "cohort.csv"))
    return MadeStudy(folder, tuple(rows), synthetic)


def draw_map(
    planned: Planned, truth: SyntheticSlide, outlines: Sequence[Annotation], model: str, extent_l0: int, seed: int
) -> Heatmap:
    """Tiles on tissue; what lies inside a lesion scores high, the more of it the higher."""
    rng = np.random.default_rng(seed)
    coords = tissue_corners(truth, extent_l0)
    inside = box_coverage(outlines, boxes_l0(coords, extent_l0)) if outlines else np.zeros(len(coords))
    score = np.where(inside > 0.3, 0.55 + 0.4 * inside, 0.0) + 0.05 * rng.random(len(coords))
    if model == "vit_abmil":
        score = 0.7 * score + 0.3 * rng.random(len(coords)) ** 4
    score = score.clip(0, 1).astype(np.float32)
    attention = (score**2 / max((score**2).sum(), 1e-6)).astype(np.float32)
    found = planned.probability >= 0.4
    prediction = replace(PREDICTION, probability=(planned.probability,), decision="tumor" if found else "normal")
    return Heatmap(
        slide=planned.name,
        model=model,
        method=model.removeprefix("vit_"),
        kind="attention",
        scale="winsor",
        gated=False,
        frame=Frame(truth.mpp, truth.size_l0, float(extent_l0), float(extent_l0), 2 * truth.mpp, extent_l0 // 2),
        prediction=prediction,
        coords_l0=coords,
        score=score,
        detection=score * np.float32(planned.probability),
        columns={"attention": attention, "instance": score**2, "product": attention * score**2},
        annotated=inside.astype(np.float32),
    )


def tissue_corners(truth: SyntheticSlide, extent_l0: int) -> NDArray[np.int64]:
    """(N, 2) corners of the tiles whose middle lies on tissue."""
    across = [edge // extent_l0 for edge in truth.size_l0]
    corners = np.stack(np.meshgrid(*(np.arange(count) * extent_l0 for count in across)), axis=-1).reshape(-1, 2)
    column, row = ((corners + extent_l0 / 2) * truth.mpp / truth.tissue_mpp).astype(int).T
    high, wide = truth.tissue_mask.shape
    return corners[truth.tissue_mask[row.clip(0, high - 1), column.clip(0, wide - 1)]].astype(np.int64)


@contextmanager
def serving(study: ViewedStudy) -> Iterator[str]:
    """The viewer on a free port, in a thread; the address."""
    listener = socket.create_server(("127.0.0.1", 0))
    app = make_app(study, static_files(), hosts=names_for("127.0.0.1"))
    server = uvicorn.Server(uvicorn.Config(app, http="h11", ws="none", log_level="warning"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
    finally:
        server.should_exit = True
        thread.join(10)
        listener.close()


@contextmanager
def browsing() -> Iterator[Any]:
    """A headless Chromium."""
    from playwright.sync_api import sync_playwright

    assert CHROMIUM
    with sync_playwright() as playwright:
        arguments = ["--no-sandbox", "--disable-gpu"]
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield browser
        browser.close()


AXE = Path(__file__).parents[2] / "node_modules" / "axe-core" / "axe.min.js"
"""Rules of accessibility, as npm installs them."""


def accessibility_problems(page: Any) -> list[str]:
    """Return what axe-core finds serious or critical on a page, one line per rule with the first elements."""
    if not AXE.exists():
        pytest.skip("no axe-core: run npm ci")
    page.evaluate(AXE.read_text(encoding="utf-8"))
    found = page.evaluate("() => axe.run(document, {resultTypes: ['violations']})")
    return [
        f"{rule['id']}: {rule['help']}: {[node['html'][:160] for node in rule['nodes'][:4]]}"
        for rule in found["violations"]
        if rule["impact"] in ("serious", "critical")
    ]
