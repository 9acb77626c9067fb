"""From an aggregator's per-tile evidence to the scores of a heatmap; pure.

**Source.** `localize.score` names the evidence that is shown (attention, the tiles' own scores, their product, or the
effect of leaving a tile out), or `auto` chooses: where validation slides are annotated, the one that ranks annotated
tiles highest on them; else the tiles' own scores where the method has them, which gave the better heatmaps on every set
measured (docs/experiments/attention.md). No annotation of a test slide is used.

**Seeds.** In come one `TileScores` per seed (`score_by_seeds`) and the slide's prediction (`ensemble_prediction`), out
comes a `Heatmap`. Seeds are combined by the mean of their attention, of their instance probabilities, of the products
of the two, and of their effects.

**Scale.** The shown column is put on a scale from 0 to 1 (z are z-scores with the population's standard deviation):

    winsor          z clipped to -limit and +limit, then min-max scaled
    zero-outliers   what lies above +limit is 0, the rest min-max scaled: the paper's rule to the letter, which may
                    erase the very tile that decided the prediction
    percentile      share of the other tiles that score less; ties share the mean of their ranks
    none            min-max scaled

Scores that do not differ are uninformative: all are 0, with a warning. The only tile of a slide is 1.

N tiles, C classes, S seeds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from selfvitmil import metrics
from selfvitmil.errors import BagError, ConfigError
from selfvitmil.localize.heatmap import Floats, Frame, Heatmap, SlidePrediction
from selfvitmil.settings import LocalizeSettings

if TYPE_CHECKING:  # these load torch, which overlays do not need
    from selfvitmil.aggregate import Aggregator
    from selfvitmil.aggregate.base import BagScore, TileScores
    from selfvitmil.aggregate.train import BagStore
    from selfvitmil.bags import Bag
    from selfvitmil.evaluate.predictions import Choice
    from selfvitmil.outcomes import Outcome

AUTO = ("instance", "attention", "effect")
"""What `auto` takes where there is no evidence, the first that there is."""
CANDIDATES = ("instance", "attention")
"""What annotated validation slides choose between; of equals the first."""
TUMOUR_SHARE = 0.5
"""A tile is tumour when at least this share of it is annotated."""
NORMAL_SHARE = 0.01
"""A tile is normal when less than this share of it is annotated: a contour may brush it."""
Scale = Literal["winsor", "zero-outliers", "percentile", "none"]

SAME = 1e-6
"""Scores whose deviation is a smaller share of their size do not differ: float32 knows no more digits."""


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
            f"its per-tile evidence is {' and '.join(columns) or 'none'}",
            "Leave localize.score at auto, or use effect, which every method has",
            code="no-such-evidence",
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
    listed = ", ".join(f"{kind} {value:.3f}" for kind, value in precision.items())
    chosen_by = f"{num_slides} annotated validation slide{'s' * (num_slides > 1)}"
    why = f"best on {chosen_by} (average precision of tiles: {listed})"
    return HeatmapSource(best, why, precision, num_slides)


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
    """Return the class that a heatmap shows: the positive one of two, else `of_class`, else the predicted one."""
    if of_class is not None and of_class not in classes:
        raise ConfigError(
            f"localize.of_class {of_class!r}",
            f"the classes are {', '.join(classes)}",
            "Name one of them",
            code="unknown-class",
        )
    if len(classes) > 2:
        return of_class or classes[decision]
    if of_class is not None and of_class != classes[1]:
        raise ConfigError(
            f"localize.of_class {of_class!r}",
            f"of two classes heatmaps show the evidence for the positive one, {classes[1]}",
            "Leave it out, or train with train.positive",
            code="not-the-positive-class",
        )
    return classes[1]


def score_by_seeds(modules: Iterable[Aggregator], bag: Bag, kind: str, store: BagStore) -> list[TileScores]:
    """Return the per-tile evidence of every seed's model. Each tile is left out once only where `kind` needs it:
    `effect` is wanted, or `auto` finds nothing else. Raises BagError where the bag does not fit the models."""
    from selfvitmil.aggregate.base import score_tiles

    modules = list(modules)
    scores = [next(score_tiles(module, [bag], store=store, effect=kind == "effect")) for module in modules]
    silent = all(each.attention_NC is None and each.instance_NC is None for each in scores)
    if kind == "auto" and silent:
        return [next(score_tiles(module, [bag], store=store, effect=True)) for module in modules]
    return scores


def ensemble_prediction(
    scores: Sequence[BagScore],
    choice: Choice,
    classes: Sequence[str],
    of_class: str | None,
    *,
    split: str,
    part: str,
    seeds: Sequence[int],
) -> SlidePrediction:
    """The very numbers of the evaluation: the mean of the seeds' `scores`, decided by the ensemble's own threshold."""
    probability = mean_probabilities([each.probabilities for each in scores])
    assert probability is not None
    decision = int(choice.decide(np.array([probability]))[0])
    return SlidePrediction(
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


def outcome_prediction(
    scores: Sequence[BagScore],
    choice: Choice,
    validation_VK: NDArray[np.float64],
    of_class: str | None,
    *,
    split: str,
    part: str,
    seeds: Sequence[int],
) -> SlidePrediction:
    """The same with another outcome than classes; `validation_VK` are the ensemble's scores of validation slides.

    Of several labels the heatmap shows `of_class`, else the most probable one. Otherwise it shows evidence for a high
    value or risk, which means above the median of validation slides.
    """
    outcome = choice.outcome
    assert outcome is not None
    score = mean_probabilities([each.probabilities for each in scores])
    assert score is not None
    about: dict[str, Any] = {
        "max_probability": None,
        "bag_probability": None,
        "split": split,
        "part": part,
        "seeds": tuple(seeds),
    }
    if outcome.evidence_per_column:
        shown = of_class or outcome.columns[int(np.argmax(score))]
        present = score[outcome.columns.index(shown)] >= 0.5
        words = ", ".join(f"{name} {value:.3f}" for name, value in zip(outcome.columns, score, strict=True))
        return SlidePrediction(
            probability=score, decision=shown if present else f"not {shown}", threshold=0.5, threshold_from="fixed 0.5",
            classes=outcome.columns, shown=shown, value_words=f"Probabilities: {words}", **about,
        )  # fmt: skip
    rank, ranks = outcome.rank(np.array([score]))[0], outcome.rank(validation_VK)
    below = float((ranks < rank).mean() + (ranks == rank).mean() / 2)
    high = rank >= np.median(ranks) if choice.threshold is None else rank >= choice.threshold
    (group,) = choice.decide(np.array([score]))
    said = f"{outcome.rank_words} {rank:.3f}, higher than {100 * below:.0f} % of the validation slides"
    if group is not None:
        said += f"; group: {outcome.groups[group]}"
    return SlidePrediction(
        probability=(below,), decision=outcome.poles[int(high)], threshold=None,
        threshold_from=choice.threshold_from if choice.threshold is not None else "median of validation slides",
        classes=outcome.poles, shown=outcome.poles[1], value_words=said, **about,
    )  # fmt: skip


def check_shown(outcome: Outcome, of_class: str | None) -> None:
    """Raise ConfigError for a class that heatmaps of an outcome cannot show."""
    labels = outcome.columns if outcome.evidence_per_column else ()
    if of_class is not None and of_class not in labels:
        raise ConfigError(
            f"localize.of_class {of_class!r}",
            f"the labels are {', '.join(labels)}" if labels else f"heatmaps show evidence for {outcome.poles[1]}",
            "Name one of them" if labels else "Leave it out",
            code="unknown-class",
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


# ---------------------------------------------------------------------------------------------------- the heatmap


def build_heatmap(
    slide: str,
    model: str,
    method: str,
    frame: Frame,
    coords_l0: NDArray[np.int64],
    tile_scores: Sequence[TileScores],
    prediction: SlidePrediction,
    settings: LocalizeSettings,
    *,
    source: HeatmapSource | None = None,
    annotated: Floats | None = None,
    warnings: Sequence[str] = (),
    details: Mapping[str, Any] | None = None,
) -> Heatmap:
    """Build the heatmap of a slide from the per-tile evidence of every seed; `coords_l0` (N, 2) are top left corners.

    `prediction.shown` names the class; `source` what annotated validation slides chose to show, else `settings.score`
    decides. A gated heatmap of a slide that is not called positive is 0 throughout.
    """
    column = 0 if len(prediction.probability) == 1 else prediction.classes.index(prediction.shown)
    columns = combine(tile_scores, column)
    source = source or source_without_evidence(settings.score, columns, method)
    kind = source.kind
    values = columns[kind]
    if len(values) != len(coords_l0):
        raise BagError(
            f"{slide}: {len(values)} scores for {len(coords_l0)} tiles",
            "each tile needs its own",
            code="length-mismatch",
        )
    score = rescale(values, settings.scale, settings.z_limit)
    notes = list(warnings)
    if not score.any():
        notes.append(
            f"the {kind} of its tiles does not differ after scaling ({settings.scale}): the heatmap is uninformative"
        )
    if settings.gate and not prediction.is_positive:
        score = np.zeros_like(score)
    return Heatmap(
        slide=slide,
        model=model,
        method=method,
        kind=kind,
        scale=settings.scale,
        gated=settings.gate,
        frame=frame,
        prediction=prediction,
        coords_l0=coords_l0,
        score=score,
        detection=(score * np.float64(prediction.shown_probability)).astype(np.float32),
        columns=columns,
        annotated=annotated,
        warnings=tuple(notes),
        details={**(details or {}), "shown_because": source.reason},
    )
