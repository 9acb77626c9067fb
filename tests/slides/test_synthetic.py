"""Synthetic slides: files that OpenSlide reads, their ground truth, and lesions that differ in morphology alone."""

from __future__ import annotations

import csv
import json
import pickle
from collections import Counter
from itertools import product
from pathlib import Path

import numpy as np
import openslide
import pytest
import shapely
from numpy.typing import NDArray
from PIL import Image
from scipy import ndimage
from scipy.stats import rankdata

from helpers.error_codes import has_code
from selfvitmil.annotations import read_annotations
from selfvitmil.errors import ConfigError
from selfvitmil.slides.synthetic import (
    SyntheticSlide,
    make_cohort,
    make_problem_files,
    make_slide,
    plan_cohort,
    write_planned,
    write_sparse_slide,
)
from selfvitmil.slides.synthetic.anatomy import grow_anatomy
from selfvitmil.slides.synthetic.cohort import CohortLayout
from selfvitmil.slides.synthetic.outcomes import follow_up
from selfvitmil.slides.synthetic.painter import Window, paint

SMALL = (1024, 1024)
GOLDEN_MEANS = [
    [224.472, 202.535, 223.856, 178.472, 136.076, 189.528, 198.413, 163.202, 204.211, 237.865, 228.707, 237.36],
    [201.694, 171.818, 205.728, 155.215, 109.805, 174.225, 162.161, 113.823, 177.176, 206.917, 181.78, 211.314],
    [197.857, 166.507, 201.739, 156.966, 109.552, 173.896, 160.791, 118.234, 177.773, 195.578, 166.764, 202.013],
    [221.711, 199.766, 218.087, 182.052, 145.556, 190.527, 180.735, 145.044, 191.255, 226.817, 213.769, 226.242],
]
"""Mean red, green, blue of the 4 x 4 squares of 256 px of the slide of seed 4 below, as rendered since version 0.1."""


def pixels_of(path: Path, level: int = 0) -> NDArray[np.uint8]:
    with openslide.OpenSlide(path) as slide:
        return np.asarray(slide.read_region((0, 0), level, slide.level_dimensions[level]).convert("RGB"))


# ---------------------------------------------------------------------------------------------------- files


def test_the_same_arguments_give_the_same_bytes(tmp_path: Path):
    for name, seed in (("a", 4), ("b", 4), ("c", 5)):
        make_slide(tmp_path / f"{name}.svs", seed, size=SMALL, lesions=1, lesion_um=(80, 120))
    a, b, c = ((tmp_path / f"{name}.svs").read_bytes() for name in "abc")
    assert a == b
    assert a != c
    means = pixels_of(tmp_path / "a.svs").reshape(4, 256, 4, 256, 3).mean((1, 3)).reshape(4, 12)
    np.testing.assert_allclose(means, GOLDEN_MEANS, atol=0.02)  # other CPUs may round single pixels differently


@pytest.mark.parametrize(
    ("layout", "mpp", "vendor", "downsamples"),
    [
        ("svs40", 0.25, "aperio", [1, 4]),
        ("svs20", 0.2527, "aperio", [1, 2, 4, 8]),
        ("tiff", 0.243, "generic-tiff", [1, 2, 4, 8]),
        ("tiff", 0.5, "generic-tiff", [1, 2, 4, 8]),
    ],
)
def test_openslide_sees_what_was_written(tmp_path: Path, layout, mpp: float, vendor: str, downsamples: list[int]):
    path = tmp_path / "made.svs"
    known = make_slide(path, 1, size=(1100, 1033), mpp=mpp, layout=layout)
    with openslide.OpenSlide(path) as slide:
        assert slide.properties["openslide.vendor"] == vendor
        assert slide.dimensions == known.size_l0 == (1100, 1033)
        assert list(slide.level_dimensions) == [(1100 // d, 1033 // d) for d in downsamples]
        assert float(slide.properties["openslide.mpp-x"]) == pytest.approx(mpp, rel=1e-6)
        assert float(slide.properties["openslide.mpp-y"]) == pytest.approx(mpp, rel=1e-6)
        assert ("thumbnail" in slide.associated_images) == (vendor == "aperio")
        if vendor == "aperio":
            small = np.asarray(slide.associated_images["thumbnail"])[..., :3]
            assert np.abs(small.mean((0, 1)) - pixels_of(path).mean((0, 1))).max() < 3
    first = pixels_of(path)
    for level, d in enumerate(downsamples[1:], start=1):
        height, width = 1033 // d, 1100 // d
        means = first[: height * d, : width * d].reshape(height, d, width, d, 3).mean((1, 3))
        difference = means - pixels_of(path, level)
        assert np.abs(difference).mean() < 6, f"level {level} is another picture"
        assert np.abs(difference.mean((0, 1))).max() < 1


def test_windows_meet_without_seams():
    """Painting a window must not depend on how the slide is divided; the blur reaches one pixel over the edge."""
    anatomy = grow_anatomy(np.random.default_rng(3), (1024, 1024), 0.25, 1, (100.0, 150.0))
    for whole, part in zip(
        paint(anatomy, Window(256, 256, 512, 512)), paint(anatomy, Window(301, 399, 200, 150)), strict=True
    ):
        np.testing.assert_array_equal(part[1:-1, 1:-1], whole[144:292, 46:244])


def test_what_cannot_be_made_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, check=has_code("lesions-do-not-fit")):
        make_slide(tmp_path / "a.svs", size=SMALL, lesions=3, lesion_um=(300, 400))
    with pytest.raises(ConfigError, check=has_code("invalid-synthetic-size")):
        make_slide(tmp_path / "a.svs", size=(300, 300))
    with pytest.raises(ConfigError, check=has_code("invalid-lesions")):
        make_slide(tmp_path / "a.svs", lesions=1, lesion_um=(300, 200))
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------------------------------------------- ground truth


Made = list[tuple[NDArray[np.uint8], SyntheticSlide]]


@pytest.fixture(scope="module")
def positives(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """The level-0 pixels of slides with lesions, as OpenSlide reads them."""
    folder = tmp_path_factory.mktemp("positives")
    made = []
    for seed, layout in enumerate(("svs40", "svs20", "tiff", "svs40"), start=10):
        path = folder / f"{seed}.svs"
        known = make_slide(path, seed, size=(3200, 3200), lesions=3, lesion_um=(150, 300), layout=layout)
        made.append((pixels_of(path), known))
    return made


def test_tissue_is_where_the_ground_truth_says(positives: Made):
    for pixels, known in positives:
        edge = round(known.tissue_mpp / known.mpp)
        rows, columns = known.tissue_mask.shape
        assert (columns * edge, rows * edge) == known.size_l0
        grey = pixels[..., 1].reshape(rows, edge, columns, edge).mean((1, 3))
        glass, tissue = np.median(grey[~known.tissue_mask]), np.median(grey[known.tissue_mask])
        assert glass > tissue + 40
        dark = grey < (glass + tissue) / 2
        overlap = (dark & known.tissue_mask).sum() / (dark | known.tissue_mask).sum()
        assert overlap > 0.85


def test_lesions_lie_in_the_tissue_and_have_the_size_asked_for(positives: Made):
    for _, known in positives:
        assert known.positive
        shapes = [shapely.Polygon(contour) for contour in known.lesions]
        assert len(shapes) == 3
        assert all(shape.is_valid for shape in shapes)
        assert shapely.union_all(shapes).area == pytest.approx(sum(shape.area for shape in shapes))
        rows, columns = np.indices(known.tissue_mask.shape)
        scale = known.tissue_mpp / known.mpp
        for shape in shapes:
            corners = np.array(shape.exterior.coords)
            longest = np.linalg.norm(corners[:, None] - corners[None], axis=-1).max() * known.mpp
            assert 80 < longest <= 301
            inside = shapely.contains_xy(shape, (columns + 0.5) * scale, (rows + 0.5) * scale)
            assert known.tissue_mask[inside].mean() > 0.75  # the lumina of glands are no tissue


def test_stains_are_those_of_the_ground_truth(positives: Made):
    """The optical densities lie in the plane of the two vectors and, save for noise, between them."""
    for pixels, known in positives:
        density = -np.log(np.maximum(pixels[4::8, 4::8].reshape(-1, 3), 1) / np.array(known.glass))
        density = density[density.sum(axis=1) > 0.6]
        normal = np.cross(*known.stain_vectors.T)
        normal /= np.linalg.norm(normal)
        thinnest = np.linalg.eigh(density.T @ density)[1][:, 0]
        assert abs(thinnest @ normal) > np.cos(np.radians(6))
        shares = np.linalg.lstsq(known.stain_vectors, density.T, rcond=None)[0]
        assert np.percentile(shares, 2, axis=1).min() > -0.12
        assert (shares.mean(axis=1) > 0.2).all()


def test_slides_of_other_seeds_are_stained_otherwise(positives: Made):
    vectors = np.array([known.stain_vectors for _, known in positives])
    assert (vectors.std(axis=0).max(axis=0) > 0.01).all()
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-9)


# ---------------------------------------------------------------------------------------------------- colour, structure


def auc(labels: NDArray[np.int64], scores: NDArray[np.float64]) -> float:
    """Chance that a positive scores higher than a negative; the better of the two directions."""
    ranks, positive = rankdata(scores), int(labels.sum())
    area = (ranks[labels == 1].sum() - positive * (positive + 1) / 2) / (positive * (len(labels) - positive))
    return max(area, 1 - area)


def logistic_scores(
    features: NDArray[np.float64], labels: NDArray[np.int64], groups: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Scores of each group by logistic regression on all others; Newton's method, both classes weighing the same."""
    design = np.column_stack([(features - features.mean(axis=0)) / features.std(axis=0), np.ones(len(features))])
    importance = np.where(labels == 1, 1 / labels.mean(), 1 / (1 - labels.mean()))
    scores = np.empty(len(labels))
    for group in np.unique(groups):
        other, weights = groups != group, np.zeros(design.shape[1])
        rows, importances = design[other], importance[other]
        for _ in range(30):
            chance = 1 / (1 + np.exp(-rows @ weights))
            curvature = (rows * (importances * chance * (1 - chance))[:, None]).T @ rows
            slope = rows.T @ (importances * (chance - labels[other]))
            weights -= np.linalg.solve(curvature + 1e-6 * np.eye(len(weights)), slope)
        scores[~other] = design[~other] @ weights
    return scores


@pytest.fixture(scope="module")
def tiles(positives: Made) -> dict[str, NDArray[np.float64]]:
    """Mean and spread of colour and a measure of structure of tiles of 112 um, of lesions and of normal tissue."""
    rows = []
    for number, (pixels, known) in enumerate(positives):
        edge = round(112 / known.mpp)
        lesion = shapely.union_all([shapely.Polygon(contour) for contour in known.lesions])
        scale = known.mpp / known.tissue_mpp
        for y, x in product(*(range(0, extent - edge, edge // 2) for extent in pixels.shape[:2])):
            box = shapely.box(x, y, x + edge, y + edge)
            share = box.intersection(lesion).area / box.area
            i, j = slice(int(y * scale), int((y + edge) * scale)), slice(int(x * scale), int((x + edge) * scale))
            if known.tissue_mask[i, j].mean() < 0.5 or 0 < share < 0.5:
                continue
            tile = pixels[y : y + edge, x : x + edge]
            rows.append([number, share > 0, *tile.mean((0, 1)), *spread(tile), coarseness(tile, known.mpp)])
    table = np.array(rows, dtype=np.float64)
    names = {"slide": 0, "label": 1, "colour": slice(2, 5), "spread": slice(5, 8), "coarseness": 8}
    return {name: table[:, columns] for name, columns in names.items()}


def spread(tile: NDArray[np.uint8]) -> NDArray[np.float64]:
    """Standard deviation of each channel at four times the pixel's size, about 1 um."""
    edge = len(tile) // 4
    return tile[: edge * 4, : edge * 4].reshape(edge, 4, edge, 4, 3).mean((1, 3)).std((0, 1))


def coarseness(tile: NDArray[np.uint8], mpp: float) -> float:
    """Contrast of detail as large as a lymphocyte over that of detail half as large."""
    grey = tile[::2, ::2, 1].astype(np.float32)
    fine, middle, coarse = (ndimage.uniform_filter(grey, round(size_um / mpp / 2)) for size_um in (1.75, 3.5, 7.0))
    return float(np.log((middle - coarse).std() / (fine - middle).std()))


def test_mean_colour_does_not_tell_lesions(tiles: dict[str, NDArray[np.float64]]):
    labels, colour = tiles["label"].astype(np.int64), tiles["colour"]
    assert labels.sum() > 60
    assert (1 - labels).sum() > 200
    centred = colour.copy()
    for number in np.unique(tiles["slide"]):
        centred[tiles["slide"] == number] -= colour[tiles["slide"] == number].mean(axis=0)
    for features in (colour, centred):
        for channel in features.T:
            assert auc(labels, channel) < 0.7
        assert auc(labels, logistic_scores(features, labels, tiles["slide"])) < 0.7


def test_spread_of_colour_does_not_tell_lesions(tiles: dict[str, NDArray[np.float64]]):
    """Nuclei that are paler or darker than lymphocytes would: no network is needed to see contrast."""
    labels, spreads = tiles["label"].astype(np.int64), tiles["spread"]
    for channel in spreads.T:
        assert auc(labels, channel) < 0.75
    both = np.column_stack([tiles["colour"], spreads])
    assert auc(labels, logistic_scores(both, labels, tiles["slide"])) < 0.8


def test_structure_tells_lesions(tiles: dict[str, NDArray[np.float64]]):
    """The task can be solved: whole lymphocytes stand out from what is round them, tumour nuclei by their chromatin."""
    labels = tiles["label"].astype(np.int64)
    assert auc(labels, tiles["coarseness"]) > 0.9


# ---------------------------------------------------------------------------------------------------- cohorts


def test_patients_lie_in_one_split_and_shares_are_kept():
    plans = plan_cohort(slides=60, positives=0.4, slides_per_patient=3, test_fraction=0.3, seed=2)
    splits: dict[str, set[str]] = {}
    for plan in plans:
        splits.setdefault(plan.patient, set()).add(plan.split)
    assert all(len(found) == 1 for found in splits.values())
    assert max(Counter(plan.patient for plan in plans).values()) == 3
    assert sum(plan.label == "tumor" for plan in plans) == 24
    assert all((plan.lesions > 0) == (plan.label == "tumor") for plan in plans)
    assert 0.2 < sum("test" in found for found in splits.values()) / len(splits) < 0.4
    assert {(plan.label, plan.split) for plan in plans} == set(product(("normal", "tumor"), ("train", "test")))
    assert len({plan.mpp for plan in plans}) == 3
    assert len({plan.layout for plan in plans}) == 3


@pytest.mark.parametrize("layout", ["plain", "camelyon16"])
def test_a_slide_does_not_depend_on_how_many_there_are(layout):
    many = plan_cohort(slides=30, seed=7, layout=layout)
    assert plan_cohort(slides=11, seed=7, layout=layout) == many[:11]
    assert plan_cohort(slides=11, seed=8, layout=layout) != many[:11]
    assert len({plan.seed for plan in many}) == 30
    assert pickle.loads(pickle.dumps(many)) == many


def test_a_plain_cohort(tmp_path: Path):
    written = make_cohort(tmp_path, slides=6, seed=1, size=SMALL)
    with (tmp_path / "cohort.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["slide", "path", "label", "patient", "split", "mpp", "annotation"]
    with (tmp_path / "labels.csv").open(newline="") as file:
        labels = list(csv.DictReader(file))
    assert [(row["slide"], row["label"]) for row in labels] == [(row["slide"], row["label"]) for row in rows]
    assert {row["label"] for row in rows} == {"normal", "tumor"}
    assert {row["split"] for row in rows} == {"train", "test"}
    for row, known in zip(rows, written, strict=True):
        assert (tmp_path / row["path"]).is_file()
        assert known.positive == (row["label"] == "tumor") == bool(row["annotation"])
        stored = json.loads((tmp_path / "truth" / f"{row['slide']}.json").read_text())
        np.testing.assert_allclose(stored["stain_vectors"], known.stain_vectors, atol=1e-5)
        mask = np.asarray(Image.open(tmp_path / "truth" / f"{row['slide']}_tissue.png")) > 0
        np.testing.assert_array_equal(mask, known.tissue_mask)
        if known.positive:
            for suffix in (".xml", ".geojson"):
                annotations = read_annotations(tmp_path / Path(row["annotation"]).with_suffix(suffix))
                assert [annotation.kind for annotation in annotations] == ["tumour"] * len(known.lesions)
                for annotation, lesion in zip(annotations, known.lesions, strict=True):
                    np.testing.assert_allclose(annotation.polygon, lesion, atol=0.006)


def test_a_camelyon16_cohort(tmp_path: Path):
    written = make_cohort(tmp_path, slides=6, seed=1, size=SMALL, layout="camelyon16", hostile=True)
    files = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.tif") if "hostile" not in path.parts}
    assert files == {known.plan.path.as_posix() for known in written}
    assert "training/normal/normal_001.tif" in files
    assert "training/tumor/tumor_001.tif" in files
    assert (tmp_path / "training/lesion_annotations/tumor_001.xml").is_file()
    assert {known.mpp for known in written} == {0.243, 0.226}
    reference = [line.split(",") for line in (tmp_path / "testing/reference.csv").read_text().splitlines()]
    tests = {known.name: known for known in written if known.plan.split == "test"}
    assert [row[0] for row in reference] == list(tests)
    for name, kind, *rest in reference:
        assert (kind == "Tumor") == tests[name].positive
        assert rest == (["IDC", "Micro"] if tests[name].positive else ["None", "None"])
        assert (tmp_path / f"testing/lesion_annotations/{name}.xml").exists() == tests[name].positive
    assert (tmp_path / "hostile").is_dir()


def test_a_planned_slide_is_the_same_wherever_it_is_written(tmp_path: Path):
    plan = plan_cohort(slides=2, seed=3, size=SMALL)[1]
    for name in ("a", "b"):
        write_planned(pickle.loads(pickle.dumps(plan)), tmp_path / name)
    files = [path.relative_to(tmp_path / "a") for path in sorted((tmp_path / "a").rglob("*")) if path.is_file()]
    assert len(files) >= 3
    for file in files:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


# ---------------------------------------------------------------------------------------------------- odd files


def test_hostile_files_are_what_their_names_say(tmp_path: Path):
    paths = make_problem_files(tmp_path)
    broken = {"truncated", "zero_bytes", "wrong_suffix", "text"}
    whole = {"single_level", "no_mpp", "all_white", "all_black", "odd_size", "unicode_name"}
    assert set(paths) == broken | whole
    assert sorted(paths.values()) == sorted(tmp_path.iterdir())
    for name in broken:
        with pytest.raises(openslide.OpenSlideError):
            pixels_of(paths[name])
    assert paths["zero_bytes"].stat().st_size == 0
    assert pixels_of(paths["all_white"]).min() == 255
    assert pixels_of(paths["all_black"]).max() == 0
    assert not paths["unicode_name"].name.isascii()
    for name in whole:
        with openslide.OpenSlide(paths[name]) as slide:
            assert ("openslide.mpp-x" in slide.properties) == (name != "no_mpp")
            assert (slide.level_count == 1) == (name == "single_level")
            assert (slide.dimensions == (1001, 873)) == (name == "odd_size")


def test_a_huge_slide_is_small_on_disk(tmp_path: Path):
    path = tmp_path / "huge.svs"
    known = write_sparse_slide(path, (60_000, 40_000), copies=3, lesions=1)
    assert path.stat().st_size < 8e6
    assert len(known.lesions) == 3
    with openslide.OpenSlide(path) as slide:
        assert slide.dimensions == (60_000, 40_000)
        step = known.tissue_mpp / known.mpp
        rng = np.random.default_rng(0)
        for is_tissue in (True, False):
            spots = np.argwhere(known.tissue_mask == is_tissue)
            spots = spots[rng.choice(len(spots), 40)]
            means = [slide.read_region((int(x * step), int(y * step)), 0, (32, 32)) for y, x in spots.tolist()]
            greys = np.array([np.asarray(mean)[..., :3].mean() for mean in means])
            assert (np.median(greys) < 200) == is_tissue
        for contour in known.lesions:
            x, y = contour.mean(axis=0)
            assert np.asarray(slide.read_region((int(x), int(y)), 0, (32, 32)))[..., :3].mean() < 215


@pytest.mark.parametrize("layout", ["plain", "camelyon16"])
@pytest.mark.parametrize("slides", [6, 12, 50])
def test_scanners_tell_no_label(layout: CohortLayout, slides: int) -> None:
    """Both labels have the same file layouts and microns per pixel, in small cohorts too."""
    for seed in range(5):
        plans = plan_cohort(slides=slides, seed=seed, layout=layout)
        normal, tumor = (
            Counter((plan.layout, plan.mpp) for plan in plans if plan.label == label) for label in ("normal", "tumor")
        )
        assert (normal - tumor).total() <= 1
        assert (tumor - normal).total() <= 1


# ---------------------------------------------------------------------------------------------------- outcomes


def test_planted_outcomes_follow_from_the_tumour_that_was_drawn(tmp_path: Path):
    made = make_cohort(tmp_path, slides=10, seed=4, size=(1024, 1024), positives=0.8, outcomes=True)
    with (tmp_path / "cohort.csv").open() as file:
        rows = {row["slide"]: row for row in csv.DictReader(file)}
    followed: dict[str, set[tuple[str, str]]] = {}
    for slide in made:
        row, truth = rows[slide.name], json.loads((tmp_path / "truth" / f"{slide.name}.json").read_text())
        tissue = np.asarray(Image.open(tmp_path / "truth" / f"{slide.name}_tissue.png")).astype(bool)
        area = sum(shapely.Polygon(contour).area for contour in truth["lesions_l0"]) * slide.mpp**2
        percent = 100 * area / (tissue.sum() * slide.tissue_mpp**2)
        assert float(row["tumor_percent"]) == pytest.approx(percent, abs=0.01)
        assert row["metastasis"] == str(int(bool(truth["lesions_l0"]))) == str(int(row["label"] == "tumor"))
        assert row["grade"] == str(1 + (float(row["tumor_percent"]) >= 5) + (float(row["tumor_percent"]) >= 15))
        followed.setdefault(row["patient"], set()).add((row["time"], row["event"]))
    assert all(len(own) == 1 for own in followed.values())
    assert len({row["tumor_percent"] for row in rows.values()}) > 5


def test_planted_risk_orders_the_times():
    """The hazard of many patients grows with their tumour as documented (log hazard 0.15 per percent)."""
    generator = np.random.default_rng(0)
    percent = generator.uniform(0, 40, 400)
    time, event = np.array([follow_up(seed, own) for seed, own in enumerate(percent)]).T
    assert 0.6 < event.mean() < 0.95
    coefficient, step = 0.0, 1.0
    for _ in range(30):  # Cox regression on one covariate by Newton's method
        weight = np.exp(coefficient * percent)
        at_risk = time[None, :] >= time[:, None]
        total = at_risk @ weight
        mean, square = at_risk @ (weight * percent) / total, at_risk @ (weight * percent**2) / total
        step = (event * (percent - mean)).sum() / (event * (square - mean**2)).sum()
        coefficient += step
    assert abs(step) < 1e-6
    assert coefficient == pytest.approx(0.15, abs=0.02)


def test_fibrosis_adds_stroma_and_leaves_lesions_where_they_are(tmp_path: Path):
    without, with_it = (
        grow_anatomy(np.random.default_rng(7), (4096, 4096), 0.25, 1, (150, 300), fibrosis=own) for own in (False, True)
    )
    inside = without.depth_um > 60
    assert with_it.stroma[inside].mean() > 1.5 * without.stroma[inside].mean()
    assert np.array_equal(with_it.depth_um, without.depth_um)
    assert all(np.array_equal(a, b) for a, b in zip(with_it.lesions_um, without.lesions_um, strict=True))


def test_outcomes_need_tables_with_columns(tmp_path: Path):
    with pytest.raises(ConfigError, check=has_code("outcomes-need-plain-layout")):
        plan_cohort(layout="camelyon16", outcomes=True)
