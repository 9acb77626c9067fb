"""Pool the tile probabilities of a slide to a slide score."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from selfvitmil.aggregate.scoring import BagScore

Pool = Literal["max", "topk"]


def slide_probability(probabilities_N: NDArray[np.float64], pool: Pool, k: int) -> float:
    """Return the largest tile probability, or the mean of the `k` largest (of all where there are fewer)."""
    number = 1 if pool == "max" else min(k, len(probabilities_N))
    return float(np.partition(probabilities_N, -number)[-number:].mean())


def bag_score(slide: str, probabilities_N: NDArray[np.float64], pool: Pool, k: int) -> BagScore:
    """Return the slide's score in the common form; `critical` is the tile with the highest probability."""
    return BagScore(
        slide=slide,
        probabilities=(slide_probability(probabilities_N, pool, k),),
        max_probabilities=None,
        bag_probabilities=None,
        attention_entropy=None,
        critical=int(probabilities_N.argmax()),
    )
