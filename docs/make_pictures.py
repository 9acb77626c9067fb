"""Makes the pictures of the documentation from made slides; `make docs` calls it."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

from selfvitmil.annotations import Annotation, read_annotations, write_annotations
from selfvitmil.localize.lesions import find_lesions
from selfvitmil.localize.maps import Frame, SlideMap, Verdict
from selfvitmil.localize.overlay import draw_overlay
from selfvitmil.settings import StudySettings
from selfvitmil.slides import Slide, open_slide
from selfvitmil.slides.synthetic import make_slide
from selfvitmil.tiles import TileJob, TileTable, read_tiles, tile_slide

PICTURES = Path(__file__).parent / "pictures"
GAP = 8
EDGE = 920


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        truth = make_slide(folder / "s.svs", seed=7, lesions=2, lesion_um=(200.0, 300.0))
        write_annotations(folder / "s.xml", [Annotation("lesion", "Tumor", ring) for ring in truth.lesions])
        tile_slide(TileJob("s", folder / "s.svs", folder, StudySettings(), annotation=folder / "s.xml"))
        table = read_tiles(folder / "0.5mpp_224px_0px" / "s.h5")
        with open_slide(folder / "s.svs") as slide, Image.open(folder / "0.5mpp_224px_0px" / "s.jpg") as kept:
            whole = Image.fromarray(slide.thumbnail(slide.mpp * slide.size_l0[0] / EDGE)).resize((EDGE // 2, EDGE // 2))
            row = [
                whole,
                kept.resize((EDGE // 2, EDGE // 2)),
                tiles_of(slide, table, False),
                tiles_of(slide, table, True),
            ]
            write_map_picture(slide, table, folder / "s.xml")
    sheet = Image.new("RGB", (sum(part.width + GAP for part in row) - GAP, EDGE // 2), "white")
    left = 0
    for part in row:
        sheet.paste(part, (left, 0))
        left += part.width + GAP
    sheet.save(PICTURES / "tiles.jpg", quality=86)


def tiles_of(slide: Slide, table: TileTable, lesion: bool) -> Image.Image:
    """Two tiles below each other, of normal tissue or of a lesion."""
    assert table.annotated is not None
    order = np.argsort(table.annotated, kind="stable")
    rows = order[-2:] if lesion else order[[len(order) // 4, len(order) // 3]]
    edge = (EDGE // 2 - GAP) // 2
    sheet = Image.new("RGB", (edge, EDGE // 2), "white")
    for k, row in enumerate(rows):
        x, y = table.coords_l0[row]
        pixels = slide.read_tile(x, y, table.size_px, table.mpp)
        sheet.paste(Image.fromarray(pixels).resize((edge, edge)), (0, k * (edge + GAP)))
    return sheet


def write_map_picture(slide: Slide, table: TileTable, annotation: Path) -> None:
    """A map beside its tissue; the scores are made as well, from the annotation, so the caption says so."""
    assert table.annotated is not None
    rng = np.random.default_rng(5)
    score = np.clip(0.95 * table.annotated + 0.35 * rng.beta(1, 4, len(table)), 0, 1).astype(np.float32)
    slide_map = SlideMap(
        slide="A made slide with made scores: how to read a map",
        model="none",
        method="none",
        kind="attention",
        scale="winsor",
        gated=False,
        frame=Frame(slide.mpp, slide.size_l0, table.extent_l0, table.extent_l0, table.mpp, table.size_px),
        verdict=Verdict(
            (0.93,), None, None, "tumor", 0.41, "made up", ("normal", "tumor"), "tumor", "", "new", seeds=(0,)
        ),
        coords_l0=table.coords_l0,
        score=score,
        detection=score,
        columns={"attention": score},
    )
    mpp = slide.size_l0[0] * slide.mpp / (EDGE // 2)
    page = draw_overlay(
        slide_map,
        slide.thumbnail(mpp),
        mpp,
        outlines=read_annotations(annotation),
        lesions=find_lesions(slide_map, 0.5),
        beside=True,
    )
    # A palette that keeps the rare colours of the lines: a third of the bytes.
    few = page.quantize(256, method=Image.Quantize.MAXCOVERAGE, kmeans=1, dither=Image.Dither.NONE)
    few.save(PICTURES / "map.png", optimize=True)


if __name__ == "__main__":
    main()
