"""What a run must not begin with: each check raises, before anything is touched, an error that says so.

The rules: files of a newer version are left alone; an encoder, which took hours, is neither overwritten nor used in
place of another one; a slide that an encoder has seen is not tested on unnoticed; labels that cannot be learned from
are found before the slides are worked on.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from selfvitmil.cohort import Cohort
from selfvitmil.cohort.table import listing
from selfvitmil.errors import ArtefactError, ConfigError, SelfVitMilError
from selfvitmil.pipeline.encoders import SLIDES_FILE
from selfvitmil.pipeline.study import CohortSource
from selfvitmil.settings import PretrainSettings, StudySettings, read_toml


def check_study(study: Path, source: CohortSource) -> None:
    """ConfigError where the folder is not one to work in."""
    if study.exists() and not study.is_dir():
        raise ConfigError(f"{study.name}: this is a file", "a study is a folder", "Name a folder, new or old")
    if source.cohort is not None or (study / "cohort.csv").exists():
        return
    inside = sorted(path.name for path in study.iterdir() if not path.name.startswith(".")) if study.exists() else []
    what = "is empty" if study.exists() else "does not exist yet"
    if inside:
        what = f"holds {listing(inside, 4)} and no cohort.csv"
    raise ConfigError(
        f"{study.name}: this folder {what}",
        "so there are no slides to work on, and nothing was done",
        "Give --cohort with a folder of slides or a table of them; `selfvitmil demo` makes slides to try with",
    )


def check_formats(study: Path) -> None:
    """ArtefactError when a newer version of this program has worked on the study: ours would undo its work."""
    from selfvitmil import bags, tiles
    from selfvitmil.encoder import files as encoders
    from selfvitmil.localize import maps

    known = (
        ("tiles/*/*.h5", tiles.FORMAT_VERSION),
        ("bags/*/features_*/*.h5", bags.FORMAT_VERSION),
        ("maps/*/*.h5", maps.FORMAT_VERSION),
        ("encoders/*/config.json", encoders.FORMAT_VERSION),
    )
    for pattern, ours in known:
        for path in sorted(study.glob(pattern)):
            version = _format_of(path)
            if version is not None and version > ours:
                raise ArtefactError(
                    f"{path.relative_to(study).as_posix()} has format version {version}",
                    f"a newer selfvitmil wrote it, and this one, which knows version {ours}, would undo its work",
                    "Update selfvitmil, or start a new study; nothing was done",
                )


def _format_of(path: Path) -> int | None:
    """The format version of a file of ours; None of any other, and of a damaged one, which its stage will tell of."""
    import h5py

    try:
        if path.suffix == ".json":
            return json.loads(path.read_text(encoding="utf-8")).get("selfvitmil", {}).get("format_version")
        with h5py.File(path, "r") as file:
            version: Any = file.attrs.get("format_version")
            return None if version is None else int(version)
    except (OSError, ValueError):
        return None


def check_labels(cohort: Cohort, settings: StudySettings) -> None:
    """Try the split that learning will use: days of work on slides must not end at labels that do not do."""
    from selfvitmil.evaluate import Cases, make_splits
    from selfvitmil.evaluate.cases import Case

    labelled = cohort.select(labelled=True)
    classes = cohort.classes
    cases = tuple(Case(row.slide, row.patient, row.path, "", classes.index(row.label or "")) for row in labelled.rows)
    try:
        if len(classes) < 2:
            what = f"one class only ({classes[0]})" if classes else "no labelled slide"
            raise ConfigError(
                f"the cohort has {what}", "a classifier needs slides of two classes at least", "Give --labels"
            )
        make_splits(Cases(cases, classes, cohort, 0, "", ""), settings.train, settings.evaluate)
    except SelfVitMilError as error:
        why = f"{error.why}; nothing was done" if error.why else "nothing was done"
        how = f"{error.how}. To go as far as that needs no labels, add --until embed"
        raise type(error)(error.what, why, how) from None


def check_training_split(cohort: Cohort, settings: StudySettings) -> None:
    """ConfigError where self-supervision would find no slide that it may see."""
    if not settings.pretrain.transductive and not cohort.select(split="train").rows:
        raise ConfigError(
            "no slide of the cohort is in the split `train`",
            "self-supervision must not see slides that a classifier is tested on later",
            "Fill the column split of the table, add --pretrain.transductive to use all slides, or give --encoder with "
            "one that is trained already",
        )


def check_encoder(folder: Path, cohort: Cohort, settings: StudySettings) -> None:
    """ConfigError where a finished encoder of the study is not the one that the settings ask for."""
    name = folder.name
    if changed := changed_settings(folder, settings):
        raise ConfigError(
            f"encoders/{name} was made with other settings ({listing(changed, 4)})",
            "hours of training are not thrown away, so nothing was done",
            f"Give --name with a new name to train another one, --encoder {name} to go on with it as it is, or remove "
            "its folder",
        )
    if (seen := seen_test_slides(folder, cohort)) and not settings.pretrain.transductive:
        raise ConfigError(
            f"encoders/{name} was trained on {len(seen)} slides that are in the test split now ({listing(seen, 4)})",
            "what is measured on them would flatter, so nothing was done",
            f"Give --name with a new name to train another encoder, or --encoder {name} to use it all the same",
        )


def changed_settings(folder: Path, settings: StudySettings) -> list[str]:
    """Settings of a finished encoder that are others now, as `pretrain.epochs 100 -> 50`."""
    from selfvitmil.pretrain.train import NOT_IN_HASH

    if not (folder / "settings.toml").exists():
        return []
    before, now = read_toml(folder / "settings.toml"), json.loads(settings.model_dump_json(exclude_none=True))
    defaults = json.loads(PretrainSettings().model_dump_json(exclude_none=True))
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


def seen_test_slides(folder: Path, cohort: Cohort) -> list[str]:
    """Slides of the test split that an encoder of the study was trained on."""
    path = folder / SLIDES_FILE
    if not path.is_file():
        return []
    seen = set(path.read_text(encoding="utf-8").splitlines())
    return [row.slide for row in cohort.select(split="test").rows if row.slide in seen]
