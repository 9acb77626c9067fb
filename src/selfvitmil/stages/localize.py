"""The stage `localize`: heatmaps of slides by trained models, and what is made from heatmaps.

Models are not trained here: they must exist and be up to date, so that heatmaps show what was evaluated. A slide is
mapped by the models of a split in which it is a test slide (or has another of `localize.parts`); threshold and decision
come from that split's validation slides as in `evaluate`, and the labels of test slides stay held out.

Scores are computed in this process, slide by slide; lesions, pictures and exports by the workers (`products.py`).
"""

from __future__ import annotations

import csv
import json
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from selfvitmil.cohort import Cohort
from selfvitmil.cohort.table import listing
from selfvitmil.engine import Engine, show_progress
from selfvitmil.errors import ArtefactError, ConfigError, SelfVitMilError
from selfvitmil.settings import StudySettings, tiling_name, to_toml
from selfvitmil.slides import SlideRef
from selfvitmil.stages.base import (
    Basis,
    Engines,
    Estimate,
    Pending,
    Progress,
    Snapshot,
    Stage,
    StageResult,
    nothing_done,
)
from selfvitmil.stages.train import prepare, results_name
from selfvitmil.store.failures import Failure, record_failures
from selfvitmil.store.files import file_fingerprint, hash_of, write_csv, write_text
from selfvitmil.store.layout import StudyLayout
from selfvitmil.store.provenance import (
    MISSING,
    UP_TO_DATE,
    BuildOutcome,
    Freshness,
    Provenance,
    damaged,
    failed,
    outcome_of,
)
from selfvitmil.study import FeatureChoice, Features, Study, map_slides

if TYPE_CHECKING:
    from selfvitmil.aggregate import Aggregator
    from selfvitmil.aggregate.base import TileScores
    from selfvitmil.aggregate.train import BagStore
    from selfvitmil.annotations import Annotation
    from selfvitmil.bags import Bag
    from selfvitmil.commands.run import RunPlan
    from selfvitmil.evaluate import Case, Trial
    from selfvitmil.evaluate.dataset import BagFile, TrialSplit
    from selfvitmil.evaluate.predictions import Choice
    from selfvitmil.localize.export import ExportJob, ExportResult
    from selfvitmil.localize.heatmap import Heatmap, SlidePrediction, TilePlacement
    from selfvitmil.localize.scores import HeatmapSource
    from selfvitmil.stages.measure import Measures
    from selfvitmil.tiles import TileTable


VERSION = 3
"""Version of the heatmaps; a higher one makes stored ones stale. Since 2 CLAM scores the classes of a tile one by one;
since 3 `auto` chooses by annotated validation slides, and prefers tile scores to attention without them."""
SECTIONS = {"preset", "tile", "slide", "train", "evaluate", "localize"}
MAP_SETTINGS = {"score", "scale", "z_limit", "gate", "of_class"}
"""Settings of `localize` that change heatmaps; the others change what is made from them."""
DECISIONS = {"protocol", "threshold", "calibration"}
"""Settings of `evaluate` that change a slide's decision."""
Part = Literal["test", "val", "train"]
PARTS: tuple[Part, ...] = ("test", "val", "train")
WRITERS = 4
"""Threads that write heatmaps while the next slides are scored: syncing a file to disk takes longer than scoring it."""
MOST_UNWRITTEN = 16
"""Heatmaps that may wait to be written, so that memory does not grow with the number of slides."""
T = TypeVar("T")


@dataclass(frozen=True)
class LocalizeResult(StageResult):
    """What `localize` did."""

    folder: Path
    """Folder of the heatmaps."""
    outcomes: Mapping[str, BuildOutcome]
    """Slides that have a heatmap now."""
    exports: Mapping[str, ExportResult]
    """Lesions, highest-scoring tiles and exported files of every slide."""


def localize(
    study: Study, choice: FeatureChoice, engine: Engine, name: str | None = None, slides: Sequence[str] = ()
) -> LocalizeResult:
    """Draw heatmaps by trained models; writes `maps/<name>/`. `slides` names some, else those of `localize.parts`."""
    from selfvitmil.evaluate import hold_out_test_labels

    root = study.root
    with study.lock("localize"):
        notes, learning = prepare(study, choice, "localize")
        from selfvitmil.localize.export import export_heatmap  # loads matplotlib: not before the first line of output

        cases, features = learning.cases, learning.features
        settings, staged = with_staging(study.settings, cases.cohort)
        notes += staged
        trial = hold_out_test_labels(cases, learning.splits, settings.evaluate)
        _check_of_class(trial, settings.localize.of_class)  # refused before anything is computed
        failed = {failure.slide for failure in cases.failures}
        wanted, chosen = choose_slides(trial, settings.localize.parts, slides, cases.cohort, failed)
        model = results_name(name, f"{features.encoder}_{settings.train.aggregator}", settings)
        mapper = Mapper(root, settings, trial, cases.cohort, features, model)
        mapped, failures = split_failures(mapper.map_all(wanted))
        record_failures(root, "localize", wanted, failures)
        jobs = {slide: mapper.export_job(slide) for slide in wanted if slide in mapped}
        made, unmade = map_slides(engine, root, "localize", export_heatmap, jobs)
        failures += unmade + [result.failure for result in made.values() if result.failure is not None]
        record_failures(root, "localize", wanted, failures)
        write_tables(mapper.folder, made, wanted)
        write_text(mapper.folder / "settings.toml", to_toml(settings, SECTIONS))
    notes += [f"note: {text}" for text in (*trial.warnings, *chosen)]
    failures = (*cases.failures, *failures)
    return LocalizeResult(mapper.folder, mapped, made, failures=failures, notes=tuple(notes))


def _check_of_class(trial: Trial, of_class: str | None) -> None:
    """Raise ConfigError for a class, or label, that heatmaps cannot show."""
    from selfvitmil.localize.scores import check_shown, shown_class

    if trial.outcome is None:
        shown_class(trial.class_names, 0, of_class)
    else:
        check_shown(trial.outcome, of_class)


def with_staging(settings: StudySettings, cohort: Cohort) -> tuple[StudySettings, list[str]]:
    """The settings with `localize.staging` resolved for this cohort, and what to print of it."""
    from selfvitmil.cohort.camelyon16 import has_camelyon16_names

    if settings.localize.staging != "auto":
        return settings, []
    lymph_nodes = has_camelyon16_names(cohort.slides)
    staging = "lymph-node" if lymph_nodes else "none"
    info = ["sizes of lesions come with the terms of lymph nodes: the slides have Camelyon16's names"] * lymph_nodes
    return settings.model_copy(update={"localize": settings.localize.model_copy(update={"staging": staging})}), info


# ---------------------------------------------------------------------------------------------------- which slides


@dataclass(frozen=True, eq=False)
class Wanted:
    """A slide, and the models whose heatmap it gets."""

    case: BagFile
    split: TrialSplit
    part: Part


def choose_slides(
    trial: Trial, parts: Sequence[Part], slides: Sequence[str], cohort: Cohort, failed: Collection[str] = ()
) -> tuple[dict[str, Wanted], list[str]]:
    """Return the slides that get a heatmap, each with the first split that has it in the first of `parts`; and notes.

    Named `slides` are taken from whatever part they are in. ConfigError or CohortError where one has no split.
    """
    found: dict[str, Wanted] = {}
    again: set[str] = set()
    for part in PARTS if slides else dict.fromkeys(parts):
        for split in trial.splits:
            for case in getattr(split, part):
                first = found.setdefault(case.slide, Wanted(case, split, part))
                if first.part == part and first.split is not split:
                    again.add(case.slide)
    for slide in slides:
        if cohort[slide].slide not in found and slide not in failed:
            raise ConfigError(
                f"{slide}: no split has this slide",
                "it has no label, or the splits leave it out",
                "Use `selfvitmil predict` for slides that take no part in a study's splits",
                code="slide-in-no-split",
            )
    names = dict.fromkeys(slides) if slides else found
    chosen = {slide: found[slide] for slide in names if slide in found}
    if not chosen and not slides:
        raise ConfigError(
            f"localize.parts {', '.join(parts)}",
            "no split has slides in these parts",
            "Name others",
            code="empty-parts",
        )
    notes: list[str] = []
    if several := [slide for slide in chosen if slide in again]:
        notes.append(f"{listing(several)}: in the same part of several splits; mapped by the models of the first")
    if learned := [slide for slide, each in chosen.items() if each.part == "train"]:
        notes.append(f"the models were trained on {listing(learned)}: their heatmaps are optimistic")
    return chosen, notes


# ---------------------------------------------------------------------------------------------------- heatmaps


@dataclass(frozen=True, eq=False)
class Prepared:
    """What is known of a slide before anything is scored."""

    wanted: Wanted
    bag: Bag
    table: TileTable | None
    placement: TilePlacement
    provenance: Provenance
    freshness: Freshness


@dataclass(frozen=True, eq=False)
class Mapper:
    """Computes the heatmaps of one study by the models of one method."""

    study: Path
    settings: StudySettings
    trial: Trial
    cohort: Cohort
    features: Features
    model: str
    known: dict[Any, Any] = field(default_factory=dict)
    """What is known of slides whatever the method: mappers of several methods share it, so each file is read once."""

    @property
    def folder(self) -> Path:
        return StudyLayout(self.study).heatmaps(self.model)

    @property
    def method(self) -> str:
        return self.settings.train.aggregator

    def map_all(self, wanted: Mapping[str, Wanted]) -> dict[str, BuildOutcome]:
        """Write the heatmaps that are missing or stale; the outcome of every slide, also of those that failed."""
        from selfvitmil.aggregate.train import BagStore

        store = BagStore.of(self.settings.train)
        splits = {each.split.name: each.split for each in wanted.values()}
        models = self._check_models(splits.values())
        outcomes: dict[str, BuildOutcome] = {}
        stale: dict[str, list[Prepared]] = {}
        for slide, each in wanted.items():
            try:
                prepared = self._prepared(each, models[each.split.name])
            except (SelfVitMilError, OSError) as error:
                outcomes[slide] = failed(Failure.of(slide, "localize", error))
                continue
            if prepared.freshness.is_up_to_date:
                outcomes[slide] = UP_TO_DATE
            else:
                stale.setdefault(each.split.name, []).append(prepared)
        with show_progress("localize", "slides", sum(map(len, stale.values()))) as progress:
            for name, batch in stale.items():
                of_split = self._split_models(splits[name], store)
                source = self.choose_source(list(of_split.modules.values()), store)
                for prepared, failure in self._write_all(batch, of_split, source, store):
                    progress.advance(failure is not None, 1)
                    slide = prepared.wanted.case.slide
                    outcomes[slide] = outcome_of(prepared.freshness) if failure is None else failed(failure)
        return outcomes

    def _write_all(
        self, batch: Sequence[Prepared], models: SplitModels, source: HeatmapSource | None, store: BagStore
    ) -> Iterator[tuple[Prepared, Failure | None]]:
        """Score slide after slide and write behind; yield each slide with its failure, in their order."""
        unwritten: deque[tuple[Prepared, Future[Failure | None]]] = deque()
        with ThreadPoolExecutor(WRITERS) as pool:
            for prepared in batch:
                heatmap = self._heatmap(prepared, models, source, store)
                unwritten.append((prepared, pool.submit(self._write, prepared, heatmap)))
                while len(unwritten) > MOST_UNWRITTEN:
                    first, written = unwritten.popleft()
                    yield first, written.result()
            for prepared, written in unwritten:
                yield prepared, written.result()

    def export_job(self, slide: str) -> ExportJob:
        """Return what a worker needs to write the files of a slide's heatmap."""
        from selfvitmil.bags.files import is_feature_file
        from selfvitmil.localize.export import ExportJob

        row = self.cohort[slide]
        # In a cohort of another tool's feature files these stand where slides would be named.
        on_grid = is_feature_file(row.path)
        ref = SlideRef.of(row, self.settings.slide) if row.path.exists() and not on_grid else None
        return ExportJob(self.folder / f"{slide}.h5", ref, row.annotation, self.settings.localize, on_grid)

    # ------------------------------------------------------------------------------------------------ before scoring

    def _check_models(self, splits: Iterable[TrialSplit]) -> dict[str, str]:
        """Split -> what its models were made from; ArtefactError unless all are there and current."""
        from selfvitmil.evaluate import check_models

        trial = replace(self.trial, splits=tuple(splits))
        return check_models(self.method, trial, self.settings.train, self.features.models / self.method)

    def _prepared(self, wanted: Wanted, models: str) -> Prepared:
        """Return placement and identity of a slide's heatmap; raises SelfVitMilError where there can be none."""
        from selfvitmil.aggregate.base import check_effect

        row = self.cohort[wanted.case.slide]
        bag, table, placement = self._placed(wanted.case)
        if self.settings.localize.score == "effect":
            check_effect(bag)
        settings = {
            "localize": self.settings.localize.model_dump(mode="json", include=MAP_SETTINGS),
            "evaluate": self.settings.evaluate.model_dump(mode="json", include=DECISIONS),
        }
        inputs = {
            "models": models,
            "split": [wanted.split.name, wanted.part],
            "features": wanted.case.identity,
            "frame": hash_of(asdict(placement.frame)),
            "tiles": None if table is None else self._fingerprint(self._table_file(row.slide)),
            "annotation": None if row.annotation is None else self._fingerprint(row.annotation),
            "validation annotations": self._evidence_identity,
        }
        provenance = Provenance("localize", VERSION, settings, inputs)
        freshness = heatmap_freshness(self.folder / f"{row.slide}.h5", provenance)
        return Prepared(wanted, bag, table, placement, provenance, freshness)

    def _once(self, key: tuple[Any, ...], read: Callable[[], T]) -> T:
        """Return what is known under a key, read when it is first asked for."""
        if key not in self.known:
            self.known[key] = read()
        return self.known[key]

    def _fingerprint(self, path: Path) -> str:
        return self._once(("fingerprint", path), lambda: file_fingerprint(path))

    def _table_file(self, slide: str) -> Path:
        return StudyLayout(self.study).tile_table(tiling_name(self.settings.tile), slide)

    def _placed(self, case: BagFile) -> tuple[Bag, TileTable | None, TilePlacement]:
        """The slide's bag, its tile table where the study has one, and where the tiles lie."""
        from selfvitmil.localize.heatmap import place_tiles, read_slide_geometry
        from selfvitmil.tiles import read_tiles

        row, file = self.cohort[case.slide], self._table_file(case.slide)
        bag = self.trial.bag(case)

        def place() -> tuple[TileTable | None, TilePlacement]:
            table = read_tiles(file) if self.features.tiling != "external" and file.exists() else None
            look = partial(read_slide_geometry, SlideRef.of(row, self.settings.slide))
            return table, place_tiles(bag, table, look)

        return bag, *self._once(("placed", case.path), place)

    def _annotated(
        self, case: BagFile, table: TileTable | None, placement: TilePlacement
    ) -> tuple[Any, tuple[str, ...]]:
        """The share of each tile inside annotated tumour, None without an annotation; and warnings."""
        from selfvitmil.localize.heatmap import annotated_shares

        def measure() -> tuple[Any, tuple[str, ...]]:
            outlines, notes = self._outlines(case.slide, placement)
            shares, doubts = annotated_shares(placement, table, outlines)
            return shares, (*notes, *doubts)

        return self._once(("annotated", case.path), measure)

    # ------------------------------------------------------------------------------------------------ scoring

    def _split_models(self, split: TrialSplit, store: BagStore) -> SplitModels:
        """The models of a split, and the choices that the evaluation makes after them."""
        from selfvitmil.evaluate import ensemble_scores, stored_models

        trial, folder = replace(self.trial, splits=(split,)), self.features.models / self.method
        stored = stored_models(self.method, trial, self.settings.train, folder, store=store)
        modules = {key: module.to(store.device) for key, module in stored.modules.items()}
        validation = None
        if self.trial.outcome is not None:
            validation = ensemble_scores(stored.fitted, [case.slide for case in split.val])
        return SplitModels(modules, stored.fitted.choices[split.name, None], validation)

    @cached_property
    def _evidence(self) -> tuple[Case, ...]:
        """Positive validation slides with an annotation, where these may choose what heatmaps show.

        With several splits a validation slide of one may be a test slide of another: then none may. Nor where several
        classes are distinguished, since annotations mark tumour against normal tissue only.
        """
        first, *others = self.trial.splits
        if self.settings.localize.score != "auto" or others or self.trial.num_classes > 1:
            return ()
        files = {case: self.cohort[case.slide].annotation for case in first.val if case.label == 1}
        return tuple(case for case, file in files.items() if file is not None and file.exists())

    @cached_property
    def _evidence_identity(self) -> list[list[str]]:
        files = {case: self.cohort[case.slide].annotation for case in self._evidence}
        return [[case.slide, case.identity, self._fingerprint(file)] for case, file in files.items() if file]

    def choose_source(self, modules: Sequence[Aggregator], store: BagStore) -> HeatmapSource | None:
        """What annotated validation slides choose to show, by the models of their split; None where none can choose."""
        from selfvitmil.localize.scores import combine, score_by_seeds, source_by_annotations

        info: list[tuple[Any, Any]] = []
        unread = 0
        for case in self._evidence:
            try:
                bag, table, placement = self._placed(case)
                shares, _ = self._annotated(case, table, placement)
                info.append((combine(score_by_seeds(modules, bag, "auto", store), 0), shares))
            except (SelfVitMilError, OSError):  # `localize --localize.parts val` says what is wrong with it
                unread += 1
        source = source_by_annotations(info)
        if source is None or not unread:
            return source
        return replace(source, reason=f"{source.reason}; {unread} more could not be used")

    def _heatmap(
        self, prepared: Prepared, models: SplitModels, source: HeatmapSource | None, store: BagStore
    ) -> Heatmap | Failure:
        from selfvitmil.localize.scores import build_heatmap, score_by_seeds

        slide, placement = prepared.wanted.case.slide, prepared.placement
        try:
            shares, notes = self._annotated(prepared.wanted.case, prepared.table, placement)
            kind = self.settings.localize.score if source is None else source.kind
            scores = score_by_seeds(models.modules.values(), prepared.bag, kind, store)
            return build_heatmap(
                slide, self.model, self.method, placement.frame, placement.coords_l0, scores,
                self._prediction(prepared.wanted, models, scores), self.settings.localize,
                source=source, annotated=shares, warnings=(*placement.warnings, *notes),
                details={"encoder": self.trial.encoder, "tiling": self.trial.tiling},
            )  # fmt: skip
        except ConfigError:
            raise  # what was asked for cannot be, whatever the slide
        except (SelfVitMilError, OSError) as error:
            return Failure.of(slide, "localize", error)

    def _write(self, prepared: Prepared, heatmap: Heatmap | Failure) -> Failure | None:
        from selfvitmil.localize.heatmap import write_heatmap

        if isinstance(heatmap, Failure):
            return heatmap
        try:
            write_heatmap(self.folder / f"{heatmap.slide}.h5", heatmap, _to_json(prepared.provenance))
        except (SelfVitMilError, OSError) as error:
            return Failure.of(heatmap.slide, "localize", error)
        return None

    def _outlines(self, slide: str, placement: TilePlacement) -> tuple[tuple[Annotation, ...] | None, tuple[str, ...]]:
        from selfvitmil.annotations import read_annotations
        from selfvitmil.localize.heatmap import check_annotations

        file = self.cohort[slide].annotation
        if file is None:
            return None, ()
        outlines = read_annotations(file, repair=True)
        return outlines, check_annotations(outlines, placement.frame.size_l0, file.name)

    def _prediction(self, wanted: Wanted, models: SplitModels, scores: Sequence[TileScores]) -> SlidePrediction:
        from selfvitmil.localize.scores import ensemble_prediction, outcome_prediction

        bags, of_class = [each.bag for each in scores], self.settings.localize.of_class
        seeds = [seed for _, seed in models.modules]
        place: dict[str, Any] = {"split": wanted.split.name, "part": wanted.part, "seeds": seeds}
        if models.validation is not None:
            return outcome_prediction(bags, models.choice, models.validation, of_class, **place)
        return ensemble_prediction(bags, models.choice, self.trial.class_names, of_class, **place)


@dataclass(frozen=True, eq=False)
class SplitModels:
    """The models of one split and how their mean becomes a decision."""

    modules: Mapping[tuple[str, int], Aggregator]
    """(split, seed) -> aggregator."""
    choice: Choice
    validation: Any = None
    """(V, K) the ensemble's scores of the validation slides, with another outcome than classes."""


def heatmap_freshness(path: Path, now: Provenance) -> Freshness:
    """Return whether the heatmap at `path` is up to date."""
    from selfvitmil.localize.heatmap import heatmap_made_from

    if not path.exists():
        return MISSING
    try:
        record = json.loads(heatmap_made_from(path) or "")
        version, settings = record.pop("version", None), record.pop("settings", {})
    except (ValueError, TypeError, AttributeError):
        return damaged(path)
    return now.compare(Provenance("localize", version, settings, record))


def _to_json(provenance: Provenance) -> str:
    """Return what a heatmap stores of its provenance."""
    record = {"version": provenance.version, "settings": provenance.settings, **provenance.inputs}
    return json.dumps(record, sort_keys=True)


def split_failures(outcomes: Mapping[str, BuildOutcome]) -> tuple[dict[str, BuildOutcome], list[Failure]]:
    """Return the outcomes of slides that have a heatmap now, and the failures of the others."""
    failures = [outcome.failure for outcome in outcomes.values() if outcome.failure is not None]
    return {slide: outcome for slide, outcome in outcomes.items() if outcome.failure is None}, failures


# ---------------------------------------------------------------------------------------------------- tables


def write_tables(folder: Path, made: Mapping[str, ExportResult], tried: Collection[str]) -> None:
    """Write lesions.csv and points.csv; rows of slides that were not tried stay, as long as they have a heatmap."""
    from selfvitmil.localize.export import LESION_COLUMNS, POINT_COLUMNS

    parts = (("lesions.csv", LESION_COLUMNS, "lesions"), ("points.csv", POINT_COLUMNS, "points"))
    for name, header, part in parts:
        rows = [[slide, *row] for slide, result in made.items() for row in getattr(result, part)]
        rows = sorted([*_kept(folder / name, header, tried), *rows], key=lambda row: row[0])
        write_csv(folder / name, [header, *rows])


def _kept(path: Path, header: Sequence[str], tried: Collection[str]) -> Iterable[Sequence[str]]:
    if not path.exists():
        return []
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.reader(file))
    except (UnicodeDecodeError, csv.Error) as error:
        raise ArtefactError(
            f"{path.name} of {path.parent.name}: not a readable table",
            f"it is damaged ({error}), and has rows of slides whose heatmaps are kept",
            "Remove it and localize all slides again",
            code="unreadable-heatmap-table",
        ) from None
    if not rows or rows[0] != list(header):
        return []
    return [row for row in rows[1:] if row and row[0] not in tried and (path.parent / f"{row[0]}.h5").exists()]


LOCALIZE_S, LOCALIZE_TILE_S, BYTES_PER_TILE, BYTES_PER_SLIDE = 0.5, 2e-4, 400, 6_000_000
"""Usual time and size of a slide's heatmap with its pictures."""


class Localize(Stage):
    """Draw heatmaps by the study's own method."""

    name = "localize"
    is_essential = True
    is_learning = True
    by_target = True

    def preflight(self, plan: RunPlan) -> None:
        assert plan.labels is not None
        localize = plan.settings.localize
        with nothing_done():
            _check_of_class(plan.labels, localize.of_class)
            choose_slides(plan.labels, localize.parts, (), plan.cohort)

    def pending(self, plan: RunPlan) -> Pending:
        method = plan.settings.train.aggregator
        there = 0
        for study, _ in plan.study.targets():
            folder = plan.layout.heatmaps(results_name(None, f"{plan.features}_{method}", study.settings))
            there += sum(1 for _ in folder.glob("*.h5"))
        words = f"heatmaps of the slides of the split {', '.join(plan.settings.localize.parts)} by {method}"
        return Pending(words=words + (f"; {there} are there" if there else ""))

    def estimate(self, plan: RunPlan, measures: Measures) -> Estimate:
        rows = plan.cohort.rows
        slides = [row.slide for row in rows if row.split in plan.settings.localize.parts] or [row.slide for row in rows]
        tiles = measures.tiles_of(slides)
        seconds = measures.over_workers(len(slides) * LOCALIZE_S + tiles * LOCALIZE_TILE_S)
        disk = tiles * BYTES_PER_TILE + len(slides) * BYTES_PER_SLIDE
        return Estimate(seconds, disk, measures.workers_bytes, Basis.TYPICAL)

    def run(self, plan: RunPlan, engines: Engines) -> LocalizeResult:
        return localize(plan.study, FeatureChoice(plan.encoder), engines.slides)

    def status(self, snapshot: Snapshot) -> Iterable[Progress]:
        for folder in snapshot.layout.all_heatmaps():
            yield snapshot.progress(self.name, folder, folder.glob("*.h5"), None)
