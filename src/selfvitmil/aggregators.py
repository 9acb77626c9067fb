"""MIL aggregators by the names of the literature: modules from a slide's bag of embeddings to slide logits.

    import selfvitmil as sv

    model = sv.aggregators.DSMIL(dim=1920, num_classes=1)
    out = model(bag)                  # bag: (N, D) floating-point tensor of tile embeddings
    out.logits                        # (C,); `model.probabilities(out)` gives probabilities
    out.attention                     # (N, C), or None where the method has no attention
    out.instance_logits               # (N, C), or None where the method has no instance classifier

Every constructor takes `dim` (D), `num_classes` (C; 1 means binary with one logit) and the method's own settings as
keywords; each class documents them and cites its paper. `selfvitmil.aggregate.build` gives the same modules by name.
"""

from __future__ import annotations

from selfvitmil.aggregate.attention import ABMIL, CLAM_SB, GatedABMIL, TransMIL
from selfvitmil.aggregate.base import Aggregator, AggregatorOutput
from selfvitmil.aggregate.dsmil import DSMIL, DSMIL_LC, SelfViTMIL
from selfvitmil.aggregate.pooling import CHOWDER, MILRNN, MaxPooling, MeanPooling, TopKPooling

__all__ = [
    "ABMIL", "CHOWDER", "CLAM_SB", "DSMIL", "DSMIL_LC", "MILRNN", "Aggregator", "AggregatorOutput", "GatedABMIL",
    "MaxPooling", "MeanPooling", "SelfViTMIL", "TopKPooling", "TransMIL",
]  # fmt: skip
