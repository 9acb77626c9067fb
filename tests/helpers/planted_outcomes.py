"""Feature files whose tiles determine a risk, a value, a grade and two labels, and the table that tells of them."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np

from helpers.planted import DIM, write_features

COLUMNS = ("patient", "slide", "split", "time", "event", "value", "grade", "mutated", "inflamed")


def planted_outcomes(folder: Path, *, patients: int = 60, permuted: bool = False, seed: int = 0) -> Path:
    """Write `features_vit` and `table.csv` to the folder; return the table.

    The share of tiles that are shifted along dimension 0 is the planted risk: hazard, value and grade grow with it.
    Tiles shifted along dimensions 1 and 2 make the labels `mutated` and `inflamed`. With `permuted` the outcomes are
    dealt to other patients, so that tiles tell nothing. Every third patient is of the test set.
    """
    generator = np.random.default_rng(seed)
    rows: list[dict[str, object]] = []
    for number in range(patients):
        share, mutated, inflamed = generator.uniform(), number % 2, number // 2 % 2
        features = generator.normal(size=(12, DIM))
        features[: round(12 * share), 0] += 5.0
        features[-2:, 1] += 6.0 * mutated
        features[-4:-2, 2] += 6.0 * inflamed
        name = f"s{number:03d}"
        write_features(folder, name, features[generator.permutation(12)])
        event_time, follow_up = 20 * np.exp(-4 * share) * generator.exponential() ** 0.3, generator.uniform(0.5, 20)
        row = {
            "time": round(min(event_time, follow_up) + 0.01, 4),
            "event": int(event_time <= follow_up),
            "value": round(100 * share + generator.normal(), 3),
            "grade": ("low", "middle", "high")[min(2, int(3 * share))],
            "mutated": mutated,
            "inflamed": inflamed,
        }
        rows.append(
            {"patient": f"p{number:03d}", "slide": name, "split": "test" if number % 3 == 2 else "train", **row}
        )
    if permuted:
        dealt = [{name: row[name] for name in COLUMNS[3:]} for row in rows]
        rows = [{**row, **dealt[place]} for row, place in zip(rows, generator.permutation(patients), strict=True)]
    table = folder / "table.csv"
    with table.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    return table
