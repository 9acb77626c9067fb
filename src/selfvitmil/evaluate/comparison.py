"""Comparison of methods: one row per method, paired tests against a baseline, published results of the paper's Table 1.

Input: the predictions and metrics of every method on the same slides. `compare_results` tests the methods against the
baseline, `comparison_row` makes a `ComparisonRow` of each, `write_results` writes `predictions.csv` and `metrics.json`:
equal results give byte-identical files, which contain neither times nor paths. `comparison_table.py` shows the rows.

Measured and published metrics never share a column: published ones used other features, often selected epoch and
threshold on the test set, and are on Camelyon16 only. `PUBLISHED` states what is known about each, and every table that
shows one says so in a note. Rows with different test sets or protocols raise an error.

`better_simple_rows` advises where a simple method is clearly better than the main one, by validation slides only: the
advice exists before any test label is opened.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypedDict

import numpy as np

from selfvitmil.aggregate.selection import evidence_words
from selfvitmil.errors import MetricError
from selfvitmil.evaluate.dataset import Trial
from selfvitmil.evaluate.method_metrics import (
    Estimator,
    Samples,
    Scores,
    are_disjoint,
    estimator_of,
    read_interval,
    samples_of,
)
from selfvitmil.evaluate.predictions import write_predictions
from selfvitmil.evaluate.protocol import Fitted, MethodResult
from selfvitmil.metrics import Interval, auc, multiclass_auc, paired_auc_test
from selfvitmil.metrics.classification import (
    Floats,
    Labels,
    bootstrap,
    bootstrap_p_value,
    check_groups,
    percentile_interval,
)
from selfvitmil.metrics.ranking import resampled_macro_auc
from selfvitmil.settings import EvaluateSettings
from selfvitmil.store.files import write_text

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


UNTRAINED_ROW, COLOR_ROW = "untrained encoder", "mean colour"
"""Rows of the main method on embeddings of an untrained network, and on the tiles' colours."""


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
    """`published`, `ours`, `changed` (published with changes) or `tuned`; a dash for rows that are no aggregator."""
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


def check_rows(rows: Sequence[ComparisonRow]) -> None:
    """Raise MetricError unless there are rows, all with the same test set and protocol."""
    if not rows:
        raise MetricError(
            "a comparison without rows",
            "there is nothing to show",
            "Add a method to compare.methods",
            code="empty-comparison",
        )
    first = rows[0]
    for row in rows[1:]:
        if row.evaluated_on != first.evaluated_on or row.auc.level != first.auc.level:
            raise MetricError(
                f"{first.display_name} and {row.display_name} have different test sets or protocols",
                "they are not comparable",
                "Make a table for each",
                code="not-comparable",
            )


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
            code="unknown-baseline",
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
        code="score-label-mismatch",
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
            f"scores of shapes {a.shape} and {b.shape}",
            "both must have one column per class",
            "Check the classes",
            code="score-shape-mismatch",
        )
    # Checks all inputs and computes the two values.
    value_a, value_b = (multiclass_auc(label, one, folds=fold, resamples=100).macro.value for one in (a, b))
    of_a, of_b = resampled_macro_auc(label, a, fold), resampled_macro_auc(label, b, fold)
    group = check_groups(drawn["groups"], len(label))
    values_R = bootstrap(lambda weights: of_a(weights) - of_b(weights), label, group, resamples, drawn["seed"])
    p = bootstrap_p_value(values_R)
    test = f"paired bootstrap of the macro AUC{within}, {resamples} resamples"
    return percentile_interval(value_a - value_b, values_R, level), test, p, p


# ---------------------------------------------------------------------------------------------------- advice


SUGGESTS = {
    "mean": "the evidence is spread over the whole slide (diffuse) rather than in few tiles (focal)",
    "abmil": "the evidence is a mixture of many tiles rather than a few critical ones",
    "abmil-gated": "the evidence is a mixture of many tiles rather than a few critical ones",
    "max": "the evidence lies in single tiles (focal)",
    "topk": "the evidence lies in a few tiles (focal)",
}
"""Interpretation where a simple method is better."""
CLEARLY = 2.0
"""Difference of squared errors over patients, in standard errors, above which a method is clearly better."""


@dataclass(frozen=True)
class SimpleRow:
    """A simple method that is clearly better than the main one on validation slides."""

    method: str
    main: str
    auc: float
    main_auc: float
    slides: int
    splits: int

    @property
    def words(self) -> str:
        info = (
            f"{self.method} is clearly better than {self.main} on the {self.slides} validation slides (AUC "
            f"{self.auc:.3f} against {self.main_auc:.3f}), which suggests that {SUGGESTS[self.method]}. Consider "
            f"--train.aggregator {self.method}"
        )
        if self.splits == 1:
            return info
        return f"{info}, on new test slides: those of one split were validation slides of another"


def better_simple_rows(fitted: Sequence[Fitted], trial: Trial, main: str) -> list[SimpleRow]:
    """Return simple methods that are clearly better than the row called `main`, best first.

    Methods are compared by squared errors of the ensembles' probabilities, per patient. Empty for several classes,
    where `main` is not among the rows, and under the optimistic protocol, which has no validation set.
    """
    rows = {each.method: each for each in fitted}
    if main not in rows or trial.num_classes != 1 or trial.optimistic or trial.outcome is not None:
        return []
    cases = [(split.name, case) for split in trial.splits for case in split.val]
    labels = np.array([case.label for _, case in cases])
    patients = np.array([case.patient for _, case in cases])
    folds = np.array([split for split, _ in cases])
    own = _validation_scores(rows[main], trial)
    own_auc = auc(labels, own, folds=folds)
    found: list[SimpleRow] = []
    for method in SUGGESTS:
        if method not in rows or method == main:
            continue
        other = _validation_scores(rows[method], trial)
        gain = (own - labels) ** 2 - (other - labels) ** 2
        means = np.array([gain[patients == patient].mean() for patient in np.unique(patients)])
        error = means.std(ddof=1) / np.sqrt(len(means)) if len(means) > 1 else np.inf
        other_auc = auc(labels, other, folds=folds)
        if means.mean() > CLEARLY * error and other_auc > own_auc:
            found.append(SimpleRow(method, main, other_auc, own_auc, len(labels), len(trial.splits)))
    return sorted(found, key=lambda row: -row.auc)


def _validation_scores(fitted: Fitted, trial: Trial) -> Floats:
    """Return the seed-averaged probabilities of all validation slides, split by split."""
    scores: list[float] = []
    for split in trial.splits:
        runs = [run for run in fitted.runs if run.split == split.name]
        scores += [float(np.mean([run.chosen_on[case.slide].probabilities[0] for run in runs])) for case in split.val]
    return np.array(scores)


# ---------------------------------------------------------------------------------------------------- results


FORMAT_VERSION = 2
"""2: of several splits AUC, average precision and p-values are within splits; 1 ranked the scores of all together."""


def write_results(
    folder: Path,
    results: Sequence[MethodResult],
    scores: Sequence[Scores],
    evaluate: EvaluateSettings,
    advice: Sequence[str] = (),
) -> None:
    """Write `predictions.csv` and `metrics.json` of one or more methods on the same classes, with any `advice`."""
    rows = [row for result in results for row in result.predictions]
    write_predictions(folder / "predictions.csv", rows, results[0].class_names, results[0].outcome)
    info = {
        "format_version": FORMAT_VERSION,
        "settings": evaluate.model_dump(mode="json"),
        **({"advice": list(advice)} if advice else {}),
        "methods": [scored.to_json() for scored in scores],
    }
    text = json.dumps(info, indent=1, ensure_ascii=False, allow_nan=False)
    write_text(folder / "metrics.json", text + "\n")


# ---------------------------------------------------------------------------------------------------- comparison


def evaluated_on(result: MethodResult, cohort: str, *, camelyon16_test: bool = False) -> EvaluatedOn:
    """Return the description of the test set for the table; `cohort` is the cohort's name."""
    labels = {row.slide: row.label for row in result.predictions if row.part == "test"}
    counts = tuple((name, list(labels.values()).count(k)) for k, name in enumerate(result.class_names))
    number = len(result.splits)
    split = f"test slides of the split {result.splits[0]}"
    if number > 1:
        overlap = "" if are_disjoint(result.predictions) else ", which overlap"
        split = f"test slides of {number} splits{overlap}"
    protocol: Literal["honest", "optimistic"] = "optimistic" if result.protocol == "optimistic" else "honest"
    return EvaluatedOn(
        cohort, split, counts, protocol=protocol, estimator=estimator_of(result), camelyon16_test=camelyon16_test
    )


def compare_results(results: Sequence[MethodResult], baseline: str, evaluate: EvaluateSettings) -> dict[str, PairedRow]:
    """Return paired tests of every method against `baseline`, by the ensembles' scores of the same test slides.

    Slides are ranked within splits; test slides of several splits count as one observation.
    """
    if len(results) < 2:
        return {}
    samples = {result.method: samples_of(result.predictions, overlap=True) for result in results}
    first = next(iter(samples.values()))
    folds = None if first.folds is None else dict(zip(_keys(first), first.folds, strict=True))
    return paired_rows(
        dict(zip(_keys(first), first.labels.tolist(), strict=True)),
        {method: dict(zip(_keys(own), own.scores.tolist(), strict=True)) for method, own in samples.items()},
        baseline,
        patients=dict(zip(_keys(first), first.patients, strict=True)),
        folds=folds,
        level=evaluate.confidence,
        resamples=evaluate.bootstrap,
        seed=evaluate.seed,
    )


def _keys(samples: Samples) -> list[str]:
    """Return a key for each prediction: the slide, with the split where there are several."""
    if samples.folds is None:
        return list(samples.names)
    return [f"{slide} in {split}" for slide, split in zip(samples.names, samples.folds, strict=True)]


def comparison_row(
    result: MethodResult,
    scores: Scores,
    on: EvaluatedOn,
    *,
    features: str = "",
    paired: Mapping[str, PairedRow] | None = None,
    published: Published | None = None,
) -> ComparisonRow:
    """Return the row of a method: slide-level metrics of the ensemble, AUC of each seed, origin of the threshold."""
    whole = scores.slide["ensemble"]
    thresholds = {row.threshold_from for row in result.predictions if row.part == "test" and row.seed is None}
    binary = len(result.class_names) == 2
    return ComparisonRow(
        method=result.aggregator,
        display_name=result.method,
        features=features or result.encoder,
        evaluated_on=on,
        seed_aucs=tuple(read_interval(own["auc"]).value for own in scores.slide["seeds"].values()),
        auc=read_interval(whole["auc"]),
        accuracy=read_interval(whole["accuracy"]),
        balanced_accuracy=read_interval(whole["balanced_accuracy"]),
        sensitivity=read_interval(whole["sensitivity"]) if binary else None,
        specificity=read_interval(whole["specificity"]) if binary else None,
        threshold_from=", ".join(sorted(thresholds)),
        paired=(paired or {}).get(result.method),
        training_seconds=sum(run.seconds for run in result.runs),
        warnings=result.warnings,
        transductive=bool(result.transductive),
        published=published,
        recipe="-" if result.recipe is None else result.recipe.kind,
        recipe_words="" if result.recipe is None else result.recipe.words,
        evidence=evidence_words(list(result.evidence.values())),
    )
