"""What a run came to, for its last lines: how well each method tells slides apart, and whether its maps show why.

Reads what `compare` wrote (`table.csv`) and what the scoring of its heatmaps wrote (`lesions.csv`); computes nothing.
With more than two classes the AUC is the macro AUC, and accuracies stand where sensitivity and specificity would.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path

from selfvitmil.settings import StudySettings
from selfvitmil.stages.train import results_name
from selfvitmil.store.layout import StudyLayout

Row = Mapping[str, str]
BINARY = {"sensitivity": "sens.", "specificity": "spec."}
SEVERAL = {"accuracy": "acc.", "balanced_accuracy": "bal. acc."}
"""Columns of decisions and their titles, with two classes and with more."""


def outcome_table(study: Path, settings: StudySettings) -> tuple[tuple[str, ...], ...]:
    """A line for each row of the comparison, header first; empty where there is none."""
    folder = _folder(study, settings)
    rows = _read(folder / "table.csv")
    if not rows:
        return ()
    hits = {row["maps_of"]: row for row in _read(folder / "lesions.csv")}
    level = rows[0]["auc_limits"].partition(",")[0]  # `95 %, DeLong ...`
    auc, decided = _auc_words(rows[0]), SEVERAL if _auc(rows[0]) == "macro_auc" else BINARY
    method = "method, OPTIMISTIC" if rows[0]["protocol"] == "optimistic" else "method"
    header = (method, "recipe", f"{auc} [{level}]", f"{auc} of seeds", *decided.values(), "hottest tile in a lesion")
    return (header, *(_cells(row, tuple(decided), hits.get(row["display_name"], {})) for row in rows))


def outcome_lines(study: Path, settings: StudySettings) -> list[str]:
    """The AUC of the study's own method in words; nothing where it was not compared."""
    method = settings.train.aggregator
    return [
        f"{_auc_words(row)} of {method}: {_interval(row, _auc(row))}, by the mean probability of {row['num_seeds']} "
        f"trainings, on {_counts(row['test_slides'])} slides ({row['test']}){_doubt(row)}"
        for row in _read(_folder(study, settings) / "table.csv")
        if row["display_name"] == method
    ]


def _folder(study: Path, settings: StudySettings) -> Path:
    """Where `compare` wrote under the protocol of these settings."""
    return StudyLayout(study).results(results_name("compare", settings))


def _read(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _counts(text: str) -> str:
    """`normal=7;tumor=5` as `7 normal and 5 tumor`."""
    return " and ".join(" ".join(reversed(part.split("="))) for part in text.split(";"))


def _auc(row: Row) -> str:
    """The column of the AUC."""
    return "macro_auc" if "macro_auc" in row else "auc"


def _auc_words(row: Row) -> str:
    return _auc(row).replace("_", " ").replace("auc", "AUC")


def _doubt(row: Row) -> str:
    text = "; OPTIMISTIC: epochs and thresholds were chosen on these" if row["protocol"] == "optimistic" else ""
    return text + "; transductive: the encoder was trained, without labels, on slides of these patients" * _seen(row)


def _seen(row: Row) -> bool:
    """Whether the encoder has seen test slides."""
    return row.get("transductive") == "yes"


def _cells(row: Row, decided: tuple[str, ...], hits: Row) -> tuple[str, ...]:
    return (
        row["display_name"] + " (transductive)" * _seen(row),
        row.get("recipe") or "-",
        _interval(row, _auc(row)),
        f"{_number(row, 'seed_auc_mean')} ± {_number(row, 'seed_auc_sd')}",
        *(_number(row, name) for name in decided),
        _number(hits, "hit_rate", digits=2),
    )


def _interval(row: Row, name: str) -> str:
    return f"{_number(row, name)} [{_number(row, f'{name}_low')}, {_number(row, f'{name}_high')}]"


def _number(row: Row, name: str, digits: int = 3) -> str:
    text = row.get(name) or ""
    return f"{float(text):.{digits}f}" if text else "-"
