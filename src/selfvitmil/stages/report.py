"""The stage `report`: a study as one page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from selfvitmil.engine import Engine
from selfvitmil.errors import ConfigError
from selfvitmil.stages.base import Basis, Engines, Estimate, Pending, Progress, Snapshot, Stage, StageResult
from selfvitmil.study import Study

if TYPE_CHECKING:
    from selfvitmil.commands.run import RunPlan
    from selfvitmil.stages.measure import Measures


@dataclass(frozen=True)
class ReportResult(StageResult):
    """What `report` wrote."""

    page: Path
    shown_as: str
    """Its path relative to the study, or its name."""
    size_bytes: int
    num_sections: int
    """Slides with a section of their own."""
    num_with_heatmap: int
    """Slides that might have one."""
    most_slides: int
    key: str | None
    """The file in the study that is the key to the pseudonyms, where the page has pseudonyms."""


def report(
    study: Study,
    *,
    out: Path | None = None,
    pseudonyms: bool = False,
    results: Sequence[str] = (),
    slides: int | None = None,
    engine: Engine | None = None,
) -> ReportResult:
    """Write `report/index.html`, or `out`, with the help of the engine's workers where there is one.

    The study is only read, so this takes no lock and may run beside others.
    """
    from selfvitmil.report import MAX_SLIDES, write_report

    most, root = MAX_SLIDES if slides is None else slides, study.root
    if most < 0:
        raise ConfigError(
            f"--slides {most}", "a page cannot have fewer than none", "Give 0 or more", code="invalid-slide-count"
        )
    made = write_report(
        root, study.settings, out=out, pseudonyms=pseudonyms, results=tuple(results), most_slides=most, engine=engine
    )
    return ReportResult(
        made.path,
        study.layout.name(made.path) if made.path.is_relative_to(root) else made.path.name,
        made.size_bytes,
        made.num_sections,
        made.num_mapped,
        most,
        study.layout.pseudonyms.name if pseudonyms else None,
        notes=tuple(f"note: {problem}" for problem in made.problems),
    )


REPORT_S, REPORT_BYTES = 6.0, 20_000_000
"""Usual time and size of a report."""


class Report(Stage):
    """Write the report."""

    name = "report"
    is_essential = True

    def pending(self, plan: RunPlan) -> Pending:
        again = " again" if plan.layout.report.exists() else ""
        return Pending(words=f"write report/index.html{again}")

    def estimate(self, plan: RunPlan, measures: Measures) -> Estimate:
        return Estimate(REPORT_S, REPORT_BYTES, 1e9, Basis.TYPICAL)

    def run(self, plan: RunPlan, engines: Engines) -> ReportResult:
        return report(plan.study, engine=engines.slides)

    def status(self, snapshot: Snapshot) -> Iterable[Progress]:
        page = snapshot.layout.report
        if page.exists():
            yield snapshot.progress(self.name, page, [page], 1)
