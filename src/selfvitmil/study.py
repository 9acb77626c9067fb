"""A study folder as the stages see it: settings, cohort, features and splits, each read once and shared.

`open_study` makes the `Study` of one command from study.toml, flags and what the flags say of slides and labels. All
stages of a `run` get the same one. Which encoder's features are learned from is chosen here too (`FeatureChoice`).
"""

from __future__ import annotations

import copy
import os
import re
import shlex
import shutil
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast, get_args

from selfvitmil.cohort import (
    COLUMNS,
    Cohort,
    Split,
    merge_cohorts,
    read_cohort,
    with_guessed_patients,
    with_slides,
    write_cohort,
)
from selfvitmil.cohort.table import listing
from selfvitmil.engine import Engine, announce
from selfvitmil.errors import ArtefactError, ConfigError
from selfvitmil.settings import (
    StudySettings,
    TileSettings,
    TokenLayout,
    TrainSettings,
    check_study_engine,
    flags_to_toml,
    overlay_settings,
    read_toml,
    resolve_settings,
    tiling_name,
    with_user_engine,
)
from selfvitmil.store.failures import Failure, read_failures, record_failures
from selfvitmil.store.files import hash_of, remove_leftovers, write_text
from selfvitmil.store.layout import ENCODER_SLIDES_FILE, MODEL_SLIDES_FILE, StudyLayout
from selfvitmil.store.lock import study_lock

if TYPE_CHECKING:
    from selfvitmil.evaluate import Cases

T = TypeVar("T")


@dataclass(frozen=True)
class CohortSource:
    """Where a study's slides come from, when it is not yet (or no longer only) its own cohort.csv."""

    cohort: Path | None = None
    labels: Path | None = None
    label_column: str | None = None
    slides_folder: Path | None = None
    features: Path | None = None
    """A folder of feature files that stand for slides which are not at hand."""
    replace_labels: bool = False
    """Labels of `labels` replace those that the study has."""


@dataclass(frozen=True)
class FeatureChoice:
    """Which features to learn from."""

    encoder: str | None = None
    """An encoder of the study; none means the only one there is."""
    folder: Path | None = None
    """Feature files of another tool (or of ours) instead."""
    coarse_encoder: str | None = None
    """The encoder of the coarser scale, where it is another one."""
    two_scales: bool = False
    """Append to every embedding that of the coarser tile around it (the first of tile.parent_mpp)."""


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
    by_split: Mapping[str, Features] = field(default_factory=dict[str, "Features"])
    """Where every split has an encoder of its own: the features of each."""


@dataclass(frozen=True, eq=False)
class LearningSet:
    """What aggregators learn from: labelled slides with their features, and how they are split."""

    cases: Cases
    splits: tuple[Split, ...]
    features: Features


class Study:
    """A study folder, read once.

    Parameters
    ----------
    root
        Folder of the study.
    settings
        Resolved settings of the command.
    source
        Where slides and labels come from.
    """

    def __init__(self, root: Path, settings: StudySettings, source: CohortSource | None = None) -> None:
        self.root = root
        self.settings = settings
        self.source = CohortSource() if source is None else source
        self._read: dict[Any, Any] = {}
        """What was read, by name; shared by copies with other settings."""

    @property
    def name(self) -> str:
        """Name of the folder."""
        return self.root.name

    @property
    def layout(self) -> StudyLayout:
        """Paths of all files of the study."""
        return StudyLayout(self.root)

    @property
    def tiling(self) -> str:
        """Name of the tiles that the settings ask for."""
        return tiling_name(self.settings.tile)

    def with_settings(self, settings: StudySettings) -> Study:
        """Return the same study under other settings; what was read is shared."""
        other = copy.copy(self)
        other.settings = settings
        return other

    def claims_folder(self, stage: str) -> Path:
        """Return where shards of a run agree on the slides of a stage (`embed`, or `embed dino 0.5mpp_224px_0px`) under
        these settings."""
        settings = self.settings.model_dump(mode="json", include={"slide", "tissue", "stain", "tile", "embed"})
        return self.layout.shards / f"{stage.partition(' ')[0]}-{hash_of(stage, settings)[:12]}"

    def claims(self, stage: str) -> list[Path]:
        """Return the folders of what shards have done of a stage and nobody has assembled yet."""
        return sorted(self.layout.shards.glob(f"{stage}-*"))

    def forget_claims(self, stage: str) -> None:
        """Remove what shards noted on a stage, which is assembled now. Call only while the study is locked."""
        for folder in self.claims(stage):
            shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):  # other stages are in it, or there were no shards
            self.layout.shards.rmdir()

    def targets(self, name: str | None = None) -> Iterator[tuple[Study, str | None]]:
        """Yield the study once for each of the targets that are trained jointly, for what is done target by target.

        Beside it stands the `name` of its folder of results, if one was given. It is the study itself without such
        targets, or where the settings name one of them.
        """
        train = self.settings.train
        targets, place = _joint_targets(train)
        if not targets or place is not None:
            yield self, name
            return
        for columns in targets:
            own = self.settings.model_copy(update={"train": train.model_copy(update={"target": columns})})
            yield self.with_settings(own), None if name is None else encoder_name(f"{name}_{'-'.join(columns)}")

    def lock(self, command: str):
        """Hold the study's lock in a `with` statement."""
        return lock_study(self.root, command)

    # ------------------------------------------------------------------------------------------------ cohort

    @property
    def cohort(self) -> Cohort:
        """The study's cohort with what `source` adds; patients are guessed where no table has them."""
        if "cohort" not in self._read:
            own = self.layout.cohort
            stored = read_cohort(own) if own.exists() else None
            train = self.settings.train
            named = (*train.target, *(column for columns in _joint_targets(train)[0] for column in columns))
            cohort, notes = _find_cohort(self.root, self.source, stored, named)
            cohort, guess = with_guessed_patients(cohort)
            notes += [f"note: {guess}"] if guess is not None else []
            self._read |= {"stored": stored, "notes": tuple(notes), "cohort": cohort}
        return self._read["cohort"]

    @property
    def cohort_notes(self) -> tuple[str, ...]:
        """What `source` added, and what was noticed about the cohort."""
        self.cohort  # noqa: B018
        return self._read["notes"]

    def change_cohort(self, cohort: Cohort) -> None:
        """Use another cohort from now on; `store_cohort` writes it."""
        self.cohort_notes  # noqa: B018  what is stored must have been read
        self._read["cohort"] = cohort

    def store_cohort(self) -> Cohort:
        """Write cohort.csv unless it says the same already; return the cohort."""
        cohort, stored = self.cohort, self._read["stored"]
        if stored is None or stored.rows != cohort.rows:
            write_cohort(self.layout.cohort, cohort)
            self._read["stored"] = cohort
        return cohort

    # ------------------------------------------------------------------------------------------------ features

    def learning_set(self, choice: FeatureChoice) -> LearningSet:
        """Return labelled slides with sound feature files, and the splits.

        Raises ConfigError where features, labels or splits cannot be used. Failures among the slides carry the stage
        `learning`.
        """
        choice = remembered_choice(self, choice)
        key = (choice, self.settings.model_dump_json())
        if key not in self._read:
            from selfvitmil.evaluate import make_splits

            features = find_features(self.root, choice, self.settings)
            cases = labelled_cases(self.cohort, features, "learning", self.settings.train)
            splits = make_splits(cases, self.settings.train, self.settings.evaluate)
            _check_split_encoders(features, splits)
            _check_pooling_model(choice, self.cohort, splits)
            self._read[key] = LearningSet(cases, splits, features)
        return self._read[key]

    def forget_features(self) -> None:
        """Read features and splits anew: feature files were written."""
        for key in [key for key in self._read if not isinstance(key, str)]:
            del self._read[key]


def open_study(root: Path, flags: Mapping[str, Any] | None = None, source: CohortSource | None = None) -> Study:
    """Return a study with the settings of its study.toml and `flags` on top."""
    return Study(root, study_settings(root, flags or {}), source)


def study_settings(root: Path, flags: Mapping[str, Any]) -> StudySettings:
    """Return the settings of a study: its study.toml if there is one, the user's engine settings and `flags` on top."""
    toml_file = StudyLayout(root).settings
    if not toml_file.exists():
        return resolve_settings(None, with_user_engine(flags))
    info = read_toml(toml_file)
    check_study_engine(info, toml_file.name)
    return resolve_settings(toml_file, with_user_engine(flags, info.get("engine")))


KEPT_HEAD = "# Settings that were given as flags when they were first used on this study.\n"
"""First line of a study.toml that was written by a command; others are the user's own and are never changed."""


def remember_settings(root: Path, flags: Mapping[str, Any]) -> tuple[str, ...]:
    """Keep settings that were given as flags in study.toml, so that later commands mean the same; return notes.

    What is stored there holds: a flag that differs from it is for its command only, and so are all flags where
    study.toml is the user's own.
    """
    path = StudyLayout(root).settings
    given = {key: value for key, value in _with_absolute_paths(flags).items() if key != "engine"}
    if not given:
        return ()
    if not path.exists():
        write_text(path, KEPT_HEAD + flags_to_toml(given))
        return ("study.toml written: the settings given now hold for all later commands on this study",)
    if not path.read_text(encoding="utf-8").startswith(KEPT_HEAD):
        return ()
    stored = read_toml(path)
    merged = overlay_settings(given, stored)
    if flags_to_toml(merged) == flags_to_toml(stored):
        return ()
    write_text(path, KEPT_HEAD + flags_to_toml(merged))
    return ("study.toml has the new settings given now too: they hold for all later commands on this study",)


def _with_absolute_paths(value: Any) -> Any:
    """Return settings whose paths mean the same wherever a later command is typed."""
    if isinstance(value, Mapping):
        return {key: _with_absolute_paths(each) for key, each in cast("Mapping[str, Any]", value).items()}
    return value.absolute() if isinstance(value, Path) else value


@contextmanager
def lock_study(root: Path, command: str) -> Generator[None]:
    """Hold the lock of a folder, with what a killed run left behind swept away."""
    with study_lock(root, command, announce):
        remove_leftovers(root)
        yield


def map_slides(
    engine: Engine, root: Path, stage: str, function: Callable[[Any], T], jobs: Mapping[str, Any], **progress: Any
) -> tuple[dict[str, T], list[Failure]]:
    """Run a stage over its slides: results in the cohort's order, and failures, which are recorded whatever happens."""
    done: dict[str, T] = {}
    failures: list[Failure] = []
    try:
        for outcome in engine.map(function, jobs, stage=stage, **progress):
            if outcome.failure is not None:
                failures.append(outcome.failure)
            else:
                done[outcome.name] = cast(T, outcome.value)
    finally:
        record_failures(root, stage, [*done, *(failure.slide for failure in failures)], failures)
    return {name: done[name] for name in jobs if name in done}, failures


def num_tiles(result: Any) -> int:
    """Return what the progress of stages on tiles counts."""
    return result.num_tiles


# ---------------------------------------------------------------------------------------------------- reading a cohort


def _find_cohort(
    root: Path, source: CohortSource, stored: Cohort | None, targets: Sequence[str] = ()
) -> tuple[Cohort, list[str]]:
    """Return the cohort that `source` and the study's own table `stored` make together, and notes on it."""
    own = StudyLayout(root).cohort
    table = own if source.cohort is None else source.cohort
    if table.resolve() == own.resolve():
        if stored is None:
            raise ConfigError(
                f"{root.name}: this study has no cohort.csv yet",
                "so there is nothing to work on",
                "Give --cohort with a folder of slides or a table of them",
                code="no-cohort",
            )
        _refuse_idle_flags(source)
        if source.slides_folder is not None:
            return with_slides(stored, source.slides_folder)
        if source.labels is None:
            return stored, []
    cohort = read_cohort(
        table,
        labels=source.labels,
        label_column=source.label_column,
        slides_folder=source.slides_folder,
        features=_feature_files(source.features),
        targets=targets,
        replace_labels=source.replace_labels,
    )
    notes: list[str] = []
    if stored is not None:
        cohort, report = merge_cohorts(stored, cohort, replace_labels=source.replace_labels)
        changed = ", ".join(report.columns) + (" filled or replaced" if source.replace_labels else " filled")
        notes = [
            f"cohort.csv: {text}: {listing(slides)}"
            for text, slides in (
                ("new slides", report.added),
                (changed, report.filled),
                ("files found in a new place", report.moved),
                ("not in the given table, but kept", report.only_old),
            )
            if slides
        ]
        notes += _labels_kept(source, report.columns)
    return cohort, [*notes, *(f"note: {warning}" for warning in cohort.warnings)]


def _labels_kept(source: CohortSource, filled: Sequence[str]) -> list[str]:
    """Return a note where a table of labels has brought further columns and no label."""
    added = [name for name in filled if name not in COLUMNS]
    if source.labels is None or not added or "label" in filled:
        return []
    name = shlex.quote(added[0])
    return [
        f"note: labels are as they were. --train.target {name} predicts the new column; --label-column {name} "
        "--replace-labels makes it the label"
    ]


def _refuse_idle_flags(source: CohortSource) -> None:
    """ConfigError for flags that say how to read a table which was not given: the study's own needs none of them."""
    if source.slides_folder is not None and source.labels is not None:
        raise ConfigError(
            f"--slides-folder {source.slides_folder.name} together with --labels",
            "the study has its slides, and both would change cohort.csv",
            "Give one after the other",
            code="slides-folder-with-labels",
        )
    if source.replace_labels and source.labels is None:
        raise ConfigError(
            "--replace-labels without a table of labels",
            "there is nothing to replace labels by",
            "Give the table with --labels",
            code="label-column-without-table",
        )
    if source.label_column is not None and source.labels is None:
        raise ConfigError(
            f"--label-column {source.label_column} without a table of labels",
            "in the study's cohort.csv the column of the label is `label`",
            "Give the table with --labels",
            code="label-column-without-table",
        )


def _feature_files(folder: Path | None) -> Mapping[str, Path] | None:
    if folder is None:
        return None
    from selfvitmil.bags import find_bags

    return find_bags(folder)


# ---------------------------------------------------------------------------------------------------- features


MEAN_COLOR, UNTRAINED = "mean_color", "untrained_"
"""Names of encoders that are there for comparison."""


def find_features(study: Path, choice: FeatureChoice, settings: StudySettings) -> Features:
    """The feature files that were asked for; ConfigError where it is not clear which those are."""
    found = _find_features(study, choice, settings)
    return replace(found, models=_of_target(found.models, settings.train))


def _joint_targets(train: TrainSettings) -> tuple[tuple[tuple[str, ...], ...], int | None]:
    """Return the columns of each of the targets that are trained jointly, and which of them `train.target` names."""
    if not train.joint:
        return (), None
    from selfvitmil.outcomes import joint_place, joint_targets

    return joint_targets(train), joint_place(train)


def target_name(train: TrainSettings) -> str:
    """Name of what is predicted, for files; empty where the settings leave that to the cohort."""
    if train.joint:
        targets, place = _joint_targets(train)
        own, others = ("-".join(column for each in part for column in each) for part in (
            () if place is None else targets[place : place + 1],
            [each for number, each in enumerate(targets) if number != place],
        ))  # fmt: skip
        return encoder_name(f"{own}_with_{others}" if own else f"joint_{others}")
    columns = "-".join(train.target) or (train.outcome if train.outcome.startswith("survival") else "")
    return encoder_name(columns) if columns else ""


def models_folder(study: Path, tiling: str, features: str, train: TrainSettings) -> Path:
    """The folder of the models that learned from features; every target has its own, so a study may have several."""
    return _of_target(StudyLayout(study).models_on(tiling, features), train)


def _of_target(folder: Path, train: TrainSettings) -> Path:
    if train.joint:
        return folder / encoder_name(f"joint_{'-'.join(train.joint)}")
    return folder / f"target_{name}" if (name := target_name(train)) else folder


def remember_features(study: Path, choice: FeatureChoice) -> None:
    """Note the folder of feature files that was given, as seen from the study: later commands then need no flag."""
    if choice.folder is not None:
        folder = choice.folder.resolve()
        note = StudyLayout(study).features_note(encoder_name(str(folder)))
        write_text(note, os.path.relpath(folder, study.resolve()) + "\n")


def remembered_choice(study: Study, choice: FeatureChoice) -> FeatureChoice:
    """Return the choice with the only folder of feature files that was given before, where nothing is said now.

    Embeddings of the study itself are meant first.
    """
    notes = study.layout.all_features_notes()
    if choice != FeatureChoice() or len(notes) != 1 or study.layout.features_of_tiling(study.tiling):
        return choice
    folder = (study.root.resolve() / notes[0].read_text(encoding="utf-8").strip()).resolve()
    return FeatureChoice(folder=folder) if folder.is_dir() else choice


def _find_features(study: Path, choice: FeatureChoice, settings: StudySettings) -> Features:
    from selfvitmil.bags import find_bags

    if choice.folder is not None:
        name = encoder_name(str(choice.folder.resolve()))
        files, slides = find_bags(choice.folder), slides_of(choice.folder / ENCODER_SLIDES_FILE)
        return Features(name, "external", files, StudyLayout(study).models_on("external", name), encoder_slides=slides)
    tiling = tiling_name(settings.tile)
    name = choose_features(study, tiling, choice.encoder, settings)
    own = _split_features(study, tiling, name)
    if own:
        found = {split: _find_features(study, replace(choice, encoder=each), settings) for split, each in own.items()}
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
    listed = f"there are features of {', '.join(names)}" if names else "no slide was embedded yet"
    if wanted is not None:
        name = encoder_name(wanted)
        if name != MEAN_COLOR and split_features_name(name)[1] is None:
            name = features_name(name, layout)
        if name not in (*names, *all_names):
            of_layout = f" with layout {layout}" if layout is not None else ""
            what = f"{study.name}: no features of encoder {wanted!r}{of_layout} for tiles {tiling}"
            raise ConfigError(what, listed, "Run `selfvitmil embed` first, or name another encoder", code="no-features")
        return name
    names = [name for name in names if name != MEAN_COLOR and not name.startswith(UNTRAINED)]  # nobody means these
    if layout is not None:
        names = [name for name in names if split_features_name(name)[1] == layout]
    if len(names) != 1:
        of_layout = f" (layout {layout})" if layout is not None else ""
        what = f"{study.name}: it is not clear which features of tiles {tiling}{of_layout} to learn from"
        raise ConfigError(
            what, listed, "Give --encoder, or --features with a folder of feature files", code="ambiguous-features"
        )
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


def coarse_mpp(tile: TileSettings) -> float:
    """Microns per pixel of the coarser of two scales; ConfigError where there is one scale only."""
    if not tile.parent_mpp:
        why = "tile.parent_mpp names no coarser scale"
        raise ConfigError(
            "features of two scales were asked for",
            why,
            "Tile and embed with tile.parent_mpp, e.g. 2.0",
            code="no-parent-tiles",
        )
    return tile.parent_mpp[0]


def labelled_cases(cohort: Cohort, features: Features, stage: str, train: TrainSettings) -> Cases:
    """Return the slides with the outcome that the settings name, and with sound feature files.

    Of several targets that are trained jointly it is the one of `train.target`, or where that is not set all of them.
    """
    from selfvitmil.evaluate import find_cases
    from selfvitmil.outcomes import Classes, choose_outcome

    if train.joint:
        return _joint_cases(cohort, features, stage, train)
    if features.by_split:
        return _cases_by_split(cohort, features, stage, train)
    outcome, line = choose_outcome(cohort, train)
    found = find_cases(
        outcome.labels(cohort) if isinstance(outcome, Classes) else cohort,
        features.files, coarse=features.coarse, stage=stage, encoder=features.encoder, tiling=features.tiling,
        positive=train.positive, outcome=None if isinstance(outcome, Classes) else outcome,
    )  # fmt: skip
    notes = (*found.notes, line) if line else found.notes
    return replace(found, encoder_slides=features.encoder_slides, notes=notes)


def _joint_cases(cohort: Cohort, features: Features, stage: str, train: TrainSettings) -> Cases:
    from selfvitmil.evaluate import find_cases
    from selfvitmil.evaluate.joint import target_cases
    from selfvitmil.outcomes import choose_joint, joint_place

    if features.by_split:
        raise ConfigError(
            f"train.joint with {features.encoder}, which is an encoder for every split",
            "each was trained for a split of the slides of one target",
            "Name one encoder (--encoder), or train the targets one by one (train.target)",
            code="not-with-joint",
        )
    (outcome, lines), place = choose_joint(cohort, train), joint_place(train)
    found = find_cases(
        cohort, features.files, coarse=features.coarse, stage=stage, encoder=features.encoder, tiling=features.tiling,
        outcome=outcome,
    )  # fmt: skip
    found = replace(found, encoder_slides=features.encoder_slides, notes=(*found.notes, *lines))
    return found if place is None else target_cases(found, place, cohort)


def _cases_by_split(cohort: Cohort, features: Features, stage: str, train: TrainSettings) -> Cases:
    """Cases with the features of every split's own encoder: the slides of which all of these are sound."""
    found = {split: labelled_cases(cohort, own, stage, train) for split, own in features.by_split.items()}
    failures = {failure.slide: failure for own in found.values() for failure in own.failures}
    common = frozenset[str].intersection(*(frozenset(own.by_slide) for own in found.values()))
    first = next(iter(found.values()))
    return replace(
        first, encoder=features.encoder, encoder_slides=frozenset(), failures=tuple(failures.values()), by_split=found
    ).only(common)


def _check_split_encoders(features: Features, splits: Sequence[Split]) -> None:
    """ConfigError where every split has an encoder of its own, but one of these splits has none."""
    missing = [split.name for split in splits if split.name not in features.by_split]
    if features.by_split and missing:
        raise ConfigError(
            f"{features.encoder}: no encoder for the splits {', '.join(missing)}",
            f"each was trained for one split, and there are those of {', '.join(features.by_split)}",
            "Use the splits that they were trained for (train.split, train.folds), train others with `selfvitmil "
            f"pretrain --pretrain.per-split` and another --name, or name one, as --encoder {features.encoder}_"
            f"{next(iter(features.by_split))}",
            code="missing-split-encoders",
        )


def _check_pooling_model(choice: FeatureChoice, cohort: Cohort, splits: Sequence[Split]) -> None:
    """ConfigError for slide embeddings whose pooling model saw labels of patients that are tested."""
    seen = frozenset[str]() if choice.folder is None else slides_of(choice.folder / MODEL_SLIDES_FILE)
    patients = {row.slide: row.patient for row in cohort.rows}
    known = {patients[slide] for slide in seen if slide in patients}
    for split in splits:
        tested = [slide for slide in split.test if patients[slide] in known]
        if tested:
            raise ConfigError(
                f"{len(tested)} test slides of split {split.name}: the pooling model has seen labels of their patients",
                "these slide embeddings hold their labels, so any result on them would be too good",
                "Use the split that the model was trained for, another model, or slide embeddings by mean or max",
                code="embedding-saw-labels",
            )


# ---------------------------------------------------------------------------------------------------- encoders


_SPLIT_NAME = re.compile(r"given|fold\d+|repeat\d+")


def slides_of(file: Path) -> frozenset[str]:
    """The slides that such a file lists; none where there is no file, as of encoders from elsewhere."""
    if not file.is_file():
        return frozenset()
    try:
        return frozenset(file.read_text(encoding="utf-8").splitlines())
    except (OSError, UnicodeDecodeError) as error:
        raise ArtefactError(
            f"{file.name} of {file.parent.name}: not a readable list of slides",
            "it says which slides the encoder was trained on, and it is damaged",
            "Copy it again; without one, remove the folder and embed (or train) again",
            code="unreadable-slide-list",
        ) from error


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
            f"encoder {name}: its name ends like a layout",
            "features folders of layouts end so",
            "Rename the encoder",
            code="encoder-named-like-layout",
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
