"""Feature files for other tools, read back as those tools read them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from helpers.error_codes import has_code
from selfvitmil.bags import Bag, find_bags, read_bag, write_bag
from selfvitmil.bags.export import (
    ExportJob,
    ExportResult,
    export_anndata,
    export_clam,
    export_slide,
    export_stamp,
    export_trident,
    plan_export,
)
from selfvitmil.engine import Engine
from selfvitmil.errors import BagError, ConfigError
from selfvitmil.settings import EngineSettings
from selfvitmil.tiles import TileTable, grid

NAMES = ("a", "b.c")


def values(seed: int, number: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(number, 6)).astype(np.float16)


@pytest.fixture
def tables() -> dict[str, TileTable]:
    coords = {name: grid((3000, 1500 + 500 * k), 0.243, 224, 0.5) for k, name in enumerate(NAMES)}
    return {
        name: TileTable(name, at, np.ones(len(at), np.float32), 224, 0.5, 0, slide_mpp=0.243, size_l0=(3000, 2000))
        for name, at in coords.items()
    }


@pytest.fixture
def source(tmp_path: Path, tables: dict[str, TileTable]) -> Path:
    folder = tmp_path / "study" / "bags" / "0.5mpp_224px_0px" / "features_vit"
    for seed, (name, table) in enumerate(tables.items()):
        write_bag(folder / f"{name}.h5", values(seed, len(table)), table, "vit", {"tiles": "abc"})
    return folder


def export_all(source: Path, folder: Path, to: str) -> dict[str, ExportResult]:
    return {name: export_slide(job) for name, job in plan_export(source, folder, to).items()}


def array(file: Any, name: str) -> np.ndarray:
    return file[name][:]


def test_clam_reads_the_numbers(source: Path, tmp_path: Path, tables: dict[str, TileTable]):
    done = export_all(source, tmp_path / "clam", "clam")
    assert done == {name: ExportResult(len(table)) for name, table in tables.items()}
    for seed, (name, table) in enumerate(tables.items()):
        wanted = values(seed, len(table)).astype(np.float32)
        tensor = torch.load(tmp_path / "clam" / "pt_files" / f"{name}.pt", weights_only=True)
        assert tensor.dtype == torch.float32
        np.testing.assert_array_equal(tensor.numpy(), wanted)
        with h5py.File(tmp_path / "clam" / "h5_files" / f"{name}.h5") as file:
            np.testing.assert_array_equal(array(file, "features"), wanted)
            np.testing.assert_array_equal(array(file, "coords"), table.coords_l0)
            assert (array(file, "features").dtype, array(file, "coords").dtype) == (np.float32, np.int32)


def test_anndata_round_trip(source: Path, tmp_path: Path, tables: dict[str, TileTable]):
    anndata = pytest.importorskip("anndata")
    export_all(source, tmp_path / "ad", "anndata")
    for seed, (name, table) in enumerate(tables.items()):
        back = anndata.read_h5ad(tmp_path / "ad" / f"{name}.h5ad")
        assert back.X.dtype == np.float32
        np.testing.assert_array_equal(back.X, values(seed, len(table)).astype(np.float32))
        np.testing.assert_array_equal(back.obsm["spatial"], table.coords_l0)
        assert back.obs["tile_id"].tolist() == list(range(len(table)))
        assert set(back.obs["library_id"]) == {name}
        about = {"slide": name, "encoder": "vit", "mpp": 0.5, "slide_mpp": 0.243, "tile_px": 224}
        assert {key: back.uns[key] for key in about} == about
        assert back.uns["tile_l0"] == pytest.approx(table.extent_l0)
    both = anndata.concat([anndata.read_h5ad(path) for path in sorted((tmp_path / "ad").iterdir())])
    assert both.obs_names.is_unique
    export_anndata(read_bag(source / "a.h5"), tmp_path / "half", "float16")
    assert anndata.read_h5ad(tmp_path / "half" / "a.h5ad").X.dtype == np.float16


def test_trident_layout_in_another_precision(source: Path, tmp_path: Path, tables: dict[str, TileTable]):
    export_all(source, tmp_path / "out", "trident")
    for seed, (name, table) in enumerate(tables.items()):
        ours = read_bag(source / f"{name}.h5")
        again = read_bag(tmp_path / "out" / "features_vit" / f"{name}.h5")
        assert again.features_ND.dtype == np.float32
        np.testing.assert_array_equal(again.features_ND, values(seed, len(table)))
        assert again.coords is not None
        np.testing.assert_array_equal(again.coords, table.coords_l0)
        assert (again.encoder, again.mpp, again.tile_extent) == (ours.encoder, ours.mpp, ours.tile_extent)
        with (
            h5py.File(tmp_path / "out" / "patches" / f"{name}_patches.h5") as patches,
            h5py.File(source.parent / "patches" / f"{name}_patches.h5") as before,
        ):
            np.testing.assert_array_equal(array(patches, "coords"), table.coords_l0)
            assert dict(patches["coords"].attrs) == dict(before["coords"].attrs)


def test_stamp_in_either_precision(source: Path, tmp_path: Path):
    bag = read_bag(source / "a.h5")
    for dtype in ("float16", "float32"):
        export_stamp(bag, tmp_path / dtype, dtype)
        again = read_bag(tmp_path / dtype / "a.h5")
        assert again.features_ND.dtype == dtype
        np.testing.assert_array_equal(again.features_ND, bag.features_ND)
        assert again.unit == "um"


def test_features_of_other_tools_can_be_passed_on(tmp_path: Path):
    with h5py.File(tmp_path / "s.h5", "w") as file:
        file["features"] = np.array([[1.0, 2e5]], np.float32)
        file["features"].attrs["encoder"] = "../uni v1"
        file.create_dataset("coords", data=[[7, 9]]).attrs.update({"patch_size": 256, "savetodir": "/home/someone"})
    bag = read_bag(tmp_path / "s.h5")
    export_trident(bag, tmp_path / "out")
    (written,) = (tmp_path / "out").glob("features_*/s.h5")
    assert written.parent.name == "features_.._uni_v1"
    with h5py.File(written) as file:
        assert (file["coords"].attrs["savetodir"], file["coords"].attrs["patch_size"]) == ("", 256)
    with pytest.raises(BagError, match=r"s: 1 values do not fit into float16.*--dtype float32"):
        export_trident(bag, tmp_path / "half", "float16")
    assert not list((tmp_path / "half").rglob("*.h5"))
    no_places = Bag("s", np.ones((3, 2), np.float32), None)
    microns = Bag("s", np.ones((3, 2), np.float32), np.ones((3, 2)), unit="um")
    export_clam(no_places, tmp_path / "clam")
    assert read_bag(tmp_path / "clam" / "h5_files" / "s.h5").coords is None
    for bad, write in ((no_places, export_trident), (microns, export_clam), (microns, export_anndata)):
        with pytest.raises(BagError, check=has_code("bag-without-coords")):
            write(bad, tmp_path / "bad")


def test_an_export_never_goes_among_its_sources(source: Path, tmp_path: Path):
    before = {path: path.read_bytes() for path in source.parent.rglob("*.h5")}
    for folder in (source, source / "clam", source.parent, tmp_path / "study"):
        with pytest.raises(ConfigError, check=has_code("export-folder-overlap")):
            plan_export(source, folder, "trident")
    assert {path: path.read_bytes() for path in source.parent.rglob("*.h5")} == before


def test_choices_that_cannot_be_meant(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ConfigError, match="Choose one of clam, stamp, anndata, trident, and float16 or float32"):
        plan_export(source, tmp_path / "out", "slideflow")
    with pytest.raises(ConfigError, match="float64"):
        plan_export(source, tmp_path / "out", "clam", "float64")
    with pytest.raises(ConfigError, match="CLAM cannot train on float16"):
        plan_export(source, tmp_path / "out", "clam", "float16")
    find = importlib.util.find_spec
    monkeypatch.setattr("selfvitmil.bags.export.find_spec", lambda name: None if name == "anndata" else find(name))
    for act in (lambda: plan_export(source, tmp_path / "out", "anndata"), lambda: export_anndata(a_bag(), tmp_path)):
        with pytest.raises(ConfigError, match=r"anndata is not installed.*pip install 'selfvitmil\[anndata\]'"):
            act()


def a_bag() -> Bag:
    return Bag("s", np.ones((1, 2), np.float16), np.zeros((1, 2), np.int64))


def test_one_bad_file_does_not_stop_the_others(source: Path, tmp_path: Path):
    (source / "broken.h5").write_bytes(b"no")
    jobs = plan_export(source, tmp_path / "out", "stamp")
    assert jobs["a"] == ExportJob("a", source / "a.h5", tmp_path / "out", "stamp", "float16")
    with Engine(EngineSettings(workers=0)) as engine:
        outcomes = {outcome.name: outcome for outcome in engine.map(export_slide, jobs, stage="export")}
    assert outcomes["broken"].failure is not None
    assert "not a readable feature file" in outcomes["broken"].failure.reason
    assert set(find_bags(tmp_path / "out")) == set(NAMES)
