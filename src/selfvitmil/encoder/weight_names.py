"""Names of weights: those of other libraries' ViTs as timm names them. Tensors by name come in and go out."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

TRANSFORMERS_ANCHOR = "embeddings.patch_embeddings.projection.weight"
CONCH_ANCHOR = "visual.attn_pool_contrast.query"

# Of a ViT and a DINOv2 of the transformers library; the first that fits counts.
_TRANSFORMERS = (
    (r"^embeddings\.cls_token$", "cls_token"),
    (r"^embeddings\.register_tokens$", "reg_token"),
    (r"^embeddings\.position_embeddings$", "pos_embed"),
    (r"^embeddings\.patch_embeddings\.projection\.", "patch_embed.proj."),
    (r"^layernorm\.", "norm."),
    (r"^encoder\.layer\.(\d+)\.(?:layernorm_before|norm1)\.", r"blocks.\1.norm1."),
    (r"^encoder\.layer\.(\d+)\.(?:layernorm_after|norm2)\.", r"blocks.\1.norm2."),
    (r"^encoder\.layer\.(\d+)\.attention\.attention\.(query|key|value)\.", r"blocks.\1.attn.\2."),
    (r"^encoder\.layer\.(\d+)\.attention\.output\.dense\.", r"blocks.\1.attn.proj."),
    (r"^encoder\.layer\.(\d+)\.(?:intermediate\.dense|mlp\.fc1|mlp\.weights_in)\.", r"blocks.\1.mlp.fc1."),
    (r"^encoder\.layer\.(\d+)\.(?:output\.dense|mlp\.fc2|mlp\.weights_out)\.", r"blocks.\1.mlp.fc2."),
    (r"^encoder\.layer\.(\d+)\.layer_scale([12])\.lambda1$", r"blocks.\1.ls\2.gamma"),
)


def is_transformers(state: Mapping[str, Any]) -> bool:
    """Return whether weights have the names of the transformers library."""
    return any(f".{key}".endswith(f".{TRANSFORMERS_ANCHOR}") for key in state)


def from_transformers(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the weights of a ViT or DINOv2 of the transformers library under timm's names.

    timm has one matrix for query, key and value. With registers, timm gives no position to the class token: that of the
    published weights is added to the token itself, which is the same sum. Pooler and mask token are left out.
    """
    prefixes = {key.removesuffix(TRANSFORMERS_ANCHOR) for key in state if f".{key}".endswith(f".{TRANSFORMERS_ANCHOR}")}
    prefix = min(prefixes, default="")
    named: dict[str, Tensor] = {}
    for key, value in state.items():
        if not key.startswith(prefix) or not isinstance(value, Tensor):
            continue
        own = key.removeprefix(prefix)
        if own.startswith("pooler.") or own == "embeddings.mask_token":
            continue
        fitting = (re.sub(pattern, new, own) for pattern, new in _TRANSFORMERS if re.search(pattern, own))
        named[next(fitting, own)] = value  # an unknown name is refused when the weights are loaded
    for key in [key for key in named if ".attn.query." in key]:
        parts = [key.replace(".query.", f".{part}.") for part in ("query", "key", "value")]
        if all(part in named for part in parts):
            named[key.replace(".query.", ".qkv.")] = torch.cat([named.pop(part) for part in parts])
    if "reg_token" in named and "cls_token" in named and named.get("pos_embed", torch.empty(0)).ndim == 3:
        named["cls_token"] = named["cls_token"] + named["pos_embed"][:, :1]
        named["pos_embed"] = named["pos_embed"][:, 1:]
    return named


def from_conch(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the weights of CONCH's vision tower: without its text side, its captioning and its projection to text."""
    parts = ("trunk.", "attn_pool_contrast.", "ln_contrast.")
    own = {key.removeprefix("visual."): value for key, value in state.items() if key.startswith("visual.")}
    return {key: value for key, value in own.items() if key.startswith(parts) and isinstance(value, Tensor)}
