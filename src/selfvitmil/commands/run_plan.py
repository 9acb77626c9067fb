"""What a run was asked for, what it finds in the study, and what each stage has left to do. Reads only.

`plan_run` makes the plan that `run` prints first and then follows, and that `plan` estimates. The stages themselves say
what they would rebuild, so the plan cannot differ from what happens. What would stop a run later is an error here
(the checks below, and `Stage.preflight`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selfvitmil.cohort import Cohort
from selfvitmil.cohort.files import is_slide
from selfvitmil.cohort.table import listing
from selfvitmil.errors import ArtefactError, ConfigError, SelfVitMilError, raise_problems
from selfvitmil.settings import StudySettings, tiling_name
from selfvitmil.stages import STAGES
from selfvitmil.stages.base import Pending, Stage, say_nothing_done
from selfvitmil.stages.pretrain import (
    EncoderRun,
    encoder_runs,
    propose_split,
    seen_test_slides,
    settle_scope,
    tested_splits,
)
from selfvitmil.store.layout import CONFIG_FILE, StudyLayout
from selfvitmil.study import Study, encoder_name, encoder_sources, features_name

if TYPE_CHECKING:
    from selfvitmil.evaluate import Trial


PRETRAIN = "pretrain"
"""As an encoder: the one that the study trains for itself."""


@dataclass(frozen=True)
class Request:
    """What a run was asked for, beyond the settings."""

    encoder: str | None = None
    """`pretrain`, an encoder of the study, a folder, a file, a timm or hub name; None: as in the last run."""
    name: str | None = None
    """Name of an encoder that is trained here."""
    one_method: bool = False
    """Evaluate train.aggregator alone and skip the comparison."""
    until: str | None = None
    """The last stage to run."""

    @property
    def trains_encoder(self) -> bool:
        return self.encoder in (None, PRETRAIN)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages that were asked for; ConfigError when `until` is none of them."""
        absent = {"pretrain"} if not self.trains_encoder else set()
        absent |= {"compare"} if self.one_method else set()
        stages = [stage for stage in STAGES if stage.in_run and stage.name not in absent]
        names = [stage.name for stage in stages]
        if self.until is None:
            return tuple(stages)
        if self.until not in names:
            raise ConfigError(
                f"--until {self.until}: this run has no such stage",
                how=f"It has {', '.join(names)}",
                code="unknown-stage",
            )
        return tuple(stages[: names.index(self.until) + 1])


@dataclass(frozen=True, eq=False)
class RunPlan:
    """A study as the stages of one run see it: everything is read once, when it is first asked for."""

    study: Study
    """With the settings that the look at the study settled (`pretrain.per_split`), and with the split it proposes."""
    request: Request
    runs: tuple[EncoderRun, ...] = ()
    """The encoders that are trained here, finished ones too."""
    labels: Trial | None = None
    """The splits that learning will use; None where no stage learns."""
    notes: tuple[str, ...] = ()
    """What was found that deserves a line."""
    split_table: tuple[tuple[str, ...], ...] = ()
    """The split that is proposed and not stored yet, header first; empty where none is."""
    offline: bool = False
    """Ask no hub for an encoder's identity."""
    _pending: dict[str, Pending] = field(default_factory=dict)

    @property
    def settings(self) -> StudySettings:
        return self.study.settings

    @property
    def cohort(self) -> Cohort:
        return self.study.cohort

    @property
    def layout(self) -> StudyLayout:
        return self.study.layout

    @property
    def stages(self) -> tuple[Stage, ...]:
        return self.request.stages

    def has(self, name: str) -> bool:
        """Whether the run has this stage."""
        return any(stage.name == name for stage in self.stages)

    def pending(self, name: str) -> Pending:
        """What a stage has left to do; nothing where the run does not have it."""
        if name not in self._pending:
            stage = next((each for each in self.stages if each.name == name), None)
            self._pending[name] = Pending() if stage is None else stage.pending(self)
        return self._pending[name]

    @property
    def tiling(self) -> str:
        return self.study.tiling

    # ------------------------------------------------------------------------------------------------ encoder

    @property
    def encoder(self) -> str:
        """Name of the encoder in the study, or of those of all splits together."""
        request = self.request
        if request.trains_encoder:
            return request.name or self.settings.pretrain.method
        return encoder_name(str(request.encoder))

    @cached_property
    def sources(self) -> Mapping[str, str]:
        """Encoder -> where its weights are, or will be when it is trained here; several where every split has one."""
        if self.request.trains_encoder:
            return {run.name: str(self.layout.encoder(run.name)) for run in self.runs}
        return encoder_sources(self.study.root, str(self.request.encoder))

    @cached_property
    def seen(self) -> dict[str, tuple[str, ...]]:
        """Encoder -> test slides that it has seen, or other slides of their patients."""
        folders = {name: Path(source) for name, source in self.sources.items()}
        return seen_test_slides(folders, self.cohort, tested_splits(self.cohort, self.settings))

    @property
    def features(self) -> str:
        """Name of the encoder's feature files."""
        return features_name(self.encoder, self.settings.embed.layout)

    @cached_property
    def loaded(self) -> dict[str, Any]:
        """The encoders that exist; None where only a hub has one and is not asked."""
        from selfvitmil.encoder import load_encoder

        unfinished = self.pending("pretrain").todo if self.request.trains_encoder else {}
        layout = self.settings.embed.layout
        return {
            name: None if self.offline and not Path(source).exists() else load_encoder(source, layout=layout)
            for name, source in self.sources.items()
            if name not in unfinished
        }

    # ------------------------------------------------------------------------------------------------ notes

    def lines(self) -> list[str]:
        """Notes on what lies in the study and stays as it is, on slides that are gone, on a given encoder."""
        lines = list(self.notes)
        tile, cohort = self.settings.tile, self.cohort
        mine = {self.tiling, *(tiling_name(tile, mpp) for mpp in tile.parent_mpp)}
        others = [path.name for path in self.layout.all_tilings()]
        if left := [name for name in others if name not in mine]:
            lines.append(f"found tiles of another size or resolution, which stay as they are: {listing(left)}")
        tables = sorted(path.stem for path in self.layout.tiling(self.tiling).glob("*.h5"))
        if removed := [slide for slide in tables if slide not in cohort]:
            lines.append(
                f"found {len(removed)} slides that cohort.csv no longer names: {listing(removed)}; their files stay, "
                "and nothing is learned from them"
            )
        if gone := [row.slide for row in cohort.missing_files()]:
            lines.append(f"found {len(gone)} slides whose files are not there any more: {listing(gone)}")
        lines += [
            f"note: {name} was trained on {len(slides)} test slides or other slides of their patients: "
            f"{listing(slides)}; results are labelled transductive"
            for name, slides in self.seen.items()
        ]
        return lines


def plan_run(study: Study, request: Request, *, offline: bool = False) -> RunPlan:
    """Look at the study and plan a run of `request`. Raises what would stop the run. Writes nothing."""
    check_study(study)
    name = _check_name(request, study.settings)
    notes = list(study.cohort_notes)
    check_formats(study.root)
    stages = request.stages
    trains, table = any(stage.name == "pretrain" for stage in stages), ()
    if trains:
        info, table = propose_split(study, name)
        notes += info
    labels = None
    if any(stage.is_learning for stage in stages):
        labels = check_labels(study.cohort, study.settings)
        notes += [f"warning: {study.cohort.patient_warning}"] if study.cohort.patient_warning else []
    check_files(study)
    runs: tuple[EncoderRun, ...] = ()
    if trains:
        settings, info = settle_scope(study.root, name, study.cohort, study.settings)
        study, notes = study.with_settings(settings), [*notes, *info]
        runs = encoder_runs(study.cohort, name, settings)
    plan = RunPlan(study, request, runs, labels, tuple(notes), table, offline)
    for stage in sorted(stages, key=lambda each: not each.is_learning):  # methods first: others may load an encoder
        stage.preflight(plan)
    for stage in stages:
        plan.pending(stage.name)
    return plan


def _check_name(request: Request, settings: StudySettings) -> str:
    """Name of an encoder that is trained here; ConfigError where a given one cannot be used."""
    if request.name is not None and not request.trains_encoder:
        raise ConfigError(
            f"--name {request.name} was given",
            f"and {request.encoder} is trained already",
            code="name-of-trained-encoder",
        )
    if request.name is not None and encoder_name(request.name) != request.name:
        what = f"--name {request.name} does not do as a folder's name"
        raise ConfigError(what, how=f"Try {encoder_name(request.name)!r}", code="invalid-name")
    return request.name or settings.pretrain.method


# ---------------------------------------------------------------------------------------------------- checks
# What a run must not begin with: each check raises, before anything is touched, an error that says so. Files of a newer
# version are left alone; an encoder, which took hours, is neither overwritten nor used in place of another one
# (`stages.pretrain`); labels that cannot be learned from are found by the very functions that would refuse them later.


def check_study(of: Study) -> None:
    """ConfigError where the folder is not one to work in."""
    study, source = of.root, of.source
    if study.exists() and not study.is_dir():
        raise ConfigError(
            f"{study.name}: this is a file", "a study is a folder", "Name a folder, new or old", code="study-is-file"
        )
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
        f"{study.name}: this folder {what}",
        "so there are no slides to work on, and nothing was done",
        how,
        code="no-cohort",
    )


def check_formats(study: Path) -> None:
    """ArtefactError when a newer version of this program has worked on the study: ours would undo its work."""
    from selfvitmil import bags, tiles
    from selfvitmil.encoder import files as encoders
    from selfvitmil.localize import heatmap

    layout = StudyLayout(study)
    known = (
        (layout.tiles_folder, "*/*.h5", tiles.FORMAT_VERSION),
        (layout.bags_folder, "*/features_*/*.h5", bags.FORMAT_VERSION),
        (layout.heatmaps_folder, "*/*.h5", heatmap.FORMAT_VERSION),
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
                    code="newer-format-version",
                )


def _format_of(path: Path) -> int | None:
    """The format version of a file of ours; None of any other, and of a damaged one, which its stage will tell of."""
    from selfvitmil.store.files import open_hdf5

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
    from selfvitmil.cohort.table import order_classes
    from selfvitmil.evaluate import Cases, hold_out_test_labels, make_splits
    from selfvitmil.evaluate.dataset import Case, check_two_classes

    labelled = cohort.select(labelled=True)
    try:
        if not labelled.rows:
            how = "Give --labels with a table of slides and their labels"
            raise ConfigError(
                "the cohort has no labelled slide", "there is nothing to learn from", how, code="no-labels"
            )
        check_two_classes(set(cohort.classes), "the cohort")
        classes = order_classes(cohort.classes, settings.train.positive).names
        found = [Case(row.slide, row.patient, row.path, "", classes.index(row.label or "")) for row in labelled.rows]
        cases = Cases(tuple(found), classes, cohort, 0, "", "")
        return hold_out_test_labels(cases, make_splits(cases, settings.train, settings.evaluate), settings.evaluate)
    except SelfVitMilError as error:
        how = f"{error.how}. To go as far as that needs no labels, add --until embed".removeprefix(". ")
        raise_problems([say_nothing_done(error, how), *cohort.missing_problems], "the cohort")
        raise


def check_files(study: Study) -> None:
    """CohortError where not one slide is there, which is a wrong path; single ones fail later, alone."""
    cohort = study.cohort
    there = any(row.path.exists() for row in cohort.rows)
    if not there and not any(study.layout.tiles_folder.glob("*/*.h5")):
        raise_problems([say_nothing_done(each, each.how) for each in cohort.missing_problems], "the cohort")
