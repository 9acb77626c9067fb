"""The class token of a ViT, without the work that it does not depend on.

DINO looks at nothing but the class token after the last block. That block's other tokens serve it as keys and values,
but their queries, their projection and their MLP end nowhere: with twelve blocks, 7 % of all arithmetic. Leaving it out
changes neither the function nor its gradients. Patches are embedded as one matrix product, which a convolution of
that stride is.

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


def has_shortcut(backbone: nn.Module) -> bool:
    """Whether this is a plain ViT, for which `class_token` gives what the network itself gives."""
    if type(backbone) is not VisionTransformer or backbone.global_pool != "token" or not backbone.has_class_token:
        return False
    vit: Any = backbone
    block = vit.blocks[-1]
    attention: Any = getattr(block, "attn", None)
    plain = type(block) is Block and type(attention) is Attention and type(vit.patch_embed) is PatchEmbed
    nothing = (vit.fc_norm, vit.patch_drop, vit.head, vit.patch_embed.norm)
    if not plain or not all(isinstance(module, nn.Identity) for module in nothing):
        return False
    gated = getattr(attention, "gate", None) is not None
    return not gated and not attention.attn_drop.p and not vit.head_drop.p and vit.attn_pool is None


def class_token(vit: Any, images_B3HW: torch.Tensor) -> torch.Tensor:
    """(B, D): the class token after the last block and the final norm."""
    tokens_BND = vit.norm_pre(vit._pos_embed(_embed_patches(vit, images_B3HW)))
    for block in vit.blocks[:-1]:
        tokens_BND = block(tokens_BND)
    last = vit.blocks[-1]
    class_B1D = tokens_BND[:, :1]
    class_B1D = class_B1D + last.drop_path1(last.ls1(_attend_from_first(last.attn, last.norm1(tokens_BND))))
    class_B1D = class_B1D + last.drop_path2(last.ls2(last.mlp(last.norm2(class_B1D))))
    return vit.norm(class_B1D[:, 0])


def _embed_patches(vit: Any, images_B3HW: torch.Tensor) -> torch.Tensor:
    tokens_BHWD = patch_product(images_B3HW, vit.patch_embed.proj.weight, vit.patch_embed.proj.bias)
    return tokens_BHWD if vit.dynamic_img_size else tokens_BHWD.flatten(1, 2)


def patch_product(images_B3HW: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """A convolution whose windows do not overlap, as the one matrix product that it is: (B, H, W, D) of the windows."""
    batch, _, height, width = images_B3HW.shape
    p, q = weight.shape[2:]
    patches = images_B3HW.reshape(batch, 3, height // p, p, width // q, q).permute(0, 2, 4, 1, 3, 5)
    return functional.linear(patches.flatten(3), weight.flatten(1), bias)


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
