"""Encoders: the vector against DINO's numbers and slow loops, files against timm and torchvision, hostile files."""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import pickle
import shutil
import warnings
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
import safetensors.torch
import timm
import torch
import torchvision
from huggingface_hub.errors import EntryNotFoundError
from PIL import Image
from timm.layers import SwiGLUPacked
from torch import nn

import selfvitmil
from helpers.error_codes import has_code
from selfvitmil.encoder import (
    LAYOUTS,
    POOLED,
    Encoder,
    EncoderConfig,
    build_backbone,
    build_encoder,
    check_fits,
    embed_tokens,
    load_encoder,
    save_encoder,
)
from selfvitmil.encoder.network import ConvStem, class_token_blocks
from selfvitmil.encoder.registry import by_content
from selfvitmil.errors import EncoderError

GOLDEN = Path(__file__).parents[1] / "golden" / "vit_embedding.npz"
TINY = {"embed_dim": 64, "depth": 5, "num_heads": 2}
ARGS = {"img_size": 32, "patch_size": 8, **TINY}


@pytest.fixture(autouse=True)
def _seeded_on_one_thread():
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tensors are small: threads would only wait for each other
    yield
    torch.set_num_threads(threads)


def scrambled(network):
    """Weights of ordinary size everywhere, so that no bias, norm or layer scale can be forgotten unnoticed."""
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.normal_(std=0.3).add_(0.1)
    return network.eval()


def tiny_encoder(**config) -> Encoder:
    encoder = build_encoder("vit_tiny_patch16_224", img_size=32, model_args={"patch_size": 8, **TINY}, **config)
    scrambled(encoder.backbone)
    return encoder.eval()


def images(size=32, count=2):
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(1))


def golden_weights():
    with np.load(GOLDEN) as file:
        return {key[2:]: torch.from_numpy(file[key]) for key in file if key.startswith("w:")}


def golden(name):
    with np.load(GOLDEN) as file:
        return torch.from_numpy(file[name])


# ---------------------------------------------------------------------------------------------------- the vector


def test_vector_matches_dino(tmp_path):
    torch.save(golden_weights(), tmp_path / "dino.pth")
    encoder = load_encoder(tmp_path / "dino.pth", num_heads=3)
    assert (encoder.config.size_px, encoder.dim) == (64, 120)
    with torch.no_grad():
        for network in (encoder, encoder.backbone):
            torch.testing.assert_close(embed_tokens(network, golden("x")), golden("embedding"), atol=1e-5, rtol=0)
        # DINO interpolates positions without antialiasing, timm with: close, not equal.
        small = embed_tokens(encoder, golden("x_small"), "cls")
    assert nn.functional.cosine_similarity(small, golden("cls_small")).min() > 0.99


def slow_vector(network, images_B3HW, layout, norm):
    """Hooks catch what each block puts out; loops over images, blocks and tokens do the rest."""
    caught = []
    hooks = [block.register_forward_hook(lambda _, __, out: caught.append(out)) for block in network.blocks]
    network.forward_features(images_B3HW)
    for hook in hooks:
        hook.remove()
    vectors = []
    for i in range(len(images_B3HW)):
        every = [norm(tokens[i, 0]) for tokens in caught]
        cls, depth = every[-4:], len(every)
        spread = [every[number - 1] for number in range(1, depth + 1) if (number * 4) % depth < 4]
        patches = [norm(token) for token in caught[-1][i, network.num_prefix_tokens :]]
        patch_mean, cls_mean = sum(patches) / len(patches), sum(cls) / 4
        parts = {
            "cls4+patchmean": [*cls, patch_mean],
            "cls4+clsmean": [*cls, cls_mean],
            "cls4": cls,
            "cls4spread": spread,
            "cls4spread+patchmean": [*spread, patch_mean],
            "cls": cls[-1:],
            "cls+patchmean": [cls[-1], patch_mean],
        }[layout]
        vectors.append(torch.cat(parts))
    return torch.stack(vectors)


NETWORKS = {
    "plain": ("vit_tiny_patch16_224", ARGS, "norm"),
    "registers": ("vit_tiny_patch16_224", {**ARGS, "reg_tokens": 3, "dynamic_img_size": True}, "norm"),
    "deep": ("vit_tiny_patch16_224", {**ARGS, "depth": 9}, "norm"),
    "distilled": ("deit_tiny_distilled_patch16_224", ARGS, "norm"),
    "convolutional stem": ("vit_small_patch16_convstem_224", {**ARGS, "dynamic_img_size": True}, "norm"),
    "averaging": ("vit_tiny_patch16_224", {**ARGS, "global_pool": "avg"}, "fc_norm"),
    "eva": ("eva02_tiny_patch14_224", {**ARGS, "dynamic_img_size": True}, "fc_norm"),
}


@pytest.mark.parametrize("kind", NETWORKS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_match_a_loop_over_blocks_and_tokens(kind, layout):
    name, args, norm = NETWORKS[kind]
    network = scrambled(timm.create_model(name, num_classes=0, **args))
    with torch.no_grad():
        fast = embed_tokens(network, images(), layout)
        slow = slow_vector(network, images(), layout, getattr(network, norm))
    torch.testing.assert_close(fast, slow, atol=1e-5, rtol=1e-4)
    config = EncoderConfig(architecture=name, layout=layout, size_px=32)
    assert Encoder(network, config).dim == fast.shape[1]


@pytest.mark.parametrize("form", ["array", "arrays", "pil", "tensor"])
def test_embed_equals_embed_tokens(tmp_path, form):
    encoder = tiny_encoder(mean=(0.6, 0.5, 0.4), std=(0.2, 0.3, 0.25))
    save_encoder(tmp_path / "tiny", encoder)
    loaded = selfvitmil.Encoder.load(tmp_path / "tiny")
    size = encoder.config.size_px
    pixels = np.random.default_rng(0).integers(0, 256, (5, size, size, 3), dtype=np.uint8)
    images = {"array": pixels, "arrays": list(pixels), "pil": [Image.fromarray(each) for each in pixels]}
    found = loaded.embed(images.get(form, torch.from_numpy(pixels)), batch_size=2, device="cpu")
    normalized = (pixels / 255 - np.array([0.6, 0.5, 0.4])) / np.array([0.2, 0.3, 0.25])
    with torch.no_grad():
        expected = embed_tokens(encoder.eval(), torch.from_numpy(normalized).float().permute(0, 3, 1, 2))
    assert found.shape == (5, encoder.dim)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_all_ways_to_give_pixels_mean_the_same():
    encoder = tiny_encoder()
    size = encoder.config.size_px
    assert size is not None
    pixels = np.random.default_rng(0).integers(0, 256, (3, size, size, 3), np.uint8)
    expected = encoder.embed(pixels)
    rows_first = torch.from_numpy(pixels)
    channels_first = rows_first.permute(0, 3, 1, 2)
    for images in (rows_first, channels_first, pixels / 255, channels_first.float() / 255, list(pixels)):
        torch.testing.assert_close(encoder.embed(images), expected, rtol=0, atol=0)
    encoder.eval()
    with torch.no_grad():
        for images in (rows_first, channels_first, encoder.normalize(channels_first)):
            torch.testing.assert_close(encoder(images), expected, rtol=1e-5, atol=1e-5)


def test_pixels_from_0_to_1_are_not_taken_as_normalized_in_silence():
    size = tiny_encoder().config.size_px
    pixels = torch.rand(2, 3, size, size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), pytest.warns(UserWarning, match="taken as normalized already"):
        tiny_encoder()(pixels)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        tiny_encoder()(pixels - 0.5)
        encoder = tiny_encoder()
        encoder(encoder.normalize((255 * pixels).to(torch.uint8)))


def test_embed_keeps_the_mode_and_takes_no_images():
    encoder = tiny_encoder().train()
    assert encoder.embed([]).shape == (0, encoder.dim)
    assert encoder.training


@pytest.mark.parametrize(
    ("images", "code"),
    [
        (np.zeros((32, 32, 3), np.uint8), "not-a-batch"),
        (Image.new("RGB", (32, 32)), "not-a-batch"),
        (np.full((1, 32, 32, 3), 1.5, np.float32), "not-uint8"),
        (np.zeros((1, 32, 16, 3), np.uint8), "image-size-mismatch"),
        (np.zeros((1, 32, 32, 4), np.uint8), "image-size-mismatch"),
    ],
)
def test_embed_refuses_what_is_not_a_batch_of_tiles(images, code):
    with pytest.raises(EncoderError, check=has_code(code)):
        tiny_encoder().embed(images)


def test_gradient_reaches_every_weight():
    encoder = tiny_encoder().train()
    encoder(images()).square().sum().backward()
    assert all(weight.grad is not None and weight.grad.abs().sum() > 0 for weight in encoder.parameters())


def test_half_precision_stays_close():
    encoder = tiny_encoder()
    with torch.no_grad():
        exact = encoder(images())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            mixed = encoder(images())
        scale, shift = encoder.scale_311.clone(), encoder.shift_311.clone()
        encoder.backbone.bfloat16()
        half = encoder(images())
    assert half.dtype == torch.bfloat16
    assert torch.equal(encoder.scale_311, scale)
    assert torch.equal(encoder.shift_311, shift)
    for other in (mixed, half):
        assert nn.functional.cosine_similarity(exact, other.float()).min() > 0.999


def test_smaller_images_get_interpolated_positions():
    encoder = build_encoder("vit_tiny_patch16_224", model_args=TINY)
    scrambled(encoder.backbone)
    native = build_backbone("vit_tiny_patch16_224", {**TINY, "img_size": 96}).eval()
    weights = dict(encoder.backbone.state_dict())
    cls, grid = weights["pos_embed"][:, :1], weights["pos_embed"][:, 1:].reshape(1, 14, 14, 64).permute(0, 3, 1, 2)
    grid = nn.functional.interpolate(grid, size=(6, 6), mode="bicubic", antialias=True)
    weights["pos_embed"] = torch.cat([cls, grid.permute(0, 2, 3, 1).reshape(1, 36, 64)], dim=1)
    native.load_state_dict(weights)
    with torch.no_grad():
        torch.testing.assert_close(encoder(images(96)), embed_tokens(native, images(96)), atol=1e-5, rtol=1e-4)


def test_encode_normalizes_pixels():
    mean, std = (0.62, 0.48, 0.60), (0.20, 0.22, 0.17)
    encoder = tiny_encoder(mean=mean, std=std)
    tiles = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    by_hand = torchvision.transforms.functional.normalize(tiles / 255, mean, std)
    torch.testing.assert_close(encoder.normalize(tiles), by_hand, atol=2e-6, rtol=0)
    with torch.no_grad():
        torch.testing.assert_close(encoder.encode(tiles), encoder(by_hand), atol=1e-4, rtol=1e-4)
    with pytest.raises(EncoderError, check=has_code("not-uint8")):
        encoder.encode(by_hand)


@pytest.mark.gpu
def test_cuda_equals_cpu():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    encoder = tiny_encoder()
    tiles = torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8)
    with torch.no_grad():
        here, there = encoder.encode(tiles), encoder.cuda().encode(tiles.cuda()).cpu()
    torch.testing.assert_close(here, there, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize(
    ("args", "layout", "size", "code"),
    [
        ({"class_token": False, "global_pool": "avg"}, "cls", 32, "layout-needs-class-token"),
        ({"depth": 3}, "cls4", 32, "layout-needs-4-blocks"),
        ({}, "cls5", 32, "unknown-layout"),
        ({}, POOLED, 32, "layout-without-class-token"),
        ({}, "cls", 30, "patches-do-not-divide"),
        ({}, "cls", 64, "image-size-mismatch"),
    ],
)
def test_what_cannot_be_embedded(args, layout, size, code):
    network = timm.create_model("vit_tiny_patch16_224", num_classes=0, **{**ARGS, **args})
    with pytest.raises(EncoderError, check=has_code(code)):
        embed_tokens(network, images(size), layout)


def test_pixels_in_place_of_images_are_refused():
    with pytest.raises(EncoderError, match=r"Encoder\.encode", check=has_code("not-normalized-images")):
        embed_tokens(tiny_encoder(), torch.zeros(1, 3, 32, 32, dtype=torch.uint8))


# ---------------------------------------------------------------------------------------------------- build


def test_vit_without_class_token_pools():
    encoder = build_encoder("vit_medium_patch16_gap_256", img_size=32, model_args={"patch_size": 8, **TINY}).eval()
    assert (encoder.config.layout, encoder.dim) == (POOLED, 64)
    with torch.no_grad():
        tokens = encoder.backbone.forward_features(images())
        torch.testing.assert_close(encoder(images()), encoder.backbone.fc_norm(tokens.mean(dim=1)))


@pytest.mark.parametrize(("name", "norm"), [("resnet18", nn.BatchNorm2d), ("resnet18_instancenorm", nn.InstanceNorm2d)])
def test_resnet18_equals_torchvision(name, norm):
    encoder = build_encoder(name, img_size=64).eval()
    reference = torchvision.models.resnet18(norm_layer=norm).eval()
    reference.fc = nn.Identity()
    reference.load_state_dict(encoder.backbone.state_dict())
    assert (encoder.config.layout, encoder.dim) == (POOLED, 512)
    with torch.no_grad():
        torch.testing.assert_close(encoder(images(64)), reference(images(64)), atol=1e-4, rtol=1e-4)


def slow_stem(stem, image_3HW):
    """Tokens (patches, D): a convolution, the norm of each position and ReLU after each other, the norm by a loop."""
    x_CHW = image_3HW
    layers = list(stem.proj)
    for convolution, norm in zip(layers[:-1:3], layers[1::3], strict=True):
        x_CHW = nn.functional.conv2d(x_CHW[None], convolution.weight, convolution.bias, stride=2, padding=1)[0]
        for y in range(x_CHW.shape[1]):
            for x in range(x_CHW.shape[2]):
                place = x_CHW[:, y, x]
                place = (place - place.mean()) / (place.var(correction=0) + 1e-6).sqrt()
                x_CHW[:, y, x] = (place * norm.weight + norm.bias).clamp(min=0)
    last = layers[-1]
    return torch.stack([last.weight[:, :, 0, 0] @ place + last.bias for place in x_CHW.flatten(1).T])


@pytest.mark.parametrize(("patch", "width"), [(16, 64), (8, 32), (2, 6)])
def test_convolutional_stem_equals_a_slow_loop(patch, width):
    stem = ConvStem(img_size=32, patch_size=patch, embed_dim=width)
    assert [layer.out_channels for layer in list(stem.proj)[:-1:3]] == [
        width // 2**k for k in reversed(range(patch.bit_length() - 1))
    ]
    with torch.no_grad():
        for weight in stem.parameters():
            weight.normal_()
        torch.testing.assert_close(stem(images())[1], slow_stem(stem, images()[1]), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("size", ["tiny", "small", "base"])
def test_convolutional_stems_change_the_patch_embedding_alone(size):
    with torch.device("meta"):
        ours = build_backbone(f"vit_{size}_patch16_convstem_224").state_dict()
        plain = build_backbone(f"vit_{size}_patch16_224").state_dict()
    rest = [{k: v.shape for k, v in state.items() if "patch_embed" not in k} for state in (ours, plain)]
    assert rest[0] == rest[1]
    width = plain["cls_token"].shape[2]
    assert [tuple(v.shape) for k, v in ours.items() if "patch_embed" in k and v.ndim == 4] == [
        (width // 8, 3, 3, 3),
        (width // 4, width // 8, 3, 3),
        (width // 2, width // 4, 3, 3),
        (width, width // 2, 3, 3),
        (width, width, 1, 1),
    ]


def test_convolutional_stem_ignores_the_other_tiles_and_takes_other_sizes():
    encoder = build_encoder("vit_tiny_patch16_convstem_224", img_size=32, model_args={"patch_size": 8, **TINY})
    scrambled(encoder.backbone).train()
    with torch.no_grad():
        torch.testing.assert_close(encoder(images(count=3))[:1], encoder(images(count=3)[:1]))
        assert encoder(images(48)).shape == (2, encoder.dim)
    with pytest.raises(EncoderError, check=has_code("patches-do-not-divide")):
        encoder(images(36))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"patch_size": 12}, r"12 px.*8, 16 or 32 for pretrain\.patch_px"),
        ({"patch_size": [16, 16]}, r"\[16, 16\]"),
        ({"embed_dim": 60}, r"60 .*16 px.*multiple of 8 for pretrain\.width"),
    ],
)
def test_stems_that_cannot_be_built_are_explained(args, message):
    with pytest.raises(EncoderError, match=message, check=has_code("invalid-conv-stem")):
        build_encoder("vit_tiny_patch16_convstem_224", model_args=args)


def test_convolutional_stems_have_no_published_weights():
    with pytest.raises(EncoderError, check=has_code("no-published-weights")):
        load_encoder("vit_small_patch16_convstem_224")


def test_student_takes_the_weights_of_an_encoder():
    encoder = tiny_encoder()
    student = build_backbone(encoder.config.architecture, {**encoder.config.model_args, "drop_path_rate": 0.2})
    student.load_state_dict(encoder.backbone.state_dict())
    assert student.blocks[-1].drop_path1.drop_prob == pytest.approx(0.2)


def test_wrong_requests_are_named():
    with pytest.raises(
        EncoderError, match=r"Did you mean .*vit_small_patch16_224", check=has_code("unknown-architecture")
    ):
        build_encoder("vit_smal_patch16_224")
    with pytest.raises(EncoderError, match="no_such_argument", check=has_code("invalid-model-args")):
        build_encoder("vit_tiny_patch16_224", model_args={"no_such_argument": 1})
    with pytest.raises(EncoderError, check=has_code("weights-not-loaded")):
        build_encoder("vit_small_patch16_36x1_224", model_args={"depth": 1}, pretrained=True)
    with pytest.raises(EncoderError, match=r"std\.1", check=has_code("invalid-encoder-config")):
        tiny_encoder(std=(0.2, 0.0, 0.2))
    with pytest.raises(EncoderError, match="colour", check=has_code("invalid-encoder-config")):
        tiny_encoder(colour="red")


@pytest.mark.parametrize(
    ("tiles", "code"),
    [
        ((0.51, 32, "slide"), None),
        ((0.25, 32, "slide"), "encoder-mpp-mismatch"),
        ((0.53, 32, "slide"), "encoder-mpp-mismatch"),
        ((0.5, 256, "slide"), "encoder-size-mismatch"),
        ((0.5, 32, "none"), "encoder-stain-mismatch"),
    ],
)
def test_check_fits(tiles, code):
    config = EncoderConfig(architecture="vit", mpp=0.5, size_px=32, stain="slide")
    if code is None:
        check_fits(config, *tiles)
    else:
        with pytest.raises(EncoderError, check=has_code(code)):
            check_fits(config, *tiles)
    check_fits(EncoderConfig(architecture="vit", size_px=tiles[1]), *tiles)  # nothing known, nothing to object to


def test_check_fits_says_both_values_and_the_flag():
    with pytest.raises(EncoderError, match=r"0\.5 microns per pixel, these tiles have 0\.25.*--tile\.mpp 0\.5"):
        check_fits(EncoderConfig(architecture="vit", mpp=0.5), 0.25, 32, "slide")


# ---------------------------------------------------------------------------------------------------- our folders


def test_a_folder_of_ours_may_have_the_name_of_a_published_encoder(tmp_path):
    encoder = tiny_encoder()
    for name in ("conch", "uni"):
        save_encoder(tmp_path / name, encoder)
        assert load_encoder(tmp_path / name).identity() == encoder.identity()


def test_folder_round_trip_to_the_byte(tmp_path):
    facts = {"mpp": 0.5, "stain": "slide", "trained_on": "train split of a", "layout": "cls4+clsmean"}
    encoder = tiny_encoder(mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6), provenance={"steps": 7}, **facts)
    save_encoder(tmp_path / "a", encoder)
    loaded = load_encoder(tmp_path / "a")
    assert loaded.config == encoder.config
    assert not loaded.training
    assert loaded.warnings == ()
    assert loaded.identity() == encoder.identity()
    with torch.no_grad():
        assert torch.equal(loaded(images()), encoder(images()))
    save_encoder(tmp_path / "b", load_encoder(str(tmp_path / "a")))
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["config.json", "model.safetensors"]
    assert str(tmp_path) not in (tmp_path / "a" / "config.json").read_text()


def test_fields_can_be_replaced_and_identity_follows_the_vector(tmp_path):
    encoder = tiny_encoder()
    save_encoder(tmp_path, encoder)
    other = load_encoder(tmp_path, layout="cls", mpp=1.0)
    assert (other.config.layout, other.config.mpp, other.dim) == ("cls", 1.0, 64)
    assert load_encoder(tmp_path, mpp=1.0).identity() == encoder.identity()
    assert other.identity() != encoder.identity()
    with torch.no_grad():
        encoder.backbone.norm.bias[3] += 1e-3
    assert load_encoder(tmp_path).identity() != encoder.identity()


@pytest.mark.skipif(not hasattr(timm.models._hub, "load_state_dict_from_path"), reason="timm has no local-dir yet")
@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "vit_tiny_patch16_convstem_224", "resnet18_instancenorm"])
def test_timm_itself_reads_the_folder(tmp_path, name):
    args = {"patch_size": 8, **TINY} if name.startswith("vit") else {}
    encoder = build_encoder(name, img_size=64, model_args=args, mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6))
    scrambled(encoder.backbone)
    save_encoder(tmp_path, encoder)
    network = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    assert network.state_dict().keys() == encoder.backbone.state_dict().keys()
    with torch.no_grad():
        assert torch.equal(network(images(64)), encoder.backbone.eval()(images(64)))
    described = timm.data.resolve_model_data_config(network)
    assert (described["mean"], described["std"]) == ([0.1, 0.2, 0.3], [0.4, 0.5, 0.6])
    classifier = timm.create_model(f"local-dir:{tmp_path}", pretrained=True, num_classes=5)
    assert classifier(images(64)).shape == (2, 5)


def edit_config(folder, **changes):
    content = json.loads((folder / "config.json").read_text())
    for section in (content, content["selfvitmil"]):
        section.update({key: value for key, value in changes.items() if key in section})
    (folder / "config.json").write_text(json.dumps(content))


def other_weights(folder):
    save_encoder(folder / "other", tiny_encoder())
    shutil.copy(folder / "other" / "model.safetensors", folder)


@pytest.mark.parametrize(
    ("break_it", "code", "names"),
    [
        (lambda folder: (folder / "config.json").unlink(), "no-encoder-config", ""),
        (lambda folder: (folder / "config.json").write_text("{"), "unreadable-encoder-config", ""),
        (lambda folder: (folder / "config.json").write_text('{"model_type": "vit"}'), "no-architecture", ""),
        (lambda folder: (folder / "model.safetensors").unlink(), "no-weights", ""),
        (lambda folder: edit_config(folder, format_version=99), "other-format-version", "99.* 1"),
        (lambda folder: edit_config(folder, stain="maybe"), "invalid-encoder-config", "stain"),
        (lambda folder: edit_config(folder, architecture="vit_smal"), "unknown-architecture", "vit_smal"),
        (
            lambda folder: edit_config(folder, model_args={**ARGS, "depth": 6}),
            "weights-mismatch",
            r"missing: blocks\.5\..* and \d+ more",
        ),
        (other_weights, "checksum-mismatch", "model.safetensors"),
    ],
)
def test_broken_folders_are_explained(tmp_path, break_it, code, names):
    folder = tmp_path / "my-encoder"
    save_encoder(folder, tiny_encoder())
    break_it(folder)
    with pytest.raises(EncoderError, match=names or None, check=has_code(code)) as caught:
        load_encoder(folder)
    assert str(tmp_path) not in str(caught.value)


def test_weights_that_a_drive_does_not_give_are_an_error_of_ours(tmp_path, monkeypatch):
    save_encoder(tmp_path / "my-encoder", tiny_encoder())
    whole = Path.open

    def failing(path, *given, **named):
        if path.name == "model.safetensors":
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return whole(path, *given, **named)

    monkeypatch.setattr(Path, "open", failing)
    with pytest.raises(EncoderError, match="Input/output error", check=has_code("unreadable-weights")) as caught:
        load_encoder(tmp_path / "my-encoder")
    assert str(tmp_path) not in str(caught.value)


# ---------------------------------------------------------------------------------------------------- checkpoints


def wrapped(weights, prefix):
    return {f"{prefix}{key}": value for key, value in weights.items()}


def dino_checkpoint(student, teacher):
    """As facebookresearch/dino saves: wrappers and heads around the networks, its command line, NumPy numbers."""
    head = {"head.mlp.0.weight": torch.ones(3), "head.last_layer.weight_v": torch.ones(3)}
    return {
        "student": wrapped({**wrapped(student, "backbone."), **head}, "module."),
        "teacher": {**wrapped(teacher, "backbone."), **head},
        "optimizer": {"state": {}, "param_groups": [{"lr": np.float64(0.1), "params": [0]}]},
        "epoch": 3,
        "args": argparse.Namespace(arch="vit_small", out_dim=65536),
        "dino_loss": {"center": torch.zeros(1, 3)},
    }


FORMS = {
    "dino": dino_checkpoint,
    "backbone alone": lambda student, teacher: teacher,
    "with classifier": lambda student, teacher: {
        **teacher,
        "head.weight": torch.ones(2, 24),
        "head.bias": torch.ones(2),
    },
    "half": lambda student, teacher: {"model": {key: value.half() for key, value in teacher.items()}},
    "flat": lambda student, teacher: {
        "state_dict": wrapped(student, "net.student.") | wrapped(teacher, "net.teacher.") | {"note": "x"}
    },
    "compiled": lambda student, teacher: {"teacher": wrapped(teacher, "_orig_mod.module.")},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["zip", "legacy"])
def test_checkpoints_of_many_forms(tmp_path, form, kind):
    teacher = golden_weights()
    student = {key: value + 1 for key, value in teacher.items()}
    path = tmp_path / "checkpoint.pth"
    torch.save(FORMS[form](student, teacher), path, _use_new_zipfile_serialization=kind == "zip")
    encoder = load_encoder(path, num_heads=3, mpp=0.5)
    found = encoder.backbone.state_dict()
    assert found.keys() == teacher.keys()
    assert all(torch.allclose(found[key], teacher[key], atol=2e-3 if form == "half" else 0) for key in teacher)
    assert encoder.config.mpp == 0.5
    assert "mean and std are assumed" in encoder.warnings[0]


def test_the_student_on_request(tmp_path):
    teacher = golden_weights()
    student = {key: value + 1 for key, value in teacher.items()}
    torch.save(dino_checkpoint(student, teacher), tmp_path / "c.pth")
    encoder = load_encoder(tmp_path / "c.pth", num_heads=3, checkpoint_key="student")
    assert torch.equal(encoder.backbone.cls_token, student["cls_token"])
    with pytest.raises(
        EncoderError, match=r"'ema'.*student, teacher, optimizer and 3 more", check=has_code("no-known-network")
    ):
        load_encoder(tmp_path / "c.pth", checkpoint_key="ema")


@pytest.mark.parametrize(
    ("args", "heads"),
    [
        ({"embed_dim": 192}, 3),
        ({"embed_dim": 128, "patch_size": 8, "img_size": 48}, 2),
        ({"embed_dim": 128, "qkv_bias": False, "mlp_ratio": 3.7}, 2),
        ({"embed_dim": 1280, "mlp_ratio": 0.1}, 16),
    ],
)
def test_architecture_is_read_off_the_weights(tmp_path, args, heads):
    args = {"img_size": 64, "depth": 4, "num_heads": heads, **args}
    network = scrambled(timm.create_model("vit_base_patch16_224", num_classes=0, **args))
    safetensors.torch.save_file(network.state_dict(), tmp_path / "vit.safetensors")
    encoder = load_encoder(tmp_path / "vit.safetensors", mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
    assert encoder.warnings == (f"vit.safetensors does not state its number of attention heads: {heads} assumed",)
    size = args["img_size"]
    assert encoder.config.size_px == size
    with torch.no_grad():
        torch.testing.assert_close(encoder(images(size)), embed_tokens(network, images(size)))


@pytest.mark.parametrize(("width", "patch", "size"), [(192, 16, "tiny"), (64, 8, "base")])
def test_convolutional_stem_is_read_off_the_weights(tmp_path, width, patch, size):
    args = {"img_size": 64, "depth": 4, "num_heads": width // 64, "embed_dim": width, "patch_size": patch}
    network = scrambled(build_backbone("vit_base_patch16_convstem_224", args))
    safetensors.torch.save_file(network.state_dict(), tmp_path / "vit.safetensors")
    encoder = load_encoder(tmp_path / "vit.safetensors", mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
    assert encoder.config.architecture == f"vit_{size}_patch16_convstem_224"
    with torch.no_grad():
        torch.testing.assert_close(encoder(images(64)), embed_tokens(network, images(64)))


def test_heads_are_not_guessed_for_odd_widths(tmp_path):
    torch.save(golden_weights(), tmp_path / "odd.pth")
    with pytest.raises(EncoderError, match=r"odd\.pth.*num_heads", check=has_code("unknown-num-heads")):
        load_encoder(tmp_path / "odd.pth")


@pytest.mark.parametrize("form", ["embedder", "simclr"])
def test_dsmil_checkpoint(tmp_path, form):
    """Key names of DSMIL: its own embedder, and SimCLR's list of a ResNet's children with two projection layers."""
    reference = torchvision.models.resnet18(norm_layer=nn.InstanceNorm2d).eval()
    reference.fc = nn.Identity()
    weights = wrapped(reference.state_dict(), "feature_extractor.") | {"fc.weight": torch.ones(2, 512)}
    if form == "simclr":
        children = nn.Sequential(*list(reference.children())[:-1])
        weights = wrapped(children.state_dict(), "features.")
        weights |= {f"{name}.{part}": torch.ones(2) for name in ("l1", "l2") for part in ("weight", "bias")}
    torch.save(weights, tmp_path / "embedder.pth")
    encoder = load_encoder(tmp_path / "embedder.pth", mean=(0, 0, 0), std=(1, 1, 1))
    assert encoder.config.architecture == "resnet18_instancenorm"
    with torch.no_grad():
        torch.testing.assert_close(encoder(images(64)), reference(images(64)), atol=1e-4, rtol=1e-4)


def changed(**changes):
    weights = golden_weights() | changes
    return {key: value for key, value in weights.items() if value is not None}


@pytest.mark.parametrize(
    ("content", "code", "names"),
    [
        (changed(**{"blocks.2.norm1.bias": None}), "weights-mismatch", r"missing: blocks\.2\.norm1\.bias"),
        (changed(**{"blocks.2.attn.bias_table": torch.ones(3)}), "weights-mismatch", r"blocks\.2\.attn\.bias_table"),
        (changed(**{"norm.bias": torch.ones(25)}), "weights-mismatch", r"norm\.bias \(25,\) for \(24,\)"),
        (changed(**{"norm.bias": torch.full((24,), np.nan)}), "non-finite-weights", r"norm\.bias"),
        (changed(**{"patch_embed.proj.weight": torch.ones(24, 768)}), "not-a-vit", ""),
        (changed(cls_token=None), "not-a-vit", ""),
        ({"layers.0.weight": torch.ones(3)}, "no-known-network", r"layers\.0\.weight"),
        ({"epoch": 3}, "no-known-network", "epoch"),
        ([torch.ones(3)], "not-a-state-dict", "list"),
        (torch.ones(3), "not-a-state-dict", "Tensor"),
    ],
)
def test_checkpoint_of_another_architecture(tmp_path, content, code, names):
    torch.save(content, tmp_path / "other.pth")
    with pytest.raises(EncoderError, match=rf"other\.pth: .*{names}", check=has_code(code)):
        load_encoder(tmp_path / "other.pth", num_heads=3)


class Trap:
    """Writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (Path(self.path),)


class CommandTrap(Trap):
    def __reduce__(self):
        import os

        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("trap", [Trap, CommandTrap])
@pytest.mark.parametrize("form", ["zip", "legacy", "plain pickle", "folder"])
def test_code_in_a_checkpoint_is_refused_unexecuted(tmp_path, trap, form):
    proof = tmp_path / "executed"
    content = {"teacher": golden_weights(), "epoch": trap(proof)}
    path = tmp_path / "evil.pth"
    if form == "plain pickle":
        path.write_bytes(pickle.dumps({"epoch": trap(proof)}, protocol=2))
    elif form == "folder":
        folder = tmp_path / "evil"
        save_encoder(folder, tiny_encoder())
        public = json.loads((folder / "config.json").read_text())
        del public["selfvitmil"]
        (folder / "config.json").write_text(json.dumps(public))
        (folder / "model.safetensors").unlink()
        torch.save(content, folder / "pytorch_model.bin")
        path = folder
    else:
        torch.save(content, path, _use_new_zipfile_serialization=form == "zip")
    with pytest.raises(EncoderError, check=has_code("unsafe-weights")):
        load_encoder(path)
    assert not proof.exists()
    if form == "zip":  # the trap does work
        torch.load(path, weights_only=False)
        assert proof.exists()


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_damaged_files_are_explained(tmp_path, suffix):
    whole, path = tmp_path / f"whole{suffix}", tmp_path / f"cut{suffix}"
    if suffix == ".pth":
        torch.save(golden_weights(), whole)
    else:
        safetensors.torch.save_file(golden_weights(), whole)
    content = whole.read_bytes()
    for length in [0, 1, 7, 8, 100, *np.linspace(1_000, len(content) - 1, 12, dtype=int)]:
        path.write_bytes(content[:length])
        with pytest.raises(EncoderError, match=rf"^cut{suffix}: ", check=has_code("unreadable-weights")):
            load_encoder(path, num_heads=3)
    generator = np.random.default_rng(0)
    for _ in range(40):
        noisy = np.frombuffer(content, dtype=np.uint8).copy()
        noisy[generator.integers(0, 4_000, 8)] = generator.integers(0, 256, 8)
        path.write_bytes(noisy.tobytes())
        with contextlib.suppress(EncoderError):  # and nothing else; some changes hit names or padding only
            load_encoder(path, num_heads=3)


# ---------------------------------------------------------------------------------------------------- names


def fake_hub(monkeypatch, folder):
    """Files of `folder` in place of the hub."""
    asked = []

    def download(repository, filename, **_):
        asked.append((repository, filename))
        if not (folder / filename).exists():
            raise EntryNotFoundError(filename)
        return str(folder / filename)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    return asked


PATHOLOGY = {
    # what the network really is, what its config.json admits, the customary vector
    "MahmoodLab/UNI": ({"init_values": 1e-5}, {}, "cls"),
    "MahmoodLab/UNI2-h": (
        {"mlp_ratio": 5.375, "reg_tokens": 8, "no_embed_class": True, "init_values": 1e-5, "gated": True},
        {"depth": 2},
        "cls",
    ),
    "paige-ai/Virchow2": (
        {"mlp_ratio": 5.375, "reg_tokens": 4, "init_values": 1e-5, "global_pool": "", "gated": True},
        {"mlp_ratio": 5.375, "reg_tokens": 4, "init_values": 1e-5, "global_pool": ""},
        "cls+patchmean",
    ),
}


@pytest.mark.parametrize("name", PATHOLOGY)
@pytest.mark.parametrize("form", ["hf-hub:{}", "{}"])
def test_pathology_models_whose_config_says_too_little(tmp_path, monkeypatch, name, form):
    """Small twins of public models: timm builds them from arguments that their config.json leaves out."""
    truth, admitted, layout = PATHOLOGY[name]
    truth = {**ARGS, "embed_dim": 128, **truth}
    if truth.pop("gated", False):
        truth |= {"mlp_layer": SwiGLUPacked, "act_layer": nn.SiLU}
    network = scrambled(timm.create_model("vit_large_patch16_224", num_classes=0, **truth))
    torch.save(network.state_dict(), tmp_path / "pytorch_model.bin")
    described = {"input_size": [3, 32, 32], "mean": [0.7, 0.6, 0.7], "std": [0.2, 0.2, 0.2], "num_classes": 0}
    content = {"architecture": "vit_large_patch16_224", "model_args": {**ARGS, "embed_dim": 128, **admitted}}
    (tmp_path / "config.json").write_text(json.dumps({**content, "pretrained_cfg": described}))
    asked = fake_hub(monkeypatch, tmp_path)

    encoder = load_encoder(form.format(name))
    assert {repository for repository, _ in asked} == {name}
    assert (encoder.config.layout, encoder.config.mean, encoder.config.size_px) == (layout, (0.7, 0.6, 0.7), 224)
    assert (encoder.config.mpp, encoder.config.stain, encoder.config.provenance) == (None, None, {"source": name})
    assert "config.json and weights describe different networks" in encoder.warnings[0]
    with torch.no_grad():
        expected = slow_vector(network, images(), layout, network.norm)
        torch.testing.assert_close(encoder(images()), expected, atol=1e-4, rtol=1e-4)
        save_encoder(tmp_path / "copy", encoder)  # for a machine without internet
        torch.testing.assert_close(load_encoder(tmp_path / "copy")(images()), expected, atol=1e-4, rtol=1e-4)
        downloaded = load_encoder(tmp_path, layout=layout)
        torch.testing.assert_close(downloaded(images()), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("depth", range(4, 41))
def test_spread_blocks_are_four_and_evenly_spaced(depth):
    blocks = class_token_blocks("cls4spread", depth)
    steps = {later - earlier for earlier, later in zip([-1, *blocks], blocks, strict=False)}
    assert (len(blocks), blocks[-1]) == (4, depth - 1)
    assert max(steps) - min(steps) <= 1
    assert depth != 12 or blocks == [2, 5, 8, 11]
    assert depth != 40 or blocks == [9, 19, 29, 39]


CUSTOMARY = {
    # name: (pretrained_cfg beyond what all have, layout)
    "uni": ({"tag": "uni_mass100k"}, "cls"),
    "virchow2": ({"tag": "virchow_v2"}, "cls+patchmean"),
    "phikon": ({"tag": "owkin_pancancer"}, "cls"),
    "other": ({"tag": "dino"}, "cls4+patchmean"),
    "silent": ({}, "cls4+patchmean"),
}


@pytest.mark.parametrize("name", CUSTOMARY)
def test_a_known_model_in_a_folder_has_its_customary_layout(tmp_path, name):
    told, layout = CUSTOMARY[name]
    network = scrambled(timm.create_model("vit_tiny_patch16_224", num_classes=0, **ARGS, reg_tokens=2))
    torch.save(network.state_dict(), tmp_path / "pytorch_model.bin")
    described = {"input_size": [3, 32, 32], "mean": [0.7, 0.6, 0.7], "std": [0.2, 0.2, 0.2], **told}
    content = {"architecture": "vit_tiny_patch16_224", "model_args": {**ARGS, "reg_tokens": 2}}
    (tmp_path / "config.json").write_text(json.dumps({**content, "pretrained_cfg": described}))
    encoder = load_encoder(tmp_path)
    assert encoder.config.layout == layout
    assert any("recognised" in warning for warning in encoder.warnings) == (layout != "cls4+patchmean")
    with torch.no_grad():
        expected = slow_vector(network, images(), layout, network.norm)
        torch.testing.assert_close(encoder(images()), expected, atol=1e-4, rtol=1e-4)
    assert load_encoder(tmp_path, layout="cls4spread").config.layout == "cls4spread"  # what is asked for wins


@pytest.mark.parametrize(
    ("args", "mean", "name"),
    [
        ({"embed_dim": 1536, "depth": 24, "patch_size": 14, "reg_tokens": 8, "num_heads": 24}, None, "UNI2-h"),
        ({"embed_dim": 1536, "depth": 40, "patch_size": 16, "num_heads": 24}, None, "Prov-GigaPath"),
        ({"embed_dim": 1536, "depth": 40, "patch_size": 14, "reg_tokens": 4}, (0.7072, 0.5787, 0.7036), "H-optimus-0"),
        ({"embed_dim": 1536, "depth": 40, "patch_size": 14, "reg_tokens": 4}, (0.485, 0.456, 0.406), None),  # DINOv2
        ({"embed_dim": 1280, "depth": 32, "patch_size": 14, "num_heads": 16}, None, "Virchow"),
        ({"embed_dim": 1280, "depth": 32, "patch_size": 14, "num_heads": 16, "reg_tokens": 4}, None, "Virchow2"),
        ({"embed_dim": 1280, "depth": 32, "patch_size": 14, "num_heads": 16, "gated": False}, None, None),  # MAE, CLIP
        ({"embed_dim": 1024, "depth": 24, "patch_size": 16, "num_heads": 16, "gated": False}, None, None),
    ],
)
def test_published_networks_are_recognised_by_their_shape(args, mean, name):
    gated = {"mlp_layer": SwiGLUPacked, "mlp_ratio": 5.375} if args.pop("gated", True) else {}
    with torch.device("meta"):
        network = timm.create_model("vit_base_patch16_224", num_classes=0, **{"num_heads": 24, **args, **gated})
    found = by_content({"mean": mean}, network)
    assert (found and found.name) == name


def test_timm_names_bring_their_normalization(monkeypatch):
    donor = timm.create_model("vit_tiny_patch16_224", depth=4)
    monkeypatch.setattr("timm.models._builder.load_state_dict_from_hf", lambda *_, **__: dict(donor.state_dict()))
    encoder = build_encoder("vit_tiny_patch16_224.augreg_in21k_ft_in1k", model_args={"depth": 4}, pretrained=True)
    assert torch.equal(encoder.backbone.cls_token, donor.cls_token)
    assert (encoder.config.mean, encoder.config.trained_on) == ((0.5, 0.5, 0.5), "imagenet")
    assert encoder.config.architecture == "vit_tiny_patch16_224"
    assert encoder.config.provenance == {"source": "vit_tiny_patch16_224.augreg_in21k_ft_in1k"}


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224.augreg_in21k", "timm/resnet18.a1_in1k", "Nobody/nothing"])
def test_no_connection(monkeypatch, name):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(EncoderError, match="HF_HUB_OFFLINE=1", check=has_code("hub-unreachable")) as caught:
        load_encoder(name)
    assert caught.value.what.startswith(name.removeprefix("timm/"))


@pytest.mark.parametrize(
    ("error", "code", "remedy"),
    [
        ("GatedRepoError", "weights-gated", "hf auth login"),
        ("RepositoryNotFoundError", "unknown-hub-model", "log in"),
    ],
)
def test_closed_doors(monkeypatch, error, code, remedy):
    kind = getattr(huggingface_hub.errors, error)

    def refuse(*_, **__):
        raise kind.__new__(kind)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", refuse)
    with pytest.raises(EncoderError, match=f"MahmoodLab/UNI: .*{remedy}", check=has_code(code)):
        load_encoder("MahmoodLab/UNI")


@pytest.mark.parametrize(
    "source",
    ["encoders/vit", "encoders/a/b", "./vit", "../vit/x", "/nowhere/vit", "a/teacher.pth", Path("a/b"), "x.pt"],
)
def test_a_mistyped_path_asks_nobody(tmp_path, monkeypatch, source):
    (tmp_path / "encoders").mkdir()
    monkeypatch.chdir(tmp_path)
    asked = fake_hub(monkeypatch, tmp_path)
    with pytest.raises(EncoderError, check=has_code("file-not-found")):
        load_encoder(source)
    assert asked == []
