"""The supervised baseline: labels of tiles, the linear probe against other solvers, the network on planted lesions."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from scipy import optimize

from helpers.error_codes import has_code
from selfvitmil import stain
from selfvitmil.aggregate.supervised.base import (
    AnnotatedSlide,
    Coverage,
    coverage_of_bag,
    coverage_of_table,
    label_by_coverage,
    label_slides,
    read_history,
    read_model,
)
from selfvitmil.aggregate.supervised.probe import TileProbe, save_probe, train_probe
from selfvitmil.aggregate.supervised.tile_network import (
    BalancedOrder,
    load_tile_network,
    score_slides,
    slide_probability,
    tile_probabilities,
    train_tile_network,
)
from selfvitmil.aggregate.train import BagStore, score
from selfvitmil.annotations import Annotation, write_annotations
from selfvitmil.bags import Bag, write_bag
from selfvitmil.cohort import SlideRow, make_cohort
from selfvitmil.data.sources import TrainSlide
from selfvitmil.errors import ArtefactError, BagError, CohortError, ConfigError, EncoderError
from selfvitmil.evaluate import Run, find_cases, hold_out_test_labels, make_splits
from selfvitmil.metrics import auc
from selfvitmil.settings import StudySettings, SupervisedSettings
from selfvitmil.slides import SlideRef, open_slide
from selfvitmil.slides.synthetic import make_slide
from selfvitmil.stages.supervised import SupervisedRow
from selfvitmil.store.provenance import BUILT, UP_TO_DATE, Change, ChangeKind, Provenance, rebuilt
from selfvitmil.tiles import FORMAT_VERSION, TileJob, TileTable, read_tiles, write_tiles
from selfvitmil.tiling import tile_slide

pytestmark = pytest.mark.usefixtures("one_thread")

BUILT_FROM = Provenance("tile", FORMAT_VERSION, {}, {})


# ---------------------------------------------------------------------------------------------------- labels


def table_of(slide: str = "s", columns: int = 10, rows: int = 10) -> TileTable:
    """Tiles of 40 level-0 pixels, side by side."""
    x, y = np.meshgrid(np.arange(columns) * 40, np.arange(rows) * 40)
    coords = np.stack([x.ravel(), y.ravel()], axis=1).astype(np.int64)
    tissue = np.ones(len(coords), np.float32)
    return TileTable(slide, coords, tissue, 20, 0.5, 0, 0.25, (columns * 40, rows * 40))


def labels_of(
    coverage: Coverage | None, number: int, positive: bool = True, min_overlap: float = 0.25, use_unannotated=False
) -> np.ndarray:
    return label_by_coverage("s", number, coverage, positive, min_overlap, use_unannotated)


def label_tiles(table: TileTable, annotation: Sequence[Annotation] | None, **how: Any) -> np.ndarray:
    return labels_of(coverage_of_table(table, annotation), len(table), **how)


def box(x0: float, y0: float, x1: float, y1: float, group: str = "Tumor") -> Annotation:
    return Annotation("a", group, np.array([[x0, y0], [x1, y0], [x1, y1], [x0, y1]], float))


@hypothesis_settings(max_examples=25)
@given(
    x=st.floats(60, 340),
    y=st.floats(60, 340),
    radius=st.floats(15, 150),
    min_overlap=st.sampled_from([0.0, 0.1, 0.25, 0.5, 1.0]),
    use_unannotated=st.booleans(),
)
def test_labels_agree_with_counting_points(
    x: float, y: float, radius: float, min_overlap: float, use_unannotated: bool
):
    """A disc, and a quarter of a million points of which each tile holds 2500."""
    turn = np.linspace(0, 2 * np.pi, 400, endpoint=False)
    disc = Annotation("disc", "_0", np.stack([x + radius * np.cos(turn), y + radius * np.sin(turn)], axis=1))
    table = table_of()
    labels = label_tiles(table, [disc], positive=True, min_overlap=min_overlap, use_unannotated=use_unannotated)
    assert labels.dtype == np.int8
    grid = (np.arange(50) + 0.5) * 0.8
    seen = Counter()
    for (left, top), label in zip(table.coords_l0, labels, strict=True):
        inside = (left + grid[None] - x) ** 2 + (top + grid[:, None] - y) ** 2 < radius**2
        share = inside.mean()
        if 0 < share < 0.003 or abs(share - min_overlap) < 0.003 < min_overlap:
            continue  # nearer to a border than the points tell
        expected = 1 if share > 0 and share >= min_overlap else -1 if share > 0 or not use_unannotated else 0
        corners = np.abs(np.array([left, top])[:, None] + np.array([[0, 40], [0, 40]]) - np.array([[x], [y]]))
        nearest = np.hypot(*np.where([(left < x < left + 40), (top < y < top + 40)], 0, corners.min(axis=1)))
        if share == 0 and nearest < radius:
            continue  # grazed between points
        assert label == expected, (share, label)
        seen[expected] += 1
    assert seen[0 if use_unannotated else -1] > 0


def test_the_rules():
    table = table_of(columns=4, rows=1)
    regions = [box(0, 0, 50, 40)]  # all of the first tile, a quarter of the second
    assert label_tiles(table, regions, positive=True).tolist() == [1, 1, -1, -1]
    assert label_tiles(table, regions, positive=True, min_overlap=0.3).tolist() == [1, -1, -1, -1]
    assert label_tiles(table, regions, positive=True, min_overlap=0.3, use_unannotated=True).tolist() == [1, -1, 0, 0]
    assert label_tiles(table, [box(0, 0, 41, 1)], positive=True, min_overlap=0).tolist() == [1, 1, -1, -1]
    assert label_tiles(table, None, positive=True).tolist() == [-1] * 4
    assert label_tiles(table, None, positive=False).tolist() == [0] * 4
    # what is cut out of a region is no tumour, and regions of other classes say nothing
    holed = [box(0, 0, 80, 40), box(40, 0, 80, 40, "Exclusion")]
    assert label_tiles(table, holed, positive=True, use_unannotated=True).tolist() == [1, 0, 0, 0]
    other = [box(0, 0, 80, 40, "Stroma")]
    assert label_tiles(table, other, positive=True, use_unannotated=True).tolist() == [-1] * 4
    with pytest.raises(CohortError, match="s: labelled as negative"):
        label_tiles(table, regions, positive=False)


def test_the_shares_that_tiling_measured_stand_in_for_the_outlines():
    table = replace(table_of(columns=4, rows=1), annotated=np.array([1, 0.25, 0.2, 0], np.float32))
    assert label_tiles(table, None, positive=True, use_unannotated=True).tolist() == [1, 1, -1, 0]


def test_tiles_of_a_feature_file_are_labelled_like_those_of_a_table():
    table = table_of()
    regions = [box(30, 30, 210, 170)]
    bag = Bag("s", np.zeros((100, 2), np.float16), table.coords_l0, tile_extent=40.0)
    assert np.array_equal(labels_of(coverage_of_bag(bag, regions), 100), label_tiles(table, regions))
    with pytest.raises(BagError, match="level-0"):
        coverage_of_bag(replace(bag, unit="um"), regions)


class Study:
    """Slides of four tiles side by side, as tables and outlines in a folder."""

    def __init__(self, folder: Path):
        self.folder = folder

    def slide(self, name: str, label: int, regions: Sequence[Annotation] | None = None, **facts: object):
        table = self.folder / f"{name}.h5"
        write_tiles(table, table_of(name, columns=4, rows=1), BUILT_FROM)
        outline = None
        if regions is not None:
            outline = self.folder / f"{name}.xml"
            write_annotations(outline, regions)
        row = SlideRow(name, self.folder / f"{name}.svs", "tumor" if label else "normal", annotation=outline)
        return replace(AnnotatedSlide.of(row, label, table), **facts)


def test_slides_without_outlines_are_left_out_and_named(tmp_path: Path):
    study = Study(tmp_path)
    slides = [
        study.slide("good", 1, [box(0, 0, 80, 40)]),
        study.slide("bare", 1),
        study.slide("empty", 1, [box(0, 0, 80, 40, "Stroma")]),
        study.slide("faint", 1, [box(0, 0, 4, 4)]),
        study.slide("clean", 0),
    ]
    labelled, notes = label_slides(slides, SupervisedSettings())
    assert {each.slide.slide: each.labels_N.tolist() for each in labelled} == {
        "good": [1, 1, -1, -1],
        "clean": [0, 0, 0, 0],
    }
    assert len(notes) == 2
    assert "bare, empty" in notes[0]
    assert "faint" in notes[1]
    # a slide whose lesions are known not to be all outlined never lends normal tiles
    partly = replace(slides[0], lesions_complete=False)
    labelled, _ = label_slides([slides[0], partly], SupervisedSettings(use_unannotated=True))
    assert [each.labels_N.tolist() for each in labelled] == [[1, 1, 0, 0], [1, 1, -1, -1]]


def test_what_cannot_be_learned_from_is_refused(tmp_path: Path):
    study = Study(tmp_path)
    tumour, bare, clean = study.slide("tumour", 1, [box(0, 0, 80, 40)]), study.slide("bare", 1), study.slide("clean", 0)
    others = [study.slide("tumour2", 1, [box(0, 0, 80, 40)]), study.slide("clean2", 0)]
    vectors = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float16)
    names = ("tumour", "bare", "clean", "tumour2", "clean2")
    bags = {name: Bag(name, vectors, table_of(columns=4, rows=1).coords_l0, tile_extent=40.0) for name in names}
    for training, validation, error, words in (
        ([bare, clean], others, ConfigError, "no tumour tile in the training.*column annotation"),
        ([tumour], others, ConfigError, "no normal tile in the training"),
        ([tumour, clean], [others[1]], ConfigError, "no tumour tile in the validation"),
        ([tumour, clean], [*others, tumour], CohortError, "patients in both.*tumour"),
        ([replace(tumour, label=2), clean], others, ConfigError, "tumour: label 2"),
    ):
        with pytest.raises(error, match=words):
            train_probe(training, validation, bags)
    moved = {**bags, "clean": replace(bags["clean"], coords=table_of(columns=4, rows=1).coords_l0[::-1])}
    with pytest.raises(BagError, match=r"clean: .*tile table"):
        train_probe([tumour, clean], others, moved)
    broken = {**bags, "clean": replace(bags["clean"], features_ND=np.full((4, 3), np.nan))}
    with pytest.raises(BagError, match=r"clean: .*NaN"):
        train_probe([tumour, clean], others, broken)
    wide = {**bags, "clean": replace(bags["clean"], features_ND=np.zeros((4, 5)))}
    with pytest.raises(BagError, match="3 and 5 dimensions"):
        train_probe([tumour, clean], others, wide)
    with pytest.raises(ConfigError, match="no tile table"):
        train_tile_network([replace(tumour, table=None), clean], others, tmp_path / "m", stain_method="none")
    (warning,) = train_probe([tumour, clean, bare], others, bags).warnings
    assert warning.startswith("training: 1 ")
    assert warning.endswith(": bare")


# ---------------------------------------------------------------------------------------------------- probe


class Planted:
    """Bags of 8 dimensions; tumour tiles are shifted along two of them, and dimensions differ in scale and mean."""

    def __init__(self, folder: Path, slides: int = 12, tiles: int = 60, shift: float = 2.0, seed: int = 0):
        rng = np.random.default_rng(seed)
        self.slides: list[AnnotatedSlide] = []
        self.bags: dict[str, Bag] = {}
        self.truth: dict[str, np.ndarray] = {}
        for k in range(slides):
            name, label = f"slide{k:02}", k % 2
            coords = np.stack([np.arange(tiles) * 40, np.zeros(tiles)], axis=1).astype(np.int64)
            tumour = (np.arange(tiles) < 10) & bool(label)
            vectors = rng.normal(size=(tiles, 8))
            vectors[:, :2] += shift * tumour[:, None]
            vectors = vectors * np.geomspace(0.1, 10, 8) + np.arange(8)
            self.bags[name] = Bag(name, vectors.astype(np.float32), coords, tile_extent=40.0)
            self.truth[name] = tumour.astype(np.int64)
            outline = folder / f"{name}.geojson" if label else None
            if outline is not None:
                write_annotations(outline, [box(0, 0, 400, 40)])
            self.slides.append(AnnotatedSlide(name, label, name, folder / f"{name}.svs", None, outline))
        self.training, self.validation, self.test = self.slides[:6], self.slides[6:8], self.slides[8:]


def slow_fit(x: np.ndarray, y: np.ndarray, l2: float) -> np.ndarray:
    """Balanced logistic regression by another solver, in float64, term by term as in a textbook."""
    weight = np.where(y == 1, 0.5 / (y == 1).sum(), 0.5 / (y == 0).sum())

    def objective(w: np.ndarray) -> float:
        z = x @ w[:-1] + w[-1]
        return float(
            -(weight * (y * -np.logaddexp(0, -z) + (1 - y) * -np.logaddexp(0, z))).sum() + l2 / 2 * w[:-1] @ w[:-1]
        )

    return optimize.minimize(objective, np.zeros(x.shape[1] + 1), method="BFGS", options={"gtol": 1e-8}).x


@torch.inference_mode()
def tiles_by(probe: TileProbe, bag: Bag) -> np.ndarray:
    """Probability of each tile to be tumour."""
    logits_NC = probe(BagStore("cpu").features(bag)).instance_logits_NC
    assert logits_NC is not None
    return logits_NC[:, 0].sigmoid().numpy()


def rows_of(planted: Planted, slides: Sequence[AnnotatedSlide]) -> tuple[np.ndarray, np.ndarray]:
    """Vectors and labels of the tiles that may be learned from: all of negative slides, tumour of positive ones."""
    x, y = [], []
    for slide in slides:
        truth = planted.truth[slide.slide]
        known = (truth == 1) | (slide.label == 0)
        x.append(planted.bags[slide.slide].features_ND[known])
        y.append(truth[known])
    return np.concatenate(x).astype(np.float64), np.concatenate(y)


def test_the_probe_is_the_solution_of_another_solver_and_validation_chooses_its_penalty(tmp_path: Path):
    planted = Planted(tmp_path, shift=1.0)
    grid = (1e-4, 1e-2, 0.1, 1.0)
    trained = train_probe(planted.training, planted.validation, planted.bags, SupervisedSettings(l2=grid))
    x, y = rows_of(planted, planted.training)
    x_val, y_val = rows_of(planted, planted.validation)
    mean, std = x.mean(0), x.std(0)
    losses = {}
    for l2 in grid:
        w = slow_fit((x - mean) / std, y, l2)
        z = (x_val - mean) / std @ w[:-1] + w[-1]
        losses[l2] = 0.5 * sum(np.logaddexp(0, (1 - 2 * k) * z[y_val == k]).mean() for k in (0, 1))
        line = next(line for line in trained.history if line["l2"] == l2)
        assert line["val_loss"] == pytest.approx(losses[l2], rel=1e-3)
        assert line["val_auc"] == pytest.approx(auc(y_val, z), abs=1e-3)
    assert trained.l2 == min(losses, key=losses.__getitem__)
    assert len(set(losses.values())) == len(grid)
    w = slow_fit((x - mean) / std, y, trained.l2)
    found = trained.module.scorer
    assert np.allclose(found.weight.detach().numpy()[0], w[:-1], atol=2e-3)
    assert found.bias.item() == pytest.approx(w[-1], abs=2e-3)
    bag = planted.bags["slide08"]
    z = (bag.features_ND - mean) / std @ w[:-1] + w[-1]
    assert np.allclose(tiles_by(trained.module, bag), 1 / (1 + np.exp(-z)), atol=2e-3)
    assert trained.num_tiles == {"train_tumour": 30, "train_normal": 180, "val_tumour": 10, "val_normal": 60}


@pytest.mark.parametrize(("pool", "k"), [("max", 10), ("topk", 5), ("topk", 1000)])
def test_slides_are_scored_by_their_most_suspicious_tiles(tmp_path: Path, pool: str, k: int):
    planted = Planted(tmp_path)
    options = SupervisedSettings.model_validate({"pool": pool, "k": k})
    trained = train_probe(planted.training, planted.validation, planted.bags, options)
    bags = [planted.bags[slide.slide] for slide in planted.test]
    for slide, result in zip(planted.test, score(trained.module, bags), strict=True):
        tiles = tiles_by(trained.module, planted.bags[slide.slide])
        expected = max(tiles) if pool == "max" else sum(sorted(tiles)[-k:]) / min(k, len(tiles))
        assert result.slide == slide.slide
        assert result.probabilities == (pytest.approx(expected, abs=1e-9),)
        assert slide_probability(tiles, options.pool, k) == pytest.approx(expected, abs=1e-12)
        assert result.critical == int(np.argmax(tiles))
        if slide.label:  # two dimensions shifted by 2: the best possible AUC of a tile is 0.977
            assert auc(planted.truth[slide.slide], tiles) > 0.93
    # All tiles surer than float32 can tell from certainty: their order must not be lost.
    weight = trained.module.scorer.weight.detach()[0].numpy()
    towards = weight / (weight @ weight) * trained.module.input_std_D.numpy()
    sure = replace(bags[0], features_ND=bags[0].features_ND + 28 * towards)
    probabilities = tiles_by(trained.module, sure)
    assert probabilities.min() > 1 - 1e-6
    assert len(set(probabilities)) > 50


def test_only_so_many_tiles_of_a_slide_count_and_the_seed_says_which(tmp_path: Path):
    planted = Planted(tmp_path)
    options = SupervisedSettings(tiles_per_slide=7)
    first, again, other = (
        train_probe(planted.training, planted.validation, planted.bags, options, seed) for seed in (0, 0, 1)
    )
    assert first.num_tiles == {"train_tumour": 21, "train_normal": 21, "val_tumour": 7, "val_normal": 7}
    weights = [each.module.scorer.weight for each in (first, again, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_a_probe_in_files(tmp_path: Path):
    planted = Planted(tmp_path)
    trained = train_probe(planted.training, planted.validation, planted.bags)
    for name in ("a", "b"):
        save_probe(tmp_path / name, trained, {"encoder": "vit", "split": "given"})
    for file in ("model.safetensors", "config.json", "metrics.jsonl"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    tensors, config = read_model(tmp_path / "a", "supervised-probe")
    assert config["encoder"] == "vit"
    assert config["l2"] == trained.l2
    probe, bag = TileProbe(8), planted.bags["slide09"]
    probe.load_state_dict(tensors)
    assert np.array_equal(tiles_by(probe, bag), tiles_by(trained.module, bag))
    history = tmp_path / "b" / "metrics.jsonl"
    assert read_history(tmp_path / "b") == tuple(trained.history)
    history.write_bytes(history.read_bytes()[:-9])
    with pytest.raises(ArtefactError, match="metrics", check=has_code("unreadable-model")):
        read_history(tmp_path / "b")
    weights = tmp_path / "a" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x7f")
    with pytest.raises(ArtefactError, match="damaged"):
        read_model(tmp_path / "a", "supervised-probe")
    with pytest.raises(ArtefactError, match="is a supervised-probe"):
        load_tile_network(tmp_path / "b")


# ---------------------------------------------------------------------------------------------------- order


def batches_of(order: BalancedOrder, first: int, last: int) -> list[np.ndarray]:
    return [pool.tiles[places] for pool in order.pools(first, last) for places in pool.batches]


def test_half_of_every_batch_is_tumour_and_each_class_goes_round():
    rng = np.random.default_rng(3)
    counts = (50, 3, 200, 17)
    labels = rng.choice(np.array([-1, 0, 1], np.int8), 270, p=[0.3, 0.6, 0.1])
    order = BalancedOrder(counts, 10, seed=1, pool=40, labels=labels)
    batches = batches_of(order, 0, 120)
    assert all(len(batch) == 10 and (labels[batch] == 1).sum() == 5 for batch in batches)
    assert not (labels[np.concatenate(batches)] == -1).any()
    for label in (0, 1):
        shown = Counter(tile for batch in batches for tile in batch if labels[tile] == label)
        assert set(shown) == set(np.flatnonzero(labels == label))
        assert max(shown.values()) - min(shown.values()) <= 1  # pass after pass
    assert [batch.tolist() for batch in batches_of(order, 57, 120)] == [batch.tolist() for batch in batches[57:]]
    other = batches_of(replace(order, seed=2), 0, 1)
    assert other[0].tolist() != batches[0].tolist()


def test_a_pass_shows_at_most_so_many_tiles_of_a_slide_and_class():
    labels = np.array([1] * 100 + [0] * 100 + [1] * 4 + [0] * 96, np.int8)
    order = BalancedOrder((200, 100), 28, seed=0, tiles_per_slide=10, labels=labels)
    batches = batches_of(order, 0, 60)
    shown = Counter((int(tile) // 200, int(labels[tile])) for batch in batches for tile in batch)
    assert shown[(0, 1)] / shown[(1, 1)] == pytest.approx(10 / 4, rel=0.05)
    assert shown[(0, 0)] / shown[(1, 0)] == pytest.approx(1, rel=0.05)
    assert len({tile for batch in batches for tile in batch if tile < 100}) == 100  # others in other passes


# ---------------------------------------------------------------------------------------------------- network

TILE = {"size_px": 32, "mpp": 1.0}
TINY = SupervisedSettings(batch=8, epochs=2, steps_per_epoch=2, workers=0, device="cpu", tiles_per_slide=20)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> list[AnnotatedSlide]:
    """Eight made slides, every second one with an outlined lesion, cut into tiles of 32 um."""
    folder = tmp_path_factory.mktemp("made")
    settings = StudySettings.model_validate({"tile": TILE, "stain": {"sample_tiles": 8}})
    slides = []
    for k in range(8):
        name, path = f"s{k}", folder / f"s{k}.tif"
        truth = make_slide(path, seed=k, size=(1024, 1024), mpp=0.5, lesions=k % 2, lesion_um=(180, 220), layout="tiff")
        outline = folder / f"{name}.xml" if truth.lesions else None
        if outline is not None:
            write_annotations(outline, [Annotation("lesion", "Tumor", ring.round(2)) for ring in truth.lesions])
        tile_slide(TileJob(SlideRef(name, path), folder / "tiles", settings))
        table = folder / "tiles" / "1mpp_32px_0px" / f"{name}.h5"
        slides.append(AnnotatedSlide(name, k % 2, f"patient{k}", path, table, outline))
    return slides


def tiles_of(slide: AnnotatedSlide) -> TrainSlide:
    assert slide.table is not None
    return TrainSlide(SlideRef(slide.slide, slide.path, slide.mpp), slide.table)


@pytest.mark.slow
def test_a_network_finds_planted_lesions(made: list[AnnotatedSlide], tmp_path: Path):
    """Four slides to train on, two to choose the epoch, two that it has never seen."""
    options = SupervisedSettings(batch=16, epochs=3, steps_per_epoch=18, lr=2e-3, workers=0, device="cpu")
    lines: list[dict] = []
    trained = train_tile_network(
        made[:4], made[4:6], tmp_path / "m", options, stain_method="slide", report=lines.append
    )
    assert trained.outcome == BUILT
    assert list(trained.history) == lines
    by_auc = max(lines, key=lambda line: (line["val_auc"], -line["val_loss"]))
    assert trained.epoch == by_auc["epoch"]

    found = tile_probabilities(trained.network, [tiles_of(slide) for slide in made[6:]], options, stain_method="slide")
    labelled, _ = label_slides(made[6:], options.model_copy(update={"use_unannotated": True}))
    truth = np.concatenate([each.labels_N for each in labelled])
    probabilities = np.concatenate(found)
    known = truth >= 0
    # With 18 tumour and 249 normal tiles chance is 0.50 +- 0.07; seeds 0 to 4 gave 0.81 to 0.90 when this was written.
    assert auc(truth[known], probabilities[known]) > 0.75
    assert sum(truth == 1) > 10

    # one tile after the other, by hand
    table = read_tiles(made[7].table)  # pyright: ignore[reportArgumentType]
    with open_slide(made[7].path) as slide, torch.inference_mode():
        for row in range(0, len(table), 25):
            x, y = table.coords_l0[row]
            assert table.stain is not None
            tile = stain.apply(slide.read_tile(int(x), int(y), 32, 1.0), table.stain)
            image = trained.network.encoder.normalize(torch.from_numpy(tile).permute(2, 0, 1)[None])
            assert found[1][row] == pytest.approx(trained.network(image).sigmoid().item(), abs=1e-5)

    scores = score_slides(trained.network, [tiles_of(slide) for slide in made[6:]], options, stain_method="slide")
    assert [each.slide for each in scores] == ["s6", "s7"]
    assert scores[1].probabilities == (pytest.approx(np.sort(found[1])[-10:].mean(), abs=1e-9),)
    assert scores[1].critical == int(found[1].argmax())

    again = train_tile_network(made[:4], made[4:6], tmp_path / "m", options, stain_method="slide")
    assert again.outcome == UP_TO_DATE
    assert again.epoch == trained.epoch
    for name, tensor in trained.network.state_dict().items():
        assert torch.equal(again.network.state_dict()[name], tensor)


class Stopped(Exception):
    pass


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(made: list[AnnotatedSlide], tmp_path: Path):
    def stop(line: dict) -> None:
        raise Stopped

    whole = train_tile_network(made[:2], made[2:4], tmp_path / "whole", TINY, 5, stain_method="slide")
    with pytest.raises(Stopped):
        train_tile_network(made[:2], made[2:4], tmp_path / "parts", TINY, 5, stain_method="slide", report=stop)
    assert not (tmp_path / "parts" / "config.json").exists()
    parts = train_tile_network(made[:2], made[2:4], tmp_path / "parts", TINY, 5, stain_method="slide")
    assert (parts.outcome, parts.resumed_after) == (BUILT, 1)
    assert parts.epoch == whole.epoch
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "parts" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()
    assert sorted(path.name for path in (tmp_path / "parts").iterdir()) == [
        "config.json",
        "metrics.jsonl",
        "model.safetensors",
    ]

    text = (tmp_path / "whole" / "config.json").read_text()
    assert str(made[0].path.parent) not in text
    config = json.loads(text)
    assert config["encoder"]["mpp"] == 1.0
    assert config["num_tiles"]["train"]["tumour"] > 5
    changed = TINY.model_copy(update={"min_overlap": 0.9})
    other = train_tile_network(made[:2], made[2:4], tmp_path / "whole", changed, 5, stain_method="slide")
    assert other.outcome == rebuilt(Change(ChangeKind.SETTING, "supervised.min_overlap", TINY.min_overlap, 0.9))
    pooled = changed.model_copy(update={"pool": "max", "workers": 1})
    assert (
        train_tile_network(made[:2], made[2:4], tmp_path / "whole", pooled, 5, stain_method="slide").outcome
        == UP_TO_DATE
    )


@pytest.mark.slow
def test_a_network_does_not_score_tiles_that_it_was_not_made_for(made: list[AnnotatedSlide], tmp_path: Path):
    short = TINY.model_copy(update={"epochs": 1, "steps_per_epoch": 1})
    trained = train_tile_network(made[:2], made[2:4], tmp_path / "m", short, stain_method="slide")
    with pytest.raises(EncoderError, match="stain method 'slide'"):
        score_slides(trained.network, [tiles_of(made[4])], short, stain_method="none")
    # and it can start another one, whose tiles must fit too
    supervised_again = short.model_copy(update={"init": str(tmp_path / "encoder")})
    from selfvitmil.encoder import save_encoder

    save_encoder(tmp_path / "encoder", trained.network.encoder)
    with pytest.raises(EncoderError, match="stain method 'slide'"):
        train_tile_network(made[:2], made[2:4], tmp_path / "n", supervised_again, stain_method="none")
    started = train_tile_network(made[:2], made[2:4], tmp_path / "n", supervised_again, stain_method="slide")
    assert started.network.encoder.config.mean == trained.network.encoder.config.mean
    assert started.network.encoder.config.provenance == {"method": "supervised", "init": "encoder"}


@pytest.mark.slow
@pytest.mark.parametrize("method", ["resnet18", "probe"])
def test_rows_of_both_protocols_lie_apart_and_tell_the_time_of_their_training(
    method: str, made: list[AnnotatedSlide], tmp_path: Path
):
    parts = ["train"] * 4 + ["val"] * 2 + ["test"] * 2
    rows = [
        SlideRow(one.slide, one.path, "tumor" if one.label else "normal", one.patient, part, annotation=one.annotation)
        for one, part in zip(made, parts, strict=True)
    ]
    lines: list[dict] = []

    def run(protocol: str) -> Run:
        told = {"tile": TILE, "supervised": TINY.model_dump(), "compare": {"supervised": method}}
        settings = StudySettings.model_validate({**told, "evaluate": {"protocol": protocol}})
        cases = find_cases(make_cohort(rows), files, tiling="1mpp_32px_0px")
        trial = hold_out_test_labels(cases, make_splits(cases, settings.train, settings.evaluate), settings.evaluate)
        study = made[0].path.parent
        row = SupervisedRow(study, settings, cases, trial, tmp_path / "models" / "vit", BagStore("cpu"), lines.append)
        return row.run(trial.splits[0], 0)

    files = {}
    for one in made:
        assert one.table is not None
        table = read_tiles(one.table)
        vectors = np.random.default_rng(0).normal(size=(len(table), 4))
        files[one.slide] = tmp_path / "features_vit" / f"{one.slide}.h5"
        write_bag(files[one.slide], vectors, table, "vit", {})
    honest, optimistic = run("honest"), run("optimistic")
    folders = {path.parent.parent.name for path in (tmp_path / "models").rglob("config.json")}
    assert folders == {"given", "given_optimistic"}
    again = run("honest")
    if method == "resnet18":
        assert [line["epoch"] for line in lines] == [1, 2, 1, 2]  # of two trainings
        assert {line["method"] for line in lines} == {"resnet18"}
        assert (honest.outcome, optimistic.outcome, again.outcome) == (BUILT, BUILT, UP_TO_DATE)
        assert again.seconds == honest.seconds == sum(line["seconds"] for line in lines[:2])
    told = [{slide: each.probabilities for slide, each in run_.test.items()} for run_ in (honest, again)]
    assert told[0] == told[1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_network_trains_on_a_gpu(made: list[AnnotatedSlide], tmp_path: Path):
    """In bf16, with reader processes; scores of GPU and CPU agree."""
    options = SupervisedSettings(batch=32, epochs=3, steps_per_epoch=30, lr=2e-3, workers=2)
    trained = train_tile_network(made[:4], made[4:6], tmp_path / "m", options, stain_method="slide")
    assert max(line["val_auc"] for line in trained.history) > 0.78
    slides = [tiles_of(slide) for slide in made[6:]]
    gpu = tile_probabilities(trained.network, slides, options, stain_method="slide")
    cpu = tile_probabilities(
        trained.network, slides, options.model_copy(update={"device": "cpu"}), stain_method="slide"
    )
    assert max(np.abs(a - b).max() for a, b in zip(gpu, cpu, strict=True)) < 0.05
