"""Tile tables: geometry by property, content by planted truth, files by round trip."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from helpers.error_codes import has_code
from helpers.outcomes import changed
from selfvitmil import annotations, stain, tiles, tiling
from selfvitmil.engine import Engine
from selfvitmil.errors import ArtefactError, SlideError, TissueError
from selfvitmil.settings import EngineSettings, StudySettings, parse
from selfvitmil.slides import SlideRef, open_slide, synthetic
from selfvitmil.stages import tile as tile_stage
from selfvitmil.store.provenance import BUILT, UP_TO_DATE, Change, ChangeKind, Provenance, rebuilt
from selfvitmil.study import CohortSource, Study
from selfvitmil.tiles import TileJob, TileTable, read_tiles, write_tiles
from selfvitmil.tiling import tile_slide
from selfvitmil.tissue import Tissue, grey_of

BUILT_FROM = Provenance("tile", tiles.FORMAT_VERSION, {"tile": {"mpp": 0.5}}, {"slide": "abc"})


@given(
    size=st.tuples(st.integers(10, 3000), st.integers(10, 3000)),
    slide_mpp=st.floats(0.1, 1.0),
    size_px=st.integers(8, 300),
    overlap=st.floats(0, 0.9),
)
def test_every_tile_lies_inside_and_nothing_that_fits_is_left_out(
    size: tuple[int, int], slide_mpp: float, size_px: int, overlap: float
):
    overlap_px = int(overlap * size_px)
    coords = tiles.grid(size, slide_mpp, size_px, 0.5, overlap_px)
    extent = size_px * 0.5 / slide_mpp
    assert (coords >= 0).all()
    assert (coords + extent <= np.array(size) + 1e-6).all()
    # One more stride to the right or down would stick out; each of two roundings may be half a pixel.
    stride = (size_px - overlap_px) * 0.5 / slide_mpp
    for axis in (0, 1):
        if len(coords):
            assert coords[:, axis].max() + stride + extent > size[axis] - 1
        else:
            assert extent > min(size) - 1e-6
            break


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.floats(0.2, 0.6))
def test_tissue_fraction_is_true(seed: int, slide_mpp: float):
    """Against counting on a mask blown up to level-0 pixels."""
    generator = np.random.default_rng(seed)
    mask = generator.random((12, 9)) < 0.5
    mask_mpp = slide_mpp * 16
    tissue = Tissue(mask, mask_mpp, None, 0.0, np.zeros((12, 9, 3), np.uint8))
    fine = np.kron(mask, np.ones((16, 16), bool))
    boxes = np.array([[x, y, x + 40, y + 40] for x, y in generator.integers(0, 90, (6, 2))], dtype=np.float64)
    found = tiling.mask_fractions(boxes, tissue, slide_mpp)
    expected = [fine[int(y0) : int(y1), int(x0) : int(x1)].sum() / 1600 for x0, y0, x1, y1 in boxes]
    assert found == pytest.approx(expected, abs=1e-9)


def table_of(coords: np.ndarray, size_l0: tuple[int, int] = (4000, 3000), mpp: float = 0.5) -> TileTable:
    return TileTable(
        "s", coords, np.ones(len(coords), np.float32), 224, mpp, 0, slide_mpp=0.25, size_l0=size_l0
    )  # fmt: skip


@pytest.mark.parametrize("parent_mpp", [1.0, 2.0, 1.7])
def test_parents_hold_their_children(parent_mpp: float):
    size = (4000, 3000)
    coords = tiles.grid(size, 0.25, 224, 0.5)
    keep = np.random.default_rng(0).random(len(coords)) < 0.3
    fine = table_of(coords[keep], size)
    parents, rows = tiles.parent_rows(fine, size, parent_mpp)
    extent, parent_extent = fine.extent_l0, 224 * parent_mpp / 0.25
    assert (parents + parent_extent <= np.array(size) + 1e-6).all()
    for (x, y), row in zip(fine.coords_l0, rows, strict=True):
        centre = np.array([x, y]) + extent / 2
        if row >= 0:
            assert (parents[row] - 1 <= centre).all()
            assert (centre <= parents[row] + parent_extent + 1).all()
        else:
            assert ((centre // parent_extent + 1) * parent_extent > np.array(size) - 1e-6).any()
    assert set(rows[rows >= 0]) == set(range(len(parents)))  # no parent without a child


def test_a_four_times_coarser_parent_owns_at_most_sixteen_tiles():
    fine = table_of(tiles.grid((8000, 8000), 0.25, 224, 0.5), (8000, 8000))
    _, rows = tiles.parent_rows(fine, (8000, 8000), 2.0)
    assert set(np.bincount(rows[rows >= 0])) == {16}


def test_file_round_trip_and_equal_bytes(tmp_path: Path):
    coords = tiles.grid((4000, 3000), 0.25, 224, 0.5)
    table = replace(
        table_of(coords),
        stain=stain.REFERENCE,
        annotated=np.linspace(0, 1, len(coords)).astype(np.float32),
        parents={"2mpp_224px_0px": np.arange(len(coords)) - 1},
        parent_digests={"2mpp_224px_0px": "feed"},
        attributes={"tissue_mm2": 1.5, "warnings": ["naïve"]},
    )
    write_tiles(tmp_path / "a.h5", table, BUILT_FROM)
    write_tiles(tmp_path / "b.h5", table, BUILT_FROM)
    assert (tmp_path / "a.h5").read_bytes() == (tmp_path / "b.h5").read_bytes()
    again = read_tiles(tmp_path / "a.h5")
    for name in (
        "slide",
        "size_px",
        "mpp",
        "overlap_px",
        "slide_mpp",
        "size_l0",
        "stain",
        "attributes",
        "parent_digests",
    ):
        assert getattr(again, name) == getattr(table, name), name
    assert again.fingerprint == "abc"
    assert again.annotated is not None
    assert table.annotated is not None
    assert np.array_equal(again.coords_l0, table.coords_l0)
    assert np.array_equal(again.tissue, table.tissue)
    assert np.array_equal(again.annotated, table.annotated)
    assert np.array_equal(again.parents["2mpp_224px_0px"], table.parents["2mpp_224px_0px"])


def test_trident_finds_its_attributes(tmp_path: Path):
    write_tiles(tmp_path / "a.h5", table_of(np.array([[0, 448]])), BUILT_FROM)
    with h5py.File(tmp_path / "a.h5") as file:
        coords = file["coords"]
        attributes = dict(coords.attrs)  # pyright: ignore[reportAttributeAccessIssue]
        assert coords.dtype == np.int64  # pyright: ignore[reportAttributeAccessIssue]
    assert attributes["patch_size"] == 224
    assert attributes["patch_size_level0"] == 448
    assert (attributes["level0_magnification"], attributes["target_magnification"]) == (40, 20)
    assert (attributes["level0_width"], attributes["level0_height"]) == (4000, 3000)
    assert attributes["savetodir"] == ""


def test_damaged_and_foreign_files_are_refused(tmp_path: Path):
    (tmp_path / "text.h5").write_text("no")
    with h5py.File(tmp_path / "foreign.h5", "w") as file:
        file["coords"] = np.zeros((1, 2))
    for name in ("text.h5", "foreign.h5", "missing.h5"):
        with pytest.raises(ArtefactError, match=f"{name}: not a readable tile table"):
            read_tiles(tmp_path / name)


# ---------------------------------------------------------------------------------------------------- whole slides


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory):
    """A positive slide with its truth and annotation."""
    folder = tmp_path_factory.mktemp("made")
    truth = synthetic.make_slide(folder / "s.svs", seed=3, size=(2560, 2048), lesions=1, lesion_um=(120.0, 200.0))
    outlines = [annotations.Annotation(f"lesion {k}", "Tumor", ring) for k, ring in enumerate(truth.lesions)]
    annotations.write_annotations(folder / "s.xml", outlines)
    return folder, truth


def job(made_folder: Path, out: Path, annotation: bool = False, **flags: dict[str, object]) -> TileJob:
    path = made_folder / "s.xml" if annotation else None
    return TileJob(SlideRef("s", made_folder / "s.svs"), out, parse(flags, "test"), annotation=path)


def test_a_slide_is_cut_where_its_tissue_is(made, tmp_path: Path):
    folder, truth = made
    result = tile_slide(job(folder, tmp_path, annotation=True))
    table = read_tiles(tmp_path / "0.5mpp_224px_0px" / "s.h5")
    assert result.outcome == BUILT
    assert len(table) == result.num_tiles > 10
    assert table.stain is not None
    assert table.stain.fitted
    # Every kept tile is mostly tissue in the generator's own mask, and tumour tiles lie where the lesion was planted.
    truth_fraction = tiling.box_fractions(truth.tissue_mask, table.boxes_l0 * (table.slide_mpp / truth.tissue_mpp))
    assert np.abs(truth_fraction - table.tissue).mean() < 0.08
    assert table.annotated is not None
    assert table.annotated.max() > 0.5
    assert result.attributes["tumour_tiles"] >= (table.annotated > 0).sum()
    with Image.open(tmp_path / "0.5mpp_224px_0px" / "s.jpg") as picture:
        assert max(picture.size) <= 1200
    outline = annotations.read_annotations(tmp_path / "0.5mpp_224px_0px" / "s.geojson")
    assert {region.group for region in outline} == {"Tissue"}


def test_rerun_skips_and_says_why_not(made, tmp_path: Path):
    folder, _ = made
    target = tmp_path / "0.5mpp_224px_0px"
    tile_slide(job(folder, tmp_path))
    before = (target / "s.h5").read_bytes()
    assert tile_slide(job(folder, tmp_path)).outcome == UP_TO_DATE
    outcome = tile_slide(job(folder, tmp_path, tile={"min_tissue": 0.6})).outcome
    assert outcome == rebuilt(Change(ChangeKind.SETTING, "tile.min_tissue", 0.5, 0.6))
    annotated = job(folder, tmp_path, annotation=True, tile={"min_tissue": 0.6})
    assert changed(tile_slide(annotated).outcome) == ["annotation"]
    (target / "s.jpg").unlink()
    assert tile_slide(annotated).outcome == rebuilt(Change(ChangeKind.MISSING_FILE, "s.jpg"))
    (target / "s.h5").write_bytes(before[: len(before) // 2])
    assert tile_slide(job(folder, tmp_path)).outcome == rebuilt(Change(ChangeKind.DAMAGED_FILE, "s.h5"))
    assert (target / "s.h5").read_bytes() == before


def test_edited_outline_comes_back(made, tmp_path: Path):
    """What QuPath would hand back: the written outline with an exclusion drawn in."""
    folder, _ = made
    first = tile_slide(job(folder, tmp_path))
    written = annotations.read_annotations(tmp_path / "0.5mpp_224px_0px" / "s.geojson")
    own = tmp_path / "own"
    annotations.write_annotations(own / "s.geojson", written)
    unchanged = tile_slide(job(folder, tmp_path, tissue={"method": "own", "folder": str(own)}))
    assert unchanged.num_tiles == first.num_tiles
    left_half = np.array([[0, 0], [1280, 0], [1280, 2048], [0, 2048]], dtype=float)
    annotations.write_annotations(own / "s.geojson", [*written, annotations.Annotation("x", "Exclusion", left_half)])
    result = tile_slide(job(folder, tmp_path, tissue={"method": "own", "folder": str(own)}))
    assert changed(result.outcome) == ["mask"]
    table = read_tiles(tmp_path / "0.5mpp_224px_0px" / "s.h5")
    assert 0 < len(table) < first.num_tiles
    assert (table.coords_l0[:, 0] + table.extent_l0 / 2 >= 1280 - 32).all()


def test_own_picture_mask(made, tmp_path: Path):
    folder, _ = made
    mask = np.zeros((64, 80), np.uint8)
    mask[:, 40:] = 255
    (tmp_path / "own").mkdir()
    Image.fromarray(mask).save(tmp_path / "own" / "s.png")
    tile_slide(job(folder, tmp_path, tissue={"method": "own", "folder": str(tmp_path / "own")}))
    table = read_tiles(tmp_path / "0.5mpp_224px_0px" / "s.h5")
    assert (table.coords_l0[:, 0] + table.extent_l0 / 2 >= 1280 - 32).all()
    Image.fromarray(mask[:, :20]).save(tmp_path / "own" / "s.png")
    with pytest.raises(TissueError, check=has_code("tissue-mask-mismatch")):
        tile_slide(job(folder, tmp_path, tissue={"method": "own", "folder": str(tmp_path / "own")}))
    (tmp_path / "own" / "s.png").unlink()
    with pytest.raises(TissueError, match="no tissue mask"):
        tile_slide(job(folder, tmp_path, tissue={"method": "own", "folder": str(tmp_path / "own")}))


def test_pixel_fractions_are_those_of_the_pixels(made, tmp_path: Path):
    """The authors' rule, against reading every tile of the grid without the short cut."""
    folder, _ = made
    flags = {"tissue": {"fraction_from": "pixels", "thumbnail_downsample": 64.0}, "tile": {"min_tissue": 0.6}}
    study = parse(flags, "test")
    tile_slide(job(folder, tmp_path, **flags))
    table = read_tiles(tmp_path / "0.5mpp_224px_0px" / "s.h5")
    from selfvitmil.tissue import find_tissue

    with open_slide(folder / "s.svs") as slide:
        threshold = find_tissue(slide, study.tissue, "s").threshold
        expected = {}
        for x, y in tiles.grid(slide.size_l0, slide.mpp, 224, 0.5):
            share = float(np.mean(grey_of(slide.read_tile(int(x), int(y), 224, 0.5)) < threshold))
            if share >= 0.6:
                expected[int(x), int(y)] = share
    assert {
        tuple(map(int, xy)): pytest.approx(float(t)) for xy, t in zip(table.coords_l0, table.tissue, strict=True)
    } == expected


def test_two_scales_and_their_files(made, tmp_path: Path):
    folder, _ = made
    tile_slide(job(folder, tmp_path, tile={"parent_mpp": [1.0], "size_px": 112}))
    fine = read_tiles(tmp_path / "0.5mpp_112px_0px" / "s.h5")
    coarse = read_tiles(tmp_path / "1mpp_112px_0px" / "s.h5")
    rows = fine.parents["1mpp_112px_0px"]
    assert fine.parent_digests["1mpp_112px_0px"] == coarse.digest
    inside = rows >= 0
    offset = fine.coords_l0[inside] - coarse.coords_l0[rows[inside]]
    assert ((offset >= -1) & (offset <= coarse.extent_l0 - fine.extent_l0 + 1)).all()
    assert tile_slide(job(folder, tmp_path, tile={"parent_mpp": [1.0], "size_px": 112})).outcome == UP_TO_DATE
    (tmp_path / "1mpp_112px_0px" / "s.h5").unlink()
    assert tile_slide(job(folder, tmp_path, tile={"parent_mpp": [1.0], "size_px": 112})).outcome == BUILT


def test_troubles_are_named(made, tmp_path: Path):
    folder, _ = made
    with pytest.raises(SlideError, match=r"gone\.svs: no such file"):
        tile_slide(TileJob(SlideRef("gone", folder / "gone.svs"), tmp_path, StudySettings()))
    with pytest.raises(TissueError, check=has_code("no-tiles")):
        tile_slide(job(folder, tmp_path, tile={"size_px": 1000, "min_tissue": 1.0}))
    assert list(tmp_path.rglob("*.h5")) == []


@pytest.mark.parametrize(
    "flags",
    [
        {"tissue": {"min_contrast": 200}},
        {"tile": {"min_tissue": 1.0, "parent_mpp": [1.0]}, "tissue": {"method": "own", "folder": "own"}},
    ],
)
def test_tables_of_settings_that_do_not_work_any_more_are_removed(made, tmp_path: Path, flags, monkeypatch):
    folder, _ = made
    monkeypatch.chdir(tmp_path)
    Path("own").mkdir()
    tile_slide(job(folder, tmp_path / "tiles", tile={"parent_mpp": [1.0]}))
    assert len(list((tmp_path / "tiles").rglob("s.*"))) == 4
    with pytest.raises(TissueError):
        tile_slide(job(folder, tmp_path / "tiles", **flags))
    # What no setting of the new run names, the table of the coarse scale, is of no stage that comes after it.
    left = {path.parent.name for path in (tmp_path / "tiles").rglob("s.*")}
    assert left == ({"1mpp_224px_0px"} if "tile" not in flags else set())
    assert tile_slide(job(folder, tmp_path / "tiles")).outcome == BUILT


def test_a_slide_that_cannot_be_read_keeps_its_table(made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder, _ = made
    slide = tmp_path / "s.svs"
    slide.write_bytes((folder / "s.svs").read_bytes())
    target = tmp_path / "tiles" / "0.5mpp_224px_0px" / "s.h5"
    asked = job(tmp_path, tmp_path / "tiles")
    changed = job(tmp_path, tmp_path / "tiles", tile={"min_tissue": 0.6})
    tile_slide(asked)
    before = target.read_bytes()
    monkeypatch.setattr(tiling.Slide, "thumbnail", lambda *_: (_ for _ in ()).throw(SlideError("the drive is gone")))
    with pytest.raises(SlideError, match="the drive is gone"):
        tile_slide(changed)
    monkeypatch.undo()
    with pytest.raises(TissueError, match="masks: no such folder"):  # another drive may be away as well
        tile_slide(job(tmp_path, tmp_path / "tiles", tissue={"method": "own", "folder": str(tmp_path / "masks")}))
    slide.write_bytes(slide.read_bytes()[:1000])
    with pytest.raises(SlideError):
        tile_slide(changed)
    slide.unlink()
    with pytest.raises(SlideError):
        tile_slide(changed)
    assert target.read_bytes() == before
    assert target.with_suffix(".jpg").exists()


def test_own_masks_count_by_their_content_not_by_their_folder(made, tmp_path: Path):
    folder, _ = made
    mask = np.full((64, 80), 255, np.uint8)
    own = tmp_path / "masks"
    own.mkdir()
    Image.fromarray(mask).save(own / "s.png")
    tile_slide(job(folder, tmp_path / "tiles", tissue={"method": "own", "folder": str(own)}))
    with h5py.File(tmp_path / "tiles" / "0.5mpp_224px_0px" / "s.h5") as file:
        assert str(tmp_path) not in str(dict(file.attrs))
    moved = own.rename(tmp_path / "elsewhere")
    assert (
        tile_slide(job(folder, tmp_path / "tiles", tissue={"method": "own", "folder": str(moved)})).outcome
        == UP_TO_DATE
    )
    mask[:, :40] = 0
    Image.fromarray(mask).save(moved / "s.png")
    edited = tile_slide(job(folder, tmp_path / "tiles", tissue={"method": "own", "folder": str(moved)}))
    assert changed(edited.outcome) == ["mask"]


def test_no_file_beside_the_tables_names_the_folder_of_own_masks(made, tmp_path: Path):
    folder, _ = made
    (tmp_path / "masks").mkdir()
    Image.fromarray(np.full((64, 80), 255, np.uint8)).save(tmp_path / "masks" / "s.png")
    study = parse({"tissue": {"method": "own", "folder": str(tmp_path / "masks")}}, "test")
    with Engine(EngineSettings(workers=0)) as engine:
        tile_stage.tile(Study(tmp_path / "study", study, CohortSource(folder)), engine)
    files = [path for path in (tmp_path / "study" / "tiles").rglob("*") if path.is_file()]
    assert {path.name for path in files} >= {"s.h5", "settings.toml", "tiles.csv"}
    assert not [path.name for path in files if str(tmp_path).encode() in path.read_bytes()]


@pytest.mark.parametrize("name", ["case[1]", "case*", "what?", "case.1"])
def test_an_edited_mask_is_noticed_whatever_the_slide_is_called(made, tmp_path: Path, name: str):
    folder, _ = made
    mask = np.full((64, 80), 255, np.uint8)
    own = tmp_path / "own"
    own.mkdir()
    flags = {"tissue": {"method": "own", "folder": str(own)}}
    asked = TileJob(SlideRef(name, folder / "s.svs"), tmp_path / "tiles", parse(flags, "test"))
    Image.fromarray(mask).save(own / f"{name}.png")
    tile_slide(asked)
    Image.fromarray(mask).save(own / f"{name}.2.png")  # of another slide
    assert tile_slide(asked).outcome == UP_TO_DATE
    mask[:, :40] = 0
    Image.fromarray(mask).save(own / f"{name}.png")
    assert changed(tile_slide(asked).outcome) == ["mask"]


def test_notes_on_repaired_outlines_are_true(made, tmp_path: Path):
    folder, _ = made
    bow_tie = [[100, 100], [900, 900], [900, 100], [100, 900]]
    outlines = [("bow", bow_tie), ("scratch", [[5, 5], [50, 50], [5, 5]])]
    annotations.write_annotations(
        tmp_path / "a.xml", [annotations.Annotation(name, "Tumor", np.array(ring, float)) for name, ring in outlines]
    )
    asked = TileJob(SlideRef("s", folder / "s.svs"), tmp_path / "tiles", StudySettings(), annotation=tmp_path / "a.xml")
    notes = [note for note in tile_slide(asked).attributes["warnings"] if "a.xml" in note]
    assert set(notes) == {
        "bow in a.xml crosses itself and was repaired",
        "scratch in a.xml encloses nothing, so no tile lies in it",
    }


def test_real_slides(shared: Path, tmp_path: Path):
    path = shared / "data" / "slides" / "CMU-1-Small-Region.svs"
    result = tile_slide(TileJob(SlideRef("cmu", path), tmp_path, StudySettings()))
    with open_slide(path) as slide:
        possible = len(tiles.grid(slide.size_l0, slide.mpp, 224, 0.5))
    assert 0.3 * possible < result.num_tiles <= possible
    attributes = json.loads(json.dumps(result.attributes))
    assert attributes["stain_fitted"] is True
    no_mpp = shared / "data" / "slides" / "tcga-cr-7395-01a-01-ts1.svs"
    with pytest.raises(SlideError, check=has_code("no-mpp")):
        tile_slide(TileJob(SlideRef("tcga", no_mpp), tmp_path, StudySettings()))
    assert tile_slide(TileJob(SlideRef("tcga", no_mpp, 0.25), tmp_path, StudySettings())).num_tiles > 0
