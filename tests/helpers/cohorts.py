"""Cohort tables for tests."""

from __future__ import annotations

import csv
from pathlib import Path

from selfvitmil.cohort import Cohort


def cohort_file(folder: Path, names: list[str], columns: dict[str, list[str]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "cohort.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["slide", "path", *columns])
        writer.writerows(
            [name, f"{name}.svs", *(cells[k] for cells in columns.values())] for k, name in enumerate(names)
        )
    return folder / "cohort.csv"


def table(path: Path, text: str) -> Path:
    """Write a table; return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode("utf-8"))
    return path


def files(root: Path, *names: str) -> Path:
    """Create empty files below a folder; return the folder."""
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    return root


def labels_of(cohort: Cohort) -> dict[str, str | None]:
    """Return the label of every slide."""
    return {row.slide: row.label for row in cohort.rows}
