"""Tiles to feature files: against encoding every tile by hand, and what makes a file stale."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import tifffile
import torch
from PIL import Image

from helpers.error_codes import has_code
from helpers.outcomes import changed
from selfvitmil import embed, stain
from selfvitmil.bags import read_bag
from selfvitmil.embed import EmbeddedSlide, EmbedJob, embed_slide, embed_slides
from selfvitmil.encoder import build_encoder, load_encoder, save_encoder
from selfvitmil.errors import EncoderError, SelfVitMilError
from selfvitmil.settings import EmbedSettings, parse
from selfvitmil.slides import SlideRef, open_slide
from selfvitmil.slides.synthetic import make_slide
from selfvitmil.store.provenance import BUILT, FRESH, UP_TO_DATE, Change, ChangeKind, rebuilt
from selfvitmil.tiles import TileJob, read_tiles
from selfvitmil.tiling import tile_slide

TILING = "0.5mpp_32px_0px"


def tiny_encoder(folder: Path, *, seed: int = 0, stain: str = "slide", mpp: float = 0.5, gain: float = 1.0) -> Path:
    """A random ViT; `gain` scales its vectors."""
    torch.manual_seed(seed)
    model_args = {"embed_dim": 16, "depth": 4, "num_heads": 2}
    encoder = build_encoder("vit_tiny_patch16_224", img_size=32, model_args=model_args, mpp=mpp, stain=stain)
    with torch.no_grad():
        encoder.backbone.norm.weight.mul_(gain)  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]
    save_encoder(folder, encoder)
    return folder


@pytest.fixture(scope="module")
def tiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small slide with its tile table, and an encoder."""
    folder = tmp_path_factory.mktemp("tiled")
    make_slide(folder / "s.svs", seed=5, size=(1024, 1024))
    tile_slide(TileJob(SlideRef("s", folder / "s.svs"), folder / "tiles", parse({"tile": {"size_px": 32}}, "test")))
    tiny_encoder(folder / "vit")
    return folder


def job_for(folder: Path, out: Path, encoder: Path | None = None, method: str = "slide", batch: int = 16) -> EmbedJob:
    return EmbedJob(
        slide=SlideRef("s", folder / "s.svs"),
        table=folder / "tiles" / TILING / "s.h5",
        bag=out / "bags" / TILING / "features_vit" / "s.h5",
        encoder=str(encoder or folder / "vit"),
        name="vit",
        stain_method=method,
        settings=EmbedSettings(batch=batch, readers=2),
    )


def by_hand(folder: Path, method: str) -> np.ndarray:
    """One tile at a time."""
    encoder = load_encoder(folder / "vit")
    table = read_tiles(folder / "tiles" / TILING / "s.h5")
    rows = []
    with open_slide(folder / "s.svs") as slide, torch.inference_mode():
        for x, y in table.coords_l0:
            tile = slide.read_tile(int(x), int(y), 32, 0.5)
            if method == "slide":
                assert table.stain is not None
                tile = stain.apply(tile, table.stain)
            rows.append(encoder.encode(torch.from_numpy(tile).permute(2, 0, 1)[None])[0].numpy())
    return np.stack(rows)


@pytest.mark.parametrize("method", ["slide", "none"])
def test_vectors_are_those_of_the_tiles_in_the_order_of_the_table(tiled: Path, tmp_path: Path, method: str):
    encoder = tiny_encoder(tmp_path / "vit", stain=method)
    job = job_for(tiled, tmp_path, encoder, method)
    result = embed_slide(job)
    bag = read_bag(job.bag)
    table = read_tiles(job.table)
    assert result.outcome == BUILT
    assert result.num_tiles == len(table) == len(bag) > 20
    assert bag.coords is not None
    assert np.array_equal(bag.coords, table.coords_l0)
    assert np.abs(np.asarray(bag.features_ND, np.float32) - by_hand(tiled, method)).max() < 5e-3  # float16


def test_batch_size_does_not_matter(tiled: Path, tmp_path: Path):
    for batch in (7, 1000):
        embed_slide(job_for(tiled, tmp_path / str(batch), batch=batch))
    few, many = (read_bag(job_for(tiled, tmp_path / str(batch)).bag).features_ND for batch in (7, 1000))
    assert np.abs(few.astype(np.float32) - many.astype(np.float32)).max() < 5e-3


def test_current_files_are_left_alone(tiled: Path, tmp_path: Path):
    job = job_for(tiled, tmp_path)
    embed_slide(job)
    before = job.bag.read_bytes()
    assert embed_slide(job).outcome == UP_TO_DATE
    other = tiny_encoder(tmp_path / "other", seed=1)
    assert changed(embed_slide(job_for(tiled, tmp_path, other)).outcome) == ["encoder"]
    assert job.bag.read_bytes() != before
    job.bag.write_bytes(before[:1000])
    assert embed_slide(job).outcome == rebuilt(Change(ChangeKind.DAMAGED_FILE, job.bag.name))
    assert job.bag.read_bytes() == before


def paint(folder: Path, seed: int) -> TileJob:
    """A slide whose every pixel counts as tissue, so that the same tiles are cut whatever it shows; and its job."""
    pixels = np.random.default_rng(seed).integers(90, 140, (256, 256, 3), dtype=np.uint8)
    tifffile.imwrite(folder / "s.tif", pixels, tile=(64, 64), resolution=(20_000, 20_000), resolutionunit="CENTIMETER")
    (folder / "own").mkdir(exist_ok=True)
    Image.fromarray(np.full((64, 64), 255, np.uint8)).save(folder / "own" / "s.png")
    flags = {
        "tile": {"size_px": 32},
        "stain": {"method": "none"},
        "tissue": {"method": "own", "folder": folder / "own"},
    }
    return TileJob(SlideRef("s", folder / "s.tif"), folder / "tiles", parse(flags, "test"))


def test_another_slide_under_the_same_tiles_is_embedded_again(tmp_path: Path):
    encoder = tiny_encoder(tmp_path / "vit", stain="none")
    tile_slide(paint(tmp_path, seed=0))
    job = replace(job_for(tmp_path, tmp_path, encoder, "none"), slide=SlideRef("s", tmp_path / "s.tif"))
    assert embed_slide(job).outcome == BUILT
    first, table = read_bag(job.bag).features_ND.copy(), read_tiles(job.table)
    again = paint(tmp_path, seed=1)
    assert (
        embed.features_freshness(job, load_encoder(encoder).identity()) == FRESH
    )  # the table is still that of the first
    assert changed(tile_slide(again).outcome) == ["slide"]
    assert read_tiles(job.table).digest == table.digest
    (change,) = embed.features_freshness(job, load_encoder(encoder).identity()).changes
    assert (change.kind, change.name) == (ChangeKind.INPUT, "slide")
    assert changed(embed_slide(job).outcome) == ["slide"]
    assert not np.array_equal(read_bag(job.bag).features_ND, first)
    assert embed_slide(job).outcome == UP_TO_DATE


def test_a_slide_that_is_not_the_tiled_one_is_not_embedded(tmp_path: Path):
    encoder = tiny_encoder(tmp_path / "vit", stain="none")
    tile_slide(paint(tmp_path, seed=0))
    job = replace(job_for(tmp_path, tmp_path, encoder, "none"), slide=SlideRef("s", tmp_path / "s.tif"))
    with pytest.raises(SelfVitMilError, match=r"tiled with 0\.5 microns per pixel, but now 0\.25"):
        embed_slide(replace(job, slide=job.slide.at_mpp(0.25)))
    paint(tmp_path, seed=1)
    with pytest.raises(SelfVitMilError, match=r"s\.tif: not the file that was tiled"):
        embed_slide(job)
    assert not job.bag.exists()


def test_tiles_are_read_at_the_resolution_of_their_table(tmp_path: Path):
    """The table was made with microns per pixel that nobody gives any more; the file itself says others."""
    encoder, tiling = tiny_encoder(tmp_path / "vit", stain="none"), paint(tmp_path, seed=0)
    tile_slide(replace(tiling, slide=tiling.slide.at_mpp(0.25)))
    job = replace(job_for(tmp_path, tmp_path, encoder, "none"), slide=SlideRef("s", tmp_path / "s.tif"))
    embed_slide(job)
    table, model = read_tiles(job.table), load_encoder(encoder)
    with open_slide(tmp_path / "s.tif", mpp=0.25) as slide, torch.inference_mode():
        tile = slide.read_tile(*map(int, table.coords_l0[5]), 32, 0.5)
        expected = model.encode(torch.from_numpy(tile).permute(2, 0, 1)[None])[0].numpy()
    assert np.abs(read_bag(job.bag).features_ND[5].astype(np.float32) - expected).max() < 5e-3


def test_what_changes_the_numbers_makes_a_file_stale(tiled: Path, tmp_path: Path):
    job = job_for(tiled, tmp_path)
    embed_slide(job)
    half = replace(job, settings=job.settings.model_copy(update={"precision": "bf16"}))
    for same in ({"batch": 5}, {"device": "cpu"}, {"precision": "fp32"}, {"readers": 1}):
        assert embed_slide(replace(job, settings=job.settings.model_copy(update=same))).outcome == UP_TO_DATE, same
    assert changed(embed_slide(half).outcome) == ["precision"]
    assert embed_slide(half).outcome == UP_TO_DATE
    assert embed_slide(job).outcome == UP_TO_DATE  # `auto` asks for none
    assert embed_slide(replace(job, slide=replace(job.slide, reader="openslide"))).outcome == rebuilt(
        Change(ChangeKind.SETTING, "reader", "auto", "openslide")
    )


def test_a_file_that_does_not_tell_of_its_slide_stays(tiled: Path, tmp_path: Path):
    """As those were that told of encoder, tiles and stain alone; one that tells nothing is made again."""
    job = job_for(tiled, tmp_path)
    embed_slide(job)
    with h5py.File(job.bag, "r+") as file:
        told = json.loads(str(file.attrs["made_from"]))
        file.attrs["made_from"] = json.dumps({key: told[key] for key in ("encoder", "tiles", "stain")})
    assert embed_slide(job).outcome == UP_TO_DATE
    with h5py.File(job.bag, "r+") as file:
        del file.attrs["made_from"]
    assert changed(embed_slide(job).outcome) == ["encoder", "stain", "tiles"]


def test_an_encoder_that_was_trained_again_is_loaded_again(tiled: Path, tmp_path: Path):
    folder = tiny_encoder(tmp_path / "vit")
    job = job_for(tiled, tmp_path, folder)
    embed_slide(job)
    assert embed.load_for(str(folder), job.settings) is embed.load_for(str(folder), job.settings)
    tiny_encoder(folder, seed=1)
    assert changed(embed_slide(job).outcome) == ["encoder"]
    fresh = job_for(tiled, tmp_path / "fresh", tiny_encoder(tmp_path / "other", seed=1))
    embed_slide(fresh)
    assert job.bag.read_bytes() == fresh.bag.read_bytes()


def test_what_does_not_fit_is_refused(tiled: Path, tmp_path: Path):
    coarse = tiny_encoder(tmp_path / "coarse", mpp=2.0)
    with pytest.raises(SelfVitMilError, match="2"):
        embed_slide(job_for(tiled, tmp_path, coarse))
    with pytest.raises(SelfVitMilError):
        embed_slide(job_for(tiled, tmp_path, method="none"))  # the encoder was made for normalized stains
    gone = replace(job_for(tiled, tmp_path), slide=SlideRef("s", tiled / "gone.svs"))
    with pytest.raises(SelfVitMilError, match=r"gone\.svs"):
        embed_slide(gone)
    assert not list(tmp_path.rglob("features_vit/*.h5"))


def test_vectors_that_are_not_numbers(tiled: Path, tmp_path: Path):
    huge = tiny_encoder(tmp_path / "huge", gain=1e6)
    with pytest.raises(EncoderError, check=has_code("non-finite-embeddings")):
        embed_slide(job_for(tiled, tmp_path, huge))


def test_the_embedding_of_patches_as_a_product_is_the_convolution():
    torch.manual_seed(0)
    model_args = {"embed_dim": 16, "depth": 4, "num_heads": 2}
    encoder = build_encoder("vit_tiny_patch16_224", img_size=64, model_args=model_args)
    tiles = torch.randint(0, 256, (3, 3, 64, 64), dtype=torch.uint8)
    with torch.inference_mode():
        before, names = encoder.encode(tiles), list(encoder.state_dict())
        embed.use_patch_product(encoder)
        assert isinstance(encoder.backbone.patch_embed.proj, embed.PatchProduct)  # pyright: ignore
        torch.testing.assert_close(encoder.encode(tiles), before, rtol=1e-5, atol=1e-5)
    assert list(encoder.state_dict()) == names


def test_a_batch_is_filled_up_where_the_encoder_is_compiled_for_its_size(tiled: Path):
    encoder = load_encoder(tiled / "vit")
    seen: list[int] = []
    encoder.register_forward_pre_hook(lambda module, images: seen.append(len(images[0])))
    model = embed.LoadedEncoder(encoder, "", torch.device("cpu"), torch.float32, batch=8)
    tiles = torch.randint(0, 256, (5, 3, 32, 32), dtype=torch.uint8)
    filled = model(tiles)
    assert seen == [8]
    torch.testing.assert_close(filled, replace(model, batch=None)(tiles), rtol=1e-3, atol=1e-3)
    assert seen == [8, 5]


# ---------------------------------------------------------------------------------------------------- many slides


def jobs_for(folder: Path, out: Path, names: str = "abcd") -> dict[str, EmbedJob]:
    """The same slide several times, each with a folder of its own, since the file of its coordinates has its name."""
    jobs = {name: job_for(folder, out / name) for name in names}
    return {name: replace(job, slide=replace(job.slide, name=name)) for name, job in jobs.items()}


@pytest.mark.parametrize("fixed", [None, 16])
def test_slides_together_give_the_files_of_each_alone(
    tiled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fixed: int | None
):
    """With batches of a fixed size slides share them."""
    jobs = jobs_for(tiled, tmp_path / "together")
    model = replace(embed.load_for(str(tiled / "vit"), jobs["a"].settings), batch=fixed)
    monkeypatch.setattr(embed, "load_for", lambda *_: model)
    alone = job_for(tiled, tmp_path / "alone")
    embed_slide(alone)
    results = dict(embed_slides(jobs))
    assert set(results) == set(jobs)
    for name, job in jobs.items():
        found = results[name]
        assert isinstance(found, EmbeddedSlide)
        assert found.outcome == BUILT
        assert 0 <= found.wait_share <= 1
        assert job.bag.read_bytes() == alone.bag.read_bytes()
    assert all(found.outcome == UP_TO_DATE for _, found in embed_slides(jobs) if isinstance(found, EmbeddedSlide))


def test_a_slide_that_cannot_be_read_or_written_fails_alone(tiled: Path, tmp_path: Path):
    jobs = jobs_for(tiled, tmp_path)
    jobs["b"] = replace(jobs["b"], slide=SlideRef("b", tiled / "gone.svs"))
    (tmp_path / "full").write_text("a file where the folder should be")
    jobs["c"] = replace(jobs["c"], bag=tmp_path / "full" / "features_vit" / "c.h5")
    results = dict(embed_slides(jobs))
    failed = {name: error for name, error in results.items() if isinstance(error, SelfVitMilError)}
    assert {name: error.code for name, error in failed.items()} == {"b": "file-not-found", "c": "not-writable"}
    assert jobs["a"].bag.exists()
    assert jobs["d"].bag.exists()
    assert not jobs["b"].bag.exists()
    assert not list(tmp_path.rglob("*.part"))


def test_the_encoder_does_not_wait_for_a_slow_disk(tiled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The first file is written only after the last slide was encoded."""
    jobs = jobs_for(tiled, tmp_path)
    last_encoded = threading.Event()
    write, normalized = embed.write_bag, embed._Stream._normalized
    in_time: list[bool] = []

    def slow(*arguments: Any) -> None:
        in_time.append(last_encoded.wait(timeout=20))
        write(*arguments)

    def noting(stream: Any, batch: Any) -> torch.Tensor:
        if any(part.key == "d" for part in batch.parts):
            last_encoded.set()
        return normalized(stream, batch)

    monkeypatch.setattr(embed, "write_bag", slow)
    monkeypatch.setattr(embed._Stream, "_normalized", noting)
    results = dict(embed_slides(jobs))
    assert [error for error in results.values() if isinstance(error, Exception)] == []
    assert in_time == [True] * 4


def test_an_encoder_that_fails_fails_the_slides(tiled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(embed.LoadedEncoder, "__call__", full)
    results = dict(embed_slides(jobs_for(tiled, tmp_path, "ab")))
    assert [error.code for error in results.values() if isinstance(error, EncoderError)] == ["out-of-gpu-memory"] * 2
