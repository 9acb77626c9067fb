"""The parts of the page about how well methods do: comparisons, evaluations, and maps beside annotations."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from selfvitmil.evaluate.comparison import FORMAT_VERSION
from selfvitmil.evaluate.method_metrics import Estimator
from selfvitmil.formatting import percent, value_and_limits
from selfvitmil.localize.heatmap import MAIN_METHOD
from selfvitmil.pseudonyms import Names
from selfvitmil.report.contents import Contents, Record, Results
from selfvitmil.report.markup import Markup, bullets, facts, join, missing, section, table, tag, unfold
from selfvitmil.report.pictures import figure

HEADLINES = {
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
}
"""Metrics of `metrics.json` that are shown, and their names."""
FIGURES = ("auc", "roc", "pr", "calibration", "confusion", "froc", "training")
"""Figures in this order, others behind them."""


def comparison(study: Contents, names: Names) -> Markup:
    """The tables of all comparisons."""
    found = [results for results in study.results if results.is_comparison]
    parts = [_comparison(results, names) for results in found]
    return section(
        "comparison", "Comparison of methods", *(parts or [missing("No comparison of methods yet", "compare")])
    )


def _comparison(results: Results, names: Names) -> Markup:
    header, rows, notes = parse_markdown_table(results.table) if results.table else _record_table(results.records)
    recipes = [note for note in notes if note.startswith("Recipe of ")]
    return tag(
        "div",
        tag("h3", results.name),
        _optimistic(results),
        _outdated(results),
        _comparison_table(header, rows) if rows else missing("Its table cannot be read"),
        bullets(note for note in notes if not note.startswith("[") and note not in recipes),
        _numbered([note for note in notes if note.startswith("[")]),
        unfold(f"recipes of the {len(recipes)} rows, and how they differ from the published ones", bullets(recipes))
        if recipes
        else Markup(),
        _figures(results, names),
    )


def _comparison_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Markup:
    """Limits stand below their values, or the table would be wider than a page."""
    narrow = [[_below(cell) for cell in row] for row in rows]
    return table([_below(name) for name in header], narrow, kind="comparison")


def _below(cell: str) -> str:
    found = re.fullmatch(r"(.+?) (\[.+\])", cell)
    return join((found.group(1), tag("span", found.group(2), class_="limits"))) if found else cell


def _numbered(notes: Sequence[str]) -> Markup:
    return unfold(f"{len(notes)} numbered notes to this table", bullets(notes)) if notes else Markup()


def parse_markdown_table(text: str) -> tuple[list[str], list[list[str]], list[str]]:
    """Header, rows and the notes below of a `table.md`."""
    lines = text.splitlines()
    cells = [
        [re.sub(r"\\([\\|])", r"\1", cell).strip() for cell in re.findall(r"((?:\\.|[^|\\])*)\|", line[1:])]
        for line in lines
        if line.startswith("|")
    ]
    notes = [line.removeprefix("- ") for line in lines if line.startswith("- ")]
    if len(cells) < 3:
        return [], [], notes
    header, _, *rows = cells
    return header, [row for row in rows if len(row) == len(header)], notes


def _record_table(records: Sequence[Record]) -> tuple[list[str], list[list[str]], list[str]]:
    wanted = ("display_name", "auc", "macro_auc", "accuracy", "sensitivity", "specificity", "training_seconds")
    header = [key for key in wanted if records and key in records[0]]
    return [key.replace("_", " ") for key in header], [[row[key] for key in header] for row in records], []


def evaluation(study: Contents, names: Names) -> Markup:
    """Headline figures with intervals, and curves, of every method that was evaluated by itself."""
    found = [results for results in study.results if not results.is_comparison and results.methods]
    found.sort(key=_main_first)
    parts = [_evaluation(results, names) for results in found]
    where = "No method was evaluated by itself yet" if study.results else "No results yet"
    return section("evaluation", "Evaluation", *(parts or [missing(where, "evaluate")]))


def _recipe_words(told: Mapping[str, Any]) -> str:
    """Published or ours, and which kind of evidence each split chose."""
    recipe, evidence = told.get("recipe") or {}, told.get("evidence") or {}
    kinds = dict.fromkeys(str(own.get("reason", "")) for own in evidence.values())
    return "; looks for ".join([str(recipe.get("kind", "")), *kinds])


def _positive_words(told: Mapping[str, Any]) -> str:
    if not told.get("positive"):
        return ""
    return f"{told['positive']} ({told['positive_from']})" if told.get("positive_from") else str(told["positive"])


def _main_first(results: Results) -> bool:
    return MAIN_METHOD not in results.name


def _evaluation(results: Results, names: Names) -> Markup:
    told = results.methods[0]
    return tag(
        "div",
        tag("h3", results.name),
        _optimistic(results),
        _outdated(results),
        facts(
            [
                ("method", str(told.get("method", ""))),
                ("recipe", _recipe_words(told)),
                ("positive class", _positive_words(told)),
                ("encoder", f"{told.get('encoder', '')}{' (transductive)' if told.get('transductive') else ''}"),
                ("tiles", str(told.get("tiling", ""))),
                ("protocol", str(told.get("protocol", ""))),
                ("seeds", ", ".join(map(str, told.get("seeds") or []))),
                ("test slides", _test_words(told)),
                ("threshold", _threshold_words(told)),
            ]
        ),
        *(_headlines(told, level) for level in ("slide", "patient")),
        bullets((f"Warning: {text}" for text in told.get("warnings") or []), "warnings"),
        _figures(results, names),
    )


def _test_words(told: Mapping[str, Any]) -> str:
    """How many slides the metrics are of; those of splits whose test slides overlap are not of any sum."""
    splits = told.get("slides") or {}
    counts = [((own.get("test") or {}).get("slides")) or {} for own in splits.values()]
    if len(counts) < 2:
        return "".join(map(counted, counts))
    slide = told.get("slide") or {}
    pooled = (slide.get("ensemble") or {}).get("counts")
    if pooled and slide.get("estimator") != Estimator.WITHIN_OVERLAPPING_SPLITS:
        return f"{counted(pooled)}, each in one of {len(counts)} splits"
    listed = "; ".join(f"{text} in {number}" for text, number in Counter(map(counted, counts)).items())
    return f"{listed} of {len(counts)} splits, which overlap"


def _threshold_words(told: Mapping[str, Any]) -> str:
    whole = (told.get("slide") or {}).get("ensemble") or {}
    value = whole.get("threshold")
    number = f"{value:.3f}, " if isinstance(value, int | float) else ""
    return f"{number}{whole.get('threshold_from', '')}".strip(", ")


def _headlines(told: Mapping[str, Any], level: str) -> Markup:
    """The figures by slide or by patient."""
    own = told.get(level) or {}
    if "same_as" in own:
        return tag("p", _sentence(f"by {level}: {own.get('words', 'the same as by slide')}"), class_="note")
    whole, spread = own.get("ensemble") or {}, own.get("over_seeds") or {}
    rows: list[tuple[str, str, str, str]] = []
    for key, name in HEADLINES.items():
        value, limits = _interval_words(whole.get(key))
        seeds = _spread_words(spread.get(key))
        if value or seeds:
            rows.append((name, value, limits, seeds))
    if not rows:
        return Markup()
    reasons = whole.get("reasons") or {}
    level_words = _level_of(whole)
    return join(
        (
            tag("h4", f"By {level}"),
            table(("", "ensemble", f"{level_words} interval", "seeds: mean ± sd"), rows, kind="headlines"),
            tag("p", _sentence(own["words"]), class_="note") if own.get("words") else "",
            *(tag("p", own[key], class_="note") for key in ("estimator_words", "conditional_on") if own.get(key)),
            bullets(f"{HEADLINES.get(key, key)}: {why}" for key, why in reasons.items()),
        )
    )


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _level_of(whole: Mapping[str, Any]) -> str:
    levels = [float(told["level"]) for told in whole.values() if isinstance(told, Mapping) and told.get("level")]
    return percent(levels[0]) if levels else ""


def _interval_words(told: Any) -> tuple[str, str]:
    if not isinstance(told, Mapping) or not isinstance(told.get("value"), int | float):
        return "", ""
    return value_and_limits(told)


def _spread_words(told: Any) -> str:
    if not isinstance(told, Mapping) or told.get("mean") is None:
        return ""
    return f"{told['mean']:.3f}" + (f" ± {told['sd']:.3f}" if told.get("sd") is not None else "")


def is_optimistic(results: Results) -> bool:
    return any(method.get("protocol") == "optimistic" for method in results.methods)


def _optimistic(results: Results) -> Markup:
    if not is_optimistic(results):
        return Markup()
    words = "epoch and threshold were chosen on the test slides; expect less on others."
    return tag("p", tag("strong", "OPTIMISTIC: "), words, class_="research")


def is_outdated(results: Results) -> bool:
    """Whether an earlier version ranked the scores of several splits, which have different models, together."""
    several = any(len(method.get("slides") or {}) > 1 for method in results.methods)
    return several and results.metrics.get("format_version") != FORMAT_VERSION


def _outdated(results: Results) -> Markup:
    if not is_outdated(results):
        return Markup()
    command = "compare" if results.is_comparison else "evaluate"
    words = "these metrics rank the scores of different splits' models together, as an earlier version did. Run "
    return tag("p", tag("strong", "Stale: "), words, tag("code", f"selfvitmil {command}"), " again.", class_="research")


def _figures(results: Results, names: Names) -> Markup:
    """All figures of a folder, but those that stand under localization."""
    shown = [name for name in results.figures if results.lesions is None or not _is_froc(name)]
    return _charts(figure(_read(results, name), names) for name in sorted(shown, key=_figure_order))


def _froc_figures(found: Iterable[Results], names: Names) -> Markup:
    return _charts(figure(_read(one, name), names) for one in found for name in sorted(one.figures) if _is_froc(name))


def _charts(drawn: Iterable[Markup]) -> Markup:
    shown = list(drawn)
    return tag("div", *shown, class_="charts") if shown else Markup()


def _read(results: Results, name: str) -> str:
    return results.figures[name].read_text(encoding="utf-8", errors="replace")


def _is_froc(name: str) -> bool:
    return name == "froc" or name.endswith("_froc")


def _figure_order(name: str) -> tuple[int, str]:
    places = [place for place, word in enumerate(FIGURES) if name == word or name.endswith(f"_{word}")]
    return (places[0] if places else len(FIGURES), name)


# ---------------------------------------------------------------------------------------------------- localization


def localization(study: Contents, names: Names) -> Markup:
    """How well maps agree with annotations: comparisons of models, then single models beside each other."""
    scored = sorted((one for one in study.results if one.lesions is not None), key=_main_first)
    if not scored:
        lacking = "Maps were not compared with annotations yet"
        return section("localization", "Localization", missing(lacking, "evaluate --lesions"))
    compared = [results for results in scored if results.lesion_table is not None]
    single = [results for results in scored if results not in compared]
    models = {
        f"{results.name}: {key}" if key else results.name: told
        for results in single
        for key, told in lesion_models(results.lesions or {}).items()
    }
    return section(
        "localization",
        "Localization",
        *(_lesion_comparison(results, names) for results in compared),
        _lesion_table(models),
        *(_lesion_notes(name, told, names) for name, told in models.items()),
        _froc_figures(single, names),
    )


def _lesion_comparison(results: Results, names: Names) -> Markup:
    header, rows, notes = parse_markdown_table(results.lesion_table or "")
    return join(
        (
            tag("h3", results.name),
            _comparison_table(header, rows) if rows else missing("Its table cannot be read"),
            bullets(names.text(note) for note in notes),
            _froc_figures([results], names),
        )
    )


def lesion_models(told: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The scores in a `lesions.json`: of one model, under an empty name, or of several by theirs."""
    several = told.get("methods")
    if not isinstance(several, Mapping):
        return {"": told}
    return {str(key): own for key, own in several.items() if isinstance(own, Mapping)}


def _lesion_table(models: Mapping[str, Mapping[str, Any]]) -> Markup:
    """A row for every score, a column for every model."""
    words: dict[str, str] = {}
    for told in models.values():
        for key, own in _scores(told).items():
            words.setdefault(key, str(own.get("words", key.replace("_", " "))))
    rows: list[list[str]] = []
    for key, meaning in words.items():
        cells = [_interval_words(_scores(told).get(key)) for told in models.values()]
        rows.append(
            [_sentence(meaning)[:-1], *(_below(f"{value} [{limits}]") if limits else value for value, limits in cells)]
        )
    return table(("", *models), rows, kind="headlines") if rows else Markup()


def _scores(told: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    found = told.get("scores")
    return {key: own for key, own in found.items() if isinstance(own, Mapping)} if isinstance(found, Mapping) else {}


def _lesion_notes(name: str, told: Mapping[str, Any], names: Names) -> Markup:
    """On how many slides the scores of a model rest, the threshold, sensitivities of FROC, and what to know."""
    if not _scores(told):
        rows = [(key.replace("_", " "), value) for key, value in _leaves(told)]
        return join((tag("h3", name), table(("", "value"), rows, kind="headlines")))
    slides, threshold, froc = (told.get(key) or {} for key in ("slides", "threshold", "froc"))
    at = froc.get("sensitivity_at") or {}
    left_out = sorted(f"{names.slide(one['slide'])}: {names.text(one['why'])}" for one in slides.get("left_out") or [])
    warnings = [f"Warning: {text}" for text in told.get("warnings") or [] if "takes no part" not in text]
    shown = f"{told.get('mapped', '')}, scale {told.get('scale', '')}{', gated' if told.get('gated') else ''}"
    return join(
        (
            tag("h3", name),
            facts(
                [
                    ("map", shown),
                    ("slides", f"{slides.get('positive', '?')} positive, {slides.get('negative', '?')} negative"),
                    ("lesions", f"{froc['lesions']}" if "lesions" in froc else ""),
                    ("threshold of the map", f"{_short(threshold.get('value', ''))}, {threshold.get('from', '')}"),
                    ("FROC in", str(told.get("froc_frame", ""))),
                ]
            ),
            table([f"{mark} FP per slide" for mark in at], [[f"{value:.3f}" for value in at.values()]],
                  caption="Sensitivity at false positives per slide") if at else "",
            bullets([*(f"Left out: {text}" for text in left_out), *warnings], "warnings"),
        )
    )  # fmt: skip


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}: ")
        elif isinstance(value, list):
            if len(value) <= 12 and all(isinstance(item, int | float | str) for item in value):
                yield f"{prefix}{key}", ", ".join(_short(item) for item in value)
        elif value is not None:
            yield f"{prefix}{key}", _short(value)


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def counted(counts: Mapping[str, int]) -> str:
    """For instance `80 normal, 49 tumor`."""
    return ", ".join(f"{number} {name}" for name, number in counts.items())
