"""What the page shows of encoders: how pretraining went, and the views of tiles it was trained on.

*Quality* is measured without labels while an encoder is trained: chance-corrected agreement of the neighbours of two
views of a tile, 0 for random embeddings, 1 where the view makes no difference. All measurements see the same tiles, so
a standard error of their difference that takes them as independent is too large: small differences count as none.

*Views* are a function of seed, tile, step and settings (`data.views`), so those of the first training step are
reproduced from the slides.

Axes in names: B tiles of a batch, V views, S edge of a view.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from selfvitmil import stain
from selfvitmil.cohort import Cohort
from selfvitmil.data.loader import order_of
from selfvitmil.data.sources import SlideTiles, TrainSlide
from selfvitmil.data.views import make_views, view_recipes
from selfvitmil.errors import ConfigError, MetricError, SelfVitMilError
from selfvitmil.evaluate import figures
from selfvitmil.pseudonyms import Names
from selfvitmil.report.render import Picture, Shown, chart, is_finite, picture
from selfvitmil.settings import StudySettings, tiling_name, without_removed
from selfvitmil.slides import SlideRef
from selfvitmil.store.files import section
from selfvitmil.store.layout import StudyLayout

LAST_VALUES = {
    "step": "last step", "loss": "loss", "teacher_entropy": "teacher entropy", "feature_rank": "feature rank",
    "knn20": "nearest-neighbour probe", "linear": "linear probe", "tiles_per_s": "tiles per second",
    "data_wait_share": "share of time waiting for tiles",
}  # fmt: skip
"""Values of the last line of `metrics.jsonl` that are shown, and their names."""

Pixels = NDArray[np.uint8]
Rows = NDArray[np.int64]


@dataclass(frozen=True)
class EncoderFolder:
    """The files of an encoder."""

    name: str
    config: Mapping[str, Any]
    metrics: Sequence[Mapping[str, Any]]
    """Lines of `metrics.jsonl`; none for an encoder that was not trained in this study."""
    settings: Mapping[str, Any]
    slides: Sequence[str] = ()
    """Slides that it was trained on, as far as its folder says."""

    @property
    def provenance(self) -> Mapping[str, Any]:
        """How it was trained, by its config; empty where that does not say."""
        return section(self.config, "selfvitmil", "provenance")

    @property
    def kept_step(self) -> int | None:
        """Steps after which its weights were taken; None where its config does not say."""
        info = self.provenance.get("kept_step")
        return info if isinstance(info, int) else None


@dataclass(frozen=True)
class SampleViews:
    """A training tile beside its views in the first step."""

    slide: str
    tile: Picture
    large: tuple[Picture, ...]
    small: tuple[Picture, ...]


@dataclass(frozen=True)
class EncoderData:
    """An encoder as the page shows it."""

    name: str
    description: str
    is_trained_here: bool
    assessment: Assessment | None = None
    curves: Shown | None = None
    quality: Shown | None = None
    last_values: tuple[tuple[str, float], ...] = ()
    """Name and value at the end of the training."""
    alarms: tuple[str, ...] = ()
    views: tuple[SampleViews, ...] | str | None = None
    """A sentence where they cannot be reproduced; None for all but the first encoder that was trained here."""


def encoder_data(encoder: EncoderFolder, names: Names, views: tuple[SampleViews, ...] | str | None) -> EncoderData:
    """Return what is known of an encoder and of the course of its training."""
    description = describe_encoder(encoder)
    if not encoder.metrics:
        return EncoderData(encoder.name, description, False)
    warmup, measured = encoder.provenance.get("warmup_steps"), measurements(encoder.metrics)
    try:
        curves = chart(pretraining_figure(encoder.metrics, f"Pretraining of {encoder.name}"), names)
    except MetricError as error:
        curves = str(error)
    quality = quality_figure(measured, encoder.kept_step, f"Quality of {encoder.name}") if measured else None
    last = encoder.metrics[-1]
    alarms = dict.fromkeys(f"step {line['step']}: {line['alarm']}" for line in encoder.metrics if "alarm" in line)
    return EncoderData(
        name=encoder.name,
        description=description,
        is_trained_here=True,
        assessment=assess(measured, encoder.kept_step, warmup if isinstance(warmup, int) else 0),
        curves=curves,
        quality=chart(quality, names) if quality else None,
        last_values=tuple((name, last[key]) for key, name in LAST_VALUES.items() if is_finite(last.get(key))),
        alarms=tuple(alarms)[:3],
        views=views,
    )


def describe_encoder(encoder: EncoderFolder) -> str:
    """Return network, method, length and slides of a training; empty where nothing is known."""
    own, info = section(encoder.config, "selfvitmil"), encoder.provenance
    parts = [str(encoder.config.get("architecture", "")), str(info.get("method", "")), *describe_steps(info)]
    parts += [f"trained on: {own['trained_on']}"] if own.get("trained_on") else []
    return ", ".join(filter(None, parts))


def describe_steps(provenance: Mapping[str, Any]) -> list[str]:
    """Return the length of a training, and which of its weights were kept where these are not the last."""
    total = provenance.get("total_steps")
    if not isinstance(total, int):
        return []
    info = (provenance.get(key) for key in ("ended_step", "kept_step"))
    ended, kept = (value if isinstance(value, int) else total for value in info)
    length = f"{total:,} steps" if ended >= total else f"stopped early after {ended:,} of {total:,} steps"
    return [length] if kept >= ended else [length, f"weights of step {kept:,} kept"]


# ---------------------------------------------------------------------------------------------------- quality

CLEARLY = 2.0
"""Standard errors beyond which a difference counts; so wide is the band in the figure."""
END_SHARE = 0.25
"""Share of the run, at its end, over which quality must not have risen to have levelled off."""
FEWEST = 4
"""Measurements needed to assess the course of a run."""
COLLAPSED_RANK = 1.5
"""Effective rank of the embeddings of the measured tiles below which they all point one way."""


class Course(Enum):
    """How quality developed."""

    COLLAPSED = "collapsed"
    CHANCE = "chance"
    FELL = "fell"
    IMPROVING = "improving"
    LEVELLED_OFF = "levelled off"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Assessment:
    """The course of a run, and the sentence for people."""

    course: Course
    sentence: str

    @property
    def is_warning(self) -> bool:
        return self.course in (Course.COLLAPSED, Course.CHANCE, Course.FELL)


class Measurement(NamedTuple):
    """Quality of the weights after so many steps."""

    steps: int
    quality: float
    error: float
    """Standard error of the quality."""
    rank: float | None = None
    """Effective rank of the embeddings, where it was measured."""


def measurements(lines: Sequence[Mapping[str, Any]]) -> list[Measurement]:
    """Return the measurements in lines of `metrics.jsonl`; none of encoders that were trained without them."""
    found: list[Measurement] = []
    for line in lines:
        info = [line[key] if is_finite(line.get(key)) else None for key in ("step", "quality", "quality_se")]
        step, quality, error = info
        if step is not None and quality is not None and error is not None:
            rank = line.get("sample_rank")
            found.append(Measurement(int(step) + 1, quality, error, rank if is_finite(rank) else None))
    return found


def assess(measured: Sequence[Measurement], kept_step: int | None = None, warmup_steps: int = 0) -> Assessment | None:
    """Return what became of the run; None where nothing was measured.

    `kept_step` is the number of steps after which the weights of the encoder were taken, None for the last ones.
    Measurements before `warmup_steps` do not count: an untrained network compares colours, which views share.
    """
    if not measured:
        return None
    before = [one for one in measured if kept_step is None or one.steps <= kept_step]
    kept = before[-1] if before else measured[0]
    by_chance = kept.quality <= CLEARLY * kept.error
    if by_chance if kept.rank is None else kept.rank < COLLAPSED_RANK:
        return Assessment(Course.COLLAPSED, "The features collapsed: do not use this encoder.")
    if by_chance:
        words = "Quality is no better than chance: too few steps, a wrong --pretrain.lr, or too few tiles to tell."
        return Assessment(Course.CHANCE, words)
    trained = [one for one in measured if one.steps >= warmup_steps]
    if len(trained) < FEWEST:
        words = f"Quality was measured {len(trained)} times after the warm-up: too few to tell whether more steps help."
        return Assessment(Course.UNKNOWN, words)
    best = max(trained, key=lambda one: one.quality)
    after = [one for one in trained if one.steps > best.steps][-2:]
    if not after or not all(_is_better(best, one) for one in after):
        return _assess_end(trained, kept)
    if _is_better(best, kept):
        words = "and the later, worse weights were kept: train again with"
        return Assessment(Course.FELL, f"Quality fell after step {best.steps:,} {words} --pretrain.steps {best.steps}.")
    words = f"Quality fell after step {best.steps:,}; the weights of step {kept.steps:,} were kept."
    return Assessment(Course.FELL, words)


def _assess_end(trained: Sequence[Measurement], kept: Measurement) -> Assessment:
    """Return whether quality rose to the end or levelled off before.

    It is level from the first measurement on after which no rise shows. That may be for lack of measurements: so the
    level must last for a while, and the rise before it must have been steeper.
    """
    level = next(k for k in range(len(trained)) if not _rises_from(trained[k:]))
    last, since = trained[-1].steps, trained[level].steps
    if last - since < END_SHARE * last or not _slows_at(trained, level):
        words = "The encoder was still improving when training ended: more steps may help."
        return Assessment(Course.IMPROVING, words)
    state = f"has levelled off since step {since:,}" if level else f"has not risen since step {since:,}"
    which = f" (the weights of step {kept.steps:,} were kept)" if kept.steps < last else ""
    return Assessment(Course.LEVELLED_OFF, f"Quality {state}{which}: longer training is unlikely to help.")


def _rises_from(ahead: Sequence[Measurement]) -> bool:
    """Return whether quality gets clearly better after the first of these: in one of them, or by their trend."""
    trend = slope(ahead)
    by_trend = len(ahead) >= FEWEST and trend.value > CLEARLY * trend.error
    return by_trend or any(_is_better(one, ahead[0]) for one in ahead[1:])


def _slows_at(trained: Sequence[Measurement], level: int) -> bool:
    """Return whether quality rose more steeply before a measurement than, over as many at most, after it."""
    after = trained[level:]
    before, later = slope(trained[max(level - len(after), 0) : level + 1]), slope(after)
    return level == 0 or before.value - later.value > math.hypot(before.error, later.error)


def _is_better(one: Measurement, other: Measurement) -> bool:
    return one.quality - other.quality > CLEARLY * math.hypot(one.error, other.error)


class Slope(NamedTuple):
    """Rise per step, and its standard error."""

    value: float
    error: float


def slope(measured: Sequence[Measurement]) -> Slope:
    """Fit a line by weighted least squares; for a single measurement the error is infinite."""
    steps, quality, error = (np.array([one[k] for one in measured], dtype=np.float64) for k in range(3))
    weights = 1 / np.maximum(error, 1e-9) ** 2
    centred = steps - np.average(steps, weights=weights)
    spread = float(weights @ centred**2)
    return (
        Slope(float(weights @ (centred * quality)) / spread, 1 / math.sqrt(spread))
        if spread > 0
        else Slope(0, math.inf)
    )


# ---------------------------------------------------------------------------------------------------- curves

PANELS = (
    ("loss", "loss"),
    ("teacher_entropy", "teacher entropy"),
    ("kl", "teacher to student (KL)"),
    ("feature_rank", "feature rank"),
    ("feature_std", "spread of features"),
    ("knn20", "probe: nearest neighbours"),
    ("linear", "probe: linear classifier"),
    ("alignment", "alignment of views"),
    ("uniformity", "uniformity"),
    ("tiles_per_s", "tiles per second"),
)
"""Values in a line of `metrics.jsonl`, and the titles of their panels."""


@figures.styled
def draw_pretraining(lines: Sequence[Mapping[str, Any]], title: str = "Pretraining") -> Figure:
    """Draw a panel over steps for each of `PANELS` that the lines of `metrics.jsonl` have.

    Raises MetricError where they have none.
    """
    shown = [(key, name) for key, name in PANELS if any(is_finite(line.get(key)) for line in lines)]
    if not shown:
        raise MetricError(f"{title}: no numbers", "there is nothing to draw", "Train it again", code="no-numbers")
    figure = Figure()
    panels: list[Any] = list(figure.subplots(-(-len(shown) // 2), 2, squeeze=False).ravel())
    for axes, (key, name) in zip(panels, shown, strict=False):
        points = [(line["step"], line[key]) for line in lines if "step" in line and is_finite(line.get(key))]
        step, value = np.array(points, dtype=np.float64).T
        axes.plot(step, value, "o-" if len(step) < 8 else "-", color=figures.BLUE, lw=1.6, ms=3.5)
        axes.set_title(name, size=9, weight="bold")
        axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(4))
        axes.grid(visible=True)
    for axes in panels[len(shown) :]:
        axes.set_axis_off()
    for axes in panels[max(0, len(shown) - 2) : len(shown)]:
        axes.set_xlabel("step")
    caption = [f"{len(lines)} measurements over {int(lines[-1].get('step', 0)) + 1} steps."]
    if any(key == "teacher_entropy" for key, _ in shown):
        caption.append("Collapse shows as a rank near 1, or as an entropy near 0 or near its largest possible value.")
    return figures.finish(figure, 1.35 * (len(panels) // 2), title, caption, {}, "honest")


@figures.styled
def draw_quality(measured: Sequence[Measurement], kept_step: int | None = None, title: str = "Quality") -> Figure:
    """Draw quality over steps with its error band; a line marks the step whose weights were kept, where it is known."""
    figure = Figure()
    axes: Any = figure.subplots()
    steps, quality, error = (np.array(values, dtype=np.float64) for values in list(zip(*measured, strict=True))[:3])
    low, high = quality - CLEARLY * error, quality + CLEARLY * error
    band = axes.fill_between(steps, low, high, color=figures.PALE, lw=0)
    (line,) = axes.plot(steps, quality, "o-", color=figures.BLUE, lw=1.6, ms=3.5)
    handles: dict[str, Any] = {"quality": (band, line)}
    if kept_step is not None:
        handles["weights kept"] = axes.axvline(kept_step, color=figures.ORANGE, lw=1.4, ls="--")
    axes.axhline(0, color=figures.GREY, lw=0.8)
    axes.set_ylim(min(0.0, float(low.min())))
    axes.set_xlabel("step")
    axes.set_ylabel("quality")
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.grid(visible=True)
    caption = [
        "Agreement of the nearest neighbours of two views of a tile: 0 is chance, 1 is full agreement.",
        f"Band: {CLEARLY:g} standard errors.",
    ]
    return figures.finish(figure, 1.9, title, caption, handles, "honest")


pretraining_figure = figures.as_svg(draw_pretraining)
quality_figure = figures.as_svg(draw_quality)


# ---------------------------------------------------------------------------------------------------- views

NUM_SAMPLES = 4
NUM_LARGE = 2
"""Large views of a tile, with every method; others are small."""
LARGE_PX, SMALL_PX = 128, 72
"""Largest edges of tiles and large views, and of small views, on the page."""


@dataclass(frozen=True, eq=False)
class Sample:
    """A training tile (H, W, 3), with its stains normalized where the training did so, and its views."""

    slide: str
    tile: Pixels
    large: Sequence[Pixels]
    small: Sequence[Pixels]


def sample_views(
    layout: StudyLayout, cohort: Cohort | None, encoder: EncoderFolder, names: Names
) -> tuple[SampleViews, ...] | str:
    """Return tiles with their views, or why they cannot be reproduced."""
    try:
        return tuple(show_sample(sample, names) for sample in read_samples(layout, cohort, encoder))
    except SelfVitMilError as error:
        return error.reason
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError):  # a config or settings of another kind
        return "its config.json or settings.toml cannot be used"


def show_sample(sample: Sample, names: Names) -> SampleViews:
    """Encode the pictures of a sample."""
    slide = names.slide(sample.slide)

    def encode(views: Sequence[Pixels], size: str, edge_px: int) -> tuple[Picture, ...]:
        return tuple(picture(view, f"{size} view {k}", edge_px=edge_px, quality=72) for k, view in enumerate(views, 1))

    tile = picture(sample.tile, f"training tile of {slide}", edge_px=LARGE_PX, quality=72)
    return SampleViews(slide, tile, encode(sample.large, "large", LARGE_PX), encode(sample.small, "small", SMALL_PX))


def read_samples(layout: StudyLayout, cohort: Cohort | None, encoder: EncoderFolder) -> list[Sample]:
    """Return tiles of the first training step and their views. Raises SelfVitMilError where tiles have changed."""
    if not encoder.config:
        raise ConfigError("its training is not finished", code="training-unfinished")
    settings = StudySettings.model_validate(without_removed(encoder.settings))
    own, source, readable = settings.pretrain, *_training_tiles(layout, cohort, encoder, settings)
    pool = next(order_of(source, own).pools(0, 1))
    tiles = choose_tiles(pool.tiles[pool.batches[0]], source.counts, readable)
    firsts = np.concatenate([[0], np.cumsum(source.counts)])
    groups = np.searchsorted(firsts, tiles, side="right") - 1
    parts = [
        source.reader.read(int(group), source.request(int(group), np.array([tile - firsts[group]]))).tiles_B3HW
        for group, tile in zip(groups, tiles, strict=True)
    ]
    tiles_B3HW, transforms_B33 = torch.cat(parts), source.stain_transforms(groups)
    recipes = view_recipes(own, source.size_px, _patch_px(encoder.config))
    mean, std = (encoder.config["pretrained_cfg"][key] for key in ("mean", "std"))
    ids_B = torch.as_tensor(source.ids[tiles])
    views = make_views(tiles_B3HW, ids_B, 0, recipes, mean, std, seed=own.seed, transforms_B33=transforms_B33)
    if transforms_B33 is not None:
        tiles_B3HW = stain.apply_transforms(tiles_B3HW, transforms_B33)
    flat_VB = [_as_pixels(view_B3SS, mean, std) for part_VB3SS in views for view_B3SS in part_VB3SS]
    pixels_BHW3: Pixels = tiles_B3HW.permute(0, 2, 3, 1).numpy()
    return [
        Sample(
            source.names[int(group)],
            pixels_BHW3[k],
            [view_B[k] for view_B in flat_VB[:NUM_LARGE]],
            [view_B[k] for view_B in flat_VB[NUM_LARGE:]],
        )
        for k, group in enumerate(groups)
    ]


def _training_tiles(
    layout: StudyLayout, cohort: Cohort | None, encoder: EncoderFolder, settings: StudySettings
) -> tuple[SlideTiles, NDArray[np.bool_]]:
    """Return the tiles that the encoder was trained on, and of which slides they can still be read."""
    tiling, trained_on = tiling_name(settings.tile), set(encoder.slides)
    rows = [row for row in cohort.rows if row.slide in trained_on] if cohort else []
    slides = [TrainSlide(SlideRef.of(row, settings.slide), layout.tile_table(tiling, row.slide)) for row in rows]
    slides = [slide for slide in slides if slide.table.exists()]
    if not slides:
        raise ConfigError(
            "tiles of the slides that it was trained on are not in this study", code="training-tiles-missing"
        )
    source = SlideTiles(slides, stain_method=settings.stain.method)
    info = encoder.provenance
    if (info.get("slides"), info.get("tiles")) != (len(source.counts), sum(source.counts)):
        raise ConfigError("the study's tiles are no longer those that it was trained on", code="training-tiles-changed")
    readable = [slide.slide.path.exists() for slide in slides]
    if not any(readable):
        raise ConfigError("no file of the slides that it was trained on is there", code="training-slides-missing")
    return source, np.array(readable)


def choose_tiles(batch: Rows, counts: Sequence[int], readable: NDArray[np.bool_]) -> Rows:
    """Return some tiles of a batch, of as many readable slides as possible. Raises ConfigError where there are none."""
    tiles = np.unique(batch)
    groups = np.searchsorted(np.cumsum(counts), tiles, side="right")
    slides = evenly_spaced(np.unique(groups[readable[groups]]), NUM_SAMPLES)
    if not len(slides):
        raise ConfigError("no file of the slides of its first step is there", code="training-slides-missing")
    each, more = divmod(NUM_SAMPLES, len(slides))
    parts = [evenly_spaced(tiles[groups == slide], each + (place < more)) for place, slide in enumerate(slides)]
    return np.concatenate(parts)


def _as_pixels(view_B3SS: torch.Tensor, mean: Sequence[float], std: Sequence[float]) -> Pixels:
    """Return normalized views as pixels (B, S, S, 3)."""
    scale, shift = (torch.tensor(values).view(3, 1, 1) for values in (std, mean))
    grey = ((view_B3SS.float() * scale + shift) * 255).round().clamp(0, 255)
    return grey.to(torch.uint8).permute(0, 2, 3, 1).numpy()


def _patch_px(config: Mapping[str, Any]) -> int | None:
    """Return the edge of the patches of a ViT, by its config alone; None of a network without a class token."""
    if section(config, "selfvitmil").get("layout") == "pooled":
        return None
    info = section(config, "model_args").get("patch_size")
    named = re.search(r"patch(\d+)", str(config.get("architecture", "")))
    return int(info) if info else int(named.group(1)) if named else None


def evenly_spaced(items: Rows, most: int) -> Rows:
    """Return at most `most` of the items, evenly spaced, the first and the last among them."""
    if len(items) <= most:
        return items
    return items[np.round(np.linspace(0, len(items) - 1, most)).astype(np.int64)]
