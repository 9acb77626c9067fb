"""From what an aggregator says of tiles to the numbers of a map; pure.

In come one `TileScores` per seed (`score_by_seeds`) and the slide's verdict (`make_verdict`), out comes a `SlideMap`.
Seeds are combined by the mean of their attention, of their instance probabilities, of the products of the two, and of
their effects. One of these columns is put on a scale from 0 to 1 (s the scores of a slide's tiles, z their z-scores by
the population's deviation):

    winsor          z cut off at -limit and +limit, then from the least to the most of what is left
    zero-outliers   what lies above +limit is 0, the rest from its least to its most: the paper's rule to the letter,
                    which may erase the very tile that decided the prediction
    percentile      share of the other tiles that score less; ties share the mean of their ranks
    none            from the least to the most

Scores that do not differ point nowhere: all are 0, and the map warns of it. The only tile of a slide is 1.

N tiles, C classes, S seeds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from selfvitmil.errors import BagError, ConfigError
from selfvitmil.localize.maps import Floats, Frame, SlideMap, Verdict
from selfvitmil.localize.source import HeatmapSource, source_without_evidence
from selfvitmil.settings import LocalizeSettings

if TYPE_CHECKING:  # these load torch, and who draws maps needs none
    from selfvitmil.aggregate import Aggregator
    from selfvitmil.aggregate.scoring import BagScore, TileScores
    from selfvitmil.aggregate.train import BagStore
    from selfvitmil.bags import Bag
    from selfvitmil.evaluate.thresholds import Choice

Scale = Literal["winsor", "zero-outliers", "percentile", "none"]

SAME = 1e-6
"""Scores whose deviation is a smaller share of their size do not differ: float32 knows no more digits."""

# ---------------------------------------------------------------------------------------------------- scales


def z_scores(scores: ArrayLike) -> NDArray[np.float64]:
    """How many standard deviations each score lies above the mean; 0 where they do not differ."""
    values = np.asarray(scores, dtype=np.float64)
    if not differ(values):
        return np.zeros_like(values)
    return (values - values.mean()) / values.std()


def differ(scores: ArrayLike) -> bool:
    """Whether scores differ by more than rounding."""
    values = np.asarray(scores, dtype=np.float64)
    return len(values) > 1 and bool(values.std() > SAME * np.abs(values).max())


def rescale(scores: ArrayLike, scale: Scale, z_limit: float = 3.0) -> Floats:
    """Scores (N,) of one slide from 0 to 1, never NaN; see the head of this file."""
    values = np.asarray(scores, dtype=np.float64)
    if len(values) == 1:
        return np.ones(1, np.float32)
    if not differ(values):
        return np.zeros(len(values), np.float32)
    if scale == "percentile":
        return _mid_ranks(values).astype(np.float32)
    if scale == "none":
        return _stretched(values).astype(np.float32)
    z = z_scores(values)
    if scale == "winsor":
        return _stretched(np.clip(z, -z_limit, z_limit)).astype(np.float32)
    kept = z <= z_limit
    result = np.zeros(len(values))
    result[kept] = _stretched(values[kept])
    return result.astype(np.float32)


def _stretched(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """From the least to the most; 0 where these are the same."""
    if not differ(values):
        return np.zeros_like(values)
    return (values - values.min()) / (values.max() - values.min())


def _mid_ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    below = np.cumsum(counts) - counts
    return (below + (counts - 1) / 2)[place] / (len(values) - 1)


# ---------------------------------------------------------------------------------------------------- seeds, classes


def mean_probabilities(rows: Sequence[tuple[float, ...] | None]) -> tuple[float, ...] | None:
    """The seeds' mean as the evaluation takes it, to the bit: summed one after the other. None where one has none."""
    total = np.zeros(len(rows[0] or ()))
    for row in rows:
        if row is None:
            return None
        total = total + np.asarray(row, dtype=np.float64)
    return tuple((total / len(rows)).tolist())


def shown_class(classes: Sequence[str], decision: int, of_class: str | None) -> str:
    """The class whose evidence a map shows: the positive one of two, else `of_class`, else the predicted one."""
    if of_class is not None and of_class not in classes:
        raise ConfigError(
            f"localize.of_class {of_class!r}", f"the classes are {', '.join(classes)}", "Name one of them"
        )
    if len(classes) > 2:
        return of_class or classes[decision]
    if of_class is not None and of_class != classes[1]:
        raise ConfigError(
            f"localize.of_class {of_class!r}",
            f"of two classes maps show the evidence for the positive one, {classes[1]}",
            "Leave it out, or train with train.positive",
        )
    return classes[1]


def score_by_seeds(modules: Iterable[Aggregator], bag: Bag, kind: str, store: BagStore) -> list[TileScores]:
    """What the model of every seed says of a bag; each tile is left out once only where a map of `kind` needs it:
    `effect` is wanted, or `auto` finds nothing else. BagError where the bag does not fit the models."""
    from selfvitmil.aggregate.scoring import score_tiles

    modules = list(modules)
    scores = [next(score_tiles(module, [bag], store=store, effect=kind == "effect")) for module in modules]
    silent = all(each.attention_NC is None and each.instance_NC is None for each in scores)
    if kind == "auto" and silent:
        return [next(score_tiles(module, [bag], store=store, effect=True)) for module in modules]
    return scores


def make_verdict(
    scores: Sequence[BagScore],
    choice: Choice,
    classes: Sequence[str],
    of_class: str | None,
    *,
    split: str,
    part: str,
    seeds: Sequence[int],
) -> Verdict:
    """The very numbers of the evaluation: the mean of the seeds' `scores`, decided by the ensemble's own threshold."""
    probability = mean_probabilities([each.probabilities for each in scores])
    assert probability is not None
    decision = int(choice.decide(np.array([probability]))[0])
    return Verdict(
        probability=probability,
        max_probability=mean_probabilities([each.max_probabilities for each in scores]),
        bag_probability=mean_probabilities([each.bag_probabilities for each in scores]),
        decision=classes[decision],
        threshold=choice.threshold,
        threshold_from=choice.threshold_from,
        classes=tuple(classes),
        shown=shown_class(classes, decision, of_class),
        split=split,
        part=part,
        seeds=tuple(seeds),
    )


def combine(tile_scores: Sequence[TileScores], column: int) -> dict[str, Floats]:
    """Name -> (N,) mean over the seeds, of all that every seed has, for the class in `column`."""
    parts: dict[str, list[NDArray[np.float64] | None]] = {"attention": [], "instance": [], "product": [], "effect": []}
    for each in tile_scores:
        attention, instance, effect = (
            None if array is None else array[:, column].astype(np.float64)
            for array in (each.attention_NC, each.instance_NC, each.effect_NC)
        )
        product = None if attention is None or instance is None else attention * instance
        for name, values in zip(parts, (attention, instance, product, effect), strict=True):
            parts[name].append(values)
    return {
        name: np.mean(known, axis=0).astype(np.float32)
        for name, rows in parts.items()
        if len(known := [row for row in rows if row is not None]) == len(rows)
    }


# ---------------------------------------------------------------------------------------------------- the map


def make_map(
    slide: str,
    model: str,
    method: str,
    frame: Frame,
    coords_l0: NDArray[np.int64],
    tile_scores: Sequence[TileScores],
    verdict: Verdict,
    settings: LocalizeSettings,
    *,
    source: HeatmapSource | None = None,
    annotated: Floats | None = None,
    warnings: Sequence[str] = (),
    details: Mapping[str, Any] | None = None,
) -> SlideMap:
    """The map of a slide from what each seed's model says of its tiles (`coords_l0`, (N, 2) top left corners).

    `verdict.shown` names the class; `source` what annotated validation slides chose to show, else `settings.score`
    decides. A gated map of a slide that was not found positive is 0 throughout.
    """
    column = 0 if len(verdict.probability) == 1 else verdict.classes.index(verdict.shown)
    columns = combine(tile_scores, column)
    source = source or source_without_evidence(settings.score, columns, method)
    kind = source.kind
    values = columns[kind]
    if len(values) != len(coords_l0):
        raise BagError(f"{slide}: {len(values)} scores for {len(coords_l0)} tiles", "each tile needs its own")
    score = rescale(values, settings.scale, settings.z_limit)
    notes = list(warnings)
    if not score.any():
        notes.append(
            f"the {kind} of its tiles does not differ after scaling ({settings.scale}): the map points nowhere"
        )
    if settings.gate and not verdict.is_positive:
        score = np.zeros_like(score)
    return SlideMap(
        slide=slide,
        model=model,
        method=method,
        kind=kind,
        scale=settings.scale,
        gated=settings.gate,
        frame=frame,
        verdict=verdict,
        coords_l0=coords_l0,
        score=score,
        detection=(score * np.float64(verdict.shown_probability)).astype(np.float32),
        columns=columns,
        annotated=annotated,
        warnings=tuple(notes),
        details={**(details or {}), "shown_because": source.reason},
    )
