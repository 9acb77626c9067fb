"""Folders and tables exactly as other tools write them, and ours as they read them (layouts checked in late 2026)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from helpers.cohorts import table
from helpers.error_codes import has_code
from helpers.planted import write_features
from selfvitmil.bags import find_bags, read_bag
from selfvitmil.cohort import read_cohort
from selfvitmil.cohort.splits import read_splits
from selfvitmil.commands.export import export
from selfvitmil.engine import Engine
from selfvitmil.errors import BagError, CohortError
from selfvitmil.settings import EngineSettings
from selfvitmil.study import CohortSource, FeatureChoice, open_study

FOLDS = {"train": {"split": "k-fold", "folds": 2}}


def values(seed: int, number: int = 6) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(number, 4))


def stamp_file(path: Path, seed: int, **attributes: Any) -> None:
    """`stamp preprocess` of version 2.4; with `feat_type` its slide and patient encoders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        if attributes.get("feat_type", "tile") == "tile":
            file["coords"] = (np.arange(12).reshape(6, 2) * 256).astype(np.float32)
            file["feats"] = values(seed).astype(np.float16)
            file.attrs.update({"stamp_version": "2.4.0", "extractor": "uni", "unit": "um", "code_hash": "ab12cd34"})
            file.attrs.update({"tile_size_um": 256.0, "tile_size_px": 224, "feat_type": "tile", **attributes})
        else:
            file["feats"] = values(seed, 1).astype(np.float32)
            file.attrs.update({"version": "2.4.0", "encoder": "titan", "precision": "torch.float32", **attributes})


def trident_file(path: Path, features: np.ndarray, coords: np.ndarray) -> None:
    """TRIDENT: chunked row by row, resizable, a float32 file per slide."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        for name, array in (("features", features), ("coords", coords)):
            file.create_dataset(name, data=array, maxshape=(None, *array.shape[1:]), chunks=(1, *array.shape[1:]))
        file["features"].attrs.update({"name": path.stem, "savetodir": "/data/trident", "encoder": "uni_v1"})
        file["coords"].attrs.update(
            {
                "patch_size": 256, "patch_size_level0": 512, "level0_magnification": 40, "target_magnification": 20,
                "overlap": 0, "name": path.stem, "savetodir": "/data/trident", "level0_width": 9000,
                "level0_height": 8000,
            }
        )  # fmt: skip


# ---------------------------------------------------------------------------------------------------- STAMP


@pytest.fixture
def stamp(tmp_path: Path) -> Path:
    """A run of STAMP: slides in folders of their sites, several per patient, and its two tables."""
    rows, clini = ["PATIENT,FILENAME"], ["PATIENT,isMSIH,AGE,SITE"]
    for patient in range(8):
        clini.append(f"P{patient},{('MSIH', 'nonMSIH')[patient % 2]},{50 + patient},site{patient % 3}")
        for number in range(2):
            place = f"site{patient % 3}/P{patient}_{number}.h5"
            stamp_file(tmp_path / "uni-ab12cd34" / place, 2 * patient + number)
            (tmp_path / "uni-ab12cd34" / place).with_suffix(".jpg").write_bytes(b"")
            rows.append(f"P{patient},{place}")
    table(tmp_path / "slide_table.csv", "\n".join(rows) + "\n")
    table(tmp_path / "clini_table.csv", "\n".join(clini) + "\n")
    return tmp_path


def test_a_run_of_stamp_with_its_tables_is_learned_from(stamp: Path):
    features = stamp / "uni-ab12cd34"
    source = CohortSource(stamp / "slide_table.csv", stamp / "clini_table.csv", "isMSIH", features=features)
    study = open_study(stamp / "study", FOLDS, source)
    learning = study.learning_set(FeatureChoice(folder=features))
    assert len(learning.cases.by_slide) == 16
    assert learning.cases.encoder == "uni"
    assert {row.patient for row in study.cohort.rows} == {f"P{k}" for k in range(8)}
    assert dict(study.cohort["P3_1"].extra)["SITE"] == "site0"
    for split in learning.splits:
        owners = [{slide.split("_")[0] for slide in side} for side in (split.train, split.val, split.test)]
        assert not owners[0] & owners[2]
        assert not owners[1] & owners[2]
    bag = read_bag(features / "site0" / "P3_1.h5")
    assert (bag.unit, bag.tile_extent, bag.mpp) == ("um", 256.0, 256 / 224)


def test_patient_features_of_stamp_go_with_the_clini_table_alone(stamp: Path):
    features = stamp / "titan-patient-ab12cd34"
    for patient in range(8):
        stamp_file(features / f"P{patient}.h5", patient, feat_type="patient")
    source = CohortSource(stamp / "clini_table.csv", None, "isMSIH", features=features)
    learning = open_study(stamp / "study", FOLDS, source).learning_set(FeatureChoice(folder=features))
    assert sorted(learning.cases.by_slide) == [f"P{k}" for k in range(8)]
    assert learning.cases.encoder == "titan"
    bag = read_bag(features / "P3.h5")
    assert np.array_equal(bag.features_ND, values(3, 1).astype(np.float32))
    with pytest.raises(CohortError, check=has_code("missing-column")):  # features of slides do not fit patients
        read_cohort(stamp / "clini_table.csv", label_column="isMSIH", features=find_bags(stamp / "uni-ab12cd34"))


def test_the_first_stamp_counted_pixels_of_256_microns_by_224(tmp_path: Path):
    with h5py.File(tmp_path / "s.h5", "w") as file:
        file["coords"] = np.array([[0, 0], [224, 0], [224, 448]])
        file["feats"] = values(0, 3).astype(np.float16)
    bag = read_bag(tmp_path / "s.h5")
    assert (bag.unit, bag.tile_extent) == ("um", 256.0)
    assert bag.coords is not None
    assert bag.coords.tolist() == [[0, 0], [256, 0], [256, 512]]


# ---------------------------------------------------------------------------------------------------- TRIDENT


def test_slide_embeddings_of_trident_are_bags_of_one(tmp_path: Path):
    coords = np.arange(12).reshape(6, 2) * 512
    job = tmp_path / "20x_256px_0px_overlap"
    trident_file(job / "features_uni_v1" / "s.h5", values(0).astype(np.float32), coords)
    trident_file(job / "slide_features_titan" / "s.h5", values(0, 1)[0].astype(np.float32), coords)
    tiles, slide = (read_bag(job / name / "s.h5") for name in ("features_uni_v1", "slide_features_titan"))
    assert (len(tiles), tiles.tile_extent, tiles.encoder) == (6, 512, "uni_v1")
    assert (len(slide), slide.dim, slide.coords) == (1, 4, None)
    assert np.array_equal(slide.features_ND[0], values(0, 1)[0].astype(np.float32))
    assert set(find_bags(job / "features_uni_v1")) == {"s"}
    with pytest.raises(BagError, check=has_code("ambiguous-feature-files")):
        find_bags(job)


# ---------------------------------------------------------------------------------------------------- torchmil


def test_arrays_of_torchmil_are_read_and_code_in_them_is_not_run(tmp_path: Path):
    folder = tmp_path / "features" / "features_UNI"
    folder.mkdir(parents=True)
    np.save(folder / "a.npy", values(0).astype(np.float32))
    np.save(folder / "b.npy", values(1).astype(np.float32))
    np.save(folder / "code.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    (folder / "cut.npy").write_bytes((folder / "a.npy").read_bytes()[:-8])
    files = find_bags(folder)
    bag = read_bag(files["b"])
    assert np.array_equal(bag.features_ND, values(1).astype(np.float32))
    assert bag.coords is None
    for name in ("code", "cut"):
        with pytest.raises(BagError, check=has_code("unreadable-bag")):
            read_bag(files[name])


# ---------------------------------------------------------------------------------------------------- tables


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A study of 12 patients with two slides each; the age is of the patient, the block of the slide."""
    lines = ["slide,path,label,patient,age,block"]
    for patient in range(12):
        for number in range(2):
            name = f"s{patient}_{number}"
            write_features(tmp_path / "study" / "bags" / "0.5mpp_224px_0px", name, values(2 * patient + number))
            lines.append(f"{name},/slides/{name}.svs,{'ab'[patient % 2]},p{patient},{40 + patient},{number}")
    (tmp_path / "study" / "cohort.csv").write_text("\n".join(lines) + "\n")
    return tmp_path / "study"


def exported(root: Path, to: str) -> Any:
    with Engine(EngineSettings(workers=0)) as engine:
        return export(open_study(root, FOLDS), "vit", root.parent / "out", to, engine)


def test_splits_and_labels_for_clam_are_read_back(root: Path, tmp_path: Path):
    assert exported(root, "clam").notes == ()
    out = tmp_path / "out"
    cohort = read_cohort(out / "dataset.csv", features=find_bags(out))
    own = open_study(root, FOLDS)
    assert {row.slide: (row.patient, row.label) for row in cohort.rows} == {
        row.slide: (row.patient, row.label) for row in own.cohort.rows
    }
    expected = own.learning_set(FeatureChoice()).splits
    assert read_splits(out / "splits", cohort) == expected
    for path in out.glob("splits/splits_?.csv"):
        path.unlink()
    assert [set(split.test) for split in read_splits(out / "splits", cohort)] == [set(s.test) for s in expected]


def test_tables_for_stamp_are_of_patients(root: Path, tmp_path: Path):
    exported(root, "stamp")
    out = tmp_path / "out"
    assert (out / "clini_table.csv").read_text().splitlines()[:2] == ["PATIENT,label,age", "p0,a,40"]
    cohort = read_cohort(out / "slide_table.csv", out / "clini_table.csv", features=find_bags(out))
    assert (cohort["s3_1"].patient, cohort["s3_1"].label) == ("p3", "b")
    assert cohort["s3_1"].path == out / "s3_1.h5"


def test_patients_with_two_labels_have_no_clini_table(root: Path, tmp_path: Path):
    text = (root / "cohort.csv").read_text().replace("s0_1,/slides/s0_1.svs,a", "s0_1,/slides/s0_1.svs,b")
    (root / "cohort.csv").write_text(text)
    (note,) = exported(root, "stamp").notes
    assert "p0" in note
    assert not (tmp_path / "out" / "clini_table.csv").exists()
    assert (tmp_path / "out" / "slide_table.csv").exists()


def test_a_task_of_patho_bench_is_read_back(root: Path, tmp_path: Path):
    exported(root, "trident")
    out = tmp_path / "out"
    cohort = read_cohort(out / "k=all.tsv", features=find_bags(out / "features_vit"))
    assert (cohort["s3_1"].patient, cohort["s3_1"].label) == ("p3", "1")
    expected = open_study(root, FOLDS).learning_set(FeatureChoice()).splits
    assert [split.name for split in expected] == ["fold0", "fold1"]
    for split, own in zip(read_splits(out, cohort), expected, strict=True):
        for side in ("train", "val", "test"):
            assert set(getattr(split, side)) == set(getattr(own, side))
    config = pytest.importorskip("yaml").safe_load((out / "config.yaml").read_text())
    assert config["label_dict"] == {0: "a", 1: "b"}
    assert (config["sample_col"], config["task_col"]) == ("slide_id", "label")
    assert (config["extra_cols"], config["metrics"][0]) == ([], "macro-ovr-auc")


def test_a_wrong_set_in_a_table_of_folds_is_named(root: Path, tmp_path: Path):
    exported(root, "trident")
    path = tmp_path / "out" / "k=all.tsv"
    path.write_text(path.read_text().replace("\ttrain", "\ttraining", 1))
    cohort = open_study(root).cohort
    with pytest.raises(CohortError, match="training", check=has_code("invalid-split-file")):
        read_splits(tmp_path / "out", cohort)


def test_torchmil_reads_features_and_numbers_of_labels(root: Path, tmp_path: Path):
    datasets = pytest.importorskip("torchmil.datasets")
    exported(root, "trident")
    dataset = datasets.TridentWSIDataset(
        base_path=f"{tmp_path / 'out'}/", labels_path=str(tmp_path / "out" / "labels.csv"), feature_extractor="vit",
        wsi_name_col="slide_id", wsi_label_col="label", bag_keys=["X", "Y", "coords"], patch_size=448,
    )  # fmt: skip
    at = dataset.get_bag_names().index("s3_1")
    assert np.array_equal(dataset[at]["X"].numpy(), values(7).astype(np.float16).astype(np.float32))
    assert dataset[at]["Y"].item() == 1
