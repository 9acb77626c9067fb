"""From cohort and feature files to cases: what is found, noted, failed or refused; two scales joined."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from helpers import planted
from selfvitmil.bags import find_bags, read_bag, write_bag
from selfvitmil.cohort import Cohort
from selfvitmil.errors import BagError, ConfigError
from selfvitmil.evaluate.dataset import CoarseScale, find_cases, join_scales
from selfvitmil.settings import TileSettings, tiling_name
from selfvitmil.store.provenance import Provenance
from selfvitmil.tiles import FORMAT_VERSION, TileTable, parent_rows, write_tiles

GENERATOR = np.random.default_rng(5)


def vectors(number: int = 4, dim: int = planted.DIM) -> np.ndarray:
    return GENERATOR.normal(size=(number, dim)).astype(np.float16)


def test_labels_are_numbered_in_class_order_and_said(tmp_path: Path):
    labels = {"a": "10", "b": "9", "c": "10"}
    cohort = Cohort(tuple(planted.row(slide, label) for slide, label in labels.items()))
    cases = find_cases(cohort, {slide: planted.write_features(tmp_path, slide, vectors()) for slide in labels})
    assert cases.class_names == ("9", "10")
    assert [(case.slide, case.label) for case in cases.cases] == [("a", 1), ("b", 0), ("c", 1)]
    assert (cases.num_classes, cases.dim, cases.encoder) == (1, planted.DIM, "vit")
    lines = cases.lines()
    assert lines[0] == "classes: 0 = 9 (1 slides), 1 = 10 (2 slides)"
    assert lines[1].startswith("positive: 10 ")


def test_the_positive_class_can_be_named(tmp_path: Path):
    labels = {"a": "MSI-H", "b": "MSS", "c": "MSI-H"}
    cohort = Cohort(tuple(planted.row(slide, label) for slide, label in labels.items()))
    files = {slide: planted.write_features(tmp_path, slide, vectors()) for slide in labels}
    cases = find_cases(cohort, files, positive="MSI-H")
    assert cases.class_names == ("MSS", "MSI-H")
    assert [case.label for case in cases.cases] == [1, 0, 1]
    assert cases.lines()[1] == "positive: MSI-H (as train.positive says); scores are its probability"
    with pytest.raises(ConfigError, match=r"train.positive 'MSI'.*MSI-H, MSS"):
        find_cases(cohort, files, positive="MSI")


def test_three_classes_have_no_positive(tmp_path: Path):
    cases = planted.planted(tmp_path, ("a", "b", "c"), patients=2)
    assert cases.num_classes == 3
    assert not any("positive" in line for line in cases.lines())


def test_bad_files_fail_alone_and_unlabelled_slides_are_a_note(tmp_path: Path):
    slides = {
        name: "normal" if k % 2 else "tumor"
        for k, name in enumerate(["good", "fine", "cut", "nan", "gone", "zero", "lost"])
    }
    rows = [planted.row(slide, label) for slide, label in slides.items()] + [planted.row("bare", None)]
    files = {slide: planted.write_features(tmp_path, slide, vectors(400)) for slide in [*slides, "bare", "stranger"]}
    files["cut"].write_bytes(files["cut"].read_bytes()[:3000])
    broken = vectors()
    broken[2, 3] = np.nan
    planted.write_features(tmp_path, "nan", broken)
    planted.write_features(tmp_path, "zero", vectors(0))
    del files["gone"]
    files["lost"].unlink()
    cases = find_cases(Cohort(tuple(rows)), files, stage="compare")
    assert [case.slide for case in cases.cases] == ["good", "fine"]
    assert {failure.slide for failure in cases.failures} == {"cut", "nan", "gone", "zero", "lost"}
    assert {failure.stage for failure in cases.failures} == {"compare"}
    told = {failure.slide: failure.reason for failure in cases.failures}
    assert "row 2" in told["nan"]
    assert "empty" in told["zero"]
    assert "no feature file" in told["gone"]
    assert all(failure.remedy and str(tmp_path) not in failure.reason for failure in cases.failures)
    assert any("bare" in note and "no label" in note for note in cases.notes)
    assert any("stranger" in note for note in cases.notes)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dim": 5}, ["different dimensions", "5 in odd", "6 in "]),
        ({"encoder": "resnet"}, ["different encoders", "resnet in odd", "vit in "]),
        ({"mpp": 0.25}, ["different resolutions", "0.25 um/px in odd", "0.5 um/px in "]),
    ],
)
def test_mixed_features_are_refused_with_their_list(tmp_path: Path, change: dict, words: list[str]):
    slides = {"a": "0", "b": "1", "odd": "1"}
    files = {slide: planted.write_features(tmp_path, slide, vectors()) for slide in slides}
    dim = change.pop("dim", planted.DIM)
    files["odd"] = planted.write_features(tmp_path, "odd", vectors(dim=dim), **change)
    cohort = Cohort(tuple(planted.row(slide, label) for slide, label in slides.items()))
    with pytest.raises(ConfigError) as error:
        find_cases(cohort, files)
    assert all(word in str(error.value) for word in words)


def test_mixed_magnifications_of_foreign_files_are_refused(tmp_path: Path):
    for slide, magnification in (("a", 20), ("b", 40)):
        with h5py.File(tmp_path / f"{slide}.h5", "w") as file:
            file["features"] = vectors()
            file.create_dataset("coords", data=np.zeros((4, 2))).attrs["target_magnification"] = magnification
    cohort = Cohort((planted.row("a", "0"), planted.row("b", "1")))
    with pytest.raises(ConfigError, match="20x in a; 40x in b"):
        find_cases(cohort, find_bags(tmp_path))


def test_labels_missing_or_of_one_class(tmp_path: Path):
    files = {slide: planted.write_features(tmp_path, slide, vectors()) for slide in "ab"}
    with pytest.raises(ConfigError, match="no slide of the cohort has a label"):
        find_cases(Cohort((planted.row("a", None), planted.row("b", None))), files)
    with pytest.raises(ConfigError, match="one class only \\(tumor\\)"):
        find_cases(Cohort((planted.row("a", "tumor"), planted.row("b", "tumor"))), files)
    with pytest.raises(ConfigError, match="the remaining cohort has one class only \\(0\\)"):
        find_cases(Cohort((planted.row("a", "0"), planted.row("c", "1"))), files)
    with pytest.raises(BagError, match="none of 2 labelled slides"):
        find_cases(Cohort((planted.row("c", "0"), planted.row("d", "1"))), files)


def test_folders_of_clam(tmp_path: Path):
    (tmp_path / "pt_files").mkdir()
    for slide in "ab":
        torch.save(torch.randn(3, 8), tmp_path / "pt_files" / f"{slide}.pt")
    cohort = Cohort((planted.row("a", "0"), planted.row("b", "1")))
    cases = find_cases(cohort, find_bags(tmp_path), encoder="their_resnet")
    assert (cases.dim, cases.encoder) == (8, "their_resnet")
    assert cases.cases[1].read().slide == "b"


def test_identity_follows_the_content_not_the_place(tmp_path: Path):
    features = vectors()
    cohort = Cohort((planted.row("a", "0"), planted.row("b", "1")))

    def identities(folder: str, features_b: np.ndarray) -> list[str]:
        files = {
            slide: planted.write_features(tmp_path / folder, slide, own)
            for slide, own in (("a", features), ("b", features_b))
        }
        return [case.identity for case in find_cases(cohort, files).cases]

    other = features + np.float16(1)
    first, moved, changed = identities("x", features), identities("y", features), identities("z", other)
    assert first == moved
    assert first[0] == changed[0]
    assert first[1] != changed[1]


def test_only_keeps_slides_that_all_features_have(tmp_path: Path):
    cases = planted.planted(tmp_path, patients=3)
    kept = cases.only({"normal_00_0", "tumor_02_0"})
    assert [case.slide for case in kept.cases] == ["normal_00_0", "tumor_02_0"]
    assert kept.usable.slides == ("normal_00_0", "tumor_02_0")
    with pytest.raises(ConfigError, match="one class only"):
        cases.only({"normal_00_0"})


# ---------------------------------------------------------------------------------------------------- two scales

COARSE = tiling_name(TileSettings(), 2.0)


def two_scales(tmp_path: Path, slide: str = "s") -> tuple[Path, Path, TileTable]:
    """A slide of 9 x 5 fine tiles, of which the ninth column and the fifth row have no coarse tile around them."""
    x, y = np.meshgrid(np.arange(9) * 448, np.arange(5) * 448)
    fine = planted.tile_table(slide, 45)
    coords = np.stack([x, y], axis=-1).reshape(-1, 2)
    fine = replace(fine, coords_l0=coords, tissue=np.ones(45, np.float32), size_l0=(9 * 448, 5 * 448))
    coarse_coords, parents = parent_rows(fine, fine.size_l0, 2.0)
    coarse = replace(fine, coords_l0=coarse_coords, tissue=np.ones(len(coarse_coords), np.float32), mpp=2.0)
    fine = replace(fine, parents={COARSE: parents}, parent_digests={COARSE: coarse.digest})
    paths = [tmp_path / tiling / "features_vit" / f"{slide}.h5" for tiling in ("fine", COARSE)]
    for path, table, dim in zip(paths, (fine, coarse), (3, 2), strict=True):
        write_bag(path, GENERATOR.normal(size=(len(table), dim)), table, "vit", {})
    return paths[0], paths[1], fine


def test_joined_vectors_are_those_of_tile_and_surrounding(tmp_path: Path):
    fine_file, coarse_file, table = two_scales(tmp_path)
    joined = read_bag(join_scales(fine_file, coarse_file, table, COARSE, tmp_path / "both" / "features_vit" / "s.h5"))
    fine, coarse = read_bag(fine_file), read_bag(coarse_file)
    assert isinstance(joined.features_ND, np.memmap)
    assert len(joined) == 32
    expected = []
    for vector, (x, y) in zip(fine.features_ND, table.coords_l0, strict=True):  # by place, not by stored parents
        for other, (x0, y0) in zip(coarse.features_ND, coarse.coords, strict=True):  # pyright: ignore[reportArgumentType]
            if x0 <= x < x0 + 4 * 448 and y0 <= y < y0 + 4 * 448:
                expected.append(np.concatenate([vector, other]))
    assert np.array_equal(joined.features_ND, np.stack(expected))
    assert joined.coords is not None
    assert joined.coords.max(axis=0).tolist() == [7 * 448, 3 * 448]


def test_joined_file_is_made_again_only_when_its_parts_change(tmp_path: Path):
    fine_file, coarse_file, table = two_scales(tmp_path)
    target = tmp_path / "both" / "features_vit" / "s.h5"
    join_scales(fine_file, coarse_file, table, COARSE, target)
    made = target.stat().st_mtime_ns
    join_scales(fine_file, coarse_file, table, COARSE, target)
    assert target.stat().st_mtime_ns == made
    before = read_bag(target).features_ND.copy()
    bag = read_bag(coarse_file)
    coarse_table = replace(table, coords_l0=np.asarray(bag.coords), mpp=2.0, parents={})
    write_bag(coarse_file, bag.features_ND + 1, coarse_table, "vit", {})
    join_scales(fine_file, coarse_file, table, COARSE, target)
    assert not np.array_equal(read_bag(target).features_ND, before)
    target.write_bytes(b"half")
    join_scales(fine_file, coarse_file, table, COARSE, target)
    assert len(read_bag(target)) == 32


def test_scales_that_do_not_belong_together(tmp_path: Path):
    fine_file, coarse_file, table = two_scales(tmp_path)
    target = tmp_path / "both" / "features_vit" / "s.h5"
    with pytest.raises(BagError, match="no parent tiles at 4mpp"):
        join_scales(fine_file, coarse_file, table, "4mpp", target)
    with pytest.raises(BagError, match="coarse feature file"):
        join_scales(fine_file, fine_file, table, COARSE, target)
    with pytest.raises(BagError, match="fine feature file"):
        join_scales(coarse_file, coarse_file, table, COARSE, target)
    assert not target.exists()


def test_cases_of_two_scales(tmp_path: Path):
    fine, coarse, tables = {}, {}, {}
    for slide in "abc":
        fine[slide], coarse[slide], table = two_scales(tmp_path, slide)
        tables[slide] = tmp_path / "tiles" / f"{slide}.h5"
        write_tiles(tables[slide], table, Provenance("tile", FORMAT_VERSION, {}, {}))
    del coarse["c"]
    cohort = Cohort(tuple(planted.row(slide, label) for slide, label in (("a", "0"), ("b", "1"), ("c", "1"))))
    scale = CoarseScale(COARSE, coarse, tables, tmp_path / "both" / "features_vit")
    cases = find_cases(cohort, fine, coarse=scale)
    assert (cases.dim, [case.slide for case in cases.cases]) == (5, ["a", "b"])
    assert [failure.slide for failure in cases.failures] == ["c"]
    assert COARSE in cases.failures[0].reason
