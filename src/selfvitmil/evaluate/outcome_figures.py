"""Figures of outcomes other than classes: survival by risk group, predicted against true values, levels, labels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from selfvitmil.errors import MetricError
from selfvitmil.evaluate.figures import (
    BLUE,
    GREY,
    INK,
    ORANGE,
    as_svg,
    draw_confusion,
    finish,
    percent,
    styled,
    with_limits,
)  # fmt: skip
from selfvitmil.evaluate.outcome_results import scored_rows
from selfvitmil.evaluate.protocol import MethodResult
from selfvitmil.formatting import p_value
from selfvitmil.metrics import confusion_matrix, roc_curve
from selfvitmil.metrics import survival as survival_metrics
from selfvitmil.metrics.classification import Interval
from selfvitmil.metrics.regression import bland_altman, pearson
from selfvitmil.outcomes import Outcome, Scored
from selfvitmil.settings import EvaluateSettings

Protocol = Literal["honest", "optimistic"]
AT_RISK_TIMES = 5
COLORS = (BLUE, ORANGE, "#009e73", "#cc79a7", "#56b4e9", "#e69f00", INK, GREY)


def outcome_figures(
    result: MethodResult, split: str | None, evaluate: EvaluateSettings
) -> Iterator[tuple[str, Callable[[], str]]]:
    """Yield name and function that gives SVG text, of the ensemble by patient; all splits together where None."""
    outcome = result.outcome
    assert outcome is not None
    splits = result.splits if split is None else (split,)
    scored = _joined([scored_rows(result, None, name, "patient", evaluate) for name in splits])
    yield from drawn(outcome, scored, result.method, "optimistic" if result.protocol == "optimistic" else "honest")


def drawn(
    outcome: Outcome, scored: Scored, method: str, protocol: Protocol = "honest"
) -> Iterator[tuple[str, Callable[[], str]]]:
    """Yield name and function that gives SVG text of the outcome's figures."""
    for name in outcome.plots:
        draw, title = DRAWN[name]
        yield name, lambda draw=draw, title=title: draw(outcome, scored, f"{title} of {method}", protocol)


def _joined(parts: list[Scored]) -> Scored:
    first = parts[0]
    folds = [str(number) for number, part in enumerate(parts) for _ in part.patients]
    return replace(
        first,
        targets=np.concatenate([part.targets for part in parts]),
        scores=np.concatenate([part.scores for part in parts]),
        decisions=tuple(each for part in parts for each in part.decisions),
        patients=tuple(each for part in parts for each in part.patients),
        folds=tuple(folds) if len(parts) > 1 else None,
    )


@styled
def draw_kaplan_meier(outcome: Outcome, scored: Scored, title: str, protocol: Protocol = "honest") -> Figure:
    """Draw survival of patients with low and high predicted risk, with limits, censoring and numbers at risk."""
    (time, event), level = scored.targets.T, scored.evaluate.confidence
    high = np.array([bool(each) for each in scored.decisions])
    figure = Figure()
    axes, table = figure.subplots(2, 1, height_ratios=(4, 1), sharex=True)
    handles: dict[str, Any] = {}
    grid = [at for at in MaxNLocator(AT_RISK_TIMES).tick_values(0, float(time.max())) if 0 <= at <= time.max()]
    for row, (called, color, dashes) in enumerate(((False, BLUE, "-"), (True, ORANGE, (0, (5, 1.5))))):
        own = high == called
        if not own.any():
            continue
        curve = survival_metrics.kaplan_meier(time[own], event[own], level=level)
        times, survival = np.r_[0, curve.times], np.r_[1, curve.survival]
        name = f"{outcome.groups[int(called)]} risk ({int(own.sum())})"
        (line,) = axes.step(times, survival, where="post", color=color, ls=dashes, lw=2)
        axes.fill_between(times, np.r_[1, curve.low], np.r_[1, curve.high], step="post", color=color, alpha=0.15, lw=0)
        lost = curve.censored > 0
        axes.plot(curve.times[lost], curve.survival[lost], "|", color=color, ms=7, mew=1.2)
        handles[name] = line
        for at in grid:
            table.text(at, -row, str(int((time[own] >= at).sum())), color=color, ha="center", va="center", size=8)
    axes.set(ylabel="survival", ylim=(0, 1.02))
    axes.grid(visible=True)
    table.set(xlabel=f"{outcome.columns[0]}; below the curves: patients at risk", ylim=(-1.6, 0.6), yticks=[])
    table.set_xticks(grid, [f"{at:g}" for at in grid])
    for side in ("left", "top", "right"):
        table.spines[side].set_visible(False)
    caption = [f"Bands: {percent(level)} limits; ticks: censored."]
    if len(handles) < 2:
        caption.append("All patients are of one risk group: there is nothing to compare.")
    else:
        test = survival_metrics.log_rank(time, event, high, strata=scored.folds)
        caption.append(f"Log-rank test: p {_p(test.p_value)}.")
        try:
            ratio = survival_metrics.hazard_ratio(time, event, high, strata=scored.folds, level=level)
            caption.append(f"Hazard ratio of high risk {_shown(ratio)}.")
        except MetricError:
            caption.append("The hazard ratio is undefined.")
    caption.append("Groups: the cut is the median risk of validation slides.")
    return finish(figure, 3.6, title, caption, handles, protocol)


@styled
def draw_scatter(outcome: Outcome, scored: Scored, title: str, protocol: Protocol = "honest") -> Figure:
    """Draw predicted against true values with the line of equality."""
    value, predicted = scored.targets[:, 0], scored.scores[:, 0]
    evaluate = scored.evaluate
    figure = Figure()
    axes = figure.subplots()
    ends = [min(value.min(), predicted.min()), max(value.max(), predicted.max())]
    (line,) = axes.plot(ends, ends, color=GREY, lw=1, ls=(0, (4, 2)))
    (dots,) = axes.plot(value, predicted, "o", color=BLUE, ms=4.5, alpha=0.7, mew=0)
    axes.set(xlabel=f"true {outcome.columns[0]}", ylabel=f"predicted {outcome.columns[0]}")
    axes.grid(visible=True)
    drawn = {"level": evaluate.confidence, "resamples": evaluate.bootstrap, "seed": evaluate.seed}
    error = outcome.primary_metric(scored)
    caption = [f"{len(value)} patients. Mean absolute error {_shown(error)},"]
    caption.append(f"Pearson's correlation {_shown(pearson(value, predicted, groups=scored.patients, **drawn))}.")
    return finish(figure, 3.6, title, caption, {"patients": dots, "equal": line}, protocol)


@styled
def draw_bland_altman(outcome: Outcome, scored: Scored, title: str, protocol: Protocol = "honest") -> Figure:
    """Draw the error of every patient over the mean of true and predicted value (Bland & Altman 1986)."""
    found = bland_altman(scored.targets[:, 0], scored.scores[:, 0], level=scored.evaluate.confidence)
    figure = Figure()
    axes = figure.subplots()
    (dots,) = axes.plot(found.means, found.differences, "o", color=BLUE, ms=4.5, alpha=0.7, mew=0)
    bias = axes.axhline(found.bias.value, color=INK, lw=1.5)
    limits = [axes.axhline(each.value, color=ORANGE, lw=1.2, ls=(0, (5, 1.5))) for each in (found.lower, found.upper)]
    axes.set(xlabel=f"mean of true and predicted {outcome.columns[0]}", ylabel="predicted - true")
    axes.grid(visible=True)
    caption = [f"Mean error {_shown(found.bias)}. 95 % of errors lie between"]
    caption.append(f"{found.lower.value:.3g} and {found.upper.value:.3g} (limits of agreement).")
    handles = {"patients": dots, "mean error": bias, "limits of agreement": limits[0]}
    return finish(figure, 3.2, title, caption, handles, protocol)


@styled
def draw_label_curves(outcome: Outcome, scored: Scored, title: str, protocol: Protocol = "honest") -> Figure:
    """Draw the ROC curve of every label."""
    figure = Figure()
    axes = figure.subplots()
    axes.plot([0, 1], [0, 1], color=GREY, lw=1, ls=(0, (4, 2)))
    handles: dict[str, Any] = {}
    for place, column in enumerate(outcome.columns):
        known = ~np.isnan(scored.targets[:, place])
        label = scored.targets[known, place].astype(np.int64)
        if len(set(label)) == 2:
            curve = roc_curve(label, scored.scores[known, place])
            color = COLORS[place % len(COLORS)]
            dashes = "-" if place < len(COLORS) else (0, (5, 1.5))
            (handles[column],) = axes.step(
                curve.false_positive_rate, curve.sensitivity, where="post", color=color, lw=1.8, ls=dashes
            )
    axes.set(xlabel="1 - specificity", ylabel="sensitivity", xlim=(-0.01, 1.01), ylim=(-0.01, 1.01))
    axes.grid(visible=True)
    caption = [f"{len(scored.targets)} patients. Macro AUC {with_limits(outcome.primary_metric(scored))}."]
    return finish(figure, 3.6, title, caption, handles, protocol)


@styled
def draw_levels(outcome: Outcome, scored: Scored, title: str, protocol: Protocol = "honest") -> Figure:
    """Draw how many patients of every level are predicted to have which."""
    called = np.array(scored.decisions, dtype=np.int64)
    matrix = confusion_matrix(scored.targets[:, 0].astype(np.int64), called, len(outcome.groups))
    source = "steps with a probability of 0.5 or more"
    level = scored.evaluate.confidence
    return draw_confusion(matrix, outcome.groups, title, threshold_from=source, protocol=protocol, level=level)


def _p(value: float) -> str:
    text = p_value(value)
    return text if text.startswith("<") else f"= {text}"


def _shown(interval: Interval) -> str:
    return f"{interval.value:.3g} [{interval.low:.3g}, {interval.high:.3g}]"


DRAWN: dict[str, tuple[Callable[..., str], str]] = {
    "kaplan_meier": (as_svg(draw_kaplan_meier), "Survival by predicted risk"),
    "scatter": (as_svg(draw_scatter), "Predicted and true values"),
    "bland_altman": (as_svg(draw_bland_altman), "Errors"),
    "confusion": (as_svg(draw_levels), "Levels"),
    "roc": (as_svg(draw_label_curves), "ROC curves"),
}
"""Name of a plot -> function and title."""
