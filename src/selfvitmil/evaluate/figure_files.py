"""Write the figures of an evaluated method: ROC, precision-recall, calibration, confusion matrix, training history.

Splits with disjoint test sets share a figure, with curves averaged over splits: slides of different splits have scores
of different models and are not ranked together. Where test sets overlap (Monte Carlo), each split has its own files. A
figure that cannot be drawn, for example because a class is missing, is skipped, and the reason is returned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from selfvitmil import metrics
from selfvitmil.errors import MetricError
from selfvitmil.evaluate import figures
from selfvitmil.evaluate.method_metrics import Samples, are_disjoint, normalized, samples_of
from selfvitmil.evaluate.protocol import MethodResult
from selfvitmil.settings import EvaluateSettings
from selfvitmil.store.files import write_text

History = Sequence[Mapping[str, Any]]
CURVES = ("roc", "pr", "calibration", "confusion")
"""Figures of the test set."""


def figure_files(splits: Iterable[str]) -> list[str]:
    """Return the names of all files that `write_figures` may write for these splits."""
    prefixes = ("", *(f"{split}_" for split in splits))
    return [*(f"{prefix}{name}.svg" for prefix in prefixes for name in CURVES), "training.svg"]


def write_figures(
    folder: Path, result: MethodResult, evaluate: EvaluateSettings, histories: Mapping[tuple[str, int], History]
) -> list[str]:
    """Write all figures of a method; return the reasons why some were skipped. `histories` by (split, seed)."""
    reasons: list[str] = []
    splits = (None,) if are_disjoint(result.predictions) else result.splits
    for split in splits:
        prefix = "" if split is None else f"{split}_"
        for name, draw in _figures(result, split, evaluate):
            reasons += _write(folder / f"{prefix}{name}.svg", draw)
    runs = [run for run in result.runs if (run.split, run.seed) in histories]
    if runs:
        lines = [histories[run.split, run.seed] for run in runs]
        chosen = [run.epoch for run in runs]
        title, protocol = f"Training of {result.method}", _protocol(result)
        reasons += _write(
            folder / "training.svg", lambda: figures.history_figure(lines, chosen, title, protocol=protocol)
        )
    return reasons


def _write(path: Path, draw: Callable[[], str]) -> list[str]:
    try:
        text = draw()
    except MetricError as error:
        path.unlink(missing_ok=True)  # a stale figure would be taken for this run's
        return [f"{path.name} is not drawn: {error}"]
    write_text(path, text)
    return []


def _protocol(result: MethodResult) -> Literal["honest", "optimistic"]:
    return "optimistic" if result.protocol == "optimistic" else "honest"


def _figures(
    result: MethodResult, split: str | None, evaluate: EvaluateSettings
) -> Iterator[tuple[str, Callable[[], str]]]:
    ensemble = samples_of(result.predictions, split=split)
    seeds = [samples_of(result.predictions, seed=seed, split=split) for seed in result.seeds]
    rows = [row for row in result.predictions if row.part == "test" and row.seed is None and split in (None, row.split)]
    thresholds = None if rows[0].threshold is None else np.array([row.threshold for row in rows], dtype=np.float64)
    said = "; ".join(ensemble.threshold_from)
    shared: dict[str, Any] = {"class_names": result.class_names, "protocol": _protocol(result)}
    curves = shared | {"threshold": thresholds, "threshold_from": said, "groups": np.array(ensemble.patients)}
    curves["folds"] = ensemble.folds
    curves |= {"level": evaluate.confidence, "resamples": evaluate.bootstrap, "seed": evaluate.seed}
    curves["seed_scores"] = [_plain(own, "scores") for own in seeds] if len(seeds) > 1 else []
    scores, title = _plain(ensemble, "scores"), result.method
    yield "roc", lambda: figures.roc_figure(ensemble.labels, scores, f"ROC curve of {title}", **curves)
    yield "pr", lambda: figures.pr_figure(ensemble.labels, scores, f"Precision-recall curve of {title}", **curves)
    stated = shared | {"threshold": thresholds, "threshold_from": said, "level": evaluate.confidence}
    stated["folds"] = ensemble.folds
    if ensemble.calibrated:
        stated["uncalibrated"] = normalized(scores)
    probabilities = _plain(ensemble, "probabilities")
    yield (
        "calibration",
        lambda: figures.calibration_figure(ensemble.labels, probabilities, f"Calibration of {title}", **stated),
    )
    matrix = metrics.confusion_matrix(ensemble.labels, ensemble.decisions, len(result.class_names))
    told: dict[str, Any] = {"threshold_from": said, "protocol": _protocol(result), "level": evaluate.confidence}
    yield (
        "confusion",
        lambda: figures.confusion_figure(matrix, result.class_names, f"Decisions of {title}", **told),
    )


def _plain(samples: Samples, what: Literal["scores", "probabilities"]) -> Any:
    """Return (N,) for a single score, (N, C) for more."""
    array = getattr(samples, what)
    return array[:, 0] if array.shape[1] == 1 else array
