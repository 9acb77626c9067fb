"""What a run came to, for its last lines: how well each method tells slides apart, and whether its maps show why.

Reads what `compare` wrote (`table.csv`) and what the judgement of its maps wrote (`lesions.csv`); computes nothing.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path

Row = Mapping[str, str]


def outcome_table(study: Path) -> tuple[tuple[str, ...], ...]:
    """A line for each row of the comparison, header first; empty where there is none."""
    rows = _read(study / "results" / "compare" / "table.csv")
    if not rows:
        return ()
    hits = {row["maps_of"]: row for row in _read(study / "results" / "compare" / "lesions.csv")}
    level = rows[0]["auc_limits"].partition(",")[0]  # `95 %, DeLong ...`
    header = ("method", f"AUC [{level}]", "AUC of seeds", "sens.", "spec.", "hottest tile in a lesion")
    return (header, *(_cells(row, hits.get(row["display_name"], {})) for row in rows))


def outcome_lines(study: Path, method: str) -> list[str]:
    """The AUC of the study's own method in words; nothing where it was not compared."""
    rows = _read(study / "results" / "compare" / "table.csv")
    return [
        f"AUC of {method}: {_interval(row, 'auc')}, by the mean probability of {row['num_seeds']} trainings, on "
        f"{_counts(row['test_slides'])} slides ({row['test']})"
        for row in rows
        if row["display_name"] == method
    ]


def _read(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _counts(text: str) -> str:
    """`normal=7;tumor=5` as `7 normal and 5 tumor`."""
    return " and ".join(" ".join(reversed(part.split("="))) for part in text.split(";"))


def _cells(row: Row, hits: Row) -> tuple[str, ...]:
    seeds = f"{_number(row, 'seed_auc_mean')} ± {_number(row, 'seed_auc_sd')}"
    return (
        row["display_name"],
        _interval(row, "auc"),
        seeds,
        _number(row, "sensitivity"),
        _number(row, "specificity"),
        _number(hits, "hit_rate", digits=2),
    )


def _interval(row: Row, name: str) -> str:
    return f"{_number(row, name)} [{_number(row, f'{name}_low')}, {_number(row, f'{name}_high')}]"


def _number(row: Row, name: str, digits: int = 3) -> str:
    text = row.get(name) or ""
    return f"{float(text):.{digits}f}" if text else "-"
