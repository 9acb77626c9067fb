"""What a run was asked for, what it finds in the study, and what each stage has left to do. Reads only.

`plan_run` makes the plan that `run` prints first and then follows, and that `plan` estimates. The stages themselves say
what they would rebuild, so the plan cannot differ from what happens. What would stop a run later is an error here
(`Stage.preflight`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selfvitmil.cohort import Cohort
from selfvitmil.cohort.table import listing
from selfvitmil.errors import ConfigError
from selfvitmil.settings import StudySettings, tiling_name
from selfvitmil.stages.base import Pending, Stage
from selfvitmil.store.layout import StudyLayout
from selfvitmil.study import preflight
from selfvitmil.study.encoders import (
    EncoderRun,
    encoder_name,
    encoder_runs,
    encoder_sources,
    features_name,
    seen_test_slides,
    settle_scope,
    tested_splits,
)
from selfvitmil.study.folder import CohortSource, find_cohort
from selfvitmil.study.splits import propose_split

if TYPE_CHECKING:
    from selfvitmil.evaluate import Trial


PRETRAIN = "pretrain"
"""As an encoder: the one that the study trains for itself."""


@dataclass(frozen=True)
class Request:
    """What a run was asked for, beyond the settings."""

    source: CohortSource = field(default_factory=CohortSource)
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
        from selfvitmil.stages import STAGES

        absent = {"pretrain"} if not self.trains_encoder else set()
        absent |= {"compare"} if self.one_method else set()
        stages = [stage for stage in STAGES if stage.in_run and stage.name not in absent]
        names = [stage.name for stage in stages]
        if self.until is None:
            return tuple(stages)
        if self.until not in names:
            raise ConfigError(f"--until {self.until}: this run has no such stage", how=f"It has {', '.join(names)}")
        return tuple(stages[: names.index(self.until) + 1])


@dataclass(frozen=True, eq=False)
class RunPlan:
    """A study as the stages of one run see it: everything is read once, when it is first asked for."""

    study: Path
    request: Request
    settings: StudySettings
    """With what the look at the study settled (`pretrain.per_split`)."""
    cohort: Cohort
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
    def layout(self) -> StudyLayout:
        return StudyLayout(self.study)

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
    def table(self) -> tuple[tuple[str, ...], ...]:
        return (("stage", "what will be done"), *((each.name, self.pending(each.name).line) for each in self.stages))

    @property
    def tiling(self) -> str:
        return tiling_name(self.settings.tile)

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
        return encoder_sources(self.study, str(self.request.encoder))

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


def plan_run(study: Path, request: Request, settings: StudySettings, *, offline: bool = False) -> RunPlan:
    """Look at the study and plan a run of `request`. Raises what would stop the run."""
    preflight.check_study(study, request.source)
    name = _check_name(request, settings)
    cohort, notes = find_cohort(study, request.source)
    preflight.check_formats(study)
    stages = request.stages
    trains, table = any(stage.name == "pretrain" for stage in stages), ()
    if trains:
        cohort, told, table = propose_split(study, name, cohort, settings)
        notes += told
    labels = None
    if any(stage.is_learning for stage in stages):
        labels = preflight.check_labels(cohort, settings)
        notes += [f"warning: {cohort.patient_warning}"] if cohort.patient_warning else []
    preflight.check_files(study, cohort)
    runs: tuple[EncoderRun, ...] = ()
    if trains:
        settings, told = settle_scope(study, name, cohort, settings)
        notes += told
        runs = encoder_runs(cohort, name, settings)
    plan = RunPlan(study, request, settings, cohort, runs, labels, tuple(notes), table, offline)
    for stage in sorted(stages, key=lambda each: not each.is_learning):  # methods first: others may load an encoder
        stage.preflight(plan)
    for stage in stages:
        plan.pending(stage.name)
    return plan


def _check_name(request: Request, settings: StudySettings) -> str:
    """Name of an encoder that is trained here; ConfigError where a given one cannot be used."""
    if request.name is not None and not request.trains_encoder:
        raise ConfigError(f"--name {request.name} was given", f"and {request.encoder} is trained already")
    if request.name is not None and encoder_name(request.name) != request.name:
        what = f"--name {request.name} does not do as a folder's name"
        raise ConfigError(what, how=f"Try {encoder_name(request.name)!r}")
    return request.name or settings.pretrain.method
