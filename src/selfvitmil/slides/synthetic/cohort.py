"""A cohort of synthetic slides: planned cheaply, written slide by slide in any order by any process, finished with
tables.

    plans = plan_cohort(slides=12, seed=1)
    written = [write_planned(plan, folder) for plan in plans]
    finish_cohort(folder, written)

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
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from selfvitmil.annotations import Annotation, write_annotations
from selfvitmil.errors import ConfigError
from selfvitmil.geometry import size_at_mpp
from selfvitmil.slides.synthetic.anatomy import Anatomy, grow_anatomy, is_tissue
from selfvitmil.slides.synthetic.colour import Palette, Stain, draw_stain, mix_palette, render
from selfvitmil.slides.synthetic.outcomes import burden_of, has_fibrosis, planted_outcomes
from selfvitmil.slides.synthetic.painter import Window
from selfvitmil.slides.synthetic.pyramid import (
    FORMS,
    EncodedLevel,
    EncodedPyramid,
    Layout,
    Pixels,
    Render,
    encode_jpeg,
    encode_pyramid,
    write_pyramid,
)
from selfvitmil.store.files import write_bytes, write_csv, write_text

# ---------------------------------------------------------------------------------------------------- one slide

TISSUE_MPP = 8.0
JPEG_QUALITY = 85
SMALLEST_SIDE_UM = 200.0
SMALLEST_LESION_UM = 40.0


@dataclass(frozen=True, eq=False)
class SyntheticSlide:
    """A synthetic slide and its ground truth: lesions, tissue and stains."""

    name: str
    size_l0: tuple[int, int]
    mpp: float
    layout: Layout
    lesions: tuple[NDArray[np.float64], ...]
    """Contours, (K, 2) of (x, y) in level-0 pixels, first point not repeated."""
    tissue_mask: NDArray[np.bool_]
    """[y, x] at `tissue_mpp`; the insides of fat cells and vessels are not tissue."""
    tissue_mpp: float
    stain_vectors: NDArray[np.float64]
    """(3, 2): unit optical density (natural logarithm) in red, green, blue of haematoxylin and eosin."""
    stain_strengths: tuple[float, float]
    """Optical density of one unit of concentration; the nucleus of a lymphocyte has about 1.25 of haematoxylin."""
    glass: tuple[float, float, float]
    """Red, green and blue of clear glass."""

    @property
    def positive(self) -> bool:
        """Whether the slide contains a lesion."""
        return bool(self.lesions)

    def to_json(self) -> dict[str, Any]:
        """Return plain values for JSON, without the mask."""
        return {
            "slide": self.name,
            "size_l0": list(self.size_l0),
            "mpp": self.mpp,
            "layout": self.layout,
            "positive": self.positive,
            "lesions_l0": [contour.round(2).tolist() for contour in self.lesions],
            "tissue_mpp": self.tissue_mpp,
            "stain_vectors": self.stain_vectors.round(6).tolist(),
            "stain_strengths": [round(value, 6) for value in self.stain_strengths],
            "glass": [round(value, 3) for value in self.glass],
        }


def make_slide(
    path: Path,
    seed: int = 0,
    *,
    size: tuple[int, int] = (4096, 4096),
    mpp: float = 0.25,
    lesions: int = 0,
    lesion_um: tuple[float, float] = (150.0, 400.0),
    layout: Layout = "svs40",
    fibrosis: bool = False,
) -> SyntheticSlide:
    """Write a slide of a lymph node, `size` = (width, height) in level-0 pixels, with `lesions` metastases.

    The diameters of the lesions are within `lesion_um` microns; with `fibrosis` bands of collagen run through the node.
    The same arguments give identical bytes. Raises ConfigError if the lesions do not fit into the tissue.
    """
    scene = _make_scene(seed, size, mpp, lesions, lesion_um, fibrosis)
    write_pyramid(path, encode_pyramid(size, scene.render, layout, JPEG_QUALITY), mpp)
    return scene.describe(path.stem, layout)


@dataclass(frozen=True, eq=False)
class _Scene:
    """Everything needed to render a slide."""

    anatomy: Anatomy
    stain: Stain
    palette: Palette
    seed: int

    def render(self, x0: int, y0: int, width: int, height: int) -> Pixels:
        """Return the pixels of a window of level 0, (height, width, 4) RGBX."""
        return render(self.anatomy, self.palette, Window(x0, y0, width, height), self.seed)

    def describe(self, name: str, layout: Layout) -> SyntheticSlide:
        """Return the slide with its ground truth."""
        size, mpp = self.anatomy.size_px, self.anatomy.mpp
        columns, rows = size_at_mpp(size, mpp, TISSUE_MPP)
        y, x = np.mgrid[:rows, :columns]
        centres_um = (np.stack([x.ravel(), y.ravel()], axis=-1) + 0.5) * TISSUE_MPP
        return SyntheticSlide(
            name=name,
            size_l0=size,
            mpp=mpp,
            layout=layout,
            lesions=tuple(np.asarray(contour, np.float64) / mpp for contour in self.anatomy.lesions_um),
            tissue_mask=is_tissue(self.anatomy, centres_um).reshape(rows, columns),
            tissue_mpp=TISSUE_MPP,
            stain_vectors=np.asarray(self.stain.vectors, np.float64),
            stain_strengths=self.stain.strengths,
            glass=self.stain.glass,
        )


def _make_scene(
    seed: int,
    size: tuple[int, int],
    mpp: float,
    lesions: int,
    lesion_um: tuple[float, float],
    fibrosis: bool = False,
) -> _Scene:
    if not 0.1 <= mpp <= 1.0 or min(size) * mpp < SMALLEST_SIDE_UM:
        raise ConfigError(
            f"invalid synthetic slide of {size[0]} x {size[1]} pixels of {mpp:g} um",
            f"its sides must be at least {SMALLEST_SIDE_UM:g} um, its pixels 0.1 to 1 um",
            "Choose another size or mpp",
            code="invalid-synthetic-size",
        )
    if not SMALLEST_LESION_UM <= lesion_um[0] <= lesion_um[1] or lesions < 0:
        raise ConfigError(
            f"invalid request for {lesions} lesions of {lesion_um[0]:g} to {lesion_um[1]:g} um",
            f"the number must not be negative, and diameters must be an ascending range from {SMALLEST_LESION_UM:g} um",
            "Give 0 or more lesions, and the smaller diameter first",
            code="invalid-lesions",
        )
    stain_rng, anatomy_rng = np.random.default_rng(seed).spawn(2)
    stain = draw_stain(stain_rng)
    anatomy = grow_anatomy(anatomy_rng, size, mpp, lesions, lesion_um, fibrosis)
    return _Scene(anatomy, stain, mix_palette(anatomy, stain), seed)


# ---------------------------------------------------------------------------------------------------- huge


def write_sparse_slide(
    path: Path,
    size_l0: tuple[int, int] = (100_000, 100_000),
    *,
    seed: int = 0,
    mpp: float = 0.25,
    copies: int = 9,
    lesions: int = 0,
) -> SyntheticSlide:
    """Write a slide of any size in a small file: copies of one 4096-pixel node on glass, equal tiles stored once."""
    layout, edge = "svs40", 4096
    form = FORMS[layout]
    scene = _make_scene(seed, (edge, edge), mpp, lesions, (150.0, 400.0))
    node = encode_pyramid((edge, edge), scene.render, layout, JPEG_QUALITY)
    origins = _spread(size_l0, edge, copies)
    glass = np.broadcast_to(np.array([*np.round(scene.stain.glass), 0], np.uint8), (form.tile_px, form.tile_px, 4))
    blank = encode_jpeg(glass, form.jpeg_subsampling, JPEG_QUALITY)
    levels: list[EncodedLevel] = []
    for k, small in enumerate(node.levels):
        downsample = form.step**k
        size = (size_l0[0] // downsample, size_l0[1] // downsample)
        place = _placed(size, small.size, [(x // downsample, y // downsample) for x, y in origins], form.tile_px)
        levels.append(EncodedLevel(size, [blank, *small.tiles], place))
    write_pyramid(path, EncodedPyramid(layout, levels, node.thumbnail, JPEG_QUALITY), mpp)
    return _copied(scene.describe(path.stem, layout), size_l0, origins)


def _spread(size_l0: tuple[int, int], edge: int, copies: int) -> list[tuple[int, int]]:
    """Return the positions of the copies in rows, on whole tiles of every level."""
    across = int(np.ceil(np.sqrt(copies)))
    spacing = [extent // across // edge * edge for extent in size_l0]
    if min(spacing) < edge:
        raise ConfigError(
            f"{copies} nodes of {edge} pixels do not fit into {size_l0[0]} x {size_l0[1]}",
            "they would overlap",
            "Use fewer copies or a larger slide",
            code="copies-do-not-fit",
        )
    return [(k % across * spacing[0], k // across * spacing[1]) for k in range(copies)]


def _placed(
    size: tuple[int, int], node: tuple[int, int], origins: list[tuple[int, int]], tile_px: int
) -> NDArray[np.int64]:
    """Return the index of the stored tile at each position of a level: 0 is glass, the others are the node's tiles."""
    columns, rows = (-(-extent // tile_px) for extent in size)
    node_columns, node_rows = (-(-extent // tile_px) for extent in node)
    place = np.zeros((rows, columns), np.int64)
    numbers = 1 + np.arange(node_columns * node_rows).reshape(node_rows, node_columns)
    for x, y in origins:
        j, i = x // tile_px, y // tile_px
        place[i : i + node_rows, j : j + node_columns] = numbers
    return place.ravel()


def _copied(slide: SyntheticSlide, size_l0: tuple[int, int], origins: list[tuple[int, int]]) -> SyntheticSlide:
    """Return the slide with copies of its node at `origins`, in level-0 pixels."""
    columns, rows = size_at_mpp(size_l0, slide.mpp, slide.tissue_mpp)
    mask = np.zeros((rows, columns), bool)
    for x, y in origins:
        j, i = (round(value * slide.mpp / slide.tissue_mpp) for value in (x, y))
        part = mask[i : i + slide.tissue_mask.shape[0], j : j + slide.tissue_mask.shape[1]]
        part |= slide.tissue_mask[: part.shape[0], : part.shape[1]]
    contours = tuple(contour + np.array(origin) for origin in origins for contour in slide.lesions)
    return dataclasses.replace(slide, size_l0=size_l0, lesions=contours, tissue_mask=mask)


# ---------------------------------------------------------------------------------------------------- problem files


def make_problem_files(folder: Path) -> dict[str, Path]:
    """Write files that test error handling: damaged ones, and valid but unusual ones."""
    size, mpp = (1024, 1024), 0.25
    scene = _make_scene(5, size, mpp, 0, (100.0, 100.0))
    whole = encode_pyramid(size, scene.render, "svs40", 80)
    tiff = encode_pyramid(size, scene.render, "tiff", 80)
    paths = {
        "truncated": folder / "truncated.svs",
        "zero_bytes": folder / "zero_bytes.svs",
        "wrong_suffix": folder / "wrong_suffix.tif",
        "text": folder / "text.svs",
        "single_level": folder / "single_level.tif",
        "no_mpp": folder / "no_mpp.tif",
        "all_white": folder / "all_white.svs",
        "all_black": folder / "all_black.svs",
        "odd_size": folder / "odd_size.svs",
        "unicode_name": folder / "Präparat größe 切片 №1.svs",
    }
    write_pyramid(paths["unicode_name"], whole, mpp)
    content = paths["unicode_name"].read_bytes()
    write_bytes(paths["truncated"], content[: len(content) * 2 // 5])
    write_bytes(paths["zero_bytes"], b"")
    picture = io.BytesIO()
    Image.fromarray(scene.render(0, 0, 256, 256)[..., :3].copy()).save(picture, "png")
    write_bytes(paths["wrong_suffix"], picture.getvalue())
    write_bytes(paths["text"], b"This is not a slide.\n")
    write_pyramid(paths["single_level"], dataclasses.replace(tiff, levels=tiff.levels[:1]), mpp)
    write_pyramid(paths["no_mpp"], tiff, None)
    write_pyramid(paths["all_white"], encode_pyramid(size, _flat(255), "svs20", 80), mpp)
    write_pyramid(paths["all_black"], encode_pyramid(size, _flat(0), "svs20", 80), mpp)
    write_pyramid(paths["odd_size"], encode_pyramid((1001, 873), scene.render, "svs20", 80), mpp)
    return paths


def _flat(value: int) -> Render:
    return lambda x0, y0, width, height: np.full((height, width, 4), value, np.uint8)


# ---------------------------------------------------------------------------------------------------- cohort

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
    fibrosis: bool = False
    """Whether bands of collagen run through the node."""
    outcomes: bool = False
    """Whether outcomes besides the label are planted."""

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
class CohortSlide(SyntheticSlide):
    """A synthetic slide of a cohort, with the plan it was written from."""

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
    outcomes: bool = False,
) -> list[SlidePlan]:
    """Specify all slides of a cohort without writing any.

    Patients have one to `slides_per_patient` slides (one in the `camelyon16` layout), all in the same split; labels are
    per slide. `positives` and `test_fraction` are the fractions of tumour slides and of test patients. Without `mpp`,
    slides differ in their microns per pixel, like slides of several scanners. With `outcomes` patients differ in how
    much tumour their slides have, and slides in fibrosis: see `outcomes.py`.
    """
    if slides < 1 or slides_per_patient < 1 or not (0 <= positives <= 1 and 0 <= test_fraction <= 1):
        raise ConfigError(
            f"invalid cohort: {slides} slides, {slides_per_patient} per patient, {positives:g} positive, "
            f"{test_fraction:g} for testing",
            "counts start at 1, and fractions are between 0 and 1",
            "Correct the invalid value",
            code="invalid-synthetic-cohort",
        )
    if outcomes and layout != "plain":
        raise ConfigError(
            f"outcomes with the layout {layout}",
            "its tables have no columns for them",
            "Use the layout plain",
            code="outcomes-need-plain-layout",
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
        file_layout, scanner_mpp = scanners[ranks[label] % len(scanners)]
        ranks[label] += 1
        own_seed = int(np.random.SeedSequence(seed, spawn_key=(k,)).generate_state(1)[0])
        own_mpp = mpp or scanner_mpp
        lesions, lesion_um = _draw_lesions(own_seed, min(size) * own_mpp)
        if outcomes:
            lesions, lesion_um = burden_of(seed, patient, own_seed, positives).lesions(min(size) * own_mpp)
            label = "tumor" if lesions else "normal"
        plan = SlidePlan(
            name=f"{kind}_{numbers[kind]:03d}",
            cohort_layout=layout,
            label=label,
            split=split,
            patient=f"patient_{patient:03d}",
            seed=own_seed,
            size=size,
            mpp=own_mpp,
            layout=file_layout,
            lesions=lesions if label == "tumor" else 0,
            lesion_um=lesion_um,
            fibrosis=outcomes and has_fibrosis(own_seed),
            outcomes=outcomes,
        )
        plans.append(plan)
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


def _draw_lesions(seed: int, short_um: float) -> tuple[int, tuple[float, float]]:
    """Return number and range of diameters of the lesions of a slide whose shorter side has `short_um` microns."""
    largest = min(400.0, 0.5 * short_um)
    number = int(np.random.default_rng(seed).integers(1, 4 if short_um > 700 else 2))
    return number, (min(200.0, 0.7 * largest), largest)


def write_planned(plan: SlidePlan, folder: Path) -> CohortSlide:
    """Write one slide of a cohort with its annotations and ground truth."""
    slide = make_slide(
        folder / plan.path,
        plan.seed,
        size=plan.size,
        mpp=plan.mpp,
        lesions=plan.lesions,
        lesion_um=plan.lesion_um,
        layout=plan.layout,
        fibrosis=plan.fibrosis,
    )
    annotations = [Annotation(f"lesion {k}", "Tumor", ring.round(2)) for k, ring in enumerate(slide.lesions, start=1)]
    for path in plan.annotations:
        write_annotations(folder / path, annotations)
    described = {**slide.to_json(), "patient": plan.patient, "label": plan.label, "split": plan.split}
    write_text(folder / "truth" / f"{plan.name}.json", json.dumps(described) + "\n")
    mask = io.BytesIO()
    Image.fromarray(slide.tissue_mask.astype(np.uint8) * 255).save(mask, "png")
    write_bytes(folder / "truth" / f"{plan.name}_tissue.png", mask.getvalue())
    fields = {field.name: getattr(slide, field.name) for field in dataclasses.fields(SyntheticSlide)}
    return CohortSlide(**fields, plan=plan)


def finish_cohort(folder: Path, written: Sequence[CohortSlide]) -> None:
    """Write the tables of the written slides."""
    plain = [slide.plan for slide in written if slide.plan.cohort_layout == "plain"]
    if plain:
        planted = planted_outcomes([slide for slide in written if slide.plan.outcomes])
        names = list(next(iter(planted.values()))) if planted else []
        cells = {plan.name: [planted[plan.name][name] for name in names] for plan in plain if planted}
        rows = [(plan.name, plan.patient, plan.label, plan.split, *cells.get(plan.name, ())) for plan in plain]
        write_csv(folder / "labels.csv", [("slide", "patient", "label", "split", *names), *rows])
        head = ("slide", "path", "label", "patient", "split", "mpp", "annotation", *names)
        table: list[tuple[object, ...]] = [head]
        for plan in plain:
            annotation, own = plan.annotations[0] if plan.annotations else "", cells.get(plan.name, ())
            table.append((plan.name, plan.path, plan.label, plan.patient, plan.split, "", annotation, *own))
        write_csv(folder / "cohort.csv", table)
    tests = [slide for slide in written if slide.plan.cohort_layout == "camelyon16" and slide.plan.split == "test"]
    if tests:
        write_csv(folder / "testing" / "reference.csv", [_reference_row(slide) for slide in tests])


def _reference_row(slide: SyntheticSlide) -> tuple[str, str, str, str]:
    if not slide.positive:
        return slide.name, "Normal", "None", "None"
    largest = max(float(np.ptp(contour, axis=0).max()) * slide.mpp for contour in slide.lesions)
    return slide.name, "Tumor", "IDC", "Macro" if largest >= MACRO_UM else "Micro"


def make_cohort(folder: Path, *, hostile: bool = False, **options: Any) -> list[CohortSlide]:
    """Plan, write and finish a cohort in this process; `options` are those of `plan_cohort`.

    `hostile` adds a folder of files that test error handling.
    """
    written = [write_planned(plan, folder) for plan in plan_cohort(**options)]
    finish_cohort(folder, written)
    if hostile:
        make_problem_files(folder / "hostile")
    return written
