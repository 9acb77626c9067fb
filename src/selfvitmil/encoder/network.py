"""The network of an encoder, what it is for, and how its tokens become the embedding of a tile.

Normalized images or uint8 tiles (B, 3, H, W) come in, embeddings (B, dim) go out; nothing here reads or writes files.
Only `pretrained=True` uses the internet. As in DINO, tokens of inner blocks go through the final norm too; only the
tokens that are part of the embedding do, since norms work on each token alone.

Axes in names: B images, 3 is RGB, H and W height and width, P prefix tokens (class, registers), L patches, D width.
"""

from __future__ import annotations

import difflib
import hashlib
import math
import os
import pickle
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import timm
import torch
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
from numpy.typing import NDArray
from pydantic import Field, JsonValue, PositiveFloat, ValidationError
from timm.layers.norm import LayerNorm2d
from timm.layers.patch_embed import PatchEmbed
from timm.models import is_model_in_modules, register_model
from torch import Tensor, nn

from selfvitmil.errors import EncoderError
from selfvitmil.runtime.device import evaluation_mode
from selfvitmil.settings import Settings, TokenLayout
from selfvitmil.store.files import hash_of

LAYOUTS: tuple[TokenLayout, ...] = get_args(TokenLayout)
"""Embeddings composed of tokens; the first is the default. `EmbedSettings.layout` says what they are."""
POOLED = "pooled"
"""The network's own pooling: the layout of networks without a class token, such as ResNets."""
Layout = TokenLayout | Literal["pooled"]
MPP_TOLERANCE = 0.05
"""Relative difference of microns per pixel that counts as the same scale."""
MODEL_ARGS = (
    "img_size", "patch_size", "in_chans", "num_classes", "global_pool", "embed_dim", "embed_dims", "dims", "depth",
    "depths", "num_heads", "heads", "mlp_ratio", "mlp_ratios", "qkv_bias", "qkv_fused", "qk_norm", "proj_bias",
    "init_values", "class_token", "pos_embed", "no_embed_class", "reg_tokens", "num_reg_tokens", "pre_norm",
    "final_norm", "fc_norm", "use_fc_norm", "pool_include_prefix", "dynamic_img_size", "dynamic_img_pad", "drop_rate",
    "pos_drop_rate", "patch_drop_rate", "proj_drop_rate", "attn_drop_rate", "drop_path_rate", "norm_layer",
    "act_layer", "mlp_layer", "swiglu_mlp", "swiglu_align_to", "scale_mlp", "scale_attn_norm", "scale_mlp_norm",
    "scale_attn_inner", "attn_type", "window_size", "strict_img_size", "use_abs_pos_emb", "use_rot_pos_emb",
    "rope_type", "rope_temperature", "rope_rotate_half", "rope_grid_offset", "rope_grid_indexing", "ref_feat_shape",
    "use_post_norm", "use_pre_transformer_norm", "use_post_transformer_norm", "layers", "stem_type", "stem_width",
    "cardinality", "base_width", "avg_down",
)  # fmt: skip
"""Arguments of a network that a config.json may set: sizes and kinds of its layers. Arguments by which timm loads files
(`checkpoint_path`, `pretrained_cfg`, `cache_dir`, ...) or wraps the network are not among them."""
LARGEST_SIZE_PX = 8192
"""Largest edge of an encoder's tiles."""
LARGEST_ARG, LARGEST_DEPTH = 65_536, 512
"""Largest number among those arguments, and among those that count layers; real networks have tenths of these."""
Images = NDArray[np.uint8] | Tensor | Sequence[Any]
"""A uint8 array or tensor (N, H, W, 3), or a sequence of uint8 (H, W, 3) arrays or PIL images of one size."""
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class EncoderConfig(Settings):
    """What an encoder is and which tiles it is for. None means unknown."""

    architecture: str
    """timm's name of the network, without the tag of its weights."""
    model_args: dict[str, JsonValue] = Field(default_factory=dict)
    """Arguments of that network beyond timm's defaults."""
    layout: Layout = "cls4+patchmean"
    """Which tokens make up the embedding of a tile (see `embed_tokens`)."""
    mean: tuple[float, float, float] = IMAGENET_MEAN
    """Mean of the RGB channels, white = 1, that is subtracted from a tile."""
    std: tuple[PositiveFloat, PositiveFloat, PositiveFloat] = IMAGENET_STD
    """What a tile is then divided by, per channel."""
    mpp: float | None = Field(default=None, gt=0)
    """Microns per pixel of the tiles."""
    size_px: int = Field(default=224, gt=0, le=LARGEST_SIZE_PX)
    """Edge of the tiles."""
    stain: Literal["slide", "tile", "none"] | None = None
    """How the stain of the tiles was normalized."""
    trained_on: str = "unknown"
    """`train split of ...`, `transductive` (test slides seen, without labels), `imagenet`, `nothing` or `unknown`."""
    provenance: dict[str, JsonValue] = Field(default_factory=dict)
    """Source, preset, method, steps, hash of the settings, version of the tool; neither paths nor times."""


class Encoder(nn.Module):
    """A network that turns a tile into an embedding.

    >>> encoder = Encoder.load("study/encoders/dino")
    >>> encoder.embed(images).shape                     # images: uint8 (N, H, W, 3)
    torch.Size([N, encoder.dim])

    `config` says which tiles it is for (`size_px` pixels at `mpp` microns per pixel, stain normalization), how pixels
    are normalized and which tokens make up the embedding. The default `cls4+patchmean` is that of Self-ViT-MIL (Gul,
    Cetin et al., SPIE Medical Imaging 2022): the class tokens of the last 4 blocks, as in DINO's linear evaluation
    (Caron et al. 2021, arXiv 2104.14294), and the mean patch token.
    """

    scale_311: Tensor
    shift_311: Tensor

    def __init__(self, backbone: nn.Module, config: EncoderConfig, warnings: tuple[str, ...] = ()):
        super().__init__()
        _check_layout(backbone, config.layout)
        self.backbone: Any = backbone
        self.config = config
        self.warnings = warnings
        """What had to be assumed while loading."""
        self.keeps_colours = False
        """Whether it was published, for colours as scanned: then `none` is the default of `stain.method`."""
        self._is_new = True
        mean, std = (torch.tensor(values, dtype=torch.float64).reshape(3, 1, 1) for values in (config.mean, config.std))
        self.register_buffer("scale_311", (1 / (255 * std)).float(), persistent=False)
        self.register_buffer("shift_311", (-mean / std).float(), persistent=False)

    @classmethod
    def load(cls, source: str | Path, **options: Any) -> Encoder:
        """Load an encoder in evaluation mode, on the CPU.

        Args:
            source: A folder of this package, a checkpoint file, a timm name or a Hugging Face hub name.
            options: Those of `selfvitmil.encoder.load_encoder`, such as `layout="cls"` or `mpp=0.5`.

        Raises:
            EncoderError: Files are missing, damaged or unsafe, weights do not fit, or the hub cannot be reached.
        """
        from selfvitmil.encoder.files import load_encoder  # files.py imports this module

        return load_encoder(source, **options)

    @property
    def dim(self) -> int:
        """Length of an embedding: 5 times the width of a ViT with the default layout."""
        if self.config.layout == POOLED:
            return self.backbone.head_hidden_size
        blocks = class_token_blocks(self.config.layout, len(self.backbone.blocks))
        return (len(blocks) + self.config.layout.endswith("mean")) * self.backbone.num_features

    def normalize(self, tiles_B3HW: Tensor) -> Tensor:
        """Return uint8 tiles (B, 3, H, W) as the float32 images that the network takes. Raises EncoderError."""
        if tiles_B3HW.dtype != torch.uint8:
            raise EncoderError(
                f"tiles are {tiles_B3HW.dtype}", "pixels are expected as uint8, 0 to 255", code="not-uint8"
            )
        return torch.addcmul(self.shift_311, tiles_B3HW.float(), self.scale_311)

    def encode(self, tiles_B3HW: Tensor) -> Tensor:
        """Return the embeddings (B, dim) of uint8 tiles (B, 3, H, W) on the encoder's device."""
        return self(self.normalize(tiles_B3HW))

    def embed(self, images: Images, *, batch_size: int = 64, device: str | torch.device | None = None) -> Tensor:
        """Return the embeddings (N, dim) of images as a float32 tensor on the CPU.

        Pixels are normalized here; stains are not (see `selfvitmil.stain`). Runs in evaluation mode, without gradients.

        Args:
            images: An array or tensor of RGB images, (N, H, W, 3) or (N, 3, H, W), or a sequence of such images or of
                PIL images: uint8, or floats from 0 to 1. Each has `config.size_px` x `config.size_px` pixels at
                `config.mpp` microns per pixel.
            batch_size: Images per forward pass.
            device: Moves the encoder there, for instance `"cuda"`; None leaves it where it is.

        Raises:
            EncoderError: Images have another dtype or size.
        """
        check_sequence(images)
        if batch_size < 1:
            raise EncoderError(f"batch_size={batch_size}", "it must be positive", code="invalid-batch-size")
        if device is not None:
            self.to(device)
        parts = [torch.empty(0, self.dim)]
        with evaluation_mode(self), torch.no_grad():
            for start in range(0, len(images), batch_size):
                tiles_B3HW = to_tiles(images[start : start + batch_size], self.config.size_px)
                parts.append(self.encode(tiles_B3HW.to(self.scale_311.device)).float().cpu())
        return torch.cat(parts)

    def forward(self, images_B3HW: Tensor) -> Tensor:
        """Return the embeddings (B, dim) of normalized images (B, 3, H, W), or of uint8 images, also (B, H, W, 3).

        Floats are taken as normalized by `normalize`; a warning says so where they look like pixels from 0 to 1. For
        weights in half precision call `encoder.backbone.bfloat16()`: then mean and std stay exact.
        """
        if images_B3HW.dtype == torch.uint8:
            last = images_B3HW.shape[-1] == 3 and images_B3HW.shape[1] != 3
            images_B3HW = self.normalize(images_B3HW.permute(0, 3, 1, 2) if last else images_B3HW)
        elif self._is_new and not torch.compiler.is_compiling():  # once: on a GPU it waits for the images
            self._is_new = False
            if _looks_like_pixels(images_B3HW):
                warnings.warn(
                    "these images have values from 0 to 1 and are taken as normalized already: give uint8 images, or "
                    "call encoder.embed(images), which normalizes them",
                    stacklevel=2,
                )
        images_B3HW = images_B3HW.to(next(self.backbone.parameters()).dtype)
        if self.config.layout == POOLED:
            return self.backbone(images_B3HW)
        return embed_tokens(self.backbone, images_B3HW, self.config.layout)

    def identity(self) -> str:
        """Return a hash of all that embeddings depend on: weights, architecture, layout, mean and std."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.backbone.state_dict().items()):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
        info = self.config.model_dump(mode="json", include={"architecture", "model_args", "layout", "mean", "std"})
        return hash_of(digest.hexdigest(), info)


# ---------------------------------------------------------------------------------------------------- embeddings


def embed_tokens(vit: Any, images_B3HW: Tensor, layout: str = "cls4+patchmean") -> Tensor:
    """Return the embeddings (B, k * D) of normalized images (B, 3, H, W) from the tokens of a timm ViT or an `Encoder`.

    `cls4+patchmean` is [cls of the last 4 blocks, first to last | mean of the last block's patch tokens], each token
    after the final norm; `cls4+clsmean` ends in the mean of those 4 instead; `cls4spread` takes 4 blocks spread evenly
    over the depth, the last one among them. Registers never count as patches.
    """
    backbone = vit.backbone if isinstance(vit, Encoder) else vit
    _check_layout(backbone, layout)
    _check_images(backbone, images_B3HW)
    outputs = backbone.forward_intermediates(
        images_B3HW,
        indices=class_token_blocks(layout, len(backbone.blocks)),
        return_prefix_tokens=True,
        output_fmt="NLC",
        intermediates_only=True,
    )
    # Networks that pool by averaging keep their final norm behind the pooling, under another name.
    norm = backbone.fc_norm if isinstance(backbone.norm, nn.Identity) else backbone.norm
    parts = [norm(prefix_BPD[:, 0]) for _, prefix_BPD in outputs]
    if layout.endswith("+patchmean"):
        patches_BLD = outputs[-1][0]
        parts.append(norm(patches_BLD).mean(dim=1))
    elif layout.endswith("+clsmean"):
        parts.append(torch.stack(parts).mean(dim=0))
    return torch.cat(parts, dim=1)


def patch_product(images_B3HW: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return patch tokens (B, H, W, D): a convolution whose windows do not overlap, as one matrix product."""
    batch, _, height, width = images_B3HW.shape
    p, q = weight.shape[2:]
    patches = images_B3HW.reshape(batch, 3, height // p, p, width // q, q).permute(0, 2, 4, 1, 3, 5)
    return nn.functional.linear(patches.flatten(3), weight.flatten(1), bias)


def class_token_blocks(layout: str, depth: int) -> list[int]:
    """Return the blocks (from 0, ascending, always with the last) whose class tokens a layout takes."""
    kind = layout.partition("+")[0]
    if kind == "cls4spread":
        return [math.ceil(part * depth / 4) - 1 for part in (1, 2, 3, 4)]
    return list(range(depth - (4 if kind == "cls4" else 1), depth))


def has_class_token(backbone: nn.Module) -> bool:
    """Return whether this is a ViT with a class token whose tokens are accessible."""
    return getattr(backbone, "cls_token", None) is not None and hasattr(backbone, "forward_intermediates")


def _check_layout(backbone: nn.Module, layout: str) -> None:
    if layout not in (*LAYOUTS, POOLED):
        raise EncoderError(
            f"unknown layout {layout!r}", how=f"Choose one of {', '.join((*LAYOUTS, POOLED))}", code="unknown-layout"
        )
    if layout == POOLED and has_class_token(backbone):
        raise EncoderError(
            f"layout {POOLED!r} is for networks without a class token",
            how="Use 'cls' or 'cls4'",
            code="layout-without-class-token",
        )
    if layout != POOLED and not has_class_token(backbone):
        kind = type(backbone).__name__
        how = f"Leave embed.layout unset: its own layout is {POOLED!r}"
        raise EncoderError(
            f"layout {layout!r} needs a class token", f"this {kind} has none", how, code="layout-needs-class-token"
        )
    if layout.startswith("cls4") and len(getattr(backbone, "blocks", ())) < 4:
        raise EncoderError(
            f"layout {layout!r} needs 4 blocks",
            "this network has fewer",
            "Use 'cls+patchmean'",
            code="layout-needs-4-blocks",
        )


def _check_images(backbone: Any, images_B3HW: Tensor) -> None:
    if images_B3HW.ndim != 4 or images_B3HW.shape[1] != 3 or not images_B3HW.is_floating_point():
        raise EncoderError(
            f"images are {images_B3HW.dtype} of shape {tuple(images_B3HW.shape)}",
            "normalized float images (B, 3, H, W) are expected",
            "For uint8 tiles call Encoder.encode",
            code="not-normalized-images",
        )
    height, width = images_B3HW.shape[2:]
    patch, native = backbone.patch_embed.patch_size, backbone.patch_embed.img_size
    if height % patch[0] or width % patch[1]:
        raise EncoderError(
            f"images of {width} x {height} px do not divide into patches of {patch[1]} x {patch[0]} px",
            code="patches-do-not-divide",
        )
    if not getattr(backbone, "dynamic_img_size", False) and native is not None and (height, width) != tuple(native):
        raise EncoderError(
            f"images have {width} x {height} px",
            f"the network takes {native[1]} x {native[0]} only",
            code="image-size-mismatch",
        )


def check_fits(config: EncoderConfig, tile_mpp: float, tile_size_px: int, stain_method: str) -> None:
    """Raise EncoderError when tiles differ from those that the encoder is for; what is unknown fits."""
    name = f"encoder {config.architecture}"
    if config.mpp is not None and abs(tile_mpp / config.mpp - 1) > MPP_TOLERANCE:
        raise EncoderError(
            f"{name} is for {config.mpp:g} microns per pixel, these tiles have {tile_mpp:g}",
            "cells would have another size than in its training",
            f"Tile with --tile.mpp {config.mpp:g}, or choose another encoder",
            code="encoder-mpp-mismatch",
        )
    if tile_size_px != config.size_px:
        raise EncoderError(
            f"{name} is for tiles of {config.size_px} px, these have {tile_size_px}",
            "positions within a tile would mean something else",
            f"Tile with --tile.size-px {config.size_px}, or choose another encoder",
            code="encoder-size-mismatch",
        )
    if config.stain is not None and stain_method != config.stain:
        raise EncoderError(
            f"{name} is for stain method {config.stain!r}, these tiles have {stain_method!r}",
            "colours would differ from those of its training",
            f"Use --stain.method {config.stain}, or choose another encoder",
            code="encoder-stain-mismatch",
        )


# ---------------------------------------------------------------------------------------------------- images


def check_sequence(images: Images) -> None:
    """Raise EncoderError for a single image where several are expected."""
    if getattr(images, "ndim", 4) != 4 or not hasattr(images, "__len__"):
        shape = tuple(getattr(images, "shape", ()))
        raise EncoderError(
            f"{type(images).__name__}{f' of shape {shape}' if shape else ''} is not a batch of images",
            "an array (N, H, W, 3) or a list of images is expected",
            "For one image pass [image]",
            code="not-a-batch",
        )


_RANGE_OF_PIXELS = 0.5
"""Images from 0 to 1 that differ by more than this are hardly normalized ones: those have negative values."""


def _looks_like_pixels(images: Tensor) -> bool:
    """Return whether all values lie from 0 to 1 and spread over that range."""
    if not images.numel():
        return False
    least, most = images.aminmax()
    return bool((least >= 0) & (most <= 1) & (most - least > _RANGE_OF_PIXELS))


def to_tiles(images: Iterable[Any], size_px: int) -> Tensor:
    """Return RGB images of `size_px` x `size_px` pixels as a uint8 tensor (B, 3, H, W).

    PIL images are converted to RGB. Raises EncoderError for another dtype, shape or size.
    """
    return torch.stack([_to_tile(image, size_px) for image in images])


def _to_tile(image: Any, size_px: int) -> Tensor:
    if hasattr(image, "convert") and hasattr(image, "getbands"):
        image = image.convert("RGB")
    pixels = image if isinstance(image, Tensor) else torch.from_numpy(np.array(image))
    if pixels.is_floating_point() and pixels.numel() and pixels.min() >= 0 and pixels.max() <= 1:
        pixels = (255 * pixels).round().to(torch.uint8)
    if pixels.dtype != torch.uint8:
        raise EncoderError(
            f"image of dtype {pixels.dtype}",
            "pixels are expected as uint8, 0 to 255, or as floats from 0 to 1",
            "Images that are normalized already go to encoder(images)",
            code="not-uint8",
        )
    if tuple(pixels.shape) == (3, size_px, size_px):
        return pixels
    if tuple(pixels.shape) != (size_px, size_px, 3):
        what, why = f"image of shape {tuple(pixels.shape)}", f"the encoder takes ({size_px}, {size_px}, 3)"
        raise EncoderError(
            what, why, "Resize the images to the encoder's tile size and microns per pixel", code="image-size-mismatch"
        )
    return pixels.permute(2, 0, 1)


# ---------------------------------------------------------------------------------------------------- build


@register_model
def resnet18_instancenorm(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """ResNet-18 whose norms are instance norms without weights, as in DSMIL's SimCLR. timm finds it by this name."""
    return timm.create_model("resnet18", pretrained=pretrained, norm_layer=nn.InstanceNorm2d, **kwargs)


class ConvStem(PatchEmbed):
    """Patch embedding by stacked convolutions (Xiao et al. 2021, arXiv 2106.14881) in place of one of stride 16.

    3 x 3 convolutions of stride 2, each followed by a norm and ReLU, halve the image until a position is a patch: four
    of them for patches of 16 px. Their channels double up to the width of the tokens; a 1 x 1 convolution ends it. All
    else (other image sizes, padding, order of the tokens) is that of timm's patch embedding. The paper leaves out one
    transformer block in return, these networks do not, and its base size has a stem with six 3 x 3 convolutions.

    The norm is a layer norm over the channels of each position. The paper has batch norms: with them a tile's embedding
    in training depends on the other tiles of its batch, and the statistics that they store are those of augmented views
    of two sizes. Convolutions have biases, since a layer norm of a linear map alone would not see how dark a place is.
    """

    def __init__(self, *args: Any, patch_size: int = 16, in_chans: int = 3, embed_dim: int = 768, **kwargs: Any):
        if patch_size not in (2, 4, 8, 16, 32):
            raise EncoderError(
                f"a convolutional stem cannot make patches of {patch_size} px",
                "each of its convolutions halves the image",
                "Use 8, 16 or 32 for pretrain.patch_px",
                code="invalid-conv-stem",
            )
        depth = patch_size.bit_length() - 1
        if embed_dim % 2 ** (depth - 1):
            raise EncoderError(
                f"a convolutional stem cannot make tokens of width {embed_dim} for patches of {patch_size} px",
                f"its channels double {depth - 1} times up to that width",
                f"Use a multiple of {2 ** (depth - 1)} for pretrain.width",
                code="invalid-conv-stem",
            )
        super().__init__(*args, patch_size=patch_size, in_chans=in_chans, embed_dim=embed_dim, **kwargs)
        channels = [in_chans, *(embed_dim // 2**halvings for halvings in reversed(range(depth)))]
        layers: list[nn.Module] = []
        for narrow, wide in pairwise(channels):
            layers += [nn.Conv2d(narrow, wide, 3, stride=2, padding=1), LayerNorm2d(wide), nn.ReLU()]
        self.proj: nn.Module = nn.Sequential(*layers, nn.Conv2d(embed_dim, embed_dim, 1))


CONV_STEMS = {f"vit_{size}_patch16_convstem_224": f"vit_{size}_patch16_224" for size in ("tiny", "small", "base")}
"""ViTs with a convolutional stem, and timm's networks of which they are all but the patch embedding."""


def _register_conv_stem(name: str) -> None:
    """Make timm find one of `CONV_STEMS` by its name."""

    def build(pretrained: bool = False, **kwargs: Any) -> nn.Module:
        if pretrained and not kwargs.get("pretrained_cfg"):
            raise EncoderError(
                f"{name}: there are no published weights",
                how="Use it as pretrain.architecture",
                code="no-published-weights",
            )
        overlay = {**(kwargs.pop("pretrained_cfg_overlay", None) or {}), "first_conv": "patch_embed.proj.0"}
        options: dict[str, Any] = {"embed_layer": ConvStem, "pretrained_cfg_overlay": overlay}
        return timm.create_model(CONV_STEMS[name], pretrained=pretrained, **options, **kwargs)

    build.__name__ = name
    register_model(build)


for _name in CONV_STEMS:
    _register_conv_stem(_name)


class MeanColor(nn.Module):
    """Mean and standard deviation of each channel: a baseline of colour without a trained network."""

    num_features = head_hidden_size = 6

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(self.num_features), requires_grad=False)
        self.pretrained_cfg = {"first_conv": None, "classifier": None}

    def forward(self, images_B3HW: Tensor) -> Tensor:
        pixels = images_B3HW.flatten(2)
        return torch.cat([pixels.mean(dim=2), pixels.std(dim=2)], dim=1) * self.gain


@register_model
def mean_color(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """`MeanColor`, by a name that timm finds."""
    del pretrained, kwargs
    return MeanColor()


class QueryPool(nn.Module):
    """Attention of one learned query over the tokens of a ViT; names as in CONCH."""

    def __init__(self, width: int, dim: int, heads: int = 8):
        super().__init__()
        self.query = nn.Parameter(torch.zeros(1, dim))
        self.attn = nn.MultiheadAttention(dim, heads, kdim=width, vdim=width, batch_first=True)
        self.ln_q, self.ln_k = nn.LayerNorm(dim), nn.LayerNorm(width)

    def forward(self, tokens_BLD: Tensor) -> Tensor:
        keys_BLD = self.ln_k(tokens_BLD)
        query_B1K = self.ln_q(self.query).expand(len(tokens_BLD), 1, -1)
        return self.attn(query_B1K, keys_BLD, keys_BLD, need_weights=False)[0][:, 0]


class ConchVision(nn.Module):
    """Vision tower of CONCH (Lu et al. 2024, doi 10.1038/s41591-024-02856-4) without its projection to text.

    A ViT whose tokens, the class token among them, are pooled by a learned query: the embedding that its authors use
    for tasks on images alone.
    """

    num_features = head_hidden_size = 512

    def __init__(self, **trunk: Any):
        super().__init__()
        args = {"img_size": 448, "dynamic_img_size": True, **trunk, "num_classes": 0}
        self.trunk: Any = timm.create_model("vit_base_patch16_224", **args)
        self.attn_pool_contrast = QueryPool(self.trunk.embed_dim, self.num_features)
        self.ln_contrast = nn.LayerNorm(self.num_features)
        self.pretrained_cfg = {"first_conv": "trunk.patch_embed.proj", "classifier": None}

    def forward(self, images_B3HW: Tensor) -> Tensor:
        return self.ln_contrast(self.attn_pool_contrast(self.trunk.forward_features(images_B3HW)))


@register_model
def conch_vision(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """`ConchVision`, by a name that timm finds."""
    del pretrained
    sizes = ("img_size", "patch_size", "embed_dim", "depth", "num_heads")
    return ConchVision(**{key: value for key, value in kwargs.items() if key in sizes})


def check_model_args(name: str, args: Mapping[str, Any]) -> None:
    """Raise EncoderError for arguments in a config.json that are not sizes or kinds of layers."""
    for key, value in args.items():
        if key not in MODEL_ARGS:
            raise EncoderError(
                f"{name}: its config.json sets model_args.{key}",
                "only sizes and kinds of layers may be set there: other arguments load files or change how timm works",
                f"Do not use this file unless you trust its source; without model_args.{key} it can be read",
                code="forbidden-model-args",
            )
        largest = LARGEST_DEPTH if key in ("depth", "depths", "layers") else LARGEST_ARG
        if not _is_plain(value, largest):
            raise EncoderError(
                f"{name}: its config.json sets model_args.{key} to {str(value)[:60]!r}",
                f"numbers up to {largest}, words and short lists of these are expected",
                "Do not use this file unless you trust its source",
                code="invalid-model-args",
            )


def _is_plain(value: Any, largest: int) -> bool:
    if isinstance(value, list | tuple):
        return len(value) <= 16 and all(
            not isinstance(each, list | tuple) and _is_plain(each, largest) for each in value
        )
    if isinstance(value, str):
        return re.fullmatch(r"[A-Za-z0-9_]{0,40}", value) is not None
    return value is None or (isinstance(value, bool | int | float) and abs(value) <= largest)


def build_backbone(
    architecture: str, model_args: Mapping[str, Any] | None = None, *, pretrained: bool = False
) -> nn.Module:
    """Return a timm network without classifier. Raises EncoderError.

    The student of an encoder: build_backbone(config.architecture, {**config.model_args, "drop_path_rate": 0.1}).
    """
    base = architecture.split(".")[0]
    if not timm.is_model(base):
        nearest = difflib.get_close_matches(base, timm.list_models(), n=3)
        raise EncoderError(
            f"{architecture} is neither a file, a folder nor a network that timm knows",
            how=f"Did you mean {' or '.join(nearest)}?" if nearest else "See timm.list_models() for all names",
            code="unknown-architecture",
        )
    try:
        with network_explained(architecture), _forced_weights_only():
            return timm.create_model(architecture, pretrained=pretrained, num_classes=0, **(model_args or {}))
    except (TypeError, AssertionError, KeyError) as error:
        what = f"{architecture}: cannot be built with {dict(model_args or {})}"
        raise EncoderError(
            what, str(error) or type(error).__name__, "Correct model_args", code="invalid-model-args"
        ) from error
    except (RuntimeError, pickle.UnpicklingError) as error:
        reason = str(error).split("\n")[0].rstrip(".")
        how = "See timm.list_pretrained() for names with weights that fit"
        raise EncoderError(
            f"{architecture}: its weights cannot be loaded", reason, how, code="weights-not-loaded"
        ) from error


def build_encoder(
    architecture: str,
    *,
    img_size: int = 224,
    model_args: Mapping[str, Any] | None = None,
    pretrained: bool = False,
    **config: Any,
) -> Encoder:
    """Return an encoder with random weights, or with timm's; `config` gives further fields of its EncoderConfig.

    ViTs interpolate their positions, so that images of other sizes than `img_size` work too. `model_args` makes them
    as small as wanted, for instance {"embed_dim": 96, "depth": 6, "num_heads": 3}.
    """
    base = architecture.split(".")[0]
    args = dict(model_args or {})
    if base in CONV_STEMS or is_model_in_modules(base, ("vision_transformer", "deit", "eva")):
        args = {"img_size": img_size, "dynamic_img_size": True} | args
    backbone: Any = build_backbone(architecture, args, pretrained=pretrained)
    facts: dict[str, Any] = {"size_px": img_size, "trained_on": "nothing", "model_args": args}
    facts["layout"] = LAYOUTS[0] if has_class_token(backbone) else POOLED
    if pretrained:
        facts |= describe_weights(backbone.pretrained_cfg) | {"provenance": {"source": architecture}}
    return Encoder(backbone, make_config(architecture=base, **(facts | config)))


def describe_weights(pretrained_cfg: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields of an EncoderConfig from timm's description of weights."""
    facts: dict[str, Any] = {key: tuple(pretrained_cfg[key]) for key in ("mean", "std") if pretrained_cfg.get(key)}
    from_imagenet = re.search(r"in(1|12|21|22)k|^(dino|mae)$", pretrained_cfg.get("tag") or "")
    return facts | {"trained_on": "imagenet" if from_imagenet else "unknown"}


def make_config(**fields: Any) -> EncoderConfig:
    """Return an EncoderConfig; raises an EncoderError that names the invalid field."""
    try:
        return EncoderConfig(**fields)
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(str(part) for part in problem["loc"])
        what = f"encoder {fields['architecture']}: {where} is not valid"
        raise EncoderError(
            what,
            str(problem["msg"]),
            f"The fields are {', '.join(EncoderConfig.model_fields)}",
            code="invalid-encoder-config",
        ) from None


@contextmanager
def _forced_weights_only() -> Iterator[None]:
    """Make torch refuse pickles within the block: old versions of timm unpickle some downloads in full."""
    before = os.environ.get("TORCH_FORCE_WEIGHTS_ONLY_LOAD")
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"
    try:
        yield
    finally:
        os.environ.pop("TORCH_FORCE_WEIGHTS_ONLY_LOAD")
        if before is not None:
            os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = before


@contextmanager
def network_explained(name: str, where: str | None = None) -> Iterator[None]:
    """Turn errors while weights are downloaded into an EncoderError that says what to do."""
    by_hand = "download config.json and the weights elsewhere and pass the folder that holds them"
    by_hand += "" if where is None else f" ({where})"
    try:
        yield
    except GatedRepoError:
        raise EncoderError(
            f"{name}: its owners hand out the weights on request",
            "you are not logged in to the Hugging Face hub, or have no access yet",
            f"Ask for access on its page, then run `hf auth login` or set HF_TOKEN; or {by_hand}",
            code="weights-gated",
        ) from None
    except RepositoryNotFoundError:
        raise EncoderError(
            f"{name}: the Hugging Face hub knows no such model",
            how="Correct the name, or log in if it is private",
            code="unknown-hub-model",
        ) from None
    except OSError as error:
        raise EncoderError(
            f"{name}: the weights cannot be fetched",
            f"they are not in the Hugging Face cache and the hub was not reached ({type(error).__name__})",
            f"Connect once, later runs use the cache (HF_HUB_OFFLINE=1 nothing else); or {by_hand}",
            code="hub-unreachable",
        ) from error
