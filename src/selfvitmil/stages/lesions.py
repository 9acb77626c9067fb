"""The stage `lesions`: heatmaps scored against annotated lesions; also `evaluate --lesions` and `compare --lesions`.

Heatmaps of test and validation slides are written first (by models that never saw them), then the labels are opened,
then annotated lesions and normal slides are compared with the heatmaps. Thresholds come from validation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selfvitmil.errors import ConfigError, MetricError, SelfVitMilError
from selfvitmil.stages.base import Basis, Engines, Estimate, Pending, Progress, Snapshot, Stage, StageResult
from selfvitmil.stages.localize import Mapper, choose_slides, split_failures
from selfvitmil.stages.train import (
    TWO_SCALES,
    compared_methods,
    heatmap_settings,
    lesion_baseline,
    options_for,
    prepare,
    results_name,
)
from selfvitmil.store.failures import Failure, record_failures
from selfvitmil.study import FeatureChoice, Study

if TYPE_CHECKING:
    from selfvitmil.annotations import Annotation
    from selfvitmil.cohort import Cohort
    from selfvitmil.commands.run import RunPlan
    from selfvitmil.localize.lesion_metrics import LesionCase, LesionScores
    from selfvitmil.localize.lesion_results import LesionTable
    from selfvitmil.stages.measure import Measures


PARTS = ("test", "val")
ScoredCases = dict[str, list["LesionCase"]]
"""Part -> its cases."""


@dataclass(frozen=True)
class LesionsResult(StageResult):
    """How well heatmaps show annotated lesions."""

    scores: LesionScores | None = None
    """Of one method."""
    comparison: LesionTable | None = None
    """Of several methods on the same slides."""
    folders: tuple[Path, ...] = ()
    """Folders of results that were added to: of the comparison, of the one method."""
    cases: FoundCases | None = field(default=None, repr=False)
    """What a comparison scored, for the scores of the one method."""


@dataclass(frozen=True)
class FoundCases:
    """Heatmaps of methods beside the annotations of their slides."""

    by_method: dict[str, ScoredCases]
    encoder: str
    failures: list[Failure]
    notes: list[str]


def evaluate_lesions(
    study: Study, choice: FeatureChoice, name: str | None = None, found: FoundCases | None = None
) -> LesionsResult:
    """Score the heatmaps of one method; adds `lesions.json`, `lesion_slides.csv` and `froc.svg` to its results.

    `found` are the cases of a comparison that was just made; without them heatmaps are written and read.
    """
    from selfvitmil.localize.lesion_metrics import score_lesions
    from selfvitmil.localize.lesion_results import write_lesion_scores

    settings, method = study.settings, study.settings.train.aggregator
    with study.lock("evaluate"):
        if found is None or method not in found.by_method:
            found = _lesion_cases(study, choice, [method], "evaluate")
        own, encoder, failures, notes = found.by_method[method], found.encoder, found.failures, list(found.notes)
        folder = study.layout.results(results_name(name, f"{encoder}_{method}", settings))
        _remove_earlier(folder)
        scores = score_lesions(own["test"], own["val"], settings.localize, settings.evaluate)
        undrawn = write_lesion_scores(folder, scores, protocol=settings.evaluate.protocol)
    notes += [f"note: {text}" for text in (*scores.warnings, *undrawn)]
    return LesionsResult(scores, folders=(folder,), failures=tuple(failures), notes=tuple(notes))


def compare_lesions(study: Study, choice: FeatureChoice, name: str | None = None) -> LesionsResult:
    """Score the heatmaps of many methods on the same slides; adds `lesions.md`, `.csv`, `.json` and `froc.svg`."""
    from selfvitmil.localize.lesion_metrics import common_cases, score_lesions
    from selfvitmil.localize.lesion_results import compare_lesions as side_by_side
    from selfvitmil.localize.lesion_results import write_lesion_table

    settings = study.settings
    rows = compared_methods(settings, two_scales=False)
    methods = [row.method for row in rows if row.method != TWO_SCALES and row.is_main_recipe]
    baseline = lesion_baseline(settings)
    if baseline not in methods:
        raise ConfigError(
            f"compare.baseline {baseline!r} is not among the methods that have heatmaps",
            code="baseline-without-heatmaps",
        )
    with study.lock("compare"):
        cases = _lesion_cases(study, choice, methods, "compare")
        found, failures, notes = cases.by_method, cases.failures, list(cases.notes)
        folder = study.layout.results(results_name(name, "compare", settings))
        _remove_earlier(folder)
        common, warned = common_cases({method: own["test"] for method, own in found.items()})
        scores = {
            method: score_lesions(common[method], found[method]["val"], settings.localize, settings.evaluate)
            for method in common
        }
        table = side_by_side(scores, baseline)
        undrawn = write_lesion_table(folder, table, protocol=settings.evaluate.protocol)
    notes += [f"note: {text}" for text in (*warned, *table.notes(definitions=False), *undrawn)]
    return LesionsResult(comparison=table, folders=(folder,), cases=cases, failures=tuple(failures), notes=tuple(notes))


def annotated_slides(cohort: Cohort) -> list[str]:
    """Return the test slides with annotated lesions, which heatmaps are scored against."""
    return [row.slide for row in cohort.rows if row.annotation is not None and row.split in ("test", None)]


# ---------------------------------------------------------------------------------------------------- both


def _lesion_cases(study: Study, choice: FeatureChoice, methods: Sequence[str], stage: str) -> FoundCases:
    """Write the heatmaps of all methods that are missing or stale, then read them beside the annotations."""
    from selfvitmil.evaluate import FINAL_SCORING, hold_out_test_labels
    from selfvitmil.localize.lesion_metrics import read_outlines
    from selfvitmil.outcomes import need_classes

    settings = study.settings
    prepared, learning = prepare(study, choice, stage)
    cases, features = learning.cases, learning.features
    need_classes(cases.outcome, stage, "annotations mark tumour, and heatmaps are scored against them")
    trial = hold_out_test_labels(cases, learning.splits, settings.evaluate)
    wanted, notes = choose_slides(trial, PARTS, (), cases.cohort)
    failures: list[Failure] = [*cases.failures]
    maps: dict[str, list[Path]] = {}
    known: dict[Any, Any] = {}
    for method in methods:
        train, num_classes = options_for(method, settings.train), trial.num_classes
        localize = heatmap_settings(method, train, num_classes, settings.localize, settings.train.aggregator)
        own = settings.model_copy(update={"train": train, "localize": localize})
        model = results_name(None, f"{features.encoder}_{method}", settings)
        mapper = Mapper(study.root, own, trial, cases.cohort, features, model, known)
        mapped, unmapped = split_failures(mapper.map_all(wanted))
        # A slide that failed now may have a heatmap of other models: it is not scored.
        maps[method] = [mapper.folder / f"{slide}.h5" for slide in wanted if slide in mapped]
        failures += [replace(failure, stage="lesions") for failure in unmapped]
    if not trial.optimistic:
        trial.labels.open(FINAL_SCORING)
    known.clear()
    found_cases: dict[str, ScoredCases] = {}
    read = cache(read_outlines)
    for method, paths in maps.items():
        found_cases[method], unscored = _cases_of(paths, cases.cohort, read)
        failures += unscored
    failures = list(dict.fromkeys(failures))
    record_failures(study.root, "lesions", wanted, [failure for failure in failures if failure.stage == "lesions"])
    return FoundCases(found_cases, features.encoder, failures, [*prepared, *(f"note: {text}" for text in notes)])


def _remove_earlier(folder: Path) -> None:
    """Remove earlier scores, which would pass for current ones where heatmaps can no longer be scored."""
    from selfvitmil.localize.lesion_results import LESION_FILES

    for name in LESION_FILES:
        (folder / name).unlink(missing_ok=True)


def _cases_of(
    maps: Sequence[Path], cohort: Cohort, read: Callable[[Path], tuple[Annotation, ...]]
) -> tuple[ScoredCases, list[Failure]]:
    """Return the heatmaps of a model beside the slides' annotations, by part."""
    from selfvitmil.localize.lesion_metrics import lesion_case

    found: ScoredCases = {part: [] for part in PARTS}
    failures: list[Failure] = []
    for path in maps:
        try:
            case = lesion_case(cohort[path.stem], path, read)
        except SelfVitMilError as error:
            failures.append(Failure.of(path.stem, "lesions", error))
            continue
        found[case.heatmap.prediction.part].append(case)
    return found, failures


LESIONS_S, LESIONS_TILE_S, BYTES_PER_TILE = 0.02, 1e-5, 60
"""Usual time to compare a slide's heatmap with its annotation, and size of a heatmap."""


class Lesions(Stage):
    """Score the heatmaps against annotated lesions."""

    name = "lesions"
    is_learning = True
    done_when_nothing_pending = True

    def pending(self, plan: RunPlan) -> Pending:
        if plan.labels is not None and plan.labels.outcome is not None:
            return Pending(words="nothing: annotations mark tumour, which is scored for classes only")
        annotated = annotated_slides(plan.cohort)
        if not annotated:
            return Pending(words="nothing: no test slide has annotated lesions")
        return Pending(
            dict.fromkeys(annotated, "annotated"),
            words=f"score the heatmaps by the annotations of {len(annotated)} slides",
        )

    def estimate(self, plan: RunPlan, measures: Measures) -> Estimate:
        methods = max(len(measures.bag_s), 1)
        slides = [row.slide for row in plan.cohort.rows if row.split in ("test", "val", None)]
        tiles = measures.tiles_of(slides)
        seconds = methods * (len(slides) * LESIONS_S + tiles * LESIONS_TILE_S)
        return Estimate(seconds, methods * tiles * BYTES_PER_TILE, 1e9, Basis.TYPICAL)

    def run(self, plan: RunPlan, engines: Engines) -> LesionsResult:
        choice = FeatureChoice(plan.encoder)
        try:
            compared = compare_lesions(plan.study, choice) if plan.has("compare") else LesionsResult()
            own = evaluate_lesions(plan.study, choice, found=compared.cases)
        except MetricError as error:  # the scores of slides, and the report, do not depend on it
            return LesionsResult(notes=(f"note: the heatmaps are not scored by the annotations: {error}",))
        return LesionsResult(
            own.scores,
            compared.comparison,
            (*compared.folders, *own.folders),
            failures=tuple(dict.fromkeys((*compared.failures, *own.failures))),
            notes=tuple(dict.fromkeys((*compared.notes, *own.notes))),
        )

    def status(self, snapshot: Snapshot) -> Iterable[Progress]:
        for folder in snapshot.layout.all_results():
            if (scored := folder / "lesions.json").exists():
                yield snapshot.progress(self.name, folder, [scored], 1)
