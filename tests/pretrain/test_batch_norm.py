"""Batch norms of backbones: statistics for inference against slow loops, and runs of ResNets with every objective."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torchvision
from PIL import Image
from torch import nn

from helpers.error_codes import has_code
from selfvitmil.data.loader import fit_tiles, read_plain_sample
from selfvitmil.data.sources import ImageTiles, TensorTiles
from selfvitmil.encoder import Encoder, load_encoder
from selfvitmil.errors import ConfigError
from selfvitmil.pretrain import learner as learning
from selfvitmil.pretrain import train
from selfvitmil.pretrain.learner import JointBatchNorm2d, batch_norms_of, recompute_statistics, statistics_of
from selfvitmil.pretrain.optim import resolve_hyperparameters
from selfvitmil.pretrain.train import Origin, pretrain
from selfvitmil.runtime.training import read_metrics
from selfvitmil.settings import PretrainSettings

pytestmark = pytest.mark.usefixtures("one_thread")

METHODS = get_args(PretrainSettings.model_fields["method"].annotation)
TINY: dict[str, Any] = {
    "batch": 8,
    "steps": 2,
    "num_local": 1,
    "local_px": 16,
    "out_dim": 32,
    "head_width": 32,
    "bottleneck": 8,
    "directions": 16,
    "workers": 0,
    "log_steps": 1,
    "lr": 1e-3,
}
NETWORKS: dict[str, dict[str, Any]] = {
    "resnet18": {"architecture": "resnet18"},
    "convolutional stem": {
        "architecture": "vit_tiny_patch16_convstem_224", "width": 32, "depth": 2, "heads": 2, "patch_px": 8
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 tiles of 32 px, in two folders with colours of their own."""
    folder = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    for k in range(24):
        (folder / f"kind{k % 2}").mkdir(exist_ok=True)
        pixels = rng.normal((170, 120 + 60 * (k % 2), 190), 30, (32, 32, 3))
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / f"kind{k % 2}" / f"{k:02}.png")
    return folder


def pixels_of(folder: Path) -> torch.Tensor:
    files = sorted(folder.rglob("*.png"))
    return torch.from_numpy(np.stack([np.asarray(Image.open(file)) for file in files])).permute(0, 3, 1, 2)


def small_network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5), nn.Conv2d(4, 5, 3), nn.BatchNorm2d(5)]
    return nn.Sequential(*layers)


# ---------------------------------------------------------------------------------------------------- statistics


def slow_moments(batches: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Mean and unbiased variance of each channel over all numbers of all batches, one number at a time."""
    means, variances = [], []
    for channel in range(batches[0].shape[1]):
        numbers = [float(each) for batch in batches for each in batch[:, channel].ravel()]
        mean = sum(numbers) / len(numbers)
        means.append(mean)
        variances.append(sum((each - mean) ** 2 for each in numbers) / (len(numbers) - 1))
    return np.array(means), np.array(variances)


@pytest.mark.parametrize("sizes", [(7,), (2, 5)])
def test_statistics_equal_a_slow_loop_over_all_images(sizes: tuple[int, ...]):
    network = small_network()
    batches = [3 + torch.randn(size, 3, 6, 6) for size in sizes]
    recompute_statistics(network, batches)
    first, second = batch_norms_of(network)
    inputs, behind = [], []
    for batch in batches:
        x = network[0](batch).detach().double().numpy()
        inputs.append(x)
        mean, var = x.mean((0, 2, 3), keepdims=True), x.var((0, 2, 3), keepdims=True)
        normalized = torch.from_numpy(((x - mean) / np.sqrt(var + first.eps)).clip(0)).float()
        behind.append(network[4](normalized).detach().double().numpy())
    for norm, seen in ((first, inputs), (second, behind)):
        mean, variance = slow_moments(seen)
        np.testing.assert_allclose(norm.running_mean, mean, rtol=1e-5, atol=1e-6)  # pyright: ignore[reportArgumentType]
        np.testing.assert_allclose(norm.running_var, variance, rtol=1e-5)  # pyright: ignore[reportArgumentType]
        assert int(norm.num_batches_tracked) == 0  # pyright: ignore[reportArgumentType]
    assert all(part.training for part in network.modules())


def test_with_one_batch_inference_gives_what_the_batch_gave():
    network, batch = small_network().eval(), torch.randn(64, 3, 8, 8)
    before = network(batch)
    recompute_statistics(network, [batch])
    by_batch = small_network()
    by_batch[3].p = 0.0  # pyright: ignore[reportAttributeAccessIssue]
    torch.testing.assert_close(
        network(batch), by_batch(batch), atol=2e-3, rtol=1e-3
    )  # the variance is the unbiased one
    assert not torch.allclose(network(batch), before, atol=0.1)


def test_statistics_of_training_come_back_even_after_an_error():
    network = small_network()
    network(torch.randn(4, 3, 6, 6))
    before = {key: value.clone() for key, value in network.state_dict().items()}

    def fail() -> None:
        with statistics_of(network, [torch.randn(4, 3, 6, 6) + 2]):
            assert not torch.equal(network.state_dict()["1.running_mean"], before["1.running_mean"])
            raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        fail()
    assert all(torch.equal(value, before[key]) for key, value in network.state_dict().items())


def test_networks_without_batch_norms_ask_for_no_tile():
    def never():
        raise AssertionError("no batch is needed")
        yield

    recompute_statistics(nn.Sequential(nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4)), never())


def test_passes_are_of_nearly_equal_size():
    assert [len(part) for part in learning.passes_of(torch.zeros(130, 3, 224, 224, dtype=torch.uint8))] == [
        44,
        43,
        43,
    ]
    assert len(learning.passes_of(torch.zeros(130, 3, 32, 32))) == 1
    assert [len(part) for part in learning.passes_of(torch.zeros(17, 3, 600, 600))] == [9, 8]


def test_sample_is_the_same_every_time_and_mixes_the_slides(images: Path):
    source = ImageTiles(images)
    sample, again = (read_plain_sample(source, 10, 32, seed, 0) for seed in (5, 5))
    assert torch.equal(sample, again)
    assert sample.shape == (10, 3, 32, 32)
    assert not torch.equal(sample, read_plain_sample(source, 10, 32, 6, 0))
    everything = read_plain_sample(source, 1000, 32, 0, 0)
    rows = {bytes(tile.contiguous().numpy()) for tile in everything}
    assert rows == {bytes(tile.contiguous().numpy()) for tile in pixels_of(images)}


def test_tiles_of_another_size_are_resampled_as_pillow_does():
    smooth = torch.nn.functional.interpolate(torch.rand(2, 3, 8, 10) * 255, (64, 80), mode="bicubic")
    tiles = smooth.clamp(0, 255).to(torch.uint8)
    assert torch.equal(fit_tiles(tiles, 64), tiles[:, :, :, 8:72])
    for tile, fitted in zip(tiles, fit_tiles(tiles, 28), strict=True):
        picture = Image.fromarray(tile[:, :, 8:72].permute(1, 2, 0).contiguous().numpy())
        expected = np.asarray(picture.resize((28, 28), Image.Resampling.BICUBIC)).astype(int)
        assert np.abs(fitted.permute(1, 2, 0).numpy().astype(int) - expected).max() <= 2


# ---------------------------------------------------------------------------------------------------- runs


def settings_of(network: str, method: str, **changes: Any) -> PretrainSettings:
    return PretrainSettings(**TINY | NETWORKS[network] | {"method": method} | changes)


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("method", METHODS)
def test_every_objective_trains_every_network(
    images: Path, tmp_path: Path, network: str, method: str, monkeypatch: pytest.MonkeyPatch
):
    """And the folder holds the encoder that was in memory, with the statistics of the plain tiles."""
    tiles, kept = pixels_of(images), []

    def noted(folder: Path, encoder: Encoder) -> None:
        with torch.no_grad():
            was = encoder.training
            kept.append(encoder.eval().encode(tiles))
            encoder.train(was)
        save(folder, encoder)

    save = train.save_encoder
    monkeypatch.setattr(train, "save_encoder", noted)
    pretrain(ImageTiles(images), tmp_path / "run", settings_of(network, method), Origin("x"), device="cpu")
    assert all(np.isfinite(line["loss"]) for line in read_metrics(tmp_path / "run"))
    loaded = load_encoder(tmp_path / "run")
    with torch.no_grad():
        assert torch.equal(loaded.encode(tiles), kept[-1])
    start = learning.start_encoder(settings_of(network, method), 32, 0).backbone.state_dict()
    moved = [key for key, value in loaded.backbone.named_parameters() if not torch.equal(value, start[key])]
    assert len(moved) > 0.9 * len(list(loaded.backbone.parameters()))
    if network == "resnet18":
        check_statistics(loaded, tiles)


def check_statistics(encoder: Encoder, tiles: torch.Tensor) -> None:
    """All tiles in one batch through torchvision's network, which stores nothing but the statistics of that batch."""
    reference = torchvision.models.resnet18()
    reference.fc = nn.Identity()  # pyright: ignore[reportAttributeAccessIssue]
    reference.load_state_dict(encoder.backbone.state_dict())
    for norm in batch_norms_of(reference):
        norm.momentum = 1.0
    reference.train()
    mean, std = (torch.tensor(each).reshape(3, 1, 1) for each in (encoder.config.mean, encoder.config.std))
    normalized = (tiles / 255 - mean) / std
    with torch.no_grad():
        reference(normalized)
        first = reference.conv1(normalized).double().numpy()
    own = encoder.backbone.state_dict()
    for name, value in reference.state_dict().items():
        if "running" in name:
            torch.testing.assert_close(own[name], value, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(own["bn1.running_mean"], first.mean((0, 2, 3)), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(own["bn1.running_var"], first.var((0, 2, 3), ddof=1), rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("method", [pytest.param("dino", marks=pytest.mark.slow), "simclr"])
def test_a_resumed_run_and_one_with_probes_give_the_same_weights(images: Path, tmp_path: Path, method: str):
    class Killed(Exception):
        pass

    def die(line: dict[str, Any]) -> None:
        if line["step"] == 1:
            raise Killed

    rows = [f"{file},{file.parent.name}" for file in sorted(images.rglob("*.png"))]
    (tmp_path / "probe.csv").write_text("tile,label\n" + "\n".join(rows) + "\n")
    settings = settings_of("resnet18", method, checkpoint_minutes=1e-9)
    probed = settings_of("resnet18", method, checkpoint_minutes=1e-9, probe_table=tmp_path / "probe.csv")
    pretrain(ImageTiles(images), tmp_path / "whole", settings, Origin("x"), device="cpu")
    with pytest.raises(Killed):
        pretrain(ImageTiles(images), tmp_path / "cut", probed, Origin("x"), device="cpu", report=die)
    pretrain(ImageTiles(images), tmp_path / "cut", probed, Origin("x"), device="cpu")
    assert "knn20" in read_metrics(tmp_path / "cut")[-1]
    whole, cut = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "cut"))
    assert whole == cut
    states = [torch.load(tmp_path / name / "state.pt", weights_only=True)["learner"] for name in ("whole", "cut")]
    assert all(torch.equal(value, states[1][key]) for key, value in states[0].items())


def test_quality_is_measured_with_the_statistics_of_plain_tiles(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    seen: list[int] = []

    def look(self: Any, encoder: Encoder, step: int) -> dict[str, Any]:
        check_statistics(encoder, pixels_of(images))
        seen.append(step)
        return {}

    monkeypatch.setattr(train.QualityMonitor, "is_due", lambda self, step: step == 1)
    monkeypatch.setattr(train.QualityMonitor, "evaluate", look)
    pretrain(ImageTiles(images), tmp_path / "run", settings_of("resnet18", "dino"), Origin("x"), device="cpu")
    assert seen == [1]


@pytest.mark.slow
def test_resnet50_trains_too(images: Path, tmp_path: Path):
    settings = settings_of("resnet18", "lejepa", architecture="resnet50", steps=1)
    pretrain(ImageTiles(images), tmp_path / "run", settings, Origin("x"), device="cpu")
    assert load_encoder(tmp_path / "run").dim == 2048


def test_statistics_are_those_of_the_size_that_the_encoder_is_made_for(tmp_path: Path):
    tiles = torch.randint(0, 256, (12, 3, 48, 48), dtype=torch.uint8)
    settings = settings_of("resnet18", "simclr", global_px=32, global_scale=(0.9, 1.0), steps=1, batch=4)
    pretrain(TensorTiles(tiles), tmp_path / "run", settings, Origin("x"), device="cpu")
    encoder = load_encoder(tmp_path / "run")
    assert encoder.config.size_px == 32
    check_statistics(encoder, fit_tiles(tiles, 32))


def test_the_teacher_normalizes_by_its_own_batch():
    settings = settings_of("resnet18", "dino")
    encoder = learning.start_encoder(settings, 32, 0)
    learner = learning.Learner(encoder, settings, resolve_hyperparameters(settings, 24, 3), 0)
    views = [torch.randn(2, 4, 3, 32, 32)]
    before = learner.teach(views)[1]
    for norm in batch_norms_of(encoder.backbone):
        norm.running_mean.fill_(7.0)  # pyright: ignore[reportOptionalMemberAccess]
    assert torch.equal(learner.teach(views)[1], before)


def test_shapes_of_a_vit_are_refused_for_a_resnet():
    with pytest.raises(ConfigError, check=has_code("network-shape")):
        learning.start_encoder(settings_of("resnet18", "dino", width=64), 32, 0)


# ---------------------------------------------------------------------------------------------------- processes


HALF = """
    import sys, torch, torch.distributed as dist
    from selfvitmil.pretrain import learner as learning
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    network, batch = torch.load(sys.argv[1], weights_only=False)
    learning.join_processes(network)
    own = batch.chunk(2)[dist.get_rank()]
    (network(own) ** 3).mean().backward()
    for weight in network.parameters():
        dist.all_reduce(weight.grad)
        weight.grad /= 2
    with learning.alone(network):
        if dist.get_rank() == 0:
            network(own)  # the other process does not come
            torch.save([[weight.grad for weight in network.parameters()], list(network.buffers())], sys.argv[2])
    dist.barrier()
    dist.destroy_process_group()
"""


@pytest.mark.slow
def test_gradients_of_two_processes_are_those_of_the_whole_batch(tmp_path: Path):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Tanh(), nn.Conv2d(4, 5, 3), nn.BatchNorm2d(5))
    batch = torch.randn(6, 3, 8, 8) + torch.arange(6)[:, None, None, None]  # the halves differ
    torch.save((network, batch), tmp_path / "given.pt")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    command = [sys.executable, "-c", textwrap.dedent(HALF), str(tmp_path / "given.pt"), str(tmp_path / "found.pt")]
    processes = [subprocess.Popen(command, env=os.environ | world | {"RANK": str(rank)}) for rank in range(2)]
    assert [process.wait(timeout=200) for process in processes] == [0, 0]
    gradients, buffers = torch.load(tmp_path / "found.pt", weights_only=True)
    (network(batch) ** 3).mean().backward()
    torch.testing.assert_close(gradients, [weight.grad for weight in network.parameters()], rtol=1e-4, atol=1e-6)
    network(batch[:3])
    torch.testing.assert_close(buffers, list(network.buffers()), rtol=1e-5, atol=1e-6)


def test_joint_batch_norm_of_one_process_is_that_of_torch(tmp_path: Path):
    """Outputs, gradients and stored statistics."""
    batch = (torch.randn(6, 3, 5, 4) * 3 + 2).requires_grad_()
    found = []
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meet'}", rank=0, world_size=1)
    try:
        for joint in (False, True):
            torch.manual_seed(0)
            norm = nn.BatchNorm2d(3)
            nn.init.normal_(norm.weight)
            if joint:
                learning.join_processes(norm)
                assert type(norm) is JointBatchNorm2d
            batch.grad = None
            out = norm(batch)
            (out**3).sum().backward()
            found.append([out.detach(), batch.grad, norm.weight.grad, norm.bias.grad, *norm.buffers()])
            with torch.no_grad():
                found[-1].append(norm.eval()(batch))
    finally:
        dist.destroy_process_group()
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)
