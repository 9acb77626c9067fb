"""Which feature files are learned from: of an encoder, of one per split, of two scales, or of another tool."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from selfvitmil.errors import ConfigError
from selfvitmil.settings import StudySettings, tiling_name
from selfvitmil.store.failures import read_failures
from selfvitmil.store.layout import ENCODER_SLIDES_FILE, StudyLayout
from selfvitmil.study.encoders import (
    base_name,
    encoder_name,
    features_name,
    slides_of,
    split_encoders,
    split_features_name,
)
from selfvitmil.study.methods import coarse_mpp

MEAN_COLOR, UNTRAINED = "mean_color", "untrained_"
"""Names of encoders that are there for comparison."""


@dataclass(frozen=True)
class FeatureChoice:
    """Which vectors to learn from."""

    encoder: str | None = None
    """An encoder of the study; none means the only one there is."""
    folder: Path | None = None
    """Feature files of another tool (or of ours) instead."""
    coarse_encoder: str | None = None
    """The encoder of the coarser scale, where it is another one."""
    two_scales: bool = False
    """Append to every vector that of the coarser tile around it (the first of tile.parent_mpp)."""


@dataclass(frozen=True)
class Features:
    """Feature files of one kind."""

    encoder: str
    tiling: str
    files: Mapping[str, Path]
    models: Path
    """Where models that learned from them go."""
    coarse: Any = None
    encoder_slides: frozenset[str] = frozenset()
    """Slides that their encoder was trained on, as far as is known."""
    by_split: Mapping[str, Features] = field(default_factory=dict)
    """Where every split has an encoder of its own: the features of each."""


def find_features(study: Path, choice: FeatureChoice, settings: StudySettings) -> Features:
    """The feature files that were asked for; ConfigError where it is not clear which those are."""
    from selfvitmil.bags import find_bags

    if choice.folder is not None:
        name = encoder_name(str(choice.folder.resolve()))
        files, slides = find_bags(choice.folder), slides_of(choice.folder / ENCODER_SLIDES_FILE)
        return Features(name, "external", files, StudyLayout(study).models_on("external", name), encoder_slides=slides)
    tiling = tiling_name(settings.tile)
    name = choose_features(study, tiling, choice.encoder, settings)
    own = _split_features(study, tiling, name)
    if own:
        found = {split: find_features(study, replace(choice, encoder=each), settings) for split, each in own.items()}
        first = next(iter(found.values()))
        return replace(first, encoder=name, models=first.models.with_name(name), by_split=found)
    fine = Features(name, tiling, _embedded(study, tiling, name), Path(), None, _encoder_slides(study, tiling, name))
    if not choice.two_scales:
        return replace(fine, models=StudyLayout(study).models_on(tiling, name))
    return _on_two_scales(study, choice, settings, fine)


def _encoder_slides(study: Path, tiling: str, name: str) -> frozenset[str]:
    """The slides that an encoder was trained on; studies of earlier versions have them in its own folder alone."""
    layout = StudyLayout(study)
    beside = layout.features_encoder_slides(tiling, name)
    return slides_of(beside if beside.exists() else layout.encoder_slides(split_features_name(name)[0]))


def _split_features(study: Path, tiling: str, name: str) -> dict[str, str]:
    """Split -> name of its features, where `name` stands for encoders of all splits; else empty."""
    if StudyLayout(study).features(tiling, name).is_dir():
        return {}
    encoder, layout = split_features_name(name)
    return {split: features_name(each, layout) for split, each in split_encoders(study, encoder).items()}


def _of_all_splits(study: Path, name: str) -> str:
    """What the features of all splits are called together; the name itself where an encoder is for no split alone."""
    encoder, layout = split_features_name(name)
    return features_name(base_name(study, encoder), layout)


def _embedded(study: Path, tiling: str, name: str) -> dict[str, Path]:
    """Feature files of the study, by slide, without those that the last `embed` could not make anew."""
    from selfvitmil.bags import find_bags

    stage = embed_stage(name, tiling)
    failed = {failure.slide for failure in read_failures(study) if failure.stage == stage}
    found = find_bags(StudyLayout(study).features(tiling, name))
    return {slide: path for slide, path in found.items() if slide not in failed}


def choose_features(study: Path, tiling: str, wanted: str | None, settings: StudySettings) -> str:
    """Name of the features folder: of the encoder that is wanted, or the only one, with the layout that is set."""
    layout = settings.embed.layout
    all_names = StudyLayout(study).features_of_tiling(tiling)
    names = list(dict.fromkeys(_of_all_splits(study, name) for name in all_names))
    listed = f"there are vectors of {', '.join(names)}" if names else "no slide was embedded yet"
    if wanted is not None:
        name = encoder_name(wanted)
        if name != MEAN_COLOR and split_features_name(name)[1] is None:
            name = features_name(name, layout)
        if name not in (*names, *all_names):
            of_layout = f" with layout {layout}" if layout is not None else ""
            what = f"{study.name}: no vectors of encoder {wanted!r}{of_layout} for tiles {tiling}"
            raise ConfigError(what, listed, "Run `selfvitmil embed` first, or name another encoder")
        return name
    names = [name for name in names if name != MEAN_COLOR and not name.startswith(UNTRAINED)]  # nobody means these
    if layout is not None:
        names = [name for name in names if split_features_name(name)[1] == layout]
    if len(names) != 1:
        of_layout = f" (layout {layout})" if layout is not None else ""
        what = f"{study.name}: it is not clear which vectors of tiles {tiling}{of_layout} to learn from"
        raise ConfigError(what, listed, "Give --encoder, or --features with a folder of feature files")
    return names[0]


def _on_two_scales(study: Path, choice: FeatureChoice, settings: StudySettings, fine: Features) -> Features:
    from selfvitmil.evaluate import CoarseScale

    tiling = tiling_name(settings.tile, coarse_mpp(settings.tile))
    coarse = choose_features(study, tiling, choice.coarse_encoder or fine.encoder, settings)
    name = fine.encoder if coarse == fine.encoder else f"{fine.encoder}+{coarse}"
    both = f"{fine.tiling}+{tiling}"
    scale = CoarseScale(
        tiling,
        _embedded(study, tiling, coarse),
        {slide: StudyLayout(study).tile_table(fine.tiling, slide) for slide in fine.files},
        StudyLayout(study).features(both, name),
    )
    seen = fine.encoder_slides | _encoder_slides(study, tiling, coarse)
    return Features(name, both, fine.files, StudyLayout(study).models_on(both, name), scale, seen)


def embed_stage(name: str, tiling: str) -> str:
    """What failures.csv calls the embedding of these tiles by this encoder."""
    return f"embed {name} {tiling}"
