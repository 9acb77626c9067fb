"""What the page shows of results: comparisons, evaluations, and heatmaps beside annotations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selfvitmil.evaluate.comparison import FORMAT_VERSION, ComparisonRow
from selfvitmil.evaluate.comparison_table import METRIC_NAMES, read_table, recipe_notes, table_cells, table_notes
from selfvitmil.evaluate.method_metrics import Estimator
from selfvitmil.evaluate.predictions import Prediction, read_predictions
from selfvitmil.formatting import p_value, percent, value_and_limits
from selfvitmil.localize.heatmap import MAIN_METHOD
from selfvitmil.localize.lesion_results import lesion_cells, lesion_notes
from selfvitmil.pseudonyms import Names
from selfvitmil.report.analyses import DecisionsData, TuningData, decisions_data, tuning_data
from selfvitmil.report.render import (
    Shown,
    Table,
    chart,
    interval_in,
    is_finite,
)
from selfvitmil.report.slide_sections import Record
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
