"""The kernels of `short_attention`; importing this needs Triton.

One program is one sequence of one head. `qkv` is (B, COUNT, 3, HEADS, CHANNELS) and `seen` (B, COUNT, HEADS, CHANNELS),
both contiguous. BLOCK is a power of two from 16, at least COUNT.
"""

# Inside kernels, names mean what Triton makes of them.
# pyright: reportArgumentType=false, reportUnknownMemberType=false, reportIndexIssue=false, reportCallIssue=false

import triton
import triton.language as tl


@triton.jit
def _load(first, rows, columns, step, COUNT: tl.constexpr):
    return tl.load(first + rows[:, None] * step + columns[None, :], mask=rows[:, None] < COUNT, other=0.0)


@triton.jit
def _probabilities(query, key, rows, scale, COUNT: tl.constexpr):
    logits = tl.dot(query, tl.trans(key)).to(tl.float32) * scale
    logits = tl.where(rows[None, :] < COUNT, logits, float("-inf"))
    weights = tl.exp(logits - tl.max(logits, axis=1)[:, None])
    return weights / tl.sum(weights, axis=1)[:, None]


@triton.jit
def forward(
    qkv, seen, scale, COUNT: tl.constexpr, HEADS: tl.constexpr, CHANNELS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One sequence of one head; `qkv` is (B, COUNT, 3, HEADS, CHANNELS), `seen` (B, COUNT, HEADS, CHANNELS)."""
    image, head = (tl.program_id(0) // HEADS).to(tl.int64), tl.program_id(0) % HEADS
    rows, columns = tl.arange(0, BLOCK), tl.arange(0, CHANNELS)
    width: tl.constexpr = HEADS * CHANNELS
    start = qkv + image * COUNT * 3 * width + head * CHANNELS
    query = _load(start, rows, columns, 3 * width, COUNT)
    key = _load(start + width, rows, columns, 3 * width, COUNT)
    value = _load(start + 2 * width, rows, columns, 3 * width, COUNT)
    found = tl.dot(_probabilities(query, key, rows, scale, COUNT).to(value.dtype), value)
    target = seen + image * COUNT * width + head * CHANNELS + rows[:, None] * width + columns[None, :]
    tl.store(target, found.to(value.dtype), mask=rows[:, None] < COUNT)


@triton.jit
def backward(
    qkv, gradient, found, scale,
    COUNT: tl.constexpr, HEADS: tl.constexpr, CHANNELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The same sequence; `gradient` is that of `seen`, `found` gets that of `qkv`."""
    image, head = (tl.program_id(0) // HEADS).to(tl.int64), tl.program_id(0) % HEADS
    rows, columns = tl.arange(0, BLOCK), tl.arange(0, CHANNELS)
    width: tl.constexpr = HEADS * CHANNELS
    place = image * COUNT * 3 * width + head * CHANNELS
    query = _load(qkv + place, rows, columns, 3 * width, COUNT)
    key = _load(qkv + place + width, rows, columns, 3 * width, COUNT)
    value = _load(qkv + place + 2 * width, rows, columns, 3 * width, COUNT)
    given = _load(gradient + image * COUNT * width + head * CHANNELS, rows, columns, width, COUNT)
    weights = _probabilities(query, key, rows, scale, COUNT)
    of_value = tl.dot(tl.trans(weights.to(value.dtype)), given)
    of_weights = tl.dot(given, tl.trans(value)).to(tl.float32)
    of_logits = weights * (of_weights - tl.sum(weights * of_weights, axis=1)[:, None]) * scale
    of_logits = of_logits.to(value.dtype)
    of_query, of_key = tl.dot(of_logits, key), tl.dot(tl.trans(of_logits), query)
    target = found + place + rows[:, None] * 3 * width + columns[None, :]
    mask = rows[:, None] < COUNT
    tl.store(target, of_query.to(value.dtype), mask=mask)
    tl.store(target + width, of_key.to(value.dtype), mask=mask)
    tl.store(target + 2 * width, of_value.to(value.dtype), mask=mask)
