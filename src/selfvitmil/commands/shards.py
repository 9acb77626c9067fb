"""`run --shard 3/40`: one of several processes, on one machine or many, that share the slides of a study.

All of them run the same command on a shared folder and need no server. A shard claims a slide, processes it, and
claims the next one: first those of its own part, then what others have not begun. It does what is done slide by slide:
`check`, `tile`, and `embed` where the encoder exists. Claims of a shard that gave no sign of life for some minutes are
void, and others take its slides over. The last shard to end assembles what a run of one process writes beside the
slides' own files (tables, failures.csv). If it cannot, `run` without --shard does so.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from selfvitmil.commands.run import (
    Request,
    as_before,
    device_engine,
    read_record,
    refuse_torchrun,
)
from selfvitmil.engine import Engine
from selfvitmil.engine.claims import Claims, Situation
from selfvitmil.errors import ConfigError, LockError
from selfvitmil.stages import STAGES
from selfvitmil.stages.base import SlideWork, Stage, StageResult
from selfvitmil.stages.check import check_files, check_study
from selfvitmil.store.failures import Failure
from selfvitmil.store.lock import ShardPresence, shard_lock
from selfvitmil.study import Study, encoder_sources, remember_settings

POLL_S = 1.0
ASSEMBLE_S = 30.0
"""How long two shards that end at the same moment try to become the one that assembles."""


@dataclass(frozen=True)
class Shard:
    """Which of how many processes this is."""

    index: int
    """From 1."""
    number: int
    expiry_s: float = 300.0
    """Without a sign of life for so long a shard counts as dead."""

    def __str__(self) -> str:
        return f"{self.index}/{self.number}"

    @classmethod
    def parse(cls, text: str, expiry_s: float = 300.0) -> Shard:
        """Return the shard that `3/40` names; raises ConfigError."""
        found = re.fullmatch(r"(\d+)/(\d+)", text.strip())
        if found is None or not 1 <= int(found[1]) <= int(found[2]):
            raise ConfigError(
                f"--shard {text}: not a shard",
                how="Use 1/40 to 40/40 for forty processes; in a Slurm array job "
                "--shard $SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT with --array=1-40",
                code="invalid-shard",
            )
        if expiry_s < 1:
            raise ConfigError(
                f"--shard-expiry {expiry_s:g}: too short",
                "a living shard would count as dead",
                "Use at least 1, and 300 on a network drive",
                code="invalid-shard",
            )
        return cls(int(found[1]), int(found[2]), expiry_s)

    def in_order(self, slides: Sequence[str]) -> list[str]:
        """Return the slides in the order in which this shard tries them: its own part first."""
        begin = (self.index - 1) * len(slides) // self.number
        return [*slides[begin:], *slides[:begin]]


@dataclass(frozen=True)
class ShardResult(StageResult):
    """What one shard of a run did."""

    shard: str
    done: Mapping[str, int]
    """Stage -> slides that this shard processed, failed ones too."""
    left: Mapping[str, int]
    """Stage -> slides that other shards still work on."""
    failed_here: tuple[Failure, ...] = ()
    """Slides that failed in this shard; another one tries them again."""
    encoder_missing: bool = False
    """Whether nothing was embedded because the encoder is not trained yet."""


def run_shard(
    study: Study, request: Request, shard: Shard, engine: Engine, typed: Mapping[str, Any] | None = None
) -> Iterator[StageResult]:
    """Do this shard's part of the work on slides, and assemble the results if it is the last one."""
    refuse_torchrun()
    _check_engine(study)
    request = as_before(request, read_record(study.root), study.root)
    check_study(study)
    check_files(study)
    stages, encoders = _shared_stages(study, request)
    course = _Course(study, shard)
    with (
        device_engine(study.settings, engine) as with_encoder,
        shard_lock(study.root, str(shard), shard.expiry_s) as presence,
    ):
        study.store_cohort()
        remember_settings(study.root, typed or {})
        for stage in stages:
            works = list(stage.slide_work(study, encoders))
            for work in works:
                is_last = stage is stages[-1] and work is works[-1]
                course.take(work, presence, with_encoder if stage.runs_encoder else engine, is_last=is_last)
        wants_embed = any(stage.name == "embed" for stage in request.stages)
        result = course.result(encoder_missing=wants_embed and not encoders)
    yield replace(result, notes=study.cohort_notes)
    if not result.left:
        yield from _assemble(study, stages, encoders, engine)


def _check_engine(study: Study) -> None:
    settings = study.settings.engine
    if settings.cluster is not None or settings.batch.kind != "none":
        raise ConfigError(
            "--shard goes neither with --cluster nor with --batch.kind",
            "a shard is one of several processes that share the slides without a scheduler",
            "Leave one of them out",
            code="conflicting-flags",
        )


def _shared_stages(study: Study, request: Request) -> tuple[list[Stage], list[str]]:
    """Return the stages that shards can do now, and the encoders to embed with; none where they are not trained."""
    places: dict[str, str] = {}
    if any(stage.name == "embed" for stage in request.stages):
        source = request.name or study.settings.pretrain.method if request.trains_encoder else str(request.encoder)
        places = encoder_sources(study.root, source)
        if request.trains_encoder and not all((Path(place) / "config.json").exists() for place in places.values()):
            places = {}
    stages = [stage for stage in STAGES if stage in request.stages and (stage.name != "embed" or places)]
    return [stage for stage in stages if stage.is_shared], list(places.values())


# ---------------------------------------------------------------------------------------------------- the work


@dataclass
class _Course:
    """The work of a shard as it goes on."""

    study: Study
    shard: Shard
    done: Counter[str] = field(default_factory=Counter)
    left: dict[str, int] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)

    def take(self, work: SlideWork, presence: ShardPresence, engine: Engine, *, is_last: bool) -> None:
        """Process slides until all are finished, or in the hands of shards that live.

        Before the last stage it waits for these too, since what follows needs their results.
        """
        if not work.jobs:
            return
        claims = Claims(self.study.claims_folder(work.stage), presence)
        slides = self.shard.in_order(list(work.jobs))
        seen: dict[str, float] = {}
        self.done[work.stage] += 0
        while True:
            situation = claims.situation(slides)
            if presence.lost:
                raise _lost(self.study, self.shard)
            if situation.free:
                self._process(work, claims, situation, engine)
                seen.clear()
            elif not situation.busy:
                return
            elif is_last and _all_alive(situation, presence, seen):
                self.left[work.stage] = len(situation.busy)
                return
            else:
                time.sleep(min(POLL_S, presence.expiry_s / 20))

    def _process(self, work: SlideWork, claims: Claims, situation: Situation, engine: Engine) -> None:
        def claim(slide: str) -> bool:
            return claims.take(slide, situation.free[slide])

        jobs = {slide: work.jobs[slide] for slide in situation.free}
        for outcome in engine.map(work.function, jobs, stage=work.stage, claim=claim, **work.options):
            failure = outcome.failure
            value = None if failure is not None or work.record is None else work.record(outcome.value)
            claims.finish(outcome.name, failed=failure is not None, value=value)
            self.done[work.stage] += 1
            if failure is not None:
                self.failures.append(failure)

    def result(self, *, encoder_missing: bool) -> ShardResult:
        return ShardResult(
            str(self.shard),
            dict(self.done),
            dict(self.left),
            failed_here=tuple(self.failures),
            encoder_missing=encoder_missing,
        )


def _all_alive(situation: Situation, presence: ShardPresence, seen: dict[str, float]) -> bool:
    """Return whether every shard that holds slides has given a sign of life since it was first looked at (`seen`)."""
    alive = presence.others_alive()
    renewed = [(token, alive.get(token)) for token in set(situation.busy.values())]
    return all(time is not None and seen.setdefault(token, time) != time for token, time in renewed)


def _lost(study: Study, shard: Shard) -> LockError:
    return LockError(
        f"{study.name}: shard {shard} gave no sign of life for more than {shard.expiry_s:.0f} s",
        "it was suspended or cut off from the folder, and others have taken its slides over",
        "Nothing is lost; the same command joins in again if there is anything left to do",
        code="shard-lost",
    )


# ---------------------------------------------------------------------------------------------------- the end


def _assemble(study: Study, stages: Sequence[Stage], encoders: Sequence[str], engine: Engine) -> Iterator[StageResult]:
    """Write what one process writes beside the files of slides, as far as no other shard does so; yield the results."""
    until = time.monotonic() + ASSEMBLE_S
    while left := [stage for stage in stages if study.claims(stage.name)]:
        try:
            yield left[0].assemble(study, encoders, engine)
        except LockError:
            if time.monotonic() > until:
                break
            time.sleep(0.2 + time.monotonic() % 0.3)  # so that two do not try in step
