"""A cohort of synthetic slides: planned cheaply, written slide by slide in any order by any process, finished with
tables.

    plans = plan_cohort(slides=12, seed=1)
    truths = [write_planned(plan, folder) for plan in plans]
    finish_cohort(folder, truths)

Slide k of a seed does not depend on the number of slides: its label, patient, split and pixels follow from the seed and
k.

    plain/                                          camelyon16/
      slides/slide_001.svs, slide_002.tif ...         training/normal/normal_001.tif, training/tumor/tumor_001.tif
      annotations/slide_002.xml, .geojson             training/lesion_annotations/tumor_001.xml
      labels.csv, cohort.csv                          testing/images/test_001.tif, testing/reference.csv
      truth/slide_001.json, slide_001_tissue.png      testing/lesion_annotations/test_002.xml, truth/ as on the left
"""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

import numpy as np
from PIL import Image

from selfvitmil.annotations import Annotation, write_annotations
from selfvitmil.errors import ConfigError
from selfvitmil.slides.synthetic.pyramid import FORMS, Layout
from selfvitmil.slides.synthetic.slide import SlideTruth, make_hostile, make_slide
from selfvitmil.store.files import write_bytes, write_csv, write_text

CohortLayout = Literal["plain", "camelyon16"]

PLAIN_MPP = (0.25, 0.243, 0.2527)
CAMELYON16_MPP = (0.243, 0.226)
MACRO_UM = 2000.0
"""Diameter from which Camelyon16 calls a metastasis a macrometastasis."""


@dataclass(frozen=True)
class SlidePlan:
    """Specification of one slide of a cohort."""

    name: str
    cohort_layout: CohortLayout
    label: Literal["normal", "tumor"]
    split: Literal["train", "test"]
    patient: str
    seed: int
    size: tuple[int, int]
    mpp: float
    layout: Layout
    lesions: int
    lesion_um: tuple[float, float]

    @property
    def path(self) -> PurePosixPath:
        """Path of the slide in the cohort's folder."""
        file = self.name + FORMS[self.layout].suffix
        if self.cohort_layout == "plain":
            return PurePosixPath("slides", file)
        if self.split == "test":
            return PurePosixPath("testing", "images", file)
        return PurePosixPath("training", self.label, file)

    @property
    def annotations(self) -> tuple[PurePosixPath, ...]:
        """Paths of its lesion annotations; empty without lesions."""
        if not self.lesions:
            return ()
        if self.cohort_layout == "plain":
            return tuple(PurePosixPath("annotations", self.name + suffix) for suffix in (".xml", ".geojson"))
        part = "testing" if self.split == "test" else "training"
        return (PurePosixPath(part, "lesion_annotations", f"{self.name}.xml"),)


@dataclass(frozen=True, eq=False)
class PlannedTruth(SlideTruth):
    """Ground truth of a slide of a cohort."""

    plan: SlidePlan


def plan_cohort(
    *,
    slides: int = 12,
    positives: float = 0.5,
    slides_per_patient: int = 2,
    seed: int = 0,
    size: tuple[int, int] = (4096, 4096),
    mpp: float | None = None,
    layout: CohortLayout = "plain",
    test_fraction: float = 0.33,
) -> list[SlidePlan]:
    """Specify all slides of a cohort without writing any.

    Patients have one to `slides_per_patient` slides (one in the `camelyon16` layout), all in the same split; labels are
    per slide. `positives` and `test_fraction` are the fractions of tumour slides and of test patients. Without `mpp`,
    slides differ in their microns per pixel, like slides of several scanners.
    """
    if slides < 1 or slides_per_patient < 1 or not (0 <= positives <= 1 and 0 <= test_fraction <= 1):
        raise ConfigError(
            f"invalid cohort: {slides} slides, {slides_per_patient} per patient, {positives:g} positive, "
            f"{test_fraction:g} for testing",
            "counts start at 1, and fractions are between 0 and 1",
            "Correct the invalid value",
            code="invalid-synthetic-cohort",
        )
    most = slides_per_patient if layout == "plain" else 1
    places = _places(seed, positives, test_fraction, most)
    scanners = _scanners(seed, layout)
    numbers: Counter[str] = Counter()
    ranks: Counter[str] = Counter()
    plans: list[SlidePlan] = []
    for k, (patient, split, label) in enumerate(itertools.islice(places, slides)):
        kind = "slide" if layout == "plain" else "test" if split == "test" else label
        numbers[kind] += 1
        own_seed = int(np.random.SeedSequence(seed, spawn_key=(k,)).generate_state(1)[0])
        plan = SlidePlan(
            name=f"{kind}_{numbers[kind]:03d}",
            cohort_layout=layout,
            label=label,
            split=split,
            patient=f"patient_{patient:03d}",
            seed=own_seed,
            size=size,
            mpp=0.25,
            layout="tiff",
            lesions=0,
            lesion_um=(150.0, 400.0),
        )
        plans.append(_equipped(plan, mpp, scanners[ranks[label] % len(scanners)]))
        ranks[label] += 1
    return plans


def _places(
    seed: int, positives: float, test_fraction: float, slides_per_patient: int
) -> Iterator[tuple[int, Literal["train", "test"], Literal["normal", "tumor"]]]:
    """Yield (patient, split, label) of slide after slide, without end.

    Fractions hold for every prefix: every n-th slide is positive, every n-th patient among those whose first slide is
    positive (and among the others) goes to the test set.
    """
    slide = 0
    seen = {"normal": 0, "tumor": 0}
    for patient in itertools.count(1):
        rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(patient, 1)))
        count = int(rng.integers(1, slides_per_patient + 1))
        labels: list[Literal["normal", "tumor"]] = [
            "tumor" if _is_nth(k, positives) else "normal" for k in range(slide, slide + count)
        ]
        split = "test" if _is_nth(seen[labels[0]], test_fraction) else "train"
        seen[labels[0]] += 1
        slide += count
        for label in labels:
            yield patient, split, label


def _is_nth(k: int, share: float) -> bool:
    """Return whether the k-th of a sequence is chosen if `share` of them are, evenly spread."""
    return int((k + 1) * share + 0.5) > int(k * share + 0.5)


def _scanners(seed: int, layout: CohortLayout) -> list[tuple[Layout, float]]:
    """Return (file layout, mpp) in turn. Both labels use them in the same order, so that the scanner does not predict
    the label."""
    if layout == "camelyon16":
        return [("tiff", mpp) for mpp in CAMELYON16_MPP]
    layouts: tuple[Layout, ...] = ("svs40", "svs40", "svs20", "tiff")
    pairs = list(itertools.product(layouts, PLAIN_MPP))
    order = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(0, 2))).permutation(len(pairs))
    return [pairs[k] for k in order]


def _equipped(plan: SlidePlan, mpp: float | None, scanner: tuple[Layout, float]) -> SlidePlan:
    """Return the plan with its scanner, and with lesions for a tumour slide."""
    layout, mpp = scanner[0], mpp or scanner[1]
    short_um = min(plan.size) * mpp
    largest = min(400.0, 0.5 * short_um)
    lesion_um = (min(200.0, 0.7 * largest), largest)
    lesion_rng = np.random.default_rng(plan.seed)
    lesions = int(lesion_rng.integers(1, 4 if short_um > 700 else 2)) if plan.label == "tumor" else 0
    return dataclasses.replace(plan, layout=layout, mpp=mpp, lesions=lesions, lesion_um=lesion_um)


def write_planned(plan: SlidePlan, folder: Path) -> PlannedTruth:
    """Write one slide of a cohort with its annotations and ground truth."""
    truth = make_slide(
        folder / plan.path,
        plan.seed,
        size=plan.size,
        mpp=plan.mpp,
        lesions=plan.lesions,
        lesion_um=plan.lesion_um,
        layout=plan.layout,
    )
    outlines = [Annotation(f"lesion {k}", "Tumor", ring.round(2)) for k, ring in enumerate(truth.lesions, start=1)]
    for path in plan.annotations:
        write_annotations(folder / path, outlines)
    described = {**truth.to_json(), "patient": plan.patient, "label": plan.label, "split": plan.split}
    write_text(folder / "truth" / f"{plan.name}.json", json.dumps(described) + "\n")
    mask = io.BytesIO()
    Image.fromarray(truth.tissue_mask.astype(np.uint8) * 255).save(mask, "png")
    write_bytes(folder / "truth" / f"{plan.name}_tissue.png", mask.getvalue())
    fields = {field.name: getattr(truth, field.name) for field in dataclasses.fields(truth)}
    return PlannedTruth(**fields, plan=plan)


def finish_cohort(folder: Path, truths: Sequence[PlannedTruth]) -> None:
    """Write the tables of the written slides."""
    plain = [truth.plan for truth in truths if truth.plan.cohort_layout == "plain"]
    if plain:
        rows = [(plan.name, plan.patient, plan.label, plan.split) for plan in plain]
        write_csv(folder / "labels.csv", [("slide", "patient", "label", "split"), *rows])
        table: list[tuple[object, ...]] = [("slide", "path", "label", "patient", "split", "mpp", "annotation")]
        for plan in plain:
            annotation = plan.annotations[0] if plan.annotations else ""
            table.append((plan.name, plan.path, plan.label, plan.patient, plan.split, "", annotation))
        write_csv(folder / "cohort.csv", table)
    tests = [truth for truth in truths if truth.plan.cohort_layout == "camelyon16" and truth.plan.split == "test"]
    if tests:
        write_csv(folder / "testing" / "reference.csv", [_reference_row(truth) for truth in tests])


def _reference_row(truth: SlideTruth) -> tuple[str, str, str, str]:
    if not truth.positive:
        return truth.name, "Normal", "None", "None"
    largest = max(float(np.ptp(outline, axis=0).max()) * truth.mpp for outline in truth.lesions)
    return truth.name, "Tumor", "IDC", "Macro" if largest >= MACRO_UM else "Micro"


def make_cohort(
    folder: Path,
    *,
    slides: int = 12,
    positives: float = 0.5,
    slides_per_patient: int = 2,
    seed: int = 0,
    size: tuple[int, int] = (4096, 4096),
    mpp: float | None = None,
    layout: CohortLayout = "plain",
    hostile: bool = False,
    test_fraction: float = 0.33,
) -> list[PlannedTruth]:
    """Plan, write and finish a cohort in this process; `hostile` adds a folder of files that test error handling."""
    plans = plan_cohort(
        slides=slides,
        positives=positives,
        slides_per_patient=slides_per_patient,
        seed=seed,
        size=size,
        mpp=mpp,
        layout=layout,
        test_fraction=test_fraction,
    )
    truths = [write_planned(plan, folder) for plan in plans]
    finish_cohort(folder, truths)
    if hostile:
        make_hostile(folder / "hostile")
    return truths
