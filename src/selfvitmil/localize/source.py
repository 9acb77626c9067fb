"""What a heatmap shows: attention, the tiles' own scores, or the effect of leaving a tile out; pure.

`localize.score` names it, or leaves it to the evidence (`auto`): where validation slides are annotated, the one that
ranks annotated tiles highest on them is taken; else the tiles' own scores where the method has them, which gave the
better heatmaps on every set measured (docs/experiments/attention.md). No annotation of a test slide has a say.

N tiles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from selfvitmil import metrics
from selfvitmil.errors import ConfigError

AUTO = ("instance", "attention", "effect")
"""What `auto` takes where there is no evidence, the first that there is."""
CANDIDATES = ("instance", "attention")
"""What annotated validation slides choose between; of equals the first."""
TUMOUR_SHARE = 0.5
"""A tile is tumour when at least this share of it is outlined."""
NORMAL_SHARE = 0.01
"""A tile is normal when less than this share of it is outlined: a line may brush it."""

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class HeatmapSource:
    """What a heatmap shows, and why."""

    kind: str
    """`attention`, `instance`, `product` or `effect`."""
    reason: str
    """In words, for output and file."""
    precision: Mapping[str, float] | None = None
    """Mean average precision of tiles within annotated validation slides, by candidate; None where none chose."""
    num_slides: int = 0
    """Validation slides that chose."""


def choose_kind(wanted: str, columns: Mapping[str, Floats], method: str) -> str:
    """Which of the columns is shown; ConfigError where the method has none such."""
    kinds = AUTO if wanted == "auto" else (wanted,)
    kind = next((kind for kind in kinds if kind in columns), None)
    if kind is None:
        raise ConfigError(
            f"localize.score {wanted!r} with {method}",
            f"what it says of tiles is {' and '.join(columns) or 'nothing'}",
            "Leave localize.score at auto, or use effect, which every method has",
        )
    return kind


def source_without_evidence(wanted: str, columns: Mapping[str, Floats], method: str) -> HeatmapSource:
    """What is asked for, or what `auto` takes where no annotated validation slide can choose."""
    kind = choose_kind(wanted, columns, method)
    if wanted != "auto":
        return HeatmapSource(kind, "set by localize.score")
    if kind == "instance" and "attention" in columns:
        why = "no annotated validation slide to choose by; tile scores gave the better heatmaps on every set measured"
        return HeatmapSource(kind, why)
    return HeatmapSource(kind, f"{method} has no other per-tile evidence")


def source_by_annotations(slides: Sequence[tuple[Mapping[str, Floats], Floats]]) -> HeatmapSource | None:
    """The candidate with the largest mean average precision of tiles, from the columns and the annotated share (N,) of
    every validation slide's tiles. None where a candidate is missing or no slide has tumour tiles and normal ones."""
    found: dict[str, list[float]] = {kind: [] for kind in CANDIDATES}
    for columns, annotated in slides:
        tumour, normal = annotated >= TUMOUR_SHARE, annotated < NORMAL_SHARE
        known = tumour | normal
        if tumour.any() and normal.any() and all(kind in columns for kind in CANDIDATES):
            for kind in CANDIDATES:
                found[kind].append(float(metrics.average_precision(tumour[known], columns[kind][known])))
    num_slides = len(found[CANDIDATES[0]])
    if not num_slides:
        return None
    precision = {kind: float(np.mean(values)) for kind, values in found.items()}
    best = max(CANDIDATES, key=lambda kind: precision[kind])  # of equals the first
    told = ", ".join(f"{kind} {value:.3f}" for kind, value in precision.items())
    why = (
        f"best on {num_slides} annotated validation slide{'s' * (num_slides > 1)} (average precision of tiles: {told})"
    )
    return HeatmapSource(best, why, precision, num_slides)
