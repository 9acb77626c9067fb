"""Training without labels: the order of tiles, reading ahead, and runs that can be trusted. Tiny networks on a CPU."""

from __future__ import annotations

import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from helpers.error_codes import has_code
from helpers.pretraining import TINY as TINY_RUN
from helpers.waves import wave_tiles
from selfvitmil import stain
from selfvitmil.data.loader import TileLoader, TileOrder, channel_statistics, count_repeats, requests_of
from selfvitmil.data.sources import ImageTiles, SlideTiles, TrainSlide, tile_ids
from selfvitmil.data.views import ViewRecipe, encoder_tile_px, make_views, view_recipes
from selfvitmil.encoder import build_backbone, build_encoder, load_encoder, save_encoder
from selfvitmil.errors import ArtefactError, ConfigError, EncoderError, EngineError, SlideError
from selfvitmil.pretrain import learner as learning
from selfvitmil.pretrain import train
from selfvitmil.pretrain.objectives import JointBatch
from selfvitmil.pretrain.optim import resolve_hyperparameters
from selfvitmil.pretrain.step import TrainingStep
from selfvitmil.pretrain.train import Origin, pretrain
from selfvitmil.pretrain.vit import class_tokens, draw_kept, embedding_of, has_shortcut
from selfvitmil.runtime.device import Worker
from selfvitmil.runtime.training import read_checkpoint, read_metrics, write_checkpoint
from selfvitmil.settings import PretrainSettings, StudySettings, resolve_settings
from selfvitmil.slides import SlideRef
from selfvitmil.slides.synthetic import make_slide
from selfvitmil.store.provenance import ChangeKind, Provenance
from selfvitmil.tiles import FORMAT_VERSION, TileJob, TileTable, read_tiles, write_tiles
from selfvitmil.tiling import tile_slide

pytestmark = pytest.mark.usefixtures("one_thread")

TINY = TINY_RUN | {"steps": 7}
ORIGIN = Origin(trained_on="train split of made tiles")
TIMES = ("tiles_per_s", "data_wait_share", "mfu", "phase_s")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four folders of twelve tiles each; every folder has a pattern of its own."""
    folder = tmp_path_factory.mktemp("images")
    for k, tile in enumerate(wave_tiles(48, 32)):
        (folder / f"kind{k % 4}").mkdir(exist_ok=True)
        tile.save(folder / f"kind{k % 4}" / f"{k:02}.png")
    return folder


@pytest.fixture(scope="module")
def slides(tmp_path_factory: pytest.TempPathFactory) -> list[TrainSlide]:
    """Three made slides and their tile tables, tiles of 64 px at 0.5 um."""
    folder = tmp_path_factory.mktemp("slides")
    settings = StudySettings.model_validate({"tile": {"size_px": 64}, "stain": {"sample_tiles": 8}})
    found = []
    for seed in range(3):
        path = folder / f"s{seed}.svs"
        make_slide(path, seed=seed, size=(1024, 1024))
        tile_slide(TileJob(SlideRef(f"s{seed}", path), folder / "tiles", settings))
        found.append(TrainSlide(SlideRef(f"s{seed}", path), folder / "tiles" / "0.5mpp_64px_0px" / f"s{seed}.h5"))
    return found


def tiny(**changes: Any) -> PretrainSettings:
    return PretrainSettings(**(TINY | changes))


def timeless(folder: Path) -> list[dict[str, Any]]:
    return [{key: line[key] for key in line if key not in TIMES} for line in read_metrics(folder)]


# ---------------------------------------------------------------------------------------------------- order


def batches_of(order: TileOrder, first: int, last: int) -> list[np.ndarray]:
    return [pool.tiles[places] for pool in order.pools(first, last) for places in pool.batches]


def slide_of(order: TileOrder, tiles: np.ndarray) -> np.ndarray:
    return np.searchsorted(np.cumsum(order.counts), tiles, side="right")


def test_an_epoch_shows_every_tile_once_but_for_the_rest_of_a_batch():
    order = TileOrder((50, 3, 200, 17), batch=16, seed=1, pool=64)
    assert order.steps_per_epoch == 270 // 16
    seen = np.concatenate(batches_of(order, 0, order.steps_per_epoch))
    assert len(seen) == len(set(seen)) == 256
    assert set(seen) <= set(range(270))
    second = np.concatenate(batches_of(order, order.steps_per_epoch, 2 * order.steps_per_epoch))
    assert len(set(second)) == 256
    assert not np.array_equal(seen, second)


def test_cap_limits_slides_and_every_epoch_draws_anew():
    order = TileOrder((50, 3, 200, 17), batch=4, seed=1, tiles_per_slide=20, pool=16)
    epochs = [np.concatenate(batches_of(order, k * 15, k * 15 + 15)) for k in range(40)]
    for seen in epochs:
        assert len(set(seen)) == len(seen) == 60
        assert (np.bincount(slide_of(order, seen), minlength=4) <= [20, 3, 20, 17]).all()
    counts = np.bincount(np.concatenate(epochs), minlength=270)[53:253]
    assert (counts > 0).all(), "resampling reaches all tiles"
    assert counts.std() < 2.5, "and none much more often than others (binomial: 1.9)"
    fixed = TileOrder((50, 3, 200, 17), batch=4, seed=1, tiles_per_slide=20, resample=False, pool=16)
    a, b = (set(fixed.epoch(k)) for k in range(2))
    assert a == b
    assert not np.array_equal(fixed.epoch(0), fixed.epoch(1))


def test_a_step_does_not_depend_on_where_the_run_began():
    order = TileOrder((50, 3, 200, 17), batch=16, seed=5, pool=64)
    whole = batches_of(order, 0, 50)
    for first in (1, 3, 4, 15, 16, 17, 33):
        for got, wanted in zip(batches_of(order, first, 50), whole[first:], strict=True):
            np.testing.assert_array_equal(got, wanted)
    assert not np.array_equal(whole[0], batches_of(TileOrder((50, 3, 200, 17), 16, seed=6, pool=64), 0, 1)[0])


def test_mixed_batches_mix_slides_and_reading_goes_in_runs():
    order = TileOrder((400,) * 20, batch=64, seed=0, pool=1024)
    batches = batches_of(order, 0, order.steps_per_epoch)
    assert min(len(np.unique(slide_of(order, batch))) for batch in batches) >= 12
    steps = np.diff(next(iter(order.pools(0, 16))).tiles)
    assert (steps == 1).mean() > 0.9


def test_one_slide_batches_are_those_of_the_authors():
    order = TileOrder((50, 3, 200), batch=16, seed=0, sampler="one-slide", tiles_per_slide=32, resample=False)
    batches = batches_of(order, 0, 6)
    assert [set(slide_of(order, batch)) for batch in batches] == [{0}, {0}, {1}, {1}, {2}, {2}]
    again = batches_of(order, 6, 12)
    assert all(np.array_equal(a, b) for a, b in zip(batches, again, strict=True))
    assert len(set(np.concatenate(batches[:2]))) == 32  # without replacement where there are enough
    assert set(np.concatenate(batches[2:4])) == {50, 51, 52}


def test_processes_share_a_batch_without_changing_it():
    order = TileOrder((50, 3, 200, 17), batch=16, seed=5, pool=64)
    for pool in order.pools(0, 20):
        parts = [pool.share(rank, 4) for rank in range(4)]
        for number, places in enumerate(pool.batches):
            joint = np.concatenate([part.tiles[part.batches[number]] for part in parts])
            np.testing.assert_array_equal(joint, pool.tiles[places])


def test_tiles_drawn_twice_in_a_step_get_views_of_their_own(slides: list[TrainSlide]):
    """Also when the copies are in different processes; other tiles keep the views that they have anyway."""
    source = SlideTiles(slides, stain_method="none")
    order = TileOrder(source.counts, batch=128, seed=3, sampler="one-slide", tiles_per_slide=256)
    assert max(source.counts) < 128
    with TileLoader(source, order, 1, 3) as loader:
        whole = list(loader)
    for batch in whole:
        ids, view_ids = batch.ids_B.numpy(), batch.view_ids_B.numpy()
        assert len(np.unique(view_ids)) == 128 > len(np.unique(ids))
        first = np.unique(ids, return_index=True)[1]
        np.testing.assert_array_equal(view_ids[first], ids[first])
        (views,) = make_views(batch.tiles_B3HW, batch.view_ids_B, 0, [ViewRecipe(size_px=8)], (0.5,) * 3, (0.2,) * 3)
        assert len(views[0].flatten(1).unique(dim=0)) == 128
    parts = []
    for rank in range(2):
        with TileLoader(source, order, 1, 3, rank=rank, world_size=2) as loader:
            parts.append(list(loader))
    for batch, *shares in zip(whole, *parts, strict=True):
        assert torch.equal(batch.view_ids_B, torch.cat([share.view_ids_B for share in shares]))


def test_repeats_are_counted():
    np.testing.assert_array_equal(count_repeats(np.array([5, 2, 5, 5, 2, 9])), [0, 0, 1, 2, 1, 0])


def test_tile_numbers_tell_all_tiles_apart():
    coords = np.stack(np.meshgrid(np.arange(0, 100_000, 448), np.arange(0, 60_000, 448)), -1).reshape(-1, 2)
    ids = np.concatenate([tile_ids(name, coords) for name in ("a", "b")])
    assert len(np.unique(ids)) == len(ids)
    assert abs(np.unpackbits(ids.view(np.uint8)).mean() - 0.5) < 0.01


# ---------------------------------------------------------------------------------------------------- loader


def test_feed_hands_over_the_tiles_of_the_slides(slides: list[TrainSlide]):
    source = SlideTiles(slides, stain_method="slide")
    order = TileOrder(source.counts, batch=8, seed=3, pool=16)
    tables = [read_tiles(slide.table) for slide in slides]
    firsts = np.concatenate([[0], np.cumsum(source.counts)])
    with TileLoader(source, order, 2, 6) as loader:
        batches = list(loader)
    assert [batch.step for batch in batches] == [2, 3, 4, 5]
    for batch, tiles in zip(batches, batches_of(order, 2, 6), strict=True):
        assert batch.transforms_B33 is not None
        for number, tile in enumerate(tiles):
            group = int(np.searchsorted(firsts, tile, side="right") - 1)
            x, y = tables[group].coords_l0[tile - firsts[group]]
            with slides[group].slide.open() as slide:
                wanted = slide.read_tile(int(x), int(y), 64, 0.5)
            np.testing.assert_array_equal(batch.tiles_B3HW[number].permute(1, 2, 0).numpy(), wanted)
            assert batch.ids_B[number] == tile_ids(f"s{group}", np.array([[x, y]]))[0]
            fit = tables[group].stain
            assert fit is not None
            np.testing.assert_array_equal(batch.transforms_B33[number], fit.od_transform())


@pytest.mark.slow
def test_worker_processes_change_nothing(slides: list[TrainSlide]):
    source = SlideTiles(slides, stain_method="none")
    order = TileOrder(source.counts, batch=8, seed=3, pool=16)
    with TileLoader(source, order, 0, 4) as loader:
        alone = list(loader)
    with TileLoader(source, order, 0, 4, workers=2) as loader:
        helped = list(loader)
    for a, b in zip(alone, helped, strict=True):
        assert torch.equal(a.tiles_B3HW, b.tiles_B3HW)
        assert torch.equal(a.ids_B, b.ids_B)
        assert a.transforms_B33 is None


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_tiles_that_are_kept_are_read_once(slides: list[TrainSlide], workers: int, monkeypatch: pytest.MonkeyPatch):
    source = SlideTiles(slides, stain_method="none")
    order = TileOrder(source.counts, batch=8, seed=3, pool=16)
    steps, asked = 3 * order.steps_per_epoch, list[int]()
    request = SlideTiles.request
    monkeypatch.setattr(
        SlideTiles, "request", lambda self, group, rows: asked.append(len(rows)) or request(self, group, rows)
    )
    with TileLoader(source, order, 1, steps) as loader:
        again = list(loader)
    assert sum(asked) == (steps - 1) * 8
    asked.clear()
    size = 3 * 64 * 64 * sum(source.counts)
    with TileLoader(source, order, 1, steps, workers=workers, most_kept_bytes=size) as loader:
        once = list(loader)
    assert sum(asked) <= sum(source.counts)
    assert len(once) == len(again) == steps - 1
    assert all(torch.equal(a.tiles_B3HW, b.tiles_B3HW) for a, b in zip(once, again, strict=True))
    asked.clear()
    with TileLoader(source, order, 1, steps, most_kept_bytes=size - 1) as loader:  # too little for all of them
        list(loader)
    assert sum(asked) == (steps - 1) * 8


class Crash:
    """A reader that takes its process along."""

    def read(self, group: int, what: Any) -> Any:
        os._exit(1)


@pytest.mark.slow
def test_a_reading_process_that_dies_is_an_error(slides: list[TrainSlide], monkeypatch: pytest.MonkeyPatch):
    source = SlideTiles(slides, stain_method="none")
    monkeypatch.setattr(source, "reader", Crash())
    with (
        pytest.raises(EngineError, match="a process that reads tiles died"),
        TileLoader(source, TileOrder(source.counts, batch=8), 0, 4, workers=1) as loader,
    ):
        list(loader)


def test_stains_tile_by_tile(slides: list[TrainSlide]):
    rows = np.arange(4)
    plain, normalized = (SlideTiles(slides, stain_method=method) for method in ("none", "tile"))
    request = next(requests_of(plain, rows))
    before = plain.reader.read(*request).tiles_B3HW.permute(0, 2, 3, 1).numpy()
    after = normalized.reader.read(*request)
    np.testing.assert_array_equal(
        after.tiles_B3HW.permute(0, 2, 3, 1).numpy(), np.stack([stain.normalize_tile(tile) for tile in before])
    )
    assert normalized.stain_transforms(rows) is None


def test_colours_are_those_of_all_pixels(slides: list[TrainSlide]):
    source = SlideTiles(slides, stain_method="slide")
    mean, std = channel_statistics(source, num_tiles=10_000, seed=0, workers=0)
    pixels = []
    for slide in slides:
        table = read_tiles(slide.table)
        assert table.stain is not None
        with slide.slide.open() as opened:
            tiles = np.stack([opened.read_tile(int(x), int(y), 64, 0.5) for x, y in table.coords_l0])
        pixels.append(stain.apply(tiles, table.stain).reshape(-1, 3))
    values = np.concatenate(pixels) / 255
    np.testing.assert_allclose(mean, values.mean(axis=0), atol=1e-9)
    np.testing.assert_allclose(std, values.std(axis=0), atol=1e-9)


def test_a_slide_that_vanished_is_named(slides: list[TrainSlide], tmp_path: Path):
    gone = TrainSlide(SlideRef("s1", tmp_path / "s1.svs"), slides[1].table)
    source = SlideTiles([slides[0], gone], stain_method="none")
    with (
        pytest.raises(SlideError, match=r"s1\.svs: the file is gone, slide s1 was there when it was tiled"),
        TileLoader(source, TileOrder(source.counts, batch=8), 0, 4) as loader,
    ):
        list(loader)


def test_images_of_a_folder(images: Path, tmp_path: Path):
    source = ImageTiles(images)
    assert (source.counts, source.shape_px) == ((12,) * 4, (32, 32))
    with TileLoader(source, TileOrder(source.counts, batch=48, run=1), 0, 1) as loader:
        (batch,) = loader
    wanted = {Image.open(path).tobytes() for path in images.rglob("*.png")}
    assert {tile.permute(1, 2, 0).numpy().tobytes() for tile in batch.tiles_B3HW} == wanted
    with pytest.raises(ConfigError, match="holds no tiles"):
        ImageTiles(tmp_path)
    Image.new("RGB", (32, 32)).save(tmp_path / "a.png")
    Image.new("RGB", (32, 30)).save(tmp_path / "b.png")
    (tmp_path / "c.png").write_bytes(b"nothing")
    reader = ImageTiles(tmp_path).reader
    with pytest.raises(SlideError, match=r"b\.png: has 32 x 30 px, others 32 x 32"):
        reader.read(0, [tmp_path / "b.png"])
    with pytest.raises(SlideError, match=r"c\.png: cannot be read as an image"):
        reader.read(0, [tmp_path / "c.png"])


# ---------------------------------------------------------------------------------------------------- runs


def test_the_student_learns(images: Path, tmp_path: Path):
    lines: list[dict[str, Any]] = []
    settings = tiny(steps=50, lr=5e-2, warmup_teacher_temp=0.04, batch=16)
    pretrain(ImageTiles(images), tmp_path / "run", settings, ORIGIN, device="cpu", report=lines.append)
    # While the centre forms, entropy rises and the loss with it; what was learnt shows in the rest of the loss.
    early, late = (np.mean([line["kl"] for line in part]) for part in (lines[:3], lines[-10:]))
    assert late < 0.4 * early


def test_training_writes_an_encoder(slides: list[TrainSlide], tmp_path: Path):
    settings = tiny(steps=4)
    lines: list[dict[str, Any]] = []
    source = SlideTiles(slides, stain_method="slide")
    result = pretrain(source, tmp_path / "tiny", settings, ORIGIN, device="cpu", report=lines.append)
    assert result.finished
    assert result.note == "built"
    encoder = load_encoder(tmp_path / "tiny")
    assert (encoder.config.mpp, encoder.config.size_px, encoder.config.stain) == (0.5, 64, "slide")
    assert encoder.config.trained_on == ORIGIN.trained_on
    np.testing.assert_allclose(encoder.config.mean, channel_statistics(source, 2048, 0, 0)[0])
    assert encoder.config.provenance["total_steps"] == 4
    again = pretrain(source, tmp_path / "tiny", settings, ORIGIN, device="cpu")
    assert (again.note, again.step) == ("up to date", 4)
    assert again.metrics == lines[-1]


def test_smaller_views_make_an_encoder_for_coarser_tiles(slides: list[TrainSlide], tmp_path: Path):
    source = SlideTiles(slides, stain_method="slide")
    result = pretrain(source, tmp_path / "run", tiny(steps=1, global_px=32), ORIGIN, device="cpu")
    config = load_encoder(result.folder).config
    assert (config.size_px, config.mpp) == (32, 1.0)  # 64 px at 0.5 um before
    assert any("tiles of 32 px at 1 microns" in warning for warning in result.warnings)


@pytest.mark.slow
def test_simclr_learns(slides: list[TrainSlide], tmp_path: Path):
    changes = dict.fromkeys(("architecture", "width", "depth", "heads", "patch_px"))
    settings = tiny(method="simclr", steps=12, lr=6e-4, jitter=0.0, grey=0.0, **changes)
    source = SlideTiles(slides, stain_method="slide")
    result = pretrain(source, tmp_path / "simclr", settings, ORIGIN, device="cpu")
    losses = [line["loss"] for line in read_metrics(result.folder)]
    assert np.mean(losses[-4:]) < np.mean(losses[:3])
    assert load_encoder(result.folder).config.layout == "pooled"


class Interrupted(Exception):
    pass


def resume_after_death(images: Path, folder: Path, settings: PretrainSettings, at: int, device: str) -> None:
    """A run that dies at a step and is started again must leave what an undisturbed one leaves, to the bit."""
    pretrain(ImageTiles(images), folder / "whole", settings, ORIGIN, device=device)

    def die(line: dict[str, Any]) -> None:
        if line["step"] == at:
            raise Interrupted  # after the line of metrics, before the checkpoint

    with pytest.raises(Interrupted):
        pretrain(ImageTiles(images), folder / "cut", settings, ORIGIN, device=device, report=die)
    assert len(timeless(folder / "cut")) == at + 1
    torch.manual_seed(at)  # whatever the new process does before
    result = pretrain(ImageTiles(images), folder / "cut", settings, ORIGIN, device=device)
    assert result.note == ("built" if at == 0 else f"resumed from step {at}")
    assert timeless(folder / "cut") == timeless(folder / "whole")
    for name in ("model.safetensors", "config.json"):
        assert (folder / "cut" / name).read_bytes() == (folder / "whole" / name).read_bytes()
    states = [torch.load(folder / name / "state.pt", weights_only=True) for name in ("cut", "whole")]
    for key, value in states[0]["learner"].items():
        assert torch.equal(value, states[1]["learner"][key])


@pytest.mark.parametrize("at", [0, 3, 5])
def test_a_killed_run_goes_on_as_if_nothing_had_happened(images: Path, tmp_path: Path, at: int):
    settings = tiny(drop_path=0.3, checkpoint_minutes=1e-9)  # a checkpoint after every step
    resume_after_death(images, tmp_path, settings, at, "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("compile", ["off", "on"])
def test_a_killed_deterministic_run_on_a_gpu_goes_on_as_if_nothing_had_happened(
    images: Path, tmp_path: Path, compile: str
):
    settings = tiny(drop_path=0.3, checkpoint_minutes=1e-9, deterministic=True, compile=compile)
    resume_after_death(images, tmp_path, settings, 3, "cuda")


def test_sigterm_checkpoints_and_ends_cleanly(images: Path, tmp_path: Path):
    def warn(line: dict[str, Any]) -> None:
        if line["step"] == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    stopped = pretrain(ImageTiles(images), tmp_path / "run", tiny(), ORIGIN, device="cpu", report=warn)
    assert not stopped.finished
    assert 3 <= stopped.step <= 5
    assert stopped.note == f"stopped by a signal at step {stopped.step} of 7"
    assert signal.getsignal(signal.SIGTERM) is before
    assert not (tmp_path / "run" / "config.json").exists()
    pretrain(ImageTiles(images), tmp_path / "run", tiny(), ORIGIN, device="cpu")
    pretrain(ImageTiles(images), tmp_path / "whole", tiny(), ORIGIN, device="cpu")
    whole, run = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "run"))
    assert run == whole


JOINT: dict[str, dict[str, Any]] = {
    "dino": {},
    "koleo": {"koleo": 0.3},
    "sinkhorn and koleo": {"centering": "sinkhorn", "koleo": 0.3},
    "simclr": {"method": "simclr", "lr": 1.5e-4},  # what the others have: it is not scaled to the batch
    "kde": {"kde": 0.05},
    "lejepa": {"method": "lejepa"},
    "simdino": {"method": "simdino"},
}
"""Losses that compare the tiles of a batch with each other, and one that does not."""


def outcome_of(folder: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    return [line["loss"] for line in read_metrics(folder)], load_encoder(folder).backbone.state_dict()


def assert_same_outcome(ours: Path, theirs: Path) -> None:
    """The documented tolerance: in float32 losses differ by 1e-5 of themselves, weights by 1e-5."""
    (losses, weights), (their_losses, their_weights) = outcome_of(ours), outcome_of(theirs)
    np.testing.assert_allclose(losses, their_losses, rtol=1e-5)
    for name, value in weights.items():
        torch.testing.assert_close(value, their_weights[name], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", JOINT)
def test_parts_of_a_batch_give_what_the_batch_gives(images: Path, tmp_path: Path, name: str):
    for parts, threads in ((1, 1), (4, 1), (2, 2)):
        torch.set_num_threads(threads)
        settings = tiny(drop_path=0.0, accumulate=parts, **JOINT[name])
        pretrain(ImageTiles(images), tmp_path / f"in{parts}", settings, ORIGIN, device="cpu")
    for parts in (2, 4):
        assert_same_outcome(tmp_path / f"in{parts}", tmp_path / "in1")


def test_parts_drop_the_same_paths_when_they_are_looked_at_ahead(images: Path, tmp_path: Path):
    """A part's embeddings of both passes are the same, so its own rows are what the joint loss knows of them."""
    rows: list[torch.Tensor] = []
    ahead, join = JointBatch.look_ahead, JointBatch.join

    def noted(self: Any, embeddings: Any) -> None:
        rows.extend(embeddings)
        ahead(self, embeddings)

    def compared(self: Any, own: torch.Tensor, part: int = 0) -> torch.Tensor:
        assert torch.equal(own, rows[part])
        return join(self, own, part)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JointBatch, "look_ahead", noted)
        patch.setattr(JointBatch, "join", compared)
        settings = tiny(drop_path=0.5, accumulate=2, koleo=0.1, steps=1)
        pretrain(ImageTiles(images), tmp_path / "run", settings, ORIGIN, device="cpu")
    assert len(rows) == 2


def test_a_part_that_fails_in_a_thread_is_the_error(images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """And not that of the part that waited for it."""
    join = JointBatch.join

    def fail(self: Any, own: torch.Tensor, part: int = 0) -> torch.Tensor:
        if part == 1:
            raise Interrupted
        return join(self, own, part)

    monkeypatch.setattr(JointBatch, "join", fail)
    torch.set_num_threads(2)
    settings = tiny(drop_path=0.0, accumulate=2, koleo=0.1)
    with pytest.raises(Interrupted):
        pretrain(ImageTiles(images), tmp_path / "run", settings, ORIGIN, device="cpu")


@pytest.mark.slow
def test_parts_side_by_side_give_what_they_give_one_by_one(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    beside, steps = TrainingStep._side_by_side, []
    monkeypatch.setattr(
        TrainingStep, "_side_by_side", lambda self, *given: steps.append(self.step) or beside(self, *given)
    )
    settings = tiny(drop_path=0.0, accumulate=2, checkpoint_minutes=1e-9)
    pretrain(ImageTiles(images), tmp_path / "alone", settings, ORIGIN, device="cpu")
    assert not steps  # there is one thread
    torch.set_num_threads(2)
    resume_after_death(images, tmp_path, settings, 3, "cpu")
    assert steps == [*range(7), *range(4), *range(3, 7)]
    assert torch.get_num_threads() == 2
    losses = [[line["loss"] for line in read_metrics(tmp_path / name)] for name in ("alone", "whole")]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-6)
    assert {"views", "teacher", "student", "backward", "update"} <= set(read_metrics(tmp_path / "whole")[-1]["phase_s"])


PROCESS = """
    import json, os, sys
    from pathlib import Path
    import torch
    import torch.distributed as dist
    torch.set_num_threads(1)
    from selfvitmil.pretrain import step, train
    from selfvitmil.data.sources import ImageTiles
    from selfvitmil.settings import PretrainSettings

    def no_compiler(backbone, images):
        raise RuntimeError("no compiler in this process")

    def compile_in_vain(self, steps_left):
        self.compiled = True
        if self.worker.rank == 1:
            self.learner.student.embed = no_compiler

    dist.init_process_group("gloo")
    for name, values in json.loads(sys.argv[3]).items():
        if name == "no compiler in one process":
            step.TrainingStep.compile = compile_in_vain
        settings, out = PretrainSettings.model_validate(values), Path(sys.argv[2]) / name
        result = train.pretrain(ImageTiles(Path(sys.argv[1])), out, settings, train.Origin("made"), device="cpu")
        assert result.finished and (out / "model.safetensors").exists()
        if name == "no compiler in one process":
            assert any("compiling failed" in warning for warning in result.warnings)
    dist.destroy_process_group()
"""


def compare_with_two_processes(images: Path, folder: Path, settings: dict[str, PretrainSettings]) -> None:
    """Each of these runs in two processes, and with the whole batch in one part of this process: the same outcome."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", textwrap.dedent(PROCESS), str(images), str(folder / "two")]
    command.append(json.dumps({name: each.model_dump(mode="json") for name, each in settings.items()}))
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(command, env=os.environ | world | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(2)
    ]
    assert [process.wait(timeout=300) for process in processes] == [0, 0]
    for name, each in settings.items():
        alone = each.model_copy(update={"accumulate": 1})
        pretrain(ImageTiles(images), folder / "one" / name, alone, Origin("made"), device="cpu")
        assert len(read_metrics(folder / "two" / name)) == each.steps
        assert_same_outcome(folder / "two" / name, folder / "one" / name)


@pytest.mark.slow
def test_two_processes_do_what_one_does_with_the_joint_batch(images: Path, tmp_path: Path):
    runs = {
        f"{name}, {parts} parts": change | {"accumulate": parts} for name, change in JOINT.items() for parts in (1, 2)
    }
    runs["no compiler in one process"] = {"koleo": 0.3}
    settings = {name: tiny(drop_path=0.0, steps=5, **change) for name, change in runs.items()}
    compare_with_two_processes(images, tmp_path, settings)


@pytest.mark.slow
def test_two_processes_do_what_one_does_with_other_networks(images: Path, tmp_path: Path):
    """Batch norms of a ResNet normalize by the tiles of both processes; for their gradients see test_batch_norm."""
    stem: dict[str, Any] = {"architecture": "vit_tiny_patch16_convstem_224"}
    resnet: dict[str, Any] = {"architecture": "resnet18"} | dict.fromkeys(("width", "depth", "heads", "patch_px"))
    runs = {
        "sinkhorn alone": {"centering": "sinkhorn"},
        "stem, dino": stem,
        "stem, simclr": stem | JOINT["simclr"],
        "resnet, dino": resnet,
        "resnet, lejepa": resnet | JOINT["lejepa"],
        "resnet, simclr": resnet | JOINT["simclr"],
    }
    settings = {name: tiny(drop_path=0.0, steps=2, **change) for name, change in runs.items()}
    compare_with_two_processes(images, tmp_path, settings)


# ---------------------------------------------------------------------------------------------------- what goes wrong


def spoil(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    original = learning.compute_loss

    def spoiled(learner: Any, student: Any, views: Any, *rest: Any) -> Any:
        return change(original(learner, student, views, *rest), views)

    monkeypatch.setattr(learning, "compute_loss", spoiled)


def test_a_loss_that_is_no_number_names_the_step_and_keeps_the_checkpoint(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    done = []

    def at_step_3(outcome: Any, views: Any) -> Any:
        del views
        done.append(None)
        outcome.loss = outcome.loss * (float("nan") if len(done) == 4 else 1.0)
        return outcome

    spoil(monkeypatch, at_step_3)
    with pytest.raises(EncoderError, match=r"loss at step 3 is not a number .*state\.pt of step 3 is kept"):
        pretrain(ImageTiles(images), tmp_path / "run", tiny(checkpoint_minutes=1e-9), ORIGIN, device="cpu")
    state = torch.load(tmp_path / "run" / "state.pt", weights_only=True)
    assert state["step"] == 3
    assert all(value.isfinite().all() for value in state["learner"].values())


@pytest.mark.parametrize("clip", [3.0, 0.0])
def test_weights_that_are_not_finite_stop_the_run_and_are_not_saved(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clip: float
):
    """A gradient that is no number while the loss is one: at step 3, whose checkpoint is due at once."""
    done = []

    def at_step_3(outcome: Any, views: Any) -> Any:
        del views
        done.append(None)
        if len(done) == 4:
            outcome.loss.register_hook(lambda gradient: gradient * float("nan"))
        return outcome

    spoil(monkeypatch, at_step_3)
    settings = tiny(checkpoint_minutes=1e-9, log_steps=100, clip_grad=clip)
    with pytest.raises(EncoderError, match=r"weights are not finite after step 3.*state\.pt of step 3 is kept"):
        pretrain(ImageTiles(images), tmp_path / "run", settings, ORIGIN, device="cpu")
    state = torch.load(tmp_path / "run" / "state.pt", weights_only=True)
    assert state["step"] == 3
    assert all(value.isfinite().all() for value in state["learner"].values())


def compile_until(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """A "compiled" student that fails from a step on."""
    original = embedding_of

    def compiled(self: Any, steps_left: int) -> None:
        del steps_left
        self.compiled = True
        embed = original(self.learner.student.backbone)

        def fail(*given: Any) -> Any:
            if self.step >= step:
                raise RuntimeError("no compiler")
            return embed(*given)

        self.learner.student.embed = fail

    monkeypatch.setattr(TrainingStep, "compile", compiled)


def test_a_compiler_that_fails_at_once_is_done_without(images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pretrain(ImageTiles(images), tmp_path / "plain", tiny(), ORIGIN, device="cpu")
    compile_until(monkeypatch, 0)
    result = pretrain(ImageTiles(images), tmp_path / "run", tiny(), ORIGIN, device="cpu")
    assert any("compiling failed (RuntimeError)" in warning for warning in result.warnings)
    plain, run = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("plain", "run"))
    assert run == plain
    with pytest.raises(EngineError, match="compiling the networks failed in 1 of 1 processes"):
        pretrain(ImageTiles(images), tmp_path / "on", tiny(compile="on"), ORIGIN, device="cpu")


def test_an_error_after_the_first_step_is_no_fault_of_the_compiler(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    compile_until(monkeypatch, 3)
    with pytest.raises(RuntimeError, match="no compiler"):
        pretrain(ImageTiles(images), tmp_path / "run", tiny(log_steps=100), ORIGIN, device="cpu")


def test_out_of_memory_says_what_would_fit(images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def at_most_two(outcome: Any, views: Any) -> Any:
        if views[0].shape[1] > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return outcome

    spoil(monkeypatch, at_most_two)
    with pytest.raises(
        ConfigError, match=r"does not hold 8 tiles .*2 tiles at a time fit: use --pretrain.accumulate 4"
    ):
        pretrain(ImageTiles(images), tmp_path / "run", tiny(), ORIGIN, device="cpu")


def test_too_few_tiles_and_few_slides(images: Path, slides: list[TrainSlide], tmp_path: Path):
    with pytest.raises(ConfigError, match="there are 48 tiles to train on, and a batch takes 64"):
        pretrain(ImageTiles(images), tmp_path / "run", tiny(batch=64), ORIGIN, device="cpu")
    with pytest.raises(ConfigError, match="there is no slide to train on"):
        SlideTiles([], stain_method="none")
    one = SlideTiles(slides[:1], stain_method="none")
    result = pretrain(one, tmp_path / "one", tiny(steps=1), ORIGIN, device="cpu")
    assert any("one slide, s0" in warning for warning in result.warnings)


def stop_at_once(line: dict[str, Any]) -> None:
    del line
    os.kill(os.getpid(), signal.SIGTERM)


def test_another_run_in_the_same_folder_is_refused_and_names_the_change(images: Path, tmp_path: Path):
    pretrain(ImageTiles(images), tmp_path / "run", tiny(), ORIGIN, device="cpu", report=stop_at_once)
    changed = r"pretrain\.lr \S+ -> 0\.001"
    with pytest.raises(ConfigError, match=changed, check=has_code("checkpoint-of-other-run")):
        pretrain(ImageTiles(images), tmp_path / "run", tiny(lr=1e-3), ORIGIN, device="cpu")
    pretrain(ImageTiles(images), tmp_path / "run", tiny(), ORIGIN, device="cpu")
    with pytest.raises(ConfigError, match=changed, check=has_code("encoder-of-other-run")):
        pretrain(ImageTiles(images), tmp_path / "run", tiny(lr=1e-3), ORIGIN, device="cpu")


def test_checkpoint_names_changed_settings_inputs_and_version(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    pretrain(ImageTiles(images), tmp_path / "run", tiny(), ORIGIN, device="cpu", report=stop_at_once)
    state = read_checkpoint(tmp_path / "run")
    assert state is not None

    def changes(settings: PretrainSettings, origin: Origin = ORIGIN) -> list[tuple[ChangeKind, str]]:
        found = train.run_freshness(ImageTiles(images), settings, origin, state).changes
        return [(change.kind, change.name) for change in found]

    assert changes(tiny()) == []
    assert changes(tiny(workers=2, log_steps=3)) == []
    found = changes(tiny(lr=1e-3, seed=7), Origin(ORIGIN.trained_on, "paper"))
    # Random starting weights come from the seed.
    names = [
        ("setting", "pretrain.lr"),
        ("setting", "pretrain.seed"),
        ("input", "preset"),
        ("input", "starting weights"),
    ]
    assert [(kind.value, name) for kind, name in found] == names
    source = ImageTiles(images)
    source._digest = "other images"
    (other,) = train.run_freshness(source, tiny(), ORIGIN, state).changes
    assert (other.kind, other.name) == (ChangeKind.INPUT, "images")
    monkeypatch.setattr(train, "STAGE_VERSION", train.STAGE_VERSION + 1)
    assert changes(tiny()) == [(ChangeKind.VERSION, "pretrain")]


def test_checkpoint_with_a_hash_only_is_resumed_or_refused(images: Path, tmp_path: Path):
    """The form of version 0.1."""
    pretrain(ImageTiles(images), tmp_path / "whole", tiny(), ORIGIN, device="cpu")
    pretrain(ImageTiles(images), tmp_path / "run", tiny(), ORIGIN, device="cpu", report=stop_at_once)
    state = read_checkpoint(tmp_path / "run")
    assert state is not None
    write_checkpoint(tmp_path / "run", {key: value for key, value in state.items() if key != "provenance"})
    with pytest.raises(ConfigError, match="recorded as a hash only", check=has_code("checkpoint-of-other-run")):
        pretrain(ImageTiles(images), tmp_path / "run", tiny(lr=1e-3), ORIGIN, device="cpu")
    result = pretrain(ImageTiles(images), tmp_path / "run", tiny(), ORIGIN, device="cpu")
    assert result.note.startswith("resumed from step")
    whole, resumed = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "run"))
    assert resumed == whole


class Trap:
    def __reduce__(self):
        return os.mkdir, (os.environ["TRAP"],)


def test_a_state_with_code_in_it_is_refused_unrun(images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRAP", str(tmp_path / "sprung"))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "state.pt").write_bytes(pickle.dumps({"step": Trap()}, protocol=2))
    with pytest.raises(ArtefactError, match=r"state\.pt of run cannot be read"):
        pretrain(ImageTiles(images), tmp_path / "run", tiny(), ORIGIN, device="cpu")
    assert not (tmp_path / "sprung").exists()


def test_starting_from_an_earlier_run(images: Path, tmp_path: Path):
    pretrain(ImageTiles(images), tmp_path / "first", tiny(), ORIGIN, device="cpu")
    start = {"init": str(tmp_path / "first"), "lr": 1e-12, "warmup_lr": 0.0, "min_lr": 0.0, "momentum": 1.0}
    bare = dict.fromkeys(("architecture", "width", "depth", "heads", "patch_px"))
    pretrain(ImageTiles(images), tmp_path / "second", tiny(**start, **bare), ORIGIN, device="cpu")
    first, second = (load_encoder(tmp_path / name) for name in ("first", "second"))
    for name, value in first.backbone.state_dict().items():
        assert torch.equal(value, second.backbone.state_dict()[name])
    assert second.config.mean == first.config.mean
    with pytest.raises(EncoderError, match="its network is vit_tiny_patch16_224, not vit_small_patch16_224"):
        pretrain(
            ImageTiles(images),
            tmp_path / "third",
            tiny(**start, **bare | {"architecture": "vit_small_patch16_224"}),
            ORIGIN,
            device="cpu",
        )


def test_shapes_are_compared_with_the_network_that_is_started_from(tmp_path: Path):
    """Also where it was built by its name alone, so that its config tells none of them."""
    for name, args in {"plain": {}, "small": {"embed_dim": 32, "depth": 4, "num_heads": 2, "patch_size": 8}}.items():
        save_encoder(tmp_path / name, build_encoder("vit_tiny_patch16_224", img_size=32, model_args=args))
    shapes = {
        "plain": {"width": 192, "depth": 12, "heads": 3, "patch_px": 16},
        "small": {"width": 32, "depth": 4, "heads": 2, "patch_px": 8},
    }
    for name, shape in shapes.items():
        start = {"init": str(tmp_path / name)}
        learning.start_encoder(PretrainSettings(**start, **shape), 32, 0)
        for key, value in shape.items():
            with pytest.raises(EncoderError, match=f"{name}: has another {key} than pretrain.{key}"):
                learning.start_encoder(PretrainSettings(**start, **shape | {key: 2 * value}), 32, 0)


def test_a_slide_of_other_content_is_another_training(tmp_path: Path):
    """The same places on a slide that was scanned again."""
    table = TileTable("s", np.array([[0, 0]]), np.ones(1, np.float32), 32, 0.5, 0, slide_mpp=0.25, size_l0=(64, 64))
    found = []
    for number, slide in enumerate(("first scan", "first scan", "second scan")):
        write_tiles(tmp_path / f"{number}.h5", table, Provenance("tile", FORMAT_VERSION, {}, {"slide": slide}))
        source = TrainSlide(SlideRef("s", tmp_path / "s.svs"), tmp_path / f"{number}.h5")
        found.append(SlideTiles([source], stain_method="none").inputs())
    assert found[0] == found[1] != found[2]
    assert [name for name in found[0] if found[0][name] != found[2][name]] == ["tiles of s"]
    with pytest.raises(SlideError, match=r"s: tiled with 0\.25 microns per pixel, but now 0\.5"):
        SlideTiles([TrainSlide(SlideRef("s", tmp_path / "s.svs", 0.5), tmp_path / "0.h5")], stain_method="none")


def test_collapse_raises_an_alarm(images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(train, "ALARM_FROM_STEP", 0)
    # A teacher so warm that it has no opinion: its entropy is log K from the first step on.
    settings = tiny(steps=14, teacher_temp=1000.0, warmup_teacher_temp=1000.0)
    result = pretrain(ImageTiles(images), tmp_path / "run", settings, ORIGIN, device="cpu")
    assert any("collapse to uniform outputs" in warning for warning in result.warnings)
    assert "alarm" in result.metrics


# ---------------------------------------------------------------------------------------------------- presets


@pytest.mark.parametrize("preset", ["paper", "authors-code"])
def test_presets_hold_the_published_training(preset: str):
    settings = resolve_settings(flags={"preset": preset}).pretrain
    # Camelyon16's 270 training slides with 1,024 tiles each: 1,080 steps an epoch, 108,000 in all.
    order = TileOrder((4576,) * 270, settings.batch, 0, settings.sampler, settings.tiles_per_slide, settings.resample)
    numbers = resolve_hyperparameters(settings, sum(order.counts), order.steps_per_epoch)
    assert (numbers.steps_per_epoch, numbers.total_steps, numbers.warmup_steps) == (1080, 108_000, 10_800)
    assert (numbers.freeze_steps, numbers.lr, numbers.momentum, numbers.out_dim) == (1080, 5e-4, 0.9995, 65536)
    schedules = numbers.schedules(settings)
    assert schedules.at(0)["lr"] == (1e-6 if preset == "paper" else 0.0)
    halfway = schedules.at(5 * 1080)["teacher_temp"]
    assert halfway == pytest.approx(0.01 if preset == "paper" else 0.01 + 0.03 * 5 / 9)
    assert schedules.at(10_800)["teacher_temp"] == 0.04
    recipes = view_recipes(settings, 224, 16)
    assert [recipe.size_px for recipe in recipes] == [224] * 2 + [96] * 8
    assert [recipe.blur for recipe in recipes] == [1.0, 0.1] + [0.5] * 8
    assert [recipe.solarize for recipe in recipes] == [0.0, 0.2] + [0.0] * 8
    assert not any(recipe.vflip or recipe.right_angles or recipe.stain for recipe in recipes)
    assert settings.mean == (0.6223, 0.4763, 0.6009)


def test_the_simclr_preset_holds_the_published_training():
    settings = resolve_settings(flags={"preset": "dsmil-simclr"})
    own = settings.pretrain
    assert (settings.stain.method, settings.tile.size_px, own.batch, own.epochs) == ("none", 224, 512, 100)
    numbers = resolve_hyperparameters(own, 5_120_000, 10_000)
    assert (numbers.optimizer, numbers.lr, numbers.clip_grad) == ("adam", 1e-5, 0.0)
    assert (numbers.weight_decay, numbers.weight_decay_end) == (1e-5, 1e-5)
    assert (numbers.total_steps, numbers.warmup_steps) == (1_000_000, 100_000)
    rates = [numbers.schedules(own).at(step)["lr"] for step in (0, 50_000, 100_000, 999_999)]
    # Held for 10 epochs. Its cosine over 100 epochs has run for 90 at the end.
    assert rates == pytest.approx([1e-5, 1e-5, 1e-5, 1e-5 * (1 + np.cos(0.9 * np.pi)) / 2], rel=0.02)
    views = view_recipes(own, 224, None)
    wanted = ViewRecipe(
        size_px=224, scale=(0.08, 1.0), ratio=(3 / 4, 4 / 3), interpolation="bilinear", hflip=0.5, vflip=0.0,
        right_angles=False, stain=0.0, jitter=0.8, brightness=0.8, contrast=0.8, saturation=0.8, hue=0.2, grey=0.2,
        blur=0.5, blur_sigma=(0.1, 2.0), solarize=0.0,
    )  # fmt: skip
    assert views == (wanted, wanted)
    assert (own.temperature, own.mean, own.std) == (0.5, (0.0,) * 3, (1.0,) * 3)
    learner = learning.Learner(learning.start_encoder(own, 224, 0), own, numbers, 0)
    norms = [each for each in learner.student.modules() if "Norm" in type(each).__name__]
    assert norms
    assert all(isinstance(each, torch.nn.InstanceNorm2d) and each.weight is None for each in norms)
    assert [tuple(weight.shape) for weight in learner.student.head.parameters()] == [
        (512, 512),
        (512,),
        (256, 512),
        (256,),
    ]


def test_simclr_without_a_preset_has_its_own_optimizer():
    numbers = {
        method: resolve_hyperparameters(PretrainSettings(method=method, batch=512), 10_000, 10)
        for method in ("dino", "simclr")
    }
    names = ("optimizer", "lr", "weight_decay", "weight_decay_end", "clip_grad")
    assert [getattr(numbers["dino"], name) for name in names] == ["adamw", 1e-3, 0.04, 0.4, 3.0]
    assert [getattr(numbers["simclr"], name) for name in names] == ["adam", 1e-5, 1e-5, 1e-5, 0.0]
    given = PretrainSettings(method="simclr", optimizer="adamw", lr=1e-3, scale_lr=True, weight_decay=0.1, batch=512)
    assert [getattr(resolve_hyperparameters(given, 10_000, 10), name) for name in names] == [
        "adamw",
        2e-3,
        0.1,
        1e-5,
        0.0,
    ]


def test_adam_decays_weights_through_the_gradient(images: Path, tmp_path: Path):
    """Two steps of the run's own optimizer equal Adam written out, with the decay in the gradient."""
    run = train.PretrainRun(
        ImageTiles(images), tmp_path / "run", tiny(method="simclr", weight_decay=0.1, weight_decay_end=0.1, lr=1e-2),
        ORIGIN, Worker(torch.device("cpu")), threading.Event(),
    )  # fmt: skip
    run.prepare()
    weight: Any = run.learner.student.head[0].weight  # pyright: ignore[reportIndexIssue]
    value, mean, square = weight.detach().double().clone(), 0.0, 0.0
    for step in (1, 2):
        weight.grad = torch.full_like(weight, 0.01 * step)
        run.do_step.update({"lr": 1e-2, "weight_decay": 0.1, "momentum": 1.0}, [])
        gradient = 0.01 * step + 0.1 * value
        mean, square = 0.9 * mean + 0.1 * gradient, 0.999 * square + 0.001 * gradient**2
        value = value - 1e-2 * (mean / (1 - 0.9**step)) / ((square / (1 - 0.999**step)).sqrt() + 1e-8)
    torch.testing.assert_close(weight.detach().double(), value, rtol=1e-4, atol=1e-6)


def test_a_published_preset_is_for_its_own_method():
    for preset, method in (("paper", "simclr"), ("authors-code", "simclr"), ("dsmil-simclr", "dino")):
        with pytest.raises(ConfigError, match=f"preset '{preset}' has the published settings of"):
            resolve_settings(flags={"preset": preset, "pretrain": {"method": method}})
    assert resolve_settings(flags={"preset": "quick", "pretrain": {"method": "simclr"}}).pretrain.lr == 0.0005


def test_views_are_those_of_dino_and_alike_for_simclr():
    first, second, *local = view_recipes(PretrainSettings(method="dino"), 224, 16)
    assert (first.blur, first.solarize, second.blur, second.solarize) == (1.0, 0.0, 0.1, 0.2)
    assert (first.size_px, first.scale) == (second.size_px, second.scale) == (224, (0.4, 1.0))
    assert {(v.size_px, v.scale, v.blur, v.solarize) for v in local} == {(96, (0.05, 0.4), 0.5, 0.0)}
    assert len(local) == 8
    for view in (first, second, *local):
        assert (view.jitter, view.brightness, view.contrast, view.saturation, view.hue) == (0.8, 0.4, 0.4, 0.2, 0.1)
        assert (view.grey, view.hflip, view.blur_sigma) == (0.2, 0.5, (0.1, 2.0))
    one, other = view_recipes(PretrainSettings(method="simclr", blur=(1.0, 0.1, 0.3)), 224, None)
    assert one == other
    assert (one.blur, one.solarize) == (0.3, 0.0)
    assert (one.scale, one.brightness, one.contrast, one.saturation, one.hue) == ((0.08, 1.0), 0.8, 0.8, 0.8, 0.2)
    chosen = view_recipes(PretrainSettings(method="simclr", hue=0.0, global_scale=(0.5, 1.0)), 224, None)[0]
    assert (chosen.scale, chosen.hue, chosen.contrast) == ((0.5, 1.0), 0.0, 0.8)


def test_the_quick_preset_leaves_tiles_at_their_scale():
    """So that its encoder is for the tiles of the study, and not for smaller ones."""
    settings = resolve_settings(flags={"preset": "quick"}).pretrain
    recipes = view_recipes(settings, 224, 16)
    assert [recipe.size_px for recipe in recipes] == [112] * 2 + [48] * 4
    assert encoder_tile_px(recipes[0], 224) == 224
    for recipe in recipes:
        shown_px = 224 * sum(edge**0.5 for edge in recipe.scale) / 2
        assert shown_px == pytest.approx(recipe.size_px, rel=0.1)


def whole_network(vit: Any, images: list[torch.Tensor]) -> torch.Tensor:
    """timm's own forward pass, size after size, which leaves out the paths that `draw_kept` draws."""
    counts = [len(each) for each in images]
    kept_KR1 = draw_kept(vit, counts, images[0].device)
    assert kept_KR1 is not None
    paths = [path for block in vit.blocks for path in (block.drop_path1, block.drop_path2)]
    found = []
    for each, kept_KB1 in zip(images, kept_KR1.split(counts, dim=1), strict=True):
        hooks = [
            path.register_forward_hook(lambda module, inputs, output, factor=factor_B1[:, None]: inputs[0] * factor)
            for path, factor_B1 in zip(paths, kept_KB1, strict=True)
        ]
        found.append(vit(each))
        for hook in hooks:
            hook.remove()
    return torch.cat(found)


def test_paths_are_left_out_as_often_as_they_should_be():
    vit: Any = build_backbone(
        "vit_tiny_patch16_224", {"embed_dim": 16, "depth": 3, "num_heads": 1, "drop_path_rate": 0.5}
    )
    torch.manual_seed(1)
    kept_KR1 = draw_kept(vit, [3000, 1000], torch.device("cpu"))
    assert kept_KR1 is not None
    for rate, factors_B in zip([0.0, 0.0, 0.25, 0.25, 0.5, 0.5], kept_KR1[..., 0], strict=True):
        assert set(factors_B.unique().tolist()) == ({1.0} if rate == 0 else {0.0, float(torch.tensor(1 / (1 - rate)))})
        assert float((factors_B == 0).float().mean()) == pytest.approx(rate, abs=0.03)
    torch.manual_seed(1)
    alone_KR1 = draw_kept(vit, [3000], torch.device("cpu"))
    assert alone_KR1 is not None
    assert torch.equal(alone_KR1, kept_KR1[:, :3000])
    assert draw_kept(vit.eval(), [2], torch.device("cpu")) is None


@pytest.mark.parametrize(
    "args",
    [
        {},
        {"stem": "conv"},
        {"reg_tokens": 2},
        {"reg_tokens": 2, "no_embed_class": True, "init_values": 0.1, "qk_norm": True, "qkv_bias": False},
    ],
)
def test_the_short_way_to_the_class_token_is_the_long_one(args: dict[str, Any]):
    shape = {"embed_dim": 32, "depth": 3, "num_heads": 2, "img_size": 48, "dynamic_img_size": True}
    torch.manual_seed(0)
    name = "vit_tiny_patch16_convstem_224" if args == {"stem": "conv"} else "vit_tiny_patch16_224"
    args = {key: value for key, value in args.items() if key != "stem"}
    vit: Any = build_backbone(name, shape | {"drop_path_rate": 0.5} | args).double()
    assert has_shortcut(vit)
    for token in (vit.cls_token, vit.reg_token):
        if token is not None:
            torch.nn.init.normal_(token)  # next to nothing at first, which the norms make very sensitive to rounding
    # Other sizes resample positions, which timm does in float32.
    sizes = [[(48, 48)], [(32, 32)], [(32, 64)], [(48, 48), (32, 32)]]
    for shown, tolerance in zip(sizes, (1e-9, 1e-7, 1e-7, 1e-7), strict=True):
        images = [torch.randn(6 - number, 3, *size, dtype=torch.float64) for number, size in enumerate(shown)]
        found = []
        for function in (class_tokens, whole_network):
            vit.zero_grad()
            torch.manual_seed(0)  # the same paths are dropped
            out = function(vit, images)
            out.square().sum().backward()
            found.append((out.detach(), [weight.grad.clone() for weight in vit.parameters()]))
        torch.testing.assert_close(found[0], found[1], rtol=tolerance, atol=tolerance)


def test_other_networks_take_the_long_way():
    small = {"embed_dim": 32, "depth": 2, "num_heads": 2}
    assert not has_shortcut(build_backbone("vit_tiny_patch16_224", small | {"global_pool": "avg"}))
    assert not has_shortcut(build_backbone("resnet18_instancenorm"))


@pytest.mark.parametrize(
    "values",
    [
        {"batch": 10, "accumulate": 4},
        {"sampler": "one-slide", "tiles_per_slide": 1000},
        {"sampler": "one-slide"},
        {"mean": (0.5, 0.5, 0.5)},
        {"mean": (0.5, 0.5, 0.5), "std": (0.2, 0.0, 0.2)},
        {"local_scale": (0.4, 0.05)},
        {"momentum": 1.5},
    ],
)
def test_settings_that_cannot_be_meant_are_refused(values: dict[str, Any]):
    with pytest.raises(ConfigError, match=r"pretrain\."):
        resolve_settings(flags={"pretrain": values})


def test_views_must_divide_into_patches():
    with pytest.raises(ConfigError, match=r"pretrain\.local_px 90 is no multiple of 16.*Use 96"):
        view_recipes(PretrainSettings(local_px=90), 224, 16)


def test_cost_of_a_tile_is_the_published_one():
    settings = PretrainSettings(method="dino", architecture="vit_base_patch16_224")
    encoder = learning.start_encoder(settings, 224, 0)
    gflop = learning.gflop_per_tile(encoder, settings, view_recipes(settings, 224, 16), 65536)
    assert gflop == pytest.approx(434, rel=0.01)


def test_metrics_are_json_lines(images: Path, tmp_path: Path):
    pretrain(ImageTiles(images), tmp_path / "run", tiny(steps=2), ORIGIN, device="cpu")
    text = (tmp_path / "run" / "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    wanted = {"step", "loss", "lr", "weight_decay", "momentum", "teacher_temp", "teacher_entropy", "kl", *TIMES}
    assert wanted | {"feature_rank", "feature_std"} <= set(lines[0])


def test_metrics_are_on_the_disk_before_the_checkpoint(images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Else a power failure takes lines that no resumed run writes again."""
    log, synced, sync, write = tmp_path / "run" / "metrics.jsonl", [""], os.fsync, train.write_checkpoint

    def noting(descriptor: int) -> None:
        sync(descriptor)
        if log.exists() and os.path.samestat(os.fstat(descriptor), log.stat()):
            synced.append(log.read_text())

    def checked(folder: Path, state: Any) -> None:
        assert synced[-1] == log.read_text()
        assert len(synced[-1].splitlines()) == state["step"]
        write(folder, state)

    monkeypatch.setattr(os, "fsync", noting)
    monkeypatch.setattr(train, "write_checkpoint", checked)
    pretrain(ImageTiles(images), tmp_path / "run", tiny(steps=3), ORIGIN, device="cpu")
    assert len(synced[-1].splitlines()) == 3


def test_damaged_metrics_are_repaired_or_told(images: Path, tmp_path: Path):
    run = tmp_path / "run"
    path = run / "metrics.jsonl"
    pretrain(ImageTiles(images), run, tiny(), ORIGIN, device="cpu", report=stop_at_once)
    sound = path.read_text()
    path.write_text("\0" * 30 + "\n" + sound)
    resumed = pretrain(ImageTiles(images), run, tiny(), ORIGIN, device="cpu")
    assert [warning for warning in resumed.warnings if "1 line of metrics.jsonl cannot be read" in warning]
    assert path.read_text().startswith(sound)
    weights = (run / "model.safetensors").read_bytes()
    path.write_text(path.read_text() + '{"step"')
    again = pretrain(ImageTiles(images), run, tiny(), ORIGIN, device="cpu")
    assert again.note == "up to date"
    assert [warning for warning in again.warnings if "1 line of metrics.jsonl cannot be read" in warning]
    assert (run / "model.safetensors").read_bytes() == weights


@pytest.mark.parametrize(
    ("tile_px", "view_px", "scale", "made_for"),
    [
        (224, 224, (0.4, 1.0), 224),
        (224, 112, (0.4, 1.0), 112),  # the whole tile at half its resolution
        (64, 48, (0.5, 0.65), 64),  # three quarters of its edge, not zoomed
        (64, 48, (0.9, 1.0), 48),
        (64, 24, (0.12, 0.17), 64),
    ],
)
def test_views_at_the_tiles_own_scale_leave_the_encoder_its_resolution(
    tile_px: int, view_px: int, scale: tuple[float, float], made_for: int
):
    assert encoder_tile_px(ViewRecipe(size_px=view_px, scale=scale), tile_px) == made_for
