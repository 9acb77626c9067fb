"""Training recipes: the hyperparameters of each aggregator, our defaults and those of its paper or code; its optimizer.

`recipe_of(name, settings)` returns the method's `default` or `published` recipe, overridden by the fields that
`TrainSettings` sets; `note_of` describes for a table how it differs from the published one. Two tables hold the
hyperparameters, each a row of differences from a common base. `source` names the origin of a recipe, `departs` where
the implementation differs from it.

For all methods: one bag per step (`accumulate` bags make one optimizer step), the learning rate rises over the warm-up
and falls along half a cosine (`min_lr` equal to `lr` keeps it constant), and the weights of the best validation epoch
are kept, also where the published code takes those of the last epoch or of the best on its test set. Computation is in
float32. On a GPU every value that changes from step to step (learning rate, step counts) lives on the device, so that a
step can be captured once and replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from selfvitmil.aggregate.base import nearest, settings_of
from selfvitmil.errors import ConfigError
from selfvitmil.runtime.training import CosineSchedule, parameter_groups
from selfvitmil.settings import TrainSettings, describe

MAX_LR = 0.03
"""Upper limit of the learning rate when it is scaled up for embeddings of few dimensions."""


@dataclass(frozen=True)
class Recipe:
    """Hyperparameters of a training run; the fields are those of `TrainSettings`, resolved."""

    optimizer: str
    """adamw, adam, sgd (Nesterov, momentum 0.9) or lookahead-radam."""
    lr: float
    min_lr: float
    betas: tuple[float, float]
    weight_decay: float
    epochs: int
    """Maximum number of epochs."""
    warmup_epochs: int
    accumulate: int
    clip_grad: float
    """Clip the global gradient norm to this value; 0 disables clipping."""
    patience: int
    """Early stopping: epochs without improvement on the validation set; 0 disables it."""
    min_epochs: int
    """Epochs before which early stopping does not apply."""
    monitor: str
    """loss, auc, or authors: (AUC + accuracy + 1 - loss) / 4."""
    class_weights: str
    """none, or balanced: bags are weighted inversely to the frequency of their class."""
    instance_dropout: float
    max_instances: int | None
    standardize: bool
    average_epochs: int = 0
    """Epochs over which the weights are averaged for validation and inference; 0 disables it."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the aggregator that differ from its defaults."""
    source: str = ""
    """Origin of the hyperparameters, as text."""
    departs: str = ""
    """Differences from the source, as text."""
    lr_dim: int | None = None
    """Feature dimension that `lr` is tuned for, see `for_dim`; None means any."""
    keep_min_lr: bool = False
    """Whether `min_lr` was set by the user and so is not scaled along with `lr`."""

    @property
    def module_options(self) -> dict[str, Any]:
        """Arguments of `build`; `evidence` is left at the method's default where it is still `auto`."""
        chosen = {key: value for key, value in self.options.items() if (key, value) != ("evidence", "auto")}
        return {**chosen, "standardize": self.standardize}

    def to_json(self) -> dict[str, Any]:
        """Return all fields; a field that is seldom set is left out where it is not, so that files and hashes from
        before it was there stay as they are."""
        info = asdict(self)
        if not self.average_epochs:
            del info["average_epochs"]
        return info

    def for_dim(self, dim: int) -> Recipe:
        """Return the recipe for `dim`-dimensional embeddings: learning rates scale with 1 / dim where `lr_dim` is set.

        A step of Adam moves every weight by about `lr`, and so the logit of a linear scorer by `lr` times the sum of
        |h_i| over the dimensions. Published rates agree with that: 1e-4 for 512 (DSMIL), 2e-5 for 3840 (Self-ViT-MIL).
        Raises ConfigError where the scaled rate falls below a `min_lr` that was set.
        """
        if self.lr_dim is None:
            return self
        factor = min(self.lr_dim / dim, MAX_LR / self.lr)
        min_lr = self.min_lr if self.keep_min_lr else self.min_lr * factor
        scaled = replace(self, lr=self.lr * factor, min_lr=min_lr, lr_dim=None)
        _check_lr(scaled, f" (the method's for {dim} dimensions)")
        return scaled


def recipe_warnings(recipe: Recipe) -> tuple[str, ...]:
    """Return warnings about a recipe, to show before training."""
    if recipe.options.get("scale") != "none":
        return ()
    return (
        "attention is not scaled (scale = 'none', the paper's equation): with embeddings of hundreds of dimensions it "
        "is nearly one-hot from the first step, so bag embedding and attention heatmap rest on a single tile; the "
        "authors' code divides by the square root of the query dimension (scale = 'sqrt')",
    )


# ---------------------------------------------------------------------------------------------------- ours

_BASE = Recipe(
    optimizer="adamw",
    lr=1e-4,
    min_lr=1e-6,
    betas=(0.9, 0.999),
    weight_decay=1e-3,
    epochs=100,
    warmup_epochs=2,
    accumulate=1,
    clip_grad=0.0,
    patience=20,
    min_epochs=0,
    monitor="loss",
    class_weights="none",
    instance_dropout=0.0,
    max_instances=None,
    standardize=True,
    source="ours: one recipe for cohorts of any size, inputs standardized",
)

_TWO_STREAMS: dict[str, Any] = {
    "lr": 5e-4,
    "lr_dim": 1024,
    "weight_decay": 1.0,  # a step shrinks weights by lr times this: enough to remove the noise of the initial weights
    "epochs": 60,
    "warmup_epochs": 5,
    "min_epochs": 40,
    "instance_dropout": 0.3,
    "options": {"init": "quiet", "top": 3, "evidence": "auto"},
}
"""Settings with which DSMIL finds its critical instances on small cohorts too: benchmarks/small_cohorts.py."""

_DEFAULTS: dict[str, dict[str, Any]] = {
    "self-vit-mil": _TWO_STREAMS,
    "dsmil": _TWO_STREAMS,
    "dsmil-lc": _TWO_STREAMS,
    "abmil": {"lr_dim": 1024},
    "abmil-gated": {"lr_dim": 1024},
    # Sigmoid layers are slow to start: linear scores, as in its original form, and no early stopping. With the scorer
    # of its current form 2 of 8 seeds failed on synthetic bags that all others solve.
    "chowder": {"lr": 3e-4, "lr_dim": 1024, "min_epochs": 60, "options": {"scorer_hidden": 0}},
    "transmil": {"lr": 2e-4, "options": {"landmarks": 64}},
    "mil-rnn": {"lr": 3e-4, "lr_dim": 1024},
    "clam-sb": {"lr_dim": 1024},
    "mean": {"lr": 5e-4, "lr_dim": 1024},
    "max": {"lr": 5e-4, "lr_dim": 1024},
    "topk": {"lr": 5e-4, "lr_dim": 1024},
}
"""Differences from the base recipe, by method; a method without a row is trained by the base recipe."""

# ---------------------------------------------------------------------------------------------------- published

_AS_PRINTED = replace(_BASE, weight_decay=0.0, warmup_epochs=0, patience=0, standardize=False, source="")
"""Where papers are silent: no warm-up, no early stopping, embeddings without standardization."""

_DSMIL = {
    "optimizer": "adam",
    "lr": 1e-4,
    "min_lr": 5e-6,
    "betas": (0.5, 0.9),
    "weight_decay": 1e-3,
    "epochs": 50,
    "patience": 10,
    "monitor": "authors",
    "options": {"init": "orthogonal"},
}
_CLAM = {
    "optimizer": "adam",
    "lr": 1e-4,
    "min_lr": 1e-4,
    "weight_decay": 1e-5,
    "epochs": 200,
    "patience": 20,
    "min_epochs": 50,
    "monitor": "loss",
}
_UNPUBLISHED = {
    **_CLAM,
    "source": "ours, for want of a published recipe: Adam as in CLAM's practice, embeddings as they are",
}
"""For methods without a row in `_PUBLISHED`."""
_EPOCH_ON_VALIDATION = "the epoch is chosen on validation slides, theirs on the test set (evaluate.protocol optimistic)"

_PUBLISHED: dict[str, dict[str, Any]] = {
    "self-vit-mil": {
        "optimizer": "adamw",
        "lr": 2e-5,
        "min_lr": 5e-6,
        "betas": (0.5, 0.9),
        "weight_decay": 5e-3,
        "epochs": 50,
        "monitor": "authors",
        "options": {"q": "linear", "v": "linear", "init": "default", "score": "mean_prob"},
        "source": "Self-ViT-MIL (2022), the text: AdamW, learning rate 2e-5, 50 epochs, mean of both streams; from the "
        "authors' code what the text leaves open: betas, weight decay, cosine to 5e-6, attention divided by sqrt(128)",
        "departs": _EPOCH_ON_VALIDATION,
    },
    "dsmil": {
        **_DSMIL,
        "source": "DSMIL's code of 2024: Adam (0.5, 0.9), learning rate 1e-4, weight decay 1e-3, cosine to 5e-6, 50 "
        "epochs, stop after 10 without gain, orthogonal weights",
        "departs": f"its cosine goes by epochs, ours by steps; {_EPOCH_ON_VALIDATION}",
    },
    "dsmil-lc": {
        **_DSMIL,
        "options": {"init": "orthogonal", "v": "identity"},
        "source": "DSMIL's code of 2024 on concatenated scales: the recipe of dsmil, with v the identity as there",
        "departs": f"its cosine goes by epochs, ours by steps; {_EPOCH_ON_VALIDATION}",
    },
    "abmil": {
        "optimizer": "adam",
        "lr": 5e-4,
        "min_lr": 5e-4,
        "weight_decay": 1e-4,
        "epochs": 20,
        "monitor": "loss",
        "options": {"hidden": 500, "attention_dim": 128, "dropout": 0.0},
        "source": "Ilse et al. 2018, their code for digits: Adam, learning rate 5e-4, weight decay 1e-4, 20 epochs, "
        "500 hidden units, attention of 128; for slides see abmil-gated",
        "departs": "embeddings of tiles instead of their convolutions on digits; the best validation epoch is kept",
    },
    "abmil-gated": {
        **_CLAM,
        "options": {"hidden": 512, "attention_dim": 256, "dropout": 0.25},
        "source": "practice on slides as in CLAM's code: 512 hidden units, gated attention of 256, dropout 0.25, Adam, "
        "learning rate 1e-4, weight decay 1e-5, at most 200 epochs, stop on validation loss after 20 without gain, not "
        "before epoch 50",
        "departs": "one logit for two classes instead of two",
    },
    "chowder": {
        "optimizer": "adam",
        "lr": 1e-3,
        "min_lr": 1e-3,
        "epochs": 50,
        "accumulate": 16,
        "max_instances": 1000,
        "monitor": "auc",
        "options": {"form": "current"},
        "source": "Owkin's code of 2023: Adam, 50 epochs, 16 slides a step, 1,000 tiles of each",
        "departs": "they choose learning rate (1e-3, 1e-4) and weight decay (0, 1e-4) by nested cross-validation, here "
        "1e-3 and 0",
    },
    "transmil": {
        "optimizer": "lookahead-radam",
        "lr": 2e-4,
        "min_lr": 2e-4,
        "weight_decay": 1e-5,
        "epochs": 200,
        "accumulate": 2,
        "patience": 10,
        "monitor": "loss",
        "options": {"hidden": 512, "heads": 8, "dropout": 0.1},
        "source": "TransMIL's code of 2021: Lookahead (6 steps, 0.5) over RAdam, learning rate 2e-4, weight decay "
        "1e-5, 2 slides a step, at most 200 epochs, stop on validation loss after 10 without gain",
        "departs": "theirs computes in float16, ours in float32; one logit for two classes instead of two",
    },
    "mil-rnn": {
        "optimizer": "adam",
        "lr": 1e-4,
        "min_lr": 1e-4,
        "weight_decay": 1e-4,
        "epochs": 100,
        "monitor": "auc",
        "options": {"s": 10, "hidden": 128},
        "source": "Campanella et al. 2019, first stage: Adam, learning rate 1e-4, weight decay 1e-4, 100 epochs",
        "departs": "the recurrent stage is trained along with the first one instead of after it, by the same optimizer "
        "(theirs: SGD, learning rate 0.1, Nesterov 0.9); one bag a step instead of 512 tiles and 128 slides, which "
        "suit thousands of slides; frozen embeddings instead of a trained ResNet-34; epoch by AUC, not by mean error",
    },
    "clam-sb": {
        **_CLAM,
        "options": {"k": 8, "bag_weight": 0.7, "instance_loss": "svm", "dropout": 0.25},
        "source": "CLAM's code: Adam, learning rate 1e-4, weight decay 1e-5, at most 200 epochs, stop on validation "
        "loss after 20 without gain, not before epoch 50; 8 instances each side, 0.7 of the loss for the bag",
        "departs": "one logit for two classes instead of two",
    },
}
"""Differences from `_AS_PRINTED`, by method."""

_CHOWDER_ORIGINAL: dict[str, Any] = {
    "optimizer": "adam",
    "lr": 1e-3,
    "min_lr": 1e-3,
    "epochs": 30,
    "accumulate": 10,
    "monitor": "auc",
    "options": {"form": "original"},
    "source": "Courtiol et al. 2018: 5 highest and 5 lowest scores, Adam, learning rate 1e-3, 10 slides a step, 30 "
    "epochs, dropout 0.5, L2 of 0.5 on the scorer",
    "departs": "they average several such networks, here the seeds are averaged",
}
"""Published recipe of CHOWDER's form "original"."""

_SELF_VIT_MIL: dict[str, dict[str, Any]] = {
    "paper": {
        **_PUBLISHED["self-vit-mil"],
        "options": {**_PUBLISHED["self-vit-mil"]["options"], "scale": "none"},
        "source": "Self-ViT-MIL (2022), the text to the letter: AdamW, learning rate 2e-5, 50 epochs, attention "
        "without a division, mean of both streams",
        "departs": "betas, weight decay and the cosine to 5e-6 are not in the text and come from the authors' code; "
        f"{_EPOCH_ON_VALIDATION}",
    },
    "authors-code": {
        "optimizer": "adam",
        "lr": 2e-4,
        "min_lr": 5e-6,
        "betas": (0.5, 0.9),
        "weight_decay": 5e-3,
        "epochs": 200,
        "monitor": "authors",
        "options": {"q": "linear", "v": "linear", "init": "default", "head": "conv1d", "scale": "sqrt", "score": "bag"},
        "source": "Self-ViT-MIL's released code (a3c3236): Adam (0.5, 0.9), learning rate 2e-4, weight decay 5e-3, "
        "cosine to 5e-6, 200 epochs, the bag stream's score alone",
        "departs": "one logit for two classes, its default is two outputs; its cosine goes by epochs, ours by steps; "
        f"{_EPOCH_ON_VALIDATION}",
    },
}
"""Differences from `_AS_PRINTED` for Self-ViT-MIL itself, by `train.recipe`; other methods use `_PUBLISHED`."""


def recipe_of(name: str, settings: TrainSettings) -> Recipe:
    """Return the recipe of a method by `settings.recipe`, overridden by every field that `settings` sets.

    Fields of `settings` itself apply to every method; those under the method's name in `settings.options` take
    precedence and apply to it alone. Where only `lr` or `lr_factor` is set, `min_lr` keeps its ratio to the rate; where
    only `epochs` is set, the warm-up is shortened to end before. Raises ConfigError for an unknown method or
    contradictory values.
    """
    known = settings_of(name)
    recipe = _recipe(name, settings)
    given = {key: value for key in NUMBERS if (value := getattr(settings, key)) is not None}
    asked = options_of(name, settings)
    for key in asked:
        if key not in known and key not in NUMBERS:
            what = f"unknown setting {key!r} of aggregator {name}{nearest(key, [*known, *NUMBERS])}"
            raise ConfigError(what, how=f"{name} has {', '.join(known)}", code="unknown-aggregator-setting")
    given |= _checked_numbers(name, {key: value for key, value in asked.items() if key in NUMBERS})
    options = {**recipe.options, **{key: value for key, value in asked.items() if key not in NUMBERS}}
    factor = given.pop("lr_factor", 1.0)
    min_factor = 1.0 if "min_lr" in given else factor
    if "lr" in given:
        given.setdefault("min_lr", given["lr"] * recipe.min_lr / recipe.lr)
        recipe = replace(recipe, lr_dim=None)
    elif "min_lr" in given and recipe.lr_dim is not None:
        recipe = replace(recipe, keep_min_lr=True)
    if "epochs" in given:
        given.setdefault("warmup_epochs", min(recipe.warmup_epochs, given["epochs"] - 1))
    recipe = replace(recipe, **given, options=options)
    recipe = replace(recipe, lr=recipe.lr * factor, min_lr=recipe.min_lr * min_factor)
    if recipe.lr_dim is None:  # else `for_dim` does, which knows the learning rate
        _check_lr(recipe)
    if recipe.warmup_epochs >= recipe.epochs:
        why = f"it must be less than the number of epochs, {recipe.epochs}"
        raise ConfigError(
            f"warmup_epochs={recipe.warmup_epochs}", why, "Set train.warmup_epochs to fewer", code="invalid-warmup"
        )
    return recipe


def _check_lr(recipe: Recipe, which: str = "") -> None:
    if recipe.min_lr > recipe.lr:
        raise ConfigError(
            f"min_lr={recipe.min_lr:g} above lr={recipe.lr:g}{which}",
            "the learning rate falls towards min_lr",
            "Lower train.min_lr, or set train.lr too",
            code="invalid-lr",
        )


def _checked_numbers(name: str, numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyperparameters given for one method; raise ConfigError where one is out of range."""
    try:
        checked = TrainSettings.model_validate(dict(numbers))
    except ValidationError as error:
        raise ConfigError(f"train.options.{name}: {describe(error)}", code="invalid-train-options") from None
    return {key: getattr(checked, key) for key in numbers}


def options_of(name: str, settings: TrainSettings) -> dict[str, Any]:
    """Return the options of a method: those without a method's name, overridden by its own.

    Where several methods are compared, `study.methods.options_for` makes the settings of each.
    """
    shared = {key: value for key, value in settings.options.items() if not isinstance(value, dict)}
    own = settings.options.get(name, {})
    for method, options in settings.options.items():
        if isinstance(options, dict):
            settings_of(method)  # raises ConfigError for an unknown method
    return {**shared, **(own if isinstance(own, dict) else {})}


_NOT_OVERRULED = ("options", "source", "departs", "lr_dim", "keep_min_lr")
_OVERRULED = tuple(each.name for each in fields(Recipe) if each.name not in _NOT_OVERRULED)
NUMBERS = (*_OVERRULED, "lr_factor")
"""Fields of `TrainSettings` that every method has."""


def _recipe(name: str, settings: TrainSettings) -> Recipe:
    if settings.recipe == "default":
        return replace(_BASE, **_DEFAULTS.get(name, {}))
    if name == "chowder" and options_of(name, settings).get("form") == "original":
        return replace(_AS_PRINTED, **_CHOWDER_ORIGINAL)
    own = _SELF_VIT_MIL.get(settings.recipe) if name == "self-vit-mil" else None
    return replace(_AS_PRINTED, **(own or _PUBLISHED.get(name, _UNPUBLISHED)))


# ---------------------------------------------------------------------------------------------------- table notes


@dataclass(frozen=True)
class RecipeNote:
    """Description of a row's recipe in a comparison."""

    kind: Literal["published", "changed", "ours", "tuned"]
    """The published recipe; the published recipe with changes; one of ours; or one chosen by cross-validation."""
    source: str
    departs: str
    """Differences from the source, as text."""
    differences: tuple[str, ...]
    """Differences from the published recipe, for example `lr 0.0005 (published 2e-05)`."""

    @property
    def words(self) -> str:
        """Description of the recipe in one line."""
        if self.kind == "published":
            return f"as published: {self.source}." + (f" Departs: {self.departs}." if self.departs else "")
        if self.kind == "tuned":
            return f"{'; '.join(self.differences)}."
        listed = "; ".join(self.differences) or "the method has no published recipe"
        return f"{'published recipe, changed' if self.kind == 'changed' else 'ours'}: {listed}."


def note_of(name: str, settings: TrainSettings, dim: int) -> RecipeNote:
    """Return how the recipe of `settings` differs from the method's published one, for `dim` dimensions."""
    asked = recipe_of(name, settings).for_dim(dim)
    source = settings.recipe if settings.recipe != "default" else "published"
    plain = TrainSettings.model_validate({"aggregator": name, "recipe": source})
    published = recipe_of(name, plain)
    differences = (
        [] if name not in _PUBLISHED and settings.recipe == "default" else _differences(name, asked, published)
    )
    if settings.recipe == "default" or name not in _PUBLISHED:
        return RecipeNote("ours", asked.source, "", tuple(differences))
    return RecipeNote("changed" if differences else "published", asked.source, asked.departs, tuple(differences))


def _differences(name: str, asked: Recipe, published: Recipe) -> list[str]:
    info = [
        _difference(key, getattr(asked, key), getattr(published, key))
        for key in _OVERRULED
        if getattr(asked, key) != getattr(published, key)
    ]
    defaults = settings_of(name)
    own, theirs = {**defaults, **asked.options}, {**defaults, **published.options}
    return info + [_difference(key, own[key], theirs[key]) for key in own if own[key] != theirs[key]]


def _difference(key: str, own: Any, published: Any) -> str:
    own, published = (f"{each:g}" if isinstance(each, float) else str(each) for each in (own, published))
    return f"{key} {own} (published {published})"


# ---------------------------------------------------------------------------------------------------- optimizers


MOMENTUM = 0.9
"""Nesterov momentum of SGD, as in MIL-RNN."""
LOOKAHEAD_STEPS = 6
LOOKAHEAD_SHARE = 0.5


def learning_rates(recipe: Recipe, steps_per_epoch: int) -> CosineSchedule:
    """Return the schedule in optimizer steps: linear warm-up to the full rate, then half a cosine to `min_lr`."""
    warmup_steps = recipe.warmup_epochs * steps_per_epoch
    first = recipe.lr / max(warmup_steps, 1)
    return CosineSchedule(recipe.lr, recipe.min_lr, recipe.epochs * steps_per_epoch, warmup_steps, first)


class TrainingOptimizer:
    """An optimizer with learning rate, gradient-norm clipping, Lookahead and zeroing of gradients.

    `step` may be captured as a CUDA graph; `set_lr` and `after_step` are called outside of the capture.
    """

    def __init__(self, module: nn.Module, recipe: Recipe, device: torch.device, keep_gradients: bool):
        self._parameters = [each for each in module.parameters() if each.requires_grad]
        self._clip_grad = recipe.clip_grad
        self._keep_gradients = keep_gradients
        self._optimizer = make_optimizer(module, recipe, device)
        self._update: Callable[[], object] = self._optimizer.step
        if device.type == "cpu" and isinstance(self._optimizer, torch.optim.Adam):
            self._update = DirectAdam(self._optimizer).step
        self._lookahead = Lookahead(self._parameters) if recipe.optimizer == "lookahead-radam" else None
        self._lr = recipe.lr
        rates = [group["lr"] for group in self._optimizer.param_groups]
        # Groups may share one tensor, which is filled once.
        self._lr_on_gpu = list({id(rate): rate for rate in rates if isinstance(rate, Tensor)}.values())

    def step(self) -> None:
        """Clip the gradients, update the weights, zero the gradients."""
        if self._clip_grad > 0:
            nn.utils.clip_grad_norm_(self._parameters, self._clip_grad)
        self._update()
        self.zero_grad()

    def zero_grad(self) -> None:
        """Drop the gradients, or set them to 0 in place where captured graphs accumulate into them."""
        self._optimizer.zero_grad(set_to_none=not self._keep_gradients)

    def set_lr(self, value: float) -> None:
        if value == self._lr:
            return
        self._lr = value
        for rate in self._lr_on_gpu:
            rate.fill_(value)
        for group in self._optimizer.param_groups if not self._lr_on_gpu else ():
            group["lr"] = value

    @torch.no_grad()
    def restart(self) -> None:
        """Forget all steps, in place: captured steps go on with the same tensors."""
        self.zero_grad()
        for state in self._optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    value.zero_()
        if self._lookahead is not None:
            self._lookahead.restart()

    def after_step(self) -> None:
        """Apply Lookahead after an optimizer step, where the recipe uses it."""
        if self._lookahead is not None:
            self._lookahead.count_step()


def make_optimizer(module: nn.Module, recipe: Recipe, device: torch.device) -> torch.optim.Optimizer:
    """Return the recipe's optimizer; AdamW and RAdam apply no weight decay to biases and norms, Adam and SGD do."""
    on_gpu = device.type == "cuda"
    lr: Any = torch.full((), recipe.lr, device=device) if on_gpu else recipe.lr
    common: dict[str, Any] = {"lr": lr, "weight_decay": recipe.weight_decay}
    if recipe.optimizer == "sgd":
        return torch.optim.SGD(module.parameters(), momentum=MOMENTUM, nesterov=True, fused=True, **common)
    common |= {"betas": recipe.betas, "capturable": on_gpu}
    if recipe.optimizer == "adam":
        return torch.optim.Adam(module.parameters(), fused=True, **common)
    groups = parameter_groups(module)
    if recipe.optimizer == "adamw":
        return torch.optim.AdamW(groups, fused=True, **common)
    assert recipe.optimizer == "lookahead-radam"
    return torch.optim.RAdam(groups, decoupled_weight_decay=True, foreach=True, **common)


class DirectAdam:
    """Steps of a fused Adam or AdamW on a CPU that call torch's kernel directly, with bit-identical weights.

    On bags of a few dozen tiles torch's own bookkeeping (hooks, collecting and grouping tensors) takes longer than the
    kernel. The optimizer itself makes the first step, which creates its state, and every step in which another set of
    parameters has gradients.
    """

    def __init__(self, optimizer: torch.optim.Adam):
        self._optimizer = optimizer
        self._decoupled = isinstance(optimizer, torch.optim.AdamW)
        self._groups: list[_AdamGroup] = []
        self._without: list[Tensor] = []

    @torch.no_grad()
    def step(self) -> None:
        """Update the weights."""
        gradients = [[grad for each in group.parameters if (grad := each.grad) is not None] for group in self._groups]
        lost = any(len(own) < len(group.parameters) for group, own in zip(self._groups, gradients, strict=True))
        if not self._groups or lost or any(each.grad is not None for each in self._without):
            self._optimizer.step()
            self._collect()
            return
        kernel = torch._fused_adamw_ if self._decoupled else torch._fused_adam_  # pyright: ignore[reportPrivateImportUsage]
        for group, own in zip(self._groups, gradients, strict=True):
            torch._foreach_add_(group.steps, 1)  # pyright: ignore[reportPrivateImportUsage]
            beta1, beta2 = group.numbers["betas"]
            kernel(
                group.parameters, own, group.means, group.squares, [], group.steps, amsgrad=False, maximize=False,
                lr=group.numbers["lr"], beta1=beta1, beta2=beta2, weight_decay=group.numbers["weight_decay"],
                eps=group.numbers["eps"],
            )  # fmt: skip

    def _collect(self) -> None:
        """Collect the tensors of all parameters that have gradients."""
        every = [each for group in self._optimizer.param_groups for each in group["params"]]
        self._without = [each for each in every if each.grad is None]
        self._groups = []
        for numbers in self._optimizer.param_groups:
            learned = [each for each in numbers["params"] if each.grad is not None]
            states = [self._optimizer.state[each] for each in learned]
            tensors = ([state[key] for state in states] for key in ("exp_avg", "exp_avg_sq", "step"))
            if learned:
                self._groups.append(_AdamGroup(numbers, learned, *tensors))


class _AdamGroup(NamedTuple):
    """Parameters of one group that have gradients, with their state."""

    numbers: dict[str, Any]
    """The optimizer's own dictionary, in which the learning rate changes."""
    parameters: list[Tensor]
    means: list[Tensor]
    squares: list[Tensor]
    steps: list[Tensor]


class Lookahead:
    """Lookahead (Zhang et al., NeurIPS 2019, arXiv:1907.08610): every `every` steps, interpolate to the slow weights.

    slow <- slow + share * (weights - slow); weights <- slow
    """

    def __init__(self, parameters: list[nn.Parameter], every: int = LOOKAHEAD_STEPS, share: float = LOOKAHEAD_SHARE):
        self._weights: list[Tensor] = list(parameters)
        self._slow: list[Tensor] = [each.detach().clone() for each in parameters]
        self._every = every
        self._share = share
        self._steps = 0

    @torch.no_grad()
    def restart(self) -> None:
        """Begin anew from the present weights."""
        self._steps = 0
        torch._foreach_copy_(self._slow, self._weights)  # pyright: ignore[reportPrivateImportUsage]

    @torch.no_grad()
    def count_step(self) -> None:
        """Count a step; update slow and fast weights every `every` steps."""
        self._steps += 1
        if self._steps % self._every:
            return
        torch._foreach_lerp_(self._slow, self._weights, self._share)  # pyright: ignore[reportPrivateImportUsage]
        torch._foreach_copy_(self._weights, self._slow)  # pyright: ignore[reportPrivateImportUsage]
