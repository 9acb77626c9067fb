"""Figures of an evaluation as SVG text, from plain arrays; `write_figures` writes those of an evaluated method.

`draw_...` makes a matplotlib Figure, `to_svg` turns it into text, `..._figure` does both. Every figure has a title, a
plot with its intervals and a caption that says how many slides of each class it rests on and where the threshold came
from; a figure of the optimistic protocol has the word OPTIMISTIC in its title.

Splits with disjoint test sets share a figure, with curves averaged over splits: slides of different splits have scores
of different models and are not ranked together. Where test sets overlap (Monte Carlo), each split has its own files. A
figure that cannot be drawn, for example because a class is missing, is skipped, and the reason is returned.

Figures are 4.8 inches wide, so that their smallest words are still 10 pixels high where a page shows them 400 pixels
wide. What colour tells, width, dashes or shape tell too. Text stays text: it can be searched and read aloud, and any
sans-serif font may stand in for DejaVu Sans, which is wide, so others fit. pyplot is never loaded; the user's own
matplotlib style has no say, and equal input gives equal bytes.
"""

from __future__ import annotations

import io
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypedDict, Unpack

import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.legend_handler import HandlerTuple
from matplotlib.ticker import MaxNLocator
from numpy.typing import ArrayLike, NDArray

from selfvitmil import formatting as plain
from selfvitmil.errors import MetricError
from selfvitmil.evaluate.comparison import ComparisonRow, EvaluatedOn, check_rows
from selfvitmil.evaluate.decisions import CURVE_FILE, SET_FILE, decisions_of
from selfvitmil.evaluate.method_metrics import Samples, are_disjoint, normalized, samples_of
from selfvitmil.evaluate.protocol import MethodResult
from selfvitmil.formatting import shorten
from selfvitmil.metrics import (
    DecisionCurve,
    Interval,
    Reliability,
    auc,
    auc_interval,
    average_precision,
    brier,
    confusion_matrix,
    curve_bands,
    decide,
    pr_curve,
    reliability,
    roc_curve,
    top_class,
    wilson,
)
from selfvitmil.metrics.classification import Floats, Labels, check_labels, check_scores
from selfvitmil.settings import EvaluateSettings
from selfvitmil.store.files import write_text

Protocol = Literal["honest", "optimistic"]
P = ParamSpec("P")

BLUE, ORANGE, GREY, PALE, INK = "#0072b2", "#d55e00", "#767676", "#c9d3da", "#222222"
BLUES = LinearSegmentedColormap.from_list("blues", ["#ffffff", "#cfe3f0", "#5aa3cf", "#00507d"])
WIDTH_IN = 4.8
SMALL_PT = 8.5
LINE_PT = 11.5
NUM_BINS = 10
"""Of stated probabilities, in figures of calibration."""
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "selfvitmil",
    "text.parse_math": False,  # names of classes may hold dollars
    "text.color": INK,
    "font.size": 9,
    "axes.labelsize": 9,
    "axes.labelcolor": INK,
    "axes.edgecolor": GREY,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "grid.color": "#e8e8e8",
    "grid.linewidth": 0.6,
    "legend.fontsize": SMALL_PT,
    "legend.frameon": False,
    "errorbar.capsize": 0,
}


class CurveOptions(TypedDict, total=False):
    """Optional arguments of ROC and precision-recall figures."""

    seed_scores: Sequence[ArrayLike]
    """Scores of the single seeds, each shaped as `scores`; drawn as thin lines."""
    class_names: Sequence[str]
    threshold: float | ArrayLike | None
    """Threshold of score >= threshold: one, or one per sample (of its fold). None with several classes."""
    threshold_from: str
    """Origin of the threshold, for example `Youden on validation`."""
    groups: ArrayLike | None
    """Patients: the resampling unit of intervals and bands."""
    folds: ArrayLike | None
    """Fold of each sample: samples are ranked within folds, and curves are means over folds."""
    protocol: Protocol
    level: float
    resamples: int
    seed: int


# ---------------------------------------------------------------------------------------------------- page and text


@contextmanager
def _style() -> Iterator[None]:
    """Context with our style on matplotlib's defaults, independent of the user's own style."""
    with matplotlib.style.context(["default", STYLE]), warnings.catch_warnings():
        # Names may need glyphs that DejaVu Sans lacks. It only measures them: the viewer's fonts draw them.
        warnings.filterwarnings("ignore", r"Glyph .* missing from font")
        yield


def to_svg(figure: Figure) -> str:
    """Return the figure as SVG text without date or random ids, with a title for screen readers."""
    text = io.StringIO()
    with _style():
        _settle(figure)
        info = {"Date": None, "Creator": "selfvitmil", "Title": str(figure.get_label())}
        FigureCanvasSVG(figure).print_figure(text, format="svg", metadata=info, facecolor="white")
    return text.getvalue()


def _settle(figure: Figure) -> None:
    """Lay the figure out now, to a millionth of its size: the solver's last digits differ from run to run, and the
    names of clips in the file are made from them."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    for axes in figure.axes:
        axes.set_position(tuple(np.round(axes.get_position(original=True).bounds, 6)))


def styled(draw: Callable[P, Figure]) -> Callable[P, Figure]:
    """Decorator: draw in our style."""

    @wraps(draw)
    def drawn(*args: P.args, **kwargs: P.kwargs) -> Figure:
        with _style():
            return draw(*args, **kwargs)

    return drawn


def as_svg(draw: Callable[P, Figure]) -> Callable[P, str]:
    """Return the function with SVG text as its result."""

    def drawn(*args: P.args, **kwargs: P.kwargs) -> str:
        return to_svg(draw(*args, **kwargs))

    drawn.__doc__ = f"SVG text of: {draw.__doc__}"
    return drawn


def finish(
    figure: Figure,
    plot_in: float,
    title: str,
    caption: Sequence[str],
    handles: Mapping[str, Any],
    protocol: Protocol,
    legend_in: Axes | None = None,
) -> Figure:
    """Set the figure's height and add title, legend (or in an empty panel) and caption."""
    if protocol == "optimistic":
        title += ": OPTIMISTIC"
        caption = [*caption, "OPTIMISTIC: epoch and threshold were chosen on the test slides; expect less on others."]
    head, foot = _wrap(title, 44), _wrap(" ".join(filter(None, caption)), 72)
    rows = 0 if legend_in or not handles else -(-len(handles) // 3)
    head_in, rows_in, foot_in = (15 * len(head) + 8) / 72, rows * LINE_PT / 72, (LINE_PT * len(foot) + 12) / 72
    height = head_in + plot_in + rows_in + foot_in
    figure.set_size_inches(WIDTH_IN, height)
    figure.set_label(title)
    rect = (0.0, (rows_in + foot_in) / height, 1.0, plot_in / height)
    figure.set_layout_engine("constrained", rect=rect, w_pad=0.1, h_pad=0.05)
    left = 0.1 / WIDTH_IN
    figure.text(left, 1 - 0.08 / height, "\n".join(head), size=11, weight="bold", va="top", linespacing=1.2)
    below = (foot_in - 6 / 72) / height
    figure.text(left, below, "\n".join(foot), size=SMALL_PT, va="top", linespacing=1.2, color="#444444")
    look = {"handlelength": 2.2, "columnspacing": 1.4, "borderpad": 0, "borderaxespad": 0, "labelspacing": 0.3}
    look["handler_map"] = {tuple: HandlerTuple(ndivide=1)}
    if legend_in:
        legend_in.set_axis_off()
        legend_in.legend(handles.values(), handles.keys(), loc="center", **look)
    elif handles:
        # matplotlib fills columns first; rows are wanted here.
        names = [name for column in range(3) for name in list(handles)[column::3]]
        place = (0.5, foot_in / height)
        shown = figure.legend(
            [handles[n] for n in names], names, loc="lower center", bbox_to_anchor=place, ncols=3, **look
        )
        shown.set_in_layout(False)
    return figure


def _wrap(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, break_on_hyphens=False)


def _counts(label: Labels, names: Sequence[str]) -> str:
    parts = [f"{int((label == k).sum())} {name}" for k, name in enumerate(names)]
    return f"{', '.join(parts[:-1])} and {parts[-1]} slides."


def with_limits(interval: Interval) -> str:
    """Return the text with non-breaking spaces."""
    return plain.with_limits(interval).replace(" ", "\xa0")


def percent(share: float) -> str:
    return plain.percent(share).replace(" ", "\xa0")


def _cuts(threshold: float | ArrayLike | None) -> Floats:
    """Return the distinct thresholds."""
    return np.unique(np.asarray([] if threshold is None else threshold, dtype=np.float64))


def _threshold_words(threshold: float | ArrayLike | None, source: str) -> str:
    cuts = _cuts(threshold)
    words = f"threshold {cuts[0]:.3f}" if len(cuts) == 1 else f"thresholds {cuts[0]:.3f} to {cuts[-1]:.3f}"
    return f"{words} ({source})" if source else words


def _folds_words(folds: ArrayLike | None) -> str:
    number = 1 if folds is None else len(np.unique(np.asarray(folds)))
    return f"Curves: mean over {number} folds; slides are ranked within their fold." if number > 1 else ""


def _seeds_words(count: int) -> str:
    return f"Thick line: ensemble of {count} seeds, thin lines: each of them." if count else ""


def _note(axes: Axes, lines: Sequence[str], corner: Literal["lower right", "lower left", "upper right"]) -> None:
    """Write metrics into a corner of the plot."""
    vertical, horizontal = corner.split(" ")
    axes.text(
        0.97 if horizontal == "right" else 0.03,
        0.03 if vertical == "lower" else 0.97,
        "\n".join(lines),
        transform=axes.transAxes,
        ha=horizontal,
        va="bottom" if vertical == "lower" else "top",
        size=SMALL_PT,
        linespacing=1.3,
        bbox={"facecolor": "white", "alpha": 0.8, "edgecolor": "none", "pad": 1.5},
        zorder=5,
    )


def _unit_square(axes: Axes, x_name: str, y_name: str) -> None:
    axes.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02), xlabel=x_name, ylabel=y_name, aspect="equal")
    axes.set(xticks=np.linspace(0, 1, 6), yticks=np.linspace(0, 1, 6))
    axes.grid(visible=True)


# ---------------------------------------------------------------------------------------------------- curves


@styled
def draw_roc(labels: ArrayLike, scores: ArrayLike, title: str = "ROC curve", **options: Unpack[CurveOptions]) -> Figure:
    """Draw the ROC curve with bootstrap band, every seed, and the chosen threshold with Wilson limits.

    `scores` (N,) rank class 1; (N, C) give a panel for each class against the rest, marked where the class with the
    largest score decides.
    """
    return _draw_curves(_roc_panel, labels, scores, title, **options)


@styled
def draw_pr(
    labels: ArrayLike, scores: ArrayLike, title: str = "Precision-recall curve", **options: Unpack[CurveOptions]
) -> Figure:
    """Draw the precision-recall curve as steps, otherwise as `draw_roc`."""
    return _draw_curves(_pr_panel, labels, scores, title, **options)


def _draw_curves(
    panel: Callable[..., dict[str, Any]],
    labels: ArrayLike,
    scores: ArrayLike,
    title: str,
    *,
    seed_scores: Sequence[ArrayLike] = (),
    class_names: Sequence[str] = ("negative", "positive"),
    threshold: float | ArrayLike | None = None,
    threshold_from: str = "",
    groups: ArrayLike | None = None,
    folds: ArrayLike | None = None,
    protocol: Protocol = "honest",
    level: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
) -> Figure:
    label, given = _check(labels, scores, class_names)
    several = given.ndim == 2
    if several and threshold is not None:
        raise MetricError(
            f"a threshold for {given.shape[1]} classes",
            "the largest score decides there",
            "Pass no threshold",
            code="threshold-with-classes",
        )
    seeds = [check_scores(one, *given.shape) for one in seed_scores] if len(seed_scores) > 1 else []
    called = _called(given, threshold)
    columns = range(1 - several, len(class_names))
    perfect = any(auc(label == k, given[:, k] if several else given, folds=folds) == 1 for k in columns)
    whole = "patients drawn whole, " if groups is not None else ""
    caption = [
        _counts(label, class_names),
        "Each panel: one class against the rest." if several else "",
        _folds_words(folds),
        _seeds_words(len(seeds)),
        f"Band: pointwise {percent(level)} limits ({whole}{resamples:,} bootstrap resamples).",
        "Where all resamples rank perfectly the band has no width; that is no certainty." if perfect else "",
        _mark_words(label, called, threshold, threshold_from, level),
    ]
    how = {"groups": groups, "folds": folds, "level": level, "resamples": resamples, "seed": seed}
    figure = Figure()
    if not several:
        calls = None if called is None else called.astype(np.float64)
        handles = panel(figure.subplots(), label, given, seeds, calls, how)
        return finish(figure, 4.2, title, caption, handles, protocol)
    handles, num_classes = {}, given.shape[1]
    panels: list[Axes] = list(figure.subplots(-(-num_classes // 2), 2, squeeze=False).ravel())
    for k, axes in enumerate(panels[:num_classes]):
        rest, calls = (label == k).astype(np.int64), (called == k).astype(np.float64)
        handles |= panel(axes, rest, given[:, k], [one[:, k] for one in seeds], calls, how)
        axes.set_title(shorten(class_names[k], 22), size=9, weight="bold")
    handles = {name.replace("chosen threshold", "largest score"): handle for name, handle in handles.items()}
    spare = panels[num_classes] if num_classes % 2 else None
    return finish(figure, 1.17 * len(panels), title, caption, handles, protocol, spare)


def _check(labels: ArrayLike, scores: ArrayLike, class_names: Sequence[str]) -> tuple[Labels, Floats]:
    """Return labels, scores ((N,) for two classes, (N, C) for more) and a name for every class."""
    columns = np.shape(scores)[1] if np.ndim(scores) == 2 else None
    if len(class_names) != (columns or 2):
        raise MetricError(
            f"{len(class_names)} class names for scores of shape {np.shape(scores)}",
            "every class of the figure needs one",
            "Pass the cohort's class names",
            code="class-names-mismatch",
        )
    label = check_labels(labels, columns or 2)
    return label, check_scores(scores, len(label), columns)


def _called(scores: Floats, threshold: float | ArrayLike | None) -> NDArray[np.int64] | None:
    """Return the predicted class of every sample, or None without a decision rule."""
    if scores.ndim == 2:
        return scores.argmax(axis=1)
    return None if threshold is None else (scores >= np.asarray(threshold, dtype=np.float64)).astype(np.int64)


def _mark_words(
    label: Labels, called: NDArray[np.int64] | None, threshold: float | ArrayLike | None, source: str, level: float
) -> str:
    if called is None:
        return ""
    if threshold is None:
        return "Marks: the class with the largest score is called."
    done = decide(label, called, 0.5, level)
    words = f"Mark: {_threshold_words(threshold, source)}, sensitivity {with_limits(done.sensitivity)}, "
    words += f"specificity {with_limits(done.specificity)}"
    return f"{words}; no precision, as nothing is called positive." if not called.any() else f"{words}."


def _roc_panel(
    axes: Axes, label: Labels, scores: Floats, seeds: list[Floats], called: Floats | None, how: dict[str, Any]
) -> dict[str, Any]:
    bands = curve_bands(label, scores, **how)
    band = axes.fill_between(bands.grid, bands.sensitivity_low, bands.sensitivity_high, color=BLUE, alpha=0.16, lw=0)
    (chance,) = axes.plot([0, 1], [0, 1], color=GREY, lw=1, ls=(0, (1, 2)))
    folds = how["folds"]
    thin = [_roc_line(axes, label, one, folds, "seed", color=BLUE, lw=0.7, alpha=0.55) for one in seeds]
    thick = _roc_line(axes, label, scores, folds, "ensemble", color=BLUE, lw=2.2)
    lines = f"AUC {with_limits(auc_interval(label, scores, **how))}".split("\xa0", 1)
    if len(seeds) > 1:
        of_seeds = [auc(label, one, folds=folds) for one in seeds]
        lines.append(f"seeds {np.mean(of_seeds):.3f} ± {np.std(of_seeds, ddof=1):.3f}")
    _unit_square(axes, "false positive rate", "sensitivity")
    _note(axes, lines, "lower right")
    mark = None
    if called is not None:
        done = decide(label, called, 0.5, how["level"])
        right = done.specificity
        false_rate = Interval(1 - right.value, 1 - right.high, 1 - right.low, right.method, right.level)
        mark = _mark(axes, false_rate, done.sensitivity)
    return _curve_handles(thick, thin, band, chance, "chance", mark, how["level"])


def _roc_line(axes: Axes, label: Labels, scores: Floats, folds: ArrayLike | None, name: str, **how: Any) -> Any:
    curve = roc_curve(label, scores, folds=folds)
    return axes.plot(curve.false_positive_rate, curve.sensitivity, label=name, **how)[0]


def _pr_panel(
    axes: Axes, label: Labels, scores: Floats, seeds: list[Floats], called: Floats | None, how: dict[str, Any]
) -> dict[str, Any]:
    bands = curve_bands(label, scores, **how)
    band = axes.fill_between(bands.grid, bands.precision_low, bands.precision_high, color=BLUE, alpha=0.16, lw=0)
    (chance,) = axes.plot([0, 1], [label.mean()] * 2, color=GREY, lw=1, ls=(0, (1, 2)))
    folds = how["folds"]
    thin = [_pr_line(axes, label, one, folds, "seed", color=BLUE, lw=0.7, alpha=0.55) for one in seeds]
    thick = _pr_line(axes, label, scores, folds, "ensemble", color=BLUE, lw=2.2)
    value = average_precision(label, scores, folds=folds)
    lines = [f"average precision {value:.3f}"]
    if len(seeds) > 1:
        of_seeds = [average_precision(label, one, folds=folds) for one in seeds]
        lines.append(f"seeds {np.mean(of_seeds):.3f} ± {np.std(of_seeds, ddof=1):.3f}")
    _unit_square(axes, "recall (sensitivity)", "precision")
    _note(axes, lines, "lower left" if value > 0.6 else "upper right")
    mark = None
    if called is not None and called.any():
        done = decide(label, called, 0.5, how["level"])
        mark = _mark(axes, done.sensitivity, done.ppv)
    return _curve_handles(thick, thin, band, chance, "share of positives", mark, how["level"])


def _pr_line(axes: Axes, label: Labels, scores: Floats, folds: ArrayLike | None, name: str, **how: Any) -> Any:
    """Return the steps whose area is the average precision."""
    curve = pr_curve(label, scores, folds=folds)
    recall, precision = np.append(0.0, curve.recall), np.append(curve.precision[0], curve.precision)
    return axes.plot(recall, precision, drawstyle="steps-pre", label=name, **how)[0]


def _mark(axes: Axes, x: Interval, y: Interval) -> Any:
    """Draw the operating point of the threshold with limits in both directions."""
    axes.plot([x.low, x.high], [y.value, y.value], color=ORANGE, lw=1.3, zorder=4)
    axes.plot([x.value, x.value], [y.low, y.high], color=ORANGE, lw=1.3, zorder=4)
    return axes.plot(
        x.value, y.value, "o", color=ORANGE, mec="white", mew=1.2, ms=8, zorder=4.5, clip_on=False, label="threshold"
    )[0]


def _curve_handles(
    thick: Any, thin: list[Any], band: Any, chance: Any, chance_name: str, mark: Any, level: float
) -> dict[str, Any]:
    handles = {"ensemble" if thin else "model": thick}
    if thin:
        handles["each seed"] = thin[0]
    handles[f"{percent(level)} band"] = band
    if mark is not None:
        handles["chosen threshold"] = mark
    return {**handles, chance_name: chance}


# ---------------------------------------------------------------------------------------------------- calibration


@styled
def draw_calibration(
    labels: ArrayLike,
    probabilities: ArrayLike,
    title: str = "Calibration",
    *,
    uncalibrated: ArrayLike | None = None,
    class_names: Sequence[str] = ("negative", "positive"),
    threshold: float | ArrayLike | None = None,
    threshold_from: str = "",
    folds: ArrayLike | None = None,
    protocol: Protocol = "honest",
    level: float = 0.95,
) -> Figure:
    """Draw the reliability diagram: predicted probability against observed frequency with Wilson limits, and counts.

    `uncalibrated`: the probabilities before scaling, as hollow marks. (N, C) probabilities: the likeliest class's,
    against how often it is right. Slides of all `folds` share the bins, and the caption says so.
    """
    label, given = _check(labels, probabilities, class_names)
    several = given.ndim == 2
    before = "" if uncalibrated is None else f" ({brier(label, uncalibrated):.3f} before scaling)"
    caption = [
        _counts(label, class_names),
        f"Bars: {percent(level)} Wilson limits of the share in each bin; below: slides per bin.",
        "" if folds is None else f"Slides of {len(set(np.asarray(folds).tolist()))} folds, each by its own model.",
        f"Brier score {brier(label, given):.3f}{before}.",
        "" if threshold is None else f"Vertical line: {_threshold_words(threshold, threshold_from)}.",
    ]

    def binary(these: ArrayLike) -> tuple[Labels, Floats]:
        return top_class(label, these) if several else (label, check_scores(these, len(label)))

    def binned(these: ArrayLike) -> Reliability:
        return reliability(*binary(these), NUM_BINS, level=level)

    figure = Figure()
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(5, 1))
    before_scaling = None if uncalibrated is None else binned(uncalibrated)
    handles = _share_lines(upper, binned(given), before_scaling)
    for cut in _cuts(threshold):
        handles["threshold"] = upper.axvline(cut, color=ORANGE, lw=1.3, ls=(0, (4, 2)), label="threshold")
    _unit_square(upper, "", "share that is right" if several else f"share of {shorten(class_names[1], 20)}")
    upper.set_aspect("auto")
    bars = _count_bars(lower, *binary(given))
    lower.set_xlabel("probability of the class called" if several else f"probability of {shorten(class_names[1], 30)}")
    lower.set_ylabel("slides")
    handles |= zip(("wrong", "right") if several else class_names, bars, strict=True)
    return finish(figure, 4.8, title, caption, handles, protocol)


def _share_lines(axes: Axes, seen: Reliability, before: Reliability | None) -> dict[str, Any]:
    """Draw observed frequencies over predicted probabilities, with limits, and before calibration."""
    (even,) = axes.plot([0, 1], [0, 1], color=GREY, lw=1, ls=(0, (1, 2)))
    handles: dict[str, Any] = {}
    notes = [f"ECE {seen.ece:.3f}"]
    if before is not None:
        (handles["before scaling"],) = axes.plot(
            before.probability, before.share, "s--", label="before", color=GREY, mfc="white", ms=5, lw=1
        )
        notes.append(f"before scaling {before.ece:.3f}")
    axes.vlines(seen.probability, seen.low, seen.high, color=BLUE, lw=1.3)
    (thick,) = axes.plot(seen.probability, seen.share, "o-", label="ensemble", color=BLUE, mec="white", ms=7, lw=2.2)
    _note(axes, notes, "lower right")
    return {"model": thick, **handles, "perfect": even}


def _count_bars(axes: Axes, label: Labels, stated: Floats) -> list[Any]:
    """Draw the number of samples of each class per bin, stacked."""
    index = np.minimum((stated * NUM_BINS).astype(np.int64), NUM_BINS - 1)
    left, base = np.arange(NUM_BINS) / NUM_BINS, np.zeros(NUM_BINS)
    bars = []
    for k, color in enumerate((PALE, BLUE)):
        count = np.bincount(index[label == k], minlength=NUM_BINS)
        bars.append(axes.bar(left, count, 0.94 / NUM_BINS, base, align="edge", color=color, ec=GREY, lw=0.5))
        base = base + count
    axes.yaxis.set_major_locator(MaxNLocator(3, integer=True))
    axes.grid(visible=True, axis="y")
    return bars


# ---------------------------------------------------------------------------------------------------- confusion


@styled
def draw_confusion(
    matrix: ArrayLike,
    class_names: Sequence[str],
    title: str = "Confusion matrix",
    *,
    threshold_from: str = "",
    protocol: Protocol = "honest",
    level: float = 0.95,
) -> Figure:
    """Draw the confusion matrix [true, predicted]; colours and percentages per row, with Wilson limits if they fit."""
    counts = np.asarray(matrix)
    size = len(class_names)
    if counts.shape != (size, size):
        raise MetricError(
            f"a confusion matrix of shape {counts.shape} for {size} class names",
            "it has a row and a column for every class",
            "Pass the matrix of metrics.confusion_matrix",
            code="class-names-mismatch",
        )
    right, total = int(np.trace(counts)), int(counts.sum())
    label = np.repeat(np.arange(size), counts.sum(axis=1))
    limits = f", with {percent(level)} Wilson limits" if size <= 3 else ""
    caption = [
        _counts(label, class_names),
        f"Right: {right} of {total}, {with_limits(wilson(right, total, level))}.",
        f"{'Colour' if size > 8 else 'Percentages'}: share of the true class{limits}.",
        f"Decision: {threshold_from}." if threshold_from else "",
    ]
    figure = Figure()
    axes = figure.subplots()
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    axes.imshow(shares, cmap=BLUES, vmin=0, vmax=1, aspect="auto")
    for true, called in np.ndindex(size, size):
        text = _confusion_text(int(counts[true, called]), int(counts[true].sum()), size, level)
        color = "white" if _luminance(BLUES(shares[true, called])) < 0.21 else INK
        points = 9 if size <= 6 else 8
        axes.text(called, true, text, ha="center", va="center", color=color, size=points, linespacing=1.3)
    names = [shorten(name, 16 if size <= 3 else 12) for name in class_names]
    turn = {"rotation": 40, "ha": "right", "rotation_mode": "anchor"} if max(map(len, names)) * size > 44 else {}
    axes.set_xticks(range(size), names, **turn)
    axes.set_yticks(range(size), names)
    axes.set(xlabel="called", ylabel="true")
    axes.spines[:].set_visible(False)
    between = np.arange(1, size) - 0.5
    axes.hlines(between, -0.5, size - 0.5, color="white", lw=2)
    axes.vlines(between, -0.5, size - 0.5, color="white", lw=2)
    axes.tick_params(length=0)
    return finish(figure, min(4.2, 1.6 + 0.75 * size), title, caption, {}, protocol)


def _luminance(color: Sequence[float]) -> float:
    """Return the relative luminance, 0 black to 1 white: below 0.21 white text has more contrast than dark text."""
    red, green, blue = (np.asarray(color[:3]) / 1.055 + 0.052) ** 2.4
    return float(0.2126 * red + 0.7152 * green + 0.0722 * blue)


def _confusion_text(count: int, whole: int, size: int, level: float) -> str:
    if size > 8 or not whole:
        return str(count)
    share = wilson(count, whole, level)
    text = f"{count}\n{100 * share.value:.0f} %"
    return text if size > 3 else f"{text}\n[{100 * share.low:.0f}, {100 * share.high:.0f}]"


# ---------------------------------------------------------------------------------------------------- all methods


@styled
def draw_auc(rows: Sequence[ComparisonRow], title: str = "AUC of every method") -> Figure:
    """Draw one line per row: the ensemble with its interval, each seed, and the published value as a hollow marker."""
    check_rows(rows)
    on, limits = rows[0].evaluated_on, percent(rows[0].auc.level)
    tested = {row.paired.baseline for row in rows if row.paired}
    base = next((row for row in rows if not row.paired and tested & {row.method, row.display_name}), None)
    caption = [
        f"Measured on {on.words} of {on.cohort} ({on.split}).",
        f"Filled marks: {_ensemble_words([row.num_seeds for row in rows])}.",
        f"Lines: {limits} intervals.",
        f"Vertical line: {base.display_name}, the baseline." if base else "",
        _published_words(on) if any(row.published for row in rows) else "",
    ]
    figure = Figure()
    axes = figure.subplots()
    handles: dict[str, Any] = {}
    if base is not None:
        axes.axvline(base.auc.value, color=GREY, lw=1, ls=(0, (1, 2)), zorder=0)
    beside = {"transform": axes.get_yaxis_transform(), "va": "center", "size": SMALL_PT}
    axes.text(1.03, -0.75, f"ensemble [{limits}]", color=GREY, **beside)
    for y, row in enumerate(rows):
        if np.isnan(row.auc.value):
            axes.text(1.03, y, "not defined", **beside)
            continue
        (bar,) = axes.plot([row.auc.low, row.auc.high], [y, y], color=BLUE, lw=1.6)
        (dot,) = axes.plot(row.auc.value, y, "o", color=BLUE, ms=7, mec="white", label=row.method)
        handles["ensemble"] = (bar, dot)
        if row.num_seeds > 1:
            height = [y - 0.24] * row.num_seeds
            (handles["each seed"],) = axes.plot(row.seed_aucs, height, "|", color=GREY, ms=5, mew=1, label="seeds")
        if row.published:
            look = {"color": ORANGE, "mfc": "white", "mew": 1.3, "ms": 5}
            (hollow,) = axes.plot(row.published.auc, y + 0.24, "D", label="published", **look)
            handles["published (Camelyon16)"] = hollow
        axes.text(1.03, y, with_limits(row.auc), **beside)
    axes.set_yticks(range(len(rows)), [shorten(row.display_name, 22) for row in rows])
    axes.set(ylim=(len(rows) - 0.45, -0.55), xlabel="macro AUC" if len(on.counts) > 2 else "AUC")
    axes.set_xlim(right=1.0 + 0.02 * (1 - axes.get_xlim()[0]))
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.grid(visible=True, axis="x")
    return finish(figure, 0.9 + 0.36 * len(rows), title, caption, handles, on.protocol)


def _ensemble_words(seeds: Sequence[int]) -> str:
    few, many = min(seeds), max(seeds)
    if many == 1:
        return "one training each (1 seed)"
    return f"ensembles of {many} seeds" if few == many else f"ensembles of {few} to {many} seeds"


def _published_words(on: EvaluatedOn) -> str:
    words = "Hollow marks: published, on Camelyon16's official test set, not measured here;"
    if on.camelyon16_test:
        return f"{words} the same test slides, other features and choices (see the table)."
    return f"{words} not comparable with {on.cohort}."


# ---------------------------------------------------------------------------------------------------- training


@styled
def draw_history(
    histories: Sequence[Sequence[Mapping[str, Any]]],
    chosen: Sequence[int] = (),
    title: str = "Training",
    *,
    protocol: Protocol = "honest",
) -> Figure:
    """Draw the loss per epoch of every training run (`epoch`, `train_loss`, `val_loss`) and their means.

    `chosen`: the epoch kept of each, marked on its validation line. Means end where the first training stopped.
    """
    if not histories or not all(histories):
        raise MetricError(
            "a training history without epochs",
            "there is nothing to draw",
            "Pass one row per epoch",
            code="empty-history",
        )
    chosen_on = "test slides, OPTIMISTIC" if protocol == "optimistic" else "validation"
    several = len(histories) > 1
    count = (
        f"{len(histories)} training runs, thin lines; thick: their mean while all ran." if several else "One training."
    )
    caption = [count, f"{'Marks: the epochs' if several else 'Mark: the epoch'} kept." if chosen else ""]
    figure = Figure()
    axes = figure.subplots()
    handles: dict[str, Any] = {}
    for field, name, color, dashes in (
        ("train_loss", "training", BLUE, "-"),
        ("val_loss", chosen_on, ORANGE, (0, (5, 1.5))),
    ):
        lines = [_loss_line(history, field) for history in histories]
        if all(np.isnan(loss).all() for _, loss in lines):
            continue
        look: dict[str, Any] = {"color": color, "ls": dashes}
        for epoch, loss in lines:
            thickness: dict[str, Any] = {"lw": 0.8, "alpha": 0.5} if several else {"lw": 2}
            (handles[name],) = axes.plot(epoch, loss, label=field, **look, **thickness)
        if several:
            shortest = min(len(loss) for _, loss in lines)
            mean = np.mean([loss[:shortest] for _, loss in lines], axis=0)
            (handles[name],) = axes.plot(lines[0][0][:shortest], mean, lw=2, label=f"mean {field}", **look)
    for history, epoch in zip(histories, chosen, strict=True) if chosen else ():
        row = {row["epoch"]: row for row in history}[epoch]
        loss = row["train_loss"] if row.get("val_loss") is None else row["val_loss"]
        (handles["epoch kept"],) = axes.plot(
            epoch, loss, "o", color=INK, mfc="white", mew=1.3, ms=5.5, zorder=4, label="kept"
        )
    axes.set(xlabel="epoch", ylabel="loss")
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.grid(visible=True)
    return finish(figure, 2.9, title, caption, handles, protocol)


def _loss_line(history: Sequence[Mapping[str, Any]], field: str) -> tuple[Floats, Floats]:
    """Return epochs and losses; NaN, which leaves a gap, where a loss is missing."""
    losses = [row.get(field) for row in history]
    epochs = np.array([row["epoch"] for row in history], dtype=np.float64)
    return epochs, np.array([np.nan if loss is None else loss for loss in losses], dtype=np.float64)


roc_figure = as_svg(draw_roc)
pr_figure = as_svg(draw_pr)
calibration_figure = as_svg(draw_calibration)
confusion_figure = as_svg(draw_confusion)
auc_figure = as_svg(draw_auc)
history_figure = as_svg(draw_history)


# ---------------------------------------------------------------------------------------------------- files


@styled
def draw_decision_curves(
    curves: Mapping[str, DecisionCurve],
    number: int,
    title: str = "Decision curve",
    *,
    calibrated: bool = False,
    protocol: Protocol = "honest",
) -> Figure:
    """Draw the net benefit of decisions by the model, of treating everyone and of treating no one; a panel per class.

    `number` of patients. Below the least benefit shown, the line of treating everyone falls out of the panel.
    """
    figure = Figure()
    columns = min(2, len(curves))
    rows = -(-len(curves) // columns)
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    handles: dict[str, Any] = {}
    for axes, (name, curve) in zip(panels, curves.items(), strict=False):
        top = max(float(curve.high.max()), float(curve.treat_all.max()), 0.05)
        (handles["everyone"],) = axes.plot(curve.thresholds, curve.treat_all, color=GREY, lw=1.2, ls=(0, (4, 2)))
        handles["no one"] = axes.axhline(0, color=INK, lw=1, ls=(0, (1, 2)))
        axes.fill_between(curve.thresholds, curve.low, curve.high, color=BLUE, alpha=0.15, lw=0)
        (line,) = axes.plot(curve.thresholds, curve.model, color=BLUE, lw=2)
        handles = {"model": line, **handles}
        axes.set(xlim=(0, 1), ylim=(-0.25 * top, 1.1 * top), ylabel="net benefit")
        axes.set_xlabel(f"threshold probability of {shorten(name, 20)}")
        axes.grid(visible=True)
    for axes in panels[len(curves) :]:
        axes.set_axis_off()
    caption = [
        f"Net benefit per patient of {number}: true positives less false positives at the odds of the threshold. "
        "Someone who acts from a risk of 0.2 on accepts 4 false alarms for a true one. Band: pointwise limits.",
        "" if calibrated else "Probabilities are not calibrated (evaluate.calibration), which may lower the curve.",
    ]
    return finish(figure, 3.2 * rows, title, caption, handles, protocol)


decision_figure = as_svg(draw_decision_curves)


History = Sequence[Mapping[str, Any]]
CURVES = ("roc", "pr", "calibration", "confusion", "decision_curve", "kaplan_meier", "scatter", "bland_altman")
"""Figures of the test set."""


def figure_files(splits: Iterable[str]) -> list[str]:
    """Return the names of all files that `write_figures` may write for these splits."""
    prefixes = ("", *(f"{split}_" for split in splits))
    pictures = [f"{prefix}{name}.svg" for prefix in prefixes for name in CURVES]
    return [*pictures, "training.svg", CURVE_FILE, SET_FILE]


def write_figures(
    folder: Path, result: MethodResult, evaluate: EvaluateSettings, histories: Mapping[tuple[str, int], History]
) -> list[str]:
    """Write all figures of a method; return the reasons why some were skipped. `histories` by (split, seed)."""
    reasons: list[str] = []
    splits = (None,) if are_disjoint(result.predictions) else result.splits
    for split in splits:
        prefix = "" if split is None else f"{split}_"
        drawn = _figures(result, split, evaluate)
        if result.outcome is not None:
            from selfvitmil.evaluate.outcome_figures import outcome_figures

            drawn = outcome_figures(result, split, evaluate)
        for name, draw in drawn:
            reasons += _write(folder / f"{prefix}{name}.svg", draw)
    if result.outcome is None:
        reasons += _write_decisions(folder, result, evaluate)
    runs = [run for run in result.runs if (run.split, run.seed) in histories]
    if runs:
        lines = [histories[run.split, run.seed] for run in runs]
        chosen = [run.epoch for run in runs]
        title, protocol = f"Training of {result.method}", _protocol(result)
        reasons += _write(folder / "training.svg", lambda: history_figure(lines, chosen, title, protocol=protocol))
    return reasons


def _write_decisions(folder: Path, result: MethodResult, evaluate: EvaluateSettings) -> list[str]:
    """Write decision curves and prediction sets, as tables and figure; return why some are missing."""
    found = decisions_of(result.predictions, result.class_names, evaluate)
    found.write(folder, result.class_names)
    if found.curves is not None:
        curves, title = found.curves, f"Decision curve of {result.method}"
        info: dict[str, Any] = {"calibrated": found.samples.calibrated, "protocol": _protocol(result)}
        write_text(folder / "decision_curve.svg", decision_figure(curves, len(found.samples), title, **info))
    names = {"decision_curve": "no decision curve", "prediction_sets": "no prediction sets"}
    return [f"{names.get(key, f'no {key}').replace('_', ' ')}: {why}" for key, why in found.reasons.items()]


def _write(path: Path, draw: Callable[[], str]) -> list[str]:
    try:
        text = draw()
    except MetricError as error:
        path.unlink(missing_ok=True)  # a stale figure would be taken for this run's
        return [f"{path.name} is not drawn: {error}"]
    write_text(path, text)
    return []


def _protocol(result: MethodResult) -> Literal["honest", "optimistic"]:
    return "optimistic" if result.protocol == "optimistic" else "honest"


def _figures(
    result: MethodResult, split: str | None, evaluate: EvaluateSettings
) -> Iterator[tuple[str, Callable[[], str]]]:
    ensemble = samples_of(result.predictions, split=split)
    seeds = [samples_of(result.predictions, seed=seed, split=split) for seed in result.seeds]
    rows = [row for row in result.predictions if row.part == "test" and row.seed is None and split in (None, row.split)]
    thresholds = None if rows[0].threshold is None else np.array([row.threshold for row in rows], dtype=np.float64)
    said = "; ".join(ensemble.threshold_from)
    shared: dict[str, Any] = {"class_names": result.class_names, "protocol": _protocol(result)}
    curves = shared | {"threshold": thresholds, "threshold_from": said, "groups": np.array(ensemble.patients)}
    curves["folds"] = ensemble.folds
    curves |= {"level": evaluate.confidence, "resamples": evaluate.bootstrap, "seed": evaluate.seed}
    curves["seed_scores"] = [_plain(own, "scores") for own in seeds] if len(seeds) > 1 else []
    scores, title = _plain(ensemble, "scores"), result.method
    yield "roc", lambda: roc_figure(ensemble.labels, scores, f"ROC curve of {title}", **curves)
    yield "pr", lambda: pr_figure(ensemble.labels, scores, f"Precision-recall curve of {title}", **curves)
    stated = shared | {"threshold": thresholds, "threshold_from": said, "level": evaluate.confidence}
    stated["folds"] = ensemble.folds
    if ensemble.calibrated:
        stated["uncalibrated"] = normalized(scores)
    probabilities = _plain(ensemble, "probabilities")
    yield (
        "calibration",
        lambda: calibration_figure(ensemble.labels, probabilities, f"Calibration of {title}", **stated),
    )
    matrix = confusion_matrix(ensemble.labels, ensemble.decisions, len(result.class_names))
    info: dict[str, Any] = {"threshold_from": said, "protocol": _protocol(result), "level": evaluate.confidence}
    yield (
        "confusion",
        lambda: confusion_figure(matrix, result.class_names, f"Decisions of {title}", **info),
    )


def _plain(samples: Samples, what: Literal["scores", "probabilities"]) -> Any:
    """Return (N,) for a single score, (N, C) for more."""
    array = getattr(samples, what)
    return array[:, 0] if array.shape[1] == 1 else array
