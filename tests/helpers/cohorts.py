"""Cohort tables for tests."""

from __future__ import annotations

import csv
from pathlib import Path


def cohort_file(folder: Path, names: list[str], columns: dict[str, list[str]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "cohort.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["slide", "path", *columns])
        writer.writerows(
            [name, f"{name}.svs", *(cells[k] for cells in columns.values())] for k, name in enumerate(names)
        )
    return folder / "cohort.csv"
