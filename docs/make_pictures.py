"""Makes the picture of tiles for the documentation from a synthetic slide; `make docs` calls it."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

from selfvitmil.annotations import Annotation, write_annotations
from selfvitmil.settings import StudySettings
from selfvitmil.slides import Slide, SlideRef, open_slide
from selfvitmil.slides.synthetic import make_slide
from selfvitmil.tiles import TileJob, TileTable, read_tiles
from selfvitmil.tiling import tile_slide

PICTURES = Path(__file__).parent / "pictures"
GAP = 8
EDGE = 920


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        synthetic = make_slide(folder / "s.svs", seed=7, lesions=2, lesion_um=(200.0, 300.0))
        write_annotations(folder / "s.xml", [Annotation("lesion", "Tumor", ring) for ring in synthetic.lesions])
        tile_slide(TileJob(SlideRef("s", folder / "s.svs"), folder, StudySettings(), annotation=folder / "s.xml"))
        table = read_tiles(folder / "0.5mpp_224px_0px" / "s.h5")
        with open_slide(folder / "s.svs") as slide, Image.open(folder / "0.5mpp_224px_0px" / "s.jpg") as kept:
            whole = Image.fromarray(slide.thumbnail(slide.mpp * slide.size_l0[0] / EDGE)).resize((EDGE // 2, EDGE // 2))
            row = [
                whole,
                kept.resize((EDGE // 2, EDGE // 2)),
                tiles_of(slide, table, False),
                tiles_of(slide, table, True),
            ]
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


if __name__ == "__main__":
    main()
