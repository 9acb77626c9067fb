"""The stage `embed`: turn tiles into embeddings, one feature file per slide."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selfvitmil.engine import Engine
from selfvitmil.errors import ConfigError, EncoderError
from selfvitmil.settings import StudySettings, tiling_name, to_toml
from selfvitmil.stages.base import (
    Basis,
    Engines,
    Estimate,
    Pending,
    Progress,
    SlideWork,
    Snapshot,
    Stage,
    StageResult,
    data_frame,
    nothing_done,
    unknown,
    why_build,
)
from selfvitmil.stages.train import TWO_SCALES, compared_methods
from selfvitmil.store.failures import Failure, record_failures
from selfvitmil.store.files import write_text
from selfvitmil.store.layout import ENCODER_SLIDES_FILE, SLIDES_FILE, feature_name
from selfvitmil.store.provenance import FRESH
from selfvitmil.study import (
    Study,
    coarse_mpp,
    embed_stage,
    encoder_sources,
    features_name,
    map_slides,
    num_tiles,
    slides_of,
)

if TYPE_CHECKING:
    from selfvitmil.commands.run import RunPlan
    from selfvitmil.embed import EmbeddedSlide
    from selfvitmil.encoder import Encoder, EncoderConfig
    from selfvitmil.stages.measure import Measures


@dataclass(frozen=True)
class EmbeddedFeatures:
    """Embeddings of one tiling by one encoder."""

    encoder: str
    tiling: str
    layout: str
    """How an embedding is composed of the encoder's tokens."""
    dim: int
    slides: Mapping[str, EmbeddedSlide]
    """Slides that have a feature file now, with the outcome of each."""
    folder: Path


@dataclass(frozen=True)
class EmbedResult(StageResult):
    """What `embed` did."""

    features: tuple[EmbeddedFeatures, ...]
    num_slides: int
    """Slides of the cohort."""

    def to_frame(self) -> Any:
        """Return a pandas DataFrame with encoder, tiling and number of tiles of every slide."""
        rows = [
            {"slide": slide, "encoder": each.encoder, "tiling": each.tiling, "tiles": found.num_tiles}
            for each in self.features
            for slide, found in each.slides.items()
        ]
        return data_frame(rows, "slide")


def embed(study: Study, encoders: Sequence[str], engine: Engine) -> EmbedResult:
    """Turn the tiles of every scale into embeddings with each encoder; writes `bags/<tiling>/features_<encoder>/`.

    A name that the study has an encoder of for every split stands for all of these. Where `embed.layout` is set, its
    name follows the encoder's (`features_name`).
    """
    settings = study.settings
    sources, notes = _sources(study, encoders)
    failures: list[Failure] = []
    features: list[EmbeddedFeatures] = []
    with study.lock("embed"):
        cohort = study.store_cohort()
        for each in sources:
            work, missing = _embed_work(study, each)
            done, failed = map_slides(engine, study.root, work.stage, work.function, work.jobs, **work.options)
            record_failures(study.root, work.stage, [failure.slide for failure in missing], missing)
            failures += [*missing, *failed]
            folder = study.layout.features(each.tiling, each.features)
            if done:
                used = settings.model_copy(
                    update={"stain": settings.stain.model_copy(update={"method": each.stain_method})}
                )
                write_text(folder / "settings.toml", to_toml(used, {"slide", "stain", "tile", "embed"}))
                _keep_encoder_slides(folder, Path(each.place))
            features.append(EmbeddedFeatures(each.features, each.tiling, each.layout, each.dim, done, folder))
        study.forget_claims("embed")
    study.forget_features()
    return EmbedResult(tuple(features), len(cohort), failures=tuple(failures), notes=tuple(notes))


@dataclass(frozen=True)
class _Source:
    """An encoder, and tiles that it fits."""

    features: str
    """Name of its embeddings."""
    place: str
    """Where its weights are."""
    tiling: str
    layout: str
    dim: int
    stain_method: str


def stain_method(encoder: Encoder | None, settings: StudySettings) -> str:
    """Return how tiles are stained for an encoder: `none` for a published one, unless `stain.method` is set."""
    if encoder is not None and encoder.keeps_colours and "method" not in settings.stain.model_fields_set:
        return "none"
    return settings.stain.method


def _sources(study: Study, encoders: Sequence[str]) -> tuple[list[_Source], list[str]]:
    """Return the encoders with every scale that they fit, and notes; raises what is wrong with one of them."""
    from selfvitmil.encoder import load_encoder

    settings = study.settings
    places = {
        features_name(name, settings.embed.layout): place
        for source in encoders
        for name, place in encoder_sources(study.root, source).items()
    }
    # Loaded here first: one clear error, and one download, instead of one per slide.
    loaded = {name: load_encoder(source, layout=settings.embed.layout) for name, source in places.items()}
    pairs, notes = _scales_that_fit({name: each.config for name, each in loaded.items()}, settings)
    notes += [f"note: {warning}" for encoder in loaded.values() for warning in encoder.warnings]
    sources = [
        _Source(name, places[name], tiling, each.config.layout, each.dim, stain_method(each, settings))
        for tiling, name in pairs
        for each in (loaded[name],)
    ]
    return sources, notes


def _embed_work(study: Study, source: _Source) -> tuple[SlideWork, list[Failure]]:
    """Return the work on slides that have tiles, and a failure for each that has none."""
    from selfvitmil.embed import embed_slide, embed_slides

    stage = embed_stage(source.features, source.tiling)
    jobs, missing = embed_jobs(study, source.tiling, source.features, source.place, stage, source.stain_method)
    options = {"unit": "tiles", "count": num_tiles, "stream": embed_slides}
    return SlideWork(stage, embed_slide, jobs, options), missing


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


def embed_jobs(
    study: Study, tiling: str, name: str, source: str, stage: str, stain: str
) -> tuple[dict[str, Any], list[Failure]]:
    """Return jobs for the slides that have tiles, and a failure for each that has none."""
    from selfvitmil.embed import EmbedJob
    from selfvitmil.slides import SlideRef

    settings = study.settings
    jobs: dict[str, Any] = {}
    missing: list[Failure] = []
    for row in study.cohort.rows:
        table = study.layout.tile_table(tiling, row.slide)
        bag = study.layout.feature_file(tiling, name, row.slide)
        if table.exists():
            jobs[row.slide] = EmbedJob(
                SlideRef.of(row, settings.slide), table, bag, source, name, stain, settings.embed
            )
        else:
            reason = f"{row.slide}: no tile table in tiles/{tiling}"
            missing.append(Failure(row.slide, stage, reason, "Run `selfvitmil tile` and see what it says"))
    return jobs, missing


def _check_scales(plan: RunPlan, config: EncoderConfig | None) -> None:
    """An error where an encoder, or the one that will be trained (None), is not for the tiles that it shall see."""
    from selfvitmil.encoder import check_fits

    settings, tile = plan.settings, plan.settings.tile
    with nothing_done():
        rows = compared_methods(settings, two_scales=bool(tile.parent_mpp)) if plan.has("compare") else ()
        methods = [row.method for row in rows]
        methods += (settings.train.aggregator,) if plan.has("evaluate") else ()
        if config is not None:
            check_fits(config, tile.mpp, tile.size_px, settings.stain.method)
        if TWO_SCALES in methods:
            _check_coarse(config, coarse_mpp(tile), settings)


def _check_coarse(config: EncoderConfig | None, mpp: float, settings: StudySettings) -> None:
    from selfvitmil.encoder import check_fits

    try:
        if config is None:
            raise EncoderError(
                f"the encoder that is trained here is for tiles at {settings.tile.mpp:g} um/px alone",
                code="encoder-mpp-mismatch",
            )
        check_fits(config, mpp, settings.tile.size_px, settings.stain.method)
    except EncoderError as error:
        raise ConfigError(
            f"{TWO_SCALES} needs features of tiles at {mpp:g} um/px too",
            error.what,
            f"Name compare.methods without {TWO_SCALES}, or give --encoder with one that fits any scale",
            code="two-scales-mpp",
        ) from None


NO_TILES = "without tiles"


BYTES_PER_TILE, BYTES_PER_SLIDE = 32, 20_000
"""Usual sizes beside the embeddings themselves."""


class Embed(Stage):
    """Turn tiles into embeddings, with the encoder of the study or a given one."""

    name = "embed"
    is_shared = True
    runs_encoder = True
    by_slide = True
    is_essential = True
    done_when_nothing_pending = True

    def preflight(self, plan: RunPlan) -> None:
        first = None if plan.request.trains_encoder else plan.loaded[next(iter(plan.sources))]
        if plan.request.trains_encoder or first is not None:
            _check_scales(plan, None if first is None else first.config)

    def slide_work(self, study: Study, encoders: Sequence[str]) -> Iterable[SlideWork]:
        return [_embed_work(study, source)[0] for source in _sources(study, encoders)[0]]

    def assemble(self, study: Study, encoders: Sequence[str], engine: Engine) -> EmbedResult:
        return embed(study, encoders, engine)

    def pending(self, plan: RunPlan) -> Pending:
        """Of all encoders together: a slide is to do when one of them has no up-to-date embeddings of it."""
        todo: dict[str, str] = {}
        for name, source in plan.sources.items():
            todo = self._pending_encoder(plan, name, source) | todo
        hopeless = frozenset(slide for slide, why in todo.items() if why == NO_TILES)
        found = Pending(todo, len(plan.cohort) - len(todo), hopeless)
        if len(plan.sources) == 1:
            return found
        return replace(found, words=f"with each of {len(plan.sources)} encoders: {found.line}")

    def _pending_encoder(self, plan: RunPlan, name: str, source: str) -> dict[str, str]:
        """Slide -> why it is embedded with this encoder."""
        features = features_name(name, plan.settings.embed.layout)
        untrained = plan.request.trains_encoder and name in plan.pending("pretrain").todo
        loaded = None if untrained else plan.loaded[name]
        stain = stain_method(loaded, plan.settings)
        jobs, _ = embed_jobs(plan.study, plan.tiling, features, source, self.name, stain)
        identity = None if loaded is None else loaded.identity()
        changing = plan.pending("tile").changing
        found = {
            slide: _why_embed(slide, jobs.get(slide), changing, untrained, identity) for slide in plan.cohort.slides
        }
        return {slide: why for slide, why in found.items() if why}

    def estimate(self, plan: RunPlan, measures: Measures) -> Estimate:
        todo, encoder, gpu = plan.pending(self.name).todo, measures.encoder, measures.gpu
        if encoder is None:
            return unknown(on_gpu=gpu)
        tiles, number = measures.tiles_of(todo), len(plan.sources)  # every encoder on every slide
        disk = number * (tiles * (2 * encoder.network.dim + BYTES_PER_TILE) + len(todo) * BYTES_PER_SLIDE)
        pixels = 3 * plan.settings.tile.size_px**2
        memory = 4 * encoder.num_weights + plan.settings.embed.batch * (
            5 * pixels + 40 * encoder.activations_per_block(plan.settings.tile.size_px)
        )
        seconds = measures.startup_s + number * tiles / measures.with_reading(encoder.tiles_per_s)
        return Estimate(seconds, disk, memory, Basis.MEASURED, gpu)

    def run(self, plan: RunPlan, engines: Engines) -> EmbedResult:
        return embed(plan.study, list(plan.sources.values()), engines.device)

    def status(self, snapshot: Snapshot) -> Iterable[Progress]:
        for folder in snapshot.layout.all_features():
            stage = embed_stage(feature_name(folder), folder.parent.name)
            yield snapshot.slide_files(self.name, folder, stage)

    def is_idle(self, plan: RunPlan) -> bool:
        return super().is_idle(plan) and not plan.settings.tile.parent_mpp


def _why_embed(slide: str, job: Any, changing: Collection[str], untrained: bool, identity: str | None) -> str | None:
    """Why a slide is to be embedded; None when its embeddings are up to date, or only a hub could tell."""
    from selfvitmil.embed import features_freshness

    if job is None and slide not in changing:
        return NO_TILES
    if job is None or not job.bag.exists():
        return "new"
    if slide in changing:
        return "stale: its tiles are rebuilt"
    if untrained:
        return "stale: the encoder is trained again"
    freshness = FRESH if identity is None else features_freshness(job, identity)
    return None if freshness.is_up_to_date else why_build(freshness)
