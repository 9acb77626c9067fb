"""What a run must not begin with: each check raises, before anything is touched, an error that says so.

The rules: files of a newer version are left alone; an encoder, which took hours, is neither overwritten nor used in
place of another one; a slide that an encoder has seen is not tested on unnoticed; labels that cannot be learned from,
and methods, options or maps that cannot be had, are found before the slides are worked on, by the very functions that
would refuse them later.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selfvitmil.cohort import Cohort
from selfvitmil.cohort.folder import is_slide
from selfvitmil.cohort.table import listing
from selfvitmil.errors import ArtefactError, ConfigError, EncoderError, SelfVitMilError, raise_problems
from selfvitmil.pipeline.methods import (
    TWO_SCALES,
    check_supervised,
    coarse_mpp,
    compared_methods,
    heatmap_settings,
    lesion_baseline,
    try_method,
)
from selfvitmil.pipeline.pretraining import split_encoders
from selfvitmil.pipeline.study import CohortSource
from selfvitmil.settings import METHOD_DEFAULTS, PretrainSettings, StudySettings, read_toml
from selfvitmil.store.layout import CONFIG_FILE, StudyLayout

if TYPE_CHECKING:
    from selfvitmil.encoder import EncoderConfig
    from selfvitmil.evaluate import Trial


def check_study(study: Path, source: CohortSource) -> None:
    """ConfigError where the folder is not one to work in."""
    if study.exists() and not study.is_dir():
        raise ConfigError(f"{study.name}: this is a file", "a study is a folder", "Name a folder, new or old")
    if source.cohort is not None or StudyLayout(study).cohort.exists():
        return
    inside = sorted(path.name for path in study.iterdir() if not path.name.startswith(".")) if study.exists() else []
    what = "is empty" if study.exists() else "does not exist yet"
    if inside:
        what = f"holds {listing(inside, 4)} and no cohort.csv"
    how = "Give --cohort with a folder of slides or a table of them; `selfvitmil demo` makes slides to try with"
    if any(map(is_slide, inside)):
        how = f"A study is a folder of its own: name a new one, and give this one with --cohort {study.name}"
    raise ConfigError(
        f"{study.name}: this folder {what}", "so there are no slides to work on, and nothing was done", how
    )


def check_formats(study: Path) -> None:
    """ArtefactError when a newer version of this program has worked on the study: ours would undo its work."""
    from selfvitmil import bags, tiles
    from selfvitmil.encoder import files as encoders
    from selfvitmil.localize import maps

    layout = StudyLayout(study)
    known = (
        (layout.tiles_folder, "*/*.h5", tiles.FORMAT_VERSION),
        (layout.bags_folder, "*/features_*/*.h5", bags.FORMAT_VERSION),
        (layout.heatmaps_folder, "*/*.h5", maps.FORMAT_VERSION),
        (layout.encoders_folder, f"*/{CONFIG_FILE}", encoders.FORMAT_VERSION),
    )
    for folder, pattern, ours in known:
        for path in sorted(folder.glob(pattern)):
            version = _format_of(path)
            if version is not None and version > ours:
                raise ArtefactError(
                    f"{layout.name(path)} has format version {version}",
                    f"a newer selfvitmil wrote it, and this one, which knows version {ours}, would undo its work",
                    "Update selfvitmil, or start a new study; nothing was done",
                )


def _format_of(path: Path) -> int | None:
    """The format version of a file of ours; None of any other, and of a damaged one, which its stage will tell of."""
    from selfvitmil.untrusted import open_hdf5

    try:
        if path.suffix == ".json":
            return json.loads(path.read_text(encoding="utf-8")).get("selfvitmil", {}).get("format_version")
        with open_hdf5(path) as file:
            version: Any = file.attrs.get("format_version")
            return None if version is None else int(version)
    except (OSError, ValueError):
        return None


def check_labels(cohort: Cohort, settings: StudySettings) -> Trial:
    """The splits that learning will use, tried out: days of work on slides must not end at labels that do not do."""
    from selfvitmil.cohort.positive_class import order_classes
    from selfvitmil.evaluate import Cases, make_splits, seal
    from selfvitmil.evaluate.cases import Case, check_two_classes

    labelled = cohort.select(labelled=True)
    try:
        if not labelled.rows:
            how = "Give --labels with a table of slides and their labels"
            raise ConfigError("the cohort has no labelled slide", "there is nothing to learn from", how)
        check_two_classes(set(cohort.classes), "the cohort")
        classes = order_classes(cohort.classes, settings.train.positive).names
        found = [Case(row.slide, row.patient, row.path, "", classes.index(row.label or "")) for row in labelled.rows]
        cases = Cases(tuple(found), classes, cohort, 0, "", "")
        return seal(cases, make_splits(cases, settings.train, settings.evaluate), settings.evaluate)
    except SelfVitMilError as error:
        how = f"{error.how}. To go as far as that needs no labels, add --until embed".removeprefix(". ")
        raise_problems([_nothing_done(error, how), *cohort.missing_problems], "the cohort")
        raise


def check_files(study: Path, cohort: Cohort) -> None:
    """CohortError where not one slide is there, which is a wrong path; single ones fail later, alone."""
    there = any(row.path.exists() for row in cohort.rows)
    if not there and not any(StudyLayout(study).tiles_folder.glob("*/*.h5")):
        raise_problems([_nothing_done(each, each.how) for each in cohort.missing_problems], "the cohort")


def check_learning(cohort: Cohort, settings: StudySettings, trial: Trial, stages: Collection[str]) -> None:
    """ConfigError for what a stage that learns or maps would refuse, once all stages before it are done."""
    from selfvitmil.localize.scores import shown_class
    from selfvitmil.pipeline.localizing import choose_slides

    train, localize = settings.train, settings.localize
    mapped: list[str] = []
    outlined = "lesions" in stages and bool(outlined_slides(cohort))
    try:
        if "compare" in stages:
            for row in compared_methods(settings, two_scales=bool(settings.tile.parent_mpp)):
                if outlined and row.method != TWO_SCALES and row.is_main_recipe:
                    heatmap_settings(row.method, row.train, trial.num_classes, localize, train.aggregator)
                    mapped.append(row.method)
                else:
                    try_method(row.method, row.train, trial.num_classes)
            if outlined and lesion_baseline(settings) not in mapped:
                what = f"compare.baseline {settings.compare.baseline!r} has no heatmaps"
                why = "heatmaps are compared by the annotated lesions"
                raise ConfigError(what, why, "Name another baseline, or add --until localize")
            if settings.compare.supervised != "none":
                check_supervised(trial.class_names, cohort)
        if {"evaluate", "localize", "lesions"} & set(stages):
            try_method(train.aggregator, train, trial.num_classes, localize if "localize" in stages else None)
        if "localize" in stages:
            shown_class(trial.class_names, 0, localize.of_class)
            choose_slides(trial, localize.parts, (), cohort)
    except SelfVitMilError as error:
        raise _nothing_done(error, error.how) from None


def outlined_slides(cohort: Cohort) -> list[str]:
    """Slides by whose outlined lesions maps are judged."""
    return [row.slide for row in cohort.rows if row.annotation is not None and row.split in ("test", None)]


def _nothing_done(error: SelfVitMilError, how: str) -> SelfVitMilError:
    return type(error)(error.what, error.why, f"{how}. Nothing was done" if how else "Nothing was done")


def check_scales(config: EncoderConfig | None, settings: StudySettings, stages: Collection[str]) -> None:
    """An error where an encoder, or the one that will be trained (None), is not for the tiles that it shall see."""
    from selfvitmil.encoder import check_fits

    tile, stain = settings.tile, settings.stain.method
    rows = compared_methods(settings, two_scales=bool(tile.parent_mpp)) if "compare" in stages else ()
    methods = [row.method for row in rows]
    methods += (settings.train.aggregator,) if "evaluate" in stages else ()
    try:
        if config is not None:
            check_fits(config, tile.mpp, tile.size_px, stain)
        if TWO_SCALES in methods:
            _check_coarse(config, coarse_mpp(tile), settings)
    except SelfVitMilError as error:
        raise _nothing_done(error, error.how) from None


def check_untrained(study: Path, encoder: str, settings: StudySettings, stages: Collection[str]) -> None:
    """ConfigError where the row of an untrained encoder is asked for and there is none in the study to make it like."""
    there = StudyLayout(study).encoder_config(encoder).exists() or bool(split_encoders(study, encoder))
    if "compare" in stages and settings.compare.random_encoder and not there:
        raise ConfigError(
            f"compare.random_encoder, and {encoder} is not among the study's encoders",
            "an untrained one is made like an encoder of the study",
            f"Copy its folder to encoders/{encoder} of the study, or leave the row out. Nothing was done",
        )


def _check_coarse(config: EncoderConfig | None, mpp: float, settings: StudySettings) -> None:
    from selfvitmil.encoder import check_fits

    try:
        if config is None:
            raise EncoderError(f"the encoder that is trained here is for tiles at {settings.tile.mpp:g} um/px alone")
        check_fits(config, mpp, settings.tile.size_px, settings.stain.method)
    except EncoderError as error:
        raise ConfigError(
            f"{TWO_SCALES} needs vectors of tiles at {mpp:g} um/px too",
            error.what,
            f"Name compare.methods without {TWO_SCALES}, or give --encoder with one that fits any scale",
        ) from None


def check_encoder(folder: Path, seen: Collection[str], settings: StudySettings) -> None:
    """ConfigError where a finished encoder of the study is not the one that the settings ask for.

    `seen` are the test slides that it, or of whose patients it, has seen.
    """
    name = folder.name
    if changed := changed_settings(folder, settings):
        raise ConfigError(
            f"encoders/{name} was made with other settings ({listing(changed, 4)})",
            "hours of training are not thrown away, so nothing was done",
            f"Give --name with a new name to train another one, --encoder {name} to go on with it as it is, or remove "
            "its folder",
        )
    if seen and not settings.pretrain.transductive:
        raise ConfigError(
            f"encoders/{name} was trained on slides of patients that are tested on now ({listing(seen, 4)})",
            "metrics on them could be too good, so nothing was done",
            "Give --name with a new name to train another encoder, or one for every split; or --encoder with this name "
            "to use it all the same: then all results are labelled transductive",
        )


def _method_defaults(pretrain: Mapping[str, Any]) -> dict[str, Any]:
    """As JSON has them."""
    return json.loads(json.dumps(METHOD_DEFAULTS[pretrain.get("method", PretrainSettings().method)]))


def changed_settings(folder: Path, settings: StudySettings) -> list[str]:
    """Settings of a finished encoder that are others now, as `pretrain.epochs 100 -> 50`."""
    from selfvitmil.pretrain.train import NOT_IN_HASH

    if not (folder / "settings.toml").exists():
        return []
    before, now = read_toml(folder / "settings.toml"), json.loads(settings.model_dump_json(exclude_none=True))
    defaults = json.loads(PretrainSettings().model_dump_json(exclude_none=True))
    for told in (before.setdefault("pretrain", {}), now["pretrain"]):  # older versions wrote defaults of the method
        told |= {key: value for key, value in _method_defaults(told).items() if key not in told}
    changed: list[str] = []
    for section, keys in (
        ("pretrain", set(PretrainSettings.model_fields) - NOT_IN_HASH | {"init"}),
        ("tile", {"mpp", "size_px"}),
        ("stain", {"method"}),
    ):
        old, new = before.get(section, {}), now[section]
        if section == "pretrain":  # a setting that an older version did not have was at its default
            old = {key: value for key, value in defaults.items() if key not in old and key in new} | old
        changed += [
            f"{section}.{key} {old.get(key)} -> {new.get(key)}" for key in sorted(keys) if old.get(key) != new.get(key)
        ]
    return changed
