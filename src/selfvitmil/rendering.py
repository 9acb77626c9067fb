"""Results as text: what a stage or command returns becomes lines and a table, for the terminal and for notebooks.

Stages and commands return data (`stages.base.StageResult`). The words for it are made here and nowhere else, one
function per kind of result. Only `cli` prints them; `_repr_html_` of a result shows the same in a notebook.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from selfvitmil import formatting
from selfvitmil.cohort.table import listing
from selfvitmil.formatting import html_table
from selfvitmil.store.failures import fold_failures
from selfvitmil.store.provenance import UP_TO_DATE, BuildOutcome, BuildStatus

if TYPE_CHECKING:
    from selfvitmil.commands.doctor import DoctorResult
    from selfvitmil.commands.export import ExportResult
    from selfvitmil.commands.init import InitResult
    from selfvitmil.commands.package import PackageResult
    from selfvitmil.commands.plan import PlanResult, StagePlan
    from selfvitmil.commands.power import PowerResult
    from selfvitmil.commands.predict import PredictResult
    from selfvitmil.commands.run import RunOutcome, RunResult, RunStart, StageReport
    from selfvitmil.commands.sbatch import SbatchResult
    from selfvitmil.commands.shards import ShardResult
    from selfvitmil.commands.slide_embeddings import SlideEmbeddingsResult
    from selfvitmil.commands.status import StatusResult
    from selfvitmil.commands.synth import SynthResult
    from selfvitmil.commands.validate import ValidateResult
    from selfvitmil.commands.view import ViewResult
    from selfvitmil.evaluate.subgroups import SubgroupTable
    from selfvitmil.localize.lesion_results import LesionTable
    from selfvitmil.stages.base import Estimate, StageResult
    from selfvitmil.stages.check import CheckResult
    from selfvitmil.stages.compare import CompareResult
    from selfvitmil.stages.embed import EmbedResult
    from selfvitmil.stages.evaluate import EvaluateResult
    from selfvitmil.stages.lesions import LesionsResult
    from selfvitmil.stages.localize import LocalizeResult
    from selfvitmil.stages.pretrain import PretrainResult, SplitResult
    from selfvitmil.stages.report import ReportResult
    from selfvitmil.stages.tile import TileResult
    from selfvitmil.stages.train import TrainResult
    from selfvitmil.store.failures import Failure

Row = Mapping[str, str]
"""A row of table.csv."""
Table = tuple[tuple[str, ...], ...]
"""Rows of cells, header first."""


@dataclass(frozen=True)
class Rendered:
    """A result in words."""

    lines: tuple[str, ...] = ()
    table: Table = ()


def render(result: StageResult) -> Rendered:
    """Return the words for a result. Its failures are not part of them: see `failure_line`."""
    names = [each.__name__ for each in type(result).__mro__]
    return next(_RENDERERS[name] for name in names if name in _RENDERERS)(result)


def failure_line(failure: Failure) -> str:
    """Return the line on a slide that failed."""
    return f"FAILED {failure.slide} ({failure.stage}): {failure.reason}. {failure.remedy}"


def to_html(result: StageResult) -> str:
    """Return a result for notebooks: its table, its lines, its failures; everything is escaped."""
    words = render(result)
    lines = "<br>".join(map(escape, (*words.lines, *map(failure_line, result.failures))))
    return (html_table(words.table) if words.table else "") + f"<p>{lines}</p>"


def command(name: str, study: Path | str) -> str:
    """Return a command on a study as it can be pasted into a shell."""
    return f"selfvitmil {name} {shlex.quote(str(study))}"


def _plain(result: StageResult) -> Rendered:
    """Render a result that has nothing but notes."""
    return Rendered(result.notes)


# ---------------------------------------------------------------------------------------------------- slides


def _check(result: CheckResult) -> Rendered:
    rows = result.slides.values()
    lines = _few([f"{row.slide}: {warning}" for row in rows for warning in row.warnings], "check.csv")
    lines.append(f"{len(rows)} of {result.num_slides} slides can be worked with; see check.csv")
    shown = ("slide", "format", "reader", "width", "height", "mpp", "mpp_source", "levels")
    table = (shown, *(tuple(formatting.cell(getattr(row, name)) for name in shown) for row in rows))
    return Rendered((*result.notes, *lines), table)


def _tile(result: TileResult) -> Rendered:
    """Render changes, warnings, odd counts and totals."""
    slides, name = result.slides, result.tiling
    counts = {slide: found.num_tiles for slide, found in slides.items()}
    warnings = [f"{slide}: {text}" for slide, found in slides.items() for text in found.attributes.get("warnings", ())]
    if len(counts) >= 5:
        middle = float(np.median(list(counts.values())))
        warnings += [
            f"{slide}: {count} tiles, where the median is {middle:.0f}: look at its picture"
            for slide, count in counts.items()
            if not middle / 10 <= count <= middle * 10
        ]
    up_to_date = _num_up_to_date(found.outcome for found in slides.values())
    total = f"{sum(counts.values()):,} tiles of {len(slides)} of {result.num_slides} slides in tiles/{name}"
    lines = (*_few(warnings, f"tiles/{name}/tiles.csv"), *_tile_quality(result), total + up_to_date)
    return Rendered((*result.notes, *_rebuilt(slides), *lines))


def _tile_quality(result: TileResult) -> Iterator[str]:
    """Yield how many tiles quality control flagged, and how many of them are excluded."""
    measured = [found.attributes for found in result.slides.values() if "flagged" in found.attributes]
    if measured:
        counts = {kind: sum(info["flagged"][kind] for info in measured) for kind in measured[0]["flagged"]}
        flagged = ", ".join(f"{number:,} {kind}" for kind, number in counts.items() if number) or "none"
        excluded, slides = sum(info["excluded"] for info in measured), sum(info["excluded"] > 0 for info in measured)
        of_slides = f"{slides} slide{'s' * (slides > 1)}"
        dropped = f"{excluded:,} excluded in {of_slides}" if excluded else "none excluded"
        yield f"flagged tiles: {flagged}; {dropped}; see tiles/{result.tiling}/quality.html"


def _synth(result: SynthResult) -> Rendered:
    lines = [f"{len(result.slides)} slides written to {result.folder}"]
    if result.hostile:
        lines.append(f"{len(result.hostile)} hostile files written to {result.folder / 'hostile'}")
    return Rendered(tuple(lines))


def _split(result: SplitResult) -> Rendered:
    return Rendered(result.notes, result.table)


# ---------------------------------------------------------------------------------------------------- embeddings


def _pretrain(result: PretrainResult) -> Rendered:
    lines = list(result.notes)
    for name, trained in result.encoders.items():
        loss = f", loss {trained.metrics['loss']:.3f}" if "loss" in trained.metrics else ""
        steps = f"step {trained.step} of {trained.total_steps}{loss}"
        if trained.ending is not None and trained.ending.stopped_early:
            steps = trained.ending.words
        elif trained.ending is not None and trained.ending.words:
            steps += f"; {trained.ending.words}"
        lines += [f"note: {warning}" for warning in trained.warnings]
        lines.append(f"encoders/{name}: {trained.note}, {steps}")
    return Rendered(tuple(lines), result.split_table)


def _embed(result: EmbedResult) -> Rendered:
    encoders = {each.encoder: each for each in result.features}
    lines = [f"{name}: layout {own.layout}, embeddings of {own.dim} dimensions" for name, own in encoders.items()]
    for each in result.features:
        slides = each.slides.values()
        waited = [found.wait_share for found in slides if found.outcome != UP_TO_DATE]
        wait = f", waiting for tiles {np.mean(waited):.0%} of the time" if waited else ""
        total = (
            f"{sum(found.num_tiles for found in slides):,} embeddings of {len(slides)} of {result.num_slides} slides"
        )
        lines += _rebuilt(each.slides)
        lines += [f"{slide}: {warning}" for slide, found in each.slides.items() for warning in found.warnings]
        lines.append(f"{total} in {_last_parts(each.folder, 3)}{wait}")
    return Rendered((*result.notes, *lines))


def _export(result: ExportResult) -> Rendered:
    lines = [f"{len(result.slides)} of {result.num_slides} slides written to {result.folder} for {result.tool}"]
    lines += [f"tables: {', '.join(_few(list(result.tables), 'the folder', 6))}"] if result.tables else []
    return Rendered((*result.notes, *lines))


def _slide_embeddings(result: SlideEmbeddingsResult) -> Rendered:
    num, dim = result.embeddings_SE.shape
    lines = _rebuilt(result.built)
    lines.append(
        f"{num} of {result.num_slides} slides have embeddings of {dim} numbers in {_last_parts(result.folder, 3)}"
    )
    found = result.agreement
    if found is None:
        lines.append("agreement of labels: not measured, that takes labelled slides of two patients and two labels")
    else:
        share = f"{found.share.value:.2f} ({found.share.low:.2f} to {found.share.high:.2f})"
        lines.append(
            f"agreement of labels with the {found.k} nearest slides of other patients: {share}, by chance "
            f"{found.chance:.2f}; {found.num_queries} slides of {found.num_patients} patients"
        )
    lines += [f"table written to {result.out}"] if result.out is not None else []
    table: Table = ()
    if result.query is not None:
        rows = (
            (str(rank), each.slide, each.patient, each.label or "", f"{each.similarity:.3f}")
            for rank, each in enumerate(result.similar[result.query], start=1)
        )
        table = (("", f"most like {result.query}", "patient", "label", "cosine"), *rows)
    return Rendered((*result.notes, *lines), table)


# ---------------------------------------------------------------------------------------------------- learning


def _train(result: TrainResult) -> Rendered:
    header = ("split", "seed", "epoch", f"validation {result.metric}", "seconds", "")
    rows = [
        (
            model.split,
            str(model.seed),
            str(model.epoch),
            formatting.number(model.validation_auc),
            f"{model.seconds:.0f}",
            str(model.outcome),
        )
        for model in result.models
    ]
    line = f"{len(result.models)} models in {_last_parts(result.folder, 4)}; evaluate them with `evaluate`"
    return Rendered((*result.notes, line), (header, *rows))


SHOWN_METRICS = ("auc", "accuracy", "balanced_accuracy", "sensitivity", "specificity", "f1", "pr_auc", "brier", "ece")
"""Metrics of `evaluate` that are shown; metrics.json has them all."""


def _evaluate(result: EvaluateResult) -> Rendered:
    """Render the metrics of slides, and of patients where they differ."""
    info = result.metrics
    header = ("", "ensemble", f"{formatting.percent(result.confidence)} interval", "mean of seeds", "sd")
    rows = [
        (f"{name.replace('_', ' ')}, by {level}", *row)
        for level in ("slide", "patient")
        if "same_as" not in info[level]
        for name in (SHOWN_METRICS if result.result.outcome is None else result.result.outcome.shown_metrics)
        if (row := _metric_cells(info[level], name)) is not None
    ]
    decisions: Mapping[str, Any] = info.get("decisions") or {}
    sets = decisions.get("prediction_sets")
    if sets is not None:
        coverage, size = (formatting.value_and_limits(sets[key]) for key in ("coverage", "mean_size"))
        rows.append((f"coverage of sets ({sets['wanted']:.3g} asked)", *coverage, "", ""))
        rows.append(("classes in a set", *size, "", ""))
    line = f"predictions.csv, metrics.json and figures in {_last_parts(result.folder, 2)}"
    return Rendered((*result.notes, line), (header, *rows))


def _metric_cells(level: Mapping[str, Any], name: str) -> tuple[str, str, str, str] | None:
    ensemble: Mapping[str, Any] = level.get("ensemble") or {}
    info = ensemble.get(name)
    value, limits = "-", ""
    if isinstance(info, Mapping):
        value, limits = formatting.value_and_limits(cast("Mapping[str, Any]", info))
    elif isinstance(info, int | float):
        value = f"{info:.3f}"
    over_seeds: Mapping[str, Any] = level.get("over_seeds") or {}
    spread: Mapping[str, Any] = over_seeds.get(name) or {}
    mean, sd = spread.get("mean"), spread.get("sd")
    if value == "-" and mean is None:
        return None
    return value, limits, formatting.number(mean), formatting.number(sd)


def _compare(result: CompareResult) -> Rendered:
    from selfvitmil.evaluate.comparison_table import has_figure, short_cells, short_notes

    baselines = [line for each in result.baselines for line in render(each).lines]
    below = [*(f"note: {text}" for text in result.advice), *short_notes(result.table)]
    where = _last_parts(result.folder, 2)
    files = (
        "table.csv, table.md, auc.svg, predictions.csv"
        if has_figure(result.table)
        else "table.csv, table.md, predictions.csv"
    )
    below.append(f"all columns and notes: {files} and metrics.json in {where}")
    table = tuple(tuple(row) for row in short_cells(result.table))
    return Rendered((*baselines, *result.notes, *below), table)


def _lesions(result: LesionsResult) -> Rendered:
    lines, table = list(result.notes), ()
    *of_comparison, of_method = result.folders or ("",)
    if result.comparison is not None:
        compared = of_comparison[0] if of_comparison else of_method
        lines.append(
            f"lesions.md (it defines the columns), lesions.csv, lesions.json and froc.svg in {_last_parts(compared, 2)}"
        )
        table = tuple(tuple(row) for row in result.comparison.cells())
    if result.scores is not None:
        lines.append(f"lesions.json, lesion_slides.csv and froc.svg in {_last_parts(of_method, 2)}")
        level = formatting.percent(result.scores.evaluate.confidence)
        table = table or (("lesions", "value", f"{level} interval"), *_lesion_rows(result.scores.to_json()["scores"]))
    return Rendered(tuple(lines), table)


def _lesion_rows(scores: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    found = [score for score in scores.values() if score is not None and score.get("value") is not None]
    return [(str(score["words"]), *formatting.value_and_limits(score)) for score in found]


def _localize(result: LocalizeResult) -> Rendered:
    from selfvitmil.localize.detection import RANKS_ONLY

    made, where = result.exports, _last_parts(result.folder, 2)
    warned: dict[str, list[str]] = {}
    for slide, product in made.items():
        for warning in product.warnings:
            warned.setdefault(warning, []).append(slide)
    shown = dict.fromkeys(f"heatmaps show {product.shows}" for product in made.values() if product.shows)
    up_to_date = _num_up_to_date(result.outcomes.values())
    files = sum(product.num_made for product in made.values())
    negative = sum(product.only_ranks for product in made.values())
    lines = [
        *result.notes,
        *_rebuilt_lines(result.outcomes),
        *_few([f"{listing(slides, 3)}: {text}" for text, slides in warned.items()], "the heatmaps"),
        *shown,
        f"{len(result.outcomes)} heatmaps{up_to_date}, {files} pictures and exports made, in {where}",
        *[f"{_are(negative, 'slide')} not called positive: there {RANKS_ONLY}"] * (negative > 0),
        f"lesions.csv and points.csv in {where}; sizes are measurements of the heatmap, no diagnosis",
    ]
    header = ("slide", "probability", "decision", "shows", "lesions", "largest lesion", "top tile")
    return Rendered(tuple(lines), (header, *((slide, *product.cells) for slide, product in made.items())))


def _report(result: ReportResult) -> Rendered:
    lines = list(result.notes)
    if result.num_with_heatmap > result.num_sections:
        lines.append(
            f"{result.num_sections} of {result.num_with_heatmap} slides with heatmaps have a section "
            f"(--slides {result.most_slides})"
        )
    if result.key is not None:
        lines.append(f"{result.key} in the study is the key to the pseudonyms: keep it to yourself")
    lines.append(f"{result.shown_as}: one page of {result.size_bytes / 1e6:.1f} MB, for any browser")
    return Rendered(tuple(lines))


def _predict(result: PredictResult) -> Rendered:
    from selfvitmil.localize.detection import RANKS_ONLY
    from selfvitmil.package import RESEARCH_ONLY

    package, choice = result.package, result.package.choice
    positive = package.about["positive"]
    rows: list[tuple[str, ...]] = []
    for slide in result.slides:
        prediction = slide.heatmap.prediction
        shown = f"{prediction.probability[0]:.4f}"
        if package.outcome is not None:
            shown = ", ".join(
                f"{name} {value:.4g}" for name, value in zip(package.outcome.score_names, slide.score, strict=True)
            )
        elif len(prediction.probability) > 1:
            shown = f"{prediction.probability[prediction.classes.index(prediction.decision)]:.4f}"
        lesions = "-" if slide.heatmap.only_ranks else str(len(slide.lesions))
        unusual = ", ".join(dict.fromkeys(each.about for each in slide.findings))
        rows.append((slide.slide, slide.decision, shown, str(len(slide.heatmap)), lesions, unusual))
    lines = [f"{slide.slide}: {note}" for slide in result.slides for note in slide.notes]
    if negative := sum(slide.heatmap.only_ranks for slide in result.slides):
        lines.append(f"{_are(negative, 'slide')} not called positive: there {RANKS_ONLY}")
    if choice.threshold is not None:
        chosen = sum(package.about["chosen_on"]["slides"].values())
        where = f"{choice.threshold_from}, {chosen} slides"
        where += "" if package.folds > 1 else f" of split {package.split}"
        what = positive if package.outcome is None else package.outcome.groups[-1]
        lines.append(f"{what} from {choice.threshold:.4f} on ({where})")
    model = f"{package.name} {package.identity[:12]}"
    lines.append(f"{len(result.slides)} of {result.num_asked} slides predicted by {model}; see {result.out.name}")
    lines.append(f"{RESEARCH_ONLY}.")
    scored = f"probability{f' of {positive}' if positive else ''}" if package.outcome is None else "score"
    header = ("slide", "decision", scored, "tiles", "lesions", "OOD")
    return Rendered(tuple(lines), (header, *rows))


def _validate(result: ValidateResult) -> Rendered:
    from selfvitmil.commands.validate import shown_metrics

    found = result.validation
    header = ("", *(f"by {level.level} (n = {level.num})" for level in found.levels))
    rows: list[tuple[str, ...]] = []
    for name in shown_metrics(result.package):
        cells = [_with_limits(level.metrics.get(name)) for level in found.levels]
        if any(cells):
            rows.append((name.replace("_", " "), *cells))
    for name, words in (("in_the_large", "calibration in the large"), ("slope", "calibration slope")):
        own = [getattr(level.calibration, name, None) for level in found.levels]
        if any(each is not None for each in own):
            rows.append((words, *map(formatting.with_limits, own)))
    lines = [*result.notes, *(f"warning: {text}" for text in found.warnings)]
    for level in found.levels:
        if (each := level.comparison) is not None:
            lines.append(
                f"by {each.level}: {each.metric} {each.value:.3f} of {each.model}, "
                f"{each.other_value:.3f} of {each.other}, "
                f"difference {formatting.with_limits(each.difference)}, p {formatting.p_value(each.p_value)} "
                f"({each.test})"
            )
    lines += _subgroup_lines(found.subgroups)
    evaluated = f"{found.slide.num} of {result.num_labelled} labelled slides, {result.num_outside} out of distribution"
    lines.append(f"external validation: {evaluated}; metrics.json and index.html in {_last_parts(result.folder, 2)}")
    return Rendered(tuple(lines), (header, *rows))


def _with_limits(info: Mapping[str, Any] | None) -> str:
    if info is None:
        return ""
    value, limits = formatting.value_and_limits(info)
    return f"{value} [{limits}]" if limits else value


def _subgroup_lines(tables: Sequence[SubgroupTable]) -> list[str]:
    """Return a line for every subgroup, at the level that is tested: `site A, by patient: slides 20, ...`."""
    lines: list[str] = []
    for table in {table.column: table for table in tables}.values():  # by patient follows by slide
        header, *rows = table.cells()
        for row in rows:
            cells = ", ".join(f"{name} {cell}" for name, cell in zip(header[1:], row[1:], strict=True) if cell != "-")
            lines.append(f"{table.column} {row[0]}, by {table.level}: {cells}")
    return lines


def _package(result: PackageResult) -> Rendered:
    lines = list(result.notes)
    models = {
        None: f"models of split {result.split}",
        "ensemble": f"models of {result.num_splits} splits, as one ensemble",
        "final fit": "models of all labelled slides",
    }[result.fit]
    if not result.evaluated:
        how = " with the flags of this training but another --train.split" if result.fit == "final fit" else ""
        whose = "this procedure" if result.fit else "these models"
        lines.append(f"note: no results of {whose}; run `selfvitmil evaluate`{how} first, and the model card has them")
    elif result.fit:
        what = "the ensemble" if result.fit == "ensemble" else "this very model"
        lines.append(f"note: {what} has not been tested; its card quotes results of models tested on held-out slides")
    lines.append(f"{result.num_models} {models}, encoder and card in {result.out.name} ({_size(result.num_bytes)})")
    return Rendered(tuple(lines))


def _view(result: ViewResult) -> Rendered:
    if result.folder is None:
        return Rendered((*result.notes, "the viewer has ended"))
    size = f"{result.size_bytes / 1e6:.1f} MB"
    return Rendered((*result.notes, f"{result.folder.name}: {result.num_slides} slides, {size}; open its index.html"))


# ---------------------------------------------------------------------------------------------------- the study


def _init(result: InitResult) -> Rendered:
    study = result.study
    lines = [f"study.toml written to {study}: every setting, what it means and what holds, behind a #"]
    if not result.has_cohort:
        lines.append(f"next: {command('plan', study)} --cohort FOLDER_OR_TABLE, then `run` in place of `plan`")
    return Rendered(tuple(lines))


def _status(result: StatusResult) -> Rendered:
    slides = "no readable cohort.csv" if result.slides is None else f"{result.slides} slides in the cohort"
    lines = [f"{result.study}: {slides}; {result.running or 'nobody works on it'}"]
    causes = [failure for failure, _ in fold_failures(result.failed)]
    for stage in sorted({failure.stage for failure in causes}):
        first, *others = [failure for failure in causes if failure.stage == stage]
        lines.append(f"failed in {stage}: {1 + len(others)}, for instance {first.reason}. {first.remedy}")
    rows = [
        (
            each.stage,
            each.place,
            str(each.done) if each.asked is None else f"{each.done} of {each.asked}",
            str(each.failed or ""),
            formatting.ago(each.newest),
            each.words,
        )
        for each in result.stages
    ]
    table = (("stage", "where", "done", "failed", "newest", ""), *rows) if rows else ()
    if result.run is not None and (planned := {k: v for k, v in result.run.planned.items() if k in result.run.seconds}):
        lines.append(f"the last run: {_planned_and_taken(planned, result.run.seconds)}")
    return Rendered((*lines, f"next: {result.next}"), table)


def _size(number: float) -> str:
    """Return bytes in words: `3.2 GB`."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if number >= factor:
            return f"{number / factor:.1f} {unit}"
    return f"{number / 1e3:.0f} kB"


def _plan(result: PlanResult) -> Rendered:
    measures, gpu = result.measures, result.measures.gpu
    lines = list(result.notes)
    if measures.unreadable:
        names = ", ".join(measures.unreadable[:5])
        lines.append(f"{len(measures.unreadable)} slides cannot be opened and count as empty: {names}")
    how = f"estimated from {measures.num_sampled} slides" if measures.num_sampled else "counted"
    lines.append(f"{len(measures.tiles)} slides, {sum(measures.tiles.values()):,} tiles ({how})")
    if measures.read_per_s:
        lines.append(f"measured: one process reads {measures.read_per_s:,.0f} tiles/s; {measures.processes} are used")
    if measures.encoder is not None:
        lines.append(
            f"measured: the encoder ({measures.encoder.num_weights / 1e6:.1f} million weights, feature dimension "
            f"{measures.encoder.network.dim}) embeds {measures.encoder.tiles_per_s:,.1f} tiles/s on the "
            f"{'GPU' if gpu else 'CPU'}"
        )
    besides = f", plus {' and '.join(each.name for each in result.unknown)}" if result.unknown else ""
    hours = f", {result.gpu_seconds / 3600:.1f} GPU-hours of it" if gpu else "; no GPU was found"
    likely = formatting.duration_range(result.range_s)
    lines.append(f"in total about {formatting.duration(result.seconds)}, likely {likely}{hours}{besides}")
    short = "" if result.enough_disk else ": NOT ENOUGH"
    lines.append(f"disk: {_size(result.disk)} needed, {_size(result.disk_free)} free{short}")
    lines += [_memory_line(stage, result.memory_for(stage)) for stage in result.too_large]
    lines.append(
        "nothing was written to the study; `run` with these flags does it, and says at its end how good this plan was"
    )
    header = ("stage", "what would be done", "disk", "memory", "time", *["GPU-hours"] * gpu, "basis")
    rows = [(each.name, each.pending.line, *_estimate_cells(each.estimate, gpu)) for each in result.stages]
    return Rendered(tuple(lines), (header, *rows))


def _power(result: PowerResult) -> Rendered:
    from selfvitmil.commands.power import AUCS, SHARE

    level, several = formatting.percent(result.confidence), len(result.classes) > 1
    shares = (f"sensitivity {SHARE}", f"specificity {SHARE}")
    header = ("test patients", "positive", "others", *(f"AUC {auc}" for auc in AUCS), *shares)
    rows: list[tuple[str, ...]] = []
    lines = [*result.notes]
    for own in result.classes:
        for row in own.rows:
            found = (*row.aucs, row.sensitivity, row.specificity)
            limits = tuple(f"{each.low:.2f} to {each.high:.2f}" for each in found)
            title = "as in this study" if row.multiple == 1 else f"{row.multiple} times as many"
            title = f"{own.positive}: {title}" if several else title
            rows.append((title, str(row.num_positive), str(row.num_negative), *limits))
        first = own.rows[0]
        auc = first.aucs[AUCS.index(0.8)]
        lines.append(
            f"{own.positive}: with {first.num_positive} test patients of this class and {first.num_negative} others, a "
            f"true AUC of 0.8 gets a {level} interval of about {auc.low:.2f} to {auc.high:.2f}"
        )
        needed = (f"{sum(num)} for AUC {true}" for true, num in zip(AUCS, own.needed, strict=True))
        lines.append(
            f"{own.positive}: an interval {result.width:g} wide needs about this many test patients at the "
            f"same prevalence: {', '.join(needed)}; "
            f"{own.needed_share} of a class for a sensitivity or specificity of {SHARE}"
        )
    if result.num_sets > 1:
        lines.append(f"patients are tested in {result.num_sets} folds and ranked within their fold")
    lines.append(
        "patients count, not slides: further slides of a patient add less than a new patient. Intervals do not include "
        "how results change with other training slides or seeds. Nothing was written"
    )
    return Rendered(tuple(lines), (header, *rows))


def _estimate_cells(estimate: Estimate, with_gpu: bool) -> tuple[str, ...]:
    """Return the cells of a plan's table from disk on."""
    if not estimate.basis or estimate.basis == "unknown":
        return ("", "", "", *[""] * with_gpu, estimate.basis)
    hours = f"{estimate.seconds / 3600:.2f}" if estimate.on_gpu else ""
    memory = f"{'GPU ' * estimate.on_gpu}{_size(estimate.memory)}"
    time = formatting.duration_range(estimate.range_s)
    return (_size(estimate.disk), memory, time, *[hours] * with_gpu, estimate.basis)


def _memory_line(stage: StagePlan, memory: int) -> str:
    """Return the warning that a stage does not fit into memory, with what makes it smaller."""
    needed, how = stage.estimate.memory, "fewer --workers"
    if stage.name == "pretrain":
        how = f"--pretrain.accumulate {1 << math.ceil(math.log2(needed / memory))}, which changes no result"
    elif stage.name == "embed":
        how = "a smaller --embed.batch"
    return f"memory: {stage.name} needs about {_size(needed)} of {_size(memory)}: NOT ENOUGH; use {how}"


def _doctor(result: DoctorResult) -> Rendered:
    rows = [(check.status, check.name, check.found) for check in result.checks]
    lines = [f"{check.status} {check.name}: {check.remedy}" for check in result.checks if check.remedy]
    end = {
        "PASS": "everything is in place",
        "WARN": "usable; the warnings say what would be better",
        "FAIL": "something that is required does not work",
    }[result.status]
    return Rendered((*lines, end), (("", "what", "found"), *rows))


def _run_start(result: RunStart) -> Rendered:
    rows = [(stage, pending.line) for stage, pending in result.pending.items()]
    lines = (*result.notes, f"{result.num_slides} slides in the cohort")
    return Rendered(lines, (("stage", "what will be done"), *rows))


def _run(result: RunResult) -> Rendered:
    limits = result.planned
    rows = [
        (
            name,
            _stage_words(report),
            "" if report.seconds is None else formatting.duration(report.seconds),
            *([formatting.duration_range(limits[name]) if name in limits else ""] * bool(limits)),
        )
        for name, report in result.stages.items()
    ]
    lines = list(result.notes)
    if slides := {failure.slide for each in result.results.values() for failure in each.failures}:
        failed = f"{len(slides)} slide{'s' * (len(slides) > 1)} failed"
        lines.append(f"{failed} in one stage or another: failures.csv says why and what to do")
    lines.append(f"all of it took {formatting.duration(result.seconds)}")
    if limits:
        lines.append(_planned_and_taken(limits, {name: each.seconds or 0.0 for name, each in result.stages.items()}))
    return Rendered(tuple(lines), (("stage", "what was done", "time", *["planned"] * bool(limits)), *rows))


def _planned_and_taken(planned: Mapping[str, tuple[float, float]], seconds: Mapping[str, float]) -> str:
    """Return how good a plan was: its total for the stages that it holds for, and by which factor it was off."""
    low, high = (sum(limits[side] for limits in planned.values()) for side in (0, 1))
    taken = sum(seconds.get(name, 0.0) for name in planned)
    off = (
        f" ({low / taken:.1f} times faster)"
        if 0 < taken < low
        else f" ({taken / high:.1f} times slower)" * (taken > high)
    )
    of = "" if len(planned) == len(seconds) else f" for {', '.join(planned)}"
    return f"planned{of} {formatting.duration_range((low, high))}, took {formatting.duration(taken)}{off}"


def _shard(result: ShardResult) -> Rendered:
    rows = [(stage, f"{done}", f"{result.left.get(stage, 0)}") for stage, done in result.done.items()]
    lines = [*result.notes, *map(failure_line, result.failed_here)]
    if result.left:
        lines.append("other shards work on the slides that are left; the last of them assembles the results")
    if result.encoder_missing:
        lines.append("nothing was embedded: train the encoder with `selfvitmil pretrain`, then run the shards again")
    return Rendered(tuple(lines), ((f"shard {result.shard}", "slides", "left to others"), *rows))


def _sbatch(result: SbatchResult) -> Rendered:
    lines = (*result.notes, f"submit with: bash {result.script}")
    return Rendered(lines, (("job", "command"), *result.jobs))


def _stage_words(report: StageReport) -> str:
    if report.state.name == "UP_TO_DATE":
        return report.pending.line
    if report.state.name == "STOPPED":
        return f"{report.state.value}: see the message below"
    failed = f", {report.num_failed} slide{'s' * (report.num_failed > 1)} failed"
    return report.state.value + (failed if report.num_failed else "")


BINARY = {"sensitivity": "sens.", "specificity": "spec."}
SEVERAL = {"accuracy": "acc.", "balanced_accuracy": "bal. acc."}
"""Columns of decisions and their titles, with two classes and with more."""


def _run_outcome(result: RunOutcome) -> Rendered:
    """Render how well each method does, and whether its heatmaps show why.

    With more than two classes the AUC is the macro AUC, and accuracies stand where sensitivity and specificity would.
    """
    lines: list[str] = []
    table: Table = ()
    if result.comparison is not None and result.comparison.rows:
        rows = result.comparison.rows
        lesions = result.lesions.comparison if result.lesions is not None else None
        of_classes = "outcome" not in rows[0]
        table = _outcome_table(rows, lesions) if of_classes else _other_table(rows)
        line = _outcome_line if of_classes else _other_line
        lines += [line(row) for row in rows if row["display_name"] == result.method]
        if any(map(_is_transductive, rows)):
            lines.append("*: transductive, the encoder was trained, without labels, on slides of test patients")
    if result.page is not None:
        lines += [f"report: {result.page}", f"viewer: {command('view', result.study)}"]
    return Rendered(tuple(lines), table)


def _outcome_table(rows: Sequence[Row], lesions: LesionTable | None) -> Table:
    first = rows[0]
    level = first["auc_limits"].partition(",")[0]  # `95 %, DeLong ...`
    decided = SEVERAL if _auc_column(first) == "macro_auc" else BINARY
    auc = _auc_title(first)
    method = "method, OPTIMISTIC" if first["protocol"] == "optimistic" else "method"
    header = (
        method,
        f"{auc} [{level}]",
        "of seeds",
        *decided.values(),
        *["top tile\nin a lesion"] * (lesions is not None),
    )
    body = [
        (
            formatting.shorten(row["display_name"], 19) + " *" * _is_transductive(row),
            _interval(row),
            f"{_number(row, 'seed_auc_mean')} ± {_number(row, 'seed_auc_sd')}",
            *(_number(row, name) for name in decided),
            *([] if lesions is None else [_hit_rate(row["display_name"], lesions)]),
        )
        for row in rows
    ]
    return (header, *body)


def _other_heads(row: Row) -> list[str]:
    """Return the metrics of a table of another outcome than classes, the primary one first."""
    return [key.removesuffix(" value") for key in row if key.endswith(" value")]


def _other_table(rows: Sequence[Row]) -> Table:
    heads = _other_heads(rows[0])
    level = formatting.percent(float(rows[0]["level"]))
    main, *others = heads
    header = ("method", f"{main} [{level}]", "of seeds", *others, "p")
    body = [
        (
            formatting.shorten(row["display_name"], 19),
            f"{_number(row, f'{main} value')} [{_number(row, f'{main} low')}, {_number(row, f'{main} high')}]",
            f"{_number(row, 'seed_mean')} ± {_number(row, 'seed_sd')}",
            *(_number(row, f"{head} value") for head in others),
            formatting.p_value(float(row["p_value"])) if row["p_value"] else "-",
        )
        for row in rows
    ]
    return (header, *body)


def _other_line(row: Row) -> str:
    head = _other_heads(row)[0]
    limits = f"[{_number(row, f'{head} low')}, {_number(row, f'{head} high')}]"
    return (
        f"{head} of {row['display_name']}: {_number(row, f'{head} value')} {limits}, by the mean score of "
        f"{row['num_seeds']} trainings; {row['on']}"
    )


def _hit_rate(method: str, lesions: LesionTable) -> str:
    """Return how often the highest-scoring tile lies in a lesion, or a dash."""
    found = lesions.scores.get(method)
    hits = found.intervals.get("hit_rate") if found is not None else None
    return formatting.number(None if hits is None else hits.value, digits=2)


def _outcome_line(row: Row) -> str:
    """Return the AUC of the study's own method in words."""
    counts = " and ".join(" ".join(reversed(part.split("="))) for part in row["test_slides"].split(";"))
    doubt = "; OPTIMISTIC: epochs and thresholds were chosen on these" if row["protocol"] == "optimistic" else ""
    seen = "; transductive: the encoder was trained, without labels, on slides of these patients"
    return (
        f"{_auc_title(row)} of {row['display_name']}: {_interval(row)}, by the mean probability of {row['num_seeds']} "
        f"trainings, on {counts} slides ({row['test']}){doubt}{seen * _is_transductive(row)}"
    )


def _auc_column(row: Row) -> str:
    return "macro_auc" if "macro_auc" in row else "auc"


def _auc_title(row: Row) -> str:
    return _auc_column(row).replace("_", " ").replace("auc", "AUC")


def _is_transductive(row: Row) -> bool:
    """Return whether the encoder has seen test slides."""
    return row.get("transductive") == "yes"


def _interval(row: Row) -> str:
    name = _auc_column(row)
    return f"{_number(row, name)} [{_number(row, f'{name}_low')}, {_number(row, f'{name}_high')}]"


def _number(row: Row, name: str) -> str:
    text = row.get(name) or ""
    return f"{float(text):.3f}" if text else "-"


# ---------------------------------------------------------------------------------------------------- shared


def _last_parts(folder: Path | str, number: int) -> str:
    """Return a folder of the study as users read it: relative to the study, which is `number` folders up."""
    return "/".join(Path(folder).parts[-number:])


def _are(count: int, noun: str) -> str:
    return f"1 {noun} is" if count == 1 else f"{count} {noun}s are"


def _few(lines: list[str], where: str, most: int = 40) -> list[str]:
    """Return the first lines, and where the others are to be found."""
    more = len(lines) - most
    return lines if more <= 0 else [*lines[:most], f"... and {more} more, see {where}"]


def _rebuilt(slides: Mapping[str, Any]) -> list[str]:
    return _rebuilt_lines({slide: found.outcome for slide, found in slides.items()})


def _rebuilt_lines(outcomes: Mapping[str, BuildOutcome]) -> list[str]:
    """Return why slides were rebuilt, one line per reason."""
    reasons: dict[str, list[str]] = {}
    for slide, outcome in outcomes.items():
        if outcome.status is BuildStatus.REBUILT:
            reasons.setdefault(str(outcome), []).append(slide)
    return [f"{slides[0] if len(slides) == 1 else f'{len(slides)} slides'} {why}" for why, slides in reasons.items()]


def _num_up_to_date(outcomes: Iterable[BuildOutcome]) -> str:
    number = sum(outcome == UP_TO_DATE for outcome in outcomes)
    return f" ({number} were up to date)" if number else ""


_RENDERERS: dict[str, Callable[[Any], Rendered]] = {
    "StageResult": _plain,
    "CheckResult": _check,
    "TileResult": _tile,
    "PretrainResult": _pretrain,
    "EmbedResult": _embed,
    "TrainResult": _train,
    "CompareResult": _compare,
    "EvaluateResult": _evaluate,
    "LocalizeResult": _localize,
    "LesionsResult": _lesions,
    "ReportResult": _report,
    "SynthResult": _synth,
    "SplitResult": _split,
    "ExportResult": _export,
    "ViewResult": _view,
    "InitResult": _init,
    "StatusResult": _status,
    "PackageResult": _package,
    "PredictResult": _predict,
    "ValidateResult": _validate,
    "PlanResult": _plan,
    "PowerResult": _power,
    "DoctorResult": _doctor,
    "RunStart": _run_start,
    "RunResult": _run,
    "RunOutcome": _run_outcome,
    "ShardResult": _shard,
    "SbatchResult": _sbatch,
    "SlideEmbeddingsResult": _slide_embeddings,
}
"""By the name of the result's class, so that rendering one kind does not import the modules of all others."""
