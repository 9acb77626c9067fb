"""Which methods are compared and with which options: one set of rules for the stages that learn and for the door.

`learning` asks what it is to train, `door` whether that will be refused, which must not happen after days of work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from selfvitmil.cohort import Cohort
from selfvitmil.errors import ConfigError
from selfvitmil.settings import LocalizeSettings, StudySettings, TileSettings, TrainSettings

TWO_SCALES = "dsmil-lc"
"""The method that is made for the vectors of two scales, one behind the other."""


BOTH_RECIPES = ("self-vit-mil", "dsmil")
"""Methods that a comparison shows with our recipe and with the published one, unless told otherwise."""


@dataclass(frozen=True)
class Compared:
    """A method of a comparison with the settings that its row is trained by."""

    method: str
    title: str
    """Of its row: the method's name, with `(published)` where that recipe stands beside the study's own."""
    train: TrainSettings

    @property
    def is_main_recipe(self) -> bool:
        """Whether it follows the recipe of the study, and so has the heatmaps of `localize`."""
        return self.title == self.method


def compared_methods(settings: StudySettings, *, two_scales: bool) -> tuple[Compared, ...]:
    """The aggregators of a comparison, `two_scales` where there are features of two.

    `compare.methods` names them, `METHOD:published` with that recipe. A published row is trained as its source says,
    whatever else `train` sets. ConfigError where one is not known, the baseline is none of them, or an option belongs
    to none.
    """
    from selfvitmil.aggregate import NAMES
    from selfvitmil.aggregate.base import nearest

    compare, train = settings.compare, settings.train
    asked = compare.methods or tuple(method for method in NAMES if method != TWO_SCALES or two_scales)
    if not compare.methods and train.recipe == "default":
        asked = (*asked, *(f"{method}:published" for method in BOTH_RECIPES))
    rows: dict[str, Compared] = {}
    for text in asked:
        method, _, recipe = text.partition(":")
        if method not in NAMES:
            what = f"compare.methods: unknown method {method!r}{nearest(method, list(NAMES))}"
            raise ConfigError(what, how=f"There are {', '.join(NAMES)}")
        if recipe not in ("", "published"):
            raise ConfigError(f"compare.methods: {text!r}", how=f"Write {method} or {method}:published")
        row = _compared(method, recipe, train)
        rows[row.title] = row
    _check_options(train, [row.method for row in rows.values()])
    if compare.baseline not in rows:
        meant = nearest(compare.baseline, list(rows))
        what = f"compare.baseline {compare.baseline!r} is not among the methods{meant}"
        raise ConfigError(what, how=f"There are {', '.join(rows)}")
    return tuple(rows.values())


def _compared(method: str, recipe: str, train: TrainSettings) -> Compared:
    if not recipe or train.recipe != "default":
        return Compared(method, method, options_for(method, train))
    shared = train.model_dump(include={"split", "split_folder", "folds", "validation", "seeds", "seed", "positive"})
    device = train.model_dump(include={"device", "cache_gb"})
    exact = TrainSettings.model_validate({**shared, **device, "aggregator": method, "recipe": "published"})
    return Compared(method, f"{method} (published)", exact)


def options_for(method: str, train: TrainSettings) -> TrainSettings:
    """Settings to train one of many methods: options without a method's name are those of `train.aggregator`."""
    own = {key: value for key, value in train.options.items() if isinstance(value, dict) or method == train.aggregator}
    return train.model_copy(update={"aggregator": method, "options": own})


def _check_options(train: TrainSettings, methods: Sequence[str]) -> None:
    """ConfigError for an option that its method does not have, or whose method is not compared."""
    from selfvitmil.aggregate import settings_of

    plain = [key for key, value in train.options.items() if not isinstance(value, dict)]
    if plain and train.aggregator not in methods:
        raise ConfigError(
            f"train.options: {', '.join(plain)} for {train.aggregator}, which is not compared",
            "options without a method's name are those of train.aggregator",
            "Write them under [train.options.METHOD]",
        )
    known = settings_of(train.aggregator)
    for key in plain:
        if key not in known:
            how = (
                f"{train.aggregator} has {', '.join(known)}. Options of another method go under [train.options.METHOD]"
            )
            raise ConfigError(f"train.options: {train.aggregator} has no option {key!r}", how=how)


def coarse_mpp(tile: TileSettings) -> float:
    """Microns per pixel of the coarser of two scales; ConfigError where there is one scale only."""
    if not tile.parent_mpp:
        why = "tile.parent_mpp names no coarser scale"
        raise ConfigError("vectors of two scales were asked for", why, "Tile and embed with tile.parent_mpp, e.g. 2.0")
    return tile.parent_mpp[0]


def check_supervised(class_names: Sequence[str], cohort: Cohort) -> None:
    """ConfigError where no row of a comparison can learn from outlined lesions."""
    if len(class_names) != 2:
        raise ConfigError(
            f"compare.supervised with {len(class_names)} classes", "outlines tell tumour from normal tissue only"
        )
    if not any(row.annotation is not None for row in cohort.rows if row.label == class_names[1]):
        raise ConfigError(
            f"compare.supervised, and no slide of {class_names[1]} has an annotation",
            "it learns from outlined lesions",
            "Name outlines (ASAP XML or QuPath GeoJSON) in the column annotation of cohort.csv, or leave it out",
        )


def heatmap_settings(
    method: str, train: TrainSettings, num_classes: int, localize: LocalizeSettings, main: str
) -> LocalizeSettings:
    """How the heatmaps of a compared method are made: as asked, else by `auto` where it has no such score of tiles.

    The study's own method `main` is taken at its word. ConfigError for what the method would refuse besides.
    """
    try:
        try_method(method, train, num_classes, localize)
    except ConfigError:
        if method == main or localize.score == "auto":
            raise
        localize = localize.model_copy(update={"score": "auto"})
        try_method(method, train, num_classes, localize)
    return localize


def lesion_baseline(settings: StudySettings) -> str:
    """The row that heatmaps are compared with: that of the baseline's method, since published rows have none."""
    return settings.compare.baseline.removesuffix(" (published)")


def try_method(method: str, train: TrainSettings, num_classes: int, localize: LocalizeSettings | None = None) -> None:
    """Build a method as its training will, and let it map two tiles with `localize`: it refuses now what it would then.

    ConfigError for an option or value that it does not know, and for a map that it cannot give.
    """
    import numpy as np

    from selfvitmil.aggregate import build
    from selfvitmil.aggregate.recipes import recipe_of
    from selfvitmil.aggregate.train import BagStore
    from selfvitmil.bags import Bag
    from selfvitmil.localize.scores import choose_kind, combine, score_by_seeds

    recipe = recipe_of(method, train)
    try:
        module = build(method, 1, num_classes, **recipe.module_options)
    except ConfigError as error:
        raise ConfigError(f"train.options of {method}: {error.what}", error.why, error.how) from None
    if localize is None:
        return
    bag = Bag("made", np.zeros((2, 1), np.float32), np.array([[0, 0], [1, 0]]), tile_extent=1.0)
    columns = combine(score_by_seeds([module], bag, localize.score, BagStore("cpu")), 0)
    choose_kind(localize.score, columns, method)
