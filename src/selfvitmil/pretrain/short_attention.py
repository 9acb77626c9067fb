"""Self-attention of short sequences on a GPU, forward and backward in one kernel each, written in Triton.

Small views are 10 or 50 tokens. The attention that torch has works through blocks of 64 or 128 rows, copies queries,
keys and values apart, and stores statistics for the backward pass. Here one program holds a whole sequence of one head,
reads it where the projection wrote it, and computes the probabilities once more in the backward pass, which is cheaper
than keeping them.

Products are in the half precision of the input, sums and the softmax in float32, as in torch.

Axes in names: T tokens of all images, 3 query, key and value, H heads, C channels of a head.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from selfvitmil.runtime.device import synchronize

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
