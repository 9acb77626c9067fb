"""Feature files: ours and other tools', mapped, joined, exported."""

from __future__ import annotations

import pickle
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from helpers.error_codes import has_code
from selfvitmil.bags import Bag, check_bag, concat_scales, find_bags, read_bag, write_bag
from selfvitmil.bags.export import export_clam, export_stamp
from selfvitmil.errors import BagError
from selfvitmil.tiles import TileTable, grid

GENERATOR = np.random.default_rng(0)


def table(size_l0: tuple[int, int] = (3000, 2000)) -> TileTable:
    coords = grid(size_l0, 0.243, 224, 0.5)
    return TileTable("s", coords, np.ones(len(coords), np.float32), 224, 0.5, 0, slide_mpp=0.243, size_l0=size_l0)


@pytest.fixture
def written(tmp_path: Path) -> tuple[Path, np.ndarray, TileTable]:
    tiles = table()
    features = GENERATOR.normal(size=(len(tiles), 12)).astype(np.float16)
    path = tmp_path / "bags" / "0.5mpp_224px_0px" / "features_vit" / "s.h5"
    write_bag(path, features, tiles, "vit", {"tiles": "abc"})
    return path, features, tiles


def test_round_trip_as_a_memory_map(written: tuple[Path, np.ndarray, TileTable]):
    path, features, tiles = written
    bag = read_bag(path)
    assert isinstance(bag.features_ND, np.memmap)
    assert np.array_equal(bag.features_ND, features)
    assert bag.coords is not None
    assert np.array_equal(bag.coords, tiles.coords_l0)
    assert (bag.slide, bag.encoder, bag.mpp, bag.unit) == ("s", "vit", 0.5, "l0")
    assert bag.tile_extent == pytest.approx(tiles.extent_l0)
    again = path.with_name("again.h5")
    write_bag(again, features, tiles, "vit", {"tiles": "abc"})
    assert again.read_bytes() == path.read_bytes()


def test_coordinates_of_a_large_slide_are_a_memory_map(tmp_path: Path):
    tiles = table((150_000, 60_000))
    write_bag(tmp_path / "bags" / "t" / "features_vit" / "s.h5", np.zeros((len(tiles), 1)), tiles, "vit", {})
    bag = read_bag(tmp_path / "bags" / "t" / "features_vit" / "s.h5")
    assert isinstance(bag.coords, np.memmap)
    assert np.array_equal(bag.coords, tiles.coords_l0)
    assert bag.coords.dtype == tiles.coords_l0.dtype


def test_layout_that_trident_readers_expect(written: tuple[Path, np.ndarray, TileTable]):
    path, features, tiles = written
    with h5py.File(path.parents[1] / "patches" / "s_patches.h5") as file:
        assert np.array_equal(file["coords"][:], tiles.coords_l0)  # pyright: ignore[reportIndexIssue]
        assert file["coords"].attrs["patch_size_level0"] == 461
    with h5py.File(path) as file:
        dataset = file["features"]
        assert dataset.chunks is None  # pyright: ignore[reportAttributeAccessIssue]
        assert dataset.compression is None  # pyright: ignore[reportAttributeAccessIssue]
        assert dataset.dtype == np.float16  # pyright: ignore[reportAttributeAccessIssue]
        assert dataset.shape == features.shape  # pyright: ignore[reportAttributeAccessIssue]


def test_files_of_other_tools(tmp_path: Path):
    features = GENERATOR.normal(size=(5, 8)).astype(np.float32)
    coords = np.arange(10).reshape(5, 2)
    with h5py.File(tmp_path / "trident.h5", "w") as file:  # chunked, with an extra axis as old files have it
        file.create_dataset("features", data=features[None], chunks=(1, 1, 8), maxshape=(1, None, 8))
        file["features"].attrs["encoder"] = "uni_v1"
        file.create_dataset("coords", data=coords[None]).attrs.update({"patch_size": 256, "patch_size_level0": 512})
    with h5py.File(tmp_path / "clam.h5", "w") as file:
        file["features"] = features
        file["coords"] = coords.astype(np.int32)
    with h5py.File(tmp_path / "stamp.h5", "w") as file:
        file["feats"] = features.astype(np.float16)
        file["coords"] = coords.astype(np.float32) * 112
        file.attrs.update({"unit": "um", "tile_size_um": 112.0, "tile_size_px": 224, "extractor": "ctranspath"})
    torch.save(torch.from_numpy(features), tmp_path / "tensor.pt")
    trident, clam, stamp, tensor = (
        read_bag(tmp_path / name) for name in ("trident.h5", "clam.h5", "stamp.h5", "tensor.pt")
    )
    for bag in (trident, clam, tensor):
        assert np.array_equal(bag.features_ND, features)
    assert (trident.encoder, trident.tile_extent) == ("uni_v1", 512)
    assert (stamp.unit, stamp.tile_extent, stamp.mpp, stamp.encoder) == ("um", 112.0, 0.5, "ctranspath")
    assert tensor.coords is None
    assert set(find_bags(tmp_path)) == {"trident", "clam", "stamp", "tensor"}


def test_clam_folder_prefers_h5(tmp_path: Path):
    bag = Bag("s", np.ones((3, 4), np.float16), np.arange(6).reshape(3, 2))
    export_clam(bag, tmp_path)
    assert find_bags(tmp_path) == {"s": tmp_path / "h5_files" / "s.h5"}
    tensor = torch.load(tmp_path / "pt_files" / "s.pt", weights_only=True)
    assert tensor.dtype == torch.float32
    assert np.array_equal(read_bag(tmp_path / "h5_files" / "s.h5").features_ND, np.ones((3, 4)))


def test_stamp_export_is_in_microns(written: tuple[Path, np.ndarray, TileTable], tmp_path: Path):
    path, features, tiles = written
    export_stamp(read_bag(path), tmp_path / "stamp")
    again = read_bag(tmp_path / "stamp" / "s.h5")
    assert again.coords is not None
    assert again.coords == pytest.approx(tiles.coords_l0 * 0.243, rel=1e-6)
    assert again.tile_extent == 112
    assert np.array_equal(again.features_ND, features)
    with pytest.raises(BagError, match="microns"):
        export_stamp(Bag("s", features, None), tmp_path)


def test_two_scales_are_joined_row_by_row():
    fine = Bag("s", np.arange(8.0).reshape(4, 2), np.arange(8).reshape(4, 2))
    coarse = Bag("s", 100 + np.arange(4.0).reshape(2, 2), None)
    joined = concat_scales(fine, coarse, np.array([1, -1, 0, 1]))
    assert joined.features_ND.tolist() == [[0, 1, 102, 103], [4, 5, 100, 101], [6, 7, 102, 103]]
    assert joined.coords is not None
    assert joined.coords.tolist() == [[0, 1], [4, 5], [6, 7]]
    assert joined.attributes["without_parent"] == 1
    with pytest.raises(BagError, check=has_code("scale-mismatch")):
        concat_scales(fine, coarse, np.array([0, 1, 2, 0]))


class Evil:
    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def test_tensors_that_numpy_does_not_take_as_they_are(tmp_path: Path):
    tensor = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))
    torch.save(tensor.bfloat16(), tmp_path / "half.pt")
    torch.save(torch.nn.Parameter(tensor), tmp_path / "parameter.pt")
    half, parameter = (read_bag(tmp_path / name).features_ND for name in ("half.pt", "parameter.pt"))
    assert half.dtype == parameter.dtype == np.float32
    assert torch.equal(torch.from_numpy(half).bfloat16(), tensor.bfloat16())
    assert np.array_equal(parameter, tensor.numpy())


def test_damaged_and_hostile_files(tmp_path: Path, written: tuple[Path, np.ndarray, TileTable]):
    (tmp_path / "text.h5").write_text("no")
    (tmp_path / "cut.h5").write_bytes(written[0].read_bytes()[:-600])
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["weights"] = np.zeros(3)
    with h5py.File(tmp_path / "short.h5", "w") as file:
        file["features"], file["coords"] = np.zeros((3, 2)), np.zeros((2, 2))
    (tmp_path / "evil.pt").write_bytes(pickle.dumps(Evil(tmp_path / "ran")))
    for name in ("text.h5", "cut.h5", "other.h5", "short.h5", "evil.pt"):
        with pytest.raises(BagError, match=f"{name}: not a readable feature file"):
            read_bag(tmp_path / name)
    assert not (tmp_path / "ran").exists()
    (tmp_path / "empty").mkdir()
    with pytest.raises(BagError, check=has_code("no-feature-files")):
        find_bags(tmp_path / "empty")


def test_bags_that_teach_nothing():
    with pytest.raises(BagError, match="empty"):
        check_bag(Bag("s", np.zeros((0, 4)), None))
    features = np.zeros((9000, 2), np.float16)
    check_bag(Bag("s", features, None))
    features[8123, 1] = np.nan
    with pytest.raises(BagError, match="row 8123"):
        check_bag(Bag("s", features, None))
    with pytest.raises(BagError, check=has_code("bag-length-mismatch")):
        write_bag(Path("x") / "y" / "s.h5", np.zeros((2, 3)), table(), "vit", {})
