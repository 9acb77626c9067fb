"""Commands from tiles to vectors: `pretrain`, `embed`, `export`."""

from __future__ import annotations

import math
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, get_args

import numpy as np

from selfvitmil.cohort import Cohort
from selfvitmil.engine import Engine
from selfvitmil.errors import ConfigError, EncoderError
from selfvitmil.pipeline.pretraining import (
    EncoderRun,
    encoder_runs,
    settle_scope,
    slides_of,
    split_encoders,
)
from selfvitmil.pipeline.splitting import propose_split
from selfvitmil.pipeline.study import (
    CohortSource,
    Summary,
    changes,
    find_cohort,
    map_slides,
    num_tiles,
    open_study,
    store_cohort,
    study_cohort,
)
from selfvitmil.settings import StudySettings, TokenLayout, tiling_name, to_toml
from selfvitmil.store.failures import Failure, record_failures
from selfvitmil.store.files import write_text
from selfvitmil.store.layout import ENCODER_SLIDES_FILE, SLIDES_FILE, StudyLayout


def pretrain(study: Path, name: str, settings: StudySettings, images: Path | None = None) -> Summary:
    """Train an encoder on the tiles of the training split (or on a folder of images); writes `encoders/<name>/`.

    Where one encoder would see test slides, or with `pretrain.per_split`, one is trained for every split
    (`encoders/<name>_<split>/`). Under torchrun every process calls this; the first one holds the lock and writes.
    """
    from selfvitmil.pretrain.sources import ImageTiles

    if encoder_name(name) != name:
        raise ConfigError(f"encoder name {name!r} does not do as a folder's name", how=f"Try {encoder_name(name)!r}")
    first = os.environ.get("RANK", "0") == "0"
    with open_study(study, "pretrain") if first else nullcontext():
        if images is not None:
            lines, interrupted = _train(ImageTiles(images), study, name, f"images of {images.name}", settings)
            return Summary(tuple(lines) if first else (), interrupted=interrupted)
        cohort, _ = (study_cohort if first else find_cohort)(study, CohortSource())
        cohort, lines, table = propose_split(study, name, cohort, settings)
        if first:
            store_cohort(study, cohort)
        settings, told = settle_scope(study, name, cohort, settings)
        lines += told
        for line in lines if first else ():
            print(line, file=sys.stderr, flush=True)  # before hours of training
        interrupted = False
        for run in encoder_runs(cohort, name, settings):
            source, notes, trained_on = training_tiles(study, run, settings)
            told, interrupted = _train(source, study, run.name, trained_on, settings)
            lines += [*notes, *told]
            if interrupted:
                break
    return Summary(tuple(lines) if first else (), table=table if first else (), interrupted=interrupted)


def _train(source: Any, study: Path, name: str, trained_on: str, settings: StudySettings) -> tuple[list[str], bool]:
    """Train one encoder; lines on it, and whether a signal ended the training."""
    from selfvitmil.pretrain.train import Origin
    from selfvitmil.pretrain.train import pretrain as train

    first = os.environ.get("RANK", "0") == "0"
    out = StudyLayout(study).encoder(name)
    origin, show = Origin(trained_on, settings.preset), _training_lines() if first else None
    result = train(source, out, settings.pretrain, origin, report=show)
    if first:
        # The encoder whose weights it started from may have seen others.
        seen = {*source.names, *slides_of(Path(settings.pretrain.init) / SLIDES_FILE)}
        write_text(out / SLIDES_FILE, "".join(f"{slide}\n" for slide in sorted(seen)))
        write_text(out / "settings.toml", to_toml(settings, {"preset", "slide", "stain", "tile", "pretrain"}))
    lines = [f"note: {warning}" for warning in result.warnings]
    loss = f", loss {result.metrics['loss']:.3f}" if "loss" in result.metrics else ""
    steps = f"step {result.step} of {result.total_steps}{loss}"
    if result.ending is not None and result.ending.stopped_early:
        steps = result.ending.words
    elif result.ending is not None and result.ending.words:
        steps += f"; {result.ending.words}"
    lines.append(f"encoders/{name}: {result.note}, {steps}")
    return lines, not result.finished


def training_tiles(study: Path, run: EncoderRun, settings: StudySettings) -> tuple[Any, list[str], str]:
    """The tiles that an encoder may see, lines on slides that have none, and the words for the encoder's config."""
    from selfvitmil.pretrain.sources import PackTiles, SlideTiles, TrainSlide

    tables = {row.slide: StudyLayout(study).tile_table(tiling_name(settings.tile), row.slide) for row in run.rows}
    found = [row for row in run.rows if tables[row.slide].exists()]
    slides = [TrainSlide(row.slide, row.path, tables[row.slide], row.mpp) for row in found]
    missing = [row.slide for row in run.rows if row not in found]
    lines = [f"note: {len(missing)} slides have no tiles and are left out: {', '.join(missing)}"] if missing else []
    if settings.pretrain.packs:
        source = PackTiles(slides, stain_method=settings.stain.method)
    else:
        source = SlideTiles(slides, stain_method=settings.stain.method, reader=settings.slide.reader)
    return source, lines, f"{run.words}, {len(slides)} slides"


def _training_lines(seconds: float = 10.0) -> Callable[[dict[str, Any]], None]:
    """Prints how training goes, the first line at once and then no more often than every `seconds`.

    The first alarm is printed at once: whoever looks on can end a run that gets worse.
    """
    last, alarmed = -math.inf, False

    def show(line: dict[str, Any]) -> None:
        nonlocal last, alarmed
        if "alarm" in line and not alarmed:
            alarmed = True
            print(f"pretrain: step {line['step']}, warning: {line['alarm']}", file=sys.stderr, flush=True)
        if time.monotonic() - last < seconds:
            return
        last = time.monotonic()
        parts = [f"{key.replace('_', ' ')} {line[key]:.3g}" for key in SHOWN_METRICS if key in line]
        print(f"pretrain: step {line['step']}, {', '.join(parts)}", file=sys.stderr, flush=True)

    return show


SHOWN_METRICS = (
    "loss",
    "teacher_entropy",
    "feature_rank",
    "quality",
    "knn20",
    "linear",
    "tiles_per_s",
    "data_wait_share",
)


def embed(study: Path, encoders: Sequence[str], settings: StudySettings, engine: Engine) -> Summary:
    """Turn the tiles of every scale into embeddings with each encoder; writes `bags/<tiling>/features_<encoder>/`.

    A name that the study has an encoder of for every split stands for all of these. Where `embed.layout` is set, its
    name follows the encoder's (`features_name`).
    """
    from selfvitmil.embed import embed_slide
    from selfvitmil.encoder import load_encoder

    sources = {
        features_name(name, settings.embed.layout): place
        for source in encoders
        for name, place in encoder_sources(study, source).items()
    }
    # Loaded here first: one clear error, and one download, instead of one per slide.
    loaded = {name: load_encoder(source, layout=settings.embed.layout) for name, source in sources.items()}
    pairs, lines = _scales_that_fit({name: encoder.config for name, encoder in loaded.items()}, settings)
    lines += [f"note: {warning}" for encoder in loaded.values() for warning in encoder.warnings]
    lines += [
        f"{name}: layout {encoder.config.layout}, embeddings of {encoder.dim} dimensions"
        for name, encoder in loaded.items()
    ]
    del loaded
    failures: list[Failure] = []
    with open_study(study, "embed"):
        cohort, _ = study_cohort(study, CohortSource())
        for tiling, name in pairs:
            stage = embed_stage(name, tiling)
            jobs, missing = embed_jobs(study, cohort, tiling, name, sources[name], settings, stage)
            done, failed = map_slides(engine, study, stage, embed_slide, jobs, unit="tiles", count=num_tiles)
            record_failures(study, stage, [failure.slide for failure in missing], missing)
            failures += [*missing, *failed]
            folder = StudyLayout(study).features(tiling, name)
            if done:
                write_text(folder / "settings.toml", to_toml(settings, {"slide", "stain", "tile", "embed"}))
                _keep_encoder_slides(folder, Path(sources[name]))
            lines += _embed_lines(done, len(cohort), f"bags/{tiling}/features_{name}")
    return Summary(tuple(lines), tuple(failures))


def _keep_encoder_slides(folder: Path, encoder: Path) -> None:
    """Write beside features which slides their encoder was trained on, as far as its folder tells."""
    slides = sorted(slides_of(encoder / SLIDES_FILE))
    if slides:
        write_text(folder / ENCODER_SLIDES_FILE, "".join(f"{slide}\n" for slide in slides))
    else:
        (folder / ENCODER_SLIDES_FILE).unlink(missing_ok=True)


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


LAYOUT_MARK = "__"
"""Between encoder and layout in the name of a features folder."""


def features_name(source: str, layout: str | None) -> str:
    """What the embeddings of an encoder are called: after the encoder, and after the layout where one was asked for.

    `dino`, `dino__cls4-clsmean`: so embeddings of two layouts lie in two folders, with models and results of their own.
    """
    name = encoder_name(source)
    if split_features_name(name)[1] is not None:
        raise ConfigError(
            f"encoder {name}: its name ends like a layout", "features folders of layouts end so", "Rename the encoder"
        )
    return name if layout is None else f"{name}{LAYOUT_MARK}{layout.replace('+', '-')}"


def split_features_name(name: str) -> tuple[str, str | None]:
    """Encoder and layout that a features folder is named after; None where it has the encoder's own layout."""
    encoder, _, ending = name.rpartition(LAYOUT_MARK)
    layouts = {layout.replace("+", "-"): layout for layout in get_args(TokenLayout)}
    return (encoder, layouts[ending]) if encoder and ending in layouts else (name, None)


def encoder_source(study: Path, source: str) -> str:
    """An encoder of the study by its name, else `source` as it is."""
    own = StudyLayout(study).encoder(source)
    return str(own) if own.is_dir() else source


def encoder_sources(study: Path, source: str) -> dict[str, str]:
    """Name -> where its weights are; several where the study has an encoder of that name for every split."""
    if not StudyLayout(study).encoder(source).is_dir() and (own := split_encoders(study, source)):
        return {name: str(StudyLayout(study).encoder(name)) for name in own.values()}
    return {encoder_name(source): encoder_source(study, source)}


def embed_stage(name: str, tiling: str) -> str:
    """What failures.csv calls the embedding of these tiles by this encoder."""
    return f"embed {name} {tiling}"


def embed_jobs(
    study: Path, cohort: Cohort, tiling: str, name: str, source: str, settings: StudySettings, stage: str
) -> tuple[dict[str, Any], list[Failure]]:
    """Jobs for the slides that have tiles, and a failure for each that has none."""
    from selfvitmil.embed import EmbedJob

    jobs: dict[str, Any] = {}
    missing: list[Failure] = []
    for row in cohort.rows:
        table = StudyLayout(study).tile_table(tiling, row.slide)
        bag = StudyLayout(study).feature_file(tiling, name, row.slide)
        if table.exists():
            jobs[row.slide] = EmbedJob(
                row.slide, row.path, table, bag, source, name, settings.stain.method, settings.embed,
                settings.slide.reader, row.mpp,
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
    return [*changes(done), *warnings, f"{total:,} vectors of {len(done)} of {asked} slides in {folder}{wait}"]


def export(
    study: Path, encoder: str, out: Path, to: str, settings: StudySettings, engine: Engine, dtype: str | None = None
) -> Summary:
    """Write the feature files of an encoder in another tool's form into the folder `out`."""
    from selfvitmil.bags import export_slide, plan_export

    name, tiling = encoder_name(encoder), tiling_name(settings.tile)
    if split_features_name(name)[1] is None:
        name = features_name(name, settings.embed.layout)
    folder = StudyLayout(study).features(tiling, name)
    if not folder.is_dir():
        what = f"{study.name}: there are no vectors of encoder {encoder!r} for tiles {tiling}"
        raise ConfigError(what, how="Run `selfvitmil embed` first, or name another encoder")
    with open_study(study, "export"):
        jobs = plan_export(folder, out, to, dtype)
        done, failures = map_slides(engine, study, f"export {to}", export_slide, jobs, unit="tiles", count=num_tiles)
    return Summary((f"{len(done)} of {len(jobs)} slides written to {out} for {to}",), tuple(failures))
