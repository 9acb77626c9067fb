"""Quality of tiles: planted artefacts are found where they are; clean tissue, synthetic and real, is left alone."""

from __future__ import annotations

import csv
import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from helpers import artefacts
from helpers.error_codes import has_code
from selfvitmil import rendering, tiles, tiling
from selfvitmil.engine import Engine
from selfvitmil.errors import ConfigError, TissueError
from selfvitmil.geometry import box_fractions
from selfvitmil.quality import (
    MIN_FRACTION,
    MIN_SHARPNESS,
    TileQuality,
    measure_quality,
    relative_sharpness,
    sharpness,
)
from selfvitmil.quality import artefacts as find_artefacts
from selfvitmil.settings import (
    QUALITY_KINDS,
    EngineSettings,
    QualityKind,
    StudySettings,
    TileSettings,
    TissueSettings,
    parse,
)
from selfvitmil.slides import SlideRef, open_slide, synthetic
from selfvitmil.stages.tile import tile
from selfvitmil.study import CohortSource, Study
from selfvitmil.tiles import TileJob, TileTable, read_tiles
from selfvitmil.tiling import tile_slide
from selfvitmil.tissue import find_tissue

MPP = 0.5
CENTER = (512.0, 512.0)
Plant = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    path = tmp_path_factory.mktemp("clean") / "a.svs"
    synthetic.make_slide(path, seed=3, size=(2048, 2048), mpp=MPP, lesions=1)
    with open_slide(path) as slide:
        return slide.thumbnail(MPP)


def measured(pixels: np.ndarray, folder: Path) -> tuple[np.ndarray, TileQuality]:
    """Level-0 boxes of the tiles with tissue, and their quality."""
    Image.fromarray(pixels).save(folder / "a.png", compress_level=1)
    with open_slide(folder / "a.png", mpp=MPP) as slide:
        tissue = find_tissue(slide, TissueSettings(), "a")
        boxes = tiles.boxes_l0(tiles.grid(slide.size_l0, MPP, 224, MPP), 224)
        boxes = boxes[tiling.mask_fractions(boxes, tissue, MPP) >= 0.5]
        return boxes, measure_quality(slide, tissue, boxes)


def test_clean_synthetic_tissue_has_no_flag(clean: np.ndarray, tmp_path: Path) -> None:
    boxes, quality = measured(clean, tmp_path)
    assert len(boxes) > 30
    assert not quality.flagged.any()


def pen(ink: str) -> Plant:
    def plant(pixels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        mask = artefacts.stroke(pixels.shape, MPP, [(200, 400), (520, 520), (820, 600)], 160)
        return artefacts.pen(pixels, mask, ink), mask

    return plant


def blur(sigma_um: float) -> Plant:
    def plant(pixels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        mask = artefacts.region(pixels.shape, MPP, CENTER, 230)
        return artefacts.blur(pixels, mask, MPP, sigma_um), mask

    return plant


def fold(pixels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    mask = artefacts.stroke(pixels.shape, MPP, [(300, 350), (560, 512), (600, 750)], 60)
    return artefacts.fold(pixels, mask, MPP), mask


def bubble(pixels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    pixels, rim = artefacts.bubble(pixels, MPP, CENTER, 250)
    return pixels, rim


def blood(pixels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    mask = artefacts.region(pixels.shape, MPP, CENTER, 170)
    return artefacts.blood(pixels, mask, MPP), mask


@pytest.mark.parametrize(("kind", "plant", "covered", "least"), [
    *(("pen", pen(ink), 0.3, 1.0) for ink in artefacts.INKS),
    ("blur", blur(1.0), 0.9, 0.8),
    ("blur", blur(2.0), 0.98, 1.0),
    ("fold", fold, 0.3, 0.8),
    ("bubble", bubble, 0.25, 1.0),
    ("blood", blood, 0.6, 1.0),
], ids=[*(f"{ink} pen" for ink in artefacts.INKS), "blur 1 um", "blur 2 um", "fold", "bubble", "blood"])  # fmt: skip
def test_planted_artefacts_are_found_and_nothing_else(
    kind: QualityKind, plant: Plant, covered: float, least: float, clean: np.ndarray, tmp_path: Path
) -> None:
    pixels, mask = plant(clean)
    boxes, quality = measured(pixels, tmp_path)
    cover, found = box_fractions(mask, boxes), quality.flagged[:, QUALITY_KINDS.index(kind)]
    assert (cover >= covered).sum() >= 3
    assert found[cover >= covered].mean() >= least
    assert not quality.flagged[cover == 0].any(), "tiles without the artefact are flagged"


def test_sharpness_does_not_depend_on_contrast_and_falls_with_blur(clean: np.ndarray) -> None:
    tile_px = clean[900:1124, 900:1124].reshape(112, 2, 112, 2, 3).mean(axis=(1, 3)).astype(np.uint8)
    pale = (255 - (255 - tile_px.astype(np.float32)) * 0.5).round().astype(np.uint8)
    assert sharpness(pale) == pytest.approx(sharpness(tile_px), rel=0.1)
    everywhere = np.ones(tile_px.shape[:2], bool)
    blurred = [sharpness(artefacts.blur(tile_px, everywhere, 1.0, sigma)) for sigma in (0.5, 1, 2)]
    assert sorted(blurred, reverse=True) == blurred
    assert blurred[1] < MIN_SHARPNESS * sharpness(tile_px) < sharpness(tile_px)
    assert np.isnan(sharpness(np.full((112, 112, 3), 240, np.uint8)))


def test_a_tile_without_structure_is_not_called_blurred() -> None:
    np.testing.assert_allclose(relative_sharpness(np.array([2.0, np.nan, 4.0, 0.3])), [1.0, 1.0, 2.0, 0.15])
    np.testing.assert_array_equal(relative_sharpness(np.array([np.nan, np.nan])), 1.0)


# ---------------------------------------------------------------------------------------------------- real tissue


def shrunk(path: Path, factor: int) -> np.ndarray:
    return np.asarray(Image.open(path).convert("RGB").reduce(factor))


def flags_of(groups: dict[str, list[Path]], px_per_um: float, most: int) -> Counter[str]:
    """Return flags of real tiles; those of a patient lie side by side as if in one slide."""
    counts: Counter[str] = Counter()
    rng = np.random.default_rng(0)
    for paths in groups.values():
        chosen = [paths[k] for k in rng.permutation(len(paths))[:most]]
        found = find_artefacts(
            np.stack([shrunk(path, round(8 * px_per_um))[:6, :6] for path in chosen], axis=1).reshape(6, -1, 3)
        )
        for kind, mask in found.items():
            counts[kind] += int((mask.reshape(len(mask), -1, 6).mean(axis=(0, 2)) >= MIN_FRACTION[kind]).sum())
        sharp = [sharpness(shrunk(path, max(1, round(px_per_um)))) for path in chosen]
        counts["blur"] += int((relative_sharpness(np.array(sharp)) < MIN_SHARPNESS).sum())
        counts["tiles"] += len(chosen)
    return counts


def test_real_tiles_have_few_flags(shared: Path) -> None:
    """Selected tiles of good quality: lymph node, lung, breast. What is flagged here is mostly a false alarm."""
    groups: dict[str, dict[str, list[Path]]] = {name: defaultdict(list) for name in ("camelyon16", "lunghist700")}
    for path in sorted((shared / "data/camelyon16/patches").rglob("*_*")):
        groups["camelyon16"]["_".join(path.stem.split("_")[:2])].append(path)
    folder = shared / "data/lunghist700"
    with (folder / "tiles.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            if float(row["background"]) < 0.5:
                groups["lunghist700"][row["group"]].append(folder / row["file"])
    for name, px_per_um in (("camelyon16", 4.0), ("lunghist700", 2.0)):
        counts = flags_of(groups[name], px_per_um, most=20 if name == "camelyon16" else 4)
        assert counts["tiles"] > 60
        assert sum(counts[kind] for kind in QUALITY_KINDS) <= 0.04 * counts["tiles"], (name, counts)


def test_real_slides_have_few_flags_and_a_real_fold_is_seen(shared: Path) -> None:
    """The TCGA slide is folded along its left edge, in the strip of 40 x 190 um below; nothing else is wrong."""
    for name, mpp in (("CMU-1-Small-Region.svs", None), ("tcga-cr-7395-01a-01-ts1.svs", 0.25)):
        with open_slide(shared / "data/slides" / name, mpp=mpp) as slide:
            tissue = find_tissue(slide, TissueSettings(), name)
            boxes = tiles.boxes_l0(tiles.grid(slide.size_l0, slide.mpp, 224, 0.5), 112 / slide.mpp)
            boxes = boxes[tiling.mask_fractions(boxes, tissue, slide.mpp) >= 0.5]
            flagged = measure_quality(slide, tissue, boxes).flagged
            folds = find_artefacts(slide.thumbnail(8.0))["fold"]
        assert len(boxes) > 40
        assert flagged.sum() <= 0.03 * len(boxes), name
    strip = folds[49:73, 1:6]
    assert strip.mean() > 0.2
    assert folds[20:60, 40:90].mean() < 0.02  # flat tissue in the middle


# ---------------------------------------------------------------------------------------------------- in a study


@pytest.fixture(scope="module")
def slides(clean: np.ndarray, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A slide with blue pen, and one without."""
    folder = tmp_path_factory.mktemp("slides")
    Image.fromarray(pen("blue")(clean)[0]).save(folder / "pen.png", compress_level=1)
    Image.fromarray(clean).save(folder / "clean.png", compress_level=1)
    return folder


def study_of(root: Path, slides: Path, **tile_settings: object) -> Study:
    settings = parse({"slide": {"mpp": MPP}, "stain": {"method": "none"}, "tile": tile_settings}, "a test")
    return Study(root, settings, CohortSource(slides))


def tiled(root: Path, slides: Path, **tile_settings: object) -> tuple[dict[str, TileTable], list[str]]:
    study = study_of(root, slides, **tile_settings)
    result = tile(study, Engine(EngineSettings(workers=0)))
    assert not result.failures
    lines = list(rendering.render(result).lines)
    return {name: read_tiles(study.layout.tile_table(study.tiling, name)) for name in ("pen", "clean")}, lines


def test_quality_only_flags_and_exclude_drops_and_says_so(slides: Path, tmp_path: Path) -> None:
    plain, _ = tiled(tmp_path / "s", slides)
    folder = tmp_path / "s" / "tiles" / "0.5mpp_224px_0px"
    before = {name: (folder / f"{name}.h5").read_bytes() for name in plain}
    assert plain["pen"].quality is None
    assert not (folder / "quality.html").exists()

    flagged, lines = tiled(tmp_path / "s", slides, quality=True)
    quality = flagged["pen"].quality
    assert quality is not None
    number = quality.counts()["pen"]
    assert number > 3
    for name, table in flagged.items():
        np.testing.assert_array_equal(table.coords_l0, plain[name].coords_l0)
    assert any(re.search(rf"{number} pen; none excluded", line) for line in lines), lines
    page = (folder / "quality.html").read_text()
    assert "None is excluded" in page
    assert page.count("data:image") == 1  # of the slide with pen

    kept, lines = tiled(tmp_path / "s", slides, exclude="blood,pen")
    is_pen = quality.has_any(["pen"])
    np.testing.assert_array_equal(kept["pen"].coords_l0, plain["pen"].coords_l0[~is_pen])
    assert kept["pen"].excluded is not None
    np.testing.assert_array_equal(kept["pen"].excluded[0], plain["pen"].coords_l0[is_pen])
    assert any(f"{number} excluded in 1 slide;" in line for line in lines), lines
    with (folder / "tiles.csv").open(newline="") as file:
        rows = {row["slide"]: row for row in csv.DictReader(file)}
    assert (rows["pen"]["excluded"], rows["pen"]["pen"], rows["clean"]["excluded"]) == (str(number), str(number), "0")

    tiled(tmp_path / "s", slides)  # and back: the same bytes, nothing left behind
    assert {name: (folder / f"{name}.h5").read_bytes() for name in plain} == before
    assert not (folder / "quality.html").exists()
    assert not (folder / "quality" / "pen.jpg").exists()


def test_tables_without_quality_are_those_of_earlier_versions(slides: Path, tmp_path: Path) -> None:
    tiled(tmp_path / "s", slides)
    provenance = tiles._stored_provenance(tmp_path / "s" / "tiles" / "0.5mpp_224px_0px" / "clean.h5")
    assert provenance is not None
    stored = provenance.settings["tile"]
    assert set(stored) == set(TileSettings.model_fields) - {"quality", "exclude"}, json.dumps(stored)


def test_a_slide_of_which_nothing_is_left_is_an_error(tmp_path: Path, clean: np.ndarray) -> None:
    ink = artefacts.pen(clean, np.ones(clean.shape[:2], bool) & (clean.min(axis=-1) < 200), "green")
    Image.fromarray(ink).save(tmp_path / "a.png")
    settings = StudySettings(stain={"method": "none"}, tile={"exclude": ("pen",)})  # pyright: ignore[reportArgumentType]
    with pytest.raises(TissueError, check=has_code("all-tiles-excluded")):
        tile_slide(TileJob(SlideRef("a", tmp_path / "a.png", mpp=MPP), tmp_path / "tiles", settings))


def test_kinds_may_be_separated_by_commas_and_unknown_ones_are_errors() -> None:
    assert TileSettings(exclude="pen, blur").exclude == ("pen", "blur")  # pyright: ignore[reportArgumentType]
    assert TileSettings(exclude=("blood,pen",)) == TileSettings(exclude=("pen", "blood"))  # pyright: ignore[reportArgumentType]
    assert TileSettings(exclude=("pen",)).with_quality
    with pytest.raises(ConfigError, match="blur"):
        parse({"tile": {"exclude": ["pem"]}}, "a test")
