"""The comparison table as files, on a terminal and in the report, from one `ComparisonRow` per method.

`table_csv` writes every field, and `read_table` reads it back; `table_markdown` has all intervals and notes;
`table_cells` and `table_notes` serve a terminal or the report. Measured and published metrics never share a column.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from selfvitmil.evaluate.comparison import ComparisonRow, EvaluatedOn, PairedRow, Published, check_rows
from selfvitmil.evaluate.method_metrics import Estimator
from selfvitmil.formatting import (
    duration,
    markdown_list,
    markdown_table,
    number,
    p_value,
    percent,
    shorten,
    with_limits,
)
from selfvitmil.metrics import Interval
from selfvitmil.store.files import csv_text

METRIC_NAMES = {
    "c_index": "Harrell's C-index",
    "uno_c": "Uno's C-index",
    "auc_t": "time-dependent AUC",
    "hazard_ratio": "hazard ratio, high against low risk",
    "log_rank_p": "p of the log-rank test",
    "integrated_brier": "integrated Brier score",
    "mae": "mean absolute error",
    "rmse": "root mean squared error",
    "r2": "R²",
    "pearson": "Pearson's correlation",
    "spearman": "Spearman's correlation",
    "kappa": "quadratic weighted kappa",
    "within_one": "at most one level off",
    "mean_distance": "mean distance in levels",
    "macro_auc": "macro AUC",
    "macro_ap": "macro average precision",
}
"""Metrics of outcomes other than classes, in words."""


@dataclass(frozen=True)
class OutcomeRow:
    """A method in the table of an outcome other than classes."""

    method: str
    display_name: str
    features: str
    recipe: str
    kind: str
    on: str
    """Test set and protocol, in words."""
    metrics: Mapping[str, Interval]
    """By the heads of the table, the primary one first."""
    seed_mean: float
    seed_sd: float
    num_seeds: int
    baseline: str = ""
    difference: Interval | None = None
    p_value: float = math.nan
    test: str = ""
    training_seconds: float | None = None
    warnings: tuple[str, ...] = ()
    recipe_words: str = ""


def table_csv(rows: Sequence[ComparisonRow]) -> str:
    """Return the table as CSV: every field with six significant digits, published ones in columns `published_...`."""
    check_rows(rows)
    records = [_record(row) for row in rows]
    return csv_text([list(records[0]), *(record.values() for record in records)])


def table_cells(rows: Sequence[ComparisonRow], *, intervals: bool = False) -> list[list[str]]:
    """Return header and rows; header cells may have two lines.

    Without `intervals` only the AUC has its interval, and names are shortened, to fit a terminal of 160 columns.
    """
    if rows and isinstance(rows[0], OutcomeRow):
        from selfvitmil.evaluate.outcome_results import outcome_cells

        return outcome_cells(rows)  # pyright: ignore[reportArgumentType]
    check_rows(rows)
    _, marks = _notes(rows)
    return [_header(rows, intervals=intervals), *_lines(rows, marks, intervals=intervals)]


def short_cells(rows: Sequence[ComparisonRow]) -> list[list[str]]:
    """Return header and rows for a terminal of 80 columns; `table_cells` has all of them."""
    if rows and isinstance(rows[0], OutcomeRow):
        from selfvitmil.evaluate.outcome_results import outcome_cells

        return outcome_cells(rows)  # pyright: ignore[reportArgumentType]
    check_rows(rows)
    on = rows[0].evaluated_on
    several = len(on.counts) > 2
    auc = "macro AUC" if several else "AUC"
    decided = ("acc.", "bal.\nacc.") if several else ("sens.", "spec.")
    method = "method\nOPTIMISTIC" if on.protocol == "optimistic" else "method"
    header = [method, f"{auc} [{percent(rows[0].auc.level)}]", "of seeds", *decided, "p Holm"]
    lines: list[list[str]] = []
    for row in rows:
        pair = (row.accuracy, row.balanced_accuracy) if several else (row.sensitivity, row.specificity)
        lines.append(
            [
                shorten(row.display_name, 19) + (" *" if row.transductive else ""),
                with_limits(row.auc),
                number(row.auc_mean) if np.isnan(row.auc_sd) else f"{row.auc_mean:.3f} ± {row.auc_sd:.3f}",
                *(number(part.value if part else None) for part in pair),
                p_value(row.paired.holm_p_value) if row.paired else "-",
            ]
        )
    return [header, *lines]


def short_notes(rows: Sequence[ComparisonRow]) -> list[str]:
    """Return what must be known to read `short_cells`: the test set, what p is, which encoders have seen it."""
    if rows and isinstance(rows[0], OutcomeRow):
        from selfvitmil.evaluate.outcome_results import outcome_notes

        return outcome_notes(rows)  # pyright: ignore[reportArgumentType]
    notes = [_test_set_note(rows[0].evaluated_on)]
    notes += list(dict.fromkeys(filter(None, map(_paired_note, rows))))[:1]
    if any(row.transductive for row in rows):
        notes.append("*: transductive, the encoder was trained, without labels, on slides of test patients")
    return notes


def has_figure(rows: Sequence[ComparisonRow]) -> bool:
    """Whether a comparison has a figure of AUCs: only that of classes."""
    return not (rows and isinstance(rows[0], OutcomeRow))


def table_notes(rows: Sequence[ComparisonRow]) -> list[str]:
    """Return the notes below the table: first those of all rows, then the numbered ones."""
    if rows and isinstance(rows[0], OutcomeRow):
        from selfvitmil.evaluate.outcome_results import outcome_notes

        return outcome_notes(rows)  # pyright: ignore[reportArgumentType]
    check_rows(rows)
    return _notes(rows)[0]


def table_markdown(rows: Sequence[ComparisonRow], advice: Sequence[str] = ()) -> str:
    """Return the table as Markdown with intervals; below it `advice`, the notes and the recipe of each row."""
    cells = table_cells(rows, intervals=True)
    return f"{markdown_table(cells)}\n\n{markdown_list([*advice, *table_notes(rows), *recipe_notes(rows)])}\n"


def recipe_notes(rows: Sequence[ComparisonRow]) -> list[str]:
    """Return the recipe of each row that has one."""
    return [f"Recipe of {row.display_name}: {row.recipe_words}" for row in rows if row.recipe_words]


def _header(rows: Sequence[ComparisonRow], *, intervals: bool) -> list[str]:
    evaluated_on = rows[0].evaluated_on
    method = "method\nOPTIMISTIC" if evaluated_on.protocol == "optimistic" else "method"
    auc = "macro AUC" if len(evaluated_on.counts) > 2 else "AUC"
    limits = f" [{percent(rows[0].auc.level)}]"
    rest = limits if intervals else ""
    named = [method, "recipe", f"{auc}{limits}", f"{auc}\nof seeds", "seeds"]
    named[1:1] = ["encoder"] * any(row.transductive for row in rows)
    named += [f"acc.{rest}", f"bal.\nacc.{rest}", f"sens.{rest}", f"spec.{rest}", "p", "p\nHolm", "training"]
    return [*named, "published\nAUC", "published\nacc.", "notes"]


def _lines(rows: Sequence[ComparisonRow], marks: Sequence[Sequence[int]], *, intervals: bool) -> list[list[str]]:
    """Return the cells of every row; a column marks transductive encoders where there are any."""
    lines = [_cells(row, marked, intervals=intervals) for row, marked in zip(rows, marks, strict=True)]
    if any(row.transductive for row in rows):
        for row, line in zip(rows, lines, strict=True):
            line.insert(1, "transductive" if row.transductive else "-")
    return lines


def _cells(row: ComparisonRow, marks: Sequence[int], *, intervals: bool) -> list[str]:
    paired, published = row.paired, row.published
    decided = (row.accuracy, row.balanced_accuracy, row.sensitivity, row.specificity)
    return [
        row.display_name if intervals else shorten(row.display_name, 24),
        row.recipe,
        with_limits(row.auc),
        number(row.auc_mean) if np.isnan(row.auc_sd) else f"{row.auc_mean:.3f} ± {row.auc_sd:.3f}",
        str(row.num_seeds),
        *(with_limits(part) if intervals else number(part.value if part else None) for part in decided),
        p_value(paired.p_value) if paired else "-",
        p_value(paired.holm_p_value) if paired else "-",
        duration(row.training_seconds),
        number(published.auc if published else None, 4),
        number(published.accuracy if published else None, 4),
        " ".join(map(str, marks)) or "-",
    ]


def _notes(rows: Sequence[ComparisonRow]) -> tuple[list[str], list[list[int]]]:
    """Return the notes, and for every row the numbers of its own notes."""
    general = [_test_set_note(rows[0].evaluated_on)]
    special: list[str] = []
    marks: list[list[int]] = [[] for _ in rows]
    topics = [
        _features_note,
        _auc_note,
        _threshold_note,
        _evidence_note,
        _paired_note,
        _conditional_note,
        *_warning_topics(rows),
        _published_note,
    ]
    for topic in topics:
        texts = [topic(row) for row in rows]
        distinct = list(dict.fromkeys(text for text in texts if text))
        # A note shared by all rows has no number; that on p-values is general although the baseline has none.
        if len(distinct) == 1 and (all(texts) or topic is _paired_note):
            general += distinct
            continue
        for text in distinct:
            if text not in special:
                special.append(text)
            for marked, own in zip(marks, texts, strict=True):
                if own == text:
                    marked.append(special.index(text) + 1)
    general += [_RECIPE_WORDS] if any(row.recipe_words for row in rows) else []
    if any(row.published for row in rows):
        general.append(_published_words(rows[0].evaluated_on))
    return general + [f"[{number}] {text}" for number, text in enumerate(special, start=1)], marks


_RECIPE_WORDS = (
    "Recipe: 'published' as the method's paper or code says, 'changed' that with some numbers changed, 'ours' one made "
    "here for cohorts of any size, 'tuned' chosen by cross-validation without test slides; table.md and the column "
    "recipe_words of table.csv list all differences."
)


def _evidence_note(row: ComparisonRow) -> str | None:
    return f"Looks for {'; or '.join(row.evidence)}." if row.evidence else None


def _test_set_note(on: EvaluatedOn) -> str:
    text = f"Measured on {on.words} of {on.cohort} ({on.split})."
    if on.protocol == "optimistic":
        chosen = "epoch, threshold and kind of evidence were chosen on the test set"
        text = f"OPTIMISTIC: {chosen}; expect lower metrics on other slides. {text}"
    return text


def _features_note(row: ComparisonRow) -> str:
    return f"Features: {row.features}."


def _auc_note(row: ComparisonRow) -> str:
    seeds = f"the mean probability of {row.num_seeds} seeds" if row.num_seeds > 1 else "one training run (1 seed)"
    spread = "; 'of seeds': mean ± sample sd over the single seeds" if row.num_seeds > 1 else ""
    limits = f"{percent(row.auc.level)} interval, {row.auc.method}"
    return f"AUC: {seeds} ({limits}){spread}."


def _threshold_note(row: ComparisonRow) -> str:
    return f"Accuracy and the columns up to p: of the same scores; threshold: {row.threshold_from}."


def _paired_note(row: ComparisonRow) -> str | None:
    paired = row.paired
    if paired is None:
        return None
    number = f"{paired.num_comparisons} comparison{'s' * (paired.num_comparisons > 1)}"
    return f"p: {paired.test} against {paired.baseline}, two-sided; 'Holm': corrected for {number}."


def _conditional_note(row: ComparisonRow) -> str:
    return row.evaluated_on.estimator.conditional_on


def _published_note(row: ComparisonRow) -> str | None:
    return row.published.note if row.published else None


def _warning_topics(rows: Sequence[ComparisonRow]) -> list[Callable[[ComparisonRow], str | None]]:
    """Return one topic per warning, so that a warning of all rows appears once."""
    return [
        lambda row, text=text: f"Warning: {text}" if text in row.warnings else None
        for text in dict.fromkeys(text for row in rows for text in row.warnings)
    ]


def _published_words(on: EvaluatedOn) -> str:
    text = (
        "Published columns: not measured here. Table 1 of the Self-ViT-MIL paper (Gul et al. 2022), on the 129 "
        "slides of Camelyon16's official test set, "
    )
    if on.camelyon16_test:
        return text + "which are the test slides here too; features, training and choices differ as the notes tell."
    return text + f"so not comparable with numbers on {on.cohort}."


# ---------------------------------------------------------------------------------------------------- CSV records


def _record(row: ComparisonRow) -> dict[str, str]:
    on, paired, published = row.evaluated_on, row.paired, row.published
    record = {
        "method": row.method,
        "display_name": row.display_name,
        "protocol": on.protocol,
        "cohort": on.cohort,
        "test": on.split,
        "test_slides": ";".join(f"{name}={count}" for name, count in on.counts),
        "features": row.features,
        "transductive": "yes" if row.transductive else "no",
        "recipe": row.recipe,
        "recipe_words": row.recipe_words,
        "evidence": " | ".join(row.evidence),
        "num_seeds": str(row.num_seeds),
        **_interval_record("macro_auc" if len(on.counts) > 2 else "auc", row.auc),
        "auc_limits": f"{percent(row.auc.level)}, {row.auc.method}",
        "estimator": on.estimator.value,
        "seed_auc_mean": _full(row.auc_mean),
        "seed_auc_sd": _full(row.auc_sd),
        "seed_aucs": ";".join(map(_full, row.seed_aucs)),
        **_interval_record("accuracy", row.accuracy),
        **_interval_record("balanced_accuracy", row.balanced_accuracy),
        **_interval_record("sensitivity", row.sensitivity),
        **_interval_record("specificity", row.specificity),
        "threshold_from": row.threshold_from,
        "baseline": paired.baseline if paired else "",
        "test_against_baseline": paired.test if paired else "",
        **_interval_record("auc_difference", paired.difference if paired else None),
        "p_value": _full(paired.p_value if paired else None),
        "p_value_holm": _full(paired.holm_p_value if paired else None),
        "bootstrap_p_value": _full(paired.bootstrap_p_value if paired else None),
        "bootstrap_p_value_holm": _full(paired.bootstrap_holm_p_value if paired else None),
        "conditional_on": on.estimator.conditional_on,
        "training_seconds": "" if row.training_seconds is None else f"{row.training_seconds:.1f}",
        "warnings": "; ".join(row.warnings),
    }
    for name in ("name", "auc", "accuracy", "features", "trained_on", "protocol", "source"):
        value = getattr(published, name, None)
        record[f"published_{name}"] = f"{value:.4f}" if isinstance(value, float) else value or ""
    record["published_on_these_slides"] = "" if published is None else "yes" if on.camelyon16_test else "no"
    return record


def _interval_record(name: str, interval: Interval | None) -> dict[str, str]:
    value, low, high = (interval.value, interval.low, interval.high) if interval else (None, None, None)
    return {name: _full(value), f"{name}_low": _full(low), f"{name}_high": _full(high)}


def _full(value: float | None) -> str:
    """Return six significant digits; empty for None and NaN."""
    return "" if value is None or np.isnan(value) else f"{value:.6g}"


def read_table(text: str) -> list[ComparisonRow]:
    """Return the rows of a `table_csv`, with six significant digits.

    The CSV joins warnings with a semicolon, so a warning that has one comes back as two. Raises KeyError or ValueError
    for a table of another kind. Rows of another outcome than classes are `OutcomeRow`.
    """
    if text.startswith("outcome,"):
        from selfvitmil.evaluate.outcome_results import read_outcome_csv

        return read_outcome_csv(text)  # pyright: ignore[reportReturnType]
    records = list(csv.DictReader(io.StringIO(text)))
    camelyon16_test = any(record["published_on_these_slides"] == "yes" for record in records)
    num_comparisons = sum(bool(record["baseline"]) for record in records)
    return [_row(record, num_comparisons, camelyon16_test) for record in records]


def _row(record: Mapping[str, str], num_comparisons: int, camelyon16_test: bool) -> ComparisonRow:
    level, method = record["auc_limits"].split(" %, ", 1)

    def interval(name: str) -> Interval | None:
        value, low, high = (_number(record[f"{name}{end}"]) for end in ("", "_low", "_high"))
        return None if np.isnan(value) else Interval(value, low, high, method, float(level) / 100)

    auc, accuracy, balanced = (
        interval(name) or Interval(np.nan, np.nan, np.nan, method, float(level) / 100)
        for name in ("auc" if "auc" in record else "macro_auc", "accuracy", "balanced_accuracy")
    )
    counts = re.findall(r"(.*?)=(\d+)(?:;|$)", record["test_slides"])
    on = EvaluatedOn(
        record["cohort"],
        record["test"],
        tuple((name, int(count)) for name, count in counts),
        "optimistic" if record["protocol"] == "optimistic" else "honest",
        Estimator(record["estimator"]),
        camelyon16_test,
    )
    difference = interval("auc_difference")
    paired = difference and PairedRow(
        method=record["display_name"],
        baseline=record["baseline"],
        difference=difference,
        test=record["test_against_baseline"],
        p_value=_number(record["p_value"]),
        holm_p_value=_number(record["p_value_holm"]),
        bootstrap_p_value=_number(record["bootstrap_p_value"]),
        bootstrap_holm_p_value=_number(record["bootstrap_p_value_holm"]),
        num_comparisons=num_comparisons,
    )
    published = Published(
        name=record["published_name"],
        accuracy=float(record["published_accuracy"]) if record["published_accuracy"] else None,
        auc=_number(record["published_auc"]),
        features=record["published_features"],
        trained_on=record["published_trained_on"],
        protocol=record["published_protocol"],
        source=record["published_source"],
    )
    return ComparisonRow(
        method=record["method"],
        display_name=record["display_name"],
        features=record["features"],
        evaluated_on=on,
        seed_aucs=tuple(_number(value) for value in record["seed_aucs"].split(";")),
        auc=auc,
        accuracy=accuracy,
        balanced_accuracy=balanced,
        sensitivity=interval("sensitivity"),
        specificity=interval("specificity"),
        threshold_from=record["threshold_from"],
        paired=paired,
        training_seconds=float(record["training_seconds"]) if record["training_seconds"] else None,
        warnings=tuple(filter(None, record["warnings"].split("; "))),
        transductive=record["transductive"] == "yes",
        published=published if published.name else None,
        recipe=record["recipe"],
        recipe_words=record["recipe_words"],
        evidence=tuple(filter(None, record["evidence"].split(" | "))),
    )


def _number(text: str) -> float:
    return float(text) if text else float("nan")
