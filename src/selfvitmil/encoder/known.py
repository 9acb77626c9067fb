"""Published pathology encoders: the embedding that is customary for each, and how a copy of one is recognised.

By its hub name an encoder is known at once. A folder that was carried to a machine without internet has lost that name:
there the tag in its config.json, or the shape of its network, tells. The shapes below are of networks with gated MLPs
(SwiGLU), which sets them apart from general ViTs of the same width, depth and patch.

Layouts are those of the owners' model cards and of TRIDENT: the class token, for Virchow and Virchow2 also the mean of
the patch tokens without the registers. CONCH and Phikon-v2 are not in timm's form and cannot be loaded here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from selfvitmil.settings import TokenLayout

MEAN_TOLERANCE = 1e-3
"""Largest difference of channel means that counts as the same normalization."""


@dataclass(frozen=True)
class KnownEncoder:
    """One published encoder."""

    name: str
    hub: tuple[str, ...]
    """Its names on the Hugging Face hub, in lower case."""
    layout: TokenLayout
    tag: str | None = None
    """`pretrained_cfg.tag` of its config.json."""
    shape: tuple[int, int, int, int] | None = None
    """Width, blocks, patch edge in pixels and registers of its network, whose MLPs are gated."""
    mean: tuple[float, float, float] | None = None
    """Mean of the RGB channels, where others have the same shape."""


KNOWN = (
    KnownEncoder("UNI", ("mahmoodlab/uni",), "cls", tag="uni_mass100k"),
    KnownEncoder("UNI2-h", ("mahmoodlab/uni2-h",), "cls", shape=(1536, 24, 14, 8)),
    KnownEncoder("Prov-GigaPath", ("prov-gigapath/prov-gigapath",), "cls", shape=(1536, 40, 16, 0)),
    KnownEncoder(
        "H-optimus",
        ("bioptimus/h-optimus-0", "bioptimus/h-optimus-1"),
        "cls",
        shape=(1536, 40, 14, 4),  # DINOv2's giant has it too
        mean=(0.707223, 0.578729, 0.703617),
    ),
    KnownEncoder("Virchow", ("paige-ai/virchow",), "cls+patchmean", shape=(1280, 32, 14, 0)),
    KnownEncoder("Virchow2", ("paige-ai/virchow2",), "cls+patchmean", tag="virchow_v2", shape=(1280, 32, 14, 4)),
    KnownEncoder("Phikon", ("1aurent/vit_base_patch16_224.owkin_pancancer",), "cls", tag="owkin_pancancer"),
)


def by_hub_name(repository: str) -> KnownEncoder | None:
    """The encoder that the hub has under this name."""
    return next((known for known in KNOWN if repository.lower() in known.hub), None)


def by_content(described: Mapping[str, Any], backbone: Any) -> KnownEncoder | None:
    """The encoder that timm's description of the weights (`pretrained_cfg`), or the network itself, tells."""
    tag, mean, shape = described.get("tag"), described.get("mean"), gated_shape(backbone)
    for known in KNOWN:
        if known.tag is not None and known.tag == tag:
            return known
        if known.shape is not None and known.shape == shape and _same_mean(known.mean, mean):
            return known
    return None


def gated_shape(backbone: Any) -> tuple[int, int, int, int] | None:
    """Width, blocks, patch edge and registers of a ViT whose MLPs are gated; None of any other network."""
    try:
        mlp = backbone.blocks[0].mlp
        if mlp.fc1.out_features != 2 * mlp.fc2.in_features:
            return None
        return backbone.embed_dim, len(backbone.blocks), backbone.patch_embed.patch_size[0], backbone.num_reg_tokens
    except (AttributeError, IndexError, TypeError):
        return None


def _same_mean(known: tuple[float, ...] | None, found: Any) -> bool:
    if known is None:
        return True
    return found is not None and max(abs(a - b) for a, b in zip(known, found, strict=True)) < MEAN_TOLERANCE
