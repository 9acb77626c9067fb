"""The command `report`: a study as one page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from selfvitmil.errors import ConfigError
from selfvitmil.settings import StudySettings
from selfvitmil.stages.base import Basis, Engines, Estimate, Pending, Progress, Snapshot, Stage
from selfvitmil.stages.measure import Measures
from selfvitmil.stages.run_plan import RunPlan
from selfvitmil.store.layout import StudyLayout
from selfvitmil.study.folder import Summary


def report(
    study: Path,
    settings: StudySettings,
    *,
    out: Path | None = None,
    pseudonyms: bool = False,
    results: Sequence[str] = (),
    slides: int | None = None,
) -> Summary:
    """Write `report/index.html`, or `out`. The study is only read, so this takes no lock and may run beside others."""
    from selfvitmil.report import MAX_SLIDES, write_report

    most = MAX_SLIDES if slides is None else slides
    if most < 0:
        raise ConfigError(f"--slides {most}", "a page cannot have fewer than none", "Give 0 or more")
    made = write_report(study, settings, out=out, pseudonyms=pseudonyms, results=tuple(results), most_slides=most)
    lines = [f"note: {problem}" for problem in made.problems]
    if made.num_mapped > made.num_sections:
        lines.append(f"{made.num_sections} of {made.num_mapped} slides with heatmaps have a section (--slides {most})")
    if pseudonyms:
        lines.append(
            f"{StudyLayout(study).pseudonyms.name} in the study is the key to the pseudonyms: keep it to yourself"
        )
    where = made.path.relative_to(study).as_posix() if made.path.is_relative_to(study) else made.path.name
    lines.append(f"{where}: one page of {made.size_bytes / 1e6:.1f} MB, for any browser")
    return Summary(tuple(lines))


REPORT_S, REPORT_BYTES = 6.0, 20_000_000
"""Usual time and size of a report."""


class Report(Stage):
    """Write the report."""

    name = "report"

    def pending(self, plan: RunPlan) -> Pending:
        again = " again" if plan.layout.report.exists() else ""
        return Pending(words=f"write report/index.html{again}")

    def estimate(self, plan: RunPlan, measures: Measures) -> Estimate:
        return Estimate(REPORT_S, REPORT_BYTES, 1e9, Basis.TYPICAL)

    def run(self, plan: RunPlan, engines: Engines) -> Summary:
        return report(plan.study, plan.settings)

    def status(self, snapshot: Snapshot) -> Iterable[Progress]:
        page = snapshot.layout.report
        if page.exists():
            yield snapshot.progress(self.name, page, [page], 1)
