"""What a stage of a run is. `run`, `plan` and `status` are loops over the one list of them, `stages.STAGES`.

A stage lives in one file with its command's function and a `Stage` that says how it takes part in a run: what would
stop it (`preflight`), what is left to do (`pending`), what that takes (`estimate`), how it is done (`run`) and how far
it is (`status`).
"""

from __future__ import annotations

import copy
import io
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from selfvitmil.errors import ConfigError, SelfVitMilError
from selfvitmil.store.failures import Failure
from selfvitmil.store.layout import StudyLayout
from selfvitmil.store.provenance import MISSING, Freshness, describe_changes

if TYPE_CHECKING:
    from selfvitmil.commands.run import RunPlan
    from selfvitmil.engine import Engine
    from selfvitmil.stages.measure import Measures
    from selfvitmil.study import Study


@dataclass(frozen=True)
class StageResult:
    """What a stage or a command did, as data; `rendering` has the words for it. Subclasses add what they produced."""

    failures: tuple[Failure, ...] = field(default=(), kw_only=True)
    """Slides that could not be processed."""
    notes: tuple[str, ...] = field(default=(), kw_only=True)
    """What was noticed on the way and deserves a line."""
    interrupted: bool = field(default=False, kw_only=True)
    """Whether a signal ended the work early."""

    def _repr_html_(self) -> str:
        from selfvitmil.rendering import to_html

        return to_html(self)


def data_frame(rows: Sequence[Mapping[str, Any]], index: str, *, parse: bool = False) -> Any:
    """Return rows as a pandas DataFrame with one of their columns as index; `parse` turns text into numbers.

    Raises ConfigError without pandas.
    """
    try:
        import pandas  # pyright: ignore[reportMissingTypeStubs]
    except ImportError:
        raise ConfigError(
            "to_frame needs pandas", "it is not installed", "Run pip install pandas, or use .rows", code="no-pandas"
        ) from None
    frame: Any = pandas.DataFrame(list(rows))
    if parse:
        frame = cast("Any", pandas).read_csv(io.StringIO(frame.to_csv(index=False)))
    return frame.set_index(index)


@dataclass(frozen=True)
class Pending:
    """What one stage has left to do."""

    todo: Mapping[str, str] = field(default_factory=dict[str, str])
    """Slide (or encoder) -> why it is to be built."""
    num_up_to_date: int = 0
    hopeless: frozenset[str] = frozenset()
    """Those of `todo` that failed the last time or cannot be read. They are tried, but nothing is expected of them."""
    words: str = ""
    """Shown instead of the counts, for stages that do not work slide by slide."""

    @property
    def changing(self) -> frozenset[str]:
        """What is expected to differ afterwards."""
        return frozenset(self.todo) - self.hopeless

    @property
    def line(self) -> str:
        """One line for people."""
        if self.words:
            return self.words
        if not self.todo:
            return f"up to date ({self.num_up_to_date} slides)"
        reasons: dict[str, list[str]] = {}
        for slide, reason in self.todo.items():
            reasons.setdefault(reason, []).append(slide)
        parts = [f"{len(slides)} {why}" + (f" ({slides[0]})" * (len(slides) == 1)) for why, slides in reasons.items()]
        left = f"; {self.num_up_to_date} up to date" if self.num_up_to_date else ""
        return f"{len(self.todo)} slides to do: {', '.join(parts)}{left}"


class Basis(StrEnum):
    """Where an estimate of time comes from, from the surest to the least sure."""

    RECORDED = "recorded"
    """The rate that an earlier part of the same work logged."""
    MEASURED = "measured"
    """The same computation was timed on this machine."""
    DERIVED = "derived"
    """Computed from another measurement, for instance by the number of floating-point operations."""
    TYPICAL = "typical"
    """A constant that was measured on the demo study."""
    UNKNOWN = "unknown"
    NOTHING = ""
    """There is nothing to do."""


ERROR_FACTORS = {Basis.RECORDED: 1.5, Basis.MEASURED: 2.5, Basis.DERIVED: 3.0, Basis.TYPICAL: 4.0}
"""By which factor an estimate may well be off. On the demo: measured 1.8 to 4.3, derived 1.0 to 2.0."""
STAGE_S = 1.0
"""Time that any stage may take for imports and files."""


@dataclass(frozen=True)
class Estimate:
    """What a stage takes on this machine."""

    seconds: float = 0.0
    """NaN where it is unknown."""
    disk: float = 0.0
    """Bytes written."""
    memory: float = 0.0
    """Bytes needed at once; of the GPU where `on_gpu`."""
    basis: Basis = Basis.NOTHING
    on_gpu: bool = False

    @property
    def range_s(self) -> tuple[float, float]:
        """Seconds that are to be expected, least and most."""
        factor = ERROR_FACTORS.get(self.basis, 1.0)
        return self.seconds / factor, self.seconds * factor + (STAGE_S if self.basis else 0.0)


class CheckStatus(StrEnum):
    """Outcome of one check of `doctor`."""

    PASS = "PASS"
    WARN = "WARN"
    FAIL = "FAIL"


@dataclass(frozen=True)
class MachineCheck:
    """One requirement that `doctor` checked on this machine."""

    name: str
    status: CheckStatus
    found: str
    code: str = ""
    """Kind of problem, for programs: `"no-gpu"`; empty where the check passed."""
    remedy: str = ""
    """What fixes it; empty where the check passed."""


def passed(name: str, found: str) -> MachineCheck:
    """Return a check that passed."""
    return MachineCheck(name, CheckStatus.PASS, found)


@dataclass(frozen=True)
class Progress:
    """How far a stage is, in one folder of the study."""

    stage: str
    place: str
    """The folder, relative to the study."""
    done: int
    asked: int | None
    """Slides of the cohort (or 1 for a single product), where that is what is counted."""
    failed: int
    newest: float | None
    """Modification time of the newest file, in seconds since 1970."""
    words: str = ""

    @property
    def complete(self) -> bool:
        return self.asked is not None and self.done + self.failed >= self.asked


@dataclass(frozen=True)
class Snapshot:
    """The files of a study as `status` sees them: without its lock, without torch."""

    study: Path
    slides: frozenset[str] | None
    """Slides of the cohort; None where there is no readable cohort.csv."""
    failed: Counter[str]
    """Stage -> slides in failures.csv."""

    @property
    def layout(self) -> StudyLayout:
        return StudyLayout(self.study)

    @property
    def num_slides(self) -> int | None:
        return None if self.slides is None else len(self.slides)

    def progress(
        self,
        stage: str,
        place: Path,
        files: Iterable[Path],
        asked: int | None,
        *,
        done: int | None = None,
        failed_as: str | None = None,
        words: str = "",
    ) -> Progress:
        """Progress in `place` by the files that exist there; `done` counts them unless given."""
        found = [path for path in files if path.exists()]
        newest = max((path.stat().st_mtime for path in found), default=None)
        failed = self.failed[stage if failed_as is None else failed_as]
        return Progress(
            stage, self.layout.name(place), len(found) if done is None else done, asked, failed, newest, words
        )

    def slide_files(self, stage: str, folder: Path, failed_as: str) -> Progress:
        """Progress of a stage that writes `<slide>.h5`."""
        found = [path for path in folder.glob("*.h5") if self.slides is None or path.stem in self.slides]
        return self.progress(stage, folder, found, self.num_slides, failed_as=failed_as)


@dataclass(frozen=True)
class Engines:
    """The workers of a run."""

    slides: Engine
    device: Engine
    """Fewer of them where each needs a GPU."""


@dataclass(frozen=True)
class SlideWork:
    """Work on single slides, which several shards of a run may share: what `Engine.map` gets."""

    stage: str
    """As failures.csv calls it."""
    function: Callable[[Any], Any]
    jobs: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Further arguments of `Engine.map`."""
    record: Callable[[Any], Any] | None = None
    """What assembling needs of a result beyond the study's files, as JSON can hold it."""


class Stage(ABC):
    """One stage of a run. Objects hold no state."""

    name: str
    in_run: bool = True
    """Whether `run` goes through it; `train` is part of `compare` and `evaluate` there."""
    is_learning: bool = False
    """Whether it needs slide labels."""
    by_target: bool = False
    """Whether it is gone through once for each of the targets that are trained jointly."""
    runs_encoder: bool = False
    """Whether it is many times quicker with a GPU."""
    is_shared: bool = False
    """Whether shards of a run can share its work (`slide_work`)."""
    by_slide: bool = False
    """Whether it is complete once every slide of the cohort has a file (or has failed)."""
    is_essential: bool = False
    """Whether a study without any of its results is not finished."""
    done_when_nothing_pending: bool = False
    """Whether an empty `Pending.todo` means that the stage can be skipped."""

    def preflight(self, plan: RunPlan) -> None:
        """Raise the error that the stage would otherwise end in hours later. Reads only."""
        del plan

    def doctor(self) -> Iterable[MachineCheck]:
        """Yield what the stage needs of a machine (devices, libraries) and whether it is there; nothing by default."""
        return ()

    def slide_work(self, study: Study, encoders: Sequence[str]) -> Iterable[SlideWork]:
        """Return the work that shards of a run may share; none by default. `encoders` are for the stage that embeds."""
        del study, encoders
        return ()

    def assemble(self, study: Study, encoders: Sequence[str], engine: Engine) -> StageResult:
        """Do the stage, with what shards of a run have done of its `slide_work`; only for stages that have such."""
        raise AssertionError(f"{self.name} has no work that shards share")

    @abstractmethod
    def pending(self, plan: RunPlan) -> Pending:
        """Return what is left to do. Reads only."""

    @abstractmethod
    def estimate(self, plan: RunPlan, measures: Measures) -> Estimate:
        """Estimate time, disk and memory of what is pending."""

    @abstractmethod
    def run(self, plan: RunPlan, engines: Engines) -> StageResult:
        """Do it."""

    def status(self, snapshot: Snapshot) -> Iterable[Progress]:
        """Yield how far the stage is, folder by folder. Must not load torch."""
        del snapshot
        return ()

    def is_idle(self, plan: RunPlan) -> bool:
        """Whether `run` can skip the stage: nothing is pending, and shards left nothing to be assembled."""
        is_done = self.done_when_nothing_pending and not plan.pending(self.name).todo
        return is_done and not plan.study.claims(self.name)

    def estimate_pending(self, plan: RunPlan, measures: Measures) -> Estimate:
        """Estimate, or an empty one where nothing is pending."""
        if self.done_when_nothing_pending and not plan.pending(self.name).todo:
            return Estimate()
        return self.estimate(plan, measures)


def unknown(*, on_gpu: bool) -> Estimate:
    """Return the estimate of a stage whose rate is not known."""
    return Estimate(seconds=float("nan"), basis=Basis.UNKNOWN, on_gpu=on_gpu)


def why_build(freshness: Freshness) -> str:
    """Return why an artefact is to be built."""
    return "new" if freshness == MISSING else f"stale: {describe_changes(freshness.changes)}"


@contextmanager
def nothing_done() -> Generator[None]:
    """Add to an error raised inside that nothing was done."""
    try:
        yield
    except SelfVitMilError as error:
        raise say_nothing_done(error, error.how) from None


def say_nothing_done(error: SelfVitMilError, how: str) -> SelfVitMilError:
    """Return the error with another remedy, and that nothing was done."""
    changed = copy.copy(error)  # with its code and the fields of its class
    changed.how = f"{how}. Nothing was done" if how else "Nothing was done"
    changed.args = (changed.what, changed.why, changed.how)
    return changed
