"""A study on disk, for all commands: its settings, its cohort, its lock; and how a stage is run over its slides."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, TypeVar, cast

from selfvitmil.cohort import Cohort, merge_cohorts, read_cohort, with_guessed_patients, write_cohort
from selfvitmil.engine import Engine
from selfvitmil.errors import ConfigError
from selfvitmil.formatting import html_table
from selfvitmil.settings import StudySettings, check_study_engine, read_toml, resolve_settings, with_user_engine
from selfvitmil.store.failures import Failure, record_failures
from selfvitmil.store.files import remove_leftovers
from selfvitmil.store.layout import StudyLayout
from selfvitmil.store.lock import study_lock
from selfvitmil.store.provenance import MISSING, BuildOutcome, BuildStatus, Freshness, describe_changes

T = TypeVar("T")


@dataclass(frozen=True)
class Summary:
    """What a command did, for people: `lines` to print, and the failures among its slides."""

    lines: tuple[str, ...]
    failures: tuple[Failure, ...] = ()
    table: tuple[tuple[str, ...], ...] = ()
    """Rows to show, header first."""
    interrupted: bool = False
    """Whether a signal ended the work before its end."""

    def _repr_html_(self) -> str:
        """Return the table and the lines, for notebooks."""
        failed = [f"FAILED {each.slide} ({each.stage}): {each.reason}. {each.remedy}" for each in self.failures]
        lines = "<br>".join(map(escape, (*self.lines, *failed)))
        return (html_table(self.table) if self.table else "") + f"<p>{lines}</p>"


@dataclass(frozen=True)
class CohortSource:
    """Where a study's slides come from, when it is not yet (or no longer only) its own cohort.csv."""

    cohort: Path | None = None
    labels: Path | None = None
    label_column: str | None = None
    slides_folder: Path | None = None
    features: Path | None = None
    """A folder of feature files that stand for slides which are not at hand."""


@contextmanager
def open_study(study: Path, command: str) -> Iterator[None]:
    """Hold the study's lock, with what a killed run left behind swept away."""
    with study_lock(study, command):
        remove_leftovers(study)
        yield


def study_settings(study: Path, flags: Mapping[str, Any]) -> StudySettings:
    """Settings of a study: its `study.toml` if there is one, the user's own engine settings and `flags` on top."""
    toml_file = StudyLayout(study).settings
    if not toml_file.exists():
        return resolve_settings(None, with_user_engine(flags))
    told = read_toml(toml_file)
    check_study_engine(told, toml_file.name)
    return resolve_settings(toml_file, with_user_engine(flags, told.get("engine")))


def study_cohort(study: Path, source: CohortSource) -> tuple[Cohort, list[str]]:
    """The study's cohort, extended by what `source` gives, and stored; and lines that tell what was added."""
    cohort, lines = find_cohort(study, source)
    store_cohort(study, cohort)
    return cohort, lines


def store_cohort(study: Path, cohort: Cohort) -> None:
    """Write the study's cohort.csv, unless it says the same already."""
    own = StudyLayout(study).cohort
    if not own.exists() or read_cohort(own).rows != cohort.rows:
        write_cohort(own, cohort)


def find_cohort(study: Path, source: CohortSource) -> tuple[Cohort, list[str]]:
    """The cohort as `study_cohort` would store it, without storing it; patients are guessed where no table has them."""
    cohort, lines = _read_cohort(study, source)
    cohort, guess = with_guessed_patients(cohort)
    return cohort, [*lines, *([f"note: {guess}"] if guess is not None else [])]


def _read_cohort(study: Path, source: CohortSource) -> tuple[Cohort, list[str]]:
    own = StudyLayout(study).cohort
    table = own if source.cohort is None else source.cohort
    is_own = table.resolve() == own.resolve()
    if is_own and not own.exists():
        raise ConfigError(
            f"{study.name}: this study has no cohort.csv yet",
            "so there is nothing to work on",
            "Give --cohort with a folder of slides or a table of them",
        )
    if is_own:
        _refuse_idle_flags(source)
        if source.labels is None:
            return read_cohort(own), []
    cohort = read_cohort(
        table,
        labels=source.labels,
        label_column=source.label_column,
        slides_folder=source.slides_folder,
        features=_feature_files(source.features),
    )
    lines: list[str] = []
    if own.exists():
        cohort, report = merge_cohorts(read_cohort(own), cohort)
        lines = [
            f"cohort.csv: {text}: {', '.join(slides)}"
            for text, slides in (
                ("new slides", report.added),
                ("fields filled", report.filled),
                ("files found in a new place", report.moved),
                ("not in the given table, but kept", report.only_old),
            )
            if slides
        ]
    return cohort, [*lines, *(f"note: {warning}" for warning in cohort.warnings)]


def _refuse_idle_flags(source: CohortSource) -> None:
    """ConfigError for flags that say how to read a table which was not given: the study's own needs none of them."""
    if source.slides_folder is not None:
        raise ConfigError(
            f"--slides-folder {source.slides_folder.name} without a table that needs it",
            "the study's cohort.csv names the files of its slides itself",
            "Give the table with --cohort, or correct the column path of cohort.csv",
        )
    if source.label_column is not None and source.labels is None:
        raise ConfigError(
            f"--label-column {source.label_column} without a table of labels",
            "in the study's cohort.csv the column of the label is `label`",
            "Give the table with --labels",
        )


def _feature_files(folder: Path | None) -> Mapping[str, Path] | None:
    if folder is None:
        return None
    from selfvitmil.bags import find_bags

    return find_bags(folder)


def map_slides(
    engine: Engine, study: Path, stage: str, function: Callable[[Any], T], jobs: Mapping[str, Any], **progress: Any
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
        record_failures(study, stage, [*done, *(failure.slide for failure in failures)], failures)
    return {name: done[name] for name in jobs if name in done}, failures


def rebuilt_lines(outcomes: Mapping[str, BuildOutcome]) -> list[str]:
    """Return why slides were rebuilt, one line per reason."""
    reasons: dict[str, list[str]] = {}
    for slide, outcome in outcomes.items():
        if outcome.status is BuildStatus.REBUILT:
            reasons.setdefault(str(outcome), []).append(slide)
    return [f"{slides[0] if len(slides) == 1 else f'{len(slides)} slides'} {why}" for why, slides in reasons.items()]


def outcomes_of(done: Mapping[str, Any]) -> dict[str, BuildOutcome]:
    """Return the outcomes of a stage's results, by slide."""
    return {slide: result.outcome for slide, result in done.items()}


def few(lines: list[str], where: str, most: int = 40) -> list[str]:
    """The first lines, and where the others are to be found."""
    more = len(lines) - most
    return lines if more <= 0 else [*lines[:most], f"... and {more} more, see {where}"]


def cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.5g}"
    return "; ".join(value) if isinstance(value, tuple | list) else "" if value is None else str(value)


def num_tiles(result: Any) -> int:
    """What the progress of stages on tiles counts."""
    return result.num_tiles


def join_summaries(summaries: Sequence[Summary]) -> Summary:
    """Join summaries into one, with the table of the first."""
    lines = [line for summary in summaries for line in summary.lines]
    failures = [failure for summary in summaries for failure in summary.failures]
    return Summary(tuple(dict.fromkeys(lines)), tuple(dict.fromkeys(failures)), summaries[0].table)


def why_build(freshness: Freshness) -> str:
    """Return why an artefact is to be built."""
    return "new" if freshness == MISSING else f"stale: {describe_changes(freshness.changes)}"
