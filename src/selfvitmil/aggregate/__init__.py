"""MIL aggregators: from a slide's bag of embeddings to slide logits, attention and instance logits.

`build(name, dim, num_classes, **settings)` returns one of `NAMES`, `settings_of(name)` lists its settings, and
`selfvitmil.aggregators` has the classes by their names in the literature. `base` holds the base class and the output
type, and the methods are in

    dsmil      dsmil (head of 2024), self-vit-mil (the paper's head), dsmil-lc (several scales); load_dsmil
    attention  abmil, abmil-gated, clam-sb, transmil
    pooling    mean, max, topk, chowder, mil-rnn
"""

from __future__ import annotations

from selfvitmil.aggregate import attention, pooling  # noqa: F401 (they register their classes)
from selfvitmil.aggregate.base import Aggregator, AggregatorOutput, build, settings_of
from selfvitmil.aggregate.dsmil import load_dsmil

__all__ = [
    "NAMES", "Aggregator", "AggregatorOutput", "build", "load_dsmil", "settings_of",
]  # fmt: skip

NAMES = (
    "self-vit-mil",
    "dsmil",
    "dsmil-lc",
    "abmil",
    "abmil-gated",
    "chowder",
    "transmil",
    "mil-rnn",
    "clam-sb",
    "mean",
    "max",
    "topk",
)
"""Names of all aggregators of `build`."""
