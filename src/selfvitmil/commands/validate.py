"""External validation of a packaged model: `predict MODEL SLIDES --labels TABLE`.

`predict` comes first and knows nothing of labels. This command reads the predictions that it wrote, joins the labels,
and writes into OUT/validation/<model>/. So a label can change neither a prediction nor a threshold nor a calibration:
predictions.csv, predictions.json and heatmaps are the same bytes with these labels, with others and without.

    predictions.csv    labelled predictions, in the form of a study's results
    metrics.json       all metrics, calibration, changes, subgroups, comparison
    table.csv          the metrics as a table; subgroups.csv has those of subgroups
    prediction_sets.csv, decision_curve.csv   of classes: the classes that cannot be excluded; net benefit
    roc.svg, calibration.svg, decision_curve.svg, index.html   figures, and all of it as a page without names of slides
                       or patients
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from selfvitmil.cohort.table import listing, name_key
from selfvitmil.errors import ConfigError, MetricError
from selfvitmil.settings import EvaluateSettings
from selfvitmil.stages.base import StageResult
from selfvitmil.store.files import write_csv, write_text
from selfvitmil.store.layout import StudyLayout
from selfvitmil.study import lock_study

if TYPE_CHECKING:
    from selfvitmil.evaluate import Prediction
    from selfvitmil.evaluate.decisions import Decisions
    from selfvitmil.evaluate.external import ExternalValidation
    from selfvitmil.package import Package
    from selfvitmil.package.labels import ExternalLabels

FORMAT_VERSION = 1
"""Of metrics.json of a validation."""


@dataclass(frozen=True)
class ValidateResult(StageResult):
    """A packaged model on another, labelled cohort."""

    package: Package
    folder: Path
    validation: ExternalValidation
    num_labelled: int
    """Labelled slides of the table."""
    num_outside: int
    """Evaluated slides that are out of distribution."""


def external_labels(
    package: Package, slides: Sequence[Path], table: Path | None, *, label_column: str | None = None,
    label_map: Sequence[str] = (), by: Sequence[str] = (), other: Package | None = None,
) -> ExternalLabels | None:  # fmt: skip
    """Read the labels of `predict` from flags, before any work is done; None without a table.

    `by` are columns, each text one or several with commas between. Raises ConfigError for flags that make no sense
    without a table, or for a model that cannot be compared.
    """
    from selfvitmil.commands.predict import find_new_slides
    from selfvitmil.package.labels import parse_label_map, read_labels

    if table is None:
        given = {"--label-column": label_column, "--label-map": label_map, "--by": by, "--against": other}
        if needless := [flag for flag, value in given.items() if value]:
            raise ConfigError(
                f"{needless[0]} without --labels",
                "it is about an evaluation by labels",
                "Give the table of labels with --labels, or leave it out",
                code="labels-needed",
            )
        return None
    if other is not None:
        check_same_classes(package, other)
    columns = dict.fromkeys(name for text in by for each in text.split(",") if (name := each.strip()))
    files = {row.slide: row.path for row in find_new_slides(slides).rows}
    how: dict[str, Any] = {"label_column": label_column, "label_map": parse_label_map(label_map)}
    return read_labels(table, package.classes, files, outcome=package.outcome, columns=tuple(columns), **how)


def check_same_classes(package: Package, other: Package) -> None:
    """Raise ConfigError unless both models have the same classes in the same order, or predict the same outcome."""
    one, two = ("classes" if each.outcome is None else each.outcome.words for each in (package, other))
    if one != two:
        raise ConfigError(
            f"--against {other.name}: it predicts {two}",
            f"{package.name} predicts {one}; scores of different outcomes cannot be compared",
            "Compare models of the same outcome",
            code="classes-differ",
        )
    if package.classes != other.classes:
        raise ConfigError(
            f"--against {other.name}: its classes are {listing(other.classes)}",
            f"those of {package.name} are {listing(package.classes)}; scores of different classes cannot be compared",
            "Compare models of the same classes",
            code="classes-differ",
        )
    if package.identity == other.identity:
        raise ConfigError(
            f"--against {other.name}: this is the same model", how="Name another package", code="same-model"
        )


def validate(
    package: Package, out: Path, labels: ExternalLabels, other: Package | None = None,
    evaluate: EvaluateSettings = EvaluateSettings(),
) -> ValidateResult:  # fmt: skip
    """Evaluate the predictions of a model in the folder `out` by labels; compare with another model's, if given.

    All predictions of the model in that folder count that have a label, also those of earlier calls.
    """
    from selfvitmil.evaluate import write_predictions
    from selfvitmil.evaluate.external import validate_predictions
    from selfvitmil.evaluate.subgroups import write_subgroups
    from selfvitmil.package import PredictionFiles

    files = PredictionFiles.read(out)
    rows = {row["slide"]: row for row in files.rows if row["model"] == package.tag}
    predictions = labelled_predictions(package, rows, labels)
    others = None
    if other is not None:
        theirs = {row["slide"]: row for row in files.rows if row["model"] == other.tag}
        others = (package.tag, other.tag), labelled_predictions(other, theirs, labels)
    slides = [row.slide for row in predictions]
    columns = {column: {slide: _value(labels, slide, column) for slide in slides} for column in labels.columns}
    found = validate_predictions(
        predictions, package.classes, evaluate, references=package.references, others=others, columns=columns,
        outcome=package.outcome, sets=package.set_threshold,
    )  # fmt: skip
    notes = _notes(labels, rows, package)
    outside = [slide for slide in slides if rows[slide].get("outside")]
    folder = StudyLayout(out).validation(package.tag)
    with lock_study(out, "predict"):
        write_predictions(folder / "predictions.csv", predictions, package.classes, package.outcome)
        info = {
            "format_version": FORMAT_VERSION,
            "model": package.to_json(),
            "labels": {"slides": len(labels.slides), "evaluated": len(slides), "out_of_distribution": len(outside)},
            **found.to_json(),
        }
        write_text(folder / "metrics.json", json.dumps(info, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
        write_csv(folder / "table.csv", _table(found, shown_metrics(package)))
        if found.subgroups:
            write_subgroups(folder / "subgroups.csv", found.subgroups)
        else:
            (folder / "subgroups.csv").unlink(missing_ok=True)
        if found.decisions is not None:
            found.decisions.write(folder, package.classes)
        charts, undrawn = _figures(folder, predictions, package, evaluate, found.decisions)
        result = ValidateResult(package, folder, found, len(labels.slides), len(outside), notes=(*notes, *undrawn))
        write_text(folder / "index.html", _page(result, charts))
    return result


def labelled_predictions(
    package: Package, rows: Mapping[str, Mapping[str, str]], labels: ExternalLabels
) -> list[Prediction]:
    """Join the labels to a model's rows of predictions.csv, by the slides' names, in the order of these.

    Raises ConfigError where no predicted slide has a label.
    """
    from selfvitmil.evaluate import Prediction

    outcome, binary = package.outcome, len(package.classes) == 2
    endings = [""] if binary else [f"_{name}" for name in package.classes]

    def values(row: Mapping[str, str], stream: str) -> tuple[float, ...] | None:
        cells = [row.get(f"{stream}{ending}", "") for ending in endings]
        if outcome is not None:
            cells = [row.get(name, "") for name in outcome.score_names] if stream == "probability" else [""]
        return tuple(map(float, cells)) if all(cells) else None

    found: list[Prediction] = []
    for slide, row in sorted(rows.items()):
        own, score = labels.of(slide), values(row, "probability")
        if own is None or score is None:
            continue
        found.append(
            Prediction(
                method=package.method, slide=slide, patient=own.patient, split=package.split, part="test",
                label=own.label, seed=None, score=score, max=values(row, "max"), bag=values(row, "bag"),
                calibrated=values(row, "calibrated"), threshold=float(row["threshold"]) if row["threshold"] else None,
                threshold_from=row["threshold_from"], decision=_decision(package, row["decision"]),
                protocol=package.about["protocol"],
            )
        )  # fmt: skip
    if not found:
        example = next(iter(labels.names.values()), "")
        raise ConfigError(
            f"{labels.table}: none of its {len(labels.slides)} labelled slides has a prediction",
            f"it names for instance {example!r}, and predictions are of {listing(sorted(rows), 3) or 'no slide'}",
            "Give slides and labels by the same names (the file's name, with or without its suffix)",
            code="no-labelled-predictions",
        )
    return found


def _decision(package: Package, words: str) -> int | None:
    """Return the index of a decision among the classes, or the groups of another outcome; None without any."""
    names = package.classes if package.outcome is None else package.outcome.groups
    return names.index(words) if names else None


def _value(labels: ExternalLabels, slide: str, column: str) -> str | None:
    own = labels.of(slide)
    return None if own is None else own.values[column]


def _notes(labels: ExternalLabels, rows: Mapping[str, Any], package: Package) -> list[str]:
    """Return which slides take no part, and what is not known."""
    predicted = {name_key(slide) for slide in rows}
    missing = [labels.names[key] for key in labels.slides if key not in predicted]
    bare = [slide for slide in rows if labels.of(slide) is None]
    notes = [f"note: {text}" for text in labels.warnings]
    if missing:
        notes.append(f"note: {len(missing)} labelled slides have no prediction and take no part: {listing(missing, 5)}")
    if bare:
        notes.append(f"note: {len(bare)} predicted slides have no label and take no part: {listing(bare, 5)}")
    if not package.references:
        notes.append("note: the package holds no metrics of its own slides, so no drift is shown; package it again")
    elif all(each.scores is None for each in package.references) and len(package.classes) == 2:
        notes.append(
            "note: the package is of an earlier version, without scores of its own slides: drift of scores and "
            "calibration is not shown; package the model again"
        )
    return notes


# ---------------------------------------------------------------------------------------------------- output


def _table(found: ExternalValidation, shown: Sequence[str]) -> list[list[Any]]:
    """Return metrics of both levels and changes as rows of a CSV table."""
    rows: list[list[Any]] = [["level", "metric", "value", "low", "high", "against", "before", "difference"]]
    for level in found.levels:
        for name in shown:
            own = level.metrics.get(name)
            if own is not None:
                cells = [own["value"], *("" if own.get(end) is None else own[end] for end in ("low", "high"))]
                rows.append([level.level, name, *cells, "", "", ""])
        if level.calibration is not None:
            for name in ("in_the_large", "slope"):
                limits = getattr(level.calibration, name)
                if limits is not None:
                    rows.append([level.level, name, limits.value, limits.low, limits.high, "", "", ""])
    for each in found.changes:
        limits = ["" if end is None else end for end in (each.low, each.high)]
        rows.append(["slide", each.metric, each.now, *limits, each.against, each.before, each.difference])
    return rows


SHOWN = (
    "auc", "pr_auc", "sensitivity", "specificity", "ppv", "npv", "accuracy", "balanced_accuracy", "f1", "macro_f1",
    "brier", "ece",
)  # fmt: skip
"""Metrics of the table, of classes."""


def shown_metrics(package: Package) -> tuple[str, ...]:
    """Return the metrics of the table."""
    return SHOWN if package.outcome is None else tuple(package.outcome.shown_metrics)


def _figures(
    folder: Path, predictions: Sequence[Prediction], package: Package, evaluate: EvaluateSettings,
    decisions: Decisions | None,
) -> tuple[list[str], list[str]]:  # fmt: skip
    """Write ROC curve, calibration and decision curve; return their SVG texts, and why one could not be drawn."""
    from selfvitmil.evaluate import samples_of
    from selfvitmil.evaluate.figures import calibration_figure, decision_figure, roc_figure
    from selfvitmil.evaluate.method_metrics import normalized

    if package.outcome is not None:
        from selfvitmil.evaluate.outcome_figures import drawn
        from selfvitmil.evaluate.outcome_results import scored_predictions

        scored = scored_predictions(package.outcome, predictions, "patient", predictions[0].threshold, evaluate)
        return _draw(folder, dict(drawn(package.outcome, scored, package.name)))
    samples = samples_of(predictions)
    binary = len(package.classes) == 2
    scores, probabilities = (array[:, 0] if binary else array for array in (samples.scores, samples.probabilities))
    threshold = samples.thresholds[0] if samples.thresholds else None
    shared: dict[str, Any] = {
        "class_names": package.classes, "threshold": threshold, "threshold_from": ", ".join(samples.threshold_from),
        "level": evaluate.confidence,
    }  # fmt: skip
    curves: dict[str, Any] = {
        "groups": np.array(samples.patients),
        "resamples": evaluate.bootstrap,
        "seed": evaluate.seed,
    }
    before: dict[str, Any] = {"uncalibrated": normalized(scores)} if samples.calibrated else {}
    draw = {
        "roc": lambda: roc_figure(samples.labels, scores, "ROC curve on the new cohort", **shared, **curves),
        "calibration": lambda: calibration_figure(
            samples.labels, probabilities, "Calibration on the new cohort", **shared, **before
        ),
    }
    if decisions is not None and decisions.curves is not None:
        curves_of, own = decisions.curves, decisions.samples
        title = "Decision curve on the new cohort"
        draw["decision_curve"] = lambda: decision_figure(curves_of, len(own), title, calibrated=own.calibrated)
    else:
        (folder / "decision_curve.svg").unlink(missing_ok=True)
    return _draw(folder, draw)


def _draw(folder: Path, draw: Mapping[str, Callable[[], str]]) -> tuple[list[str], list[str]]:
    charts: list[str] = []
    reasons: list[str] = []
    for name, make in draw.items():
        try:
            charts.append(make())
            write_text(folder / f"{name}.svg", charts[-1])
        except MetricError as error:
            (folder / f"{name}.svg").unlink(missing_ok=True)
            reasons.append(f"note: {name}.svg is not drawn: {error}")
    return charts, reasons


def _page(result: ValidateResult, charts: Sequence[str]) -> str:
    from selfvitmil.report.validation import ValidationPage, render_validation

    package, labels = result.package, result.num_labelled
    choice, found = package.choice, result.validation
    facts = {
        "model": package.tag,
        "method": package.method,
        "classes": ", ".join(package.classes),
        "outcome": "" if package.outcome is None else package.outcome.words,
        "positive class": str(package.about["positive"] or ""),
        "evaluated slides": f"{found.slide.num} of {labels} labelled",
        "patients": str(found.patient.num if found.patient is not None else found.slide.num),
        "out of distribution": f"{result.num_outside} of {found.slide.num} slides",
        "threshold": ""
        if choice.threshold is None
        else f"{choice.threshold:.3f}, {choice.threshold_from}, transferred",
        "calibration": choice.calibration_from,
    }
    facts = {name: value for name, value in facts.items() if value}
    return render_validation(ValidationPage.of(package.name, facts, found, charts, package.outcome))
