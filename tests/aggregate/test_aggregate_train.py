"""Training of aggregators: what is learned, and every number on the way against a slow loop, numpy or a formula."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from selfvitmil import aggregate, metrics
from selfvitmil.aggregate import bag_tensors, base, graphs, recipes, selection, train
from selfvitmil.aggregate.dsmil import DSMILOutput
from selfvitmil.aggregate.recipes import recipe_of
from selfvitmil.aggregate.train import BagScore, BagStore, LabelledBag, Trained, load_model, save_model, score
from selfvitmil.bags import Bag
from selfvitmil.errors import ArtefactError, BagError, ConfigError
from selfvitmil.settings import TrainSettings

DIM = 16
PLANTED = 5
SMALL: dict[str, dict[str, Any]] = {
    "dsmil-lc": {"bottleneck": 12},
    "abmil": {"hidden": 32, "attention_dim": 16},
    "abmil-gated": {"hidden": 32, "attention_dim": 16},
    "chowder": {"top": 3, "bottom": 3},
    "transmil": {"hidden": 64, "heads": 4, "landmarks": 8},
    "mil-rnn": {"hidden": 16, "s": 3},
    "clam-sb": {"hidden": 32, "attention_dim": 16, "k": 2},
    "topk": {"k": 2},
}


def made(number: int, label: int, dim: int = DIM, shift: float = 8.0, size: int = 0) -> tuple[LabelledBag, set[int]]:
    """A bag of noise; in one of class k > 0 a few instances are shifted along dimension k. And which those are."""
    generator = np.random.default_rng((number, label))
    features = generator.normal(size=(size or int(generator.integers(20, 41)), dim))
    planted = generator.choice(len(features), min(PLANTED, len(features)), replace=False)
    if label:
        features[planted, label] += shift
    coords = np.stack([np.arange(len(features)) % 6, np.arange(len(features)) // 6], axis=1) * 224
    bag = Bag(f"slide{number}", features.astype(np.float16), coords)
    return LabelledBag(bag.slide, bag, label), set(planted.tolist())


def cohort(start: int, stop: int, num_classes: int = 2, **how: Any) -> list[LabelledBag]:
    return [made(number, number % num_classes, **how)[0] for number in range(start, stop)]


def asked(**how: Any) -> TrainSettings:
    return TrainSettings.model_validate({"device": "cpu", **how})


def quick(name: str = "dsmil", seed: int = 0, **how: Any) -> Trained:
    how = {"epochs": 2, "options": SMALL.get(name, {}), **how}
    return train.train(name, cohort(0, 8), cohort(8, 14), 1, asked(**how), seed)


def weights_of(trained: Trained) -> dict[str, torch.Tensor]:
    return dict(trained.module.state_dict())


def assert_same_weights(one: Trained, other: Trained) -> None:
    assert weights_of(one).keys() == weights_of(other).keys()
    for name, weight in weights_of(one).items():
        assert torch.equal(weight, weights_of(other)[name]), name


# ---------------------------------------------------------------------------------------------------- learning

EPOCHS = {"chowder": 100}
"""Where the default is not cut short to 20: sigmoids all the way take their time."""


def learned(name: str, num_classes: int, num_training: int) -> tuple[list[BagScore], list[LabelledBag], list[set[int]]]:
    classes = max(num_classes, 2)
    how = asked(epochs=EPOCHS.get(name, 20), options=SMALL.get(name, {}))
    training, validation = cohort(0, num_training, classes), cohort(100, 118, classes)
    trained = train.train(name, training, validation, num_classes, how, 0)
    test = [made(number, number % classes) for number in range(200, 242)]
    return (
        score(trained.module, [each.bag for each, _ in test]),
        [each for each, _ in test],
        [where for _, where in test],
    )


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in ("chowder", "transmil"))) for name in aggregate.NAMES],
)
def test_every_method_learns_with_its_default_recipe(name):
    scores, test, planted = learned(name, 1, 40 if name == "transmil" else 32)
    assert metrics.auc([each.label for each in test], [each.probabilities[0] for each in scores]) >= 0.95
    found = [each.critical in where for each, where, truth in zip(scores, planted, test, strict=True) if truth.label]
    if name != "transmil":  # what its attention shows is an indication only
        assert np.mean(found) >= 0.95


@pytest.mark.slow
@pytest.mark.parametrize("name", ["self-vit-mil", "dsmil", "abmil-gated", "mil-rnn", "clam-sb", "mean", "topk"])
def test_three_classes_are_learned(name):
    scores, test, planted = learned(name, 3, 60)
    labels = np.array([each.label for each in test])
    assert {len(each.probabilities) for each in scores} == {3}
    for k in range(3):
        assert metrics.auc(labels == k, [each.probabilities[k] for each in scores]) >= 0.95
    found = [each.critical in where for each, where, truth in zip(scores, planted, test, strict=True) if truth.label]
    assert np.mean(found) >= 0.9


# ---------------------------------------------------------------------------------------------------- the numbers


@given(
    lr=st.floats(1e-5, 1),
    share=st.floats(0, 1),
    epochs=st.integers(2, 9),
    warmup=st.integers(0, 8),
    per_epoch=st.integers(1, 7),
)
def test_learning_rate_follows_the_formula(lr, share, epochs, warmup, per_epoch):
    warmup = min(warmup, epochs - 1)
    given_settings = asked(lr=lr, min_lr=lr * share, epochs=epochs, warmup_epochs=warmup)
    schedule = recipes.learning_rates(recipe_of("mean", given_settings), per_epoch)
    total, rising = epochs * per_epoch, warmup * per_epoch
    for step in range(total):
        expected = lr * (step + 1) / rising if step < rising else None
        if expected is None:
            turn = math.pi * (step - rising) / (total - rising)
            expected = lr * share + (lr - lr * share) * (1 + math.cos(turn)) / 2
        assert schedule.value_at(step) == pytest.approx(expected, rel=1e-9)


def slow_loop(training: list[LabelledBag], how: TrainSettings, make: Any, clip: float = 0.0) -> dict[str, torch.Tensor]:
    """The first epoch of a training, written plainly: one joint loss for the bags of a step."""
    recipe = recipe_of("max", how).for_dim(DIM)
    with torch.random.fork_rng([]):
        torch.manual_seed(3)
        module = aggregate.build("max", DIM, 1)
    optimizer = make(module)
    order = np.random.default_rng((3, 1)).permutation(len(training))
    counts = np.bincount([each.label for each in training])
    groups = [order[start : start + recipe.accumulate] for start in range(0, len(order), recipe.accumulate)]
    for number, group in enumerate(groups):
        done = number / len(groups)
        for parameters in optimizer.param_groups:
            cosine = (1 + math.cos(math.pi * done)) / 2
            parameters["lr"] = recipe.min_lr + (recipe.lr - recipe.min_lr) * cosine
        loss = torch.zeros(())
        for place in group:
            each = training[place]
            weight = len(training) / (2 * counts[each.label]) if recipe.class_weights == "balanced" else 1.0
            output = module(torch.from_numpy(np.array(each.bag.features_ND)))
            loss = loss + weight * module.loss(output, each.label) / len(group)
        optimizer.zero_grad()
        loss.backward()
        if clip:
            length = torch.cat([each.grad.flatten() for each in module.parameters()]).norm()
            for each in module.parameters():
                each.grad *= min(1.0, clip / float(length))
        optimizer.step()
    return dict(module.state_dict())


def decayed(module: torch.nn.Module, decay: float) -> list[dict[str, Any]]:
    matrices = [each for each in module.parameters() if each.ndim > 1]
    others = [each for each in module.parameters() if each.ndim <= 1]
    return [{"params": matrices, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]


OPTIMIZERS = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=1.0, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adam": lambda m: torch.optim.Adam(m.parameters(), betas=(0.8, 0.95), weight_decay=0.1, foreach=False),
    "adamw": lambda m: torch.optim.AdamW(decayed(m, 0.1), betas=(0.8, 0.95), foreach=False),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("together", [1, 3, 16])
@pytest.mark.parametrize("weights", ["none", "balanced"])
@pytest.mark.parametrize("clip", [0.0, 0.3])
def test_a_training_epoch_equals_a_slow_loop(optimizer, together, weights, clip):
    training = [*cohort(0, 7), made(50, 0)[0], made(51, 0)[0], made(52, 0)[0]]  # 10 bags, 3 positive
    how = asked(
        optimizer=optimizer,
        lr=0.05,
        betas=(0.8, 0.95),
        weight_decay=0.1,
        epochs=1,
        accumulate=together,
        class_weights=weights,
        clip_grad=clip,
        standardize=False,
        warmup_epochs=0,
    )
    trained = train.train("max", training, cohort(20, 24), 1, how, 3)
    expected = slow_loop(training, how, OPTIMIZERS[optimizer], clip)
    for name, weight in weights_of(trained).items():
        torch.testing.assert_close(weight, expected[name], rtol=2e-4, atol=2e-5, msg=name)


def test_lookahead_equals_a_slow_loop():
    recipe = recipe_of("transmil", asked(recipe="published", weight_decay=0.1))
    torch.manual_seed(0)
    module, plain = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    plain.load_state_dict(module.state_dict())
    optimizer = recipes.TrainingOptimizer(module, recipe, torch.device("cpu"), keep_gradients=False)
    radam = torch.optim.RAdam(decayed(plain, 0.1), lr=recipe.lr, decoupled_weight_decay=True, foreach=False)
    slow = [each.detach().clone() for each in plain.parameters()]
    inputs = torch.randn(20, 3)
    for number, row in enumerate(inputs, 1):
        optimizer.set_lr(0.01)
        module(row).square().sum().backward()
        optimizer.step()
        optimizer.after_step()
        for group in radam.param_groups:
            group["lr"] = 0.01
        radam.zero_grad()
        plain(row).square().sum().backward()
        radam.step()
        if number % 6 == 0:
            for kept, weight in zip(slow, plain.parameters(), strict=True):
                kept += 0.5 * (weight.detach() - kept)
                weight.data.copy_(kept)
    for mine, his in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, his)


@pytest.mark.parametrize("chunk", [16, 1 << 20])
def test_standardization_is_numpys_over_training_bags_alone(monkeypatch, chunk):
    monkeypatch.setitem(bag_tensors.CHUNK_ELEMENTS, "cpu", chunk)
    training = cohort(0, 6, shift=3.0)
    bags = [Bag(each.slide, each.bag.features_ND * np.float16(3) + np.float16(50), None) for each in training]
    bags[0].features_ND[:, 2] = 50
    for bag in bags[1:]:
        bag.features_ND[:, 2] = 50  # never varies
    labelled = [LabelledBag(bag.slide, bag, each.label) for bag, each in zip(bags, training, strict=True)]
    trained = train.train("mean", labelled, cohort(20, 26), 1, asked(epochs=1), 0)
    joined = np.concatenate([bag.features_ND for bag in bags]).astype(np.float64)
    spread = joined.std(axis=0)
    np.testing.assert_allclose(trained.module.input_mean_D, joined.mean(axis=0), rtol=1e-6)
    np.testing.assert_allclose(trained.module.input_std_D, np.where(spread == 0, 1, spread), rtol=1e-6)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_moments_of_parts_are_those_of_the_whole(dtype, monkeypatch):
    features = np.random.default_rng(0).normal(100, 0.5, size=(57, 5)).astype(dtype)
    monkeypatch.setitem(bag_tensors.CHUNK_ELEMENTS, "cpu", 20)
    found = bag_tensors.measure(torch.from_numpy(features))
    assert found.count == 57
    np.testing.assert_allclose(found.mean_D, features.astype(np.float64).mean(axis=0), rtol=1e-13)
    np.testing.assert_allclose(found.squares_D / 57, features.astype(np.float64).var(axis=0), rtol=1e-10)


def test_class_weights():
    bags = [made(number, label)[0] for number, label in enumerate([0, 0, 0, 2, 2, 0])]
    assert train.class_weights(bags, 3, "none") == [1, 1, 1]
    assert train.class_weights(bags, 3, "balanced") == [6 / (2 * 4), 1, 6 / (2 * 2)]


@given(number=st.integers(1, 60), share=st.floats(0, 1))
@settings(max_examples=50)
def test_drawn_instances_are_different_and_in_order(number, share):
    drawn = train.draw(number, max(1, int(share * number)), torch.device("cpu")).tolist()
    assert len(drawn) == max(1, int(share * number))
    assert drawn == sorted(set(drawn))
    assert drawn[0] >= 0
    assert drawn[-1] < number


@pytest.mark.parametrize(
    ("how", "seen"),
    [
        ({}, 20),
        ({"instance_dropout": 0.3}, 14),
        ({"max_instances": 7}, 7),
        ({"instance_dropout": 0.3, "max_instances": 17}, 14),
        ({"instance_dropout": 0.99}, 1),
    ],
)
def test_only_training_sees_parts_of_bags(monkeypatch, how, seen):
    sizes: list[tuple[bool, int, bool]] = []
    aggregate_rows = aggregate.base.Aggregator.forward

    def watched(module, bag_ND, coords_N2=None):
        together = coords_N2 is not None and bool((coords_N2[:, 0] // 224 == bag_ND[:, 0]).all())
        sizes.append((module.training, len(bag_ND), together))
        return aggregate_rows(module, bag_ND, coords_N2)

    monkeypatch.setattr(aggregate.base.Aggregator, "forward", watched)

    def numbered(labelled: LabelledBag) -> LabelledBag:
        features = labelled.bag.features_ND.copy()
        features[:, 0] = np.arange(len(features))
        coords = np.stack([np.arange(len(features)), np.zeros(len(features), int)], axis=1) * 224
        return LabelledBag(labelled.slide, Bag(labelled.slide, features, coords), labelled.label)

    training, validation = ([numbered(each) for each in cohort(*span, size=20)] for span in ((0, 4), (4, 6)))
    options = {"hidden": 8, "heads": 2, "landmarks": 4, "coordinates": True}
    train.train("transmil", training, validation, 1, asked(epochs=2, options=options, **how), 0)
    assert sizes == ([(True, seen, True)] * 4 + [(False, 20, True)] * 2) * 2


# ---------------------------------------------------------------------------------------------------- randomness


@pytest.mark.parametrize("name", ["self-vit-mil", "abmil", "transmil", "mil-rnn"])
def test_equal_seeds_give_equal_bits_whatever_ran_before(name):
    torch.manual_seed(11)
    first = quick(name, seed=5, instance_dropout=0.2)
    after = torch.rand(3)
    torch.manual_seed(11)
    assert torch.equal(after, torch.rand(3))  # the caller's numbers are untouched
    again = quick(name, seed=5, instance_dropout=0.2)
    assert_same_weights(first, again)
    without_time = [[{**line, "seconds": 0} for line in each.history] for each in (first, again)]
    assert without_time[0] == without_time[1]
    other = quick(name, seed=6, instance_dropout=0.2)
    assert any(not torch.equal(weight, weights_of(other)[key]) for key, weight in weights_of(first).items())


def test_a_shared_store_changes_nothing():
    shared = BagStore("cpu")
    training, validation = cohort(0, 8), cohort(8, 14)
    how = asked(epochs=2)
    alone = train.train("dsmil", training, validation, 1, how, 0)
    for _ in range(2):
        assert_same_weights(alone, train.train("dsmil", training, validation, 1, how, 0, store=shared))


# ---------------------------------------------------------------------------------------------------- epochs


def planted_worth(monkeypatch, values: list[float]) -> None:
    left = iter(values)
    monkeypatch.setattr(selection, "criterion", lambda *_: next(left))


CONSTANT = {"lr": 0.01, "min_lr": 0.01, "warmup_epochs": 0}


@pytest.mark.parametrize(
    ("values", "patience", "best", "last"),
    [
        ([1, 3, 2, 3, 1, 0], 0, 2, 6),  # of equals the earliest
        ([1, 3, 2, 3, 1, 0], 2, 2, 4),
        ([1, 2, 3, 4, 5, 6], 1, 6, 6),
        ([6, 5, 4, 3, 2, 1], 3, 1, 4),
    ],
)
def test_the_best_epoch_is_kept(monkeypatch, values, patience, best, last):
    planted_worth(monkeypatch, values)
    lines: list[dict[str, Any]] = []
    how = asked(epochs=6, patience=patience, **CONSTANT)
    trained = train.train("mean", cohort(0, 6), cohort(6, 10), 1, how, 0, report=lines.append)
    assert trained.epoch == best
    assert [line["epoch"] for line in trained.history] == list(range(1, last + 1))
    assert lines == list(trained.history)
    planted_worth(monkeypatch, list(range(best)))  # there the last epoch is the best
    until = train.train("mean", cohort(0, 6), cohort(6, 10), 1, asked(epochs=best, **CONSTANT), 0)
    assert_same_weights(trained, until)
    assert not trained.module.training


def test_min_epochs_come_first(monkeypatch):
    planted_worth(monkeypatch, [9.0] + [0.0] * 70)
    how = asked(recipe="published", epochs=60, patience=2, options=SMALL["clam-sb"])
    trained = train.train("clam-sb", cohort(0, 2), cohort(2, 4), 1, how, 0)
    assert (trained.epoch, len(trained.history)) == (1, 50)


def test_history_has_what_it_promises():
    trained = quick("dsmil", epochs=3)
    keys = {"epoch", "lr", "train_loss", "val_loss", "val_auc", "attention_entropy", "critical_churn", "seconds"}
    assert all(line.keys() == keys for line in trained.history)
    assert trained.history[0]["critical_churn"] is None
    assert all(0 <= line["critical_churn"] <= 1 for line in trained.history[1:])
    assert all(0 < line["attention_entropy"] <= 1.0001 for line in trained.history)
    assert all(line["attention_entropy"] is None for line in quick("mean").history)
    # The chosen module, scored afterwards, says what the history says of that epoch.
    line, validation = trained.history[trained.epoch - 1], cohort(8, 14)
    scores = score(trained.module, [each.bag for each in validation])
    labels = [each.label for each in validation]
    assert metrics.auc(labels, [each.probabilities[0] for each in scores]) == pytest.approx(line["val_auc"])
    entropies = [each.attention_entropy for each in scores if validation[scores.index(each)].label]
    assert np.mean(np.array(entropies, dtype=float)) == pytest.approx(line["attention_entropy"], rel=1e-5)
    losses = []
    for each in validation:
        output = trained.module(torch.from_numpy(each.bag.features_ND))
        losses.append(trained.module.loss(output, each.label).item())
    assert np.mean(losses) == pytest.approx(line["val_loss"], rel=1e-5)


def test_authors_criterion_and_auc_of_several_classes():
    labels = np.array([0, 0, 1, 1, 1])
    probabilities = np.array([[0.2], [0.6], [0.5], [0.7], [0.9]])
    area, right = 5 / 6, 4 / 5  # Youden's point lies between 0.6 and 0.7, and misses 0.5
    assert selection.criterion("authors", labels, probabilities, 0.3) == pytest.approx((area + right + 1 - 0.3) / 4)
    assert selection.criterion("auc", labels, probabilities, 0.3) == pytest.approx(area)
    assert selection.criterion("loss", labels, probabilities, 0.3) == -0.3
    three = np.array([0, 1, 2, 2])
    scores = np.array([[0.8, 0.1, 0.1], [0.1, 0.5, 0.4], [0.2, 0.6, 0.2], [0.1, 0.1, 0.8]])
    assert selection.auc(three, scores) == pytest.approx(np.mean([1.0, 2 / 3, 3 / 4]))
    assert selection.accuracy(three, scores) == 0.75


@given(
    overtaken=st.lists(st.integers(0, 50), min_size=1, max_size=8),
    size=st.integers(1, 400),
    num_classes=st.integers(1, 3),
)
def test_churn_against_a_slow_loop(overtaken, size, num_classes):
    labels = [number % max(num_classes, 2) for number in range(len(overtaken))]
    counted = [rank for rank, label in zip(overtaken, labels, strict=True) if label or num_classes > 1]
    given_up = [rank for rank in counted if rank >= 1 and rank / size >= 0.05]
    expected = len(given_up) / len(counted) if counted else None
    arrays = (np.array(labels), np.array(overtaken), np.full(len(overtaken), size))
    assert selection.churn(*arrays, num_classes) == (None if expected is None else pytest.approx(expected))


def test_overtaking_of_the_critical_instance_is_counted():
    training, validation = cohort(0, 2), cohort(2, 4, size=9)
    module = aggregate.build("max", DIM, 1)
    both = train.Steps(module, recipe_of("max", asked()), BagStore("cpu"), training, validation)
    weight, before = module.scorer.weight, None
    assert isinstance(weight, torch.nn.Parameter)
    for seed in (1, 2):
        weight.data.copy_(torch.randn(1, DIM, generator=torch.Generator().manual_seed(seed)))
        both.validation_step(1)
        now = validation[1].bag.features_ND.astype(np.float32) @ weight.detach().numpy()[0]
        if before is not None:
            assert both.validation.fetch().overtaken[1] == (now > now[before.argmax()]).sum()
        before = now


# ---------------------------------------------------------------------------------------------------- warnings


def test_uniform_attention_is_told():
    trained = quick("abmil", lr=1e-9)
    (warning,) = trained.warnings
    assert "attention is nearly uniform" in warning
    assert "train.standardize" in warning


def test_doubts_come_above_their_thresholds_only():
    line = {"epoch": 7, "attention_entropy": 0.98, "critical_churn": 0.5}
    assert selection.attention_warnings(line) == []
    assert selection.attention_warnings({"epoch": 1, "attention_entropy": None, "critical_churn": None}) == []
    (told,) = selection.attention_warnings({**line, "critical_churn": 0.6})
    assert "60%" in told
    assert len(selection.attention_warnings({"epoch": 7, "attention_entropy": 0.995, "critical_churn": 1.0})) == 2


@pytest.mark.parametrize("wanted", ["auc", "authors"])
def test_validation_of_one_class_is_judged_by_loss(wanted):
    validation = [made(number, 0)[0] for number in range(30, 34)]
    trained = train.train("mean", cohort(0, 8), validation, 1, asked(epochs=3, monitor=wanted), 0)
    losses = [line["val_loss"] for line in trained.history]
    assert trained.epoch == 1 + int(np.argmin(losses))
    assert {line["val_auc"] for line in trained.history} == {None}
    assert "it has no slide of class 1" in trained.warnings[0]
    assert train.train("mean", cohort(0, 8), validation, 1, asked(epochs=1, monitor="loss"), 0).warnings == ()


def test_a_class_without_training_slides_is_told():
    trained = train.train("mean", cohort(0, 6), cohort(6, 10), 3, asked(epochs=1), 0)
    assert any("no training slide of class 2" in each for each in trained.warnings)


# ---------------------------------------------------------------------------------------------------- bad input


def with_features(labelled: LabelledBag, features: np.ndarray) -> LabelledBag:
    return LabelledBag(labelled.slide, Bag(labelled.slide, features, None), labelled.label)


def nan_in(labelled: LabelledBag) -> LabelledBag:
    features = labelled.bag.features_ND.copy()
    features[3, 2] = np.nan
    return with_features(labelled, features)


BROKEN = {
    "no validation": (lambda t, v: (t, []), ConfigError, "no validation bags"),
    "no training": (lambda t, v: ([], v), ConfigError, "no training bags"),
    "one class": (lambda t, v: (t[::2], v), ConfigError, "all 4 training slides are of class 0"),
    "wrong label": (lambda t, v: ([*t, made(90, 2)[0]], v), ConfigError, "slide90: label 2"),
    "in both": (lambda t, v: (t, [*v, t[3]]), ConfigError, "slide3 both in training and in validation"),
    "mixed": (
        lambda t, v: (t, [*v, made(91, 1, dim=5)[0], made(92, 1, dim=5)[0]]),
        BagError,
        "5 in slide91, slide92; 16 in slide0, slide1, slide2, slide3, slide4 and 9 more",
    ),
    "empty": (lambda t, v: ([*t, with_features(made(93, 0)[0], np.zeros((0, DIM)))], v), BagError, "slide93: the bag"),
    "nan": (lambda t, v: (t, [*v, nan_in(made(94, 0)[0])]), BagError, "slide94: NaN or infinity in row 3"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_cannot_be_learned_from_is_refused(case):
    spoil, error, words = BROKEN[case]
    training, validation = spoil(cohort(0, 8), cohort(8, 14))
    with pytest.raises(error, match=words):
        train.train("mean", training, validation, 1, asked(epochs=1), 0)


def test_weights_that_run_away_are_told_with_bag_and_epoch():
    how = asked(optimizer="sgd", lr=1e30, epochs=5, standardize=False, warmup_epochs=0)
    order = np.random.default_rng((0, 1)).permutation(8)
    with pytest.raises(ConfigError, match=r"slide\d+: the loss is not a finite number in epoch 1") as caught:
        train.train("dsmil", cohort(0, 8), cohort(8, 14), 1, how, 0)
    assert f"slide{order[0]}:" not in str(caught.value)  # the first step still had sound weights
    assert "train.lr" in str(caught.value)


def test_an_unknown_device_is_refused():
    with pytest.raises(ConfigError, match="device 'cuda:77' cannot be used"):
        BagStore("cuda:77")


# ---------------------------------------------------------------------------------------------------- scores


def test_scores_are_those_of_the_formulas():
    trained = quick("dsmil")
    test = cohort(60, 64)
    before = torch.is_grad_enabled(), trained.module.training
    for each, found in zip(test, score(trained.module, [each.bag for each in test]), strict=True):
        output = trained.module(torch.from_numpy(each.bag.features_ND))
        assert isinstance(output, DSMILOutput)
        assert output.attention_NC is not None
        assert output.instance_logits_NC is not None
        streams = [logit.sigmoid().item() for logit in (output.max_logits_C, output.bag_logits_C)]
        assert found.slide == each.slide
        assert found.max_probabilities == pytest.approx((streams[0],))
        assert found.bag_probabilities == pytest.approx((streams[1],))
        assert found.probabilities == pytest.approx((np.mean(streams),), rel=1e-5)
        attention = output.attention_NC[:, 0].detach().double().numpy()
        entropy = -(attention * np.log(attention)).sum() / np.log(len(attention))
        assert found.attention_entropy == pytest.approx(entropy, rel=1e-5)
        assert found.critical == int(output.instance_logits_NC[:, 0].argmax())
    assert (torch.is_grad_enabled(), trained.module.training) == before


def test_scores_of_methods_without_streams_or_attention():
    trained = quick("mean")
    (found,) = score(trained.module, [made(70, 1)[0].bag])
    assert (found.max_probabilities, found.bag_probabilities, found.attention_entropy) == (None, None, None)
    one = made(71, 1, size=1)[0].bag
    (alone,) = score(quick("abmil").module, [one])
    assert (alone.attention_entropy, alone.critical) == (None, 0)
    assert score(trained.module, []) == []


@pytest.mark.parametrize("name", ["dsmil", "abmil", "mean"])
def test_nothing_of_single_tiles_is_kept_until_all_bags_are_scored(name: str, monkeypatch: pytest.MonkeyPatch):
    kept: list[torch.Tensor] = []
    whole = base._fetch

    def fetch(summaries: Sequence[Any]) -> Any:
        kept.extend(each for summary in summaries for each in summary if isinstance(each, torch.Tensor))
        return whole(summaries)

    monkeypatch.setattr(base, "_fetch", fetch)
    score(quick(name).module, [each.bag for each in cohort(90, 94, size=1000)])
    assert len(kept) >= 4
    assert max(each.untyped_storage().nbytes() for each in kept) < 100


def test_chowders_evidence_has_the_right_sign():
    module = aggregate.build("chowder", 1, 1, form="original", top=2, bottom=2)
    features = torch.tensor([[-3.0], [0.0], [1.0]])
    for sign in (1.0, -1.0):
        with torch.no_grad():
            for layer in module.slide:
                if isinstance(layer, torch.nn.Linear):
                    layer.weight.fill_(1.0)
            module.slide[-1].weight.fill_(sign)
            module.scorer.weight.fill_(1.0)
        module.eval()
        evidence = module.critical_evidence(module(features))
        assert int(evidence.argmax()) == (2 if sign > 0 else 0)


def test_scoring_a_bag_of_another_encoder_names_the_slide():
    with pytest.raises(BagError, match=r"slide80: .*5 dimensions.*16"):
        score(quick("mean").module, [made(80, 0, dim=5)[0].bag])
    with pytest.raises(BagError, match="slide81: NaN"):
        score(quick("mean").module, [nan_in(made(81, 0)[0]).bag])


def test_coordinates_are_used_where_asked_for():
    options = {"hidden": 8, "heads": 2, "landmarks": 4, "coordinates": True}
    trained = quick("transmil", options=options)
    bag = made(82, 1)[0].bag
    moved = Bag(bag.slide, bag.features_ND, bag.coords[::-1].copy())
    here, there = score(trained.module, [bag, moved])
    assert here.probabilities != there.probabilities
    with pytest.raises(BagError, match="slide82: its feature file has no coordinates"):
        score(trained.module, [Bag(bag.slide, bag.features_ND, None)])


def test_bags_on_a_cpu_stay_mapped(tmp_path: Path):
    path = tmp_path / "features"
    np.random.default_rng(0).normal(size=(40, DIM)).astype(np.float16).tofile(path)
    mapped = np.memmap(path, dtype=np.float16, mode="r", shape=(40, DIM))
    tensor = BagStore("cpu").features(Bag("a", mapped, None))
    assert np.shares_memory(tensor.numpy(), mapped)
    (found,) = score(quick("mean").module, [Bag("a", mapped, None)])
    (copied,) = score(quick("mean").module, [Bag("a", np.array(mapped), None)])
    assert found.probabilities == copied.probabilities


# ---------------------------------------------------------------------------------------------------- the folder


@pytest.mark.parametrize("name", ["self-vit-mil", "chowder", "clam-sb"])
def test_a_saved_model_scores_the_same(tmp_path: Path, name):
    trained = quick(name)
    save_model(tmp_path / "seed0", trained, {"classes": ["normal", "tumor"], "encoder": "vit"})
    module, config = load_model(tmp_path / "seed0")
    bags = [each.bag for each in cohort(60, 66)]
    assert [each.probabilities for each in score(module, bags)] == [
        each.probabilities for each in score(trained.module, bags)
    ]
    assert config["classes"] == ["normal", "tumor"]
    assert config["aggregator"]["name"] == name
    assert config["recipe"]["lr"] == trained.recipe.lr
    assert config["epoch"] == trained.epoch
    lines = [json.loads(line) for line in (tmp_path / "seed0" / "metrics.jsonl").read_text().splitlines()]
    assert lines == list(trained.history)
    save_model(tmp_path / "again", trained, {"classes": ["normal", "tumor"], "encoder": "vit"})
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "again" / file).read_bytes() == (tmp_path / "seed0" / file).read_bytes()
    assert str(tmp_path) not in (tmp_path / "seed0" / "config.json").read_text()


def test_broken_folders_are_told(tmp_path: Path):
    with pytest.raises(ArtefactError, match=r"none: no trained aggregator, it has no config.json"):
        load_model(tmp_path / "none")
    folder = tmp_path / "seed0"
    save_model(folder, quick("mean"), {})
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ArtefactError, match="seed0: the aggregator cannot be read"):
        load_model(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ArtefactError, match=r"it has no model\.safetensors"):
        load_model(folder)
    (folder / "model.safetensors").write_bytes(whole)
    config = json.loads((folder / "config.json").read_text())
    later = config | {"format_version": 9, "aggregator": {**config["aggregator"], "what_nobody_knows_yet": 1}}
    (folder / "config.json").write_text(json.dumps(later))
    with pytest.raises(ArtefactError, match="version 9"):
        load_model(folder)


# ---------------------------------------------------------------------------------------------------- recording


class FakeRecorder:
    """Stands in for CUDA graphs: a replay calls the step, in the mode that the module had when it was recorded."""

    replays: list[int] = []  # noqa: RUF012

    def record(self, recorded: list[train.Step]) -> list[train.Step]:
        def replay(step: train.Step) -> train.Step:
            def call() -> None:
                FakeRecorder.replays.append(1)
                step()

            return call

        return [replay(step) for step in recorded]


@pytest.mark.parametrize("together", [1, 3])
def test_recorded_steps_are_replayed_from_the_second_one_on(monkeypatch, together):
    how = {"epochs": 4, "accumulate": together, "patience": 0}
    plain = quick("dsmil", **how)
    monkeypatch.setattr(FakeRecorder, "replays", [])
    monkeypatch.setattr(train, "Recorder", FakeRecorder)
    monkeypatch.setattr(train._Run, "_can_capture", lambda self: True)
    assert_same_weights(plain, quick("dsmil", **how))
    moves = 0 if together == 1 else math.ceil(8 / together)
    assert len(FakeRecorder.replays) == 4 * (8 + 6 + moves) - together - (moves > 0)


def test_steps_that_cannot_be_recorded_go_on_as_they_are(monkeypatch):
    class Refusing:
        def record(self, recorded: list[train.Step]) -> list[train.Step]:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")

    plain = quick("dsmil", epochs=3)
    monkeypatch.setattr(train, "Recorder", Refusing)
    monkeypatch.setattr(train._Run, "_can_capture", lambda self: True)
    trained = quick("dsmil", epochs=3)
    assert_same_weights(plain, trained)
    assert "(operation not permitted when stream is capturing)" in trained.warnings[0]


def trained_in_turns(names: list[str], seeds: list[int], **how: Any) -> dict[tuple[str, int], Trained]:
    """Trainings of several methods at the same time; by method and seed."""
    device = how.pop("device", "cpu")

    def training_of(name: str) -> Iterator[tuple[str, int, Trained] | graphs.Queued]:
        settings = asked(device=device, options={**SMALL.get(name, {}), **how.get(name, {})}, **how["all"])
        left = iter(seeds)
        for found in train.train_seeds(name, cohort(0, 8), cohort(8, 14), 1, settings, seeds):
            yield found if isinstance(found, graphs.Queued) else (name, next(left), found)

    begin = partial(next, map(training_of, names), None)
    return {(name, seed): found for name, seed, found in graphs.in_turns(begin, most=3)}


@pytest.mark.parametrize("name", aggregate.NAMES)
def test_gradients_of_several_bags_add_up(name):
    """Autograd may give several weights one tensor as their first gradient, to which each then adds the next one."""
    module = aggregate.build(name, DIM, 1, **SMALL.get(name, {})).eval()
    bags = [torch.from_numpy(each.bag.features_ND).float() for each in cohort(0, 2)]

    def gradients() -> dict[str, torch.Tensor]:
        return {key: each.grad for key, each in module.named_parameters() if each.grad is not None}

    single: list[dict[str, torch.Tensor]] = []
    for bag in bags:
        module.zero_grad()
        module.loss(module(bag), 1.0).backward()
        single.append(gradients())
    module.zero_grad()
    for bag in bags:
        module.loss(module(bag), 1.0).backward()
    for key, value in gradients().items():
        torch.testing.assert_close(value, single[0][key] + single[1][key])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "how"),
    [
        (["abmil", "self-vit-mil", "transmil", "clam-sb", "mil-rnn"], {"instance_dropout": 0.4, "patience": 1}),
        (["dsmil", "transmil"], {"optimizer": "lookahead-radam", "accumulate": 3}),
        (["chowder", "mean"], {"optimizer": "sgd", "clip_grad": 0.1}),
    ],
)
def test_trainings_in_turns_equal_trainings_alone(names, how):
    """Random numbers, optimizer states and criteria of one do not reach another, nor the next seed."""
    seeds = [4, 0, 7]
    before = torch.get_rng_state()
    found = trained_in_turns(names, seeds, all={"epochs": 4, **how})
    assert torch.equal(torch.get_rng_state(), before)
    assert list(found) != [(name, seed) for name in names for seed in seeds]  # they did take turns
    for (name, seed), trained in found.items():
        alone = quick(name, seed, epochs=4, **how)
        assert_same_weights(trained, alone)
        assert trained.epoch == alone.epoch
        assert trained.warnings == alone.warnings
        for lines in (trained.history, alone.history):
            for line in lines:
                line.pop("seconds")
        assert trained.history == alone.history


@pytest.mark.slow  # a new interpreter
def test_loading_models_does_not_import_the_compiler(tmp_path):
    """Tensors without memory made torch import it to draw weights: a second in every process that loads a model."""
    names = ("clam-sb", "transmil")
    for name in names:
        save_model(tmp_path / name, quick(name), {})
    code = (
        "import sys; from pathlib import Path; from selfvitmil.aggregate.train import load_model\n"
        f"for name in {names}: load_model(Path({str(tmp_path)!r}) / name)\n"
        "assert not {'torch._dynamo', 'sympy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_no_more_trainings_at_once_than_asked():
    running: list[int] = []
    most = 0

    def steps(number: int) -> Iterator[int | graphs.Queued]:
        nonlocal most
        running.append(number)
        most = max(most, len(running))
        yield from [graphs.Queued()] * number
        yield number
        running.remove(number)

    assert sorted(graphs.in_turns(partial(next, map(steps, range(6)), None), most=2)) == list(range(6))
    assert most == 2


def test_a_training_whose_work_is_not_done_holds_up_no_other():
    slow_is_done = False

    def slow() -> Iterator[str | graphs.Queued]:
        yield graphs.Queued(lambda: slow_is_done)
        yield "slow"

    def fast(number: int) -> Iterator[str | graphs.Queued]:
        nonlocal slow_is_done
        for _ in range(3):
            yield graphs.Queued()
        slow_is_done = number == 2
        yield f"fast {number}"

    begin = partial(next, iter([slow(), *map(fast, range(3))]), None)
    assert list(graphs.in_turns(begin, most=2)) == ["fast 0", "fast 1", "fast 2", "slow"]


def test_methods_say_when_they_wait_for_the_device():
    waits = {name: aggregate.build(name, 8, 1).waits_for_device for name in aggregate.NAMES}
    assert not any(waits.values())
    assert aggregate.build("transmil", 8, 1, coordinates=True).waits_for_device
    assert aggregate.build("mil-rnn", 8, 1, shuffle=True).waits_for_device
    assert aggregate.build("dsmil", 8, 1, v="linear", dropout=0.1).waits_for_device


WHOLE = {"instance_dropout": 0.0, "patience": 0, **CONSTANT}
"""CPU and GPU draw different random numbers: none are used where they are compared."""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
class TestOnGpu:
    @pytest.mark.parametrize("name", aggregate.NAMES)
    @pytest.mark.parametrize("together", [1, 3])
    def test_replayed_epochs_equal_plain_ones(self, monkeypatch, name, together):
        if name == "transmil":
            pytest.skip(
                "a GPU adds the tokens of a grid in an order that changes, so two runs of TransMIL differ anyhow"
            )
        options = {**SMALL.get(name, {}), **({"dropout": 0.0} if name in ("abmil", "abmil-gated", "clam-sb") else {})}
        how = {"device": "cuda", "epochs": 6, "accumulate": together, "options": options, **WHOLE}
        recorded = quick(name, **how)
        assert not [each for each in recorded.warnings if "graphs" in each]
        monkeypatch.setattr(train._Run, "_can_capture", lambda self: False)
        plain = quick(name, **how)
        losses = [[line["train_loss"] for line in each.history] for each in (recorded, plain)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-3)

    @pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw", "lookahead-radam"])
    def test_trainings_in_turns_equal_trainings_alone(self, optimizer):
        names, seeds = ["abmil", "dsmil", "mil-rnn", "mean"], [4, 0]
        how = {"epochs": 6, "optimizer": optimizer, "instance_dropout": 0.4}
        for (name, seed), trained in trained_in_turns(names, seeds, device="cuda", all=how).items():
            assert not [each for each in trained.warnings if "graphs" in each]
            losses = [line["train_loss"] for line in trained.history]
            alone = quick(name, seed, device="cuda", **how)
            assert losses == pytest.approx([line["train_loss"] for line in alone.history], rel=1e-3)

    @pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw", "lookahead-radam"])
    def test_optimizers_are_recorded(self, optimizer):
        how = {"optimizer": optimizer, "epochs": 6, "clip_grad": 1.0, **WHOLE}
        gpu, cpu = (quick("dsmil", device=device, **how) for device in ("cuda", "cpu"))
        losses = [[line["train_loss"] for line in each.history] for each in (gpu, cpu)]
        # Rounding grows from step to step: on an H200 the fifth epoch agreed to 2 %, the sixth of AdamW to 2.3 %.
        assert losses[0][:4] == pytest.approx(losses[1][:4], rel=0.02)
        assert not [each for each in gpu.warnings if "graphs" in each]

    def test_random_numbers_are_drawn_anew_in_every_replay(self):
        how = {"device": "cuda", "epochs": 8, "patience": 0, "instance_dropout": 0.5, "lr": 1e-12, "min_lr": 1e-12}
        trained = quick("abmil", **how)
        losses = [line["train_loss"] for line in trained.history]
        assert len(set(losses)) > 5
        assert not [each for each in trained.warnings if "graphs" in each]
        again = quick("abmil", **how)
        assert [line["train_loss"] for line in again.history] == losses

    @pytest.mark.parametrize("cache_gb", [0, 1.5e-6, None])
    def test_bags_that_do_not_fit_are_uploaded_each_time(self, cache_gb):
        fitted = quick("dsmil", device="cuda", epochs=3, **WHOLE)
        trained = quick("dsmil", device="cuda", epochs=3, cache_gb=cache_gb, **WHOLE)
        losses = [[line["train_loss"] for line in each.history] for each in (fitted, trained)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-3)

    def test_large_bags_are_uploaded_whole(self):
        features = np.random.default_rng(0).normal(size=(9000, 1500)).astype(np.float16)  # more than one staging piece
        kept = BagStore("cuda")
        uploaded = kept.features(Bag("a", features, None))
        assert torch.equal(uploaded.cpu(), torch.from_numpy(features))
        none_kept = BagStore("cuda", cache_gb=0)
        bag = Bag("b", features, None)
        none_kept.prefetch(bag)
        assert torch.equal(none_kept.features(bag).cpu(), torch.from_numpy(features))
        assert not none_kept.holds([bag])


def test_chunks_of_a_bag_make_no_difference_to_training(monkeypatch):
    whole = quick("self-vit-mil")
    monkeypatch.setitem(bag_tensors.CHUNK_BYTES, "cpu", 7 * DIM * 4)
    chunked = quick("self-vit-mil")
    for name, weight in weights_of(whole).items():
        torch.testing.assert_close(weight, weights_of(chunked)[name], rtol=1e-3, atol=1e-5)


def test_small_bags_are_trained_by_one_thread_and_the_caller_keeps_his():
    """Threads that wait for each other on a busy machine took 50 times the work."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        seen = []
        small = Bag("a", np.zeros((3, 4), np.float16), None)
        large = Bag("b", np.zeros((bag_tensors.ONE_THREAD_ELEMENTS // 4, 4), np.float16), None)
        for bags in ([small], [small, large]):
            with bag_tensors.few_threads(bags, torch.device("cpu")):
                seen.append(torch.get_num_threads())
        assert seen == [1, 2]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


# ---------------------------------------------------------------------------------------------------- averages


@pytest.mark.parametrize("method", ["mean", "dsmil"])
def test_averaged_weights_follow_the_slow_loop_and_change_no_training_step(monkeypatch, method: str):
    seen: list[dict[str, torch.Tensor]] = []
    validate = train._Run._validate

    def watched(run: Any) -> None:
        seen.append({name: value.clone() for name, value in run._module.named_parameters()})
        validate(run)

    monkeypatch.setattr(train._Run, "_validate", watched)
    quick(method, epochs=5, patience=0)
    plain, seen[:] = list(seen), []
    averaged = quick(method, epochs=5, patience=0, average_epochs=3)
    assert len(plain) == len(seen) == 5
    slow = plain[0]
    for epoch in range(1, 6):
        share = 1 / min(epoch, 3)
        slow = {name: slow[name] + share * (plain[epoch - 1][name] - slow[name]) for name in slow}
        for name, value in slow.items():
            torch.testing.assert_close(seen[epoch - 1][name], value, rtol=1e-5, atol=1e-7)
    for name, value in seen[averaged.epoch - 1].items():
        assert torch.equal(weights_of(averaged)[name], value)


def test_average_is_recorded_only_where_it_is_asked_for(tmp_path: Path):
    for epochs in (0, 3):
        save_model(tmp_path / str(epochs), quick("mean", average_epochs=epochs), {})
    recipes_of = [load_model(tmp_path / str(epochs))[1]["recipe"] for epochs in (0, 3)]
    assert "average_epochs" not in recipes_of[0]
    assert recipes_of[1]["average_epochs"] == 3
