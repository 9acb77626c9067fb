"""Pretraining that starts from trained weights: learning rates by layer, foundation models of all kinds, LoRA."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import timm
import torch
from torch import nn

from helpers.pretraining import SHORT as SHORT_RUN
from helpers.waves import wave_tiles
from selfvitmil.data.sources import ImageTiles
from selfvitmil.encoder import Encoder, build_backbone, build_encoder, load_encoder, save_encoder
from selfvitmil.errors import ConfigError
from selfvitmil.pretrain import learner as learning
from selfvitmil.pretrain import optim, train
from selfvitmil.pretrain.optim import layer_scales, layered_groups, update_teacher
from selfvitmil.pretrain.train import Origin, pretrain
from selfvitmil.runtime.device import Worker
from selfvitmil.runtime.training import parameter_groups, read_metrics
from selfvitmil.settings import METHOD_DEFAULTS, PretrainSettings, resolve_settings

pytestmark = pytest.mark.usefixtures("one_thread")

SHORT = SHORT_RUN | {"batch": 4, "steps": 4, "num_local": 1}
ORIGIN = Origin(trained_on="train split of synthetic tiles")
SMALL_VIT = {"embed_dim": 32, "depth": 4, "num_heads": 2}
MEAN, STD = (0.7, 0.58, 0.7), (0.21, 0.23, 0.18)


@pytest.fixture(scope="module")
def tiles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """48 images of 56 px (a multiple of 8 and 14) with waves of four directions."""
    folder = tmp_path_factory.mktemp("tiles")
    for k, tile in enumerate(wave_tiles(48, 56, frequency=0.2)):
        tile.save(folder / f"{k:02}.png")
    return folder


def published(folder: Path, architecture: str, args: dict[str, Any], mean: Any = MEAN, std: Any = STD) -> Path:
    """Write a random network as its owners would hand it out: timm's config.json and the weights."""
    torch.manual_seed(0)
    network = timm.create_model(architecture, num_classes=0, **args)
    for token in (getattr(network, name, None) for name in ("cls_token", "reg_token")):
        if token is not None:
            nn.init.normal_(token, std=0.5)
    folder.mkdir(parents=True)
    safetensors.torch.save_file(network.state_dict(), folder / "model.safetensors")
    described = {"input_size": [3, 56, 56], "mean": mean, "std": std, "tag": "own"}
    content = {"architecture": architecture, "num_classes": 0, "model_args": args, "pretrained_cfg": described}
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def short(**changes: Any) -> PretrainSettings:
    return PretrainSettings(**(SHORT | changes))


def run_of(tiles: Path, out: Path, **settings: Any) -> train.PretrainRun:
    run = train.PretrainRun(
        ImageTiles(tiles), out, short(**settings), ORIGIN,
        Worker(torch.device("cpu")), threading.Event(),
    )  # fmt: skip
    run.prepare()
    return run


# ---------------------------------------------------------------------------------------------------- rates by layer


def test_the_rate_of_a_block_is_that_of_the_last_times_the_decay_for_every_block_between():
    vit = build_backbone("vit_tiny_patch16_224", SMALL_VIT | {"reg_tokens": 2})
    scales = layer_scales(vit, 0.5)
    assert scales.keys() == {name for name, _ in vit.named_parameters()}
    for name, scale in scales.items():
        if name.startswith(("cls_token", "reg_token", "pos_embed", "patch_embed.")):
            assert scale == 0.5**4, name
        elif name.startswith("blocks."):
            assert scale == 0.5 ** (4 - (int(name.split(".")[1]) + 1)), name
        else:
            assert name.startswith("norm."), name
            assert scale == 1.0


def test_stages_of_a_resnet_are_its_layers():
    scales = layer_scales(build_backbone("resnet18"), 0.5)
    first = {"conv1": 1 / 16, "bn1": 1 / 16, "layer1": 1 / 8, "layer2": 1 / 4, "layer3": 1 / 2, "layer4": 1.0}
    assert {name.split(".")[0]: scale for name, scale in scales.items()} == first


def test_a_patch_embedding_of_several_layers_is_the_first_layer():
    scales = layer_scales(build_backbone("vit_tiny_patch16_convstem_224", SMALL_VIT), 0.5)
    assert len([name for name in scales if name.startswith("patch_embed.")]) > 2
    assert {scale for name, scale in scales.items() if name.startswith("patch_embed.")} == {0.5**4}


def test_a_network_without_numbered_blocks_has_one_rate():
    assert set(layer_scales(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)), 0.5).values()) == {1.0}


def test_without_decay_the_groups_are_the_two_of_a_run_from_scratch():
    """The very parameters in the same order, so that not a bit of such runs depends on layer-wise decay."""
    branch = learning.Branch(build_backbone("vit_tiny_patch16_224", SMALL_VIT), nn.Linear(32, 4))
    groups, rates = layered_groups(branch.backbone, branch.head, 1.0)
    assert rates == [(1.0, True), (1.0, False)]
    for ours, plain in zip(groups, parameter_groups(branch), strict=True):
        assert [id(each) for each in ours["params"]] == [id(each) for each in plain["params"]]
    assert PretrainSettings().chosen("layer_decay") == 1.0


def test_groups_hold_every_trainable_parameter_once_and_decay_only_matrices():
    network, head = build_backbone("vit_tiny_patch16_224", SMALL_VIT), nn.Linear(32, 4)
    groups, rates = layered_groups(network, head, 0.7)
    held = [id(each) for group in groups for each in group["params"]]
    assert sorted(held) == sorted(id(each) for module in (network, head) for each in module.parameters())
    assert len(rates) == 2 * 5  # four blocks and what comes before them
    names = {id(each): name for module in (network, head) for name, each in module.named_parameters()}
    for group, rate in zip(groups, rates, strict=True):
        for each in group["params"]:
            assert rate.decayed == (each.ndim > 1 and not names[id(each)].endswith("bias"))


def test_a_step_moves_each_layer_by_its_own_rate(tiles: Path, tmp_path: Path):
    """Adam's first step is the learning rate times the sign of the gradient, if nothing is decayed."""
    init = published(tmp_path / "weights", "vit_tiny_patch16_224", SMALL_VIT | {"img_size": 48})
    run = run_of(tiles, tmp_path / "run", init=str(init), global_px=48, local_px=16, layer_decay=0.5, optimizer="adam")
    student = run.learner.student
    before = {name: each.detach().clone() for name, each in student.named_parameters()}
    for each in student.parameters():
        each.grad = torch.ones_like(each) if each.requires_grad else None
    run.do_step.update({"lr": 1e-2, "weight_decay": 0.0, "momentum": 1.0}, [])
    moved = {name: (before[name] - each.detach()).abs().max() for name, each in student.named_parameters()}
    expected = {
        "backbone.pos_embed": 1e-2 / 16,
        "backbone.patch_embed.proj.weight": 1e-2 / 16,
        "backbone.blocks.0.mlp.fc1.weight": 1e-2 / 8,
        "backbone.blocks.3.mlp.fc1.weight": 1e-2,
        "backbone.norm.weight": 1e-2,
        "head.mlp.0.weight": 1e-2,
    }
    for name, value in expected.items():
        assert moved[name] == pytest.approx(value, rel=1e-3), name
    assert {group["weight_decay"] for group in run.do_step.optimizer.param_groups} == {0.0}
    run.do_step.update({"lr": 1e-2, "weight_decay": 0.3, "momentum": 1.0}, [])
    for group, rate in zip(run.do_step.optimizer.param_groups, run.do_step.rates, strict=True):
        assert group["weight_decay"] == (0.3 if rate.decayed else 0.0)


# ---------------------------------------------------------------------------------------------------- defaults


@pytest.mark.parametrize("method", METHOD_DEFAULTS)
def test_starting_weights_lower_the_default_rates_and_a_given_one_wins(method: str):
    scratch, start = short(method=method), short(method=method, init="weights")
    assert scratch.chosen("lr") == METHOD_DEFAULTS[method]["lr"]
    assert start.chosen("lr") == min(1e-4, METHOD_DEFAULTS[method]["lr"])
    assert start.chosen("layer_decay") == 0.7
    adapted = start.model_copy(update={"lora": 8})
    assert adapted.chosen("lr") == pytest.approx(10 * start.chosen("lr"))
    assert adapted.chosen("layer_decay") == 1.0
    given = start.model_copy(update={"lr": 3e-4, "layer_decay": 0.9})
    assert (given.chosen("lr"), given.chosen("layer_decay")) == (3e-4, 0.9)


def test_a_run_from_weights_warms_up(tiles: Path, tmp_path: Path):
    init = published(tmp_path / "weights", "vit_tiny_patch16_224", SMALL_VIT | {"img_size": 48})
    run = run_of(tiles, tmp_path / "run", init=str(init), steps=100, batch=16, global_px=48, local_px=16)
    rates = [run.schedules.at(step)["lr"] for step in range(100)]
    highest = 1e-4 * 16 / 256
    assert max(rates) == pytest.approx(highest)
    assert rates.index(max(rates)) == run.hyperparameters.warmup_steps - 1 == 9
    assert rates[0] < highest / 2


@pytest.mark.parametrize("preset", ["quick", "paper", "authors-code"])
def test_what_a_preset_says_of_a_start_from_scratch_does_not_hold_for_weights(preset: str, tmp_path: Path):
    found = resolve_settings(flags={"preset": preset, "pretrain": {"init": "weights"}}).pretrain
    assert (found.architecture, found.lr, found.mean) == (None, None, None)
    assert found.num_local == resolve_settings(flags={"preset": preset}).pretrain.num_local
    given = resolve_settings(flags={"preset": preset, "pretrain": {"init": "weights", "lr": 2e-4}}).pretrain
    assert given.lr == 2e-4
    (tmp_path / "study.toml").write_text(f'preset = "{preset}"\n[pretrain]\ninit = "weights"\n')
    assert resolve_settings(tmp_path / "study.toml").pretrain.lr is None


# ---------------------------------------------------------------------------------------------------- kinds of weights

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "DINO, patches of 8": ("vit_small_patch8_224", SMALL_VIT | {"img_size": 56}),
    "DINOv2": ("vit_small_patch14_dinov2", SMALL_VIT | {"img_size": 84}),
    "DINOv2, registers": ("vit_small_patch14_reg4_dinov2", SMALL_VIT | {"img_size": 84}),
    "DINOv2, giant": ("vit_giant_patch14_reg4_dinov2", SMALL_VIT | {"img_size": 56}),
    "DINOv3": ("vit_small_patch16_dinov3", SMALL_VIT | {"img_size": 64, "patch_size": 8}),
    "UNI": ("vit_large_patch16_224", SMALL_VIT | {"img_size": 56, "patch_size": 8, "init_values": 1.0}),
    "H-optimus, of one size": (
        "vit_giant_patch14_reg4_dinov2",
        SMALL_VIT | {"img_size": 56, "dynamic_img_size": False},
    ),
    "Virchow, not pooled": ("vit_huge_patch14_224", SMALL_VIT | {"img_size": 56, "global_pool": "", "reg_tokens": 4}),
    "convolutional stem": ("vit_tiny_patch16_convstem_224", SMALL_VIT | {"img_size": 56, "patch_size": 8}),
    "ResNet": ("resnet18", {}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_weights_is_a_start(tiles: Path, tmp_path: Path, kind: str):
    architecture, args = KINDS[kind]
    init = published(tmp_path / "weights", architecture, args)
    start = load_encoder(init)
    layout = "pooled" if kind == "ResNet" else "cls+patchmean"
    start = Encoder(start.backbone, start.config.model_copy(update={"layout": layout}))
    save_encoder(tmp_path / "ours", start)
    settings = short(steps=2, init=str(tmp_path / "ours"), lr=1e-2, momentum=0.5)
    result = pretrain(ImageTiles(tiles), tmp_path / "run", settings, ORIGIN, device="cpu")
    made = load_encoder(result.folder)
    assert np.isfinite([line["loss"] for line in read_metrics(result.folder)]).all()
    assert (made.config.architecture, made.config.layout) == (architecture, layout)
    assert (made.config.mean, made.config.std, made.config.size_px) == (MEAN, STD, 56)
    assert made.config.provenance["layer_decay"] == 0.7
    before, after = start.backbone.state_dict(), made.backbone.state_dict()
    assert {name: value.shape for name, value in before.items()} == {k: v.shape for k, v in after.items()}
    assert not torch.equal(next(iter(before.values())), next(iter(after.values())))
    images = torch.randint(0, 256, (2, 3, 56, 56), dtype=torch.uint8)
    assert made.encode(images).shape == (2, made.dim)


def test_a_first_step_sees_the_network_that_was_loaded(tiles: Path, tmp_path: Path):
    """The teacher's embeddings of the first batch are those that timm's own network gives for these views."""
    for kind in ("DINOv2, registers", "DINOv3", "Virchow, not pooled", "H-optimus, of one size"):
        architecture, args = KINDS[kind]
        init = published(tmp_path / kind, architecture, args)
        run = run_of(tiles, tmp_path / f"run {kind}", init=str(init))
        weights = safetensors.torch.load_file(init / "model.safetensors")
        any_size: dict[str, Any] = args | {"dynamic_img_size": True}
        timms: Any = timm.create_model(architecture, num_classes=0, **any_size).eval()
        timms.load_state_dict(weights)
        assert run.learner.teacher is not None
        for size in {recipe.size_px for recipe in run.views.recipes}:
            images = torch.randn(2, 3, size, size)
            with torch.no_grad():
                theirs = timms.forward_features(images)[:, 0]
                for branch in (run.learner.student.eval(), run.learner.teacher):
                    ours = branch.embed(branch.backbone, [images])
                    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4, msg=f"{kind}, {size} px")


def test_a_checkpoint_of_dino_is_a_start(tiles: Path, tmp_path: Path):
    torch.manual_seed(0)
    network = build_backbone("vit_small_patch16_224", {"embed_dim": 64, "depth": 4, "num_heads": 1, "img_size": 48})
    wrapped = {f"module.backbone.{name}": value for name, value in network.state_dict().items()}
    torch.save({"teacher": wrapped, "epoch": 3}, tmp_path / "dino.pth")
    settings = short(init=str(tmp_path / "dino.pth"), global_px=48, local_px=16)
    result = pretrain(ImageTiles(tiles), tmp_path / "run", settings, ORIGIN, device="cpu")
    assert result.finished
    assert any("ImageNet's mean and std are assumed" in warning for warning in result.warnings)
    assert load_encoder(result.folder).config.mean == (0.485, 0.456, 0.406)


@pytest.mark.parametrize("method", ["dino", "simclr"])
def test_views_that_are_no_whole_patches_of_the_weights_are_refused(tiles: Path, tmp_path: Path, method: str):
    architecture, args = KINDS["DINOv2"]
    init = published(tmp_path / "weights", architecture, args)
    extra = {"out_dim": None} if method == "simclr" else {}
    with pytest.raises(ConfigError, match=r"pretrain\.global_px 48 is no multiple of 14.*patches of 14 px.*Use 42"):
        run_of(tiles, tmp_path / "run", init=str(init), method=method, global_px=48, **extra)


# ---------------------------------------------------------------------------------------------------- LoRA


def test_adapters_start_as_nothing_and_merge_to_the_sum():
    torch.manual_seed(0)
    vit: Any = build_backbone("vit_tiny_patch16_224", SMALL_VIT | {"img_size": 32}).eval()
    images, weight = torch.randn(2, 3, 32, 32), vit.blocks[1].attn.qkv.weight.detach().clone()
    plain = vit(images)
    optim.add_adapters(vit, 2)
    torch.testing.assert_close(vit(images), plain, rtol=0, atol=0)
    trained = [name for name, each in vit.named_parameters() if each.requires_grad]
    assert len(trained) == 4 * 2 * 2  # blocks; qkv and proj; up and down
    assert all(".attn.qkv." in name or ".attn.proj." in name for name in trained)
    with torch.no_grad():
        for name, each in vit.named_parameters():
            if name.endswith(".up"):
                each.normal_(std=0.1)
    adapter = vit.blocks[1].attn.qkv.parametrizations.weight[0]
    whole: Any = optim.merged(vit)
    torch.testing.assert_close(whole.blocks[1].attn.qkv.weight, weight + adapter.up @ adapter.down)
    assert torch.linalg.matrix_rank(whole.blocks[1].attn.qkv.weight - weight, atol=1e-4) == 2
    torch.testing.assert_close(whole(images), vit(images))
    assert not torch.allclose(whole(images), plain, atol=1e-3)
    fresh = build_backbone("vit_tiny_patch16_224", SMALL_VIT | {"img_size": 32})
    assert whole.state_dict().keys() == fresh.state_dict().keys()
    assert optim.merged(fresh) is fresh


def test_the_average_covers_adapters_and_shares_what_is_frozen():
    torch.manual_seed(0)
    student, teacher = (build_backbone("vit_tiny_patch16_224", SMALL_VIT) for _ in range(2))
    teacher.load_state_dict(student.state_dict())
    for network in (student, teacher):
        optim.add_adapters(network, 2)
    teacher.load_state_dict(student.state_dict())
    optim.share_frozen(teacher.requires_grad_(False), student)
    frozen = {name: each.detach().clone() for name, each in student.named_parameters() if not each.requires_grad}
    moving = {name: each for name, each in student.named_parameters() if each.requires_grad}
    before = {name: dict(teacher.named_parameters())[name].clone() for name in moving}
    with torch.no_grad():
        for each in moving.values():
            each.add_(1.0)
    for _ in range(50):
        update_teacher(teacher, student, 0.9)
    for name, each in teacher.named_parameters():
        if name in moving:
            torch.testing.assert_close(each, before[name] + 1 - 0.9**50)
        else:
            assert torch.equal(each, frozen[name]), name  # to the bit, however often it is averaged


def test_lora_moves_the_weights_and_saves_an_ordinary_encoder(tiles: Path, tmp_path: Path):
    """With its own default rate: of the layers it adapts, and of no other, a good part changes; the loss falls."""
    init = published(tmp_path / "weights", *KINDS["UNI"])
    few = {"steps": 25, "batch": 16, "local_px": 24, "scale_lr": False, "warmup_steps": 5, "momentum": 0.9}
    settings = short(**few, init=str(init), method="lejepa", out_dim=None, lora=4)
    result = pretrain(ImageTiles(tiles), tmp_path / "run", settings, ORIGIN, device="cpu")
    losses = [line["loss"] for line in read_metrics(result.folder)]
    assert np.mean(losses[-5:]) < np.mean(losses[:5]) - 0.02
    before, after = (load_encoder(folder).backbone.state_dict() for folder in (init, result.folder))
    assert before.keys() == after.keys()
    for name, value in before.items():
        if name.endswith(("attn.qkv.weight", "attn.proj.weight")):
            assert (after[name] - value).norm() > 0.01 * value.norm(), name
        else:
            assert torch.equal(after[name], value), name
    assert load_encoder(result.folder).config.provenance["lora"] == 4


class Interrupted(Exception):
    pass


@pytest.mark.parametrize("method", ["dino", "simclr"])
def test_a_killed_run_with_adapters_ends_with_the_same_weights(tiles: Path, tmp_path: Path, method: str):
    init = published(tmp_path / "weights", *KINDS["DINOv2"])
    out_dim = 32 if method == "dino" else None
    settings = short(init=str(init), method=method, lora=2, local_px=28, checkpoint_minutes=1e-9, out_dim=out_dim)

    def die(line: dict[str, Any]) -> None:
        if line["step"] == 2:
            raise Interrupted

    pretrain(ImageTiles(tiles), tmp_path / "whole", settings, ORIGIN, device="cpu")
    with pytest.raises(Interrupted):
        pretrain(ImageTiles(tiles), tmp_path / "cut", settings, ORIGIN, device="cpu", report=die)
    result = pretrain(ImageTiles(tiles), tmp_path / "cut", settings, ORIGIN, device="cpu")
    assert result.note == "resumed from step 2"
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_lora_needs_weights_and_a_vit(tiles: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"pretrain\.lora adapts trained weights.*pretrain\.init is scratch"):
        resolve_settings(flags={"pretrain": {"lora": 4}})
    assert resolve_settings(flags={"pretrain": {"lora": 4, "init": "weights"}}).pretrain.lora == 4
    save_encoder(tmp_path / "resnet", build_encoder("resnet18", img_size=56))
    with pytest.raises(ConfigError, match=r"pretrain\.lora 4 cannot adapt a ResNet.*attention layers of a ViT"):
        run_of(tiles, tmp_path / "run", init=str(tmp_path / "resnet"), lora=4)
    init = published(tmp_path / "weights", *KINDS["DINOv2"])
    with pytest.raises(ConfigError, match=r"pretrain\.lora 32 is not below the width of the network \(32\)"):
        run_of(tiles, tmp_path / "run", init=str(init), lora=32)


def test_the_shape_of_a_vit_is_no_setting_of_a_resnet():
    with pytest.raises(ConfigError, match=r"resnet18_instancenorm with pretrain\.width 16.*shape of a ViT"):
        learning.start_encoder(PretrainSettings(method="simclr", width=16), tile_px=64, seed=0)
