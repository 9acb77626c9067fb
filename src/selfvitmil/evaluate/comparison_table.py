"""Comparison table: one row per method, paired tests against a baseline, published results of the paper's Table 1.

Input: the scores of every method's ensemble on the same slides (`paired_rows`) and one `ComparisonRow` per method.
Output: text for a file (`table_csv`, which `read_table` reads back, and `table_markdown`) and cells for a terminal or
the report (`table_cells` with `table_notes`).

Measured and published metrics never share a column: published ones used other features, often selected epoch and
threshold on the test set, and are on Camelyon16 only. `PUBLISHED` states what is known about each, and every table that
shows one says so in a note. Rows with different test sets or protocols raise an error.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict

import numpy as np

from selfvitmil.errors import MetricError
from selfvitmil.evaluate.estimators import Estimator
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
from selfvitmil.metrics import Interval, multiclass_auc, paired_auc_test
from selfvitmil.metrics.intervals import (
    Floats,
    Labels,
    bootstrap,
    bootstrap_p_value,
    check_groups,
    percentile_interval,
)
from selfvitmil.metrics.ranking import resampled_macro_auc
from selfvitmil.store.files import csv_text

# ---------------------------------------------------------------------------------------------------- published


@dataclass(frozen=True)
class Published:
    """A row of the paper's Table 1, all on Camelyon16's official test set, with its known training and selection."""

    name: str
    accuracy: float | None
    auc: float
    features: str
    trained_on: str
    protocol: str
    """How epoch and threshold were chosen."""
    source: str

    @property
    def note(self) -> str:
        """Description without the metrics, in one sentence."""
        return (
            f"Published {self.name}: features: {self.features}; trained on {self.trained_on}; {self.protocol}; "
            f"source: {self.source}."
        )


_TABLE = "Table 1 of Gul et al. 2022"
_C16 = "Camelyon16's training slides"
_SIMCLR = "ResNet18, SimCLR"
_DSMIL_CHOICE = "its released code takes Youden's threshold of the test slides; the choice of epoch is not known"

PUBLISHED: dict[str, Published] = {
    "chowder": Published(
        "CHOWDER",
        None,
        0.8580,
        "not stated there",
        _C16,
        "choice of epoch and threshold not stated there",
        f"{_TABLE}, citing Courtiol et al. 2020",
    ),
    "abmil": Published(
        "ABMIL",
        0.8450,
        0.8653,
        f"{_SIMCLR}, as in DSMIL's table",
        _C16,
        "choice of epoch and threshold not stated there",
        f"{_TABLE}, taken from DSMIL's paper (Li et al. 2021)",
    ),
    "dsmil": Published(
        "DSMIL", 0.8682, 0.8944, f"{_SIMCLR}, single scale", _C16, _DSMIL_CHOICE, f"{_TABLE}, citing Li et al. 2021"
    ),
    "mil-rnn": Published(
        "MIL-RNN",
        None,
        0.8990,
        "ResNet34, in its released code trained by the method itself from ImageNet weights",
        "9,894 axillary lymph node slides of MSK instead of Camelyon16",
        "choice of epoch and threshold for this figure not stated there",
        f"{_TABLE}, citing Campanella et al. 2019",
    ),
    "dsmil-lc": Published(
        "DSMIL-LC",
        0.8992,
        0.9165,
        f"{_SIMCLR}, 20x and 5x with an encoder each",
        _C16,
        _DSMIL_CHOICE,
        f"{_TABLE}, citing Li et al. 2021",
    ),
    "transmil": Published(
        "TransMIL",
        0.8837,
        0.9309,
        "ResNet50 up to its third stage, ImageNet",
        f"{_C16}, 54 of 270 kept for validation in the released split",
        "its released code takes the epoch by validation loss and the likelier class, no threshold",
        f"{_TABLE}, citing Shao et al. 2021",
    ),
    "resnet18": Published(
        "fully supervised",
        0.9147,
        0.9362,
        "ResNet18, trained on tiles labelled by annotation",
        f"{_C16} with annotations",
        "the rules that label a tile and score a slide are not published",
        f"{_TABLE}, citing Li et al. 2021",
    ),
    "self-vit-mil": Published(
        "Self-ViT-MIL",
        0.9147,
        0.9426,
        "ViT-B/16, DINO on Camelyon16's training tiles, 5D vectors",
        _C16,
        "its released code takes the best epoch and Youden's threshold of the test slides, so both are optimistic",
        _TABLE,
    ),
}
"""By method name; `resnet18` is the fully supervised baseline. Other methods have no published row."""

# ---------------------------------------------------------------------------------------------------- rows


@dataclass(frozen=True)
class EvaluatedOn:
    """Test set and protocol, shared by all rows of a table."""

    cohort: str
    split: str
    """Description of the test slides: `given test split`, `test parts of 5 folds` ..."""
    counts: tuple[tuple[str, int], ...]
    """Class names in class order with the number of slides of each."""
    protocol: Literal["honest", "optimistic"] = "honest"
    estimator: Estimator = Estimator.ONE_TEST_SET
    """How the test sets of the splits are combined."""
    camelyon16_test: bool = False
    """Whether these are Camelyon16's official test slides, as in the published results."""

    @property
    def words(self) -> str:
        """For example `80 normal + 49 tumor slides`."""
        return " + ".join(f"{count} {name}" for name, count in self.counts) + " slides"


@dataclass(frozen=True)
class PairedRow:
    """AUC of a method minus that of the baseline on the same slides, with raw and Holm-corrected p-values."""

    method: str
    baseline: str
    difference: Interval
    test: str
    """Name of the test of `p_value`."""
    p_value: float
    holm_p_value: float
    bootstrap_p_value: float
    bootstrap_holm_p_value: float
    num_comparisons: int
    """Number of methods compared with the baseline, for Holm's correction."""


@dataclass(frozen=True)
class ComparisonRow:
    """Measured metrics of a method. Intervals are of the ensemble: the mean probability of all seeds."""

    method: str
    display_name: str
    features: str
    """Encoder of the tile embeddings."""
    evaluated_on: EvaluatedOn
    seed_aucs: tuple[float, ...]
    """AUC of each seed."""
    auc: Interval
    """With more than two classes the macro-average one-vs-rest AUC; `seed_aucs` likewise."""
    accuracy: Interval
    balanced_accuracy: Interval
    sensitivity: Interval | None
    """None with more than two classes, as specificity."""
    specificity: Interval | None
    threshold_from: str
    """Origin of the threshold of accuracy and related metrics: `Youden on validation` ..."""
    paired: PairedRow | None = None
    """None for the baseline itself, or without a comparison."""
    training_seconds: float | None = None
    """Total training time of this row."""
    warnings: tuple[str, ...] = ()
    transductive: bool = False
    """Whether the encoder was trained, without labels, on slides of test patients; a warning gives the number."""
    published: Published | None = None
    recipe: str = "-"
    """`published`, `ours`, or `changed` (published with changes); a dash for rows that are no aggregator."""
    recipe_words: str = ""
    """Source of the recipe, or its differences from the published one."""
    evidence: tuple[str, ...] = ()
    """Kinds of evidence chosen by its splits, with reasons; empty where the recipe fixes the kind."""

    @property
    def num_seeds(self) -> int:
        return len(self.seed_aucs)

    @property
    def auc_mean(self) -> float:
        return float(np.mean(self.seed_aucs))

    @property
    def auc_sd(self) -> float:
        """Sample standard deviation over seeds; NaN for one seed."""
        return float(np.std(self.seed_aucs, ddof=1)) if self.num_seeds > 1 else float("nan")


# ---------------------------------------------------------------------------------------------------- paired tests


def holm(p_values: Sequence[float]) -> tuple[float, ...]:
    """Return Holm-corrected p-values in the given order (S. Holm, 1979)."""
    given = np.asarray(p_values, dtype=np.float64)
    order = np.argsort(given, kind="stable")
    corrected = np.empty_like(given)
    corrected[order] = np.minimum(1.0, np.maximum.accumulate(given[order] * np.arange(len(given), 0, -1)))
    return tuple(corrected.tolist())


def paired_rows(
    labels: Mapping[str, int],
    scores: Mapping[str, Mapping[str, float | Sequence[float]]],
    baseline: str,
    *,
    patients: Mapping[str, str] | None = None,
    folds: Mapping[str, str] | None = None,
    level: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> dict[str, PairedRow]:
    """Return paired tests of every method of `scores` (method -> slide -> score, or one per class) against `baseline`.

    Two classes: DeLong's paired test and a bootstrap. More: bootstrap of the macro AUC. Resampling is by patient, and
    slides are ranked within their `folds`, whose models differ. Raises MetricError where methods have other slides.
    """
    if baseline not in scores:
        raise MetricError(
            f"{baseline}: the baseline is not among the methods {', '.join(scores)}",
            "paired tests need the baseline's scores",
            "Set compare.baseline to one of them",
        )
    slides = sorted(labels)
    for method, of_slides in scores.items():
        _check_same_slides(method, set(of_slides), set(slides))
    label = np.array([labels[slide] for slide in slides])
    group = None if patients is None else [patients[slide] for slide in slides]
    fold = None if folds is None else check_groups([folds[slide] for slide in slides], len(slides))
    arrays = {method: _columns([of_slides[slide] for slide in slides]) for method, of_slides in scores.items()}
    others = [method for method in scores if method != baseline]
    drawn: _Drawn = {"groups": group, "folds": fold, "resamples": resamples, "seed": seed}
    tests = [_paired(label, arrays[method], arrays[baseline], level, drawn) for method in others]
    corrected = holm([p for _, _, p, _ in tests]), holm([p for _, _, _, p in tests])
    return {
        method: PairedRow(method, baseline, difference, test, p, holm_p, other_p, other_holm_p, len(others))
        for method, (difference, test, p, other_p), holm_p, other_holm_p in zip(others, tests, *corrected, strict=True)
    }


def _check_same_slides(method: str, scored: set[str], wanted: set[str]) -> None:
    if scored == wanted:
        return
    odd = sorted(scored ^ wanted)
    raise MetricError(
        f"{method}: {len(wanted - scored)} of {len(wanted)} slides have no score and {len(scored - wanted)} scored "
        f"slides have no label ({', '.join(odd[:3])}{' ...' if len(odd) > 3 else ''})",
        "a paired test compares methods on the same slides",
        "Score all methods on one set of slides",
    )


def _columns(scores: Sequence[float | Sequence[float]]) -> Floats:
    """Return (N,) or, for several classes, (N, C); a single column is squeezed."""
    given = np.asarray(scores, dtype=np.float64)
    return given[:, 0] if given.ndim == 2 and given.shape[1] == 1 else given


class _Drawn(TypedDict):
    """Resampling arguments, and the folds within which slides are ranked."""

    groups: Sequence[str] | None
    folds: Labels | None
    resamples: int
    seed: int


def _paired(label: Labels, a: Floats, b: Floats, level: float, drawn: _Drawn) -> tuple[Interval, str, float, float]:
    """Return difference, name of the test, its p-value and that of the bootstrap (the same for several classes)."""
    fold, resamples = drawn["folds"], drawn["resamples"]
    within = "" if fold is None else " within folds"
    if a.ndim == 1:
        done = paired_auc_test(label, a, b, level=level, **drawn)
        usual = done.difference.method.startswith("DeLong")
        test = (
            f"paired DeLong test{within}" if usual else f"z-test by {done.difference.method} (no variance for DeLong)"
        )
        return done.difference, test, done.p_value, done.bootstrap_p_value
    if a.shape != b.shape:
        raise MetricError(
            f"scores of shapes {a.shape} and {b.shape}", "both must have one column per class", "Check the classes"
        )
    # Checks all inputs and computes the two values.
    value_a, value_b = (multiclass_auc(label, one, folds=fold, resamples=100).macro.value for one in (a, b))
    of_a, of_b = resampled_macro_auc(label, a, fold), resampled_macro_auc(label, b, fold)
    group = check_groups(drawn["groups"], len(label))
    values_R = bootstrap(lambda weights: of_a(weights) - of_b(weights), label, group, resamples, drawn["seed"])
    p = bootstrap_p_value(values_R)
    test = f"paired bootstrap of the macro AUC{within}, {resamples} resamples"
    return percentile_interval(value_a - value_b, values_R, level), test, p, p


# ---------------------------------------------------------------------------------------------------- rendering


def table_csv(rows: Sequence[ComparisonRow]) -> str:
    """Return the table as CSV: every field with six significant digits, published ones in columns `published_...`."""
    check_rows(rows)
    records = [_record(row) for row in rows]
    return csv_text([list(records[0]), *(record.values() for record in records)])


def table_cells(rows: Sequence[ComparisonRow], *, intervals: bool = False) -> list[list[str]]:
    """Return header and rows; header cells may have two lines.

    Without `intervals` only the AUC has its interval, and names are shortened, to fit a terminal of 160 columns.
    """
    check_rows(rows)
    _, marks = _notes(rows)
    return [_header(rows, intervals=intervals), *_lines(rows, marks, intervals=intervals)]


def table_notes(rows: Sequence[ComparisonRow]) -> list[str]:
    """Return the notes below the table: first those of all rows, then the numbered ones."""
    check_rows(rows)
    return _notes(rows)[0]


def table_markdown(rows: Sequence[ComparisonRow], advice: Sequence[str] = ()) -> str:
    """Return the table as Markdown with intervals; below it `advice`, the notes and the recipe of each row."""
    cells = table_cells(rows, intervals=True)
    return f"{markdown_table(cells)}\n\n{markdown_list([*advice, *table_notes(rows), *recipe_notes(rows)])}\n"


def recipe_notes(rows: Sequence[ComparisonRow]) -> list[str]:
    """Return the recipe of each row that has one."""
    return [f"Recipe of {row.display_name}: {row.recipe_words}" for row in rows if row.recipe_words]


def check_rows(rows: Sequence[ComparisonRow]) -> None:
    """Raise MetricError unless there are rows, all with the same test set and protocol."""
    if not rows:
        raise MetricError("a comparison without rows", "there is nothing to show", "Add a method to compare.methods")
    first = rows[0]
    for row in rows[1:]:
        if row.evaluated_on != first.evaluated_on or row.auc.level != first.auc.level:
            raise MetricError(
                f"{first.display_name} and {row.display_name} have different test sets or protocols",
                "they are not comparable",
                "Make a table for each",
            )


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
    "here for cohorts of any size; table.md and the column recipe_words of table.csv list all differences."
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
    for a table of another kind.
    """
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
