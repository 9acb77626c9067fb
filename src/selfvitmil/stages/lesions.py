"""Heatmaps scored against annotations: what `evaluate --lesions` and `compare --lesions` add to the results of slides.

Test and validation slides are mapped first (by models that never saw them), then the labels are opened, then outlined
lesions and normal slides are compared with the maps. Thresholds come from validation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from selfvitmil import formatting
from selfvitmil.errors import ConfigError, MetricError, SelfVitMilError
from selfvitmil.settings import StudySettings
from selfvitmil.stages.base import Basis, Engines, Estimate, Pending, Progress, Snapshot, Stage
from selfvitmil.stages.localize import Mapper, choose_slides, split_failures
from selfvitmil.stages.measure import Measures
from selfvitmil.stages.run_plan import RunPlan
from selfvitmil.stages.train import below, prepare, results_name
from selfvitmil.store.failures import Failure, record_failures
from selfvitmil.store.layout import StudyLayout
from selfvitmil.study.features import FeatureChoice
from selfvitmil.study.folder import CohortSource, Summary, join_summaries, open_study
from selfvitmil.study.methods import TWO_SCALES, compared_methods, heatmap_settings, lesion_baseline, options_for
from selfvitmil.study.preflight import annotated_slides

if TYPE_CHECKING:
    from selfvitmil.cohort import Cohort
    from selfvitmil.localize.lesion_metrics import LesionCase


PARTS = ("test", "val")
ScoredCases = dict[str, list["LesionCase"]]
"""Part -> its cases."""


def evaluate_lesions(
    study: Path, source: CohortSource, choice: FeatureChoice, settings: StudySettings, name: str | None = None
) -> Summary:
    """Score the heatmaps of one method; adds `lesions.json`, `lesion_slides.csv` and `froc.svg` to its results."""
    from selfvitmil.localize.lesion_metrics import score_lesions
    from selfvitmil.localize.lesion_results import write_lesion_scores

    with open_study(study, "evaluate"):
        found_cases, encoder, failures, lines = _lesion_cases(
            study, source, choice, settings, [settings.train.aggregator], "evaluate"
        )
        (own,) = found_cases.values()
        folder = StudyLayout(study).results(results_name(name or f"{encoder}_{settings.train.aggregator}", settings))
        _remove_earlier(folder)
        scores = score_lesions(own["test"], own["val"], settings.localize, settings.evaluate)
        undrawn = write_lesion_scores(folder, scores, protocol=settings.evaluate.protocol)
    lines += [f"note: {text}" for text in (*scores.warnings, *undrawn)]
    lines.append(f"lesions.json, lesion_slides.csv and froc.svg in {below(study, folder)}")
    table = [("lesions", "value", f"{formatting.percent(settings.evaluate.confidence)} interval")]
    table += _score_rows(scores.to_json())
    return Summary(tuple(lines), tuple(failures), tuple(table))


def compare_lesions(
    study: Path, source: CohortSource, choice: FeatureChoice, settings: StudySettings, name: str | None = None
) -> Summary:
    """Score the heatmaps of many methods on the same slides; adds `lesions.md`, `.csv`, `.json` and `froc.svg`."""
    from selfvitmil.localize.lesion_metrics import common_cases, score_lesions
    from selfvitmil.localize.lesion_results import compare_lesions as side_by_side
    from selfvitmil.localize.lesion_results import write_lesion_table

    rows = compared_methods(settings, two_scales=False)
    methods = [row.method for row in rows if row.method != TWO_SCALES and row.is_main_recipe]
    baseline = lesion_baseline(settings)
    if baseline not in methods:
        raise ConfigError(f"compare.baseline {baseline!r} is not among the methods that have heatmaps")
    with open_study(study, "compare"):
        found_cases, _, failures, lines = _lesion_cases(study, source, choice, settings, methods, "compare")
        folder = StudyLayout(study).results(results_name(name or "compare", settings))
        _remove_earlier(folder)
        common, warned = common_cases({method: own["test"] for method, own in found_cases.items()})
        scores = {
            method: score_lesions(common[method], found_cases[method]["val"], settings.localize, settings.evaluate)
            for method in common
        }
        table = side_by_side(scores, baseline)
        undrawn = write_lesion_table(folder, table, protocol=settings.evaluate.protocol)
    lines += [f"note: {text}" for text in (*warned, *table.notes(), *undrawn)]
    lines.append(f"lesions.md, lesions.csv, lesions.json and froc.svg in {below(study, folder)}")
    return Summary(tuple(lines), tuple(failures), tuple(tuple(row) for row in table.cells()))


# ---------------------------------------------------------------------------------------------------- both


def _lesion_cases(
    study: Path,
    source: CohortSource,
    choice: FeatureChoice,
    settings: StudySettings,
    methods: Sequence[str],
    stage: str,
) -> tuple[dict[str, ScoredCases], str, list[Failure], list[str]]:
    """Method -> its maps beside annotations; the encoder; slides that failed; lines to print."""
    from selfvitmil.evaluate import FINAL_SCORING, hold_out_test_labels

    lines, cases, splits, features = prepare(study, source, choice, settings, stage)
    trial = hold_out_test_labels(cases, splits, settings.evaluate)
    wanted, notes = choose_slides(trial, PARTS, (), cases.cohort)
    failures: list[Failure] = [*cases.failures]
    maps: dict[str, list[Path]] = {}
    for method in methods:
        train, num_classes = options_for(method, settings.train), trial.num_classes
        localize = heatmap_settings(method, train, num_classes, settings.localize, settings.train.aggregator)
        own = settings.model_copy(update={"train": train, "localize": localize})
        model = results_name(f"{features.encoder}_{method}", settings)
        mapper = Mapper(study, own, trial, cases.cohort, features, model)
        mapped, unmapped = split_failures(mapper.map_all(wanted))
        # A slide that failed now may have a map of other models: it is not scored.
        maps[method] = [mapper.folder / f"{slide}.h5" for slide in wanted if slide in mapped]
        failures += [replace(failure, stage="lesions") for failure in unmapped]
    if not trial.optimistic:
        trial.labels.open(FINAL_SCORING)
    found_cases: dict[str, ScoredCases] = {}
    for method, paths in maps.items():
        found_cases[method], unscored = _cases_of(paths, cases.cohort)
        failures += unscored
    failures = list(dict.fromkeys(failures))
    record_failures(study, "lesions", wanted, [failure for failure in failures if failure.stage == "lesions"])
    return found_cases, features.encoder, failures, [*lines, *(f"note: {text}" for text in notes)]


def _remove_earlier(folder: Path) -> None:
    """Remove earlier scores, which would pass for current ones where heatmaps can no longer be scored."""
    from selfvitmil.localize.lesion_results import LESION_FILES

    for name in LESION_FILES:
        (folder / name).unlink(missing_ok=True)


def _cases_of(maps: Sequence[Path], cohort: Cohort) -> tuple[ScoredCases, list[Failure]]:
    """The maps of a model beside the slides' annotations, by part."""
    from selfvitmil.localize.lesion_metrics import lesion_case

    found: ScoredCases = {part: [] for part in PARTS}
    failures: list[Failure] = []
    for path in maps:
        try:
            case = lesion_case(cohort[path.stem], path)
        except SelfVitMilError as error:
            failures.append(Failure.of(path.stem, "lesions", error))
            continue
        found[case.heatmap.prediction.part].append(case)
    return found, failures


def _score_rows(told: Mapping[str, object]) -> list[tuple[str, str, str]]:
    """Scores with their limits, for the terminal."""
    scores = told["scores"]
    assert isinstance(scores, Mapping)
    rows: list[tuple[str, str, str]] = []
    for score in scores.values():
        if score is None or score.get("value") is None:
            continue
        rows.append((str(score["words"]), *formatting.value_and_limits(score)))
    return rows


LESIONS_S, LESIONS_TILE_S, BYTES_PER_TILE = 0.02, 1e-5, 60
"""Usual time to compare a slide's heatmap with its annotation, and size of a heatmap."""


class Lesions(Stage):
    """Score the heatmaps against annotated lesions."""

    name = "lesions"
    is_learning = True
    done_when_nothing_pending = True

    def pending(self, plan: RunPlan) -> Pending:
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

    def run(self, plan: RunPlan, engines: Engines) -> Summary:
        choice = FeatureChoice(plan.encoder)
        commands = [compare_lesions, evaluate_lesions] if plan.has("compare") else [evaluate_lesions]
        try:
            return join_summaries([each(plan.study, CohortSource(), choice, plan.settings) for each in commands])
        except MetricError as error:  # the scores of slides, and the report, do not depend on it
            return Summary((f"note: the heatmaps are not scored by the annotations: {error}",))

    def status(self, snapshot: Snapshot) -> Iterable[Progress]:
        for folder in snapshot.layout.all_results():
            if (scored := folder / "lesions.json").exists():
                yield snapshot.progress(self.name, folder, [scored], 1)
