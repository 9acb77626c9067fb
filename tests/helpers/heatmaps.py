"""Maps with a planted lesion, for tests of what is made from maps."""

from __future__ import annotations

from typing import Any

import numpy as np

from selfvitmil.localize.heatmap import Frame, Heatmap, SlidePrediction

PREDICTION = SlidePrediction(
    probability=(0.9,),
    max_probability=(0.95,),
    bag_probability=(0.85,),
    decision="tumor",
    threshold=0.4,
    threshold_from="Youden on validation",
    classes=("normal", "tumor"),
    shown="tumor",
    split="given",
    part="test",
    seeds=(0, 1),
)


def make_heatmap(
    columns: int = 12,
    rows: int = 9,
    lesion: tuple[int, int, int, int] | None = (4, 3, 3, 2),
    *,
    extent_l0: float = 448.0,
    slide_mpp: float = 0.25,
    seed: int = 0,
    **changes: Any,
) -> Heatmap:
    """A full grid of tiles; `lesion` is (column, row, columns, rows) of tiles that score high, or None."""
    rng = np.random.default_rng(seed)
    y, x = (axis.ravel() for axis in np.mgrid[:rows, :columns])
    inside = np.zeros(len(x), dtype=bool)
    if lesion is not None:
        left, top, wide, high = lesion
        inside = (x >= left) & (x < left + wide) & (y >= top) & (y < top + high)
    score = np.where(inside, 0.8 + 0.2 * rng.random(len(x)), 0.3 * rng.random(len(x))).astype(np.float32)
    attention = (score / score.sum()).astype(np.float32)
    instance = score**2
    told: dict[str, Any] = {
        "slide": "made_01",
        "model": "vit_dsmil",
        "method": "dsmil",
        "kind": "attention",
        "scale": "winsor",
        "gated": False,
        "frame": Frame(
            slide_mpp, (int(columns * extent_l0), int(rows * extent_l0)), extent_l0, extent_l0, 2 * slide_mpp, 224
        ),
        "prediction": PREDICTION,
        "coords_l0": np.stack([x, y], axis=1).astype(np.int64) * int(extent_l0),
        "score": score,
        "detection": score * np.float32(PREDICTION.shown_probability),
        "columns": {"attention": attention, "instance": instance, "product": attention * instance},
        "annotated": inside.astype(np.float32),
    }
    return Heatmap(**{**told, **changes})
