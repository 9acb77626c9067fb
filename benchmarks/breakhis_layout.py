"""Lay BreakHis out for pretrain_quality.py: OUT/{train,test}/<class>/*.jpg, no patient on both sides.

    python benchmarks/breakhis_layout.py BREAKHIS OUT [--labels label|subtype] [--seed 0]

BREAKHIS holds tiles.csv (tile, image, patient, label, subtype) and tiles/. A quarter of the patients of every class go
to the test; a patient with several classes counts under the rarest. Numbers of patients that differ only in their last
letters are specimens of one patient and stay together. Files are linked where the disk allows it, else copied.
"""

from __future__ import annotations

import argparse
import csv
import os
import re
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from selfvitmil.pretrain.probe import hold_out


def patient_of(name: str) -> str:
    """`14-22549` for `14-22549AB` and `14-22549G`."""
    return re.sub(r"[A-Z]+$", "", name)


def lay_out(source: Path, out: Path, column: str, seed: int) -> dict[str, Counter[str]]:
    """Write the folders; tiles of each side and class."""
    if out.exists() and any(out.iterdir()):
        raise SystemExit(f"{out.name}: this folder is not empty; name a new one")
    with (source / "tiles.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    classes = sorted({row[column] for row in rows})
    labels = np.array([classes.index(row[column]) for row in rows])
    test = hold_out(labels, [patient_of(row["patient"]) for row in rows], fraction=0.25, seed=seed)
    counts = {"train": Counter[str](), "test": Counter[str]()}
    for row, is_test in zip(rows, test, strict=True):
        side = "test" if is_test else "train"
        place = out / side / row[column] / row["tile"]
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(source / "tiles" / row["tile"], place)
        except OSError:  # another disk, or files of another user
            shutil.copyfile(source / "tiles" / row["tile"], place)
        counts[side][row[column]] += 1
    return counts


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, metavar="BREAKHIS")
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--labels", choices=["label", "subtype"], default="label")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(given)
    for side, counts in lay_out(arguments.source, arguments.out, arguments.labels, arguments.seed).items():
        print(f"{side}: {counts.total()} tiles, {', '.join(f'{name} {n}' for name, n in sorted(counts.items()))}")


if __name__ == "__main__":
    main()
