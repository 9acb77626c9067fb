"""Which methods are compared and with which options: one set of rules for the stages that learn and for the door.

`learning` asks what it is to train, `door` whether that will be refused, which must not happen after days of work.
"""

from __future__ import annotations

from collections.abc import Sequence

from selfvitmil.cohort import Cohort
from selfvitmil.errors import ConfigError
from selfvitmil.settings import LocalizeSettings, StudySettings, TileSettings, TrainSettings

TWO_SCALES = "dsmil-lc"
"""The method that is made for the vectors of two scales, one behind the other."""


def compared_methods(settings: StudySettings, *, two_scales: bool) -> tuple[str, ...]:
    """The aggregators of a comparison, `two_scales` where there are vectors of two.

    ConfigError where one is not known, the baseline is none of them, or an option belongs to none.
    """
    from selfvitmil.aggregate import NAMES
    from selfvitmil.aggregate.contract import nearest

    compare = settings.compare
    for method in compare.methods:
        if method not in NAMES:
            what = f"compare.methods: unknown method {method!r}{nearest(method, list(NAMES))}"
            raise ConfigError(what, how=f"There are {', '.join(NAMES)}")
    methods = compare.methods or tuple(method for method in NAMES if method != TWO_SCALES or two_scales)
    _check_options(settings.train, methods)
    if compare.baseline not in methods:
        meant = nearest(compare.baseline, list(methods))
        what = f"compare.baseline {compare.baseline!r} is not among the methods{meant}"
        raise ConfigError(what, how=f"There are {', '.join(methods)}")
    return methods


def options_for(method: str, train: TrainSettings) -> TrainSettings:
    """Settings to train one of many methods: an option goes to those that have it."""
    from selfvitmil.aggregate import settings_of

    known = settings_of(method)
    options = {key: value for key, value in train.options.items() if key in known or isinstance(value, dict)}
    return train.model_copy(update={"aggregator": method, "options": options})


def _check_options(train: TrainSettings, methods: Sequence[str]) -> None:
    """ConfigError for an option that no method of the comparison has."""
    from selfvitmil.aggregate import settings_of

    known = sorted({name for method in methods for name in settings_of(method)})
    for key, value in train.options.items():
        if isinstance(value, dict):  # of one method, whose recipe checks them
            continue
        if key not in known:
            raise ConfigError(f"train.options: no method has {key!r}", how=f"There are {', '.join(known)}")


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


def try_method(method: str, train: TrainSettings, num_classes: int, localize: LocalizeSettings | None = None) -> None:
    """Build a method as its training will, and let it map two tiles with `localize`: it refuses now what it would then.

    ConfigError for an option or value that it does not know, and for a map that it cannot give.
    """
    import numpy as np

    from selfvitmil.aggregate import build
    from selfvitmil.aggregate.recipes import recipe_of
    from selfvitmil.aggregate.train import BagStore
    from selfvitmil.bags import Bag
    from selfvitmil.localize.scores import combine, score_by_seeds
    from selfvitmil.localize.source import choose_kind

    recipe = recipe_of(method, train)
    try:
        module = build(method, 1, num_classes, **recipe.options, standardize=recipe.standardize)
    except ConfigError as error:
        raise ConfigError(f"train.options of {method}: {error.what}", error.why, error.how) from None
    if localize is None:
        return
    bag = Bag("made", np.zeros((2, 1), np.float32), np.array([[0, 0], [1, 0]]), tile_extent=1.0)
    columns = combine(score_by_seeds([module], bag, localize.score, BagStore("cpu")), 0)
    choose_kind(localize.score, columns, method)
