"""Another tool's eyes: torchmil opens our folder as one of TRIDENT's and trains on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from selfvitmil.bags import write_bag
from selfvitmil.bags.export import export_slide, plan_export
from selfvitmil.tiles import TileTable, grid

datasets = pytest.importorskip("torchmil.datasets")
models = pytest.importorskip("torchmil.models")
data = pytest.importorskip("torchmil.data")

DIM = 16
TILING = "0.5mpp_224px_0px"


@pytest.fixture
def tables() -> dict[str, TileTable]:
    """Six slides of different sizes and two scanners."""
    found = {}
    for k in range(6):
        size_l0, slide_mpp = (1800 + 300 * k, 1500), (0.25, 0.243)[k % 2]
        coords = grid(size_l0, slide_mpp, 224, 0.5)
        found[f"slide{k}"] = TileTable(
            f"slide{k}", coords, np.ones(len(coords), np.float32), 224, 0.5, 0, slide_mpp=slide_mpp, size_l0=size_l0
        )
    return found


@pytest.fixture
def features(tables: dict[str, TileTable]) -> dict[str, np.ndarray]:
    """Positive slides, the odd ones, have one dimension raised in two of their tiles."""
    generator = np.random.default_rng(0)
    found = {}
    for k, (name, table) in enumerate(tables.items()):
        found[name] = generator.normal(size=(len(table), DIM)).astype(np.float16)
        found[name][:2, 3] += 4 * (k % 2)
    return found


@pytest.fixture
def study(tmp_path: Path, tables: dict[str, TileTable], features: dict[str, np.ndarray]) -> Path:
    """A study as `embed` leaves it, settings beside the feature files included."""
    folder = tmp_path / "bags" / TILING / "features_vit"
    for name, table in tables.items():
        write_bag(folder / f"{name}.h5", features[name], table, "vit", {"tiles": table.digest})
    (folder / "settings.toml").write_text("")
    rows = [f"{name},{k % 2}" for k, name in enumerate(tables)]
    (tmp_path / "labels.csv").write_text("\n".join(["slide,label", *rows]) + "\n")
    return tmp_path


def open_with_torchmil(study: Path, folder: Path, keys: list[str], patch_size: int = 1) -> Any:
    return datasets.TridentWSIDataset(
        base_path=f"{folder}/",
        labels_path=str(study / "labels.csv"),
        feature_extractor="vit",
        wsi_name_col="slide",
        wsi_label_col="label",
        bag_keys=keys,
        patch_size=patch_size,
    )


def test_torchmil_sees_our_numbers(study: Path, tables: dict[str, TileTable], features: dict[str, np.ndarray]):
    dataset = open_with_torchmil(study, study / "bags" / TILING, ["X", "Y", "coords"])
    assert dataset.get_bag_names() == sorted(tables)
    for bag, (k, name) in zip(dataset, enumerate(tables), strict=False):
        assert bag["X"].dtype == torch.float16
        np.testing.assert_array_equal(bag["X"].numpy(), features[name])
        np.testing.assert_array_equal(bag["coords"].numpy(), tables[name].coords_l0)  # patch_size 1: as they are
        assert bag["Y"].tolist() == [k % 2]


def test_torchmil_finds_the_neighbours(study: Path, tables: dict[str, TileTable]):
    dataset = open_with_torchmil(study, study / "bags" / TILING, ["X", "adj", "coords"], patch_size=448)
    adjacency = dataset[0]["adj"].to_dense().numpy() > 0  # slide0: 448 level-0 px a tile, so cells are whole numbers
    cells = tables["slide0"].coords_l0 / 448
    apart = np.linalg.norm(cells[:, None] - cells[None], axis=-1)
    np.testing.assert_array_equal(adjacency, (apart > 0) & (apart < 1.5))


@pytest.mark.parametrize("exported", [False, True])
def test_torchmil_trains_on_it(study: Path, tmp_path: Path, exported: bool):
    folder = study / "bags" / TILING
    if exported:
        for job in plan_export(folder / "features_vit", tmp_path / "float32", "trident").values():
            export_slide(job)
        folder = tmp_path / "float32"
    dataset = open_with_torchmil(study, folder, ["X", "Y"])
    batch = data.collate_fn([dataset[k] for k in range(len(dataset))])
    torch.manual_seed(0)
    model = models.ABMIL(in_shape=(DIM,), att_dim=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> float:
        optimizer.zero_grad()
        bags_BND = batch["X"] if exported else batch["X"].float()  # torchmil does not cast
        _, losses = model.compute_loss(batch["Y"].squeeze(-1), bags_BND, batch["mask"])
        (loss,) = losses.values()
        loss.backward()
        optimizer.step()
        return loss.item()

    first = step()
    assert np.isfinite(first)
    assert step() < first
