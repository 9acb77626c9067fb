"""Settings chosen by nested cross-validation: the space, what was tried, and the choice of every split.

The settings of a method are chosen for each split by cross-validation on its training and validation slides, by
patient: every point of the space is trained on each inner fold, with an epoch chosen on validation slides inside it,
and scored on the slides that the fold leaves out. The highest mean score wins; of equal ones the first, and the first
is the recipe as it is. Test slides take no part, so the estimate on them stays honest (Varma and Simon 2006, BMC
Bioinformatics 7:91; Cawley and Talbot 2010, JMLR 11:2079). `inner_folds` does the trainings.

A split's choice lies beside its models, in `tuning.json`, with the hash of all that it depends on.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from selfvitmil.aggregate.base import nearest, settings_of
from selfvitmil.aggregate.recipes import NUMBERS, RecipeNote, note_of, recipe_of
from selfvitmil.errors import ArtefactError, ConfigError
from selfvitmil.evaluate.dataset import Trial, TrialSplit
from selfvitmil.settings import TrainSettings
from selfvitmil.store.files import hash_of, read_json, to_plain, write_text
from selfvitmil.store.layout import tuning_file

VERSION = 1
"""Of how a choice is made; a higher one makes stored choices stale."""
LR_FACTORS = (1.0, 0.3, 3.0)
NO_DECAY, STRONG_DECAY = 1e-3, 1.0
"""Weight decays of decoupled optimizers: the strong one removes most of the noise of initial weights."""

Point = Mapping[str, Any]
"""Settings that differ from the recipe, by name; empty for the recipe as it is."""


def tuning_points(name: str, train: TrainSettings) -> tuple[Point, ...]:
    """Return all points of the space of a method, the recipe as it is first, where it is among them.

    Raises ConfigError for a setting or value that the method does not have.
    """
    space = _own_space(name, train) or _default_space(name, train)
    points = [dict(zip(space, values, strict=True)) for values in itertools.product(*space.values())]
    own = _numbers(name, train)
    recipes = [_numbers(name, with_point(name, train, point)) for point in points]
    different = [place for place, recipe in enumerate(recipes) if recipe not in recipes[:place]]
    return tuple(points[place] for place in sorted(different, key=lambda place: recipes[place] != own))


def with_point(name: str, train: TrainSettings, point: Point) -> TrainSettings:
    """Return the settings of a training at one point of the space."""
    own = train.options.get(name, {})
    options = {**train.options, name: {**(own if isinstance(own, dict) else {}), **point}}
    return train.model_copy(update={"options": options, "tune": False})


def _numbers(name: str, train: TrainSettings) -> dict[str, Any]:
    recipe = recipe_of(name, train).to_json()
    return {key: value for key, value in recipe.items() if key not in ("source", "departs")}


def _own_space(name: str, train: TrainSettings) -> dict[str, Sequence[Any]]:
    """Return the space that the settings ask for; a table of the method itself replaces what holds for all."""
    shared = {key: values for key, values in train.tune_space.items() if not isinstance(values, dict)}
    own = train.tune_space.get(name)
    space = own if isinstance(own, dict) else shared
    known = (*settings_of(name), *NUMBERS)
    for key, values in space.items():
        if key not in known:
            raise ConfigError(
                f"train.tune_space: {name} has no setting {key!r}{nearest(key, list(known))}",
                "every setting of the space is one of the method or of its training",
                f"{name} has {', '.join(known)}. Write settings of single methods under [train.tune_space.METHOD]",
                code="unknown-tuned-setting",
            )
        if not values:
            raise ConfigError(
                f"train.tune_space.{key} is empty", "there is nothing to choose among", "Give values, or leave it out",
                code="empty-tuning-space",
            )  # fmt: skip
    return dict(space)


def _default_space(name: str, train: TrainSettings) -> dict[str, Sequence[Any]]:
    """Return three learning rates around the recipe's own with two weight decays: its own, and a weak or strong one."""
    recipe = recipe_of(name, train)
    own = recipe.weight_decay
    if recipe.optimizer in ("adamw", "lookahead-radam"):
        other = STRONG_DECAY if own < math.sqrt(NO_DECAY * STRONG_DECAY) else NO_DECAY
    else:  # weight decay is part of the gradient: 1 would leave nothing to learn
        other = 0.0 if own else 1e-4
    return {"lr_factor": LR_FACTORS, "weight_decay": (own, other)}


# ---------------------------------------------------------------------------------------------------- the choice


@dataclass(frozen=True)
class Tried:
    """One point of the space."""

    settings: Point
    scores: tuple[float | None, ...]
    """Metric on the slides that each inner fold leaves out; None where it is undefined or training diverged."""
    mean: float | None
    """None where training diverged."""


@dataclass(frozen=True)
class Tuning:
    """The settings chosen for one split, with all that were tried."""

    split: str
    metric: str
    higher_is_better: bool
    slides: int
    """Training and validation slides."""
    folds: int
    tried: tuple[Tried, ...]
    chosen: int
    made_from: str
    """Hash of all that the choice depends on."""

    @property
    def best(self) -> Tried:
        return self.tried[self.chosen]

    @property
    def words(self) -> str:
        """The choice in one line."""
        first = self.tried[0]
        own = f", the recipe's own {_number(first.mean)}" if self.chosen and not _is_changed(first.settings) else ""
        return f"{point_words(self.best.settings)} ({self.metric} {_number(self.best.mean)}{own})"

    def apply(self, name: str, train: TrainSettings) -> TrainSettings:
        """Return the settings to train the split's models with."""
        return with_point(name, train, self.best.settings)

    def to_json(self) -> dict[str, Any]:
        return to_plain(asdict(self))


def choose_point(tried: Sequence[Sequence[float | None]], *, higher_is_better: bool) -> tuple[int, list[float | None]]:
    """Return the place of the best point and the mean of each over the folds in which any of them has a score.

    The first of equal ones is chosen. A point that lacks such a score has no mean; ConfigError where none has one.
    """
    usable = [fold for fold in range(len(tried[0])) if any(scores[fold] is not None for scores in tried)]
    means: list[float | None] = []
    for scores in tried:
        found = [value for fold in usable if (value := scores[fold]) is not None]
        means.append(math.fsum(found) / len(found) if found and len(found) == len(usable) else None)
    sign = 1.0 if higher_is_better else -1.0
    ranked = [-math.inf if mean is None else sign * mean for mean in means]
    if max(ranked) == -math.inf:
        raise ConfigError(
            "train.tune: no point of the space has a score",
            "every training diverged, or the metric is undefined on the slides of the inner folds",
            "Use other values in [train.tune_space], fewer train.tune_folds, or leave train.tune out",
            code="nothing-to-tune-by",
        )
    return ranked.index(max(ranked)), means


def point_words(point: Point) -> str:
    """Return a point in words: `learning rate x 3, weight decay 1`."""
    changed = {key: value for key, value in point.items() if (key, value) != ("lr_factor", 1.0)}
    parts = [
        f"learning rate x {value:g}" if key == "lr_factor" else f"{key.replace('_', ' ')} {_shown(value)}"
        for key, value in changed.items()
    ]
    return ", ".join(parts) or "the recipe as it is"


def space_words(points: Sequence[Point]) -> str:
    """Return the values of each setting in words: `lr_factor 1, 0.3, 3; weight_decay 0.001, 1`."""
    values = {key: dict.fromkeys(point[key] for point in points if key in point) for point in points for key in point}
    return "; ".join(f"{key} {', '.join(map(_shown, own))}" for key, own in values.items())


def tuned_note(name: str, train: TrainSettings, dim: int, tuned: Mapping[str, Tuning]) -> RecipeNote:
    """Return how a row was tuned, over what space and with what scores."""
    first = next(iter(tuned.values()))
    lines = [
        f"chosen by {first.folds}-fold cross-validation on training and validation slides among {len(first.tried)} "
        f"points ({space_words([each.settings for each in first.tried])})",
        *(f"{split}: {own.words}" for split, own in tuned.items()),
    ]
    return replace(note_of(name, train, dim), kind="tuned", differences=tuple(lines))


def _is_changed(point: Point) -> bool:
    return point_words(point) != "the recipe as it is"


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


# ---------------------------------------------------------------------------------------------------- files


def tuning_digest(name: str, trial: Trial, train: TrainSettings, split: TrialSplit) -> str:
    """Return the hash of all that the choice for a split depends on."""
    recipes = [_numbers(name, with_point(name, train, point)) for point in tuning_points(name, train)]
    slides = [(case.slide, case.patient, case.label, case.identity) for case in (*split.train, *split.val)]
    predicted = trial.class_names if trial.outcome is None else trial.outcome.to_json()
    return hash_of(VERSION, name, recipes, train.tune_folds, train.validation, train.seed, predicted, slides)


def write_tuning(folder: Path, tuning: Tuning) -> None:
    """Write the choice of a split beside its models (`folder` is that of the method)."""
    write_text(tuning_file(folder, tuning.split), json.dumps(tuning.to_json(), indent=1, ensure_ascii=False) + "\n")


def stored_tuning(
    name: str, trial: Trial, train: TrainSettings, folder: Path | None, split: TrialSplit
) -> Tuning | None:
    """Return the stored choice of a split; None where there is none, or where it was made from something else."""
    file = None if folder is None else tuning_file(folder, split.name)
    if file is None or not file.exists():
        return None
    try:
        info = read_json(file)
        tried = tuple(Tried(each["settings"], tuple(each["scores"]), each["mean"]) for each in info["tried"])
        tuning = Tuning(**{**info, "tried": tried})
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return tuning if tuning.made_from == tuning_digest(name, trial, train, split) else None


def settings_of_splits(
    name: str,
    trial: Trial,
    train: TrainSettings,
    folder: Path | None,
    splits: Sequence[TrialSplit],
    tuned: Mapping[str, Tuning] | None,
) -> Iterator[tuple[TrialSplit, TrainSettings, Tuning | None]]:
    """Yield every split with the settings of its models: tuned, stored or as given. ArtefactError without a choice."""
    for split in splits:
        if not train.tune:
            yield split, train, None
            continue
        found = (tuned or {}).get(split.name) or stored_tuning(name, trial, train, folder, split)
        if found is None:
            raise ArtefactError(
                f"{name}: no up-to-date choice of settings for {split.name}",
                "train.tune is set, and this command uses trained models and does not train",
                f"Run `selfvitmil train` with the same flags first (--train.aggregator {name} --tune)",
                code="no-tuning",
            )
        yield split, found.apply(name, train), found
