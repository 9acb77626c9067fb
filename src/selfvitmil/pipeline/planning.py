"""`plan`: what `run` would do and what it takes on this machine: tiles, disk, memory, time, stage by stage.

From slide headers, a close look at a few slides and a few seconds of measuring; every figure says where it comes from:
`measured` here, `reckoned` from what was measured, or `usual`, a figure of other machines. Nothing is written.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from selfvitmil.engine import num_cores
from selfvitmil.errors import SelfVitMilError
from selfvitmil.formatting import duration
from selfvitmil.pipeline.examining import memory_bytes
from selfvitmil.pipeline.measuring import (
    EncoderMeasures,
    SlideMeasures,
    measure_aggregators,
    measure_encoder,
    measure_slides,
    measure_training,
)
from selfvitmil.pipeline.methods import compared_methods
from selfvitmil.pipeline.outlook import Outlook, Request, StageOutlook, look_ahead
from selfvitmil.pipeline.pretraining import EncoderRun
from selfvitmil.pipeline.record import read_record
from selfvitmil.pipeline.running import as_before, device_lines
from selfvitmil.pipeline.study import Summary
from selfvitmil.settings import StudySettings

TRAINING_EFFICIENCY = 0.85
"""Share of the encoder's rate of operations that training with it reaches (0.47 against 0.55 of an H200's peak)."""
STEP_S = 2.0
"""A step of training is tried where it should not take longer, with fewer tiles if need be."""
WORKER_BYTES = 0.4e9
"""Usual memory of a process that cuts or reads tiles."""
BYTES_PER_TILE = {"tile": 28, "pack": 25_000, "embed": 32, "localize": 400, "map": 60}
BYTES_PER_SLIDE = {"check": 200, "tile": 400_000, "embed": 20_000, "localize": 6_000_000}
MODEL_BYTES, REPORT_BYTES = 3_000_000, 20_000_000
"""Usual sizes of files, beside those of vectors and weights."""
EVALUATE_S, LOCALIZE_S, LESIONS_S, REPORT_S = 10.0, 3.0, 0.5, 20.0
"""Usual seconds to judge trained models, to map a slide with pictures, to judge its map, and to write a report."""
CHECKED_TILES = 16
"""Tiles that `check` reads of a slide."""
ACTIVATION_BYTES = 34
"""What a ViT keeps for the way back, for each token, width and block, in half precision."""


def plan(study: Path, request: Request, settings: StudySettings) -> Summary:
    """What a run would do, and what it takes. Reads only."""
    before = read_record(study)
    request = as_before(request, before, study)
    outlook = look_ahead(study, request, settings, offline=True)
    settings = outlook.settings
    measures, notes = _measure(study, request, settings, outlook)
    reckoning = _Reckoning(request, settings, outlook, measures)
    estimates = [reckoning.of(stage) for stage in outlook.stages]
    lines = [
        f"split {'; '.join(map(' '.join, zip(outlook.split_table[0], row, strict=True)))}"
        for row in outlook.split_table[1:]
    ]
    lines = [*outlook.lines, *lines, *device_lines(settings, outlook, before), *measures.slides.notes, *notes]
    lines += [*_basis_lines(measures), *_totals(study, estimates, measures)]
    lines.append("nothing was written; `run` with the same flags does it")
    header = ("stage", "what would be done", "disk", "memory", "time", *["GPU-hours"] * measures.gpu, "by")
    pairs = zip(outlook.stages, estimates, strict=True)
    return Summary(tuple(lines), table=(header, *((stage.stage, stage.line, *each.cells) for stage, each in pairs)))


# ---------------------------------------------------------------------------------------------------- measuring


@dataclass(frozen=True)
class Measures:
    """All that was measured."""

    slides: SlideMeasures
    encoder: EncoderMeasures | None
    """None where its weights are not at hand."""
    steps_s: dict[str, float]
    """Method -> seconds of one step on a bag of the mean size."""
    processes: int
    """That work on slides at once."""
    gpu: bool


def _measure(study: Path, request: Request, settings: StudySettings, outlook: Outlook) -> tuple[Measures, list[str]]:
    import torch

    slides = measure_slides(study, outlook.cohort, settings)
    network, note = _encoder(request, settings, outlook)
    encoder = measure_encoder(network, settings) if network is not None else None
    mean = round(sum(slides.tiles.values()) / max(len(slides.tiles), 1))
    steps: dict[str, float] = {}
    if encoder is not None and {"compare", "evaluate"} & set(request.stages):
        steps = measure_aggregators(_methods(request, settings), encoder.dim, mean, settings)
    engine = settings.engine
    processes = num_cores() if engine.workers is None else max(engine.workers, 1)
    if engine.batch.kind != "none":
        processes = engine.batch.jobs
    return Measures(slides, encoder, steps, processes, torch.cuda.is_available()), [note] if note else []


def _encoder(request: Request, settings: StudySettings, outlook: Outlook) -> tuple[Any, str]:
    """The encoder to measure with, or why there is none."""
    from selfvitmil.encoder import load_encoder

    source = next(iter(outlook.sources.values()), None)  # none where no encoder is asked for
    if not request.trains_encoder and source is not None and not Path(source).exists():
        return None, f"note: {source} is not on this disk, and a plan fetches nothing: its rate is not known"
    try:
        if source is not None and (Path(source, "config.json").exists() or Path(source).is_file()):
            return load_encoder(source, layout=settings.embed.layout), ""
        return _untrained(settings), ""
    except SelfVitMilError as error:
        return None, f"note: the encoder cannot be measured: {error}"


def _untrained(settings: StudySettings) -> Any:
    """The network that would be trained; from scratch where its first weights are not at hand."""
    from selfvitmil.pretrain.learner import start_encoder

    pretrain = settings.pretrain
    if pretrain.init != "scratch" and not Path(pretrain.init).exists():
        pretrain = pretrain.model_copy(update={"init": "scratch"})
    return start_encoder(pretrain, settings.tile.size_px, 0)


def _methods(request: Request, settings: StudySettings) -> list[str]:
    if request.one_method:
        return [settings.train.aggregator]
    rows = compared_methods(settings, two_scales=bool(settings.tile.parent_mpp))
    return list(dict.fromkeys(row.method for row in rows))


# ---------------------------------------------------------------------------------------------------- reckoning


@dataclass(frozen=True)
class Estimate:
    """What one stage takes."""

    stage: str
    seconds: float = 0.0
    """NaN where it is not known."""
    disk: float = 0.0
    """Bytes that it adds."""
    memory: float = 0.0
    """Bytes that it needs at once; of the GPU where it computes there."""
    basis: str = ""
    """`measured`, `reckoned` or `usual`; empty where nothing is to do."""
    on_gpu: bool = False
    counts_gpu: bool = False
    """Whether there is a GPU, and so a column for its hours."""

    @property
    def cells(self) -> tuple[str, ...]:
        """For the table, from disk on."""
        if not self.basis or math.isnan(self.seconds):
            return ("", "", "", *[""] * self.counts_gpu, self.basis)
        hours = f"{self.seconds / 3600:.2f}" if self.on_gpu else ""
        memory = f"{'GPU ' * self.on_gpu}{size(self.memory)}"
        return (size(self.disk), memory, duration(self.seconds), *[hours] * self.counts_gpu, self.basis)


@dataclass(frozen=True)
class _Reckoning:
    """From what was measured to what each stage takes: a method per stage, named after it."""

    request: Request
    settings: StudySettings
    outlook: Outlook
    measures: Measures

    def of(self, stage: StageOutlook) -> Estimate:
        idle = stage.stage in ("check", "tile", "pretrain", "embed", "lesions") and not stage.todo
        return self._estimate(stage.stage) if idle else getattr(self, f"_{stage.stage}")(stage.todo)

    def _estimate(self, stage: str, *numbers: float, basis: str = "", on_gpu: bool = False) -> Estimate:
        return Estimate(stage, *numbers, basis=basis, on_gpu=on_gpu, counts_gpu=self.measures.gpu)

    def _tiles(self, slides: Iterable[str]) -> int:
        return sum(self.measures.slides.tiles.get(slide, 0) for slide in slides)

    def _beside(self, rate: float) -> float:
        """Tiles a second of a network and those who read for it: beside each other on a GPU, by turns on a CPU."""
        reading = self.measures.slides.read_per_s * self.measures.processes or math.inf
        return min(rate, reading) if self.measures.gpu else 1 / (1 / rate + 1 / reading)

    @property
    def _workers_bytes(self) -> float:
        return self.measures.processes * WORKER_BYTES

    def _check(self, todo: Sequence[str]) -> Estimate:
        rate = self.measures.slides.read_per_s
        seconds = len(todo) * (CHECKED_TILES / rate if rate else 1.0) / self.measures.processes
        return self._estimate(
            "check", seconds, len(todo) * BYTES_PER_SLIDE["check"], self._workers_bytes, basis="reckoned"
        )

    def _tile(self, todo: Sequence[str]) -> Estimate:
        tiles, tile, slides = self._tiles(todo), self.settings.tile, self.measures.slides
        disk = tiles * BYTES_PER_TILE["tile"] + len(todo) * BYTES_PER_SLIDE["tile"]
        seconds = len(todo) * slides.tile_s
        if tile.pack:
            disk += tiles * BYTES_PER_TILE["pack"] * (tile.size_px / 224) ** 2
            seconds += tiles / slides.read_per_s if slides.read_per_s else 0.0
        return self._estimate("tile", seconds / self.measures.processes, disk, self._workers_bytes, basis="measured")

    def _pretrain(self, todo: Any) -> Estimate:
        """All encoders that are still to be trained, one after the other."""
        each = [self._one_encoder(run) for run in self.outlook.runs if run.name in todo]
        seconds, disk = sum(one.seconds for one in each), sum(one.disk for one in each)
        return replace(each[0], seconds=seconds, disk=disk, memory=max(one.memory for one in each))

    def _one_encoder(self, run: EncoderRun) -> Estimate:
        from selfvitmil.pretrain.checkpoint import read_metrics
        from selfvitmil.pretrain.feed import Order
        from selfvitmil.pretrain.learner import patch_px_of, settle_numbers
        from selfvitmil.pretrain.recipes import recipes_of

        own, encoder, gpu = self.settings.pretrain, self.measures.encoder, self.measures.gpu
        counts = tuple(count for row in run.rows if (count := self._tiles([row.slide])))
        if encoder is None or not counts:
            return self._estimate("pretrain", math.nan, basis="not known", on_gpu=gpu)
        order = Order(counts, own.batch, own.seed, own.sampler, own.tiles_per_slide, own.resample)
        numbers = settle_numbers(own, sum(counts), max(order.steps_per_epoch, 1))
        done = read_metrics(Path(self.outlook.sources[run.name]))
        steps = max(numbers.total_steps - (done[-1]["step"] + 1 if done else 0), 0)
        network = _untrained(self.settings)
        recipes = recipes_of(own, self.settings.tile.size_px, patch_px_of(network.backbone))
        rate, basis = self._training_rate(network, numbers, recipes, done)
        seconds = steps * own.batch / rate
        # Of every weight: itself, its gradient, Adam's two averages and the teacher's, 4 bytes each.
        weights = encoder.num_weights + 3 * own.head_width**2 + own.chosen("bottleneck") * numbers.out_dim
        at_once = own.batch / own.accumulate if gpu else own.batch  # a CPU may take the parts side by side
        kept = at_once * encoder.activations([recipe.size_px for recipe in recipes])
        memory = 20 * weights + kept * ACTIVATION_BYTES * (1 if gpu else 2)
        tile_bytes = 3 * sum(counts) * self.settings.tile.size_px**2
        memory += tile_bytes if tile_bytes <= own.keep_gb * 1e9 and not gpu else 0
        disk = 4 * encoder.num_weights + 16 * weights
        return self._estimate("pretrain", seconds, disk, memory, basis=basis, on_gpu=gpu)

    def _training_rate(self, network: Any, numbers: Any, recipes: Any, done: Sequence[Any]) -> tuple[float, str]:
        """Tiles a second: of the run so far, of a step or two, or by the encoder's rate where those would take long."""
        from selfvitmil.pretrain.learner import gflop_per_tile

        own, encoder = self.settings.pretrain, self.measures.encoder
        assert encoder is not None
        if done:
            return float(done[-1]["tiles_per_s"]), "measured"
        reckoned = TRAINING_EFFICIENCY * encoder.gflops / gflop_per_tile(network, own, recipes, numbers.out_dim)
        part = min(own.batch // own.accumulate, int(reckoned * STEP_S))
        if part >= 2 and (rate := measure_training(network, self.settings, numbers, recipes, part)) is not None:
            return self._beside(rate), "measured"
        return self._beside(reckoned), "reckoned"

    def _embed(self, todo: Sequence[str]) -> Estimate:
        tiles, encoder, gpu = self._tiles(todo), self.measures.encoder, self.measures.gpu
        if encoder is None:
            return self._estimate("embed", math.nan, basis="not known", on_gpu=gpu)
        number = len(self.outlook.sources)  # every encoder on every slide
        disk = number * (tiles * (2 * encoder.dim + BYTES_PER_TILE["embed"]) + len(todo) * BYTES_PER_SLIDE["embed"])
        pixels = 3 * self.settings.tile.size_px**2
        one_block = encoder.activations([self.settings.tile.size_px]) / max(encoder.depth, 1)
        memory = 4 * encoder.num_weights + self.settings.embed.batch * (5 * pixels + 40 * one_block)
        seconds = number * tiles / self._beside(encoder.tiles_per_s)
        return self._estimate("embed", seconds, disk, memory, basis="measured", on_gpu=gpu)

    def _learn(self, stage: str) -> Estimate:
        """Every method on every split with every seed, as if none ended early."""
        from selfvitmil.aggregate.recipes import recipe_of

        cohort, train, encoder, gpu = self.outlook.cohort, self.settings.train, self.measures.encoder, self.measures.gpu
        if encoder is None:
            return self._estimate(stage, math.nan, basis="not known", on_gpu=gpu)
        one_split = train.split in ("auto", "given") and any(row.split for row in cohort.rows)
        trainings = train.seeds * (1 if one_split else train.folds)
        bags = len(cohort.select(split="train")) if one_split else len(cohort)
        plain = train.model_copy(update={"options": {}})  # options change no number of epochs, and not all have them
        a_bag = sum(recipe_of(method, plain).epochs * step_s for method, step_s in self.measures.steps_s.items())
        largest = max(self.measures.slides.tiles.values(), default=0) * encoder.dim * 4
        disk = trainings * len(self.measures.steps_s) * MODEL_BYTES
        return self._estimate(
            stage, trainings * bags * a_bag, disk, 3 * largest + 1e9, basis="reckoned, at most", on_gpu=gpu
        )

    def _compare(self, todo: Any) -> Estimate:
        return self._learn("compare")

    def _evaluate(self, todo: Any) -> Estimate:
        if self.request.one_method:
            return self._learn("evaluate")
        return self._estimate("evaluate", EVALUATE_S, 1e6, 1e9, basis="usual")  # its models come from the comparison

    def _localize(self, todo: Any) -> Estimate:
        rows = self.outlook.cohort.rows
        slides = [row.slide for row in rows if row.split in self.settings.localize.parts] or [row.slide for row in rows]
        disk = self._tiles(slides) * BYTES_PER_TILE["localize"] + len(slides) * BYTES_PER_SLIDE["localize"]
        seconds = len(slides) * LOCALIZE_S / self.measures.processes
        return self._estimate("localize", seconds, disk, self._workers_bytes, basis="usual")

    def _lesions(self, todo: Sequence[str]) -> Estimate:
        methods, rows = max(len(self.measures.steps_s), 1), self.outlook.cohort.rows
        slides = [row.slide for row in rows if row.split in ("test", "val", None)]
        disk = methods * self._tiles(slides) * BYTES_PER_TILE["map"]
        return self._estimate("lesions", methods * len(slides) * LESIONS_S, disk, 1e9, basis="usual")

    def _report(self, todo: Any) -> Estimate:
        return self._estimate("report", REPORT_S, REPORT_BYTES, 1e9, basis="usual")


# ---------------------------------------------------------------------------------------------------- words


def size(number: float) -> str:
    """Bytes in words: `3.2 GB`."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if number >= factor:
            return f"{number / factor:.1f} {unit}"
    return f"{number / 1e3:.0f} kB"


def _basis_lines(measures: Measures) -> list[str]:
    slides, encoder = measures.slides, measures.encoder
    total = sum(slides.tiles.values())
    counted = f"estimated from {slides.num_sampled} slides looked at" if slides.num_estimated else "counted"
    lines = [f"{len(slides.tiles)} slides, {total:,} tiles ({counted})"]
    if slides.read_per_s:
        lines.append(f"measured: one process reads {slides.read_per_s:,.0f} tiles/s; {measures.processes} are used")
    if encoder is not None:
        place = "GPU" if measures.gpu else "CPU"
        lines.append(
            f"measured: the encoder ({encoder.num_weights / 1e6:.1f} million weights, vectors of {encoder.dim}) makes "
            f"{encoder.tiles_per_s:,.1f} vectors/s on the {place}"
        )
    return lines


def _totals(study: Path, estimates: Sequence[Estimate], measures: Measures) -> list[str]:
    known = [each for each in estimates if not math.isnan(each.seconds)]
    unknown = [each.stage for each in estimates if math.isnan(each.seconds)]
    besides = f", and {' and '.join(unknown)} besides" if unknown else ""
    gpu = sum(each.seconds for each in known if each.on_gpu)
    hours = f", {gpu / 3600:.1f} GPU-hours of it" if measures.gpu else "; no GPU was found"
    lines = [f"in all about {duration(sum(each.seconds for each in known))}{hours}{besides}"]
    place = study.absolute()
    while not place.exists():
        place = place.parent
    disk, free = sum(each.disk for each in estimates), shutil.disk_usage(place).free
    lines.append(f"disk: {size(disk)} needed, {size(free)} free{'' if free > 1.1 * disk else ': NOT ENOUGH'}")
    return [*lines, *filter(None, map(_memory_line, estimates))]


def _memory_line(each: Estimate) -> str:
    """Whether a stage is too large for the machine, and what makes it smaller; empty where it is not."""
    import torch

    there = torch.cuda.get_device_properties(0).total_memory if each.on_gpu else memory_bytes()
    if each.memory <= there:
        return ""
    how = "fewer --workers"
    if each.stage == "pretrain":
        how = f"--pretrain.accumulate {1 << math.ceil(math.log2(each.memory / there))}, which changes no result"
    elif each.stage == "embed":
        how = "a smaller --embed.batch"
    return f"memory: {each.stage} needs about {size(each.memory)}, {size(there)} are there: NOT ENOUGH; use {how}"
