"""Damage to bytes, as one list of edits: Hypothesis can draw and shrink it, and a seed gives it alone."""

from __future__ import annotations

import random
from dataclasses import dataclass

from hypothesis import strategies as st

KINDS = ("flip", "set", "cut", "insert", "copy", "number")
NUMBERS = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 2**63 - 1, 2**64 - 1)
WORDS = (b"", b"\0", b"-1", b"1e999", b"NaN", b"null", b"{}", b"[]", b'"', b"<", b">", b"&x;", b"\xff\xfe", b"\xf0\x9f")


@dataclass(frozen=True)
class Edit:
    """One change; place and size are fractions of the length, so that they fit any file."""

    kind: str
    place: float
    value: int

    def apply(self, data: bytearray) -> None:
        """Change the data in place."""
        at = int(self.place * len(data))
        size = 1 + self.value % 64
        if self.kind == "flip" and data:
            data[min(at, len(data) - 1)] ^= 1 << self.value % 8
        elif self.kind == "set" and data:
            data[min(at, len(data) - 1)] = self.value % 256
        elif self.kind == "cut":
            del data[at : at + size if self.value % 8 else len(data)]
        elif self.kind == "insert":
            data[at:at] = WORDS[self.value % len(WORDS)] * (1 if self.value % 5 else 50)
        elif self.kind == "copy":
            data[at : at + size] = data[self.value % (len(data) + 1) :][:size]
        elif self.kind == "number":
            width = (1, 2, 4, 8)[self.value % 4]
            number = NUMBERS[self.value // 4 % len(NUMBERS)] % (1 << 8 * width)
            data[at : at + width] = number.to_bytes(width, ("little", "big")[self.value // 64 % 2])


def mutate(example: bytes, edits: list[Edit]) -> bytes:
    """Return the example with all edits."""
    data = bytearray(example)
    for edit in edits:
        edit.apply(data)
    return bytes(data)


edits = st.lists(
    st.builds(Edit, st.sampled_from(KINDS), st.floats(0, 1, exclude_max=True), st.integers(0, 1 << 16)),
    min_size=1, max_size=6,
)  # fmt: skip


def edits_of(seed: str) -> list[Edit]:
    """Return edits by a seed alone, many times quicker than by Hypothesis."""
    rng = random.Random(seed)
    number = rng.choice((1, 1, 1, 2, 3, 6))
    return [Edit(rng.choice(KINDS), rng.random(), rng.randrange(1 << 16)) for _ in range(number)]
