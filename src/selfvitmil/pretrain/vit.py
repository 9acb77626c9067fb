"""The way of training views through a ViT: images in, class tokens out.

Of a plain ViT only the class token after the last block is used. That block's other tokens serve it as keys and values,
but their queries, projection and MLP are not needed: with twelve blocks, 7 % of all arithmetic. `class_tokens` leaves
it out, which changes neither the function nor its gradients. Patches are embedded as one matrix product, which a
convolution of that stride is; a convolutional stem stays what it is. Positions are resampled by sums of products, rows
first and then columns: the gradient of torch's own resampling adds up in another order every time on a GPU, which
bit-reproducible training cannot have.

Views of all sizes go through the blocks together: their tokens lie behind each other in one matrix, and only attention
looks at each size apart. All blocks run through one function, which takes the paths that are kept (stochastic depth;
Huang et al. 2016, arXiv 1603.09382) as numbers drawn before. So compiling that one function compiles the whole network.
Sequences of a few dozen tokens, as small views are, have attention of their own on a GPU (`short_attention`),
forward and backward in one kernel each.

Axes in names: B images of one size, R images of all sizes, N tokens of an image, T tokens of all images, D width, K
branches of all blocks, H heads, C channels of a head, H and W height and width, 3 is RGB.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from timm.layers.attention import Attention
from timm.layers.drop import DropPath
from timm.layers.patch_embed import PatchEmbed
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn
from torch.nn import functional

from selfvitmil.encoder.network import ConvStem, has_class_token, patch_product
from selfvitmil.runtime.device import synchronize

Embed = Callable[[nn.Module, Sequence[Tensor]], Tensor]
"""From a network and images (B, 3, H, W) of each size to embeddings (R, D), size after size."""
Shapes = tuple[tuple[int, int], ...]
"""Images and tokens of an image, for each size of views."""
RunBlock = Callable[[Any, Tensor, Shapes, Tensor | None, Tensor | None], Tensor]
"""Of a block, tokens, their shapes and the kept paths of its two branches."""


def embedding_of(backbone: nn.Module) -> Embed:
    """Return the function from images to embeddings for training: a ViT's class token, whatever its pooling."""
    if has_shortcut(backbone):
        return class_tokens
    return partial(_one_by_one, embed=first_token if has_class_token(backbone) else _call)


def compiled_embedding_of(backbone: nn.Module) -> Embed:
    """Return the same compiled: of a plain ViT the function of a block, which serves all of them, else the whole."""
    if not has_shortcut(backbone):
        embed = first_token if has_class_token(backbone) else _call
        return partial(_one_by_one, embed=torch.compile(embed, dynamic=False))
    block_of, last_of = (torch.compile(each, dynamic=False) for each in (run_block, run_last_block))
    return partial(class_tokens, block_of=block_of, last_of=last_of)


def _one_by_one(backbone: nn.Module, images: Sequence[Tensor], embed: Callable[[nn.Module, Tensor], Tensor]) -> Tensor:
    return torch.cat([embed(backbone, images_B3HW) for images_B3HW in images])


def _call(backbone: nn.Module, images: Tensor) -> Tensor:
    return backbone(images)


def has_shortcut(backbone: nn.Module) -> bool:
    """Return whether this is a plain ViT, for which `class_tokens` equals the network's own output."""
    if type(backbone) is not VisionTransformer or not backbone.has_class_token:
        return False
    if backbone.global_pool not in ("token", ""):  # without pooling (Virchow) the network gives all tokens
        return False
    vit: Any = backbone
    plain = all(type(block) is Block and _is_plain(block.attn) for block in vit.blocks)
    plain = plain and type(vit.patch_embed) in (PatchEmbed, ConvStem)
    nothing = (vit.fc_norm, vit.patch_drop, vit.head, vit.patch_embed.norm)
    if not plain or not all(isinstance(module, nn.Identity) for module in nothing):
        return False
    return not vit.head_drop.p and vit.attn_pool is None


def _is_plain(attention: Any) -> bool:
    return type(attention) is Attention and getattr(attention, "gate", None) is None and not attention.attn_drop.p


# ---------------------------------------------------------------------------------------------------- blocks


def class_tokens(
    vit: Any, images: Sequence[Tensor], block_of: RunBlock | None = None, last_of: RunBlock | None = None
) -> Tensor:
    """Return the class tokens of all images after the last block and the final norm, (R, D).

    `block_of` and `last_of` may be compiled forms of `run_block` and `run_last_block`.
    """
    tokens = [vit.norm_pre(_add_positions(vit, _embed_patches(vit, images_B3HW))) for images_B3HW in images]
    shapes = tuple((len(tokens_BND), tokens_BND.shape[1]) for tokens_BND in tokens)
    kept_KR1 = draw_kept(vit, [count for count, _ in shapes], tokens[0].device)
    tokens_TD = torch.cat([tokens_BND.flatten(0, 1) for tokens_BND in tokens])
    for number, block in enumerate(vit.blocks[:-1]):
        first_T1, second_T1 = (_for_tokens(kept_KR1, 2 * number + branch, shapes) for branch in (0, 1))
        tokens_TD = (block_of or run_block)(block, tokens_TD, shapes, first_T1, second_T1)
    first_R1, second_R1 = (None, None) if kept_KR1 is None else kept_KR1[-2:]
    return vit.norm((last_of or run_last_block)(vit.blocks[-1], tokens_TD, shapes, first_R1, second_R1))


def run_block(
    block: Any, tokens_TD: Tensor, shapes: Shapes, first_T1: Tensor | None, second_T1: Tensor | None
) -> Tensor:
    """Return the tokens after a block; None keeps all paths of a branch."""
    tokens_TD = tokens_TD + _scaled(block.ls1(_attend(block.attn, block.norm1(tokens_TD), shapes)), first_T1)
    return tokens_TD + _scaled(block.ls2(block.mlp(block.norm2(tokens_TD))), second_T1)


def run_last_block(
    block: Any, tokens_TD: Tensor, shapes: Shapes, first_R1: Tensor | None, second_R1: Tensor | None
) -> Tensor:
    """Return the first token of every image after the block, (R, D)."""
    class_RD = torch.cat([tokens_BND[:, 0] for tokens_BND in _by_size(tokens_TD, shapes)])
    seen_RD = _attend_from_first(block.attn, block.norm1(tokens_TD), shapes)
    class_RD = class_RD + _scaled(block.ls1(seen_RD), first_R1)
    return class_RD + _scaled(block.ls2(block.mlp(block.norm2(class_RD))), second_R1)


def draw_kept(vit: Any, counts: Sequence[int], device: torch.device) -> Tensor | None:
    """Return for each branch of each block, two a block, the factors (K, R, 1) of all images, `counts` of each size.

    They are 0 where the path is left out, and what is kept is scaled up in return. None where nothing is ever left out.
    The draws for one size do not depend on what other sizes there are behind it.
    """
    rates = tuple(_drop_rate(path) for block in vit.blocks for path in (block.drop_path1, block.drop_path2))
    if not any(rates):
        return None
    keep_K1 = _keep_chances(rates, device)
    drawn_KR = torch.cat([torch.rand(len(rates), count, device=device) for count in counts], dim=1)
    return ((drawn_KR < keep_K1) / keep_K1)[:, :, None]


def _for_tokens(kept_KR1: Tensor | None, branch: int, shapes: Shapes) -> Tensor | None:
    """Return the factors of a branch for every token, (T, 1)."""
    if kept_KR1 is None:
        return None
    parts = kept_KR1[branch].split([images for images, _ in shapes])
    return torch.cat(
        [part_B1.expand(-1, tokens).reshape(-1, 1) for part_B1, (_, tokens) in zip(parts, shapes, strict=True)]
    )


def _by_size(rows_TX: Tensor, shapes: Shapes) -> list[Tensor]:
    """Return the tokens of each size, (B, N, ...), as views of the same memory."""
    parts = rows_TX.split([images * tokens for images, tokens in shapes])
    return [part.unflatten(0, shape) for part, shape in zip(parts, shapes, strict=True)]


@lru_cache(maxsize=8)  # copied to the device once: a step that is being recorded cannot
def _keep_chances(rates: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor([[1 - rate] for rate in rates], device=device)


def _drop_rate(path: nn.Module) -> float:
    return path.drop_prob if isinstance(path, DropPath) and path.training else 0.0


def _scaled(branch_TD: Tensor, factor_T1: Tensor | None) -> Tensor:
    return branch_TD if factor_T1 is None else branch_TD * factor_T1


def _attend(attention: Any, tokens_TD: Tensor, shapes: Shapes) -> Tensor:
    """Return the output of self-attention of each image, for all tokens (T, D)."""
    qkv_T3HC = attention.qkv(tokens_TD).unflatten(1, (3, attention.num_heads, attention.head_dim))
    plain = isinstance(attention.q_norm, nn.Identity) and isinstance(attention.k_norm, nn.Identity)
    if plain and is_short(qkv_T3HC, shapes):
        images, tokens = ([each[place] for each in shapes] for place in (0, 1))
        return _project(attention, short_attention(qkv_T3HC, images, tokens).flatten(1))
    parts: list[Tensor] = []
    for qkv_BN3HC in _by_size(qkv_T3HC, shapes):
        query, key, value = qkv_BN3HC.permute(2, 0, 3, 1, 4).unbind(0)
        seen = functional.scaled_dot_product_attention(attention.q_norm(query), attention.k_norm(key), value)
        parts.append(seen.transpose(1, 2).flatten(2).flatten(0, 1))
    return _project(attention, torch.cat(parts))


def _attend_from_first(attention: Any, tokens_TD: Tensor, shapes: Shapes) -> Tensor:
    """Return the output of self-attention of each image, for its first token, (R, D)."""
    heads, channels = attention.num_heads, attention.head_dim
    width = heads * channels
    weight, bias = attention.qkv.weight, attention.qkv.bias
    q_bias, kv_bias = (None, None) if bias is None else (bias[:width], bias[width:])
    keys_values_T2HC = functional.linear(tokens_TD, weight[width:], kv_bias).unflatten(1, (2, heads, channels))
    parts: list[Tensor] = []
    for tokens_BND, both_BN2HC in zip(_by_size(tokens_TD, shapes), _by_size(keys_values_T2HC, shapes), strict=True):
        query = (
            functional.linear(tokens_BND[:, :1], weight[:width], q_bias).unflatten(2, (heads, channels)).transpose(1, 2)
        )
        key, value = both_BN2HC.permute(2, 0, 3, 1, 4).unbind(0)
        seen = functional.scaled_dot_product_attention(attention.q_norm(query), attention.k_norm(key), value)
        parts.append(seen.transpose(1, 2).flatten(1))
    return _project(attention, torch.cat(parts))


def _project(attention: Any, seen_TD: Tensor) -> Tensor:
    # Absent from older versions of timm.
    seen_TD = attention.norm(seen_TD) if hasattr(attention, "norm") else seen_TD
    return attention.proj_drop(attention.proj(seen_TD))


def first_token(vit: Any, images_B3HW: Tensor) -> Tensor:
    """Return the class token after the final norm of any timm ViT, (B, D), whatever its pooling."""
    # Networks that average keep their final norm behind the pooling, under another name.
    norm = vit.fc_norm if isinstance(vit.norm, nn.Identity) else nn.Identity()
    return norm(vit.forward_features(images_B3HW)[:, 0])


# ---------------------------------------------------------------------------------------------------- patches


def _embed_patches(vit: Any, images_B3HW: Tensor) -> Tensor:
    if isinstance(vit.patch_embed, ConvStem):
        return vit.patch_embed(images_B3HW)
    tokens_BHWD = patch_product(images_B3HW, vit.patch_embed.proj.weight, vit.patch_embed.proj.bias)
    return tokens_BHWD if vit.dynamic_img_size else tokens_BHWD.flatten(1, 2)


def _add_positions(vit: Any, tokens: Tensor) -> Tensor:
    """Return class and register tokens followed by patch tokens, with position embeddings, (B, N, D)."""
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


def _resample(grid_HWD: Tensor, size: tuple[int, int]) -> Tensor:
    """Return a grid of positions at another size, (N, D): bicubic, antialiased where it shrinks, as in timm."""
    rows_HI, columns_WJ = (
        _resample_weights(old, new, grid_HWD.device) for old, new in zip(grid_HWD.shape[:2], size, strict=True)
    )
    tall_IWD = (rows_HI[:, :, None, None] * grid_HWD.float()[:, None]).sum(0)
    return (columns_WJ[:, :, None] * tall_IWD[:, :, None]).sum(1).flatten(0, 1).to(grid_HWD.dtype)


def _resample_weights(old: int, new: int, device: torch.device) -> Tensor:
    """Return (old, new): the weight of each old position for each new one."""
    # As one image of old x old: images of a single column come out wrong on a CPU (torch 2.15).
    places = torch.eye(old, device=device)[None, None]
    return functional.interpolate(places, size=(old, new), mode="bicubic", antialias=True)[0, 0]


# ---------------------------------------------------------------------------------------------------- short sequences
# Small views are 10 or 50 tokens. The attention that torch has works through blocks of 64 or 128 rows, copies queries,
# keys and values apart, and stores statistics for the backward pass. Here one program holds a whole sequence of one
# head, reads it where the projection wrote it, and computes the probabilities once more in the backward pass, which is
# cheaper than keeping them. Products are in the half precision of the input, sums and the softmax in float32, as in
# torch.


HAS_TRITON = find_spec("triton") is not None
"""torch for CUDA brings it, but not on every platform."""
kernels_work = HAS_TRITON
"""False once `try_kernels` has failed: attention is torch's own then."""
LONGEST = 64
"""Tokens up to which a sequence counts as short: a program holds all pairs of them."""
CHANNELS = (16, 32, 64, 128)
"""Channels of a head that the kernels are for."""


def is_short(qkv_T3HC: Tensor, shapes: Sequence[tuple[int, int]]) -> bool:
    """Return whether `short_attention` is for this: half precision on a GPU, few tokens, a power of two of channels."""
    half = qkv_T3HC.dtype in (torch.bfloat16, torch.float16)
    fits = all(tokens <= LONGEST for _, tokens in shapes) and qkv_T3HC.shape[-1] in CHANNELS
    return qkv_T3HC.device.type == "cuda" and half and fits and kernels_work


def try_kernels(device: torch.device, dtype: torch.dtype, channels: int) -> str | None:
    """Run the kernels once on the longest sequence; if that fails, do without them from now on and return why.

    Triton needs a C compiler, a GPU that is not too old and enough shared memory on it. None of this shows before.
    """
    global kernels_work
    if not kernels_work or channels not in CHANNELS:
        return None
    try:
        qkv_T3HC = torch.zeros(LONGEST, 3, 1, channels, dtype=dtype, device=device)
        short_attention_backward(qkv_T3HC, short_attention(qkv_T3HC, [1], [LONGEST]), [1], [LONGEST])
        synchronize(device)
    except Exception as error:  # its compiler, driver and launcher fail in any way
        kernels_work = False
        return f"{type(error).__name__}: {str(error).strip().split(chr(10))[0]}"
    return None


@torch.library.custom_op("selfvitmil::short_attention", mutates_args=())
def short_attention(qkv_T3HC: Tensor, images: Sequence[int], tokens: Sequence[int]) -> Tensor:
    """Return softmax(Q K^T / sqrt(C)) V of every image and head, (T, H, C).

    `images` and `tokens` say how many images come with how many tokens each, one behind the other.
    """
    qkv_T3HC = qkv_T3HC.contiguous()
    seen_THC = qkv_T3HC.new_empty(len(qkv_T3HC), *qkv_T3HC.shape[2:])
    for part, programs, options in _parts(qkv_T3HC, images, tokens):
        _kernels().forward[programs,](qkv_T3HC[part], seen_THC[part], **options)
    return seen_THC


@torch.library.custom_op("selfvitmil::short_attention_backward", mutates_args=())
def short_attention_backward(
    qkv_T3HC: Tensor, gradient_THC: Tensor, images: Sequence[int], tokens: Sequence[int]
) -> Tensor:
    """Return the gradient of queries, keys and values, in the order of the input."""
    qkv_T3HC, gradient_THC = qkv_T3HC.contiguous(), gradient_THC.contiguous()
    found_T3HC = torch.empty_like(qkv_T3HC)
    for part, programs, options in _parts(qkv_T3HC, images, tokens):
        _kernels().backward[programs,](qkv_T3HC[part], gradient_THC[part], found_T3HC[part], **options)
    return found_T3HC


@short_attention.register_fake
def _(qkv_T3HC: Tensor, images: Sequence[int], tokens: Sequence[int]) -> Tensor:
    del images, tokens
    return qkv_T3HC.new_empty(len(qkv_T3HC), *qkv_T3HC.shape[2:])


@short_attention_backward.register_fake
def _(qkv_T3HC: Tensor, gradient_THC: Tensor, images: Sequence[int], tokens: Sequence[int]) -> Tensor:
    del gradient_THC, images, tokens
    return torch.empty_like(qkv_T3HC, memory_format=torch.contiguous_format)


def _keep(ctx: Any, inputs: tuple[Tensor, Sequence[int], Sequence[int]], output: Tensor) -> None:
    del output
    qkv_T3HC, ctx.images, ctx.tokens = inputs
    ctx.save_for_backward(qkv_T3HC)


def _backward(ctx: Any, gradient_THC: Tensor) -> tuple[Tensor, None, None]:
    (qkv_T3HC,) = ctx.saved_tensors
    return short_attention_backward(qkv_T3HC, gradient_THC, ctx.images, ctx.tokens), None, None


short_attention.register_autograd(_backward, setup_context=_keep)


def _parts(
    qkv_T3HC: Tensor, images: Sequence[int], tokens: Sequence[int]
) -> Iterator[tuple[slice, int, dict[str, Any]]]:
    """Yield for each size its rows, the number of programs and the kernels' other arguments."""
    _, _, heads, channels = qkv_T3HC.shape
    start = 0
    for number, count in zip(images, tokens, strict=True):
        block = max(1 << (count - 1).bit_length(), 16)
        options: dict[str, Any] = {"scale": 1 / math.sqrt(channels), "num_warps": max(block // 16, 1)}
        options |= {"COUNT": count, "HEADS": heads, "CHANNELS": channels, "BLOCK": block}
        yield slice(start, start + number * count), number * heads, options
        start += number * count


def _kernels() -> Any:
    return import_module("selfvitmil.pretrain.attention_kernels")
