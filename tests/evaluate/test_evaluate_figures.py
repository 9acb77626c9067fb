"""Figures: what is drawn equals what slow loops find, what is written says what it rests on, bytes repeat."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from scipy.stats import binomtest

from selfvitmil.errors import MetricError
from selfvitmil.evaluate import figures
from selfvitmil.evaluate.comparison import PUBLISHED, ComparisonRow, EvaluatedOn, PairedRow
from selfvitmil.metrics import Interval, auc, auc_interval, average_precision, curve_bands

NAMES = ("normal", "tumor")
YOUDEN = "Youden's point of the validation slides"


def cohort(num_seeds: int = 3, seed: int = 0) -> tuple[np.ndarray, list[np.ndarray]]:
    """Labels and the scores of several seeds, rounded so that there are ties."""
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.repeat([0, 1], [17, 12]))
    return labels, [np.round(np.clip(0.3 + 0.3 * labels + rng.normal(0, 0.2, 29), 0, 1), 2) for _ in range(num_seeds)]


def lines(axes: Axes, name: str) -> list[Line2D]:
    return [line for line in axes.lines if line.get_label() == name]


def points(line: Line2D) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True)]  # pyright: ignore


def words(svg: str) -> str:
    """All text of a figure in the order of writing, with plain spaces; fails where the SVG is no XML."""
    elements = ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")
    return " ".join("".join(element.itertext()) for element in elements).replace("\xa0", " ")


def slow_roc(labels: np.ndarray, scores: np.ndarray) -> list[tuple[float, float]]:
    found = [(0.0, 0.0)]
    for cut in sorted(set(scores.tolist()), reverse=True):
        called = [score >= cut for score in scores]
        hits = sum(1 for label, call in zip(labels, called, strict=True) if call and label == 1)
        alarms = sum(1 for label, call in zip(labels, called, strict=True) if call and label == 0)
        found.append((alarms / sum(labels == 0), hits / sum(labels == 1)))
    return found


# ---------------------------------------------------------------------------------------------------- curves


def test_roc_draws_ensemble_seeds_and_band():
    labels, seeds = cohort()
    ensemble = np.mean(seeds, axis=0)
    patients = np.arange(len(labels)) // 2
    (axes,) = figures.draw_roc(labels, ensemble, seed_scores=seeds, groups=patients, resamples=200, seed=3).axes
    (thick,) = lines(axes, "ensemble")
    np.testing.assert_allclose(points(thick), slow_roc(labels, ensemble), atol=1e-12)
    thin = lines(axes, "seed")
    assert len(thin) == 3
    for line, scores in zip(thin, seeds, strict=True):
        np.testing.assert_allclose(points(line), slow_roc(labels, scores), atol=1e-12)
        assert line.get_linewidth() < thick.get_linewidth() / 2
    bands = curve_bands(labels, ensemble, groups=patients, resamples=200, seed=3)
    outline = {(round(x, 9), round(y, 9)) for x, y in axes.collections[0].get_paths()[0].vertices}  # pyright: ignore
    for limit in (bands.sensitivity_low, bands.sensitivity_high):
        assert {(round(x, 9), round(y, 9)) for x, y in zip(bands.grid, limit, strict=True)} <= outline


def test_threshold_is_marked_with_wilson_limits():
    labels, (scores, *_) = cohort()
    fold = np.arange(len(labels)) % 2
    cuts = np.where(fold == 0, 0.45, 0.6)
    called = np.array([score >= cut for score, cut in zip(scores, cuts, strict=True)])
    hits, alarms = int(called[labels == 1].sum()), int(called[labels == 0].sum())
    (axes,) = figures.draw_roc(labels, scores, threshold=cuts, resamples=100).axes
    (mark,) = lines(axes, "threshold")
    np.testing.assert_allclose(points(mark), [(alarms / 17, hits / 12)])
    horizontal, vertical = axes.lines[-3], axes.lines[-2]
    of_alarms = binomtest(alarms, 17).proportion_ci(method="wilson")
    of_hits = binomtest(hits, 12).proportion_ci(method="wilson")
    np.testing.assert_allclose(points(horizontal), [(of_alarms.low, hits / 12), (of_alarms.high, hits / 12)])
    np.testing.assert_allclose(points(vertical), [(alarms / 17, of_hits.low), (alarms / 17, of_hits.high)])

    (axes,) = figures.draw_pr(labels, scores, threshold=cuts, resamples=100).axes
    np.testing.assert_allclose(points(lines(axes, "threshold")[0]), [(hits / 12, hits / (hits + alarms))])


def test_pr_steps_have_the_area_of_the_average_precision():
    labels, (scores, *_) = cohort()
    figure = figures.draw_pr(labels, scores, resamples=100)
    (thick,) = lines(figure.axes[0], "ensemble")
    assert thick.get_drawstyle() == "steps-pre"
    drawn = points(thick)
    expected, area, reached = [], 0.0, 0.0
    for cut in sorted(set(scores.tolist()), reverse=True):
        hits, all_called = int((scores[labels == 1] >= cut).sum()), int((scores >= cut).sum())
        expected.append((hits / 12, hits / all_called))
        area += (hits / 12 - reached) * hits / all_called
        reached = hits / 12
    np.testing.assert_allclose(drawn, [(0.0, expected[0][1]), *expected], atol=1e-12)
    assert f"average precision {area:.3f}" in words(figures.to_svg(figure))


def test_several_classes_get_a_panel_each():
    rng = np.random.default_rng(1)
    labels = rng.permutation(np.repeat([0, 1, 2], [9, 8, 7]))
    seeds = [rng.dirichlet([1, 1, 1], 24) + 0.4 * np.eye(3)[labels] for _ in range(2)]
    ensemble = np.mean(seeds, axis=0)
    for draw in (figures.draw_roc, figures.draw_pr):
        figure = draw(labels, ensemble, seed_scores=seeds, class_names=("a", "b", "c"), resamples=100)
        panels = figure.axes[:3]
        assert [axes.get_title() for axes in panels] == ["a", "b", "c"]
        assert all(len(lines(axes, "seed")) == 2 for axes in panels)
        assert "9 a, 8 b and 7 c slides. Each panel: one class against the rest." in words(figures.to_svg(figure))
        for k, axes in enumerate(panels):
            called = ensemble.argmax(axis=1) == k
            sensitivity = called[labels == k].mean()
            if draw is figures.draw_roc:
                expected = slow_roc((labels == k).astype(int), ensemble[:, k])
                np.testing.assert_allclose(points(lines(axes, "ensemble")[0]), expected, atol=1e-12)
                place = called[labels != k].mean(), sensitivity
            else:
                place = sensitivity, (labels[called] == k).mean()
            np.testing.assert_allclose(points(lines(axes, "threshold")[0]), [place])


def test_captions_of_curves():
    labels, seeds = cohort()
    ensemble = np.mean(seeds, axis=0)
    told = {"class_names": NAMES, "threshold": 0.44, "threshold_from": YOUDEN, "resamples": 150}
    svg = figures.roc_figure(labels, ensemble, "ROC of DSMIL", seed_scores=seeds, groups=np.arange(29) // 2, **told)
    text = words(svg)
    assert "17 normal and 12 tumor slides. Thick line: ensemble of 3 seeds, thin lines: each of them." in text
    assert "Band: pointwise 95 % limits (patients drawn whole, 150 bootstrap resamples)." in text
    assert f"Mark: threshold 0.440 ({YOUDEN}), sensitivity " in text
    value = auc_interval(labels, ensemble, groups=np.arange(29) // 2, resamples=150)
    assert f"AUC {value.value:.3f} [{value.low:.3f}, {value.high:.3f}]" in text
    assert "ROC of DSMIL" in text
    assert "OPTIMISTIC" not in svg
    assert "<title>ROC of DSMIL</title>" in svg

    plain = words(figures.pr_figure(labels, ensemble, class_names=NAMES, resamples=100))
    assert "17 normal and 12 tumor slides. Band" in plain
    assert "Mark" not in plain
    silent = words(figures.pr_figure(labels, ensemble, threshold=2.0, resamples=100))
    assert "no precision, as nothing is called positive" in silent
    folds = np.where(np.arange(29) < 9, 0.4, 0.61)
    assert "thresholds 0.400 to 0.610" in words(figures.roc_figure(labels, ensemble, threshold=folds, resamples=100))
    sure = words(figures.roc_figure([0, 0, 1, 1], [0.1, 0.2, 0.8, 0.9], resamples=100))
    assert "the band has no width; that is no certainty" in sure


# ---------------------------------------------------------------------------------------------------- the others


def test_calibration_draws_bins_with_wilson_limits_and_counts():
    labels, (scores, *_) = cohort()
    figure = figures.draw_calibration(labels, scores, uncalibrated=scores**2, threshold=0.4)
    upper, lower = figure.axes
    expected, limits, counts, gap = [], [], [], 0.0
    for k in range(10):
        inside = [i for i, score in enumerate(scores) if min(int(score * 10), 9) == k]
        counts.append([sum(1 for i in inside if labels[i] == value) for value in (0, 1)])
        if inside:
            mean, share = scores[inside].mean(), labels[inside].mean()
            expected.append((mean, share))
            ci = binomtest(counts[-1][1], len(inside)).proportion_ci(method="wilson")
            limits.append([(mean, ci.low), (mean, ci.high)])
            gap += abs(mean - share) * len(inside) / len(labels)
    np.testing.assert_allclose(points(lines(upper, "ensemble")[0]), expected, atol=1e-12)
    np.testing.assert_allclose([path.vertices for path in upper.collections[0].get_paths()], limits, atol=1e-12)
    heights = [bar.get_height() for bar in lower.patches]  # pyright: ignore[reportAttributeAccessIssue]
    assert heights == [pair[0] for pair in counts] + [pair[1] for pair in counts]
    assert len(lines(upper, "before")) == 1
    text = words(figures.to_svg(figure))
    assert f"ECE {gap:.3f}" in text
    brier, before = (sum((score - labels) ** 2) / 29 for score in (scores, scores**2))
    assert f"Brier score {brier:.3f} ({before:.3f} before scaling)." in text
    assert "Vertical line: threshold 0.400." in text


def test_calibration_of_several_classes_is_that_of_the_class_called():
    rng = np.random.default_rng(2)
    labels, probabilities = rng.integers(0, 3, 40), rng.dirichlet([1, 1, 1], 40)
    upper, lower = figures.draw_calibration(labels, probabilities, class_names="abc").axes
    right, stated = probabilities.argmax(axis=1) == labels, probabilities.max(axis=1)
    bins = [[i for i, value in enumerate(stated) if min(int(value * 10), 9) == k] for k in range(10)]
    expected = [(stated[inside].mean(), right[inside].mean()) for inside in bins if inside]
    np.testing.assert_allclose(points(lines(upper, "ensemble")[0]), expected, atol=1e-12)
    assert upper.get_ylabel() == "share that is right"
    heights = [bar.get_height() for bar in lower.patches]  # pyright: ignore
    assert heights == [sum(~right[inside]) for inside in bins] + [sum(right[inside]) for inside in bins]


def test_confusion_shows_counts_shares_and_limits():
    figure = figures.draw_confusion([[15, 2], [3, 9]], NAMES, threshold_from=YOUDEN)
    cells = {text.get_position(): text.get_text() for text in figure.axes[0].texts}
    ci = binomtest(3, 12).proportion_ci(method="wilson")
    # Rows are the true class, drawn from the top: position (x, y) is (called, true).
    assert cells[(0, 1)] == f"3\n25 %\n[{100 * ci.low:.0f}, {100 * ci.high:.0f}]"
    assert cells[(1, 0)].startswith("2\n12 %")
    np.testing.assert_allclose(figure.axes[0].images[0].get_array(), [[15 / 17, 2 / 17], [3 / 12, 9 / 12]])  # pyright: ignore
    text = words(figures.to_svg(figure))
    total = binomtest(24, 29).proportion_ci(method="wilson")
    assert f"17 normal and 12 tumor slides. Right: 24 of 29, 0.828 [{total.low:.3f}, {total.high:.3f}]." in text
    assert f"Decision: {YOUDEN}." in text
    # A class that never occurs has no shares, many classes no room for them.
    assert figures.draw_confusion([[0, 0], [1, 4]], NAMES).axes[0].texts[0].get_text() == "0"
    many = figures.draw_confusion(np.eye(9, dtype=int), [f"class {k}" for k in range(9)])
    assert {text.get_text() for text in many.axes[0].texts} == {"0", "1"}
    assert "Colour: share of the true class." in words(figures.to_svg(many))


def forest_rows() -> list[ComparisonRow]:
    on = EvaluatedOn("demo", "given test split", (("normal", 17), ("tumor", 12)))
    half = Interval(0.5, 0.3, 0.7, "Wilson")
    rows = []
    for k, method in enumerate(("dsmil", "mean", "transmil")):
        value = Interval(0.7 + 0.1 * k, 0.6 + 0.1 * k, 0.78 + 0.1 * k, "DeLong on the logit scale")
        paired = PairedRow(method, "mean", half, "paired DeLong test", 0.2, 0.4, 0.2, 0.4, 2) if k != 1 else None
        seeds = (value.value - 0.02, value.value + 0.03)
        made = (value, half, half, half, half, YOUDEN, paired)
        rows.append(ComparisonRow(method, method.upper(), "DINO", on, seeds, *made, published=PUBLISHED.get(method)))
    return rows


def test_forest_keeps_published_apart_from_measured():
    rows = forest_rows()
    figure = figures.draw_auc(rows)
    (axes,) = figure.axes
    for y, row in enumerate(rows):
        assert points(lines(axes, row.method)[0]) == [(row.auc.value, y)]
        assert [(row.auc.low, y), (row.auc.high, y)] in [points(line) for line in axes.lines]
    assert [float(line.get_xdata()[0]) for line in lines(axes, "published")] == [0.8944, 0.9309]  # pyright: ignore
    assert all(line.get_markerfacecolor() == "white" for line in lines(axes, "published"))
    assert [len(line.get_xdata()) for line in lines(axes, "seeds")] == [2, 2, 2]  # pyright: ignore
    text = words(figures.to_svg(figure))
    assert "Measured on 17 normal + 12 tumor slides of demo (given test split)." in text
    assert "Hollow marks: published, on Camelyon16's official test set, not measured here; not comparable" in text
    assert "ensembles of 2 seeds. Lines: 95 % intervals. Vertical line: MEAN, the baseline." in text
    assert "0.700 [0.600, 0.780]" in text

    on = replace(rows[0].evaluated_on, camelyon16_test=True, protocol="optimistic")
    official = words(figures.auc_figure([replace(row, evaluated_on=on) for row in rows]))
    assert "AUC of every method: OPTIMISTIC" in official
    assert "the same test slides" in official
    assert "not comparable" not in official
    assert "Hollow" not in words(figures.auc_figure([replace(row, published=None) for row in rows]))

    # What is not defined is not drawn.
    unknown = replace(rows[0], auc=Interval(np.nan, 0, 1, "no test slide of a class"), seed_aucs=(np.nan,) * 2)
    figure = figures.draw_auc([unknown, *rows[1:]])
    assert not lines(figure.axes[0], "dsmil")
    assert "not defined" in words(figures.to_svg(figure))


def test_curves_of_folds_are_means_of_curves_within_folds():
    labels, (scores, *_) = cohort()
    folds = np.arange(len(labels)) % 3
    moved = scores + 5.0 * folds
    options = {"folds": folds, "resamples": 100, "seed_scores": [moved, scores]}
    (axes,) = figures.draw_roc(labels, moved, **options).axes
    (line,) = lines(axes, "ensemble")
    x, y = np.array(points(line)).T
    parts = [(auc(labels[folds == k], scores[folds == k]), np.prod(np.bincount(labels[folds == k]))) for k in range(3)]
    expected = np.average([value for value, _ in parts], weights=[pairs for _, pairs in parts])
    assert np.trapezoid(y, x) == pytest.approx(expected)
    text = words(figures.roc_figure(labels, moved, **options))
    assert "mean over 3 folds" in text
    assert f"AUC {expected:.3f}" in text.replace("\xa0", " ")
    (axes,) = figures.draw_pr(labels, moved, **options).axes
    precision = average_precision(labels, scores, folds=folds)
    assert f"average precision {precision:.3f}" in " ".join(text.get_text() for text in axes.texts)
    assert "Slides of 3 folds" in words(figures.calibration_figure(labels, scores, folds=folds))
    assert "folds" not in words(figures.roc_figure(labels, scores, resamples=100))


def test_history_draws_losses_means_and_the_epochs_kept():
    first = [{"epoch": e, "train_loss": 1 / e, "val_loss": 0.5 + 1 / e} for e in (1, 2, 3)]
    second = [{"epoch": e, "train_loss": 2 / e, "val_loss": 0.4 + 2 / e} for e in (1, 2)]
    (axes,) = figures.draw_history([first, second], [3, 2]).axes
    assert points(lines(axes, "train_loss")[0]) == [(1, 1), (2, 0.5), (3, 1 / 3)]
    assert points(lines(axes, "mean train_loss")[0]) == [(1, 1.5), (2, 0.75)]
    np.testing.assert_allclose(points(lines(axes, "mean val_loss")[0]), [(1, 1.95), (2, 1.2)])
    assert [points(line) for line in lines(axes, "kept")] == [[(3, 0.5 + 1 / 3)], [(2, 1.4)]]
    text = words(figures.history_figure([first, second], [3, 2]))
    assert "2 training runs, thin lines; thick: their mean while all ran. Marks: the epochs kept." in text

    unjudged = [{**row, "val_loss": None} for row in first]
    (axes,) = figures.draw_history([unjudged], [2]).axes
    assert not lines(axes, "val_loss")
    assert points(lines(axes, "kept")[0]) == [(2, 0.5)]


# ---------------------------------------------------------------------------------------------------- all of them


def all_figures(protocol: figures.Protocol = "honest") -> dict[str, Figure]:
    labels, seeds = cohort()
    ensemble = np.mean(seeds, axis=0)
    told = {"class_names": NAMES, "threshold": 0.45, "threshold_from": YOUDEN, "protocol": protocol}
    three, history = np.arange(29) % 3, [{"epoch": e, "train_loss": 1 / e, "val_loss": 0.5} for e in range(1, 9)]
    by_class = np.random.default_rng(0).dirichlet([1, 1, 1], 29)
    on = replace(forest_rows()[0].evaluated_on, protocol=protocol)
    return {
        "roc": figures.draw_roc(labels, ensemble, seed_scores=seeds, resamples=100, **told),
        "pr": figures.draw_pr(labels, ensemble, seed_scores=seeds, resamples=100, **told),
        "roc3": figures.draw_roc(three, by_class, class_names="abc", resamples=100, protocol=protocol),
        "calibration": figures.draw_calibration(labels, ensemble, uncalibrated=ensemble**2, **told),
        "confusion": figures.draw_confusion([[15, 2], [3, 9]], NAMES, threshold_from=YOUDEN, protocol=protocol),
        "auc": figures.draw_auc([replace(row, evaluated_on=on) for row in forest_rows()]),
        "history": figures.draw_history([history] * 2, [3, 4], protocol=protocol),
    }


@pytest.fixture(scope="module")
def svgs() -> dict[str, str]:
    return {name: figures.to_svg(figure) for name, figure in all_figures().items()}


def test_optimistic_stands_in_every_title(svgs: dict[str, str]):
    for figure in all_figures("optimistic").values():
        assert figure.texts[0].get_text().endswith(": OPTIMISTIC")
        assert "OPTIMISTIC: epoch and threshold were chosen on the test slides" in words(figures.to_svg(figure))
    assert not any("OPTIMISTIC" in svg for svg in svgs.values())


def test_nothing_overlaps_nor_leaves_the_page():
    for name, figure in all_figures("optimistic").items():
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        page, (title, caption) = figure.bbox, (text.get_window_extent() for text in figure.texts)
        plots = [axes.get_tightbbox() for axes in figure.axes if axes.axison]
        legend = figure.legends[0].get_window_extent() if figure.legends else None
        floor = caption.y1 if legend is None else legend.y1
        assert legend is None or legend.y0 >= caption.y1, name
        assert all(box is not None and floor <= box.y0 and box.y1 <= title.y0 for box in plots), name
        for box in (title, caption, legend or title, *plots):
            assert box is not None
            assert page.x0 <= box.x0, name
            assert box.x1 <= page.x1, name
        assert caption.y0 >= page.y0, name


def test_smallest_words_are_ten_pixels_high_at_400_pixels_width():
    for name, figure in all_figures().items():
        sizes = [float(text.get_fontsize()) for text in figure.findobj(matplotlib.text.Text) if text.get_text()]  # pyright: ignore
        assert min(sizes) / 72 / figure.get_figwidth() * 400 > 9.8, name


@pytest.mark.slow
def test_equal_input_gives_equal_bytes_whatever_the_users_style(svgs: dict[str, str], tmp_path: Path):
    assert figures.to_svg(figures.draw_auc(forest_rows())) == svgs["auc"]
    assert not any("<dc:date>" in svg for svg in svgs.values())
    # Another process, another hash seed, a user's own style, and pyplot never loaded.
    (tmp_path / "matplotlibrc").write_text(
        "font.size: 20\naxes.facecolor: red\nsvg.fonttype: path\nlines.linewidth: 9\n"
    )
    code = (
        "import sys\nfrom test_evaluate_figures import all_figures, figures\n"
        "text = ''.join(figures.to_svg(figure) for figure in all_figures().values())\n"
        "assert 'matplotlib.pyplot' not in sys.modules\nsys.stdout.buffer.write(text.encode())"
    )
    environment = {
        **os.environ,
        "PYTHONHASHSEED": "7",
        "MATPLOTLIBRC": str(tmp_path / "matplotlibrc"),
        "PYTHONPATH": str(Path(__file__).parent),
    }
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, env=environment)
    assert done.stdout.decode() == "".join(svgs.values())


def test_the_users_style_is_left_alone():
    before = dict(matplotlib.rcParams)
    figures.auc_figure(forest_rows())
    assert dict(matplotlib.rcParams) == before


def test_names_of_any_kind_stay_as_they_are():
    names = ("a$b$ & <c>", "肿瘤")
    labels, (scores, *_) = cohort()
    for svg in (
        figures.roc_figure(labels, scores, class_names=names, resamples=100),
        figures.calibration_figure(labels, scores, class_names=names),
        figures.confusion_figure([[15, 2], [3, 9]], names),
    ):
        assert f"17 {names[0]} and 12 {names[1]} slides." in words(svg)


@pytest.mark.parametrize(
    ("draw", "said"),
    [
        (lambda: figures.roc_figure([0, 1], [0.1, 0.2], class_names="abc"), "3 class names"),
        (lambda: figures.roc_figure([0, 1], np.eye(2), threshold=0.5), "a threshold for 2 classes"),
        (lambda: figures.roc_figure([0, 1], [0.1, 0.9], seed_scores=[[0.1], [0.2]]), "scores of shape (1,)"),
        (lambda: figures.pr_figure([0, 0], [0.1, 0.2]), "all 2 labels are 0"),
        (lambda: figures.confusion_figure([[1, 2]], NAMES), "shape (1, 2)"),
        (lambda: figures.calibration_figure([0, 1], [0.1, 7]), "probabilities from 0.1 to 7"),
        (lambda: figures.auc_figure([]), "without rows"),
        (lambda: figures.history_figure([[]]), "without epochs"),
    ],
)
def test_what_cannot_be_drawn_is_refused(draw, said: str):
    with pytest.raises(MetricError) as caught:
        draw()
    assert said in str(caught.value)
