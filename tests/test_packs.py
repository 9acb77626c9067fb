"""Packs of encoded tiles: what is stored, when it is made again, and training from it. Made slides only."""

from __future__ import annotations

import errno
import io
import os
import pickle
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
import pytest
import torch
from PIL import Image

from helpers.outcomes import changed
from selfvitmil import packs
from selfvitmil.errors import ArtefactError, ConfigError, SlideError
from selfvitmil.packs import PackJob, open_pack, pack_slide, runs
from selfvitmil.pretrain.feed import Batch, Feed, Order, measure_colours
from selfvitmil.pretrain.sources import PackTiles, SlideTiles, TrainSlide
from selfvitmil.settings import StudySettings
from selfvitmil.slides import open_slide
from selfvitmil.slides.base import Slide
from selfvitmil.slides.synthetic import make_slide
from selfvitmil.store.layout import pack_of
from selfvitmil.store.outcome import BUILT, UP_TO_DATE, rebuilt
from selfvitmil.store.provenance import Change, ChangeKind
from selfvitmil.tiles import TileJob, read_tiles, tile_slide

SETTINGS = StudySettings.model_validate({"tile": {"size_px": 64}, "stain": {"sample_tiles": 8}})
TABLES = "tiles/0.5mpp_64px_0px"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three tiled slides."""
    folder = tmp_path_factory.mktemp("study")
    for seed in range(3):
        make_slide(folder / f"s{seed}.svs", seed=seed, size=(1024, 1024))
        tile_slide(TileJob(f"s{seed}", folder / f"s{seed}.svs", folder / "tiles", SETTINGS))
    return folder


@pytest.fixture
def study(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "study"))


def job(study: Path, slide: str = "s0", **changes: Any) -> PackJob:
    return PackJob(slide, study / f"{slide}.svs", study / TABLES / f"{slide}.h5", **changes)


def pixels(study: Path, slide: str = "s0") -> list[np.ndarray]:
    """What the slide itself says."""
    table = read_tiles(study / TABLES / f"{slide}.h5")
    with open_slide(study / f"{slide}.svs") as opened:
        return [opened.read_tile(int(x), int(y), table.size_px, table.mpp) for x, y in table.coords_l0]


# ---------------------------------------------------------------------------------------------------- files


def test_png_keeps_every_pixel_and_is_an_ordinary_zip(study: Path):
    result = pack_slide(job(study, encoding="png"))
    wanted = pixels(study)
    path = pack_of(study / TABLES / "s0.h5")
    assert (result.num_tiles, result.outcome, result.num_bytes) == (len(wanted), BUILT, path.stat().st_size)
    with open_pack(path) as pack:
        assert len(pack) == len(wanted)
        np.testing.assert_array_equal(pack.read_many(range(len(pack))), wanted)
        backwards = [5, 3, 3, 4]
        np.testing.assert_array_equal(pack.read_many(backwards), [wanted[row] for row in backwards])
        np.testing.assert_array_equal(pack.read(7), wanted[7])
    coords = read_tiles(study / TABLES / "s0.h5").coords_l0
    with ZipFile(path) as archive:
        assert archive.testzip() is None
        *names, about, spans = archive.namelist()
        assert (about, spans) == ("pack.json", "spans.npy")
        assert names == [f"{row:06}_{x}_{y}.png" for row, (x, y) in enumerate(coords)]
        np.testing.assert_array_equal(Image.open(io.BytesIO(archive.read(names[7]))), wanted[7])


def test_jpeg_decodes_to_what_another_decoder_sees_and_stays_near_the_slide(study: Path):
    result = pack_slide(job(study))
    wanted = np.stack(pixels(study)).astype(int)
    path = pack_of(study / TABLES / "s0.h5")
    with open_pack(path) as pack, ZipFile(path) as archive:
        decoded = np.stack(pack.read_many(range(len(pack))))
        names = archive.namelist()[: len(pack)]
        images = [Image.open(io.BytesIO(archive.read(name))) for name in names]
        assert all(image.format == "JPEG" for image in images)
        assert all(image.layer[0][1:3] == (1, 1) for image in images)  # pyright: ignore[reportAttributeAccessIssue]
        np.testing.assert_array_equal(decoded, np.stack([np.asarray(image) for image in images]))
    difference = np.abs(decoded - wanted)
    assert 0 < difference.mean() < 3
    assert np.percentile(difference, 99) <= 12
    assert result.num_bytes < wanted.size / 2


def test_packs_are_left_alone_while_they_are_current(study: Path):
    assert pack_slide(job(study)).outcome == BUILT
    path = pack_of(study / TABLES / "s0.h5")
    before = path.read_bytes()
    (study / "s0.svs").rename(study / "away.svs")
    assert pack_slide(job(study)).outcome == UP_TO_DATE  # and the slide is not asked for
    (study / "away.svs").rename(study / "s0.svs")
    path.unlink()
    pack_slide(job(study))
    assert path.read_bytes() == before
    assert pack_slide(job(study, quality=80)).outcome == rebuilt(Change(ChangeKind.SETTING, "quality", 95, 80))
    assert changed(pack_slide(job(study, encoding="png")).outcome) == ["encoding", "quality"]
    assert pack_slide(job(study, encoding="png", quality=70)).outcome == UP_TO_DATE
    path.write_bytes(path.read_bytes()[:-5])
    assert pack_slide(job(study)).outcome == rebuilt(Change(ChangeKind.DAMAGED_FILE, path.name))
    coarser = SETTINGS.model_copy(update={"tile": SETTINGS.tile.model_copy(update={"min_tissue": 0.9})})
    tile_slide(TileJob("s0", study / "s0.svs", study / "tiles", coarser))
    assert changed(pack_slide(job(study)).outcome) == ["tiles"]


def test_another_slide_under_the_same_name(study: Path):
    pack_slide(job(study))
    table = study / TABLES / "s0.h5"
    before = read_tiles(table).digest
    with (study / "s0.svs").open("ab") as file:  # the same pixels and tiles in another file
        file.write(b"\0" * 64)
    assert pack_slide(job(study)).outcome == UP_TO_DATE  # the pack is that of the table
    with pytest.raises(SlideError, match=r"s0\.svs: not the file that was tiled"):
        pack_slide(job(study, quality=90))
    tile_slide(TileJob("s0", study / "s0.svs", study / "tiles", SETTINGS))
    assert read_tiles(table).digest == before
    assert changed(pack_slide(job(study)).outcome) == ["slide"]


def test_a_tile_that_cannot_be_read_fails_the_slide(study: Path, monkeypatch: pytest.MonkeyPatch):
    read_tile, seen = Slide.read_tile, []

    def fail(self: Slide, x_l0: float, y_l0: float, size_px: int, mpp: float) -> Any:
        seen.append(x_l0)
        if len(seen) == 10:
            raise SlideError(f"{self.name}: cannot be read from there", "the file ends", "Copy it again")
        return read_tile(self, x_l0, y_l0, size_px, mpp)

    monkeypatch.setattr(Slide, "read_tile", fail)
    with pytest.raises(SlideError, match=r"s0\.svs: cannot be read from there"):
        pack_slide(job(study))
    assert not [path for path in (study / TABLES / "packs").rglob("*") if path.is_file()]
    with pytest.raises(ConfigError, match="quality of 1 to 100"):
        pack_slide(job(study, quality=0))
    with pytest.raises(SlideError, match=r"gone\.svs: no such file"):
        pack_slide(replace(job(study), path=study / "gone.svs"))


def test_neighbours_are_read_at_once(study: Path, monkeypatch: pytest.MonkeyPatch):
    pack_slide(job(study))
    reads: list[int] = []
    monkeypatch.setattr(packs.os, "pread", lambda *where: reads.append(where[1]) or os_pread(*where))
    with open_pack(pack_of(study / TABLES / "s0.h5")) as pack:
        pack.read_many([3, 4, 5, 6, 20, 21, 19])
        assert len(reads) == 3
        assert reads[0] == pack.spans[6].sum() - pack.spans[3, 0]
    spans = np.array([[0, 10], [12, 10], [30_000, 5], [29_000, 9 << 20], [29_000 + (9 << 20), 5]])
    assert list(runs(spans)) == [(0, 2), (2, 3), (3, 4), (4, 5)]
    assert list(runs(spans[:0])) == []


os_pread = os.pread


def test_short_reads_of_a_network_drive_are_completed(study: Path, monkeypatch: pytest.MonkeyPatch):
    pack_slide(job(study, encoding="png"))
    wanted = pixels(study)[1:3]
    monkeypatch.setattr(packs.os, "pread", lambda file, length, start: os_pread(file, min(length, 1000), start))
    with open_pack(pack_of(study / TABLES / "s0.h5")) as pack:
        np.testing.assert_array_equal(pack.read_many([1, 2]), wanted)


def test_damaged_packs_are_named(study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for encoding in ("jpeg", "png"):
        pack_slide(job(study, encoding=encoding))
        path = pack_of(study / TABLES / "s0.h5")
        content = bytearray(path.read_bytes())
        with open_pack(path) as pack:
            start, length = pack.spans[2]
        content[start : start + length] = bytes(int(length))
        path.write_bytes(content)
        with (
            open_pack(path) as pack,
            pytest.raises(ArtefactError, match=r"s0\.zip: the pack is damaged, a tile cannot be decoded .*Remove it"),
        ):
            pack.read_many([1, 2, 3])
    for name, bad in (("empty", b""), ("text", b"selfvitmil.pack 1"), ("other", b"x" * 500)):
        (tmp_path / name).write_bytes(bad)
        with pytest.raises(ArtefactError, match=f"{name}: the pack is damaged"):
            open_pack(tmp_path / name)
    with pytest.raises(ArtefactError, match=r"nothing\.zip: no such pack"):
        open_pack(tmp_path / "nothing.zip")

    def hiccup(*where: int) -> bytes:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(packs.os, "pread", hiccup)
    with open_pack(path) as pack, pytest.raises(ArtefactError, match="cannot be read, stale file handle"):
        pack.read(0)


# ---------------------------------------------------------------------------------------------------- training


def train_slides(study: Path) -> list[TrainSlide]:
    return [TrainSlide(f"s{k}", study / f"s{k}.svs", study / TABLES / f"s{k}.h5") for k in range(3)]


def pack_all(study: Path, **changes: Any) -> None:
    for k in range(3):
        pack_slide(job(study, f"s{k}", **changes))


def batches(source: Any, workers: int = 0) -> list[Batch]:
    order = Order(source.counts, batch=8, seed=3, pool=16, run=source.run)
    with Feed(source, order, 2, 9, workers=workers) as feed:
        return list(feed)


def assert_same(ours: list[Batch], theirs: list[Batch]) -> None:
    assert len(ours) == len(theirs) == 7
    for a, b in zip(ours, theirs, strict=True):
        assert a.step == b.step
        assert torch.equal(a.tiles_B3HW, b.tiles_B3HW)
        assert torch.equal(a.ids_B, b.ids_B)
        assert a.unfitted == b.unfitted
        np.testing.assert_equal(a.maps_B33, b.maps_B33)


def remove_slides(study: Path) -> None:
    for path in study.glob("*.svs"):
        path.unlink()


@pytest.mark.parametrize("method", ["slide", "tile", "none"])
def test_training_sees_the_same_from_packs_and_from_slides(study: Path, method: Any):
    pack_all(study, encoding="png")
    slides = SlideTiles(train_slides(study), stain_method=method)
    wanted, colours = batches(slides), measure_colours(slides, 50, seed=0, workers=0)
    remove_slides(study)
    source = PackTiles(train_slides(study), stain_method=method)
    assert (source.counts, source.names, source.shape_px) == (slides.counts, slides.names, slides.shape_px)
    assert (source.mpp, source.stain_method, source.run) == (slides.mpp, slides.stain_method, slides.run)
    np.testing.assert_array_equal(source.ids, slides.ids)
    assert source.identity() == slides.identity()
    assert_same(batches(source), wanted)
    assert measure_colours(source, 50, seed=0, workers=0) == colours


def test_the_reader_travels_light(study: Path):
    pack_all(study)
    source = PackTiles(train_slides(study), stain_method="none")
    alone = batches(source)  # its files are open now
    travelling = pickle.dumps(source.reader)
    assert len(travelling) < 2000  # places stay behind
    source.reader = pickle.loads(travelling)
    assert_same(batches(source), alone)


def test_few_files_are_open_at_once(study: Path, monkeypatch: pytest.MonkeyPatch):
    pack_all(study)
    monkeypatch.setattr("selfvitmil.pretrain.sources.MAX_OPEN_PACKS", 1)
    source = PackTiles(train_slides(study), stain_method="none")
    reader: Any = source.reader
    for group in (0, 1, 2, 0, 0):
        tiles = reader.read(group, source.request(group, np.arange(2))).tiles_B3HW
        with open_pack(pack_of(train_slides(study)[group].table)) as pack:
            np.testing.assert_array_equal(tiles.permute(0, 2, 3, 1).numpy(), pack.read_many([0, 1]))
        assert [file._descriptor is not None for file in reader.files] == [k == group for k in range(3)]


def test_lossy_packs_make_another_run(study: Path):
    slides = SlideTiles(train_slides(study), stain_method="slide").identity()
    pack_all(study)
    first = PackTiles(train_slides(study), stain_method="slide").identity()
    pack_all(study, quality=80)
    second = PackTiles(train_slides(study), stain_method="slide").identity()
    assert len({tuple(identity) for identity in (slides, first, second)}) == 3


def test_packs_that_do_not_belong_to_the_tables(study: Path):
    pack_slide(job(study, "s1"))
    with pytest.raises(ConfigError, match="2 of 3 slides have no pack: s0, s2, and nothing else was to be read"):
        PackTiles(train_slides(study), stain_method="none")
    pack_all(study)
    shutil.copy(pack_of(study / TABLES / "s1.h5"), pack_of(study / TABLES / "s2.h5"))
    with pytest.raises(ArtefactError, match=r"s2\.zip: .* differ in slide and tiles"):
        PackTiles(train_slides(study), stain_method="none")
