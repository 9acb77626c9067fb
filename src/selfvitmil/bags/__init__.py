"""Feature files of slides: `files` writes ours and reads all known kinds, `export` writes those of other tools,
`retrieval` finds the most similar embeddings."""

from __future__ import annotations

from selfvitmil.bags.files import (
    FORMAT_VERSION,
    SCHEMA,
    Bag,
    Features,
    check_bag,
    concat_scales,
    find_bags,
    read_bag,
    write_bag,
)

__all__ = [
    "FORMAT_VERSION", "SCHEMA", "Bag", "Features", "check_bag", "concat_scales", "find_bags", "read_bag", "write_bag",
]  # fmt: skip
