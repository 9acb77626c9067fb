"""A made cohort with feature files whose answer is known; what the tests of `evaluate` start from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import h5py
import numpy as np

from selfvitmil.cohort import Cohort, SlideRow
from selfvitmil.evaluate.dataset import Case, Cases, find_cases
from selfvitmil.tiles import TileTable, trident_attributes

DIM = 6


def tile_table(slide: str, number: int, mpp: float = 0.5) -> TileTable:
    coords = np.stack([np.arange(number) * 448, np.zeros(number, np.int64)], axis=1)
    return TileTable(slide, coords, np.ones(number, np.float32), 224, mpp, 0, slide_mpp=0.25, size_l0=(448 * 500, 448))


def write_features(folder: Path, slide: str, features: np.ndarray, encoder: str = "vit", mpp: float = 0.5) -> Path:
    """A feature file as `write_bag` makes it, but without waiting for the disk."""
    path = folder / f"features_{encoder}" / f"{slide}.h5"
    path.parent.mkdir(parents=True, exist_ok=True)
    table = tile_table(slide, len(features), mpp)
    with h5py.File(path, "w") as file:
        file.create_dataset("features", data=features.astype(np.float16)).attrs["encoder"] = encoder
        coords = file.create_dataset("coords", data=table.coords_l0)
        coords.attrs.update({**trident_attributes(table), "mpp": mpp, "level0_mpp": table.slide_mpp})
    return path


def row(slide: str, label: str | None, patient: str = "", split: str | None = None) -> SlideRow:
    return SlideRow(slide, Path("/slides", f"{slide}.svs"), label, patient, split)


def planted(
    folder: Path,
    labels: Sequence[str] = ("normal", "tumor"),
    *,
    patients: int = 12,
    slides_each: int = 1,
    shift: float = 4.0,
    splits: bool = False,
    seed: int = 0,
) -> Cases:
    """`patients` of each label; a slide of class k > 0 has some instances shifted along dimension k - 1.

    With `splits` the last quarter of each label's patients is the given test set.
    """
    generator = np.random.default_rng(seed)
    rows: list[SlideRow] = []
    files: dict[str, Path] = {}
    for k, label in enumerate(labels):
        for p in range(patients):
            for s in range(slides_each):
                slide = f"{label}_{p:02d}_{s}"
                features = generator.normal(size=(int(generator.integers(5, 12)), DIM))
                if k:
                    features[: len(features) // 3, k - 1] += shift
                files[slide] = write_features(folder, slide, features)
                side = ("test" if p >= patients * 3 // 4 else "train") if splits else None
                rows.append(row(slide, label, f"{label}_{p:02d}", side))
    return find_cases(Cohort(tuple(rows)), files, tiling="0.5mpp_224px_0px")


def fake_cases(cohort: Cohort) -> Cases:
    """Cases without files, for what never opens one."""
    usable = [one for one in cohort.rows if one.label is not None]
    cases = [
        Case(r.slide, r.patient, Path(f"{r.slide}.h5"), r.slide, cohort.classes.index(r.label or "")) for r in usable
    ]
    return Cases(tuple(cases), cohort.classes, cohort, DIM, "vit", "tiling")
