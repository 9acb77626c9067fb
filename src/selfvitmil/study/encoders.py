"""Which slides self-supervision may see: one encoder for the study, or one for every split.

A classifier that is tested on slides which its encoder was trained on is transductive, though no label was seen. So an
encoder is trained on the slides of the split `train`; where the splits are others (k-fold, Monte-Carlo, files), one
encoder is trained for every split on its training slides (`pretrain.per_split`), named `<name>_<split>`, and learning
takes for every split the features of its own. One encoder on all slides must be asked for (`pretrain.transductive`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from selfvitmil.cohort import Cohort, SlideRow, Split
from selfvitmil.errors import CohortError, ConfigError
from selfvitmil.settings import StudySettings, TokenLayout, read_toml
from selfvitmil.store.layout import SLIDES_FILE, StudyLayout

_SPLIT_NAME = re.compile(r"given|fold\d+|repeat\d+")


@dataclass(frozen=True)
class EncoderRun:
    """One encoder to train."""

    name: str
    """Its folder below encoders/."""
    rows: tuple[SlideRow, ...]
    """The slides that it may see."""
    words: str
    """Which these are, for the encoder's config."""


def encoder_runs(cohort: Cohort, name: str, settings: StudySettings) -> tuple[EncoderRun, ...]:
    """The encoders to train: one, or one for every split; ConfigError where there is no slide that one may see."""
    if settings.pretrain.transductive:
        return (EncoderRun(name, cohort.rows, "all slides of the cohort (transductive)"),)
    if settings.pretrain.per_split:
        return tuple(_run_of(split, cohort, name) for split in _draw(cohort, settings))
    rows = cohort.select(split="train").rows
    if not rows:
        raise ConfigError(
            "no slide of the cohort is in the split `train`",
            "self-supervision must not see slides that a classifier is tested on later",
            "Fill the column split of cohort.csv, add --pretrain.per-split for an encoder per split (it needs labels), "
            "--pretrain.transductive to use all slides, or give --encoder with one that is trained already",
        )
    return (EncoderRun(name, rows, "train split"),)


def _run_of(split: Split, cohort: Cohort, name: str) -> EncoderRun:
    """The slides of all patients that the split trains on; slides without label and split too, if not of others."""
    train = set(split.train)
    others = {cohort[slide].patient for slide in (*split.val, *split.test)}
    free = {row.slide for row in cohort.rows if row.label is None and row.split is None and row.patient not in others}
    rows = tuple(row for row in cohort.rows if row.slide in train | free)
    return EncoderRun(f"{name}_{split.name}", rows, f"training slides of {split.name}")


def settle_scope(study: Path, name: str, cohort: Cohort, settings: StudySettings) -> tuple[StudySettings, list[str]]:
    """The settings with an encoder per split where one encoder would see test slides unasked; and a line that says so.

    An encoder of that name which is there already is left to the checks of `door`.
    """
    own = settings.pretrain
    rows = cohort.select(split="train").rows
    if own.transductive or own.per_split or StudyLayout(study).encoder_config(name).exists():
        return settings, []
    splits = tested_splits(cohort, settings)
    seen = any(_seen(split, [row.slide for row in rows], cohort) for split in splits)
    if not splits or (rows and not seen):
        return settings, []
    why = "the column split of cohort.csv names no training slides"
    if rows:
        why = "slides of the split `train` are test slides of these splits"
    line = (
        f"note: {why}, so an encoder is trained for each of {len(splits)} splits, on its training slides alone: "
        f"encoders/{name}_{splits[0].name} and so on. --pretrain.transductive trains one on all slides instead, and "
        "its results are labelled transductive"
    )
    return settings.model_copy(update={"pretrain": own.model_copy(update={"per_split": True})}), [line]


def tested_splits(cohort: Cohort, settings: StudySettings) -> tuple[Split, ...]:
    """The splits that learning will use, as far as the cohort's labels allow to draw them; else none."""
    try:
        return _draw(cohort, settings)
    except (CohortError, ConfigError):  # learning says what is wrong; self-supervision needs no labels
        return ()


def _draw(cohort: Cohort, settings: StudySettings) -> tuple[Split, ...]:
    from selfvitmil.evaluate.dataset import draw_splits

    return draw_splits(cohort, settings.train, 0.0)


# ---------------------------------------------------------------------------------------------------- what was seen


def slides_of(file: Path) -> frozenset[str]:
    """The slides that such a file lists; none where there is no file, as of encoders from elsewhere."""
    return frozenset(file.read_text(encoding="utf-8").splitlines()) if file.is_file() else frozenset()


def split_encoders(study: Path, name: str) -> dict[str, str]:
    """Split -> finished encoder, where the encoders called `name` were trained one for every split; else empty."""
    found: dict[str, str] = {}
    prefix = f"{name}_"
    for folder in sorted(StudyLayout(study).all_encoders(), key=lambda path: (len(path.name), path.name)):
        split = folder.name.removeprefix(prefix)
        if folder.name.startswith(prefix) and _SPLIT_NAME.fullmatch(split) and is_per_split(folder):
            found[split] = folder.name
    return found


def is_per_split(folder: Path) -> bool:
    """Whether the encoder in this folder is finished and was trained for one split."""
    if not (folder / "config.json").exists() or not (folder / "settings.toml").exists():
        return False
    return bool(read_toml(folder / "settings.toml").get("pretrain", {}).get("per_split"))


def base_name(study: Path, encoder: str) -> str:
    """What the encoders of all splits are called together; the name itself of any other encoder."""
    base, _, split = encoder.rpartition("_")
    per_split = base and _SPLIT_NAME.fullmatch(split) and is_per_split(StudyLayout(study).encoder(encoder))
    return base if per_split else encoder


def seen_test_slides(
    encoders: Mapping[str, Path], cohort: Cohort, splits: Sequence[Split]
) -> dict[str, tuple[str, ...]]:
    """Encoder -> test slides that it, or of whose patients it, has seen; `encoders` are folders by their names.

    An encoder `<name>_<split>` of several counts for its split alone. Without splits the column of the cohort counts.
    """
    test = tuple(row.slide for row in cohort.select(split="test").rows)
    seen: dict[str, tuple[str, ...]] = {}
    for name, folder in encoders.items():
        slides = slides_of(folder / SLIDES_FILE)
        own = [split for split in splits if len(encoders) == 1 or name.endswith(f"_{split.name}")]
        found = [slide for split in own or [Split("given", (), (), test)] for slide in _seen(split, slides, cohort)]
        if found:
            seen[name] = tuple(dict.fromkeys(found))
    return seen


def _seen(split: Split, slides: Sequence[str] | frozenset[str], cohort: Cohort) -> tuple[str, ...]:
    from selfvitmil.evaluate.dataset import seen_slides

    return seen_slides(split, frozenset(slides), cohort)


# ---------------------------------------------------------------------------------------------------- names


def encoder_name(source: str) -> str:
    """What an encoder is called in file names: the last part of its folder, file or hub name."""
    name = Path(source.removeprefix("hf-hub:")).name or source
    return re.sub(r"[^A-Za-z0-9._-]", "_", name)


LAYOUT_MARK = "__"
"""Between encoder and layout in the name of a features folder."""


def features_name(source: str, layout: str | None) -> str:
    """What the embeddings of an encoder are called: after the encoder, and after the layout where one was asked for.

    `dino`, `dino__cls4-clsmean`: so embeddings of two layouts lie in two folders, with models and results of their own.
    """
    name = encoder_name(source)
    if split_features_name(name)[1] is not None:
        raise ConfigError(
            f"encoder {name}: its name ends like a layout", "features folders of layouts end so", "Rename the encoder"
        )
    return name if layout is None else f"{name}{LAYOUT_MARK}{layout.replace('+', '-')}"


def split_features_name(name: str) -> tuple[str, str | None]:
    """Encoder and layout that a features folder is named after; None where it has the encoder's own layout."""
    encoder, _, ending = name.rpartition(LAYOUT_MARK)
    layouts = {layout.replace("+", "-"): layout for layout in get_args(TokenLayout)}
    return (encoder, layouts[ending]) if encoder and ending in layouts else (name, None)


def encoder_source(study: Path, source: str) -> str:
    """An encoder of the study by its name, else `source` as it is."""
    own = StudyLayout(study).encoder(source)
    return str(own) if own.is_dir() else source


def encoder_sources(study: Path, source: str) -> dict[str, str]:
    """Name -> where its weights are; several where the study has an encoder of that name for every split."""
    if not StudyLayout(study).encoder(source).is_dir() and (own := split_encoders(study, source)):
        return {name: str(StudyLayout(study).encoder(name)) for name in own.values()}
    return {encoder_name(source): encoder_source(study, source)}


def last_metrics(folder: Path) -> dict[str, Any]:
    """The last whole line of an encoder's metrics.jsonl; empty where there is none. Loads no torch."""
    last: dict[str, Any] = {}
    metrics = folder / "metrics.jsonl"
    for text in metrics.read_text(encoding="utf-8").splitlines() if metrics.exists() else ():
        try:
            last = json.loads(text)
        except json.JSONDecodeError:  # the line that is being written
            break
    return last
