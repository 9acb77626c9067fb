"""What a run has before it: for every stage, what is current, what is to do and why. Reads, and never writes.

`look_ahead` is what `run` says first and what `plan` reckons from. It asks the stages themselves what they would do
again, so it cannot say another thing than happens. What must not begin is an error here (`door`).
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from selfvitmil.cohort import Cohort
from selfvitmil.cohort.table import listing
from selfvitmil.errors import ConfigError, SelfVitMilError
from selfvitmil.pipeline import door
from selfvitmil.pipeline.encoders import embed_jobs, encoder_name, encoder_sources, features_name, training_tiles
from selfvitmil.pipeline.methods import compared_methods
from selfvitmil.pipeline.pretraining import EncoderRun, encoder_runs, seen_test_slides, settle_scope, tested_splits
from selfvitmil.pipeline.slides import tile_jobs
from selfvitmil.pipeline.splitting import propose_split
from selfvitmil.pipeline.study import CohortSource, find_cohort
from selfvitmil.settings import StudySettings, tiling_name
from selfvitmil.store.failures import read_failures
from selfvitmil.store.layout import StudyLayout

STAGES = ("check", "tile", "pretrain", "embed", "compare", "evaluate", "localize", "lesions", "report")
"""All stages of a run, in their order."""
PRETRAIN = "pretrain"
"""As an encoder: the one that the study trains for itself."""
NEW = "made"
"""What stages note of a slide that has no file yet; else they note `made again: ...`."""
NO_TILES = "without tiles"


@dataclass(frozen=True)
class Request:
    """What a run was asked for, beyond the settings."""

    source: CohortSource = field(default_factory=CohortSource)
    encoder: str | None = None
    """`pretrain`, an encoder of the study, a folder, a file, a timm or hub name; none: as in the last run."""
    name: str | None = None
    """What to call an encoder that is trained here."""
    one_method: bool = False
    """Judge train.aggregator alone and leave the comparison out."""
    until: str | None = None
    """The last stage to do."""

    @property
    def trains_encoder(self) -> bool:
        return self.encoder in (None, PRETRAIN)

    @property
    def stages(self) -> tuple[str, ...]:
        """The stages that were asked for; ConfigError when `until` is none of them."""
        absent = {"pretrain"} if not self.trains_encoder else set()
        absent |= {"compare"} if self.one_method else set()
        stages = [stage for stage in STAGES if stage not in absent]
        if self.until is None:
            return tuple(stages)
        if self.until not in stages:
            raise ConfigError(f"--until {self.until}: this run has no such stage", how=f"It has {', '.join(stages)}")
        return tuple(stages[: stages.index(self.until) + 1])


@dataclass(frozen=True)
class StageOutlook:
    """What one stage has before it."""

    stage: str
    todo: Mapping[str, str] = field(default_factory=dict)
    """Slide (or whatever the stage makes one of) -> why."""
    num_current: int = 0
    hopeless: frozenset[str] = frozenset()
    """Of those to do: failed the last time, or not readable. They are tried, but not expected to change anything."""
    words: str = ""
    """Said instead of the counts, where a stage is not a matter of slides."""

    @property
    def changing(self) -> frozenset[str]:
        """What will be other than it is now."""
        return frozenset(self.todo) - self.hopeless

    @property
    def line(self) -> str:
        """One line for people."""
        if self.words:
            return self.words
        if not self.todo:
            return f"current ({self.num_current} slides)"
        reasons: dict[str, list[str]] = {}
        for slide, reason in self.todo.items():
            reasons.setdefault(reason, []).append(slide)
        parts = [f"{len(slides)} {why}" + (f" ({slides[0]})" * (len(slides) == 1)) for why, slides in reasons.items()]
        left = f"; {self.num_current} current and left alone" if self.num_current else ""
        return f"{len(self.todo)} slides to do: {', '.join(parts)}{left}"


@dataclass(frozen=True)
class Outlook:
    """What a run found and will do."""

    cohort: Cohort
    stages: tuple[StageOutlook, ...]
    settings: StudySettings
    """With what was settled by the look at the study (`pretrain.per_split`)."""
    encoder: str
    """What the encoder is called in the study, or those of all splits together."""
    sources: Mapping[str, str]
    """Encoder -> where its weights come from, for `load_encoder`; the folder it will have when it is trained here."""
    runs: tuple[EncoderRun, ...] = ()
    """The encoders that are trained here, finished ones too."""
    lines: tuple[str, ...] = ()
    """What was found that deserves a word."""
    split_table: tuple[tuple[str, ...], ...] = ()
    """The split that is proposed and not stored yet, header first; empty where none is."""

    def of(self, stage: str) -> StageOutlook:
        """The outlook of one stage; an empty one where it was not asked for."""
        return next((each for each in self.stages if each.stage == stage), StageOutlook(stage))

    @property
    def table(self) -> tuple[tuple[str, ...], ...]:
        return (("stage", "what will be done"), *((each.stage, each.line) for each in self.stages))


def look_ahead(study: Path, request: Request, settings: StudySettings, *, offline: bool = False) -> Outlook:
    """What a run of `request` finds in the study and will do. `offline` asks no hub for an encoder's identity."""
    door.check_study(study, request.source)
    if request.name is not None and not request.trains_encoder:
        raise ConfigError(f"--name {request.name} was given", f"and {request.encoder} is trained already")
    if request.name is not None and encoder_name(request.name) != request.name:
        what = f"--name {request.name} does not do as a folder's name"
        raise ConfigError(what, how=f"Try {encoder_name(request.name)!r}")
    cohort, lines = find_cohort(study, request.source)
    door.check_formats(study)
    name, table = request.name or "dino", ()
    if "pretrain" in request.stages:
        cohort, told, table = propose_split(study, name, cohort, settings)
        lines += told
    if set(request.stages) - set(STAGES[: STAGES.index("compare")]):
        door.check_learning(cohort, settings, door.check_labels(cohort, settings), request.stages)
        lines += [f"warning: {cohort.patient_warning}"] if cohort.patient_warning else []
    door.check_files(study, cohort)
    runs: tuple[EncoderRun, ...] = ()
    if "pretrain" in request.stages:
        settings, told = settle_scope(study, name, cohort, settings)
        lines += told
        runs = encoder_runs(cohort, name, settings)
    ahead = _Ahead(study, request, settings, cohort, offline, runs)
    first = None if request.trains_encoder else ahead.loaded[next(iter(ahead.sources))]
    if "embed" in request.stages and (request.trains_encoder or first is not None):
        door.check_scales(None if first is None else first.config, settings, request.stages)
    if not request.trains_encoder:
        door.check_untrained(study, ahead.encoder, settings, request.stages)
    stages = tuple(getattr(ahead, stage) for stage in request.stages)
    return Outlook(cohort, stages, settings, ahead.encoder, ahead.sources, runs, (*lines, *ahead.lines()), table)


# ---------------------------------------------------------------------------------------------------- stage by stage


@dataclass(frozen=True)
class _Ahead:
    """A property per stage, named after it; each asks those before it."""

    study: Path
    request: Request
    settings: StudySettings
    cohort: Cohort
    offline: bool
    runs: tuple[EncoderRun, ...]

    @property
    def encoder(self) -> str:
        """What the encoder is called in the study."""
        request = self.request
        return (request.name or "dino") if request.trains_encoder else encoder_name(str(request.encoder))

    @cached_property
    def sources(self) -> dict[str, str]:
        """Encoder -> where its weights are; several where every split has its own."""
        if self.request.trains_encoder:
            return {run.name: str(StudyLayout(self.study).encoder(run.name)) for run in self.runs}
        return encoder_sources(self.study, str(self.request.encoder))

    @cached_property
    def seen(self) -> dict[str, tuple[str, ...]]:
        """Encoder -> test slides that it, or of whose patients it, has seen."""
        folders = {name: Path(source) for name, source in self.sources.items()}
        return seen_test_slides(folders, self.cohort, tested_splits(self.cohort, self.settings))

    @property
    def features(self) -> str:
        """What its embeddings are called."""
        return features_name(self.encoder, self.settings.embed.layout)

    @property
    def tiling(self) -> str:
        return tiling_name(self.settings.tile)

    def lines(self) -> list[str]:
        """On what lies in the study and will not be touched, on slides that are gone, on a given encoder."""
        lines: list[str] = []
        tile, cohort = self.settings.tile, self.cohort
        mine = {self.tiling, *(tiling_name(tile, mpp) for mpp in tile.parent_mpp)}
        others = sorted(path.name for path in StudyLayout(self.study).all_tilings())
        if left := [name for name in others if name not in mine]:
            lines.append(f"found tiles of another size or resolution, which stay as they are: {listing(left)}")
        tables = sorted(path.stem for path in StudyLayout(self.study).tiling(self.tiling).glob("*.h5"))
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

    @property
    def check(self) -> StageOutlook:
        told = {failure.slide for failure in read_failures(self.study) if failure.stage == "check"}
        if StudyLayout(self.study).check_table.exists():
            with StudyLayout(self.study).check_table.open(newline="", encoding="utf-8") as file:
                told |= {row["slide"] for row in csv.DictReader(file)}
        todo = {slide: "not looked at yet" for slide in self.cohort.slides if slide not in told}
        return StageOutlook("check", todo, len(self.cohort) - len(todo))

    @cached_property
    def tile(self) -> StageOutlook:
        from selfvitmil.tiles import stale_reason

        failed = {failure.slide for failure in read_failures(self.study) if failure.stage == "tile"}
        todo: dict[str, str] = {}
        hopeless: set[str] = set()
        for slide, job in tile_jobs(self.study, self.cohort, self.settings).items():
            try:
                note = stale_reason(job)
            except (SelfVitMilError, OSError):
                todo[slide] = "again: its file cannot be read"
                hopeless.add(slide)
                continue
            if note == NEW and slide in failed:
                todo[slide] = "that failed the last time"
                hopeless.add(slide)
            elif note is not None:
                todo[slide] = _why(note)
        return StageOutlook("tile", todo, len(self.cohort) - len(todo), frozenset(hopeless))

    # ------------------------------------------------------------------------------------------------ encoder

    @cached_property
    def pretrain(self) -> StageOutlook:
        parts = [self._pretrain(run) for run in self.runs]
        todo = {name: why for part in parts for name, why in part.todo.items()}
        return StageOutlook("pretrain", todo, words="; ".join(part.words for part in parts))

    def _pretrain(self, run: EncoderRun) -> StageOutlook:
        name, folder = run.name, StudyLayout(self.study).encoder(run.name)
        if not (folder / "config.json").exists():
            return self._unfinished(folder, run)
        door.check_encoder(folder, self.seen.get(name, ()), self.settings)
        content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        made_from = content.get("selfvitmil", {}).get("provenance", {}).get("made_from")
        if not self._training_tiles_change(run) and made_from == self._made_from(run):
            return StageOutlook("pretrain", words=f"current (encoders/{name})")
        kept = (
            f"encoders/{name} is kept, though its tiles have changed since it was trained or another version of "
            "selfvitmil trained it; --name NEW trains another"
        )
        return StageOutlook("pretrain", words=kept)

    def _unfinished(self, folder: Path, run: EncoderRun) -> StageOutlook:
        from selfvitmil.pretrain.checkpoint import read_metrics, read_state

        pretrain, todo = self.settings.pretrain, {folder.name: "new"}
        length = f"{pretrain.steps} steps" if pretrain.steps else f"{pretrain.epochs} epochs"
        state = read_state(folder)
        if state is None:
            return StageOutlook("pretrain", todo, words=f"train encoders/{folder.name}, {length}")
        if self._training_tiles_change(run) or state["made_from"] != self._made_from(run):
            raise ConfigError(
                f"encoders/{folder.name} was begun with other settings, other tiles or by another version",
                f"its checkpoint of step {state['step']} does not belong to this run, and nothing was done",
                "Give --name with a new name, take the change back, or remove its folder to start again",
            )
        lines = read_metrics(folder)
        step = max(state["step"], lines[-1]["step"] + 1 if lines else 0)
        return StageOutlook("pretrain", todo, words=f"go on with encoders/{folder.name} from step {step}, of {length}")

    def _made_from(self, run: EncoderRun) -> str:
        """Identity of the encoder that training would make."""
        from selfvitmil.pretrain.train import Origin, identity_of

        source, _, trained_on = training_tiles(self.study, run, self.settings)
        origin = Origin(trained_on, self.settings.preset)
        return identity_of(source, StudyLayout(self.study).encoder(run.name), self.settings.pretrain, origin)

    def _training_tiles_change(self, run: EncoderRun) -> bool:
        return any(row.slide in self.tile.changing for row in run.rows)

    @cached_property
    def embed(self) -> StageOutlook:
        """Of all encoders together: a slide is to do when one of them has no current embeddings of it."""
        todo: dict[str, str] = {}
        for name, source in self.sources.items():
            todo = self._embed(name, source) | todo
        hopeless = frozenset(slide for slide, why in todo.items() if why == NO_TILES)
        ahead = StageOutlook("embed", todo, len(self.cohort) - len(todo), hopeless)
        if len(self.sources) == 1:
            return ahead
        return replace(ahead, words=f"with each of {len(self.sources)} encoders: {ahead.line}")

    def _embed(self, name: str, source: str) -> dict[str, str]:
        """Slide -> why it is embedded with this encoder."""
        features = features_name(name, self.settings.embed.layout)
        jobs, _ = embed_jobs(self.study, self.cohort, self.tiling, features, source, self.settings, stage="embed")
        untrained = self.request.trains_encoder and name in self.pretrain.todo
        loaded = None if untrained else self.loaded[name]
        identity = None if loaded is None else loaded.identity()
        found = {slide: self._bag(slide, jobs.get(slide), untrained, identity) for slide in self.cohort.slides}
        return {slide: found[slide] or "" for slide in self.cohort.slides if found[slide]}

    def _bag(self, slide: str, job: Any, untrained: bool, identity: str | None) -> str | None:
        """Why a slide's vectors are to be made; None when they are current, or when nobody can tell without a hub."""
        from selfvitmil.embed import stale_reason

        if job is None and slide not in self.tile.changing:
            return NO_TILES
        if job is None or not job.bag.exists():
            return "new"
        if slide in self.tile.changing:
            return "again: its tiles are made anew"
        if untrained:
            return "again: the encoder is trained anew"
        note = None if identity is None else stale_reason(job, identity)
        return None if note is None else _why(note)

    @cached_property
    def loaded(self) -> dict[str, Any]:
        """The encoders that are there; None where only a hub has one and is not asked."""
        from selfvitmil.encoder import load_encoder

        unfinished = self.pretrain.todo if self.request.trains_encoder else {}
        layout = self.settings.embed.layout
        return {
            name: None if self.offline and not Path(source).exists() else load_encoder(source, layout=layout)
            for name, source in self.sources.items()
            if name not in unfinished
        }

    # ------------------------------------------------------------------------------------------------ learning
    # These stages decide by themselves which of their files they use again; here is what is there.

    @property
    def compare(self) -> StageOutlook:
        rows = self.settings.compare
        number = len(compared_methods(self.settings, two_scales=bool(self.settings.tile.parent_mpp)))
        number += rows.random_encoder + rows.mean_color + (rows.supervised != "none")
        return self._judge("compare", f"{number} methods")

    @property
    def evaluate(self) -> StageOutlook:
        return self._judge("evaluate", self.settings.train.aggregator)

    def _judge(self, stage: str, what: str) -> StageOutlook:
        there = sum(1 for _ in StudyLayout(self.study).models_on(self.tiling, self.features).rglob("config.json"))
        fate = (
            "the vectors change, so they are trained again" if self.embed.changing else "those that fit are used again"
        )
        models = f"; {there} models are there, {fate}" if there else ""
        return StageOutlook(stage, words=f"judge {what} with {self.settings.train.seeds} seeds{models}")

    @property
    def localize(self) -> StageOutlook:
        method, optimistic = self.settings.train.aggregator, self.settings.evaluate.protocol == "optimistic"
        folder = StudyLayout(self.study).heatmaps(f"{self.features}_{method}{'_optimistic' * optimistic}")
        there = sum(1 for _ in folder.glob("*.h5"))
        words = f"map the slides of the split {', '.join(self.settings.localize.parts)} with {method}"
        return StageOutlook("localize", words=words + (f"; {there} maps are there" if there else ""))

    @property
    def lesions(self) -> StageOutlook:
        outlined = door.outlined_slides(self.cohort)
        if not outlined:
            return StageOutlook("lesions", words="nothing: no slide to test on has outlined lesions")
        todo = dict.fromkeys(outlined, "outlined")
        return StageOutlook("lesions", todo, words=f"judge the maps by the outlines of {len(outlined)} slides")

    @property
    def report(self) -> StageOutlook:
        again = " again" if StudyLayout(self.study).report.exists() else ""
        return StageOutlook("report", words=f"write report/index.html{again}")


def _why(note: str) -> str:
    """A stage's own note on a slide, as a reason."""
    return "new" if note == NEW else note.removeprefix("made ")
