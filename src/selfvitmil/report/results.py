"""What the page shows of results: comparisons, evaluations, heatmaps beside annotations, and single slides.

Of a slide these are its prediction, heatmaps of all models, lesions, highest- and lowest-ranked tiles. Tiles are read
from the slide's file; where that is not at hand a sentence says so. The picture that `localize` drew carries the
slide's name, so with pseudonyms the overlay is drawn anew from heatmap and slide.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from selfvitmil.annotations import Annotation, read_annotations
from selfvitmil.cohort import SlideRow
from selfvitmil.errors import SelfVitMilError
from selfvitmil.evaluate.comparison import FORMAT_VERSION, ComparisonRow
from selfvitmil.evaluate.comparison_table import METRIC_NAMES, read_table, recipe_notes, table_cells, table_notes
from selfvitmil.evaluate.method_metrics import Estimator
from selfvitmil.evaluate.predictions import Prediction, read_predictions
from selfvitmil.formatting import p_value, percent, value_and_limits
from selfvitmil.localize import overlay
from selfvitmil.localize.detection import RANKS_ONLY, Lesion, find_lesions, highest_scoring_tile, rank_tiles
from selfvitmil.localize.heatmap import MAIN_METHOD, Heatmap, SlidePrediction, read_heatmap
from selfvitmil.localize.lesion_results import lesion_cells, lesion_notes
from selfvitmil.pseudonyms import Names
from selfvitmil.report.analyses import DecisionsData, TuningData, decisions_data, tuning_data
from selfvitmil.report.render import (
    Picture,
    Shown,
    Table,
    chart,
    interval_in,
    is_finite,
    layer_picture,
    picture,
    picture_file,
)
from selfvitmil.settings import LocalizeSettings, StudySettings
from selfvitmil.slides import Slide, SlideRef
from selfvitmil.store.files import section

if TYPE_CHECKING:
    from selfvitmil.report.data import Reader


METRICS = {
    "auc": "AUC",
    "pr_auc": "average precision",
    "accuracy": "accuracy",
    "balanced_accuracy": "balanced accuracy",
    "sensitivity": "sensitivity",
    "specificity": "specificity",
    "ppv": "positive predictive value",
    "npv": "negative predictive value",
    "f1": "F1",
    "macro_f1": "macro F1",
    "brier": "Brier score",
    "ece": "calibration error (ECE)",
    **METRIC_NAMES,
}
"""Metrics of `metrics.json` that are shown, and their names."""
FIGURES = (
    "auc",
    "kaplan_meier",
    "scatter",
    "bland_altman",
    "roc",
    "pr",
    "calibration",
    "confusion",
    "froc",
    "training",
)
"""Order of figures; others follow."""


@dataclass(frozen=True)
class ResultsFolder:
    """Results of one method, or a comparison of several."""

    name: str
    metrics: Mapping[str, Any]
    predictions: Sequence[Prediction]
    class_names: tuple[str, ...]
    figures: Mapping[str, Path]
    """SVG files by their names without suffix."""
    has_table: bool
    rows: Sequence[ComparisonRow]
    """Rows of `table.csv`."""
    lesions: Mapping[str, Any]
    """Localization scores, `lesions.json`."""
    lesion_slides: Mapping[str, Record]
    """Rows of `lesion_slides.csv` by slide."""

    @property
    def methods(self) -> Sequence[Mapping[str, Any]]:
        return self.metrics.get("methods") or []

    @property
    def is_comparison(self) -> bool:
        return self.has_table or len(self.methods) > 1

    @property
    def is_optimistic(self) -> bool:
        return any(method.get("protocol") == "optimistic" for method in self.methods)

    @property
    def is_stale(self) -> bool:
        """Whether an earlier version ranked the scores of several splits, which have different models, together."""
        several = any(len(section(method, "slides")) > 1 for method in self.methods)
        return several and self.metrics.get("format_version") != FORMAT_VERSION

    @property
    def summary(self) -> str:
        number = len(self.methods)
        if not number:
            return "no metrics"
        doubts = ", OPTIMISTIC protocol" if self.is_optimistic else ""
        doubts += ", transductive" if any(info.get("transductive") for info in self.methods) else ""
        return (str(self.methods[0].get("method", "")) if number == 1 else f"{number} methods compared") + doubts

    def charts(self, names: Names, *, only: Sequence[str] = (), but: Sequence[str] = ()) -> tuple[Shown, ...]:
        """Return the figures; `only` those of these names, or all `but` them, in all splits."""
        found = [key for key in self.figures if not only or any(_is_named(key, word) for word in only)]
        found = [key for key in found if not any(_is_named(key, word) for word in but)]
        texts = [self.figures[key].read_text(encoding="utf-8", errors="replace") for key in sorted(found, key=_order)]
        return tuple(chart(text, names) for text in texts)


def _is_named(figure: str, word: str) -> bool:
    return figure == word or figure.endswith(f"_{word}")


def _order(figure: str) -> tuple[int, str]:
    places = [place for place, word in enumerate(FIGURES) if _is_named(figure, word)]
    return (places[0] if places else len(FIGURES), figure)


def read_results(reader: Reader, folder: Path) -> ResultsFolder:
    """Read the files of a folder of results."""
    predictions, class_names = reader.attempt(folder / "predictions.csv", read_predictions, ([], ()))
    metrics, table = reader.json(folder / "metrics.json"), folder / "table.csv"
    # The table joins the warnings of a method; metrics.json has them one by one.
    methods: list[dict[str, Any]] = metrics.get("methods") or []
    warnings: dict[Any, tuple[str, ...]] = {info.get("method"): tuple(info.get("warnings") or ()) for info in methods}
    rows = reader.attempt(table, lambda path: read_table(path.read_text(encoding="utf-8")), [])
    return ResultsFolder(
        name=folder.name,
        metrics=metrics,
        predictions=predictions,
        class_names=class_names,
        figures={path.stem: path for path in sorted(folder.glob("*.svg"))},
        has_table=table.exists(),
        rows=[replace(row, warnings=warnings.get(row.display_name, row.warnings)) for row in rows],
        lesions=reader.json(folder / "lesions.json"),
        lesion_slides=reader.by_slide(folder / "lesion_slides.csv"),
    )


# ---------------------------------------------------------------------------------------------------- comparison


@dataclass(frozen=True)
class ResultsData:
    """What all results have."""

    name: str
    is_optimistic: bool
    is_stale: bool
    charts: tuple[Shown, ...]


@dataclass(frozen=True)
class ComparisonData(ResultsData):
    """A table with a row per method."""

    table: Table | None
    """None where it cannot be read."""
    notes: tuple[str, ...]
    numbered_notes: tuple[str, ...]
    recipes: tuple[str, ...]


def _common(results: ResultsFolder, names: Names) -> dict[str, Any]:
    elsewhere = ("calibration", "training", "decision_curve") if not results.is_comparison else ()
    charts = results.charts(names, but=(*elsewhere, *(("froc",) if results.lesions else ())))
    info = {"is_optimistic": results.is_optimistic, "is_stale": results.is_stale}
    return {"name": results.name, **info, "charts": charts}


def _table(cells: Sequence[Sequence[str]]) -> Table:
    return Table.of(cells[0], cells[1:])


def comparison_data(results: ResultsFolder, names: Names) -> ComparisonData:
    """Return the table of a comparison with its notes and figures."""
    rows = list(results.rows)
    notes = [*(results.metrics.get("advice") or ()), *(table_notes(rows) if rows else ())]
    return ComparisonData(
        **_common(results, names),
        table=_table(table_cells(rows, intervals=True)) if rows else None,
        notes=tuple(note for note in notes if not note.startswith("[")),
        numbered_notes=tuple(note for note in notes if note.startswith("[")),
        recipes=tuple(recipe_notes(rows)),
    )


# ---------------------------------------------------------------------------------------------------- evaluation


@dataclass(frozen=True)
class LevelData:
    """Metrics by slide or by patient."""

    level: str
    same_as: str
    """Why they equal those of another level; empty otherwise."""
    table: Table
    """Metrics of the ensemble with confidence intervals, and their mean and deviation over seeds."""
    notes: tuple[str, ...]
    undefined: tuple[str, ...]
    """Metrics that are not defined, and why."""


@dataclass(frozen=True)
class CalibrationData:
    """Whether probabilities agree with frequencies."""

    words: str
    table: Table
    charts: tuple[Shown, ...]


@dataclass(frozen=True)
class EvaluationData(ResultsData):
    """The metrics of one method."""

    facts: tuple[tuple[str, str], ...]
    levels: tuple[LevelData, ...]
    warnings: tuple[str, ...]
    calibration: CalibrationData | None
    training: tuple[Shown, ...]
    """Curves of the training."""
    decisions: DecisionsData | None
    tuning: TuningData | None


def evaluation_data(results: ResultsFolder, names: Names) -> EvaluationData:
    """Return metrics with confidence intervals, and curves, of a method that was evaluated by itself."""
    info = results.methods[0]
    kinds = ("calibration", "training", "decision_curve")
    calibration, training, curves = (results.charts(names, only=(word,)) for word in kinds)
    return EvaluationData(
        **_common(results, names),
        facts=tuple(_evaluation_facts(info).items()),
        levels=tuple(_levels(info)),
        warnings=tuple(info.get("warnings") or ()),
        calibration=_calibration(info, calibration),
        training=training,
        decisions=decisions_data(info.get("decisions"), curves),
        tuning=tuning_data(info),
    )


def _calibration(info: Mapping[str, Any], charts: tuple[Shown, ...]) -> CalibrationData | None:
    rows: list[tuple[str, ...]] = []
    words = ""
    for level in ("slide", "patient"):
        own = section(info, level, "ensemble")
        words = words or str(own.get("probabilities", ""))
        found = {key: _interval(own.get(key))[0] for key in ("brier", "ece")}
        if any(found.values()):
            rows.append((f"by {level}", *found.values()))
    if not rows and not charts:
        return None
    return CalibrationData(words, Table.of(("", METRICS["brier"], METRICS["ece"]), rows), charts)


def _evaluation_facts(info: Mapping[str, Any]) -> dict[str, str]:
    recipe, evidence = section(info, "recipe"), section(info, "evidence")
    kinds = dict.fromkeys(str(own.get("reason", "")) for own in evidence.values())
    origin = f" ({info['positive_from']})" if info.get("positive_from") else ""
    ensemble = section(info, "slide", "ensemble")
    threshold = f"{ensemble['threshold']:.3f}, " if is_finite(ensemble.get("threshold")) else ""
    outcome = section(info, "outcome")
    return {
        "method": str(info.get("method", "")),
        "outcome": f"{outcome['kind']} ({', '.join(outcome['columns'])})" if outcome else "",
        "recipe": "; looks for ".join([str(recipe.get("kind", "")), *kinds]),
        "positive class": f"{info['positive']}{origin}" if info.get("positive") else "",
        "encoder": f"{info.get('encoder', '')}{' (transductive)' if info.get('transductive') else ''}",
        "tiles": str(info.get("tiling", "")),
        "protocol": str(info.get("protocol", "")),
        "seeds": ", ".join(map(str, info.get("seeds") or [])),
        "test slides": _test_slides(info),
        "threshold": f"{threshold}{ensemble.get('threshold_from', '')}".strip(", "),
    }


def _test_slides(info: Mapping[str, Any]) -> str:
    """Return how many slides the metrics are of; those of splits whose test slides overlap are not summed."""
    if info.get("outcome"):
        parts = list(section(info, "slide", "splits").values()) or [section(info, "slide")]
        return "; ".join(str(section(one, "ensemble").get("described", "")) for one in parts)
    counts = [section(own, "test", "slides") for own in section(info, "slides").values()]
    if len(counts) < 2:
        return "".join(map(counted, counts))
    slide = section(info, "slide")
    pooled = section(slide, "ensemble").get("counts")
    if pooled and slide.get("estimator") != Estimator.WITHIN_OVERLAPPING_SPLITS:
        return f"{counted(pooled)}, each in one of {len(counts)} splits"
    listed = "; ".join(f"{text} in {number}" for text, number in Counter(map(counted, counts)).items())
    return f"{listed} of {len(counts)} splits, which overlap"


def counted(counts: Mapping[str, int]) -> str:
    """Return for instance `80 normal, 49 tumor`."""
    return ", ".join(f"{number} {name}" for name, number in counts.items())


def _levels(info: Mapping[str, Any]) -> Iterator[LevelData]:
    for level in ("slide", "patient"):
        own = section(info, level)
        same_as = own.get("words", "the same as by slide") if "same_as" in own else ""
        ensemble, seeds = section(own, "ensemble"), section(own, "over_seeds")
        levels: list[float] = [one["level"] for one in map(interval_in, ensemble.values()) if one.get("level")]
        names = metric_names(ensemble)
        found = [_metric_row(name, key, ensemble.get(key), seeds.get(key)) for key, name in names.items()]
        metrics = [row for row in found if row[1] or row[3]]
        gain = own.get("ensemble_gain")
        if gain:
            name = names.get(gain["metric"], gain["metric"])
            metrics.append((f"{name}: ensemble minus mean of single seeds", *_interval(gain), ""))
        header = ("", "ensemble", f"{percent(float(levels[0])) if levels else ''} interval", "seeds: mean ± sd")
        notes = [f"{_capitalized(own['words'])}."] if own.get("words") else []
        notes += [own[key] for key in ("estimator_words", "conditional_on") if own.get(key)]
        undefined = (f"{METRICS.get(key, key)}: {why}" for key, why in section(ensemble, "reasons").items())
        if same_as or metrics:
            yield LevelData(level, same_as, Table.of(header, metrics), tuple(notes), tuple(undefined))


def metric_names(found: Mapping[str, Any]) -> dict[str, str]:
    """Return the metrics that are shown of these, and their names; of several labels each has an AUC."""
    return METRICS | {key: f"AUC of {key[4:]}" for key in found if key.startswith("auc ")}


def _metric_row(name: str, key: str, own: Any, over_seeds: Any) -> tuple[str, str, str, str]:
    if key.endswith("_p"):  # the mean of p-values says nothing
        return name, p_value(own["value"]) if own else "", "", ""
    return name, *_interval(own), _spread(over_seeds)


def _interval(info: Any) -> tuple[str, str]:
    """Return value and limits; empty where there are none."""
    known = interval_in(info)
    return value_and_limits(known) if known else ("", "")


def _spread(info: Any) -> str:
    if not info or info.get("mean") is None:
        return ""
    return f"{info['mean']:.3f}" + (f" ± {info['sd']:.3f}" if info.get("sd") is not None else "")


def _capitalized(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}"


# ---------------------------------------------------------------------------------------------------- localization


@dataclass(frozen=True)
class LesionTable:
    """Heatmaps of several models scored on the same slides."""

    name: str
    table: Table
    notes: tuple[str, ...]
    charts: tuple[Shown, ...]


@dataclass(frozen=True)
class LesionModel:
    """How well the heatmaps of one model agree with annotations."""

    name: str
    facts: tuple[tuple[str, str], ...]
    sensitivity: Table | None
    """At false positives per slide."""
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class LocalizationData:
    tables: tuple[LesionTable, ...]
    models: tuple[LesionModel, ...]
    scores: Table
    """A row for every score, a column for every single model."""
    charts: tuple[Shown, ...]
    """FROC curves of single models."""


def localization_data(results: Iterable[ResultsFolder], names: Names) -> LocalizationData:
    """Return how well heatmaps agree with annotations: comparisons of models, then single models."""
    scored = sorted((one for one in results if one.lesions), key=lambda one: MAIN_METHOD not in one.name)
    compared = [one for one in scored if "methods" in one.lesions]
    single = [one for one in scored if one not in compared]
    tables = [
        LesionTable(
            one.name,
            _table(lesion_cells(one.lesions, intervals=True)),
            tuple(lesion_notes(one.lesions)),
            one.charts(names, only=("froc",)),
        )
        for one in compared
    ]
    found = [section(one.lesions, "scores") for one in single]
    words = {key: own.get("words", key) for scores in found for key, own in scores.items() if own}
    rows = [(_capitalized(text), *(_with_limits(scores.get(key)) for scores in found)) for key, text in words.items()]
    return LocalizationData(
        tuple(tables),
        tuple(_lesion_model(one.name, one.lesions, names) for one in single),
        Table.of(("", *(one.name for one in single)), rows),
        tuple(drawn for one in single for drawn in one.charts(names, only=("froc",))),
    )


def _with_limits(info: Any) -> str:
    value, limits = _interval(info)
    return f"{value} [{limits}]" if limits else value


def _lesion_model(name: str, info: Mapping[str, Any], names: Names) -> LesionModel:
    slides, threshold, froc = (section(info, key) for key in ("slides", "threshold", "froc"))
    missing: list[dict[str, str]] = slides.get("left_out") or []
    left_out = sorted(f"{names.slide(one['slide'])}: {one['why']}" for one in missing)
    texts: list[str] = info.get("warnings") or []
    warnings = [f"Warning: {text}" for text in texts if "takes no part" not in text]
    value, at = threshold.get("value", ""), section(froc, "sensitivity_at")
    facts = {
        "heatmap": f"{info.get('mapped', '')}, scale {info.get('scale', '')}{', gated' if info.get('gated') else ''}",
        "slides": f"{slides.get('positive', '?')} positive, {slides.get('negative', '?')} negative",
        "lesions": str(froc.get("lesions", "")),
        "threshold of the heatmap": f"{value:.4g}, {threshold.get('from', '')}" if is_finite(value) else "",
        "FROC in": str(info.get("froc_frame", "")),
    }
    return LesionModel(
        name=name,
        facts=tuple(facts.items()),
        sensitivity=Table.of((f"{mark} FP per slide" for mark in at), [[f"{own:.3f}" for own in at.values()]])
        if at
        else None,
        warnings=(*(f"Left out: {text}" for text in left_out), *warnings),
    )


# ---------------------------------------------------------------------------------------------------- single slides

NUM_TILES, NUM_LOWEST = 8, 4
"""Highest- and lowest-ranked tiles shown of a slide."""
TILE_PX = 112
"""Largest edge of a tile on the page, about as large as it is shown."""
OVERLAY_PX = 640
"""Longer edge of the first model's overlay."""
OTHER_PX = 220
"""Longer edge of the heatmaps of other models."""
MOST_REGIONS = 12
REGION_COLUMNS = {"lesion": "region", "score": "score", "area_mm2": "area, mm²", "size": "size"}
"""Columns of `lesions.csv` that are shown, and their titles."""

Record = dict[str, str]


@dataclass(frozen=True)
class HeatmapFolder:
    """The heatmaps of one model."""

    model: str
    files: Mapping[str, Path]
    """By slide, those that can be read."""
    predictions: Mapping[str, SlidePrediction]
    regions: Mapping[str, Sequence[Record]]
    """Rows of `lesions.csv` by slide."""
    settings: Mapping[str, Any]

    def only(self, slide: str) -> HeatmapFolder:
        """Return what is known of one slide."""
        regions = {slide: self.regions.get(slide, ())} if self.regions else {}
        own = {slide: self.predictions[slide]}
        return replace(self, files={slide: self.files[slide]}, predictions=own, regions=regions)

    def stored_overlay(self, slide: str) -> Path | None:
        """Return the picture that was drawn with the heatmap: in the paper's colours where there are several."""
        folder = self.files[slide].parent
        named = [folder / f"{slide}_{colors}.png" for colors in ("red", "inferno", "viridis")]
        return next((path for path in named if path.exists()), None)

    def lesions(self, heatmap: Heatmap) -> Sequence[Lesion]:
        """Return the lesions of a heatmap, found with its own settings; none where the slide is predicted negative."""
        if heatmap.only_ranks:
            return ()
        try:
            how = LocalizeSettings.model_validate(section(self.settings, "localize"))
        except ValueError:
            how = LocalizeSettings()
        return find_lesions(heatmap, how.lesion_threshold, how.min_lesion_mm2)


@dataclass(frozen=True)
class Decision:
    """What the study's main model predicts for a slide."""

    probability: float
    """Of the positive class; of the predicted one where there are more than two."""
    shown: str
    """Name of the class of that probability."""
    predicted: str
    part: str
    """`train`, `val` or `test`."""
    label: str | None
    words: str = ""
    """The prediction in words, with another outcome than classes."""

    @property
    def is_correct(self) -> bool | None:
        """None where the ground truth is not known."""
        return None if self.label is None else self.label == self.predicted

    @property
    def is_wrong_test(self) -> bool:
        return self.part == "test" and self.is_correct is False

    @property
    def is_positive(self) -> bool:
        return self.predicted == self.shown


@dataclass(frozen=True)
class Agreement:
    """What a heatmap covers of the annotated tumour, and what it marks outside."""

    threshold: float
    covered_mm2: float
    tumour_mm2: float
    false_mm2: float


@dataclass(frozen=True)
class HeatmapPicture:
    model: str
    picture: Shown
    agreement: Agreement | None


@dataclass(frozen=True)
class TilePicture:
    score: float
    is_tumour: bool
    """Whether it touches annotated tumour."""
    picture: Shown


@dataclass(frozen=True)
class SlideData:
    """The section of one slide."""

    name: str
    anchor: str
    decision: Decision | None
    facts: tuple[tuple[str, str], ...]
    """Name and value; empty values are not shown."""
    heatmap: HeatmapPicture
    backdrop: Picture | None
    """Thumbnail of the slide, which lies under `other_heatmaps`."""
    other_heatmaps: tuple[HeatmapPicture, ...]
    negative_note: str
    """In place of regions, where the slide is predicted negative."""
    regions: Table
    """The first regions above the threshold of a lesion."""
    num_regions: int | None
    """None where the model's regions are not known."""
    warnings: tuple[str, ...]
    highest: tuple[TilePicture, ...]
    lowest: tuple[TilePicture, ...]
    tiles_missing: str
    """Why no tiles are shown."""
    why: tuple[str, ...]
    """Of a misclassified slide: what is known of the reasons."""

    @property
    def is_wrong(self) -> bool:
        """Whether it is a test slide that was misclassified."""
        return self.decision is not None and self.decision.is_wrong_test


def order_of(decision: Decision | None, shown_name: str) -> tuple[bool, float, str]:
    """Sort key of slides: test slides first, the highest probability first."""
    return decision is None or decision.part != "test", -(decision.probability if decision else -1.0), shown_name


def choose_slides(mapped: Sequence[str], decisions: Mapping[str, Decision], names: Names, most: int) -> list[str]:
    """Return the slides with a section, in the order of the page; positive and misclassified ones before others."""

    def order(slide: str) -> tuple[bool, float, str]:
        return order_of(decisions.get(slide), names.slide(slide))

    def is_plain(slide: str) -> bool:
        decision = decisions.get(slide)
        return decision is None or not (decision.is_positive or decision.is_correct is False)

    return sorted(sorted(mapped, key=lambda slide: (is_plain(slide), *order(slide)))[:most], key=order)


class SectionJob(NamedTuple):
    """What the section of a slide is read from."""

    slide: str
    anchor: str
    folders: tuple[HeatmapFolder, ...]
    """With its heatmaps."""
    row: SlideRow | None
    decision: Decision | None
    agreements: Mapping[str, Record]
    """Its lesion scores, by model."""
    settings: StudySettings
    names: Names


def slide_data(job: SectionJob) -> SlideData:
    """Return the section of a slide."""
    slide, anchor, folders, row, decision, agreements, settings, names = job
    first, heatmap = folders[0], read_heatmap(folders[0].files[slide])
    opened, problem = open_mapped(row, heatmap, settings)
    try:
        main = HeatmapPicture(
            first.model,
            _overlay(first, heatmap, row, opened, names),
            _agreement(agreements.get(first.model, {})),
        )
        backdrop, others = _other_heatmaps(folders[1:], slide, row, opened, agreements, names)
        high, low = ends(heatmap, NUM_TILES)
        highest, lowest = (_tiles(heatmap, rows, opened) if opened else () for rows in (high, low[:NUM_LOWEST]))
    finally:
        if opened is not None:
            opened.close()
    predicted, regions = heatmap.prediction, first.regions.get(slide, ())
    columns = [key for key in REGION_COLUMNS if any(region.get(key) for region in regions)]
    lines = [[_rounded(region.get(key, "")) for key in columns] for region in regions[:MOST_REGIONS]]
    negative = f"Predicted {predicted.decision}, not {predicted.shown}: {RANKS_ONLY}." if heatmap.only_ranks else ""
    return SlideData(
        name=names.slide(slide),
        anchor=anchor,
        decision=decision,
        facts=tuple(_slide_facts(heatmap, row, names).items()),
        heatmap=main,
        backdrop=backdrop,
        other_heatmaps=others,
        negative_note=negative,
        regions=Table.of((REGION_COLUMNS[key] for key in columns), lines),
        num_regions=len(regions) if first.regions else None,
        warnings=heatmap.warnings,
        highest=highest,
        lowest=lowest,
        tiles_missing=problem,
        why=error_words(heatmap, decision),
    )


def open_mapped(row: SlideRow | None, heatmap: Heatmap, settings: StudySettings) -> tuple[Slide | None, str]:
    """Open the slide with the microns per pixel of its heatmap; or say why that is not possible."""
    if row is None:
        return None, "the cohort does not name it"
    try:
        opened = SlideRef.of(row, settings.slide).at_mpp(heatmap.frame.slide_mpp).open()
    except SelfVitMilError as error:
        return None, error.reason
    if opened.size_l0 != heatmap.frame.size_l0:
        opened.close()
        return None, "the file has another size than the slide of the heatmap"
    return opened, ""


def _slide_facts(heatmap: Heatmap, row: SlideRow | None, names: Names) -> dict[str, str]:
    predicted, frame = heatmap.prediction, heatmap.frame
    streams = [
        f"{name} {' '.join(f'{value:.3f}' for value in values)}"
        for name, values in (("bag", predicted.bag_probability), ("max", predicted.max_probability))
        if values is not None
    ]
    width_mm, height_mm = (edge * frame.slide_mpp / 1000 for edge in frame.size_l0)
    annotated = ""
    if heatmap.annotated is not None:
        inside = heatmap.annotated > 0
        top_tile = "does" if inside[highest_scoring_tile(heatmap)] else "does not"
        annotated = f"{int(inside.sum()):,} tiles touch annotated tumour; the highest-scoring tile {top_tile}"
    threshold = "" if predicted.threshold is None else f"{predicted.threshold:.3f}, {predicted.threshold_from}"
    truth, own = row.label if row and row.label else "not known", predicted.value_words
    said = {"prediction": own, "decision": predicted.decision} if own else {
        "decision": f"{predicted.decision} (ground truth: {truth})",
        f"probability of {predicted.shown}": f"{predicted.shown_probability:.3f}",
    }  # fmt: skip
    return said | {
        "streams": ", ".join(streams),
        "threshold": threshold,
        "part": f"{predicted.part} slide of split {predicted.split}",
        "patient": names.patient(row.patient) if row else "",
        "heatmap": f"{heatmap.method}, {heatmap.kind}, scale {heatmap.scale}{', gated' * heatmap.gated}",
        "shows": overlay.shown_words(heatmap),
        "tiles": f"{len(heatmap):,} of {frame.size_px} px at {frame.tile_mpp:g} µm/px",
        "slide": f"{width_mm:.1f} x {height_mm:.1f} mm, {frame.slide_mpp:.4g} µm/px",
        "annotated": annotated,
    }


BORDERLINE = 0.1
"""A probability no further than this from the threshold is called borderline."""
LEAST_TUMOUR_TILES = 10
"""Fewer tiles with annotated tumour than this are called few."""


def error_words(heatmap: Heatmap, decision: Decision | None) -> tuple[str, ...]:
    """Return what the heatmap and the annotation tell about a wrong decision; nothing for others."""
    if decision is None or decision.is_correct is not False or not len(heatmap):
        return ()
    found: list[str] = []
    predicted = heatmap.prediction
    if predicted.threshold is not None:
        gap = predicted.shown_probability - predicted.threshold
        side = "above" if gap >= 0 else "below"
        near = "a borderline case" if abs(gap) <= BORDERLINE else "not a borderline case"
        found.append(f"The probability of {predicted.shown} is {abs(gap):.2f} {side} the threshold: {near}.")
    if heatmap.annotated is not None and (heatmap.annotated > 0).any():
        inside = heatmap.annotated > 0
        few = " only" if inside.sum() < LEAST_TUMOUR_TILES else ""
        found.append(f"Annotated tumour touches{few} {int(inside.sum()):,} of {len(heatmap):,} tiles.")
        if inside[highest_scoring_tile(heatmap)]:
            found.append("The highest-scoring tile lies in it: the region was noticed, but not rated highly enough.")
        else:
            found.append("The highest-scoring tile lies outside it: the model looked elsewhere.")
    elif decision.is_positive:
        found.append("The highest-ranked tiles below are what made it positive.")
    return tuple(found)


def _rounded(text: str) -> str:
    with suppress(ValueError):
        value = float(text)
        return text if text.lstrip("-").isdigit() else f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return text


def _agreement(row: Record) -> Agreement | None:
    try:
        return Agreement(*(float(row[key]) for key in ("threshold", "covered_mm2", "tumour_mm2", "false_mm2")))
    except (KeyError, ValueError):
        return None


# ---------------------------------------------------------------------------------------------------- pictures


def _overlay(
    folder: HeatmapFolder, heatmap: Heatmap, row: SlideRow | None, opened: Slide | None, names: Names
) -> Shown:
    """Return the overlay: the stored picture, or a new one where that shows a name or is missing."""
    alt = f"heatmap of {names.slide(heatmap.slide)} by {folder.model}"
    stored = folder.stored_overlay(heatmap.slide)
    shown = picture_file(stored, alt, edge_px=OVERLAY_PX, quality=70) if stored and not names.hidden else None
    if shown is None and opened is not None:
        with suppress(SelfVitMilError):
            mpp = max(opened.mpp, max(opened.size_l0) * opened.mpp / OVERLAY_PX)
            title, lesions = names.slide(heatmap.slide), folder.lesions(heatmap)
            drawn = overlay.draw_overlay(
                heatmap, opened.thumbnail(mpp), mpp, title=title, annotations=annotations_of(row), lesions=lesions
            )
            shown = picture(drawn, alt, edge_px=OVERLAY_PX, quality=70)
    why = "the stored one shows the slide's name" if stored and names.hidden else "none is stored"
    return shown or f"No picture of this heatmap: {why}, and the slide's file cannot be used."


def _other_heatmaps(
    folders: Sequence[HeatmapFolder],
    slide: str,
    row: SlideRow | None,
    opened: Slide | None,
    agreements: Mapping[str, Record],
    names: Names,
) -> tuple[Picture | None, tuple[HeatmapPicture, ...]]:
    """Return a thumbnail, and the heatmaps of other models to lay over it, small and without words: many fit."""
    if not folders or opened is None:
        return None, ()
    mpp = max(opened.mpp, max(opened.size_l0) * opened.mpp / OTHER_PX)
    try:
        backdrop = picture(opened.thumbnail(mpp), f"thumbnail of {names.slide(slide)}", edge_px=OTHER_PX)
    except SelfVitMilError:
        return None, ()
    assert backdrop.width is not None
    assert backdrop.height is not None
    size_px = backdrop.width, backdrop.height
    annotations = annotations_of(row)
    found: list[HeatmapPicture] = []
    for folder in folders:
        heatmap = read_heatmap(folder.files[slide])
        drawn = overlay.draw_layer(heatmap, size_px, mpp, annotations=annotations, lesions=folder.lesions(heatmap))
        shown = layer_picture(drawn, f"heatmap of {names.slide(slide)} by {folder.model}")
        found.append(HeatmapPicture(folder.model, shown, _agreement(agreements.get(folder.model, {}))))
    return backdrop, tuple(found)


def annotations_of(row: SlideRow | None) -> Sequence[Annotation]:
    """Return the annotations of a slide, none where they cannot be read."""
    with suppress(SelfVitMilError):
        if row is not None and row.annotation is not None:
            return read_annotations(row.annotation, repair=True)
    return ()


def ends(heatmap: Heatmap, most: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return rows of the highest scores, highest first, and of the lowest, lowest first; none is in both."""
    order = rank_tiles(heatmap)
    high = min(most, -(-len(order) // 2))
    low = min(most, len(order) - high)
    return order[:high], order[::-1][:low]


def _tiles(heatmap: Heatmap, rows: NDArray[np.int64], opened: Slide) -> tuple[TilePicture, ...]:
    frame = heatmap.frame
    found: list[TilePicture] = []
    for row in rows:
        x, y = (int(corner) for corner in heatmap.coords_l0[row])
        score = float(heatmap.score[row])
        try:
            pixels = opened.read_tile(x, y, frame.size_px, frame.tile_mpp)
            shown: Shown = picture(pixels, f"tile at x {x}, y {y}, score {score:.3f}", edge_px=TILE_PX, quality=68)
        except SelfVitMilError:
            shown = "cannot be read"
        tumour = heatmap.annotated is not None and bool(heatmap.annotated[row] > 0)
        found.append(TilePicture(score, tumour, shown))
    return tuple(found)
