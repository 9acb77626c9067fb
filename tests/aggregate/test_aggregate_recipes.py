"""Recipes: the published numbers as their sources give them, and what settings overrule."""

from __future__ import annotations

from dataclasses import asdict

import pytest
import torch

from selfvitmil import aggregate
from selfvitmil.aggregate import base
from selfvitmil.aggregate.recipes import MAX_LR, DirectAdam, note_of, recipe_of, recipe_warnings
from selfvitmil.errors import ConfigError
from selfvitmil.settings import TrainSettings, resolve_settings
from selfvitmil.stages.train import options_for

EACH = pytest.mark.parametrize("name", aggregate.NAMES)
PUBLISHED = TrainSettings(recipe="published")


@EACH
@pytest.mark.parametrize("which", ["default", "published"])
def test_every_method_has_both_recipes_and_they_fit_it(name, which):
    recipe = recipe_of(name, TrainSettings(recipe=which))
    module = aggregate.build(name, 8, 1, **recipe.module_options)
    assert module.config["name"] == name
    assert recipe.source
    assert recipe.min_lr <= recipe.lr
    assert recipe.max_instances is None or recipe.max_instances > 0


# Method, options, then what its paper or code says: optimizer, learning rate, its end, betas, weight decay, epochs,
# bags a step, patience.
PRINTED = [
    ("self-vit-mil", {}, "adamw", 2e-5, 5e-6, (0.5, 0.9), 5e-3, 50, 1, 0),
    ("dsmil", {}, "adam", 1e-4, 5e-6, (0.5, 0.9), 1e-3, 50, 1, 10),
    ("dsmil-lc", {}, "adam", 1e-4, 5e-6, (0.5, 0.9), 1e-3, 50, 1, 10),
    ("abmil", {}, "adam", 5e-4, 5e-4, (0.9, 0.999), 1e-4, 20, 1, 0),
    ("abmil-gated", {}, "adam", 1e-4, 1e-4, (0.9, 0.999), 1e-5, 200, 1, 20),
    ("chowder", {}, "adam", 1e-3, 1e-3, (0.9, 0.999), 0, 50, 16, 0),
    ("chowder", {"form": "original"}, "adam", 1e-3, 1e-3, (0.9, 0.999), 0, 30, 10, 0),
    ("transmil", {}, "lookahead-radam", 2e-4, 2e-4, (0.9, 0.999), 1e-5, 200, 2, 10),
    ("mil-rnn", {}, "adam", 1e-4, 1e-4, (0.9, 0.999), 1e-4, 100, 1, 0),
    ("clam-sb", {}, "adam", 1e-4, 1e-4, (0.9, 0.999), 1e-5, 200, 1, 20),
]


@pytest.mark.parametrize(
    ("name", "options", "optimizer", "lr", "min_lr", "betas", "decay", "epochs", "together", "patience"), PRINTED
)
def test_published_numbers(name, options, optimizer, lr, min_lr, betas, decay, epochs, together, patience):
    recipe = recipe_of(name, TrainSettings(aggregator=name, recipe="published", options=options)).for_dim(3840)
    found = (recipe.optimizer, recipe.lr, recipe.min_lr, recipe.betas, recipe.weight_decay, recipe.epochs)
    assert found == (optimizer, lr, min_lr, betas, decay, epochs)
    assert (recipe.accumulate, recipe.patience) == (together, patience)
    assert not recipe.standardize
    assert recipe.warmup_epochs == 0


def test_published_details():
    assert recipe_of("self-vit-mil", PUBLISHED).options["v"] == "linear"
    assert recipe_of("chowder", PUBLISHED).max_instances == 1000
    assert recipe_of("clam-sb", PUBLISHED).min_epochs == 50
    assert recipe_of("dsmil", PUBLISHED).monitor == "authors"
    assert recipe_of("transmil", PUBLISHED).monitor == "loss"


@EACH
def test_settings_overrule_field_by_field(name):
    given = {
        "optimizer": "sgd",
        "lr": 0.25,
        "min_lr": 0.125,
        "betas": (0.1, 0.2),
        "weight_decay": 0.5,
        "epochs": 7,
        "warmup_epochs": 3,
        "accumulate": 5,
        "clip_grad": 2.5,
        "patience": 6,
        "monitor": "auc",
        "class_weights": "balanced",
        "instance_dropout": 0.25,
        "max_instances": 123,
        "standardize": False,
    }
    for which in ("default", "published"):
        whole = recipe_of(name, TrainSettings.model_validate({"recipe": which, **given})).for_dim(2)
        assert {key: asdict(whole)[key] for key in given} == given
        plain = asdict(recipe_of(name, TrainSettings(recipe=which, epochs=50)))
        for key in set(given) - {"lr", "min_lr", "epochs"}:
            settings = TrainSettings.model_validate({"recipe": which, "epochs": 50, key: given[key]})
            assert asdict(recipe_of(name, settings)) == plain | {key: given[key]}


def test_options_are_merged_and_may_standardize():
    recipe = recipe_of("self-vit-mil", TrainSettings(recipe="published", options={"top": 3, "v": "identity"}))
    assert recipe.options["top"] == 3
    assert recipe.options["v"] == "identity"
    assert recipe.options["q"] == "linear"
    by_option = recipe_of("dsmil", TrainSettings(recipe="published", options={"dsmil": {"standardize": True}}))
    assert by_option.standardize
    assert "standardize" not in by_option.options
    of_one_method = TrainSettings(standardize=False, options={"dsmil": {"standardize": True}})
    assert recipe_of("dsmil", of_one_method).standardize
    assert not recipe_of("max", of_one_method).standardize


def test_a_short_training_has_a_shorter_warm_up():
    assert recipe_of("dsmil", TrainSettings(epochs=1)).warmup_epochs == 0
    assert recipe_of("dsmil", TrainSettings(epochs=2)).warmup_epochs <= 1


def test_min_lr_keeps_its_share_of_a_given_lr():
    assert recipe_of("dsmil", TrainSettings(recipe="published", lr=1e-3)).min_lr == pytest.approx(5e-5)
    assert recipe_of("transmil", TrainSettings(recipe="published", lr=1e-3)).min_lr == pytest.approx(1e-3)


@EACH
def test_default_learning_rates_go_with_the_dimension_unless_given(name):
    recipe = recipe_of(name, TrainSettings())
    scaled = recipe.for_dim(2 * (recipe.lr_dim or 1))
    share = 0.5 if recipe.lr_dim else 1.0
    assert (scaled.lr, scaled.min_lr) == pytest.approx((share * recipe.lr, share * recipe.min_lr))
    assert recipe.for_dim(1).lr <= 1.001 * max(MAX_LR, recipe.lr)
    assert scaled.for_dim(1) == scaled  # once is enough
    given = recipe_of(name, TrainSettings(lr=1e-3))
    assert given.for_dim(7).lr == 1e-3


@EACH
def test_a_given_min_lr_holds_for_any_dimension(name):
    plain = recipe_of(name, TrainSettings())
    double = 2 * (plain.lr_dim or 1)
    scaled = recipe_of(name, TrainSettings(min_lr=plain.lr / 4)).for_dim(double)
    assert scaled.min_lr == plain.lr / 4
    assert scaled.lr == plain.for_dim(double).lr


def test_a_given_min_lr_is_compared_with_the_learning_rate_that_is_used():
    plain = recipe_of("self-vit-mil", TrainSettings())
    assert plain.lr_dim is not None
    recipe = recipe_of("self-vit-mil", TrainSettings(min_lr=1.5 * plain.lr))
    assert recipe.for_dim(plain.lr_dim // 2).min_lr == 1.5 * plain.lr
    with pytest.raises(ConfigError, match=rf"min_lr=.* above lr=.* for {plain.lr_dim} dimensions"):
        recipe.for_dim(plain.lr_dim)


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("dsmill", {}, "did you mean 'dsmil'"),
        ("dsmil", {"lr": 1e-4, "min_lr": 1e-3}, "min_lr=0.001 above lr=0.0001"),
        ("dsmil", {"epochs": 3, "warmup_epochs": 3}, "warmup_epochs=3"),
    ],
)
def test_contradictions_are_refused(name, settings, words):
    with pytest.raises(ConfigError, match=words):
        recipe_of(name, TrainSettings.model_validate(settings))


def test_options_of_one_method_are_not_those_of_others():
    settings = TrainSettings(options={"top": 5, "transmil": {"hidden": 64, "epochs": 7, "betas": (0.5, 0.6)}})
    transmil = recipe_of("transmil", options_for("transmil", settings))
    assert (transmil.options["hidden"], transmil.epochs, transmil.betas) == (64, 7, (0.5, 0.6))
    assert "hidden" not in recipe_of("dsmil", options_for("dsmil", settings)).options
    assert recipe_of("dsmil", options_for("dsmil", settings)) == recipe_of("dsmil", TrainSettings())
    assert (
        recipe_of("self-vit-mil", options_for("self-vit-mil", settings)).options["top"] == 5
    )  # train.aggregator, to which plain options belong
    with pytest.raises(ConfigError, match=r"train\.options\.dsmil: epochs"):
        recipe_of("dsmil", TrainSettings(options={"dsmil": {"epochs": 0}}))
    with pytest.raises(ConfigError, match="transmill"):
        recipe_of("dsmil", TrainSettings(options={"transmill": {"hidden": 64}}))


@pytest.mark.parametrize("preset", ["paper", "authors-code"])
@pytest.mark.parametrize("name", [name for name in aggregate.NAMES if name != "self-vit-mil"])
def test_a_preset_of_self_vit_mil_leaves_other_methods_as_published(name, preset):
    settings = resolve_settings(flags={"preset": preset}).train
    plain = TrainSettings(aggregator=name, recipe="published")
    assert recipe_of(name, options_for(name, settings)) == recipe_of(name, plain)
    note = note_of(name, options_for(name, settings), 512)
    assert (note.kind, note.differences) == ("ours" if name in ("mean", "max", "topk") else "published", ())


def test_presets_follow_their_own_source():
    paper, code = (resolve_settings(flags={"preset": name}).train for name in ("paper", "authors-code"))
    text, released = recipe_of("self-vit-mil", paper), recipe_of("self-vit-mil", code)
    assert (text.optimizer, text.lr, text.epochs, text.options["scale"], text.options["score"]) == (
        "adamw", 2e-5, 50, "none", "mean_prob",
    )  # fmt: skip
    assert (released.optimizer, released.lr, released.epochs, released.weight_decay, released.options["score"]) == (
        "adam", 2e-4, 200, 5e-3, "bag",
    )  # fmt: skip
    assert note_of("self-vit-mil", paper, 3840).kind == note_of("self-vit-mil", code, 3840).kind == "published"
    assert released != recipe_of("dsmil", options_for("dsmil", code))


def test_differences_from_the_published_recipe_are_listed():
    ours = note_of("dsmil", TrainSettings(), 1024)
    assert ours.kind == "ours"
    for difference in (
        "weight_decay 1 (published 0.001)", "top 3 (published 1)", "init quiet (published orthogonal)",
        "evidence auto (published free)", "instance_dropout 0.3 (published 0)", "standardize True (published False)",
    ):  # fmt: skip
        assert difference in ours.differences
    assert note_of("dsmil", TrainSettings(recipe="published"), 1024).differences == ()
    changed = note_of("transmil", TrainSettings(recipe="published", options={"transmil": {"hidden": 64}}), 1024)
    assert (changed.kind, changed.differences) == ("changed", ("hidden 64 (published 512)",))
    assert note_of("mean", TrainSettings(), 1024).differences == ()


@pytest.mark.parametrize("preset", ["default", "paper", "authors-code"])
def test_unscaled_attention_is_warned_of_and_nearly_one_hot(preset):
    settings = resolve_settings(flags={"preset": preset}).train
    recipe = recipe_of("self-vit-mil", settings)
    torch.manual_seed(0)
    module = aggregate.build("self-vit-mil", 3840, 1, **recipe.module_options | {"init": "default"})
    with torch.no_grad():
        largest = module(torch.randn(500, 3840)).attention_NC.max().item()
    assert bool(recipe_warnings(recipe)) == (preset == "paper") == (largest > 0.9)
    assert largest > 0.9 or largest < 0.2


def test_method_without_a_recipe_is_trained_by_the_base_recipe(monkeypatch):
    monkeypatch.setitem(base.CLASSES, "new", base.CLASSES["mean"])
    ours, published = (
        recipe_of("new", TrainSettings.model_validate({"recipe": each})) for each in ("default", "published")
    )
    assert (ours.optimizer, ours.lr, ours.standardize) == ("adamw", 1e-4, True)
    assert published == recipe_of("mean", TrainSettings.model_validate({"recipe": "published"}))
    assert note_of("new", TrainSettings(), 64).kind == "ours"


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_direct_steps_give_the_bits_of_torchs_optimizer(kind):
    """Two groups, a learning rate that changes, and a parameter that has a gradient in some of the steps only."""

    def trained(direct: bool) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        weights = [torch.randn(shape, generator=generator) for shape in ((7, 5), (13,), (3,), (2,))]
        groups = [{"params": weights[:2], "weight_decay": 0.1}, {"params": weights[2:], "weight_decay": 0.0}]
        optimizer = kind(groups, lr=0.1, betas=(0.5, 0.9), fused=True)
        step = DirectAdam(optimizer).step if direct else optimizer.step
        for number in range(9):
            for weight in weights[:3]:
                weight.grad = torch.randn(weight.shape, generator=generator)
            sometimes = torch.randn(2, generator=generator)
            weights[3].grad = sometimes if number in (3, 4, 5, 8) else None
            for group in optimizer.param_groups:
                group["lr"] = 0.1 / (number + 1)
            step()
        return weights

    before = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))
    for own, expected in zip(trained(True), trained(False), strict=True):
        assert torch.equal(own, expected)
    assert not torch.equal(trained(True)[0], before)
