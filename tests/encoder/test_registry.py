"""Every published encoder with random weights of its shape, under the names of its files."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import safetensors.torch
import timm
import torch
from huggingface_hub.errors import EntryNotFoundError
from torch.nn import functional as F

from selfvitmil.encoder import load_encoder, save_encoder
from selfvitmil.encoder.network import build_encoder
from selfvitmil.encoder.registry import KNOWN, by_content, by_folder, by_hub, vit_shape
from selfvitmil.errors import EncoderError

IDS = [known.name for known in KNOWN]
TRANSFORMERS = [known for known in KNOWN if known.form == "transformers"]
# Millions of weights, as LazySlide's registry of models states them.
PUBLISHED_SIZE = {
    "UNI": 303.4, "UNI2-h": 681.4, "Virchow": 631.2, "Virchow2": 631.2, "H-optimus-0": 1130, "H-optimus-1": 1130,
    "Prov-GigaPath": 1130, "Phikon": 85.8, "Phikon-v2": 303.4, "Midnight-12k": 1140, "Hibou-B": 85.7, "Hibou-L": 303.7,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def scrambled(network: Any) -> Any:
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.normal_(std=0.3).add_(0.1)
    return network.eval()


def images(size):
    return torch.randn(2, 3, size, size)


@pytest.mark.parametrize("known", KNOWN, ids=IDS)
def test_networks_have_the_stated_shape_dimension_and_size(known):
    with torch.device("meta"):
        encoder = build_encoder(
            known.architecture, img_size=known.size_px, model_args=known.model_args, layout=known.layout
        )
    assert vit_shape(encoder.backbone) == known.shape
    assert encoder.dim == known.dim
    if known.name in PUBLISHED_SIZE:
        millions = sum(parameter.numel() for parameter in encoder.backbone.parameters()) / 1e6
        assert millions == pytest.approx(PUBLISHED_SIZE[known.name], rel=0.01)


@pytest.mark.slow
def test_the_page_of_encoders_is_up_to_date():
    docs = Path(__file__).parents[2] / "docs"
    code = "import make_encoders_page as m; print(m.page(), end='')"
    found = subprocess.run([sys.executable, "-c", code], cwd=docs, capture_output=True, text=True, check=True)
    assert (docs / "reference" / "encoders.md").read_text(encoding="utf-8") == found.stdout, "run `make docs`"


def test_entries_are_complete_and_distinct():
    assert len({known.name for known in KNOWN}) == len(KNOWN)
    hubs = [hub.lower() for known in KNOWN for hub in known.hub]
    assert len(set(hubs)) == len(hubs)
    for known in KNOWN:
        assert known.licence
        assert known.reference
        assert known.mpp
        assert by_hub(known.hub[0].upper()) is known
        assert by_folder(known.hub[0].split("/")[1]) is known


@pytest.mark.parametrize("known", KNOWN, ids=IDS)
def test_a_folder_named_after_an_encoder_is_recognised_only_if_its_network_fits(known):
    with torch.device("meta"):
        backbone = build_encoder(
            known.architecture, img_size=known.size_px, model_args=known.model_args, layout=known.layout
        ).backbone
        other = build_encoder("vit_tiny_patch16_224").backbone
    assert by_content({}, backbone, known.hub[0].split("/")[1]) is known
    assert by_content({}, other, known.hub[0].split("/")[1]) is None


# ------------------------------------------------------------------------------------------- transformers


def transformers_weights(kind, width, depth, patch, grid, registers, gated):
    """Random weights with the names and shapes of transformers' ViTModel (kind vit) and Dinov2Model (kind dinov2)."""
    shapes = {
        "embeddings.cls_token": (1, 1, width),
        "embeddings.position_embeddings": (1, 1 + grid * grid, width),
        "embeddings.patch_embeddings.projection.weight": (width, 3, patch, patch),
        "embeddings.patch_embeddings.projection.bias": (width,),
        "layernorm.weight": (width,),
        "layernorm.bias": (width,),
    }
    if kind == "vit":
        shapes |= {"pooler.dense.weight": (width, width), "pooler.dense.bias": (width,)}
    else:
        shapes |= {"embeddings.mask_token": (1, width)}
    if registers:
        shapes["embeddings.register_tokens"] = (1, registers, width)
    hidden = 2 * width
    wide, narrow = ("weights_in", "weights_out") if gated else ("fc1", "fc2")
    wide, narrow = ("intermediate.dense", "output.dense") if kind == "vit" else (f"mlp.{wide}", f"mlp.{narrow}")
    norms = ("layernorm_before", "layernorm_after") if kind == "vit" else ("norm1", "norm2")
    for block in range(depth):
        stem = f"encoder.layer.{block}."
        for part in ("attention.query", "attention.key", "attention.value", "output.dense"):
            shapes |= {f"{stem}attention.{part}.weight": (width, width), f"{stem}attention.{part}.bias": (width,)}
        for norm in norms:
            shapes |= {f"{stem}{norm}.weight": (width,), f"{stem}{norm}.bias": (width,)}
        rows = 2 * hidden if gated else hidden
        shapes |= {f"{stem}{wide}.weight": (rows, width), f"{stem}{wide}.bias": (rows,)}
        shapes |= {f"{stem}{narrow}.weight": (width, hidden), f"{stem}{narrow}.bias": (width,)}
        if kind == "dinov2":
            shapes |= {f"{stem}layer_scale{number}.lambda1": (width,) for number in (1, 2)}
    return {key: torch.randn(shape) * 0.3 + 0.1 for key, shape in shapes.items()}


def transformers_tokens(kind, w, images_B3HW, heads, gated):
    """The forward pass of those models, written from their weights by name; attention is one head at a time."""
    patch = w["embeddings.patch_embeddings.projection.weight"].shape[2]
    patches = F.conv2d(
        images_B3HW,
        w["embeddings.patch_embeddings.projection.weight"],
        w["embeddings.patch_embeddings.projection.bias"],
        stride=patch,
    )
    x = patches.flatten(2).transpose(1, 2)
    batch, _, width = x.shape
    x = torch.cat([w["embeddings.cls_token"].expand(batch, -1, -1), x], dim=1) + w["embeddings.position_embeddings"]
    if "embeddings.register_tokens" in w:
        registers = w["embeddings.register_tokens"].expand(batch, -1, -1)
        x = torch.cat([x[:, :1], registers, x[:, 1:]], dim=1)

    def norm(tokens, name):
        return F.layer_norm(tokens, (width,), w[f"{name}.weight"], w[f"{name}.bias"], eps=1e-6)

    def linear(tokens, name):
        return F.linear(tokens, w[f"{name}.weight"], w[f"{name}.bias"])

    first, second = ("layernorm_before", "layernorm_after") if kind == "vit" else ("norm1", "norm2")
    depth = len({key.split(".")[2] for key in w if key.startswith("encoder.")})
    for block in range(depth):
        stem = f"encoder.layer.{block}"
        ones = torch.ones(width)
        scale = [w.get(f"{stem}.layer_scale{number}.lambda1", ones) for number in (1, 2)]
        inputs = norm(x, f"{stem}.{first}")
        q, k, v = (linear(inputs, f"{stem}.attention.attention.{part}") for part in ("query", "key", "value"))
        size = width // heads
        parts = []
        for head in range(heads):
            a, b, c = (each[..., head * size : (head + 1) * size] for each in (q, k, v))
            parts.append((a @ b.transpose(1, 2) / math.sqrt(size)).softmax(dim=-1) @ c)
        x = x + scale[0] * linear(torch.cat(parts, dim=-1), f"{stem}.attention.output.dense")
        inputs = norm(x, f"{stem}.{second}")
        if kind == "vit":
            inputs = linear(F.gelu(linear(inputs, f"{stem}.intermediate.dense")), f"{stem}.output.dense")
        elif gated:
            gate, value = linear(inputs, f"{stem}.mlp.weights_in").chunk(2, dim=-1)
            inputs = linear(F.silu(gate) * value, f"{stem}.mlp.weights_out")
        else:
            inputs = linear(F.gelu(linear(inputs, f"{stem}.mlp.fc1")), f"{stem}.mlp.fc2")
        x = x + scale[1] * inputs
    return norm(x, "layernorm")


@pytest.mark.parametrize("known", TRANSFORMERS, ids=[known.name for known in TRANSFORMERS])
@pytest.mark.parametrize("way", ["hub", "folder", "prefixed file"])
def test_transformers_weights_give_the_embeddings_of_their_own_forward_pass(tmp_path, monkeypatch, known, way):
    """Small twins: the published kind of layers, tokens and names, at a tenth of the width."""
    kind = "vit" if known.name == "Phikon" else "dinov2"
    _, _, patch, registers, gated = known.shape
    # A grid of 4: with 3, positions without the class token could also be those of a grid of 2 with all tokens.
    weights = transformers_weights(kind, 128, 2, patch, 4, registers, gated)
    folder = tmp_path / "twin"
    folder.mkdir()
    config = {"model_type": kind, "hidden_size": 128, "num_attention_heads": 4, "patch_size": patch}
    (folder / "config.json").write_text(json.dumps(config))
    mean, std = known.normalization
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_mean": mean, "image_std": std}))
    safetensors.torch.save_file(weights, folder / "model.safetensors")

    def download(repository, filename, **_):
        assert repository == known.hub[0]
        if not (folder / filename).exists():
            raise EntryNotFoundError(filename)
        return str(folder / filename)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    if way == "hub":
        encoder = load_encoder(known.hub[0])
        assert (encoder.config.layout, encoder.config.size_px) == (known.layout, known.size_px)
    elif way == "folder":
        encoder = load_encoder(folder, layout=known.layout)
    else:
        file = tmp_path / "checkpoint.pth"
        torch.save({"state_dict": {f"backbone.{key}": value for key, value in weights.items()}}, file)
        encoder = load_encoder(file, layout=known.layout, num_heads=4, mean=mean, std=std)
    assert (encoder.config.mean, encoder.config.std) == known.normalization

    pixels = images(4 * patch)
    with torch.no_grad():
        tokens = transformers_tokens(kind, weights, pixels, 4, gated)
        expected = tokens[:, 0]
        if known.layout == "cls+patchmean":
            expected = torch.cat([expected, tokens[:, 1 + registers :].mean(dim=1)], dim=1)
        torch.testing.assert_close(encoder(pixels), expected, atol=2e-3, rtol=2e-3)
        save_encoder(tmp_path / "copy", encoder)
        torch.testing.assert_close(load_encoder(tmp_path / "copy")(pixels), encoder(pixels))


def test_unknown_transformers_weights_are_refused(tmp_path):
    weights = transformers_weights("dinov2", 128, 2, 8, 3, 0, False)
    weights["encoder.layer.0.adapter.weight"] = torch.zeros(3)
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 2}))
    safetensors.torch.save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(EncoderError, match="adapter") as caught:
        load_encoder(tmp_path, layout="cls")
    assert caught.value.code == "weights-mismatch"


# ------------------------------------------------------------------------------------------- CONCH


def test_conch_pools_tokens_by_its_query(tmp_path):
    trunk = scrambled(
        timm.create_model("vit_base_patch16_224", num_classes=0, img_size=32, embed_dim=64, depth=2, num_heads=4)
    )
    state = {f"visual.trunk.{key}": value for key, value in trunk.state_dict().items()}
    pool = {
        "query": (1, 512), "attn.q_proj_weight": (512, 512), "attn.k_proj_weight": (512, 64),
        "attn.v_proj_weight": (512, 64), "attn.in_proj_bias": (1536,), "attn.out_proj.weight": (512, 512),
        "attn.out_proj.bias": (512,), "ln_q.weight": (512,), "ln_q.bias": (512,), "ln_k.weight": (64,),
        "ln_k.bias": (64,),
    }  # fmt: skip
    w = {key: torch.randn(shape) * 0.1 for key, shape in pool.items()}
    last = {"weight": torch.randn(512), "bias": torch.randn(512)}
    state |= {f"visual.attn_pool_contrast.{key}": value for key, value in w.items()}
    state |= {f"visual.ln_contrast.{key}": value for key, value in last.items()}
    state |= {
        "visual.proj_contrast": torch.zeros(512, 512),
        "text.cls_emb": torch.zeros(3),
        "logit_scale": torch.ones(()),
    }
    (tmp_path / "CONCH").mkdir()
    torch.save(state, tmp_path / "CONCH" / "pytorch_model.bin")
    pixels = images(32)
    with torch.no_grad():
        keys = F.layer_norm(trunk.forward_features(pixels), (64,), w["ln_k.weight"], w["ln_k.bias"])
        query = F.layer_norm(w["query"], (512,), w["ln_q.weight"], w["ln_q.bias"])
        bq, bk, bv = w["attn.in_proj_bias"].chunk(3)
        q, k, v = (
            query @ w["attn.q_proj_weight"].T + bq,
            keys @ w["attn.k_proj_weight"].T + bk,
            keys @ w["attn.v_proj_weight"].T + bv,
        )
        heads = []
        for head in range(8):
            part = slice(64 * head, 64 * (head + 1))
            attention = (k[..., part] @ q[0, part] / 8).softmax(dim=1)
            heads.append((attention[..., None] * v[..., part]).sum(dim=1))
        pooled = torch.cat(heads, dim=1) @ w["attn.out_proj.weight"].T + w["attn.out_proj.bias"]
        expected = F.layer_norm(pooled, (512,), last["weight"], last["bias"])
    for source in (tmp_path / "CONCH", tmp_path / "CONCH" / "pytorch_model.bin"):
        encoder = load_encoder(source, num_heads=4)
        assert (encoder.dim, encoder.config.size_px, encoder.config.layout) == (512, 448, "pooled")
        with torch.no_grad():
            torch.testing.assert_close(encoder(pixels), expected, atol=1e-4, rtol=1e-4)
    save_encoder(tmp_path / "copy", encoder)
    with torch.no_grad():
        torch.testing.assert_close(load_encoder(tmp_path / "copy")(pixels), expected, atol=1e-4, rtol=1e-4)


# ------------------------------------------------------------------------------------------- missing files


@pytest.mark.parametrize("known", KNOWN, ids=IDS)
def test_missing_files_are_named_with_the_page_that_has_them(tmp_path, monkeypatch, known):
    asked = []
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *args, **_: asked.append(args))
    folder = tmp_path / known.hub[0].split("/")[1]
    folder.mkdir()
    for code in ("no-encoder-config", "no-weights"):
        with pytest.raises(EncoderError, match=known.page.replace(".", r"\.")) as caught:
            load_encoder(folder)
        assert caught.value.code == code
        (folder / "config.json").write_text(json.dumps({"architecture": "vit_tiny_patch16_224"}))
    assert asked == []  # a folder never asks the hub
