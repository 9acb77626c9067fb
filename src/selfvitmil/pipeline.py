"""The commands as functions: each takes a study folder and settings, runs its stage over the cohort, writes artefacts.

Together with `cli` this is the only place that knows several stages. Every function returns a `Summary`; slides that
failed are in `failures.csv` by then and did not stop the others. Functions that work on slides take the `Engine` to do
it with, so that one command starts its workers once.
"""

from __future__ import annotations

import csv
import io
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np

from selfvitmil import artefact
from selfvitmil.artefact import Failure
from selfvitmil.cohort import Cohort, merge_cohorts, read_cohort, write_cohort
from selfvitmil.engine import Engine
from selfvitmil.errors import ConfigError, EncoderError
from selfvitmil.settings import StudySettings, SynthSettings, resolve_settings, tiling_name, to_toml

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


@dataclass(frozen=True)
class CohortSource:
    """Where a study's slides come from, when it is not yet (or no longer only) its own cohort.csv."""

    cohort: Path | None = None
    labels: Path | None = None
    label_column: str | None = None
    slides_folder: Path | None = None


# ---------------------------------------------------------------------------------------------------- study


@contextmanager
def open_study(study: Path, command: str) -> Iterator[None]:
    """Hold the study's lock, with what a killed run left behind swept away."""
    with artefact.study_lock(study, command):
        artefact.remove_leftovers(study)
        yield


def study_settings(study: Path, flags: Mapping[str, Any]) -> StudySettings:
    """Settings of a study: its `study.toml` if there is one, `flags` on top."""
    toml_file = study / "study.toml"
    return resolve_settings(toml_file if toml_file.exists() else None, flags)


def study_cohort(study: Path, source: CohortSource) -> tuple[Cohort, list[str]]:
    """The study's cohort, extended by `source` when one is given; and lines that tell what was added."""
    own = study / "cohort.csv"
    if source.cohort is None:
        if not own.exists():
            raise ConfigError(
                f"{study.name}: this study has no cohort.csv yet",
                "so there is nothing to work on",
                "Give --cohort with a folder of slides or a table of them",
            )
        return read_cohort(own), []
    if own.exists() and source.cohort.resolve() == own.resolve():
        return read_cohort(own), []
    cohort = read_cohort(
        source.cohort, labels=source.labels, label_column=source.label_column, slides_folder=source.slides_folder
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
    write_cohort(own, cohort)
    return cohort, [*lines, *(f"note: {warning}" for warning in cohort.warnings)]


def _map(
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
        artefact.record_failures(study, stage, [*done, *(failure.slide for failure in failures)], failures)
    return {name: done[name] for name in jobs if name in done}, failures


def _write_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    artefact.write_text(path, text.getvalue())


# ---------------------------------------------------------------------------------------------------- commands


def synth(folder: Path, settings: SynthSettings, engine: Engine) -> Summary:
    """Write a cohort of made slides into `folder`."""
    from selfvitmil.slides import synthetic

    if folder.exists() and any(path.name != ".lock" for path in folder.iterdir()):
        raise ConfigError(
            f"{folder.name}: this folder is not empty", "made slides would mix with what is there", "Name a new one"
        )
    plans = synthetic.plan_cohort(
        slides=settings.slides,
        positives=settings.positives,
        seed=settings.seed,
        size=(settings.size_px, settings.size_px),
        layout=settings.layout,
    )
    jobs = {plan.name: (plan, folder) for plan in plans}
    truths, failures = _map(engine, folder, "synth", _write_planned, jobs)
    synthetic.finish_cohort(folder, list(truths.values()))
    lines = [f"{len(truths)} slides written to {folder}"]
    if settings.hostile:
        lines.append(f"{len(synthetic.make_hostile(folder / 'hostile'))} hostile files written to {folder / 'hostile'}")
    return Summary(tuple(lines), tuple(failures))


def _write_planned(job: Any) -> Any:
    from selfvitmil.slides import synthetic

    plan, folder = job
    return synthetic.write_planned(plan, folder)


def check(study: Path, source: CohortSource, settings: StudySettings, engine: Engine) -> Summary:
    """Open every slide of the cohort and read some of it; writes `check.csv` and `failures.csv`."""
    from selfvitmil.slides.check import CheckJob, SlideCheck, check_slide

    with open_study(study, "check"):
        cohort, lines = study_cohort(study, source)
        jobs = {
            row.slide: CheckJob(
                row.slide, row.path, settings.slide.reader, row.mpp or settings.slide.mpp, row.annotation
            )
            for row in cohort.rows
        }
        done, failures = _map(engine, study, "check", check_slide, jobs)
        rows = _with_twins(list(done.values()))
        header = [name for name in SlideCheck.__dataclass_fields__ if name != "fingerprint"]
        cells = [[_cell(asdict(row)[name]) for name in header] for row in rows]
        _write_csv(study / "check.csv", header, cells)
    lines += _few([f"{row.slide}: {warning}" for row in rows for warning in row.warnings], "check.csv")
    lines.append(f"{len(rows)} of {len(jobs)} slides can be worked with; see check.csv")
    shown = ("slide", "format", "reader", "width", "height", "mpp", "mpp_source", "levels")
    table = (shown, *(tuple(_cell(asdict(row)[name]) for name in shown) for row in rows))
    return Summary(tuple(lines), tuple(failures), table)


def _with_twins(rows: Sequence[Any]) -> list[Any]:
    """Rows with a warning on slides whose files are the same."""
    first: dict[str, str] = {}
    result = []
    for row in rows:
        twin = first.setdefault(row.fingerprint, row.slide)
        warning = () if twin == row.slide else (f"the same file as {twin}: one slide under two names",)
        result.append(replace(row, warnings=row.warnings + warning))
    return result


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.5g}"
    return "; ".join(value) if isinstance(value, tuple | list) else "" if value is None else str(value)


def tile(study: Path, source: CohortSource, settings: StudySettings, engine: Engine) -> Summary:
    """Find tissue, cut tiles, fit stains; writes `tiles/<tiling>/` and `failures.csv`."""
    from selfvitmil.tiles import SECTIONS, TileJob, tile_slide

    name = tiling_name(settings.tile)
    folder = study / "tiles"
    with open_study(study, "tile"):
        cohort, lines = study_cohort(study, source)
        jobs = {
            row.slide: TileJob(row.slide, row.path, folder, settings, row.mpp, row.annotation) for row in cohort.rows
        }
        done, failures = _map(engine, study, "tile", tile_slide, jobs, unit="tiles", count=_num_tiles)
        if done:
            artefact.write_text(folder / name / "settings.toml", to_toml(settings, SECTIONS))
            rows = [_tiles_row(slide, result) for slide, result in done.items()]
            _write_csv(folder / name / "tiles.csv", TILES_HEADER, rows)
    lines += _tile_lines(done, len(jobs), name)
    return Summary(tuple(lines), tuple(failures))


def _num_tiles(result: Any) -> int:
    return result.num_tiles


TILES_HEADER = (
    "slide",
    "tiles",
    "tissue_mm2",
    "pen_fraction",
    "stain_fitted",
    "reader",
    "mpp_source",
    "tumour_tiles",
    "tumour_tiles_lost",
    "warnings",
)


def _tiles_row(slide: str, result: Any) -> list[str]:
    return [slide, str(result.num_tiles), *(_cell(result.attributes.get(column)) for column in TILES_HEADER[2:])]


def _tile_lines(done: Mapping[str, Any], asked: int, name: str) -> list[str]:
    """What a person wants to read after tiling: changes, warnings, odd counts, totals."""
    warnings = [f"{slide}: {text}" for slide, result in done.items() for text in result.attributes.get("warnings", ())]
    counts = np.array([result.num_tiles for result in done.values()], dtype=np.int64)
    if len(counts) >= 5:
        middle = float(np.median(counts))
        warnings += [
            f"{slide}: {result.num_tiles} tiles, where the median is {middle:.0f}: look at its picture"
            for slide, result in done.items()
            if not middle / 10 <= result.num_tiles <= middle * 10
        ]
    current = sum(result.note == "current" for result in done.values())
    total = f"{counts.sum():,} tiles of {len(done)} of {asked} slides in tiles/{name}"
    left_alone = f" ({current} were current and left alone)" if current else ""
    return [*_changes(done), *_few(warnings, f"tiles/{name}/tiles.csv"), total + left_alone]


def _changes(done: Mapping[str, Any]) -> list[str]:
    """Why slides were made again, one line per reason."""
    reasons: dict[str, list[str]] = {}
    for slide, result in done.items():
        if result.note not in ("made", "current"):
            reasons.setdefault(result.note, []).append(slide)
    return [f"{slides[0] if len(slides) == 1 else f'{len(slides)} slides'} {note}" for note, slides in reasons.items()]


def _few(lines: list[str], where: str, most: int = 40) -> list[str]:
    """The first lines, and where the others are to be found."""
    more = len(lines) - most
    return lines if more <= 0 else [*lines[:most], f"... and {more} more, see {where}"]


def pretrain(study: Path, name: str, settings: StudySettings, images: Path | None = None) -> Summary:
    """Train an encoder on the tiles of the training split (or on a folder of images); writes `encoders/<name>/`.

    Under torchrun every process calls this; the first one holds the lock and writes.
    """
    from selfvitmil.pretrain.sources import ImageTiles
    from selfvitmil.pretrain.train import Origin
    from selfvitmil.pretrain.train import pretrain as train

    if encoder_name(name) != name:
        raise ConfigError(f"encoder name {name!r} does not do as a folder's name", how=f"Try {encoder_name(name)!r}")
    first = os.environ.get("RANK", "0") == "0"
    with open_study(study, "pretrain") if first else nullcontext():
        if images is not None:
            source, lines, trained_on = ImageTiles(images), [], f"images of {images.name}"
        else:
            source, lines, trained_on = _training_tiles(study, settings)
        show = _training_lines() if first else None
        out = study / "encoders" / name
        result = train(source, out, settings.pretrain, Origin(trained_on, settings.preset), report=show)
        if first:
            artefact.write_text(
                out / "settings.toml", to_toml(settings, {"preset", "slide", "stain", "tile", "pretrain"})
            )
    lines += [f"note: {warning}" for warning in result.warnings]
    loss = f", loss {result.metrics['loss']:.3f}" if "loss" in result.metrics else ""
    lines.append(f"encoders/{name}: {result.note}, step {result.step} of {result.total_steps}{loss}")
    return Summary(tuple(lines) if first else (), interrupted=not result.finished)


def _training_tiles(study: Path, settings: StudySettings) -> tuple[Any, list[str], str]:
    """The tiles that self-supervision may see, lines on what it does not, and the words for the encoder's config."""
    from selfvitmil.pretrain.sources import SlideTiles, TrainSlide

    cohort, _ = study_cohort(study, CohortSource())
    transductive = settings.pretrain.transductive
    rows = cohort.rows if transductive else cohort.select(split="train").rows
    if not rows:
        raise ConfigError(
            "no slide of the cohort is in the split `train`",
            "self-supervision must not see slides that a classifier is tested on later",
            "Fill the column split of cohort.csv, or add --pretrain.transductive to use all slides",
        )
    tables = {row.slide: study / "tiles" / tiling_name(settings.tile) / f"{row.slide}.h5" for row in rows}
    found = [row for row in rows if tables[row.slide].exists()]
    slides = [TrainSlide(row.slide, row.path, tables[row.slide], row.mpp) for row in found]
    missing = [row.slide for row in rows if row not in found]
    lines = [f"note: {len(missing)} slides have no tiles and are left out: {', '.join(missing)}"] if missing else []
    source = SlideTiles(
        slides, stain_method=settings.stain.method, reader=settings.slide.reader, slide_mpp=settings.slide.mpp
    )
    which = "all slides of the cohort (transductive)" if transductive else "train split"
    return source, lines, f"{which}, {len(slides)} slides"


def _training_lines(seconds: float = 10.0) -> Callable[[dict[str, Any]], None]:
    """Prints how training goes, the first line at once and then no more often than every `seconds`."""
    last = -math.inf

    def show(line: dict[str, Any]) -> None:
        nonlocal last
        if time.monotonic() - last < seconds:
            return
        last = time.monotonic()
        parts = [f"{key.replace('_', ' ')} {line[key]:.3g}" for key in SHOWN_METRICS if key in line]
        print(f"pretrain: step {line['step']}, {', '.join(parts)}", file=sys.stderr, flush=True)

    return show


SHOWN_METRICS = ("loss", "teacher_entropy", "feature_rank", "tiles_per_s", "data_wait_share")


def embed(study: Path, encoders: Sequence[str], settings: StudySettings, engine: Engine) -> Summary:
    """Turn the tiles of every scale into vectors with each encoder; writes `bags/<tiling>/features_<encoder>/`."""
    from selfvitmil.embed import embed_slide
    from selfvitmil.encoder import load_encoder

    sources = {encoder_name(source): encoder_source(study, source) for source in encoders}
    # Loaded here first: one clear error, and one download, instead of one per slide.
    configs = {name: load_encoder(source).config for name, source in sources.items()}
    pairs, lines = _scales_that_fit(configs, settings)
    failures: list[Failure] = []
    with open_study(study, "embed"):
        cohort, _ = study_cohort(study, CohortSource())
        for tiling, name in pairs:
            stage = f"embed {name} {tiling}"
            jobs, missing = _embed_jobs(study, cohort, tiling, name, sources[name], settings, stage)
            done, failed = _map(engine, study, stage, embed_slide, jobs, unit="tiles", count=_num_tiles)
            artefact.record_failures(study, stage, [failure.slide for failure in missing], missing)
            failures += [*missing, *failed]
            folder = study / "bags" / tiling / f"features_{name}"
            if done:
                artefact.write_text(folder / "settings.toml", to_toml(settings, {"slide", "stain", "tile", "embed"}))
            lines += _embed_lines(done, len(cohort), f"bags/{tiling}/features_{name}")
    return Summary(tuple(lines), tuple(failures))


def _scales_that_fit(configs: Mapping[str, Any], settings: StudySettings) -> tuple[list[tuple[str, str]], list[str]]:
    """(tiling, encoder) for every scale and the encoders made for it, and notes on the others.

    An encoder that fits no scale at all raises what `check_fits` says of it.
    """
    from selfvitmil.encoder import check_fits

    tile = settings.tile
    pairs: list[tuple[str, str]] = []
    notes: list[str] = []
    for name, config in configs.items():
        misfits: list[EncoderError] = []
        for mpp in (tile.mpp, *tile.parent_mpp):
            try:
                check_fits(config, mpp, tile.size_px, settings.stain.method)
            except EncoderError as error:
                misfits.append(error)
                notes.append(f"note: tiles at {mpp:g} um/px are not embedded with {name}: {error}")
            else:
                pairs.append((tiling_name(tile, mpp), name))
        if len(misfits) == 1 + len(tile.parent_mpp):
            raise misfits[0]
    return pairs, notes


def encoder_name(source: str) -> str:
    """What an encoder is called in file names: the last part of its folder, file or hub name."""
    name = Path(source.removeprefix("hf-hub:")).name or source
    return re.sub(r"[^A-Za-z0-9._-]", "_", name)


def encoder_source(study: Path, source: str) -> str:
    """An encoder of the study by its name, else `source` as it is."""
    own = study / "encoders" / source
    return str(own) if own.is_dir() else source


def _embed_jobs(
    study: Path, cohort: Cohort, tiling: str, name: str, source: str, settings: StudySettings, stage: str
) -> tuple[dict[str, Any], list[Failure]]:
    """Jobs for the slides that have tiles, and a failure for each that has none."""
    from selfvitmil.embed import EmbedJob

    jobs: dict[str, Any] = {}
    missing: list[Failure] = []
    for row in cohort.rows:
        table = study / "tiles" / tiling / f"{row.slide}.h5"
        bag = study / "bags" / tiling / f"features_{name}" / f"{row.slide}.h5"
        if table.exists():
            jobs[row.slide] = EmbedJob(
                row.slide, row.path, table, bag, source, name, settings.stain.method, settings.embed,
                settings.slide.reader, row.mpp or settings.slide.mpp,
            )  # fmt: skip
        else:
            reason = f"{row.slide}: no tile table in tiles/{tiling}"
            missing.append(Failure(row.slide, stage, reason, "Run `selfvitmil tile` and see what it says"))
    return jobs, missing


def _embed_lines(done: Mapping[str, Any], asked: int, folder: str) -> list[str]:
    warnings = [f"{slide}: {warning}" for slide, result in done.items() for warning in result.warnings]
    total = sum(result.num_tiles for result in done.values())
    made = [result for result in done.values() if result.note != "current"]
    wait = f", waiting for tiles {np.mean([result.wait_share for result in made]):.0%} of the time" if made else ""
    return [*_changes(done), *warnings, f"{total:,} vectors of {len(done)} of {asked} slides in {folder}{wait}"]


def start_demo(study: Path) -> None:
    """Give a new study the demo's settings; one that has settings keeps them."""
    if not (study / "study.toml").exists():
        artefact.write_bytes(
            study / "study.toml", (resources.files("selfvitmil") / "presets" / "demo.toml").read_bytes()
        )


def demo(study: Path, settings: StudySettings, engine: Engine) -> Iterator[Summary]:
    """The whole way on made slides: yields a summary after each step."""
    slides = study / "slides"
    if not (slides / "cohort.csv").exists():
        yield synth(slides, SynthSettings(), engine)
    source = CohortSource(cohort=slides / "cohort.csv")
    yield check(study, source, settings, engine)
    yield tile(study, source, settings, engine)
    yield pretrain(study, "demo", settings)
    yield embed(study, ["demo"], settings, engine)
