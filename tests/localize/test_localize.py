"""Scores of tiles, their scales, and the command `localize`, on planted evidence whose place is known."""

from __future__ import annotations

import csv
import json
import shutil
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import planted
from helpers.heatmaps import PREDICTION, make_heatmap
from helpers.outcomes import changed
from selfvitmil import aggregate, cli, evaluate
from selfvitmil.aggregate import base
from selfvitmil.aggregate.base import TileScores, score, score_tiles
from selfvitmil.aggregate.train import LabelledBag, train
from selfvitmil.annotations import Annotation, write_annotations
from selfvitmil.bags import Bag, read_bag, write_bag
from selfvitmil.cohort.camelyon16 import has_camelyon16_names
from selfvitmil.engine import Engine
from selfvitmil.errors import AnnotationError, ArtefactError, BagError, CohortError, ConfigError
from selfvitmil.evaluate import read_predictions
from selfvitmil.localize import export, heatmap, scores
from selfvitmil.localize.detection import LESION_GROUP, RANKS_ONLY, REGION_GROUP
from selfvitmil.localize.export import ExportJob, export_heatmap
from selfvitmil.localize.heatmap import Frame, Heatmap, read_heatmap, write_heatmap
from selfvitmil.localize.scores import source_by_annotations
from selfvitmil.rendering import render
from selfvitmil.settings import EngineSettings, LocalizeSettings, TrainSettings, resolve_settings
from selfvitmil.slides import SlideRef, synthetic
from selfvitmil.stages import evaluate as evaluate_stage
from selfvitmil.stages import localize as localize_stage
from selfvitmil.stages import train as train_stage
from selfvitmil.store.provenance import UP_TO_DATE, Provenance
from selfvitmil.study import CohortSource, FeatureChoice, Study
from selfvitmil.tiles import FORMAT_VERSION, TileTable, write_tiles

DIM = 6
SMALL: dict[str, dict[str, Any]] = {
    "self-vit-mil": {},
    "dsmil": {},
    "dsmil-lc": {"bottleneck": 4},
    "abmil": {"hidden": 12, "attention_dim": 6},
    "abmil-gated": {"hidden": 12, "attention_dim": 6},
    "chowder": {"top": 2, "bottom": 1},
    "transmil": {"hidden": 16, "heads": 2, "landmarks": 4},
    "mil-rnn": {"s": 3, "hidden": 8},
    "clam-sb": {"hidden": 12, "attention_dim": 6, "k": 2},
    "mean": {},
    "max": {},
    "topk": {"k": 2},
}
EVERY = pytest.mark.parametrize("name", aggregate.NAMES)


def bag_of(size: int, seed: int = 0, lesion: int = 0, shift: float = 5.0) -> Bag:
    """TilePlacement in a row; the first `lesion` vectors are shifted along the first dimension."""
    features = np.random.default_rng(seed).normal(size=(size, DIM))
    features[:lesion, 0] += shift
    coords = np.stack([np.arange(size) * 448, np.zeros(size, np.int64)], axis=1)
    return Bag(f"bag{seed}", features.astype(np.float16), coords)


def module_of(name: str, num_classes: int = 1, seed: int = 3, **options: Any) -> aggregate.Aggregator:
    torch.manual_seed(seed)
    return aggregate.build(name, DIM, num_classes, **{**SMALL[name], **options}).eval()


# ---------------------------------------------------------------------------------------------------- tiles' scores


@EVERY
@pytest.mark.parametrize("num_classes", [1, 3])
def test_tiles_are_scored_with_the_very_numbers_of_their_slide(name: str, num_classes: int):
    module, bags = module_of(name, num_classes), [bag_of(size, size) for size in (9, 1, 23)]
    for ours, slide in zip(score_tiles(module, bags), score(module, bags), strict=True):
        assert vars(ours.bag) == vars(slide)
        output = module(torch.from_numpy(bags[[9, 1, 23].index(int(slide.slide[3:]))].features_ND))
        for array, tensor in ((ours.attention_NC, output.attention_NC), (ours.instance_NC, output.instance_logits_NC)):
            assert (array is None) == (tensor is None)
            if array is not None:
                assert array.shape == (len(bags[[9, 1, 23].index(int(slide.slide[3:]))]), num_classes)
                assert array.dtype == np.float32
        if output.attention_NC is not None:
            np.testing.assert_array_equal(ours.attention_NC, output.attention_NC.detach().numpy())


def test_other_bags_change_no_bit_of_a_score():
    """Nor how many threads there are: a large bag is computed with all of them."""
    rng, dim = np.random.default_rng(0), 512
    small, large = (Bag(f"{n}", rng.normal(size=(n, dim)).astype(np.float16), None) for n in (300, 9000))
    torch.manual_seed(0)
    # The small products of this method come out otherwise with more threads, though not always in the last digit.
    modules = [aggregate.build("mil-rnn", dim, 1) for _ in range(6)]
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for module in modules:
            alone, together = score(module, [small]), score(module, [large, small])
            assert vars(alone[0]) == vars(together[1])
        module = modules[0]
        stream = score_tiles(module, [large, small])
        next(stream)
        assert torch.get_num_threads() == 2  # the caller's own settings hold between slides
        assert torch.is_grad_enabled()
    finally:
        torch.set_num_threads(before)


@EVERY
def test_effect_is_what_taking_the_tile_out_changes(name: str):
    module, bag = module_of(name, 2), bag_of(7, lesion=2)
    (told,) = score_tiles(module, [bag], effect=True)
    assert told.effect_NC is not None
    for row in range(len(bag)):
        rest = replace(bag, features_ND=np.delete(bag.features_ND, row, axis=0))
        without = score(module, [rest])[0].probabilities
        np.testing.assert_allclose(told.effect_NC[row], np.subtract(told.bag.probabilities, without), atol=1e-7)
    assert vars(told.bag) == vars(score(module, [bag])[0])


def test_effect_moves_coordinates_along():
    module, bag = module_of("transmil", coordinates=True), bag_of(8)
    bag = replace(bag, coords=np.array([[x * 7 % 64, x * 5 % 32] for x in range(8)]))
    (told,) = score_tiles(module, [bag], effect=True)
    assert told.effect_NC is not None
    assert bag.coords is not None
    rest = replace(bag, features_ND=np.delete(bag.features_ND, 3, axis=0), coords=np.delete(bag.coords, 3, axis=0))
    expected = told.bag.probabilities[0] - score(module, [rest])[0].probabilities[0]
    assert told.effect_NC[3, 0] == pytest.approx(expected, abs=1e-7)


def test_effects_of_few_and_of_too_many_tiles(monkeypatch: pytest.MonkeyPatch):
    (alone,) = score_tiles(module_of("max"), [bag_of(1)], effect=True)
    assert alone.effect_NC is not None
    assert alone.effect_NC.tolist() == [[0.0]]
    monkeypatch.setattr(base, "MAX_EFFECT_INSTANCES", 5)
    with pytest.raises(BagError, match=r"6 tiles are too many .* limit is 5.*localize.score"):
        next(score_tiles(module_of("max"), [bag_of(6)], effect=True))


def test_instance_probabilities_by_hand():
    bag = bag_of(5)
    rows = torch.from_numpy(bag.features_ND.astype(np.float32))
    for name, num_classes, squash in (("max", 1, "sigmoid"), ("dsmil", 3, "sigmoid"), ("max", 3, "softmax")):
        module = module_of(name, num_classes)
        logits = module(rows).instance_logits_NC
        assert logits is not None
        expected = logits.sigmoid() if squash == "sigmoid" else logits.softmax(1)
        (told,) = score_tiles(module, [bag])
        assert told.instance_NC is not None
        np.testing.assert_allclose(told.instance_NC, expected.detach().numpy(), rtol=1e-6)


def test_the_tiles_of_clam_are_judged_by_each_class_alone():
    """Each class has a two-way classifier of tiles, whose softmax over out and in is the probability."""
    module, bag = module_of("clam-sb", 3, hidden=0), bag_of(5)
    with torch.no_grad():
        classifiers = module.get_submodule("instance_classifiers")
        classifiers.get_parameter("bias").copy_(torch.tensor([16.0, 0.0] * 3))  # nothing is of any class
        two_way = classifiers(torch.from_numpy(bag.features_ND.astype(np.float32))).reshape(5, 3, 2)
    (told,) = score_tiles(module, [bag])
    assert told.instance_NC is not None
    np.testing.assert_allclose(told.instance_NC, two_way.softmax(2)[..., 1].numpy(), rtol=1e-4)
    assert told.instance_NC.max() < 0.01


def test_chowder_that_scores_evidence_lowest_is_turned_round():
    module, bag = module_of("chowder", slide_hidden=(), scorer_hidden=0), bag_of(12, lesion=3)
    with torch.no_grad():
        weights = dict(module.named_parameters())
        weights["scorer.weight"].copy_(-torch.eye(1, DIM))  # what is planted gets the lowest scores
        weights["slide.0.weight"].fill_(-1.0)  # and low scores make a slide positive
    (told,) = score_tiles(module, [bag])
    assert told.instance_NC is not None
    assert set(np.argsort(-told.instance_NC[:, 0])[:3]) == {0, 1, 2}


# ---------------------------------------------------------------------------------------------------- scales

VALUES = st.lists(st.one_of(st.floats(-5, 5, width=32), st.sampled_from([0.0, 1.0, 30.0])), min_size=2, max_size=40)


def slow_scale(values: Sequence[float], scale: str, limit: float) -> list[float]:
    """Loops over the tiles, as one would explain it."""
    mean = sum(values) / len(values)
    deviation = (sum((v - mean) ** 2 for v in values) / len(values)) ** 0.5
    z = [(v - mean) / deviation for v in values]
    if scale == "percentile":
        pairs = [sum((o < v) + 0.5 * (o == v) for k, o in enumerate(values) if k != i) for i, v in enumerate(values)]
        return [count / (len(values) - 1) for count in pairs]
    if scale == "winsor":
        values = [min(max(each, -limit), limit) for each in z]
    kept = [v for v, each in zip(values, z, strict=True) if scale != "zero-outliers" or each <= limit]
    low, high = min(kept), max(kept)
    if len(kept) < 2 or statistics.pstdev(kept) <= 1e-6 * max(map(abs, kept)):
        return [0.0] * len(values)
    rest = [(v - low) / (high - low) for v in values]
    return [r if scale != "zero-outliers" or each <= limit else 0.0 for r, each in zip(rest, z, strict=True)]


@pytest.mark.parametrize("scale", ["winsor", "zero-outliers", "percentile", "none"])
@settings(max_examples=60)
@given(values=VALUES, limit=st.sampled_from([0.7, 1.5, 3.0]))
def test_scales_are_what_a_slow_loop_gives(scale: scores.Scale, values: list[float], limit: float):
    told = scores.rescale(values, scale, limit)
    assert told.dtype == np.float32
    assert np.isfinite(told).all()
    assert told.min() >= 0
    assert told.max() <= 1
    if np.std(values) > 1e-4 * np.abs(values).max():
        np.testing.assert_allclose(told, slow_scale(values, scale, limit), atol=2e-6)
    elif np.std(values) == 0:
        assert not told.any()


def test_winsor_keeps_the_critical_tile_and_the_literal_rule_erases_it():
    values = np.r_[np.linspace(0, 1, 60), 40.0]
    assert scores.rescale(values, "winsor")[-1] == 1
    assert scores.rescale(values, "zero-outliers")[-1] == 0
    assert scores.rescale(values, "zero-outliers")[-2] == 1
    np.testing.assert_allclose(scores.z_scores(values), (values - values.mean()) / values.std())


@pytest.mark.parametrize("scale", ["winsor", "zero-outliers", "percentile", "none"])
def test_scores_that_point_nowhere(scale: scores.Scale):
    for values in ([0.25] * 4, np.full(5, 1 / 3) + np.arange(5) * 1e-9, [0.0, 0.0]):
        assert not scores.rescale(values, scale).any()
    assert scores.rescale([0.3], scale).tolist() == [1.0]


# ---------------------------------------------------------------------------------------------------- seeds to maps

FRAME = Frame(0.25, (448 * 10, 448), 448.0, 448.0, 0.5, 224)


def told_of(attention: Any, instance: Any, effect: Any = None, probabilities: tuple[float, ...] = (0.8,)) -> TileScores:
    arrays = [
        None if each is None else np.array(each, np.float32).reshape(len(each), -1)
        for each in (attention, instance, effect)
    ]
    return TileScores(base.BagScore("a", probabilities, None, None, None, 0), *arrays)


def map_of(told: Sequence[TileScores], prediction: Any = PREDICTION, annotated: Any = None, **chosen: Any) -> Heatmap:
    number = len(
        next(each for each in (told[0].attention_NC, told[0].instance_NC, told[0].effect_NC) if each is not None)
    )
    coords = np.stack([np.arange(number) * 448, np.zeros(number, np.int64)], axis=1)
    return scores.build_heatmap(
        "a", "m", "dsmil", FRAME, coords, told, prediction, LocalizeSettings(**chosen), annotated=annotated
    )


def test_seeds_are_combined_by_their_means():
    told = [told_of([0.5, 0.3, 0.2], [0.9, 0.1, 0.4]), told_of([0.1, 0.1, 0.8], [0.2, 0.6, 0.5])]
    made = map_of(told, scale="none", score="attention")
    np.testing.assert_allclose(made.columns["attention"], [0.3, 0.2, 0.5], rtol=1e-6)
    np.testing.assert_allclose(made.columns["instance"], [0.55, 0.35, 0.45], rtol=1e-6)
    np.testing.assert_allclose(
        made.columns["product"], [(0.45 + 0.02) / 2, (0.03 + 0.06) / 2, (0.08 + 0.4) / 2], rtol=1e-6
    )
    assert "effect" not in made.columns
    np.testing.assert_allclose(made.score, [1 / 3, 0, 1], atol=1e-6)
    np.testing.assert_allclose(made.detection, made.score * 0.9, rtol=1e-6)


def test_auto_takes_tile_scores_then_attention_then_effect():
    assert map_of([told_of([0.5, 0.5, 0], [1, 0, 0])]).kind == "instance"
    assert "no annotated validation slide" in map_of([told_of([0.5, 0.5, 0], [1, 0, 0])]).details["shown_because"]
    assert map_of([told_of([0.5, 0.5, 0], None)]).kind == "attention"
    assert map_of([told_of(None, [1, 0, 0])]).kind == "instance"
    assert map_of([told_of(None, None, [0.1, 0, -0.2])]).kind == "effect"
    assert map_of([told_of([0.5, 0.5, 0], [1, 0, 0])], score="product").kind == "product"
    with pytest.raises(ConfigError, match=r"localize.score 'instance' with dsmil, its per-tile evidence is attention"):
        map_of([told_of([0.5, 0.5, 0], None)], score="instance")


def slow_average_precision(tumour: np.ndarray, scores: np.ndarray) -> float:
    """Precision at every tumour tile from the highest on; no two scores are equal."""
    ranked = tumour[np.argsort(-scores)]
    return float(np.mean([ranked[: place + 1].mean() for place in np.flatnonzero(ranked)]))


def test_annotated_validation_slides_choose_what_is_shown():
    rng = np.random.default_rng(0)
    slides, expected = [], {"instance": [], "attention": []}
    for _ in range(3):
        annotated = np.array([1, 0.9, 0.5, 0.3, 0, 0, 0, 0.005], np.float32)
        tumour, known = annotated >= 0.5, np.array([1, 1, 1, 0, 1, 1, 1, 1], bool)
        columns = {"attention": annotated + rng.random(8), "instance": rng.random(8), "product": rng.random(8)}
        slides.append(({name: values.astype(np.float32) for name, values in columns.items()}, annotated))
        for kind, found in expected.items():
            found.append(slow_average_precision(tumour[known], slides[-1][0][kind][known]))
    chosen = source_by_annotations(slides)
    assert chosen is not None
    assert (chosen.kind, chosen.num_slides) == ("attention", 3)
    assert chosen.precision == pytest.approx({kind: np.mean(found) for kind, found in expected.items()})
    assert "3 annotated validation slides" in chosen.reason
    swapped = [({"attention": one["instance"], "instance": one["attention"]}, share) for one, share in slides]
    assert getattr(source_by_annotations(swapped), "kind", "") == "instance"
    same = [({"attention": one["instance"], "instance": one["instance"]}, share) for one, share in slides]
    assert getattr(source_by_annotations(same), "kind", "") == "instance"
    assert source_by_annotations([]) is None
    assert source_by_annotations([(slides[0][0], np.zeros(8, np.float32))]) is None  # nothing but normal tissue
    assert source_by_annotations([({"attention": slides[0][0]["attention"]}, slides[0][1])]) is None


def test_gate_blanks_slides_that_were_not_found_positive():
    told = [told_of([0.5, 0.3, 0.2], None)]
    negative = replace(PREDICTION, decision="normal", probability=(0.2,))
    for gate, prediction, blank in ((True, negative, True), (False, negative, False), (True, PREDICTION, False)):
        made = map_of(told, prediction, gate=gate)
        assert made.score.any() != blank
        assert made.detection.any() != blank
        assert made.columns["attention"].any()
        assert made.gated is gate


def test_maps_that_point_nowhere_say_so():
    made = map_of([told_of([1 / 3, 1 / 3, 1 / 3], None)])
    assert "is uninformative" in made.warnings[0]
    assert map_of([told_of([1.0], None)]).score.tolist() == [1.0]


def test_the_class_that_is_shown():
    three = ("a", "b", "c")
    assert scores.shown_class(("normal", "tumor"), 0, None) == "tumor"
    assert scores.shown_class(three, 2, None) == "c"
    assert scores.shown_class(three, 2, "b") == "b"
    with pytest.raises(ConfigError, match=r"localize.of_class 'd', the classes are a, b, c"):
        scores.shown_class(three, 0, "d")
    with pytest.raises(ConfigError, match="the positive one, tumor"):
        scores.shown_class(("normal", "tumor"), 0, "normal")
    prediction = replace(PREDICTION, probability=(0.2, 0.5, 0.3), classes=three, shown="c", decision="b")
    made = map_of([told_of([[0.1, 0.2, 0.6], [0.9, 0.8, 0.4]], None)], prediction)
    np.testing.assert_allclose(made.columns["attention"], [0.6, 0.4], rtol=1e-6)
    np.testing.assert_allclose(made.detection, made.score * 0.3, rtol=1e-6)


LEARN = {"epochs": 25, "lr": 0.01, "warmup_epochs": 0, "patience": 0, "standardize": True}


@EVERY
def test_the_hottest_tile_lies_in_the_planted_lesion(name: str):
    """Trained on slide labels alone; a third of the tiles of a positive slide carry the evidence."""
    bags = [LabelledBag(f"bag{k}", bag_of(12, k, 4 * (k % 2)), k % 2) for k in range(36)]
    shorter = {"epochs": 10} if name == "transmil" else {}
    chosen = TrainSettings.model_validate({**LEARN, **shorter, "options": SMALL[name]})
    trained = train(name, bags[:24], bags[24:30], 1, chosen, 0)
    hit = []
    for told in score_tiles(trained.module, [case.bag for case in bags[25::2]]):
        made = map_of([told])
        assert made.kind == ("attention" if told.instance_NC is None else "instance")
        hit.append(int(np.argmax(made.columns[made.kind])) < 4)
    # TransMIL's attention leaves out what its convolutions carry, so that it may point beside the evidence.
    assert np.mean(hit) >= (0.6 if name == "transmil" else 1.0), hit


# ---------------------------------------------------------------------------------------------------- placement


def placed_bag(**attributes: Any) -> Bag:
    told = {"patch_size": 224, "overlap": 0, "level0_width": 4480, "level0_height": 900, "level0_mpp": 0.25}
    coords = np.array([[0, 0], [448, 0], [896, 448]])
    return Bag("a", np.zeros((3, DIM)), coords, "l0", 448.0, 0.5, "vit", {**told, **attributes})


def test_our_own_files_tell_everything():
    told = heatmap.place_tiles(placed_bag(overlap=56))
    assert told.frame == Frame(0.25, (4480, 900), 448.0, 336.0, 0.5, 224)
    assert told.coords_l0.tolist() == [[0, 0], [448, 0], [896, 448]]


def test_microns_become_pixels_by_the_slide(tmp_path: Path):
    """STAMP's corners, with the slide's resolution from the cohort and its size from the file."""
    truth = synthetic.make_slide(tmp_path / "a.tif", seed=1, size=(1536, 1536), mpp=0.5)
    assert truth is not None
    bag = Bag(
        "a",
        np.zeros((2, DIM)),
        np.array([[0.0, 0.0], [256.0, 512.0]]),
        "um",
        256.0,
        256 / 224,
        "vit",
        {"tile_size_px": 224},
    )
    look = lambda: heatmap.read_slide_geometry(SlideRef("a", tmp_path / "a.tif", 0.4))  # noqa: E731
    told = heatmap.place_tiles(bag, None, look)
    assert told.coords_l0.tolist() == [[0, 0], [640, 1280]]
    assert told.frame == Frame(0.4, (1536, 1536), 640.0, 640.0, 256 / 224, 224)
    nowhere = lambda: heatmap.read_slide_geometry(SlideRef("b", tmp_path / "b.tif", 0.4))  # noqa: E731
    with pytest.raises(BagError, match=r"size in pixels is unknown.*Put the slide's file"):
        heatmap.place_tiles(bag, None, nowhere)
    with pytest.raises(BagError, match=r"microns per pixel is unknown.*column mpp"):
        heatmap.place_tiles(bag)


def test_tile_tables_fill_what_a_file_leaves_open():
    bag = replace(placed_bag(), attributes={"patch_size": 224}, mpp=None)  # as TRIDENT leaves it
    table = TileTable("a", np.zeros((1, 2), np.int64), np.ones(1, np.float32), 224, 0.5, 0, 0.25, (4480, 900))
    assert heatmap.place_tiles(bag, table).frame == Frame(0.25, (4480, 900), 448.0, 448.0, 0.5, 224)


def test_tiles_without_a_size_are_as_wide_as_they_lie_apart():
    bag = replace(placed_bag(), tile_extent=None, mpp=None)
    bag = replace(bag, attributes={key: value for key, value in bag.attributes.items() if key != "patch_size"})
    told = heatmap.place_tiles(bag)
    assert told.frame.extent_l0 == 448
    assert "least distance, 448 px" in told.warnings[0]
    with pytest.raises(BagError, match="the size of its tiles"):
        heatmap.place_tiles(replace(bag, coords=np.zeros((3, 2), np.int64)))


def test_bags_that_have_no_place_in_the_slide():
    with pytest.raises(BagError, match="no coordinates"):
        heatmap.place_tiles(replace(placed_bag(), coords=None))
    with pytest.raises(BagError, match=r"outside the slide.*another slide"):
        heatmap.place_tiles(placed_bag(level0_width=800))


def square(x: float, y: float, edge: float) -> Annotation:
    return Annotation("lesion", "tumor", np.array([[x, y], [x + edge, y], [x + edge, y + edge], [x, y + edge]]))


def test_annotations_of_another_slide_are_refused():
    size = (4480, 900)
    assert heatmap.check_annotations((square(10, 10, 100),), size, "a.xml") == ()
    with pytest.raises(AnnotationError, match=r"a.xml: 100% of its points lie outside .* of another slide"):
        heatmap.check_annotations((square(9000, 10, 100),), size, "a.xml")
    slip = Annotation(
        "lesion", "tumor", np.r_[square(10, 10, 100).polygon, [[k, 300 + k] for k in range(20)], [[0, 2000]]]
    )
    assert "4.0% of the points" in heatmap.check_annotations((slip,), size, "a.xml")[0]


def test_shares_of_annotated_tumour_follow_the_order_of_the_bag():
    told = heatmap.place_tiles(placed_bag())
    coords = np.array([[896, 448], [1344, 448], [0, 0], [448, 0]])
    table = TileTable(
        "a",
        coords,
        np.ones(4, np.float32),
        224,
        0.5,
        0,
        0.25,
        (4480, 900),
        annotated=np.array([0.9, 0.1, 0.2, 0], np.float32),
    )
    shares, _ = heatmap.annotated_shares(told, table, None)
    np.testing.assert_array_equal(shares, np.array([0.2, 0, 0.9], np.float32))
    shares, _ = heatmap.annotated_shares(told, None, (square(0, 0, 224),))
    assert shares is not None
    np.testing.assert_allclose(shares, [0.25, 0, 0])
    assert "another slide?" in heatmap.annotated_shares(told, None, (square(3000, 0, 224),))[1][0]
    assert heatmap.annotated_shares(told, None, None) == (None, ())


# ---------------------------------------------------------------------------------------------------- the command

QUICK = {"seeds": 2, "epochs": 10, "lr": 0.02, "warmup_epochs": 0, "standardize": True}


class StudyAt:
    """A study on somebody else's feature files, with planted evidence in the first third of every positive bag."""

    def __init__(self, folder: Path, labels: Sequence[str] = ("normal", "tumor")):
        self.folder = folder
        self.foreign = folder / "foreign"
        cases = planted.planted(self.foreign, labels, patients=8, shift=7.0)
        self.rows = [
            [row.patient, row.slide, row.label, "test" if number % 8 >= 6 else "train"]
            for number, row in enumerate(cases.cohort.rows)
        ]
        self.write_labels()

    @property
    def study(self) -> Path:
        return self.folder / "study"

    @property
    def test_slides(self) -> list[str]:
        return [row[1] for row in self.rows if row[3] == "test"]

    def write_labels(self) -> None:
        with (self.folder / "labels.csv").open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([["case_id", "slide_id", "label", "split"], *self.rows])

    def copy(self, folder: Path) -> StudyAt:
        shutil.copytree(self.folder, folder)
        twin = object.__new__(StudyAt)
        twin.folder, twin.foreign, twin.rows = folder, folder / "foreign", [list(row) for row in self.rows]
        return twin

    def run(
        self, command: Callable[..., Any], name: str | None = None, slides: Sequence[str] = (),
        *, method: str = "dsmil", **flags: Any,
    ) -> Any:  # fmt: skip
        source = CohortSource(cohort=self.folder / "labels.csv", features=self.foreign / "features_vit")
        choice = FeatureChoice(folder=self.foreign / "features_vit")
        told = {key: dict(value) for key, value in flags.items()}
        told["train"] = {**QUICK, "aggregator": method, **told.get("train", {})}
        told["evaluate"] = {"bootstrap": 100, **told.get("evaluate", {})}
        chosen = resolve_settings(None, told)
        with Engine(EngineSettings(workers=0)) as engine:
            if command is not localize_stage.localize:
                return command(Study(self.study, chosen, source), choice, engine)
            return localize_stage.localize(Study(self.study, chosen, source), choice, engine, name, slides)

    def maps(self, model: str = "features_vit_dsmil") -> dict[str, Heatmap]:
        return {path.stem: read_heatmap(path) for path in sorted((self.study / "maps" / model).glob("*.h5"))}


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> StudyAt:
    made = StudyAt(tmp_path_factory.mktemp("judged") / "a")
    assert not made.run(evaluate_stage.evaluate).failures
    return made


@pytest.fixture
def work(judged: StudyAt, tmp_path: Path) -> StudyAt:
    return judged.copy(tmp_path / "a")


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_maps_tell_what_the_evaluation_told_and_open_no_label(work: StudyAt, monkeypatch: pytest.MonkeyPatch):
    trials: list[Any] = []
    hold_out = evaluate.hold_out_test_labels
    monkeypatch.setattr(evaluate, "hold_out_test_labels", lambda *given: trials.append(hold_out(*given)) or trials[-1])
    summary = work.run(localize_stage.localize)
    assert not summary.failures
    assert [trial.labels.reason for trial in trials] == [""]  # held out to the end
    told, classes = read_predictions(work.study / "results" / "features_vit_dsmil" / "predictions.csv")
    rows = {row.slide: row for row in told if row.part == "test" and row.seed is None}
    maps = work.maps()
    assert set(maps) == set(rows) == set(work.test_slides)
    for slide, made in maps.items():
        prediction, row = made.prediction, rows[slide]
        assert (prediction.probability, prediction.max_probability, prediction.bag_probability) == (
            row.score,
            row.max,
            row.bag,
        )
        assert (prediction.threshold, prediction.threshold_from) == (row.threshold, row.threshold_from)
        assert prediction.decision == classes[row.decision]
        assert (prediction.split, prediction.part, prediction.seeds, prediction.shown) == (
            "given",
            "test",
            (0, 1),
            "tumor",
        )
        bag = read_bag(work.foreign / "features_vit" / f"{slide}.h5")
        np.testing.assert_array_equal(made.coords_l0, bag.coords)
        if slide.startswith("tumor"):
            assert np.argmax(made.columns["attention"]) < len(bag) // 3
            assert prediction.is_positive
    assert not any("label" in cell for cell in render(summary).table[0])
    assert set(summary.exports) == set(summary.outcomes) == set(maps)
    assert any(
        "pictures show a grid of tiles" in text for product in summary.exports.values() for text in product.warnings
    )


def test_slides_that_are_called_negative_have_no_lesions(work: StudyAt):
    summary = work.run(localize_stage.localize)
    called = {slide: made.prediction.is_positive for slide, made in work.maps().items()}
    assert set(called.values()) == {True, False}
    with (work.study / "maps" / "features_vit_dsmil" / "lesions.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["slide"] for row in rows} == {slide for slide, positive in called.items() if positive}
    assert all(float(row["tile_um"]) == 112 and row["size"].split(", ")[0] for row in rows)
    assert not any("metasta" in row["size"] or "tumour cells" in row["size"] for row in rows)
    table = render(summary).table
    lesions = {row[0]: row[table[0].index("lesions")] for row in table[1:]}
    assert {slide for slide, number in lesions.items() if number == "-"} == {s for s, yes in called.items() if not yes}
    negative = sum(not positive for positive in called.values())
    are = "1 slide is" if negative == 1 else f"{negative} slides are"
    assert f"{are} not called positive: there {RANKS_ONLY}" in render(summary).lines
    for slide, positive in called.items():
        told = json.loads((work.study / "maps" / "features_vit_dsmil" / f"{slide}.geojson").read_text())
        outlines = [one["properties"] for one in told["features"] if one["properties"]["objectType"] == "annotation"]
        assert {one["classification"]["name"] for one in outlines} == {LESION_GROUP if positive else REGION_GROUP}


def test_terms_of_lymph_nodes_are_for_studies_of_lymph_nodes(work: StudyAt):
    def sizes() -> set[str]:
        with (work.study / "maps" / "features_vit_dsmil" / "lesions.csv").open(newline="") as file:
            return {row["size"] for row in csv.DictReader(file)}

    work.run(localize_stage.localize, localize={"staging": "lymph-node"})
    assert all("size of a" in size or "isolated tumour cells" in size for size in sizes())
    work.run(localize_stage.localize)
    assert not any("size of" in size for size in sizes())
    assert 'staging = "none"' in (work.study / "maps" / "features_vit_dsmil" / "settings.toml").read_text()
    challenge = ("normal_001", "Tumor_110", "test_129")
    for slides, expected in (
        (challenge, True),
        (challenge[:2], False),
        ((*challenge, "liver_001"), False),
        ((), False),
    ):
        assert has_camelyon16_names(slides) is expected


def test_points_and_lesions_are_those_of_all_maps(work: StudyAt):
    work.run(localize_stage.localize)
    folder = work.study / "maps" / "features_vit_dsmil"
    with (folder / "points.csv").open(encoding="utf-8") as file:
        points = list(csv.DictReader(file))
    with (folder / "lesions.csv").open(encoding="utf-8") as file:
        lesions = list(csv.DictReader(file))
    assert {row["slide"] for row in points} == set(work.test_slides)
    for slide, made in work.maps().items():
        best = max(float(row["detection"]) for row in points if row["slide"] == slide)
        assert best == pytest.approx(float(made.detection.max()))
        inside = sum(int(row["tiles"]) for row in lesions if row["slide"] == slide)
        assert inside == (0 if made.only_ranks else (made.score >= 0.5).sum())
    before = content(folder)
    work.run(localize_stage.localize, None, [work.test_slides[0]])  # one slide anew leaves the others' rows alone
    assert content(folder) == before
    assert "lesion_threshold" in (folder / "settings.toml").read_text()


def test_what_is_current_is_left_alone_and_the_rest_says_why(work: StudyAt):
    folder = work.study / "maps" / "features_vit_dsmil"
    work.run(localize_stage.localize)
    before = {path.name: path.stat().st_mtime_ns for path in folder.glob("*.[hg]*")}
    again = work.run(localize_stage.localize)
    assert {path.name: path.stat().st_mtime_ns for path in folder.glob("*.[hg]*")} == before
    assert set(again.outcomes.values()) == {UP_TO_DATE}
    assert sum(product.num_made for product in again.exports.values()) == 0
    assert any("4 heatmaps (4 were up to date), 0 pictures and exports made" in line for line in render(again).lines)
    told = work.run(localize_stage.localize, localize={"scale": "percentile", "geojson": "gzip"})
    assert [changed(outcome) for outcome in told.outcomes.values()] == [["localize.scale"]] * 4
    assert "4 slides rebuilt: localize.scale winsor -> percentile" in render(told).lines
    assert {made.scale for made in work.maps().values()} == {"percentile"}
    assert len(list(folder.glob("*.geojson.gz"))) == 4
    assert not list(folder.glob("*.geojson"))  # of maps that are no more
    lower = work.run(
        localize_stage.localize, localize={"scale": "percentile", "geojson": "gzip", "lesion_threshold": 0.9}
    )
    assert set(lower.outcomes.values()) == {UP_TO_DATE}
    assert (
        sum(product.num_made for product in lower.exports.values()) == 4 * 5
    )  # GeoJSON, and pictures of the whole and of a part in two colours
    (folder / f"{work.test_slides[0]}.h5").write_bytes(b"broken")
    mended = work.run(localize_stage.localize, localize={"scale": "percentile", "geojson": "gzip"})
    assert changed(mended.outcomes[work.test_slides[0]]) == [f"{work.test_slides[0]}.h5"]


def test_equal_runs_give_equal_bytes(work: StudyAt, tmp_path: Path):
    twin = work.copy(tmp_path / "b")
    for each in (work, twin):
        each.run(localize_stage.localize, localize={"asap": True, "tiff": True})
    assert content(work.study / "maps" / "features_vit_dsmil") == content(twin.study / "maps" / "features_vit_dsmil")
    assert len(list((work.study / "maps" / "features_vit_dsmil").glob("*.xml"))) == 4


def test_no_model_is_trained_here(work: StudyAt):
    with pytest.raises(
        ArtefactError, match=r"abmil: no up-to-date models of given \(seed0, seed1: there is none\).*selfvitmil train"
    ):
        work.run(localize_stage.localize, method="abmil")
    assert not (work.study / "maps").exists()
    with pytest.raises(ArtefactError, match="seed2: there is none"):
        work.run(localize_stage.localize, train={"seeds": 3})
    with pytest.raises(ArtefactError, match=r"recipe\.epochs 10 -> 11"):
        work.run(localize_stage.localize, train={"epochs": 11})


def test_a_model_trained_on_other_bags_is_refused(work: StudyAt):
    slide = next(row[1] for row in work.rows if row[3] == "train")
    planted.write_features(work.foreign, slide, np.zeros((5, DIM)))
    with pytest.raises(ArtefactError, match=r"recorded as a hash only"):
        work.run(localize_stage.localize)


def test_a_damaged_model_is_refused(work: StudyAt):
    weights = work.study / "models" / "external" / "features_vit" / "dsmil" / "given" / "seed1" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:200])
    with pytest.raises(ArtefactError, match="seed1: stored model damaged"):
        work.run(localize_stage.localize)


def test_a_slide_that_cannot_be_mapped_fails_alone(work: StudyAt):
    first, second, *_ = work.test_slides
    told = {"mpp": 0.5, "level0_mpp": 0.25, "patch_size": 224, "level0_width": 900, "level0_height": 900}
    with h5py.File(work.foreign / "features_vit" / f"{first}.h5", "w") as file:
        file.create_dataset("features", data=np.zeros((5, DIM), np.float16)).attrs["encoder"] = "vit"
        file.create_dataset("coords", data=np.full((5, 2), 10**7)).attrs.update(told)
    summary = work.run(localize_stage.localize, None, [first, second])
    assert [failure.slide for failure in summary.failures] == [first]
    assert "outside the slide" in summary.failures[0].reason
    assert list(work.maps()) == [second]
    assert "outside the slide" in (work.study / "failures.csv").read_text()


def test_slides_without_coordinates_fail_alone(work: StudyAt):
    """CLAM's tensors know no placement: aggregators learn from them, maps cannot be drawn."""
    for path in (work.foreign / "features_vit").glob("*.h5"):
        torch.save(torch.from_numpy(read_bag(path).features_ND.astype(np.float32)), path.with_suffix(".pt"))
        path.unlink()
    work.run(train_stage.train, method="mean")
    summary = work.run(localize_stage.localize, method="mean")
    assert {failure.slide for failure in summary.failures} == set(work.test_slides)
    assert all("no coordinates" in failure.reason for failure in summary.failures)
    assert not work.maps("features_vit_mean")


def test_named_slides_and_other_parts(work: StudyAt):
    trained_on = next(row[1] for row in work.rows if row[3] == "train")
    summary = work.run(localize_stage.localize, "mine", [trained_on, work.test_slides[0]])
    maps = work.maps("mine")
    assert set(maps) == {trained_on, work.test_slides[0]}
    assert maps[trained_on].prediction.part in ("train", "val")
    if maps[trained_on].prediction.part == "train":
        assert any("were trained on" in line for line in summary.notes)
    work.run(localize_stage.localize, "others", localize={"parts": ["val"]})
    config = json.loads(next(work.study.rglob("seed0/config.json")).read_text())
    assert set(work.maps("others")) == set(config["chosen_on"])
    with pytest.raises(CohortError, match="nearest is"):
        work.run(localize_stage.localize, None, [work.test_slides[0] + "x"])
    work.rows.append(["new", "new_slide", "", ""])
    work.write_labels()
    with pytest.raises(ConfigError, match=r"new_slide: no split has this slide.*predict"):
        work.run(localize_stage.localize, None, ["new_slide"])


def test_a_test_slide_of_several_splits_is_mapped_by_the_first(work: StudyAt):
    flags: dict[str, Any] = {
        "train": {"split": "monte-carlo", "folds": 3, "seeds": 1},
        "evaluate": {"calibration": "none"},
    }
    work.run(train_stage.train, method="max", **flags)
    summary = work.run(localize_stage.localize, method="max", **flags)
    assert any("several splits; mapped by the models of the first" in line for line in summary.notes)
    models = work.study / "models" / "external" / "features_vit" / "max"
    for slide, made in work.maps("features_vit_max").items():
        config = json.loads((models / made.prediction.split / "seed0" / "config.json").read_text())
        assert slide not in {*config["trained_on"], *config["chosen_on"]}


def test_the_optimistic_protocol_says_so(work: StudyAt):
    flags: dict[str, Any] = {"evaluate": {"protocol": "optimistic"}}
    work.run(train_stage.train, method="mean", **flags)
    summary = work.run(localize_stage.localize, method="mean", **flags)
    assert any("OPTIMISTIC" in line for line in summary.notes)
    made = work.maps("features_vit_mean_optimistic")
    assert all("TEST" in each.prediction.threshold_from for each in made.values())
    assert {each.kind for each in made.values()} == {"instance"}


def test_more_than_two_classes(tmp_path: Path):
    study = StudyAt(tmp_path / "a", ("a", "b", "c"))
    study.run(train_stage.train, method="abmil", train={"options": SMALL["abmil"]})
    flags: dict[str, Any] = {"train": {"options": SMALL["abmil"]}}
    study.run(localize_stage.localize, method="abmil", **flags)
    for made in study.maps("features_vit_abmil").values():
        assert made.prediction.shown == made.prediction.decision
        assert made.prediction.threshold is None
        assert made.prediction.shown_probability == max(made.prediction.probability)
    study.run(localize_stage.localize, "of_b", method="abmil", localize={"of_class": "b", "gate": True}, **flags)
    for made in study.maps("of_b").values():
        assert made.prediction.shown == "b"
        assert made.score.any() == (made.prediction.decision == "b")
    with pytest.raises(ConfigError, match=r"localize.of_class 'd', the classes are a, b, c"):
        study.run(localize_stage.localize, method="abmil", localize={"of_class": "d"}, **flags)
    with pytest.raises(ConfigError, match=r"localize.score 'instance' with abmil"):
        study.run(localize_stage.localize, method="abmil", localize={"score": "instance"}, **flags)


def test_effects_on_request(work: StudyAt, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(base, "MAX_EFFECT_INSTANCES", 10)
    summary = work.run(localize_stage.localize, localize={"score": "effect"})
    sizes = {slide: len(read_bag(work.foreign / "features_vit" / f"{slide}.h5")) for slide in work.test_slides}
    assert {failure.slide for failure in summary.failures} == {slide for slide, size in sizes.items() if size > 10}
    for made in work.maps().values():
        assert made.kind == "effect"
        assert {"attention", "instance", "product", "effect"} == set(made.columns)


# ---------------------------------------------------------------------------------------------------- two scales


def two_scale_study(study: Path) -> list[str]:
    """Tile tables and vectors of two scales, written by hand: evidence in the coarse vectors' tiles 0 and 1."""
    rng = np.random.default_rng(0)
    rows = [["slide", "path", "label", "patient", "split", "annotation"]]
    write_annotations(study / "other.xml", [square(9000, 9000, 300)])
    write_annotations(study / "own.xml", [square(0, 0, 448)])
    for number in range(24):
        slide, label = f"s{number:02d}", number % 2
        coords = np.stack([np.arange(9) * 448, np.zeros(9, np.int64)], axis=1)
        parents = np.array([0, 0, 0, 0, 1, 1, 1, 1, -1])
        coarse = TileTable(slide, coords[:2] * 4, np.ones(2, np.float32), 224, 2.0, 0, 0.25, (4480, 1792))
        fine = TileTable(
            slide, coords, np.ones(9, np.float32), 224, 0.5, 0, 0.25, (4480, 1792),
            annotated=np.array([label, label, 0, 0, 0, 0, 0, 0, 0.5 * label], np.float32),
            parents={"2mpp_224px_0px": parents}, parent_digests={"2mpp_224px_0px": coarse.digest},
        )  # fmt: skip
        for table, tiling in ((fine, "0.5mpp_224px_0px"), (coarse, "2mpp_224px_0px")):
            features = rng.normal(size=(len(table), DIM))
            if table is fine:
                features[:2, 0] += 7 * label
            write_tiles(study / "tiles" / tiling / f"{slide}.h5", table, Provenance("tile", FORMAT_VERSION, {}, {}))
            write_bag(study / "bags" / tiling / "features_vit" / f"{slide}.h5", features, table, "vit", {})
        outlines = {19: "other.xml", 21: "own.xml"}.get(number, "")
        side = "test" if number >= 18 else "train"
        rows.append([slide, f"{slide}.svs", "tumor" if label else "normal", slide, side, outlines])
    with (study / "cohort.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(rows)
    return [row[0] for row in rows[1:] if row[4] == "test"]


def test_two_scales(tmp_path: Path):
    study = tmp_path / "study"
    test = two_scale_study(study)
    told = {"train": {**QUICK, "aggregator": "dsmil-lc", "options": {"bottleneck": 4}}, "tile": {"parent_mpp": [2.0]}}
    chosen = resolve_settings(None, told)
    with Engine(EngineSettings(workers=0)) as engine:
        train_stage.train(Study(study, chosen), FeatureChoice(), engine)
        summary = localize_stage.localize(Study(study, chosen), FeatureChoice(), engine)
    assert [failure.slide for failure in summary.failures] == ["s19"]
    assert "it is of another slide" in summary.failures[0].reason
    assert not (study / "maps" / "vit_dsmil-lc" / "s19.h5").exists()
    for slide in set(test) - {"s19"}:
        made = read_heatmap(study / "maps" / "vit_dsmil-lc" / f"{slide}.h5")
        assert len(made) == 8  # without the tile that no coarse one holds
        assert made.annotated is not None
        assert made.annotated.tolist() == [int(slide[1:]) % 2] * 2 + [0] * 6
        assert made.details["tiling"] == "0.5mpp_224px_0px+2mpp_224px_0px"
        if int(slide[1:]) % 2:
            assert np.argmax(made.columns["attention"]) < 2


# ---------------------------------------------------------------------------------------------------- pictures


@pytest.fixture
def drawn(tmp_path: Path) -> ExportJob:
    """A map of a real slide with its annotation."""
    synthetic.make_slide(tmp_path / "made_01.tif", seed=1, size=(1536, 1152), mpp=0.5)
    frame = Frame(0.5, (1536, 1152), 384.0, 384.0, 0.5, 384)
    write_heatmap(
        tmp_path / "maps" / "made_01.h5", make_heatmap(4, 3, (1, 1, 2, 1), extent_l0=384.0, frame=frame), "one"
    )
    write_annotations(tmp_path / "made_01.xml", [square(400, 400, 300)])
    chosen = LocalizeSettings(picture_px=300, colors=("red",))
    return ExportJob(
        tmp_path / "maps" / "made_01.h5",
        SlideRef("made_01", tmp_path / "made_01.tif"),
        tmp_path / "made_01.xml",
        chosen,
    )


def test_pictures_are_drawn_once_until_something_changes(drawn: ExportJob):
    folder = drawn.heatmap_file.parent
    first = export_heatmap(drawn)
    assert first.failure is None
    assert {path.name for path in folder.glob("*.png")} == {"made_01_red.png", "made_01_zoom_red.png"}
    assert first.num_made == 3
    assert export_heatmap(drawn).num_made == 0
    (folder / "made_01_red.png").unlink()
    assert export_heatmap(drawn).num_made == 2
    assert drawn.annotation is not None
    write_annotations(drawn.annotation, [square(500, 400, 300)])
    before = (folder / "made_01_red.png").read_bytes()
    assert export_heatmap(drawn).num_made == 2
    assert (folder / "made_01_red.png").read_bytes() != before
    other = replace(drawn, settings=drawn.settings.model_copy(update={"colors": ("inferno",)}))
    export_heatmap(other)
    assert {path.name for path in folder.glob("*.png")} == {"made_01_inferno.png", "made_01_zoom_inferno.png"}


def test_a_picture_of_a_killed_run_does_not_pass_for_another(drawn: ExportJob, monkeypatch: pytest.MonkeyPatch):
    export_heatmap(drawn)
    picture = drawn.heatmap_file.parent / "made_01_red.png"
    before = picture.read_bytes()

    def killed(*_: Any) -> None:
        picture.write_bytes(b"of other settings")
        raise KeyboardInterrupt

    larger = replace(drawn, settings=drawn.settings.model_copy(update={"picture_px": 400}))
    with monkeypatch.context() as patch:
        patch.setattr(export, "_draw_overlays", killed)
        with pytest.raises(KeyboardInterrupt):
            export_heatmap(larger)
    export_heatmap(drawn)
    assert picture.read_bytes() == before


def test_a_wrong_picture_is_not_drawn(drawn: ExportJob, tmp_path: Path):
    folder = drawn.heatmap_file.parent
    write_annotations(tmp_path / "other.xml", [square(9000, 9000, 300)])
    wrong = export_heatmap(replace(drawn, annotation=tmp_path / "other.xml"))
    assert wrong.failure is not None
    assert "of another slide" in wrong.failure.reason
    synthetic.make_slide(tmp_path / "other.tif", seed=2, size=(1024, 1024), mpp=0.5)
    assert export_heatmap(replace(drawn, slide=SlideRef("other", tmp_path / "other.tif"))).failure is not None
    missing = export_heatmap(replace(drawn, slide=None))
    assert missing.failure is None
    assert not list(folder.glob("*.png"))
    assert "no overlay is drawn" in missing.warnings[-1]
    assert (folder / "made_01.geojson").exists()
    assert missing.lesions[0][-1] == 2


def test_the_command(work: StudyAt, capsys: pytest.CaptureFixture[str]):
    given = ["--features", work.foreign / "features_vit", "--labels", work.folder / "labels.csv", "--workers", 0]
    flags = {"seeds": 2, "epochs": 10, "lr": 0.02, "warmup-epochs": 0, "aggregator": "dsmil"}
    trained = [word for key, value in flags.items() for word in (f"--train.{key}", value)] + ["--train.standardize"]
    slides = ["--slides", work.test_slides[0], "--slides", work.test_slides[-1]]
    for more, status, words in (
        ([*slides, "--localize.score", "product", "--name", "two"], 0, "2 heatmaps"),
        (["--slides", "nobody"], 2, "nobody: no such slide in the cohort"),
        (["--localize.score", "heat"], 2, "'product' or 'effect'"),
        (["--train.weight-decay", 0.5], 3, "Run `selfvitmil train`"),
    ):
        with pytest.raises(SystemExit) as end:
            cli.main([str(word) for word in ("localize", work.study, *given, *trained, *more)])
        told = capsys.readouterr()
        assert end.value.code == status, told.err
        assert words in told.out + told.err
    assert {each.kind for each in work.maps("two").values()} == {"product"}
