"""The class token of a ViT, without the work that it does not depend on.

DINO looks at nothing but the class token after the last block. That block's other tokens serve it as keys and values,
but their queries, their projection and their MLP end nowhere: with twelve blocks, 7 % of all arithmetic. Leaving it out
changes neither the function nor its gradients. Patches are embedded as one matrix product, which a convolution of that
stride is; a convolutional stem stays what it is. Positions are resampled by sums of products, rows first and then
columns: the gradient of torch's own resampling adds up in another order every time on a GPU, which training with the
same bits every time cannot have.

Axes in names: B images, N tokens, D width, H and W height and width, 3 is RGB.
"""

from __future__ import annotations

from typing import Any

import torch
from timm.layers.attention import Attention
from timm.layers.patch_embed import PatchEmbed
from timm.models.vision_transformer import Block, VisionTransformer
from torch import nn
from torch.nn import functional

from selfvitmil.encoder.network import ConvStem, patch_product


def has_shortcut(backbone: nn.Module) -> bool:
    """Whether this is a plain ViT, for which `class_token` gives what the network itself gives."""
    if type(backbone) is not VisionTransformer or not backbone.has_class_token:
        return False
    if backbone.global_pool not in ("token", ""):  # without pooling (Virchow) the network gives all tokens
        return False
    vit: Any = backbone
    block = vit.blocks[-1]
    attention: Any = getattr(block, "attn", None)
    plain = type(block) is Block and type(attention) is Attention and type(vit.patch_embed) in (PatchEmbed, ConvStem)
    nothing = (vit.fc_norm, vit.patch_drop, vit.head, vit.patch_embed.norm)
    if not plain or not all(isinstance(module, nn.Identity) for module in nothing):
        return False
    gated = getattr(attention, "gate", None) is not None
    return not gated and not attention.attn_drop.p and not vit.head_drop.p and vit.attn_pool is None


def class_token(vit: Any, images_B3HW: torch.Tensor) -> torch.Tensor:
    """(B, D): the class token after the last block and the final norm."""
    tokens_BND = vit.norm_pre(_add_positions(vit, _embed_patches(vit, images_B3HW)))
    for block in vit.blocks[:-1]:
        tokens_BND = block(tokens_BND)
    last = vit.blocks[-1]
    class_B1D = tokens_BND[:, :1]
    class_B1D = class_B1D + last.drop_path1(last.ls1(_attend_from_first(last.attn, last.norm1(tokens_BND))))
    class_B1D = class_B1D + last.drop_path2(last.ls2(last.mlp(last.norm2(class_B1D))))
    return vit.norm(class_B1D[:, 0])


def first_token(vit: Any, images_B3HW: torch.Tensor) -> torch.Tensor:
    """(B, D): the class token after the final norm of any ViT of timm's, also of those that pool in another way."""
    # Networks that average keep their final norm behind the pooling, under another name.
    norm = vit.fc_norm if isinstance(vit.norm, nn.Identity) else nn.Identity()
    return norm(vit.forward_features(images_B3HW)[:, 0])


def _embed_patches(vit: Any, images_B3HW: torch.Tensor) -> torch.Tensor:
    if isinstance(vit.patch_embed, ConvStem):
        return vit.patch_embed(images_B3HW)
    tokens_BHWD = patch_product(images_B3HW, vit.patch_embed.proj.weight, vit.patch_embed.proj.bias)
    return tokens_BHWD if vit.dynamic_img_size else tokens_BHWD.flatten(1, 2)


def _add_positions(vit: Any, tokens: torch.Tensor) -> torch.Tensor:
    """(B, N, D): class token and the like in front of the patches' tokens, each with its position."""
    if not vit.dynamic_img_size or vit.pos_embed is None or vit.patch_embed.grid_size == tokens.shape[1:3]:
        return vit._pos_embed(tokens)
    first = [each for each in (vit.cls_token, vit.reg_token) if each is not None]
    first_BND = torch.cat(first, dim=1).expand(len(tokens), -1, -1)
    prefix = 0 if vit.no_embed_class else first_BND.shape[1]
    height, width = tokens.shape[1:3]
    positions_ND = _resample(vit.pos_embed[0, prefix:].unflatten(0, vit.patch_embed.grid_size), (height, width))
    if not vit.no_embed_class:
        first_BND = first_BND + vit.pos_embed[:, :prefix]
    return vit.pos_drop(torch.cat([first_BND, tokens.flatten(1, 2) + positions_ND], dim=1))


def _resample(grid_HWD: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """(N, D): a grid of vectors at another size, bicubic and smoothed where it shrinks, as timm resamples positions."""
    rows_HI, columns_WJ = (
        _resample_weights(old, new, grid_HWD.device) for old, new in zip(grid_HWD.shape[:2], size, strict=True)
    )
    tall_IWD = (rows_HI[:, :, None, None] * grid_HWD.float()[:, None]).sum(0)
    return (columns_WJ[:, :, None] * tall_IWD[:, :, None]).sum(1).flatten(0, 1).to(grid_HWD.dtype)


def _resample_weights(old: int, new: int, device: torch.device) -> torch.Tensor:
    """(old, new): what each old place gives to each new one."""
    # As one image of old x old: images of a single column come out wrong on a CPU (torch 2.15).
    places = torch.eye(old, device=device)[None, None]
    return functional.interpolate(places, size=(old, new), mode="bicubic", antialias=True)[0, 0]


def _attend_from_first(attention: Any, tokens_BND: torch.Tensor) -> torch.Tensor:
    """What self-attention gives for the first token."""
    batch, count, _ = tokens_BND.shape
    width = attention.num_heads * attention.head_dim
    weight, bias = attention.qkv.weight, attention.qkv.bias
    q_bias, kv_bias = (None, None) if bias is None else (bias[:width], bias[width:])
    query = functional.linear(tokens_BND[:, :1], weight[:width], q_bias)
    query = query.reshape(batch, 1, attention.num_heads, attention.head_dim).transpose(1, 2)
    both = functional.linear(tokens_BND, weight[width:], kv_bias)
    both = both.reshape(batch, count, 2, attention.num_heads, attention.head_dim).permute(2, 0, 3, 1, 4)
    key, value = both.unbind(0)
    seen = functional.scaled_dot_product_attention(attention.q_norm(query), attention.k_norm(key), value)
    seen = seen.transpose(1, 2).reshape(batch, 1, width)
    # Absent from older versions of timm.
    seen = attention.norm(seen) if hasattr(attention, "norm") else seen
    return attention.proj_drop(attention.proj(seen))
