"""What the first screen of the report says: question, answer, simple baselines, three heatmaps, limits.

The answer is that of the main method, by the honest protocol where there is one. Numbers are those of `metrics.json`;
the differences to simple baselines are computed from the predictions of the comparison, on the same test slides.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from selfvitmil.cohort import Cohort
from selfvitmil.errors import SelfVitMilError
from selfvitmil.evaluate.comparison import COLOR_ROW, UNTRAINED_ROW, ComparisonRow, holm, paired_rows
from selfvitmil.evaluate.comparison_table import OutcomeRow
from selfvitmil.evaluate.method_metrics import Estimator
from selfvitmil.formatting import p_value, percent, value_and_limits
from selfvitmil.localize import overlay
from selfvitmil.localize.detection import highest_scoring_tile
from selfvitmil.localize.heatmap import MAIN_METHOD, Heatmap, SlidePrediction, read_heatmap
from selfvitmil.metrics import Interval
from selfvitmil.outcomes import outcome_from_json
from selfvitmil.pseudonyms import Names
from selfvitmil.report.render import Picture, Shown, interval_in, is_finite, picture, picture_file
from selfvitmil.report.results import ResultsFolder
from selfvitmil.report.slide_sections import Decision, HeatmapFolder, annotations_of, open_mapped
from selfvitmil.settings import StudySettings
from selfvitmil.slides import Slide
from selfvitmil.store.files import section

if TYPE_CHECKING:
    from selfvitmil.report.data import StudyFiles

SIMPLE_BASELINES = {
    "mean": "mean pooling",
    "max": "max pooling",
    UNTRAINED_ROW: "untrained encoder",
    COLOR_ROW: "mean colour",
}
"""Rows of a comparison that any method should beat, and their names: a linear classifier of the mean embedding or of
the highest tile, embeddings of a network with random weights, and no network at all."""
FEW_SLIDES = 50
"""Fewer test slides of a class than this are called few: a share of 0.9 then has 95 % limits wider than 0.17."""
CARD_PX = 300
"""Edge of the pictures on the first screen."""
ZOOM_TILES = 6
"""Tiles across the enlarged region."""
ZOOM_MPP = 0.5
"""Finest resolution of an enlarged region."""
Role = Literal["hit", "borderline", "error"]
ROLES: dict[Role, str] = {"hit": "A clear hit", "borderline": "A borderline case", "error": "The worst error"}


@dataclass(frozen=True)
class Bar:
    """A value with its limits as a row of the picture; positions are from 0 to 100 on the shared axis."""

    name: str
    value: str
    limits: str
    at: float
    low: float
    high: float
    is_main: bool


@dataclass(frozen=True)
class BarPicture:
    """Values of several methods on one axis."""

    metric: str
    bars: tuple[Bar, ...]
    ticks: tuple[str, str, str]
    """First, middle and last value of the axis."""


@dataclass(frozen=True)
class Saying:
    """A metric as a sentence, with the metric and its limits."""

    sentence: str
    metric: str
    value: str


@dataclass(frozen=True)
class AnswerHeatmap:
    """A slide with its heatmap and an enlarged region."""

    title: str
    slide: str
    anchor: str
    words: str
    whole: Shown
    zoom: Picture | None


@dataclass(frozen=True)
class AnswerData:
    """The first screen."""

    question: str
    basis: str
    """The numbers of slides and patients behind the answer."""
    method: str
    metric: str
    """Name of the metric that the answer is given in; empty where nothing was evaluated yet."""
    value: str
    limits: str
    meaning: str
    sayings: tuple[Saying, ...]
    threshold: str
    """Where decisions are made and how that was chosen; empty where there is no threshold."""
    picture: BarPicture | None
    margin: str
    limitations: tuple[str, ...]
    heatmaps: tuple[AnswerHeatmap, ...]
    heatmaps_note: str


def answer_data(
    files: StudyFiles,
    decisions: Mapping[str, Decision],
    anchors: Mapping[str, str],
    settings: StudySettings,
    names: Names,
) -> AnswerData:
    """Return the first screen of a study; without results it says what is missing."""
    found = main_result(files.results)
    compared = next((one for one in files.results if one.is_comparison and not one.is_optimistic and one.rows), None)
    heatmaps, note = _heatmaps(files, decisions, anchors, settings, names)
    cohort = files.cohort
    if found is None:
        return AnswerData(
            question=_question(cohort, None),
            basis=_cohort_words(cohort),
            method="",
            metric="",
            value="",
            limits="",
            meaning="",
            sayings=(),
            threshold="",
            picture=None,
            margin="",
            limitations=(),
            heatmaps=heatmaps,
            heatmaps_note=note,
        )
    folder, info = found
    key, metric = headline_metric(info)
    ensemble = _ensemble(info)
    value, limits = _interval(ensemble.get(key))
    return AnswerData(
        question=_question(cohort, info),
        basis=f"{_cohort_words(cohort)}{_test_words(info)}",
        method=_method_words(info),
        metric=metric,
        value=value or "not defined",
        limits=limits,
        meaning=_meaning(info, key, ensemble.get(key)),
        sayings=tuple(_sayings(info)),
        threshold=_threshold_words(ensemble),
        picture=_bar_picture(metric, info, ensemble.get(key), compared),
        margin=_margin(info, compared),
        limitations=tuple(_limitations(files, folder, info)),
        heatmaps=heatmaps,
        heatmaps_note=note,
    )


def main_result(results: Sequence[ResultsFolder]) -> tuple[ResultsFolder, Mapping[str, Any]] | None:
    """Return the folder and the entry of the method that the answer is about; honest results before optimistic ones."""

    def order(one: ResultsFolder) -> tuple[bool, bool, bool, bool]:
        return one.is_optimistic, one.is_stale, one.is_comparison, MAIN_METHOD not in one.name

    for one in sorted((one for one in results if one.methods), key=order):
        main = next((info for info in one.methods if info.get("method") == MAIN_METHOD), one.methods[0])
        if _ensemble(main):
            return one, main
    return None


def _ensemble(info: Mapping[str, Any]) -> Mapping[str, Any]:
    return section(info, "slide", "ensemble")


def headline_metric(info: Mapping[str, Any]) -> tuple[str, str]:
    """Return key and name of the metric of the answer."""
    outcome = info.get("outcome")
    if outcome:
        return str(outcome.get("primary", "")), _outcome_words(outcome)
    return "auc", "macro AUC" if len(info.get("classes") or ()) > 2 else "AUC"


def _outcome_words(stored: Mapping[str, Any]) -> str:
    with suppress(ValueError, TypeError):
        known = {key: value for key, value in stored.items() if key not in ("primary", "higher_is_better")}
        return outcome_from_json(known).primary_words
    return str(stored.get("primary", ""))


def _interval(info: Any) -> tuple[str, str]:
    """Return value and limits (`95 % CI 0.850 to 0.961`); empty where there are none."""
    known = interval_in(info)
    if not known:
        return "", ""
    value, limits = value_and_limits(known)
    return value, f"{percent(float(known.get('level', 0.95)))} CI {limits}" if limits else ""


# ---------------------------------------------------------------------------------------------------- words


def _question(cohort: Cohort | None, info: Mapping[str, Any] | None) -> str:
    outcome = section(info).get("outcome")
    if outcome:
        columns = " and ".join(outcome.get("columns") or ())
        return f"Can {columns or outcome.get('kind')} be predicted from the slide?"
    classes = [str(name) for name in section(info).get("classes") or (cohort.classes if cohort else ())]
    if len(classes) == 2:
        negative, positive = classes
        return f"Can {positive} slides be separated from {negative} slides?"
    if classes:
        return f"Can slides of {', '.join(classes[:-1])} and {classes[-1]} be separated?"
    return "Can the slides of this study be classified?"


def _cohort_words(cohort: Cohort | None) -> str:
    if cohort is None:
        return ""
    patients = len(cohort.patients)
    counts = ", ".join(f"{number} {label}" for label, number in cohort.class_counts.items())
    return f"{_count(len(cohort), 'slide')} of {_count(patients, 'patient')}{f' ({counts})' if counts else ''}. "


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _test_words(info: Mapping[str, Any]) -> str:
    splits = section(info, "slides")
    own = _ensemble(info)
    counts = section(own, "counts")
    number = sum(counts.values()) if counts else own.get("num", 0)
    listed = f" ({', '.join(f'{count} {name}' for name, count in counts.items())})" if counts else ""
    if section(info, "slide").get("estimator") == Estimator.WITHIN_OVERLAPPING_SPLITS:
        return (
            f"Tested on the test slides of {len(splits)} splits, which overlap; no model was tested on its own slides."
        )
    patients = sum((section(each, "test").get("patients")) or 0 for each in splits.values())
    folds = f", each by models that were trained without them ({len(splits)} folds)" if len(splits) > 1 else ""
    whose = f" of {_count(patients, 'patient')}" if patients else ""
    held = "" if folds else " that no model was trained on"
    return f"Tested on {_count(int(number), 'slide')}{whose}{listed}{held}{folds}."


def _method_words(info: Mapping[str, Any]) -> str:
    seeds = len(info.get("seeds") or ())
    trainings = f", mean of {seeds} training runs" if seeds > 1 else ""
    return f"{info.get('method', '')} on embeddings of {info.get('encoder', '')}{trainings}"


def _of_100(interval: Any) -> tuple[int, str] | None:
    """Return a share as so many of 100, and its limits in the same unit."""
    known = interval_in(interval)
    if not known:
        return None
    low, high = known.get("low"), known.get("high")
    limits = "" if low is None or high is None else f"{round(100 * float(low))} to {round(100 * float(high))}"
    level = percent(float(known.get("level", 0.95)))
    return round(100 * float(known["value"])), f"{level} CI {limits}" if limits else ""


def _meaning(info: Mapping[str, Any], key: str, interval: Any) -> str:
    """Return what the value of the headline metric means."""
    share = _of_100(interval)
    classes = info.get("classes") or ()
    if share is None:
        return str(section(_ensemble(info), "reasons").get(key, ""))
    if key == "auc" and len(classes) == 2:
        return (
            f"Of a random {classes[1]} and a random {classes[0]} slide, the {classes[1]} slide gets the higher score "
            f"in about {share[0]} of 100 pairs; 50 would be chance."
        )
    if key == "auc":
        return f"Ranking each class against all others is right in about {share[0]} of 100 pairs; 50 would be chance."
    if key == "c_index":
        return (
            f"Of two random patients, the one whose event comes first gets the higher risk in about {share[0]} of 100 "
            "pairs; 50 would be chance."
        )
    return ""


def _sayings(info: Mapping[str, Any]) -> Iterator[Saying]:
    """Yield what decisions at the threshold mean, as sentences."""
    own, classes = _ensemble(info), [str(name) for name in info.get("classes") or ()]
    if len(classes) == 2:
        negative, positive = classes
        yield from _saying(own, "sensitivity", f"Of 100 {positive} slides about", "would be found")
        yield from _saying(own, "specificity", f"Of 100 {negative} slides about", f"would be called {negative}")
    elif classes:
        yield from _saying(own, "balanced_accuracy", "Of 100 slides of each class about", "would get the right class")
        missed = [
            (float(one["sensitivity"]["value"]), name)
            for name, one in section(own, "per_class").items()
            if one.get("sensitivity")
        ]
        if missed:
            share, name = min(missed)
            yield Saying(f"Most often missed: {name}; of 100 about {round(100 * share)} would be found.", "", "")


def _saying(own: Mapping[str, Any], key: str, before: str, after: str) -> Iterator[Saying]:
    share = _of_100(own.get(key))
    if share is not None:
        number, limits = share
        yield Saying(
            f"{before} {number} {after}{f' ({limits})' if limits else ''}.",
            key.replace("_", " "),
            f"{own[key]['value']:.3f}",
        )


def _threshold_words(own: Mapping[str, Any]) -> str:
    value, origin = own.get("threshold"), str(own.get("threshold_from") or "")
    if not origin:
        return ""
    return f"Threshold {f'{value:.2f}, ' if is_finite(value) else ''}{origin}."


# ---------------------------------------------------------------------------------------------------- baselines


def _bar_picture(
    metric: str, info: Mapping[str, Any], interval: Any, compared: ResultsFolder | None
) -> BarPicture | None:
    """Return the answer with its interval above the simple baselines; None where no interval is known."""
    known = interval_in(interval)
    if not known:
        return None
    rows = [(str(info.get("method", "")), known, True)]
    rows += [(name, vars(value), False) for name, value in _baselines(compared, metric)]
    rows = [row for row in rows if is_finite(row[1].get("low")) and is_finite(row[1].get("high"))]
    if not rows:
        return None
    least, most = min(float(own["low"]) for _, own, _ in rows), max(float(own["high"]) for _, own, _ in rows)
    first, last = axis_limits(metric, least, most)

    def place(value: float) -> float:
        return round(100 * (value - first) / (last - first), 2)

    bars = [
        Bar(name, *_interval(own), place(own["value"]), place(own["low"]), place(own["high"]), is_main)
        for name, own, is_main in rows
    ]
    chance = " chance" if _has_chance(metric) else ""
    ticks = tuple(f"{at:.3g}{chance if at == 0.5 else ''}" for at in (first, (first + last) / 2, last))
    return BarPicture(metric, tuple(bars), ticks)  # pyright: ignore[reportArgumentType]


def axis_limits(metric: str, least: float, most: float) -> tuple[float, float]:
    """Return the ends of the axis: from chance, or below, to 1 for ranking metrics; else around all limits."""
    if least >= 0 and most <= 1:
        return (0.5 if least >= 0.5 and _has_chance(metric) else 0.0), 1.0
    step = 10 ** math.floor(math.log10(max(most - least, 1e-9)))
    return math.floor(least / step) * step, math.ceil(most / step) * step


def _has_chance(metric: str) -> bool:
    """Return whether 0.5 is what chance gives."""
    return "AUC" in metric or "C-index" in metric


def _baselines(compared: ResultsFolder | None, metric: str) -> Iterator[tuple[str, Interval]]:
    for row in compared.rows if compared else ():
        name = SIMPLE_BASELINES.get(row.display_name)
        if name is None:
            continue
        if isinstance(row, OutcomeRow):
            value = next((own for head, own in row.metrics.items() if head == metric), None)
        else:
            value = row.auc
        if value is not None and math.isfinite(value.value):
            yield name, value


def _margin(info: Mapping[str, Any], compared: ResultsFolder | None) -> str:
    """Return how far the method is above the best simple baseline, on the same slides."""
    if compared is None:
        return "Not compared with simple baselines yet: run selfvitmil compare."
    main = str(info.get("method", ""))
    known = [row for row in compared.rows if row.display_name in SIMPLE_BASELINES and row.display_name != main]
    if not known:
        return "The comparison has no simple baseline."
    if isinstance(known[0], OutcomeRow):
        return _outcome_margin(main, compared.rows)
    if main not in {row.display_name for row in compared.rows}:
        return f"The comparison has no row of {main}."
    best = max(known, key=lambda row: row.auc.value if math.isfinite(row.auc.value) else -1.0)
    tests = _paired(main, known, compared)
    name, value = SIMPLE_BASELINES[best.display_name], f"AUC {best.auc.value:.3f}"
    if best.display_name not in tests:
        return f"Best simple baseline: {name}, {value}."
    difference, p = tests[best.display_name]
    limits = f"{percent(difference.level)} CI {difference.low:+.3f} to {difference.high:+.3f}, p {p_value(p)}"
    if difference.low > 0:
        return f"{difference.value:.3f} above the best simple baseline, {name} with {value} ({limits})."
    words = "Below" if difference.high < 0 else "Not shown to be better than"
    share = f"difference {difference.value:+.3f} ({limits})"
    return f"{words} the best simple baseline, {name} with {value}: {share}."


def _paired(
    main: str, baselines: Sequence[ComparisonRow], compared: ResultsFolder
) -> dict[str, tuple[Interval, float]]:
    """Return the difference to each baseline with its p-value, corrected by Holm's method; empty where undefined."""
    rows = [row for row in compared.predictions if row.part == "test" and row.seed is None]
    scores: dict[str, dict[str, Sequence[float]]] = {}
    for row in rows:
        scores.setdefault(row.method, {})[row.slide] = row.score
    labels = {row.slide: int(row.label) for row in rows}
    splits = {row.slide: row.split for row in rows}
    if len({(row.slide, row.split) for row in rows}) > len(labels):
        return {}  # test sets overlap
    shared: dict[str, Any] = {
        "patients": {row.slide: row.patient for row in rows},
        "folds": splits if len(set(splits.values())) > 1 else None,
        "level": baselines[0].auc.level,
        "resamples": 100,  # the limits shown are DeLong's
    }
    found: dict[str, tuple[Interval, float]] = {}
    for base in baselines:
        with suppress(SelfVitMilError, KeyError, ValueError):
            pair = {name: scores[name] for name in (main, base.display_name)}
            test = paired_rows(labels, pair, base.display_name, **shared)[main]
            found[base.display_name] = test.difference, test.p_value
    corrected = holm([p for _, p in found.values()])
    return {name: (difference, p) for (name, (difference, _)), p in zip(found.items(), corrected, strict=True)}


def _outcome_margin(main: str, rows: Sequence[Any]) -> str:
    row = next((row for row in rows if row.display_name == main and row.difference is not None), None)
    if row is None:
        return ""
    own = row.difference
    limits = f"{percent(own.level)} CI {own.low:+.3f} to {own.high:+.3f}, p {p_value(row.p_value)}"
    return f"Difference to {SIMPLE_BASELINES.get(row.baseline, row.baseline)}: {own.value:+.3f} ({limits})."


# ---------------------------------------------------------------------------------------------------- limits


def _limitations(files: StudyFiles, folder: ResultsFolder, info: Mapping[str, Any]) -> Iterator[str]:
    """Yield what limits the conclusion, the gravest first."""
    own = _ensemble(info)
    if folder.is_optimistic:
        yield "Optimistic protocol: epoch and threshold were chosen on the test slides; expect lower values on others."
    if folder.is_stale:
        yield "These metrics are of an earlier version, which ranked slides of different splits together."
    transductive = info.get("transductive")
    if transductive:
        number = sum(section(info, "transductive").values()) if isinstance(transductive, Mapping) else ""
        yield f"Transductive: the encoder was trained, without labels, on {number} of the test slides too."
    counts = section(own, "counts")
    few = {name: number for name, number in counts.items() if number < FEW_SLIDES}
    if few:
        metric, name = headline_metric(info)
        low = interval_in(own.get(metric)).get("low")
        lowest = f"; the true {name} may be as low as {low:.2f}" if is_finite(low) else ""
        yield f"Few test slides ({', '.join(f'{number} {name}' for name, number in few.items())}){lowest}."
    yield from _site_words(files.cohort)
    if len(info.get("seeds") or ()) == 1:
        yield "One training run: how much the result depends on the seed is not known."
    if files.heatmaps and not any(one.lesions for one in files.results):
        yield "Heatmaps were not compared with annotations: where the model looks is not verified."
    for text in (info.get("warnings") or ())[:2]:
        sentence, more, _ = str(text).partition(". ")
        yield sentence[:1].upper() + sentence[1:] + ("." if more else "")  # in full where the metrics are


def _site_words(cohort: Cohort | None) -> Iterator[str]:
    """Yield what is known of other sites."""
    if cohort is None:
        return
    if not cohort.site_columns:
        yield "The cohort does not name sites: nothing here shows how the classifier does at another site or scanner."
        return
    column = cohort.site_columns[0]
    tested = {row.value(column) or "" for row in cohort.rows if row.split == "test"} - {""}
    trained = {row.value(column) or "" for row in cohort.rows if row.split != "test"} - {""}
    if len(tested | trained) == 1:
        yield f"All slides are of one {column} ({next(iter(tested | trained))}): others may give other results."
    elif tested and tested <= trained:
        yield f"Every {column} of the test slides has training slides too: a new one may give other results."


# ---------------------------------------------------------------------------------------------------- heatmaps


def _heatmaps(
    files: StudyFiles,
    decisions: Mapping[str, Decision],
    anchors: Mapping[str, str],
    settings: StudySettings,
    names: Names,
) -> tuple[tuple[AnswerHeatmap, ...], str]:
    """Return three slides of the first model's heatmaps, and a sentence where one of them does not exist."""
    if not files.heatmaps:
        return (), ""
    folder = files.heatmaps[0]
    chosen = choose_examples(folder.predictions, decisions, names)
    cards = tuple(_card(role, slide, folder, files, anchors, settings, names) for role, slide in chosen.items())
    tested = [slide for slide in folder.files if slide in decisions and decisions[slide].part == "test"]
    note = ""
    if "error" not in chosen and tested:
        note = f"None of the {len(tested)} test slides with a heatmap is misclassified."
    return cards, note


def choose_examples(
    predictions: Mapping[str, SlidePrediction], decisions: Mapping[str, Decision], names: Names
) -> dict[Role, str]:
    """Return the slides to show first: the surest hit, the case nearest to the threshold, the surest error.

    They are test slides where there are any. A slide is shown once; the error is chosen before the borderline case.
    """
    known = [slide for slide in predictions if slide in decisions]
    known = [slide for slide in known if decisions[slide].part == "test"] or known
    known.sort(key=names.slide)
    hits = [slide for slide in known if decisions[slide].is_positive and decisions[slide].is_correct is not False]
    errors = [slide for slide in known if decisions[slide].is_correct is False]
    chosen: dict[Role, str] = {}
    if hits:
        chosen["hit"] = max(hits, key=lambda slide: decisions[slide].probability)
    if errors:
        chosen["error"] = max(errors, key=lambda slide: abs(certainty(predictions[slide])))
    left = [slide for slide in known if slide not in chosen.values()]
    if left:
        chosen["borderline"] = min(left, key=lambda slide: abs(certainty(predictions[slide])))
    return {role: chosen[role] for role in ROLES if role in chosen}


def certainty(prediction: SlidePrediction) -> float:
    """Return the distance of a prediction from the threshold, or between its two most probable classes."""
    if len(prediction.probability) == 1:
        return prediction.probability[0] - (0.5 if prediction.threshold is None else prediction.threshold)
    *_, second, first = sorted(prediction.probability)
    return first - second


def _card(
    role: Role,
    slide: str,
    folder: HeatmapFolder,
    files: StudyFiles,
    anchors: Mapping[str, str],
    settings: StudySettings,
    names: Names,
) -> AnswerHeatmap:
    row, heatmap = files.row(slide), read_heatmap(folder.files[slide])
    predicted, shown = heatmap.prediction, names.slide(slide)
    opened, _ = open_mapped(row, heatmap, settings)
    try:
        marks = {"annotations": annotations_of(row), "lesions": folder.lesions(heatmap)}
        pictures = draw_card(heatmap, opened, shown, marks) if opened is not None else None
    except SelfVitMilError:
        pictures = None
    finally:
        if opened is not None:
            opened.close()
    whole, zoom = pictures or _stored(folder, slide, shown, names)
    label = row.label if row and row.label else "not known"
    limit = "" if predicted.threshold is None else f" (threshold {predicted.threshold:.2f})"
    return AnswerHeatmap(
        title=ROLES[role],
        slide=shown,
        anchor=anchors.get(slide, ""),
        words=f"Predicted {predicted.decision}, ground truth {label}; "
        f"probability of {predicted.shown} {predicted.shown_probability:.2f}{limit}.",
        whole=whole,
        zoom=zoom,
    )


def draw_card(heatmap: Heatmap, opened: Slide, shown: str, marks: Mapping[str, Any]) -> tuple[Picture, Picture | None]:
    """Return the whole slide with its heatmap, and the tissue of the highest-scoring region without it."""
    mpp = max(opened.mpp, max(opened.size_l0) * opened.mpp / CARD_PX)
    box = zoomed_box(heatmap)
    drawn = overlay.draw_panel(heatmap, opened.thumbnail(mpp), mpp, frame_l0=box, **marks)
    whole = picture(drawn, f"heatmap of {shown}", edge_px=CARD_PX)
    if box is None:
        return whole, None
    edge = box[2] - box[0]
    part_mpp = max(edge * opened.mpp / CARD_PX, opened.mpp, ZOOM_MPP)
    edge_px = max(1, round(edge * opened.mpp / part_mpp))
    pixels = opened.read_region(box[0], box[1], (edge_px, edge_px), part_mpp)
    part = overlay.draw_panel(heatmap, pixels, part_mpp, box_l0=box, painted=False, **marks)
    return whole, picture(part, f"tissue where the score of {shown} is highest", edge_px=CARD_PX)


def zoomed_box(heatmap: Heatmap) -> overlay.BoxL0 | None:
    """Return the square around the highest-scoring tile, at most half as wide as the slide; None without a score."""
    if not len(heatmap) or heatmap.score.max() <= 0:
        return None
    frame = heatmap.frame
    edge = math.floor(min(ZOOM_TILES * frame.extent_l0, min(frame.size_l0) / 2))
    centre = heatmap.centres_l0[highest_scoring_tile(heatmap)]
    x0, y0 = (
        round(float(min(max(at - edge / 2, 0), size - edge))) for at, size in zip(centre, frame.size_l0, strict=True)
    )
    return x0, y0, x0 + edge, y0 + edge


def _stored(folder: HeatmapFolder, slide: str, shown: str, names: Names) -> tuple[Shown, Picture | None]:
    """Return the pictures that `localize` drew; with pseudonyms they cannot be used, since they show the name."""
    whole = folder.stored_overlay(slide)
    if whole is None or names.hidden:
        return "No picture: the slide's file cannot be used.", None
    zoom = Path(whole.parent, whole.name.replace(f"{slide}_", f"{slide}_zoom_", 1))
    first = picture_file(whole, f"heatmap of {shown}", edge_px=CARD_PX)
    second = picture_file(zoom, f"region of {shown} where the score is highest", edge_px=CARD_PX)
    return first or "No picture: the stored one cannot be read.", second
